//! What goes wrong, and how it is reported.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::content::Difference;
use crate::hypercall::{Hypercall, Hypercalls};
use crate::options::OptionError;

/// Why the program fails.
#[derive(Debug, Error)]
pub(crate) enum Wrong {
    /// Memory has another content than was written.
    #[error("{phase}: page {page} at {address:#x}: {difference}")]
    Memory { phase: &'static str, address: u64, page: u64, difference: Difference },
    /// A file has another content than was written.
    #[error("files: page {page} of {}: {difference}", path.display())]
    File { path: PathBuf, page: u64, difference: Difference },
    /// A file has another size than was written.
    #[error("files: {} has {found} bytes, not {expected}", path.display())]
    FileSize { path: PathBuf, expected: u64, found: u64 },
    /// A worker ended; it has said why, if it could.
    #[error("the worker of CPU {cpu} {how}")]
    Worker { cpu: usize, how: String, reported: Reported },
    /// A child that a worker forked ended; it has said why, if it could.
    #[error("fork: a child {how}")]
    Child { how: String, reported: Reported },
    #[error(transparent)]
    Option(#[from] OptionError),
    #[error("{fill}% of {available} free bytes is not a page for each CPU; boot with more memory")]
    NoMemory { fill: u64, available: u64 },
    /// The machine has no hypervisor, or another one.
    #[error("no slat answers hypercalls here; boot with slat.hypercalls=off")]
    NoHypervisor,
    /// The kernel refused something.
    #[error("cannot {what}: {error}")]
    System { what: &'static str, error: io::Error },
}

/// Whether the hypervisor was told of a failure already, by the process that met it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reported {
    Yes,
    No,
}

impl Wrong {
    pub(crate) fn system(what: &'static str, error: impl Into<io::Error>) -> Wrong {
        Wrong::System { what, error: error.into() }
    }

    /// Tells the hypervisor, once for each failure.
    pub(crate) fn report(&self, hypercalls: Hypercalls) {
        let (address, page) = match self {
            Wrong::Worker { reported: Reported::Yes, .. } | Wrong::Child { reported: Reported::Yes, .. } => return,
            Wrong::Memory { address, page, difference, .. } => {
                (address + (difference.word * size_of::<u64>()) as u64, *page)
            }
            Wrong::File { page, .. } => (0, *page),
            _ => (0, 0),
        };
        hypercalls.make(Hypercall::Failed { address, page });
    }
}
