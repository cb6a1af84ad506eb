//! Write protection for the dirty log, beside faults that restore write access.
//!
//! # Guarantees
//! Each page that is meant loses W: leaf by leaf, or lazily by the directory entry above 512
//! leaves. Where dirty bits of the CPUs are the log, leaves of 4 KiB lose D instead. Huge leaves
//! lose W in every mode, because a dirty bit says too little of them.
//!
//! # Use
//! The caller
//! 1. makes visible that the memslot logs, or takes the bits of the pages,
//! 2. makes a full fence,
//! 3. makes a [`Protector`], or calls [`protect_slot`],
//! 4. flushes.
//!
//! # Implementation
//! A directory entry is protected by one compare-and-exchange; the next write below it pushes down
//! (`push_down`). Only entries wholly inside the memslot are protected, and only for more than
//! [`PAGES_WORTH_PROTECTING`] pages: a push-down reads all 512 leaves. A turn protects each entry
//! at most once (`table/generation.rs`).
//!
//! Few pages are the frequent case, and branches that no CPU predicts would take most of its time:
//! on where a page-table page ends, and on how many pages a word has. So one loop over the words
//! takes the leaves ([`Protector::take_few`]) and has them prefetched, and their atomic operations
//! follow in rows.
//!
//! # Why it is correct
//! A fault restores W, makes a full fence, and then reads flags and bit (`dirty/log.rs`). One side
//! observes the other: the fault finds step 1 and marks the page, or the walk finds W.
//!
//! The cursor is made after step 2. A path from before could lead to a page-table page that was
//! unlinked since, and miss the leaf that matters.
//!
//! Protecting an entry is never a no-op: a protected entry gets the next generation. A push-down
//! that is under way may be about to restore W over leaves whose bits were just taken; its exchange
//! then fails.

use core::convert::Infallible;

use super::walk::{self, TurnEnd, Walk};
use crate::addr::{Gfn, GfnRange, Level};
use crate::bits::{SetBits, bit_range};
use crate::config::DirtyTracking;
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::page_words::PageWords;
use crate::slot::bitmap::nr_bits;
use crate::stats::Counter;
use crate::sync::Side;
use crate::table::Tree;
use crate::table::cursor::Cursor;
use crate::table::generation::Admission;
use crate::table::pte::{Pte, State};
use crate::table::pte_ref::{Changed, LeafRef, PteRef, Ptes};
use crate::table::retire::{Guard, Participant};
use crate::table::tlb::TlbBatch;

/// PTEs that a turn visits before it leaves its guard.
const ENTRIES_PER_TURN: u64 = 4096;

/// For so many pages of a page-table page, or fewer, leaves are protected one by one.
const PAGES_WORTH_PROTECTING: u64 = if cfg!(shuttle) { 1 } else { 16 };

/// The most pages of a word that are counted: then there are too many to protect them one by one.
const MOST_OF_WORD: usize = PAGES_WORTH_PROTECTING as usize + 2;

/// Room for leaves that are protected together.
const PENDING_LEAVES: usize = 32 + MOST_OF_WORD + 1;

/// Up to so many words have their ranges flushed; those of more are flushed as one.
const MOST_RANGES: usize = 8;

/// Pages of a word.
const WORD_PAGES: u64 = u64::BITS as u64;
/// Words for the pages of a page-table page.
const TABLE_WORDS: usize = 8;

/// Some pages of one page-table page of leaves, by words of 64 that begin at multiples of 64.
struct TablePages<'w> {
    /// The first page of the page-table page.
    first: Gfn,
    /// The number of the word from which `offsets` count.
    first_word: u64,
    offsets: &'w [u16],
    bits: &'w [u64],
    nr_pages: u64,
}

