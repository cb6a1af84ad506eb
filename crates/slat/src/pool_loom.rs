//! The pool under loom: every interleaving of threads that claim, add and release.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --lib loom`

extern crate std;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::*;

/// Loom fails the test if two threads use it at once, or if one does not observe what its last
/// user has done.
struct Thing {
    link: PoolLink<Thing>,
    nr_uses: UnsafeCell<u32>,
}

// SAFETY: the tests access the number as the user of the thing, and loom checks that.
unsafe impl Sync for Thing {}

// SAFETY: it is one field of the thing.
unsafe impl Pooled for Thing {
    fn link(&self) -> &PoolLink<Thing> {
        &self.link
    }
}

/// Uses a thing of the pool: a free one, or a new one.
fn use_one(pool: &Pool<Thing>) {
    let new = || Box::new(Thing { link: PoolLink::new(), nr_uses: UnsafeCell::new(0) });
    let thing = pool.claim().unwrap_or_else(|| pool.add(new()));
    // SAFETY: loom has checked that no other access is concurrent before it calls the closure.
    thing.nr_uses.with_mut(|nr_uses| unsafe { *nr_uses += 1 });
    // SAFETY: this thread is its user, and does not use it any more.
    unsafe { thing.link.release() }
}

fn nr_uses(pool: &Pool<Thing>) -> u32 {
    // SAFETY: the threads are over; loom checks that.
    pool.iter().map(|thing| thing.nr_uses.with(|nr_uses| unsafe { *nr_uses })).sum()
}

/// Threads that use the pool at once, after `nr_before` uses of it.
fn check(nr_before: u32, uses: [u32; 2]) {
    loom::model(move || {
        let pool = Arc::new(Pool::new());
        (0..nr_before).for_each(|_| use_one(&pool));
        let threads = uses.map(|nr_uses| {
            let pool = Arc::clone(&pool);
            thread::spawn(move || (0..nr_uses).for_each(|_| use_one(&pool)))
        });
        threads.into_iter().for_each(|thread| thread.join().expect("no check fails"));
        assert_eq!(nr_uses(&pool), nr_before + uses.iter().sum::<u32>());
        // Each is free again.
        assert_eq!(core::iter::from_fn(|| pool.claim()).count(), pool.iter().count());
    });
}

#[test]
fn a_new_thing_is_found_by_the_hint_as_it_was_made() {
    check(0, [1, 2]);
}

#[test]
fn a_thing_that_two_threads_remember_has_one_user() {
    check(1, [2, 1]);
}
