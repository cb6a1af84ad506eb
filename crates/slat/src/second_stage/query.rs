//! Reads the page tables without changing them: for instruction emulation, device models, debuggers
//! and tests.

#![expect(unsafe_code, reason = "goes through tables by the addresses that it reads in them")]

use crate::addr::{Gfn, Gpa, Hpa, Level, NodeId, PageSize, Pfn};
use crate::error::OutOfMemory;
use crate::format::{Format, LeafAttributes};
use crate::host::Host;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::node;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{PteRef, Ptes};
use crate::table::retire::{Guard, LoneGuard};

/// The translation of a page, as the page tables have it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// The frame of the 4 KiB page.
    pub pfn: Pfn,
    /// The size of the leaf that maps it.
    pub size: PageSize,
    /// Whether the guest may write it without a fault.
    pub writable: bool,
    /// Whether the guest has used the leaf since it was installed or last aged.
    pub accessed: bool,
    /// Whether the guest has written through the leaf since it was installed.
    pub dirty: bool,
    /// How the guest may use it otherwise.
    pub attributes: LeafAttributes,
}

/// Reads a VM's page tables, as they are while this exists. It stays on the thread that opened it.
/// Nothing that is unlinked meanwhile is freed, so drop it soon.
#[must_use]
pub struct TableReader<'v, H: Host, F: Format> {
    tree: &'v Tree<H, F>,
    guard: LoneGuard<'v>,
}

impl<'v, H: Host, F: Format> TableReader<'v, H, F> {
    pub(crate) fn new(tree: &'v Tree<H, F>) -> Result<TableReader<'v, H, F>, OutOfMemory> {
        Ok(TableReader { tree, guard: tree.epochs.pin_alone()? })
    }

    /// A position in the page tables. Pages of one page-table page, one after the other, cost no
    /// walk.
    pub fn cursor(&self) -> TableCursor<'_, H, F> {
        TableCursor { cursor: Cursor::new(self.tree, self.guard.get(), Gfn(0)) }
    }
}

impl<H: Host, F: Format> TableReader<'_, H, F> {
    /// The number of linked page-table pages on `node`, the root included. Reads every PTE above
    /// the lowest level.
    pub fn nr_tables_on(&self, node: NodeId) -> u64 {
        self.count_tables(self.tree.root(), node::root_ptes(self.tree, self.guard.get()), node)
    }

    /// The page-table pages on `node`: that at `table`, which has `ptes`, and those below.
    fn count_tables(&self, table: Hpa, ptes: Ptes<'_, F>, node: NodeId) -> u64 {
        let Tree { host, encoding, .. } = self.tree;
        let level = ptes.level();
        let below = |pte: PteRef<'_, F>| {
            let value = pte.load();
            if value.state(level) != State::Table {
                return 0;
            }
            let table = value.table_below();
            // SAFETY: read in this guard, in a page-table page of the tree.
            let ptes = unsafe { node::linked_ptes::<H, F>(host, self.guard.get(), table, level.down()) };
            self.count_tables(table, ptes, node)
        };
        let nr_below: u64 = if level > Level::L4K { ptes.iter().map(below).sum() } else { 0 };
        nr_below + u64::from(host.node_of(encoding.without_address_bits(table).pfn()) == node)
    }
}

/// The translation of the page at `gpa`, in a guard of the caller, as
/// [`query`](TableCursor::query) of a new cursor.
#[inline]
pub(crate) fn translate<H: Host, F: Format>(tree: &Tree<H, F>, guard: &Guard<'_>, gpa: Gpa) -> Option<Translation> {
    if gpa.0 >> tree.encoding.gpa_bits() != 0 {
        return None;
    }
    let mut cursor = Cursor::above_small(tree, guard, gpa.gfn());
    let (leaf, State::Leaf | State::Tracked) = cursor.descend_to_lowest() else { return None };
    Some(translation(&cursor, leaf, cursor.level(), gpa.gfn()))
}

/// The translation of `gfn` by the leaf `leaf` of `level`, tracked or not, to which `cursor` came.
#[inline]
fn translation<H: Host, F: Format>(cursor: &Cursor<'_, H, F>, leaf: Pte<F>, level: Level, gfn: Gfn) -> Translation {
    let encoding = &cursor.tree().encoding;
    Translation {
        pfn: Pfn(encoding.frame(leaf, level).0 + (gfn.0 & (level.nr_pages() - 1))),
        size: level.page_size(),
        writable: leaf.is_writable() && !cursor.is_protected(),
        accessed: leaf.is_accessed(),
        dirty: leaf.is_dirty(),
        attributes: encoding.attributes_of(leaf.attribute_bits(level)),
    }
}

/// A position in a VM's page tables; see [`TableReader::cursor`].
pub struct TableCursor<'r, H: Host, F: Format> {
    cursor: Cursor<'r, H, F>,
}

impl<H: Host, F: Format> TableCursor<'_, H, F> {
    /// The translation of the page at `gpa`. `None` if nothing is mapped, or the format has no such
    /// address.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::LOG_DIRTY_PAGES);
    /// assert_eq!(vm.create_vcpu()?.handle_fault(Gpa(0x3008), Access::Read)?, Outcome::Resume);
    /// let tables = vm.read_tables()?;
    /// let mut cursor = tables.cursor();
    /// let found = cursor.query(Gpa(0x3fff)).expect("the fault has mapped it");
    /// assert_eq!((found.size, found.writable, found.accessed), (PageSize::Size4K, false, true));
    /// assert_eq!(cursor.query(Gpa(0x4000)), None);
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn query(&mut self, gpa: Gpa) -> Option<Translation> {
        let Tree { encoding, .. } = self.cursor.tree();
        let gfn = gpa.gfn();
        if !encoding.frames().contains(gfn) {
            return None;
        }
        // Not from a page-table page in the middle: there the last page was huge, and its
        // neighbours may be.
        let level = self.cursor.level();
        let may_move = level == Level::L4K || level == encoding.root_level();
        if let Some(pte) = may_move.then(|| self.cursor.move_to_pte(gfn, Level::L4K)).flatten() {
            let value = pte.load();
            match value.state(Level::L4K) {
                // Apart, so that less is decided for most.
                State::Leaf => return Some(translation(&self.cursor, value, Level::L4K, gfn)),
                State::Tracked => return Some(self.translation_of_tracked(value, gfn)),
                State::Empty(_) | State::Table | State::Broken | State::Frozen => {}
            }
            // Nothing there, as in a page-table page that was unlinked meanwhile: walk from the
            // root.
            self.cursor.restart();
        }
        self.cursor.move_to(gfn);
        let (leaf, State::Leaf | State::Tracked) = self.cursor.descend_to_lowest() else { return None };
        Some(translation(&self.cursor, leaf, self.cursor.level(), gfn))
    }

    #[cold]
    #[inline(never)]
    fn translation_of_tracked(&self, leaf: Pte<F>, gfn: Gfn) -> Translation {
        translation(&self.cursor, leaf, Level::L4K, gfn)
    }
}
