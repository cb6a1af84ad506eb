//! Making shadow pages, links to them, and shadow leaf PTEs. The protocol is at the head of the
//! module above.

#![expect(unsafe_code, reason = "entries are reached under the locks that keep their tables")]

use super::lock::{Briefly, Busy, Wait};
use super::memory::NoMemory;
use super::page::{PageNumber, PageRef, PtePlace, SyncState};
use super::pte_records::Target;
use super::rmap::Frame;
use super::role::Role;
use super::{Mmu, SecondStage};
use crate::addr::{Access, Gfn, Hpa, Level};
use crate::error::OutOfMemory;
use crate::format::x86::{ACCESSED, ADDRESS, DIRTY, EXECUTE_DISABLE, READ_WRITE, USER};
use crate::format::{Format, Npt};
use crate::host::{AllocationWait, Host, TableNode};
use crate::shadow::guest::{GuestMode, Rights};
use crate::stats::Counter;
use crate::sync::Ordering;
use crate::table::encoding::Encoding;
use crate::table::node;
use crate::table::tlb::TlbBatch;

/// Why a PTE could not be made.
#[derive(Clone, Copy, Debug)]
pub(super) enum NotMade {
    /// Something has changed since the walk: walk again.
    Changed,
    /// An emulated write to the guest's table is under way: nothing is made of its PTEs until that
    /// is over.
    BeingWritten,
    /// The second stage must map the frame first.
    NotMapped,
    /// The leaf PTE must map less.
    TooLarge,
    /// The frame holds a guest table that the guest may not write.
    Tracked,
    /// Another thread holds a lock that is needed.
    Busy,
}

impl From<Busy> for NotMade {
    fn from(_: Busy) -> NotMade {
        NotMade::Busy
    }
}

impl From<NoMemory> for NotMade {
    fn from(_: NoMemory) -> NotMade {
        // The next walk finds out what is there instead of the table.
        NotMade::Changed
    }
}

/// A guest PTE that a shadow PTE is made from, as the walk has read it; `None` where a shadow PTE
/// is made from nothing.
pub(super) type SeenPte = Option<u64>;

/// A shadow leaf PTE to be made.
#[derive(Clone, Copy)]
pub(super) struct ShadowLeaf {
    /// The first frame of its block.
    pub(super) gfn: Gfn,
    /// What all guest PTEs of the walk allow together.
    pub(super) rights: Rights,
    /// Whether the guest's own leaf PTE is dirty, so that writes need not fault.
    pub(super) is_dirty: bool,
}

/// Whether the guest's supervisor may write a user page that R/W protects (CR0.WP clear). Hardware
/// runs with CR0.WP set and needs other bits for that.
fn is_written_by_supervisor_alone(role: Role, rights: Rights) -> bool {
    !role.heeds_write_protection() && rights.has(Rights::USER) && !rights.has(Rights::WRITE)
}

/// The rights of a shadow leaf PTE for `access`, as far as the guest's tables go. `may_write` says
/// that writes need not fault.
///
/// With CR0.WP clear a user's read-only page has two sets of bits: either the user may read it, or
/// the supervisor may write it. (With SMAP, the second would hide from SMAP that the page is a user
/// page. Such writes are emulated.)
pub(super) fn leaf_rights(role: Role, rights: Rights, access: Access, may_write: bool) -> u64 {
    let mut bits = 0;
    if rights.has(Rights::USER) {
        bits |= USER;
    }
    if may_write && (rights.has(Rights::WRITE) || !role.heeds_write_protection() && !rights.has(Rights::USER)) {
        bits |= READ_WRITE;
    }
    if !rights.has(Rights::EXECUTE) {
        bits |= EXECUTE_DISABLE;
    }
    if access == Access::Write && may_write && !role.has_smap() && is_written_by_supervisor_alone(role, rights) {
        bits = bits & !USER | READ_WRITE;
        if role.has_smep() {
            // It is a user page, which the supervisor must not execute.
            bits |= EXECUTE_DISABLE;
        }
    }
    bits
}

