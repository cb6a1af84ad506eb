//! The guest by which instructions are counted.

#![expect(unsafe_code, reason = "has the guest's code, in assembly")]

use super::guest::HYPERCALL_BYTES;
use crate::virtual_cpu::Exit;

core::arch::global_asm!(
    ".macro read_counter register",
    "rdcycle \\register",
    ".endm",
    ".text",
    include_str!("measured.s")
);

unsafe extern "C" {
    static measured_guest: u8;
}

/// Instructions of a turn of its loop, as `measured.s` has them.
pub const TURN: u64 = 9;

/// CPUs that it can run on.
pub const MAX_CPUS: usize = 1;

/// Where it begins.
pub fn address() -> u64 {
    (&raw const measured_guest).addr() as u64
}

/// Whether `exit` says that it has done its work: then the bytes of the instruction to skip.
pub fn end_bytes(exit: Exit) -> Option<u64> {
    (exit == Exit::Hypercall).then_some(HYPERCALL_BYTES)
}
