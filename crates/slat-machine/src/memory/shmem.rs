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
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Backing, BackingKind, Memory, MemoryError, map_aligned, unmap};
use crate::descriptors::memory_file;

const WORD_BYTES: usize = size_of::<u64>();

/// Makes an empty file of `size_bytes` in memory, without a name.
pub(super) fn create_file(size_bytes: u64) -> Result<OwnedFd, MemoryError> {
    memory_file(c"slat-guest-memory", size_bytes).map_err(|source| MemoryError::System {
        call: "memfd_create or ftruncate",
        kind: BackingKind::Shmem,
        size_bytes,
        source,
    })
}

/// Maps the first `size_bytes` of `file`, which is long enough, shared.
pub(super) fn map_file(file: &OwnedFd, size_bytes: u64) -> Result<*mut u8, MemoryError> {
    let place = map_aligned(BackingKind::Shmem, size_bytes, libc::PROT_NONE, libc::MAP_NORESERVE)?;
    // SAFETY: replaces exactly the mapping made by the line above, which is not used yet.
    let start = unsafe {
        libc::mmap(
            place.cast(),
            size_bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED,
            file.as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        // The range stays reserved for ever: after a failure it is not known whether it may be
        // unmapped.
        return Err(failed("mmap", size_bytes));
    }
    Ok(start.cast())
}

/// # Safety
/// `size_bytes` from `start` on are a mapping of this process.
unsafe fn without_huge_pages(start: *mut u8, size_bytes: u64) {
    // A kernel without transparent huge pages, or with none for this mapping, refuses, and needs no
    // advice.
    // SAFETY: the caller's promise; the advice changes no contents.
    unsafe { libc::madvise(start.cast(), size_bytes as usize, libc::MADV_NOHUGEPAGE) };
}

fn failed(call: &'static str, size_bytes: u64) -> MemoryError {
    MemoryError::System { call, kind: BackingKind::Shmem, size_bytes, source: io::Error::last_os_error() }
}

impl Backing {
    /// The file, if the memory is one ([`BackingKind::Shmem`]): another process may map it too.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        match &self.0 {
            Memory::Fixed(mapping) => mapping.file.as_ref().map(AsFd::as_fd),
            Memory::Movable(_) | Memory::GuestMemfd(_) => None,
        }
    }

    /// A second mapping of the same file. It takes no memory of its own.
    ///
    /// # Errors
    /// [`MemoryError::NotShared`], and `System` if the kernel refuses.
    pub fn alias(&self) -> Result<Alias, MemoryError> {
        let Memory::Fixed(mapping) = &self.0 else { return Err(MemoryError::NotShared { kind: self.kind() }) };
        let Some(file) = &mapping.file else { return Err(MemoryError::NotShared { kind: mapping.kind }) };
        let start = map_file(file, mapping.size_bytes)?;
        let alias = Alias { start, size_bytes: mapping.size_bytes };
        // A huge page made by a write to the alias would add unwritten pages to the file.
        // SAFETY: the whole mapping is ours.
        unsafe { without_huge_pages(start, mapping.size_bytes) };
        Ok(alias)
    }

    /// No page of it becomes a transparent huge page from now on. Huge pages stay huge.
    pub(crate) fn without_huge_pages(&self) {
        let (start, size_bytes) = self.frames();
        // SAFETY: the mapping lives as long as `self`.
        unsafe { without_huge_pages(start, size_bytes) };
    }

    /// Whether a userfaultfd abandoned the memory before all of it was filled. Pages of it may be
    /// zeros that were not sent, so none is resolved or read any more, until all of it is
    /// [discarded](Backing::discard).
    #[inline]
    pub fn is_lost(&self) -> bool {
        match &self.0 {
            Memory::Fixed(mapping) => mapping.is_lost(),
            Memory::Movable(_) | Memory::GuestMemfd(_) => false,
        }
    }

    /// Sets or clears the mark of [`is_lost`](Backing::is_lost). It must be set before the kernel
    /// releases any thread.
    pub(crate) fn set_lost(&self, lost: bool) {
        if let Memory::Fixed(mapping) = &self.0 {
            // Release: paired with the fence of `Mapping::is_lost`, by way of the kernel's wake-up
            // in between.
            mapping.lost.store(lost, Ordering::Release);
        }
    }
}

/// A second mapping of memory that is a file. Dropping it leaves the memory as it is.
#[derive(Debug)]
pub struct Alias {
    start: *mut u8,
    size_bytes: u64,
}

// SAFETY: the pointer is only an address; the shared memory behind it is accessed atomically here.
unsafe impl Send for Alias {}
// SAFETY: as above.
unsafe impl Sync for Alias {}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this start and size, and the last user is gone.
        unsafe { unmap(self.start, self.size_bytes) }
    }
}

impl Alias {
    /// The first byte. Guests change the memory at any time: access it atomically, or while nothing
    /// runs.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The size in bytes, that of the memory.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Writes `bytes` at `offset_bytes`, whatever was there: a second fill of a page overwrites
    /// what a guest has written since. `None`, and nothing is written, if they do not fit or are
    /// not whole words of 8 bytes.
    pub fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Option<()> {
        let end = offset_bytes.checked_add(bytes.len() as u64)?;
        if end > self.size_bytes || !(offset_bytes | end).is_multiple_of(WORD_BYTES as u64) {
            return None;
        }
        let first = self.start.wrapping_add(offset_bytes as usize).cast::<u64>();
        for (nr, word) in bytes.as_chunks::<WORD_BYTES>().0.iter().enumerate() {
            // SAFETY: inside the mapping, which lives as long as `self`, and aligned; others access
            // it atomically or by machine instructions.
            let at = unsafe { AtomicU64::from_ptr(first.wrapping_add(nr)) };
            // Relaxed: the kernel's mapping of the page publishes it.
            at.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        Some(())
    }

    /// Allocates all pages of the file, zeros where there were none, and maps them here: a guest's
    /// access then finds each page in the file, and no write to the alias faults.
    ///
    /// # Errors
    /// [`MemoryError::System`]: some pages may have been allocated.
    pub fn populate(&self) -> Result<(), MemoryError> {
        // SAFETY: the range is the mapping, which lives as long as `self`; contents stay as they
        // are.
        match unsafe { libc::madvise(self.start.cast(), self.size_bytes as usize, libc::MADV_POPULATE_WRITE) } {
            0 => Ok(()),
            _ => Err(failed("madvise(MADV_POPULATE_WRITE)", self.size_bytes)),
        }
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
        for (offset_bytes, len) in [(3 * PAGE_SIZE, 8), (3 * PAGE_SIZE - 8, 16), (4, 8), (0, 4), (u64::MAX - 7, 8)] {
            assert_eq!(alias.write(offset_bytes, &page[..len]), None, "{offset_bytes}, {len}");
        }
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
