//! The dirty log behind vm-memory's [`Bitmap`]. A VMM built on rust-vmm marks its own writes in the
//! same log that the vCPUs' faults mark. So there is no second bitmap to merge.
//!
//! # Guarantees
//! vm-memory marks once for each write, after the write. The call is [`Vm::mark_dirty`] with the
//! pages that were written, and it marks as a fault does (`dirty/log.rs`):
//! - The harvest under way or the next one reports the write.
//! - When all calls that mark have returned, one harvest is exact.
//! - A read of a page after it was reported returns the write that it was reported for.
//!
//! # Implementation
//! An access uses slices of the bitmap. They borrow it, as those of vm-memory's own bitmap do, so
//! the threads of a VMM share no reference count.
//!
//! [`NewBitmap`](::vm_memory::bitmap::NewBitmap) is not implemented. It makes a bitmap from a
//! length only. Such a bitmap has no log, and would drop marks silently.

mod checked;

use alloc::alloc::{Layout, handle_alloc_error};
use alloc::sync::Arc;
use core::fmt;

pub use checked::CheckedMemory;

use ::vm_memory::bitmap::{Bitmap, RefSlice, WithBitmapSlice};

use crate::addr::PAGE_SHIFT;
use crate::error::LogError;
use crate::format::Format;
use crate::host::Host;
use crate::table::retire::Participant;
use crate::vm::Vm;

/// The dirty log of one memslot, as the bitmap of the vm-memory region that has the memslot's
/// memory. Byte 0 of the region is byte 0 of the memslot. With the feature `vm-memory`.
///
/// The bitmap names the memslot by its number. The memslot may be created after the bitmap, begin
/// and cease to log, and be moved. A later memslot with the same number is marked like the first.
///
/// Nothing is marked
/// - while there is no such memslot, or it does not log: a VMM that starts to log copies all memory
///   once anyway,
/// - if the VM logs by rings ([`Vm::enable_dirty_ring`]), which only vCPUs have: as with KVM, a VMM
///   then tracks its own writes.
///
/// If a write reaches beyond the end of the memslot, the pages inside are marked.
///
/// Clones mark the same log. For a region without a memslot there is vm-memory's own
/// `Option<SlotBitmap<..>>`. [`dirty_at`](Bitmap::dirty_at) returns the same as
/// [`Vm::is_marked_dirty`].
///
/// The bitmap keeps the VM alive. A [`Host::Backing`] should not own the region in turn: both would
/// stay until the memslot is deleted.
///
/// # Aborts
/// A call needs about 10 KiB of memory if more calls run at once than ever before; later calls
/// reuse it. If there is none, the process ends by [`handle_alloc_error`]. The trait cannot return
/// an error, and a page that is missed means a migrated guest with wrong memory.
///
/// # Example
/// ```
/// # use std::alloc::{Layout, alloc, dealloc};
/// # use std::sync::Arc;
/// use slat::*;
/// use slat::format::*;
/// use slat::host::*;
/// use vm_memory::mmap::MmapRegionBuilder;
/// use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};
/// # struct Kernel;
/// # // SAFETY: the heap's memory has no other user, and no CPU walks these page tables.
/// # unsafe impl Host for Kernel {
/// #     type Backing = HostAddress;
/// #     fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
/// #         // SAFETY: the layout of a page-table page is never empty.
/// #         Some(Hpa(unsafe { alloc(layout) } as u64))
/// #     }
/// #     unsafe fn free_table(&self, table: Hpa, layout: Layout) {
/// #         // SAFETY: the engine frees what it allocated.
/// #         unsafe { dealloc(self.table_ptr(table), layout) }
/// #     }
/// #     fn table_ptr(&self, table: Hpa) -> *mut u8 {
/// #         table.0 as *mut u8
/// #     }
/// #     fn resolve(&self, memory: &HostAddress, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
/// #         Ok(Resolved::memory(Pfn(memory.0 / PAGE_SIZE + page), PageSize::Size4K))
/// #     }
/// #     fn flush(&self, _ranges: &[GfnRange]) {}
/// #     fn timestamp_ns(&self) -> u64 { 0 }
/// # }
///
/// /// Address of a memslot's memory in the VMM. The `Host` resolves its pages.
/// struct HostAddress(u64);
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vm = Arc::new(Vm::<Kernel, Npt>::new(Kernel, Config::default())?);
/// let mut regions = Vec::new();
/// for (slot, start, size) in [(0, 0, 1 << 20), (1, 4 << 30, 2 << 20)] {
///     let mapping = MmapRegionBuilder::new_with_bitmap(size, SlotBitmap::new(Arc::clone(&vm), slot))
///         .with_mmap_prot(0x3) // PROT_READ | PROT_WRITE
///         .build()?;
///     vm.set_user_memory_region(MemoryRegion {
///         slot,
///         flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
///         guest_phys_addr: Gpa(start),
///         memory_size: size as u64,
///         backing: Some(HostAddress(mapping.as_ptr() as u64)),
///         userfault_bitmap: None,
///     })?;
///     regions.push(GuestRegionMmap::new(mapping, GuestAddress(start)).ok_or("the region is too high")?);
/// }
/// let memory = GuestMemoryMmap::from_regions(regions)?;
///
/// // The guest writes page 3, and a device that the VMM emulates writes page 5.
/// vm.create_vcpu()?.handle_fault(Gpa(0x3000), Access::Write)?;
/// memory.write_obj(7_u32, GuestAddress(0x5ffc))?;
///
/// let mut dirty = [0; 4];
/// assert_eq!(vm.get_dirty_log(0, &mut dirty)?, 2);
/// assert_eq!(dirty, [1 << 3 | 1 << 5, 0, 0, 0]);
/// # Ok(())
/// # }
/// ```
pub struct SlotBitmap<H: Host, F: Format> {
    vm: Arc<Vm<H, F>>,
    slot: u32,
}

