//! Invalidation, case by case: what it zaps and what stays, what faults find inside and beside its
//! range, and what happens without memory for page-table pages or behind a guard that does not end.
//! `overtaken_invalidate` has the faults that it overtakes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::trap::trap_vm;
use crate::common::{
    Frame, GIB, MIB, TestBacking, TestHost, Writes, assert_no_table_is_left, change, each, region, translate, vm, walk,
};
use slat::baselines::Locking;
use slat::error::{FaultError, RangeError, SlotError};
use slat::format::{Format, Hardware};
use slat::host::Resolved;
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
/// Pages of a block.
const BLOCK_2M: u64 = 512;
const BLOCK_1G: u64 = 512 * 512;

fn pages(start: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), nr_pages)
}

/// Reads page `gfn`, which must succeed or retry. Returns the frame and the level of its leaf.
fn read<F: Format>(vcpu: &mut Vcpu<TestHost, F>, gfn: u64) -> Option<(u64, Level)> {
    assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Read), Ok(Outcome::Resume));
    mapped(vcpu.vm(), gfn)
}

fn mapped<F: Format>(vm: &Vm<TestHost, F>, gfn: u64) -> Option<(u64, Level)> {
    translate(vm, Gfn(gfn).gpa()).map(|found| (found.pfn.0, found.level))
}

each!(invalid_ranges_are_refused_and_change_nothing, bad_ranges);
fn bad_ranges<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, MIB, 0x100, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(read(&mut vcpu, 0), Some((0x100, Level::L4K)));
    let space = 1 << (F::GPA_BITS - 12);
    let range = |start, end| GfnRange { start: Gfn(start), end: Gfn(end) };
    for (start, end) in [(0, 0), (5, 5), (5, 4), (u64::MAX, 0), (space, space), (space + 1, 1)] {
        let error = RangeError::EmptyRange { start: Gfn(start), end: Gfn(end) };
        assert_eq!(vm.invalidate_range(range(start, end)).map(drop), Err(error));
        assert_eq!(vm.age_range(range(start, end)), Err(error));
        assert_eq!(vm.test_age_range(range(start, end)), Err(error));
    }
    for (start, end) in [(0, space + 1), (space, space + 1), (0, u64::MAX), (u64::MAX - 1, u64::MAX)] {
        // The first address beyond the space; the greatest address for frames that have none.
        let gpa = Gpa(start.max(space).saturating_mul(PAGE_SIZE));
        let error = RangeError::AddressTooHigh { gpa, gpa_bits: F::GPA_BITS };
        assert_eq!(vm.invalidate_range(range(start, end)).map(drop), Err(error));
        assert_eq!(vm.age_range(range(start, end)), Err(error));
        assert_eq!(vm.test_age_range(range(start, end)), Err(error));
    }
    assert_eq!((mapped(&vm, 0), vm.host().nr_flushes()), (Some((0x100, Level::L4K)), 0));
    assert_eq!(vm.age_range(range(0, space)), Ok(1));
}

