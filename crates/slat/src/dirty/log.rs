//! The protocol of write-protect dirty logging, between faults that mark and a harvest that takes.
//!
//! A fault that made a leaf writable does, in this order: (1) the compare-and-exchange that gives W, (2) a full fence,
//! (3) reads the slot's flags, (4) if the slot logs: marks every page of the leaf, unless marked already.
//!
//! A harvest does: (1) takes the bits of a group of words, (2) a full fence, (3) from the root, clears W in the leaves of
//! the pages taken, where it is set, (4) flushes if it took any bit, (5) hands the bits out.
//!
//! Enabling does: (1) publishes the flag, (2) a full fence, (3) clears W in all leaves of the slot, (4) flushes.
//!
//! So there are two store-load pairs. *Marked already* against *nothing to protect*: if the fault finds the bit still
//! set, the harvest has not taken it yet, so its look at the leaf comes later and finds W. *Does not log* against *no
//! leaf there*: if the fault finds the flag unset, its leaf was there before the enabling looked at it.
//!
//! What is promised: a write before harvest k is reported by k, or, if the fault that opened its page is still in flight
//! then (it has given W and not marked yet, and another vCPU writes through the leaf), by the first harvest that begins
//! after that fault has returned. When all vCPU calls have returned, one harvest is exact.
//!
//! A slot that logs may be moved, and its log moves along. The move marks all of its pages, once the mappings at the old
//! place are gone and flushed: a fault that was about to mark a page there would not find the slot any more. (All pages
//! have another address now, so a migration has to send them again anyway.) A harvest looks up where the slot is after it
//! has taken the bits, so that it protects the leaves that matter.
//!
//! The flush is owed because bits were taken and not because a leaf changed: a leaf that another harvest has just
//! protected may still be cached as writable, and this one must not hand its bit out before that is flushed.

use super::bitmap::{self, PAGES_PER_WORD};
use crate::addr::{Gfn, GfnRange};
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::flush::FlushToken;
use crate::second_stage::protect;
use crate::slot::set::Slots;
use crate::stats::Counter;
use crate::sync::{Side, fence_after_rmw};
use crate::table::Tree;
use crate::table::retire::{Record, Section};
use crate::table::walk::Cursor;

/// Words whose bits are taken before one fence and one walk: as many as the pages of a 2 MiB block fill.
const GROUP_WORDS: usize = 8;
/// Groups harvested in one section, so that a section stays short (16384 pages).
const GROUPS_PER_SECTION: usize = 32;

/// Marks the pages of `block`, for which the caller has just made a leaf writable by compare-and-exchange in `section`,
/// if the slot that has them now logs.
///
/// That is not always the slot that the fault looked at. A slot that took its place over the same frames may have had the
/// very same leaf there. And if the slot was moved away meanwhile, the move has marked all of its pages.
#[inline]
pub(crate) fn mark_if_logging<B>(slots: &Slots<B>, section: &Section<'_>, gfn: Gfn, block: GfnRange) {
    // The store-load pairs of the module: the leaf is writable before flags and bits are read.
    fence_after_rmw();
    let Some(slot) = slots.find(section, gfn) else { return };
    if let Some(log) = slot.log() {
        let pages = block.intersection(slot.range());
        log.mark(pages.start.0 - slot.range().start.0, pages.nr_pages());
    }
}

/// Takes the log of slot `id` into `bitmap`. Returns the number of dirty pages.
pub(crate) fn harvest<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    record: &Record,
    id: u32,
    bitmap: &mut [u64],
) -> Result<u64, Error> {
    let nr_words = {
        let section = tree.epochs.enter(record);
        let slot = slots.by_id(&section, id).ok_or(Error::NoSuchSlot { slot: id })?;
        if slot.log().is_none() {
            return Err(Error::NotLogging { slot: id });
        }
        bitmap::nr_words(slot.range().nr_pages())
    };
    let words = bitmap.len();
    let Some(bitmap) = bitmap.get_mut(..nr_words) else {
        return Err(Error::BitmapTooShort { slot: id, words, needed: nr_words });
    };
    let mut token = FlushToken::new();
    let mut harvested = Harvested::default();
    let mut result = Ok(());
    let mut done = 0;
    while done < nr_words {
        let locked = tree.enter(record, Side::Write);
        match harvest_turn(tree, slots, &locked.section, id, &mut bitmap[done..], done, &mut token, &mut harvested) {
            Ok(words) => done += words,
            Err(error) => {
                result = Err(error);
                break;
            }
        }
        drop(locked);
        if done < nr_words && tree.should_yield() {
            tree.host.yield_now();
        }
    }
    record.stats.add(Counter::Protected, harvested.protected);
    token.pay(tree, record);
    result.map(|()| harvested.pages)
}

#[derive(Default)]
struct Harvested {
    pages: u64,
    protected: u64,
}

/// Harvests words from `first_word` on into `out` in one section, at least one group. Returns how many words.
#[expect(clippy::too_many_arguments, reason = "the state of one loop, passed once")]
fn harvest_turn<H: Host, F: Format>(
    tree: &Tree<H, F>,
    slots: &Slots<H::Backing>,
    section: &Section<'_>,
    id: u32,
    out: &mut [u64],
    first_word: usize,
    token: &mut FlushToken,
    harvested: &mut Harvested,
) -> Result<usize, Error> {
    // The slot is looked up anew in each section: it may have been moved, or have ceased to log, since the last.
    let slot = slots.by_id(section, id).ok_or(Error::NoSuchSlot { slot: id })?;
    let Some(log) = slot.log() else { return Err(Error::NotLogging { slot: id }) };
    let range = slot.range();
    if bitmap::nr_words(range.nr_pages()) != first_word + out.len() {
        // Another slot by the same number.
        return Err(Error::NoSuchSlot { slot: id });
    }
    let mut done = 0;
    for group in out.chunks_mut(GROUP_WORDS).take(GROUPS_PER_SECTION) {
        let mut any = 0;
        for (index, word) in group.iter_mut().enumerate() {
            *word = log.take(first_word + done + index);
            any |= *word;
        }
        if any != 0 {
            // The store-load pair: bits are taken before leaves are looked at.
            fence_after_rmw();
            // Where the slot is, only now: if it was moved since this section began, the pages whose bits were taken may
            // be writable at its new place.
            let now = slots.by_id(section, id).filter(|now| now.is_same_slot(&slot));
            let range = now.map_or(range, |now| now.range());
            let mut cursor = Cursor::new(tree, section, range.start);
            for (index, &mask) in group.iter().enumerate().filter(|(_, mask)| **mask != 0) {
                let first = Gfn(range.start.0 + (first_word + done + index) as u64 * PAGES_PER_WORD);
                harvested.pages += u64::from(mask.count_ones());
                harvested.protected += protect::protect_mask(&mut cursor, first, mask);
                token.owe(GfnRange::new(first, PAGES_PER_WORD).intersection(range));
            }
        }
        done += group.len();
        if tree.should_yield() {
            break;
        }
    }
    Ok(done)
}

#[cfg(all(test, loom))]
#[path = "log_loom.rs"]
mod loom_tests;
