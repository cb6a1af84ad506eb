//! Linux as a guest: an unmodified kernel, whose memory slat maps page by page, and which is
//! attacked while it runs.
//!
//! Guest CPU n runs on CPU n. One CPU more, the last one, does the operations.
//!
//! # What the guest has of the machine
//! - Memory: below 640 KiB and from 1 to 2 MiB it stays where it is; from 2 MiB on it comes by
//!   faults, and moves ([`Operations`]).
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

mod identity;
mod image;
mod vcpu;

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fastrand::Rng;
use slat::dirty::ManualProtect;
use slat::format::{LeafAttributes, Npt};
use slat::{Config, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, Pfn, Vm};
use spin::Mutex;

use crate::host::{Backing, Control, Cpus, MetalHost};
use crate::operations::{MetalVm, Operations};
use crate::options::Options;
use crate::ram::{Frames, Ram};
use crate::svm::SvmCpu;
use crate::virtual_cpu::VirtualCpu;
use crate::x86::boot::{BootInfo, RegionKind, Span};
use crate::x86::clock;
use crate::x86::console::{self, Verdict};
use crate::{error, fail, say};
use image::{Image, Memory};
use vcpu::{GuestCpu, Startups};

/// Memory that stays where it is ends here, and memory that moves begins.
const RAM_START: Gpa = Gpa(2 << 20);
/// The hole of PCs.
const BIOS: Span = Span { start: 0xa_0000, end: 0x10_0000 };
/// The registers of the I/O interrupt controller, and of the HPET.
const DEVICES: [u64; 2] = [0xfec0_0000, 0xfed0_0000];
/// A firmware range that is larger is no table.
const MAX_FIRMWARE_BYTES: u64 = 16 << 20;

/// Operations between two comparisons of the copy with the memory.
const OPERATIONS_PER_CHECK: u64 = 4000;
/// Memory of the hypervisor itself: page tables, and frames that wait.
const OWN_BYTES: u64 = 32 << 20;

/// Operations for which the log may be off.
const OPERATIONS_WITHOUT_LOG: u64 = 32;
/// Microseconds between two operations, before the guest's own program runs and after.
const BOOT_PAUSE_US: u64 = 400;
const PAUSE_US: u64 = 40;

/// How far the guest is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// The kernel boots.
    Boot,
    /// The program in the initramfs runs.
    Up,
    /// It has done all that it should, and verified it.
    Done {
        /// Rounds, and pages verified.
        rounds: u64,
        pages: u64,
    },
}

/// The run.
pub struct Linux {
    vm: Arc<MetalVm<Npt>>,
    cpus: Arc<Cpus>,
    operations: Operations<Npt>,
    image: Image,
    startups: Startups,
    options: Options,
    stage: Mutex<Stage>,
    /// Whether vCPUs must stay outside of the guest, and how many do. Those that the guest has not
    /// started count.
    is_paused: AtomicBool,
    nr_outside: AtomicU64,
    started_ns: u64,
    /// Memory that stays where it is.
    _low: Frames,
}

