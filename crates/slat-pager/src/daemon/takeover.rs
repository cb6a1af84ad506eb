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
//! Where vCPUs use a file of the monitor, their bitmap is found in the same way; if the monitor has
//! mapped it and closed its descriptor, by that mapping (`/proc/PID/map_files`, which takes
//! CAP_CHECKPOINT_RESTORE).
//!
//! This needs the rights to look into the monitor (`PTRACE_MODE_ATTACH`: the same user, or
//! CAP_SYS_PTRACE where Yama restricts that), and happens before the daemon gives up its rights.
//!
//! # What is lost
//! - A machine whose handshake was accepted and whose file is not there yet, a time of milliseconds:
//!   the monitor has to load its snapshot once more.
//! - The connection by which vCPUs ask for pages ([`guest_memfd`](crate::protocol::guest_memfd)), where
//!   no service manager keeps it. The successor fills all pages at which they leave the guest, so that
//!   they need not ask.

#![expect(unsafe_code, reason = "files of machines that another process has made are mapped")]

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::protocol::guest_memfd::GuestAddresses;
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
    /// vCPUs that use a file of the monitor.
    #[serde(default)]
    pub vcpus: Option<Vcpus>,
}

/// What vCPUs have that ask for pages.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Vcpus {
    /// Their bitmap.
    pub bitmap: FileIdentity,
    /// The pager's end of the connection by which they ask.
    pub connection: FileIdentity,
    /// Where the guest has its regions.
    pub guest: GuestAddresses,
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
    /// The bitmap of its vCPUs.
    pub bitmap: Option<OwnedFd>,
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
    /// Makes `folder` if there is none, and locks it. It does not make the folders above it: what is
    /// mistyped is not made.
    ///
    /// # Errors
    /// `WouldBlock`: another pager has it.
    pub fn take(folder: &Path, standby: Standby) -> io::Result<Lock> {
        use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
        match fs::DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
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
    let Some(userfaultfd) = find_descriptor(&monitor, description.pid, description.userfaultfd)? else {
        return no_copy(&monitor, "userfaultfd");
    };
    let bitmap = match description.vcpus.as_ref().map(|vcpus| vcpus.bitmap) {
        None => None,
        Some(bitmap) => match find_descriptor(&monitor, description.pid, bitmap)? {
            Some(found) => Some(found),
            None => match find_mapping(description.pid, bitmap)? {
                Some(found) => Some(found),
                None => return no_copy(&monitor, "vCPUs' bitmap"),
            },
        },
    };
    let userfaultfd = Userfaultfd::from_fd(userfaultfd).map_err(io::Error::other)?;
    Ok(Some(Orphan { description, state, userfaultfd, bitmap, monitor }))
}

/// A monitor that ends closes its descriptors before it is gone.
fn no_copy(monitor: &OwnedFd, of: &str) -> io::Result<Option<Orphan>> {
    match has_ended(monitor) {
        true => Ok(None),
        false => Err(io::Error::new(io::ErrorKind::NotFound, format!("the monitor has no copy of its {of}"))),
    }
}

fn has_ended(monitor: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(monitor, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|nr| nr > 0)
}

/// A copy of a descriptor that the monitor has of `file`.
fn find_descriptor(monitor: &OwnedFd, pid: i32, file: FileIdentity) -> io::Result<Option<OwnedFd>> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let Ok(stat) = rustix::fs::stat(entry.path()) else { continue };
        if (FileIdentity { device: stat.st_dev, inode: stat.st_ino }) != file {
            continue;
        }
        // The monitor may have closed it and opened another meanwhile: the copy is checked.
        let copy = pidfd_getfd(monitor, number, PidfdGetfdFlags::empty())?;
        if FileIdentity::of(copy.as_fd())? == file {
            return Ok(Some(copy));
        }
    }
    Ok(None)
}

/// A descriptor of `file`, which the monitor has mapped.
fn find_mapping(pid: i32, file: FileIdentity) -> io::Result<Option<OwnedFd>> {
    let device = format!("{:02x}:{:02x}", rustix::fs::major(file.device), rustix::fs::minor(file.device));
    let inode = file.inode.to_string();
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        // ADDRESSES RIGHTS OFFSET DEVICE INODE NAME
        let mut fields = line.split_ascii_whitespace();
        let (Some(addresses), true) =
            (fields.next(), fields.nth(2) == Some(device.as_str()) && fields.next() == Some(inode.as_str()))
        else {
            continue;
        };
        // It may be another mapping by now.
        let path = format!("/proc/{pid}/map_files/{addresses}");
        let opened = fs::OpenOptions::new().read(true).write(true).open(path)?;
        if FileIdentity::of(opened.as_fd())? == file {
            return Ok(Some(opened.into()));
        }
    }
    Ok(None)
}
