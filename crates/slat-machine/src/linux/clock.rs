//! Time for measurements: a clock that costs a few nanoseconds and never goes backwards, and the
//! time for which a thread waited for a CPU.
//!
//! The clock reads the CPU's time stamp counter where that can be trusted: it runs at one rate in
//! all power states (CPUID 8000_0007h, EDX bit 8; Intel SDM vol. 3B, 19.17.1) and the kernel
//! itself, which checks that all CPUs agree, offers it as a clock. Its rate is measured once
//! against `CLOCK_MONOTONIC`. Elsewhere that clock is read directly.

#![expect(unsafe_code, reason = "rdtsc")]

use std::cell::OnceCell;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::str;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since some fixed moment. Never less than what any thread of this process has read
/// before.
#[inline]
pub fn timestamp_ns() -> u64 {
    match CLOCK.get_or_init(Clock::new) {
        Clock::Kernel => kernel_ns(),
        #[cfg(target_arch = "x86_64")]
        Clock::Counter { start, ns_per_tick } => counter_ns(read_counter(), *start, *ns_per_tick),
    }
}

static CLOCK: OnceLock<Clock> = OnceLock::new();

enum Clock {
    Kernel,
    /// The time stamp counter: its first value, and its tick in units of 2^-32 ns.
    #[cfg(target_arch = "x86_64")]
    Counter {
        start: u64,
        ns_per_tick: u64,
    },
}

impl Clock {
    #[cfg(target_arch = "x86_64")]
    fn new() -> Clock {
        /// Long enough for an error below 1 in 10 000, given some hundred nanoseconds of
        /// uncertainty at both ends.
        const CALIBRATION: Duration = Duration::from_millis(10);
        if !counter_is_trusted() {
            return Clock::Kernel;
        }
        let (begin_ns, start) = read_both();
        std::thread::sleep(CALIBRATION);
        let (end_ns, end) = read_both();
        let (ns, ticks) = (end_ns.saturating_sub(begin_ns), end.saturating_sub(start));
        match (u128::from(ns) << 32).checked_div(u128::from(ticks)).and_then(|rate| u64::try_from(rate).ok()) {
            Some(ns_per_tick) if ns_per_tick > 0 => Clock::Counter { start, ns_per_tick },
            _ => Clock::Kernel,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn new() -> Clock {
        Clock::Kernel
    }
}

fn kernel_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter_ns(counter: u64, start: u64, ns_per_tick: u64) -> u64 {
    // Saturating: the counters of two CPUs may differ by less than it takes to move a value between
    // them.
    let ticks = counter.saturating_sub(start);
    ((u128::from(ticks) * u128::from(ns_per_tick)) >> 32) as u64
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn read_counter() -> u64 {
    // The fence, because the counter may otherwise be read before earlier loads, such as that of
    // another thread's time, are done (Intel SDM vol. 2B, RDTSC).
    // SAFETY: both instructions are in every x86-64 CPU, and Linux lets user space read the
    // counter.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        core::arch::x86_64::_rdtsc()
    }
}

/// Reads both clocks at nearly the same moment: the closest of a few attempts, since the thread may
/// be interrupted in one.
#[cfg(target_arch = "x86_64")]
fn read_both() -> (u64, u64) {
    let attempts = (0..8).map(|_| {
        let before = read_counter();
        let ns = kernel_ns();
        let after = read_counter();
        (after.saturating_sub(before), ns, before)
    });
    attempts.min().map_or((0, 0), |(width, ns, before)| (ns, before + width / 2))
}

#[cfg(target_arch = "x86_64")]
fn counter_is_trusted() -> bool {
    use core::arch::x86_64::__cpuid;
    const POWER_MANAGEMENT: u32 = 0x8000_0007;
    const INVARIANT: u32 = 1 << 8;
    #[allow(unused_unsafe, reason = "safe in newer compilers: every x86-64 CPU has the instruction")]
    // SAFETY: every x86-64 CPU has the instruction.
    let invariant =
        unsafe { __cpuid(0x8000_0000).eax >= POWER_MANAGEMENT && __cpuid(POWER_MANAGEMENT).edx & INVARIANT != 0 };
    // The kernel removes it from the list when CPUs disagree.
    let clocks = fs::read_to_string("/sys/devices/system/clocksource/clocksource0/available_clocksource");
    invariant && clocks.is_ok_and(|names| names.split_whitespace().any(|name| name == "tsc"))
}

thread_local! {
    /// The thread's own scheduling statistics; `None` on a kernel without them. Open for the
    /// thread's life, because opening costs more than the measured time.
    static SCHEDSTAT: OnceCell<Option<File>> = const { OnceCell::new() };
}

/// For how long, in nanoseconds since it began, the calling thread was ready to run but had no CPU:
/// the second number of `/proc/thread-self/schedstat` (Documentation/scheduler/sched-stats.rst). 0
/// where the kernel does not report it.
pub fn run_delay_ns() -> u64 {
    // A thread that is ending may have closed the file.
    SCHEDSTAT.try_with(|file| read_run_delay(file.get_or_init(open_schedstat).as_ref()?)).ok().flatten().unwrap_or(0)
}

fn open_schedstat() -> Option<File> {
    File::open("/proc/thread-self/schedstat").ok()
}

fn read_run_delay(file: &File) -> Option<u64> {
    // Three numbers of at most 20 digits.
    let mut text = [0; 64];
    let length = file.read_at(&mut text, 0).ok()?;
    str::from_utf8(text.get(..length)?).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn time_never_goes_backwards_on_any_thread() {
        let latest = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        let before = latest.load(Ordering::Acquire);
                        let now = timestamp_ns();
                        assert!(now >= before, "{now} after {before}");
                        latest.fetch_max(now, Ordering::AcqRel);
                    }
                });
            }
        });
    }

    #[test]
    fn it_runs_as_fast_as_the_kernels_clock() {
        timestamp_ns();
        let (kernel_begin, begin) = (kernel_ns(), timestamp_ns());
        thread::sleep(Duration::from_millis(50));
        let (end, kernel_end) = (timestamp_ns(), kernel_ns());
        let (ours, kernels) = (end - begin, kernel_end - kernel_begin);
        // The kernel's interval contains ours; the other way round there may be an interruption of
        // any length between.
        assert!(ours <= kernels + kernels / 1_000, "{ours} ns in {kernels} ns");
        assert!(ours >= 49_900_000, "{ours} ns is less than the sleep");
    }

    #[test]
    fn the_run_delay_is_that_of_the_thread() {
        let first = run_delay_ns();
        let second = run_delay_ns();
        assert!(second >= first);
        // Another thread has another file, and starts from its own zero.
        thread::spawn(run_delay_ns).join().expect("a number");
    }
}