each!(the_whole_space_is_a_range_like_any_other, whole_space);
fn whole_space<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let space = pages(0, 1 << (F::GPA_BITS - 12));
    let last = space.end.0 - 1;
    vm.set_user_memory_region(region(0, 0, GIB, GIB / PAGE_SIZE, PageSize::Size1G)).unwrap();
    vm.set_user_memory_region(region(1, Gfn(last).gpa().0, PAGE_SIZE, 0x77, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for _ in 0..2 {
        assert_eq!(read(&mut vcpu, 5), Some((BLOCK_1G + 5, Level::L1G)));
        assert_eq!(read(&mut vcpu, last), Some((0x77, Level::L4K)));
        let guard = vm.invalidate_range(space).unwrap();
        assert_eq!((read(&mut vcpu, 5), read(&mut vcpu, last), vm.host().live_tables()), (None, None, 1));
        drop(guard);
    }
}

each!(faults_inside_a_range_in_flight_retry_and_those_beside_succeed, inside_and_beside);
fn inside_and_beside<F: Format>(locking: Locking) {
    // Ranges inside a block, over its end, of a whole one, and in a hole between the memslots.
    let ranges =
        [pages(3, 1), pages(BLOCK_2M - 1, 2), pages(BLOCK_2M, BLOCK_2M), pages(BLOCK_1G - 5, 100), pages(0, 1)];
    for range in ranges {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G * PAGE_SIZE / 4096, PageSize::Size1G)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(read(&mut vcpu, 7), Some((BLOCK_1G + 7, Level::L1G)));
        let guard = vm.invalidate_range(range).unwrap();
        let retries = vm.stats().retries;
        for gfn in [range.start.0, range.end.0 - 1] {
            for access in [Access::Read, Access::Write, Access::Execute] {
                assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), access), Ok(Outcome::Resume));
                assert_eq!(mapped(&vm, gfn), None);
            }
        }
        assert_eq!(vm.stats().retries, retries + 6);
        let resolves = vm.host().resolves.load(Ordering::SeqCst);
        for gfn in (0..BLOCK_1G).filter(|gfn| !range.contains(Gfn(*gfn))) {
            assert_eq!(mapped(&vm, gfn).map(|(pfn, _)| pfn), Some(BLOCK_1G + gfn), "a neighbour, page {gfn}, went too");
        }
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst), resolves);
        drop(guard);
        assert_eq!(read(&mut vcpu, range.start.0).map(|(pfn, _)| pfn), Some(BLOCK_1G + range.start.0));
    }
}

each!(a_huge_leaf_does_not_reach_into_a_range_in_flight, no_leaf_over_a_held_range);
fn no_leaf_over_a_held_range<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size1G)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let guard = vm.invalidate_range(pages(3, 1)).unwrap();
    assert_eq!(read(&mut vcpu, 4), Some((BLOCK_1G + 4, Level::L4K)));
    assert_eq!(read(&mut vcpu, BLOCK_2M), Some((BLOCK_1G + BLOCK_2M, Level::L2M)));
    assert_eq!(mapped(&vm, 3), None);
    // Without a range in flight in it, and with no leaf in it, a block is one leaf again.
    drop(guard);
    drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
    assert_eq!(read(&mut vcpu, 4), Some((BLOCK_1G + 4, Level::L1G)));
}

each!(invalidations_may_overlap_and_end_in_any_order, any_order);
fn any_order<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 0x1000, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let first = vm.invalidate_range(pages(0, 100)).unwrap();
    let second = vm.invalidate_range(pages(50, 1000)).unwrap();
    let same = vm.invalidate_range(pages(50, 1000)).unwrap();
    assert_eq!((first.range(), same.range()), (pages(0, 100), pages(50, 1000)));
    assert_eq!((read(&mut vcpu, 10), read(&mut vcpu, 60), read(&mut vcpu, 1000)), (None, None, None));
    drop(first);
    assert_eq!((read(&mut vcpu, 10), read(&mut vcpu, 60)), (Some((0x100a, Level::L4K)), None));
    drop(second);
    assert_eq!(read(&mut vcpu, 60), None);
    drop(same);
    assert_eq!(read(&mut vcpu, 60), Some((0x103c, Level::L4K)));
}

each!(a_thousand_invalidations_are_held_at_once, a_thousand);
fn a_thousand<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 16 * MIB, 0x1000, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for _ in 0..2 {
        let mut held: Vec<_> = (0..1000).map(|n| Some(vm.invalidate_range(pages(2 * n, 1)).unwrap())).collect();
        // They end in another order: 7 and 1000 have no common divisor.
        for n in (0..1000).map(|n| n * 7 % 1000) {
            assert_eq!(read(&mut vcpu, 2 * n), None);
            assert_eq!(read(&mut vcpu, 2 * n + 1), Some((0x1001 + 2 * n, Level::L4K)));
            held[n as usize] = None;
            assert_eq!(read(&mut vcpu, 2 * n), Some((0x1000 + 2 * n, Level::L4K)));
        }
    }
}

