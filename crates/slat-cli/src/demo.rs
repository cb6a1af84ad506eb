//! The demonstration: what `slat` does without a command. The main job, small enough for any Linux machine.

use clap::Parser;

use crate::args::{Cli, Command};
use crate::dirty_log;
use crate::failure::Failure;

/// What is run, as a command line that the reader can type.
const COMMANDS: [&str; 2] =
    ["slat dirty-log -v 4 -b 256M -i 5 --runs 3", "slat dirty-log -v 4 -b 64M -i 5 --runs 3 -o"];

/// Runs the demonstration.
pub(crate) fn run() -> Result<(), Failure> {
    println!(
        "slat: second-stage page tables of a virtual machine, on software CPUs with real threads and real memory.\n"
    );
    for command in COMMANDS {
        println!("$ {command}");
        let Some(Command::DirtyLog(args)) = Cli::parse_from(command.split(' ')).command else {
            unreachable!("the demonstration's commands are dirty-log")
        };
        dirty_log::run(&args)?;
        println!();
    }
    println!(
        "Four vCPUs filled their memory, then wrote it again while dirty logging was on, once with one lock around the\n\
         tables, once with a reader/writer lock, and once with none: the same engine, the same work, no page lost and\n\
         every page read back as it was written. Try `slat dirty-log --help`, or `slat dirty-log -v 64 -b 8M --check`."
    );
    Ok(())
}
