//! The command `slat`: parses its arguments, runs an experiment on the software machine, and
//! prints.
//!
//! Exit codes: 0 done and verified, or no reader of the output is left; 1 a check failed; 2 bad
//! usage; 3 this machine cannot serve an option; 130 interrupted.

mod aging;
mod args;
mod compare;
mod cr3;
mod demand_paging;
mod demo;
mod dirty_log;
mod failure;
mod get_dirty_log;
mod help;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
#[path = "kvm_missing.rs"]
mod kvm;
mod live;
mod memslots;
mod peers;
mod phases;
mod report;
mod results;
mod session;
mod shell;
mod split;
mod stress;
mod table;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::FromArgMatches;

use args::{Cli, Command, Experiment};
use failure::{Failure, command_line};
use help::Detail;
use live::View;
use results::ResultsFile;
use session::Files;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let detail = if words.iter().any(|word| word == "--help-all") { Detail::Everything } else { Detail::Screen };
    let parsed = help::command(detail).try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let is_resolver = parsed.as_ref().is_ok_and(|cli| matches!(cli.command, Some(Command::DemandPagingResolver(_))));
    let result = match parsed {
        Ok(cli) => run(cli, &words),
        // Help, and the version.
        Err(error) if !error.use_stderr() => error.print().map_err(Failure::Print),
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "slat: {}", help::mistake(&error, &words));
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_closed_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            // The parent of a resolver reports it.
            let next_step = if is_resolver { String::new() } else { failure.next_step(&words) };
            // If the line cannot be written, the exit code still reports the failure.
            let _ = writeln!(std::io::stderr(), "slat: {failure}{next_step}");
            failure.exit_code()
        }
    }
}

fn run(cli: Cli, words: &[String]) -> Result<(), Failure> {
    let view = if cli.live { View::Live } else { View::Progress };
    match cli.command {
        None => session::run(&command_line(words), view, Files::default(), demo::run),
        Some(Command::Experiment(experiment)) => measure(experiment, view, words),
        Some(Command::Report(args)) => report::run(&args),
        Some(Command::Completions(args)) => shell::completions(&args),
        Some(Command::Man(args)) => shell::man(&args),
        Some(Command::DemandPagingResolver(args)) => demand_paging::resolver::main(&args),
    }
}

/// Runs an experiment.
fn measure(experiment: Experiment, view: View, words: &[String]) -> Result<(), Failure> {
    let open = |path: Option<&Path>| path.map(ResultsFile::open).transpose();
    let files = Files { json: open(experiment.json())?, markdown: open(experiment.markdown())? };
    session::run(&command_line(words), view, files, move |session| experiment.run(session))
}
