//! A RISC-V machine whose harts have the hypervisor extension (H), below a firmware with SBI.
//!
//! The hypervisor runs in HS-mode, without address translation of its own. CPU 0 is the hart that
//! the firmware has booted; the others have the order of the device tree.

#![expect(unsafe_code, reason = "starts the other CPUs, and sets up its own")]

pub mod boot;
pub mod clock;
pub mod code;
pub mod console;
pub(crate) mod csr;
pub mod fault;
pub mod features;
pub mod flush;
pub mod guest;
pub mod linux;
pub mod machine;
pub mod measured;
pub mod run;
pub mod trap;

use alloc::boxed::Box;

use sbi_rt::HartMask;
use slat::format::{Sv39x4, Sv48x4, Sv57x4};

use crate::boot::{BootInfo, MissingCpus, Span, wait_for_cpus};
use crate::error;
use crate::host::Control;
use crate::measure;
use crate::options::{Guest, Options};
use crate::start::{self, Work};
use crate::suite::{Part, Rounds, Suite};
use features::Features;
use run::{Bits, BitsByFaults, BitsByHarts, GStage, RiscvCpu, has_format};

pub use flush::{flush, flush_local};
pub use run::Trap;

/// Memory that frames and page tables can be in: not the first page, and not what is beyond the
/// engine's addresses.
pub const USABLE: Span = Span { start: 0x1000, end: 1 << 52 };

/// Whether page tables of guests need break before make.
pub const BREAKS_BEFORE_MAKE: bool = false;

/// An interrupt that makes a CPU leave its guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kick {
    /// That of the supervisor's software. The guest has another one, and cannot mask this.
    Software,
}

/// Makes CPU `cpu` leave its guest.
pub fn kick(cpu: u32, _kick: Kick) {
    let result = sbi_rt::send_ipi(HartMask::from_mask_base(1, boot::hart(cpu as usize) as usize));
    if result.is_err() {
        error!("the firmware sends no interrupt to CPU {cpu}: {result:?}");
    }
}

/// Whether leaving this out can be noticed on such CPUs: a leaf that replaces another one needs no
/// flush between both.
pub fn has_control(control: Control) -> bool {
    !matches!(control, Control::NoBreakFlush | Control::FlushBeforeBreak)
}

/// How a CPU runs guests: there is one way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Virtualization;

impl Virtualization {
    /// What all CPUs do with a guest as `options` say. `free_bytes` of memory are free.
    pub fn work(self, options: Options, boot: &BootInfo, free_bytes: u64) -> Box<Work> {
        match options.guest {
            Guest::Suite => start::suites(options, suites(options)),
            Guest::Measure => measure::work::<linux::Cpu>(options.nr_cpus),
            Guest::Wild => error!("the guest that runs wild needs a CPU with SVM"),
            Guest::Linux => start::linux::<linux::Cpu>(options, boot, free_bytes),
            Guest::Source | Guest::Target => error!("a guest migrates with SVM alone"),
        }
    }
}

/// A suite for each format of page tables, and for each way to set A and D, that the CPU has.
fn suites(options: Options) -> Box<[Box<dyn Rounds>]> {
    type Make = fn(Options, Part) -> Box<dyn Rounds>;
    fn make<F: GStage, B: Bits>(options: Options, part: Part) -> Box<dyn Rounds> {
        Box::new(Suite::<RiscvCpu<F, B>>::new(options, part))
    }
    let (by_harts, by_faults) = (BitsByHarts::choose(), BitsByFaults::choose());
    let all: [(bool, &'static str, Make); 6] = [
        (has_format::<Sv39x4>() && by_harts, "Sv39x4, A and D by the CPU: ", make::<Sv39x4, BitsByHarts>),
        (has_format::<Sv39x4>() && by_faults, "Sv39x4, A and D by faults: ", make::<Sv39x4, BitsByFaults>),
        (has_format::<Sv48x4>() && by_harts, "Sv48x4, A and D by the CPU: ", make::<Sv48x4, BitsByHarts>),
        (has_format::<Sv48x4>() && by_faults, "Sv48x4, A and D by faults: ", make::<Sv48x4, BitsByFaults>),
        (has_format::<Sv57x4>() && by_harts, "Sv57x4, A and D by the CPU: ", make::<Sv57x4, BitsByHarts>),
        (has_format::<Sv57x4>() && by_faults, "Sv57x4, A and D by faults: ", make::<Sv57x4, BitsByFaults>),
    ];
    let is_there = |(is_there, ..): &&(bool, &'static str, Make)| *is_there;
    let of = all.iter().filter(is_there).count() as u64;
    let parts = all.iter().filter(is_there).zip(0..);
    parts.map(|(&(_, name, make), number)| make(options, Part { name, number, of })).collect()
}

/// Sets up the calling CPU. Returns how it runs guests.
pub fn set_up() -> Virtualization {
    if !boot::features().contains(Features::H) {
        error!("the CPU has no hypervisor extension (H)");
    }
    // SAFETY: interrupts are off in HS-mode: this one makes a guest leave, and comes at no other
    // time.
    unsafe { csr::write!("sie", csr::SUPERVISOR_SOFTWARE) };
    Virtualization
}

/// Starts the other CPUs, until `wanted` are there (SBI Specification, "Hart State Management
/// Extension").
///
/// # Errors
/// [`MissingCpus`].
///
/// # Safety
/// To be called once, by the boot CPU.
pub unsafe fn start_other_cpus(wanted: u32) -> Result<(), MissingCpus> {
    unsafe extern "C" {
        static other_start: u8;
    }
    let missing = |present| MissingCpus { present, wanted };
    if boot::nr_harts() < wanted as usize {
        return Err(missing(boot::nr_harts() as u32));
    }
    for cpu in 1..wanted as usize {
        // The hart enters `boot.s` with its number as a CPU. Where it does not, the wait below
        // ends.
        sbi_rt::hart_start(boot::hart(cpu) as usize, (&raw const other_start).addr(), cpu);
    }
    wait_for_cpus(wanted)
}

/// The number of the calling CPU.
pub fn cpu_number() -> usize {
    let number: usize;
    // SAFETY: `boot.s` has put it there, and nothing in the hypervisor changes it.
    unsafe { core::arch::asm!("mv {}, tp", out(reg) number, options(nomem, nostack, preserves_flags)) };
    number
}

/// Stops the calling CPU for ever.
pub fn halt() -> ! {
    loop {
        // SAFETY: waits for an interrupt, or not.
        unsafe { core::arch::asm!("wfi", options(nomem, nostack)) };
    }
}
