//! Readers: all faults are answered, however many threads read and fault; and whatever happens to
//! the readers, no thread waits for ever.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use slat::PAGE_SIZE;
use slat::host::Unresolved;

use super::tests::{bytes_of, contents_of, memory, touch, userfaultfd, word_of};
use super::*;

const NR_THREADS: u64 = 16;

fn nr(readers: usize) -> std::num::NonZeroUsize {
    readers.try_into().unwrap()
}

/// A handler that copies the contents of the faulting page.
fn copying(
    userfaultfd: &Arc<Userfaultfd>,
) -> impl Fn(&ReportedFault<'_>) -> Result<(), UserfaultfdError> + Send + Sync + use<> {
    let userfaultfd = Arc::clone(userfaultfd);
    move |fault| {
        let page = fault.offset_bytes / PAGE_SIZE;
        match userfaultfd.copy(fault.memory, fault.offset_bytes, &contents_of(page), Wake::Waiters)? {
            Filled::Done | Filled::AlreadyThere => Ok(()),
            Filled::TryAgain { .. } => panic!("nothing changes the mapping"),
        }
    }
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
        for nr_readers in [1, 4] {
            let Some(mut userfaultfd) = userfaultfd() else { return };
            let memory = memory(kind, 256);
            userfaultfd.register(&memory, 0..256 * PAGE_SIZE, RegisterMode::Missing).unwrap();
            let userfaultfd = Arc::new(userfaultfd);
            let readers = Readers::start(Arc::clone(&userfaultfd), nr(nr_readers), copying(&userfaultfd)).unwrap();
            all_touch_all(&memory);
            assert!(!readers.has_failed());
            readers.stop().unwrap();
            userfaultfd.unregister().unwrap();
            assert!(!memory.is_lost());
        }
    }
}

#[test]
fn minor_faults_of_many_threads_are_served_once_each_page() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Shmem, 256);
    let alias = memory.alias().unwrap();
    alias.populate().unwrap();
    userfaultfd.register(&memory, 0..256 * PAGE_SIZE, RegisterMode::Minor).unwrap();
    let userfaultfd = Arc::new(userfaultfd);
    let claims: Arc<Vec<AtomicBool>> = Arc::new((0..256).map(|_| AtomicBool::new(false)).collect());
    let nr_filled = Arc::new(AtomicU64::new(0));
    let handler = {
        let (userfaultfd, claims, nr_filled) = (Arc::clone(&userfaultfd), Arc::clone(&claims), Arc::clone(&nr_filled));
        move |fault: &ReportedFault<'_>| -> Result<(), UserfaultfdError> {
            let page = fault.offset_bytes / PAGE_SIZE;
            // The first thread maps it, and wakes all.
            if !claims[page as usize].swap(true, Ordering::AcqRel) {
                alias.write(fault.offset_bytes, &contents_of(page)).unwrap();
                let filled = userfaultfd.map_cached(fault.memory, bytes_of(page), Wake::Waiters)?;
                assert_eq!(filled, Filled::Done);
                nr_filled.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        }
    };
    let readers = Readers::start(Arc::clone(&userfaultfd), nr(3), handler).unwrap();
    all_touch_all(&memory);
    readers.stop().unwrap();
    assert_eq!(nr_filled.load(Ordering::Relaxed), 256);
    userfaultfd.unregister().unwrap();
}

#[test]
fn each_thread_may_have_a_descriptor_of_its_own() {
    const PAGES_EACH: u64 = 32;
    let memory = memory(BackingKind::Anonymous, NR_THREADS * PAGES_EACH);
    let mut served = Vec::new();
    for thread in 0..NR_THREADS {
        let Some(mut userfaultfd) = userfaultfd() else { return };
        let first = thread * PAGES_EACH;
        userfaultfd
            .register(&memory, first * PAGE_SIZE..(first + PAGES_EACH) * PAGE_SIZE, RegisterMode::Missing)
            .unwrap();
        let userfaultfd = Arc::new(userfaultfd);
        let readers = Readers::start(Arc::clone(&userfaultfd), nr(1), copying(&userfaultfd)).unwrap();
        served.push((userfaultfd, readers));
    }
    all_touch_all(&memory);
    for (userfaultfd, readers) in served {
        readers.stop().unwrap();
        userfaultfd.unregister().unwrap();
    }
    assert!(!memory.is_lost());
}

#[test]
fn other_threads_may_fill_without_waking_beside_readers() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 512);
    userfaultfd.register(&memory, 0..512 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let userfaultfd = Arc::new(userfaultfd);
    let readers = Readers::start(Arc::clone(&userfaultfd), nr(2), copying(&userfaultfd)).unwrap();
    thread::scope(|scope| {
        // As the resolver of exits does. It finds pages that readers have filled, and threads that
        // wait for pages that it has filled itself: readers answer their messages, and find the
        // page there.
        scope.spawn(|| {
            for page in (0..512).rev() {
                let filled = userfaultfd.copy(&memory, page * PAGE_SIZE, &contents_of(page), Wake::None).unwrap();
                assert!(matches!(filled, Filled::Done | Filled::AlreadyThere), "{filled:?}");
            }
        });
        scope.spawn(|| all_touch_all(&memory));
    });
    readers.stop().unwrap();
    userfaultfd.unregister().unwrap();
}

