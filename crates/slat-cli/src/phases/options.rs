//! The options of every experiment with the phases of a migration.

use clap::Args;
use slat::dirty::DirtyRing;

use crate::options::{CPUS, ITERATIONS, PAGING, RUNS, SEED, SLOTS, positive};
use crate::options::{DirtyTrackingArg, GuestArgs, HugePagesArg, PagingArg, ProtectionArg, SplitWhen, TablesArgs};

/// The options of every experiment with the phases of a migration.
#[derive(Clone, Debug, Args)]
pub(crate) struct PhasesArgs {
    #[command(flatten)]
    pub(crate) guest: GuestArgs,
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive::<usize>, help = SLOTS, hide_short_help = true)]
    pub(crate) slots: usize,
    #[arg(
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(1..=1_000_000),
        help = ITERATIONS
    )]
    pub(crate) iterations: u32,
    /// Writes among the accesses of the dirty phase, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u8).range(0..=100), hide_short_help = true)]
    pub(crate) write_percent: u8,
    /// Access pages in random order in the dirty phase
    #[arg(long, hide_short_help = true)]
    pub(crate) random_access: bool,
    /// Run the vCPUs while logging is being disabled
    #[arg(long, hide_short_help = true)]
    pub(crate) run_while_disabling: bool,
    /// Getting the log clears it
    ///
    /// Otherwise all pages are dirty when logging begins, getting the log copies it, and clearing
    /// it is a separate phase (manual protect, initially set). Rings are empty when logging begins.
    #[arg(long, hide_short_help = true)]
    pub(crate) get_clears: bool,
    /// How writes are found
    ///
    /// `pml` needs `--format ept`, and `dirty-bit` another format than `stage2`.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = DirtyTrackingArg::WriteProtect, hide_short_help = true)]
    pub(crate) tracking: DirtyTrackingArg,
    /// Entries of each vCPU's ring, a power of two, with `--tracking ring` [default: 65536]
    #[arg(long, value_name = "N", hide_short_help = true)]
    ring_entries: Option<u32>,
    /// How pages are write-protected, where that is the tracking
    ///
    /// Where directory entries have no W (`stage2`, `gstage`) both are leaf by leaf.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = ProtectionArg::Lazy, hide_short_help = true)]
    pub(crate) protection: ProtectionArg,
    /// What the first write to a huge page does while logging is on
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = HugePagesArg::Split, hide_short_help = true)]
    pub(crate) huge_pages: HugePagesArg,
    /// When the huge pages of a slot that logs are split
    ///
    /// Ahead of time when logging begins or the log is cleared, by the main thread (`slat
    /// numa-split`: by --split-threads threads); or each by its first write.
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = SplitWhen::Eager, hide_short_help = true)]
    pub(crate) split: SplitWhen,
    #[arg(long, value_delimiter = ',', value_name = "CPU,...", help = CPUS, hide_short_help = true)]
    pub(crate) cpus: Option<Vec<u32>>,
    #[command(flatten)]
    pub(crate) tables: TablesArgs,
    #[arg(long, value_name = "PAGING", value_enum, default_value_t = PagingArg::Flat, help = PAGING, hide_short_help = true)]
    pub(crate) paging: PagingArg,
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive::<u32>, help = RUNS)]
    pub(crate) runs: u32,
    #[arg(long, value_name = "N", default_value_t = 1, help = SEED, hide_short_help = true)]
    pub(crate) seed: u64,
    /// Compare every harvest of the log with memory
    ///
    /// With the guest stopped, and running.
    #[arg(long)]
    pub(crate) check: bool,
}

impl PhasesArgs {
    /// The entries of each vCPU's ring; `None`: there are no rings.
    pub(crate) fn ring_entries(&self) -> Option<u32> {
        let is_ring = self.tracking == DirtyTrackingArg::Ring;
        is_ring.then(|| self.ring_entries.unwrap_or(DirtyRing::MAX_ENTRIES))
    }

    /// Whether there are entries of rings, and no rings.
    pub(super) fn has_entries_without_rings(&self) -> bool {
        self.ring_entries.is_some() && self.tracking != DirtyTrackingArg::Ring
    }
}
