//! mincore(2), which rustix does not have.
#![expect(unsafe_code, reason = "a system call that writes through a pointer")]

use std::ops::Range;

use memmap2::MmapRaw;

use super::{BLOCK_BYTES, PAGE_BYTES};

const MOST_PAGES: usize = (BLOCK_BYTES / PAGE_BYTES) as usize;

/// Which pages of the machine are not in the page cache, of `nr_bytes` of the mapping (a block at
/// most) from `start` on, a multiple of the page size: their ranges. `None`: the kernel does not
/// say.
pub(super) fn not_resident(
    mapping: &MmapRaw,
    start: usize,
    nr_bytes: usize,
) -> Option<impl Iterator<Item = Range<u64>>> {
    assert!(nr_bytes <= BLOCK_BYTES as usize && start.checked_add(nr_bytes).is_some_and(|end| end <= mapping.len()));
    let mut pages = [0u8; MOST_PAGES];
    let address = mapping.as_mut_ptr().wrapping_add(start).cast();
    // SAFETY: The call writes one byte for each page of `nr_bytes` into `pages`, which has room for
    // those of a block; pages are 4 KiB or larger. It accesses nothing at `address`.
    let result = unsafe { libc::mincore(address, nr_bytes, pages.as_mut_ptr()) };
    let page_bytes = rustix::param::page_size();
    let range_of = move |page| {
        let at = (start + page * page_bytes) as u64;
        at..at + page_bytes as u64
    };
    (result == 0).then(|| (0..nr_bytes.div_ceil(page_bytes)).filter(move |page| pages[*page] & 1 == 0).map(range_of))
}
