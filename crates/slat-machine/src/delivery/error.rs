//! The errors of a delivery, on both sides.

use std::io;
use std::time::Duration;

use thiserror::Error;

use super::bitmap::BitmapError;
use super::ring::BadIndex;

/// A delivery that cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeliveryConfigError {
    /// Numbers of vCPUs, waiters or entries that are out of range.
    #[error(
        "{nr_vcpus} vCPUs with {nr_waiters} waiters and rings of {ring_entries} entries: there are 1 to 4096 vCPUs, 1 waiter \
         to one for each vCPU, and the entries are a power of two up to 4096"
    )]
    BadCounts {
        /// vCPUs.
        nr_vcpus: u32,
        /// Eventfds that they wait on.
        nr_waiters: u32,
        /// Entries of each ring.
        ring_entries: u32,
    },
    /// The other side could cut the file of the guest's memory short, which would kill a process
    /// that then accesses the memory.
    #[error(
        "the file of the guest's memory cannot be sealed against shrinking; it has to be a memfd with MFD_ALLOW_SEALING"
    )]
    UnsealedMemory {
        /// The kernel's error.
        source: io::Error,
    },
    /// The memory is not inside its file, or is larger than the bitmap, or starts or ends inside a
    /// page.
    #[error(
        "guest memory of {size_bytes} bytes at {offset_bytes:#x} of a file of {file_bytes} bytes, and a bitmap for {bitmap_bytes} \
         bytes"
    )]
    BadMemory {
        /// Where it starts in the file.
        offset_bytes: u64,
        /// Its size.
        size_bytes: u64,
        /// The size of the file.
        file_bytes: u64,
        /// The bytes that the bitmap has bits for.
        bitmap_bytes: u64,
    },
    /// A vCPU or waiter that does not exist, or that was taken before.
    #[error("{what} {number} is not there or was taken before")]
    Taken {
        /// "vCPU" or "waiter".
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// The kernel refused a call.
    #[error("{call} failed")]
    System {
        /// The call.
        call: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// A resolver that was not attached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// A resolver is attached, and lives.
    #[error("a resolver is attached already, epoch {epoch}")]
    AlreadyAttached {
        /// Its epoch.
        epoch: u64,
    },
    /// No resolver came in time.
    #[error("no resolver came within {waited:?}")]
    NoResolverCame {
        /// How long was waited.
        waited: Duration,
    },
    /// The delivery is closed.
    #[error("the delivery is closed")]
    Closed,
    /// The handshake with it failed.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
}

/// A handshake that failed, on either side.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The other side uses another protocol.
    #[error("the other side of the socket uses another protocol: its first word is {found:#x}")]
    BadMagic {
        /// Its first word.
        found: u64,
    },
    /// The other side uses another version.
    #[error("the other side has version {theirs} of the protocol, this side has {ours}")]
    Version {
        /// This side's.
        ours: u32,
        /// The other side's.
        theirs: u32,
    },
    /// More resolver threads than vCPUs, or none.
    #[error("{nr_threads} resolver threads for {nr_vcpus} vCPUs")]
    BadThreads {
        /// Threads.
        nr_threads: u32,
        /// vCPUs.
        nr_vcpus: u32,
    },
    /// Another number of descriptors arrived than was announced.
    #[error("{found} descriptors came with the handshake instead of {expected}")]
    MissingDescriptors {
        /// How many there should be.
        expected: u32,
        /// How many came.
        found: u32,
    },
    /// The kernel passed on fewer descriptors than the other side sent: this process may open no
    /// more files. (Or a security module has refused one, which looks the same.)
    #[error(
        "only {found} of the {expected} descriptors of the handshake could be opened: this process has too many open files for \
         its RLIMIT_NOFILE of {limit}"
    )]
    TooManyOpenFiles {
        /// How many there should be.
        expected: u32,
        /// How many could be opened.
        found: u32,
        /// The soft limit of RLIMIT_NOFILE, getrlimit(2).
        limit: u64,
    },
    /// A file does not have the size that the message names.
    #[error("the {what} has {found_bytes} bytes instead of {expected_bytes}")]
    WrongSize {
        /// The name of the file.
        what: &'static str,
        /// The size that it has to have, at least.
        expected_bytes: u64,
        /// The size that it has.
        found_bytes: u64,
    },
    /// The other side could cut a file short.
    #[error("the {what} is not sealed against shrinking")]
    NotSealed {
        /// The name of the file.
        what: &'static str,
    },
    /// The bitmap is refused.
    #[error(transparent)]
    Bitmap(#[from] BitmapError),
    /// Numbers that contradict each other.
    #[error("the other side sent impossible numbers: {what}")]
    BadNumbers {
        /// The numbers.
        what: &'static str,
    },
    /// The other side refused.
    #[error("the other side refused the handshake, code {code}")]
    Refused {
        /// Its reason.
        code: u32,
    },
    /// The other side closed the socket.
    #[error("the other side closed the socket in the handshake")]
    Closed,
    /// The other side was silent.
    #[error("the other side was silent for {waited:?}")]
    TimedOut {
        /// How long was waited.
        waited: Duration,
    },
    /// The kernel refused a call.
    #[error("{call} failed in the handshake")]
    System {
        /// The call.
        call: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Why a vCPU does not get its page. `NotCleared` and `PageFailed` end a request; after any other
/// error it is still in flight.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeliveryError {
    /// The resolver died, or was detached. [`DeliveryPort::resume`](super::DeliveryPort::resume)
    /// asks the next one.
    #[error("the resolver of epoch {epoch} is gone, and vCPU {vcpu} waits for page {page:#x}")]
    ResolverGone {
        /// The vCPU.
        vcpu: u32,
        /// The first page that it waits for.
        page: u64,
        /// The number of the resolver.
        epoch: u64,
    },
    /// There is no resolver (yet).
    #[error("vCPU {vcpu} has no resolver to ask")]
    NoResolver {
        /// The vCPU.
        vcpu: u32,
    },
    /// The resolver did not answer in time.
    #[error("vCPU {vcpu} waited {waited:?} for page {page:#x}")]
    TimedOut {
        /// The vCPU.
        vcpu: u32,
        /// The page.
        page: u64,
        /// How long it waited.
        waited: Duration,
    },
    /// As many requests are in flight as the ring has entries.
    #[error("vCPU {vcpu} cannot ask for page {page:#x}: all {ring_entries} entries of its ring are in use")]
    RingFull {
        /// The vCPU.
        vcpu: u32,
        /// The page.
        page: u64,
        /// Entries of a ring.
        ring_entries: u32,
    },
    /// The resolver has written an impossible index into the rings. They cannot be used any more:
    /// detach the resolver.
    #[error("vCPU {vcpu}: the {index} is {found}, not between {lowest} and {highest}")]
    RingCorrupt {
        /// The vCPU.
        vcpu: u32,
        /// The name of the index.
        index: &'static str,
        /// Its value.
        found: u64,
        /// The lowest possible value.
        lowest: u64,
        /// The highest possible value.
        highest: u64,
    },
    /// The resolver has completed a page several times without clearing its bit.
    #[error("the resolver completed page {page:#x} for vCPU {vcpu} {nr_answers} times and never cleared its bit")]
    NotCleared {
        /// The vCPU.
        vcpu: u32,
        /// The page.
        page: u64,
        /// Answers.
        nr_answers: u32,
    },
    /// The resolver cannot fill the page.
    #[error("page {page:#x} cannot be filled for vCPU {vcpu}, code {code}")]
    PageFailed {
        /// The vCPU.
        vcpu: u32,
        /// The page.
        page: u64,
        /// The resolver's reason.
        code: u32,
    },
    /// The bitmap has no such page.
    #[error("vCPU {vcpu} asked for page {page:#x}, but there are {nr_pages:#x}")]
    NoSuchPage {
        /// The vCPU.
        vcpu: u32,
        /// The page.
        page: u64,
        /// Pages of the bitmap.
        nr_pages: u64,
    },
    /// The page that is waited for was not asked for.
    #[error("vCPU {vcpu} waits for page {page:#x} that it has not asked for")]
    NotInFlight {
        /// The vCPU.
        vcpu: u32,
        /// The page.
        page: u64,
    },
    /// The delivery was closed.
    #[error("the delivery of vCPU {vcpu} was closed")]
    Closed {
        /// The vCPU.
        vcpu: u32,
    },
    /// The kernel refused a call.
    #[error("{call} failed for vCPU or waiter {number}")]
    System {
        /// The call.
        call: &'static str,
        /// The vCPU or waiter.
        number: u32,
        /// The kernel's error.
        source: io::Error,
    },
}

impl DeliveryError {
    pub(super) fn corrupt(vcpu: u32, bad: BadIndex) -> DeliveryError {
        let BadIndex { name, found, lowest, highest } = bad;
        DeliveryError::RingCorrupt { vcpu, index: name, found, lowest, highest }
    }
}

/// Why a resolver cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResolverError {
    /// The VMM has written an impossible index into the rings.
    #[error("vCPU {vcpu}: the {index} is {found}, not between {lowest} and {highest}")]
    RingCorrupt {
        /// The vCPU.
        vcpu: u32,
        /// The name of the index.
        index: &'static str,
        /// Its value.
        found: u64,
        /// The lowest possible value.
        lowest: u64,
        /// The highest possible value.
        highest: u64,
    },
    /// The VMM has asked for more than its rings hold.
    #[error("vCPU {vcpu} has asked for more than its rings hold")]
    RingFull {
        /// The vCPU.
        vcpu: u32,
    },
    /// The claim or the request is another resolver's. The page stays claimed there.
    #[error("page {page:#x} was claimed by another resolver")]
    OtherResolver {
        /// The page.
        page: u64,
    },
    /// The request is another shard's; only that shard writes to the vCPU's ring.
    #[error("vCPU {vcpu} is served by another shard")]
    OtherShard {
        /// The vCPU.
        vcpu: u32,
    },
    /// The kernel refused a call.
    #[error("{call} failed in the resolver")]
    System {
        /// The call.
        call: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl ResolverError {
    pub(super) fn corrupt(vcpu: u32, bad: BadIndex) -> ResolverError {
        let BadIndex { name, found, lowest, highest } = bad;
        ResolverError::RingCorrupt { vcpu, index: name, found, lowest, highest }
    }
}
