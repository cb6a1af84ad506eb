//! Bugs that were found in other page-table libraries, each as a test of this engine.
//!
//! One is missing: the release order with which a filled page-table page is published. It needs a
//! machine with weak memory, or a model checker over raw page tables.
#![allow(unsafe_code, reason = "reads and writes entries as hardware does")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::trap::trap_vm;
use crate::common::{
    GIB, MIB, TestHost, assert_only_upper_tables_are_left, change, each, lazily_splitting, lowest_entry, region,
    translate, vm,
};
use slat::baselines::Locking;
use slat::dirty::DirtyTracking;
use slat::error::FaultError;
use slat::format::{Format, Pte};
use slat::{Access, Exit, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

each!(a_duplicate_fault_keeps_the_frame, duplicate);
fn duplicate<F: Format>(locking: Locking) {
    for size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, GIB, GIB / PAGE_SIZE, size)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.handle_fault(Gpa(0x5000), Access::Write), Ok(Outcome::Resume));
        let first = translate(&vm, Gpa(0x5000));
        let resolves = vm.host().resolves.load(Ordering::SeqCst);
        for access in [Access::Write, Access::Read, Access::Execute] {
            assert_eq!(vcpu.handle_fault(Gpa(0x5000), access), Ok(Outcome::Resume));
            assert_eq!(translate(&vm, Gpa(0x5000)), first);
        }
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst), resolves, "a mapped page was resolved again");
    }
}

each!(protecting_keeps_accessed_and_dirty_at_every_level, keeps_bits);
fn keeps_bits<F: Format>(locking: Locking) {
    for protection in [DirtyTracking::WriteProtectLeaves, DirtyTracking::WriteProtect] {
        for size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
            for bits in [0, F::ACCESSED, F::DIRTY, F::ACCESSED | F::DIRTY] {
                keeps_bits_of::<F>(locking, protection, size, bits);
            }
        }
    }
}

