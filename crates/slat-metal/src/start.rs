//! What the CPUs do from their first Rust code on: each sets itself up, the boot CPU prepares the
//! guest, and then all run it.

#![expect(unsafe_code, reason = "starts the other CPUs")]

use alloc::boxed::Box;

use raw_cpuid::CpuId;
use spin::Once;

use crate::options::{Guest, Options};
use crate::suite::Suite;
use crate::svm::{self, SvmCpu};
use crate::virtual_cpu::VirtualCpu;
use crate::vmx::{self, VmxCpu};
use crate::x86::boot::{self, BootInfo, MAX_CPUS};
use crate::x86::{apic, clock, cpu};
use crate::{error, linux, measure, say};

/// What all CPUs do, once the boot CPU has prepared it.
type Work = dyn Fn(usize) + Send + Sync;

static WORK: Once<Box<Work>> = Once::new();

/// How a CPU runs guests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Virtualization {
    /// AMD's.
    Svm,
    /// Intel's.
    Vmx,
}

impl Virtualization {
    /// That of the calling CPU.
    fn of_cpu() -> Option<Virtualization> {
        let cpuid = CpuId::new();
        let has_svm = cpuid.get_extended_processor_and_feature_identifiers().is_some_and(|features| features.has_svm());
        let has_vmx = cpuid.get_feature_info().is_some_and(|features| features.has_vmx());
        match (has_svm, has_vmx) {
            (true, _) => Some(Virtualization::Svm),
            (false, true) => Some(Virtualization::Vmx),
            (false, false) => None,
        }
    }
}

/// Sets up the calling CPU. Returns how it runs guests.
fn set_up() -> Virtualization {
    cpu::set_up();
    if !apic::is_there() {
        error!("the CPU has no x2APIC");
    }
    apic::enable();
    let virtualization = Virtualization::of_cpu().unwrap_or_else(|| error!("the CPU has neither SVM nor VMX"));
    match virtualization {
        Virtualization::Svm => svm::enable().unwrap_or_else(|missing| error!("{missing}")),
        Virtualization::Vmx => vmx::enable().unwrap_or_else(|missing| error!("{missing}")),
    }
    if apic::id() as usize >= MAX_CPUS {
        error!("a CPU has the number {}; {MAX_CPUS} are possible", apic::id());
    }
    virtualization
}

/// The boot CPU's work: `free_bytes` of memory are free.
pub fn boot_cpu(boot: BootInfo, free_bytes: usize) -> ! {
    clock::measure();
    let options = Options::parse(boot.command_line).unwrap_or_else(|error| error!("{error}"));
    let virtualization = set_up();
    let nr_helpers = match options.guest {
        Guest::Suite => 0,
        Guest::Measure if options.nr_cpus != 1 => error!("instructions are counted with one CPU"),
        Guest::Measure => 0,
        // One CPU is the hypervisor's own.
        Guest::Linux => 1,
    };
    let nr_cpus = options.nr_cpus + nr_helpers;
    // SAFETY: only here.
    if let Err(missing) = unsafe { boot::start_other_cpus(nr_cpus as u32) } {
        error!("{missing}");
    }
    say!("{nr_cpus} CPUs, {} MiB free, seed {}", free_bytes >> 20, options.seed);
    let work: Box<Work> = match (options.guest, virtualization) {
        (Guest::Suite, Virtualization::Svm) => suite::<SvmCpu>(options),
        (Guest::Suite, Virtualization::Vmx) => suite::<VmxCpu>(options),
        (Guest::Measure, Virtualization::Svm) => Box::new(|_| measure::run()),
        (Guest::Measure, Virtualization::Vmx) => error!("instructions are counted with SVM"),
        (Guest::Linux, Virtualization::Svm) => {
            let linux = linux::Linux::new(options, &boot, free_bytes as u64);
            Box::new(move |cpu| linux.run(cpu))
        }
        (Guest::Linux, Virtualization::Vmx) => error!("Linux needs a CPU with SVM here"),
    };
    run(WORK.call_once(|| work))
}

fn suite<V: VirtualCpu>(options: Options) -> Box<Work> {
    let suite = Suite::<V>::new(options);
    Box::new(move |cpu| suite.run(cpu))
}

/// The work of another CPU.
pub fn other_cpu() -> ! {
    set_up();
    boot::note_present();
    run(WORK.wait())
}

/// CPUs have the numbers of their interrupt controllers: a guest that uses these finds its vCPUs
/// where it looks for them.
fn run(work: &Work) -> ! {
    work(apic::id() as usize);
    // A CPU that has nothing to do. The guest's interrupts are not this CPU's.
    loop {
        x86_64::instructions::hlt();
    }
}
