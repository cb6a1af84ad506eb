//! The definitions of the command line as they are parsed, with a help that fits a screen, and the
//! messages for mistakes.
//!
//! `--help` has the common options, in a line or two each: the first paragraph of their texts, and
//! their values. `--help-all` has all options with their full texts; so have the manual pages.

use clap::{Arg, ArgAction, Command, CommandFactory};

use crate::args::Cli;

/// Columns of the help, on any terminal and without one.
const WIDTH: usize = 80;

/// The position of the options about help.
const LAST: usize = 998;

/// How much the help prints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Detail {
    /// What fits a screen.
    Screen,
    Everything,
}

/// The definitions. Whether `--help-all` is among the words is known before they are parsed.
pub(crate) fn command(detail: Detail) -> Command {
    let help = Arg::new("help").short('h').long("help").action(ArgAction::HelpShort);
    let help_all = Arg::new("help_all").long("help-all").action(ArgAction::HelpLong).hide_short_help(true);
    let version = Arg::new("version").short('V').long("version").action(ArgAction::Version).hide_short_help(true);
    let command = Cli::command()
        .term_width(WIDTH)
        .disable_help_flag(true)
        .disable_help_subcommand(true)
        .disable_version_flag(true)
        .arg(help.global(true).display_order(LAST).help("Print help (--help-all: all options, in full)"))
        .arg(help_all.global(true).display_order(LAST).help("Print all options, in full"))
        .arg(version.display_order(LAST).help("Print the version"));
    match detail {
        Detail::Screen => command.mut_subcommands(|command| command.mut_args(with_values_inline)),
        Detail::Everything => command,
    }
}

/// Appends the values to the text: clap's own list of them takes twice the space.
fn with_values_inline(arg: Arg) -> Arg {
    let values = arg.get_possible_values();
    match arg.get_help() {
        Some(help) if !values.is_empty() && arg.get_action().takes_values() && !arg.is_hide_possible_values_set() => {
            let names: Vec<&str> = values.iter().map(|value| value.get_name()).collect();
            let help = format!("{help}: {}", names.join(", "));
            arg.help(help).hide_possible_values(true)
        }
        _ => arg,
    }
}

/// A hint at the help for a mistake in `words`, those of a command line.
pub(crate) fn hint(words: &[String]) -> String {
    let definitions = Cli::command();
    let name = words.iter().skip(1).find(|word| !word.starts_with('-'));
    let command = name.and_then(|name| definitions.find_subcommand(name)).filter(|command| !command.is_hide_set());
    let name = command.map(|command| format!(" {}", command.get_name())).unwrap_or_default();
    format!(" (try `slat{name} --help`)")
}

