//! Requests of one thread for pages of a source, many at once: for a thread that runs virtual CPUs,
//! or answers their requests, and must not stand still while a page is on its way.
//!
//! # Guarantees
//! - [`PageRequests::request`] asks and does not wait. Up to [`MAX_IN_FLIGHT`] pages are in flight,
//!   each once.
//! - [`PageRequests::arrived`] returns a page that is here; in any order, and the same one until it
//!   is taken. It waits only as long as its [`Wait`] allows. Even [`Wait::ForEver`] ends: sources
//!   give up by themselves.
//! - No page is here earlier than the delay after its request, and delays of pages that are in
//!   flight overlap.
//! - An error is that of one page, which counts as taken. Others still arrive.
//!
//! # Use
//! Each thread has its own, of one [`OpenSource`] that all share. [`PageRequests::take_into`] puts a
//! page where the caller wants it; [`PageRequests::take`] shows it in place, for a caller that
//! passes it to a system call. A loop that also waits for other things calls
//! [`PageRequests::next_arrival`], and waits by [`wait_until`]. No thread of a runtime may use one:
//! it waits.
//!
//! # Implementation
//! A page that the source has ready ([`Source::is_ready`]) is read when it is taken, by this
//! thread, to its destination: without a buffer between. Others are read by tasks of the runtime,
//! which put them into a list and signal an eventfd.

mod wait;

use std::collections::VecDeque;
use std::fmt::{self, Debug, Formatter};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::event::{EventfdFlags, eventfd};
use thiserror::Error;
use tokio::runtime::{Handle, Runtime};

use super::{PAGE_BYTES, PageBytes, Source, SourceError, check_range};

pub use wait::wait_until;

/// Pages that may be in flight for one thread: enough for one that runs hundreds of virtual CPUs,
/// and few enough to be searched.
pub const MAX_IN_FLIGHT: usize = 1024;

/// How long [`PageRequests::arrived`] waits for a page if none is here. It never waits if none is
/// in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until a moment.
    Until(Instant),
    /// Until a page is here.
    ForEver,
}

/// When to call [`PageRequests::arrived`] again.
#[derive(Clone, Copy, Debug)]
pub enum NextArrival<'a> {
    /// Nothing is in flight.
    Nothing,
    /// A page is here.
    Now,
    /// At this moment.
    At(Instant),
    /// When the descriptor is readable; and at this moment at the latest, if there is one.
    Readable {
        /// An eventfd.
        descriptor: BorrowedFd<'a>,
        /// When a page that is held back is due.
        until: Option<Instant>,
    },
}

/// Why a request gives no page.
#[derive(Debug, Error)]
pub enum RequestError {
    /// It is in flight already.
    #[error("page {page:#x} is requested while it is in flight")]
    AlreadyRequested {
        /// Its number.
        page: u64,
    },
    /// No more pages may be in flight.
    #[error("page {page:#x} is requested while {MAX_IN_FLIGHT} others are in flight")]
    TooManyInFlight {
        /// Its number.
        page: u64,
    },
    /// It was to be fetched alone.
    #[error("page {page:#x} is to be fetched alone while {nr_pages} others are in flight")]
    OthersInFlight {
        /// Its number.
        page: u64,
        /// How many others there are.
        nr_pages: usize,
    },
    /// There is no page to take.
    #[error("no page has arrived that could be taken")]
    NothingArrived,
    /// The source does not give it.
    #[error("page {page:#x}: {error}")]
    Source {
        /// Its number.
        page: u64,
        /// The source's reason.
        #[source]
        error: SourceError,
    },
    /// The system refused a descriptor, or to wait.
    #[error("cannot wait for pages: {0}")]
    Wait(#[source] io::Error),
}

/// What tasks have read.
#[derive(Debug)]
struct Arrivals {
    pages: Mutex<Vec<(u64, Result<Bytes, SourceError>)>>,
    event: OwnedFd,
}

/// A page in flight.
#[derive(Debug)]
struct InFlight {
    page: u64,
    /// `None`: not held back.
    due: Option<Instant>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// A task reads it.
    IsRead,
    /// The source has it.
    Ready,
    Read(Result<Bytes, SourceError>),
}

/// A source of which threads request pages, each by its own [`PageRequests`].
#[derive(Clone, Debug)]
pub struct OpenSource {
    source: Arc<dyn Source>,
    /// Of its tasks, which end with it.
    runtime: Arc<Runtime>,
    delay: Duration,
}

impl OpenSource {
    /// Of `source`, by tasks of `runtime`.
    pub fn new(source: Arc<dyn Source>, runtime: Arc<Runtime>) -> OpenSource {
        OpenSource { source, runtime, delay: Duration::ZERO }
    }

