//! Dirty rings, KVM's other form of the dirty log: each vCPU writes down the pages that it opened for writing, one after
//! the other. The cost of reading the log is then that of the pages written, and not of the slots' size; and a vCPU that
//! writes faster than the log is read runs into the end of its ring and exits, which throttles it and nobody else.
//!
//! An entry passes through KVM's states: *empty*, *dirty* (pushed by the vCPU's fault), *harvested* (taken by the user),
//! and by a reset, which protects its page again, empty. KVM keeps the state in the entry's flags. Here it follows from
//! three indices that count entries for ever and never go back, `first <= pushed` and `harvested <= pushed`, and, for a
//! user who takes entries out of order, from a mark in the entry that says *which* index was taken. Nothing is ever
//! cleared, so nothing can be cleared twice: a thread that was preempted in the middle of a harvest or a reset and comes
//! back rounds later finds that its indices are behind, and does no harm. No operation needs a claim or a lock.
//!
//! - *Push* (the vCPU's thread alone; there is room, which only grows meanwhile): write the page into the entry, then
//!   move `pushed` on.
//! - *Harvest* (any thread): read the entry at `harvested`, then move `harvested` on by compare-and-exchange. Who moves it
//!   has the page. So entries are taken in order, each once.
//! - *Reset* (any thread): from `first` on, protect the page of each harvested entry; flush; move `first` behind them,
//!   unless another reset has moved it further.
//!
//! Why no harvested page is missed by a reset: whoever harvested page p in entry i and then resets finds either i not below
//! `first`, or below it. If not below, all entries up to i are harvested (a harvest takes them in order), so its walk
//! comes to i. It reads p there, unless another thread moved `first` over i meanwhile and the vCPU has filled the entry
//! anew; then some other page is protected, which costs a fault and nothing else. In that case, and if i is below `first`
//! from the start, the reset that moved `first` over i protected p and flushed before; and as it saw i harvested, it did so
//! after the harvest. By induction all entries below `first` have been protected and flushed, whoever moved it. In all
//! cases p was protected and flushed after it was harvested and before the call returns: what is written later is pushed
//! again, and what was written before is there to be read.
//!
//! Why a reset protects what the entry stands for: the fault made the leaf writable before it pushed, the push comes before
//! the harvest, and that before the reset (release and acquire along `pushed`, and `harvested` or the mark). So the reset
//! finds the leaf writable, or changed since by somebody else. There is no store-load pair: a fault that gives W pushes,
//! whatever the ring holds already.
//!
//! A move of a slot pushes nothing, as in KVM: all of its pages have another address, and who moved it knows that. So may
//! the pages that faults opened at the old place while it was moved be missing. Pages of a slot that was deleted stay in
//! the rings and are harvested; nothing is protected for them.

#![expect(unsafe_code, reason = "the list of rings is linked by raw pointers")]

use core::ptr;

use crossbeam_utils::CachePadded;

use crate::boxed::ZeroedWords;
use crate::error::Error;
use crate::slot::MAX_SLOTS;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// Entries kept free for the fault that finds its ring nearly full, as KVM keeps them: the soft limit is that far below
/// the size.
pub const DIRTY_RING_RESERVE: u32 = 64;
/// The largest ring (KVM's limit).
pub const MAX_DIRTY_RING_ENTRIES: u32 = 65536;
/// The smallest ring: a page of KVM's entries of 16 bytes.
pub const MIN_DIRTY_RING_ENTRIES: u32 = 256;

const _: () = assert!(MIN_DIRTY_RING_ENTRIES > DIRTY_RING_RESERVE);

/// A page of a slot, as a dirty ring names it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct DirtyPage {
    /// The slot.
    pub slot: u32,
    /// The page: 4 KiB pages from the slot's start.
    pub page: u64,
}

/// Bit of the slot number in an entry's word; the page is below.
const SLOT_SHIFT: u32 = 48;
const _: () = assert!(MAX_SLOTS <= 1 << (u64::BITS - SLOT_SHIFT));

impl DirtyPage {
    /// One word, so that nobody ever reads the slot of one push with the page of another.
    #[inline]
    fn word(self) -> u64 {
        debug_assert!(self.slot < MAX_SLOTS && self.page >> SLOT_SHIFT == 0);
        u64::from(self.slot) << SLOT_SHIFT | self.page
    }

    #[inline]
    fn from_word(word: u64) -> DirtyPage {
        DirtyPage { slot: (word >> SLOT_SHIFT) as u32, page: word & ((1 << SLOT_SHIFT) - 1) }
    }
}

/// What [`DirtyRing::entry`] finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DirtyRingEntry {
    /// Not pushed yet, or reset already (KVM's flags 0).
    Empty,
    /// Pushed and not taken (KVM's `KVM_DIRTY_GFN_F_DIRTY`).
    Dirty(DirtyPage),
    /// Taken, and not reset yet (KVM's `KVM_DIRTY_GFN_F_RESET`).
    Harvested(DirtyPage),
}

