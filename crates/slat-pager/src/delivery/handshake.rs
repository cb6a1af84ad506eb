//! The handshake of a resolver and a VMM over a Unix stream socket.
//!
//! # Protocol
//! 1. The resolver sends *hello*: magic, version, its number of threads.
//! 2. The VMM answers *welcome*: all sizes, the epoch, and a status (0, or why it refuses). The
//!    descriptors follow (`SCM_RIGHTS`), as many as the welcome announces, in messages of at most
//!    128: the file of the rings, of the bitmap, of the guest's memory if it is shared, an eventfd
//!    for each resolver thread, one for each waiter.
//! 3. The resolver checks what came and sends *ready* with the epoch and a code (0, or why it
//!    refuses).
//!
//! After that neither side writes to the socket. Its end shows that the other side has died.
//!
//! All numbers are in native byte order: the socket cannot leave the machine. Each side reads
//! messages of fixed sizes until a deadline, whatever the other side sends, and however slowly.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    self, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use rustix::process::{Resource, getrlimit};

use super::error::AttachError;
use super::ring::RingLayout;

/// "slatUFD" and a zero.
pub(super) const MAGIC: u64 = 0x0044_4655_7461_6c73;

/// Changes when messages or the layout of the rings do.
pub(super) const VERSION: u32 = 1;

/// Descriptors in one message; the kernel takes 253.
const CHUNK: usize = 128;
const CONTROL_BYTES: usize = cmsg_space!(ScmRights(CHUNK));

/// More than a possible welcome can announce.
const MAX_DESCRIPTORS: u64 = 3 + 2 * super::ring::MAX_VCPUS as u64;

/// Codes of a refusal.
pub(super) const REFUSED_VERSION: u32 = 1;
pub(super) const REFUSED_THREADS: u32 = 2;
pub(super) const REFUSED_CONTENTS: u32 = 3;

/// Until when the other side has to answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    began: Instant,
    limit: Duration,
}

impl Deadline {
    pub(super) fn new(limit: Duration) -> Deadline {
        Deadline { began: Instant::now(), limit }
    }

    fn timed_out(&self) -> AttachError {
        AttachError::TimedOut { waited: self.began.elapsed() }
    }

    /// The time that is left, never zero: sockets take zero for "without a limit".
    pub(super) fn left(&self) -> Result<Duration, AttachError> {
        match self.limit.checked_sub(self.began.elapsed()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(self.timed_out()),
        }
    }

    fn error(&self, call: &'static str, source: io::Error) -> AttachError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.timed_out(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
                AttachError::SocketClosed
            }
            _ => AttachError::System { call, source },
        }
    }
}

/// The first message of the resolver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) nr_threads: u32,
}

/// The answer of the VMM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Welcome {
    pub(super) version: u32,
    /// 0, or why the VMM refuses.
    pub(super) status: u32,
    pub(super) epoch: u64,
    pub(super) layout: RingLayout,
    pub(super) nr_pages: u64,
    pub(super) page_bytes: u64,
    pub(super) memory_offset_bytes: u64,
    /// 0: there is no file of the memory.
    pub(super) memory_bytes: u64,
    pub(super) nr_descriptors: u64,
}

const HELLO_WORDS: usize = 3;
const WELCOME_WORDS: usize = 12;
const READY_WORDS: usize = 3;

/// Writes words.
fn send(stream: &mut &UnixStream, words: &[u64], deadline: Deadline) -> Result<(), AttachError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    stream.set_write_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
    // The other side has read all that came before, so this little fits into the socket at once.
    stream.write_all(&bytes).map_err(|source| deadline.error("write", source))
}

/// Reads `N` words.
fn receive<const N: usize>(stream: &mut &UnixStream, deadline: Deadline) -> Result<[u64; N], AttachError> {
    let mut bytes = vec![0u8; N * 8];
    let mut filled = 0;
    while filled < bytes.len() {
        stream.set_read_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(AttachError::SocketClosed),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(deadline.error("read", source)),
        }
    }
    let mut words = [0; N];
    for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*chunk);
    }
    Ok(words)
}

/// Two numbers in a word.
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The two numbers of a word.
fn unpair(word: u64) -> (u32, u32) {
    // Truncates on purpose: the two halves.
    (word as u32, (word >> 32) as u32)
}

pub(super) fn send_hello(mut stream: &UnixStream, hello: Hello, deadline: Deadline) -> Result<(), AttachError> {
    send(&mut stream, &[MAGIC, pair(hello.version, hello.nr_threads), 0], deadline)
}

pub(super) fn receive_hello(mut stream: &UnixStream, deadline: Deadline) -> Result<Hello, AttachError> {
    let [magic, numbers, _] = receive::<HELLO_WORDS>(&mut stream, deadline)?;
    if magic != MAGIC {
        return Err(AttachError::BadMagic { found: magic });
    }
    let (version, nr_threads) = unpair(numbers);
    Ok(Hello { version, nr_threads })
}

