//! The command line. Short options are those of KVM's selftests, each with a long name.

use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand, ValueEnum};
use slat::baselines::Locking;
use slat::dirty::{DirtyRing, DirtyTracking, HugePageLogging, ManualProtect};
use slat::format::Format;
use slat::tables::AccessTracking;
use slat_machine::memory::BackingKind;

use crate::aging::{self, AgingArgs};
use crate::compare::{self, CompareArgs};
use crate::cr3::{self, Cr3Args};
use crate::demand_paging::resolver::ResolverArgs;
use crate::demand_paging::{self, DemandPagingArgs};
use crate::dirty_log;
use crate::failure::Failure;
use crate::get_dirty_log::{self, GetDirtyLogArgs};
use crate::memslots::{self, MemslotsArgs};
use crate::peers::{self, PeersArgs};
use crate::report::ReportArgs;
use crate::results::Outcome;
use crate::session::Session;
use crate::shell::{CompletionsArgs, ManArgs};
use crate::split::{self, SplitArgs};
use crate::stress::{self, StressArgs};

/// Experiments on second-level address translation, on a software machine.
///
/// The machine has real threads and real memory. Without a command it runs the demonstration: the phases of a dirty-logging
/// migration with each locking.
#[derive(Debug, Parser)]
#[command(name = "slat", version, after_help = "Example: slat compare --quick")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Show what the machine does while it runs.
    #[arg(long, global = true, display_order = 1000)]
    pub(crate) live: bool,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one of it")]
