//! Memory that only the guest can access: the user of the machine has no mapping of it. As KVM's
//! guest_memfd (Linux, Documentation/virt/kvm/api.rst, `KVM_CREATE_GUEST_MEMFD`), and memory that
//! userfaultfd cannot serve, because the user never faults on it.
//!
//! # Implementation
//! - Only [`GuestMemfd::install`] fills a page, and the guest reads and writes it through the
//!   frames that the engine maps. The machine keeps a mapping for the software CPU, whose accesses
//!   are this process's, and does not publish a pointer.
//! - A memslot that has it
//!   ([`MemoryRegionFlags::GUEST_MEMFD`](slat::MemoryRegionFlags::GUEST_MEMFD)) also has a *shared
//!   part* of the same size, or none. The VM decides which of the two a page is in
//!   ([`Vm::set_memory_attributes`](slat::Vm::set_memory_attributes)); nothing is copied from one
//!   to the other, as in KVM.
//! - If /dev/kvm makes such files, and lets this process map them (`GUEST_MEMFD_FLAG_MMAP`, Linux
//!   6.18), it is one of these. Elsewhere it is a memory file, and [`origin`](GuestMemfd::origin)
//!   has the reason.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use slat::host::{Gone, Resolved};
use slat::{Access, Gfn, PAGE_SIZE, PageSize};
use thiserror::Error;

use super::{Backing, BackingKind, MemoryError, Reserved, shmem, unmap};
use crate::phys;

/// The bytes of a page.
pub type PageBytes = [u8; PAGE_SIZE as usize];

/// The kind of file of a [`GuestMemfd`].
#[derive(Debug)]
pub enum Origin {
    /// A guest_memfd of KVM.
    Kvm,
    /// A memory file in its place.
    Memfd {
        /// Why it is not one of KVM.
        why: NoGuestMemfd,
    },
}

/// Why KVM has no guest_memfd that could be used here.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NoGuestMemfd {
    /// A call on /dev/kvm was refused.
    #[error("{call} failed: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// It makes none that this process may map for its software CPUs: Linux before 6.18.
    #[error("KVM has no guest_memfd that can be mapped (its flags are {flags:#x})")]
    NoMapping {
        /// The flags that it supports.
        flags: u64,
    },
}

/// Why a page could not be installed: nothing was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("there is no page {page} in a guest_memfd of {nr_pages} pages")]
pub struct NoSuchPage {
    /// The page.
    pub page: u64,
    /// The number of pages.
    pub nr_pages: u64,
}

/// Memory that only the guest can access.
#[derive(Debug)]
pub struct GuestMemfd {
    /// The software CPU's mapping.
    start: *mut u8,
    size_bytes: u64,
    shared: Option<Backing>,
    origin: Origin,
    // Behind the mapping, which is dropped first.
    _files: Files,
    _reserved: Reserved,
}

/// The file, and the VM that it was made for.
#[derive(Debug)]
struct Files {
    _memory: OwnedFd,
    _vm: Option<(OwnedFd, File)>,
}

// SAFETY: the pointer is only an address; its memory is accessed atomically, by machine
// instructions of guests, or by `install`, which is the only user of its page then.
unsafe impl Send for GuestMemfd {}
// SAFETY: as above.
unsafe impl Sync for GuestMemfd {}

impl Drop for GuestMemfd {
    fn drop(&mut self) {
        // SAFETY: mapped with this start and size, and the last user is gone.
        unsafe { unmap(self.start, self.size_bytes) };
    }
}

impl GuestMemfd {
    /// Makes `size_bytes` of zeroed memory, with `shared`, of the same size, as its shared part.
    ///
    /// # Errors
    /// [`MemoryError`].
    pub fn new(size_bytes: u64, shared: Option<Backing>) -> Result<GuestMemfd, MemoryError> {
        if size_bytes == 0 {
            return Err(MemoryError::ZeroSize);
        }
        if !size_bytes.is_multiple_of(PAGE_SIZE) {
            return Err(MemoryError::UnalignedSize { kind: BackingKind::Shmem, size_bytes });
        }
        if let Some(shared_bytes) = shared.as_ref().map(Backing::size_bytes)
            && shared_bytes != size_bytes
        {
            return Err(MemoryError::SharedPartSize { size_bytes, shared_bytes });
        }
        let reserved = Reserved::new(size_bytes)?;
        let (start, files, origin) = match of_kvm(size_bytes) {
            Ok((start, files)) => (start, files, Origin::Kvm),
            Err(why) => {
                let memory = shmem::create_file(size_bytes)?;
                (shmem::map_file(&memory, size_bytes)?, Files { _memory: memory, _vm: None }, Origin::Memfd { why })
            }
        };
        Ok(GuestMemfd { start, size_bytes, shared, origin, _files: files, _reserved: reserved })
    }

    /// The size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The memory of the pages that are not private, if there is any.
    pub fn shared(&self) -> Option<&Backing> {
        self.shared.as_ref()
    }

    /// The kind of its file.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Copies `bytes` to page number `page`, word by word. A guest that can reach the page
    /// meanwhile sees some words sooner than others: install pages that it cannot reach yet (their
    /// userfault bits are set).
    ///
    /// # Errors
    /// [`NoSuchPage`].
    pub fn install(&self, page: u64, bytes: &PageBytes) -> Result<(), NoSuchPage> {
        let at = self.page(page)?.cast::<u64>();
        for (index, word) in bytes.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: as many words as the page has, in the mapping, which lives as long as `self`,
            // and aligned; guests access them atomically or by machine instructions.
            let place = unsafe { AtomicU64::from_ptr(at.wrapping_add(index)) };
            // Relaxed: the release that clears the page's bit orders them.
            place.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        Ok(())
    }

