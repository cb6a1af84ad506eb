//! Linux as a guest of a PC, with SVM or VMX.
//!
//! # What the guest has of the machine
//! - Memory: below 640 KiB and from 1 to 2 MiB it stays where it is; from 2 MiB on it comes by
//!   faults, and moves ([`Operations`](crate::operations::Operations)).
//! - The firmware's memory, at its own addresses: the BIOS as read-only memory, the ACPI tables.
//! - The registers of the I/O interrupt controller and of the HPET; the local interrupt controller
//!   in x2APIC mode, but for the command register (`vcpu`).
//! - All ports but those of the hypervisor's console, of the machine's end, of ACPI's sleep, and of
//!   what could access memory by itself: PCI, the DMA controllers, QEMU's configuration device.
//!
//! # What a guest could harm
//! It could stop the machine's clock and serial line, which are its own here, or keep other CPUs
//! busy by interrupts. It reaches no other memory by them.

#![expect(unsafe_code, reason = "gives the guest memory and registers of the machine")]

mod cpu;
mod devices;
mod identity;
mod image;
mod state;
mod svm;
mod vcpu;
mod vmx;

use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use slat::format::LeafAttributes;
use slat::{Gfn, Gpa, MemoryRegionFlags, PAGE_SIZE, Pfn};

use super::svm::SvmCpu;
use crate::boot::{BootInfo, Module, RegionKind, Span};
use crate::error;
use crate::host::Backing;
use crate::linux::Slots;
use crate::migration::hash_of;
use crate::migration::record::Hash;
use crate::options::Options;
use crate::ram::{self, Frames, Ram};
pub use cpu::PcCpu;
pub use devices::Devices;
use image::Image;
pub use state::{State, from_words, words};
pub use vcpu::GuestCpu;

/// The CPU that runs the guest, where nothing else is said.
pub type Cpu = SvmCpu;

/// Memory that stays where it is ends here, and memory that moves begins.
const RAM_START: Gpa = Gpa(2 << 20);
/// The hole of PCs.
const BIOS: Span = Span { start: 0xa_0000, end: 0x10_0000 };
/// The registers of the I/O interrupt controller, and of the HPET.
const DEVICES: [u64; 2] = [0xfec0_0000, 0xfed0_0000];
/// A firmware range that is larger is no table.
const MAX_FIRMWARE_BYTES: u64 = 16 << 20;

/// What [`Guest::traits`] has.
pub const TRAITS: [&str; 3] = ["the places of the firmware's memory", "the firmware's memory", "the CPU"];

/// The memory that moves, of a guest with `memory_bytes` of memory.
pub fn ram_span(memory_bytes: u64) -> Span {
    Span { start: RAM_START.0, end: memory_bytes }
}

/// What the guest has beside its memory that moves.
#[derive(Debug)]
pub struct Guest {
    /// `None`: the guest comes from another machine.
    image: Option<Image>,
    /// Memory that stays where it is.
    low: Frames,
    /// The firmware's memory that the guest has, too.
    firmware: Vec<Span>,
    traits: [u64; TRAITS.len()],
}

impl Guest {
    /// Gives a guest as `options` say the machine of `boot`, and loads `kernel`, whose text is its
    /// command line, and `initramfs`.
    pub fn new(
        options: &Options,
        boot: &BootInfo,
        [kernel, initramfs]: [Module; 2],
        slots: &mut Slots<'_>,
        ram: &Ram,
    ) -> Guest {
        let mut guest = Guest::without_kernel(options, boot, slots);
        let image = Image::load(options, boot, [kernel, initramfs], &guest.low, ram);
        guest.image = Some(image.unwrap_or_else(|error| error!("{error}")));
        guest
    }

