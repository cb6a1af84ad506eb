//! The cost of the engine's bookkeeping. Page tables take at most 0.21% of the memory that they map
//! by 4 KiB, everything else at most 0.1%. A vCPU takes at most 6 KiB of the heap. Changes of
//! memslots behind a guard that stays open keep a bounded amount of memory. And what is kept of
//! shadow pages is freed when the caller asks for it.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "a counting allocator, and the host's contract")]

#[path = "support/guest_memory.rs"]
mod guest_memory;
#[path = "memory/shadow.rs"]
mod shadow;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use slat::baselines::Locking;
use slat::dirty::ManualProtect;
use slat::error::SlotError;
use slat::format::{Ept, Format, Npt};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{
    Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn,
    Vm,
};

static LIVE_BYTES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Bytes that this thread has allocated, less those that it has freed: the main thread of the
    /// test harness allocates at any time.
    static THREAD_BYTES: Cell<i64> = const { Cell::new(0) };
}

fn count_in_thread(bytes: i64) {
    THREAD_BYTES.set(THREAD_BYTES.get() + bytes);
}

/// One test at a time counts.
static COUNTS: Mutex<()> = Mutex::new(());

struct Counting;

// SAFETY: all calls go to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        count_in_thread(layout.size() as i64);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    // The default would write the zeroes, and so make all of it resident.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        count_in_thread(layout.size() as i64);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        count_in_thread(-(layout.size() as i64));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Page-table pages come from the system's allocator, past the count, and are counted separately.
#[derive(Default)]
struct TableHost {
    tables_bytes: AtomicU64,
}

