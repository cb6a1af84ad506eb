//! The memory of a modelled machine: what the engine allocates on it, at addresses from which the
//! numbers of cache lines follow.
//!
//! # Guarantees
//! Of two runs that allocate the same in the same order, each allocation is at the same offset. No
//! two allocations share a cache line. So lines have the same numbers in both runs, whatever else
//! the process has allocated, and wherever the system has placed the arena.
//!
//! # Use
//! A program that runs the model makes [`Allocator`] its global allocator. While an `InArena`
//! lives, the allocations of its thread are the arena's. The rest, and without the arena all, are
//! the system's.
//!
//! # Implementation
//! One reservation of address space: a heap of size classes, behind it a region of page-table
//! pages for each node, and behind these a line for each frame, where an operating system keeps
//! what it knows of the frame. When an arena is claimed, nothing of it is in use, and it is made
//! empty.

#![expect(unsafe_code, reason = "implements a global allocator")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};

use crate::error::ModelError;
use crate::topology::MAX_NODES;

/// Size of a cache line in bytes.
pub const LINE_BYTES: usize = 64;

/// Address space of the heap in bytes.
const HEAP_BYTES: usize = 16 << 30;

/// Address space of the page-table pages of a node in bytes.
const NODE_BYTES: usize = 4 << 30;

/// Where the lines of frames begin.
const FRAMES: usize = HEAP_BYTES + MAX_NODES * NODE_BYTES;

/// Largest number of frames.
pub(crate) const MAX_FRAMES: u64 = 1 << 28;

/// Address space in bytes. Only what is touched takes memory.
const ARENA_BYTES: usize = FRAMES + MAX_FRAMES as usize * LINE_BYTES;

/// Cache lines of the arena.
pub(crate) const NR_LINES: usize = ARENA_BYTES / LINE_BYTES;

/// Sizes are powers of two, from that of a line.
const NR_CLASSES: usize = 40;

/// Where the arena is, or 0 before it is reserved. It stays for the life of the process.
static BASE: AtomicUsize = AtomicUsize::new(0);

static HEAP: Mutex<Heap> = Mutex::new(Heap { end: 0, free: [0; NR_CLASSES], nr_live: 0 });

/// One model runs at a time.
static IN_USE: Mutex<()> = Mutex::new(());

thread_local! {
    static IS_IN_ARENA: Cell<bool> = const { Cell::new(false) };
}

/// Offsets, of which 0 means none: the first line is never handed out.
struct Heap {
    /// Behind the last allocation.
    end: usize,
    /// For each class the first free block, which has the offset of the next in its first word.
    free: [usize; NR_CLASSES],
    nr_live: usize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The global allocator of a program that runs the model.
#[derive(Debug)]
pub struct Allocator;

fn class_of(layout: Layout) -> usize {
    let size = layout.size().max(layout.align()).max(LINE_BYTES);
    size.next_power_of_two().trailing_zeros() as usize
}

/// The offset of an address in the heap of the arena.
fn heap_offset(address: usize) -> Option<usize> {
    // Relaxed: an address in the arena was got from it, so its base was there before.
    let offset = address.wrapping_sub(BASE.load(Ordering::Relaxed));
    (BASE.load(Ordering::Relaxed) != 0 && offset < HEAP_BYTES).then_some(offset)
}

/// A block for `layout`, and whether it was never used. Null without room.
fn allocate(layout: Layout) -> (*mut u8, bool) {
    let class = class_of(layout);
    if class >= NR_CLASSES {
        return (ptr::null_mut(), false);
    }
    let base = BASE.load(Ordering::Relaxed);
    let mut heap = lock(&HEAP);
    let (offset, is_new) = match heap.free[class] {
        0 => {
            let size = 1 << class;
            let begin = heap.end.next_multiple_of(size).max(size.min(4096));
            if begin + size > HEAP_BYTES {
                return (ptr::null_mut(), false);
            }
            heap.end = begin + size;
            (begin, true)
        }
        offset => {
            // SAFETY: a free block of the arena, which has the next one's offset in its first word.
            heap.free[class] = unsafe { ptr::with_exposed_provenance::<usize>(base + offset).read() };
            (offset, false)
        }
    };
    heap.nr_live += 1;
    (ptr::with_exposed_provenance_mut(base + offset), is_new)
}

/// Whether the arena serves the calling thread with `layout`: it is aligned to a page, and not to
/// more.
fn is_for_arena(layout: Layout) -> bool {
    IS_IN_ARENA.get() && layout.align() <= 4096
}

// SAFETY: a block of the arena is aligned to the size of its class or to 4096, and so to the
// layout's alignment, which is 4096 at most, and has its size at least; no block is handed out
// twice before it is freed. An address decides alone which of both allocators it came from.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_for_arena(layout) {
            return allocate(layout).0;
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_for_arena(layout) {
            let (block, is_new) = allocate(layout);
            if !is_new && !block.is_null() {
                // SAFETY: the block has this size at least.
                unsafe { block.write_bytes(0, layout.size()) };
            }
            return block;
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match heap_offset(block.expose_provenance()) {
            Some(offset) => {
                let class = class_of(layout);
                let mut heap = lock(&HEAP);
                // SAFETY: the block is the caller's to free, and as large as a word at least.
                unsafe { block.cast::<usize>().write(heap.free[class]) };
                heap.free[class] = offset;
                heap.nr_live -= 1;
            }
            // SAFETY: it is not the arena's, so it is the system's; as the caller promises.
            None => unsafe { System.dealloc(block, layout) },
        }
    }
}

