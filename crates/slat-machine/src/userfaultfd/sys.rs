//! The system calls and their arguments: plain numbers in and out.
//!
//! Interface: `include/uapi/linux/userfaultfd.h`; userfaultfd(2), ioctl_userfaultfd(2). The C
//! library has none of it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::Wake;
use crate::descriptors::{EventFd, checked};

/// `UFFD_API`.
const API: u64 = 0xAA;
/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: libc::c_int = 1;
const FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;

pub(super) const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
pub(super) const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
pub(super) const FEATURE_MINOR_SHMEM: u64 = 1 << 10;

pub(super) const MODE_MISSING: u64 = 1 << 0;
pub(super) const MODE_MINOR: u64 = 1 << 2;

pub(super) const NR_WAKE: u32 = 0x02;
pub(super) const NR_COPY: u32 = 0x03;
pub(super) const NR_CONTINUE: u32 = 0x07;
const NR_REGISTER: u32 = 0x00;
const NR_UNREGISTER: u32 = 0x01;
const NR_API: u32 = 0x3F;
/// `USERFAULTFD_IOC_NEW`, of /dev/userfaultfd.
const NR_NEW: u32 = 0x00;

/// `UFFDIO_COPY_MODE_DONTWAKE` and `UFFDIO_CONTINUE_MODE_DONTWAKE`.
const DONTWAKE: u64 = 1;

pub(super) const EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const EVENT_FORK: u8 = 0x13;

pub(super) const FAULT_WRITE: u64 = 1 << 0;
pub(super) const FAULT_WRITE_PROTECTED: u64 = 1 << 1;
pub(super) const FAULT_MINOR: u64 = 1 << 2;

