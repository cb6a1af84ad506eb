//! Firecracker's handshake, as it is from version 1.1 to 1.17: `PUT /snapshot/load` with a memory
//! backend `{"backend_type": "Uffd", "backend_path": SOCKET}`.
//!
//! # Protocol
//! - The monitor connects and sends one JSON array with one userfaultfd beside it (`SCM_RIGHTS`).
//!   No length precedes the array, and no answer follows it.
//! - An entry is a region: `base_host_virt_addr`, `size`, `offset` (in the snapshot's memory), and
//!   `page_size` in bytes. Versions before 1.10 call the last `page_size_kib`; it is in bytes, too.
//! - The socket stays open. Its end is that of the monitor, which keeps a copy of the userfaultfd:
//!   a guest whose pager dies waits.
//!
//! # Guarantees
//! [`receive`] takes at most [`MAX_BYTES`] and one descriptor. Bytes behind the array are an error.

use std::io;
use std::os::fd::OwnedFd;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::net::UnixStream;

use super::descriptors;
use crate::source::PAGE_BYTES;
use crate::userfaultfd::{NotUserfaultfd, Userfaultfd};
use crate::vm::Region;

/// The longest array.
pub const MAX_BYTES: usize = 256 << 10;

/// What a monitor hands over.
#[derive(Debug)]
pub struct Handshake {
    /// The regions as it says, unchecked.
    pub regions: Vec<Region>,
    /// The descriptor.
    pub userfaultfd: Userfaultfd,
}

