//! Linux as a guest of an Arm machine.
//!
//! # What the guest has of the machine
//! - Memory, all of which comes by faults, and moves
//!   ([`Operations`](crate::operations::Operations)).
//! - The serial line, the timers, and the interrupts of both, which come to it without an exit.
//! - The interrupt controller, but for what is the hypervisor's there, and what lets it access
//!   memory by itself (`devices`).
//! - A device tree of its own, and PSCI by HVC: the firmware is not the guest's (`tree`, `vcpu`).
//!
//! It has no PCI, no virtio, and no performance monitors.
//!
//! # What a guest could harm
//! It could stop the machine's serial line, which is its own, or keep other CPUs busy by
//! interrupts. It reaches no other memory by them. On an emulator with semihosting, EL1 can call
//! the emulator, as any guest there can: nothing of EL2 stops that.

#![expect(unsafe_code, reason = "gives the guest registers of the machine")]

mod devices;
mod guarded;
mod image;
mod psci;
mod tree;
mod vcpu;

use alloc::vec::Vec;

use slat::format::LeafAttributes;
use slat::{MemoryRegionFlags, PAGE_SIZE, Pfn};

use super::machine;
use super::stage2::ArmCpu;
use crate::boot::{BootInfo, Module, Span};
use crate::error;
use crate::host::Backing;
use crate::linux::Slots;
use crate::options::Options;
use crate::ram::Ram;
use devices::Devices;
use image::Image;
pub use vcpu::GuestCpu;

/// The CPU that runs the guest.
pub type Cpu = ArmCpu;

/// Where the guest has its memory, as the machine has.
const RAM_START: u64 = 0x4000_0000;

/// The memory that moves, of a guest with `memory_bytes` of memory: all.
pub fn ram_span(memory_bytes: u64) -> Span {
    Span { start: RAM_START, end: RAM_START + memory_bytes }
}

/// What the guest has beside its memory.
#[derive(Debug)]
pub struct Guest {
    image: Image,
    devices: Devices,
    /// The numbers of its CPUs.
    cpus: Vec<u64>,
}

impl Guest {
    /// Gives a guest as `options` say the machine, and loads `kernel`, whose text is its command
    /// line, and `initramfs`.
    pub fn new(
        options: &Options,
        _boot: &BootInfo,
        [kernel, initramfs]: [Module; 2],
        slots: &mut Slots<'_>,
        ram: &Ram,
    ) -> Guest {
        let machine = machine::get();
        let Some(cpus) = machine.cpus[..machine.nr_cpus].get(..options.nr_cpus) else {
            error!("the machine has {} CPUs; the guest needs {}", machine.nr_cpus, options.nr_cpus);
        };
        let first = Pfn(machine.serial.start / PAGE_SIZE);
        // SAFETY: the serial line is the guest's: the hypervisor does not use it.
        let backing = unsafe { Backing::fixed(first, first, LeafAttributes::DEVICE) };
        let page = Span { start: machine.serial.start, end: machine.serial.start + PAGE_SIZE };
        slots.add(page, backing, MemoryRegionFlags::empty());
        let span = ram_span(options.memory_mib << 20);
        let devices = Devices::new(cpus);
        let image = Image::load([kernel, initramfs], span, ram, |initramfs| {
            tree::guest_tree(machine, devices.redistributors(), cpus, span, kernel.text, initramfs)
        });
        let image = image.unwrap_or_else(|error| error!("{error}"));
        Guest { image, devices, cpus: cpus.to_vec() }
    }

    /// The index of the CPU with the number `mpidr`.
    fn cpu_index(&self, mpidr: u64) -> Option<usize> {
        self.cpus.iter().position(|&number| number == mpidr)
    }
}