each!(slots_change_while_an_invalidation_is_held, slots_change);
fn slots_change<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let mut vcpu = vm.create_vcpu().unwrap();
    let guard = vm.invalidate_range(pages(0, 10)).unwrap();
    vm.set_user_memory_region(region(0, 0, MIB, 0x1000, PageSize::Size4K)).unwrap();
    assert_eq!((read(&mut vcpu, 9), read(&mut vcpu, 10)), (None, Some((0x100a, Level::L4K))));
    vm.set_user_memory_region(change(0, LOG, 0, MIB)).unwrap();
    vm.set_user_memory_region(change(0, LOG, 5 * PAGE_SIZE, MIB)).unwrap();
    assert_eq!((read(&mut vcpu, 9), read(&mut vcpu, 10)), (None, Some((0x1005, Level::L4K))));
    assert_eq!(vm.get_dirty_log(0, &mut [0; 4]), Ok(256));
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    // The engine cannot know the result of the invalidation before its end.
    assert_eq!(read(&mut vcpu, 9), None);
    drop(guard);
    let exit = Exit::Mmio { gpa: Gfn(9).gpa(), access: Access::Read };
    assert_eq!(vcpu.handle_fault(Gfn(9).gpa(), Access::Read), Ok(Outcome::Exit(exit)));
}

each!(an_invalidation_flushes_its_range_even_if_nothing_is_there, flushes);
fn flushes<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for range in [pages(3, 1), pages(500, 600), pages(0, BLOCK_1G), pages(BLOCK_1G, 1)] {
        for touched in [false, true] {
            for gfn in (0..BLOCK_1G).step_by(5 * BLOCK_2M as usize).filter(|_| touched) {
                assert!(read(&mut vcpu, gfn).is_some());
            }
            let before = vm.host().nr_flushes();
            drop(vm.invalidate_range(range).unwrap());
            let flushes = vm.host().flushes.lock().unwrap();
            let covered = |gfn: u64| flushes[before..].iter().flatten().any(|flush| flush.contains(Gfn(gfn)));
            assert!((range.start.0..range.end.0).all(covered), "{range:?} was not flushed");
        }
    }
}

each!(a_neighbour_is_not_disturbed_however_often_a_page_is_invalidated, neighbours);
fn neighbours<F: Format>(locking: Locking) {
    for size in [PageSize::Size4K, PageSize::Size1G] {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, 512 * GIB, 512 * BLOCK_1G, size)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        // So that the page has a PTE of its own, which is empty.
        let held = vm.invalidate_range(pages(0, 1)).unwrap();
        assert_eq!(read(&mut vcpu, 1), Some((512 * BLOCK_1G + 1, Level::L4K)));
        drop(held);
        let stop = AtomicBool::new(false);
        let nr_invalidations = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(vm.invalidate_range(pages(0, 1)).unwrap());
                    nr_invalidations.fetch_add(1, Ordering::Relaxed);
                }
            });
            // In the same 2 MiB, the same 1 GiB, the same PTE of the root.
            for step in [1, BLOCK_2M, BLOCK_1G] {
                for n in 1..512 {
                    assert_eq!(vcpu.handle_fault(Gfn(n * step).gpa(), Access::Write), Ok(Outcome::Resume));
                }
            }
            let enough = nr_invalidations.load(Ordering::Relaxed) + 10;
            while nr_invalidations.load(Ordering::Relaxed) < enough {
                assert_eq!(vcpu.handle_fault(Gfn(1).gpa(), Access::Write), Ok(Outcome::Resume));
            }
            stop.store(true, Ordering::Relaxed);
        });
        for gfn in [1, BLOCK_2M, BLOCK_1G] {
            assert_eq!(mapped(&vm, gfn).map(|(pfn, _)| pfn), Some(512 * BLOCK_1G + gfn));
        }
        let stats = vm.stats();
        assert_eq!((stats.retries, stats.zapped), (0, 0));
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst), 3 * 511);
    }
}

