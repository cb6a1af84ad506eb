//! The calls on the dirty log of a memslot: bitmaps, and the marks of the VMM's own writes.

use core::ops::{ControlFlow, Range};

use super::Vm;
use crate::config::ManualProtect;
use crate::dirty::ring::DirtyRing;
use crate::error::LogError;
use crate::format::Format;
use crate::harvest::log::LogCall;
use crate::harvest::mark;
use crate::host::Host;
use crate::table::retire::Participant;

impl<H: Host, F: Format> Vm<H, F> {
    /// Takes the dirty log of memslot `slot` into `bitmap`, and begins a new log. Returns the
    /// number of pages set. With [`ManualProtect`], the log is copied only.
    ///
    /// Page n of the memslot is bit n % 64 of word n / 64. It is set if the guest wrote the page
    /// since the log was last taken. The words are overwritten; those beyond the memslot stay.
    ///
    /// Several threads may get, and clear, the log of one memslot at once. Each page is then
    /// reported to at least one of them.
    ///
    /// Where few pages are dirty, overwriting the bitmap takes most of the time: 32 KiB for each GiB.
    /// [`for_each_dirty`](Vm::for_each_dirty) does without.
    ///
    /// # Errors
    /// [`LogError::NoSuchSlot`], [`LogError::NotLogging`], [`LogError::BitmapTooShort`],
    /// [`LogError::OutOfMemory`], [`LogError::DirtyRingInUse`]. An error loses no mark, unless the
    /// memslot is deleted or ceases to log during the call.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::LOG_DIRTY_PAGES);
    /// let mut vcpu = vm.create_vcpu()?;
    /// for gpa in [0x3008, 0x4_5000] {
    ///     assert_eq!(vcpu.handle_fault(Gpa(gpa), Access::Write)?, Outcome::Resume);
    /// }
    /// let mut bitmap = [0; 4];
    /// assert_eq!(vm.get_dirty_log(0, &mut bitmap)?, 2);
    /// assert_eq!(bitmap, [1 << 3, 1 << (0x45 - 64), 0, 0]);
    /// // A new log has begun.
    /// assert_eq!(vm.get_dirty_log(0, &mut bitmap)?, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn get_dirty_log(&self, slot: u32, bitmap: &mut [u64]) -> Result<u64, LogError> {
        self.get_or_copy(slot, None, bitmap)
    }

    /// As [`get_dirty_log`](Vm::get_dirty_log), for `nr_pages` pages from `first_page` on, which is
    /// bit 0. `first_page` is a multiple of 64. So is `nr_pages`, or the range ends with the
    /// memslot.
    ///
    /// # Errors
    /// Those of [`get_dirty_log`](Vm::get_dirty_log), and [`LogError::UnalignedRange`],
    /// [`LogError::EmptyRange`], [`LogError::RangePastEnd`].
    pub fn get_dirty_log_range(
        &self,
        slot: u32,
        first_page: u64,
        nr_pages: u64,
        bitmap: &mut [u64],
    ) -> Result<u64, LogError> {
        self.get_or_copy(slot, Some((first_page, nr_pages)), bitmap)
    }

    fn get_or_copy(&self, slot: u32, pages: Option<(u64, u64)>, bitmap: &mut [u64]) -> Result<u64, LogError> {
        self.check_uses_bitmaps(slot)?;
        let participant = self.tree.epochs.borrow_participant()?;
        let call = self.log_call(slot, &participant);
        match self.tree.config.manual_protect {
            ManualProtect::Disabled => call.get(pages, bitmap),
            ManualProtect::Enabled | ManualProtect::InitiallySet => call.copy(pages, bitmap),
        }
    }

    /// Takes the dirty log of `nr_pages` pages of memslot `slot` from `first_page` on, begins a new
    /// log for them, and passes the dirty pages to `callback`, as runs of page numbers in the
    /// memslot. Returns how many pages it passed on. With [`ManualProtect`], the log is copied only.
    ///
    /// As [`get_dirty_log_range`](Vm::get_dirty_log_range), without a bitmap: the call takes less
    /// than 6 KiB of the heap, whatever the size of the memslot, and the VM keeps that for the next
    /// call. Its time depends on the dirty pages. (Of the log of clean pages it reads one bit for 64
    /// of them.) The alignment is the same.
    ///
    /// Runs come in ascending order. Each has one page at least; two of them may touch. When
    /// `callback` gets a run, the pages are protected and flushed: it may copy them. It is called
    /// with nothing held, and may call any method of the VM. It delays the rest of the harvest: the
    /// pages behind the runs that it gets are taken some thousand at a time, with one flush.
    ///
    /// If `callback` breaks, or panics, no mark is lost. The runs for which it has returned are
    /// passed on, also the one at which it broke. All others are still in the log, or in it again:
    /// the next harvest reports them. So does a harvest that runs at the same time, or the next
    /// one after both.
    ///
    /// # Errors
    /// Those of [`get_dirty_log_range`](Vm::get_dirty_log_range) but `BitmapTooShort`. If the memslot
    /// is deleted or ceases to log during the call, what was taken is passed on before the error is
    /// returned.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use core::ops::ControlFlow;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::LOG_DIRTY_PAGES);
    /// let mut vcpu = vm.create_vcpu()?;
    /// for page in [3, 4, 5, 69] {
    ///     assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write)?, Outcome::Resume);
    /// }
    /// let mut runs = Vec::new();
    /// let nr_pages = vm.for_each_dirty(0, 0, 256, |pages| {
    ///     runs.push(pages); // Send these pages.
    ///     ControlFlow::Continue(())
    /// })?;
    /// assert_eq!((nr_pages, runs), (4, vec![3..6, 69..70]));
    /// // A new log has begun.
    /// assert_eq!(vm.for_each_dirty(0, 0, 256, |_| ControlFlow::Break(()))?, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn for_each_dirty(
        &self,
        slot: u32,
        first_page: u64,
        nr_pages: u64,
        mut callback: impl FnMut(Range<u64>) -> ControlFlow<()>,
    ) -> Result<u64, LogError> {
        self.check_uses_bitmaps(slot)?;
        let participant = self.tree.epochs.borrow_participant()?;
        let call = self.log_call(slot, &participant);
        match self.tree.config.manual_protect {
            ManualProtect::Disabled => call.for_each((first_page, nr_pages), &mut callback),
            ManualProtect::Enabled | ManualProtect::InitiallySet => {
                call.for_each_copied((first_page, nr_pages), &mut callback)
            }
        }
    }

    /// Clears those marks of `nr_pages` pages from `first_page` on that `bitmap` names (bit 0 is
    /// `first_page`), and logs these pages anew. Returns how many of them were marked.
    ///
    /// Call it before the pages' contents are read: what the guest writes after the call is marked
    /// again. The alignment is that of [`get_dirty_log_range`](Vm::get_dirty_log_range). KVM's
    /// `KVM_CLEAR_DIRTY_LOG`; it works with any [`ManualProtect`].
    ///
    /// # Errors
    /// Those of [`get_dirty_log_range`](Vm::get_dirty_log_range).
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// use slat::dirty::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default().with_manual_protect(ManualProtect::Enabled), MemoryRegionFlags::LOG_DIRTY_PAGES);
    /// let mut vcpu = vm.create_vcpu()?;
    /// assert_eq!(vcpu.handle_fault(Gpa(0x3008), Access::Write)?, Outcome::Resume);
    /// // Getting the log copies it. Clear the pages that are sent next, and then read them.
    /// let mut bitmap = [0; 4];
    /// assert_eq!(vm.get_dirty_log(0, &mut bitmap)?, 1);
    /// assert_eq!(vm.clear_dirty_log(0, 0, 64, &bitmap[..1])?, 1);
    /// assert_eq!(vm.get_dirty_log(0, &mut bitmap)?, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn clear_dirty_log(&self, slot: u32, first_page: u64, nr_pages: u64, bitmap: &[u64]) -> Result<u64, LogError> {
        self.check_uses_bitmaps(slot)?;
        let participant = self.tree.epochs.borrow_participant()?;
        self.log_call(slot, &participant).clear((first_page, nr_pages), bitmap)
    }

    fn log_call<'c>(&'c self, id: u32, participant: &'c Participant) -> LogCall<'c, H, F> {
        LogCall { op: self.operation(participant), id }
    }

    /// Marks `nr_pages` pages from `first_page` on of memslot `slot` in its dirty log, if it has
    /// one. It is for writes that no vCPU of the VM makes, such as those of an emulated device.
    /// Call it after the write.
    ///
    /// # Errors
    /// [`LogError::NoSuchSlot`], [`LogError::EmptyRange`], [`LogError::RangePastEnd`],
    /// [`LogError::OutOfMemory`]. [`LogError::DirtyRingInUse`]: as with KVM, rings take the writes
    /// of vCPUs only, and the VMM records its own.
    ///
    /// # Example
    /// ```
    /// # mod host { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/doc_host.rs")); }
    /// # use host::*;
    /// use slat::*;
    /// # fn main() -> Result<(), Error> {
    /// let vm = vm_with_memory(Config::default(), MemoryRegionFlags::LOG_DIRTY_PAGES);
    /// // A device has written two pages.
    /// vm.mark_dirty(0, 7, 2)?;
    /// let mut bitmap = [0; 4];
    /// assert_eq!((vm.get_dirty_log(0, &mut bitmap)?, bitmap[0]), (2, 0b11 << 7));
    /// # Ok(())
    /// # }
    /// ```
    pub fn mark_dirty(&self, slot: u32, first_page: u64, nr_pages: u64) -> Result<(), LogError> {
        self.check_uses_bitmaps(slot)?;
        let participant = self.tree.epochs.borrow_participant()?;
        mark::mark_pages(self.operation(&participant), slot, first_page, nr_pages)
    }

    /// Whether page `page` of memslot `slot` is marked in its dirty log now.
    ///
    /// # Errors
    /// [`LogError::NoSuchSlot`], [`LogError::NotLogging`], [`LogError::RangePastEnd`],
    /// [`LogError::OutOfMemory`], [`LogError::DirtyRingInUse`].
    pub fn is_marked_dirty(&self, slot: u32, page: u64) -> Result<bool, LogError> {
        self.check_uses_bitmaps(slot)?;
        let participant = self.tree.epochs.borrow_participant()?;
        mark::is_marked(self.operation(&participant), slot, page)
    }

    /// How many pages are marked now in the dirty logs of all memslots. With dirty rings, how many
    /// entries have been pushed and not reset (a page may be there more than once).
    ///
    /// It changes nothing and delays no other call, so it can show the progress of a migration.
    /// Writes that CPUs have recorded in dirty bits or modification logs are not marked before a
    /// harvest.
    ///
    /// # Errors
    /// [`LogError::OutOfMemory`].
    pub fn nr_marked_dirty(&self) -> Result<u64, LogError> {
        if self.rings.are_enabled() {
            return Ok(self.rings.iter().map(DirtyRing::nr_used).sum());
        }
        let participant = self.tree.epochs.borrow_participant()?;
        Ok(mark::nr_marked(self.operation(&participant)))
    }

    fn check_uses_bitmaps(&self, slot: u32) -> Result<(), LogError> {
        if self.rings.are_enabled() { Err(LogError::DirtyRingInUse { slot }) } else { Ok(()) }
    }
}
