//! Taking a range away for the host, which is going to move, free or protect its frames: what KVM's MMU notifier is for.
//!
//! The order is that of `table/stamp.rs`: publish the range, take a stamp, zap, flush; then the host does its work; then
//! withdraw the range. Faults inside come back later as long as it is published. Nobody waits, and faults cannot hold it
//! up: whoever looks after the publishing does not touch the range, and whoever looked before loses one exchange at most.

use super::flush::FlushToken;
use super::zap;
use crate::addr::GfnRange;
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::table::Tree;
use crate::table::published::Published;
use crate::table::retire::Record;

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

/// Takes `range` away.
pub(crate) fn invalidate_range<'v, H: Host, F: Format>(
    tree: &'v Tree<H, F>,
    record: &Record,
    range: GfnRange,
) -> Result<Invalidation<'v>, Error> {
    let published = tree.published.publish(range)?;
    zap_and_flush(tree, record, range);
    Ok(Invalidation { range, _published: published })
}

/// Takes away all that is mapped in `range`, which the caller has published or withdrawn. When it returns, no CPU uses
/// the range, and no fault that looked before will map it.
pub(crate) fn zap_and_flush<H: Host, F: Format>(tree: &Tree<H, F>, record: &Record, range: GfnRange) {
    let stamp = tree.next_stamp();
    let mut token = FlushToken::new();
    zap::zap_range(tree, record, range, stamp, &mut token);
    // Even if nothing was there: a fault or another invalidation may have taken a leaf away and not have flushed yet.
    token.owe(range);
    token.pay(tree, record);
}
