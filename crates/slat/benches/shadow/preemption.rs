//! Threads that are preempted with a lock of shadow paging, and threads that are not.
//!
//! A process cannot disable preemption as a kernel does. The nearest that it has is the scheduling
//! class: a thread of `SCHED_FIFO` is preempted by no thread of another class. Two system calls for
//! each lock are much slower than a kernel's counter, but what a waiter waits for is the same: a
//! thread that runs.

use std::cell::{Cell, RefCell};
use std::time::Instant;

/// What the scheduler may do with a thread that holds a lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Holders {
    /// Whatever it likes: `Host::preempt_disable` does nothing.
    MayBePreempted,
    /// They run until they release it.
    AreNotPreempted,
}

thread_local! {
    /// Locks that this thread holds.
    static NR_HELD: Cell<u32> = const { Cell::new(0) };
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
    static HELD_FOR_NS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
}

/// For how many nanoseconds this thread has held locks, the outermost each time.
pub fn take_held_for_ns() -> Vec<u64> {
    HELD_FOR_NS.take()
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
            assert!(set_class(libc::SCHED_OTHER, 0));
            HELD_FOR_NS.with_borrow_mut(|all| all.push(held.as_nanos() as u64));
        }
    }
}
