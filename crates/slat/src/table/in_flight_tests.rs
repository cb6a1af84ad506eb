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
    let mut nr_chunks = 1;
    let mut chunk = &set.first;
    while let Some(next) = chunk.next() {
        nr_chunks += 1;
        chunk = next;
    }
    assert_eq!(nr_chunks, 100_usize.div_ceil(NR_PLACES));
}
