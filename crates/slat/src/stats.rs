//! Counters and latency histograms. Each vCPU, and each thread inside a VM call, has a
//! [`Recorder`]. [`Vm::stats`](crate::Vm::stats) sums them.
//!
//! A recorder has one writer at a time, so counting is a plain load and store on a line that no
//! other thread writes. Time comes from [`Host::timestamp_ns`](crate::Host::timestamp_ns). Lock
//! waits are always timed. Faults and holds of the lock are sampled (one in [`SAMPLE_PERIOD`]),
//! because reading the clock twice costs as much as a fault. Sums that are extrapolated from the
//! sample are documented as such.
//!
//! Histograms take most of the memory, so a recorder has only those that it uses: a vCPU's those of
//! faults, and with a lock every one those of the lock. Their buckets have 32 bits, and a full
//! bucket stays full.

#![expect(unsafe_code, reason = "says which types are zeroed")]

use alloc::boxed::Box;

use crate::addr::Level;
use crate::boxed::{OnceBox, Zeroed, try_zeroed};
use crate::error::Error;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

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
    ($($(#[$doc:meta])* $variant:ident $field:ident),* $(,)?) => {
        /// What is counted.
        #[derive(Clone, Copy)]
        pub(crate) enum Counter { $($variant),* }

        const NR_COUNTERS: usize = [$(Counter::$variant),*].len();

        /// Sums over all vCPUs and VM calls since the VM was created.
        #[derive(Clone, Debug, Default)]
        #[non_exhaustive]
        pub struct Stats {
            $($(#[$doc])* pub $field: u64,)*
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
            pub lock_wait_ns: Histogram,
            /// Holds of the VM's lock in nanoseconds, with the time for which the holder had no
            /// CPU; a sample. Empty with [`Locking::None`](crate::Locking::None). A long operation
            /// releases the lock between its turns, and each turn is one hold.
            pub lock_hold_ns: Histogram,
        }

        impl Stats {
            pub(crate) fn add(&mut self, recorder: &Recorder) {
                $(self.$field += recorder.get(Counter::$variant);)*
                if let Some(times) = recorder.fault_times() {
                    self.fault_ns.add(&times.fault_ns);
                    self.resolve_ns.add(&times.resolve_ns);
                    self.guest_stall_ns.add(&times.guest_stall_ns);
                }
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
    /// ([`FaultAround`](crate::FaultAround)). `installed_4k` includes them.
    Around around,
    /// Leaves to which a fault restored the right to write, without asking the host.
    WritesRestored writes_restored,
    /// Leaves through which a fault restored reading; they were not present in order to observe the
    /// access ([`AccessTracking::Faults`]).
    ///
    /// [`AccessTracking::Faults`]: crate::AccessTracking::Faults
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
    TablesClosed tables_closed,
    /// Protected directory entries to which faults restored W.
    TablesOpened tables_opened,
    /// PTEs (leaves and directory entries) that were zapped, and recoveries that were aborted.
    Zapped zapped,
    /// Leaves of 4 KiB that were zapped.
    Zapped4K zapped_4k,
    /// Leaves of 2 MiB that were zapped.
    Zapped2M zapped_2m,
    /// Leaves of 1 GiB that were zapped.
    Zapped1G zapped_1g,
    /// Page-table pages allocated from the host.
    TablesAllocated tables_allocated,
    /// Page-table pages returned to the host.
    TablesFreed tables_freed,
    /// Times that a guard took the VM's lock, on either side; 0 with
    /// [`Locking::None`](crate::Locking::None).
    LockAcquisitions lock_acquisitions,
    /// Those of `lock_acquisitions` that had to wait.
    LockWaits lock_waits,
    /// Calls of [`Vcpu::handle_page_fault`](crate::Vcpu::handle_page_fault).
    PageFaults page_faults,
    /// Those of `page_faults` that were the guest's own
    /// ([`Exit::PageFault`](crate::Exit::PageFault)).
    GuestPageFaults guest_page_faults,
    /// Loads of CR3 by the guest, while its paging was on.
    Cr3Loads cr3_loads,
    /// Switches to a remembered root that still existed.
    RootHits root_hits,
    /// Switches to a root that had to be looked up, or built.
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
    EmulatedWrites emulated_writes,
}

impl Stats {
    /// Leaves of 4 KiB that are mapped now. Exact when no call is under way; so are the next two.
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

/// Buckets below this index hold one value each; above, each power of two has `SUB_BUCKETS` of
/// them.
const SUB_BUCKETS: usize = 8;
const SUB_BUCKET_BITS: u32 = SUB_BUCKETS.trailing_zeros();
/// Values from 2^34 ns (17 seconds) on share the last bucket.
#[cfg(not(loom))]
const MAX_BITS: u32 = 34;
/// Few, because loom follows each atomic of each participant.
#[cfg(loom)]
const MAX_BITS: u32 = 4;
const NR_BUCKETS: usize = (MAX_BITS - SUB_BUCKET_BITS + 1) as usize * SUB_BUCKETS;

fn bucket(value_ns: u64) -> usize {
    let value = value_ns.min((1 << MAX_BITS) - 1);
    if value < SUB_BUCKETS as u64 {
        return value as usize;
    }
    let exponent = value.ilog2() - SUB_BUCKET_BITS;
    (exponent as usize + 1) * SUB_BUCKETS + ((value >> exponent) as usize - SUB_BUCKETS)
}

/// The largest value that falls into bucket `index`.
fn bucket_top(index: usize) -> u64 {
    if index < SUB_BUCKETS {
        return index as u64;
    }
    if index == NR_BUCKETS - 1 {
        return u64::MAX;
    }
    let exponent = index / SUB_BUCKETS - 1;
    (((SUB_BUCKETS + index % SUB_BUCKETS + 1) as u64) << exponent) - 1
}

/// Counters and histograms of one writer.
pub(crate) struct Recorder {
    counters: [AtomicU64; NR_COUNTERS],
    fault_times: OnceBox<FaultTimes>,
    lock_times: OnceBox<LockTimes>,
}

/// Times of a vCPU's faults.
pub(crate) struct FaultTimes {
    pub(crate) fault_ns: Recording,
    pub(crate) resolve_ns: Recording,
    pub(crate) guest_stall_ns: Recording,
}

/// Times of the VM's lock.
pub(crate) struct LockTimes {
    pub(crate) wait_ns: Recording,
    pub(crate) hold_ns: Recording,
}

// SAFETY: it has only arrays of atomics, and cells for boxes; zeroes are valid values of them.
unsafe impl Zeroed for Recorder {
    #[cfg(loom)]
    fn zeroed() -> Recorder {
        Recorder { counters: Zeroed::zeroed(), fault_times: Zeroed::zeroed(), lock_times: Zeroed::zeroed() }
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
unsafe impl Zeroed for LockTimes {
    #[cfg(loom)]
    fn zeroed() -> LockTimes {
        LockTimes { wait_ns: Zeroed::zeroed(), hold_ns: Zeroed::zeroed() }
    }
}

impl Recorder {
    /// Allocates the histograms for the times of faults.
    pub(crate) fn make_fault_times(&self) -> Result<(), Error> {
        self.fault_times.get_or_make().map(|_| ())
    }

    /// Allocates the histograms for the times of the lock.
    pub(crate) fn make_lock_times(&self) -> Result<(), Error> {
        self.lock_times.get_or_make().map(|_| ())
    }

    /// The histograms for the times of faults, if this is a vCPU's recorder.
    pub(crate) fn fault_times(&self) -> Option<&FaultTimes> {
        self.fault_times.get()
    }

    /// The histograms for the times of the lock, if the VM has one.
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

/// A histogram with one writer.
pub(crate) struct Recording {
    sum: AtomicU64,
    max: AtomicU64,
    buckets: [AtomicU32; NR_BUCKETS],
}

// SAFETY: it has only atomics, for which zeroes are a valid value.
unsafe impl Zeroed for Recording {
    #[cfg(loom)]
    fn zeroed() -> Recording {
        Recording { sum: Zeroed::zeroed(), max: Zeroed::zeroed(), buckets: Zeroed::zeroed() }
    }
}

impl Recording {
    pub(crate) fn record(&self, value_ns: u64) {
        // All Relaxed, as in `increase`.
        let bucket = &self.buckets[bucket(value_ns)];
        bucket.store(bucket.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        increase(&self.sum, value_ns);
        if value_ns > self.max.load(Ordering::Relaxed) {
            self.max.store(value_ns, Ordering::Relaxed);
        }
    }
}

/// A histogram of durations with buckets no wider than an eighth of their value.
///
/// The buckets are on the heap. Without memory for them, all values count as in the last bucket. A
/// quantile is then at most the largest value; [`count`](Histogram::count), [`sum`](Histogram::sum)
/// and [`max`](Histogram::max) stay exact.
///
/// # Example
/// ```
/// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
/// # use host::*;
/// use slat::*;
/// # fn main() -> Result<(), Error> {
/// # let vm = vm_with_memory(Config::default(), MemoryRegionFlags::empty());
/// # let mut vcpu = vm.create_vcpu()?;
/// for page in 0..256 {
///     assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Read)?, Outcome::Resume);
/// }
/// // To sum several runs:
/// let mut stall_ns = Histogram::default();
/// stall_ns.merge(&vm.stats().guest_stall_ns);
/// let (median, p99, worst) = (stall_ns.quantile(500), stall_ns.quantile(990), stall_ns.max());
/// assert!(median <= p99 && p99 <= worst);
/// println!("guest stall: {median} ns, {p99} ns, {worst} ns, of {} faults", stall_ns.count());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct Histogram {
    /// `None` if nothing was recorded, or there was no memory.
    buckets: Option<Box<Buckets>>,
    count: u64,
    sum: u64,
    max: u64,
}

type Buckets = [u64; NR_BUCKETS];

impl Clone for Histogram {
    fn clone(&self) -> Histogram {
        let mut clone = Histogram::default();
        clone.merge(self);
        clone
    }
}

impl Histogram {
    fn add(&mut self, recording: &Recording) {
        self.add_counts(recording.buckets.iter().map(|bucket| u64::from(bucket.load(Ordering::Relaxed))));
        self.sum += recording.sum.load(Ordering::Relaxed);
        self.max = self.max.max(recording.max.load(Ordering::Relaxed));
    }

    /// Adds that many values to each bucket.
    fn add_counts(&mut self, counts: impl Iterator<Item = u64>) {
        for (index, n) in counts.enumerate().filter(|&(_, n)| n != 0) {
            if self.count == 0 {
                self.buckets = try_zeroed().ok();
            }
            self.count += n;
            if let Some(buckets) = &mut self.buckets {
                buckets[index] += n;
            }
        }
    }

    /// Whether values were recorded, but there was no memory for their buckets.
    fn lacks_buckets(&self) -> bool {
        self.count != 0 && self.buckets.is_none()
    }

    /// The number of values in each bucket; zeroes if there are no buckets.
    fn counts(&self) -> impl Iterator<Item = u64> {
        (0..NR_BUCKETS).map(|index| self.buckets.as_ref().map_or(0, |buckets| buckets[index]))
    }

    /// Adds what `other` recorded, for example in another run.
    pub fn merge(&mut self, other: &Histogram) {
        if other.lacks_buckets() {
            self.buckets = None;
            self.count += other.count;
        } else {
            self.add_counts(other.counts());
        }
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// What was recorded since `earlier` was read from the same VM. Its largest value is only as
    /// exact as the buckets are.
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        let mut since = Histogram { sum: self.sum.saturating_sub(earlier.sum), ..Histogram::default() };
        if self.lacks_buckets() || earlier.lacks_buckets() {
            since.count = self.count.saturating_sub(earlier.count);
        } else {
            since.add_counts(self.counts().zip(earlier.counts()).map(|(all, before)| all.saturating_sub(before)));
        }
        since.max = since.buckets().last().map_or(0, |(top, _)| top.min(self.max));
        since
    }

    /// Number of recorded values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Sum of the recorded values, in nanoseconds.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The largest recorded value, in nanoseconds.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The value, in nanoseconds, that `per_mille` thousandths of the recorded values do not exceed
    /// (500: the median). It is rounded up to its bucket's end; 0 if nothing was recorded.
    pub fn quantile(&self, per_mille: u32) -> u64 {
        let count = self.count();
        let rank = (u128::from(count) * u128::from(per_mille.min(1000))).div_ceil(1000) as u64;
        let mut seen = 0;
        let reached = self.buckets().find(|&(_, n)| {
            seen += n;
            seen >= rank
        });
        reached.map_or(0, |(top, _)| top.min(self.max))
    }

    /// The buckets that are not empty, in order: the largest value of the bucket, in nanoseconds,
    /// and the number of values recorded there.
    ///
    /// The bounds are the same in every histogram. The last bucket, of values from about 17 seconds
    /// on, is bounded by `u64::MAX` only.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counts = self.buckets.iter().flat_map(|buckets| buckets.iter()).enumerate();
        let known = counts.filter(|&(_, &n)| n != 0).map(|(index, &n)| (bucket_top(index), n));
        known.chain(self.lacks_buckets().then_some((u64::MAX, self.count)))
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// A histogram of `values`.
    fn histogram_of(values: impl IntoIterator<Item = u64>) -> Histogram {
        let recording: Box<Recording> = try_zeroed().unwrap();
        values.into_iter().for_each(|value| recording.record(value));
        let mut histogram = Histogram::default();
        histogram.add(&recording);
        histogram
    }

    #[test]
    fn buckets_are_ordered_and_tight() {
        let mut last = 0;
        for value in (0..4096).chain((12..63).map(|bit| 1 << bit)).chain([u64::MAX]) {
            let index = bucket(value);
            assert!(index < NR_BUCKETS && index >= last, "value {value} in bucket {index} after {last}");
            last = index;
            if value < 1 << MAX_BITS {
                let top = bucket_top(index);
                assert!(top >= value && top - value <= value / 8, "value {value} in a bucket up to {top}");
            }
        }
    }

    #[test]
    fn quantiles_of_a_known_distribution() {
        let empty = Histogram::default();
        assert_eq!((empty.count(), empty.quantile(500)), (0, 0));
        let histogram = histogram_of(1..=1000);
        assert_eq!((histogram.count(), histogram.sum(), histogram.max()), (1000, 500_500, 1000));
        assert!((500..=563).contains(&histogram.quantile(500)), "{}", histogram.quantile(500));
        assert!((990..=1000).contains(&histogram.quantile(990)), "{}", histogram.quantile(990));
        assert_eq!(histogram.quantile(1000), 1000);
        assert_eq!(histogram.quantile(0), 1);
    }

    #[test]
    fn the_buckets_hold_what_was_recorded() {
        assert_eq!(Histogram::default().buckets().next(), None);
        let histogram = histogram_of([0, 7, 7, 16, 17, 18, 1 << 33, u64::MAX, u64::MAX - 1]);
        let top_of_33 = (1 << 33) + (1 << 30) - 1;
        let buckets = [(0, 1), (7, 2), (17, 2), (19, 1), (top_of_33, 1), (u64::MAX, 2)];
        assert!(histogram.buckets().eq(buckets), "{histogram:?}");
        assert_eq!(histogram.buckets().map(|(_, n)| n).sum::<u64>(), histogram.count());
    }

    #[test]
    fn a_quantile_is_the_top_of_the_bucket_that_reaches_it() {
        let histogram = histogram_of((0..2000).map(|value| value * value).chain([u64::MAX]));
        for per_mille in 0..=1000 {
            let rank = (histogram.count() * per_mille).div_ceil(1000).max(1);
            let (mut seen, mut last_top) = (0, None);
            for (top, n) in histogram.buckets() {
                assert!(last_top < Some(top), "bucket up to {top} after {last_top:?}");
                last_top = Some(top);
                if seen < rank && seen + n >= rank {
                    assert_eq!(histogram.quantile(per_mille as u32), top, "{per_mille}");
                }
                seen += n;
            }
        }
        // At most the largest value, although its bucket reaches further.
        assert_eq!(histogram_of([1000]).quantile(1000), 1000);
    }

    #[test]
    fn merged_histograms_have_the_buckets_of_both() {
        let low_and_high = (0..100).chain(5000..5100);
        let mut merged = histogram_of(0..100);
        merged.merge(&histogram_of(5000..5100));
        let at_once = histogram_of(low_and_high);
        assert!(merged.buckets().eq(at_once.buckets()));
        assert_eq!((merged.sum(), merged.max()), (at_once.sum(), at_once.max()));
        merged.merge(&Histogram::default());
        assert!(merged.buckets().eq(at_once.buckets()));
    }

    /// A copy of a histogram for whose buckets there was no memory.
    fn without_buckets(histogram: &Histogram) -> Histogram {
        Histogram { buckets: None, ..histogram.clone() }
    }

    #[test]
    fn without_memory_for_buckets_all_values_are_in_the_last() {
        let (known, unknown) = (histogram_of(1..=10), without_buckets(&histogram_of(100..=200)));
        assert_eq!((unknown.count(), unknown.sum(), unknown.max()), (101, 15150, 200));
        assert_eq!((unknown.quantile(0), unknown.quantile(500), unknown.quantile(1000)), (200, 200, 200));
        assert!(unknown.buckets().eq([(u64::MAX, 101)]));
        for mut both in [known.clone(), unknown.clone()] {
            both.merge(if both.count() == 10 { &unknown } else { &known });
            assert_eq!((both.count(), both.sum(), both.max(), both.quantile(1)), (111, 15205, 200, 200));
            assert!(both.buckets().eq([(u64::MAX, 111)]));
            assert!(both.clone().buckets().eq(both.buckets()));
            let since = both.since(&known);
            assert_eq!((since.count(), since.sum(), since.max()), (101, 15150, 200));
        }
        let mut none = Histogram::default();
        none.merge(&without_buckets(&none));
        none.merge(&known);
        assert!(none.buckets().eq(known.buckets()));
    }

    #[test]
    fn a_full_bucket_stays_full() {
        let recording: Box<Recording> = try_zeroed().unwrap();
        recording.buckets[bucket(5)].store(u32::MAX - 1, Ordering::Relaxed);
        for _ in 0..3 {
            recording.record(5);
        }
        let mut histogram = Histogram::default();
        histogram.add(&recording);
        assert_eq!((histogram.count(), histogram.quantile(500)), (u64::from(u32::MAX), 5));
    }

    #[test]
    fn what_came_since_is_what_is_more() {
        let earlier = histogram_of([1_000_000; 100]);
        let later = histogram_of([1_000_000; 100].into_iter().chain(1..=10));
        assert_eq!((earlier.since(&earlier).count(), earlier.since(&earlier).max()), (0, 0));
        let since = later.since(&earlier);
        assert_eq!((since.count(), since.sum()), (10, 55));
        // The bucket of 10 has only 10; the million from before is not in it.
        assert_eq!((since.quantile(500), since.quantile(1000), since.max()), (5, 10, 10));
        // Not of the same VM: nothing, and no overflow.
        assert_eq!((earlier.since(&later).count(), earlier.since(&later).quantile(990)), (0, 0));
    }
}
