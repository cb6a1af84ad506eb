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
//!    PTEs. Where the range is a part of a block of 2 MiB, it begins at the page-table page of that
//!    block, without a walk in turns (`zap/small.rs`); a walk goes on from the first page that was
//!    not reached.
//! 2. Each further pass unlinks the page-table pages of one level that lie wholly inside the range.
//!    They are empty by then.
//!
//! A huge leaf that the range covers in part is split first. The page-table page for that is
//! allocated without waiting: an invalidation may run inside the host's reclaim of memory. Without
//! memory the whole leaf is emptied, and its neighbours fault again.
//!
//! A pinned leaf (`second_stage/map.rs`) is not reported: its frames are released after the flush.
//! If the range covers a part of it, the zap waits for memory to split it, since no fault would
//! bring its neighbours back. The caller has split that across the end of the range before
//! (`map::split_end`), and the zap visits that across its start first: without memory it fails
//! before it has changed anything.
//!
//! An empty PTE that the range covers in part gets a number as a whole: no page-table page is made
//! for memory that was never mapped. A fault beside the range that has read the PTE already reads
//! it once more (`vcpu/act.rs`).
//!
//! While [`MAX_DEFERRED_TABLES`] unlinked page-table pages wait, perhaps for a guard that was
//! suspended, no more are unlinked. The others stay linked, with empty PTEs.
//!
//! **Leaves that go unseen.** Where neither the host nor the engine needs the leaves
//! ([`Tree::may_unlink_leaves`](crate::table::Tree::may_unlink_leaves)), the first pass does not
//! visit them. At a directory entry of 1 GiB that the range covers, or of 2 MiB where it covers no
//! more, it
//! 1. exchanges the entry for an empty PTE with a fresh number,
//! 2. freezes the PTEs of the page-table page below, if they are directory entries. A frozen one
//!    keeps which page-table page of the lowest level it named. Of one of the lowest level it
//!    freezes two: the list of retired ones needs them,
//! 3. gives the page-table page to the batch, and with it those that it names, which it does not
//!    even read.
//!
//! The batch is flushed and retired as always. The leaves are counted when their page-table pages
//! are freed (`table/retire.rs`). While [`MAX_DEFERRED_LEAF_TABLES`] wait, the zap goes leaf by
//! leaf.
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
//! **Leaves that go unseen.** A fault that came to the page-table page before step 1 may still
//! install there: at an entry of 2 MiB before step 2, in a page of the lowest level at any time.
//! That is in vain, and harmless (`models/proofs/invalidation.py`):
//! - *Before the flush* a CPU that has the path cached may use the leaf. It is an answer that the
//!   host still holds true: it takes it back when this zap, or an earlier one of the page, has
//!   flushed. An earlier zap has visited the page, so the fault's exchange fails; or it came to the
//!   unlinked page-table page as well, and its flush ends the path.
//! - *After the flush* no CPU comes there. The guest faults again, on the empty PTE of step 1.
//! - *The dirty log* has each page that a fault has made writable, there too: a fault marks after
//!   its exchange. A harvest that misses the leaf has taken the page's bit, so it flushes the page.
//!   A mark for a page that is not mapped any more is a page that is copied once more. Where the
//!   dirty bit of a leaf is the only record of a write, the zap visits each leaf.
//! - *Page-table pages*: none is linked below a frozen PTE, and those of the lowest level name
//!   none. So each has one owner. One behind a broken PTE belongs to the owner of that PTE: its
//!   exchange fails, since the PTE is frozen, and it retires the page.
//! - *Pinned leaves* are released one by one. In a VM that has a pinned memslot the zap visits each
//!   leaf ([`Tree::note_pinned`](crate::table::Tree::note_pinned)).
//! - *Shadow pages* are made of leaves that were read, and checked by reading them again. So with
//!   derived tables the zap visits each leaf.
//! - *Break before make*: faults are kept out until the flush, so nothing of another size is made
//!   at the empty PTE before. (In a rescan they are not, [`Faults::MayComeBack`]: it unlinks
//!   nothing.) In a page-table page of the lowest level faults make only leaves of 4 KiB, which
//!   CPUs may have cached there anyway. So in these formats only such pages go with their leaves,
//!   each by an entry of 2 MiB.
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

mod small;
mod take_over;

use self::take_over::Room;
use super::broken::{self, BrokenPinned};
use super::install;
use super::split;
use super::walk::{self, Next, TurnEnd, Walk};
use crate::addr::{Gfn, GfnRange, Level};
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

/// As [`MAX_DEFERRED_TABLES`], with those that go with these because leaves go unseen: 256 MiB.
/// Each zap under way may hold [`LEAF_TABLES_PER_FLUSH`] more, and those of 1 GiB.
const MAX_DEFERRED_LEAF_TABLES: u64 = 1 << 16;

/// As [`TABLES_PER_FLUSH`], with those that go with these: of 32 GiB of leaves of 4 KiB.
const LEAF_TABLES_PER_FLUSH: u64 = 1 << 14;