fn keeps_bits_of<F: Format>(locking: Locking, protection: DirtyTracking, size: PageSize, bits: u64) {
    let config = lazily_splitting(locking).with_dirty_tracking(protection);
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    vm.set_user_memory_region(region(0, 0, GIB, GIB / PAGE_SIZE, size)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    let (cell, level) = lowest_entry::<F>(vm.host(), vm.root(), Gfn(0));
    assert_eq!(level, size.level());
    // SAFETY: a live PTE, and no other thread is here.
    let entry = unsafe { AtomicU64::from_ptr(cell) };
    let before = entry.load(Ordering::SeqCst) & !(F::ACCESSED | F::DIRTY) | bits;
    entry.store(before, Ordering::SeqCst);
    vm.set_user_memory_region(change(0, LOG, 0, GIB)).unwrap();
    assert!(!translate(&vm, Gpa(0)).unwrap().writable);
    // With lazy protection, the directory entry above has lost W, where the format has generations.
    let is_above = F::GENERATION != 0 && protection == DirtyTracking::WriteProtect && level == Level::L4K;
    assert_eq!(entry.load(Ordering::SeqCst), if is_above { before } else { before & !F::WRITABLE });
    // A huge leaf is split: the parts have the bits, too.
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    assert!(translate(&vm, Gpa(0)).unwrap().writable);
    let neighbour = translate(&vm, Gpa(PAGE_SIZE)).map(|found| found.pte.0 & (F::ACCESSED | F::DIRTY));
    assert_eq!(neighbour, (level > Level::L4K).then_some(bits));
}

each!(a_change_of_a_page_in_a_block_affects_that_page_only, one_page_of_a_block);
fn one_page_of_a_block<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 0x8000, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for gpa in [0, 2 * MIB] {
        assert_eq!(vcpu.handle_fault(Gpa(gpa), Access::Write), Ok(Outcome::Resume));
    }
    vm.set_user_memory_region(change(0, LOG, 0, 4 * MIB)).unwrap();
    // Two pages of one block are made writable; the harvest of the second finds the first protected
    // already.
    let mut bitmap = [0; 16];
    assert_eq!(vcpu.handle_fault(Gpa(3 * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(1));
    assert_eq!(vcpu.handle_fault(Gpa(4 * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    for page in 0..512 {
        let found = translate(&vm, Gpa(page * PAGE_SIZE)).unwrap();
        assert_eq!((found.pfn.0, found.level, found.writable), (0x8000 + page, Level::L4K, page == 4));
    }
    assert_eq!(translate(&vm, Gpa(2 * MIB)).unwrap().level, Level::L2M, "the block beside it was split, too");
    // Deleting a memslot that shares a block with another keeps the other's pages.
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    vm.set_user_memory_region(region(1, 0, MIB, 0x100, PageSize::Size2M)).unwrap();
    vm.set_user_memory_region(region(2, MIB, MIB, 0x200, PageSize::Size2M)).unwrap();
    for gpa in [0, MIB - PAGE_SIZE, MIB, 2 * MIB - PAGE_SIZE] {
        assert_eq!(vcpu.handle_fault(Gpa(gpa), Access::Write), Ok(Outcome::Resume));
    }
    vm.set_user_memory_region(change(1, NO_FLAGS, 0, 0)).unwrap();
    let left =
        [0, MIB - PAGE_SIZE, MIB, 2 * MIB - PAGE_SIZE].map(|gpa| translate(&vm, Gpa(gpa)).map(|found| found.pfn.0));
    assert_eq!(left, [None, None, Some(0x200), Some(0x2ff)]);
}

each!(an_invalidation_of_a_page_in_a_block_zaps_that_page_only, one_page_invalidated);
fn one_page_invalidated<F: Format>(locking: Locking) {
    for (size, block_pages) in [(PageSize::Size2M, 512), (PageSize::Size1G, 512 * 512)] {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, GIB, GIB / PAGE_SIZE, size)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
        assert_eq!(translate(&vm, Gpa(0)).map(|found| found.level), Some(size.level()));
        let resolves = vm.host().resolves.load(Ordering::SeqCst);
        let invalidated = block_pages / 2 + 3;
        drop(vm.invalidate_range(GfnRange::new(Gfn(invalidated), 1)).unwrap());
        for page in 0..block_pages {
            let found = translate(&vm, Gfn(page).gpa()).map(|found| (found.pfn.0, found.writable));
            let expected = (GIB / PAGE_SIZE + page, true);
            assert_eq!(found, (page != invalidated).then_some(expected), "page {page}");
        }
        assert_eq!(vm.host().resolves.load(Ordering::SeqCst), resolves, "a neighbour was resolved again");
    }
}

each!(an_allocation_that_fails_half_way_leaves_the_tables_as_they_were, half_way);
fn half_way<F: Format>(locking: Locking) {
    for tables in 0..i64::from(F::ROOT_LEVEL.0) - 1 {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, MIB, 0x100, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        vm.host().fail_after(tables);
        assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Err(FaultError::OutOfMemory));
        let (_, level) = lowest_entry::<F>(vm.host(), vm.root(), Gfn(0));
        assert_eq!((translate(&vm, Gpa(0)), level), (None, F::ROOT_LEVEL), "a table was linked");
        drop(vcpu);
        assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1));
    }
}

each!(the_count_of_live_tables_returns_to_1, back_to_one);
fn back_to_one<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let mut vcpu = vm.create_vcpu().unwrap();
    for _ in 0..3 {
        vm.set_user_memory_region(region(0, 0, 1 << 40, 0, PageSize::Size4K)).unwrap();
        for gpa in (0..1u64 << 40).step_by(100 * GIB as usize) {
            assert_eq!(vcpu.handle_fault(Gpa(gpa + 0x3000), Access::Write), Ok(Outcome::Resume));
        }
        assert!(vm.host().live_tables() > 20);
        vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        vm.reclaim();
        assert_only_upper_tables_are_left(&vm);
    }
    // The same by an invalidation, with the memslot in place.
    vm.set_user_memory_region(region(0, 0, 1 << 40, 0, PageSize::Size4K)).unwrap();
    for _ in 0..3 {
        for gpa in (0..1u64 << 40).step_by(100 * GIB as usize) {
            assert_eq!(vcpu.handle_fault(Gpa(gpa + 0x3000), Access::Write), Ok(Outcome::Resume));
        }
        assert!(vm.host().live_tables() > 20);
        drop(vm.invalidate_range(GfnRange::new(Gfn(0), 1 << 28)).unwrap());
        assert_only_upper_tables_are_left(&vm);
    }
}

