//! The dirty log: the pages of a memslot that the guest has written. A live migration copies them
//! again ([`guide`](crate::guide#a-migration) has the steps).
//!
//! # Guarantees
//! - Some calls begin a new log: turning on
//!   [`LOG_DIRTY_PAGES`](crate::MemoryRegionFlags::LOG_DIRTY_PAGES), and each get, clear or reset
//!   below for the pages that it takes. What the guest writes to them after such a call has
//!   returned is in a later log.
//! - So a copy of a page that is read after the call, and not before, is either up to date, or the
//!   page is in a later log.
//! - A page may be in the log although the guest did not write it. For example, a prefault made it
//!   writable, it is a part of a huge page that was written, or its memslot was moved.
//!
//! # Use
//! The log is a bitmap of each memslot, or a ring of each vCPU.
//!
//! - *Bitmap*: [`Vm::get_dirty_log`](crate::Vm::get_dirty_log) takes the log, and begins a new one.
//!   [`Vm::for_each_dirty`](crate::Vm::for_each_dirty) passes its pages to a callback instead.
//!   With [`ManualProtect`] it copies the log, and
//!   [`Vm::clear_dirty_log`](crate::Vm::clear_dirty_log) begins a new one, range by range.
//! - *Ring*: call [`Vm::enable_dirty_ring`](crate::Vm::enable_dirty_ring) before there is a vCPU.
//!   Then take the entries of each [`DirtyRing`], and call
//!   [`Vm::reset_dirty_rings`](crate::Vm::reset_dirty_rings), which begins a new log for their
//!   pages.
//!
//! The VMM's own writes are found by no fault. It records them after the write: in the bitmap by
//! [`Vm::mark_dirty`](crate::Vm::mark_dirty), or beside the rings in a log of its own.
//!
//! [`Config`](crate::Config) selects how writes are found ([`DirtyTracking`]), which calls begin a
//! new log ([`ManualProtect`]), and what becomes of huge pages ([`HugePageLogging`]).

// `log` is the protocol between faults that mark pages in the memslot's bitmap (`slot/bitmap.rs`)
// and harvests (`harvest`). `ring` is the log of one vCPU, the other form; `rings` are those of a
// VM.
pub(crate) mod log;
pub(crate) mod ring;
pub(crate) mod rings;

pub use crate::config::{DirtyTracking, HugePageLogging, ManualProtect};
pub use ring::{DirtyPage, DirtyRing, DirtyRingEntry};
