//! The calls that get, copy and clear the dirty log of a memslot.
//!
//! [`LogCall::get`] takes all marks, [`LogCall::clear`] those that the caller names,
//! [`LogCall::copy`] none. `each` has the call that needs no bitmap. `dirty/log.rs` has the protocol
//! between them and the faults.

use core::ops::{ControlFlow, Range};

use crate::addr::{Gfn, GfnRange, Level};
use crate::config::{Config, DirtyTracking, ManualProtect};
use crate::error::LogError;
use crate::format::Format;
use crate::harvest::mark::mark_written;
use crate::host::Host;
use crate::operation::Operation;
use crate::page_words::{PAGES_PER_WORD, TakenWords, WORDS_PER_TURN};
use crate::second_stage::protect::Protector;
use crate::second_stage::split::{self, Leaves};
use crate::slot::bitmap::{self, Bitmap};
use crate::slot::view::SlotView;
use crate::sync::{Side, fence_after_rmw};
use crate::table::cursor::{self, Cursor};
use crate::table::pte::Pte;
use crate::table::retire::Guard;
use crate::table::tlb::TlbBatch;

/// Pages whose dirty bits a walk visits in one guard.
const PAGES_PER_TURN: u64 = 1 << 13;

/// Leaves that are looked at together for D: those of a cache line.
const LEAVES_PER_LOOK: usize = 8;

/// Returns the words of the memslot's log that have the bits of `pages` (first and number; all if
/// `None`). `bitmap_len` is the length, in words, of the caller's bitmap, which must hold them.
fn words_of<B>(
    slot: &SlotView<'_, B>,
    pages: Option<(u64, u64)>,
    id: u32,
    bitmap_len: usize,
) -> Result<Range<usize>, LogError> {
    let slot_pages = slot.range().nr_pages();
    let (first_page, nr_pages) = pages.unwrap_or((0, slot_pages));
    slot.check_pages(first_page, nr_pages)?;
    let is_end = first_page + nr_pages == slot_pages;
    if first_page % PAGES_PER_WORD != 0 || !(is_end || nr_pages % PAGES_PER_WORD == 0) {
        return Err(LogError::UnalignedRange { slot: id, first_page, nr_pages });
    }
    let needed = bitmap::nr_words(nr_pages);
    if bitmap_len < needed {
        return Err(LogError::BitmapTooShort { slot: id, words: bitmap_len, needed });
    }
    let first = (first_page / PAGES_PER_WORD) as usize;
    Ok(first..first + needed)
}

/// The memslot as a turn finds it.
pub(super) struct Found<'s, B> {
    slot: SlotView<'s, B>,
    pub(super) log: &'s Bitmap,
    /// The words of all pages of the call.
    pub(super) words: Range<usize>,
    /// The words of this turn, which follow those that are done.
    pub(super) turn: Range<usize>,
}

/// What gets the marks that a harvest took.
pub(super) trait Reader {
    /// The marks of the words `reached`, counted from the first of the call. The pages are protected
    /// and not flushed yet.
    fn receive(&mut self, reached: Range<usize>, taken: &TakenWords);

    /// Whether there is no room for those of another turn, so that they have to be read now.
    fn is_full(&self) -> bool {
        false
    }

    /// All that was received is flushed. Whether the harvest goes on.
    fn read(&mut self) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
}

/// Writes the marks into the caller's bitmap.
struct ToBitmap<'b>(&'b mut [u64]);

impl Reader for ToBitmap<'_> {
    #[inline]
    fn receive(&mut self, reached: Range<usize>, taken: &TakenWords) {
        let words = &mut self.0[reached];
        words.fill(0);
        for (&offset, &bits) in taken.offsets().iter().zip(taken.bits()) {
            words[usize::from(offset)] = bits;
        }
    }
}

/// For a caller that has named the marks.
struct Unread;

impl Reader for Unread {
    fn receive(&mut self, _: Range<usize>, _: &TakenWords) {}
}

/// A call on the log of one memslot.
pub(crate) struct LogCall<'c, H: Host, F: Format> {
    pub(crate) op: Operation<'c, H, F>,
    pub(crate) id: u32,
}

