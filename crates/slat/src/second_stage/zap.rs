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
//! `table/seq.rs`.
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
//! fresh one, taken for it alone. So no number comes back to a page, on which `table/seq.rs`
//! relies. Only the first pass visits PTEs of the lowest level, and it moves forward: each page
//! gets the own number at most once. A PTE above may stand for pages that have got it already. In a
//! further pass, their page-table page may have been unlinked meanwhile; in a rescan, several
//! ranges share one number.

#![expect(unsafe_code, reason = "takes over the tables that it unlinks")]

use super::install::{self, Changed};
use super::{broken, split};
use crate::addr::{Gfn, GfnRange, Hpa, Level};
use crate::dirty::log;
use crate::format::{Format, Pte};
use crate::host::{AllocationWait, Host, ZappedLeaf};
use crate::slot::set::Slots;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::node::{self, TableCache};
use crate::table::pte::{self, InvalidationSeq, PteRef, State};
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
    /// Nothing, once user space clears the userfault bit. So no page-table page may be unlinked: it
    /// could have leaves again.
    MayComeBack,
}

/// Zaps `range`. What is to be flushed, and the unlinked page-table pages, are in `batch` then.
pub(crate) fn zap_range<H: Host, F: Format>(
    slots: &Slots<H::Backing>,
    range: GfnRange,
    seq: InvalidationSeq,
    faults: Faults,
    batch: &mut TlbBatch<'_, H, F>,
) {
    let (tree, participant) = (batch.tree(), batch.participant());
    if tree.epochs.nr_deferred_tables() >= MAX_DEFERRED_TABLES {
        // The guards that they waited for may be over by now.
        tree.reclaim();
    }
    let mut zap = Zap {
        tree,
        slots,
        range,
        seq,
        faults,
        batch,
        tables: TableCache::new(),
        is_out_of_memory: false,
        leaves_tables: false,
        flushed: None,
    };
    let mut pass = Level::L4K;
    // A further pass has work only if the range has a whole block of the level.
    while pass == Level::L4K || (pass <= F::ROOT_LEVEL && range.has_block(pass)) {
        let mut next = range.start;
        while next < range.end {
            let locked = tree.pin(participant, Side::Write);
            let end = zap.turn(&locked.guard, next, pass);
            drop(locked);
            next = match end {
                TurnEnd::At(gfn) => gfn,
                TurnEnd::Yield(gfn) => {
                    // No flush is missing while other threads run, and the page-table pages are
                    // retired sooner.
                    zap.batch.flush();
                    tree.reclaim();
                    tree.host.yield_now();
                    gfn
                }
                TurnEnd::Break(gfn, value, level) => {
                    // If the PTE has changed meanwhile, the next turn reads it anew.
                    let _: Result<(), Changed> =
                        split::split_by_breaking(tree, slots, participant, &mut zap.tables, gfn, value, level);
                    gfn
                }
                TurnEnd::Flush(gfn, value, level) => {
                    tree.flush(participant, &[gfn.block(level)]);
                    zap.flushed = Some(value);
                    gfn
                }
            };
        }
        // Unlinking a page-table page above would take along those that were left, in one long
        // step.
        if zap.leaves_tables || faults == Faults::MayComeBack {
            break;
        }
        pass = pass.up();
    }
    zap.tables.drain::<H, F>(&tree.host, &participant.stats);
}

/// The counter of zapped leaves of `level`.
pub(crate) fn zapped_leaf(level: Level) -> Counter {
    match level {
        Level::L4K => Counter::Zapped4K,
        Level::L2M => Counter::Zapped2M,
        _ => Counter::Zapped1G,
    }
}

/// Why a turn ended, and the first frame that it did not reach.
enum TurnEnd {
    /// The range is done, or the next turn goes on from here.
    At(Gfn),
    /// Other threads should run.
    Yield(Gfn),
    /// A leaf that is covered in part must be broken before it is split.
    Break(Gfn, Pte, Level),
    /// An unflushed empty PTE that is covered in part must be flushed before it gets a number.
    Flush(Gfn, Pte, Level),
}

