//! The real kernel: what each call does to the memory, and to threads that wait for it.
//!
//! Where userfaultfd is not allowed, the tests print that and pass.

use std::io;
use std::sync::atomic::AtomicU64;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::mm::Advice;
use slat::host::{Resolved, Unresolved};
use slat::{PAGE_SIZE, PageSize};

use super::*;
use crate::linux::descriptors::poll;

pub(super) const PAGE: usize = PAGE_SIZE as usize;

/// A descriptor, or `None` where there is none.
pub(super) fn userfaultfd() -> Option<Userfaultfd> {
    match Userfaultfd::new() {
        Ok(userfaultfd) => Some(userfaultfd),
        Err(error @ UserfaultfdError::Open(_)) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

pub(super) fn memory(kind: BackingKind, nr_pages: u64) -> Backing {
    Backing::new(kind, nr_pages * PAGE_SIZE).unwrap()
}

/// The word that fills page `page`.
pub(super) fn word_of(page: u64) -> u64 {
    0xABAB_0000_0000_0001 + page
}

pub(super) fn contents_of(page: u64) -> Vec<u8> {
    word_of(page).to_ne_bytes().repeat(PAGE / 8)
}

pub(super) fn bytes_of(page: u64) -> Range<u64> {
    page * PAGE_SIZE..(page + 1) * PAGE_SIZE
}

/// Touches a page as the engine's host does, in a thread of its own.
pub(super) fn touch(memory: &Backing, page: u64, access: Access) -> JoinHandle<Result<Resolved, Unresolved>> {
    let memory = memory.clone();
    thread::spawn(move || memory.resolve(page * PAGE_SIZE, access, &|_| panic!("its frames are fixed")))
}

/// The next fault, which has to come within ten minutes on any machine.
fn next_fault(userfaultfd: &Userfaultfd) -> ReportedFault<'_> {
    let mut entries = [PollFd::new(userfaultfd, PollFlags::IN)];
    assert!(poll(&mut entries, Some(Duration::from_secs(600))).unwrap(), "no fault was reported");
    assert_eq!(entries[0].revents(), PollFlags::IN);
    let Some(UserfaultfdEvent::Fault(fault)) = userfaultfd.read_event().unwrap() else { panic!("not a fault") };
    fault
}

fn assert_page(memory: &Backing, page: u64, word: u64) {
    for offset_bytes in bytes_of(page).step_by(8) {
        assert_eq!(memory.load(offset_bytes), Some(word), "page {page} at {offset_bytes:#x}");
    }
}

/// Nothing shows that a thread waits in the kernel for ever. So this allows it time to go on, if it
/// can.
fn assert_waits<T>(thread: &JoinHandle<T>) {
    thread::sleep(Duration::from_millis(20));
    assert!(!thread.is_finished());
}

#[test]
fn a_copy_fills_missing_pages() {
    for kind in [BackingKind::Anonymous, BackingKind::AnonymousThp, BackingKind::Shmem] {
        let Some(mut userfaultfd) = userfaultfd() else { return };
        let memory = memory(kind, 1024);
        userfaultfd.register(&memory, 0..1024 * PAGE_SIZE, RegisterMode::Missing).unwrap();
        assert!(userfaultfd.read_event().unwrap().is_none());
        // Neighbours in one 2 MiB block: the kernel adds no other page.
        for (page, access) in [(0, Access::Read), (1, Access::Write), (513, Access::Execute), (1023, Access::Write)] {
            let toucher = touch(&memory, page, access);
            let fault = next_fault(&userfaultfd);
            assert_eq!((fault.memory.as_ptr(), fault.offset_bytes), (memory.as_ptr(), page * PAGE_SIZE), "{kind}");
            let expected = if access == Access::Write { Access::Write } else { Access::Read };
            assert_eq!((fault.cause, fault.access), (Cause::Missing, expected), "{kind}");
            let filled = userfaultfd.copy(&memory, fault.offset_bytes, &contents_of(page), Wake::Waiters).unwrap();
            assert_eq!(filled, Filled::Done);
            toucher.join().unwrap().expect("it is there");
            assert_page(&memory, page, word_of(page));
        }
        assert!(userfaultfd.read_event().unwrap().is_none(), "a fault more than was answered");
        userfaultfd.unregister().unwrap();
        assert_page(&memory, 512, 0);
    }
}

#[test]
fn minor_faults_map_what_the_file_has() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Shmem, 8);
    let alias = memory.alias().unwrap();
    alias.populate().unwrap();
    userfaultfd.register(&memory, 0..8 * PAGE_SIZE, RegisterMode::Minor).unwrap();
    // In each round the file keeps its pages, and the mapping loses them.
    for round in 0..3 {
        for (page, access) in [(3, Access::Read), (4, Access::Write)] {
            let toucher = touch(&memory, page, access);
            let fault = next_fault(&userfaultfd);
            assert_eq!((fault.offset_bytes, fault.cause, fault.access), (page * PAGE_SIZE, Cause::Minor, access));
            alias.write(fault.offset_bytes, &contents_of(page + round)).unwrap();
            assert_waits(&toucher);
            assert_eq!(userfaultfd.map_cached(&memory, bytes_of(page), Wake::Waiters).unwrap(), Filled::Done);
            toucher.join().unwrap().expect("it is there");
            assert_page(&memory, page, word_of(page + round));
            let again = userfaultfd.map_cached(&memory, bytes_of(page), Wake::Waiters).unwrap();
            assert_eq!(again, Filled::AlreadyThere);
        }
        memory.frames().advise(0..8 * PAGE_SIZE, Advice::LinuxDontNeed).unwrap();
    }
    assert!(userfaultfd.read_event().unwrap().is_none());
}

