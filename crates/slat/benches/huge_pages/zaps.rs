//! The cost of unmapping leaves of 4 KiB, for a host that is notified of each leaf and for one that
//! needs no report ([`Host::needs_zapped_leaves`](slat::Host::needs_zapped_leaves)).

use std::sync::Arc;

use slat::{Access, Config, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize};

use super::arena::Memory;
use super::bench_host::BenchHost;
use super::cpus::cpu_time;
use super::timing::{median, quantile};
use super::world::{self, BLOCK, Backing, BenchVm, GIB};

/// Memory that is deleted with its memslot, or dropped with its VM.
const NR_GIB: u64 = 64;
/// Pages that are invalidated one by one, and ranges of 2 MiB and 1 GiB.
const NR_SINGLE: u64 = 4096;
const NR_BLOCKS: u64 = 512;
const NR_LARGE: u64 = 4;

/// Whether the host is notified of leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reports {
    Each,
    None,
}

/// CPU time of each operation in nanoseconds.
#[derive(Default)]
struct Sample {
    delete_ns: f64,
    /// The call of [`slat::Vm::reclaim`] after it.
    reclaim_ns: f64,
    drop_ns: f64,
    /// For each range.
    single_ns: f64,
    block_ns: f64,
    large_ns: f64,
}

const NAMES: [&str; 6] = [
    "delete a memslot of 64 GiB, ms",
    "reclaim after it, ms",
    "drop a VM with 64 GiB, ms",
    "invalidate one page, ns",
    "invalidate 2 MiB, ns",
    "invalidate 1 GiB, µs",
];

impl Sample {
    /// In the order and the units of [`NAMES`].
    fn values(&self) -> [f64; 6] {
        let Sample { delete_ns, reclaim_ns, drop_ns, single_ns, block_ns, large_ns } = *self;
        [delete_ns / 1e6, reclaim_ns / 1e6, drop_ns / 1e6, single_ns, block_ns, large_ns / 1e3]
    }
}

/// A VM whose memslot of `nr_pages` is mapped by leaves of 4 KiB.
fn full_vm(memory: Memory, nr_pages: u64, reports: Reports) -> Arc<BenchVm> {
    memory.reset();
    let host = BenchHost::new(memory);
    let host = if reports == Reports::None { host.without_reports() } else { host };
    let vm = world::new_vm(host, Config::default(), nr_pages, Backing::Whole(PageSize::Size4K));
    let mut vcpu = vm.create_vcpu().unwrap();
    let size_bytes = nr_pages * PAGE_SIZE;
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), size_bytes, Access::Write), Ok(size_bytes));
    drop(vcpu);
    assert_eq!(vm.stats().pages_4k(), nr_pages);
    vm
}

/// CPU time of this thread: no call here waits, and the machine may be shared.
fn time_ns(work: impl FnOnce()) -> f64 {
    let start = cpu_time();
    work();
    (cpu_time() - start).as_nanos() as f64
}

/// The mean for each of `nr_ranges` ranges of `nr_pages` pages, each `apart` from the next.
fn invalidate(vm: &BenchVm, nr_ranges: u64, nr_pages: u64, apart: u64) -> f64 {
    let all = time_ns(|| {
        for nth in 0..nr_ranges {
            drop(vm.invalidate_range(GfnRange::new(Gfn(nth * apart), nr_pages)).unwrap());
        }
    });
    all / nr_ranges as f64
}

fn measure(memory: Memory, nr_pages: u64, reports: Reports) -> Sample {
    let mut sample = Sample::default();
    let vm = full_vm(memory, nr_pages, reports);
    sample.delete_ns = time_ns(|| {
        let gone = MemoryRegion {
            slot: 0,
            flags: MemoryRegionFlags::empty(),
            guest_phys_addr: Gpa(0),
            memory_size: 0,
            backing: None,
            userfault_bitmap: None,
        };
        vm.set_user_memory_region(gone).unwrap();
    });
    sample.reclaim_ns = time_ns(|| vm.reclaim());
    assert_eq!(vm.stats().pages_4k(), 0);
    drop(vm);
    let vm = full_vm(memory, nr_pages, reports);
    sample.drop_ns = time_ns(|| drop(vm));
    let vm = full_vm(memory, GIB.min(nr_pages), reports);
    // In 64 page-table pages, all of which keep most of their leaves.
    sample.single_ns = invalidate(&vm, NR_SINGLE, 1, 8);
    drop(vm);
    let vm = full_vm(memory, GIB.min(nr_pages), reports);
    sample.block_ns = invalidate(&vm, NR_BLOCKS, BLOCK, BLOCK);
    drop(vm);
    let vm = full_vm(memory, (NR_LARGE * GIB).min(nr_pages), reports);
    sample.large_ns = invalidate(&vm, NR_LARGE, GIB, GIB);
    drop(vm);
    sample
}

pub(crate) fn table(memory: Memory, nr_repetitions: usize, divisor: u64) {
    let nr_pages = (NR_GIB / divisor).max(NR_LARGE) * GIB;
    let mut samples: [Vec<Sample>; 2] = [const { Vec::new() }; 2];
    for repetition in 0..=nr_repetitions {
        for turn in 0..2 {
            let index = (repetition + turn) % 2;
            let sample = measure(memory, nr_pages, [Reports::Each, Reports::None][index]);
            if repetition > 0 {
                samples[index].push(sample);
            }
        }
    }
    let title = format!("Zaps of 4K leaves, CPU time ({nr_repetitions} rounds)");
    println!("\n{title:<44} {:>12} {:>12} {:>14} {:>12}", "each leaf", "best", "no reports", "best");
    for (nth, name) in NAMES.into_iter().enumerate() {
        let of = |index: usize| -> Vec<f64> { samples[index].iter().map(|sample| sample.values()[nth]).collect() };
        let (each, none) = (of(0), of(1));
        println!(
            "{name:<44} {:>12.3} {:>12.3} {:>14.3} {:>12.3}",
            median(&each),
            quantile(&each, 0),
            median(&none),
            quantile(&none, 0)
        );
    }
}
