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
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// A sleep is ended this much before the moment. A virtual CPU of the machine on which this was
/// measured (idle, slack 1 ns) needs 20 to 40 µs to come back.
const WAKE_UP: Duration = Duration::from_micros(45);

/// If a yield took longer, another thread had the CPU.
const YIELD: Duration = Duration::from_micros(3);

thread_local! {
    static SLACK_IS_GONE: Cell<bool> = const { Cell::new(false) };
}

/// Waits until one of the descriptors is readable (or closed, or broken), or until a moment, if one
/// is given. Returns whether it was a descriptor. A moment in the past only polls. The thread's
/// timer slack is 1 ns from the first wait on.
///
/// # Errors
/// Those of ppoll(2). A signal is not an error.
pub fn wait_until(descriptors: &[BorrowedFd<'_>], until: Option<Instant>) -> io::Result<bool> {
    let entry = |&descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
    let mut entries: Vec<_> = descriptors.iter().map(entry).collect();
    let mut is_contended = false;
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let sleep = if is_contended { left } else { left.map(|left| left.saturating_sub(WAKE_UP)) };
        let sleeps = sleep != Some(Duration::ZERO);
        if sleeps {
            remove_slack();
        }
        // Without descriptors there is nothing to poll between two reads of the clock.
        if (!entries.is_empty() || sleeps) && poll_once(&mut entries, sleep)? {
            return Ok(true);
        }
        if left == Some(Duration::ZERO) {
            return Ok(false);
        }
        if !sleeps {
            let before = Instant::now();
            thread::yield_now();
            is_contended = before.elapsed() > YIELD;
        }
    }
}

fn poll_once(entries: &mut [PollFd<'_>], time_out: Option<Duration>) -> io::Result<bool> {
    let time_out = time_out.map(|time| Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    });
    match poll(entries, time_out.as_ref()) {
        Ok(nr_ready) => Ok(nr_ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
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

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn waiting_ends_at_the_moment_or_with_a_descriptor() {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let after = |us| Some(Instant::now() + Duration::from_micros(us));
        let until = after(300);
        assert!(!wait_until(&[reader.as_fd()], until).expect("a wait"));
        assert!(Some(Instant::now()) >= until);
        assert!(!wait_until(&[], Some(Instant::now())).expect("a look"));
        assert!(!wait_until(&[], after(100)).expect("a wait"));
        let thread = thread::spawn(move || {
            thread::sleep(Duration::from_millis(5));
            drop(writer);
        });
        assert!(wait_until(&[reader.as_fd()], None).expect("the other end is closed"));
        thread.join().expect("no panic");
    }
}
