//! `slat-axaddrspace`, the adapter with the interface of `axaddrspace` over slat: the same calls as
//! there, on a shared reference.

#![expect(unsafe_code, reason = "implements the unsafe trait PagingHost")]

use std::alloc::Layout;
use std::array;
use std::cell::Cell;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ax_memory_addr::{PhysAddr, VirtAddr};
use axvm_types::GuestPhysAddr;
use slat::error::ConfigError;
use slat::format::Npt;
use slat::host::{AllocationWait, TableNode};
use slat::{Error, GfnRange, Host, Hpa, PageSize};
use slat_axaddrspace::{AddrSpace, AddrSpaceError, MappingFlags, PagingHost};

use super::MAX_THREADS;
use super::measure::Shared;
use super::memory::{Memory, TABLE_BYTES};
use super::operation::{Frames, Leaf, Operation, PART_PAGES, Pages, PeerJob, Table, address};

/// Frames of each CPU's allocator.
const FRAMES_PER_CPU: usize = 1 << 24;

/// What all areas allow.
const ALL_RIGHTS: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE).union(MappingFlags::EXECUTE);

/// Numbers that different CPUs write, on different cache lines.
#[repr(align(128))]
struct OfCpu(AtomicUsize);

/// Page-table pages from the memory of the process, and frames from a counter of each CPU.
struct FrameHost {
    memory: Memory,
    nr_frames: [OfCpu; MAX_THREADS as usize],
}

thread_local! {
    /// The number of this thread in the measurement.
    static CPU: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the page-table pages are those of a `MachineHost`, which live as long as the process. No
// CPU walks the tables, so there is nothing to flush. Frames are numbers, each for one page.
unsafe impl PagingHost for FrameHost {
    #[inline]
    fn alloc_frame(&self) -> Option<PhysAddr> {
        let cpu = self.this_cpu();
        // No read-modify-write: the counter is this thread's.
        let frame = self.nr_frames[cpu].0.load(Ordering::Relaxed);
        self.nr_frames[cpu].0.store(frame + 1, Ordering::Relaxed);
        Some(PhysAddr::from_usize(((cpu + 1) * FRAMES_PER_CPU + frame) * TABLE_BYTES))
    }

    unsafe fn dealloc_frame(&self, _frame: PhysAddr) {}

    fn alloc_table(&self, layout: Layout) -> Option<PhysAddr> {
        let table = self.memory.host().allocate_table(layout, TableNode::Caller, AllocationWait::Allowed)?;
        Some(PhysAddr::from_usize(table.0 as usize))
    }

    unsafe fn dealloc_table(&self, table: PhysAddr, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.memory.host().free_table(Hpa(table.as_usize() as u64), layout) }
    }

    #[inline]
    fn phys_to_virt(&self, paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from_mut_ptr_of(self.memory.pointer(Hpa(paddr.as_usize() as u64)))
    }

    fn flush(&self, _ranges: &[GfnRange]) {}

    fn has_barrier_on_all_cpus(&self) -> bool {
        self.memory.host().has_barrier_on_all_cpus()
    }

    fn barrier_on_all_cpus(&self) {
        self.memory.host().barrier_on_all_cpus();
    }

    fn max_page_size(&self) -> PageSize {
        PageSize::Size2M
    }

    fn nr_cpus(&self) -> usize {
        MAX_THREADS.into()
    }

    #[inline]
    fn this_cpu(&self) -> usize {
        CPU.get()
    }
}

/// An address space, shared by all threads.
pub(crate) struct Adapter {
    space: Arc<AddrSpace<FrameHost, Npt>>,
    job: PeerJob,
    /// The number of the next thread.
    next_cpu: AtomicUsize,
}

fn no_memory(_error: AddrSpaceError) -> Error {
    ConfigError::OutOfMemory.into()
}

#[inline]
fn gpa(page: u64) -> GuestPhysAddr {
    GuestPhysAddr::from(address(page))
}

impl Adapter {
    /// An address space, prepared for the operation.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn new(memory: Memory, job: PeerJob) -> Result<Adapter, Error> {
        let host = FrameHost { memory, nr_frames: array::from_fn(|_| OfCpu(AtomicUsize::new(0))) };
        let space = AddrSpace::new_empty(host, gpa(0), address(job.nr_threads * PART_PAGES)).map_err(no_memory)?;
        for first in (0..job.nr_threads).map(|thread| thread * PART_PAGES) {
            if job.operation == Operation::Fault {
                space.map_alloc(gpa(first), address(job.part_pages()), ALL_RIGHTS, false).map_err(no_memory)?;
            }
        }
        let adapter = Adapter { space: Arc::new(space), job, next_cpu: AtomicUsize::new(0) };
        job.prepare(&mut adapter.handle());
        Ok(adapter)
    }

    /// A thread's access to the address space.
    pub(crate) fn handle(&self) -> AdapterHandle {
        AdapterHandle { space: Arc::clone(&self.space), operation: self.job.operation, seen: HashSet::new() }
    }
}

impl Shared for Adapter {
    type Handle = AdapterHandle;

    #[inline]
    fn each(&self, step: impl Fn(&mut AdapterHandle, u64) -> u64) -> Result<impl FnMut(u64) -> u64, Error> {
        CPU.set(self.next_cpu.fetch_add(1, Ordering::Relaxed));
        let mut handle = self.handle();
        Ok(move |call| step(&mut handle, call))
    }
}

/// One thread's access.
pub(crate) struct AdapterHandle {
    space: Arc<AddrSpace<FrameHost, Npt>>,
    operation: Operation,
    /// Frames that the check has found.
    seen: HashSet<u64>,
}

// The check notices what fails here.
impl Table for AdapterHandle {
    #[inline]
    fn fault(&mut self, page: u64) {
        let _ = self.space.handle_page_fault(gpa(page), MappingFlags::WRITE);
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, frames: Frames) {
        let paddr = PhysAddr::from_usize(address(frames.frame(first)));
        let _ = self.space.map_linear(gpa(first), paddr, address(nr_pages), ALL_RIGHTS);
    }

    #[inline]
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64 {
        let paddr = |page: u64| self.space.translate(gpa(start + (page & mask)));
        pages.iter().map(|page| paddr(page).map_or(0, |paddr| paddr.as_usize() as u64 >> 12)).sum()
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        self.unmap_range(page, 1);
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        let _ = self.space.unmap(gpa(first), address(nr_pages));
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let (paddr, flags, size) = self.space.query(gpa(page)).ok()?;
        let writable = flags.contains(MappingFlags::WRITE);
        Some(Leaf { frame: paddr.as_usize() as u64 >> 12, writable, huge: size != PageSize::Size4K })
    }

    /// Of a fault, any frame of an allocator, but each for one page.
    fn is_right_frame(&mut self, expected: u64, found: u64) -> bool {
        match self.operation {
            Operation::Fault => found >= FRAMES_PER_CPU as u64 && self.seen.insert(found),
            _ => found == expected,
        }
    }
}
