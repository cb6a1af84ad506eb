//! The peer: `axaddrspace`, the one published Rust crate with a second-stage fault path, over `page-table-generic`,
//! which it is made for, behind one mutex, because both take `&mut self`.
//!
//! It gets the same arena, entries of the same layout (AMD APM vol. 2, 5.4.1) with A and D set, and frames for guest
//! pages from a counter, since its backend asks for them one by one. How a fault puts its frame into the table is the
//! table's affair: see [`Remap`].

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ax_memory_addr::{PhysAddr, VirtAddr};
use axaddrspace::{AddrSpace, AddrSpaceError, AddrSpaceResult, MappingFlags, NestedPageTableOps, PageSize};
use axvm_types::GuestPhysAddr;
use page_table_generic::{FrameAllocator, MapConfig, PageTable, PageTableEntry, PagingError, TableMeta};

use super::arena::{FRAME_BYTES, Memory};

/// Physical address of the first frame for guest pages.
const FIRST_FRAME: usize = 1 << 36;

const PRESENT: usize = 1 << 0;
const READ_WRITE: usize = 1 << 1;
const USER: usize = 1 << 2;
const ACCESSED: usize = 1 << 5;
const DIRTY: usize = 1 << 6;
const PAGE_SIZE_BIT: usize = 1 << 7;
const NO_EXECUTE: usize = 1 << 63;
const ADDRESS: usize = 0x000f_ffff_ffff_f000;

/// A long-mode entry.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
struct NptEntry(usize);

impl PageTableEntry for NptEntry {
    type PteConfig = MappingFlags;

    fn new_page(paddr: PhysAddr, flags: MappingFlags, is_huge: bool) -> NptEntry {
        let mut bits = paddr.as_usize() & ADDRESS | PRESENT | USER | ACCESSED;
        if flags.contains(MappingFlags::WRITE) {
            bits |= READ_WRITE | DIRTY;
        }
        if !flags.contains(MappingFlags::EXECUTE) {
            bits |= NO_EXECUTE;
        }
        if is_huge {
            bits |= PAGE_SIZE_BIT;
        }
        NptEntry(bits)
    }

    fn new_table(paddr: PhysAddr) -> NptEntry {
        NptEntry(paddr.as_usize() & ADDRESS | PRESENT | READ_WRITE | USER | ACCESSED)
    }

    fn paddr(&self, _is_dir: bool) -> PhysAddr {
        PhysAddr::from_usize(self.0 & ADDRESS)
    }

    fn config(&self, _is_dir: bool) -> MappingFlags {
        let mut flags = MappingFlags::READ;
        flags.set(MappingFlags::WRITE, self.0 & READ_WRITE != 0);
        flags.set(MappingFlags::EXECUTE, self.0 & NO_EXECUTE == 0);
        flags
    }

    fn present(&self) -> bool {
        self.0 & PRESENT != 0
    }

    fn huge(&self, is_dir: bool) -> bool {
        is_dir && self.0 & PAGE_SIZE_BIT != 0
    }

    fn unused(&self) -> bool {
        self.0 == 0
    }

    fn clear(&mut self) {
        self.0 = 0;
    }
}

/// Four levels of long-mode tables.
#[derive(Clone, Copy)]
struct Npt;

impl TableMeta for Npt {
    type P = NptEntry;

    const PAGE_SIZE: usize = FRAME_BYTES;
    const LEVEL_BITS: &[usize] = &[9, 9, 9, 9];
    const MAX_BLOCK_LEVEL: usize = 3;

    fn flush(_vaddr: Option<VirtAddr>) {}
}

#[derive(Clone, Copy)]
struct Tables(Memory);

impl FrameAllocator for Tables {
    fn alloc_frame(&self) -> Option<PhysAddr> {
        self.0.allocate().map(PhysAddr::from_usize)
    }

    fn dealloc_frame(&self, frame: PhysAddr) {
        self.0.free(frame.as_usize());
    }

    #[inline]
    fn phys_to_virt(&self, paddr: PhysAddr) -> *mut u8 {
        self.0.pointer(paddr.as_usize())
    }
}

/// How a fault enters the frame that it was given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Remap {
    /// Map, and replace only what is mapped already: the best that its interface allows.
    MapFirst,
    /// Unmap, whether or not anything is mapped, then map: what `axvm`, the hypervisor of its authors, does (0.8.5).
    UnmapFirst,
}

/// The nested page table.
struct Nested {
    remap: Remap,
    tables: PageTable<Npt, Tables>,
    memory: Memory,
    /// Frames given to guest pages so far.
    nr_frames: AtomicUsize,
}

fn convert(_error: PagingError) -> AddrSpaceError {
    AddrSpaceError::MappingState
}

