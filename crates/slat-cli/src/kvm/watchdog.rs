//! Interrupts the thread of a vCPU whose guest runs for too long, so that no command hangs.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The signal that makes the thread leave the guest. Its handler does nothing.
const NUDGE: libc::c_int = libc::SIGUSR2;
/// Time between signals: a signal just before the thread enters the guest does not keep it from
/// entering.
const AGAIN: Duration = Duration::from_millis(10);

#[derive(Default)]
struct State {
    /// The thread that is watched, and its deadline.
    watched: Option<(libc::pthread_t, Instant)>,
    has_expired: bool,
    is_over: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) {
        let mut state = self.state();
        while !state.is_over {
            let now = Instant::now();
            let wait = match state.watched {
                None => None,
                Some((_, until)) if now < until => Some(until - now),
                Some((thread, _)) => {
                    state.has_expired = true;
                    // SAFETY: the thread is inside `Watchdog::watch`, which removes the entry,
                    // under the lock that is held here, before the thread can end.
                    unsafe { libc::pthread_kill(thread, NUDGE) };
                    Some(AGAIN)
                }
            };
            state = match wait {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

/// A thread that watches.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(super) fn new() -> Watchdog {
        extern "C" fn nothing(_signal: libc::c_int) {}
        // SAFETY: the handler does nothing, and no other code in this program uses the signal.
        // (`signal` would restart the system call.)
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            libc::sigaction(NUDGE, &action, std::ptr::null_mut());
        }
        let shared = Arc::new(Shared::default());
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.watch()
        });
        Watchdog { shared, thread: Some(thread) }
    }

    /// Runs `action`, with signals to this thread when it takes longer than `limit`.
    pub(super) fn watch<T>(&self, limit: Duration, action: impl FnOnce() -> T) -> T {
        /// Ends the watch, also if the action panics.
        struct Unwatch<'a>(&'a Shared);
        impl Drop for Unwatch<'_> {
            fn drop(&mut self) {
                self.0.state().watched = None;
            }
        }
        // SAFETY: always allowed.
        let thread = unsafe { libc::pthread_self() };
        self.shared.state().watched = Some((thread, Instant::now() + limit));
        self.shared.changed.notify_one();
        let _unwatch = Unwatch(&self.shared);
        action()
    }

    /// Whether a thread was watched for too long.
    pub(super) fn has_expired(&self) -> bool {
        self.shared.state().has_expired
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_takes_too_long_is_interrupted_and_others_are_not() {
        let watchdog = Watchdog::new();
        let sleep = || {
            let forever = libc::timespec { tv_sec: 100, tv_nsec: 0 };
            // SAFETY: the request outlives the call; nothing is written back.
            unsafe { libc::nanosleep(&forever, std::ptr::null_mut()) }
        };
        assert_eq!(watchdog.watch(Duration::from_secs(100), || 7), 7);
        assert!(!watchdog.has_expired());
        assert_eq!(watchdog.watch(Duration::from_millis(1), sleep), -1);
        assert!(watchdog.has_expired());
    }
}
