//! Page-table pages: from memory of the host to arrays of PTEs and back, and the few that a vCPU
//! keeps ready.
//!
//! A page-table page is an array of atomics, reached by the pointer that [`Host::table_ptr`] makes
//! of its host-physical address. A thread with a [`Guard`] may read every page-table page that
//! was linked when the guard began, or since: an unlinked one is freed only when all guards that
//! could have reached it are over (see `retire`).

#![expect(unsafe_code, reason = "tables are raw memory of the host, shared with hardware walkers")]

use core::alloc::Layout;
use core::slice;

use super::Tree;
use super::encoding::Encoding;
use super::invalidation_seq::InvalidationSeq;
use super::pte::{Breaking, Frozen, Pte, State};
use super::pte_ref::{Changed, Cleaner, PteRef, Ptes};
use super::retire::{EpochsId, Freed, Guard};
use crate::addr::{Gfn, GfnRange, Hpa, Level, Pfn};
use crate::format::Format;
use crate::host::{AllocationWait, Host, TableNode, ZappedLeaf};
use crate::stats::{Counter, Recorder};
#[cfg(shuttle)]
use crate::sync::record;
use crate::sync::{AtomicU64, Ordering};

/// Size and alignment of a page-table page of `nr_ptes` PTEs: of [`Format::TABLE_ENTRIES`], or of a
/// root.
fn layout<F: Format>(nr_ptes: usize) -> Layout {
    const {
        assert!(F::TABLE_ENTRIES.is_power_of_two());
        // Two for the links of retired page-table pages; not so many that a size could overflow.
        assert!(F::MAX_ROOT_ENTRIES >= 2 && F::MAX_ROOT_ENTRIES <= 1 << 20);
        assert!(F::TABLE_ENTRIES >= 2 && F::TABLE_ENTRIES <= 512);
        // `pte` keeps addresses in bits 12 to 51.
        assert!(F::HPA_BITS <= 52);
        let mut nth = 0;
        while nth < F::GEOMETRIES.len() {
            let Level(levels) = F::GEOMETRIES[nth].root_level;
            assert!(levels >= 2 && levels as usize <= TableCache::CAPACITY + 1);
            nth += 1;
        }
    }
    let size_bytes = nr_ptes * size_of::<AtomicU64>();
    // SAFETY: the size is a power of two, not zero, and far below isize::MAX: checked above, and
    // promised for roots by the format.
    unsafe { Layout::from_size_align_unchecked(size_bytes, size_bytes) }
}

/// Allocates a page-table page of `nr_ptes` PTEs, and returns its address as hardware sees it. Its
/// contents are arbitrary.
fn allocate<H: Host, F: Format>(
    host: &H,
    encoding: &Encoding<F>,
    nr_ptes: usize,
    node: TableNode,
    wait: AllocationWait,
) -> Option<Hpa> {
    let layout = layout::<F>(nr_ptes);
    let table = host.allocate_table(layout, node, wait)?;
    debug_assert!(
        table.0 % layout.align() as u64 == 0 && table.0 >> F::HPA_BITS == 0,
        "the host allocated a table at {table}, which is not aligned to its size or beyond the format's addresses"
    );
    Some(encoding.with_address_bits(table))
}

/// Allocates a root on `node`, all of whose PTEs are empty.
pub(crate) fn new_root<H: Host, F: Format>(host: &H, encoding: &Encoding<F>, node: TableNode) -> Option<Hpa> {
    let nr_ptes = encoding.nr_root_ptes();
    let root = allocate(host, encoding, nr_ptes, node, AllocationWait::Allowed)?;
    // SAFETY: just allocated, with this many PTEs.
    unsafe { build::<H, F>(host, root, nr_ptes, |_| Pte::<F>::empty(InvalidationSeq::FIRST).bits()) }
    Some(root)
}

/// Allocates a shadow page-table page: of the size of those below the root, all PTEs zero.
pub(crate) fn new_shadow_table<H: Host, F: Format>(
    tree: &Tree<H, F>,
    node: TableNode,
    wait: AllocationWait,
) -> Option<Hpa> {
    let table = allocate(&tree.host, &tree.encoding, F::TABLE_ENTRIES, node, wait)?;
    // SAFETY: just allocated, with this many PTEs.
    unsafe { build::<H, F>(&tree.host, table, F::TABLE_ENTRIES, |_| 0) }
    Some(table)
}

