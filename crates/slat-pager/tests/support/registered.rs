//! The memory of a VMM that is registered with a userfaultfd, and what a guest does with it.

#![allow(dead_code, reason = "each test takes what it needs")]
#![expect(unsafe_code, reason = "memory that another program fills")]

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use slat_pager::userfaultfd::{RegisterMode, Userfaultfd, features};
use slat_pager::vm::Region;

use crate::support::{byte, bytes};

pub const PAGE: usize = 4096;
pub const HUGE_PAGE: usize = 2 << 20;

/// What the memory is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Anonymous,
    /// With transparent huge pages.
    Thp,
    /// hugetlb, 2M.
    Huge,
}

/// Memory of a guest.
#[derive(Debug)]
pub struct Guest {
    start: *mut u8,
    nr_bytes: usize,
    page_bytes: usize,
    /// Where it is in the snapshot.
    offset: u64,
}

// SAFETY: the memory is accessed by atomic reads and writes of single bytes alone, and by the
// kernel.
unsafe impl Send for Guest {}
// SAFETY: as above.
unsafe impl Sync for Guest {}

impl Guest {
    /// `None`: there are no pages of this kind, which is said.
    pub fn new(kind: Kind, nr_bytes: usize, offset: u64) -> Option<Guest> {
        let page_bytes = if kind == Kind::Huge { HUGE_PAGE } else { PAGE };
        let mut flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        if kind == Kind::Huge {
            // hugetlb reserves: a page that is not there would be a SIGBUS later.
            flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        }
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // Room for an aligned start, as transparent huge pages need it.
        let room = if kind == Kind::Thp { HUGE_PAGE } else { 0 };
        // SAFETY: a new mapping.
        let start = match unsafe { mmap_anonymous(std::ptr::null_mut(), nr_bytes + room, prot, flags) } {
            Ok(start) => start.cast::<u8>(),
            Err(error) if kind == Kind::Huge => {
                println!("skipped: no huge pages (vm.nr_hugepages): {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let start = start.map_addr(|address| if room > 0 { address.next_multiple_of(HUGE_PAGE) } else { address });
        if kind == Kind::Thp {
            // SAFETY: advice of the new mapping.
            unsafe { madvise(start.cast(), nr_bytes, Advice::LinuxHugepage) }.unwrap();
        }
        Some(Guest { start, nr_bytes, page_bytes, offset })
    }

    /// A shared mapping of `file` from `offset` on, which is where it is in the snapshot, too.
    pub fn of_file(file: impl AsFd, nr_bytes: usize, offset: u64) -> Guest {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping.
        let start = unsafe { mmap(std::ptr::null_mut(), nr_bytes, prot, MapFlags::SHARED, file, offset) }.unwrap();
        Guest { start: start.cast(), nr_bytes, page_bytes: PAGE, offset }
    }

    pub fn region(&self) -> Region {
        Region {
            address: self.start.expose_provenance() as u64,
            size_bytes: self.nr_bytes as u64,
            offset: self.offset,
            page_bytes: self.page_bytes as u64,
        }
    }

    pub fn nr_pages(&self) -> usize {
        self.nr_bytes / PAGE
    }

    pub fn address(&self, page: usize) -> u64 {
        self.region().address + (page * PAGE) as u64
    }

    pub fn register(&self, userfaultfd: &Userfaultfd, mode: RegisterMode) {
        // SAFETY: threads may wait, and believe nothing of pages that are not there.
        unsafe { userfaultfd.register(self.region().addresses(), mode) }.unwrap();
    }

    fn byte(&self, page: usize, at: usize) -> &AtomicU8 {
        assert!(page < self.nr_pages() && at < PAGE);
        // SAFETY: it is in the mapping, and `unmap` has the promise that it stays there.
        unsafe { AtomicU8::from_ptr(self.start.add(page * PAGE + at)) }
    }

    /// The byte `at` of a page.
    pub fn load(&self, page: usize, at: usize) -> u8 {
        self.byte(page, at).load(Ordering::Relaxed)
    }

    pub fn store(&self, page: usize, at: usize, value: u8) {
        self.byte(page, at).store(value, Ordering::Relaxed);
    }

    /// All bytes of a page.
    pub fn page(&self, page: usize) -> Vec<u8> {
        assert!(page < self.nr_pages());
        let mut bytes = vec![0; PAGE];
        for (nth, found) in bytes.chunks_exact_mut(8).enumerate() {
            // SAFETY: as in `byte`, and aligned.
            let word = unsafe { AtomicU64::from_ptr(self.start.add(page * PAGE + nth * 8).cast()) };
            found.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        bytes
    }

    /// Panics unless the page is as in the snapshot.
    pub fn verify(&self, page: usize, seed: u64) {
        let offset = self.offset + (page * PAGE) as u64;
        // The first access of different threads is to different bytes.
        let first = (page * 61) % PAGE;
        assert_eq!(self.load(page, first), byte(seed, offset + first as u64), "page {page}, byte {first}");
        assert!(self.page(page) == bytes(seed, offset..offset + PAGE as u64), "page {page} is wrong");
    }

    pub fn is_zero(&self, page: usize) -> bool {
        self.page(page).iter().all(|byte| *byte == 0)
    }

    /// As a balloon does. Waits until the event was read.
    pub fn discard(&self, pages: Range<usize>) {
        assert!(pages.end <= self.nr_pages());
        // SAFETY: the pages are in the mapping, and read as anything afterwards.
        unsafe { madvise(self.start.add(pages.start * PAGE).cast(), pages.len() * PAGE, Advice::LinuxDontNeed) }
            .unwrap();
    }

    /// Takes pages out of the file that is mapped. Waits until the event was read.
    pub fn punch(&self, pages: Range<usize>) {
        assert!(pages.end <= self.nr_pages());
        // SAFETY: the pages are in the mapping, and read as zeros afterwards.
        unsafe { madvise(self.start.add(pages.start * PAGE).cast(), pages.len() * PAGE, Advice::LinuxRemove) }.unwrap();
    }

    /// Whether the kernel can read the page: no if it is poisoned. The access waits like any other.
    pub fn is_readable(&self, page: usize) -> bool {
        assert!(page < self.nr_pages());
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        // SAFETY: the byte is in the mapping; only the kernel reads it.
        match unsafe { libc::write(writer.as_raw_fd(), self.start.add(page * PAGE).cast(), 1) } {
            1 => true,
            _ => match io::Error::last_os_error().raw_os_error() {
                Some(libc::EFAULT) => false,
                other => panic!("{other:?}"),
            },
        }
    }

    /// Which of the `pages` a child of this process can read.
    pub fn readable_in_child(&self, pages: &[usize]) -> Vec<bool> {
        assert!(pages.iter().all(|page| *page < self.nr_pages()));
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (answers, answer) = rustix::pipe::pipe().unwrap();
        // SAFETY: the child calls the kernel alone, with descriptors and memory that it has.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                for page in pages {
                    let written = libc::write(writer.as_raw_fd(), self.start.add(page * PAGE).cast(), 1);
                    libc::write(answer.as_raw_fd(), [u8::from(written == 1)].as_ptr().cast(), 1);
                }
                libc::_exit(0);
            }
            child
        };
        drop((reader, answer));
        let mut found = vec![0; pages.len()];
        io::Read::read_exact(&mut std::fs::File::from(answers), &mut found).unwrap();
        // SAFETY: the call writes nothing.
        assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        found.into_iter().map(|is_readable| is_readable == 1).collect()
    }

    /// The kernel has two mappings from now on, the second from `page` on.
    pub fn split(&self, page: usize) {
        assert!(page < self.nr_pages());
        let nr_bytes = (self.nr_pages() - page) * PAGE;
        // SAFETY: advice of the mapping, which changes no contents.
        unsafe { madvise(self.start.add(page * PAGE).cast(), nr_bytes, Advice::LinuxDontDump) }.unwrap();
    }

    /// Unmaps pages.
    ///
    /// # Safety
    /// The test accesses them no more.
    pub unsafe fn unmap(&self, pages: Range<usize>) {
        assert!(pages.end <= self.nr_pages());
        // SAFETY: the pages are those of the mapping; the caller's promise.
        unsafe { munmap(self.start.add(pages.start * PAGE).cast(), pages.len() * PAGE) }.unwrap();
    }
}

/// A userfaultfd as Firecracker makes it, `None` if that is not possible here, which is said.
pub fn userfaultfd(more_features: u64) -> Option<Userfaultfd> {
    Userfaultfd::open(features::EVENT_REMOVE | more_features).map_err(|error| println!("skipped: {error}")).ok()
}

/// A copy of the descriptor, as a VMM sends it.
pub fn copy_of(userfaultfd: &Userfaultfd) -> OwnedFd {
    userfaultfd.as_fd().try_clone_to_owned().unwrap()
}

/// Firecracker's handshake, to the letter.
pub fn handshake(regions: &[Region]) -> String {
    let entry = |region: &Region| {
        serde_json::json!({
            "base_host_virt_addr": region.address,
            "size": region.size_bytes,
            "offset": region.offset,
            "page_size": region.page_bytes,
            "page_size_kib": region.page_bytes,
        })
    };
    serde_json::Value::from_iter(regions.iter().map(entry)).to_string()
}

/// Sends bytes with a descriptor.
pub fn send(socket: &UnixStream, bytes: &[u8], userfaultfd: Option<&Userfaultfd>) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = userfaultfd.iter().map(|userfaultfd| userfaultfd.as_fd()).collect();
    send_with(socket, bytes, &fds)
}

/// Sends bytes with descriptors.
pub fn send_with(socket: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
