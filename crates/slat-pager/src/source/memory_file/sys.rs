//! mincore(2), which rustix does not have.
#![expect(unsafe_code, reason = "a system call that writes through a pointer")]

use memmap2::MmapRaw;

use super::{BLOCK_BYTES, PAGE_BYTES};

const MOST_PAGES: usize = (BLOCK_BYTES / PAGE_BYTES) as usize;

/// Whether `nr_bytes` of the mapping (a block at most) from `start` on, a multiple of the page size,
/// are in the page cache. `true` if the kernel does not say.
pub(super) fn is_resident(mapping: &MmapRaw, start: usize, nr_bytes: usize) -> bool {
    assert!(nr_bytes <= BLOCK_BYTES as usize && start.checked_add(nr_bytes).is_some_and(|end| end <= mapping.len()));
    let mut pages = [0u8; MOST_PAGES];
    let address = mapping.as_mut_ptr().wrapping_add(start).cast();
    // SAFETY: The call writes one byte for each page of `nr_bytes` into `pages`, which has room for
    // those of a block; pages are 4 KiB or larger. It accesses nothing at `address`.
    let result = unsafe { libc::mincore(address, nr_bytes, pages.as_mut_ptr()) };
    let page_bytes = rustix::param::page_size();
    result != 0 || pages[..nr_bytes.div_ceil(page_bytes)].iter().all(|page| page & 1 == 1)
}
