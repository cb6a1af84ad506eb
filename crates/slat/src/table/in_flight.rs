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
//! Withdrawing clears both bits by one operation. Behind the first chunk it walks along the list to
//! the chunk first, as publishing has done.
//!
//! The first chunk takes ranges of any size. When all of its places are claimed, a range goes into
//! a list of chunks behind it. There are lists for blocks of 2 MiB, several blocks to a list, and
//! one for ranges that reach into more than two blocks. A range that reaches into two is published
//! as two ranges. The word of the first chunk also counts the ranges behind it, those of blocks and
//! the large ones, from before they are active until after they are not. So one load shows a fault
//! that there is no range at all. Else the fault reads the first chunk, and behind it the list of
//! its own block, and that of the large ranges, if there are such. Only a fault that may map more
//! than 2 MiB reads the lists of other blocks.
//!
//! When all places of a list are claimed, another chunk is linked behind, and stays for the life of
//! the VM. So the number of chunks follows the number of invalidations that ever ran at once, and
//! the number of a chunk in its list says for good which it is.
//!
//! # Why it is correct
//! A place may be withdrawn and claimed again while a fault reads it. Then the fault reads the
//! start of one range and the end of another. That is harmless:
//! - The first range is over. The loads are acquire, so the fault observes what its host did.
//! - The second range was published after the fault read its PTE, so its number makes the fault's
//!   exchange fail.
//!
//! A range behind the first chunk that shares a frame with the fault's block is in a list that the
//! fault reads: that of large ranges, or that of a block that both reach into, which is the only
//! one of a fault that may map at most 2 MiB.
//!
//! [`Vm::invalidate_range`]: crate::Vm::invalidate_range

#![expect(unsafe_code, reason = "chunks are linked by raw pointers")]

use alloc::boxed::Box;
use core::{iter, ptr};

use crate::addr::{Gfn, GfnRange, Level};
use crate::boxed::{OnceBox, Zeroed, try_box};
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

const ACTIVE_SHIFT: usize = 8;
/// From this bit on the first chunk's word counts the ranges in lists of blocks.
const IN_BLOCKS_SHIFT: u8 = 16;
/// From this bit on it counts the large ranges behind it.
const LARGE_SHIFT: u8 = 40;
/// The most ranges of a count: half of what it could hold, so that no number of threads that try
/// one more makes it overflow.
const MAX_COUNT: u64 = 1 << 23;

/// The number of lists of blocks is two to the power of this. They take 64 KiB, once more ranges
/// are in flight than the first chunk has places.
#[cfg(not(loom))]
const LIST_BITS: u32 = 9;
#[cfg(loom)]
const LIST_BITS: u32 = 1;

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

// SAFETY: atomics whose first value is zero, and null pointers.
unsafe impl Zeroed for Chunk {
    #[cfg(loom)]
    fn zeroed() -> Chunk {
        Chunk::default()
    }
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

/// The lists of chunks behind the first chunk, each as its first.
struct Lists {
    large: Chunk,
    of_blocks: [Chunk; 1 << LIST_BITS],
}

// SAFETY: it consists of chunks.
unsafe impl Zeroed for Lists {
    #[cfg(loom)]
    fn zeroed() -> Lists {
        Lists { large: Zeroed::zeroed(), of_blocks: Zeroed::zeroed() }
    }
}

impl Lists {
    /// The list of the block of 2 MiB around `gfn`.
    #[inline]
    fn of_block(&self, gfn: Gfn) -> &Chunk {
        &self.of_blocks[nth_list(gfn)]
    }
}

/// Which list is that of the block of 2 MiB around `gfn`.
#[inline]
fn nth_list(gfn: Gfn) -> usize {
    // Neighbours are scattered, and so are blocks at equal distances (Fibonacci hashing).
    let hash = (gfn.0 / Level::L2M.nr_pages()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash >> (u64::BITS - LIST_BITS)) as usize
}

/// Where chunks are linked: each has one word that counts its ranges, or none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum List {
    /// The first chunk alone.
    First,
    Large,
    /// The list of blocks with this number.
    OfBlocks(usize),
}

impl List {
    /// From which bit on the first chunk's word counts the ranges of the list; it does not count
    /// its own.
    fn counted_from(self) -> Option<u8> {
        match self {
            List::First => None,
            List::Large => Some(LARGE_SHIFT),
            List::OfBlocks(_) => Some(IN_BLOCKS_SHIFT),
        }
    }
}

/// The place of a range: its number in its chunk, the number of the list and that of the chunk in
/// it. In 32 bits, so that a range in flight is passed in two registers.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Position(u32);

const _: () = assert!(NR_PLACES <= 1 << Position::PLACE_BITS);
const _: () = assert!((1 << LIST_BITS) + 2 <= 1 << Position::LIST_BITS);

