//! Memory that a process maps: whole pages, private, zero at first.
#![expect(unsafe_code, reason = "memory maps")]

use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::content::{PAGE_BYTES, Page};
use crate::wrong::Wrong;

/// Whether the kernel may map an area by huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum HugePages {
    Wanted,
    Forbidden,
}

/// An area of memory. It is unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Area {
    first: NonNull<Page>,
    nr_pages: usize,
}

impl Area {
    pub(crate) fn map(nr_pages: u64, huge_pages: HugePages) -> Result<Area, Wrong> {
        let failed = |error| Wrong::system("map memory", error);
        let nr_pages = nr_pages as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, in a place that the kernel chooses, replaces no other.
        let address = unsafe {
            mmap_anonymous(ptr::null_mut(), nr_pages * PAGE_BYTES, ProtFlags::READ | ProtFlags::WRITE, flags)
        };
        let first = NonNull::new(address.map_err(failed)?.cast::<Page>());
        let area = Area { first: first.ok_or_else(|| failed(rustix::io::Errno::NOMEM))?, nr_pages };
        let advice = match huge_pages {
            HugePages::Wanted => Advice::LinuxHugepage,
            HugePages::Forbidden => Advice::LinuxNoHugepage,
        };
        // A kernel without huge pages refuses it, and uses small ones: the content is the same.
        // SAFETY: the advice changes no content of the area.
        let _ = unsafe { madvise(area.first.as_ptr().cast(), nr_pages * PAGE_BYTES, advice) };
        Ok(area)
    }

    pub(crate) fn pages(&self) -> &[Page] {
        // SAFETY: the area is mapped, of this size, and borrowed; zero bytes are words.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.nr_pages) }
    }

    pub(crate) fn pages_mut(&mut self) -> &mut [Page] {
        // SAFETY: the area is mapped, of this size, and not borrowed elsewhere; zero bytes are
        // words.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.nr_pages) }
    }

    /// The address of a page.
    pub(crate) fn address(&self, page: usize) -> u64 {
        (self.first.as_ptr().addr() + page * PAGE_BYTES) as u64
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // It fails for an area that is not mapped only.
        // SAFETY: nothing refers to the area any more.
        let _ = unsafe { munmap(self.first.as_ptr().cast(), self.nr_pages * PAGE_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::content::verify_zero;

    #[test]
    fn an_area_is_zero_and_keeps_what_is_written() {
        for huge_pages in [HugePages::Wanted, HugePages::Forbidden] {
            let mut area = Area::map(5, huge_pages).unwrap();
            assert_eq!(area.pages().len(), 5);
            assert!(area.pages().iter().all(|page| verify_zero(page).is_ok()));
            area.pages_mut()[4][511] = 7;
            assert_eq!(area.pages()[4][511], 7);
            assert_eq!(area.address(4) - area.address(0), 4 * PAGE_BYTES as u64);
        }
    }
}
