//! Time: the time-stamp counter, whose frequency is measured once against channel 2 of the PIT
//! (Intel 8254 data sheet; 1 193 182 Hz).

#![expect(unsafe_code, reason = "reads and writes the ports of the timer")]

use core::sync::atomic::{AtomicU64, Ordering};

use x86_64::instructions::port::Port;

const PIT_HZ: u64 = 1_193_182;
/// How long the measurement takes.
const MEASURED_US: u64 = 20_000;

/// Counts of the time-stamp counter in a millisecond; 1 until it is measured.
static TICKS_PER_MS: AtomicU64 = AtomicU64::new(1);

/// The time-stamp counter.
pub fn ticks() -> u64 {
    // SAFETY: every x86-64 CPU has it, and reading it changes nothing.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Nanoseconds since the machine's start.
pub fn now_ns() -> u64 {
    // Relaxed: written once, before the other CPUs start.
    let per_ms = TICKS_PER_MS.load(Ordering::Relaxed);
    (u128::from(ticks()) * 1_000_000 / u128::from(per_ms)) as u64
}

/// Waits for `us` microseconds.
pub fn wait_us(us: u64) {
    let end = now_ns().saturating_add(us * 1000);
    while now_ns() < end {
        core::hint::spin_loop();
    }
}

/// Measures the frequency of the time-stamp counter. To be called once, before anything waits.
pub fn measure() {
    let count = PIT_HZ * MEASURED_US / 1_000_000;
    let (mut control, mut command, mut data) = (Port::<u8>::new(0x61), Port::<u8>::new(0x43), Port::<u8>::new(0x42));
    // SAFETY: the ports of the PIT's channel 2 and of its gate, on every PC; the image owns them.
    let elapsed = unsafe {
        // Gate on, speaker off.
        let old: u8 = control.read();
        control.write((old & !3) | 1);
        // Channel 2, both bytes, mode 0: the output rises when the count is over.
        command.write(0xb0_u8);
        data.write(count as u8);
        data.write((count >> 8) as u8);
        let begin = ticks();
        while control.read() & 1 << 5 == 0 {}
        ticks() - begin
    };
    TICKS_PER_MS.store((elapsed * 1000 / MEASURED_US).max(1), Ordering::Relaxed);
}
