//! Why an operation of a CPU without a second stage did not complete.

use slat::shadow::{GuestEntry, Gva};
use slat::{Exit, Gpa, Hpa, Level};
use thiserror::Error;

use crate::walk::guest::GuestFault;

/// Why an access, or another operation of the guest, did not complete. It has changed nothing that
/// the guest can observe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ShadowCpuError {
    /// The address is not a multiple of 8.
    #[error("address {gva} is not a multiple of 8")]
    Unaligned {
        /// The address.
        gva: Gva,
    },
    /// An error of the guest: an exception for it.
    #[error(transparent)]
    Guest(#[from] GuestFault),
    /// An exit to user space; then the guest repeats the operation.
    #[error("exit to user space: {0:?}")]
    Exit(Exit),
    /// The engine failed.
    #[error("the engine failed: {0}")]
    Engine(#[from] slat::error::FaultError),
    /// The guest cannot be entered: the number of levels, the PCID or the root cannot be loaded.
    #[error("the guest cannot be entered with {entry:?}")]
    BadEntry {
        /// The entry.
        entry: GuestEntry,
    },
    /// The shadow page tables are misconfigured: a PTE has reserved bits set.
    #[error("shadow tables are misconfigured: entry {entry:#x} of level {} for {gva}", level.0)]
    Misconfigured {
        /// The address that was translated.
        gva: Gva,
        /// Level of the PTE.
        level: Level,
        /// The PTE.
        entry: u64,
    },
    /// The shadow page tables map an address without memory.
    #[error("shadow tables lead to {hpa} for {gva}, where there is no memory")]
    NoMemory {
        /// The address that was translated.
        gva: Gva,
        /// The address that it is mapped to.
        hpa: Hpa,
    },
    /// The exchange would have to be emulated, and only a write can be: the emulation would not be
    /// atomic.
    #[error("exchange at {gva} hits a page table of the guest at {gpa}, and cannot be emulated atomically")]
    EmulatedExchange {
        /// The address.
        gva: Gva,
        /// Its guest-physical address.
        gpa: Gpa,
    },
    /// The engine has handled that many faults on one access, and it still faults.
    #[error("access to {gva} still faults after {nr_faults} faults")]
    Stuck {
        /// The address.
        gva: Gva,
        /// Faults taken.
        nr_faults: u64,
    },
}

impl From<Exit> for ShadowCpuError {
    /// Exceptions are for the guest, the other exits for user space.
    fn from(exit: Exit) -> ShadowCpuError {
        match exit {
            Exit::PageFault { gva, error_code } => GuestFault::Page { gva, error_code }.into(),
            Exit::GeneralProtection => GuestFault::GeneralProtection.into(),
            exit => ShadowCpuError::Exit(exit),
        }
    }
}
