//! What [`Vm::stats`](crate::Vm::stats) returns: counters and latency histograms of all vCPUs and
//! calls of a VM.
//!
//! # Guarantees
//! - Every event is counted. Counting is always on: it takes no lock, and no atomic
//!   read-modify-write.
//! - Durations are those of a sample, one fault in 128, because reading the clock twice costs as
//!   much as a fault. Sums that are extrapolated from the sample are documented as such.
//!
//! # Use
//! [`Vm::stats`](crate::Vm::stats) may be called at any time, while vCPUs run. For the counts of an
//! interval, subtract two results; [`Histogram::since`] does it for durations. Durations are zero
//! if [`Host::timestamp_ns`](crate::Host::timestamp_ns) is not a clock.

#![expect(unsafe_code, reason = "says which types are zeroed")]

mod histogram;

pub use histogram::Histogram;
use histogram::Recording;

use crate::addr::Level;
use crate::boxed::{OnceBox, Zeroed};
use crate::error::OutOfMemory;
use crate::sync::{AtomicU64, Ordering};

/// One fault in so many is timed, and one hold of the lock.
pub(crate) const SAMPLE_PERIOD: u64 = 128;

/// Whether a fault, or a hold of the lock, is timed after `nr_before` earlier ones of the vCPU. It
/// selects an even and an odd one in turn. Where each page costs two faults, an exit and one that
/// maps it, both kinds are sampled.
#[inline]
pub(crate) fn is_sampled(nr_before: u64) -> bool {
    // The first test fails for nearly all: the 8th or 9th of a period. The second selects one of
    // the two.
    (nr_before % SAMPLE_PERIOD) & !1 == 8 && (nr_before ^ (nr_before / SAMPLE_PERIOD)) & 1 == 0
}

