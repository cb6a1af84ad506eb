//! The working set of a snapshot: what a VM touches first after a restore, in that order. It is
//! recorded at one restore, and read in advance at the next.
//!
//! - [`record`]: which pages a VM faults on, bounded.
//! - [`plan`]: which of both a machine does.
//! - [`mod@format`]: the file beside the snapshot.
//! - [`replay`]: fills those pages while the VM runs; its faults go first.

pub mod format;
mod pace;
pub mod plan;
mod prefetch;
pub mod record;
pub mod replay;

pub use self::format::WorkingSet;
pub use self::plan::Plan;
pub use self::record::Recorder;
