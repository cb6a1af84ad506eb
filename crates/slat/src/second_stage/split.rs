//! Splitting: page-table pages take the place of huge leaves ahead of time, so that no vCPU has to
//! split them.
//!
//! # Guarantees
//! A split changes no translation, and keeps A and D. The parts allow what the huge leaf did, but
//! for [`parts_of`] and [`split_by_breaking`].
//!
//! # Use
//! Any number of threads call [`split_range`], each for its own range.
//! [`TablePlacement`](crate::tables::TablePlacement) says from which node the page-table pages
//! come.
//!
//! # Implementation
//! One pass goes from the root down, 1 GiB to 2 MiB to 4 KiB; each leaf is one step. The split
//! fills a page-table page with leaves one level lower, and exchanges the huge leaf for it
//! (`install::split_into`). If a fault, another split, or hardware that set A or D was first, it
//! reads the PTE anew, and uses the page-table page for what is left to do.
//!
//! The first try to allocate is made inside the guard, and does not wait. If it fails, the split
//! leaves the guard, waits for memory, and goes on from the same leaf.
//!
//! With break before make ([`Format::BREAK_BEFORE_MAKE`]) the split breaks the leaf, flushes, and
//! then links the page-table page ([`split_by_breaking`]). A fault or a zap that needs the broken
//! PTE cancels the split (`broken`). The page-table page is then retired, since other threads may
//! still read it.
//!
//! # Why it is correct
//! Translations that CPUs have cached of the huge leaf stay true, so no flush is due. A split needs
//! no order with logging: it copies W, A and D of the very value that it exchanges, and parts that
//! get W anew are logged by D.

#![expect(unsafe_code, reason = "retires the table that it has made in vain")]

use super::broken::{self, find_broken};
use super::install;
use super::walk::{self, Next, TurnEnd, Walk};
use crate::addr::{Gfn, GfnRange, Hpa, Level};
use crate::config::Config;
use crate::dirty::log;
use crate::dirty::rings::WithoutRings;
use crate::error::OutOfMemory;
use crate::format::Format;
use crate::host::{AllocationWait, Host, TableNode};
use crate::operation::Operation;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::node::{TableCache, TableUse};
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::{Guard, TableChain};

/// Leaves split, or PTEs passed by, before a turn leaves its guard.
const STEPS_PER_TURN: u64 = 32;

/// Which leaves are split.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leaves {
    /// Those that faults and prefaults have installed.
    NotPinned,
    /// Those that a caller has mapped in advance, because a part of them changes.
    Pinned,
}

/// Splits each of `leaves` larger than `target` that reaches into `range` and whose block
/// `is_wanted`.
/// Returns how many it split.
///
/// # Errors
/// [`OutOfMemory`]: the other leaves are as they were.
pub(crate) fn split_range<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    range: GfnRange,
    target: Level,
    leaves: Leaves,
    is_wanted: impl Fn(GfnRange) -> bool,
) -> Result<u64, OutOfMemory> {
    let mut split = Split { op, range, target, leaves, is_wanted, tables: TableCache::new(), nr_split: 0 };
    let result = walk::run(op, range, &mut split);
    split.tables.drain(op.tree, op.stats());
    result.map(|()| split.nr_split)
}

/// What a turn leaves its guard for.
enum Work<F> {
    /// The cache has no page-table page from this node.
    Allocate(TableNode),
    /// The leaf is broken, which takes a flush.
    Break(Pte<F>, Level),
}

struct Split<'t, H: Host, F: Format, W> {
    op: Operation<'t, H, F>,
    range: GfnRange,
    target: Level,
    leaves: Leaves,
    is_wanted: W,
    tables: TableCache,
    nr_split: u64,
}

impl<H: Host, F: Format, W: Fn(GfnRange) -> bool> Walk<H, F> for Split<'_, H, F, W> {
    type Work = Work<F>;
    type Error = OutOfMemory;
    const SIDE: Option<Side> = Some(Side::Read);

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Work<F>> {
        let rest = GfnRange { start, ..self.range };
        walk::visit_ptes(self.op.tree, guard, rest, STEPS_PER_TURN, |cursor| self.visit(guard, cursor))
    }

    fn work(&mut self, gfn: Gfn, work: Work<F>) -> Result<Gfn, OutOfMemory> {
        match work {
            Work::Allocate(node) => self.top_up(node, AllocationWait::Allowed).map_err(|()| OutOfMemory)?,
            // If another thread was first, the next turn reads the PTE anew.
            Work::Break(value, level) => {
                if split_by_breaking(self.op, &mut self.tables, gfn, value, level).is_ok() {
                    self.nr_split += 1;
                }
            }
        }
        Ok(gfn)
    }
}

