//! `aarch64-paging`: its stage 2 page tables, four levels, never marked as active. So it omits the
//! check of changes that are not allowed under a CPU, and the TLB maintenance. Unmapped pages are
//! mapped as invalid, as its documentation says.

#![expect(unsafe_code, reason = "its page-table pages are raw pointers")]

use std::ptr::NonNull;

use aarch64_paging::Mapping;
use aarch64_paging::descriptor::{PhysicalAddress, Stage2Attributes};
use aarch64_paging::paging::{Constraints, MemoryRegion, PageTable, Stage2, Translation};

use slat::Hpa;
use slat_machine::memory::phys;

use super::memory::{Memory, TABLE_BYTES};
use super::operation::{Frames, Leaf, Pages, Table, address};

/// A pointer to one of its page-table pages.
type Pointer = NonNull<PageTable<Stage2Attributes>>;

struct Tables(Memory);

impl Translation<Stage2Attributes> for Tables {
    fn allocate_table(&mut self) -> (Pointer, PhysicalAddress) {
        // Its interface cannot report a failure; there are enough page-table pages for any job.
        let frame = self.0.allocate().expect("a table");
        let table = self.0.pointer(frame);
        // SAFETY: the frame has this size, and no other code has it.
        unsafe { table.write_bytes(0, TABLE_BYTES) };
        (NonNull::new(table.cast()).expect("no table is at 0"), PhysicalAddress(frame.0 as usize))
    }

    unsafe fn deallocate_table(&mut self, table: Pointer) {
        // SAFETY: as the caller promises, it was allocated above and is not used any more.
        unsafe { self.0.free(phys::hpa_of(table.as_ptr())) };
    }

    #[inline]
    fn physical_to_virtual(&self, frame: PhysicalAddress) -> Pointer {
        NonNull::new(self.0.pointer(Hpa(frame.0 as u64)).cast()).expect("no table is at 0")
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
        Aarch64(Mapping::new(Tables(memory), 0, Stage2))
    }

    #[inline]
    fn set(&mut self, first: u64, nr_pages: u64, frames: Frames, flags: Stage2Attributes) {
        let constraints = if frames == Frames::Aligned { Constraints::empty() } else { Constraints::NO_BLOCK_MAPPINGS };
        let frame = PhysicalAddress(address(frames.frame(first)));
        let _ = self.0.map_range(&region(first, nr_pages), frame, flags, constraints);
    }

    /// The descriptor of the leaf for `page`: its physical address, flags and level.
    #[inline]
    fn descriptor(&self, page: u64) -> Option<(usize, Stage2Attributes, usize)> {
        let mut found = None;
        let _ = self.0.walk_range(&region(page, 1), &mut |_, descriptor, level| {
            if descriptor.is_valid() {
                found = Some((descriptor.output_address().0, descriptor.flags(), level));
            }
            Ok(())
        });
        found
    }
}

// The check notices what fails here.
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
        let frame = |page: u64| self.descriptor(start + (page & mask)).map_or(0, |found| found.0 as u64 >> 12);
        pages.iter().map(frame).sum()
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
        let _ = self.0.modify_range(&region(first, nr_pages), &protect);
    }

    #[inline]
    fn unmap_single(&mut self, page: u64) {
        self.set(page, 1, Frames::Shifted, Stage2Attributes::empty());
    }

    fn unmap_range(&mut self, first: u64, nr_pages: u64) {
        let (pages, no_frame) = (region(first, nr_pages), PhysicalAddress(0));
        let _ = self.0.map_range(&pages, no_frame, Stage2Attributes::empty(), Constraints::empty());
    }

    #[inline]
    fn split(&mut self, page: u64) {
        // A change of one of its pages splits it.
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
