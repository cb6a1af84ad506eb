//! What is done to the tree of a second stage: `install` has the single steps, which faults take; `protect` takes the
//! right to write away for logging, `push_down` is the way back where it did so lazily, `zap` takes mappings away, `invalidate` does so for the host, `rescan` for user space, `age` finds out what was
//! used, `split` and `recover` turn huge leaves into tables and back (`broken`: what is between), `query` changes nothing, and `flush` is what they owe the CPUs afterwards.

pub(crate) mod age;
pub(crate) mod broken;
pub(crate) mod install;
pub(crate) mod invalidate;
pub(crate) mod protect;
pub(crate) mod push_down;
pub(crate) mod query;
pub(crate) mod recover;
pub(crate) mod rescan;
pub(crate) mod split;
pub(crate) mod zap;
