//! Shell completions and manual pages, made from the definitions of the command line.

use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::failure::Failure;
use crate::help::{self, Detail};
use crate::session;

/// The options of `slat completions`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat completions bash\n\n\
                        Where the output belongs: bash: ~/.local/share/bash-completion/completions/slat;\n\
                        fish: ~/.config/fish/completions/slat.fish; zsh: _slat in a folder of $fpath.")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// The options of `slat man`.
#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat man -o /usr/local/share/man/man1")]
pub(crate) struct ManArgs {
    /// Write a page for each command into this folder, which must be there.
    #[arg(short = 'o', long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// The definitions without the hidden commands.
fn visible() -> Command {
    let whole = help::command(Detail::Everything);
    let commands = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let command = Command::new("slat").args(whole.get_arguments().cloned()).subcommands(commands);
    let command = command.disable_help_flag(true).disable_help_subcommand(true).disable_version_flag(true);
    command
        .about(whole.get_about().cloned().unwrap_or_default())
        .long_about(whole.get_long_about().cloned().unwrap_or_default())
        .version(env!("CARGO_PKG_VERSION"))
        .after_help(whole.get_after_help().cloned().unwrap_or_default())
}

/// Prints the completions.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut visible(), "slat", &mut script);
    session::print(&String::from_utf8_lossy(&script))
}

/// Prints the manual pages, or writes each to a file.
pub(crate) fn man(args: &ManArgs) -> Result<(), Failure> {
    let mut whole = visible();
    // Sets the full names of the commands.
    whole.build();
    let commands: Vec<Command> = whole.get_subcommands().cloned().collect();
    for command in std::iter::once(whole).chain(commands) {
        let man = Man::new(command);
        let mut page = Vec::new();
        man.render(&mut page).map_err(Failure::Print)?;
        match &args.output {
            None => session::print(&String::from_utf8_lossy(&page))?,
            Some(folder) => {
                let path = folder.join(man.get_filename());
                std::fs::write(&path, page).map_err(|source| Failure::Write { path, source })?;
            }
        }
    }
    Ok(())
}
