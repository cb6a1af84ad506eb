//! What the hypervisor provides ([`PagingHost`]), and the engine's host over it.

#![expect(unsafe_code, reason = "passes on the promise of an unsafe trait")]

use alloc::sync::Arc;
use core::alloc::Layout;

use ax_memory_addr::{PhysAddr, VirtAddr};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, PAGE_SIZE, PageSize};

use crate::lazy::LazyMemory;

/// What an address space needs of the hypervisor: frames, page-table pages, a flush.
///
/// `alloc_frame`, `dealloc_frame` and `phys_to_virt` are those of the original's
/// `NestedPageTableOps`. The rest of that trait, which is a page table, is the engine here.
///
/// # Safety
/// - A frame or page-table page has no other user until it is passed back. It is aligned to its
///   size.
/// - `phys_to_virt` returns an address where the memory can be read and written, the same each time.
///   That holds for frames, page-table pages, and all memory that is mapped with
///   [`map_linear`](crate::AddrSpace::map_linear) without `DEVICE`.
/// - `flush` and `flush_local` do what [`slat::Host::flush`] and [`slat::Host::flush_local`] say.
/// - No method unwinds.
pub unsafe trait PagingHost: Send + Sync {
    /// A frame of 4 KiB for the guest, filled with zeroes.
    fn alloc_frame(&self) -> Option<PhysAddr>;

    /// Frees a frame. No CPU uses it any more.
    ///
    /// # Safety
    /// `alloc_frame` returned it, and it was not freed since.
    unsafe fn dealloc_frame(&self, frame: PhysAddr);

    /// Memory for a page-table page, with any contents. The default is for page-table pages of 4
    /// KiB, and takes a frame. RISC-V's roots are larger (16 KiB), and so are Arm's with three
    /// levels and more than 39 address bits.
    fn alloc_table(&self, layout: Layout) -> Option<PhysAddr> {
        (layout.size() as u64 == PAGE_SIZE).then(|| self.alloc_frame()).flatten()
    }

    /// Frees a page-table page. Must not block.
    ///
    /// # Safety
    /// `alloc_table` returned it for this layout, and it was not freed since.
    unsafe fn dealloc_table(&self, table: PhysAddr, _layout: Layout) {
        // SAFETY: as the caller promises, since `alloc_table` takes a frame.
        unsafe { self.dealloc_frame(table) }
    }

    /// Where the memory is that has this physical address.
    fn phys_to_virt(&self, paddr: PhysAddr) -> VirtAddr;

    /// Makes all CPUs of this VM drop the translations of `ranges`: on Intel an interrupt and INVEPT
    /// (INVLPG does nothing for EPT), on Arm a broadcast TLBI with the VM's VMID, on RISC-V SBI's
    /// remote HFENCE.GVMA. The examples `host_ept`, `host_arm` and `host_riscv` of the engine have
    /// each of them.
    fn flush(&self, ranges: &[GfnRange]);

    /// Makes the calling CPU drop the page at `gpa` ([`slat::Host::flush_local`]): for Arm and
    /// RISC-V.
    fn flush_local(&self, _gpa: Gpa) {}

    /// The largest page that the CPUs can map. The default is 2 MiB.
    fn max_page_size(&self) -> PageSize {
        PageSize::Size2M
    }

    /// How many CPUs may handle faults at once without a detour. The default is 1.
    fn nr_cpus(&self) -> usize {
        1
    }

    /// The number of the calling CPU, or of its thread. It may be wrong: then the fault takes the
    /// detour.
    fn this_cpu(&self) -> usize {
        0
    }

    /// Lets other threads run ([`slat::Host::yield_now`]).
    fn yield_now(&self) {
        core::hint::spin_loop();
    }

    /// Whether [`barrier_on_all_cpus`](PagingHost::barrier_on_all_cpus) is implemented. With it,
    /// faults and translations make no full fences.
    fn has_barrier_on_all_cpus(&self) -> bool {
        false
    }

    /// Makes a full barrier on all CPUs, such as an interrupt with a fence in its handler
    /// ([`slat::Host::barrier_on_all_cpus`]).
    fn barrier_on_all_cpus(&self) {}

    /// A clock in nanoseconds, for the engine's statistics. The default stands still.
    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// The engine's host: what a [`PagingHost`] provides.
pub struct EngineHost<P>(pub(crate) Arc<P>);

impl<P> EngineHost<P> {
    /// What the hypervisor provides.
    pub fn paging_host(&self) -> &P {
        &self.0
    }
}

fn paddr(hpa: Hpa) -> PhysAddr {
    PhysAddr::from_usize(hpa.0 as usize)
}

// SAFETY: the caller of `AddrSpace::new_empty` has a `PagingHost`, whose implementation promises all
// that concerns memory and flushes. `LazyMemory` has the argument for `resolve`.
unsafe impl<P: PagingHost> Host for EngineHost<P> {
    /// `None`: the memslot is pinned.
    type Backing = Option<Arc<LazyMemory<P>>>;

    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        self.0.alloc_table(layout).map(|table| Hpa(table.as_usize() as u64))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.0.dealloc_table(paddr(table), layout) }
    }

    #[inline]
    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.0.phys_to_virt(paddr(table)).as_mut_ptr()
    }

    #[inline]
    fn resolve(&self, memory: &Self::Backing, _gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        memory.as_ref().ok_or(Unresolved::Mmio)?.resolve(page, access)
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.0.flush(ranges);
    }

    #[inline]
    fn flush_local(&self, gpa: Gpa) {
        self.0.flush_local(gpa);
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        self.0.has_barrier_on_all_cpus()
    }

    fn barrier_on_all_cpus(&self) {
        self.0.barrier_on_all_cpus();
    }

    fn yield_now(&self) {
        self.0.yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        self.0.timestamp_ns()
    }
}
