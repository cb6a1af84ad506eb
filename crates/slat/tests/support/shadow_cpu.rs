//! A guest's memory, whose frames the host moves, and CPUs that walk shadow tables (`shadow_cpu/cpu.rs`).
//!
//! Each page of the guest's has a stamp, its own number, in a word that no table uses: so whoever gets to a page knows whether
//! it is the one that was meant. A frame that the guest has left is poisoned, and so is a shadow table that is freed. Before
//! one of them is used again, some time later, the poison must be as it was: nobody has written there.
//!
//! The host's flush stops the CPUs as an interrupt would: a CPU says by a word that an access is under way, and begins each
//! access by looking whether there was a flush. See `tests/common/guest.rs`.
#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

#[path = "shadow_cpu/cpu.rs"]
mod cpu;
#[path = "guest_memory.rs"]
pub mod guest_memory;

pub use cpu::*;
use guest_memory::Memory;
use slat::baselines::{AtomicU64, full_fence};
use slat::host::{AllocationWait, Gone, Resolved, TableNode};
use slat::{Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, PageSize, Pfn, Vm};

#[cfg(shuttle)]
use crate::Shape;
/// What CPUs without a second stage walk.
#[cfg(not(shuttle))]
pub type Shape = slat::format::Npt;

pub type TestVm = Vm<TestHost, Shape>;

pub const P: u64 = 1 << 0;
pub const W: u64 = 1 << 1;
pub const U: u64 = 1 << 2;
pub const A: u64 = 1 << 5;
pub const D: u64 = 1 << 6;
pub const PS: u64 = 1 << 7;
pub const G: u64 = 1 << 8;
pub const NX: u64 = 1 << 63;
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Words of a page that are used: under shuttle each costs a step.
pub const WORDS: u64 = if cfg!(shuttle) { 4 } else { 512 };
/// The word of a page that has its stamp.
pub const STAMP: u64 = WORDS - 1;
/// It is present as an entry of a guest's table, and has reserved bits.
const POISON: u64 = 0x0fed_beef_dead_beef;
/// Host-physical address less pointer.
const BIAS: u64 = 1 << 47;
/// Pages of a block.
const BLOCK: u64 = 512;
const MAX_CPUS: usize = 8;
/// The frame of a page that has none.
const NO_FRAME: u64 = u64::MAX;
/// Freed tables that are kept, to see whether somebody writes to them.
const QUARANTINE: usize = if cfg!(shuttle) { 1 << 20 } else { 256 };

/// Lets others run.
pub fn pause() {
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
    #[cfg(not(shuttle))]
    std::thread::yield_now();
}