impl<'w> TablePages<'w> {
    /// The pages of `words`, whose offset 0 is word number `first_word`: all of one page-table page.
    fn of_table(first_word: u64, words: &'w PageWords<TABLE_WORDS>) -> TablePages<'w> {
        let first = Gfn(first_word * WORD_PAGES).align_down(Level::L2M);
        let (offsets, bits) = (words.offsets(), words.bits());
        TablePages { first, first_word, offsets, bits, nr_pages: bits.iter().map(|&bits| nr_bits(bits)).sum() }
    }

    /// The first `nr_words` of the words, which have `nr_pages` pages.
    #[inline]
    fn first_words(&self, nr_words: usize, nr_pages: u64) -> TablePages<'w> {
        TablePages { offsets: &self.offsets[..nr_words], bits: &self.bits[..nr_words], nr_pages, ..*self }
    }

    /// The pages of words. They may be those of more than one page-table page; the first is of
    /// `first`.
    #[inline]
    fn new(first_word: u64, offsets: &'w [u16], bits: &'w [u64]) -> TablePages<'w> {
        let first = Gfn((first_word + offsets.first().map_or(0, |&offset| u64::from(offset))) * WORD_PAGES);
        TablePages { first: first.align_down(Level::L2M), first_word, offsets, bits, nr_pages: 0 }
    }

    /// Whether the first words have so many pages that those of most page-table pages may be many.
    #[inline]
    fn are_dense(&self) -> bool {
        let first = self.bits.iter().take(TABLE_WORDS);
        self.bits.len() >= TABLE_WORDS && first.map(|&bits| nr_bits(bits)).sum::<u64>() > PAGES_WORTH_PROTECTING
    }

    /// Calls `add` with the pages of each word, from the first to the last of it; if there are many
    /// words, once.
    #[inline]
    fn ranges(&self, mut add: impl FnMut(GfnRange)) {
        if self.offsets.len() > MOST_RANGES {
            return add(self.range());
        }
        for (offset, bits) in self.offsets.chunks(1).zip(self.bits.chunks(1)) {
            add(TablePages { offsets: offset, bits, ..*self }.range());
        }
    }

    /// The pages of this page-table page. The words may go on with those of others.
    fn counted(&self) -> TablePages<'w> {
        let of_table = self.words().take_while(|&(page, _)| page < TABLE_WORDS * WORD_PAGES as usize);
        let (nr_words, nr_pages) =
            of_table.fold((0, 0), |(nr_words, nr_pages), (_, bits)| (nr_words + 1, nr_pages + nr_bits(bits)));
        self.first_words(nr_words, nr_pages)
    }

    /// For each word, the index of its first page in the page-table page, and its bits.
    #[inline]
    fn words(&self) -> impl Iterator<Item = (usize, u64)> {
        // Where the page-table page begins, before or behind the word from which offsets count.
        let base = (self.first.0 / WORD_PAGES).wrapping_sub(self.first_word);
        let page_of = move |offset: u16| (u64::from(offset).wrapping_sub(base) * WORD_PAGES) as usize;
        self.offsets.iter().zip(self.bits).map(move |(&offset, &bits)| (page_of(offset), bits))
    }

    fn block(&self) -> GfnRange {
        self.first.block(Level::L2M)
    }

    /// From the first to the last of the pages.
    #[inline]
    fn range(&self) -> GfnRange {
        let ends = self.offsets.first().zip(self.bits.first()).zip(self.offsets.last().zip(self.bits.last()));
        let Some(((&first, low), (&last, high))) = ends else { return GfnRange::new(self.first, 0) };
        let start = (self.first_word + u64::from(first)) * WORD_PAGES + u64::from(low.trailing_zeros());
        let end = (self.first_word + u64::from(last) + 1) * WORD_PAGES - u64::from(high.leading_zeros());
        GfnRange { start: Gfn(start), end: Gfn(end) }
    }
}

/// The pages of `range` in the page-table page of its first page, by words. `range` must not be
/// empty.
fn words_of_table(range: GfnRange) -> PageWords<TABLE_WORDS> {
    let block = range.start.block(Level::L2M);
    let range = range.intersection(block);
    let mut words = PageWords::new();
    let mut next = range.start.0;
    while next < range.end.0 {
        let shift = next % WORD_PAGES;
        let nr_pages = (WORD_PAGES - shift).min(range.end.0 - next);
        words.push(((next - block.start.0) / WORD_PAGES) as usize, bit_range(shift, nr_pages));
        next += nr_pages;
    }
    words
}

