//! Removing shadow PTEs: single ones, whole pages, all leaf PTEs of guest frames, and evicted
//! pages.
//!
//! # Guarantees
//! A page-table page is freed only after a flush of all CPUs and a grace period. While a change is
//! not flushed, `Mmu::is_in_debt` returns `true`.
//!
//! # Use
//! A thread that zaps a shadow PTE, or takes a right from one, first calls [`Debt::incur`]. Outside
//! of all locks it calls [`Debt::pay`].

#![expect(unsafe_code, reason = "entries are reached under the locks that keep their tables")]

use core::mem;

use arrayvec::ArrayVec;

use super::Mmu;
use super::page::{NR_ENTRIES, PageRef, PtePlace, Target};
use super::rmap::Frame;
use crate::addr::{Gfn, GfnRange, Level};
use crate::format::Format;
use crate::format::x86::{self, READ_WRITE};
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::{AtomicU32, Ordering, fence_after_rmw, full_fence};
use crate::table::retire::TableChain;

/// Pages that one eviction removes, for one flush.
const PAGES_PER_EVICTION: usize = 16;

/// Frames that are prefetched before the first is locked.
const FRAMES_PER_BATCH: usize = 32;

/// The TLB batch of shadow paging: whether the CPUs must be flushed, and the page-table pages that
/// may be freed then.
#[must_use]
pub(crate) struct Debt {
    is_owed: bool,
    tables: TableChain,
}

impl Debt {
    pub(crate) fn new() -> Debt {
        Debt { is_owed: false, tables: TableChain::new() }
    }

