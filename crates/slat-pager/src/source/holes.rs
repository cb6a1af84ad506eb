//! Which parts of a sparse file have data.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::PAGE_BYTES;

/// The parts of `range`, which are whole pages, that are no holes, as whole pages. On a file system
/// that knows of no holes: all. Only what the calls return counts: the file's position may be
/// shared.
pub(crate) fn data(file: impl AsFd, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut extents = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let start = match seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // No data from here on.
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL | Errno::OPNOTSUPP) => at,
            Err(error) => return Err(error.into()),
        };
        if start >= range.end {
            break;
        }
        let end = match seek(&file, SeekFrom::Hole(start)) {
            Ok(end) if end > start => end,
            Ok(_) | Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => range.end,
            Err(error) => return Err(error.into()),
        };
        // What the calls return may be any byte of a page.
        let whole = start / PAGE_BYTES * PAGE_BYTES..end.next_multiple_of(PAGE_BYTES).min(range.end);
        at = whole.end;
        extents.push(whole);
    }
    Ok(extents)
}