/// `struct uffdio_api`.
#[repr(C)]
struct UffdioApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct UffdioRange {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct UffdioRegister {
    range: UffdioRange,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct UffdioCopy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

/// `struct uffdio_continue`.
#[repr(C)]
struct UffdioContinue {
    range: UffdioRange,
    mode: u64,
    mapped: i64,
}

/// `struct uffd_msg`; the last three words are a union, here as for a page fault.
#[repr(C)]
#[derive(Default)]
pub(super) struct Message {
    pub(super) event: u8,
    reserved1: u8,
    reserved2: u16,
    reserved3: u32,
    pub(super) flags: u64,
    pub(super) address: u64,
    thread_id: u64,
}

const _: () = assert!(size_of::<Message>() == 32, "the kernel copies whole messages");

/// Direction bits of an ioctl's number.
const NONE: u32 = 0;
const WRITE: u32 = 1;
const READ: u32 = 2;

/// `_IOC` of `asm-generic/ioctl.h`, with the type of this interface.
const fn ioctl_number(direction: u32, nr: u32, size_bytes: usize) -> u32 {
    (direction << 30) | ((size_bytes as u32) << 16) | (0xAA << 8) | nr
}

/// A structure that the kernel reads and writes in one of the calls.
///
/// # Safety
/// It is `repr(C)`, valid with any bits, laid out as the kernel's, and `NUMBER` has its size.
unsafe trait Argument {
    const NUMBER: u32;
}

// SAFETY: plain integers as in the header; the number has its size.
unsafe impl Argument for UffdioApi {
    const NUMBER: u32 = ioctl_number(READ | WRITE, NR_API, size_of::<UffdioApi>());
}
// SAFETY: as above.
unsafe impl Argument for UffdioRegister {
    const NUMBER: u32 = ioctl_number(READ | WRITE, NR_REGISTER, size_of::<UffdioRegister>());
}
// SAFETY: as above.
unsafe impl Argument for UffdioCopy {
    const NUMBER: u32 = ioctl_number(READ | WRITE, NR_COPY, size_of::<UffdioCopy>());
}
// SAFETY: as above.
unsafe impl Argument for UffdioContinue {
    const NUMBER: u32 = ioctl_number(READ | WRITE, NR_CONTINUE, size_of::<UffdioContinue>());
}

/// # Safety
/// The caller allows what the call does to the memory that `argument` names.
unsafe fn ioctl<A: Argument>(fd: BorrowedFd<'_>, argument: &mut A) -> io::Result<()> {
    // SAFETY: the number belongs to the type, which outlives the call; the caller ensures the rest.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), A::NUMBER as _, &raw mut *argument) }).map(drop)
}

/// The names of the calls by which [`open`] has made a descriptor.
pub(super) struct Opened {
    pub(super) fd: OwnedFd,
    pub(super) handles_kernel_faults: bool,
}

/// Opens a descriptor in the first way that this user may: the system call, the device, the system
/// call for faults in user mode.
///
/// # Errors
/// Of the last way; that of the first, if it was not about permissions.
pub(super) fn open() -> io::Result<Opened> {
    let denied = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
    match open_by_call(FLAGS) {
        Ok(fd) => return Ok(Opened { fd, handles_kernel_faults: true }),
        Err(error) if !denied(&error) => return Err(error),
        Err(_) => {}
    }
    if let Ok(fd) = open_by_device() {
        return Ok(Opened { fd, handles_kernel_faults: true });
    }
    match open_by_call(FLAGS | USER_MODE_ONLY) {
        Ok(fd) => Ok(Opened { fd, handles_kernel_faults: false }),
        // A kernel without the flag (before 5.11): what is missing is the permission.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(io::Error::from_raw_os_error(libc::EPERM)),
        Err(error) => Err(error),
    }
}

fn open_by_call(flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: takes a plain number.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) } as libc::c_int;
    checked(fd)?;
    // SAFETY: just opened, and owned by nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn open_by_device() -> io::Result<OwnedFd> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?;
    // SAFETY: takes a plain number.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), ioctl_number(NONE, NR_NEW, 0) as _, FLAGS) };
    checked(fd)?;
    // SAFETY: just opened, and owned by nothing else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `UFFDIO_API`, once for each descriptor: requests `features` and returns all features of the
/// kernel.
pub(super) fn handshake(fd: BorrowedFd<'_>, features: u64) -> io::Result<u64> {
    let mut argument = UffdioApi { api: API, features, ioctls: 0 };
    // SAFETY: names no memory.
    unsafe { ioctl(fd, &mut argument) }?;
    Ok(argument.features)
}

/// `UFFDIO_REGISTER`; returns the calls that are allowed for the range, as bits `1 << NR`.
///
/// # Safety
/// Every user of the `len_bytes` from `start` on may wait, and accepts any contents of pages that
/// were never touched.
pub(super) unsafe fn register(fd: BorrowedFd<'_>, start: u64, len_bytes: u64, mode: u64) -> io::Result<u64> {
    let mut argument = UffdioRegister { range: UffdioRange { start, len: len_bytes }, mode, ioctls: 0 };
    // SAFETY: the caller's promise.
    unsafe { ioctl(fd, &mut argument) }?;
    Ok(argument.ioctls)
}

/// `UFFDIO_UNREGISTER`.
pub(super) fn unregister(fd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    plain_range(fd, NR_UNREGISTER, start, len_bytes)
}

/// `UFFDIO_WAKE`.
pub(super) fn wake(fd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> io::Result<()> {
    plain_range(fd, NR_WAKE, start, len_bytes)
}

fn plain_range(fd: BorrowedFd<'_>, nr: u32, start: u64, len_bytes: u64) -> io::Result<()> {
    let argument = UffdioRange { start, len: len_bytes };
    let number = ioctl_number(READ, nr, size_of::<UffdioRange>());
    // SAFETY: the kernel only reads the argument, which has the size in the number; neither
    // call changes memory.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), number as _, &raw const argument) }).map(drop)
}

const fn wake_mode(wake: Wake) -> u64 {
    match wake {
        Wake::Waiters => 0,
        Wake::None => DONTWAKE,
    }
}

/// `UFFDIO_COPY` of `bytes` to `dst`; `Err` has the number of bytes that were copied before.
///
/// # Safety
/// The pages at `dst` may get these contents, if they have none.
pub(super) unsafe fn copy(fd: BorrowedFd<'_>, dst: u64, bytes: &[u8], wake: Wake) -> Result<(), (io::Error, u64)> {
    let src = bytes.as_ptr().expose_provenance() as u64;
    let mut argument = UffdioCopy { dst, src, len: bytes.len() as u64, mode: wake_mode(wake), copy: 0 };
    // SAFETY: the source is a slice that outlives the call; the caller ensures the rest.
    unsafe { ioctl(fd, &mut argument) }.map_err(|error| (error, u64::try_from(argument.copy).unwrap_or(0)))
}

/// `UFFDIO_CONTINUE`; `Err` has the number of bytes that were mapped before.
///
/// # Safety
/// The pages from `start` on may get the contents that their file has, if they have none.
pub(super) unsafe fn map_cached(
    fd: BorrowedFd<'_>,
    start: u64,
    len_bytes: u64,
    wake: Wake,
) -> Result<(), (io::Error, u64)> {
    let mut argument =
        UffdioContinue { range: UffdioRange { start, len: len_bytes }, mode: wake_mode(wake), mapped: 0 };
    // SAFETY: the caller's promise.
    unsafe { ioctl(fd, &mut argument) }.map_err(|error| (error, u64::try_from(argument.mapped).unwrap_or(0)))
}

/// Reads one message; `None` if there is none.
pub(super) fn read(fd: BorrowedFd<'_>) -> io::Result<Option<Message>> {
    let mut message = Message::default();
    // SAFETY: the kernel writes at most one message, which is valid with any bits.
    let nr_bytes = unsafe { libc::read(fd.as_raw_fd(), (&raw mut message).cast(), size_of::<Message>()) };
    match usize::try_from(nr_bytes) {
        Ok(nr_bytes) if nr_bytes == size_of::<Message>() => {
            if message.event == EVENT_FORK {
                // A descriptor of the child's memory, which comes with the message and is not
                // wanted.
                // SAFETY: the kernel has just opened it for this reader.
                drop(unsafe { OwnedFd::from_raw_fd(message.flags as libc::c_int) });
            }
            Ok(Some(message))
        }
        Ok(_) => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        Err(_) => match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
            error => Err(error),
        },
    }
}

/// The epoll instance of a reader.
pub(super) struct Poll(OwnedFd);

/// What [`Poll::wait`] waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Woken {
    Message,
    Stop,
}

