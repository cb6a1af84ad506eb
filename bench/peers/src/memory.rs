//! The memory of all page-table pages, slat's and the peers': those of one [`MachineHost`], so that
//! no crate has a better allocator than another. It lives as long as the process, because the hooks
//! of one peer have no `self`.
//!
//! [`Memory::for_threads`] touches beforehand what so many threads may need, so that the figures
//! include no page fault of the kernel. Each measurement frees all its page-table pages, which
//! [`Memory::nr_in_use`] verifies; so there is one measurement at a time.

#![expect(unsafe_code, reason = "touches memory by pointers, and frees page-table pages")]

use std::alloc::Layout;
use std::sync::{Arc, OnceLock};

use slat::host::{AllocationWait, TableNode};
use slat::{Host, Hpa};
use slat_machine::hardware::commit::FlushDomain;
use slat_machine::memory::phys;
use slat_machine::vm::host::{HostError, MachineHost};

use super::MAX_THREADS;

/// Bytes in a table.
pub(crate) const TABLE_BYTES: usize = 4096;
const TABLE: Layout = match Layout::from_size_align(TABLE_BYTES, TABLE_BYTES) {
    Ok(layout) => layout,
    Err(_) => panic!("4096 is a power of two"),
};
/// Page-table pages that a thread may need, and some more: 513 for the 512 huge pages that it
/// splits, with the levels above.
const TABLES_PER_THREAD: u64 = 640;

/// A handle, as cheap to copy as what a kernel would use.
#[derive(Clone, Copy)]
pub(crate) struct Memory(&'static MachineHost);

static HOST: OnceLock<MachineHost> = OnceLock::new();

impl Memory {
    /// The memory of the process. Page-table pages for `nr_threads` threads were written to.
    ///
    /// # Errors
    /// There is no address space.
    pub(crate) fn for_threads(nr_threads: u64) -> Result<Memory, HostError> {
        if HOST.get().is_none() {
            let max_tables = TABLES_PER_THREAD * (u64::from(MAX_THREADS) + 1);
            // If another thread was faster, this host is dropped.
            let _ = HOST.set(MachineHost::new(Arc::new(FlushDomain::new()), max_tables)?);
        }
        let memory = Memory(HOST.get().expect("it was set just now"));
        let tables: Vec<Hpa> = std::iter::repeat_with(|| memory.allocate())
            .take((TABLES_PER_THREAD * (nr_threads + 1)) as usize)
            .flatten()
            .collect();
        for &table in &tables {
            // SAFETY: it was allocated just now, is of this size, and no other thread has it.
            unsafe { memory.pointer(table).write_bytes(0xff, TABLE_BYTES) };
            // SAFETY: allocated above; the loop frees each once.
            unsafe { memory.free(table) };
        }
        Ok(memory)
    }

    /// The memory of the process, once [`for_threads`](Memory::for_threads) has made it.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    pub(crate) fn of_process() -> Option<Memory> {
        HOST.get().map(Memory)
    }

    /// The host that allocates.
    #[inline]
    pub(crate) fn host(self) -> &'static MachineHost {
        self.0
    }

    /// Allocates a page-table page, with any contents.
    #[inline]
    pub(crate) fn allocate(self) -> Option<Hpa> {
        self.0.allocate_table(TABLE, TableNode::Caller, AllocationWait::Never)
    }

    /// Frees a page-table page.
    ///
    /// It came from [`allocate`](Memory::allocate), is freed once, and no thread uses it any more.
    #[inline]
    pub(crate) unsafe fn free(self, table: Hpa) {
        // SAFETY: the caller's promise; all have this layout.
        unsafe { self.0.free_table(table, TABLE) };
    }

    #[inline]
    pub(crate) fn pointer(self, table: Hpa) -> *mut u8 {
        phys::ptr_of(table)
    }

    /// Page-table pages in use. Exact while no thread allocates or frees.
    pub(crate) fn nr_in_use(self) -> u64 {
        self.0.live_tables()
    }
}
