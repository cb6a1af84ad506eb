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
//! - a fault that has marked the page, and not yet the summary above it;
//! - a clear by masks that has cleared a summary, and not yet found what is left below it;
//! - a recovery of huge leaves (`second_stage/recover.rs`), or a split that breaks the leaf first:
//!   a harvest passes over the PTEs that they have broken, and they mark.
//!
//! # Use
//! [`LogCall::get`] takes all marks, [`LogCall::clear`] those that the caller names,
//! [`LogCall::copy`] none. A fault calls [`mark_if_logging`] after its exchange; [`mark_pages`] is
//! for the writes of the VMM itself.
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
//! With [`DirtyTracking::DirtyBit`] and [`DirtyTracking::PageModificationLog`] leaves of 4 KiB keep
//! W, and "W" above reads "D". Before the bitmap is read, [`LogCall::collect`] updates it from the
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
//! ## Logging that ends and begins again
//! A memslot that ceases to log keeps its log. So enabling and disabling again and again, behind a
//! guard that stays open, takes no more memory each time. Enabling clears the old marks before it
//! publishes the flag. Where all bits are set from the beginning, it marks all pages after it has
//! published the flag.
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
//! again anyway, because all have another address. [`mark_pages`] makes a full fence between the
//! caller's writes and its look-up of the memslot. If it marks the old log, a harvest of the new
//! one comes later, and the caller of that harvest observes the writes.
//!
//! A call that found the memslot before its log was disabled may use the log after it was enabled
//! again. If it marks a page, the page is reported although no CPU has written it since: that is
//! harmless. If it takes marks, it protects their pages and hands the marks out, as any harvest
//! does. Until the flag is published, faults may make such a page writable without marking it. But
//! enabling protects or marks all pages after it published the flag.

use core::ops::Range;

use super::bitmap::{self, Bitmap, PAGES_PER_WORD, TakenWords, WORDS_PER_TURN};
use super::ring::{DirtyPage, DirtyRing};
use crate::addr::{Gfn, GfnRange, Gpa, Level};
use crate::boxed::try_zeroed;
use crate::config::{Config, DirtyTracking, ManualProtect};
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::second_stage::protect::Protector;
use crate::second_stage::split;
use crate::shadow::Debt;
use crate::slot::set::Slots;
use crate::slot::view::SlotView;
use crate::sync::{Side, fence_after_rmw, full_fence};
use crate::table::Tree;
use crate::table::cursor::{self, Cursor};
use crate::table::pte::{self, PteRef};
use crate::table::retire::{Epochs, Guard, Participant};
use crate::table::tlb::TlbBatch;

/// Pages whose dirty bits a walk visits in one guard.
const PAGES_PER_TURN: u64 = 1 << 13;

/// Pages that are marked one by one in one guard.
const MARKS_PER_TURN: usize = 1 << 12;

/// Pages of as many words as a turn visits.
const PAGES_OF_WORDS: u64 = WORDS_PER_TURN as u64 * PAGES_PER_WORD;

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
    let Some(slot) = slots.find(guard, gfn) else { return };
    if slot.logs() {
        mark_block(&slot, ring, block);
    }
}

/// As [`mark_if_logging`], for page `gfn` alone.
#[inline]
pub(crate) fn mark_page_if_logging<B>(slots: &Slots<B>, guard: &Guard<'_>, ring: Option<&DirtyRing>, gfn: Gfn) {
    // As in `mark_if_logging`.
    fence_after_rmw();
    let Some(slot) = slots.find(guard, gfn) else { return };
    if slot.logs() {
        mark_page(&slot, ring, gfn.0 - slot.range().start.0);
    }
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

fn push_pages(ring: &DirtyRing, slot: u32, first: u64, nr_pages: u64) {
    for page in first..first + nr_pages {
        ring.push(DirtyPage { slot, page });
    }
}

/// Returns the words of the memslot's log that have the bits of `pages` (first and number; all if
/// `None`). `bitmap_len` is the length, in words, of the caller's bitmap, which must hold them.
fn words_of<B>(
    slot: &SlotView<'_, B>,
    pages: Option<(u64, u64)>,
    id: u32,
    bitmap_len: usize,
) -> Result<Range<usize>, Error> {
    let slot_pages = slot.range().nr_pages();
    let (first_page, nr_pages) = pages.unwrap_or((0, slot_pages));
    slot.check_pages(first_page, nr_pages)?;
    let is_end = first_page + nr_pages == slot_pages;
    if first_page % PAGES_PER_WORD != 0 || !(is_end || nr_pages % PAGES_PER_WORD == 0) {
        return Err(Error::UnalignedLogRange { slot: id, first_page, nr_pages });
    }
    let needed = bitmap::nr_words(nr_pages);
    if bitmap_len < needed {
        return Err(Error::BitmapTooShort { slot: id, words: bitmap_len, needed });
    }
    let first = (first_page / PAGES_PER_WORD) as usize;
    Ok(first..first + needed)
}

/// The memslot as a turn finds it.
struct Found<'s, B> {
    slot: SlotView<'s, B>,
    log: &'s Bitmap,
    /// The words of all pages of the call.
    words: Range<usize>,
    /// The words of this turn, which follow those that are done.
    turn: Range<usize>,
}

