//! Table pages: from the host's memory to arrays of entries and back, and the few that a vCPU keeps at hand.
//!
//! A table is reached by the pointer that [`Host::table_ptr`] makes of its host-physical address, and read as an array
//! of atomics. Who holds a [`Section`] may look at every table that was linked when the section began, or since: an
//! unlinked table is freed only when all sections that could have seen it are over (see `retire`).

#![expect(unsafe_code, reason = "tables are raw memory of the host, shared with hardware walkers")]

use core::alloc::Layout;
use core::slice;

use super::Tree;
use super::entry::{self, Stamp, State};
use super::retire::Section;
use crate::addr::{Gfn, Hpa, Level, Pfn};
use crate::format::{Entry, Format};
use crate::host::{AllocationWait, Host, TableNode};
use crate::second_stage::zap;
use crate::stats::{Counter, Recorder};
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
        // Two for the links of retired tables; not so many that a size could overflow.
        assert!(F::ROOT_ENTRIES >= 2 && F::ROOT_ENTRIES <= 1 << 20);
        assert!(F::TABLE_ENTRIES >= 2 && F::TABLE_ENTRIES <= 512);
        // `entry` keeps addresses in bits 12 to 51.
        assert!(F::HPA_BITS <= 52);
        assert!(F::ROOT_LEVEL.0 >= 2 && F::ROOT_LEVEL.0 as usize <= TableCache::CAPACITY + 1);
    }
    let size_bytes = nr_entries::<F>(level) * size_of::<AtomicU64>();
    // SAFETY: the size is a power of two, not zero, and far below isize::MAX (all checked above).
    unsafe { Layout::from_size_align_unchecked(size_bytes, size_bytes) }
}

/// Allocates a table whose entries have `level`. Its contents are arbitrary.
fn allocate<H: Host, F: Format>(host: &H, level: Level, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
    let layout = layout::<F>(level);
    let table = host.allocate_table(layout, node, wait)?;
    debug_assert!(
        table.0 % layout.align() as u64 == 0 && table.0 >> F::HPA_BITS == 0,
        "the host allocated a table at {table}, which is not aligned to its size or beyond the format's addresses"
    );
    Some(table)
}

/// Allocates a root, all of whose entries are empty.
pub(crate) fn new_root<H: Host, F: Format>(host: &H) -> Option<Hpa> {
    let root = allocate::<H, F>(host, F::ROOT_LEVEL, TableNode::CallerPolicy, AllocationWait::Allowed)?;
    // SAFETY: just allocated, with so many entries.
    unsafe { build(host, root, F::ROOT_ENTRIES, |_| entry::empty(Stamp::FIRST)) }
    Some(root)
}

/// Allocates a shadow table: of the size of those below the root, all of whose entries are zero.
pub(crate) fn new_shadow_table<H: Host, F: Format>(host: &H, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
    let table = allocate::<H, F>(host, Level::L4K, node, wait)?;
    // SAFETY: just allocated, with so many entries.
    unsafe { build(host, table, F::TABLE_ENTRIES, |_| Entry(0)) }
    Some(table)
}

/// Frees a shadow table that no CPU has seen.
///
/// # Safety
/// It came from [`new_shadow_table`], and nobody reaches it any more.
pub(crate) unsafe fn free_shadow_table<H: Host, F: Format>(host: &H, table: Hpa) {
    // SAFETY: as the caller promises.
    unsafe { free::<H, F>(host, table, Level::L4K) }
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

/// The entries of a table of the tree of `section`, whose entries have `level`.
///
/// # Safety
/// The table is the root, or its address was read inside the section: in an entry of a table that
/// was reached like this, or that is broken or frozen. A table is filled before its address is in
/// such an entry. It is freed only after every section that could have read that (`retire`).
#[inline]
pub(crate) unsafe fn linked_entries<'s, H: Host, F: Format>(
    host: &H,
    _section: &'s Section<'_>,
    table: Hpa,
    level: Level,
) -> &'s [AtomicU64] {
    // SAFETY: as the caller promises, it was filled, and it is there as long as the section.
    unsafe { entries(host, table, nr_entries::<F>(level)) }
}

/// Writes each entry of a table that nobody else can reach yet.
///
/// By atomic stores: a software CPU that is still in the table's former life may read along, before it finds that its
/// walk was flushed. Relaxed: the compare-and-exchange that links the table releases them.
///
/// # Safety
/// The table has `nr_entries` entries and is the caller's alone.
#[inline]
unsafe fn build<H: Host>(host: &H, table: Hpa, nr_entries: usize, mut entry: impl FnMut(usize) -> Entry) {
    let first = host.table_ptr(table).cast::<AtomicU64>();
    for index in 0..nr_entries {
        // SAFETY: inside the table, as the caller promises, and aligned; a store does not look at what was there.
        let cell = unsafe { &*first.add(index) };
        cell.store(entry(index).0, Ordering::Relaxed);
    }
}

/// Frees all tables of a tree, and tells the host of all leaves, as an invalidation of everything
/// would.
///
/// # Safety
/// The tree is not used any more.
pub(crate) unsafe fn free_tree<H: Host, F: Format>(tree: &mut Tree<H, F>) {
    // SAFETY: the tree is borrowed by the caller alone, and its root is a table of it.
    unsafe { free_subtree::<H, F>(tree, tree.root(), F::ROOT_LEVEL, Gfn(0)) }
}

