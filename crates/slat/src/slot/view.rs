//! A memslot as a guard finds it: its flags, what user space has set for its pages, and how a
//! resolve keeps its backing.

#![expect(unsafe_code, reason = "memslots are reached by raw pointers, which an open guard keeps alive")]

use super::attributes::{MemoryAttributes, PrivatePages};
use super::chunks::{SlotEntry, SlotSet};
use super::region::MemoryRegionFlags;
use super::set::Slot;
use super::userfault::UserfaultBitmap;
use crate::addr::{Access, Gfn, GfnRange, Level, PAGE_SHIFT};
use crate::error::{BadPages, FaultError};
use crate::exit::{Exit, MemoryFaultFlags};
use crate::host::{Host, Resolved, Unresolved};
use crate::slot::bitmap::Bitmap;
use crate::table::retire::{Guard, HazardPointer, Protected};

/// A memslot as found in a guard.
pub(crate) struct SlotView<'s, B> {
    pub(super) entry: &'s SlotEntry<B>,
    pub(super) set: &'s SlotSet<B>,
    pub(super) guard: &'s Guard<'s>,
}

impl<'s, B> SlotView<'s, B> {
    /// Whether `other`, found in the same guard, is the same memslot, wherever it is.
    pub(crate) fn is_same_slot(&self, other: &SlotView<'_, B>) -> bool {
        self.entry.slot == other.entry.slot
    }

    pub(crate) fn range(&self) -> GfnRange {
        self.entry.range
    }

    /// Notes steps in the guard in which the memslot was found.
    pub(crate) fn visit(&self, nr_steps: u64) {
        self.guard.visit(nr_steps);
    }

    pub(crate) fn flags(&self) -> MemoryRegionFlags {
        self.entry.flags
    }

    /// The number of the memslot.
    #[inline]
    pub(crate) fn id(&self) -> u32 {
        self.entry.id
    }

