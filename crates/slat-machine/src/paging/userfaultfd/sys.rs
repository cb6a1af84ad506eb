//! The calls of a userfaultfd and their arguments: plain numbers in and out.
//!
//! Interface: `include/uapi/linux/userfaultfd.h`; userfaultfd(2), ioctl_userfaultfd(2). The C
//! library has none of it, and rustix only the first call.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::ffi;
use rustix::io::{Errno, Result};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::Wake;
use crate::linux::descriptors::EventFd;

/// `UFFD_API`.
const API: u64 = 0xAA;
/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
const FLAGS: UserfaultfdFlags = UserfaultfdFlags::CLOEXEC.union(UserfaultfdFlags::NONBLOCK);

pub(super) const FEATURE_MISSING_HUGETLBFS: u64 = 1 << 4;
pub(super) const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
pub(super) const FEATURE_MINOR_SHMEM: u64 = 1 << 10;

pub(super) const MODE_MISSING: u64 = 1 << 0;
pub(super) const MODE_MINOR: u64 = 1 << 2;

pub(super) const NR_WAKE: u8 = 0x02;
pub(super) const NR_COPY: u8 = 0x03;
pub(super) const NR_CONTINUE: u8 = 0x07;

const IOC_API: Opcode = opcode::read_write::<UffdioApi>(0xAA, 0x3F);
const IOC_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xAA, 0x00);
const IOC_UNREGISTER: Opcode = opcode::read::<UffdioRange>(0xAA, 0x01);
const IOC_WAKE: Opcode = opcode::read::<UffdioRange>(0xAA, NR_WAKE);
const IOC_COPY: Opcode = opcode::read_write::<UffdioCopy>(0xAA, NR_COPY);
const IOC_CONTINUE: Opcode = opcode::read_write::<UffdioContinue>(0xAA, NR_CONTINUE);
/// `USERFAULTFD_IOC_NEW`, of /dev/userfaultfd.
const IOC_NEW: Opcode = opcode::none(0xAA, 0x00);

/// `UFFDIO_COPY_MODE_DONTWAKE` and `UFFDIO_CONTINUE_MODE_DONTWAKE`.
const DONTWAKE: u64 = 1;

pub(super) const EVENT_PAGEFAULT: u8 = 0x12;

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

/// `struct uffd_msg`, of a page fault; other messages have other fields.
pub(super) struct Message {
    pub(super) event: u8,
    pub(super) flags: u64,
    pub(super) address: u64,
}

/// [`IOC_NEW`], which returns a descriptor.
struct New;

// SAFETY: the call takes flags, no pointer, and returns a new descriptor.
unsafe impl Ioctl for New {
    type Output = OwnedFd;

    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        IOC_NEW
    }

    fn as_ptr(&mut self) -> *mut ffi::c_void {
        std::ptr::without_provenance_mut(FLAGS.bits() as usize)
    }

    unsafe fn output_from_ptr(descriptor: IoctlOutput, _: *mut ffi::c_void) -> Result<OwnedFd> {
        // SAFETY: just opened, and owned by nothing else.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }
}

/// A descriptor, and what this user may do with it.
pub(super) struct Opened {
    pub(super) fd: OwnedFd,
    pub(super) handles_kernel_faults: bool,
}

/// Opens a descriptor in the first way that this user may: the system call, the device, the system
/// call for faults in user mode.
///
/// # Errors
/// Of the last way; that of the first, if it was not about permissions.
pub(super) fn open() -> Result<Opened> {
    // SAFETY: the descriptor stays in this module, whose callers promise what it is used for.
    let open_by_call = |flags| unsafe { userfaultfd(flags) };
    match open_by_call(FLAGS) {
        Ok(fd) => return Ok(Opened { fd, handles_kernel_faults: true }),
        Err(Errno::PERM | Errno::ACCESS) => {}
        Err(error) => return Err(error),
    }
    if let Some(fd) = open_by_device() {
        return Ok(Opened { fd, handles_kernel_faults: true });
    }
    match open_by_call(FLAGS | USER_MODE_ONLY) {
        Ok(fd) => Ok(Opened { fd, handles_kernel_faults: false }),
        // A kernel without the flag (before 5.11): what is missing is the permission.
        Err(Errno::INVAL) => Err(Errno::PERM),
        Err(error) => Err(error),
    }
}

fn open_by_device() -> Option<OwnedFd> {
    let device = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").ok()?;
    // SAFETY: as for `New`.
    unsafe { ioctl(device, New) }.ok()
}

