//! Linux's userfaultfd: one that another process has made, or one that is made here.
//!
//! The kernel stops a thread that touches a page which is not there, and sends a message to the
//! descriptor. A reader of the messages fills the page, and the thread goes on. `slat-pager` serves
//! the memory of virtual machine monitors so, and `slat-machine` compares demand paging by exits
//! with it.
//!
//! # Guarantees
//! - A fill ([`Userfaultfd::copy`], [`zero`](Userfaultfd::zero),
//!   [`map_cached`](Userfaultfd::map_cached), [`poison`](Userfaultfd::poison)) gives contents to
//!   pages that have none, and to no other.
//! - A fill says how far it came ([`Stopped`]), since the kernel stops at the first page that it
//!   cannot fill.
//!
//! # Use
//! Read events, fill pages. A fill wakes the threads that wait for the pages that it filled, unless
//! [`Wake::None`] says otherwise, and no other: a page that was there already needs
//! [`wake`](Userfaultfd::wake).
//!
//! # Facts of the kernel
//! - While a change of the mapping ([`Event::Remove`] and others) waits to be read, each fill fails
//!   with `EAGAIN`. The change goes on once the event is read. So a fill that was decided on before
//!   the read may come after the change; the caller excludes that.
//! - A read returns faults before events. So a fault may be read before an event that came first.
//! - When the last descriptor is closed, threads that wait read zeros.
//!
//! Sources: userfaultfd(2), ioctl_userfaultfd(2), `Documentation/admin-guide/mm/userfaultfd.rst`.

#![cfg(target_os = "linux")]
#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]
#![expect(unsafe_code, reason = "calls of a userfaultfd, which rustix has no wrappers for")]

mod sys;

use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ReadWriteFlags};
use thiserror::Error;

/// Bytes of a message of the kernel.
pub const MESSAGE_BYTES: usize = 32;

/// `UFFD_FEATURE_...`, for [`Userfaultfd::open`].
pub mod features {
    /// Write faults on protected pages are reported.
    pub const WRITE_PROTECTION: u64 = 1 << 0;
    /// `fork(2)` is reported, with a descriptor for the child.
    pub const EVENT_FORK: u64 = 1 << 1;
    /// `mremap(2)` is reported.
    pub const EVENT_REMAP: u64 = 1 << 2;
    /// `MADV_DONTNEED`, `MADV_FREE` and `MADV_REMOVE` are reported.
    pub const EVENT_REMOVE: u64 = 1 << 3;
    /// Missing pages of hugetlb memory are reported.
    pub const MISSING_HUGETLB: u64 = 1 << 4;
    /// Missing pages of shared memory are reported.
    pub const MISSING_SHMEM: u64 = 1 << 5;
    /// `munmap(2)` is reported.
    pub const EVENT_UNMAP: u64 = 1 << 6;
    /// Minor faults of shared memory are reported.
    pub const MINOR_SHMEM: u64 = 1 << 10;
}

/// Which faults of a range are reported; a set of bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegisterMode(u64);

impl RegisterMode {
    /// Pages without contents.
    pub const MISSING: RegisterMode = RegisterMode(1 << 0);
    /// Writes to protected pages.
    pub const WRITE_PROTECTED: RegisterMode = RegisterMode(1 << 1);
    /// Pages that are in the file and not in the mapping.
    pub const MINOR: RegisterMode = RegisterMode(1 << 2);

    /// Both sets.
    #[must_use]
    pub const fn and(self, other: RegisterMode) -> RegisterMode {
        RegisterMode(self.0 | other.0)
    }
}

/// Which calls the kernel allows for a range; a set of bits, `1 << NR` of each `UFFDIO_...`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Calls(u64);

impl Calls {
    /// [`Userfaultfd::wake`].
    pub const WAKE: Calls = Calls(1 << sys::NR_WAKE);
    /// [`Userfaultfd::copy`].
    pub const COPY: Calls = Calls(1 << sys::NR_COPY);
    /// [`Userfaultfd::map_cached`].
    pub const CONTINUE: Calls = Calls(1 << sys::NR_CONTINUE);

    /// Whether all of `calls` are allowed.
    pub const fn allow(self, calls: Calls) -> bool {
        self.0 & calls.0 == calls.0
    }
}

/// Which threads a fill wakes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Wake {
    /// All threads that wait for the pages that it filled.
    Waiters,
    /// No thread (`DONTWAKE`). It saves the kernel's search where no thread waits in the kernel, as
    /// for a vCPU that has left by an exit.
    None,
}

impl Wake {
    const fn mode(self) -> u64 {
        match self {
            Wake::Waiters => 0,
            Wake::None => sys::DONTWAKE,
        }
    }
}

