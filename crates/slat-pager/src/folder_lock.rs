//! A folder that one process uses at a time: a cache, a store that is packed into.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::source::SourceError;

/// How often a lock is tried, and what is waited between. A process that ends, and one that was forked and
/// has not run its program yet, hold it for a moment more.
const MOST_TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// Locks the folder (flock(2)) until the returned file is dropped, or the process ends.
///
/// # Errors
/// Another process has it; the folder cannot be opened.
pub(crate) fn lock_folder(folder: &Path) -> Result<File, SourceError> {
    let failed = |error: io::Error| SourceError::Io { what: format!("lock {}", folder.display()), error };
    let file = File::open(folder).map_err(failed)?;
    for _ in 0..MOST_TRIES {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(PAUSE),
            Err(error) => return Err(failed(error.into())),
        }
    }
    let server = folder.display().to_string();
    Err(SourceError::Unavailable { server, why: "another process uses this folder".to_string() })
}