/// A call on the log of one memslot.
pub(crate) struct LogCall<'c, H: Host, F: Format> {
    pub(crate) tree: &'c Tree<H, F>,
    pub(crate) slots: &'c Slots<H::Backing>,
    pub(crate) participant: &'c Participant,
    pub(crate) id: u32,
}

impl<H: Host, F: Format> LogCall<'_, H, F> {
    /// Finds the memslot, its log, and the words of the call; `done` of them are done. Each guard
    /// looks them up anew: since the last, the memslot may have been moved or have ceased to log,
    /// or its number may be that of another.
    fn find<'s>(
        &'s self,
        guard: &'s Guard<'s>,
        pages: Option<(u64, u64)>,
        bitmap_len: usize,
        done: usize,
    ) -> Result<Found<'s, H::Backing>, Error> {
        let slot = self.slots.by_id(guard, self.id).ok_or(Error::NoSuchSlot { slot: self.id })?;
        let log = slot.log().ok_or(Error::NotLogging { slot: self.id })?;
        let words = words_of(&slot, pages, self.id, bitmap_len)?;
        if words.len() < done {
            return Err(Error::NoSuchSlot { slot: self.id });
        }
        let start = words.start + done;
        let turn = start..words.end.min(start + WORDS_PER_TURN);
        Ok(Found { slot, log, words, turn })
    }

    /// Takes the log of `pages` (first and number; all if `None`) into `out`, and protects the
    /// pages taken. Returns their number.
    #[inline(never)]
    pub(crate) fn get(&self, pages: Option<(u64, u64)>, out: &mut [u64]) -> Result<u64, Error> {
        let mut taken = try_zeroed()?;
        self.collect(pages, out.len())?;
        self.harvest(
            pages,
            out.len(),
            &mut taken,
            |log, words, _, taken| log.take(words, taken),
            |reached, taken| {
                out[reached.clone()].fill(0);
                for (&offset, &bits) in taken.offsets().iter().zip(taken.bits()) {
                    out[reached.start + usize::from(offset)] = bits;
                }
            },
        )
    }

    /// Copies the log of `pages` into `out`, and changes nothing. Returns the number of pages.
    #[inline(never)]
    pub(crate) fn copy(&self, pages: Option<(u64, u64)>, out: &mut [u64]) -> Result<u64, Error> {
        self.collect(pages, out.len())?;
        let mut nr_pages = 0;
        let mut done = 0;
        loop {
            let guard = self.tree.epochs.pin(self.participant);
            let Found { log, words, turn, .. } = self.find(&guard, pages, out.len(), done)?;
            guard.visit(turn.len() as u64);
            let copied = &mut out[done..done + turn.len()];
            copied.fill(0);
            nr_pages += log.copy(turn.clone(), copied);
            done += turn.len();
            if turn.end == words.end {
                return Ok(nr_pages);
            }
        }
    }

    /// Takes those marks of `pages` that `mask` names, and protects their pages. Returns their
    /// number.
    pub(crate) fn clear(&self, pages: (u64, u64), mask: &[u64]) -> Result<u64, Error> {
        let mut taken = try_zeroed()?;
        let Config { manual_protect, huge_page_logging, .. } = self.tree.config;
        if manual_protect == ManualProtect::InitiallySet && huge_page_logging.splits_eagerly() {
            self.split_for(pages, mask)?;
        }
        self.harvest(
            Some(pages),
            mask.len(),
            &mut taken,
            |log, words, done, taken| log.take_masked(words, &mask[done..], taken),
            |_, _| (),
        )
    }

    /// Splits the huge leaves of those of `pages` that `mask` names, before they are protected for
    /// the first time.
    fn split_for(&self, pages: (u64, u64), mask: &[u64]) -> Result<(), Error> {
        let range = {
            let guard = self.tree.epochs.pin(self.participant);
            let Found { slot, words, .. } = self.find(&guard, Some(pages), mask.len(), 0)?;
            let first = Gfn(slot.range().start.0 + words.start as u64 * PAGES_PER_WORD);
            GfnRange::new(first, words.len() as u64 * PAGES_PER_WORD).intersection(slot.range())
        };
        let is_named = |block: GfnRange| {
            let pages = block.intersection(range);
            let word_of = |gfn: Gfn| (gfn.0 - range.start.0) / PAGES_PER_WORD;
            !pages.is_empty() && {
                let words = word_of(pages.start) as usize..=word_of(Gfn(pages.end.0 - 1)) as usize;
                mask.get(words).is_some_and(|mask| mask.iter().any(|&bits| bits != 0))
            }
        };
        let target = self.tree.config.largest_logged_write();
        // Best effort: the first write splits what is not split now. If the memslot is moved
        // meanwhile, the parts at the old place allow what the whole did.
        let _ = split::split_range(self.tree, self.slots, self.participant, range, target, is_named);
        Ok(())
    }

    /// Takes marks of `pages` by `take`, protects their pages, and hands them to `hand_out`, turn
    /// by turn. Returns the number of pages.
    ///
    /// `take` gets the words that it may take from, and how many are done already. It returns the
    /// first word that it did not reach. `hand_out` gets the words that were reached, counted from
    /// the first of `pages`.
    fn harvest(
        &self,
        pages: Option<(u64, u64)>,
        bitmap_len: usize,
        taken: &mut TakenWords,
        take: impl Fn(&Bitmap, Range<usize>, usize, &mut TakenWords) -> usize,
        mut hand_out: impl FnMut(Range<usize>, &TakenWords),
    ) -> Result<u64, Error> {
        let tree = self.tree;
        let mut nr_pages = 0;
        let mut batch = TlbBatch::new(tree, self.participant);
        let mut write_protected = Debt::new();
        let mut done = 0;
        let result = loop {
            tree.generations.renew_if_low(&tree.epochs, || tree.host.barrier_on_all_cpus());
            let locked = tree.pin(self.participant, Side::Write);
            let Found { slot, log, words, turn } = match self.find(&locked.guard, pages, bitmap_len, done) {
                Ok(found) => found,
                Err(error) => break Err(error),
            };
            taken.clear();
            let reached = take(log, turn.clone(), done, taken);
            locked.guard.visit((reached - turn.start) as u64 + taken.offsets().len() as u64 * PAGES_PER_WORD);
            let mut first = None;
            if !taken.is_empty() {
                first = Some(self.rearm(&locked.guard, &slot, turn.start, taken, &mut batch, &mut nr_pages));
            }
            drop(locked);
            if let (Some(first), Some(mmu)) = (first, tree.mmu(self.participant)) {
                // The second stage first, then the shadow pages made from it. As with the flush, it
                // does not matter which leaves lost W now, and which before.
                mmu.write_protect(taken.pages().map(|page| Gfn(first.0 + page)), &mut write_protected);
            }
            let turn_len = reached - turn.start;
            hand_out(done..done + turn_len, taken);
            done += turn_len;
            if reached == words.end {
                break Ok(());
            }
            if tree.should_yield() {
                tree.host.yield_now();
            }
        };
        batch.flush_cpus();
        if let Some(mmu) = tree.mmu(self.participant) {
            write_protected.settle(&mmu);
        }
        result.map(|()| nr_pages)
    }

    /// Protects the pages of the words just taken, which begin at `first_word` of the log, and adds
    /// their number to `nr_pages`. Returns the page of that word's first bit.
    fn rearm(
        &self,
        guard: &Guard<'_>,
        slot: &SlotView<'_, H::Backing>,
        first_word: usize,
        taken: &TakenWords,
        batch: &mut TlbBatch<'_, H, F>,
        nr_pages: &mut u64,
    ) -> Gfn {
        // The store-load pair: bits are taken before leaves are read.
        fence_after_rmw();
        // Only now: if the memslot was moved since this guard began, the pages whose bits were
        // taken may be writable at its new place.
        let now = self.slots.by_id(guard, self.id).filter(|now| now.is_same_slot(slot));
        let range = now.map_or(slot.range(), |now| now.range());
        let mut protector = Protector::new(self.tree, guard, range);
        let first = Gfn(range.start.0 + first_word as u64 * PAGES_PER_WORD);
        protector.protect(first, taken, batch);
        *nr_pages += protector.finish(self.participant);
        first
    }

    /// Updates the bitmap with the writes to `pages` that the CPUs have recorded.
    fn collect(&self, pages: Option<(u64, u64)>, bitmap_len: usize) -> Result<(), Error> {
        match self.tree.config.dirty_tracking {
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => Ok(()),
            DirtyTracking::DirtyBit => self.mark_dirty_leaves(pages, bitmap_len),
            DirtyTracking::PageModificationLog => {
                // A call that is refused changes nothing: what the CPUs have logged stays for the
                // next call.
                self.find(&self.tree.epochs.pin(self.participant), pages, bitmap_len, 0)?;
                self.tree.host.drain_modification_logs(&mut |written| {
                    mark_written(self.slots, &self.tree.epochs, self.participant, written);
                });
                Ok(())
            }
        }
    }

    /// Marks those of `pages` whose leaves of 4 KiB are dirty.
    fn mark_dirty_leaves(&self, pages: Option<(u64, u64)>, bitmap_len: usize) -> Result<(), Error> {
        let mut done = 0;
        loop {
            let guard = self.tree.epochs.pin(self.participant);
            let Found { slot, log, words, .. } = self.find(&guard, pages, bitmap_len, 0)?;
            let first = words.start as u64 * PAGES_PER_WORD;
            let end = slot.range().nr_pages().min(words.end as u64 * PAGES_PER_WORD);
            let turn_end = end.min(first + done + PAGES_PER_TURN);
            let mut cursor = Cursor::new(self.tree, &guard, slot.range().start);
            let mut next = first + done;
            while next < turn_end {
                guard.visit(Level::L2M.nr_pages());
                next = mark_dirty_in_table(&mut cursor, log, slot.range(), next, end);
            }
            if next >= end {
                return Ok(());
            }
            done = next - first;
            drop(guard);
            if self.tree.host.should_yield() {
                self.tree.host.yield_now();
            }
        }
    }
}

