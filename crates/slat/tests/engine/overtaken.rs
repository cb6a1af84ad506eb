//! A fault that is overtaken at a critical point, deterministically. Its memslot is replaced
//! between its look and its exchange, or other vCPUs run between the resolve and the install of a
//! write.
#![allow(unsafe_code, reason = "a private host")]

use std::alloc::Layout;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::{GIB, TestHost, change, region, translate};
use slat::format::{Format, Npt};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{
    Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE,
    PageSize, Pfn, Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;

/// A write fault stops before its exchange. Its memslot is deleted, memslot `second` is made over
/// the same frames, and its page is read: the leaf has the same value, but belongs to another
/// memslot.
#[cfg(debug_assertions)]
fn a_slot_is_replaced_under_a_write(second: u32) {
    let vm: Arc<Vm<TestHost, Hooked>> = Arc::new(Vm::new(TestHost::default(), Config::default()).unwrap());
    // Less than a block, so that the page-table page stays.
    let new = |slot| MemoryRegion { flags: LOG, ..region(slot, 0x5000, 0x4000, 0x1000, PageSize::Size4K) };
    vm.set_user_memory_region(new(1)).unwrap();
    let (mut writer, mut reader) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    assert_eq!(writer.handle_fault(Gpa(0x6000), Access::Read), Ok(Outcome::Resume));
    let meanwhile = {
        let vm = Arc::clone(&vm);
        move || {
            let replacing = std::thread::spawn(move || {
                vm.set_user_memory_region(change(1, LOG, 0x5000, 0)).unwrap();
                vm.set_user_memory_region(new(second)).unwrap();
                assert_eq!(reader.handle_fault(Gpa(0x6000), Access::Read), Ok(Outcome::Resume));
            });
            replacing.join().unwrap();
        }
    };
    // The first look is the walk's; the second is the check right before the exchange.
    at_look(Level::L4K, 2, meanwhile);
    assert_eq!(writer.handle_fault(Gpa(0x6000), Access::Write), Ok(Outcome::Resume));
    assert!(was_called(), "the hook was not reached");
    let mapped = translate(&vm, Gpa(0x6000)).unwrap();
    let nr_dirty = vm.get_dirty_log(second, &mut [0]).unwrap();
    assert!(!mapped.writable || nr_dirty == 1, "writable, and not marked: {mapped:x?}");
}

// The hook before the exchange is in the check of transitions, which release builds do not have.
#[cfg(debug_assertions)]
#[test]
fn a_write_marks_the_slot_that_replaced_its_own() {
    a_slot_is_replaced_under_a_write(1);
    a_slot_is_replaced_under_a_write(2);
}

/// A host with page-table pages at host-physical addresses from 0 on. While it resolves a write,
/// another vCPU reads the page.
struct Beside {
    arena: *mut u8,
    free: Mutex<Vec<u64>>,
    reader: Mutex<Option<Vcpu<Beside, Npt>>>,
    nr_write_resolves: AtomicUsize,
}

// SAFETY: the arena is accessed only through page-table pages that were allocated.
unsafe impl Send for Beside {}
// SAFETY: as above.
unsafe impl Sync for Beside {}

const ARENA: Layout = match Layout::from_size_align(64 * PAGE_SIZE as usize, PAGE_SIZE as usize) {
    Ok(layout) => layout,
    Err(_) => panic!("a good layout"),
};

impl Beside {
    fn new() -> Beside {
        // SAFETY: the layout is not empty.
        let arena = unsafe { std::alloc::alloc(ARENA) };
        // The root at page 7, then 0, 1 ...
        let free = (0..64).rev().filter(|page| *page != 7).chain([7]).map(|page| page * PAGE_SIZE).collect();
        Beside { arena, free: Mutex::new(free), reader: Mutex::new(None), nr_write_resolves: AtomicUsize::new(0) }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { std::alloc::dealloc(self.arena, ARENA) }
    }
}

// SAFETY: page-table pages are distinct pages of the arena; no CPU runs on them; frames are
// numbers.
unsafe impl Host for Beside {
    type Backing = ();

    fn allocate_table(&self, _layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        self.free.lock().unwrap().pop().map(Hpa)
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        self.free.lock().unwrap().push(table.0);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.arena.wrapping_add(table.0 as usize)
    }

    fn resolve(&self, _backing: &(), gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        if access == Access::Write {
            let nr_before = self.nr_write_resolves.fetch_add(1, Ordering::SeqCst);
            // Bounded, so that a fault which never ends fails the test.
            if nr_before < 1000
                && let Some(reader) = self.reader.lock().unwrap().as_mut()
            {
                assert_eq!(reader.handle_fault(gfn.gpa(), Access::Read), Ok(Outcome::Resume));
            }
        }
        Ok(Resolved { writable: access == Access::Write, ..Resolved::memory(Pfn(0x1000 + page), PageSize::Size4K) })
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

fn vm_beside() -> Arc<Vm<Beside, Npt>> {
    let vm = Arc::new(Vm::<Beside, Npt>::new(Beside::new(), Config::default()).unwrap());
    vm.set_user_memory_region(MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::empty(),
        guest_phys_addr: Gpa(0),
        memory_size: 1 << 39,
        backing: Some(()),
        userfault_bitmap: None,
    })
    .unwrap();
    vm
}

#[test]
fn a_writer_makes_progress_beside_a_reader_of_the_same_page() {
    let vm = vm_beside();
    *vm.host().reader.lock().unwrap() = Some(vm.create_vcpu().unwrap());
    let mut writer = vm.create_vcpu().unwrap();
    assert_eq!(writer.handle_fault(Gpa(0), Access::Read), Ok(Outcome::Resume));
    assert_eq!(writer.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    let nr_resolves = vm.host().nr_write_resolves.load(Ordering::SeqCst);
    // The vCPU keeps the VM alive, and the VM's host the vCPU.
    drop(vm.host().reader.lock().unwrap().take());
    assert_eq!(nr_resolves, 1, "resolves for one write");
}

#[test]
fn a_table_at_host_physical_address_zero_is_freed_as_any_other() {
    let vm = vm_beside();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), Ok(Outcome::Resume));
    assert_eq!(vcpu.handle_fault(Gpa(GIB), Access::Read), Ok(Outcome::Resume));
    assert!(!vm.host().free.lock().unwrap().contains(&0), "the table at address 0 is in use");
    vm.set_user_memory_region(MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::empty(),
        guest_phys_addr: Gpa(0),
        memory_size: 0,
        backing: None,
        userfault_bitmap: None,
    })
    .unwrap();
    drop(vcpu);
    vm.reclaim();
    assert_eq!(vm.stats().live_tables(), 1);
}

