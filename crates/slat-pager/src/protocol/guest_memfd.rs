//! What Firecracker's branch for guest memory without a direct map says (`feature/secret-hiding`, of
//! August 2026). Experimental: it may change, and this module with it.
//!
//! # Protocol
//! - The handshake is [`firecracker`]'s, with three descriptors: a userfaultfd that is registered for
//!   MISSING and MINOR, the guest_memfd that is mapped there, and a memfd with a bit for each of its
//!   pages. A vCPU that touches a page whose bit is set leaves the guest. An entry has `gpa_start` and
//!   `is_guest_memfd`, too; its `offset` is that in the guest_memfd and in the snapshot.
//! - Then comes the text `no_exitless_apf`, or `exitless_apf:N` with three descriptors for each vCPU.
//!   The monitor sends the second only if a pager listens on `apf.socket` beside its own socket. This
//!   one does not: a vCPU waits in its monitor for each page, and rings are refused.
//! - Then frames: a length (u32, little-endian) and a bitcode of [`FaultRequest`] or [`FaultReply`].
//!   The page is that of `gpa`; where there is none, that at `offset` of the guest_memfd. A reply has
//!   what the request had, and the place and bytes that were filled.
//!
//! # Guarantees
//! Nothing of a monitor is believed: descriptors, regions and addresses are checked. It has at most
//! [`MOST_REQUESTS`] requests at a time.
//!
//! # When the pager dies
//! The monitor has one connection for each VM and makes no other, and a vCPU waits for the reply. So a
//! pager has the service manager keep its end of the connection ([`keep`](crate::daemon::listen::keep)),
//! and a request stays in the socket until it is noted in the machine's file, and there until it is
//! answered. A successor that gets the connection answers what was noted, and goes on. A reply may
//! come twice then: the vCPU leaves the guest once more.
//!
//! Without a service manager the connection is lost, and with it what the protocol has no other way
//! to answer:
//! - requests that the dead pager had read and not answered, or not read,
//! - those of vCPUs that touch a page before the successor has filled it.
//!
//! These vCPUs wait for ever, unless their monitor runs them again when its socket ends. The successor
//! fills all pages at which vCPUs leave the guest, first of all: those that do not wait by then need to
//! ask no more, and one that is run again finds its page. Threads of the monitor lose nothing.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::io::{Interest, Ready};
use tokio::net::UnixStream;

use super::descriptors;
use super::firecracker::{self, HandshakeError};
use super::requests::Requests;
use crate::source::PAGE_BYTES;
use crate::userfaultfd::{NotUserfaultfd, Userfaultfd};
use crate::vm::Region;
use crate::vm::vcpu_faults::{NoPage, VcpuFaults};

/// The longest frame behind its length: what the monitor's buffer takes.
pub const MAX_FRAME_BYTES: u32 = 4096 - 4;
/// Requests of one machine that are not answered yet. A vCPU has one.
pub const MOST_REQUESTS: usize = 1024;

const NO_RINGS: &[u8] = b"no_exitless_apf";
const RINGS: &[u8] = b"exitless_apf:";

/// What a monitor hands over.
#[derive(Debug)]
pub struct Handshake {
    /// The regions as it says, unchecked.
    pub regions: Vec<Region>,
    /// Where the guest has them.
    pub guest: GuestAddresses,
    /// The descriptor of its own threads' faults.
    pub userfaultfd: Userfaultfd,
    /// The bitmap.
    pub bitmap: OwnedFd,
}

