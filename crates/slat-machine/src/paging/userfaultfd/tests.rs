//! The real kernel: what each call does to the memory, and to threads that wait for it.
//!
//! Where userfaultfd is not allowed, the tests print that and pass.

use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::mm::Advice;
use slat::host::{Resolved, Unresolved};
use slat::{Access, PAGE_SIZE};

use super::*;
use crate::linux::descriptors::poll;

/// The kinds, with the modes that each has.
const KINDS: [(BackingKind, RegisterMode); 4] = [
    (BackingKind::Anonymous, RegisterMode::Missing),
    (BackingKind::AnonymousThp, RegisterMode::Missing),
    (BackingKind::Shmem, RegisterMode::Missing),
    (BackingKind::Shmem, RegisterMode::Minor),
];

pub(super) fn memory(kind: BackingKind, nr_pages: u64) -> Backing {
    Backing::new(kind, nr_pages * PAGE_SIZE).unwrap()
}

/// Registers all of `memory`; `None` where that is not allowed.
pub(super) fn register(memory: &Backing, mode: RegisterMode, nr_descriptors: usize) -> Option<Userfaultfds> {
    if mode == RegisterMode::Minor {
        memory.alias().unwrap().populate().unwrap();
    }
    match Userfaultfds::register(memory, mode, nr_descriptors) {
        Ok(userfaultfds) => Some(userfaultfds),
        Err(error @ UserfaultfdError::Open(_)) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error:?}"),
    }
}

/// The word that fills page `page`.
pub(super) fn word_of(page: u64) -> u64 {
    0xABAB_0000_0000_0001 + page
}

pub(super) fn contents_of(page: u64) -> PageBytes {
    word_of(page).to_ne_bytes().repeat(PAGE_SIZE as usize / 8).try_into().unwrap()
}

/// Touches a page as the engine's host does, in a thread of its own.
pub(super) fn touch(memory: &Backing, page: u64, access: Access) -> JoinHandle<Result<Resolved, Unresolved>> {
    let memory = memory.clone();
    thread::spawn(move || memory.resolve(page * PAGE_SIZE, access, &|_| panic!("its frames are fixed")))
}

/// The page of the next fault, which has to come within ten minutes on any machine.
pub(super) fn next_fault(descriptor: &Userfaultfd) -> u64 {
    let mut entries = [PollFd::new(descriptor, PollFlags::IN)];
    assert!(poll(&mut entries, Some(Duration::from_secs(600))).unwrap(), "no fault was reported");
    assert_eq!(entries[0].revents(), PollFlags::IN);
    descriptor.read_fault().unwrap().expect("a fault")
}

pub(super) fn assert_page(memory: &Backing, page: u64, word: u64) {
    for offset_bytes in (page * PAGE_SIZE..(page + 1) * PAGE_SIZE).step_by(8) {
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
        let memory = memory(kind, 1024);
        let Some(both) = register(&memory, RegisterMode::Missing, 2) else { return };
        assert_eq!(both.all[0].read_fault().unwrap(), None);
        // Neighbours in one 2 MiB block: the kernel adds no other page.
        let pages = [(0, Access::Read), (1, Access::Write), (513, Access::Execute), (512, Access::Read)];
        for (page, access) in pages.into_iter().chain([(1023, Access::Write)]) {
            let toucher = touch(&memory, page, access);
            assert_eq!(next_fault(&both.all[page as usize / 512]), page, "{kind}");
            both.of(page).copy(page, &contents_of(page), Wake::Waiters).unwrap();
            toucher.join().unwrap().expect("it is there");
            assert_page(&memory, page, word_of(page));
        }
        for descriptor in &*both.all {
            assert_eq!(descriptor.read_fault().unwrap(), None, "a fault more than was answered");
        }
        // A late answer to another message does not undo the guest's write.
        memory.store(0, 77).unwrap();
        both.of(0).copy(0, &contents_of(1), Wake::Waiters).unwrap();
        assert_eq!(memory.load(0), Some(77));
    }
}

#[test]
fn minor_faults_map_what_the_file_has() {
    let memory = memory(BackingKind::Shmem, 8);
    let alias = memory.alias().unwrap();
    let Some(userfaultfds) = register(&memory, RegisterMode::Minor, 1) else { return };
    let descriptor = userfaultfds.of(0);
    // In each round the file keeps its pages, and the mapping loses them.
    for round in 0..3 {
        for (page, access) in [(3, Access::Read), (4, Access::Write)] {
            let toucher = touch(&memory, page, access);
            assert_eq!(next_fault(descriptor), page);
            alias.write(page * PAGE_SIZE, &contents_of(page + round)).unwrap();
            assert_waits(&toucher);
            descriptor.map_cached(page, Wake::Waiters).unwrap();
            toucher.join().unwrap().expect("it is there");
            assert_page(&memory, page, word_of(page + round));
            descriptor.map_cached(page, Wake::Waiters).expect("it is there");
        }
        memory.frames().advise(0..8 * PAGE_SIZE, Advice::LinuxDontNeed).unwrap();
    }
    assert_eq!(descriptor.read_fault().unwrap(), None);
}

