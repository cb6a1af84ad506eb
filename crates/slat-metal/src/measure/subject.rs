//! The VM that is measured: a memslot whose frames are there already, and the guest that writes it
//! on one CPU or on several.

#![expect(unsafe_code, reason = "gives a guest memory, and runs it")]

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use slat::error::FaultError;
use slat::format::{Format, LeafAttributes};
use slat::{Access, Config, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vm};

use super::guest::{BLOCK_BYTES, DIFFERENCES, GATE_BYTES, GATE_WORDS, NR_BLOCKS, NR_PAGES, Writes};
#[cfg(target_arch = "x86_64")]
use super::guest::{LOOKS, WINDOW};
use super::samples::Samples;
use crate::arch::{self, measured};
use crate::boot;
use crate::cpus::{Cpus, Presence};
use crate::host::{Backing, Control, MetalHost};
use crate::memory::own_node;
use crate::operations::{MetalVcpu, MetalVm};
use crate::private::{PRIVATE_BYTES, Private};
use crate::ram::{Blocks, Ram};
use crate::virtual_cpu::{Exit, SecondStage, Start, VirtualCpu};
use crate::{error, fail};

// Above where any machine has the image, whose text the guest has at its own address.
const START: Gpa = Gpa(0x10_0000_0000);
const PRIVATE_START: Gpa = Gpa(0x18_0000_0000);

// Memslots.
const IMAGE_SLOT: u32 = 0;
const PRIVATE_SLOT: u32 = 1;
pub(super) const SLOT: u32 = 2;

/// Gates are behind the blocks.
const GATES: u64 = Private::FREE + measured::MAX_CPUS as u64 * BLOCK_BYTES;
const _: () = assert!(GATES + NR_BLOCKS * GATE_BYTES <= PRIVATE_BYTES);

/// The VM, which all its CPUs have.
pub(super) struct Shared<F: Format> {
    // The VM goes before the memory of its memslots.
    vm: Arc<MetalVm<F>>,
    config: Config,
    cpus: Arc<Cpus>,
    /// CPUs that have a [`Subject`], by bits.
    taken: AtomicUsize,
    pub ram: Arc<Ram>,
    private: Private,
}

/// The VM and its guest, on the calling CPU.
pub(super) struct Subject<V: VirtualCpu> {
    // The CPU goes before the VM.
    cpu: V,
    vcpu: MetalVcpu<V::Format>,
    pub vm: Arc<MetalVm<V::Format>>,
    presence: Presence,
    pub shared: Arc<Shared<V::Format>>,
}

/// Zeroed frames.
fn fill(_page: u64, words: &[AtomicU64]) {
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

impl<F: Format> Shared<F> {
    /// One whose memory comes in blocks of `kind`, all of it allocated. Nothing of it is mapped.
    pub fn new<V: VirtualCpu<Format = F>>(config: Config, kind: Blocks) -> Arc<Shared<F>> {
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
        Arc::new(Shared { vm, config, cpus, taken: AtomicUsize::new(0), ram, private })
    }

    /// The word at `offset` of the block of CPU `cpu`.
    fn word(&self, cpu: usize, offset: u64) -> &AtomicU64 {
        self.private.word(Private::FREE + cpu as u64 * BLOCK_BYTES + offset)
    }

    /// The word `number` of gate `gate`.
    pub fn gate(&self, gate: u64, number: u64) -> &AtomicU64 {
        self.private.word(GATES + gate * GATE_BYTES + 8 * number)
    }
}

impl<V: VirtualCpu> Subject<V> {
    /// That of a VM for this CPU alone.
    pub fn new(config: Config, kind: Blocks) -> Subject<V> {
        Subject::of(Shared::new::<V>(config, kind))
    }

    /// That of the calling CPU, which has no other one of this VM. The guest's code is mapped, and
    /// what it exchanges with the hypervisor.
    pub fn of(shared: Arc<Shared<V::Format>>) -> Subject<V> {
        let (number, vm, private) = (arch::cpu_number(), shared.vm.clone(), &shared.private);
        // Relaxed: nothing else is decided by it.
        let others = shared.taken.fetch_or(1 << number, Ordering::Relaxed);
        assert!(number < measured::MAX_CPUS && others >> number & 1 == 0, "CPU {number} is there once");
        let text = boot::image_text();
        let mut vcpu = vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        for (gpa, size_bytes, access) in
            [(Gpa(text.start), text.size_bytes(), Access::Execute), (private.gpa, PRIVATE_BYTES, Access::Write)]
        {
            vcpu.pre_fault_memory(gpa, size_bytes, access).unwrap_or_else(|error| fail!("nothing at {gpa}: {error}"));
        }
        // SAFETY: virtualization is on (`start`). The vCPU keeps the VM, which has this CPU.
        let mut cpu = unsafe { V::new(SecondStage::of(&vm, &shared.config)) };
        cpu.start(Start {
            pc: measured::address(),
            stack: private.stack_end().0,
            tables: private.gpa.0,
            argument: private.free_gpa().0 + number as u64 * BLOCK_BYTES,
        });
        // SAFETY: the only one of this number, as was found above.
        let presence = unsafe { Presence::new(&shared.cpus, number) };
        Subject { cpu, vcpu, vm, presence, shared }
    }

    /// The guest writes `nr_pages` pages, `distance` pages apart, on this CPU alone, and `handle`
    /// handles its faults.
    pub fn write(
        &mut self,
        nr_pages: u64,
        distance: u64,
        handle: impl FnMut(&mut MetalVcpu<V::Format>, Gpa, Access) -> Result<Outcome, FaultError>,
    ) {
        (0..GATE_WORDS as u64).for_each(|word| self.shared.gate(0, word).store(1, Ordering::Relaxed));
        self.run(0, Writes { first: 0, nr_pages, distance }, handle);
    }

    /// The guest writes pages on this CPU, beside the others that come to gate `gate`.
    pub fn run(
        &mut self,
        gate: u64,
        writes: Writes,
        mut handle: impl FnMut(&mut MetalVcpu<V::Format>, Gpa, Access) -> Result<Outcome, FaultError>,
    ) {
        let gate = self.shared.private.gpa.0 + GATES + gate * GATE_BYTES;
        for (offset, value) in writes.words(START.0, gate) {
            // Relaxed, here and below: this CPU enters the guest next.
            self.word(offset).store(value, Ordering::Relaxed);
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
        let difference = |page| self.word(DIFFERENCES + 8 * page).load(Ordering::Relaxed);
        Samples::new((0..nr_pages).map(difference).collect::<Vec<u64>>())
    }

    /// A word of this CPU's block.
    fn word(&self, offset: u64) -> &AtomicU64 {
        self.shared.word(arch::cpu_number(), offset)
    }

    /// What the counter had between the moments when all CPUs had come to the gate and when all were
    /// done, as this one saw it.
    #[cfg(target_arch = "x86_64")]
    pub fn window(&self) -> u64 {
        self.word(WINDOW).load(Ordering::Relaxed)
    }

    /// How often CPU `cpu` has looked whether all are done, since it came.
    #[cfg(target_arch = "x86_64")]
    pub fn looks(&self, cpu: usize) -> u64 {
        self.shared.word(cpu, LOOKS).load(Ordering::Relaxed)
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
