//! The messages between a source of pages in another process and its user.
//!
//! They go over a stream on this machine: a Unix socket, or TCP on loopback. All numbers are
//! little-endian.
//! 1. The server greets: 8 bytes, [`GREETING`].
//! 2. The user sends requests, at most [`MAX_IN_FLIGHT`](super::MAX_IN_FLIGHT) without an answer: a
//!    sequence number, counted from 0 and never used again, and the number of a page; 8 bytes each.
//! 3. The server answers each request once, in any order: both numbers again, a status and a size
//!    of 4 bytes each, and that many bytes. Status 0 is the page, of 4096 bytes; any other means
//!    that there is no such page, with 0 bytes.
//!
//! By the sequence number an answer that came twice differs from one that was not requested,
//! however often a page is requested.
//!
//! There is no authentication and no encryption: so other machines are refused.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::{PAGE_SIZE, ParseSourceError};

/// Identifies the server and the protocol.
pub(super) const GREETING: [u8; 8] = *b"slatpg01";

/// Bytes of a request.
pub(super) const REQUEST_BYTES: usize = 16;

/// Bytes of an answer, before the page.
pub(super) const HEADER_BYTES: usize = 24;

/// Bytes of an answer that has a page.
pub(super) const REPLY_BYTES: usize = HEADER_BYTES + PAGE_SIZE;

/// Answers that are sent or received by one system call at most.
pub(super) const REPLIES_AT_ONCE: usize = 16;

/// A request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageRequest {
    pub(super) sequence: u64,
    pub(super) page: u64,
}

impl PageRequest {
    pub(super) fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..].copy_from_slice(&self.page.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; REQUEST_BYTES]) -> PageRequest {
        let (words, _) = bytes.as_chunks();
        PageRequest { sequence: u64::from_le_bytes(words[0]), page: u64::from_le_bytes(words[1]) }
    }
}

/// An answer, before the page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) request: PageRequest,
    pub(super) status: u32,
    pub(super) size_bytes: u32,
}

impl Header {
    pub(super) const PAGE: u32 = 0;
    pub(super) const REFUSED: u32 = 1;

    pub(super) fn page(request: PageRequest) -> Header {
        Header { request, status: Header::PAGE, size_bytes: PAGE_SIZE as u32 }
    }

    pub(super) fn refused(request: PageRequest) -> Header {
        Header { request, status: Header::REFUSED, size_bytes: 0 }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..16].copy_from_slice(&self.request.to_bytes());
        bytes[16..20].copy_from_slice(&self.status.to_le_bytes());
        bytes[20..].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes
    }

    /// The answer at the front of the bytes; `None` if they are too few.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Header> {
        let (request, rest) = bytes.split_first_chunk()?;
        let (status, rest) = rest.split_first_chunk()?;
        let (size, _) = rest.split_first_chunk()?;
        let (status, size_bytes) = (u32::from_le_bytes(*status), u32::from_le_bytes(*size));
        Some(Header { request: PageRequest::from_bytes(request), status, size_bytes })
    }
}

/// The address of a source of pages in another process on this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PeerAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// TCP, on a loopback address only.
    Tcp(SocketAddr),
}

impl PeerAddress {
    pub(super) fn is_on_this_machine(&self) -> bool {
        match self {
            PeerAddress::Unix(_) => true,
            PeerAddress::Tcp(address) => address.ip().is_loopback(),
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerAddress::Unix(path) => write!(f, "unix:{}", path.display()),
            PeerAddress::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl FromStr for PeerAddress {
    type Err = ParseSourceError;

    fn from_str(text: &str) -> Result<PeerAddress, ParseSourceError> {
        let error = || ParseSourceError {
            text: text.to_owned(),
            wanted: "peer: there are unix:PATH and tcp:ADDRESS:PORT, such as tcp:127.0.0.1:7070",
        };
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(PeerAddress::Unix(path.into())),
            Some(("tcp", address)) => address.parse().map(PeerAddress::Tcp).map_err(|_| error()),
            _ => Err(error()),
        }
    }
}

/// A connection; none of its calls waits.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    /// Connects, within `time_out`.
    pub(super) fn connect(address: &PeerAddress, time_out: Duration) -> io::Result<Stream> {
        match address {
            PeerAddress::Unix(path) => connect_unix(path, time_out).map(Stream::Unix),
            PeerAddress::Tcp(address) => Stream::of_tcp(TcpStream::connect_timeout(address, time_out)?),
        }
    }

    fn of_tcp(stream: TcpStream) -> io::Result<Stream> {
        stream.set_nonblocking(true)?;
        // Requests and pages are collected here; the kernel must not wait for more of them.
        stream.set_nodelay(true)?;
        Ok(Stream::Tcp(stream))
    }

    /// Receives what is there. `None` if nothing is; 0 at the end of the stream.
    pub(super) fn receive(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        unless_it_would_wait(match self {
            Stream::Unix(stream) => stream.read(into),
            Stream::Tcp(stream) => stream.read(into),
        })
    }

    /// Sends as much as there is room for. `None` if there is no room.
    pub(super) fn send(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        unless_it_would_wait(match self {
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Tcp(stream) => stream.write(bytes),
        })
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

fn unless_it_would_wait(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(nr_bytes) => Ok(Some(nr_bytes)),
        // After a signal the caller tries again as well.
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Connects without waiting in the system call, since that would wait without end while a server
/// does not accept.
fn connect_unix(path: &Path, time_out: Duration) -> io::Result<UnixStream> {
    const RETRY: Duration = Duration::from_millis(1);
    let began = Instant::now();
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match net::connect(&socket, &address) {
            Ok(()) => return Ok(UnixStream::from(socket)),
            Err(Errno::AGAIN) if began.elapsed() >= time_out => return Err(io::ErrorKind::TimedOut.into()),
            // The server's queue is full; there is nothing to poll for.
            Err(Errno::AGAIN) => thread::sleep(RETRY),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A server's listening socket.
#[derive(Debug)]
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// Listens, and returns the address: port 0 of TCP becomes a free one.
    pub(super) fn bind(address: &PeerAddress) -> io::Result<(Listener, PeerAddress)> {
        match address {
            PeerAddress::Unix(path) => {
                let listener = UnixListener::bind(path)?;
                listener.set_nonblocking(true)?;
                Ok((Listener::Unix(listener), address.clone()))
            }
            PeerAddress::Tcp(address) => {
                let listener = TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                let address = listener.local_addr()?;
                Ok((Listener::Tcp(listener), PeerAddress::Tcp(address)))
            }
        }
    }

    /// Accepts the next connection; `WouldBlock` if there is none.
    pub(super) fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Unix(stream))
            }
            Listener::Tcp(listener) => Stream::of_tcp(listener.accept()?.0),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}
