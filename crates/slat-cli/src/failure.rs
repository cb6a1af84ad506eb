//! Failures of the command: why it failed, what to do next, and the exit code. A failure is one
//! line that names the value and ends with the next step. The kind of failure determines the next
//! step ([`Failure::next_step`]). Where this machine cannot serve an option, the text has it, since
//! it depends on what is missing.

mod advice;

use std::fmt;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;

use slat::error::{ConfigError, FaultError, LogError, RangeError, SlotError};
use slat_machine::paging::{RequestError, SourceError};
use slat_machine::vm::demand_paging::{DemandPagingError, ServeError, VcpuError};
use slat_machine::vm::machine::MachineError;
use slat_model::error::ModelError;
use thiserror::Error;

/// The exit code of a process that SIGINT ended, as shells give it.
pub(crate) const INTERRUPTED: u8 = 130;

/// A failure of the command, as one line.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// The guest, the tables or the log showed a wrong result.
    #[error("check failed: {0}")]
    Check(String),
    /// slat lost a comparison that it claims to win.
    #[error("claim lost: {0}")]
    Claim(String),
    /// No machine could do what the options ask for.
    #[error("{0}")]
    Usage(String),
    /// This machine cannot do what the options ask for; the text has the next step.
    #[error("this machine cannot do that: {0}")]
    CannotServe(String),
    /// The results could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    /// The standard output cannot be written.
    #[error("cannot print: {0}")]
    Print(std::io::Error),
    /// The user interrupted it.
    #[error("interrupted{}", if *measured { ": what is above was measured until then" } else { " before anything was measured" })]
    Interrupted {
        /// Whether anything was measured.
        measured: bool,
    },
}

impl Failure {
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Check(_) | Failure::Claim(_) => 1,
            Failure::Usage(_) => 2,
            Failure::CannotServe(_) | Failure::Write { .. } | Failure::Print(_) => 3,
            Failure::Interrupted { .. } => INTERRUPTED,
        })
    }

    /// Whether the output is a pipe without a reader, as in `slat man | head -1`. The reader has
    /// all that it wanted. So the command ends quietly and with success, as the tools of a shell
    /// do.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Failure::Print(source) | Failure::Write { source, .. } if source.kind() == ErrorKind::BrokenPipe)
    }

    /// The next step, as the end of the line; `words` are those of the command line.
    pub(crate) fn next_step(&self, words: &[String]) -> String {
        match self {
            Failure::Check(_) => {
                format!("; please report this with the command line: {}", command_line(words))
            }
            Failure::Claim(_) => format!(
                "; other work on the machine can cause that: repeat it on an idle machine, and report it if it is lost again: {}",
                command_line(words)
            ),
            Failure::Usage(_) => hint(words.get(1).map(String::as_str)),
            Failure::Write { source, .. } => format!("; {}", after_write(source.kind())),
            Failure::Print(_) => "; write it to another place".to_owned(),
            Failure::CannotServe(_) | Failure::Interrupted { .. } => String::new(),
        }
    }
}

/// Where the help of a command is.
pub(crate) fn hint(command: Option<&str>) -> String {
    format!(" (try `slat{} --help`)", command.map(|name| format!(" {name}")).unwrap_or_default())
}

/// The command line, as in results and in reports of failures.
pub(crate) fn command_line(words: &[String]) -> String {
    let behind_name = words.iter().skip(1).map(String::as_str);
    std::iter::once("slat").chain(behind_name).collect::<Vec<_>>().join(" ")
}

fn after_write(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::NotFound => "make its folder first, or name another",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "name a place that you may write to",
        ErrorKind::AlreadyExists => "remove it, or name another",
        ErrorKind::IsADirectory => "name a file in it",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room, or name another place",
        _ => "name another place",
    }
}

/// The next step where the KVM of this machine fails.
pub(crate) const LEAVE_KVM_OUT: &str = "; leave it out with --peer none";

/// A thread that cannot be started.
pub(crate) fn no_thread(error: &std::io::Error) -> Failure {
    Failure::CannotServe(format!("no thread: {error}; {}", advice::THREADS))
}

/// An error with its causes, on one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
        cause = error.source();
    }
    line
}