pub(super) fn send_welcome(mut stream: &UnixStream, welcome: Welcome, deadline: Deadline) -> Result<(), AttachError> {
    let Welcome { layout, .. } = welcome;
    let words: [u64; WELCOME_WORDS] = [
        MAGIC,
        pair(welcome.version, welcome.status),
        welcome.epoch,
        pair(layout.nr_shards, layout.nr_waiters),
        pair(layout.nr_vcpus, layout.nr_entries),
        welcome.nr_pages,
        welcome.page_bytes,
        welcome.memory_offset_bytes,
        welcome.memory_bytes,
        welcome.nr_descriptors,
        0,
        0,
    ];
    send(&mut stream, &words, deadline)
}

pub(super) fn receive_welcome(mut stream: &UnixStream, deadline: Deadline) -> Result<Welcome, AttachError> {
    let words = receive::<WELCOME_WORDS>(&mut stream, deadline)?;
    if words[0] != MAGIC {
        return Err(AttachError::BadMagic { found: words[0] });
    }
    let (version, status) = unpair(words[1]);
    let (nr_shards, nr_waiters) = unpair(words[3]);
    let (nr_vcpus, nr_entries) = unpair(words[4]);
    Ok(Welcome {
        version,
        status,
        epoch: words[2],
        layout: RingLayout { nr_shards, nr_waiters, nr_vcpus, nr_entries },
        nr_pages: words[5],
        page_bytes: words[6],
        memory_offset_bytes: words[7],
        memory_bytes: words[8],
        nr_descriptors: words[9],
    })
}

pub(super) fn send_ready(
    mut stream: &UnixStream,
    epoch: u64,
    code: u32,
    deadline: Deadline,
) -> Result<(), AttachError> {
    send(&mut stream, &[MAGIC, epoch, u64::from(code)], deadline)
}

/// Waits until the resolver of this epoch is ready.
pub(super) fn receive_ready(mut stream: &UnixStream, epoch: u64, deadline: Deadline) -> Result<(), AttachError> {
    let [magic, theirs, code] = receive::<READY_WORDS>(&mut stream, deadline)?;
    if magic != MAGIC {
        return Err(AttachError::BadMagic { found: magic });
    }
    if theirs != epoch {
        return Err(AttachError::BadNumbers { what: "ready for another epoch" });
    }
    match unpair(code).0 {
        0 => Ok(()),
        code => Err(AttachError::Refused { code }),
    }
}

/// Sends descriptors, each message with the number of those in it.
pub(super) fn send_descriptors(
    stream: &UnixStream,
    files: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> Result<(), AttachError> {
    for chunk in files.chunks(CHUNK) {
        let payload = (chunk.len() as u64).to_ne_bytes();
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = control.push(SendAncillaryMessage::ScmRights(chunk));
        assert!(fits, "there is room for a chunk");
        loop {
            stream.set_write_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
            match net::sendmsg(stream, &[IoSlice::new(&payload)], &mut control, SendFlags::NOSIGNAL) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(deadline.error("sendmsg", error.into())),
            }
        }
    }
    Ok(())
}

/// Receives so many descriptors.
pub(super) fn receive_descriptors(
    stream: &UnixStream,
    expected: u64,
    deadline: Deadline,
) -> Result<Vec<OwnedFd>, AttachError> {
    if expected > MAX_DESCRIPTORS {
        return Err(AttachError::BadNumbers { what: "more descriptors than a VMM can have" });
    }
    let mut files = Vec::new();
    while (files.len() as u64) < expected {
        let before = files.len();
        let (claimed, is_cut) = receive_chunk(stream, &mut files, deadline)?;
        let found = files.len() as u64;
        if is_cut || claimed == 0 || claimed != found - before as u64 || found > expected {
            // Cannot truncate: at most `MAX_DESCRIPTORS`, and a message more.
            let (expected, found) = (expected as u32, found as u32);
            // There was room for as many, and the kernel has stopped before: it opens no more
            // (recvmsg(2), MSG_CTRUNC).
            let nr_opened = u64::from(found) - before as u64;
            return Err(if is_cut && claimed <= CHUNK as u64 && nr_opened < claimed {
                AttachError::TooManyOpenFiles { expected, found, limit: max_open_files() }
            } else {
                AttachError::MissingDescriptors { expected, found }
            });
        }
    }
    Ok(files)
}

/// The soft limit of open files.
fn max_open_files() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Receives one message: the number of descriptors that it announces, and whether some were cut
/// off.
fn receive_chunk(
    stream: &UnixStream,
    files: &mut Vec<OwnedFd>,
    deadline: Deadline,
) -> Result<(u64, bool), AttachError> {
    let mut payload = [0u8; 8];
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        stream.set_read_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        match net::recvmsg(stream, &mut [IoSliceMut::new(&mut payload)], &mut control, flags) {
            Ok(received) => break received,
            Err(Errno::INTR) => {}
            Err(error) => return Err(deadline.error("recvmsg", error.into())),
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            files.extend(received);
        }
    }
    if received.bytes == 0 {
        return Err(AttachError::SocketClosed);
    }
    if received.bytes != payload.len() {
        return Err(AttachError::BadNumbers { what: "a message of descriptors is cut short" });
    }
    Ok((u64::from_ne_bytes(payload), received.flags.contains(ReturnFlags::CTRUNC)))
}