/// Frees a shadow page-table page that no CPU has walked.
///
/// # Safety
/// It came from [`new_shadow_table`], and no thread or CPU reaches it any more.
pub(crate) unsafe fn free_shadow_table<H: Host, F: Format>(tree: &Tree<H, F>, table: Hpa) {
    // SAFETY: as the caller promises.
    unsafe { free(&tree.host, &tree.encoding, table) }
}

/// Frees a page-table page that is no root.
///
/// # Safety
/// It came from [`allocate`] with [`Format::TABLE_ENTRIES`], and no thread or CPU reaches it any
/// more.
pub(crate) unsafe fn free<H: Host, F: Format>(host: &H, encoding: &Encoding<F>, table: Hpa) {
    // SAFETY: as the caller promises.
    unsafe { host.free_table(encoding.without_address_bits(table), layout::<F>(F::TABLE_ENTRIES)) }
}

/// The PTEs of a page-table page, as long as no thread can free it.
///
/// # Safety
/// `table` is allocated, has at least `nr_ptes` PTEs that were stored once, and stays so for
/// `'a`.
#[inline]
pub(crate) unsafe fn entries<'a, H: Host>(host: &H, table: Hpa, nr_ptes: usize) -> &'a [AtomicU64] {
    let first = host.table_ptr(table).cast::<AtomicU64>();
    // SAFETY: the host promises a pointer to the page's memory, aligned to its size; the memory was
    // filled before (by `build`); it is only ever accessed through atomics; the caller promises the
    // lifetime.
    unsafe { slice::from_raw_parts(first, nr_ptes) }
}

/// The PTEs of the root of `tree`.
#[inline]
pub(crate) fn root_ptes<'s, H: Host, F: Format>(tree: &'s Tree<H, F>, guard: &'s Guard<'_>) -> Ptes<'s, F> {
    guard.check_epochs(tree.epochs.id());
    let (encoding, level) = (&tree.encoding, tree.root_level());
    // SAFETY: it was filled when the tree was made, with so many PTEs, and stays as long as that.
    let cells = unsafe { entries(&tree.host, tree.root(), encoding.nr_root_ptes()) };
    // SAFETY: they are PTEs of the root, of this level.
    unsafe { Ptes::new(cells, level, guard.lock_check(), tree.cleaner()) }
}

/// The PTEs of a page-table page of the guard's tree, which is not the root; they have `level`.
///
/// # Safety
/// The page's address was read inside the guard: in a PTE of the root or of a page-table page that
/// was reached like this, or that is broken or frozen. A page is filled before its address is in
/// such a PTE. It is freed only after every guard that could have read that (`retire`).
#[inline]
pub(crate) unsafe fn linked_ptes<'s, H: Host, F: Format>(
    host: &'s H,
    guard: &'s Guard<'_>,
    table: Hpa,
    level: Level,
) -> Ptes<'s, F> {
    // SAFETY: as the caller promises, it was filled, and it is there as long as the guard.
    let cells = unsafe { entries(host, table, F::TABLE_ENTRIES) };
    // SAFETY: they are PTEs of this level, as the caller promises.
    unsafe { Ptes::new(cells, level, guard.lock_check(), Cleaner::new(host)) }
}

/// Stores each PTE of a page-table page that no other thread can reach yet, and cleans the page:
/// before a walker can.
///
/// By atomic stores: a software CPU that still walks the page as it was before it was freed may
/// read along, until it finds that its walk was flushed. Relaxed: the compare-and-exchange that
/// links the page releases them.
///
/// # Safety
/// The page has `nr_ptes` PTEs and is the caller's alone.
#[inline]
unsafe fn build<H: Host, F: Format>(host: &H, table: Hpa, nr_ptes: usize, mut bits: impl FnMut(usize) -> u64) {
    let first = host.table_ptr(table).cast::<AtomicU64>();
    for index in 0..nr_ptes {
        // SAFETY: inside the page, as the caller promises, and aligned; a store does not read what
        // was there.
        let cell = unsafe { &*first.add(index) };
        cell.store(bits(index), Ordering::Relaxed);
    }
    if F::HAS_INCOHERENT_WALKERS {
        // SAFETY: the page has so many PTEs, which were stored, and is the caller's for this call.
        Cleaner::<F>::new(host).clean(unsafe { entries(host, table, nr_ptes) });
    }
}

