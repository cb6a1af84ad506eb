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
//! A rescan takes an invalidation sequence number, zaps the pages whose bit is set, and flushes
//! them in any case, as an invalidation does. It starts over if the memslot has changed meanwhile.
//!
//! # Why it is correct
//! The order is that of `table/invalidation_seq.rs`. No range is in flight: no memory is moved that
//! a fault could still map, and faults observe the bit instead. User space may clear the bit at any
//! time, and then faults install in the midst of the zap: see [`Faults::MayComeBack`].

use arrayvec::ArrayVec;

use super::zap::{self, Faults};
use crate::addr::{Gfn, GfnRange};
use crate::error::SlotError;
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::slot::userfault::UserfaultBitmap;
use crate::slot::view::SlotView;
use crate::sync::fence_after_rmw;

/// Runs of pages that are found in one guard.
const RUNS_PER_TURN: usize = 32;

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
    let Operation { tree, slots, .. } = op;
    loop {
        let slot_range = {
            let guard = op.pin();
            let slot = slots.by_id(&guard, id).ok_or(SlotError::NoSuchSlot { slot: id })?;
            check_pages(&slot, first_page, nr_pages)?;
            slot.range()
        };
        let pages = GfnRange::new(Gfn(slot_range.start.0 + first_page), nr_pages);
        // Taken after the memslot was read. A fault that found it elsewhere, or with another
        // bitmap, is overtaken by the change of the memslot.
        let seq = tree.next_seq();
        // As in `invalidate`: the bits are visible before the walk finds any page-table page
        // linked.
        fence_after_rmw();
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
            for &run in &runs {
                nr_rescanned += run.nr_pages();
                zap::zap_range(op, run, seq, Faults::MayComeBack, &mut batch);
                batch.add(run);
            }
        };
        drop(batch);
        if done? {
            return Ok(nr_rescanned);
        }
    }
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
