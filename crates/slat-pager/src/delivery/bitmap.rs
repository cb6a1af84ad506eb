//! The userfault bitmap in a memory file, so that a resolver in another process clears the bits
//! that the engine reads.
//!
//! # Protocol
//! - One bit a page, 1 = not there yet. The side that has filled a page clears its bit with
//!   release; a reader that finds it clear with acquire observes the whole page. Two processes
//!   share the same memory, so this holds between them as between threads.
//! - The file cannot change its size: the engine's next read of a shorter one would kill the VMM.
//! - The other side may set and clear any bit. A bit that it clears too early shows the guest a
//!   page that is not filled, like any other wrong contents; a bit that it sets makes the guest
//!   ask.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::source::PAGE_BYTES as PAGE_SIZE;

use super::error::{AttachError, DeliveryConfigError};
use super::shared;
use crate::linux::descriptors::sealed_file;
use crate::linux::mapping::MappedMemory;

/// Its name in errors.
const WHAT: &str = "userfault bitmap";

/// One bit for each page, in shared memory. Bit n % 64 of word n / 64 is page n; 1 = the page is
/// not there.
#[derive(Debug)]
pub struct SharedBitmap {
    file: OwnedFd,
    mapping: MappedMemory,
    nr_pages: u64,
}

impl SharedBitmap {
    /// Makes a bitmap, all bits 0.
    ///
    /// # Errors
    /// [`DeliveryConfigError::BadBitmap`] and [`DeliveryConfigError::System`].
    pub fn new(nr_pages: u64) -> Result<SharedBitmap, DeliveryConfigError> {
        let failed = |call| move |source| DeliveryConfigError::System { call, source };
        let size_bytes = file_bytes(nr_pages).ok_or(DeliveryConfigError::BadBitmap { nr_pages })?;
        let file = sealed_file(c"slat-userfault-bitmap", size_bytes).map_err(failed("memfd_create"))?;
        SharedBitmap::map(file, nr_pages).map_err(failed("mmap"))
    }

    /// Maps the bitmap of `nr_pages` pages that another process has made.
    ///
    /// # Errors
    /// [`AttachError`]: `BadNumbers`, `NotSealed`, `WrongSize` and `System`.
    pub fn from_fd(file: OwnedFd, nr_pages: u64) -> Result<SharedBitmap, AttachError> {
        let failed = |call| move |source| AttachError::System { call, source };
        file_bytes(nr_pages).ok_or(AttachError::BadNumbers { what: "pages of the userfault bitmap" })?;
        if !shared::is_size_fixed(file.as_fd()) {
            return Err(AttachError::NotSealed { what: WHAT });
        }
        let (expected_bytes, found_bytes) =
            (word_bytes(nr_pages), shared::file_size(file.as_fd()).map_err(failed("fstat"))?);
        if found_bytes < expected_bytes {
            return Err(AttachError::WrongSize { what: WHAT, expected_bytes, found_bytes });
        }
        SharedBitmap::map(file, nr_pages).map_err(failed("mmap"))
    }

    fn map(file: OwnedFd, nr_pages: u64) -> io::Result<SharedBitmap> {
        let mapping = MappedMemory::of_file(file.as_fd(), 0, word_bytes(nr_pages))?;
        Ok(SharedBitmap { file, mapping, nr_pages })
    }

    /// The file, to be passed to a resolver.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Pages that have a bit.
    pub fn nr_pages(&self) -> u64 {
        self.nr_pages
    }

    /// All words; bits beyond the last page have no meaning.
    pub fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    /// The word and the bit of a page; `None` beyond the end.
    fn place(&self, page: u64) -> Option<(&AtomicU64, u64)> {
        // Cannot truncate: below the number of pages, whose words are mapped.
        (page < self.nr_pages).then(|| (&self.words()[(page / 64) as usize], 1 << (page % 64)))
    }

    /// Whether the page is not there yet. Pages beyond the end are never missing.
    pub fn is_set(&self, page: u64) -> bool {
        // Acquire: a caller that finds the bit clear reads the page next, and observes it as it was
        // when the bit was cleared.
        self.place(page).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    /// Marks the page as missing. Returns whether it was not before.
    pub fn set(&self, page: u64) -> bool {
        // Release: what the caller did to the page before (such as discarding it) comes before the
        // bit. Acquire: it comes after what the side that cleared the bit wrote to the page.
        self.place(page).is_some_and(|(word, bit)| word.fetch_or(bit, Ordering::AcqRel) & bit == 0)
    }

    /// Marks all pages as missing.
    pub fn set_all(&self) {
        for (index, word) in self.words().iter().enumerate() {
            let nr_bits = (self.nr_pages - index as u64 * 64).min(64);
            word.fetch_or(u64::MAX >> (64 - nr_bits), Ordering::AcqRel);
        }
    }

    /// Marks the page, which the caller has filled, as there. Returns whether it was missing.
    pub fn clear(&self, page: u64) -> bool {
        // Release: the page's contents come before the bit, for every reader that finds it clear.
        self.place(page).is_some_and(|(word, bit)| word.fetch_and(!bit, Ordering::Release) & bit != 0)
    }

    /// Pages that are missing. Exact only while no thread sets or clears bits.
    pub fn count(&self) -> u64 {
        let mut count = 0;
        for (index, word) in self.words().iter().enumerate() {
            let nr_bits = (self.nr_pages - index as u64 * 64).min(64);
            // Relaxed: only a number; no caller reads pages because of it.
            count += u64::from((word.load(Ordering::Relaxed) & (u64::MAX >> (64 - nr_bits))).count_ones());
        }
        count
    }
}

/// The bytes of all words.
fn word_bytes(nr_pages: u64) -> u64 {
    nr_pages.div_ceil(64) * 8
}

/// The size of a file for so many pages: whole pages, since it is mapped. `None` if no file has
/// that many bits.
fn file_bytes(nr_pages: u64) -> Option<u64> {
    // 2^48 pages are more than any guest has; their bits still fit into a file.
    (1..=1 << 48).contains(&nr_pages).then(|| word_bytes(nr_pages).next_multiple_of(PAGE_SIZE))
}
