//! Taking mappings away: every leaf of a range goes, every empty entry gets the stamp, tables wholly inside are unlinked.
//!
//! The caller has withdrawn the range (nobody who looks from now on may map there) and taken `stamp` after that; see
//! `table/stamp.rs`. It works in passes from the lowest level up: the first visits every entry and unlinks the lowest
//! tables, each further pass finds the tables of the next level empty and unlinks them. So no single step is longer than
//! one table, and the walk can yield between any two.

use super::flush::FlushToken;
use crate::addr::{Gfn, GfnRange, Hpa, Level};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::entry::{self, EntryRef, Stamp, State};
use crate::table::frames;
use crate::table::retire::{Record, Section};
use crate::table::walk::Cursor;

/// Entries visited before a walk asks whether it should yield (a table that is unlinked counts as many).
const ENTRIES_PER_TURN: u64 = 4096;

/// Zaps `range`. `token` owes the flush, and owns the tables.
pub(crate) fn zap_range<H: Host, F: Format>(
    tree: &Tree<H, F>,
    record: &Record,
    range: GfnRange,
    stamp: Stamp,
    token: &mut FlushToken,
) {
    let mut pass = Level::L2M.min(F::ROOT_LEVEL);
    while pass <= F::ROOT_LEVEL {
        let mut next = range.start;
        while next < range.end {
            let locked = tree.enter(record, Side::Write);
            let rest = GfnRange { start: next, end: range.end };
            next = zap_turn(tree, &locked.section, rest, pass, stamp, token);
            drop(locked);
            if next < range.end {
                tree.host.yield_now();
            }
        }
        pass = pass.up();
    }
}

/// One section's worth of a pass, in which tables hanging on entries of level `pass` are unlinked. Returns the first
/// frame that it did not reach.
fn zap_turn<H: Host, F: Format>(
    tree: &Tree<H, F>,
    section: &Section<'_>,
    range: GfnRange,
    pass: Level,
    stamp: Stamp,
    token: &mut FlushToken,
) -> Gfn {
    let mut cursor = Cursor::new(tree, section, range.start);
    let mut visited = 0;
    let mut zapped = 0;
    while cursor.gfn() < range.end {
        let entry = cursor.entry();
        let value = entry.load();
        let done = match entry::state::<F>(value, cursor.level()) {
            State::Frozen => {
                cursor.restart();
                continue;
            }
            State::Empty(found) => found >= stamp || replace::<F>(entry, value, stamp),
            State::Leaf => {
                let done = replace::<F>(entry, value, stamp);
                if done {
                    token.owe(cursor.block());
                    zapped += 1;
                }
                done
            }
            State::Table if cursor.level() == pass && range.covers(cursor.block()) => {
                let done = replace::<F>(entry, value, stamp);
                if done {
                    // Not earlier: a table that is still linked must not have frozen entries, or walks would spin.
                    let level = cursor.level();
                    freeze_subtree(tree, section, F::address(value, level), level.down(), token);
                    token.owe(cursor.block());
                    zapped += 1;
                    visited += frames::nr_entries::<F>(level.down()) as u64;
                }
                done
            }
            // Below the pass's level is nothing left to do: earlier passes were there.
            State::Table if cursor.level() <= pass && pass > Level::L2M && range.covers(cursor.block()) => true,
            State::Table => {
                cursor.descend(value);
                continue;
            }
        };
        if done {
            cursor.advance();
            visited += 1;
            if visited >= ENTRIES_PER_TURN {
                visited = 0;
                if tree.should_yield() {
                    break;
                }
            }
        }
    }
    section.record().stats.add(Counter::Zapped, zapped);
    cursor.gfn()
}

/// Makes `entry` empty with `stamp`, if it still holds `value`.
fn replace<F: Format>(entry: EntryRef<'_>, value: Entry, stamp: Stamp) -> bool {
    entry.compare_exchange::<F>(value, entry::empty(stamp)).is_ok()
}

/// Freezes a subtree that this thread unlinked inside `section`, and gives its tables to the token.
fn freeze_subtree<H: Host, F: Format>(
    tree: &Tree<H, F>,
    section: &Section<'_>,
    table: Hpa,
    level: Level,
    token: &mut FlushToken,
) {
    for cell in frames::linked_entries::<H, F>(&tree.host, section, table, level) {
        let old = EntryRef::new(cell, level).freeze();
        if entry::state::<F>(old, level) == State::Table {
            freeze_subtree(tree, section, F::address(old, level), level.down(), token);
        }
    }
    token.tables.push(&tree.host, table);
}