/// A mistake in `words`, in one line.
pub(crate) fn mistake(error: &clap::Error, words: &[String]) -> String {
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let what = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    // Lines that belong to it: the possible values or arguments, or a similar name.
    let more = lines.take_while(|line| !line.starts_with("Usage: ") && !line.starts_with("For more information"));
    let line = more.fold(what, |line, more| match more.strip_prefix("tip: ") {
        Some(tip) => format!("{line}; {tip}"),
        None => format!("{line} {more}"),
    });
    format!("{line}{}", hint(words))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use clap::Parser;

    use super::*;

    /// Lines of a terminal.
    const LINES: usize = 24;

    /// Options whose letter differs between commands: KVM's tests have different ones, `split` has
    /// two ways to pin, and `peers` has numbers of threads and of pages.
    const OTHER_LETTERS: [&str; 8] = ["pages", "pin", "runs", "seconds", "seed", "slots", "threads", "verbose"];

    /// All visible commands, and `slat` itself.
    fn commands(detail: Detail) -> Vec<Command> {
        let mut all = command(detail);
        all.build();
        let visible: Vec<Command> = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
        std::iter::once(all).chain(visible).collect()
    }

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn help(name: &str, detail: Detail) -> String {
        let option = if detail == Detail::Screen { "--help" } else { "--help-all" };
        let words: &[&str] = if name == "slat" { &["slat", option] } else { &["slat", name, option] };
        let error = command(detail).try_get_matches_from(words).unwrap_err();
        assert_eq!(error.kind(), clap::error::ErrorKind::DisplayHelp, "{name}: {error}");
        error.to_string()
    }

    #[test]
    fn every_help_fits_a_screen_and_has_an_example() {
        for command in commands(Detail::Screen) {
            let name = command.get_name();
            let text = help(name, Detail::Screen);
            assert!(text.lines().count() <= LINES, "{name}: {} lines\n{text}", text.lines().count());
            for line in text.lines() {
                assert!(line.chars().count() <= WIDTH, "{name}: {line}");
            }
            assert!(text.contains("--help-all"), "{text}");
            let examples: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("Example: ")).collect();
            assert!(!examples.is_empty(), "{name}: no example\n{text}");
            for example in examples {
                let cli = Cli::try_parse_from(example.split_whitespace());
                assert!(cli.is_ok(), "{example}: {}", cli.unwrap_err());
                assert!(name == "slat" || example.split_whitespace().nth(1) == Some(name), "{name}: {example}");
            }
        }
    }

    #[test]
    fn the_full_help_has_every_option_and_its_values() {
        for command in commands(Detail::Everything) {
            let name = command.get_name();
            let text = help(name, Detail::Everything);
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
            assert!(text.contains("Example: slat "), "{text}");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                assert!(arg.get_help().is_some_and(|help| !help.to_string().is_empty()), "{name}: {arg} has no help");
                let names = || arg.get_value_names().and_then(<[_]>::first).map_or(arg.get_id().as_str(), |name| name);
                let long = arg.get_long().map_or_else(|| names().to_owned(), |long| format!("--{long}"));
                assert!(text.contains(&long), "{name}: {long}\n{text}");
            }
        }
        assert!(help("dirty-log", Detail::Everything).contains("- pml:"));
    }

    /// The options, each with its letter.
    fn options(command: &Command) -> Vec<(String, Option<char>)> {
        command.get_arguments().filter_map(|arg| Some((arg.get_long()?.to_owned(), arg.get_short()))).collect()
    }

    #[test]
    fn an_option_has_the_same_letter_in_all_commands() {
        let mut seen: BTreeMap<String, Option<char>> = BTreeMap::new();
        for command in commands(Detail::Everything) {
            for (long, short) in options(&command) {
                let first = *seen.entry(long.clone()).or_insert(short);
                assert!(
                    first == short || OTHER_LETTERS.contains(&long.as_str()),
                    "{} --{long}: {short:?} and {first:?}",
                    command.get_name()
                );
            }
        }
        for (long, short) in [("vcpus", 'v'), ("bytes", 'b'), ("backing", 's'), ("overlap", 'o')] {
            assert_eq!(seen[long], Some(short), "--{long}");
        }
    }

    #[test]
    fn common_options_come_in_the_same_order() {
        const ORDER: [&str; 10] =
            ["vcpus", "bytes", "backing", "overlap", "lock", "format", "paging", "runs", "seed", "json"];
        for command in commands(Detail::Everything) {
            let all: Vec<String> = options(&command).into_iter().map(|(long, _)| long).collect();
            let common: Vec<&str> = all.iter().map(String::as_str).filter(|long| ORDER.contains(long)).collect();
            let expected: Vec<&str> = ORDER.into_iter().filter(|long| common.contains(long)).collect();
            assert_eq!(common, expected, "{}", command.get_name());
        }
    }

    #[test]
    fn a_mistake_is_one_line_that_says_where_the_help_is() {
        for (line, expected) in [
            ("slat dirty-log -v 0", "at least 1 (try `slat dirty-log --help`)"),
            ("slat dirty-log --vcpu 1", "; a similar argument exists: '--vcpus' (try `slat dirty-log --help`)"),
            ("slat split --pin x", "[possible values: on, off] (try `slat split --help`)"),
            ("slat dirty-logs", "(try `slat --help`)"),
            ("slat --no", "(try `slat --help`)"),
            ("slat completions", "<SHELL> (try `slat completions --help`)"),
            ("slat demand-paging-resolver", "(try `slat --help`)"),
        ] {
            let words = words(line);
            let error = command(Detail::Screen).try_get_matches_from(&words).unwrap_err();
            let mistake = mistake(&error, &words);
            assert!(mistake.ends_with(expected) && !mistake.contains('\n'), "{line}: {mistake}");
        }
    }
}
