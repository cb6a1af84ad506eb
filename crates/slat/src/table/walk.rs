//! The cursor: where a walk stands in the tree. It goes down to the lowest entry for a frame, and onwards to the next.
//!
//! It remembers the table that it is in, so that the next frame of the same table costs one index; the way to any other
//! begins at the root. The table may have been unlinked meanwhile; its entries are then empty, with stamps that nobody
//! installs on, or frozen, and who meets a frozen entry starts over at the root ([`Cursor::restart`]). A change in such a
//! table is lost with it, which is why an operation whose "there is nothing to do here" must be up to date walks from the
//! root after its fence (see `dirty/log.rs`). A cursor lives inside one section.
//!
//! A fault makes two of them, so all of it must fit into registers: no array of the tables on the way.

#![expect(unsafe_code, reason = "goes from table to table by the addresses that it reads in them")]

use super::Tree;
use super::entry::{self, EntryRef, State};
use super::frames;
use super::retire::Section;
use crate::addr::{Gfn, GfnRange, Level};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::stats::Recorder;
use crate::sync::AtomicU64;

/// A position in the tree: the entry of `level` for `gfn`.
pub(crate) struct Cursor<'s, H: Host, F: Format> {
    tree: &'s Tree<H, F>,
    section: &'s Section<'s>,
    /// The table that the current entry is in.
    table: &'s [AtomicU64],
    /// The entry through which the walk came here, as it was read then; not below the root.
    above: Entry,
    level: Level,
    gfn: Gfn,
}

impl<'s, H: Host, F: Format> Cursor<'s, H, F> {
    /// At the root's entry for `gfn`.
    #[inline]
    pub(crate) fn new(tree: &'s Tree<H, F>, section: &'s Section<'s>, gfn: Gfn) -> Cursor<'s, H, F> {
        // SAFETY: it is the root.
        let table = unsafe { frames::linked_entries::<H, F>(&tree.host, section, tree.root(), F::ROOT_LEVEL) };
        Cursor { tree, section, table, above: Entry(F::WRITABLE), level: F::ROOT_LEVEL, gfn }
    }

    #[inline]
    pub(crate) fn tree(&self) -> &'s Tree<H, F> {
        self.tree
    }

