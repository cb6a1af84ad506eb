//! Epochs: when an unlinked table, or an unpublished slot set, may be freed.
//!
//! Whoever looks at tables or slots does so inside a [`Section`]. A section announces the era in which it began; taking
//! something away for good (unlink, flush, then [`Epochs::retire_tables`] or [`Epochs::retire_era`]) moves the era on and
//! tags the thing with the era before. A thing may be freed when every section that is open announces a later era than
//! the thing's tag: a section that began after the thing was gone cannot have found it. Nobody waits for anybody: what
//! cannot be freed yet stays on a list for the next [`Vm::reclaim`](crate::Vm::reclaim).
//!
//! The pair that makes it right is a store-load one. A section stores its announcement, then reads pointers. A reclaimer
//! has stored the unlinking, then reads announcements. A full fence stands between the two steps on both sides, so if
//! the reclaimer misses the announcement, the section sees the unlinking. Sections are many and reclaims are few: where
//! the host can make a barrier on all CPUs at once, the reclaimer makes it for both sides, and a section pays nothing.
//!
//! Retired tables need no memory of their own: their entries are empty or frozen, nobody makes anything else of them, and
//! a frozen entry has room for a payload. The first carries the link to the next table of the list, the second the tag.
//!
//! A section is short: no flush, no allocation that waits, no resolve, no yield inside, and no more
//! than [`MAX_SECTION_STEPS`](super::record::MAX_SECTION_STEPS) steps, whatever the host says of
//! yielding. (A change of slots copies the whole set in one, at most
//! [`MAX_SLOTS`](crate::MAX_SLOTS) entries; and how long a `TableReader` is kept open is its user's
//! matter.) What must outlive a section while the host
//! resolves a page (the slot's backing) is protected by a [`HazardPointer`] instead.

#![expect(unsafe_code, reason = "records and retired tables are reached by raw pointers")]

use alloc::boxed::Box;
use core::ptr::{self, NonNull};

use crossbeam_utils::CachePadded;

use super::entry;
use super::frames;
use super::record::IDLE;
pub(crate) use super::record::{CountedSection, FaultSection, LoneSection, OwnedRecord, RecordGuard, SharedRecord};
pub(crate) use super::record::{Exclusive, FaultPin, HazardPointer, Protected, Record, Section};
use crate::addr::{Hpa, Level};
use crate::boxed::try_zeroed;
use crate::error::Error;
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, Ordering, fence_after_rmw, fence_against_remote_barrier, full_fence,
};

/// The end of a list of tables. An address that no table has: the first page of memory may be one.
const NO_TABLE: Hpa = Hpa(0xfff << 52);

/// Which fence stands between an announcement and the reads of its section, and between an unlinking and the reads of
/// the announcements.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fences {
    /// A full fence on both sides.
    Both,
    /// None in the section, and [`Host::barrier_on_all_cpus`] on the other side.
    Remote,
}

/// The list of records and the list of retired tables of one VM.
pub(crate) struct Epochs {
    fences: Fences,
    /// Whether records have room for the times of the VM's lock.
    has_lock_times: bool,
    /// Starts above [`IDLE`]. Written when something is retired, read at the beginning of each section.
    era: CachePadded<AtomicU64>,
    records: AtomicPtr<SharedRecord>,
    /// Away from what sections read.
    retired_tables: CachePadded<RetiredTables>,
}

struct RetiredTables {
    /// Head of the list: a host-physical address, or [`NO_TABLE`].
    first: AtomicU64,
    /// Tables that were retired and not freed yet. Only a count: it bounds, and does not protect.
    nr_put_off: AtomicU64,
    /// Those that were freed. A count.
    nr_freed: AtomicU64,
}

impl Epochs {
    pub(crate) fn new(fences: Fences) -> Epochs {
        Epochs {
            fences,
            has_lock_times: false,
            era: CachePadded::new(AtomicU64::new(IDLE + 1)),
            records: AtomicPtr::new(ptr::null_mut()),
            retired_tables: CachePadded::new(RetiredTables {
                first: AtomicU64::new(NO_TABLE.0),
                nr_put_off: AtomicU64::new(0),
                nr_freed: AtomicU64::new(0),
            }),
        }
    }

