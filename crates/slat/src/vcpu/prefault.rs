//! Prefault: maps pages before the guest accesses them. The pages are a range (KVM's
//! `KVM_PRE_FAULT_MEMORY`) or a list, such as the pages that a guest used before its snapshot.
//!
//! Both take the steps of a fault: read the PTE, then what the answer depends on; resolve; install
//! by one compare-and-exchange if the PTE still has its sequence number.
//! - Where a page-table page is missing, it is filled as far as wanted before it is linked. This
//!   costs one exchange instead of 512, for 2 MiB of small pages or 1 GiB of huge ones.
//! - Where the page-table page is there, its pages are mapped as a batch (`batch`).
//! - The host is asked once for frames that follow each other.
//!
//! A new leaf counts as not used: A and D stay clear where CPUs set them. A leaf through which
//! access was restored counts as used.

#![expect(unsafe_code, reason = "prepares the table that is linked then")]

use super::batch::{BATCH_PAGES, Batch, Missing, Run};
use super::{Fault, Found, InstallPlan, Plan, Step, Vcpu};
use crate::addr::{Access, Gfn, GfnRange, Gpa, Level, PAGE_SHIFT, PAGE_SIZE, Pfn};
use crate::dirty::log;
use crate::dirty::ring::DirtyRing;
use crate::error::FaultError;
use crate::format::Format;
use crate::host::{Host, Resolved, Unresolved};
use crate::second_stage::install::{self, NewLeaf, Rights};
use crate::slot::MemoryRegionFlags;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::cursor::{self, Cursor};
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::node::NewPtes;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::{Exclusive, FaultPin, HazardPointer};

impl<H: Host, F: Format> Vcpu<H, F> {
    /// Maps the `size_bytes` bytes from `gpa` on, so that `access` to them does not fault. What is
    /// mapped already stays. Several vCPUs may map parts of a range at once.
    ///
    /// For a write, the pages that it makes writable count as written in a memslot that logs.
    ///
    /// Returns how many bytes from `gpa` on are mapped. If these are not all, a second call with
    /// the rest returns the error.
    ///
    /// # Errors
    /// For the first page:
    /// - [`FaultError::NoMemslot`]: no memslot has it, or it may not be written.
    /// - [`FaultError::Busy`]: an invalidation or a change of its memslot is under way. Try again.
    /// - [`FaultError::DirtyRingFull`]: the vCPU's ring must be reset first.
    /// - [`FaultError::UserfaultPending`]: user space must fetch it first.
    /// - Those of [`handle_fault`](Vcpu::handle_fault).
    ///
    /// For the arguments: [`FaultError::UnalignedAddress`], [`FaultError::BadSize`].
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use slat::error::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::empty());
    /// let mut vcpu = vm.create_vcpu()?;
    /// assert_eq!(vcpu.pre_fault_memory(Gpa(0), 64 * PAGE_SIZE, Access::Write)?, 64 * PAGE_SIZE);
    /// // Pages that the guest used before its snapshot.
    /// assert_eq!(vcpu.pre_fault_pages(&[Gpa(0x5_0000), Gpa(0x7_1000)], Access::Read)?, 2);
    /// assert_eq!((vm.stats().pages_4k(), vm.stats().faults), (66, 0));
    /// // The second half of this range has no memory.
    /// assert_eq!(vcpu.pre_fault_memory(Gpa(0xf_f000), 2 * PAGE_SIZE, Access::Read)?, PAGE_SIZE);
    /// let nothing = FaultError::NoMemslot { gpa: Gpa(1 << 20) };
    /// assert_eq!(vcpu.pre_fault_memory(Gpa(1 << 20), PAGE_SIZE, Access::Read), Err(nothing));
    /// # Ok(())
    /// # }
    /// ```
    pub fn pre_fault_memory(&mut self, gpa: Gpa, size_bytes: u64, access: Access) -> Result<u64, FaultError> {
        if !gpa.is_page_aligned() {
            return Err(FaultError::UnalignedAddress { gpa });
        }
        if size_bytes == 0 || size_bytes % PAGE_SIZE != 0 {
            return Err(FaultError::BadSize { size_bytes });
        }
        let range = GfnRange::new(gpa.gfn(), size_bytes >> PAGE_SHIFT);
        let mut next = range.start;
        while next < range.end {
            let result = self.fault(next.gpa(), access).and_then(|(mut fault, mut own)| {
                let nr_pages = (range.end.0 - next.0) as usize;
                let page = move |index| Gfn(next.0 + index as u64);
                match fault.pre_fault_batch(own.hazard.reborrow(), nr_pages, page) {
                    0 => fault.pre_fault(own, range.end),
                    nr_pages => Ok(Gfn(next.0 + nr_pages as u64)),
                }
            });
            next = match result {
                Ok(next) => next,
                Err(error) if next == range.start => return Err(error),
                Err(_) => break,
            };
            if self.vm.tree.host.should_yield() {
                self.vm.tree.host.yield_now();
            }
        }
        Ok((next.0.min(range.end.0) - range.start.0) << PAGE_SHIFT)
    }
}

