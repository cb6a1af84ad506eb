//! The locks on real threads: exclusion, parallel readers, no lost wake-up, no starvation, and
//! contention that the holder observes. `tests/loom_lock.rs` tries all schedules of a few threads.

extern crate std;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Duration;

use super::{Lock, Locking, Park, Side};

#[path = "../../tests/support/futex_park.rs"]
mod futex_park;
use futex_park::FutexPark;

static PARK: FutexPark = FutexPark;

/// Adds to a counter in two steps, which loses counts unless the thread is alone.
fn bump(counter: &AtomicU64) {
    let value = counter.load(Ordering::Relaxed);
    if value.is_multiple_of(64) {
        thread::yield_now();
    }
    counter.store(value + 1, Ordering::Relaxed);
}

/// `nr_threads` threads with `nr_turns` critical sections each; each `write_every`th is a writer's.
fn hammer(locking: Locking, nr_threads: u64, nr_turns: u64, write_every: u64) {
    let lock = Lock::new(locking);
    let counter = AtomicU64::new(0);
    let inside = AtomicUsize::new(0);
    let start = Barrier::new(nr_threads as usize);
    thread::scope(|scope| {
        for thread in 0..nr_threads {
            let (lock, counter, inside, start) = (&lock, &counter, &inside, &start);
            scope.spawn(move || {
                start.wait();
                for turn in 0..nr_turns {
                    if (turn + thread) % write_every == 0 {
                        let _guard = lock.acquire(&PARK, Side::Write);
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0, "a writer is not alone");
                        bump(counter);
                        inside.fetch_sub(1, Ordering::Relaxed);
                    } else {
                        let _guard = lock.acquire(&PARK, Side::Read);
                        let before = counter.load(Ordering::Relaxed);
                        if locking == Locking::Exclusive {
                            assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0, "a holder is not alone");
                            inside.fetch_sub(1, Ordering::Relaxed);
                        } else {
                            assert_eq!(inside.load(Ordering::Relaxed), 0, "a writer beside a reader");
                        }
                        assert_eq!(before, counter.load(Ordering::Relaxed));
                    }
                }
            });
        }
    });
    let writes = (0..nr_threads)
        .map(|thread| (0..nr_turns).filter(|turn| (turn + thread) % write_every == 0).count() as u64)
        .sum::<u64>();
    assert_eq!(counter.into_inner(), writes);
    assert!(!lock.is_contended());
    let guard = lock.try_acquire(&PARK, Side::Write);
    assert!(guard.is_some(), "the lock is not free at the end: {lock:?}");
}

#[test]
fn exclusive_excludes_with_two_threads() {
    hammer(Locking::Exclusive, 2, 50_000, 1);
}

#[test]
fn exclusive_excludes_readers_too_with_many_threads() {
    hammer(Locking::Exclusive, 64, 2_000, 2);
}

#[test]
fn shared_excludes_with_two_threads() {
    hammer(Locking::Shared, 2, 50_000, 2);
}

#[test]
fn shared_excludes_with_many_threads() {
    for write_every in [1, 2, 10, 100] {
        hammer(Locking::Shared, 64, 1_000, write_every);
    }
}

#[test]
fn no_lock_is_always_free() {
    let lock = Lock::new(Locking::None);
    let first = lock.acquire(&PARK, Side::Write);
    let second = lock.try_acquire(&PARK, Side::Write);
    assert!(second.is_some());
    assert!(!lock.is_contended());
    drop((first, second));
    assert_eq!(lock.locking(), Locking::None);
}

#[test]
fn try_acquire_takes_what_is_free() {
    let lock = Lock::new(Locking::Exclusive);
    let guard = lock.try_acquire(&PARK, Side::Read).expect("the lock is free");
    assert!(lock.try_acquire(&PARK, Side::Read).is_none());
    assert!(lock.try_acquire(&PARK, Side::Write).is_none());
    drop(guard);
    assert!(lock.try_acquire(&PARK, Side::Write).is_some());

    let lock = Lock::new(Locking::Shared);
    let first = lock.try_acquire(&PARK, Side::Read).expect("the lock is free");
    let second = lock.try_acquire(&PARK, Side::Read).expect("readers share");
    assert!(lock.try_acquire(&PARK, Side::Write).is_none());
    drop(first);
    assert!(lock.try_acquire(&PARK, Side::Write).is_none());
    drop(second);
    let writer = lock.try_acquire(&PARK, Side::Write).expect("the lock is free");
    assert!(lock.try_acquire(&PARK, Side::Read).is_none());
    assert!(lock.try_acquire(&PARK, Side::Write).is_none());
    drop(writer);
    assert!(lock.try_acquire(&PARK, Side::Read).is_some());
}

#[test]
fn readers_hold_the_lock_at_the_same_time() {
    let lock = Lock::new(Locking::Shared);
    let all_inside = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let _guard = lock.acquire(&PARK, Side::Read);
                // Returns only when all eight are here.
                all_inside.wait();
            });
        }
    });
}

