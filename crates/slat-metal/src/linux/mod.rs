//! Linux as a guest: an unmodified kernel, whose memory slat maps page by page, and which is
//! attacked while it runs.
//!
//! Guest CPU n runs on CPU n. One CPU more, the last one, does the operations, or sends the guest to
//! another machine, or receives it (`migration`).
//!
//! What the guest has of the machine is the architecture's ([`arch::linux`](crate::arch::linux)).

#[cfg(target_arch = "x86_64")]
mod migrated;
mod startups;
#[cfg(not(target_arch = "x86_64"))]
pub(crate) mod tree;
mod vcpu;

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fastrand::Rng;
use slat::dirty::ManualProtect;
use slat::error::SlotError;
use slat::format::Format;
use slat::{Config, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, Vm};
use spin::Mutex;

use crate::arch::clock;
use crate::arch::linux::{Cpu, Guest, ram_span};
use crate::boot::{BootInfo, Module, Span};
use crate::console::{self, Verdict};
use crate::cpus::Cpus;
use crate::host::{Backing, Control, MetalHost};
#[cfg(target_arch = "x86_64")]
use crate::migration::{Source, Target};
use crate::operations::{MetalVm, Operations};
use crate::options::Options;
use crate::ram::Ram;
use crate::virtual_cpu::VirtualCpu;
use crate::{error, fail, say};
pub use startups::{AlreadyStarted, Start, Startups};
#[cfg(target_arch = "aarch64")]
pub(crate) use vcpu::Unhandled;
pub(crate) use vcpu::Vcpu;

/// A CPU that can run Linux.
pub trait LinuxCpu: VirtualCpu {
    /// Runs vCPU `number`, on the calling CPU, for ever.
    fn run_linux(linux: &Linux<Self>, number: usize) -> !;
}

/// Operations between two comparisons of the copy with the memory.
const OPERATIONS_PER_CHECK: u64 = 4000;
/// Memory of the hypervisor itself: page tables, and frames that wait.
const OWN_BYTES: u64 = 32 << 20;

/// Operations for which the log may be off.
const OPERATIONS_WITHOUT_LOG: u64 = 32;
/// Microseconds between two operations, before the guest's own program runs and after.
const BOOT_PAUSE_US: u64 = 400;
const PAUSE_US: u64 = 40;

/// Hypercalls of the guest's program: the magic number and the code.
pub(crate) const MAGIC: u64 = 0x736c_6174_0000_0000;
const UP: u64 = MAGIC;
const ROUND: u64 = MAGIC | 1;
const DONE: u64 = MAGIC | 2;
const FAILED: u64 = MAGIC | 3;
/// The answer to any other.
const NO_SUCH_CALL: u64 = u64::MAX;

/// How far the guest is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// The kernel boots.
    Boot,
    /// The program in the initramfs runs.
    Up {
        /// Rounds that it has done.
        nr_rounds: u64,
        /// When it has begun the next one.
        since_ns: u64,
    },
    /// It has done all that it should, and verified it.
    Done {
        /// Rounds, and pages verified.
        rounds: u64,
        pages: u64,
    },
}

/// What the CPU behind the guest's does.
pub(crate) enum Beside<F: Format> {
    /// Operations on the guest's memory.
    Operations(Operations<F>),
    /// It sends the guest away.
    #[cfg(target_arch = "x86_64")]
    Source(Source),
    /// It receives the guest.
    #[cfg(target_arch = "x86_64")]
    Target(Target),
}

/// The format of a guest that migrates.
#[cfg(target_arch = "x86_64")]
pub(crate) type GuestFormat = <Cpu as VirtualCpu>::Format;

/// The run, on CPUs of one kind.
pub struct Linux<C: VirtualCpu = Cpu> {
    pub(crate) vm: Arc<MetalVm<C::Format>>,
    pub(crate) cpus: Arc<Cpus>,
    pub(crate) beside: Beside<C::Format>,
    pub(crate) options: Options,
    pub(crate) config: Config,
    /// What it has of the machine, and its kernel.
    pub(crate) guest: Guest,
    pub(crate) startups: Startups,
    stage: Mutex<Stage>,
    /// Whether vCPUs must stay outside of the guest, and how many do. Those that the guest has not
    /// started count.
    is_paused: AtomicBool,
    nr_outside: AtomicU64,
    started_ns: u64,
}

fn fill_with_zeros(_page: u64, words: &[AtomicU64]) {
    words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
}

