//! Memory that is a file, and what its file allows beside.
//!
//! A file can be mapped twice. Through the second mapping ([`Alias`]) a page is filled before the
//! guest can see it. The guest's mapping has no PTE for it yet, so the guest's next access faults,
//! and the thread that serves that fault finds the page in the file (userfaultfd's minor fault). A
//! write to the alias causes no fault in the guest's mapping.
//!
//! And the mark of *lost* memory, of either kind, which a userfaultfd may leave behind
//! ([`Backing::is_lost`]).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::mm::Advice;

use super::{Backing, BackingKind, Memory, MemoryError, alignment};
use crate::linux::descriptors::memory_file;
use crate::linux::mapping::MappedMemory;

fn failed(call: &'static str, size_bytes: u64) -> impl FnOnce(io::Error) -> MemoryError {
    move |source| MemoryError::System { call, kind: BackingKind::Shmem, size_bytes, source }
}

/// Makes an empty file of `size_bytes` in memory, without a name.
pub(super) fn create_file(size_bytes: u64) -> Result<OwnedFd, MemoryError> {
    memory_file(c"slat-guest-memory", size_bytes).map_err(failed("memfd_create or ftruncate", size_bytes))
}

/// Maps the first `size_bytes` of `file`, which is long enough, shared.
pub(super) fn map_file(file: BorrowedFd<'_>, size_bytes: u64) -> Result<MappedMemory, MemoryError> {
    MappedMemory::of_file_aligned(file, size_bytes, alignment(size_bytes)).map_err(failed("mmap", size_bytes))
}

impl Backing {
    /// The file, if the memory is one ([`BackingKind::Shmem`]): another process may map it too.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Memory::Fixed(memory) => memory.file.as_ref().map(AsFd::as_fd),
            Memory::Movable(_) | Memory::GuestMemfd(_) => None,
        }
    }

    /// A second mapping of the same file. It takes no memory of its own.
    ///
    /// # Errors
    /// [`MemoryError::NotShared`], and `System` if the kernel refuses.
    pub fn alias(&self) -> Result<Alias, MemoryError> {
        let file = self.file().ok_or(MemoryError::NotShared { kind: self.kind() })?;
        let mapping = map_file(file, self.size_bytes())?;
        // A huge page made by a write to the alias would add unwritten pages to the file.
        mapping.without_huge_pages();
        Ok(Alias(mapping))
    }

    /// Whether a userfaultfd abandoned the memory before all of it was filled. Pages of it may be
    /// zeros that were not sent, so none is resolved or read any more.
    #[inline]
    pub fn is_lost(&self) -> bool {
        match &self.0 {
            Memory::Fixed(memory) => memory.is_lost(),
            Memory::Movable(_) | Memory::GuestMemfd(_) => false,
        }
    }

    /// Sets the mark of [`is_lost`](Backing::is_lost), before the kernel releases any thread.
    pub(crate) fn mark_lost(&self) {
        if let Memory::Fixed(memory) = &self.0 {
            // Release: paired with the fence of `FixedMemory::is_lost`, by way of the kernel's
            // wake-up in between.
            memory.lost.store(true, Ordering::Release);
        }
    }
}

/// A second mapping of memory that is a file. Dropping it leaves the memory as it is.
#[derive(Debug)]
pub struct Alias(MappedMemory);

impl Alias {
    /// The size in bytes, that of the memory.
    pub fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    /// Writes `bytes` at `offset_bytes`, whatever was there: a second fill of a page overwrites
    /// what a guest has written since. `None`, and nothing is written, if they do not fit or are
    /// not whole words of 8 bytes.
    pub fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Option<()> {
        // The kernel's mapping of the page publishes it.
        self.0.write(offset_bytes, bytes)
    }

    /// Allocates all pages of the file, zeros where there were none, and maps them here: a guest's
    /// access then finds each page in the file, and no write to the alias faults.
    ///
    /// # Errors
    /// [`MemoryError::System`]: some pages may have been allocated.
    pub fn populate(&self) -> Result<(), MemoryError> {
        let size_bytes = self.size_bytes();
        self.0
            .advise(0..size_bytes, Advice::LinuxPopulateWrite)
            .map_err(failed("madvise(MADV_POPULATE_WRITE)", size_bytes))
    }
}

#[cfg(test)]
mod tests {
    use slat::PAGE_SIZE;

    use super::*;

    #[test]
    fn both_mappings_are_the_same_memory() {
        let memory = Backing::new(BackingKind::Shmem, 3 * PAGE_SIZE).unwrap();
        memory.store(PAGE_SIZE, 5).unwrap();
        let alias = memory.alias().unwrap();
        alias.populate().unwrap();
        assert_eq!(memory.load(PAGE_SIZE), Some(5), "populating changes nothing");
        assert_eq!(alias.size_bytes(), memory.size_bytes());
        let page: Vec<u8> = (0..PAGE_SIZE).map(|nr| nr as u8).collect();
        alias.write(2 * PAGE_SIZE, &page).unwrap();
        alias.write(8, &[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!((memory.load(0), memory.load(8), memory.load(16)), (Some(0), Some(1), Some(0)));
        for word in 0..PAGE_SIZE / 8 {
            let at = (8 * word) as usize;
            let expected = u64::from_ne_bytes(page[at..at + 8].try_into().unwrap());
            assert_eq!(memory.load(2 * PAGE_SIZE + 8 * word), Some(expected), "word {word}");
        }
        drop(memory);
        alias.write(0, &page).expect("still mapped");
        assert!(alias.write(0, &[]).is_some());
    }

    #[test]
    fn private_memory_has_no_alias() {
        for memory in [
            Backing::new(BackingKind::Anonymous, PAGE_SIZE).unwrap(),
            Backing::with_movable_pages(PAGE_SIZE, 1).unwrap(),
        ] {
            assert!(memory.file().is_none());
            let error = memory.alias().expect_err("no file");
            assert!(matches!(error, MemoryError::NotShared { .. }) && error.is_bad_usage(), "{error}");
        }
        assert!(Backing::new(BackingKind::Shmem, PAGE_SIZE).unwrap().file().is_some());
    }
}