#[test]
fn pages_that_are_not_in_the_file_are_reported_too() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Shmem, 2);
    let alias = memory.alias().unwrap();
    userfaultfd.register(&memory, 0..2 * PAGE_SIZE, RegisterMode::Minor).unwrap();
    let toucher = touch(&memory, 1, Access::Read);
    assert_eq!(next_fault(&userfaultfd).cause, Cause::Missing);
    let error = userfaultfd.map_cached(&memory, bytes_of(1), Wake::Waiters).expect_err("not in the file");
    assert!(matches!(error, UserfaultfdError::NotCached { offset_bytes: PAGE_SIZE }), "{error}");
    assert_waits(&toucher);
    alias.write(PAGE_SIZE, &contents_of(1)).unwrap();
    assert_eq!(userfaultfd.map_cached(&memory, bytes_of(1), Wake::Waiters).unwrap(), Filled::Done);
    toucher.join().unwrap().expect("it is there");
    assert_page(&memory, 1, word_of(1));
}

#[test]
fn a_thread_that_is_not_woken_waits_for_the_next_wake() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 3);
    userfaultfd.register(&memory, 0..3 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    for page in 0..3 {
        let touchers = [Access::Read, Access::Write, Access::Write].map(|access| touch(&memory, page, access));
        for _ in &touchers {
            assert_eq!(next_fault(&userfaultfd).offset_bytes, page * PAGE_SIZE, "each thread reports its own fault");
        }
        assert_eq!(userfaultfd.copy(&memory, page * PAGE_SIZE, &contents_of(page), Wake::None).unwrap(), Filled::Done);
        touchers.iter().for_each(assert_waits);
        match page {
            0 => userfaultfd.wake(&memory, bytes_of(page)).unwrap(),
            // A second copy may wake no thread either; or it wakes all.
            _ => {
                let copy = |wake| userfaultfd.copy(&memory, page * PAGE_SIZE, &contents_of(7), wake).unwrap();
                assert_eq!(copy(Wake::None), Filled::AlreadyThere);
                touchers.iter().for_each(assert_waits);
                assert_eq!(copy(Wake::Waiters), Filled::AlreadyThere);
            }
        }
        for toucher in touchers {
            toucher.join().unwrap().expect("it is there");
        }
        assert_page(&memory, page, word_of(page));
    }
    // No thread waits any more: a wake-up is no error.
    userfaultfd.wake(&memory, 0..3 * PAGE_SIZE).unwrap();
}

