//! One bit for each 4 KiB page of a slot, least significant bit first, as KVM lays it out.
//!
//! Lines of the bitmap are aligned to cache lines, so that one line serves 512 pages: the marks of faults in different
//! 2 MiB blocks (of a slot that begins at a multiple of 2 MiB) share no line.

use alloc::boxed::Box;

use crate::boxed::{ZeroedWords, try_box};
use crate::error::Error;
use crate::sync::Ordering;

/// Pages in a word.
pub(crate) const PAGES_PER_WORD: u64 = u64::BITS as u64;

/// The log of one slot.
pub(crate) struct Bitmap {
    words: ZeroedWords,
}

/// Words that `nr_pages` bits need.
pub(crate) fn nr_words(nr_pages: u64) -> usize {
    nr_pages.div_ceil(PAGES_PER_WORD) as usize
}

impl Bitmap {
    /// A bitmap of `nr_pages` clear bits.
    pub(crate) fn new(nr_pages: u64) -> Result<Box<Bitmap>, Error> {
        try_box(Bitmap { words: ZeroedWords::new(nr_words(nr_pages))? })
    }

    /// Sets the bits of `nr_pages` pages from `first` on. A full fence stands between what the marks are for (a leaf
    /// became writable) and this call; see `log`.
    #[inline]
    pub(crate) fn mark(&self, first: u64, nr_pages: u64) {
        let (mut page, end) = (first, first + nr_pages);
        while page < end {
            let in_word = page % PAGES_PER_WORD;
            let count = (PAGES_PER_WORD - in_word).min(end - page);
            let mask = (u64::MAX >> (PAGES_PER_WORD - count)) << in_word;
            let word = &self.words[(page / PAGES_PER_WORD) as usize];
            // SeqCst: "marked already" is a load after a store, in a pair with the harvest (see `log`).
            if word.load(Ordering::SeqCst) & mask != mask {
                word.fetch_or(mask, Ordering::SeqCst);
            }
            page += count;
        }
    }

    /// Takes the bits of word `index`.
    #[inline]
    pub(crate) fn take(&self, index: usize) -> u64 {
        let word = &self.words[index];
        // Relaxed look first: most words of most harvests are zero, and a load leaves the line shared. A mark that is
        // missed here is reported by the next harvest, as one that comes a moment later.
        if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::SeqCst) }
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn marks_are_taken_once_and_only_where_they_were_set() {
        for (first, nr_pages) in [(0, 1), (63, 1), (63, 2), (64, 64), (1, 200), (0, 1000), (999, 1), (130, 0)] {
            let bitmap = Bitmap::new(1000).unwrap();
            bitmap.mark(first, nr_pages);
            bitmap.mark(first, nr_pages);
            let taken: Vec<u64> = (0..nr_words(1000)).map(|word| bitmap.take(word)).collect();
            for page in 0..1000 {
                let expected = (first..first + nr_pages).contains(&page);
                assert_eq!(
                    taken[page as usize / 64] >> (page % 64) & 1 == 1,
                    expected,
                    "page {page} of {first}+{nr_pages}"
                );
            }
            assert!((0..nr_words(1000)).all(|word| bitmap.take(word) == 0));
        }
    }

    #[test]
    fn a_bitmap_that_cannot_be_allocated_is_an_error() {
        assert_eq!(Bitmap::new(u64::MAX).err(), Some(Error::OutOfMemory));
        assert_eq!(nr_words(0), 0);
        assert!(Bitmap::new(0).is_ok());
    }
}
