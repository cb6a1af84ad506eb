//! A host for tests: table memory whose physical addresses are not its pointers, an allocation that fails when told to,
//! a record of flushes, frames that are numbers without memory behind them; and a reference walk.

#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use slat::{
    Access, Entry, Format, Gfn, GfnRange, Gone, Gpa, Host, Hpa, Level, MemoryRegion, MemoryRegionFlags, PageSize, Park,
    Pfn, Resolved, Vm,
};

/// Host-physical address less pointer.
pub const BIAS: u64 = 1 << 50;

/// Frames are given out by number: page n of a backing is frame `first_pfn + n`.
#[derive(Debug)]
pub struct TestBacking {
    pub first_pfn: u64,
    pub nr_pages: u64,
    pub max_size: PageSize,
    /// Whether a read is answered with a frame that may be written.
    pub read_gives_writable: AtomicBool,
    pub gone: AtomicBool,
    /// Set by drop.
    pub dropped: Arc<AtomicBool>,
}

impl TestBacking {
    pub fn new(first_pfn: u64, nr_pages: u64, max_size: PageSize) -> TestBacking {
        TestBacking {
            first_pfn,
            nr_pages,
            max_size,
            read_gives_writable: AtomicBool::new(true),
            gone: AtomicBool::new(false),
            dropped: Arc::default(),
        }
    }
}

impl Drop for TestBacking {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

#[derive(Debug)]
pub struct TestHost {
    /// Live tables: host-physical address to size.
    tables: Mutex<HashMap<u64, usize>>,
    /// Allocations that still succeed; negative: all do.
    allocations_left: AtomicI64,
    pub flushes: Mutex<Vec<Vec<GfnRange>>>,
    parked: Mutex<()>,
    wakeup: Condvar,
    start: Instant,
    pub resolves: AtomicU64,
}

impl Default for TestHost {
    fn default() -> TestHost {
        TestHost {
            tables: Mutex::default(),
            allocations_left: AtomicI64::new(-1),
            flushes: Mutex::default(),
            parked: Mutex::new(()),
            wakeup: Condvar::new(),
            start: Instant::now(),
            resolves: AtomicU64::new(0),
        }
    }
}

impl TestHost {
    /// Lets `n` more table allocations succeed, then none.
    pub fn fail_after(&self, n: i64) {
        self.allocations_left.store(n, Ordering::SeqCst);
    }

    pub fn never_fail(&self) {
        self.allocations_left.store(-1, Ordering::SeqCst);
    }

    pub fn live_tables(&self) -> usize {
        self.tables.lock().unwrap().len()
    }

    pub fn nr_flushes(&self) -> usize {
        self.flushes.lock().unwrap().len()
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        assert!(std::thread::panicking() || self.live_tables() == 0, "tables leaked");
    }
}

impl Park for TestHost {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let guard = self.parked.lock().unwrap();
        if word.load(Ordering::SeqCst) == expected {
            drop(self.wakeup.wait(guard).unwrap());
        }
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        // All sleep on one condition variable: waking all is waking the right one.
        self.unpark_all(word);
        true
    }

    fn unpark_all(&self, _word: *const AtomicU32) {
        drop(self.parked.lock().unwrap());
        self.wakeup.notify_all();
    }
}

// SAFETY: tables come from the global allocator and stay until freed; flushes are recorded, and no CPU caches anything,
// because the tests walk the tables at each access; frames are numbers.
unsafe impl Host for TestHost {
    type Backing = Arc<TestBacking>;

