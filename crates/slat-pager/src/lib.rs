//! A pager: the memory of a virtual machine that is restored from a snapshot comes page by page, when
//! the machine first touches it, instead of all before it may run.
//!
//! The kernel stops a thread that touches a page which is not there, and tells a *userfaultfd*. A
//! virtual machine monitor hands that descriptor over; the pager reads from it, fetches what is
//! missing from where the snapshot is, and puts it in place.
//!
//! # The parts
//! - [`source`]: where the bytes of a snapshot come from.

#![cfg(target_os = "linux")]
#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]

pub mod source;
