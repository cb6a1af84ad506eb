//! The local interrupt controller in x2APIC mode (Intel SDM vol. 3A, 11.12 "Extended XAPIC";
//! AMD APM vol. 2, 16.11 "x2APIC Support").

#![expect(unsafe_code, reason = "writes the registers of the interrupt controller")]

use raw_cpuid::CpuId;
use x86_64::registers::model_specific::Msr;

/// APIC_BASE: bit 11 turns the controller on, bit 10 is its x2APIC mode.
const APIC_BASE: u32 = 0x1b;
const ENABLE: u64 = 1 << 11;
const X2APIC: u64 = 1 << 10;

/// The controller's number (SDM vol. 3A, table 11-6).
const X2APIC_ID: u32 = 0x802;
/// The task-priority register.
const X2APIC_TPR: u32 = 0x808;
/// The spurious-interrupt vector register; bit 8 is the software enable.
const X2APIC_SVR: u32 = 0x80f;
/// The interrupt command register.
pub const X2APIC_ICR: u32 = 0x830;

/// How an interrupt is delivered (bits 10:8 of the command register).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Delivery {
    /// Not maskable.
    Nmi,
    /// To the state of after reset.
    Init,
    /// From there to real mode, at `vector` << 12.
    Startup {
        /// The number of the page.
        vector: u8,
    },
}

impl Delivery {
    /// As bits of the command register. All have the level of an assertion, bit 14.
    fn bits(self) -> u64 {
        match self {
            Delivery::Nmi => 4 << 8 | 1 << 14,
            Delivery::Init => 5 << 8 | 1 << 14,
            Delivery::Startup { vector } => 6 << 8 | 1 << 14 | u64::from(vector),
        }
    }
}

/// Whether the calling CPU has an x2APIC.
pub fn is_there() -> bool {
    CpuId::new().get_feature_info().is_some_and(|features| features.has_x2apic())
}

/// Turns on the controller of the calling CPU, in x2APIC mode.
pub fn enable() {
    let mut base = Msr::new(APIC_BASE);
    // SAFETY: the image owns the controller, and the CPU has the mode (`is_there`).
    unsafe {
        let old = base.read();
        base.write(old | ENABLE);
        base.write(old | ENABLE | X2APIC);
        Msr::new(X2APIC_SVR).write(0x1ff);
        // All interrupts come.
        Msr::new(X2APIC_TPR).write(0);
    }
}

/// The number of the calling CPU's controller.
pub fn id() -> u32 {
    // SAFETY: reading it changes nothing.
    unsafe { Msr::new(X2APIC_ID).read() as u32 }
}

/// Writes `command` to the command register of the calling CPU.
///
/// # Safety
/// The CPUs that get the interrupt have a handler for it, and memory that may be executed where a
/// startup sends them. No reserved bit is set.
pub unsafe fn write_icr(command: u64) {
    // The write does not wait for earlier stores (SDM vol. 3A, 11.12.3): hence the fences.
    // SAFETY: as the caller promises.
    unsafe {
        core::arch::asm!("mfence", "lfence", options(nostack, preserves_flags));
        Msr::new(X2APIC_ICR).write(command);
    }
}

/// An interrupt that makes a CPU leave its guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kick {
    /// One that a guest can neither mask nor own.
    Nmi,
}

/// Makes the CPU whose controller has the number `id` leave its guest.
pub fn kick(id: u32, Kick::Nmi: Kick) {
    // SAFETY: each CPU that has run a guest has a handler for NMIs.
    unsafe { write_icr(u64::from(id) << 32 | Delivery::Nmi.bits()) };
}

/// Interrupts all other CPUs (destination shorthand 3, bits 19:18).
///
/// # Safety
/// As for [`write_icr`].
pub unsafe fn send_to_others(delivery: Delivery) {
    // SAFETY: as the caller promises.
    unsafe { write_icr(3 << 18 | delivery.bits()) };
}