#[test]
fn too_early_a_wake_makes_a_new_message() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 1);
    userfaultfd.register(&memory, bytes_of(0), RegisterMode::Missing).unwrap();
    let toucher = touch(&memory, 0, Access::Write);
    for _ in 0..3 {
        assert_eq!(next_fault(&userfaultfd).offset_bytes, 0);
        userfaultfd.wake(&memory, bytes_of(0)).unwrap();
    }
    next_fault(&userfaultfd);
    assert_eq!(userfaultfd.copy(&memory, 0, &contents_of(5), Wake::Waiters).unwrap(), Filled::Done);
    toucher.join().unwrap().expect("it is there");
    assert_page(&memory, 0, word_of(5));
}

#[test]
fn a_copy_stops_before_a_page_that_is_there() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Shmem, 8);
    userfaultfd.register(&memory, 0..8 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let copy = |first: u64, pages: Range<u64>| {
        let bytes: Vec<u8> = pages.flat_map(contents_of).collect();
        userfaultfd.copy(&memory, first * PAGE_SIZE, &bytes, Wake::Waiters).unwrap()
    };
    assert_eq!(copy(2, 2..4), Filled::Done);
    assert_eq!(copy(0, 100..106), Filled::TryAgain { filled_bytes: 2 * PAGE_SIZE });
    assert_eq!(copy(2, 102..106), Filled::AlreadyThere);
    assert_eq!(copy(4, 104..108), Filled::Done);
    let expected = [100, 101, 2, 3, 104, 105, 106, 107];
    for (page, contents) in (0..).zip(expected) {
        assert_page(&memory, page, word_of(contents));
    }
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let anonymous = memory(BackingKind::Anonymous, 4);
    let whole = 0..4 * PAGE_SIZE;
    for kind in [BackingKind::Anonymous, BackingKind::AnonymousThp] {
        // Before any other check: the range is wrong too.
        let error = userfaultfd.register(&memory(kind, 4), 1..1, RegisterMode::Minor).expect_err("private");
        assert!(matches!(error, UserfaultfdError::MinorNeedsShared { kind: refused } if refused == kind), "{error}");
        assert!(error.is_bad_usage());
    }
    let movable = Backing::with_movable_pages(4 * PAGE_SIZE, 1).unwrap();
    let error = userfaultfd.register(&movable, whole.clone(), RegisterMode::Missing).expect_err("no addresses");
    assert!(matches!(error, UserfaultfdError::MovablePages) && error.is_bad_usage());
    for (bytes, expected) in [
        (0..0, "Empty"),
        (Range { start: PAGE_SIZE, end: 0 }, "Empty"),
        (1..PAGE_SIZE + 1, "Unaligned"),
        (0..1, "Unaligned"),
        (0..5 * PAGE_SIZE, "OutOfRange"),
        (4 * PAGE_SIZE..5 * PAGE_SIZE, "OutOfRange"),
        (PAGE_SIZE..!(PAGE_SIZE - 1), "OutOfRange"),
    ] {
        let error =
            userfaultfd.register(&anonymous, bytes.clone(), RegisterMode::Missing).expect_err("not in the memory");
        assert!(format!("{error:?}").starts_with(expected) && error.is_bad_usage(), "{bytes:?}: {error:?}");
    }
    let mut second = Userfaultfd::new().unwrap();
    userfaultfd.register(&anonymous, PAGE_SIZE..3 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let error =
        second.register(&anonymous, whole.clone(), RegisterMode::Missing).expect_err("a part is registered elsewhere");
    assert!(matches!(error, UserfaultfdError::AlreadyRegistered { .. }) && !error.is_bad_usage(), "{error}");
    second.register(&anonymous, 0..PAGE_SIZE, RegisterMode::Missing).expect("not registered");
    drop(userfaultfd);
    let mut third = Userfaultfd::new().unwrap();
    let error =
        third.register(&anonymous, 3 * PAGE_SIZE..4 * PAGE_SIZE, RegisterMode::Missing).expect_err("was abandoned");
    assert!(matches!(error, UserfaultfdError::MemoryLost), "{error}");
    anonymous.discard(0, 4 * PAGE_SIZE).unwrap();
    third.register(&anonymous, 3 * PAGE_SIZE..4 * PAGE_SIZE, RegisterMode::Missing).expect("as new");
}

#[test]
fn a_kernel_without_the_feature_is_named_with_it() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Shmem, 1);
    userfaultfd.available.features &= !features::MINOR_SHMEM;
    let error = userfaultfd.register(&memory, bytes_of(0), RegisterMode::Minor).expect_err("before 5.14");
    assert!(error.to_string().contains("UFFD_FEATURE_MINOR_SHMEM") && !error.is_bad_usage(), "{error}");
    userfaultfd.register(&memory, bytes_of(0), RegisterMode::Missing).unwrap();
    userfaultfd.available.features = 0;
    let error = userfaultfd.register(&memory, bytes_of(0), RegisterMode::Missing).expect_err("before 4.11");
    assert!(error.to_string().contains("UFFD_FEATURE_MISSING_SHMEM"), "{error}");
}

