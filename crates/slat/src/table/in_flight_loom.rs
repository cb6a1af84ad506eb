//! Every interleaving of a fault with an invalidation whose range is published behind the first
//! chunk (here a chunk has one place). A fault that reads its sequence number, and does not observe
//! its range in flight, observes what the host did.

#![expect(unsafe_code, reason = "a cell that loom watches stands for the frame")]

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;
use crate::table::invalidation_seq::InvalidationSeqCounter;

struct World {
    set: RangesInFlight,
    seqs: InvalidationSeqCounter,
    /// Whether the host has moved the frame.
    is_moved: UnsafeCell<bool>,
}

// SAFETY: loom checks the accesses to the cell.
unsafe impl Sync for World {}

fn range(start: u64) -> GfnRange {
    GfnRange::new(Gfn(start), 1)
}

/// Runs `invalidate`, which moves the frame of page `gfn`, beside a fault there.
fn check(gfn: Gfn, invalidate: fn(&World)) {
    loom::model(move || {
        let (set, seqs) = (RangesInFlight::default(), InvalidationSeqCounter::new());
        let world = Arc::new(World { set, seqs, is_moved: UnsafeCell::new(false) });
        let before = world.seqs.current();
        let fault = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let found = world.seqs.current();
                if world.set.free_level(gfn, Level::L4K).is_some() && found > before {
                    // SAFETY: loom checks that no other thread writes meanwhile.
                    assert!(world.is_moved.with(|cell| unsafe { *cell }));
                }
            })
        };
        invalidate(&world);
        fault.join().unwrap();
        assert_eq!(world.set.free_level(gfn, Level(2)), Some(Level(2)));
    });
}

fn move_frame(world: &World) {
    world.seqs.next();
    // SAFETY: loom checks that no other thread reads meanwhile.
    world.is_moved.with_mut(|cell| unsafe { *cell = true });
}

#[test]
fn a_range_behind_the_first_chunk_is_observed_until_its_end() {
    check(Gfn(1), |world| {
        let first = world.set.publish(range(0)).unwrap();
        let second = world.set.publish(range(1)).unwrap();
        move_frame(world);
        drop(second);
        drop(first);
    });
}

#[test]
fn a_range_behind_the_first_chunk_outlives_the_one_before_it() {
    check(Gfn(1), |world| {
        let first = world.set.publish(range(0)).unwrap();
        let second = world.set.publish(range(1)).unwrap();
        drop(first);
        move_frame(world);
        drop(second);
    });
}

#[test]
fn both_parts_of_a_range_across_a_border_are_observed() {
    for gfn in [511, 512] {
        check(Gfn(gfn), |world| {
            let first = world.set.publish(range(0)).unwrap();
            let second = world.set.publish(GfnRange::new(Gfn(511), 2)).unwrap();
            move_frame(world);
            drop(second);
            drop(first);
        });
    }
}

#[test]
fn a_large_range_behind_the_first_chunk_is_observed() {
    check(Gfn(700), |world| {
        let first = world.set.publish(range(0)).unwrap();
        let second = world.set.publish(GfnRange::new(Gfn(0), 4096)).unwrap();
        move_frame(world);
        drop(second);
        drop(first);
    });
}