/// A page-table page that is being filled, from its first PTE on. What is left when it is dropped is
/// filled with the PTE that it was made with.
pub(crate) struct NewPtes<'t, F: Format> {
    left: &'t [AtomicU64],
    beside: Pte<F>,
}

impl<F: Format> NewPtes<'_, F> {
    /// Stores `pte` in the next PTE, if there is one.
    #[inline(always)]
    pub(crate) fn push(&mut self, pte: Pte<F>) {
        if let Some((cell, left)) = self.left.split_first() {
            // Relaxed: as in `build`.
            cell.store(pte.bits(), Ordering::Relaxed);
            self.left = left;
        }
    }

    /// Stores leaves of `level` whose frames follow each other, from `first` on, in the next
    /// `nr_ptes` PTEs.
    #[inline(always)]
    pub(crate) fn push_run(&mut self, first: Pte<F>, level: Level, nr_ptes: usize) {
        let (run, left) = self.left.split_at(nr_ptes.min(self.left.len()));
        let mut pte = first;
        for cell in run {
            // Relaxed: as in `build`.
            cell.store(pte.bits(), Ordering::Relaxed);
            pte = pte.behind(1, level);
        }
        self.left = left;
    }

    /// Leaves the next `nr_ptes` PTEs to what they were made with.
    #[inline(always)]
    pub(crate) fn skip(&mut self, nr_ptes: usize) {
        let (skipped, left) = self.left.split_at(nr_ptes.min(self.left.len()));
        for cell in skipped {
            // Relaxed: as in `build`.
            cell.store(self.beside.bits(), Ordering::Relaxed);
        }
        self.left = left;
    }
}

impl<F: Format> Drop for NewPtes<'_, F> {
    #[inline(always)]
    fn drop(&mut self) {
        self.skip(self.left.len());
    }
}

/// Frees the page-table pages of leaves of 4 KiB that the frozen PTEs of `table` name, as many as
/// `left` says, and counts leaves in `table` itself. Returns whether that is all. The page itself
/// is the caller's to free then.
///
/// # Safety
/// `table` is of a chain ([`TableChain::push_with_leaves`](super::retire::TableChain)) that was
/// retired. No guard can reach it, and it is the caller's alone.
pub(super) unsafe fn free_leaves<H: Host, F: Format>(
    host: &H,
    encoding: &Encoding<F>,
    table: Hpa,
    left: &mut u64,
    freed: &mut Freed,
) -> bool {
    if *left == 0 {
        return false;
    }
    // SAFETY: it was filled when it was linked, and is not freed yet.
    let cells = unsafe { entries(host, table, F::TABLE_ENTRIES) };
    // The first two carry the link and the tag.
    for cell in &cells[2..] {
        let value = Pte::<F>::from_bits(cell.load(Ordering::Relaxed));
        if !value.is_frozen() {
            freed.nr_leaves += u64::from(value.maps_a_page());
            continue;
        }
        let Frozen::Table(below) = value.before_freezing(Level::L2M) else { continue };
        if *left == 0 {
            return false;
        }
        // SAFETY: it was filled when it was linked. The PTE alone names it.
        let leaves = unsafe { entries(host, below, F::TABLE_ENTRIES) };
        let maps_a_page = |cell: &AtomicU64| Pte::<F>::from_bits(cell.load(Ordering::Relaxed)).maps_a_page();
        freed.nr_leaves += leaves.iter().map(|cell| u64::from(maps_a_page(cell))).sum::<u64>();
        // SAFETY: only by way of `table` could a guard have reached it.
        unsafe { free(host, encoding, below) }
        // A later call goes on behind it.
        cell.store(Pte::<F>::FROZEN.bits(), Ordering::Relaxed);
        freed.nr_tables += 1;
        *left -= 1;
    }
    *left = left.saturating_sub(1);
    true
}

/// Frees all page-table pages of a tree, and notifies the host of all leaves that it needs, as an
/// invalidation of everything would.
///
/// # Safety
/// The tree is not used any more.
pub(crate) unsafe fn free_tree<H: Host, F: Format>(tree: &mut Tree<H, F>) {
    let (root, nr_ptes) = (tree.root(), tree.encoding.nr_root_ptes());
    // SAFETY: the tree is borrowed by the caller alone, and its root is a page-table page of it.
    unsafe { free_below::<H, F>(tree, root, nr_ptes, tree.root_level(), Gfn(0)) }
    // SAFETY: it was allocated with so many PTEs, and no other thread uses the tree.
    unsafe { tree.host.free_table(tree.encoding.without_address_bits(root), layout::<F>(nr_ptes)) }
}

