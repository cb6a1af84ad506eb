//! The reset of all dirty rings of a VM.
//!
//! A reset
//! 1. protects the pages of the harvested entries of up to 32 rings,
//! 2. flushes once,
//! 3. makes the entries empty.
//!
//! It protects as a harvest of bitmaps does: in short guards, the pages of a page-table page
//! together, and lazily where there are many (`second_stage/protect.rs`). `dirty/ring.rs` has the
//! protocol of one ring.

#![expect(unsafe_code, reason = "the working memory of a reset is made of zeroes")]

use crate::addr::{Gfn, GfnRange};
use crate::bits::bit_range;
use crate::boxed::{Zeroed, try_zeroed};
use crate::dirty::ring::{DirtyPage, DirtyRing, Reset};
use crate::error::OutOfMemory;
use crate::format::Format;
use crate::host::Host;
use crate::operation::Operation;
use crate::page_words::{PAGES_PER_WORD, PageWords};
use crate::second_stage::protect::Protector;
use crate::sync::Side;
use crate::table::retire::Guard;
use crate::table::tlb::TlbBatch;

/// Words of pages that are protected in one guard.
const WORDS_PER_TURN: usize = 128;
/// Rings whose resets share a flush.
const RINGS_PER_FLUSH: usize = 32;

/// The working memory of a reset: too large for a stack.
struct Room {
    words: [PageWord; WORDS_PER_TURN],
    pages: PageWords<WORDS_PER_TURN>,
    /// Where the reset of each ring ended.
    reached: [u64; RINGS_PER_FLUSH],
}

// SAFETY: it consists of integers, of which all zeroes are a value.
unsafe impl Zeroed for Room {
    #[cfg(loom)]
    fn zeroed() -> Room {
        Room { words: [PageWord::default(); WORDS_PER_TURN], pages: PageWords::new(), reached: [0; RINGS_PER_FLUSH] }
    }
}

/// Some of 64 pages of a memslot.
#[derive(Clone, Copy, Default)]
struct PageWord {
    slot: u32,
    /// The number of the first page, divided by 64.
    index: u64,
    /// Bit n: page n from the first on.
    bits: u64,
}

impl PageWord {
    fn of(DirtyPage { slot, page }: DirtyPage) -> PageWord {
        PageWord { slot, index: page / PAGES_PER_WORD, bits: 1 << (page % PAGES_PER_WORD) }
    }

    /// Returns the bits for pages below `nr_pages`.
    fn bits_below(&self, nr_pages: u64) -> u64 {
        match nr_pages.saturating_sub(self.index * PAGES_PER_WORD) {
            0 => 0,
            left => self.bits & bit_range(0, left.min(PAGES_PER_WORD)),
        }
    }
}

/// Sorts `words` by memslot and page, so that those of a page-table page are together, and merges
/// words of the same pages. Returns them.
fn in_order(words: &mut [PageWord]) -> &[PageWord] {
    words.sort_unstable_by_key(|word| (word.slot, word.index));
    let mut len = words.len().min(1);
    for index in 1..words.len() {
        let word = words[index];
        let last = &mut words[len - 1];
        if (last.slot, last.index) == (word.slot, word.index) {
            last.bits |= word.bits;
        } else {
            words[len] = word;
            len += 1;
        }
    }
    &words[..len]
}

/// One call that resets all rings of a VM.
pub(crate) struct RingsReset<'c, H: Host, F: Format> {
    pub(crate) op: Operation<'c, H, F>,
}