/// Why there is no machine, or no more of it.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum GuestMemfdError {
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    #[error("the handshake has {nr} descriptors; three belong to memory of a guest_memfd")]
    Descriptors { nr: usize },
    #[error(transparent)]
    Descriptor(#[from] NotUserfaultfd),
    #[error("the region at {gpa_start:#x} of the guest is not of a guest_memfd")]
    OtherMemory { gpa_start: u64 },
    #[error("the region at {gpa_start:#x} of the guest wraps: it has {size} bytes")]
    Wraps { gpa_start: u64, size: u64 },
    #[error("two regions have the guest's address {gpa:#x}")]
    Overlap { gpa: u64 },
    #[error("the monitor sends rings for its vCPUs, which are not served")]
    Rings,
    #[error("neither `no_exitless_apf` nor rings follow the handshake, but {found:?}")]
    NoMode { found: String },
    #[error("the monitor announces a frame of {nr_bytes} bytes; {MAX_FRAME_BYTES} are possible")]
    TooLong { nr_bytes: u32 },
    #[error("a frame is no request for a page: {0}")]
    Frame(#[from] bitcode::Error),
    #[error("vCPU {vcpu} asks for the guest's address {gpa:#x}, which is in no region")]
    Outside { vcpu: u32, gpa: u64 },
    #[error("vCPU {vcpu}: {error}")]
    NoPage { vcpu: u32, error: NoPage },
    #[error("the monitor has more than {MOST_REQUESTS} requests at a time")]
    TooMany,
    #[error("the monitor closed its socket within a frame")]
    Ended,
    #[error("cannot use the monitor's socket: {0}")]
    Io(#[from] io::Error),
}

/// A vCPU waits for a page.
#[derive(Clone, Debug, PartialEq, Eq, bitcode::Encode, bitcode::Decode)]
pub struct FaultRequest {
    /// Its number.
    pub vcpu: u32,
    /// Where the page is in the guest_memfd, if there is no `gpa`.
    pub offset: u64,
    /// Of the monitor alone.
    pub flags: u64,
    /// The guest's address.
    pub gpa: Option<u64>,
}

/// The page of a request is there.
#[derive(Clone, Debug, PartialEq, Eq, bitcode::Encode, bitcode::Decode)]
pub struct FaultReply {
    /// As in the request.
    pub vcpu: Option<u32>,
    /// Where the page is in the guest_memfd.
    pub offset: u64,
    /// Bytes from there on that were filled.
    pub len: u64,
    /// As in the request.
    pub flags: u64,
    /// As in the request.
    pub gpa: Option<u64>,
    /// A hint: the page has zeros.
    pub zero: bool,
}

#[derive(Debug, Deserialize)]
struct Entry {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    gpa_start: u64,
    page_size: u64,
    is_guest_memfd: bool,
}

/// Where a guest has its regions.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GuestAddresses {
    /// By address: addresses, and the offset of the first.
    regions: Vec<(Range<u64>, u64)>,
}

impl GuestAddresses {
    fn new(entries: &[Entry]) -> Result<GuestAddresses, GuestMemfdError> {
        let mut regions = Vec::with_capacity(entries.len());
        for &Entry { gpa_start, size, offset, is_guest_memfd, .. } in entries {
            if !is_guest_memfd {
                return Err(GuestMemfdError::OtherMemory { gpa_start });
            }
            let end = gpa_start.checked_add(size).filter(|_| offset.checked_add(size).is_some());
            regions.push((gpa_start..end.ok_or(GuestMemfdError::Wraps { gpa_start, size })?, offset));
        }
        regions.sort_by_key(|(addresses, _)| addresses.start);
        if let Some(pair) = regions.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
            return Err(GuestMemfdError::Overlap { gpa: pair[1].0.start });
        }
        Ok(GuestAddresses { regions })
    }

    /// Where the guest's address is in the guest_memfd.
    pub fn offset_of(&self, gpa: u64) -> Option<u64> {
        let place = self.regions.partition_point(|(addresses, _)| addresses.start <= gpa).checked_sub(1)?;
        let (addresses, offset) = &self.regions[place];
        addresses.contains(&gpa).then(|| offset + (gpa - addresses.start))
    }
}

/// Receives a handshake and what follows it, up to the first frame. The caller limits the time.
///
/// # Errors
/// [`GuestMemfdError`].
pub async fn receive(stream: &UnixStream) -> Result<Handshake, GuestMemfdError> {
    let (entries, descriptors): (Vec<Entry>, _) = firecracker::receive_entries(stream, 3).await?;
    // Its memory is filled through the monitor's mapping: the second one is not used.
    let [userfaultfd, _guest_memfd, bitmap] =
        <[OwnedFd; 3]>::try_from(descriptors).map_err(|other| GuestMemfdError::Descriptors { nr: other.len() })?;
    let userfaultfd = Userfaultfd::from_fd(userfaultfd)?;
    let guest = GuestAddresses::new(&entries)?;
    receive_mode(stream).await?;
    let region = |entry: Entry| Region {
        address: entry.base_host_virt_addr,
        size_bytes: entry.size,
        offset: entry.offset,
        page_bytes: entry.page_size,
    };
    Ok(Handshake { regions: entries.into_iter().map(region).collect(), guest, userfaultfd, bitmap })
}

