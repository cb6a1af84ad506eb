//! The counter of this process, which counts instructions on the emulated machine.

use crate::arch::{run_loop, ticks};
use crate::wrong::Wrong;

/// Turns of a loop of two instructions.
const TURNS: u64 = 10_000;

/// How often something is measured from which the timer's interrupts are to be kept.
const TRIES: u64 = 15;

/// The counter, less what reading it twice costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Clock {
    cost: u64,
}

impl Clock {
    /// Finds out what reading costs, and verifies that a loop of known length counts as that. Many
    /// loops are tried, since Linux's timer may come in one.
    pub(crate) fn new() -> Result<Clock, Wrong> {
        let free = Clock { cost: 0 };
        let cost = (0..TRIES).map(|_| free.time(|| ()).1).min().unwrap_or_default();
        let clock = Clock { cost };
        let found = (0..TRIES).map(|_| clock.time(|| run_loop(TURNS)).1).min().unwrap_or_default();
        // Besides the turns: perhaps one instruction that sets their number, and what a call has.
        if !(2 * TURNS..2 * TURNS + 8).contains(&found) {
            return Err(Wrong::Clock { of: "this process", expected: 2 * TURNS, found });
        }
        Ok(clock)
    }

    /// What `action` returns, and its instructions.
    pub(crate) fn time<T>(self, action: impl FnOnce() -> T) -> (T, u64) {
        let begin = ticks();
        let value = action();
        (value, (ticks() - begin).saturating_sub(self.cost))
    }
}

/// The least count; 0 of none.
pub(crate) fn least(counts: &[u64]) -> u64 {
    counts.iter().copied().min().unwrap_or_default()
}

/// The middle count, or the lower one of two; 0 of none.
pub(crate) fn median(mut counts: Vec<u64>) -> u64 {
    counts.sort_unstable();
    counts.get(counts.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_one_of_the_counts() {
        assert_eq!((least(&[9, 1, 5]), least(&[])), (1, 0));
    }

    #[test]
    fn the_median_is_one_of_the_counts() {
        assert_eq!(median(vec![9, 1, 5]), 5);
        assert_eq!(median(vec![9, 1, 5, 3]), 3);
        assert_eq!(median(Vec::new()), 0);
    }
}