impl Position {
    const NONE: Position = Position(0);
    const VALID: u32 = 1;
    const PLACE_SHIFT: u32 = 1;
    const PLACE_BITS: u32 = 3;
    const LIST_SHIFT: u32 = Position::PLACE_SHIFT + Position::PLACE_BITS;
    /// Room for two lists more than those of blocks.
    const LIST_BITS: u32 = LIST_BITS + 1;
    const CHUNK_SHIFT: u32 = Position::LIST_SHIFT + Position::LIST_BITS;
    /// Chunks of a list: those that the position has bits for. So a list has at most 1.8 million
    /// ranges.
    const MAX_CHUNKS: usize = 1 << (u32::BITS - Position::CHUNK_SHIFT);

    #[inline]
    fn new(list: List, nth_chunk: usize, place: usize) -> Position {
        debug_assert!(place < NR_PLACES && nth_chunk < Position::MAX_CHUNKS);
        let list = match list {
            List::First => 0,
            List::Large => 1,
            List::OfBlocks(nth) => 2 + nth,
        };
        Position(
            Position::VALID
                | (place as u32) << Position::PLACE_SHIFT
                | (list as u32) << Position::LIST_SHIFT
                | (nth_chunk as u32) << Position::CHUNK_SHIFT,
        )
    }

    #[inline]
    fn place(self) -> usize {
        (self.0 >> Position::PLACE_SHIFT) as usize % (1 << Position::PLACE_BITS)
    }

    #[inline]
    fn list(self) -> List {
        match (self.0 >> Position::LIST_SHIFT) as usize % (1 << Position::LIST_BITS) {
            0 => List::First,
            1 => List::Large,
            nth => List::OfBlocks(nth - 2),
        }
    }

    fn nth_chunk(self) -> usize {
        (self.0 >> Position::CHUNK_SHIFT) as usize
    }
}

/// The ranges in flight of one VM.
pub(crate) struct RangesInFlight {
    first: Chunk,
    /// Made when the first chunk is full for the first time.
    lists: OnceBox<Lists>,
}

impl Default for RangesInFlight {
    fn default() -> RangesInFlight {
        RangesInFlight { first: Chunk::default(), lists: OnceBox::new() }
    }
}

impl RangesInFlight {
    /// Publishes `range`, which is not empty, until the returned value is dropped. Allocates only
    /// if more ranges are in flight than ever before.
    #[inline]
    pub(crate) fn publish(&self, range: GfnRange) -> Result<InFlight<'_>, OutOfMemory> {
        match self.first.publish(range) {
            Some(place) => Ok(InFlight::at(self, Position::new(List::First, 0, place))),
            None => self.publish_behind(range),
        }
    }

    /// Publishes `range` behind the first chunk.
    // Never inlined: it is done before the walks, which need the stack.
    #[cold]
    #[inline(never)]
    fn publish_behind(&self, range: GfnRange) -> Result<InFlight<'_>, OutOfMemory> {
        let border = range.start.block(Level::L2M).end;
        let of_block = |part: GfnRange| self.publish_in(List::OfBlocks(nth_list(part.start)), part);
        if range.end <= border {
            Ok(InFlight::at(self, of_block(range)?))
        } else if range.end <= border.block(Level::L2M).end {
            // Withdrawn if there is no place for the other part.
            let mut in_flight = InFlight::at(self, of_block(GfnRange { end: border, ..range })?);
            in_flight.add(of_block(GfnRange { start: border, ..range })?);
            Ok(in_flight)
        } else {
            Ok(InFlight::at(self, self.publish_in(List::Large, range)?))
        }
    }

    /// Publishes `range` in `list`, which is not that of the first chunk, and counts it.
    fn publish_in(&self, list: List, range: GfnRange) -> Result<Position, OutOfMemory> {
        self.lists.get_or_make()?;
        let (Some(first), Some(shift)) = (self.chunks(list).next(), list.counted_from()) else {
            debug_assert!(false, "the lists were made");
            return Err(OutOfMemory);
        };
        let count = 1 << shift;
        // Release: as for the active bit, a fault that reads the number that is taken next observes
        // this.
        let before = self.first.word.fetch_add(count, Ordering::Release);
        let published = if (before >> shift) % (2 * MAX_COUNT) < MAX_COUNT {
            Self::publish_at_first_place(first, range)
        } else {
            Err(OutOfMemory)
        };
        match published {
            Ok((nth_chunk, place)) => Ok(Position::new(list, nth_chunk, place)),
            Err(error) => {
                self.first.word.fetch_sub(count, Ordering::Release);
                Err(error)
            }
        }
    }

    /// Publishes `range` at the first place of the list that begins with `chunk` which is not
    /// claimed. Returns the number of the chunk and the place.
    fn publish_at_first_place(mut chunk: &Chunk, range: GfnRange) -> Result<(usize, usize), OutOfMemory> {
        let mut nth_chunk = 0;
        loop {
            if let Some(place) = chunk.publish(range) {
                return Ok((nth_chunk, place));
            }
            nth_chunk += 1;
            if nth_chunk == Position::MAX_CHUNKS {
                return Err(OutOfMemory);
            }
            chunk = match chunk.next() {
                Some(next) => next,
                None => Self::link_another(chunk)?,
            };
        }
    }

    /// The chunks of `list`.
    fn chunks(&self, list: List) -> impl Iterator<Item = &Chunk> {
        let first = match list {
            List::First => Some(&self.first),
            List::Large => self.lists.get().map(|lists| &lists.large),
            List::OfBlocks(nth) => self.lists.get().and_then(|lists| lists.of_blocks.get(nth)),
        };
        iter::successors(first, |chunk| chunk.next())
    }

    /// The chunk with a range that was published. There is one: chunks stay for the life of the VM.
    #[inline]
    fn chunk_at(&self, position: Position) -> Option<&Chunk> {
        if position.list() == List::First {
            return Some(&self.first);
        }
        let found = self.chunks(position.list()).nth(position.nth_chunk());
        debug_assert!(found.is_some(), "chunks stay for the life of the VM");
        found
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
        if word >> IN_BLOCKS_SHIFT == 0 {
            return Some(free);
        }
        // Lists that are not there yet have no range that is active.
        let Some(lists) = self.lists.get() else { return Some(free) };
        if word >> LARGE_SHIFT != 0 {
            free = free_level_in(&lists.large, gfn, free)?;
        }
        if (word >> IN_BLOCKS_SHIFT) % (2 * MAX_COUNT) == 0 {
            return Some(free);
        }
        for list in &lists.of_blocks {
            // Whatever shares a frame with a block of 2 MiB is in its list.
            if free <= Level::L2M {
                break;
            }
            free = free_level_in(list, gfn, free)?;
        }
        free_level_in(lists.of_block(gfn), gfn, free)
    }
}

