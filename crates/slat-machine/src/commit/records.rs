//! What the last flushes named: one record for each flush, in a ring, by the flush's number.
//!
//! A CPU that has caught up with flush n and sees generation m reads records n + 1 to m and drops
//! what they name. It may always drop more. So a record may be missing for any reason, and nobody
//! ever waits for one: whoever does not find the record it looks for drops everything.
//!
//! # The protocol
//! - Flush n belongs into slot n % [`NR_RECORDS`]. The slot's *sequence* is `2 n + 1` while the
//!   flusher of n writes there, and `2 n` when the record is whole. It only rises, so each of its
//!   values is there once.
//! - A flusher takes the slot by a compare-and-exchange from a whole record of an older flush. If
//!   it finds another that is still writing (it may have lost its processor), or a newer record, it
//!   goes without: its record stays missing. So a slot has one writer at a time.
//! - A reader copies the record between two looks at the sequence, and takes it only if it saw `2
//!   n` both times.
//! - A flush with more ranges than a record holds writes none.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;
use slat::{Gfn, GfnRange};

use super::RangeList;

/// Records that are kept: what a running CPU can lag behind many flushers. One that lags by more
/// has slept, and has probably more ranges to look for than a [`RangeList`] takes.
pub(super) const NR_RECORDS: usize = 64;

/// Ranges in one record: as many as the engine hands to one flush.
pub(super) const MAX_RANGES: usize = 8;

/// In a sequence: the record is being written.
const WRITING: u64 = 1;

/// The sequence of the whole record of flush `number`.
const fn whole(number: u64) -> u64 {
    number << 1
}

#[derive(Debug, Default)]
struct Record {
    sequence: AtomicU64,
    nr_ranges: AtomicU64,
    /// Start and end of each range.
    bounds: [[AtomicU64; 2]; MAX_RANGES],
}

#[derive(Debug)]
pub(super) struct Records(Box<[CachePadded<Record>]>);

impl Records {
    pub(super) fn new() -> Records {
        // Sequence 0 is the record of flush 0, which there is not: no reader looks for it.
        Records((0..NR_RECORDS).map(|_| CachePadded::default()).collect())
    }

    fn slot(&self, number: u64) -> &Record {
        &self.0[(number % NR_RECORDS as u64) as usize]
    }

    /// Keeps what flush `number` names, if its slot is free and large enough.
    pub(super) fn write(&self, number: u64, ranges: &[GfnRange]) {
        if ranges.len() > MAX_RANGES {
            return;
        }
        let record = self.slot(number);
        // Relaxed: only a guess, which the exchange proves.
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
        // Release: pairs with the reader's fence. A reader that got one of the words below sees at
        // its second look that the slot was taken.
        fence(Ordering::Release);
        record.nr_ranges.store(ranges.len() as u64, Ordering::Relaxed);
        for ([start, end], range) in record.bounds.iter().zip(ranges) {
            start.store(range.start.0, Ordering::Relaxed);
            end.store(range.end.0, Ordering::Relaxed);
        }
        // Release: who sees the record whole sees its words.
        record.sequence.store(whole(number), Ordering::Release);
    }

    /// Takes the slot of flush `number` and gets no further, like a thread that lost its processor
    /// there.
    #[cfg(test)]
    pub(super) fn begin_write_and_stop(&self, number: u64) {
        self.slot(number).sequence.store(whole(number) | WRITING, Ordering::Relaxed);
    }

    /// Copies the ranges of flush `number` to the front of `ranges` and says how many they are;
    /// `None` if there is no record of it.
    fn read(&self, number: u64, ranges: &mut [GfnRange; MAX_RANGES]) -> Option<usize> {
        let record = self.slot(number);
        // Acquire: pairs with the release of the writer of this record, whose words (or newer ones)
        // are read below.
        if record.sequence.load(Ordering::Acquire) != whole(number) {
            return None;
        }
        let nr_ranges = (record.nr_ranges.load(Ordering::Relaxed) as usize).min(MAX_RANGES);
        for (range, [start, end]) in ranges.iter_mut().zip(&record.bounds).take(nr_ranges) {
            range.start = Gfn(start.load(Ordering::Relaxed));
            range.end = Gfn(end.load(Ordering::Relaxed));
        }
        // Acquire: if one of the words above was a later writer's, its fence comes before this one,
        // and the look below sees that it had taken the slot.
        fence(Ordering::Acquire);
        (record.sequence.load(Ordering::Relaxed) == whole(number)).then_some(nr_ranges)
    }

    /// What the flushes behind number `last_seen` and up to number `now` name; `None` if a record
    /// is missing or there is no room for all.
    pub(super) fn between(&self, last_seen: u64, now: u64) -> Option<RangeList> {
        let mut all = RangeList::new();
        let mut ranges = [GfnRange::new(Gfn(0), 0); MAX_RANGES];
        // From the oldest on: if the reader lags too far, that is the one that is missing.
        for number in last_seen + 1..=now {
            let nr_ranges = self.read(number, &mut ranges)?;
            if !ranges[..nr_ranges].iter().all(|&range| all.add(range)) {
                return None;
            }
        }
        Some(all)
    }
}
