//! Guest memory that is a memfd of ours, filled from a source: each byte at most once, on demand.
//!
//! # Guarantees
//! - No byte that a guest wrote is overwritten: a unit is filled once, before it is called present.
//! - [`fill`](SharedMemory::fill) returns `Ok` after all bytes of its range are in the memfd. A
//!   unit whose fill failed, or was dropped, is absent again.
//! - Two fills of one unit read the source once.
//!
//! # Use
//! A VMM maps the memfd and registers it with a userfaultfd (MISSING and MINOR). A page that the
//! memfd has is still not mapped there; the VMM, or the pager for it, maps it by `UFFDIO_CONTINUE`
//! once `fill` has returned. Thus a unit which is half written is never seen.
//!
//! # Huge pages
//! Memory of pages of 2 MiB has a memfd of them, which no call writes: it is mapped here, all its pages
//! are reserved from the start, and a page is copied there after it has its memory. The memfd cannot be
//! cut. A VMM that takes pages out of it while they are copied may end this process.
//!
//! # Implementation
//! The memory is in units, of the size that the source reads best. Each has a state: absent,
//! filling, present. A fill claims absent units by compare-and-exchange; one that finds `filling`
//! waits until that changes.

mod write;

use std::fmt::{self, Debug, Formatter};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

use self::write::write_mapped;
use crate::linux::mapping::MappedMemory;
use crate::source::{Identity, PAGE_BYTES, Source, SourceError, check_range};

/// The least and the most that is filled at once.
const UNIT_BYTES: Range<u64> = 64 << 10..2 << 20;
/// How many bytes of buffers the fills of one memory may have at once.
const BUFFER_BYTES: u64 = 32 << 20;

/// Bytes of a huge page.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

const ABSENT: u8 = 0;
const FILLING: u8 = 1;
const PRESENT: u8 = 2;

/// See the [module](self).
pub struct SharedMemory {
    memfd: OwnedFd,
    /// The source's bytes in the memfd, if it is of huge pages.
    huge: Option<MappedMemory>,
    /// Where the source's first byte is in the memfd.
    start_bytes: u64,
    source: Arc<dyn Source>,
    unit_bytes: u64,
    units: Box<[AtomicU8]>,
    nr_present: AtomicU64,
    /// A unit is not `FILLING` any more.
    changed: Notify,
    buffers: Semaphore,
}

/// What [`SharedMemory::try_fill`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Filled {
    /// All bytes are there.
    Now,
    /// All bytes are there, and some came from the source's cache.
    FromCache,
    /// The source must be read, or another fill waited for.
    Waits,
}

impl SharedMemory {
    /// An empty memfd, which has the bytes of `source` from `start_bytes` on once they are filled.
    ///
    /// # Errors
    /// Of the operating system; a `start_bytes` that is no multiple of a page or too large.
    pub fn new(name: &str, start_bytes: u64, source: Arc<dyn Source>) -> io::Result<SharedMemory> {
        let size_bytes = start_bytes
            .checked_add(source.size_bytes())
            .filter(|size_bytes| start_bytes.is_multiple_of(PAGE_BYTES) && *size_bytes <= i64::MAX as u64)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let memfd = memfd_create(name, MemfdFlags::CLOEXEC)?;
        ftruncate(&memfd, size_bytes)?;
        let unit_bytes = source.granule_bytes().clamp(UNIT_BYTES.start, UNIT_BYTES.end);
        SharedMemory::of(memfd, None, start_bytes, source, unit_bytes)
    }

    /// As [`new`](Self::new), of huge pages.
    ///
    /// # Errors
    /// As there; there are too few free huge pages; parts of huge pages.
    pub fn of_huge_pages(name: &str, start_bytes: u64, source: Arc<dyn Source>) -> io::Result<SharedMemory> {
        let of_parts = || io::Error::new(io::ErrorKind::InvalidInput, "it is not of whole huge pages");
        let nr_bytes = source.size_bytes();
        let size_bytes = start_bytes
            .checked_add(nr_bytes)
            .filter(|size_bytes| {
                (start_bytes | nr_bytes).is_multiple_of(HUGE_PAGE_BYTES) && *size_bytes <= i64::MAX as u64
            })
            .ok_or_else(of_parts)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        let memfd = memfd_create(name, flags)?;
        ftruncate(&memfd, size_bytes)?;
        fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = MappedMemory::of_file(memfd.as_fd(), start_bytes, nr_bytes).map_err(|error| {
            let why = format!("{} huge pages of 2 MiB are not free: {error}", nr_bytes / HUGE_PAGE_BYTES);
            io::Error::new(error.kind(), why)
        })?;
        SharedMemory::of(memfd, Some(mapping), start_bytes, source, HUGE_PAGE_BYTES)
    }