#[test]
fn pages_that_are_not_in_the_file_are_reported_too() {
    let memory = memory(BackingKind::Shmem, 2);
    let Some(userfaultfds) = register(&memory, RegisterMode::Minor, 1) else { return };
    memory.discard(PAGE_SIZE, PAGE_SIZE).unwrap();
    let descriptor = userfaultfds.of(1);
    let toucher = touch(&memory, 1, Access::Read);
    assert_eq!(next_fault(descriptor), 1);
    let error = descriptor.map_cached(1, Wake::Waiters).expect_err("not in the file");
    assert!(matches!(error, UserfaultfdError::System { call: "UFFDIO_CONTINUE", .. }), "{error}");
    assert_waits(&toucher);
    memory.alias().unwrap().write(PAGE_SIZE, &contents_of(1)).unwrap();
    descriptor.map_cached(1, Wake::Waiters).unwrap();
    toucher.join().unwrap().expect("it is there");
    assert_page(&memory, 1, word_of(1));
}

#[test]
fn a_thread_that_is_not_woken_waits_for_the_next_wake() {
    let memory = memory(BackingKind::Anonymous, 2);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 1) else { return };
    let descriptor = userfaultfds.of(0);
    for page in 0..2 {
        let touchers = [Access::Read, Access::Write, Access::Write].map(|access| touch(&memory, page, access));
        for _ in &touchers {
            assert_eq!(next_fault(descriptor), page, "each thread reports its own fault");
        }
        descriptor.copy(page, &contents_of(page), Wake::None).unwrap();
        touchers.iter().for_each(assert_waits);
        match page {
            0 => userfaultfds.wake_all(),
            // A second copy changes nothing, and wakes all.
            _ => descriptor.copy(page, &contents_of(7), Wake::None).unwrap(),
        }
        for toucher in touchers {
            toucher.join().unwrap().expect("it is there");
        }
        assert_page(&memory, page, word_of(page));
    }
    // No thread waits any more: a wake-up is no error.
    descriptor.wake(0..2).unwrap();
}

#[test]
fn too_early_a_wake_makes_a_new_message() {
    let memory = memory(BackingKind::Anonymous, 1);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 1) else { return };
    let descriptor = userfaultfds.of(0);
    let toucher = touch(&memory, 0, Access::Write);
    for _ in 0..3 {
        assert_eq!(next_fault(descriptor), 0);
        descriptor.wake(0..1).unwrap();
    }
    next_fault(descriptor);
    descriptor.copy(0, &contents_of(5), Wake::Waiters).unwrap();
    toucher.join().unwrap().expect("it is there");
    assert_page(&memory, 0, word_of(5));
}

#[test]
fn threads_that_wait_at_an_abandon_or_drop_get_no_page() {
    for (kind, mode) in KINDS {
        for abandon in [Userfaultfd::abandon, |_: &Userfaultfd| ()] {
            let memory = memory(kind, 64);
            let Some(both) = register(&memory, mode, 2) else { return };
            let touchers: Vec<_> = (0..64).step_by(4).map(|page| touch(&memory, page, Access::Read)).collect();
            let reader = {
                let memory = memory.clone();
                // The host's own read does not find zeros either.
                thread::spawn(move || memory.load(63 * PAGE_SIZE))
            };
            next_fault(&both.all[0]);
            touchers.iter().take(2).for_each(assert_waits);
            both.all.iter().for_each(abandon);
            if memory.is_lost() {
                // Guests may have zeros there, which must not change.
                both.of(63).copy(63, &contents_of(63), Wake::None).expect_err("after the end");
            }
            drop(both);
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
fn faults_of_the_kernel_are_reported_where_that_is_allowed() {
    let memory = memory(BackingKind::Anonymous, 1);
    let Some(userfaultfds) = register(&memory, RegisterMode::Missing, 1) else { return };
    if !slat_userfaultfd::Userfaultfd::available().unwrap().kernel_faults {
        eprintln!("SKIPPED: only faults of user mode are allowed for this user");
        return;
    }
    let written = write_from(&memory);
    assert_eq!(next_fault(userfaultfds.of(0)), 0);
    userfaultfds.of(0).copy(0, &contents_of(1), Wake::Waiters).unwrap();
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
