//! Counts of instructions: the clock, and what is made of many counts.

use alloc::vec::Vec;

use crate::arch::clock;

/// Counts, one for each event.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Samples(Vec<u64>);

impl Samples {
    /// At least one.
    pub fn new(counts: Vec<u64>) -> Samples {
        assert!(!counts.is_empty(), "nothing was measured");
        Samples(counts)
    }

    /// The middle one, or the lower one of two.
    pub fn median(&self) -> u64 {
        let mut counts = self.0.clone();
        let middle = (counts.len() - 1) / 2;
        *counts.select_nth_unstable(middle).1
    }

    /// Each `nth` one, from the first on.
    pub fn each(&self, nth: u64) -> Samples {
        Samples::new(self.0.iter().step_by(nth as usize).copied().collect())
    }
}

/// The time-stamp counter, which counts instructions on this machine, less what reading it twice
/// costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Clock {
    cost: u64,
}

impl Clock {
    /// Finds out what reading costs.
    pub fn new() -> Clock {
        let free = Clock { cost: 0 };
        Clock { cost: Samples::new((0..15).map(|_| free.time(|| {})).collect()).median() }
    }

    /// Instructions for reading the counter twice: none of them is in any other count.
    pub fn cost(self) -> u64 {
        self.cost
    }

    /// Instructions of `action`, and of dropping what it returns.
    pub fn time<T>(self, action: impl FnOnce() -> T) -> u64 {
        let begin = clock::ticks();
        drop(action());
        (clock::ticks() - begin).saturating_sub(self.cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_one_of_the_counts() {
        assert_eq!(Samples::new(alloc::vec![7]).median(), 7);
        assert_eq!(Samples::new(alloc::vec![9, 1, 5, 3]).median(), 3);
        assert_eq!(Samples::new(alloc::vec![9, 1, 5]).median(), 5);
    }

    #[test]
    fn the_first_of_each_block_can_be_looked_at_alone() {
        let counts = Samples::new((0..10).collect());
        assert_eq!(counts.each(4), Samples::new(alloc::vec![0, 4, 8]));
    }
}
