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

use core::hint::black_box;

use super::flush::FlushToken;
use super::install::Changed;
use crate::addr::{Gfn, GfnRange, Level};
use crate::config::{DirtyTracking, WriteProtection};
use crate::dirty::bitmap::{SetBits, nr_bits};
use crate::format::{Entry, Format};
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::{AtomicU64, Ordering, Side};
use crate::table::Tree;
use crate::table::entry::{self, EntryRef, State};
use crate::table::generation::Admission;
use crate::table::retire::{Record, Section};
use crate::table::walk::Cursor;

/// Entries visited before a long walk asks whether it should yield.
const ENTRIES_PER_TURN: u64 = 4096;

/// Pages of a table that are protected leaf by leaf even if it could be closed, when there are no more of them.
const PAGES_WORTH_CLOSING: u64 = if cfg!(shuttle) { 1 } else { 32 };

/// Leaves that are looked at together.
const PENDING_LEAVES: usize = 32;

/// Pages in a word of a mask.
const WORD_PAGES: u64 = u64::BITS as u64;
/// Words of a mask for the pages of a table.
const TABLE_WORDS: usize = 8;

/// Some pages of one table of leaves, 64 by 64: the words that have any, in their order.
struct TablePages {
    /// The first page of the table.
    first: Gfn,
    /// Word n has pages 64 n to 64 n + 63 of the table; and its bits.
    words: [(u8, u64); TABLE_WORDS],
    nr_words: usize,
    nr_pages: u64,
}

impl TablePages {
    fn none_at(gfn: Gfn) -> TablePages {
        TablePages { first: gfn.block(Level::L2M).start, words: [(0, 0); TABLE_WORDS], nr_words: 0, nr_pages: 0 }
    }

    /// The pages of `range`, which has some, in the table of its first.
    fn of_range(range: GfnRange) -> TablePages {
        let mut pages = TablePages::none_at(range.start);
        let range = range.intersection(pages.block());
        let mut next = range.start.0;
        while next < range.end.0 {
            let shift = next % WORD_PAGES;
            let nr_pages = (WORD_PAGES - shift).min(range.end.0 - next);
            pages.add(Gfn(next - shift), (u64::MAX >> (WORD_PAGES - nr_pages)) << shift);
            next += nr_pages;
        }
        pages
    }

    fn block(&self) -> GfnRange {
        self.first.block(Level::L2M)
    }

    /// Adds the pages `bits` from `gfn` on, a multiple of 64, which are in the table and behind those added last.
    #[inline]
    fn add(&mut self, gfn: Gfn, bits: u64) {
        let number = ((gfn.0 - self.first.0) / WORD_PAGES) as u8;
        self.nr_pages += nr_bits(bits);
        match self.words[..self.nr_words].last_mut() {
            Some((last, word)) if *last == number => *word |= bits,
            _ => {
                self.words[self.nr_words] = (number, bits);
                self.nr_words += 1;
            }
        }
    }

    fn words(&self) -> &[(u8, u64)] {
        &self.words[..self.nr_words]
    }

