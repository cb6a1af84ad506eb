//! Shadow pages: a hardware table each, with what it was made from, what its entries stand for, and who points to it.
//!
//! The records of shadow pages are never freed before the VM, only used again, each time as another *generation*: so a
//! [`PageRef`] that was kept too long finds another generation, and never memory that is something else. The hardware tables
//! are allocated and freed.
//!
//! # Who may change what
//! - An entry is made by who holds the page's lock and the lock of the frame that the entry leads to; it is taken away,
//!   or loses rights, by who holds the latter alone. An entry leads to the frame that a leaf maps, or to the frame of the
//!   guest table that the page below was made from.
//! - The list of parents, the state of synchronization and the place in the list of the frame's pages belong to the lock of
//!   the frame that the page was made from.
//! - What it was made from is written before anybody can find the page, and stays for its generation.

#![expect(unsafe_code, reason = "records are reached by raw pointers, and freed with the VM")]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr;

use crossbeam_utils::CachePadded;

use super::lock::WordLock;
use super::role::Role;
use crate::addr::{Gfn, Gpa, Hpa};
use crate::boxed::{Zeroed, ZeroedWords, try_zeroed};
use crate::error::Error;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Entries of a shadow table. (Of four under shuttle, with formats that have such tables: each visit of an entry is a step.)
pub(super) const NR_ENTRIES: usize = if cfg!(shuttle) { 4 } else { 512 };
const INDEX_BITS: u32 = NR_ENTRIES.trailing_zeros();

/// The number of a shadow page's record, from 1 on: 0 is none.
pub(super) type PageNumber = u32;

/// A shadow page in one generation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageRef {
    pub(super) number: PageNumber,
    pub(super) generation: u32,
}

/// An entry of a shadow page. As a number for the lists, 0 is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct EntryPlace {
    pub(super) page: PageNumber,
    pub(super) index: usize,
}

impl EntryPlace {
    #[inline]
    pub(super) fn number(self) -> u32 {
        self.page << INDEX_BITS | self.index as u32
    }

    /// The entry with this number, if it is one.
    #[inline]
    pub(super) fn from_number(number: u32) -> Option<EntryPlace> {
        (number != 0).then_some(EntryPlace { page: number >> INDEX_BITS, index: number as usize % NR_ENTRIES })
    }
}

/// What an entry leads to. It is stored with the entry, and never computed from the page: who takes the entry out of a list
/// must look in the list that it was put into, whatever became of the page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    None,
    /// It maps the block that begins with this frame, of the page's level.
    Leaf(Gfn),
    /// The page below.
    Link(PageRef),
}

const TARGET_LEAF: u64 = 1;
const TARGET_LINK: u64 = 2;
const TARGET_KIND: u64 = 3;
const TARGET_NUMBER_SHIFT: u32 = 2;
const TARGET_GENERATION_SHIFT: u32 = 32;

impl Target {
    #[inline]
    fn word(self) -> u64 {
        match self {
            Target::None => 0,
            Target::Leaf(gfn) => gfn.0 << TARGET_NUMBER_SHIFT | TARGET_LEAF,
            Target::Link(page) => {
                u64::from(page.generation) << TARGET_GENERATION_SHIFT
                    | u64::from(page.number) << TARGET_NUMBER_SHIFT
                    | TARGET_LINK
            }
        }
    }

    #[inline]
    fn from_word(word: u64) -> Target {
        match word & TARGET_KIND {
            TARGET_LEAF => Target::Leaf(Gfn(word >> TARGET_NUMBER_SHIFT)),
            TARGET_LINK => Target::Link(PageRef {
                number: word as u32 >> TARGET_NUMBER_SHIFT,
                generation: (word >> TARGET_GENERATION_SHIFT) as u32,
            }),
            _ => Target::None,
        }
    }
}

/// Whether the entries of a page made from a guest table of the lowest level are known to be what the guest's say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SyncState {
    /// The guest can write the table, and entries may be what it said before.
    Unsync,
    /// Somebody has protected the table, and goes through the entries.
    Syncing,
    /// The guest cannot write the table, and all entries are what it says.
    Synced,
}

