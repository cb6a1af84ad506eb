//! Guest memory in this process: a mapping that a userfaultfd reports, and threads that touch it.

#![expect(unsafe_code, reason = "a mapping that is filled by a pager")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread;

use crate::support::{self, userfaultfd};

const PAGE: u64 = 4096;

/// A mapping, which is never unmapped.
#[derive(Debug)]
pub struct Guest {
    start: *mut u8,
    nr_bytes: u64,
    /// The descriptor, for a pager.
    pub uffd: OwnedFd,
}

// SAFETY: the mapping is shared between threads as raw memory, by atomic accesses alone.
unsafe impl Send for Guest {}
// SAFETY: as for `Send`.
unsafe impl Sync for Guest {}

impl Guest {
    /// Memory of its own.
    pub fn anonymous(nr_bytes: u64) -> Guest {
        Guest::map(nr_bytes, None, 0, userfaultfd::MODE_MISSING)
    }

    /// A private mapping of `file`.
    pub fn private(nr_bytes: u64, file: BorrowedFd<'_>) -> Guest {
        let features = userfaultfd::FEATURE_MISSING_SHMEM | userfaultfd::FEATURE_MINOR_SHMEM;
        Guest::map(nr_bytes, Some(file), features, userfaultfd::MODE_MISSING | userfaultfd::MODE_MINOR)
    }

    fn map(nr_bytes: u64, file: Option<BorrowedFd<'_>>, features: u64, mode: u64) -> Guest {
        let (flags, fd) = match file {
            Some(file) => (libc::MAP_PRIVATE, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, where the kernel likes.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), nr_bytes as usize, protection, flags, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        let uffd = userfaultfd::open(features).unwrap();
        // SAFETY: the mapping is new, and what its pages have is checked.
        unsafe { userfaultfd::register(&uffd, start as u64, nr_bytes, mode) }.unwrap();
        Guest { start: start.cast(), nr_bytes, uffd }
    }

    /// Its one region.
    pub fn region(&self) -> slat_pager::vm::Region {
        slat_pager::vm::Region { address: self.start as u64, size_bytes: self.nr_bytes, offset: 0, page_bytes: PAGE }
    }

    /// Another descriptor of the same userfaultfd.
    pub fn uffd(&self) -> OwnedFd {
        self.uffd.as_fd().try_clone_to_owned().unwrap()
    }

    fn byte(&self, offset: u64) -> &AtomicU8 {
        assert!(offset < self.nr_bytes);
        // SAFETY: in the mapping, which is never unmapped.
        unsafe { AtomicU8::from_ptr(self.start.add(offset as usize)) }
    }

    pub fn read(&self, offset: u64) -> u8 {
        self.byte(offset).load(Ordering::Relaxed)
    }

    pub fn write(&self, offset: u64, byte: u8) {
        self.byte(offset).store(byte, Ordering::Relaxed);
    }

    /// Its pages are not mapped from now on, as after reclaim: the next access of each is a fault.
    pub fn forget_pages(&self) {
        // SAFETY: the pages are in the mapping, and read as anything afterwards.
        let advised = unsafe { libc::madvise(self.start.cast(), self.nr_bytes as usize, libc::MADV_DONTNEED) };
        assert_eq!(advised, 0, "{}", std::io::Error::last_os_error());
    }

    /// Reads all bytes by `nr_threads` threads, each in an order of its own, and returns how many
    /// are not those of the snapshot `seed`.
    pub fn nr_wrong(&self, seed: u64, nr_threads: u64) -> u64 {
        let nr_wrong = AtomicU64::new(0);
        let nr_pages = self.nr_bytes / PAGE;
        thread::scope(|scope| {
            for thread in 0..nr_threads {
                let nr_wrong = &nr_wrong;
                scope.spawn(move || {
                    for index in 0..nr_pages {
                        let page = (index * 263 + thread * 31) % nr_pages;
                        let range = page * PAGE..(page + 1) * PAGE;
                        let found: Vec<u8> = range.clone().map(|offset| self.read(offset)).collect();
                        let is_wrong = support::wrong(seed, range.start, &found).is_some();
                        nr_wrong.fetch_add(u64::from(is_wrong), Ordering::Relaxed);
                    }
                });
            }
        });
        nr_wrong.into_inner()
    }
}