#[test]
fn a_harvest_flushes_nothing_beyond_its_slot() {
    let vm: Arc<Vm<TestHost, Npt>> = Arc::new(Vm::new(TestHost::default(), Config::default()).unwrap());
    let end = 1_u64 << Npt::GPA_BITS;
    vm.set_user_memory_region(MemoryRegion { flags: LOG, ..region(0, end - 0x3000, 0x3000, 0x1000, PageSize::Size4K) })
        .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(end - 1), Access::Write), Ok(Outcome::Resume));
    assert_eq!(vm.get_dirty_log(0, &mut [0]), Ok(1));
    let flushes = vm.host().flushes.lock().unwrap();
    assert!(!flushes.is_empty());
    assert!(flushes.iter().flatten().all(|range| range.end.gpa().0 <= end), "{flushes:x?}");
}

#[test]
fn a_harvest_flushes_all_that_it_has_protected() {
    let vm: Arc<Vm<TestHost, Npt>> = Arc::new(Vm::new(TestHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(MemoryRegion { flags: LOG, ..region(0, 0, GIB, 0x1000, PageSize::Size4K) }).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    // Words apart, and more of them than a TLB batch keeps apart.
    let written: Vec<_> = (0..20).map(|n| Gfn(n * 1000)).collect();
    for gfn in &written {
        assert_eq!(vcpu.handle_fault(gfn.gpa(), Access::Write), Ok(Outcome::Resume));
    }
    vm.host().flushes.lock().unwrap().clear();
    assert_eq!(vm.get_dirty_log(0, &mut [0; 4096]), Ok(20));
    let flushes = vm.host().flushes.lock().unwrap();
    for gfn in written {
        assert!(flushes.iter().flatten().any(|range| range.contains(gfn)), "{gfn:?} in {flushes:x?}");
    }
}
