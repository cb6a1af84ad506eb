//! Taking mappings away: every leaf of a range goes, every empty entry gets the stamp, tables wholly inside are unlinked.
//!
//! The caller has published the range (nobody who looks from now on may map there), or has set the pages' userfault bits, and
//! taken `stamp` after that; see `table/stamp.rs`. It works in passes from the lowest level up. The first visits every entry and takes tables away
//! nowhere; each further pass unlinks the tables of one level, which are empty by then. So no single step is longer than
//! one table, and the walk can yield between any two.
//!
//! Whatever the guest did through a leaf is reported to the host before the leaf goes, and leaves go one by one, before
//! their table. For another zap of the same page may find it empty already, and its caller then frees the frame: by then
//! all must have been told, whoever was to tell it and was preempted (`models/zap.py`).
//!
//! A huge leaf that the range covers in part is split first, so that what lies beside the range stays mapped. The table
//! for that is asked for without waiting: an invalidation may run inside the host's reclaim of memory. Without memory the
//! whole leaf goes, and its neighbours fault again. An empty entry gets the stamp as a whole: no table is made for memory
//! that was never mapped, and a fault beside the range that had looked already looks once more (`vcpu/act.rs`).
//!
//! # Unflushed entries
//! Where the range covers an unflushed entry ([`Stamp::unflushed`]) in part, the zap's stamp has no
//! such flag. So invalidations beside a fault never keep it from linking tables there
//! (`Fault::refine`): the first of them clears the flag.
//!
//! The zap reads the entry, leaves its section, flushes the entry's block, and exchanges the very
//! value that it read. That value never comes back, so no CPU has cached anything there since the
//! flush. If the exchange fails, another operation has changed the entry. The zap flushes again
//! only if the entry is unflushed once more with a stamp below the zap's own. Such a stamp was taken
//! before, and is stored once: so these flushes are at most as many as the operations that had one
//! in hand then.
//!
//! # Which stamp
//! An entry of the lowest level gets the zap's own stamp; each entry above gets a fresh one, taken for it alone. So no
//! value ever comes back to a page, which `table/stamp.rs` relies on. Entries of the lowest level are visited by the first
//! pass alone, which moves forward: it gives the own stamp to each page at most once. An entry above may speak for pages
//! that this zap has stamped already: where the table that they were in was unlinked meanwhile, in a further pass, and in a
//! rescan, which brings several ranges with one stamp.
//!
//! Unlinked tables wait for open sections. So that they never pile up, not even behind a section that was suspended, no
//! more are unlinked while [`MAX_PUT_OFF_TABLES`] wait: tables then stay linked, and their entries are emptied in place.

#![expect(unsafe_code, reason = "takes over the tables that it unlinks")]

use super::install::{self, Changed};
use super::{broken, split};
use crate::addr::{Gfn, GfnRange, Hpa, Level};
use crate::dirty::log;
use crate::format::{Entry, Format};
use crate::host::{AllocationWait, Host, ZappedLeaf};
use crate::slot::set::Slots;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::entry::{self, EntryRef, Stamp, State};
use crate::table::frames::{self, TableCache};
use crate::table::retire::Section;
use crate::table::tlb::TlbBatch;
use crate::table::walk::Cursor;

/// Entries visited before a walk leaves its section for a while (a table that is unlinked counts as
/// many).
const ENTRIES_PER_TURN: u64 = 4096;

/// Tables unlinked before they are flushed and retired.
pub(super) const TABLES_PER_FLUSH: u64 = 512;

/// Unlinked tables that may wait for their grace period; each zap may have [`TABLES_PER_FLUSH`] more in its hands.
pub(super) const MAX_PUT_OFF_TABLES: u64 = 1024;

/// What keeps faults from mapping again what a zap has emptied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Faults {
    /// The range is published, until the flush is over.
    KeptOut,
    /// Nothing, if user space changes its mind. So no table may be unlinked: it could have leaves again.
    MayComeBack,
}