/// A zap under way.
struct Zap<'z, 't, H: Host, F: Format> {
    tree: &'t Tree<H, F>,
    slots: &'z Slots<H::Backing>,
    range: GfnRange,
    seq: InvalidationSeq,
    faults: Faults,
    batch: &'z mut TlbBatch<'t, H, F>,
    tables: TableCache,
    is_out_of_memory: bool,
    /// Too many unlinked page-table pages wait, so some were left linked.
    leaves_tables: bool,
    /// The unflushed PTE that was flushed last. No other PTE has its number, which never comes
    /// back.
    flushed: Option<Pte>,
}

impl<H: Host, F: Format> Zap<'_, '_, H, F> {
    /// One turn of a pass, in one guard. The lowest pass empties PTEs; a higher one unlinks the
    /// page-table pages below the PTEs of its level.
    fn turn(&mut self, guard: &Guard<'_>, start: Gfn, pass: Level) -> TurnEnd {
        let range = self.range;
        let mut cursor = Cursor::new(self.tree, guard, start);
        let mut visited = 0;
        let mut zapped = 0;
        let end = loop {
            if cursor.gfn() >= range.end {
                break TurnEnd::At(cursor.gfn());
            }
            let (pte, level, block) = (cursor.pte(), cursor.level(), cursor.block());
            let value = pte.load();
            let done = match pte::state::<F>(value, level) {
                State::Frozen => {
                    cursor.restart();
                    continue;
                }
                State::Broken => {
                    broken::cancel(self.tree, self.slots, guard, &cursor);
                    continue;
                }
                State::Empty(found) if found >= self.seq => Ok(()),
                State::Empty(found) => {
                    let is_unflushed = F::BREAK_BEFORE_MAKE && found.is_unflushed() && self.flushed != Some(value);
                    if is_unflushed && !range.covers(block) {
                        break TurnEnd::Flush(cursor.gfn(), value, level);
                    }
                    let seq = self.seq_for(level);
                    // The flag stays, for the flush is still due; the exchange itself makes none
                    // due.
                    let seq = if is_unflushed { seq.unflushed() } else { seq };
                    install::zap_pte(&cursor, value, seq).map(drop)
                }
                State::Leaf | State::Tracked if self.goes_whole(guard, value, level, block) => {
                    // Before the exchange: see the module. If hardware sets A or D meanwhile, the
                    // exchange fails, and the next try reports anew.
                    mark_dirty(self.tree, self.slots, guard, value, level, block);
                    report(self.tree, value, level, block);
                    let seq = self.seq_for(level);
                    // Beside the range nothing keeps a fault from making a PTE of another size
                    // before the flush.
                    let may_come_back = self.faults == Faults::MayComeBack || !range.covers(block);
                    let seq = if F::BREAK_BEFORE_MAKE && may_come_back { seq.unflushed() } else { seq };
                    let done = install::zap_pte(&cursor, value, seq).map(drop);
                    if done.is_ok() {
                        // Once more: before the exchange a harvest may have taken the mark and
                        // cleared D, and a CPU have set D again (`models/dirty_bit.py`).
                        mark_dirty(self.tree, self.slots, guard, value, level, block);
                        self.batch.add(block);
                        guard.participant().stats.count(zapped_leaf(level));
                        zapped += 1;
                    }
                    done
                }
                State::Leaf | State::Tracked => {
                    if F::BREAK_BEFORE_MAKE {
                        break TurnEnd::Break(cursor.gfn(), value, level);
                    }
                    // If the PTE has changed meanwhile, the next step reads it anew.
                    let _: Result<(), Changed> = install::split(&cursor, &self.tree.host, &mut self.tables, value);
                    continue;
                }
                State::Table if level == pass && range.covers(block) && self.may_unlink() => {
                    // A fresh number: greater ones than the zap's may have been left inside
                    // (`table/seq.rs`).
                    let done = install::zap_pte(&cursor, value, self.tree.next_seq()).map(drop);
                    if done.is_ok() {
                        // Not before the exchange: frozen PTEs in a linked page-table page would
                        // make walks spin.
                        // SAFETY: this thread has just read the address in the PTE and unlinked the
                        // page-table page, and earlier passes have emptied it. No fault fills it:
                        // the range is in flight. The batch gets the block below.
                        unsafe { self.take_over(guard, F::address(value, level), level.down(), block.start) }
                        self.batch.add(block);
                        zapped += 1;
                        visited += node::nr_ptes::<F>(level.down()) as u64;
                    }
                    done
                }
                // Earlier passes have emptied what is below.
                State::Table if level <= pass && pass > Level::L4K => Ok(()),
                State::Table => {
                    cursor.step_down();
                    continue;
                }
            };
            if done.is_ok() {
                cursor.advance();
                visited += 1;
                if self.batch.nr_unlinked() >= TABLES_PER_FLUSH {
                    break TurnEnd::Yield(cursor.gfn());
                }
                if visited >= ENTRIES_PER_TURN {
                    let next = cursor.gfn();
                    break if self.tree.should_yield() { TurnEnd::Yield(next) } else { TurnEnd::At(next) };
                }
            }
        };
        guard.visit(visited);
        guard.participant().stats.add(Counter::Zapped, zapped);
        end
    }

