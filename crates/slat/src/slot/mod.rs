//! Memslots: ranges of guest-physical memory, each with a backing and flags.
//!
//! `region` is the caller's description of a memslot. `set` is the published set, which faults read
//! without a lock, and its replacement; `chunks` is how a set lies in memory; `new` is what a
//! change adds, `view` what a guard finds there. `bitmap` is the dirty log of a memslot.
//! `userfault` has the pages at which faults exit, `attributes` those that are private.

pub(crate) mod attributes;
pub(crate) mod bitmap;
pub(crate) mod chunks;
pub(crate) mod new;
pub(crate) mod region;
pub(crate) mod set;
pub(crate) mod userfault;
pub(crate) mod view;

pub use attributes::MemoryAttributes;
pub use region::{MemoryRegion, MemoryRegionFlags};
pub use userfault::{UserfaultBitmap, UserfaultWords};
