//! A set of memslots, which does not change, and the making of a set that differs in one memslot.
//!
//! # Guarantees
//! - A look-up by frame reads the list of chunks and one chunk, and a look-up by number a leaf more.
//! - A set shares with the set before it all but a few KiB, however many memslots there are.
//! - Making a set allocates nothing, and changes nothing if it is refused.
//!
//! # Use
//! [`Room`] has the memory for a set, which is allocated outside of any guard. [`Room::build`] makes
//! a [`Draft`] of it inside, and says what that [replaces](Replaced). If the draft is
//! [published](Draft::publish), this is to be retired with the old set; else the draft is dropped.
//!
//! # Implementation
//! The memslots lie in chunks of up to [`CHUNK_SLOTS`], sorted by their ranges, first frames apart
//! from the rest. A set has the list of its chunks. Beside that it has leaves, one for each
//! [`LEAF_IDS`] numbers of memslots, which say at which frame the memslot of a number begins.
//!
//! A change copies the two lists, the chunk of the memslot, and the leaf of its number if it begins
//! elsewhere. A full chunk is split in two. A chunk that would have less than [`MIN_SLOTS`]
//! memslots is put together with its neighbour. So there are at most as many chunks as memslots
//! divided by that.
//!
//! # Why it is correct
//! Sets are published one after the other, each made of the one before. So the sets that have a
//! chunk follow one another: from the set that was made with it to the last before the set that
//! replaced it. A guard that can reach the chunk has read one of these, all of which were taken out
//! by the exchange that published the replacement, or before. So the chunk may be freed when the
//! last of them may be: the change that replaced the chunk retires both together. A set that is
//! freed before leaves its chunks alone. All of this holds for leaves, too.

#![expect(unsafe_code, reason = "sets share chunks, which are freed by epochs")]

mod edit;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::marker::PhantomData;
use core::mem::{self, MaybeUninit};
use core::ptr::{self, NonNull};
use core::slice;

use self::edit::{Edit, edits};
use super::new::{Unpublished, free};
use super::region::MemoryRegionFlags;
use super::set::Slot;
use super::userfault::UserfaultBitmap;
use arrayvec::ArrayVec;

use crate::addr::{Gfn, GfnRange};
use crate::boxed::Vacant;
use crate::error::{OutOfMemory, SlotError};
use crate::slot::bitmap::Bitmap;
use crate::sync::{AtomicU32, Ordering};

/// The most memslots of a chunk: their number and first frames take 256 bytes.
#[cfg(not(any(loom, shuttle)))]
const CHUNK_SLOTS: usize = 31;
/// Few, so that chunks are split and put together.
#[cfg(any(loom, shuttle))]
const CHUNK_SLOTS: usize = 4;
/// A place as one number: the chunk, and in so many bits the index in it.
const INDEX_BITS: u32 = 5;
/// The fewest memslots of a chunk, unless it is the only one.
const MIN_SLOTS: usize = CHUNK_SLOTS / 4;
/// First frame of a memslot that does not exist.
const NOWHERE: Gfn = Gfn(u64::MAX);
/// Numbers of memslots that a leaf has.
const LEAF_IDS: usize = 64;
/// The most chunks that a change makes, or replaces: two where a memslot was, two where it is then.
const MOST_CHUNKS: usize = 4;

/// As many things as there are chunks in a change.
type Few<T> = ArrayVec<T, MOST_CHUNKS>;

/// A memslot in a set. It owns nothing: the sets that have the memslot share what it points to.
pub(crate) struct SlotEntry<B> {
    pub(crate) range: GfnRange,
    pub(crate) id: u32,
    pub(crate) flags: MemoryRegionFlags,
    pub(super) slot: NonNull<Slot<B>>,
    /// The dirty log, if the VM does not log by rings. It stays when `LOG_DIRTY_PAGES` is cleared.
    pub(super) log: Option<NonNull<Bitmap>>,
    /// The pages at which faults exit, if `flags` has `USERFAULT`.
    pub(super) userfault: Option<NonNull<UserfaultBitmap>>,
}

impl<B> SlotEntry<B> {
    /// The same, for another set or a view.
    #[inline]
    pub(super) fn duplicate(&self) -> SlotEntry<B> {
        let &SlotEntry { range, id, flags, slot, log, userfault } = self;
        SlotEntry { range, id, flags, slot, log, userfault }
    }