/// The PTEs of a retired page-table page that the list needs.
const NR_LIST_PTES: usize = 2;

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
    op: &Operation<'t, H, F>,
    range: GfnRange,
    seq: InvalidationSeq,
    faults: Faults,
    batch: &mut TlbBatch<'t, H, F>,
) -> Result<u64, OutOfMemory> {
    let leaves_go_unseen = faults == Faults::KeptOut && op.tree.may_unlink_leaves();
    // The guards that they waited for may be over by now.
    if leaves_go_unseen && op.tree.epochs.nr_deferred_tables() >= MAX_DEFERRED_LEAF_TABLES {
        op.tree.reclaim_all();
    } else if op.tree.epochs.nr_listed_tables() >= MAX_DEFERRED_TABLES {
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
        leaves_go_unseen,
        flushed: None,
        broken: None,
        nr_pinned: 0,
        visited: range.start,
    };
    let mut rest = range;
    if range.is_part_of_block(Level::L2M) {
        rest.start = zap.zap_in_one_table();
        if rest.is_empty() {
            return Ok(zap.nr_pinned);
        }
    }
    let mut result = Ok(());
    // A further pass has work only if the range has a whole block of the level.
    while zap.pass == Level::L4K
        || (zap.pass <= op.tree.root_level() && !zap.is_in_one_pte && range.has_block(zap.pass))
    {
        result = walk::run(*op, rest, &mut zap);
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
    /// As `Retire`, and all is freed that can be.
    MakeRoom,
    /// A leaf that is covered in part is broken before it is split.
    Break(Pte<F>, Level),
    /// An unflushed empty PTE that is covered in part is flushed before it gets a number.
    Flush(Pte<F>, Level),
    /// There is no page-table page from this node to split a pinned leaf.
    Allocate(TableNode),
    /// Another thread splits a pinned leaf by breaking it: [`Zap::broken`].
    FinishSplit,
}

/// A zap under way.
struct Zap<'z, 't, H: Host, F: Format> {
    /// Not copied: a copy is read by vectors, just after it was stored word by word, and the CPU waits
    /// for that.
    op: &'z Operation<'t, H, F>,
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
    /// Page-table pages are unlinked with the leaves in them.
    leaves_go_unseen: bool,
    /// The unflushed PTE that was flushed last. No other PTE has its number, which never comes
    /// back.
    flushed: Option<Pte<F>>,
    /// Not in [`Work`], which is moved over the stack.
    broken: Option<BrokenPinned<F>>,
    /// Pinned pages that were zapped.
    nr_pinned: u64,
    /// The pages before this one were visited, by their PTEs of 4 KiB. Kept in debug builds.
    visited: Gfn,
}

impl<H: Host, F: Format> Walk<H, F> for Zap<'_, '_, H, F> {
    type Work = Work<F>;
    type Error = OutOfMemory;
    const SIDE: Option<Side> = Some(Side::Write);

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Work<F>> {
        let rest = GfnRange { start, ..self.range };
        let tree = self.op.tree;
        // The first pass has nothing to do with a directory entry, but to go down, where it unlinks
        // no page-table page.
        let goes_down = self.pass == Level::L4K && !(self.leaves_go_unseen && rest.has_block(Level::L2M));
        let cursor = if goes_down { Cursor::above_small(tree, guard, start) } else { Cursor::new(tree, guard, start) };
        let end = walk::visit_ptes_from(cursor, guard, rest, ENTRIES_PER_TURN, |cursor| self.visit(guard, cursor));
        match end {
            // No flush is missing while other threads run, and the page-table pages are retired
            // sooner.
            TurnEnd::At(gfn) if gfn < rest.end && self.op.tree.should_yield() => TurnEnd::Work(gfn, Work::Retire),
            end => end,
        }
    }

    // Never inlined: the turns do not need its stack.
    #[inline(never)]
    fn work(&mut self, gfn: Gfn, work: Work<F>) -> Result<Gfn, OutOfMemory> {
        match work {
            Work::Retire => {
                self.batch.flush();
                self.op.tree.reclaim();
            }
            Work::MakeRoom => {
                self.batch.flush();
                self.op.tree.reclaim_all();
            }
            // If the PTE has changed meanwhile, the next turn reads it anew.
            Work::Break(value, level) => {
                let _: Result<(), Changed> = split::split_by_breaking(*self.op, &mut self.tables, gfn, value, level);
            }
            Work::Flush(value, level) => {
                self.op.flush(&[gfn.block(level)]);
                self.flushed = Some(value);
            }
            Work::Allocate(node) => {
                let (tree, stats) = (self.op.tree, self.op.stats());
                self.tables.top_up(tree, stats, 1, node, AllocationWait::Allowed).map_err(|()| OutOfMemory)?;
            }
            Work::FinishSplit => {
                if let Some(broken) = self.broken.take() {
                    broken.finish(*self.op);
                }
            }
        }
        Ok(gfn)
    }
}

impl<H: Host, F: Format> Zap<'_, '_, H, F> {
    /// The highest level of a directory entry that is unlinked with the leaves below; see the
    /// module.
    const HIGHEST_UNSEEN: Level = if F::BREAK_BEFORE_MAKE { Level::L2M } else { Level::L1G };

    /// Visits the cursor's PTE.
    #[expect(clippy::too_many_lines, reason = "one match over all states of a PTE, each in a few lines")]
    #[inline]
    fn visit(&mut self, guard: &Guard<'_>, cursor: &mut Cursor<'_, H, F>) -> Next<Work<F>> {
        if self.batch.nr_unlinked() >= TABLES_PER_FLUSH || self.batch.nr_unlinked_with_leaves() >= LEAF_TABLES_PER_FLUSH
        {
            return Next::Leave(Work::Retire);
        }
        let (op, range) = (self.op, self.range);
        let (pte, level, block) = (cursor.pte(), cursor.level(), cursor.block());
        let value = pte.load();
        if level == Level::L4K {
            self.visits(cursor.gfn());
        }
        let mut nr_steps = 1;
        let done = match value.state(level) {
            State::Frozen => {
                cursor.restart();
                return Next::Again(0);
            }
            State::Broken => match broken::cancel(*op, guard, cursor) {
                None => return Next::Again(0),
                broken => {
                    self.broken = broken;
                    return Next::Leave(Work::FinishSplit);
                }
            },
            State::Empty(found) if found >= self.seq => {
                // The zap that stored it may not have come to that, and its flush may come later
                // than this one.
                pte.clean();
                Ok(())
            }
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
            State::Leaf if value.is_pinned() && range.covers(block) => match self.zap_pinned(cursor, value) {
                Ok(done) => done,
                Err(work) => return Next::Leave(work),
            },
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
                mark_dirty(*op, guard, value, level, block);
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
                    mark_dirty(*op, guard, value, level, block);
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
            State::Table
                if self.leaves_go_unseen
                    && level <= Self::HIGHEST_UNSEEN
                    && self.pass == Level::L4K
                    && range.covers(block) =>
            {
                match self.room_for_leaf_tables() {
                    Room::Yes => {}
                    Room::AfterFlush => return Next::Leave(Work::MakeRoom),
                    Room::No => {
                        cursor.step_down();
                        return Next::Again(0);
                    }
                }
                // SAFETY: this thread has just read the directory entry, at the cursor and in the guard.
                unsafe { self.unlink_with_leaves(guard, cursor, value) }.map(|nr_visited| nr_steps += nr_visited)
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
            State::Table if level == Level::L2M && self.pass == Level::L4K => {
                let Some((_, ptes)) = cursor.read_table(level) else { return Next::Again(0) };
                return self.zap_ptes(guard, cursor, ptes);
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

    /// Zaps the pinned leaf `value`, which the range covers, in the cursor's PTE.
    // Never inlined: the other arms do not need its stack.
    #[inline(never)]
    fn zap_pinned(&mut self, cursor: &Cursor<'_, H, F>, value: Pte<F>) -> Result<Result<(), Changed>, Work<F>> {
        let (level, block) = (cursor.level(), cursor.block());
        let pfn = self.op.tree.encoding.frame(value, level);
        if !self.batch.has_room_to_release(block, pfn) {
            return Err(Work::Retire);
        }
        let seq = self.seq_for(level);
        let may_come_back = F::BREAK_BEFORE_MAKE && self.faults == Faults::MayComeBack;
        let seq = if may_come_back { seq.unflushed() } else { seq };
        Ok(cursor.pte().zap_leaf(self.op.stats(), value, seq).map(|()| {
            self.batch.add(block);
            self.batch.add_released(block, pfn);
            self.nr_pinned += block.nr_pages();
        }))
    }

    /// The sequence number for a PTE of `level` that becomes empty; see the module.
    fn seq_for(&self, level: Level) -> InvalidationSeq {
        if level == Level::L4K { self.seq } else { self.op.tree.next_seq() }
    }

    /// The zap visits the PTE of 4 KiB for `gfn`, perhaps once more. It must not come back to it: the
    /// page could get the zap's own number twice.
    #[inline]
    fn visits(&mut self, gfn: Gfn) {
        if cfg!(debug_assertions) && self.pass == Level::L4K {
            debug_assert!(gfn >= self.visited, "{gfn} is visited after {}", self.visited);
            self.visited = gfn;
        }
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
    #[inline(never)]
    fn table_for_split(&mut self, guard: &Guard<'_>, value: Pte<F>, level: Level) -> Result<(), TableNode> {
        let node = split::placement_of(self.op.tree, value, level);
        if self.tables.has(1, node) {
            return Ok(());
        }
        let stats = &guard.participant().stats;
        self.tables.top_up(self.op.tree, stats, 1, node, AllocationWait::Never).map_err(|()| node)
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