pub(crate) enum Command {
    #[command(flatten)]
    Experiment(Experiment),
    /// Make one page of results, with tables and plots.
    ///
    /// To open in a browser; several results are compared.
    Report(ReportArgs),
    /// Print the completions of a shell.
    Completions(CompletionsArgs),
    /// Print the manual pages, or write them to a folder.
    Man(ManArgs),
    /// The resolver of `demand-paging --delivery ring`, which starts it.
    #[command(hide = true)]
    DemandPagingResolver(ResolverArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Experiment {
    /// Compare the five systems with their baselines and peers.
    ///
    /// The five published systems in one run, each with its baseline, slat, and the real peers that this machine has; it fails
    /// if slat loses a comparison that it claims to win.
    Compare(CompareArgs),
    /// Time the phases of a migration, with each locking.
    ///
    /// Populate memory, enable dirty logging, dirty memory, get and clear the log, disable logging: each phase timed, as KVM's
    /// dirty_log_perf_test does it.
    DirtyLog(DirtyLogArgs),
    /// Split huge pages on several nodes, by placement of the tables.
    ///
    /// The phases of `slat dirty-log` over huge pages on several nodes, for each placement of the tables that replace them.
    Split(SplitArgs),
    /// Bring memory page by page, as vCPUs touch it.
    ///
    /// By userfaultfd, by userfault exits, or through rings: as KVM's demand_paging_test does it, and more.
    DemandPaging(DemandPagingArgs),
    /// Time a call that takes the dirty log, beside its peers and KVM.
    ///
    /// What one call costs that takes the dirty log of a slot: the engine, the ways of KVM around the year 2012, and the KVM of
    /// this machine.
    GetDirtyLog(GetDirtyLogArgs),
    /// Map, unmap and move memory beside a running vCPU.
    ///
    /// Over many slots: iterations per second of each test of KVM's memslot_perf_test.
    Memslots(MemslotsArgs),
    /// Find out which pages a guest uses.
    ///
    /// Populate, write, read, mark idle, write, mark idle, read; each phase timed, as KVM's access_tracking_perf_test does it.
    Aging(AgingArgs),
    /// Compile a kernel in miniature: what loads of CR3 cost.
    ///
    /// With shadow tables. The guest's work is that of a compile of a kernel that was counted; it is done with each strategy for
    /// its loads of CR3.
    Cr3(Cr3Args),
    /// Time operations on the tables beside published Rust crates.
    ///
    /// And page faults.
    Peers(PeersArgs),
    /// Do everything at once, on overcommitted CPUs, and verify it.
    ///
    /// All operations at once beside running guests. What is not chosen is taken in turns.
    Stress(StressArgs),
}

impl Experiment {
    /// Runs the experiment.
    pub(crate) fn run(&self, session: &Session) -> Result<Outcome, Failure> {
        match self {
            Experiment::Compare(args) => compare::run(args, session),
            Experiment::DirtyLog(args) => dirty_log::run(args, session),
            Experiment::Split(args) => split::run(args, session),
            Experiment::DemandPaging(args) => demand_paging::run(args, session),
            Experiment::GetDirtyLog(args) => get_dirty_log::run(args, session),
            Experiment::Memslots(args) => memslots::run(args, session),
            Experiment::Aging(args) => aging::run(args, session),
            Experiment::Cr3(args) => cr3::run(args, session),
            Experiment::Peers(args) => peers::run(args, session),
            Experiment::Stress(args) => stress::run(args, session),
        }
    }

    /// Where its results go besides the screen.
    pub(crate) fn json(&self) -> Option<&Path> {
        match self {
            Experiment::Compare(args) => args.json.as_deref(),
            Experiment::DirtyLog(args) => args.json.as_deref(),
            Experiment::Split(args) => args.log.json.as_deref(),
            Experiment::DemandPaging(args) => args.json.as_deref(),
            Experiment::GetDirtyLog(args) => args.json.as_deref(),
            Experiment::Memslots(args) => args.json.as_deref(),
            Experiment::Aging(args) => args.json.as_deref(),
            Experiment::Cr3(args) => args.json.as_deref(),
            Experiment::Peers(args) => args.json.as_deref(),
            Experiment::Stress(args) => args.json.as_deref(),
        }
    }

    /// Where what it prints goes besides the screen.
    pub(crate) fn markdown(&self) -> Option<&Path> {
        match self {
            Experiment::Compare(args) => args.markdown.as_deref(),
            _ => None,
        }
    }
}

/// What `slat dirty-log` takes, and whatever else goes through its phases.
#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true, after_help = "Example: slat dirty-log -v 8 -b 64M -o --lock none --check")]
pub(crate) struct DirtyLogArgs {
    /// Number of vCPUs.
    #[arg(short = 'v', long, value_name = "N", default_value_t = 4, value_parser = positive::<usize>)]
    pub(crate) vcpus: usize,
    /// Memory for each vCPU.
    ///
    /// In bytes, or with K, M, G or T behind the number; a multiple of the page size.
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "256M", value_parser = size_bytes)]
    pub(crate) bytes: u64,
    /// Kind of memory, e.g. shmem.
    ///
    /// One of anonymous, anonymous_thp, anonymous_hugetlb_2mb, anonymous_hugetlb_1gb, shmem.
    #[arg(short = 's', long, value_name = "KIND", default_value = "anonymous")]
    pub(crate) backing: BackingKind,
    /// Number of slots that the memory is divided into.
    #[arg(short = 'x', long, value_name = "N", default_value_t = 1, value_parser = positive::<usize>, hide_short_help = true)]
    pub(crate) slots: usize,
    /// All vCPUs access all memory, instead of a part each.
    #[arg(short = 'o', long)]
    pub(crate) overlap: bool,
    /// Rounds of dirtying and taking the log.
    ///
    /// Of dirtying memory, getting the log and clearing it.
    #[arg(short = 'i', long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) iterations: u32,
    /// Writes among the accesses of the dirty phase, in percent.
    #[arg(short = 'w', long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u8).range(0..=100), hide_short_help = true)]
    pub(crate) write_percent: u8,
    /// Access pages in random order in the dirty phase.
    #[arg(short = 'a', long, hide_short_help = true)]
    pub(crate) random_access: bool,
    /// Run the vCPUs while logging is being disabled.
    #[arg(short = 'e', long, hide_short_help = true)]
    pub(crate) run_while_disabling: bool,
    /// Getting the log clears it.
    ///
    /// Else all pages are dirty when logging begins, getting the log copies it, and clearing it is a phase of its own (manual
    /// protect, initially set). Rings are empty when logging begins.
    #[arg(short = 'g', long, hide_short_help = true)]
    pub(crate) get_clears: bool,
    /// How writes are found.
    ///
    /// `pml` needs `--format ept`, and `dirty-bit` another one than `stage2`.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = DirtyTrackingArg::WriteProtect)]
    pub(crate) tracking: DirtyTrackingArg,
    /// Entries of each vCPU's ring, a power of two, with `--tracking ring`.
    #[arg(long, value_name = "N", default_value_t = DirtyRing::MAX_ENTRIES, hide_short_help = true)]
    pub(crate) ring_entries: u32,
    /// How pages are write-protected, where that is the tracking.
    ///
    /// Where table entries have no rights (`stage2`, `gstage`) both are leaf by leaf.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = ProtectionArg::Lazy, hide_short_help = true)]
    pub(crate) protection: ProtectionArg,
    /// What the first write to a huge page does while logging is on.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = HugePagesArg::Split, hide_short_help = true)]
    pub(crate) huge_pages: HugePagesArg,
    /// When the huge pages of a slot that logs are split.
    ///
    /// Ahead of time by the main thread, when logging begins or the log is cleared; or each by its first write.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = SplitWhen::Eager, hide_short_help = true)]
    pub(crate) split: SplitWhen,
    /// Pin vCPUs to CPUs: one for each, and perhaps one for the main thread.
    #[arg(short = 'c', long = "pin", value_delimiter = ',', value_name = "CPU,...", hide_short_help = true)]
    pub(crate) cpus: Option<Vec<u32>>,
    /// Lock.
    ///
    /// What the engine takes on the VM; `all` compares the three in one table.
    #[arg(long, value_enum, default_value_t = LockArg::All)]
    pub(crate) lock: LockArg,
    /// KVM of this machine.
    ///
    /// Whether to measure it in the same runs: if it works, always, or never.
    #[arg(long, value_enum, default_value_t = PeerArg::None)]
    pub(crate) peer: PeerArg,
    /// Format of the second-stage tables.
    #[arg(long, value_enum, default_value_t = FormatArg::Npt)]
    pub(crate) format: FormatArg,
    /// Guest's paging.
    ///
    /// Whether the guest translates its own addresses too, and whether there is a second stage for what comes of that.
    #[arg(long, value_enum, default_value_t = PagingArg::Flat)]
    pub(crate) paging: PagingArg,
    /// Runs of which the mean is taken.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive::<u32>)]
    pub(crate) runs: u32,
    /// Seed of the random choices.
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, hide_short_help = true)]
    pub(crate) seed: u64,
    /// Hold every harvest of the log against memory.
    ///
    /// The guest's, stopped and running.
    #[arg(long)]
    pub(crate) check: bool,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum LockArg {
    Exclusive,
    Shared,
    None,
    All,
}