    /// The same, of a VM that has a lock if `has_lock`.
    pub(crate) fn with_lock_times(mut self, has_lock: bool) -> Epochs {
        self.has_lock_times = has_lock;
        self
    }

    /// Opens a section. Others of the record may be open.
    #[inline]
    pub(crate) fn enter<'a>(&self, record: &'a Record) -> CountedSection<'a> {
        if record.is_outside() {
            self.announce(&record.announced);
        }
        // SAFETY: it was announced here, or when the first of those that are open began.
        unsafe { CountedSection::new(record) }
    }

    /// Opens the section of a fault. Beside it sections that are counted may be open.
    #[inline]
    pub(crate) fn enter_fault<'p>(&self, pin: FaultPin<'p>) -> FaultSection<'p> {
        self.announce(&pin.record().announced_by_fault);
        // SAFETY: it was announced just now.
        unsafe { FaultSection::new(pin) }
    }

    #[inline]
    fn announce(&self, announced: &AtomicU64) {
        // Acquire: if this reads an era that a retirement began, it sees what was unlinked before.
        let era = self.era.load(Ordering::Acquire);
        // The announcement comes before every read of the section (pairs with `oldest_open`).
        match self.fences {
            Fences::Both => {
                announced.swap(era, Ordering::SeqCst);
                fence_after_rmw();
            }
            // The barrier that `oldest_open` makes on this CPU falls somewhere between two instructions here: before the
            // store, and then the reads come after it too and see what was unlinked; or after it, and then the store is
            // seen. Only the compiler has to be held back.
            Fences::Remote => {
                announced.store(era, Ordering::Relaxed);
                fence_against_remote_barrier();
            }
        }
    }

    /// A record for one call: one that is free, or a new one.
    pub(crate) fn borrow_record(&self) -> Result<RecordGuard<'_>, Error> {
        let free = self.records().find(|record| {
            // Relaxed look first: no need to take the line for a record that is in use.
            let in_use = &record.listed.in_use;
            !in_use.load(Ordering::Relaxed)
                && in_use.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        });
        let record = match free {
            Some(record) => record,
            None => self.add_record()?,
        };
        // SAFETY: this thread has set `in_use`, and the guard resets it.
        let record = unsafe { RecordGuard::new(record) };
        if self.has_lock_times {
            record.stats.make_lock_times()?;
        }
        Ok(record)
    }

    /// A new record, in use. Made in place: it is large for a stack.
    #[cold]
    fn add_record(&self) -> Result<&SharedRecord, Error> {
        let mut new = try_zeroed::<SharedRecord>()?;
        new.listed.in_use = AtomicBool::new(true);
        let mut head = self.records.load(Ordering::Acquire);
        loop {
            new.listed.next = head;
            let pointer: *mut SharedRecord = Box::into_raw(new);
            // Release: who walks the list sees the record's contents.
            match self.records.compare_exchange(head, pointer, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: the record was just made; records are freed only with the `Epochs`, which `&self` keeps.
                Ok(_) => return Ok(unsafe { &*pointer }),
                Err(found) => {
                    head = found;
                    // SAFETY: the exchange failed, so nobody else has seen the pointer.
                    new = unsafe { Box::from_raw(pointer) };
                }
            }
        }
    }

    /// Opens a section by a record of its own.
    pub(crate) fn enter_alone(&self) -> Result<LoneSection<'_>, Error> {
        Ok(LoneSection::new(self, self.borrow_record()?))
    }

    /// A record for a vCPU, to be released by [`OwnedRecord::release`].
    pub(crate) fn take_record(&self) -> Result<OwnedRecord, Error> {
        let record = self.borrow_record()?;
        record.stats.make_fault_times()?;
        Ok(record.keep())
    }

    /// All records, in use or not.
    pub(crate) fn records(&self) -> impl Iterator<Item = &SharedRecord> {
        let mut next = self.records.load(Ordering::Acquire).cast_const();
        core::iter::from_fn(move || {
            // SAFETY: the pointer is null or a record of the list; records are freed only with the `Epochs`.
            let record = unsafe { next.as_ref() }?;
            next = record.listed.next;
            Some(record)
        })
    }

    /// Ends the era in which things were unlinked: they may be freed once [`Epochs::oldest_open`] is above the value
    /// returned.
    pub(crate) fn retire_era(&self) -> u64 {
        // AcqRel: release for the sections that begin in the new era and must see the unlinking; acquire because eras
        // are handed on from one retirement to the next.
        self.era.fetch_add(1, Ordering::AcqRel)
    }

    /// The lowest era that an open section announces; `u64::MAX` if none is open. Things taken off their lists before
    /// this call and tagged below the answer can be freed. The barrier is the host's.
    pub(crate) fn oldest_open(&self, barrier_on_all_cpus: impl FnOnce()) -> u64 {
        // Pairs with `enter`: the unlinking of what is to be freed comes before the reads of the announcements.
        full_fence();
        if self.fences == Fences::Remote {
            barrier_on_all_cpus();
        }
        let mut oldest = u64::MAX;
        for record in self.records() {
            for announced in [&record.announced, &record.announced_by_fault] {
                // Acquire: what a section did that is seen to be over comes before the free.
                let announced = announced.load(Ordering::Acquire);
                if announced != IDLE {
                    oldest = oldest.min(announced);
                }
            }
        }
        oldest
    }

    /// Whether somebody resolves in the backing of `slot`. To be asked after [`Epochs::oldest_open`] said that no
    /// section can find the slot any more.
    pub(crate) fn is_resolving<T>(&self, slot: NonNull<T>) -> bool {
        self.records().any(|record| record.resolving.load(Ordering::Acquire) == slot.as_ptr().cast())
    }

    /// Takes over a chain of unlinked, emptied, flushed tables.
    pub(crate) fn retire_tables<H: Host>(&self, host: &H, chain: TableChain) {
        let Some((first, last)) = chain.ends else { return };
        // Before the tables are on the list, so that it never counts one that is not here yet as freed.
        self.retired_tables.nr_put_off.fetch_add(chain.len, Ordering::Relaxed);
        let tag = entry::frozen_number(self.retire_era());
        let mut table = first;
        loop {
            // SAFETY: the table is of the chain, which is this thread's until it is on the list.
            let cells = unsafe { chain_cells(host, table) };
            // Release, here and where a link is stored: a walk that meets a frozen entry starts over at the root, and must
            // see the unlinking there, whichever payload it has read.
            cells[1].store(tag.0, Ordering::Release);
            if table == last {
                break;
            }
            table = entry::link_of(Entry(cells[0].load(Ordering::Relaxed)));
        }
        self.push_tables(host, chain);
    }

    /// Frees the retired tables that no open section can reach. Returns how many.
    pub(crate) fn reclaim_tables<H: Host, F: Format>(&self, host: &H) -> u64 {
        // A look first: mostly there is nothing, and then the line stays where it is.
        if self.retired_tables.first.load(Ordering::Relaxed) == NO_TABLE.0 {
            return 0;
        }
        // Acquire: sees the links and tags of the list.
        let mut next = Hpa(self.retired_tables.first.swap(NO_TABLE.0, Ordering::Acquire));
        let oldest = self.oldest_open(|| host.barrier_on_all_cpus());
        let mut freed = 0;
        let mut kept = TableChain::new();
        while next != NO_TABLE {
            let table = next;
            // SAFETY: the list has tables of chains alone. It is this thread's, which frees below.
            let cells = unsafe { chain_cells(host, table) };
            next = entry::link_of(Entry(cells[0].load(Ordering::Relaxed)));
            if entry::number_of(Entry(cells[1].load(Ordering::Relaxed))) < oldest {
                // SAFETY: the table was unlinked and flushed before it was retired, all sections that could have seen
                // it are over, and the list it was on is this thread's alone. Roots are never retired.
                unsafe { frames::free::<H, F>(host, table, Level::L4K) }
                freed += 1;
            } else {
                // SAFETY: it came from a chain, and is off the list now.
                unsafe { kept.push(host, table) }
            }
        }
        self.push_tables(host, kept);
        self.retired_tables.nr_put_off.fetch_sub(freed, Ordering::Relaxed);
        self.retired_tables.nr_freed.fetch_add(freed, Ordering::Relaxed);
        freed
    }

    /// Tables that were retired and freed.
    pub(crate) fn nr_freed_tables(&self) -> u64 {
        self.retired_tables.nr_freed.load(Ordering::Relaxed)
    }

    /// Tables that were retired and not freed yet.
    pub(crate) fn nr_put_off_tables(&self) -> u64 {
        self.retired_tables.nr_put_off.load(Ordering::Relaxed)
    }

    /// Puts tables whose tags are set on the list.
    fn push_tables<H: Host>(&self, host: &H, chain: TableChain) {
        let Some((first, last)) = chain.ends else { return };
        let mut head = self.retired_tables.first.load(Ordering::Relaxed);
        loop {
            // SAFETY: the table is of the chain, which is this thread's until the exchange.
            let cells = unsafe { chain_cells(host, last) };
            cells[0].store(entry::frozen_link(Hpa(head)).0, Ordering::Release);
            match self.retired_tables.first.compare_exchange(head, first.0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }

    /// Frees all retired tables, at the end of the VM.
    pub(crate) fn free_all_tables<H: Host, F: Format>(&mut self, host: &H) {
        // Whatever is announced: with `&mut self` no section is open, unless one was leaked.
        for record in self.records() {
            record.announced.store(IDLE, Ordering::Relaxed);
            record.announced_by_fault.store(IDLE, Ordering::Relaxed);
        }
        self.reclaim_tables::<H, F>(host);
    }
}

impl Drop for Epochs {
    fn drop(&mut self) {
        let mut next = self.records.load(Ordering::Relaxed).cast_const();
        while !next.is_null() {
            // SAFETY: every record of the list came from a box, and with `&mut self` nobody uses one any more: guards
            // borrow the `Epochs`, and vCPUs keep the VM that holds it alive.
            let record = unsafe { Box::from_raw(next.cast_mut()) };
            next = record.listed.next;
        }
    }
}

/// The first entries of a table of a chain, which hold the links of the lists here.
///
/// # Safety
/// The table was pushed to a chain, and is not freed for `'a`.
unsafe fn chain_cells<'a, H: Host>(host: &H, table: Hpa) -> &'a [AtomicU64] {
    // SAFETY: as the caller promises, and every table has at least two entries (`frames`).
    unsafe { frames::entries(host, table, 2) }
}

/// Tables that were unlinked and emptied, linked through their first entries. Belongs to one thread.
pub(crate) struct TableChain {
    ends: Option<(Hpa, Hpa)>,
    len: u64,
}

impl TableChain {
    pub(crate) fn new() -> TableChain {
        TableChain { ends: None, len: 0 }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Adds a table.
    ///
    /// # Safety
    /// - The table is one of the tree whose epochs the chain is retired to, and not its root.
    /// - No entry points to it any more, or names it. If it was linked ever, its own entries are
    ///   all empty or frozen, and no table is hung below them any more.
    /// - It is in no chain yet, and no other thread puts it into one.
    /// - The CPUs are flushed before the chain is retired.
    pub(crate) unsafe fn push<H: Host>(&mut self, host: &H, table: Hpa) {
        // SAFETY: it is in the chain from now on, and is freed only once that is retired.
        let cells = unsafe { chain_cells(host, table) };
        self.len += 1;
        self.ends = Some(match self.ends {
            None => (table, table),
            Some((first, last)) => {
                cells[0].store(entry::frozen_link(first).0, Ordering::Release);
                (table, last)
            }
        });
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "retire_tests.rs"]
mod tests;

#[cfg(all(test, loom))]
#[path = "retire_loom.rs"]
mod loom_tests;
