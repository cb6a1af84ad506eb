//! Walkers that read page tables past the CPUs' caches: each PTE is in memory when it has to be.
//!
//! With formats that may have such walkers, every other test walks what is in memory, too
//! (`common::tables`). So a PTE that is not cleaned, or too late, is a translation that is missing
//! or stale there.

#![allow(unsafe_code, reason = "reads page tables as hardware does")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use crate::common::{Call, IN_MEMORY, LONGEST_WAIT, MIB, TestHost, change, region, translate};
use slat::format::{Format, Pte, Vtd};
use slat::{Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;

fn new_vm<F: Format>(max_size: PageSize) -> Arc<Vm<TestHost, F>> {
    let vm = Arc::new(Vm::<_, F>::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 8 * MIB, 1 << 18, max_size)).unwrap();
    vm
}

/// Compares all linked page-table pages with what is in memory. Returns the number of PTEs.
fn compare<F: Format>(vm: &Vm<TestHost, F>) -> u64 {
    compare_table::<F>(vm.host(), vm.root(), vm.root_level())
}

fn compare_table<F: Format>(host: &TestHost, table: Hpa, level: Level) -> u64 {
    let mut nr_ptes = 0;
    for index in 0..512 {
        // SAFETY: inside a linked page-table page; no other thread changes the page tables.
        let cell = unsafe { host.table_ptr(table).cast::<u64>().add(index) };
        // SAFETY: as above.
        let cached = unsafe { AtomicU64::from_ptr(cell) }.load(Ordering::SeqCst);
        // SAFETY: behind each page-table page is its memory.
        let in_memory = unsafe { AtomicU64::from_ptr(cell.byte_add(IN_MEMORY)) }.load(Ordering::SeqCst);
        assert_eq!(in_memory, cached, "PTE {index} of level {} in {table}", level.0);
        nr_ptes += 1;
        let pte = Pte(cached);
        if F::is_present(pte) && !F::is_leaf(pte, level) {
            nr_ptes += compare_table::<F>(host, F::address(pte, level), Level(level.0 - 1));
        }
    }
    nr_ptes
}

#[test]
fn each_call_leaves_its_changes_in_memory() {
    for size in [PageSize::Size4K, PageSize::Size2M] {
        let vm = new_vm::<Vtd>(size);
        assert_eq!(compare(&vm), 512, "the root");
        let mut vcpu = vm.create_vcpu().unwrap();
        for access in [Access::Read, Access::Write] {
            assert_eq!(vcpu.handle_fault(Gpa(0x3000), access), Ok(Outcome::Resume));
            assert!(compare(&vm) > 512);
        }
        vcpu.pre_fault_memory(Gpa(2 * MIB), 4 * MIB, Access::Write).unwrap();
        compare(&vm);
        vm.set_user_memory_region(change(0, LOG, 0, 8 * MIB)).unwrap();
        compare(&vm);
        assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Ok(Outcome::Resume));
        compare(&vm);
        vm.get_dirty_log(0, &mut [0; 32]).unwrap();
        compare(&vm);
        vm.set_user_memory_region(change(0, MemoryRegionFlags::empty(), 0, 8 * MIB)).unwrap();
        compare(&vm);
        let whole = GfnRange::new(Gfn(0), 2048);
        vm.split_range(whole, PageSize::Size4K).unwrap();
        compare(&vm);
        assert!(vm.age_range(whole).unwrap() >= 1);
        compare(&vm);
        vm.recover_range(whole).unwrap();
        compare(&vm);
        drop(vm.invalidate_range(GfnRange::new(Gfn(5), 600)).unwrap());
        compare(&vm);
        vm.set_user_memory_region(change(0, MemoryRegionFlags::empty(), 0, 0)).unwrap();
        compare(&vm);
    }
}

/// A walk that begins during the flush finds nothing of what is flushed.
#[test]
fn a_flush_comes_after_the_changes_are_in_memory() {
    let vm = new_vm::<Vtd>(PageSize::Size4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Ok(Outcome::Resume));
    let weak = Arc::downgrade(&vm);
    vm.host().overtake(Call::Flush, 1, move || {
        let vm = weak.upgrade().unwrap();
        assert_eq!(translate(&vm, Gpa(0x3000)), None);
        compare(&vm);
    });
    drop(vm.invalidate_range(GfnRange::new(Gfn(3), 1)).unwrap());
    assert!(vm.host().was_overtaken());
}

/// One thread has linked a page-table page and is preempted before it cleans the PTE. Another one
/// maps a page through that PTE: its device finds the page.
#[test]
fn a_fault_cleans_what_another_thread_has_linked() {
    let mut nr_overtaken = 0;
    for nth in 1.. {
        let vm = new_vm::<Vtd>(PageSize::Size4K);
        let mut vcpu = vm.create_vcpu().unwrap();
        let weak = Arc::downgrade(&vm);
        vm.host().overtake(Call::Clean, nth, move || {
            let vm = weak.upgrade().unwrap();
            let mut other = vm.create_vcpu().unwrap();
            // The page of the first thread, and its neighbour.
            for gpa in [0x3000, 0x4000].map(Gpa) {
                assert_eq!(other.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
                assert!(translate(&vm, gpa).is_some_and(|found| found.writable), "{gpa}, clean {nth}");
            }
        });
        assert_eq!(vcpu.handle_fault(Gpa(0x3000), Access::Write), Ok(Outcome::Resume));
        assert!(translate(&vm, Gpa(0x3000)).is_some());
        if !vm.host().was_overtaken() {
            break;
        }
        nr_overtaken += 1;
    }
    assert!(nr_overtaken >= 4, "three page-table pages and a link: {nr_overtaken}");
}

/// One invalidation has emptied a PTE and is preempted before it cleans it. An older one of the
/// same page finds it empty, and returns: no device finds the page any more.
#[test]
fn an_invalidation_cleans_what_another_thread_has_zapped() {
    let vm = new_vm::<Vtd>(PageSize::Size4K);
    let mut vcpu = vm.create_vcpu().unwrap();
    let page = Gpa(0x3000);
    assert_eq!(vcpu.handle_fault(page, Access::Write), Ok(Outcome::Resume));
    let range = GfnRange::new(page.gfn(), 1);
    let (zapped, has_zapped) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel();
    let (joined, newer) = mpsc::channel();
    let weak = Arc::downgrade(&vm);
    // The older invalidation has its number, and is about to zap the leaf.
    vm.host().overtake(Call::LeafZapped, 1, move || {
        let vm = weak.upgrade().unwrap();
        vm.host().overtake(Call::CleanAbsent, 1, move || {
            zapped.send(()).unwrap();
            may_go_on.recv().unwrap();
        });
        let thread = thread::spawn(move || drop(vm.invalidate_range(range).unwrap()));
        has_zapped.recv_timeout(LONGEST_WAIT).unwrap();
        joined.send(thread).unwrap();
    });
    drop(vm.invalidate_range(range).unwrap());
    assert_eq!(translate(&vm, page), None, "the older invalidation is over");
    go_on.send(()).unwrap();
    newer.recv().unwrap().join().unwrap();
    assert_eq!(translate(&vm, page), None);
    assert_eq!(vcpu.handle_fault(Gpa(page.0 + PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    compare(&vm);
}
