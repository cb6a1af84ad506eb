//! Invalidations where nothing is mapped: they make no page-table page, need no memory, and do not
//! delay faults on neighbours.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::common::{Call, GIB, TestHost, assert_no_table_is_left, each, lazily_splitting, region, translate, vm};
use slat::baselines::Locking;
use slat::format::Format;
use slat::host::AllocationWait;
use slat::tables::FaultAround;
use slat::{Access, Config, Gfn, GfnRange, Level, MemoryRegionFlags, Outcome, PageSize, Vcpu, Vm};

/// Pages of a block.
const BLOCK_2M: u64 = 512;
const BLOCK_1G: u64 = 512 * 512;

fn page(gfn: u64) -> GfnRange {
    GfnRange::new(Gfn(gfn), 1)
}

fn level_at<F: Format>(vm: &Vm<TestHost, F>, gfn: u64) -> Option<Level> {
    translate(vm, Gfn(gfn).gpa()).map(|found| found.level)
}

each!(invalidations_of_memory_that_was_never_mapped_make_no_table, never_mapped);
fn never_mapped<F: Format>(locking: Locking) {
    let nr_pages = 1 << (F::GPA_BITS - 12).min(30);
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, nr_pages << 12, nr_pages, PageSize::Size1G)).unwrap();
    // A balloon that a guest drives, page by page, all over the memslot.
    for n in 0..16_384 {
        drop(vm.invalidate_range(page(n * (nr_pages / 16_384))).unwrap());
        drop(vm.invalidate_range(page(nr_pages - 1)).unwrap());
    }
    assert_eq!((vm.host().live_tables(), vm.stats().fault_tables), (1, 0));
    // Leaves that are mapped there later have their full size.
    let mut vcpu = vm.create_vcpu().unwrap();
    for gfn in [0, nr_pages - 1] {
        assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Write), Ok(Outcome::Resume));
        assert_eq!(level_at(&vm, gfn), Some(Level::L1G));
    }
    drop(vcpu);
    vm.set_user_memory_region(crate::common::change(0, MemoryRegionFlags::empty(), 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

/// From now on invalidates page `neighbour` at each `call`, and counts the calls.
fn invalidate_at_each<F: Format>(vm: &Arc<Vm<TestHost, F>>, call: Call, neighbour: u64, nr_calls: &Arc<AtomicU32>) {
    let (again, nr_calls) = (Arc::clone(vm), Arc::clone(nr_calls));
    vm.host().overtake(call, 1, move || {
        drop(again.invalidate_range(page(neighbour)).unwrap());
        // Bounded: a fault that makes no progress must fail the test.
        if nr_calls.fetch_add(1, Ordering::SeqCst) < 100 {
            invalidate_at_each(&again, call, neighbour, &nr_calls);
        }
    });
}

/// The state before a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Nothing,
    /// A huge leaf, which an invalidation of a part has zapped whole, without memory. With break
    /// before make its PTE is unflushed.
    HugeLeaf,
}

/// How often `access` makes `call`, if each call invalidates page `neighbour`, which is not mapped
/// either.
fn nr_calls_beside<F: Format>(
    config: Config,
    size: PageSize,
    before: Before,
    (call, neighbour): (Call, u64),
    access: fn(&mut Vcpu<TestHost, F>),
) -> u32 {
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    vm.set_user_memory_region(region(0, 0, 4 * GIB, 4 * BLOCK_1G, size)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    if before == Before::HugeLeaf {
        assert_eq!(vcpu.handle_fault(Gfn(1).gpa(), Access::Write), Ok(Outcome::Resume));
        vm.host().fail_after(0);
        drop(vm.invalidate_range(page(2)).unwrap());
        vm.host().never_fail();
        assert_eq!(level_at(&vm, 1), None);
    }
    let nr_calls = Arc::default();
    invalidate_at_each(&vm, call, neighbour, &nr_calls);
    access(&mut vcpu);
    // The host keeps the VM alive otherwise.
    assert!(!vm.host().was_overtaken());
    assert!(level_at(&vm, 1).is_some());
    // No fault maps a page without a resolve.
    assert!(call != Call::Resolve || level_at(&vm, neighbour).is_none());
    nr_calls.load(Ordering::SeqCst)
}

each!(a_fault_succeeds_beside_invalidations_of_unmapped_neighbours, gets_through);
fn gets_through<F: Format>(locking: Locking) {
    let write = |vcpu: &mut Vcpu<TestHost, F>| {
        assert_eq!(vcpu.handle_fault(Gfn(1).gpa(), Access::Write), Ok(Outcome::Resume));
    };
    let pre_fault = |vcpu: &mut Vcpu<TestHost, F>| {
        assert_eq!(vcpu.pre_fault_memory(Gfn(1).gpa(), 4096, Access::Write), Ok(4096));
    };
    let (resolve, flush) = (Call::Resolve, Call::Flush);
    for (size, before, call) in [
        (PageSize::Size4K, Before::Nothing, resolve),
        (PageSize::Size2M, Before::Nothing, resolve),
        (PageSize::Size1G, Before::Nothing, resolve),
        (PageSize::Size2M, Before::HugeLeaf, resolve),
        (PageSize::Size1G, Before::HugeLeaf, resolve),
        (PageSize::Size2M, Before::HugeLeaf, flush),
        (PageSize::Size1G, Before::HugeLeaf, flush),
    ] {
        // In the same 2 MiB, 1 GiB, PTE of the root.
        for neighbour in [2, 3 * BLOCK_2M, 3 * BLOCK_1G] {
            for around in [FaultAround::Off, FaultAround::Pages(16)] {
                let config = lazily_splitting(locking).with_fault_around(around);
                for access in [write, pre_fault] {
                    let nr_calls = nr_calls_beside::<F>(config, size, before, (call, neighbour), access);
                    assert!(
                        nr_calls <= 8,
                        "{nr_calls} for {size:?} beside {neighbour:#x}, {before:?}, {around:?}, {call:?}"
                    );
                }
            }
        }
    }
}

each!(a_fault_that_was_overtaken_once_maps_a_leaf_of_full_size, as_large);
fn as_large<F: Format>(locking: Locking) {
    for size in [PageSize::Size2M, PageSize::Size1G] {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, 4 * GIB, 4 * BLOCK_1G, size)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        let other = Arc::clone(&vm);
        vm.host().overtake(Call::Resolve, 1, move || drop(other.invalidate_range(page(2)).unwrap()));
        assert_eq!(vcpu.handle_fault(Gfn(1).gpa(), Access::Write), Ok(Outcome::Resume));
        assert!(vm.host().was_overtaken());
        assert_eq!((level_at(&vm, 1), vm.stats().retries), (Some(size.level()), 1));
    }
}

each!(no_invalidation_waits_for_memory, never_waits);
fn never_waits<F: Format>(locking: Locking) {
    for (refuses, left) in [(false, Some(Level::L4K)), (true, None)] {
        for size in [PageSize::Size2M, PageSize::Size1G] {
            let vm = vm::<F>(locking);
            vm.set_user_memory_region(region(0, 0, 2 * GIB, 2 * BLOCK_1G, size)).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            assert_eq!(vcpu.handle_fault(Gfn(4).gpa(), Access::Write), Ok(Outcome::Resume));
            vm.host().asked.lock().unwrap().clear();
            vm.host().refuses_without_wait.store(refuses, Ordering::SeqCst);
            vm.host().record_zapped();
            drop(vm.invalidate_range(page(3)).unwrap());
            let asked = std::mem::take(&mut *vm.host().asked.lock().unwrap());
            assert!(!asked.is_empty() && asked.iter().all(|&(_, wait)| wait == AllocationWait::Never), "{asked:?}");
            // The whole leaf is zapped where the memory for a page-table page is not at hand.
            assert_eq!((level_at(&vm, 3), level_at(&vm, 4)), (None, left));
            let gone = if refuses { GfnRange::new(Gfn(0), size.level().nr_pages()) } else { page(3) };
            assert_eq!(vm.host().take_zapped().iter().map(|leaf| leaf.range).collect::<Vec<_>>(), [gone]);
            vm.host().refuses_without_wait.store(false, Ordering::SeqCst);
            assert_eq!(vcpu.handle_fault(Gfn(4).gpa(), Access::Write), Ok(Outcome::Resume));
        }
    }
}