each!(without_memory_for_a_table_the_whole_leaf_is_zapped, without_memory);
fn without_memory<F: Format>(locking: Locking) {
    for (size, block) in [(PageSize::Size2M, BLOCK_2M), (PageSize::Size1G, BLOCK_1G)] {
        for nr_tables in 0..3 {
            let vm = vm::<F>(locking);
            vm.host().record_zapped();
            vm.set_user_memory_region(region(0, 0, 2 * GIB, 2 * BLOCK_1G, size)).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            for gfn in [0, block] {
                assert_eq!(read(&mut vcpu, gfn), Some((2 * BLOCK_1G + gfn, size.level())));
            }
            vm.host().fail_after(nr_tables);
            let guard = vm.invalidate_range(pages(3, 1)).unwrap();
            let needed = if size == PageSize::Size2M { 1 } else { 2 };
            let zapped = vm.host().take_zapped();
            if nr_tables >= needed {
                assert_eq!(zapped.iter().map(|leaf| leaf.range).collect::<Vec<_>>(), [pages(3, 1)]);
                assert_eq!(mapped(&vm, 4), Some((2 * BLOCK_1G + 4, Level::L4K)));
            } else {
                // What could be split was split.
                let gone = if nr_tables == 0 { block } else { BLOCK_2M };
                assert_eq!(zapped.iter().map(|leaf| leaf.range).collect::<Vec<_>>(), [pages(0, gone)]);
                assert_eq!(mapped(&vm, 4), None);
            }
            assert_eq!(mapped(&vm, 3), None);
            assert_eq!(mapped(&vm, block), Some((2 * BLOCK_1G + block, size.level())), "the leaf beside it");
            vm.host().never_fail();
            assert_eq!(read(&mut vcpu, 4).map(|(pfn, _)| pfn), Some(2 * BLOCK_1G + 4));
            assert_eq!(read(&mut vcpu, 3), None);
            drop(guard);
            assert_eq!(read(&mut vcpu, 3).map(|(pfn, _)| pfn), Some(2 * BLOCK_1G + 3));
            // No page-table page is made for an empty PTE that is covered in part.
            vm.host().fail_after(0);
            let guard = vm.invalidate_range(pages(512 * BLOCK_1G + 1, 1)).unwrap();
            drop(guard);
            vm.host().never_fail();
            vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
            drop(vcpu);
            assert_no_table_is_left(&vm);
        }
    }
}

each!(a_host_that_always_wants_a_yield_gets_it_and_the_call_completes, always_yields);
fn always_yields<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.host().always_yields.store(true, Ordering::Relaxed);
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for gfn in 0..20 * BLOCK_2M {
        assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Write), Ok(Outcome::Resume));
    }
    assert_eq!(vm.age_range(pages(0, BLOCK_1G)), Ok(20 * BLOCK_2M));
    assert_eq!(vm.age_range(pages(0, BLOCK_1G)), Ok(0));
    let guard = vm.invalidate_range(pages(1, BLOCK_1G - 2)).unwrap();
    assert_eq!(mapped(&vm, 0), Some((BLOCK_1G, Level::L4K)));
    assert!((1..20 * BLOCK_2M).all(|gfn| mapped(&vm, gfn).is_none()));
    drop(guard);
    drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
    // From the root to the page-table page in which the memslot is one PTE.
    assert_eq!(vm.host().live_tables(), usize::from(F::ROOT_LEVEL.0 - 2));
}