    fn logs(&self) -> bool {
        self.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES)
    }
}

/// Memslots that follow one another, and room for more. Not on the stack: it is large.
#[repr(C)]
pub(super) struct Chunk<B, E: ?Sized = [MaybeUninit<SlotEntry<B>>]> {
    /// So many entries are there.
    len: usize,
    /// Their first frames, and [`NOWHERE`] for those that are not there.
    starts: [Gfn; CHUNK_SLOTS],
    backing: PhantomData<B>,
    entries: E,
}

impl<B, const CAPACITY: usize> Chunk<B, [MaybeUninit<SlotEntry<B>>; CAPACITY]> {
    fn with_capacity() -> Result<Box<Self>, OutOfMemory> {
        let init = |chunk: *mut Self| {
            // SAFETY: the chunk has memory, which is this call's.
            unsafe {
                (&raw mut (*chunk).len).write(0);
                let first = (&raw mut (*chunk).starts).cast::<Gfn>();
                (0..CHUNK_SLOTS).for_each(|index| first.add(index).write(NOWHERE));
            }
        };
        // SAFETY: the entries need not be initialized.
        Ok(unsafe { Vacant::new()?.fill_by(init) })
    }
}

impl<B> Chunk<B> {
    /// A chunk with room for `capacity` memslots or more.
    fn new(capacity: usize) -> Result<Box<Chunk<B>>, OutOfMemory> {
        Ok(match capacity {
            0..=4 => Chunk::<B, [_; 4]>::with_capacity()?,
            5..=12 => Chunk::<B, [_; 12]>::with_capacity()?,
            _ => Chunk::<B, [_; CHUNK_SLOTS]>::with_capacity()?,
        })
    }

    #[inline]
    fn entries(&self) -> &[SlotEntry<B>] {
        // SAFETY: `push` alone changes `len`, and has written so many.
        unsafe { slice::from_raw_parts(self.entries.as_ptr().cast(), self.len) }
    }

    /// How many of the entries begin at `gfn` or below. The last of each group is compared first: so
    /// all lines are read at once. If each told which is next, as in a binary search, they would be
    /// waited for one by one.
    #[inline]
    fn nr_from(&self, gfn: Gfn) -> usize {
        const GROUP: usize = 8;
        let lasts = self.starts.iter().skip(GROUP - 1).step_by(GROUP);
        let first = lasts.filter(|&&last| last <= gfn).count() * GROUP;
        let group = &self.starts[first..CHUNK_SLOTS.min(first + GROUP)];
        first + group.iter().filter(|&&start| start <= gfn).count()
    }

    /// Adds `entry` behind the others. There must be room.
    fn push(&mut self, entry: SlotEntry<B>) {
        self.starts[self.len] = entry.range.start;
        self.entries[self.len].write(entry);
        self.len += 1;
    }
}

/// Where the memslots of some numbers begin.
pub(super) struct IdLeaf([Gfn; LEAF_IDS]);

impl IdLeaf {
    /// One without memslots, made in its box: it is large for a stack.
    fn empty() -> Result<Box<IdLeaf>, OutOfMemory> {
        let init = |leaf: *mut IdLeaf| {
            let first = leaf.cast::<Gfn>();
            // SAFETY: a leaf is an array of so many.
            (0..LEAF_IDS).for_each(|index| unsafe { first.add(index).write(NOWHERE) });
        };
        // SAFETY: all of it was written.
        Ok(unsafe { Vacant::new()?.fill_by(init) })
    }
}

/// A chunk in the list of a set.
struct ChunkRef<B> {
    /// First frame of its first memslot; 0 if it has none.
    start: Gfn,
    chunk: NonNull<Chunk<B>>,
}

impl<B> Clone for ChunkRef<B> {
    fn clone(&self) -> ChunkRef<B> {
        *self
    }
}

impl<B> Copy for ChunkRef<B> {}

/// An immutable set.
pub(crate) struct SlotSet<B> {
    /// The first of `chunks`, which mostly has all memslots.
    first: NonNull<Chunk<B>>,
    /// Sorted; at least one. Only one that is the only one may be empty.
    chunks: Vec<ChunkRef<B>>,
    leaves: Vec<Option<NonNull<IdLeaf>>>,
    nr_logging: u32,
}

