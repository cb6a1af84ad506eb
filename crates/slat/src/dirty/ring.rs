//! The dirty ring of one vCPU, KVM's other form of the dirty log.
//!
//! A fault appends the pages that it opens for writing. So reading the log costs the pages written,
//! and not the size of the memslots. A vCPU that writes faster than the log is read fills its ring
//! and exits. That throttles this vCPU alone.
//!
//! # Guarantees
//! - Every page that a vCPU opens for writing is pushed into its ring.
//! - When a reset returns, every page that was harvested before it is write-protected and flushed.
//!   A later write to it is pushed again. ([`DirtyRing::mark_harvested`] says what holds for
//!   entries that are marked out of order.)
//! - No operation needs a lock or a claim. A thread that is preempted in a harvest or a reset and
//!   continues rounds later does no harm.
//!
//! # Use
//! [`DirtyRing`] says how a ring is read and reset, and what becomes of the pages of a memslot that
//! is moved or deleted.
//!
//! # Implementation
//! An entry passes through KVM's states: *empty*, *dirty* (a fault pushed it), *harvested* (the
//! user took it), and after a reset, which protects its page again, *empty*. KVM keeps the state in
//! the entry's flags. Here it follows from three indices that only grow, `first <= pushed` and
//! `harvested <= pushed`, and from a mark in the entry. The mark says *which* index was taken, for
//! a user that takes entries out of order.
//!
//! - A *push* (the thread of the vCPU alone; there is room, which only grows meanwhile) writes the
//!   page into the entry, and then moves `pushed` on.
//! - A *harvest* (any thread) reads the entry at `harvested`, and then moves `harvested` on by a
//!   compare-and-exchange. The thread whose exchange succeeds has the page. So entries are taken in
//!   order, each once.
//! - A *reset* (any thread) protects the page of each harvested entry from `first` on, flushes, and
//!   moves `first` behind them, unless another reset has moved it further.
//!
//! # Why it is correct
//! Nothing is ever cleared, so nothing is cleared twice: the indices of a thread that continues
//! rounds later are behind.
//!
//! No reset misses a harvested page. Let a thread harvest page p in entry i and then reset.
//! - If i is not below `first`, the walk of the reset comes to i, because all entries up to i are
//!   harvested: a harvest takes them in order. The walk reads p, unless another reset moved `first`
//!   over i meanwhile and the vCPU has filled the entry anew. Then it protects some other page,
//!   which costs a fault and nothing else.
//! - In that case, and if i is below `first` from the start, the reset that moved `first` over i
//!   protected p and flushed before. It did so after the harvest, because it found i harvested. By
//!   induction all entries below `first` were protected and flushed, whichever reset moved it.
//!
//! In each case p was protected and flushed after it was harvested and before the call returns.
//! Later writes are pushed again, and earlier ones are there to be read.
//!
//! A reset finds the leaf of an entry writable, or changed since by another thread. The fault made
//! it writable before it pushed, the push comes before the harvest, and the harvest before the
//! reset (release and acquire along `pushed`, and `harvested` or the mark). No store-load pair is
//! needed: a fault that restores W pushes whatever the ring holds already.

#![expect(unsafe_code, reason = "a ring is in a pool")]

use crossbeam_utils::CachePadded;

use crate::boxed::ZeroedWords;
use crate::error::OutOfMemory;
use crate::pool::{PoolLink, Pooled};
use crate::slot::MemoryRegion;
use crate::sync::{AtomicU64, Ordering, record};

const _: () = assert!(cfg!(shuttle) || DirtyRing::MIN_ENTRIES > DirtyRing::RESERVE);

/// A page of a memslot, as a dirty ring names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DirtyPage {
    /// Number of the memslot.
    pub slot: u32,
    /// Number of the page: 4 KiB pages from the memslot's start.
    pub page: u64,
}

/// The lowest bit of the memslot number in an entry's word; the page is below.
const SLOT_SHIFT: u32 = 48;
const _: () = assert!(MemoryRegion::MAX_SLOTS <= 1 << (u64::BITS - SLOT_SHIFT));

impl DirtyPage {
    /// One word, so that no thread reads the memslot of one push with the page of another.
    #[inline]
    fn word(self) -> u64 {
        debug_assert!(self.slot < MemoryRegion::MAX_SLOTS && self.page >> SLOT_SHIFT == 0);
        u64::from(self.slot) << SLOT_SHIFT | self.page
    }

