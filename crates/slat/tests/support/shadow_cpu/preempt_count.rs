//! How often a thread has disabled preemption: the other half of `Host::preempt_disable`, as a
//! kernel has it. The hosts of shadow paging check at each call what the engine may hold there.

use std::cell::Cell;

#[cfg(shuttle)]
use shuttle::thread_local;

thread_local! {
    static COUNT: Cell<u32> = const { Cell::new(0) };
}

pub fn disable() {
    COUNT.with(|count| count.set(count.get() + 1));
}

pub fn enable() {
    COUNT.with(|count| count.set(count.get().checked_sub(1).expect("preemption was not disabled")));
}

fn is_disabled() -> bool {
    COUNT.with(Cell::get) != 0
}

/// For what blocks, and for the end of each call of the engine.
#[track_caller]
pub fn assert_enabled() {
    // A thread that unwinds drops its locks on the way.
    assert!(!is_disabled() || std::thread::panicking(), "a thread that must not be preempted may block");
}

/// For what is called with a lock.
#[track_caller]
pub fn assert_disabled() {
    assert!(is_disabled(), "a thread with a lock may be preempted");
}

/// Calls `f` as another thread would: its count is its own.
pub fn as_another_thread<T>(f: impl FnOnce() -> T) -> T {
    let own = COUNT.with(|count| count.replace(0));
    let result = f();
    assert_enabled();
    COUNT.with(|count| count.set(own));
    result
}
