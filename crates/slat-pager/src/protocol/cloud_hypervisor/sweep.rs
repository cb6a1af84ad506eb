//! Tells the page faults of a guest from those that the VMM sends on its own.
//!
//! Between faults, Cloud Hypervisor asks for each page of the memory in turn, from the lowest
//! address on, and skips those that it asked for before. The frames are the same. A working set has
//! only what the guest touched: this follows the VMM's cursor and knows its requests by it.
//!
//! # What it takes for a sweep
//! A request *at the cursor* is one for the first page of the memory that was not asked for. One may
//! be a guest's: it has touched the first page of all, and then the next. Where pages are huge, that
//! is likely: the memory has few of them. A VMM that sweeps comes back to the cursor however often
//! its guest's faults come between. So [`SWEEP_REQUESTS`] requests at the cursor, in all, are a sweep,
//! and each later one is the VMM's. Fewer are the guest's.
//!
//! Until then they are recorded like a guest's, since they may be its own; with the last of them that
//! is undone ([`Asker::Vmm`]).
//!
//! # What it cannot tell
//! - A guest that touches so many pages, from the first on and in the order of the memory, is taken
//!   for a sweep. Its other pages are recorded.
//! - A fault of the guest at the cursor of a VMM that sweeps counts as the VMM's. It comes early
//!   anyway: the next VMM begins its sweep with those pages, too.
//! - Memory of fewer pages is recorded whole.

use std::ops::Range;

use crate::source::PAGE_BYTES;
use crate::source::pages::PageSet;

/// So many requests at the cursor are a sweep: 128 KiB of small pages, 64 MiB of huge ones.
pub(super) const SWEEP_REQUESTS: usize = 32;

/// What asked for a page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Asker {
    /// The guest, as far as is known.
    Guest,
    /// The VMM; and so did it for those pages, by their first bytes, which the guest was thought to
    /// have asked for.
    Vmm(Vec<u64>),
}

/// The cursor of the VMM, over memory whose slots lie one after the other.
#[derive(Debug)]
pub(super) struct Sweep {
    /// The pages that were asked for.
    asked: PageSet,
    /// The first page that was not asked for.
    next: u64,
    /// How many requests were at the cursor.
    nr_at_cursor: usize,
    /// The first bytes of those that are taken for the guest's.
    doubtful: Vec<u64>,
}

impl Sweep {
    pub(super) fn new(size_bytes: u64) -> Sweep {
        let asked = PageSet::new(size_bytes.div_ceil(PAGE_BYTES));
        Sweep { asked, next: 0, nr_at_cursor: 0, doubtful: Vec::new() }
    }

    /// Takes a request for the bytes `range`.
    pub(super) fn ask(&mut self, range: &Range<u64>) -> Asker {
        let is_at_cursor = range.start / PAGE_BYTES == self.next;
        self.asked.insert_bytes(range.clone());
        while self.asked.contains(self.next) {
            self.next += 1;
        }
        if !is_at_cursor {
            return Asker::Guest;
        }
        self.nr_at_cursor = self.nr_at_cursor.saturating_add(1);
        if self.nr_at_cursor >= SWEEP_REQUESTS {
            return Asker::Vmm(std::mem::take(&mut self.doubtful));
        }
        self.doubtful.push(range.start);
        Asker::Guest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HUGE_PAGE: u64 = 2 << 20;

    /// What a recording has in the end of those that asked for `pages` in this order.
    fn recorded(page_bytes: u64, nr_pages: u64, pages: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let mut sweep = Sweep::new(nr_pages * page_bytes);
        let mut recorded = Vec::new();
        for page in pages {
            match sweep.ask(&(page * page_bytes..(page + 1) * page_bytes)) {
                Asker::Guest => recorded.push(page),
                Asker::Vmm(doubtful) => recorded.retain(|page| !doubtful.contains(&(page * page_bytes))),
            }
        }
        recorded
    }

    /// A VMM that sweeps `nr_pages`, between the faults of its guest on `touched`.
    fn swept(nr_pages: u64, touched: &[u64]) -> Vec<u64> {
        let mut asked = std::collections::HashSet::new();
        let mut faults = touched.iter().copied();
        let mut all = Vec::new();
        for page in 0..nr_pages {
            if let Some(fault) = faults.next().filter(|fault| asked.insert(*fault)) {
                all.push(fault);
            }
            if asked.insert(page) {
                all.push(page);
            }
        }
        all
    }

    #[test]
    fn the_cursor_of_the_vmm_is_followed() {
        for page_bytes in [PAGE_BYTES, HUGE_PAGE] {
            // The guest faults ahead of the cursor, and behind it once more.
            let touched = [150, 100, 199, 151, 60, 61, 62, 63, 64, 180];
            let asked = swept(200, &touched).into_iter().chain([5]);
            assert_eq!(recorded(page_bytes, 200, asked), [&touched[..], &[5]].concat());
            // A sweep alone.
            assert!(recorded(page_bytes, 200, 0..200).is_empty());
        }
    }

    #[test]
    fn pages_that_a_guest_touches_in_order_are_its_own() {
        for page_bytes in [PAGE_BYTES, HUGE_PAGE] {
            let few = SWEEP_REQUESTS as u64 - 1;
            assert_eq!(recorded(page_bytes, 200, 0..few), Vec::from_iter(0..few));
            let touched = [0, 9, 1, 2, 130, 3, 4, 131];
            assert_eq!(recorded(page_bytes, 200, touched), touched);
            // Of one that goes on, what is elsewhere stays.
            let asked = [150, 70].into_iter().chain(0..few + 1).chain([160]);
            assert_eq!(recorded(page_bytes, 200, asked), [150, 70, 160]);
        }
    }

    #[test]
    fn the_end_of_the_memory_is_no_end_of_the_words() {
        let mut sweep = Sweep::new(3 * PAGE_BYTES);
        assert_eq!(sweep.ask(&(0..2 * PAGE_BYTES)), Asker::Guest);
        assert_eq!(sweep.ask(&(2 * PAGE_BYTES..3 * PAGE_BYTES)), Asker::Guest);
        assert_eq!(sweep.ask(&(0..PAGE_BYTES)), Asker::Guest);
    }
}