/// Frees all page-table pages below that at `table`, of `nr_ptes` PTEs of `level` for the frames
/// from `start` on, and notifies the host of the leaves that it needs. No PTE is broken: calls that
/// break one are over, and so are what they borrow.
///
/// # Safety
/// The page belongs to `tree`, of which the caller is the only user.
unsafe fn free_below<H: Host, F: Format>(tree: &Tree<H, F>, table: Hpa, nr_ptes: usize, level: Level, start: Gfn) {
    let needs_each_leaf = tree.needs_each_leaf();
    // SAFETY: the page is linked in a tree of which the caller is the only user, so it stays for
    // this loop.
    let cells = unsafe { entries(&tree.host, table, nr_ptes) };
    for (index, cell) in (0..).zip(cells) {
        let value = Pte::<F>::from_bits(cell.load(Ordering::Relaxed));
        let gfn = Gfn(start.0 + index * level.nr_pages());
        match value.state(level) {
            State::Table => {
                let below = value.table_below();
                // Page-table pages of the lowest level name no others.
                if level > Level::L2M || needs_each_leaf {
                    // SAFETY: as the caller promises, and it is linked only once.
                    unsafe { free_below::<H, F>(tree, below, F::TABLE_ENTRIES, level.down(), gfn) }
                }
                // SAFETY: it is no root, and no other thread uses the tree.
                unsafe { free(&tree.host, &tree.encoding, below) }
            }
            State::Leaf if value.is_pinned() => {
                tree.host.release_mapped(gfn.block(level), tree.encoding.frame(value, level));
            }
            State::Leaf | State::Tracked => report_zapped(tree, value, level, gfn.block(level)),
            State::Empty(_) | State::Broken | State::Frozen => {}
        }
    }
}

/// Notifies the host of what the guest did through `leaf` of `level`, which maps `range` and is
/// about to go.
#[inline]
pub(crate) fn report_zapped<H: Host, F: Format>(tree: &Tree<H, F>, leaf: Pte<F>, level: Level, range: GfnRange) {
    tree.host.leaf_zapped(ZappedLeaf {
        range,
        pfn: tree.encoding.frame(leaf, level),
        accessed: leaf.is_accessed(),
        dirty: leaf.is_dirty(),
    });
}

/// What page-table pages are linked for: each use has its placement and its counters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableUse {
    /// On the way to a leaf that a fault or a prefault installs, or to empty PTEs.
    Fault,
    /// Instead of a huge leaf.
    Split,
    /// As [`Split`](Self::Split), with break before make. The PTE is broken, and names the
    /// page-table page.
    Break,
}

/// Page-table pages that were allocated ahead, so that linking them needs no allocation. All of
/// them are from one node.
pub(crate) struct TableCache {
    tables: [Hpa; TableCache::CAPACITY],
    len: usize,
    node: TableNode,
    /// Those of the tree for which the page-table pages were allocated, if there are any.
    epochs: Option<EpochsId>,
}

impl TableCache {
    /// One for each level below the root, in the deepest format (5 levels).
    pub(crate) const CAPACITY: usize = 4;

    pub(crate) fn new() -> TableCache {
        TableCache { tables: [Hpa(0); Self::CAPACITY], len: 0, node: TableNode::CallerPolicy, epochs: None }
    }

    /// Panics if there are page-table pages of another tree: its host would not get them back.
    fn check_tree<H: Host, F: Format>(&self, tree: &Tree<H, F>) {
        if let Some(epochs) = self.epochs {
            epochs.check(tree.epochs.id());
        }
    }

    /// Whether there are `count` page-table pages from `node`.
    #[inline]
    pub(crate) fn has(&self, count: usize, node: TableNode) -> bool {
        count == 0 || (self.len >= count && self.node == node)
    }

