//! The command line. Short options are those of KVM's selftests, each with a long name.

mod dirty_log;
mod parse;
mod values;

use std::path::Path;

use clap::{Parser, Subcommand};

use crate::aging::{self, AgingArgs};
use crate::compare::{self, CompareArgs};
use crate::cr3::{self, Cr3Args};
use crate::demand_paging::resolver::ResolverArgs;
use crate::demand_paging::{self, DemandPagingArgs};
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
pub(crate) use dirty_log::DirtyLogArgs;
pub(crate) use parse::{positive, size_bytes};
pub(crate) use values::with_format;
pub(crate) use values::{
    DirtyTrackingArg, FormatArg, HugePagesArg, LockArg, PagingArg, PeerArg, ProtectionArg, SplitWhen, TrackingArg,
    check_shadow_format, dirty_tracking, dirty_tracking_name, locking_name, manual_protect_name, protection_name,
    tracking_name,
};

/// Experiments on second-level address translation, on a software machine.
///
/// The machine has real threads and real memory. Without a command it runs the demonstration: the
/// phases of a dirty-logging migration with each locking.
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
    /// The five published systems in one run, each with its baseline, slat, and the real peers that
    /// this machine has; it fails if slat loses a comparison that it claims to win.
    Compare(CompareArgs),
    /// Time the phases of a migration, with each locking.
    ///
    /// Populate memory, enable dirty logging, dirty memory, get and clear the log, disable logging:
    /// each phase timed, as KVM's dirty_log_perf_test does it.
    DirtyLog(DirtyLogArgs),
    /// Split huge pages on several nodes, by placement of the tables.
    ///
    /// The phases of `slat dirty-log` over huge pages on several nodes, for each placement of the
    /// tables that replace them.
    Split(SplitArgs),
    /// Bring memory page by page, as vCPUs touch it.
    ///
    /// By userfaultfd, by userfault exits, or through rings: as KVM's demand_paging_test does it,
    /// and more.
    DemandPaging(DemandPagingArgs),
    /// Time a call that gets the dirty log, with peers and KVM.
    ///
    /// The time of one call that gets the dirty log of a slot: of the engine, the ways of KVM
    /// around the year 2012, and the KVM of this machine.
    GetDirtyLog(GetDirtyLogArgs),
    /// Map, unmap and move memory while a vCPU runs.
    ///
    /// Over many slots: iterations per second of each test of KVM's memslot_perf_test.
    Memslots(MemslotsArgs),
    /// Find out which pages a guest uses.
    ///
    /// Populate, write, read, mark idle, write, mark idle, read; each phase timed, as KVM's
    /// access_tracking_perf_test does it.
    Aging(AgingArgs),
    /// Time loads of CR3 in a mini guest kernel, by strategy.
    ///
    /// With shadow tables. The guest's work is that of a kernel build that was counted; it runs
    /// with each strategy for its loads of CR3.
    Cr3(Cr3Args),
    /// Time operations on page tables, with published Rust crates.
    ///
    /// And page faults.
    Peers(PeersArgs),
    /// Do everything at once, on overcommitted CPUs, and verify it.
    ///
    /// All operations at once while guests run. Options that are not chosen alternate.
    Stress(StressArgs),
}

impl Experiment {
    /// Runs the experiment.
    pub(crate) fn run(&self, session: &Session) -> Result<Outcome, Failure> {
        match self {
            Experiment::Compare(args) => compare::run(args, session),
            Experiment::DirtyLog(args) => crate::dirty_log::run(args, session),
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

    /// The file of `--json`.
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

    /// The file of `--markdown`.
    pub(crate) fn markdown(&self) -> Option<&Path> {
        match self {
            Experiment::Compare(args) => args.markdown.as_deref(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }
}