fn address(gpa: GuestPhysAddr) -> VirtAddr {
    VirtAddr::from_usize(gpa.as_usize())
}

fn page_size(size_bytes: usize) -> PageSize {
    match size_bytes {
        FRAME_BYTES => PageSize::Size4K,
        0x20_0000 => PageSize::Size2M,
        _ => PageSize::Size1G,
    }
}

impl NestedPageTableOps for Nested {
    fn root_paddr(&self) -> PhysAddr {
        self.tables.root_paddr()
    }

    fn levels(&self) -> usize {
        Npt::LEVEL_BITS.len()
    }

    #[inline]
    fn alloc_frame(&self) -> Option<PhysAddr> {
        // No read-modify-write: the mutex is held.
        let index = self.nr_frames.load(Ordering::Relaxed);
        self.nr_frames.store(index + 1, Ordering::Relaxed);
        Some(PhysAddr::from_usize(FIRST_FRAME + index * FRAME_BYTES))
    }

    fn dealloc_frame(&self, _paddr: PhysAddr) {}

    fn phys_to_virt(&self, paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from_usize(self.memory.pointer(paddr.as_usize()) as usize)
    }

    fn map(&mut self, vaddr: GuestPhysAddr, paddr: PhysAddr, size: PageSize, flags: MappingFlags) -> AddrSpaceResult {
        let allow_huge = size.is_huge();
        let config =
            MapConfig { vaddr: address(vaddr), paddr, size: size.into(), pte: flags, allow_huge, flush: false };
        self.tables.map(&config).map_err(convert)
    }

    fn unmap(&mut self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        let (paddr, flags, size_bytes) = self.tables.unmap_page(address(vaddr)).map_err(convert)?;
        Ok((paddr, flags, page_size(size_bytes)))
    }

    fn map_linear(
        &mut self,
        vaddr: GuestPhysAddr,
        paddr: PhysAddr,
        size: usize,
        flags: MappingFlags,
        allow_huge: bool,
    ) -> AddrSpaceResult {
        self.tables.map_linear_pages(address(vaddr), paddr, size, flags, allow_huge).map_err(convert)
    }

    fn unmap_region(&mut self, start: GuestPhysAddr, size: usize) -> AddrSpaceResult {
        self.tables.unmap(address(start), size).map_err(convert)
    }

    #[inline]
    fn remap(&mut self, start: GuestPhysAddr, paddr: PhysAddr, flags: MappingFlags) -> bool {
        let start = GuestPhysAddr::from(start.as_usize() & !(FRAME_BYTES - 1));
        if self.remap == Remap::UnmapFirst {
            let _ = self.unmap(start);
        }
        self.map(start, paddr, PageSize::Size4K, flags).is_ok()
            || self.tables.remap_page(address(start), paddr, flags).is_ok()
    }

    fn protect_region(&mut self, start: GuestPhysAddr, size: usize, new_flags: MappingFlags) -> bool {
        self.tables.protect_region(address(start), size, new_flags).is_ok()
    }

    fn query(&self, vaddr: GuestPhysAddr) -> AddrSpaceResult<(PhysAddr, MappingFlags, PageSize)> {
        let (paddr, flags, size_bytes) = self.tables.query(address(vaddr)).map_err(convert)?;
        Ok((paddr, flags, page_size(size_bytes)))
    }
}

/// A VM's memory as the peer manages it.
pub(crate) struct Peer {
    space: Mutex<AddrSpace<Nested>>,
}

impl Peer {
    /// Memory of `nr_pages` from address 0 on, nothing of it mapped.
    pub(crate) fn new(memory: Memory, remap: Remap, nr_pages: u64) -> Peer {
        let tables = PageTable::new(Tables(memory)).unwrap();
        let nested = Nested { remap, tables, memory, nr_frames: AtomicUsize::new(0) };
        let size = nr_pages as usize * FRAME_BYTES;
        let mut space = AddrSpace::new_empty(nested, GuestPhysAddr::from(0), size).unwrap();
        let flags = MappingFlags::READ | MappingFlags::WRITE | MappingFlags::EXECUTE;
        space.map_alloc(GuestPhysAddr::from(0), size, flags, false).unwrap();
        Peer { space: Mutex::new(space) }
    }

    /// Writes to page number `page`, where the tables do not allow it.
    #[inline]
    pub(crate) fn write_fault(&self, page: u64) {
        let gpa = GuestPhysAddr::from(page as usize * FRAME_BYTES);
        assert!(self.space.lock().unwrap().handle_page_fault(gpa, MappingFlags::WRITE));
    }

    /// Frames given to guest pages.
    pub(crate) fn nr_frames(&self) -> u64 {
        self.space.lock().unwrap().page_table().nr_frames.load(Ordering::Relaxed) as u64
    }
}
