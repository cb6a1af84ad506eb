//! The slots of a peer, and the log of the one that matters, in the manner of 2012: a set of fixed size behind a pointer,
//! copied for each change; a log of two halves.

#![expect(unsafe_code, reason = "a set of slots is freed when a grace period is over; a log is copied as plain memory")]

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use super::super::pattern::nr_words;
use super::grace::{self, Grace};

/// Slots of a set: KVM had 32 for its user, and some of its own.
const NR_SLOTS: usize = 36;
/// Words of a slot: addresses, sizes, flags, pointers, of 128 bytes in all.
const SLOT_WORDS: usize = 16;

/// Two words of a log that one 16-byte instruction can access.
#[derive(Debug, Default)]
#[repr(C, align(16))]
pub(super) struct Pair(pub(super) [AtomicU64; 2]);

/// One bit for each page.
#[derive(Debug)]
pub(super) struct Log {
    pairs: Box<[Pair]>,
    nr_words: usize,
    /// Pages marked since it was cleared; changed under the lock of the MMU. Only srcu-copy has a use for it.
    nr_dirty: AtomicU64,
}

impl Log {
    fn new(nr_pages: u32) -> Log {
        let nr_words = nr_words(nr_pages);
        Log {
            pairs: (0..nr_words.div_ceil(2)).map(|_| Pair::default()).collect(),
            nr_words,
            nr_dirty: AtomicU64::new(0),
        }
    }

    pub(super) fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    #[inline]
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: a pair is two words without padding (16 bytes, 16-byte aligned), and there are at least half as many
        // pairs as words.
        unsafe { std::slice::from_raw_parts(self.pairs.as_ptr().cast(), self.nr_words) }
    }

    /// Sets the bit of `page`. Under the lock of the MMU.
    pub(super) fn mark(&self, page: u32) {
        let (word, bit) = (&self.words()[(page / 64) as usize], 1 << (page % 64));
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::SeqCst);
            self.nr_dirty.store(self.nr_dirty() + 1, Ordering::Relaxed);
        }
    }

    pub(super) fn nr_dirty(&self) -> u64 {
        self.nr_dirty.load(Ordering::Relaxed)
    }

    /// Clears all bits. Nobody else uses the log.
    fn clear(&self) {
        // SAFETY: the words are in interior-mutable memory of this size, and nobody accesses them meanwhile: the half was
        // not in use since a grace period, and is not published.
        unsafe { self.words().as_ptr().cast_mut().cast::<u64>().write_bytes(0, self.nr_words) };
        self.nr_dirty.store(0, Ordering::Relaxed);
    }

    /// Copies all bits to `out`. Nobody marks any more.
    pub(super) fn copy_to(&self, out: &mut [u64]) {
        let count = self.nr_words.min(out.len());
        // SAFETY: both have `count` words and do not overlap, and nobody writes the log: a grace period is over since the
        // other half was published.
        unsafe { self.words().as_ptr().cast::<u64>().copy_to_nonoverlapping(out.as_mut_ptr(), count) };
    }
}

/// One slot, as far as it is copied.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Which half of the log is in use.
    half: usize,
    _others: [u64; SLOT_WORDS - 1],
}

/// A set of slots, of which the first is the one that logs.
#[derive(Clone, Debug)]
struct Set([Slot; NR_SLOTS]);

/// The slots of a VM.
#[derive(Debug)]
pub(super) struct Slots {
    /// A boxed set.
    published: AtomicPtr<Set>,
    halves: [Log; 2],
    grace: Grace,
}

impl Slots {
    /// Slots of which the first has `nr_pages` pages.
    pub(super) fn new(nr_pages: u32) -> Slots {
        let set = Set([Slot { half: 0, _others: [0; SLOT_WORDS - 1] }; NR_SLOTS]);
        Slots {
            published: AtomicPtr::new(Box::into_raw(Box::new(set))),
            halves: [Log::new(nr_pages), Log::new(nr_pages)],
            grace: Grace::default(),
        }
    }

    /// Opens a section in which the set that is published stays.
    pub(super) fn enter(&self) -> Section<'_> {
        Section { slots: self, _section: self.grace.enter() }
    }

    /// Which half is in use. The caller is in a section, or holds the lock of the slots.
    fn half_in_use(&self) -> usize {
        // SAFETY: what is published is a live set; it is freed by the holder of the lock, after a grace period.
        unsafe { (*self.published.load(Ordering::Acquire)).0[0].half }
    }

    /// The half that faults mark. The caller holds the lock of the slots.
    pub(super) fn log_in_use(&self) -> &Log {
        &self.halves[self.half_in_use()]
    }

    /// Makes the other half, cleared, the one that faults mark, and returns this one, which no fault marks any more. The
    /// caller holds the lock of the slots.
    pub(super) fn swap_log(&self) -> &Log {
        let before = self.published.load(Ordering::Acquire);
        // SAFETY: as in `half_in_use`; nobody changes a published set.
        let mut copy = Box::new(unsafe { (*before).clone() });
        let half = copy.0[0].half;
        self.halves[1 - half].clear();
        copy.0[0].half = 1 - half;
        // Release: the copy and the cleared half, to whoever finds the pointer.
        self.published.store(Box::into_raw(copy), Ordering::Release);
        self.grace.synchronize();
        // SAFETY: it came from a box, is not published any more, and no section that could have found it is open.
        drop(unsafe { Box::from_raw(before) });
        &self.halves[half]
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and nobody uses the slots any more.
        drop(unsafe { Box::from_raw(*self.published.get_mut()) });
    }
}

/// A section.
#[derive(Debug)]
pub(super) struct Section<'a> {
    slots: &'a Slots,
    _section: grace::Section<'a>,
}

impl Section<'_> {
    /// The half that is to be marked.
    pub(super) fn log(&self) -> &Log {
        &self.slots.halves[self.slots.half_in_use()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_change_places_and_begin_empty() {
        let slots = Slots::new(130);
        assert_eq!((size_of::<Slot>(), slots.log_in_use().words().len()), (128, 3));
        let mut out = [9; 3];
        for round in 0..4 {
            assert_eq!(slots.log_in_use().nr_dirty(), 0);
            let section = slots.enter();
            [round, 129, 129].into_iter().for_each(|page| section.log().mark(page));
            drop(section);
            assert_eq!(slots.log_in_use().nr_dirty(), 2);
            slots.swap_log().copy_to(&mut out);
            assert_eq!(out, [1 << round, 0, 2]);
        }
    }
}
