//! What the suite's guest needs of the instruction set.
//!
//! The functions here run in the guest: they use no static variable and allocate nothing.

#![expect(unsafe_code, reason = "leaves the guest, and calls instructions in memory")]

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use super::registers::Hypercall;
use crate::cpus::Cpus;
use crate::private::Private;

/// Bytes of the instruction of [`hypercall`], behind which a guest goes on.
pub const HYPERCALL_BYTES: u64 = Hypercall::BYTES;

/// Bytes of the instruction of [`probe`], which the hypervisor skips where nothing is mapped.
pub const PROBE_BYTES: u64 = 3;

/// What is between the end of the stack and the stack pointer at a function's first instruction: a
/// return address.
pub const CALL_BYTES: u64 = 8;

/// Leaves the guest, by the instruction of `kind`, a [`Hypercall`].
pub fn hypercall(kind: u64) {
    let is_intel = kind == Hypercall::Vmcall as u64;
    // SAFETY: the instruction of this CPU. The hypervisor changes the mailbox alone.
    unsafe { if is_intel { asm!("vmcall", options(nostack)) } else { asm!("vmmcall", options(nostack)) } };
}

/// Reads the word at `address`, where perhaps nothing is mapped: then the hypervisor returns ones.
///
/// # Safety
/// The caller is in the guest, and `address` is one that the hypervisor expects.
#[unsafe(naked)]
pub unsafe extern "C" fn probe(address: u64) -> u64 {
    naked_asm!("mov rax, [rdi]", "ret")
}

/// Instructions that return [`returned`] of `tag`.
pub const fn code(tag: u64) -> [u64; 2] {
    // mov eax, tag; ret
    [0xb8 | returned(tag) << 8 | 0xc3 << 40, 0]
}

/// What these return.
pub const fn returned(tag: u64) -> u64 {
    tag & 0xffff_ffff
}

/// Calls the instructions at `address`.
///
/// # Safety
/// They are those of [`code`].
pub unsafe fn call(address: u64) -> u64 {
    let found: u64;
    // SAFETY: they set `eax` and return, as the caller promises.
    unsafe { asm!("call {address}", address = in(reg) address, out("rax") found) };
    found
}

/// Makes what was written to `words` visible to the guest's fetches, and to accesses past the
/// caches, and the other way. CPUs of x86 see instructions by themselves (Intel SDM vol. 3A,
/// "Handling Self- and Cross-Modifying Code": another CPU only has to get there by a serializing
/// instruction, which VMRUN and VMRESUME are), and keep their caches coherent.
pub fn sync_memory(_words: &[AtomicU64]) {}

/// Nothing: CPUs of x86 see instructions by themselves ([`sync_memory`]).
pub fn publish_code(_cpus: &Cpus) {}

/// Writes the page tables of a guest into the first two pages of its private memory: the first
/// 512 GiB to themselves, by pages of 1 GiB. Present, writable, accessed and dirty, so that
/// the walk writes nothing (AMD APM vol. 2, 5.3.4 "1-Gbyte Page Translation", 5.4).
pub fn write_page_tables(private: &Private) {
    private.word(0).store((private.gpa.0 + 4096) | 0x23, Ordering::Relaxed);
    for index in 0..512 {
        private.word(4096 + 8 * index).store(index << 30 | 0xe3, Ordering::Relaxed);
    }
}
