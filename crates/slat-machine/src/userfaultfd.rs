//! userfaultfd(2) for guest memory: the kernel stops whoever touches a page that is not there, and
//! tells a reader of the descriptor, who brings the page and wakes the one who waits. It is what
//! hypervisors do demand paging with today, and what demand paging by exits is measured against;
//! and both go together.
//!
//! # Two kinds of faults
//! - *Missing*: the page has no contents. [`Userfaultfd::copy`] brings them, whole pages at a time;
//!   of two who copy the same page, the kernel takes the first ([`Filled::AlreadyThere`]). For all
//!   memory.
//! - *Minor*: the page is in the memory's file, and not in this mapping.
//!   [`Userfaultfd::map_cached`] maps what the file has; its contents were written through another
//!   mapping ([`Alias`](crate::memory::Alias)). Only for memory that is shared. The kernel does not
//!   know who has written what: who writes to the alias claims the page first, or may overwrite
//!   what a guest has written since.
//!
//! # Protocol
//! - A range is registered before guests run. What was touched already does not fault.
//! - Each thread that faults makes a message, also two on the same page, and one message is read by
//!   one reader. To wake is to let all go who wait for a page at that moment; they try again, and
//!   who still finds nothing makes a new message. So nobody is woken too early for good, and who
//!   waits although the page is there, because it was filled with [`Wake::Nobody`], needs a
//!   [`wake`](Userfaultfd::wake).
//! - Every wait has a way out. A descriptor ends in one of two ways:
//!   [`unregister`](Userfaultfd::unregister), when all pages are there that anybody will ask for;
//!   or [`abandon`](Userfaultfd::abandon), which first marks the memory as lost and then lets
//!   everybody in. Who gets in so finds zeros, or what the file had; but the machine reads the mark
//!   after each touch and takes the page for gone ([`Backing::is_lost`]). Dropping a descriptor
//!   that was not unregistered abandons it, and so do [`Readers`] whose handler failed or panicked,
//!   or that were dropped and not stopped.
//! - Whoever answers faults must not touch the registered mapping: it would wait for itself.
//!
//! A descriptor has no lock of ours, so any number of threads may use it at once.
//!
//! Sources: userfaultfd(2), ioctl_userfaultfd(2), `Documentation/admin-guide/mm/userfaultfd.rst`.

#![expect(unsafe_code, reason = "system calls that the C library has no wrappers for")]

mod error;
mod readers;
mod sys;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use slat::Access;

use crate::memory::{Backing, BackingKind};

pub use error::UserfaultfdError;
pub use readers::{ReaderError, Readers};

/// Which faults of a range are reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// Of pages without contents, which [`Userfaultfd::copy`] brings.
    Missing,
    /// Of pages that are in the file and not in the mapping, which [`Userfaultfd::map_cached`]
    /// maps. Those that are not in the file either are reported too, as [`Cause::Missing`]: the
    /// kernel would else put zeros there and say nothing.
    Minor,
}

/// Who is let go once a page is there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Wake {
    /// All threads that wait for the page.
    Waiters,
    /// No thread (`DONTWAKE`): where it is known that nobody waits in the kernel, as with a vCPU
    /// that has left by an exit, it spares the kernel the look.
    Nobody,
}

/// What became of pages that were to be filled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum Filled {
    /// They are there.
    Done,
    /// The first of them was there already, and was left as it is; those behind it were not looked
    /// at. With [`Wake::Waiters`] whoever waits for the first is woken all the same.
    AlreadyThere,
    /// The kernel stopped, for a reason that may pass. To be called again for what is left: it says
    /// then if there is more to it.
    TryAgain {
        /// How much was filled from the beginning, in bytes; whole pages, and 0 if none.
        filled_bytes: u64,
    },
}

/// Why a thread waits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Cause {
    /// The page has no contents.
    Missing,
    /// The page is in the file, and not in the mapping.
    Minor,
    /// The page is there and may not be written. This module never asks for it.
    WriteProtected,
}

