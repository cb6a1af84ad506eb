//! userfaultfd(2) for guest memory. The kernel stops a thread that touches a missing page, and
//! sends a message to the descriptor; a reader fills the page and wakes the thread. Hypervisors do
//! demand paging so today. Demand paging by exits is compared with it, and combined with it.
//!
//! # Two kinds of faults
//! - *Missing*: the page has no contents. [`Userfaultfd::copy`] fills it; of two copies to the same
//!   page, the kernel takes the first. For all memory.
//! - *Minor*: the page is in the memory's file, and not in this mapping.
//!   [`Userfaultfd::map_cached`] maps what the file has; its contents were written through another
//!   mapping ([`Alias`](crate::memory::Alias)). Only for shared memory. The kernel does not order
//!   writes to the alias: a writer claims the page first, or may overwrite what a guest has written
//!   since.
//!
//! # Protocol
//! - Memory is registered before guests run. A page that was touched already does not fault.
//! - Each thread that faults makes a message, also two on the same page, and one reader reads each
//!   message. A wake-up releases all threads that wait for a page at that moment. They try again,
//!   and a thread that still finds no page makes a new message. So a wake-up that is too early does
//!   no harm. A page that was filled with [`Wake::None`] may have waiters, which need a
//!   [`wake`](Userfaultfd::wake).
//! - Every wait ends. A descriptor that ends is [abandoned](Userfaultfd::abandon): first it marks
//!   the memory as lost, and then it releases all threads. Such a thread finds zeros, or what the
//!   file had. But the machine reads the mark after each touch and treats the page as gone
//!   ([`Backing::is_lost`]).
//! - The drop of a descriptor abandons it. So do [`Readers`] whose handler failed or panicked, or
//!   that were dropped and not stopped.
//! - A thread that answers faults must not touch the registered mapping: it would wait for itself.
//!
//! A descriptor has no lock of this module, so any number of threads may use it at once. It has
//! pages of 4 KiB only.
//!
//! Sources: userfaultfd(2), ioctl_userfaultfd(2), `Documentation/admin-guide/mm/userfaultfd.rst`.

#![expect(unsafe_code, reason = "guest memory is registered, whose users may wait from then on")]

mod readers;

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;

use rustix::io::Errno;
use slat::Gfn;
use slat_pager::source::PageBytes;
pub(crate) use slat_userfaultfd::Wake;
use slat_userfaultfd::{CallError, Event, MESSAGE_BYTES, OpenError, Stopped, features};
use thiserror::Error;

use crate::memory::{Backing, BackingKind};

pub(crate) use readers::Readers;

/// Why there is no userfaultfd, or one refused a call.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum UserfaultfdError {
    /// None can be made: this user may not have one, or the kernel has none, or it cannot do this
    /// with memory of this kind.
    #[error(transparent)]
    Open(OpenError),
    /// The kernel refused a call.
    #[error("{call} failed")]
    System { call: &'static str, source: io::Error },
}

impl UserfaultfdError {
    fn system<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> UserfaultfdError {
        move |error| UserfaultfdError::System { call, source: error.into() }
    }
}

impl From<OpenError> for UserfaultfdError {
    fn from(error: OpenError) -> UserfaultfdError {
        match error {
            // As of any other call: too many descriptors, no memory.
            OpenError::Call(error) => error.into(),
            error => UserfaultfdError::Open(error),
        }
    }
}

impl From<CallError> for UserfaultfdError {
    fn from(CallError { call, error }: CallError) -> UserfaultfdError {
        UserfaultfdError::system(call)(error)
    }
}

/// Which faults are reported.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum RegisterMode {
    /// Of pages without contents, which [`Userfaultfd::copy`] fills.
    Missing,
    /// Of pages that are in the file and not in the mapping, which [`Userfaultfd::map_cached`]
    /// maps. Pages that are not in the file either are reported, too: otherwise the kernel would
    /// map zeros without a message.
    Minor,
}

/// A userfaultfd with a part of a memory, which it keeps mapped. Its drop abandons it.
#[derive(Debug)]
pub(crate) struct Userfaultfd {
    inner: slat_userfaultfd::Userfaultfd,
    memory: Backing,
    pages: Range<u64>,
}

fn addresses(memory: &Backing, pages: &Range<u64>) -> Range<u64> {
    let start = memory.frames().start().addr() as u64;
    start + (pages.start << Gfn::SHIFT)..start + (pages.end << Gfn::SHIFT)
}

impl Userfaultfd {
    /// Reports faults on `pages` of `memory` from now on. The memory gets no transparent huge pages
    /// from now on: one of these would bring 511 pages that were not sent.
    ///
    /// Only pages that are not there fault: pages that were never touched, or for
    /// [`RegisterMode::Minor`] written through an [`Alias`](crate::memory::Alias) only.
    fn register(memory: &Backing, pages: Range<u64>, mode: RegisterMode) -> Result<Userfaultfd, UserfaultfdError> {
        use slat_userfaultfd::RegisterMode as Kernel;
        let (features, kernel_mode) = match (mode, memory.kind()) {
            (RegisterMode::Minor, _) => {
                (features::MINOR_SHMEM | features::MISSING_SHMEM, Kernel::MISSING.and(Kernel::MINOR))
            }
            (RegisterMode::Missing, BackingKind::Shmem) => (features::MISSING_SHMEM, Kernel::MISSING),
            (RegisterMode::Missing, _) => (0, Kernel::MISSING),
        };
        debug_assert!(memory.pages().is_none(), "movable pages have no addresses of their own");
        assert!(pages.end <= memory.size_bytes() >> Gfn::SHIFT, "pages {pages:?} are not in the memory");
        let inner = slat_userfaultfd::Userfaultfd::open(features)?;
        memory.frames().without_huge_pages();
        // SAFETY: the range lies in the mapping of guest memory, as was just checked, which is
        // accessed atomically or by machine instructions, may change at any time, and is kept
        // mapped by `memory`.
        unsafe { inner.register(addresses(memory, &pages), kernel_mode) }?;
        Ok(Userfaultfd { inner, memory: memory.clone(), pages })
    }