/// The leaf PTE of a page of `role` for what the second stage has, with `rights` of
/// [`leaf_rights`]. Memory type and execution are at most those of the second stage.
fn leaf_pte(encoding: &Encoding<Npt>, role: Role, second: SecondStage, rights: u64) -> u64 {
    let dirty = if rights & READ_WRITE != 0 { DIRTY } else { 0 };
    // The second stage allows user code what it allows at all; here U/S is the guest's.
    let leaf = encoding.leaf(second.pfn, role.level(), second.attributes).bits() & !USER;
    leaf | ACCESSED | dirty | rights
}

/// Whether `leaf`, a shadow leaf PTE, gives no rights but those that the guest's tables give now.
/// U/S must be exactly what they say: of a supervisor page, SMEP and SMAP take nothing from the
/// supervisor.
pub(super) fn leaf_is_within(role: Role, rights: Rights, is_dirty: bool, leaf: u64) -> bool {
    let faces = [Access::Read, Access::Write].map(|access| leaf_rights(role, rights, access, is_dirty));
    faces
        .iter()
        .any(|face| leaf & !face & READ_WRITE == 0 && (leaf ^ face) & USER == 0 && face & !leaf & EXECUTE_DISABLE == 0)
}

impl<'v, H: Host> Mmu<'v, H> {
    /// The page made from `gfn` in `role`, or a new one. The caller holds no lock. A new page may
    /// evict others, and waits for locks then.
    ///
    /// Never inlined: its stack would lie below that of a whole synchronization.
    #[inline(never)]
    pub(super) fn page_for<W: Wait>(&self, gfn: Gfn, role: Role) -> Result<Result<PageRef, OutOfMemory>, W::Busy> {
        // A page for a part of a large page may begin where no memory is. Some memory is in the
        // same block.
        if let Err(error) = self.shadow.frames.touch(gfn) {
            return Ok(Err(error));
        }
        let Some(frame) = self.shadow.frames.get(gfn, Level::L4K) else { return Ok(Err(OutOfMemory)) };
        let found = {
            let _guard = W::lock(&frame.lock, self.host())?;
            self.find_page(frame, role)
        };
        let page = match found {
            Some(reference) => Ok(reference),
            // Claimed here, and not in `new_page`, for the stack of an eviction.
            None => match self.claim_record() {
                // SAFETY: claimed just now.
                Ok(number) => unsafe { self.new_page::<W>(frame, gfn, role, number) }?,
                Err(error) => Err(error),
            },
        };
        if let Ok(reference) = page {
            self.finish_tracking(reference);
        }
        Ok(page)
    }

    /// The page of `frame` in `role`. The caller holds the frame's lock.
    fn find_page(&self, frame: &Frame, role: Role) -> Option<PageRef> {
        let mut number = frame.pages.load(Ordering::Relaxed);
        while number != 0 {
            let page = self.shadow.pages.get(number);
            // The whole role is compared; the frame is that of the list. A page never stands for
            // another frame or role.
            if page.role() == role {
                let generation = page.generation();
                debug_assert!(generation.is_some(), "a dead page is in a list");
                return generation.map(|generation| PageRef { number, generation });
            }
            number = page.next_of_frame.load(Ordering::Relaxed);
        }
        None
    }

    /// Makes a page of `gfn` with record `number`, unless another thread is faster.
    ///
    /// # Safety
    /// The caller has claimed the record, and does not use it any more.
    #[inline(never)]
    unsafe fn new_page<W: Wait>(
        &self,
        frame: &Frame,
        gfn: Gfn,
        role: Role,
        number: PageNumber,
    ) -> Result<Result<PageRef, OutOfMemory>, W::Busy> {
        let pages = &self.shadow.pages;
        let placement = self.tree.config.table_placement.node_for(self.host(), None);
        let Some(table) = self.allocate_table(placement) else {
            // SAFETY: the caller's, as it promises.
            unsafe { pages.release(number) }
            return Ok(Err(OutOfMemory));
        };
        let new = PageRef { number, generation: pages.get(number).prepare(gfn, role, table) };
        let listed = self.list_page::<W>(frame, gfn, role, new);
        if !matches!(listed, Ok(page) if page == new) {
            // SAFETY: the page was in no list, so nothing points to its page-table page.
            unsafe { self.free_unused_table(table) }
            // SAFETY: the caller's, as it promises.
            unsafe { pages.release(number) }
        } else {
            self.count(Counter::ShadowPagesBuilt);
        }
        listed.map(Ok)
    }

