//! Broken PTEs: the owner is between a page-table page and a huge leaf, and no other thread waits
//! for it.
//!
//! # Guarantees
//! After [`cancel`], the PTE that it found is not broken any more. If the owner's work failed, the
//! host was notified of all that the guest did through each leaf behind it.
//!
//! # Use
//! A fault or a zap that needs a broken PTE cancels. An operation that only protects, splits, ages
//! or asks passes it by. Pages that were to be protected are marked instead: the owner reads the
//! memslot's flags after it has made a leaf writable (`models/proofs/recovery_beside_log.py`).
//!
//! # Implementation
//! A broken PTE names a page-table page, which belongs to the owner of the PTE. In a recovery
//! (`recover`) it was linked there, and the owner is freezing its PTEs. In a split with break
//! before make (`split`) it is about to be linked.
//!
//! A cancel
//! 1. freezes each PTE behind a recovery that is not frozen yet, and notifies the host of each
//!    leaf,
//! 2. takes a sequence number,
//! 3. exchanges the broken PTE for an empty one with that number.
//!
//! The owner's exchange then fails, and it retires its page-table page.
//!
//! # Why it is correct
//! Several threads may cancel at once. One exchange succeeds, and by then all is reported.
//!
//! A fault may have walked into the page-table page before the PTE was broken. Hence the freezing,
//! and hence the fresh number.
//!
//! The leaves need no flush: the frames stay the guest's until an invalidation, which flushes. The
//! owner flushes for the page-table page. With break before make the empty PTE is *unflushed*
//! ([`unflushed`](crate::table::invalidation_seq::InvalidationSeq::unflushed)), so that a flush
//! precedes the next make.
//!
//! The owner may retire a page-table page that a cancel still reads inside its guard. The links of
//! the list of retired ones do not look like frozen leaves. The exchange of the cancel fails, for
//! the owner retires only when the PTE is not broken any more.

#![expect(unsafe_code, reason = "reads the tables that broken and frozen entries name")]

use super::zap::mark_dirty;
use crate::addr::{Gfn, Hpa, Level};
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::cursor::Cursor;
use crate::table::node;
use crate::table::pte::{Breaking, Frozen, Pte, State};
use crate::table::pte_ref::Changed;
use crate::table::retire::Guard;
use crate::table::tlb::TlbBatch;

/// A report of leaves to the host and to the dirty log, with their number.
struct ReportZapped<'c, H: Host, F: Format> {
    op: Operation<'c, H, F>,
    guard: &'c Guard<'c>,
    nr_4k: u64,
    nr_2m: u64,
}

/// A PTE that was found broken for the split of a pinned leaf: no fault would bring that leaf back,
/// so such a split is finished and never cancelled.
#[must_use]
pub(crate) struct BrokenPinned<F> {
    value: Pte<F>,
    level: Level,
    gfn: Gfn,
    /// The epoch, read before the PTE. The page-table page that the PTE names is used again only
    /// after it was retired, which ends an epoch: in the same one, this is the same split.
    epoch: u64,
}

impl<F: Format> BrokenPinned<F> {
    /// Flushes, and links the page-table page, unless another thread has done so. Called outside of
    /// guards.
    pub(crate) fn finish<H: Host>(self, op: Operation<'_, H, F>) {
        let BrokenPinned { value, level, gfn, epoch } = self;
        op.flush(&[gfn.block(level)]);
        let locked = op.pin_locked(Side::Read);
        let mut cursor = Cursor::new(op.tree, &locked.guard, gfn);
        let (found, _) = cursor.descend_to(level);
        // The epoch after the PTE: who names the page-table page anew has seen the epoch that its
        // retirement began, and the PTE was read with acquire. Until the exchange it cannot be freed,
        // since this guard has found it.
        if found == value && cursor.level() == level && op.tree.epochs.current() == epoch {
            // SAFETY: it is the page-table page that was filled for this PTE. Every thread links it
            // that finds the PTE broken, and none cancels, so that it is the tree's in any case.
            let _: Result<(), Changed> =
                unsafe { cursor.pte().link(op.stats(), value, Pte::table(value.table_of_broken())) };
        }
    }
}

/// Finishes the split of the pinned leaf of `level` that maps `gfn`, which the caller has broken in
/// an earlier guard.
///
/// Another thread may have linked the page-table page meanwhile. It may then be unlinked and freed,
/// and name the next split of the same leaf, mapped anew, which no flush of this thread serves. So
/// the caller finishes what it finds, as other threads do. Each further round is due to page-table
/// pages that were retired during the flush.
// Its frame is not that of a fault, which splits no pinned leaf.
#[cold]
#[inline(never)]
pub(super) fn finish_pinned<H: Host, F: Format>(op: Operation<'_, H, F>, gfn: Gfn, level: Level) {
    let find = || {
        let locked = op.pin_locked(Side::Read);
        let cursor = find_broken(op, &locked.guard, gfn, level)?;
        let (epoch, value) = load_broken(op, &cursor)?;
        pinned_split(op, &locked.guard, &cursor, value, epoch)
    };
    while let Some(pinned) = find() {
        pinned.finish(op);
    }
}

