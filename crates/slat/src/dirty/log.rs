//! The protocol of the dirty log, between faults that mark and a harvest that takes.
//!
//! A fault that made a leaf writable does, in this order: (1) the compare-and-exchange that gives W, (2) a full fence,
//! (3) reads the slot's flags, (4) if the slot logs: marks every page of the leaf, unless marked already.
//!
//! A harvest does, turn by turn: (1) takes the bits of some words, (2) a full fence, (3) from the root, clears W in the
//! leaves of the pages taken, where it is set, or closes the entry above them (`second_stage/protect.rs`), (4) flushes if it
//! took any bit, (5) hands the bits out. It takes all bits ([`LogCall::get`]) or those that
//! the caller names ([`LogCall::clear`]).
//!
//! Enabling does: (1) publishes the flag, (2) a full fence, (3) clears W of all leaves of the slot, (4) flushes. Where all
//! bits are set from the beginning, that is left to the harvests.
//!
//! So there are two store-load pairs. *Marked already* against *nothing to protect*: if the fault finds the bit still
//! set, the harvest has not taken it yet, so its look at the leaf comes later and finds W. *Does not log* against *no
//! leaf there*: if the fault finds the flag unset, its leaf was there before the enabling looked at it.
//!
//! What is promised: a write before harvest k is reported by k, or, if a call that is about to mark its page is still in
//! flight then, by the first harvest that begins after that call has returned. (A fault that has given W and not marked yet,
//! while another vCPU writes through the leaf; or who has marked the page and not the summary above it yet; or a
//! clear by masks that is taking the last marks beside it.) Of harvests of
//! the same pages that run at once, each page is reported by one at least. When all calls have returned, one harvest is
//! exact. (A recovery of huge leaves, `second_stage/recover.rs`, is such a call, and so is a split that breaks the leaf first: a
//! harvest passes by what it has broken, and it marks.)
//!
//! # Dirty bits of the CPUs
//! With [`DirtyTracking::DirtyBit`] and [`DirtyTracking::PageModificationLog`] leaves of 4 KiB keep W, and above read "D" for
//! "W". The bitmap is brought up to date before it is read ([`LogCall::collect`]): from the leaves whose D is set, or from what the
//! CPUs have logged when they set it. D itself is cleared only after the page's bit was taken. A zap marks the page before
//! it takes a dirty leaf away, so whoever misses the leaf finds the mark: leaves are visited before words are taken.
//!
//! (A log of a CPU may name a page that was written before logging began, or name it twice: with modification logs more may
//! be reported than was written, never less.)
//!
//! # Slots that move
//! A slot that logs may be moved. At its new place it has a new log, in which all pages are marked; that is published when
//! the mappings at the old place are gone and flushed. So what was written there is marked, although a fault that was about
//! to mark a page there finds no slot any more, or marks it in the old log. (All pages have another address now, so a
//! migration has to send them again anyway.) A new log costs less than marks in the old one: what is marked at first takes
//! no memory (`bitmap`). A harvest looks up where the slot is after it has taken the bits, so that it protects the leaves
//! that matter. [`mark_pages`] makes a full fence between what the caller has written and its look for the slot: if it
//! marks the old log, a harvest of the new one comes later, and the caller of that sees what was written.
//!
//! # Logging that ends and begins again
//! A slot keeps its log when it ceases to log: so one that begins and ends to log again and again,
//! behind a section that stays open, takes no more memory each time. Enabling clears the marks of
//! the last time before it publishes the flag; where all bits are set from the beginning, it marks
//! all pages after it has published the flag.
//!
//! A call that found the slot in the last time may still use the log. If it marks a page then, the
//! page is reported although no CPU has written it since: no harm. If it takes marks, it re-arms
//! their pages and hands them out, as any harvest. Before the flag is published, faults could open
//! such a page again and not mark it; but enabling protects all pages after that, or marks them.
//!
//! # Rings
//! Where vCPUs have dirty rings (`ring`), slots have no bitmap, and a fault that made a leaf writable pushes its pages
//! into its vCPU's ring at (4), whatever was pushed before. Enabling is as above.
//!
//! # Flushes
//! The flush is owed because bits were taken and not because a leaf changed: a leaf that another harvest has just
//! protected may still be cached as writable, and this one must not hand its bit out before that is flushed.

