//! Histograms of durations, as one writer records them and as a caller reads them.

#![expect(unsafe_code, reason = "says which type is zeroed")]

use alloc::boxed::Box;

use super::increase;
use crate::boxed::{Zeroed, try_zeroed};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

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
/// and [`max`](Histogram::max) stay exact. A bucket has 32 bits; a full one stays full.
///
/// # Example
/// ```
/// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
/// # use host::*;
/// use slat::*;
/// use slat::stats::*;
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
    pub(super) fn add(&mut self, recording: &Recording) {
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