/// The epoch, and then the cursor's PTE, if that is broken.
fn load_broken<H: Host, F: Format>(op: Operation<'_, H, F>, cursor: &Cursor<'_, H, F>) -> Option<(u64, Pte<F>)> {
    let epoch = op.tree.epochs.current();
    let value = cursor.pte().load();
    (value.state(cursor.level()) == State::Broken).then_some((epoch, value))
}

/// The split under way at the cursor's PTE, which was found broken as `value` after `epoch` was
/// read, if it is that of a pinned leaf.
fn pinned_split<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    guard: &Guard<'_>,
    cursor: &Cursor<'_, H, F>,
    value: Pte<F>,
    epoch: u64,
) -> Option<BrokenPinned<F>> {
    let (level, gfn) = (cursor.level(), cursor.gfn());
    if !F::BREAK_BEFORE_MAKE || value.breaking() != Breaking::Split {
        return None;
    }
    // SAFETY: a broken PTE that was read inside the guard names it.
    let parts = unsafe { node::linked_ptes::<H, F>(op.host(), guard, value.table_of_broken(), level.down()) };
    // Once the page-table page is linked its parts may change, and the PTE is not broken any more.
    let is_pinned = parts.at(0).load().is_pinned();
    is_pinned.then_some(BrokenPinned { value, level, gfn, epoch })
}

/// Cancels what is under way at the cursor's PTE, which was found broken; or returns what must be
/// finished first, outside of the guard.
#[cold]
pub(crate) fn cancel<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    guard: &Guard<'_>,
    cursor: &Cursor<'_, H, F>,
) -> Option<BrokenPinned<F>> {
    let level = cursor.level();
    let (epoch, value) = load_broken(op, cursor)?;
    if let Some(pinned) = pinned_split(op, guard, cursor, value, epoch) {
        return Some(pinned);
    }
    let (table, breaking) = (value.table_of_broken(), value.breaking());
    let mut report = ReportZapped { op, guard, nr_4k: 0, nr_2m: 0 };
    // SAFETY: a broken PTE that was read inside the guard names it.
    unsafe { report.report_and_freeze(table, level.down(), cursor.block().start, breaking) }
    let seq = op.tree.next_seq();
    let seq = if F::BREAK_BEFORE_MAKE { seq.unflushed() } else { seq };
    if cursor.replace(value, Pte::empty(seq)).is_ok() && breaking == Breaking::Recovery {
        cursor.stats().add(Counter::Zapped4K, report.nr_4k);
        cursor.stats().add(Counter::Zapped2M, report.nr_2m);
    }
    None
}

/// Reports what is behind the broken PTE `value` of `level`, for the pages from `start` on, freezes
/// it, and counts the leaves as zapped. Called by the thread that has frozen the PTE itself: it is
/// not linked any more, and the exchange of its owner fails.
///
/// # Safety
/// `value` was read inside the guard from a PTE of `level` of this tree, and is broken.
#[cold]
#[inline(never)]
pub(super) unsafe fn report_frozen<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    guard: &Guard<'_>,
    value: Pte<F>,
    level: Level,
    start: Gfn,
) {
    let (table, breaking) = (value.table_of_broken(), value.breaking());
    let mut report = ReportZapped { op, guard, nr_4k: 0, nr_2m: 0 };
    // SAFETY: as the caller promises.
    unsafe { report.report_and_freeze(table, level.down(), start, breaking) }
    if breaking == Breaking::Split {
        // The parts are not linked: they are still one leaf.
        op.stats().count(Counter::zapped(level));
    } else {
        op.stats().add(Counter::Zapped4K, report.nr_4k);
        op.stats().add(Counter::Zapped2M, report.nr_2m);
    }
}

