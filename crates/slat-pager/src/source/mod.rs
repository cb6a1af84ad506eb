//! Where the bytes of a snapshot come from: a file of memory, layers of such files, chunks by their
//! content, an object store, another pager; or made from the numbers of pages.
//!
//! # Protocol
//! - A source is what it was when it was opened. If that changes, reads fail with
//!   [`SourceError::Changed`]; they never return bytes of another snapshot.
//! - A read returns all bytes that it was asked for, or an error and no byte counts.
//! - An error says whether another try may succeed ([`SourceError::may_pass`]). Retries are the
//!   source's own, as far as it knows how; the caller decides what becomes of a guest that waits.
//! - Many threads read one source at once.

#[cfg(feature = "full")]
pub mod cache;
#[cfg(feature = "full")]
pub mod chunked;
pub(crate) mod holes;
pub mod layers;
pub mod memory_file;
#[cfg(feature = "full")]
pub mod objects;
pub mod pages;
pub mod pattern;
pub mod peer;
#[cfg(feature = "full")]
pub mod remote;
pub mod requests;

use std::fmt::{self, Debug, Display, Formatter};
use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use memmap2::MmapRaw;
use rustix::io::Errno;
use thiserror::Error;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;

use crate::userfaultfd::{Stopped, Userfaultfd, Wake};

/// Bytes of the smallest page.
pub const PAGE_BYTES: u64 = 4096;

/// The bytes of one page.
pub type PageBytes = [u8; PAGE_BYTES as usize];

/// The bytes of a snapshot's memory.
pub trait Source: Debug + Send + Sync {
    /// How many there are; a multiple of [`PAGE_BYTES`].
    fn size_bytes(&self) -> u64;

    /// What tells these bytes from those of every other snapshot: caches and working sets are kept
    /// by it.
    fn identity(&self) -> Identity;

    /// What a read should have, in bytes: a power of two from [`PAGE_BYTES`] on. A smaller read
    /// costs as much as one of so many bytes, aligned to them.
    fn granule_bytes(&self) -> u64;

    /// What tells the bytes of a block (number `block` of [`Source::granule_bytes`] each; the last
    /// one may be shorter) from all others: caches keep them by it. Blocks of two snapshots that
    /// have the same bytes may share one.
    fn block_identity(&self, block: u64) -> Identity {
        numbered_block(self, block)
    }

    /// Bytes that are in memory of this process, or come into it by being touched: no read is
    /// needed. `None`: a read is.
    fn mapped(&self, _range: Range<u64>) -> Option<Mapped<'_>> {
        None
    }

    /// Whether [`Source::mapped`] has all bytes, except for those that wait for a disk of this
    /// computer.
    fn is_mapped(&self) -> bool {
        false
    }

    /// Whether all bytes of `range` are known to be zero, without a read.
    fn is_zero(&self, _range: Range<u64>) -> bool {
        false
    }

    /// Whether [`Source::read_ready`] has the bytes of `range`, as far as is known.
    fn is_ready(&self, range: Range<u64>) -> bool {
        self.mapped(range).is_some()
    }

    /// As [`Source::read`], if that needs to wait for no disk and no server. `None`: nothing was
    /// done.
    fn read_ready(&self, _offset: u64, _into: &mut [u8]) -> Option<Result<(), SourceError>> {
        None
    }

    /// Fills `into` with the bytes from `offset` on.
    ///
    /// # Errors
    /// [`SourceError`]. What `into` has then is not defined.
    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>>;

    /// The bytes of `range`, in memory that may be a cache's: they are not copied where that can be.
    ///
    /// # Errors
    /// [`SourceError`].
    fn read_shared(&self, range: Range<u64>) -> BoxFuture<'_, Result<Bytes, SourceError>> {
        read_new(self, range).boxed()
    }

    /// The bytes of `range`, if they are in memory that nothing changes: no read is needed.
    fn cached(&self, _range: Range<u64>) -> Option<Bytes> {
        None
    }

    /// A fault has asked for bytes up to `end`: others may follow it. What is fetched because of
    /// that is fetched by tasks of `runtime`, and no read waits for it.
    fn read_ahead(&self, _end: u64, _runtime: &Handle) {}
}

