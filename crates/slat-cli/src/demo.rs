//! The demonstration: what `slat` does without a command. The main job, small enough for any Linux machine.

use std::io::{self, Write};

use clap::Parser;

use crate::args::{Cli, Command};
use crate::dirty_log;
use crate::failure::Failure;

/// What is run, as a command line that the reader can type.
const COMMANDS: [&str; 2] =
    ["slat dirty-log -v 4 -b 256M -i 5 --runs 5", "slat dirty-log -v 4 -b 96M -i 5 --runs 5 -o --check"];

/// Runs the demonstration.
pub(crate) fn run() -> Result<(), Failure> {
    writeln!(
        io::stdout(),
        "slat: second-stage page tables of a virtual machine, on software CPUs with real threads and real memory.\n"
    )?;
    for command in COMMANDS {
        writeln!(io::stdout(), "$ {command}")?;
        let Some(Command::DirtyLog(args)) = Cli::parse_from(command.split(' ')).command else {
            unreachable!("the demonstration's commands are dirty-log")
        };
        dirty_log::run(&args)?;
        writeln!(io::stdout())?;
    }
    writeln!(
        io::stdout(),
        "Four vCPUs filled their memory, then wrote it again while dirty logging was on, once with one lock around the\n\
         tables, once with a reader/writer lock, and once with none: the same engine, the same work. Every page was read\n\
         back as it was written, and in the second run every harvest of the log was held against memory: no page lost.\n\
         Next: `cargo run --release -- dirty-log --help`, or `cargo run --release -- dirty-log -v 64 -b 8M --check`."
    )?;
    Ok(())
}
