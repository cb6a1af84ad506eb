//! A file that has the memory of a snapshot, byte for byte: what VMMs write.
//!
//! # Guarantees
//! - Bytes that a read returns are those of the file as it was opened: after the read, size and
//!   time of last change are still the same. Otherwise the read fails with
//!   [`SourceError::Changed`].
//! - Bytes of a mapping were right a moment before [`Source::mapped`] returned. A file that is
//!   written while pages are copied out of it can give wrong bytes for as long as the copy takes
//!   (microseconds); no later call returns one. Snapshots are not to be written while they are
//!   served.
//! - Holes of the file are zeros, and known to be without a read.
//!
//! # Implementation
//! The file is mapped, and the kernel copies from the mapping right into the guest: no byte passes
//! through the pager. Touching a page that is still on disk would stop the thread that serves
//! faults, so a block of the file is handed out by its mapping only once it is known to be in the
//! page cache:
//! - mincore(2) said so, once for each block; or
//! - it was read. Another thread does that, and brings it there.
//!
//! Since Linux 5.2 mincore says that all of a file is cached if the process neither owns the file
//! nor may write it (mincore(2), NOTES). Of such a file only reads count.
//! A page that the kernel evicts later costs the thread that copies it some time, and nothing else.
//!
//! A read that waits for a disk has a thread until the disk answers, also if its caller gives up. So a
//! file has a few of them at a time, and one whose disk hangs leaves threads to others.
//!
//! The time of last change tells two versions apart only if the clock moved between them. Opening
//! therefore waits until the file is older than the clock's step, as version control systems do.

mod sys;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FileType, Mode, Stat};
use rustix::io::ReadWriteFlags;
use rustix::process::{getegid, geteuid};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Semaphore;

use super::pages::PageSet;
use super::{Identity, Mapped, PAGE_BYTES, Source, SourceError, blocking, check_range, holes, in_place_of};

/// What is looked for in the page cache at once, and what a read should have at least. The kernel
/// maps as much around a page of a file that is touched.
const BLOCK_BYTES: u64 = 64 << 10;
/// How many reads wait for the disk at a time.
const MOST_READS: usize = 64;
/// `HUGETLBFS_MAGIC` of `include/uapi/linux/magic.h`.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// A file of memory.
#[derive(Debug)]
pub struct MemoryFile {
    file: Arc<OpenFile>,
    mapping: MmapRaw,
    /// The pages that are not in holes.
    data: PageSet,
    /// A bit for each block that was in the page cache once.
    cached: Box<[AtomicU64]>,
    identity: Identity,
    granule_bytes: u64,
    /// For each read that waits for the disk.
    reads: Arc<Semaphore>,
}

impl MemoryFile {
    /// Opens the file.
    ///
    /// # Errors
    /// It cannot be opened or mapped, or is no file of whole pages.
    pub fn open(path: &Path) -> Result<MemoryFile, SourceError> {
        let file = OpenFile::open(path)?;
        let data = file.data()?;
        let granule_bytes = match rustix::fs::fstatfs(&file.file) {
            // A page there is what a read costs, and what the guest has.
            Ok(about) if about.f_type == HUGETLBFS_MAGIC => (about.f_bsize as u64).max(BLOCK_BYTES),
            _ => BLOCK_BYTES,
        };
        let mapping = MmapOptions::new()
            .len(file.size_bytes as usize)
            .map_raw_read_only(&file.file)
            .map_err(|error| file.failed("map", error))?;
        let nr_blocks = file.size_bytes.div_ceil(BLOCK_BYTES);
        let identity = Identity::new(
            "file",
            [file.device, file.inode, file.size_bytes, file.changed_s as u64, file.changed_ns]
                .each_ref()
                .map(|number| number.to_le_bytes())
                .each_ref()
                .map(|bytes| &bytes[..]),
        );
        Ok(MemoryFile {
            cached: (0..nr_blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            file: Arc::new(file),
            mapping,
            data,
            identity,
            granule_bytes,
            reads: Arc::new(Semaphore::new(MOST_READS)),
        })
    }

    /// The pages that are not in holes of the file.
    pub fn data(&self) -> &PageSet {
        &self.data
    }

    /// What its file system says of its blocks: holes are whole ones.
    pub(super) fn block_bytes(&self) -> Result<u64, SourceError> {
        let stat = rustix::fs::fstat(&self.file.file).map_err(|error| self.file.failed("examine", error.into()))?;
        Ok(stat.st_blksize as u64)
    }

    /// Whether all blocks that `range` touches are in the page cache, or were.
    fn is_cached(&self, range: &Range<u64>) -> bool {
        (range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)).all(|block| {
            // Relaxed: the bit saves a system call, and orders nothing.
            let (word, bit) = (&self.cached[(block / 64) as usize], 1 << (block % 64));
            if word.load(Ordering::Relaxed) & bit != 0 {
                return true;
            }
            let is_cached = self.is_block_resident(block);
            if is_cached {
                word.fetch_or(bit, Ordering::Relaxed);
            }
            is_cached
        })
    }

