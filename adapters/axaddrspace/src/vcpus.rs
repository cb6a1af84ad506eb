//! The engine's vCPUs of an address space, for calls on a shared reference.
//!
//! A fault or a translation needs a [`Vcpu`], which one thread uses at a time. Here is one for each
//! CPU, made when it is first needed. A call tries that of its CPU, and then the others. If all are
//! in use, by threads that were preempted, it makes one for itself. So no call waits for another. It
//! costs an exchange and a store, on a cache line that no other CPU writes.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crossbeam_utils::CachePadded;
use slat::format::Format;
use slat::{Vcpu, Vm};
use spin::Mutex;

use crate::host::{EngineHost, PagingHost};
use crate::{AddrSpaceError, AddrSpaceResult};

/// A vCPU, once it was needed.
type Lazily<P, F> = Option<Vcpu<EngineHost<P>, F>>;

pub(crate) struct Vcpus<P: PagingHost, F: Format>(Vec<CachePadded<Mutex<Lazily<P, F>>>>);

impl<P: PagingHost, F: Format> Vcpus<P, F> {
    /// Room for the vCPUs of `nr_cpus` CPUs.
    pub(crate) fn new(nr_cpus: usize) -> AddrSpaceResult<Vcpus<P, F>> {
        let mut vcpus = Vec::new();
        vcpus.try_reserve_exact(nr_cpus.max(1)).map_err(|_| AddrSpaceError::OutOfMemory)?;
        vcpus.resize_with(nr_cpus.max(1), || CachePadded::new(Mutex::new(None)));
        Ok(Vcpus(vcpus))
    }

    /// Calls `use_vcpu` with a vCPU of `vm` that no other thread uses. `None`: there is no memory
    /// for one.
    #[inline]
    pub(crate) fn with<R>(
        &self,
        vm: &Arc<Vm<EngineHost<P>, F>>,
        cpu: usize,
        use_vcpu: impl FnOnce(&mut Vcpu<EngineHost<P>, F>) -> R,
    ) -> Option<R> {
        // Not the remainder: a division would be a good part of the call.
        let own = self.0.get(cpu).and_then(|vcpu| vcpu.try_lock());
        match own.or_else(|| self.0.iter().find_map(|vcpu| vcpu.try_lock())) {
            Some(mut vcpu) => {
                if vcpu.is_none() {
                    *vcpu = Some(vm.create_vcpu().ok()?);
                }
                vcpu.as_mut().map(use_vcpu)
            }
            None => vm.create_vcpu().ok().as_mut().map(use_vcpu),
        }
    }
}
