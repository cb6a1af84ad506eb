//! Removing shadow PTEs: single ones, whole pages, all leaf PTEs of guest frames, and evicted
//! pages.
//!
//! # Guarantees
//! A page-table page is freed only after a flush of all CPUs and a grace period. While a change is
//! not flushed, `Mmu::has_unflushed` returns `true`.
//!
//! # Use
//! A thread that zaps a shadow PTE, or takes a right from one, first adds that to its [`TlbBatch`]
//! ([`Mmu::add`]). Outside of all locks it calls [`Mmu::flush`].

#![expect(unsafe_code, reason = "entries are reached under the locks that keep their tables")]

#[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri))))]
use core::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
use core::ptr;

use arrayvec::ArrayVec;

use super::lock::{UntilFree, Wait};
use super::page::{NR_ENTRIES, PageRef, PtePlace, ShadowPage};
use super::pte_records::Target;
use super::rmap::Frame;
use super::{Mmu, SecondStage};
use crate::addr::{Gfn, GfnRange, Level};
use crate::bits::SetBits;
use crate::format::x86::{EXECUTE_DISABLE, READ_WRITE};
use crate::format::{Format, Npt};
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence_after_rmw, full_fence};
use crate::table::retire::Guard;
use crate::table::tlb::TlbBatch;

/// PTEs that are zapped under one lock of their page.
const ENTRIES_PER_LOCK: usize = if NR_ENTRIES < 32 { NR_ENTRIES } else { 32 };

/// Pages that one eviction removes, for one flush.
const PAGES_PER_EVICTION: usize = 16;

/// Frames that are prefetched before the first is locked.
const FRAMES_PER_BATCH: usize = 32;

/// Loads the cache line at `pointer`, to be written soon. Unlike a load, it keeps no later
/// instruction from being done.
#[inline]
fn prefetch_for_write<T>(pointer: *const T) {
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri))))]
    // SAFETY: a hint, which is right for any address.
    unsafe {
        _mm_prefetch::<_MM_HINT_ET0>(pointer.cast())
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle, miri)))))]
    let _ = pointer;
}

