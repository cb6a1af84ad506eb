//! Shell completions and manual pages, made from the definitions of the command line.

use std::io;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::failure::Failure;
use crate::options::OUTPUT;
use crate::results;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat completions bash\n\n\
                        Where the output belongs: bash: ~/.local/share/bash-completion/completions/slat;\n\
                        fish: ~/.config/fish/completions/slat.fish; zsh: _slat in a folder of $fpath.")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat man -o /usr/local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Where to write
    ///
    /// A page for each command, into a folder that must be there.
    #[arg(short, long, value_name = "DIR", help = OUTPUT)]
    output: Option<PathBuf>,
}

/// The definitions without the hidden commands.
fn visible(whole: &Command) -> Command {
    let commands = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let command = Command::new("slat").args(whole.get_arguments().cloned()).subcommands(commands);
    let command = command.disable_help_flag(true).disable_help_subcommand(true).disable_version_flag(true);
    command
        .about(whole.get_about().cloned().unwrap_or_default())
        .long_about(whole.get_long_about().cloned().unwrap_or_default())
        .version(env!("CARGO_PKG_VERSION"))
        .after_help(whole.get_after_help().cloned().unwrap_or_default())
}

pub(crate) fn completions(args: &CompletionsArgs, whole: &Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut visible(whole), "slat", &mut script);
    results::print(&String::from_utf8_lossy(&script)).map_err(Failure::Print)
}

/// Exit codes, for the manual pages: those of `failure`.
const EXIT_STATUS: [(&str, &str); 5] = [
    ("0", "Done and verified, or no reader of the output is left."),
    ("1", "A check or a claim failed."),
    ("2", "Bad usage."),
    ("3", "This machine cannot serve an option, or the output cannot be written."),
    ("130", "Interrupted, with what was measured so far."),
];

fn page(command: Command) -> io::Result<(String, Vec<u8>)> {
    let text = command.get_after_long_help().or(command.get_after_help()).map(ToString::to_string).unwrap_or_default();
    let (examples, notes): (Vec<&str>, Vec<&str>) =
        text.lines().filter(|line| !line.is_empty()).partition(|line| line.starts_with("Example: "));
    let has_version = command.get_version().is_some();
    let man = Man::new(command);
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    man.render_subcommands_section(&mut page)?;
    let mut more = Roff::new();
    if !notes.is_empty() {
        more.control("SH", ["NOTES"]).text([roman(notes.join(" "))]);
    }
    more.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in EXIT_STATUS {
        more.control("TP", []).text([bold(code)]).text([roman(meaning)]);
    }
    more.control("SH", ["EXAMPLES"]);
    for example in examples {
        more.control("TP", []).text([bold(example.trim_start_matches("Example: "))]);
    }
    more.to_writer(&mut page)?;
    if has_version {
        man.render_version_section(&mut page)?;
    }
    Ok((man.get_filename(), page))
}

/// Prints the manual pages, or writes each to a file.
pub(crate) fn man(args: &ManArgs, whole: &Command) -> Result<(), Failure> {
    let mut whole = visible(whole);
    // Sets the full names of the commands.
    whole.build();
    let commands: Vec<Command> = whole.get_subcommands().cloned().collect();
    for command in std::iter::once(whole).chain(commands) {
        let (name, page) = page(command).map_err(Failure::Print)?;
        match &args.output {
            None => results::print(&String::from_utf8_lossy(&page)).map_err(Failure::Print)?,
            Some(folder) => {
                let path = folder.join(name);
                std::fs::write(&path, page).map_err(|source| Failure::Write { path, source })?;
            }
        }
    }
    Ok(())
}
