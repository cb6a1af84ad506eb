//! Waiting for a descriptor or for a moment, to about a microsecond.
//!
//! A latency of 30 µs cannot be slept. A thread's timers may fire 50 µs late by default (the timer
//! slack, Documentation/timers/ and prctl(2)), and a virtual CPU that went idle takes another 20 to
//! 40 µs to come back. So a thread that waits here has no slack. It sleeps only as long as it
//! surely wakes too early, and then polls the clock.
//!
//! Polling the clock takes a CPU. So between two reads the thread yields. If another thread took
//! the CPU, there are more threads than CPUs. Then the CPU does not become idle either, timers are
//! prompt, and the thread sleeps the rest.

use std::cell::Cell;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use crate::linux::clock::timestamp_ns;
use crate::linux::descriptors::poll;

/// A sleep is ended this much before the moment. A virtual CPU of the machine on which this was
/// measured (idle, slack 1 ns) needs 20 to 40 µs to come back.
const WAKE_UP_NS: u64 = 45_000;

/// If a yield took longer, another thread had the CPU.
const YIELD_NS: u64 = 3_000;

thread_local! {
    static SLACK_IS_GONE: Cell<bool> = const { Cell::new(false) };
}

/// Waits until one of the descriptors is readable (or closed, or broken), or until a moment of
/// [`timestamp_ns`]. Returns whether it was a descriptor. A moment in the past only polls;
/// `u64::MAX` never comes. The thread's timer slack is 1 ns from the first wait on.
///
/// # Errors
/// Those of ppoll(2). A signal is not an error.
pub fn wait_until(descriptors: &[BorrowedFd<'_>], until_ns: u64) -> io::Result<bool> {
    let entry = |&descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
    wait(&mut descriptors.iter().map(entry).collect::<Vec<_>>(), until_ns)
}

/// As [`wait_until`]; each entry shows what happened to its descriptor.
pub(super) fn wait(entries: &mut [PollFd<'_>], until_ns: u64) -> io::Result<bool> {
    let mut is_contended = false;
    loop {
        let now_ns = timestamp_ns();
        let left_ns = until_ns.saturating_sub(now_ns);
        let sleep_ns = match is_contended {
            true => left_ns,
            false => left_ns.saturating_sub(WAKE_UP_NS),
        };
        if sleep_ns > 0 {
            remove_slack();
        }
        let time_out = (until_ns != u64::MAX).then_some(Duration::from_nanos(sleep_ns));
        // Without descriptors there is nothing to poll between two reads of the clock.
        if (!entries.is_empty() || sleep_ns > 0) && poll(entries, time_out)? {
            return Ok(true);
        }
        if left_ns == 0 {
            return Ok(false);
        }
        if sleep_ns == 0 {
            let before_ns = timestamp_ns();
            thread::yield_now();
            is_contended = timestamp_ns().saturating_sub(before_ns) > YIELD_NS;
        }
    }
}

/// Sets this thread's timer slack to 1 ns (`PR_SET_TIMERSLACK`, prctl(2)). Where that is refused,
/// waits are longer.
fn remove_slack() {
    SLACK_IS_GONE.with(|gone| {
        if !gone.replace(true) {
            let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
        }
    });
}
