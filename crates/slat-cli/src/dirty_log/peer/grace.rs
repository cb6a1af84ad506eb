//! Grace periods for readers that may sleep, as SRCU has them: the writer waits until every read
//! guard that may have read the old pointer is over.
//!
//! There are two sets of counters, and readers use one of them at a time. A read guard counts its
//! beginning and its end in the set that was in use when it began. A grace period waits for the set
//! not in use: guards that read the index before the last change, and counted late. It then makes
//! that set the one in use, and waits for the other.
//!
//! No guard of a set is open if its ends, read first, equal its beginnings, with a fence between. A
//! beginning that is missed follows the fence, so its guard observes the new pointer.
//!
//! A vCPU is a reader while it runs its guest, from its entry to its next exit, and again in its
//! fault handler. So a grace period waits for all vCPUs that run. It does not wait for their next
//! fault: it *kicks* them, as an expedited grace period interrupts all CPUs. A kicked vCPU exits
//! and enters again.
//!
//! A kick here is a counter that a software CPU reads before each access, and an interrupt of the
//! CPUs that run: the one by which the machine flushes. The exit and the entry of a real CPU take
//! some microseconds more, and the scheduler's part in the grace period of 2012 more than that. So
//! this grace period is shorter than the hundred microseconds that were published, unless a vCPU's
//! thread was preempted: then it lasts until the thread runs again. (A real vCPU that is preempted
//! has exited.) So the old way is measured as it was only where the vCPUs have a CPU each, on an
//! idle machine.
//!
//! # Why each reader is kicked
//! A vCPU reads the counter of kicks before it reads which set is in use. A grace period changes
//! the set in use before it counts its kick. So a vCPU that has read the new count uses the new
//! set. A vCPU that uses the old set has read an older count: it notices the kick at its next
//! access.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

#[derive(Debug, Default)]
struct GuardCounters {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// The state of grace periods.
#[derive(Debug, Default)]
pub(super) struct GracePeriods {
    in_use: AtomicUsize,
    counters: [GuardCounters; 2],
    kicks: AtomicU64,
}

/// A vCPU's stay in its guest. It is not dropped: it ends by [`GracePeriods::exit_guest`].
#[derive(Debug)]
pub(super) struct InGuest {
    /// The set that counts it.
    set: usize,
    /// The kicks before it began.
    kicks: u64,
}

/// An open read guard.
#[derive(Debug)]
pub(super) struct ReadGuard<'a>(&'a GuardCounters);

impl Drop for ReadGuard<'_> {
    fn drop(&mut self) {
        // Release: the reads of the guard come before. Pairs with the acquire load in `wait_for`.
        self.0.ended.fetch_add(1, Ordering::Release);
    }
}

impl GracePeriods {
    pub(super) fn enter(&self) -> ReadGuard<'_> {
        ReadGuard(&self.counters[self.begin()])
    }

    /// A reader begins. Returns the set that counts it.
    fn begin(&self) -> usize {
        let set = self.in_use.load(Ordering::Relaxed);
        self.counters[set].begun.fetch_add(1, Ordering::Relaxed);
        // A store-load pair: the count is visible before the reader's reads; see `wait_for`.
        fence(Ordering::SeqCst);
        set
    }

    pub(super) fn enter_guest(&self) -> InGuest {
        // Acquire: the set in use is read after the kicks; pairs with `synchronize`.
        let kicks = self.kicks.load(Ordering::Acquire);
        InGuest { set: self.begin(), kicks }
    }

    /// Whether the vCPU was kicked since it entered.
    #[inline]
    pub(super) fn is_kicked(&self, stay: &InGuest) -> bool {
        self.kicks.load(Ordering::Relaxed) != stay.kicks
    }

    pub(super) fn exit_guest(&self, stay: InGuest) {
        drop(ReadGuard(&self.counters[stay.set]));
    }

    /// Waits until all guards that were open at the call are over. One thread at a time.
    /// `interrupt` interrupts the vCPUs that run.
    pub(super) fn synchronize(&self, interrupt: impl FnOnce()) {
        let before = self.in_use.load(Ordering::Relaxed);
        // The publication precedes the reads of the counts.
        fence(Ordering::SeqCst);
        self.wait_for(1 - before);
        self.in_use.store(1 - before, Ordering::Relaxed);
        // Release: a vCPU that reads the new count uses the new set.
        self.kicks.fetch_add(1, Ordering::Release);
        interrupt();
        fence(Ordering::SeqCst);
        self.wait_for(before);
    }

    fn wait_for(&self, index: usize) {
        let counters = &self.counters[index];
        loop {
            let ended = counters.ended.load(Ordering::Acquire);
            fence(Ordering::SeqCst);
            if counters.begun.load(Ordering::Relaxed) == ended {
                return;
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_grace_period_waits_for_open_guards_and_for_no_others() {
        let grace = GracePeriods::default();
        drop(grace.enter());
        (0..3).for_each(|_| grace.synchronize(|| ()));
        for _ in 0..2 {
            let (guard, is_over) = (grace.enter(), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    grace.synchronize(|| ());
                    is_over.store(true, Ordering::Relaxed);
                });
                thread::sleep(Duration::from_millis(20));
                assert!(!is_over.load(Ordering::Relaxed));
                drop(guard);
            });
            assert!(is_over.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn a_grace_period_kicks_the_vcpus_that_run_and_waits_for_their_exits() {
        let (grace, is_over) = (GracePeriods::default(), AtomicBool::new(false));
        let (nr_entered, nr_exits) = (AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut stay = grace.enter_guest();
                    nr_entered.fetch_add(1, Ordering::Relaxed);
                    while !is_over.load(Ordering::Relaxed) {
                        if grace.is_kicked(&stay) {
                            grace.exit_guest(stay);
                            nr_exits.fetch_add(1, Ordering::Relaxed);
                            stay = grace.enter_guest();
                        }
                        thread::yield_now();
                    }
                    grace.exit_guest(stay);
                });
            }
            while nr_entered.load(Ordering::Relaxed) < 2 {
                thread::yield_now();
            }
            (0..20).for_each(|_| grace.synchronize(|| ()));
            is_over.store(true, Ordering::Relaxed);
        });
        assert!(nr_exits.load(Ordering::Relaxed) >= 2);
        // A vCPU that stays although it was kicked is waited for.
        let (stay, is_over) = (grace.enter_guest(), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                grace.synchronize(|| ());
                is_over.store(true, Ordering::Relaxed);
            });
            while !grace.is_kicked(&stay) {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(5));
            assert!(!is_over.load(Ordering::Relaxed));
            grace.exit_guest(stay);
        });
        assert!(is_over.load(Ordering::Relaxed));
    }
}
