//! Descriptors that several modules use, and waits for them.
//!
//! Interfaces: memfd_create(2), eventfd(2), preadv2(2), ppoll(2).

use std::ffi::CStr;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{self, EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::fs::{self, MemfdFlags, OFlags, SealFlags};
use rustix::io::{Errno, ReadWriteFlags};

/// Makes a memory file of `size_bytes` zeros, close-on-exec, without a name, which can be sealed.
pub fn memory_file(name: &CStr, size_bytes: u64) -> io::Result<OwnedFd> {
    let file = fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fs::ftruncate(&file, size_bytes)?;
    Ok(file)
}

/// The seals of every file that is shared: its size is fixed for ever.
pub const FIXED_SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// As [`memory_file`], with a size that is fixed.
pub fn sealed_file(name: &CStr, size_bytes: u64) -> io::Result<OwnedFd> {
    let file = memory_file(name, size_bytes)?;
    fs::fcntl_add_seals(&file, FIXED_SIZE)?;
    Ok(file)
}

/// An eventfd(2): a counter in the kernel that threads can wait for, also of another process.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// One with no signal.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wakes the threads that wait, or the next one.
    pub fn signal(&self) {
        // A full counter is refused, and wakes all the same; no other error is possible on an
        // eventfd.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Drops all signals so far. Never blocks.
    pub fn drain(&self) {
        let mut count = [0; 8];
        // `NOWAIT`: `NONBLOCK` belongs to the open file, and the other side may have turned it off.
        // The offset is -1: that of the file, which has none.
        let result = rustix::io::preadv2(&self.0, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT);
        if result == Err(Errno::OPNOTSUPP) {
            // An old kernel (before 5.8): then only the flag keeps the read from blocking.
            self.keep_nonblocking();
            let _ = rustix::io::read(&self.0, &mut count);
        }
    }

    /// Whether a signal would find no room: after 2^64 - 2 of them, or if the other side has filled
    /// it.
    pub fn is_full(&self) -> bool {
        // A failed call shows nothing.
        matches!(poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], Some(Duration::ZERO)), Ok(false))
    }

    /// Makes it block, and fills it: what the other side could do.
    #[cfg(test)]
    pub fn spoil(&self) {
        self.drain();
        assert_eq!(rustix::io::write(&self.0, &(u64::MAX - 1).to_ne_bytes()), Ok(8));
        fs::fcntl_setfl(&self.0, OFlags::empty()).unwrap();
    }

    /// Turns `NONBLOCK` on if it was turned off. Returns whether it was.
    pub fn keep_nonblocking(&self) -> bool {
        match fs::fcntl_getfl(&self.0) {
            Ok(flags) if !flags.contains(OFlags::NONBLOCK) => {
                let _ = fs::fcntl_setfl(&self.0, flags | OFlags::NONBLOCK);
                true
            }
            _ => false,
        }
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

/// Waits once. Returns whether something happened at a descriptor, which its entry shows. `None`
/// waits without a limit. A signal counts as a timeout.
pub fn poll(entries: &mut [PollFd<'_>], time_out: Option<Duration>) -> io::Result<bool> {
    let time_out = time_out.map(|time| Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    });
    match event::poll(entries, time_out.as_ref()) {
        Ok(nr_ready) => Ok(nr_ready > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
