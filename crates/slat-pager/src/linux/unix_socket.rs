//! Unix sockets with a name in the file system.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// A listener on `path`, in place of what a dead program has left.
///
/// # Errors
/// Of the socket; `AddrInUse` if a program listens on it.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_left = fs::symlink_metadata(path)?.file_type().is_socket()
                && UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
            if !is_left {
                return Err(error);
            }
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_left_is_replaced_and_a_living_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let first = bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(path.exists());
        bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "a file of someone").unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(path.exists());
    }
}
