//! Faults beside work in the same VM, against faults beside the same work in another VM.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use slat::MemoryRegionFlags;
use slat::baselines::Locking;
use slat::tables::Invalidation;

use super::arena::Memory;
use super::cpus::{cpu_time, cpus, pin};
use super::timing::{median, quantile};
use super::world::{self, BenchVm, GIB, VCPU_MEMORY, VCPU_MEMORY_PAGES};
use super::{host, membarrier};

/// Blocks of 2 MiB in which pages are faulted in again before an invalidation, and pages in each.
const NR_BLOCKS: u64 = 8;
const PAGES_PER_BLOCK: u64 = 64;
/// Size of a memslot 0 that covers all invalidated ranges: two PTEs of the root.
const ALL: u64 = 515 * GIB;
/// The places of the invalidated 1 GiB: next to the vCPUs' memory in the page-table page (on the
/// same cache line), elsewhere in it, and below another PTE of the root.
const NEXT_ENTRY: u64 = VCPU_MEMORY + VCPU_MEMORY_PAGES;
const SAME_ROOT_ENTRY: u64 = GIB;
const OTHER_ROOT_ENTRY: u64 = 513 * GIB;

/// The contents of the range when it is invalidated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contents {
    Empty,
    /// Some leaves, faulted in each time.
    Leaves,
}

/// The effect of a flush on the other CPUs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flush {
    Free,
    Ipi,
}

/// The work that the other thread repeats.
#[derive(Clone, Copy)]
enum Work {
    /// Invalidates the GiB from this page on.
    Invalidate { first: u64, contents: Contents, flush: Flush },
    /// Nothing; but so many single pages stay in flight.
    Hold { nr_ranges: u64 },
    /// Nothing; but so many single pages were in flight at once before.
    HaveHeld { nr_ranges: u64 },
    /// Turns dirty logging of memslot 0 on and off, after all of its pages were written.
    FlipLog { nr_pages: u64, contents: Contents },
    /// Makes memslot 0 read-only and back, after all of its pages were written.
    FlipReadOnly { nr_pages: u64 },
}

use Contents::{Empty, Leaves};
use Flush::{Free, Ipi};

struct Line {
    name: &'static str,
    locking: Locking,
    /// Size of memslot 0.
    nr_pages: u64,
    work: Work,
}

const fn invalidating(name: &'static str, first: u64, contents: Contents, flush: Flush) -> Line {
    Line { name, locking: Locking::None, nr_pages: ALL, work: Work::Invalidate { first, contents, flush } }
}

const fn invalidating_in_lock(name: &'static str, locking: Locking) -> Line {
    Line { locking, ..invalidating(name, SAME_ROOT_ENTRY, Leaves, Ipi) }
}

const fn still(name: &'static str, work: Work) -> Line {
    Line { name, locking: Locking::None, nr_pages: ALL, work }
}

const fn flipping(name: &'static str, nr_pages: u64, contents: Contents) -> Line {
    Line { name, locking: Locking::None, nr_pages, work: Work::FlipLog { nr_pages, contents } }
}

const fn read_only(name: &'static str, nr_pages: u64) -> Line {
    Line { name, locking: Locking::None, nr_pages, work: Work::FlipReadOnly { nr_pages } }
}

const INVALIDATIONS: [Line; 14] = [
    invalidating("empty GiB, same root entry, IPI", SAME_ROOT_ENTRY, Empty, Ipi),
    invalidating("empty GiB, other root entry, IPI", OTHER_ROOT_ENTRY, Empty, Ipi),
    invalidating("empty GiB, next entry, IPI", NEXT_ENTRY, Empty, Ipi),
    invalidating("GiB with leaves, same root entry, IPI", SAME_ROOT_ENTRY, Leaves, Ipi),
    invalidating("GiB with leaves, other root entry, IPI", OTHER_ROOT_ENTRY, Leaves, Ipi),
    invalidating("GiB with leaves, same root entry", SAME_ROOT_ENTRY, Leaves, Free),
    invalidating("GiB with leaves, other root entry", OTHER_ROOT_ENTRY, Leaves, Free),
    invalidating("empty GiB, same root entry, no flush at all", SAME_ROOT_ENTRY, Empty, Free),
    invalidating_in_lock("GiB with leaves, same entry, IPI; shared lock", Locking::Shared),
    invalidating_in_lock("GiB with leaves, same entry, IPI; exclusive", Locking::Exclusive),
    still("1 page that stays in flight", Work::Hold { nr_ranges: 1 }),
    still("8 pages that stay in flight", Work::Hold { nr_ranges: 8 }),
    still("64 pages that stay in flight", Work::Hold { nr_ranges: 64 }),
    still("64 pages that were in flight at once before", Work::HaveHeld { nr_ranges: 64 }),
];

