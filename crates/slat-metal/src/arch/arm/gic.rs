//! The interrupt controller, a GICv3 (Arm GIC Architecture Specification, IHI0069).
//!
//! The hypervisor takes one interrupt: SGI 15, the only one of group 0, by which a CPU is made to
//! leave its guest. An interrupt of group 0 is a fast one (FIQ), and with HCR_EL2.FMO set these
//! come to EL2, whatever the guest masks. All others are the guest's, and come to EL1 without an
//! exit. So the guest must not change what the controller does with group 0: the hypervisor does
//! the guest's accesses to the registers itself ([`linux`](super::linux)).
//!
//! A controller with two security states leaves group 0 to the secure one, and is refused.

#![expect(unsafe_code, reason = "reads and writes the registers of the controller")]

use super::gic_registers::*;
use super::machine::{self, AFFINITY, REDISTRIBUTOR_BYTES};
use super::sysreg::{execute, read, write};
use crate::error;

/// Polls of a register before the controller counts as dead.
const MAX_POLLS: u32 = 1_000_000;

/// Reads a register.
///
/// # Safety
/// `address` is that of a register of the controller of this width.
pub(super) unsafe fn read32(address: u64) -> u32 {
    let value: u32;
    // SAFETY: devices are mapped to themselves.
    unsafe { core::arch::asm!("ldr {:w}, [{}]", out(reg) value, in(reg) address, options(nostack, preserves_flags)) };
    value
}

/// Writes a register.
///
/// # Safety
/// As for [`read32`]. The write makes no interrupt that the hypervisor does not expect.
pub(super) unsafe fn write32(address: u64, value: u32) {
    // SAFETY: as above.
    unsafe { core::arch::asm!("str {:w}, [{}]", in(reg) value, in(reg) address, options(nostack, preserves_flags)) };
}

/// Waits until `bits` of the register at `address` are clear.
///
/// # Safety
/// As for [`read32`].
unsafe fn wait_clear(address: u64, bits: u32) {
    for _ in 0..MAX_POLLS {
        // SAFETY: as the caller promises.
        if unsafe { read32(address) } & bits == 0 {
            return;
        }
    }
    error!("the interrupt controller does not answer at {address:#x}");
}

/// The redistributor of the CPU `mpidr`.
pub(super) fn redistributor(mpidr: u64) -> u64 {
    let span = machine::get().redistributors;
    let mut address = span.start;
    while address + REDISTRIBUTOR_BYTES <= span.end {
        // SAFETY: a redistributor: the region has them one after the other.
        let (typer, affinity) = unsafe { (read32(address + GICR_TYPER), read32(address + GICR_TYPER + 4)) };
        if affinity == packed(mpidr) {
            return address;
        }
        if u64::from(typer) & TYPER_LAST != 0 {
            break;
        }
        address += if u64::from(typer) & TYPER_VLPIS != 0 { 2 } else { 1 } * REDISTRIBUTOR_BYTES;
    }
    error!("the interrupt controller has no part for CPU {mpidr:#x}")
}

/// Sets up the controller, as far as all CPUs use it. By the boot CPU.
pub(super) fn set_up() {
    let control = machine::get().distributor.start + GICD_CTLR;
    // SAFETY: the distributor's registers. No interrupt is on.
    unsafe {
        if read32(control) & CTLR_ONE_STATE == 0 {
            error!("the interrupt controller has two security states: fast interrupts are not the hypervisor's");
        }
        write32(control, CTLR_AFFINITY);
        wait_clear(control, CTLR_PENDING);
        write32(control, CTLR_AFFINITY | CTLR_GROUP_1 | CTLR_GROUP_0);
        wait_clear(control, CTLR_PENDING);
    }
}

/// Sets up the part of the calling CPU: the kick is on.
pub(super) fn set_up_cpu() {
    let base = redistributor(read!("mpidr_el1") & AFFINITY);
    // SAFETY: the registers of this CPU's redistributor and CPU interface. One interrupt is on,
    // which waits until the CPU is in a guest.
    unsafe {
        // System registers, also for EL1.
        write!("icc_sre_el2", 0xf_u64);
        execute!("isb");
        write!("icc_sre_el1", 7_u64);
        execute!("isb");
        write32(base + GICR_WAKER, read32(base + GICR_WAKER) & !WAKER_SLEEP);
        wait_clear(base + GICR_WAKER, WAKER_ASLEEP);
        write32(base + GICR_IGROUPR0, !(1 << KICK));
        set_kick_priority(base);
        write32(base + GICR_ISENABLER0, 1 << KICK);
        // All priorities; the end of an interrupt is one step.
        write!("icc_pmr_el1", 0xff_u64);
        write!("icc_ctlr_el1", 0_u64);
        write!("icc_igrpen0_el1", 1_u64);
        // No virtual interrupts: those of the machine are the guest's.
        write!("ich_hcr_el2", 0_u64);
        execute!("isb");
    }
}

/// The word of the priorities that has that of the kick, which is the highest.
///
/// # Safety
/// `base` is a redistributor.
unsafe fn set_kick_priority(base: u64) {
    let address = base + GICR_IPRIORITYR + u64::from(KICK & !3);
    // SAFETY: as the caller promises.
    unsafe { write32(address, with_kick_priority(read32(address))) };
}

/// Sends the SGI `number` of group 0 to the CPU `mpidr`.
fn send(mpidr: u64, number: u32) {
    // SAFETY: the kick's interrupt, for which each CPU is prepared that has set up its part. What
    // this CPU wrote before comes before it.
    unsafe {
        execute!("dsb ishst");
        write!("icc_sgi0r_el1", sgi(mpidr, number));
        execute!("isb");
    }
}

/// An interrupt that makes a CPU leave its guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kick {
    /// A fast one, which a guest can neither mask nor own.
    Fast,
}

/// Makes the CPU `number` leave its guest.
pub fn kick(number: u32, Kick::Fast: Kick) {
    send(machine::get().cpus[number as usize], KICK);
}

/// A fast interrupt made the guest leave: takes it.
pub(super) fn take() {
    // SAFETY: the interface of this CPU. An interrupt that is not there reads as 1023, and needs no
    // end.
    unsafe {
        let number = read!("icc_iar0_el1");
        execute!("dsb sy");
        if number < 1020 {
            write!("icc_eoir0_el1", number);
            execute!("isb");
        }
    }
}