impl<H: Host, F: Format, W: Fn(GfnRange) -> bool> Split<'_, H, F, W> {
    fn top_up(&mut self, node: TableNode, wait: AllocationWait) -> Result<(), ()> {
        self.tables.top_up(self.op.tree, self.op.stats(), 1, node, wait)
    }

    /// Splits the leaf at the cursor, if it is too large, or the leaves below.
    fn visit(&mut self, guard: &Guard<'_>, cursor: &mut Cursor<'_, H, F>) -> Next<Work<F>> {
        let tree = self.op.tree;
        // Leaves below a PTE of this level have the target's size or less.
        let above_target = self.target.up();
        let (value, state) = cursor.descend_to(above_target);
        let level = cursor.level();
        let is_meant = (self.leaves == Leaves::Pinned) == value.is_pinned();
        if !matches!(state, State::Leaf | State::Tracked)
            || level < above_target
            || !is_meant
            || !(self.is_wanted)(cursor.block())
        {
            return Next::Advance(1);
        }
        let node = placement_of(tree, value, level);
        if !self.tables.has(1, node) && self.top_up(node, AllocationWait::Never).is_err() {
            return Next::Leave(Work::Allocate(node));
        }
        if F::BREAK_BEFORE_MAKE {
            return Next::Leave(Work::Break(value, level));
        }
        guard.visit(level.nr_pages() / level.down().nr_pages());
        let whole = parts_of::<F>(&tree.config, value, level);
        if install::split_into(cursor, &mut self.tables, value, whole).is_ok() {
            self.nr_split += 1;
            if level == above_target {
                // Its parts have the target's size.
                return Next::Advance(1);
            }
        }
        // The next step goes down into it, or tries once more.
        Next::Again(1)
    }
}

/// The node for the page-table page that replaces the leaf `value` of `level`.
pub(crate) fn placement_of<H: Host, F: Format>(tree: &Tree<H, F>, value: Pte<F>, level: Level) -> TableNode {
    tree.config.table_placement.node_for(&tree.host, Some(tree.encoding.frame(value, level)))
}

/// The leaf whose parts replace the leaf `value` of `level`. It is `value`; but with W, if the host
/// allows it and a write to a part is found out without a fault.
pub(crate) fn parts_of<F: Format>(config: &Config, value: Pte<F>, level: Level) -> Pte<F> {
    let may_write = !config.first_write_faults(level.down()) && value.is_host_writable();
    if value.is_present() && may_write { value.with(F::WRITABLE) } else { value }
}

/// Replaces the leaf `value` of `level`, more than 4 KiB, that maps `gfn`, by a page-table page,
/// with a break and a flush between. The cache must hold a page-table page. Called outside of
/// guards.
///
/// A protection passes the broken PTE by. So the parts keep W only if the memslot does not log
/// before the break, and the VM has no rings: those have no room for so many pages. Otherwise the
/// first write of each part restores W.
///
/// Once the parts are linked, the flags are read again, and all pages are marked if the memslot
/// logs by then, as in a recovery (`recover`). No rings are enabled before that.
pub(crate) fn split_by_breaking<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    tables: &mut TableCache,
    gfn: Gfn,
    value: Pte<F>,
    level: Level,
) -> Result<(), Changed> {
    let without_rings = op.rings.keep_out();
    let split = break_leaf(op, &without_rings, tables, gfn, (value, level))?;
    if value.is_pinned() {
        // As each thread that finds it broken, for this one may be overtaken, too.
        broken::finish_pinned(op, gfn, level);
        return Ok(());
    }
    op.flush(&[gfn.block(level)]);
    link_parts(op, gfn, level, &split)
}

/// A leaf that is broken, so that a page-table page can take its place.
struct BrokenLeaf<F> {
    broken: Pte<F>,
    /// The page-table page that it names.
    table: Hpa,
    /// What the parts allow.
    whole: Pte<F>,
}

/// The first guard of [`split_by_breaking`], a function of its own so that it needs little stack.
#[inline(never)]
fn break_leaf<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    without_rings: &Option<WithoutRings<'_>>,
    tables: &mut TableCache,
    gfn: Gfn,
    (value, level): (Pte<F>, Level),
) -> Result<BrokenLeaf<F>, Changed> {
    let locked = op.pin_locked(Side::Read);
    let mut cursor = Cursor::new(op.tree, &locked.guard, gfn);
    if cursor.descend_to_lowest().0 != value || cursor.level() != level {
        return Err(Changed);
    }
    // A pinned leaf is in no log.
    let keeps_write = value.is_pinned()
        || (without_rings.is_some() && op.slots.find(&locked.guard, gfn).is_some_and(|slot| !slot.logs()));
    let whole = if keeps_write || !value.is_present() { value } else { value.without(F::WRITABLE) };
    let parts = install::prepare_parts(op.tree, tables, whole, level);
    // Other threads may find the page-table page from now on: it never goes back to the cache.
    let pfn = op.tree.encoding.frame(value, level);
    let broken = parts.link(op.stats(), cursor.pte(), value, TableUse::Break, pfn)?;
    Ok(BrokenLeaf { broken, table: broken.table_of_broken(), whole })
}

/// The second guard, after the flush: of a leaf that is not pinned.
#[inline(never)]
fn link_parts<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    gfn: Gfn,
    level: Level,
    split: &BrokenLeaf<F>,
) -> Result<(), Changed> {
    let locked = op.pin_locked(Side::Read);
    // SAFETY: `break_leaf` has filled it, and stored the broken PTE, of this level.
    let link =
        |cursor: Cursor<'_, H, F>| unsafe { cursor.pte().link(op.stats(), split.broken, Pte::table(split.table)) };
    if find_broken(op, &locked.guard, gfn, level).is_some_and(|cursor| link(cursor).is_ok()) {
        if split.whole.is_writable() {
            let block = gfn.block(level);
            log::mark_if_logging(op.slots, &locked.guard, None, block.start, block);
        }
        return Ok(());
    }
    drop(locked);
    let mut unlinked = TableChain::new();
    // SAFETY: it was never linked. A broken PTE has named it, and does not any more.
    unsafe { unlinked.push(op.host(), split.table) }
    // SAFETY: both are of the tree.
    unsafe { op.tree.epochs.retire_tables(op.host(), unlinked) }
    Err(Changed)
}
