//! userfaultfd(2) for guest memory. The kernel stops a thread that touches a missing page, and
//! sends a message to the descriptor; a reader fills the page and wakes the thread. Hypervisors do
//! demand paging so today. Demand paging by exits is compared with it, and combined with it.
//!
//! # Two kinds of faults
//! - *Missing*: the page has no contents. [`Userfaultfd::copy`] fills whole pages; of two copies to
//!   the same page, the kernel takes the first ([`Filled::AlreadyThere`]). For all memory.
//! - *Minor*: the page is in the memory's file, and not in this mapping.
//!   [`Userfaultfd::map_cached`] maps what the file has; its contents were written through another
//!   mapping ([`Alias`](crate::memory::Alias)). Only for shared memory. The kernel does not order
//!   writes to the alias: a writer claims the page first, or may overwrite what a guest has written
//!   since.
//!
//! # Protocol
//! - A range is registered before guests run. A page that was touched already does not fault.
//! - Each thread that faults makes a message, also two on the same page, and one reader reads each
//!   message. A wake-up releases all threads that wait for a page at that moment. They try again,
//!   and a thread that still finds no page makes a new message. So a wake-up that is too early does
//!   no harm. A page that was filled with [`Wake::None`] may have waiters, which need a
//!   [`wake`](Userfaultfd::wake).
//! - Every wait ends. A descriptor ends in one of two ways.
//!   [`unregister`](Userfaultfd::unregister): all pages are there that will be needed.
//!   [`abandon`](Userfaultfd::abandon): first it marks the memory as lost, and then it releases all
//!   threads. Such a thread finds zeros, or what the file had. But the machine reads the mark after
//!   each touch and treats the page as gone ([`Backing::is_lost`]).
//! - The drop of a descriptor that was not unregistered abandons it. So do [`Readers`] whose
//!   handler failed or panicked, or that were dropped and not stopped.
//! - A thread that answers faults must not touch the registered mapping: it would wait for itself.
//!
//! A descriptor has no lock of this module, so any number of threads may use it at once.
//!
//! Sources: userfaultfd(2), ioctl_userfaultfd(2), `Documentation/admin-guide/mm/userfaultfd.rst`.

#![expect(unsafe_code, reason = "calls of a userfaultfd, which rustix has no wrappers for")]

mod error;
mod readers;
mod sys;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use slat::Access;

use crate::memory::{Backing, BackingKind};

pub use error::UserfaultfdError;
pub use readers::{ReaderError, Readers};

/// Which faults of a range are reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RegisterMode {
    /// Of pages without contents, which [`Userfaultfd::copy`] fills.
    Missing,
    /// Of pages that are in the file and not in the mapping, which [`Userfaultfd::map_cached`]
    /// maps. Pages that are not in the file either are reported too, as [`Cause::Missing`]:
    /// otherwise the kernel would map zeros without a message.
    Minor,
}

/// Which threads are woken once a page is there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Wake {
    /// All threads that wait for the page.
    Waiters,
    /// No thread (`DONTWAKE`). It saves the kernel's search where no thread waits in the kernel, as
    /// for a vCPU that has left by an exit.
    None,
}

/// The result of a fill.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub enum Filled {
    /// They are there.
    Done,
    /// The first of them was there already, and was left as it is; the call did not reach those
    /// behind it. With [`Wake::Waiters`] the threads that wait for the first are woken all the
    /// same.
    AlreadyThere,
    /// The kernel stopped, for a reason that may pass. Call again for the rest; a lasting cause is
    /// an error then.
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
    /// The page is there and write-protected. This module never requests such faults.
    WriteProtected,
}

/// A thread waits for a page.
#[derive(Clone, Copy, Debug)]
pub struct ReportedFault<'u> {
    /// The memory.
    pub memory: &'u Backing,
    /// Where the page starts in it, in bytes; a page of its kind ([`BackingKind::page_size`]).
    pub offset_bytes: u64,
    /// Why it waits.
    pub cause: Cause,
    /// The access: [`Access::Read`] also for an instruction fetch.
    pub access: Access,
}

/// What was read from a descriptor.
#[derive(Clone, Copy, Debug)]
pub enum UserfaultfdEvent<'u> {
    /// A thread waits for a page.
    Fault(ReportedFault<'u>),
    /// Another event. This module requests none, and none needs an answer.
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

/// A userfaultfd. It ends by [`unregister`](Self::unregister), by [`abandon`](Self::abandon), or by
/// its drop, which abandons it.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    handles_kernel_faults: bool,
    /// The kernel's features, `UFFD_FEATURE_...`.
    features: u64,
    registered: Vec<Registered>,
    /// Whether it was unregistered, or abandoned.
    ended: AtomicBool,
}