    /// Lets other threads find the page `new` of `frame`, unless there is one in its role: then it
    /// returns that.
    #[inline(never)]
    fn list_page<W: Wait>(&self, frame: &Frame, gfn: Gfn, role: Role, new: PageRef) -> Result<PageRef, W::Busy> {
        let pages = &self.shadow.pages;
        let mut batch = self.batch();
        let page = pages.get(new.number);
        let kinds = role.mark_kind().bits();
        if self.shadow.made_kinds.load(Ordering::Relaxed) & kinds != kinds {
            // Before the page can be found and a PTE made of it: see `set_marks`.
            self.shadow.made_kinds.fetch_or(kinds, Ordering::Relaxed);
        }
        if role.is_of_table() {
            // Before the page is in the list: from then on no leaf PTE of a block around it is
            // made.
            if let Err(busy) = self.track::<W>(gfn, &mut batch) {
                self.flush(&mut batch);
                return Err(busy);
            }
        }
        let listed = W::lock(&frame.lock, self.host()).map(|_guard| match self.find_page(frame, role) {
            Some(found) => found,
            None => {
                page.next_of_frame.store(frame.pages.load(Ordering::Relaxed), Ordering::Relaxed);
                frame.pages.store(new.number, Ordering::Relaxed);
                if role.is_of_table() && role.level() == Level::L4K {
                    page.set_sync_state(SyncState::Unsync);
                    pages.note_unsync(new.number);
                } else if role.is_of_table() {
                    // SAFETY: the frame is locked.
                    unsafe { self.protect_leaves(frame, &mut batch) }
                }
                page.come_alive();
                new
            }
        });
        if role.is_of_table() && !matches!(listed, Ok(page) if page == new) {
            self.untrack(gfn);
        }
        self.flush(&mut batch);
        listed
    }

    /// Counts one guest table more in the blocks around `gfn`, and drops the leaf PTEs of these
    /// blocks.
    fn track<W: Wait>(&self, gfn: Gfn, batch: &mut TlbBatch<'v, H, Npt>) -> Result<(), W::Busy> {
        for level in [Level::L2M, Level::L1G] {
            let Some(block) = self.shadow.frames.get(gfn, level) else { continue };
            let locked = W::lock(&block.lock, self.host()).map(|_guard| {
                block.nr_tables().fetch_add(1, Ordering::Relaxed);
                // SAFETY: the block is locked.
                unsafe { self.drop_leaves(block, batch) }
            });
            if locked.is_err() {
                self.untrack_below(gfn, level);
            }
            locked?;
        }
        Ok(())
    }

    /// Takes W from all leaf PTEs of the frame.
    ///
    /// # Safety
    /// The caller holds the frame's lock.
    pub(super) unsafe fn protect_leaves(&self, frame: &Frame, batch: &mut TlbBatch<'v, H, Npt>) {
        let mut next = PtePlace::from_number(frame.leaves.load(Ordering::Relaxed));
        while let Some(place) = next {
            // SAFETY: the PTE is in the list of the frame, which the caller has locked.
            next = unsafe { self.shadow.pages.behind(place) };
            let page = self.shadow.pages.get(place.page);
            // SAFETY: as above.
            let cell = unsafe { self.cell(page, place.index) };
            let value = cell.load(Ordering::Relaxed);
            if value & READ_WRITE != 0 {
                self.add(batch);
                // A store is enough. Other threads need the lock of the frame, and hardware finds A
                // and D set.
                cell.store(value & !READ_WRITE, Ordering::Release);
            }
        }
    }

    /// Makes sure that no CPU can still write the upper guest table that the page is made from,
    /// through its TLB.
    fn finish_tracking(&self, reference: PageRef) {
        let page = self.shadow.pages.get(reference.number);
        let role = page.role();
        let tracked = reference.generation.wrapping_add(1);
        if !role.is_of_table()
            || role.level() == Level::L4K
            || page.tracked_generation.load(Ordering::Acquire) == tracked
        {
            return;
        }
        // Since the page is in the list, no leaf PTE of the table may be written. A thread whose
        // flush for that is under way has counted the change; so has a thread that zapped such a
        // leaf PTE before. This page is needed now, so it does not wait for their flushes.
        if self.has_unflushed() {
            self.flush_cpus();
        }
        page.tracked_generation.store(tracked, Ordering::Release);
    }

