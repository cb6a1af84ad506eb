//! The calls of a userfaultfd and their arguments: plain numbers in and out.
//!
//! Interface: userfaultfd(2), ioctl_userfaultfd(2), `include/uapi/linux/userfaultfd.h`. The C
//! library has none of it, and rustix only the first call.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};

use rustix::ffi;
use rustix::io::{Errno, Result};
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Setter, Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

/// `UFFD_API`.
const API: u64 = 0xAA;
/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: UserfaultfdFlags = UserfaultfdFlags::from_bits_retain(1);
const FLAGS: UserfaultfdFlags = UserfaultfdFlags::CLOEXEC.union(UserfaultfdFlags::NONBLOCK);

const IOC_API: Opcode = opcode::read_write::<UffdioApi>(0xAA, 0x3F);
const IOC_REGISTER: Opcode = opcode::read_write::<UffdioRegister>(0xAA, 0x00);
const IOC_WAKE: Opcode = opcode::read::<UffdioRange>(0xAA, 0x02);
const IOC_COPY: Opcode = opcode::read_write::<UffdioCopy>(0xAA, 0x03);
const IOC_ZEROPAGE: Opcode = opcode::read_write::<UffdioFill>(0xAA, 0x04);
const IOC_WRITEPROTECT: Opcode = opcode::read_write::<UffdioWriteProtect>(0xAA, 0x06);
const IOC_CONTINUE: Opcode = opcode::read_write::<UffdioFill>(0xAA, 0x07);
const IOC_POISON: Opcode = opcode::read_write::<UffdioFill>(0xAA, 0x08);
/// `USERFAULTFD_IOC_NEW`, of /dev/userfaultfd.
const IOC_NEW: Opcode = opcode::none(0xAA, 0x00);

pub(super) const EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const EVENT_FORK: u8 = 0x13;
pub(super) const EVENT_REMAP: u8 = 0x14;
pub(super) const EVENT_REMOVE: u8 = 0x15;
pub(super) const EVENT_UNMAP: u8 = 0x16;

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

/// `struct uffdio_zeropage`, `uffdio_continue` and `uffdio_poison`, which have the same fields.
#[repr(C)]
struct UffdioFill {
    range: UffdioRange,
    mode: u64,
    filled: i64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct UffdioWriteProtect {
    range: UffdioRange,
    mode: u64,
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

/// Opens a descriptor in the first way that this user may: the system call, the device, the system
/// call for faults in user mode.
pub(super) fn open() -> Result<OwnedFd> {
    // SAFETY: a descriptor without memory; `register` says what is promised for memory.
    let by_call = |flags| unsafe { userfaultfd(flags) };
    match by_call(FLAGS) {
        Err(Errno::PERM | Errno::ACCESS) => {}
        opened => return opened,
    }
    if let Ok(device) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/userfaultfd") {
        // SAFETY: as for `New`.
        if let Ok(fd) = unsafe { ioctl(device, New) } {
            return Ok(fd);
        }
    }
    match by_call(FLAGS | USER_MODE_ONLY) {
        // A kernel without the flag (before 5.11): what is missing is the permission.
        Err(Errno::INVAL) => Err(Errno::PERM),
        opened => opened,
    }
}

/// `UFFDIO_API`, once for each descriptor: requests `features` and returns all of the kernel.
pub(super) fn handshake(fd: BorrowedFd<'_>, features: u64) -> Result<u64> {
    let mut argument = UffdioApi { api: API, features, ioctls: 0 };
    // SAFETY: the argument is laid out as the kernel's, and names no memory.
    unsafe { ioctl(fd, Updater::<IOC_API, _>::new(&mut argument)) }?;
    Ok(argument.features)
}

/// `UFFDIO_REGISTER`.
///
/// # Safety
/// Every user of the `len` bytes from `start` on may wait, and accepts any contents of pages that
/// are not there.
pub(super) unsafe fn register(fd: BorrowedFd<'_>, start: u64, len: u64, mode: u64) -> Result<()> {
    let mut argument = UffdioRegister { range: UffdioRange { start, len }, mode, ioctls: 0 };
    // SAFETY: the argument is laid out as the kernel's; the caller's promise.
    unsafe { ioctl(fd, Updater::<IOC_REGISTER, _>::new(&mut argument)) }
}

/// `UFFDIO_WAKE`.
pub(super) fn wake(fd: BorrowedFd<'_>, start: u64, len: u64) -> Result<()> {
    // SAFETY: the argument is laid out as the kernel's; the call changes no memory.
    unsafe { ioctl(fd, Setter::<IOC_WAKE, _>::new(UffdioRange { start, len })) }
}

/// `UFFDIO_..._MODE_DONTWAKE` is never asked for.
const WAKE_WAITERS: u64 = 0;

/// `UFFDIO_COPY` from the address `src`, which only the kernel reads. The number is of bytes that
/// were filled.
pub(super) fn copy(fd: BorrowedFd<'_>, dst: u64, src: u64, len: u64) -> (Result<()>, i64) {
    let mut argument = UffdioCopy { dst, src, len, mode: WAKE_WAITERS, copy: 0 };
    // SAFETY: the argument is laid out as the kernel's. The kernel reads `src` as it reads the
    // buffer of a write(2), and fails where nothing is mapped. It fills only pages that are not
    // there, of memory that was registered; `register` has the promise for them.
    let result = unsafe { ioctl(fd, Updater::<IOC_COPY, _>::new(&mut argument)) };
    (result, argument.copy)
}

/// What [`fill`] fills pages with.
#[derive(Clone, Copy)]
pub(super) enum Fill {
    Zeros,
    Cached,
    Poison,
}

/// `UFFDIO_ZEROPAGE`, `UFFDIO_CONTINUE` or `UFFDIO_POISON`. The number is of bytes that were
/// filled.
pub(super) fn fill(fd: BorrowedFd<'_>, start: u64, len: u64, with: Fill) -> (Result<()>, i64) {
    let mut argument = UffdioFill { range: UffdioRange { start, len }, mode: WAKE_WAITERS, filled: 0 };
    // SAFETY: the argument is laid out as the kernel's, which fills only pages that are not there,
    // of memory that was registered; `register` has the promise for them.
    let result = unsafe {
        match with {
            Fill::Zeros => ioctl(fd, Updater::<IOC_ZEROPAGE, _>::new(&mut argument)),
            Fill::Cached => ioctl(fd, Updater::<IOC_CONTINUE, _>::new(&mut argument)),
            Fill::Poison => ioctl(fd, Updater::<IOC_POISON, _>::new(&mut argument)),
        }
    };
    (result, argument.filled)
}

/// `UFFDIO_WRITEPROTECT`.
pub(super) fn write_protect(fd: BorrowedFd<'_>, start: u64, len: u64, mode: u64) -> Result<()> {
    let mut argument = UffdioWriteProtect { range: UffdioRange { start, len }, mode };
    // SAFETY: the argument is laid out as the kernel's; the call changes no contents.
    unsafe { ioctl(fd, Updater::<IOC_WRITEPROTECT, _>::new(&mut argument)) }
}