    fn allocate_table(&self, layout: Layout) -> Option<Hpa> {
        let left = self.allocations_left.load(Ordering::SeqCst);
        if left == 0 {
            return None;
        }
        if left > 0 {
            self.allocations_left.store(left - 1, Ordering::SeqCst);
        }
        // SAFETY: the layout is not of size zero.
        let pointer = unsafe { alloc(layout) };
        assert!(!pointer.is_null());
        // SAFETY: just allocated. Garbage, so that nobody relies on zeroes.
        unsafe { pointer.write_bytes(0xa5, layout.size()) };
        let table = pointer as u64 + BIAS;
        self.tables.lock().unwrap().insert(table, layout.size());
        Some(Hpa(table))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        let size = self.tables.lock().unwrap().remove(&table.0);
        assert_eq!(size, Some(layout.size()), "free of {table}, which is not a live table of this size");
        let pointer = self.table_ptr(table);
        // SAFETY: it was allocated with this layout and freed by nobody else (checked above). Garbage, to be noticed.
        unsafe {
            pointer.write_bytes(0x5a, layout.size());
            dealloc(pointer, layout);
        }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        (table.0 - BIAS) as *mut u8
    }

    fn resolve(&self, backing: &Self::Backing, _gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Gone> {
        self.resolves.fetch_add(1, Ordering::Relaxed);
        assert!(!backing.dropped.load(Ordering::SeqCst), "resolve in a backing that was dropped");
        if page >= backing.nr_pages || backing.gone.load(Ordering::SeqCst) {
            return Err(Gone);
        }
        let writable = access == Access::Write || backing.read_gives_writable.load(Ordering::SeqCst);
        Ok(Resolved { pfn: Pfn(backing.first_pfn + page), max_size: backing.max_size, writable })
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.flushes.lock().unwrap().push(ranges.to_vec());
    }

    fn timestamp_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }
}

/// What the tables say about an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Translation {
    /// Frame of the 4 KiB page.
    pub pfn: Pfn,
    pub level: Level,
    pub writable: bool,
    pub entry: Entry,
}

/// Address of the lowest entry for `gfn`, and its level.
pub fn lowest_entry<F: Format>(host: &TestHost, root: Hpa, gfn: Gfn) -> (*mut u64, Level) {
    let (mut table, mut level) = (root, F::ROOT_LEVEL);
    loop {
        let nr_entries = if level == F::ROOT_LEVEL { F::ROOT_ENTRIES } else { F::TABLE_ENTRIES };
        let index = (gfn.0 / level.nr_pages()) as usize % nr_entries;
        // SAFETY: inside a live table.
        let cell = unsafe { host.table_ptr(table).cast::<u64>().add(index) };
        // SAFETY: as above; atomic, because others may write.
        let entry = Entry(unsafe { AtomicU64::from_ptr(cell) }.load(Ordering::SeqCst));
        if !F::is_present(entry) || F::is_leaf(entry, level) {
            return (cell, level);
        }
        table = F::address(entry, level);
        level = Level(level.0 - 1);
    }
}

/// Walks as hardware does, for tests in which no table is freed meanwhile.
pub fn translate<F: Format>(vm: &Vm<TestHost, F>, gpa: Gpa) -> Option<Translation> {
    let (cell, level) = lowest_entry::<F>(vm.host(), vm.root(), gpa.gfn());
    // SAFETY: inside a live table.
    let entry = Entry(unsafe { AtomicU64::from_ptr(cell) }.load(Ordering::SeqCst));
    F::is_present(entry).then(|| Translation {
        pfn: Pfn(F::address(entry, level).pfn().0 + gpa.gfn().0 % level.nr_pages()),
        level,
        writable: entry.0 & F::WRITABLE == F::WRITABLE,
        entry,
    })
}

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// A region with a new backing whose frames begin at `first_pfn`.
pub fn region(
    slot: u32,
    gpa: u64,
    size_bytes: u64,
    first_pfn: u64,
    max_size: PageSize,
) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion {
        slot,
        flags: MemoryRegionFlags::empty(),
        guest_phys_addr: Gpa(gpa),
        memory_size: size_bytes,
        backing: Some(Arc::new(TestBacking::new(first_pfn, size_bytes / 4096, max_size))),
    }
}

/// What changes an existing slot.
pub fn change(slot: u32, flags: MemoryRegionFlags, gpa: u64, size_bytes: u64) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion { slot, flags, guest_phys_addr: Gpa(gpa), memory_size: size_bytes, backing: None }
}
