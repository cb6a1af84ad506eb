//! The bitmap on one thread.

extern crate std;

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::*;

/// Harvests the words `range`, turn by turn.
fn take_all(bitmap: &Bitmap, range: Range<usize>) -> Vec<u64> {
    let mut out = vec![0; range.len()];
    let mut taken = TakenWords::new();
    let mut next = range.start;
    while next < range.end {
        taken.clear();
        let reached = bitmap.take(next..range.end, &mut taken);
        assert!(reached > next, "a turn gets on");
        for (&offset, &bits) in taken.offsets().iter().zip(taken.bits()) {
            out[next + usize::from(offset) - range.start] |= bits;
        }
        next = reached;
    }
    out
}

fn pages(words: &[u64]) -> Vec<u64> {
    (0..words.len() as u64 * 64).filter(|page| words[*page as usize / 64] >> (page % 64) & 1 == 1).collect()
}

#[test]
fn marks_are_harvested_once_and_only_where_they_were_set() {
    for (first, nr_pages) in [
        (0, 1),
        (63, 1),
        (63, 2),
        (64, 64),
        (1, 200),
        (0, 1000),
        (999, 1),
        (130, 0),
        (4095, 2),
        (4000, 9000),
        (0, 20_000),
    ] {
        let bitmap = Bitmap::new(20_000).unwrap();
        bitmap.mark(first, nr_pages);
        bitmap.mark(first, nr_pages);
        let all = 0..nr_words(20_000);
        // What was in it is overwritten.
        let mut copy = vec![7; all.len()];
        assert_eq!(bitmap.copy(all.clone(), &mut copy), nr_pages);
        for range in [0..1, 1..2, 63..65, 64..128, 10..300, 312..313, 5..5] {
            let mut part = vec![7; range.len()];
            let nr_marked = copy[range.clone()].iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
            assert_eq!(bitmap.copy(range.clone(), &mut part), nr_marked, "{range:?}");
            assert_eq!(part, copy[range]);
        }
        assert_eq!(bitmap.nr_marked(0..usize::MAX), nr_pages);
        let taken = take_all(&bitmap, all.clone());
        assert!(pages(&taken).into_iter().eq(first..first + nr_pages), "{first}+{nr_pages}");
        assert_eq!(copy, taken);
        assert!(take_all(&bitmap, all).iter().all(|&word| word == 0));
    }
}

#[test]
fn a_harvest_of_a_range_clears_its_words_alone() {
    for range in [0..1, 1..2, 63..65, 64..128, 10..300, 0..313, 312..313, 5..5] {
        let bitmap = Bitmap::new_marked(20_000).unwrap();
        let full = |index: usize| if index == 312 { (1 << 32) - 1 } else { u64::MAX };
        let taken = take_all(&bitmap, range.clone());
        assert!(taken.iter().zip(range.clone()).all(|(&word, index)| word == full(index)), "{range:?}");
        let rest = take_all(&bitmap, 0..313);
        for (index, &word) in rest.iter().enumerate() {
            assert_eq!(word, if range.contains(&index) { 0 } else { full(index) }, "word {index} after {range:?}");
        }
    }
}

#[test]
fn a_mask_clears_its_bits_and_keeps_the_others() {
    let bitmap = Bitmap::new(20_000).unwrap();
    bitmap.mark(0, 20_000);
    let masks: Vec<u64> = (0..313_u64).map(|index| [0, u64::MAX, 1, 0xff00][index as usize % 4]).collect();
    let mut taken = TakenWords::new();
    let mut next = 0;
    while next < 313 {
        taken.clear();
        let start = next;
        next = bitmap.take_masked(next..313, &masks[next..], &mut taken);
        for (&offset, &bits) in taken.offsets().iter().zip(taken.bits()) {
            let index = start + usize::from(offset);
            let word = if index == 312 { (1 << 32) - 1 } else { u64::MAX };
            assert_eq!(bits, masks[index] & word);
        }
    }
    assert!(!bitmap.is_marked(64) && !bitmap.is_marked(128) && bitmap.is_marked(129) && bitmap.is_marked(0));
    // Twice: nothing is left of it.
    taken.clear();
    assert_eq!(bitmap.take_masked(0..313, &masks, &mut taken), 313);
    assert!(taken.is_empty());
    for (index, word) in take_all(&bitmap, 0..313).into_iter().enumerate() {
        let full = if index == 312 { (1 << 32) - 1 } else { u64::MAX };
        assert_eq!(word, full & !masks[index], "word {index}");
    }
    // Marks in words that a mask had emptied are found again.
    bitmap.mark(64, 64);
    assert_eq!(pages(&take_all(&bitmap, 0..313)), (64..128).collect::<Vec<_>>());
}

#[test]
fn a_bitmap_that_cannot_be_allocated_is_an_error() {
    assert_eq!(Bitmap::new(u64::MAX).err(), Some(OutOfMemory));
    assert_eq!(nr_words(0), 0);
    assert!(Bitmap::new(0).is_ok());
}
