//! Complete virtual machines on the engine.
//!
//! - [`host`]: the engine's [`slat::Host`].
//! - [`guest`]: guest programs, which verify what they read.
//! - [`machine`]: guest memory in memslots, a VM, and one thread for each virtual CPU.
//! - [`demand_paging`]: such a machine whose memory is still elsewhere, and arrives page by page.

pub mod demand_paging;
mod engine_error;
pub mod guest;
pub mod host;
pub mod machine;
