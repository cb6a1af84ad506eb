//! Zapping: the leaf PTEs of a range become empty.
//!
//! # Guarantees
//! - Each leaf PTE of the range is emptied. Each empty PTE gets an invalidation sequence number of
//!   this zap, or keeps a greater one.
//! - The host is notified of all that the guest did through a leaf before that leaf is zapped
//!   (`models/zap.py`).
//! - Pages beside the range stay mapped, if memory for a page-table page is at hand.
//! - No step is longer than one page-table page, and the zap can yield between any two.
//!
//! # Use
//! The caller publishes the range, so that a fault that reads the ranges in flight later installs
//! nothing there; or it sets the userfault bits of the pages. Then it takes `seq`; see
//! `table/invalidation_seq.rs`.
//!
//! # Implementation
//! The zap passes over the range from the lowest level up.
//! 1. The first pass visits every PTE: it empties leaves one by one and stores numbers in empty
//!    PTEs.
//! 2. Each further pass unlinks the page-table pages of one level that lie wholly inside the range.
//!    They are empty by then.
//!
//! A huge leaf that the range covers in part is split first. The page-table page for that is
//! allocated without waiting: an invalidation may run inside the host's reclaim of memory. Without
//! memory the whole leaf is emptied, and its neighbours fault again.
//!
//! A pinned leaf (`second_stage/map.rs`) is not reported: its frames are released after the flush.
//! If the range covers a part of it, the zap waits for memory to split it, since no fault would
//! bring its neighbours back. The caller has split that across the end of the range before (`map::split_end`), and the zap
//! visits that across its start first: without memory it fails before it has changed anything.
//!
//! An empty PTE that the range covers in part gets a number as a whole: no page-table page is made
//! for memory that was never mapped. A fault beside the range that has read the PTE already reads
//! it once more (`vcpu/act.rs`).
//!
//! While [`MAX_DEFERRED_TABLES`] unlinked page-table pages wait, perhaps for a guard that was
//! suspended, no more are unlinked. The others stay linked, with empty PTEs.
//!
//! An unflushed PTE ([`InvalidationSeq::unflushed`]) that the range covers in part loses that flag.
//! So the first of many invalidations beside a fault lets it link page-table pages there
//! (`Fault::refine`). To clear the flag, the zap
//! 1. reads the PTE, and leaves its guard,
//! 2. flushes the block of the PTE,
//! 3. exchanges the very value that it read.
//!
//! # Why it is correct
//! **Reports.** Another zap may find the PTE empty already, and its caller frees the frame. By then
//! the host must know all, whichever thread was preempted. So the host is notified before the
//! exchange, and leaves are emptied one by one before their page-table page is unlinked.
//!
//! **Unflushed PTEs.** The value that was read never comes back, so no CPU has cached anything
//! there since the flush. If the exchange fails, another operation has changed the PTE. The zap
//! flushes again only if the PTE is unflushed once more, with a number below the zap's own. Such a
//! number was taken before, and is stored once. So these flushes are at most as many as the
//! operations that held one then.
//!
//! **Sequence numbers.** A PTE of the lowest level gets the zap's own number, each PTE above a
//! fresh one, taken for it alone. So no number comes back to a page, on which
//! `table/invalidation_seq.rs` relies. Only the first pass visits PTEs of the lowest level, and it
//! moves forward: each page gets the own number at most once. A PTE above may stand for pages that
//! have got it already. In a further pass, their page-table page may have been unlinked meanwhile;
//! in a rescan, several ranges share one number.

#![expect(unsafe_code, reason = "takes over the tables that it unlinks")]

use super::broken::{self, BrokenPinned};
use super::install;
use super::split;
use super::walk::{self, Next, TurnEnd, Walk};
use crate::addr::{Gfn, GfnRange, Hpa, Level};
use crate::dirty::log;
use crate::error::OutOfMemory;
use crate::format::Format;
use crate::host::{AllocationWait, Host, TableNode};
use crate::operation::Operation;
use crate::sync::Side;
use crate::table::cursor::Cursor;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::node::{self, TableCache};
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::Guard;
use crate::table::tlb::TlbBatch;

/// PTEs that a turn visits before it leaves its guard. A page-table page that is unlinked counts as
/// many.
const ENTRIES_PER_TURN: u64 = 4096;

/// Page-table pages that are unlinked before they are flushed and retired.
pub(super) const TABLES_PER_FLUSH: u64 = 512;

/// Unlinked page-table pages that may wait for their grace period. Each zap under way may hold
/// [`TABLES_PER_FLUSH`] more.
pub(super) const MAX_DEFERRED_TABLES: u64 = 1024;

