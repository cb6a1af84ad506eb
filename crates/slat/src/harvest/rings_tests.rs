use alloc::vec::Vec;

use super::*;

#[test]
fn words_end_with_their_slot() {
    let word = PageWord { slot: 1, index: 2, bits: u64::MAX };
    for (nr_pages, expected) in [
        (0, 0),
        (127, 0),
        (128, 0),
        (129, 1),
        (130, 3),
        (191, u64::MAX >> 1),
        (192, u64::MAX),
        (193, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        assert_eq!(word.bits_below(nr_pages), expected, "slot of {nr_pages} pages");
    }
    let word = PageWord::of(DirtyPage { slot: 7, page: 64 * 5 + 63 });
    assert_eq!((word.slot, word.index, word.bits), (7, 5, 1 << 63));
}

#[test]
fn words_are_sorted_and_merged() {
    let word = |slot, index, bits| PageWord { slot, index, bits };
    let plain = |words: &[PageWord]| words.iter().map(|word| (word.slot, word.index, word.bits)).collect::<Vec<_>>();
    let mut words =
        [word(2, 0, 1), word(1, 9, 4), word(1, 7, 1), word(2, 0, 8), word(1, 7, 1), word(2, 0, 2), word(1, 8, 1)];
    assert_eq!(plain(in_order(&mut words)), [(1, 7, 1), (1, 8, 1), (1, 9, 4), (2, 0, 11)]);
    assert!(plain(in_order(&mut [])).is_empty());
    assert_eq!(plain(in_order(&mut [word(5, 5, 5)])), [(5, 5, 5)]);
    assert_eq!(plain(in_order(&mut [word(5, 5, 1), word(5, 5, 2)])), [(5, 5, 3)]);
}
