//! The memslots of a peer, and the log of the one that logs, as in 2012: a set of fixed size behind
//! a pointer, which each change copies; a log of two halves.

#![expect(unsafe_code, reason = "a memslot set is freed after a grace period; a log is copied as plain memory")]

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Instant;

use super::super::pattern::nr_words;
use super::grace::{self, GracePeriods};

/// Memslots of a set: KVM had 32 for its user, and some internal ones.
const NR_SLOTS: usize = 36;
/// Words of a memslot: addresses, sizes, flags, pointers, of 128 bytes in all.
const SLOT_WORDS: usize = 16;

/// Two words of a log that one 16-byte instruction can access.
#[derive(Debug, Default)]
#[repr(C, align(16))]
pub(super) struct Pair(pub(super) [AtomicU64; 2]);

/// One bit for each page.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) pairs: Box<[Pair]>,
    nr_words: usize,
    /// Pages marked since the log was cleared; changed under the MMU lock. Only srcu-copy uses it.
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

    #[inline]
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: a pair is two words without padding (16 bytes, 16-byte aligned), and there are at
        // least half as many pairs as words.
        unsafe { std::slice::from_raw_parts(self.pairs.as_ptr().cast(), self.nr_words) }
    }

    /// Sets the bit of `page`. The caller holds the MMU lock.
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

    /// Clears all bits. No other thread uses this half.
    fn clear(&self) {
        // SAFETY: the words are in interior-mutable memory of this size, and no thread accesses
        // them meanwhile: the half has not been in use since a grace period, and is not published.
        unsafe { self.words().as_ptr().cast_mut().cast::<u64>().write_bytes(0, self.nr_words) };
        self.nr_dirty.store(0, Ordering::Relaxed);
    }

    /// Copies all bits to `out`. No thread marks this half any more.
    pub(super) fn copy_to(&self, out: &mut [u64]) {
        let count = self.nr_words.min(out.len());
        // SAFETY: both have `count` words and do not overlap, and no thread writes the log: a grace
        // period is over since the other half was published.
        unsafe { self.words().as_ptr().cast::<u64>().copy_to_nonoverlapping(out.as_mut_ptr(), count) };
    }
}

/// The part of a memslot that is copied.
#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Which half of the log is in use.
    half: usize,
    _others: [u64; SLOT_WORDS - 1],
}

/// A memslot set, of which the first memslot logs.
#[derive(Clone, Debug)]
struct Set([Slot; NR_SLOTS]);

/// The memslots of a VM.
#[derive(Debug)]
pub(super) struct Slots {
    /// A boxed set.
    published: AtomicPtr<Set>,
    halves: [Log; 2],
    grace: GracePeriods,
    /// How long the last one took.
    last_grace_ns: AtomicU64,
}

impl Slots {
    /// A set whose first memslot has `nr_pages` pages.
    pub(super) fn new(nr_pages: u32) -> Slots {
        let set = Set([Slot { half: 0, _others: [0; SLOT_WORDS - 1] }; NR_SLOTS]);
        Slots {
            published: AtomicPtr::new(Box::into_raw(Box::new(set))),
            halves: [Log::new(nr_pages), Log::new(nr_pages)],
            grace: GracePeriods::default(),
            last_grace_ns: AtomicU64::new(0),
        }
    }

    /// The state of grace periods.
    pub(super) fn grace(&self) -> &GracePeriods {
        &self.grace
    }

    /// Seconds that the last grace period took.
    pub(super) fn last_grace_s(&self) -> f64 {
        self.last_grace_ns.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// Opens a guard. The set that is published is not freed before the guard is over.
    pub(super) fn enter(&self) -> SlotsGuard<'_> {
        SlotsGuard { slots: self, _guard: self.grace.enter() }
    }

    /// Which half is in use. The caller has a guard, or holds the slots lock.
    fn half_in_use(&self) -> usize {
        // SAFETY: the published pointer is a live set; the holder of the slots lock frees it after
        // a grace period.
        unsafe { (*self.published.load(Ordering::Acquire)).0[0].half }
    }

    /// The half that faults mark. The caller holds the slots lock.
    pub(super) fn log_in_use(&self) -> &Log {
        &self.halves[self.half_in_use()]
    }

    /// Clears the other half and makes it the one that faults mark. Returns this half, which no
    /// fault marks any more. The caller holds the slots lock. `interrupt` interrupts the vCPUs that
    /// run.
    pub(super) fn swap_log(&self, interrupt: impl FnOnce()) -> &Log {
        let before = self.published.load(Ordering::Acquire);
        // SAFETY: as in `half_in_use`; no thread changes a published set.
        let mut copy = Box::new(unsafe { (*before).clone() });
        let half = copy.0[0].half;
        self.halves[1 - half].clear();
        copy.0[0].half = 1 - half;
        // Release: a guard that reads the pointer observes the copy and the cleared half.
        self.published.store(Box::into_raw(copy), Ordering::Release);
        let begin = Instant::now();
        self.grace.synchronize(interrupt);
        self.last_grace_ns.store(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        // SAFETY: it came from a box and is not published any more, and no guard that could have
        // read the pointer is open.
        drop(unsafe { Box::from_raw(before) });
        &self.halves[half]
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and with `&mut self` no thread uses it.
        drop(unsafe { Box::from_raw(*self.published.get_mut()) });
    }
}

/// An open guard.
#[derive(Debug)]
pub(super) struct SlotsGuard<'a> {
    slots: &'a Slots,
    _guard: grace::ReadGuard<'a>,
}

impl SlotsGuard<'_> {
    /// The half to mark.
    pub(super) fn log(&self) -> &Log {
        &self.slots.halves[self.slots.half_in_use()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_swap_returns_the_marked_half_and_begins_with_an_empty_one() {
        let slots = Slots::new(130);
        assert_eq!((size_of::<Slot>(), slots.log_in_use().words().len()), (128, 3));
        let mut out = [9; 3];
        for round in 0..4 {
            assert_eq!(slots.log_in_use().nr_dirty(), 0);
            let guard = slots.enter();
            [round, 129, 129].into_iter().for_each(|page| guard.log().mark(page));
            drop(guard);
            assert_eq!(slots.log_in_use().nr_dirty(), 2);
            slots.swap_log(|| ()).copy_to(&mut out);
            assert_eq!(out, [1 << round, 0, 2]);
        }
    }
}
