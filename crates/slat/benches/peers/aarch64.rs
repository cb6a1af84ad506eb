//! `aarch64-paging`: its stage 2 tables, four levels, never marked as active, so that it spares itself the check of what
//! may be changed under a CPU, and the maintenance of TLBs. What is unmapped is mapped as invalid, as its documentation
//! says.

#![expect(unsafe_code, reason = "its tables are handed out as raw pointers")]

use std::ptr::NonNull;

use aarch64_paging::Mapping;
use aarch64_paging::descriptor::{PhysicalAddress, Stage2Attributes};
use aarch64_paging::paging::{Constraints, MemoryRegion, PageTable, Stage2, Translation};

use super::arena::{FRAME_BYTES, Memory};
use super::operation::{Frames, Leaf, Pages, Table, address};

/// A table of its, by pointer.
type Pointer = NonNull<PageTable<Stage2Attributes>>;

struct Tables {
    memory: Memory,
}

impl Tables {
    /// Physical address of the frame that physical address 0 would have the pointer of.
    fn frame_of(&self, table: Pointer) -> usize {
        table.as_ptr().addr().wrapping_sub(self.memory.pointer(0).addr())
    }
}

impl Translation<Stage2Attributes> for Tables {
    fn allocate_table(&mut self) -> (Pointer, PhysicalAddress) {
        let frame = self.memory.allocate().unwrap();
        let table = self.memory.pointer(frame);
        // SAFETY: the frame is nobody else's, and that large.
        unsafe { table.write_bytes(0, FRAME_BYTES) };
        (NonNull::new(table.cast()).unwrap(), PhysicalAddress(frame))
    }

    unsafe fn deallocate_table(&mut self, table: Pointer) {
        self.memory.free(self.frame_of(table));
    }

    #[inline]
    fn physical_to_virtual(&self, frame: PhysicalAddress) -> Pointer {
        NonNull::new(self.memory.pointer(frame.0).cast()).unwrap()
    }
}

const READ_ONLY: Stage2Attributes = Stage2Attributes::VALID
    .union(Stage2Attributes::ACCESS_FLAG)
    .union(Stage2Attributes::S2AP_ACCESS_RO)
    .union(Stage2Attributes::SH_INNER)
    .union(Stage2Attributes::MEMATTR_NORMAL_INNER_WB)
    .union(Stage2Attributes::MEMATTR_NORMAL_OUTER_WB);
const WRITABLE: Stage2Attributes = READ_ONLY.union(Stage2Attributes::S2AP_ACCESS_WO);

pub(crate) struct Aarch64(Mapping<Tables, Stage2>);

#[inline]
fn region(first: u64, nr_pages: u64) -> MemoryRegion {
    MemoryRegion::new(address(first), address(first + nr_pages))
}

impl Aarch64 {
    pub(crate) fn new(memory: Memory) -> Aarch64 {
        Aarch64(Mapping::new(Tables { memory }, 0, Stage2))
    }

    #[inline]
    fn set(&mut self, first: u64, nr_pages: u64, frames: Frames, flags: Stage2Attributes) {
        let constraints = if frames == Frames::Aligned { Constraints::empty() } else { Constraints::NO_BLOCK_MAPPINGS };
        let frame = PhysicalAddress(address(frames.frame(first)));
        self.0.map_range(&region(first, nr_pages), frame, flags, constraints).unwrap();
    }

    /// The descriptor of the leaf for `page`: its physical address, flags and level.
    #[inline]
    fn descriptor(&self, page: u64) -> Option<(usize, Stage2Attributes, usize)> {
        let mut found = None;
        self.0
            .walk_range(&region(page, 1), &mut |_, descriptor, level| {
                if descriptor.is_valid() {
                    found = Some((descriptor.output_address().0, descriptor.flags(), level));
                }
                Ok(())
            })
            .unwrap();
        found
    }
}

impl Table for Aarch64 {
    #[inline]
    fn map(&mut self, pages: Pages) {
        pages.iter().for_each(|page| self.set(page, 1, Frames::Shifted, WRITABLE));
    }

    fn map_range(&mut self, first: u64, nr_pages: u64, frames: Frames) {
        if frames == Frames::ShiftedUnknown {
            (first..first + nr_pages).for_each(|page| self.set(page, 1, frames, WRITABLE));
        } else {
            self.set(first, nr_pages, frames, WRITABLE);
        }
    }

    #[inline]
    fn query(&mut self, start: u64, mask: u64, pages: Pages) -> u64 {
        pages.iter().map(|page| self.descriptor(start + (page & mask)).unwrap().0 as u64 >> 12).sum()
    }

    fn protect(&mut self, pages: Pages) {
        pages.iter().for_each(|page| self.protect_range(page, 1));
    }

    #[inline]
    fn protect_range(&mut self, first: u64, nr_pages: u64) {
        let protect = |_: &MemoryRegion, descriptor: &mut aarch64_paging::descriptor::UpdatableDescriptor<'_, _>| {
            if descriptor.is_table() {
                return Ok(());
            }
            descriptor.modify_flags(Stage2Attributes::empty(), Stage2Attributes::S2AP_ACCESS_WO)
        };
        self.0.modify_range(&region(first, nr_pages), &protect).unwrap();
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        self.set(page, 1, Frames::Shifted, Stage2Attributes::empty());
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        let (pages, no_frame) = (region(first, nr_pages), PhysicalAddress(0));
        self.0.map_range(&pages, no_frame, Stage2Attributes::empty(), Constraints::empty()).unwrap();
    }

    #[inline]
    fn split(&mut self, page: u64) {
        // A change of one page of it.
        self.protect_range(page, 1);
    }

    fn look(&mut self, page: u64) -> Option<Leaf> {
        let (frame, flags, level) = self.descriptor(page)?;
        let block_pages = 1 << ((3 - level) * 9);
        Some(Leaf {
            frame: (frame as u64 >> 12) + page % block_pages,
            writable: flags.contains(Stage2Attributes::S2AP_ACCESS_WO),
            huge: level < 3,
        })
    }
}
