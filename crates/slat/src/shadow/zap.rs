//! Taking away: single entries, whole pages, all leaves of guest frames, and what a full house has no room for.
//!
//! Whatever loses an entry, or a right of one, is in debt until the CPUs are flushed ([`Debt`]).

#![expect(unsafe_code, reason = "entries are reached under the locks that keep their tables")]

use arrayvec::ArrayVec;

use super::frames::Frame;
use super::page::{EntryPlace, NR_ENTRIES, PageRef, Target};
use super::{Mmu, WRITABLE};
use crate::addr::{Gfn, GfnRange, Level};
use crate::format::Format;
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::{AtomicU32, Ordering, fence_after_rmw, full_fence};
use crate::table::retire::TableChain;

/// Pages that an eviction takes away at once, for one flush.
const PAGES_PER_EVICTION: usize = 16;

/// Frames whose leaves are looked for together.
const FRAMES_PER_BATCH: usize = 32;

/// Changes that the CPUs must be flushed for, and the tables that may be freed then. To be paid, outside of all locks, by
/// [`Debt::pay`].
#[must_use]
pub(crate) struct Debt {
    is_owed: bool,
    tables: TableChain,
}

impl Debt {
    pub(crate) fn new() -> Debt {
        Debt { is_owed: false, tables: TableChain::new() }
    }