/// Zaps `range`. What is to be flushed, and the tables, are in `batch` then.
pub(crate) fn zap_range<H: Host, F: Format>(
    slots: &Slots<H::Backing>,
    range: GfnRange,
    stamp: Stamp,
    faults: Faults,
    batch: &mut TlbBatch<'_, H, F>,
) {
    let (tree, record) = (batch.tree(), batch.record());
    if tree.epochs.nr_put_off_tables() >= MAX_PUT_OFF_TABLES {
        // The section that they waited for may be over by now.
        tree.reclaim();
    }
    let mut zap = Zap {
        tree,
        slots,
        range,
        stamp,
        faults,
        batch,
        tables: TableCache::new(),
        is_out_of_memory: false,
        leaves_tables: false,
        flushed: None,
    };
    let mut pass = Level::L4K;
    // From the second pass on there is work only if a whole block of the level is in the range.
    while pass == Level::L4K || (pass <= F::ROOT_LEVEL && range.has_block(pass)) {
        let mut next = range.start;
        while next < range.end {
            let locked = tree.enter(record, Side::Write);
            let end = zap.turn(&locked.section, next, pass);
            drop(locked);
            next = match end {
                TurnEnd::At(gfn) => gfn,
                TurnEnd::Yield(gfn) => {
                    // Whoever runs now finds nothing owed, and the tables are retired that much sooner.
                    zap.batch.flush();
                    tree.reclaim();
                    tree.host.yield_now();
                    gfn
                }
                TurnEnd::Break(gfn, value, level) => {
                    // Whether it worked or the entry has changed meanwhile: look again.
                    let _: Result<(), Changed> =
                        split::split_by_breaking(tree, slots, record, &mut zap.tables, gfn, value, level);
                    gfn
                }
                TurnEnd::Flush(gfn, value, level) => {
                    tree.flush(record, &[gfn.block(level)]);
                    zap.flushed = Some(value);
                    gfn
                }
            };
        }
        // A table above would take those that were left with it in one long step.
        if zap.leaves_tables || faults == Faults::MayComeBack {
            break;
        }
        pass = pass.up();
    }
    zap.tables.drain::<H, F>(&tree.host, &record.stats);
}

/// What counts leaves of `level` that are taken away.
pub(crate) fn zapped_leaf(level: Level) -> Counter {
    match level {
        Level::L4K => Counter::Zapped4K,
        Level::L2M => Counter::Zapped2M,
        _ => Counter::Zapped1G,
    }
}

/// Why a turn ended, and the first frame that it did not reach.
enum TurnEnd {
    /// The range's end, or a good place to go on from.
    At(Gfn),
    /// Somebody else should run.
    Yield(Gfn),
    /// A leaf that is covered in part must be broken before it is split.
    Break(Gfn, Entry, Level),
    /// This empty entry is unflushed, and the range covers it in part: it is flushed before it gets a stamp.
    Flush(Gfn, Entry, Level),
}

/// A zap under way.
struct Zap<'z, 't, H: Host, F: Format> {
    tree: &'t Tree<H, F>,
    slots: &'z Slots<H::Backing>,
    range: GfnRange,
    stamp: Stamp,
    faults: Faults,
    batch: &'z mut TlbBatch<'t, H, F>,
    tables: TableCache,
    is_out_of_memory: bool,
    /// Too many unlinked tables are waiting: some were left linked.
    leaves_tables: bool,
    /// The unflushed entry that was flushed last. Its stamp is in no other entry, and never comes back.
    flushed: Option<Entry>,
}

