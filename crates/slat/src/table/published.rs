//! The ranges that are being taken away at this moment, for the host ([`Vm::invalidate_range`]) or with a slot that goes:
//! step 1 of `stamp`. A fault reads them after its entry and before it asks for a slot; inside a range it comes back later,
//! beside one it maps no block that reaches into it.
//!
//! Ranges stay apart, so that a fault outside of all of them never notices, and nobody waits for anybody to publish or to
//! withdraw. They lie in chunks of one line each: a word with a *claimed* and an *active* bit for each place, and the
//! places. Publishing claims a place, fills it, then sets its active bit; withdrawing clears both bits. When all places
//! are claimed, another chunk is linked behind, which stays for the VM's life: their number is that of the invalidations
//! that ever ran at once. The first chunk's word also counts the ranges in those behind it, from before they are active
//! until after they are not: so one load tells a fault that there is none at all.
//!
//! A place may be withdrawn and claimed by another while it is read, and then its start may be of one range and its end
//! of the other. That is harmless. The first range is over then, and since the reads are acquire, its host's work is seen
//! by the fault. The second was published after the fault had read its entry, so its stamp turns the fault away.
//!
//! [`Vm::invalidate_range`]: crate::Vm::invalidate_range

#![expect(unsafe_code, reason = "chunks are linked by raw pointers")]

use alloc::boxed::Box;
use core::ptr;

use crate::addr::{Gfn, GfnRange, Level};
use crate::boxed::try_box;
use crate::error::Error;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// As many as fill a pair of cache lines, which is what the hardware fetches, with the word and the link.
#[cfg(not(loom))]
const NR_PLACES: usize = 7;
/// Few: so that a model reaches the second chunk.
#[cfg(loom)]
const NR_PLACES: usize = 1;

/// Bit of the word that claims place number `place`.
const fn claimed_bit(place: usize) -> u64 {
    1 << place
}

/// Bit of the word that makes place number `place` count.
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

/// Read by each fault, written by each invalidation: on lines of its own.
#[derive(Default)]
#[repr(C, align(128))]
struct Chunk {
    word: AtomicU64,
    /// Set once.
    next: AtomicPtr<Chunk>,
    places: [Place; NR_PLACES],
}

impl Chunk {
    /// Claims a place and publishes `range` there. Returns the place.
    fn publish(&self, range: GfnRange) -> Option<usize> {
        let mut word = self.word.load(Ordering::Relaxed);
        loop {
            let place = (0..NR_PLACES).find(|&place| word & claimed_bit(place) == 0)?;
            // Acquire: what the place's last owner did is done, and is handed on by the stores below.
            let claimed = word | claimed_bit(place);
            match self.word.compare_exchange(word, claimed, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => {
                    // Release: to who reads one of them for an earlier owner's range (see the module).
                    self.places[place].start.store(range.start.0, Ordering::Release);
                    self.places[place].end.store(range.end.0, Ordering::Release);
                    // Release: to who sees the bit. That the bit is seen by who finds the stamp that is taken next, is
                    // that stamp's release.
                    self.word.fetch_or(active_bit(place), Ordering::Release);
                    return Some(place);
                }
                Err(found) => word = found,
            }
        }
    }

    /// The chunk behind this one.
    #[inline]
    fn next(&self) -> Option<&Chunk> {
        // Acquire: sees the chunk as it was made.
        let next = self.next.load(Ordering::Acquire);
        // SAFETY: null or a chunk from a box, which is freed only with the set, which `self` borrows from.
        unsafe { next.as_ref() }
    }

