//! Shadow pages: the hardware page-table page of each, what it was made from, what its PTEs lead
//! to, and which PTEs point to it.
//!
//! # Guarantees
//! The record of a shadow page is freed only with the VM; each use of it is another *generation*. A
//! [`PageRef`] that was kept too long finds another generation, never other memory. The hardware
//! page-table pages are allocated and freed. So are the records of the PTEs (`pte_records`), which
//! are nearly all of a page's record: [`Pages::free_unused`].
//!
//! # Use: which lock guards what
//! - A thread makes a PTE under two locks: the page's, and that of the frame that the PTE leads to.
//!   The frame's lock alone is enough to zap the PTE or to take rights from it. A leaf PTE leads to
//!   the frame that it maps, a link to the frame of the guest table that the page below was made
//!   from.
//! - The lock of the frame that a page was made from guards its list of parents, its state of
//!   synchronization, and its place in the list of the frame's pages.
//! - What a page was made from is written before any thread can find the page, and stays for its
//!   generation.

#![expect(unsafe_code, reason = "records are reached by raw pointers, and freed with the VM")]

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;

use super::lock::WordLock;
pub(super) use super::pte_records::{NR_ENTRIES, PageNumber, PageRef, PtePlace};
use super::pte_records::{PteRecords, RetiredRecords, Target};
use super::role::Role;
use crate::addr::{Gfn, Gpa, Hpa};
use crate::boxed::{Zeroed, ZeroedWords, try_zeroed};
use crate::error::OutOfMemory;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use crate::table::retire::{Epochs, Guard};

/// Whether the PTEs of a page made from a lowest guest table are known to be what the guest's say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SyncState {
    /// The guest can write the table, and PTEs may be what it said before.
    Unsync,
    /// A thread has protected the table, and compares the PTEs.
    Syncing,
    /// The guest cannot write the table, and all PTEs are what it says.
    Synced,
}

const SYNC_STATE: u32 = 3;
const SYNC_SEQUENCE_ONE: u32 = 4;

/// The bits of [`ShadowPage::life`]: the generation in the upper half; below it whether the page is
/// alive or an orphan, and how many vCPUs have it as their root.
const LIFE_GENERATION_SHIFT: u32 = 32;
const LIFE_ALIVE: u64 = 1 << 31;
/// The page is dead, and no thread finds it. The last [`unpin`](ShadowPage::unpin) frees it.
const LIFE_ORPHAN: u64 = 1 << 30;
const LIFE_PINS: u64 = LIFE_ORPHAN - 1;

/// The record of a shadow page.
pub(super) struct ShadowPage {
    /// Held by a thread that makes PTEs.
    pub(super) lock: WordLock,
    life: AtomicU64,
    gfn: AtomicU64,
    role: AtomicU64,
    table: AtomicU64,
    /// Number of the next page made from the same frame.
    pub(super) next_of_frame: AtomicU32,
    /// Number of the first of the PTEs that point here.
    pub(super) parents: AtomicU32,
    sync: AtomicU32,
    /// The generation plus one in which it became certain that no CPU can write the guest's table
    /// unseen.
    pub(super) tracked_generation: AtomicU32,
    /// Emulated writes since a walk last went through the page.
    pub(super) nr_writes: AtomicU32,
    /// Set when a walk goes through the page, cleared when an eviction passes over it.
    pub(super) is_used: AtomicU32,
    /// Null if the page has none: then its number is not in use.
    ptes: AtomicPtr<PteRecords>,
}

// SAFETY: all fields are atomics, for which zero is valid; a lock of zero is free.
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
            ptes: AtomicPtr::new(ptr::null_mut()),
        }
    }
}