    /// To be called before the first change.
    pub(super) fn incur<H: Host, F: Format>(&mut self, mmu: &Mmu<'_, H, F>) {
        if !self.is_owed {
            self.is_owed = true;
            // SeqCst: with `Mmu::is_in_debt`, whose caller has looked at the entries under the lock of their frame: the change
            // comes after this, under the same lock.
            mmu.shadow.nr_debts.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn is_owed(&self) -> bool {
        self.is_owed
    }

    /// Flushes all CPUs, if anything is owed.
    pub(super) fn pay<H: Host, F: Format>(&mut self, mmu: &Mmu<'_, H, F>) {
        if !self.is_owed {
            return;
        }
        mmu.flush_cpus(&[mmu.tree.whole()]);
        self.settle(mmu);
    }

    /// The CPUs were flushed.
    pub(crate) fn settle<H: Host, F: Format>(&mut self, mmu: &Mmu<'_, H, F>) {
        if !self.is_owed {
            return;
        }
        self.is_owed = false;
        mmu.shadow.nr_debts.fetch_sub(1, Ordering::SeqCst);
        mmu.tree.epochs.retire_tables(mmu.host(), core::mem::replace(&mut self.tables, TableChain::new()));
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
        self.tree.flush_cpus(self.record, ranges);
    }

    /// Whether CPUs may have something cached that the shadow entries do not say any more.
    pub(super) fn is_in_debt(&self) -> bool {
        self.shadow.nr_debts.load(Ordering::SeqCst) != 0
    }

    /// What a flush of `ranges` of guest frames is: the second stage has lost rights there. Takes the shadow leaves away that
    /// it does not back any more, and the right to write from those that may not be written; and what was made from guest
    /// tables that are gone; then flushes the CPUs.
    #[cold]
    pub(crate) fn flush(&self, ranges: &[GfnRange]) {
        let mut debt = Debt::new();
        for &range in ranges {
            self.take_away(range, &mut debt);
        }
        self.flush_cpus(ranges);
        debt.settle(self);
    }

    fn take_away(&self, range: GfnRange, debt: &mut Debt) {
        // Pairs with the lock of a frame: see `WordLock::is_free`.
        full_fence();
        self.shadow.frames.for_each(range, |frame, gfn, level| {
            if frame.is_idle() {
                return;
            }
            self.narrow_leaves(gfn, level, debt);
            // Not before: a table that is gone need not be a leaf of anything.
            while level == Level::L4K && frame.pages.load(Ordering::Relaxed) != 0 {
                let Some(page) = self.page_of_lost_frame(gfn) else { break };
                self.zap_page(page, debt);
            }
        });
    }

    /// Takes the right to write from the shadow leaves of `pages`, of every size: they are to be logged anew. They come in rising
    /// order. The caller owes a flush of them in any case.
    ///
    /// Never inlined: its batch would be on the stack of what else a harvest does.
    #[inline(never)]
    pub(crate) fn write_protect(&self, pages: impl Iterator<Item = Gfn>, debt: &mut Debt) {
        // As in `take_away`. The caller has taken W by an atomic operation.
        fence_after_rmw();
        let frames = &self.shadow.frames;
        let mut block = None;
        let mut of_block = None;
        let mut batch = ArrayVec::<&Frame, FRAMES_PER_BATCH>::new();
        for gfn in pages {
            let first = Gfn(gfn.0 & !(Level::L2M.nr_pages() - 1));
            if block != Some(first) {
                block = Some(first);
                // Once for all of its pages: their second stage has changed before, all of it.
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
            // Locks keep the CPU from loading ahead, so what it will need is fetched for many before the first is locked.
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

    /// Makes the leaves of the block of `level` at `gfn` what the second stage allows now.
    fn narrow_leaves(&self, gfn: Gfn, level: Level, debt: &mut Debt) {
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return };
        let _guard = frame.lock.lock(self.host());
        let second = self.second_stage(gfn).filter(|second| second.level >= level);
        let mut next = EntryPlace::from_number(frame.leaves.load(Ordering::Relaxed));
        while let Some(place) = next {
            next = self.shadow.pages.behind(place);
            let page = self.shadow.pages.get(place.page);
            // SAFETY: the entry is in the list of the frame, which is locked.
            let cell = unsafe { self.cell(page, place.index) };
            let value = cell.load(Ordering::Relaxed);
            match second {
                Some(second) if second.pfn.hpa().0 == value & super::ADDRESS => {
                    if !second.is_writable && value & WRITABLE != 0 {
                        debt.incur(self);
                        cell.fetch_and(!WRITABLE, Ordering::AcqRel);
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

    /// Takes the leaf at `place` away.
    ///
    /// # Safety
    /// The caller holds the lock of the frame whose leaves the list at `head` has, and `place` is
    /// in that list.
    unsafe fn drop_leaf(&self, head: &AtomicU32, place: EntryPlace, debt: &mut Debt) {
        let page = self.shadow.pages.get(place.page);
        debt.incur(self);
        // SAFETY: as the caller promises: the entry leads to that frame.
        unsafe { self.cell(page, place.index) }.store(0, Ordering::Release);
        page.set_target(place.index, Target::None);
        self.shadow.pages.remove(head, place);
        self.count(Counter::ShadowLeavesDropped);
    }

    /// Takes all leaves of the block of `level` at `gfn` away.
    pub(super) fn drop_leaves(&self, gfn: Gfn, level: Level, debt: &mut Debt) {
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return };
        let _guard = frame.lock.lock(self.host());
        while let Some(place) = EntryPlace::from_number(frame.leaves.load(Ordering::Relaxed)) {
            // SAFETY: the frame is locked, and the place is of its list.
            unsafe { self.drop_leaf(&frame.leaves, place, debt) }
        }
    }

    /// Takes the entry at `place` away, whatever it is. The caller holds the lock of its page.
    pub(super) fn drop_entry(&self, place: EntryPlace, debt: &mut Debt) {
        let page = self.shadow.pages.get(place.page);
        let target = page.target(place.index);
        let (gfn, level) = match target {
            Target::None => return,
            Target::Leaf(gfn) => (gfn, page.role().level()),
            // The page below may be another by now; then it has taken the link away. Its frame is read before the lock is
            // taken, and what is found under the lock tells whether it was the right one.
            Target::Link(below) => (self.shadow.pages.get(below.number).gfn(), Level::L4K),
        };
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return };
        let _guard = frame.lock.lock(self.host());
        if page.target(place.index) != target {
            return;
        }
        match target {
            Target::None => {}
            // SAFETY: the frame is locked, and the entry leads there: so it is in the list.
            Target::Leaf(_) => unsafe { self.drop_leaf(&frame.leaves, place, debt) },
            Target::Link(below) => {
                // It is the right lock: as long as the link is there, the page below is of this generation.
                debt.incur(self);
                // SAFETY: as above.
                unsafe { self.cell(page, place.index) }.store(0, Ordering::Release);
                page.set_target(place.index, Target::None);
                self.shadow.pages.remove(&self.shadow.pages.get(below.number).parents, place);
            }
        }
    }

    /// Takes the page away: nobody finds it any more, nothing points to it, and it has no entries. If it is a vCPU's root, the
    /// table stays until that has another.
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
            // Its table goes: CPUs may be in it.
            debt.incur(self);
            self.unlist(frame, reference.number);
            while let Some(parent) = EntryPlace::from_number(page.parents.load(Ordering::Relaxed)) {
                let above = pages.get(parent.page);
                // SAFETY: the entry leads to a page of the frame, which is locked.
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
                self.drop_entry(EntryPlace { page: reference.number, index }, debt);
            }
        }
        self.count(Counter::ShadowPagesZapped);
        if page.unpin() {
            // SAFETY: the page is dead, and this was the last pin.
            unsafe { self.free_page(reference, debt) }
        }
    }

    /// Frees the table of a page that has neither entries nor users.
    ///
    /// # Safety
    /// The caller's [`unpin`](super::page::ShadowPage::unpin) was the last of the page's life, so
    /// that the page is the caller's.
    unsafe fn free_page(&self, reference: PageRef, debt: &mut Debt) {
        debt.incur(self);
        // SAFETY: the table is the page's, which `die` has taken away: no entry points to it. Its
        // own entries were emptied. The debt is a flush of all CPUs.
        unsafe { debt.tables.push(self.host(), self.shadow.pages.get(reference.number).table()) }
        self.shadow.pages.release(reference.number);
    }

    /// A vCPU has another root.
    pub(super) fn unpin(&self, reference: PageRef) {
        if self.shadow.pages.get(reference.number).unpin() {
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

    /// The blocks around `gfn` have a guest table less.
    pub(super) fn untrack(&self, gfn: Gfn) {
        for level in [Level::L2M, Level::L1G] {
            if let Some(frame) = self.shadow.frames.get(gfn, level) {
                frame.nr_tables().fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Takes away `reference`, unless it is a vCPU's root, and what nothing else points to below it.
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
                    self.drop_entry(EntryPlace { page: reference.number, index }, debt);
                }
                if self.shadow.pages.get(below.number).parents.load(Ordering::Relaxed) == 0 {
                    self.zap_tree(below, debt);
                }
            }
        }
        self.zap_page(reference, debt);
    }

    /// Takes all pages away, when no vCPU is left.
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

    /// Makes room for pages: takes some away, first those to which nothing points, then those that were not walked through
    /// since they were last passed over; roots of vCPUs never.
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
