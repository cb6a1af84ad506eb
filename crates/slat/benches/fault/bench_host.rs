//! The host of the benches, a minimal one, so that the measured time is the engine's.

#![expect(unsafe_code, reason = "implements the host's contract over the arena")]

use std::alloc::Layout;
use std::marker::PhantomData;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use slat::baselines::Park;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Gfn, GfnRange, Host, Hpa};

use super::arena::{FRAME_BYTES, Memory};
use super::futex_park::FutexPark;
use super::membarrier;

/// The backing of a bench's memslot.
pub(crate) trait Answer: Send + Sync {
    /// The frame of guest frame `gfn`, which is page number `page` of the memslot.
    fn resolved(&self, gfn: Gfn, page: u64) -> Resolved;
}

/// Page-table pages come from the arena, frames from `B`, and there are no CPUs.
pub(crate) struct BenchHost<B> {
    memory: Memory,
    start: Instant,
    needs_zapped_leaves: bool,
    backing: PhantomData<fn() -> B>,
}

impl<B> BenchHost<B> {
    pub(crate) fn new(memory: Memory) -> BenchHost<B> {
        BenchHost { memory, start: Instant::now(), needs_zapped_leaves: true, backing: PhantomData }
    }

    /// This host, which needs no report of the leaves that go.
    #[allow(dead_code, reason = "one bench compares the two")]
    pub(crate) fn without_reports(self) -> BenchHost<B> {
        BenchHost { needs_zapped_leaves: false, ..self }
    }

    /// PTE number `index` of a page-table page, as a CPU reaches it.
    #[allow(dead_code, reason = "not every bench sets bits as a CPU does")]
    pub(crate) fn entry(&self, table: Hpa, index: usize) -> &AtomicU64 {
        assert!(index < FRAME_BYTES / size_of::<AtomicU64>());
        // SAFETY: inside the frame, which stays mapped as long as the arena; all accesses of
        // page-table pages are atomic.
        unsafe { &*self.memory.pointer(table.0 as usize).cast::<AtomicU64>().add(index) }
    }
}

// SAFETY: the arena hands a frame out once and keeps it mapped. No CPU walks the page tables, so
// there is nothing to flush. The frame of a page is a fixed number.
unsafe impl<B: Answer> Host for BenchHost<B> {
    type Backing = B;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
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
    fn resolve(&self, backing: &B, gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        Ok(backing.resolved(gfn, page))
    }

    /// All memory is resident.
    #[inline]
    fn resolve_resident(&self, backing: &B, gfn: Gfn, page: u64, _access: Access) -> Option<Resolved> {
        Some(backing.resolved(gfn, page))
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    #[inline]
    fn needs_zapped_leaves(&self) -> bool {
        self.needs_zapped_leaves
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        membarrier::is_available()
    }

    fn barrier_on_all_cpus(&self) {
        membarrier::on_all_cpus();
    }

    fn timestamp_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn parking(&self) -> Option<&dyn Park> {
        Some(&FutexPark)
    }
}
