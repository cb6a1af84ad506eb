//! The ranges in flight: those that are being invalidated at this moment, for the host
//! ([`Vm::invalidate_range`]) or with a memslot that changes. To publish one is step 1 of
//! [`invalidation_seq`](super::invalidation_seq).
//!
//! # Guarantees
//! - No fault installs a leaf that shares a frame with a range in flight.
//! - A fault that misses a range because it is withdrawn observes what the host did before.
//! - Ranges stay apart: a fault outside of all of them is not disturbed. To publish and to withdraw
//!   a range waits for no other thread.
//!
//! # Use
//! A change calls [`RangesInFlight::publish`] before it takes its sequence number, and drops the
//! answer after the host is done. A fault calls [`RangesInFlight::free_level`] between its reads
//! of the PTE and of the memslots. Inside a range it comes back later.
//!
//! # Implementation
//! Ranges lie in chunks of a pair of cache lines each: places, and a word with a *claimed* and an
//! *active* bit for each place. Publishing
//! 1. claims a place,
//! 2. stores the range in it,
//! 3. sets the active bit.
//!
//! Withdrawing clears both bits by one operation.
//!
//! When all places are claimed, another chunk is linked behind, and stays for the life of the VM.
//! So the number of chunks follows the number of invalidations that ever ran at once. The word of
//! the first chunk also counts the ranges in the chunks behind it, from before they are active
//! until after they are not. So one load shows a fault that there is no range at all.
//!
//! # Why it is correct
//! A place may be withdrawn and claimed again while a fault reads it. Then the fault reads the
//! start of one range and the end of another. That is harmless:
//! - The first range is over. The loads are acquire, so the fault observes what its host did.
//! - The second range was published after the fault read its PTE, so its number makes the fault's
//!   exchange fail.
//!
//! [`Vm::invalidate_range`]: crate::Vm::invalidate_range

#![expect(unsafe_code, reason = "chunks are linked by raw pointers")]

use alloc::boxed::Box;
use core::ptr;

use crate::addr::{Gfn, GfnRange, Level};
use crate::boxed::try_box;
use crate::error::OutOfMemory;
use crate::sync::{AtomicPtr, AtomicU64, Ordering, record};

/// As many as fill a pair of cache lines (which hardware fetches together), with the word and the
/// link.
#[cfg(not(loom))]
const NR_PLACES: usize = 7;
/// Few, so that a model reaches the second chunk.
#[cfg(loom)]
const NR_PLACES: usize = 1;

/// Bit of the word that claims place `place`.
const fn claimed_bit(place: usize) -> u64 {
    1 << place
}

/// Bit of the word that makes place `place` active.
const fn active_bit(place: usize) -> u64 {
    1 << (ACTIVE_SHIFT + place)
}

const ACTIVE_SHIFT: usize = 16;
/// From this bit on the first chunk's word counts the ranges of all other chunks.
const BEHIND_SHIFT: usize = 32;
const ONE_BEHIND: u64 = 1 << BEHIND_SHIFT;

#[derive(Default)]
struct Place {
    start: AtomicU64,
    end: AtomicU64,
}

/// Each fault reads it, each invalidation writes it: on lines of its own.
#[derive(Default)]
#[repr(C, align(128))]
struct Chunk {
    word: AtomicU64,
    /// Set once.
    next: AtomicPtr<Chunk>,
    places: [Place; NR_PLACES],
}

impl Chunk {
    /// Claims a place and publishes `range` there. Returns the place; `None` if all are claimed.
    fn publish(&self, range: GfnRange) -> Option<usize> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let place = (0..NR_PLACES).find(|&place| word & claimed_bit(place) == 0)?;
            // Acquire: what the place's last owner did is over, and the stores below hand it on.
            let claimed = word | claimed_bit(place);
            match self.word.compare_exchange(word, claimed, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    // Release: for a fault that reads one of them for an earlier owner's range (see
                    // the module).
                    self.places[place].start.store(range.start.0, Ordering::Release);
                    self.places[place].end.store(range.end.0, Ordering::Release);
                    // Release: for a fault that observes the bit. A fault that reads the number
                    // that is taken next observes the bit by the release of that number.
                    self.word.fetch_or(active_bit(place), Ordering::Release);
                    record!(Published { place: self.address(place), start: range.start.0, end: range.end.0 });
                    return Some(place);
                }
                Err(found) => word = found,
            }
        }
    }

    /// The address of a place, for [`record!`].
    #[cfg(shuttle)]
    fn address(&self, place: usize) -> u64 {
        ptr::from_ref(&self.places[place]).addr() as u64
    }

    /// The chunk behind this one.
    #[inline]
    fn next(&self) -> Option<&Chunk> {
        // Acquire: observes the chunk as it was made.
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: null, or a chunk from a box, which is freed only with the set, from which `self`
        // borrows.
        unsafe { next.as_ref() }
    }

    /// The greatest level up to `level` of a block around `gfn` that shares no frame with a range
    /// of this chunk.
    #[inline]
    fn free_level(&self, word: u64, gfn: Gfn, mut level: Level) -> Option<Level> {
        let mut block = gfn.block(level);
        let mut active = word >> ACTIVE_SHIFT & ((1 << NR_PLACES) - 1);
        while active != 0 {
            let place = &self.places[active.trailing_zeros() as usize];
            active &= active - 1;
            // Acquire: see the module.
            let start = Gfn(place.start.load(Ordering::Acquire));
            let end = Gfn(place.end.load(Ordering::Acquire));
            while block.overlaps(GfnRange { start, end }) {
                if level == Level::L4K {
                    return None;
                }
                level = level.down();
                block = gfn.block(level);
            }
        }
        Some(level)
    }
}

