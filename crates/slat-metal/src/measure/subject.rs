//! The VM that is measured: a memslot whose frames are there already, and the guest that writes it.

#![expect(unsafe_code, reason = "gives a guest memory, and runs it")]

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use slat::error::FaultError;
use slat::format::LeafAttributes;
use slat::{Access, Config, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vm};

use super::samples::Samples;
use crate::arch::measured;
use crate::boot;
use crate::cpus::{Cpus, Presence};
use crate::host::{Backing, Control, MetalHost};
use crate::memory::own_node;
use crate::operations::{MetalVcpu, MetalVm};
use crate::private::{PRIVATE_BYTES, Private};
use crate::ram::{Blocks, Ram};
use crate::virtual_cpu::{Exit, SecondStage, Start, VirtualCpu};
use crate::{error, fail};

/// Pages that are measured: 16 MiB.
pub(super) const NR_PAGES: u64 = 4096;
/// Pages of 2 MiB among them.
pub(super) const NR_BLOCKS: u64 = NR_PAGES / BLOCK_PAGES;
/// Pages of a block.
pub(super) const BLOCK_PAGES: u64 = 512;

// Above where any machine has the image, whose text the guest has at its own address.
const START: Gpa = Gpa(0x10_0000_0000);
const PRIVATE_START: Gpa = Gpa(0x18_0000_0000);

// Memslots.
const IMAGE_SLOT: u32 = 0;
const PRIVATE_SLOT: u32 = 1;
pub(super) const SLOT: u32 = 2;

// Offsets in what the guest and the hypervisor exchange (`arch::measured`).
const FIRST: u64 = Private::FREE;
const COUNT: u64 = FIRST + 8;
const DISTANCE: u64 = FIRST + 16;
const DIFFERENCES: u64 = FIRST + 32;

const _: () = assert!(DIFFERENCES + 8 * NR_PAGES <= PRIVATE_BYTES);

/// The VM and its guest.
pub(super) struct Subject<V: VirtualCpu> {
    // The CPU goes before the VM, and the VM before the memory of its memslots.
    cpu: V,
    vcpu: MetalVcpu<V::Format>,
    pub vm: Arc<MetalVm<V::Format>>,
    presence: Presence,
    pub ram: Arc<Ram>,
    private: Private,
}

