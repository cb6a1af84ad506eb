//! What can go wrong.

use std::io;

use thiserror::Error;

/// Why nothing could be measured.
#[derive(Debug, Error)]
pub(crate) enum Wrong {
    /// This is an ordinary machine, whose modules are not this program's.
    #[error("it is for the first process of an emulated machine")]
    NotFirst,
    /// Linux refused something.
    #[error("cannot {what}: {error}")]
    System {
        /// What was wanted.
        what: &'static str,
        /// Its answer.
        error: io::Error,
    },
    /// KVM does not run the guest.
    #[error("KVM does not run the guest: {0}")]
    Entry(io::Error),
    /// The guest did something else than to write its pages.
    #[error("the guest was stopped: {0}")]
    Guest(String),
    /// The log does not have what the guest wrote.
    #[error("the guest has written all pages, and the dirty log has others")]
    Log,
    /// The counter does not count instructions.
    #[error("{expected} instructions of {of} counted as {found}")]
    Clock {
        /// Whose.
        of: &'static str,
        /// As many as there are.
        expected: u64,
        /// As the counter has it.
        found: u64,
    },
}

impl Wrong {
    /// Linux refused `what`.
    pub(crate) fn system(what: &'static str, error: impl Into<io::Error>) -> Wrong {
        Wrong::System { what, error: error.into() }
    }
}

/// `result`, with the operation in the error.
pub(crate) fn tried<T>(what: &'static str, result: Result<T, kvm_ioctls::Error>) -> Result<T, Wrong> {
    result.map_err(|error| Wrong::system(what, io::Error::from_raw_os_error(error.errno())))
}
