//! The command `slat`: it parses, runs an experiment on the software machine, and prints.
//!
//! Exit codes: 0 done and verified; 1 a check failed; 2 bad usage; 3 this machine cannot serve an option.

mod aging;
mod args;
mod cr3;
mod demand_paging;
mod demo;
mod dirty_log;
mod failure;
mod get_dirty_log;
mod memslots;
mod phases;
mod results;
mod split;
mod stress;
mod table;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match cli.command {
        None => demo::run(),
        Some(Command::DirtyLog(args)) => dirty_log::run(&args),
        Some(Command::Split(args)) => split::run(&args),
        Some(Command::DemandPaging(args)) => demand_paging::run(&args),
        Some(Command::DemandPagingResolver(args)) => demand_paging::resolver::main(&args),
        Some(Command::GetDirtyLog(args)) => get_dirty_log::run(&args),
        Some(Command::Memslots(args)) => memslots::run(&args),
        Some(Command::Aging(args)) => aging::run(&args),
        Some(Command::Cr3(args)) => cr3::run(&args),
        Some(Command::Stress(args)) => stress::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // Where the line cannot be written, the exit code still says it.
            let _ = writeln!(std::io::stderr(), "slat: {failure}");
            failure.exit_code()
        }
    }
}

/// What clap has to say: help as it is; a mistake in one line.
fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        return if error.print().is_ok() { ExitCode::SUCCESS } else { ExitCode::from(3) };
    }
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let what = lines.next().unwrap_or_default().trim_start_matches("error: ");
    // The line behind it, if it belongs to it: the values that there are.
    let more = lines.next().filter(|line| line.starts_with('[')).unwrap_or_default();
    let _ = writeln!(std::io::stderr(), "slat: {what} {more}{}(try --help)", if more.is_empty() { "" } else { " " });
    ExitCode::from(2)
}
