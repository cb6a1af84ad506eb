//! `x86_64`: a mapper with a type for each page size. It has no operations on ranges: they are
//! loops here. It cannot split.

#![expect(unsafe_code, reason = "its interface is unsafe: a wrong mapping may break memory safety")]

use slat::Hpa;
use x86_64::structures::paging::mapper::TranslateResult;
use x86_64::structures::paging::mapper::{MappedFrame, MappedPageTable, Mapper, PageTableFrameMapping, Translate};
use x86_64::structures::paging::{
    FrameAllocator, Page, PageSize, PageTable, PageTableFlags, PhysFrame, Size2MiB, Size4KiB,
};
use x86_64::{PhysAddr, VirtAddr};

use super::memory::Memory;
use super::operation::{BLOCK_PAGES, Frames, Leaf, Pages, Table, address};

const READ_ONLY: PageTableFlags =
    PageTableFlags::PRESENT.union(PageTableFlags::USER_ACCESSIBLE).union(PageTableFlags::ACCESSED);
const WRITABLE: PageTableFlags = READ_ONLY.union(PageTableFlags::WRITABLE).union(PageTableFlags::DIRTY);
const PARENT: PageTableFlags = READ_ONLY.union(PageTableFlags::WRITABLE);

struct Tables(Memory);

// SAFETY: the arena's pointers are to the memory of its frames.
unsafe impl PageTableFrameMapping for Tables {
    #[inline]
    fn frame_to_pointer(&self, frame: PhysFrame) -> *mut PageTable {
        self.0.pointer(Hpa(frame.start_address().as_u64())).cast()
    }
}

// SAFETY: the arena allocates a frame once.
unsafe impl FrameAllocator<Size4KiB> for Tables {
    #[inline]
    fn allocate_frame(&mut self) -> Option<PhysFrame> {
        self.0.allocate().map(|table| PhysFrame::containing_address(PhysAddr::new(table.0)))
    }
}

pub(crate) struct X86 {
    root: Hpa,
    mapper: MappedPageTable<'static, Tables>,
    memory: Memory,
}

#[inline]
fn page<S: PageSize>(page: u64) -> Page<S> {
    Page::containing_address(VirtAddr::new(address(page) as u64))
}

#[inline]
fn frame<S: PageSize>(frame: u64) -> PhysFrame<S> {
    PhysFrame::containing_address(PhysAddr::new(address(frame) as u64))
}

impl X86 {
    pub(crate) fn new(memory: Memory) -> Option<X86> {
        let root = memory.allocate()?;
        let table: *mut PageTable = memory.pointer(root).cast();
        // SAFETY: the frame has a table's size and alignment, and no other code has it.
        let table = unsafe {
            table.write(PageTable::new());
            &mut *table
        };
        // SAFETY: the root is empty; the arena's mapping is right.
        let mapper = unsafe { MappedPageTable::new(table, Tables(memory)) };
        Some(X86 { root, mapper, memory })
    }

    #[inline]
    fn map_to<S: PageSize>(&mut self, number: u64, frames: Frames)
    where
        MappedPageTable<'static, Tables>: Mapper<S>,
    {
        let frame = frame::<S>(frames.frame(number));
        let mut tables = Tables(self.memory);
        // SAFETY: no CPU walks these tables. An error means that the page is mapped already, or the
        // check notices.
        let result =
            unsafe { self.mapper.map_to_with_table_flags(page::<S>(number), frame, WRITABLE, PARENT, &mut tables) };
        if let Ok(flush) = result {
            flush.ignore();
        }
    }

    #[inline]
    fn write_protect(&mut self, number: u64) {
        // SAFETY: as in `map_to`.
        if let Ok(flush) = unsafe { self.mapper.update_flags(page::<Size4KiB>(number), READ_ONLY) } {
            flush.ignore();
        }
    }

    /// Frees a page-table page of `level`, with all below it.
    ///
    /// It is a page-table page of such a tree, and no code uses it or a page below it any more.
    unsafe fn free_subtree(memory: Memory, table: Hpa, level: u32) {
        if level > 1 {
            // SAFETY: a page-table page that no code writes any more.
            let table = unsafe { &*memory.pointer(table).cast::<PageTable>() };
            let is_table = |flags: PageTableFlags| {
                flags.contains(PageTableFlags::PRESENT) && !flags.contains(PageTableFlags::HUGE_PAGE)
            };
            for entry in table.iter().filter(|entry| is_table(entry.flags())) {
                // SAFETY: a table of the same tree, one level below.
                unsafe { X86::free_subtree(memory, Hpa(entry.addr().as_u64()), level - 1) };
            }
        }
        // SAFETY: the mapper allocated it, and only one entry led to it.
        unsafe { memory.free(table) };
    }
}

impl Drop for X86 {
    fn drop(&mut self) {
        // SAFETY: the tree of four levels belongs to the mapper, which is being dropped and is not
        // used from here on.
        unsafe { X86::free_subtree(self.memory, self.root, 4) };
    }
}

// The check notices what fails here.
impl Table for X86 {
    #[inline]
    fn map(&mut self, pages: Pages) {
        pages.iter().for_each(|page| self.map_to::<Size4KiB>(page, Frames::Shifted));
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, frames: Frames) {
        let range = first..first + nr_pages;
        if frames == Frames::Aligned {
            range.step_by(BLOCK_PAGES as usize).for_each(|page| self.map_to::<Size2MiB>(page, frames));
        } else {
            range.for_each(|page| self.map_to::<Size4KiB>(page, frames));
        }
    }

    #[inline]
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64 {
        // For the one size that is mapped: the fastest call of the crate.
        let frame = |number: u64| {
            let found = self.mapper.translate_page(page::<Size4KiB>(start + (number & mask)));
            found.map_or(0, |frame| frame.start_address().as_u64() >> 12)
        };
        pages.iter().map(frame).sum()
    }

    fn protect(&mut self, pages: Pages) {
        pages.iter().for_each(|page| self.write_protect(page));
    }

    fn protect_range(&mut self, first: u64, nr_pages: u64) {
        (first..first + nr_pages).for_each(|page| self.write_protect(page));
    }

    #[inline]
    fn unmap_single(&mut self, number: u64) {
        if let Ok((_, flush)) = self.mapper.unmap(page::<Size4KiB>(number)) {
            flush.ignore();
        }
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        (first..first + nr_pages).for_each(|page| self.unmap_single(page));
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        match self.mapper.translate(VirtAddr::new(address(page) as u64)) {
            TranslateResult::Mapped { frame, offset, flags } => Some(Leaf {
                frame: (frame.start_address().as_u64() + offset) >> 12,
                writable: flags.contains(PageTableFlags::WRITABLE),
                huge: !matches!(frame, MappedFrame::Size4KiB(_)),
            }),
            _ => None,
        }
    }
}
