//! Fills, refusals and events, on memory of this process. Skipped where this user may have no
//! userfaultfd.

#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "memory is mapped, registered and touched")]

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use slat_userfaultfd::{
    Calls, Cause, Event, MESSAGE_BYTES, NotUserfaultfd, OpenError, RegisterMode, Userfaultfd, Wake, features,
};

const PAGE: u64 = 4096;
const NR_PAGES: u64 = 8;

/// Anonymous memory. It is unmapped at the end, when no thread touches it any more.
struct Memory(*mut std::ffi::c_void);

// SAFETY: it is read and written by atomic operations alone.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Memory {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), (NR_PAGES * PAGE) as usize, ProtFlags::READ | ProtFlags::WRITE, flags)
        };
        Memory(start.unwrap())
    }

    fn pages(&self, pages: Range<u64>) -> Range<u64> {
        let start = self.0.expose_provenance() as u64;
        start + pages.start * PAGE..start + pages.end * PAGE
    }

    /// The first word of a page. It may wait.
    fn word(&self, page: u64) -> &AtomicU64 {
        assert!(page < NR_PAGES);
        // SAFETY: in the mapping, aligned, and all accesses are atomic.
        unsafe { AtomicU64::from_ptr(self.0.byte_add((page * PAGE) as usize).cast()) }
    }

    fn discard(&self, pages: Range<u64>) {
        let (start, nr_bytes) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
        assert!(pages.end <= NR_PAGES);
        // SAFETY: pages of the mapping, which have words alone.
        unsafe { madvise(self.0.byte_add(start as usize), nr_bytes as usize, Advice::LinuxDontNeed) }.unwrap();
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing uses any more.
        unsafe { munmap(self.0, (NR_PAGES * PAGE) as usize) }.unwrap();
    }
}

/// A descriptor with all of `memory`, or `None` where there is none.
fn registered(memory: &Memory, features: u64, mode: RegisterMode) -> Option<Userfaultfd> {
    let userfaultfd = match Userfaultfd::open(features) {
        Ok(userfaultfd) => userfaultfd,
        Err(error @ (OpenError::NotPermitted { .. } | OpenError::NotSupported { .. })) => {
            println!("skipped: {error}");
            return None;
        }
        Err(error) => panic!("{error}"),
    };
    // SAFETY: threads may wait for the pages, and accept what comes.
    let calls = unsafe { userfaultfd.register(memory.pages(0..NR_PAGES), mode) }.unwrap();
    assert!(calls.allow(Calls::COPY) && calls.allow(Calls::WAKE) && !calls.allow(Calls::CONTINUE), "{calls:?}");
    Some(userfaultfd)
}

fn next(userfaultfd: &Userfaultfd) -> Event {
    let mut messages = [[0; MESSAGE_BYTES]; 4];
    loop {
        let read = userfaultfd.read(&mut messages).unwrap().next();
        match read {
            Some(event) => return event,
            None => thread::yield_now(),
        }
    }
}

#[test]
fn a_thread_waits_until_its_page_is_filled() {
    let memory = Memory::new();
    let bytes = [7_u8; PAGE as usize];
    thread::scope(|scope| {
        // In here: a test that fails closes it, and no thread waits any more.
        let Some(userfaultfd) = registered(&memory, 0, RegisterMode::MISSING) else { return };
        let reader = scope.spawn(|| memory.word(3).load(Ordering::Relaxed));
        let Event::Fault(fault) = next(&userfaultfd) else { panic!("not a fault") };
        assert!(memory.pages(3..4).contains(&fault.address));
        assert_eq!((fault.cause, fault.is_write), (Cause::Missing, false));
        // The page comes, and the thread sleeps on until it is woken.
        userfaultfd.copy(memory.pages(3..4).start, &bytes, Wake::None).unwrap();
        userfaultfd.wake(memory.pages(3..4)).unwrap();
        assert_eq!(reader.join().unwrap(), u64::from_ne_bytes([7; 8]));
        userfaultfd.zero(memory.pages(4..6), Wake::Waiters).unwrap();
        assert_eq!([4, 5].map(|page| memory.word(page).load(Ordering::Relaxed)), [0, 0]);
    });
}

