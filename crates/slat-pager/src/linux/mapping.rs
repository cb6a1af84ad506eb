//! Mappings of memory, each with one owner, whose drop unmaps it.
//!
//! Interfaces: mmap(2), madvise(2).

#![expect(unsafe_code, reason = "mmap, and words of memory that others change at any time")]

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::source::PAGE_BYTES as PAGE_SIZE;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};

const WORD_BYTES: usize = size_of::<u64>();

/// Readable and writable memory, at addresses that nothing else in this process uses.
///
/// Software guests, and other processes that map the same file, change it at any time. So there
/// are no references to it but to atomic words, and raw pointers. A user of a raw pointer that
/// makes another reference keeps all others from those bytes meanwhile.
#[derive(Debug)]
pub struct MappedMemory {
    start: *mut u8,
    size_bytes: usize,
}

// SAFETY: the pointer is only an address. Its memory is accessed atomically, or by users that know
// that other threads access it.
unsafe impl Send for MappedMemory {}
// SAFETY: as above.
unsafe impl Sync for MappedMemory {}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped with this start and size; nothing borrows from it any more.
        let result = unsafe { mm::munmap(self.start.cast(), self.size_bytes) };
        debug_assert_eq!(result, Ok(()), "munmap of a mapping of our own");
    }
}

impl MappedMemory {
    /// Maps `size_bytes` of zeros, private to this process. The kernel chooses the address, also
    /// with `FIXED` among `flags`.
    pub fn anonymous(size_bytes: u64, flags: MapFlags) -> io::Result<MappedMemory> {
        MappedMemory::anywhere(size_bytes, ProtFlags::READ | ProtFlags::WRITE, flags)
    }

    /// As [`anonymous`](Self::anonymous), whole pages at a multiple of `align_bytes`, a power of
    /// two of at least a page; any other number is refused.
    pub fn anonymous_aligned(size_bytes: u64, align_bytes: u64) -> io::Result<MappedMemory> {
        MappedMemory::aligned(size_bytes, align_bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::empty())
    }

    /// Maps `size_bytes` of `file`, shared, from `offset_bytes`, a multiple of the page size. The
    /// file is long enough and does not shrink: an access beyond its end kills the process.
    pub fn of_file(file: BorrowedFd<'_>, offset_bytes: u64, size_bytes: u64) -> io::Result<MappedMemory> {
        let size_bytes = length(size_bytes)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: without `FIXED` the kernel takes unused addresses.
        let start = unsafe { mm::mmap(ptr::null_mut(), size_bytes, protection, MapFlags::SHARED, file, offset_bytes) }?;
        Ok(MappedMemory { start: start.cast(), size_bytes })
    }

    /// Maps the first `size_bytes` of `file`, as [`of_file`](Self::of_file), but that the file does
    /// not get what is written here.
    pub fn private_of_file(file: BorrowedFd<'_>, size_bytes: u64) -> io::Result<MappedMemory> {
        let size_bytes = length(size_bytes)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: without `FIXED` the kernel takes unused addresses.
        let start = unsafe { mm::mmap(ptr::null_mut(), size_bytes, protection, flags, file, 0) }?;
        Ok(MappedMemory { start: start.cast(), size_bytes })
    }

