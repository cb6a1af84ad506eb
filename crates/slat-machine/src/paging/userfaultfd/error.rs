//! The errors, with the names of missing settings and features.

use std::io;

use slat_userfaultfd::{CallError, OpenError};
use thiserror::Error;

use crate::memory::BackingKind;

/// Why a userfaultfd cannot be made, or refused a call. Nothing was changed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum UserfaultfdError {
    /// None can be made: this user may not have one, or the kernel has none.
    #[error(transparent)]
    Open(OpenError),
    /// The kernel cannot do this with memory of this kind.
    #[error("this kernel's userfaultfd lacks the feature {feature}, which {kind} memory needs")]
    MissingFeature { feature: &'static str, kind: BackingKind },
    /// The kernel registered the memory, but does not let its faults be answered. It was
    /// unregistered.
    #[error("this kernel's userfaultfd does not allow {ioctl} for {kind} memory")]
    MissingIoctl { ioctl: &'static str, kind: BackingKind },
    /// Minor faults exist for memory in a file only, and this memory is in none.
    #[error("minor faults need shared memory, and {kind} memory is private; shmem is shared")]
    MinorNeedsShared { kind: BackingKind },
    /// Movable pages have no addresses of their own.
    #[error("memory with movable pages cannot be registered")]
    MovablePages,
    /// No bytes.
    #[error("an empty range at {offset_bytes:#x} of the memory")]
    Empty { offset_bytes: u64 },
    /// Not whole pages of the memory's kind.
    #[error("{len_bytes:#x} bytes at {offset_bytes:#x} are not whole pages of {kind} memory")]
    Unaligned { offset_bytes: u64, len_bytes: u64, kind: BackingKind },
    /// The bytes are not in the memory.
    #[error("{len_bytes:#x} bytes at {offset_bytes:#x} are not in the memory, which has {size_bytes:#x} bytes")]
    OutOfRange { offset_bytes: u64, len_bytes: u64, size_bytes: u64 },
    /// The bytes were not registered, or are not any more.
    #[error("{len_bytes:#x} bytes at {offset_bytes:#x} of the memory are not registered")]
    NotRegistered { offset_bytes: u64, len_bytes: u64 },
    /// Another descriptor has the bytes, or some of them.
    #[error("{len_bytes:#x} bytes at {offset_bytes:#x} of the memory are registered already")]
    AlreadyRegistered { offset_bytes: u64, len_bytes: u64 },
    /// An earlier descriptor abandoned the memory
    /// ([`Backing::is_lost`](crate::memory::Backing::is_lost)).
    #[error("the memory was abandoned before all of it was filled; discard it first")]
    MemoryLost,
    /// The page is not in the file yet, so it cannot be mapped.
    #[error("the page at {offset_bytes:#x} of the memory is not in the file")]
    NotCached { offset_bytes: u64 },
    /// The kernel refused a call.
    #[error("{call} failed")]
    System { call: &'static str, source: io::Error },
}

impl UserfaultfdError {
    /// Whether the request is impossible on every machine. Otherwise this machine cannot serve it,
    /// or not now.
    pub const fn is_bad_usage(&self) -> bool {
        matches!(
            self,
            UserfaultfdError::MinorNeedsShared { .. }
                | UserfaultfdError::MovablePages
                | UserfaultfdError::Empty { .. }
                | UserfaultfdError::Unaligned { .. }
                | UserfaultfdError::OutOfRange { .. }
        )
    }

    pub(super) fn system<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> UserfaultfdError {
        move |error| UserfaultfdError::System { call, source: error.into() }
    }
}

impl From<OpenError> for UserfaultfdError {
    fn from(error: OpenError) -> UserfaultfdError {
        match error {
            // As of any other call: too many descriptors, no memory.
            OpenError::Call(error) => error.into(),
            error => UserfaultfdError::Open(error),
        }
    }
}

impl From<CallError> for UserfaultfdError {
    fn from(CallError { call, error }: CallError) -> UserfaultfdError {
        UserfaultfdError::System { call, source: error.into() }
    }
}