impl<H: Host, F: Format> ReportZapped<'_, H, F> {
    /// Reports the leaves that the PTEs of `table`, of `level` and for the pages from `start` on,
    /// are or were. In a recovery it freezes these PTEs.
    ///
    /// # Safety
    /// The address of the page-table page was read inside the guard, in a PTE of the level above.
    // In one piece: a PTE that has changed is tried again, from its new state.
    unsafe fn report_and_freeze(&mut self, table: Hpa, level: Level, start: Gfn, breaking: Breaking) {
        // SAFETY: as the caller promises.
        let ptes = unsafe { node::linked_ptes::<H, F>(self.op.host(), self.guard, table, level) };
        for (index, pte) in ptes.iter().enumerate() {
            let gfn = Gfn(start.0 + index as u64 * level.nr_pages());
            let mut value = pte.load();
            loop {
                let state = value.state(level);
                let reported = (self.nr_4k, self.nr_2m);
                if breaking == Breaking::Split && matches!(state, State::Table | State::Broken) {
                    // The page-table page is linked by now, and in use: nothing is left to cancel.
                    return;
                }
                if state == State::Broken {
                    // Before this PTE is frozen: a frozen one does not show what was behind it.
                    let (below, breaking) = (value.table_of_broken(), value.breaking());
                    // SAFETY: `value` is of this page-table page, and was read inside the guard.
                    unsafe { self.report_and_freeze(below, level.down(), gfn, breaking) }
                    if breaking == Breaking::Split {
                        // For the count the parts are still one leaf.
                        (self.nr_4k, self.nr_2m) = (reported.0, reported.1 + 1);
                    }
                }
                // A page-table page that a split was to link stays as it is: its owner may link it
                // yet.
                if breaking == Breaking::Recovery && state != State::Frozen {
                    if let Err(found) = pte.freeze_as_was(value) {
                        value = found;
                        (self.nr_4k, self.nr_2m) = reported;
                        continue;
                    }
                }
                let leaf = match (state, breaking) {
                    (State::Leaf | State::Tracked, _) => value,
                    (State::Table, _) => {
                        let below = value.table_below();
                        // SAFETY: as above.
                        unsafe { self.report_and_freeze(below, level.down(), gfn, Breaking::Recovery) }
                        break;
                    }
                    (State::Frozen, _) => match value.before_freezing(level) {
                        Frozen::Leaf(leaf) => leaf,
                        Frozen::Table(below) => {
                            // SAFETY: as above.
                            unsafe { self.report_and_freeze(below, level.down(), gfn, Breaking::Recovery) }
                            break;
                        }
                        Frozen::Nothing => break,
                    },
                    (State::Empty(_) | State::Broken, _) => break,
                };
                node::report_zapped(self.op.tree, leaf, level, gfn.block(level));
                // The exchange that froze or broke it is over: no CPU sets its dirty bit any more.
                mark_dirty(self.op, self.guard, leaf, level, gfn.block(level));
                match level {
                    Level::L4K => self.nr_4k += 1,
                    _ => self.nr_2m += 1,
                }
                break;
            }
        }
    }
}

/// Adds `table`, a page-table page of frozen PTEs of `level`, and what was linked below it, to
/// `batch`. Only the owner of the broken PTE calls this, once that is not there any more.
///
/// # Safety
/// This thread has broken the PTE that pointed to the page-table page, in a recovery. That PTE is
/// not broken any more and does not point to the page-table page. The batch flushes what the PTE
/// covers.
pub(super) unsafe fn give_up<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    guard: &Guard<'_>,
    table: Hpa,
    level: Level,
    batch: &mut TlbBatch<'_, H, F>,
) {
    if level > Level::L4K {
        // SAFETY: the page-table page is not freed before the batch has it, and that is below.
        for pte in unsafe { node::linked_ptes::<H, F>(op.host(), guard, table, level).iter() } {
            let value = pte.load();
            debug_assert!(value.state(level) == State::Frozen, "a table is given up that is in use");
            if let Frozen::Table(below) = value.before_freezing(level) {
                // SAFETY: as for the page-table page: what was linked below it belongs to the same
                // thread.
                unsafe { give_up(op, guard, below, level.down(), batch) }
            }
        }
    }
    // SAFETY: as the caller promises; all of its PTEs are frozen.
    unsafe { batch.add_unlinked(table) }
}

/// The PTE of `level` for `gfn`, which the caller has broken in an earlier guard. `None`: its
/// page-table page is gone. Then, and if the PTE has another value, it is not broken any more, and
/// all behind it was reported.
///
/// A walk may end at a broken PTE above, which is still to freeze this one: that is cancelled.
#[inline]
pub(super) fn find_broken<'s, H: Host, F: Format>(
    op: Operation<'s, H, F>,
    guard: &'s Guard<'s>,
    gfn: Gfn,
    level: Level,
) -> Option<Cursor<'s, H, F>> {
    loop {
        let mut cursor = Cursor::new(op.tree, guard, gfn);
        let (_, state) = cursor.descend_to(level);
        if cursor.level() == level {
            return Some(cursor);
        }
        if state != State::Broken {
            return None;
        }
        // No split of a pinned leaf: that would have been a leaf when this PTE was below it.
        let pinned = cancel(op, guard, &cursor);
        debug_assert!(pinned.is_none(), "a pinned leaf is split above a PTE that is broken");
    }
}