/// `UFFDIO_API`, once for each descriptor: requests `features` and returns all features of the
/// kernel.
pub(super) fn handshake(fd: BorrowedFd<'_>, features: u64) -> Result<u64> {
    let mut argument = UffdioApi { api: API, features, ioctls: 0 };
    // SAFETY: the argument is laid out as the kernel's, and names no memory.
    unsafe { ioctl(fd, Updater::<IOC_API, _>::new(&mut argument)) }?;
    Ok(argument.features)
}

/// `UFFDIO_REGISTER`; returns the calls that are allowed for the range, as bits `1 << NR`.
///
/// # Safety
/// Every user of the `len_bytes` from `start` on may wait, and accepts any contents of pages that
/// were never touched.
pub(super) unsafe fn register(fd: BorrowedFd<'_>, start: u64, len_bytes: u64, mode: u64) -> Result<u64> {
    let mut argument = UffdioRegister { range: UffdioRange { start, len: len_bytes }, mode, ioctls: 0 };
    // SAFETY: the argument is laid out as the kernel's; the caller's promise.
    unsafe { ioctl(fd, Updater::<IOC_REGISTER, _>::new(&mut argument)) }?;
    Ok(argument.ioctls)
}

/// `UFFDIO_UNREGISTER`.
pub(super) fn unregister(fd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> Result<()> {
    // SAFETY: the argument is laid out as the kernel's; the call changes no memory.
    unsafe { ioctl(fd, Setter::<IOC_UNREGISTER, _>::new(UffdioRange { start, len: len_bytes })) }
}

/// `UFFDIO_WAKE`.
pub(super) fn wake(fd: BorrowedFd<'_>, start: u64, len_bytes: u64) -> Result<()> {
    // SAFETY: as for `unregister`.
    unsafe { ioctl(fd, Setter::<IOC_WAKE, _>::new(UffdioRange { start, len: len_bytes })) }
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
pub(super) unsafe fn copy(
    fd: BorrowedFd<'_>,
    dst: u64,
    bytes: &[u8],
    wake: Wake,
) -> std::result::Result<(), (Errno, u64)> {
    let src = bytes.as_ptr().expose_provenance() as u64;
    let mut argument = UffdioCopy { dst, src, len: bytes.len() as u64, mode: wake_mode(wake), copy: 0 };
    // SAFETY: the argument is laid out as the kernel's, and its source is a slice that outlives the
    // call; the caller ensures the rest.
    unsafe { ioctl(fd, Updater::<IOC_COPY, _>::new(&mut argument)) }
        .map_err(|error| (error, u64::try_from(argument.copy).unwrap_or(0)))
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
) -> std::result::Result<(), (Errno, u64)> {
    let range = UffdioRange { start, len: len_bytes };
    let mut argument = UffdioContinue { range, mode: wake_mode(wake), mapped: 0 };
    // SAFETY: the argument is laid out as the kernel's; the caller's promise.
    unsafe { ioctl(fd, Updater::<IOC_CONTINUE, _>::new(&mut argument)) }
        .map_err(|error| (error, u64::try_from(argument.mapped).unwrap_or(0)))
}

/// Reads one message; `None` if there is none.
pub(super) fn read(fd: BorrowedFd<'_>) -> Result<Option<Message>> {
    // A byte, seven reserved ones, and three words: the flags, the address, the thread.
    let mut message = [0; 32];
    match rustix::io::read(fd, &mut message) {
        Ok(32) => {
            let [head, flags, address, _] = *message.as_chunks().0 else { return Err(Errno::IO) };
            let (flags, address) = (u64::from_ne_bytes(flags), u64::from_ne_bytes(address));
            Ok(Some(Message { event: head[0], flags, address }))
        }
        // The kernel copies whole messages.
        Ok(_) => Err(Errno::IO),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(error),
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
    pub(super) fn new(fd: BorrowedFd<'_>, stop: &EventFd) -> Result<Poll> {
        let poll = epoll::create(CreateFlags::CLOEXEC)?;
        let data = |woken: Woken| EventData::new_u64(woken as u64);
        epoll::add(&poll, fd, data(Woken::Message), EventFlags::IN | EventFlags::EXCLUSIVE)?;
        epoll::add(&poll, stop.as_fd(), data(Woken::Stop), EventFlags::IN)?;
        Ok(Poll(poll))
    }

    /// Waits without a limit. `stop` goes before a message.
    pub(super) fn wait(&self) -> Result<Woken> {
        let mut events = [MaybeUninit::<Event>::uninit(); 2];
        loop {
            match epoll::wait(&self.0, &mut events, None) {
                Err(Errno::INTR) | Ok(([], _)) => {}
                Err(error) => return Err(error),
                Ok((events, _)) if events.iter().any(|event| event.data.u64() == Woken::Stop as u64) => {
                    return Ok(Woken::Stop);
                }
                Ok(_) => return Ok(Woken::Message),
            }
        }
    }
}