    /// The greatest level up to `level` of a block around `gfn` that shares no frame with a range of this chunk.
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

/// The published ranges of one VM.
#[derive(Default)]
pub(crate) struct PublishedRanges {
    first: Chunk,
}

impl PublishedRanges {
    /// Publishes `range` until the answer is dropped. Takes memory only if more ranges are published than ever before.
    pub(crate) fn publish(&self, range: GfnRange) -> Result<Published<'_>, Error> {
        if let Some(place) = self.first.publish(range) {
            return Ok(Published { ranges: self, chunk: &self.first, place });
        }
        // As for the active bit: who finds the stamp that is taken next sees this.
        self.first.word.fetch_add(ONE_BEHIND, Ordering::Release);
        let published = self.publish_behind(range);
        if published.is_err() {
            self.first.word.fetch_sub(ONE_BEHIND, Ordering::Release);
        }
        published
    }

    #[cold]
    fn publish_behind(&self, range: GfnRange) -> Result<Published<'_>, Error> {
        let mut chunk = &self.first;
        loop {
            chunk = match chunk.next() {
                Some(next) => next,
                None => Self::link_another(chunk)?,
            };
            if let Some(place) = chunk.publish(range) {
                return Ok(Published { ranges: self, chunk, place });
            }
        }
    }

    /// Links a chunk behind `last`, if nobody else has done so.
    fn link_another(last: &Chunk) -> Result<&Chunk, Error> {
        let new = Box::into_raw(try_box(Chunk::default())?);
        // AcqRel: shows the new chunk to others, or the others' to this thread.
        match last.next.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: from a box, which is freed only with the set.
            Ok(_) => Ok(unsafe { &*new }),
            Err(found) => {
                // SAFETY: it came from a box just now, and nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: not null, because the exchange failed; as above.
                Ok(unsafe { &*found })
            }
        }
    }

    /// The greatest level up to `level` of a block around `gfn` that shares no frame with a published range; `None` if
    /// `gfn` itself is in one. The caller has read its entry with acquire before.
    #[inline]
    pub(crate) fn free_level(&self, gfn: Gfn, level: Level) -> Option<Level> {
        // Acquire: sees the ranges whose bits are set or that are counted; and, of those that were withdrawn, what the host
        // did.
        let word = self.first.word.load(Ordering::Acquire);
        if word >> ACTIVE_SHIFT == 0 || self.is_apart(word, gfn, level) {
            return Some(level);
        }
        self.free_level_beside(word, gfn, level)
    }

    /// Whether there is one range only, in the first chunk, and it shares no frame with the block of `level` around `gfn`:
    /// the ordinary case while something is taken away, and worth no call.
    #[inline]
    fn is_apart(&self, word: u64, gfn: Gfn, level: Level) -> bool {
        let active = word >> ACTIVE_SHIFT;
        let Some(place) = self.first.places.get(active.trailing_zeros() as usize) else { return false };
        // Acquire: see the module.
        let start = Gfn(place.start.load(Ordering::Acquire));
        let end = Gfn(place.end.load(Ordering::Acquire));
        active.is_power_of_two() && !gfn.block(level).overlaps(GfnRange { start, end })
    }

    /// As [`free_level`](PublishedRanges::free_level), where there are ranges.
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

impl Drop for PublishedRanges {
    fn drop(&mut self) {
        let mut next = self.first.next.load(Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: chunks come from boxes, and with `&mut self` nobody uses them any more.
            let chunk = unsafe { Box::from_raw(next) };
            next = chunk.next.load(Ordering::Relaxed);
        }
    }
}

/// A published range. Dropping it withdraws the range.
#[must_use]
pub(crate) struct Published<'p> {
    ranges: &'p PublishedRanges,
    chunk: &'p Chunk,
    place: usize,
}

impl Drop for Published<'_> {
    fn drop(&mut self) {
        // Release: what the host did comes before, for the fault that does not see the range any more and for the place's
        // next owner.
        self.chunk.word.fetch_and(!(claimed_bit(self.place) | active_bit(self.place)), Ordering::Release);
        if !ptr::eq(self.chunk, &self.ranges.first) {
            // Release: as above, for the fault that does not look behind the first chunk any more.
            self.ranges.first.word.fetch_sub(ONE_BEHIND, Ordering::Release);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "published_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "published_loom.rs"]
mod loom_tests;
