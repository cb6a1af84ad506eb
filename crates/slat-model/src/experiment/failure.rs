//! Why an experiment ended early, as its main task returns it.

use slat_costed::Error;
use slat_costed::error::FaultError;

use crate::error::ModelError;

/// Why an experiment ended early.
#[derive(Clone, Debug)]
pub(super) enum Failure {
    /// The engine refused something.
    Engine(Error),
    /// An oracle found something wrong.
    Check(String),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Engine(error)
    }
}

impl From<FaultError> for Failure {
    fn from(error: FaultError) -> Failure {
        Failure::Engine(error.into())
    }
}

impl From<Failure> for ModelError {
    fn from(failure: Failure) -> ModelError {
        match failure {
            Failure::Engine(error) => ModelError::Engine(error),
            Failure::Check(what) => ModelError::Check(what),
        }
    }
}