impl<H: Host, F: Format> Vcpu<H, F> {
    /// Maps the pages that contain the addresses `pages`, in their order, so that `access` to them
    /// does not fault. It does for a list what [`pre_fault_memory`](Vcpu::pre_fault_memory) does
    /// for a range. Sorted lists are fastest.
    ///
    /// Returns how many pages, from the first on, are mapped. If these are not all, a second call
    /// with the rest returns the error.
    ///
    /// # Errors
    /// For the first page: those of [`pre_fault_memory`](Vcpu::pre_fault_memory).
    pub fn pre_fault_pages(&mut self, pages: &[Gpa], access: Access) -> Result<usize, FaultError> {
        let mut done = 0;
        while let Some(&page) = pages.get(done) {
            let result = self.fault(page, access).and_then(|(mut fault, mut own)| {
                let rest = &pages[done..];
                let page_at = move |index: usize| rest[index].gfn();
                match fault.pre_fault_batch(own.hazard.reborrow(), rest.len(), page_at) {
                    0 => fault.pre_fault(own, Gfn(page.gfn().0 + 1)).map(|_| 1),
                    nr_pages => Ok(nr_pages),
                }
            });
            match result {
                Ok(nr_pages) => done += nr_pages,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            if self.vm.tree.host.should_yield() {
                self.vm.tree.host.yield_now();
            }
        }
        Ok(done)
    }
}

impl<H: Host, F: Format> Fault<'_, H, F> {
    /// Maps pages of one memslot that need only leaves of 4 KiB in page-table pages that are there.
    /// There are `nr_pages` candidates from `page(0)` on, which is this fault's page. Returns how
    /// many from the first on are mapped.
    ///
    /// Never inlined: its batch would be on the stack of the rest of a prefault.
    #[inline(never)]
    fn pre_fault_batch(
        &mut self,
        hazard: HazardPointer<'_>,
        nr_pages: usize,
        page: impl Fn(usize) -> Gfn + Copy,
    ) -> usize {
        let tree = self.op.tree;
        let access = self.access;
        if self.is_ring_full() {
            return 0;
        }
        let guard = self.op.pin();
        let mut cursor = Cursor::new(tree, &guard, self.gfn);
        if cursor.move_to_pte(self.gfn, Level::L4K).is_none() {
            return 0;
        }
        let mut batch = Batch::<_, F, BATCH_PAGES>::new(access, Missing::Stop, page);
        for gfn in (0..nr_pages.min(BATCH_PAGES)).map(page) {
            if !tree.whole().contains(gfn) {
                break;
            }
            let Some(pte) = cursor.move_to_pte(gfn, Level::L4K) else { break };
            if access == Access::Write && cursor.is_protected() {
                break;
            }
            let value = pte.load();
            match value.state(Level::L4K) {
                State::Empty(seq) if !seq.is_unflushed() => batch.push(Some(seq)),
                State::Leaf if access != Access::Write || value.is_writable() => batch.push(None),
                _ => break,
            }
        }
        let Some(is_free) = self.free_pages() else { return 0 };
        batch.retain(is_free);
        let Some(plan) = self.plan_batch(&guard, hazard, &mut batch) else { return 0 };
        drop(guard);
        if access == Access::Write && plan.flags.contains(MemoryRegionFlags::READONLY) {
            return 0;
        }
        self.make_leaves(&mut batch, |gfn| {
            let resolved = plan.resolve(&tree.host, gfn, access).ok()?;
            let leaf = self.leaf(&plan, gfn, resolved).ok()?;
            Some((resolved, leaf))
        });
        let locked = self.op.pin_locked(Side::Read);
        self.install_batch(&locked.guard, &mut batch, plan.slot);
        batch.nr_pages()
    }