#[test]
fn only_what_is_registered_can_be_filled() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let (anonymous, other) = (memory(BackingKind::Anonymous, 4), memory(BackingKind::Shmem, 4));
    userfaultfd.register(&anonymous, PAGE_SIZE..3 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let copy = |memory: &Backing, offset_bytes, len: usize| {
        let error = userfaultfd.copy(memory, offset_bytes, &vec![1; len], Wake::Waiters).expect_err("not to be filled");
        format!("{error:?}")
    };
    for (memory, page, nr_pages) in [(&anonymous, 0, 1), (&anonymous, 2, 2), (&anonymous, 3, 1), (&other, 1, 1)] {
        assert!(copy(memory, page * PAGE_SIZE, nr_pages * PAGE).starts_with("NotRegistered"), "{page}");
        let bytes = page * PAGE_SIZE..(page + nr_pages as u64) * PAGE_SIZE;
        for error in [
            userfaultfd.map_cached(memory, bytes.clone(), Wake::None).map(drop),
            userfaultfd.wake(memory, bytes.clone()),
        ] {
            assert!(matches!(error, Err(UserfaultfdError::NotRegistered { .. })), "{error:?}");
        }
    }
    assert!(copy(&anonymous, PAGE_SIZE, 0).starts_with("Empty"));
    assert!(copy(&anonymous, PAGE_SIZE, 100).starts_with("Unaligned"));
    assert!(copy(&anonymous, PAGE_SIZE + 8, PAGE).starts_with("Unaligned"));
    assert!(copy(&anonymous, PAGE_SIZE, 4 * PAGE).starts_with("OutOfRange"));
    assert!(copy(&anonymous, !(PAGE_SIZE - 1), PAGE).starts_with("OutOfRange"));
    // A call for missing pages fails on the file.
    let error = userfaultfd.map_cached(&anonymous, bytes_of(1), Wake::Waiters).expect_err("it has no file");
    assert!(matches!(error, UserfaultfdError::System { call: "UFFDIO_CONTINUE", .. }), "{error:?}");
    assert_page(&anonymous, 0, 0);
    assert_page(&anonymous, 3, 0);
}

