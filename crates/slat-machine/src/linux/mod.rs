//! What the machine asks of Linux beside memory.
//!
//! - [`clock`]: time for measurements.
//! - [`topology`]: the processors and the memory of this computer, and pinned threads.
//! - Memory files, eventfds and mappings are `slat-pager`'s, whose deliveries need them, too.

pub mod clock;
pub mod topology;

pub(crate) use slat_pager::linux::{descriptors, mapping};
