//! The cost of beginning to log where all pages are dirty at first, and the cost of the first clear
//! of a range after that.

#![expect(unsafe_code, reason = "implements the host's contract over another host, and sets up the allocator")]

use std::alloc::Layout;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use slat::baselines::Park;
use slat::dirty::ManualProtect;
use slat::format::Npt;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Config, Gfn, GfnRange, Host, Hpa, MemoryRegionFlags, PageSize, Vm};

use super::arena::Memory;
use super::bench_host::BenchHost;
use super::timing::{median, quantile};
use super::world::{self, BLOCK, Backing, GIB};

/// Memory of the memslot, and its part that is cleared first.
const NR_GIB: u64 = 64;
const CLEARED_PAGES: u64 = GIB;

/// A host that counts the visits of page-table pages.
struct CountingHost {
    host: BenchHost<Backing>,
    nr_entered: AtomicU64,
}

// SAFETY: all calls go to a host that keeps the contract.
unsafe impl Host for CountingHost {
    type Backing = Backing;

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        self.host.allocate_table(layout, node, wait)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises: it came from the host inside.
        unsafe { self.host.free_table(table, layout) }
    }

    #[inline]
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.nr_entered.fetch_add(1, Ordering::Relaxed);
        self.host.table_ptr(table)
    }

    fn resolve(&self, backing: &Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        self.host.resolve(backing, gfn, page, access)
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.host.flush(ranges);
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        self.host.has_barrier_on_all_cpus()
    }

    fn barrier_on_all_cpus(&self) {
        self.host.barrier_on_all_cpus();
    }

    fn timestamp_ns(&self) -> u64 {
        self.host.timestamp_ns()
    }

    fn parking(&self) -> Option<&dyn Park> {
        self.host.parking()
    }
}