/// The place of a memslot in a set.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    chunk: usize,
    index: usize,
}

impl Place {
    /// Has the next look-up try this place first.
    #[inline]
    fn become_guess(self, guess: &AtomicU32) {
        // Relaxed: a guess orders nothing.
        guess.store((self.chunk << INDEX_BITS | self.index) as u32, Ordering::Relaxed);
    }
}

impl<B> SlotSet<B> {
    /// A set without memslots. It is the caller's, with its chunk.
    pub(super) fn empty() -> Result<Box<SlotSet<B>>, OutOfMemory> {
        let mut chunks = Vec::new();
        chunks.try_reserve_exact(1).map_err(|_| OutOfMemory)?;
        let set = Vacant::new()?;
        let first = NonNull::from(Box::leak(Chunk::new(0)?));
        chunks.push(ChunkRef { start: Gfn(0), chunk: first });
        Ok(set.fill(SlotSet { first, chunks, leaves: Vec::new(), nr_logging: 0 }))
    }

    /// Whether one of the memslots logs.
    #[inline]
    pub(super) fn any_logs(&self) -> bool {
        self.nr_logging != 0
    }

    /// The chunk with this number.
    #[inline]
    fn get(&self, number: usize) -> Option<&Chunk<B>> {
        let chunk = match number {
            0 => self.first,
            _ => self.chunks.get(number)?.chunk,
        };
        // SAFETY: one of this set, which is freed no earlier than the set's last user allows (see
        // the module).
        Some(unsafe { chunk.as_ref() })
    }

    /// The chunk with this number, which must be there.
    fn chunk(&self, number: usize) -> &Chunk<B> {
        self.get(number).expect("a set has as many chunks as its list")
    }

