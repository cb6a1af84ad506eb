//! The machine's memory: a heap for each NUMA node, for what Rust allocates, for page-table pages
//! and for frames.
//!
//! # Guarantees
//! An allocation comes from the node that it asks for, or from another one if that has no block
//! which is large enough. Such allocations are counted ([`Memory::nr_elsewhere`]). What Rust
//! allocates asks for the node of the calling CPU. Each heap is a buddy system, so a block of a
//! power of two is aligned to its size.
//!
//! # Use
//! The image has [`MEMORY`], and its global allocator is [`ImageAllocator`]. `allocate` is for
//! page-table pages and frames; what it returns goes back to the global allocator.

#![expect(unsafe_code, reason = "hands memory to the allocator")]

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU64, Ordering};

use buddy_system_allocator::Heap;
use slat::{NodeId, PAGE_SIZE, Pfn};
use spin::{Mutex, Once};

use crate::arch::{self, USABLE};
use crate::boot::{BootInfo, RegionKind, Span, image};
use crate::nodes::{MAX_NODES, Nodes};

/// The smallest block is 8 bytes, the largest 2 GiB.
const ORDERS: usize = 32;

/// Memory by nodes.
pub struct Memory {
    nodes: Once<Nodes>,
    heaps: [Mutex<Heap<ORDERS>>; MAX_NODES],
    nr_elsewhere: AtomicU64,
}

/// The memory of the image.
pub static MEMORY: Memory = Memory::new();

/// The node of machines that have no others.
static ONE: Nodes = Nodes::ONE;

impl Memory {
    /// Without memory, on one node.
    pub const fn new() -> Memory {
        let heaps = [const { Mutex::new(Heap::empty()) }; MAX_NODES];
        Memory { nodes: Once::new(), heaps, nr_elsewhere: AtomicU64::new(0) }
    }

    /// Adds what the memory map has as free, as far as whole pages go, except the image, the
    /// modules, and what is the firmware's all the same.
    ///
    /// # Safety
    /// To be called once, before anything is allocated. The memory map is true, and nothing else
    /// uses its free memory.
    pub unsafe fn add(&self, boot: &BootInfo) {
        self.nodes.call_once(|| boot.nodes.clone());
        let ram = boot.regions().filter(|region| region.kind == RegionKind::Ram);
        for span in ram.map(|region| region.span.and(USABLE)).filter(|span| span.size_bytes() != 0) {
            let used = boot.modules().map(|module| {
                let start = module.bytes.as_ptr().addr() as u64;
                Span { start, end: start + module.bytes.len() as u64 }.pages()
            });
            let texts = boot.modules().map(|module| pages_of(module.text));
            let firmware = boot.regions().filter(|region| region.kind == RegionKind::Firmware);
            let firmware = firmware.map(|region| region.span.pages());
            let used = used.chain(texts).chain(firmware).chain([image(), pages_of(boot.command_line)]);
            // SAFETY: the memory map is true, as the caller promises, and `used` has all that is in use.
            unsafe { self.add_span(span, used) };
        }
    }

    /// Adds the pages of `span`, each to the heap of its node, except for the `used` spans.
    ///
    /// # Safety
    /// The rest of `span` is free memory: it was not added before, and nothing else uses it. No span
    /// of `used` ends before it begins.
    unsafe fn add_span<I: Iterator<Item = Span> + Clone>(&self, span: Span, mut used: I) {
        if span.size_bytes() == 0 {
            return;
        }
        let Some(first) = used.next() else {
            for (part, node) in self.nodes().parts(span) {
                // Within `USABLE`: neither end wraps.
                let (start, end) = (part.start.next_multiple_of(PAGE_SIZE), part.end & !(PAGE_SIZE - 1));
                if start < end {
                    // SAFETY: as the caller promises; the parts do not overlap.
                    unsafe { self.heaps[node.0 as usize].lock().add_to_heap(start as usize, end as usize) };
                }
            }
            return;
        };
        for part in span.without(first) {
            // SAFETY: the parts lie in `span`, outside of `first`, and do not overlap.
            unsafe { self.add_span(part, used.clone()) };
        }
    }

    /// The nodes.
    pub fn nodes(&self) -> &Nodes {
        self.nodes.get().unwrap_or(&ONE)
    }

    /// Bytes that are free.
    pub fn free_bytes(&self) -> usize {
        self.heaps.iter().map(free_bytes).sum()
    }

    /// Bytes that are free on `node`.
    pub fn free_bytes_on(&self, node: NodeId) -> usize {
        self.heaps.get(node.0 as usize).map_or(0, free_bytes)
    }

    /// Allocations that came from another node than they asked for, because that had no memory.
    pub fn nr_elsewhere(&self) -> u64 {
        self.nr_elsewhere.load(Ordering::Relaxed)
    }

    /// A block on `node`, or on the next one that has such a block.
    fn allocate(&self, layout: Layout, node: NodeId) -> Option<NonNull<u8>> {
        let (nr, first) = (self.nodes().nr(), node.0 as usize);
        let found = (0..nr).find_map(|next| {
            let block = self.heaps[(first + next) % nr].lock().alloc(layout).ok()?;
            Some((next, block))
        });
        let (next, block) = found?;
        if next != 0 || first >= nr {
            self.nr_elsewhere.fetch_add(1, Ordering::Relaxed);
        }
        Some(block)
    }

