//! Taking the right to write away for dirty logging, beside faults that give it back: lazily, by closing the entry above 512
//! leaves, or leaf by leaf. Where CPUs' dirty bits are the log, it is those that are cleared in leaves of 4 KiB; huge leaves
//! always lose the right to write, because a dirty bit says too little of them.
//!
//! Whoever calls has first made visible that the slot logs (or has taken the pages' bits), with a full fence behind: a
//! fault that then gives the right back, or had just given it, sees that and marks the page. The cursor is made after that:
//! a path from before could lead to a table that was unlinked since, and leave the leaf that matters untouched.
//!
//! # Lazily
//! Closing is one compare-and-exchange for a table, and the next write below pushes down (`push_down`). It is never a no-op:
//! an entry that is closed already gets the next generation, because a fault that is pushing down at this moment may be
//! about to open leaves whose bits were just taken. Only entries wholly inside the slot are closed, and only if so many of
//! their pages are meant that it pays ([`PAGES_WORTH_CLOSING`]): closing costs the guest a look at all 512 leaves. Each
//! entry is closed once at most in a turn (`table/generation.rs`).

use super::flush::FlushToken;
use super::install::Changed;
use crate::addr::{Gfn, GfnRange, Level};
use crate::config::{DirtyTracking, WriteProtection};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::{AtomicU64, Side};
use crate::table::Tree;
use crate::table::entry::{self, EntryRef, State};
use crate::table::generation::Admission;
use crate::table::retire::{Record, Section};
use crate::table::walk::Cursor;

/// Entries visited before a long walk asks whether it should yield.
const ENTRIES_PER_TURN: u64 = 4096;

/// Pages of a table that are protected leaf by leaf even if it could be closed, when there are no more of them.
const PAGES_WORTH_CLOSING: u32 = if cfg!(shuttle) { 1 } else { 32 };

/// Pages in a word of a mask.
const WORD_PAGES: u64 = u64::BITS as u64;
/// Words of a mask for the pages of a table.
const TABLE_WORDS: usize = 8;

/// Some pages of one table of leaves.
struct TablePages {
    /// The first page of the table.
    first: Gfn,
    /// Bit n % 64 of word n / 64 is page n.
    words: [u64; TABLE_WORDS],
}

impl TablePages {
    fn none_at(gfn: Gfn) -> TablePages {
        TablePages { first: gfn.block(Level::L2M).start, words: [0; TABLE_WORDS] }
    }

    /// The pages of `range`, which has some, in the table of its first.
    fn of_range(range: GfnRange) -> TablePages {
        let mut pages = TablePages::none_at(range.start);
        let range = range.intersection(pages.block());
        let (from, to) = (range.start.0 - pages.first.0, range.end.0 - pages.first.0);
        for (index, word) in pages.words.iter_mut().enumerate() {
            let start = index as u64 * WORD_PAGES;
            let (from, to) = (from.clamp(start, start + WORD_PAGES), to.clamp(start, start + WORD_PAGES));
            if from < to {
                *word = (u64::MAX >> (WORD_PAGES - (to - from))) << (from - start);
            }
        }
        pages
    }

    fn block(&self) -> GfnRange {
        self.first.block(Level::L2M)
    }

    /// Whether there are more than `nr_pages`.
    fn are_more_than(&self, nr_pages: u32) -> bool {
        let mut rest = nr_pages;
        self.words.iter().any(|word| match rest.checked_sub(word.count_ones()) {
            Some(left) => {
                rest = left;
                false
            }
            None => true,
        })
    }

    /// From the first to the last of them; `None` if there is none.
    fn range(&self) -> Option<GfnRange> {
        let first = self.words.iter().position(|&word| word != 0)?;
        let last = self.words.iter().rposition(|&word| word != 0)?;
        let start = first as u64 * WORD_PAGES + u64::from(self.words[first].trailing_zeros());
        let end = (last as u64 + 1) * WORD_PAGES - u64::from(self.words[last].leading_zeros());
        Some(GfnRange { start: Gfn(self.first.0 + start), end: Gfn(self.first.0 + end) })
    }
}