/// Zeroed frames.
fn fill(_page: u64, words: &[AtomicU64]) {
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

impl<V: VirtualCpu> Subject<V> {
    /// One whose memory comes in blocks of `kind`, all of it allocated. Nothing of it is mapped;
    /// the guest's code and what it exchanges with the hypervisor is.
    pub fn new(config: Config, kind: Blocks) -> Subject<V> {
        let cpus = Cpus::new(Control::None, V::KICK);
        let vm = Vm::new(MetalHost { cpus: cpus.clone() }, config.with_hardware(V::hardware()))
            .unwrap_or_else(|error| error!("no VM: {error}"));
        let vm = Arc::new(vm);
        let ram = Arc::new(Ram::of(kind, NR_PAGES, fill));
        if (0..NR_PAGES).any(|page| ram.frame(page).is_none()) {
            error!("no memory to measure");
        }
        let private = Private::new(PRIVATE_START, own_node());
        let text = boot::image_text();
        // SAFETY: the image's text, which the guest may only read, and private memory, which goes
        // after the VM.
        let fixed = |first| unsafe { Backing::fixed(first, first, LeafAttributes::default()) };
        let image = fixed(Pfn(text.start / PAGE_SIZE));
        let regions = [
            (IMAGE_SLOT, MemoryRegionFlags::READONLY, Gpa(text.start), text.size_bytes(), image),
            (PRIVATE_SLOT, MemoryRegionFlags::empty(), private.gpa, PRIVATE_BYTES, fixed(private.first_frame())),
            (SLOT, MemoryRegionFlags::empty(), START, NR_PAGES * PAGE_SIZE, Backing::Ram(ram.clone())),
        ];
        for (slot, flags, guest_phys_addr, memory_size, backing) in regions {
            let backing = Some(backing);
            let region = MemoryRegion { slot, flags, guest_phys_addr, memory_size, backing, userfault_bitmap: None };
            vm.set_user_memory_region(region).unwrap_or_else(|error| error!("no memslot {slot}: {error}"));
        }
        let mut vcpu = vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        for (gpa, size_bytes, access) in
            [(Gpa(text.start), text.size_bytes(), Access::Execute), (private.gpa, PRIVATE_BYTES, Access::Write)]
        {
            vcpu.pre_fault_memory(gpa, size_bytes, access).unwrap_or_else(|error| fail!("nothing at {gpa}: {error}"));
        }
        // SAFETY: virtualization is on (`start`). The vCPU keeps the VM, which has this CPU.
        let mut cpu = unsafe { V::new(SecondStage::of(&vm, &config)) };
        cpu.start(Start {
            pc: measured::address(),
            stack: private.stack_end().0,
            tables: private.gpa.0,
            argument: private.free_gpa().0,
        });
        // SAFETY: the only one of these CPUs.
        let presence = unsafe { Presence::new(&cpus, 0) };
        Subject { presence, vcpu, vm, cpu, ram, private }
    }

    /// The guest writes `nr_pages` pages, `distance` pages apart, and `handle` handles its faults.
    pub fn write(
        &mut self,
        nr_pages: u64,
        distance: u64,
        mut handle: impl FnMut(&mut MetalVcpu<V::Format>, Gpa, Access) -> Result<Outcome, FaultError>,
    ) {
        for (offset, value) in [(FIRST, START.0), (COUNT, nr_pages), (DISTANCE, distance * PAGE_SIZE)] {
            // Relaxed, here and below: this CPU enters the guest next.
            self.private.word(offset).store(value, Ordering::Relaxed);
        }
        loop {
            match self.cpu.run(&self.presence) {
                Exit::Kick => {}
                Exit::PageFault { gpa, access } => match handle(&mut self.vcpu, gpa, access) {
                    Ok(Outcome::Resume) => {}
                    Ok(Outcome::Exit(exit)) => fail!("the guest cannot go on: {exit}"),
                    Err(error) => fail!("a fault at {gpa} was not handled: {error}"),
                },
                exit => match measured::end_bytes(exit) {
                    Some(nr_bytes) => return self.cpu.skip(nr_bytes),
                    None => fail!("the guest was stopped at {:#x}: {exit:?}", self.cpu.pc()),
                },
            }
        }
    }

    /// The guest writes all pages. Returns what it saw for each.
    pub fn write_all(&mut self) -> Samples {
        self.write(NR_PAGES, 1, MetalVcpu::<V::Format>::handle_fault);
        self.differences(NR_PAGES)
    }

    /// What the guest saw for each of the `nr_pages` pages that it wrote last.
    pub fn differences(&self, nr_pages: u64) -> Samples {
        let difference = |page| self.private.word(DIFFERENCES + 8 * page).load(Ordering::Relaxed);
        Samples::new((0..nr_pages).map(difference).collect::<Vec<u64>>())
    }

    /// Turns the dirty log on or off, by `flags`.
    pub fn set_flags(&self, flags: MemoryRegionFlags) {
        let region = MemoryRegion {
            slot: SLOT,
            flags,
            guest_phys_addr: START,
            memory_size: NR_PAGES * PAGE_SIZE,
            backing: None,
            userfault_bitmap: None,
        };
        self.vm.set_user_memory_region(region).unwrap_or_else(|error| fail!("the log: {error}"));
    }

    /// An engine call that this machine has memory for.
    pub fn check<T, E: core::fmt::Display>(&self, result: Result<T, E>) -> T {
        result.unwrap_or_else(|error| fail!("a call of the engine failed: {error}"))
    }

    /// A write to `page`, as a fault reports it.
    pub fn fault(&mut self, page: u64) {
        match self.vcpu.handle_fault(Gpa(START.0 + page * PAGE_SIZE), Access::Write) {
            Ok(Outcome::Resume) => {}
            other => fail!("page {page}: {other:?}"),
        }
    }

    /// `nr_pages` pages from `first` on.
    pub fn range(&self, first: u64, nr_pages: u64) -> GfnRange {
        GfnRange::new(slat::Gfn(START.gfn().0 + first), nr_pages)
    }

    /// Checks that pages are mapped by leaves of `size`.
    pub fn check_mapped_by(&self, size: PageSize) {
        match self.check(self.vm.translate(START)) {
            Some(found) if found.size == size => {}
            found => fail!("the first page is mapped by {found:?}, and should be by {size:?}"),
        }
    }
}