/// Why a handshake fails.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum HandshakeError {
    #[error("the monitor closed its socket after {nr_bytes} bytes of a handshake")]
    Ended { nr_bytes: usize },
    #[error("the handshake has more than {MAX_BYTES} bytes")]
    TooLong,
    #[error("the handshake is not a JSON array of regions: {why}")]
    Json { why: String },
    #[error("there are bytes behind the handshake")]
    Behind,
    #[error("the handshake has no descriptor")]
    NoDescriptor,
    #[error(transparent)]
    Descriptor(#[from] NotUserfaultfd),
    #[error("cannot receive a handshake: {0}")]
    Io(#[from] io::Error),
}

#[derive(Debug, Deserialize)]
struct Entry {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    page_size_kib: Option<u64>,
}

/// Receives a handshake. The caller limits the time.
///
/// # Errors
/// [`HandshakeError`].
pub async fn receive(stream: &UnixStream) -> Result<Handshake, HandshakeError> {
    let (entries, mut descriptors): (Vec<Entry>, _) = receive_entries(stream, 1).await?;
    let userfaultfd = Userfaultfd::from_fd(descriptors.pop().ok_or(HandshakeError::NoDescriptor)?)?;
    let region = |entry: Entry| Region {
        address: entry.base_host_virt_addr,
        size_bytes: entry.size,
        offset: entry.offset,
        page_bytes: entry.page_size.or(entry.page_size_kib).unwrap_or(PAGE_BYTES),
    };
    Ok(Handshake { regions: entries.into_iter().map(region).collect(), userfaultfd })
}

/// An array of entries, and at most so many descriptors beside it.
pub(super) async fn receive_entries<E: DeserializeOwned>(
    stream: &UnixStream,
    most_descriptors: usize,
) -> Result<(Vec<E>, Vec<OwnedFd>), HandshakeError> {
    let mut bytes = Vec::new();
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    let mut end = ArrayEnd::default();
    let mut part = vec![0; 16 << 10];
    loop {
        let nr_bytes = descriptors::receive(stream, &mut part, &mut descriptors, most_descriptors).await?;
        if nr_bytes == 0 {
            return Err(HandshakeError::Ended { nr_bytes: bytes.len() });
        }
        bytes.extend_from_slice(&part[..nr_bytes]);
        if bytes.len() > MAX_BYTES {
            return Err(HandshakeError::TooLong);
        }
        match end.feed(&part[..nr_bytes]) {
            Found::More => {}
            Found::NoArray => return Err(HandshakeError::Json { why: "it begins with something else".to_string() }),
            Found::End { nr_behind: 0 } => break,
            Found::End { .. } => return Err(HandshakeError::Behind),
        }
    }
    let entries = serde_json::from_slice(&bytes).map_err(|error| HandshakeError::Json { why: error.to_string() })?;
    Ok((entries, descriptors))
}

/// Finds the end of an array in JSON that comes in parts, with one look at each byte: to parse anew
/// with each part would let a monitor that sends single bytes take a CPU.
#[derive(Debug, Default)]
struct ArrayEnd {
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Found {
    More,
    NoArray,
    End { nr_behind: usize },
}

impl ArrayEnd {
    fn feed(&mut self, bytes: &[u8]) -> Found {
        for (nr, byte) in bytes.iter().enumerate() {
            if self.is_in_string {
                self.is_in_string = self.is_escaped || *byte != b'"';
                self.is_escaped = !self.is_escaped && *byte == b'\\';
                continue;
            }
            match byte {
                b'[' => self.depth += 1,
                b' ' | b'\t' | b'\r' | b'\n' => {}
                _ if self.depth == 0 => return Found::NoArray,
                b'"' => self.is_in_string = true,
                b'{' => self.depth += 1,
                b']' | b'}' => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Found::End { nr_behind: bytes.len() - nr - 1 };
                    }
                }
                _ => {}
            }
        }
        Found::More
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream as Blocking;

    use proptest::prelude::*;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    const ENTRY: &str =
        r#"[{"base_host_virt_addr":4096,"size":8192,"offset":0,"page_size":4096,"page_size_kib":4096}]"#;

    fn send(socket: &Blocking, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::empty()).unwrap();
    }

    /// Receives what `sender` sends before it closes.
    fn received(sender: impl FnOnce(Blocking) + Send + 'static) -> Result<Handshake, HandshakeError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, theirs) = Blocking::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let sender = std::thread::spawn(|| sender(theirs));
            let received = receive(&UnixStream::from_std(ours).unwrap()).await;
            sender.join().unwrap();
            received
        })
    }

    fn userfaultfd() -> Option<Userfaultfd> {
        Userfaultfd::open(0).map_err(|error| println!("skipped: {error}")).ok()
    }

    fn file_of(userfaultfd: &Userfaultfd) -> (u64, u64) {
        let stat = rustix::fs::fstat(userfaultfd).unwrap();
        (stat.st_dev, stat.st_ino)
    }

    #[test]
    fn a_handshake_is_received_whole_and_in_parts() {
        for nr_parts in [1, 2, ENTRY.len()] {
            let Some(userfaultfd) = userfaultfd() else { return };
            let identity = file_of(&userfaultfd);
            let handshake = received(move |mut socket| {
                let (first, rest) = ENTRY.as_bytes().split_at(ENTRY.len() / nr_parts);
                send(&socket, first, &[userfaultfd.as_fd()]);
                for part in rest.chunks(ENTRY.len() / nr_parts) {
                    socket.write_all(part).unwrap();
                }
            });
            let handshake = handshake.unwrap();
            assert_eq!(handshake.regions, [Region { address: 4096, size_bytes: 8192, offset: 0, page_bytes: 4096 }]);
            assert_eq!(file_of(&handshake.userfaultfd), identity, "a copy is the same file");
        }
    }

    #[test]
    fn older_names_and_unknown_fields_are_understood() {
        let Some(userfaultfd) = userfaultfd() else { return };
        let json = r#"[{"base_host_virt_addr":1,"size":2,"offset":3,"page_size_kib":2097152,"gpa_start":"\"]"}]"#;
        let handshake = received(move |socket| send(&socket, json.as_bytes(), &[userfaultfd.as_fd()])).unwrap();
        assert_eq!(handshake.regions[0].page_bytes, 2 << 20);
    }

    #[test]
    fn half_a_handshake_and_none() {
        for nr_bytes in [0, 1, ENTRY.len() - 1] {
            let error = received(move |mut socket| socket.write_all(&ENTRY.as_bytes()[..nr_bytes]).unwrap());
            assert!(matches!(error, Err(HandshakeError::Ended { nr_bytes: nr }) if nr == nr_bytes), "{error:?}");
        }
    }

    #[test]
    fn no_descriptor_two_many_and_another_kind() {
        let error = received(|mut socket| socket.write_all(ENTRY.as_bytes()).unwrap());
        assert!(matches!(error, Err(HandshakeError::NoDescriptor)), "{error:?}");
        for nr in [2, 3, 16] {
            let error = received(move |socket| send(&socket, ENTRY.as_bytes(), &vec![socket.as_fd(); nr]));
            assert!(
                matches!(&error, Err(HandshakeError::Io(e)) if e.kind() == io::ErrorKind::InvalidData),
                "{error:?}"
            );
        }
        let error = received(|socket| send(&socket, ENTRY.as_bytes(), &[socket.as_fd()]));
        assert!(matches!(error, Err(HandshakeError::Descriptor(NotUserfaultfd::Other { .. }))), "{error:?}");
    }

    #[test]
    fn json_that_never_ends_and_json_that_is_none() {
        let endless = |begin: &'static [u8], part: &'static [u8]| {
            received(move |mut socket| {
                socket.write_all(begin).unwrap();
                // Until the other side has had enough.
                while socket.write_all(&part.repeat(1000)).is_ok() {}
            })
        };
        assert!(matches!(endless(b"[", b"["), Err(HandshakeError::TooLong)));
        assert!(matches!(endless(b"[\"", b"]"), Err(HandshakeError::TooLong)));
        assert!(matches!(endless(b" ", b" "), Err(HandshakeError::TooLong)));
        for bad in ["{}", "x", "[1]", "[}", "[{}]", r#"[{"base_host_virt_addr":-1,"size":1,"offset":0}]"#] {
            let error = received(move |mut socket| socket.write_all(bad.as_bytes()).unwrap());
            assert!(matches!(error, Err(HandshakeError::Json { .. })), "{bad}: {error:?}");
        }
        let error = received(|mut socket| socket.write_all(b"[] []").unwrap());
        assert!(matches!(error, Err(HandshakeError::Behind)), "{error:?}");
    }

    proptest! {
        #[test]
        fn the_end_is_where_the_parser_has_it(text in r#"[\[\]{}"\\a1,: ]{0,24}"#) {
            let text = format!("[{text}");
            let mut stream = serde_json::Deserializer::from_str(&text).into_iter::<serde_json::Value>();
            if let Some(Ok(_)) = stream.next() {
                let nr_behind = text.len() - stream.byte_offset();
                prop_assert_eq!(ArrayEnd::default().feed(text.as_bytes()), Found::End { nr_behind });
            }
        }
    }
}