/// What this user may have of this kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Available {
    /// All [`features`] of the kernel.
    pub features: u64,
    /// Whether faults are reported that the kernel takes for a program, as in read(2) into the
    /// memory. If not, this user may have only faults of user mode, and such a call fails with
    /// EFAULT where a page is missing.
    pub kernel_faults: bool,
}

/// Why a thread waits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Cause {
    /// The page has no contents.
    Missing,
    /// The page is in the file, and not in the mapping.
    Minor,
    /// The page is there and write-protected.
    WriteProtected,
}

/// A thread waits for a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// An address in the page.
    pub address: u64,
    /// Why it waits.
    pub cause: Cause,
    /// Whether it wants to write. An instruction fetch is a read.
    pub is_write: bool,
}

/// What a message says.
#[derive(Debug)]
pub enum Event {
    /// A thread waits.
    Fault(Fault),
    /// Pages are about to lose their contents.
    Remove(Range<u64>),
    /// Pages are about to be unmapped.
    Unmap(Range<u64>),
    /// A mapping has moved.
    Remap {
        /// Where it was.
        from: Range<u64>,
        /// Where it starts now.
        to: u64,
    },
    /// The process has forked; this is the descriptor of the child's memory.
    Fork(Userfaultfd),
    /// An event that this module does not know.
    Other(u8),
}

/// Messages that were just read, each of which is taken once.
#[derive(Debug)]
pub struct Messages<'m> {
    bytes: &'m [[u8; MESSAGE_BYTES]],
}

impl Messages<'_> {
    /// The ranges that lose their contents, of all messages that were not taken yet. They stay.
    pub fn removed(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.bytes.iter().filter_map(removed)
    }

    /// How many there are.
    pub fn nr(&self) -> usize {
        self.bytes.len()
    }
}

impl Iterator for Messages<'_> {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let (first, rest) = self.bytes.split_first()?;
        self.bytes = rest;
        let [head, one, two, three] = words(first);
        Some(match head.to_ne_bytes()[0] {
            sys::EVENT_PAGEFAULT => Event::Fault(Fault {
                address: two,
                cause: match one {
                    flags if flags & sys::FAULT_WRITE_PROTECTED != 0 => Cause::WriteProtected,
                    flags if flags & sys::FAULT_MINOR != 0 => Cause::Minor,
                    _ => Cause::Missing,
                },
                is_write: one & sys::FAULT_WRITE != 0,
            }),
            sys::EVENT_REMOVE => Event::Remove(one..two),
            sys::EVENT_UNMAP => Event::Unmap(one..two),
            sys::EVENT_REMAP => Event::Remap { from: one..one.saturating_add(three), to: two },
            sys::EVENT_FORK => {
                let [a, b, c, d, ..] = one.to_ne_bytes();
                // SAFETY: the kernel made this descriptor for the reader of the message. Only
                // `Userfaultfd::read` makes `Messages`, and this is the one time that it is taken.
                let fd = unsafe { OwnedFd::from_raw_fd(i32::from_ne_bytes([a, b, c, d])) };
                Event::Fork(Userfaultfd { fd })
            }
            other => Event::Other(other),
        })
    }
}

impl Drop for Messages<'_> {
    /// Descriptors of children are not leaked.
    fn drop(&mut self) {
        self.by_ref().for_each(drop);
    }
}

fn words(message: &[u8; MESSAGE_BYTES]) -> [u64; 4] {
    let (words, _) = message.as_chunks::<8>();
    std::array::from_fn(|word| u64::from_ne_bytes(words[word]))
}

/// The range that loses its contents by `message`; `None` if it says something else. For messages
/// that another process has read, too.
pub fn removed(message: &[u8; MESSAGE_BYTES]) -> Option<Range<u64>> {
    let [head, start, end, _] = words(message);
    matches!(head.to_ne_bytes()[0], sys::EVENT_REMOVE | sys::EVENT_UNMAP).then_some(start..end)
}

/// A fill stopped before its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{call} stopped after {filled_bytes} bytes: {error}")]
pub struct Stopped {
    /// The call.
    pub call: &'static str,
    /// What was filled from the beginning, in bytes.
    pub filled_bytes: u64,
    /// The reason. After a part was filled it is `EAGAIN`, and another call for the rest has the
    /// reason.
    pub error: Errno,
}

/// A call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("{call} failed: {error}")]
pub struct CallError {
    /// The call.
    pub call: &'static str,
    /// The reason.
    pub error: Errno,
}

