use alloc::vec::Vec;

use super::*;

const SLOT: u32 = MemoryRegion::MAX_SLOTS - 1;

fn page(page: u64) -> DirtyPage {
    DirtyPage { slot: SLOT, page }
}

/// A ring of 8 entries whose soft limit is 6.
fn ring() -> DirtyRing {
    DirtyRing::new(8, 2).unwrap()
}

fn harvest(ring: &DirtyRing) -> Vec<u64> {
    let mut pages = Vec::new();
    let nr_harvested = ring.harvest(|page| pages.push(page.page));
    assert_eq!(nr_harvested, pages.len() as u64);
    pages
}

/// Resets, and returns the pages to protect.
fn reset(ring: &DirtyRing) -> Vec<u64> {
    let mut reset = ring.reset();
    let pages: Vec<u64> = reset.by_ref().map(|page| page.page).collect();
    assert_eq!(reset.finish(), pages.len() as u64);
    pages
}

#[test]
fn an_entry_is_empty_dirty_harvested_and_empty_again() {
    let ring = ring();
    let largest = DirtyPage { slot: SLOT, page: (1 << SLOT_SHIFT) - 1 };
    assert_eq!(ring.entry(0), DirtyRingEntry::Empty);
    ring.push(largest);
    assert_eq!(ring.entry(0), DirtyRingEntry::Dirty(largest));
    assert_eq!(ring.entry(1), DirtyRingEntry::Empty);
    assert!(reset(&ring).is_empty(), "it is not harvested");
    assert_eq!(ring.harvest(|page| assert_eq!(page, largest)), 1);
    assert_eq!(ring.entry(0), DirtyRingEntry::Harvested(largest));
    assert!(harvest(&ring).is_empty(), "it is harvested");
    assert_eq!((ring.first_index(), ring.room()), (0, 7));
    assert_eq!(reset(&ring), [largest.page]);
    assert!(reset(&ring).is_empty(), "it is reset");
    assert_eq!(ring.entry(0), DirtyRingEntry::Empty);
    assert_eq!((ring.first_index(), ring.room()), (1, 8));
}

#[test]
fn order_is_kept_around_the_end() {
    let ring = ring();
    let mut next = 0;
    for round in 0..100 {
        let nr_pages = 1 + round % 8;
        let pages: Vec<u64> = (next..next + nr_pages).collect();
        next += nr_pages;
        pages.iter().for_each(|&number| ring.push(page(number)));
        assert_eq!(ring.room(), 8 - nr_pages);
        let (first, rest) = pages.split_first().unwrap();
        // One alone, by its index, and the others at once.
        assert_eq!(ring.entry(*first), DirtyRingEntry::Dirty(page(*first)));
        assert!(ring.mark_harvested(*first));
        assert_eq!(harvest(&ring), rest);
        assert_eq!(reset(&ring), pages);
        assert_eq!((ring.first_index(), ring.room()), (next, 8));
    }
}

