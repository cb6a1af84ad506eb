//! The machine's memory: one allocator for what Rust allocates, for page-table pages and for
//! frames.
//!
//! It is a buddy system, so a block of a power of two is aligned to its size.

#![expect(unsafe_code, reason = "hands memory to the allocator")]

use core::alloc::{GlobalAlloc, Layout};
use core::ptr::{self, NonNull};

use buddy_system_allocator::Heap;
use spin::Mutex;

use crate::arch::USABLE;
use crate::boot::{BootInfo, RegionKind, Span, image};

/// The smallest block is 8 bytes, the largest 2 GiB.
const ORDERS: usize = 32;

/// The allocator of the whole image.
pub struct Memory(Mutex<Heap<ORDERS>>);

impl Memory {
    /// An allocator without memory.
    pub const fn new() -> Memory {
        Memory(Mutex::new(Heap::empty()))
    }

    /// Adds what the memory map has as free, as far as whole pages go, except the image, the
    /// modules, and what is the firmware's all the same.
    ///
    /// # Safety
    /// To be called once, before anything is allocated. The memory map is true, and nothing else
    /// uses its free memory.
    pub unsafe fn add(&self, boot: &BootInfo) {
        let ram = boot.regions().filter(|region| region.kind == RegionKind::Ram);
        for span in ram.map(|region| region.span.and(USABLE)).filter(|span| span.size_bytes() != 0) {
            // Within `USABLE`: neither end wraps.
            let span = Span { start: span.start.next_multiple_of(0x1000), end: span.end & !0xfff };
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

    /// Adds `span`, except for the `used` spans.
    ///
    /// # Safety
    /// The rest of `span` is free memory: it was not added before, and nothing else uses it. No span
    /// of `used` ends before it begins.
    unsafe fn add_span<I: Iterator<Item = Span> + Clone>(&self, span: Span, mut used: I) {
        if span.size_bytes() == 0 {
            return;
        }
        let Some(first) = used.next() else {
            // SAFETY: as the caller promises.
            return unsafe { self.0.lock().add_to_heap(span.start as usize, span.end as usize) };
        };
        for part in span.without(first) {
            // SAFETY: the parts lie in `span`, outside of `first`, and do not overlap.
            unsafe { self.add_span(part, used.clone()) };
        }
    }

    /// Bytes that are free.
    pub fn free_bytes(&self) -> usize {
        let heap = self.0.lock();
        heap.stats_total_bytes() - heap.stats_alloc_actual()
    }
}

impl Default for Memory {
    fn default() -> Memory {
        Memory::new()
    }
}

/// The pages of a text: loaders put texts behind the image.
fn pages_of(text: &str) -> Span {
    let start = text.as_ptr().addr() as u64;
    Span { start, end: start + text.len() as u64 + 1 }.pages()
}

// SAFETY: the heap returns blocks of the layout that nothing else uses, or nothing.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.0.lock().alloc(layout).map_or(ptr::null_mut(), NonNull::as_ptr)
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if let Some(block) = NonNull::new(block) {
            // SAFETY: as the caller promises.
            unsafe { self.0.lock().dealloc(block, layout) };
        }
    }
}
