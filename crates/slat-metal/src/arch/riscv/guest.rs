//! What the suite's guest needs of the instruction set.
//!
//! The functions here run in the guest: they use no static variable and allocate nothing.

#![expect(unsafe_code, reason = "leaves the guest, and calls instructions in memory")]

use core::arch::{asm, naked_asm};
use core::sync::atomic::AtomicU64;

use sbi_rt::HartMask;

use crate::private::Private;

/// Bytes of the instruction of [`hypercall`], behind which a guest goes on.
pub const HYPERCALL_BYTES: u64 = 4;

/// Bytes of the instruction of [`probe`], which the hypervisor skips where nothing is mapped.
pub const PROBE_BYTES: u64 = 4;

/// What is between the end of the stack and the stack pointer at a function's first instruction:
/// nothing.
pub const CALL_BYTES: u64 = 0;

/// Leaves the guest.
pub fn hypercall(_kind: u64) {
    // SAFETY: the hypervisor changes the mailbox alone.
    unsafe { asm!("ecall", options(nostack)) };
}

/// Reads the word at `address`, where perhaps nothing is mapped: then the hypervisor returns ones.
///
/// # Safety
/// The caller is in the guest, and `address` is one that the hypervisor expects.
#[unsafe(naked)]
pub unsafe extern "C" fn probe(address: u64) -> u64 {
    naked_asm!(".option push", ".option norvc", "ld a0, 0(a0)", ".option pop", "ret")
}

/// Instructions that return [`returned`] of `tag`.
pub const fn code(tag: u64) -> [u64; 2] {
    let tag = tag & 0xffff_ffff;
    // The lower 12 bits are added as a signed number.
    let upper = (tag + 0x800) >> 12 & 0xf_ffff;
    // lui a0, upper; addiw a0, a0, lower; ret
    let (load, add, jump) = (upper << 12 | 0x537, (tag & 0xfff) << 20 | 0x5_051b, 0x8067);
    [load | add << 32, jump]
}

/// What these return.
pub const fn returned(tag: u64) -> u64 {
    tag as i32 as i64 as u64
}

/// Calls the instructions at `address`.
///
/// # Safety
/// They are those of [`code`].
pub unsafe fn call(address: u64) -> u64 {
    let found: u64;
    // SAFETY: they set `a0` and return, as the caller promises.
    unsafe { asm!("jalr ra, {address}", address = in(reg) address, out("a0") found, out("ra") _) };
    found
}

/// Makes instructions that were written to memory visible to all CPUs: each executes FENCE.I, since its
/// fetches need not observe other CPUs' stores (RISC-V Unprivileged ISA, "Zifencei").
pub fn sync_memory(_words: &[AtomicU64]) {
    // SAFETY: a fence of this hart's own fetches, behind its stores.
    unsafe { asm!("fence rw, rw", "fence.i", options(nostack)) };
    let result = sbi_rt::remote_fence_i(HartMask::all());
    if result.is_err() {
        crate::error!("the firmware makes no fence of instructions: {result:?}");
    }
}

/// Nothing: the guest has no page tables of its own.
pub fn write_page_tables(_private: &Private) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_those_of_the_manual() {
        // lui a0, 0x12345; addiw a0, a0, 0x678; ret
        assert_eq!(code(0x1234_5678), [0x6785_051b_1234_5537, 0x8067]);
        // The lower bits are negative: one more above.
        assert_eq!(code(0xf_ffff_0fff), [0xfff5_051b_ffff_1537, 0x8067]);
        assert_eq!(returned(0x1_8000_0000), 0xffff_ffff_8000_0000);
    }
}
