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

use std::ffi::c_ulong;
use std::io;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use kvm_bindings::kvm_create_guest_memfd;
use kvm_ioctls::Kvm;
use slat::host::{Resolved, Unresolved};
use slat::{Access, Gfn, PAGE_SIZE, PageSize};
use thiserror::Error;

use super::{Backing, BackingKind, MemoryError, Reserved, phys, shmem, touch};
use crate::linux::mapping::MappedMemory;

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
#[expect(missing_docs, reason = "the message names the fields")]
pub enum NoGuestMemfd {
    /// A call on /dev/kvm was refused.
    #[error("{call} failed: {source}")]
    System { call: &'static str, source: io::Error },
    /// It makes none that this process may map for its software CPUs: Linux before 6.18.
    #[error("KVM has no guest_memfd that can be mapped (its flags are {flags:#x})")]
    NoMapping { flags: u64 },
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
    /// The software CPU's mapping. The kernel keeps the file for it, and the VM for the file.
    mapping: MappedMemory,
    shared: Option<Backing>,
    origin: Origin,
    // Behind the mapping, which is dropped first.
    _reserved: Reserved,
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
        let (mapping, origin) = match of_kvm(size_bytes) {
            Ok(mapping) => (mapping, Origin::Kvm),
            Err(why) => (shmem::map_file(shmem::create_file(size_bytes)?.as_fd(), size_bytes)?, Origin::Memfd { why }),
        };
        Ok(GuestMemfd { mapping, shared, origin, _reserved: reserved })
    }

    /// The size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.mapping.size_bytes()
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
    pub fn install(&self, page: u64, bytes: &[u8; PAGE_SIZE as usize]) -> Result<(), NoSuchPage> {
        let nr_pages = self.size_bytes() >> Gfn::SHIFT;
        if page >= nr_pages {
            return Err(NoSuchPage { page, nr_pages });
        }
        // The release that clears the page's bit orders the words.
        self.mapping.write(page << Gfn::SHIFT, bytes).ok_or(NoSuchPage { page, nr_pages })
    }

    /// The word number `word` of page number `page`, for the machine's own checks of what has
    /// arrived.
    pub(crate) fn word(&self, page: u64, word: usize) -> Option<u64> {
        let offset_bytes = page.checked_mul(PAGE_SIZE).filter(|_| word < PAGE_SIZE as usize / 8)? + 8 * word as u64;
        Some(self.mapping.word(offset_bytes)?.load(Ordering::Acquire))
    }

    /// The mapping of its frames.
    pub(super) fn mapping(&self) -> &MappedMemory {
        &self.mapping
    }

    /// Makes the kernel provide the page at `offset_bytes` for `access`; see [`Backing`].
    pub(super) fn resolve(&self, offset_bytes: u64, access: Access) -> Result<Resolved, Unresolved> {
        let page_bytes = offset_bytes & !(PAGE_SIZE - 1);
        touch(self.mapping.word(page_bytes).ok_or(Unresolved::Gone)?, access);
        let pfn = phys::hpa_of(self.mapping.at(page_bytes)).pfn();
        Ok(Resolved::memory(pfn, PageSize::Size4K))
    }
}

/// Which flags `KVM_CREATE_GUEST_MEMFD` takes.
const KVM_CAP_GUEST_MEMFD_FLAGS: c_ulong = 244;
/// The file may be mapped.
const GUEST_MEMFD_FLAG_MMAP: u64 = 1 << 0;
/// Its pages are shared with the host from the beginning: a mapping may touch them.
const GUEST_MEMFD_FLAG_INIT_SHARED: u64 = 1 << 1;

/// A guest_memfd of KVM, mapped.
fn of_kvm(size_bytes: u64) -> Result<MappedMemory, NoGuestMemfd> {
    let failed = |call| move |error: kvm_ioctls::Error| NoGuestMemfd::System { call, source: error.into() };
    let vm = Kvm::new().map_err(failed("opening /dev/kvm"))?.create_vm().map_err(failed("KVM_CREATE_VM"))?;
    let flags = u64::try_from(vm.check_extension_raw(KVM_CAP_GUEST_MEMFD_FLAGS)).unwrap_or(0);
    let wanted = GUEST_MEMFD_FLAG_MMAP | GUEST_MEMFD_FLAG_INIT_SHARED;
    if flags & wanted != wanted {
        return Err(NoGuestMemfd::NoMapping { flags });
    }
    let create = kvm_create_guest_memfd { size: size_bytes, flags: wanted, ..Default::default() };
    let memory = vm.create_guest_memfd(create).map_err(failed("KVM_CREATE_GUEST_MEMFD"))?;
    // SAFETY: just opened, and owned by nothing else.
    let memory = unsafe { OwnedFd::from_raw_fd(memory) };
    shmem::map_file(memory.as_fd(), size_bytes).map_err(|error| match error {
        MemoryError::System { call, source, .. } => NoGuestMemfd::System { call, source },
        _ => NoGuestMemfd::NoMapping { flags },
    })
}

#[cfg(test)]
#[path = "guest_memfd_tests.rs"]
mod tests;
