//! How virtual machine monitors hand over the memory of a VM.
//!
//! - [`descriptors`]: bytes with descriptors from a Unix socket.
//! - [`firecracker`]: Firecracker's handshake.
//! - [`cloud_hypervisor`]: Cloud Hypervisor's offload daemon.
//! - [`guest_memfd`]: what Firecracker's branch with guest_memfd says; experimental.
//! - [`handoff`]: a handoff that is proposed for Cloud Hypervisor; experimental.
//! - `requests`: what vCPUs have asked for, for the successor of a dead pager.

pub mod cloud_hypervisor;
pub mod descriptors;
pub mod firecracker;
pub mod guest_memfd;
pub mod handoff;
mod requests;