    /// The same, with a latency: no page is here earlier than so long after its request.
    #[must_use]
    pub fn delayed_by(self, delay: Duration) -> OpenSource {
        OpenSource { delay, ..self }
    }

    /// The latency of each page.
    pub fn delay(&self) -> Duration {
        self.delay
    }

    /// Whether pages may come late: they are delayed, or come from a server.
    pub fn has_latency(&self) -> bool {
        !self.delay.is_zero() || !(self.source.is_mapped() || self.source.is_ready(0..PAGE_BYTES))
    }

    /// The source itself.
    pub fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// The requests of one thread.
    ///
    /// # Errors
    /// [`RequestError::Wait`]: there is no descriptor left.
    pub fn requests(&self) -> Result<PageRequests, RequestError> {
        PageRequests::new(Arc::clone(&self.source), self.runtime.handle().clone(), self.delay)
    }
}

/// The requests of one thread.
pub struct PageRequests {
    source: Arc<dyn Source>,
    runtime: Handle,
    delay: Duration,
    /// In the order of the requests, so the first is due first.
    in_flight: VecDeque<InFlight>,
    /// How many of them tasks read.
    nr_read: usize,
    /// The place of the page that was returned as arrived and is not taken yet.
    here: Option<usize>,
    arrivals: Arc<Arrivals>,
    /// The page that was taken last.
    taken: Box<PageBytes>,
}

impl Debug for PageRequests {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let PageRequests { source, delay, in_flight, here, .. } = self;
        f.debug_struct("PageRequests")
            .field("source", source)
            .field("delay", delay)
            .field("in_flight", &in_flight.len())
            .field("here", here)
            .finish_non_exhaustive()
    }
}