    /// Counts a change that must be flushed, before it is made.
    pub(super) fn incur<H: Host, F: Format>(&mut self, mmu: &Mmu<'_, H, F>) {
        if !self.is_owed {
            self.is_owed = true;
            // SeqCst: with `Mmu::is_in_debt`. A caller of that has read the PTEs under the lock of
            // their frame; the change comes after this addition, under the same lock.
            mmu.shadow.nr_debts.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn is_owed(&self) -> bool {
        self.is_owed
    }

    /// Flushes all CPUs if there is a change to flush.
    pub(super) fn pay<H: Host, F: Format>(&mut self, mmu: &Mmu<'_, H, F>) {
        self.end(mmu, || mmu.flush_cpus(&[mmu.tree.whole()]));
    }

    /// Ends the batch without a flush: the caller has flushed the CPUs.
    pub(crate) fn settle<H: Host, F: Format>(&mut self, mmu: &Mmu<'_, H, F>) {
        self.end(mmu, || ());
    }

    fn end<H: Host, F: Format>(&mut self, mmu: &Mmu<'_, H, F>, flush: impl FnOnce()) {
        if !self.is_owed {
            return;
        }
        // Taken first: if the flush panics, the page-table pages are leaked and the count stays,
        // for CPUs may use what was zapped still.
        self.is_owed = false;
        let tables = mem::replace(&mut self.tables, TableChain::new());
        flush();
        mmu.shadow.nr_debts.fetch_sub(1, Ordering::SeqCst);
        mmu.tree.epochs.retire_tables(mmu.host(), tables);
        mmu.tree.reclaim();
    }
}

impl Drop for Debt {
    fn drop(&mut self) {
        debug_assert!(!self.is_owed, "a flush of shadow entries is still owed");
    }
}

impl<'v, H: Host, F: Format> Mmu<'v, H, F> {
    /// Flushes all CPUs, whatever the shadow tables say.
    pub(super) fn flush_cpus(&self, ranges: &[GfnRange]) {
        self.tree.flush_cpus(self.participant, ranges);
    }

    /// Whether CPUs may have something cached that the shadow PTEs do not say any more.
    pub(super) fn is_in_debt(&self) -> bool {
        self.shadow.nr_debts.load(Ordering::SeqCst) != 0
    }

    /// Flushes `ranges` of guest frames, where the second stage has lost rights. Zaps the shadow
    /// leaf PTEs that it does not back any more, and takes W from those that may not be written.
    /// Removes the pages made from guest tables that are gone. Then flushes the CPUs.
    #[cold]
    pub(crate) fn flush(&self, ranges: &[GfnRange]) {
        let mut debt = Debt::new();
        for &range in ranges {
            self.zap_unbacked(range, &mut debt);
        }
        self.flush_cpus(ranges);
        debt.settle(self);
    }

    fn zap_unbacked(&self, range: GfnRange, debt: &mut Debt) {
        // A store-load pair with the lock of a frame: see `WordLock::is_free`.
        full_fence();
        self.shadow.frames.for_each(range, |frame, gfn, level| {
            if frame.is_idle() {
                return;
            }
            self.write_protect_leaves(gfn, level, debt);
            // After the leaf PTEs, and whether or not there were any: nothing need map a guest
            // table.
            while level == Level::L4K && frame.pages.load(Ordering::Relaxed) != 0 {
                let Some(page) = self.page_of_lost_frame(gfn) else { break };
                self.zap_page(page, debt);
            }
        });
    }

    /// Takes W from the shadow leaf PTEs of `pages`, of every size, so that writes are logged anew.
    /// `pages` come in rising order. The caller flushes them in any case.
    ///
    /// Never inlined: its batch would lie on the stack of the whole harvest.
    #[inline(never)]
    pub(crate) fn write_protect(&self, pages: impl Iterator<Item = Gfn>, debt: &mut Debt) {
        // As in `zap_unbacked`. The caller has taken W by an atomic operation.
        fence_after_rmw();
        let frames = &self.shadow.frames;
        let mut block = None;
        let mut of_block = None;
        let mut batch = ArrayVec::<&Frame, FRAMES_PER_BATCH>::new();
        for gfn in pages {
            let first = Gfn(gfn.0 & !(Level::L2M.nr_pages() - 1));
            if block != Some(first) {
                block = Some(first);
                // Once for all pages of the block: their second stage has changed before, all of
                // it.
                for level in [Level::L2M, Level::L1G] {
                    if let Some(frame) = frames.get(gfn, level).filter(|frame| !frame.is_idle()) {
                        let _guard = frame.lock.lock(self.host());
                        // SAFETY: the frame is locked.
                        unsafe { self.protect_leaves(frame, debt) }
                    }
                }
                of_block = frames.of_block(gfn);
            }
            let Some(of_block) = of_block else { continue };
            let frame = &of_block[gfn.0 as usize % NR_ENTRIES];
            if frame.is_idle() {
                continue;
            }
            // A locked operation keeps the CPU from loading ahead. So this fetches what many frames
            // need before it locks the first.
            self.shadow.pages.prefetch(frame.leaves.load(Ordering::Relaxed));
            if batch.is_full() {
                self.protect_batch(&mut batch, debt);
            }
            batch.push(frame);
        }
        self.protect_batch(&mut batch, debt);
    }

    fn protect_batch(&self, batch: &mut ArrayVec<&Frame, FRAMES_PER_BATCH>, debt: &mut Debt) {
        for frame in batch.drain(..) {
            let _guard = frame.lock.lock(self.host());
            // SAFETY: the frame is locked.
            unsafe { self.protect_leaves(frame, debt) }
        }
    }

    /// Makes the leaf PTEs of the block of `level` at `gfn` what the second stage allows now.
    fn write_protect_leaves(&self, gfn: Gfn, level: Level, debt: &mut Debt) {
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return };
        let _guard = frame.lock.lock(self.host());
        let second = self.second_stage(gfn).filter(|second| second.level >= level);
        let mut next = PtePlace::from_number(frame.leaves.load(Ordering::Relaxed));
        while let Some(place) = next {
            next = self.shadow.pages.behind(place);
            let page = self.shadow.pages.get(place.page);
            // SAFETY: the PTE is in the list of the frame, which is locked.
            let cell = unsafe { self.cell(page, place.index) };
            let value = cell.load(Ordering::Relaxed);
            match second {
                Some(second) if second.pfn.hpa().0 == value & x86::ADDRESS => {
                    if !second.is_writable && value & READ_WRITE != 0 {
                        debt.incur(self);
                        cell.fetch_and(!READ_WRITE, Ordering::AcqRel);
                    }
                }
                // SAFETY: as above.
                _ => unsafe { self.drop_leaf(&frame.leaves, place, debt) },
            }
        }
    }

    /// A page made from `gfn`, if the second stage has nothing there any more.
    fn page_of_lost_frame(&self, gfn: Gfn) -> Option<PageRef> {
        let frame = self.shadow.frames.get(gfn, Level::L4K)?;
        let _guard = frame.lock.lock(self.host());
        let number = frame.pages.load(Ordering::Relaxed);
        if number == 0 || self.second_stage(gfn).is_some() {
            return None;
        }
        self.shadow.pages.get(number).generation().map(|generation| PageRef { number, generation })
    }

    /// Zaps the leaf PTE at `place`.
    ///
    /// # Safety
    /// The caller holds the lock of the frame whose list of leaf PTEs begins at `head`, and `place`
    /// is in that list.
    unsafe fn drop_leaf(&self, head: &AtomicU32, place: PtePlace, debt: &mut Debt) {
        let page = self.shadow.pages.get(place.page);
        debt.incur(self);
        // SAFETY: as the caller promises, the PTE leads to the locked frame.
        unsafe { self.cell(page, place.index) }.store(0, Ordering::Release);
        page.set_target(place.index, Target::None);
        self.shadow.pages.remove(head, place);
        self.count(Counter::ShadowLeavesDropped);
    }

    /// Zaps all leaf PTEs of the block of `level` at `gfn`.
    pub(super) fn drop_leaves(&self, gfn: Gfn, level: Level, debt: &mut Debt) {
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return };
        let _guard = frame.lock.lock(self.host());
        while let Some(place) = PtePlace::from_number(frame.leaves.load(Ordering::Relaxed)) {
            // SAFETY: the frame is locked, and the place is in its list.
            unsafe { self.drop_leaf(&frame.leaves, place, debt) }
        }
    }

