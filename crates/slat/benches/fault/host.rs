//! The engine's host in the fault benches: memory is there already, so that resolving a page is a mere addition.

#![expect(unsafe_code, reason = "implements the host's contract over the arena")]

use std::alloc::Layout;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use slat::{
    Access, Config, Format, Gfn, GfnRange, Gone, Gpa, Host, Hpa, Locking, MemoryRegion, MemoryRegionFlags, Outcome,
    PageSize, Park, Pfn, Resolved, Vcpu, Vm,
};

use super::arena::{FRAME_BYTES, Memory};
use super::futex_park::FutexPark;
use super::membarrier;

/// Frame of the slot's first page.
const FIRST_FRAME: u64 = 1 << 24;

pub(crate) struct BenchHost {
    memory: Memory,
    start: Instant,
}

impl Park for BenchHost {
    fn park(&self, word: &AtomicU32, expected: u32) {
        FutexPark.park(word, expected);
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        FutexPark.unpark_one(word)
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        FutexPark.unpark_all(word);
    }
}

// SAFETY: the arena hands a frame out once and keeps it mapped for ever; no CPU walks the tables, so there is nothing to
// flush; a page's frame is a fixed number.
unsafe impl Host for BenchHost {
    /// Frame of the slot's first page.
    type Backing = u64;

    fn allocate_table(&self, layout: Layout) -> Option<Hpa> {
        assert!(layout.size() <= FRAME_BYTES);
        self.memory.allocate().map(|frame| Hpa(frame as u64))
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        self.memory.free(table.0 as usize);
    }

    #[inline]
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.memory.pointer(table.0 as usize)
    }

    #[inline]
    fn resolve(&self, first_frame: &u64, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Gone> {
        Ok(Resolved { pfn: Pfn(first_frame + page), max_size: PageSize::Size4K, writable: true })
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    fn has_barrier_on_all_cpus(&self) -> bool {
        membarrier::is_available()
    }

    fn barrier_on_all_cpus(&self) {
        membarrier::on_all_cpus();
    }

    fn timestamp_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// A VM with one slot of `nr_pages` from address 0 on, nothing of it mapped.
pub(crate) fn new_vm<F: Format>(memory: Memory, locking: Locking, nr_pages: u64) -> Arc<Vm<BenchHost, F>> {
    let host = BenchHost { memory, start: Instant::now() };
    let vm = Vm::new(host, Config::with_locking(locking)).unwrap();
    set_slot(&vm, nr_pages, MemoryRegionFlags::empty(), Some(FIRST_FRAME));
    Arc::new(vm)
}

/// Turns dirty logging on: all that is mapped is write-protected then.
pub(crate) fn log_dirty_pages<F: Format>(vm: &Vm<BenchHost, F>, nr_pages: u64) {
    set_slot(vm, nr_pages, MemoryRegionFlags::LOG_DIRTY_PAGES, None);
}

fn set_slot<F: Format>(vm: &Vm<BenchHost, F>, nr_pages: u64, flags: MemoryRegionFlags, backing: Option<u64>) {
    let memory_size = nr_pages * FRAME_BYTES as u64;
    let region = MemoryRegion { slot: 0, flags, guest_phys_addr: Gpa(0), memory_size, backing };
    vm.set_user_memory_region(region).unwrap();
}

/// Writes to page number `page`, where the tables do not allow it.
#[inline]
pub(crate) fn write_fault<F: Format>(vcpu: &mut Vcpu<BenchHost, F>, page: u64) {
    let outcome = vcpu.handle_fault(Gfn(page).gpa(), Access::Write);
    assert_eq!(outcome, Ok(Outcome::Resume));
}