/// Frames follow without anything between: no byte more is taken than the text has.
async fn receive_mode(stream: &UnixStream) -> Result<(), GuestMemfdError> {
    let mut text = Vec::new();
    let mut byte = [0];
    // Those of rings: they are closed.
    let mut descriptors = Vec::new();
    while text != NO_RINGS {
        if descriptors::receive(stream, &mut byte, &mut descriptors, descriptors::MOST).await? == 0 {
            return Err(HandshakeError::Ended { nr_bytes: text.len() }.into());
        }
        text.push(byte[0]);
        if text == RINGS {
            return Err(GuestMemfdError::Rings);
        }
        if !NO_RINGS.starts_with(&text) && !RINGS.starts_with(&text) {
            return Err(GuestMemfdError::NoMode { found: String::from_utf8_lossy(&text).into_owned() });
        }
    }
    Ok(())
}

/// Answers requests until the monitor closes its socket, or the machine has ended; first those that a
/// dead pager has left.
///
/// # Errors
/// [`GuestMemfdError`]; the socket stays open.
pub async fn serve(stream: &UnixStream, guest: &GuestAddresses, faults: &VcpuFaults) -> Result<(), GuestMemfdError> {
    let (mut requests, mut left) = Requests::new(Arc::clone(faults.state()));
    let mut part = [0; 4 + MAX_FRAME_BYTES as usize];
    // What was noted and not taken from the socket is at its head, by the one look that it was noted from.
    let mut looked = peek(stream, &mut part).unwrap_or(0);
    let mut asked = FuturesUnordered::new();
    let ask = |place, request: FaultRequest| {
        let FaultRequest { vcpu, offset, gpa, .. } = request;
        let offset = gpa.map_or(Some(offset), |gpa| guest.offset_of(gpa));
        let offset = offset.ok_or(GuestMemfdError::Outside { vcpu, gpa: gpa.unwrap_or(0) })?;
        let offset = offset - offset % PAGE_BYTES;
        Ok::<_, GuestMemfdError>(async move { (faults.bring(offset).await, offset, request, place) })
    };
    loop {
        let (found, nr_bytes) = whole_frames(&part[..looked])?;
        for request in found {
            if left.iter().any(|(_, noted)| *noted == request) {
                continue;
            }
            let place = requests.note(&request).ok_or(GuestMemfdError::TooMany)?;
            asked.push(ask(place, request)?);
        }
        take(stream, nr_bytes)?;
        for (place, request) in left.drain(..) {
            asked.push(ask(place, request)?);
        }
        tokio::select! {
            found = received(stream, &mut part) => {
                looked = found?;
                if looked == 0 {
                    return Ok(());
                }
                if whole_frames(&part[..looked])?.1 == 0 {
                    return Err(GuestMemfdError::Ended);
                }
            }
            Some((brought, offset, request, place)) = asked.next() => {
                looked = 0;
                let FaultRequest { vcpu, flags, gpa, .. } = request;
                match brought {
                    Ok(()) => {}
                    Err(NoPage::Ended) => return Ok(()),
                    Err(error) => return Err(GuestMemfdError::NoPage { vcpu, error }),
                }
                let reply = FaultReply { vcpu: Some(vcpu), offset, len: PAGE_BYTES, flags, gpa, zero: false };
                send(stream, &frame(&bitcode::encode(&reply))).await?;
                requests.answered(place);
            }
        }
    }
}

/// Waits for a whole frame, or for the end. Returns how many bytes of the socket's are in `part`, and
/// leaves them there.
async fn received(stream: &UnixStream, part: &mut [u8]) -> io::Result<usize> {
    loop {
        let ready = stream.ready(Interest::READABLE).await?;
        match look(stream, part, ready) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            looked => return looked,
        }
    }
}

/// As [`received`]. `WouldBlock`: there is no whole frame, and the rest may come.
fn look(stream: &UnixStream, part: &mut [u8], ready: Ready) -> io::Result<usize> {
    stream.try_io(Interest::READABLE, || {
        let nr_bytes = peek(stream, part)?;
        // An error is one of the caller.
        let is_whole = nr_bytes == 0 || whole_frames(&part[..nr_bytes]).map_or(true, |(_, nr_whole)| nr_whole > 0);
        if is_whole || ready.is_read_closed() { Ok(nr_bytes) } else { Err(io::ErrorKind::WouldBlock.into()) }
    })
}

/// Copies what the socket has.
fn peek(stream: &UnixStream, part: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::net::recv(stream, part, RecvFlags::PEEK | RecvFlags::DONTWAIT)?.1)
}

/// Takes bytes from the socket that were looked at.
fn take(stream: &UnixStream, mut nr_bytes: usize) -> Result<(), GuestMemfdError> {
    let mut part = [0; 4 + MAX_FRAME_BYTES as usize];
    while nr_bytes > 0 {
        match rustix::net::recv(stream, &mut part[..nr_bytes], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(GuestMemfdError::Ended),
            Ok((_, nr_taken)) => nr_bytes -= nr_taken,
            Err(Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
    Ok(())
}

/// Sends a frame. A kernel's socket takes so few bytes whole, or none of them: a pager that is killed
/// leaves no part.
async fn send(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            written => bytes = &bytes[written?..],
        }
    }
    Ok(())
}

/// `body` behind its length.
fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(body);
    frame
}

