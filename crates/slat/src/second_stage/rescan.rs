//! Rescan: zaps the pages whose userfault bit was set after they were mapped, or after a fault has
//! read it.
//!
//! # Guarantees
//! When [`rescan`] returns, no vCPU accesses a page whose bit was set before the call, until user
//! space clears the bit.
//!
//! # Use
//! The bits are visible before the call.
//!
//! # Implementation
//! A rescan finds runs of pages whose bit is set. For each run it publishes the range, takes an
//! invalidation sequence number, zaps the pages, and withdraws the range. It flushes all runs at the
//! end, in any case, as an invalidation does. It starts over if the memslot has changed meanwhile.
//!
//! # Why it is correct
//! The order is that of `table/invalidation_seq.rs`. No memory is moved that a fault could still
//! map, and faults observe the bit. So the range need not stay in flight until the flush. User space
//! may clear the bit at any time, and then faults install before the flush: see
//! [`Faults::MayComeBack`].
//!
//! But during the zap no leaf may come back. The host is notified of a leaf before it is emptied.
//! Meanwhile another call could zap that leaf, and a fault install the very same one again, through
//! which the guest writes. The zap would then empty a leaf of which the host knows nothing
//! (`models/proofs/harvest_beside_zap.py`, rule no-rescan).

use arrayvec::ArrayVec;

use super::zap::{self, Faults};
use crate::addr::{Gfn, GfnRange};
use crate::error::{OutOfMemory, SlotError};
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::slot::userfault::UserfaultBitmap;
use crate::slot::view::SlotView;
use crate::sync::fence_after_rmw;
use crate::table::tlb::TlbBatch;

/// Runs of pages that are found in one guard.
const RUNS_PER_TURN: usize = 16;

/// Words of the bitmap that are read in one guard.
const WORDS_PER_TURN: usize = 4096;

/// Zaps those of `nr_pages` pages from `first_page` on of memslot `id` whose userfault bit is set.
/// Returns their number.
pub(crate) fn rescan<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    id: u32,
    first_page: u64,
    nr_pages: u64,
) -> Result<u64, SlotError> {
    let slots = op.slots;
    loop {
        let slot_range = {
            let guard = op.pin();
            let slot = slots.by_id(&guard, id).ok_or(SlotError::NoSuchSlot { slot: id })?;
            check_pages(&slot, first_page, nr_pages)?;
            slot.range()
        };
        let pages = GfnRange::new(Gfn(slot_range.start.0 + first_page), nr_pages);
        let mut batch = op.batch();
        let mut nr_rescanned = 0;
        let mut next = pages.start;
        let done = loop {
            if next >= pages.end {
                break Ok(true);
            }
            let mut runs = ArrayVec::<GfnRange, RUNS_PER_TURN>::new();
            let guard = op.pin();
            // Moved, deleted or changed meanwhile: start over with what is there now, which may be
            // smaller.
            let found = slots.by_id(&guard, id);
            let Some(slot) = found.filter(|slot| slot.range() == slot_range) else { break Ok(false) };
            let Some(userfault) = slot.userfault() else { break Ok(false) };
            if let Err(gone) = find_runs(&slot, userfault, pages, &mut next, &mut runs) {
                break Err(gone);
            }
            drop(guard);
            if let Err(error) = runs.iter().try_for_each(|&run| zap_run(op, run, &mut batch)) {
                break Err(error.into());
            }
            nr_rescanned += runs.iter().map(|run| run.nr_pages()).sum::<u64>();
        };
        drop(batch);
        if done? {
            return Ok(nr_rescanned);
        }
    }
}

/// Zaps the pages of `run`, which have had their bits set since before the call.
fn zap_run<'t, H: Host, F: Format>(
    op: Operation<'t, H, F>,
    run: GfnRange,
    batch: &mut TlbBatch<'t, H, F>,
) -> Result<(), OutOfMemory> {
    // Until the zap is over; see the module.
    let _in_flight = op.tree.in_flight.publish(run)?;
    // Taken after the memslot was read. A fault that found it elsewhere, or with another bitmap, is
    // overtaken by the change of the memslot.
    let seq = op.tree.next_seq();
    // As in `invalidate`: the range and the bits are visible before the walk finds any page-table
    // page linked.
    fence_after_rmw();
    let zapped = zap::zap_range(&op, run, seq, Faults::MayComeBack, batch);
    batch.add(run);
    zapped.map(drop)
}

fn check_pages<B>(slot: &SlotView<'_, B>, first_page: u64, nr_pages: u64) -> Result<(), SlotError> {
    slot.check_pages(first_page, nr_pages)?;
    if slot.userfault().is_none() { Err(SlotError::NotUserfault { slot: slot.id() }) } else { Ok(()) }
}

/// Finds runs of pages in `pages` from `next` on whose bit is set, as many as one guard takes, and
/// moves `next` on.
fn find_runs<B>(
    slot: &SlotView<'_, B>,
    userfault: &UserfaultBitmap,
    pages: GfnRange,
    next: &mut Gfn,
    runs: &mut ArrayVec<GfnRange, RUNS_PER_TURN>,
) -> Result<(), SlotError> {
    for _ in 0..WORDS_PER_TURN {
        if *next >= pages.end || runs.is_full() {
            break;
        }
        let rest = GfnRange { start: *next, end: pages.end };
        let gone = SlotError::UserfaultBitmapGone { slot: slot.id(), gpa: next.gpa() };
        let (run, end) = userfault.next_run(slot.range(), rest).ok_or(gone)?;
        *next = end;
        match (run, runs.last_mut()) {
            (Some(run), Some(last)) if last.end == run.start => last.end = run.end,
            (Some(run), _) => runs.push(run),
            (None, _) => {}
        }
    }
    Ok(())
}