    fn claim_record(&self) -> Result<PageNumber, OutOfMemory> {
        // Other threads may claim what this one has evicted: try often.
        for _ in 0..64 {
            if let Some(number) = self.shadow.pages.claim()? {
                return Ok(number);
            }
            self.evict();
        }
        Err(OutOfMemory)
    }

    fn allocate_table(&self, node: TableNode) -> Option<Hpa> {
        let table = node::new_shadow_table(self.tree, node, AllocationWait::Allowed)?;
        self.count(Counter::TablesAllocated);
        Some(table)
    }

    /// Frees a page-table page that no CPU has walked.
    ///
    /// # Safety
    /// It came from [`allocate_table`](Self::allocate_table), and nothing points to it.
    unsafe fn free_unused_table(&self, table: Hpa) {
        // SAFETY: as the caller promises.
        unsafe { node::free_shadow_table(self.tree, table) }
        self.count(Counter::TablesFreed);
    }

    /// Whether the guest's PTE that PTE `index` of `page` is made from is still `seen`. The caller
    /// holds the page's lock.
    fn is_as_seen(&self, page: PageNumber, index: usize, seen: SeenPte) -> Result<(), NotMade> {
        let Some(seen) = seen else { return Ok(()) };
        let (gpa, size_bytes) = self.shadow.pages.get(page).guest_entry(index);
        match self.read_guest_for_entry(gpa, size_bytes)?? {
            Some(pte) if pte == seen => Ok(()),
            Some(_) => Err(NotMade::Changed),
            None => Err(NotMade::BeingWritten),
        }
    }

