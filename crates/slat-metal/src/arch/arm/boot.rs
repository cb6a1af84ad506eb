//! The start: what the loader leaves, the memory that EL2 has mapped, and the start of the other
//! CPUs.

#![expect(unsafe_code, reason = "reads what the loader left, maps memory, and starts CPUs at an address")]

use core::sync::atomic::{AtomicU64, Ordering};

use super::console;
use super::machine::{self, Machine, MachineError};
use super::stage2::Registers;
use super::sysreg::{execute, read};
use super::{USABLE, gic, psci};
use crate::boot::{self, BootInfo, MAX_CPUS, MissingCpus, RegionKind, STACK_BYTES, Span};
use crate::device_tree;
use crate::error;
use crate::semihosting::FAILED;

/// Where QEMU's machine "virt" has its memory: with an ELF file it puts the device tree there, and
/// leaves `x0` as it is after a reset.
const MEMORY_START: u64 = 0x4000_0000;

core::arch::global_asm!(
    ".set MAX_CPUS, {max_cpus}",
    ".set STACK_BYTES, {stack_bytes}",
    ".set REGISTERS_PC, {pc}",
    ".set EXIT_FAILED, {failed}",
    include_str!("boot.s"),
    max_cpus = const MAX_CPUS,
    stack_bytes = const STACK_BYTES,
    pc = const core::mem::offset_of!(Registers, pc),
    failed = const FAILED,
);

unsafe extern "C" {
    static start_other: u8;
    static boot_table: [AtomicU64; 512];
}

/// A block of the page table of EL2.
const BLOCK_BYTES: u64 = 1 << 30;
/// Normal memory, inner shareable, used, a block: as `boot.s` has the first one.
const MEMORY_BLOCK: u64 = 1 << 10 | 3 << 8 | 1 << 6 | 1 << 2 | 1;

/// What the loader left: `address` is that of the device tree, or 0.
///
/// # Errors
/// `MachineError`.
///
/// # Safety
/// To be called once, by the boot CPU, first of all. `address` is what was in `x0`; the memory of
/// the device tree and of the files that it names stays as it is.
pub unsafe fn read(address: u64) -> Result<BootInfo, MachineError> {
    let address = if address == 0 { MEMORY_START } else { address };
    if !(MEMORY_START..MEMORY_START + BLOCK_BYTES).contains(&address) {
        return Err(device_tree::TreeError::NotThere(address).into());
    }
    // SAFETY: the loader has left it, and the first GiB of memory is mapped.
    let tree = unsafe { device_tree::read(address) }?;
    // SAFETY: the loader has left them.
    let boot = unsafe { device_tree::boot_info(tree) }?;
    for region in boot.regions().filter(|region| region.kind == RegionKind::Ram) {
        // SAFETY: memory, by the device tree.
        unsafe { map(region.span.and(USABLE)) };
    }
    // SAFETY: as the device tree of this machine has it.
    unsafe { machine::set(Machine::read(tree)?) };
    Ok(boot)
}

/// Maps the blocks of `span` to themselves, as far as the table goes.
///
/// # Safety
/// The blocks are memory, or nothing is there. No other CPU has started.
unsafe fn map(span: Span) {
    // SAFETY: the table is the image's.
    let table = unsafe { &boot_table };
    for block in span.start / BLOCK_BYTES..span.end.div_ceil(BLOCK_BYTES) {
        if let Some(entry) = table.get(block as usize).filter(|entry| entry.load(Ordering::Relaxed) == 0) {
            entry.store((block * BLOCK_BYTES) | MEMORY_BLOCK, Ordering::Relaxed);
        }
    }
    // The entries were not valid: there is nothing to flush.
    // SAFETY: barriers.
    unsafe { execute!("dsb ishst", "isb") };
}

/// Starts the other CPUs, until `wanted` are there.
///
/// # Errors
/// [`MissingCpus`].
///
/// # Safety
/// To be called once, by the boot CPU.
pub(super) unsafe fn start_other_cpus(wanted: u32) -> Result<(), MissingCpus> {
    let machine = machine::get();
    let present = machine.nr_cpus as u32;
    if wanted > present {
        return Err(MissingCpus { present, wanted });
    }
    // What they read with their MMU off is the image's, which the loader has written.
    let entry = (&raw const start_other).addr() as u64;
    for number in 1..wanted {
        let mpidr = machine.cpus[number as usize];
        // SAFETY: `boot.s` expects the number of the CPU there, which has its own stack. No other
        // call starts the CPU, as the caller promises.
        if let Err(error) = unsafe { psci::cpu_on(mpidr, entry, u64::from(number)) } {
            error!("CPU {mpidr:#x} of the device tree cannot be started: {error}");
        }
    }
    boot::wait_for_cpus(wanted)
}

/// An exception of the hypervisor itself: a defect, unless the first one is the console's, which
/// nothing answers.
#[unsafe(no_mangle)]
extern "C" fn exception_main(kind: u64, syndrome: u64, pc: u64, address: u64) -> ! {
    if console::note_exception() {
        psci::system_off();
    }
    // A data abort of EL2 with the status of an external one.
    if (syndrome >> 26, syndrome & 0x3f) == (0x25, 0x10) {
        error!("nothing answers at {address:#x}, where the device tree has memory or a device ({pc:#x})");
    }
    let kind = ["synchronous exception", "interrupt", "fast interrupt", "SError"][kind as usize & 3];
    error!("{kind} of the hypervisor at {pc:#x}, ESR {syndrome:#x}, address {address:#x}, CPU {}", super::cpu_number())
}

/// Sets up the calling CPU, as far as all guests need it.
pub(super) fn set_up() {
    if read!("hcr_el2") & 1 << 34 != 0 {
        error!("HCR_EL2.E2H is set: the CPU has no EL2 without the host extensions");
    }
    gic::set_up_cpu();
}
