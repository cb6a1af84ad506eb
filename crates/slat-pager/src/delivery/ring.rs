//! One file of rings: for each vCPU one for requests and one for completions, and a flag for each
//! thread that may sleep.
//!
//! # Layout
//! In words of 8 bytes. First a line for each shard of the resolver and one for each waiter of the
//! VMM, whose first word is set while it sleeps. Then, for each vCPU, four lines with one index
//! each, and the entries of both rings. A *line* is 128 bytes, since CPUs prefetch cache lines in
//! pairs: no two vCPUs write to the same line.
//!
//! # Protocol
//! - Each ring has one writer and one reader. Indices only grow; an entry is at `index % entries`.
//!   The writer fills the entry, then moves the tail with release. The reader takes the tail with
//!   acquire, reads the entry, and moves the head with release. The writer takes the head with
//!   acquire, so it overwrites only what was read.
//! - Each side keeps its own index in private memory and reads only the other's. It checks the
//!   value: a head is between the head seen before and the tail; a tail is between the head and the
//!   head plus the size of the ring. Any other value is a [`BadIndex`], and changes nothing.
//! - *Sleep and wake up* are a store-load pair: see [`SharedRings::announce_sleep`] and
//!   [`SharedRings::take_sleeper`].

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::error::BadIndex;
use crate::linux::mapping::MappedMemory;

/// Words of a line.
const LINE: usize = 16;

/// Words of an entry: a ticket, a page, and flags or a status; the fourth is not used.
const ENTRY: usize = 4;

/// The most vCPUs, waiters or shards.
pub(super) const MAX_VCPUS: u32 = 4096;

/// The most entries of a ring.
pub(super) const MAX_ENTRIES: u32 = 4096;

/// The contents of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RingEntry {
    /// Which request of this vCPU it is.
    pub(super) ticket: u64,
    /// The page.
    pub(super) page: u64,
    /// Of a request: the flags; of a completion: the status.
    pub(super) word: u64,
}

/// Why an entry was not pushed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum NotPushed {
    Full,
    BadIndex(BadIndex),
}

/// The places in a file of rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RingLayout {
    pub(super) nr_shards: u32,
    pub(super) nr_waiters: u32,
    pub(super) nr_vcpus: u32,
    /// A power of two.
    pub(super) nr_entries: u32,
}

impl RingLayout {
    /// Whether a VMM may have these numbers.
    pub(super) fn is_possible(&self) -> bool {
        let nr_vcpus = 1..=MAX_VCPUS;
        nr_vcpus.contains(&self.nr_vcpus)
            && (1..=self.nr_vcpus).contains(&self.nr_shards)
            && (1..=self.nr_vcpus).contains(&self.nr_waiters)
            && self.nr_entries.is_power_of_two()
            && self.nr_entries <= MAX_ENTRIES
    }

    /// Words of one vCPU's part.
    fn vcpu_words(&self) -> usize {
        (4 * LINE + 2 * ENTRY * self.nr_entries as usize).next_multiple_of(LINE)
    }

    /// The size of the file.
    pub(super) fn size_bytes(&self) -> u64 {
        let flags = LINE * (self.nr_shards as usize + self.nr_waiters as usize);
        let words = flags + self.nr_vcpus as usize * self.vcpu_words();
        (words as u64 * 8).next_multiple_of(crate::source::PAGE_BYTES)
    }
}

/// A thread that may sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sleeper {
    Shard(u32),
    Waiter(u32),
}

/// All rings of a session, as one side has them mapped.
#[derive(Debug)]
pub(super) struct SharedRings {
    mapping: MappedMemory,
    layout: RingLayout,
}

impl SharedRings {
    /// Maps the file, which has the size of the layout and cannot shrink.
    pub(super) fn new(file: BorrowedFd<'_>, layout: RingLayout) -> io::Result<SharedRings> {
        Ok(SharedRings { mapping: MappedMemory::of_file(file, 0, layout.size_bytes())?, layout })
    }

    pub(super) fn layout(&self) -> RingLayout {
        self.layout
    }

    fn flag(&self, sleeper: Sleeper) -> &AtomicU64 {
        let line = match sleeper {
            Sleeper::Shard(shard) => shard as usize,
            Sleeper::Waiter(waiter) => self.layout.nr_shards as usize + waiter as usize,
        };
        &self.mapping.words()[line * LINE]
    }

