//! Time: the physical counter of the generic timer (Arm ARM, D12 "The Generic Timer in AArch64
//! state").

#![expect(unsafe_code, reason = "keeps the counter's read in order")]

use super::sysreg::{execute, read};
use crate::error;

/// The counter.
pub fn ticks() -> u64 {
    // Not earlier than the instructions before.
    // SAFETY: a barrier.
    unsafe { execute!("isb") };
    read!("cntpct_el0")
}

/// Counts in a second, as the firmware has set them.
fn frequency_hz() -> u64 {
    read!("cntfrq_el0")
}

/// Nanoseconds since the machine's start.
pub fn now_ns() -> u64 {
    (u128::from(ticks()) * 1_000_000_000 / u128::from(frequency_hz().max(1))) as u64
}

/// Waits for `us` microseconds.
pub fn wait_us(us: u64) {
    let end = now_ns().saturating_add(us * 1000);
    while now_ns() < end {
        core::hint::spin_loop();
    }
}

/// Checks that the frequency is there.
pub fn measure() {
    if frequency_hz() == 0 {
        error!("the machine's timer has no frequency");
    }
}
