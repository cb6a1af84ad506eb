//! Threads that read a descriptor and answer.
//!
//! Each has an epoll instance of its own, on the descriptor (`EPOLLEXCLUSIVE`, so that one message
//! does not wake all) and on an eventfd that ends all of them. It reads one message at a time, so
//! that the others get the next ones. KVM's selftests do the same.

use std::any::Any;
use std::num::NonZeroUsize;
use std::panic;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use std::os::fd::AsFd;

use parking_lot::Mutex;
use thiserror::Error;

use super::poll::{Poll, Woken};
use super::{ReportedFault, Userfaultfd, UserfaultfdError, UserfaultfdEvent};
use crate::linux::descriptors::EventFd;

/// Why readers ended before `stop`.
#[derive(Debug, Error)]
pub enum ReaderError<E> {
    /// The handler failed.
    #[error("a page fault could not be served")]
    Handler(#[source] E),
    /// The descriptor failed.
    #[error("the page faults could not be read")]
    Userfaultfd(#[source] UserfaultfdError),
}

/// Threads that read one descriptor, and call a handler for each fault. A descriptor may have
/// several such groups.
///
/// They end in one of three ways:
/// - [`stop`](Readers::stop): waiting threads go on waiting. Unread messages are kept for the
///   descriptor's next readers, and its end releases all threads.
/// - The handler fails or panics, or the descriptor cannot be read: the descriptor is
///   [abandoned](Userfaultfd::abandon), so that no thread waits for ever; then all readers of the
///   group end. `stop` returns the error.
/// - They are dropped without `stop`, as when the owner panics: the same.
#[derive(Debug)]
pub struct Readers<E> {
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared<E>>,
}

#[derive(Debug)]
struct Shared<E> {
    userfaultfd: Arc<Userfaultfd>,
    /// Signalled once, and never emptied.
    stop: EventFd,
    /// The first failure.
    failure: Mutex<Option<Failure<E>>>,
}

#[derive(Debug)]
enum Failure<E> {
    Error(ReaderError<E>),
    Panic(Box<dyn Any + Send>),
}

impl<E: Send + 'static> Readers<E> {
    /// Starts `nr_readers` threads that read `userfaultfd`. All of them call `handler`
    /// concurrently. It must not touch the registered mapping, and every wait in it must end.
    ///
    /// # Errors
    /// `System`, if a descriptor or thread cannot be made: then no thread reads any more. Threads
    /// that had begun may have served faults by then.
    pub fn start<H>(
        userfaultfd: Arc<Userfaultfd>,
        nr_readers: NonZeroUsize,
        handler: H,
    ) -> Result<Readers<E>, UserfaultfdError>
    where
        H: Fn(&ReportedFault<'_>) -> Result<(), E> + Send + Sync + 'static,
    {
        let stop = EventFd::new().map_err(UserfaultfdError::system("eventfd"))?;
        let polls: Vec<Poll> = (0..nr_readers.get())
            .map(|_| Poll::new(userfaultfd.as_fd(), &stop))
            .collect::<Result<_, _>>()
            .map_err(UserfaultfdError::system("epoll_create1 or epoll_ctl"))?;
        let shared = Arc::new(Shared { userfaultfd, stop, failure: Mutex::new(None) });
        let handler = Arc::new(handler);
        let mut threads = Vec::with_capacity(polls.len());
        for (nr, poll) in polls.into_iter().enumerate() {
            let (shared_with, handler) = (Arc::clone(&shared), Arc::clone(&handler));
            let read = move || shared_with.run(&poll, &*handler);
            match thread::Builder::new().name(format!("uffd-{nr}")).spawn(read) {
                Ok(thread) => threads.push(thread),
                Err(source) => {
                    shared.stop.signal();
                    join(&mut threads);
                    return Err(UserfaultfdError::System { call: "creation of a thread", source });
                }
            }
        }
        Ok(Readers { threads, shared })
    }

    /// Whether a failure has ended them, or ends them now.
    pub fn has_failed(&self) -> bool {
        self.shared.failure.lock().is_some()
    }

    /// Ends all threads, each after the fault that it serves, and waits for them.
    ///
    /// # Errors
    /// The failure that ended them before, the first if there were several.
    ///
    /// # Panics
    /// If the handler panicked.
    pub fn stop(mut self) -> Result<(), ReaderError<E>> {
        self.shared.stop.signal();
        join(&mut self.threads);
        match self.shared.failure.lock().take() {
            None => Ok(()),
            Some(Failure::Error(error)) => Err(error),
            Some(Failure::Panic(payload)) => panic::resume_unwind(payload),
        }
    }
}

fn join(threads: &mut Vec<JoinHandle<()>>) {
    for thread in threads.drain(..) {
        // A panic of the handler was caught; there is no other.
        let _ = thread.join();
    }
}

impl<E> Drop for Readers<E> {
    fn drop(&mut self) {
        // `stop` has taken the threads.
        if !self.threads.is_empty() {
            self.shared.userfaultfd.abandon();
            self.shared.stop.signal();
            join(&mut self.threads);
        }
    }
}

impl<E> Shared<E> {
    /// Reads until the end. After a failure no thread waits for ever.
    fn run(&self, poll: &Poll, handler: &(impl Fn(&ReportedFault<'_>) -> Result<(), E> + Sync)) {
        // Unwind-safe: nothing here reads what the handler has left half done; its panic ends all.
        let served = panic::catch_unwind(panic::AssertUnwindSafe(|| self.serve(poll, handler)));
        let failure = match served {
            Ok(Ok(())) => return,
            Ok(Err(error)) => Failure::Error(error),
            Err(payload) => Failure::Panic(payload),
        };
        // Stored before any thread is released. Later failures are consequences: what other readers
        // fill is not registered any more.
        self.failure.lock().get_or_insert(failure);
        self.userfaultfd.abandon();
        self.stop.signal();
    }

    fn serve(&self, poll: &Poll, handler: &impl Fn(&ReportedFault<'_>) -> Result<(), E>) -> Result<(), ReaderError<E>> {
        let system = |error| ReaderError::Userfaultfd(UserfaultfdError::system("epoll_wait")(error));
        while poll.wait().map_err(system)? == Woken::Message {
            // Another reader may have taken it.
            match self.userfaultfd.read_event().map_err(ReaderError::Userfaultfd)? {
                Some(UserfaultfdEvent::Fault(fault)) => handler(&fault).map_err(ReaderError::Handler)?,
                Some(UserfaultfdEvent::Other) | None => {}
            }
        }
        Ok(())
    }
}