/// Reads `range` to memory of its own.
async fn read_new<S: Source + ?Sized>(source: &S, range: Range<u64>) -> Result<Bytes, SourceError> {
    let nr_bytes = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
    check_range(range.start, nr_bytes, source.size_bytes())?;
    let mut bytes = vec![0; nr_bytes];
    source.read(range.start, &mut bytes).await?;
    Ok(Bytes::from(bytes))
}

/// The identity of a block by the snapshot's and its number.
fn numbered_block<S: Source + ?Sized>(source: &S, block: u64) -> Identity {
    let granule = source.granule_bytes().to_le_bytes();
    Identity::new("block", [&source.identity().as_bytes()[..], &granule, &block.to_le_bytes()])
}

/// Names the bytes of one snapshot. Two sources with one identity have the same bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identity([u8; 32]);

impl Identity {
    /// The identity of a source of a `kind` (`"file"`, `"chunks"`) that its `parts` tell from every
    /// other of that kind.
    pub fn new<'p>(kind: &'p str, parts: impl IntoIterator<Item = &'p [u8]>) -> Identity {
        let mut hasher = blake3::Hasher::new();
        // Each part follows its length: no two lists of parts are the same bytes.
        for part in [kind.as_bytes()].into_iter().chain(parts) {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Identity(*hasher.finalize().as_bytes())
    }

    /// The identity that [`Identity::as_bytes`] was of.
    pub const fn from_bytes(bytes: [u8; 32]) -> Identity {
        Identity(bytes)
    }

    /// Its bytes, for a file.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl Display for Identity {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Debug for Identity {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

/// Bytes of a mapping whose file others may change or truncate at any time: only the kernel reads
/// them.
#[derive(Clone, Copy, Debug)]
pub struct Mapped<'s> {
    start: *const u8,
    nr_bytes: usize,
    _source: PhantomData<&'s [u8]>,
}

impl<'s> Mapped<'s> {
    /// Bytes of this process, which nothing changes for `'s`.
    pub fn of(bytes: &'s [u8]) -> Mapped<'s> {
        Mapped { start: bytes.as_ptr(), nr_bytes: bytes.len(), _source: PhantomData }
    }

    /// The bytes of a mapping, which stays for `'s`.
    pub fn of_mapping(mapping: &'s MmapRaw) -> Mapped<'s> {
        Mapped { start: mapping.as_ptr(), nr_bytes: mapping.len(), _source: PhantomData }
    }

    /// The address of the first byte, for a system call that fails where nothing is mapped.
    pub fn address(self) -> u64 {
        self.start.expose_provenance() as u64
    }

    /// How many bytes there are.
    pub fn nr_bytes(self) -> usize {
        self.nr_bytes
    }

    /// Fills the pages at `address` with these bytes, whole pages.
    ///
    /// # Errors
    /// [`Stopped`]; `EFAULT`: the file is too short.
    pub fn fill(self, userfaultfd: &Userfaultfd, address: u64, wake: Wake) -> Result<(), Stopped> {
        userfaultfd.copy_from(address, self.address(), self.nr_bytes as u64, wake)
    }

    /// The bytes of `range`, which lies in these.
    #[must_use]
    pub fn part(self, range: Range<u64>) -> Mapped<'s> {
        assert!(range.start <= range.end && range.end <= self.nr_bytes as u64, "{range:?} of {}", self.nr_bytes);
        let nr_bytes = (range.end - range.start) as usize;
        Mapped { start: self.start.wrapping_add(range.start as usize), nr_bytes, _source: PhantomData }
    }
}

/// Does `work`, which may wait, in a thread for that. `what` is it, for the error of a thread that
/// panics.
pub(crate) async fn blocking<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, SourceError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| SourceError::Io { what: what.to_string(), error: io::Error::other(error) })
}