/// The dirty ring of one vCPU. It belongs to the VM and stays when the vCPU goes, with what is in it; a vCPU that is made
/// later takes it over.
///
/// There are two ways to read it. [`harvest`](DirtyRing::harvest) takes all there is, in order. Or, as with the ring that
/// KVM maps: keep an index, which begins at [`first_index`](DirtyRing::first_index), look at its
/// [`entry`](DirtyRing::entry), and [mark](DirtyRing::mark_harvested) it. If both are used at once, a page may be given to
/// both.
///
/// In either case [`Vm::reset_dirty_rings`](crate::Vm::reset_dirty_rings) comes before the page is read: what the guest
/// writes between the harvest and the reset is not pushed again.
pub struct DirtyRing {
    nr_entries: u32,
    soft_limit: u32,
    /// Two words for each entry: the page; and the mark, one more than the greatest index that was marked as harvested
    /// there.
    words: ZeroedWords,
    /// Index behind the last entry that was pushed. Written by the vCPU's thread alone.
    pushed: CachePadded<AtomicU64>,
    /// Index behind the last entry that [`DirtyRing::harvest`] took.
    harvested: CachePadded<AtomicU64>,
    /// Index of the first entry that was not reset.
    first: CachePadded<AtomicU64>,
    pub(super) listed: CachePadded<Listed>,
}

/// What is read to find a ring that no vCPU has; see `rings`.
pub(super) struct Listed {
    pub(super) in_use: AtomicBool,
    /// The ring that was listed before this one; never changes once this one is on the list.
    pub(super) next: *const DirtyRing,
}

// SAFETY: all fields but `listed.next` are atomics or never change; `next` is written before the ring is on the list and
// only read since.
unsafe impl Send for DirtyRing {}
// SAFETY: as above.
unsafe impl Sync for DirtyRing {}

