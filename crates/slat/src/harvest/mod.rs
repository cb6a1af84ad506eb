//! Harvests: the calls that get the dirty log and write-protect its pages anew.
//!
//! `log` harvests the bitmap of a memslot, `rings` resets the dirty rings. Both write-protect by
//! `second_stage::protect`. `mark` marks what no fault marks. What they harvest is in `dirty`.

pub(crate) mod log;
pub(crate) mod mark;
pub(crate) mod rings;
