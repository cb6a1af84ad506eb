//! `slat metal`: the hypervisor `slat-metal` on an emulated machine, with a guest.
//!
//! The command builds the hypervisor and the guest's first process from the source, gets an
//! emulator and a Linux kernel as Debian packages, runs all of it, and shows what hypervisor and
//! guest say.
//!
//! # Implementation
//! 1. Everything that is wrong with the options is found before anything is built ([`plan`]).
//! 2. [`packages`] gets the emulator and the kernel into a cache folder, [`source`] builds; [`parts`]
//!    puts both together.
//! 3. [`emulator`] runs QEMU. The guest's serial line is its standard output. The hypervisor's
//!    debug console is its standard error, in the lines of [`protocol`]. [`bochs`] is for the
//!    machine with VMX, which QEMU has not: there the debug console is the standard output.
//!    [`migration`] runs two of them.
//! 4. [`figures`] makes the outcome. It is a pass only if the verdict and the exit code of the
//!    machine agree; Bochs has one code for all. Of `--guest measure` [`measure`] does, with KVM on
//!    a second machine; [`saved`] keeps KVM's counts for `slat compare`.
//!
//! While the suite runs under QEMU, [`walker`] walks the guest's page tables from outside.
//!
//! All programs that it starts end with it ([`process`]).

mod architecture;
mod bochs;
mod emulator;
mod figures;
mod initramfs;
mod measure;
mod migration;
mod nodes;
mod packages;
mod parts;
mod plan;
mod process;
mod protocol;
mod saved;
mod source;
mod walker;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum, value_parser};

use crate::failure::Failure;
use crate::options::{OutputArgs, PEER, PeerArg, SEED, duration, positive, size_bytes};
use crate::results::Outcome;
use crate::session::Session;
use architecture::Architecture;
use emulator::{Boot, Shown};
pub(crate) use measure::{EVENTS, run_beside_saved};
use packages::Downloads;
use parts::Parts;
use plan::Plan;

#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example: slat metal --guest linux --cpus 2\nExample: slat metal --machine arm\n\
                  Example: slat metal --guest suite --operations 1000000\nExample: slat metal --guest measure\n\
                  Example: slat metal --guest migration --seed 2"
)]
pub(crate) struct MetalArgs {
    /// Second-stage hardware of the emulated machine
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = MachineArg::Svm)]
    machine: MachineArg,
    /// What runs on the hypervisor
    #[arg(long, value_name = "GUEST", value_enum, default_value_t = GuestArg::Linux)]
    guest: GuestArg,
    /// Number of CPUs of the guest, up to 7; measure: up to 4 [default: 2; measure and wild: 1]
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=7))]
    cpus: Option<u32>,
    /// Number of NUMA nodes of the machine, up to 4
    ///
    /// CPUs are on them in turns, and each has an equal share of the memory.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=4), hide_short_help = true)]
    nodes: u32,
    #[arg(long, value_name = "N", default_value_t = 1, help = SEED)]
    seed: u64,
    /// Operations beside the guest [default: 100000 or 20000]
    ///
    /// In all; with Linux at most so many; of the guest that runs wild, exits. The default is 20000
    /// with arm and riscv, and with Linux on vmx.
    #[arg(long, value_name = "N", value_parser = positive::<u64>)]
    operations: Option<u64>,
    /// Memory of the guest, from 256M to 1G; with vmx from 128M [default: the least]
    #[arg(long, value_name = "SIZE", value_parser = guest_memory)]
    memory: Option<u64>,
    /// What the hypervisor leaves out on purpose
    ///
    /// Its checks must notice it: then the command succeeds, and else it fails.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = ControlArg::None, hide_short_help = true)]
    control: ControlArg,
    /// More words for the command line of Linux
    ///
    /// Of the guest's kernel, or of the one with KVM.
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, hide_short_help = true)]
    append: Option<String>,
    #[arg(long, value_name = "PEER", value_enum, default_value_t = PeerArg::Auto, help = PEER)]
    peer: PeerArg,
    /// Time after which it counts as failed
    ///
    /// Of the whole run of the machine, without what is built and downloaded.
    #[arg(long, value_name = "TIME", default_value = "30m", value_parser = duration, hide_short_help = true)]
    timeout: Duration,
    /// Folder for the packages of emulator and kernel
    ///
    /// By default target/metal/cache, in the source.
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    cache: Option<PathBuf>,
    /// The emulator, QEMU 10 or newer, instead of a package
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    qemu: Option<PathBuf>,
    /// The guest's kernel, a bzImage or uncompressed Image, instead of a package
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    kernel: Option<PathBuf>,
    /// An image of the hypervisor, instead of building it
    #[arg(long, value_name = "PATH", hide_short_help = true)]
    image: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum MachineArg {
    /// AMD's, with nested paging, in QEMU.
    Svm,
    /// Intel's, with EPT, in Bochs.
    Vmx,
    /// Arm's, at EL2 with stage 2, in QEMU.
    Arm,
    /// RISC-V's hypervisor extension, with the G-stage, in QEMU.
    #[value(name = "riscv")]
    RiscV,
}

