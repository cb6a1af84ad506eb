//! Sources of the pages that the guest does not have yet: made from their numbers, read from a
//! file, or fetched from another process; each at once or after a latency.
//!
//! Demand paging is measured by what waits for pages, and how. So every way to deliver a page uses
//! the same sources through one trait: a vCPU that resolves its own faults, a loop that runs many
//! vCPUs on few threads, readers of a userfaultfd, a resolver in another process, a copier in the
//! background.
//!
//! # Protocol
//! - A source belongs to one thread. A [`SourceSpec`] names what to open, and is cheap to copy;
//!   each thread opens its own. So no lock is shared and no page of one thread waits behind
//!   another's.
//! - [`PageSource::request`] asks and does not wait. Up to [`MAX_IN_FLIGHT`] pages are in flight,
//!   each once.
//! - [`PageSource::arrived`] returns a page that is here; in any order, and the same one until it
//!   is taken. It is the only call that waits, and only as long as its [`Wait`] allows. Even
//!   [`Wait::ForEver`] ends: by an arrival, by a latency that is over, or by a peer's timeout.
//! - Requests are collected. A call of `arrived` that finds no page, or a page that it has returned
//!   before, sends them. So a caller that has taken a page and requested others calls it again,
//!   until it returns no page.
//! - [`PageSource::take_into`] puts the page where the caller wants it: made or read there, without
//!   a buffer between. [`PageSource::take`] shows it in place, for a caller that passes it to a
//!   system call. No page costs an allocation.
//! - An error of a page of a file concerns that page only, and the page counts as taken. An error
//!   of a peer ends the source: all that was in flight is lost, `request` and `arrived` return
//!   [`SourceError::Ended`] from then on, and there is nothing to take
//!   ([`SourceError::NothingArrived`]).
//! - A loop that also waits for other things calls [`PageSource::next_arrival`] and waits by
//!   [`wait_until`].

mod delayed;
mod error;
mod file;
mod in_flight;
mod pattern;
mod peer;
mod protocol;
mod server;
mod spec;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_peer;
mod wait;

use std::fmt::Debug;
use std::os::fd::BorrowedFd;

pub use error::{ParseSourceError, SourceError};
pub use pattern::{Pattern, WORDS_PER_PAGE};
pub use protocol::PeerAddress;
pub use server::PeerServer;
pub use spec::SourceSpec;
pub use wait::wait_until;

/// Bytes of a page of a source.
pub const PAGE_SIZE: usize = 4096;

/// The bytes of one page.
pub type PageBytes = [u8; PAGE_SIZE];

/// Pages that may be in flight in one source: enough for a thread that runs hundreds of vCPUs, and
/// few enough to be searched for each answer. The requests to a peer need not fit into a socket's
/// buffer (a Unix socket takes a few hundred unread single ones): what finds no room is kept, and
/// sent when there is room.
pub const MAX_IN_FLIGHT: usize = 1024;

/// How long [`PageSource::arrived`] waits for a page if none is here. It never waits if none is in
/// flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until a moment of [`timestamp_ns`](crate::linux::clock::timestamp_ns).
    UntilNs(u64),
    /// Until a page is here, or the source's own time-out is over.
    ForEver,
}

impl Wait {
    /// The moment at which this wait is over.
    fn until_ns(self) -> u64 {
        match self {
            Wait::No => 0,
            Wait::UntilNs(until_ns) => until_ns,
            Wait::ForEver => u64::MAX,
        }
    }
}

/// When to call [`PageSource::arrived`] again.
#[derive(Clone, Copy, Debug)]
pub enum NextArrival<'a> {
    /// Nothing is in flight.
    Nothing,
    /// At this moment of [`timestamp_ns`](crate::linux::clock::timestamp_ns); now, if it is past.
    At(u64),
    /// When the descriptor is readable; and at this moment at the latest, since a page that is not
    /// here is an error then.
    Readable {
        /// A socket.
        descriptor: BorrowedFd<'a>,
        /// When the time-out of the oldest request is over.
        until_ns: u64,
    },
}

/// A source of pages for one thread.
pub trait PageSource: Debug + Send {
    /// Requests a page, by its number from the start of the source. Does not wait. A call of
    /// [`arrived`](PageSource::arrived) sends the request, with others.
    ///
    /// # Errors
    /// [`SourceError::AlreadyRequested`] if it is in flight, [`SourceError::TooManyInFlight`],
    /// [`SourceError::PageOutOfRange`]; they change nothing.
    fn request(&mut self, page: u64) -> Result<(), SourceError>;

    /// Returns a page that is here: the same one until it is taken. `None` if none is, when the
    /// wait is over or nothing is in flight; then all requests are sent, as far as the peer reads.
    ///
    /// # Errors
    /// Of a peer, which end the source: [`SourceError::Closed`], [`SourceError::Silent`], and the
    /// errors of impossible answers.
    fn arrived(&mut self, wait: Wait) -> Result<Option<u64>, SourceError>;

    /// Takes the page that [`arrived`](PageSource::arrived) returned, and shows it in place.
    ///
    /// # Errors
    /// [`SourceError::NothingArrived`]; of a file, [`SourceError::FileTooShort`] and
    /// [`SourceError::ReadFile`]; of a peer, [`SourceError::Refused`].
    fn take(&mut self) -> Result<&PageBytes, SourceError>;

    /// Takes the page that [`arrived`](PageSource::arrived) returned, and copies it to `into`.
    ///
    /// # Errors
    /// As [`take`](PageSource::take). The contents of `into` are undefined then.
    fn take_into(&mut self, into: &mut PageBytes) -> Result<(), SourceError>;

    /// Pages that were requested and not taken.
    fn nr_in_flight(&self) -> usize;

    /// When to call [`arrived`](PageSource::arrived) again.
    fn next_arrival(&self) -> NextArrival<'_>;

    /// Fetches one page and waits for it: for a thread that has nothing else to do.
    ///
    /// # Errors
    /// [`SourceError::OthersInFlight`] if there are, and all of the above.
    fn fetch_into(&mut self, page: u64, into: &mut PageBytes) -> Result<(), SourceError> {
        let nr_pages = self.nr_in_flight();
        if nr_pages > 0 {
            return Err(SourceError::OthersInFlight { page, nr_pages });
        }
        self.request(page)?;
        while self.arrived(Wait::ForEver)?.is_none() {}
        self.take_into(into)
    }
}