    /// The word number `word` of page number `page`, for the machine's own checks of what has
    /// arrived.
    pub(crate) fn word(&self, page: u64, word: usize) -> Option<u64> {
        let at = self.page(page).ok().filter(|_| word < PAGE_SIZE as usize / 8)?;
        // SAFETY: in the mapping, aligned; guests access it atomically or by machine instructions.
        Some(unsafe { AtomicU64::from_ptr(at.cast::<u64>().wrapping_add(word)) }.load(Ordering::Acquire))
    }

    fn page(&self, page: u64) -> Result<*mut u8, NoSuchPage> {
        let nr_pages = self.size_bytes >> Gfn::SHIFT;
        if page >= nr_pages {
            return Err(NoSuchPage { page, nr_pages });
        }
        Ok(self.start.wrapping_add((page << Gfn::SHIFT) as usize))
    }

    /// The range of its frames: the first byte and the size in bytes.
    pub(super) fn frames(&self) -> (*mut u8, u64) {
        (self.start, self.size_bytes)
    }

    /// Makes the kernel provide the page at `offset_bytes` for `access`; see [`Backing`].
    pub(super) fn resolve(&self, offset_bytes: u64, access: Access) -> Result<Resolved, Gone> {
        let page = self.page(offset_bytes >> Gfn::SHIFT).map_err(|_| Gone)?;
        // SAFETY: the page lies in the mapping and is aligned; guests access it by machine
        // instructions or atomically.
        let word = unsafe { AtomicU64::from_ptr(page.cast()) };
        match access {
            // Changes nothing, but is a write to the kernel, of a value that the compiler does not
            // know.
            Access::Write => word.fetch_or(black_box(0), Ordering::Relaxed),
            Access::Read | Access::Execute => black_box(word.load(Ordering::Relaxed)),
        };
        Ok(Resolved { pfn: phys::hpa_of(page).pfn(), max_size: PageSize::Size4K, writable: true })
    }
}

/// `_IO(KVMIO, 0x01)` of the kernel (include/uapi/linux/kvm.h).
const KVM_CREATE_VM: u64 = 0xae01;
/// `_IO(KVMIO, 0x03)`.
const KVM_CHECK_EXTENSION: u64 = 0xae03;
/// `_IOWR(KVMIO, 0xd4, struct kvm_create_guest_memfd)`.
const KVM_CREATE_GUEST_MEMFD: u64 = (3 << 30) | ((size_of::<CreateGuestMemfd>() as u64) << 16) | 0xaed4;
/// Which flags `KVM_CREATE_GUEST_MEMFD` takes.
const KVM_CAP_GUEST_MEMFD_FLAGS: u64 = 244;
/// The file may be mapped.
const GUEST_MEMFD_FLAG_MMAP: u64 = 1 << 0;
/// Its pages are shared with the host from the beginning: a mapping may touch them.
const GUEST_MEMFD_FLAG_INIT_SHARED: u64 = 1 << 1;

/// `struct kvm_create_guest_memfd` of the kernel.
#[repr(C)]
#[derive(Default)]
struct CreateGuestMemfd {
    size: u64,
    flags: u64,
    reserved: [u64; 6],
}

/// A guest_memfd of KVM, mapped.
fn of_kvm(size_bytes: u64) -> Result<(*mut u8, Files), NoGuestMemfd> {
    let failed = |call| move |source| NoGuestMemfd::System { call, source };
    let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm").map_err(failed("opening /dev/kvm"))?;
    // SAFETY: both take numbers only.
    let (vm, flags) = unsafe {
        let vm = opened(libc::ioctl(kvm.as_raw_fd(), KVM_CREATE_VM as _, 0_u64)).map_err(failed("KVM_CREATE_VM"))?;
        let flags = libc::ioctl(vm.as_raw_fd(), KVM_CHECK_EXTENSION as _, KVM_CAP_GUEST_MEMFD_FLAGS);
        (vm, u64::try_from(flags).unwrap_or(0))
    };
    let wanted = GUEST_MEMFD_FLAG_MMAP | GUEST_MEMFD_FLAG_INIT_SHARED;
    if flags & wanted != wanted {
        return Err(NoGuestMemfd::NoMapping { flags });
    }
    let mut create = CreateGuestMemfd { size: size_bytes, flags: wanted, ..CreateGuestMemfd::default() };
    // SAFETY: the argument has the kernel's layout and outlives the call.
    let memory = unsafe { opened(libc::ioctl(vm.as_raw_fd(), KVM_CREATE_GUEST_MEMFD as _, &raw mut create)) }
        .map_err(failed("KVM_CREATE_GUEST_MEMFD"))?;
    let start = shmem::map_file(&memory, size_bytes).map_err(|error| match error {
        MemoryError::System { call, source, .. } => NoGuestMemfd::System { call, source },
        _ => NoGuestMemfd::NoMapping { flags },
    })?;
    Ok((start, Files { _memory: memory, _vm: Some((vm, kvm)) }))
}

/// # Safety
/// `descriptor` is a new descriptor without another owner, or negative after a call that failed.
unsafe fn opened(descriptor: libc::c_int) -> io::Result<OwnedFd> {
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
#[path = "guest_memfd_tests.rs"]
mod tests;
