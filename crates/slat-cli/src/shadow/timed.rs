//! The engine's fault handler of a CPU, with a clock around each call.

use slat::Outcome;
use slat::error::FaultError;
use slat::shadow::GuestEntry;
use slat_machine::hardware::shadow_cpu::{ShadowExit, ShadowHandler};
use slat_machine::linux::clock::timestamp_ns;

/// A handler whose calls are timed.
#[derive(Debug)]
pub(super) struct Timed<V> {
    handler: V,
    spent_ns: u64,
    nr_calls: u64,
}

/// Time spent in calls.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    spent_ns: u64,
    nr_calls: u64,
}

impl Spent {
    /// The time since `earlier` without the clock's own time (of one reading), in nanoseconds.
    pub(super) fn since_ns(self, earlier: Spent, clock_ns: f64) -> f64 {
        let clock_ns = (self.nr_calls - earlier.nr_calls) as f64 * clock_ns;
        ((self.spent_ns - earlier.spent_ns) as f64 - clock_ns).max(0.0)
    }
}

impl<V> Timed<V> {
    pub(super) fn new(handler: V) -> Timed<V> {
        Timed { handler, spent_ns: 0, nr_calls: 0 }
    }

    pub(super) fn spent(&self) -> Spent {
        Spent { spent_ns: self.spent_ns, nr_calls: self.nr_calls }
    }

    #[inline]
    fn time<T>(&mut self, call: impl FnOnce(&mut V) -> T) -> T {
        let begin = timestamp_ns();
        let result = call(&mut self.handler);
        self.spent_ns += timestamp_ns().saturating_sub(begin);
        self.nr_calls += 1;
        result
    }
}

impl<V: ShadowHandler> ShadowHandler for Timed<V> {
    fn entry(&mut self) -> Result<GuestEntry, FaultError> {
        self.time(V::entry)
    }

    fn handle_exit(&mut self, exit: ShadowExit) -> Result<Outcome, FaultError> {
        self.time(|handler| handler.handle_exit(exit))
    }
}

/// How long one reading of the clock takes, in nanoseconds: the least of a few batches, which
/// nothing has interrupted.
pub(super) fn clock_ns() -> f64 {
    const READINGS: u32 = 1000;
    let batch = |_| {
        let begin = timestamp_ns();
        let end = (0..READINGS).fold(begin, |_, _| timestamp_ns());
        (end - begin) as f64 / f64::from(READINGS)
    };
    (0..32).map(batch).fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clocks_own_time_is_subtracted() {
        let (earlier, later) = (Spent { spent_ns: 100, nr_calls: 1 }, Spent { spent_ns: 1100, nr_calls: 11 });
        assert_eq!(later.since_ns(earlier, 20.0), 800.0);
        assert_eq!(later.since_ns(earlier, 1000.0), 0.0);
        assert!(clock_ns() > 0.0);
    }
}
