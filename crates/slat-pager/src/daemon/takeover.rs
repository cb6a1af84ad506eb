//! A successor takes over the machines of a pager that has died.
//!
//! # Guarantees
//! - One pager at a time has a runtime folder ([`Lock`]). The lock is free only once every thread
//!   of the last one is dead.
//! - A machine is taken over only if its monitor is still the same process and has the same
//!   userfaultfd. Files of machines whose monitor has ended are removed.
//!
//! # Implementation
//! The file of a machine ([`State`]) says which process its monitor is and
//! which file its userfaultfd is. The successor looks through the monitor's descriptors for that
//! file and copies the descriptor (`pidfd_getfd`). All threads of the machine that wait are woken:
//! those whose messages were read fault again.
//!
//! This needs the rights to look into the monitor (`PTRACE_MODE_ATTACH`: the same user, or
//! CAP_SYS_PTRACE where Yama restricts that), and happens before the daemon gives up its rights.
//!
//! # What is lost
//! A machine whose handshake was accepted and whose file is not there yet, a time of milliseconds:
//! the monitor has to load its snapshot once more.

#![expect(unsafe_code, reason = "files of machines that another process has made are mapped")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::userfaultfd::Userfaultfd;
use crate::vm::Region;
use crate::vm::state::State;

/// The name of a machine's file ends so.
const EXTENSION: &str = "vm";

/// Which file of the kernel a descriptor belongs to. Copies of a descriptor in all processes have
/// the same one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct FileIdentity {
    /// The device.
    pub device: u64,
    /// The inode; each userfaultfd has one of its own since Linux 5.12.
    pub inode: u64,
}

impl FileIdentity {
    /// Of `fd`.
    ///
    /// # Errors
    /// Of fstat(2).
    pub fn of(fd: BorrowedFd<'_>) -> rustix::io::Result<FileIdentity> {
        let stat = rustix::fs::fstat(fd)?;
        Ok(FileIdentity { device: stat.st_dev, inode: stat.st_ino })
    }
}

/// What a machine's file says.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Description {
    /// The socket that it came to.
    pub socket: PathBuf,
    /// The monitor's process.
    pub pid: i32,
    /// The file of a pidfd of it; one for each process since Linux 6.9.
    pub process: FileIdentity,
    /// The userfaultfd.
    pub userfaultfd: FileIdentity,
    /// The snapshot, by [`Identity`](crate::source::Identity).
    pub snapshot: String,
    /// The regions.
    pub regions: Vec<Region>,
    /// Of this start of the system.
    pub boot: String,
}

/// A machine that has no pager.
#[derive(Debug)]
pub struct Orphan {
    /// What its file says.
    pub description: Description,
    /// Its pages.
    pub state: State,
    /// A copy of its descriptor.
    pub userfaultfd: Userfaultfd,
    /// Readable once the monitor has ended.
    pub monitor: OwnedFd,
}

/// The right to a runtime folder.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Whether to wait for a folder that another pager has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standby {
    /// It is an error.
    No,
    /// Until it dies.
    Wait,
}

impl Lock {
    /// Makes `folder` if there is none, and locks it.
    ///
    /// # Errors
    /// `WouldBlock`: another pager has it.
    pub fn take(folder: &Path, standby: Standby) -> io::Result<Lock> {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut options = fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).mode(0o600).open(folder.join("lock"))?;
        let operation = match standby {
            Standby::No => FlockOperation::NonBlockingLockExclusive,
            Standby::Wait => FlockOperation::LockExclusive,
        };
        rustix::io::retry_on_intr(|| rustix::fs::flock(&file, operation))?;
        Ok(Lock { _file: file })
    }
}

/// The file of a machine in `folder`.
pub fn path_of(folder: &Path, description: &Description) -> PathBuf {
    folder.join(format!("{}-{}.{EXTENSION}", description.pid, description.userfaultfd.inode))
}

/// What names this start of the system.
///
/// # Errors
/// Of the file.
pub fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_string())
}

/// A descriptor of the process `pid`, and which process that is.
///
/// # Errors
/// `ESRCH`: there is none.
pub fn monitor(pid: i32) -> rustix::io::Result<(OwnedFd, FileIdentity)> {
    let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
    let monitor = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
    let identity = FileIdentity::of(monitor.as_fd())?;
    Ok((monitor, identity))
}

/// The machines in `folder` whose monitors live.
///
/// # Safety
/// This process has the [`Lock`] of `folder` until the orphans and what comes of them are dropped,
/// has no [`State`] of a file there, and has not called this before.
///
/// # Errors
/// The folder cannot be read. What is wrong with one machine is logged.
pub unsafe fn orphans(folder: &Path) -> io::Result<Vec<Orphan>> {
    let boot = boot()?;
    let mut orphans = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some(EXTENSION) => {}
            // A pager died while it wrote this.
            Some("new") => {
                fs::remove_file(&path)?;
                continue;
            }
            _ => continue,
        }
        // SAFETY: the caller's promise; each path is there once.
        match unsafe { orphan(&path, &boot) } {
            Ok(Some(orphan)) => orphans.push(orphan),
            Ok(None) => {
                tracing::info!(path = %path.display(), "a monitor has ended without its pager");
                fs::remove_file(&path)?;
            }
            Err(error) => tracing::error!(path = %path.display(), %error, "a machine cannot be taken over; it waits"),
        }
    }
    Ok(orphans)
}

/// The machine of the file `path`; `None` if its monitor has ended.
///
/// # Safety
/// As of [`State::open`].
unsafe fn orphan(path: &Path, boot: &str) -> io::Result<Option<Orphan>> {
    // SAFETY: the caller's promise.
    let (state, description) = unsafe { State::open(path) }?;
    let description: Description = serde_json::from_slice(&description)?;
    if description.boot != boot {
        return Ok(None);
    }
    let (monitor, process) = match monitor(description.pid) {
        Ok(found) => found,
        Err(Errno::SRCH) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    if process != description.process {
        return Ok(None);
    }
    match find_descriptor(&monitor, &description)? {
        Some(userfaultfd) => Ok(Some(Orphan { description, state, userfaultfd, monitor })),
        // A monitor that ends closes its descriptors before it is gone.
        None if has_ended(&monitor) => Ok(None),
        None => Err(io::Error::new(io::ErrorKind::NotFound, "the monitor has no copy of its userfaultfd")),
    }
}

fn has_ended(monitor: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(monitor, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|nr| nr > 0)
}

fn find_descriptor(monitor: &OwnedFd, description: &Description) -> io::Result<Option<Userfaultfd>> {
    let folder = PathBuf::from(format!("/proc/{}/fd", description.pid));
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Ok(stat) = rustix::fs::stat(entry.path()) else { continue };
        let identity = FileIdentity { device: stat.st_dev, inode: stat.st_ino };
        if identity != description.userfaultfd {
            continue;
        }
        // The monitor may have closed it and opened another meanwhile: the copy is checked.
        let copy = pidfd_getfd(monitor, number, PidfdGetfdFlags::empty())?;
        if let Ok(userfaultfd) = Userfaultfd::from_fd(copy)
            && FileIdentity::of(userfaultfd.as_fd())? == description.userfaultfd
        {
            return Ok(Some(userfaultfd));
        }
    }
    Ok(None)
}
