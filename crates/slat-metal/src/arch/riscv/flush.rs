//! How stale translations go: HFENCE.GVMA on each hart (RISC-V Privileged Architecture, "Hypervisor
//! Memory-Management Fence Instructions"), which the firmware executes on the others (SBI
//! Specification, "RFENCE Extension").

#![expect(unsafe_code, reason = "executes fences")]

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use sbi_rt::HartMask;
use slat::{GfnRange, Gpa, PAGE_SIZE};

use super::boot;
use crate::boot::MAX_CPUS;
use crate::cpus::Cpus;
use crate::error;
use crate::host::Control;

/// The VMID of each guest: a CPU that gets another guest drops all that it has of the number.
pub const VMID: u64 = 1;

/// Ranges that are flushed one by one. More are flushed as everything.
const MAX_RANGES: usize = 2;
/// In a range of so many pages, page-table pages may be gone. A fence of an address orders leaf
/// PTEs alone ("Supervisor Memory-Management Fence Instruction"), so it is of everything then.
const TABLE_PAGES: u64 = 512;

/// For each CPU the page that it has flushed last by itself.
static LAST: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(u64::MAX) }; MAX_CPUS];

/// Drops the translations of `ranges` on all CPUs that run the guest of `cpus`: now on those that
/// are in it, and when they enter it on the others. The firmware interrupts a CPU that is in the
/// guest, and so ends an access that is under way.
pub fn flush(cpus: &Cpus, ranges: &[GfnRange]) {
    // SAFETY: orders this hart's stores of PTEs before the interrupt.
    unsafe { asm!("fence rw, rw", options(nostack)) };
    let harts = boot::harts(cpus.begin_flush());
    if harts == 0 || cpus.control() == Control::NoKick {
        return;
    }
    if ranges.len() > MAX_RANGES || ranges.iter().any(|range| range.nr_pages() >= TABLE_PAGES) {
        remote_fence(harts, 0, u64::MAX);
    } else {
        for range in ranges {
            remote_fence(harts, range.start.gpa().0, range.nr_pages() * PAGE_SIZE);
        }
    }
}

fn remote_fence(harts: u64, start: u64, size_bytes: u64) {
    let harts = HartMask::from_mask_base(harts as usize, 0);
    let result = sbi_rt::remote_hfence_gvma_vmid(harts, start as usize, size_bytes as usize, VMID as usize);
    // A hart may use old translations.
    if result.is_err() {
        error!("the firmware makes no fence of translations: {result:?}");
    }
}

/// Drops what the calling hart has of the page at `gpa`: rs1 is the address >> 2, rs2 the VMID. The
/// fence need not drop a PTE above the lowest level that was not valid. So if the same page comes
/// twice in a row, the fence is one of everything.
pub fn flush_local(gpa: Gpa) {
    // Relaxed: the CPU's own.
    if LAST[super::cpu_number()].swap(gpa.gfn().0, Ordering::Relaxed) == gpa.gfn().0 {
        own_fence();
    } else {
        // SAFETY: a hypervisor is in HS-mode. No memory is written.
        unsafe { asm!(".insn r 0x73, 0, 0x31, x0, {}, {}", in(reg) gpa.0 >> 2, in(reg) VMID, options(nostack)) };
    }
}

/// Drops all translations of guests on the calling hart.
pub fn own_fence() {
    // SAFETY: as above. HFENCE.GVMA and HFENCE.VVMA, of everything.
    unsafe {
        asm!(".insn r 0x73, 0, 0x31, x0, x0, x0", ".insn r 0x73, 0, 0x11, x0, x0, x0", options(nostack));
    }
}
