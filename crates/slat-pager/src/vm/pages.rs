//! What the pager knows of each page of a machine.
//!
//! # Guarantees
//! - A page is in one of four states: *absent*, *in flight* (claimed by one thread, which brings
//!   it), *present* (filled once), *removed* (its contents were given up by the monitor; it reads
//!   as zeros from then on, and never as the snapshot has it).
//! - Of many threads that claim a page, one gets it.
//!
//! # Implementation
//! Three bitmaps. `taken` and `present` make the first three states; `removed` goes before both,
//! and is never cleared. `present` and `removed` survive the pager ([`State`]); `taken` does not,
//! so that no page stays in flight after the thread that brings it.
//!
//! # Why it is correct
//! A claim is one read-modify-write of `taken`. The thread that marks a page as removed excludes
//! all fills (the gate of [`install`](super::install)), so the accesses of the other two bitmaps
//! are ordered by the gate where it matters. A fault that reads them without it decides nothing
//! that the kernel does not check again; one that finds its page absent and cannot claim it looks
//! once more.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::state::State;

/// Pages of a word that one thread has claimed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claimed {
    /// The region, by its place.
    pub place: usize,
    /// The word; its first page has 64 times its number.
    pub word: usize,
    /// The pages.
    pub mask: u64,
}

impl Claimed {
    /// Page number of the word's first bit.
    pub fn first_page(self) -> u64 {
        self.word as u64 * 64
    }
}

/// What is known of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageState {
    /// Nothing was done for it.
    Absent,
    /// A thread brings it.
    InFlight,
    /// It was filled.
    Present,
    /// It reads as zeros.
    Removed,
}

/// The pages of a machine.
#[derive(Debug)]
pub struct Pages {
    taken: Box<[AtomicU64]>,
    state: Arc<State>,
}

impl Pages {
    /// As `state` has them.
    pub fn new(state: Arc<State>) -> Pages {
        let taken = state.present().iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed))).collect();
        Pages { taken, state }
    }

    /// What survives.
    pub fn state(&self) -> &Arc<State> {
        &self.state
    }

    /// The state of `page` now.
    pub fn get(&self, page: u64) -> PageState {
        let (word, mask) = bit(page);
        if self.removed(word) & mask != 0 {
            PageState::Removed
        } else if self.taken[word].load(Ordering::Acquire) & mask == 0 {
            PageState::Absent
        } else if self.state.present()[word].load(Ordering::Acquire) & mask == 0 {
            PageState::InFlight
        } else {
            PageState::Present
        }
    }

    /// Claims the absent pages of `mask`, and returns them.
    pub fn claim(&self, word: usize, mask: u64) -> u64 {
        let wanted = mask & !self.removed(word);
        // Acquire: pairs with `release`; what the last owner did to the pages is complete.
        let before = self.taken[word].fetch_or(wanted, Ordering::Acquire);
        wanted & !before
    }

    /// Gives up a claim: the pages are absent again.
    pub fn release(&self, word: usize, mask: u64) {
        self.taken[word].fetch_and(!mask, Ordering::Release);
    }

    /// Notes that claimed pages are filled.
    pub fn filled(&self, word: usize, mask: u64) {
        self.state.present()[word].fetch_or(mask, Ordering::Release);
    }

    /// The removed pages of a word.
    pub fn removed(&self, word: usize) -> u64 {
        self.state.removed()[word].load(Ordering::Acquire)
    }

    /// Notes that the monitor gives up the pages. The caller excludes fills.
    pub fn remove(&self, pages: Range<u64>) {
        for (word, mask) in masks(pages) {
            // `removed` first: a pager that is killed in between must not take the page as absent.
            self.state.removed()[word].fetch_or(mask, Ordering::Release);
            self.state.present()[word].fetch_and(!mask, Ordering::Release);
        }
    }
}

/// The word and the bit of a page.
pub fn bit(page: u64) -> (usize, u64) {
    ((page / 64) as usize, 1 << (page % 64))
}

/// The words that `pages` are in, with their bits.
pub fn masks(pages: Range<u64>) -> impl Iterator<Item = (usize, u64)> {
    let words = if pages.is_empty() { 0..0 } else { pages.start / 64..pages.end.div_ceil(64) };
    words.map(move |word| {
        let first = pages.start.saturating_sub(word * 64);
        let end = (pages.end - word * 64).min(64);
        (word as usize, (u64::MAX << first) & (u64::MAX >> (64 - end)))
    })
}

/// The runs of ones of `mask`, as bits.
pub fn runs(mut mask: u64) -> impl Iterator<Item = Range<u64>> {
    std::iter::from_fn(move || {
        let first = u64::from(mask.trailing_zeros());
        let run = first..first + u64::from((mask.checked_shr(first as u32)?).trailing_ones());
        mask &= !run_mask(&run);
        Some(run)
    })
}

/// The ones of `run`.
pub fn run_mask(run: &Range<u64>) -> u64 {
    if run.is_empty() { 0 } else { (u64::MAX << run.start) & (u64::MAX >> (64 - run.end)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pages(nr_words: usize) -> Pages {
        Pages::new(Arc::new(State::anonymous(1, nr_words).unwrap()))
    }

    #[test]
    fn a_page_goes_through_its_states() {
        let pages = pages(2);
        assert_eq!(pages.get(65), PageState::Absent);
        assert_eq!(pages.claim(1, 6), 6);
        assert_eq!(pages.get(65), PageState::InFlight);
        assert_eq!(pages.claim(1, 7), 1, "only what no thread has");
        pages.filled(1, 2);
        assert_eq!(pages.get(65), PageState::Present);
        pages.release(1, 4);
        assert_eq!(pages.get(66), PageState::Absent);
        pages.remove(60..67);
        assert_eq!([60, 65, 66].map(|page| pages.get(page)), [PageState::Removed; 3]);
        assert_eq!(pages.claim(1, 6), 0);
        assert_eq!(pages.get(67), PageState::Absent);
    }

    #[test]
    fn a_page_in_flight_is_absent_for_the_successor() {
        let pages = pages(1);
        assert_eq!(pages.claim(0, 3), 3);
        pages.filled(0, 1);
        let successor = Pages::new(Arc::clone(pages.state()));
        assert_eq!([0, 1].map(|page| successor.get(page)), [PageState::Present, PageState::Absent]);
    }

    proptest! {
        #[test]
        fn masks_have_each_page_once(start in 0..300u64, nr in 0..300u64) {
            let mut found: Vec<u64> = Vec::new();
            for (word, mask) in masks(start..start + nr) {
                prop_assert!(mask != 0);
                for run in runs(mask) {
                    found.extend(run.map(|bit| word as u64 * 64 + bit));
                }
            }
            prop_assert_eq!(found, (start..start + nr).collect::<Vec<_>>());
        }

        #[test]
        fn runs_are_what_a_mask_has(mask: u64) {
            let joined = runs(mask).fold(0, |all, run| all | run_mask(&run));
            prop_assert_eq!(joined, mask);
            let all: Vec<_> = runs(mask).collect();
            prop_assert!(all.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
