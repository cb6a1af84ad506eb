//! The store-load pairs on the hardware that runs this test, each with the fences that the engine
//! uses. Each side stores, then loads what the other stores; at least one of the two loads must
//! observe the other's store. loom tries the memory model. Only the machine can show that
//! `fence_after_rmw`, which is no fence in that model, is one here, and that `membarrier` serves
//! both sides.
//!
//! Two threads go over two arrays of cells side by side, for a bounded time. The ignored test shows
//! that the tests can fail.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

#[cfg(target_os = "linux")]
#[path = "support/membarrier.rs"]
mod membarrier;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, compiler_fence};
use std::time::{Duration, Instant};

use slat::baselines::{fence_after_rmw, full_fence};

const RUN: Duration = Duration::from_millis(1000);
/// Cells that both go over between two meetings.
const CELLS: usize = 512;

#[repr(align(128))]
#[derive(Default)]
struct Cell(AtomicU64);

/// One side: stores to its own cell, and returns what it then loads from the other's.
type Side = fn(own: &AtomicU64, other: &AtomicU64) -> u64;

#[derive(Default)]
struct Array {
    cells: Vec<Cell>,
    found: Vec<AtomicU64>,
}

impl Array {
    fn new() -> Array {
        Array {
            cells: (0..CELLS).map(|_| Cell::default()).collect(),
            found: (0..CELLS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Goes over the cells once.
    fn run(&self, side: Side, other: &Array) {
        for ((own, theirs), found) in self.cells.iter().zip(&other.cells).zip(&self.found) {
            found.store(side(&own.0, &theirs.0), Ordering::Relaxed);
        }
    }

    fn clear(&self) {
        self.cells.iter().for_each(|cell| cell.0.store(0, Ordering::Relaxed));
    }
}

/// Lets both sides go over the cells repeatedly. Returns how often they met, and how often both
/// missed the other's store.
fn litmus(sides: [Side; 2]) -> (u64, u64) {
    let [a, b] = [Array::new(), Array::new()];
    let (barrier, is_over) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            loop {
                barrier.wait();
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                b.run(sides[1], &a);
                barrier.wait();
            }
        });
        let (start, mut tries, mut missed) = (Instant::now(), 0, 0);
        while tries == 0 || start.elapsed() < RUN {
            a.clear();
            b.clear();
            barrier.wait();
            a.run(sides[0], &b);
            barrier.wait();
            tries += CELLS as u64;
            let both = a.found.iter().zip(&b.found);
            missed +=
                both.filter(|(a, b)| a.load(Ordering::Relaxed) == 0 && b.load(Ordering::Relaxed) == 0).count() as u64;
        }
        is_over.store(true, Ordering::Relaxed);
        barrier.wait();
        (tries, missed)
    })
}

fn assert_never_missed(sides: [Side; 2]) {
    let (tries, missed) = litmus(sides);
    assert!(tries > 0);
    assert_eq!(missed, 0, "of {tries} tries");
}

/// As PTEs and bits are changed, and epochs announced: an atomic read-modify-write, and the fence
/// after it.
fn by_rmw(own: &AtomicU64, other: &AtomicU64) -> u64 {
    own.swap(1, Ordering::SeqCst);
    fence_after_rmw();
    other.load(Ordering::Relaxed)
}

/// As flags are published and page-table pages unlinked: with the full fence.
fn by_fence(own: &AtomicU64, other: &AtomicU64) -> u64 {
    own.store(1, Ordering::Release);
    full_fence();
    other.load(Ordering::Acquire)
}

/// Without a fence of the processor.
fn by_nothing(own: &AtomicU64, other: &AtomicU64) -> u64 {
    own.store(1, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    other.load(Ordering::Relaxed)
}

#[test]
fn a_leaf_made_writable_and_a_bit_cleared() {
    assert_never_missed([by_rmw, by_rmw]);
}

#[test]
fn a_leaf_made_writable_and_a_flag_published() {
    assert_never_missed([by_rmw, by_fence]);
}

#[test]
fn an_epoch_announced_and_a_table_unlinked() {
    assert_never_missed([by_rmw, |own, other| {
        own.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Acquire).expect("no other thread changes it");
        full_fence();
        other.load(Ordering::Acquire)
    }]);
}

/// A guard that makes no fence, beside a reclaimer that makes the barrier for both.
#[cfg(target_os = "linux")]
#[test]
fn an_epoch_announced_without_a_fence_and_a_barrier_on_all_cpus() {
    if !membarrier::is_available() {
        return;
    }
    assert_never_missed([by_nothing, |own, other| {
        own.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Acquire).expect("no other thread changes it");
        full_fence();
        membarrier::on_all_cpus();
        other.load(Ordering::Acquire)
    }]);
}

#[test]
#[ignore = "needs two CPUs of its own"]
fn without_a_fence_both_sides_miss() {
    for sides in [[by_nothing as Side, by_nothing], [by_rmw, by_nothing]] {
        let (tries, missed) = litmus(sides);
        assert!(missed > 0, "not in {tries} tries");
    }
}
