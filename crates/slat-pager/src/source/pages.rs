//! A set of pages, one bit each: which pages a file has, which of them a layer changed.

use std::ops::Range;

use super::PAGE_BYTES;

/// A set of the pages of a snapshot. Its memory is 1/32768 of the snapshot's size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    words: Box<[u64]>,
    nr_pages: u64,
}

impl PageSet {
    /// No page of `nr_pages`.
    pub fn new(nr_pages: u64) -> PageSet {
        PageSet { words: vec![0; nr_pages.div_ceil(64) as usize].into(), nr_pages }
    }

    /// The pages of a dirty log as KVM returns it: page 0 is bit 0 of byte 0. `None`: the length is
    /// not that of a log of `nr_pages`, or a bit behind the last page is set.
    pub fn from_dirty_log(log: &[u8], nr_pages: u64) -> Option<PageSet> {
        // KVM's logs are whole 64-bit words; one that another tool wrote may end at the last byte.
        if log.len() as u64 != nr_pages.div_ceil(64) * 8 && log.len() as u64 != nr_pages.div_ceil(8) {
            return None;
        }
        let mut set = PageSet::new(nr_pages);
        for (word, bytes) in set.words.iter_mut().zip(log.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        let behind_end = match (set.words.last(), nr_pages % 64) {
            (Some(last), rest) if rest != 0 => last >> rest,
            _ => 0,
        };
        (behind_end == 0).then_some(set)
    }

    /// Adds the pages that `bytes` touches. What is behind the last page is ignored.
    pub fn insert_bytes(&mut self, bytes: Range<u64>) {
        for (word, mask) in self.masks(bytes) {
            self.words[word] |= mask;
        }
    }

    /// Whether the page is in the set.
    pub fn contains(&self, page: u64) -> bool {
        page < self.nr_pages && self.words[(page / 64) as usize] >> (page % 64) & 1 == 1
    }

    /// Whether no page that `bytes` touches is in the set. Pages behind the last one are not.
    pub fn has_none_of(&self, bytes: Range<u64>) -> bool {
        self.masks(bytes).all(|(word, mask)| self.words[word] & mask == 0)
    }

    /// The words that the pages of `bytes` are in, with their bits.
    fn masks(&self, bytes: Range<u64>) -> impl Iterator<Item = (usize, u64)> + use<> {
        let pages = bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES).min(self.nr_pages);
        let words = if pages.is_empty() { 0..0 } else { pages.start / 64..pages.end.div_ceil(64) };
        words.map(move |word| {
            let first = pages.start.saturating_sub(word * 64);
            let end = (pages.end - word * 64).min(64);
            (word as usize, (u64::MAX << first) & (u64::MAX >> (64 - end)))
        })
    }

    /// How many pages the set has.
    pub fn len(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether the set has no page.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// A hash of which pages it has.
    pub fn hash(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.nr_pages.to_le_bytes());
        self.words.iter().for_each(|word| {
            hasher.update(&word.to_le_bytes());
        });
        *hasher.finalize().as_bytes()
    }

    /// Of how many pages it is a set.
    pub fn nr_pages(&self) -> u64 {
        self.nr_pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn as_a_list_of_bools(
            nr_pages in 1u64..300,
            ranges in prop::collection::vec((0u64..1_300_000, 0u64..400_000), 0..5),
            asked in (0u64..1_300_000, 0u64..400_000),
        ) {
            let mut set = PageSet::new(nr_pages);
            let mut model = vec![false; nr_pages as usize];
            let touched = |(start, nr_bytes): (u64, u64)| start / 4096..(start + nr_bytes).div_ceil(4096).min(nr_pages);
            for range in ranges {
                set.insert_bytes(range.0..range.0 + range.1);
                for page in touched(range) {
                    model[page as usize] = true;
                }
            }
            prop_assert_eq!(set.len(), model.iter().filter(|is_there| **is_there).count() as u64);
            prop_assert_eq!(set.is_empty(), !model.contains(&true));
            for page in 0..nr_pages + 70 {
                prop_assert_eq!(set.contains(page), model.get(page as usize) == Some(&true));
            }
            let has_one = touched(asked).any(|page| model[page as usize]);
            prop_assert_eq!(set.has_none_of(asked.0..asked.0 + asked.1), !has_one);
            let log: Vec<u8> = set.words.iter().flat_map(|word| word.to_le_bytes()).collect();
            prop_assert_eq!(PageSet::from_dirty_log(&log, nr_pages), Some(set.clone()));
            prop_assert_eq!(PageSet::from_dirty_log(&log[..nr_pages.div_ceil(8) as usize], nr_pages), Some(set));
        }
    }

    #[test]
    fn logs_that_do_not_fit() {
        assert_eq!(PageSet::from_dirty_log(&[0; 7], 64), None, "too short");
        assert_eq!(PageSet::from_dirty_log(&[0; 16], 64), None, "too long");
        assert_eq!(PageSet::from_dirty_log(&[0, 0, 0, 0, 0, 0, 0, 0x80], 63), None, "page 63 of 63");
        assert!(PageSet::from_dirty_log(&[0, 0, 0, 0, 0, 0, 0, 0x40], 63).is_some());
    }
}
