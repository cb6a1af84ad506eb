//! A connection to the VMM: whole frames in time, with the descriptors that belong to them.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};

use super::Error;
use super::wire::{Command, FRAME_BYTES, Request, Response};
use crate::protocol::descriptors::receive_now;

/// Bytes of a long part that are read at once: a wrong length costs no more memory than this.
const PART_BYTES: usize = 1 << 20;

/// One connection, whose peer has `timeout` for each frame.
#[derive(Debug)]
pub(super) struct Connection {
    socket: UnixStream,
    timeout: Duration,
}

/// Which descriptors come with the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Descriptors {
    None,
    One,
}

impl Descriptors {
    /// The error of more than these.
    fn but_more(self, what: &'static str) -> Error {
        match self {
            Descriptors::None => Error::Descriptors { what, expected: "no", found: "some" },
            Descriptors::One => Error::Descriptors { what, expected: "one", found: "more" },
        }
    }
}

impl Connection {
    pub(super) fn new(socket: UnixStream, timeout: Duration) -> io::Result<Connection> {
        socket.set_nonblocking(false)?;
        socket.set_write_timeout(Some(timeout))?;
        Ok(Connection { socket, timeout })
    }

    /// The next request.
    pub(super) fn receive_request(&self) -> Result<Request, Error> {
        Ok(Request::from_bytes(self.receive_frame("a request")?)?)
    }

    /// The `length` bytes behind a `command` that has at most `most_bytes`.
    pub(super) fn receive_payload(&self, command: Command, length: u64, most_bytes: u64) -> Result<Vec<u8>, Error> {
        let Some(length) = usize::try_from(length).ok().filter(|length| *length as u64 <= most_bytes) else {
            return Err(Error::Length { command, length });
        };
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let start = bytes.len();
            bytes.resize(length.min(start + PART_BYTES), 0);
            self.receive(&mut bytes[start..], "the bytes of a request", Descriptors::None)?;
        }
        Ok(bytes)
    }

    /// The number of a slot and the descriptor of its memory.
    pub(super) fn receive_memory(&self) -> Result<(u32, OwnedFd), Error> {
        const WHAT: &str = "the number of a memory slot";
        let mut number = [0; 4];
        let memory = self.receive(&mut number, WHAT, Descriptors::One)?;
        let memory = memory.ok_or(Error::Descriptors { what: WHAT, expected: "one", found: "none" })?;
        Ok((u32::from_le_bytes(number), memory))
    }

    pub(super) fn answer(&self, response: Response) -> Result<(), Error> {
        self.send_all(&response.to_bytes())
    }

    /// Sends a request and what belongs to it, and waits for its answer.
    pub(super) fn request(&self, request: Request, payload: &[u8], what: &'static str) -> Result<(), Error> {
        self.send_all(&request.to_bytes())?;
        self.send_all(payload)?;
        self.expect_ok(what)
    }

    /// Sends the memory of a slot, and waits for the answer.
    pub(super) fn send_memory(&self, slot: u32, memory: BorrowedFd<'_>) -> Result<(), Error> {
        let number = slot.to_le_bytes();
        self.send_all(&Request::new(Command::MemoryFd, number.len() as u64).to_bytes())?;
        let descriptors = [memory];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        // There is space for one.
        let _ = ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        let bytes = [io::IoSlice::new(&number)];
        let nr_sent = rustix::io::retry_on_intr(|| sendmsg(&self.socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL))
            .map_err(|error| sent(error.into()))?;
        self.send_all(&number[nr_sent..])?;
        self.expect_ok("the memory of a slot")
    }

    /// Sends bytes that are no frame.
    pub(super) fn send_all(&self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let nr_sent = rustix::io::retry_on_intr(|| send(&self.socket, bytes, SendFlags::NOSIGNAL))
                .map_err(|error| sent(error.into()))?;
            bytes = &bytes[nr_sent..];
        }
        Ok(())
    }

    pub(super) fn into_socket(self) -> UnixStream {
        self.socket
    }

    fn expect_ok(&self, what: &'static str) -> Result<(), Error> {
        match Response::from_bytes(self.receive_frame(what)?)? {
            Response::Ok => Ok(()),
            Response::Error => Err(Error::Refused(what)),
        }
    }

    fn receive_frame(&self, what: &'static str) -> Result<[u8; FRAME_BYTES], Error> {
        let mut bytes = [0; FRAME_BYTES];
        self.receive(&mut bytes, what, Descriptors::None)?;
        Ok(bytes)
    }

    /// Fills `into`. A descriptor that does not belong there is closed, and an error.
    fn receive(&self, into: &mut [u8], what: &'static str, expected: Descriptors) -> Result<Option<OwnedFd>, Error> {
        let deadline = Instant::now() + self.timeout;
        let mut descriptor = None;
        let mut nr_received = 0;
        while nr_received < into.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::TimedOut(what));
            }
            self.socket.set_read_timeout(Some(left)).map_err(Error::io("limit the time of a connection"))?;
            let mut received = Vec::new();
            let nr_bytes = match receive_now(self.socket.as_fd(), &mut into[nr_received..], &mut received) {
                Ok(nr_bytes) => nr_bytes,
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Err(Error::TimedOut(what)),
                    io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => return Err(Error::Closed(what)),
                    io::ErrorKind::InvalidData => return Err(expected.but_more(what)),
                    _ => return Err(Error::Io { what: "receive from the VMM", error }),
                },
            };
            match (received.pop(), received.is_empty(), expected) {
                (None, ..) => {}
                (Some(one), true, Descriptors::One) if descriptor.is_none() => descriptor = Some(one),
                _ => return Err(expected.but_more(what)),
            }
            if nr_bytes == 0 {
                return Err(Error::Closed(what));
            }
            nr_received += nr_bytes;
        }
        Ok(descriptor)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn sent(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Error::Closed("the end of what the pager sends"),
        io::ErrorKind::WouldBlock => Error::TimedOut("room for an answer"),
        _ => Error::Io { what: "send to the VMM", error },
    }
}
