//! The time-stamp counter, which counts instructions on the emulated machine.

#![expect(unsafe_code, reason = "reads the counter, and runs a loop of known length")]

use std::arch::asm;

use crate::wrong::Wrong;

/// A loop of two instructions.
const TURNS: u64 = 10_000;

/// How often something is measured from which the timer's interrupts are to be kept.
const TRIES: u64 = 15;

fn ticks() -> u64 {
    // SAFETY: every x86-64 CPU has it, and reading it changes nothing.
    unsafe { core::arch::x86_64::_rdtsc() }
}

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
        let found = (0..TRIES).map(|_| clock.time(known_loop).1).min().unwrap_or_default();
        // Besides the turns: one instruction that sets their number, and what a call has.
        if !(2 * TURNS + 1..2 * TURNS + 8).contains(&found) {
            return Err(Wrong::Clock { of: "this process", expected: 2 * TURNS + 1, found });
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

fn known_loop() {
    // SAFETY: it changes a register.
    unsafe {
        asm!("2: dec {turns}", "jnz 2b", turns = inout(reg) TURNS => _, options(nomem, nostack));
    }
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
    fn the_median_is_one_of_the_counts() {
        assert_eq!(median(vec![9, 1, 5]), 5);
        assert_eq!(median(vec![9, 1, 5, 3]), 3);
        assert_eq!(median(Vec::new()), 0);
    }
}