/// An error with its causes, and the next step.
fn advised(error: &dyn std::error::Error, advice: &str) -> String {
    let line = with_causes(error);
    if advice.is_empty() { line } else { format!("{line}; {advice}") }
}

impl From<MachineError> for Failure {
    fn from(error: MachineError) -> Failure {
        let line = advised(&error, advice::of_machine(&error));
        match &error {
            MachineError::Config(_) | MachineError::Program(_) | MachineError::NoOtherNode => Failure::Usage(line),
            MachineError::Engine(
                slat::Error::Slot(SlotError::SlotTooHigh { .. }) | slat::Error::Config(ConfigError::BadRingSize { .. }),
            ) => Failure::Usage(line),
            MachineError::Memory(memory) if memory.is_bad_usage() => Failure::Usage(line),
            MachineError::Numa(numa) if numa.is_bad_usage() => Failure::Usage(line),
            MachineError::Guest { .. } | MachineError::Panicked { .. } => Failure::Check(with_causes(&error)),
            _ => Failure::CannotServe(line),
        }
    }
}

/// Lets `?` turn each error of the engine into a failure.
macro_rules! from_engine_errors {
    ($($error:ty),*) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Failure {
                Failure::from(MachineError::Engine(error.into()))
            }
        })*
    };
}

from_engine_errors!(slat::Error, ConfigError, SlotError, LogError, FaultError, RangeError);

/// Whether the options name a file that does not fit the memory that they name.
fn does_not_fit(error: &SourceError) -> bool {
    matches!(error, SourceError::OutOfRange { .. } | SourceError::Malformed { .. })
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        let line = advised(&error, advice::of_source(&error));
        if does_not_fit(&error) { Failure::Usage(line) } else { Failure::CannotServe(line) }
    }
}

impl From<RequestError> for Failure {
    fn from(error: RequestError) -> Failure {
        let line = advised(&error, advice::of_request(&error));
        match error {
            RequestError::Source { error, .. } if does_not_fit(&error) => Failure::Usage(line),
            _ => Failure::CannotServe(line),
        }
    }
}

impl From<DemandPagingError> for Failure {
    fn from(error: DemandPagingError) -> Failure {
        let line = advised(&error, advice::of_paging(&error));
        match &error {
            error if error.is_bad_usage() => Failure::Usage(line),
            DemandPagingError::WrongWord { .. }
            | DemandPagingError::FilledTwice { .. }
            | DemandPagingError::MissedWrite { .. }
            | DemandPagingError::FalseReport { .. } => Failure::Check(with_causes(&error)),
            DemandPagingError::Vcpus { errors } => paging_failed(errors.iter().map(|(_, error)| error), &error),
            DemandPagingError::Background { error: of_one, .. } => paging_failed(std::iter::once(of_one), &error),
            _ => Failure::CannotServe(line),
        }
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Failure {
        match error {
            ServeError::Source(error) => error.into(),
            error => Failure::CannotServe(advised(&error, advice::of_serving(&error))),
        }
    }
}

impl From<ModelError> for Failure {
    fn from(error: ModelError) -> Failure {
        let line = one_line(&error.to_string());
        match error {
            ModelError::Topology { .. } | ModelError::Parameters { .. } | ModelError::TooManyVcpus { .. } => {
                Failure::Usage(line)
            }
            ModelError::NoAddressSpace { .. } => Failure::CannotServe(format!("{line}; raise `ulimit -v`")),
            ModelError::Check(what) => Failure::Check(what),
            // Nothing that the options say leads to these.
            _ => Failure::Check(line),
        }
    }
}

/// A message on one line. An error of a file in TOML has the line of the file below it, behind a
/// bar and its number, and then the reason.
fn one_line(text: &str) -> String {
    let is_quoted = |line: &&str| {
        line.split_once('|').is_some_and(|(number, _)| number.trim().parse::<u32>().is_ok() || number.trim().is_empty())
    };
    let lines: Vec<&str> = text.lines().filter(|line| !is_quoted(line)).map(str::trim).collect();
    lines.join(": ")
}

/// The failure to bring pages to vCPUs. A wrong page takes precedence over a missing one.
fn paging_failed<'a>(errors: impl Iterator<Item = &'a VcpuError> + Clone, whole: &DemandPagingError) -> Failure {
    let line = || advised(whole, advice::of_paging(whole));
    let is_wrong = |error: &VcpuError| matches!(error, VcpuError::WrongWord { .. } | VcpuError::Panicked { .. });
    let is_usage = |error: &VcpuError| match error {
        VcpuError::Source(error) => matches!(&**error, RequestError::Source { error, .. } if does_not_fit(error)),
        _ => false,
    };
    if errors.clone().any(is_wrong) {
        Failure::Check(with_causes(whole))
    } else if errors.clone().any(is_usage) {
        Failure::Usage(line())
    } else {
        Failure::CannotServe(line())
    }
}

