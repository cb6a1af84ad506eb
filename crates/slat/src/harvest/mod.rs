//! Harvests: the calls that get the dirty log and write-protect its pages anew.
//!
//! `log` harvests the bitmap of a memslot, `each` passes its dirty pages to a callback, `rings`
//! resets the dirty rings. All write-protect by `second_stage::protect`. `mark` marks what no fault
//! marks. What they harvest is in `dirty`.

pub(crate) mod each;
pub(crate) mod log;
pub(crate) mod mark;
pub(crate) mod rings;