    fn of(
        memfd: OwnedFd,
        huge: Option<MappedMemory>,
        start_bytes: u64,
        source: Arc<dyn Source>,
        unit_bytes: u64,
    ) -> io::Result<SharedMemory> {
        let nr_units =
            usize::try_from(source.size_bytes().div_ceil(unit_bytes)).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(SharedMemory {
            memfd,
            huge,
            start_bytes,
            source,
            unit_bytes,
            units: (0..nr_units).map(|_| AtomicU8::new(ABSENT)).collect(),
            nr_present: AtomicU64::new(0),
            changed: Notify::new(),
            buffers: Semaphore::new((BUFFER_BYTES / unit_bytes) as usize),
        })
    }

    /// What tells its bytes from those of every other snapshot.
    pub fn identity(&self) -> Identity {
        self.source.identity()
    }

    /// How many bytes the source has.
    pub fn size_bytes(&self) -> u64 {
        self.source.size_bytes()
    }

    /// How many bytes are filled at once.
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// How many bytes are there.
    pub fn present_bytes(&self) -> u64 {
        // A count for people.
        (self.nr_present.load(Ordering::Relaxed) * self.unit_bytes).min(self.size_bytes())
    }

    /// Where in the memfd byte `offset` of the source is.
    pub fn memfd_offset(&self, offset: u64) -> u64 {
        self.start_bytes + offset
    }

    /// Whether all bytes of `range` are there.
    pub fn is_present(&self, range: Range<u64>) -> bool {
        self.units_of(&range).all(|unit| self.units[unit].load(Ordering::Acquire) == PRESENT)
    }

