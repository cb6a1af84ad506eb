//! Guest memory as vm-memory sees it, of which the pages that have not arrived, and those that are private, cannot be read or
//! written: a device that a VMM emulates gets the error for which a vCPU exits, and not the zeroes of a page to come.

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

/// `memory`, as far as user space may use it: [`Vm::check_access`] is asked before each access. With the feature `vm-memory`.
///
/// An access that needs a page which user space must see to first fails as a whole, and touches nothing, with a
/// [`GuestMemoryError::IOError`] whose inner error is the [`Error`], [`Error::MemoryFault`] for such a page: fetch it, and do
/// the access again. A slice that was handed out stays usable: who takes
/// pages back makes sure that such accesses are over.
pub struct CheckedMemory<M, H: Host, F: Format> {
    memory: M,
    vm: Arc<Vm<H, F>>,
}

impl<M: GuestMemoryBackend, H: Host, F: Format> CheckedMemory<M, H, F> {
    /// The guest's memory, at the guest-physical addresses of the slots of `vm`.
    pub fn new(memory: M, vm: Arc<Vm<H, F>>) -> CheckedMemory<M, H, F> {
        CheckedMemory { memory, vm }
    }

    /// The memory itself, unchecked: for who fills it.
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
