//! Invalidation of a range: for the host that is about to move, free or protect its frames (KVM's
//! MMU notifier), for a memslot that is deleted, moved or given another userfault bitmap, and for
//! pages whose attributes change.
//!
//! # Guarantees
//! After [`Invalidation::new`] no vCPU accesses the range through a translation from before the
//! call. No fault installs a translation there until the value is dropped. Neither side waits for
//! the other.
//!
//! # Use
//! Begin an invalidation, change what backs the range or publish the new memslot set, then drop the
//! [`Invalidation`].
//!
//! # Implementation
//! An invalidation publishes its range, takes an invalidation sequence number, zaps (`zap`), and
//! flushes. Its end withdraws the range.
//!
//! # Why it is correct
//! A fault that reads the ranges in flight after the publication installs nothing in the range. One
//! that read them before loses one exchange at most. `table/invalidation_seq.rs` has the argument.

use core::ptr;

use super::zap::{self, Faults};
use crate::addr::GfnRange;
use crate::error::OutOfMemory;
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::sync::fence_after_rmw;
use crate::table::in_flight::{InFlight, RangesInFlight};

/// A range that was zapped and is in flight. Until this is dropped, no CPU uses a frame of the
/// range, and no fault maps one: faults in the range make the guest try again.
///
/// Keep it in a variable with a name while the pages change: `let _ =` drops it at once. Leaking it
/// leaves the range unusable for good.
#[must_use = "the range is withdrawn when this is dropped"]
pub struct Invalidation<'v>(InFlight<'v>);

impl Invalidation<'_> {
    /// The range in flight.
    pub fn range(&self) -> GfnRange {
        self.0.range()
    }
}

impl core::fmt::Debug for Invalidation<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Invalidation").field("range", &self.range()).finish_non_exhaustive()
    }
}

impl<'v> Invalidation<'v> {
    /// Invalidates `range`, until the value is dropped. `ranges` are those of the tree, borrowed
    /// for longer than `op`.
    #[inline]
    pub(crate) fn new<H: Host, F: Format>(
        ranges: &'v RangesInFlight,
        op: &Operation<'_, H, F>,
        range: GfnRange,
    ) -> Result<Invalidation<'v>, OutOfMemory> {
        Ok(Self::with_pinned(ranges, op, range)?.0)
    }

    /// As [`new`](Self::new); with how many pinned pages were unmapped.
    // Never inlined: a change of a memslot does much else before and after.
    #[inline(never)]
    pub(crate) fn with_pinned<H: Host, F: Format>(
        ranges: &'v RangesInFlight,
        op: &Operation<'_, H, F>,
        range: GfnRange,
    ) -> Result<(Invalidation<'v>, u64), OutOfMemory> {
        debug_assert!(ptr::eq(ranges, &op.tree.in_flight), "the ranges in flight are those of the tree");
        let in_flight = ranges.publish(range)?;
        let seq = op.tree.next_seq();
        // The range is visible before the walk finds any page-table page linked; see
        // `table/invalidation_seq.rs`. A third thread has to agree, which unlinks that page, and a
        // fault makes no fence. So beside this fence it takes multi-copy atomicity: all other CPUs
        // observe a store at once, as on x86, Armv8 and RISC-V
        // (`models/litmus/invalidation.py: invalidation-three-threads`).
        fence_after_rmw();
        let mut batch = op.batch();
        let zapped = zap::zap_range(op, range, seq, Faults::KeptOut, &mut batch);
        // Even if nothing was there: another thread may have emptied a PTE and not flushed yet.
        batch.add(range);
        batch.flush();
        Ok((Invalidation(in_flight), zapped?))
    }
}
