use alloc::vec::Vec;

use super::*;

#[test]
fn only_sizes_that_kvm_takes_and_only_once() {
    let rings = Rings::new();
    for nr_entries in [0, 1, 64, 65, 128, 255, 257, 4095, 65535, 65537, 131_072, 1 << 31, u32::MAX] {
        assert_eq!(rings.enable(nr_entries), Err(Error::BadRingSize { nr_entries }));
        assert!(!rings.are_enabled());
    }
    assert_eq!(rings.enable(DirtyRing::MIN_ENTRIES), Ok(()));
    assert!(rings.are_enabled());
    assert_eq!(rings.enable(DirtyRing::MAX_ENTRIES), Err(Error::DirtyRingEnabled));
    assert_eq!(rings.enable(3), Err(Error::BadRingSize { nr_entries: 3 }));
    assert_eq!(Rings::new().enable(DirtyRing::MAX_ENTRIES), Ok(()));
}

#[test]
fn as_long_as_there_are_vcpus_there_are_no_rings() {
    let rings = Rings::new();
    assert!(rings.take().unwrap().is_none());
    assert_eq!(rings.enable(256), Err(Error::VcpusExist));
    assert!(rings.take().unwrap().is_none() && !rings.are_enabled());
    rings.leave();
    assert_eq!(rings.enable(256), Err(Error::VcpusExist));
    assert_eq!(rings.iter().count(), 0);
    // Nor while huge pages are put back.
    let recovery = rings.keep_out().unwrap();
    rings.leave();
    assert_eq!(rings.enable(256), Err(Error::VcpusExist));
    drop(recovery);
    assert_eq!(rings.enable(256), Ok(()));
    assert!(rings.keep_out().is_none() && rings.take().unwrap().is_some());
}

#[test]
fn a_ring_stays_with_its_entries_and_is_taken_over() {
    let rings = Rings::new();
    rings.enable(512).unwrap();
    let take = || rings.take().unwrap().unwrap();
    let (mut one, other) = (take(), take());
    // SAFETY: `rings` is alive.
    let (first, second) = unsafe { (one.get(), other.get()) };
    assert!(!ptr::eq(first, second));
    assert_eq!((first.nr_entries(), first.room()), (512, 512));
    first.push(DirtyPage { slot: 0, page: 7 });
    // SAFETY: as above.
    unsafe { one.release() };
    assert_eq!(rings.iter().count(), 2);
    let again = take();
    // SAFETY: as above.
    let again_first = unsafe { again.get() };
    assert!(ptr::eq(first, again_first));
    again_first.push(DirtyPage { slot: 0, page: 8 });
    let mut pages = Vec::new();
    for ring in rings.iter() {
        ring.harvest(|page| pages.push(page.page));
    }
    assert_eq!(pages, [7, 8]);
    let third = take();
    // SAFETY: as above.
    assert!(!ptr::eq(unsafe { third.get() }, first));
    assert_eq!(rings.iter().count(), 3);
}

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
fn words_are_sorted_and_the_same_are_made_one() {
    let word = |slot, index, bits| PageWord { slot, index, bits };
    let plain = |words: &[PageWord]| words.iter().map(|word| (word.slot, word.index, word.bits)).collect::<Vec<_>>();
    let mut words =
        [word(2, 0, 1), word(1, 9, 4), word(1, 7, 1), word(2, 0, 8), word(1, 7, 1), word(2, 0, 2), word(1, 8, 1)];
    assert_eq!(plain(in_order(&mut words)), [(1, 7, 1), (1, 8, 1), (1, 9, 4), (2, 0, 11)]);
    assert!(plain(in_order(&mut [])).is_empty());
    assert_eq!(plain(in_order(&mut [word(5, 5, 5)])), [(5, 5, 5)]);
    assert_eq!(plain(in_order(&mut [word(5, 5, 1), word(5, 5, 2)])), [(5, 5, 3)]);
}
