//! An Arm machine with EL2, a GICv3 and PSCI: QEMU's "virt".

#![expect(unsafe_code, reason = "starts the other CPUs, and flushes")]

pub mod boot;
pub mod clock;
pub mod code;
pub mod console;
mod flush;
mod gic;
mod gic_registers;
pub mod guest;
pub mod linux;
mod machine;
pub mod measured;
mod psci;
pub mod stage2;
mod sysreg;

use alloc::boxed::Box;

use crate::boot::{BootInfo, MissingCpus, Span};
use crate::error;
use crate::host::Control;
use crate::measure;
use crate::options::{Guest, Options};
use crate::start::{self, Work};
use stage2::ArmCpu;
use sysreg::{execute, read};

pub use flush::{flush, flush_local};
pub use gic::{Kick, kick};
pub use stage2::Trap;

/// What the page table of EL2 can map, beyond the devices.
pub const USABLE: Span = Span { start: 1 << 30, end: 1 << 39 };

/// Whether page tables of guests need break before make.
pub const BREAKS_BEFORE_MAKE: bool = true;

/// How a CPU runs guests: at EL1, on stage 2 tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Virtualization;

impl Virtualization {
    /// What all CPUs do with a guest as `options` say. `free_bytes` of memory are free.
    pub fn work(self, options: Options, boot: &BootInfo, free_bytes: u64) -> Box<Work> {
        match options.guest {
            Guest::Suite => start::suite::<ArmCpu>(options),
            Guest::Measure => measure::work::<ArmCpu>(options.nr_cpus),
            Guest::Wild => error!("the guest that runs wild needs a CPU with SVM"),
            Guest::Linux => start::linux::<ArmCpu>(options, boot, free_bytes),
            Guest::Source | Guest::Target => error!("a guest migrates with SVM alone"),
        }
    }
}

/// Sets up the calling CPU. Returns how it runs guests.
pub fn set_up() -> Virtualization {
    if cpu_number() == 0 {
        gic::set_up();
    }
    boot::set_up();
    stage2::set_up().unwrap_or_else(|missing| error!("{missing}"));
    Virtualization
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

/// The number of the calling CPU, which `boot.s` has put there: 0 is the boot CPU.
pub fn cpu_number() -> usize {
    read!("tpidr_el2") as usize
}

/// Stops the calling CPU for ever.
pub fn halt() -> ! {
    loop {
        // SAFETY: the CPU waits.
        unsafe { execute!("wfi") };
    }
}

/// Whether leaving this out can be noticed on such CPUs: a flush needs no kick, and an entry no
/// flush.
pub fn has_control(control: Control) -> bool {
    !matches!(control, Control::NoKick | Control::NoEntryFlush)
}
