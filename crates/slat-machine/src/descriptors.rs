//! Descriptors that several modules use, and waits for them: thin wrappers of system calls.
//!
//! Interfaces: memfd_create(2), eventfd(2), preadv2(2), ppoll(2).

#![expect(unsafe_code, reason = "system calls on descriptors")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

/// The result of a call of the C library that returns -1 on errors.
pub(crate) fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Makes a memory file of `size_bytes` zeros, close-on-exec, without a name, which can be sealed.
pub(crate) fn memory_file(name: &CStr, size_bytes: u64) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string that outlives the call.
    let file = checked(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })?;
    // SAFETY: just opened, and owned by nothing else.
    let file = unsafe { OwnedFd::from_raw_fd(file) };
    let length = libc::off_t::try_from(size_bytes).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: only takes numbers.
    checked(unsafe { libc::ftruncate(file.as_raw_fd(), length) })?;
    Ok(file)
}

/// An eventfd(2): a counter in the kernel that threads can wait for, also of another process.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> io::Result<EventFd> {
        // SAFETY: only takes numbers.
        let file = checked(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: just opened, and owned by nothing else.
        Ok(EventFd(unsafe { OwnedFd::from_raw_fd(file) }))
    }

    /// Wakes the threads that wait, or the next one.
    pub(crate) fn signal(&self) {
        let one = 1u64;
        // SAFETY: reads 8 bytes of a number that outlives the call. A full counter is refused, and
        // wakes all the same; no other error is possible on an eventfd.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Drops all signals so far. Never blocks.
    pub(crate) fn drain(&self) {
        let mut count = 0u64;
        let buffer = libc::iovec { iov_base: (&raw mut count).cast(), iov_len: 8 };
        // SAFETY: the kernel writes at most 8 bytes to a number that outlives the call. RWF_NOWAIT:
        // O_NONBLOCK belongs to the open file, and the other side may have turned it off.
        let result = unsafe { libc::preadv2(self.0.as_raw_fd(), &raw const buffer, 1, -1, libc::RWF_NOWAIT) };
        if result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            // An old kernel (before 5.8): then only the flag keeps the read from blocking.
            self.keep_nonblocking();
            // SAFETY: as above.
            unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        }
    }

    /// Whether a signal would find no room: after 2^64 - 2 of them, or if the other side has filled
    /// it.
    pub(crate) fn is_full(&self) -> bool {
        // A failed call shows nothing.
        matches!(poll(&mut [poll_entry(self.as_fd(), libc::POLLOUT)], Some(Duration::ZERO)), Ok(false))
    }

    /// Makes it block, and fills it: what the other side could do.
    #[cfg(test)]
    pub(crate) fn spoil(&self) {
        let count = u64::MAX - 1;
        self.drain();
        // SAFETY: reads 8 bytes of a number that outlives the call; then only numbers.
        let (written, result) = unsafe {
            let written = libc::write(self.0.as_raw_fd(), (&raw const count).cast(), 8);
            (written, libc::fcntl(self.0.as_raw_fd(), libc::F_SETFL, 0))
        };
        assert_eq!((written, result), (8, 0));
    }

    /// Turns O_NONBLOCK on if it was turned off. Returns whether it was.
    pub(crate) fn keep_nonblocking(&self) -> bool {
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

/// An entry for [`poll`]: a descriptor and the events of poll(2) to wait for.
pub(crate) fn poll_entry(descriptor: BorrowedFd<'_>, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd: descriptor.as_raw_fd(), events, revents: 0 }
}

/// Waits once. Returns whether something happened at a descriptor, which its entry shows. `None`
/// waits without a limit. A signal counts as a timeout.
pub(crate) fn poll(entries: &mut [libc::pollfd], time_out: Option<Duration>) -> io::Result<bool> {
    let time_out = time_out.map(|time| libc::timespec {
        tv_sec: libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX),
        // Below 1e9: cannot truncate.
        tv_nsec: time.subsec_nanos() as libc::c_long,
    });
    // SAFETY: the entries and the time are valid for the call, which writes to the entries only;
    // their number is that of the slice. No signal mask is given.
    let ready = unsafe {
        libc::ppoll(
            entries.as_mut_ptr(),
            entries.len() as libc::nfds_t,
            time_out.as_ref().map_or(ptr::null(), ptr::from_ref),
            ptr::null(),
        )
    };
    match checked(ready) {
        Ok(nr_ready) => Ok(nr_ready > 0),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(error) => Err(error),
    }
}
