//! A machine for the tests: physical memory in one allocation, CPUs with TLBs, and a record of what
//! the address space does.
#![allow(unsafe_code, reason = "a machine has memory")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ax_memory_addr::{PhysAddr, VirtAddr};
use axvm_types::GuestPhysAddr;
use slat::GfnRange;
use slat::format::Format;
use slat_axaddrspace::{AddrSpace, MappingFlags, PagingHost};

pub const PAGE: usize = 0x1000;
pub const MIB: usize = 1 << 20;
pub const RW: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);
pub const RWX: MappingFlags = RW.union(MappingFlags::EXECUTE);
/// Physical address of the first frame that is allocated.
pub const FIRST: usize = 0x1_0000;
/// What a frame is filled with when it is freed.
pub const POISON: u8 = 0xee;

pub fn gpa(address: usize) -> GuestPhysAddr {
    GuestPhysAddr::from_usize(address)
}

pub fn hpa(address: usize) -> PhysAddr {
    PhysAddr::from_usize(address)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Flush(GfnRange),
    FreeFrame(usize),
    FreeTable(usize),
}

/// Physical memory and its allocator, shared by the VMs of a test.
pub struct Memory {
    start: *mut u8,
    layout: Layout,
    free: Mutex<Vec<bool>>,
    /// Allocations that succeed from now on.
    pub allocations_left: AtomicUsize,
    pub frames_in_use: AtomicUsize,
    pub tables_in_use: AtomicUsize,
}

// SAFETY: the memory is accessed by the owners of its frames, as the tests and the engine do.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(nr_frames: usize) -> Arc<Memory> {
        let layout = Layout::from_size_align(nr_frames * PAGE, 2 * MIB).unwrap();
        Arc::new(Memory {
            // SAFETY: the layout is not empty.
            start: unsafe { alloc_zeroed(layout) },
            layout,
            free: Mutex::new(vec![true; nr_frames]),
            allocations_left: AtomicUsize::new(usize::MAX),
            frames_in_use: AtomicUsize::new(0),
            tables_in_use: AtomicUsize::new(0),
        })
    }

    fn alloc(&self, layout: Layout) -> Option<usize> {
        self.allocations_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).ok()?;
        let nr_frames = layout.size() / PAGE;
        let mut free = self.free.lock().unwrap();
        let first = (FIRST / PAGE..free.len() + 1 - nr_frames)
            .step_by(layout.align() / PAGE)
            .find(|&first| free[first..first + nr_frames].iter().all(|free| *free))?;
        free[first..first + nr_frames].fill(false);
        // SAFETY: the frames were free, and have no other owner.
        unsafe { self.start.add(first * PAGE).write_bytes(0, layout.size()) };
        Some(first * PAGE)
    }

    fn dealloc(&self, paddr: usize, size: usize) {
        let mut free = self.free.lock().unwrap();
        for frame in &mut free[paddr / PAGE..(paddr + size) / PAGE] {
            assert!(!*frame, "frame {paddr:#x} is freed twice");
            *frame = true;
        }
        // SAFETY: the caller was the owner.
        unsafe { self.start.add(paddr).write_bytes(POISON, size) };
    }

    pub fn byte(&self, paddr: PhysAddr) -> &std::sync::atomic::AtomicU8 {
        assert!(paddr.as_usize() < self.layout.size());
        // SAFETY: inside of the allocation, and accessed by atomics.
        unsafe { std::sync::atomic::AtomicU8::from_ptr(self.start.add(paddr.as_usize())) }
    }

    /// Sets how many allocations succeed from now on.
    pub fn fail_after(&self, nr_allocations: usize) {
        self.allocations_left.store(nr_allocations, Ordering::SeqCst);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.start, self.layout) }
    }
}

/// What a CPU has cached: physical addresses by page.
#[derive(Default)]
pub struct Tlb(pub Mutex<HashMap<usize, PhysAddr>>);

/// The machine as one VM uses it.
#[derive(Clone)]
pub struct Machine {
    pub memory: Arc<Memory>,
    pub events: Arc<Mutex<Vec<Event>>>,
    pub tlbs: Arc<[Tlb; 2]>,
    pub flushes: Arc<AtomicUsize>,
    pub records: Arc<AtomicBool>,
}

impl Machine {
    pub fn new(memory: &Arc<Memory>) -> Machine {
        Machine {
            memory: Arc::clone(memory),
            events: Arc::default(),
            tlbs: Arc::default(),
            flushes: Arc::default(),
            records: Arc::new(AtomicBool::new(true)),
        }
    }

