//! Threads that are preempted with a lock of shadow paging, and threads that are not.
//!
//! A process cannot disable preemption as a kernel does. The nearest that it has is the scheduling
//! class: a thread of `SCHED_FIFO` is preempted by no thread of another class. Two system calls for
//! each lock are much slower than a kernel's counter, but what a waiter waits for is the same: a
//! thread that runs.

use std::cell::Cell;
use std::fmt;
use std::time::Instant;

/// What the scheduler may do with a thread that holds a lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Holders {
    /// Whatever it likes: `Host::preempt_disable` does nothing.
    MayBePreempted,
    /// They run until they release it.
    AreNotPreempted,
}

/// Durations by powers of two of nanoseconds.
#[derive(Clone, Copy)]
pub struct Durations([u64; 64]);

impl Durations {
    pub const NONE: Durations = Durations([0; 64]);

    fn count(&mut self, ns: u64) {
        self.0[(64 - ns.leading_zeros()).min(63) as usize] += 1;
    }

    pub fn add(&mut self, other: Durations) {
        for (sum, more) in self.0.iter_mut().zip(other.0) {
            *sum += more;
        }
    }

    /// The bound that `part` of all durations keep.
    fn bound_ns(&self, part: f64) -> u64 {
        let needed = (self.0.iter().sum::<u64>() as f64 * part).ceil() as u64;
        let mut nr_below = 0;
        let power = self.0.iter().position(|nr| {
            nr_below += nr;
            nr_below >= needed
        });
        1 << power.unwrap_or(63)
    }
}

impl fmt::Display for Durations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nr = self.0.iter().sum::<u64>();
        let [half, most, all] = [0.5, 0.999, 1.0].map(|part| self.bound_ns(part));
        write!(f, "{nr}, half of them under {half} ns, 99.9% under {most} ns, all under {all} ns")
    }
}

thread_local! {
    /// Locks that this thread holds.
    static NR_HELD: Cell<u32> = const { Cell::new(0) };
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    static HELD_FOR: Cell<Durations> = const { Cell::new(Durations::NONE) };
}

/// How long this thread has held locks, the outermost each time.
pub fn held_for() -> Durations {
    HELD_FOR.get()
}

/// Puts this thread into a class of the scheduler. Returns whether it may.
fn set_class(class: libc::c_int, sched_priority: libc::c_int) -> bool {
    let parameters = libc::sched_param { sched_priority };
    // SAFETY: the parameters are read during the call.
    unsafe { libc::sched_setscheduler(0, class, &raw const parameters) == 0 }
}

impl Holders {
    /// Whether this process may do that.
    pub fn are_possible(self) -> bool {
        self == Holders::MayBePreempted || set_class(libc::SCHED_FIFO, 1) && set_class(libc::SCHED_OTHER, 0)
    }

    pub fn disable(self) {
        if self == Holders::AreNotPreempted && NR_HELD.replace(NR_HELD.get() + 1) == 0 {
            assert!(set_class(libc::SCHED_FIFO, 1));
            SINCE.set(Some(Instant::now()));
        }
    }

    pub fn enable(self) {
        if self == Holders::AreNotPreempted && NR_HELD.replace(NR_HELD.get() - 1) == 1 {
            let held = SINCE.take().expect("set when it began").elapsed();
            let mut all = HELD_FOR.get();
            all.count(held.as_nanos() as u64);
            HELD_FOR.set(all);
            assert!(set_class(libc::SCHED_OTHER, 0));
        }
    }
}