/// As [`Chunk::free_level`], for all chunks of a list.
fn free_level_in(list: &Chunk, gfn: Gfn, mut level: Level) -> Option<Level> {
    let mut chunk = Some(list);
    while let Some(here) = chunk {
        // Acquire: as for the first chunk.
        level = here.free_level(here.word.load(Ordering::Acquire), gfn, level)?;
        chunk = here.next();
    }
    Some(level)
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // Not one inside of the other: there may be thousands.
        let mut next = self.next.swap(ptr::null_mut(), Ordering::Relaxed);
        while !next.is_null() {
            // SAFETY: chunks come from boxes, and with `&mut self` no thread uses them any more.
            let chunk = unsafe { Box::from_raw(next) };
            next = chunk.next.swap(ptr::null_mut(), Ordering::Relaxed);
        }
    }
}

/// A range in flight. Dropping it withdraws the range.
// Two words, which are passed in registers. A copy through memory would read by vectors what was just
// stored word by word, for which the CPU waits.
#[must_use]
pub(crate) struct InFlight<'p> {
    ranges: &'p RangesInFlight,
    /// The [`Position`] of the range, or of its two parts: the second in the upper half.
    positions: u64,
}

impl<'p> InFlight<'p> {
    #[inline]
    fn at(ranges: &'p RangesInFlight, position: Position) -> InFlight<'p> {
        InFlight { ranges, positions: u64::from(position.0) }
    }

    /// Adds the second part.
    fn add(&mut self, position: Position) {
        self.positions |= u64::from(position.0) << u32::BITS;
    }

    #[inline]
    fn positions(&self) -> [Position; 2] {
        [Position(self.positions as u32), Position((self.positions >> u32::BITS) as u32)]
    }

    /// The range.
    pub(crate) fn range(&self) -> GfnRange {
        let [first, second] = self.positions();
        let place = |position: Position| Some(&self.ranges.chunk_at(position)?.places[position.place()]);
        let last = if second == Position::NONE { first } else { second };
        let (Some(first), Some(last)) = (place(first), place(last)) else { return GfnRange::new(Gfn(0), 0) };
        // Relaxed: the places are this value's, which came with them from the thread that stored.
        GfnRange { start: Gfn(first.start.load(Ordering::Relaxed)), end: Gfn(last.end.load(Ordering::Relaxed)) }
    }

    #[inline]
    fn withdraw(&self, position: Position) {
        let Some(chunk) = self.ranges.chunk_at(position) else { return };
        let place = position.place();
        // Release: what the host did comes before, for a fault that does not observe the range
        // any more, and for the place's next owner.
        chunk.word.fetch_and(!(claimed_bit(place) | active_bit(place)), Ordering::Release);
        record!(Withdrawn { place: chunk.address(place) });
        if let Some(shift) = position.list().counted_from() {
            // Release: as above, for a fault that does not read behind the first chunk any more.
            self.ranges.first.word.fetch_sub(1 << shift, Ordering::Release);
        }
    }
}

impl Drop for InFlight<'_> {
    #[inline]
    fn drop(&mut self) {
        let [first, second] = self.positions();
        self.withdraw(first);
        if second != Position::NONE {
            self.withdraw(second);
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "in_flight_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "in_flight_loom.rs"]
mod loom_tests;
