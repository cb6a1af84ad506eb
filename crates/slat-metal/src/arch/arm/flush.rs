//! How stale translations go: by instructions, which other CPUs carry out, too (Arm ARM, D8.17 "TLB
//! maintenance"). No CPU has to leave its guest.
//!
//! # Which VM
//! The instructions are for the VMID in VTTBR_EL2. The image runs one VM at a time, always with the
//! same VMID, and each CPU has that from its start on ([`set_up`](super::stage2::set_up)). A
//! hypervisor with several VMs loads VTTBR_EL2 of the VM whose tables have changed, and puts its
//! own back afterwards.
//!
//! # The order
//! A CPU may keep translations that combine both stages. These go by VMALLE1, and a CPU could
//! combine a new one from a stale entry of stage 2. So stage 2 goes first, by IPAS2E1; the barrier
//! between both returns when all CPUs are done with it. The barrier before both makes the change of
//! the tables visible to all walks that begin then.

#![expect(unsafe_code, reason = "flushes translations")]

use slat::{GfnRange, Gpa};

use super::sysreg::execute;
use crate::cpus::Cpus;

/// Pages that are flushed one by one.
const MAX_PAGES: u64 = 64;

/// The operand of IPAS2E1: the frame number, in bits 35 to 0.
fn flush_page(frame: u64) {
    // SAFETY: dropping translations is always allowed.
    unsafe { core::arch::asm!("tlbi ipas2e1is, {}", in(reg) frame, options(nostack, preserves_flags)) };
}

/// Drops what CPUs have of `ranges`: directory entries, too, since `IPAS2E1` is for all levels.
pub fn flush(_cpus: &Cpus, ranges: &[GfnRange]) {
    let nr_pages = |range: &GfnRange| range.end.0.saturating_sub(range.start.0);
    let is_small = ranges.iter().map(nr_pages).fold(0_u64, u64::saturating_add) <= MAX_PAGES;
    // SAFETY: dropping translations is always allowed.
    unsafe { execute!("dsb ishst") };
    if is_small {
        ranges.iter().for_each(|range| (range.start.0..range.end.0).for_each(flush_page));
        // SAFETY: as above.
        unsafe { execute!("dsb ish", "tlbi vmalle1is") };
    } else {
        // SAFETY: as above.
        unsafe { execute!("tlbi vmalls12e1is") };
    }
    // SAFETY: as above.
    unsafe { execute!("dsb ish", "isb") };
}

/// Drops what the calling CPU has of the page at `gpa`: a leaf that lacked a right, when that led
/// to a fault, may have stayed.
pub fn flush_local(gpa: Gpa) {
    // SAFETY: dropping translations is always allowed.
    unsafe {
        core::arch::asm!("dsb nshst", "tlbi ipas2e1, {}", "dsb nsh", "tlbi vmalle1", "dsb nsh", "isb",
            in(reg) gpa.gfn().0, options(nostack, preserves_flags));
    }
}
