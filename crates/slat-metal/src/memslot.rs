//! The memslot of a [`Ram`]: its flags, its dirty log, and the pages that are withheld from the
//! guest by its userfault bitmap.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use slat::error::SlotError;
use slat::format::Format;
use slat::slots::UserfaultBitmap;
use slat::{GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize};
use spin::Mutex;

use crate::fail;
use crate::host::Backing;
use crate::operations::MetalVm;
use crate::ram::Ram;

/// Zero words.
pub(crate) fn zeros(nr_words: usize) -> Box<[AtomicU64]> {
    (0..nr_words).map(|_| AtomicU64::new(0)).collect()
}

/// The place of a page's bit in a bitmap: the word, and the bit in it.
pub(crate) fn bit(page: u64) -> (usize, u64) {
    (page as usize / 64, 1 << (page % 64))
}

/// The memslot.
pub struct Memslot<F: Format> {
    vm: Arc<MetalVm<F>>,
    slot: u32,
    start: Gpa,
    ram: Arc<Ram>,
    withheld: UserfaultBitmap,
    flags: Mutex<MemoryRegionFlags>,
}

impl<F: Format> Memslot<F> {
    /// Creates memslot `slot` of `ram` at `start`, without any page mapped.
    ///
    /// # Errors
    /// Those of [`Vm::set_user_memory_region`](slat::Vm::set_user_memory_region).
    pub fn new(vm: &Arc<MetalVm<F>>, slot: u32, start: Gpa, ram: &Arc<Ram>) -> Result<Memslot<F>, SlotError> {
        let nr_words = ram.nr_pages().div_ceil(64) as usize;
        let memslot = Memslot {
            vm: vm.clone(),
            slot,
            start,
            ram: ram.clone(),
            withheld: UserfaultBitmap::new(Arc::new(zeros(nr_words)), PageSize::Size4K),
            flags: Mutex::new(MemoryRegionFlags::empty()),
        };
        let region = memslot.region(MemoryRegionFlags::empty());
        vm.set_user_memory_region(MemoryRegion { backing: Some(Backing::Ram(ram.clone())), ..region })?;
        Ok(memslot)
    }

    fn region(&self, flags: MemoryRegionFlags) -> MemoryRegion<Backing> {
        MemoryRegion {
            slot: self.slot,
            flags,
            guest_phys_addr: self.start,
            memory_size: self.ram.nr_pages() * PAGE_SIZE,
            backing: None,
            userfault_bitmap: flags.contains(MemoryRegionFlags::USERFAULT).then(|| self.withheld.clone()),
        }
    }

    /// The VM.
    pub fn vm(&self) -> &MetalVm<F> {
        &self.vm
    }

    /// The memslot's number.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The memory.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }

    /// The frames of `nr_pages` pages from `page` on.
    pub fn range(&self, page: u64, nr_pages: u64) -> GfnRange {
        GfnRange::new(slat::Gfn(self.start.gfn().0 + page), nr_pages)
    }

    /// The address of `page`.
    pub fn gpa(&self, page: u64) -> Gpa {
        Gpa(self.start.0 + page * PAGE_SIZE)
    }

    /// The page of `gpa`, if it is the memslot's.
    pub fn page_of(&self, gpa: Gpa) -> Option<u64> {
        gpa.0.checked_sub(self.start.0).map(|offset| offset / PAGE_SIZE).filter(|&page| page < self.ram.nr_pages())
    }

    /// Its flags now.
    pub fn flags(&self) -> MemoryRegionFlags {
        *self.flags.lock()
    }

    /// Changes its flags. Returns whether it did: another CPU may be at it.
    pub fn set_flags(&self, change: impl FnOnce(MemoryRegionFlags) -> MemoryRegionFlags) -> bool {
        let mut flags = self.flags.lock();
        let new = change(*flags);
        match self.vm.set_user_memory_region(self.region(new)) {
            Ok(()) => {
                *flags = new;
                true
            }
            Err(SlotError::SlotBusy { .. }) => false,
            Err(error) => fail!("the flags of memslot {} could not be changed to {new:?}: {error}", self.slot),
        }
    }

    /// A bitmap with a bit for each page, all of them clear.
    pub fn new_bitmap(&self) -> Vec<u64> {
        vec![0; self.ram.nr_pages().div_ceil(64) as usize]
    }

    /// Takes the dirty log into `bitmap`. Returns the number of pages.
    pub fn take_log(&self, bitmap: &mut [u64]) -> u64 {
        bitmap.fill(0);
        self.vm
            .get_dirty_log(self.slot, bitmap)
            .unwrap_or_else(|error| fail!("the dirty log of memslot {} could not be taken: {error}", self.slot))
    }

    /// Withholds `page` from the guest, as far as it is not mapped, while the memslot has
    /// [`USERFAULT`](MemoryRegionFlags::USERFAULT).
    pub fn withhold(&self, page: u64) {
        let (word, bit) = bit(page);
        // Release: the bit comes after what was done to the page before.
        self.withheld.words()[word].fetch_or(bit, Ordering::Release);
    }

    /// Lets the guest have `page`.
    pub fn bring(&self, page: u64) {
        let (word, bit) = bit(page);
        // Release: what is in the page comes before the cleared bit.
        self.withheld.words()[word].fetch_and(!bit, Ordering::Release);
    }

    /// Whether `page` is withheld.
    pub fn is_withheld(&self, page: u64) -> bool {
        let (word, bit) = bit(page);
        // Acquire: what is in a page that was brought is visible.
        self.withheld.words()[word].load(Ordering::Acquire) & bit != 0
    }
}