macro_rules! counters {
    (
        $($(#[$doc:meta])* $variant:ident $field:ident),*;
        if $cfg:meta { $($(#[$doc_if:meta])* $variant_if:ident $field_if:ident,)* }
    ) => {
        /// What is counted.
        #[derive(Clone, Copy)]
        pub(crate) enum Counter { $($variant,)* $(#[$cfg] $variant_if),* }

        const NR_COUNTERS: usize = [$(Counter::$variant,)* $(#[$cfg] Counter::$variant_if),*].len();

        /// Sums over all vCPUs and VM calls since the VM was created.
        #[derive(Clone, Debug, Default)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $field: u64,)*
            $($(#[$doc_if])* #[$cfg] pub $field_if: u64,)*
            /// Duration of a fault in nanoseconds, with resolve; a sample.
            pub fault_ns: Histogram,
            /// Time in [`Host::resolve`](crate::Host::resolve) in one fault, in nanoseconds; a
            /// sample. Without the time for which the scheduler had no CPU for the vCPU
            /// ([`Host::run_delay_ns`](crate::Host::run_delay_ns)).
            pub resolve_ns: Histogram,
            /// Guest stall in nanoseconds: the time for which the engine delayed a vCPU in one
            /// fault; a sample. This is the fault's duration without resolve, and without the time
            /// for which the scheduler had no CPU for it.
            pub guest_stall_ns: Histogram,
            /// Waits for the VM's lock in nanoseconds. Acquisitions without a wait are not in it.
            #[$cfg]
            pub lock_wait_ns: Histogram,
            /// Holds of the VM's lock in nanoseconds, with the time for which the holder had no
            /// CPU; a sample. Empty with [`Locking::None`](crate::baselines::Locking::None). A long
            /// operation releases the lock between its turns, and each turn is one hold.
            #[$cfg]
            pub lock_hold_ns: Histogram,
            /// Shadow pages that exist now.
            pub shadow_pages: u64,
            /// Largest number of shadow pages so far.
            pub shadow_pages_peak: u64,
        }

        impl Stats {
            pub(crate) fn add(&mut self, recorder: &Recorder) {
                $(self.$field += recorder.get(Counter::$variant);)*
                if let Some(times) = recorder.fault_times() {
                    self.fault_ns.add(&times.fault_ns);
                    self.resolve_ns.add(&times.resolve_ns);
                    self.guest_stall_ns.add(&times.guest_stall_ns);
                }
                $(#[$cfg] { self.$field_if += recorder.get(Counter::$variant_if); })*
                #[$cfg]
                if let Some(times) = recorder.lock_times() {
                    self.lock_wait_ns.add(&times.wait_ns);
                    self.lock_hold_ns.add(&times.hold_ns);
                }
            }
        }
    };
}

counters! {
    /// Calls of [`Vcpu::handle_fault`](crate::Vcpu::handle_fault).
    Faults faults,
    /// Faults that found nothing to do, or only the accessed or dirty bit to set where CPUs do not
    /// set it. Another thread was first, or the CPU used an old translation.
    Spurious spurious,
    /// Times that a fault had to start over: page tables or memslots changed during it, or its page
    /// is in a range in flight.
    Retries retries,
    /// Leaves installed by faults and prefaults that map 4 KiB.
    Installed4K installed_4k,
    /// Leaves installed by faults and prefaults that map 2 MiB.
    Installed2M installed_2m,
    /// Leaves installed by faults and prefaults that map 1 GiB.
    Installed1G installed_1g,
    /// Leaves of 4 KiB that faults installed for neighbours of their pages
    /// ([`FaultAround`](crate::tables::FaultAround)). `installed_4k` includes them.
    Around around,
    /// Leaves to which a fault restored the right to write, without asking the host.
    WritesRestored writes_restored,
    /// Leaves through which a fault restored reading; they were not present in order to observe the
    /// access ([`AccessTracking::Faults`]).
    ///
    /// [`AccessTracking::Faults`]: crate::tables::AccessTracking::Faults
    AccessesRestored accesses_restored,
    /// Huge leaves split, by faults and ahead of time.
    Splits splits,
    /// Those of `splits` that split a leaf of 1 GiB.
    Splits1G splits_1g,
    /// Page-table pages that became huge leaves again.
    Recoveries recoveries,
    /// Those of `recoveries` that made a leaf of 1 GiB.
    Recoveries1G recoveries_1g,
    /// Page-table pages that faults and prefaults have linked, and invalidations where nothing was
    /// mapped.
    FaultTables fault_tables,
    /// Those of `fault_tables` on another node than the memory for which they were linked.
    RemoteFaultTables remote_fault_tables,
    /// Page-table pages that were linked instead of huge leaves; with break before make, also those
    /// that were about to be.
    SplitTables split_tables,
    /// Those of `split_tables` on another node than the huge leaf's memory.
    RemoteSplitTables remote_split_tables,
    /// Exits to user space.
    Exits exits,
    /// Those of `exits` that were memory faults ([`Exit::MemoryFault`](crate::Exit::MemoryFault)).
    Userfaults userfaults,
    /// Calls of [`Host::flush`](crate::Host::flush).
    Flushes flushes,
    /// Leaves that were write-protected for logging, one by one, or whose dirty bit was cleared.
    Protected protected,
    /// Directory entries that were protected. Each write-protects all leaves below.
    TablesProtected tables_protected,
    /// Protected directory entries to which faults restored W.
    TablesUnprotected tables_unprotected,
    /// PTEs (leaves and directory entries) that were zapped, and recoveries that were aborted.
    Zapped zapped,
    /// Leaves of 4 KiB that were zapped; see [`pages_4k`](Stats::pages_4k).
    Zapped4K zapped_4k,
    /// Leaves of 2 MiB that were zapped.
    Zapped2M zapped_2m,
    /// Leaves of 1 GiB that were zapped.
    Zapped1G zapped_1g,
    /// Page-table pages allocated from the host.
    TablesAllocated tables_allocated,
    /// Page-table pages returned to the host.
    TablesFreed tables_freed,
    /// Calls of [`Vcpu::handle_page_fault`](crate::Vcpu::handle_page_fault).
    PageFaults page_faults,
    /// Those of `page_faults` that were the guest's own
    /// ([`Exit::PageFault`](crate::Exit::PageFault)).
    GuestPageFaults guest_page_faults,
    /// Loads of CR3 by the guest, while its paging was on.
    Cr3Loads cr3_loads,
    /// Switches to a remembered root that still existed.
    RootHits root_hits,
    /// Switches to a root that had to be looked up among the shadow pages, or built.
    RootMisses root_misses,
    /// Shadow pages built.
    ShadowPagesBuilt shadow_pages_built,
    /// Shadow pages zapped, for whatever reason.
    ShadowPagesZapped shadow_pages_zapped,
    /// Those of `shadow_pages_zapped` that were evicted to make room for others.
    ShadowEvictions shadow_evictions,
    /// Those of `shadow_pages_zapped` whose guest page table the guest wrote again and again.
    ShadowFloods shadow_floods,
    /// Shadow leaves made.
    ShadowLeavesMade shadow_leaves_made,
    /// Shadow leaves removed.
    ShadowLeavesDropped shadow_leaves_dropped,
    /// Shadow pages of the lowest level that were compared as a whole with the guest's page table.
    ShadowSyncs shadow_syncs,
    /// Shadow PTEs compared with the guest's PTEs, for a flush or a new link.
    EntriesCompared entries_compared,
    /// Shadow PTEs made to agree with the guest's PTEs. A comparison found a difference and removed
    /// or write-protected the shadow PTE, or a fault made it again from a PTE whose accessed bit
    /// was set.
    EntriesSynced entries_synced,
    /// Times that the guest was allowed to write one of its page tables of the lowest level, and
    /// the shadow page became unsync.
    ShadowUnsyncs unsyncs,
    /// Writes to the guest's page tables that were emulated
    /// ([`Vcpu::write_guest_table`](crate::Vcpu::write_guest_table)).
    EmulatedWrites emulated_writes;
    if cfg(feature = "baselines") {
        /// Times that a guard took the VM's lock, on either side; 0 with
        /// [`Locking::None`](crate::baselines::Locking::None).
        LockAcquisitions lock_acquisitions,
        /// Those of `lock_acquisitions` that had to wait.
        LockWaits lock_waits,
    }
}

impl Counter {
    /// Leaves of `level` that faults and prefaults have installed.
    #[inline]
    pub(crate) fn installed(level: Level) -> Counter {
        match level {
            Level::L4K => Counter::Installed4K,
            Level::L2M => Counter::Installed2M,
            _ => Counter::Installed1G,
        }
    }

    /// Leaves of `level` that were zapped.
    #[inline]
    pub(crate) fn zapped(level: Level) -> Counter {
        match level {
            Level::L4K => Counter::Zapped4K,
            Level::L2M => Counter::Zapped2M,
            _ => Counter::Zapped1G,
        }
    }
}

impl Stats {
    /// Leaves of 4 KiB that are mapped now. Exact when no call is under way; so are the next two.
    ///
    /// Where a host needs no report
    /// ([`Host::needs_zapped_leaves`](crate::Host::needs_zapped_leaves)), leaves that went with
    /// their page-table pages count until those are freed ([`Vm::reclaim`](crate::Vm::reclaim)).
    pub fn pages_4k(&self) -> u64 {
        let (split_2m, recovered_2m) = self.splits_and_recoveries_2m();
        let more = self.installed_4k + split_2m * ENTRIES;
        more.saturating_sub(self.zapped_4k + recovered_2m * ENTRIES)
    }

    /// Leaves of 2 MiB that are mapped now.
    pub fn pages_2m(&self) -> u64 {
        let (split_2m, recovered_2m) = self.splits_and_recoveries_2m();
        let more = self.installed_2m + recovered_2m + self.splits_1g * ENTRIES;
        more.saturating_sub(self.zapped_2m + split_2m + self.recoveries_1g * ENTRIES)
    }

    /// Leaves of 1 GiB that are mapped now.
    pub fn pages_1g(&self) -> u64 {
        (self.installed_1g + self.recoveries_1g).saturating_sub(self.zapped_1g + self.splits_1g)
    }

    /// Shadow leaves that exist now; the reverse map has one entry for each. Exact when no call is
    /// under way.
    pub fn shadow_leaves(&self) -> u64 {
        self.shadow_leaves_made.saturating_sub(self.shadow_leaves_dropped)
    }

    fn splits_and_recoveries_2m(&self) -> (u64, u64) {
        // The counters were read one after the other, while splits went on.
        (self.splits.saturating_sub(self.splits_1g), self.recoveries.saturating_sub(self.recoveries_1g))
    }

    /// Page-table pages that are allocated now: linked, in a vCPU's cache, or waiting for a grace
    /// period.
    pub fn live_tables(&self) -> u64 {
        self.tables_allocated.saturating_sub(self.tables_freed)
    }

    /// Total time in resolve, in nanoseconds, without waits for a CPU; extrapolated from the
    /// sample.
    pub fn resolve_time_ns(&self) -> u64 {
        self.extrapolate(self.resolve_ns.sum())
    }

    /// Total time in faults without resolve, in nanoseconds, without waits for a CPU; extrapolated
    /// from the sample.
    pub fn engine_time_ns(&self) -> u64 {
        self.extrapolate(self.guest_stall_ns.sum())
    }

    fn extrapolate(&self, sampled_ns: u64) -> u64 {
        match self.fault_ns.count() {
            0 => 0,
            sampled => (u128::from(sampled_ns) * u128::from(self.faults) / u128::from(sampled)) as u64,
        }
    }
}

/// Parts of a huge leaf, in every format.
const ENTRIES: u64 = Level::L2M.nr_pages();

/// Counters and histograms of one writer: a vCPU, or a thread inside a VM call.
/// [`Vm::stats`](crate::Vm::stats) sums them.
///
/// A recorder has one writer at a time, so counting is a plain load and store on a line that no
/// other thread writes. Lock waits are always timed. Faults and holds of the lock are sampled (one
/// in [`SAMPLE_PERIOD`]).
///
/// Histograms take most of the memory, so a recorder has only those that it uses: a vCPU's those of
/// faults, and with a lock every one those of the lock.
pub(crate) struct Recorder {
    counters: [AtomicU64; NR_COUNTERS],
    fault_times: OnceBox<FaultTimes>,
    #[cfg(feature = "baselines")]
    lock_times: OnceBox<LockTimes>,
}

/// Times of a vCPU's faults.
pub(crate) struct FaultTimes {
    pub(crate) fault_ns: Recording,
    pub(crate) resolve_ns: Recording,
    pub(crate) guest_stall_ns: Recording,
}

/// Times of the VM's lock.
#[cfg(feature = "baselines")]
pub(crate) struct LockTimes {
    pub(crate) wait_ns: Recording,
    pub(crate) hold_ns: Recording,
}

// SAFETY: it has only arrays of atomics, and cells for boxes; zeroes are valid values of them.
unsafe impl Zeroed for Recorder {
    #[cfg(loom)]
    fn zeroed() -> Recorder {
        Recorder {
            counters: Zeroed::zeroed(),
            fault_times: Zeroed::zeroed(),
            #[cfg(feature = "baselines")]
            lock_times: Zeroed::zeroed(),
        }
    }
}

// SAFETY: it has only recordings, for which zeroes are a valid value.
unsafe impl Zeroed for FaultTimes {
    #[cfg(loom)]
    fn zeroed() -> FaultTimes {
        FaultTimes { fault_ns: Zeroed::zeroed(), resolve_ns: Zeroed::zeroed(), guest_stall_ns: Zeroed::zeroed() }
    }
}

// SAFETY: as above.
#[cfg(feature = "baselines")]
unsafe impl Zeroed for LockTimes {
    #[cfg(loom)]
    fn zeroed() -> LockTimes {
        LockTimes { wait_ns: Zeroed::zeroed(), hold_ns: Zeroed::zeroed() }
    }
}

impl Recorder {
    /// Allocates the histograms for the times of faults.
    pub(crate) fn make_fault_times(&self) -> Result<(), OutOfMemory> {
        self.fault_times.get_or_make().map(|_| ())
    }

    /// Allocates the histograms for the times of the lock.
    #[cfg(feature = "baselines")]
    pub(crate) fn make_lock_times(&self) -> Result<(), OutOfMemory> {
        self.lock_times.get_or_make().map(|_| ())
    }

    /// The histograms for the times of faults, if this is a vCPU's recorder.
    pub(crate) fn fault_times(&self) -> Option<&FaultTimes> {
        self.fault_times.get()
    }

    /// The histograms for the times of the lock, if the VM has one.
    #[cfg(feature = "baselines")]
    pub(crate) fn lock_times(&self) -> Option<&LockTimes> {
        self.lock_times.get()
    }

    #[inline]
    pub(crate) fn count(&self, counter: Counter) {
        self.add(counter, 1);
    }

    #[inline]
    pub(crate) fn add(&self, counter: Counter, n: u64) {
        increase(&self.counters[counter as usize], n);
    }

    #[inline]
    pub(crate) fn get(&self, counter: Counter) -> u64 {
        self.counters[counter as usize].load(Ordering::Relaxed)
    }
}

/// Adds to a counter with one writer. Relaxed: a count orders nothing, and readers need no exact
/// moment.
#[inline]
fn increase(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}
