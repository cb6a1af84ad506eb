//! What every operation on a VM works with, so that calls pass one value on.

use crate::addr::GfnRange;
use crate::dirty::rings::Rings;
use crate::format::Format;
use crate::host::Host;
use crate::slot::set::Slots;
use crate::stats::Recorder;
use crate::sync::Side;
use crate::table::retire::{NestedGuard, Participant};
use crate::table::tlb::TlbBatch;
use crate::table::{LockedGuard, Tree};

/// An operation on a VM, by the thread that owns the participant. All of it is of one VM.
pub(crate) struct Operation<'v, H: Host, F: Format> {
    pub(crate) tree: &'v Tree<H, F>,
    pub(crate) slots: &'v Slots<H::Backing>,
    pub(crate) rings: &'v Rings,
    pub(crate) participant: &'v Participant,
}

impl<H: Host, F: Format> Clone for Operation<'_, H, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<H: Host, F: Format> Copy for Operation<'_, H, F> {}

impl<'v, H: Host, F: Format> Operation<'v, H, F> {
    pub(crate) fn host(self) -> &'v H {
        &self.tree.host
    }

    pub(crate) fn stats(self) -> &'v Recorder {
        &self.participant.stats
    }

    /// Opens a guard outside of the VM's lock: to read, to clear A, or where there is no lock.
    #[inline]
    pub(crate) fn pin(self) -> NestedGuard<'v> {
        self.tree.epochs.pin(self.participant)
    }

    /// Opens a guard that changes the page tables, inside the VM's lock if there is one.
    #[inline(always)]
    pub(crate) fn pin_locked(self, side: Side) -> LockedGuard<'v, H> {
        self.tree.pin(self.participant, side)
    }

    pub(crate) fn batch(self) -> TlbBatch<'v, H, F> {
        TlbBatch::new(self.tree, self.participant)
    }

    /// Flushes `ranges` on all CPUs, and before that in derived page tables.
    pub(crate) fn flush(self, ranges: &[GfnRange]) {
        self.tree.flush(self.participant, ranges);
    }
}
