//! The command `slat`: parses its arguments, runs an experiment on the software machine, and
//! prints.
//!
//! Exit codes: 0 done and verified, or no reader of the output is left; 1 a check or a claim
//! failed; 2 bad usage; 3 this machine cannot serve an option; 130 interrupted.

#![cfg_attr(not(test), warn(clippy::incompatible_msrv))]

/// Adds a text, of a format and its arguments, to a string: as `write!`, which could fail.
macro_rules! add {
    ($text:expr, $($what:tt)+) => {
        $text.push_str(&format!($($what)+))
    };
}

/// Adds a line.
macro_rules! add_line {
    ($text:expr, $($line:tt)+) => {
        $text.push_str(&(format!($($line)+) + "\n"))
    };
}

mod aging;
mod cli;
mod columns;
mod compare;
mod demo;
mod dirty_log;
mod failure;
mod kvm;
mod live;
mod memslots;
mod metal;
mod numa_split;
mod options;
mod parallel_faults;
mod phases;
mod report;
mod results;
mod scale;
mod session;
mod shadow;
mod shell;
mod stress;
mod userfault;

use std::process::ExitCode;

use slat_results::{busy, claims, quantity, statistics, table, turns};

/// `slat scale` runs a model that numbers cache lines by the addresses of what it allocates. While
/// it runs, the allocations of its thread come from an arena, at the same offsets in each process.
/// All other allocations are the system's.
#[global_allocator]
static ALLOCATOR: slat_model::arena::Allocator = slat_model::arena::Allocator;

fn main() -> ExitCode {
    cli::main()
}