#[test]
fn after_unregister_no_thread_waits_and_no_fault_is_reported() {
    for (kind, mode) in [
        (BackingKind::Anonymous, RegisterMode::Missing),
        (BackingKind::Shmem, RegisterMode::Missing),
        (BackingKind::Shmem, RegisterMode::Minor),
    ] {
        let Some(mut userfaultfd) = userfaultfd() else { return };
        let memory = memory(kind, 4);
        if mode == RegisterMode::Minor {
            memory.alias().unwrap().populate().unwrap();
        }
        userfaultfd.register(&memory, 0..4 * PAGE_SIZE, mode).unwrap();
        let [read, unread] = [0, 1].map(|page| touch(&memory, page, Access::Read));
        let page = next_fault(&userfaultfd).offset_bytes / PAGE_SIZE;
        assert!(page < 2);
        assert_waits(&read);
        assert_waits(&unread);
        userfaultfd.unregister().unwrap();
        for toucher in [read, unread, touch(&memory, 2, Access::Write)] {
            toucher.join().unwrap().expect("zeros after the end");
        }
        assert!(userfaultfd.read_event().unwrap().is_none(), "{kind} {mode:?}");
        let error = userfaultfd.copy(&memory, 3 * PAGE_SIZE, &contents_of(3), Wake::Waiters).expect_err("the end");
        assert!(matches!(error, UserfaultfdError::NotRegistered { .. }), "{error}");
        userfaultfd.unregister().expect("the end already");
        userfaultfd.abandon();
        drop(userfaultfd);
        assert!(!memory.is_lost());
        assert_page(&memory, 3, 0);
    }
}

#[test]
fn threads_that_wait_at_an_abandon_or_drop_get_no_page() {
    for (kind, mode) in [
        (BackingKind::Anonymous, RegisterMode::Missing),
        (BackingKind::Shmem, RegisterMode::Missing),
        (BackingKind::Shmem, RegisterMode::Minor),
    ] {
        for abandon in [Userfaultfd::abandon, |_: &Userfaultfd| ()] {
            let Some(mut userfaultfd) = userfaultfd() else { return };
            let memory = memory(kind, 64);
            if mode == RegisterMode::Minor {
                memory.alias().unwrap().populate().unwrap();
            }
            userfaultfd.register(&memory, 0..32 * PAGE_SIZE, mode).unwrap();
            userfaultfd.register(&memory, 32 * PAGE_SIZE..64 * PAGE_SIZE, mode).unwrap();
            let touchers: Vec<_> = (0..64).step_by(4).map(|page| touch(&memory, page, Access::Read)).collect();
            let reader = {
                let memory = memory.clone();
                // The host's own read does not find zeros either.
                thread::spawn(move || memory.load(63 * PAGE_SIZE))
            };
            next_fault(&userfaultfd);
            touchers.iter().take(2).for_each(assert_waits);
            abandon(&userfaultfd);
            drop(userfaultfd);
            for toucher in touchers {
                assert_eq!(toucher.join().unwrap(), Err(Unresolved::Gone), "{kind} {mode:?}");
            }
            assert_eq!(reader.join().unwrap(), None);
            // And of a thread that comes later.
            assert_eq!(touch(&memory, 5, Access::Write).join().unwrap(), Err(Unresolved::Gone));
            assert!(memory.is_lost());
        }
    }
}

#[test]
fn memory_can_be_registered_again_after_an_end() {
    for kind in [BackingKind::Anonymous, BackingKind::Shmem] {
        let memory = memory(kind, 4);
        for round in 0..3 {
            let Some(mut userfaultfd) = userfaultfd() else { return };
            userfaultfd.register(&memory, 0..4 * PAGE_SIZE, RegisterMode::Missing).unwrap();
            let toucher = touch(&memory, round, Access::Read);
            let fault = next_fault(&userfaultfd);
            let filled = userfaultfd.copy(fault.memory, fault.offset_bytes, &contents_of(9), Wake::Waiters).unwrap();
            assert_eq!(filled, Filled::Done);
            toucher.join().unwrap().expect("it is there");
            if round == 1 {
                userfaultfd.unregister().unwrap();
            }
            drop(userfaultfd);
            // Round 0 and 2 were abandoned.
            assert_eq!(memory.is_lost(), round != 1);
            memory.discard(0, 4 * PAGE_SIZE).unwrap();
            assert_page(&memory, round, 0);
            memory.discard(0, 4 * PAGE_SIZE).unwrap();
        }
    }
}

