//! Writes mapped bytes to a file: the kernel reads them, this process never does.

#![expect(unsafe_code, reason = "a write from memory that others may change or truncate, which no slice may name")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::source::Mapped;

/// Writes the bytes of `from` behind its first `nr_skipped` to `offset` of `to`; returns how many
/// were written.
///
/// # Errors
/// `EFAULT` where nothing is mapped any more; others of pwrite(2).
pub(super) fn write_mapped(to: BorrowedFd<'_>, from: Mapped<'_>, nr_skipped: usize, offset: u64) -> io::Result<usize> {
    let nr_bytes = from.nr_bytes().saturating_sub(nr_skipped);
    let start = from.address().saturating_add(nr_skipped as u64);
    let offset = libc::off64_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the call reads memory of this process and writes none of it. It fails where nothing
    // is mapped, and no Rust reference covers the bytes that it reads.
    let nr_written =
        unsafe { libc::pwrite64(to.as_raw_fd(), std::ptr::with_exposed_provenance(start as usize), nr_bytes, offset) };
    usize::try_from(nr_written).map_err(|_| io::Error::last_os_error())
}
