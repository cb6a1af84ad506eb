//! The calls that mark pages, and those that count marks: for writes that no fault of a vCPU marks,
//! and to show the progress of a migration. `dirty/log.rs` has the protocol.

use crate::addr::{Gfn, Gpa};
use crate::dirty::log::mark_page_if_logging;
use crate::error::LogError;
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::page_words::{PAGES_PER_WORD, WORDS_PER_TURN};
use crate::sync::full_fence;

/// Pages of as many words as a turn visits.
const PAGES_OF_WORDS: u64 = WORDS_PER_TURN as u64 * PAGES_PER_WORD;

/// Pages that are marked one by one in one guard.
const MARKS_PER_TURN: usize = 1 << 12;

/// Marks the pages that hold the addresses `written`, where their memslots log.
pub(crate) fn mark_written<H: Host, F: Format>(op: Operation<'_, H, F>, written: &[Gpa]) {
    // The store-load pairs of `dirty/log.rs`: a CPU set D, before it or another CPU handed the
    // address over.
    full_fence();
    for written in written.chunks(MARKS_PER_TURN) {
        let guard = op.pin();
        guard.visit(written.len() as u64);
        for gpa in written {
            mark_page_if_logging(op.slots, &guard, None, gpa.gfn());
        }
    }
}

/// Marks `nr_pages` pages from `first_page` on of memslot `id`, which the caller has written, if
/// the memslot logs.
pub(crate) fn mark_pages<H: Host, F: Format>(
    op: Operation<'_, H, F>,
    id: u32,
    first_page: u64,
    nr_pages: u64,
) -> Result<(), LogError> {
    // A store-load pair: the pages are written before "marked already" is read. So the caller of a
    // harvest that takes the bit later observes the writes.
    full_fence();
    let (mut next, mut left) = (first_page, nr_pages);
    loop {
        let guard = op.pin();
        let slot = op.slots.by_id(&guard, id).ok_or(LogError::NoSuchSlot { slot: id })?;
        slot.check_pages(next, left)?;
        let turn = left.min(PAGES_OF_WORDS);
        if let Some(log) = slot.log() {
            guard.visit(turn / PAGES_PER_WORD + 2);
            log.mark(next, turn);
        }
        (next, left) = (next + turn, left - turn);
        if left == 0 {
            return Ok(());
        }
    }
}

/// Returns how many pages are marked in the logs of all memslots. A memslot that is moved meanwhile
/// may be left out, or counted twice.
pub(crate) fn nr_marked<H: Host, F: Format>(op: Operation<'_, H, F>) -> u64 {
    let (mut nr_pages, mut next) = (0, Gfn(0));
    loop {
        let guard = op.pin();
        let Some(slot) = op.slots.find_from(&guard, next) else { return nr_pages };
        let range = slot.range();
        let Some(log) = slot.log() else {
            next = range.end;
            continue;
        };
        let first = (next.0.max(range.start.0) - range.start.0) / PAGES_PER_WORD;
        let words = first as usize..first as usize + WORDS_PER_TURN;
        guard.visit(words.len() as u64);
        next = Gfn(range.start.0 + words.end as u64 * PAGES_PER_WORD).min(range.end);
        nr_pages += log.nr_marked(words);
    }
}

/// Whether page `page` of memslot `id` is marked.
pub(crate) fn is_marked<H: Host, F: Format>(op: Operation<'_, H, F>, id: u32, page: u64) -> Result<bool, LogError> {
    let guard = op.pin();
    let slot = op.slots.by_id(&guard, id).ok_or(LogError::NoSuchSlot { slot: id })?;
    let log = slot.log().ok_or(LogError::NotLogging { slot: id })?;
    slot.check_pages(page, 1)?;
    Ok(log.is_marked(page))
}
