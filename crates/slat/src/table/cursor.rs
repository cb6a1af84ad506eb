//! The cursor: the position of a walk in the tree. It goes down to the lowest PTE for a frame, and
//! on to the next frame.
//!
//! The cursor remembers its page-table page, so that the next frame of the same page costs one
//! index; the way to any other begins at the root. The page may have been unlinked meanwhile. Its
//! PTEs are then frozen, or empty with sequence numbers on which no fault installs; or it went with
//! its leaves, and faults may still install there (`second_stage/zap.rs`). A walk that reads a
//! frozen PTE starts over at the root ([`Cursor::restart`]). A change in an unlinked page is lost
//! with it. So an operation whose "there is nothing to do here" must be up to date walks from the
//! root after its fence (see `dirty/log.rs`). A cursor lives inside one guard.
//!
//! A fault makes two cursors, so a cursor must fit into registers: no array of the pages on the
//! way.

#![expect(unsafe_code, reason = "goes from table to table by the addresses that it reads in them")]

use super::Tree;
use super::node;
use super::pte::{Pte, State};
use super::pte_ref::{Changed, PteRef, Ptes};
use super::retire::Guard;
use crate::addr::{Gfn, GfnRange, Level};
use crate::format::Format;
use crate::host::Host;
use crate::stats::Recorder;
use crate::sync::AtomicU64;

/// A position in the tree: the PTE of `level` for `gfn`.
pub(crate) struct Cursor<'s, H: Host, F: Format> {
    tree: &'s Tree<H, F>,
    guard: &'s Guard<'s>,
    /// The page-table page of the current PTE.
    table: &'s [AtomicU64],
    /// The directory entry through which the walk came here, as it was read then. At the root: one
    /// that is not protected.
    above: Pte<F>,
    level: Level,
    gfn: Gfn,
}

impl<'s, H: Host, F: Format> Cursor<'s, H, F> {
    /// At the root's PTE for `gfn`.
    #[inline]
    pub(crate) fn new(tree: &'s Tree<H, F>, guard: &'s Guard<'s>, gfn: Gfn) -> Cursor<'s, H, F> {
        let table = node::root_ptes(tree, guard);
        Cursor { tree, guard, table: table.cells, above: Pte::ABOVE_ROOT, level: tree.root_level(), gfn }
    }

    /// Another cursor at the same PTE.
    #[inline]
    pub(crate) fn clone_at(&self) -> Cursor<'s, H, F> {
        Cursor { ..*self }
    }

