//! Interrupts the thread of a vCPU whose guest runs for too long, so that no command hangs.

#![expect(unsafe_code, reason = "sets the handler of a signal, and a timer that sends it")]

use std::io;
use std::time::{Duration, Instant};

/// The signal that makes the thread leave the guest. Its handler does nothing.
const NUDGE: libc::c_int = libc::SIGUSR2;
/// Time between signals: a signal just before the thread enters the guest does not keep it from
/// entering.
const AGAIN: Duration = Duration::from_millis(10);

/// A timer that, from its end on, sends signals to the thread that has made it.
pub(super) struct Watchdog {
    timer: libc::timer_t,
    until: Instant,
}

impl Watchdog {
    pub(super) fn new(limit: Duration) -> io::Result<Watchdog> {
        extern "C" fn nothing(_signal: libc::c_int) {}
        let time = |time: Duration| libc::timespec {
            tv_sec: time.as_secs() as libc::time_t,
            tv_nsec: libc::c_long::from(time.subsec_nanos()),
        };
        let times = libc::itimerspec { it_interval: time(AGAIN), it_value: time(limit) };
        let (until, mut timer) = (Instant::now() + limit, std::ptr::null_mut());
        // SAFETY: the handler does nothing, and no other code in this program uses the signal.
        // (`signal` would restart the system call.) All that is passed outlives the calls.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            libc::sigaction(NUDGE, &action, std::ptr::null_mut());
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = NUDGE;
            event.sigev_notify_thread_id = libc::gettid();
            if libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::timer_settime(timer, 0, &times, std::ptr::null_mut());
        }
        Ok(Watchdog { timer, until })
    }

    /// Whether the time is over.
    pub(super) fn has_expired(&self) -> bool {
        Instant::now() >= self.until
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        // SAFETY: the timer was made, and nothing else has it.
        unsafe { libc::timer_delete(self.timer) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_takes_too_long_is_interrupted_and_others_are_not() {
        let sleep = |limit, seconds| {
            let watchdog = Watchdog::new(limit).unwrap();
            let time = libc::timespec { tv_sec: seconds, tv_nsec: 0 };
            // SAFETY: the request outlives the call; nothing is written back.
            let result = unsafe { libc::nanosleep(&time, std::ptr::null_mut()) };
            (result, watchdog.has_expired())
        };
        assert_eq!(sleep(Duration::from_secs(100), 0), (0, false));
        let other = std::thread::spawn(move || sleep(Duration::from_secs(100), 1));
        assert_eq!(sleep(Duration::from_millis(1), 100), (-1, true));
        assert_eq!(other.join().unwrap(), (0, false));
    }
}
