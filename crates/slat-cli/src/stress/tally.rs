//! Counts of operations and verifications, by all threads over all turns.

use std::sync::atomic::{AtomicU64, Ordering};

use slat::stats::Stats;
use slat_machine::memory::EventCounts;

/// The part of the table with the figure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    /// Operations done.
    Done,
    /// Comparisons of results with expectations.
    Verified,
    /// The engine's own counts.
    Engine,
}

/// A figure may end with where a machine has counted it.
macro_rules! figures {
    ($counts:ident $stats:ident; $($variant:ident $part:ident $name:literal $title:literal $(= $from:ident.$field:ident)?;)*) => {
        /// What is counted.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Figure { $($variant),* }

        /// All figures, in the order of the table: part, name in results, title.
        pub(super) const FIGURES: &[(Figure, Part, &str, &str)] =
            &[$((Figure::$variant, Part::$part, $name, $title)),*];

        /// The counters.
        #[derive(Debug)]
        pub(super) struct Tally([AtomicU64; [$(Figure::$variant),*].len()]);

        impl Tally {
            /// Adds what a machine has counted itself.
            pub(super) fn add_machine(&self, $counts: &EventCounts, $stats: &Stats) {
                $($(self.add(Figure::$variant, $from.$field);)?)*
            }
        }
    };
}

figures! {
    counts stats;
    Discarded Done "pages_discarded" "Pages discarded" = counts.nr_discarded;
    Moved Done "pages_moved" "Pages moved to another frame" = counts.nr_moved;
    Protected Done "pages_protected" "Pages write-protected" = counts.nr_protected;
    CopiedOnWrite Done "pages_copied_on_write" "  then copied on write" = counts.nr_copied_on_write;
    Unprotected Done "pages_unprotected" "  then written by their last user" = counts.nr_unprotected;
    SwappedOut Done "pages_swapped_out" "Pages saved and swapped out" = counts.nr_swapped_out;
    DroppedClean Done "pages_dropped_clean" "Pages swapped out clean, not saved again" = counts.nr_dropped_clean;
    SwappedIn Done "pages_swapped_in" "Pages swapped in" = counts.nr_swapped_in;
    Invalidated Done "invalidations_without_change" "Invalidations without change";
    SlotsCreated Done "slots_created" "Slots created";
    SlotsMoved Done "slots_moved" "Slots moved";
    SlotsReflagged Done "slots_reflagged" "Slots with changed flags";
    SlotsDeleted Done "slots_deleted" "Slots deleted";
    LogsEnabled Done "dirty_logs_enabled" "Dirty logs turned on";
    LogsDisabled Done "dirty_logs_disabled" "Dirty logs turned off";
    Harvests Done "harvests" "Harvests of dirty logs";
    RangesSplit Done "ranges_split" "Ranges split";
    RangesRecovered Done "ranges_recovered" "Ranges whose huge pages were recovered";
    Agings Done "agings" "Ranges aged or tested";
    Reclaims Done "reclaims" "Reclaims";
    Visits Done "visits" "Reads of slots that may be gone";
    Bursts Done "bursts" "Bursts of the guests";
    Reads Verified "reads_verified" "Reads of the guests";
    SlotReads Verified "reads_beside_verified" "Reads in slots that come and go";
    Exits Verified "exits_verified" "Accesses that had to exit, and did";
    PoisonIntact Verified "poison_intact" "Freed frames without a write" = counts.nr_poison_intact;
    Snapshots Verified "snapshots_verified" "Write-protected frames without a write" = counts.nr_snapshots_verified;
    Migrated Verified "pages_migrated" "Pages of migrated slots equal to memory";
    HarvestsExact Verified "harvests_exact" "Harvests that named exactly what was written";
    AgingsExact Verified "agings_exact" "Agings that counted exactly what was used";
    FrameUses Verified "frame_accounts_zero" "Machines whose frames were all released";
    Accesses Engine "accesses" "Accesses of the guests";
    Faults Engine "faults" "Faults" = stats.faults;
    Spurious Engine "spurious" "  of them spurious" = stats.spurious;
    Retries Engine "retries" "Retries" = stats.retries;
    Flushes Engine "flushes" "Flushes" = stats.flushes;
    DirectoryProtected Engine "tables_protected" "Directory entries write-protected" = stats.tables_protected;
    Splits Engine "splits" "Huge pages split" = stats.splits;
    Recoveries Engine "recoveries" "Huge pages recovered" = stats.recoveries;
    Zapped Engine "zapped" "PTEs zapped" = stats.zapped;
    LockWaits Engine "lock_waits" "Waits for the lock" = stats.lock_waits;
}

impl Default for Tally {
    fn default() -> Tally {
        Tally(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Tally {
    pub(super) fn add(&self, figure: Figure, count: u64) {
        // Relaxed, both: statistics.
        self.0[figure as usize].fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn get(&self, figure: Figure) -> u64 {
        self.0[figure as usize].load(Ordering::Relaxed)
    }
}
