//! Results of measurements: samples, statistics, units, tables, and the object of `--json`
//! (`docs/results-schema.json`). The command `slat` uses it, and the benchmark of the peers.
//!
//! It is no interface for others: it changes with its two users.

#![allow(missing_docs, reason = "the fields of results are described in the schema")]

pub mod busy;
pub mod claims;
pub mod quantity;
pub mod results;
pub mod statistics;
pub mod table;
pub mod turns;
