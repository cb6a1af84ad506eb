//! Pages that are read from a file.
//!
//! A request starts the kernel's read-ahead, so that pages from a disk are read concurrently; for a
//! page that the kernel has already this costs a fifth of the read. The page is read when it is
//! taken, to its destination. The file is never mapped: a file that is cut short is an error, and
//! not a signal.

use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, OFlags, fadvise};

use super::in_flight::PagesInFlight;
use super::{NextArrival, PAGE_SIZE, PageBytes, PageSource, SourceError, Wait};

/// A file's pages.
#[derive(Debug)]
pub(super) struct FileSource {
    file: File,
    path: PathBuf,
    in_flight: PagesInFlight,
    /// The page that was taken last.
    page: Box<PageBytes>,
}

impl FileSource {
    pub(super) fn open(path: &Path) -> Result<FileSource, SourceError> {
        let open = || {
            // Opening a pipe would wait for a writer; for a file the flag has no meaning.
            let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
            // A directory can be opened as well, and would fail at the first read.
            let kind = file.metadata()?.file_type();
            if kind.is_file() { Ok(file) } else { Err(io::Error::from(io::ErrorKind::InvalidInput)) }
        };
        let file = open().map_err(|cause| SourceError::OpenFile { path: path.to_owned(), cause })?;
        let page = Box::new([0; PAGE_SIZE]);
        Ok(FileSource { file, path: path.to_owned(), in_flight: PagesInFlight::new(), page })
    }
}

impl PageSource for FileSource {
    fn request(&mut self, page: u64) -> Result<(), SourceError> {
        self.in_flight.push(page)?;
        // The result does not matter: it is only advice.
        let size_bytes = NonZeroU64::new(PAGE_SIZE as u64);
        let _ = fadvise(&self.file, page * PAGE_SIZE as u64, size_bytes, Advice::WillNeed);
        Ok(())
    }

    fn arrived(&mut self, _wait: Wait) -> Result<Option<u64>, SourceError> {
        Ok(self.in_flight.first())
    }

    fn take(&mut self) -> Result<&PageBytes, SourceError> {
        let page = self.in_flight.take()?;
        read_page(&self.file, &self.path, page, &mut self.page)?;
        Ok(&self.page)
    }

    fn take_into(&mut self, into: &mut PageBytes) -> Result<(), SourceError> {
        let page = self.in_flight.take()?;
        read_page(&self.file, &self.path, page, into)
    }

    fn nr_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    fn next_arrival(&self) -> NextArrival<'_> {
        self.in_flight.next_arrival()
    }
}

fn read_page(file: &File, path: &Path, page: u64, into: &mut PageBytes) -> Result<(), SourceError> {
    let offset_bytes = page * PAGE_SIZE as u64;
    file.read_exact_at(into, offset_bytes).map_err(|cause| {
        let path = path.to_owned();
        if cause.kind() == io::ErrorKind::UnexpectedEof {
            let size_bytes = file.metadata().map_or(0, |metadata| metadata.len());
            SourceError::FileTooShort { path, page, offset_bytes, size_bytes }
        } else {
            SourceError::ReadFile { path, page, offset_bytes, cause }
        }
    })
}