    #[inline]
    pub(crate) fn tree(&self) -> &'s Tree<H, F> {
        self.tree
    }

    /// The statistics of the thread that walks.
    #[inline]
    pub(crate) fn stats(&self) -> &'s Recorder {
        &self.guard.participant().stats
    }

    #[inline]
    pub(crate) fn level(&self) -> Level {
        self.level
    }

    #[inline]
    pub(crate) fn gfn(&self) -> Gfn {
        self.gfn
    }

    /// The frames that the current PTE covers.
    #[inline]
    pub(crate) fn block(&self) -> GfnRange {
        self.gfn.block(self.level)
    }

    /// The current PTE.
    #[inline]
    pub(crate) fn pte(&self) -> PteRef<'s, F> {
        self.pte_at(self.level)
    }

    /// Replaces the current PTE, if it is still `old`, and accounts that ([`PteRef::replace`]).
    #[inline]
    pub(crate) fn replace(&self, old: Pte<F>, new: Pte<F>) -> Result<(), Changed> {
        self.pte().replace(self.stats(), old, new)
    }

    /// As [`pte`](Self::pte), with the level of the current PTE: for callers to which that is a
    /// constant.
    #[inline(always)]
    pub(crate) fn pte_at(&self, level: Level) -> PteRef<'s, F> {
        debug_assert!(level == self.level);
        // SAFETY: the PTEs of the page-table page have the cursor's level.
        unsafe { PteRef::new(&self.table[self.index_at(level)], level, self.guard.lock_check(), self.tree.cleaner()) }
    }

    /// Index of the PTE of `level` for the current frame in the page-table page.
    #[inline(always)]
    fn index_at(&self, level: Level) -> usize {
        (self.gfn.0 / level.nr_pages()) as usize & (self.table.len() - 1)
    }

    /// Whether the directory entry above was protected when the walk came through it: then no page
    /// below it may be written, whatever the leaves say.
    #[inline]
    pub(crate) fn is_protected(&self) -> bool {
        self.above.is_protected()
    }

    /// Reads the current PTE, if it is of `level`. If it points to a page-table page, returns what
    /// was read and the PTEs of that page. The cursor stays.
    #[inline]
    pub(crate) fn read_table(&self, level: Level) -> Option<(Pte<F>, Ptes<'s, F>)> {
        if self.level != level {
            return None;
        }
        let value = self.pte().load();
        // SAFETY: read from the current PTE, which is a directory entry.
        (value.state(level) == State::Table).then(|| (value, unsafe { self.table_below(value) }))
    }

    /// The PTEs of the page-table page that `value` points to.
    ///
    /// # Safety
    /// `value` was read from the current PTE, and points to a page-table page.
    #[inline]
    unsafe fn table_below(&self, value: Pte<F>) -> Ptes<'s, F> {
        debug_assert!(value.state(self.level) == State::Table);
        let table = value.table_below();
        // SAFETY: the current PTE is in a page-table page of the tree that was reached inside the
        // guard.
        unsafe { node::linked_ptes::<H, F>(&self.tree.host, self.guard, table, self.level.down()) }
    }

    /// The pages from the cursor's on, up to `end` at most, that are in its block of 2 MiB, and each of
    /// them with its PTE of 4 KiB: `ptes` are those of the page-table page below.
    #[inline(always)]
    pub(crate) fn small_pages<'p>(
        &self,
        ptes: Ptes<'p, F>,
        end: Gfn,
    ) -> (GfnRange, impl Iterator<Item = (Gfn, PteRef<'p, F>)> + use<'s, 'p, H, F>) {
        let (start, block) = (self.gfn, self.block());
        let part = GfnRange { start, end: block.end.min(end) };
        // Fewer than the block has pages in tests whose page-table pages have few PTEs.
        let ptes = ptes.slice((start.0 - block.start.0) as usize..);
        (part, (part.start.0..part.end.0).map(Gfn).zip(ptes.iter()))
    }

    /// Back to the root, for the same frame.
    #[inline]
    pub(crate) fn restart(&mut self) {
        *self = Cursor::new(self.tree, self.guard, self.gfn);
    }

    /// Goes down to the page-table page that the current PTE points to. If it points to none any
    /// more, the cursor stays.
    #[inline]
    pub(crate) fn step_down(&mut self) {
        if let Some((value, table)) = self.read_table(self.level) {
            self.table = table.cells;
            self.above = value;
            self.level = self.level.down();
        }
    }

    /// Goes down to the page-table page that `value` points to.
    ///
    /// # Safety
    /// `value` was read from the current PTE, and points to a page-table page.
    #[inline]
    unsafe fn descend(&mut self, value: Pte<F>) {
        // SAFETY: as the caller promises.
        self.table = unsafe { self.table_below(value).cells };
        self.above = value;
        self.level = self.level.down();
    }

    /// Returns a cursor at the PTE of 4 KiB for `gfn`, with its value. `None` if the page-table
    /// pages do not reach so low; in one that was unlinked they may.
    ///
    /// For a fault: the levels are constants here, and most faults find what they need at this one.
    #[inline(always)]
    pub(crate) fn at_small(tree: &'s Tree<H, F>, guard: &'s Guard<'s>, gfn: Gfn) -> Option<(Cursor<'s, H, F>, Pte<F>)> {
        let mut cursor = Cursor::new(tree, guard, gfn);
        cursor.descend_from_root(Level::L4K)?;
        let value = cursor.pte_at(Level::L4K).load();
        Some((cursor, value))
    }

    /// Returns a cursor at the PTE of 2 MiB for `gfn`, or above if the page-table pages do not reach
    /// so low. The levels are constants, as in [`at_small`](Self::at_small).
    #[inline(always)]
    pub(crate) fn above_small(tree: &'s Tree<H, F>, guard: &'s Guard<'s>, gfn: Gfn) -> Cursor<'s, H, F> {
        let mut cursor = Cursor::new(tree, guard, gfn);
        let _: Option<()> = cursor.descend_from_root(Level::L2M);
        cursor
    }

    /// A cursor at the lowest PTE for `gfn`, with its value.
    #[cold]
    #[inline(never)]
    pub(crate) fn at_lowest(tree: &'s Tree<H, F>, guard: &'s Guard<'s>, gfn: Gfn) -> (Cursor<'s, H, F>, Pte<F>) {
        let mut cursor = Cursor::new(tree, guard, gfn);
        let (value, _) = cursor.descend_to_lowest();
        (cursor, value)
    }

    /// Goes down to the lowest PTE for the current frame and returns its value and state. It is
    /// never a directory entry, and never frozen: a frozen PTE lies only on a path that was
    /// unlinked, and then the walk starts over.
    #[inline]
    pub(crate) fn descend_to_lowest(&mut self) -> (Pte<F>, State) {
        self.descend_to(Level::L4K)
    }

    /// As [`descend_to_lowest`](Self::descend_to_lowest), but not below `level`: there it may be a
    /// directory entry.
    #[inline(always)]
    pub(crate) fn descend_to(&mut self, level: Level) -> (Pte<F>, State) {
        loop {
            let value = self.pte().load();
            match value.state(self.level) {
                // At the lowest level there are no directory entries: with that constant, nothing
                // is compared.
                State::Table if level == Level::L4K || self.level > level => {
                    // SAFETY: read from the current PTE, which is a directory entry.
                    unsafe { self.descend(value) }
                }
                State::Frozen => {
                    // The page-table page was unlinked from its parent before its PTEs were frozen,
                    // and this thread has read the frozen value with acquire. So the path from the
                    // root does not lead here again, and nothing is waited for.
                    self.restart();
                }
                state => return (value, state),
            }
        }
    }

    /// Moves to the PTE for `gfn`: of the current level in the same page-table page, else of the
    /// root.
    #[inline]
    pub(crate) fn move_to(&mut self, gfn: Gfn) {
        let moved = self.gfn.0 ^ gfn.0;
        self.gfn = gfn;
        if self.level < self.tree.root_level() && moved >= self.level.up().nr_pages() {
            self.restart();
        }
    }

    /// Moves to the PTE of `level` for `gfn`. `None` if the page-table pages do not reach so low,
    /// as in one that was unlinked; the cursor is then as low as they reach.
    ///
    /// For a caller that visits many PTEs of one level, a constant: so levels are constants here,
    /// on the way down and in the page.
    #[inline(always)]
    pub(crate) fn move_to_pte(&mut self, gfn: Gfn, level: Level) -> Option<PteRef<'s, F>> {
        let moved = self.gfn.0 ^ gfn.0;
        self.gfn = gfn;
        // A constant, for the lowest level.
        let is_below_root = const { root_levels::<F>() }.0 > level || level < self.tree.root_level();
        if self.level != level || (is_below_root && moved >= level.up().nr_pages()) {
            self.restart();
            self.descend_from_root(level)?;
        }
        // SAFETY: the cursor is at a PTE of `level`: it was, or has just gone down to one.
        Some(unsafe {
            PteRef::new(&self.table[self.index_at(level)], level, self.guard.lock_check(), self.tree.cleaner())
        })
    }

    /// The PTEs of the page-table page below the PTE of `level` for `gfn`, to which the cursor moves.
    /// `None` if there is no page-table page.
    #[inline(always)]
    pub(crate) fn move_to_table_below(&mut self, gfn: Gfn, level: Level) -> Option<Ptes<'s, F>> {
        let value = self.move_to_pte(gfn, level)?.load();
        // SAFETY: read from the current PTE, which is a directory entry.
        let ptes =
            || unsafe { node::linked_ptes::<H, F>(&self.tree.host, self.guard, value.table_below(), level.down()) };
        (value.state(level) == State::Table).then(ptes)
    }

    /// From the root, where the cursor is, to the page-table page whose PTEs have `level`, which is
    /// a constant: so all levels are. `None` if there is none; the cursor is then as low as there
    /// are page-table pages.
    #[inline(always)]
    fn descend_from_root(&mut self, level: Level) -> Option<()> {
        let root_level = self.tree.root_level();
        let (lowest_root, highest) = const { root_levels::<F>() };
        let mut above = highest;
        while above > level {
            // For a root of a level that is not fixed, a comparison decides whether the level is
            // there.
            if above <= lowest_root || above <= root_level {
                self.level = above;
                let value = self.pte_at(above).load();
                if value.state(above) != State::Table {
                    return None;
                }
                // SAFETY: read in a page-table page of the tree that was reached inside the guard.
                let ptes = unsafe {
                    node::linked_ptes::<H, F>(&self.tree.host, self.guard, value.table_below(), above.down())
                };
                self.table = ptes.cells;
                self.above = value;
            }
            above = above.down();
        }
        self.level = level;
        Some(())
    }

    /// Moves to the first frame behind the block of the current PTE.
    #[inline]
    pub(crate) fn advance(&mut self) {
        self.move_to(self.block().end);
    }
}

/// Index of `gfn` in a page-table page below the root, whose PTEs have `level`.
#[inline]
pub(crate) fn index_of<F: Format>(gfn: Gfn, level: Level) -> usize {
    (gfn.0 / level.nr_pages()) as usize & (F::TABLE_ENTRIES - 1)
}

/// The lowest and the highest level that a root of the format can have.
const fn root_levels<F: Format>() -> (Level, Level) {
    let (mut lowest, mut highest) = (F::ROOT_LEVEL, F::ROOT_LEVEL);
    let mut nth = 0;
    while nth < F::GEOMETRIES.len() {
        let level = F::GEOMETRIES[nth].root_level;
        if level.0 > highest.0 {
            highest = level;
        }
        if level.0 < lowest.0 {
            lowest = level;
        }
        nth += 1;
    }
    (lowest, highest)
}