impl Userfaultfd {
    /// Makes a descriptor without memory, close-on-exec. None of its calls blocks; only faulting
    /// threads do.
    ///
    /// # Errors
    /// `NotPermitted`, `NotSupported` and `System`.
    pub fn new() -> Result<Userfaultfd, UserfaultfdError> {
        let open = || {
            sys::open().map_err(|error| match error {
                Errno::PERM | Errno::ACCESS => UserfaultfdError::NotPermitted { source: error.into() },
                Errno::NOSYS => UserfaultfdError::NotSupported { source: error.into() },
                _ => UserfaultfdError::system("userfaultfd")(error),
            })
        };
        // The kernel refuses unknown features, and a descriptor has one handshake only. So one
        // descriptor asks for all features, and another requests some of them.
        let features = sys::handshake(open()?.fd.as_fd(), 0).map_err(UserfaultfdError::system("UFFDIO_API"))?;
        let wanted = sys::FEATURE_MISSING_SHMEM | sys::FEATURE_MISSING_HUGETLBFS | sys::FEATURE_MINOR_SHMEM;
        let sys::Opened { fd, handles_kernel_faults } = open()?;
        sys::handshake(fd.as_fd(), features & wanted).map_err(UserfaultfdError::system("UFFDIO_API"))?;
        Ok(Userfaultfd { fd, handles_kernel_faults, features, registered: Vec::new(), ended: AtomicBool::new(false) })
    }

    /// Whether faults are reported that the kernel takes for a program, as in read(2) into the
    /// memory. If not, this user may have only faults of user mode, and such a call fails with
    /// EFAULT where a page is missing.
    pub fn handles_kernel_faults(&self) -> bool {
        self.handles_kernel_faults
    }

