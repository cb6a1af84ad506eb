//! Why a vCPU does not get its pages.

use std::sync::Arc;

use slat_pager::delivery::DeliveryError;
use slat_pager::source::requests::RequestError;
use thiserror::Error;

use super::userfaultfd::UserfaultfdError;
use crate::hardware::cpu::CpuError;
use crate::linux::topology::PinError;
use crate::memory::guest_memfd::NoSuchPage;

/// Why a vCPU did not finish. All that waited for the same thing have the same error.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum VcpuError {
    /// The source of its pages failed.
    #[error("the source of pages failed: {0}")]
    Source(Arc<RequestError>),
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
    NoSource { page: u64 },
    /// It found wrong contents.
    #[error("page {page:#x} begins with {found:#018x} instead of {expected:#018x}")]
    WrongWord { page: u64, found: u64, expected: u64 },
    /// The resolver behind the rings has ended.
    #[error("the resolver has ended: {message}")]
    Resolver { message: String },
    /// A thread panicked.
    #[error("a thread panicked: {message}")]
    Panicked { message: String },
}

impl From<RequestError> for VcpuError {
    fn from(error: RequestError) -> VcpuError {
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
