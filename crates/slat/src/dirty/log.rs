//! The dirty log of a memslot: faults mark the pages that become writable, and harvests get the
//! marks.
//!
//! To *harvest* is to get, and perhaps clear, the dirty log and to write-protect its pages anew.
//!
//! # Guarantees
//! - A write before a harvest is reported by that harvest. If a call that is about to mark the page
//!   is still under way, the write is reported by the first harvest that begins after that call has
//!   returned.
//! - Of harvests of the same pages that run at once, each page is reported by one at least.
//! - When all calls have returned, one harvest is exact. With page-modification logs it may report
//!   more than was written, never less.
//!
//! These calls may be about to mark:
//! - a fault that has restored W and not marked yet, while another vCPU writes through the leaf;
//! - a fault, a zap, the VMM or another harvest that has marked the page, and not yet the summary
//!   above it;
//! - a clear by masks that has cleared a summary, and not yet found what is left below it;
//! - a call that passes dirty pages to a callback, if that stops or panics: it marks again what it
//!   took and did not pass on (`harvest/each.rs`);
//! - a recovery of huge leaves (`second_stage/recover.rs`), or a split that breaks the leaf first:
//!   a harvest passes over the PTEs that they have broken, and they mark.
//!
//! # Use
//! A fault calls [`mark_if_logging`] after its exchange; The calls
//! that harvest are in `harvest/log.rs`, those that mark what a vCPU did not write through a fault
//! in `harvest/mark.rs`.
//!
//! # Implementation
//! A fault that made a leaf writable
//! 1. restored W by a compare-and-exchange,
//! 2. makes a full fence,
//! 3. reads the flags of the memslot that has the page now,
//! 4. marks every page of the leaf that is not marked already, if the memslot logs.
//!
//! A harvest works in turns, each inside one guard. In a turn it
//! 1. takes the bits of some words,
//! 2. makes a full fence, and looks up where the memslot is now,
//! 3. clears W in the leaves of these pages, from the root, or protects the directory entry above
//!    them (`second_stage/protect.rs`).
//!
//! After all turns it
//!
//! 4. flushes once, if it took any bit,
//! 5. returns, which hands the bits out.
//!
//! Enabling
//! 1. publishes the flag,
//! 2. makes a full fence,
//! 3. clears W in all leaves of the memslot,
//! 4. flushes.
//!
//! Where all bits are set from the beginning, steps 3 and 4 are left to the harvests.
//!
//! ## Rings
//! Where vCPUs have dirty rings (`ring`), memslots have no bitmap. In step 4 a fault pushes its
//! pages into the ring of its vCPU, whatever was pushed before. Enabling is as above.
//!
//! ## Dirty bits of the CPUs
//! With `DirtyTracking::DirtyBit` and `DirtyTracking::PageModificationLog` leaves of 4 KiB keep
//! W, and "W" above reads "D". Before the bitmap is read, the harvest updates it from the
//! leaves whose D is set, or from what the CPUs logged when they set D. D is cleared only after the
//! page's bit was taken. A zap marks the page before it empties a dirty leaf PTE, and once more
//! after that (`second_stage/zap.rs`). So a call that misses the leaf finds the mark: leaves are
//! visited before words are taken.
//!
//! The log of a CPU may name a page that was written before logging began, or name a page twice.
//!
//! ## Slots that move
//! A memslot that logs may be moved. It gets a new log in which all pages are marked, and which
//! takes no memory for that (`bitmap`). The new log is published when the mappings at the old place
//! are zapped and flushed.
//!
//! ## Slots that are resized
//! A memslot that logs and is resized gets a new log in which all pages are marked, too. Only what
//! it loses is zapped: pages that stay may be writable, and are marked.
//!
//! ## Logging that ends and begins again
//! A memslot that ceases to log keeps its log, unless it is resized. So enabling and disabling
//! again and again, behind a guard that stays open, takes no more memory each time. Enabling clears
//! the old marks before it publishes the flag. Where all bits are set from the beginning, it marks
//! all pages after it has published the flag.
//!
//! # Why it is correct
//! Two store-load pairs carry it:
//! - *Marked already* against *nothing to protect*. If the fault finds the bit set, the harvest has
//!   not taken it yet. So the harvest's read of the leaf comes later, and finds W.
//! - *Does not log* against *no leaf there*. If the fault finds the flag unset, its leaf was there
//!   before the enabling visited it.
//!
//! The flush is due because bits were taken, and not because leaves changed. A leaf that another
//! harvest has just protected may still be cached as writable. This harvest must not hand the bit
//! out before that is flushed.
//!
//! A move loses no write to the old place: all pages are marked in the new log. So a fault that was
//! about to mark may find no memslot there, or mark the old log. A migration has to send the pages
//! again anyway, because all have another address. `mark_pages` makes a full fence between the
//! caller's writes and its look-up of the memslot. If it marks the old log, a harvest of the new
//! one comes later, and the caller of that harvest observes the writes.
//!
//! Nor does a resize. If a fault that was about to mark finds the old log, its leaf was writable
//! before the set with the new log was published: the fault's fence stands between the two. So a
//! harvest that takes the mark from the new log, which has had it from the beginning, finds W. A
//! harvest that takes marks from the old log, and hands them out, has protected their pages or not:
//! they are marked in the new log.
//!
//! A call that found the memslot before its log was disabled may use the log after it was enabled
//! again. If it marks a page, the page is reported although no CPU has written it since: that is
//! harmless. If it takes marks, it protects their pages and hands the marks out, as any harvest
//! does. Until the flag is published, faults may make such a page writable without marking it. But
//! enabling protects or marks all pages after it published the flag.

