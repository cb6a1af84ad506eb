//! How stale translations go: HFENCE.GVMA on each hart (RISC-V Privileged Architecture, "Hypervisor
//! Memory-Management Fence Instructions"), which the firmware executes on the others (SBI
//! Specification, "RFENCE Extension").
//!
//! # What a hart may still hold
//! A hart may keep a PTE that it has faulted on, also an invalid one or one that lacked a right, until
//! it executes the fence. QEMU drops it at each entry and would not show a fence that was left out. So
//! each CPU's last fault is recorded, until its hart has executed a fence for that page
//! ([`hold`]). As long as the record says so, the vCPU does not enter its guest, but reports the same
//! fault again (`run`), as a hart would that kept it.

#![expect(unsafe_code, reason = "executes fences")]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use sbi_rt::HartMask;
use slat::{GfnRange, Gpa, PAGE_SIZE};

use crate::boot::MAX_CPUS;
use crate::cpus::Cpus;
use crate::error;
use crate::host::Control;

/// The VMID of each guest: a CPU that gets another guest drops all that it has of the number.
pub const VMID: u64 = 1;

/// Ranges that are flushed one by one. More are flushed as everything.
const MAX_RANGES: usize = 2;
/// In a range of so many pages, page-table pages may be gone. A fence of an address orders leaf PTEs alone
/// ("Supervisor Memory-Management Fence Instruction"), so it is of everything then.
const TABLE_PAGES: u64 = 512;

/// For each CPU one more than the frame number of the page that it may still hold, else 0. A record that
/// another CPU's fence clears at the moment of a new fault is missed: it is no more than a check.
static HELD: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// For each CPU the page that it has flushed last by itself.
static LAST: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(u64::MAX) }; MAX_CPUS];

/// The calling CPU has faulted at `gpa`.
pub fn hold(gpa: Gpa) {
    HELD[super::cpu_number()].store(gpa.gfn().0 + 1, Ordering::Relaxed);
}

/// Whether the calling CPU may still use what it has faulted on at `gpa`.
pub fn holds(gpa: Gpa) -> bool {
    HELD[super::cpu_number()].load(Ordering::Relaxed) == gpa.gfn().0 + 1
}

/// CPU `cpu` has executed a fence for `range`.
fn release(cpu: usize, range: &GfnRange) {
    let held = HELD[cpu].load(Ordering::Relaxed);
    if held != 0 && (range.start.0..range.start.0.saturating_add(range.nr_pages())).contains(&(held - 1)) {
        let _ = HELD[cpu].compare_exchange(held, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Drops the translations of `ranges` on all CPUs. The firmware interrupts each, and so ends an access
/// of its guest that is under way.
pub fn flush(cpus: &Cpus, ranges: &[GfnRange]) {
    // This hart's stores of PTEs come before its own fence, and before the others' by the interrupt.
    if cpus.control() == Control::NoKick {
        own_fence();
        return ranges.iter().for_each(|range| release(super::cpu_number(), range));
    }
    // SAFETY: orders memory.
    unsafe { asm!("fence rw, rw", options(nostack)) };
    if ranges.len() > MAX_RANGES || ranges.iter().any(|range| range.nr_pages() >= TABLE_PAGES) {
        remote_fence(0, u64::MAX);
    } else {
        for range in ranges {
            remote_fence(range.start.gpa().0, range.nr_pages() * PAGE_SIZE);
        }
    }
    for cpu in 0..MAX_CPUS {
        ranges.iter().for_each(|range| release(cpu, range));
    }
}

/// All harts, the calling one among them.
fn remote_fence(start: u64, size_bytes: u64) {
    let result = sbi_rt::remote_hfence_gvma_vmid(HartMask::all(), start as usize, size_bytes as usize, VMID as usize);
    // A hart may use old translations.
    if result.is_err() {
        error!("the firmware makes no fence of translations: {result:?}");
    }
}

/// Drops what the calling hart has of the page at `gpa`: rs1 is the address >> 2, rs2 the VMID. The
/// fence need not drop a PTE above the lowest level that was not valid. So if the same page comes twice in a
/// row, the fence is one of everything.
pub fn flush_local(gpa: Gpa) {
    let cpu = super::cpu_number();
    // Relaxed: the CPU's own.
    if LAST[cpu].swap(gpa.gfn().0, Ordering::Relaxed) == gpa.gfn().0 {
        own_fence();
    } else {
        // SAFETY: a hypervisor is in HS-mode. No memory is written.
        unsafe { asm!(".insn r 0x73, 0, 0x31, x0, {}, {}", in(reg) gpa.0 >> 2, in(reg) VMID, options(nostack)) };
    }
    release(cpu, &GfnRange::new(gpa.gfn(), 1));
}

/// Drops all translations of guests on the calling hart.
pub fn own_fence() {
    // SAFETY: as above. HFENCE.GVMA and HFENCE.VVMA, of everything.
    unsafe {
        asm!(".insn r 0x73, 0, 0x31, x0, x0, x0", ".insn r 0x73, 0, 0x11, x0, x0, x0", options(nostack));
    }
}