    pub fn take_events(&self) -> Vec<Event> {
        std::mem::take(&mut self.events.lock().unwrap())
    }

    fn record(&self, event: Event) {
        if self.records.load(Ordering::Relaxed) {
            self.events.lock().unwrap().push(event);
        }
    }

    pub fn frames_in_use(&self) -> usize {
        self.memory.frames_in_use.load(Ordering::SeqCst)
    }

    pub fn tables_in_use(&self) -> usize {
        self.memory.tables_in_use.load(Ordering::SeqCst)
    }
}

// SAFETY: frames have one owner at a time, and stay where they are. A flush empties both TLBs.
unsafe impl PagingHost for Machine {
    fn alloc_frame(&self) -> Option<PhysAddr> {
        let frame = self.memory.alloc(Layout::from_size_align(PAGE, PAGE).unwrap())?;
        self.memory.frames_in_use.fetch_add(1, Ordering::SeqCst);
        Some(hpa(frame))
    }

    unsafe fn dealloc_frame(&self, frame: PhysAddr) {
        self.record(Event::FreeFrame(frame.as_usize()));
        self.memory.dealloc(frame.as_usize(), PAGE);
        self.memory.frames_in_use.fetch_sub(1, Ordering::SeqCst);
    }

    fn alloc_table(&self, layout: Layout) -> Option<PhysAddr> {
        let table = self.memory.alloc(layout)?;
        self.memory.tables_in_use.fetch_add(1, Ordering::SeqCst);
        Some(hpa(table))
    }

    unsafe fn dealloc_table(&self, table: PhysAddr, layout: Layout) {
        self.record(Event::FreeTable(table.as_usize()));
        self.memory.dealloc(table.as_usize(), layout.size());
        self.memory.tables_in_use.fetch_sub(1, Ordering::SeqCst);
    }

    fn phys_to_virt(&self, paddr: PhysAddr) -> VirtAddr {
        VirtAddr::from_usize(self.memory.start as usize + paddr.as_usize())
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        for &range in ranges {
            self.record(Event::Flush(range));
            for tlb in self.tlbs.iter() {
                tlb.0.lock().unwrap().retain(|&page, _| !range.contains(slat::Gfn(page as u64)));
            }
        }
    }

    fn nr_cpus(&self) -> usize {
        2
    }

    fn yield_now(&self) {
        std::thread::yield_now();
    }
}

/// An address space of 64 KiB, with its machine.
pub fn small_space<F: Format>() -> (Machine, AddrSpace<Machine, F>) {
    space(0x1_0000, 0x1_0000)
}

pub fn space<F: Format>(base: usize, size: usize) -> (Machine, AddrSpace<Machine, F>) {
    let machine = Machine::new(&Memory::new(4096));
    (machine.clone(), AddrSpace::new_empty(machine, gpa(base), size).unwrap())
}

/// A CPU of the guest: reads a byte through its TLB, and faults where nothing is mapped. The TLB is
/// locked for the access, so that a flush waits for it.
pub fn load<F: Format>(machine: &Machine, space: &AddrSpace<Machine, F>, cpu: usize, address: usize) -> Option<u8> {
    loop {
        let mut tlb = machine.tlbs[cpu].0.lock().unwrap();
        let cached = tlb.get(&(address / PAGE)).copied().or_else(|| space.translate(gpa(address / PAGE * PAGE)));
        if let Some(page) = cached {
            tlb.insert(address / PAGE, page);
            return Some(machine.memory.byte(page + address % PAGE).load(Ordering::Relaxed));
        }
        drop(tlb);
        if !space.handle_page_fault(gpa(address), MappingFlags::READ) {
            return None;
        }
    }
}

/// Runs a test for each format.
macro_rules! each_format {
    ($($test:ident),* $(,)?) => {
        mod ept { $(#[test] fn $test() { super::$test::<slat::format::Ept>() })* }
        mod npt { $(#[test] fn $test() { super::$test::<slat::format::Npt>() })* }
        mod stage2 { $(#[test] fn $test() { super::$test::<slat::format::Stage2>() })* }
        mod sv39x4 { $(#[test] fn $test() { super::$test::<slat::format::Sv39x4>() })* }
        mod sv48x4 { $(#[test] fn $test() { super::$test::<slat::format::Sv48x4>() })* }
    };
}
pub(crate) use each_format;
