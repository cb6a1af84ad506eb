//! Taking a range away: for the host, which is going to move, free or protect its frames (what KVM's MMU notifier is for),
//! for a slot that is deleted, moved or given another userfault bitmap, and for pages whose attributes change.
//!
//! The order is that of `table/stamp.rs`: publish the range, take a stamp, zap, flush; then the host does its work, or the
//! set without the slot is published; then withdraw the range. Faults inside come back later as long as it is published. Nobody waits, and faults cannot hold it
//! up: whoever looks after the publishing does not touch the range, and whoever looked before loses one exchange at most.

use super::zap::{self, Faults};
use crate::addr::GfnRange;
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::slot::set::Slots;
use crate::sync::fence_after_rmw;
use crate::table::Tree;
use crate::table::published::Published;
use crate::table::retire::Record;
use crate::table::tlb::TlbBatch;

/// A range that is taken away from the guest: as long as this lives, no CPU uses a frame of the range, and no fault maps
/// one. Faults inside it make the guest try again.
///
/// Leaking it leaves the range unusable for good.
#[must_use = "the range is given back when this is dropped"]
pub struct Invalidation<'v> {
    range: GfnRange,
    _published: Published<'v>,
}

impl Invalidation<'_> {
    /// The range.
    pub fn range(&self) -> GfnRange {
        self.range
    }
}

impl core::fmt::Debug for Invalidation<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Invalidation").field("range", &self.range).finish_non_exhaustive()
    }
}

impl<'v> Invalidation<'v> {
    /// Takes `range` away.
    pub(crate) fn new<H: Host, F: Format>(
        tree: &'v Tree<H, F>,
        slots: &Slots<H::Backing>,
        record: &Record,
        range: GfnRange,
    ) -> Result<Invalidation<'v>, Error> {
        let published = tree.published.publish(range)?;
        let stamp = tree.next_stamp();
        // The range is visible before the walk finds any table linked; see "Stamps do not only rise" in `table/stamp.rs`.
        // A third thread has to agree (who unlinks the table), and a fault makes no fence: what is relied on beside this
        // one is that a store is seen by all other CPUs at once (multi-copy atomicity), as x86, Armv8 and RISC-V have it.
        fence_after_rmw();
        let mut batch = TlbBatch::new(tree, record);
        zap::zap_range(slots, range, stamp, Faults::KeptOut, &mut batch);
        // Even if nothing was there: another change may have taken a leaf away and not have flushed yet.
        batch.add(range);
        batch.flush();
        Ok(Invalidation { range, _published: published })
    }
}