/// What keeps faults from installing again what a zap has emptied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Faults {
    /// The range is in flight until the flush is over.
    KeptOut,
    /// The range is in flight until the zap is over. Then nothing does, once user space clears the
    /// userfault bit: leaves may come back before the flush. No page-table page is unlinked.
    MayComeBack,
}

/// Zaps `range`. What is to be flushed, and the unlinked page-table pages, are in `batch` then.
/// Returns how many of its pages were pinned.
///
/// # Errors
/// A pinned leaf that the range covers in part could not be split. What was zapped before it is in
/// `batch`.
pub(crate) fn zap_range<'t, H: Host, F: Format>(
    op: Operation<'t, H, F>,
    range: GfnRange,
    seq: InvalidationSeq,
    faults: Faults,
    batch: &mut TlbBatch<'t, H, F>,
) -> Result<u64, OutOfMemory> {
    if op.tree.epochs.nr_deferred_tables() >= MAX_DEFERRED_TABLES {
        // The guards that they waited for may be over by now.
        op.tree.reclaim();
    }
    let mut zap = Zap {
        op,
        range,
        seq,
        faults,
        batch,
        pass: Level::L4K,
        is_in_one_pte: false,
        tables: TableCache::new(),
        is_out_of_memory: false,
        leaves_tables: false,
        flushed: None,
        nr_pinned: 0,
    };
    let mut result = Ok(());
    // A further pass has work only if the range has a whole block of the level.
    while zap.pass == Level::L4K
        || (zap.pass <= op.tree.root_level() && !zap.is_in_one_pte && range.has_block(zap.pass))
    {
        result = walk::run(op, range, &mut zap);
        // Unlinking a page-table page above would take along those that were left, in one long
        // step.
        if zap.leaves_tables || faults == Faults::MayComeBack || result.is_err() {
            break;
        }
        zap.pass = zap.pass.up();
    }
    zap.tables.drain(op.tree, op.stats());
    result.map(|()| zap.nr_pinned)
}

/// What a turn leaves its guard for.
enum Work<F> {
    /// What was zapped is flushed, and the unlinked page-table pages are retired.
    Retire,
    /// A leaf that is covered in part is broken before it is split.
    Break(Pte<F>, Level),
    /// An unflushed empty PTE that is covered in part is flushed before it gets a number.
    Flush(Pte<F>, Level),
    /// There is no page-table page from this node to split a pinned leaf.
    Allocate(TableNode),
    /// Another thread splits a pinned leaf by breaking it.
    FinishSplit(BrokenPinned<F>),
}

/// A zap under way.
struct Zap<'z, 't, H: Host, F: Format> {
    op: Operation<'t, H, F>,
    range: GfnRange,
    seq: InvalidationSeq,
    faults: Faults,
    batch: &'z mut TlbBatch<'t, H, F>,
    /// The lowest pass empties PTEs. A higher one unlinks the page-table pages below the PTEs of
    /// its level.
    pass: Level,
    /// One empty PTE stands for the whole range. So there is no page-table page to unlink.
    is_in_one_pte: bool,
    tables: TableCache,
    is_out_of_memory: bool,
    /// Too many unlinked page-table pages wait, so some were left linked.
    leaves_tables: bool,
    /// The unflushed PTE that was flushed last. No other PTE has its number, which never comes
    /// back.
    flushed: Option<Pte<F>>,
    /// Pinned pages that were zapped.
    nr_pinned: u64,
}

impl<H: Host, F: Format> Walk<H, F> for Zap<'_, '_, H, F> {
    type Work = Work<F>;
    type Error = OutOfMemory;
    const SIDE: Option<Side> = Some(Side::Write);

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Work<F>> {
        let rest = GfnRange { start, ..self.range };
        let end = walk::visit_ptes(self.op.tree, guard, rest, ENTRIES_PER_TURN, |cursor| self.visit(guard, cursor));
        match end {
            // No flush is missing while other threads run, and the page-table pages are retired
            // sooner.
            TurnEnd::At(gfn) if gfn < rest.end && self.op.tree.should_yield() => TurnEnd::Work(gfn, Work::Retire),
            end => end,
        }
    }

    fn work(&mut self, gfn: Gfn, work: Work<F>) -> Result<Gfn, OutOfMemory> {
        match work {
            Work::Retire => {
                self.batch.flush();
                self.op.tree.reclaim();
            }
            // If the PTE has changed meanwhile, the next turn reads it anew.
            Work::Break(value, level) => {
                let _: Result<(), Changed> = split::split_by_breaking(self.op, &mut self.tables, gfn, value, level);
            }
            Work::Flush(value, level) => {
                self.op.flush(&[gfn.block(level)]);
                self.flushed = Some(value);
            }
            Work::Allocate(node) => {
                let (tree, stats) = (self.op.tree, self.op.stats());
                self.tables.top_up(tree, stats, 1, node, AllocationWait::Allowed).map_err(|()| OutOfMemory)?;
            }
            Work::FinishSplit(broken) => broken.finish(self.op),
        }
        Ok(gfn)
    }
}

