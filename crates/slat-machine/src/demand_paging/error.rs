//! The errors of demand paging.

use std::sync::Arc;

use thiserror::Error;

use super::config::PagingConfigError;
use crate::commit::NotRestartable;
use crate::cpu::CpuError;
use crate::delivery::DeliveryError;
use crate::host::HostError;
use crate::memory::MemoryError;
use crate::memory::guest_memfd::NoSuchPage;
use crate::source::SourceError;
use crate::topology::PinError;
use crate::userfaultfd::UserfaultfdError;

/// Why a vCPU did not finish. All that waited for the same thing have the same error.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum VcpuError {
    /// The source of its pages failed.
    #[error("the source of pages failed: {0}")]
    Source(Arc<SourceError>),
    /// The resolver behind the rings failed.
    #[error("the delivery of pages failed: {0}")]
    Delivery(Arc<DeliveryError>),
    /// A userfaultfd could not be served.
    #[error("the userfaultfd failed: {0}")]
    Userfaultfd(Arc<UserfaultfdError>),
    /// A page could not be put into private memory.
    #[error(transparent)]
    Install(#[from] NoSuchPage),
    /// Its CPU could not do an access.
    #[error("{0}")]
    Cpu(#[from] CpuError),
    /// Its thread could not be pinned.
    #[error(transparent)]
    Pin(Arc<PinError>),
    /// It needs a page, and no source was named.
    #[error("page {page:#x} is not there, and this run has no source of pages")]
    NoSource {
        /// The page.
        page: u64,
    },
    /// It found wrong contents.
    #[error("page {page:#x} begins with {found:#018x} instead of {expected:#018x}")]
    WrongWord {
        /// The page.
        page: u64,
        /// The word that is there.
        found: u64,
        /// The word that should be there.
        expected: u64,
    },
    /// The resolver behind the rings has ended.
    #[error("the resolver has ended: {message}")]
    Resolver {
        /// The resolver's message.
        message: String,
    },
    /// A thread panicked.
    #[error("a thread panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
}

impl From<SourceError> for VcpuError {
    fn from(error: SourceError) -> VcpuError {
        VcpuError::Source(Arc::new(error))
    }
}

impl From<DeliveryError> for VcpuError {
    fn from(error: DeliveryError) -> VcpuError {
        VcpuError::Delivery(Arc::new(error))
    }
}

impl From<UserfaultfdError> for VcpuError {
    fn from(error: UserfaultfdError) -> VcpuError {
        VcpuError::Userfaultfd(Arc::new(error))
    }
}

/// Why a run of demand paging failed.
#[derive(Debug, Error)]
#[non_exhaustive]
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
    WrongResolver {
        /// The mode.
        mode: super::PagingMode,
        /// The source that was named.
        from: &'static str,
    },
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
    Background {
        /// Which thread.
        thread: &'static str,
        /// Its error.
        error: VcpuError,
    },
    /// A page has wrong contents.
    #[error("page {page:#x} has {found:#018x} at offset {offset_bytes:#x} instead of {expected:#018x}")]
    WrongWord {
        /// The page.
        page: u64,
        /// The offset in the page.
        offset_bytes: usize,
        /// The word that is there.
        found: u64,
        /// The word that should be there.
        expected: u64,
    },
    /// Pages were filled twice.
    #[error("{nr_pages} pages were filled twice")]
    FilledTwice {
        /// How many.
        nr_pages: u64,
    },
    /// The dirty log misses a write.
    #[error("page {page:#x} was written in round {round}, and no harvest has reported it")]
    MissedWrite {
        /// The page.
        page: u64,
        /// The round.
        round: u64,
    },
    /// The dirty log names a page that was not written.
    #[error("page {page:#x} was reported in round {round}, in which it was not written")]
    FalseReport {
        /// The page.
        page: u64,
        /// The round.
        round: u64,
    },
}

crate::engine_error::from_engine_errors!(DemandPagingError: ConfigError, SlotError, LogError, RangeError);

impl DemandPagingError {
    /// Whether the request is impossible on every machine.
    pub fn is_bad_usage(&self) -> bool {
        match self {
            DemandPagingError::Config(_) | DemandPagingError::WrongResolver { .. } => true,
            DemandPagingError::Memory(error) => error.is_bad_usage(),
            DemandPagingError::Userfaultfd(error) => error.is_bad_usage(),
            _ => false,
        }
    }
}