use super::ring::{DirtyPage, DirtyRing};
use crate::addr::{Gfn, GfnRange, Level};
use crate::slot::set::Slots;
use crate::slot::view::SlotView;
use crate::sync::fence_after_rmw;
use crate::table::retire::Guard;

/// Marks the pages of `block`, of which `gfn` is one, if the memslot that has `gfn` now logs. They
/// go into `ring` if the caller's vCPU has one, which must have room for them, else into the
/// memslot's bitmap.
///
/// To be called after the exchange that made a leaf of `block` writable, in the guard of that
/// exchange. A zap of a dirty leaf calls it before its exchange, too.
///
/// The memslot need not be the one that the fault found. Another one that took its place over the
/// same frames may have had the very same leaf there. If the memslot was moved away, the move has
/// marked all of its pages.
#[inline]
pub(crate) fn mark_if_logging<B>(
    slots: &Slots<B>,
    guard: &Guard<'_>,
    ring: Option<&DirtyRing>,
    gfn: Gfn,
    block: GfnRange,
) {
    // The store-load pairs of the module: the leaf is writable before flags and bits are read.
    fence_after_rmw();
    if let Some(slot) = slots.find_logging(guard, gfn) {
        mark_block(&slot, ring, block);
    }
}

/// As [`mark_if_logging`], for page `gfn` alone.
#[inline(always)]
pub(crate) fn mark_page_if_logging<B>(slots: &Slots<B>, guard: &Guard<'_>, ring: Option<&DirtyRing>, gfn: Gfn) {
    // As in `mark_if_logging`.
    fence_after_rmw();
    if let Some(slot) = slots.find_logging(guard, gfn) {
        mark_page(&slot, ring, gfn.0 - slot.range().start.0);
    }
}

/// As [`mark_if_logging`], for the leaf of `level` that has page `gfn`.
#[inline(always)]
pub(crate) fn mark_leaf_if_logging<B>(
    slots: &Slots<B>,
    guard: &Guard<'_>,
    ring: Option<&DirtyRing>,
    gfn: Gfn,
    level: Level,
) {
    if level == Level::L4K {
        mark_page_if_logging(slots, guard, ring, gfn);
    } else {
        mark_if_logging(slots, guard, ring, gfn, gfn.block(level));
    }
}

/// As [`mark_page_if_logging`], where `slot` is the memslot that the caller found in the same guard
/// before its exchange: mostly it is still so.
#[inline(always)]
pub(crate) fn mark_page_of<B>(
    slots: &Slots<B>,
    guard: &Guard<'_>,
    ring: Option<&DirtyRing>,
    slot: &SlotView<'_, B>,
    gfn: Gfn,
) {
    // As in `mark_if_logging`.
    fence_after_rmw();
    if !slots.is_current(slot) {
        mark_page_elsewhere(slots, guard, ring, gfn);
    } else if slot.logs() {
        mark_page(slot, ring, gfn.0 - slot.range().start.0);
    }
}

/// As [`mark_page_if_logging`], without a share in the registers of its caller.
#[cold]
#[inline(never)]
fn mark_page_elsewhere<B>(slots: &Slots<B>, guard: &Guard<'_>, ring: Option<&DirtyRing>, gfn: Gfn) {
    mark_page_if_logging(slots, guard, ring, gfn);
}

/// Marks the pages of `block` that are in `slot`, which logs.
fn mark_block<B>(slot: &SlotView<'_, B>, ring: Option<&DirtyRing>, block: GfnRange) {
    let pages = block.intersection(slot.range());
    let first = pages.start.0 - slot.range().start.0;
    match (ring, slot.log()) {
        (Some(ring), _) => push_pages(ring, slot.id(), first, pages.nr_pages()),
        (None, Some(log)) => log.mark(first, pages.nr_pages()),
        // The caller has no ring, and rings were enabled after its call began.
        (None, None) => {}
    }
}

/// Marks page number `page` of `slot`, which logs.
#[inline]
fn mark_page<B>(slot: &SlotView<'_, B>, ring: Option<&DirtyRing>, page: u64) {
    match (ring, slot.log()) {
        (None, Some(log)) => log.mark_page(page),
        (Some(ring), _) => push_pages(ring, slot.id(), page, 1),
        // As in `mark_block`.
        (None, None) => {}
    }
}

#[inline(never)]
fn push_pages(ring: &DirtyRing, slot: u32, first: u64, nr_pages: u64) {
    for page in first..first + nr_pages {
        ring.push(DirtyPage { slot, page });
    }
}

#[cfg(all(test, loom))]
#[path = "log_loom.rs"]
mod loom_tests;