/// What [`Linux`] is made of.
struct Parts<C: VirtualCpu> {
    vm: Arc<MetalVm<C::Format>>,
    cpus: Arc<Cpus>,
    config: Config,
    /// Where the memory that moves begins.
    start: Gpa,
    ram: Arc<Ram>,
}

impl<C: LinuxCpu> Parts<C> {
    /// A VM without memory. `needed_bytes` of the `free_bytes` are needed.
    fn new(options: &Options, free_bytes: u64, needed_bytes: u64) -> Parts<C> {
        if free_bytes < needed_bytes {
            error!("too little memory: {} MiB are free, and {} MiB needed", free_bytes >> 20, needed_bytes >> 20);
        }
        let cpus = Cpus::new(options.control, C::KICK);
        let config = Config::default().with_hardware(C::hardware());
        let vm = Vm::new(MetalHost { cpus: cpus.clone() }, config);
        let vm = Arc::new(vm.unwrap_or_else(|error| error!("no VM: {error}")));
        let span = ram_span(options.memory_mib << 20);
        let ram = Arc::new(Ram::new(span.size_bytes() / PAGE_SIZE, fill_with_zeros));
        Parts { vm, cpus, config, start: Gpa(span.start), ram }
    }

    fn slots(&self) -> Slots<'_> {
        Slots { add: Box::new(|region| self.vm.set_user_memory_region(region)), next: 1 }
    }

    fn with(self, options: Options, guest: Guest, beside: Beside<C::Format>) -> Linux<C> {
        let Parts { vm, cpus, config, .. } = self;
        Linux {
            vm,
            cpus,
            beside,
            options,
            config,
            guest,
            startups: Startups::new(options.nr_cpus),
            stage: Mutex::new(Stage::Boot),
            is_paused: AtomicBool::new(false),
            nr_outside: AtomicU64::new(0),
            started_ns: clock::now_ns(),
        }
    }
}

/// The modules that the boot loader has put into memory: the kernel, whose text is its command
/// line, and the initramfs.
fn modules(boot: &BootInfo) -> [Module; 2] {
    let mut modules = boot.modules();
    match (modules.next(), modules.next()) {
        (Some(kernel), Some(initramfs)) => [kernel, initramfs],
        _ => error!("the boot loader has brought fewer modules than Linux needs: a kernel and an initramfs"),
    }
}

impl<C: LinuxCpu> Linux<C> {
    /// A guest in the modules that the boot loader has put into memory, and operations beside it.
    /// `free_bytes` of memory are free.
    pub fn new(options: Options, boot: &BootInfo, free_bytes: u64) -> Linux<C> {
        let modules = modules(boot);
        // The guest's memory, and the copy that the dirty log keeps up.
        let parts = Parts::<C>::new(&options, free_bytes, 2 * (options.memory_mib << 20) + OWN_BYTES);
        let Parts { vm, start, ram, .. } = &parts;
        // From the first page on: the kernel is there.
        let nr_hot_pages = 16384.min(ram.nr_pages());
        let operations = Operations::new(vm, 0, *start, ram, nr_hot_pages, ManualProtect::Disabled, options.control)
            .unwrap_or_else(|error| error!("no memslot for the guest: {error}"));
        let guest = Guest::new(&options, boot, modules, &mut parts.slots(), ram);
        parts.with(options, guest, Beside::Operations(operations))
    }

    /// The part of CPU `cpu`. The CPU behind the guest's ends the machine.
    pub fn run(&self, cpu: usize) {
        if cpu < self.options.nr_cpus {
            C::run_linux(self, cpu);
        } else if cpu == self.options.nr_cpus {
            match &self.beside {
                Beside::Operations(operations) => self.attack(operations),
                #[cfg(target_arch = "x86_64")]
                Beside::Source(source) => source.run(self),
                #[cfg(target_arch = "x86_64")]
                Beside::Target(target) => target.run(self),
            }
        }
    }

