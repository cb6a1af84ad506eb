//! Taking the right to write away for dirty logging: leaf by leaf, beside faults that give it back.
//!
//! Whoever calls has first made visible that the slot logs (or has taken the page's dirty bit), with a full fence
//! behind: a fault that then gives the right back, or had just given it, sees that and marks the page.

use super::install::Changed;
use crate::addr::{Gfn, GfnRange, Level};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::entry::{self, State};
use crate::table::retire::{Record, Section};
use crate::table::walk::Cursor;

/// Entries visited before a long walk asks whether it should yield.
const ENTRIES_PER_TURN: u64 = 4096;

/// Takes the right to write from the leaf `value` at the cursor. Returns whether it had it; `Err` if the entry is a leaf
/// no longer, so that the walk must look again.
#[inline]
fn protect_leaf<H: Host, F: Format>(cursor: &Cursor<'_, H, F>, mut value: Entry) -> Result<bool, Changed> {
    let entry = cursor.entry();
    while entry::is_writable::<F>(value) {
        if entry.level() == Level::L4K {
            return Ok(entry::is_writable::<F>(entry.clear::<F>(F::WRITABLE)));
        }
        match entry.compare_exchange::<F>(value, Entry(value.0 & !F::WRITABLE)) {
            Ok(()) => return Ok(true),
            Err(found) if entry::state::<F>(found, entry.level()) == State::Leaf => value = found,
            Err(_) => return Err(Changed),
        }
    }
    Ok(false)
}

/// Protects what is mapped at the cursor's frame, if anything is. Returns whether a leaf lost the right to write.
#[inline]
fn protect_frame<H: Host, F: Format>(cursor: &mut Cursor<'_, H, F>) -> bool {
    loop {
        match cursor.descend_to_lowest() {
            (value, State::Leaf) => {
                if let Ok(protected) = protect_leaf(cursor, value) {
                    return protected;
                }
            }
            // A tracked leaf has lost W already. If it is still cached as writable, its bit was set when it got W and not
            // taken since, so whoever takes it now flushes.
            _ => return false,
        }
    }
}

/// Protects the pages of `mask` (bit n: page `first + n`). The cursor was made after the pages' bits were taken: a path
/// from before could lead to a table that was unlinked since, and leave the leaf that matters untouched. Returns the
/// number of leaves that lost the right to write.
pub(crate) fn protect_mask<H: Host, F: Format>(cursor: &mut Cursor<'_, H, F>, first: Gfn, mask: u64) -> u64 {
    let mut rest = mask;
    let mut protected = 0;
    while rest != 0 {
        cursor.move_to(Gfn(first.0 + u64::from(rest.trailing_zeros())));
        rest &= rest - 1;
        protected += u64::from(protect_frame(cursor));
    }
    protected
}

/// Protects every leaf of `range`, in several sections if need be. Returns the number that lost the right to write.
/// The caller owes a flush of the range.
pub(crate) fn protect_range<H: Host, F: Format>(tree: &Tree<H, F>, record: &Record, range: GfnRange) -> u64 {
    let mut protected = 0;
    let mut next = range.start;
    while next < range.end {
        let locked = tree.enter(record, Side::Write);
        next = protect_turn(tree, &locked.section, GfnRange { start: next, end: range.end }, &mut protected);
        drop(locked);
        if next < range.end {
            tree.host.yield_now();
        }
    }
    record.stats.add(Counter::Protected, protected);
    protected
}

/// One section's worth of [`protect_range`]: returns the first frame that it did not reach.
fn protect_turn<H: Host, F: Format>(
    tree: &Tree<H, F>,
    section: &Section<'_>,
    range: GfnRange,
    protected: &mut u64,
) -> Gfn {
    let mut cursor = Cursor::new(tree, section, range.start);
    let mut visited = 0;
    while cursor.gfn() < range.end {
        *protected += u64::from(protect_frame(&mut cursor));
        cursor.advance();
        visited += 1;
        if visited % ENTRIES_PER_TURN == 0 && tree.should_yield() {
            break;
        }
    }
    cursor.gfn()
}
