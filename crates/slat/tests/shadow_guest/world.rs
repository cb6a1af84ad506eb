//! The world of one program: host memory for page-table pages and frames, the memslots in which the
//! guest finds the frames, and the engine's host over both. All of it is a few MiB, so that
//! everything collides.
//!
//! Host-physical addresses are no pointers. Each frame has an owner, the guest frame that it
//! belongs to at this moment. A CPU that reaches a frame without an owner has kept a translation
//! that was zapped. Each page-table page is marked live or not. A CPU that walks one that is not
//! live has followed a stale PTE.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};

use slat::baselines::Park;
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{Access, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize, Pfn};

use super::futex_park::FutexPark;

/// Words of 8 bytes in a page.
pub const WORDS: usize = 512;
/// Guest frames have numbers below this.
pub const NR_GFNS: usize = 1280;
/// The memslots: first guest frame, and how many.
pub const SLOTS: [(u64, u64); 3] = [(0, 512), (512, 256), (1024, 64)];
/// The other place of the last memslot.
pub const OTHER_PLACE: u64 = 1152;

const NR_FRAMES: usize = 1024;
const FIRST_PFN: u64 = 0x10_0000;
const NR_TABLES: usize = 6144;
const FIRST_TABLE: u64 = 0x40_0000_0000;
const NO_OWNER: u32 = u32::MAX;

/// The contents of a freed page-table page, and of a freed frame: no PTE has this value.
const POISON: u64 = 0x5a5a_5a5a_5a5a_5a5a;

#[repr(C, align(4096))]
struct Page([AtomicU64; WORDS]);

/// Pages of zeroes.
struct Pages {
    first: *mut Page,
    nr_pages: usize,
}

// SAFETY: memory of its own, of atomics.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn new(nr_pages: usize) -> Pages {
        let layout = Layout::array::<Page>(nr_pages).unwrap();
        // SAFETY: the layout is not of size zero.
        let first = unsafe { alloc_zeroed(layout) }.cast::<Page>();
        assert!(!first.is_null());
        Pages { first, nr_pages }
    }

    fn page(&self, index: usize) -> &Page {
        assert!(index < self.nr_pages);
        // SAFETY: inside the allocation, which was zeroed; it lives as long as `self`.
        unsafe { &*self.first.add(index) }
    }

    fn fill(&self, index: usize, value: u64) {
        self.page(index).0.iter().for_each(|word| word.store(value, Ordering::SeqCst));
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.first.cast(), Layout::array::<Page>(self.nr_pages).unwrap()) }
    }
}

/// The frames of a memslot's pages, by their indices.
#[derive(Debug)]
pub struct Backing {
    frames: Mutex<Vec<u32>>,
    /// Whether blocks of 2 MiB may be mapped as such.
    has_huge_pages: bool,
}

/// See the module.
pub struct World {
    frames: Pages,
    /// The guest frame that each frame belongs to.
    owners: Box<[AtomicU32]>,
    free_frames: Mutex<Vec<u32>>,
    /// The frame of each guest frame.
    frame_of: Box<[AtomicU32]>,
    tables: Pages,
    live: Box<[AtomicBool]>,
    free_tables: Mutex<Vec<u32>>,
    nr_live_tables: AtomicUsize,
    /// Allocations of page-table pages that still succeed; negative: all do.
    allocations_left: AtomicI64,
    /// Calls of [`Host::flush`]. A CPU that has observed fewer drops all that it has cached.
    flushes: AtomicU64,
    /// Held shared by an access from its look into the TLB to its effect; a flush waits for those.
    pub gate: RwLock<()>,
}

impl World {
    pub fn new() -> World {
        World {
            frames: Pages::new(NR_FRAMES),
            owners: (0..NR_FRAMES).map(|_| AtomicU32::new(NO_OWNER)).collect(),
            free_frames: Mutex::new((0..NR_FRAMES as u32).rev().collect()),
            frame_of: (0..NR_GFNS).map(|_| AtomicU32::new(NO_OWNER)).collect(),
            tables: Pages::new(NR_TABLES),
            live: (0..NR_TABLES).map(|_| AtomicBool::new(false)).collect(),
            free_tables: Mutex::new((0..NR_TABLES as u32).rev().collect()),
            nr_live_tables: AtomicUsize::new(0),
            allocations_left: AtomicI64::new(-1),
            flushes: AtomicU64::new(0),
            gate: RwLock::new(()),
        }
    }