impl LockArg {
    /// The lockings to run, in the order of the table's columns.
    pub(crate) fn lockings(self) -> &'static [Locking] {
        match self {
            LockArg::Exclusive => &[Locking::Exclusive],
            LockArg::Shared => &[Locking::Shared],
            LockArg::None => &[Locking::None],
            LockArg::All => &[Locking::Exclusive, Locking::Shared, Locking::None],
        }
    }
}

/// The name of a locking in options and results.
pub(crate) fn locking_name(locking: Locking) -> &'static str {
    match locking {
        Locking::Exclusive => "exclusive",
        Locking::Shared => "shared",
        Locking::None => "none",
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum TrackingArg {
    /// By the accessed bits of the leaves.
    AccessedBit,
    /// By faults.
    Faults,
    /// Both.
    Both,
}

impl TrackingArg {
    /// The ways to run, in the order of the table's columns.
    pub(crate) fn trackings(self) -> &'static [AccessTracking] {
        match self {
            TrackingArg::AccessedBit => &[AccessTracking::AccessedBit],
            TrackingArg::Faults => &[AccessTracking::Faults],
            TrackingArg::Both => &[AccessTracking::AccessedBit, AccessTracking::Faults],
        }
    }
}

/// The name of an access tracking in options and results.
pub(crate) fn tracking_name(tracking: AccessTracking) -> &'static str {
    match tracking {
        AccessTracking::AccessedBit => "accessed-bit",
        AccessTracking::Faults => "faults",
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DirtyTrackingArg {
    /// Pages are write-protected, and the first write of each faults.
    WriteProtect,
    /// By the dirty bits of the leaves.
    DirtyBit,
    /// By page-modification logging: CPUs log what they make dirty.
    Pml,
    /// As write-protect, and each vCPU writes its pages into a ring instead of the slots' bitmaps.
    Ring,
}

impl DirtyTrackingArg {
    /// The name in options and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            DirtyTrackingArg::Ring => "ring",
            other => dirty_tracking_name(dirty_tracking(other, ProtectionArg::Lazy)),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ProtectionArg {
    /// Dense blocks of 2 MiB as a whole; the next write to one protects its pages.
    Lazy,
    /// Each page by itself.
    LeafByLeaf,
}

/// The tracking that the options name.
pub(crate) fn dirty_tracking(tracking: DirtyTrackingArg, protection: ProtectionArg) -> DirtyTracking {
    match (tracking, protection) {
        (DirtyTrackingArg::WriteProtect | DirtyTrackingArg::Ring, ProtectionArg::Lazy) => DirtyTracking::WriteProtect,
        (DirtyTrackingArg::WriteProtect | DirtyTrackingArg::Ring, ProtectionArg::LeafByLeaf) => {
            DirtyTracking::WriteProtectLeaves
        }
        (DirtyTrackingArg::DirtyBit, _) => DirtyTracking::DirtyBit,
        (DirtyTrackingArg::Pml, _) => DirtyTracking::PageModificationLog,
    }
}

/// The name of a dirty tracking in options and results.
pub(crate) fn dirty_tracking_name(tracking: DirtyTracking) -> &'static str {
    match tracking {
        DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => "write-protect",
        DirtyTracking::DirtyBit => "dirty-bit",
        DirtyTracking::PageModificationLog => "pml",
    }
}

/// The name of a write protection in options and results, if pages are tracked by one.
pub(crate) fn protection_name(tracking: DirtyTracking) -> Option<&'static str> {
    match tracking {
        DirtyTracking::WriteProtect => Some("lazy"),
        DirtyTracking::WriteProtectLeaves => Some("leaf-by-leaf"),
        DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => None,
    }
}