    /// Fills the cache up to `count` page-table pages from `node`, and frees those from another
    /// node. `Err` if the host has no more.
    pub(crate) fn top_up<H: Host, F: Format>(
        &mut self,
        tree: &Tree<H, F>,
        stats: &Recorder,
        count: usize,
        node: TableNode,
        wait: AllocationWait,
    ) -> Result<(), ()> {
        debug_assert!(count <= Self::CAPACITY);
        self.check_tree(tree);
        self.epochs = Some(tree.epochs.id());
        if self.node != node {
            self.drain(tree, stats);
            self.node = node;
        }
        while self.len < count {
            let allocate = || allocate(&tree.host, &tree.encoding, F::TABLE_ENTRIES, node, wait);
            let mut table = allocate();
            if table.is_none() && wait == AllocationWait::Allowed && tree.epochs.nr_deferred_tables() > 0 {
                // What zaps have left may be much.
                tree.reclaim_all();
                table = allocate();
            }
            self.tables[self.len] = table.ok_or(())?;
            stats.count(Counter::TablesAllocated);
            self.len += 1;
        }
        Ok(())
    }

    /// Fills a page-table page of the cache with PTEs of `level`. The cache must hold one.
    ///
    /// # Safety
    /// No PTE that `pte` returns names a page-table page.
    #[inline]
    pub(crate) unsafe fn prepare<'c, H: Host, F: Format>(
        &'c mut self,
        tree: &'c Tree<H, F>,
        level: Level,
        pte: impl FnMut(usize) -> Pte<F>,
    ) -> Prepared<'c, H, F> {
        self.check_tree(tree);
        let mut prepared = Prepared { cache: self, tree, nr_tables: 0, leaves: (level, 0), level };
        // SAFETY: as the caller promises.
        unsafe { prepared.fill(pte) }
        prepared
    }

    /// As [`prepare`](Self::prepare), by `fill`. What that leaves is filled with `beside`.
    ///
    /// # Safety
    /// Neither `beside` nor a PTE that `fill` stores names a page-table page.
    #[inline]
    pub(crate) unsafe fn prepare_by<'c, H: Host, F: Format>(
        &'c mut self,
        tree: &'c Tree<H, F>,
        level: Level,
        beside: Pte<F>,
        fill: impl FnOnce(&mut NewPtes<'_, F>),
    ) -> Prepared<'c, H, F> {
        self.check_tree(tree);
        let mut prepared = Prepared { cache: self, tree, nr_tables: 0, leaves: (level, 0), level };
        // SAFETY: as the caller promises.
        unsafe { prepared.fill_by(beside, fill) }
        prepared
    }

    /// Frees all page-table pages of the cache.
    pub(crate) fn drain<H: Host, F: Format>(&mut self, tree: &Tree<H, F>, stats: &Recorder) {
        self.check_tree(tree);
        let tables = &self.tables[..core::mem::take(&mut self.len)];
        for &table in tables {
            // SAFETY: it came from `top_up`, and was never linked.
            unsafe { free(&tree.host, &tree.encoding, table) }
        }
        stats.add(Counter::TablesFreed, tables.len() as u64);
    }
}

/// Page-table pages of a cache that are filled, each but the lowest with a link to the one before.
/// Unless they are linked in the tree, they stay the cache's.
pub(crate) struct Prepared<'c, H: Host, F: Format> {
    cache: &'c mut TableCache,
    tree: &'c Tree<H, F>,
    nr_tables: usize,
    /// Level and number of the leaves in the lowest.
    leaves: (Level, u64),
    /// Of the PTE that links the highest.
    level: Level,
}

