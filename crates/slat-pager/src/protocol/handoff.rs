//! The handoff of a guest's userfaultfd that is proposed for Cloud Hypervisor (its pull request
//! 8657, open as of November 2026). Experimental: it may change, and this module with it.
//!
//! # Protocol
//! - The VMM connects and sends a frame: the length of what follows (u32, little-endian), then
//!   JSON, with one userfaultfd beside it (`SCM_RIGHTS`): `{"type": "handoff", "version": 1,
//!   "vmm_pid": N, "mode": "MISSING|...", "regions": [{"guest_phys_addr", "host_virt_addr", "size",
//!   "backing_file_offset"}]}`.
//! - The pager answers by one byte, 1, within two seconds. Without it the VMM does not start.
//! - A VMM that gets more memory sends `{"type": "add_region", ...}`. This pager does not serve it,
//!   and does not acknowledge: the VMM does not plug the memory in. What the message has is not
//!   settled: the review of the proposal asks for descriptors of the backing files in place of
//!   `vmm_pid`, and pull request 8664 proposes other, binary messages for the same.
//!   No snapshot has bytes of such memory, so each of its pages would be zeros; and a machine's regions
//!   and the file by which a successor takes it over would have to grow while threads use both.
//! - A VMM whose pager has died connects anew and hands over the same descriptor. It is acknowledged
//!   again if the next pager has taken the machine over, which has the descriptor from the VMM's
//!   process by then.

use std::io;
use std::os::fd::OwnedFd;

use serde::Deserialize;
use thiserror::Error;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use super::descriptors;
use crate::source::PAGE_BYTES;
use crate::userfaultfd::{NotUserfaultfd, Userfaultfd};
use crate::vm::Region;

/// The longest frame.
pub const MAX_BYTES: u32 = 256 << 10;
/// The version that is served.
pub const VERSION: u64 = 1;
/// The answer.
const ACKNOWLEDGED: u8 = 1;

/// What a VMM hands over.
#[derive(Debug)]
pub struct Handoff {
    /// The process of the VMM, as it says. The kernel says it, too (`SO_PEERCRED`).
    pub vmm_pid: i32,
    /// The regions as it says, unchecked; offsets are those in the file that backs the memory.
    pub regions: Vec<Region>,
    /// The descriptor.
    pub userfaultfd: Userfaultfd,
}

