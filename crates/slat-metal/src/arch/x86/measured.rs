//! The guest by which instructions are counted.

#![expect(unsafe_code, reason = "has the guest's code, in assembly")]

use super::registers::Trap;
use crate::virtual_cpu::Exit;

core::arch::global_asm!(".text", include_str!("measured.s"));

unsafe extern "C" {
    static measured_guest: u8;
}

/// Instructions of a turn of its loop, as `measured.s` has them.
pub const TURN: u64 = 15;

/// CPUs that it can run on.
pub const MAX_CPUS: usize = 4;

/// Bytes of `out 0x10, al`.
const OUT_BYTES: u64 = 2;

/// Where it begins.
pub fn address() -> u64 {
    (&raw const measured_guest).addr() as u64
}

/// Whether `exit` says that it has done its work: then the bytes of the instruction to skip.
pub fn end_bytes(exit: Exit) -> Option<u64> {
    matches!(exit, Exit::Trapped(Trap::Port { port: 0x10, .. })).then_some(OUT_BYTES)
}
