//! Changes of memslots and random faults with few and with many memslots; faults with few and with
//! many ranges in flight elsewhere.

use std::sync::Arc;
use std::time::Instant;

use slat::baselines::Locking;
use slat::tables::Invalidation;
use slat::{MemoryRegion, MemoryRegionFlags, PageSize};

use super::arena::Memory;
use super::host::{self, FirstFrame};
use super::timing::{median, quantile};
use super::world::{self, BenchVm, GIB, VCPU_MEMORY};

/// As many as there can be.
const MAX_SLOTS: u32 = MemoryRegion::<()>::MAX_SLOTS;
/// Pages of all memslots together, about 1 GiB: the last memslot may reach farther.
const NR_PAGES: u64 = MAX_SLOTS as u64 * 8;
/// The memory in which the ranges are in flight, in pages: apart from that of the faults.
const HELD_MEMORY_PAGES: u64 = VCPU_MEMORY;

/// A VM with `nr_slots` memslots of the same size one behind the other.
fn new_vm(memory: Memory, nr_slots: u32) -> Arc<BenchVm> {
    memory.reset();
    let nr_pages = NR_PAGES.div_ceil(u64::from(nr_slots));
    let vm = host::new_vm(memory, Locking::None, nr_pages);
    for slot in 1..nr_slots {
        let first = u64::from(slot) * nr_pages;
        world::set_slot(
            &vm,
            slot,
            first,
            nr_pages,
            MemoryRegionFlags::empty(),
            Some(FirstFrame(first, PageSize::Size4K)),
        );
    }
    vm
}

/// Nanoseconds of a call, of each of `nr_calls`.
fn times(nr_calls: usize, mut call: impl FnMut(usize)) -> Vec<f64> {
    let time = |index| {
        let begin = Instant::now();
        call(index);
        begin.elapsed().as_nanos() as f64
    };
    (0..nr_calls).map(time).collect()
}

/// Nanoseconds of each deletion, creation, beginning and end of logging: of the middle memslot of
/// `nr_slots`, in which nothing is mapped.
fn changes(memory: Memory, nr_slots: u32, nr_rounds: usize) -> [Vec<f64>; 4] {
    let vm = new_vm(memory, nr_slots);
    let nr_pages = NR_PAGES.div_ceil(u64::from(nr_slots));
    let slot = nr_slots / 2;
    let first = u64::from(slot) * nr_pages;
    let (plain, log) = (MemoryRegionFlags::empty(), MemoryRegionFlags::LOG_DIRTY_PAGES);
    let set = |nr_pages, flags, backing| world::set_slot(&vm, slot, first, nr_pages, flags, backing);
    let mut took = [const { Vec::new() }; 4];
    for _ in 0..nr_rounds {
        took[0].extend(times(1, |_| set(0, plain, None)));
        took[1].extend(times(1, |_| set(nr_pages, plain, Some(FirstFrame(first, PageSize::Size4K)))));
        took[2].extend(times(1, |_| set(nr_pages, log, None)));
        took[3].extend(times(1, |_| set(nr_pages, plain, None)));
    }
    took
}

/// Nanoseconds of a fault, in the mean: each page once, in a scattered order.
fn random_faults(memory: Memory, nr_slots: u32, divisor: u64) -> f64 {
    /// Has no divisor in common with the number of pages.
    const STRIDE: u64 = 100_003;
    let vm = new_vm(memory, nr_slots);
    let mut vcpu = vm.create_vcpu().unwrap();
    let nr_faults = NR_PAGES / divisor;
    let begin = Instant::now();
    for index in 0..nr_faults {
        host::write_fault(&mut vcpu, index * STRIDE % NR_PAGES);
    }
    begin.elapsed().as_nanos() as f64 / nr_faults as f64
}

/// How the ranges in flight lie.
#[derive(Clone, Copy)]
enum Spread {
    /// One page behind the other.
    Dense,
    /// One page in a block of 2 MiB each, as far as there are blocks.
    Sparse,
}

/// Nanoseconds of a fault, in the mean, with `nr_ranges` single pages in flight elsewhere.
fn faults_beside(memory: Memory, nr_ranges: u64, spread: Spread, divisor: u64) -> f64 {
    memory.reset();
    let vm = world::new_vm(memory, Locking::None, HELD_MEMORY_PAGES);
    let page_of = |index: u64| match spread {
        Spread::Dense => index,
        Spread::Sparse => index * 512 % HELD_MEMORY_PAGES + index * 512 / HELD_MEMORY_PAGES,
    };
    let _held: Vec<Invalidation<'_>> = (0..nr_ranges).map(|index| world::invalidate(&vm, page_of(index), 1)).collect();
    let mut vcpu = vm.create_vcpu().unwrap();
    let nr_faults = GIB / divisor;
    let begin = Instant::now();
    (VCPU_MEMORY..VCPU_MEMORY + nr_faults).for_each(|page| host::write_fault(&mut vcpu, page));
    begin.elapsed().as_nanos() as f64 / nr_faults as f64
}

fn print_head(what: &str) {
    println!("\n{what:<44} {:>12} {:>12} {:>12}", "p50, ns", "best", "worst");
}

fn print(name: &str, ns: &[f64]) {
    println!("{name:<44} {:>12.1} {:>12.1} {:>12.1}", median(ns), quantile(ns, 0), quantile(ns, 1000));
}

pub(crate) fn table(memory: Memory, nr_rounds: usize, divisor: u64) {
    print_head("A change of a memslot");
    let counts: &[u32] = if divisor == 1 { &[1, 4, 512, MAX_SLOTS] } else { &[1, 512] };
    for &nr_slots in counts {
        let took = changes(memory, nr_slots, nr_rounds * 8);
        for (name, took) in ["deleted", "created", "log on", "log off"].iter().zip(&took) {
            print(&format!("{nr_slots} memslots: {name}"), took);
        }
    }
    print_head("A fault on a random page");
    let mut took = vec![Vec::new(); counts.len()];
    for _ in 0..nr_rounds {
        for (&nr_slots, took) in counts.iter().zip(&mut took) {
            took.push(random_faults(memory, nr_slots, divisor));
        }
    }
    for (nr_slots, took) in counts.iter().zip(&took) {
        print(&format!("{nr_slots} memslots"), took);
    }
}

pub(crate) fn held(memory: Memory, nr_rounds: usize, divisor: u64) {
    print_head("A fault beside single pages in flight");
    let counts = [0, 1, 7, 8, 100, 20_000 / divisor];
    let lines: Vec<(u64, Spread)> =
        counts.iter().flat_map(|&count| [Spread::Dense, Spread::Sparse].map(|spread| (count, spread))).collect();
    let mut took = vec![Vec::new(); lines.len()];
    for _ in 0..nr_rounds {
        for (&(nr_ranges, spread), took) in lines.iter().zip(&mut took) {
            // Many are slow to get into flight, and few faults are enough to see what they cost.
            let few = if nr_ranges > 1000 { 64 } else { 1 };
            took.push(faults_beside(memory, nr_ranges, spread, divisor * few));
        }
    }
    for ((nr_ranges, spread), took) in lines.iter().zip(&took) {
        let how = if matches!(spread, Spread::Dense) { "one behind the other" } else { "scattered" };
        print(&format!("{nr_ranges} pages, {how}"), took);
    }
}
