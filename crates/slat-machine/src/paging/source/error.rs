//! The errors of a source of pages. Every error names the page, and the file or the peer.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::{MAX_IN_FLIGHT, PAGE_SIZE, PeerAddress};

/// Why a page cannot be fetched, or a source cannot be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum SourceError {
    /// The page is in flight already.
    #[error("page {page:#x} is requested while it is in flight")]
    AlreadyRequested { page: u64 },
    /// No more pages may be in flight.
    #[error("page {page:#x} is requested while {MAX_IN_FLIGHT} others are in flight")]
    TooManyInFlight { page: u64 },
    /// A page was to be fetched alone.
    #[error("page {page:#x} is to be fetched alone while {nr_pages} others are in flight")]
    OthersInFlight { page: u64, nr_pages: usize },
    /// No source has a page with such a number: its bytes would lie beyond 2^63.
    #[error("no source has a page {page:#x}")]
    PageOutOfRange { page: u64 },
    /// There is no page to take.
    #[error("no page has arrived that could be taken")]
    NothingArrived,
    /// The file cannot be opened.
    #[error("pages cannot be read from '{}': {cause}", path.display())]
    OpenFile {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    /// The page is not, or not completely, in the file.
    #[error(
        "page {page:#x} at offset {offset_bytes:#x} is not in '{}', which has {size_bytes:#x} bytes",
        path.display()
    )]
    FileTooShort { path: PathBuf, page: u64, offset_bytes: u64, size_bytes: u64 },
    /// The page is in the file and cannot be read.
    #[error("page {page:#x} at offset {offset_bytes:#x} cannot be read from '{}': {cause}", path.display())]
    ReadFile {
        path: PathBuf,
        page: u64,
        offset_bytes: u64,
        #[source]
        cause: io::Error,
    },
    /// The address is not on this machine. The protocol has no authentication and no encryption.
    #[error("peer {address} is not on this machine: only unix sockets and loopback addresses are allowed")]
    NotLoopback { address: PeerAddress },
    /// A server cannot be started at the address.
    #[error("pages cannot be served at {address}: {cause}")]
    Serve {
        address: PeerAddress,
        #[source]
        cause: io::Error,
    },
    /// The peer cannot be reached.
    #[error("peer {address} cannot be reached: {cause}")]
    Connect {
        address: PeerAddress,
        #[source]
        cause: io::Error,
    },
    /// The server at the address uses another protocol.
    #[error("peer {address} is no source of pages")]
    NotASource { address: PeerAddress },
    /// The connection broke.
    #[error("the connection to peer {address} broke while {nr_pages} pages were in flight: {cause}")]
    Broken {
        address: PeerAddress,
        nr_pages: usize,
        #[source]
        cause: io::Error,
    },
    /// The peer closed the connection while pages were in flight.
    #[error("peer {address} closed the connection before page {page:#x} and {} others had arrived", nr_pages.saturating_sub(1))]
    Closed { address: PeerAddress, page: u64, nr_pages: usize },
    /// The peer did not answer a request in time, whatever else it sent.
    #[error("peer {address} was asked for page {page:#x} {waited_ms} ms ago and has not answered, while {} others are in flight", nr_pages.saturating_sub(1))]
    Silent {
        address: PeerAddress,
        page: u64,
        nr_pages: usize,
        /// Since it was requested, or since the user came back after a whole timeout.
        waited_ms: u64,
    },
    /// The peer sent a page that was not requested.
    #[error("peer {address} sent page {page:#x}, which was not requested")]
    NotRequested { address: PeerAddress, page: u64 },
    /// The peer answered a request again.
    #[error("peer {address} sent page {page:#x} again")]
    Duplicate { address: PeerAddress, page: u64 },
    /// The peer sent a page of another size.
    #[error("peer {address} sent {size_bytes} bytes as page {page:#x}; a page has {PAGE_SIZE}")]
    WrongSize { address: PeerAddress, page: u64, size_bytes: u32 },
    /// The peer does not have the page, or cannot read it. Concerns this page only.
    #[error("peer {address} has no page {page:#x}")]
    Refused { address: PeerAddress, page: u64 },
    /// The source ended with an earlier error.
    #[error("peer {address} is not used any more after an earlier error")]
    Ended { address: PeerAddress },
    /// The system refused to wait.
    #[error("cannot wait for pages: {cause}")]
    Wait {
        #[source]
        cause: io::Error,
    },
}

/// A text that is no source or no peer.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("'{text}' is no {wanted}")]
pub struct ParseSourceError {
    pub(super) text: String,
    pub(super) wanted: &'static str,
}
