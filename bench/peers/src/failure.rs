//! Failures of the benchmark, as one line each.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::process::ExitCode;

use thiserror::Error;

#[derive(Debug, Error)]
pub(crate) enum Failure {
    /// The tables showed a wrong result.
    #[error("check failed: {0}; please report this with the command line")]
    Check(String),
    /// slat lost a comparison that it claims to win.
    #[error("claim lost: {0}; other work on the machine can cause that: repeat it on an idle machine")]
    Claim(String),
    #[error("this machine cannot do that: {0}")]
    CannotServe(String),
    #[error("cannot write {}: {source}; name another place", to.display())]
    Write { to: PathBuf, source: std::io::Error },
    #[error("cannot print: {0}; write it to another place")]
    Print(std::io::Error),
}

impl Failure {
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Failure::Check(_) | Failure::Claim(_) => 1,
            Failure::CannotServe(_) | Failure::Write { .. } | Failure::Print(_) => 3,
        })
    }

    /// Whether no reader of the output is left.
    pub(crate) fn is_closed_pipe(&self) -> bool {
        matches!(self, Failure::Print(source) | Failure::Write { source, .. } if source.kind() == ErrorKind::BrokenPipe)
    }
}

impl From<slat::Error> for Failure {
    fn from(error: slat::Error) -> Failure {
        Failure::CannotServe(format!("{error}; choose fewer pages or threads"))
    }
}