    /// Maps the page of this fault, and those after it below `end` that one step covers. Returns
    /// the first page that is not done.
    fn pre_fault(&mut self, mut own: Exclusive<'_>, end: Gfn) -> Result<Gfn, FaultError> {
        loop {
            if self.is_ring_full() {
                return Err(FaultError::DirtyRingFull { gpa: self.gpa });
            }
            let changed = match self.look(own.pin.reborrow(), own.hazard.reborrow()) {
                // No marks are set: the guest has not used the page yet.
                Plan::Spurious(level) | Plan::SetMarks(level) => return Ok(self.gfn.block(level).end),
                Plan::Exit => return Err(FaultError::NoMemslot { gpa: self.gpa }),
                Plan::UserfaultPending => match self.userfault_exit()? {
                    None => Err(Changed),
                    Some(_) => return Err(FaultError::UserfaultPending { gpa: self.gpa }),
                },
                Plan::BeingInvalidated => return Err(FaultError::Busy { gpa: self.gpa }),
                Plan::Cancel => {
                    self.cancel();
                    Err(Changed)
                }
                Plan::Install(mut plan) => {
                    let resolved = match self.resolve(&plan) {
                        Ok(resolved) => resolved,
                        Err(_) if !self.is_up_to_date(plan.found, plan.attributes) => continue,
                        Err(Unresolved::Gone) => return Err(FaultError::BackingGone { gpa: self.gpa }),
                        Err(Unresolved::Mmio) => return Err(FaultError::NoMemslot { gpa: self.gpa }),
                    };
                    // One level up: the block of the page-table page that such leaves may fill.
                    let leaf = self.prepare(&mut plan, resolved, resolved.max_size.level().up())?;
                    let leaf = NewLeaf { used: None, ..leaf };
                    match (plan.found, self.fillable(&plan, leaf.level, end)) {
                        (Found::Empty(seen), Some(pages)) => match leaf.level {
                            Level::L4K => self.fill::<1>(&plan, seen, pages, leaf, resolved),
                            Level::L2M => self.fill::<2>(&plan, seen, pages, leaf, resolved),
                            _ => self.install_next(own.pin.reborrow(), &plan, leaf),
                        },
                        _ => self.install_next(own.pin.reborrow(), &plan, leaf),
                    }
                }
                // Done, or one step nearer: the next look finds out.
                Plan::OnLeaf(plan) => self.act_on_leaf(&plan)?.map(|_| self.gfn),
                Plan::Served => Ok(self.gfn),
                Plan::LookLower | Plan::StartOver => Err(Changed),
            };
            match changed {
                Ok(next) if next != self.gfn => return Ok(next),
                Ok(_) => {}
                Err(Changed) => self.count(Counter::Retries),
            }
        }
    }

    /// Installs `leaf`. Returns the first page that is not done.
    fn install_next(
        &mut self,
        pin: FaultPin<'_>,
        plan: &InstallPlan<'_, H::Backing, F>,
        leaf: NewLeaf,
    ) -> Result<Gfn, Changed> {
        Ok(match self.install(pin, plan, leaf)? {
            Step::Done => self.gfn.block(leaf.level).end,
            Step::Nearer => self.gfn,
        })
    }

    /// The pages that a new page-table page for leaves of `level` can map, from this fault's page
    /// on. `None` if the page-table page exists, or if a range in flight overlaps its block.
    ///
    /// Leaves may reach beyond `end`, as they may for a fault, but not beyond the memslot. Leaves
    /// that make pages writable do not use the reserve of the ring.
    fn fillable(&self, plan: &InstallPlan<'_, H::Backing, F>, level: Level, end: Gfn) -> Option<GfnRange> {
        // Up to that level, user space allows the same for all pages.
        if level.up() > plan.level.min(plan.max_level) {
            return None;
        }
        let leaf_pages = level.nr_pages();
        let start = self.gfn.align_down(level);
        let max_pages = if plan.may_give_write(self.access) {
            self.max_opened().saturating_sub(u64::from(DirtyRing::RESERVE))
        } else {
            u64::MAX
        };
        let last =
            Gfn(end.0 - 1).block(level).end.min(plan.slot.end.align_down(level)).min(self.gfn.block(level.up()).end);
        let nr_pages = (last.0 - start.0).min(max_pages) & !(leaf_pages - 1);
        // This fault's own leaf fits.
        Some(GfnRange::new(start, nr_pages.max(leaf_pages)))
    }

