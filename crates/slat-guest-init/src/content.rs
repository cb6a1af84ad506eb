//! What pages contain: a function of the seed, of the page's number, and of how often the page was
//! written. So a page needs no copy to be compared with, and the content of another page, or an
//! older content of this one, is told from the right one in each word.

use std::fmt;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Words of a page.
pub(crate) const PAGE_WORDS: usize = PAGE_BYTES / size_of::<u64>();

/// The words of a page.
pub(crate) type Page = [u64; PAGE_WORDS];

/// What follows word by word: odd, so that no two words of a page are equal.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// One page in so many is written anew in a round.
const REWRITTEN: u64 = 4;

/// Mixes the bits of `word` (the finalizer of splitmix64).
fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// A random number that `seed` and `values` determine.
pub(crate) fn random(seed: u64, values: [u64; 2]) -> u64 {
    values.into_iter().fold(mix(seed.wrapping_add(STEP)), |hash, value| mix(hash ^ value.wrapping_mul(STEP)))
}

/// The content of one page at one time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Content {
    /// The first word.
    first: u64,
}

/// A word that is another than it should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Difference {
    /// The number of the word in its page.
    pub(crate) word: usize,
    pub(crate) expected: u64,
    pub(crate) found: u64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "expected {:#018x}, found {:#018x}", self.expected, self.found)
    }
}

impl Content {
    /// The content of page `page`, written for the `version`th time.
    pub(crate) fn new(seed: u64, page: u64, version: u64) -> Content {
        Content { first: random(seed, [page, version]) }
    }

    fn words(self) -> impl Iterator<Item = u64> {
        (0..PAGE_WORDS as u64).map(move |word| self.first.wrapping_add(word.wrapping_mul(STEP)))
    }

    pub(crate) fn write(self, page: &mut Page) {
        for (place, word) in page.iter_mut().zip(self.words()) {
            *place = word;
        }
    }

    /// Compares all words.
    pub(crate) fn verify(self, page: &Page) -> Result<(), Difference> {
        compare(page, self.words())
    }
}

/// Whether a page that was never written is zero.
pub(crate) fn verify_zero(page: &Page) -> Result<(), Difference> {
    compare(page, std::iter::repeat_n(0, PAGE_WORDS))
}

fn compare(page: &Page, expected: impl Iterator<Item = u64>) -> Result<(), Difference> {
    let mut words = page.iter().zip(expected).enumerate();
    match words.find(|(_, (found, expected))| *found != expected) {
        Some((word, (&found, expected))) => Err(Difference { word, expected, found }),
        None => Ok(()),
    }
}

/// Whether page `page` is written in round `round`; all are in the first.
pub(crate) fn is_written(seed: u64, page: u64, round: u64) -> bool {
    round == 0 || random(!seed, [page, round]).is_multiple_of(REWRITTEN)
}

/// The content of page `page` at the end of round `round`: that of the last round that wrote it.
pub(crate) fn after_round(seed: u64, page: u64, round: u64) -> Content {
    let version = (0..=round).rev().find(|&earlier| is_written(seed, page, earlier)).unwrap_or(0);
    Content::new(seed, page, version)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_page_is_told_from_all_others_in_each_word() {
        let mut seen = HashSet::new();
        for seed in [0, 1, u64::MAX] {
            for page in 0..20 {
                for version in 0..4 {
                    for word in Content::new(seed, page, version).words() {
                        assert!(seen.insert(word), "seed {seed}, page {page}, version {version}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_was_written_is_found_and_each_other_word_noticed() {
        let content = Content::new(7, 3, 0);
        let mut page = [0; PAGE_WORDS];
        content.write(&mut page);
        assert_eq!(content.verify(&page), Ok(()));
        for word in [0, 1, PAGE_WORDS - 1] {
            let mut wrong = page;
            wrong[word] ^= 1 << 17;
            let difference = content.verify(&wrong).unwrap_err();
            assert_eq!((difference.word, difference.expected, difference.found), (word, page[word], wrong[word]));
        }
        assert!(Content::new(7, 3, 1).verify(&page).is_err() && Content::new(7, 4, 0).verify(&page).is_err());
        assert!(verify_zero(&page).is_err());
        assert_eq!(verify_zero(&[0; PAGE_WORDS]), Ok(()));
    }

    #[test]
    fn about_one_page_in_four_is_written_anew() {
        let written = (0..4000).filter(|&page| is_written(1, page, 1)).count();
        assert!((800..1200).contains(&written), "{written}");
        for page in 0..100 {
            let changes = after_round(1, page, 1) != after_round(1, page, 0);
            assert_eq!(changes, is_written(1, page, 1), "page {page}");
        }
    }
}
