//! What can go wrong with demand paging.

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

/// Why a vCPU did not get on. All that waited for the same thing have the same.
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
    /// It needs a page, and nobody was named who has it.
    #[error("page {page:#x} is not there, and this run has no source of pages")]
    NoSource {
        /// The page.
        page: u64,
    },
    /// It found what should not be there.
    #[error("page {page:#x} begins with {found:#018x} instead of {expected:#018x}")]
    WrongWord {
        /// The page.
        page: u64,
        /// What is there.
        found: u64,
        /// What should be there.
        expected: u64,
    },
    /// The resolver behind the rings has ended.
    #[error("the resolver has ended: {message}")]
    Resolver {
        /// Why.
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

/// What can go wrong with a run of demand paging.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DemandPagingError {
    /// The configuration makes no sense.
    #[error(transparent)]
    Config(#[from] PagingConfigError),
    /// There is no memory for the guest.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The host's side could not be set up.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The flush method that was asked for cannot be had.
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
    /// The mode brings pages in another way than the resolver that was named.
    #[error("in mode {mode} pages cannot come {from}")]
    WrongResolver {
        /// The mode.
        mode: super::Mode,
        /// From where they were to come.
        from: &'static str,
    },
    /// Another run is under way.
    #[error("a run is under way already")]
    Busy,
    /// vCPUs did not get to the end.
    #[error("{} vCPUs did not get to the end; vCPU {}: {}", errors.len(), errors[0].0, errors[0].1)]
    Vcpus {
        /// Each of them, and why. Never empty.
        errors: Vec<(usize, VcpuError)>,
    },
    /// The background copier or the resolver failed, and no vCPU waited for it.
    #[error("the {who} failed: {error}")]
    Background {
        /// Who.
        who: &'static str,
        /// Why.
        error: VcpuError,
    },
    /// A page is not what was sent.
    #[error("page {page:#x} has {found:#018x} at offset {offset_bytes:#x} instead of {expected:#018x}")]
    WrongWord {
        /// The page.
        page: u64,
        /// Where in it.
        offset_bytes: usize,
        /// What is there.
        found: u64,
        /// What should be there.
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
    /// The dirty log names a page that nobody wrote.
    #[error("page {page:#x} was reported in round {round}, in which nobody wrote it")]
    FalseReport {
        /// The page.
        page: u64,
        /// The round.
        round: u64,
    },
}

impl DemandPagingError {
    /// Whether no machine could do what was asked for.
    pub fn is_bad_usage(&self) -> bool {
        match self {
            DemandPagingError::Config(_) | DemandPagingError::WrongResolver { .. } => true,
            DemandPagingError::Memory(error) => error.is_bad_usage(),
            DemandPagingError::Userfaultfd(error) => error.is_bad_usage(),
            _ => false,
        }
    }
}