    #[inline]
    fn from_word(word: u64) -> DirtyPage {
        DirtyPage { slot: (word >> SLOT_SHIFT) as u32, page: word & ((1 << SLOT_SHIFT) - 1) }
    }
}

/// The state of an entry, from [`DirtyRing::entry`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirtyRingEntry {
    /// Not pushed yet, or reset already (KVM's flags 0).
    Empty,
    /// Pushed and not taken (KVM's `KVM_DIRTY_GFN_F_DIRTY`).
    Dirty(DirtyPage),
    /// Taken, and not reset yet (KVM's `KVM_DIRTY_GFN_F_RESET`).
    Harvested(DirtyPage),
}

/// The dirty ring of one vCPU. It belongs to the VM, and stays with its entries when the vCPU is
/// dropped. A later vCPU takes it over.
///
/// There are two ways to read it:
/// - [`harvest`](DirtyRing::harvest) takes all entries that are there, in order.
/// - As with the ring that KVM maps: keep an index, which begins at
///   [`first_index`](DirtyRing::first_index), read its [`entry`](DirtyRing::entry), and
///   [mark](DirtyRing::mark_harvested) it.
///
/// If both are used at once, a page may be given to both.
///
/// In either case call [`Vm::reset_dirty_rings`](crate::Vm::reset_dirty_rings) before the page is
/// read: what the guest writes between the harvest and the reset is not pushed again.
///
/// # Memslots that are moved or deleted
/// A move of a memslot pushes nothing, as in KVM: all of its pages have another address, and the
/// caller of the move knows that. Pages that faults opened at the old place during the move may be
/// missing, too. Pages of a memslot that was deleted stay in the ring, and a harvest takes them; a
/// reset protects nothing for them.
pub struct DirtyRing {
    nr_entries: u32,
    soft_limit: u32,
    /// Two words for each entry: the page, and the mark. The mark is one more than the greatest
    /// index that was marked as harvested there.
    words: ZeroedWords,
    /// Index behind the last entry that was pushed. Written by the vCPU's thread alone.
    pushed: CachePadded<AtomicU64>,
    /// Index behind the last entry that [`DirtyRing::harvest`] took.
    harvested: CachePadded<AtomicU64>,
    /// Index of the first entry that was not reset.
    first: CachePadded<AtomicU64>,
    link: PoolLink<DirtyRing>,
}

// SAFETY: it is one field of the ring.
unsafe impl Pooled for DirtyRing {
    fn link(&self) -> &PoolLink<DirtyRing> {
        &self.link
    }
}

impl DirtyRing {
    /// Entries that are kept free for the fault that finds its ring nearly full, as in KVM: the
    /// soft limit is that far below the size.
    pub const RESERVE: u32 = 64;
    /// The largest ring, in entries (KVM's limit).
    pub const MAX_ENTRIES: u32 = 65536;
    /// The smallest ring, in entries: a page of KVM's entries of 16 bytes.
    // Few under shuttle, so that a test fills entries anew.
    pub const MIN_ENTRIES: u32 = if cfg!(shuttle) { 4 } else { 256 };

    /// Makes an empty ring. `nr_entries` is a power of two above `reserve`.
    pub(super) fn new(nr_entries: u32, reserve: u32) -> Result<DirtyRing, OutOfMemory> {
        debug_assert!(nr_entries.is_power_of_two() && nr_entries > reserve);
        Ok(DirtyRing {
            nr_entries,
            soft_limit: nr_entries - reserve,
            words: ZeroedWords::new(nr_entries as usize * 2)?,
            pushed: CachePadded::new(AtomicU64::new(0)),
            harvested: CachePadded::new(AtomicU64::new(0)),
            first: CachePadded::new(AtomicU64::new(0)),
            link: PoolLink::new(),
        })
    }

    fn position(&self, index: u64) -> usize {
        (index & u64::from(self.nr_entries - 1)) as usize * 2
    }

    #[inline]
    fn page_word(&self, index: u64) -> &AtomicU64 {
        &self.words[self.position(index)]
    }

    #[inline]
    fn page_at(&self, index: u64, ordering: Ordering) -> DirtyPage {
        let page = self.page_word(index).load(ordering);
        record!(RingEntryRead { ring: self.address(), index, page });
        DirtyPage::from_word(page)
    }

    #[inline]
    fn mark_word(&self, index: u64) -> &AtomicU64 {
        &self.words[self.position(index) + 1]
    }

