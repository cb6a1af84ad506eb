//! Threads that read the descriptors of a memory and answer.
//!
//! Each has an epoll instance of its own, on one descriptor (`EPOLLEXCLUSIVE`, so that one message
//! does not wake all) and on an eventfd that ends all of them. It reads one message at a time, so
//! that the others get the next ones. KVM's selftests do the same.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::panic;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::{Userfaultfd, UserfaultfdError, Userfaultfds};
use crate::linux::descriptors::EventFd;
use crate::paging::error::VcpuError;

/// epoll's data of a message, and of the end.
const MESSAGE: u64 = 0;
const STOP: u64 = 1;

/// Threads that read descriptors, and call a handler for each fault. The descriptors may have
/// several such groups.
///
/// They end in one of three ways:
/// - [`stop`](Readers::stop): waiting threads go on waiting. Unread messages are kept for the
///   next readers, and the end of the descriptor releases all threads.
/// - A handler fails or panics, or a descriptor cannot be read: all descriptors are
///   [abandoned](Userfaultfd::abandon), so that no thread waits for ever; then all readers end.
///   `stop` returns the error, or panics.
/// - They are dropped without `stop`, as when the owner panics: the same.
#[derive(Debug)]
pub(crate) struct Readers {
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    descriptors: Userfaultfds,
    /// Signalled once, and never emptied.
    stop: EventFd,
    /// The first failure.
    failure: Mutex<Option<VcpuError>>,
}

impl Readers {
    /// Starts `nr_each` threads for each descriptor. Each makes a handler of its own and calls it
    /// with the descriptor and the page. A handler must not touch the registered mapping, and every
    /// wait in it must end.
    ///
    /// # Errors
    /// `System`, if a descriptor or thread cannot be made.
    pub(crate) fn start<H>(
        descriptors: &Userfaultfds,
        nr_each: usize,
        handler: impl Fn() -> H,
    ) -> Result<Readers, UserfaultfdError>
    where
        H: FnMut(&Userfaultfd, u64) -> Result<(), VcpuError> + Send + 'static,
    {
        let stop = EventFd::new().map_err(UserfaultfdError::system("eventfd"))?;
        let indexes = (0..descriptors.all.len()).flat_map(|index| std::iter::repeat_n(index, nr_each));
        let polls: Vec<(usize, OwnedFd)> = indexes
            .map(|index| Ok((index, poll(&descriptors.all[index], &stop)?)))
            .collect::<rustix::io::Result<_>>()
            .map_err(UserfaultfdError::system("epoll_create1 or epoll_ctl"))?;
        let shared = Arc::new(Shared { descriptors: descriptors.clone(), stop, failure: Mutex::new(None) });
        let mut readers = Readers { threads: Vec::with_capacity(polls.len()), shared };
        for (index, poll) in polls {
            let (shared, mut handler) = (Arc::clone(&readers.shared), handler());
            let run = move || {
                // Dropped by a panic of the handler, too.
                let end_all = EndAll(&shared);
                match serve(&shared.descriptors.all[index], &poll, &mut handler) {
                    Ok(()) => std::mem::forget(end_all),
                    // Stored before any thread is released. Later failures are consequences: what
                    // other readers fill is not registered any more.
                    Err(error) => {
                        shared.failure.lock().get_or_insert(error);
                    }
                }
            };
            let thread = thread::Builder::new().name(format!("uffd-{index}")).spawn(run);
            readers.threads.push(thread.map_err(UserfaultfdError::system("creation of a thread"))?);
        }
        Ok(readers)
    }

    /// Ends all threads, each after the fault that it serves, and waits for them.
    ///
    /// # Errors
    /// The failure that ended them before, the first if there were several.
    ///
    /// # Panics
    /// If a handler panicked.
    pub(crate) fn stop(mut self) -> Result<(), VcpuError> {
        self.shared.stop.signal();
        let ended: Vec<_> = self.threads.drain(..).map(JoinHandle::join).collect();
        if let Some(panic) = ended.into_iter().find_map(Result::err) {
            panic::resume_unwind(panic);
        }
        self.shared.failure.lock().take().map_or(Ok(()), Err)
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        // `stop` has taken the threads.
        if !self.threads.is_empty() {
            drop(EndAll(&self.shared));
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

/// Ends all readers when it is dropped, so that no thread waits for ever.
struct EndAll<'a>(&'a Shared);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        self.0.descriptors.all.iter().for_each(Userfaultfd::abandon);
        self.0.stop.signal();
    }
}

/// Reads until the end.
fn serve(
    descriptor: &Userfaultfd,
    poll: &OwnedFd,
    handler: &mut impl FnMut(&Userfaultfd, u64) -> Result<(), VcpuError>,
) -> Result<(), VcpuError> {
    while wait(poll).map_err(UserfaultfdError::system("epoll_wait"))? == MESSAGE {
        // Another reader may have taken it.
        if let Some(page) = descriptor.read_fault()? {
            handler(descriptor, page)?;
        }
    }
    Ok(())
}

/// For messages on `descriptor`, each of which wakes only some of the readers, and for `stop`.
fn poll(descriptor: &Userfaultfd, stop: &EventFd) -> rustix::io::Result<OwnedFd> {
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&poll, descriptor, EventData::new_u64(MESSAGE), EventFlags::IN | EventFlags::EXCLUSIVE)?;
    epoll::add(&poll, stop.as_fd(), EventData::new_u64(STOP), EventFlags::IN)?;
    Ok(poll)
}

/// Waits without a limit. The end goes before a message.
fn wait(poll: &OwnedFd) -> rustix::io::Result<u64> {
    let mut events = [MaybeUninit::<Event>::uninit(); 2];
    loop {
        match epoll::wait(poll, &mut events, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
            Ok((events, _)) => {
                if let Some(event) = events.iter().map(|event| event.data.u64()).max() {
                    return Ok(event);
                }
            }
        }
    }
}
