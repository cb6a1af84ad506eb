//! The options of every experiment with the phases of a migration.

use std::path::PathBuf;

use clap::Args;
use slat::dirty::DirtyRing;
use slat_machine::memory::BackingKind;

use super::{DirtyTrackingArg, FormatArg, HugePagesArg, LockArg, PagingArg, PeerArg, ProtectionArg, SplitWhen};
use super::{positive, size_bytes};

/// The options of `slat dirty-log`, and of every other experiment with its phases.
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
    /// Rounds of dirtying and getting the log.
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
    /// Otherwise all pages are dirty when logging begins, getting the log copies it, and clearing
    /// it is a separate phase (manual protect, initially set). Rings are empty when logging begins.
    #[arg(short = 'g', long, hide_short_help = true)]
    pub(crate) get_clears: bool,
    /// How writes are found.
    ///
    /// `pml` needs `--format ept`, and `dirty-bit` another format than `stage2`.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = DirtyTrackingArg::WriteProtect)]
    pub(crate) tracking: DirtyTrackingArg,
    /// Entries of each vCPU's ring, a power of two, with `--tracking ring`.
    #[arg(long, value_name = "N", default_value_t = DirtyRing::MAX_ENTRIES, hide_short_help = true)]
    pub(crate) ring_entries: u32,
    /// How pages are write-protected, where that is the tracking.
    ///
    /// Where directory entries have no W (`stage2`, `gstage`) both are leaf by leaf.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = ProtectionArg::Lazy, hide_short_help = true)]
    pub(crate) protection: ProtectionArg,
    /// What the first write to a huge page does while logging is on.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = HugePagesArg::Split, hide_short_help = true)]
    pub(crate) huge_pages: HugePagesArg,
    /// When the huge pages of a slot that logs are split.
    ///
    /// Ahead of time by the main thread, when logging begins or the log is cleared; or each by its
    /// first write.
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
    /// Whether the guest has page tables too, and whether the CPUs have a second stage.
    #[arg(long, value_enum, default_value_t = PagingArg::Flat)]
    pub(crate) paging: PagingArg,
    /// Runs of which the mean is taken.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive::<u32>)]
    pub(crate) runs: u32,
    /// Seed of the random choices.
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, hide_short_help = true)]
    pub(crate) seed: u64,
    /// Compare every harvest of the log with memory.
    ///
    /// With the guest stopped, and running.
    #[arg(long)]
    pub(crate) check: bool,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}