    /// Assigns contiguous frames to memslot `slot`, and returns its region. Its pages keep their
    /// contents.
    pub fn region(
        &self,
        slot: usize,
        flags: MemoryRegionFlags,
        has_huge_pages: bool,
        contents: Option<&[u64]>,
    ) -> MemoryRegion<Arc<Backing>> {
        let (first_gfn, nr_pages) = SLOTS[slot];
        let frames: Vec<u32> = (0..nr_pages).map(|_| self.free_frames.lock().unwrap().pop().unwrap()).collect();
        for (page, &frame) in frames.iter().enumerate() {
            self.frames.fill(frame as usize, 0);
            if let Some(contents) = contents {
                let words = &contents[page * WORDS..(page + 1) * WORDS];
                let frame = self.frames.page(frame as usize);
                frame.0.iter().zip(words).for_each(|(word, &value)| word.store(value, Ordering::SeqCst));
            }
        }
        self.place(first_gfn, &frames);
        MemoryRegion {
            slot: slot as u32,
            flags,
            guest_phys_addr: Gfn(first_gfn).gpa(),
            memory_size: nr_pages * PAGE_SIZE,
            backing: Some(Arc::new(Backing { frames: Mutex::new(frames), has_huge_pages })),
            userfault_bitmap: None,
        }
    }

    /// A backing that has no frames.
    pub fn empty_backing(&self) -> Arc<Backing> {
        Arc::new(Backing { frames: Mutex::default(), has_huge_pages: false })
    }

    fn place(&self, first_gfn: u64, frames: &[u32]) {
        for (gfn, &frame) in (first_gfn..).zip(frames) {
            self.frame_of[gfn as usize].store(frame, Ordering::SeqCst);
            self.owners[frame as usize].store(gfn as u32, Ordering::SeqCst);
        }
    }

    /// Frees the frames of a memslot that lies at `first_gfn`, once the engine has zapped it.
    pub fn free_frames_of(&self, first_gfn: u64, nr_pages: u64) {
        for gfn in first_gfn..first_gfn + nr_pages {
            let frame = self.frame_of[gfn as usize].swap(NO_OWNER, Ordering::SeqCst);
            self.free(frame);
        }
    }

    fn free(&self, frame: u32) {
        self.owners[frame as usize].store(NO_OWNER, Ordering::SeqCst);
        self.frames.fill(frame as usize, POISON);
        // Not the next to be used.
        self.free_frames.lock().unwrap().insert(0, frame);
    }

    /// A memslot has moved.
    pub fn move_slot(&self, from: u64, to: u64, nr_pages: u64) {
        let frames: Vec<u32> =
            (from..from + nr_pages).map(|gfn| self.frame_of[gfn as usize].swap(NO_OWNER, Ordering::SeqCst)).collect();
        self.place(to, &frames);
    }

    /// Moves an invalidated page to another frame, if there is one. The old one is poisoned.
    pub fn move_frame(&self, backing: &Backing, page: usize, gfn: u64) {
        let _no_access = self.gate.write().unwrap();
        let Some(new) = self.free_frames.lock().unwrap().pop() else { return };
        let mut frames = backing.frames.lock().unwrap();
        let old = std::mem::replace(&mut frames[page], new);
        for (to, from) in self.frames.page(new as usize).0.iter().zip(&self.frames.page(old as usize).0) {
            to.store(from.load(Ordering::SeqCst), Ordering::SeqCst);
        }
        self.frame_of[gfn as usize].store(new, Ordering::SeqCst);
        self.owners[new as usize].store(gfn as u32, Ordering::SeqCst);
        self.free(old);
    }

    /// The word of the guest's memory that holds the byte at `gpa`, if there is memory.
    pub fn word(&self, gpa: u64) -> Option<&AtomicU64> {
        let frame = self.frame_of.get((gpa >> 12) as usize)?.load(Ordering::SeqCst);
        (frame != NO_OWNER).then(|| &self.frames.page(frame as usize).0[(gpa >> 3) as usize % WORDS])
    }

    /// The guest-physical address that belongs to `hpa`.
    pub fn gpa_of(&self, hpa: Hpa) -> Option<u64> {
        let index = hpa.pfn().0.checked_sub(FIRST_PFN)? as usize;
        let owner = self.owners.get(index)?.load(Ordering::SeqCst);
        (owner != NO_OWNER).then(|| (u64::from(owner) << 12) | (hpa.0 & 0xfff))
    }