/// Starts a thread that waits for `side` of `lock`, and returns once it waits.
fn waiter(lock: &Arc<Lock>, side: Side) -> (thread::JoinHandle<()>, mpsc::Receiver<()>) {
    let (entered, entered_receiver) = mpsc::channel();
    let handle = thread::spawn({
        let lock = Arc::clone(lock);
        move || {
            let _guard = lock.acquire(&PARK, side);
            entered.send(()).expect("the test listens");
        }
    });
    (handle, entered_receiver)
}

/// Waits for an event that must occur, even on a busy machine.
fn until(mut condition: impl FnMut() -> bool) {
    while !condition() {
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_holder_observes_contention() {
    let cases = [
        (Locking::Exclusive, Side::Write, Side::Write),
        (Locking::Shared, Side::Write, Side::Write),
        (Locking::Shared, Side::Write, Side::Read),
        (Locking::Shared, Side::Read, Side::Write),
    ];
    for (locking, held, wanted) in cases {
        let lock = Arc::new(Lock::new(locking));
        let guard = lock.acquire(&PARK, held);
        assert!(!lock.is_contended());
        let (handle, entered) = waiter(&lock, wanted);
        until(|| lock.is_contended());
        assert!(entered.try_recv().is_err(), "{wanted:?} got the lock beside {held:?}");
        drop(guard);
        handle.join().expect("the waiter gets the lock");
        // A waiter's mark is cleared at its release.
        assert!(!lock.is_contended());
    }
}

#[test]
fn readers_do_not_contend_with_readers() {
    let lock = Arc::new(Lock::new(Locking::Shared));
    let guard = lock.acquire(&PARK, Side::Read);
    let (handle, _entered) = waiter(&lock, Side::Read);
    handle.join().expect("a reader gets the lock beside a reader");
    assert!(!lock.is_contended());
    drop(guard);
}

#[test]
fn a_waiting_writer_keeps_new_readers_out() {
    let lock = Arc::new(Lock::new(Locking::Shared));
    let guard = lock.acquire(&PARK, Side::Read);
    let (writer, _writer_entered) = waiter(&lock, Side::Write);
    until(|| lock.is_contended());
    assert!(lock.try_acquire(&PARK, Side::Read).is_none());
    let (reader, reader_entered) = waiter(&lock, Side::Read);
    assert!(reader_entered.recv_timeout(Duration::from_millis(20)).is_err());
    drop(guard);
    writer.join().expect("the writer gets the lock");
    reader.join().expect("then the reader");
}

/// Three threads repeatedly acquire `streaming`; one thread must acquire the `other` side
/// `nr_turns` times.
fn stream_against(streaming: Side, other: Side, nr_turns: u32) {
    let lock = Lock::new(Locking::Shared);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _guard = lock.acquire(&PARK, streaming);
                    for _ in 0..50 {
                        core::hint::spin_loop();
                    }
                }
            });
        }
        for _ in 0..nr_turns {
            drop(lock.acquire(&PARK, other));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn writers_do_not_starve() {
    stream_against(Side::Read, Side::Write, 1_000);
}

#[test]
fn readers_do_not_starve() {
    stream_against(Side::Write, Side::Read, 1_000);
}

#[test]
fn readers_get_their_turn_after_passed_over() {
    // Written to the word, since the scheduler cannot be made to do it: a writer inside, both kinds
    // asleep.
    let lock = Lock::new(Locking::Shared);
    let guard = lock.acquire(&PARK, Side::Write);
    lock.words.passed.store(super::MAX_PASSED - 1, Ordering::Relaxed);
    lock.words.state.fetch_or(super::READERS_SLEEP | super::WRITERS_SLEEP, Ordering::Relaxed);
    drop(guard);
    assert_eq!(lock.words.state.load(Ordering::Relaxed), super::READERS_NEXT);
    assert!(lock.try_acquire(&PARK, Side::Write).is_none(), "a writer took the readers' turn");
    drop(lock.try_acquire(&PARK, Side::Read).expect("it is the readers' turn"));
    assert!(lock.try_acquire(&PARK, Side::Write).is_some());
}

#[test]
fn a_writer_that_lost_often_is_next() {
    let lock = Lock::new(Locking::Shared);
    let guard = lock.acquire(&PARK, Side::Read);
    lock.words.state.fetch_or(super::WRITERS_SLEEP | super::WRITER_NEXT, Ordering::Relaxed);
    drop(guard);
    assert_eq!(lock.words.state.load(Ordering::Relaxed), super::WRITER_NEXT);
    assert!(lock.try_acquire(&PARK, Side::Read).is_none(), "a reader took the writer's turn");
    drop(lock.try_acquire(&PARK, Side::Write).expect("it is the writer's turn"));
    assert!(lock.try_acquire(&PARK, Side::Read).is_some());
}