/// The ranges in flight of one VM.
#[derive(Default)]
pub(crate) struct RangesInFlight {
    first: Chunk,
}

impl RangesInFlight {
    /// Publishes `range` until the returned value is dropped. Allocates only if more ranges are in
    /// flight than ever before.
    pub(crate) fn publish(&self, range: GfnRange) -> Result<InFlight<'_>, OutOfMemory> {
        if let Some(place) = self.first.publish(range) {
            return Ok(InFlight { ranges: self, chunk: &self.first, place });
        }
        // Release: as for the active bit, a fault that reads the number that is taken next observes
        // this.
        self.first.word.fetch_add(ONE_BEHIND, Ordering::Release);
        let in_flight = self.publish_behind(range);
        if in_flight.is_err() {
            self.first.word.fetch_sub(ONE_BEHIND, Ordering::Release);
        }
        in_flight
    }

    #[cold]
    fn publish_behind(&self, range: GfnRange) -> Result<InFlight<'_>, OutOfMemory> {
        let mut chunk = &self.first;
        loop {
            chunk = match chunk.next() {
                Some(next) => next,
                None => Self::link_another(chunk)?,
            };
            if let Some(place) = chunk.publish(range) {
                return Ok(InFlight { ranges: self, chunk, place });
            }
        }
    }

    /// Links a chunk behind `last`, unless another thread has linked one.
    fn link_another(last: &Chunk) -> Result<&Chunk, OutOfMemory> {
        let new = Box::into_raw(try_box(Chunk::default())?);
        // AcqRel: publishes the new chunk, or observes that of another thread.
        match last.next.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: from a box, which is freed only with the set.
            Ok(_) => Ok(unsafe { &*new }),
            Err(found) => {
                // SAFETY: it came from a box just now, and no other thread has its address.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: not null, because the exchange failed; as above.
                Ok(unsafe { &*found })
            }
        }
    }

    /// Returns the greatest level up to `level` of a block around `gfn` that shares no frame with a
    /// range in flight; `None` if `gfn` itself is in one. The caller has read its PTE with acquire
    /// before.
    #[inline(always)]
    pub(crate) fn free_level(&self, gfn: Gfn, level: Level) -> Option<Level> {
        // Acquire: observes the ranges that are active or counted and, of those that were
        // withdrawn, what the host did.
        let word = self.first.word.load(Ordering::Acquire);
        record!(RangesRead { gfn: gfn.0 });
        let free = if word >> ACTIVE_SHIFT == 0 || self.is_apart(word, gfn, level) {
            Some(level)
        } else {
            self.free_level_beside(word, gfn, level)
        };
        record!(RangesFound { gfn: gfn.0, level: free.map_or(0, |level| level.0) });
        free
    }

    /// Whether there is only one range, in the first chunk, and it shares no frame with the block
    /// of `level` around `gfn`. That is the ordinary case beside an invalidation, and saves the
    /// call.
    #[inline]
    fn is_apart(&self, word: u64, gfn: Gfn, level: Level) -> bool {
        let active = word >> ACTIVE_SHIFT;
        let Some(place) = self.first.places.get(active.trailing_zeros() as usize) else { return false };
        // Acquire: see the module.
        let start = Gfn(place.start.load(Ordering::Acquire));
        let end = Gfn(place.end.load(Ordering::Acquire));
        active.is_power_of_two() && !gfn.block(level).overlaps(GfnRange { start, end })
    }

    /// As [`free_level`](RangesInFlight::free_level), where there are ranges.
    #[cold]
    fn free_level_beside(&self, word: u64, gfn: Gfn, level: Level) -> Option<Level> {
        let mut free = self.first.free_level(word, gfn, level)?;
        if word >> BEHIND_SHIFT != 0 {
            let mut chunk = self.first.next();
            while let Some(here) = chunk {
                // Acquire: as for the first.
                free = here.free_level(here.word.load(Ordering::Acquire), gfn, free)?;
                chunk = here.next();
            }
        }
        Some(free)
    }
}

impl Drop for RangesInFlight {
    fn drop(&mut self) {
        let mut next = self.first.next.load(Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: chunks come from boxes, and with `&mut self` no thread uses them any more.
            let chunk = unsafe { Box::from_raw(next) };
            next = chunk.next.load(Ordering::Relaxed);
        }
    }
}

/// A range in flight. Dropping it withdraws the range.
#[must_use]
pub(crate) struct InFlight<'p> {
    ranges: &'p RangesInFlight,
    chunk: &'p Chunk,
    place: usize,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        // Release: what the host did comes before, for a fault that does not observe the range any
        // more, and for the place's next owner.
        self.chunk.word.fetch_and(!(claimed_bit(self.place) | active_bit(self.place)), Ordering::Release);
        record!(Withdrawn { place: self.chunk.address(self.place) });
        if !ptr::eq(self.chunk, &self.ranges.first) {
            // Release: as above, for a fault that does not read behind the first chunk any more.
            self.ranges.first.word.fetch_sub(ONE_BEHIND, Ordering::Release);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "in_flight_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "in_flight_loom.rs"]
mod loom_tests;
