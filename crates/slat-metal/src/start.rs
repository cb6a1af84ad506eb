//! What the CPUs do from their first Rust code on: each sets itself up, the boot CPU prepares the
//! guest, and then all run it.

#![expect(unsafe_code, reason = "starts the other CPUs")]

use alloc::boxed::Box;
use alloc::vec::Vec;

use slat::NodeId;
use spin::Once;

use crate::arch::measured::MAX_CPUS;
use crate::arch::{self, clock};
use crate::boot::{self, BootInfo};
use crate::host::Control;
use crate::linux::{Linux, LinuxCpu};
use crate::memory::MEMORY;
use crate::nodes::Nodes;
use crate::options::{Guest, Options};
use crate::suite::{self, Done, Part, Rounds, Suite};
use crate::virtual_cpu::VirtualCpu;
use crate::{error, say};

/// What the suite and the counts need, with all CPUs: what the guest accesses, the copy of it, the
/// private memory of each CPU, and page tables. Linux needs more, and says how much.
const OWN_BYTES: usize = 128 << 20;

/// What all CPUs do, once the boot CPU has prepared it.
pub type Work = dyn Fn(usize) + Send + Sync;

static WORK: Once<Box<Work>> = Once::new();

/// The boot CPU's work: `free_bytes` of memory are free.
///
/// # Safety
/// To be called once, by the boot CPU, with what the boot loader has left.
pub unsafe fn boot_cpu(boot: BootInfo, free_bytes: usize) -> ! {
    clock::measure();
    let options = Options::parse(boot.command_line).unwrap_or_else(|error| error!("{error}"));
    if !arch::has_control(options.control) {
        error!("on this machine nothing is left out by {:?}", options.control);
    }
    let nodes = MEMORY.nodes();
    if let Some(wanted) = options.nr_nodes.filter(|&wanted| wanted != nodes.nr()) {
        error!("the firmware says that the machine has {} NUMA nodes, and not {wanted}", nodes.nr());
    }
    let migrates = matches!(options.guest, Guest::Source | Guest::Target);
    if options.control != Control::None && options.control.is_of_migration() != migrates {
        error!("with {:?} nothing is left out by {:?}", options.guest, options.control);
    }
    let virtualization = arch::set_up();
    let nr_helpers = match options.guest {
        Guest::Suite => 0,
        Guest::Measure if options.nr_cpus > MAX_CPUS => error!("instructions are counted with {MAX_CPUS} CPUs at most"),
        Guest::Measure => 0,
        Guest::Wild if options.nr_cpus != 1 => error!("the guest that runs wild has one CPU"),
        // One CPU is the hypervisor's own.
        Guest::Linux | Guest::Wild | Guest::Source | Guest::Target => 1,
    };
    let nr_cpus = options.nr_cpus + nr_helpers;
    if free_bytes < OWN_BYTES {
        error!("too little memory: {} MiB are free, and {} MiB needed", free_bytes >> 20, OWN_BYTES >> 20);
    }
    // SAFETY: once, by the boot CPU, as the caller promises.
    if let Err(missing) = unsafe { arch::start_other_cpus(nr_cpus as u32) } {
        error!("{missing}");
    }
    if let Err(error) = nodes.check_cpus(nr_cpus) {
        error!("{error}");
    }
    say!("{nr_cpus} CPUs, {} MiB free, seed {}", free_bytes >> 20, options.seed);
    say_nodes(nodes, nr_cpus);
    let work = virtualization.work(options, &boot, free_bytes as u64);
    run(WORK.call_once(|| work))
}

/// Says what is on each node, where there are several.
fn say_nodes(nodes: &Nodes, nr_cpus: usize) {
    for node in (0..nodes.nr() as u32).map(NodeId).filter(|_| nodes.nr() > 1) {
        let cpus: Vec<_> = (0..nr_cpus).filter(|&cpu| nodes.of_cpu(cpu) == node).collect();
        say!("node {}: {} MiB free, CPUs {cpus:?}", node.0, MEMORY.free_bytes_on(node) >> 20);
    }
}

/// The work with the suite, on CPUs of one kind.
pub fn suite<V: VirtualCpu>(options: Options) -> Box<Work> {
    suites(options, Box::new([Box::new(Suite::<V>::new(options, Part { name: "", number: 0, of: 1 }))]))
}

/// The work with the suite, in all `parts`.
pub fn suites(options: Options, parts: Box<[Box<dyn Rounds>]>) -> Box<Work> {
    Box::new(move |cpu| {
        if cpu >= options.nr_cpus {
            return;
        }
        let mut all = Done::default();
        for done in parts.iter().map(|part| part.run(cpu)) {
            all.nr_operations += done.nr_operations;
            all.nr_accesses += done.nr_accesses;
        }
        // No CPU is in a part any more: each ends with a barrier.
        if cpu == 0 {
            suite::finish(all);
        }
    })
}

/// The work with Linux, on CPUs of one kind.
pub fn linux<C: LinuxCpu>(options: Options, boot: &BootInfo, free_bytes: u64) -> Box<Work> {
    let linux = Linux::<C>::new(options, boot, free_bytes);
    Box::new(move |cpu| linux.run(cpu))
}

/// The work with a Linux that goes to another machine.
#[cfg(target_arch = "x86_64")]
pub fn source(options: Options, boot: &BootInfo, free_bytes: u64) -> Box<Work> {
    let linux = Linux::source(options, boot, free_bytes);
    Box::new(move |cpu| linux.run(cpu))
}

/// The work with a Linux that comes from another machine.
#[cfg(target_arch = "x86_64")]
pub fn target(options: Options, boot: &BootInfo, free_bytes: u64) -> Box<Work> {
    let linux = Linux::target(options, boot, free_bytes);
    Box::new(move |cpu| linux.run(cpu))
}

/// The work of another CPU.
///
/// # Safety
/// To be called once by each CPU that [`boot_cpu`] starts.
pub unsafe fn other_cpu() -> ! {
    arch::set_up();
    boot::note_present();
    run(WORK.wait())
}

fn run(work: &Work) -> ! {
    work(arch::cpu_number());
    // A CPU that has nothing to do. The guest's interrupts are not this CPU's.
    arch::halt()
}