impl Poll {
    /// For messages on `fd`, each of which wakes only some of the readers (`EPOLLEXCLUSIVE`), and
    /// for `stop`.
    pub(super) fn new(fd: BorrowedFd<'_>, stop: &EventFd) -> io::Result<Poll> {
        // SAFETY: takes a plain number.
        let poll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        checked(poll)?;
        // SAFETY: just opened, and owned by nothing else.
        let poll = Poll(unsafe { OwnedFd::from_raw_fd(poll) });
        poll.add(fd.as_raw_fd(), libc::EPOLLIN | libc::EPOLLEXCLUSIVE, Woken::Message)?;
        poll.add(stop.as_fd().as_raw_fd(), libc::EPOLLIN, Woken::Stop)?;
        Ok(poll)
    }

    fn add(&self, fd: libc::c_int, events: libc::c_int, woken: Woken) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: woken as u64 };
        // SAFETY: the event outlives the call.
        checked(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) }).map(drop)
    }

    /// Waits without a limit. `stop` goes before a message.
    pub(super) fn wait(&self) -> io::Result<Woken> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 2];
        loop {
            // SAFETY: the kernel writes at most as many events as there is room for.
            let nr = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), events.len() as _, -1) };
            match checked(nr) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(nr) if events[..nr as usize].iter().any(|event| event.u64 == Woken::Stop as u64) => {
                    return Ok(Woken::Stop);
                }
                Ok(nr) if nr > 0 => return Ok(Woken::Message),
                Ok(_) => {}
            }
        }
    }
}
