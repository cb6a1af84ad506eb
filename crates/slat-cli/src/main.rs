//! The command `slat`: it parses, runs an experiment on the software machine, and prints.
//!
//! Exit codes: 0 done and verified; 1 a check failed; 2 bad usage; 3 this machine cannot serve an option.

mod args;
mod demo;
mod dirty_log;
mod failure;
mod results;
mod table;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        None => demo::run(),
        Some(Command::DirtyLog(args)) => dirty_log::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("slat: {failure}");
            failure.exit_code()
        }
    }
}
