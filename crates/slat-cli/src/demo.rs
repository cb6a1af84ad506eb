//! The demonstration: what `slat` runs without a command. It shows the main use, and runs on any
//! Linux machine.

use clap::Parser;
use serde_json::Value;

use crate::args::{Cli, Command};
use crate::failure::Failure;
use crate::results::Outcome;
use crate::session::Session;

/// The commands, as the reader can type them.
const COMMANDS: [&str; 2] =
    ["slat dirty-log -v 4 -b 256M -i 5 --runs 5", "slat dirty-log -v 4 -b 96M -i 5 --runs 5 -o --check"];

/// Runs the demonstration.
pub(crate) fn run(session: &Session) -> Result<Outcome, Failure> {
    session.say(
        "slat: second-stage page tables of a virtual machine, on software CPUs with real threads and real memory.\n\n",
    )?;
    for command in COMMANDS {
        session.say(&format!("$ {command}\n"))?;
        let Some(Command::Experiment(experiment)) = Cli::parse_from(command.split(' ')).command else {
            unreachable!("the demonstration's commands are experiments")
        };
        let outcome = experiment.run(session)?;
        session.say(&outcome.text)?;
        session.say("\n")?;
    }
    Ok(Outcome {
        text: "Four vCPUs filled their memory, then wrote it again while dirty logging was on, once with one lock around the\n\
               tables, once with a reader/writer lock, and once with none: the same engine, the same work. Every page was read\n\
               back as it was written, and in the second run every harvest of the log was compared with memory: no page lost.\n\
               Next: `cargo run --release -- compare --quick`, or `cargo run --release -- dirty-log --help`.\n"
            .to_owned(),
        json: Value::Null,
        markdown: None,
        failure: None,
    })
}