impl<H: Host, F: Format> RingsReset<'_, H, F> {
    /// Protects the pages of all harvested entries of `rings`, flushes, and makes the entries
    /// empty. Returns how many entries no other reset had made empty before.
    pub(crate) fn reset<'r>(&self, mut rings: impl Iterator<Item = &'r DirtyRing> + Clone) -> Result<u64, OutOfMemory> {
        let mut room = try_zeroed::<Room>()?;
        let mut nr_reset = 0;
        loop {
            let mut batch = self.op.batch();
            let protected = rings.clone();
            let mut nr_rings = 0;
            for ring in rings.by_ref().take(RINGS_PER_FLUSH) {
                let mut reset = ring.reset();
                self.protect_entries(&mut reset, &mut room, &mut batch);
                room.reached[nr_rings] = reset.reached();
                nr_rings += 1;
            }
            // Before any entry is empty: a thread that finds an entry empty need not flush.
            batch.flush();
            let reached = room.reached[..nr_rings].iter();
            nr_reset += protected.zip(reached).map(|(ring, &reached)| ring.finish_reset(reached)).sum::<u64>();
            if nr_rings < RINGS_PER_FLUSH {
                return Ok(nr_reset);
            }
        }
    }

    /// Protects the pages of the entries that `reset` gives out, turn by turn.
    fn protect_entries(&self, reset: &mut Reset<'_>, room: &mut Room, batch: &mut TlbBatch<'_, H, F>) {
        let Room { words, pages, .. } = room;
        let mut len = 0;
        for page in reset {
            let new = PageWord::of(page);
            match words[..len].last_mut() {
                // Mostly a guest writes forward, or backward.
                Some(last) if (last.slot, last.index) == (new.slot, new.index) => last.bits |= new.bits,
                _ => {
                    if len == WORDS_PER_TURN {
                        self.protect(words, pages, batch);
                        len = 0;
                    }
                    words[len] = new;
                    len += 1;
                }
            }
        }
        if len != 0 {
            self.protect(&mut words[..len], pages, batch);
        }
    }

    /// Protects the pages of `words`, in one guard.
    fn protect(&self, words: &mut [PageWord], pages: &mut PageWords<WORDS_PER_TURN>, batch: &mut TlbBatch<'_, H, F>) {
        let tree = self.op.tree;
        // A directory entry is protected once at most in a turn, so its pages must be together.
        let words = in_order(words);
        tree.renew_generations();
        let locked = self.op.pin_locked(Side::Write);
        locked.guard.visit(words.len() as u64 * PAGES_PER_WORD);
        for words in words.chunk_by(|word, next| word.slot == next.slot) {
            // If the memslot was deleted or moved since the pages were pushed, all its PTEs were
            // zapped and flushed before the new set was published. The pages at its new place, or
            // of another memslot with the same number, were pushed for themselves.
            if let Some(slot) = self.op.slots.by_id(&locked.guard, words[0].slot) {
                self.protect_in_slot(&locked.guard, slot.range(), words, pages, batch);
            }
        }
        drop(locked);
        if tree.should_yield() {
            tree.host.yield_now();
        }
    }
}

/// Words from the first on that are protected together.
const TURN_WORDS: u64 = 1 << 13;

impl<H: Host, F: Format> RingsReset<'_, H, F> {
    /// Protects the pages of `words`, which are in order, of the memslot that has `range`.
    fn protect_in_slot(
        &self,
        guard: &Guard<'_>,
        range: GfnRange,
        mut words: &[PageWord],
        pages: &mut PageWords<WORDS_PER_TURN>,
        batch: &mut TlbBatch<'_, H, F>,
    ) {
        while let Some(first) = words.first().map(|word| word.index) {
            let (near, far) = words.split_at(words.partition_point(|word| word.index - first < TURN_WORDS));
            pages.clear();
            for word in near {
                pages.push((word.index - first) as usize, word.bits_below(range.nr_pages()));
            }
            // Each with an admission of its own: a page-table page may have pages in both.
            let mut protector = Protector::new(self.op.tree, guard, range);
            protector.protect(Gfn(range.start.0 + first * PAGES_PER_WORD), pages, batch);
            protector.finish(self.op.participant);
            words = far;
        }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
#[path = "rings_tests.rs"]
mod tests;