/// Why a descriptor is not taken.
#[derive(Debug, Error)]
pub enum NotUserfaultfd {
    /// It is another kind of file.
    #[error("the descriptor is {what}, not a userfaultfd")]
    Other {
        /// What /proc says it is.
        what: String,
    },
    /// It cannot be looked at.
    #[error("cannot look at the descriptor: {0}")]
    System(#[from] Errno),
}

/// Why a userfaultfd cannot be made.
#[derive(Debug, Error)]
pub enum OpenError {
    /// This user may not have one.
    #[error(
        "userfaultfd is not allowed for this user: it needs /proc/sys/vm/unprivileged_userfaultfd to be 1, or access to \
         /dev/userfaultfd, or CAP_SYS_PTRACE (and a seccomp filter that lets it through)"
    )]
    NotPermitted {
        /// Of the last way that was tried.
        source: Errno,
    },
    /// The kernel was built without it.
    #[error("this kernel has no userfaultfd (CONFIG_USERFAULTFD)")]
    NotSupported {
        /// Of the system call.
        source: Errno,
    },
    /// The kernel lacks a feature.
    #[error("this kernel's userfaultfd lacks the features {missing:#x}")]
    MissingFeatures {
        /// `UFFD_FEATURE_...`.
        missing: u64,
    },
    /// The kernel refused a call.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// A userfaultfd. None of its calls waits; only threads that touch memory do.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Userfaultfd> for OwnedFd {
    fn from(userfaultfd: Userfaultfd) -> OwnedFd {
        userfaultfd.fd
    }
}

