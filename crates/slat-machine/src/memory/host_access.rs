//! The host's own accesses to guest memory: it reads and writes words, and discards pages.
//!
//! Words are accessed atomically, because guests change them at any time. A discarded page loses
//! its frame and reads as zero when it is touched next. The pointer, which is the frame for the
//! machine, stays the same. So the machine's memory is safe in any case; but a guest that still has
//! the page mapped writes into the new frame. Discard only pages that the engine has invalidated
//! ([`Vm::invalidate_range`](slat::Vm::invalidate_range)).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::PAGE_SIZE;
use thiserror::Error;

use super::{Backing, BackingKind};

/// Why pages could not be discarded: none was.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DiscardError {
    /// The bytes are not in the memory.
    #[error("cannot discard {len_bytes} bytes at {offset_bytes}: there are {size_bytes}")]
    OutOfRange {
        /// The first byte.
        offset_bytes: u64,
        /// The number of bytes.
        len_bytes: u64,
        /// The size of the memory.
        size_bytes: u64,
    },
    /// Only the guest can access the memory.
    #[error("cannot discard {len_bytes} bytes at {offset_bytes}: the memory has no mapping")]
    NoMapping {
        /// The first byte.
        offset_bytes: u64,
        /// The number of bytes.
        len_bytes: u64,
    },
    /// Not whole pages of the memory's kind.
    #[error("cannot discard {len_bytes} bytes at {offset_bytes}: {kind} memory has pages of {}", kind.page_size().size_bytes())]
    Unaligned {
        /// The first byte.
        offset_bytes: u64,
        /// The number of bytes.
        len_bytes: u64,
        /// The kind of the memory.
        kind: BackingKind,
    },
    /// The contents of private memory are in no file.
    #[error("{kind} memory cannot lose its mapping and keep its contents; shmem can")]
    NotShared {
        /// The kind of the memory.
        kind: BackingKind,
    },
    /// The kernel refused.
    #[error("discarding {len_bytes} bytes of {kind} memory at {offset_bytes} failed")]
    System {
        /// The first byte.
        offset_bytes: u64,
        /// The number of bytes.
        len_bytes: u64,
        /// The kind of the memory.
        kind: BackingKind,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Backing {
    /// Releases the `len_bytes` from `offset_bytes` on to the kernel: they read as zero from now
    /// on. The module describes when this is allowed. Memory that was
    /// [lost](Backing::is_lost) is usable again once all of it is discarded.
    ///
    /// # Errors
    /// [`DiscardError`], but not `NotShared`.
    pub fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), DiscardError> {
        // MADV_DONTNEED on a shared file would leave the contents in the file.
        let advice = if self.kind() == BackingKind::Shmem { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        self.advise(offset_bytes, len_bytes, advice)?;
        if len_bytes == self.size_bytes() {
            self.set_lost(false);
        }
        Ok(())
    }

    /// Removes the `len_bytes` from `offset_bytes` on from this mapping of a memory file, and
    /// leaves them in the file: the next access faults and finds them. The module describes
    /// when this is allowed.
    ///
    /// # Errors
    /// [`DiscardError`].
    pub fn unmap_pages(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), DiscardError> {
        // Private memory would lose the contents too.
        if self.kind() != BackingKind::Shmem {
            return Err(DiscardError::NotShared { kind: self.kind() });
        }
        self.advise(offset_bytes, len_bytes, libc::MADV_DONTNEED)
    }

    /// Passes an advice to the kernel that may discard contents.
    fn advise(&self, offset_bytes: u64, len_bytes: u64, advice: libc::c_int) -> Result<(), DiscardError> {
        let (size_bytes, kind) = (self.size_bytes(), self.kind());
        if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > size_bytes) {
            return Err(DiscardError::OutOfRange { offset_bytes, len_bytes, size_bytes });
        }
        if !(offset_bytes | len_bytes).is_multiple_of(kind.page_size().size_bytes()) {
            return Err(DiscardError::Unaligned { offset_bytes, len_bytes, kind });
        }
        if self.as_ptr().is_null() {
            return Err(DiscardError::NoMapping { offset_bytes, len_bytes });
        }
        let start = self.as_ptr().wrapping_add(offset_bytes as usize);
        // SAFETY: the range lies in the mapping, which lives as long as `self`; its contents are
        // only ever accessed atomically or by machine instructions of guests, for which a page that
        // becomes zero is one more write.
        if unsafe { libc::madvise(start.cast(), len_bytes as usize, advice) } != 0 {
            return Err(DiscardError::System { offset_bytes, len_bytes, kind, source: io::Error::last_os_error() });
        }
        Ok(())
    }

    /// Reads the aligned 8 bytes at `offset_bytes`; `None` if it is no multiple of 8 or outside the
    /// memory, or if the memory is [lost](Backing::is_lost).
    #[inline]
    pub fn load(&self, offset_bytes: u64) -> Option<u64> {
        // Acquire: as a CPU's read.
        let word = self.word(offset_bytes)?.load(Ordering::Acquire);
        (!self.is_lost()).then_some(word)
    }

    /// Writes the aligned 8 bytes at `offset_bytes`; `None`, and nothing is written, if there is no
    /// such word.
    #[inline]
    pub fn store(&self, offset_bytes: u64, value: u64) -> Option<()> {
        // Release: as a CPU's write.
        self.word(offset_bytes).map(|word| word.store(value, Ordering::Release))
    }

    #[inline]
    fn word(&self, offset_bytes: u64) -> Option<&AtomicU64> {
        // Mappings are whole pages, so an aligned word that begins inside ends inside.
        if offset_bytes >= self.size_bytes() || !offset_bytes.is_multiple_of(8) || self.as_ptr().is_null() {
            return None;
        }
        debug_assert!(self.size_bytes().is_multiple_of(PAGE_SIZE), "a mapping of whole pages");
        let at = self.as_ptr().wrapping_add(offset_bytes as usize).cast::<u64>();
        // SAFETY: inside the mapping, which lives as long as `self`, and aligned, since the mapping
        // starts at a page; others access it atomically or by machine instructions.
        Some(unsafe { AtomicU64::from_ptr(at) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn discarded_pages_read_as_zero_and_others_stay() {
        for kind in [BackingKind::Anonymous, BackingKind::AnonymousThp, BackingKind::Shmem] {
            let memory = Backing::new(kind, 4 << 20).unwrap();
            for page in 0..1024 {
                memory.store(page * PAGE_SIZE + 8, page + 1).unwrap();
            }
            memory.discard(3 * PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
            memory.discard(2 << 20, 2 << 20).unwrap();
            memory.discard(4 << 20, 0).unwrap();
            for page in 0..1024 {
                let expected = if (3..5).contains(&page) || page >= 512 { 0 } else { page + 1 };
                assert_eq!(memory.load(page * PAGE_SIZE + 8), Some(expected), "{kind}, page {page}");
            }
        }
    }

    #[test]
    fn bytes_outside_the_memory_are_refused() {
        let memory = Backing::new(BackingKind::Anonymous, 2 * PAGE_SIZE).unwrap();
        for (offset, len) in
            [(0, 3 * PAGE_SIZE), (3 * PAGE_SIZE, 0), (u64::MAX - 4095, PAGE_SIZE), (PAGE_SIZE, u64::MAX)]
        {
            assert!(matches!(memory.discard(offset, len), Err(DiscardError::OutOfRange { .. })), "{offset}, {len}");
        }
        for (offset, len) in [(8, PAGE_SIZE), (0, 100)] {
            assert!(matches!(memory.discard(offset, len), Err(DiscardError::Unaligned { .. })), "{offset}, {len}");
        }
        assert_eq!(memory.store(2 * PAGE_SIZE - 8, 7), Some(()));
        assert_eq!(memory.load(2 * PAGE_SIZE - 8), Some(7));
        for offset in [2 * PAGE_SIZE, 4, u64::MAX] {
            assert_eq!((memory.load(offset), memory.store(offset, 1)), (None, None), "{offset}");
        }
    }

    #[test]
    fn a_memory_file_keeps_the_contents_of_unmapped_pages() {
        let memory = Backing::new(BackingKind::Shmem, 4 * PAGE_SIZE).unwrap();
        for page in 0..4 {
            memory.store(page * PAGE_SIZE, page + 1).unwrap();
        }
        memory.unmap_pages(PAGE_SIZE, 2 * PAGE_SIZE).unwrap();
        for page in 0..4 {
            assert_eq!(memory.load(page * PAGE_SIZE), Some(page + 1));
        }
        assert!(matches!(memory.unmap_pages(0, 5 * PAGE_SIZE), Err(DiscardError::OutOfRange { .. })));
        assert!(matches!(memory.unmap_pages(1, PAGE_SIZE), Err(DiscardError::Unaligned { .. })));
        let private = Backing::new(BackingKind::Anonymous, PAGE_SIZE).unwrap();
        private.store(0, 7).unwrap();
        assert!(matches!(private.unmap_pages(0, PAGE_SIZE), Err(DiscardError::NotShared { .. })));
        assert_eq!(private.load(0), Some(7));
    }

    #[test]
    fn lost_memory_is_usable_again_when_all_of_it_was_discarded() {
        for kind in [BackingKind::Anonymous, BackingKind::Shmem] {
            let memory = Backing::new(kind, 2 * PAGE_SIZE).unwrap();
            memory.store(8, 7).unwrap();
            memory.set_lost(true);
            let resolve = || memory.resolve(0, slat::Access::Read, &|_| panic!("its frames are fixed"));
            assert_eq!((memory.load(8), memory.peek(0)), (None, None));
            assert_eq!(resolve(), Err(slat::host::Gone));
            memory.discard(0, PAGE_SIZE).unwrap();
            assert!(memory.is_lost(), "half of it was not discarded");
            memory.discard(0, 2 * PAGE_SIZE).unwrap();
            assert_eq!((memory.load(8), memory.peek(0)), (Some(0), Some(0)));
            resolve().expect("usable again");
        }
    }
}