each!(behind_a_guard_that_never_ends_the_deferred_tables_are_bounded, bounded);
fn bounded<F: Format>(locking: Locking) {
    const NR_BLOCKS: u64 = 300;
    // What may wait, what one zap may hold, and what is linked.
    const BOUND: u64 = 1024 + 2 * 512 + NR_BLOCKS + 10;
    let vm = trap_vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size4K)).unwrap();
    let (mut suspended, mut vcpu) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let keeper = vm.host().traps().in_guard.set();
    let inside = std::thread::spawn(move || suspended.handle_fault(Gpa(0), Access::Read));
    keeper.arrived.recv().unwrap();
    for round in 0..20 {
        for block in 0..NR_BLOCKS {
            let gpa = Gfn(block * BLOCK_2M).gpa();
            assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
        }
        // Parts and wholes by turns: page-table pages are linked for parts, too.
        let range = if round % 3 == 0 { pages(1, BLOCK_1G - 2) } else { pages(0, BLOCK_1G) };
        drop(vm.invalidate_range(range).unwrap());
        let live = vm.stats().live_tables();
        assert!(live <= BOUND, "{live} tables in round {round}");
    }
    keeper.go.send(()).unwrap();
    assert_eq!(inside.join().unwrap(), Ok(Outcome::Resume));
    drop(vcpu);
    drop(vm.invalidate_range(pages(0, 1 << (F::GPA_BITS - 12))).unwrap());
    vm.reclaim();
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1));
}

/// Answers with copy on write: the resolve of a write to a read-only frame invalidates the page and
/// moves it to another frame. The memslot is at address 0. Returns the number of copies, as it goes.
fn copies_on_write<F: Format>(vm: &Arc<Vm<TestHost, F>>, backing: Arc<TestBacking>) -> Arc<AtomicU64> {
    let nr_copies = Arc::new(AtomicU64::new(0));
    let (vm_of_host, nr_copies_of_host) = (Arc::downgrade(vm), nr_copies.clone());
    vm.host().answer(move |gfn, access| {
        let is_shared = !backing.frames.read().unwrap().contains_key(&gfn.0);
        if access == Access::Write && is_shared {
            let vm = vm_of_host.upgrade().unwrap();
            let guard = vm.invalidate_range(GfnRange::new(gfn, 1)).unwrap();
            let mut frames = backing.frames.write().unwrap();
            // The second resolve finds the copy.
            frames.entry(gfn.0).or_insert_with(|| {
                let copy = nr_copies_of_host.fetch_add(1, Ordering::SeqCst);
                Frame { pfn: 0x10_0000 + copy, writes: Writes::Allowed }
            });
            drop((frames, guard));
        }
        let (Frame { pfn, writes }, max_size) = backing.frame(gfn.0);
        let writable = writes == Writes::Allowed || access == Access::Write;
        Ok(Resolved { writable, ..Resolved::memory(Pfn(pfn), max_size) })
    });
    nr_copies
}

each!(a_resolve_may_invalidate_its_page_to_copy_it, copy_on_write);
fn copy_on_write<F: Format>(locking: Locking) {
    const NR_PAGES: u64 = 256;
    let host = TestHost::with_answers(Hardware::default());
    let vm = Arc::new(Vm::<TestHost, F>::new(host, Config::default().with_locking(locking)).unwrap());
    let memory = region(0, 0, NR_PAGES * PAGE_SIZE, 0x1000, PageSize::Size4K);
    let backing = memory.backing.clone().unwrap();
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    let nr_copies = copies_on_write(&vm, backing);
    vm.set_user_memory_region(memory).unwrap();
    let pfn = |gfn| {
        let (_, entry, level) = walk::<F>(vm.host(), vm.root(), Gfn(gfn));
        F::is_present(entry).then(|| (F::address(entry, level).pfn(), entry.0 & F::WRITABLE == F::WRITABLE))
    };
    // One vCPU: read, then write; and write at once.
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gfn(0).gpa(), Access::Read), Ok(Outcome::Resume));
    assert_eq!(pfn(0), Some((Pfn(0x1000), false)));
    for gfn in 0..2 {
        assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Write), Ok(Outcome::Resume));
        assert_eq!(pfn(gfn), Some((Pfn(0x10_0000 + gfn), true)));
    }
    // Several at once, over the same pages: each is copied once, and no fault fails.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let mut vcpu = vm.create_vcpu().unwrap();
            scope.spawn(move || {
                for gfn in 2..NR_PAGES {
                    for access in [Access::Read, Access::Write] {
                        assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), access), Ok(Outcome::Resume));
                    }
                }
            });
        }
    });
    assert_eq!(nr_copies.load(Ordering::SeqCst), NR_PAGES);
    for gfn in 0..NR_PAGES {
        assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Write), Ok(Outcome::Resume));
        assert!(pfn(gfn).is_some_and(|(pfn, writable)| pfn >= Pfn(0x10_0000) && writable));
    }
}