    /// Fills `range` if that takes no read of the source: bytes that are zero, mapped here, or in
    /// its cache. The call may wait for a disk, as any access to mapped memory.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn try_fill(&self, range: Range<u64>) -> Result<Filled, SourceError> {
        self.check(&range)?;
        let mut filled = Filled::Now;
        for unit in self.units_of(&range) {
            let bytes = self.bytes_of(unit);
            match self.units[unit].load(Ordering::Acquire) {
                PRESENT => continue,
                FILLING => return Ok(Filled::Waits),
                _ => {}
            }
            let cached = match self.needs_no_read(&bytes) {
                true => None,
                false => match self.source.cached(bytes.clone()) {
                    None => return Ok(Filled::Waits),
                    cached => cached,
                },
            };
            let Some(claim) = self.claim(unit) else { return Ok(Filled::Waits) };
            match cached {
                Some(cached) => {
                    self.write(&cached, bytes.start)?;
                    filled = Filled::FromCache;
                }
                None if !self.fill_without_read(&bytes)? => return Ok(Filled::Waits),
                None => {}
            }
            claim.done();
        }
        Ok(filled)
    }

    /// A fault has asked for bytes up to `end`: see [`Source::read_ahead`].
    pub fn read_ahead(&self, end: u64, runtime: &Handle) {
        self.source.read_ahead(end.next_multiple_of(self.unit_bytes).min(self.size_bytes()), runtime);
    }

    /// Fills `range`.
    ///
    /// # Errors
    /// [`SourceError`].
    pub async fn fill(&self, range: Range<u64>) -> Result<(), SourceError> {
        self.check(&range)?;
        for unit in self.units_of(&range) {
            while self.units[unit].load(Ordering::Acquire) != PRESENT {
                // Enlisted before the claim is tried: a change after it is not missed.
                let changed = self.changed.notified();
                let Some(claim) = self.claim(unit) else {
                    if self.units[unit].load(Ordering::Acquire) == FILLING {
                        changed.await;
                    }
                    continue;
                };
                let bytes = self.bytes_of(unit);
                if !self.fill_without_read(&bytes)? {
                    let _permit = self.buffers.acquire().await;
                    let read = self.source.read_shared(bytes.clone()).await?;
                    self.write(&read, bytes.start)?;
                }
                claim.done();
            }
        }
        Ok(())
    }

    /// Gives the pages of `range`, which are present, memory again where the VMM took it away (a
    /// balloon): they have zeros there. Other pages stay as they are.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn back(&self, range: Range<u64>) -> Result<(), SourceError> {
        self.check(&range)?;
        let (offset, nr_bytes) = (self.memfd_offset(range.start), range.end - range.start);
        rustix::io::retry_on_intr(|| fallocate(&self.memfd, FallocateFlags::empty(), offset, nr_bytes))
            .map_err(|error| failed(error.into()))
    }

    fn check(&self, range: &Range<u64>) -> Result<(), SourceError> {
        let nr_bytes = range.end.checked_sub(range.start).and_then(|nr_bytes| usize::try_from(nr_bytes).ok());
        check_range(range.start, nr_bytes.unwrap_or(usize::MAX), self.size_bytes())
    }

    fn units_of(&self, range: &Range<u64>) -> Range<usize> {
        let first = range.start / self.unit_bytes;
        let end = range.end.div_ceil(self.unit_bytes).min(self.units.len() as u64);
        first as usize..end as usize
    }

    fn bytes_of(&self, unit: usize) -> Range<u64> {
        let start = unit as u64 * self.unit_bytes;
        start..(start + self.unit_bytes).min(self.size_bytes())
    }

    fn claim(&self, unit: usize) -> Option<Claim<'_>> {
        // Acquire: what an earlier fill that failed left is in the memfd before ours.
        self.units[unit].compare_exchange(ABSENT, FILLING, Ordering::Acquire, Ordering::Relaxed).ok()?;
        Some(Claim { memory: self, unit, becomes: ABSENT })
    }

    fn needs_no_read(&self, bytes: &Range<u64>) -> bool {
        // What is mapped is written by a call, which huge pages do not have.
        self.source.is_zero(bytes.clone()) || (self.huge.is_none() && self.source.mapped(bytes.clone()).is_some())
    }

    /// Whether the bytes are there now, without a read of the source.
    fn fill_without_read(&self, bytes: &Range<u64>) -> Result<bool, SourceError> {
        if self.source.is_zero(bytes.clone()) {
            self.back(bytes.clone())?;
            return Ok(true);
        }
        let mapped = if self.huge.is_some() { None } else { self.source.mapped(bytes.clone()) };
        let Some(mapped) = mapped else { return Ok(false) };
        let mut nr_written = 0;
        while nr_written < mapped.nr_bytes() {
            let offset = self.memfd_offset(bytes.start + nr_written as u64);
            match write_mapped(self.memfd.as_fd(), mapped, nr_written, offset) {
                Ok(0) => return Err(failed(io::ErrorKind::WriteZero.into())),
                Ok(nr_bytes) => nr_written += nr_bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.raw_os_error() == Some(rustix::io::Errno::FAULT.raw_os_error()) => {
                    return Err(SourceError::Changed { what: "bytes of its mapping are gone".to_owned() });
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(true)
    }

    fn write(&self, mut bytes: &[u8], offset: u64) -> Result<(), SourceError> {
        if let Some(huge) = &self.huge {
            // Without memory for the page the copy would end this process.
            self.back(offset..offset + bytes.len() as u64)?;
            return huge.write(offset, bytes).ok_or_else(|| failed(io::ErrorKind::InvalidInput.into()));
        }
        let mut to = self.memfd_offset(offset);
        while !bytes.is_empty() {
            let nr_bytes = rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.memfd, bytes, to))
                .map_err(|error| failed(error.into()))?;
            bytes = &bytes[nr_bytes..];
            to += nr_bytes as u64;
        }
        Ok(())
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }
}

impl Debug for SharedMemory {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory")
            .field("source", &self.source)
            .field("unit_bytes", &self.unit_bytes)
            .field("present_bytes", &self.present_bytes())
            .finish_non_exhaustive()
    }
}

/// A unit that is being filled; absent again if it is dropped before [`Claim::done`].
struct Claim<'m> {
    memory: &'m SharedMemory,
    unit: usize,
    becomes: u8,
}

impl Claim<'_> {
    fn done(mut self) {
        self.becomes = PRESENT;
        self.memory.nr_present.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Release: the bytes were written before.
        self.memory.units[self.unit].store(self.becomes, Ordering::Release);
        self.memory.changed.notify_waiters();
    }
}