    /// The end when pages are missing that will not come: all of the memory is
    /// [lost](Backing::is_lost) from now on, and all waiting threads go on and find that out. Any
    /// thread may call this at any time, also more than once.
    pub(crate) fn abandon(&self) {
        // Before any thread is released: see `Backing::is_lost`.
        self.memory.mark_lost();
        let range = addresses(&self.memory, &self.pages);
        // The kernel wakes no thread where only minor faults are registered (6.18), and guarantees
        // nothing for the rest. It may lack the memory to split its own records: the next call, or
        // the close, tries again.
        let _ = self.inner.unregister(range.clone()).and_then(|()| self.inner.wake(range));
    }

    /// Fills a page that is not there. Guests see all of it or nothing. `wake` is for this fill: if
    /// another was first, all waiting threads are woken.
    ///
    /// # Errors
    /// `System`, as when the kernel has no memory for the page, or after the end.
    pub(crate) fn copy(&self, page: u64, bytes: &PageBytes, wake: Wake) -> Result<(), UserfaultfdError> {
        let address = addresses(&self.memory, &(page..page)).start;
        self.fill(page, || self.inner.copy(address, bytes, wake))
    }

    /// Maps a page that the file has, of memory that was registered with [`RegisterMode::Minor`].
    /// `wake` as for [`copy`](Userfaultfd::copy).
    ///
    /// # Errors
    /// `System`: as for [`copy`](Userfaultfd::copy), or the page is not in the file.
    pub(crate) fn map_cached(&self, page: u64, wake: Wake) -> Result<(), UserfaultfdError> {
        let range = addresses(&self.memory, &(page..page + 1));
        self.fill(page, || self.inner.map_cached(range.clone(), wake))
    }

    /// Repeats `call` until the page is there.
    fn fill(&self, page: u64, call: impl Fn() -> Result<(), Stopped>) -> Result<(), UserfaultfdError> {
        loop {
            match call() {
                Ok(()) => return Ok(()),
                // The process's memory map is being changed, for a short time.
                Err(Stopped { error: Errno::AGAIN, .. }) => thread::yield_now(),
                // The kernel has woken no thread; and the first fill may have woken none.
                Err(Stopped { error: Errno::EXIST, .. }) => return self.wake(page..page + 1),
                Err(Stopped { call, error, .. }) => return Err(UserfaultfdError::system(call)(error)),
            }
        }
    }

    /// Wakes all threads that wait for `pages`. Those that still find no page make new messages.
    ///
    /// # Errors
    /// `System`.
    pub(crate) fn wake(&self, pages: Range<u64>) -> Result<(), UserfaultfdError> {
        Ok(self.inner.wake(addresses(&self.memory, &pages))?)
    }

    /// Reads the next message, if there is one: a thread waits for this page. Never blocks.
    fn read_fault(&self) -> Result<Option<u64>, UserfaultfdError> {
        // One at a time, so that other readers get the next ones.
        let mut message = [[0; MESSAGE_BYTES]];
        let start = addresses(&self.memory, &(0..0)).start;
        Ok(match self.inner.read(&mut message)?.next() {
            Some(Event::Fault(fault)) => Some((fault.address - start) >> Gfn::SHIFT),
            // No other event was asked for, and none needs an answer.
            Some(_) | None => None,
        })
    }
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

/// The userfaultfds of a memory. Each has an equal part of it.
#[derive(Clone, Debug)]
pub(crate) struct Userfaultfds {
    all: Arc<[Userfaultfd]>,
    pages_each: u64,
}

impl Userfaultfds {
    /// Registers `memory`, of which no page was touched by this mapping, with `nr_descriptors`, not
    /// 0, which must divide its pages.
    ///
    /// # Errors
    /// [`UserfaultfdError`].
    pub(crate) fn register(
        memory: &Backing,
        mode: RegisterMode,
        nr_descriptors: usize,
    ) -> Result<Userfaultfds, UserfaultfdError> {
        let pages_each = (memory.size_bytes() >> Gfn::SHIFT) / nr_descriptors as u64;
        let one = |number| Userfaultfd::register(memory, number * pages_each..(number + 1) * pages_each, mode);
        let all = (0..nr_descriptors as u64).map(one).collect::<Result<_, _>>()?;
        Ok(Userfaultfds { all, pages_each })
    }

    /// Wakes all threads that wait in the kernel. A page that was put in place without a wake-up
    /// may have a waiter whose message no reader has read. For abandoned memory, all waiters were
    /// woken before.
    pub(crate) fn wake_all(&self) {
        for descriptor in self.all.iter() {
            let _ = descriptor.wake(descriptor.pages.clone());
        }
    }

    /// The one that has `page`.
    pub(crate) fn of(&self, page: u64) -> &Userfaultfd {
        &self.all[((page / self.pages_each) as usize).min(self.all.len() - 1)]
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_permissions;
#[cfg(test)]
mod tests_readers;