#[derive(Debug, PartialEq)]
struct SourceGone(u64);

#[test]
fn a_handler_that_fails_releases_all_threads() {
    for (kind, mode) in [(BackingKind::Anonymous, RegisterMode::Missing), (BackingKind::Shmem, RegisterMode::Minor)] {
        let Some(mut userfaultfd) = userfaultfd() else { return };
        let memory = memory(kind, 64);
        userfaultfd.register(&memory, 0..64 * PAGE_SIZE, mode).unwrap();
        let handler = |fault: &ReportedFault<'_>| match fault.offset_bytes / PAGE_SIZE {
            // The other readers have read messages and answer none.
            page if page < 63 => Ok(()),
            page => Err(SourceGone(page)),
        };
        let readers = Readers::start(Arc::new(userfaultfd), nr(4), handler).unwrap();
        let waiting: Vec<_> = (0..63).map(|page| touch(&memory, page, Access::Write)).collect();
        thread::sleep(Duration::from_millis(20));
        assert!(!readers.has_failed());
        assert!(waiting.iter().all(|toucher| !toucher.is_finished()));
        let last = touch(&memory, 63, Access::Read);
        for toucher in waiting.into_iter().chain([last]) {
            assert_eq!(toucher.join().unwrap(), Err(Unresolved::Gone), "{kind}");
        }
        assert!(readers.has_failed(), "reported before any thread is released");
        let Err(ReaderError::Handler(error)) = readers.stop() else { panic!("it has failed") };
        assert_eq!(error, SourceGone(63));
    }
}

#[test]
fn a_handler_that_panics_releases_all_threads() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 2);
    userfaultfd.register(&memory, 0..2 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let handler = |fault: &ReportedFault<'_>| -> Result<(), SourceGone> { panic!("at {:#x}", fault.offset_bytes) };
    let readers = Readers::start(Arc::new(userfaultfd), nr(2), handler).unwrap();
    assert_eq!(touch(&memory, 1, Access::Read).join().unwrap(), Err(Unresolved::Gone));
    let stop = std::panic::AssertUnwindSafe(|| readers.stop());
    let payload = std::panic::catch_unwind(stop).expect_err("the handler's panic");
    assert_eq!(payload.downcast_ref::<String>().map(String::as_str), Some("at 0x1000"));
}

#[test]
fn dropped_readers_release_all_threads() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Shmem, 16);
    userfaultfd.register(&memory, 0..16 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let userfaultfd = Arc::new(userfaultfd);
    let readers = Readers::start(Arc::clone(&userfaultfd), nr(2), |_| Ok::<(), SourceGone>(())).unwrap();
    let waiting: Vec<_> = (0..16).map(|page| touch(&memory, page, Access::Write)).collect();
    thread::sleep(Duration::from_millis(20));
    assert!(waiting.iter().all(|toucher| !toucher.is_finished()));
    drop(readers);
    for toucher in waiting {
        assert_eq!(toucher.join().unwrap(), Err(Unresolved::Gone));
    }
    let error = userfaultfd.copy(&memory, 0, &contents_of(0), Wake::Waiters).expect_err("abandoned");
    assert!(matches!(error, UserfaultfdError::NotRegistered { .. }), "{error}");
}

#[test]
fn stopped_readers_leave_the_faults_to_the_next() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 16);
    userfaultfd.register(&memory, 0..16 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let userfaultfd = Arc::new(userfaultfd);
    for round in 0..4 {
        let readers = Readers::start(Arc::clone(&userfaultfd), nr(3), copying(&userfaultfd)).unwrap();
        assert_eq!(memory.load(round * PAGE_SIZE), Some(word_of(round)));
        readers.stop().unwrap();
        let waiting = touch(&memory, round + 1, Access::Read);
        thread::sleep(Duration::from_millis(5));
        assert!(!waiting.is_finished(), "no thread reads");
        let readers = Readers::start(Arc::clone(&userfaultfd), nr(1), copying(&userfaultfd)).unwrap();
        waiting.join().unwrap().expect("it is there");
        readers.stop().unwrap();
    }
    userfaultfd.unregister().unwrap();
}

#[test]
fn readers_stop_at_any_time() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 2048);
    userfaultfd.register(&memory, 0..2048 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let userfaultfd = Arc::new(userfaultfd);
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
            let readers = Readers::start(Arc::clone(&userfaultfd), nr(2), copying(&userfaultfd)).unwrap();
            thread::yield_now();
            readers.stop().unwrap();
        }
    });
    userfaultfd.unregister().unwrap();
}
