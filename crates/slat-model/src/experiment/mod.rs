//! The experiments: the published ones as they were published, and what they leave open.

pub mod beside;
pub mod check;
mod failure;
pub mod numa_split;
pub mod phases;
pub mod userfault;
mod vm;

pub use crate::guest::Hypervisor;
pub use crate::host::Backing;
