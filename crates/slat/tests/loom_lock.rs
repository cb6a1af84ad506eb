//! The optional locks under loom: every schedule of a few threads with at most [`PREEMPTIONS`]
//! preemptions, with the memory orders as they are written.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p slat --release --test 'loom_*'`
#![cfg(loom)]

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use slat::baselines::{Lock, Locking, Park, Side};

/// Enough for every bug of a lock that needs two threads to overtake a third.
const PREEMPTIONS: usize = 3;

/// One sleeper.
struct Sleeper {
    word: usize,
    ticket: usize,
}

/// A futex made of a mutex and a condition variable. Loom reports a deadlock when all threads
/// sleep, so a lost wake-up fails the test.
struct LoomPark {
    sleepers: Mutex<(VecDeque<Sleeper>, usize)>,
    wake: Condvar,
}

impl LoomPark {
    fn new() -> LoomPark {
        LoomPark { sleepers: Mutex::new((VecDeque::new(), 0)), wake: Condvar::new() }
    }

    fn unpark(&self, word: *const AtomicU32, most: usize) -> bool {
        let mut sleepers = self.sleepers.lock().expect("no test panics inside");
        let mut woken = 0;
        sleepers.0.retain(|sleeper| {
            let wake = sleeper.word == word.addr() && woken < most;
            woken += usize::from(wake);
            !wake
        });
        if woken > 0 {
            self.wake.notify_all();
        }
        woken > 0
    }
}

impl Park for LoomPark {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let mut sleepers = self.sleepers.lock().expect("no test panics inside");
        if word.load(Ordering::SeqCst) != expected {
            return;
        }
        let ticket = sleepers.1;
        sleepers.1 += 1;
        sleepers.0.push_back(Sleeper { word: std::ptr::from_ref(word).addr(), ticket });
        while sleepers.0.iter().any(|sleeper| sleeper.ticket == ticket) {
            sleepers = self.wake.wait(sleepers).expect("no test panics inside");
        }
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        self.unpark(word, 1)
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        self.unpark(word, usize::MAX);
    }
}

struct Shared {
    lock: Lock,
    park: LoomPark,
    /// Loom fails the test if a write to it is concurrent with another access.
    data: UnsafeCell<u64>,
}

fn critical_section(shared: &Shared, side: Side) {
    let _guard = shared.lock.acquire(&shared.park, side);
    use_data(shared, side);
}

#[expect(unsafe_code, reason = "loom's cell, which checks the accesses itself")]
fn use_data(shared: &Shared, side: Side) {
    match side {
        // SAFETY: loom has checked that no other access is concurrent before it calls the closure.
        Side::Write => shared.data.with_mut(|data| unsafe { *data += 1 }),
        // SAFETY: loom has checked that no write is concurrent before it calls the closure.
        Side::Read => assert!(shared.data.with(|data| unsafe { *data }) <= 4),
    }
}

/// Each of `threads` runs its critical sections; the first is the model's own thread. In the end
/// the lock must be free.
fn model(locking: Locking, threads: &'static [&'static [Side]]) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(PREEMPTIONS);
    builder.check(move || {
        let shared = Arc::new(Shared { lock: Lock::new(locking), park: LoomPark::new(), data: UnsafeCell::new(0) });
        let (first, others) = threads.split_first().expect("a model has a thread");
        let others = others.iter().map(|&sides| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || sides.iter().for_each(|&side| critical_section(&shared, side)))
        });
        let others = others.collect::<Vec<_>>();
        first.iter().for_each(|&side| critical_section(&shared, side));
        for thread in others {
            thread.join().expect("no test panics inside");
        }
        assert!(!shared.lock.is_contended());
        let free = shared.lock.try_acquire(&shared.park, Side::Write).is_some();
        assert!(free, "the lock is not free at the end");
    });
}

use Side::{Read, Write};

#[test]
fn exclusive_two_threads() {
    model(Locking::Exclusive, &[&[Write, Write], &[Write, Write]]);
}

#[test]
fn exclusive_three_threads() {
    model(Locking::Exclusive, &[&[Write], &[Write], &[Write]]);
}

#[test]
fn shared_writer_and_reader() {
    model(Locking::Shared, &[&[Write, Read], &[Read, Write]]);
}

#[test]
fn shared_two_writers_and_reader() {
    model(Locking::Shared, &[&[Write], &[Write], &[Read]]);
}

#[test]
fn shared_writer_and_two_readers() {
    model(Locking::Shared, &[&[Read], &[Write], &[Read]]);
}

#[test]
fn shared_three_writers() {
    model(Locking::Shared, &[&[Write], &[Write], &[Write]]);
}

#[test]
fn shared_readers_are_passed_over() {
    model(Locking::Shared, &[&[Write, Write], &[Write, Write], &[Read]]);
}

#[test]
fn shared_writer_loses_to_readers() {
    model(Locking::Shared, &[&[Read, Read], &[Write, Write], &[Read, Read]]);
}
