//! Table pages: from the host's memory to arrays of entries and back, and the few that a vCPU keeps at hand.
//!
//! A table is reached by the pointer that [`Host::table_ptr`] makes of its host-physical address, and read as an array
//! of atomics. Who holds a [`Section`] may look at every table that was linked when the section began, or since: an
//! unlinked table is freed only when all sections that could have seen it are over (see `retire`).

#![expect(unsafe_code, reason = "tables are raw memory of the host, shared with hardware walkers")]

use core::alloc::Layout;
use core::slice;

use super::entry::{self, State};
use super::retire::Section;
use crate::addr::{Hpa, Level};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::sync::{AtomicU64, Ordering};

/// Entries of the table whose entries have `level`.
#[inline]
pub(crate) fn nr_entries<F: Format>(level: Level) -> usize {
    if level == F::ROOT_LEVEL { F::ROOT_ENTRIES } else { F::TABLE_ENTRIES }
}

/// Size and alignment of the table whose entries have `level`.
fn layout<F: Format>(level: Level) -> Layout {
    const {
        assert!(F::ROOT_ENTRIES.is_power_of_two() && F::TABLE_ENTRIES.is_power_of_two());
        assert!(F::ROOT_ENTRIES >= 2 && F::TABLE_ENTRIES >= 2);
    }
    let size_bytes = nr_entries::<F>(level) * size_of::<AtomicU64>();
    // SAFETY: the size is a power of two (checked above), not zero, and far below isize::MAX.
    unsafe { Layout::from_size_align_unchecked(size_bytes, size_bytes) }
}

/// Allocates a table whose entries have `level`. Its contents are arbitrary.
pub(crate) fn allocate<H: Host, F: Format>(host: &H, level: Level) -> Option<Hpa> {
    host.allocate_table(layout::<F>(level))
}

/// Frees a table whose entries have `level`.
///
/// # Safety
/// It came from [`allocate`] with the same `level` class (root or not), and nobody reaches it any more.
pub(crate) unsafe fn free<H: Host, F: Format>(host: &H, table: Hpa, level: Level) {
    // SAFETY: as the caller promises.
    unsafe { host.free_table(table, layout::<F>(level)) }
}

/// The entries of a table as long as nobody can free it.
///
/// # Safety
/// `table` is allocated, has at least `nr_entries` entries that were filled once, and stays so for `'a`.
#[inline]
pub(crate) unsafe fn entries<'a, H: Host>(host: &H, table: Hpa, nr_entries: usize) -> &'a [AtomicU64] {
    let first = host.table_ptr(table).cast::<AtomicU64>();
    // SAFETY: the host promises a pointer to the table's memory, aligned to its size; the memory was filled before
    // (by `fill` or `build`); it is only ever accessed through atomics; the caller promises the lifetime.
    unsafe { slice::from_raw_parts(first, nr_entries) }
}

/// The entries of a table that was read in a linked entry inside `section`.
#[inline]
pub(crate) fn linked_entries<'s, H: Host, F: Format>(
    host: &H,
    _section: &'s Section<'_>,
    table: Hpa,
    level: Level,
) -> &'s [AtomicU64] {
    // SAFETY: the caller read `table` in an entry (or it is the root) inside the section. A linked table is filled
    // before it is linked, and freed only after every section that could have seen it is over (`retire`).
    unsafe { entries(host, table, nr_entries::<F>(level)) }
}

/// Fills a table that nobody else can reach yet.
pub(crate) fn fill<H: Host>(host: &H, table: Hpa, nr_entries: usize, value: Entry) {
    build(host, table, nr_entries, |_| value);
}

/// Writes each entry of a table that nobody else can reach yet.
///
/// By atomic stores: a software CPU that is still in the table's former life may read along, before it finds that its
/// walk was flushed. Relaxed: the compare-and-exchange that links the table releases them.
#[inline]
pub(crate) fn build<H: Host>(host: &H, table: Hpa, nr_entries: usize, entry: impl Fn(usize) -> Entry) {
    let first = host.table_ptr(table).cast::<AtomicU64>();
    for index in 0..nr_entries {
        // SAFETY: the table has `nr_entries` entries (callers pass the count that it was allocated with), aligned; a
        // store does not look at what was there.
        let cell = unsafe { &*first.add(index) };
        cell.store(entry(index).0, Ordering::Relaxed);
    }
}

/// Writes one entry of a table that was filled and that nobody else can reach yet.
pub(crate) fn set<H: Host>(host: &H, table: Hpa, index: usize, value: Entry) {
    // SAFETY: the table was filled up to beyond `index` and belongs to the caller alone.
    let cells = unsafe { entries(host, table, index + 1) };
    cells[index].store(value.0, Ordering::Relaxed);
}

/// Reads one entry of a table that was filled and that nobody else can reach yet.
pub(crate) fn get<H: Host>(host: &H, table: Hpa, index: usize) -> Entry {
    // SAFETY: as for `set`.
    let cells = unsafe { entries(host, table, index + 1) };
    Entry(cells[index].load(Ordering::Relaxed))
}

/// Frees a table with all below it. Only for a tree that nobody uses any more.
pub(crate) fn free_subtree<H: Host, F: Format>(host: &H, table: Hpa, level: Level) {
    if level > Level::L4K {
        // SAFETY: the table is linked in a tree of which the caller is the only user, so it stays for this loop.
        for cell in unsafe { entries(host, table, nr_entries::<F>(level)) } {
            let value = Entry(cell.load(Ordering::Relaxed));
            if entry::state::<F>(value, level) == State::Table {
                free_subtree::<H, F>(host, F::address(value, level), level.down());
            }
        }
    }
    // SAFETY: it was allocated for `level`, and nobody else uses the tree.
    unsafe { free::<H, F>(host, table, level) }
}

/// Tables that a vCPU has allocated ahead, so that linking them needs no allocation.
pub(crate) struct TableCache {
    tables: [Hpa; TableCache::CAPACITY],
    len: usize,
}

impl TableCache {
    /// One for each level below the root, in the deepest format (5 levels).
    pub(crate) const CAPACITY: usize = 4;

    pub(crate) fn new() -> TableCache {
        TableCache { tables: [Hpa(0); Self::CAPACITY], len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Fills the cache up to `count` tables. Returns how many were allocated; `Err` with that number if the host had
    /// no more.
    pub(crate) fn top_up<H: Host, F: Format>(&mut self, host: &H, count: usize) -> Result<u64, u64> {
        debug_assert!(count <= Self::CAPACITY);
        let mut allocated = 0;
        while self.len < count {
            let Some(table) = allocate::<H, F>(host, Level::L4K) else { return Err(allocated) };
            self.put(table);
            allocated += 1;
        }
        Ok(allocated)
    }

    pub(crate) fn take(&mut self) -> Option<Hpa> {
        self.len = self.len.checked_sub(1)?;
        Some(self.tables[self.len])
    }

    /// Puts back a table that was taken and not linked.
    pub(crate) fn put(&mut self, table: Hpa) {
        self.tables[self.len] = table;
        self.len += 1;
    }

    /// Gives all tables back to the host. Returns how many.
    pub(crate) fn drain<H: Host, F: Format>(&mut self, host: &H) -> u64 {
        let mut freed = 0;
        while let Some(table) = self.take() {
            // SAFETY: it came from `top_up` and was never linked, or was taken back before anybody could see it.
            unsafe { free::<H, F>(host, table, Level::L4K) }
            freed += 1;
        }
        freed
    }
}