    /// Zaps the PTE at `place`, leaf or link. The caller holds the lock of its page.
    pub(super) fn drop_entry(&self, place: PtePlace, debt: &mut Debt) {
        let page = self.shadow.pages.get(place.page);
        let target = page.target(place.index);
        let (gfn, level) = match target {
            Target::None => return,
            Target::Leaf(gfn) => (gfn, page.role().level()),
            // The page below may have another frame by now; then its last zap has removed the link.
            // So the frame is read before its lock is taken, and the target is compared under the
            // lock.
            Target::Link(below) => (self.shadow.pages.get(below.number).gfn(), Level::L4K),
        };
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return };
        let _guard = frame.lock.lock(self.host());
        if page.target(place.index) != target {
            return;
        }
        match target {
            Target::None => {}
            // SAFETY: the frame is locked, and the PTE leads there: so it is in the list.
            Target::Leaf(_) => unsafe { self.drop_leaf(&frame.leaves, place, debt) },
            Target::Link(below) => {
                // It is the right lock: while the link exists, the page below is of this
                // generation.
                debt.incur(self);
                // SAFETY: as above.
                unsafe { self.cell(page, place.index) }.store(0, Ordering::Release);
                page.set_target(place.index, Target::None);
                self.shadow.pages.remove(&self.shadow.pages.get(below.number).parents, place);
            }
        }
    }

    /// Removes the page: no thread finds it any more, no PTE points to it, and it has no PTEs. If
    /// it is the root of a vCPU, its page-table page stays until that vCPU has another root.
    pub(super) fn zap_page(&self, reference: PageRef, debt: &mut Debt) {
        let pages = &self.shadow.pages;
        let page = pages.get(reference.number);
        let (gfn, role) = (page.gfn(), page.role());
        let Some(frame) = self.shadow.frames.get(gfn, Level::L4K) else { return };
        {
            let _guard = frame.lock.lock(self.host());
            if !page.is_alive(reference.generation) || page.gfn() != gfn {
                return;
            }
            // Its page-table page goes, and CPUs may be walking it.
            debt.incur(self);
            self.unlist(frame, reference.number);
            while let Some(parent) = PtePlace::from_number(page.parents.load(Ordering::Relaxed)) {
                let above = pages.get(parent.page);
                // SAFETY: the PTE leads to a page of the frame, which is locked.
                unsafe { self.cell(above, parent.index) }.store(0, Ordering::Release);
                above.set_target(parent.index, Target::None);
                pages.remove(&page.parents, parent);
            }
            pages.note_synced(reference.number);
            page.die();
        }
        if role.is_of_table() {
            self.untrack(gfn);
        }
        {
            let _guard = page.lock.lock(self.host());
            for index in 0..NR_ENTRIES {
                self.drop_entry(PtePlace { page: reference.number, index }, debt);
            }
        }
        self.count(Counter::ShadowPagesZapped);
        // SAFETY: the pin of `die`.
        if unsafe { page.unpin() } {
            // SAFETY: the page is dead, and this was the last pin.
            unsafe { self.free_page(reference, debt) }
        }
    }

    /// Frees the page-table page of a page that has neither PTEs nor users.
    ///
    /// # Safety
    /// The caller's [`unpin`](super::page::ShadowPage::unpin) was the last of the page's life, so
    /// that the page belongs to the caller.
    unsafe fn free_page(&self, reference: PageRef, debt: &mut Debt) {
        debt.incur(self);
        // SAFETY: the page-table page belongs to the shadow page, which is dead: no PTE points to
        // it, and its own PTEs were zapped. `debt` retires it after a flush of all CPUs.
        unsafe { debt.tables.push(self.host(), self.shadow.pages.get(reference.number).table()) }
        self.shadow.pages.release(reference.number);
    }

    /// Ends the pin of a vCPU that has another root now.
    ///
    /// # Safety
    /// As for [`ShadowPage::unpin`](super::page::ShadowPage::unpin).
    pub(super) unsafe fn unpin(&self, reference: PageRef) {
        // SAFETY: as the caller promises.
        if unsafe { self.shadow.pages.get(reference.number).unpin() } {
            let mut debt = Debt::new();
            // SAFETY: as in `zap_page`.
            unsafe { self.free_page(reference, &mut debt) }
            debt.pay(self);
        }
    }

    fn unlist(&self, frame: &Frame, number: u32) {
        let pages = &self.shadow.pages;
        let next = pages.get(number).next_of_frame.load(Ordering::Relaxed);
        let mut before = &frame.pages;
        loop {
            let found = before.load(Ordering::Relaxed);
            debug_assert!(found != 0, "shadow page {number} is not in the list of its frame");
            if found == number {
                before.store(next, Ordering::Relaxed);
                return;
            }
            if found == 0 {
                return;
            }
            before = &pages.get(found).next_of_frame;
        }
    }

    /// Counts one guest table less in the blocks around `gfn`.
    pub(super) fn untrack(&self, gfn: Gfn) {
        for level in [Level::L2M, Level::L1G] {
            if let Some(frame) = self.shadow.frames.get(gfn, level) {
                frame.nr_tables().fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Removes `reference`, unless it is the root of a vCPU, and all below it that nothing else
    /// points to.
    pub(super) fn zap_tree(&self, reference: PageRef, debt: &mut Debt) {
        let page = self.shadow.pages.get(reference.number);
        if page.is_pinned() || !page.is_alive(reference.generation) {
            return;
        }
        if page.role().level() > Level::L4K {
            for index in 0..NR_ENTRIES {
                let Target::Link(below) = page.target(index) else { continue };
                {
                    let _guard = page.lock.lock(self.host());
                    self.drop_entry(PtePlace { page: reference.number, index }, debt);
                }
                if self.shadow.pages.get(below.number).parents.load(Ordering::Relaxed) == 0 {
                    self.zap_tree(below, debt);
                }
            }
        }
        self.zap_page(reference, debt);
    }

    /// Removes all pages, when no vCPU is left.
    pub(crate) fn zap_all(&self) {
        let pages = &self.shadow.pages;
        let mut debt = Debt::new();
        for number in 1..=pages.max_pages() {
            if let Some(generation) = pages.peek(number).and_then(|page| page.generation()) {
                self.zap_page(PageRef { number, generation }, &mut debt);
            }
        }
        debt.pay(self);
    }

    /// Makes room for new pages by removing some: first those to which nothing points, then those
    /// that no walk went through since an eviction last passed over them. It never removes the root
    /// of a vCPU.
    pub(super) fn evict(&self) {
        let pages = &self.shadow.pages;
        let mut debt = Debt::new();
        let mut nr_evicted = 0;
        for turn in 0..3 {
            for _ in 0..pages.max_pages() {
                let number = pages.hand.fetch_add(1, Ordering::Relaxed) % pages.max_pages() + 1;
                let Some(page) = pages.peek(number) else { continue };
                let Some(generation) = page.generation() else { continue };
                if page.is_pinned() {
                    continue;
                }
                let is_linked = page.parents.load(Ordering::Relaxed) != 0;
                let is_used = page.is_used.load(Ordering::Relaxed) != 0;
                if turn == 0 && is_linked || turn <= 1 && is_used {
                    if turn == 1 {
                        page.is_used.store(0, Ordering::Relaxed);
                    }
                    continue;
                }
                self.zap_page(PageRef { number, generation }, &mut debt);
                self.count(Counter::ShadowEvictions);
                nr_evicted += 1;
                if nr_evicted == PAGES_PER_EVICTION {
                    break;
                }
            }
            if nr_evicted != 0 {
                break;
            }
        }
        debt.pay(self);
    }
}
