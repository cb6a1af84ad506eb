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

#![expect(unsafe_code, reason = "guest memory is registered, whose users may wait from then on")]

mod error;
mod poll;
mod readers;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use slat::Access;
use slat_userfaultfd::{Available, CallError, Calls, Event, MESSAGE_BYTES, Stopped, features};
pub use slat_userfaultfd::{Cause, OpenError, Wake};

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
    Other,
}

/// A part of a memory that was registered. It keeps the memory mapped.
#[derive(Debug)]
struct Registered {
    memory: Backing,
    bytes: Range<u64>,
}

impl Registered {
    fn addresses(&self) -> Range<u64> {
        addresses(&self.memory, &self.bytes)
    }
}

fn address(memory: &Backing, offset_bytes: u64) -> u64 {
    memory.as_ptr().addr() as u64 + offset_bytes
}

fn addresses(memory: &Backing, bytes: &Range<u64>) -> Range<u64> {
    address(memory, bytes.start)..address(memory, bytes.end)
}

/// A userfaultfd. It ends by [`unregister`](Self::unregister), by [`abandon`](Self::abandon), or by
/// its drop, which abandons it.
#[derive(Debug)]
pub struct Userfaultfd {
    inner: slat_userfaultfd::Userfaultfd,
    available: Available,
    registered: Vec<Registered>,
    /// Whether it was unregistered, or abandoned.
    ended: AtomicBool,
}

impl Userfaultfd {
    /// Makes a descriptor without memory, close-on-exec. None of its calls blocks; only faulting
    /// threads do.
    ///
    /// # Errors
    /// `Open`.
    pub fn new() -> Result<Userfaultfd, UserfaultfdError> {
        let available = slat_userfaultfd::Userfaultfd::available()?;
        let wanted = features::MISSING_SHMEM | features::MISSING_HUGETLB | features::MINOR_SHMEM;
        let inner = slat_userfaultfd::Userfaultfd::open(available.features & wanted)?;
        Ok(Userfaultfd { inner, available, registered: Vec::new(), ended: AtomicBool::new(false) })
    }

    /// Whether faults are reported that the kernel takes for a program, as in read(2) into the
    /// memory. If not, this user may have only faults of user mode, and such a call fails with
    /// EFAULT where a page is missing.
    pub fn handles_kernel_faults(&self) -> bool {
        self.available.kernel_faults
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
                &[(features::MISSING_HUGETLB, "UFFD_FEATURE_MISSING_HUGETLBFS")]
            }
            (BackingKind::Shmem, RegisterMode::Missing) => &[(features::MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM")],
            (BackingKind::Shmem, RegisterMode::Minor) => &[
                (features::MINOR_SHMEM, "UFFD_FEATURE_MINOR_SHMEM"),
                (features::MISSING_SHMEM, "UFFD_FEATURE_MISSING_SHMEM"),
            ],
        };
        if let Some(&(_, feature)) = needed.iter().find(|(bit, _)| self.available.features & bit == 0) {
            return Err(UserfaultfdError::MissingFeature { feature, kind });
        }
        memory.frames().without_huge_pages();
        use slat_userfaultfd::RegisterMode as Kernel;
        let (kernel_mode, fill) = match mode {
            RegisterMode::Missing => (Kernel::MISSING, (Calls::COPY, "UFFDIO_COPY")),
            RegisterMode::Minor => (Kernel::MISSING.and(Kernel::MINOR), (Calls::CONTINUE, "UFFDIO_CONTINUE")),
        };
        let range = addresses(memory, &bytes);
        // SAFETY: the range lies in a mapping of guest memory, which is accessed atomically or by
        // machine instructions, may change at any time, and is kept mapped by `registered`.
        let allowed = unsafe { self.inner.register(range.clone(), kernel_mode) }.map_err(|error| match error {
            CallError { error: Errno::BUSY, .. } => UserfaultfdError::AlreadyRegistered { offset_bytes, len_bytes },
            error => error.into(),
        })?;
        let missing = [(Calls::WAKE, "UFFDIO_WAKE"), fill].into_iter().find(|&(call, _)| !allowed.allow(call));
        if let Some((_, ioctl)) = missing {
            self.inner.unregister(range)?;
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
            error.into()
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

    fn release_all(&self) -> Result<(), CallError> {
        let mut result = Ok(());
        for registered in &self.registered {
            let unregistered = self.inner.unregister(registered.addresses());
            // The kernel wakes no thread where only minor faults are registered (6.18), and
            // guarantees nothing for the rest.
            result = result.and(unregistered.and_then(|()| self.inner.wake(registered.addresses())));
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
        let result = self.inner.copy(address(memory, offset_bytes), bytes, wake);
        self.filled(result, memory, offset_bytes, len_bytes, wake)
    }

    /// Maps what the file has: the pages `bytes` of `memory`, which was registered with
    /// [`RegisterMode::Minor`] and has them in its file.
    ///
    /// # Errors
    /// As for [`copy`](Userfaultfd::copy), and `NotCached`: the first page is not in the file.
    pub fn map_cached(&self, memory: &Backing, bytes: Range<u64>, wake: Wake) -> Result<Filled, UserfaultfdError> {
        let (offset_bytes, len_bytes) = (bytes.start, bytes.end.saturating_sub(bytes.start));
        self.check_registered(memory, offset_bytes, len_bytes)?;
        match self.inner.map_cached(addresses(memory, &bytes), wake) {
            // Only this address can be wrong.
            Err(Stopped { error: Errno::FAULT, .. }) => Err(UserfaultfdError::NotCached { offset_bytes }),
            result => self.filled(result, memory, offset_bytes, len_bytes, wake),
        }
    }

    /// Translates the kernel's result.
    fn filled(
        &self,
        result: Result<(), Stopped>,
        memory: &Backing,
        offset_bytes: u64,
        len_bytes: u64,
        wake: Wake,
    ) -> Result<Filled, UserfaultfdError> {
        let Err(Stopped { call, filled_bytes, error }) = result else { return Ok(Filled::Done) };
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
        Ok(self.inner.wake(addresses(memory, &bytes))?)
    }

    /// Reads the next message, if there is one: never blocks.
    ///
    /// # Errors
    /// `System`.
    pub fn read_event(&self) -> Result<Option<UserfaultfdEvent<'_>>, UserfaultfdError> {
        // One at a time, so that other readers get the next ones.
        let mut message = [[0; MESSAGE_BYTES]];
        let fault = match self.inner.read(&mut message)?.next() {
            None => return Ok(None),
            Some(Event::Fault(fault)) => fault,
            Some(_) => return Ok(Some(UserfaultfdEvent::Other)),
        };
        // The kernel reports only what was registered.
        let holds = |registered: &&Registered| registered.addresses().contains(&fault.address);
        let Some(Registered { memory, .. }) = self.registered.iter().find(holds) else {
            return Ok(Some(UserfaultfdEvent::Other));
        };
        let page_bytes = memory.kind().page_size().size_bytes();
        let access = if fault.is_write { Access::Write } else { Access::Read };
        let offset_bytes = (fault.address - address(memory, 0)) & !(page_bytes - 1);
        Ok(Some(UserfaultfdEvent::Fault(ReportedFault { memory, offset_bytes, cause: fault.cause, access })))
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
        self.inner.as_fd()
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
