//! A global allocator that counts the bytes of each thread, and whose allocations can be made to fail.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use crate::common::INSIDE_HOST;

thread_local! {
    /// Allocations of this thread that still succeed; `None`: all do.
    static ALLOCATIONS_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
    /// Bytes that this thread has allocated and not freed.
    pub static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
}

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

// SAFETY: all calls go to the system's allocator, with the same layouts.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if INSIDE_HOST.get() == 0 {
            match ALLOCATIONS_LEFT.get() {
                Some(0) => return std::ptr::null_mut(),
                Some(left) => ALLOCATIONS_LEFT.set(Some(left - 1)),
                None => {}
            }
            LIVE_BYTES.set(LIVE_BYTES.get() + layout.size() as isize);
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if INSIDE_HOST.get() == 0 {
            LIVE_BYTES.set(LIVE_BYTES.get() - layout.size() as isize);
        }
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Runs `operation` with `k` allocations from the heap, and returns whether it needed more.
pub fn with_heap_allocations<R>(k: u64, operation: impl FnOnce() -> R) -> (R, bool) {
    ALLOCATIONS_LEFT.set(Some(k));
    let result = operation();
    let ran_out = ALLOCATIONS_LEFT.replace(None) == Some(0);
    (result, ran_out)
}
