//! The progress of all threads: each advances a counter, and a thread whose counter stands still
//! for too long is stuck.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::live::lock;

/// A thread that has not advanced its counter for so long is stuck, however few CPUs there are.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// The counter of a thread that has ended.
const ENDED: u64 = u64::MAX;

/// Reads a thread's counter.
pub(super) type Counter = Arc<dyn Fn() -> u64 + Send + Sync>;

/// A counter that a thread advances.
#[derive(Clone, Default)]
pub(super) struct Beat(Arc<AtomicU64>);

impl Beat {
    pub(super) fn beat(&self) {
        // Relaxed: it does not matter when exactly the count is observed.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The thread has ended, and needs no more progress.
    pub(super) fn end(&self) {
        self.0.store(ENDED, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct State {
    counters: Vec<(String, Counter)>,
    /// The last count of each thread, and when it was first observed.
    seen: HashMap<String, (u64, Instant)>,
}

/// The threads that are watched.
#[derive(Default)]
pub(super) struct Watch(Mutex<State>);

impl Watch {
    /// Watches these threads from now on, and no others.
    pub(super) fn set(&self, counters: Vec<(String, Counter)>) {
        *lock(&self.0) = State { counters, seen: HashMap::new() };
    }

    /// Checks all counters at the time `now`. The error names the thread that has been stuck for
    /// longest.
    pub(super) fn look(&self, now: Instant) -> Result<(), String> {
        let State { counters, seen } = &mut *lock(&self.0);
        // A thread that waits for a stuck one is stuck later, or later in the list.
        let mut stuck: Option<(&str, Instant)> = None;
        for (name, counter) in counters {
            let count = counter();
            if count == ENDED {
                continue;
            }
            let (last, since) = seen.entry(name.clone()).or_insert((count, now));
            if *last != count {
                (*last, *since) = (count, now);
            } else if now.duration_since(*since) >= STUCK_AFTER && stuck.is_none_or(|(_, earliest)| *since < earliest) {
                stuck = Some((name, *since));
            }
        }
        match stuck {
            Some((name, _)) => Err(format!("{name} has made no progress for {} s", STUCK_AFTER.as_secs())),
            None => Ok(()),
        }
    }
}

pub(super) fn counter_of(beat: &Beat) -> Counter {
    let beat = beat.clone();
    Arc::new(move || beat.0.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_that_is_stuck_for_longest_is_named() {
        let (watch, busy, stuck) = (Watch::default(), Beat::default(), Beat::default());
        let waits = Beat::default();
        watch.set(vec![
            ("one".to_owned(), counter_of(&busy)),
            ("three".to_owned(), counter_of(&waits)),
            ("two".to_owned(), counter_of(&stuck)),
        ]);
        let begin = Instant::now();
        assert_eq!(watch.look(begin), Ok(()));
        stuck.beat();
        assert_eq!(watch.look(begin + STUCK_AFTER / 2), Ok(()));
        waits.beat();
        busy.beat();
        assert_eq!(watch.look(begin + STUCK_AFTER), Ok(()));
        busy.beat();
        // Three waits for two, and is stuck later.
        assert_eq!(watch.look(begin + STUCK_AFTER * 5 / 4), Ok(()));
        assert_eq!(watch.look(begin + STUCK_AFTER * 5 / 2), Err("two has made no progress for 60 s".to_owned()));
        stuck.end();
        waits.end();
        busy.beat();
        assert_eq!(watch.look(begin + STUCK_AFTER * 3), Ok(()));
        // Another turn begins anew.
        watch.set(vec![("two".to_owned(), counter_of(&stuck))]);
        assert_eq!(watch.look(begin + STUCK_AFTER * 4), Ok(()));
    }
}
