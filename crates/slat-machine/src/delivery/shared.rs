//! Memory files that two processes share, and their mappings; and waits for the eventfds beside
//! them.
//!
//! # Protocol
//! - A file that both sides map is sealed against shrinking and growing before the other side gets
//!   it. An access to a mapping beyond the end of its file kills the process, and the other side
//!   could cut the file at any moment.
//! - The other side has the same eventfds, and may set their flags and their counters. So no read
//!   here blocks whatever the flags are, and [`EventFd::drain`](crate::descriptors::EventFd::drain)
//!   frees a thread that is blocked in a write.
//!
//! Interface: fcntl(2) "File Sealing".

#![expect(unsafe_code, reason = "mmap, and system calls on files")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use crate::descriptors::{checked, memory_file, poll, poll_entry};

/// The seals of every file that is shared: its size is fixed for ever.
const FIXED_SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Makes a memory file of `size_bytes` zeros, whose size is fixed.
pub(super) fn sealed_file(name: &CStr, size_bytes: u64) -> io::Result<OwnedFd> {
    let file = memory_file(name, size_bytes)?;
    // SAFETY: only takes numbers.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, FIXED_SIZE) })?;
    Ok(file)
}

/// Whether the file cannot become smaller; a file that supports no seals is not sealed.
pub(super) fn is_sealed(file: BorrowedFd<'_>) -> bool {
    // SAFETY: only takes numbers.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Whether the file cannot change its size, and its seals cannot change either.
pub(super) fn is_size_fixed(file: BorrowedFd<'_>) -> bool {
    // SAFETY: only takes numbers.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & FIXED_SIZE == FIXED_SIZE
}

/// Seals the file against shrinking, if that is still allowed.
pub(super) fn seal_against_shrinking(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: only takes numbers.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }).map(|_| ())
}

/// The size of the file in bytes.
pub(super) fn file_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    // SAFETY: all-zero bytes are a valid `stat`.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `stat` to where one is.
    checked(unsafe { libc::fstat(file.as_raw_fd(), &raw mut stat) })?;
    Ok(u64::try_from(stat.st_size).unwrap_or(0))
}

/// Bytes of a file that are mapped between two looks at the clock.
const MAPPED_AT_ONCE_BYTES: usize = 64 << 20;

/// Where data, or a hole, begins in `file` from `from_bytes` on (lseek(2)); `None` if nowhere, or
/// if the file system has no answer.
fn seek(file: BorrowedFd<'_>, from_bytes: u64, whence: libc::c_int) -> Option<u64> {
    let from = libc::off_t::try_from(from_bytes).ok()?;
    // SAFETY: only takes numbers. It moves the file's position, which is not used.
    let found = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    u64::try_from(found).ok()
}

/// A part of a file, mapped shared, readable and writable. Others change it at any time.
#[derive(Debug)]
pub(super) struct SharedMapping {
    start: *mut u8,
    size_bytes: usize,
}

// SAFETY: the pointer is only an address. Its memory is accessed atomically, or by users that know
// that other threads access it.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `size_bytes`, not 0, from `offset_bytes`, a multiple of the page size. The file is long
    /// enough, and the caller has checked that it cannot shrink.
    pub(super) fn new(file: BorrowedFd<'_>, offset_bytes: u64, size_bytes: u64) -> io::Result<SharedMapping> {
        let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
        let size_bytes = usize::try_from(size_bytes).map_err(too_large)?;
        let offset = libc::off_t::try_from(offset_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        // SAFETY: without MAP_FIXED the kernel takes unused addresses.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                offset,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(SharedMapping { start: start.cast(), size_bytes })
    }

    /// Maps what the file has already, so that touching it does not fault, for `patience` at most;
    /// takes no memory for what it has not. `offset_bytes` of `file` is what the mapping begins
    /// with. Never needed: what is not mapped is when it is touched.
    pub(super) fn map_present_pages(&self, file: BorrowedFd<'_>, offset_bytes: u64, patience: Duration) {
        let begin = Instant::now();
        let mut next = 0;
        while next < self.size_bytes && begin.elapsed() < patience {
            let Some(data) = seek(file, offset_bytes + next as u64, libc::SEEK_DATA) else { return };
            let Some(hole) = seek(file, data, libc::SEEK_HOLE) else { return };
            let within =
                |at: u64| usize::try_from(at.saturating_sub(offset_bytes)).unwrap_or(usize::MAX).min(self.size_bytes);
            // The file may change meanwhile: never backwards.
            let start = within(data).max(next);
            let end = within(hole).min(start.saturating_add(MAPPED_AT_ONCE_BYTES));
            if end <= start {
                return;
            }
            // SAFETY: inside the mapping, which lives as long as `self`; the advice changes no
            // contents.
            unsafe { libc::madvise(self.start.wrapping_add(start).cast(), end - start, libc::MADV_POPULATE_WRITE) };
            next = end;
        }
    }

    /// The first byte.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The size in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes as u64
    }

    /// All whole words of 8 bytes.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, as long as that, and lives as long as `self`; the
        // file cannot shrink; any bits are an AtomicU64; in this process all access the words
        // atomically, and what another process does is to this one as another device.
        unsafe { slice::from_raw_parts(self.start.cast::<AtomicU64>(), self.size_bytes / 8) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this start and size; nothing borrows from it any more.
        unsafe { libc::munmap(self.start.cast(), self.size_bytes) };
    }
}

/// Waits until one of `files` can be read or was closed by its other end, or `timeout` is over:
/// which of them it is. A signal ends the wait too.
pub(super) fn wait_readable<const N: usize>(files: [BorrowedFd<'_>; N], timeout: Duration) -> io::Result<[bool; N]> {
    let mut polled = files.map(|file| poll_entry(file, libc::POLLIN | libc::POLLRDHUP));
    poll(&mut polled, Some(timeout))?;
    Ok(polled.map(|entry| entry.revents != 0))
}
