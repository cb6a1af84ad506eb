//! What the boot loader hands over: command line, modules, memory map (Multiboot Specification
//! 0.6.96); the nodes; and the start of the other CPUs.

#![expect(unsafe_code, reason = "reads what the boot loader wrote, and starts CPUs at an address")]

use core::slice;

use multiboot::information::{MemoryManagement, MemoryType, Multiboot, PAddr};
use thiserror::Error;

use super::acpi::{self, AcpiError};
use super::apic::{self, Delivery};
use super::clock;
use crate::boot::{
    BootInfo, MAX_CPUS, MAX_REGIONS, MissingCpus, Module, Region, RegionKind, STACK_BYTES, Span, wait_for_cpus,
};

/// Where the startup IPI sends a CPU: a page below 1 MiB that the memory map has as free.
const TRAMPOLINE: usize = 0x8000;

core::arch::global_asm!(
    ".set MAX_CPUS, {max_cpus}",
    ".set STACK_BYTES, {stack_bytes}",
    include_str!("boot.s"),
    max_cpus = const MAX_CPUS,
    stack_bytes = const STACK_BYTES,
);

unsafe extern "C" {
    static trampoline: u8;
    static trampoline_end: u8;
}

/// Memory is mapped to itself, below 4 GiB.
struct Identity;

impl MemoryManagement for Identity {
    unsafe fn paddr_to_slice(&self, address: PAddr, length: usize) -> Option<&'static [u8]> {
        // SAFETY: the boot loader's addresses, which are mapped, and which the image does not
        // write.
        (address != 0 && address < 1 << 32).then(|| unsafe { slice::from_raw_parts(address as *const u8, length) })
    }
    unsafe fn allocate(&mut self, _length: usize) -> Option<(PAddr, &mut [u8])> {
        None
    }
    unsafe fn deallocate(&mut self, _address: PAddr) {}
}

/// The text after the first word: loaders put the name of the file first.
fn after_name(text: &'static str) -> &'static str {
    text.split_once(' ').map_or("", |(_, rest)| rest.trim())
}

/// The machine is not described in a way that makes sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum BootError {
    /// The boot loader's part.
    #[error("the boot loader left no memory map")]
    NoMemoryMap,
    /// The firmware's part.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
}

/// Reads what a multiboot loader left at `info`, and the firmware's tables.
///
/// # Errors
/// [`BootError`].
///
/// # Safety
/// A multiboot loader has entered the image with this address in `ebx`, and neither what it left has
/// been overwritten nor what the firmware left.
pub unsafe fn read(info: u32) -> Result<BootInfo, BootError> {
    // SAFETY: as the caller promises.
    let mut boot = unsafe { read_multiboot(info) }.ok_or(BootError::NoMemoryMap)?;
    // SAFETY: as the caller promises; `boot.s` has mapped memory.
    boot.nodes = unsafe { acpi::nodes(&boot) }?;
    Ok(boot)
}

/// What a multiboot loader left at `info`. `None` if there is nothing that makes sense.
///
/// # Safety
/// As for [`read`].
unsafe fn read_multiboot(info: u32) -> Option<BootInfo> {
    let mut memory = Identity;
    // SAFETY: as the caller promises.
    let multiboot = unsafe { Multiboot::from_ptr(PAddr::from(info), &mut memory) }?;
    // One that `BootInfo` left out might be the firmware's.
    if multiboot.memory_regions()?.count() > MAX_REGIONS {
        return None;
    }
    let regions = multiboot.memory_regions()?.map(|entry| {
        let start = entry.base_address();
        let span = Span { start, end: start.saturating_add(entry.length()) };
        let kind = if entry.memory_type() == MemoryType::Available { RegionKind::Ram } else { RegionKind::Firmware };
        Region { span, kind }
    });
    let modules = multiboot.modules().into_iter().flatten().filter_map(|module| {
        let length = module.end.saturating_sub(module.start) as usize;
        // SAFETY: the boot loader has put the module there.
        let bytes = unsafe { Identity.paddr_to_slice(module.start, length) }?;
        // SAFETY: the boot loader has put it there.
        let text = unsafe { loader_text(module.string) };
        Some(Module { bytes, text })
    });
    // SAFETY: as above.
    let command_line = unsafe { loader_text(multiboot.command_line()) };
    // SAFETY: the boot loader's memory map, which is not too long.
    Some(unsafe { BootInfo::new(command_line, regions, modules) })
}

/// The text after the name, for good.
///
/// # Safety
/// The text is the boot loader's, whose memory is never written: `Memory::add` leaves it out.
unsafe fn loader_text(text: Option<&str>) -> &'static str {
    // SAFETY: as the caller promises.
    text.map_or("", |text| after_name(unsafe { &*core::ptr::from_ref(text) }))
}

/// Starts the other CPUs, by INIT and two startup IPIs to all of them (Intel SDM vol. 3A, 9.4.4
/// "MP Initialization Example"; AMD APM vol. 2, 16.9.4), and waits until `wanted` CPUs are there.
///
/// # Errors
/// [`MissingCpus`].
///
/// # Safety
/// To be called once, by the boot CPU.
pub unsafe fn start_other_cpus(wanted: u32) -> Result<(), MissingCpus> {
    let code = &raw const trampoline;
    let length = (&raw const trampoline_end).addr() - code.addr();
    // SAFETY: the page is free in each PC's memory map, and the allocator does not have it.
    unsafe { core::ptr::copy_nonoverlapping(code, TRAMPOLINE as *mut u8, length) };
    // SAFETY: the other CPUs have not started.
    unsafe { apic::send_to_others(Delivery::Init) };
    clock::wait_us(10_000);
    for _ in 0..2 {
        // SAFETY: the trampoline is there.
        unsafe { apic::send_to_others(Delivery::Startup { vector: (TRAMPOLINE >> 12) as u8 }) };
        clock::wait_us(200);
    }
    wait_for_cpus(wanted)
}