#[test]
fn one_descriptor_may_have_several_memories_and_one_memory_several_descriptors() {
    let Some(mut first) = userfaultfd() else { return };
    let mut second = Userfaultfd::new().unwrap();
    let (anonymous, shmem) = (memory(BackingKind::Anonymous, 4), memory(BackingKind::Shmem, 4));
    first.register(&anonymous, 0..2 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    first.register(&shmem, 2 * PAGE_SIZE..4 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    second.register(&anonymous, 2 * PAGE_SIZE..4 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    second.register(&shmem, 0..2 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    for (userfaultfd, memory, page) in
        [(&first, &anonymous, 1), (&second, &anonymous, 2), (&second, &shmem, 1), (&first, &shmem, 3)]
    {
        let toucher = touch(memory, page, Access::Write);
        let fault = next_fault(userfaultfd);
        assert_eq!((fault.memory.as_ptr(), fault.offset_bytes), (memory.as_ptr(), page * PAGE_SIZE));
        let filled = userfaultfd.copy(memory, fault.offset_bytes, &contents_of(page), Wake::Waiters).unwrap();
        assert_eq!(filled, Filled::Done);
        toucher.join().unwrap().expect("it is there");
        assert_page(memory, page, word_of(page));
    }
}

#[test]
fn an_unregistered_descriptor_can_register_other_memory() {
    let Some(mut first) = userfaultfd() else { return };
    let mut second = Userfaultfd::new().unwrap();
    let (before, after) = (memory(BackingKind::Anonymous, 1), memory(BackingKind::Anonymous, 1));
    first.register(&before, bytes_of(0), RegisterMode::Missing).unwrap();
    first.unregister().unwrap();
    second.register(&before, bytes_of(0), RegisterMode::Missing).unwrap();
    first.register(&after, bytes_of(0), RegisterMode::Missing).unwrap();
    let error = first.copy(&before, 0, &contents_of(1), Wake::Waiters).expect_err("registered by another");
    assert!(matches!(error, UserfaultfdError::NotRegistered { .. }), "{error}");
    let toucher = touch(&before, 0, Access::Read);
    next_fault(&second);
    drop(first);
    assert!(after.is_lost() && !before.is_lost());
    assert_waits(&toucher);
    assert_eq!(second.copy(&before, 0, &contents_of(2), Wake::Waiters).unwrap(), Filled::Done);
    toucher.join().unwrap().expect("it is there");
}

#[test]
fn huge_pages_of_a_pool_are_filled_whole() {
    let nr_bytes = PageSize::Size2M.size_bytes();
    // Only on machines with a pool.
    let Ok(memory) = Backing::new(BackingKind::AnonymousHugetlb2M, 2 * nr_bytes) else {
        eprintln!("SKIPPED: no pool of huge pages");
        return;
    };
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let error = userfaultfd.register(&memory, 0..PAGE_SIZE, RegisterMode::Missing).expect_err("a part of a page");
    assert!(matches!(error, UserfaultfdError::Unaligned { .. }), "{error}");
    userfaultfd.register(&memory, 0..2 * nr_bytes, RegisterMode::Missing).unwrap();
    let toucher = touch(&memory, 512 + 3, Access::Write);
    let fault = next_fault(&userfaultfd);
    assert_eq!(fault.offset_bytes, nr_bytes);
    let contents: Vec<u8> = (0..512).flat_map(contents_of).collect();
    assert_eq!(userfaultfd.copy(&memory, nr_bytes, &contents, Wake::Waiters).unwrap(), Filled::Done);
    toucher.join().unwrap().expect("it is there");
    assert_page(&memory, 512 + 511, word_of(511));
}

#[test]
fn pages_that_are_there_and_pages_beside_the_range_do_not_fault() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 4);
    memory.store(PAGE_SIZE, 5).unwrap();
    userfaultfd.register(&memory, PAGE_SIZE..3 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    // In this thread: it would wait for ever.
    assert_eq!([0, 1, 3].map(|page| memory.load(page * PAGE_SIZE)), [Some(0), Some(5), Some(0)]);
    assert!(userfaultfd.read_event().unwrap().is_none());
    userfaultfd.unregister().unwrap();
}

#[test]
fn other_events_are_passed_on() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    userfaultfd.inner = slat_userfaultfd::Userfaultfd::open(features::EVENT_REMOVE).unwrap();
    let memory = memory(BackingKind::Anonymous, 4);
    userfaultfd.register(&memory, 0..4 * PAGE_SIZE, RegisterMode::Missing).unwrap();
    let discard = {
        let memory = memory.clone();
        thread::spawn(move || memory.discard(PAGE_SIZE, 2 * PAGE_SIZE))
    };
    let event = loop {
        if let Some(event) = userfaultfd.read_event().unwrap() {
            break event;
        }
        thread::yield_now();
    };
    assert!(matches!(event, UserfaultfdEvent::Other), "{event:?}");
    discard.join().unwrap().unwrap();
}

#[test]
fn faults_of_the_kernel_are_reported_where_that_is_allowed() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    if !userfaultfd.handles_kernel_faults() {
        eprintln!("SKIPPED: only faults of user mode are allowed for this user");
        return;
    }
    let memory = memory(BackingKind::Anonymous, 1);
    userfaultfd.register(&memory, bytes_of(0), RegisterMode::Missing).unwrap();
    let written = write_from(&memory);
    assert_eq!(next_fault(&userfaultfd).access, Access::Read);
    assert_eq!(userfaultfd.copy(&memory, 0, &contents_of(1), Wake::Waiters).unwrap(), Filled::Done);
    assert_eq!(written.join().unwrap().unwrap(), word_of(1));
}

/// Has the kernel read the first word of `memory` into a pipe, and reads it from there.
pub(super) fn write_from(memory: &Backing) -> JoinHandle<io::Result<u64>> {
    use std::io::{Read, Write};
    let memory = memory.clone();
    thread::spawn(move || {
        let (mut reader, mut writer) = io::pipe()?;
        // SAFETY: the word is in the mapping, and only the kernel reads it.
        let word = unsafe { std::slice::from_raw_parts(memory.as_ptr(), 8) };
        writer.write_all(word)?;
        let mut word = [0; 8];
        reader.read_exact(&mut word)?;
        Ok(u64::from_ne_bytes(word))
    })
}

#[test]
fn messages_read_before_their_page_was_filled_are_answered_late() {
    let Some(mut userfaultfd) = userfaultfd() else { return };
    let memory = memory(BackingKind::Anonymous, 1);
    userfaultfd.register(&memory, bytes_of(0), RegisterMode::Missing).unwrap();
    let first = touch(&memory, 0, Access::Write);
    let fault = next_fault(&userfaultfd);
    assert_eq!(userfaultfd.copy(&memory, 0, &contents_of(1), Wake::Waiters).unwrap(), Filled::Done);
    first.join().unwrap().expect("it is there");
    // SAFETY: in the mapping, aligned, accessed atomically.
    unsafe { AtomicU64::from_ptr(memory.as_ptr().cast()) }.store(77, Ordering::Relaxed);
    let late = userfaultfd.copy(fault.memory, fault.offset_bytes, &contents_of(1), Wake::Waiters).unwrap();
    assert_eq!((late, memory.load(0)), (Filled::AlreadyThere, Some(77)), "the guest's write is kept");
}

/// A thread that finds its pages no longer registered may take that for a failure.
#[test]
fn an_orderly_end_loses_no_memory_beside_an_abandon() {
    for round in 0..300 {
        let Some(mut userfaultfd) = userfaultfd() else { return };
        let memory = memory(BackingKind::Anonymous, 64);
        for page in (0..64).step_by(2) {
            userfaultfd.register(&memory, bytes_of(page), RegisterMode::Missing).unwrap();
        }
        thread::scope(|scope| {
            let handler = scope.spawn(|| {
                while userfaultfd.copy(&memory, 0, &contents_of(0), Wake::Waiters).is_ok() {}
                userfaultfd.abandon();
            });
            userfaultfd.unregister().unwrap();
            handler.join().unwrap();
        });
        assert!(!memory.is_lost(), "round {round}");
    }
}
