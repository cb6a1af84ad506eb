//! Counts of operations and verifications, by all threads over all turns.

use std::sync::atomic::{AtomicU64, Ordering};

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

macro_rules! figures {
    ($($variant:ident $part:ident $name:literal $title:literal;)*) => {
        /// What is counted.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub(super) enum Figure { $($variant),* }

        /// All figures, in the order of the table: part, name in results, title.
        pub(super) const FIGURES: &[(Figure, Part, &str, &str)] =
            &[$((Figure::$variant, Part::$part, $name, $title)),*];

        /// The counters.
        #[derive(Debug)]
        pub(super) struct Tally([AtomicU64; [$(Figure::$variant),*].len()]);
    };
}

figures! {
    Discarded Done "pages_discarded" "Pages discarded";
    Moved Done "pages_moved" "Pages moved to another frame";
    Protected Done "pages_protected" "Pages write-protected";
    CopiedOnWrite Done "pages_copied_on_write" "  then copied on write";
    Unprotected Done "pages_unprotected" "  then written by their last user";
    SwappedOut Done "pages_swapped_out" "Pages saved and swapped out";
    DroppedClean Done "pages_dropped_clean" "Pages swapped out clean, not saved again";
    SwappedIn Done "pages_swapped_in" "Pages swapped in";
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
    PoisonIntact Verified "poison_intact" "Freed frames without a write";
    Snapshots Verified "snapshots_verified" "Write-protected frames without a write";
    Migrated Verified "pages_migrated" "Pages of migrated slots equal to memory";
    HarvestsExact Verified "harvests_exact" "Harvests that named exactly what was written";
    AgingsExact Verified "agings_exact" "Agings that counted exactly what was used";
    FrameUses Verified "frame_accounts_zero" "Machines whose frames were all released";
    Accesses Engine "accesses" "Accesses of the guests";
    Faults Engine "faults" "Faults";
    Spurious Engine "spurious" "  of them spurious";
    Retries Engine "retries" "Retries";
    Flushes Engine "flushes" "Flushes";
    DirectoryProtected Engine "tables_protected" "Directory entries write-protected";
    Splits Engine "splits" "Huge pages split";
    Recoveries Engine "recoveries" "Huge pages recovered";
    Zapped Engine "zapped" "PTEs zapped";
    LockWaits Engine "lock_waits" "Waits for the lock";
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