const SYNC_STATE: u32 = 3;
const SYNC_SEQUENCE_ONE: u32 = 4;

/// The life of a page: its generation above, and below: alive or orphaned, and how many vCPUs have it as their root.
const LIFE_GENERATION_SHIFT: u32 = 32;
const LIFE_ALIVE: u64 = 1 << 31;
/// It is to go when the last vCPU has another root: it has no entries any more, and nobody finds it.
const LIFE_ORPHAN: u64 = 1 << 30;
const LIFE_PINS: u64 = LIFE_ORPHAN - 1;

/// The record of a shadow page.
pub(super) struct ShadowPage {
    /// Who makes entries holds it.
    pub(super) lock: WordLock,
    life: AtomicU64,
    gfn: AtomicU64,
    role: AtomicU64,
    table: AtomicU64,
    /// The next page made from the same frame.
    pub(super) next_of_frame: AtomicU32,
    /// First of the entries that point here.
    pub(super) parents: AtomicU32,
    sync: AtomicU32,
    /// The generation, and one, in which it became certain that no CPU can write the guest's table unseen.
    pub(super) tracked_generation: AtomicU32,
    /// Emulated writes since the page was last walked through.
    pub(super) nr_writes: AtomicU32,
    /// Set when the page is walked through, and cleared when it is passed over for eviction.
    pub(super) is_used: AtomicU32,
    targets: [AtomicU64; NR_ENTRIES],
    next: [AtomicU32; NR_ENTRIES],
    previous: [AtomicU32; NR_ENTRIES],
}

// SAFETY: nothing but atomics; the lock is free.
unsafe impl Zeroed for ShadowPage {
    #[cfg(loom)]
    fn zeroed() -> ShadowPage {
        ShadowPage {
            lock: WordLock::new(),
            life: Zeroed::zeroed(),
            gfn: Zeroed::zeroed(),
            role: Zeroed::zeroed(),
            table: Zeroed::zeroed(),
            next_of_frame: Zeroed::zeroed(),
            parents: Zeroed::zeroed(),
            sync: Zeroed::zeroed(),
            tracked_generation: Zeroed::zeroed(),
            nr_writes: Zeroed::zeroed(),
            is_used: Zeroed::zeroed(),
            targets: Zeroed::zeroed(),
            next: Zeroed::zeroed(),
            previous: Zeroed::zeroed(),
        }
    }
}

