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

#![expect(unsafe_code, reason = "descriptors travel in control messages, which are raw memory")]

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::time::{Duration, Instant};

use super::error::HandshakeError;
use super::ring::Layout;

/// "slatUFD" and a zero.
pub(super) const MAGIC: u64 = 0x0044_4655_7461_6c73;

/// Changes when messages or the layout of the rings do.
pub(super) const VERSION: u32 = 1;

/// Descriptors in one message; the kernel takes 253.
const CHUNK: usize = 128;

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

    fn timed_out(&self) -> HandshakeError {
        HandshakeError::TimedOut { waited: self.began.elapsed() }
    }

    /// The time that is left, never zero: sockets take zero for "without a limit".
    pub(super) fn left(&self) -> Result<Duration, HandshakeError> {
        match self.limit.checked_sub(self.began.elapsed()) {
            Some(left) if !left.is_zero() => Ok(left),
            _ => Err(self.timed_out()),
        }
    }

    fn error(&self, call: &'static str, source: io::Error) -> HandshakeError {
        match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => self.timed_out(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
                HandshakeError::Closed
            }
            _ => HandshakeError::System { call, source },
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
    pub(super) layout: Layout,
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
fn send(stream: &mut &UnixStream, words: &[u64], deadline: Deadline) -> Result<(), HandshakeError> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    stream.set_write_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
    // The other side has read all that came before, so this little fits into the socket at once.
    stream.write_all(&bytes).map_err(|source| deadline.error("write", source))
}

/// Reads `N` words.
fn receive<const N: usize>(stream: &mut &UnixStream, deadline: Deadline) -> Result<[u64; N], HandshakeError> {
    let mut bytes = vec![0u8; N * 8];
    let mut filled = 0;
    while filled < bytes.len() {
        stream.set_read_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(HandshakeError::Closed),
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

pub(super) fn send_hello(mut stream: &UnixStream, hello: Hello, deadline: Deadline) -> Result<(), HandshakeError> {
    send(&mut stream, &[MAGIC, pair(hello.version, hello.nr_threads), 0], deadline)
}

pub(super) fn receive_hello(mut stream: &UnixStream, deadline: Deadline) -> Result<Hello, HandshakeError> {
    let [magic, numbers, _] = receive::<HELLO_WORDS>(&mut stream, deadline)?;
    if magic != MAGIC {
        return Err(HandshakeError::BadMagic { found: magic });
    }
    let (version, nr_threads) = unpair(numbers);
    Ok(Hello { version, nr_threads })
}

pub(super) fn send_welcome(
    mut stream: &UnixStream,
    welcome: Welcome,
    deadline: Deadline,
) -> Result<(), HandshakeError> {
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

pub(super) fn receive_welcome(mut stream: &UnixStream, deadline: Deadline) -> Result<Welcome, HandshakeError> {
    let words = receive::<WELCOME_WORDS>(&mut stream, deadline)?;
    if words[0] != MAGIC {
        return Err(HandshakeError::BadMagic { found: words[0] });
    }
    let (version, status) = unpair(words[1]);
    let (nr_shards, nr_waiters) = unpair(words[3]);
    let (nr_vcpus, nr_entries) = unpair(words[4]);
    Ok(Welcome {
        version,
        status,
        epoch: words[2],
        layout: Layout { nr_shards, nr_waiters, nr_vcpus, nr_entries },
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
) -> Result<(), HandshakeError> {
    send(&mut stream, &[MAGIC, epoch, u64::from(code)], deadline)
}

/// Waits until the resolver of this epoch is ready.
pub(super) fn receive_ready(mut stream: &UnixStream, epoch: u64, deadline: Deadline) -> Result<(), HandshakeError> {
    let [magic, theirs, code] = receive::<READY_WORDS>(&mut stream, deadline)?;
    if magic != MAGIC {
        return Err(HandshakeError::BadMagic { found: magic });
    }
    if theirs != epoch {
        return Err(HandshakeError::BadNumbers { what: "ready for another epoch" });
    }
    match unpair(code).0 {
        0 => Ok(()),
        code => Err(HandshakeError::Refused { code }),
    }
}

/// A control message with room for [`CHUNK`] descriptors: words, because headers have to be
/// aligned.
type Control = [u64; 80];

/// Bytes of a control message of so many descriptors.
fn control_bytes(count: usize) -> usize {
    // SAFETY: only calculates. `count` is at most CHUNK.
    unsafe { libc::CMSG_SPACE((count * size_of::<RawFd>()) as u32) as usize }
}

/// Sends descriptors, each message with the number of those in it.
pub(super) fn send_descriptors(
    stream: &UnixStream,
    files: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> Result<(), HandshakeError> {
    for chunk in files.chunks(CHUNK) {
        let mut payload = (chunk.len() as u64).to_ne_bytes();
        let mut part = libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() };
        let mut control: Control = [0; _];
        let length = control_bytes(chunk.len());
        assert!(length <= size_of::<Control>());
        // SAFETY: all-zero bytes are a valid `msghdr`.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = length as _;
        // SAFETY: the control buffer is aligned and has room for one header and the descriptors of
        // the chunk, so there is a first header and its data end inside the buffer.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN((chunk.len() * size_of::<RawFd>()) as u32) as _;
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            for (index, file) in chunk.iter().enumerate() {
                data.add(index).write_unaligned(file.as_raw_fd());
            }
        }
        loop {
            stream.set_write_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
            // SAFETY: the message points to buffers that outlive the call.
            let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
            if sent >= 0 {
                break;
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(deadline.error("sendmsg", error));
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
) -> Result<Vec<OwnedFd>, HandshakeError> {
    if expected > MAX_DESCRIPTORS {
        return Err(HandshakeError::BadNumbers { what: "more descriptors than a VMM can have" });
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
                HandshakeError::TooManyOpenFiles { expected, found, limit: max_open_files() }
            } else {
                HandshakeError::MissingDescriptors { expected, found }
            });
        }
    }
    Ok(files)
}

/// The soft limit of open files.
fn max_open_files() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` to where one is. It cannot fail with these arguments.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur
}

/// Receives one message: the number of descriptors that it announces, and whether some were cut
/// off.
fn receive_chunk(
    stream: &UnixStream,
    files: &mut Vec<OwnedFd>,
    deadline: Deadline,
) -> Result<(u64, bool), HandshakeError> {
    let mut payload = [0u8; 8];
    let mut part = libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() };
    let mut control: Control = [0; _];
    // SAFETY: all-zero bytes are a valid `msghdr`.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = control_bytes(CHUNK) as _;
    let count = loop {
        stream.set_read_timeout(Some(deadline.left()?)).map_err(|source| deadline.error("setsockopt", source))?;
        let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_WAITALL;
        // SAFETY: the message points to buffers that outlive the call, with their sizes.
        let count = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, flags) };
        if count >= 0 {
            break count;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(deadline.error("recvmsg", error));
        }
    };
    // Descriptors first, whatever else is wrong: they are open now, and have to be closed again.
    // SAFETY: the kernel has written whole headers with their data into the control buffer, and
    // has stored its length; the descriptors are new, and owned by nothing else.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data_bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for index in 0..data_bytes / size_of::<RawFd>() {
                    files.push(OwnedFd::from_raw_fd(ptr::read_unaligned(data.add(index))));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    if count == 0 {
        return Err(HandshakeError::Closed);
    }
    if count as usize != payload.len() {
        return Err(HandshakeError::BadNumbers { what: "a message of descriptors is cut short" });
    }
    Ok((u64::from_ne_bytes(payload), message.msg_flags & libc::MSG_CTRUNC != 0))
}
