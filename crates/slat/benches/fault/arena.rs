//! Table memory for the fault benches: one anonymous mapping, touched beforehand, so that no page fault of the kernel
//! and no allocator is in the figures. A frame's physical address is its offset in the mapping plus a bias.

#![expect(unsafe_code, reason = "maps memory and hands out pointers into it")]

use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes in a frame.
pub(crate) const FRAME_BYTES: usize = 4096;
/// Physical address of the mapping's first byte.
const BIAS: usize = 1 << 40;

/// The mapping, and which of its frames are in use.
struct Arena {
    nr_frames: usize,
    /// Frames below were handed out since the last reset.
    next: AtomicUsize,
    freed: Mutex<Vec<usize>>,
    /// Length of `freed`, to be looked at without the mutex.
    nr_freed: AtomicUsize,
}

/// A handle on an arena, as cheap to copy as what a kernel would use: a pointer's distance from its physical address.
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    /// The pointer that physical address 0 would have.
    origin: *mut u8,
    arena: &'static Arena,
}

// SAFETY: the pointer is only ever the base of a computation; the arena synchronizes itself.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// A new arena, never given back.
    pub(crate) fn new(nr_frames: usize) -> Memory {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let nr_bytes = nr_frames * FRAME_BYTES;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { libc::mmap(ptr::null_mut(), nr_bytes, protection, flags, -1, 0) };
        assert!(base != libc::MAP_FAILED, "no memory for {nr_frames} tables");
        let base: *mut u8 = base.cast();
        // SAFETY: the mapping is that long, writable and nobody else's. Not zeroes: those would not have to be written.
        unsafe { base.write_bytes(0xff, nr_bytes) };
        let (next, nr_freed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let arena = Arena { nr_frames, next, freed: Mutex::new(Vec::with_capacity(nr_frames)), nr_freed };
        Memory { origin: base.wrapping_sub(BIAS), arena: Box::leak(Box::new(arena)) }
    }

    /// Physical address of a free frame.
    #[inline]
    pub(crate) fn allocate(&self) -> Option<usize> {
        let arena = self.arena;
        // Only a guess: a frame that is freed at this moment is found by the next call.
        if arena.nr_freed.load(Ordering::Relaxed) != 0 {
            let mut freed = arena.freed.lock().unwrap();
            let frame = freed.pop();
            arena.nr_freed.store(freed.len(), Ordering::Relaxed);
            if frame.is_some() {
                return frame;
            }
        }
        let index = arena.next.fetch_add(1, Ordering::Relaxed);
        (index < arena.nr_frames).then_some(BIAS + index * FRAME_BYTES)
    }

    pub(crate) fn free(&self, frame: usize) {
        let mut freed = self.arena.freed.lock().unwrap();
        freed.push(frame);
        self.arena.nr_freed.store(freed.len(), Ordering::Relaxed);
    }

    /// Makes all frames free, to be handed out in order. None may be in use.
    pub(crate) fn reset(&self) {
        let mut freed = self.arena.freed.lock().unwrap();
        let nr_taken = self.arena.next.load(Ordering::Relaxed);
        assert_eq!(freed.len(), nr_taken, "frames leaked, or there were too few");
        freed.clear();
        self.arena.nr_freed.store(0, Ordering::Relaxed);
        self.arena.next.store(0, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn pointer(&self, frame: usize) -> *mut u8 {
        self.origin.wrapping_add(frame)
    }
}
