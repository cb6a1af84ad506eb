//! Turns VMX on (Intel SDM vol. 3C, "Introduction to Virtual Machine Extensions", "Enabling and
//! Entering VMX Operation").

#![expect(unsafe_code, reason = "writes control and model-specific registers")]

use alloc::boxed::Box;

use raw_cpuid::CpuId;
use thiserror::Error;
use x86_64::registers::control::{Cr0, Cr4};
use x86_64::registers::model_specific::Msr;

use super::controls::{Controls, Held, VMX_BASIC, read};
use crate::arch::x86::page::Page;

/// IA32_FEATURE_CONTROL: bit 0 locks it, bit 2 allows VMXON.
const FEATURE_CONTROL: u32 = 0x3a;
const LOCKED: u64 = 1 << 0;
const ALLOWS_VMXON: u64 = 1 << 2;

/// Bits that must be 1, and bits that may be, in CR0 and in CR4 (SDM vol. 3D, A.7 and A.8).
const CR0_FIXED: [u32; 2] = [0x486, 0x487];
const CR4_FIXED: [u32; 2] = [0x488, 0x489];
const CR4_VMXE: u64 = 1 << 13;

/// What the CPU lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Missing {
    /// No VMX (CPUID 1, ECX bit 5).
    #[error("the CPU has no VMX")]
    Vmx,
    /// The firmware has turned VMX off.
    #[error("the firmware has turned VMX off (IA32_FEATURE_CONTROL)")]
    TurnedOff,
    /// No secondary controls, EPT among them, or others that are needed.
    #[error("the CPU lacks controls of VMX: {bits:#x} of register {register:#x}")]
    Controls {
        /// The register that says so.
        register: u32,
        /// The bits that it does not allow.
        bits: u32,
    },
    /// EPT without what is needed.
    #[error("the CPU's EPT lacks 4 levels, write-back tables, 2 MiB leaves, A and D, or INVEPT: {found:#x}")]
    EptCapabilities {
        /// What it has.
        found: u64,
    },
    /// VMXON failed.
    #[error("VMXON failed")]
    Vmxon,
}

/// Turns VMX on, on the calling CPU.
///
/// # Errors
/// [`Missing`].
pub fn enable() -> Result<(), Missing> {
    if !CpuId::new().get_feature_info().is_some_and(|features| features.has_vmx()) {
        return Err(Missing::Vmx);
    }
    let mut feature_control = Msr::new(FEATURE_CONTROL);
    // SAFETY: a CPU with VMX has the register. The firmware may have left it open.
    unsafe {
        if feature_control.read() & LOCKED == 0 {
            feature_control.write(feature_control.read() | LOCKED | ALLOWS_VMXON);
        }
        if feature_control.read() & ALLOWS_VMXON == 0 {
            return Err(Missing::TurnedOff);
        }
    }
    Controls::of_cpu(Held::Nothing)?;
    let region: &'static mut Page = Box::leak(Page::new());
    region.set_first_word(revision());
    // SAFETY: the bits are those that VMX requires, and all others stay. The region is the CPU's
    // from now on.
    let has_failed = unsafe {
        Cr0::write_raw(fixed(Cr0::read_raw(), CR0_FIXED));
        Cr4::write_raw(fixed(Cr4::read_raw() | CR4_VMXE, CR4_FIXED));
        let has_failed: u8;
        core::arch::asm!("vmxon [{}]", "setna {}", in(reg) &region.address(), out(reg_byte) has_failed,
            options(nostack));
        has_failed != 0
    };
    if has_failed { Err(Missing::Vmxon) } else { Ok(()) }
}

/// The number of the format of this CPU's control structures.
pub(super) fn revision() -> u32 {
    read(VMX_BASIC) as u32 & !(1 << 31)
}

/// `value` with the bits that the registers `fixed` ask for.
fn fixed(value: u64, fixed: [u32; 2]) -> u64 {
    let [must, may] = fixed.map(read);
    (value | must) & may
}