fn fill_with_zeros(_page: u64, words: &[AtomicU64]) {
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

impl Linux {
    /// A guest in the modules that the boot loader has put into memory: the kernel, whose text is
    /// its command line, and the initramfs. `free_bytes` of memory are free.
    pub fn new(options: Options, boot: &BootInfo, free_bytes: u64) -> Linux {
        let mut modules = boot.modules();
        let (Some(kernel), Some(initramfs)) = (modules.next(), modules.next()) else {
            error!("the boot loader has brought fewer modules than Linux needs: a kernel and an initramfs");
        };
        // The guest's memory, and the copy that the dirty log keeps up.
        let needed = 2 * (options.memory_mib << 20) + OWN_BYTES;
        if free_bytes < needed {
            error!("too little memory: {} MiB are free, and {} MiB needed", free_bytes >> 20, needed >> 20);
        }
        let cpus = Cpus::new(options.control, SvmCpu::KICK);
        let vm = Vm::new(MetalHost { cpus: cpus.clone() }, Config::default());
        let vm = Arc::new(vm.unwrap_or_else(|error| error!("no VM: {error}")));
        let end = options.memory_mib << 20;
        let ram = Arc::new(Ram::new((end - RAM_START.0) / PAGE_SIZE, fill_with_zeros));
        // Where guest-physical 0 would be.
        let low = Frames::allocate(RAM_START.0 / PAGE_SIZE).unwrap_or_else(|| error!("no memory for the guest"));
        (0..RAM_START.0 / PAGE_SIZE).for_each(|page| fill_with_zeros(page, low.words(page)));
        // SAFETY: memory that was allocated for the guest, or the firmware's, which the image does
        // not use.
        let fixed = |first| unsafe { Backing::fixed(first, first, LeafAttributes::default()) };
        let mut slots = Slots { vm: &vm, next: 1 };
        let frame = |address: u64| Pfn(low.first().0 + address / PAGE_SIZE);
        let none = MemoryRegionFlags::empty();
        slots.add(Span { start: 0, end: BIOS.start }, fixed(frame(0)), none);
        slots.add(BIOS, fixed(Pfn(BIOS.start / PAGE_SIZE)), MemoryRegionFlags::READONLY);
        slots.add(Span { start: BIOS.end, end: RAM_START.0 }, fixed(frame(BIOS.end)), none);
        for span in firmware(boot).filter(|span| span.start >= end) {
            slots.add(span, fixed(Pfn(span.start / PAGE_SIZE)), none);
        }
        for start in DEVICES {
            let first = Pfn(start / PAGE_SIZE);
            // SAFETY: the registers are the guest's.
            let backing = unsafe { Backing::fixed(first, first, LeafAttributes::DEVICE) };
            slots.add(Span { start, end: start + PAGE_SIZE }, backing, none);
        }
        // From the first page on: the kernel is there.
        let nr_hot_pages = 16384.min(ram.nr_pages());
        let operations =
            Operations::new(&vm, 0, RAM_START, &ram, nr_hot_pages, ManualProtect::Disabled, options.control)
                .unwrap_or_else(|error| error!("no memslot for the guest: {error}"));
        let memory = Memory { low: &low, ram: &ram };
        let image = Image::load(&options, boot, [kernel, initramfs], memory).unwrap_or_else(|error| error!("{error}"));
        let startups = Startups::new(options.nr_cpus);
        Linux {
            vm,
            cpus,
            operations,
            image,
            startups,
            options,
            stage: Mutex::new(Stage::Boot),
            is_paused: AtomicBool::new(false),
            nr_outside: AtomicU64::new(0),
            started_ns: clock::now_ns(),
            _low: low,
        }
    }

    /// The part of CPU `cpu`. The CPU behind the guest's ends the machine.
    pub fn run(&self, cpu: usize) {
        if cpu < self.options.nr_cpus {
            GuestCpu::new(self, cpu).run(self);
        } else if cpu == self.options.nr_cpus {
            self.attack();
        }
    }

    /// The calling vCPU is outside of the guest: waits while the guest is paused.
    fn pause_point(&self) {
        if self.is_paused.load(Ordering::SeqCst) {
            self.nr_outside.fetch_add(1, Ordering::SeqCst);
            while self.is_paused.load(Ordering::SeqCst) {
                core::hint::spin_loop();
            }
            self.nr_outside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Does `work` while no vCPU is in the guest.
    fn while_paused(&self, work: impl FnOnce()) {
        self.is_paused.store(true, Ordering::SeqCst);
        while self.nr_outside.load(Ordering::SeqCst) < self.options.nr_cpus as u64 {
            // Again and again: a CPU may have looked at the flag just before.
            self.cpus.kick_all();
            clock::wait_us(20);
        }
        work();
        self.is_paused.store(false, Ordering::SeqCst);
        while self.nr_outside.load(Ordering::SeqCst) != self.startups.nr_waiting() {
            core::hint::spin_loop();
        }
    }

    /// Does operations until the guest is done.
    fn attack(&self) {
        let mut vcpu = self.vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        let mut rng = Rng::with_seed(self.options.seed);
        let mut nr_done = 0;
        loop {
            let stage = *self.stage.lock();
            if let Stage::Done { rounds, pages } = stage {
                self.finish(rounds, pages);
            }
            if nr_done < self.options.nr_operations {
                if nr_done % OPERATIONS_WITHOUT_LOG == 0 {
                    self.operations.turn_log_on();
                }
                self.operations.one(&mut rng, &mut vcpu);
                nr_done += 1;
                if nr_done % OPERATIONS_PER_CHECK == 0 {
                    self.check();
                }
            }
            clock::wait_us(if stage == Stage::Boot { BOOT_PAUSE_US } else { PAUSE_US });
        }
    }

    fn check(&self) {
        self.operations.turn_log_on();
        self.while_paused(|| self.operations.check_copy());
        match self.cpus.nr_stale_entries() {
            0 => {}
            nr_entries => fail!("{nr_entries} entries into the guest left out a flush"),
        }
    }

    fn finish(&self, rounds: u64, pages: u64) -> ! {
        self.check();
        let nr_operations = self.operations.counts().map(|(_, count)| count).sum::<u64>();
        let stats = self.vm.stats();
        for (operation, count) in self.operations.counts() {
            say!("{operation:?}: {count}");
        }
        if pages == 0 || self.operations.nr_checks() == 0 {
            fail!("nothing was verified: {pages} pages by the guest, {} copies", self.operations.nr_checks());
        }
        console::figure("operations", nr_operations, "1");
        console::figure("moved_pages", self.operations.nr_moved(), "1");
        console::figure("compared_copies", self.operations.nr_checks(), "1");
        console::figure("faults", stats.faults, "1");
        console::figure("verified_pages", pages, "1");
        console::figure("rounds", rounds, "1");
        console::figures();
        console::figure_ms("guest_time", (clock::now_ns() - self.started_ns) / 1_000_000);
        let nr_cpus = self.options.nr_cpus;
        let control = if self.options.control == Control::None { "" } else { ", with something left out" };
        console::end(
            Verdict::Pass,
            format_args!(
                "Linux on {nr_cpus} CPUs: {pages} pages verified in {rounds} rounds, beside {nr_operations} operations \
                 on its memory{control}"
            ),
        )
    }
}

/// The firmware's ranges above the first MiB, whole pages.
fn firmware(boot: &BootInfo) -> impl Iterator<Item = Span> + '_ {
    let spans = boot.regions().filter(|region| region.kind == RegionKind::Firmware).map(|region| region.span);
    spans
        .map(|span| Span { start: span.start & !(PAGE_SIZE - 1), end: span.end.next_multiple_of(PAGE_SIZE) })
        .filter(|span| span.start >= BIOS.end && span.end <= 1 << 32 && span.size_bytes() <= MAX_FIRMWARE_BYTES)
}

/// Memslots with memory that stays.
struct Slots<'v> {
    vm: &'v MetalVm<Npt>,
    next: u32,
}

impl Slots<'_> {
    fn add(&mut self, span: Span, backing: Backing, flags: MemoryRegionFlags) {
        let slot = self.next;
        self.next += 1;
        let region = MemoryRegion {
            slot,
            flags,
            guest_phys_addr: Gpa(span.start),
            memory_size: span.size_bytes(),
            backing: Some(backing),
            userfault_bitmap: None,
        };
        if let Err(error) = self.vm.set_user_memory_region(region) {
            error!("no memslot for {:#x} to {:#x}: {error}", span.start, span.end);
        }
    }
}