    /// A PTE, for a CPU that walks it.
    pub fn table_entry(&self, table: Hpa, index: usize) -> &AtomicU64 {
        let number = table.0.wrapping_sub(FIRST_TABLE) / PAGE_SIZE;
        let is_live = self.live.get(number as usize).is_some_and(|live| live.load(Ordering::SeqCst));
        assert!(is_live, "a CPU walks {table}, which is not live");
        &self.tables.page(number as usize).0[index]
    }

    pub fn nr_live_tables(&self) -> usize {
        self.nr_live_tables.load(Ordering::SeqCst)
    }

    /// Lets `n` more allocations of page-table pages succeed, then none; all, if it is negative.
    pub fn fail_after(&self, n: i64) {
        self.allocations_left.store(n, Ordering::SeqCst);
    }

    /// Whether allocations fail, or will.
    pub fn is_failing(&self) -> bool {
        self.allocations_left.load(Ordering::SeqCst) >= 0
    }

    pub fn nr_flushes(&self) -> u64 {
        self.flushes.load(Ordering::SeqCst)
    }
}

// SAFETY: page-table pages belong to the world, and each is allocated once until it is freed. CPUs
// drop all that they cache before `flush` returns. Frames change only while their pages are
// invalidated.
unsafe impl Host for World {
    type Backing = Arc<Backing>;

    fn allocate_table(&self, layout: Layout, _node: TableNode, _wait: AllocationWait) -> Option<Hpa> {
        assert!(layout.size() == PAGE_SIZE as usize && layout.align() <= PAGE_SIZE as usize);
        match self.allocations_left.load(Ordering::SeqCst) {
            0 => return None,
            left if left > 0 => self.allocations_left.store(left - 1, Ordering::SeqCst),
            _ => {}
        }
        let table = self.free_tables.lock().unwrap().pop()?;
        // Garbage, so that no code relies on zeroes.
        self.tables.fill(table as usize, 0xa5a5_a5a5_a5a5_a5a5);
        self.live[table as usize].store(true, Ordering::SeqCst);
        self.nr_live_tables.fetch_add(1, Ordering::SeqCst);
        Some(Hpa(FIRST_TABLE + u64::from(table) * PAGE_SIZE))
    }

    unsafe fn free_table(&self, table: Hpa, _layout: Layout) {
        let number = (table.0 - FIRST_TABLE) / PAGE_SIZE;
        assert!(self.live[number as usize].swap(false, Ordering::SeqCst), "{table} is freed, and is not live");
        self.tables.fill(number as usize, POISON);
        self.free_tables.lock().unwrap().push(number as u32);
        self.nr_live_tables.fetch_sub(1, Ordering::SeqCst);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        let number = (table.0 - FIRST_TABLE) / PAGE_SIZE;
        std::ptr::from_ref(self.tables.page(number as usize)).cast_mut().cast()
    }

    fn resolve(&self, backing: &Self::Backing, _gfn: Gfn, page: u64, _access: Access) -> Result<Resolved, Unresolved> {
        let frames = backing.frames.lock().unwrap();
        let frame = *frames.get(page as usize).ok_or(Unresolved::Gone)?;
        let first = page as usize & !(WORDS - 1);
        let is_huge = backing.has_huge_pages
            && frames.len() >= first + WORDS
            && frames[first].is_multiple_of(WORDS as u32)
            && (frames[first]..).zip(&frames[first..first + WORDS]).all(|(expected, &frame)| expected == frame);
        let max_size = if is_huge { PageSize::Size2M } else { PageSize::Size4K };
        Ok(Resolved::memory(Pfn(FIRST_PFN + u64::from(frame)), max_size))
    }

    fn flush(&self, _ranges: &[GfnRange]) {
        let _no_access = self.gate.write().unwrap();
        self.flushes.fetch_add(1, Ordering::SeqCst);
    }

    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        let index = frame.0.checked_sub(FIRST_PFN)? as usize;
        assert_ne!(self.owners[index].load(Ordering::SeqCst), NO_OWNER, "{frame} is not of the guest any more");
        Some(std::ptr::from_ref(self.frames.page(index)).cast_mut().cast())
    }

    fn yield_now(&self) {
        std::thread::yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }

    fn parking(&self) -> Option<&dyn Park> {
        Some(&FutexPark)
    }
}

/// The range of one guest frame.
pub fn page_range(gfn: u64) -> GfnRange {
    GfnRange::new(Gpa(gfn << 12).gfn(), 1)
}
