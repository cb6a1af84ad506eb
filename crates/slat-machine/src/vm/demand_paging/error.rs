//! The errors of demand paging.

use thiserror::Error;

use super::config::PagingConfigError;
use crate::hardware::commit::NotRestartable;
use crate::linux::topology::PinError;
use crate::memory::MemoryError;
use crate::paging::{UserfaultfdError, VcpuError};
use crate::vm::host::HostError;

/// Why a run of demand paging failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum DemandPagingError {
    /// The configuration is refused.
    #[error(transparent)]
    Config(#[from] PagingConfigError),
    /// There is no memory for the guest.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The host's side could not be set up.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The flush method in the configuration is not available.
    #[error(transparent)]
    Flush(#[from] NotRestartable),
    /// The engine refused something.
    #[error("engine: {0}")]
    Engine(#[from] slat::Error),
    /// There is no userfaultfd.
    #[error(transparent)]
    Userfaultfd(#[from] UserfaultfdError),
    /// The calling thread could not be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The rings could not be set up.
    #[error("rings for the resolver: {0}")]
    Delivery(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A thread could not be started.
    #[error("a thread could not be started: {0}")]
    Thread(std::io::Error),
    /// The mode has no pages from the resolver that was named.
    #[error("in mode {mode} pages cannot come {from}")]
    WrongResolver { mode: super::PagingMode, from: &'static str },
    /// Another run is under way.
    #[error("a run is under way already")]
    Busy,
    /// vCPUs did not finish.
    #[error("{} vCPUs did not finish; vCPU {}: {}", errors.len(), errors[0].0, errors[0].1)]
    Vcpus {
        /// Each of them, and its error. Never empty.
        errors: Vec<(usize, VcpuError)>,
    },
    /// The background copier or the resolver failed, and no vCPU waited for it.
    #[error("the {thread} failed: {error}")]
    Background { thread: &'static str, error: VcpuError },
    /// A page has wrong contents.
    #[error("page {page:#x} has {found:#018x} at offset {offset_bytes:#x} instead of {expected:#018x}")]
    WrongWord { page: u64, offset_bytes: usize, found: u64, expected: u64 },
    /// Pages were filled twice.
    #[error("{nr_pages} pages were filled twice")]
    FilledTwice { nr_pages: u64 },
    /// The dirty log misses a write.
    #[error("page {page:#x} was written in round {round}, and no harvest has reported it")]
    MissedWrite { page: u64, round: u64 },
    /// The dirty log names a page that was not written.
    #[error("page {page:#x} was reported in round {round}, in which it was not written")]
    FalseReport { page: u64, round: u64 },
}

crate::vm::engine_error::from_engine_errors!(DemandPagingError: ConfigError, SlotError, LogError, RangeError);

impl DemandPagingError {
    /// Whether the request is impossible on every machine.
    pub fn is_bad_usage(&self) -> bool {
        match self {
            DemandPagingError::Config(_) | DemandPagingError::WrongResolver { .. } => true,
            DemandPagingError::Memory(error) => error.is_bad_usage(),
            _ => false,
        }
    }
}