    /// Whether the kernel says that the block is in the page cache, except for holes.
    fn is_block_resident(&self, block: u64) -> bool {
        let start = block * BLOCK_BYTES;
        let nr_bytes = BLOCK_BYTES.min(self.file.size_bytes - start);
        self.file.residency == Residency::Told
            && sys::not_resident(&self.mapping, start as usize, nr_bytes as usize)
                // A hole is in no cache, and on no disk.
                .is_some_and(|mut pages| pages.all(|page| self.data.has_none_of(page)))
    }

    /// Notes that the blocks that are wholly in `range` were read.
    fn note_read(&self, range: Range<u64>) {
        let end =
            if range.end == self.file.size_bytes { range.end.div_ceil(BLOCK_BYTES) } else { range.end / BLOCK_BYTES };
        for block in range.start.div_ceil(BLOCK_BYTES)..end {
            // Relaxed: see `is_cached`.
            self.cached[(block / 64) as usize].fetch_or(1 << (block % 64), Ordering::Relaxed);
        }
    }
}

impl Source for MemoryFile {
    fn size_bytes(&self) -> u64 {
        self.file.size_bytes
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    fn mapped(&self, range: Range<u64>) -> Option<Mapped<'_>> {
        if range.start > range.end || range.end > self.file.size_bytes {
            return None;
        }
        // If the file has changed, the read that follows says so.
        if !self.is_cached(&range) || self.file.check_unchanged().is_err() {
            return None;
        }
        Some(Mapped::of_mapping(&self.mapping).part(range))
    }

    fn is_mapped(&self) -> bool {
        true
    }

    fn is_ready(&self, range: Range<u64>) -> bool {
        // The read finds out whether the file has changed.
        range.end <= self.file.size_bytes && self.is_cached(&range)
    }

    fn read_ready(&self, offset: u64, into: &mut [u8]) -> Option<Result<(), SourceError>> {
        if let Err(error) = check_range(offset, into.len(), self.file.size_bytes) {
            return Some(Err(error));
        }
        // A hole is in no page cache.
        if self.is_zero(offset..offset + into.len() as u64) {
            into.fill(0);
            return Some(Ok(()));
        }
        // After the bytes were read: if the file is the same now, it was then.
        (self.file.read_cached(offset, into) == into.len()).then(|| self.file.check_unchanged())
    }

    fn is_zero(&self, range: Range<u64>) -> bool {
        range.end <= self.file.size_bytes && self.data.has_none_of(range) && self.file.check_unchanged().is_ok()
    }

    fn read<'a>(&'a self, offset: u64, into: &'a mut [u8]) -> BoxFuture<'a, Result<(), SourceError>> {
        async move {
            check_range(offset, into.len(), self.file.size_bytes)?;
            let nr_read = self.file.read_cached(offset, into);
            if nr_read < into.len() {
                let (rest, at) = (&mut into[nr_read..], offset + nr_read as u64);
                let (file, nr_bytes) = (Arc::clone(&self.file), rest.len());
                let read = async move { blocking("read a file", move || file.read_exactly(at, nr_bytes)).await? };
                let bytes = in_place_of(&self.reads, "read a file", read).await?;
                rest.copy_from_slice(&bytes);
            }
            // After the bytes were read: if the file is the same now, it was then.
            self.file.check_unchanged()?;
            self.note_read(offset..offset + into.len() as u64);
            Ok(())
        }
        .boxed()
    }
}

/// A file with what it was when it was opened.
#[derive(Debug)]
struct OpenFile {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    device: u64,
    inode: u64,
    changed_s: i64,
    changed_ns: u64,
    residency: Residency,
}

/// Whether the kernel tells what of a file is in the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Residency {
    Told,
    NotTold,
}

impl Residency {
    /// Told of a file that this process owns or may write. The mode alone decides: where an access
    /// control list says otherwise, a fault may wait for the disk. A capability does not count, as
    /// the process may drop it later, nor does a supplementary group, as a sandbox may hide it.
    fn of(stat: &Stat) -> Residency {
        let is_of_group = getegid().as_raw() == stat.st_gid;
        let may_write = if is_of_group { Mode::WGRP } else { Mode::WGRP | Mode::WOTH };
        let is_told = geteuid().as_raw() == stat.st_uid || Mode::from_raw_mode(stat.st_mode).contains(may_write);
        if is_told { Residency::Told } else { Residency::NotTold }
    }
}