/// The arena, empty, for one run of a model.
#[derive(Debug)]
pub(crate) struct Arena {
    _in_use: MutexGuard<'static, ()>,
}

/// While it lives, the thread allocates in the arena.
#[derive(Debug)]
pub(crate) struct InArena(bool);

impl InArena {
    pub(crate) fn enter() -> InArena {
        InArena(IS_IN_ARENA.replace(true))
    }
}

impl Drop for InArena {
    fn drop(&mut self) {
        IS_IN_ARENA.set(self.0);
    }
}

/// Reserves address space that takes memory only where it is touched, and is zero there.
pub(crate) fn reserve(size_bytes: usize) -> Result<usize, ModelError> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping, wherever the system has room.
    let memory = unsafe { mmap_anonymous(ptr::null_mut(), size_bytes, ProtFlags::READ | ProtFlags::WRITE, flags) };
    Ok(memory.map_err(|source| ModelError::NoAddressSpace { size_bytes, source: source.into() })?.expose_provenance())
}

impl Arena {
    /// Waits for the model that runs, if there is one, and empties the arena.
    ///
    /// # Errors
    /// [`ModelError`]: the system has no address space.
    pub(crate) fn claim() -> Result<Arena, ModelError> {
        let in_use = lock(&IN_USE);
        // Relaxed, here and in `allocate`: written once, under the lock, before any use.
        let mut base = BASE.load(Ordering::Relaxed);
        if base == 0 {
            base = reserve(ARENA_BYTES)?;
            BASE.store(base, Ordering::Relaxed);
        }
        let mut heap = lock(&HEAP);
        // What a run leaves behind is a value that it has returned. The arena is used on behind it,
        // and the numbers of lines are not those of a first run.
        if heap.nr_live == 0 {
            // SAFETY: nothing is live in the arena. From now on it reads as zeroes.
            let emptied =
                unsafe { madvise(ptr::with_exposed_provenance_mut(base), ARENA_BYTES, Advice::LinuxDontNeed) };
            emptied.map_err(|source| ModelError::NoAddressSpace { size_bytes: ARENA_BYTES, source: source.into() })?;
            *heap = Heap { end: 0, free: [0; NR_CLASSES], nr_live: 0 };
        }
        Ok(Arena { _in_use: in_use })
    }

    /// Whether the program's global allocator serves from the arena.
    pub(crate) fn is_used() -> bool {
        let in_arena = InArena::enter();
        let probe = Box::new(0_u64);
        drop(in_arena);
        heap_offset(std::hint::black_box(&raw const *probe).expose_provenance()).is_some()
    }

    /// Whether nothing is allocated.
    pub(crate) fn is_empty() -> bool {
        lock(&HEAP).nr_live == 0
    }
}

/// The cache line of `address`; `None` outside of the arena.
#[inline]
pub(crate) fn line_of(address: usize) -> Option<u32> {
    let offset = address.wrapping_sub(BASE.load(Ordering::Relaxed));
    if offset < ARENA_BYTES { u32::try_from(offset / LINE_BYTES).ok() } else { None }
}

/// The node of a line of page-table pages; `None` for lines of the heap.
#[inline]
pub(crate) fn table_node_of_line(line: u32) -> Option<u8> {
    let offset = (line as usize * LINE_BYTES).checked_sub(HEAP_BYTES)?;
    if offset < MAX_NODES * NODE_BYTES { u8::try_from(offset / NODE_BYTES).ok() } else { None }
}

/// The address of the line for a frame. There is no memory that anything reads.
pub(crate) fn frame_address(frame: u64) -> usize {
    debug_assert!(frame < MAX_FRAMES, "frame {frame} is too high");
    BASE.load(Ordering::Relaxed) + FRAMES + frame as usize * LINE_BYTES
}

/// The page-table page number `index` of `node`, as an offset in the arena; `None` without room.
pub(crate) fn table_offset(node: usize, index: usize) -> Option<usize> {
    let offset = index.checked_mul(4096).filter(|&offset| offset < NODE_BYTES)?;
    Some(HEAP_BYTES + node * NODE_BYTES + offset)
}

/// The node of the page-table page at `offset`.
pub(crate) fn node_of_table(offset: usize) -> usize {
    (offset - HEAP_BYTES) / NODE_BYTES
}

/// The pointer to the page-table page at `offset`.
pub(crate) fn table_ptr(offset: usize) -> *mut u8 {
    ptr::with_exposed_provenance_mut(table_address(offset))
}

/// The word at `offset`, of a page-table page.
pub(crate) fn table_word(offset: usize) -> &'static AtomicU64 {
    assert!(offset.is_multiple_of(size_of::<u64>()), "no word begins at offset {offset:#x}");
    let word = ptr::with_exposed_provenance_mut::<u64>(table_address(offset));
    // SAFETY: in the region of page-table pages, which stays for the life of the process once it is
    // reserved, and which is accessed by atomics alone.
    unsafe { AtomicU64::from_ptr(word) }
}

fn table_address(offset: usize) -> usize {
    let base = BASE.load(Ordering::Relaxed);
    assert!(base != 0 && (HEAP_BYTES..FRAMES).contains(&offset), "offset {offset:#x} is of no page-table page");
    base + offset
}
