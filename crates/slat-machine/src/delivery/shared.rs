//! What two processes share: memory files, mappings of them, and eventfds.
//!
//! # Protocol
//! - A file that both sides map is sealed against shrinking and growing before anybody else has it: an access to a mapping
//!   beyond the end of its file kills a process, and the other side could cut the file at any moment.
//! - The other side has the same eventfds, and may set their flags and their counters to what it likes. So no read here
//!   blocks whatever the flags say, and whoever is stuck in a write is freed by [`EventFd::drain`].
//!
//! Interfaces: memfd_create(2), fcntl(2) "File Sealing", eventfd(2), preadv2(2).

#![expect(unsafe_code, reason = "mmap, and system calls on descriptors")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// The seals of every file that is shared: its size is what it is for ever.
const FIXED_SIZE: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// What a call of the C library that returns -1 on errors has returned.
pub(super) fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A new memory file of `size_bytes` zeros that can change its size no more.
pub(super) fn sealed_file(name: &CStr, size_bytes: u64) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string that outlives the call.
    let file = checked(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })?;
    // SAFETY: just opened, and owned by nobody else.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let length = libc::off_t::try_from(size_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: only takes numbers.
    checked(unsafe { libc::ftruncate(file.as_raw_fd(), length) })?;
    // SAFETY: only takes numbers.
    checked(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, FIXED_SIZE) })?;
    Ok(file)
}

/// Whether the file cannot become smaller; files that know no seals are not sealed.
pub(super) fn is_sealed(file: BorrowedFd<'_>) -> bool {
    // SAFETY: only takes numbers.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Whether the file can change its size no more, nor lose its seals' company.
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

/// A part of a file, mapped shared, readable and writable. Others change it at any time.
#[derive(Debug)]
pub(super) struct SharedMapping {
    start: *mut u8,
    size_bytes: usize,
}

// SAFETY: the pointer is only an address; what is behind it is accessed atomically, or by users who know that others may.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps `size_bytes`, not 0, from `offset_bytes`, a multiple of the page size. The file reaches as far, and its caller
    /// has seen that it cannot shrink.
    pub(super) fn new(file: BorrowedFd<'_>, offset_bytes: u64, size_bytes: u64) -> io::Result<SharedMapping> {
        let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
        let size_bytes = usize::try_from(size_bytes).map_err(too_large)?;
        let offset = libc::off_t::try_from(offset_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        // SAFETY: without MAP_FIXED the kernel takes addresses that nobody uses.
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
        // SAFETY: the mapping is page-aligned, as long as that, and lives as long as `self`; the file cannot shrink; any
        // bits are an AtomicU64; in this process all access the words atomically, and what another process does is to this
        // one as another device.
        unsafe { slice::from_raw_parts(self.start.cast::<AtomicU64>(), self.size_bytes / 8) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this start and size; nothing borrows from it any more.
        unsafe { libc::munmap(self.start.cast(), self.size_bytes) };
    }
}

/// An eventfd(2): a counter in the kernel that can be waited for, also from another process.
#[derive(Debug)]
pub(super) struct EventFd(OwnedFd);

impl EventFd {
    pub(super) fn new() -> io::Result<EventFd> {
        // SAFETY: only takes numbers.
        let file = checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: just opened, and owned by nobody else.
        Ok(EventFd(unsafe { OwnedFd::from_raw_fd(file) }))
    }

    /// Wakes whoever waits, or the next who will.
    pub(super) fn signal(&self) {
        let one = 1u64;
        // SAFETY: reads 8 bytes of a number that outlives the call. A full counter is refused, and wakes all the same; no
        // other error is possible on an eventfd.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Forgets all signals so far. Never blocks.
    pub(super) fn drain(&self) {
        let mut count = 0u64;
        let buffer = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
        // SAFETY: the kernel writes at most 8 bytes to a number that outlives the call. RWF_NOWAIT: O_NONBLOCK belongs to the
        // open file, and the other side may have turned it off.
        let result = unsafe { libc::preadv2(self.0.as_raw_fd(), &raw const buffer, 1, -1, libc::RWF_NOWAIT) };
        if result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            // An old kernel (before 5.8): then only the flag keeps the read from blocking.
            self.keep_nonblocking();
            // SAFETY: as above.
            unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        }
    }

    /// Makes it one that blocks, and as full as can be: what the other side could do.
    #[cfg(test)]
    pub(super) fn spoil(&self) {
        let count = u64::MAX - 1;
        self.drain();
        // SAFETY: reads 8 bytes of a number that outlives the call; then only numbers.
        let (written, result) = unsafe {
            let written = libc::write(self.0.as_raw_fd(), (&raw const count).cast(), 8);
            (written, libc::fcntl(self.0.as_raw_fd(), libc::F_SETFL, 0))
        };
        assert_eq!((written, result), (8, 0));
    }

    /// Turns O_NONBLOCK on if somebody has turned it off; says whether somebody had.
    pub(super) fn keep_nonblocking(&self) -> bool {
        // SAFETY: only takes numbers.
        let flags = unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_GETFL) };
        if flags < 0 || flags & libc::O_NONBLOCK != 0 {
            return false;
        }
        // SAFETY: only takes numbers.
        unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
        true
    }
}

impl From<OwnedFd> for EventFd {
    fn from(file: OwnedFd) -> EventFd {
        EventFd(file)
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of `files` can be read or was closed by its other end, or `timeout` is over: which of them it is. A
/// signal ends the wait too.
pub(super) fn wait_readable<const N: usize>(files: [BorrowedFd<'_>; N], timeout: Duration) -> io::Result<[bool; N]> {
    let mut polled =
        files.map(|file| libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN | libc::POLLRDHUP, revents: 0 });
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        // Below 1e9: cannot truncate.
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    };
    // SAFETY: `polled` has N entries and `time` is a time, both outlive the call; no signal mask.
    let result = unsafe { libc::ppoll(polled.as_mut_ptr(), N as libc::nfds_t, &raw const time, ptr::null()) };
    match checked(result) {
        Ok(_) => Ok(polled.map(|entry| entry.revents != 0)),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok([false; N]),
        Err(error) => Err(error),
    }
}
