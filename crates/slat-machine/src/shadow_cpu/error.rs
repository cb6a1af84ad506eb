//! Why an operation of a CPU without a second stage did not complete.

use slat::shadow::{GuestEntry, Gva};
use slat::{Exit, Gpa, Hpa, Level};
use thiserror::Error;

use crate::walk::guest::GuestFault;

/// Why an access, or another operation of the guest's, did not complete. It has changed nothing that the guest can see.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ShadowCpuError {
    /// The address is not a multiple of 8.
    #[error("address {gva} is not a multiple of 8")]
    Unaligned {
        /// The address.
        gva: Gva,
    },
    /// The guest is to blame: an exception for it.
    #[error(transparent)]
    Guest(#[from] GuestFault),
    /// The engine wants user space to act; then the guest does the same again.
    #[error("exit to user space: {0:?}")]
    Exit(Exit),
    /// The engine could not do what it was asked.
    #[error("the engine failed: {0}")]
    Engine(#[from] slat::Error),
    /// The guest cannot be entered like this: the number of levels, the PCID or the root cannot be loaded.
    #[error("the guest cannot be entered with {entry:?}")]
    BadEntry {
        /// What was to be loaded.
        entry: GuestEntry,
    },
    /// The shadow tables are broken: an entry has bits set that the format reserves.
    #[error("shadow tables are misconfigured: entry {entry:#x} of level {} for {gva}", level.0)]
    Misconfigured {
        /// The address that was translated.
        gva: Gva,
        /// Level of the entry.
        level: Level,
        /// The entry.
        entry: u64,
    },
    /// The shadow tables are broken: they lead to where there is no memory.
    #[error("shadow tables lead to {hpa} for {gva}, where there is no memory")]
    NoMemory {
        /// The address that was translated.
        gva: Gva,
        /// Where the tables led.
        hpa: Hpa,
    },
    /// The exchange would have to be emulated, and only a write can be: the two halves would not be one piece.
    #[error("exchange at {gva} hits a page table of the guest at {gpa}, and cannot be emulated in one piece")]
    EmulatedExchange {
        /// The address.
        gva: Gva,
        /// Where it leads.
        gpa: Gpa,
    },
    /// The engine has answered that many faults on one access, and it still faults.
    #[error("access to {gva} still faults after {nr_faults} faults")]
    Stuck {
        /// The address.
        gva: Gva,
        /// Faults taken.
        nr_faults: u64,
    },
}

impl From<Exit> for ShadowCpuError {
    /// Exceptions are for the guest, and the other exits for user space.
    fn from(exit: Exit) -> ShadowCpuError {
        match exit {
            Exit::PageFault { gva, error_code } => GuestFault::Page { gva, error_code }.into(),
            Exit::GeneralProtection => GuestFault::GeneralProtection.into(),
            exit => ShadowCpuError::Exit(exit),
        }
    }
}