/// Refuses options: the first of these texts whose condition holds says why.
pub(crate) fn refuse<'a>(reasons: impl IntoIterator<Item = (bool, &'a str)>) -> Result<(), Failure> {
    match reasons.into_iter().find(|(is_so, _)| *is_so) {
        Some((_, why)) => Err(Failure::Usage(why.to_owned())),
        None => Ok(()),
    }
}

/// Fails with such a [`Failure`] and this text, unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $kind:ident, $($text:tt)+) => {
        if !$condition {
            return Err($crate::failure::Failure::$kind(format!($($text)+)));
        }
    };
}
pub(crate) use ensure;

pub(crate) fn check_failed(what: impl fmt::Display) -> Failure {
    Failure::Check(what.to_string())
}

#[cfg(test)]
mod tests {
    use slat_machine::paging::SourceSpec;
    use slat_model::topology::Topology;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    /// The whole line, and the exit code's class.
    #[track_caller]
    fn assert_line(failure: Failure, command: &str, expected: &str) {
        let line = format!("{failure}{}", failure.next_step(&words(command)));
        assert_eq!(line, expected);
        assert!(!line.contains('\n'), "{line}");
    }

    #[test]
    fn every_failure_says_what_to_do_next() {
        assert_line(
            Failure::Check("page 3 is lost".to_owned()),
            "/usr/bin/slat stress -v 4",
            "check failed: page 3 is lost; please report this with the command line: slat stress -v 4",
        );
        let claim = Failure::Claim("parallel-faults: populate".to_owned());
        assert!(claim.next_step(&words("/usr/bin/slat compare")).ends_with("if it is lost again: slat compare"));
        assert_line(
            Failure::Usage("--threads 0".to_owned()),
            "slat numa-split --threads 0",
            "--threads 0 (try `slat numa-split --help`)",
        );
        let write = |kind: ErrorKind| Failure::Write { path: "/a/b".into(), source: kind.into() };
        assert_line(
            write(ErrorKind::PermissionDenied),
            "slat aging",
            "cannot write /a/b: permission denied; name a place that you may write to",
        );
        for kind in [ErrorKind::NotFound, ErrorKind::AlreadyExists, ErrorKind::StorageFull, ErrorKind::Other] {
            assert!(write(kind).next_step(&[]).contains("name another"), "{kind:?}");
        }
        let no_thread = no_thread(&ErrorKind::WouldBlock.into());
        assert_line(
            no_thread,
            "slat",
            "this machine cannot do that: no thread: operation would block; choose fewer vCPUs, or raise `ulimit -u`",
        );
    }

    #[test]
    fn an_error_of_a_model_is_one_line() {
        let error = Topology::parse("t", "name = 't'\n[[node]]\ncpus = 3").unwrap_err();
        assert!(error.to_string().contains('\n'));
        let Failure::Usage(line) = Failure::from(error) else { panic!("not usage") };
        assert!(
            line.starts_with("topology t: TOML parse error at line 3") && line.contains("expected a string"),
            "{line}"
        );
        assert!(!line.contains(['\n', '|']), "{line}");
    }

    #[test]
    fn what_a_library_refuses_comes_with_the_option_that_changes_it() {
        let slots = MachineError::from(slat::error::SlotError::SlotTooHigh { slot: 40_000 });
        let Failure::Usage(line) = Failure::from(slots) else { panic!("not usage") };
        assert!(line.contains("slot 40000") && line.ends_with("; choose fewer slots"), "{line}");
        let missing: SourceSpec = "file:/no/such/file".parse().unwrap();
        let Failure::CannotServe(line) = Failure::from(missing.open().err().unwrap()) else { panic!("served") };
        assert!(line.contains("/no/such/file") && line.contains("--create-source"), "{line}");
    }
}
