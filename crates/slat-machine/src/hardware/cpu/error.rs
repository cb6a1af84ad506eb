//! Why an operation of a CPU did not complete.

use slat::shadow::{GuestEntry, Gva};
use slat::{Exit, Gpa, Hpa, Level, PageSize};
use thiserror::Error;

use crate::hardware::walk::guest::GuestFault;
use crate::hardware::walk::{Memory, Misconfiguration};

/// Why an access, or another operation of the guest, did not complete, on a CPU with or without a
/// second stage. It has changed nothing that the guest can observe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum CpuError {
    /// The address is not a multiple of 8.
    #[error("address {gva} is not a multiple of 8")]
    Unaligned { gva: Gva },
    /// An error of the guest, such as one of its page tables: an exception for it.
    #[error(transparent)]
    Guest(#[from] GuestFault),
    /// An exit to user space; then the guest repeats the operation.
    #[error("exit to user space: {0:?}")]
    Exit(Exit),
    /// The engine could not handle a fault, or another exit.
    #[error("the engine failed: {0}")]
    Engine(#[from] slat::error::FaultError),
    /// The second-stage page tables are misconfigured.
    #[error("second-stage tables are misconfigured: {0}")]
    Misconfigured(Misconfiguration),
    /// The second-stage page tables map an address without memory.
    #[error("second-stage tables lead to {hpa} for {gpa}, where there is no memory")]
    NoMemory { gpa: Gpa, hpa: Hpa },
    /// Registers of a device are accessed as memory: the CPU may cache them, or access them
    /// speculatively.
    #[error("the device at {hpa} is accessed as {memory:?} memory, by {gpa}")]
    CachedDevice { gpa: Gpa, hpa: Hpa, memory: Memory },
    /// A translation of another size is still cached, and no flush has covered it (Arm: a TLB
    /// conflict abort): a PTE of the second stage was changed without break before make. While the
    /// guest's paging is on, of PTEs of the second stage alone.
    #[error("TLB conflict at {gpa}: a translation of {cached:?} is cached, and the tables now have {walked:?}")]
    TlbConflict { gpa: Gpa, cached: PageSize, walked: PageSize },
    /// The engine has handled that many faults on one access, and it still faults.
    #[error("access to {gva} still faults after {nr_faults} faults")]
    Stuck { gva: Gva, nr_faults: u64 },
    /// A value for CR3 with reserved bits (a general-protection fault).
    #[error("value {value:#x} for CR3 has reserved bits set")]
    BadCr3 { value: u64 },
    /// The guest cannot be entered: the number of levels, the PCID or the root cannot be loaded.
    #[error("the guest cannot be entered with {entry:?}")]
    BadEntry { entry: GuestEntry },
    /// The shadow page tables are misconfigured: a PTE has reserved bits set.
    #[error("shadow tables are misconfigured: entry {entry:#x} of level {} for {gva}", level.0)]
    ShadowMisconfigured { gva: Gva, level: Level, entry: u64 },
    /// The shadow page tables map an address without memory.
    #[error("shadow tables lead to {hpa} for {gva}, where there is no memory")]
    ShadowNoMemory { gva: Gva, hpa: Hpa },
}

impl From<Exit> for CpuError {
    /// Exceptions are for the guest, the other exits for user space.
    fn from(exit: Exit) -> CpuError {
        match exit {
            Exit::PageFault { gva, error_code } => GuestFault::Page { gva, error_code }.into(),
            Exit::GeneralProtection => GuestFault::GeneralProtection.into(),
            exit => CpuError::Exit(exit),
        }
    }
}
