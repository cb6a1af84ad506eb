//! Memory that is mapped in advance: the calls for pinned memslots.

use super::Vm;
use crate::addr::{GfnRange, Gpa, Pfn};
use crate::error::{MapError, RangeError};
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::invalidate::Invalidation;
use crate::second_stage::map;
use crate::second_stage::map::{Mapping, Protection};
use crate::second_stage::query::{self, Translation};

impl<H: Host, F: Format> Vm<H, F> {
    /// Maps memory in advance, in a memslot with
    /// [`MemoryRegionFlags::PINNED`](crate::MemoryRegionFlags::PINNED): RAM, the registers of a
    /// device, or what a device accesses through an IOMMU. The pages stay as they are mapped until
    /// they are unmapped ([`unmap_range`](Vm::unmap_range)).
    ///
    /// It needs no vCPU. Any number of threads may map at once, beside faults and all other calls,
    /// as parallel as faults. It blocks only in [`Host::allocate_table`], and on the VM's lock if
    /// there is one. No flush is needed, but where the format needs break before make and a page of
    /// another size was unmapped there, or a fault was cached
    /// ([`NEEDS_LOCAL_FLUSH`](Format::NEEDS_LOCAL_FLUSH): the vCPU that faults once more flushes).
    ///
    /// The frames are the caller's until this returns `Ok`. Then they are in use until the engine
    /// passes them to [`Host::release_mapped`].
    ///
    /// # Errors
    /// [`MapError::EmptyRange`], [`MapError::AddressTooHigh`], [`MapError::FrameTooHigh`],
    /// [`MapError::UnsupportedAttributes`], [`MapError::NotPinned`], [`MapError::AlreadyMapped`],
    /// [`MapError::Busy`], [`MapError::OutOfMemory`]. After an error no page is mapped that was not
    /// before, no CPU uses the frames, and they are not released. (Pages that another call unmapped
    /// meanwhile are released by that call, perhaps later.)
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use slat::format::LeafAttributes;
    /// use slat::tables::{Mapping, Protection};
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm(Config::default());
    /// // The registers of a device, at 0xfe00_0000 for the guest and the host.
    /// let registers = Gpa(0xfe00_0000);
    /// let slot = region(MemoryRegionFlags::PINNED, 0x4000);
    /// vm.set_user_memory_region(MemoryRegion { guest_phys_addr: registers, ..slot })?;
    /// let range = GfnRange::new(registers.gfn(), 4);
    /// vm.map_range(&Mapping {
    ///     range,
    ///     pfn: Pfn(0xfe000),
    ///     protection: Protection { writable: true, attributes: LeafAttributes::DEVICE },
    ///     largest: PageSize::Size2M,
    /// })?;
    /// let found = vm.translate(Gpa(0xfe00_1008))?.expect("it is mapped");
    /// assert_eq!((found.pfn, found.attributes), (Pfn(0xfe001), LeafAttributes::DEVICE));
    /// // Take a part away: it is flushed when the call returns.
    /// assert_eq!(vm.unmap_range(GfnRange::new(registers.gfn(), 1))?, 1);
    /// assert_eq!(vm.translate(registers)?, None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn map_range(&self, mapping: &Mapping) -> Result<(), MapError> {
        let &Mapping { range, pfn, .. } = mapping;
        self.check_pages(range)?;
        if !self.has_room_for(pfn, range.nr_pages()) {
            return Err(MapError::FrameTooHigh { pfn });
        }
        let participant = self.tree.epochs.borrow_participant()?;
        map::map_range(self.operation(&participant), mapping)
    }

    /// Unmaps `range`, any part of what was mapped. Returns how many pinned pages were mapped there.
    /// When it returns, no CPU uses their frames any more, and these were released
    /// ([`Host::release_mapped`]).
    ///
    /// It is an invalidation that is over at once ([`invalidate_range`](Vm::invalidate_range)), so
    /// pages of other memslots are unmapped, too, and come back by faults. A pinned huge page of
    /// which the range has a part is split: where the format needs break before make
    /// ([`BREAK_BEFORE_MAKE`](Format::BREAK_BEFORE_MAKE)), it is not there for a moment. Faults
    /// then come back; the accesses of a device may fail. For memory that a device uses there, map
    /// pages as small as what is unmapped ([`Mapping::largest`]).
    ///
    /// It blocks in [`Host::flush`], for a page that is split in [`Host::allocate_table`], and on
    /// the VM's lock if there is one.
    ///
    /// # Errors
    /// [`MapError::EmptyRange`], [`MapError::AddressTooHigh`], [`MapError::OutOfMemory`]. Nothing has
    /// changed then. (If another call maps a huge page across the end of the range at the same
    /// moment, and there is no memory to split that, the pages before it are unmapped.)
    pub fn unmap_range(&self, range: GfnRange) -> Result<u64, MapError> {
        self.check_pages(range)?;
        let participant = self.tree.epochs.borrow_participant()?;
        let op = self.operation(&participant);
        map::split_end(op, range)?;
        let nr_pinned = Invalidation::with_pinned(&self.tree.in_flight, &op, range).map(|(_, nr_pinned)| nr_pinned);
        drop(participant);
        self.tree.reclaim();
        Ok(nr_pinned?)
    }

    /// Changes what may be done with the pinned pages of `range`: whether they may be written, and
    /// from where they may be executed. Returns how many pinned pages are mapped there. When it
    /// returns, no CPU uses a right that was taken away.
    ///
    /// The memory type of a page stays until it is unmapped. Pages that are not mapped, or not
    /// pinned, stay as they are. A huge page of which the range has a part is split, as by
    /// [`unmap_range`](Vm::unmap_range), which has what this blocks in.
    ///
    /// # Errors
    /// [`MapError::EmptyRange`], [`MapError::AddressTooHigh`], [`MapError::UnsupportedAttributes`],
    /// [`MapError::MemoryTypeFixed`], [`MapError::OutOfMemory`]. No page has other rights then.
    /// (Unless another call maps pages of the range at the same moment.)
    pub fn protect_range(&self, range: GfnRange, protection: &Protection) -> Result<u64, MapError> {
        self.check_pages(range)?;
        let participant = self.tree.epochs.borrow_participant()?;
        map::protect_range(self.operation(&participant), range, protection)
    }

    /// The translation of the page at `gpa`, as the page tables have it now: for an emulated device
    /// that copies, or a debugger. `None` if nothing is mapped, or there is no such address.
    ///
    /// It holds until the next unmapping or invalidation of the page. For many pages there is
    /// [`read_tables`](Vm::read_tables).
    ///
    /// # Errors
    /// [`RangeError::OutOfMemory`].
    pub fn translate(&self, gpa: Gpa) -> Result<Option<Translation>, RangeError> {
        Ok(query::translate(&self.tree, self.tree.epochs.pin_alone()?.get(), gpa))
    }

    fn check_pages(&self, range: GfnRange) -> Result<(), MapError> {
        if range.is_empty() {
            return Err(MapError::EmptyRange { start: range.start, end: range.end });
        }
        Ok(self.check_end(range)?)
    }

    /// Whether PTEs can have the `nr_pages` frames from `first` on.
    fn has_room_for(&self, first: Pfn, nr_pages: u64) -> bool {
        let Some(last) = first.0.checked_add(nr_pages - 1) else { return false };
        // Somewhere between the first and the last, each bit below the highest in which they differ
        // is set.
        let differing = (first.0 ^ last).checked_next_power_of_two().map_or(u64::MAX, |above| above.wrapping_sub(1));
        self.tree.encoding.has_room_for(Pfn(first.0 | last | differing))
    }
}