fn failed(error: io::Error) -> SourceError {
    SourceError::Io { what: "write guest memory".to_owned(), error }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use futures_util::FutureExt;
    use futures_util::future::BoxFuture;

    use super::*;
    use crate::source::Mapped;

    /// A file of which nothing is checked but what the kernel checks.
    #[derive(Debug)]
    struct Mapping {
        mapping: memmap2::MmapRaw,
        zeros: Range<u64>,
    }

    impl Mapping {
        fn new(file: &File, zeros: Range<u64>) -> Mapping {
            let mapping = memmap2::MmapOptions::new().map_raw_read_only(file).unwrap();
            Mapping { mapping, zeros }
        }
    }

    impl Source for Mapping {
        fn size_bytes(&self) -> u64 {
            self.mapping.len() as u64
        }

        fn identity(&self) -> Identity {
            Identity::from_bytes([0; 32])
        }

        fn granule_bytes(&self) -> u64 {
            PAGE_BYTES
        }

        fn mapped(&self, range: Range<u64>) -> Option<Mapped<'_>> {
            Some(Mapped::of_mapping(&self.mapping).part(range))
        }

        fn is_zero(&self, range: Range<u64>) -> bool {
            self.zeros.start <= range.start && range.end <= self.zeros.end
        }

        fn read<'a>(&'a self, offset: u64, _: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
            async move { Err(SourceError::Corrupt { range: offset..offset }) }.boxed()
        }
    }

    const UNIT: u64 = UNIT_BYTES.start;

    fn file() -> File {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 3 * UNIT as usize], 0).unwrap();
        file
    }

    fn read(memory: &SharedMemory, offset: u64) -> u8 {
        let mut byte = [0];
        assert_eq!(rustix::io::pread(memory, &mut byte, memory.memfd_offset(offset)), Ok(1));
        byte[0]
    }

    #[test]
    fn mapped_bytes_and_zeros_are_filled_at_once_and_behind_the_start() {
        let source = Arc::new(Mapping::new(&file(), UNIT..2 * UNIT));
        let memory = SharedMemory::new("test", 8192, source).unwrap();
        assert_eq!(memory.try_fill(100..UNIT + 1).unwrap(), Filled::Now);
        assert_eq!((read(&memory, 0), read(&memory, UNIT - 1), read(&memory, UNIT)), (7, 7, 0));
        assert!(memory.is_present(0..2 * UNIT) && !memory.is_present(0..2 * UNIT + 1));
        assert_eq!(memory.present_bytes(), 2 * UNIT);
        assert!(matches!(memory.try_fill(0..3 * UNIT + 1), Err(SourceError::OutOfRange { .. })));
    }

    #[tokio::test]
    async fn a_mapping_whose_file_was_cut_is_an_error_and_not_zeros() {
        let file = file();
        let memory = SharedMemory::new("test", 0, Arc::new(Mapping::new(&file, 0..0))).unwrap();
        file.set_len(UNIT + 4096).unwrap();
        assert!(matches!(memory.try_fill(UNIT..2 * UNIT), Err(SourceError::Changed { .. })));
        assert!(matches!(memory.fill(UNIT..2 * UNIT).await, Err(SourceError::Changed { .. })));
        assert!(!memory.is_present(UNIT..2 * UNIT));
        // The unit is absent, and not in flight for ever.
        file.set_len(3 * UNIT).unwrap();
        assert_eq!(memory.try_fill(UNIT..2 * UNIT).unwrap(), Filled::Now);
    }

    #[test]
    fn pages_that_were_punched_are_backed_by_zeros_and_others_stay() {
        let memory = SharedMemory::new("test", 0, Arc::new(Mapping::new(&file(), 0..0))).unwrap();
        assert_eq!(memory.try_fill(0..UNIT).unwrap(), Filled::Now);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&memory, punch, PAGE_BYTES, PAGE_BYTES).unwrap();
        let blocks = || rustix::fs::fstat(&memory).unwrap().st_blocks;
        let before = blocks();
        memory.back(0..UNIT).unwrap();
        assert_eq!(blocks() - before, PAGE_BYTES as i64 / 512);
        assert_eq!((read(&memory, 0), read(&memory, PAGE_BYTES), read(&memory, 2 * PAGE_BYTES)), (7, 0, 7));
    }

    #[test]
    fn huge_pages_that_there_are_not_are_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 * HUGE_PAGE_BYTES).unwrap();
        let refused = |start_bytes, nr_bytes: u64| {
            file.set_len(nr_bytes).unwrap();
            SharedMemory::of_huge_pages("test", start_bytes, Arc::new(Mapping::new(&file, 0..0))).unwrap_err()
        };
        assert_eq!(refused(4096, HUGE_PAGE_BYTES).kind(), io::ErrorKind::InvalidInput);
        assert_eq!(refused(0, HUGE_PAGE_BYTES + 4096).kind(), io::ErrorKind::InvalidInput);
        let error = refused(0, 1 << 42).to_string();
        assert!(error.contains("2097152 huge pages of 2 MiB are not free"), "{error}");
    }

    #[test]
    fn a_start_that_is_no_page_is_refused() {
        let source = Arc::new(Mapping::new(&file(), 0..0));
        assert!(SharedMemory::new("test", 1, Arc::clone(&source) as _).is_err());
        assert!(SharedMemory::new("test", u64::MAX - 4095, source).is_err());
    }
}