/// Sometimes others get much done meanwhile: the host takes its time before it does what it is asked for.
fn dawdle() {
    #[cfg(shuttle)]
    if shuttle::rand::Rng::gen_range(&mut shuttle::rand::thread_rng(), 0..8) == 0 {
        (0..100).for_each(|_| pause());
    }
    #[cfg(not(shuttle))]
    {
        static NR_CALLS: AtomicUsize = AtomicUsize::new(0);
        if NR_CALLS.fetch_add(1, Ordering::Relaxed).is_multiple_of(61) {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }
}

/// What page `gfn` has as its stamp. Not present, as an entry.
fn stamp_of(gfn: u64) -> u64 {
    0x57a_0000_0000 | gfn << 12
}

/// Whether a table has an entry for the page: under shuttle they have few.
fn is_used(gfn: u64) -> bool {
    gfn % BLOCK < WORDS
}

#[derive(Default)]
struct Tables {
    nr_live: usize,
    freed: VecDeque<(Hpa, Layout)>,
}

pub struct TestHost {
    memory: Memory,
    /// The frame of each page of the guest's.
    frames: Box<[AtomicU64]>,
    /// Those of nobody. Never locked across a step.
    free: Mutex<VecDeque<u64>>,
    /// Never locked across a step.
    tables: Mutex<Tables>,
    /// For each CPU a word that is odd during an access.
    accesses: [AtomicU64; MAX_CPUS],
    nr_cpus: AtomicUsize,
    nr_flushes: AtomicU64,
    pub nr_resolves: AtomicUsize,
    /// The engine is given no pointer to the guest's memory.
    pub has_no_pointers: AtomicBool,
}

// SAFETY: tables are memory of the global allocator that is nobody else's; a flush waits for the accesses that were under way,
// and later ones begin by forgetting all.
unsafe impl Host for TestHost {
    /// Which page of the host's the slot begins with.
    type Backing = u64;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        self.tables.lock().unwrap().nr_live += 1;
        // SAFETY: a table has a size.
        Some(Hpa(unsafe { alloc_zeroed(table_layout(layout)) }.expose_provenance() as u64 + BIAS))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        let nr_words = layout.size() / 8;
        for index in 0..nr_words {
            // SAFETY: inside the table, which is nobody's any more.
            unsafe { self.table_ptr(table).cast::<u64>().add(index).write_volatile(POISON) }
        }
        let mut tables = self.tables.lock().unwrap();
        tables.nr_live -= 1;
        tables.freed.push_back((table, layout));
        if tables.freed.len() > QUARANTINE
            && let Some((table, layout)) = tables.freed.pop_front()
        {
            self.give_back(table, layout);
        }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut((table.0 - BIAS) as usize)
    }

    fn resolve(&self, first: &u64, _: Gfn, page: u64, _: Access) -> Result<Resolved, Gone> {
        let page = first + page;
        dawdle();
        self.nr_resolves.fetch_add(1, Ordering::Relaxed);
        let frame = self.frames.get(page as usize).ok_or(Gone)?.load(Ordering::SeqCst);
        if frame == NO_FRAME {
            return Err(Gone);
        }
        let max_size = if cfg!(shuttle) || !self.is_contiguous(page) { PageSize::Size4K } else { PageSize::Size2M };
        Ok(Resolved { pfn: self.pfn(frame), max_size, writable: true })
    }

    fn resolve_private(&self, first: &u64, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Gone> {
        self.resolve(first, gfn, page, access)
    }

    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        (!self.has_no_pointers.load(Ordering::Relaxed)).then(|| self.table_ptr(frame.hpa()))
    }

    fn flush(&self, _: &[GfnRange]) {
        dawdle();
        self.nr_flushes.fetch_add(1, Ordering::SeqCst);
        // Pairs with the fence in `Cpu::during_access`.
        full_fence();
        for word in &self.accesses[..self.nr_cpus.load(Ordering::SeqCst)] {
            let seen = word.load(Ordering::SeqCst);
            while seen % 2 == 1 && word.load(Ordering::SeqCst) == seen {
                pause();
            }
        }
    }

    fn yield_now(&self) {
        pause();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// Table addresses are page-aligned, whatever the size of a table.
fn table_layout(layout: Layout) -> Layout {
    Layout::from_size_align(layout.size().max(4096), layout.align().max(4096)).unwrap()
}

impl TestHost {
    /// With memory for `nr_pages` of the guest's, and `nr_spare` frames more.
    pub fn new(nr_pages: u64, nr_spare: u64) -> TestHost {
        let nr_used = (0..nr_pages).filter(|&gfn| is_used(gfn)).count() as u64;
        // Blocks of frames where there may be huge pages.
        let align = if cfg!(shuttle) { 4096 } else { 2 << 20 };
        let frame_of = |gfn: u64| if is_used(gfn) { gfn / BLOCK * WORDS + gfn % BLOCK } else { NO_FRAME };
        let host = TestHost {
            memory: Memory::new(nr_used + nr_spare, align),
            frames: (0..nr_pages).map(|gfn| AtomicU64::new(frame_of(gfn))).collect(),
            free: Mutex::new((nr_used..nr_used + nr_spare).collect()),
            tables: Mutex::default(),
            accesses: std::array::from_fn(|_| AtomicU64::new(0)),
            nr_cpus: AtomicUsize::new(0),
            nr_flushes: AtomicU64::new(0),
            nr_resolves: AtomicUsize::new(0),
            has_no_pointers: AtomicBool::new(false),
        };
        for frame in nr_used..nr_used + nr_spare {
            (0..WORDS).for_each(|index| host.plain_store(frame, index, POISON));
        }
        (0..nr_pages).filter(|&gfn| is_used(gfn)).for_each(|gfn| host.plain_store(frame_of(gfn), STAMP, stamp_of(gfn)));
        host
    }

    fn pfn(&self, frame: u64) -> Pfn {
        Hpa(self.memory.start() + frame * 4096 + BIAS).pfn()
    }

    fn word(&self, hpa: Hpa) -> &AtomicU64 {
        // SAFETY: callers have an aligned address of the guest's memory, or of a table that is kept.
        unsafe { &*self.table_ptr(hpa).cast::<AtomicU64>() }
    }

    /// No step.
    fn plain_load(&self, frame: u64, index: u64) -> u64 {
        let hpa = Hpa(self.pfn(frame).hpa().0 + index * 8);
        // SAFETY: an atomic word of the guest's memory.
        unsafe { &*self.table_ptr(hpa).cast::<std::sync::atomic::AtomicU64>() }.load(Ordering::Acquire)
    }

    /// No step.
    fn plain_store(&self, frame: u64, index: u64, value: u64) {
        let hpa = Hpa(self.pfn(frame).hpa().0 + index * 8);
        // SAFETY: as in `plain_load`.
        unsafe { &*self.table_ptr(hpa).cast::<std::sync::atomic::AtomicU64>() }.store(value, Ordering::Release);
    }

    fn is_contiguous(&self, page: u64) -> bool {
        let first = page - page % BLOCK;
        let frame = |nth: u64| self.frames.get((first + nth) as usize).map(|frame| frame.load(Ordering::SeqCst));
        (0..BLOCK).all(|nth| frame(nth).is_some_and(|frame| frame == first + nth))
    }

    /// Checks that nobody has written to a table since it was freed, and gives its memory back.
    fn give_back(&self, table: Hpa, layout: Layout) {
        for index in 0..layout.size() / 8 {
            // SAFETY: it is kept until it is given back here.
            let word = unsafe { self.table_ptr(table).cast::<u64>().add(index).read_volatile() };
            assert!(std::thread::panicking() || word == POISON, "a table was written after it was freed");
        }
        // SAFETY: it came from `allocate_table`.
        unsafe { dealloc(self.table_ptr(table), table_layout(layout)) }
    }

    pub fn nr_live_tables(&self) -> usize {
        self.tables.lock().unwrap().nr_live
    }

    pub fn nr_flushes(&self) -> u64 {
        self.nr_flushes.load(Ordering::SeqCst)
    }

    /// The guest's memory, while nothing moves it; without the CPUs, as a loader does before the guest runs.
    pub fn load(&self, gfn: u64, index: u64) -> u64 {
        self.plain_load(self.frames[gfn as usize].load(Ordering::SeqCst), index)
    }

    /// As [`TestHost::load`].
    pub fn store(&self, gfn: u64, index: u64, value: u64) {
        self.plain_store(self.frames[gfn as usize].load(Ordering::SeqCst), index, value);
    }

    /// The contents of page `gfn`, also while it is moved.
    pub fn copy_of(&self, gfn: u64) -> Vec<u64> {
        loop {
            let frame = self.frames[gfn as usize].load(Ordering::SeqCst);
            let copy = (0..WORDS).map(|index| self.plain_load(frame, index)).collect();
            full_fence();
            if self.frames[gfn as usize].load(Ordering::SeqCst) == frame {
                return copy;
            }
        }
    }
}

impl Drop for TestHost {
    fn drop(&mut self) {
        let mut tables = std::mem::take(self.tables.get_mut().unwrap());
        tables.freed.drain(..).for_each(|(table, layout)| self.give_back(table, layout));
        assert!(std::thread::panicking() || tables.nr_live == 0, "tables leaked");
        for frame in std::mem::take(self.free.get_mut().unwrap()) {
            self.check_poison(frame);
        }
    }
}

impl TestHost {
    fn check_poison(&self, frame: u64) {
        for index in 0..WORDS {
            let word = self.plain_load(frame, index);
            assert!(std::thread::panicking() || word == POISON, "a frame was written after the guest had left it");
        }
    }

    fn take_frame(&self) -> u64 {
        let frame = self.free.lock().unwrap().pop_front().expect("frames are given back");
        self.check_poison(frame);
        frame
    }
}

/// Gives page `gfn` another frame, with its contents. Only one thread may move pages.
pub fn move_page(vm: &TestVm, gfn: u64) {
    let invalidation = vm.invalidate_range(GfnRange::new(Gfn(gfn), 1)).unwrap();
    let host = vm.host();
    let new = host.take_frame();
    let old = host.frames[gfn as usize].load(Ordering::SeqCst);
    for index in 0..WORDS {
        host.plain_store(new, index, host.plain_load(old, index));
    }
    host.frames[gfn as usize].store(new, Ordering::SeqCst);
    full_fence();
    for index in 0..WORDS {
        host.plain_store(old, index, POISON);
    }
    drop(invalidation);
    host.free.lock().unwrap().push_back(old);
}

pub fn new_vm(config: Config, nr_pages: u64, nr_spare: u64, flags: MemoryRegionFlags) -> Arc<TestVm> {
    let vm = Arc::new(Vm::new(TestHost::new(nr_pages, nr_spare), config).unwrap());
    vm.set_user_memory_region(region(nr_pages, flags, Some(0))).unwrap();
    vm
}

pub fn region<B>(nr_pages: u64, flags: MemoryRegionFlags, backing: Option<B>) -> MemoryRegion<B> {
    let memory_size = nr_pages * 4096;
    MemoryRegion { slot: 0, flags, guest_phys_addr: Gpa(0), memory_size, backing, userfault_bitmap: None }
}
