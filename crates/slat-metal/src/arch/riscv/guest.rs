//! What the suite's guest needs of the instruction set.
//!
//! The functions here run in the guest: they use no static variable and allocate nothing.

#![expect(unsafe_code, reason = "leaves the guest, and calls instructions in memory")]

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use sbi_rt::HartMask;

use super::boot;
pub use super::code::{code, returned};
use crate::boot::MAX_CPUS;
use crate::cpus::Cpus;
use crate::private::Private;

/// Where the guests of this image have their memory: above the machine's, where they have the
/// image.
pub const BASE: u64 = 0x10_0000_0000;

/// Bytes of the instruction of [`hypercall`], behind which a guest goes on.
pub const HYPERCALL_BYTES: u64 = 4;

/// Bytes of the instruction of [`probe`], which the hypervisor skips where nothing is mapped.
pub const PROBE_BYTES: u64 = 4;

/// What is between the end of the stack and the stack pointer at a function's first instruction:
/// nothing.
pub const CALL_BYTES: u64 = 0;

/// An extension of SBI that no firmware has: the first one of the experimental ones.
const NO_EXTENSION: u64 = 0x0800_0000;

/// Leaves the guest.
pub fn hypercall(_kind: u64) {
    // SAFETY: the hypervisor changes the mailbox alone. Outside of a guest it is a call of the
    // firmware, which does nothing but return an error in a0 and a1.
    unsafe { asm!("ecall", in("a7") NO_EXTENSION, inout("a6") 0_u64 => _, out("a0") _, out("a1") _, options(nostack)) };
}

/// Reads the word at `address`, where perhaps nothing is mapped: then the hypervisor returns ones.
///
/// # Safety
/// The caller is in the guest, and `address` is one that the hypervisor expects.
#[unsafe(naked)]
pub unsafe extern "C" fn probe(address: u64) -> u64 {
    naked_asm!(".option push", ".option norvc", "ld a0, 0(a0)", ".option pop", "ret")
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

/// How often memory was written that may have instructions.
static NR_WRITTEN: AtomicU64 = AtomicU64::new(0);
/// The same as of the last fence of all CPUs, and as of the last one of each.
static NR_PUBLISHED: AtomicU64 = AtomicU64::new(0);
static NR_FETCHED: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Notes that memory was written that may have instructions.
pub fn sync_memory(_words: &[AtomicU64]) {
    // SeqCst: before the look at which CPUs are in the guest.
    NR_WRITTEN.fetch_add(1, Ordering::SeqCst);
}

/// Makes what was written visible to the fetches of all CPUs, before one can reach it: each
/// executes FENCE.I, since its fetches need not observe other CPUs' stores (RISC-V Unprivileged
/// ISA, "Zifencei"). Those that are in the guest of `cpus` do so now, others when they enter it
/// (`fetch_again`).
pub fn publish_code(cpus: &Cpus) {
    let nr_written = NR_WRITTEN.load(Ordering::SeqCst);
    // Another CPU may be at it: its fence counts when it is over.
    if NR_PUBLISHED.load(Ordering::SeqCst) >= nr_written {
        return;
    }
    let harts = boot::harts(cpus.inside());
    if harts != 0 {
        // SAFETY: orders this hart's stores before the interrupt.
        unsafe { asm!("fence rw, rw", options(nostack)) };
        let result = sbi_rt::remote_fence_i(HartMask::from_mask_base(harts as usize, 0));
        if result.is_err() {
            crate::error!("the firmware makes no fence of instructions: {result:?}");
        }
    }
    NR_PUBLISHED.fetch_max(nr_written, Ordering::SeqCst);
}

/// The calling CPU enters the guest next, and has said so.
pub(super) fn fetch_again() {
    let nr_written = NR_WRITTEN.load(Ordering::SeqCst);
    // Relaxed: the CPU's own.
    if NR_FETCHED[super::cpu_number()].swap(nr_written, Ordering::Relaxed) != nr_written {
        // SAFETY: a fence of this hart's own fetches.
        unsafe { asm!("fence.i", options(nostack)) };
    }
}

/// Nothing: the guest has no page tables of its own.
pub fn write_page_tables(_private: &Private) {}
