//! The host's changes of the test region's memory while guests run: it discards pages, moves them,
//! write-protects them, swaps them out. Each change invalidates the pages in the guest by
//! [`Vm::invalidate_range`](slat::Vm::invalidate_range), and is made before the invalidation ends.
//! [`Pages`] describes which errors this detects, and how.
//!
//! A page of the region is mapped at its place in the region's memslots only. Swapping out relies
//! on the engine's reports, so the memslots must stay where they are; their flags may change.

use std::ops::Range;
use std::sync::Arc;

use slat::GfnRange;

use super::{Machine, MachineError, REGION_GPA};
use crate::hardware::walk::HardwareFormat;
use crate::memory::{Effect, Pages, Snapshot};

impl<F: HardwareFormat> Machine<F> {
    /// The test region's pages.
    ///
    /// # Errors
    /// [`MachineError::NoHostEvents`].
    pub fn pages(&self) -> Result<&Arc<Pages>, MachineError> {
        self.region.pages().ok_or(MachineError::NoHostEvents)
    }

    /// Discards the contents of the pages `pages` of the test region: the next access finds zeros.
    ///
    /// # Errors
    /// [`MachineError::NoHostEvents`], [`MachineError::NoSuchPages`], or the engine's: nothing has
    /// changed.
    pub fn discard(&self, pages: Range<u64>) -> Result<(), MachineError> {
        self.event(pages.clone(), |memory, invalidate| memory.discard(pages, invalidate))
    }

    /// Copies page `page` of the test region to another frame.
    ///
    /// # Errors
    /// As for [`discard`](Self::discard).
    pub fn move_page(&self, page: u64) -> Result<Effect, MachineError> {
        self.event(one(page), |memory, invalidate| memory.relocate(page, invalidate))
    }

    /// Write-protects page `page` of the test region in its frame, as if another process shared it:
    /// that is the snapshot. The next write copies the page. Without a snapshot, returns the
    /// reason.
    ///
    /// # Errors
    /// As for [`discard`](Self::discard).
    pub fn protect(&self, page: u64) -> Result<Result<Snapshot, Effect>, MachineError> {
        self.event(one(page), |memory, invalidate| memory.protect(page, invalidate))
    }

    /// Saves page `page` of the test region and frees its frame; the next access brings it back.
    ///
    /// # Errors
    /// As for [`discard`](Self::discard).
    pub fn swap_out(&self, page: u64) -> Result<Effect, MachineError> {
        self.event(one(page), |memory, invalidate| memory.swap_out(page, invalidate))
    }

    /// Invalidates the pages `pages` of the test region in the guest, and changes nothing.
    ///
    /// # Errors
    /// As for [`discard`](Self::discard).
    pub fn invalidate(&self, pages: Range<u64>) -> Result<(), MachineError> {
        self.event(pages.clone(), |memory, invalidate| memory.invalidate(pages, invalidate))
    }

    fn event<T>(
        &self,
        pages: Range<u64>,
        event: impl FnOnce(&Arc<Pages>, &crate::memory::Invalidate<'_>) -> Result<T, slat::error::RangeError>,
    ) -> Result<T, MachineError> {
        let memory = self.pages()?;
        let nr_pages = self.nr_pages();
        if pages.end > nr_pages || pages.start > pages.end {
            return Err(MachineError::NoSuchPages { start: pages.start, end: pages.end, nr_pages });
        }
        let range = self.gfns(pages);
        Ok(event(memory, &|change| self.vm.host().while_invalid(range, change))?)
    }

    /// The guest-physical frames of the pages `pages` of the test region.
    pub fn gfns(&self, pages: Range<u64>) -> GfnRange {
        let first = REGION_GPA.gfn();
        GfnRange { start: slat::Gfn(first.0 + pages.start), end: slat::Gfn(first.0 + pages.end) }
    }
}

/// The range of one page, which may be beyond the end.
fn one(page: u64) -> Range<u64> {
    page..page.saturating_add(1)
}
