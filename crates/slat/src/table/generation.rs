//! Generations of table entries: how they are kept from coming back.
//!
//! A closed table entry carries a generation, which each closing moves on (`entry`). A fault that pushes down opens the entry
//! by a compare-and-exchange from the value that it began with; if the entry was closed again meanwhile, that fails. But
//! generations are few (2048: so many bits hardware ignores), and a fault may be preempted for as long as the scheduler
//! likes. Had its entry been closed 2048 times by then, the exchange would succeed, and open leaves whose dirty bits were
//! taken long ago.
//!
//! So closings are counted, and not too many are allowed while a fault is on its way. Tables are closed in *turns*: one
//! section of a harvest or of an enabling, which closes each entry once at most. A turn asks to be admitted. There are
//! [`WINDOW`] admissions, and then the window must be renewed, which takes that all sections are over that were open when it
//! was renewed before. A turn that is not admitted protects leaf by leaf: nobody waits.
//!
//! Why that is enough: let a section S begin after renewal k and before renewal k+1. Then S keeps renewal k+2 from
//! happening. So while S is open turns close entries that were admitted before renewal k+2; and none that were admitted
//! before renewal k-1, for those had their sections open then, and renewal k came after they were over. That is at most
//! 3 [`WINDOW`] + [`LOW`] = 1600 closings of an entry, fewer than there are generations (`models/generation.py`).
//!
//! It takes that a turn is admitted inside the section in which it closes, and that a push-down reads the entry and exchanges
//! it in one section.

use super::retire::Epochs;
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// Turns that are admitted between two renewals. Few under the model checkers, so that they reach the end: under shuttle
/// table entries have eight generations.
const WINDOW: u64 = match () {
    () if cfg!(loom) => 1,
    () if cfg!(shuttle) => 2,
    () => 512,
};
/// The window is renewed when so few are left: early, so that mostly no turn is refused.
const LOW: u64 = if cfg!(any(loom, shuttle)) { 1 } else { 64 };

/// A turn may close entries.
#[derive(Clone, Copy)]
pub(crate) struct Admission;

/// How many turns were admitted, and how many may be.
pub(crate) struct Generations {
    nr_admitted: AtomicU64,
    limit: AtomicU64,
    /// Somebody is renewing the window.
    is_renewing: AtomicBool,
    /// Era that ended with the last renewal. Only for who is renewing.
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
        // Acquire of the limit: what is closed under it comes after its renewal looked at the sections. The count itself
        // orders nothing.
        let next = |nr_admitted| (nr_admitted < self.limit.load(Ordering::Acquire)).then_some(nr_admitted + 1);
        self.nr_admitted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok().map(|_| Admission)
    }

    /// Renews the window if it is nearly used up and that can be done now. To be called outside of sections: it may make a
    /// barrier on all CPUs.
    #[inline]
    pub(crate) fn renew_if_low(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        let (limit, nr_admitted) = (self.limit.load(Ordering::Relaxed), self.nr_admitted.load(Ordering::Relaxed));
        if limit.saturating_sub(nr_admitted) <= LOW {
            self.renew(epochs, barrier_on_all_cpus);
        }
    }

    #[cold]
    fn renew(&self, epochs: &Epochs, barrier_on_all_cpus: impl FnOnce()) {
        // Acquire: takes over what the last one left.
        if self.is_renewing.swap(true, Ordering::Acquire) {
            return;
        }
        let (limit, nr_admitted) = (self.limit.load(Ordering::Relaxed), self.nr_admitted.load(Ordering::Relaxed));
        // Again: the last one may have renewed it since this thread looked.
        if limit.saturating_sub(nr_admitted) <= LOW
            && self.renewed.load(Ordering::Relaxed) < epochs.oldest_open(barrier_on_all_cpus)
        {
            self.renewed.store(epochs.retire_era(), Ordering::Relaxed);
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

        let record = epochs.borrow_record().unwrap();
        for nr_turns_before in 0..WINDOW {
            admitted_of(nr_turns_before);
            let section = epochs.enter(&record);
            let admitted = admitted_of(4 * WINDOW);
            assert!((WINDOW / 2..=2 * WINDOW + LOW).contains(&admitted), "{admitted}");
            assert_eq!(admitted_of(5), 0, "a turn is refused and does not wait");
            drop(section);
            assert_eq!(admitted_of(5), 5);
        }
    }
}

#[cfg(all(test, loom))]
#[path = "generation_loom.rs"]
mod loom_tests;