impl<H: Host, F: Format> Zap<'_, '_, H, F> {
    /// One section's worth of a pass: the lowest empties entries, a higher one unlinks the tables that hang on entries of
    /// its level.
    fn turn(&mut self, section: &Section<'_>, start: Gfn, pass: Level) -> TurnEnd {
        let range = self.range;
        let mut cursor = Cursor::new(self.tree, section, start);
        let mut visited = 0;
        let mut zapped = 0;
        let end = loop {
            if cursor.gfn() >= range.end {
                break TurnEnd::At(cursor.gfn());
            }
            let (entry, level, block) = (cursor.entry(), cursor.level(), cursor.block());
            let value = entry.load();
            let done = match entry::state::<F>(value, level) {
                State::Frozen => {
                    cursor.restart();
                    continue;
                }
                State::Broken => {
                    broken::cancel(self.tree, self.slots, section, &cursor);
                    continue;
                }
                State::Empty(found) if found >= self.stamp => Ok(()),
                State::Empty(found) => {
                    let is_unflushed = F::BREAK_BEFORE_MAKE && found.is_unflushed() && self.flushed != Some(value);
                    if is_unflushed && !range.covers(block) {
                        break TurnEnd::Flush(cursor.gfn(), value, level);
                    }
                    let stamp = self.stamp_for(level);
                    // A flush that is needed before the next make still is; nothing is taken away here that would need one.
                    let stamp = if is_unflushed { stamp.unflushed() } else { stamp };
                    install::take_away(&cursor, value, stamp).map(drop)
                }
                State::Leaf | State::Tracked if self.goes_whole(section, value, level, block) => {
                    // First: see the module. If hardware sets A or D meanwhile, the exchange fails, and is told anew.
                    mark_dirty(self.tree, self.slots, section, value, level, block);
                    report(self.tree, value, level, block);
                    let stamp = self.stamp_for(level);
                    // Beside the range nothing keeps a fault from making something else before the flush.
                    let may_come_back = self.faults == Faults::MayComeBack || !range.covers(block);
                    let stamp = if F::BREAK_BEFORE_MAKE && may_come_back { stamp.unflushed() } else { stamp };
                    let done = install::take_away(&cursor, value, stamp).map(drop);
                    if done.is_ok() {
                        // And once more: a harvest may have taken the mark and cleared D, and a CPU have set it again, before
                        // the exchange (`models/dirty_bit.py`).
                        mark_dirty(self.tree, self.slots, section, value, level, block);
                        self.batch.add(block);
                        section.record().stats.count(zapped_leaf(level));
                        zapped += 1;
                    }
                    done
                }
                State::Leaf | State::Tracked => {
                    if F::BREAK_BEFORE_MAKE {
                        break TurnEnd::Break(cursor.gfn(), value, level);
                    }
                    // Whether it worked or the entry has changed meanwhile: look again.
                    let _: Result<(), Changed> = install::split(&cursor, &self.tree.host, &mut self.tables, value);
                    continue;
                }
                State::Table if level == pass && range.covers(block) && self.may_unlink() => {
                    // A fresh stamp: greater ones than the zap's may have been left inside (`table/stamp.rs`).
                    let done = install::take_away(&cursor, value, self.tree.next_stamp()).map(drop);
                    if done.is_ok() {
                        // Not earlier: a table that is still linked must not have frozen entries, or walks would spin.
                        // SAFETY: this thread has just read and unlinked it, and earlier passes
                        // have emptied it. No fault fills it: the range is published. The batch
                        // gets the block.
                        unsafe { self.take_over(section, F::address(value, level), level.down(), block.start) }
                        self.batch.add(block);
                        zapped += 1;
                        visited += frames::nr_entries::<F>(level.down()) as u64;
                    }
                    done
                }
                // Earlier passes have left nothing below.
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
        section.visit(visited);
        section.record().stats.add(Counter::Zapped, zapped);
        end
    }

    /// The stamp for an entry of `level` that is to be empty; see the module.
    fn stamp_for(&self, level: Level) -> Stamp {
        if level == Level::L4K { self.stamp } else { self.tree.next_stamp() }
    }

    /// Whether the leaf `value`, which maps `block`, goes as it is: the range covers it, or there is no memory for the table
    /// that it is to be split into. Else the cache has that table.
    fn goes_whole(&mut self, section: &Section<'_>, value: Entry, level: Level, block: GfnRange) -> bool {
        if self.range.covers(block) || self.is_out_of_memory {
            return true;
        }
        let Tree { host, config, .. } = self.tree;
        let node = split::placement_of::<H, F>(config, host, value, level);
        if !self.tables.has(1, node) {
            let stats = &section.record().stats;
            self.is_out_of_memory = self.tables.top_up::<H, F>(host, stats, 1, node, AllocationWait::Never).is_err();
        }
        self.is_out_of_memory
    }

    fn may_unlink(&mut self) -> bool {
        let may_unlink = self.tree.epochs.nr_put_off_tables() < MAX_PUT_OFF_TABLES;
        self.leaves_tables |= !may_unlink;
        may_unlink
    }

    /// Gives a table that this thread unlinked inside `section`, and whose entries have `level`, to the batch.
    ///
    /// The entries of the lowest level are empty, each with a stamp of this zap or of one after it, so that no fault
    /// installs anything there any more: they may stay as they are. In a table above, a fault that was overtaken
    /// could still hang empty tables on an entry: those are frozen, and what was hung there is taken along.
    ///
    /// # Safety
    /// The table is one of the tree whose address was read inside `section`. This thread alone has
    /// unlinked it, or frozen the entry above it. It has no leaf and gets none. The batch flushes
    /// what it covered.
    unsafe fn take_over(&mut self, section: &Section<'_>, table: Hpa, level: Level, start: Gfn) {
        // SAFETY: as the caller promises.
        let cells = unsafe { frames::linked_entries::<H, F>(&self.tree.host, section, table, level) };
        for (index, cell) in (0..).zip(cells) {
            if level == Level::L4K {
                debug_assert!(
                    matches!(entry::state::<F>(EntryRef::new(cell, level).load(), level), State::Empty(_)),
                    "a table is unlinked that is not empty"
                );
                if !cfg!(debug_assertions) {
                    break;
                }
                continue;
            }
            let gfn = Gfn(start.0 + index * level.nr_pages());
            let old = EntryRef::new(cell, level).freeze();
            match entry::state::<F>(old, level) {
                // SAFETY: this thread has just frozen the entry. What was hung there is as empty.
                State::Table => unsafe { self.take_over(section, F::address(old, level), level.down(), gfn) },
                // A recovery of a table that was hung there, and is empty. That belongs to the one who broke it.
                // SAFETY: the entry was read inside the section, and was broken.
                State::Broken => unsafe { broken::tell_frozen(self.tree, self.slots, section, old, level, gfn) },
                state => debug_assert!(matches!(state, State::Empty(_)), "a table is unlinked with a leaf in it"),
            }
        }
        // SAFETY: as the caller promises; its entries are empty, or were frozen above.
        unsafe { self.batch.add_unlinked(table) }
    }
}

/// Marks the page of `leaf` of `level`, which maps `range`, if its dirty bit is all that tells the dirty log of it.
#[inline]
pub(super) fn mark_dirty<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    section: &Section<'_>,
    leaf: Entry,
    level: Level,
    range: GfnRange,
) {
    if !tree.config.first_write_faults(level) && entry::is_dirty_for_log::<F>(leaf) {
        // No ring: a VM that has rings logs by faults alone.
        log::mark_if_logging(slots, section, None, range.start, range);
    }
}

/// Tells the host what the guest did through `leaf` of `level`, which maps `range` and is about to go.
#[inline]
pub(crate) fn report<H: Host, F: Format>(tree: &Tree<H, F>, leaf: Entry, level: Level, range: GfnRange) {
    tree.host.leaf_zapped(ZappedLeaf {
        range,
        pfn: entry::frame::<F>(leaf, level),
        accessed: entry::is_accessed::<F>(leaf),
        dirty: entry::is_dirty::<F>(leaf),
    });
}
