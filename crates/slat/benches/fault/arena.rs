//! Memory for page tables in the benches: one anonymous mapping, touched beforehand, so that the
//! figures contain no page fault of the kernel and no allocator. A frame's physical address is its
//! offset in the mapping plus a bias.

#![expect(unsafe_code, reason = "maps memory and hands out pointers into it")]

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Bytes in a frame.
pub(crate) const FRAME_BYTES: usize = 4096;
/// Physical address of the mapping's first byte.
const BIAS: usize = 1 << 40;

/// Frames that a thread takes at a time, as kernels have lists for each CPU: if threads shared a
/// cache line for each frame, the bench would measure that line.
pub(crate) const BATCH: usize = 64;

/// Threads that may have begun a batch.
const MAX_THREADS: usize = 1024;

/// The rest of a thread's batch: the arena's number of resets when it was taken, the next frame,
/// and the end.
#[derive(Clone, Copy)]
struct Batch {
    nr_resets: u64,
    next: usize,
    end: usize,
}

thread_local! {
    static BATCH_LEFT: Cell<Batch> = const { Cell::new(Batch { nr_resets: 0, next: 0, end: 0 }) };
}

/// Which frames of the mapping are in use.
///
/// The free ones are a list without a lock: a thread that is preempted while it frees a page-table
/// page must not delay the measured threads.
struct Arena {
    /// Frames below were handed out since the last reset.
    next: AtomicUsize,
    /// The first of the frames that were freed since then, as in `links`. The bits from 32 on count
    /// the changes, so that an exchange fails if the list has changed and has the same first frame
    /// again.
    freed: AtomicU64,
    /// For each frame on the list the number of the next plus 1; 0: the end.
    links: Box<[AtomicU32]>,
    /// From 1 on, over all arenas: a batch of another arena, or from before a reset, is invalid.
    nr_resets: AtomicU64,
}

static NR_RESETS: AtomicU64 = AtomicU64::new(0);

impl Arena {
    /// Takes a frame that was not handed out since the last reset.
    fn take_new(&self) -> usize {
        let nr_resets = self.nr_resets.load(Ordering::Relaxed);
        let mut batch = BATCH_LEFT.get();
        if batch.nr_resets != nr_resets || batch.next == batch.end {
            let next = self.next.fetch_add(BATCH, Ordering::Relaxed);
            batch = Batch { nr_resets, next, end: next + BATCH };
        }
        BATCH_LEFT.set(Batch { next: batch.next + 1, ..batch });
        batch.next
    }

    /// Replaces the list's first frame `first` by `new`. If the list has changed, returns its
    /// current value.
    fn change_first(&self, found: u64, new: u32) -> Result<(), u64> {
        let changed = ((found >> 32) + 1) << 32 | u64::from(new);
        // AcqRel: the next owner of the frame observes the list's links, and all writes to the
        // frame.
        match self.freed.compare_exchange_weak(found, changed, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(()),
            Err(found) => Err(found),
        }
    }

    /// Takes a frame from the list.
    fn pop(&self) -> Option<usize> {
        let mut found = self.freed.load(Ordering::Acquire);
        loop {
            let index = (found as u32).checked_sub(1)? as usize;
            let next = self.links[index].load(Ordering::Relaxed);
            match self.change_first(found, next) {
                Ok(()) => return Some(index),
                Err(changed) => found = changed,
            }
        }
    }

    fn push(&self, index: usize) {
        let mut found = self.freed.load(Ordering::Acquire);
        loop {
            self.links[index].store(found as u32, Ordering::Relaxed);
            match self.change_first(found, index as u32 + 1) {
                Ok(()) => return,
                Err(changed) => found = changed,
            }
        }
    }
}

/// A handle on an arena, as cheap to copy as that of a kernel: the distance of a pointer from its
/// physical address.
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
    /// A new arena, which is never freed.
    pub(crate) fn new(nr_frames: usize) -> Memory {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let nr_bytes = nr_frames * FRAME_BYTES;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe { libc::mmap(ptr::null_mut(), nr_bytes, protection, flags, -1, 0) };
        assert!(base != libc::MAP_FAILED, "no memory for {nr_frames} tables");
        let base: *mut u8 = base.cast();
        // SAFETY: the mapping is that long, writable and has no other user. Not zeroes: those would
        // not have to be written.
        unsafe { base.write_bytes(0xff, nr_bytes) };
        let links = (0..nr_frames).map(|_| AtomicU32::new(0)).collect();
        let nr_resets = AtomicU64::new(NR_RESETS.fetch_add(1, Ordering::Relaxed) + 1);
        let arena = Arena { next: AtomicUsize::new(0), freed: AtomicU64::new(0), links, nr_resets };
        Memory { origin: base.wrapping_sub(BIAS), arena: Box::leak(Box::new(arena)) }
    }

    /// Physical address of a free frame.
    #[inline]
    pub(crate) fn allocate(&self) -> Option<usize> {
        let arena = self.arena;
        let index = arena.pop().unwrap_or_else(|| arena.take_new());
        (index < arena.links.len()).then_some(BIAS + index * FRAME_BYTES)
    }

    pub(crate) fn free(&self, frame: usize) {
        self.arena.push((frame - BIAS) / FRAME_BYTES);
    }

    /// Makes all frames free, to be handed out in order. None may be in use.
    pub(crate) fn reset(&self) {
        let arena = self.arena;
        let nr_freed = std::iter::from_fn(|| arena.pop()).count();
        let nr_taken = arena.next.swap(0, Ordering::Relaxed);
        let nr_left = nr_taken.checked_sub(nr_freed).expect("a frame was freed twice");
        assert!(nr_left < BATCH * MAX_THREADS, "frames leaked");
        arena.nr_resets.store(NR_RESETS.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn pointer(&self, frame: usize) -> *mut u8 {
        self.origin.wrapping_add(frame)
    }
}