    /// The sequence number for a PTE of `level` that becomes empty; see the module.
    fn seq_for(&self, level: Level) -> InvalidationSeq {
        if level == Level::L4K { self.seq } else { self.tree.next_seq() }
    }

    /// Whether the leaf `value`, which maps `block`, is emptied as a whole: the range covers it, or
    /// there is no memory to split it. If not, the cache has the page-table page for the split.
    fn goes_whole(&mut self, guard: &Guard<'_>, value: Pte, level: Level, block: GfnRange) -> bool {
        if self.range.covers(block) || self.is_out_of_memory {
            return true;
        }
        let Tree { host, config, .. } = self.tree;
        let node = split::placement_of::<H, F>(config, host, value, level);
        if !self.tables.has(1, node) {
            let stats = &guard.participant().stats;
            self.is_out_of_memory = self.tables.top_up::<H, F>(host, stats, 1, node, AllocationWait::Never).is_err();
        }
        self.is_out_of_memory
    }

    fn may_unlink(&mut self) -> bool {
        let may_unlink = self.tree.epochs.nr_deferred_tables() < MAX_DEFERRED_TABLES;
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
        let cells = unsafe { node::linked_ptes::<H, F>(&self.tree.host, guard, table, level) };
        for (index, cell) in (0..).zip(cells) {
            if level == Level::L4K {
                debug_assert!(
                    matches!(pte::state::<F>(PteRef::new(cell, level).load(), level), State::Empty(_)),
                    "a table is unlinked that is not empty"
                );
                if !cfg!(debug_assertions) {
                    break;
                }
                continue;
            }
            let gfn = Gfn(start.0 + index * level.nr_pages());
            let old = PteRef::new(cell, level).freeze();
            match pte::state::<F>(old, level) {
                // SAFETY: this thread has just frozen the PTE. What was linked there is empty, too.
                State::Table => unsafe { self.take_over(guard, F::address(old, level), level.down(), gfn) },
                // A recovery of an empty page-table page that was linked there. The page belongs to
                // the owner of the broken PTE.
                // SAFETY: the PTE was read inside the guard, and was broken.
                State::Broken => unsafe { broken::report_frozen(self.tree, self.slots, guard, old, level, gfn) },
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
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    guard: &Guard<'_>,
    leaf: Pte,
    level: Level,
    range: GfnRange,
) {
    if !tree.config.first_write_faults(level) && pte::is_dirty_for_log::<F>(leaf) {
        // No ring: a VM with rings logs by faults alone.
        log::mark_if_logging(slots, guard, None, range.start, range);
    }
}

/// Notifies the host of what the guest did through `leaf` of `level`, which maps `range` and is
/// about to go.
#[inline]
pub(crate) fn report<H: Host, F: Format>(tree: &Tree<H, F>, leaf: Pte, level: Level, range: GfnRange) {
    tree.host.leaf_zapped(ZappedLeaf {
        range,
        pfn: pte::frame::<F>(leaf, level),
        accessed: pte::is_accessed::<F>(leaf),
        dirty: pte::is_dirty::<F>(leaf),
    });
}
