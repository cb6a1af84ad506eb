//! Memory of this process, for guests.

#![expect(unsafe_code, reason = "maps memory, and reaches its words by their addresses")]

use std::fs;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::wrong::Wrong;

pub(crate) const PAGE_SIZE: u64 = 4096;
pub(crate) const SIZE_2M: u64 = 2 << 20;

/// Where Linux keeps the number of pages of 2 MiB that it reserves.
const NR_RESERVED: &str = "/proc/sys/vm/nr_hugepages";

/// Has Linux reserve pages of 2 MiB for `nr_bytes` of [`Memory`], of which there is one at a time.
pub(crate) fn reserve_huge_pages(nr_bytes: u64) -> Result<(), Wrong> {
    let nr_pages = nr_bytes / SIZE_2M + 1;
    fs::write(NR_RESERVED, nr_pages.to_string()).map_err(|error| Wrong::system("reserve pages of 2 MiB", error))
}

/// Which pages the kernel takes for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pages {
    Small,
    /// Reserved ones: KVM on RISC-V maps no other memory by leaves of 2 MiB in Linux 6.12.
    Huge,
}

/// Memory, at a multiple of 2 MiB. All of it is there, and zeroed.
#[derive(Debug)]
pub(crate) struct Memory {
    mapping: usize,
    mapped: usize,
    start: u64,
    size_bytes: u64,
}

impl Memory {
    /// `size_bytes` of it.
    pub(crate) fn new(size_bytes: u64, pages: Pages) -> Result<Memory, Wrong> {
        let mapped = (size_bytes + SIZE_2M) as usize;
        let flags = match pages {
            Pages::Small => MapFlags::PRIVATE,
            Pages::Huge => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
        };
        // SAFETY: at an address of the kernel's choice.
        let mapping = unsafe { mmap_anonymous(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, flags) }
            .map_err(|error| Wrong::system("map memory", error))?
            .expose_provenance();
        let start = (mapping as u64).next_multiple_of(SIZE_2M);
        let memory = Memory { mapping, mapped, start, size_bytes };
        if pages == Pages::Small {
            memory.advise(0, size_bytes, Advice::LinuxNoHugepage)?;
        }
        (0..size_bytes).step_by(PAGE_SIZE as usize).for_each(|offset| memory.set(offset, 0));
        Ok(memory)
    }

    /// Its address.
    pub(crate) fn address(&self) -> u64 {
        self.start
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The word at `offset`.
    fn word(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < self.size_bytes, "{offset:#x} is no word of the memory");
        // SAFETY: an aligned word of the mapping, which lives as long as this. Others, the guest
        // among them, access it by atomics or machine instructions.
        unsafe { &*ptr::with_exposed_provenance::<AtomicU64>((self.start + offset) as usize) }
    }

    pub(crate) fn set(&self, offset: u64, value: u64) {
        self.word(offset).store(value, Ordering::Relaxed);
    }

    pub(crate) fn get(&self, offset: u64) -> u64 {
        self.word(offset).load(Ordering::Relaxed)
    }

    /// The kernel takes back a part, which reads as zeros then.
    pub(crate) fn take_back(&self, offset: u64, size_bytes: u64) -> Result<(), Wrong> {
        self.advise(offset, size_bytes, Advice::LinuxDontNeed)
    }

    fn advise(&self, offset: u64, size_bytes: u64, advice: Advice) -> Result<(), Wrong> {
        assert!(offset + size_bytes <= self.size_bytes, "the part is in the memory");
        let start = ptr::with_exposed_provenance_mut((self.start + offset) as usize);
        // SAFETY: a part of the mapping; nothing here keeps a reference to what is in it.
        unsafe { madvise(start, size_bytes as usize, advice) }.map_err(|error| Wrong::system("advise memory", error))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used any more. It may fail only for a bad address.
        let _ = unsafe { munmap(ptr::with_exposed_provenance_mut(self.mapping), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_its_size_and_can_be_taken_back() {
        let memory = Memory::new(2 * PAGE_SIZE, Pages::Small).unwrap();
        assert!(memory.address().is_multiple_of(SIZE_2M));
        memory.set(PAGE_SIZE, 7);
        memory.take_back(0, PAGE_SIZE).unwrap();
        assert_eq!(memory.get(PAGE_SIZE), 7);
        memory.take_back(PAGE_SIZE, PAGE_SIZE).unwrap();
        assert_eq!(memory.get(PAGE_SIZE), 0);
    }
}
