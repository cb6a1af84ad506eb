//! Slots: ranges of guest-physical memory, each with a backing and flags.
//!
//! `region` is the caller's side: what a slot may look like. `set` is the engine's: the published
//! set, which faults read without a lock, and how it is replaced; `view` is what they find. What
//! user space says of single pages: `userfault` has those at which faults exit, `attributes` those
//! that are private.

pub(crate) mod attributes;
pub(crate) mod region;
pub(crate) mod set;
pub(crate) mod userfault;
pub(crate) mod view;

pub use attributes::MemoryAttributes;
pub use region::{MAX_SLOTS, MemoryRegion, MemoryRegionFlags};
pub use userfault::{MemoryFaultFlags, UserfaultBitmap, UserfaultWords};
