//! Where the CPUs of a run wait for each other.
//!
//! No CPU takes a lock there: an emulator that runs the CPUs in lock-step could let one CPU look at
//! the lock exactly when another one has it, for ever.

use core::sync::atomic::{AtomicU64, Ordering};

/// A barrier that is used again and again.
#[derive(Debug)]
pub(crate) struct Barrier {
    nr_cpus: u64,
    nr_arrivals: AtomicU64,
}

impl Barrier {
    /// One of `nr_cpus` CPUs.
    pub fn new(nr_cpus: usize) -> Barrier {
        Barrier { nr_cpus: nr_cpus as u64, nr_arrivals: AtomicU64::new(0) }
    }

    /// Returns when all CPUs have called it as often as this one.
    pub fn wait(&self) {
        // Release and acquire: what each CPU did before comes before what the others do after.
        let nr_before = self.nr_arrivals.fetch_add(1, Ordering::AcqRel);
        let end = (nr_before / self.nr_cpus + 1) * self.nr_cpus;
        while self.nr_arrivals.load(Ordering::Acquire) < end {
            core::hint::spin_loop();
        }
    }
}
