//! What the suite's guest needs of the instruction set.
//!
//! The functions here run in the guest, but for [`sync_memory`] and [`write_page_tables`]: they use
//! no static variable and allocate nothing.

#![expect(unsafe_code, reason = "leaves the guest, calls instructions in memory, and maintains caches")]

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};

pub use super::code::{code, returned};
use super::sysreg::{execute, read};
use crate::cpus::Cpus;
use crate::private::Private;

/// Bytes of the instruction of [`hypercall`], behind which a guest goes on: HVC leaves it there.
pub const HYPERCALL_BYTES: u64 = 0;

/// Bytes of the instruction of [`probe`], which the hypervisor skips where nothing is mapped.
pub const PROBE_BYTES: u64 = 4;

/// What is between the end of the stack and the stack pointer at a function's first instruction.
pub const CALL_BYTES: u64 = 0;

/// Leaves the guest.
pub fn hypercall(_kind: u64) {
    // SAFETY: the hypervisor changes the mailbox alone.
    unsafe { asm!("hvc #0", options(nostack)) };
}

/// Reads the word at `address`, where perhaps nothing is mapped: then the hypervisor returns ones.
///
/// # Safety
/// The caller is in the guest, and `address` is one that the hypervisor expects.
#[unsafe(naked)]
pub unsafe extern "C" fn probe(address: u64) -> u64 {
    naked_asm!("ldr x0, [x0]", "ret")
}

/// Calls the instructions at `address`.
///
/// # Safety
/// They are those of [`code`].
pub unsafe fn call(address: u64) -> u64 {
    let found: u64;
    // SAFETY: they set `w0` and return, as the caller promises.
    unsafe { asm!("blr {address}", address = in(reg) address, lateout("x0") found, out("x30") _, options(nostack)) };
    found
}

/// Makes what was written to `words` visible to the guest's fetches, and to accesses past the
/// caches, and the other way: a guest whose MMU is off accesses memory past them, and CPUs without
/// FEAT_S2FWB obey it (Arm ARM, D8.6 "Memory region attributes", B2.7.4 "Caching", "Synchronization
/// and coherency issues between data and instruction accesses").
pub fn sync_memory(words: &[AtomicU64]) {
    let line_bytes = 4_u64 << (read!("ctr_el0") >> 16 & 0xf);
    let start = words.as_ptr().expose_provenance() as u64;
    let end = start + size_of_val(words) as u64;
    let mut line = start & !(line_bytes - 1);
    while line < end {
        // SAFETY: memory of the image: nothing is lost by writing it back.
        unsafe { asm!("dc civac, {}", in(reg) line, options(nostack, preserves_flags)) };
        line += line_bytes;
    }
    // SAFETY: instructions are fetched anew.
    unsafe { execute!("dsb ish", "ic ialluis", "dsb ish", "isb") };
}

/// Nothing more: the instructions of [`sync_memory`] reach all CPUs.
pub fn publish_code(_cpus: &Cpus) {}

/// Writes the page table of a guest into the first page of its private memory: 512 GiB to
/// themselves, by blocks of 1 GiB of normal memory, inner shareable, used (Arm ARM, D8.3.2 "Block
/// descriptor and Page descriptor formats").
pub fn write_page_tables(private: &Private) {
    for index in 0..512 {
        private.word(8 * index).store(index << 30 | 1 << 10 | 3 << 8 | 1, Ordering::Relaxed);
    }
}
