//! The faults that are the most by far: on a page of 4 KiB whose page-table page is there. Either
//! nothing is mapped yet, or the leaf lacks nothing but W, or is tracked, or lacks nothing.
//!
//! # Guarantees
//! Those of each fault (`vcpu`). What such a fault does not settle is left to
//! [`Fault::go_on`], and so are VMs with fault-around. In a VM with a lock, the leaf is installed
//! inside the lock, and access is restored by `go_on`.
//!
//! # Use
//! `Vcpu::handle_fault` begins with [`SmallFault::serve`].
//!
//! # Implementation
//! The steps are those of each fault: look, resolve, act. But there is no plan to interpret, and all
//! levels are constants. To act, the fault does not walk again: it keeps the PTE that its look has
//! found ([`PteRef::keep`](crate::table::pte_ref::PteRef::keep)). If a page-table page was retired
//! meanwhile, anywhere in the tree, it does walk.
//!
//! # Why it is correct
//! A second walk can find another PTE for the page only if the page-table page was unlinked. What
//! has unlinked it retires it before it withdraws its range, and it is not retired yet. So that
//! range was in flight after the look, which did not find it: the look read the PTE before it was
//! visited. If the exchange comes before the visit, the leaf is zapped; if it comes after, the
//! number differs. A recovery freezes the PTE before it unlinks the page-table page, and keeps what
//! it finds there (`models/proofs/invalidation.py`, step `act_there`).

use super::plan::{self, Found};
use super::resolve::ask;
use super::timing::Timing;
use super::{Fault, Look, NEEDS_PAGE_STATE};
use crate::addr::{Access, Gfn, Level};
use crate::config::FaultAround;
use crate::dirty::log;
use crate::dirty::ring::DirtyRing;
use crate::error::FaultError;
use crate::exit::Outcome;
use crate::format::Format;
use crate::host::{Host, Resolved, Unresolved};
use crate::operation::Operation;
use crate::second_stage::install::{self, NewLeaf, Rights};
use crate::slot::view::SlotView;
use crate::slot::{MemoryAttributes, MemoryRegionFlags};
use crate::stats::Counter;
use crate::sync::{Side, record};
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Changed, Cleaner, PteRef};
use crate::table::retire::{Exclusive, FaultPin, Guard};

/// What became of a fault that may be a small one.
pub(super) enum Small {
    /// The guest goes on.
    Done,
    /// It is another fault. Nothing has changed.
    Other,
    /// The same, because there is no page-table page for the page.
    NoTable,
    /// The PTE changed during the fault.
    Overtaken,
    /// The host has no frame for the page, or none that allows the access. The page had these
    /// attributes, and its PTE is empty with this number.
    Unresolved(InvalidationSeq, MemoryAttributes, Unresolved),
    Failed(FaultError),
}

/// A fault that may be a small one. Unlike a [`Fault`], it is copied into functions that are not
/// inlined, so that its fields stay in registers.
pub(super) struct SmallFault<'v, H: Host, F: Format> {
    pub(super) op: Operation<'v, H, F>,
    pub(super) ring: Option<&'v DirtyRing>,
    pub(super) gfn: Gfn,
    pub(super) access: Access,
}

