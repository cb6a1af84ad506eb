use alloc::vec::Vec;

use super::*;

fn range(start: u64, end: u64) -> GfnRange {
    GfnRange { start: Gfn(start), end: Gfn(end) }
}

#[test]
fn a_range_counts_from_publishing_to_withdrawing() {
    let set = RangesInFlight::default();
    assert_eq!(set.free_level(Gfn(5), Level(3)), Some(Level(3)));
    let in_flight = set.publish(range(5, 7)).unwrap();
    for (gfn, expected) in [(4, Some(1)), (5, None), (6, None), (7, Some(1)), (511, Some(1)), (512, Some(2))] {
        assert_eq!(set.free_level(Gfn(gfn), Level(3)), expected.map(Level), "frame {gfn}");
    }
    assert_eq!(set.free_level(Gfn(1 << 18), Level(3)), Some(Level(3)));
    drop(in_flight);
    assert_eq!(set.free_level(Gfn(5), Level(3)), Some(Level(3)));
}

#[test]
fn many_ranges_stay_apart_and_places_are_used_again() {
    let set = RangesInFlight::default();
    for _ in 0..3 {
        let in_flight: Vec<_> = (0..100).map(|n| set.publish(range(n * 1024, n * 1024 + 1)).unwrap()).collect();
        for n in 0..100 {
            assert_eq!(set.free_level(Gfn(n * 1024), Level(1)), None);
            assert_eq!(set.free_level(Gfn(n * 1024 + 1), Level(2)), Some(Level(1)));
            assert_eq!(set.free_level(Gfn(n * 1024 + 512), Level(2)), Some(Level(2)));
        }
        drop(in_flight);
        assert_eq!(set.free_level(Gfn(0), Level(4)), Some(Level(4)));
    }
    // As many chunks as were needed at once, and not thrice as many.
    let lists = set.lists.get().unwrap();
    let nr_chunks: usize = lists.of_blocks.iter().map(nr_used_chunks).sum();
    assert!((100 - NR_PLACES).div_ceil(NR_PLACES) <= nr_chunks && nr_chunks <= 100 - NR_PLACES, "{nr_chunks} chunks");
    assert!(lists.of_blocks.iter().all(|list| list.next().is_none()));
    assert_eq!(nr_used_chunks(&lists.large), 0);
}

/// How many chunks of a list have had a range.
fn nr_used_chunks(list: &Chunk) -> usize {
    let chunks = core::iter::successors(Some(list), |chunk| chunk.next());
    chunks.filter(|chunk| chunk.places[0].end.load(Ordering::Relaxed) != 0).count()
}

/// The greatest level of a free block, from the ranges themselves.
fn free_level_of(ranges: &[GfnRange], gfn: Gfn, level: Level) -> Option<Level> {
    let levels = (1..=level.0).rev().map(Level);
    levels.into_iter().find(|&level| ranges.iter().all(|range| !range.overlaps(gfn.block(level))))
}

/// Ranges of all kinds: within a block, across a border, of several blocks, up to the last frame.
fn ranges(nr_ranges: u64) -> Vec<GfnRange> {
    let shapes = [(3, 1), (510, 4), (0, 512), (511, 514), (100, 2000), (0, 1 << 18), (1, (1 << 18) + 5)];
    (0..nr_ranges)
        .map(|n| {
            let (offset, nr_pages) = shapes[n as usize % shapes.len()];
            GfnRange::new(Gfn(n * 7 * 512 * 97 % (1 << 24) + offset), nr_pages)
        })
        .chain([range(u64::MAX - 3, u64::MAX)])
        .collect()
}

