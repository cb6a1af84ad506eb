//! Unix sockets with a name in the file system.
//!
//! # Guarantees
//! - Of programs that [`bind`] one path at once, one gets a listener. The others get `AddrInUse`.
//! - A socket that a program listens on is never removed, whatever made it.
//! - A program that is killed at any moment keeps no other from the path.
//!
//! # Implementation
//! A socket that refuses connections is one that a dead program has left, or one that is bound and
//! does not listen yet. So the path is looked at, cleared, bound and listened on by one program at a
//! time: the one that has a lock (flock(2)) on the file `PATH.lock`. The kernel releases the lock of a
//! program that is killed. The program that made the file removes it, while it has the lock; a file
//! that was left is used again, and stays. Only its user can open it, so no other user can hold
//! the lock.
//!
//! A program that may not make that file, or not open the one of another user, clears nothing: it
//! listens only on a path that is free.
//!
//! # What is left
//! A program that binds without this lock (a service manager) has its socket removed if it is looked
//! at between its bind(2) and listen(2).

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// A program has the lock for a few system calls. One that has it for so long was stopped.
const LONGEST_WAIT: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(2);

/// A listener on `path`, in place of what a dead program has left.
///
/// # Errors
/// Of the socket; `AddrInUse` if a program listens on it, or has been about to for ten seconds. Of
/// the lock, if a socket of a dead program cannot be replaced without it.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let lock = match Lock::take(path) {
        Ok(lock) => lock,
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => return Err(error),
        Err(of_lock) => {
            return UnixListener::bind(path).map_err(|error| match is_left(path) {
                Ok(true) => of_lock,
                _ => error,
            });
        }
    };
    let bound = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => match is_left(path) {
            Ok(true) => fs::remove_file(path).and_then(|()| UnixListener::bind(path)),
            Ok(false) => Err(error),
            Err(other) => Err(other),
        },
        bound => bound,
    };
    drop(lock);
    bound
}

/// Whether a socket is at `path` that nothing listens on.
fn is_left(path: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    // A program that is too busy to accept is none to wait for.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(matches!(connect(&socket, &SocketAddrUnix::new(path)?), Err(Errno::CONNREFUSED)))
}

/// The right to look at a path and to bind it.
#[derive(Debug)]
struct Lock {
    _file: File,
    /// The file, if this made it.
    made: Option<PathBuf>,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before the lock ends: a program that waits for it finds a file without a name.
        if let Some(path) = &self.made {
            let _ = fs::remove_file(path);
        }
    }
}

impl Lock {
    fn take(of: &Path) -> io::Result<Lock> {
        let mut path = of.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let start = Instant::now();
        loop {
            let Some((file, made)) = open(&path)? else { continue };
            lock(&file, start)?;
            // The file that has the name now, or the lock keeps no one out.
            if file.metadata()?.nlink() > 0 {
                return Ok(Lock { _file: file, made: made.then_some(path) });
            }
        }
    }
}

/// Waits for the lock of `file`, and does not open it anew meanwhile: then it would be a file that
/// this program has not made, and would stay.
fn lock(file: &File, start: Instant) -> io::Result<()> {
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if start.elapsed() < LONGEST_WAIT => thread::sleep(PAUSE),
            Err(Errno::WOULDBLOCK) => return Err(io::ErrorKind::AddrInUse.into()),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The file `path`, and whether this call has made it; `None` if it is removed at this moment.
fn open(path: &Path) -> io::Result<Option<(File, bool)>> {
    let mut options = OpenOptions::new();
    // No link is followed, and no reader of a pipe waited for.
    options.read(true).write(true).mode(0o600).custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map(|file| Some((file, true))),
    }
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        opened => opened.map(|file| Some((file, false))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::sync::Barrier;

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
        // No lock is left.
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn of_many_that_start_at_once_one_listens() {
        const NR_THREADS: usize = 16;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        for nr in 0..200 {
            // What a dead program has left: a socket, and from time to time a lock, too.
            let _ = fs::remove_file(&path);
            drop(UnixListener::bind(&path).unwrap());
            if nr % 4 == 0 {
                fs::write(folder.path().join("socket.lock"), "").unwrap();
            }
            let barrier = Barrier::new(NR_THREADS);
            let start = || {
                barrier.wait();
                bind(&path)
            };
            let bound: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = (0..NR_THREADS).map(|_| scope.spawn(start)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let (bound, refused): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
            assert_eq!(bound.len(), 1, "round {nr}: {bound:?}");
            for error in refused {
                assert_eq!(error.unwrap_err().kind(), io::ErrorKind::AddrInUse);
            }
            let client = connected(&path).expect("it is reached");
            let listener = bound.into_iter().next().unwrap().unwrap();
            listener.set_nonblocking(true).unwrap();
            listener.accept().expect("it is that one which is reached");
            drop(client);
            let lock_is_left = fs::remove_file(folder.path().join("socket.lock")).is_ok();
            assert_eq!(lock_is_left, nr % 4 == 0, "round {nr}: only one that was there before");
        }
    }

    #[test]
    fn a_lock_is_waited_for_until_its_program_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // It is killed between its bind and its listen.
        let killed = Lock::take(&path).unwrap();
        let bound = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&bound, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        thread::scope(|scope| {
            let second = scope.spawn(|| bind(&path));
            thread::sleep(Duration::from_millis(50));
            assert!(!second.is_finished());
            drop((bound, killed));
            second.join().unwrap().unwrap();
        });
    }

    #[test]
    fn without_a_lock_nothing_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        // A lock that cannot be opened, whatever rights the test has: no link is followed.
        std::os::unix::fs::symlink("elsewhere", folder.path().join("socket.lock")).unwrap();
        let first = bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert_eq!(bind(&path).unwrap_err().raw_os_error(), Some(Errno::LOOP.raw_os_error()));
        assert!(connected(&path).is_none() && path.exists() && !folder.path().join("elsewhere").exists());
    }
}