    /// Announces that `sleeper` is about to sleep. It looks once more, and only then sleeps.
    pub(super) fn announce_sleep(&self, sleeper: Sleeper) {
        // Relaxed: the fence orders it before the look. The waking side writes its entry, fences,
        // and reads this flag. One of the two fences comes first: either the look finds the entry,
        // or the other side finds the flag.
        self.flag(sleeper).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Withdraws the announcement of `sleeper`.
    pub(super) fn withdraw_sleep(&self, sleeper: Sleeper) {
        // Relaxed: a flag that is seen for too long costs one needless signal.
        self.flag(sleeper).store(0, Ordering::Relaxed);
    }

    /// To be called after something was written that `sleeper` waits for. Returns whether the
    /// caller has to wake it; of several callers only one does.
    pub(super) fn take_sleeper(&self, sleeper: Sleeper) -> bool {
        // The other half of the pair in `announce_sleep`.
        fence(Ordering::SeqCst);
        let flag = self.flag(sleeper);
        // The load first: an exchange would fetch the line for writing each time, from all that
        // share it. Relaxed: the flag only decides which caller signals; the signal and the rings
        // have orders of their own.
        flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
    }

    /// The ring of requests of a vCPU.
    pub(super) fn requests(&self, vcpu: u32) -> Ring<'_> {
        self.ring(vcpu, 0, ["head of its request ring", "tail of its request ring"])
    }

    /// The ring of completions of a vCPU.
    pub(super) fn completions(&self, vcpu: u32) -> Ring<'_> {
        self.ring(vcpu, 1, ["head of its completion ring", "tail of its completion ring"])
    }

    fn ring(&self, vcpu: u32, which: usize, names: [&'static str; 2]) -> Ring<'_> {
        let words = self.layout.vcpu_words();
        let flags = LINE * (self.layout.nr_shards as usize + self.layout.nr_waiters as usize);
        let part = &self.mapping.words()[flags + vcpu as usize * words..][..words];
        let entries = ENTRY * self.layout.nr_entries as usize;
        Ring {
            head: &part[2 * which * LINE],
            tail: &part[(2 * which + 1) * LINE],
            entries: &part[4 * LINE + which * entries..][..entries],
            names,
        }
    }
}

/// One ring in shared memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ring<'a> {
    pub(super) head: &'a AtomicU64,
    pub(super) tail: &'a AtomicU64,
    entries: &'a [AtomicU64],
    names: [&'static str; 2],
}

impl Ring<'_> {
    fn nr_entries(&self) -> u64 {
        (self.entries.len() / ENTRY) as u64
    }

    fn entry(&self, index: u64) -> &[AtomicU64] {
        // The number of entries is a power of two; cannot truncate.
        let slot = (index & (self.nr_entries() - 1)) as usize;
        &self.entries[slot * ENTRY..][..ENTRY]
    }
}

/// The writer's end: its own index, and the last head that it read.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Writer {
    tail: u64,
    seen_head: u64,
}

impl Writer {
    /// Entries that were ever put in.
    pub(super) fn nr_pushed(&self) -> u64 {
        self.tail
    }

    /// Puts an entry in. Wakes no thread.
    pub(super) fn push(&mut self, ring: Ring<'_>, entry: RingEntry) -> Result<(), NotPushed> {
        if self.tail - self.seen_head == ring.nr_entries() {
            // Acquire: the reader has read what is overwritten below.
            let head = ring.head.load(Ordering::Acquire);
            if head < self.seen_head || head > self.tail {
                let [name, _] = ring.names;
                let bad = BadIndex { name, found: head, lowest: self.seen_head, highest: self.tail };
                return Err(NotPushed::BadIndex(bad));
            }
            self.seen_head = head;
            if self.tail - head == ring.nr_entries() {
                return Err(NotPushed::Full);
            }
        }
        let words = ring.entry(self.tail);
        // Relaxed: the tail's release publishes them.
        words[0].store(entry.ticket, Ordering::Relaxed);
        words[1].store(entry.page, Ordering::Relaxed);
        words[2].store(entry.word, Ordering::Relaxed);
        self.tail += 1;
        // Release: the entry, and for a completion the cleared bit, come before the tail.
        ring.tail.store(self.tail, Ordering::Release);
        Ok(())
    }
}

/// The reader's end.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Reader {
    head: u64,
}

impl Reader {
    /// Entries that were ever taken out.
    pub(super) fn nr_popped(&self) -> u64 {
        self.head
    }

    /// Takes the oldest entry out, if there is one.
    pub(super) fn pop(&mut self, ring: Ring<'_>) -> Result<Option<RingEntry>, BadIndex> {
        // Acquire: the entry was written before.
        let tail = ring.tail.load(Ordering::Acquire);
        if tail == self.head {
            return Ok(None);
        }
        if tail < self.head || tail - self.head > ring.nr_entries() {
            let [_, name] = ring.names;
            return Err(BadIndex { name, found: tail, lowest: self.head, highest: self.head + ring.nr_entries() });
        }
        let words = ring.entry(self.head);
        // Each word is read once: the other side may change it at any time. Relaxed: after the
        // tail's acquire.
        let [ticket, page, word] = [0, 1, 2].map(|index: usize| words[index].load(Ordering::Relaxed));
        self.head += 1;
        // Release: the entry was read before it is released to the writer.
        ring.head.store(self.head, Ordering::Release);
        Ok(Some(RingEntry { ticket, page, word }))
    }

    /// Whether there is something to take, or an impossible index.
    pub(super) fn is_nonempty(&self, ring: Ring<'_>) -> bool {
        // Relaxed: only a hint; `pop` reads it with acquire.
        ring.tail.load(Ordering::Relaxed) != self.head
    }
}