/// Marks the dirty leaves of 4 KiB in one page-table page: that of page `first` of the memslot at
/// `slot`, up to page `end`. Returns the first page behind them.
fn mark_dirty_in_table<H: Host, F: Format>(
    cursor: &mut Cursor<'_, H, F>,
    log: &Bitmap,
    slot: GfnRange,
    first: u64,
    end: u64,
) -> u64 {
    let page_of = |gfn: Gfn| gfn.0 - slot.start.0;
    let gfn = Gfn(slot.start.0 + first);
    cursor.move_to(gfn);
    cursor.descend_to(Level::L2M);
    let behind = page_of(cursor.block().end).min(end);
    if let Some((_, leaves)) = cursor.read_table(Level::L2M) {
        let is_dirty = |page: u64| {
            let index = cursor::index_of::<F>(Gfn(slot.start.0 + page), Level::L4K);
            pte::is_dirty_for_log::<F>(PteRef::new(&leaves[index], Level::L4K).load())
        };
        let mut page = first;
        while page < behind {
            let clean_from = (page..behind).find(|&page| !is_dirty(page)).unwrap_or(behind);
            if clean_from > page {
                // No fence: the leaves were read with acquire. A page that was written again after
                // a harvest took its bit has D only since that harvest cleared D. So the bit is
                // read as clear here.
                log.mark(page, clean_from - page);
            }
            page = clean_from + 1;
        }
    }
    behind
}

