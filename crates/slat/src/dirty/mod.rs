//! The dirty log: how written pages are marked.
//!
//! `log` is the protocol between faults that mark pages in the memslot's bitmap (`slot/bitmap.rs`)
//! and harvests (`harvest`). `ring` is the log of one vCPU, the other form; `rings` are those of a
//! VM.

pub(crate) mod log;
pub(crate) mod ring;
pub(crate) mod rings;

pub use crate::config::{DirtyTracking, HugePageLogging, ManualProtect};
pub use ring::{DirtyPage, DirtyRing, DirtyRingEntry};
