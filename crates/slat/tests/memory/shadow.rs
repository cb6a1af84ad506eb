//! Shadow paging: `Vm::reclaim` frees what the VM keeps for shadow pages to come.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::Npt;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::shadow::{GuestAccess, Gva, PagingRegisters, Privilege, ShadowPaging};
use slat::{Access, Config, Gfn, GfnRange, Host, Hpa, MemoryRegionFlags, Outcome, PageSize, Pfn, Vcpu, Vm};

use super::guest_memory::Memory;
use super::{COUNTS, THREAD_BYTES, slot};

const NR_PROCESSES: u64 = 128;
/// A process has a table of each level, and a page.
const TABLES_OF_A_PROCESS: u64 = 4;
const NR_FRAMES: u64 = NR_PROCESSES * (TABLES_OF_A_PROCESS + 1);

/// Page-table pages come from the system's allocator, past the count.
struct GuestHost(Memory);

// SAFETY: the allocator hands out each page-table page once; no CPU walks them.
unsafe impl Host for GuestHost {
    type Backing = ();

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        // SAFETY: the layout is not of size zero.
        Some(Hpa(unsafe { System.alloc(layout) }.expose_provenance() as u64))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: it came from `allocate_table`.
        unsafe { System.dealloc(self.table_ptr(table), layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(table.0 as usize)
    }

    fn resolve(&self, _: &(), _: Gfn, page: u64, _: Access) -> Result<Resolved, Unresolved> {
        Ok(Resolved::memory(Pfn((self.0.start() >> 12) + page), PageSize::Size4K))
    }

    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        Some(self.table_ptr(frame.hpa()))
    }

    fn flush(&self, _: &[GfnRange]) {}

    fn yield_now(&self) {}

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

fn vm() -> Arc<Vm<GuestHost, Npt>> {
    let host = GuestHost(Memory::new(NR_FRAMES, 4096));
    let vm = Arc::new(Vm::with_shadow_paging(host, Config::default(), ShadowPaging::default()).unwrap());
    vm.set_user_memory_region(slot(0, MemoryRegionFlags::empty(), Some(()), NR_FRAMES * 4096)).unwrap();
    for table in 0..NR_PROCESSES * TABLES_OF_A_PROCESS {
        let is_lowest = table % TABLES_OF_A_PROCESS == TABLES_OF_A_PROCESS - 1;
        let page = NR_PROCESSES * TABLES_OF_A_PROCESS + table / TABLES_OF_A_PROCESS;
        let next = if is_lowest { page } else { table + 1 };
        let pointer = vm.host().table_ptr(Hpa(vm.host().0.start() + table * 4096));
        // SAFETY: the first word of a page of the guest's memory.
        unsafe { &*pointer.cast::<AtomicU64>() }.store(next << 12 | 0x67, Ordering::Relaxed);
    }
    vm
}

/// The guest runs the process `nth`, which reads its page.
fn run(vcpu: &mut Vcpu<GuestHost, Npt>, nth: u64) {
    assert_eq!(vcpu.load_cr3((nth * TABLES_OF_A_PROCESS) << 12), Ok(Outcome::Resume));
    let access = GuestAccess { access: Access::Read, privilege: Privilege::User };
    assert_eq!(vcpu.handle_page_fault(Gva(0), access), Ok(Outcome::Resume));
    vcpu.entry().unwrap();
}

/// The shadow pages of all processes but the first two go, with the memory of their tables.
fn end_processes(vm: &Vm<GuestHost, Npt>) {
    let kept = 2 * TABLES_OF_A_PROCESS;
    let tables = GfnRange::new(Gfn(kept), NR_PROCESSES * TABLES_OF_A_PROCESS - kept);
    drop(vm.invalidate_range(tables).unwrap());
}

#[test]
fn a_reclaim_frees_the_records_of_shadow_pages_that_are_gone() {
    // What other tests count must not contain this.
    let _counts = COUNTS.lock();
    let vm = vm();
    let mut vcpu = vm.create_vcpu().unwrap();
    let registers = PagingRegisters { cr0: 1 << 31 | 1 << 16 | 1, cr3: 0, cr4: 1 << 5, efer: 1 << 11 | 1 << 8 };
    assert_eq!(vcpu.set_paging_registers(registers), Ok(()));
    run(&mut vcpu, 0);
    run(&mut vcpu, 1);
    run(&mut vcpu, 0);
    vm.reclaim();
    // All is allocated and freed by this thread.
    let before = THREAD_BYTES.get();
    let added = || THREAD_BYTES.get() - before;
    let pages_before = vm.stats().shadow_pages;
    // Targets and list links of 512 PTEs.
    let records_bytes = ((NR_PROCESSES - 2) * TABLES_OF_A_PROCESS * 512 * 16) as i64;
    let kept_bytes = records_bytes / 40;
    for round in 0..3 {
        (2..NR_PROCESSES).for_each(|nth| run(&mut vcpu, nth));
        assert!(added() >= records_bytes, "round {round}: {} bytes", added());
        run(&mut vcpu, 0);
        end_processes(&vm);
        assert_eq!(vm.stats().shadow_pages, pages_before);
        // They are kept for pages to come, until the caller wants the memory.
        assert!(added() >= records_bytes, "round {round}: {} bytes", added());
        let guard = vm.read_tables().unwrap();
        vm.reclaim();
        assert!(added() >= records_bytes, "round {round}: {} bytes, while a guard may read more", added());
        drop(guard);
        vm.reclaim();
        assert!(added() <= kept_bytes, "round {round}: {} bytes are left", added());
        // What is in use was not freed.
        run(&mut vcpu, 1);
        run(&mut vcpu, 0);
        assert_eq!(vm.stats().shadow_pages, pages_before);
    }
}
