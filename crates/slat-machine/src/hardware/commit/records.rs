//! The ranges of the last flushes: one record for each flush, in a ring, by the flush's number.
//!
//! A CPU that has caught up with flush n and reads generation m reads records n + 1 to m and drops
//! their ranges. It may always drop more. So a record may be missing for any reason, and no thread
//! waits for one: a reader that does not find a record drops everything.
//!
//! # Implementation
//! - Flush n uses slot n % [`NR_RECORDS`]. The slot's *sequence* is `2 n + 1` while the flusher of
//!   n writes there, and `2 n` when the record is complete. It only rises, so each of its values
//!   occurs once.
//! - A flusher takes the slot by a compare-and-exchange from a complete record of an older flush.
//!   If another flusher is still writing (it may be preempted), or the record is newer, it writes
//!   none: its record stays missing. So a slot has one writer at a time.
//! - A reader copies the record between two reads of the sequence, and uses it only if both were `2
//!   n`.
//! - A flush with more ranges than a record holds writes none.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;
use slat::{Gfn, GfnRange};

use super::{Dropped, DroppedList, Scope};

/// Records that are kept: the most flushes that a running CPU lags behind, with many flushers. A
/// CPU that lags by more has slept, and probably has more ranges to drop than a [`DroppedList`]
/// holds.
pub(super) const NR_RECORDS: usize = 64;

/// Ranges in one record: the most that the engine passes to one flush.
pub(super) const MAX_RANGES: usize = 8;

/// In a sequence: the record is being written.
const WRITING: u64 = 1;

/// The sequence of the complete record of flush `number`.
const fn whole(number: u64) -> u64 {
    number << 1
}

#[derive(Debug, Default)]
struct FlushRecord {
    sequence: AtomicU64,
    /// [`Scope`], as its place in [`Scope::EACH`].
    scope: AtomicU64,
    nr_ranges: AtomicU64,
    /// Start and end of each range.
    bounds: [[AtomicU64; 2]; MAX_RANGES],
}

#[derive(Debug)]
pub(super) struct FlushRecords(Box<[CachePadded<FlushRecord>]>);

impl FlushRecords {
    pub(super) fn new() -> FlushRecords {
        // Sequence 0 is the record of flush 0, which does not exist: no reader looks for it.
        FlushRecords((0..NR_RECORDS).map(|_| CachePadded::default()).collect())
    }

    fn slot(&self, number: u64) -> &FlushRecord {
        &self.0[(number % NR_RECORDS as u64) as usize]
    }

    /// Writes what flush `number` drops, if its slot is free and large enough.
    pub(super) fn write(&self, number: u64, scope: Scope, ranges: &[GfnRange]) {
        if ranges.len() > MAX_RANGES {
            return;
        }
        let record = self.slot(number);
        // Relaxed: only a guess, which the exchange checks.
        let old = record.sequence.load(Ordering::Relaxed);
        if old & WRITING != 0 || old >= whole(number) {
            return;
        }
        // Acquire: pairs with the release of the record that is replaced, so its words come before
        // those written here. (Without it the older words could be the ones that stay.)
        let taken =
            record.sequence.compare_exchange(old, whole(number) | WRITING, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_err() {
            return;
        }
        // Release: pairs with the reader's fence. A reader that read one of the words below finds
        // at its second read of the sequence that the slot was taken.
        fence(Ordering::Release);
        record.scope.store(scope as u64, Ordering::Relaxed);
        record.nr_ranges.store(ranges.len() as u64, Ordering::Relaxed);
        for ([start, end], range) in record.bounds.iter().zip(ranges) {
            start.store(range.start.0, Ordering::Relaxed);
            end.store(range.end.0, Ordering::Relaxed);
        }
        // Release: a reader that finds the record complete observes its words.
        record.sequence.store(whole(number), Ordering::Release);
    }

    /// Takes the slot of flush `number` and stops, like a thread that was preempted there.
    #[cfg(test)]
    pub(super) fn begin_write_and_stop(&self, number: u64) {
        self.slot(number).sequence.store(whole(number) | WRITING, Ordering::Relaxed);
    }

    /// Copies the ranges of flush `number` to the front of `ranges`. Returns the scope, and how
    /// many; `None` if there is no record of it.
    fn read(&self, number: u64, ranges: &mut [GfnRange; MAX_RANGES]) -> Option<(Scope, usize)> {
        let record = self.slot(number);
        // Acquire: pairs with the release of the writer of this record, whose words (or newer ones)
        // are read below.
        if record.sequence.load(Ordering::Acquire) != whole(number) {
            return None;
        }
        let scope = Scope::EACH.get(record.scope.load(Ordering::Relaxed) as usize).copied()?;
        let nr_ranges = (record.nr_ranges.load(Ordering::Relaxed) as usize).min(MAX_RANGES);
        for (range, [start, end]) in ranges.iter_mut().zip(&record.bounds).take(nr_ranges) {
            range.start = Gfn(start.load(Ordering::Relaxed));
            range.end = Gfn(end.load(Ordering::Relaxed));
        }
        // Acquire: if one of the words above was a later writer's, its fence comes before this one,
        // and the read below finds that it had taken the slot.
        fence(Ordering::Acquire);
        (record.sequence.load(Ordering::Relaxed) == whole(number)).then_some((scope, nr_ranges))
    }

    /// What the flushes after number `last_seen` and up to number `now` drop; `None` if a record is
    /// missing or there is no room for all.
    pub(super) fn between(&self, last_seen: u64, now: u64) -> Option<DroppedList> {
        let mut all = DroppedList::new();
        let mut ranges = [GfnRange::new(Gfn(0), 0); MAX_RANGES];
        // From the oldest on: if the reader lags too far, the oldest is the missing one.
        for number in last_seen + 1..=now {
            let (scope, nr_ranges) = self.read(number, &mut ranges)?;
            if !ranges[..nr_ranges].iter().all(|&range| all.add(Dropped { scope, range })) {
                return None;
            }
        }
        Some(all)
    }
}
