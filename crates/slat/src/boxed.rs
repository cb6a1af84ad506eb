//! Heap memory whose allocation may fail: an error instead of an abort. (`Box::try_new` is not stable yet.)

#![expect(unsafe_code, reason = "allocates by hand")]

use alloc::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use alloc::boxed::Box;
use core::ops::Deref;
use core::ptr::NonNull;
use core::slice;

use crate::error::Error;
use crate::sync::AtomicU64;

/// A box with `value` in it.
pub(crate) fn try_box<T>(value: T) -> Result<Box<T>, Error> {
    const { assert!(size_of::<T>() != 0) }
    // SAFETY: the layout's size is not zero (checked above).
    let memory = unsafe { alloc(Layout::new::<T>()) }.cast::<T>();
    if memory.is_null() {
        return Err(Error::OutOfMemory);
    }
    // SAFETY: the memory has the layout of a `T` and came from the global allocator, as a box's must.
    unsafe {
        memory.write(value);
        Ok(Box::from_raw(memory))
    }
}

/// Size of a cache line in bytes.
const LINE_BYTES: usize = 64;

/// Atomic words on cache lines of their own, zero at first. Where the allocator takes zeroed pages from the operating
/// system, words that were never touched take no memory.
pub(crate) struct ZeroedWords {
    first: NonNull<AtomicU64>,
    len: usize,
    allocation: NonNull<u8>,
    layout: Layout,
}

// SAFETY: owns its memory, as a boxed slice of atomics does.
unsafe impl Send for ZeroedWords {}
// SAFETY: as above.
unsafe impl Sync for ZeroedWords {}

impl ZeroedWords {
    pub(crate) fn new(len: usize) -> Result<ZeroedWords, Error> {
        // A line more, and the words moved to a line's beginning by hand: asked for more than the alignment that it has by
        // itself, std's allocator on Unix writes the zeroes, and so touches all. (Nor may an allocation have no size.)
        let words = Layout::array::<AtomicU64>(len).map_err(|_| Error::OutOfMemory)?;
        let size_bytes = words.size().checked_add(LINE_BYTES).ok_or(Error::OutOfMemory)?;
        let layout = Layout::from_size_align(size_bytes, words.align()).map_err(|_| Error::OutOfMemory)?;
        // SAFETY: the layout's size is not zero.
        let memory = unsafe { alloc_zeroed(layout) };
        let allocation = NonNull::new(memory).ok_or(Error::OutOfMemory)?;
        let before_bytes = memory.addr().wrapping_neg() % LINE_BYTES;
        // SAFETY: less than a line, by which the allocation is longer than the words.
        let first = unsafe { allocation.add(before_bytes) }.cast::<AtomicU64>();
        // loom's atomics are more than their value.
        #[cfg(loom)]
        for index in 0..len {
            // SAFETY: inside the allocation, which is nobody else's.
            unsafe { first.add(index).write(AtomicU64::new(0)) };
        }
        Ok(ZeroedWords { first, len, allocation, layout })
    }
}

impl Deref for ZeroedWords {
    type Target = [AtomicU64];

    #[inline]
    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: `len` words were allocated, and all bits zero is an atomic zero (loom's were written).
        unsafe { slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }
}

impl Drop for ZeroedWords {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.allocation.as_ptr(), self.layout) }
    }
}
