//! How many threads a replay has at a time: as many as make it faster.
//!
//! A source that is far away makes steps wait: many at once take as long as one. One that costs CPU
//! time, or whose disk is busy, makes many at once slower, and faults with them. This tells the two
//! apart: it doubles the threads while the steps do not take longer by that, and halves them when
//! they do.

use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Steps take longer, if it is by more than this.
const SLOWER: f64 = 1.6;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Pace {
    state: Mutex<State>,
    changed: Condvar,
    most: usize,
}

#[derive(Debug)]
struct State {
    /// Threads below this number may run.
    nr_threads: usize,
    /// How many steps, and how long all of them, since `nr_threads` changed.
    nr_steps: usize,
    total: Duration,
    /// The shortest mean of a step.
    best: Option<Duration>,
    has_settled: bool,
    has_ended: bool,
}

impl Pace {
    /// For at most `most` threads.
    pub(super) fn new(most: usize) -> Pace {
        let nr_cpus = thread::available_parallelism().map_or(1, usize::from);
        Pace::starting_with(nr_cpus.min(most).max(1), most)
    }

    fn starting_with(nr_threads: usize, most: usize) -> Pace {
        let state =
            State { nr_threads, nr_steps: 0, total: Duration::ZERO, best: None, has_settled: false, has_ended: false };
        Pace { state: Mutex::new(state), changed: Condvar::new(), most }
    }

    /// Waits until `thread` may run. False: there is nothing to run any more, as `is_over` says or
    /// an [`Ending`] has said.
    pub(super) fn wait_for_turn(&self, thread: usize, is_over: impl Fn() -> bool) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waits = |state: &mut State| thread >= state.nr_threads && !state.has_ended && !is_over();
        let state = self.changed.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        thread < state.nr_threads && !is_over()
    }

    /// A step took so long.
    pub(super) fn took(&self, time: Duration) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.nr_steps += 1;
        state.total += time;
        if state.has_settled || state.nr_steps < 2 * state.nr_threads {
            return;
        }
        let mean = state.total / state.nr_steps as u32;
        let best = state.best.map_or(mean, |best| best.min(mean));
        if mean.as_secs_f64() > SLOWER * best.as_secs_f64() {
            state.nr_threads = (state.nr_threads / 2).max(1);
            state.has_settled = true;
        } else if state.nr_threads >= self.most {
            state.has_settled = true;
        } else {
            state.nr_threads = (2 * state.nr_threads).min(self.most);
        }
        state.best = Some(best);
        state.nr_steps = 0;
        state.total = Duration::ZERO;
        drop(state);
        self.changed.notify_all();
    }

    /// Of a thread that runs: once it is dropped, threads that wait end, as there is nothing more
    /// to do.
    pub(super) fn ending(&self) -> Ending<'_> {
        Ending(self)
    }
}

/// See [`Pace::ending`].
#[derive(Debug)]
pub(super) struct Ending<'p>(&'p Pace);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).has_ended = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn threads(pace: &Pace) -> usize {
        pace.state.lock().unwrap().nr_threads
    }

    fn steps(pace: &Pace, nr_steps: usize, ms: u64) {
        (0..nr_steps).for_each(|_| pace.took(Duration::from_millis(ms)));
    }

    #[test]
    fn threads_are_doubled_while_steps_take_no_longer() {
        let pace = Pace::starting_with(2, 32);
        for nr_threads in [2, 4, 8, 16] {
            assert_eq!(threads(&pace), nr_threads);
            steps(&pace, 2 * nr_threads, 20);
        }
        assert_eq!(threads(&pace), 32);
        steps(&pace, 1000, 200);
        // Once it had settled nothing changes.
        let settled = threads(&pace);
        steps(&pace, 1000, 1);
        assert_eq!(threads(&pace), settled);
    }

    #[test]
    fn threads_are_halved_when_steps_take_longer() {
        let pace = Pace::starting_with(2, 32);
        steps(&pace, 4, 10);
        assert_eq!(threads(&pace), 4);
        steps(&pace, 8, 20);
        assert_eq!(threads(&pace), 2);
        assert!(pace.wait_for_turn(1, || false));
        drop(pace.ending());
        assert!(!pace.wait_for_turn(2, || false));
    }
}