    /// Number of entries, a power of two.
    pub fn nr_entries(&self) -> u32 {
        self.nr_entries
    }

    /// Index of the oldest entry that was not reset. Indices count all entries that were ever
    /// pushed; the first is 0.
    #[inline]
    pub fn first_index(&self) -> u64 {
        // Acquire: a thread that finds entries reset observes what came before: their pushes, the
        // protection of their pages, and that the reset has read them, before the vCPU fills them
        // anew.
        let first = self.first.load(Ordering::Acquire);
        record!(RingFirstRead { ring: self.address(), first });
        first
    }

    /// Its address, for [`record!`].
    #[cfg(shuttle)]
    fn address(&self) -> u64 {
        core::ptr::from_ref(self).addr() as u64
    }

    /// Returns how many entries are not empty. For the vCPU's thread the number can only fall until
    /// it pushes; for other threads it may be out of date.
    #[inline]
    pub(crate) fn nr_used(&self) -> u64 {
        // In this order, with `first` by acquire: all that was reset was pushed before.
        let first = self.first_index();
        self.pushed.load(Ordering::Relaxed) - first
    }

    /// Whether the vCPU's next fault exits with
    /// [`Exit::DirtyRingFull`](crate::Exit::DirtyRingFull). Only a reset changes that.
    #[inline]
    pub fn is_soft_full(&self) -> bool {
        self.nr_used() >= u64::from(self.soft_limit)
    }

    /// Returns how many entries can be pushed now. For the vCPU's thread.
    #[inline]
    pub(crate) fn room(&self) -> u64 {
        u64::from(self.nr_entries) - self.nr_used()
    }

    /// Pushes `page`, which may now be written. Only for the thread of the vCPU that has the ring,
    /// after it has made sure of [`room`](DirtyRing::room).
    #[inline]
    pub(crate) fn push(&self, page: DirtyPage) {
        debug_assert!(self.room() != 0, "a fault opens no more pages than there is room for");
        // Relaxed: no other thread writes it.
        let index = self.pushed.load(Ordering::Relaxed);
        // Release: `entry`, if it reads this instead of the page that it looked for, observes in
        // `first` that it is late. (The vCPU has read `first` before, when it made sure of room.)
        self.page_word(index).store(page.word(), Ordering::Release);
        record!(RingEntryWritten { ring: self.address(), index, page: page.word() });
        // Release: a thread that reads the index observes the entry, and the leaf that was made
        // writable.
        self.pushed.store(index + 1, Ordering::Release);
        record!(RingPushed { ring: self.address(), index });
    }

    /// Takes the entries that were pushed by now and not taken yet, in their order. Calls `take`
    /// with the page of each, and returns how many it took. Several threads may harvest at once:
    /// each entry goes to one of them.
    pub fn harvest(&self, mut take: impl FnMut(DirtyPage)) -> u64 {
        // Once, so that a vCPU that goes on pushing does not keep the caller here. Acquire:
        // observes the entries and, handed on by the exchange, the leaves.
        let pushed = self.pushed.load(Ordering::Acquire);
        // Relaxed: the exchange fails if it is not the newest.
        let mut next = self.harvested.load(Ordering::Relaxed);
        record!(RingHarvestBegins { ring: self.address(), next });
        let mut taken = 0;
        loop {
            // Entries that were marked one by one may have been reset, and `harvested` is behind
            // them.
            let index = next.max(self.first.load(Ordering::Relaxed));
            if index >= pushed {
                return taken;
            }
            record!(RingEntryChosen { ring: self.address(), index });
            // `pushed` has shown it. Acquire: it is filled anew only after it was harvested, and
            // then the exchange fails; or after it was marked, and then the mark is observed.
            let page = self.page_at(index, Ordering::Acquire);
            let is_marked = self.is_marked(index);
            // Release: a reset that finds the entry harvested observes the leaf that it stands for.
            match self.harvested.compare_exchange(next, index + 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => {
                    record!(RingHarvested { ring: self.address(), index });
                    next = index + 1;
                    if !is_marked {
                        taken += 1;
                        take(page);
                    }
                }
                Err(found) => {
                    record!(RingHarvestFailed { ring: self.address(), next: found });
                    next = found;
                }
            }
        }
    }

