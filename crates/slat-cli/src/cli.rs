//! The command line: its definitions, what runs for each command, and the messages for mistakes.
//!
//! `-h` prints what a newcomer needs, `--help` everything. Options that several commands have are
//! in `options`. Short letters are those of KVM's selftests, and the same everywhere.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::aging::{self, AgingArgs};
use crate::compare::{self, CompareArgs};
use crate::demo::{self, DemoArgs};
use crate::dirty_log::{self, DirtyLogArgs};
use crate::failure::{Failure, hint};
use crate::live::View;
use crate::memslots::{self, MemslotsArgs};
use crate::metal::{self, MetalArgs};
use crate::numa_split::{self, NumaSplitArgs};
use crate::options::OutputArgs;
use crate::parallel_faults::{self, ParallelFaultsArgs};
use crate::report::{self, ReportArgs};
use crate::results::{Outcome, ResultsFile};
use crate::scale::{self, ScaleArgs};
use crate::session::{self, Session};
use crate::shadow::{self, ShadowArgs};
use crate::shell::{self, CompletionsArgs, ManArgs};
use crate::stress::{self, StressArgs};
use crate::userfault::resolver::{self, ResolverArgs};
use crate::userfault::{self, ServeArgs, UserfaultArgs};

/// Columns of the help on a wide terminal, and without one.
const WIDTH: usize = 80;

/// Experiments on second-level address translation, on a software machine
///
/// The machine has real threads and real memory; the CPU's address translation is a program.
/// `slat demo` shows the main use in 20 seconds.
#[derive(Debug, Parser)]
#[command(
    name = "slat",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = true,
    max_term_width = WIDTH,
    after_help = "Example: slat demo\nExample: slat compare --quick"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one of it")]
enum Command {
    /// Show the main use in 20 seconds
    ///
    /// The phases of a dirty-logging migration with one lock, with a reader/writer lock, and
    /// without a lock.
    Demo(DemoArgs),
    #[command(flatten)]
    Experiment(Experiment),
    /// Make one page of results, with tables and plots
    ///
    /// To open in a browser; several results are compared.
    Report(ReportArgs),
    /// Serve pages to `slat userfault --source`, until interrupted
    ServePages(ServeArgs),
    /// Print the completions of a shell
    Completions(CompletionsArgs),
    /// Print the manual pages, or write them to a folder
    Man(ManArgs),
    /// The resolver of `userfault --delivery ring`, which starts it
    #[command(hide = true)]
    UserfaultResolver(ResolverArgs),
}

#[derive(Debug, Subcommand)]
enum Experiment {
    /// Compare the five systems with their baselines and peers
    ///
    /// The five published systems in one run, each with its baseline, slat, and the real peers that
    /// this machine has, and slat's instructions beside KVM's; it fails if slat loses a comparison
    /// that it claims to win.
    Compare(CompareArgs),
    /// Time the phases of a migration, with each locking
    ///
    /// Populate memory, enable dirty logging, dirty memory, get and clear the log, disable logging:
    /// each phase timed, as KVM's dirty_log_perf_test does it.
    ParallelFaults(ParallelFaultsArgs),
    /// Split huge pages on several nodes, by placement of the tables
    ///
    /// The phases of `slat parallel-faults` over huge pages on several nodes, for each placement of
    /// the tables that replace them.
    NumaSplit(NumaSplitArgs),
    /// Bring memory page by page, as vCPUs touch it
    ///
    /// By userfaultfd, by userfault exits, or through rings: as KVM's demand_paging_test does it,
    /// and more.
    Userfault(UserfaultArgs),
    /// Time a call that gets the dirty log, with peers and KVM
    ///
    /// The time of one call that gets the dirty log of a slot: of the engine, the ways of KVM
    /// around the year 2012, and the KVM of this machine.
    DirtyLog(DirtyLogArgs),
    /// Map, unmap and move memory while a vCPU runs
    ///
    /// Over many slots: iterations per second of each test of KVM's memslot_perf_test.
    Memslots(MemslotsArgs),
    /// Find out which pages a guest uses
    ///
    /// Populate, write, read, mark idle, write, mark idle, read; each phase timed, as KVM's
    /// access_tracking_perf_test does it.
    Aging(AgingArgs),
    /// Time loads of CR3 in a mini guest kernel, by strategy
    ///
    /// With shadow tables. The guest's work is that of a kernel build that was counted; it runs
    /// with each strategy for its loads of CR3.
    Shadow(ShadowArgs),
    /// Predict the published systems on models of large machines
    ///
    /// The engine's source runs on a model of a machine with many CPUs, in virtual time. What that
    /// predicts is printed beside what was published, with the rates by the number of CPUs.
    Scale(ScaleArgs),
    /// Do everything at once, on overcommitted CPUs, and verify it
    ///
    /// All operations at once while guests run. Options that are not chosen alternate.
    Stress(StressArgs),
    /// Boot Linux on slat, on an emulated machine
    ///
    /// A small hypervisor on the engine runs under QEMU or Bochs, with a guest that verifies its
    /// memory while all operations run. It is built from the source; emulator and kernel are Debian
    /// packages.
    Metal(MetalArgs),
}

