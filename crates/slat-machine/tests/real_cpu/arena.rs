//! The memory of the real CPU's machine, and the engine's [`Host`] over it.
//!
//! One sparse mapping, the *arena*, is all of the machine's physical memory. It begins at [`BASE`],
//! so that no offset and no pointer is a physical address by chance. Its first part holds the page
//! tables; the tests allocate frames from [`FRAMES`] on.

#![expect(unsafe_code, reason = "the promise of the trait Host")]

use core::alloc::Layout;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rustix::mm::MapFlags;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Gfn, GfnRange, Host, Hpa, PAGE_SIZE, PageSize, Pfn};
use slat_pager::linux::mapping::MappedMemory;

/// Physical address of the arena's first byte: a multiple of 1 GiB, so that blocks of each page
/// size fit.
pub const BASE: u64 = 4 << 30;
/// Size of the arena in bytes: 1 GiB for page tables and small frames, then a frame of 1 GiB.
pub const SIZE_BYTES: u64 = 2 << 30;
/// First physical address of the tests' frames; below are the page tables.
pub const FRAMES: u64 = BASE + TABLES_BYTES;
/// Room for page tables.
const TABLES_BYTES: u64 = 16 << 20;

/// The contents of freed page-table pages: no PTE of it is present.
const POISON: u64 = 0x5a5a_5a5a_5a5a_5a5a;

/// The machine's physical memory.
#[derive(Debug)]
pub struct Arena(MappedMemory);

impl Arena {
    /// Maps it; memory is taken page by page as it is touched.
    pub fn new() -> io::Result<Arena> {
        let memory = MappedMemory::anonymous(SIZE_BYTES, MapFlags::NORESERVE)?;
        // Else each page that is touched could take 2 MiB.
        memory.without_huge_pages();
        Ok(Arena(memory))
    }

    /// The pointer to physical address `hpa`.
    pub fn pointer(&self, hpa: Hpa) -> *mut u8 {
        let offset_bytes = hpa.0.wrapping_sub(BASE);
        assert!(offset_bytes < SIZE_BYTES, "{hpa} is not in the arena");
        self.0.at(offset_bytes)
    }

    /// The 8 bytes at `hpa`, a multiple of 8.
    pub fn word(&self, hpa: Hpa) -> &AtomicU64 {
        self.0.word(hpa.0.wrapping_sub(BASE)).unwrap_or_else(|| panic!("{hpa} is no word of the arena"))
    }

    /// Reads the word at `hpa`. The CPU does not run now, or this thread runs it: no order is
    /// needed.
    pub fn get(&self, hpa: Hpa) -> u64 {
        self.word(hpa).load(Ordering::Relaxed)
    }

    /// Writes the word at `hpa`.
    pub fn set(&self, hpa: Hpa, value: u64) {
        self.word(hpa).store(value, Ordering::Relaxed);
    }

    /// Copies `bytes` to `hpa`, a multiple of 8; the last word is filled up with zeroes.
    pub fn copy(&self, hpa: Hpa, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.set(Hpa(hpa.0 + 8 * index as u64), u64::from_le_bytes(word));
        }
    }
}

/// The memory of a memslot: contiguous frames of the arena.
#[derive(Debug)]
pub struct Frames {
    pub first: Pfn,
    pub nr_pages: u64,
    pub max_size: PageSize,
    /// Whether a read is resolved to a frame that may be written.
    pub read_gives_writable: AtomicBool,
}

impl Frames {
    /// Frames from the physical address `first` on.
    pub fn new(first: Hpa, nr_pages: u64, max_size: PageSize) -> Arc<Frames> {
        assert!(first.0 >= FRAMES && first.0 + (nr_pages << Gfn::SHIFT) <= BASE + SIZE_BYTES);
        Arc::new(Frames { first: first.pfn(), nr_pages, max_size, read_gives_writable: AtomicBool::new(true) })
    }

    /// Physical address of page `page`.
    pub fn page(&self, page: u64) -> Hpa {
        Pfn(self.first.0 + page).hpa()
    }
}

/// The engine's host.
#[derive(Debug)]
pub struct ArenaHost {
    arena: Arc<Arena>,
    tables: Mutex<Tables>,
    /// The engine has requested a flush, and the CPU has not entered the guest since: it flushes
    /// before it does.
    flush_pending: AtomicBool,
    start: Instant,
}

#[derive(Debug, Default)]
struct Tables {
    nr_used: u64,
    free: Vec<Hpa>,
}

impl ArenaHost {
    pub fn new(arena: &Arc<Arena>) -> ArenaHost {
        ArenaHost {
            arena: Arc::clone(arena),
            tables: Mutex::default(),
            flush_pending: AtomicBool::new(false),
            start: Instant::now(),
        }
    }

    /// Whether the engine has requested a flush since the last call.
    pub fn take_pending_flush(&self) -> bool {
        self.flush_pending.swap(false, Ordering::Relaxed)
    }
}

// The default locking is `None`, which never parks.
// SAFETY: page-table pages are disjoint pages of the arena, which lives as long as the host, at the
// pointer of their address; a page keeps its frame for ever. The one CPU does not run during a
// flush: the thread that calls the engine runs it, and it flushes before it enters the guest again
// (`World::access`). Nothing unwinds except on an error of a test.
unsafe impl Host for ArenaHost {
    type Backing = Arc<Frames>;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        if layout.size() as u64 != PAGE_SIZE || layout.align() as u64 > PAGE_SIZE {
            return None;
        }
        let mut tables = self.tables.lock();
        if let Some(table) = tables.free.pop() {
            return Some(table);
        }
        if (tables.nr_used + 1) << Gfn::SHIFT > TABLES_BYTES {
            return None;
        }
        tables.nr_used += 1;
        Some(Hpa(BASE + ((tables.nr_used - 1) << Gfn::SHIFT)))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // A CPU that still walks it is detected: it faults where the software walker does not.
        for offset in (0..layout.size() as u64).step_by(8) {
            self.arena.set(Hpa(table.0 + offset), POISON);
        }
        self.tables.lock().free.push(table);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.arena.pointer(table)
    }

    fn resolve(&self, frames: &Arc<Frames>, _gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        if page >= frames.nr_pages {
            return Err(Unresolved::Gone);
        }
        let writable = access == Access::Write || frames.read_gives_writable.load(Ordering::Relaxed);
        Ok(Resolved { writable, ..Resolved::memory(Pfn(frames.first.0 + page), frames.max_size) })
    }

    fn flush(&self, _ranges: &[GfnRange]) {
        self.flush_pending.store(true, Ordering::Relaxed);
    }

    fn timestamp_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}
