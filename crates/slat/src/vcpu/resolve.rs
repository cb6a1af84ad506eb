//! Step 2 of a fault, outside of any guard: the host is asked for the frame, and the page-table pages
//! that step 3 may link are allocated.

use super::Fault;
use super::plan::{Found, InstallPlan};
use super::timing::Timing;
use crate::addr::{Access, Level, Pfn};
use crate::error::{FaultError, OutOfMemory};
use crate::exit::{Exit, Outcome};
use crate::format::Format;
use crate::host::{AllocationWait, Host, Resolved, Unresolved};
use crate::operation::Operation;
use crate::second_stage::install::NewLeaf;
use crate::slot::view::SlotView;
use crate::slot::{MemoryAttributes, MemoryRegionFlags};
use crate::stats::Counter;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::pte::State;

/// Asks `host` by `resolve` for a frame that allows `access`. `timing` is that of a fault in the
/// sample.
#[inline(always)]
pub(super) fn ask<H: Host>(
    host: &H,
    access: Access,
    timing: Option<&mut Timing>,
    resolve: impl FnOnce() -> Result<Resolved, Unresolved>,
) -> Result<Resolved, Unresolved> {
    let resolved = match timing {
        None => resolve(),
        Some(timing) => timing.time_resolve(host, resolve),
    }?;
    let is_allowed = match access {
        Access::Read => true,
        Access::Write => resolved.writable,
        Access::Execute | Access::ExecuteUser => resolved.attributes.execute.permits(access),
    };
    if is_allowed { Ok(resolved) } else { Err(Unresolved::Mmio) }
}

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Step 2: asks the host for a frame that allows the access, unless the look has done so.
    #[inline]
    pub(super) fn resolve(&mut self, plan: &InstallPlan<'_, H::Backing, F>) -> Result<Resolved, Unresolved> {
        if let Some(answer) = plan.answer {
            return answer;
        }
        let host = self.op.host();
        ask(host, self.access, self.timing.as_deref_mut(), || plan.resolve(host, self.gfn, self.access))
    }

    /// Ends a fault for which the host has no frame, or none that allows the access. If that answer
    /// may be out of date, the guest comes back, or user space acts first.
    #[cold]
    #[inline(never)]
    pub(super) fn unresolved(
        &self,
        found: Found<F>,
        attributes: MemoryAttributes,
        reason: Unresolved,
    ) -> Result<Outcome, FaultError> {
        if !self.is_up_to_date(found, attributes) {
            return self.userfault_outcome();
        }
        match reason {
            Unresolved::Gone => Err(FaultError::BackingGone { gpa: self.gpa }),
            Unresolved::Mmio => {
                self.count(Counter::Exits);
                Ok(Outcome::Exit(Exit::Mmio { gpa: self.gpa, access: self.access }))
            }
        }
    }

    /// The exit of a page whose userfault bit is set; else the guest comes back.
    ///
    /// Never inlined: the exit would lie on the stack of each fault.
    #[cold]
    #[inline(never)]
    pub(super) fn userfault_outcome(&self) -> Result<Outcome, FaultError> {
        let Some(exit) = self.userfault_exit()? else { return Ok(Outcome::Resume) };
        self.count(Counter::Exits);
        self.count(Counter::Userfaults);
        Ok(Outcome::Exit(exit))
    }

    /// Whether nothing has changed since the look, which had `found` and `attributes`. What may
    /// change is the PTE, the ranges in flight, the userfault bit and the attributes. After such a
    /// change the host's answer may be out of date: user space may have taken the page back, for
    /// example, and thrown its contents away.
    #[cold]
    #[inline(never)]
    pub(super) fn is_up_to_date(&self, found: Found<F>, attributes: MemoryAttributes) -> bool {
        let Operation { tree, slots, .. } = self.op;
        let guard = self.op.pin();
        let mut cursor = Cursor::new(tree, &guard, self.gfn);
        // In the order of `look`. A change that is over has left another sequence number.
        let (value, state) = cursor.descend_to_lowest();
        let is_same = match found {
            Found::Empty(seq) => state == State::Empty(seq),
            Found::Forbidding(leaf, seq) => value == leaf && tree.current_seq() == seq,
            Found::Lacking(_) => unreachable!("no frame is asked for"),
        };
        let is_free = is_same && tree.in_flight.free_level(self.gfn, cursor.level()).is_some();
        let slot = if is_free { slots.find(&guard, self.gfn) } else { None };
        let is_asked_for =
            |slot: &SlotView<'_, H::Backing>| slot.may_use(self.gfn) && slot.attributes_of(self.gfn) == attributes;
        let is_up_to_date = slot.as_ref().is_some_and(is_asked_for);
        if !is_up_to_date {
            self.count(Counter::Retries);
        }
        is_up_to_date
    }

    /// Prepares the installation of what the host has `resolved`: the leaf, the page-table pages
    /// for it, and the flush that must precede it. In a memslot with a guest_memfd it may span
    /// `largest`, as far as the attributes are alike.
    #[inline]
    pub(super) fn prepare(
        &mut self,
        plan: &mut InstallPlan<'_, H::Backing, F>,
        resolved: Resolved,
        largest: Level,
    ) -> Result<NewLeaf, FaultError> {
        if plan.flags.contains(MemoryRegionFlags::GUEST_MEMFD) {
            plan.max_level = self.limit_to_alike(plan.max_level.min(largest));
        }
        self.flush_before_make(plan);
        let leaf = self.leaf(plan, self.gfn, resolved)?;
        if self.is_another_frame(plan, &leaf) {
            return Err(FaultError::BadResolve { gpa: self.gpa });
        }
        self.top_up_for(plan, &leaf)?;
        Ok(leaf)
    }

    /// Flushes what CPUs may have cached of the PTE, if nothing may be installed there before that.
    #[inline]
    pub(super) fn flush_before_make(&self, plan: &InstallPlan<'_, H::Backing, F>) {
        if F::BREAK_BEFORE_MAKE && matches!(plan.found, Found::Empty(seq) if seq.is_unflushed()) {
            self.op.flush(&[self.gfn.block(plan.level)]);
        }
    }

    /// Allocates the page-table pages that step 3 may link to install `leaf`.
    #[inline]
    pub(super) fn top_up_for(
        &mut self,
        plan: &InstallPlan<'_, H::Backing, F>,
        leaf: &NewLeaf,
    ) -> Result<(), OutOfMemory> {
        match plan.found {
            // The part is split off, one level at a time.
            Found::Forbidding(value, _) if plan.level > leaf.level => {
                self.top_up(1, self.op.tree.encoding.frame(value, plan.level))
            }
            _ => self.top_up(usize::from(plan.level.0 - leaf.level.0), leaf.pfn),
        }
    }

    /// Allocates the page-table pages that step 3 may link for the memory at `pfn`.
    #[inline]
    pub(super) fn top_up(&mut self, nr_tables: usize, pfn: Pfn) -> Result<(), OutOfMemory> {
        if nr_tables == 0 {
            return Ok(());
        }
        let Tree { host, config, .. } = self.op.tree;
        let node = config.table_placement.node_for(host, Some(pfn));
        if self.tables.has(nr_tables, node) {
            return Ok(());
        }
        self.tables
            .top_up(self.op.tree, self.op.stats(), nr_tables, node, AllocationWait::Allowed)
            .map_err(|()| OutOfMemory)
    }
}