    /// Makes PTE `index` of `above` a link to `below`, made from the guest's PTE `seen`. It is no
    /// error if another walk has made the same link meanwhile. If it ends before the link is
    /// written, the parent may stay registered, and the next walk goes on from there.
    ///
    /// Never inlined: its stack would lie below that of an eviction.
    #[inline(never)]
    pub(super) fn link(
        &self,
        mode: GuestMode,
        above: PageRef,
        index: usize,
        seen: SeenPte,
        below: PageRef,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<(), NotMade> {
        let pages = &self.shadow.pages;
        let page = pages.get(above.number);
        let child = pages.get(below.number);
        let place = PtePlace { page: above.number, index };
        let _page_guard = Briefly::lock(&page.lock, self.host())?;
        if !page.is_alive(above.generation) {
            return Err(NotMade::Changed);
        }
        // SAFETY: the page is locked, and was found alive under the lock.
        let ptes = unsafe { page.ptes() };
        self.is_as_seen(above.number, index, seen)?;
        let gfn = child.gfn();
        let Some(frame) = self.shadow.frames.get(gfn, Level::L4K) else { return Err(NotMade::Changed) };
        let leads_there = || matches!(ptes.target(index), Target::Link(to) | Target::Linking(to) if to == below);
        if !leads_there() {
            // SAFETY: as above.
            unsafe { self.drop_entry::<Briefly>(place, batch)? }
            let _guard = Briefly::lock(&frame.lock, self.host())?;
            if !child.is_alive(below.generation) || child.gfn() != gfn {
                return Err(NotMade::Changed);
            }
            ptes.set_target(index, Target::Linking(below));
            // SAFETY: both are locked, the page above and the frame.
            unsafe { pages.push(&child.parents, place) }
        }
        // From here on a vCPU that flushes finds this parent. What it flushed before is compared
        // now.
        self.sync_below(mode, below, batch)?;
        let _guard = Briefly::lock(&frame.lock, self.host())?;
        if !leads_there() {
            // The page below was removed.
            return Err(NotMade::Changed);
        }
        // SAFETY: the page is locked, and was found alive under the lock.
        let cell = unsafe { self.cell(page, index) };
        cell.store(Npt::table(child.table()).0, Ordering::Release);
        ptes.set_target(index, Target::Link(below));
        Ok(())
    }

    /// Makes PTE `index` of `reference` a leaf PTE for `access`, made from the guest's PTE `seen`.
    #[inline(never)]
    pub(super) fn install_leaf(
        &self,
        reference: PageRef,
        index: usize,
        seen: SeenPte,
        leaf: ShadowLeaf,
        access: Access,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<(), NotMade> {
        let pages = &self.shadow.pages;
        let page = pages.get(reference.number);
        let place = PtePlace { page: reference.number, index };
        let ShadowLeaf { gfn, rights, is_dirty } = leaf;
        let _page_guard = Briefly::lock(&page.lock, self.host())?;
        if !page.is_alive(reference.generation) {
            return Err(NotMade::Changed);
        }
        // SAFETY: the page is locked, and was found alive under the lock.
        let ptes = unsafe { page.ptes() };
        let role = page.role();
        let level = role.level();
        self.is_as_seen(reference.number, index, seen)?;
        if !matches!(ptes.target(index), Target::Leaf(found) if found == gfn) {
            // SAFETY: as above.
            unsafe { self.drop_entry::<Briefly>(place, batch)? }
        }
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return Err(NotMade::Changed) };
        let (_guard, second) = self.lock_frame::<Briefly>(frame, gfn)?;
        let second = second.ok_or(NotMade::NotMapped)?;
        if second.level < level || (level > Level::L4K && frame.nr_tables().load(Ordering::Relaxed) != 0) {
            return Err(NotMade::TooLarge);
        }
        debug_assert!(second.pfn.0 % level.nr_pages() == 0);
        let writes = access == Access::Write;
        let is_executable = second.attributes & EXECUTE_DISABLE == 0;
        if (writes && !second.is_writable) || (access.is_fetch() && !is_executable) {
            return Err(NotMade::NotMapped);
        }
        let may_write = is_dirty
            && second.is_writable
            && if writes { self.give_up_tracking(frame)? } else { !self.is_tracked(frame) };
        let new = leaf_pte(&self.tree.encoding, role, second, leaf_rights(role, rights, access, may_write));
        // SAFETY: the page is locked, and was found alive under the lock.
        let cell = unsafe { self.cell(page, index) };
        let old = cell.load(Ordering::Relaxed);
        match ptes.target(index) {
            Target::None => {
                ptes.set_target(index, Target::Leaf(gfn));
                // SAFETY: both are locked, the page and the frame.
                unsafe { pages.push(&frame.leaves, place) }
                self.count(Counter::ShadowLeavesMade);
            }
            _ if old & !new & (READ_WRITE | USER) != 0
                || new & !old & EXECUTE_DISABLE != 0
                || (old ^ new) & (ADDRESS | Npt::ATTRIBUTES & !EXECUTE_DISABLE) != 0 =>
            {
                self.add(batch);
            }
            _ => {}
        }
        // Release: a thread that finds the leaf PTE finds it in the list.
        cell.store(new, Ordering::Release);
        Ok(())
    }

    /// Whether the guest's writes to the frame must fault. The caller holds the frame's lock.
    fn is_tracked(&self, frame: &Frame) -> bool {
        let mut number = frame.pages.load(Ordering::Relaxed);
        while number != 0 {
            let page = self.shadow.pages.get(number);
            let role = page.role();
            if role.is_of_table() && (role.level() > Level::L4K || page.sync_state().0 != SyncState::Unsync) {
                return true;
            }
            number = page.next_of_frame.load(Ordering::Relaxed);
        }
        false
    }

    /// Lets the guest write the frame, if all pages made from it are of the lowest level: these
    /// become unsync. The caller holds the frame's lock.
    fn give_up_tracking(&self, frame: &Frame) -> Result<bool, NotMade> {
        for turn in 0..2 {
            let mut number = frame.pages.load(Ordering::Relaxed);
            while number != 0 {
                let page = self.shadow.pages.get(number);
                let role = page.role();
                if role.is_of_table() {
                    if role.level() > Level::L4K {
                        return Err(NotMade::Tracked);
                    }
                    if turn == 1 && page.sync_state().0 != SyncState::Unsync {
                        page.set_sync_state(SyncState::Unsync);
                        self.shadow.pages.note_unsync(number);
                        self.count(Counter::ShadowUnsyncs);
                    }
                }
                number = page.next_of_frame.load(Ordering::Relaxed);
            }
        }
        Ok(true)
    }
}
