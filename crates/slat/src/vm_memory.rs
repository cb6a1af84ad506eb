//! The dirty log behind vm-memory's [`Bitmap`], so that a VMM built on rust-vmm marks its own writes in the very log that
//! the vCPUs' faults mark: there is no second bitmap to merge, and no page that only one of two harvests knows.
//!
//! vm-memory marks after each write that goes through it, once for the write. That call is [`Vm::mark_dirty`] with the
//! pages that were touched, and it marks as a fault does (`dirty/log.rs`): a write is reported by the harvest under way or
//! by the next one, and when all calls that mark have returned, one harvest is exact. Whoever reads a page after it was
//! reported reads the write that it was reported for.
//!
//! An access takes slices of the bitmap: they borrow it, as those of vm-memory's own bitmap do, so no reference count is
//! shared by the threads of a VMM.
//!
//! [`NewBitmap`](::vm_memory::bitmap::NewBitmap) is left out. It makes a bitmap of nothing but a length: such a one has
//! no log, and would drop marks in silence.

mod checked;

use alloc::alloc::{Layout, handle_alloc_error};
use alloc::sync::Arc;
use core::fmt;

pub use checked::CheckedMemory;

use ::vm_memory::bitmap::{Bitmap, RefSlice, WithBitmapSlice};

use crate::addr::PAGE_SHIFT;
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::table::retire::Record;
use crate::vm::Vm;

/// The dirty log of one slot, as the bitmap of the vm-memory region that has the slot's memory: byte 0 of the region is
/// byte 0 of the slot. With the feature `vm-memory`.
///
/// The slot is meant by its number. It may be created after the bitmap, begin and cease to log, and be moved; a slot that
/// is made later under the same number is marked like the first. While there is no such slot, or it does not log, nothing
/// is marked: a VMM that starts to log copies all memory once anyway. Nor is anything marked where pages are logged by rings
/// ([`Vm::enable_dirty_ring`]), which only vCPUs have: there, as with KVM, a VMM tracks its own writes. Of a write that reaches behind the end of the slot,
/// the pages in the slot are marked.
///
/// Clones mark the same log. For a region that has no slot there is vm-memory's own `Option<SlotBitmap<..>>`.
///
/// [`dirty_at`](Bitmap::dirty_at) tells what is marked, as [`Vm::is_marked_dirty`] does.
///
/// It keeps the VM alive. A [`Host::Backing`] should not own the region in turn: both would stay until the slot is deleted.
///
/// # Aborts
/// As any call of the VM, one that runs beside more others than ever before needs memory: about 10 KiB, which later calls
/// use again. If there is none, the process ends by [`handle_alloc_error`]: the trait has no way to tell it, and a page that
/// is missed is a migrated guest with wrong memory.
///
/// # Example
/// ```
/// # use std::alloc::{Layout, alloc, dealloc};
/// # use std::sync::Arc;
/// use slat::*;
/// use vm_memory::mmap::MmapRegionBuilder;
/// use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap, GuestRegionMmap};
/// # struct Kernel;
/// # impl Park for Kernel {
/// #     fn park(&self, _word: &sync::AtomicU32, _expected: u32) {}
/// #     fn unpark_one(&self, _word: *const sync::AtomicU32) -> bool { false }
/// #     fn unpark_all(&self, _word: *const sync::AtomicU32) {}
/// # }
/// # // SAFETY: the heap gives memory that is nobody else's, and no CPU runs on these tables.
/// # unsafe impl Host for Kernel {
/// #     type Backing = HostAddress;
/// #     fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
/// #         // SAFETY: a table's layout is never empty.
/// #         Some(Hpa(unsafe { alloc(layout) } as u64))
/// #     }
/// #     unsafe fn free_table(&self, table: Hpa, layout: Layout) {
/// #         // SAFETY: the engine frees what it allocated.
/// #         unsafe { dealloc(self.table_ptr(table), layout) }
/// #     }
/// #     fn table_ptr(&self, table: Hpa) -> *mut u8 {
/// #         table.0 as *mut u8
/// #     }
/// #     fn resolve(&self, memory: &HostAddress, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Gone> {
/// #         Ok(Resolved { pfn: Pfn(memory.0 / PAGE_SIZE + page), max_size: PageSize::Size4K, writable: true })
/// #     }
/// #     fn flush(&self, _ranges: &[GfnRange]) {}
/// #     fn timestamp_ns(&self) -> u64 { 0 }
/// # }
///
/// /// Where the memory of a slot is in the VMM. The `Host` resolves its pages.
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
    /// The log of slot `slot`, which need not exist yet.
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
        // vm-memory asks for what it has written, so nothing overflows; who does not may mean pages that no slot has.
        let (first_page, last_page) = (page_of(offset), page_of(offset.saturating_add(last)));
        let mut nr_pages = last_page - first_page + 1;
        while nr_pages != 0 {
            match or_abort(self.vm.mark_dirty(self.slot, first_page, nr_pages)) {
                // Fewer pages each time, should one slot after another have this number.
                Err(Error::LogRangePastEnd { slot_pages, .. }) => nr_pages = slot_pages.saturating_sub(first_page),
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

/// An answer of the log; ends the process if there was no memory for it.
fn or_abort<T>(answer: Result<T, Error>) -> Result<T, Error> {
    if let Err(Error::OutOfMemory) = answer {
        handle_alloc_error(Layout::new::<Record>());
    }
    answer
}