#[test]
fn faults_find_what_is_free_among_ranges_of_all_kinds() {
    let all = ranges(300);
    let set = RangesInFlight::default();
    // The first of them fill the first chunk, and leave it again in between.
    let mut held = Vec::new();
    for (n, &range) in all.iter().enumerate() {
        held.push((range, set.publish(range).unwrap()));
        if n % 5 == 4 {
            drop(held.remove(n * 13 % held.len()));
        }
    }
    for (range, in_flight) in &held {
        assert_eq!(in_flight.range(), *range);
    }
    let current: Vec<GfnRange> = held.iter().map(|&(range, _)| range).collect();
    for &range in &all {
        let near = [
            range.start.0.saturating_sub(1),
            range.start.0,
            range.end.0 - 1,
            range.end.0,
            range.end.0.saturating_add(513),
        ];
        for gfn in near.map(|gfn| Gfn(gfn.min(u64::MAX - 1))) {
            for level in [Level(1), Level(2), Level(3), Level(4)] {
                let expected = free_level_of(&current, gfn, level);
                assert_eq!(set.free_level(gfn, level), expected, "{gfn} of {level:?}");
            }
        }
    }
    drop(held);
    assert_eq!(set.first.word.load(Ordering::Relaxed), 0);
    for &range in &all {
        assert_eq!(set.free_level(range.start, Level(4)), Some(Level(4)));
    }
}

#[test]
fn a_fault_reads_no_range_of_another_block() {
    let set = RangesInFlight::default();
    let full: Vec<_> = (0..NR_PLACES as u64).map(|n| set.publish(range(n << 30, (n << 30) + 1)).unwrap()).collect();
    let in_flight: Vec<_> = (0..20_000).map(|n| set.publish(range(n, n + 1)).unwrap()).collect();
    let lists = set.lists.get().unwrap();
    // Many in the list of each of their blocks, and none in nearly all other lists.
    assert!(nr_used_chunks(lists.of_block(Gfn(0))) >= 512 / NR_PLACES);
    let nr_lists_used = lists.of_blocks.iter().filter(|list| nr_used_chunks(list) != 0).count();
    assert!(nr_lists_used <= 20_000_usize.div_ceil(512));
    assert_eq!(set.free_level(Gfn(19_999), Level(1)), None);
    assert_eq!(set.free_level(Gfn(20_000), Level(2)), Some(Level(1)));
    drop((in_flight, full));
    assert_eq!(set.first.word.load(Ordering::Relaxed), 0);
}

#[test]
fn each_place_of_a_long_list_is_withdrawn_alone() {
    let set = RangesInFlight::default();
    let full: Vec<_> =
        (0..NR_PLACES as u64).map(|n| set.publish(GfnRange::new(Gfn((n + 1) << 30), 1)).unwrap()).collect();
    let mut in_flight: Vec<_> = (0..512).map(|n| Some(set.publish(range(n, n + 1)).unwrap())).collect();
    for nth in 0..512 {
        let withdrawn = nth * 211 % 512;
        in_flight[withdrawn] = None;
        for (page, left) in in_flight.iter().enumerate() {
            let expected = left.is_none().then_some(Level(1));
            assert_eq!(set.free_level(Gfn(page as u64), Level(1)), expected, "page {page}, without {withdrawn}");
        }
    }
    drop(full);
    assert_eq!(set.first.word.load(Ordering::Relaxed), 0);
}

#[test]
fn a_position_has_what_it_was_made_of() {
    for list in [List::First, List::Large, List::OfBlocks(0), List::OfBlocks((1 << LIST_BITS) - 1)] {
        for (nth_chunk, place) in [(0, 0), (1, NR_PLACES - 1), (Position::MAX_CHUNKS - 1, 3 % NR_PLACES)] {
            let position = Position::new(list, nth_chunk, place);
            assert!(position != Position::NONE);
            assert_eq!((position.list(), position.nth_chunk(), position.place()), (list, nth_chunk, place));
        }
    }
}

#[test]
fn a_count_that_is_full_refuses_another_range() {
    let set = RangesInFlight::default();
    let full: Vec<_> = (0..NR_PLACES as u64).map(|n| set.publish(range(n, n + 1)).unwrap()).collect();
    for (shift, nr_pages) in [(IN_BLOCKS_SHIFT, 1), (LARGE_SHIFT, 4096)] {
        set.first.word.fetch_add(MAX_COUNT << shift, Ordering::Relaxed);
        let before = set.first.word.load(Ordering::Relaxed);
        assert_eq!(set.publish(range(512, 512 + nr_pages)).err(), Some(OutOfMemory));
        assert_eq!(set.first.word.load(Ordering::Relaxed), before);
        set.first.word.fetch_sub(MAX_COUNT << shift, Ordering::Relaxed);
    }
    drop(full);
}
