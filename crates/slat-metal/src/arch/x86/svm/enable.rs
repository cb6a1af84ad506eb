//! Turns SVM on (AMD APM vol. 2, 15.4 "Enabling SVM").

#![expect(unsafe_code, reason = "writes model-specific registers")]

use alloc::boxed::Box;

use raw_cpuid::CpuId;
use thiserror::Error;
use x86_64::registers::model_specific::{Efer, EferFlags, Msr};

use crate::arch::x86::page::Page;

/// Bit 4 says that the firmware has turned SVM off.
const VM_CR: u32 = 0xc001_0114;
const VM_CR_SVMDIS: u64 = 1 << 4;
/// The physical address of the page where VMRUN keeps the host's state.
const VM_HSAVE_PA: u32 = 0xc001_0117;

/// What the CPU lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum Missing {
    /// No SVM (CPUID 8000_0001h, ECX bit 2).
    #[error("the CPU has no SVM")]
    Svm,
    /// The firmware has turned SVM off.
    #[error("the firmware has turned SVM off (VM_CR.SVMDIS)")]
    TurnedOff,
    /// No nested paging (CPUID 8000_000Ah, EDX bit 0).
    #[error("the CPU has no nested paging")]
    NestedPaging,
}

/// Turns SVM on, on the calling CPU.
///
/// # Errors
/// [`Missing`].
pub fn enable() -> Result<(), Missing> {
    let cpuid = CpuId::new();
    if !cpuid.get_extended_processor_and_feature_identifiers().is_some_and(|features| features.has_svm()) {
        return Err(Missing::Svm);
    }
    if !cpuid.get_svm_info().is_some_and(|svm| svm.has_nested_paging()) {
        return Err(Missing::NestedPaging);
    }
    // SAFETY: the CPU has SVM, and so the register.
    if unsafe { Msr::new(VM_CR).read() } & VM_CR_SVMDIS != 0 {
        return Err(Missing::TurnedOff);
    }
    let host_save: &'static Page = Box::leak(Page::new());
    // SAFETY: the page is the CPU's from now on.
    unsafe {
        Efer::update(|flags| flags.insert(EferFlags::SECURE_VIRTUAL_MACHINE_ENABLE));
        Msr::new(VM_HSAVE_PA).write(host_save.address());
    }
    Ok(())
}
