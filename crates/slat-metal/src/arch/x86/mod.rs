//! A PC: how its CPUs start, their descriptor tables and interrupts, its clock and its console; and
//! its two kinds of virtualization.

#![expect(unsafe_code, reason = "starts the other CPUs")]

pub mod acpi;
pub mod apic;
pub mod boot;
pub mod clock;
pub mod console;
pub mod cpu;
pub mod guest;
pub mod linux;
pub mod measured;
pub mod page;
pub mod pci;
pub mod registers;
pub mod srat;
pub mod svm;
pub mod vmx;
mod wild;

use alloc::boxed::Box;

use raw_cpuid::CpuId;
use slat::{GfnRange, Gpa};

use crate::boot::{BootInfo, MAX_CPUS, MissingCpus, Span};
use crate::cpus::Cpus;
use crate::error;
use crate::host::Control;
use crate::measure;
use crate::options::{Guest, Options};
use crate::start::{self, Work};

pub use apic::{Kick, kick};
pub use registers::Trap;

/// The first MiB has the trampoline and the firmware's data: no allocation comes from there. The
/// boot page tables map what is below 4 GiB.
pub const USABLE: Span = Span { start: 1 << 20, end: 1 << 32 };

/// Whether page tables of guests need break before make.
pub const BREAKS_BEFORE_MAKE: bool = false;

/// How a CPU runs guests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Virtualization {
    /// AMD's.
    Svm,
    /// Intel's.
    Vmx,
}

impl Virtualization {
    /// That of the calling CPU.
    fn of_cpu() -> Option<Virtualization> {
        let cpuid = CpuId::new();
        let has_svm = cpuid.get_extended_processor_and_feature_identifiers().is_some_and(|features| features.has_svm());
        let has_vmx = cpuid.get_feature_info().is_some_and(|features| features.has_vmx());
        match (has_svm, has_vmx) {
            (true, _) => Some(Virtualization::Svm),
            (false, true) => Some(Virtualization::Vmx),
            (false, false) => None,
        }
    }

    /// What all CPUs do with a guest as `options` say. `free_bytes` of memory are free.
    pub fn work(self, options: Options, boot: &BootInfo, free_bytes: u64) -> Box<Work> {
        match (options.guest, self) {
            (Guest::Suite, Virtualization::Svm) => start::suite::<svm::SvmCpu>(options),
            (Guest::Suite, Virtualization::Vmx) => start::suite::<vmx::VmxCpu>(options),
            (Guest::Measure, Virtualization::Svm) => measure::work::<svm::SvmCpu>(options.nr_cpus),
            (Guest::Measure, Virtualization::Vmx) => error!("instructions are counted with SVM"),
            (Guest::Wild, Virtualization::Svm) => wild::work(options),
            (Guest::Wild, Virtualization::Vmx) => error!("the guest that runs wild needs a CPU with SVM"),
            (Guest::Linux, Virtualization::Svm) => start::linux::<svm::SvmCpu>(options, boot, free_bytes),
            (Guest::Linux, Virtualization::Vmx) => start::linux::<vmx::VmxCpu>(options, boot, free_bytes),
            (Guest::Source, Virtualization::Svm) => start::source(options, boot, free_bytes),
            (Guest::Target, Virtualization::Svm) => start::target(options, boot, free_bytes),
            (Guest::Source | Guest::Target, Virtualization::Vmx) => error!("a guest migrates with SVM alone"),
        }
    }
}

/// Sets up the calling CPU. Returns how it runs guests.
pub fn set_up() -> Virtualization {
    // First: before it knows its number, a CPU allocates nothing.
    if !apic::is_there() {
        error!("the CPU has no x2APIC");
    }
    apic::enable();
    cpu::set_up();
    // The page tables of `guest` have such pages.
    let extended = CpuId::new().get_extended_processor_and_feature_identifiers();
    if !extended.is_some_and(|features| features.has_1gib_pages()) {
        error!("the CPU has no pages of 1 GiB");
    }
    let virtualization = Virtualization::of_cpu().unwrap_or_else(|| error!("the CPU has neither SVM nor VMX"));
    match virtualization {
        Virtualization::Svm => svm::enable().unwrap_or_else(|missing| error!("{missing}")),
        Virtualization::Vmx => vmx::enable().unwrap_or_else(|missing| error!("{missing}")),
    }
    if cpu_number() >= MAX_CPUS {
        error!("a CPU has the number {}; {MAX_CPUS} are possible", cpu_number());
    }
    virtualization
}

/// Starts the other CPUs, until `wanted` are there.
///
/// # Errors
/// [`MissingCpus`].
///
/// # Safety
/// To be called once, by the boot CPU.
pub unsafe fn start_other_cpus(wanted: u32) -> Result<(), MissingCpus> {
    // SAFETY: as the caller promises.
    unsafe { boot::start_other_cpus(wanted) }
}

/// The number of the calling CPU: that of its interrupt controller, so a guest that uses these
/// finds its vCPUs where it looks for them.
pub fn cpu_number() -> usize {
    apic::id() as usize
}

/// Stops the calling CPU until it is kicked.
pub fn wait_for_kick() {
    x86_64::instructions::hlt();
}

/// Stops the calling CPU for ever.
pub fn halt() -> ! {
    loop {
        x86_64::instructions::hlt();
    }
}

/// Drops all translations of the CPUs that run the guest of `cpus`: each that had entered before
/// has left when this returns.
pub fn flush(cpus: &Cpus, _ranges: &[GfnRange]) {
    cpus.flush_by_kicks();
}

/// Nothing: a fault drops what caused it (Intel SDM vol. 3C, "Operations that Invalidate Cached
/// Mappings"; AMD APM vol. 2, 5.5.2). The engine never asks for it.
pub fn flush_local(_gpa: Gpa) {}

/// Whether leaving this out can be noticed on such CPUs.
pub fn has_control(control: Control) -> bool {
    !matches!(control, Control::NoLocalFlush | Control::NoBreakFlush | Control::FlushBeforeBreak)
}