impl MachineArg {
    fn architecture(self) -> Architecture {
        match self {
            MachineArg::Svm | MachineArg::Vmx => Architecture::X86,
            MachineArg::Arm => Architecture::Arm,
            MachineArg::RiscV => Architecture::RiscV,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum GuestArg {
    /// A few pages of code that access memory at random.
    Suite,
    /// An unmodified Linux kernel.
    Linux,
    /// A Linux kernel that goes from one machine to another.
    Migration,
    /// Code by which instructions are counted, beside KVM.
    Measure,
    /// Code that uses registers, ports and instructions that it does not have.
    Wild,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum ControlArg {
    /// Nothing.
    None,
    /// Flushes.
    NoFlush,
    /// Kicks of CPUs in the guest.
    NoKick,
    /// The flush of a CPU that enters the guest.
    NoEntryFlush,
    /// The flush of a CPU that faulted on what it keeps.
    NoLocalFlush,
    /// The flush between break and make.
    NoBreakFlush,
    /// The order of break and flush.
    FlushBeforeBreak,
    /// The order of log and copy.
    CopyBeforeLog,
    /// A page of those that a migration leaves for post-copy.
    LosePage,
    /// The bits that keep a guest from pages that have not come.
    NoWithhold,
    /// All that the source would say in the middle of post-copy.
    SilentSource,
    /// A bit of a leaf PTE, for the walker.
    WrongPte,
}

impl ControlArg {
    /// Whether it is of a migration alone.
    fn is_of_migration(self) -> bool {
        matches!(self, ControlArg::LosePage | ControlArg::NoWithhold | ControlArg::SilentSource)
    }

    /// Whether a hypervisor on `machine` has what is left out. Arm's flushes reach other CPUs
    /// without their help, and an entry needs none there.
    fn is_of(self, machine: MachineArg) -> bool {
        let architecture = machine.architecture();
        match self {
            ControlArg::WrongPte => machine != MachineArg::Vmx,
            ControlArg::None | ControlArg::NoFlush | ControlArg::CopyBeforeLog => true,
            ControlArg::NoKick | ControlArg::NoEntryFlush => architecture != Architecture::Arm,
            ControlArg::NoLocalFlush => architecture != Architecture::X86,
            ControlArg::NoBreakFlush | ControlArg::FlushBeforeBreak => architecture == Architecture::Arm,
            ControlArg::LosePage | ControlArg::NoWithhold | ControlArg::SilentSource => machine == MachineArg::Svm,
        }
    }
}

/// The least memory of a guest, which is the default, and the most; the least with VMX, where all
/// that is done to it takes long.
const GUEST_MEMORY: [u64; 2] = [256 << 20, 1 << 30];
const LEAST_VMX_MEMORY: u64 = 128 << 20;

/// Operations by default; fewer where the guest makes thousands of accesses for each, as on
/// threads.
const OPERATIONS: u64 = 100_000;
const FEWER_OPERATIONS: u64 = 20_000;

fn guest_memory(text: &str) -> Result<u64, String> {
    let [_, most] = GUEST_MEMORY;
    match size_bytes(text)? {
        bytes if !(LEAST_VMX_MEMORY..=most).contains(&bytes) => Err("must be from 128M to 1G".to_owned()),
        bytes if !bytes.is_multiple_of(1 << 20) => Err("must be a multiple of 1M".to_owned()),
        bytes => Ok(bytes),
    }
}

/// Builds what is needed, runs the machine, and judges.
pub(crate) fn run(args: &MetalArgs, session: &Session) -> Result<Outcome, Failure> {
    let plan = Plan::new(args)?;
    if plan.guest == GuestArg::Measure {
        return measure::run(args, &plan, session);
    }
    let has_linux = matches!(plan.guest, GuestArg::Linux | GuestArg::Migration);
    let parts = Parts::new(args, &plan, Downloads::Allowed, if has_linux { 4 } else { 2 }, session);
    let emulator = parts.emulator()?;
    let linux = has_linux.then(|| parts.guest_linux()).transpose()?;
    let machine = parts.machine(emulator, linux)?;
    if plan.guest == GuestArg::Migration {
        return Ok(figures::outcome_of_both(&plan, &machine, migration::run(&plan, &machine, session)?));
    }
    let ended = machine.run(&plan, Boot::Hypervisor, Shown::Lines, session, &|| {})?;
    Ok(figures::outcome(&plan, &machine, &ended))
}