/// Frees a table for the pages from `start` on with all below it, and tells the host of the leaves. No entry is broken: calls
/// that break one are over, and so are what they borrow.
///
/// # Safety
/// The table belongs to `tree`, of which the caller is the only user.
unsafe fn free_subtree<H: Host, F: Format>(tree: &Tree<H, F>, table: Hpa, level: Level, start: Gfn) {
    // SAFETY: the table is linked in a tree of which the caller is the only user, so it stays for this loop.
    let cells = unsafe { entries(&tree.host, table, nr_entries::<F>(level)) };
    for (index, cell) in (0..).zip(cells) {
        let value = Entry(cell.load(Ordering::Relaxed));
        let gfn = Gfn(start.0 + index * level.nr_pages());
        match entry::state::<F>(value, level) {
            // SAFETY: the caller's promise, and linked once only.
            State::Table => unsafe { free_subtree::<H, F>(tree, F::address(value, level), level.down(), gfn) },
            State::Leaf | State::Tracked => zap::report(tree, value, level, gfn.block(level)),
            State::Empty(_) | State::Broken | State::Frozen => {}
        }
    }
    // SAFETY: it was allocated for `level`, and nobody else uses the tree.
    unsafe { free::<H, F>(&tree.host, table, level) }
}

/// What a table is linked for: each has its placement and its counters.
#[derive(Clone, Copy)]
pub(crate) enum TableUse {
    /// On the way to a leaf that a fault or a prefault installs, or to empty entries.
    Fault,
    /// Instead of a huge leaf.
    Split,
}

/// Tables that were allocated ahead, so that linking them needs no allocation. All of them are from one node.
pub(crate) struct TableCache {
    tables: [Hpa; TableCache::CAPACITY],
    len: usize,
    node: TableNode,
}

impl TableCache {
    /// One for each level below the root, in the deepest format (5 levels).
    pub(crate) const CAPACITY: usize = 4;

    pub(crate) fn new() -> TableCache {
        TableCache { tables: [Hpa(0); Self::CAPACITY], len: 0, node: TableNode::CallerPolicy }
    }

    /// Whether there are `count` tables from `node`.
    #[inline]
    pub(crate) fn has(&self, count: usize, node: TableNode) -> bool {
        count == 0 || (self.len >= count && self.node == node)
    }

    /// Fills the cache up to `count` tables from `node`; what it has from another goes back to the host. `Err` if the host
    /// has no more.
    pub(crate) fn top_up<H: Host, F: Format>(
        &mut self,
        host: &H,
        stats: &Recorder,
        count: usize,
        node: TableNode,
        wait: AllocationWait,
    ) -> Result<(), ()> {
        debug_assert!(count <= Self::CAPACITY);
        if self.node != node {
            self.drain::<H, F>(host, stats);
            self.node = node;
        }
        while self.len < count {
            self.tables[self.len] = allocate::<H, F>(host, Level::L4K, node, wait).ok_or(())?;
            stats.count(Counter::TablesAllocated);
            self.len += 1;
        }
        Ok(())
    }

    /// Writes each entry of the `nth` table, and returns the entry that links it. It stays in the cache until
    /// [`TableCache::linked`] says that it was linked.
    #[inline]
    pub(crate) fn prepare<H: Host, F: Format>(
        &mut self,
        host: &H,
        nth: usize,
        entry: impl FnMut(usize) -> Entry,
    ) -> Entry {
        let table = self.tables[..self.len][self.len - 1 - nth];
        // SAFETY: tables in the cache were allocated for this size, and are the cache's alone.
        unsafe { build(host, table, F::TABLE_ENTRIES, entry) }
        F::table(table)
    }

    /// The first `count` prepared tables belong to the tree now, for `table_use`. They map the memory at `pfn`, if any.
    #[inline]
    pub(crate) fn linked<H: Host>(
        &mut self,
        host: &H,
        stats: &Recorder,
        count: usize,
        table_use: TableUse,
        pfn: Option<Pfn>,
    ) {
        if count == 0 {
            return;
        }
        let (tables, remote) = match table_use {
            TableUse::Fault => (Counter::FaultTables, Counter::RemoteFaultTables),
            TableUse::Split => (Counter::SplitTables, Counter::RemoteSplitTables),
        };
        self.len -= count;
        stats.add(tables, count as u64);
        if let Some(pfn) = pfn {
            let node = host.node_of(pfn);
            let is_remote = |table: &&Hpa| host.node_of(table.pfn()) != node;
            stats.add(remote, self.tables[self.len..][..count].iter().filter(is_remote).count() as u64);
        }
    }

    /// Gives all tables back to the host.
    pub(crate) fn drain<H: Host, F: Format>(&mut self, host: &H, stats: &Recorder) {
        let tables = &self.tables[..core::mem::take(&mut self.len)];
        for &table in tables {
            // SAFETY: it came from `top_up`, and was never linked.
            unsafe { free::<H, F>(host, table, Level::L4K) }
        }
        stats.add(Counter::TablesFreed, tables.len() as u64);
    }
}