use core::ops::Range;

use super::bitmap::{self, Bitmap, PAGES_PER_WORD, TakenWords, WORDS_PER_TURN};
use super::ring::{DirtyPage, DirtyRing};
use crate::addr::{Gfn, GfnRange, Gpa, Level};
use crate::boxed::try_zeroed;
use crate::config::{Config, DirtyTracking, HugePageSplitting, ManualProtect};
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
use crate::table::entry::{self, EntryRef};
use crate::table::retire::{Epochs, Record, Section};
use crate::table::tlb::TlbBatch;
use crate::table::walk::{self, Cursor};

/// Pages whose dirty bits are looked at before a walk leaves its section for a while.
const PAGES_PER_TURN: u64 = 1 << 13;

/// Pages that are marked one by one before the section is left for a while.
const MARKS_PER_TURN: usize = 1 << 12;

/// Pages of as many words as a turn looks at.
const PAGES_OF_WORDS: u64 = WORDS_PER_TURN as u64 * PAGES_PER_WORD;

/// Marks the pages of `block`, for which the caller has just made a leaf writable by compare-and-exchange in `section`,
/// if the slot that has them now logs: in `ring` if the caller's vCPU has one, which has room for them, else in the slot's
/// bitmap.
///
/// That is not always the slot that the fault looked at. A slot that took its place over the same frames may have had the
/// very same leaf there. And if the slot was moved away meanwhile, the move has marked all of its pages.
#[inline]
pub(crate) fn mark_if_logging<B>(
    slots: &Slots<B>,
    section: &Section<'_>,
    ring: Option<&DirtyRing>,
    gfn: Gfn,
    block: GfnRange,
) {
    // The store-load pairs of the module: the leaf is writable before flags and bits are read.
    fence_after_rmw();
    let Some(slot) = slots.find(section, gfn) else { return };
    if slot.logs() {
        mark_block(&slot, ring, block);
    }
}

/// As [`mark_if_logging`], for page `gfn` alone.
#[inline]
pub(crate) fn mark_page_if_logging<B>(slots: &Slots<B>, section: &Section<'_>, ring: Option<&DirtyRing>, gfn: Gfn) {
    // As there.
    fence_after_rmw();
    let Some(slot) = slots.find(section, gfn) else { return };
    if slot.logs() {
        mark_page(&slot, ring, gfn.0 - slot.range().start.0);
    }
}

/// Marks the pages of `block`, as far as they are in `slot`, which logs.
fn mark_block<B>(slot: &SlotView<'_, B>, ring: Option<&DirtyRing>, block: GfnRange) {
    let pages = block.intersection(slot.range());
    let first = pages.start.0 - slot.range().start.0;
    match (ring, slot.log()) {
        (Some(ring), _) => push_pages(ring, slot.id(), first, pages.nr_pages()),
        (None, Some(log)) => log.mark(first, pages.nr_pages()),
        // Rings came to the VM since this call of somebody who has none began.
        (None, None) => {}
    }
}

/// Marks page number `page` of `slot`, which logs.
#[inline]
fn mark_page<B>(slot: &SlotView<'_, B>, ring: Option<&DirtyRing>, page: u64) {
    match (ring, slot.log()) {
        (None, Some(log)) => log.mark_page(page),
        (Some(ring), _) => push_pages(ring, slot.id(), page, 1),
        // As above.
        (None, None) => {}
    }
}

fn push_pages(ring: &DirtyRing, slot: u32, first: u64, nr_pages: u64) {
    for page in first..first + nr_pages {
        ring.push(DirtyPage { slot, page });
    }
}