/// The name of a manual protect in results.
pub(crate) fn manual_protect_name(manual_protect: ManualProtect) -> &'static str {
    match manual_protect {
        ManualProtect::Disabled => "disabled",
        ManualProtect::Enabled => "enabled",
        ManualProtect::InitiallySet => "initially-set",
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum HugePagesArg {
    /// It splits it, so that pages of 4 KiB are logged.
    Split,
    /// It marks all pages of its 2 MiB as dirty, and leaves it huge.
    MarkWhole,
}

impl HugePagesArg {
    pub(crate) fn logging(self, split: SplitWhen) -> HugePageLogging {
        match (self, split) {
            (HugePagesArg::Split, SplitWhen::Eager) => HugePageLogging::Split,
            (HugePagesArg::Split, SplitWhen::Lazy) => HugePageLogging::SplitLazily,
            (HugePagesArg::MarkWhole, SplitWhen::Eager) => HugePageLogging::MarkWhole,
            (HugePagesArg::MarkWhole, SplitWhen::Lazy) => HugePageLogging::MarkWholeLazily,
        }
    }

    /// The name in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            HugePagesArg::Split => "split",
            HugePagesArg::MarkWhole => "mark-whole",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum SplitWhen {
    Eager,
    Lazy,
}

impl SplitWhen {
    /// The name in options and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            SplitWhen::Eager => "eager",
            SplitWhen::Lazy => "lazy",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum FormatArg {
    /// AMD nested page tables.
    Npt,
    /// Intel extended page tables.
    Ept,
    /// Arm stage 2 tables: 4 KiB granule, 48 bits.
    Stage2,
    /// RISC-V G-stage tables, Sv48x4.
    Gstage,
    /// RISC-V G-stage tables, Sv39x4.
    GstageSv39x4,
}

/// Evaluates an expression in which a name stands for the type of the tables that a [`FormatArg`] means: everything that
/// runs on a format is compiled for each, here.
macro_rules! with_format {
    ($format:expr, $name:ident => $expression:expr) => {
        match $format {
            $crate::args::FormatArg::Npt => {
                type $name = slat::format::Npt;
                $expression
            }
            $crate::args::FormatArg::Ept => {
                type $name = slat::format::Ept;
                $expression
            }
            $crate::args::FormatArg::Stage2 => {
                type $name = slat::format::Stage2;
                $expression
            }
            $crate::args::FormatArg::Gstage => {
                type $name = slat::format::Sv48x4;
                $expression
            }
            $crate::args::FormatArg::GstageSv39x4 => {
                type $name = slat::format::Sv39x4;
                $expression
            }
        }
    };
}
pub(crate) use with_format;

impl FormatArg {
    /// The name of a format in options and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            FormatArg::Npt => "npt",
            FormatArg::Ept => "ept",
            FormatArg::Stage2 => "stage2",
            FormatArg::Gstage => "gstage",
            FormatArg::GstageSv39x4 => "gstage-sv39x4",
        }
    }

    /// Whether CPUs set dirty bits in such tables.
    pub(crate) fn has_dirty_bit(self) -> bool {
        with_format!(self, F => F::HAS_DIRTY_BIT)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PagingArg {
    /// Guest addresses are guest-physical.
    #[value(alias = "second-stage")]
    Flat,
    /// The guest has 4-level tables of its own.
    #[value(name = "2d")]
    TwoDimensional,
    /// It has, one address space for all vCPUs, and the CPUs no second stage: they walk shadow tables.
    Shadow,
}

impl PagingArg {
    /// The name in options and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PagingArg::Flat => "flat",
            PagingArg::TwoDimensional => "2d",
            PagingArg::Shadow => "shadow",
        }
    }
}

/// Whether the KVM of this machine is measured in the same runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PeerArg {
    /// If this machine's KVM works, and can do what is asked for.
    Auto,
    /// Always.
    Kvm,
    /// Never.
    None,
}

