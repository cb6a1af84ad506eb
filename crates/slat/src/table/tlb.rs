//! TLB flushes that are due, and the page-table pages that wait for them.
//!
//! # Guarantees
//! An unlinked page-table page is freed only when no CPU can walk it, and no thread of the engine
//! can read it. The frames of pinned pages are released to the host once, when no CPU uses them.
//! No flush is forgotten: a batch flushes at the latest when it is dropped, also where a method of
//! the host panics between two steps. If the flush itself panics, page-table pages and frames are
//! leaked.
//!
//! # Use
//! A change adds the blocks whose PTEs it has zapped, or deprived of rights ([`TlbBatch::add`]),
//! the page-table pages that it has unlinked, and the frames of pinned leaves. Outside of guards and
//! locks it calls [`TlbBatch::flush`], or drops the batch.
//!
//! # Implementation
//! [`TlbBatch::flush`]
//! 1. zaps what derived tables (`derived`) have of the ranges, and adds that to the batch,
//! 2. flushes the ranges on all CPUs,
//! 3. releases the frames, and retires the page-table pages.
//!
//! [`TlbBatch::flush_cpus`] leaves out step 1, where derived tables have changed already. Derived
//! tables count each batch with changes of theirs until step 2 is over ([`TlbBatch::count_in`]).
//!
//! Up to [`MAX_RANGES`] ranges are kept apart; if there are more, one range covers them all. Frames
//! cannot be merged so, but where they follow each other: there is room for [`MAX_RUNS`] runs, or
//! for fewer where there is no memory for more.

#![expect(unsafe_code, reason = "owns the page-table pages that it frees")]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::mem;

use arrayvec::ArrayVec;

use super::Tree;
use super::retire::{Participant, TableChain};
use crate::addr::{Gfn, GfnRange, Hpa, Pfn};
use crate::boxed::try_box;
use crate::format::Format;
use crate::host::Host;
use crate::sync::{AtomicU64, Ordering};

/// Ranges that are kept apart before one covers them all. The documentation of [`Host::flush`]
/// names the number, too.
const MAX_RANGES: usize = 8;

/// Runs of frames that wait for one flush.
const MAX_RUNS: usize = 512;

/// Pages that follow each other, and the frame of the first: the others follow it.
type FrameRun = (GfnRange, Pfn);

/// The frames of pinned pages that were unmapped, by runs.
#[expect(clippy::box_collection, reason = "each batch is on a stack, and most have none")]
struct ReleasedFrames {
    /// Without pages if there is none. Mostly it is the only one, and nothing is allocated.
    last: FrameRun,
    earlier: Option<Box<Vec<FrameRun>>>,
}

impl ReleasedFrames {
    fn none() -> ReleasedFrames {
        ReleasedFrames { last: (GfnRange { start: Gfn(0), end: Gfn(0) }, Pfn(0)), earlier: None }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.last.0.is_empty()
    }

    fn extends_last(&self, range: GfnRange, pfn: Pfn) -> bool {
        let (last, first) = self.last;
        last.end == range.start && pfn.0 == first.0 + last.nr_pages()
    }

    /// Whether these pages can be added before a flush. If nothing was added yet, they can.
    fn has_room(&mut self, range: GfnRange, pfn: Pfn) -> bool {
        if self.is_empty() || self.extends_last(range, pfn) {
            return true;
        }
        if self.earlier.is_none() {
            self.earlier = try_box(Vec::new()).ok();
        }
        let Some(earlier) = &mut self.earlier else { return false };
        earlier.len() < earlier.capacity() || (earlier.len() < MAX_RUNS && earlier.try_reserve(1).is_ok())
    }

    /// Adds pages, for which there is room.
    fn add(&mut self, range: GfnRange, pfn: Pfn) {
        if self.extends_last(range, pfn) {
            self.last.0.end = range.end;
            return;
        }
        let before = mem::replace(&mut self.last, (range, pfn));
        if before.0.is_empty() {
            return;
        }
        let Some(earlier) = &mut self.earlier else { return debug_assert!(false, "the caller has made room") };
        debug_assert!(earlier.len() < earlier.capacity(), "the caller has made room");
        earlier.push(before);
    }

    fn release<H: Host>(self, host: &H) {
        let earlier = self.earlier.iter().flat_map(|runs| runs.iter());
        for &(range, pfn) in earlier.chain([&self.last]).filter(|(range, _)| !range.is_empty()) {
            host.release_mapped(range, pfn);
        }
    }
}

/// What CPUs may still have cached, and the page-table pages that they may still walk.
#[must_use]
pub(crate) struct TlbBatch<'t, H: Host, F: Format> {
    tree: &'t Tree<H, F>,
    participant: &'t Participant,
    ranges: ArrayVec<GfnRange, MAX_RANGES>,
    /// Whether there were more ranges: one covers them all.
    is_joined: bool,
    unlinked: TableChain,
    released: ReleasedFrames,
    /// Where the batch is counted until the CPUs are flushed.
    counter: Option<&'t AtomicU64>,
}

