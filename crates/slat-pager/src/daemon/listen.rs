//! Sockets on which monitors connect: made here, or passed by a service manager (`LISTEN_FDS`).
//!
//! # Guarantees
//! - A socket that another program listens on is not taken from it. A file that a dead pager has
//!   left is replaced.
//! - Descriptors of a service manager are taken once, and only those that are sockets with a path
//!   of the configuration, or that a dead pager had it [`keep`].

#![expect(unsafe_code, reason = "descriptors that the process was started with")]

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sendmsg_addr, socket_with,
};

use super::takeover::FileIdentity;
use crate::linux::unix_socket;

/// The first descriptor of a service manager (sd_listen_fds(3)).
const FIRST: RawFd = 3;
const MOST: RawFd = 1 << 16;

/// The sockets that a service manager passes.
#[derive(Debug, Default)]
pub struct Passed {
    listeners: Vec<UnixListener>,
    kept: Vec<(FileIdentity, OwnedFd)>,
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
        let mut passed = Passed::default();
        for descriptor in FIRST..FIRST + nr {
            // SAFETY: the service manager passes these to this process, and the caller promises
            // that nothing else has taken them.
            let fd = unsafe { OwnedFd::from_raw_fd(descriptor) };
            if rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).is_err() {
                continue;
            }
            match rustix::net::sockopt::socket_acceptconn(&fd) {
                Ok(true) => passed.listeners.push(fd.into()),
                Ok(false) | Err(_) => passed.kept.extend(FileIdentity::of(fd.as_fd()).ok().map(|file| (file, fd))),
            }
        }
        passed
    }

    /// What a dead pager had kept of `file`.
    pub fn take_kept(&mut self, file: FileIdentity) -> Option<OwnedFd> {
        self.kept.iter().position(|(found, _)| *found == file).map(|nr| self.kept.swap_remove(nr).1)
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

    /// How many listeners are left.
    pub fn nr_left(&self) -> usize {
        self.listeners.len()
    }
}

/// Has the service manager, if there is one, keep a copy of a connection, which a successor is passed
/// (`FDSTORE`, sd_notify(3)). It drops the copy when the other side closes.
///
/// # Errors
/// Of the socket of the service manager.
pub fn keep(connection: BorrowedFd<'_>) -> io::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let Some(manager) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match manager.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(manager.as_bytes())?,
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let connection = [connection];
    ancillary.push(SendAncillaryMessage::ScmRights(&connection));
    let what = [IoSlice::new(b"FDSTORE=1\nFDNAME=vcpus")];
    sendmsg_addr(&socket, &address, &what, &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}
