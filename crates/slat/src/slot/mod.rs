//! Slots: ranges of guest-physical memory, each with a backing and flags.
//!
//! `region` is the caller's side: what a slot may look like. `set` is the engine's: the published set, which faults read
//! without a lock, and how it is replaced.

pub(crate) mod region;
pub(crate) mod set;

pub use region::{MAX_SLOTS, MemoryRegion, MemoryRegionFlags};
