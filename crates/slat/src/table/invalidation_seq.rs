//! Invalidation sequence numbers: how to invalidate a range without waiting for the faults in it.
//!
//! # Guarantees
//! After a change has flushed, no vCPU accesses its range through a translation from before the
//! change. No fault installs one there until the range is withdrawn. Neither side waits for the
//! other.
//!
//! A *change* is all that alters what is below a fault: the deletion or the move of a memslot, or
//! an invalidation for the host. An invalidation sequence number is a [`InvalidationSeq`].
//!
//! # Use
//! A change takes the steps below in this order (`second_stage/invalidate.rs`). A fault keeps the
//! PTE that it read, and compares.
//!
//! # Implementation
//! A change
//! 1. publishes its range among the ranges in flight ([`in_flight`](super::in_flight)),
//! 2. takes the next number ([`InvalidationSeqCounter::next`]),
//! 3. stores that number in every empty PTE of the range, unless a greater one is there, and zaps
//!    the leaf PTEs,
//! 4. flushes the TLBs,
//! 5. acts: the host moves the page, or the memslot set without the memslot is published,
//! 6. withdraws the range.
//!
//! A fault reads in the opposite order: the PTE, then the ranges in flight, then the memslots. It
//! installs a leaf only on an empty PTE that holds *the very number* that it read.
//!
//! # Why it is correct
//! Let a change publish, take number S, and visit PTE E. A fault that reads E before the visit
//! reads a number below S, or a number S' > S that another change has stored.
//! - It read a number below S, and its compare-and-exchange precedes the visit: the visit zaps the
//!   leaf.
//! - It read a number below S, and its compare-and-exchange follows the visit: it fails, because E
//!   holds another number.
//! - It read S' > S: S' was taken after S. The modification order of the counter hands the
//!   publication on to the change that took S', and the fault read S' with acquire. So it observes
//!   the range.
//!
//! A fault that reads E after the visit observes the range for the same reason. If it does not find
//! the range in flight, the change is over, and the fault observes its result.
//!
//! # Numbers of a page may fall
//! The number of a page is that of its lowest PTE. Three operations replace a greater number by a
//! smaller one:
//! - A fault that replaces a read-only leaf (`vcpu`) takes its number before its exchange.
//! - A change that unlinks a page-table page removes the numbers that later changes stored inside.
//! - A fault that refines an empty PTE takes its number before its exchange, and changes may store
//!   greater ones there meanwhile. What they published is handed on by the exchange, which has read
//!   their numbers; what was published before the number was taken, by the counter.
//!
//! Hence the rule is "the very number" and not "at most that number", and hence the rule of the
//! next section. A fault that read before an unlinking fails, because the unlinking has a fresh
//! number. A fault that reads after it observes the range of the later change. That change
//! published, made a full fence, and then walked into the page-table page, so before the page was
//! unlinked; the fault reads the parent PTE, and then the ranges in flight. (The rules
//! fresh-unlink and recount of `models/proofs/invalidation.py` say what happens otherwise.)
//!
//! # No number comes back to a page
//! "The very number" proves that nothing has happened since the read only if no number is stored
//! twice for a page. Each place that stores a number obeys that:
//! - A zap stores its own number in PTEs of the lowest level alone, and once for each page
//!   (`second_stage/zap.rs`).
//! - All other places store a *fresh* number: one exchange takes it, and that exchange alone stores
//!   it. These are: a zap, for a PTE above the lowest level, empty or a leaf; an unlinking; an
//!   aborted recovery or split; a fault that replaces a read-only leaf; a fault that refines a PTE,
//!   for all PTEs of the page-table pages that it links.
//! - The PTEs of other new page-table pages inherit the number of the PTE that links them, so each
//!   page keeps the number that it has. They do not inherit the flag *unflushed*, which is no part of
//!   the number: the page-table page is made after the flush, and no PTE gets the flag again
//!   without another number.
//!
//! Otherwise this happens, with a block of pages, three changes and a fault (rule fresh-above of
//! `models/proofs/invalidation.py`):
//! 1. K takes the fresh number u for an unlinking of the block.
//! 2. J takes its own number S, greater than u, and visits the page. A fault F reads S there.
//! 3. I publishes the page, zaps it, and keeps its range in flight.
//! 4. K unlinks: the PTE of the block is empty and holds u.
//! 5. J passes over the block once more, finds u below S, and stores S.
//! 6. A fault of a neighbour links a page-table page there, and the page inherits S.
//! 7. F read the ranges in flight before I published. It installs on S what I has zapped.

