//! Operations on the page tables of a second stage.
//!
//! - `install`: the single changes of a PTE, which faults and other operations make.
//! - `protect`: write-protects for the dirty log. `push_down` is the way back where it did so
//!   lazily.
//! - `zap`: empties PTEs; `invalidate` for the host and for memslots, `rescan` for user space.
//! - `age`: finds out what the guest has used.
//! - `split`, `recover`: make page-table pages of huge leaves, and the reverse; `broken` is the
//!   state between.
//! - `map`: pinned pages, which a caller maps in advance.
//! - `query`: reads, and changes nothing.
//! - `walk`: runs the long ones of these in turns.
//!
//! `table/tlb.rs` batches the TLB flushes that they need.

pub(crate) mod age;
pub(crate) mod broken;
pub(crate) mod install;
pub(crate) mod invalidate;
pub(crate) mod map;
pub(crate) mod protect;
pub(crate) mod push_down;
pub(crate) mod query;
pub(crate) mod recover;
pub(crate) mod rescan;
pub(crate) mod split;
mod walk;
pub(crate) mod zap;
