//! Time: the CSR `time`, whose frequency the device tree has; and the CSR `cycle`.

use core::sync::atomic::{AtomicU64, Ordering};

use super::csr;

/// Counts of `time` in a second; 1 until it is known.
static TIME_PER_S: AtomicU64 = AtomicU64::new(1);

/// Sets the frequency of the time. To be called before the other CPUs start.
pub fn set_frequency(hz: u64) {
    TIME_PER_S.store(hz.max(1), Ordering::Relaxed);
}

/// Counts of `time` in a second.
pub fn frequency_hz() -> u64 {
    // Relaxed: written once, before the other CPUs start.
    TIME_PER_S.load(Ordering::Relaxed)
}

/// Nothing: the device tree says how fast the time goes.
pub fn measure() {}

/// The calling hart's cycles. An emulator that counts instructions has these here.
pub fn ticks() -> u64 {
    csr::read!("cycle")
}

/// Nanoseconds since the machine's start: `time` is the same on all CPUs.
pub fn now_ns() -> u64 {
    (u128::from(csr::read!("time")) * 1_000_000_000 / u128::from(frequency_hz())) as u64
}

/// Waits for `us` microseconds.
pub fn wait_us(us: u64) {
    let end = now_ns().saturating_add(us * 1000);
    while now_ns() < end {
        core::hint::spin_loop();
    }
}