impl<H: Host, F: Format> Zap<'_, '_, H, F> {
    /// Visits the cursor's PTE.
    #[expect(clippy::too_many_lines, reason = "one match over all states of a PTE, each in a few lines")]
    #[inline]
    fn visit(&mut self, guard: &Guard<'_>, cursor: &mut Cursor<'_, H, F>) -> Next<Work<F>> {
        if self.batch.nr_unlinked() >= TABLES_PER_FLUSH {
            return Next::Leave(Work::Retire);
        }
        let (op, range) = (self.op, self.range);
        let (pte, level, block) = (cursor.pte(), cursor.level(), cursor.block());
        let value = pte.load();
        let mut nr_steps = 1;
        let done = match value.state(level) {
            State::Frozen => {
                cursor.restart();
                return Next::Again(0);
            }
            State::Broken => match broken::cancel(op, guard, cursor) {
                Some(pinned) => return Next::Leave(Work::FinishSplit(pinned)),
                None => return Next::Again(0),
            },
            State::Empty(found) if found >= self.seq => Ok(()),
            State::Empty(found) => {
                let is_unflushed = F::BREAK_BEFORE_MAKE && found.is_unflushed() && self.flushed != Some(value);
                if is_unflushed && !range.covers(block) {
                    return Next::Leave(Work::Flush(value, level));
                }
                let seq = self.seq_for(level);
                // The flag stays, for the flush is still due; the exchange itself makes none due.
                let seq = if is_unflushed { seq.unflushed() } else { seq };
                let done = cursor.replace(value, Pte::empty(seq));
                self.is_in_one_pte = level > Level::L4K && block.covers(range) && done.is_ok();
                done
            }
            State::Leaf if value.is_pinned() && range.covers(block) => {
                if !self.batch.has_room_to_release() {
                    return Next::Leave(Work::Retire);
                }
                let seq = self.seq_for(level);
                let may_come_back = F::BREAK_BEFORE_MAKE && self.faults == Faults::MayComeBack;
                let done = pte.zap_leaf(op.stats(), value, if may_come_back { seq.unflushed() } else { seq });
                if done.is_ok() {
                    self.batch.add_released(block, op.tree.encoding.frame(value, level));
                    self.nr_pinned += block.nr_pages();
                }
                done
            }
            State::Leaf if value.is_pinned() => match self.table_for_split(guard, value, level) {
                Err(node) => return Next::Leave(Work::Allocate(node)),
                Ok(()) if F::BREAK_BEFORE_MAKE => return Next::Leave(Work::Break(value, level)),
                Ok(()) => {
                    let _: Result<(), Changed> = install::split(cursor, &mut self.tables, value);
                    return Next::Again(0);
                }
            },
            State::Leaf | State::Tracked if self.goes_whole(guard, value, level, block) => {
                // Before the exchange: see the module. If hardware sets A or D meanwhile, the
                // exchange fails, and the next try reports anew.
                mark_dirty(op, guard, value, level, block);
                node::report_zapped(op.tree, value, level, block);
                let seq = self.seq_for(level);
                // Beside the range nothing keeps a fault from making a PTE of another size before
                // the flush.
                let may_come_back = self.faults == Faults::MayComeBack || !range.covers(block);
                let seq = if F::BREAK_BEFORE_MAKE && may_come_back { seq.unflushed() } else { seq };
                let done = pte.zap_leaf(op.stats(), value, seq);
                if done.is_ok() {
                    // Once more: before the exchange a harvest may have taken the mark and cleared
                    // D, and a CPU have set D again (`models/proofs/harvest_beside_zap.py`).
                    mark_dirty(op, guard, value, level, block);
                    self.batch.add(block);
                }
                done
            }
            State::Leaf | State::Tracked if F::BREAK_BEFORE_MAKE => return Next::Leave(Work::Break(value, level)),
            State::Leaf | State::Tracked => {
                // If the PTE has changed meanwhile, the next step reads it anew.
                let _: Result<(), Changed> = install::split(cursor, &mut self.tables, value);
                return Next::Again(0);
            }
            State::Table if level == self.pass && range.covers(block) && self.may_unlink() => {
                // A fresh number: greater ones than the zap's may have been left inside
                // (`table/invalidation_seq.rs`).
                let done = cursor.replace(value, Pte::empty(op.tree.next_seq()));
                if done.is_ok() {
                    // Not before the exchange: frozen PTEs in a linked page-table page would make
                    // walks spin.
                    // SAFETY: this thread has just read the address in the PTE and unlinked the
                    // page-table page, and earlier passes have emptied it. No fault fills it: the
                    // range is in flight. The batch gets the block below.
                    unsafe { self.take_over(guard, value.table_below(), level.down(), block.start) }
                    self.batch.add(block);
                    nr_steps += F::TABLE_ENTRIES as u64;
                }
                done
            }
            // Earlier passes have emptied what is below.
            State::Table if level <= self.pass && self.pass > Level::L4K => Ok(()),
            State::Table => {
                cursor.step_down();
                return Next::Again(0);
            }
        };
        match done {
            Ok(()) => Next::Advance(nr_steps),
            Err(Changed) => Next::Again(0),
        }
    }