impl OpenFile {
    fn open(path: &Path) -> Result<OpenFile, SourceError> {
        let failed =
            |what: &str, error: io::Error| SourceError::Io { what: format!("{what} {}", path.display()), error };
        let file = File::open(path).map_err(|error| failed("open", error))?;
        let stat = rustix::fs::fstat(&file).map_err(|error| failed("examine", error.into()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(malformed(path, "it is no regular file"));
        }
        let size_bytes = stat.st_size as u64;
        if size_bytes == 0 || !size_bytes.is_multiple_of(PAGE_BYTES) {
            return Err(malformed(path, &format!("{size_bytes} bytes are not whole pages of {PAGE_BYTES}")));
        }
        wait_until_older_than_the_clock(&stat);
        let file = OpenFile {
            file,
            path: path.to_path_buf(),
            size_bytes,
            device: stat.st_dev,
            inode: stat.st_ino,
            changed_s: stat.st_mtime as i64,
            changed_ns: stat.st_mtime_nsec as u64,
            residency: Residency::of(&stat),
        };
        file.check_unchanged()?;
        Ok(file)
    }

    fn failed(&self, what: &str, error: io::Error) -> SourceError {
        SourceError::Io { what: format!("{what} {}", self.path.display()), error }
    }

    /// Fails if the file's size or time of last change is not what it was. The descriptor stays
    /// with the file that was opened: renaming another one to its path changes nothing here.
    fn check_unchanged(&self) -> Result<(), SourceError> {
        let stat = rustix::fs::fstat(&self.file).map_err(|error| self.failed("examine", error.into()))?;
        if stat.st_size as u64 != self.size_bytes {
            let what = format!("{} had {} bytes and has {}", self.path.display(), self.size_bytes, stat.st_size);
            return Err(SourceError::Changed { what });
        }
        if (stat.st_mtime as i64, stat.st_mtime_nsec as u64) != (self.changed_s, self.changed_ns) {
            return Err(SourceError::Changed { what: format!("{} was written", self.path.display()) });
        }
        Ok(())
    }

    /// The pages that are not in holes.
    fn data(&self) -> Result<PageSet, SourceError> {
        let mut data = PageSet::new(self.size_bytes / PAGE_BYTES);
        let extents = holes::data(&self.file, 0..self.size_bytes);
        let extents = extents.map_err(|error| self.failed("look for holes in", error))?;
        extents.into_iter().for_each(|extent| data.insert_bytes(extent));
        self.check_unchanged()?;
        Ok(data)
    }

    /// Reads what is in the page cache, and returns how much that was: it waits for no disk.
    fn read_cached(&self, offset: u64, into: &mut [u8]) -> usize {
        let mut nr_read = 0;
        while nr_read < into.len() {
            let mut rest = [io::IoSliceMut::new(&mut into[nr_read..])];
            match rustix::io::preadv2(&self.file, &mut rest, offset + nr_read as u64, ReadWriteFlags::NOWAIT) {
                Ok(nr_bytes) if nr_bytes > 0 => nr_read += nr_bytes,
                // Not there, or a file system that does not know this flag: the thread that may wait finds out.
                _ => break,
            }
        }
        nr_read
    }

    /// Reads `nr_bytes` bytes, and waits for the disk.
    fn read_exactly(&self, offset: u64, nr_bytes: usize) -> Result<Vec<u8>, SourceError> {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; nr_bytes];
        self.file.read_exact_at(&mut bytes, offset).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                SourceError::Changed { what: format!("{} is shorter", self.path.display()) }
            }
            _ => self.failed("read", error),
        })?;
        Ok(bytes)
    }
}

fn malformed(path: &Path, why: &str) -> SourceError {
    SourceError::Malformed { snapshot: path.display().to_string(), why: why.to_string() }
}

/// Waits while a write of now would leave the file the time of last change that it has. Times of
/// files are those of the coarse clock (or whole seconds).
fn wait_until_older_than_the_clock(stat: &Stat) {
    let step_ns: i128 = if stat.st_mtime_nsec == 0 { 1_000_000_000 } else { 1 };
    let changed_ns = i128::from(stat.st_mtime) * 1_000_000_000 + stat.st_mtime_nsec as i128;
    loop {
        let now = clock_gettime(ClockId::RealtimeCoarse);
        let now_ns = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
        // A file of the future: a write takes it back to the present, which shows.
        if !(changed_ns..changed_ns + step_ns).contains(&now_ns) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
