//! `page-table-generic`, with long-mode entries, which its user implements.
//!
//! Its plan-and-apply pair unmaps a page and leaves empty page-table pages in place: its other way
//! searches the 512 entries of the page-table page each time.

#![expect(unsafe_code, reason = "frees page-table pages")]

use ax_memory_addr::{PhysAddr, VirtAddr};
use page_table_generic::{FrameAllocator, MapConfig, PageTable, PageTableEntry, TableMeta};
use slat::Hpa;

use super::memory::{Memory, TABLE_BYTES};
use super::operation::{Frames, Leaf, Pages, Table, address};

const PRESENT: usize = 1 << 0;
pub(crate) const READ_WRITE: usize = 1 << 1;
const USER: usize = 1 << 2;
const ACCESSED: usize = 1 << 5;
const DIRTY: usize = 1 << 6;
const PAGE_SIZE_BIT: usize = 1 << 7;
const ADDRESS: usize = 0x000f_ffff_ffff_f000;

/// A long-mode entry (AMD APM vol. 2, 5.4.1). Its configuration is its low bits.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct LongModeEntry(usize);

impl PageTableEntry for LongModeEntry {
    type PteConfig = usize;

    #[inline]
    fn new_page(paddr: PhysAddr, config: usize, is_huge: bool) -> LongModeEntry {
        LongModeEntry(paddr.as_usize() & ADDRESS | config | if is_huge { PAGE_SIZE_BIT } else { 0 })
    }

    #[inline]
    fn new_table(paddr: PhysAddr) -> LongModeEntry {
        LongModeEntry(paddr.as_usize() & ADDRESS | PRESENT | READ_WRITE | USER | ACCESSED)
    }

    #[inline]
    fn paddr(&self, _is_dir: bool) -> PhysAddr {
        PhysAddr::from_usize(self.0 & ADDRESS)
    }

    #[inline]
    fn config(&self, _is_dir: bool) -> usize {
        self.0 & !ADDRESS & !PAGE_SIZE_BIT
    }

    #[inline]
    fn present(&self) -> bool {
        self.0 & PRESENT != 0
    }

    #[inline]
    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & PAGE_SIZE_BIT != 0
    }

    #[inline]
    fn unused(&self) -> bool {
        self.0 == 0
    }

    #[inline]
    fn clear(&mut self) {
        self.0 = 0;
    }
}

/// Four levels of long-mode tables.
#[derive(Clone, Copy)]
pub(crate) struct LongMode;

impl TableMeta for LongMode {
    type P = LongModeEntry;

    const PAGE_SIZE: usize = TABLE_BYTES;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;

    #[inline]
    fn flush(_vaddr: Option<VirtAddr>) {}
}

#[derive(Clone, Copy)]
pub(crate) struct Tables(Memory);

impl FrameAllocator for Tables {
    fn alloc_frame(&self) -> Option<PhysAddr> {
        self.0.allocate().map(|table| PhysAddr::from_usize(table.0 as usize))
    }

    fn dealloc_frame(&self, frame: PhysAddr) {
        // SAFETY: a page table frees what it allocated, once, when nothing points to it any more.
        unsafe { self.0.free(Hpa(frame.as_usize() as u64)) };
    }

    #[inline]
    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        self.0.pointer(Hpa(paddr.as_usize() as u64))
    }
}

/// Its page tables with these entries.
pub(crate) type LongModeTables = PageTable<LongMode, Tables>;

pub(crate) const READ_ONLY: usize = PRESENT | USER | ACCESSED;
pub(crate) const WRITABLE: usize = READ_ONLY | READ_WRITE | DIRTY;

/// Empty long-mode page tables; `None` without memory.
pub(crate) fn new_tables(memory: Memory) -> Option<LongModeTables> {
    PageTable::new(Tables(memory)).ok()
}

pub(crate) struct Generic(LongModeTables);

#[inline]
fn virtual_address(page: u64) -> VirtAddr {
    VirtAddr::from_usize(address(page))
}

#[inline]
fn frame_address(frames: Frames, page: u64) -> PhysAddr {
    PhysAddr::from_usize(address(frames.frame(page)))
}

impl Generic {
    pub(crate) fn new(memory: Memory) -> Option<Generic> {
        new_tables(memory).map(Generic)
    }
}

// The check notices what fails here.
impl Table for Generic {
    #[inline]
    fn map(&mut self, pages: Pages) {
        for page in pages.iter() {
            // An error means that the page is mapped already, or the check notices.
            let _ = self.0.map(&MapConfig {
                vaddr: virtual_address(page),
                paddr: frame_address(Frames::Shifted, page),
                size: TABLE_BYTES,
                pte: WRITABLE,
                allow_huge: false,
                flush: false,
            });
        }
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, frames: Frames) {
        let (start, size) = (virtual_address(first), address(nr_pages));
        match frames {
            Frames::Shifted | Frames::Aligned => {
                let config = MapConfig {
                    vaddr: start,
                    paddr: frame_address(frames, first),
                    size,
                    pte: WRITABLE,
                    allow_huge: frames == Frames::Aligned,
                    flush: false,
                };
                let _ = self.0.map(&config);
            }
            Frames::ShiftedUnknown => {
                let frame = |address: VirtAddr| frame_address(frames, (address.as_usize() >> 12) as u64);
                let _ = self.0.map_region(start, frame, size, WRITABLE);
            }
        }
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
        for page in pages.iter() {
            let _ = self.0.protect_page(virtual_address(page), READ_ONLY);
        }
    }

    fn protect_range(&mut self, first: u64, nr_pages: u64) {
        let _ = self.0.protect_region(virtual_address(first), address(nr_pages), READ_ONLY);
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        if let Ok(plan) = self.0.plan_unmap_page(virtual_address(page)) {
            let _ = self.0.try_unmap_page_with(plan);
        }
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        let _ = self.0.unmap(virtual_address(first), address(nr_pages));
    }

    #[inline]
    fn split(&mut self, page: u64) {
        let _ = self.0.split_huge_page(virtual_address(page));
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let (frame, config, size) = self.0.query(virtual_address(page)).ok()?;
        let frame = frame.as_usize() as u64 >> 12;
        Some(Leaf { frame, writable: config & READ_WRITE != 0, huge: size > TABLE_BYTES })
    }
}