impl PeerArg {
    /// The name in options and results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            PeerArg::Auto => "auto",
            PeerArg::Kvm => "kvm",
            PeerArg::None => "none",
        }
    }
}

/// Whether tables of `format` can stand behind shadow tables.
pub(crate) fn check_shadow_format(format: FormatArg) -> Result<(), Failure> {
    match format {
        FormatArg::Npt => Ok(()),
        format => Err(Failure::Usage(format!(
            "--paging shadow needs --format npt: there are no shadow tables with {} tables",
            format.name()
        ))),
    }
}

/// A whole number above zero.
pub(crate) fn positive<N: std::str::FromStr + Default + PartialEq>(text: &str) -> Result<N, String>
where
    N::Err: std::fmt::Display,
{
    match text.parse::<N>() {
        Ok(number) if number == N::default() => Err("must be at least 1".to_owned()),
        Ok(number) => Ok(number),
        Err(error) => Err(error.to_string()),
    }
}

/// A number of bytes with an optional binary suffix, a multiple of the page size.
pub(crate) fn size_bytes(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.chars().last() {
        Some('k' | 'K') => (&text[..text.len() - 1], 10),
        Some('m' | 'M') => (&text[..text.len() - 1], 20),
        Some('g' | 'G') => (&text[..text.len() - 1], 30),
        Some('t' | 'T') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let number = digits.parse::<u64>().map_err(|error| format!("{error} (a number, optionally with K, M, G or T)"))?;
    let bytes = number.checked_mul(1 << shift).ok_or("too large")?;
    if bytes == 0 {
        return Err("must not be zero".to_owned());
    }
    if !bytes.is_multiple_of(slat::PAGE_SIZE) {
        return Err(format!("must be a multiple of the page size, {}", slat::PAGE_SIZE));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_have_suffixes_and_are_page_multiples() {
        assert_eq!(size_bytes("4096"), Ok(4096));
        assert_eq!(size_bytes("4K"), Ok(4096));
        assert_eq!(size_bytes("3m"), Ok(3 << 20));
        assert_eq!(size_bytes("2G"), Ok(2 << 30));
        assert_eq!(size_bytes("1T"), Ok(1 << 40));
        for bad in ["", "0", "0G", "K", "4095", "1", "-4K", "4 K", "4KiB", "99999999999999999999", "99999999999T", "é"]
        {
            assert!(size_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn counts_are_positive() {
        assert_eq!(positive::<usize>("3"), Ok(3));
        assert!(positive::<usize>("0").is_err() && positive::<u32>("-1").is_err() && positive::<u32>("").is_err());
    }
}