    /// The calling vCPU is outside of the guest: waits while the guest is paused.
    pub(crate) fn pause_point(&self) {
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
    fn attack(&self, operations: &Operations<C::Format>) -> ! {
        let mut vcpu = self.vm.create_vcpu().unwrap_or_else(|error| error!("no vCPU: {error}"));
        let mut rng = Rng::with_seed(self.options.seed);
        let mut nr_done = 0;
        loop {
            let stage = *self.stage.lock();
            if let Stage::Done { rounds, pages } = stage {
                self.finish(operations, rounds, pages);
            }
            if nr_done < self.options.nr_operations {
                if nr_done % OPERATIONS_WITHOUT_LOG == 0 {
                    operations.turn_log_on();
                }
                operations.one(&mut rng, &mut vcpu);
                nr_done += 1;
                if nr_done % OPERATIONS_PER_CHECK == 0 {
                    self.check(operations);
                }
            }
            clock::wait_us(if stage == Stage::Boot { BOOT_PAUSE_US } else { PAUSE_US });
        }
    }

    /// What the guest's program asks for by a hypercall: the code, and two arguments. The result.
    pub(crate) fn hypercall(&self, code: u64, [first, second]: [u64; 2]) -> u64 {
        match code {
            UP => {
                let elapsed_ms = (clock::now_ns() - self.started_ns) / 1_000_000;
                console::figure_ms("boot_time", elapsed_ms);
                say!("the guest is up with {first} CPUs after {elapsed_ms} ms");
                self.set_round(0);
            }
            ROUND => {
                say!("the guest has done round {first}, and verified {second} pages");
                #[cfg(target_arch = "x86_64")]
                self.wait_for_target();
                self.set_round(first.saturating_add(1));
            }
            DONE => *self.stage.lock() = Stage::Done { rounds: first, pages: second },
            // Without a page: the process itself.
            FAILED if (first, second) == (0, 0) => fail!("the guest's first process failed; its last line says why"),
            FAILED => fail!(Access; "the guest found another content at its address {first:#x}, page {second}"),
            _ => return NO_SUCH_CALL,
        }
        0
    }

    /// The guest has turned itself off, or restarts: the calling vCPU does not come back. The CPU
    /// that does the operations ends the machine. (A PC turns itself off by a port, which its CPUs
    /// trap.)
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn turned_off(&self) -> ! {
        if !matches!(*self.stage.lock(), Stage::Done { .. }) {
            fail!(
                "the guest has turned itself off before its work was done: its kernel panicked, or its program failed"
            );
        }
        loop {
            // For each pause it counts as one that comes back: its end waits for these.
            self.pause_point();
            core::hint::spin_loop();
        }
    }

    /// The calling vCPU waits, outside of the guest, until another one starts it.
    pub(crate) fn wait_for_start(&self, cpu: usize) -> Start {
        // The order matters: a paused guest waits for as many CPUs as there are.
        self.startups.begin_wait();
        self.nr_outside.fetch_add(1, Ordering::SeqCst);
        let start = self.startups.wait(cpu);
        self.startups.end_wait();
        self.nr_outside.fetch_sub(1, Ordering::SeqCst);
        start
    }

    fn set_round(&self, nr_rounds: u64) {
        *self.stage.lock() = Stage::Up { nr_rounds, since_ns: clock::now_ns() };
    }

    fn check(&self, operations: &Operations<C::Format>) {
        operations.turn_log_on();
        self.while_paused(|| operations.check_copy());
        self.cpus.check();
    }

    fn finish(&self, operations: &Operations<C::Format>, rounds: u64, pages: u64) -> ! {
        self.check(operations);
        let nr_operations = operations.counts().map(|(_, count)| count).sum::<u64>();
        let stats = self.vm.stats();
        for (operation, count) in operations.counts() {
            say!("{operation:?}: {count}");
        }
        if pages == 0 || operations.nr_checks() == 0 {
            fail!("nothing was verified: {pages} pages by the guest, {} copies", operations.nr_checks());
        }
        console::figure("operations", nr_operations, "1");
        console::figure("moved_pages", operations.nr_moved(), "1");
        let [nr_split, nr_recovered] = operations.nr_replaced();
        console::figure("split_leaves", nr_split, "1");
        console::figure("recovered_leaves", nr_recovered, "1");
        console::figure("compared_copies", operations.nr_checks(), "1");
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

type AddSlot<'v> = dyn Fn(MemoryRegion<Backing>) -> Result<(), SlotError> + 'v;

/// Memslots with memory that stays.
pub struct Slots<'v> {
    add: Box<AddSlot<'v>>,
    next: u32,
}

impl Slots<'_> {
    /// Adds one at `span`.
    pub fn add(&mut self, span: Span, backing: Backing, flags: MemoryRegionFlags) {
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
        if let Err(error) = (self.add)(region) {
            error!("no memslot for {:#x} to {:#x}: {error}", span.start, span.end);
        }
    }
}
