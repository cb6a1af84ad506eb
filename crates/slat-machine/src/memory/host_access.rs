//! The host's own accesses to guest memory: it reads and writes words, and discards pages.
//!
//! Words are accessed atomically, because guests change them at any time. A discarded page loses
//! its frame and reads as zero when it is touched next. The pointer, which is the frame for the
//! machine, stays the same. So the machine's memory is safe in any case; but a guest that still has
//! the page mapped writes into the new frame. Discard only pages that the engine has invalidated
//! ([`Vm::invalidate_range`](slat::Vm::invalidate_range)).

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::Advice;
use thiserror::Error;

use super::{Backing, BackingKind, Memory};

/// Why pages could not be discarded: none was.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum DiscardError {
    /// The bytes are not in the memory.
    #[error("cannot discard {len_bytes} bytes at {offset_bytes}: there are {size_bytes}")]
    OutOfRange { offset_bytes: u64, len_bytes: u64, size_bytes: u64 },
    /// Only the guest can access the memory.
    #[error("cannot discard {len_bytes} bytes at {offset_bytes}: the memory has no mapping")]
    NoMapping { offset_bytes: u64, len_bytes: u64 },
    /// Not whole pages of the memory's kind.
    #[error("cannot discard {len_bytes} bytes at {offset_bytes}: {kind} memory has pages of {}", kind.page_size().size_bytes())]
    Unaligned { offset_bytes: u64, len_bytes: u64, kind: BackingKind },
    /// The kernel refused.
    #[error("discarding {len_bytes} bytes of {kind} memory at {offset_bytes} failed")]
    System { offset_bytes: u64, len_bytes: u64, kind: BackingKind, source: io::Error },
}

impl Backing {
    /// Releases the `len_bytes` from `offset_bytes` on to the kernel: they read as zero from now
    /// on. The module describes when this is allowed.
    ///
    /// # Errors
    /// [`DiscardError`].
    pub fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), DiscardError> {
        // MADV_DONTNEED on a shared file would leave the contents in the file.
        let advice = if self.kind() == BackingKind::Shmem { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
        self.advise(offset_bytes, len_bytes, advice)
    }

    /// Passes an advice to the kernel that may discard contents.
    fn advise(&self, offset_bytes: u64, len_bytes: u64, advice: Advice) -> Result<(), DiscardError> {
        let (size_bytes, kind) = (self.size_bytes(), self.kind());
        if offset_bytes.checked_add(len_bytes).is_none_or(|end| end > size_bytes) {
            return Err(DiscardError::OutOfRange { offset_bytes, len_bytes, size_bytes });
        }
        if !(offset_bytes | len_bytes).is_multiple_of(kind.page_size().size_bytes()) {
            return Err(DiscardError::Unaligned { offset_bytes, len_bytes, kind });
        }
        let Memory::Fixed(memory) = &self.0 else {
            return Err(DiscardError::NoMapping { offset_bytes, len_bytes });
        };
        let discarded = memory.mapping.advise(offset_bytes..offset_bytes + len_bytes, advice);
        discarded.map_err(|source| DiscardError::System { offset_bytes, len_bytes, kind, source })
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
        match &self.0 {
            Memory::Fixed(memory) => memory.mapping.word(offset_bytes),
            Memory::Movable(_) | Memory::GuestMemfd(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use slat::PAGE_SIZE;

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
    fn lost_memory_is_neither_read_nor_resolved() {
        for kind in [BackingKind::Anonymous, BackingKind::Shmem] {
            let memory = Backing::new(kind, PAGE_SIZE).unwrap();
            memory.store(8, 7).unwrap();
            memory.mark_lost();
            let resolved = memory.resolve(0, slat::Access::Read, &|_| panic!("its frames are fixed"));
            assert_eq!((memory.load(8), memory.peek(0)), (None, None));
            assert_eq!(resolved, Err(slat::host::Unresolved::Gone));
        }
    }
}
