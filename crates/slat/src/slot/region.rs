//! A memory region as the user of the library describes it, and the checks that need nothing but
//! the description.

use super::userfault::UserfaultBitmap;
use crate::addr::{GfnRange, Gpa, PAGE_SHIFT, PAGE_SIZE};
use crate::error::SlotError;

bitflags::bitflags! {
    /// Flags of a memslot, with KVM's names and values.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    pub struct MemoryRegionFlags: u32 {
        /// Writes of the guest are logged; [`Vm::get_dirty_log`](crate::Vm::get_dirty_log) reads
        /// the log. Turning it on begins an empty log (or a full one, see
        /// [`ManualProtect`](crate::dirty::ManualProtect)), and splits huge pages
        /// ([`HugePageLogging`](crate::dirty::HugePageLogging)). Turning it off discards the log and
        /// recovers huge pages.
        const LOG_DIRTY_PAGES = 1 << 0;
        /// The guest may not write: its writes are [`Exit::Mmio`](crate::Exit::Mmio).
        const READONLY = 1 << 1;
        /// The memslot has a guest_memfd beside its shared memory: its pages may be private
        /// ([`Vm::set_memory_attributes`](crate::Vm::set_memory_attributes)). It can be neither
        /// moved nor read-only.
        const GUEST_MEMFD = 1 << 2;
        /// Faults on the pages that the memslot's [`UserfaultBitmap`] names exit to user space.
        /// Turning it on unmaps all pages. Turning it off drops the bitmap, and recovers huge pages
        /// as far as the memslot's dirty log allows. The value is that of KVM's proposed
        /// `KVM_MEM_USERFAULT`.
        const USERFAULT = 1 << 3;
        /// The memslot's pages are mapped by [`Vm::map_range`](crate::Vm::map_range) alone, and stay
        /// as they are until they are unmapped: no operation ages, logs, write-protects, tracks or
        /// recovers them, and only a call for a part of a huge page splits it. A fault on a page
        /// that is not mapped, or that the mapping does not allow, is
        /// [`Exit::Mmio`](crate::Exit::Mmio). It is for the registers of devices that are passed
        /// through, for memory that a device accesses through an IOMMU, and for memory that is
        /// mapped as a whole in advance.
        ///
        /// No other flag goes with it, and it can neither be set nor cleared later. A memslot that is
        /// moved or deleted has its pages unmapped ([`Host::release_mapped`](crate::Host::release_mapped)).
        const PINNED = 1 << 4;
    }
}

/// A change of a memslot by [`Vm::set_user_memory_region`](crate::Vm::set_user_memory_region).
///
/// - A memslot that does not exist is created; it needs a backing.
/// - `memory_size` 0 deletes the memslot, and its log.
/// - An existing memslot is moved if `guest_phys_addr` differs, and gets exactly `flags`.
///   `memory_size` must be its size. The backing stays (`backing: None`), and so do
///   [`READONLY`](MemoryRegionFlags::READONLY) and
///   [`GUEST_MEMFD`](MemoryRegionFlags::GUEST_MEMFD).
#[derive(Clone, Debug)]
pub struct MemoryRegion<B> {
    /// Number of the memslot, below [`MAX_SLOTS`](MemoryRegion::MAX_SLOTS).
    pub slot: u32,
    /// Flags of the memslot.
    pub flags: MemoryRegionFlags,
    /// First guest-physical address, a multiple of 4 KiB.
    pub guest_phys_addr: Gpa,
    /// Size in bytes, a multiple of 4 KiB.
    pub memory_size: u64,
    /// Where the memory comes from.
    pub backing: Option<B>,
    /// The pages at which faults exit, for [`MemoryRegionFlags::USERFAULT`]; ignored without that
    /// flag. A memslot that has the flag already keeps its bitmap (`None`), or gets this one
    /// instead, as if the flag were turned on anew.
    pub userfault_bitmap: Option<UserfaultBitmap>,
}

impl MemoryRegion<()> {
    /// Memslot numbers are below this (KVM's limit on x86: 32767 less the 3 that it keeps for
    /// itself).
    pub const MAX_SLOTS: u32 = 32764;
}

impl<B> MemoryRegion<B> {
    /// Returns the frames of the region, if numbers and flags are valid for page tables that
    /// translate `gpa_bits` bits.
    pub(crate) fn check(&self, gpa_bits: u32) -> Result<GfnRange, SlotError> {
        let &MemoryRegion { slot, flags, guest_phys_addr: gpa, memory_size, .. } = self;
        if slot >= MemoryRegion::MAX_SLOTS {
            return Err(SlotError::SlotTooHigh { slot });
        }
        if MemoryRegionFlags::from_bits(flags.bits()).is_none() {
            return Err(SlotError::UnknownFlags { slot, flags: flags.bits() });
        }
        if flags.contains(MemoryRegionFlags::PINNED) && flags != MemoryRegionFlags::PINNED {
            return Err(SlotError::PinnedAlone { slot, flags: flags.bits() });
        }
        if flags.contains(MemoryRegionFlags::READONLY | MemoryRegionFlags::GUEST_MEMFD) {
            return Err(SlotError::ReadOnlyGuestMemfd { slot });
        }
        if !gpa.is_page_aligned() {
            return Err(SlotError::UnalignedAddress { gpa });
        }
        if memory_size % PAGE_SIZE != 0 {
            return Err(SlotError::UnalignedSize { slot, memory_size });
        }
        match gpa.0.checked_add(memory_size) {
            Some(end) if end <= 1 << gpa_bits => Ok(GfnRange::new(gpa.gfn(), memory_size >> PAGE_SHIFT)),
            _ => Err(SlotError::AddressTooHigh { gpa, gpa_bits }),
        }
    }
}
