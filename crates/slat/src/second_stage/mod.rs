//! What is done to the tree of a second stage: `install` serves faults, `protect` takes the right to write away for
//! logging, `zap` takes mappings away, and `flush` is what they owe the CPUs afterwards.

pub(crate) mod flush;
pub(crate) mod install;
pub(crate) mod protect;
pub(crate) mod zap;
