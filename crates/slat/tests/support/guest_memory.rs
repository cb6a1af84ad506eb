//! Guest memory for hosts of shadow paging. The engine reads and writes the guest's page tables
//! there.
#![allow(unsafe_code, reason = "hands out memory of the global allocator")]

use std::alloc::{Layout, alloc_zeroed, dealloc};

/// Guest memory, zeroed at first.
pub struct Memory {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: only an address; the memory there is accessed atomically.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `nr_frames` frames of 4 KiB, the first at a multiple of `align_bytes`.
    pub fn new(nr_frames: u64, align_bytes: usize) -> Memory {
        assert_ne!(nr_frames, 0);
        let layout = Layout::from_size_align(nr_frames as usize * 4096, align_bytes).unwrap();
        // SAFETY: the layout has a size.
        Memory { start: unsafe { alloc_zeroed(layout) }, layout }
    }

    pub fn start(&self) -> u64 {
        self.start.expose_provenance() as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) }
    }
}
