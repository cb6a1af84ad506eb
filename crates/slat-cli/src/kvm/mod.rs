//! The KVM of this machine: the most important peer. It is there for Linux on x86-64. On other
//! targets `missing` has the same names without an implementation.

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod facts;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod guest;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
mod missing;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod system;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod vm;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod watchdog;

use slat::dirty::ManualProtect;
use thiserror::Error;

use crate::failure::{Failure, LEAVE_KVM_OUT};
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(crate) use missing::{KvmFacts, KvmGuest, KvmVm, facts, nearest_manual_protect};
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) use {
    facts::KvmFacts,
    guest::KvmGuest,
    vm::{KvmVm, facts, nearest_manual_protect},
};

/// The largest region that the guests' page tables can map.
pub(crate) const MAX_REGION_BYTES: u64 = 64 << 30;

/// KVM refused a call, or its guest did something wrong.
#[derive(Debug, Error)]
#[error("{0}")]
pub(crate) struct KvmError(String);

impl From<KvmError> for Failure {
    fn from(error: KvmError) -> Failure {
        Failure::CannotServe(format!("KVM: {error}{LEAVE_KVM_OUT}"))
    }
}

/// The parameters of a VM, besides the memory of its region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VmShape {
    pub(crate) nr_vcpus: usize,
    /// Memslots that the region is divided into, evenly.
    pub(crate) nr_slots: u32,
    /// Pages that a guest's list has room for.
    pub(crate) nr_listed: u64,
    /// Whether getting the log clears it. The KVM must have the mode.
    pub(crate) manual_protect: ManualProtect,
}

/// Whether the region's slots log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Logging {
    Off,
    On,
}