each!(a_flush_is_of_the_vm_that_changed_and_no_other, flush_of_one_vm);
fn flush_of_one_vm<F: Format>(locking: Locking) {
    let (first, second) = (vm::<F>(locking), vm::<F>(locking));
    for vm in [&first, &second] {
        vm.set_user_memory_region(region(0, 0, MIB, 0x100, PageSize::Size4K)).unwrap();
        assert_eq!(vm.create_vcpu().unwrap().handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    }
    first.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_eq!((first.host().nr_flushes(), second.host().nr_flushes()), (1, 0));
    assert!(first.host().flushes.lock().unwrap()[0].iter().any(|range| range.contains(Gfn(0))));
    assert!(translate(&second, Gpa(0)).is_some());
}

/// Roots of 2048 PTEs in 16 KiB, as four page-table pages of the usual size side by side.
#[test]
fn the_high_part_of_a_wide_root_does_not_alias_the_low_part() {
    slat::for_each_format!(F => {
        if F::root_entries(F::ROOT_LEVEL, F::GPA_BITS) > F::TABLE_ENTRIES {
            wide_root::<F>();
        }
    });
}

fn wide_root<F: Format>() {
    let vm = vm::<F>(Locking::None);
    assert_eq!(vm.root().0 % (16 << 10), 0, "aligned to its size");
    let quarter = 1 << (F::GPA_BITS - 2);
    let mut vcpu = vm.create_vcpu().unwrap();
    for part in 0..4u32 {
        let memory = region(part, u64::from(part) * quarter, GIB, 0x1000 * u64::from(part + 1), PageSize::Size4K);
        vm.set_user_memory_region(memory).unwrap();
    }
    for part in [2, 0, 3, 1] {
        assert_eq!(translate(&vm, Gpa(part * quarter)), None);
        assert_eq!(vcpu.handle_fault(Gpa(part * quarter), Access::Write), Ok(Outcome::Resume));
    }
    vm.set_user_memory_region(change(2, NO_FLAGS, 0, 0)).unwrap();
    let found = [0, 1, 2, 3].map(|part| translate(&vm, Gpa(part * quarter)).map(|found| found.pfn.0));
    assert_eq!(found, [Some(0x1000), Some(0x2000), None, Some(0x4000)]);
    let above = Gpa(4 * quarter);
    assert_eq!(
        vcpu.handle_fault(above, Access::Read),
        Err(FaultError::AddressTooHigh { gpa: above, gpa_bits: F::GPA_BITS })
    );
}

each!(the_slower_of_two_faults_on_one_page_does_not_fail, slower);
fn slower<F: Format>(locking: Locking) {
    let vm = trap_vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, MIB, 0x100, PageSize::Size4K)).unwrap();
    let (mut slow, mut fast) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let keeper = vm.host().traps().in_resolve.set();
    let slow = std::thread::spawn(move || slow.handle_fault(Gpa(0), Access::Write));
    keeper.arrived.recv().unwrap();
    assert_eq!(fast.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    keeper.go.send(()).unwrap();
    assert_eq!(slow.join().unwrap(), Ok(Outcome::Resume));
    let stats = vm.stats();
    assert_eq!((stats.installed_4k, stats.spurious, stats.retries, stats.zapped), (1, 1, 1, 0));
}