/// Whether a turn may close entries.
enum Closing {
    /// It has not asked yet.
    Unasked,
    Admitted(Admission),
    No,
}

/// One turn of a protection, in one section.
pub(crate) struct Protector<'s, H: Host, F: Format> {
    cursor: Cursor<'s, H, F>,
    /// The slot: entries that reach beyond it are not closed.
    slot: GfnRange,
    closing: Closing,
    nr_protected: u64,
    nr_closed: u64,
}

impl<'s, H: Host, F: Format> Protector<'s, H, F> {
    /// For pages of a slot at `slot`. To be made after what the module says.
    pub(crate) fn new(tree: &'s Tree<H, F>, section: &'s Section<'s>, slot: GfnRange) -> Protector<'s, H, F> {
        let closing = match tree.config.dirty_tracking {
            DirtyTracking::WriteProtect(WriteProtection::Lazy) => Closing::Unasked,
            _ => Closing::No,
        };
        Protector { cursor: Cursor::new(tree, section, slot.start), slot, closing, nr_protected: 0, nr_closed: 0 }
    }

    /// Protects the pages of `words`: for each, its first page and its bits (bit n: page n from there), in their order.
    /// `token` owes the flush of them all.
    pub(crate) fn protect_words(&mut self, words: impl Iterator<Item = (Gfn, u64)>, token: &mut FlushToken) {
        let mut pages = TablePages::none_at(self.slot.start);
        for (first, bits) in words {
            // A slot need not begin at a multiple of 64 pages: its words may lie across two of the table's.
            let shift = first.0 % WORD_PAGES;
            let below = bits << shift;
            let above = if shift == 0 { 0 } else { bits >> (WORD_PAGES - shift) };
            for (gfn, bits) in [(first.0 - shift, below), (first.0 - shift + WORD_PAGES, above)] {
                if bits == 0 {
                    continue;
                }
                let block = Gfn(gfn).block(Level::L2M);
                if block.start != pages.first {
                    self.protect_pages(&pages, token);
                    pages = TablePages::none_at(block.start);
                }
                pages.words[((gfn - pages.first.0) / WORD_PAGES) as usize] |= bits;
            }
        }
        self.protect_pages(&pages, token);
    }

    fn protect_pages(&mut self, pages: &TablePages, token: &mut FlushToken) {
        if let Some(range) = pages.range() {
            self.protect_table(pages);
            token.owe(range);
        }
    }

    /// Protects `pages`. Returns the first page behind the entry at which the way to them ended: of a table of leaves, or
    /// of a greater block that has none.
    fn protect_table(&mut self, pages: &TablePages) -> Gfn {
        self.cursor.move_to(pages.first);
        loop {
            let (value, state) = self.cursor.descend_to(Level::L2M);
            let done = match state {
                State::Table if self.may_close(pages) => self.close(value),
                State::Table => {
                    self.protect_leaves(self.cursor.table_below(value), pages);
                    Ok(())
                }
                State::Leaf => self.protect_huge(value),
                // A tracked leaf has lost W already. If it is still cached as writable, its bit was set when it got W and
                // not taken since, so whoever takes it now flushes.
                State::Tracked | State::Empty(_) | State::Frozen => Ok(()),
            };
            if done.is_ok() {
                return self.cursor.block().end;
            }
        }
    }

    fn may_close(&mut self, pages: &TablePages) -> bool {
        if matches!(self.closing, Closing::No)
            || !pages.are_more_than(PAGES_WORTH_CLOSING)
            || !self.slot.covers(pages.block())
        {
            return false;
        }
        if let Closing::Unasked = self.closing {
            self.closing = self.cursor.tree().generations.admit().map_or(Closing::No, Closing::Admitted);
        }
        matches!(self.closing, Closing::Admitted(_))
    }

    fn close(&mut self, value: Entry) -> Result<(), Changed> {
        self.cursor.entry().compare_exchange::<F>(value, entry::closed::<F>(value)).map_err(|_| Changed)?;
        self.nr_closed += 1;
        Ok(())
    }

    /// Takes the right to write from a leaf above the lowest level. Its dirty bit goes with it where such bits are the log:
    /// the parts of a leaf that is split begin with it.
    fn protect_huge(&mut self, value: Entry) -> Result<(), Changed> {
        let protected = match self.cursor.tree().config.dirty_tracking {
            DirtyTracking::WriteProtect(_) => value,
            DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => entry::cleaned_for_log::<F>(value),
        };
        let protected = Entry(protected.0 & !F::WRITABLE);
        if protected != value {
            self.cursor.entry().compare_exchange::<F>(value, protected).map_err(|_| Changed)?;
            self.nr_protected += 1;
        }
        Ok(())
    }

    fn protect_leaves(&mut self, leaves: &[AtomicU64], pages: &TablePages) {
        let protect = match self.cursor.tree().config.dirty_tracking {
            DirtyTracking::WriteProtect(_) => protect_leaf::<F>,
            DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => clean_leaf::<F>,
        };
        for (cells, &mask) in leaves.chunks(WORD_PAGES as usize).zip(&pages.words) {
            if mask == u64::MAX {
                self.nr_protected += cells.iter().map(protect).sum::<u64>();
                continue;
            }
            let mut rest = mask;
            while rest != 0 {
                self.nr_protected += cells.get(rest.trailing_zeros() as usize).map_or(0, protect);
                rest &= rest - 1;
            }
        }
    }

    /// Ends the turn.
    pub(crate) fn finish(self, record: &Record) {
        record.stats.add(Counter::Protected, self.nr_protected);
        record.stats.add(Counter::TablesClosed, self.nr_closed);
    }
}

/// Takes the right to write from the leaf of 4 KiB in `cell`, if there is one that has it. Returns 1 if so.
#[inline]
fn protect_leaf<F: Format>(cell: &AtomicU64) -> u64 {
    let entry = EntryRef::new(cell, Level::L4K);
    if !entry::is_writable::<F>(entry.load()) {
        return 0;
    }
    u64::from(entry::is_writable::<F>(entry.clear::<F>(F::WRITABLE)))
}

/// Clears hardware's dirty bit of the leaf of 4 KiB in `cell`, if there is one that has it. Returns 1 if so.
#[inline]
fn clean_leaf<F: Format>(cell: &AtomicU64) -> u64 {
    let entry = EntryRef::new(cell, Level::L4K);
    let mut value = entry.load();
    // An exchange, and not an AND: that the page was written is noted for the host in the same step.
    while entry::is_dirty_for_log::<F>(value) {
        match entry.compare_exchange::<F>(value, entry::cleaned_for_log::<F>(value)) {
            Ok(()) => return 1,
            Err(found) => value = found,
        }
    }
    0
}

/// Protects all that is mapped of a slot at `slot`, in several sections if need be. The caller owes a flush of the slot.
pub(crate) fn protect_slot<H: Host, F: Format>(tree: &Tree<H, F>, record: &Record, slot: GfnRange) {
    let mut next = slot.start;
    while next < slot.end {
        tree.generations.renew_if_low(&tree.epochs, || tree.host.barrier_on_all_cpus());
        let locked = tree.enter(record, Side::Write);
        let mut protector = Protector::new(tree, &locked.section, slot);
        let mut visited = 0;
        while next < slot.end {
            let nr_closed = protector.nr_closed;
            next = protector.protect_table(&TablePages::of_range(GfnRange { start: next, end: slot.end }));
            // What was not one step was a table of leaves.
            visited += if protector.nr_closed > nr_closed { 1 } else { WORD_PAGES * TABLE_WORDS as u64 };
            if visited >= ENTRIES_PER_TURN {
                visited = 0;
                if tree.should_yield() {
                    break;
                }
            }
        }
        protector.finish(record);
        drop(locked);
        if next < slot.end {
            tree.host.yield_now();
        }
    }
}
