//! The dirty log: which pages the guest wrote since the last harvest.
//!
//! `bitmap` is the log of one memslot, and `log` the protocol between faults that mark pages and
//! harvests. `ring` is the log of one vCPU, the other form; `rings` are those of a VM, and their
//! reset.

pub(crate) mod bitmap;
pub(crate) mod log;
pub(crate) mod ring;
pub(crate) mod rings;

pub use crate::config::{DirtyTracking, HugePageLogging, ManualProtect};
pub use ring::{DirtyPage, DirtyRing, DirtyRingEntry};
