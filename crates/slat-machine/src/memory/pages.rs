//! Memory whose pages may change frames, as a host changes guest memory while guests run. It
//! discards pages (a balloon), moves them to other frames (compaction, migration between nodes),
//! write-protects them (fork, merging of equal pages), and swaps them out and in.
//!
//! # Implementation
//! - Each page has a lock, held for a look or for a change, and never while the engine is called.
//!   An event that removes a page or a right invalidates the page's guest frames first, and makes
//!   the change within the invalidation: see [`Host::resolve`](slat::Host::resolve). Several
//!   changes of one page may be under way at once; the lock orders them, and each changes what it
//!   finds.
//! - [`resolve`](Pages::resolve) returns the state at that moment, also while a change is under
//!   way: the engine must not install an answer that an invalidation has overtaken.
//! - A page that was swapped in keeps its copy in the swap store. If the engine then reports no
//!   write until the page is swapped out again, the copy is still good and nothing is saved. So a
//!   write that the engine failed to report is lost, and the guest detects it.
//! - Reports of a leaf come before the return of the invalidation that zapped it; another one, at
//!   the same time, may return earlier. So only a swap-out that no other invalidation of the page
//!   overlaps trusts them.
//! - A page that was protected shares its frame with [`Snapshot`]s. The first write gets a copy; or
//!   the frame itself, if no snapshot has it any more.
//! - The discards of a page are counted before they begin and after they have ended. So a guest
//!   knows exactly when it may find zeros and when it must ([`Discards`]).
//!
//! # How many frames
//! As many as pages, and spare ones. Snapshots may hold half of these. A change that needs a frame
//! for a short time (a copy is made before the original is freed) waits only for others of that
//! kind, and they do not wait.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use slat::host::{Resolved, Unresolved, ZappedLeaf};
use slat::{Access, Gfn, PAGE_SIZE, PageSize, Pfn};

use super::frames::{Contents, Corruption, Frame, Frames};
use super::{BackingKind, FixedMemory, MemoryError};
use crate::linux::mapping::MappedMemory;

/// The duration of a slow answer: enough for other threads to run.
const SLOW_RESOLVE: Duration = Duration::from_micros(50);

/// Makes a change while the guest frames of the page are invalidated.
///
/// # Errors
/// The engine's: nothing was changed.
pub(crate) type Invalidate<'i> = dyn Fn(&mut dyn FnMut()) -> Result<(), slat::error::RangeError> + 'i;

/// The result of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum Effect {
    /// It was done.
    Done,
    /// The page has no frame now: it was never touched, or is discarded or swapped out.
    NoFrame,
    /// No spare frame, or none for another snapshot.
    NoSpareFrame,
}

/// What was done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct EventCounts {
    /// Pages whose contents were discarded.
    pub nr_discarded: u64,
    /// Pages that were copied to another frame.
    pub nr_moved: u64,
    /// Pages that were protected, each with a snapshot.
    pub nr_protected: u64,
    /// Protected pages that were copied because the guest wrote them.
    pub nr_copied_on_write: u64,
    /// Protected pages that the guest wrote when no snapshot was left.
    pub nr_unprotected: u64,
    /// Pages that were saved and lost their frame.
    pub nr_swapped_out: u64,
    /// Pages that lost their frame and were not saved: the engine reported no write after they came
    /// in.
    pub nr_dropped_clean: u64,
    /// Pages that came back from the swap store.
    pub nr_swapped_in: u64,
    /// Snapshots compared with their frames.
    pub nr_snapshots_verified: u64,
    /// Free frames whose poison was intact.
    pub nr_poison_intact: u64,
    /// Zapped leaves through which the guest had used a page.
    pub nr_zapped_accessed: u64,
    /// Zapped leaves through which the guest had written a page.
    pub nr_zapped_dirty: u64,
}

/// Frames that are in use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FrameUse {
    /// Frames that pages and snapshots have.
    pub nr_frames: u64,
    /// Pages that have a frame.
    pub nr_pages: u64,
    /// Snapshots that exist.
    pub nr_snapshots: u64,
}

