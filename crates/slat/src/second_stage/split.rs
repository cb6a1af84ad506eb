//! Splitting huge leaves ahead of time, so that no vCPU has to: from the root down, 1 GiB to 2 MiB to 4 KiB.
//!
//! One pass, by as many threads as bring ranges. Each leaf is one step of its own: a table is filled with leaves one level
//! lower that allow the same (`install::split_into`), and takes the huge leaf's place by one compare-and-exchange from the
//! value that it was made of. If a fault, another split, or hardware that set A or D was first, the next look at the entry
//! says what is left to do, and the table is there for that. A split says nothing new, so no flush is owed, and it needs no
//! order with logging: rights, A and D are the huge leaf's.
//!
//! Tables are allocated where the memory is that they map, or wherever else the configuration says. The first try is made
//! inside the section and does not wait. If it fails, the section is left, waiting is allowed, and the walk goes on from
//! the leaf that it stood at.
//!
//! Where the format needs it ([`Format::BREAK_BEFORE_MAKE`]) the leaf is broken first, and flushed, and then the table
//! linked; its leaves allow the same unless the slot logs ([`split_by_breaking`]). A fault or a zap that meets the broken
//! entry meanwhile cancels that (`broken`); the table may then still be read by others,
//! and is retired.

#![expect(unsafe_code, reason = "retires the table that it has made in vain")]

use super::broken::find_broken;
use super::install::{self, Changed};
use crate::addr::{Gfn, GfnRange, Level};
use crate::config::Config;
use crate::dirty::log;
use crate::dirty::rings::WithoutRings;
use crate::error::Error;
use crate::format::{Entry, Format};
use crate::host::{AllocationWait, Host, TableNode};
use crate::slot::set::Slots;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::entry::{self, Breaking, State};
use crate::table::frames::{TableCache, TableUse};
use crate::table::retire::{Record, Section, TableChain};
use crate::table::walk::Cursor;

/// Leaves split, or entries passed by, before a walk leaves its section for a while.
const STEPS_PER_TURN: u64 = 32;

/// Splits all leaves larger than `target` that reach into `range` and whose block `is_wanted`. Returns how many it has split.
///
/// # Errors
/// [`Error::OutOfMemory`]: the rest is as it was.
pub(crate) fn split_range<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    record: &Record,
    range: GfnRange,
    target: Level,
    is_wanted: impl Fn(GfnRange) -> bool,
) -> Result<u64, Error> {
    let mut split = Split { tree, slots, record, range, target, is_wanted, tables: TableCache::new(), nr_split: 0 };
    let result = split.run();
    split.tables.drain::<H, F>(&tree.host, &record.stats);
    result.map(|()| split.nr_split)
}

/// Why a turn ended, and the frame to go on from.
enum TurnEnd {
    /// The range's end, or somebody else should run.
    At(Gfn),
    /// There is no table from this node at hand.
    NeedsTable(Gfn, TableNode),
    /// The leaf here must be broken, which takes a flush.
    Break(Gfn, Entry, Level),
}

struct Split<'t, H: Host, F: Format, W> {
    tree: &'t Tree<H, F>,
    slots: &'t Slots<H::Backing>,
    record: &'t Record,
    range: GfnRange,
    target: Level,
    is_wanted: W,
    tables: TableCache,
    nr_split: u64,
}

impl<H: Host, F: Format, W: Fn(GfnRange) -> bool> Split<'_, H, F, W> {
    fn run(&mut self) -> Result<(), Error> {
        let mut next = self.range.start;
        while next < self.range.end {
            let locked = self.tree.enter(self.record, Side::Read);
            let end = self.turn(&locked.section, next);
            drop(locked);
            next = match end {
                TurnEnd::At(gfn) => gfn,
                TurnEnd::NeedsTable(gfn, node) => {
                    let Tree { host, .. } = self.tree;
                    self.tables
                        .top_up::<H, F>(host, &self.record.stats, 1, node, AllocationWait::Allowed)
                        .map_err(|()| Error::OutOfMemory)?;
                    gfn
                }
                TurnEnd::Break(gfn, value, level) => {
                    // If somebody was first, the next look says what is left.
                    let Split { tree, slots, record, tables, .. } = self;
                    if split_by_breaking(tree, slots, record, tables, gfn, value, level).is_ok() {
                        self.nr_split += 1;
                    }
                    gfn
                }
            };
            if self.tree.should_yield() {
                self.tree.host.yield_now();
            }
        }
        Ok(())
    }

    /// One section's worth.
    fn turn(&mut self, section: &Section<'_>, start: Gfn) -> TurnEnd {
        let Tree { host, config, .. } = self.tree;
        let above_target = self.target.up();
        let mut cursor = Cursor::new(self.tree, section, start);
        let mut nr_steps = 0;
        while cursor.gfn() < self.range.end {
            // What lies below a table above leaves of the target's level is split already.
            let (value, state) = cursor.descend_to(above_target);
            if matches!(state, State::Leaf | State::Tracked)
                && cursor.level() >= above_target
                && (self.is_wanted)(cursor.block())
            {
                let node = placement_of::<H, F>(config, host, value, cursor.level());
                if !self.tables.has(1, node)
                    && self.tables.top_up::<H, F>(host, &self.record.stats, 1, node, AllocationWait::Never).is_err()
                {
                    return TurnEnd::NeedsTable(cursor.gfn(), node);
                }
                if F::BREAK_BEFORE_MAKE {
                    return TurnEnd::Break(cursor.gfn(), value, cursor.level());
                }
                let whole = parts_of::<F>(config, value, cursor.level());
                section.visit(cursor.level().nr_pages() / cursor.level().down().nr_pages());
                if install::split_into(&cursor, host, &mut self.tables, value, whole).is_ok() {
                    self.nr_split += 1;
                }
                // Down into it, or once more.
            } else {
                cursor.advance();
            }
            section.visit(1);
            nr_steps += 1;
            if nr_steps == STEPS_PER_TURN {
                break;
            }
        }
        TurnEnd::At(cursor.gfn())
    }
}