/// The words of a slot's log that belong to `pages` (first and number; all if `None`), if a bitmap of `bitmap_len` words
/// can hold them.
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

/// The slot as a turn finds it.
struct Found<'s, B> {
    slot: SlotView<'s, B>,
    log: &'s Bitmap,
    /// The words that are meant.
    words: Range<usize>,
    /// Those of this turn, behind the ones that are done.
    turn: Range<usize>,
}

/// The log of one slot, as one call uses it.
pub(crate) struct LogCall<'c, H: Host, F: Format> {
    pub(crate) tree: &'c Tree<H, F>,
    pub(crate) slots: &'c Slots<H::Backing>,
    pub(crate) record: &'c Record,
    pub(crate) id: u32,
}

impl<H: Host, F: Format> LogCall<'_, H, F> {
    /// The slot, its log, and the words of it that are meant. They are looked up anew in each section: the slot may have
    /// been moved, or have ceased to log, or be another by the same number, since the last.
    fn find<'s>(
        &'s self,
        section: &'s Section<'s>,
        pages: Option<(u64, u64)>,
        bitmap_len: usize,
        done: usize,
    ) -> Result<Found<'s, H::Backing>, Error> {
        let slot = self.slots.by_id(section, self.id).ok_or(Error::NoSuchSlot { slot: self.id })?;
        let log = slot.log().ok_or(Error::NotLogging { slot: self.id })?;
        let words = words_of(&slot, pages, self.id, bitmap_len)?;
        if words.len() < done {
            return Err(Error::NoSuchSlot { slot: self.id });
        }
        let start = words.start + done;
        let turn = start..words.end.min(start + WORDS_PER_TURN);
        Ok(Found { slot, log, words, turn })
    }

    /// Takes the log of `pages` (first and number; all if `None`) into `out`, and re-arms it. Returns the number of pages.
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
            let section = self.tree.epochs.enter(self.record);
            let Found { log, words, turn, .. } = self.find(&section, pages, out.len(), done)?;
            section.visit(turn.len() as u64);
            let copied = &mut out[done..done + turn.len()];
            copied.fill(0);
            nr_pages += log.copy(turn.clone(), copied);
            done += turn.len();
            if turn.end == words.end {
                return Ok(nr_pages);
            }
        }
    }

    /// Takes those marks of `pages` that `mask` names, and re-arms them. Returns how many there were.
    pub(crate) fn clear(&self, pages: (u64, u64), mask: &[u64]) -> Result<u64, Error> {
        let mut taken = try_zeroed()?;
        let Config { manual_protect, huge_page_splitting, .. } = self.tree.config;
        if manual_protect == ManualProtect::InitiallySet && huge_page_splitting == HugePageSplitting::Eager {
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

    /// Splits the huge leaves of those of `pages` that `mask` names, before they are protected for the first time.
    fn split_for(&self, pages: (u64, u64), mask: &[u64]) -> Result<(), Error> {
        let range = {
            let section = self.tree.epochs.enter(self.record);
            let Found { slot, words, .. } = self.find(&section, Some(pages), mask.len(), 0)?;
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
        // Best effort: what is not split now is split by the first write. And if the slot is moved meanwhile, what is split
        // where it was says the same as before.
        let _ = split::split_range(self.tree, self.slots, self.record, range, target, is_named);
        Ok(())
    }

    /// Takes marks of `pages` by `take`, re-arms their pages, and hands them to `hand_out`, turn by turn. Returns the number
    /// of pages.
    ///
    /// `take` is told the words that it may take from, and how many are done already; it returns the first that it did not
    /// reach. `hand_out` is told which words, counted from the first of `pages`, were reached.
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
        let mut batch = TlbBatch::new(tree, self.record);
        let mut narrowed = Debt::new();
        let mut done = 0;
        let result = loop {
            tree.generations.renew_if_low(&tree.epochs, || tree.host.barrier_on_all_cpus());
            let locked = tree.enter(self.record, Side::Write);
            let Found { slot, log, words, turn } = match self.find(&locked.section, pages, bitmap_len, done) {
                Ok(found) => found,
                Err(error) => break Err(error),
            };
            taken.clear();
            let reached = take(log, turn.clone(), done, taken);
            locked.section.visit((reached - turn.start) as u64 + taken.offsets().len() as u64 * PAGES_PER_WORD);
            let mut first = None;
            if !taken.is_empty() {
                first = Some(self.rearm(&locked.section, &slot, turn.start, taken, &mut batch, &mut nr_pages));
            }
            drop(locked);
            if let (Some(first), Some(mmu)) = (first, tree.mmu(self.record)) {
                // The second stage first, then what was made of it. Whatever leaves have lost W, and before: as with the flush.
                mmu.write_protect(taken.pages().map(|page| Gfn(first.0 + page)), &mut narrowed);
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
        if let Some(mmu) = tree.mmu(self.record) {
            narrowed.settle(&mmu);
        }
        result.map(|()| nr_pages)
    }

    /// Protects the pages of the words just taken, from `first_word` of the log on, and counts them. Returns the page of the
    /// word's first bit.
    fn rearm(
        &self,
        section: &Section<'_>,
        slot: &SlotView<'_, H::Backing>,
        first_word: usize,
        taken: &TakenWords,
        batch: &mut TlbBatch<'_, H, F>,
        nr_pages: &mut u64,
    ) -> Gfn {
        // The store-load pair: bits are taken before leaves are looked at.
        fence_after_rmw();
        // Where the slot is, only now: if it was moved since this section began, the pages whose bits were taken may be
        // writable at its new place.
        let now = self.slots.by_id(section, self.id).filter(|now| now.is_same_slot(slot));
        let range = now.map_or(slot.range(), |now| now.range());
        let mut protector = Protector::new(self.tree, section, range);
        let first = Gfn(range.start.0 + first_word as u64 * PAGES_PER_WORD);
        protector.protect(first, taken, batch);
        *nr_pages += protector.finish(self.record);
        first
    }

    /// Brings the bitmap up to date with what the CPUs know of `pages`.
    fn collect(&self, pages: Option<(u64, u64)>, bitmap_len: usize) -> Result<(), Error> {
        match self.tree.config.dirty_tracking {
            DirtyTracking::WriteProtect(_) => Ok(()),
            DirtyTracking::DirtyBit => self.mark_dirty_leaves(pages, bitmap_len),
            DirtyTracking::PageModificationLog => {
                // A call that is refused changes nothing: what the CPUs have logged is for the next.
                self.find(&self.tree.epochs.enter(self.record), pages, bitmap_len, 0)?;
                self.tree.host.drain_modification_logs(&mut |written| {
                    mark_written(self.slots, &self.tree.epochs, self.record, written);
                });
                Ok(())
            }
        }
    }

    /// Marks those of `pages` whose leaves of 4 KiB are dirty.
    fn mark_dirty_leaves(&self, pages: Option<(u64, u64)>, bitmap_len: usize) -> Result<(), Error> {
        let mut done = 0;
        loop {
            let section = self.tree.epochs.enter(self.record);
            let Found { slot, log, words, .. } = self.find(&section, pages, bitmap_len, 0)?;
            let first = words.start as u64 * PAGES_PER_WORD;
            let end = slot.range().nr_pages().min(words.end as u64 * PAGES_PER_WORD);
            let turn_end = end.min(first + done + PAGES_PER_TURN);
            let mut cursor = Cursor::new(self.tree, &section, slot.range().start);
            let mut next = first + done;
            while next < turn_end {
                section.visit(Level::L2M.nr_pages());
                next = mark_dirty_in_table(&mut cursor, log, slot.range(), next, end);
            }
            if next >= end {
                return Ok(());
            }
            done = next - first;
            drop(section);
            if self.tree.host.should_yield() {
                self.tree.host.yield_now();
            }
        }
    }
}

/// Marks the dirty leaves of 4 KiB in one table: the one of page `first` of the slot at `slot`, up to page `end`. Returns the
/// first page behind them.
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
            let index = walk::index_of::<F>(Gfn(slot.start.0 + page), Level::L4K);
            entry::is_dirty_for_log::<F>(EntryRef::new(&leaves[index], Level::L4K).load())
        };
        let mut page = first;
        while page < behind {
            let clean_from = (page..behind).find(|&page| !is_dirty(page)).unwrap_or(behind);
            if clean_from > page {
                // No fence: the leaves were read with acquire. If a page was written anew since a harvest took its bit, its
                // leaf says so only since that harvest cleared it, and the bit is read as clear here.
                log.mark(page, clean_from - page);
            }
            page = clean_from + 1;
        }
    }
    behind
}