/// A thread waits for a page.
#[derive(Clone, Copy, Debug)]
pub struct Fault<'u> {
    /// The memory.
    pub memory: &'u Backing,
    /// Where the page starts in it, in bytes; a page of its kind ([`BackingKind::page_size`]).
    pub offset_bytes: u64,
    /// Why it waits.
    pub cause: Cause,
    /// What it wants: [`Access::Read`] also where it fetches an instruction.
    pub access: Access,
}

/// What was read from a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum Event<'u> {
    /// A thread waits for a page.
    Fault(Fault<'u>),
    /// Something else, which nobody has asked for and nobody need answer.
    Other {
        /// Its number, `UFFD_EVENT_...`.
        event: u8,
    },
}

/// A part of a memory that was registered. It keeps the memory mapped.
#[derive(Debug)]
struct Registered {
    memory: Backing,
    bytes: Range<u64>,
}

impl Registered {
    fn start(&self) -> u64 {
        address(&self.memory, self.bytes.start)
    }

    fn len_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }
}

fn address(memory: &Backing, offset_bytes: u64) -> u64 {
    memory.as_ptr().addr() as u64 + offset_bytes
}

/// A userfaultfd. See the module for how it ends.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    handles_kernel_faults: bool,
    /// What the kernel can do, `UFFD_FEATURE_...`.
    features: u64,
    registered: Vec<Registered>,
    /// Whether it was unregistered, or abandoned.
    ended: AtomicBool,
}