impl PageRequests {
    /// Of `source`, by tasks of `runtime`. No page is here earlier than `delay` after its request.
    fn new(source: Arc<dyn Source>, runtime: Handle, delay: Duration) -> Result<PageRequests, RequestError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(|error| RequestError::Wait(error.into()))?;
        Ok(PageRequests {
            source,
            runtime,
            delay,
            in_flight: VecDeque::new(),
            nr_read: 0,
            here: None,
            arrivals: Arc::new(Arrivals { pages: Mutex::default(), event }),
            taken: Box::new([0; PAGE_BYTES as usize]),
        })
    }

    /// Requests a page, by its number from the start of the source. Does not wait.
    ///
    /// # Errors
    /// [`RequestError::AlreadyRequested`], [`RequestError::TooManyInFlight`]; they change nothing.
    /// A page behind the end is an error when it is taken.
    pub fn request(&mut self, page: u64) -> Result<(), RequestError> {
        if self.in_flight.iter().any(|in_flight| in_flight.page == page) {
            return Err(RequestError::AlreadyRequested { page });
        }
        if self.in_flight.len() >= MAX_IN_FLIGHT {
            return Err(RequestError::TooManyInFlight { page });
        }
        let start = page.saturating_mul(PAGE_BYTES);
        let range = start..start.saturating_add(PAGE_BYTES);
        let due = (!self.delay.is_zero()).then(|| Instant::now() + self.delay);
        let state = if let Err(error) = check_range(start, PAGE_BYTES as usize, self.source.size_bytes()) {
            State::Read(Err(error))
        } else if self.source.is_ready(range.clone()) {
            State::Ready
        } else {
            let (source, arrivals) = (Arc::clone(&self.source), Arc::clone(&self.arrivals));
            self.runtime.spawn(async move {
                let read = source.read_shared(range).await;
                arrivals.pages.lock().unwrap_or_else(PoisonError::into_inner).push((page, read));
                // A full counter is refused, and wakes all the same.
                let _ = rustix::io::write(&arrivals.event, &1_u64.to_ne_bytes());
            });
            self.nr_read += 1;
            State::IsRead
        };
        self.in_flight.push_back(InFlight { page, due, state });
        Ok(())
    }

    /// Returns a page that is here: the same one until it is taken. `None` if none is, when the
    /// wait is over or nothing is in flight.
    ///
    /// # Errors
    /// [`RequestError::Wait`].
    pub fn arrived(&mut self, how_long: Wait) -> Result<Option<u64>, RequestError> {
        loop {
            if let Some(here) = self.here {
                return Ok(Some(self.in_flight[here].page));
            }
            if self.in_flight.is_empty() {
                return Ok(None);
            }
            self.collect();
            // Of those in flight the first ones are due first.
            let first_here = self.in_flight.iter().position(|in_flight| !matches!(in_flight.state, State::IsRead));
            let due = first_here.and_then(|place| self.in_flight[place].due);
            let now = match (due, how_long) {
                (None, Wait::No) => None,
                _ => Some(Instant::now()),
            };
            if first_here.is_some() && due <= now {
                self.here = first_here;
                continue;
            }
            let until = match how_long {
                Wait::No => return Ok(None),
                Wait::Until(until) if now >= Some(until) => return Ok(None),
                Wait::Until(until) => Some(due.map_or(until, |due| due.min(until))),
                Wait::ForEver => due,
            };
            let event = [self.arrivals.event.as_fd()];
            let descriptors = if self.nr_read > 0 { &event[..] } else { &[] };
            wait_until(descriptors, until).map_err(RequestError::Wait)?;
        }
    }

    /// Takes over what the tasks have read.
    fn collect(&mut self) {
        if self.nr_read == 0 {
            return;
        }
        // First the signals, then the list: what is added after that signals again.
        let _ = rustix::io::read(&self.arrivals.event, &mut [0; 8]);
        let read = std::mem::take(&mut *self.arrivals.pages.lock().unwrap_or_else(PoisonError::into_inner));
        self.nr_read -= read.len();
        for (page, result) in read {
            let is_it = |in_flight: &&mut InFlight| in_flight.page == page;
            if let Some(in_flight) = self.in_flight.iter_mut().find(is_it) {
                in_flight.state = State::Read(result);
            }
        }
    }

    /// Takes the page that [`arrived`](PageRequests::arrived) returned, and shows it in place.
    ///
    /// # Errors
    /// [`RequestError::NothingArrived`], [`RequestError::Source`].
    pub fn take(&mut self) -> Result<&PageBytes, RequestError> {
        let taken = self.remove_here()?;
        put(&*self.source, &self.runtime, taken, &mut self.taken)?;
        Ok(&self.taken)
    }

    /// Takes the page that [`arrived`](PageRequests::arrived) returned, and copies it to `into`.
    ///
    /// # Errors
    /// As [`take`](PageRequests::take). The contents of `into` are undefined then.
    pub fn take_into(&mut self, into: &mut PageBytes) -> Result<(), RequestError> {
        let taken = self.remove_here()?;
        put(&*self.source, &self.runtime, taken, into)
    }

    fn remove_here(&mut self) -> Result<InFlight, RequestError> {
        self.here.take().and_then(|place| self.in_flight.remove(place)).ok_or(RequestError::NothingArrived)
    }

    /// Pages that were requested and not taken.
    pub fn nr_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// When to call [`arrived`](PageRequests::arrived) again.
    pub fn next_arrival(&self) -> NextArrival<'_> {
        if self.in_flight.is_empty() {
            return NextArrival::Nothing;
        }
        let first_here = self.in_flight.iter().find(|in_flight| !matches!(in_flight.state, State::IsRead));
        match first_here.map(|in_flight| in_flight.due) {
            Some(None) => NextArrival::Now,
            _ if self.here.is_some() => NextArrival::Now,
            Some(Some(due)) if self.nr_read == 0 => NextArrival::At(due),
            due => NextArrival::Readable { descriptor: self.arrivals.event.as_fd(), until: due.flatten() },
        }
    }

    /// Fetches one page and waits for it: for a thread that has nothing else to do.
    ///
    /// # Errors
    /// [`RequestError::OthersInFlight`] if there are, and all of the above.
    pub fn fetch_into(&mut self, page: u64, into: &mut PageBytes) -> Result<(), RequestError> {
        let nr_pages = self.nr_in_flight();
        if nr_pages > 0 {
            return Err(RequestError::OthersInFlight { page, nr_pages });
        }
        self.request(page)?;
        while self.arrived(Wait::ForEver)?.is_none() {}
        self.take_into(into)
    }
}

/// Puts the page that is here into `into`.
fn put(source: &dyn Source, runtime: &Handle, taken: InFlight, into: &mut PageBytes) -> Result<(), RequestError> {
    let InFlight { page, state, .. } = taken;
    let read = match state {
        State::Read(bytes) => bytes.map(|bytes| into.copy_from_slice(&bytes)),
        State::Ready | State::IsRead => match source.read_ready(page * PAGE_BYTES, into) {
            Some(read) => read,
            // It was ready, and is not any more.
            None => runtime.block_on(source.read(page * PAGE_BYTES, into)),
        },
    };
    read.map_err(|error| RequestError::Source { page, error })
}

#[cfg(test)]
mod tests;