impl<'v, H: Host> Mmu<'v, H> {
    /// An empty batch of changes.
    #[inline]
    pub(super) fn batch(&self) -> TlbBatch<'v, H, Npt> {
        TlbBatch::new(self.tree, self.participant)
    }

    /// Counts `batch` before its first change of a shadow PTE is made. If it has ranges, these are
    /// what was changed in the second stage; otherwise all is flushed.
    #[inline]
    pub(super) fn add(&self, batch: &mut TlbBatch<'v, H, Npt>) {
        if !batch.is_counted() {
            self.count_batch(batch);
        }
    }

    #[inline(never)]
    fn count_batch(&self, batch: &mut TlbBatch<'v, H, Npt>) {
        // SeqCst, there: with `has_unflushed`. A caller of that has read the PTEs under the lock of
        // their frame; the change comes after this addition, under the same lock.
        batch.count_in(&self.shadow.nr_unflushed);
        if batch.is_empty() {
            batch.add(self.tree.whole());
        }
    }

    /// Flushes all CPUs if there is a change to flush.
    #[inline]
    pub(super) fn flush(&self, batch: &mut TlbBatch<'v, H, Npt>) {
        if !batch.is_empty() {
            batch.flush_cpus();
            self.tree.reclaim();
        }
    }

    /// Flushes all CPUs, whatever the shadow tables say.
    pub(super) fn flush_cpus(&self) {
        self.tree.flush_cpus(self.participant, &[self.tree.whole()]);
    }

    /// Whether CPUs may have something cached that the shadow PTEs do not say any more.
    pub(super) fn has_unflushed(&self) -> bool {
        self.shadow.nr_unflushed.load(Ordering::SeqCst) != 0
    }

    /// See [`DerivedTables::zap_unbacked`]. Also removes the pages made from guest tables that are
    /// gone.
    ///
    /// [`DerivedTables::zap_unbacked`]: crate::table::derived::DerivedTables::zap_unbacked
    #[cold]
    pub(super) fn zap_unbacked(&self, range: GfnRange, batch: &mut TlbBatch<'v, H, Npt>) {
        // A store-load pair with the lock of a frame: see `WordLock::is_free`.
        full_fence();
        self.shadow.frames.for_each(range, |frame, gfn, level| {
            if frame.is_idle() {
                return;
            }
            self.write_protect_leaves(gfn, level, batch);
            // After the leaf PTEs, and whether or not there were any: nothing need map a guest
            // table.
            while level == Level::L4K && frame.pages.load(Ordering::Relaxed) != 0 {
                let Some(page) = self.page_of_lost_frame(gfn) else { break };
                self.zap_page(page, batch);
            }
        });
    }

    /// See [`DerivedTables::write_protect`]. It takes W from leaf PTEs of every size.
    ///
    /// [`DerivedTables::write_protect`]: crate::table::derived::DerivedTables::write_protect
    pub(super) fn write_protect(&self, words: &mut dyn Iterator<Item = (Gfn, u64)>, batch: &mut TlbBatch<'v, H, Npt>) {
        // As in `zap_unbacked`. The caller has taken W by an atomic operation.
        fence_after_rmw();
        let frames = &self.shadow.frames;
        let mut block = None;
        let mut of_block = None;
        let mut batched = ArrayVec::<&Frame, FRAMES_PER_BATCH>::new();
        for gfn in words.flat_map(|(first, bits)| SetBits(bits).map(move |bit| Gfn(first.0 + bit as u64))) {
            let first = Gfn(gfn.0 & !(Level::L2M.nr_pages() - 1));
            if block != Some(first) {
                block = Some(first);
                // Once for all pages of the block: their second stage has changed before, all of
                // it.
                for level in [Level::L2M, Level::L1G] {
                    if let Some(frame) = frames.get(gfn, level).filter(|frame| !frame.is_idle()) {
                        let _guard = frame.lock.lock(self.host());
                        // SAFETY: the frame is locked.
                        unsafe { self.protect_leaves(frame, batch) }
                    }
                }
                of_block = frames.of_block(gfn);
            }
            let Some(of_block) = of_block else { continue };
            let frame = &of_block[gfn.0 as usize % NR_ENTRIES];
            prefetch_for_write(frame);
            batched.push(frame);
            if batched.is_full() {
                self.protect_frames(&mut batched, batch);
            }
        }
        self.protect_frames(&mut batched, batch);
    }

    /// Takes W from all leaf PTEs of `frames`, which are in rising order, and forgets these frames.
    fn protect_frames(&self, frames: &mut ArrayVec<&Frame, FRAMES_PER_BATCH>, batch: &mut TlbBatch<'v, H, Npt>) {
        if let (Some(&first), Some(&last)) = (frames.first(), frames.last()) {
            // The CPU itself loads ahead in a run.
            let is_run = ptr::from_ref(first).wrapping_add(frames.len() - 1) == ptr::from_ref(last);
            if !is_run {
                self.prefetch(frames);
            }
        }
        for frame in frames.drain(..).filter(|frame| !frame.is_idle()) {
            let _guard = frame.lock.lock(self.host());
            // SAFETY: the frame is locked.
            unsafe { self.protect_leaves(frame, batch) }
        }
    }

    /// Fetches the first leaf PTEs that map `frames`, and their list links. Later it would be in
    /// vain: a locked operation keeps the CPU from loading ahead.
    fn prefetch(&self, frames: &[&Frame]) {
        let guard = self.pin();
        let mut known = None;
        for frame in frames {
            let Some(place) = PtePlace::from_number(frame.leaves.load(Ordering::Relaxed)) else { continue };
            let page = self.shadow.pages.get(place.page);
            // SAFETY: both are of this VM.
            unsafe { page.prefetch_link(&guard, place.index) }
            let first = match known {
                Some((page, first)) if page == place.page => first,
                _ => self.first_cell(&guard, page),
            };
            known = Some((place.page, first));
            prefetch_for_write(first.wrapping_add(place.index));
        }
    }

    /// The first PTE of the page; null if it may not be there as long as the guard.
    fn first_cell(&self, _guard: &Guard<'_>, page: &ShadowPage) -> *const AtomicU64 {
        // A page that is alive before and after its page-table page was read has that one, which
        // stays while the guard is open.
        let generation = page.generation();
        let table = page.table();
        if generation.is_none() || page.generation() != generation {
            return ptr::null();
        }
        self.host().table_ptr(table).cast()
    }

    /// Makes the leaf PTEs of the block of `level` at `gfn` what the second stage allows now.
    fn write_protect_leaves(&self, gfn: Gfn, level: Level, batch: &mut TlbBatch<'v, H, Npt>) {
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return };
        let _guard = frame.lock.lock(self.host());
        let second = self.second_stage(gfn).filter(|second| second.level >= level);
        let mut next = PtePlace::from_number(frame.leaves.load(Ordering::Relaxed));
        while let Some(place) = next {
            // SAFETY: the PTE is in the list of the frame, which is locked.
            next = unsafe { self.shadow.pages.behind(place) };
            let page = self.shadow.pages.get(place.page);
            // SAFETY: as above.
            let cell = unsafe { self.cell(page, place.index) };
            let value = cell.load(Ordering::Relaxed);
            match second {
                Some(second) if self.is_of(second, level, value) => {
                    if !second.is_writable && value & READ_WRITE != 0 {
                        self.add(batch);
                        cell.fetch_and(!READ_WRITE, Ordering::AcqRel);
                    }
                }
                // SAFETY: as above.
                _ => unsafe { self.drop_leaf(&frame.leaves, place, batch) },
            }
        }
    }

    /// Whether the shadow leaf PTE `value` of `level` maps the frame of `second`, in the same way.
    fn is_of(&self, second: SecondStage, level: Level, value: u64) -> bool {
        let leaf = self.tree.encoding.leaf(second.pfn, level, second.attributes).bits();
        let kind = Npt::ADDRESS | Npt::attribute_bits_at(Npt::ATTRIBUTES & !EXECUTE_DISABLE, level);
        (leaf ^ value) & kind == 0 && leaf & !value & EXECUTE_DISABLE == 0
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
    unsafe fn drop_leaf(&self, head: &AtomicU32, place: PtePlace, batch: &mut TlbBatch<'v, H, Npt>) {
        let page = self.shadow.pages.get(place.page);
        self.add(batch);
        // SAFETY: as the caller promises, the PTE leads to the locked frame, whose list has it.
        unsafe {
            self.cell(page, place.index).store(0, Ordering::Release);
            page.ptes().set_target(place.index, Target::None);
            self.shadow.pages.remove(head, place);
        }
        self.count(Counter::ShadowLeavesDropped);
    }

    /// Zaps all leaf PTEs of `frame`.
    ///
    /// # Safety
    /// The caller holds the frame's lock.
    pub(super) unsafe fn drop_leaves(&self, frame: &Frame, batch: &mut TlbBatch<'v, H, Npt>) {
        while let Some(place) = PtePlace::from_number(frame.leaves.load(Ordering::Relaxed)) {
            // SAFETY: the frame is locked, and the place is in its list.
            unsafe { self.drop_leaf(&frame.leaves, place, batch) }
        }
    }

    /// Zaps the PTE at `place`, leaf or link.
    ///
    /// # Safety
    /// The caller holds the lock of its page, which is alive, or dead and pinned by the caller.
    pub(super) unsafe fn drop_entry<W: Wait>(
        &self,
        place: PtePlace,
        batch: &mut TlbBatch<'v, H, Npt>,
    ) -> Result<(), W::Busy> {
        let page = self.shadow.pages.get(place.page);
        // SAFETY: as the caller promises.
        let ptes = unsafe { page.ptes() };
        let target = ptes.target(place.index);
        let (gfn, level) = match target {
            Target::None => return Ok(()),
            Target::Leaf(gfn) => (gfn, page.role().level()),
            // The page below may have another frame by now; then its last zap has removed the link.
            // So the frame is read before its lock is taken, and the target is compared under the
            // lock.
            Target::Link(below) | Target::Linking(below) => (self.shadow.pages.get(below.number).gfn(), Level::L4K),
        };
        let Some(frame) = self.shadow.frames.get(gfn, level) else { return Ok(()) };
        let _guard = W::lock(&frame.lock, self.host())?;
        if ptes.target(place.index) != target {
            return Ok(());
        }
        match target {
            Target::None => {}
            // SAFETY: the frame is locked, and the PTE leads there: so it is in the list.
            Target::Leaf(_) => unsafe { self.drop_leaf(&frame.leaves, place, batch) },
            Target::Link(below) | Target::Linking(below) => {
                // It is the right lock: while the link exists, the page below is of this
                // generation.
                self.add(batch);
                // SAFETY: as above.
                unsafe {
                    self.cell(page, place.index).store(0, Ordering::Release);
                    ptes.set_target(place.index, Target::None);
                    self.shadow.pages.remove(&self.shadow.pages.get(below.number).parents, place);
                }
            }
        }
        Ok(())
    }

    /// Removes the page: no thread finds it any more, no PTE points to it, and it has no PTEs. If
    /// it is the root of a vCPU, its page-table page stays until that vCPU has another root.
    pub(super) fn zap_page(&self, reference: PageRef, batch: &mut TlbBatch<'v, H, Npt>) {
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
            self.add(batch);
            self.unlist(frame, reference.number);
            while let Some(parent) = PtePlace::from_number(page.parents.load(Ordering::Relaxed)) {
                let above = pages.get(parent.page);
                // SAFETY: the PTE leads to a page of the frame, which is locked.
                unsafe {
                    self.cell(above, parent.index).store(0, Ordering::Release);
                    above.ptes().set_target(parent.index, Target::None);
                    pages.remove(&page.parents, parent);
                }
            }
            pages.note_synced(reference.number);
            page.die();
        }
        if role.is_of_table() {
            self.untrack(gfn);
        }
        for first in (0..NR_ENTRIES).step_by(ENTRIES_PER_LOCK) {
            // A thread that gets the lock in between makes no PTE: the page is dead.
            let _guard = page.lock.lock(self.host());
            for index in first..first + ENTRIES_PER_LOCK {
                // SAFETY: the page is locked, and is pinned since `die`.
                let Ok(()) = unsafe { self.drop_entry::<UntilFree>(PtePlace { page: reference.number, index }, batch) };
            }
        }
        self.count(Counter::ShadowPagesZapped);
        // SAFETY: the pin of `die`.
        if unsafe { page.unpin() } {
            // SAFETY: the page is dead, and this was the last pin.
            unsafe { self.free_page(reference, batch) }
        }
    }

    /// Frees the page-table page of a page that has neither PTEs nor users.
    ///
    /// # Safety
    /// The caller's [`unpin`](super::page::ShadowPage::unpin) was the last of the page's life, so
    /// that the page belongs to the caller.
    unsafe fn free_page(&self, reference: PageRef, batch: &mut TlbBatch<'v, H, Npt>) {
        self.add(batch);
        // SAFETY: the page-table page belongs to the shadow page, which is dead: no PTE points to
        // it, and its own PTEs were zapped. The batch has been added to, so it flushes all CPUs
        // before it retires the page-table page.
        unsafe { batch.add_unlinked(self.shadow.pages.get(reference.number).table()) }
        // SAFETY: the page belongs to the caller, and is in no list: see above.
        unsafe { self.shadow.pages.release(reference.number) }
    }

    /// Ends the pin of a vCPU that has another root now.
    ///
    /// # Safety
    /// As for [`ShadowPage::unpin`](super::page::ShadowPage::unpin).
    #[inline]
    pub(super) unsafe fn unpin(&self, reference: PageRef) {
        // SAFETY: as the caller promises.
        if unsafe { self.shadow.pages.get(reference.number).unpin() } {
            // SAFETY: as in `zap_page`.
            unsafe { self.free_orphan(reference) }
        }
    }

    /// Frees a page that died while it was pinned. Apart from `unpin`, which each switch of CR3
    /// calls.
    ///
    /// # Safety
    /// As for `free_page`.
    #[cold]
    #[inline(never)]
    unsafe fn free_orphan(&self, reference: PageRef) {
        let mut batch = self.batch();
        // SAFETY: as the caller promises.
        unsafe { self.free_page(reference, &mut batch) }
        self.flush(&mut batch);
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
        self.untrack_below(gfn, Level(Level::L1G.0 + 1));
    }

    /// The same for the blocks of the levels below `end`.
    pub(super) fn untrack_below(&self, gfn: Gfn, end: Level) {
        for level in [Level::L2M, Level::L1G].into_iter().filter(|&level| level < end) {
            if let Some(frame) = self.shadow.frames.get(gfn, level) {
                frame.nr_tables().fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    /// Removes all pages, when no vCPU is left.
    pub(crate) fn zap_all(&self) {
        let pages = &self.shadow.pages;
        let mut batch = self.batch();
        for number in 1..=pages.max_pages() {
            if let Some(generation) = pages.peek(number).and_then(|page| page.generation()) {
                self.zap_page(PageRef { number, generation }, &mut batch);
            }
        }
        self.flush(&mut batch);
    }

    /// Makes room for new pages by removing some: first those to which nothing points, then those
    /// that no walk went through since an eviction last passed over them. It never removes the root
    /// of a vCPU.
    #[cold]
    #[inline(never)]
    pub(super) fn evict(&self) {
        let pages = &self.shadow.pages;
        let mut batch = self.batch();
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
                self.zap_page(PageRef { number, generation }, &mut batch);
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
        self.flush(&mut batch);
    }
}
