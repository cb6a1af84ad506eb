//! A model of a large machine that runs the real engine, in virtual time.
//!
//! # Guarantees
//! The engine is the source of the crate `slat`, compiled once more with atomics that cost virtual
//! time (`slat-costed`). A run depends on its topology, parameters and seed, and on nothing else.
//!
//! # Use
//! Choose a [`Topology`](topology::Topology) and [`Parameters`](parameters::Parameters), and run an
//! experiment. A program that does so makes [`arena::Allocator`] its global allocator, so that the
//! numbers of cache lines do not depend on what else it has allocated.
//!
//! `docs/model.md` says what is modelled and what is not.

#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]

pub mod arena;
pub mod error;
pub mod experiment;
mod guest;
mod host;
mod lines;
pub mod machine;
pub mod parameters;
pub mod topology;
pub mod version;
