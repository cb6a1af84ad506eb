//! Why an operation on an address space was not done: the original's error, and `OutOfMemory`.

use axvm_types::GuestPhysAddr;
use slat::error::{ConfigError, MapError, RangeError, SlotError};
use thiserror::Error;

/// The result of an operation on an address space.
pub type AddrSpaceResult<T = ()> = Result<T, AddrSpaceError>;

/// Why an operation on an address space was not done.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum AddrSpaceError {
    /// The range is not in the address space.
    #[error("[{start:#x}, +{size:#x}) is not in the address space [{space_start:#x}, {space_end:#x})")]
    OutOfRange {
        /// First address of the range.
        start: GuestPhysAddr,
        /// Its size in bytes.
        size: usize,
        /// First address of the address space.
        space_start: GuestPhysAddr,
        /// The address after its last.
        space_end: GuestPhysAddr,
    },
    /// An address or a size is not a multiple of the page size.
    #[error("{subject} {value:#x} is not a multiple of {alignment:#x}")]
    Unaligned {
        /// What it is.
        subject: &'static str,
        /// Its value.
        value: usize,
        /// What it must be a multiple of.
        alignment: usize,
    },
    /// The end of a range is beyond the last address.
    #[error("[{start:#x}, +{size:#x}) ends beyond the last address")]
    AddressOverflow {
        /// First address of the range.
        start: usize,
        /// Its size in bytes.
        size: usize,
    },
    /// Another area has a part of the range.
    #[error("another area has a part of the range")]
    MappingConflict,
    /// The range is empty, or the hardware has no such mapping: memory that cannot be read, a device
    /// that can be executed, a memory type that page tables of this format lack.
    #[error("the range is empty, or its flags are not possible")]
    InvalidMapping,
    /// What earlier calls have removed cannot be freed yet: try again.
    #[error("earlier changes are not over yet")]
    MappingState,
    /// Never returned: an operation that fails has changed nothing, or says what it has done. (The
    /// original has it, and callers match on it.)
    #[error("a mapping needs repair")]
    NeedsRepair,
    /// Nothing is mapped at the address.
    #[error("nothing is mapped at {address:#x}")]
    Unmapped {
        /// The address.
        address: GuestPhysAddr,
    },
    /// Less is mapped than the access needs.
    #[error("cannot {operation}: {requested} bytes at {address:#x} were requested, {available} are mapped")]
    InsufficientAccess {
        /// What was to be done.
        operation: &'static str,
        /// Where.
        address: GuestPhysAddr,
        /// The bytes that the access needs.
        requested: usize,
        /// The bytes from there on that may be accessed so.
        available: usize,
    },
    /// There is no memory: for page-table pages, frames or bookkeeping.
    #[error("out of memory")]
    OutOfMemory,
}

impl From<ConfigError> for AddrSpaceError {
    fn from(error: ConfigError) -> AddrSpaceError {
        match error {
            ConfigError::OutOfMemory => AddrSpaceError::OutOfMemory,
            _ => AddrSpaceError::InvalidMapping,
        }
    }
}

impl From<SlotError> for AddrSpaceError {
    fn from(error: SlotError) -> AddrSpaceError {
        match error {
            SlotError::OutOfMemory => AddrSpaceError::OutOfMemory,
            SlotError::Overlap { .. } => AddrSpaceError::MappingConflict,
            SlotError::SlotBusy { .. } | SlotError::TooMuchRetired { .. } => AddrSpaceError::MappingState,
            _ => AddrSpaceError::InvalidMapping,
        }
    }
}

impl From<MapError> for AddrSpaceError {
    fn from(error: MapError) -> AddrSpaceError {
        match error {
            MapError::OutOfMemory => AddrSpaceError::OutOfMemory,
            MapError::AlreadyMapped { .. } => AddrSpaceError::MappingConflict,
            MapError::Busy { .. } => AddrSpaceError::MappingState,
            _ => AddrSpaceError::InvalidMapping,
        }
    }
}

impl From<RangeError> for AddrSpaceError {
    fn from(error: RangeError) -> AddrSpaceError {
        match error {
            RangeError::OutOfMemory => AddrSpaceError::OutOfMemory,
            _ => AddrSpaceError::InvalidMapping,
        }
    }
}