use super::pte::{PAYLOAD_SHIFT, hidden_number, number_in};
use crate::sync::{AtomicU64, Ordering, record};

/// An invalidation sequence number: the value of the counter, which is even, when a range was
/// invalidated. Kept as the complement of the empty PTE that has it, so that a fault, which only
/// compares, decodes next to nothing. (As the PTE itself it would cost more: the compiler then
/// identifies the two, and carries along what it knows of PTEs.)
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct InvalidationSeq(u64);

impl PartialOrd for InvalidationSeq {
    fn partial_cmp(&self, other: &InvalidationSeq) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for InvalidationSeq {
    fn cmp(&self, other: &InvalidationSeq) -> core::cmp::Ordering {
        self.number().cmp(&other.number())
    }
}

impl core::fmt::Debug for InvalidationSeq {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "InvalidationSeq({})", self.number())
    }
}

impl InvalidationSeq {
    /// The number of page tables in which nothing was ever invalidated.
    pub(crate) const FIRST: InvalidationSeq = InvalidationSeq(!hidden_number(0));

    /// From the counter: 52 bits, so at one number a microsecond they last 71 years.
    #[inline]
    pub(crate) fn from_number(number: u64) -> InvalidationSeq {
        InvalidationSeq(!hidden_number(number))
    }

    /// The value of the counter, perhaps marked as [`unflushed`](Self::unflushed).
    #[inline]
    pub(crate) fn number(self) -> u64 {
        number_in(!self.0)
    }

    /// Whether no thread has taken a number between `earlier` and this one.
    pub(crate) fn follows(self, earlier: InvalidationSeq) -> bool {
        self.number() == earlier.number() + InvalidationSeq::STEP
    }

    pub(crate) const STEP: u64 = 2;

    /// This number, marked: CPUs may have a translation of another size cached than the next that
    /// is made at the PTE, in a format that does not allow that
    /// ([`BREAK_BEFORE_MAKE`](crate::format::Format::BREAK_BEFORE_MAKE)).
    pub(crate) fn unflushed(self) -> InvalidationSeq {
        InvalidationSeq(self.0 & !InvalidationSeq::UNFLUSHED)
    }

    /// This number, once that flush is over.
    #[inline]
    pub(crate) fn flushed(self) -> InvalidationSeq {
        InvalidationSeq(self.0 | InvalidationSeq::UNFLUSHED)
    }

    /// Whether a flush must precede all that is made of a PTE with this number.
    #[inline]
    pub(crate) fn is_unflushed(self) -> bool {
        self.0 & InvalidationSeq::UNFLUSHED == 0
    }

    /// The number of an empty PTE with these bits.
    #[inline]
    pub(super) const fn of_empty(bits: u64) -> InvalidationSeq {
        InvalidationSeq(!bits)
    }

    /// The bits of the empty PTE with this number.
    #[inline]
    pub(super) const fn bits_of_empty(self) -> u64 {
        !self.0
    }

    /// The lowest bit of the number, where a PTE has it; inverted here.
    const UNFLUSHED: u64 = 1 << (u64::BITS - PAYLOAD_SHIFT);
}

/// The VM's counter of invalidation sequence numbers.
pub(crate) struct InvalidationSeqCounter(AtomicU64);

impl InvalidationSeqCounter {
    pub(crate) fn new() -> InvalidationSeqCounter {
        InvalidationSeqCounter(AtomicU64::new(InvalidationSeq::FIRST.number()))
    }

    /// Returns a number greater than all before.
    pub(crate) fn next(&self) -> InvalidationSeq {
        // AcqRel: release publishes what the caller did before; acquire observes what earlier
        // callers published.
        let number = self.0.fetch_add(InvalidationSeq::STEP, Ordering::AcqRel) + InvalidationSeq::STEP;
        record!(NumberTaken { number });
        InvalidationSeq::from_number(number)
    }

    /// Returns the greatest number so far. The caller observes what its taker published before it
    /// took the number, and so for all earlier numbers.
    pub(crate) fn current(&self) -> InvalidationSeq {
        // Acquire: pairs with the release of every `next` so far (they form one release sequence).
        // It precedes the caller's reads of what was published.
        let number = self.0.load(Ordering::Acquire);
        record!(NumberRead { number });
        InvalidationSeq::from_number(number)
    }
}

#[cfg(all(test, loom))]
#[path = "invalidation_seq_loom.rs"]
mod loom_tests;