    /// Returns the state of entry number `index`.
    pub fn entry(&self, index: u64) -> DirtyRingEntry {
        // Acquire: observes the entry.
        if index >= self.pushed.load(Ordering::Acquire) {
            return DirtyRingEntry::Empty;
        }
        // Acquire: if the entry was filled anew, the reset before that is observed below.
        let page = self.page_at(index, Ordering::Acquire);
        let is_harvested = self.is_harvested(index, self.harvested.load(Ordering::Relaxed));
        if index < self.first_index() {
            DirtyRingEntry::Empty
        } else if is_harvested {
            DirtyRingEntry::Harvested(page)
        } else {
            DirtyRingEntry::Dirty(page)
        }
    }

    /// Marks entry number `index` as harvested. Returns whether it was dirty: of several threads
    /// that mark it, one gets `true`.
    ///
    /// Entries may be marked in any order, but a reset ends at the first that is not harvested. The
    /// pages from [`first_index`](DirtyRing::first_index) on, as it is after the reset, are not
    /// protected, and what is written to them is not pushed again.
    pub fn mark_harvested(&self, index: u64) -> bool {
        // Acquire: observes the leaf, and hands it on with the mark. `harvested` and `first` need
        // no order: an entry that was harvested stays so, and the mark of one that was reset long
        // ago says nothing about the one in its place.
        if index >= self.pushed.load(Ordering::Acquire)
            || index < self.harvested.load(Ordering::Relaxed)
            || index < self.first.load(Ordering::Relaxed)
        {
            return false;
        }
        // Release: as for the exchange in `harvest`.
        let before = self.mark_word(index).fetch_max(index + 1, Ordering::Release);
        record!(RingMarked { ring: self.address(), index });
        before <= index
    }

    /// Whether the entry was marked. Also true if it was reset since, and the one in its place is
    /// marked.
    #[inline]
    fn is_marked(&self, index: u64) -> bool {
        // Acquire: observes the leaf, as the thread that marked the entry did.
        let mark = self.mark_word(index).load(Ordering::Acquire);
        record!(RingMarkRead { ring: self.address(), index, mark });
        mark > index
    }

    /// Whether entry number `index` was harvested; the caller has read `harvested`.
    #[inline]
    fn is_harvested(&self, index: u64, harvested: u64) -> bool {
        index < harvested || self.is_marked(index)
    }

    /// Begins a reset: an iterator over the entries that are harvested and were not reset, oldest
    /// first.
    pub(crate) fn reset(&self) -> Reset<'_> {
        let first = self.first_index();
        // Acquire: observes the leaves of the entries that were harvested.
        let harvested = self.harvested.load(Ordering::Acquire);
        record!(RingResetBegins { ring: self.address(), harvested });
        Reset { ring: self, next: first, end: first + u64::from(self.nr_entries), harvested }
    }

    /// Makes the entries before `reached` empty. The caller has protected the pages that the reset
    /// gave out, and flushed. Returns how many entries no other reset had made empty before.
    pub(crate) fn finish_reset(&self, reached: u64) -> u64 {
        // AcqRel. Release: the reads of the walk come before the vCPU fills the entries anew, and a
        // thread that finds them reset observes that their pages are protected. Acquire: if another
        // reset was faster, the caller may rely on what that has protected.
        let before = self.first.fetch_max(reached, Ordering::AcqRel);
        record!(RingReset { ring: self.address(), reached });
        reached.saturating_sub(before)
    }
}

/// A reset under way: an iterator over the pages to be protected.
#[must_use]
pub(crate) struct Reset<'r> {
    ring: &'r DirtyRing,
    next: u64,
    /// At most as many entries as the ring holds, so that the walk ends beside threads that
    /// harvest, reset and push.
    end: u64,
    harvested: u64,
}

impl Iterator for Reset<'_> {
    type Item = DirtyPage;

    #[inline]
    fn next(&mut self) -> Option<DirtyPage> {
        let index = self.next;
        if index >= self.end || !self.ring.is_harvested(index, self.harvested) {
            return None;
        }
        self.next += 1;
        // Relaxed: the load that found it harvested has shown it. It may be another page by now;
        // see the module.
        Some(self.ring.page_at(index, Ordering::Relaxed))
    }
}

impl Reset<'_> {
    /// The first entry that was not given out, for [`DirtyRing::finish_reset`].
    pub(crate) fn reached(&self) -> u64 {
        self.next
    }

    /// As [`DirtyRing::finish_reset`].
    #[cfg(all(test, not(shuttle)))]
    pub(crate) fn finish(self) -> u64 {
        self.ring.finish_reset(self.next)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "ring_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "ring_loom.rs"]
mod loom_tests;
