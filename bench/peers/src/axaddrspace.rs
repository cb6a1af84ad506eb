//! `axaddrspace`, the one published Rust crate with the path of a second-stage fault, over
//! `page-table-generic`, for which it is made.
//!
//! An area is mapped by `map_linear`, unmapped by `unmap`, and looked up by `translate`. A fault takes
//! a frame from a counter, since its backend allocates them one by one, and maps it;
//! a mapped page is replaced. Its interface allows nothing better: `axvm` (0.8.5), the hypervisor
//! of its authors, unmaps first in any case.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use ax_memory_addr::{PhysAddr, VirtAddr};
use axaddrspace::{AddrSpace, AddrSpaceError, AddrSpaceResult, MappingFlags, NestedPageTableOps, PageSize};
use axvm_types::GuestPhysAddr;
use page_table_generic::{MapConfig, PagingError};
use slat::Hpa;

use super::generic::{self, LongModeTables, READ_ONLY, READ_WRITE, WRITABLE};
use super::memory::{Memory, TABLE_BYTES};
use super::operation::{Frames, Leaf, Operation, PART_PAGES, Pages, PeerJob, Table, address};

/// The first frame for guest pages.
const FIRST_FRAME: usize = 1 << 24;

/// The nested page table.
struct Nested {
    tables: LongModeTables,
    memory: Memory,
    /// Frames of guest pages so far.
    nr_frames: AtomicUsize,
}

fn convert(_error: PagingError) -> AddrSpaceError {
    AddrSpaceError::MappingState
}

fn virtual_address(gpa: GuestPhysAddr) -> VirtAddr {
    VirtAddr::from_usize(gpa.as_usize())
}

fn page_size(size_bytes: usize) -> PageSize {
    match size_bytes {
        TABLE_BYTES => PageSize::Size4K,
        0x20_0000 => PageSize::Size2M,
        _ => PageSize::Size1G,
    }
}

/// An entry's bits. All of the memory may be read and executed.
#[inline]
fn bits(flags: MappingFlags) -> usize {
    if flags.contains(MappingFlags::WRITE) { WRITABLE } else { READ_ONLY }
}

fn flags(bits: usize) -> MappingFlags {
    let mut flags = MappingFlags::READ | MappingFlags::EXECUTE;
    flags.set(MappingFlags::WRITE, bits & READ_WRITE != 0);
    flags
}

impl NestedPageTableOps for Nested {
    fn root_paddr(&self) -> PhysAddr {
        self.tables.root_paddr()
    }

    fn levels(&self) -> usize {
        4
    }

    #[inline]
    fn alloc_frame(&self) -> Option<PhysAddr> {
        // No read-modify-write: a fault has `self` exclusively.
        let index = self.nr_frames.load(Ordering::Relaxed);
        self.nr_frames.store(index + 1, Ordering::Relaxed);
        Some(PhysAddr::from_usize((FIRST_FRAME + index) * TABLE_BYTES))
    }

    fn dealloc_frame(&self, _paddr: PhysAddr) {}

    fn phys_to_virt(&self, paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from_mut_ptr_of(self.memory.pointer(Hpa(paddr.as_usize() as u64)))
    }

    fn map(&mut self, vaddr: GuestPhysAddr, paddr: PhysAddr, size: PageSize, flags: MappingFlags) -> AddrSpaceResult {
        let allow_huge = size.is_huge();
        let (vaddr, pte) = (virtual_address(vaddr), bits(flags));
        let config = MapConfig { vaddr, paddr, size: size.into(), pte, allow_huge, flush: false };
        self.tables.map(&config).map_err(convert)
    }

    fn unmap(&mut self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        let (paddr, bits, size_bytes) = self.tables.unmap_page(virtual_address(vaddr)).map_err(convert)?;
        Ok((paddr, flags(bits), page_size(size_bytes)))
    }

    fn map_linear(
        &mut self,
        vaddr: GuestPhysAddr,
        paddr: PhysAddr,
        size: usize,
        flags: MappingFlags,
        allow_huge: bool,
    ) -> AddrSpaceResult {
        self.tables.map_linear_pages(virtual_address(vaddr), paddr, size, bits(flags), allow_huge).map_err(convert)
    }

    fn unmap_region(&mut self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult {
        self.tables.unmap(virtual_address(start), size).map_err(convert)
    }

    #[inline]
    fn remap(&mut self, start: GuestPhysAddr, paddr: PhysAddr, flags: MappingFlags) -> bool {
        let start = GuestPhysAddr::from(start.as_usize() & !(TABLE_BYTES - 1));
        self.map(start, paddr, PageSize::Size4K, flags).is_ok()
            || self.tables.remap_page(virtual_address(start), paddr, bits(flags)).is_ok()
    }

    fn protect_region(&mut self, start: GuestPhysAddr, size: usize, new_flags: MappingFlags) -> bool {
        self.tables.protect_region(virtual_address(start), size, bits(new_flags)).is_ok()
    }

    fn query(&self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        let (paddr, bits, size_bytes) = self.tables.query(virtual_address(vaddr)).map_err(convert)?;
        Ok((paddr, flags(bits), page_size(size_bytes)))
    }
}

/// A VM's memory as the peer manages it.
pub(crate) struct FaultSpace {
    space: AddrSpace<Nested>,
    /// Frames that the check has found.
    seen: HashSet<u64>,
}

impl FaultSpace {
    /// Memory for the pages of a job: faults find an area for each thread, and all else maps its own.
    /// `None` without memory for tables.
    pub(crate) fn new(memory: Memory, job: PeerJob) -> Option<FaultSpace> {
        let nested = Nested { tables: generic::new_tables(memory)?, memory, nr_frames: AtomicUsize::new(0) };
        let (start, size) = (GuestPhysAddr::from(0), address(job.nr_threads * PART_PAGES));
        let mut space = AddrSpace::new_empty(nested, start, size).ok()?;
        for first in (0..job.nr_threads).map(|thread| thread * PART_PAGES) {
            if job.operation == Operation::Fault {
                space.map_alloc(gpa(first), address(job.part_pages()), ALL_RIGHTS, false).ok()?;
            }
        }
        Some(FaultSpace { space, seen: HashSet::new() })
    }
}

/// What all areas allow.
const ALL_RIGHTS: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE).union(MappingFlags::EXECUTE);

#[inline]
fn gpa(page: u64) -> GuestPhysAddr {
    GuestPhysAddr::from(address(page))
}

// The check notices an error.
impl Table for FaultSpace {
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
        let frame =
            |page: u64| self.space.translate(gpa(start + (page & mask))).map_or(0, |paddr| paddr.as_usize() >> 12);
        pages.iter().map(|page| frame(page) as u64).sum()
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        self.unmap_range(page, 1);
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        let _ = self.space.unmap(gpa(first), address(nr_pages));
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let (frame, flags, size) = self.space.page_table().query(gpa(page)).ok()?;
        let frame = frame.as_usize() as u64 >> 12;
        Some(Leaf { frame, writable: flags.contains(MappingFlags::WRITE), huge: size.is_huge() })
    }

    /// Of a fault, any frame that the counter has allocated, but each for one page.
    fn is_right_frame(&mut self, expected: u64, found: u64) -> bool {
        let nr_frames = self.space.page_table().nr_frames.load(Ordering::Relaxed);
        if nr_frames == 0 {
            return expected == found;
        }
        (FIRST_FRAME..FIRST_FRAME + nr_frames).contains(&(found as usize)) && self.seen.insert(found)
    }
}