const FLIPS: [Line; 5] = [
    flipping("log on and off, 2 MiB, written", GIB / 512, Leaves),
    flipping("log on and off, 16 MiB, written", GIB / 64, Leaves),
    flipping("log on and off, 1 GiB, written", GIB, Leaves),
    flipping("log on and off, 1 GiB, empty", GIB, Empty),
    read_only("read-only and back, 16 MiB, written", GIB / 64),
];

impl Work {
    /// One round of the work on `vm`.
    fn on(self, vm: &std::sync::Arc<BenchVm>) -> impl FnMut() {
        let mut vcpu = vm.create_vcpu().unwrap();
        let mut held: Vec<Invalidation<'_>> = Vec::new();
        if let Work::Hold { nr_ranges } | Work::HaveHeld { nr_ranges } = self {
            held.extend((0..nr_ranges).map(|page| world::invalidate(vm, page, 1)));
        }
        if matches!(self, Work::HaveHeld { .. }) {
            held.clear();
        }
        move || match self {
            Work::Invalidate { first, contents, flush } => {
                if contents == Contents::Leaves {
                    for block in 0..NR_BLOCKS {
                        for page in 0..PAGES_PER_BLOCK {
                            host::write_fault(&mut vcpu, first + block * 512 + page);
                        }
                    }
                }
                let invalidation = world::invalidate(vm, first, GIB);
                if flush == Flush::Ipi {
                    membarrier::on_all_cpus();
                }
                drop(invalidation);
            }
            Work::Hold { .. } | Work::HaveHeld { .. } => {
                // Used until the work ends.
                let _: &[Invalidation<'_>] = &held;
                thread::sleep(Duration::from_micros(100));
            }
            Work::FlipLog { nr_pages, contents } => {
                if contents == Contents::Leaves {
                    (0..nr_pages).for_each(|page| host::write_fault(&mut vcpu, page));
                }
                host::log_dirty_pages(vm, nr_pages);
                world::stop_logging(vm, nr_pages);
            }
            Work::FlipReadOnly { nr_pages } => {
                (0..nr_pages).for_each(|page| host::write_fault(&mut vcpu, page));
                world::recreate(vm, nr_pages, MemoryRegionFlags::READONLY);
                world::recreate(vm, nr_pages, MemoryRegionFlags::empty());
            }
        }
    }
}

/// The VM of the work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Beside,
    OtherVm,
}

/// The result of one run.
#[derive(Clone, Copy, Default)]
struct Sample {
    /// Faults per second.
    per_second: f64,
    /// Faults per second of CPU time.
    per_cpu_second: f64,
    /// Rounds of the work per second, and flushes of its VM.
    rounds_per_second: f64,
    flushes_per_second: f64,
    /// In the vCPU's VM.
    retries: u64,
}

/// One run: `nr_faults` faults of one vCPU beside the work.
fn run(memory: Memory, line: &Line, place: Where, nr_faults: u64) -> Sample {
    memory.reset();
    // The other VM exists in any case.
    let vms = [(); 2].map(|()| world::new_vm(memory, line.locking, line.nr_pages));
    let vm = &vms[0];
    let worked_on = if place == Where::Beside { vm } else { &vms[1] };
    let (nr_rounds, stop) = (CachePadded::new(AtomicU64::new(0)), CachePadded::new(AtomicBool::new(false)));
    let cpus = cpus();
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(cpus[cpus.len() - 1]);
            let mut round = line.work.on(worked_on);
            while !stop.load(Ordering::Relaxed) {
                round();
                nr_rounds.store(nr_rounds.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            }
        });
        let faulting = scope.spawn(|| {
            pin(cpus[0]);
            let mut vcpu = vm.create_vcpu().unwrap();
            while nr_rounds.load(Ordering::Relaxed) < 2 {
                thread::yield_now();
            }
            let counts = || (nr_rounds.load(Ordering::Relaxed), worked_on.stats().flushes);
            let before = counts();
            let (begin, begin_cpu) = (Instant::now(), cpu_time());
            for page in VCPU_MEMORY..VCPU_MEMORY + nr_faults {
                host::write_fault(&mut vcpu, page);
            }
            let (cpu, wall) = ((cpu_time() - begin_cpu).as_secs_f64(), begin.elapsed().as_secs_f64());
            let after = counts();
            // `stop` is set only now: the work went on for as long as the faults.
            stop.store(true, Ordering::Relaxed);
            Sample {
                per_second: nr_faults as f64 / wall,
                per_cpu_second: nr_faults as f64 / cpu,
                rounds_per_second: (after.0 - before.0) as f64 / wall,
                flushes_per_second: (after.1 - before.1) as f64 / wall,
                retries: vm.stats().retries,
            }
        });
        faulting.join().unwrap()
    })
}

