//! The errors of a delivery, on both sides.

use std::io;
use std::time::Duration;

use thiserror::Error;

/// A delivery that cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum DeliveryConfigError {
    /// Numbers of vCPUs, waiters or entries that are out of range.
    #[error(
        "{nr_vcpus} vCPUs with {nr_waiters} waiters and rings of {ring_entries} entries: there are 1 to 4096 vCPUs, 1 waiter \
         to one for each vCPU, and the entries are a power of two up to 4096"
    )]
    BadCounts { nr_vcpus: u32, nr_waiters: u32, ring_entries: u32 },
    /// The other side could cut the file of the guest's memory short, which would kill a process
    /// that then accesses the memory.
    #[error(
        "the file of the guest's memory cannot be sealed against shrinking; it has to be a memfd with MFD_ALLOW_SEALING"
    )]
    UnsealedMemory { source: io::Error },
    /// The memory is not inside its file, or is larger than the bitmap, or starts or ends inside a
    /// page.
    #[error(
        "guest memory of {size_bytes} bytes at {offset_bytes:#x} of a file of {file_bytes} bytes, and a bitmap for {bitmap_bytes} \
         bytes"
    )]
    BadMemory {
        offset_bytes: u64,
        size_bytes: u64,
        file_bytes: u64,
        /// The bytes that the bitmap has bits for.
        bitmap_bytes: u64,
    },
    /// A size that pages do not have.
    #[error("a bit of the bitmap for {page_bytes} bytes: there are pages of 4 KiB, 2 MiB and 1 GiB")]
    BadPage { page_bytes: u64 },
    /// A bitmap for no pages, or for more than a file can have bits.
    #[error("a userfault bitmap of {nr_pages} pages")]
    BadBitmap { nr_pages: u64 },
    /// A vCPU or waiter that does not exist, or that was taken before.
    #[error("{what} {number} is not there or was taken before")]
    Taken { what: &'static str, number: u32 },
    /// The kernel refused a call.
    #[error("{call} failed")]
    System { call: &'static str, source: io::Error },
}

/// A resolver that was not attached: what the VMM finds, or the resolver.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum AttachError {
    /// A resolver is attached, and lives.
    #[error("a resolver is attached already, epoch {epoch}")]
    AlreadyAttached { epoch: u64 },
    /// The delivery is closed.
    #[error("the delivery is closed")]
    DeliveryClosed,
    /// The other side uses another protocol.
    #[error("the other side of the socket uses another protocol: its first word is {found:#x}")]
    BadMagic { found: u64 },
    /// The other side uses another version.
    #[error("the other side has version {theirs} of the protocol, this side has {ours}")]
    Version { ours: u32, theirs: u32 },
    /// More resolver threads than vCPUs, or none.
    #[error("{nr_threads} resolver threads for {nr_vcpus} vCPUs")]
    BadThreads { nr_threads: u32, nr_vcpus: u32 },
    /// Another number of descriptors arrived than was announced.
    #[error("{found} descriptors came with the handshake instead of {expected}")]
    MissingDescriptors { expected: u32, found: u32 },
    /// The kernel passed on fewer descriptors than the other side sent: this process may open no
    /// more files. (Or a security module has refused one, which looks the same.)
    #[error(
        "only {found} of the {expected} descriptors of the handshake could be opened: this process has too many open files for \
         its RLIMIT_NOFILE of {limit}"
    )]
    TooManyOpenFiles { expected: u32, found: u32, limit: u64 },
    /// A file does not have the size that the message names.
    #[error("the {what} has {found_bytes} bytes instead of {expected_bytes}")]
    WrongSize {
        what: &'static str,
        /// The size that it has to have, at least.
        expected_bytes: u64,
        found_bytes: u64,
    },
    /// The other side could cut a file short.
    #[error("the {what} is not sealed")]
    NotSealed { what: &'static str },
    /// Numbers that contradict each other.
    #[error("the other side sent impossible numbers: {what}")]
    BadNumbers { what: &'static str },
    /// The other side refused.
    #[error("the other side refused the handshake, code {code}")]
    Refused { code: u32 },
    /// The other side closed the socket.
    #[error("the other side closed the socket in the handshake")]
    SocketClosed,
    /// The other side was silent.
    #[error("the other side was silent for {waited:?}")]
    TimedOut { waited: Duration },
    /// The kernel refused a call.
    #[error("{call} failed, and no resolver is attached")]
    System { call: &'static str, source: io::Error },
}

/// An index in shared memory that cannot be right.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("the {name} is {found}, not between {lowest} and {highest}")]
pub struct BadIndex {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub found: u64,
    /// The lowest possible value.
    pub lowest: u64,
    /// The highest possible value.
    pub highest: u64,
}

/// Why a vCPU does not get its page. `NotCleared` and `PageFailed` end a request; after any other
/// error it is still in flight.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum DeliveryError {
    /// The resolver died, or was detached. [`DeliveryPort::resume`](super::DeliveryPort::resume)
    /// asks the next one.
    #[error("the resolver of epoch {epoch} is gone, and vCPU {vcpu} waits for page {page:#x}")]
    ResolverGone { vcpu: u32, page: u64, epoch: u64 },
    /// There is no resolver (yet).
    #[error("vCPU {vcpu} has no resolver to ask")]
    NoResolver { vcpu: u32 },
    /// The resolver did not answer in time.
    #[error("vCPU {vcpu} waited {waited:?} for page {page:#x}")]
    TimedOut { vcpu: u32, page: u64, waited: Duration },
    /// As many requests are in flight as the ring has entries.
    #[error("vCPU {vcpu} cannot ask for page {page:#x}: all {ring_entries} entries of its ring are in use")]
    RingFull { vcpu: u32, page: u64, ring_entries: u32 },
    /// The resolver has written an impossible index into the rings. They cannot be used any more:
    /// detach the resolver.
    #[error("vCPU {vcpu}: {bad}")]
    RingCorrupt { vcpu: u32, bad: BadIndex },
    /// The resolver has completed a page several times without clearing its bit.
    #[error("the resolver completed page {page:#x} for vCPU {vcpu} {nr_answers} times and never cleared its bit")]
    NotCleared { vcpu: u32, page: u64, nr_answers: u32 },
    /// The resolver cannot fill the page.
    #[error("page {page:#x} cannot be filled for vCPU {vcpu}, code {code}")]
    PageFailed { vcpu: u32, page: u64, code: u32 },
    /// The bitmap has no such page.
    #[error("vCPU {vcpu} asked for page {page:#x}, but there are {nr_pages:#x}")]
    NoSuchPage { vcpu: u32, page: u64, nr_pages: u64 },
    /// The page that is waited for was not asked for.
    #[error("vCPU {vcpu} waits for page {page:#x} that it has not asked for")]
    NotInFlight { vcpu: u32, page: u64 },
    /// The delivery was closed.
    #[error("the delivery of vCPU {vcpu} was closed")]
    Closed { vcpu: u32 },
    /// The kernel refused a call.
    #[error("{call} failed for vCPU or waiter {number}")]
    System { call: &'static str, number: u32, source: io::Error },
}

/// Why a resolver cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum ResolverError {
    /// The VMM has written an impossible index into the rings.
    #[error("vCPU {vcpu}: {bad}")]
    RingCorrupt { vcpu: u32, bad: BadIndex },
    /// The VMM has asked for more than its rings hold.
    #[error("vCPU {vcpu} has asked for more than its rings hold")]
    RingFull { vcpu: u32 },
    /// The claim or the request is another resolver's. The page stays claimed there.
    #[error("page {page:#x} was claimed by another resolver")]
    OtherResolver { page: u64 },
    /// The request is another shard's; only that shard writes to the vCPU's ring.
    #[error("vCPU {vcpu} is served by another shard")]
    OtherShard { vcpu: u32 },
    /// The kernel refused a call.
    #[error("{call} failed in the resolver")]
    System { call: &'static str, source: io::Error },
}
