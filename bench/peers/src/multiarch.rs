//! `page_table_multiarch`: its x86-64 page tables, by a cursor for each call. It cannot split.

#![expect(unsafe_code, reason = "frees page-table pages")]

use memory_addr::{PhysAddr, VirtAddr};
use page_table_multiarch::x86_64::X64PageTable;
use page_table_multiarch::{MappingFlags, PageSize, PagingHandler};
use slat::Hpa;
use slat_machine::memory::phys;

use super::memory::Memory;
use super::operation::{Frames, Leaf, Pages, Table, address};

/// Its hooks have no `self`.
struct Tables;

impl PagingHandler for Tables {
    fn alloc_frames(nr_frames: usize, _align: usize) -> Option<PhysAddr> {
        // These page tables allocate one at a time.
        let memory = Memory::of_process().filter(|_| nr_frames == 1)?;
        memory.allocate().map(|table| PhysAddr::from_usize(table.0 as usize))
    }

    fn dealloc_frames(frame: PhysAddr, _nr_frames: usize) {
        if let Some(memory) = Memory::of_process() {
            // SAFETY: a page table frees what it allocated above, once, when nothing points to it
            // any more.
            unsafe { memory.free(Hpa(frame.as_usize() as u64)) };
        }
    }

    #[inline]
    fn phys_to_virt(frame: PhysAddr) -> VirtAddr {
        VirtAddr::from_ptr_of(phys::ptr_of(Hpa(frame.as_usize() as u64)))
    }
}

pub(crate) struct Multiarch(X64PageTable<Tables>);

const READ_ONLY: MappingFlags = MappingFlags::READ.union(MappingFlags::EXECUTE).union(MappingFlags::USER);
const WRITABLE: MappingFlags = READ_ONLY.union(MappingFlags::WRITE);

#[inline]
fn virtual_address(page: u64) -> VirtAddr {
    VirtAddr::from_usize(address(page))
}

#[inline]
fn frame_address(frames: Frames, page: u64) -> PhysAddr {
    PhysAddr::from_usize(address(frames.frame(page)))
}

impl Multiarch {
    pub(crate) fn new() -> Option<Multiarch> {
        X64PageTable::try_new().ok().map(Multiarch)
    }
}

// The check notices what fails here.
impl Table for Multiarch {
    #[inline]
    fn map(&mut self, pages: Pages) {
        let mut cursor = self.0.cursor();
        for page in pages.iter() {
            // An error means that the page is mapped already, or the check notices.
            let _ = cursor.map(virtual_address(page), frame_address(Frames::Shifted, page), PageSize::Size4K, WRITABLE);
        }
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, frames: Frames) {
        let frame = |address: VirtAddr| frame_address(frames, (address.as_usize() >> 12) as u64);
        let (size, allow_huge) = (address(nr_pages), frames == Frames::Aligned);
        let _ = self.0.cursor().map_region(virtual_address(first), frame, size, WRITABLE, allow_huge);
    }

    #[inline]
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64 {
        let frame = |page: u64| {
            let found = self.0.query(virtual_address(start + (page & mask)));
            found.map_or(0, |(frame, ..)| frame.as_usize() as u64 >> 12)
        };
        pages.iter().map(frame).sum()
    }

    fn protect(&mut self, pages: Pages) {
        let mut cursor = self.0.cursor();
        for page in pages.iter() {
            let _ = cursor.protect(virtual_address(page), READ_ONLY);
        }
    }

    fn protect_range(&mut self, first: u64, nr_pages: u64) {
        let _ = self.0.cursor().protect_region(virtual_address(first), address(nr_pages), READ_ONLY);
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        let _ = self.0.cursor().unmap(virtual_address(page));
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        let _ = self.0.cursor().unmap_region(virtual_address(first), address(nr_pages));
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let (frame, flags, size) = self.0.query(virtual_address(page)).ok()?;
        let frame = frame.as_usize() as u64 >> 12;
        Some(Leaf { frame, writable: flags.contains(MappingFlags::WRITE), huge: size.is_huge() })
    }
}