impl<H: Host, F: Format> LogCall<'_, H, F> {
    /// Finds the memslot, its log, and the words of the call; `done` of them are done. Each guard
    /// looks them up anew: since the last, the memslot may have been moved or have ceased to log,
    /// or its number may be that of another.
    pub(super) fn find<'s>(
        &'s self,
        guard: &'s Guard<'s>,
        pages: Option<(u64, u64)>,
        bitmap_len: usize,
        done: usize,
    ) -> Result<Found<'s, H::Backing>, LogError> {
        let slot = self.op.slots.by_id(guard, self.id).ok_or(LogError::NoSuchSlot { slot: self.id })?;
        let log = slot.log().ok_or(LogError::NotLogging { slot: self.id })?;
        let words = words_of(&slot, pages, self.id, bitmap_len)?;
        if words.len() < done {
            return Err(LogError::NoSuchSlot { slot: self.id });
        }
        let start = words.start + done;
        let turn = start..words.end.min(start + WORDS_PER_TURN);
        Ok(Found { slot, log, words, turn })
    }

    /// Takes the log of `pages` (first and number; all if `None`) into `out`, and protects the
    /// pages taken. Returns their number.
    #[inline(never)]
    pub(crate) fn get(&self, pages: Option<(u64, u64)>, out: &mut [u64]) -> Result<u64, LogError> {
        self.op.participant.with_harvest_room(|room| {
            self.collect(pages, out.len())?;
            let (taken, len) = (&mut room.taken, out.len());
            self.harvest(pages, len, taken, |log, words, _, taken| log.take(words, taken), &mut ToBitmap(out))
        })?
    }

    /// Copies the log of `pages` into `out`, and changes nothing. Returns the number of pages.
    #[inline(never)]
    pub(crate) fn copy(&self, pages: Option<(u64, u64)>, out: &mut [u64]) -> Result<u64, LogError> {
        self.collect(pages, out.len())?;
        let mut nr_pages = 0;
        let mut done = 0;
        loop {
            let guard = self.op.pin();
            let Found { log, words, turn, .. } = self.find(&guard, pages, out.len(), done)?;
            guard.visit(turn.len() as u64);
            nr_pages += log.copy(turn.clone(), &mut out[done..done + turn.len()]);
            done += turn.len();
            if turn.end == words.end {
                return Ok(nr_pages);
            }
        }
    }

    /// Takes those marks of `pages` that `mask` names, and protects their pages. Returns their
    /// number.
    pub(crate) fn clear(&self, pages: (u64, u64), mask: &[u64]) -> Result<u64, LogError> {
        let Config { manual_protect, huge_page_logging, .. } = self.op.tree.config;
        let take = |log: &Bitmap, words, done, taken: &mut TakenWords| log.take_masked(words, &mask[done..], taken);
        self.op.participant.with_harvest_room(|room| {
            if manual_protect == ManualProtect::InitiallySet && huge_page_logging.splits_eagerly() {
                self.split_for(pages, mask)?;
            }
            self.harvest(Some(pages), mask.len(), &mut room.taken, take, &mut Unread)
        })?
    }

    /// Splits the huge leaves of those of `pages` that `mask` names, before they are protected for
    /// the first time.
    fn split_for(&self, pages: (u64, u64), mask: &[u64]) -> Result<(), LogError> {
        let range = {
            let guard = self.op.pin();
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
        let target = self.op.tree.config.largest_logged_write();
        // Best effort: the first write splits what is not split now. If the memslot is moved
        // meanwhile, the parts at the old place allow what the whole did.
        let _ = split::split_range(self.op, range, target, Leaves::NotPinned, is_named);
        Ok(())
    }

    /// Takes marks of `pages` by `take`, protects their pages, and hands them to `reader`. Returns
    /// the number of pages.
    ///
    /// `take` gets the words that it may take from, and how many are done already. It returns the
    /// first word that it did not reach.
    pub(super) fn harvest(
        &self,
        pages: Option<(u64, u64)>,
        bitmap_len: usize,
        taken: &mut TakenWords,
        take: impl Fn(&Bitmap, Range<usize>, usize, &mut TakenWords) -> usize,
        reader: &mut impl Reader,
    ) -> Result<u64, LogError> {
        let tree = self.op.tree;
        let mut nr_pages = 0;
        let mut batch = self.op.batch();
        let mut done = 0;
        let result = loop {
            tree.renew_generations();
            let locked = self.op.pin_locked(Side::Write);
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
            if let (Some(first), Some(derived)) = (first, tree.derived.as_deref()) {
                // The second stage first, then the page tables derived from it. As with the flush,
                // it does not matter which leaves lost W now, and which before.
                derived.write_protect(&mut taken.words(first), &mut batch);
            }
            let turn_len = reached - turn.start;
            reader.receive(done..done + turn_len, taken);
            done += turn_len;
            if reached == words.end {
                break Ok(());
            }
            if reader.is_full() {
                batch.flush_cpus();
                if reader.read().is_break() {
                    break Ok(());
                }
            }
            if tree.should_yield() {
                tree.host.yield_now();
            }
        };
        batch.flush_cpus();
        // Also after an error: no later call reports these pages.
        let _ = reader.read();
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
        let now = self.op.slots.by_id(guard, self.id).filter(|now| now.is_same_slot(slot));
        let range = now.map_or(slot.range(), |now| now.range());
        let mut protector = Protector::new(self.op.tree, guard, range);
        let first = Gfn(range.start.0 + first_word as u64 * PAGES_PER_WORD);
        protector.protect(first, taken, batch);
        *nr_pages += protector.finish(self.op.participant);
        first
    }

    /// Updates the bitmap with the writes to `pages` that the CPUs have recorded.
    pub(super) fn collect(&self, pages: Option<(u64, u64)>, bitmap_len: usize) -> Result<(), LogError> {
        match self.op.tree.config.dirty_tracking {
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => Ok(()),
            DirtyTracking::DirtyBit => self.mark_dirty_leaves(pages, bitmap_len),
            DirtyTracking::PageModificationLog => {
                // A call that is refused changes nothing: what the CPUs have logged stays for the
                // next call.
                self.find(&self.op.pin(), pages, bitmap_len, 0)?;
                self.op.host().drain_modification_logs(&mut |written| {
                    mark_written(self.op, written);
                });
                Ok(())
            }
        }
    }

    /// Marks those of `pages` whose leaves of 4 KiB are dirty.
    fn mark_dirty_leaves(&self, pages: Option<(u64, u64)>, bitmap_len: usize) -> Result<(), LogError> {
        let mut done = 0;
        loop {
            let guard = self.op.pin();
            let Found { slot, log, words, .. } = self.find(&guard, pages, bitmap_len, 0)?;
            let first = words.start as u64 * PAGES_PER_WORD;
            let end = slot.range().nr_pages().min(words.end as u64 * PAGES_PER_WORD);
            let turn_end = end.min(first + done + PAGES_PER_TURN);
            let mut cursor = Cursor::new(self.op.tree, &guard, slot.range().start);
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
            if self.op.host().should_yield() {
                self.op.host().yield_now();
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
        let start = cursor::index_of::<F>(gfn, Level::L4K);
        let leaves = leaves.slice(start..);
        let (mut word, mut marks) = (first / PAGES_PER_WORD, 0);
        for (chunk, page) in leaves.chunks(LEAVES_PER_LOOK).zip((first..behind).step_by(LEAVES_PER_LOOK)) {
            let values: [Option<Pte<F>>; LEAVES_PER_LOOK] =
                core::array::from_fn(|nth| chunk.get(nth).map(|leaf| leaf.load()));
            // Most have no D. To look at each of them would take longer than to read them.
            if values.iter().flatten().fold(0, |any, value| any | value.bits()) & F::DIRTY == 0 {
                continue;
            }
            let pages = (page..behind).zip(values);
            let dirty = pages.filter(|(_, value)| value.is_some_and(|value| value.is_dirty_for_log()));
            for (page, _) in dirty {
                if page / PAGES_PER_WORD != word {
                    log.mark_word(word as usize, marks);
                    (word, marks) = (page / PAGES_PER_WORD, 0);
                }
                marks |= 1 << (page % PAGES_PER_WORD);
            }
        }
        // No fence: the leaves were read with acquire. A page that was written again after a
        // harvest took its bit has D only since that harvest cleared D. So the bit is read as clear
        // here.
        log.mark_word(word as usize, marks);
    }
    behind
}