impl<H: Host, F: Format> SlotBitmap<H, F> {
    /// The log of memslot `slot`, which need not exist yet.
    pub fn new(vm: Arc<Vm<H, F>>, slot: u32) -> SlotBitmap<H, F> {
        SlotBitmap { vm, slot }
    }
}

impl<H: Host, F: Format> Clone for SlotBitmap<H, F> {
    fn clone(&self) -> Self {
        SlotBitmap { vm: Arc::clone(&self.vm), slot: self.slot }
    }
}

impl<H: Host, F: Format> fmt::Debug for SlotBitmap<H, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlotBitmap").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl<'a, H: Host + 'static, F: Format> WithBitmapSlice<'a> for SlotBitmap<H, F> {
    type S = RefSlice<'a, Self>;
}

impl<H: Host + 'static, F: Format> Bitmap for SlotBitmap<H, F> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        let Some(last) = len.checked_sub(1) else { return };
        // vm-memory passes what it has written, so nothing overflows. Other callers may pass pages
        // that no memslot has.
        let (first_page, last_page) = (page_of(offset), page_of(offset.saturating_add(last)));
        let mut nr_pages = last_page - first_page + 1;
        while nr_pages != 0 {
            match or_abort(self.vm.mark_dirty(self.slot, first_page, nr_pages)) {
                // Fewer pages each time, if several memslots have this number one after another.
                Err(LogError::RangePastEnd { slot_pages, .. }) => nr_pages = slot_pages.saturating_sub(first_page),
                _ => return,
            }
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        or_abort(self.vm.is_marked_dirty(self.slot, page_of(offset))).unwrap_or(false)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

fn page_of(offset: usize) -> u64 {
    offset as u64 >> PAGE_SHIFT
}

/// Passes on an answer of the log, but ends the process if there was no memory for it.
fn or_abort<T>(answer: Result<T, LogError>) -> Result<T, LogError> {
    if let Err(LogError::OutOfMemory) = answer {
        handle_alloc_error(Layout::new::<Participant>());
    }
    answer
}
