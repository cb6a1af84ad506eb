//! Random operations of the engine, on hosts that move pages, beside CPUs that cache all that they
//! may: with the flushes of the manuals each access finds the page where it is, with less it does
//! not.

use std::sync::atomic::{AtomicU64, Ordering};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::MemoryRegionFlags;
use slat::format::{Stage2, Sv39x4, Sv48x4};

use super::tests_strict::{BLOCK, COMBINED, Flush, LEAVES, Local, Machine, NR_BLOCKS, NR_PAGES, SECOND_STAGE};
use super::*;
use crate::hardware::walk::Marks;

/// What a frame has when its page has moved away.
const POISON: u64 = u64::MAX;
/// Pages of each block that are accessed: few, so that most accesses find something cached.
const NR_USED: u64 = 6;

/// The first word of a page's frame, in one half of the memory or the other.
fn word<F: HardwareFormat>(machine: &Machine<F>, page: u64, is_moved: bool) -> &AtomicU64 {
    let place = page + if is_moved { NR_PAGES } else { 0 };
    let at = phys::pointer_to::<u64>(Hpa(machine.first.0 + place * slat::PAGE_SIZE)).unwrap();
    // SAFETY: the memory of the memslot is mapped as long as the VM has it, and all accesses to
    // this word are atomic.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Moves the pages of `range` to the other half, while they are invalidated.
fn move_pages<F: HardwareFormat>(machine: &Machine<F>, range: GfnRange) {
    let _invalid = machine.vm.invalidate_range(range).unwrap();
    let mut is_moved = machine.vm.host().is_moved.lock();
    for page in range.start.0..range.end.0 {
        let here = &mut is_moved[page as usize];
        let value = word(machine, page, *here).swap(POISON, Ordering::SeqCst);
        *here = !*here;
        word(machine, page, *here).store(value, Ordering::SeqCst);
    }
}

/// Whether all accesses of some hundred operations find their pages.
fn all_is_found<F: HardwareFormat>(flush: Flush, local: Local, marks: Marks, seed: u64) -> bool {
    let machine = Machine::<F>::new(Paging::Off, marks);
    *machine.vm.host().max_size.lock() = slat::PageSize::Size2M;
    machine.leave_out(flush, local);
    let mut random = SmallRng::seed_from_u64(seed);
    let mut expected = vec![0; NR_PAGES as usize];
    let mut log = vec![0; (NR_PAGES / 64) as usize];
    let mut flags = MemoryRegionFlags::empty();
    for turn in 1..600 {
        let block = random.random_range(0..NR_BLOCKS) * BLOCK;
        let page = block + random.random_range(0..NR_USED);
        let (cpu, at) = (random.random_range(0..2), page * slat::PAGE_SIZE);
        let whole = GfnRange::new(Gfn(block), BLOCK);
        let one = GfnRange::new(Gfn(page), 1);
        let is_right = match random.random_range(0..24) {
            0 => {
                move_pages(&machine, one);
                true
            }
            1 => {
                move_pages(&machine, GfnRange::new(Gfn(block), NR_USED));
                true
            }
            2 | 3 => {
                move_pages(&machine, whole);
                true
            }
            4 => machine.vm.recover_range(whole).is_ok(),
            5 => machine.vm.split_range(whole, slat::PageSize::Size2M).is_ok(),
            6 => {
                flags.toggle(MemoryRegionFlags::LOG_DIRTY_PAGES);
                machine.set_region(flags, None);
                true
            }
            7 if flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES) => {
                log.fill(0);
                machine.vm.get_dirty_log(0, &mut log).is_ok()
            }
            8 => machine.vm.age_range(whole).is_ok(),
            9 => {
                machine.vm.reclaim();
                true
            }
            10..16 => {
                expected[page as usize] = turn;
                machine.write(cpu, at, turn).is_ok()
            }
            _ => machine.read(cpu, at) == Ok(expected[page as usize]),
        };
        if !is_right {
            return false;
        }
    }
    (0..NR_PAGES).all(|page| {
        let is_moved = machine.vm.host().is_moved.lock()[page as usize];
        word(&machine, page, is_moved).load(Ordering::SeqCst) == expected[page as usize]
    })
}

/// Seeds of a host that leaves nothing out; of another one at most, until it is noticed.
const SEEDS: std::ops::Range<u64> = 0..20;

fn always_found<F: HardwareFormat>() {
    for marks in [Marks::ByHardware, Marks::ByFaults] {
        for seed in SEEDS {
            let is_found = all_is_found::<F>(Flush::AsTheManual, Local::AsTheManual, marks, seed);
            assert!(is_found, "{} {marks:?}, seed {seed}", F::NAME);
        }
    }
}

fn noticed<F: HardwareFormat>(flush: Flush, local: Local) {
    let is_noticed = |seed| !all_is_found::<F>(flush, local, Marks::ByHardware, seed);
    assert!(SEEDS.into_iter().any(is_noticed), "{} {flush:?} {local:?}", F::NAME);
}

#[test]
fn pages_are_found_where_they_are() {
    always_found::<Stage2>();
    always_found::<Sv39x4>();
    always_found::<Sv48x4>();
}

#[test]
fn a_host_that_leaves_a_part_out_is_noticed() {
    for flush in [Flush::Never, Flush::By(SECOND_STAGE), Flush::By(COMBINED)] {
        noticed::<Stage2>(flush, Local::AsTheManual);
    }
    noticed::<Stage2>(Flush::By(&[Scope::Leaves, Scope::Combined]), Local::AsTheManual);
    for local in [&[][..], SECOND_STAGE, COMBINED] {
        noticed::<Stage2>(Flush::AsTheManual, Local::By(local));
    }
    for flush in [Flush::Never, Flush::By(LEAVES)] {
        noticed::<Sv39x4>(flush, Local::AsTheManual);
        noticed::<Sv48x4>(flush, Local::AsTheManual);
    }
    for local in [&[][..], LEAVES] {
        noticed::<Sv39x4>(Flush::AsTheManual, Local::By(local));
    }
}