each!(an_unlinked_table_is_freed_after_its_flush_and_a_grace_period, detached);
fn detached<F: Format>(locking: Locking) {
    let vm = trap_vm::<F>(locking);
    // Two memslots: the one that is deleted has all of a lowest page-table page; the other keeps
    // those above.
    vm.set_user_memory_region(region(0, 0, 2 * MIB, 0x1000, PageSize::Size4K)).unwrap();
    vm.set_user_memory_region(region(1, 4 * MIB, 2 * MIB, 0x2000, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for gpa in [0, 4 * MIB] {
        assert_eq!(vcpu.handle_fault(Gpa(gpa), Access::Write), Ok(Outcome::Resume));
    }
    let live = vm.host().live_tables();
    // A query of a page is stopped inside its guard; queries take no lock in any configuration.
    let keeper = vm.host().traps().in_guard.set();
    let inside = std::thread::spawn(move || (vcpu.handle_fault(Gpa(0), Access::Read), vcpu));
    keeper.arrived.recv().unwrap();
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    vm.reclaim();
    assert_eq!(vm.host().live_tables(), live, "a page-table page was freed during a guard");
    keeper.go.send(()).unwrap();
    let (result, vcpu) = inside.join().unwrap();
    let mmio = Outcome::Exit(Exit::Mmio { gpa: Gpa(0), access: Access::Read });
    assert_eq!(result, Ok(mmio));
    vm.reclaim();
    assert_eq!(vm.host().live_tables(), live - 1);
    assert_eq!(vm.host().traps().freed_unflushed.load(Ordering::SeqCst), 0);
    drop(vcpu);
}

each!(a_slot_deleted_during_a_resolve_keeps_its_backing_until_its_end, deleted_under_resolve);
fn deleted_under_resolve<F: Format>(locking: Locking) {
    let vm = trap_vm::<F>(locking);
    let memory = region(0, 0, MIB, 0x100, PageSize::Size4K);
    let dropped = Arc::clone(&memory.backing.as_ref().unwrap().dropped);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let keeper = vm.host().traps().in_resolve.set();
    let resolving = std::thread::spawn(move || vcpu.handle_fault(Gpa(0x3000), Access::Write));
    keeper.arrived.recv().unwrap();
    // Neither the deletion, nor a new memslot at the same place, waits for the resolve.
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    vm.reclaim();
    assert!(!dropped.load(Ordering::SeqCst));
    vm.set_user_memory_region(region(0, 0, MIB, 0x900, PageSize::Size4K)).unwrap();
    keeper.go.send(()).unwrap();
    assert_eq!(resolving.join().unwrap(), Ok(Outcome::Resume));
    let (_, level) = lowest_entry::<F>(vm.host(), vm.root(), Gfn(3));
    assert_eq!(level, Level::L4K);
    let (cell, _) = lowest_entry::<F>(vm.host(), vm.root(), Gfn(3));
    // SAFETY: a live PTE.
    let entry = Pte(unsafe { AtomicU64::from_ptr(cell) }.load(Ordering::SeqCst));
    assert_eq!(F::address(entry, level).pfn(), Pfn(0x903), "the frame that was resolved before the deletion");
    vm.reclaim();
    assert!(dropped.load(Ordering::SeqCst));
}

each!(a_deletion_flushes_what_another_call_zapped_and_has_not_flushed, unpaid_flush);
fn unpaid_flush<F: Format>(locking: Locking) {
    let vm = trap_vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, MIB, 0x100, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Read), Ok(Outcome::Resume));
    // An invalidation zaps the leaf and is stopped before its flush: a CPU may still use the
    // translation.
    let keeper = vm.host().traps().in_flush.set();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| drop(vm.invalidate_range(GfnRange::new(Gfn(3), 1)).unwrap()));
        keeper.arrived.recv().unwrap();
        vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        let flushed = vm.host().flushes.lock().unwrap().iter().flatten().any(|range| range.contains(Gfn(3)));
        keeper.go.send(()).unwrap();
        other.join().unwrap();
        assert!(flushed, "the memslot is deleted, and a CPU may still use a translation of it");
    });
}