    /// Frees a block.
    ///
    /// # Safety
    /// `allocate` returned it for this layout, and nothing uses it any more.
    unsafe fn free(&self, block: NonNull<u8>, layout: Layout) {
        let node = self.nodes().of_memory(block.addr().get() as u64);
        // SAFETY: a block of the heap of its node, as the caller promises: no block is on two nodes.
        unsafe { self.heaps[node.0 as usize].lock().dealloc(block, layout) };
    }
}

impl Default for Memory {
    fn default() -> Memory {
        Memory::new()
    }
}

fn free_bytes(heap: &Mutex<Heap<ORDERS>>) -> usize {
    let heap = heap.lock();
    heap.stats_total_bytes() - heap.stats_alloc_actual()
}

/// The pages of a text: loaders put texts behind the image.
fn pages_of(text: &str) -> Span {
    let start = text.as_ptr().addr() as u64;
    Span { start, end: start + text.len() as u64 + 1 }.pages()
}

/// The node of the calling CPU.
pub fn own_node() -> NodeId {
    match MEMORY.nodes() {
        // Where all CPUs are on one, none has to know its number.
        nodes if nodes.nr() == 1 => NodeId(0),
        nodes => nodes.of_cpu(arch::cpu_number()),
    }
}

/// The node of a frame.
pub fn node_of(frame: Pfn) -> NodeId {
    MEMORY.nodes().of_memory(frame.0 * PAGE_SIZE)
}

/// A block of memory on `node`, or on another one if that has none; or null. It goes back to the
/// global allocator.
///
/// # Safety
/// The layout has a size.
pub(crate) unsafe fn allocate(layout: Layout, node: NodeId) -> *mut u8 {
    if MEMORY.nodes().nr() == 1 {
        // Also on the host of a test, which has an allocator of its own.
        // SAFETY: as the caller promises.
        return unsafe { alloc::alloc::alloc(layout) };
    }
    // Only an image has nodes, and there this is the global allocator's memory.
    MEMORY.allocate(layout, node).map_or(ptr::null_mut(), NonNull::as_ptr)
}

/// The global allocator of the image, on [`MEMORY`]. A CPU allocates nothing before it knows its
/// number.
#[derive(Clone, Copy, Debug)]
pub struct ImageAllocator;

// SAFETY: the heaps return blocks of the layout that nothing else uses, or nothing.
unsafe impl GlobalAlloc for ImageAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MEMORY.allocate(layout, own_node()).map_or(ptr::null_mut(), NonNull::as_ptr)
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if let Some(block) = NonNull::new(block) {
            // SAFETY: as the caller promises.
            unsafe { MEMORY.free(block, layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::nodes::Affinities;

    const BYTES: usize = 1 << 20;

    /// A MiB on each of two nodes, and memory of its own that nothing else uses.
    fn two_nodes() -> (Memory, Span) {
        let layout = Layout::from_size_align(2 * BYTES, BYTES).unwrap();
        // SAFETY: the layout has a size. It is never freed.
        let start = unsafe { alloc::alloc::alloc(layout) }.expose_provenance() as u64;
        let (middle, end) = (start + BYTES as u64, start + 2 * BYTES as u64);
        let mut affinities = Affinities::default();
        affinities.add_memory(start, middle - start, 0).unwrap();
        affinities.add_memory(middle, end - middle, 1).unwrap();
        let memory = Memory::new();
        memory.nodes.call_once(|| affinities.nodes([Span { start, end }].into_iter()).unwrap());
        // The last bytes are no page, and the first ones are used.
        let used = Span { start, end: start + 1 };
        // SAFETY: allocated above.
        unsafe { memory.add_span(Span { start, end: end - 1 }, [used].into_iter()) };
        (memory, Span { start, end })
    }

    #[test]
    fn a_block_comes_from_its_node_and_then_from_another_one() {
        let (memory, span) = two_nodes();
        let page = Layout::from_size_align(4096, 4096).unwrap();
        let nr_pages = BYTES / 4096 - 1;
        assert_eq!([0, 1].map(|node| memory.free_bytes_on(NodeId(node))), [nr_pages * 4096; 2]);
        let take = |node| memory.allocate(page, NodeId(node));
        let node_of = |block: NonNull<u8>| memory.nodes().of_memory(block.addr().get() as u64).0;
        let mut blocks: Vec<_> = (0..nr_pages).map(|_| take(1).unwrap()).collect();
        assert!(blocks.iter().all(|&block| node_of(block) == 1));
        assert_eq!((memory.nr_elsewhere(), memory.free_bytes_on(NodeId(1))), (0, 0));
        // Then from the other one, until that is empty, too.
        blocks.extend((0..nr_pages).map(|_| take(1).unwrap()));
        assert!(blocks[nr_pages..].iter().all(|&block| node_of(block) == 0));
        assert_eq!((memory.nr_elsewhere(), take(0), take(1)), (nr_pages as u64, None, None));
        assert!(blocks.iter().all(|block| (span.start..span.end).contains(&(block.addr().get() as u64))));
        // Each goes back to its own.
        for block in blocks {
            // SAFETY: allocated above, and not used.
            unsafe { memory.free(block, page) };
        }
        assert_eq!([0, 1].map(|node| memory.free_bytes_on(NodeId(node))), [nr_pages * 4096; 2]);
        // A node that is not there has no memory.
        assert!(take(9).is_some());
        assert_eq!(memory.nr_elsewhere(), nr_pages as u64 + 1);
    }
}