/// Where the table is to lie that replaces the leaf `value` of `level`.
pub(crate) fn placement_of<H: Host, F: Format>(config: &Config, host: &H, value: Entry, level: Level) -> TableNode {
    config.split_table_placement.node_for(host, Some(entry::frame::<F>(value, level)))
}

/// The leaf of `level` whose parts are to replace `value`: the same, but where leaves of the parts' level need not fault on
/// their first write to be seen, it may be written if the host allows it.
pub(crate) fn parts_of<F: Format>(config: &Config, value: Entry, level: Level) -> Entry {
    let may_write = !config.first_write_faults(level.down()) && entry::is_host_writable::<F>(value);
    if F::is_present(value) && may_write { Entry(value.0 | F::WRITABLE) } else { value }
}

/// Replaces the leaf `value` of `level`, more than 4 KiB, that maps `gfn` by a table, with a break and a flush between. The
/// cache must hold a table. Called outside of sections.
///
/// A protection passes the broken entry by. So the parts may be written if the leaf might be, but only where the slot does not
/// log before the break; and when they are linked, this reads the slot's flags again and marks all of them if it logs by then,
/// as a recovery does with what it makes writable (`recover`). Rings have no room for so many: where there are rings, the first
/// write of each part gives the right back; and where the parts keep it, no rings are enabled before they are marked.
pub(crate) fn split_by_breaking<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    record: &Record,
    tables: &mut TableCache,
    gfn: Gfn,
    value: Entry,
    level: Level,
) -> Result<(), Changed> {
    let without_rings = tree.rings.keep_out();
    let split = break_leaf(tree, slots, &without_rings, record, tables, gfn, (value, level))?;
    tree.flush(record, &[gfn.block(level)]);
    link_parts(tree, slots, record, gfn, level, &split)
}

/// A leaf that is broken, so that a table can take its place.
struct BrokenLeaf {
    broken: Entry,
    /// The entry that links the table.
    table: Entry,
    /// What the parts allow.
    whole: Entry,
}

/// The first section of [`split_by_breaking`], which is broken up so that it needs little of the stack.
#[inline(never)]
fn break_leaf<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    without_rings: &Option<WithoutRings<'_>>,
    record: &Record,
    tables: &mut TableCache,
    gfn: Gfn,
    (value, level): (Entry, Level),
) -> Result<BrokenLeaf, Changed> {
    let locked = tree.enter(record, Side::Read);
    let mut cursor = Cursor::new(tree, &locked.section, gfn);
    if cursor.descend_to_lowest().0 != value || cursor.level() != level {
        return Err(Changed);
    }
    let keeps_write = without_rings.is_some() && slots.find(&locked.section, gfn).is_some_and(|slot| !slot.logs());
    let whole = if keeps_write || !F::is_present(value) { value } else { Entry(value.0 & !F::WRITABLE) };
    let table = install::prepare_parts::<H, F>(&tree.host, tables, whole, level);
    let broken = entry::broken(F::address(table, level), Breaking::Split);
    cursor.entry().compare_exchange::<F>(value, broken).map_err(|_| Changed)?;
    // Others may find it from now on: it never goes back to the cache.
    tables.linked(&tree.host, &record.stats, 1, TableUse::Split, Some(entry::frame::<F>(value, level)));
    Ok(BrokenLeaf { broken, table, whole })
}

/// Its second section, after the flush.
#[inline(never)]
fn link_parts<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    record: &Record,
    gfn: Gfn,
    level: Level,
    split: &BrokenLeaf,
) -> Result<(), Changed> {
    let locked = tree.enter(record, Side::Read);
    if find_broken(tree, slots, &locked.section, gfn, level)
        .is_some_and(|cursor| cursor.entry().compare_exchange::<F>(split.broken, split.table).is_ok())
    {
        install::count_split(&record.stats, level);
        if entry::is_writable::<F>(split.whole) {
            let block = gfn.block(level);
            log::mark_if_logging(slots, &locked.section, None, block.start, block);
        }
        return Ok(());
    }
    drop(locked);
    let mut unlinked = TableChain::new();
    // SAFETY: it was never linked. A broken entry has named it, and does not any more.
    unsafe { unlinked.push(&tree.host, F::address(split.table, level)) }
    tree.epochs.retire_tables(&tree.host, unlinked);
    Err(Changed)
}