/// Whether a turn may protect directory entries.
enum DirectoryProtection {
    /// The turn has not asked yet.
    Unasked,
    Admitted(Admission),
    No,
}

/// One turn of a protection, in one guard.
pub(crate) struct Protector<'s, H: Host, F: Format> {
    cursor: Cursor<'s, H, F>,
    /// The memslot: entries that reach beyond it are not protected.
    slot: GfnRange,
    directory_protection: DirectoryProtection,
    pending: Pending<'s, F>,
    nr_pending: usize,
    /// Pages that the caller has named.
    nr_pages: u64,
    nr_protected: u64,
    nr_tables: u64,
}

impl<'s, H: Host, F: Format> Protector<'s, H, F> {
    /// For pages of a memslot at `slot`. To be made after step 2 of the module.
    pub(crate) fn new(tree: &'s Tree<H, F>, guard: &'s Guard<'s>, slot: GfnRange) -> Protector<'s, H, F> {
        guard.lock_check().assert(Side::Write);
        let directory_protection = match tree.config.dirty_tracking {
            DirtyTracking::WriteProtect if Pte::<F>::CAN_BE_PROTECTED => DirectoryProtection::Unasked,
            _ => DirectoryProtection::No,
        };
        Protector {
            cursor: Cursor::new(tree, guard, slot.start),
            slot,
            directory_protection,
            pending: Pending([None; PENDING_LEAVES]),
            nr_pending: 0,
            nr_pages: 0,
            nr_protected: 0,
            nr_tables: 0,
        }
    }

    /// Protects the pages of `words`, whose offset 0 begins with page `first`. `batch` gets what is
    /// to be flushed.
    pub(crate) fn protect<const CAPACITY: usize>(
        &mut self,
        first: Gfn,
        words: &PageWords<CAPACITY>,
        batch: &mut TlbBatch<'_, H, F>,
    ) {
        match first.0 % WORD_PAGES {
            0 => self.protect_words(first.0 / WORD_PAGES, words, batch),
            // A memslot need not begin at a multiple of 64 pages: its words may lie across two of
            // the page-table pages'.
            shift => self.protect_shifted(first.0 / WORD_PAGES, shift, words, batch),
        }
    }

    /// As [`protect_words`](Self::protect_words), for words that begin `shift` pages behind a
    /// multiple of 64. It moves the bits, one page-table page at a time.
    fn protect_shifted<const CAPACITY: usize>(
        &mut self,
        first_word: u64,
        shift: u64,
        words: &PageWords<CAPACITY>,
        batch: &mut TlbBatch<'_, H, F>,
    ) {
        let table_of = |offset: usize| (first_word + offset as u64) / TABLE_WORDS as u64;
        let mut of_table = PageWords::<TABLE_WORDS>::new();
        let mut table = None;
        for (&offset, &bits) in words.offsets().iter().zip(words.bits()) {
            let offset = usize::from(offset);
            for (offset, bits) in [(offset, bits << shift), (offset + 1, bits >> (WORD_PAGES - shift))] {
                if bits != 0 && table != Some(table_of(offset)) {
                    self.protect_words(first_word, &of_table, batch);
                    of_table.clear();
                    table = Some(table_of(offset));
                }
                of_table.push(offset, bits);
            }
        }
        self.protect_words(first_word, &of_table, batch);
    }

    fn protect_words<const CAPACITY: usize>(
        &mut self,
        first_word: u64,
        words: &PageWords<CAPACITY>,
        batch: &mut TlbBatch<'_, H, F>,
    ) {
        let (offsets, bits) = (words.offsets(), words.bits());
        let are_dense = TablePages::new(first_word, offsets, bits).are_dense();
        let mut done = 0;
        while done < offsets.len() {
            if !are_dense {
                let few = self.take_few(&TablePages::new(first_word, &offsets[done..], &bits[done..]));
                done += few.offsets.len();
                self.nr_pages += few.nr_pages;
                few.ranges(|range| batch.add(range));
            }
            if done < offsets.len() {
                let pages = TablePages::new(first_word, &offsets[done..], &bits[done..]).counted();
                done += pages.offsets.len();
                self.nr_pages += pages.nr_pages;
                batch.add(pages.range());
                self.protect_table(&pages);
            }
        }
    }

    /// Takes the leaves of the first of `words`, to protect them later; returns these words. They
    /// end where a page-table page begins of which more than [`PAGES_WORTH_PROTECTING`] pages are
    /// meant, or which is not there.
    ///
    /// It has no branch on where a page-table page ends, which no CPU would predict. Whether pages
    /// are many shows while they are taken: to count them before would take as long.
    #[inline(always)]
    fn take_few<'w>(&mut self, words: &TablePages<'w>) -> TablePages<'w> {
        let (mut nr_words, mut nr_pages) = (0, 0);
        // The page-table page of the word before, and how many of its pages were taken.
        let (mut last_table, mut nr_of_table) = (u64::MAX, 0);
        for (&offset, &bits) in words.offsets.iter().zip(words.bits) {
            let word = words.first_word + u64::from(offset);
            let table = word / TABLE_WORDS as u64;
            nr_of_table &= 0_usize.wrapping_sub(usize::from(table == last_table));
            last_table = table;
            let Some(leaves) = self.cursor.move_to_table_below(Gfn(word * WORD_PAGES), Level::L2M) else { break };
            let leaves = leaves.slice((word % TABLE_WORDS as u64 * WORD_PAGES) as usize..);
            if self.nr_pending > PENDING_LEAVES - MOST_OF_WORD - 1 {
                self.protect_pending();
            }
            let nr_taken = self.pending.put(self.nr_pending, leaves, bits);
            self.nr_pending += nr_taken;
            nr_of_table += nr_taken;
            nr_pages += nr_taken;
            nr_words += 1;
            if nr_of_table > PAGES_WORTH_PROTECTING as usize {
                break;
            }
        }
        if nr_of_table > PAGES_WORTH_PROTECTING as usize {
            // Back to where the page-table page begins. Those of its leaves that are protected
            // already may be.
            self.nr_pending = self.nr_pending.saturating_sub(nr_of_table);
            nr_pages -= nr_of_table;
            let is_of_table =
                |&&offset: &&u16| (words.first_word + u64::from(offset)) / (TABLE_WORDS as u64) == last_table;
            nr_words -= words.offsets[..nr_words].iter().rev().take_while(is_of_table).count();
        }
        words.first_words(nr_words, nr_pages as u64)
    }

    /// Protects `pages`. Returns the first page behind the PTE at which the walk ended: of a
    /// page-table page of leaves, or of a greater block that has none.
    fn protect_table(&mut self, pages: &TablePages<'_>) -> Gfn {
        loop {
            let (value, state) = match self.cursor.move_to_pte(pages.first, Level::L2M).map(|pte| pte.load()) {
                Some(value) if value.state(Level::L2M) == State::Table => (value, State::Table),
                // A huge leaf, or nothing; or the path leads through a page-table page that was
                // unlinked.
                _ => {
                    self.cursor.restart();
                    self.cursor.descend_to(Level::L2M)
                }
            };
            let done = match state {
                State::Table if self.may_close(pages) => self.close(value),
                State::Table => match self.cursor.read_table(Level::L2M) {
                    Some((_, leaves)) => {
                        self.protect_leaves(leaves, pages);
                        Ok(())
                    }
                    None => Err(Changed),
                },
                State::Leaf => self.protect_huge(value),
                // A tracked leaf has lost W already. If a CPU still has it cached as writable, its
                // bit was set when it got W and not taken since: the harvest that takes it flushes.
                // What becomes of a broken PTE either lacks W, or is marked as a whole: its owner
                // reads the flags after this (`broken`, `split`).
                State::Tracked | State::Empty(_) | State::Frozen | State::Broken => Ok(()),
            };
            if done.is_ok() {
                return self.cursor.block().end;
            }
        }
    }

    fn may_close(&mut self, pages: &TablePages<'_>) -> bool {
        if matches!(self.directory_protection, DirectoryProtection::No)
            || pages.nr_pages <= PAGES_WORTH_PROTECTING
            || !self.slot.covers(pages.block())
        {
            return false;
        }
        if let DirectoryProtection::Unasked = self.directory_protection {
            self.directory_protection =
                self.cursor.tree().generations.admit().map_or(DirectoryProtection::No, DirectoryProtection::Admitted);
        }
        matches!(self.directory_protection, DirectoryProtection::Admitted(_))
    }

    fn close(&mut self, value: Pte<F>) -> Result<(), Changed> {
        self.cursor.pte().exchange(value, value.protected())?;
        self.nr_tables += 1;
        Ok(())
    }

    /// Clears W of a leaf above the lowest level. Where dirty bits are the log it clears D, too,
    /// because the parts of a split leaf begin with D of the leaf.
    fn protect_huge(&mut self, value: Pte<F>) -> Result<(), Changed> {
        let protected = match self.cursor.tree().config.dirty_tracking {
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => value,
            DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => value.cleaned_for_log(),
        };
        let protected = protected.without(F::WRITABLE);
        if protected != value {
            self.cursor.pte().exchange(value, protected)?;
            self.nr_protected += 1;
        }
        Ok(())
    }

    fn protect_leaves(&mut self, leaves: Ptes<'s, F>, pages: &TablePages<'_>) {
        let tree = self.cursor.tree();
        let named = |first: usize, bits| SetBits(bits).filter_map(move |page| leaves.get(first + page));
        // Before the first atomic operation, so that the cache misses overlap. Full words are in
        // order, which the CPU fetches ahead by itself.
        for (first, bits) in pages.words().filter(|&(_, bits)| bits != u64::MAX) {
            named(first, bits).for_each(|leaf| leaf.prefetch());
        }
        for (first, bits) in pages.words() {
            self.nr_protected += if bits == u64::MAX {
                protect_all(tree, leaves.slice(first..).iter().take(WORD_PAGES as usize))
            } else {
                protect_all(tree, named(first, bits))
            };
        }
    }

    #[inline(never)]
    fn protect_pending(&mut self) {
        let cleaner = self.cursor.tree().cleaner();
        let leaves = self.pending.0.iter().take(self.nr_pending).flatten().map(|leaf| leaf.pte(cleaner));
        self.nr_protected += protect_all(self.cursor.tree(), leaves);
        self.nr_pending = 0;
    }

    /// Ends the turn. Returns the number of pages that the caller has named.
    pub(crate) fn finish(&mut self, participant: &Participant) -> u64 {
        self.protect_pending();
        participant.stats.add(Counter::Protected, self.nr_protected);
        participant.stats.add(Counter::TablesProtected, self.nr_tables);
        self.nr_pages
    }
}