    /// Maps the first `size_bytes` of `file`, as [`of_file`](Self::of_file), at a multiple of
    /// `align_bytes`.
    pub fn of_file_aligned(file: BorrowedFd<'_>, size_bytes: u64, align_bytes: u64) -> io::Result<MappedMemory> {
        let place = MappedMemory::aligned(size_bytes, align_bytes, ProtFlags::empty(), MapFlags::NORESERVE)?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::FIXED);
        // SAFETY: replaces exactly the mapping made by the line above, which is not used yet.
        if let Err(error) = unsafe { mm::mmap(place.start.cast(), place.size_bytes, protection, flags, file, 0) } {
            // The addresses are never used again: after a failure they may be free, and then they
            // may be another thread's by now.
            std::mem::forget(place);
            return Err(error.into());
        }
        Ok(place)
    }

    fn anywhere(size_bytes: u64, protection: ProtFlags, flags: MapFlags) -> io::Result<MappedMemory> {
        let size_bytes = length(size_bytes)?;
        let flags = flags.difference(MapFlags::FIXED) | MapFlags::PRIVATE;
        // SAFETY: without `FIXED` the kernel takes unused addresses.
        let start = unsafe { mm::mmap_anonymous(ptr::null_mut(), size_bytes, protection, flags) }?;
        Ok(MappedMemory { start: start.cast(), size_bytes })
    }

    /// A part of a larger mapping, of which both ends are unmapped: whole pages, all three.
    fn aligned(size_bytes: u64, align_bytes: u64, protection: ProtFlags, flags: MapFlags) -> io::Result<MappedMemory> {
        if !align_bytes.is_power_of_two() || !(size_bytes | align_bytes).is_multiple_of(PAGE_SIZE) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let whole = MappedMemory::anywhere(size_bytes.saturating_add(align_bytes), protection, flags)?;
        let (align, size_bytes) = (align_bytes as usize, size_bytes as usize);
        let head = whole.start.addr().next_multiple_of(align) - whole.start.addr();
        let part = |offset: usize, size_bytes: usize| MappedMemory { start: whole.at(offset as u64), size_bytes };
        let ends = [part(0, head), part(head + size_bytes, align - head)];
        let aligned = part(head, size_bytes);
        // The three parts own it now.
        std::mem::forget(whole);
        for end in ends {
            if end.size_bytes == 0 { std::mem::forget(end) } else { drop(end) }
        }
        Ok(aligned)
    }

    /// The first byte.
    #[inline]
    pub fn start(&self) -> *mut u8 {
        self.start
    }

    /// The size in bytes.
    #[inline]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes as u64
    }

    /// The byte at `offset_bytes`, which is in the mapping or its end.
    #[inline]
    pub fn at(&self, offset_bytes: u64) -> *mut u8 {
        self.start.wrapping_add(offset_bytes as usize)
    }

    /// The aligned word at `offset_bytes`; `None` if it is no multiple of 8, or outside.
    #[inline]
    pub fn word(&self, offset_bytes: u64) -> Option<&AtomicU64> {
        let is_word = offset_bytes.is_multiple_of(WORD_BYTES as u64) && offset_bytes < self.size_bytes();
        // SAFETY: mappings are whole pages of the kernel, so an aligned word that begins inside
        // ends inside. The mapping lives as long as `self`, any bits are an `AtomicU64`, and others
        // access it as the type says.
        is_word.then(|| unsafe { AtomicU64::from_ptr(self.at(offset_bytes).cast()) })
    }

    /// All words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: as for `word`. What another process does to them is to this one as a device.
        unsafe { slice::from_raw_parts(self.start.cast(), self.size_bytes / WORD_BYTES) }
    }

    /// The words of `part`; `None` if it is not in the mapping, or not of whole aligned words.
    pub fn words_of(&self, part: Range<u64>) -> Option<&[AtomicU64]> {
        let is_inside = part.start <= part.end && part.end <= self.size_bytes();
        let is_part = is_inside && (part.start | part.end).is_multiple_of(WORD_BYTES as u64);
        let nr_words = (part.end.saturating_sub(part.start) as usize) / WORD_BYTES;
        // SAFETY: as for `words`, of which these are some.
        is_part.then(|| unsafe { slice::from_raw_parts(self.at(part.start).cast(), nr_words) })
    }

    /// Writes `bytes` at `offset_bytes`, word by word; `None`, and nothing is written, if they do
    /// not fit or are not whole aligned words.
    pub fn write(&self, offset_bytes: u64, bytes: &[u8]) -> Option<()> {
        let end = offset_bytes.checked_add(bytes.len() as u64)?;
        for (word, bytes) in self.words_of(offset_bytes..end)?.iter().zip(bytes.as_chunks().0) {
            // Relaxed: what lets others reach the bytes orders them.
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
        Some(())
    }

    /// Gives the kernel advice about a part, which may change its contents.
    pub fn advise(&self, part: Range<u64>, advice: Advice) -> io::Result<()> {
        if part.start > part.end || part.end > self.size_bytes() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the part is in the mapping, which lives as long as `self`. Contents that change
        // are to all users one more write.
        unsafe { mm::madvise(self.at(part.start).cast(), (part.end - part.start) as usize, advice) }?;
        Ok(())
    }

    /// No page of it becomes a transparent huge page from now on.
    pub fn without_huge_pages(&self) {
        // A kernel without transparent huge pages, or with none for this mapping, refuses, and
        // needs no advice.
        let _ = self.advise(0..self.size_bytes(), Advice::LinuxNoHugepage);
    }
}

fn length(size_bytes: u64) -> io::Result<usize> {
    usize::try_from(size_bytes).map_err(|_| io::ErrorKind::OutOfMemory.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_inside_and_aligned() {
        for align_bytes in [PAGE_SIZE, 1 << 30] {
            let mapping = MappedMemory::anonymous_aligned(3 * PAGE_SIZE, align_bytes).unwrap();
            assert!((mapping.start().addr() as u64).is_multiple_of(align_bytes));
            assert_eq!((mapping.size_bytes(), mapping.words().len()), (3 * PAGE_SIZE, 3 * 512));
            for offset_bytes in [1, 4, 3 * PAGE_SIZE, u64::MAX - 7] {
                assert!(mapping.word(offset_bytes).is_none(), "{offset_bytes}");
            }
            mapping.write(3 * PAGE_SIZE - 8, &[7; 8]).unwrap();
            let last = mapping.word(3 * PAGE_SIZE - 8).unwrap();
            assert_eq!(last.load(Ordering::Relaxed), 0x0707_0707_0707_0707);
        }
    }

    #[test]
    fn bytes_that_do_not_fit_are_not_written() {
        let mapping = MappedMemory::anonymous(PAGE_SIZE, MapFlags::empty()).unwrap();
        for (offset_bytes, len) in [(PAGE_SIZE, 8), (PAGE_SIZE - 8, 16), (4, 8), (0, 4), (u64::MAX - 7, 8)] {
            assert_eq!(mapping.write(offset_bytes, &[1; 16][..len]), None, "{offset_bytes}, {len}");
        }
        assert!(mapping.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
        assert!(mapping.write(PAGE_SIZE, &[]).is_some());
        mapping.advise(0..PAGE_SIZE + 1, Advice::LinuxDontNeed).expect_err("beyond the end");
        assert!(MappedMemory::anonymous(0, MapFlags::empty()).is_err());
        for (size_bytes, align_bytes) in [
            (u64::MAX, PAGE_SIZE),
            (PAGE_SIZE, 0),
            (PAGE_SIZE, 3),
            (PAGE_SIZE, 3 * PAGE_SIZE),
            (PAGE_SIZE, PAGE_SIZE / 2),
            (PAGE_SIZE + 8, PAGE_SIZE),
        ] {
            assert!(MappedMemory::anonymous_aligned(size_bytes, align_bytes).is_err(), "{size_bytes}, {align_bytes}");
        }
    }

    #[test]
    fn the_kernel_chooses_the_address_also_with_fixed() {
        let mapping = MappedMemory::anonymous(PAGE_SIZE, MapFlags::FIXED).unwrap();
        assert!(!mapping.start().is_null());
    }
}