each!(a_frame_that_became_read_only_during_a_resolve_is_not_written, read_only_again);
fn read_only_again<F: Format>(locking: Locking) {
    let vm = trap_vm::<F>(locking);
    let memory = region(0, 0, MIB, 0x100, PageSize::Size4K);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    vm.set_user_memory_region(memory).unwrap();
    let (mut writer, mut reader) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let gpa = Gfn(3).gpa();
    assert_eq!(writer.handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
    let entry = || walk::<F>(vm.host(), vm.root(), Gfn(3)).1;
    let before = entry();
    let keeper = vm.host().traps().in_resolve.set();
    let writing = std::thread::spawn(move || writer.handle_fault(gpa, Access::Write));
    keeper.arrived.recv().unwrap();
    // The host has answered that the frame is writable. Now it forbids writes, and the very same
    // leaf is installed again.
    let guard = vm.invalidate_range(pages(3, 1)).unwrap();
    backing.frames.write().unwrap().insert(3, Frame { pfn: 0x103, writes: Writes::Refused });
    drop(guard);
    assert_eq!(reader.handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
    assert_eq!(entry(), before);
    keeper.go.send(()).unwrap();
    assert_eq!(writing.join().unwrap(), Err(FaultError::BackingGone { gpa }));
    assert!(
        !F::is_present(entry()) || entry().0 & F::WRITABLE != F::WRITABLE,
        "writable, and the host has forbidden it"
    );
    assert_eq!(reader.handle_fault(gpa, Access::Read), Ok(Outcome::Resume));
}

each!(no_step_of_an_invalidation_is_longer_than_a_table_even_when_tables_were_left, steps);
fn steps<F: Format>(locking: Locking) {
    const NR_BLOCKS: u64 = 300;
    let vm = trap_vm::<F>(locking);
    vm.host().always_yields.store(true, Ordering::Relaxed);
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size4K)).unwrap();
    let (mut suspended, mut vcpu) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let mut fill = || {
        for block in 0..NR_BLOCKS {
            assert_eq!(vcpu.handle_fault(Gfn(block * BLOCK_2M).gpa(), Access::Write), Ok(Outcome::Resume));
        }
    };
    let guard = vm.host().traps().in_guard.set();
    let inside = std::thread::spawn(move || suspended.handle_fault(Gpa(0), Access::Read));
    guard.arrived.recv().unwrap();
    // Until so many page-table pages wait that those of the last invalidation stay linked.
    for _ in 0..5 {
        fill();
        drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
    }
    fill();
    std::thread::scope(|scope| {
        let mut flush = vm.host().traps().in_flush.set();
        scope.spawn(|| drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap()));
        flush.arrived.recv().unwrap();
        for _ in 0..30 {
            let next = vm.host().traps().in_flush.set();
            flush.go.send(()).unwrap();
            next.arrived.recv().unwrap();
            flush = next;
        }
        // It has emptied 31 * 8 page-table pages. Now the guard ends, and there is room to defer
        // more.
        guard.go.send(()).unwrap();
        vm.reclaim();
        while vm.stats().live_tables() > 2 * NR_BLOCKS {
            std::thread::yield_now();
            vm.reclaim();
        }
        vm.host().traps().forget_steps();
        flush.go.send(()).unwrap();
    });
    assert_eq!(inside.join().unwrap(), Ok(Outcome::Resume));
    let longest = vm.host().traps().longest_step.load(Ordering::SeqCst);
    assert!((1..200).contains(&longest), "{longest} looks at tables in one step");
}

