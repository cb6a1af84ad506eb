//! The debt of a change: what CPUs may still have cached, and the tables that they may still walk.
//!
//! An unlinked table belongs to the token that its unlinking made. Paying the token flushes, and only then retires the
//! tables; so a table is freed after no CPU can be in it (flush) and no thread of the engine (grace period).

use arrayvec::ArrayVec;

use crate::addr::GfnRange;
use crate::format::Format;
use crate::host::Host;
use crate::table::Tree;
use crate::table::retire::{Record, TableChain};

/// Ranges kept apart before they are merged into one that covers all.
const MAX_RANGES: usize = 8;

/// A flush that is owed. Must be paid by [`FlushToken::pay`], outside of sections and locks.
#[must_use]
pub(crate) struct FlushToken {
    ranges: ArrayVec<GfnRange, MAX_RANGES>,
    pub(crate) tables: TableChain,
}

impl FlushToken {
    pub(crate) fn new() -> FlushToken {
        FlushToken { ranges: ArrayVec::new(), tables: TableChain::new() }
    }

    /// Owes a flush of `range`.
    pub(crate) fn owe(&mut self, range: GfnRange) {
        let touches = |last: &&mut GfnRange| range.start <= last.end && last.start <= range.end;
        if let Some(last) = self.ranges.last_mut().filter(touches) {
            last.start = last.start.min(range.start);
            last.end = last.end.max(range.end);
        } else {
            let mut range = range;
            if self.ranges.is_full() {
                range.start = self.ranges.iter().map(|r| r.start).fold(range.start, Ord::min);
                range.end = self.ranges.iter().map(|r| r.end).fold(range.end, Ord::max);
                self.ranges.clear();
            }
            self.ranges.push(range);
        }
    }

    /// As [`pay`](Self::pay), for whom has seen to the shadow tables already.
    pub(crate) fn pay_in_cpus<H: Host, F: Format>(&mut self, tree: &Tree<H, F>, record: &Record) {
        if !self.ranges.is_empty() {
            tree.flush_cpus(record, &self.ranges);
            self.ranges.clear();
        }
        self.pay(tree, record);
    }

    /// Flushes what is owed, if anything is, then retires the tables.
    pub(crate) fn pay<H: Host, F: Format>(&mut self, tree: &Tree<H, F>, record: &Record) {
        if !self.ranges.is_empty() {
            tree.flush(record, &self.ranges);
            self.ranges.clear();
        }
        tree.epochs.retire_tables(&tree.host, core::mem::replace(&mut self.tables, TableChain::new()));
    }
}

/// A token that is paid when this is dropped: also where what a caller supplies panics between two
/// steps.
pub(crate) struct PaidAtEnd<'t, H: Host, F: Format> {
    tree: &'t Tree<H, F>,
    record: &'t Record,
    pub(crate) token: FlushToken,
}

impl<'t, H: Host, F: Format> PaidAtEnd<'t, H, F> {
    pub(crate) fn new(tree: &'t Tree<H, F>, record: &'t Record) -> PaidAtEnd<'t, H, F> {
        PaidAtEnd { tree, record, token: FlushToken::new() }
    }

    /// Flushes what is owed by now, and retires the tables.
    pub(crate) fn pay(&mut self) {
        self.token.pay(self.tree, self.record);
    }
}

impl<H: Host, F: Format> Drop for PaidAtEnd<'_, H, F> {
    fn drop(&mut self) {
        self.pay();
    }
}

impl Drop for FlushToken {
    fn drop(&mut self) {
        debug_assert!(self.ranges.is_empty() && self.tables.len() == 0, "a flush is still owed");
    }
}