    /// All memslots from the first of chunk `number` on.
    fn entries_from(&self, number: usize) -> impl Iterator<Item = &SlotEntry<B>> {
        (number..self.chunks.len()).flat_map(|number| self.chunk(number).entries())
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &SlotEntry<B>> {
        self.entries_from(0)
    }

    /// The chunk that has, or would have, a memslot that begins at `gfn`.
    #[inline]
    fn chunk_of(&self, gfn: Gfn) -> usize {
        self.chunks.partition_point(|chunk| chunk.start <= gfn).saturating_sub(1)
    }

    /// The last memslot that begins at `gfn` or below.
    #[inline(always)]
    fn last_from(&self, gfn: Gfn) -> Option<(Place, &SlotEntry<B>)> {
        let number = self.chunk_of(gfn);
        let chunk = self.get(number)?;
        let index = chunk.nr_from(gfn).checked_sub(1)?;
        Some((Place { chunk: number, index }, chunk.entries().get(index)?))
    }

    /// The memslots from that on that has `gfn`, or from the first above it on.
    pub(super) fn from(&self, gfn: Gfn) -> impl Iterator<Item = &SlotEntry<B>> {
        let first = self.last_from(gfn).map_or(Place { chunk: 0, index: 0 }, |(place, _)| place);
        self.entries_from(first.chunk).skip(first.index).skip_while(move |entry| entry.range.end <= gfn)
    }

    /// The memslot that has `gfn`. Place `guess` is tried first, and becomes the place that was
    /// found: an address is mostly in the memslot of the one before.
    #[inline]
    pub(super) fn find(&self, guess: &AtomicU32, gfn: Gfn) -> Option<&SlotEntry<B>> {
        // Relaxed: a guess orders nothing.
        let guessed = guess.load(Ordering::Relaxed) as usize;
        let chunk = self.get(guessed >> INDEX_BITS);
        match chunk.and_then(|chunk| chunk.entries().get(guessed % (1 << INDEX_BITS))) {
            Some(entry) if entry.range.contains(gfn) => Some(entry),
            _ => self.search(guess, gfn),
        }
    }

    #[inline(never)]
    fn search(&self, guess: &AtomicU32, gfn: Gfn) -> Option<&SlotEntry<B>> {
        let (place, entry) = self.last_from(gfn).filter(|(_, entry)| entry.range.contains(gfn))?;
        place.become_guess(guess);
        Some(entry)
    }

    /// The memslot with number `id`, and its chunk.
    fn place_of(&self, id: u32) -> Option<(Place, &SlotEntry<B>)> {
        let leaf = (*self.leaves.get(id as usize / LEAF_IDS)?)?;
        // SAFETY: as for chunks.
        let start = unsafe { leaf.as_ref() }.0[id as usize % LEAF_IDS];
        let found = self.last_from(start).filter(|_| start != NOWHERE);
        debug_assert!(found.as_ref().is_none_or(|(_, entry)| entry.id == id && entry.range.start == start));
        found
    }

    /// The memslot with number `id`. Place `guess` is as in [`find`](Self::find), which does not share
    /// this with it: a fault that maps 2 MiB would take 15 instructions more.
    #[inline]
    pub(super) fn by_id(&self, guess: &AtomicU32, id: u32) -> Option<&SlotEntry<B>> {
        // Relaxed: as in `find`.
        let guessed = guess.load(Ordering::Relaxed) as usize;
        let chunk = self.get(guessed >> INDEX_BITS);
        match chunk.and_then(|chunk| chunk.entries().get(guessed % (1 << INDEX_BITS))) {
            Some(entry) if entry.id == id => Some(entry),
            _ => self.search_id(guess, id),
        }
    }

    #[inline(never)]
    fn search_id(&self, guess: &AtomicU32, id: u32) -> Option<&SlotEntry<B>> {
        let (place, entry) = self.place_of(id)?;
        place.become_guess(guess);
        Some(entry)
    }

    /// Checks that memslot `slot` could have `range`: no other shares a frame with it.
    pub(super) fn check_vacant(&self, slot: u32, range: GfnRange) -> Result<(), SlotError> {
        let mut overlapping = self.from(range.start).take_while(|entry| entry.range.start < range.end);
        match overlapping.find(|entry| entry.id != slot) {
            Some(other) => Err(SlotError::Overlap { slot, gpa: range.start.gpa(), other: other.id }),
            None => Ok(()),
        }
    }

    /// Bytes of the heap that the set has for itself.
    pub(super) fn size_bytes(&self) -> u64 {
        let lists = self.chunks.capacity() * size_of::<ChunkRef<B>>()
            + self.leaves.capacity() * size_of::<Option<NonNull<IdLeaf>>>();
        (size_of::<SlotSet<B>>() + lists) as u64
    }

    /// Frees all chunks and leaves.
    ///
    /// # Safety
    /// Neither they nor the memslots of the set are used any more.
    pub(super) unsafe fn free_parts(&self) {
        for chunk in &self.chunks {
            // SAFETY: chunks come from boxes; as the caller promises.
            unsafe { free(Some(chunk.chunk)) }
        }
        for &leaf in &self.leaves {
            // SAFETY: as above.
            unsafe { free(leaf) }
        }
    }
}

/// How the next set differs.
pub(super) struct Change<'c, B> {
    pub(super) id: u32,
    /// The memslot as it is, if it is not new.
    pub(super) before: Option<&'c SlotEntry<B>>,
    /// What the set has of it then, if it is not removed.
    pub(super) after: Option<&'c SlotEntry<B>>,
}

impl<B> Change<'_, B> {
    /// First frames of the memslot before and after the change.
    fn starts(&self) -> [Option<Gfn>; 2] {
        [self.before, self.after].map(|entry| entry.map(|entry| entry.range.start))
    }

    /// The place of the memslot in `old`, if it is not new.
    #[inline(never)]
    fn check(&self, old: &SlotSet<B>) -> Result<Option<Place>, SlotError> {
        let slot = self.id;
        let before = old.place_of(slot).map(|(place, _)| place);
        if self.before.is_none() && before.is_some() {
            return Err(SlotError::SlotBusy { slot });
        }
        self.after.map_or(Ok(()), |after| old.check_vacant(slot, after.range))?;
        Ok(before)
    }

    fn moves_start(&self) -> bool {
        let [before, after] = self.starts();
        before != after
    }
}

/// The memory for the next set.
pub(super) struct Room<B> {
    set: Option<Vacant<SlotSet<B>>>,
    list: Vec<ChunkRef<B>>,
    leaves: Vec<Option<NonNull<IdLeaf>>>,
    chunks: Few<Box<Chunk<B>>>,
    leaf: Option<Box<IdLeaf>>,
    /// How many memslots the chunks have room for.
    capacity: usize,
}