/// Marks the pages that hold the addresses `written`, where their memslots log.
pub(crate) fn mark_written<B>(slots: &Slots<B>, epochs: &Epochs, participant: &Participant, written: &[Gpa]) {
    // The store-load pairs of the module: a CPU set D, before it or another CPU handed the address
    // over.
    full_fence();
    for written in written.chunks(MARKS_PER_TURN) {
        let guard = epochs.pin(participant);
        guard.visit(written.len() as u64);
        for gpa in written {
            mark_page_if_logging(slots, &guard, None, gpa.gfn());
        }
    }
}

/// Marks `nr_pages` pages from `first_page` on of memslot `id`, which the caller has written, if
/// the memslot logs.
pub(crate) fn mark_pages<B>(
    slots: &Slots<B>,
    epochs: &Epochs,
    participant: &Participant,
    id: u32,
    first_page: u64,
    nr_pages: u64,
) -> Result<(), Error> {
    // A store-load pair: the pages are written before "marked already" is read. So the caller of a
    // harvest that takes the bit later observes the writes.
    full_fence();
    let (mut next, mut left) = (first_page, nr_pages);
    loop {
        let guard = epochs.pin(participant);
        let slot = slots.by_id(&guard, id).ok_or(Error::NoSuchSlot { slot: id })?;
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
pub(crate) fn nr_marked<B>(slots: &Slots<B>, epochs: &Epochs, participant: &Participant) -> u64 {
    let (mut nr_pages, mut next) = (0, Gfn(0));
    loop {
        let guard = epochs.pin(participant);
        let Some(slot) = slots.find_from(&guard, next) else { return nr_pages };
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
pub(crate) fn is_marked<B>(slots: &Slots<B>, guard: &Guard<'_>, id: u32, page: u64) -> Result<bool, Error> {
    let slot = slots.by_id(guard, id).ok_or(Error::NoSuchSlot { slot: id })?;
    let log = slot.log().ok_or(Error::NotLogging { slot: id })?;
    slot.check_pages(page, 1)?;
    Ok(log.is_marked(page))
}

#[cfg(all(test, loom))]
#[path = "log_loom.rs"]
mod loom_tests;
