//! Pages that are a function of their number, so that every byte that arrives can be verified.
//!
//! A page has a key, a bijection of its number for each seed, and its words are an arithmetic
//! series from there with an odd step. So no two pages have the same word at the same place. A page
//! in the place of another, bytes of two pages in one, and bytes at a wrong place are all detected.
//! A vector unit makes a page in about the time of writing it.

use std::io::{self, Write};

use super::in_flight::PagesInFlight;
use super::{NextArrival, PAGE_SIZE, PageBytes, PageSource, SourceError, Wait};

/// Words of 64 bits in a page.
pub const WORDS_PER_PAGE: usize = PAGE_SIZE / size_of::<u64>();

/// 2^64 divided by the golden ratio, made odd: multiples of it are far from each other in all bits.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The contents of the pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pattern {
    /// Each word differs, by page and place.
    Mixed {
        /// Other seeds give other pages.
        seed: u64,
    },
    /// This byte everywhere.
    Constant(u8),
}

impl Pattern {
    /// A word of a page, as it is in memory in little-endian order. `index` is below
    /// [`WORDS_PER_PAGE`].
    #[inline]
    pub fn word(self, page: u64, index: usize) -> u64 {
        match self {
            Pattern::Mixed { seed } => key(seed, page).wrapping_add((index as u64).wrapping_mul(STEP)),
            Pattern::Constant(byte) => u64::from_ne_bytes([byte; 8]),
        }
    }

    /// Makes a page.
    pub fn fill(self, page: u64, into: &mut PageBytes) {
        match self {
            Pattern::Mixed { seed } => {
                let mut word = key(seed, page);
                for bytes in into.as_chunks_mut().0 {
                    *bytes = word.to_le_bytes();
                    word = word.wrapping_add(STEP);
                }
            }
            Pattern::Constant(byte) => into.fill(byte),
        }
    }

    /// Writes the first pages one after the other, for a file that is a source.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write_to(self, out: &mut impl Write, nr_pages: u64) -> io::Result<()> {
        let mut bytes = [0; PAGE_SIZE];
        for page in 0..nr_pages {
            self.fill(page, &mut bytes);
            out.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
/// generators", 2014): a bijection whose every output bit depends on every input bit.
fn key(seed: u64, page: u64) -> u64 {
    let mut key = seed.wrapping_add(page.wrapping_mul(STEP));
    key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    key ^ (key >> 31)
}

/// Pages that are made when they are taken.
#[derive(Debug)]
pub(super) struct PatternSource {
    pattern: Pattern,
    in_flight: PagesInFlight,
    /// The page that was taken last.
    page: Box<PageBytes>,
}

impl PatternSource {
    pub(super) fn new(pattern: Pattern) -> PatternSource {
        PatternSource { pattern, in_flight: PagesInFlight::new(), page: Box::new([0; PAGE_SIZE]) }
    }
}

impl PageSource for PatternSource {
    fn request(&mut self, page: u64) -> Result<(), SourceError> {
        self.in_flight.push(page)
    }

    fn arrived(&mut self, _wait: Wait) -> Result<Option<u64>, SourceError> {
        Ok(self.in_flight.first())
    }

    fn take(&mut self) -> Result<&PageBytes, SourceError> {
        let page = self.in_flight.take()?;
        self.pattern.fill(page, &mut self.page);
        Ok(&self.page)
    }

    fn take_into(&mut self, into: &mut PageBytes) -> Result<(), SourceError> {
        let page = self.in_flight.take()?;
        self.pattern.fill(page, into);
        Ok(())
    }

    fn nr_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn next_arrival(&self) -> NextArrival<'_> {
        self.in_flight.next_arrival()
    }
}