macro_rules! experiments {
    ($($variant:ident in $module:ident),+) => {
        impl Experiment {
            fn run(&self, session: &Session) -> Result<Outcome, Failure> {
                match self { $(Experiment::$variant(args) => $module::run(args, session)),+ }
            }

            fn output(&self) -> &OutputArgs {
                match self { $(Experiment::$variant(args) => &args.output),+ }
            }
        }
    };
}
experiments!(
    Compare in compare, ParallelFaults in parallel_faults, NumaSplit in numa_split, Userfault in userfault,
    DirtyLog in dirty_log, Memslots in memslots, Aging in aging, Shadow in shadow, Scale in scale, Stress in stress,
    Metal in metal
);

/// Parses the arguments and runs the command.
pub(crate) fn main() -> ExitCode {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let parsed = Cli::command().try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    let is_resolver = parsed.as_ref().is_ok_and(|cli| matches!(cli.command, Command::UserfaultResolver(_)));
    let result = match parsed {
        Ok(cli) => run(cli.command, &words),
        // Help that was asked for, and the version.
        Err(error) if !error.use_stderr() => error.print().map_err(Failure::Print),
        Err(error) => {
            // If it cannot be written, the exit code still reports the mistake.
            let _ = match error.kind() {
                ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.print(),
                _ => writeln!(std::io::stderr(), "slat: {}", mistake(&error, &words)),
            };
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

fn run(command: Command, words: &[String]) -> Result<(), Failure> {
    match command {
        Command::Demo(args) => session::run(words, View::Progress, None, move |session| demo::run(&args, session)),
        Command::Experiment(experiment) => {
            let output = experiment.output();
            let json = open(output.json.as_deref())?;
            session::run(words, output.view(), json, move |session| experiment.run(session))
        }
        Command::ServePages(args) => {
            session::run(words, View::Nothing, None, move |session| userfault::serve(&args, session))
        }
        Command::Report(args) => report::run(&args),
        Command::Completions(args) => shell::completions(&args, &Cli::command()),
        Command::Man(args) => shell::man(&args, &Cli::command()),
        Command::UserfaultResolver(args) => resolver::main(&args),
    }
}

/// The file of `--json`.
fn open(path: Option<&Path>) -> Result<Option<ResultsFile>, Failure> {
    let open = |path: &Path| ResultsFile::open(path).map_err(|source| Failure::Write { path: path.to_owned(), source });
    path.map(open).transpose()
}

fn mistake(error: &clap::Error, words: &[String]) -> String {
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let what = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    // Lines that belong to it: the possible values or arguments, or a similar name.
    let more = lines.take_while(|line| !line.starts_with("Usage: ") && !line.starts_with("For more information"));
    let line = more.fold(what, |line, more| match more.strip_prefix("tip: ") {
        Some(tip) => format!("{line}; {tip}"),
        None => format!("{line} {more}"),
    });
    let definitions = Cli::command();
    let name = words.get(1).filter(|name| definitions.find_subcommand(name).is_some_and(|found| !found.is_hide_set()));
    format!("{line}{}", hint(name.map(String::as_str)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Lines of a screen.
    const LINES: usize = 28;

    /// All visible commands, and `slat` itself.
    fn commands() -> Vec<clap::Command> {
        let mut all = Cli::command();
        all.build();
        let visible: Vec<_> = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect();
        std::iter::once(all).chain(visible).collect()
    }

    fn help(name: &str, option: &str) -> String {
        let words: &[&str] = if name == "slat" { &["slat", option] } else { &["slat", name, option] };
        let error = Cli::try_parse_from(words).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DisplayHelp, "{name}: {error}");
        error.to_string()
    }

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_short_help_fits_a_screen_and_every_help_has_an_example() {
        for command in commands() {
            let name = command.get_name();
            let [short, long] = ["-h", "--help"].map(|option| help(name, option));
            assert!(short.lines().count() <= LINES, "{name}: {} lines\n{short}", short.lines().count());
            for line in short.lines().chain(long.lines()) {
                assert!(line.chars().count() <= WIDTH, "{name}: {line}");
            }
            for text in [short, long] {
                let examples: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("Example: ")).collect();
                assert!(!examples.is_empty(), "{name}: no example\n{text}");
                for example in examples {
                    let cli = Cli::try_parse_from(example.split_whitespace());
                    assert!(cli.is_ok(), "{example}: {}", cli.unwrap_err());
                    assert!(name == "slat" || example.split_whitespace().nth(1) == Some(name), "{name}: {example}");
                }
            }
        }
    }

    #[test]
    fn the_help_has_every_option_and_its_values() {
        for command in commands() {
            let name = command.get_name();
            let text = help(name, "--help");
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some_and(|help| !help.to_string().is_empty()), "{name}: {arg} has no help");
                let names = || arg.get_value_names().and_then(<[_]>::first).map_or(arg.get_id().as_str(), |name| name);
                let long = arg.get_long().map_or_else(|| names().to_owned(), |long| format!("--{long}"));
                assert!(text.contains(&long), "{name}: {long}\n{text}");
            }
        }
        assert!(help("parallel-faults", "--help").contains("- pml:"));
    }

    #[test]
    fn an_option_has_one_meaning_and_one_letter_in_all_commands() {
        let mut seen: BTreeMap<String, (Option<char>, String)> = BTreeMap::new();
        for command in commands() {
            for arg in command.get_arguments() {
                let Some(long) = arg.get_long().filter(|long| !["help", "version"].contains(long)) else { continue };
                let text = arg.get_help().map(ToString::to_string).unwrap_or_default();
                // Defaults differ.
                let meaning = text.split(" [default").next().unwrap_or_default().to_owned();
                let here = (arg.get_short(), meaning);
                // CPUs and nodes of a modelled or emulated machine have no numbers to choose: only how
                // many there are is of interest.
                if [("scale", "cpus"), ("metal", "cpus"), ("metal", "nodes")].contains(&(command.get_name(), long)) {
                    continue;
                }
                let first = seen.entry(long.to_owned()).or_insert_with(|| here.clone());
                assert_eq!(*first, here, "{} --{long}", command.get_name());
                assert!(here.0.is_none_or(|letter| "vbsoqhV".contains(letter)), "{} --{long}", command.get_name());
            }
        }
        for (long, short) in [("vcpus", 'v'), ("bytes", 'b'), ("backing", 's'), ("overlap", 'o'), ("quiet", 'q')] {
            assert_eq!(seen[long].0, Some(short), "--{long}");
        }
    }

    #[test]
    fn what_compare_runs_can_be_typed() {
        for command in compare::planned_commands() {
            let cli = Cli::try_parse_from(command.split(' '));
            assert!(cli.is_ok_and(|cli| matches!(cli.command, Command::Experiment(_))), "{command}");
        }
    }

    #[test]
    fn a_mistake_is_one_line_that_says_where_the_help_is() {
        for (line, expected) in [
            ("slat parallel-faults -v 0", "at least 1 (try `slat parallel-faults --help`)"),
            (
                "slat parallel-faults --vcpu 1",
                "; a similar argument exists: '--vcpus' (try `slat parallel-faults --help`)",
            ),
            ("slat numa-split --pin x", "[possible values: on, off] (try `slat numa-split --help`)"),
            ("slat dirty-logs", "(try `slat --help`)"),
            ("slat --no", "(try `slat --help`)"),
            ("slat completions", "<SHELL> (try `slat completions --help`)"),
            ("slat userfault-resolver", "(try `slat --help`)"),
        ] {
            let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            let error = Cli::try_parse_from(&words).unwrap_err();
            let mistake = mistake(&error, &words);
            assert!(mistake.ends_with(expected) && !mistake.contains('\n'), "{line}: {mistake}");
        }
    }
}