/// Leaves of 4 KiB that are to be protected together, in the first places.
struct Pending<'s, F: Format>([Option<LeafRef<'s, F>>; PENDING_LEAVES]);

impl<'s, F: Format> Pending<'s, F> {
    /// Puts those of `leaves` that `bits` names into the places from `at` on. Returns how many
    /// `bits` names, of which there is one at least. It ends at [`MOST_OF_WORD`].
    ///
    /// Most words have one page or two: they are taken without a branch, which no CPU would
    /// predict.
    #[inline(always)]
    fn put(&mut self, at: usize, leaves: Ptes<'s, F>, bits: u64) -> usize {
        let (lowest, highest) = (bits.trailing_zeros(), 63 - bits.leading_zeros());
        self.put_one(at, leaves, lowest);
        self.put_one(at + 1, leaves, highest);
        let mut nr_pages = 1 + usize::from(lowest != highest);
        let mut left = bits & (bits - 1) & !(1 << highest);
        while left != 0 && nr_pages < MOST_OF_WORD {
            self.put_one(at + nr_pages, leaves, left.trailing_zeros());
            left &= left - 1;
            nr_pages += 1;
        }
        nr_pages
    }

    #[inline(always)]
    fn put_one(&mut self, at: usize, leaves: Ptes<'s, F>, page: u32) {
        let leaf = leaves.leaf(page as usize);
        if let Some(leaf) = leaf {
            // The cache misses of many leaves overlap. Those of atomic operations come one after
            // the other.
            leaf.prefetch();
        }
        self.0[at] = leaf;
    }
}

