//! The bitmap of a monitor that says at which pages of its memory a vCPU leaves the guest.
//!
//! Where a vCPU uses a file of the monitor (a guest_memfd) and not the monitor's mapping of it, the
//! userfaultfd hears nothing of the vCPU's accesses. The page is filled through the mapping all the
//! same (`UFFDIO_COPY`); then its bit is cleared.
//!
//! # Guarantees
//! - A bit is cleared after the page has its contents, and not before.
//! - The bitmap cannot be cut, and takes memory of the kernel's own tmpfs alone: a word of it is there
//!   as long as this process runs.
//!
//! # Interfaces
//! `KVM_MEM_USERFAULT` of Firecracker's kernels: bit n of the bitmap is of the page at n times 4096 of
//! the file.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use thiserror::Error;

use super::regions::Regions;
use crate::linux::mapping::MappedMemory;
use crate::source::PAGE_BYTES;

/// What fstatfs(2) says of a memfd.
const TMPFS: i64 = 0x0102_1994;

/// Why a descriptor is not that of a bitmap for a guest's memory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum UserfaultBitmapError {
    #[error("memory with a bitmap for vCPUs has pages of {page_bytes} bytes; those of {PAGE_BYTES} are possible")]
    PageSize { page_bytes: u64 },
    #[error("the bitmap has {size_bytes} bytes; {nr_pages} pages take more")]
    Short { size_bytes: u64, nr_pages: u64 },
    #[error("the bitmap is no memfd that is sealed against cutting (F_SEAL_SHRINK)")]
    Unsealed,
    #[error("cannot {what}: {error}")]
    System { what: &'static str, error: Errno },
}

/// See the [module](self).
#[derive(Debug)]
pub struct UserfaultBitmap(MappedMemory);

impl UserfaultBitmap {
    /// Takes what a monitor sends, and does not believe it.
    ///
    /// # Errors
    /// [`UserfaultBitmapError`].
    pub fn new(bitmap: OwnedFd, regions: &Regions) -> Result<UserfaultBitmap, UserfaultBitmapError> {
        let other_pages = regions.all().iter().find(|placed| placed.region.is_hugetlb());
        if let Some(placed) = other_pages {
            return Err(UserfaultBitmapError::PageSize { page_bytes: placed.region.page_bytes });
        }
        let look = |error| UserfaultBitmapError::System { what: "look at the bitmap", error };
        // First of all: of a file that has them the kernel answers all else without another process.
        let seals = rustix::fs::fcntl_get_seals(&bitmap).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) || rustix::fs::fstatfs(&bitmap).map_err(look)?.f_type as i64 != TMPFS {
            return Err(UserfaultBitmapError::Unsealed);
        }
        let size_bytes = rustix::fs::fstat(&bitmap).map_err(look)?.st_size as u64;
        let end = regions.all().iter().map(|placed| placed.region.offsets().end).max().unwrap_or(0);
        let nr_pages = end / PAGE_BYTES;
        if size_bytes < nr_pages.div_ceil(8) {
            return Err(UserfaultBitmapError::Short { size_bytes, nr_pages });
        }
        // The last page of the file may be used to its end.
        let mapped_bytes = nr_pages.div_ceil(8).next_multiple_of(PAGE_BYTES);
        let mapped =
            MappedMemory::of_file(bitmap.as_fd(), 0, mapped_bytes).map_err(|error| UserfaultBitmapError::System {
                what: "map the bitmap",
                error: Errno::from_io_error(&error).unwrap_or(Errno::IO),
            })?;
        Ok(UserfaultBitmap(mapped))
    }

    /// Whether a vCPU that touches the page at `offset` leaves the guest.
    pub fn faults(&self, offset: u64) -> bool {
        let page = offset / PAGE_BYTES;
        // Acquire: pairs with `allow`.
        self.0.word(page / 64 * 8).is_some_and(|word| word.load(Ordering::Acquire) & 1 << (page % 64) != 0)
    }

    /// Lets vCPUs use the pages of `offsets`, which have their contents.
    pub(super) fn allow(&self, offsets: Range<u64>) {
        for (word, mask) in super::pages::masks(offsets.start / PAGE_BYTES..offsets.end.div_ceil(PAGE_BYTES)) {
            if let Some(word) = self.0.word(word as u64 * 8) {
                // Release: a vCPU that finds the bit clear finds the contents.
                word.fetch_and(!mask, Ordering::Release);
            }
        }
    }
}
