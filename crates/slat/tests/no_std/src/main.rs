//! The engine in a program without std. The C library's start code calls `main`, which makes a VM,
//! faults pages in, logs writes, harvests, moves and deletes. Its exit status is 0, or the line of
//! the check that failed.
#![no_std]
#![no_main]

extern crate alloc;

use alloc::sync::Arc;
use core::alloc::{GlobalAlloc, Layout};
use core::ffi::{c_int, c_void};
use core::panic::PanicInfo;
use core::sync::atomic::{AtomicI64, Ordering};

use slat::{Access, Config, Exit, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vm};
use slat::format::{Ept, Format, Npt};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};

#[link(name = "c")]
unsafe extern "C" {
    fn aligned_alloc(align: usize, size: usize) -> *mut c_void;
    fn free(pointer: *mut c_void);
    fn _exit(status: c_int) -> !;
}

struct CAllocator;

#[global_allocator]
static ALLOCATOR: CAllocator = CAllocator;

// SAFETY: the C library's allocator; the size is rounded up to a multiple of the alignment, as it
// requires.
unsafe impl GlobalAlloc for CAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let align = layout.align().max(size_of::<usize>());
        // SAFETY: a power of two, and a multiple of it.
        unsafe { aligned_alloc(align, layout.size().next_multiple_of(align)) }.cast()
    }

    unsafe fn dealloc(&self, pointer: *mut u8, _layout: Layout) {
        // SAFETY: it came from `alloc`.
        unsafe { free(pointer.cast()) }
    }
}

#[panic_handler]
fn panic(_info: &PanicInfo<'_>) -> ! {
    // SAFETY: ends the process.
    unsafe { _exit(101) }
}

/// The precompiled libraries name it; it is never called, since panics abort.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// As above.
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    // SAFETY: ends the process.
    unsafe { _exit(102) }
}

/// The difference between a host-physical address and a pointer.
const BIAS: u64 = 1 << 50;

#[derive(Default)]
struct TinyHost {
    live_tables: AtomicI64,
    flushes: AtomicI64,
}

// SAFETY: page-table pages are the C library's memory until they are freed; no CPU caches anything;
// frames are numbers.
unsafe impl Host for TinyHost {
    /// The first frame.
    type Backing = u64;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        // SAFETY: the layout's size is a multiple of its alignment.
        let pointer = unsafe { aligned_alloc(layout.align(), layout.size()) };
        if pointer.is_null() {
            return None;
        }
        self.live_tables.fetch_add(1, Ordering::Relaxed);
        Some(Hpa(pointer as u64 + BIAS))
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        self.live_tables.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: it came from `allocate_table`.
        unsafe { free(self.table_ptr(table).cast()) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        (table.0 - BIAS) as *mut u8
    }

    fn resolve(&self, backing: &u64, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        Ok(Resolved::memory(Pfn(backing + page), PageSize::Size2M))
    }

    fn flush(&self, _ranges: &[GfnRange]) {
        self.flushes.fetch_add(1, Ordering::Relaxed);
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// Returns the line if `condition` does not hold.
macro_rules! check {
    ($condition:expr) => {
        if !$condition {
            return Err(line!() as c_int);
        }
    };
}

const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;

fn region(flags: MemoryRegionFlags, gpa: u64, backing: Option<u64>) -> MemoryRegion<u64> {
    MemoryRegion { slot: 0, flags, guest_phys_addr: Gpa(gpa), memory_size: SIZE, backing, userfault_bitmap: None }
}

fn run<F: Format>() -> Result<(), c_int> {
    let none = MemoryRegionFlags::empty();
    let Ok(vm) = Vm::<TinyHost, F>::new(TinyHost::default(), Config::default()) else {
        return Err(line!() as c_int);
    };
    let vm = Arc::new(vm);
    check!(vm.set_user_memory_region(region(none, 0, Some(1 << 20))).is_ok());
    let Ok(mut vcpu) = vm.create_vcpu() else { return Err(line!() as c_int) };
    for gpa in [0, PAGE_SIZE, 2 * MIB, SIZE - 1] {
        check!(vcpu.handle_fault(Gpa(gpa), Access::Write) == Ok(Outcome::Resume));
    }
    check!(vm.stats().installed_2m == 3);
    let mmio = Outcome::Exit(Exit::Mmio { gpa: Gpa(SIZE), access: Access::Read });
    check!(vcpu.handle_fault(Gpa(SIZE), Access::Read) == Ok(mmio));
    check!(vm.set_user_memory_region(region(LOG, 0, None)).is_ok());
    check!(vcpu.handle_fault(Gpa(5 * PAGE_SIZE), Access::Write) == Ok(Outcome::Resume));
    check!(vcpu.handle_fault(Gpa(4 * MIB), Access::Write) == Ok(Outcome::Resume));
    let mut bitmap = [0; (SIZE / PAGE_SIZE / 64) as usize];
    check!(vm.get_dirty_log(0, &mut bitmap) == Ok(2));
    check!(bitmap[0] == 1 << 5 && bitmap[16] == 1);
    check!(vm.get_dirty_log(0, &mut bitmap) == Ok(0));
    check!(vm.set_user_memory_region(region(LOG, 64 * MIB, None)).is_ok());
    check!(vcpu.handle_fault(Gpa(64 * MIB), Access::Write) == Ok(Outcome::Resume));
    check!(vm.set_user_memory_region(MemoryRegion { memory_size: 0, ..region(none, 0, None) }).is_ok());
    check!(vm.host().flushes.load(Ordering::Relaxed) == 4);
    drop(vcpu);
    vm.reclaim();
    check!(vm.stats().live_tables() == vm.host().live_tables.load(Ordering::Relaxed) as u64);
    check!(vm.stats().live_tables() == 3);
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn main() -> c_int {
    for result in [run::<Npt>(), run::<Ept>()] {
        if let Err(line) = result {
            return line;
        }
    }
    0
}