impl DirtyRing {
    /// An empty ring that is in use. `nr_entries` is a power of two above `reserve`.
    pub(super) fn new(nr_entries: u32, reserve: u32) -> Result<DirtyRing, Error> {
        debug_assert!(nr_entries.is_power_of_two() && nr_entries > reserve);
        Ok(DirtyRing {
            nr_entries,
            soft_limit: nr_entries - reserve,
            words: ZeroedWords::new(nr_entries as usize * 2)?,
            pushed: CachePadded::new(AtomicU64::new(0)),
            harvested: CachePadded::new(AtomicU64::new(0)),
            first: CachePadded::new(AtomicU64::new(0)),
            listed: CachePadded::new(Listed { in_use: AtomicBool::new(true), next: ptr::null() }),
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
    fn mark_word(&self, index: u64) -> &AtomicU64 {
        &self.words[self.position(index) + 1]
    }

    /// Number of entries, a power of two.
    pub fn nr_entries(&self) -> u32 {
        self.nr_entries
    }

    /// Index of the oldest entry that was not reset. Indices count all entries that were ever pushed: the first is 0.
    #[inline]
    pub fn first_index(&self) -> u64 {
        // Acquire: who sees entries reset sees what came before: their pushes; the protection of their pages; that the reset
        // is done with reading them, before the vCPU fills them anew.
        self.first.load(Ordering::Acquire)
    }

    /// Entries that are not empty. For the vCPU's thread it is so until there are less; for others it may be an old answer.
    #[inline]
    pub(crate) fn nr_used(&self) -> u64 {
        // In this order, with `first` by acquire: all that was reset was pushed before.
        let first = self.first_index();
        self.pushed.load(Ordering::Relaxed) - first
    }

    /// Whether the vCPU's next fault exits with [`Exit::DirtyRingFull`](crate::Exit::DirtyRingFull): only a reset helps.
    #[inline]
    pub fn is_soft_full(&self) -> bool {
        self.nr_used() >= u64::from(self.soft_limit)
    }

    /// Entries that can be pushed now, for the vCPU's thread.
    #[inline]
    pub(crate) fn room(&self) -> u64 {
        u64::from(self.nr_entries) - self.nr_used()
    }

    /// Writes down that `page` may now be written. Only for the thread of the vCPU that has the ring, after it has made
    /// sure of [`room`](DirtyRing::room).
    #[inline]
    pub(crate) fn push(&self, page: DirtyPage) {
        debug_assert!(self.room() != 0, "a fault opens no more pages than there is room for");
        // Relaxed: nobody else writes it.
        let index = self.pushed.load(Ordering::Relaxed);
        // Release: `entry`, if it reads this instead of what it looked for, sees by `first` that it is late. (The vCPU has
        // read `first` before, when it made sure of room.)
        self.page_word(index).store(page.word(), Ordering::Release);
        // Release: who sees the index sees the entry, and the leaf that was made writable.
        self.pushed.store(index + 1, Ordering::Release);
    }

    /// Takes the entries that were pushed by now and not taken yet, in their order, and calls `take` with the page of each.
    /// Returns how many. Several threads may do so at once: each entry goes to one of them.
    pub fn harvest(&self, mut take: impl FnMut(DirtyPage)) -> u64 {
        // Once, so that a vCPU that goes on pushing does not keep the caller here. Acquire: sees the entries, and, handed
        // on by the exchange, the leaves.
        let pushed = self.pushed.load(Ordering::Acquire);
        // Relaxed: the exchange tells whether it is the newest.
        let mut next = self.harvested.load(Ordering::Relaxed);
        let mut taken = 0;
        loop {
            // Entries that were marked one by one may have been reset without passing by here.
            let index = next.max(self.first.load(Ordering::Relaxed));
            if index >= pushed {
                return taken;
            }
            // Relaxed: `pushed` has shown it. It is not filled anew before it is harvested.
            let page = DirtyPage::from_word(self.page_word(index).load(Ordering::Relaxed));
            let is_marked = self.is_marked(index);
            // Release: a reset that sees the entry harvested sees the leaf that it stands for.
            match self.harvested.compare_exchange(next, index + 1, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => {
                    next = index + 1;
                    if !is_marked {
                        taken += 1;
                        take(page);
                    }
                }
                Err(found) => next = found,
            }
        }
    }

    /// The entry of number `index`.
    pub fn entry(&self, index: u64) -> DirtyRingEntry {
        // Acquire: sees the entry.
        if index >= self.pushed.load(Ordering::Acquire) {
            return DirtyRingEntry::Empty;
        }
        // Acquire: if the entry was filled anew, the reset before that is seen below.
        let page = DirtyPage::from_word(self.page_word(index).load(Ordering::Acquire));
        let is_harvested = self.is_harvested(index, self.harvested.load(Ordering::Relaxed));
        if index < self.first_index() {
            DirtyRingEntry::Empty
        } else if is_harvested {
            DirtyRingEntry::Harvested(page)
        } else {
            DirtyRingEntry::Dirty(page)
        }
    }

    /// Marks the entry of number `index` as harvested. Returns whether it was dirty: of several threads that mark it, one is
    /// told so.
    ///
    /// Entries may be marked in any order, but a reset goes no further than to the first that is not harvested: the pages
    /// of those from [`first_index`](DirtyRing::first_index) on, as it is after the reset, have not been protected, and what
    /// is written to them is not pushed again.
    pub fn mark_harvested(&self, index: u64) -> bool {
        // Acquire: sees the leaf, and hands it on with the mark. `harvested` and `first` without order: an entry that was
        // harvested once stays so, and the mark of one that was reset long ago says nothing about the one in its place.
        if index >= self.pushed.load(Ordering::Acquire)
            || index < self.harvested.load(Ordering::Relaxed)
            || index < self.first.load(Ordering::Relaxed)
        {
            return false;
        }
        // Release: as for the exchange in `harvest`.
        self.mark_word(index).fetch_max(index + 1, Ordering::Release) <= index
    }

    /// Whether the entry was marked: also if it was reset since, and the one in its place is marked.
    #[inline]
    fn is_marked(&self, index: u64) -> bool {
        // Acquire: sees the leaf, as the one who marked it did.
        self.mark_word(index).load(Ordering::Acquire) > index
    }

    /// Whether the entry of number `index` was harvested, by a thread that has read `harvested`.
    #[inline]
    fn is_harvested(&self, index: u64, harvested: u64) -> bool {
        index < harvested || self.is_marked(index)
    }

    /// Begins a reset: walks the entries that are harvested and were not reset, the oldest first.
    pub(crate) fn reset(&self) -> Reset<'_> {
        let first = self.first_index();
        // Acquire: sees the leaves of the entries that were harvested.
        let harvested = self.harvested.load(Ordering::Acquire);
        Reset { ring: self, next: first, end: first + u64::from(self.nr_entries), harvested }
    }

    /// Makes room of the entries before `reached`, whose pages a reset has given out: they are protected by now, and that is
    /// flushed. Returns how many were not reset before.
    pub(crate) fn finish_reset(&self, reached: u64) -> u64 {
        // AcqRel. Release: the walk's reads of the entries come before the vCPU fills them anew; and whoever sees them
        // reset sees their pages protected. Acquire: if another reset was faster, the caller may rely on what it protected.
        let before = self.first.fetch_max(reached, Ordering::AcqRel);
        reached.saturating_sub(before)
    }
}

/// A reset under way. As an iterator it gives the pages to be protected.
#[must_use]
pub(crate) struct Reset<'r> {
    ring: &'r DirtyRing,
    next: u64,
    /// No more than the ring holds, so that it ends beside others that harvest, reset and push.
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
        // Relaxed: that it was harvested has shown it. It may be another by now, see the module.
        Some(DirtyPage::from_word(self.ring.page_word(index).load(Ordering::Relaxed)))
    }
}

impl Reset<'_> {
    /// The first entry that was not given out: what [`DirtyRing::finish_reset`] wants to know.
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
