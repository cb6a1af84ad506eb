//! A guest's memory, whose frames the host moves, and CPUs that walk shadow tables
//! (`shadow_cpu/cpu.rs`).
//!
//! Each page of the guest has a label, which is its own number, in a word that no page table uses.
//! So a CPU that reaches a page can check that it is the intended one. A frame that the guest has
//! left is poisoned, and so is a freed shadow page-table page. The poison is checked before the
//! memory is used again, some time later: no write may have changed it.
//!
//! The host's flush stops the CPUs as an interrupt would. A CPU sets a word while an access is
//! under way, and begins each access with a check for a flush. See `tests/common/guest.rs`.
#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

#[path = "shadow_cpu/cpu.rs"]
mod cpu;
#[path = "guest_memory.rs"]
pub mod guest_memory;
#[path = "shadow_cpu/preempt_count.rs"]
pub mod preempt_count;

pub use cpu::*;
use guest_memory::Memory;
use slat::baselines::{AtomicU64, full_fence};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::shadow::ShadowPaging;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, PageSize, Pfn, Vm};

pub type TestVm = Vm<ShadowHost, slat::format::Npt>;

pub const P: u64 = 1 << 0;
pub const W: u64 = 1 << 1;
pub const U: u64 = 1 << 2;
pub const A: u64 = 1 << 5;
pub const D: u64 = 1 << 6;
pub const PS: u64 = 1 << 7;
pub const G: u64 = 1 << 8;
pub const NX: u64 = 1 << 63;
pub const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The words of a page that are used: under shuttle each access is a step.
pub const WORDS: u64 = if cfg!(shuttle) { 4 } else { 512 };
/// The word of a page that holds its label.
pub const LABEL: u64 = WORDS - 1;
/// As a guest PTE it is present, and has reserved bits.
const POISON: u64 = 0x0fed_beef_dead_beef;
/// The difference between a host-physical address and a pointer.
const BIAS: u64 = 1 << 47;
const BLOCK: u64 = 512;
const MAX_CPUS: usize = 8;
/// Stands for the frame of a page that has none.
const NO_FRAME: u64 = u64::MAX;
/// Freed page-table pages that are kept, so that a late write to them is noticed.
const QUARANTINE: usize = if cfg!(shuttle) { 1 << 20 } else { 256 };

/// Lets other threads run.
pub fn pause() {
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
    #[cfg(not(shuttle))]
    std::thread::yield_now();
}

/// Sometimes lets other threads do much: the host takes its time before it does what it is asked.
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

/// The label of page `gfn`. As a PTE it is not present.
fn label_of(gfn: u64) -> u64 {
    0x57a_0000_0000 | gfn << 12
}

/// Whether a page table has a PTE for the page: under shuttle they have few.
fn is_used(gfn: u64) -> bool {
    gfn % BLOCK < WORDS
}

#[derive(Default)]
struct Tables {
    nr_live: usize,
    freed: VecDeque<(Hpa, Layout)>,
}

pub struct ShadowHost {
    memory: Memory,
    /// The frame of each page of the guest.
    frames: Box<[AtomicU64]>,
    /// Free frames. Never locked across a step.
    free: Mutex<VecDeque<u64>>,
    /// Never locked across a step.
    tables: Mutex<Tables>,
    /// One word for each CPU, odd during an access.
    accesses: [AtomicU64; MAX_CPUS],
    nr_cpus: AtomicUsize,
    nr_flushes: AtomicU64,
    pub nr_resolves: AtomicUsize,
    /// While set, `guest_memory_ptr` returns `None`.
    pub has_no_pointers: AtomicBool,
}

