//! The window of admissions: it keeps generations of directory entries from coming back.
//!
//! # Guarantees
//! While a guard is open, a directory entry is protected at most 1600 times. That is fewer than
//! there are generations (2048), so a push-down fails if its directory entry was protected since it
//! read it.
//!
//! # Use
//! A *turn* is one guard of a harvest, or of an enabling of the log. It protects each directory
//! entry at most once.
//! 1. Outside of guards, the caller calls [`Generations::renew_if_low`].
//! 2. Inside the guard in which it protects, the turn asks for an [`Admission`]
//!    ([`Generations::admit`]). A turn without one protects leaf by leaf; it does not wait.
//!
//! A push-down reads the directory entry and exchanges it inside one guard.
//!
//! # Implementation
//! A protected directory entry carries a generation, which each protecting moves on (`pte`). A
//! fault that pushes down restores W by a compare-and-exchange from the value that it read first.
//! That fails if the entry was protected again meanwhile.
//!
//! Generations are few: so many bits hardware ignores. A preempted fault may sleep for any time.
//! After 2048 protectings its exchange would succeed, and restore W to leaves whose dirty bits were
//! taken long ago. So turns are counted. There are [`WINDOW`] admissions. The next [`WINDOW`] are
//! allowed by a renewal, which needs that all guards are over that were open at the renewal before.
//!
//! # Why it is correct
//! Let guard G begin after renewal k and before renewal k+1.
//! - Renewal k+2 needs that all guards are over that were open at renewal k+1, so it does not
//!   happen while G is open. All turns that protect while G is open were admitted before it.
//! - None of them was admitted before renewal k-1: the guard of such a turn was open then, and was
//!   over before renewal k.
//!
//! These are at most 3 [`WINDOW`] + [`RENEWAL_ROOM`] = 1600 protectings of an entry
//! (`models/proofs/generation_windows.py`).

use super::retire::Epochs;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// Turns that are admitted between two renewals. Few under the model checkers, so that a test uses
/// them up: under shuttle directory entries have eight generations.
const WINDOW: u64 = match () {
    () if cfg!(loom) => 1,
    () if cfg!(shuttle) => 2,
    () => 512,
};
/// The window is renewed when this many admissions are left: early, so that a turn is seldom
/// refused.
const RENEWAL_ROOM: u64 = if cfg!(any(loom, shuttle)) { 1 } else { 64 };

/// The right of a turn to protect directory entries.
#[derive(Clone, Copy)]
pub(crate) struct Admission;

/// Counts the admitted turns, and limits them.
pub(crate) struct Generations {
    nr_admitted: AtomicU64,
    limit: AtomicU64,
    /// Whether a thread is renewing the window.
    is_renewing: AtomicBool,
    /// The epoch that ended with the last renewal. Only the renewing thread accesses it.
    renewed: AtomicU64,
}

impl Generations {
    pub(crate) fn new() -> Generations {
        Generations {
            nr_admitted: AtomicU64::new(0),
            limit: AtomicU64::new(WINDOW),
            is_renewing: AtomicBool::new(false),
            renewed: AtomicU64::new(0),
        }
    }

    /// Admits a turn, if the window allows it.
    pub(crate) fn admit(&self) -> Option<Admission> {
        // Acquire of the limit: what is protected under it follows the renewal's reads of the
        // participants. The count itself orders nothing.
        let next = |nr_admitted| (nr_admitted < self.limit.load(Ordering::Acquire)).then_some(nr_admitted + 1);
        self.nr_admitted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok().map(|_| Admission)
    }

    /// Renews the window if it is nearly used up and the guards allow that now. Call it outside of
    /// guards: it may make a barrier on all CPUs.
    #[inline]
    pub(crate) fn renew_if_low(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        let (limit, nr_admitted) = (self.limit.load(Ordering::Relaxed), self.nr_admitted.load(Ordering::Relaxed));
        if limit.saturating_sub(nr_admitted) <= RENEWAL_ROOM {
            self.renew(epochs, barrier_on_all_cpus);
        }
    }

    #[cold]
    fn renew(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        // Acquire: observes what the last renewing thread stored.
        if self.is_renewing.swap(true, Ordering::Acquire) {
            return;
        }
        let (limit, nr_admitted) = (self.limit.load(Ordering::Relaxed), self.nr_admitted.load(Ordering::Relaxed));
        // Again: the last renewing thread may have renewed the window since this thread read.
        if limit.saturating_sub(nr_admitted) <= RENEWAL_ROOM
            && self.renewed.load(Ordering::Relaxed) < epochs.oldest_open(barrier_on_all_cpus)
        {
            self.renewed.store(epochs.advance_epoch(), Ordering::Relaxed);
            // Release: pairs with `admit`.
            self.limit.store(limit + WINDOW, Ordering::Release);
        }
        self.is_renewing.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    extern crate std;

    use std::cell::Cell;

    use super::*;
    use crate::table::retire::Fences;

    #[test]
    fn no_more_than_two_windows_are_admitted_while_a_section_is_open() {
        let epochs = Epochs::new(Fences::Remote);
        let generations = Generations::new();
        let nr_barriers = Cell::new(0);
        let admitted_of = |nr_turns: u64| {
            (0..nr_turns)
                .filter(|_| {
                    generations.renew_if_low(&epochs, || nr_barriers.set(nr_barriers.get() + 1));
                    generations.admit().is_some()
                })
                .count() as u64
        };
        assert_eq!(admitted_of(10 * WINDOW), 10 * WINDOW);
        assert!(nr_barriers.get() <= 10, "a window is renewed once: {}", nr_barriers.get());

        let participant = epochs.borrow_participant().unwrap();
        for nr_turns_before in 0..WINDOW {
            admitted_of(nr_turns_before);
            let guard = epochs.pin(&participant);
            let admitted = admitted_of(4 * WINDOW);
            assert!((WINDOW / 2..=2 * WINDOW + RENEWAL_ROOM).contains(&admitted), "{admitted}");
            assert_eq!(admitted_of(5), 0, "a turn is refused and does not wait");
            drop(guard);
            assert_eq!(admitted_of(5), 5);
        }
    }
}

#[cfg(all(test, loom))]
#[path = "generation_loom.rs"]
mod loom_tests;