/// How often a page was discarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Discards {
    /// Discards that have begun.
    pub begun: u32,
    /// Discards that are over: an access that begins now finds nothing from before them.
    pub done: u32,
}

/// A page, under its lock.
#[derive(Debug, Default)]
struct State {
    frame: Option<Frame>,
    /// A write must not use `frame` as long as it is shared.
    is_protected: bool,
    /// In the swap store: the page's contents if it has no frame, or its contents when it came in.
    swap: Option<Contents>,
}

#[derive(Debug, Default)]
struct Page {
    state: Mutex<State>,
    /// Invalidations under way in the lower half; all that ever began in the upper.
    invalidations: AtomicU64,
    discards_begun: AtomicU32,
    discards_done: AtomicU32,
}

/// An invalidation of a page, from before the engine is called.
struct Underway<'p> {
    page: &'p Page,
    number: u32,
    began_alone: bool,
}

impl<'p> Underway<'p> {
    fn begin(page: &'p Page) -> Underway<'p> {
        // AcqRel: what an earlier invalidation's engine reported is observed. And `had_no_overlap`
        // observes a later one, whose engine reports the leaves that it zapped.
        let before = page.invalidations.fetch_add(1 << 32 | 1, Ordering::AcqRel);
        Underway { page, number: ((before >> 32) as u32).wrapping_add(1), began_alone: before as u32 == 0 }
    }

    /// Whether no other invalidation of the page was under way since this one began.
    fn had_no_overlap(&self) -> bool {
        self.began_alone && (self.page.invalidations.load(Ordering::Acquire) >> 32) as u32 == self.number
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.page.invalidations.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug, Default)]
struct Counts {
    discarded: AtomicU64,
    moved: AtomicU64,
    protected: AtomicU64,
    copied_on_write: AtomicU64,
    unprotected: AtomicU64,
    swapped_out: AtomicU64,
    dropped_clean: AtomicU64,
    swapped_in: AtomicU64,
    snapshots_verified: AtomicU64,
    zapped_accessed: AtomicU64,
    zapped_dirty: AtomicU64,
}

fn count(counter: &AtomicU64) {
    // Relaxed: a statistic.
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Guest memory in pages of 4 KiB, each of which is in any frame or in none.
#[derive(Debug)]
pub struct Pages {
    frames: Frames,
    pages: Box<[Page]>,
    nr_snapshots: AtomicU64,
    max_snapshots: u64,
    nr_resolved: AtomicU64,
    counts: Counts,
}

impl Pages {
    /// `size_bytes` of zeros with as many frames as pages and `nr_spare_frames` more.
    pub(super) fn new(size_bytes: u64, nr_spare_frames: u64) -> Result<Pages, MemoryError> {
        // Saturated: more than any machine has, and refused as that.
        let all_bytes = nr_spare_frames.saturating_mul(PAGE_SIZE).saturating_add(size_bytes) & !(PAGE_SIZE - 1);
        let memory = FixedMemory::new(BackingKind::Anonymous, all_bytes)?;
        Ok(Pages {
            frames: Frames::new(memory),
            pages: (0..size_bytes >> Gfn::SHIFT).map(|_| Page::default()).collect(),
            nr_snapshots: AtomicU64::new(0),
            max_snapshots: nr_spare_frames / 2,
            nr_resolved: AtomicU64::new(0),
            counts: Counts::default(),
        })
    }

    /// The number of pages.
    pub fn nr_pages(&self) -> u64 {
        self.pages.len() as u64
    }

    /// The mapping that all frames are in.
    pub(super) fn mapping(&self) -> &MappedMemory {
        self.frames.mapping()
    }

    /// The frame that `page` has now, if any.
    pub(super) fn frame_of(&self, page: u64) -> Option<Pfn> {
        self.page(page)?.state.lock().frame.map(|frame| self.frames.pfn(frame))
    }

    /// What was done so far.
    pub fn counts(&self) -> EventCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &self.counts;
        EventCounts {
            nr_discarded: get(&counts.discarded),
            nr_moved: get(&counts.moved),
            nr_protected: get(&counts.protected),
            nr_copied_on_write: get(&counts.copied_on_write),
            nr_unprotected: get(&counts.unprotected),
            nr_swapped_out: get(&counts.swapped_out),
            nr_dropped_clean: get(&counts.dropped_clean),
            nr_swapped_in: get(&counts.swapped_in),
            nr_snapshots_verified: get(&counts.snapshots_verified),
            nr_poison_intact: self.frames.nr_intact(),
            nr_zapped_accessed: get(&counts.zapped_accessed),
            nr_zapped_dirty: get(&counts.zapped_dirty),
        }
    }

    /// The users of frames. Exact while no event and no fault is under way.
    pub fn frame_use(&self) -> FrameUse {
        FrameUse {
            nr_frames: self.frames.nr_used(),
            nr_pages: self.pages.iter().filter(|page| page.state.lock().frame.is_some()).count() as u64,
            nr_snapshots: self.nr_snapshots.load(Ordering::Relaxed),
        }
    }

    /// Checks the poison of all free frames.
    ///
    /// # Errors
    /// The first free frame that was ever found written.
    pub fn check_free_frames(&self) -> Result<(), Corruption> {
        self.frames.check_free();
        self.frames.corruption().map_or(Ok(()), Err)
    }

    /// How often `page` was discarded; never, beyond the end.
    #[inline]
    pub fn discards(&self, page: u64) -> Discards {
        let Some(page) = self.page(page) else { return Discards::default() };
        // Acquire, both: see `discard`. `done` first, so that it is never more than `begun`.
        let done = page.discards_done.load(Ordering::Acquire);
        Discards { begun: page.discards_begun.load(Ordering::Acquire), done }
    }

    /// The first 8 bytes of `page`; `None` beyond the end.
    pub fn peek(&self, page: u64) -> Option<u64> {
        let state = self.page(page)?.state.lock();
        // Under the lock the frame stays the page's.
        Some(match (state.frame, &state.swap) {
            (Some(frame), _) => self.frames.first_word(frame),
            (None, Some(contents)) => contents.first_word(),
            (None, None) => 0,
        })
    }

    #[inline]
    fn page(&self, page: u64) -> Option<&Page> {
        self.pages.get(usize::try_from(page).ok()?)
    }

    /// Counts what the guest did through a leaf.
    pub(crate) fn note_zapped(&self, leaf: ZappedLeaf) {
        if leaf.accessed {
            count(&self.counts.zapped_accessed);
        }
        if leaf.dirty {
            count(&self.counts.zapped_dirty);
            self.frames.note_dirty(leaf.pfn);
        }
    }

    /// The frame of `page` for `access`: brings the page in, or copies it, if need be.
    pub(crate) fn resolve(
        &self,
        page: u64,
        access: Access,
        invalidate: &Invalidate<'_>,
    ) -> Result<Resolved, Unresolved> {
        let page = self.page(page).ok_or(Unresolved::Gone)?;
        loop {
            let mut state = page.state.lock();
            let found = match state.frame {
                Some(frame) if state.is_protected && access == Access::Write => {
                    if self.frames.is_shared(frame) {
                        None
                    } else {
                        // No snapshot has it any more. Allowing more needs no invalidation.
                        state.is_protected = false;
                        count(&self.counts.unprotected);
                        Some(frame)
                    }
                }
                Some(frame) => Some(frame),
                None => {
                    let frame = match &state.swap {
                        Some(contents) => self.frames.take_with(contents),
                        None => self.frames.take_zeroed(),
                    };
                    if frame.is_some() && state.swap.is_some() {
                        count(&self.counts.swapped_in);
                    }
                    state.frame = frame;
                    state.is_protected = false;
                    frame
                }
            };
            if let Some(frame) = found {
                let (pfn, writable) = (self.frames.pfn(frame), !state.is_protected);
                drop(state);
                self.delay();
                return Ok(Resolved { writable, ..Resolved::memory(pfn, PageSize::Size4K) });
            }
            let needs_copy = state.frame.is_some();
            drop(state);
            if !needs_copy || self.copy_on_write(page, invalidate)? == Effect::NoSpareFrame {
                // Others hold the last frames, for a short time.
                std::thread::yield_now();
            }
        }
    }

    /// Delays some answers, as those of a host that reads from a disk. The engine must not install
    /// an answer that an event has overtaken meanwhile.
    fn delay(&self) {
        // Relaxed: it only selects some answers.
        match self.nr_resolved.fetch_add(1, Ordering::Relaxed) {
            nr if nr % 32 == 31 => std::thread::sleep(SLOW_RESOLVE),
            nr if nr % 4 == 3 => std::thread::yield_now(),
            _ => {}
        }
    }

    /// Copies a protected page to a frame of its own.
    fn copy_on_write(&self, page: &Page, invalidate: &Invalidate<'_>) -> Result<Effect, Unresolved> {
        let underway = Underway::begin(page);
        let mut effect = Effect::Done;
        let change = &mut || {
            let mut state = page.state.lock();
            // As it is now: another event may have come first.
            let Some(old) = state.frame else { return };
            if !state.is_protected || !self.frames.is_shared(old) {
                return;
            }
            let Some(new) = self.frames.take_copy(old) else {
                effect = Effect::NoSpareFrame;
                return;
            };
            self.drop_swap_if_written(&mut state, old, &underway);
            (state.frame, state.is_protected) = (Some(new), false);
            self.frames.release(old);
            count(&self.counts.copied_on_write);
        };
        // Out of memory: the guest tries again if its user space wants that.
        invalidate(change).map_err(|_| Unresolved::Gone)?;
        Ok(effect)
    }

    /// Discards the contents of `pages`; the next access finds zeros. `invalidate` is for all of
    /// them.
    pub(crate) fn discard(
        &self,
        pages: Range<u64>,
        invalidate: &Invalidate<'_>,
    ) -> Result<(), slat::error::RangeError> {
        let pages = self.slice(pages);
        for page in pages {
            // Release and before everything else: a thread that finds zeros finds the count.
            page.discards_begun.fetch_add(1, Ordering::AcqRel);
        }
        let _underway: Vec<_> = pages.iter().map(Underway::begin).collect();
        let result = invalidate(&mut || {
            for page in pages {
                let State { frame, .. } = std::mem::take(&mut *page.state.lock());
                if let Some(frame) = frame {
                    self.frames.release(frame);
                }
                count(&self.counts.discarded);
            }
        });
        for page in pages {
            match result {
                // Release and after everything else: a thread that finds the count finds nothing
                // from before.
                Ok(()) => page.discards_done.fetch_add(1, Ordering::AcqRel),
                Err(_) => page.discards_begun.fetch_sub(1, Ordering::AcqRel),
            };
        }
        result
    }

    /// Only invalidates `pages`.
    pub(crate) fn invalidate(
        &self,
        pages: Range<u64>,
        invalidate: &Invalidate<'_>,
    ) -> Result<(), slat::error::RangeError> {
        let _underway: Vec<_> = self.slice(pages).iter().map(Underway::begin).collect();
        invalidate(&mut || ())
    }

    fn slice(&self, pages: Range<u64>) -> &[Page] {
        let end = pages.end.min(self.nr_pages());
        &self.pages[pages.start.min(end) as usize..end as usize]
    }

    /// Copies `page` to another frame.
    pub(crate) fn relocate(&self, page: u64, invalidate: &Invalidate<'_>) -> Result<Effect, slat::error::RangeError> {
        self.change(page, invalidate, |state, underway| {
            let Some(old) = state.frame else { return Effect::NoFrame };
            let Some(new) = self.frames.take_copy(old) else { return Effect::NoSpareFrame };
            self.drop_swap_if_written(state, old, underway);
            // The new frame has no other user: it may be written.
            (state.frame, state.is_protected) = (Some(new), false);
            self.frames.release(old);
            count(&self.counts.moved);
            Effect::Done
        })
    }

    /// Saves `page` and frees its frame.
    pub(crate) fn swap_out(&self, page: u64, invalidate: &Invalidate<'_>) -> Result<Effect, slat::error::RangeError> {
        self.change(page, invalidate, |state, underway| {
            let Some(frame) = state.frame else { return Effect::NoFrame };
            self.drop_swap_if_written(state, frame, underway);
            if state.swap.is_some() {
                count(&self.counts.dropped_clean);
            } else {
                state.swap = Some(self.frames.contents(frame));
                count(&self.counts.swapped_out);
            }
            (state.frame, state.is_protected) = (None, false);
            self.frames.release(frame);
            Effect::Done
        })
    }

    /// Drops the copy in the swap store, unless it is certain that the guest has not written the
    /// page since it came in, into `frame`.
    fn drop_swap_if_written(&self, state: &mut State, frame: Frame, underway: &Underway<'_>) {
        if !underway.had_no_overlap() || self.frames.is_dirty(frame) {
            state.swap = None;
        }
    }

    /// Write-protects `page` in its frame, which the snapshot shares from now on.
    pub(crate) fn protect(
        self: &Arc<Self>,
        page: u64,
        invalidate: &Invalidate<'_>,
    ) -> Result<Result<Snapshot, Effect>, slat::error::RangeError> {
        let more = |nr: u64| (nr < self.max_snapshots).then_some(nr + 1);
        // Relaxed: only a limit.
        if self.nr_snapshots.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_err() {
            return Ok(Err(Effect::NoSpareFrame));
        }
        let mut share = SnapshotShare { pages: Arc::clone(self), frame: None };
        let mut contents = None;
        let effect = self.change(page, invalidate, |state, _| {
            let Some(frame) = state.frame else { return Effect::NoFrame };
            self.frames.share(frame);
            share.frame = Some(frame);
            state.is_protected = true;
            contents = Some(self.frames.contents(frame));
            count(&self.counts.protected);
            Effect::Done
        })?;
        Ok(contents.map(|contents| Snapshot { share, contents }).ok_or(effect))
    }

    /// Makes a change of one page within an invalidation.
    fn change(
        &self,
        page: u64,
        invalidate: &Invalidate<'_>,
        mut change: impl FnMut(&mut State, &Underway<'_>) -> Effect,
    ) -> Result<Effect, slat::error::RangeError> {
        let Some(page) = self.page(page) else { return Ok(Effect::NoFrame) };
        let underway = Underway::begin(page);
        let mut effect = Effect::NoFrame;
        invalidate(&mut || effect = change(&mut page.state.lock(), &underway))?;
        Ok(effect)
    }
}

/// The share of a snapshot in a frame, and its count.
#[derive(Debug)]
struct SnapshotShare {
    pages: Arc<Pages>,
    frame: Option<Frame>,
}

impl Drop for SnapshotShare {
    fn drop(&mut self) {
        if let Some(frame) = self.frame {
            self.pages.frames.release(frame);
        }
        // Relaxed: as where it was added. After the release of the frame: a snapshot that is made
        // in its place finds a spare one.
        self.pages.nr_snapshots.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Another user of a page's frame, since the page was protected. The contents that it finds must
/// never change.
#[derive(Debug)]
pub struct Snapshot {
    share: SnapshotShare,
    contents: Contents,
}

impl Snapshot {
    /// Compares the frame with its contents when the page was protected.
    ///
    /// # Errors
    /// The first word that has changed.
    pub fn verify(&self) -> Result<(), Corruption> {
        let Some(frame) = self.share.frame else { return Ok(()) };
        let pages = &self.share.pages;
        pages.frames.compare(frame, &self.contents, "a write-protected page was written in its old frame")?;
        count(&pages.counts.snapshots_verified);
        Ok(())
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