/// Why there is no handoff.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum HandoffError {
    #[error("the VMM closed its socket after {nr_bytes} bytes of a handoff")]
    Ended { nr_bytes: usize },
    #[error("the VMM announces a handoff of {nr_bytes} bytes; {MAX_BYTES} are possible")]
    TooLong { nr_bytes: u32 },
    #[error("the handoff is none: {why}")]
    Json { why: String },
    #[error("the handoff has version {version}; {VERSION} is served")]
    Version { version: u64 },
    #[error("the VMM registers its memory for {mode}, without MISSING")]
    Mode { mode: String },
    #[error("the VMM adds memory, which is not served")]
    AddsRegion,
    #[error("the handoff has no descriptor")]
    NoDescriptor,
    #[error(transparent)]
    Descriptor(#[from] NotUserfaultfd),
    #[error("cannot receive a handoff: {0}")]
    Io(#[from] io::Error),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Message {
    Handoff { version: u64, vmm_pid: i32, mode: String, regions: Vec<Entry> },
    AddRegion {},
}

#[derive(Debug, Deserialize)]
struct Entry {
    host_virt_addr: u64,
    size: u64,
    backing_file_offset: u64,
    #[serde(default = "small_pages")]
    page_size: u64,
}

fn small_pages() -> u64 {
    PAGE_BYTES
}

/// Receives a handoff, which is not acknowledged yet. The caller limits the time.
///
/// # Errors
/// [`HandoffError`].
pub async fn receive(stream: &UnixStream) -> Result<Handoff, HandoffError> {
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    let mut length = [0; 4];
    fill(stream, &mut length, &mut descriptors).await?;
    let nr_bytes = u32::from_le_bytes(length);
    if nr_bytes > MAX_BYTES {
        return Err(HandoffError::TooLong { nr_bytes });
    }
    let mut text = vec![0; nr_bytes as usize];
    fill(stream, &mut text, &mut descriptors).await?;
    let message = serde_json::from_slice(&text).map_err(|error| HandoffError::Json { why: error.to_string() })?;
    let Message::Handoff { version, vmm_pid, mode, regions } = message else { return Err(HandoffError::AddsRegion) };
    if version != VERSION {
        return Err(HandoffError::Version { version });
    }
    if !mode.split('|').any(|token| token.trim() == "MISSING") {
        return Err(HandoffError::Mode { mode });
    }
    let userfaultfd = Userfaultfd::from_fd(descriptors.pop().ok_or(HandoffError::NoDescriptor)?)?;
    let region = |entry: Entry| Region {
        address: entry.host_virt_addr,
        size_bytes: entry.size,
        offset: entry.backing_file_offset,
        page_bytes: entry.page_size,
    };
    Ok(Handoff { vmm_pid, regions: regions.into_iter().map(region).collect(), userfaultfd })
}

/// Tells the VMM that its faults are served.
///
/// # Errors
/// Of the socket.
pub async fn acknowledge(stream: &mut UnixStream) -> io::Result<()> {
    stream.write_all(&[ACKNOWLEDGED]).await
}

async fn fill(stream: &UnixStream, into: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> Result<(), HandoffError> {
    let mut nr_bytes = 0;
    while nr_bytes < into.len() {
        match descriptors::receive(stream, &mut into[nr_bytes..], descriptors, 1).await? {
            0 => return Err(HandoffError::Ended { nr_bytes }),
            nr_more => nr_bytes += nr_more,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream as StdStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    const GOOD: &str = r#"{"type":"handoff","version":1,"vmm_pid":7,"mode":"MISSING|WP","regions":
        [{"guest_phys_addr":0,"host_virt_addr":1048576,"size":8192,"backing_file_offset":4096}]}"#;

    /// What a VMM that sends `text` with `nr_descriptors`, and then nothing more, gives.
    async fn received(length: u32, text: &str, nr_descriptors: usize) -> Result<Handoff, HandoffError> {
        let (mut vmm, ours) = StdStream::pair().unwrap();
        let userfaultfd = Userfaultfd::open(0).ok();
        let fallback = std::fs::File::open("/dev/null").unwrap();
        let one = userfaultfd.as_ref().map_or(fallback.as_fd(), AsFd::as_fd);
        let descriptors = vec![one; nr_descriptors];
        let mut space = [MaybeUninit::uninit(); 256];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(nr_descriptors == 0 || ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&vmm, &[IoSlice::new(&length.to_le_bytes())], &mut ancillary, SendFlags::empty()).unwrap();
        vmm.write_all(text.as_bytes()).unwrap();
        drop(vmm);
        ours.set_nonblocking(true).unwrap();
        receive(&UnixStream::from_std(ours).unwrap()).await
    }

    async fn of(text: &str) -> Result<Handoff, HandoffError> {
        received(text.len() as u32, text, 1).await
    }

    #[tokio::test]
    async fn a_handoff_is_received() {
        if let Err(error) = Userfaultfd::open(0) {
            eprintln!("skipped: {error}");
            return;
        }
        let handoff = of(GOOD).await.unwrap();
        assert_eq!(handoff.vmm_pid, 7);
        let region = Region { address: 1 << 20, size_bytes: 8192, offset: 4096, page_bytes: 4096 };
        assert_eq!(handoff.regions, [region]);
    }

    #[tokio::test]
    async fn what_is_no_handoff_is_refused() {
        let length = GOOD.len() as u32;
        assert!(matches!(received(length, GOOD, 0).await, Err(HandoffError::NoDescriptor)));
        assert!(matches!(received(length, GOOD, 2).await, Err(HandoffError::Io(_))));
        assert!(matches!(received(length + 1, GOOD, 1).await, Err(HandoffError::Ended { .. })));
        assert!(matches!(received(length - 1, GOOD, 1).await, Err(HandoffError::Json { .. })));
        assert!(matches!(received(u32::MAX, GOOD, 1).await, Err(HandoffError::TooLong { .. })));
        let later = GOOD.replace("\"version\":1", "\"version\":2");
        assert!(matches!(of(&later).await, Err(HandoffError::Version { version: 2 })));
        let minor = GOOD.replace("MISSING|WP", "MINOR");
        assert!(matches!(of(&minor).await, Err(HandoffError::Mode { .. })));
        assert!(matches!(of(r#"{"type":"add_region","size":4096}"#).await, Err(HandoffError::AddsRegion)));
        assert!(matches!(of(r#"{"type":"other"}"#).await, Err(HandoffError::Json { .. })));
        assert!(matches!(of("[]").await, Err(HandoffError::Json { .. })));
    }
}