    /// The sequence number for a PTE of `level` that becomes empty; see the module.
    fn seq_for(&self, level: Level) -> InvalidationSeq {
        if level == Level::L4K { self.seq } else { self.op.tree.next_seq() }
    }

    /// Whether the leaf `value`, which maps `block`, is emptied as a whole: the range covers it, or
    /// there is no memory to split it. If not, the cache has the page-table page for the split.
    fn goes_whole(&mut self, guard: &Guard<'_>, value: Pte<F>, level: Level, block: GfnRange) -> bool {
        if self.range.covers(block) || self.is_out_of_memory {
            return true;
        }
        self.is_out_of_memory = self.table_for_split(guard, value, level).is_err();
        self.is_out_of_memory
    }

    /// Makes sure that the cache has a page-table page to split the leaf `value` of `level`,
    /// without waiting for memory. `Err`: the node that has none at hand.
    fn table_for_split(&mut self, guard: &Guard<'_>, value: Pte<F>, level: Level) -> Result<(), TableNode> {
        let node = split::placement_of(self.op.tree, value, level);
        if self.tables.has(1, node) {
            return Ok(());
        }
        let stats = &guard.participant().stats;
        self.tables.top_up(self.op.tree, stats, 1, node, AllocationWait::Never).map_err(|()| node)
    }

    fn may_unlink(&mut self) -> bool {
        let may_unlink = self.op.tree.epochs.nr_deferred_tables() < MAX_DEFERRED_TABLES;
        self.leaves_tables |= !may_unlink;
        may_unlink
    }

    /// Adds a page-table page of PTEs of `level`, which this thread unlinked inside `guard`, to
    /// the batch.
    ///
    /// PTEs of the lowest level stay as they are: empty, with numbers of this zap or of later ones,
    /// so that no fault installs there any more. PTEs above are frozen, because an overtaken fault
    /// could still link empty page-table pages there. What it has linked is added, too.
    ///
    /// # Safety
    /// The page-table page is one of the tree, and its address was read inside `guard`. This
    /// thread alone has unlinked it, or frozen the PTE above it. It has no leaf and gets none. The
    /// batch flushes what it covered.
    unsafe fn take_over(&mut self, guard: &Guard<'_>, table: Hpa, level: Level, start: Gfn) {
        // SAFETY: as the caller promises.
        let ptes = unsafe { node::linked_ptes::<H, F>(self.op.host(), guard, table, level) };
        for (index, pte) in (0..).zip(ptes.iter()) {
            if level == Level::L4K {
                debug_assert!(
                    matches!(pte.load().state(level), State::Empty(_)),
                    "a table is unlinked that is not empty"
                );
                if !cfg!(debug_assertions) {
                    break;
                }
                continue;
            }
            let gfn = Gfn(start.0 + index * level.nr_pages());
            // SAFETY: the page-table page is retired below.
            let old = unsafe { pte.freeze() };
            match old.state(level) {
                // SAFETY: this thread has just frozen the PTE. What was linked there is empty, too.
                State::Table => unsafe { self.take_over(guard, old.table_below(), level.down(), gfn) },
                // A recovery of an empty page-table page that was linked there. The page belongs to
                // the owner of the broken PTE.
                // SAFETY: the PTE was read inside the guard, and was broken.
                State::Broken => unsafe { broken::report_frozen(self.op, guard, old, level, gfn) },
                state => debug_assert!(matches!(state, State::Empty(_)), "a table is unlinked with a leaf in it"),
            }
        }
        // SAFETY: as the caller promises; its PTEs are empty, or were frozen above.
        unsafe { self.batch.add_unlinked(table) }
    }
}

/// Marks the page of `leaf` of `level`, which maps `range`, if the leaf's dirty bit is the only
/// record of a write for the dirty log.
#[inline]
pub(super) fn mark_dirty<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    guard: &Guard<'_>,
    leaf: Pte<F>,
    level: Level,
    range: GfnRange,
) {
    if !op.tree.config.first_write_faults(level) && leaf.is_dirty_for_log() {
        // No ring: a VM with rings logs by faults alone.
        log::mark_if_logging(op.slots, guard, None, range.start, range);
    }
}
