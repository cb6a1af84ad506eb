//! Pages of a memslot as words of its dirty log, and the working memory of a harvest.
//!
//! # Use
//! A turn of a harvest takes words of a log (`slot/bitmap.rs`) and protects their pages
//! (`second_stage/protect.rs`). The memory for that is too large for a stack. To allocate it for each
//! call would take up to two fifths of a harvest of one page. So each participant keeps it from its
//! first harvest on (`Participant::with_harvest_room`).

#![expect(unsafe_code, reason = "says which types are zeroed")]

use crate::addr::Gfn;
use crate::boxed::Zeroed;

/// Pages in a word.
pub(crate) const PAGES_PER_WORD: u64 = u64::BITS as u64;

/// The most words that one turn visits: those of 4 GiB.
pub(crate) const WORDS_PER_TURN: usize = 1 << 14;

/// Pages as words of 64, in their order: those that a turn has taken.
pub(crate) struct PageWords<const CAPACITY: usize> {
    len: usize,
    offsets: [u16; CAPACITY],
    bits: [u64; CAPACITY],
}

// SAFETY: it consists of integers, of which all zeroes are a value.
unsafe impl<const CAPACITY: usize> Zeroed for PageWords<CAPACITY> {
    #[cfg(loom)]
    fn zeroed() -> PageWords<CAPACITY> {
        PageWords::new()
    }
}

impl<const CAPACITY: usize> PageWords<CAPACITY> {
    /// How many words there is room for.
    pub(crate) const CAPACITY: usize = CAPACITY;

    pub(crate) fn new() -> PageWords<CAPACITY> {
        PageWords { len: 0, offsets: [0; CAPACITY], bits: [0; CAPACITY] }
    }

    pub(crate) fn clear(&mut self) {
        self.len = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// For each word, its distance in words from the place from which offsets are counted.
    #[inline]
    pub(crate) fn offsets(&self) -> &[u16] {
        &self.offsets[..self.len]
    }

    /// The bits of each word.
    #[inline]
    pub(crate) fn bits(&self) -> &[u64] {
        &self.bits[..self.len]
    }

    /// The words, each as the page of its first bit and its bits, where `first` is the place from
    /// which offsets are counted.
    pub(crate) fn words(&self, first: Gfn) -> impl Iterator<Item = (Gfn, u64)> {
        let words = self.offsets().iter().zip(self.bits());
        words.map(move |(&offset, &bits)| (Gfn(first.0 + u64::from(offset) * PAGES_PER_WORD), bits))
    }

    pub(crate) fn has_room_for(&self, nr_words: usize) -> bool {
        CAPACITY - self.len >= nr_words
    }

    /// Adds the pages `bits` of the word at `offset`: as a new word behind the last, or to the last
    /// if that is the same. No bits add nothing. There must be room.
    #[inline]
    pub(crate) fn push(&mut self, offset: usize, bits: u64) {
        debug_assert!(offset <= WORDS_PER_TURN);
        if bits == 0 {
            return;
        }
        if self.len != 0 && self.offsets[self.len - 1] == offset as u16 {
            self.bits[self.len - 1] |= bits;
            return;
        }
        self.offsets[self.len] = offset as u16;
        self.bits[self.len] = bits;
        self.len += 1;
    }

    /// Adds `words`, each as its offset and its pages, where none is there yet. There must be room.
    #[inline]
    pub(crate) fn extend(&mut self, words: impl Iterator<Item = (usize, u64)>) {
        let mut len = self.len;
        for (offset, bits) in words {
            if let (Some(offset_at), Some(bits_at)) = (self.offsets.get_mut(len), self.bits.get_mut(len)) {
                (*offset_at, *bits_at) = (offset as u16, bits);
            }
            len += usize::from(bits != 0);
        }
        debug_assert!(len <= CAPACITY);
        self.len = len.min(CAPACITY);
    }
}

/// The pages of one turn: those of 32 MiB, if all are dirty.
pub(crate) type TakenWords = PageWords<128>;

/// Words that wait to be passed to a callback: those of two turns.
pub(crate) const WINDOW_WORDS: usize = 2 * TakenWords::CAPACITY;

/// The working memory of a harvest.
pub(crate) struct HarvestRoom {
    pub(crate) taken: TakenWords,
    /// The number of each word in the log, and its marks.
    pub(crate) window: [[u64; 2]; WINDOW_WORDS],
}

// SAFETY: it consists of integers, of which all zeroes are a value.
unsafe impl Zeroed for HarvestRoom {
    #[cfg(loom)]
    fn zeroed() -> HarvestRoom {
        HarvestRoom { taken: PageWords::new(), window: [[0; 2]; WINDOW_WORDS] }
    }
}
