//! Memory files that two processes share, and waits for the eventfds beside them.
//!
//! # Protocol
//! - A file that both sides map is sealed against shrinking and growing before the other side gets
//!   it. An access to a mapping beyond the end of its file kills the process, and the other side
//!   could cut the file at any moment.
//! - The other side has the same eventfds, and may set their flags and their counters. So no read
//!   here blocks whatever the flags are, and
//!   [`EventFd::drain`](crate::linux::descriptors::EventFd::drain) frees a thread that is blocked
//!   in a write.
//!
//! Interface: fcntl(2) "File Sealing".

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{self, SealFlags, SeekFrom};
use rustix::mm::Advice;

use crate::linux::descriptors::{FIXED_SIZE, poll};
use crate::linux::mapping::MappedMemory;

/// Whether the file cannot become smaller; a file that supports no seals is not sealed.
pub(super) fn is_sealed(file: BorrowedFd<'_>) -> bool {
    fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
}

/// Whether the file cannot change its size, and its seals cannot change either.
pub(super) fn is_size_fixed(file: BorrowedFd<'_>) -> bool {
    fs::fcntl_get_seals(file).is_ok_and(|seals| seals.contains(FIXED_SIZE))
}

/// Seals the file against shrinking, if that is still allowed.
pub(super) fn seal_against_shrinking(file: BorrowedFd<'_>) -> io::Result<()> {
    Ok(fs::fcntl_add_seals(file, SealFlags::SHRINK)?)
}

/// The size of the file in bytes.
pub(super) fn file_size(file: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(u64::try_from(fs::fstat(file)?.st_size).unwrap_or(0))
}

/// Bytes of a file that are mapped between two looks at the clock.
const MAPPED_AT_ONCE_BYTES: u64 = 64 << 20;

/// Maps what `file` has already into `mapping`, so that touching it does not fault, for `patience`
/// at most; takes no memory for what the file has not. The mapping begins with `offset_bytes` of
/// the file. Never needed: what is not mapped is when it is touched.
pub(super) fn map_present_pages(mapping: &MappedMemory, file: BorrowedFd<'_>, offset_bytes: u64, patience: Duration) {
    let begin = Instant::now();
    let mut next = 0;
    while next < mapping.size_bytes() && begin.elapsed() < patience {
        // It moves the file's position, which is not used.
        let Ok(data) = fs::seek(file, SeekFrom::Data(offset_bytes + next)) else { return };
        let Ok(hole) = fs::seek(file, SeekFrom::Hole(data)) else { return };
        let within = |at: u64| at.saturating_sub(offset_bytes).min(mapping.size_bytes());
        // The file may change meanwhile: never backwards.
        let start = within(data).max(next);
        let end = within(hole).min(start.saturating_add(MAPPED_AT_ONCE_BYTES));
        if end <= start {
            return;
        }
        let _ = mapping.advise(start..end, Advice::LinuxPopulateWrite);
        next = end;
    }
}

/// Waits until one of `files` can be read or was closed by its other end, or `timeout` is over:
/// which of them it is. A signal ends the wait too.
pub(super) fn wait_readable<const N: usize>(files: [BorrowedFd<'_>; N], timeout: Duration) -> io::Result<[bool; N]> {
    let mut polled = files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN | PollFlags::RDHUP));
    poll(&mut polled, Some(timeout))?;
    Ok(polled.map(|entry| !entry.revents().is_empty()))
}
