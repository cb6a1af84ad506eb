//! Pages that are a function of their number, so that every byte that arrives can be verified: for
//! experiments, tests and measurements.
//!
//! A page has a key, a bijection of its number for each seed, and its words are an arithmetic
//! series from there with an odd step. So no two pages have the same word at the same place. A page
//! in the place of another, bytes of two pages in one, and bytes at a wrong place are all detected.
//! A vector unit makes a page in about the time of writing it.

use std::io::{self, Write};
use std::ops::Range;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::{Identity, PAGE_BYTES, PageBytes, Source, SourceError, check_range};

/// Words of 64 bits in a page.
pub const WORDS_PER_PAGE: usize = PAGE_BYTES as usize / size_of::<u64>();

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
        let mut bytes = [0; PAGE_BYTES as usize];
        for page in 0..nr_pages {
            self.fill(page, &mut bytes);
            out.write_all(&bytes)?;
        }
        Ok(())
    }

    /// Makes the bytes from `offset` on.
    fn fill_from(self, offset: u64, into: &mut [u8]) {
        let first = offset / PAGE_BYTES;
        if offset.is_multiple_of(PAGE_BYTES)
            && let Ok(page) = <&mut PageBytes>::try_from(&mut *into)
        {
            return self.fill(first, page);
        }
        for (at, part) in super::parts(offset, into, PAGE_BYTES) {
            let mut page = [0; PAGE_BYTES as usize];
            self.fill(at / PAGE_BYTES, &mut page);
            part.copy_from_slice(&page[(at % PAGE_BYTES) as usize..][..part.len()]);
        }
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

/// As many as a file can have: its offsets are signed.
const SIZE_BYTES: u64 = i64::MAX as u64 / PAGE_BYTES * PAGE_BYTES;

/// Pages are made when they are read.
impl Source for Pattern {
    fn size_bytes(&self) -> u64 {
        SIZE_BYTES
    }

    fn identity(&self) -> Identity {
        match self {
            Pattern::Mixed { seed } => Identity::new("mixed pattern", [&seed.to_le_bytes()[..]]),
            Pattern::Constant(byte) => Identity::new("constant", [&[*byte][..]]),
        }
    }

    fn granule_bytes(&self) -> u64 {
        PAGE_BYTES
    }

    fn is_ready(&self, _range: Range<u64>) -> bool {
        true
    }

    fn read_ready(&self, offset: u64, into: &mut [u8]) -> Option<Result<(), SourceError>> {
        Some(check_range(offset, into.len(), SIZE_BYTES).map(|()| self.fill_from(offset, into)))
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        let result = check_range(offset, into.len(), SIZE_BYTES).map(|()| self.fill_from(offset, into));
        std::future::ready(result).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page_of(pattern: Pattern, page: u64) -> PageBytes {
        let mut bytes = [0; PAGE_BYTES as usize];
        pattern.fill(page, &mut bytes);
        bytes
    }

    #[test]
    fn words_are_those_of_their_page_and_pages_differ() {
        let mixed = Pattern::Mixed { seed: 7 };
        for pattern in [mixed, Pattern::Constant(0xab)] {
            for page in [0, 1, 511, 1 << 40] {
                let bytes = page_of(pattern, page);
                for (index, word) in bytes.as_chunks().0.iter().enumerate() {
                    assert_eq!(pattern.word(page, index).to_le_bytes(), *word);
                }
            }
        }
        let mut bytes = page_of(mixed, 5);
        assert!(bytes != page_of(mixed, 6) && bytes != page_of(Pattern::Mixed { seed: 8 }, 5));
        // Bytes that are shifted by a word are another page too.
        bytes.rotate_left(8);
        assert!(bytes != page_of(mixed, 5));
        assert!(page_of(Pattern::Constant(0xab), 3).iter().all(|&byte| byte == 0xab));
    }

    #[test]
    fn a_read_may_begin_and_end_anywhere() {
        let pattern = Pattern::Mixed { seed: 7 };
        let all: Vec<u8> = (0..4).flat_map(|page| page_of(pattern, page)).collect();
        for range in [0..4096, 4096..12288, 1..2, 4000..9000, 100..16384] {
            let mut bytes = vec![0; range.len()];
            pattern.read_ready(range.start as u64, &mut bytes).unwrap().unwrap();
            assert!(bytes == all[range.clone()], "{range:?}");
            bytes.fill(0);
            pattern.read(range.start as u64, &mut bytes).now_or_never().unwrap().unwrap();
            assert!(bytes == all[range]);
        }
        assert!(matches!(pattern.read_ready(u64::MAX, &mut [0]), Some(Err(SourceError::OutOfRange { .. }))));
    }
}
