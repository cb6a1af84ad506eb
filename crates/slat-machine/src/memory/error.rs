//! Why guest memory cannot be made.

use std::io;

use thiserror::Error;

use super::BackingKind;

/// Why guest memory cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum MemoryError {
    /// No kind of memory has this name.
    #[error("unknown memory backing '{name}'; there are {}", BackingKind::ALL.map(|kind| kind.to_string()).join(", "))]
    UnknownKind { name: String },
    /// Memory of no size.
    #[error("guest memory of 0 bytes")]
    ZeroSize,
    /// The size is not a multiple of the kind's page size.
    #[error("{size_bytes} bytes of {kind} memory are not a multiple of its page size of {} bytes", kind.page_size().size_bytes())]
    UnalignedSize { kind: BackingKind, size_bytes: u64 },
    /// The machine, or the control group of this process, does not have that much memory.
    #[error("guest memory needs {} MiB, but only {} MiB are available", needed_bytes >> 20, available_bytes >> 20)]
    NotEnoughMemory {
        /// What this memory needs, with other guest memory of this process that was not touched
        /// yet.
        needed_bytes: u64,
        available_bytes: u64,
    },
    /// The kernel's pool of huge pages has too few free ones.
    #[error(
        "{kind} memory needs {needed} huge pages, but only {free} are free; to reserve them, as root: \
         echo {needed} > {pool}/nr_hugepages"
    )]
    NotEnoughHugePages {
        kind: BackingKind,
        needed: u64,
        /// Huge pages that are free and not reserved.
        free: u64,
        pool: String,
    },
    /// The shared part of a guest_memfd has another size.
    #[error("a guest_memfd of {size_bytes} bytes cannot have a shared part of {shared_bytes}")]
    SharedPartSize { size_bytes: u64, shared_bytes: u64 },
    /// Only memory files can be mapped twice.
    #[error("{kind} memory has no file that could be mapped a second time; shmem has")]
    NotShared { kind: BackingKind },
    /// The kernel refused a call.
    #[error("{call} for {size_bytes} bytes of {kind} memory failed")]
    System { call: &'static str, kind: BackingKind, size_bytes: u64, source: io::Error },
}

impl MemoryError {
    /// Whether the request is impossible on every machine. Otherwise this machine cannot serve it.
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