/// The requests that `bytes` begins with, and how many bytes they take.
fn whole_frames(bytes: &[u8]) -> Result<(Vec<FaultRequest>, usize), GuestMemfdError> {
    let (mut requests, mut rest) = (Vec::new(), bytes);
    while let Some((length, behind)) = rest.split_first_chunk() {
        let nr_bytes = u32::from_le_bytes(*length);
        if nr_bytes > MAX_FRAME_BYTES {
            return Err(GuestMemfdError::TooLong { nr_bytes });
        }
        let Some((body, behind)) = behind.split_at_checked(nr_bytes as usize) else { break };
        requests.push(bitcode::decode(body)?);
        rest = behind;
    }
    Ok((requests, bytes.len() - rest.len()))
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::{AsFd, BorrowedFd};
    use std::os::unix::net::UnixStream as Blocking;
    use std::time::Duration;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn entry(gpa_start: u64, size: u64, offset: u64, is_guest_memfd: &str) -> String {
        format!(
            r#"{{"base_host_virt_addr":4096,"size":{size},"offset":{offset},"gpa_start":{gpa_start},"page_size":4096,
            "page_size_kib":4096,"is_guest_memfd":{is_guest_memfd}}}"#
        )
    }

    /// What a monitor gives that sends `array` with copies of a userfaultfd, then `mode`, and closes.
    async fn received(
        userfaultfd: &Userfaultfd,
        array: &str,
        nr_descriptors: usize,
        mode: &[u8],
    ) -> Result<Handshake, GuestMemfdError> {
        let (mut monitor, ours) = Blocking::pair().unwrap();
        let descriptors: Vec<BorrowedFd<'_>> = vec![userfaultfd.as_fd(); nr_descriptors];
        let mut space = [MaybeUninit::uninit(); 256];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(nr_descriptors == 0 || ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&monitor, &[IoSlice::new(array.as_bytes())], &mut ancillary, SendFlags::empty()).unwrap();
        monitor.write_all(mode).unwrap();
        drop(monitor);
        ours.set_nonblocking(true).unwrap();
        receive(&UnixStream::from_std(ours).unwrap()).await
    }

    #[tokio::test]
    async fn a_handshake_is_received_and_a_wrong_one_is_not() {
        let userfaultfd = match Userfaultfd::open(0) {
            Ok(userfaultfd) => userfaultfd,
            Err(error) => return println!("skipped: {error}"),
        };
        let good = format!("[{}]", entry(1 << 32, 8192, 4096, "true"));
        let handshake = received(&userfaultfd, &good, 3, NO_RINGS).await.unwrap();
        assert_eq!(handshake.regions, [Region { address: 4096, size_bytes: 8192, offset: 4096, page_bytes: 4096 }]);
        assert_eq!(handshake.guest.offset_of((1 << 32) + 4097), Some(8193));
        let two = |second: String| format!("[{},{second}]", entry(0, 8192, 0, "true"));
        type Is = fn(&GuestMemfdError) -> bool;
        let cases: [(String, usize, &[u8], Is); 13] = [
            (good.clone(), 0, b"", |e| matches!(e, GuestMemfdError::Descriptors { nr: 0 })),
            // Without a descriptor nothing divides both.
            (good.clone(), 0, NO_RINGS, |e| matches!(e, GuestMemfdError::Handshake(HandshakeError::Behind))),
            (good.clone(), 1, NO_RINGS, |e| matches!(e, GuestMemfdError::Descriptors { nr: 1 })),
            (good.clone(), 2, NO_RINGS, |e| matches!(e, GuestMemfdError::Descriptors { nr: 2 })),
            (good.clone(), 4, NO_RINGS, |e| matches!(e, GuestMemfdError::Handshake(HandshakeError::Io(_)))),
            (good.clone(), 3, b"no_exit", |e| {
                matches!(e, GuestMemfdError::Handshake(HandshakeError::Ended { nr_bytes: 7 }))
            }),
            (good.clone(), 3, b"exitless_apf:2", |e| matches!(e, GuestMemfdError::Rings)),
            (good.clone(), 3, &[9, 0, 0, 0], |e| matches!(e, GuestMemfdError::NoMode { .. })),
            (good.replace("true", "false"), 3, NO_RINGS, |e| matches!(e, GuestMemfdError::OtherMemory { .. })),
            (good.replace("gpa_start", "gpa"), 3, NO_RINGS, |e| {
                matches!(e, GuestMemfdError::Handshake(HandshakeError::Json { .. }))
            }),
            (two(entry(4096, 8192, 8192, "true")), 3, NO_RINGS, |e| {
                matches!(e, GuestMemfdError::Overlap { gpa: 4096 })
            }),
            (two(entry(u64::MAX - 4095, 8192, 8192, "true")), 3, NO_RINGS, |e| {
                matches!(e, GuestMemfdError::Wraps { .. })
            }),
            (two(entry(8192, 8192, u64::MAX, "true")), 3, NO_RINGS, |e| matches!(e, GuestMemfdError::Wraps { .. })),
        ];
        for (array, nr_descriptors, mode, is_expected) in cases {
            let error = received(&userfaultfd, &array, nr_descriptors, mode).await.unwrap_err();
            assert!(is_expected(&error), "{array}, {nr_descriptors}, {mode:?}: {error}");
        }
    }

    #[test]
    fn the_guests_addresses_are_found() {
        let entries: Vec<Entry> =
            serde_json::from_str(&format!("[{},{}]", entry(1 << 32, 8192, 4096, "true"), entry(0, 4096, 0, "true")))
                .unwrap();
        let guest = GuestAddresses::new(&entries).unwrap();
        for (gpa, offset) in [
            (0, Some(0)),
            (4095, Some(4095)),
            (4096, None),
            ((1 << 32) - 1, None),
            (1 << 32, Some(4096)),
            ((1 << 32) + 8191, Some(12287)),
            ((1 << 32) + 8192, None),
            (u64::MAX, None),
        ] {
            assert_eq!(guest.offset_of(gpa), offset, "{gpa:#x}");
        }
    }

    #[tokio::test]
    async fn a_part_of_a_frame_is_waited_for_without_work_and_is_an_end_at_the_end() {
        let cpu_time = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let (mut monitor, ours) = Blocking::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let ours = UnixStream::from_std(ours).unwrap();
        let one = frame(&bitcode::encode(&FaultRequest { vcpu: 1, offset: 2, flags: 3, gpa: None }));
        let mut part = [0; 4 + MAX_FRAME_BYTES as usize];
        monitor.write_all(&one[..5]).unwrap();
        let before = cpu_time();
        let waited = Duration::from_millis(300);
        tokio::time::timeout(waited, super::received(&ours, &mut part)).await.unwrap_err();
        let after = cpu_time();
        let used_ns = (after.tv_sec - before.tv_sec) * 1_000_000_000 + (after.tv_nsec - before.tv_nsec);
        assert!(used_ns < 100_000_000, "{used_ns} ns of CPU time in {waited:?}");
        monitor.write_all(&[&one[5..], &one[..7]].concat()).unwrap();
        assert_eq!(super::received(&ours, &mut part).await.unwrap(), one.len() + 7);
        assert_eq!(whole_frames(&part[..one.len() + 7]).unwrap().1, one.len());
        // It is there until it is taken.
        assert_eq!(super::received(&ours, &mut part).await.unwrap(), one.len() + 7);
        take(&ours, one.len()).unwrap();
        drop(monitor);
        assert_eq!(super::received(&ours, &mut part).await.unwrap(), 7);
        take(&ours, 7).unwrap();
        assert_eq!(super::received(&ours, &mut part).await.unwrap(), 0);
    }

    #[test]
    fn frames_come_in_parts_and_wrong_ones_are_refused() {
        let request = FaultRequest { vcpu: 3, offset: 0, flags: 16, gpa: Some(1 << 40) };
        let one = frame(&bitcode::encode(&request));
        let bytes = one.repeat(2);
        for nr_bytes in 0..=bytes.len() {
            let (found, nr_whole) = whole_frames(&bytes[..nr_bytes]).unwrap();
            assert_eq!(nr_whole, nr_bytes / one.len() * one.len());
            assert_eq!(found, vec![request.clone(); nr_bytes / one.len()]);
        }
        let refused = |bytes: &[u8]| whole_frames(bytes).unwrap_err();
        assert!(matches!(refused(&u32::MAX.to_le_bytes()), GuestMemfdError::TooLong { nr_bytes: u32::MAX }));
        assert!(matches!(refused(&frame(&[0xff; 40])), GuestMemfdError::Frame(_)));
        assert!(matches!(refused(&frame(&[])), GuestMemfdError::Frame(_)));
    }
}
