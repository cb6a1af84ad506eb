//! Options that several commands have, and the parsers of values.
//!
//! An option has one meaning, one text and one letter in all commands; a test of `cli` checks it. A
//! command may have another default.

mod names;
mod parse;
mod values;

use std::path::PathBuf;

use clap::{Args, Command};
use slat::baselines::Locking;
use slat_machine::memory::BackingKind;

use crate::failure::Failure;
use crate::live::View;
pub(crate) use names::{Named, OneOrAll, ValueName, named, names, one_or_all};
pub(crate) use parse::{delay, duration, except, page_size, positive, size_bytes};
pub(crate) use values::with_format;
pub(crate) use values::{
    DirtyTrackingArg, FormatArg, HugePagesArg, PagingArg, PeerArg, ProtectionArg, SplitWhen, check_shadow_format,
    dirty_tracking, protection_name,
};

// The texts of the options with these names.
pub(crate) const VCPUS: &str = "Number of vCPUs";
pub(crate) const BYTES: &str = "Memory for each vCPU, e.g. 64M";
pub(crate) const BACKING: &str = "Kind of memory, e.g. shmem";
pub(crate) const OVERLAP: &str = "All vCPUs access all memory, not a part each";
pub(crate) const SLOTS: &str = "Slots that the memory is divided into";
pub(crate) const CPUS: &str = "CPUs for the vCPUs, and perhaps one for the main thread";
pub(crate) const ITERATIONS: &str = "Rounds of dirtying memory and getting the log";
pub(crate) const ACCESS_TRACKING: &str = "How accesses are tracked";
pub(crate) const LOCK: &str = "Lock that the engine takes on the VM";
pub(crate) const FORMAT: &str = "Format of the second-stage tables";
pub(crate) const PAGING: &str = "Page tables of the guest and of the hardware";
pub(crate) const PEER: &str = "Measure KVM in the same run";
pub(crate) const DURATION: &str = "How long to run, e.g. 10s";
pub(crate) const RUNS: &str = "Runs of each measurement";
pub(crate) const SEED: &str = "Seed of the random choices";
pub(crate) const CONTENTS: &str = "Contents of the pages: pattern:SEED or constant:BYTE";
pub(crate) const OUTPUT: &str = "Where to write";
pub(crate) const VERBOSE: &str = "Print more";

/// The vCPUs and their memory.
#[derive(Clone, Debug, Args)]
pub(crate) struct GuestArgs {
    #[arg(short, long, value_name = "N", default_value_t = 4, value_parser = positive::<usize>, help = VCPUS)]
    pub(crate) vcpus: usize,
    #[arg(short, long, value_name = "SIZE", default_value = "256M", value_parser = size_bytes, help = BYTES)]
    pub(crate) bytes: u64,
    /// Kind of memory, e.g. shmem
    ///
    /// One of anonymous, anonymous_thp, anonymous_hugetlb_2mb, anonymous_hugetlb_1gb, shmem.
    #[arg(short = 's', long, value_name = "KIND", default_value = "anonymous", help = BACKING)]
    pub(crate) backing: BackingKind,
    #[arg(short, long, help = OVERLAP)]
    pub(crate) overlap: bool,
}

/// The lock and the tables of the engine.
#[derive(Clone, Debug, Args)]
pub(crate) struct TablesArgs {
    #[arg(long, value_name = "LOCK", default_value = "none", value_parser = one_or_all::<Locking>(Some("all")), help = LOCK)]
    pub(crate) lock: OneOrAll<Locking>,
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = FormatArg::Npt, help = FORMAT)]
    pub(crate) format: FormatArg,
}

/// Where results go, and what the screen shows meanwhile.
#[derive(Clone, Debug, Args)]
pub(crate) struct OutputArgs {
    /// Write the results as JSON; - is the standard output
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Show what the machine does while it runs
    #[arg(long)]
    live: bool,
    /// Show no progress, only the result
    #[arg(short, long, conflicts_with = "live")]
    quiet: bool,
}

impl OutputArgs {
    /// What the screen shows while the command runs.
    pub(crate) fn view(&self) -> View {
        match self {
            OutputArgs { live: true, .. } => View::Live,
            OutputArgs { quiet: true, .. } => View::Nothing,
            _ => View::Progress,
        }
    }
}

/// Parses the command line of one experiment, `slat NAME OPTIONS`, as a user can type it.
pub(crate) fn parse<T: Args>(line: &str) -> Result<T, Failure> {
    let command = T::augment_args(Command::new("slat"));
    let matches = command.try_get_matches_from(line.split_whitespace().skip(1));
    matches
        .and_then(|matches| T::from_arg_matches(&matches))
        .map_err(|error| Failure::Usage(format!("{line}: {error}")))
}
