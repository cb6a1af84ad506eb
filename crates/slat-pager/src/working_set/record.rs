//! Records which pages a VM faults on, in the order of first touch.
//!
//! # Guarantees
//! - Memory is bounded: a bit for each granule of the snapshot, and four bytes for each that may be
//!   recorded. All of it is allocated at the start.
//! - Each granule is recorded once, by the page of its first fault. What a replay fills is not
//!   recorded: only faults are.
//! - [`record`](Recorder::record) takes no lock and does not allocate.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::WorkingSet;
use crate::source::{Identity, PAGE_BYTES};
use crate::vm::Observer;

impl Observer for Recorder {
    fn faulted(&self, offset: u64) {
        self.record(offset);
    }
}

/// The most bytes of a working set, if no option says otherwise.
pub const DEFAULT_BYTES: u64 = 1 << 30;

/// See the [module](self).
#[derive(Debug)]
pub struct Recorder {
    identity: Identity,
    size_bytes: u64,
    around_bytes: u64,
    /// Granules that were recorded, or would have been.
    seen: Box<[AtomicU64]>,
    /// One more than the number of a page, or zero: not written yet, or forgotten.
    order: Box<[AtomicU32]>,
    nr_recorded: AtomicU64,
}

impl Recorder {
    /// For a snapshot of `size_bytes` bytes, of which at most `most_bytes` are recorded. Each fault
    /// fills `around_bytes`, a power of two, around its page: so does the replay.
    ///
    /// `None`: the snapshot has more pages than 32 bits number (16 TiB).
    pub fn new(identity: Identity, size_bytes: u64, around_bytes: u64, most_bytes: u64) -> Option<Recorder> {
        let nr_pages = size_bytes.div_ceil(PAGE_BYTES);
        u32::try_from(nr_pages).ok()?.checked_add(1)?;
        // A page is recorded for all that is filled around it.
        let around_bytes = around_bytes.max(PAGE_BYTES).checked_next_power_of_two()?;
        let most_pages = nr_pages.min(most_bytes.div_ceil(around_bytes)) as usize;
        Some(Recorder {
            identity,
            size_bytes,
            around_bytes,
            seen: (0..size_bytes.div_ceil(around_bytes).div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            order: (0..most_pages).map(|_| AtomicU32::new(0)).collect(),
            nr_recorded: AtomicU64::new(0),
        })
    }

    /// Records a fault on the page of byte `offset` of the snapshot.
    pub fn record(&self, offset: u64) {
        let granule = offset / self.around_bytes;
        let Some(word) = self.seen.get((granule / 64) as usize).filter(|_| offset < self.size_bytes) else { return };
        let bit = 1 << (granule % 64);
        // Relaxed, here and below: each word stands for itself. A set that is taken meanwhile may lack
        // pages that are recorded just then, as `working_set` says.
        if word.load(Ordering::Relaxed) & bit != 0 || word.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return;
        }
        let index = self.nr_recorded.fetch_add(1, Ordering::Relaxed);
        if let Some(entry) = usize::try_from(index).ok().and_then(|index| self.order.get(index)) {
            // Fits: checked when the recorder was made.
            entry.store((offset / PAGE_BYTES) as u32 + 1, Ordering::Relaxed);
        }
    }

    /// Records the page of byte `offset` no more, and not what was recorded for it: it was no fault
    /// of the VM. A page near it that is touched later is recorded, as [`record`](Self::record) does.
    /// Looks at all that was recorded.
    pub fn forget(&self, offset: u64) {
        let granule = offset / self.around_bytes;
        let Some(word) = self.seen.get((granule / 64) as usize).filter(|_| offset < self.size_bytes) else { return };
        let entry = (offset / PAGE_BYTES) as u32 + 1;
        let nr_recorded = self.nr_recorded.load(Ordering::Relaxed).min(self.order.len() as u64) as usize;
        if let Some(found) = self.order[..nr_recorded].iter().find(|found| found.load(Ordering::Relaxed) == entry) {
            found.store(0, Ordering::Relaxed);
            word.fetch_and(!(1 << (granule % 64)), Ordering::Relaxed);
        }
    }