/// Does `work`, which may wait for a disk, in one of `places`. A caller that gives up leaves it
/// behind: a thread that waits for a disk cannot be stopped. It keeps its place, so that work which
/// is left behind never has more threads than places.
pub(crate) async fn in_place_of<T: Send + 'static>(
    places: &Arc<Semaphore>,
    what: &str,
    work: impl Future<Output = Result<T, SourceError>> + Send + 'static,
) -> Result<T, SourceError> {
    let place = Arc::clone(places).acquire_owned().await.expect("it is never closed");
    let work = tokio::spawn(async move {
        let done = work.await;
        drop(place);
        done
    });
    let failed = |error| SourceError::Io { what: what.to_string(), error: io::Error::other(error) };
    work.await.unwrap_or_else(|error| Err(failed(error)))
}

/// Why bytes cannot be had.
#[derive(Debug, Error)]
pub enum SourceError {
    /// They are behind the end.
    #[error("bytes {}..{} were asked for, and the snapshot has {size_bytes}", range.start, range.end)]
    OutOfRange {
        /// What was asked for.
        range: Range<u64>,
        /// How many there are.
        size_bytes: u64,
    },
    /// The snapshot is not the one that was opened.
    #[error("the snapshot has changed since it was opened: {what}")]
    Changed {
        /// What differs.
        what: String,
    },
    /// Bytes are not those that were written: their checksum differs.
    #[error("bytes {}..{} are not what was written", range.start, range.end)]
    Corrupt {
        /// Where.
        range: Range<u64>,
    },
    /// It is no snapshot, or one that this program cannot read.
    #[error("{snapshot} is no snapshot that can be used: {why}")]
    Malformed {
        /// Its name.
        snapshot: String,
        /// What is wrong.
        why: String,
    },
    /// There is none.
    #[error("there is no {what}")]
    NotThere {
        /// What was looked for.
        what: String,
    },
    /// A call of the operating system failed.
    #[error("cannot {what}: {error}")]
    Io {
        /// What was tried.
        what: String,
        /// The reason.
        error: io::Error,
    },
    /// A server does not answer, or refuses for now.
    #[error("{server} does not serve for now: {why}")]
    Unavailable {
        /// The server.
        server: String,
        /// What it said.
        why: String,
    },
    /// A server refuses for good.
    #[error("{server} refuses: {why}")]
    Refused {
        /// The server.
        server: String,
        /// What it said.
        why: String,
    },
}

impl SourceError {
    /// Whether another try may succeed.
    pub fn may_pass(&self) -> bool {
        match self {
            SourceError::Unavailable { .. } => true,
            SourceError::Io { error, .. } => {
                // What this process lacks for now is nothing that is wrong with the snapshot.
                matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
                    || matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
                    )
            }
            _ => false,
        }
    }
}

/// Checks that a source of `size_bytes` bytes has `nr_bytes` bytes from `offset` on.
///
/// # Errors
/// [`SourceError::OutOfRange`].
pub fn check_range(offset: u64, nr_bytes: usize, size_bytes: u64) -> Result<(), SourceError> {
    match offset.checked_add(nr_bytes as u64) {
        Some(end) if end <= size_bytes => Ok(()),
        end => Err(SourceError::OutOfRange { range: offset..end.unwrap_or(u64::MAX), size_bytes }),
    }
}

/// The parts of `into`, which begins at `offset`, in units of `unit_bytes`, and where each begins.
fn parts(offset: u64, mut into: &mut [u8], unit_bytes: u64) -> Vec<(u64, &mut [u8])> {
    let (mut parts, mut at) = (Vec::new(), offset);
    while !into.is_empty() {
        let nr_bytes = (unit_bytes - at % unit_bytes).min(into.len() as u64);
        let (part, behind) = std::mem::take(&mut into).split_at_mut(nr_bytes as usize);
        into = behind;
        parts.push((at, part));
        at += nr_bytes;
    }
    parts
}
