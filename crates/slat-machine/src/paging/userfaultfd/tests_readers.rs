//! Readers: all faults are answered, however many threads read and fault; and whatever happens to
//! the readers, no thread waits for ever.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slat::host::Unresolved;
use slat::{Access, PAGE_SIZE};

use super::tests::{contents_of, memory, register, touch, word_of};
use super::*;
use crate::paging::VcpuError;

const NR_THREADS: u64 = 16;

/// Starts readers that copy the contents of the faulting page.
fn copying(userfaultfds: &Userfaultfds, nr_each: usize) -> Readers {
    let handler = || |descriptor: &Userfaultfd, page| Ok(descriptor.copy(page, &contents_of(page), Wake::Waiters)?);
    Readers::start(userfaultfds, nr_each, handler).unwrap()
}

/// All threads touch all pages, each thread another one first, and verify all of them.
fn all_touch_all(memory: &Backing) {
    let nr_pages = memory.size_bytes() / PAGE_SIZE;
    let begin = Barrier::new(NR_THREADS as usize);
    thread::scope(|scope| {
        for thread in 0..NR_THREADS {
            let begin = &begin;
            scope.spawn(move || {
                begin.wait();
                for step in 0..nr_pages {
                    // Two threads each in the same order, so that there are always two on one page.
                    let page = (step + thread / 2 * nr_pages / NR_THREADS) % nr_pages;
                    assert_eq!(memory.load(page * PAGE_SIZE + 8 * thread), Some(word_of(page)), "page {page}");
                }
            });
        }
    });
}

#[test]
fn many_readers_serve_many_threads_on_the_same_pages() {
    for kind in [BackingKind::Anonymous, BackingKind::Shmem] {
        for (nr_descriptors, nr_each) in [(1, 1), (1, 4), (16, 1), (4, 2)] {
            let memory = memory(kind, 256);
            let Some(userfaultfds) = register(&memory, RegisterMode::Missing, nr_descriptors) else { return };
            let readers = copying(&userfaultfds, nr_each);
            all_touch_all(&memory);
            readers.stop().unwrap();
            assert!(!memory.is_lost());
        }
    }
}

#[test]
fn other_threads_may_fill_without_waking_beside_readers() {
    let memory = memory(BackingKind::Anonymous, 512);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 1) else { return };
    let readers = copying(&userfaultfds, 2);
    thread::scope(|scope| {
        // As the resolver of exits does. It finds pages that readers have filled, and threads that
        // wait for pages that it has filled itself: readers answer their messages, and find the
        // page there.
        scope.spawn(|| {
            for page in (0..512).rev() {
                userfaultfds.of(page).copy(page, &contents_of(page), Wake::None).unwrap();
            }
        });
        scope.spawn(|| all_touch_all(&memory));
    });
    readers.stop().unwrap();
}

fn gone(page: u64) -> VcpuError {
    VcpuError::NoSource { page }
}

#[test]
fn a_handler_that_fails_releases_all_threads() {
    for (kind, mode) in [(BackingKind::Anonymous, RegisterMode::Missing), (BackingKind::Shmem, RegisterMode::Minor)] {
        let memory = memory(kind, 64);
        let Some(userfaultfds) = register(&memory, mode, 2) else { return };
        let handler = || {
            // The other readers have read messages and answer none.
            |_: &Userfaultfd, page| if page < 63 { Ok(()) } else { Err(gone(page)) }
        };
        let readers = Readers::start(&userfaultfds, 4, handler).unwrap();
        let waiting: Vec<_> = (0..63).map(|page| touch(&memory, page, Access::Write)).collect();
        thread::sleep(Duration::from_millis(20));
        assert!(waiting.iter().all(|toucher| !toucher.is_finished()));
        let last = touch(&memory, 63, Access::Read);
        for toucher in waiting.into_iter().chain([last]) {
            assert_eq!(toucher.join().unwrap(), Err(Unresolved::Gone), "{kind}");
        }
        let error = readers.stop().expect_err("it has failed");
        assert!(matches!(error, VcpuError::NoSource { page: 63 }), "{error}");
    }
}

#[test]
fn a_handler_that_panics_releases_all_threads() {
    let memory = memory(BackingKind::Anonymous, 2);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 1) else { return };
    let handler = || |_: &Userfaultfd, page: u64| -> Result<(), VcpuError> { panic!("at {page}") };
    let readers = Readers::start(&userfaultfds, 2, handler).unwrap();
    assert_eq!(touch(&memory, 1, Access::Read).join().unwrap(), Err(Unresolved::Gone));
    let payload = catch_unwind(AssertUnwindSafe(|| readers.stop())).expect_err("the handler's panic");
    assert_eq!(payload.downcast_ref::<String>().map(String::as_str), Some("at 1"));
}

#[test]
fn dropped_readers_release_all_threads() {
    let memory = memory(BackingKind::Shmem, 16);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 2) else { return };
    let readers = Readers::start(&userfaultfds, 2, || |_: &Userfaultfd, _| Ok(())).unwrap();
    let waiting: Vec<_> = (0..16).map(|page| touch(&memory, page, Access::Write)).collect();
    thread::sleep(Duration::from_millis(20));
    assert!(waiting.iter().all(|toucher| !toucher.is_finished()));
    drop(readers);
    for toucher in waiting {
        assert_eq!(toucher.join().unwrap(), Err(Unresolved::Gone));
    }
}

#[test]
fn stopped_readers_leave_the_faults_to_the_next() {
    let memory = memory(BackingKind::Anonymous, 16);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 1) else { return };
    for round in 0..4 {
        let readers = copying(&userfaultfds, 3);
        assert_eq!(memory.load(round * PAGE_SIZE), Some(word_of(round)));
        readers.stop().unwrap();
        let waiting = touch(&memory, round + 1, Access::Read);
        thread::sleep(Duration::from_millis(5));
        assert!(!waiting.is_finished(), "no thread reads");
        let readers = copying(&userfaultfds, 1);
        waiting.join().unwrap().expect("it is there");
        readers.stop().unwrap();
    }
}

#[test]
fn readers_stop_at_any_time() {
    let memory = memory(BackingKind::Anonymous, 2048);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 1) else { return };
    let nr_done = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..4 {
            let (memory, nr_done) = (&memory, &nr_done);
            scope.spawn(move || {
                for page in (thread..2048).step_by(4) {
                    assert_eq!(memory.load(page * PAGE_SIZE), Some(word_of(page)));
                }
                nr_done.fetch_add(1, Ordering::Release);
            });
        }
        while nr_done.load(Ordering::Acquire) < 4 {
            let readers = copying(&userfaultfds, 2);
            thread::yield_now();
            readers.stop().unwrap();
        }
    });
}