    /// Whether as many pages were recorded as may be.
    pub fn is_full(&self) -> bool {
        self.nr_recorded.load(Ordering::Relaxed) >= self.order.len() as u64
    }

    /// What was recorded up to now. Pages that are recorded meanwhile may be missing.
    pub fn working_set(&self) -> WorkingSet {
        let nr_recorded = self.nr_recorded.load(Ordering::Relaxed).min(self.order.len() as u64) as usize;
        let pages = self.order[..nr_recorded].iter();
        let pages = pages.filter_map(|entry| entry.load(Ordering::Relaxed).checked_sub(1)).collect();
        WorkingSet { identity: self.identity, size_bytes: self.size_bytes, around_bytes: self.around_bytes, pages }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn recorder(size_bytes: u64, most_bytes: u64) -> Recorder {
        Recorder::new(Identity::from_bytes([1; 32]), size_bytes, PAGE_BYTES, most_bytes).unwrap()
    }

    #[test]
    fn pages_are_recorded_once_in_the_order_of_first_touch() {
        let recorder = recorder(1 << 20, 1 << 20);
        for offset in [8192, 4096, 8192 + 5, 0, 1 << 20, u64::MAX, 4096] {
            recorder.record(offset);
        }
        assert_eq!(recorder.working_set().pages, [2, 1, 0]);
    }

    #[test]
    fn a_granule_is_recorded_by_its_first_page() {
        let recorder = Recorder::new(Identity::from_bytes([1; 32]), 1 << 20, 1 << 16, 1 << 17).unwrap();
        for page in [17, 16, 31, 2, 0, 40] {
            recorder.record(page * PAGE_BYTES);
        }
        // Room for two granules.
        assert_eq!(recorder.working_set().pages, [17, 2]);
    }

    #[test]
    fn a_page_that_is_forgotten_was_not_recorded() {
        let recorder = Recorder::new(Identity::from_bytes([1; 32]), 1 << 20, 1 << 14, 1 << 20).unwrap();
        [9, 0, 4, 8, 12].iter().for_each(|page| recorder.record(page * PAGE_BYTES));
        // The second is of a granule that has another page; the last two are of none.
        [0, 8, 20, u64::MAX / PAGE_BYTES].iter().for_each(|page| recorder.forget(page * PAGE_BYTES));
        assert_eq!(recorder.working_set().pages, [9, 4, 12]);
        recorder.record(2 * PAGE_BYTES);
        assert_eq!(recorder.working_set().pages, [9, 4, 12, 2]);
    }

    #[test]
    fn a_recording_is_bounded() {
        let recorder = recorder(1 << 30, 16 * PAGE_BYTES);
        for page in 0..(1 << 30) / PAGE_BYTES {
            recorder.record(page * PAGE_BYTES);
        }
        assert!(recorder.is_full());
        assert_eq!(recorder.working_set().pages, Vec::from_iter(0..16));
        assert_eq!(recorder.order.len(), 16);
    }

    #[test]
    fn threads_record_each_page_once() {
        let recorder = recorder(1 << 24, 1 << 24);
        thread::scope(|scope| {
            for first in 0..8_u64 {
                let recorder = &recorder;
                scope.spawn(move || {
                    for page in 0..4096 {
                        recorder.record((page * 17 + first) % 4096 * PAGE_BYTES);
                    }
                });
            }
        });
        let mut pages = recorder.working_set().pages;
        pages.sort_unstable();
        assert_eq!(pages, Vec::from_iter(0..4096));
    }

    #[test]
    fn more_pages_than_32_bits_number_are_not_recorded() {
        assert!(Recorder::new(Identity::from_bytes([1; 32]), 1 << 44, PAGE_BYTES, 0).is_none());
    }
}
