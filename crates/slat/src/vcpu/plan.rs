//! The plan of a fault: what its look decided, for its last step to carry out.

use crate::addr::{Access, Gfn, GfnRange, Level};
use crate::config::Config;
use crate::error::FaultError;
use crate::format::{Execute, Format, LeafAttributes};
use crate::host::{Host, Resolved, Unresolved};
use crate::second_stage::install::{NewLeaf, Rights};
use crate::slot::view::BackingRef;
use crate::slot::{MemoryAttributes, MemoryRegionFlags};
use crate::table::Tree;
use crate::table::invalidation_seq::InvalidationSeq;
use crate::table::pte::Pte;

/// What a fault does next, as decided by its look.
pub(super) enum Plan<'r, B, F> {
    /// Nothing: the PTE, of this level, allows the access.
    Spurious(Level),
    /// Set A, and for a write D. The PTE, of this level, allows the access and lacks nothing else.
    SetMarks(Level),
    Exit,
    /// Nothing, until user space has acted.
    UserfaultPending,
    /// The page is in a range in flight.
    BeingInvalidated,
    /// The PTE is broken: abort the recovery or split.
    Cancel,
    /// Ask the host for the frame and install a leaf.
    Install(InstallPlan<'r, B, F>),
    /// Change the leaf that is there; no frame is needed.
    OnLeaf(LeafPlan<F>),
    /// Nothing any more: the look itself has done it.
    Served,
    /// Look at the lowest PTE: the look at the block settles nothing.
    LookLower,
    /// Look again: the PTE changed during the look.
    StartOver,
}

/// What to do about a leaf that does not allow the access.
pub(super) enum LeafPlan<F> {
    /// Restore access through this leaf.
    Restore(Pte<F>),
    /// Split this huge leaf, because smaller pages are logged.
    Split(Pte<F>, Level),
    /// Push down the protected directory entry above the leaf.
    PushDown,
}

/// How far a fault has come.
pub(super) enum Step {
    Done,
    /// Another look is needed.
    Nearer,
}

/// What to install a leaf for, and what the leaf replaces.
pub(super) struct InstallPlan<'r, B, F> {
    pub(super) backing: BackingRef<'r, B>,
    pub(super) slot: GfnRange,
    pub(super) flags: MemoryRegionFlags,
    /// The attributes of the fault's page.
    pub(super) attributes: MemoryAttributes,
    /// Level of the PTE that was found.
    pub(super) level: Level,
    /// The largest leaf that reaches into no range in flight, and that user space allows.
    pub(super) max_level: Level,
    pub(super) found: Found<F>,
    /// What the host has answered, if the look has asked it.
    pub(super) answer: Option<Result<Resolved, Unresolved>>,
}

impl<B: Send + Sync, F: Format> InstallPlan<'_, B, F> {
    /// Asks the host for page `gfn` of the memslot, which has the same attributes as the fault's
    /// page.
    #[inline]
    pub(super) fn resolve<H: Host<Backing = B>>(
        &self,
        host: &H,
        gfn: Gfn,
        access: Access,
    ) -> Result<Resolved, Unresolved> {
        self.backing.resolve(host, self.attributes, gfn, self.page(gfn), access)
    }

    /// Number of a page within the memslot.
    #[inline]
    pub(super) fn page(&self, gfn: Gfn) -> u64 {
        gfn.0 - self.slot.start.0
    }

    /// Whether a leaf that is installed for `access` may be writable at once, if the host allows
    /// it.
    #[inline]
    pub(super) fn may_give_write(&self, access: Access) -> bool {
        access == Access::Write || !self.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES)
    }

    /// The largest leaf for `gfn` that memslot, backing, alignment, logging and ranges in flight
    /// allow. A leaf that may be written has at most `max_opened` pages.
    #[inline(always)]
    pub(super) fn leaf<H: Host<Backing = B>>(
        &self,
        tree: &Tree<H, F>,
        max_opened: u64,
        gfn: Gfn,
        access: Access,
        resolved: Resolved,
    ) -> Result<NewLeaf, FaultError> {
        let (config, encoding) = (&tree.config, &tree.encoding);
        let writes = access == Access::Write;
        let Resolved { pfn, max_size, writable, mut attributes } = resolved;
        if !encoding.has_room_for(pfn) || (writes && !writable) {
            return Err(FaultError::BadResolve { gpa: gfn.gpa() });
        }
        let logs = self.flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES);
        let fits = |level: Level| {
            let same_offset = (pfn.0 ^ gfn.0) & (level.nr_pages() - 1) == 0;
            same_offset
                && self.slot.covers(gfn.block(level))
                && (level.nr_pages() <= max_opened || !self.may_give_write(access))
        };
        let largest = if logs && writes { config.largest_logged_write() } else { Level::L1G };
        let mut level = max_size.level().min(self.max_level).min(largest);
        let keeps_small = config.hardware.splits_on_fetch() && attributes.execute != Execute::None;
        if keeps_small && access.is_fetch() {
            level = Level::L4K;
        }
        while level > Level::L4K && !fits(level) {
            level = level.down();
        }
        let rights = rights(config, self.flags, access, &resolved, level);
        if keeps_small && level > Level::L4K {
            // The first fetch splits it.
            attributes.execute = Execute::None;
        }
        let Some(attributes) = encoding.supported(attributes) else { return Err(unsupported(gfn, attributes)) };
        Ok(NewLeaf { pfn, level, rights, attributes, used: Some(access) })
    }
}

/// What the guest may do through a leaf of `level` that is installed for `access` to a memslot with
/// `flags`.
#[inline(always)]
pub(super) fn rights(
    config: &Config,
    flags: MemoryRegionFlags,
    access: Access,
    resolved: &Resolved,
    level: Level,
) -> Rights {
    if !resolved.writable || flags.contains(MemoryRegionFlags::READONLY) {
        Rights::ReadOnly
    } else if flags.contains(MemoryRegionFlags::LOG_DIRTY_PAGES)
        && access != Access::Write
        && config.first_write_faults(level)
    {
        Rights::WriteProtected
    } else {
        Rights::Writable
    }
}

#[cold]
pub(super) fn unsupported(gfn: Gfn, attributes: LeafAttributes) -> FaultError {
    FaultError::UnsupportedAttributes { gpa: gfn.gpa(), attributes }
}

/// The PTE that does not allow the access, as the look found it.
pub(super) enum Found<F> {
    /// Empty, with this sequence number.
    Empty(InvalidationSeq),
    /// A leaf through which access may be restored.
    Lacking(Pte<F>),
    /// A leaf for which the host did not allow the access when it was installed, and the greatest
    /// sequence number at the time of the look.
    Forbidding(Pte<F>, InvalidationSeq),
}

impl<F> Clone for Found<F> {
    fn clone(&self) -> Found<F> {
        *self
    }
}

impl<F> Copy for Found<F> {}
