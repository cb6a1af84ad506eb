//! Linux as a guest of a RISC-V machine.
//!
//! # What the guest has of the machine
//! - Memory from [`RAM_START`] on, which comes by faults, and moves.
//! - The firmware: SBI, by this hypervisor (`sbi`).
//! - A timer of its own (Sstc), and the counters of cycles, time and instructions.
//! - The registers of the UART, whose interrupt it does not have: it asks the UART now and then.
//! - A device tree that has these, and nothing else (`tree`).
//!
//! # What a guest could harm
//! The serial line, which is its own here. It reaches no other memory by it.

#![expect(unsafe_code, reason = "gives the guest registers of the machine")]

mod answers;
mod image;
mod sbi;
mod tree;
mod vcpu;

use core::sync::atomic::AtomicBool;

use slat::format::{LeafAttributes, Sv48x4};
use slat::{Gpa, MemoryRegionFlags, PAGE_SIZE, Pfn};

use super::boot;
use super::features::Features;
use super::run::{BitsByHarts, RiscvCpu, has_format};
use crate::boot::{BootInfo, MAX_CPUS, Module, Span};
use crate::error;
use crate::host::Backing;
use crate::linux::Slots;
use crate::options::Options;
use crate::ram::Ram;
use image::Image;
pub use vcpu::GuestCpu;

/// The CPU that runs the guest.
pub type Cpu = RiscvCpu<Sv48x4, BitsByHarts>;

/// Where the guest's memory begins.
pub const RAM_START: Gpa = Gpa(0x8000_0000);

/// The memory that moves, of a guest with `memory_bytes` of memory.
pub fn ram_span(memory_bytes: u64) -> Span {
    Span { start: RAM_START.0, end: RAM_START.0 + memory_bytes }
}

/// What the guest has beside its memory that moves.
#[derive(Debug)]
pub struct Guest {
    image: Image,
    /// For each vCPU, whether another one has sent it an interrupt that its CPU has not passed on.
    interrupts: [AtomicBool; MAX_CPUS],
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
        if !has_format::<Sv48x4>() {
            error!("the CPU has no Sv48x4 page tables");
        }
        if !boot::features().contains(Features::SSTC) {
            error!("the CPU has no timer for guests (Sstc)");
        }
        if let Some((span, _)) = boot::uart() {
            let span = span.pages();
            let first = Pfn(span.start / PAGE_SIZE);
            // SAFETY: the registers are the guest's.
            let backing = unsafe { Backing::fixed(first, first, LeafAttributes::DEVICE) };
            slots.add(span, backing, MemoryRegionFlags::empty());
        }
        let span = ram_span(options.memory_mib << 20);
        let image =
            Image::load([kernel, initramfs], span, ram, |initramfs| tree::build(options, kernel.text, span, initramfs));
        let image = image.unwrap_or_else(|error| error!("{error}"));
        Guest { image, interrupts: Default::default() }
    }
}