/// Marks the pages that hold the addresses `written`, as far as their slots log.
pub(crate) fn mark_written<B>(slots: &Slots<B>, epochs: &Epochs, record: &Record, written: &[Gpa]) {
    // The store-load pairs of the module: it was a CPU that set D, before it or another handed the address over.
    full_fence();
    for written in written.chunks(MARKS_PER_TURN) {
        let section = epochs.enter(record);
        section.visit(written.len() as u64);
        for gpa in written {
            mark_page_if_logging(slots, &section, None, gpa.gfn());
        }
    }
}

/// Marks `nr_pages` pages from `first_page` on of slot `id`, which the caller has written, if it logs.
pub(crate) fn mark_pages<B>(
    slots: &Slots<B>,
    epochs: &Epochs,
    record: &Record,
    id: u32,
    first_page: u64,
    nr_pages: u64,
) -> Result<(), Error> {
    // A store-load pair: the pages are written before "marked already" is read, so that a harvest which takes the bit later
    // hands it to somebody who then sees the writes.
    full_fence();
    let (mut next, mut left) = (first_page, nr_pages);
    loop {
        let section = epochs.enter(record);
        let slot = slots.by_id(&section, id).ok_or(Error::NoSuchSlot { slot: id })?;
        slot.check_pages(next, left)?;
        let turn = left.min(PAGES_OF_WORDS);
        if let Some(log) = slot.log() {
            section.visit(turn / PAGES_PER_WORD + 2);
            log.mark(next, turn);
        }
        (next, left) = (next + turn, left - turn);
        if left == 0 {
            return Ok(());
        }
    }
}

