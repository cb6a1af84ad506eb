//! System registers and instructions of EL2.

/// Reads a register, which has no side effect.
macro_rules! read {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: the hypervisor runs at EL2, which has the register; reading it changes nothing.
        #[allow(unused_unsafe, reason = "a safe read may be part of something that is not")]
        unsafe { core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack, preserves_flags)) };
        value
    }};
}

/// Writes a register. Unsafe to expand: the register decides what the CPU accesses, or executes.
macro_rules! write {
    ($name:literal, $value:expr) => {
        core::arch::asm!(concat!("msr ", $name, ", {}"), in(reg) u64::from($value), options(nostack, preserves_flags))
    };
}

/// Executes instructions without operands: barriers and the like.
macro_rules! execute {
    ($($instruction:literal),+) => {
        core::arch::asm!($($instruction),+, options(nostack, preserves_flags))
    };
}

pub(crate) use {execute, read, write};
