//! A pager: the memory of a virtual machine that is restored from a snapshot comes page by page, when
//! the machine first touches it, instead of all before it may run.
//!
//! The kernel stops a thread that touches a page which is not there, and tells a *userfaultfd*. A
//! virtual machine monitor hands that descriptor over; the pager reads from it, fetches what is
//! missing from where the snapshot is, and puts it in place.
//!
//! # The parts
//! - [`protocol`]: how virtual machine monitors hand over their memory.
//! - [`shared_memory`]: guest memory that is a file of ours, filled once and mapped by the VMM.
//! - [`working_set`]: what a VM touches first, recorded and filled in advance.
//! - [`chunks`]: snapshots that are cut into chunks, compressed, and stored once each.
//! - [`snapshot`]: the names of snapshots, and how one is opened.
//! - [`commands`]: `slat-pager pack`, `inspect`, `verify` and `share`.
//! - [`source`]: where the bytes of a snapshot come from.
//! - [`delivery`]: faults of a VM whose page tables are the engine's, not KVM's: by rings in shared
//!   memory. [`linux`] is what that takes.
//! - [`userfaultfd`]: the kernel's descriptor.
//! - [`vm`]: one machine that is served; [`attach`] is the way in for any monitor.
//! - [`metrics`]: what is counted.
//! - [`mod@bench`]: this pager beside a plain handler of page faults.
//! - [`daemon`]: many machines, each with the snapshot of its socket; [`config`] and [`options`] say
//!   what it serves.
//!
//! Without the feature `full`, which is on by default, there are only [`source`] and [`delivery`].

#![cfg(target_os = "linux")]
#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]

#[cfg(feature = "full")]
pub mod bench;
#[cfg(feature = "full")]
pub mod chunks;
#[cfg(feature = "full")]
pub mod commands;
#[cfg(feature = "full")]
pub mod config;
#[cfg(feature = "full")]
pub mod daemon;
pub mod delivery;
#[cfg(feature = "full")]
mod folder_lock;
pub mod linux;
mod little_endian;
#[cfg(feature = "full")]
pub mod metrics;
#[cfg(feature = "full")]
pub mod options;
#[cfg(feature = "full")]
pub mod protocol;
#[cfg(feature = "full")]
pub mod shared_memory;
#[cfg(feature = "full")]
pub mod snapshot;
pub mod source;
pub use slat_userfaultfd as userfaultfd;
#[cfg(feature = "full")]
pub mod vm;
#[cfg(feature = "full")]
pub mod working_set;

#[cfg(feature = "full")]
pub use vm::attach;
