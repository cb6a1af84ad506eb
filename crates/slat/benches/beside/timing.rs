//! The time of a call by its parts: on the CPU, waiting for one, or asleep; and quantiles of many.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::cpus::cpu_time;

/// The calling thread's clocks.
pub(crate) struct Clocks {
    /// `/proc/thread-self/schedstat` of the thread that made this; `None` on a kernel without it.
    schedstat: Option<File>,
}

/// The times of a call, in nanoseconds.
#[derive(Clone, Copy, Default)]
pub(crate) struct Took {
    pub(crate) wall_ns: f64,
    pub(crate) cpu_ns: f64,
    /// Ready to run, without a CPU. The time between the readings of the clocks outside of the call
    /// is capped by the length of the call.
    pub(crate) run_delay_ns: f64,
}

impl Clocks {
    pub(crate) fn of_this_thread() -> Clocks {
        Clocks { schedstat: File::open("/proc/thread-self/schedstat").ok() }
    }

    /// The time that the thread was ready to run but had no CPU: the second number
    /// (Documentation/scheduler/sched-stats.rst).
    fn run_delay(&self) -> Duration {
        let read = || {
            let mut text = [0; 64];
            let length = self.schedstat.as_ref()?.read_at(&mut text, 0).ok()?;
            str::from_utf8(&text[..length]).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
        };
        Duration::from_nanos(read().unwrap_or(0))
    }

    pub(crate) fn time(&self, call: impl FnOnce()) -> Took {
        // The cheapest clock is read innermost.
        let (delay_before, cpu_before) = (self.run_delay(), cpu_time());
        let begin = Instant::now();
        call();
        let wall = begin.elapsed();
        let (cpu, delay) = (cpu_time() - cpu_before, self.run_delay() - delay_before);
        let ns = |duration: Duration| duration.as_nanos() as f64;
        Took { wall_ns: ns(wall), cpu_ns: ns(cpu), run_delay_ns: ns(delay.min(wall)) }
    }
}

/// The value that `per_mille` thousandths of `values` do not exceed.
pub(crate) fn quantile(values: &[f64], per_mille: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) * per_mille / 1000]
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 500)
}

/// Prints the head of the table of [`print_calls`].
pub(crate) fn print_head_of_calls(what: &str) {
    println!(
        "\n{what:<44} {:>7} | {:>9} {:>9} {:>10} | {:>9} {:>9} {:>9} | {:>10} {:>10}",
        "calls", "p50, µs", "p99", "worst", "CPU p50", "p99", "worst", "delay p99", "worst"
    );
}

type Part = fn(&Took) -> f64;

/// Prints p50, p99 and worst of `calls`, in microseconds: wall time, CPU time, run delay.
pub(crate) fn print_calls(name: &str, calls: &[Took]) {
    let of =
        |part: fn(&Took) -> f64, per_mille| quantile(&calls.iter().map(part).collect::<Vec<f64>>(), per_mille) / 1e3;
    let wall: Part = |took| took.wall_ns;
    let cpu: Part = |took| took.cpu_ns;
    let delay: Part = |took| took.run_delay_ns;
    println!(
        "{name:<44} {:>7} | {:>9.2} {:>9.2} {:>10.1} | {:>9.2} {:>9.2} {:>9.1} | {:>10.1} {:>10.1}",
        calls.len(),
        of(wall, 500),
        of(wall, 990),
        of(wall, 1000),
        of(cpu, 500),
        of(cpu, 990),
        of(cpu, 1000),
        of(delay, 990),
        of(delay, 1000),
    );
}