/// Both runs of each pair.
type Pairs = Vec<(Sample, Sample)>;

fn collect(memory: Memory, lines: &[Line], nr_pairs: usize, divisor: u64) -> Vec<Pairs> {
    let mut pairs = vec![Pairs::new(); lines.len()];
    // The first warms the caches and the CPUs' clocks.
    for pair in 0..=nr_pairs {
        for (line, pairs) in lines.iter().zip(&mut pairs) {
            let run = |place| run(memory, line, place, VCPU_MEMORY_PAGES / divisor);
            let (beside, other);
            // The order alternates.
            if pair % 2 == 0 {
                beside = run(Where::Beside);
                other = run(Where::OtherVm);
            } else {
                other = run(Where::OtherVm);
                beside = run(Where::Beside);
            }
            if pair > 0 {
                pairs.push((beside, other));
            }
        }
    }
    pairs
}

fn print(what: &str, lines: &[Line], pairs: &[Pairs], nr_faults: u64) {
    let nr_pairs = pairs[0].len();
    println!("\nFaults beside {what}, against the same in another VM: {nr_pairs} pairs of {nr_faults} faults.");
    println!(
        "{:<46} {:>6} {:>13} {:>6} {:>9} {:>11} {:>11} {:>17} {:>17} {:>7}",
        "aim: ratio >= 0.95",
        "ratio",
        "quartiles",
        "worst",
        "CPU ratio",
        "beside M/s",
        "other M/s",
        "rounds/s (other)",
        "flushes/s (other)",
        "retries"
    );
    for (line, pairs) in lines.iter().zip(pairs) {
        let ratios = |of: fn(&Sample) -> f64| -> Vec<f64> {
            pairs.iter().map(|(beside, other)| of(beside) / of(other)).collect()
        };
        let medians = |of: fn(&Sample) -> f64| {
            let (beside, other): (Vec<f64>, Vec<f64>) =
                pairs.iter().map(|(beside, other)| (of(beside), of(other))).unzip();
            (median(&beside), median(&other))
        };
        let wall = ratios(|sample| sample.per_second);
        let rates = medians(|sample| sample.per_second);
        let rounds = medians(|sample| sample.rounds_per_second);
        let flushes = medians(|sample| sample.flushes_per_second);
        println!(
            "{:<46} {:>6.3} {:>13} {:>6.3} {:>9.3} {:>11.2} {:>11.2} {:>17} {:>17} {:>7}",
            line.name,
            median(&wall),
            format!("{:.3} {:.3}", quantile(&wall, 250), quantile(&wall, 750)),
            quantile(&wall, 0),
            median(&ratios(|sample| sample.per_cpu_second)),
            rates.0 / 1e6,
            rates.1 / 1e6,
            format!("{:.0} ({:.0})", rounds.0, rounds.1),
            format!("{:.0} ({:.0})", flushes.0, flushes.1),
            pairs.iter().map(|(beside, other)| beside.retries + other.retries).sum::<u64>(),
        );
    }
}

pub(crate) fn table(memory: Memory, nr_pairs: usize, divisor: u64) {
    for (what, lines) in [("invalidations", &INVALIDATIONS[..]), ("flips", &FLIPS[..])] {
        let pairs = collect(memory, lines, nr_pairs, divisor);
        print(what, lines, &pairs, VCPU_MEMORY_PAGES / divisor);
    }
}