// SAFETY: the allocator hands out each page-table page once; no CPU walks them.
unsafe impl Host for TableHost {
    type Backing = ();

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        self.tables_bytes.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the layout is not of size zero.
        Some(Hpa(unsafe { System.alloc(layout) } as u64))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        self.tables_bytes.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: it came from `allocate_table`.
        unsafe { System.dealloc(self.table_ptr(table), layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        table.0 as *mut u8
    }

    fn resolve(&self, _backing: &(), _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        Ok(Resolved::memory(Pfn(page), PageSize::Size4K))
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

fn costs<F: Format>(nr_vcpus: u64) {
    const MEMORY_BYTES: u64 = 1 << 30;
    let before = LIVE_BYTES.load(Ordering::Relaxed);
    let vm = Arc::new(Vm::<TableHost, F>::new(TableHost::default(), Config::default()).unwrap());
    vm.set_user_memory_region(MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
        guest_phys_addr: Gpa(1 << 30),
        memory_size: MEMORY_BYTES,
        backing: Some(()),
        userfault_bitmap: None,
    })
    .unwrap();
    let mut vcpus: Vec<_> = (0..nr_vcpus).map(|_| vm.create_vcpu().unwrap()).collect();
    for page in 0..MEMORY_BYTES / PAGE_SIZE {
        let vcpu = &mut vcpus[(page % nr_vcpus) as usize];
        assert_eq!(vcpu.handle_fault(Gpa((1 << 30) + page * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    }
    let tables_bytes = vm.host().tables_bytes.load(Ordering::Relaxed);
    let other_bytes = LIVE_BYTES.load(Ordering::Relaxed) - before;
    let share = |bytes: u64| 100.0 * bytes as f64 / MEMORY_BYTES as f64;
    println!("{nr_vcpus} vCPUs, {}: tables {:.4}%, other {:.4}%", F::NAME, share(tables_bytes), share(other_bytes));
    assert!(share(tables_bytes) <= 0.21, "tables take {:.4}%", share(tables_bytes));
    assert!(share(other_bytes) <= 0.1, "bookkeeping takes {:.4}%", share(other_bytes));
}

/// Bytes of the heap that a vCPU takes, after so many faults that some were timed.
fn vcpu_bytes<F: Format>(locking: Locking) -> u64 {
    let vm = Arc::new(Vm::<TableHost, F>::new(TableHost::default(), Config::default().with_locking(locking)).unwrap());
    vm.set_user_memory_region(MemoryRegion {
        slot: 0,
        flags: MemoryRegionFlags::empty(),
        guest_phys_addr: Gpa(0),
        memory_size: 4 << 20,
        backing: Some(()),
        userfault_bitmap: None,
    })
    .unwrap();
    // The first uses the participant of the call above.
    let first = vm.create_vcpu().unwrap();
    let before = THREAD_BYTES.get();
    let mut vcpu = vm.create_vcpu().unwrap();
    for page in 0..1024 {
        assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    }
    let bytes = u64::try_from(THREAD_BYTES.get() - before).unwrap();
    assert_ne!(vm.stats().fault_ns.count(), 0);
    drop((first, vcpu));
    bytes
}

#[test]
fn tables_and_bookkeeping_are_small() {
    let _counts = COUNTS.lock();
    for locking in [Locking::None, Locking::Shared, Locking::Exclusive] {
        let bytes = vcpu_bytes::<Npt>(locking);
        println!("a vCPU, locking {locking:?}: {bytes} bytes");
        assert!(bytes <= 6 << 10, "a vCPU takes {bytes} bytes with locking {locking:?}");
    }
    slat::for_each_format!(F => {
        costs::<F>(1);
    });
    costs::<Ept>(8);
    costs::<Npt>(64);
}

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;
/// 4 Mi pages: a log of 512 KiB, and a little less for its summary.
const SLOT_BYTES: u64 = 16 * GIB;

fn slot(slot: u32, flags: MemoryRegionFlags, backing: Option<()>, memory_size: u64) -> MemoryRegion<()> {
    let guest_phys_addr = Gpa(u64::from(slot) * SLOT_BYTES);
    MemoryRegion { slot, flags, guest_phys_addr, memory_size, backing, userfault_bitmap: None }
}

fn live_bytes() -> u64 {
    LIVE_BYTES.load(Ordering::Relaxed)
}

#[test]
fn repeated_logging_behind_an_open_guard_takes_no_more_memory() {
    let _counts = COUNTS.lock();
    for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
        let config = Config::default().with_manual_protect(manual_protect);
        let vm = Arc::new(Vm::<TableHost, Npt>::new(TableHost::default(), config).unwrap());
        vm.set_user_memory_region(slot(0, NO_FLAGS, Some(()), SLOT_BYTES)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        let all = SLOT_BYTES / PAGE_SIZE;
        let mut bitmap = vec![0; all as usize / 64];
        let before = live_bytes();
        // The same as a vCPU that was preempted in a guard.
        let reader = vm.read_tables().unwrap();
        for round in 0..5000 {
            vm.set_user_memory_region(slot(0, LOG, None, SLOT_BYTES)).unwrap();
            let page = round % 8 * 801;
            assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
            if round % 500 == 0 {
                // Nothing of the round before is left, and nothing is missing.
                let nr_pages = if manual_protect == ManualProtect::InitiallySet { all } else { 1 };
                assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(nr_pages), "{manual_protect:?}, round {round}");
                assert_eq!(bitmap[page as usize / 64] >> (page % 64) & 1, 1);
                if manual_protect != ManualProtect::Disabled {
                    assert_eq!(vm.clear_dirty_log(0, 0, all, &bitmap), Ok(nr_pages));
                }
            }
            vm.set_user_memory_region(slot(0, NO_FLAGS, None, SLOT_BYTES)).unwrap();
        }
        let held = live_bytes() - before;
        println!("{manual_protect:?}: 5000 rounds hold {held} bytes");
        assert!(held <= 8 * MIB, "{held} bytes are held");
        drop(reader);
        vm.reclaim();
        let held = live_bytes() - before;
        assert!(held <= MIB, "{held} bytes stay");
        drop(vcpu);
    }
}

#[test]
fn slots_that_come_and_go_behind_an_open_guard_hold_bounded_memory() {
    let _counts = COUNTS.lock();
    let vm = Arc::new(Vm::<TableHost, Npt>::new(TableHost::default(), Config::default()).unwrap());
    let flags = LOG | MemoryRegionFlags::GUEST_MEMFD;
    vm.set_user_memory_region(slot(1, LOG, Some(()), GIB)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let before = live_bytes();
    let reader = vm.read_tables().unwrap();
    let refused = (0..2000).find_map(|_| {
        vm.set_user_memory_region(slot(0, flags, Some(()), SLOT_BYTES))
            .and_then(|()| vm.set_user_memory_region(slot(0, NO_FLAGS, None, 0)))
            .err()
    });
    let Some(SlotError::TooMuchRetired { size_bytes }) = refused else { panic!("{refused:?}") };
    let held = live_bytes() - before;
    println!("refused when {held} bytes are held, {size_bytes} of them known");
    assert!(held <= 258 * MIB && size_bytes <= held && held - size_bytes <= 3 * MIB, "{held}, {size_bytes}");
    // Every change is refused, and nothing else.
    let again = Err(SlotError::TooMuchRetired { size_bytes });
    assert_eq!(vm.set_user_memory_region(slot(1, NO_FLAGS, None, GIB)), again);
    assert_eq!(vm.set_user_memory_region(slot(1, NO_FLAGS, None, 0)), again);
    assert_eq!(vm.set_user_memory_region(slot(2, NO_FLAGS, Some(()), GIB)), again);
    assert_eq!(vcpu.handle_fault(Gpa(SLOT_BYTES), Access::Write), Ok(Outcome::Resume));
    assert_eq!(vm.get_dirty_log(1, &mut vec![0; GIB as usize / PAGE_SIZE as usize / 64]), Ok(1));
    assert!(live_bytes() - before <= 258 * MIB);
    drop(reader);
    vm.set_user_memory_region(slot(1, NO_FLAGS, None, GIB)).unwrap();
    let _ = vm.set_user_memory_region(slot(0, NO_FLAGS, None, 0));
    vm.reclaim();
    let held = live_bytes() - before;
    assert!(held <= MIB, "{held} bytes stay");
}

#[test]
fn slots_that_come_and_go_leave_no_memory() {
    let _counts = COUNTS.lock();
    const SLOTS: u32 = 1000;
    let at = |id, place: u32, flags, size, backing| MemoryRegion {
        guest_phys_addr: Gpa(u64::from(place) * 2 * MIB),
        ..slot(id, flags, backing, size)
    };
    let before = THREAD_BYTES.get();
    let vm = Arc::new(Vm::<TableHost, Npt>::new(TableHost::default(), Config::default()).unwrap());
    let mut empty = 0;
    for round in 0..3 {
        for id in 0..SLOTS {
            vm.set_user_memory_region(at(id, id * 7919 % SLOTS, NO_FLAGS, MIB, Some(()))).unwrap();
        }
        for id in 0..SLOTS {
            let place = id * 7919 % SLOTS;
            vm.set_user_memory_region(at(id, place, LOG, MIB, None)).unwrap();
            vm.set_user_memory_region(at(id, SLOTS + place, LOG, MIB, None)).unwrap();
            vm.set_user_memory_region(at(id, SLOTS + place, NO_FLAGS, 2 * MIB, None)).unwrap();
        }
        for id in 0..SLOTS {
            vm.set_user_memory_region(at(id * 31 % SLOTS, 0, NO_FLAGS, 0, None)).unwrap();
        }
        vm.reclaim();
        let held = THREAD_BYTES.get() - before;
        // The first round makes participants, and leaves of numbers.
        if round == 0 {
            empty = held;
        }
        assert_eq!(held, empty);
    }
    drop(vm);
    assert_eq!(THREAD_BYTES.get(), before);
}

/// Resident bytes of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * PAGE_SIZE
}

#[test]
fn a_slot_that_moves_allocates_no_marks() {
    let _counts = COUNTS.lock();
    // 2^30 pages: a log of 128 MiB, and 2 MiB for its summary.
    let size_bytes = 4 << 40;
    let all = size_bytes / PAGE_SIZE;
    for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
        let config = Config::default().with_manual_protect(manual_protect);
        let vm = Arc::new(Vm::<TableHost, Npt>::new(TableHost::default(), config).unwrap());
        let at = |backing, start| MemoryRegion { guest_phys_addr: Gpa(start), ..slot(0, LOG, backing, size_bytes) };
        vm.set_user_memory_region(at(Some(()), 0)).unwrap();
        let before = resident_bytes();
        for start in [size_bytes, 0, 1 << 30] {
            vm.set_user_memory_region(at(None, start)).unwrap();
            assert_eq!(vm.nr_marked_dirty(), Ok(all), "all pages have another address");
        }
        let grown = resident_bytes().saturating_sub(before);
        println!("{manual_protect:?}: three moves make {grown} bytes resident");
        assert!(grown <= 16 * MIB, "{grown} bytes are resident");
        // The log at the new place is harvested, and faults mark it.
        let mut bitmap = [0; 2];
        assert_eq!(vm.get_dirty_log_range(0, 128, 128, &mut bitmap), Ok(128));
        if manual_protect != ManualProtect::Disabled {
            assert_eq!(vm.clear_dirty_log(0, 128, 128, &bitmap), Ok(128));
        }
        assert_eq!(vm.get_dirty_log_range(0, 128, 128, &mut bitmap), Ok(0));
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.handle_fault(Gpa((1 << 30) + 130 * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
        assert_eq!((vm.get_dirty_log_range(0, 128, 128, &mut bitmap), bitmap), (Ok(1), [1 << 2, 0]));
    }
}

/// The log of 4 TiB is 128 MiB. A call that passes its few dirty pages on takes 6 KiB at most, which
/// the next call finds, and no vCPU keeps.
#[test]
fn dirty_pages_of_a_large_memslot_need_no_bitmap() {
    const LARGE_BYTES: u64 = 4 << 40;
    let _counts = COUNTS.lock();
    for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled] {
        let config = Config::default().with_manual_protect(manual_protect);
        let vm = Arc::new(Vm::<TableHost, Ept>::new(TableHost::default(), config).unwrap());
        vm.set_user_memory_region(slot(0, LOG, Some(()), LARGE_BYTES)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        let all = LARGE_BYTES / PAGE_SIZE;
        let dirty: Vec<u64> = (0..700).map(|nth| nth * (all / 700) + nth % 3).chain([all - 1]).collect();
        for page in &dirty {
            assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
        }
        let mut found = Vec::with_capacity(dirty.len());
        // The participant that the calls will use.
        assert_eq!(vm.nr_marked_dirty(), Ok(dirty.len() as u64));
        let before = THREAD_BYTES.get();
        let mut kept = 0;
        for nth_call in 0..3 {
            for page in &dirty {
                vm.mark_dirty(0, *page, 1).unwrap();
            }
            found.clear();
            let mut most = 0;
            let passed = vm.for_each_dirty(0, 0, all, |run| {
                most = most.max(THREAD_BYTES.get() - before);
                found.extend(run);
                ControlFlow::Continue(())
            });
            assert_eq!((passed, &found), (Ok(dirty.len() as u64), &dirty));
            kept = THREAD_BYTES.get() - before;
            println!("{manual_protect:?}, call {nth_call}: {most} bytes, {kept} kept");
            assert!((1..=6 << 10).contains(&most) && kept == most, "the call takes {most} bytes and keeps {kept}");
        }
        // The vCPU has the participant.
        let other = vm.create_vcpu().unwrap();
        drop(other);
        let bytes = THREAD_BYTES.get() - before;
        assert!(bytes < kept, "{bytes} bytes are kept for a vCPU");
    }
}