impl Userfaultfd {
    /// What [`open`](Self::open) can have.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn available() -> Result<Available, OpenError> {
        // A descriptor has one handshake only: this one asks for no feature, and is told all.
        let (fd, kernel_faults) = open()?;
        let features = handshake(fd.as_fd(), 0)?;
        Ok(Available { features, kernel_faults })
    }

    /// Makes one with these [`features`], close-on-exec.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(features: u64) -> Result<Userfaultfd, OpenError> {
        // The kernel refuses unknown features, without their names.
        let missing = features & !Userfaultfd::available()?.features;
        if missing != 0 {
            return Err(OpenError::MissingFeatures { missing });
        }
        let (fd, _) = open()?;
        handshake(fd.as_fd(), features)?;
        Ok(Userfaultfd { fd })
    }

    /// Takes a descriptor that another process made. Its copies stay: what they do to the file, as
    /// to let reads block, is done to this one, too.
    ///
    /// # Errors
    /// [`NotUserfaultfd`].
    pub fn from_fd(fd: OwnedFd) -> Result<Userfaultfd, NotUserfaultfd> {
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
        if link.as_bytes() != b"anon_inode:[userfaultfd]" {
            return Err(NotUserfaultfd::Other { what: link.to_string_lossy().into_owned() });
        }
        // The kernel does not let poll(2) wait for one that blocks.
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Userfaultfd { fd })
    }

    /// Another descriptor of the same file.
    ///
    /// # Errors
    /// Of fcntl(2).
    pub fn try_clone(&self) -> std::io::Result<Userfaultfd> {
        Ok(Userfaultfd { fd: self.fd.try_clone()? })
    }

    /// Reports faults of the addresses `range` of this process from now on. Returns what is allowed
    /// there.
    ///
    /// # Safety
    /// Every user of the range may wait, and accepts any contents of pages that are not there.
    ///
    /// # Errors
    /// Of the call.
    pub unsafe fn register(&self, range: Range<u64>, mode: RegisterMode) -> Result<Calls, CallError> {
        // SAFETY: the caller's promise.
        let calls = unsafe { sys::register(self.as_fd(), range.start, len(&range), mode.0) };
        calls.map(Calls).map_err(|error| CallError { call: "UFFDIO_REGISTER", error })
    }

    /// Reports no faults of `range` any more. Pages that are not there read as zeros, or as what their
    /// file has. Threads that wait may need a [`wake`](Self::wake): the kernel wakes them only where
    /// missing pages were registered.
    ///
    /// # Errors
    /// Of the call.
    pub fn unregister(&self, range: Range<u64>) -> Result<(), CallError> {
        sys::unregister(self.as_fd(), range.start, len(&range))
            .map_err(|error| CallError { call: "UFFDIO_UNREGISTER", error })
    }

    /// Reads as many messages as there are and fit. None: nothing happened. Does not wait, whatever
    /// another process has made of the file's flags. (Before Linux 6.10 it may, if that process reads
    /// messages, too.)
    ///
    /// # Errors
    /// Of read(2).
    pub fn read<'m>(&self, into: &'m mut [[u8; MESSAGE_BYTES]]) -> Result<Messages<'m>, CallError> {
        let nr_bytes = match self.read_now(into.as_flattened_mut()) {
            Ok(nr_bytes) => nr_bytes,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(CallError { call: "read", error }),
        };
        // The kernel copies whole messages.
        Ok(Messages { bytes: &into[..nr_bytes / MESSAGE_BYTES] })
    }

    fn read_now(&self, into: &mut [u8]) -> rustix::io::Result<usize> {
        let mut parts = [IoSliceMut::new(into)];
        // -1: where the file is, which a userfaultfd does not have.
        match rustix::io::preadv2(&self.fd, &mut parts, u64::MAX, ReadWriteFlags::NOWAIT) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {}
            read => return read,
        }
        let mut readable = [PollFd::new(&self.fd, PollFlags::IN)];
        match poll(&mut readable, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))? {
            0 => Ok(0),
            _ => rustix::io::read(&self.fd, into),
        }
    }

    /// Wakes all threads that wait for pages of `range`. They try again.
    ///
    /// # Errors
    /// Of the call.
    pub fn wake(&self, range: Range<u64>) -> Result<(), CallError> {
        sys::wake(self.as_fd(), range.start, len(&range)).map_err(|error| CallError { call: "UFFDIO_WAKE", error })
    }

    /// Fills the pages at `address` with `bytes`, whole pages.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn copy(&self, address: u64, bytes: &[u8], wake: Wake) -> Result<(), Stopped> {
        self.copy_from(address, bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64, wake)
    }

    /// Fills the pages at `address` with the `nr_bytes` at the address `source`, whole pages, which
    /// only the kernel reads. `EFAULT`: they are not mapped, or their file is too short.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn copy_from(&self, address: u64, source: u64, nr_bytes: u64, wake: Wake) -> Result<(), Stopped> {
        stopped("UFFDIO_COPY", sys::copy(self.as_fd(), address, source, nr_bytes, wake.mode()))
    }

    /// Fills the pages of `range` with zeros. hugetlb memory has none (`EINVAL`).
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn zero(&self, range: Range<u64>, wake: Wake) -> Result<(), Stopped> {
        self.fill(range, sys::Fill::Zeros, wake, "UFFDIO_ZEROPAGE")
    }

    /// Maps what the file of shared memory has for `range`. `EFAULT`: the file has no such page.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn map_cached(&self, range: Range<u64>, wake: Wake) -> Result<(), Stopped> {
        self.fill(range, sys::Fill::Cached, wake, "UFFDIO_CONTINUE")
    }

    /// Lets each access to a page of `range` that has no contents fail like one to broken memory
    /// (SIGBUS), for good. Linux 6.6 and later; before, `EINVAL`.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn poison(&self, range: Range<u64>, wake: Wake) -> Result<(), Stopped> {
        self.fill(range, sys::Fill::Poison, wake, "UFFDIO_POISON")
    }

    /// Protects pages of `range` from writes, which are then reported.
    ///
    /// # Errors
    /// Of the call.
    pub fn write_protect(&self, range: Range<u64>) -> Result<(), CallError> {
        self.set_protection(range, 1)
    }

    /// Allows writes to pages of `range` again, and wakes the waiters.
    ///
    /// # Errors
    /// Of the call.
    pub fn allow_writes(&self, range: Range<u64>) -> Result<(), CallError> {
        self.set_protection(range, 0)
    }

    fn set_protection(&self, range: Range<u64>, mode: u64) -> Result<(), CallError> {
        sys::write_protect(self.as_fd(), range.start, len(&range), mode)
            .map_err(|error| CallError { call: "UFFDIO_WRITEPROTECT", error })
    }

    fn fill(&self, range: Range<u64>, with: sys::Fill, wake: Wake, call: &'static str) -> Result<(), Stopped> {
        stopped(call, sys::fill(self.as_fd(), range.start, len(&range), wake.mode(), with))
    }
}

fn open() -> Result<(OwnedFd, bool), OpenError> {
    sys::open().map_err(|error| match error {
        Errno::PERM | Errno::ACCESS => OpenError::NotPermitted { source: error },
        Errno::NOSYS => OpenError::NotSupported { source: error },
        error => CallError { call: "userfaultfd", error }.into(),
    })
}

fn handshake(fd: BorrowedFd<'_>, features: u64) -> Result<u64, CallError> {
    sys::handshake(fd, features).map_err(|error| CallError { call: "UFFDIO_API", error })
}

/// 0 for a range that ends before it starts: the kernel refuses it.
fn len(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

fn stopped(call: &'static str, (result, filled): (rustix::io::Result<()>, i64)) -> Result<(), Stopped> {
    // The kernel writes the negated error where the number would be.
    result.map_err(|error| Stopped { call, filled_bytes: u64::try_from(filled).unwrap_or(0), error })
}
