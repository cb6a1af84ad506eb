//! Guest memory for vm-memory that refuses pages which have not arrived, and private pages. A
//! device that a VMM emulates gets the error for which a vCPU exits, and not the zeroes of an empty
//! page.

extern crate std;

use alloc::sync::Arc;
use core::fmt;
use std::io;

use ::vm_memory::bitmap::BS;
use ::vm_memory::guest_memory::GuestMemorySliceIterator;
use ::vm_memory::{GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, Permissions};

use crate::addr::Gpa;
use crate::error::Error;
use crate::format::Format;
use crate::host::Host;
use crate::vm::Vm;

/// Guest memory that calls [`Vm::check_access`] before each access. With the feature `vm-memory`.
///
/// An access that needs a page on which user space must act first fails as a whole, and accesses
/// nothing. The error is a [`GuestMemoryError::IOError`] whose inner error is the [`Error`]. If it
/// is [`Error::MemoryFault`], fetch the page and access it again.
///
/// A slice that was returned stays usable. A thread that takes pages back must make sure that such
/// accesses are over.
pub struct CheckedMemory<M, H: Host, F: Format> {
    memory: M,
    vm: Arc<Vm<H, F>>,
}

impl<M: GuestMemoryBackend, H: Host, F: Format> CheckedMemory<M, H, F> {
    /// The guest's memory, at the guest-physical addresses of the memslots of `vm`.
    pub fn new(memory: M, vm: Arc<Vm<H, F>>) -> CheckedMemory<M, H, F> {
        CheckedMemory { memory, vm }
    }

    /// The memory itself, unchecked, to fill its pages.
    pub fn unchecked(&self) -> &M {
        &self.memory
    }

    fn check(&self, address: GuestAddress, size_bytes: usize) -> Result<(), Error> {
        if size_bytes == 0 { Ok(()) } else { self.vm.check_access(Gpa(address.0), size_bytes as u64) }
    }
}

impl<M: fmt::Debug, H: Host, F: Format> fmt::Debug for CheckedMemory<M, H, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckedMemory").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl<M: GuestMemoryBackend, H: Host, F: Format> GuestMemory for CheckedMemory<M, H, F> {
    type PhysicalMemory = M;
    type Bitmap = <M::R as GuestMemoryRegion>::B;

    fn check_range(&self, address: GuestAddress, count: usize, _access: Permissions) -> bool {
        self.check(address, count).is_ok() && GuestMemoryBackend::check_range(&self.memory, address, count)
    }

    fn get_slices<'a>(
        &'a self,
        address: GuestAddress,
        count: usize,
        _access: Permissions,
    ) -> Result<impl GuestMemorySliceIterator<'a, BS<'a, Self::Bitmap>>, GuestMemoryError> {
        self.check(address, count).map_err(|error| GuestMemoryError::IOError(io::Error::other(error)))?;
        Ok(GuestMemoryBackend::get_slices(&self.memory, address, count))
    }
}