#[test]
fn a_ring_is_soft_full_until_a_reset() {
    let ring = ring();
    for number in 0..8 {
        assert_eq!(ring.is_soft_full(), number >= 6, "with {number} entries");
        ring.push(page(number));
    }
    assert_eq!(ring.room(), 0);
    assert_eq!(harvest(&ring).len(), 8);
    assert!(ring.is_soft_full(), "a harvest makes no room");
    assert_eq!(reset(&ring), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(!ring.is_soft_full());
}

#[test]
fn a_reset_stops_at_the_first_entry_that_is_not_harvested() {
    let ring = ring();
    (0..6).for_each(|number| ring.push(page(number)));
    assert!(ring.mark_harvested(3) && ring.mark_harvested(1));
    assert!(!ring.mark_harvested(1), "it was harvested already");
    assert_eq!(ring.entry(3), DirtyRingEntry::Harvested(page(3)));
    assert!(reset(&ring).is_empty());
    assert!(ring.mark_harvested(0));
    assert_eq!(reset(&ring), [0, 1]);
    // The rest in order; number 3 was harvested.
    assert_eq!(harvest(&ring), [2, 4, 5]);
    assert!(!ring.mark_harvested(4));
    assert_eq!(reset(&ring), [2, 3, 4, 5]);
}

#[test]
fn indices_out_of_the_ring_are_refused() {
    let ring = ring();
    (0..3).for_each(|number| ring.push(page(number)));
    assert_eq!(harvest(&ring), [0, 1, 2]);
    assert_eq!(reset(&ring), [0, 1, 2]);
    (3..9).for_each(|number| ring.push(page(number)));
    // 0 and 8 share an entry, and 1 and 9 would.
    for index in [0, 1, 2, 9, 10, 11, 3 + 8, u64::MAX - 7, u64::MAX] {
        assert_eq!(ring.entry(index), DirtyRingEntry::Empty, "entry {index}");
        assert!(!ring.mark_harvested(index), "entry {index}");
    }
    assert_eq!(harvest(&ring), [3, 4, 5, 6, 7, 8]);
}

#[test]
fn a_reset_that_was_overtaken_by_rounds_does_no_harm() {
    for marks in [None, Some(())] {
        let ring = ring();
        let take_all = |ring: &DirtyRing| match marks {
            None => ring.harvest(|_| {}),
            Some(()) => (ring.first_index()..).take_while(|&index| ring.mark_harvested(index)).count() as u64,
        };
        (0..5).for_each(|number| ring.push(page(number)));
        assert_eq!(take_all(&ring), 5);
        let mut late = ring.reset();
        let mut later = ring.reset();
        assert_eq!(late.next(), Some(page(0)));
        // Another two rounds meanwhile, and the beginning of a third.
        let mut next = 5;
        for _ in 0..2 {
            assert_eq!(reset(&ring).len(), 5);
            (next..next + 5).for_each(|number| ring.push(page(number)));
            next += 5;
            assert_eq!(take_all(&ring), 5);
        }
        assert_eq!(reset(&ring), [10, 11, 12, 13, 14]);
        (15..18).for_each(|number| ring.push(page(number)));
        // They reach their ends, whatever they find there, and free nothing.
        assert!(late.by_ref().count() + 1 >= 5);
        assert!(later.by_ref().count() >= 5);
        assert_eq!((late.finish(), later.finish()), (0, 0));
        assert_eq!((ring.first_index(), ring.room()), (15, 5));
        assert_eq!(harvest(&ring), [15, 16, 17]);
    }
}

#[test]
fn two_resets_at_once_count_each_entry_once() {
    let ring = ring();
    (0..4).for_each(|number| ring.push(page(number)));
    assert_eq!(harvest(&ring).len(), 4);
    let (mut some, mut all) = (ring.reset(), ring.reset());
    some.by_ref().take(2).for_each(drop);
    assert_eq!(all.by_ref().count(), 4);
    assert_eq!(some.finish(), 2);
    assert_eq!(all.finish(), 2);
    assert_eq!(ring.room(), 8);
}

#[test]
fn entries_of_an_interrupted_harvest_are_not_lost() {
    extern crate std;
    let ring = ring();
    (0..3).for_each(|number| ring.push(page(number)));
    // The caller's closure unwinds at the second.
    let cut_off = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        ring.harvest(|page| assert_eq!(page.page, 0, "cut off"));
    }));
    assert!(cut_off.is_err());
    assert_eq!(harvest(&ring), [2]);
    assert_eq!(reset(&ring), [0, 1, 2]);
}

/// Threads push, harvest and reset as fast as they can. Each page is harvested once, and the vCPU's
/// thread makes progress.
fn stress(take: impl Fn(&DirtyRing, &mut dyn FnMut(DirtyPage)) -> u64 + Sync) {
    extern crate std;
    use std::sync::atomic::AtomicU64;
    use std::thread;

    const PAGES: u64 = 100_000;
    let ring = DirtyRing::new(64, 8).unwrap();
    let (sum, taken, freed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..PAGES {
                while ring.is_soft_full() {
                    thread::yield_now();
                }
                ring.push(page(number));
            }
        });
        for _ in 0..3 {
            scope.spawn(|| {
                while freed.load(Ordering::Relaxed) < PAGES {
                    let nr_harvested = take(&ring, &mut |page| {
                        assert_eq!(page.slot, SLOT);
                        sum.fetch_add(page.page, Ordering::Relaxed);
                    });
                    taken.fetch_add(nr_harvested, Ordering::Relaxed);
                    let mut reset = ring.reset();
                    reset.by_ref().for_each(|page| assert!(page.page < PAGES));
                    freed.fetch_add(reset.finish(), Ordering::Relaxed);
                    thread::yield_now();
                }
            });
        }
    });
    assert_eq!((taken.into_inner(), freed.into_inner()), (PAGES, PAGES));
    assert_eq!(sum.into_inner(), PAGES * (PAGES - 1) / 2);
    assert_eq!(ring.room(), 64);
}

#[test]
fn concurrent_harvests_report_each_mark_once() {
    stress(|ring, take| ring.harvest(take));
}

#[test]
fn concurrent_marks_are_reported_once() {
    stress(|ring, take| {
        let mut taken = 0;
        for index in ring.first_index().. {
            match ring.entry(index) {
                DirtyRingEntry::Dirty(page) if ring.mark_harvested(index) => {
                    taken += 1;
                    take(page);
                }
                DirtyRingEntry::Dirty(_) | DirtyRingEntry::Harvested(_) => {}
                DirtyRingEntry::Empty => break,
            }
        }
        taken
    });
}