    /// Reports faults on the part `bytes` of `memory` from now on. The memory is kept mapped for as
    /// long as the descriptor lives. It gets no transparent huge pages from now on: one of these
    /// would bring 511 pages that were not sent.
    ///
    /// Only pages that are not there fault: pages that were never touched, or discarded by
    /// [`Backing::discard`], or for [`RegisterMode::Minor`] written through an
    /// [`Alias`](crate::memory::Alias) only.
    ///
    /// # Errors
    /// `MovablePages`, `MinorNeedsShared`, `Empty`, `Unaligned`, `OutOfRange`, `MemoryLost`,
    /// `MissingFeature`, `MissingIoctl`, `AlreadyRegistered` and `System`.
    pub fn register(
        &mut self,
        memory: &Backing,
        bytes: Range<u64>,
        mode: RegisterMode,
    ) -> Result<(), UserfaultfdError> {
        let kind = memory.kind();
        if memory.pages().is_some() {
            return Err(UserfaultfdError::MovablePages);
        }
        if mode == RegisterMode::Minor && kind != BackingKind::Shmem {
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
            (BackingKind::Shmem, RegisterMode::Missing) => {
                &[(sys::FEATURE_MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM")]
            }
            (BackingKind::Shmem, RegisterMode::Minor) => &[
                (sys::FEATURE_MINOR_SHMEM, "UFFD_FEATURE_MINOR_SHMEM"),
                (sys::FEATURE_MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM"),
            ],
        };
        if let Some(&(_, feature)) = needed.iter().find(|(bit, _)| self.features & bit == 0) {
            return Err(UserfaultfdError::MissingFeature { feature, kind });
        }
        memory.frames().without_huge_pages();
        let (kernel_mode, ioctl) = match mode {
            RegisterMode::Missing => (sys::MODE_MISSING, (sys::NR_COPY, "UFFDIO_COPY")),
            RegisterMode::Minor => (sys::MODE_MISSING | sys::MODE_MINOR, (sys::NR_CONTINUE, "UFFDIO_CONTINUE")),
        };
        let start = address(memory, offset_bytes);
        // SAFETY: the range lies in a mapping of guest memory, which is accessed atomically or by
        // machine instructions, may change at any time, and is kept mapped by `registered`.
        let ioctls =
            unsafe { sys::register(self.fd.as_fd(), start, len_bytes, kernel_mode) }.map_err(|error| match error {
                Errno::BUSY => UserfaultfdError::AlreadyRegistered { offset_bytes, len_bytes },
                _ => UserfaultfdError::system("UFFDIO_REGISTER")(error),
            })?;
        if let Some((_, ioctl)) = [(sys::NR_WAKE, "UFFDIO_WAKE"), ioctl].iter().find(|(nr, _)| ioctls & (1 << nr) == 0)
        {
            sys::unregister(self.fd.as_fd(), start, len_bytes)
                .map_err(UserfaultfdError::system("UFFDIO_UNREGISTER"))?;
            return Err(UserfaultfdError::MissingIoctl { ioctl, kind });
        }
        if std::mem::take(self.ended.get_mut()) {
            // The range that it had before may be another's by now.
            self.registered.clear();
        }
        self.registered.push(Registered { memory: memory.clone(), bytes });
        Ok(())
    }

    /// The orderly end: no fault is reported any more, and all waiting threads go on. Pages that
    /// were not filled are zeros from now on, or what their file has. Does nothing after another
    /// end.
    ///
    /// # Errors
    /// `System`: a part may still be registered; [`abandon`](Userfaultfd::abandon) or a drop ends
    /// that.
    pub fn unregister(&self) -> Result<(), UserfaultfdError> {
        // First: a thread that fills pages meanwhile may take the end for a failure, and must not
        // mark the memory as lost.
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.release_all().map_err(|error| {
            self.ended.store(false, Ordering::Release);
            UserfaultfdError::system("UFFDIO_UNREGISTER")(error)
        })
    }

    /// The end when pages are missing that will not come: all of the memory is
    /// [lost](Backing::is_lost) from now on, and all waiting threads go on and find that out. Any
    /// thread may call this at any time, also more than once. Does nothing after another end.
    pub fn abandon(&self) {
        if self.ended.load(Ordering::Acquire) {
            return;
        }
        // Before any thread is released, and all memories before the first range: see
        // `Backing::is_lost`.
        for registered in &self.registered {
            registered.memory.set_lost(true);
        }
        // The kernel may lack the memory to split its own records. The next call, or the close,
        // tries again.
        if self.release_all().is_ok() {
            self.ended.store(true, Ordering::Release);
        }
    }

    fn release_all(&self) -> Result<(), Errno> {
        let mut result = Ok(());
        for registered in &self.registered {
            let (start, len_bytes) = (registered.start(), registered.len_bytes());
            let unregistered = sys::unregister(self.fd.as_fd(), start, len_bytes);
            // The kernel wakes no thread where only minor faults are registered (6.18), and
            // guarantees nothing for the rest.
            result = result.and(unregistered.and_then(|()| sys::wake(self.fd.as_fd(), start, len_bytes)));
        }
        result
    }

    /// Fills pages: those from `offset_bytes` on that are not there get `bytes`. Whole pages;
    /// guests see all of a page or nothing.
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
    /// [`RegisterMode::Minor`] and has them in its file.
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
            // Only this address can be wrong.
            Err((Errno::FAULT, _)) => Err(UserfaultfdError::NotCached { offset_bytes }),
            result => self.filled("UFFDIO_CONTINUE", result, memory, offset_bytes, len_bytes, wake),
        }
    }

    /// Translates the kernel's result.
    fn filled(
        &self,
        call: &'static str,
        result: Result<(), (Errno, u64)>,
        memory: &Backing,
        offset_bytes: u64,
        len_bytes: u64,
        wake: Wake,
    ) -> Result<Filled, UserfaultfdError> {
        let Err((error, filled_bytes)) = result else { return Ok(Filled::Done) };
        match error {
            Errno::AGAIN => Ok(Filled::TryAgain { filled_bytes }),
            Errno::EXIST => {
                // The kernel has woken no thread; and the first fill may have woken none.
                if wake == Wake::Waiters {
                    let page_bytes = memory.kind().page_size().size_bytes();
                    self.wake(memory, offset_bytes..offset_bytes + page_bytes)?;
                }
                Ok(Filled::AlreadyThere)
            }
            // The descriptor has ended since the check.
            Errno::NOENT => Err(UserfaultfdError::NotRegistered { offset_bytes, len_bytes }),
            _ => Err(UserfaultfdError::system(call)(error)),
        }
    }

    /// Wakes all threads that wait for pages in `bytes` of `memory`. Those that still find no page
    /// make new messages.
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
    pub fn read_event(&self) -> Result<Option<UserfaultfdEvent<'_>>, UserfaultfdError> {
        let Some(message) = sys::read(self.fd.as_fd()).map_err(UserfaultfdError::system("read of a userfaultfd"))?
        else {
            return Ok(None);
        };
        let other = UserfaultfdEvent::Other { event: message.event };
        if message.event != sys::EVENT_PAGEFAULT {
            return Ok(Some(other));
        }
        let holds = |registered: &&Registered| {
            message.address.checked_sub(registered.start()).is_some_and(|offset| offset < registered.len_bytes())
        };
        // The kernel reports only what was registered.
        let Some(Registered { memory, .. }) = self.registered.iter().find(holds) else { return Ok(Some(other)) };
        let page_bytes = memory.kind().page_size().size_bytes();
        let cause = match message.flags {
            flags if flags & sys::FAULT_WRITE_PROTECTED != 0 => Cause::WriteProtected,
            flags if flags & sys::FAULT_MINOR != 0 => Cause::Minor,
            _ => Cause::Missing,
        };
        let access = if message.flags & sys::FAULT_WRITE != 0 { Access::Write } else { Access::Read };
        let offset_bytes = (message.address - address(memory, 0)) & !(page_bytes - 1);
        Ok(Some(UserfaultfdEvent::Fault(ReportedFault { memory, offset_bytes, cause, access })))
    }

    fn check_registered(&self, memory: &Backing, offset_bytes: u64, len_bytes: u64) -> Result<(), UserfaultfdError> {
        check(memory, offset_bytes, len_bytes)?;
        let holds = |registered: &Registered| {
            registered.memory.as_ptr() == memory.as_ptr()
                && registered.bytes.start <= offset_bytes
                && offset_bytes + len_bytes <= registered.bytes.end
        };
        // Also after the end: guests may have zeros there, which must not change. The kernel checks
        // this too, but not if another descriptor has the memory by now.
        if !self.registered.iter().any(holds) || self.ended.load(Ordering::Acquire) {
            return Err(UserfaultfdError::NotRegistered { offset_bytes, len_bytes });
        }
        Ok(())
    }
}

/// Checks that `memory` has such pages.
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
