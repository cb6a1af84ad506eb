//! Guest memory that is a file of the monitor (a guest_memfd), with a bitmap that says at which of its
//! pages a vCPU leaves the guest.
//!
//! The kernel copies nothing into such memory for a userfaultfd: a page is written to the file, its
//! bit is cleared, and it is mapped (`UFFDIO_CONTINUE`). What is written counts as memory of the
//! pager's control group.
//!
//! # Guarantees
//! - A bit is cleared after the page has its contents, and not before.
//! - A page that the file has is not overwritten where the kernel refuses that (`EEXIST`), as it does
//!   for a guest_memfd.
//! - The bitmap cannot be cut, and takes memory of the kernel's own tmpfs alone: a word of it is there
//!   as long as this process runs.
//!
//! # Interfaces
//! pwrite(2) and fallocate(2) of a guest_memfd; `KVM_MEM_USERFAULT` of Firecracker's kernels: bit n of
//! the bitmap is of the page at n times 4096 of the file.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{FallocateFlags, FileType, SealFlags};
use rustix::io::Errno;
use thiserror::Error;

use super::regions::Regions;
use crate::linux::mapping::MappedMemory;
use crate::shared_memory::write_mapped;
use crate::source::{Mapped, PAGE_BYTES};
use crate::userfaultfd::Stopped;

/// What fstatfs(2) says of a memfd.
const TMPFS: i64 = 0x0102_1994;

/// Why descriptors are not those of a guest's memory.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum GuestMemfdError {
    #[error("memory of a guest_memfd has pages of {page_bytes} bytes; those of {PAGE_BYTES} are possible")]
    PageSize { page_bytes: u64 },
    #[error("the guest_memfd is no file of memory, but a {0:?}")]
    NoFile(FileType),
    #[error("the guest_memfd has {size_bytes} bytes; a region ends at {end}")]
    Short { size_bytes: u64, end: u64 },
    #[error("the bitmap has {size_bytes} bytes; {nr_pages} pages take more")]
    BitmapShort { size_bytes: u64, nr_pages: u64 },
    #[error("the bitmap is no memfd that is sealed against cutting (F_SEAL_SHRINK)")]
    BitmapUnsealed,
    #[error("cannot {what}: {error}")]
    System { what: &'static str, error: Errno },
}

/// See the [module](self).
#[derive(Debug)]
pub struct GuestMemfd {
    file: OwnedFd,
    bitmap: MappedMemory,
}

impl GuestMemfd {
    /// Takes what a monitor sends, and does not believe it.
    ///
    /// # Errors
    /// [`GuestMemfdError`].
    pub fn new(file: OwnedFd, bitmap: OwnedFd, regions: &Regions) -> Result<GuestMemfd, GuestMemfdError> {
        let system = |what| move |error| GuestMemfdError::System { what, error };
        let other_pages = regions.all().iter().find(|placed| placed.region.is_hugetlb());
        if let Some(placed) = other_pages {
            return Err(GuestMemfdError::PageSize { page_bytes: placed.region.page_bytes });
        }
        let end = regions.all().iter().map(|placed| placed.region.offsets().end).max().unwrap_or(0);
        let stat = rustix::fs::fstat(&file).map_err(system("look at the guest_memfd"))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        // A guest_memfd of older kernels has none.
        if !matches!(kind, FileType::RegularFile | FileType::Unknown) {
            return Err(GuestMemfdError::NoFile(kind));
        }
        let size_bytes = stat.st_size as u64;
        if size_bytes < end {
            return Err(GuestMemfdError::Short { size_bytes, end });
        }
        let look = system("look at the bitmap");
        let file_system = rustix::fs::fstatfs(&bitmap).map_err(look)?;
        let seals = rustix::fs::fcntl_get_seals(&bitmap).unwrap_or(SealFlags::empty());
        if file_system.f_type as i64 != TMPFS || !seals.contains(SealFlags::SHRINK) {
            return Err(GuestMemfdError::BitmapUnsealed);
        }
        let size_bytes = rustix::fs::fstat(&bitmap).map_err(look)?.st_size as u64;
        let nr_pages = end / PAGE_BYTES;
        if size_bytes < nr_pages.div_ceil(8) {
            return Err(GuestMemfdError::BitmapShort { size_bytes, nr_pages });
        }
        // The last page of the file may be used to its end.
        let mapped_bytes = nr_pages.div_ceil(8).next_multiple_of(PAGE_BYTES);
        let bitmap = MappedMemory::of_file(bitmap.as_fd(), 0, mapped_bytes)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
            .map_err(system("map the bitmap"))?;
        Ok(GuestMemfd { file, bitmap })
    }

    /// Whether a vCPU that touches the page at `offset` leaves the guest.
    pub fn faults(&self, offset: u64) -> bool {
        let page = offset / PAGE_BYTES;
        // Acquire: pairs with `allow`.
        self.bitmap.word(page / 64 * 8).is_some_and(|word| word.load(Ordering::Acquire) & 1 << (page % 64) != 0)
    }

    /// Lets vCPUs use the pages of `offsets`, which have their contents.
    pub(super) fn allow(&self, offsets: Range<u64>) {
        for (word, mask) in super::pages::masks(offsets.start / PAGE_BYTES..offsets.end.div_ceil(PAGE_BYTES)) {
            if let Some(word) = self.bitmap.word(word as u64 * 8) {
                // Release: a vCPU that finds the bit clear finds the contents.
                word.fetch_and(!mask, Ordering::Release);
            }
        }
    }

    /// Writes whole pages to `offset`.
    ///
    /// # Errors
    /// `EEXIST`: the first page that is not written is there. Others as of pwrite(2).
    pub(super) fn write(&self, offset: u64, bytes: Mapped<'_>) -> Result<(), Stopped> {
        let mut nr_written = 0;
        while nr_written < bytes.nr_bytes() {
            match write_mapped(self.file.as_fd(), bytes, nr_written, offset + nr_written as u64) {
                Ok(nr_bytes) if nr_bytes as u64 >= PAGE_BYTES => {
                    nr_written += nr_bytes - nr_bytes % PAGE_BYTES as usize
                }
                // A part of a page, or nothing: no call goes on from there.
                Ok(_) => return Err(stopped("pwrite", nr_written, Errno::FAULT)),
                Err(error) => {
                    return Err(stopped("pwrite", nr_written, Errno::from_io_error(&error).unwrap_or(Errno::IO)));
                }
            }
        }
        Ok(())
    }

    /// Gives those pages of `offsets` zeros that the file lacks.
    ///
    /// # Errors
    /// Of fallocate(2).
    pub(super) fn back(&self, offsets: Range<u64>) -> Result<(), Stopped> {
        let nr_bytes = offsets.end - offsets.start;
        rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, offsets.start, nr_bytes)
            .map_err(|error| stopped("fallocate", 0, error))
    }
}

fn stopped(call: &'static str, nr_bytes: usize, error: Errno) -> Stopped {
    let error = if error == Errno::NOSPC { Errno::NOMEM } else { error };
    Stopped { call, filled_bytes: nr_bytes as u64, error }
}