/// Protects `leaves` of 4 KiB. Returns how many it changed.
#[inline]
fn protect_all<'c, H: Host, F: Format>(tree: &Tree<H, F>, leaves: impl Iterator<Item = PteRef<'c, F>>) -> u64 {
    match tree.config.dirty_tracking {
        DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => leaves.map(protect_leaf).sum(),
        DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog => leaves.map(clean_leaf).sum(),
    }
}

/// Clears W of the leaf of 4 KiB in `pte`. Returns 1 if it was set.
#[inline]
pub(super) fn protect_leaf<F: Format>(pte: PteRef<'_, F>) -> u64 {
    if !pte.load().is_writable() {
        return 0;
    }
    u64::from(pte.clear(F::WRITABLE).is_writable())
}

/// Clears hardware's dirty bit of the leaf of 4 KiB in `pte`. Returns 1 if it was set.
#[inline]
fn clean_leaf<F: Format>(pte: PteRef<'_, F>) -> u64 {
    let mut value = pte.load();
    // An exchange, and not an AND: the same step notes for the host that the page was written.
    while value.is_dirty_for_log() {
        match pte.exchange(value, value.cleaned_for_log()) {
            Ok(()) => return 1,
            Err(Changed) => value = pte.load(),
        }
    }
    0
}