impl<'t, H: Host, F: Format> TlbBatch<'t, H, F> {
    #[inline]
    pub(crate) fn new(tree: &'t Tree<H, F>, participant: &'t Participant) -> TlbBatch<'t, H, F> {
        TlbBatch {
            tree,
            participant,
            ranges: ArrayVec::new(),
            is_joined: false,
            unlinked: TableChain::new(),
            released: ReleasedFrames::none(),
            counter: None,
        }
    }

    pub(crate) fn tree(&self) -> &'t Tree<H, F> {
        self.tree
    }

    pub(crate) fn participant(&self) -> &'t Participant {
        self.participant
    }

    /// Adds `range`, of which CPUs may have translations cached that the page tables no longer
    /// have.
    pub(crate) fn add(&mut self, mut range: GfnRange) {
        let is_joined = self.is_joined;
        let touches = |last: &&mut GfnRange| is_joined || (range.start <= last.end && last.start <= range.end);
        if let Some(last) = self.ranges.last_mut().filter(touches) {
            last.start = last.start.min(range.start);
            last.end = last.end.max(range.end);
            return;
        }
        if self.ranges.is_full() {
            self.join(&mut range);
        }
        self.ranges.push(range);
    }

    /// Widens `range` to all ranges, which it replaces.
    #[cold]
    fn join(&mut self, range: &mut GfnRange) {
        self.is_joined = true;
        for other in self.ranges.drain(..) {
            range.start = range.start.min(other.start);
            range.end = range.end.max(other.end);
        }
    }

    /// Adds a page-table page that was unlinked.
    ///
    /// # Safety
    /// As for [`TableChain::push`]. The block that the page-table page covered is added, too,
    /// before the next flush.
    pub(crate) unsafe fn add_unlinked(&mut self, table: Hpa) {
        // SAFETY: as the caller promises; the flush comes before the chain is retired.
        unsafe { self.unlinked.push(&self.tree.host, table) }
    }

    /// Adds a page-table page that was unlinked with its leaves, and with those that its frozen
    /// PTEs name: `nr_tables` together.
    ///
    /// # Safety
    /// As for [`TableChain::push_with_leaves`], and as for [`add_unlinked`](Self::add_unlinked).
    pub(crate) unsafe fn add_unlinked_with_leaves(&mut self, table: Hpa, nr_tables: u64) {
        // SAFETY: as the caller promises; the flush comes before the chain is retired.
        unsafe { self.unlinked.push_with_leaves(&self.tree.host, table, nr_tables) }
    }

    /// Whether there is room for [`add_released`](Self::add_released) with these pages, before the
    /// next flush.
    #[inline]
    pub(crate) fn has_room_to_release(&mut self, range: GfnRange, pfn: Pfn) -> bool {
        self.released.has_room(range, pfn)
    }

    /// Adds the frames from `pfn` on of the pages of `range`, to be released: this thread has emptied
    /// the pinned leaf that mapped them. There is room. The pages are [added](Self::add), too, before
    /// the next flush.
    #[inline]
    pub(crate) fn add_released(&mut self, range: GfnRange, pfn: Pfn) {
        self.released.add(range, pfn);
    }

    /// Counts the batch in `counter` until the CPUs are flushed. It is not counted yet.
    pub(crate) fn count_in(&mut self, counter: &'t AtomicU64) {
        debug_assert!(!self.is_counted());
        // SeqCst: the caller says with which load.
        counter.fetch_add(1, Ordering::SeqCst);
        self.counter = Some(counter);
    }

    #[inline]
    pub(crate) fn is_counted(&self) -> bool {
        self.counter.is_some()
    }

    /// Whether there is nothing to flush and no page-table page.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.unlinked.len() == 0
    }

    /// How many page-table pages wait for the flush: without those that go with them.
    pub(crate) fn nr_unlinked(&self) -> u64 {
        self.unlinked.len()
    }

    /// As [`nr_unlinked`](Self::nr_unlinked), with them.
    pub(crate) fn nr_unlinked_with_leaves(&self) -> u64 {
        self.unlinked.nr_tables()
    }

    /// Flushes the ranges, if there are any: first in derived tables, then on all CPUs. Then
    /// releases the frames and retires the page-table pages.
    #[inline]
    pub(crate) fn flush(&mut self) {
        if self.tree.derived.is_some() {
            self.flush_derived();
        }
        self.flush_cpus();
    }

    #[inline(never)]
    fn flush_derived(&mut self) {
        let Some(derived) = self.tree.derived.as_deref() else { return };
        for nth in 0..self.ranges.len() {
            derived.zap_unbacked(self.ranges[nth], self);
        }
    }

    /// As [`flush`](Self::flush), where derived tables allow no more than the second stage already.
    #[inline]
    pub(crate) fn flush_cpus(&mut self) {
        if self.unlinked.len() > 0 || !self.released.is_empty() || self.counter.is_some() {
            return self.flush_cpus_and_release();
        }
        self.flush_ranges();
    }

    #[inline(never)]
    fn flush_cpus_and_release(&mut self) {
        // Taken first: if the flush panics, these are leaked and the count stays, for CPUs may still
        // use what was zapped.
        let released = mem::replace(&mut self.released, ReleasedFrames::none());
        let unlinked = mem::replace(&mut self.unlinked, TableChain::new());
        let counter = self.counter.take();
        self.flush_ranges();
        if let Some(counter) = counter {
            counter.fetch_sub(1, Ordering::SeqCst);
        }
        released.release(&self.tree.host);
        // SAFETY: both are of the tree.
        unsafe { self.tree.epochs.retire_tables(&self.tree.host, unlinked) }
    }

    #[inline]
    fn flush_ranges(&mut self) {
        self.is_joined = false;
        if !self.ranges.is_empty() {
            let ranges = ClearedAtEnd(&mut self.ranges);
            self.tree.flush_cpus(self.participant, ranges.0);
        }
    }
}

/// Ranges that are cleared when their flush ends, also by a panic: the batch does not flush them
/// again.
struct ClearedAtEnd<'r>(&'r mut ArrayVec<GfnRange, MAX_RANGES>);

impl Drop for ClearedAtEnd<'_> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

impl<H: Host, F: Format> Drop for TlbBatch<'_, H, F> {
    #[inline]
    fn drop(&mut self) {
        if !self.is_empty() {
            self.flush();
        }
    }
}
