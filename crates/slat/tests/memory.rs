//! What the engine's bookkeeping costs: page tables at most 0.21% of the memory that they map by 4 KiB, everything else
//! at most 0.1%.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "a counting allocator, and the host's contract")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::sync::AtomicU32;
use slat::{
    Access, AllocationWait, Config, Ept, Format, Gfn, GfnRange, Gone, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags,
    Npt, Outcome, PAGE_SIZE, PageSize, Park, Pfn, Resolved, Stage2, Sv39x4, TableNode, Vm,
};

static LIVE_BYTES: AtomicU64 = AtomicU64::new(0);

struct Counting;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Tables come from the system's allocator, past the count, and are counted apart.
#[derive(Default)]
struct TableHost {
    tables_bytes: AtomicU64,
}

impl Park for TableHost {
    fn park(&self, _word: &AtomicU32, _expected: u32) {}

    fn unpark_one(&self, _word: *const AtomicU32) -> bool {
        false
    }

    fn unpark_all(&self, _word: *const AtomicU32) {}
}

// SAFETY: tables are the allocator's and nobody else's; no CPU runs on them.
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

    fn resolve(&self, _backing: &(), _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Gone> {
        Ok(Resolved { pfn: Pfn(page), max_size: PageSize::Size4K, writable: true })
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

#[test]
fn tables_and_bookkeeping_are_small() {
    costs::<Npt>(1);
    costs::<Ept>(8);
    costs::<Npt>(64);
    costs::<Stage2>(1);
    costs::<Sv39x4>(1);
}