/// Resident memory of this process, in bytes (proc(5), `smaps_rollup`: the sums of other files lag
/// behind).
fn resident_bytes() -> f64 {
    let rollup = fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = rollup.lines().find_map(|line| line.strip_prefix("Rss:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| kib * 1024.0)
}

/// The costs of one beginning.
struct Beginning {
    ns: f64,
    nr_entered: f64,
    resident_bytes: f64,
}

fn mapped<H: Host<Backing = Backing>>(host: H, manual_protect: ManualProtect, nr_pages: u64) -> Arc<Vm<H, Npt>> {
    let backing = Backing::Whole(PageSize::Size2M);
    let vm = world::new_vm(host, Config::default().with_manual_protect(manual_protect), nr_pages, backing);
    world::map_huge(&vm, nr_pages, backing);
    vm
}

fn begin_to_log<H: Host<Backing = Backing>>(vm: &Vm<H, Npt>, nr_pages: u64) {
    world::set_slot(vm, nr_pages, MemoryRegionFlags::LOG_DIRTY_PAGES, None);
}

fn begin(memory: Memory, manual_protect: ManualProtect, nr_pages: u64) -> Beginning {
    memory.reset();
    let vm = mapped(BenchHost::new(memory), manual_protect, nr_pages);
    let before = resident_bytes();
    let begin = Instant::now();
    begin_to_log(&vm, nr_pages);
    let ns = begin.elapsed().as_nanos() as f64;
    let resident_bytes = resident_bytes() - before;
    drop(vm);
    memory.reset();
    // Separately, since counting would change the time.
    let host = CountingHost { host: BenchHost::new(memory), nr_entered: AtomicU64::new(0) };
    let vm = mapped(host, manual_protect, nr_pages);
    let before = vm.host().nr_entered.load(Ordering::Relaxed);
    begin_to_log(&vm, nr_pages);
    let nr_entered = (vm.host().nr_entered.load(Ordering::Relaxed) - before) as f64;
    Beginning { ns, nr_entered, resident_bytes }
}

/// The first clear of [`CLEARED_PAGES`] where all pages are dirty at first, in nanoseconds.
fn clear(memory: Memory, nr_pages: u64, is_split: IsSplit) -> f64 {
    memory.reset();
    let vm = mapped(BenchHost::new(memory), ManualProtect::InitiallySet, nr_pages);
    if is_split == IsSplit::Before {
        vm.split_range(world::range(0, CLEARED_PAGES), PageSize::Size4K).unwrap();
    }
    begin_to_log(&vm, nr_pages);
    let bitmap = vec![u64::MAX; (CLEARED_PAGES / 64) as usize];
    let nr_split = vm.stats().splits;
    let begin = Instant::now();
    assert_eq!(vm.clear_dirty_log(0, 0, CLEARED_PAGES, &bitmap), Ok(CLEARED_PAGES));
    let ns = begin.elapsed().as_nanos() as f64;
    let expected = if is_split == IsSplit::Before { 0 } else { CLEARED_PAGES / BLOCK };
    assert_eq!(vm.stats().splits - nr_split, expected);
    ns
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum IsSplit {
    Before,
    ByTheClear,
}

pub(crate) fn table(memory: Memory, nr_repetitions: usize, divisor: u64) {
    // Each log in a mapping of its own, as at first, and not where the last one was.
    keep_large_allocations_apart();
    let nr_pages = NR_GIB / divisor * GIB;
    let kinds = [ManualProtect::InitiallySet, ManualProtect::Disabled];
    let mut beginnings: [Vec<Beginning>; 2] = [const { Vec::new() }; 2];
    let mut clears: [Vec<f64>; 2] = [const { Vec::new() }; 2];
    for repetition in 0..=nr_repetitions {
        for turn in 0..2 {
            let index = (repetition + turn) % 2;
            let beginning = begin(memory, kinds[index], nr_pages);
            let cleared = clear(memory, nr_pages, [IsSplit::ByTheClear, IsSplit::Before][index]);
            if repetition > 0 {
                beginnings[index].push(beginning);
                clears[index].push(cleared);
            }
        }
    }
    println!(
        "\n{:<44} {:>10} {:>10} {:>10} {:>15} {:>18}",
        format!("To begin to log {} GiB of 2M ({nr_repetitions} rounds)", nr_pages / GIB),
        "p50, µs",
        "best",
        "worst",
        "tables entered",
        "resident bytes/2M"
    );
    for (kind, beginnings) in kinds.iter().zip(&beginnings) {
        let of = |of: fn(&Beginning) -> f64| -> Vec<f64> { beginnings.iter().map(of).collect() };
        let ns = of(|beginning| beginning.ns);
        println!(
            "{:<44} {:>10.1} {:>10.1} {:>10.1} {:>15.0} {:>18.2}",
            if *kind == ManualProtect::InitiallySet { "all pages dirty at first" } else { "split and protected" },
            median(&ns) / 1e3,
            quantile(&ns, 0) / 1e3,
            quantile(&ns, 1000) / 1e3,
            quantile(&of(|beginning| beginning.nr_entered), 1000),
            quantile(&of(|beginning| beginning.resident_bytes), 1000) / (nr_pages / BLOCK) as f64
        );
    }
    println!(
        "(Resident bytes: 8 are a word for each 2 MiB; a log of all pages has 64. Both columns: the most of all rounds.)"
    );
    println!(
        "\n{:<44} {:>10} {:>10} {:>10} {:>15}",
        "First clear of 1 GiB after that", "p50, µs", "best", "worst", "µs for each 2M"
    );
    for (name, ns) in ["splits 512 leaves of 2M", "split before"].iter().zip(&clears) {
        println!(
            "{name:<44} {:>10.1} {:>10.1} {:>10.1} {:>15.3}",
            median(ns) / 1e3,
            quantile(ns, 0) / 1e3,
            quantile(ns, 1000) / 1e3,
            median(ns) / 1e3 / (CLEARED_PAGES / BLOCK) as f64
        );
    }
}

fn keep_large_allocations_apart() {
    // SAFETY: sets a parameter of the allocator.
    let is_set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) } == 1;
    assert!(is_set, "the allocator refuses a threshold");
}