impl<B> Room<B> {
    /// Room for `change` of a set of these `sizes`.
    pub(super) fn new(sizes: Sizes, change: &Change<'_, B>) -> Result<Room<B>, OutOfMemory> {
        let (mut list, mut leaves) = (Vec::new(), Vec::new());
        list.try_reserve_exact(sizes.nr_chunks + 1).map_err(|_| OutOfMemory)?;
        leaves.try_reserve_exact(sizes.nr_leaves.max(change.id as usize / LEAF_IDS + 1)).map_err(|_| OutOfMemory)?;
        let set = Some(Vacant::new()?);
        let mut room = Room { set, list, leaves, chunks: Few::new(), leaf: None, capacity: sizes.capacity };
        // In its place it takes one chunk; removed or new, it leaves at most two. A set that has one
        // chunk, and not a full one, has one then, too.
        let nr_chunks = match (change.before, change.after) {
            _ if sizes.capacity < CHUNK_SLOTS => 1,
            (Some(_), Some(_)) if change.moves_start() => 4,
            (Some(_), Some(_)) => 1,
            _ => 2,
        };
        for _ in 0..nr_chunks {
            room.chunks.push(Chunk::new(sizes.capacity)?);
        }
        if change.moves_start() {
            room.leaf = Some(IdLeaf::empty()?);
        }
        Ok(room)
    }

    /// Whether there is room for a change of `old`.
    pub(super) fn fits(&self, old: &SlotSet<B>) -> bool {
        let Sizes { nr_chunks, nr_leaves, capacity } = old.sizes();
        nr_chunks < self.list.capacity() && nr_leaves <= self.leaves.capacity() && capacity <= self.capacity
    }

    /// Makes the set of `old` and `change` in this room, which fits: in `draft`, which is empty.
    /// `replaced` is what `old` has, and the new set has not.
    ///
    /// # Errors
    /// [`SlotError::SlotBusy`]: the memslot is there, and ought to be new. [`SlotError::Overlap`].
    // Never inlined: what it needs is not on the stack below what publishes and frees.
    #[inline(never)]
    pub(super) fn build(
        &mut self,
        old: &SlotSet<B>,
        change: &Change<'_, B>,
        draft: &mut Draft<B>,
        replaced: &mut Replaced<B>,
    ) -> Result<(), SlotError> {
        *replaced = Replaced::nothing();
        let id = change.id;
        let before = change.check(old)?;
        let set = self.set.take().expect("a room is for one set");
        let (mut list, mut leaves) = (mem::take(&mut self.list), mem::take(&mut self.leaves));
        let mut done = 0;
        for edit in edits(old, before, change).iter().flatten() {
            list.extend_from_slice(&old.chunks[done..edit.first]);
            done = edit.end;
            for number in edit.first..edit.end {
                replaced.chunks.push(old.chunks[number].chunk);
                replaced.size_bytes += size_of_val(old.chunk(number)) as u64;
            }
            self.rewrite(old, edit, &mut list, &mut draft.chunks);
        }
        list.extend_from_slice(&old.chunks[done..]);
        leaves.extend_from_slice(&old.leaves);
        draft.leaf = self.leaf.take().map(|mut leaf| {
            let number = id as usize / LEAF_IDS;
            if leaves.len() <= number {
                leaves.resize(number + 1, None);
            }
            replaced.leaf = leaves[number];
            if let Some(old) = replaced.leaf {
                replaced.size_bytes += size_of::<IdLeaf>() as u64;
                // SAFETY: as for chunks.
                leaf.0.copy_from_slice(&unsafe { old.as_ref() }.0);
            }
            leaf.0[id as usize % LEAF_IDS] = change.after.map_or(NOWHERE, |after| after.range.start);
            let leaf = Unpublished::new(leaf);
            leaves[number] = Some(leaf.pointer());
            leaf
        });
        let logs = |entry: Option<&SlotEntry<B>>| u32::from(entry.is_some_and(SlotEntry::logs));
        let nr_logging = old.nr_logging - logs(change.before) + logs(change.after);
        let set = set.fill(SlotSet { first: list[0].chunk, chunks: list, leaves, nr_logging });
        debug_assert!(set.is_sound());
        draft.set = Some(Unpublished::new(set));
        Ok(())
    }