/// Protects all that is mapped of the memslot at `slot`, in as many guards as it takes. The caller
/// flushes the memslot after that.
pub(crate) fn protect_slot<H: Host, F: Format>(op: Operation<'_, H, F>, slot: GfnRange) {
    op.tree.renew_generations();
    let Ok(()) = walk::run(op, slot, &mut ProtectSlot { op, slot });
}

struct ProtectSlot<'a, H: Host, F: Format> {
    op: Operation<'a, H, F>,
    slot: GfnRange,
}

/// The generations are renewed, if that is needed for the next turn.
struct Renew;

impl<H: Host, F: Format> Walk<H, F> for ProtectSlot<'_, H, F> {
    type Work = Renew;
    type Error = Infallible;
    const SIDE: Option<Side> = Some(Side::Write);

    fn turn(&mut self, guard: &Guard<'_>, start: Gfn) -> TurnEnd<Renew> {
        let mut protector = Protector::new(self.op.tree, guard, self.slot);
        let mut next = start;
        let mut nr_steps = 0;
        while next < self.slot.end && nr_steps < ENTRIES_PER_TURN {
            let nr_tables = protector.nr_tables;
            let words = words_of_table(GfnRange { start: next, end: self.slot.end });
            let pages = TablePages::of_table(next.align_down(Level::L2M).0 / WORD_PAGES, &words);
            next = protector.protect_table(&pages);
            // Without a protected entry it was a page-table page of leaves, at most.
            nr_steps += if protector.nr_tables > nr_tables { 1 } else { Level::L2M.nr_pages() };
        }
        protector.finish(self.op.participant);
        guard.visit(nr_steps);
        TurnEnd::Work(next, Renew)
    }

    fn work(&mut self, gfn: Gfn, _: Renew) -> Result<Gfn, Infallible> {
        self.op.tree.renew_generations();
        Ok(gfn)
    }
}
