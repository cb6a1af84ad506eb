//! Why the command failed, and the exit code for it.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use slat_machine::demand_paging::{DemandPagingError, ServeError, VcpuError};
use slat_machine::machine::MachineError;
use slat_machine::source::SourceError;
use thiserror::Error;

use crate::session::INTERRUPTED;

/// A failure of the command, as one line.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// What the guest, the tables or the log showed is wrong.
    #[error("check failed: {0}")]
    Check(String),
    /// No machine could do what was asked for.
    #[error("{0}")]
    Usage(String),
    /// This machine cannot do what was asked for.
    #[error("this machine cannot do that: {0}")]
    CannotServe(String),
    /// The results could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Nobody takes what is printed.
    #[error("cannot print: {0}")]
    Print(#[from] std::io::Error),
    /// The user ended it.
    #[error("interrupted{}", if *measured { ": what is above was measured until then" } else { " before anything was measured" })]
    Interrupted {
        /// Whether there is something.
        measured: bool,
    },
}

impl Failure {
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Check(_) => 1,
            Failure::Usage(_) => 2,
            Failure::CannotServe(_) | Failure::Write { .. } | Failure::Print(_) => 3,
            Failure::Interrupted { .. } => INTERRUPTED,
        })
    }
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

impl From<MachineError> for Failure {
    fn from(error: MachineError) -> Failure {
        let line = with_causes(&error);
        match &error {
            MachineError::Config(_) | MachineError::Program(_) | MachineError::NoOtherNode => Failure::Usage(line),
            MachineError::Engine(slat::Error::SlotTooHigh { .. } | slat::Error::BadRingSize { .. }) => {
                Failure::Usage(line)
            }
            MachineError::Memory(memory) if memory.is_bad_usage() => Failure::Usage(line),
            MachineError::Numa(numa) if numa.is_bad_usage() => Failure::Usage(line),
            MachineError::Guest { .. } | MachineError::Panicked { .. } => Failure::Check(line),
            _ => Failure::CannotServe(line),
        }
    }
}

impl From<slat::Error> for Failure {
    fn from(error: slat::Error) -> Failure {
        Failure::from(MachineError::from(error))
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Failure {
        let line = with_causes(&error);
        match error {
            // The options name a file that does not go with the memory that they name.
            SourceError::FileTooShort { .. } | SourceError::NotLoopback { .. } => Failure::Usage(line),
            _ => Failure::CannotServe(line),
        }
    }
}

impl From<DemandPagingError> for Failure {
    fn from(error: DemandPagingError) -> Failure {
        let line = with_causes(&error);
        match &error {
            error if error.is_bad_usage() => Failure::Usage(line),
            DemandPagingError::WrongWord { .. }
            | DemandPagingError::FilledTwice { .. }
            | DemandPagingError::MissedWrite { .. }
            | DemandPagingError::FalseReport { .. } => Failure::Check(line),
            DemandPagingError::Vcpus { errors } => paging_failed(errors.iter().map(|(_, error)| error), line),
            DemandPagingError::Background { error, .. } => paging_failed(std::iter::once(error), line),
            _ => Failure::CannotServe(line),
        }
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Failure {
        match error {
            ServeError::Source(error) => error.into(),
            error => Failure::CannotServe(with_causes(&error)),
        }
    }
}

/// Pages that did not get to a vCPU: a page that is wrong is more than one that nobody has.
fn paging_failed<'a>(errors: impl Iterator<Item = &'a VcpuError> + Clone, line: String) -> Failure {
    let is_wrong = |error: &VcpuError| matches!(error, VcpuError::WrongWord { .. } | VcpuError::Panicked { .. });
    let is_usage = |error: &VcpuError| match error {
        VcpuError::Source(error) => matches!(**error, SourceError::FileTooShort { .. }),
        _ => false,
    };
    if errors.clone().any(is_wrong) {
        Failure::Check(line)
    } else if errors.clone().any(is_usage) {
        Failure::Usage(line)
    } else {
        Failure::CannotServe(line)
    }
}

/// A check that failed.
pub(crate) fn check_failed(what: impl fmt::Display) -> Failure {
    Failure::Check(what.to_string())
}
