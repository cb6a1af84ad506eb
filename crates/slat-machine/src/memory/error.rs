//! Why guest memory cannot be had.

use std::io;

use thiserror::Error;

use super::BackingKind;

/// Guest memory that cannot be had.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// No kind of memory has this name.
    #[error("unknown memory backing '{name}'; there are {}", BackingKind::ALL.map(BackingKind::name).join(", "))]
    UnknownKind {
        /// The name.
        name: String,
    },
    /// Memory of no size.
    #[error("guest memory of 0 bytes")]
    ZeroSize,
    /// The size is not a multiple of the kind's page size.
    #[error("{size_bytes} bytes of {kind} memory are not a multiple of its page size of {} bytes", kind.page_size().size_bytes())]
    UnalignedSize {
        /// The kind.
        kind: BackingKind,
        /// The size.
        size_bytes: u64,
    },
    /// The machine, or the control group that this process is in, has not that much memory.
    #[error("guest memory needs {} MiB, but only {} MiB are available", needed_bytes >> 20, available_bytes >> 20)]
    NotEnoughMemory {
        /// What this memory needs, and other guest memory of this process that was not touched yet.
        needed_bytes: u64,
        /// What is available.
        available_bytes: u64,
    },
    /// The kernel's pool of huge pages has not enough free ones.
    #[error(
        "{kind} memory needs {needed} huge pages, but only {free} are free; to reserve them, as root: \
         echo {needed} > {pool}/nr_hugepages"
    )]
    NotEnoughHugePages {
        /// The kind.
        kind: BackingKind,
        /// Huge pages that are needed.
        needed: u64,
        /// Huge pages that are free and not promised to others.
        free: u64,
        /// The directory of the pool in sysfs.
        pool: String,
    },
    /// The shared part of a guest_memfd has another size.
    #[error("a guest_memfd of {size_bytes} bytes cannot have a shared part of {shared_bytes}")]
    SharedPartSize {
        /// The size of the guest_memfd.
        size_bytes: u64,
        /// The size of what was to be its shared part.
        shared_bytes: u64,
    },
    /// Only memory files can be mapped twice.
    #[error("{kind} memory has no file that could be mapped a second time; shmem has")]
    NotShared {
        /// The kind.
        kind: BackingKind,
    },
    /// The kernel refused a call.
    #[error("{call} for {size_bytes} bytes of {kind} memory failed")]
    System {
        /// The call.
        call: &'static str,
        /// The kind.
        kind: BackingKind,
        /// The size that was asked for.
        size_bytes: u64,
        /// What the kernel said.
        source: io::Error,
    },
}

impl MemoryError {
    /// Whether no machine could do what was asked for. Otherwise it is this machine that cannot.
    pub const fn is_bad_usage(&self) -> bool {
        matches!(
            self,
            MemoryError::UnknownKind { .. }
                | MemoryError::ZeroSize
                | MemoryError::UnalignedSize { .. }
                | MemoryError::NotShared { .. }
                | MemoryError::SharedPartSize { .. }
        )
    }
}
