//! The first process of a Linux machine on which `slat metal --guest measure` measures KVM.
//!
//! It loads Debian's KVM modules, has KVM run the guest that `slat-metal` runs too, and counts the
//! instructions of the same events. The machine is emulated; its counter counts instructions.
//!
//! # Implementation
//! 1. The modules are in `/modules` ([`modules`]). On x86 KVM is measured twice: with nested paging,
//!    and with shadow page tables.
//! 2. [`events`] measures, with a VM ([`vm`]) on memory of this process ([`memory`]). On x86
//!    `together` does, with as many vCPUs as the machine has CPUs.
//! 3. The figures go to the machine's debug console, in the lines that `slat-metal` writes, and the
//!    machine ends by the same device or call ([`console`]).
//!
//! What the instruction sets do differently is in [`arch`].

#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64", target_arch = "riscv64"))))]
compile_error!("it is the init program of a Linux machine on x86-64, Arm or RISC-V, each with 64 bits");

mod arch;
mod clock;
mod console;
#[cfg(target_arch = "x86_64")]
mod cpus;
mod events;
#[path = "../../slat-metal/src/measure/guest.rs"]
mod guest;
mod memory;
mod modules;
#[cfg(target_arch = "x86_64")]
mod together;
mod vm;
mod wrong;

use clock::Clock;
use console::{Console, Verdict};
use wrong::Wrong;

fn main() {
    // Ports of an ordinary machine are none of this program's.
    if std::process::id() != 1 {
        eprintln!("{}", Wrong::NotFirst);
        std::process::exit(1);
    }
    let mut console = match Console::open() {
        Ok(console) => console,
        Err(wrong) => {
            // The kernel panics when its first process ends, and so ends the machine.
            println!("{wrong}");
            return;
        }
    };
    let (verdict, text) = match measure(&mut console) {
        Ok(()) => (Verdict::Pass, format!("{} pages measured for each figure", guest::NR_PAGES)),
        Err(wrong) => (Verdict::Fail, format!("KVM: {wrong}")),
    };
    console.end(verdict, &text);
}

fn measure(console: &mut Console) -> Result<(), Wrong> {
    modules::mount_file_systems()?;
    arch::start_counter()?;
    // Later this thread stays on one of them.
    #[cfg(target_arch = "x86_64")]
    let nr_cpus = cpus::number()?;
    #[cfg(not(target_arch = "x86_64"))]
    let nr_cpus = 1;
    arch::MODULES.iter().try_for_each(|module| modules::load(module, c""))?;
    for (number, paging) in (0..).zip(arch::PAGINGS) {
        console.line(&format!("progress {number} {} KVM, {}", arch::PAGINGS.len(), paging.name));
        if let Some(module) = paging.module {
            modules::load(module.file, module.parameters)?;
        }
        measure_paging(console, paging.name, nr_cpus)?;
        if let Some(module) = paging.module {
            modules::unload(module.name)?;
        }
    }
    Ok(())
}

/// Measures KVM as it is loaded. With several CPUs other events are.
fn measure_paging(console: &mut Console, paging: &str, nr_cpus: u64) -> Result<(), Wrong> {
    let clock = Clock::new()?;
    #[cfg(target_arch = "x86_64")]
    together::measure(console, paging, clock, nr_cpus)?;
    if nr_cpus == 1 { events::measure(console, paging, clock) } else { Ok(()) }
}