each!(no_table_is_freed_before_a_flush_and_a_zap_holds_few, tables_of_a_zap);
fn tables_of_a_zap<F: Format>(locking: Locking) {
    // Page-table pages without a leaf: only their unlinking needs a flush. There are more than a
    // zap may hold or, if it always yields, more than it unlinks in one turn.
    for (nr_blocks, yields, least) in [(1100, false, 3), (20, true, 2)] {
        let vm = trap_vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, 4 * GIB, 4 * BLOCK_1G, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        for block in 0..nr_blocks {
            let gfn = Gfn(block * BLOCK_2M);
            assert_eq!(vcpu.handle_fault(gfn.gpa(), Access::Read), Ok(Outcome::Resume));
            drop(vm.invalidate_range(pages(gfn.0, 1)).unwrap());
        }
        vm.host().flushes.lock().unwrap().clear();
        vm.host().traps().freed_unflushed.store(0, Ordering::SeqCst);
        vm.host().always_yields.store(yields, Ordering::Relaxed);
        drop(vm.invalidate_range(pages(0, 4 * BLOCK_1G)).unwrap());
        assert_eq!(vm.host().traps().freed_unflushed.load(Ordering::SeqCst), 0, "tables freed before any flush");
        let nr_flushes = vm.host().nr_flushes();
        assert!(nr_flushes >= least, "{nr_flushes} flushes for {nr_blocks} tables");
    }
}

each!(a_slot_is_replaced_only_after_its_leaves_are_zapped, place_of_a_slot);
fn place_of_a_slot<F: Format>(locking: Locking) {
    // Deleted, and moved.
    for change in [change(0, NO_FLAGS, 0, 0), change(0, NO_FLAGS, GIB, MIB)] {
        let vm = trap_vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, MIB, 0x1000, PageSize::Size4K)).unwrap();
        assert_eq!(vm.create_vcpu().unwrap().handle_fault(Gpa(0), Access::Read), Ok(Outcome::Resume));
        let new = || vm.set_user_memory_region(region(1, 0, MIB, 0x9000, PageSize::Size4K));
        std::thread::scope(|scope| {
            let flush = vm.host().traps().in_flush.set();
            let changing = scope.spawn(|| vm.set_user_memory_region(change));
            flush.arrived.recv().unwrap();
            assert_eq!(new(), Err(SlotError::Overlap { slot: 1, gpa: Gpa(0), other: 0 }));
            flush.go.send(()).unwrap();
            assert_eq!(changing.join().unwrap(), Ok(()));
        });
        assert_eq!(new(), Ok(()));
    }
}

each!(vcpus_that_fault_inside_a_range_in_flight_delay_nothing, not_starved);
fn not_starved<F: Format>(locking: Locking) {
    const NR_VCPUS: u64 = 8;
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size4K)).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for index in 0..NR_VCPUS {
            let mut vcpu = vm.create_vcpu().unwrap();
            let is_over = &is_over;
            scope.spawn(move || {
                // All in one page-table page, and each its own pages: every leaf that they install
                // delays the next invalidation.
                for page in (0..BLOCK_2M).filter(|page| page % NR_VCPUS == index).cycle() {
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), Access::Write), Ok(Outcome::Resume));
                }
            });
        }
        for _ in 0..60 {
            let guard = vm.invalidate_range(pages(0, BLOCK_2M)).unwrap();
            assert!((0..BLOCK_2M).all(|gfn| mapped(&vm, gfn).is_none()), "mapped during the invalidation");
            drop(guard);
            std::thread::yield_now();
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