    /// Maps `pages` by a page-table page that is filled before it is linked, with leaves of
    /// `LEVEL`. The level is a constant, because it is used 512 times. `first` and `resolved` are
    /// those of this fault's page. Returns the first page that is not mapped.
    // In one piece: the closure that makes the PTEs changes what the end of the call uses.
    fn fill<const LEVEL: u8>(
        &mut self,
        plan: &InstallPlan<'_, H::Backing, F>,
        seen: InvalidationSeq,
        pages: GfnRange,
        first: NewLeaf,
        resolved: Resolved,
    ) -> Result<Gfn, Changed> {
        let tree = self.op.tree;
        let (host, access) = (&tree.host, self.access);
        let (max_opened, tracking) = (self.max_opened(), tree.config.access_tracking);
        let leaf_level = Level(LEVEL);
        let leaf_pages = leaf_level.nr_pages();
        let first_index = cursor::index_of::<F>(pages.start, leaf_level);
        let nr_wanted = (pages.nr_pages() / leaf_pages) as usize;
        // Leaves so far, from the first on.
        let mut nr_known = 0;
        let mut any_writable = false;
        let page = |nth: usize| Gfn(pages.start.0 + nth as u64 * leaf_pages);
        let fill = |ptes: &mut NewPtes<'_, F>| {
            ptes.skip(first_index);
            let mut next = Some((resolved, first));
            while let Some((resolved, leaf)) = next.filter(|(_, leaf)| leaf.level >= leaf_level) {
                let leaf = NewLeaf { level: leaf_level, used: None, ..leaf };
                any_writable |= leaf.rights == Rights::Writable;
                let gfn = page(nr_known);
                let run = Run::new(gfn, resolved, leaf.pte(&tree.encoding, tracking), leaf_level);
                let nr_leaves = ((run.pages.nr_pages() / leaf_pages) as usize).min(nr_wanted - nr_known);
                ptes.push_run(run.leaf, leaf_level, nr_leaves);
                nr_known += nr_leaves;
                let answer = if resolved.max_size.level() == leaf_level {
                    let rest = GfnRange { start: page(nr_known), end: page(nr_wanted) };
                    let (nr_alike, answer) = push_alike::<H, F, LEVEL>(tree, plan, ptes, rest, resolved, leaf, access);
                    nr_known += nr_alike;
                    answer
                } else if nr_known < nr_wanted {
                    plan.resolve(host, page(nr_known), access).ok()
                } else {
                    None
                };
                let leaf_for = |resolved| plan.leaf(tree, max_opened, page(nr_known), access, resolved).ok();
                // A smaller leaf ends it: that needs a page-table page below.
                next = answer.and_then(|resolved| Some((resolved, leaf_for(resolved)?)));
            }
        };
        // The other PTEs inherit the sequence number of the PTE that this page-table page will be
        // linked to.
        let beside = Pte::empty(seen.flushed());
        // SAFETY: leaves and empty PTEs.
        let prepared = unsafe { self.tables.prepare_by(tree, leaf_level, beside, fill) };
        let filled = GfnRange::new(pages.start, nr_known as u64 * leaf_pages);
        let level = leaf_level.up();
        let locked = self.op.pin_locked(Side::Read);
        let mut cursor = Cursor::new(tree, &locked.guard, self.gfn);
        let (value, State::Empty(seq)) = cursor.descend_to_lowest() else { return Err(Changed) };
        if seq != seen || cursor.level() > plan.level || cursor.level() < level {
            if seq != seen {
                self.refine(&locked.guard, plan.level, first.level, first.pfn);
            }
            return Err(Changed);
        }
        let prepared = prepared.with_leaves(filled.nr_pages() / leaf_pages);
        install::link(&cursor, prepared, value, seq, resolved.pfn)?;
        if any_writable && self.marks(leaf_level) {
            log::mark_if_logging(self.op.slots, &locked.guard, self.ring, self.gfn, filled);
        }
        Ok(filled.end)
    }
}

/// Pushes leaves for the pages `rest`, for which the host has frames of their own, as long as its
/// answers differ from `like`, which has made `leaf`, in the frame alone. Returns how many, and
/// the first answer that differs otherwise.
#[inline(always)]
fn push_alike<H: Host, F: Format, const LEVEL: u8>(
    tree: &Tree<H, F>,
    plan: &InstallPlan<'_, H::Backing, F>,
    ptes: &mut NewPtes<'_, F>,
    rest: GfnRange,
    like: Resolved,
    leaf: NewLeaf,
    access: Access,
) -> (usize, Option<Resolved>) {
    let Tree { host, encoding, config, .. } = tree;
    let leaf_level = Level(LEVEL);
    let inside = leaf_level.nr_pages() - 1;
    let without_frame = NewLeaf { pfn: Pfn(0), ..leaf }.pte(encoding, config.access_tracking);
    let mut nr_leaves = 0;
    let mut gfn = rest.start;
    while gfn < rest.end {
        let Ok(resolved) = plan.resolve(host, gfn, access) else { break };
        let is_alike = (Resolved { pfn: like.pfn, ..resolved }) == like
            && (resolved.pfn.0 ^ gfn.0) & inside == 0
            && encoding.has_room_for(resolved.pfn);
        if !is_alike {
            return (nr_leaves, Some(resolved));
        }
        ptes.push(without_frame.with_frame(resolved.pfn, leaf_level));
        nr_leaves += 1;
        gfn = Gfn(gfn.0 + leaf_level.nr_pages());
    }
    (nr_leaves, None)
}
