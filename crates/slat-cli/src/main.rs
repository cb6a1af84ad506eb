//! The command `slat`: it parses, runs an experiment on the software machine, and prints.
//!
//! Exit codes: 0 done and verified; 1 a check failed; 2 bad usage; 3 this machine cannot serve an option; 130 interrupted.

mod aging;
mod args;
mod compare;
mod cr3;
mod demand_paging;
mod demo;
mod dirty_log;
mod failure;
mod get_dirty_log;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
#[path = "kvm_missing.rs"]
mod kvm;
mod memslots;
mod peers;
mod phases;
mod results;
mod session;
mod split;
mod stress;
mod table;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use failure::Failure;
use results::ResultsFile;
use session::Files;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = match &cli.command {
        Some(Command::DemandPagingResolver(args)) => demand_paging::resolver::main(args),
        _ => measure(cli),
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

/// Runs an experiment.
fn measure(cli: Cli) -> Result<(), Failure> {
    let open =
        |path: fn(&Command) -> Option<&Path>| cli.command.as_ref().and_then(path).map(ResultsFile::open).transpose();
    let files = Files { json: open(Command::json)?, markdown: open(Command::markdown)? };
    let words: Vec<String> = std::iter::once("slat".to_owned()).chain(std::env::args().skip(1)).collect();
    session::run(&words.join(" "), files, move |session| match &cli.command {
        None => demo::run(session),
        Some(command) => command.run(session),
    })
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