    /// The same, but for the kernel.
    pub fn without_kernel(options: &Options, boot: &BootInfo, slots: &mut Slots<'_>) -> Guest {
        let end = options.memory_mib << 20;
        // Where guest-physical 0 would be.
        let low = Frames::allocate(RAM_START.0 / PAGE_SIZE).unwrap_or_else(|| error!("no memory for the guest"));
        (0..RAM_START.0 / PAGE_SIZE)
            .for_each(|page| low.words(page).iter().for_each(|word| word.store(0, Ordering::Relaxed)));
        // SAFETY: memory that was allocated for the guest, or the firmware's, which the image does
        // not use.
        let fixed = |first| unsafe { Backing::fixed(first, first, LeafAttributes::default()) };
        let frame = |address: u64| Pfn(low.first().0 + address / PAGE_SIZE);
        let none = MemoryRegionFlags::empty();
        slots.add(Span { start: 0, end: BIOS.start }, fixed(frame(0)), none);
        slots.add(BIOS, fixed(Pfn(BIOS.start / PAGE_SIZE)), MemoryRegionFlags::READONLY);
        slots.add(Span { start: BIOS.end, end: RAM_START.0 }, fixed(frame(BIOS.end)), none);
        let firmware: Vec<Span> = firmware(boot).filter(|span| span.start >= end).collect();
        for &span in &firmware {
            slots.add(span, fixed(Pfn(span.start / PAGE_SIZE)), none);
        }
        for start in DEVICES {
            let first = Pfn(start / PAGE_SIZE);
            // SAFETY: the registers are the guest's.
            let backing = unsafe { Backing::fixed(first, first, LeafAttributes::DEVICE) };
            slots.add(Span { start, end: start + PAGE_SIZE }, backing, none);
        }
        let mut guest = Guest { image: None, low, firmware, traits: [0; TRAITS.len()] };
        guest.traits = guest.new_traits();
        guest
    }

    /// What another machine must have in common with this one, for a guest to go there: the places
    /// of the firmware's memory, what was in it when the guest began, and the CPU.
    pub fn traits(&self) -> &[u64; TRAITS.len()] {
        &self.traits
    }

    fn new_traits(&self) -> [u64; TRAITS.len()] {
        let spans = self.firmware.iter().flat_map(|span| [span.start, span.end]);
        let pages = self.firmware_pages().map(|(_, words)| hash_of(words));
        let leaves = [0, 1, 7, 0x8000_0001, 0x8000_0008].into_iter().flat_map(|leaf| {
            // EBX of leaf 1 has the number of the calling CPU.
            let [eax, ebx, ecx, edx] = identity::cpuid(leaf, 0).map(u64::from);
            [eax, if leaf == 1 { 0 } else { ebx }, ecx, edx]
        });
        let hash = |words: &mut dyn Iterator<Item = u64>| words.fold(Hash::new(), Hash::with).value();
        [hash(&mut { spans }), hash(&mut { pages }), hash(&mut { leaves })]
    }

    fn firmware_pages(&self) -> impl Iterator<Item = (Gfn, &[AtomicU64])> {
        let frames = self.firmware.iter().flat_map(|span| span.start / PAGE_SIZE..span.end / PAGE_SIZE);
        // SAFETY: the firmware's memory, which is the guest's alone (`without_kernel`), and stays.
        frames.map(|frame| (Gfn(frame), unsafe { ram::words(Pfn(frame)) }))
    }

    /// The guest's memory that stays where it is, and that the guest can write.
    pub fn fixed_pages(&self) -> impl Iterator<Item = (Gfn, &[AtomicU64])> {
        let low = (0..RAM_START.0 / PAGE_SIZE).filter(|page| !(BIOS.start..BIOS.end).contains(&(page * PAGE_SIZE)));
        low.map(|page| (Gfn(page), self.low.words(page))).chain(self.firmware_pages())
    }

    /// Frame `gfn` of it.
    pub fn fixed_page(&self, gfn: Gfn) -> Option<&[AtomicU64]> {
        self.fixed_pages().find(|(other, _)| *other == gfn).map(|(_, words)| words)
    }
}

/// The firmware's ranges above the first MiB, whole pages.
fn firmware(boot: &BootInfo) -> impl Iterator<Item = Span> + '_ {
    let spans = boot.regions().filter(|region| region.kind == RegionKind::Firmware).map(|region| region.span);
    spans
        .map(Span::pages)
        .filter(|span| span.start >= BIOS.end && span.end <= 1 << 32 && span.size_bytes() <= MAX_FIRMWARE_BYTES)
}