    /// Whether writes are logged.
    #[inline]
    pub(crate) fn logs(&self) -> bool {
        self.entry.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES)
    }

    #[inline]
    pub(crate) fn log(&self) -> Option<&'s Bitmap> {
        // SAFETY: found in an open guard, which is borrowed for 's.
        self.entry.log.filter(|_| self.logs()).map(|log| unsafe { log.as_ref() })
    }

    /// Whether the memslot has neither a userfault bitmap nor a guest_memfd.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        !self.entry.flags.intersects(MemoryRegionFlags::USERFAULT | MemoryRegionFlags::GUEST_MEMFD)
    }

    /// The pages at which faults exit.
    #[inline]
    pub(crate) fn userfault(&self) -> Option<&'s UserfaultBitmap> {
        // SAFETY: as in `log`.
        self.entry.userfault.map(|userfault| unsafe { userfault.as_ref() })
    }

    /// Which pages are private, if the memslot has a guest_memfd.
    #[inline]
    pub(crate) fn private(&self) -> Option<&PrivatePages> {
        // SAFETY: found in an open guard, which `self` borrows.
        unsafe { self.entry.slot.as_ref() }.private.as_deref()
    }

    /// The attributes of page `gfn` of the memslot.
    #[inline]
    pub(crate) fn attributes_of(&self, gfn: Gfn) -> MemoryAttributes {
        self.private().map_or(MemoryAttributes::empty(), |private| private.of(gfn.0 - self.range().start.0))
    }

    /// Whether no userfault bit keeps the guest from page `gfn` of the memslot, so that
    /// [`userfault_exit`](Self::userfault_exit) is `Ok(None)`.
    #[inline]
    pub(crate) fn may_use(&self, gfn: Gfn) -> bool {
        self.userfault().is_none_or(|userfault| userfault.is_set(gfn.0 - self.range().start.0) == Some(false))
    }

    /// The exit of a fault on page `gfn` of the memslot if the page's userfault bit is set. `None`
    /// if the fault may map the page.
    ///
    /// # Errors
    /// [`FaultError::UserfaultBitmapGone`].
    pub(crate) fn userfault_exit(&self, gfn: Gfn) -> Result<Option<Exit>, FaultError> {
        let Some(userfault) = self.userfault() else { return Ok(None) };
        match userfault.is_set(gfn.0 - self.range().start.0) {
            Some(false) => Ok(None),
            Some(true) => {
                let mut flags = MemoryFaultFlags::USERFAULT;
                flags.set(MemoryFaultFlags::PRIVATE, self.attributes_of(gfn).contains(MemoryAttributes::PRIVATE));
                let block = gfn.block(userfault.level());
                let end = block.end.min(self.range().end);
                let size = GfnRange { start: block.start, end }.nr_pages() << PAGE_SHIFT;
                Ok(Some(Exit::MemoryFault { flags, gpa: block.start.gpa(), size }))
            }
            None => Err(FaultError::UserfaultBitmapGone { slot: self.id(), gpa: gfn.gpa() }),
        }
    }

    /// Whether one leaf of `level` may map `block`, by the userfault bitmap and the attributes.
    pub(crate) fn allows_leaf(&self, block: GfnRange, level: Level) -> bool {
        let range = self.range();
        if self.userfault().is_some_and(|userfault| level > userfault.level()) || !range.covers(block) {
            return false;
        }
        self.are_alike(block)
    }

    /// Whether all pages of `block` are in the memslot, and all are private or all shared. For at
    /// most 1 GiB.
    pub(crate) fn are_alike(&self, block: GfnRange) -> bool {
        let range = self.range();
        let Some(private) = self.private().filter(|_| range.covers(block)) else { return range.covers(block) };
        debug_assert!(block.nr_pages() <= Level::L1G.nr_pages());
        self.guard.visit(self.steps_of(block));
        private.are_alike(GfnRange::new(Gfn(block.start.0 - range.start.0), block.nr_pages()))
    }

    /// The most words that a check whether the pages of `block` are alike visits.
    pub(crate) fn steps_of(&self, block: GfnRange) -> u64 {
        self.private().map_or(0, |_| block.nr_pages() / u64::from(u64::BITS) + 1)
    }

    /// Checks that the memslot has `nr_pages` pages, at least one, from its page `first_page` on.
    pub(crate) fn check_pages(&self, first_page: u64, nr_pages: u64) -> Result<(), BadPages> {
        let range = self.range();
        if nr_pages == 0 {
            return Err(BadPages::Empty { start: Gfn(range.start.0.saturating_add(first_page)) });
        }
        match first_page.checked_add(nr_pages) {
            Some(end) if end <= range.nr_pages() => Ok(()),
            _ => Err(BadPages::PastEnd { slot: self.id(), first_page, nr_pages, slot_pages: range.nr_pages() }),
        }
    }

    /// Protects the memslot by `hazard`, so that its backing can be resolved in outside of the
    /// guard.
    pub(crate) fn keep_for_resolve<'r>(&self, hazard: HazardPointer<'r>) -> BackingRef<'r, B> {
        hazard.check_guard(self.guard);
        // SAFETY: the memslot was found in the guard. `set` frees it when no guard can have found
        // it, and then only if no participant of its epochs has it in the hazard pointer. The guard's
        // participant is one of them, and this is its hazard pointer.
        BackingRef(unsafe { hazard.protect(self.entry.slot) })
    }
}

/// The backing of a memslot, outside of the guard in which the memslot was found.
pub(crate) struct BackingRef<'r, B>(Protected<'r, Slot<B>>);

impl<B> BackingRef<'_, B> {
    pub(crate) fn get(&self) -> &B {
        &self.0.get().backing
    }

    /// Asks `host` for page number `page` of the memslot, which is at `gfn` and has `attributes`.
    #[inline]
    pub(crate) fn resolve<H: Host<Backing = B>>(
        &self,
        host: &H,
        attributes: MemoryAttributes,
        gfn: Gfn,
        page: u64,
        access: Access,
    ) -> Result<Resolved, Unresolved>
    where
        B: Send + Sync,
    {
        if attributes.contains(MemoryAttributes::PRIVATE) {
            host.resolve_private(self.get(), gfn, page, access)
        } else {
            host.resolve(self.get(), gfn, page, access)
        }
    }
}