impl<H: Host, F: Format> Prepared<'_, H, F> {
    /// As `self`, with the number of leaves in the lowest, which are accounted with the link.
    #[inline]
    pub(crate) fn with_leaves(self, nr_leaves: u64) -> Self {
        Prepared { leaves: (self.leaves.0, nr_leaves), ..self }
    }

    /// Level of the PTE that can link them.
    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    /// Fills one more page-table page, one level higher. Its PTE at `index` points to the one
    /// below; all others are empty with `seq`.
    #[inline]
    pub(crate) fn raise(&mut self, index: usize, seq: InvalidationSeq) {
        let (table, beside) = (Pte::table(self.highest()), Pte::empty(seq));
        // SAFETY: the one PTE that names a page-table page names the one that was filled last.
        unsafe {
            self.fill_by(beside, |ptes| {
                ptes.skip(index);
                ptes.push(table);
            })
        }
    }

    /// Fills the next page-table page of the cache.
    ///
    /// # Safety
    /// One PTE at most that `pte` returns names a page-table page: the one that was filled last.
    #[inline]
    unsafe fn fill(&mut self, mut pte: impl FnMut(usize) -> Pte<F>) {
        self.nr_tables += 1;
        // SAFETY: pages in the cache were allocated for this size, and are the cache's alone.
        unsafe { build::<H, F>(&self.tree.host, self.highest(), F::TABLE_ENTRIES, |index| pte(index).bits()) }
        self.filled();
    }

    /// As [`fill`](Self::fill), by `fill`. What that leaves is filled with `beside`.
    ///
    /// # Safety
    /// As for [`fill`](Self::fill), of the PTEs that `fill` stores; `beside` names no page-table
    /// page.
    #[inline]
    unsafe fn fill_by(&mut self, beside: Pte<F>, fill: impl FnOnce(&mut NewPtes<'_, F>)) {
        self.nr_tables += 1;
        let first = self.tree.host.table_ptr(self.highest()).cast::<AtomicU64>();
        // SAFETY: pages in the cache were allocated for this size, and are the cache's alone. They
        // are only stored to.
        let left = unsafe { slice::from_raw_parts(first, F::TABLE_ENTRIES) };
        fill(&mut NewPtes { left, beside });
        if F::HAS_INCOHERENT_WALKERS {
            Cleaner::<F>::new(&self.tree.host).clean(left);
        }
        self.filled();
    }

    #[inline]
    fn filled(&mut self) {
        #[cfg(shuttle)]
        for index in 0..F::TABLE_ENTRIES {
            // SAFETY: pages in the cache were allocated for this size, and are the cache's alone.
            let cell = unsafe { self.tree.host.table_ptr(self.highest()).cast::<u64>().add(index) };
            // SAFETY: as above, and the PTE was stored just now.
            record!(PteMade { cell: cell.addr() as u64, value: unsafe { cell.read() } });
        }
        self.level = self.level.up();
    }

    /// The page-table page that was filled last.
    #[inline]
    fn highest(&self) -> Hpa {
        self.cache.tables[..self.cache.len][self.cache.len - self.nr_tables]
    }

    /// Replaces the PTE `old` in `pte`, a leaf or empty, by one that names the highest of these
    /// page-table pages, which are the tree's then. They map the memory at `pfn`. Returns that PTE.
    #[inline]
    pub(crate) fn link(
        self,
        stats: &Recorder,
        pte: PteRef<'_, F>,
        old: Pte<F>,
        table_use: TableUse,
        pfn: Pfn,
    ) -> Result<Pte<F>, Changed> {
        self.link_or_keep(stats, pte, old, table_use, pfn).map_err(|_| Changed)
    }

    /// As [`link`](Self::link); returns the page-table pages if another thread was faster.
    #[inline]
    pub(crate) fn link_or_keep(
        self,
        stats: &Recorder,
        pte: PteRef<'_, F>,
        old: Pte<F>,
        table_use: TableUse,
        pfn: Pfn,
    ) -> Result<Pte<F>, Self> {
        let fits = pte.level() == self.level
            && matches!(old.state(self.level), State::Empty(_) | State::Leaf | State::Tracked);
        debug_assert!(fits, "a page-table page is linked at {old:?} of level {}", pte.level().0);
        if !fits {
            return Err(self);
        }
        let Tree { host, encoding, .. } = self.tree;
        let table = Pte::table(self.highest());
        let new = match table_use {
            TableUse::Fault | TableUse::Split => table,
            TableUse::Break => Pte::broken(table, Breaking::Split),
        };
        // SAFETY: it was filled for this level, and is the cache's alone, as are those below. They
        // leave the cache at once.
        if unsafe { pte.link(stats, old, new) }.is_err() {
            return Err(self);
        }
        self.cache.len -= self.nr_tables;
        let (tables, remote) = match table_use {
            TableUse::Fault => (Counter::FaultTables, Counter::RemoteFaultTables),
            TableUse::Split | TableUse::Break => (Counter::SplitTables, Counter::RemoteSplitTables),
        };
        stats.add(tables, self.nr_tables as u64);
        let node = host.node_of(pfn);
        let is_remote = |&&table: &&Hpa| host.node_of(encoding.without_address_bits(table).pfn()) != node;
        let linked = &self.cache.tables[self.cache.len..][..self.nr_tables];
        stats.add(remote, linked.iter().filter(is_remote).count() as u64);
        stats.add(Counter::installed(self.leaves.0), self.leaves.1);
        Ok(new)
    }
}
