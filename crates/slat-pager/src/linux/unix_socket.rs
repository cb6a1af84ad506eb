//! Unix sockets with a name in the file system.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// A listener on `path`, in place of what a dead program has left.
///
/// # Errors
/// Of the socket; `AddrInUse` if a program listens on it.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if !fs::symlink_metadata(path)?.file_type().is_socket() || !is_dead(path)? {
                return Err(error);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

/// Whether nothing listens on the socket at `path`.
fn is_dead(path: &Path) -> io::Result<bool> {
    // A program that is too busy to accept is none to wait for.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(matches!(connect(&socket, &SocketAddrUnix::new(path)?), Err(Errno::CONNREFUSED)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn connected(path: &Path) -> Option<OwnedFd> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok().map(|()| socket)
    }

    #[test]
    fn a_file_that_was_left_is_replaced_and_a_living_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        // Also one that accepts nothing, and has no room for another.
        let mut waiting = Vec::new();
        while let Some(stream) = connected(&path) {
            waiting.push(stream);
        }
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop((first, waiting));
        assert!(path.exists());
        bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "a file of someone").unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists());
    }
}