    /// The statistics of whoever walks.
    #[inline]
    pub(crate) fn stats(&self) -> &'s Recorder {
        &self.section.record().stats
    }

    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    #[inline]
    pub(crate) fn gfn(&self) -> Gfn {
        self.gfn
    }

    /// The frames that the current entry covers.
    #[inline]
    pub(crate) fn block(&self) -> GfnRange {
        self.gfn.block(self.level)
    }

    /// The current entry.
    #[inline]
    pub(crate) fn entry(&self) -> EntryRef<'s> {
        self.entry_at(self.level)
    }

    /// The same, of the level that the current entry has: for callers to which that is a constant.
    #[inline(always)]
    fn entry_at(&self, level: Level) -> EntryRef<'s> {
        debug_assert!(level == self.level);
        EntryRef::new(&self.table[index_of::<F>(self.gfn, level)], level)
    }

    /// Whether the entry above was closed when the walk came through it: then no page of this table may be written, whatever
    /// the leaves say.
    #[inline]
    pub(crate) fn is_closed(&self) -> bool {
        entry::is_closed::<F>(self.above)
    }

    /// Reads the current entry, if it is of `level`. If it points to a table, the answer is what
    /// was read and the table's entries. The cursor stays.
    #[inline]
    pub(crate) fn read_table(&self, level: Level) -> Option<(Entry, &'s [AtomicU64])> {
        if self.level != level {
            return None;
        }
        let value = self.entry().load();
        // SAFETY: read from the current entry, and a table.
        (entry::state::<F>(value, level) == State::Table).then(|| (value, unsafe { self.table_below(value) }))
    }

    /// The entries of the table that `value` points to.
    ///
    /// # Safety
    /// `value` was read from the current entry, and points to a table.
    #[inline]
    unsafe fn table_below(&self, value: Entry) -> &'s [AtomicU64] {
        debug_assert!(entry::state::<F>(value, self.level) == State::Table);
        let table = F::address(value, self.level);
        // SAFETY: the current entry is in a table of the tree that was reached inside the section.
        unsafe { frames::linked_entries::<H, F>(&self.tree.host, self.section, table, self.level.down()) }
    }

    /// Back to the root, for the same frame.
    #[inline]
    pub(crate) fn restart(&mut self) {
        *self = Cursor::new(self.tree, self.section, self.gfn);
    }

    /// Into the table that the current entry points to. If it points to none any more, the cursor
    /// stays.
    #[inline]
    pub(crate) fn step_down(&mut self) {
        if let Some((value, table)) = self.read_table(self.level) {
            self.table = table;
            self.above = value;
            self.level = self.level.down();
        }
    }

    /// Into the table that `value` points to.
    ///
    /// # Safety
    /// `value` was read from the current entry, and points to a table.
    #[inline]
    unsafe fn descend(&mut self, value: Entry) {
        // SAFETY: as the caller promises.
        self.table = unsafe { self.table_below(value) };
        self.above = value;
        self.level = self.level.down();
    }

    /// At the lowest entry for `gfn`, with what it holds and is, as
    /// [`descend_to_lowest`](Self::descend_to_lowest) says it. For a fault, which walks from the root
    /// twice: all levels are constants here.
    #[inline(always)]
    pub(crate) fn at_lowest(
        tree: &'s Tree<H, F>,
        section: &'s Section<'s>,
        gfn: Gfn,
    ) -> (Cursor<'s, H, F>, Entry, State) {
        'root: loop {
            let mut cursor = Cursor::new(tree, section, gfn);
            let mut level = F::ROOT_LEVEL;
            loop {
                cursor.level = level;
                let value = cursor.entry_at(level).load();
                let state = entry::state::<F>(value, level);
                if state == State::Frozen {
                    // As in `descend_to`.
                    continue 'root;
                }
                if level == Level::L4K || state != State::Table {
                    return (cursor, value, state);
                }
                let table = F::address(value, level);
                level = level.down();
                // SAFETY: read in a table of the tree that was reached inside the section.
                cursor.table = unsafe { frames::linked_entries::<H, F>(&tree.host, section, table, level) };
                cursor.above = value;
            }
        }
    }

    /// Goes down to the lowest entry for the current frame and says what it holds and is; never a table, and never
    /// frozen: a frozen entry is met only on a path that was unlinked, and then the walk starts over.
    #[inline]
    pub(crate) fn descend_to_lowest(&mut self) -> (Entry, State) {
        self.descend_to(Level::L4K)
    }

    /// As [`descend_to_lowest`](Self::descend_to_lowest), but not below `level`: there it may be a table.
    #[inline(always)]
    pub(crate) fn descend_to(&mut self, level: Level) -> (Entry, State) {
        loop {
            let value = self.entry().load();
            match entry::state::<F>(value, self.level) {
                // At the lowest level there are no tables: with that constant, nothing is compared.
                State::Table if level == Level::L4K || self.level > level => {
                    // SAFETY: read from the current entry, and a table.
                    unsafe { self.descend(value) }
                }
                State::Frozen => {
                    // The table was unlinked from its parent before its entries were frozen, and this thread has read
                    // the frozen value with acquire: the root's path does not lead here again. No waiting.
                    self.restart();
                }
                state => return (value, state),
            }
        }
    }

    /// To the entry for `gfn`: of the current level if that is in the same table, else of the root's.
    #[inline]
    pub(crate) fn move_to(&mut self, gfn: Gfn) {
        let moved = self.gfn.0 ^ gfn.0;
        self.gfn = gfn;
        if self.level < F::ROOT_LEVEL && moved >= self.level.up().nr_pages() {
            self.restart();
        }
    }

    /// To the entry of `level` for `gfn`, or as low as there are tables: then `None`, as in a table that was unlinked.
    ///
    /// For who looks at many entries of one level, a constant: so levels are constants here, on the way down and in the
    /// table.
    #[inline(always)]
    pub(crate) fn move_to_entry(&mut self, gfn: Gfn, level: Level) -> Option<EntryRef<'s>> {
        let moved = self.gfn.0 ^ gfn.0;
        self.gfn = gfn;
        if self.level != level || (level < F::ROOT_LEVEL && moved >= level.up().nr_pages()) {
            self.descend_from_root(level)?;
        }
        Some(EntryRef::new(&self.table[index_of::<F>(gfn, level)], level))
    }

    /// From the root to the table whose entries have `level`, or as low as there are tables: then `None`.
    #[inline(always)]
    fn descend_from_root(&mut self, level: Level) -> Option<()> {
        self.restart();
        let mut above = F::ROOT_LEVEL;
        while above > level {
            let value = self.entry().load();
            if entry::state::<F>(value, above) != State::Table {
                return None;
            }
            // SAFETY: read from the current entry, of this level, and a table.
            unsafe { self.descend(value) }
            above = above.down();
        }
        Some(())
    }

    /// To the first frame behind the current entry's block.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.move_to(self.block().end);
    }
}

/// Index of `gfn` in a table whose entries have `level`.
#[inline]
pub(crate) fn index_of<F: Format>(gfn: Gfn, level: Level) -> usize {
    (gfn.0 / level.nr_pages()) as usize & (frames::nr_entries::<F>(level) - 1)
}
