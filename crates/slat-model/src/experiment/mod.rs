//! The experiments: the published ones as they were published, and what they leave open.

mod failure;
pub mod phases;
pub mod userfault;
mod vm;

pub use crate::guest::Hypervisor;
pub use crate::host::Backing;
