//! What the machine asks of Linux beside memory.
//!
//! - [`clock`]: time for measurements.
//! - [`topology`]: the processors and the memory of this computer, and pinned threads.
//! - `descriptors`: memory files, eventfds, and waits for descriptors.
//! - `mapping`: mappings of memory.

pub mod clock;
pub(crate) mod descriptors;
pub(crate) mod mapping;
pub mod topology;