    /// Fills one or two new chunks with the memslots of the chunks of `edit`, as changed, and adds
    /// them to `list`.
    #[inline(never)]
    fn rewrite(
        &mut self,
        old: &SlotSet<B>,
        edit: &Edit<'_, B>,
        list: &mut Vec<ChunkRef<B>>,
        made: &mut Few<Unpublished<Chunk<B>>>,
    ) {
        let window = edit.first..edit.end;
        let nr_entries: usize = window.clone().map(|chunk| old.chunk(chunk).len).sum();
        let mut left = nr_entries - usize::from(edit.removed.is_some()) + usize::from(edit.added.is_some());
        let nr_chunks = left.div_ceil(CHUNK_SLOTS).max(1);
        let kept = old.entries_from(edit.first).take(nr_entries).filter(|entry| Some(entry.id) != edit.removed);
        let mut kept = kept.peekable();
        let mut added = edit.added;
        for rest in (1..=nr_chunks).rev() {
            let mut chunk = self.chunks.pop().expect("a change makes no more chunks than there is room for");
            let len = if rest == 1 { left } else { edit.len_of_first(old, left) };
            left -= len;
            for _ in 0..len {
                let next = match (added, kept.peek()) {
                    (Some(new), Some(next)) if next.range.start < new.range.start => kept.next(),
                    (Some(_), _) => added.take(),
                    (None, _) => kept.next(),
                };
                chunk.push(next.expect("as many as were counted").duplicate());
            }
            let start = chunk.entries().first().map_or(Gfn(0), |entry| entry.range.start);
            let chunk = Unpublished::new(chunk);
            list.push(ChunkRef { start, chunk: chunk.pointer() });
            made.push(chunk);
        }
    }
}

/// How large a set is.
pub(super) struct Sizes {
    nr_chunks: usize,
    nr_leaves: usize,
    /// How many memslots a chunk of the next set may have: few, if that has few.
    capacity: usize,
}

impl<B> SlotSet<B> {
    pub(super) fn sizes(&self) -> Sizes {
        let capacity = if self.chunks.len() == 1 { CHUNK_SLOTS.min(self.chunk(0).len + 1) } else { CHUNK_SLOTS };
        Sizes { nr_chunks: self.chunks.len(), nr_leaves: self.leaves.len(), capacity }
    }

    /// Whether the set is as the module says.
    fn is_sound(&self) -> bool {
        let is_filled = |(number, chunk): (usize, &ChunkRef<B>)| {
            let entries = self.chunk(number).entries();
            entries.len() >= MIN_SLOTS && entries[0].range.start == chunk.start
        };
        (self.chunks.len() == 1 || self.chunks.iter().enumerate().all(is_filled))
            && ptr::addr_eq(self.first.as_ptr(), self.chunks[0].chunk.as_ptr())
    }
}

/// What a set has no more that the one before it had.
pub(super) struct Replaced<B> {
    chunks: Few<NonNull<Chunk<B>>>,
    leaf: Option<NonNull<IdLeaf>>,
    size_bytes: u64,
}

impl<B> Replaced<B> {
    pub(super) fn nothing() -> Replaced<B> {
        Replaced { chunks: Few::new(), leaf: None, size_bytes: 0 }
    }

    /// Bytes of the heap that it takes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// # Safety
    /// The change that replaced it was published, and no set that has it is used any more.
    pub(super) unsafe fn free(&self) {
        for &chunk in &self.chunks {
            // SAFETY: chunks come from boxes; as the caller promises.
            unsafe { free(Some(chunk)) }
        }
        // SAFETY: as above.
        unsafe { free(self.leaf) }
    }
}

/// A set that is not published yet. Dropping it frees what it does not share.
pub(super) struct Draft<B> {
    set: Option<Unpublished<SlotSet<B>>>,
    chunks: Few<Unpublished<Chunk<B>>>,
    leaf: Option<Unpublished<IdLeaf>>,
}

impl<B> Draft<B> {
    pub(super) fn empty() -> Draft<B> {
        Draft { set: None, chunks: Few::new(), leaf: None }
    }

    /// The set; `None` if it is not made.
    pub(super) fn set(&self) -> Option<NonNull<SlotSet<B>>> {
        Unpublished::of(&self.set)
    }

    /// The set is published, so it is no longer freed with this.
    pub(super) fn publish(self) {
        let Draft { set, chunks, leaf } = self;
        mem::forget((set, chunks, leaf));
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "chunks_tests.rs"]
mod tests;