impl ShadowPage {
    /// The frame that it was made from; of a page that stands for a part of a large guest page, the part's first.
    #[inline]
    pub(super) fn gfn(&self) -> Gfn {
        Gfn(self.gfn.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn role(&self) -> Role {
        Role::from_bits(self.role.load(Ordering::Relaxed))
    }

    /// The hardware's table.
    #[inline]
    pub(super) fn table(&self) -> Hpa {
        Hpa(self.table.load(Ordering::Relaxed))
    }

    /// What entry `index` leads to. Who does not hold the locks learns what it was at some moment.
    #[inline]
    pub(super) fn target(&self, index: usize) -> Target {
        // Acquire: what the page below was made from is seen by who follows the link.
        Target::from_word(self.targets[index].load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn set_target(&self, index: usize, target: Target) {
        self.targets[index].store(target.word(), Ordering::Release);
    }

    /// Whether `generation` is the page's, and it is alive.
    #[inline]
    pub(super) fn is_alive(&self, generation: u32) -> bool {
        let life = self.life.load(Ordering::Acquire);
        (life >> LIFE_GENERATION_SHIFT) as u32 == generation && life & LIFE_ALIVE != 0
    }

    /// The generation, if the page is alive.
    pub(super) fn generation(&self) -> Option<u32> {
        let life = self.life.load(Ordering::Acquire);
        (life & LIFE_ALIVE != 0).then_some((life >> LIFE_GENERATION_SHIFT) as u32)
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.life.load(Ordering::Relaxed) & LIFE_PINS != 0
    }

    /// Fills a record that is the caller's alone. [`ShadowPage::come_alive`] is to follow.
    pub(super) fn prepare(&self, gfn: Gfn, role: Role, table: Hpa) -> u32 {
        self.gfn.store(gfn.0, Ordering::Relaxed);
        self.role.store(role.bits(), Ordering::Relaxed);
        self.table.store(table.0, Ordering::Relaxed);
        self.parents.store(0, Ordering::Relaxed);
        self.next_of_frame.store(0, Ordering::Relaxed);
        self.sync.store(0, Ordering::Relaxed);
        self.nr_writes.store(0, Ordering::Relaxed);
        self.is_used.store(1, Ordering::Relaxed);
        (self.life.load(Ordering::Relaxed) >> LIFE_GENERATION_SHIFT) as u32
    }

    /// From now on the page can be found.
    pub(super) fn come_alive(&self) {
        // Release: who finds it alive sees what it was made from.
        self.life.fetch_or(LIFE_ALIVE, Ordering::Release);
    }

    /// Ends the page's life, under the lock of its frame. It is the caller's from now on, beside the vCPUs' whose root it is:
    /// who is the last to [`unpin`](ShadowPage::unpin) it frees it.
    pub(super) fn die(&self) {
        let mut life = self.life.load(Ordering::Relaxed);
        // AcqRel: who pins sees that it is too late.
        while let Err(found) = self.life.compare_exchange(
            life,
            (life & !LIFE_ALIVE | LIFE_ORPHAN) + 1,
            Ordering::AcqRel,
            Ordering::Relaxed,
        ) {
            life = found;
        }
    }

    /// Makes the page a vCPU's root, so that it is not freed; `false` if it is not alive in `generation` any more.
    #[inline]
    pub(super) fn pin(&self, generation: u32) -> bool {
        let mut life = self.life.load(Ordering::Relaxed);
        loop {
            if (life >> LIFE_GENERATION_SHIFT) as u32 != generation || life & LIFE_ALIVE == 0 {
                return false;
            }
            match self.life.compare_exchange(life, life + 1, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(found) => life = found,
            }
        }
    }

    /// Ends [`ShadowPage::pin`]. Returns whether the page was orphaned meanwhile and this was the last pin: then the caller
    /// frees it.
    #[inline]
    #[must_use]
    pub(super) fn unpin(&self) -> bool {
        let mut life = self.life.load(Ordering::Relaxed);
        loop {
            let is_last = life & LIFE_ORPHAN != 0 && life & LIFE_PINS == 1;
            let new = if is_last { next_generation(life) } else { life - 1 };
            match self.life.compare_exchange(life, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return is_last,
                Err(found) => life = found,
            }
        }
    }

    /// A walk goes through the page.
    #[inline]
    pub(super) fn note_walked(&self) {
        // Only looks, mostly: the line is shared by all vCPUs in this address space.
        if self.is_used.load(Ordering::Relaxed) == 0 {
            self.is_used.store(1, Ordering::Relaxed);
        }
        if self.nr_writes.load(Ordering::Relaxed) != 0 {
            self.nr_writes.store(0, Ordering::Relaxed);
        }
    }

    /// The state, and a number that counts how often it became [`SyncState::Unsync`].
    pub(super) fn sync_state(&self) -> (SyncState, u32) {
        let word = self.sync.load(Ordering::Relaxed);
        let state = match word & SYNC_STATE {
            0 => SyncState::Unsync,
            1 => SyncState::Syncing,
            _ => SyncState::Synced,
        };
        (state, word / SYNC_SEQUENCE_ONE)
    }

    pub(super) fn set_sync_state(&self, state: SyncState) {
        let word = self.sync.load(Ordering::Relaxed);
        let (state, sequence_step) = match state {
            SyncState::Unsync => (0, SYNC_SEQUENCE_ONE),
            SyncState::Syncing => (1, 0),
            SyncState::Synced => (2, 0),
        };
        self.sync.store((word & !SYNC_STATE | state).wrapping_add(sequence_step), Ordering::Relaxed);
    }

    /// Where in the guest's memory shadow entry `index` is made from, and of how many bytes.
    pub(super) fn guest_entry(&self, index: usize) -> (Gpa, u64) {
        let (offset_bytes, size_bytes) = self.role().guest_entry(index);
        (Gpa(self.gfn().gpa().0 + offset_bytes), size_bytes)
    }
}

/// Nobody's life any more.
fn next_generation(life: u64) -> u64 {
    (life >> LIFE_GENERATION_SHIFT).wrapping_add(1) << LIFE_GENERATION_SHIFT
}

/// All records of a VM.
pub(super) struct Pages {
    records: Vec<AtomicPtr<ShadowPage>>,
    /// A bit for each record that is in use, or about to be.
    in_use: ZeroedWords,
    /// A bit for each page that is [`SyncState::Unsync`] or [`SyncState::Syncing`].
    unsync: ZeroedWords,
    /// Where the next search for a free record begins.
    hint: CachePadded<AtomicU32>,
    /// Where the next search for a page to evict begins.
    pub(super) hand: AtomicU32,
    nr_in_use: AtomicU64,
    peak: AtomicU64,
}

impl Pages {
    pub(super) fn new(max_pages: u32) -> Result<Pages, Error> {
        let len = max_pages as usize;
        let mut records = Vec::new();
        records.try_reserve_exact(len).map_err(|_| Error::OutOfMemory)?;
        records.resize_with(len, || AtomicPtr::new(ptr::null_mut()));
        Ok(Pages {
            records,
            in_use: ZeroedWords::new(len.div_ceil(64))?,
            unsync: ZeroedWords::new(len.div_ceil(64))?,
            hint: CachePadded::new(AtomicU32::new(0)),
            hand: AtomicU32::new(0),
            nr_in_use: AtomicU64::new(0),
            peak: AtomicU64::new(0),
        })
    }

    pub(super) fn max_pages(&self) -> u32 {
        self.records.len() as u32
    }

    pub(super) fn nr_in_use(&self) -> u64 {
        self.nr_in_use.load(Ordering::Relaxed)
    }

    pub(super) fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// The record with this number, which was given out once.
    #[inline]
    pub(super) fn get(&self, number: PageNumber) -> &ShadowPage {
        // Numbers are given out by `claim` alone, which has stored a record before.
        self.peek(number).expect("a record that was made")
    }

    /// The record with this number, if there is one.
    #[inline]
    pub(super) fn peek(&self, number: PageNumber) -> Option<&ShadowPage> {
        // SAFETY: null, or a record made of a box, which is freed with `self`.
        unsafe { self.records[number as usize - 1].load(Ordering::Acquire).as_ref() }
    }

    /// A record for the caller alone; `Ok(None)` if all are in use.
    pub(super) fn claim(&self) -> Result<Option<PageNumber>, Error> {
        let nr_words = self.in_use.len();
        let start = self.hint.load(Ordering::Relaxed) as usize;
        for turn in 0..nr_words {
            let place = (start + turn) % nr_words;
            let word = &self.in_use[place];
            let mut bits = word.load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = (!bits).trailing_zeros();
                let index = place * 64 + bit as usize;
                if index >= self.records.len() {
                    break;
                }
                // Acquire: the last owner's stores come before.
                bits = word.fetch_or(1 << bit, Ordering::Acquire);
                if bits & 1 << bit != 0 {
                    continue;
                }
                if self.records[index].load(Ordering::Relaxed).is_null() {
                    match try_zeroed() {
                        Ok(page) => self.records[index].store(Box::into_raw(page), Ordering::Release),
                        Err(error) => {
                            word.fetch_and(!(1 << bit), Ordering::Release);
                            return Err(error);
                        }
                    }
                }
                self.hint.store(place as u32, Ordering::Relaxed);
                let nr_in_use = self.nr_in_use.fetch_add(1, Ordering::Relaxed) + 1;
                self.peak.fetch_max(nr_in_use, Ordering::Relaxed);
                return Ok(Some(index as u32 + 1));
            }
        }
        Ok(None)
    }

    /// Gives a record back that nobody finds any more.
    pub(super) fn release(&self, number: PageNumber) {
        let index = number as usize - 1;
        self.in_use[index / 64].fetch_and(!(1 << (index % 64)), Ordering::Release);
        self.nr_in_use.fetch_sub(1, Ordering::Relaxed);
    }

    /// Notes that the page is not synchronized.
    pub(super) fn note_unsync(&self, number: PageNumber) {
        let index = number as usize - 1;
        // Release, and before the guest can write: who flushes because of what was written finds it.
        self.unsync[index / 64].fetch_or(1 << (index % 64), Ordering::AcqRel);
    }

    /// Notes that it is, or is gone.
    pub(super) fn note_synced(&self, number: PageNumber) {
        let index = number as usize - 1;
        self.unsync[index / 64].fetch_and(!(1 << (index % 64)), Ordering::AcqRel);
    }

    /// Whether the page may not be synchronized.
    pub(super) fn is_unsync(&self, number: PageNumber) -> bool {
        let index = number as usize - 1;
        self.unsync[index / 64].load(Ordering::Acquire) & 1 << (index % 64) != 0
    }

    /// The first page from number `from` on that may not be synchronized.
    pub(super) fn next_unsync(&self, from: PageNumber) -> Option<PageNumber> {
        let first = from as usize - 1;
        let mut place = first / 64;
        let mut mask = u64::MAX << (first % 64);
        while let Some(word) = self.unsync.get(place) {
            let bits = word.load(Ordering::Acquire) & mask;
            if bits != 0 {
                return Some((place * 64) as u32 + bits.trailing_zeros() + 1);
            }
            place += 1;
            mask = u64::MAX;
        }
        None
    }

    fn link_of(&self, entry: EntryPlace) -> (&AtomicU32, &AtomicU32) {
        let page = self.get(entry.page);
        (&page.next[entry.index], &page.previous[entry.index])
    }

    /// Puts `entry` into the list that begins at `head`. The caller holds the lock of the list's frame.
    pub(super) fn push(&self, head: &AtomicU32, entry: EntryPlace) {
        let first = head.load(Ordering::Relaxed);
        let (next, previous) = self.link_of(entry);
        next.store(first, Ordering::Relaxed);
        previous.store(0, Ordering::Relaxed);
        if let Some(first) = EntryPlace::from_number(first) {
            self.link_of(first).1.store(entry.number(), Ordering::Relaxed);
        }
        head.store(entry.number(), Ordering::Relaxed);
    }

    /// Takes `entry`, which is there, out of the list that begins at `head`. The caller holds the lock of the list's frame.
    pub(super) fn remove(&self, head: &AtomicU32, entry: EntryPlace) {
        let (next, previous) = self.link_of(entry);
        let (next, previous) = (next.load(Ordering::Relaxed), previous.load(Ordering::Relaxed));
        match EntryPlace::from_number(previous) {
            Some(before) => self.link_of(before).0.store(next, Ordering::Relaxed),
            None => {
                debug_assert!(head.load(Ordering::Relaxed) == entry.number(), "an entry is in no list, or another");
                head.store(next, Ordering::Relaxed);
            }
        }
        if let Some(behind) = EntryPlace::from_number(next) {
            self.link_of(behind).1.store(previous, Ordering::Relaxed);
        }
    }

    /// Brings near what will be asked of the entry with this number.
    #[inline]
    pub(super) fn prefetch(&self, number: u32) {
        if let Some(place) = EntryPlace::from_number(number) {
            self.link_of(place).0.load(Ordering::Relaxed);
        }
    }

    /// The entry behind `entry` in its list. The caller holds the lock of the list's frame.
    pub(super) fn behind(&self, entry: EntryPlace) -> Option<EntryPlace> {
        EntryPlace::from_number(self.link_of(entry).0.load(Ordering::Relaxed))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for record in &self.records {
            let record = record.load(Ordering::Relaxed);
            if !record.is_null() {
                // SAFETY: it came from a box, and with `&mut self` nobody uses it any more.
                drop(unsafe { Box::from_raw(record) });
            }
        }
    }
}