    /// From the first to the last of them; `None` if there is none.
    fn range(&self) -> Option<GfnRange> {
        let (&(first, low), &(last, high)) = (self.words().first()?, self.words().last()?);
        let start = u64::from(first) * WORD_PAGES + u64::from(low.trailing_zeros());
        let end = (u64::from(last) + 1) * WORD_PAGES - u64::from(high.leading_zeros());
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
    /// Leaves of 4 KiB that are to be protected yet.
    pending: [Option<&'s AtomicU64>; PENDING_LEAVES],
    nr_pending: usize,
    /// Pages that were to be protected.
    nr_pages: u64,
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
        Protector {
            cursor: Cursor::new(tree, section, slot.start),
            slot,
            closing,
            pending: [None; PENDING_LEAVES],
            nr_pending: 0,
            nr_pages: 0,
            nr_protected: 0,
            nr_closed: 0,
        }
    }

    /// Protects the pages of `words`: for each, its first page and its bits (bit n: page n from there), in their order.
    /// `token` owes the flush of them all.
    pub(crate) fn protect_words(&mut self, words: impl Iterator<Item = (Gfn, u64)>, token: &mut FlushToken) {
        let mut pages = TablePages::none_at(self.slot.start);
        for (first, bits) in words {
            // A slot need not begin at a multiple of 64 pages: its words may lie across two of the table's.
            let shift = first.0 % WORD_PAGES;
            if shift == 0 {
                self.protect_word(first, bits, &mut pages, token);
            } else {
                let aligned = Gfn(first.0 - shift);
                self.protect_word(aligned, bits << shift, &mut pages, token);
                self.protect_word(Gfn(aligned.0 + WORD_PAGES), bits >> (WORD_PAGES - shift), &mut pages, token);
            }
        }
        self.protect_pages(&pages, token);
    }

    /// Adds the pages `bits` from `gfn` on to `pages`, or if that is another table, protects these and begins anew.
    #[inline]
    fn protect_word(&mut self, gfn: Gfn, bits: u64, pages: &mut TablePages, token: &mut FlushToken) {
        if bits == 0 {
            return;
        }
        let table = gfn.align_down(Level::L2M);
        if table != pages.first {
            self.protect_pages(pages, token);
            (pages.first, pages.nr_words, pages.nr_pages) = (table, 0, 0);
        }
        pages.add(gfn, bits);
    }

    fn protect_pages(&mut self, pages: &TablePages, token: &mut FlushToken) {
        if let Some(range) = pages.range() {
            self.nr_pages += pages.nr_pages;
            self.protect_table(pages);
            token.owe(range);
        }
    }

    /// Protects `pages`. Returns the first page behind the entry at which the way to them ended: of a table of leaves, or
    /// of a greater block that has none.
    fn protect_table(&mut self, pages: &TablePages) -> Gfn {
        loop {
            let (value, state) = match self.cursor.move_to_entry(pages.first, Level::L2M).map(|entry| entry.load()) {
                Some(value) if entry::state::<F>(value, Level::L2M) == State::Table => (value, State::Table),
                // A huge leaf, or nothing; or the way leads through a table that was unlinked.
                _ => {
                    self.cursor.restart();
                    self.cursor.descend_to(Level::L2M)
                }
            };
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
            || pages.nr_pages <= PAGES_WORTH_CLOSING
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

    fn protect_leaves(&mut self, leaves: &'s [AtomicU64], pages: &TablePages) {
        for &(number, bits) in pages.words() {
            let cells = leaves.get(usize::from(number) * WORD_PAGES as usize..).unwrap_or_default();
            if bits == u64::MAX {
                self.nr_protected += protect_all(self.cursor.tree(), cells.iter().take(WORD_PAGES as usize));
                continue;
            }
            for cell in SetBits(bits).filter_map(|page| cells.get(page)) {
                if self.nr_pending == PENDING_LEAVES {
                    self.protect_pending();
                }
                self.pending[self.nr_pending] = Some(cell);
                self.nr_pending += 1;
            }
        }
    }

    /// Protects the pending leaves.
    fn protect_pending(&mut self) {
        let pending = self.pending[..core::mem::take(&mut self.nr_pending)].iter().flatten();
        // A look at all of them first: those that are not in the cache come all at once for plain loads, and one after the
        // other for atomic operations.
        black_box(pending.clone().fold(0, |any, cell| any | cell.load(Ordering::Relaxed)));
        self.nr_protected += protect_all(self.cursor.tree(), pending.copied());
    }

    /// Ends the turn. Returns the number of pages that were to be protected.
    pub(crate) fn finish(mut self, record: &Record) -> u64 {
        self.protect_pending();
        record.stats.add(Counter::Protected, self.nr_protected);
        record.stats.add(Counter::TablesClosed, self.nr_closed);
        self.nr_pages
    }
}

/// Protects the leaves of 4 KiB in `cells`. Returns how many of them had to be.
#[inline]
fn protect_all<'c, H: Host, F: Format>(tree: &Tree<H, F>, cells: impl Iterator<Item = &'c AtomicU64>) -> u64 {
    match tree.config.dirty_tracking {
        DirtyTracking::WriteProtect(_) => cells.map(protect_leaf::<F>).sum(),
        DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => cells.map(clean_leaf::<F>).sum(),
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
            visited += if protector.nr_closed > nr_closed { 1 } else { Level::L2M.nr_pages() };
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