/// How many pages are marked in the logs of all slots. One that is moved meanwhile may be left out,
/// or counted twice.
pub(crate) fn nr_marked<B>(slots: &Slots<B>, epochs: &Epochs, record: &Record) -> u64 {
    let (mut nr_pages, mut next) = (0, Gfn(0));
    loop {
        let section = epochs.enter(record);
        let Some(slot) = slots.find_from(&section, next) else { return nr_pages };
        let range = slot.range();
        let Some(log) = slot.log() else {
            next = range.end;
            continue;
        };
        let first = (next.0.max(range.start.0) - range.start.0) / PAGES_PER_WORD;
        let words = first as usize..first as usize + WORDS_PER_TURN;
        section.visit(words.len() as u64);
        next = Gfn(range.start.0 + words.end as u64 * PAGES_PER_WORD).min(range.end);
        nr_pages += log.nr_marked(words);
    }
}

/// Whether page `page` of slot `id` is marked.
pub(crate) fn is_marked<B>(slots: &Slots<B>, section: &Section<'_>, id: u32, page: u64) -> Result<bool, Error> {
    let slot = slots.by_id(section, id).ok_or(Error::NoSuchSlot { slot: id })?;
    let log = slot.log().ok_or(Error::NotLogging { slot: id })?;
    slot.check_pages(page, 1)?;
    Ok(log.is_marked(page))
}

#[cfg(all(test, loom))]
#[path = "log_loom.rs"]
mod loom_tests;
