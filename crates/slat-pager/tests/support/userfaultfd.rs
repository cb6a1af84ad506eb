//! The userfaultfd of a VMM, as small as it can be: what the tests' clients need, and nothing of
//! the crate that they test. userfaultfd(2), ioctl_userfaultfd(2).

#![expect(unsafe_code, reason = "system calls of a client of its own")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

pub const MODE_MISSING: u64 = 1;
pub const MODE_MINOR: u64 = 4;
pub const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
pub const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
pub const FEATURE_MINOR_HUGETLBFS: u64 = 1 << 9;
pub const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
pub const EVENT_PAGEFAULT: u8 = 0x12;

const API: libc::Ioctl = 0xC018_AA3F_u32 as libc::Ioctl;
const REGISTER: libc::Ioctl = 0xC020_AA00_u32 as libc::Ioctl;
const WAKE: libc::Ioctl = 0x8010_AA02_u32 as libc::Ioctl;
const CONTINUE: libc::Ioctl = 0xC020_AA07_u32 as libc::Ioctl;

/// A descriptor that is not blocking.
///
/// # Errors
/// Of the operating system: no permission, no such feature.
pub fn open(features: u64) -> io::Result<OwnedFd> {
    // SAFETY: the call takes flags and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and owned by nothing else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // SAFETY: `struct uffdio_api` has three words.
    unsafe { call(&fd, API, &mut [0xAA, features, 0]) }?;
    Ok(fd)
}

/// # Safety
/// Threads that touch the memory may wait, and accept any contents of pages that are not there.
///
/// # Errors
/// Of the operating system.
pub unsafe fn register(fd: &OwnedFd, start: u64, nr_bytes: u64, mode: u64) -> io::Result<()> {
    // SAFETY: `struct uffdio_register` has four words; the caller's promise.
    unsafe { call(fd, REGISTER, &mut [start, nr_bytes, mode, 0]) }
}

/// # Errors
/// Of the operating system.
pub fn wake(fd: &OwnedFd, start: u64, nr_bytes: u64) -> io::Result<()> {
    // SAFETY: `struct uffdio_range` has two words; the call changes no memory.
    unsafe { call(fd, WAKE, &mut [start, nr_bytes]) }
}

/// Maps pages that the file has.
///
/// # Errors
/// Of the operating system.
pub fn map_cached(fd: &OwnedFd, start: u64, nr_bytes: u64) -> io::Result<()> {
    // SAFETY: `struct uffdio_continue` has four words; the call fills only pages that are not
    // there, of memory that was registered.
    unsafe { call(fd, CONTINUE, &mut [start, nr_bytes, 0, 0]) }
}

/// The address of the next page fault.
///
/// # Errors
/// `WouldBlock`: there is none. Others of the operating system.
pub fn next_fault(fd: &OwnedFd) -> io::Result<u64> {
    let mut message = [0_u64; 4];
    // SAFETY: the buffer has as many bytes as are read.
    let nr_read = unsafe { libc::read(fd.as_raw_fd(), message.as_mut_ptr().cast(), 32) };
    match nr_read {
        32 if message[0] as u8 == EVENT_PAGEFAULT => Ok(message[2]),
        32 => Err(io::Error::other(format!("event {:#x}", message[0] as u8))),
        _ => Err(io::Error::last_os_error()),
    }
}

/// # Safety
/// `argument` has as many words as the structure of `request`, and what the call does to memory is
/// accepted.
unsafe fn call(fd: &OwnedFd, request: libc::Ioctl, argument: &mut [u64]) -> io::Result<()> {
    // SAFETY: the caller's promise.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, argument.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
