//! Sockets on which monitors connect: made here, or passed by a service manager (`LISTEN_FDS`).
//!
//! # Guarantees
//! - A socket that another program listens on is not taken from it. A file that a dead pager has
//!   left is replaced.
//! - Descriptors of a service manager are taken once, and only those that are sockets with a path
//!   of the configuration.

#![expect(unsafe_code, reason = "descriptors that the process was started with")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use crate::linux::unix_socket;

/// The first descriptor of a service manager (sd_listen_fds(3)).
const FIRST: RawFd = 3;
const MOST: RawFd = 1024;

/// The sockets that a service manager passes.
#[derive(Debug, Default)]
pub struct Passed {
    listeners: Vec<UnixListener>,
}

impl Passed {
    /// Takes them.
    ///
    /// # Safety
    /// It is called once, before the process opens or closes a descriptor from 3 on by itself, or
    /// `LISTEN_PID` is not this process.
    pub unsafe fn take() -> Passed {
        let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
        if number("LISTEN_PID") != Some(std::process::id()) {
            return Passed::default();
        }
        let nr = number("LISTEN_FDS").and_then(|nr| RawFd::try_from(nr).ok()).unwrap_or(0).min(MOST);
        let listener = |descriptor| {
            // SAFETY: the service manager passes these to this process, and the caller promises
            // that nothing else has taken them.
            let fd = unsafe { OwnedFd::from_raw_fd(descriptor) };
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).ok()?;
            rustix::net::sockopt::socket_acceptconn(&fd).ok()?.then(|| UnixListener::from(fd))
        };
        Passed { listeners: (FIRST..FIRST + nr).filter_map(listener).collect() }
    }

    /// The listener on `path`: that of the service manager, or a new one.
    ///
    /// # Errors
    /// Of the socket; `AddrInUse` if a program listens on it.
    pub fn listen(&mut self, path: &Path) -> io::Result<UnixListener> {
        let is_it =
            |listener: &UnixListener| listener.local_addr().is_ok_and(|address| address.as_pathname() == Some(path));
        let listener = match self.listeners.iter().position(is_it) {
            Some(nr) => self.listeners.swap_remove(nr),
            None => unix_socket::bind(path)?,
        };
        listener.set_nonblocking(true)?;
        Ok(listener)
    }

    /// How many are left.
    pub fn nr_left(&self) -> usize {
        self.listeners.len()
    }
}