impl ShadowPage {
    /// The frame that it was made from. Of a page that stands for a part of a large guest page, the
    /// first frame of that part.
    #[inline]
    pub(super) fn gfn(&self) -> Gfn {
        // Acquire, here and in `role` and `table`: a thread without a lock reads these, and then
        // whether the page is still alive. If it has read what the next page was made from, it
        // finds that the page of before is not (pairs with `prepare`).
        Gfn(self.gfn.load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn role(&self) -> Role {
        Role::from_bits(self.role.load(Ordering::Acquire))
    }

    /// The hardware page-table page.
    #[inline]
    pub(super) fn table(&self) -> Hpa {
        Hpa(self.table.load(Ordering::Acquire))
    }

    /// The records of the PTEs.
    ///
    /// # Safety
    /// As long as the caller uses the result, it holds one of two locks. Either that of the page,
    /// which is alive, or is dead and pinned by the caller; or that of the frame that one of the
    /// PTEs leads to, and then the PTE leads there.
    #[inline]
    pub(super) unsafe fn ptes(&self) -> &PteRecords {
        // SAFETY: the page's number is in use, as the caller promises: `pte_records`.
        // `Pages::claim` has stored the pointer, which is cleared only when the number is not in
        // use.
        unsafe { &*self.ptes.load(Ordering::Relaxed) }
    }

    /// What PTE `index` led to at some moment; [`Target::None`] if the page is gone.
    ///
    /// # Safety
    /// The guard is of the VM of the page.
    #[inline]
    pub(super) unsafe fn target_in(&self, _guard: &Guard<'_>, index: usize) -> Target {
        // Acquire: reads the records as they were made.
        // SAFETY: null, or records that are not freed before the guard ends (`pte_records`), as the
        // caller promises.
        let ptes = unsafe { self.ptes.load(Ordering::Acquire).as_ref() };
        ptes.map_or(Target::None, |ptes| ptes.target(index))
    }

    /// Loads the list link of PTE `index` into the cache.
    ///
    /// # Safety
    /// The guard is of the VM of the page.
    #[inline]
    pub(super) unsafe fn prefetch_link(&self, _guard: &Guard<'_>, index: usize) {
        // SAFETY: as in `target_in`.
        if let Some(ptes) = unsafe { self.ptes.load(Ordering::Acquire).as_ref() } {
            ptes.neighbours(index).0.load(Ordering::Relaxed);
        }
    }

    /// Whether `generation` is the page's, and the page is alive.
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

    /// Fills a record that belongs to the caller alone, and returns its generation.
    /// [`ShadowPage::come_alive`] must follow.
    pub(super) fn prepare(&self, gfn: Gfn, role: Role, table: Hpa) -> u32 {
        // Release: the page of before has died. A thread that reads one of these observes that.
        self.gfn.store(gfn.0, Ordering::Release);
        self.role.store(role.bits(), Ordering::Release);
        self.table.store(table.0, Ordering::Release);
        self.parents.store(0, Ordering::Relaxed);
        self.next_of_frame.store(0, Ordering::Relaxed);
        self.sync.store(0, Ordering::Relaxed);
        self.nr_writes.store(0, Ordering::Relaxed);
        self.is_used.store(1, Ordering::Relaxed);
        (self.life.load(Ordering::Relaxed) >> LIFE_GENERATION_SHIFT) as u32
    }

    /// Lets other threads find the page.
    pub(super) fn come_alive(&self) {
        // Release: a thread that finds it alive reads what it was made from.
        self.life.fetch_or(LIFE_ALIVE, Ordering::Release);
    }

    /// Ends the page's life, under the lock of its frame. The caller gets a pin, beside those of
    /// the vCPUs that have the page as their root.
    pub(super) fn die(&self) {
        let mut life = self.life.load(Ordering::Relaxed);
        // AcqRel: a later `pin` fails.
        while let Err(found) = self.life.compare_exchange(
            life,
            (life & !LIFE_ALIVE | LIFE_ORPHAN) + 1,
            Ordering::AcqRel,
            Ordering::Relaxed,
        ) {
            life = found;
        }
    }

    /// Makes the page the root of a vCPU, so that it is not freed. `false` if it is not alive in
    /// `generation` any more.
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

    /// Ends [`ShadowPage::pin`]. `true` if the page is an orphan and this was the last pin: then
    /// the caller frees it.
    ///
    /// # Safety
    /// The pin is the caller's, and the page is not used by it any more.
    #[inline]
    #[must_use]
    pub(super) unsafe fn unpin(&self) -> bool {
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

    /// Notes that a walk goes through the page.
    #[inline]
    pub(super) fn note_walked(&self) {
        // Stores only what changes: all vCPUs in this address space share the cache line.
        if self.is_used.load(Ordering::Relaxed) == 0 {
            self.is_used.store(1, Ordering::Relaxed);
        }
        if self.nr_writes.load(Ordering::Relaxed) != 0 {
            self.nr_writes.store(0, Ordering::Relaxed);
        }
    }

    /// The state, and how often it became [`SyncState::Unsync`] (modulo 2^30).
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

    /// The address of the guest's PTE that shadow PTE `index` is made from, and its size in bytes.
    pub(super) fn guest_entry(&self, index: usize) -> (Gpa, u64) {
        let (offset_bytes, size_bytes) = self.role().guest_entry(index);
        (Gpa(self.gfn().gpa().0 + offset_bytes), size_bytes)
    }
}

/// The life of a record that is free again: the next generation, not alive, no pins.
fn next_generation(life: u64) -> u64 {
    (life >> LIFE_GENERATION_SHIFT).wrapping_add(1) << LIFE_GENERATION_SHIFT
}

/// The records of all shadow pages of a VM.
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
    retired: RetiredRecords,
}

impl Pages {
    pub(super) fn new(max_pages: u32) -> Result<Pages, OutOfMemory> {
        let len = max_pages as usize;
        let mut records = Vec::new();
        records.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
        records.resize_with(len, || AtomicPtr::new(ptr::null_mut()));
        Ok(Pages {
            records,
            in_use: ZeroedWords::new(len.div_ceil(64))?,
            unsync: ZeroedWords::new(len.div_ceil(64))?,
            hint: CachePadded::new(AtomicU32::new(0)),
            hand: AtomicU32::new(0),
            nr_in_use: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            retired: RetiredRecords::new(),
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

    /// The record with this number, which is one that was claimed.
    #[inline]
    pub(super) fn get(&self, number: PageNumber) -> &ShadowPage {
        // `claim` has stored the record before it returned the number.
        self.peek(number).expect("a shadow page that was made")
    }

    /// The record with this number, if there is one.
    #[inline]
    pub(super) fn peek(&self, number: PageNumber) -> Option<&ShadowPage> {
        // SAFETY: the pointer is null, or comes from a box that is freed with `self`.
        unsafe { self.records[number as usize - 1].load(Ordering::Acquire).as_ref() }
    }

    /// Returns a record that belongs to the caller alone; `Ok(None)` if all are in use.
    pub(super) fn claim(&self) -> Result<Option<PageNumber>, OutOfMemory> {
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
                if let Err(error) = self.complete(index) {
                    word.fetch_and(!(1 << bit), Ordering::Release);
                    return Err(error);
                }
                self.hint.store(place as u32, Ordering::Relaxed);
                let nr_in_use = self.nr_in_use.fetch_add(1, Ordering::Relaxed) + 1;
                self.peak.fetch_max(nr_in_use, Ordering::Relaxed);
                return Ok(Some(index as u32 + 1));
            }
        }
        Ok(None)
    }

    /// Makes what is missing of record `index`, which is the caller's.
    fn complete(&self, index: usize) -> Result<(), OutOfMemory> {
        let mut record = self.records[index].load(Ordering::Relaxed);
        if record.is_null() {
            record = Box::into_raw(try_zeroed()?);
            self.records[index].store(record, Ordering::Release);
        }
        // SAFETY: the pointer comes from a box that is freed with `self`.
        let page: &ShadowPage = unsafe { &*record };
        if page.ptes.load(Ordering::Relaxed).is_null() {
            // Release: a guard that reads the pointer reads the records as they were made.
            page.ptes.store(Box::into_raw(try_zeroed()?), Ordering::Release);
        }
        Ok(())
    }

    /// Frees the records of PTEs of all numbers that are not in use, and what earlier calls could
    /// not free yet. What a guard may still read is left for the next call.
    /// `barrier_on_all_cpus` is the host's.
    ///
    /// # Safety
    /// The guards in which these pages are reached are of `epochs`.
    pub(super) unsafe fn free_unused(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        let unused = (1..=self.max_pages()).filter_map(|number| {
            let page = self.peek(number)?;
            let index = number as usize - 1;
            let (word, bit) = (&self.in_use[index / 64], 1 << (index % 64));
            // As if for a page, so that no thread makes one of it meanwhile. Acquire: the last
            // owner's stores come before.
            let is_mine = word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Acquire) & bit == 0;
            if !is_mine {
                return None;
            }
            let ptes = page.ptes.swap(ptr::null_mut(), Ordering::Relaxed);
            word.fetch_and(!bit, Ordering::Release);
            NonNull::new(ptes)
        });
        // SAFETY: the pointers come from boxes. Two kinds of threads use the records: a lock
        // holder, of which a number that is not in use has none; and a thread inside a guard of
        // `epochs` that began before the pointer was cleared.
        unsafe { self.retired.retire(unused, epochs, barrier_on_all_cpus) }
    }

    /// Ends the use of a record.
    ///
    /// # Safety
    /// The record is the caller's, and the caller does not use it any more: the records of its PTEs
    /// may be freed from now on. Nothing leads to it, but what a guard has read earlier.
    pub(super) unsafe fn release(&self, number: PageNumber) {
        let index = number as usize - 1;
        self.in_use[index / 64].fetch_and(!(1 << (index % 64)), Ordering::Release);
        self.nr_in_use.fetch_sub(1, Ordering::Relaxed);
        // The next page takes a number that has records, rather than one that was never in use.
        if ((index / 64) as u32) < self.hint.load(Ordering::Relaxed) {
            self.hint.store((index / 64) as u32, Ordering::Relaxed);
        }
    }

    /// Notes that the page is not synchronized.
    pub(super) fn note_unsync(&self, number: PageNumber) {
        let index = number as usize - 1;
        // Release, and before the guest can write: a flush because of what the guest wrote finds
        // the bit.
        self.unsync[index / 64].fetch_or(1 << (index % 64), Ordering::AcqRel);
    }

    /// Notes that the page is synchronized, or gone.
    pub(super) fn note_synced(&self, number: PageNumber) {
        let index = number as usize - 1;
        self.unsync[index / 64].fetch_and(!(1 << (index % 64)), Ordering::AcqRel);
    }

    /// Whether the page may not be synchronized.
    pub(super) fn is_unsync(&self, number: PageNumber) -> bool {
        let index = number as usize - 1;
        self.unsync[index / 64].load(Ordering::Acquire) & 1 << (index % 64) != 0
    }

    /// The first page, from number `from` on, that may not be synchronized.
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

    /// The numbers of the PTEs after and before `pte` in its list.
    ///
    /// # Safety
    /// As for [`ShadowPage::ptes`].
    unsafe fn neighbours(&self, pte: PtePlace) -> (&AtomicU32, &AtomicU32) {
        // SAFETY: as the caller promises.
        unsafe { self.get(pte.page).ptes() }.neighbours(pte.index)
    }

    /// Puts `pte` into the list at `head`.
    ///
    /// # Safety
    /// The caller holds the lock of the list's frame. It also holds that of the page of `pte`,
    /// which is alive.
    pub(super) unsafe fn push(&self, head: &AtomicU32, pte: PtePlace) {
        let first = head.load(Ordering::Relaxed);
        // SAFETY: its page is locked.
        let (next, previous) = unsafe { self.neighbours(pte) };
        next.store(first, Ordering::Relaxed);
        previous.store(0, Ordering::Relaxed);
        if let Some(first) = PtePlace::from_number(first) {
            // SAFETY: it is in the list, so it leads to the locked frame.
            unsafe { self.neighbours(first) }.1.store(pte.number(), Ordering::Relaxed);
        }
        head.store(pte.number(), Ordering::Relaxed);
    }

    /// Takes `pte` out of the list at `head`.
    ///
    /// # Safety
    /// The caller holds the lock of the list's frame, and `pte` is in the list.
    pub(super) unsafe fn remove(&self, head: &AtomicU32, pte: PtePlace) {
        // SAFETY: it is in the list, so it leads to the locked frame. So are and do its neighbours.
        let neighbours = |pte| unsafe { self.neighbours(pte) };
        let (next, previous) = neighbours(pte);
        let (next, previous) = (next.load(Ordering::Relaxed), previous.load(Ordering::Relaxed));
        match PtePlace::from_number(previous) {
            Some(before) => neighbours(before).0.store(next, Ordering::Relaxed),
            None => {
                debug_assert!(head.load(Ordering::Relaxed) == pte.number(), "an entry is in no list, or another");
                head.store(next, Ordering::Relaxed);
            }
        }
        if let Some(behind) = PtePlace::from_number(next) {
            neighbours(behind).1.store(previous, Ordering::Relaxed);
        }
    }

    /// The PTE after `pte` in its list.
    ///
    /// # Safety
    /// The caller holds the lock of the list's frame, and `pte` is in the list.
    pub(super) unsafe fn behind(&self, pte: PtePlace) -> Option<PtePlace> {
        // SAFETY: it is in the list, so it leads to the locked frame.
        PtePlace::from_number(unsafe { self.neighbours(pte) }.0.load(Ordering::Relaxed))
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        for record in &self.records {
            let record = record.load(Ordering::Relaxed);
            if !record.is_null() {
                // SAFETY: the pointer came from a box, and `&mut self` excludes all other users.
                let record = unsafe { Box::from_raw(record) };
                let ptes = record.ptes.load(Ordering::Relaxed);
                if !ptes.is_null() {
                    // SAFETY: as above.
                    drop(unsafe { Box::from_raw(ptes) });
                }
            }
        }
    }
}

#[cfg(all(test, loom))]
#[path = "page_loom.rs"]
mod loom_tests;