#[test]
fn a_fill_says_how_far_it_came() {
    let memory = Memory::new();
    let Some(userfaultfd) = registered(&memory, 0, RegisterMode::MISSING) else { return };
    let bytes = vec![7_u8; (NR_PAGES * PAGE) as usize];
    userfaultfd.zero(memory.pages(2..3), Wake::Waiters).unwrap();
    let stopped = userfaultfd.copy(memory.pages(0..1).start, &bytes, Wake::Waiters).unwrap_err();
    assert_eq!((stopped.filled_bytes, stopped.error), (2 * PAGE, Errno::AGAIN));
    let stopped = userfaultfd.copy(memory.pages(2..3).start, &bytes[..PAGE as usize], Wake::Waiters).unwrap_err();
    assert_eq!((stopped.filled_bytes, stopped.error), (0, Errno::EXIST));
    assert_eq!([1, 2].map(|page| memory.word(page).load(Ordering::Relaxed)), [u64::from_ne_bytes([7; 8]), 0]);
}

#[test]
fn bad_ranges_are_refused() {
    let memory = Memory::new();
    let Some(userfaultfd) = registered(&memory, 0, RegisterMode::MISSING) else { return };
    let Range { start, end } = memory.pages(0..1);
    for range in [start..start, end..start, start + 1..end + 1, start..end - 1, u64::MAX - PAGE + 1..u64::MAX] {
        let stopped = userfaultfd.zero(range.clone(), Wake::Waiters).unwrap_err();
        assert_eq!((stopped.filled_bytes, stopped.error), (0, Errno::INVAL), "{range:x?}");
        assert_eq!(userfaultfd.wake(range).unwrap_err().error, Errno::INVAL);
    }
    // Not mapped: the source, and the memory.
    let stopped = userfaultfd.copy_from(start, 0, PAGE, Wake::Waiters).unwrap_err();
    assert_eq!((stopped.filled_bytes, stopped.error), (0, Errno::FAULT));
    userfaultfd.unregister(memory.pages(0..NR_PAGES)).unwrap();
    assert_eq!(userfaultfd.zero(start..end, Wake::Waiters).unwrap_err().error, Errno::NOENT);
}

#[test]
fn a_discard_waits_for_its_reader() {
    let memory = Memory::new();
    thread::scope(|scope| {
        let Some(userfaultfd) = registered(&memory, features::EVENT_REMOVE, RegisterMode::MISSING) else { return };
        userfaultfd.zero(memory.pages(0..4), Wake::Waiters).unwrap();
        let discard = scope.spawn(|| memory.discard(1..3));
        let Event::Remove(range) = next(&userfaultfd) else { panic!("not a discard") };
        assert_eq!(range, memory.pages(1..3));
        discard.join().unwrap();
        userfaultfd.copy(memory.pages(1..2).start, &[9; PAGE as usize], Wake::Waiters).unwrap();
        assert_eq!(memory.word(1).load(Ordering::Relaxed), u64::from_ne_bytes([9; 8]));
    });
}

#[test]
fn a_read_does_not_wait_whatever_a_copy_of_the_descriptor_does() {
    let Ok(userfaultfd) = Userfaultfd::open(0) else { return };
    let copy = userfaultfd.try_clone().unwrap();
    let flags = rustix::fs::fcntl_getfl(&copy).unwrap();
    rustix::fs::fcntl_setfl(&copy, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
    assert!(!rustix::fs::fcntl_getfl(&userfaultfd).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
    let mut messages = [[0; MESSAGE_BYTES]; 4];
    assert!(userfaultfd.read(&mut messages).unwrap().next().is_none());
}

#[test]
fn only_a_userfaultfd_is_taken() {
    let refused = Userfaultfd::from_fd(File::open("/dev/null").unwrap().into()).unwrap_err();
    assert!(matches!(&refused, NotUserfaultfd::Other { what } if what == "/dev/null"), "{refused}");
    let Ok(userfaultfd) = Userfaultfd::open(0) else { return };
    Userfaultfd::from_fd(userfaultfd.into()).unwrap();
}

#[test]
fn unknown_features_are_named() {
    match Userfaultfd::open(1 << 63 | features::EVENT_REMOVE) {
        Err(OpenError::MissingFeatures { missing }) => assert_eq!(missing, 1 << 63),
        Err(error @ (OpenError::NotPermitted { .. } | OpenError::NotSupported { .. })) => println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("no kernel has bit 63"),
    }
}