// SAFETY: the global allocator hands out each page-table page once. A flush waits for the accesses
// that were under way; later ones begin with a full flush of their CPU.
unsafe impl Host for ShadowHost {
    /// The page of the host with which the memslot begins.
    type Backing = u64;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        preempt_count::assert_enabled();
        self.tables.lock().unwrap().nr_live += 1;
        // SAFETY: a page-table page has a size.
        Some(Hpa(unsafe { alloc_zeroed(table_layout(layout)) }.expose_provenance() as u64 + BIAS))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        let nr_words = layout.size() / 8;
        for index in 0..nr_words {
            // SAFETY: inside the page-table page, which no thread uses any more.
            unsafe { self.table_ptr(table).cast::<u64>().add(index).write_volatile(POISON) }
        }
        let mut tables = self.tables.lock().unwrap();
        tables.nr_live -= 1;
        tables.freed.push_back((table, layout));
        if tables.freed.len() > QUARANTINE
            && let Some((table, layout)) = tables.freed.pop_front()
        {
            self.release(table, layout);
        }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut((table.0 - BIAS) as usize)
    }

    fn resolve(&self, first: &u64, _: Gfn, page: u64, _: Access) -> Result<Resolved, Unresolved> {
        preempt_count::assert_enabled();
        let page = first + page;
        dawdle();
        self.nr_resolves.fetch_add(1, Ordering::Relaxed);
        let frame = self.frames.get(page as usize).ok_or(Unresolved::Gone)?.load(Ordering::SeqCst);
        if frame == NO_FRAME {
            return Err(Unresolved::Gone);
        }
        let max_size = if cfg!(shuttle) || !self.is_contiguous(page) { PageSize::Size4K } else { PageSize::Size2M };
        Ok(Resolved::memory(self.pfn(frame), max_size))
    }

    fn resolve_private(&self, first: &u64, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        self.resolve(first, gfn, page, access)
    }

    fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
        preempt_count::assert_disabled();
        (!self.has_no_pointers.load(Ordering::Relaxed)).then(|| self.table_ptr(frame.hpa()))
    }

    fn flush(&self, _: &[GfnRange]) {
        preempt_count::assert_enabled();
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

    fn preempt_disable(&self) {
        preempt_count::disable();
    }

    fn preempt_enable(&self) {
        preempt_count::enable();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

/// Addresses of page-table pages are page-aligned, whatever the size.
fn table_layout(layout: Layout) -> Layout {
    Layout::from_size_align(layout.size().max(4096), layout.align().max(4096)).unwrap()
}

impl ShadowHost {
    /// With memory for `nr_pages` of the guest, and `nr_spare` frames more.
    pub fn new(nr_pages: u64, nr_spare: u64) -> ShadowHost {
        let nr_used = (0..nr_pages).filter(|&gfn| is_used(gfn)).count() as u64;
        // Aligned as a huge page needs it, where there may be one.
        let align = if cfg!(shuttle) { 4096 } else { 2 << 20 };
        let frame_of = |gfn: u64| if is_used(gfn) { gfn / BLOCK * WORDS + gfn % BLOCK } else { NO_FRAME };
        let host = ShadowHost {
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
        (0..nr_pages).filter(|&gfn| is_used(gfn)).for_each(|gfn| host.plain_store(frame_of(gfn), LABEL, label_of(gfn)));
        host
    }

    fn pfn(&self, frame: u64) -> Pfn {
        Hpa(self.memory.start() + frame * 4096 + BIAS).pfn()
    }

    fn word(&self, hpa: Hpa) -> &AtomicU64 {
        // SAFETY: callers pass an aligned address of the guest's memory, or of a page-table page
        // that is kept.
        unsafe { &*self.table_ptr(hpa).cast::<AtomicU64>() }
    }

    /// Is no step.
    fn plain_load(&self, frame: u64, index: u64) -> u64 {
        let hpa = Hpa(self.pfn(frame).hpa().0 + index * 8);
        // SAFETY: an atomic word of the guest's memory.
        unsafe { &*self.table_ptr(hpa).cast::<std::sync::atomic::AtomicU64>() }.load(Ordering::Acquire)
    }

    /// Is no step.
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

    /// Checks that a page-table page was not written since it was freed, and releases its memory.
    fn release(&self, table: Hpa, layout: Layout) {
        for index in 0..layout.size() / 8 {
            // SAFETY: the memory is kept until it is released here.
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

    /// Reads the guest's memory without a CPU, as a loader does. No thread may move the page.
    pub fn load(&self, gfn: u64, index: u64) -> u64 {
        self.plain_load(self.frames[gfn as usize].load(Ordering::SeqCst), index)
    }

    /// As [`ShadowHost::load`].
    pub fn store(&self, gfn: u64, index: u64, value: u64) {
        self.plain_store(self.frames[gfn as usize].load(Ordering::SeqCst), index, value);
    }

    /// The contents of page `gfn`, also while another thread moves it.
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

impl Drop for ShadowHost {
    fn drop(&mut self) {
        let mut tables = std::mem::take(self.tables.get_mut().unwrap());
        tables.freed.drain(..).for_each(|(table, layout)| self.release(table, layout));
        assert!(std::thread::panicking() || tables.nr_live == 0, "tables leaked");
        for frame in std::mem::take(self.free.get_mut().unwrap()) {
            self.check_poison(frame);
        }
    }
}

impl ShadowHost {
    fn check_poison(&self, frame: u64) {
        for index in 0..WORDS {
            let word = self.plain_load(frame, index);
            assert!(std::thread::panicking() || word == POISON, "a frame was written after the guest had left it");
        }
    }

    fn take_frame(&self) -> u64 {
        let frame = self.free.lock().unwrap().pop_front().expect("frames are released");
        self.check_poison(frame);
        frame
    }
}

/// Moves page `gfn` to another frame, with its contents. Only one thread may move pages.
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

pub fn new_vm(
    config: Config,
    shadow: ShadowPaging,
    nr_pages: u64,
    nr_spare: u64,
    flags: MemoryRegionFlags,
) -> Arc<TestVm> {
    let vm = Arc::new(Vm::with_shadow_paging(ShadowHost::new(nr_pages, nr_spare), config, shadow).unwrap());
    vm.set_user_memory_region(region(nr_pages, flags, Some(0))).unwrap();
    vm
}

pub fn region<B>(nr_pages: u64, flags: MemoryRegionFlags, backing: Option<B>) -> MemoryRegion<B> {
    let memory_size = nr_pages * 4096;
    MemoryRegion { slot: 0, flags, guest_phys_addr: Gpa(0), memory_size, backing, userfault_bitmap: None }
}
