// The host of the examples in the documentation, which include this file. Page-table pages and
// guest memory come from the heap, host-physical addresses are pointers, and no CPU runs.
// `examples/smallest_host.rs` is the host to begin with.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

use slat::*;
use slat::baselines::*;
use slat::format::*;
use slat::host::*;

pub struct Heap;

/// Guest memory that is contiguous, and aligned to 2 MiB.
pub struct Memory {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: only an address.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(size_bytes: u64) -> Memory {
        let layout = Layout::from_size_align(size_bytes as usize, 2 << 20).expect("a small size");
        // SAFETY: each example has a memslot of at least one page.
        Memory { start: unsafe { alloc_zeroed(layout) }, layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) }
    }
}

// SAFETY: the heap hands out each piece of memory once, and no CPU walks these page tables.
unsafe impl Host for Heap {
    type Backing = Memory;

    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        // SAFETY: the layout of a page-table page is never empty.
        let table = unsafe { alloc_zeroed(layout) };
        (!table.is_null()).then(|| Hpa(table.expose_provenance() as u64))
    }
    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: the engine frees what it allocated.
        unsafe { dealloc(self.table_ptr(table), layout) }
    }
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(table.0 as usize)
    }
    fn resolve(&self, memory: &Memory, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        let pfn = Pfn(memory.start.expose_provenance() as u64 / PAGE_SIZE + page);
        Ok(Resolved::memory(pfn, PageSize::Size2M))
    }
    fn resolve_private(&self, memory: &Memory, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        // Stands in for the guest_memfd.
        let resolved = self.resolve(memory, gfn, page, access)?;
        Ok(Resolved { max_size: PageSize::Size4K, ..resolved })
    }
    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        Some(self.table_ptr(frame.hpa()))
    }
    fn flush(&self, _ranges: &[GfnRange]) {}
    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// A VM without memslots.
pub fn vm(config: Config) -> Arc<Vm<Heap, Npt>> {
    Arc::new(Vm::new(Heap, config).expect("memory for a root"))
}

/// Memslot 0, of `size_bytes` at guest-physical address 0, with new memory.
pub fn region(flags: MemoryRegionFlags, size_bytes: u64) -> MemoryRegion<Memory> {
    MemoryRegion {
        slot: 0,
        flags,
        guest_phys_addr: Gpa(0),
        memory_size: size_bytes,
        backing: Some(Memory::new(size_bytes)),
        userfault_bitmap: None,
    }
}

/// The same memslot, with other flags.
pub fn change(flags: MemoryRegionFlags, size_bytes: u64) -> MemoryRegion<Memory> {
    MemoryRegion { slot: 0, flags, guest_phys_addr: Gpa(0), memory_size: size_bytes, backing: None, userfault_bitmap: None }
}

/// A VM with memslot 0 of 1 MiB, with `flags`.
#[allow(dead_code, reason = "not all examples use it")]
pub fn vm_with_memory(config: Config, flags: MemoryRegionFlags) -> Arc<Vm<Heap, Npt>> {
    let vm = vm(config);
    vm.set_user_memory_region(region(flags, 1 << 20)).expect("a slot");
    vm
}