impl Userfaultfd {
    /// A descriptor without memory, close-on-exec. Nothing of it ever blocks but those who fault.
    ///
    /// # Errors
    /// `NotPermitted`, `NotSupported` and `System`.
    pub fn new() -> Result<Userfaultfd, UserfaultfdError> {
        let open = || {
            sys::open().map_err(|source| match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => UserfaultfdError::NotPermitted { source },
                Some(libc::ENOSYS) => UserfaultfdError::NotSupported { source },
                _ => UserfaultfdError::System { call: "userfaultfd", source },
            })
        };
        // Features that the kernel has not are refused, and a descriptor can be asked only once: so
        // one is asked for all, and another told what is wanted of these.
        let features = sys::handshake(open()?.fd.as_fd(), 0).map_err(UserfaultfdError::system("UFFDIO_API"))?;
        let wanted = sys::FEATURE_MISSING_SHMEM | sys::FEATURE_MISSING_HUGETLBFS | sys::FEATURE_MINOR_SHMEM;
        let sys::Opened { fd, handles_kernel_faults } = open()?;
        sys::handshake(fd.as_fd(), features & wanted).map_err(UserfaultfdError::system("UFFDIO_API"))?;
        Ok(Userfaultfd { fd, handles_kernel_faults, features, registered: Vec::new(), ended: AtomicBool::new(false) })
    }

    /// Whether faults are reported that the kernel has on behalf of a program, as in read(2) into
    /// the memory. Otherwise this user may have only those of user mode, and such a call fails with
    /// EFAULT where a page is not there.
    pub fn handles_kernel_faults(&self) -> bool {
        self.handles_kernel_faults
    }

    /// Has faults on the part `bytes` of `memory` reported from now on. The memory is kept mapped
    /// for as long as the descriptor lives, and gets no transparent huge pages from now on: one of
    /// these would bring 511 pages that nobody sent.
    ///
    /// Only pages that are not there fault: they never were touched, or were taken away by
    /// [`Backing::discard`], or for [`Mode::Minor`] by [`Backing::unmap_pages`].
    ///
    /// # Errors
    /// `MovablePages`, `MinorNeedsShared`, `Empty`, `Unaligned`, `OutOfRange`, `MemoryLost`,
    /// `MissingFeature`, `MissingIoctl`, `AlreadyRegistered` and `System`.
    pub fn register(&mut self, memory: &Backing, bytes: Range<u64>, mode: Mode) -> Result<(), UserfaultfdError> {
        let kind = memory.kind();
        if memory.pages().is_some() {
            return Err(UserfaultfdError::MovablePages);
        }
        if mode == Mode::Minor && kind != BackingKind::Shmem {
            return Err(UserfaultfdError::MinorNeedsShared { kind });
        }
        let (offset_bytes, len_bytes) = (bytes.start, bytes.end.saturating_sub(bytes.start));
        check(memory, offset_bytes, len_bytes)?;
        if memory.is_lost() {
            return Err(UserfaultfdError::MemoryLost);
        }
        let needed: &[(u64, &'static str)] = match (kind, mode) {
            (BackingKind::Anonymous | BackingKind::AnonymousThp, _) => &[],
            (BackingKind::AnonymousHugetlb2M | BackingKind::AnonymousHugetlb1G, _) => {
                &[(sys::FEATURE_MISSING_HUGETLBFS, "UFFD_FEATURE_MISSING_HUGETLBFS")]
            }
            (BackingKind::Shmem, Mode::Missing) => &[(sys::FEATURE_MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM")],
            (BackingKind::Shmem, Mode::Minor) => &[
                (sys::FEATURE_MINOR_SHMEM, "UFFD_FEATURE_MINOR_SHMEM"),
                (sys::FEATURE_MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM"),
            ],
        };
        if let Some(&(_, feature)) = needed.iter().find(|(bit, _)| self.features & bit == 0) {
            return Err(UserfaultfdError::MissingFeature { feature, kind });
        }
        memory.without_huge_pages();
        let (kernel_mode, ioctl) = match mode {
            Mode::Missing => (sys::MODE_MISSING, (sys::NR_COPY, "UFFDIO_COPY")),
            Mode::Minor => (sys::MODE_MISSING | sys::MODE_MINOR, (sys::NR_CONTINUE, "UFFDIO_CONTINUE")),
        };
        let start = address(memory, offset_bytes);
        // SAFETY: the range lies in a mapping of guest memory, which is accessed atomically or by
        // machine instructions, may change at any time, and is kept mapped by `registered`.
        let ioctls =
            unsafe { sys::register(self.fd.as_fd(), start, len_bytes, kernel_mode) }.map_err(|source| match source
                .raw_os_error()
            {
                Some(libc::EBUSY) => UserfaultfdError::AlreadyRegistered { offset_bytes, len_bytes },
                _ => UserfaultfdError::System { call: "UFFDIO_REGISTER", source },
            })?;
        if let Some((_, ioctl)) = [(sys::NR_WAKE, "UFFDIO_WAKE"), ioctl].iter().find(|(nr, _)| ioctls & (1 << nr) == 0)
        {
            sys::unregister(self.fd.as_fd(), start, len_bytes)
                .map_err(UserfaultfdError::system("UFFDIO_UNREGISTER"))?;
            return Err(UserfaultfdError::MissingIoctl { ioctl, kind });
        }
        if std::mem::take(self.ended.get_mut()) {
            // What it had before may be another's by now.
            self.registered.clear();
        }
        self.registered.push(Registered { memory: memory.clone(), bytes });
        Ok(())
    }

    /// The orderly end: no fault is reported any more, and all threads that wait go on. Pages that
    /// nobody has filled are zeros from now on, or what their file has. Does nothing after another
    /// end.
    ///
    /// # Errors
    /// `System`: a part may still be registered; [`abandon`](Userfaultfd::abandon) or a drop ends
    /// that.
    pub fn unregister(&self) -> Result<(), UserfaultfdError> {
        // First, so that somebody who fills pages meanwhile, and takes the end for a failure, does
        // not declare the memory lost.
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.let_all_in().map_err(|source| {
            self.ended.store(false, Ordering::Release);
            UserfaultfdError::System { call: "UFFDIO_UNREGISTER", source }
        })
    }

    /// The end when pages are missing that will not come: the memory is [lost](Backing::is_lost)
    /// from now on, all of it, and all threads that wait go on and find that out. May be called at
    /// any time by anybody, also more than once. Does nothing after another end.
    pub fn abandon(&self) {
        if self.ended.load(Ordering::Acquire) {
            return;
        }
        // Before anybody is let in, and all memories before the first range: see
        // `Mapping::is_lost`.
        for registered in &self.registered {
            registered.memory.set_lost(true);
        }
        // The kernel may lack the memory to split its own records. The next call, or the close,
        // tries again.
        if self.let_all_in().is_ok() {
            self.ended.store(true, Ordering::Release);
        }
    }

    fn let_all_in(&self) -> io::Result<()> {
        let mut result = Ok(());
        for registered in &self.registered {
            let (start, len_bytes) = (registered.start(), registered.len_bytes());
            let unregistered = sys::unregister(self.fd.as_fd(), start, len_bytes);
            // The kernel itself wakes nobody where only minor faults are registered (6.18), and
            // promises nothing for the rest.
            result = result.and(unregistered.and_then(|()| sys::wake(self.fd.as_fd(), start, len_bytes)));
        }
        result
    }

    /// Brings contents: the pages from `offset_bytes` on get `bytes`, those of them that are not
    /// there. Whole pages; guests see all of a page or nothing.
    ///
    /// # Errors
    /// `Empty`, `Unaligned`, `OutOfRange`, `NotRegistered` (also after the end of the descriptor)
    /// and `System`, as when the kernel has no memory for the page.
    pub fn copy(
        &self,
        memory: &Backing,
        offset_bytes: u64,
        bytes: &[u8],
        wake: Wake,
    ) -> Result<Filled, UserfaultfdError> {
        let len_bytes = bytes.len() as u64;
        self.check_registered(memory, offset_bytes, len_bytes)?;
        // SAFETY: a registered part of guest memory, whose pages may get any contents at any time.
        let result = unsafe { sys::copy(self.fd.as_fd(), address(memory, offset_bytes), bytes, wake) };
        self.filled("UFFDIO_COPY", result, memory, offset_bytes, len_bytes, wake)
    }

    /// Maps what the file has: the pages `bytes` of `memory`, which was registered with
    /// [`Mode::Minor`] and has them in its file.
    ///
    /// # Errors
    /// As for [`copy`](Userfaultfd::copy), and `NotCached`: the first page is not in the file.
    pub fn map_cached(&self, memory: &Backing, bytes: Range<u64>, wake: Wake) -> Result<Filled, UserfaultfdError> {
        let (offset_bytes, len_bytes) = (bytes.start, bytes.end.saturating_sub(bytes.start));
        self.check_registered(memory, offset_bytes, len_bytes)?;
        let start = address(memory, offset_bytes);
        // SAFETY: as for a copy.
        let result = unsafe { sys::map_cached(self.fd.as_fd(), start, len_bytes, wake) };
        match result {
            // No other address is handed to the kernel that could be wrong.
            Err((error, _)) if error.raw_os_error() == Some(libc::EFAULT) => {
                Err(UserfaultfdError::NotCached { offset_bytes })
            }
            result => self.filled("UFFDIO_CONTINUE", result, memory, offset_bytes, len_bytes, wake),
        }
    }

    /// Sorts what the kernel said.
    fn filled(
        &self,
        call: &'static str,
        result: Result<(), (io::Error, u64)>,
        memory: &Backing,
        offset_bytes: u64,
        len_bytes: u64,
        wake: Wake,
    ) -> Result<Filled, UserfaultfdError> {
        let Err((source, filled_bytes)) = result else { return Ok(Filled::Done) };
        match source.raw_os_error() {
            Some(libc::EAGAIN) => Ok(Filled::TryAgain { filled_bytes }),
            Some(libc::EEXIST) => {
                // The kernel has woken nobody; and who filled it may have been told to wake nobody.
                if wake == Wake::Waiters {
                    let page_bytes = memory.kind().page_size().size_bytes();
                    self.wake(memory, offset_bytes..offset_bytes + page_bytes)?;
                }
                Ok(Filled::AlreadyThere)
            }
            // It has ended since the check.
            Some(libc::ENOENT) => Err(UserfaultfdError::NotRegistered { offset_bytes, len_bytes }),
            _ => Err(UserfaultfdError::System { call, source }),
        }
    }

    /// Lets all threads go that wait for pages in `bytes` of `memory`. Those that still find
    /// nothing make new messages.
    ///
    /// # Errors
    /// `Empty`, `Unaligned`, `OutOfRange`, `NotRegistered` and `System`.
    pub fn wake(&self, memory: &Backing, bytes: Range<u64>) -> Result<(), UserfaultfdError> {
        let (offset_bytes, len_bytes) = (bytes.start, bytes.end.saturating_sub(bytes.start));
        self.check_registered(memory, offset_bytes, len_bytes)?;
        sys::wake(self.fd.as_fd(), address(memory, offset_bytes), len_bytes)
            .map_err(UserfaultfdError::system("UFFDIO_WAKE"))
    }

    /// Reads the next message, if there is one: never blocks.
    ///
    /// # Errors
    /// `System`.
    pub fn read_event(&self) -> Result<Option<Event<'_>>, UserfaultfdError> {
        let Some(message) = sys::read(self.fd.as_fd()).map_err(UserfaultfdError::system("read of a userfaultfd"))?
        else {
            return Ok(None);
        };
        let other = Event::Other { event: message.event };
        if message.event != sys::EVENT_PAGEFAULT {
            return Ok(Some(other));
        }
        let holds = |registered: &&Registered| {
            message.address.checked_sub(registered.start()).is_some_and(|offset| offset < registered.len_bytes())
        };
        // The kernel reports nothing but what was registered.
        let Some(Registered { memory, .. }) = self.registered.iter().find(holds) else { return Ok(Some(other)) };
        let page_bytes = memory.kind().page_size().size_bytes();
        let cause = match message.flags {
            flags if flags & sys::FAULT_WRITE_PROTECTED != 0 => Cause::WriteProtected,
            flags if flags & sys::FAULT_MINOR != 0 => Cause::Minor,
            _ => Cause::Missing,
        };
        let access = if message.flags & sys::FAULT_WRITE != 0 { Access::Write } else { Access::Read };
        let offset_bytes = (message.address - address(memory, 0)) & !(page_bytes - 1);
        Ok(Some(Event::Fault(Fault { memory, offset_bytes, cause, access })))
    }

    fn check_registered(&self, memory: &Backing, offset_bytes: u64, len_bytes: u64) -> Result<(), UserfaultfdError> {
        check(memory, offset_bytes, len_bytes)?;
        let holds = |registered: &Registered| {
            registered.memory.as_ptr() == memory.as_ptr()
                && registered.bytes.start <= offset_bytes
                && offset_bytes + len_bytes <= registered.bytes.end
        };
        // Also after the end: guests may have zeros there, which must not become something else.
        // The kernel says so too, but not if another descriptor has the memory by now.
        if !self.registered.iter().any(holds) || self.ended.load(Ordering::Acquire) {
            return Err(UserfaultfdError::NotRegistered { offset_bytes, len_bytes });
        }
        Ok(())
    }
}

/// Whether there are such pages in `memory`.
fn check(memory: &Backing, offset_bytes: u64, len_bytes: u64) -> Result<(), UserfaultfdError> {
    let (kind, size_bytes) = (memory.kind(), memory.size_bytes());
    if len_bytes == 0 {
        return Err(UserfaultfdError::Empty { offset_bytes });
    }
    if !(offset_bytes | len_bytes).is_multiple_of(kind.page_size().size_bytes()) {
        return Err(UserfaultfdError::Unaligned { offset_bytes, len_bytes, kind });
    }
    if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > size_bytes) {
        return Err(UserfaultfdError::OutOfRange { offset_bytes, len_bytes, size_bytes });
    }
    Ok(())
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Userfaultfd {
    fn drop(&mut self) {
        self.abandon();
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_permissions;
#[cfg(test)]
mod tests_readers;