impl<H: Host, F: Format> SmallFault<'_, H, F> {
    /// Serves the fault, if it is a small one. `timing` is that of a fault in the sample.
    // In one piece: the order of the reads is the protocol.
    #[inline(always)]
    pub(super) fn serve(self, own: Exclusive<'_>, timing: Option<&mut Timing>) -> Small {
        let Operation { tree, slots, .. } = self.op;
        let Exclusive { mut pin, hazard } = own;
        if tree.config.fault_around != FaultAround::Off || self.ring.is_some_and(DirtyRing::is_soft_full) {
            return Small::Other;
        }
        pin.check_epochs(tree.epochs.id());
        slots.check_epochs(tree.epochs.id());
        let guard = pin.reborrow().open();
        record!(FaultLooks { gfn: self.gfn.0 });
        let Some((cursor, value)) = Cursor::at_small(tree, &guard, self.gfn) else { return Small::no_table() };
        if self.writes() && cursor.is_protected() {
            return Small::Other;
        }
        let pte = cursor.pte_at(Level::L4K);
        let seen = match value.state(Level::L4K) {
            State::Empty(seen) if !(F::BREAK_BEFORE_MAKE && seen.is_unflushed()) => Some(seen),
            State::Leaf if self.writes() && !value.has(F::WRITABLE) && value.has(F::HOST_WRITABLE) => None,
            State::Leaf if self.is_allowed_by(value) && value.is_marked(self.access) => {
                self.op.stats().count(Counter::Spurious);
                return Small::Done;
            }
            State::Tracked if !self.writes() || value.is_host_writable() => None,
            _ => return Small::Other,
        };
        // The PTE first, then the ranges in flight and the memslot: see
        // `table/invalidation_seq.rs`.
        if tree.in_flight.free_level(self.gfn, Level::L4K).is_none() {
            return Small::Other;
        }
        // SAFETY: the pin and the memslots are of the same tree: both were checked.
        let Some(slot) = (unsafe { slots.find_unchecked(&guard, self.gfn) }) else { return Small::Other };
        let (flags, page) = (slot.flags(), self.gfn.0 - slot.range().start.0);
        let attributes = if flags.intersects(NEEDS_PAGE_STATE) {
            let Some(attributes) = self.check_page_state(&slot) else { return Small::Other };
            attributes
        } else {
            MemoryAttributes::empty()
        };
        let Some(seen) = seen else {
            if tree.is_locked() {
                return Small::Other;
            }
            return Small::of(self.restore(&guard, pte, value, &slot));
        };
        let backing = slot.keep_for_resolve(hazard);
        // SAFETY: the walk has reached it in the guard, and the operation keeps the tree.
        let kept = unsafe { pte.keep(&guard) };
        drop(guard);
        let resolve = || backing.resolve(&tree.host, attributes, self.gfn, page, self.access);
        let resolved = match ask(&tree.host, self.access, timing, resolve) {
            Ok(resolved) => resolved,
            Err(reason) => return Small::Unresolved(seen, attributes, reason),
        };
        let (leaf, rights) = match self.leaf(Level::L4K, flags, resolved) {
            Ok(leaf) => leaf,
            Err(error) => return Small::Failed(error),
        };
        // SAFETY: the pin has opened the first guard.
        let installed =
            if let Some(again) = (!tree.is_locked()).then(|| unsafe { kept.reopen(pin.reborrow()) }).flatten() {
                // SAFETY: the leaf was made for 4 KiB, and such a PTE was kept.
                unsafe { self.install(again.guard(), again.pte(Cleaner::new(&tree.host)), seen, leaf, rights) }
            } else {
                // SAFETY: the leaf was made for 4 KiB.
                unsafe { self.install_by_a_walk(pin, seen, leaf, rights) }
            };
        Small::of(installed)
    }

    /// The leaf of `level` for what the host has resolved in a memslot with `flags`, and its rights.
    #[inline(always)]
    pub(super) fn leaf(
        self,
        level: Level,
        flags: MemoryRegionFlags,
        resolved: Resolved,
    ) -> Result<(Pte<F>, Rights), FaultError> {
        let Tree { config, encoding, .. } = self.op.tree;
        if !encoding.has_room_for(resolved.pfn) {
            return Err(FaultError::BadResolve { gpa: self.gfn.gpa() });
        }
        let Some(attributes) = encoding.supported(resolved.attributes) else {
            return Err(plan::unsupported(self.gfn, resolved.attributes));
        };
        let rights = plan::rights(config, flags, self.access, &resolved, level);
        let leaf = NewLeaf { pfn: resolved.pfn, level, rights, attributes, used: Some(self.access) };
        Ok((leaf.pte(encoding, config.access_tracking), rights))
    }

    /// Installs `leaf` with `rights` in `pte`, if that is still empty with the number `seen`.
    ///
    /// # Safety
    /// `leaf` is a leaf of the level of `pte`.
    #[inline(always)]
    pub(super) unsafe fn install(
        self,
        guard: &Guard<'_>,
        pte: PteRef<'_, F>,
        seen: InvalidationSeq,
        leaf: Pte<F>,
        rights: Rights,
    ) -> Result<(), Changed> {
        let Operation { tree, slots, participant, .. } = self.op;
        let level = pte.level();
        // SAFETY: a PTE with a number is empty, and the leaf is of this level, as the caller promises.
        unsafe { pte.install(&participant.stats, Pte::empty(seen), leaf)? }
        let marks = self.writes() || tree.config.first_write_faults(level);
        if rights == Rights::Writable && marks {
            log::mark_leaf_if_logging(slots, guard, self.ring, self.gfn, level);
        }
        Ok(())
    }

    /// As [`install`](Self::install), where something was retired since the look, or inside the VM's
    /// lock.
    ///
    /// # Safety
    /// `leaf` is a leaf of 4 KiB.
    #[inline(never)]
    unsafe fn install_by_a_walk(
        self,
        pin: FaultPin<'_>,
        seen: InvalidationSeq,
        leaf: Pte<F>,
        rights: Rights,
    ) -> Result<(), Changed> {
        let tree = self.op.tree;
        let locked = tree.pin_fault(pin, self.op.participant, Side::Read);
        let guard = &locked.guard;
        let (cursor, value) = Cursor::at_small(tree, guard, self.gfn).ok_or(Changed)?;
        if value != Pte::empty(seen) || (self.writes() && cursor.is_protected()) {
            return Err(Changed);
        }
        // SAFETY: as the caller promises, and the PTE is one of 4 KiB.
        unsafe { self.install(guard, cursor.pte_at(Level::L4K), seen, leaf, rights) }
    }

    #[inline(always)]
    pub(super) fn writes(self) -> bool {
        self.access == Access::Write
    }

    /// Whether the leaf `value`, which is not tracked, allows the access.
    #[inline(always)]
    fn is_allowed_by(self, value: Pte<F>) -> bool {
        match self.access {
            Access::Read => true,
            Access::Write => value.has(F::WRITABLE),
            Access::Execute | Access::ExecuteUser => value.may_execute(self.access),
        }
    }

    /// The attributes of the page, in a memslot where user space restricts what a fault may map.
    /// `None`: the fault may not map it.
    #[cold]
    #[inline(never)]
    fn check_page_state(self, slot: &SlotView<'_, H::Backing>) -> Option<MemoryAttributes> {
        let exits = if self.writes() { MemoryRegionFlags::READONLY } else { MemoryRegionFlags::empty() };
        let may_map = !slot.flags().intersects(exits | MemoryRegionFlags::PINNED) && slot.may_use(self.gfn);
        may_map.then(|| slot.attributes_of(self.gfn))
    }

    /// Restores access through the leaf `value` in `pte`, and marks the page if it may be written
    /// now. Its memslot is `slot`.
    #[inline(always)]
    fn restore(
        self,
        guard: &Guard<'_>,
        pte: PteRef<'_, F>,
        value: Pte<F>,
        slot: &SlotView<'_, H::Backing>,
    ) -> Result<(), Changed> {
        let Operation { tree, slots, participant, .. } = self.op;
        install::restore_access::<F>(tree.config.access_tracking, pte, value, self.access)?;
        if self.writes() {
            participant.stats.count(Counter::WritesRestored);
            log::mark_page_of(slots, guard, self.ring, slot, self.gfn);
        } else {
            participant.stats.count(Counter::AccessesRestored);
        }
        Ok(())
    }
}

impl<H: Host, F: Format> Clone for SmallFault<'_, H, F> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}

impl<H: Host, F: Format> Copy for SmallFault<'_, H, F> {}

impl Small {
    // Not inlined: it would cost all other faults a register for what they return.
    #[cold]
    #[inline(never)]
    fn no_table() -> Small {
        Small::NoTable
    }

    #[inline]
    fn of(done: Result<(), Changed>) -> Small {
        if done.is_ok() { Small::Done } else { Small::Overtaken }
    }
}

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Goes on with a fault after [`SmallFault::serve`]: with all that are no small ones, and with
    /// small ones that failed.
    pub(super) fn go_on(&mut self, small: Small, own: Exclusive<'_>) -> Result<Outcome, FaultError> {
        let mut next = Look::Lowest;
        match small {
            Small::Done => return Ok(Outcome::Resume),
            Small::Unresolved(seen, attributes, reason) => {
                return self.unresolved(Found::Empty(seen), attributes, reason);
            }
            Small::Failed(error) => return Err(error),
            Small::Overtaken => self.count(Counter::Retries),
            Small::NoTable => next = Look::Block,
            Small::Other => {}
        }
        self.serve(own, next)
    }
}
