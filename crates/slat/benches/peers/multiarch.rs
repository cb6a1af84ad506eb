//! `page_table_multiarch`: its x86-64 tables, by a cursor for each call. It splits nothing.

use std::sync::OnceLock;

use memory_addr::{PhysAddr, VirtAddr};
use page_table_multiarch::x86_64::X64PageTable;
use page_table_multiarch::{MappingFlags, PageSize, PagingHandler};

use super::arena::Memory;
use super::operation::{Frames, Leaf, Pages, Table, address};

/// Its hooks have no `self`.
static MEMORY: OnceLock<Memory> = OnceLock::new();

struct Tables;

impl PagingHandler for Tables {
    fn alloc_frames(nr_frames: usize, _align: usize) -> Option<PhysAddr> {
        assert_eq!(nr_frames, 1);
        MEMORY.get()?.allocate().map(PhysAddr::from_usize)
    }

    fn dealloc_frames(frame: PhysAddr, nr_frames: usize) {
        assert_eq!(nr_frames, 1);
        MEMORY.get().unwrap().free(frame.as_usize());
    }

    #[inline]
    fn phys_to_virt(frame: PhysAddr) -> VirtAddr {
        VirtAddr::from_ptr_of(MEMORY.get().unwrap().pointer(frame.as_usize()))
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
    pub(crate) fn new(memory: Memory) -> Multiarch {
        MEMORY.get_or_init(|| memory);
        Multiarch(X64PageTable::try_new().unwrap())
    }
}

impl Table for Multiarch {
    #[inline]
    fn map(&mut self, pages: Pages) {
        let mut cursor = self.0.cursor();
        for page in pages.iter() {
            // An error: it is mapped already.
            let _ = cursor.map(virtual_address(page), frame_address(Frames::Shifted, page), PageSize::Size4K, WRITABLE);
        }
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, frames: Frames) {
        let frame = |address: VirtAddr| frame_address(frames, (address.as_usize() >> 12) as u64);
        let (size, allow_huge) = (address(nr_pages), frames == Frames::Aligned);
        self.0.cursor().map_region(virtual_address(first), frame, size, WRITABLE, allow_huge).unwrap();
    }

    #[inline]
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64 {
        let frame = |page: u64| {
            let (frame, ..) = self.0.query(virtual_address(start + (page & mask))).unwrap();
            frame.as_usize() as u64 >> 12
        };
        pages.iter().map(frame).sum()
    }

    fn protect(&mut self, pages: Pages) {
        let mut cursor = self.0.cursor();
        for page in pages.iter() {
            cursor.protect(virtual_address(page), READ_ONLY).unwrap();
        }
    }

    fn protect_range(&mut self, first: u64, nr_pages: u64) {
        self.0.cursor().protect_region(virtual_address(first), address(nr_pages), READ_ONLY).unwrap();
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        // An error: it is unmapped already.
        let _ = self.0.cursor().unmap(virtual_address(page));
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        self.0.cursor().unmap_region(virtual_address(first), address(nr_pages)).unwrap();
    }

    fn split(&mut self, _page: u64) {
        unreachable!("it cannot");
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let (frame, flags, size) = self.0.query(virtual_address(page)).ok()?;
        let frame = frame.as_usize() as u64 >> 12;
        Some(Leaf { frame, writable: flags.contains(MappingFlags::WRITE), huge: size.is_huge() })
    }
}
