//! The dirty log: which pages the guest wrote since the log was last taken.
//!
//! `bitmap` is the log of one slot. `log` is the protocol between the faults that mark pages and the harvest that takes
//! the marks. `ring` is the log of one vCPU, the other form; `rings` are those of
//! a VM, and their reset.

pub(crate) mod bitmap;
pub(crate) mod log;
pub(crate) mod ring;
pub(crate) mod rings;
