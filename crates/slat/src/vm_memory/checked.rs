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
use crate::exit::Outcome;
use crate::format::Format;
use crate::host::Host;
use crate::vm::Vm;

/// Guest memory that calls [`Vm::check_access`] before each access. With the feature `vm-memory`.
///
/// An access that needs a page on which user space must act first fails as a whole, and accesses
/// nothing. The error is a [`GuestMemoryError::IOError`]. Its inner error is an
/// [`Exit`](crate::Exit), on which user space acts before it accesses the page again, or a
/// [`FaultError`](crate::error::FaultError).
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

    fn check(&self, address: GuestAddress, size_bytes: usize) -> io::Result<()> {
        if size_bytes == 0 {
            return Ok(());
        }
        match self.vm.check_access(Gpa(address.0), size_bytes as u64).map_err(io::Error::other)? {
            Outcome::Resume => Ok(()),
            Outcome::Exit(exit) => Err(io::Error::other(exit)),
        }
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
        self.check(address, count).map_err(GuestMemoryError::IOError)?;
        Ok(GuestMemoryBackend::get_slices(&self.memory, address, count))
    }
}
