//! vm-memory's regions with the dirty log as their bitmap: a harvest reports a VMM's writes through
//! vm-memory together with those of the vCPUs.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "a global allocator, and guests that write to memory that is mapped")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::guest::Guest;
use common::random::Random;
use common::{TestBacking, TestHost, change, each, region, vm};
use slat::baselines::Locking;
use slat::dirty::ManualProtect;
use slat::error::LogError;
use slat::format::{Format, Npt};
use slat::{Access, Config, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, SlotBitmap, Vm};
use vm_memory::bitmap::{Bitmap, BitmapSlice};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
    ReadVolatile, VolatileMemory,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const PAGE: usize = PAGE_SIZE as usize;
const NOTHING: [usize; 0] = [];
const RUN: Duration = Duration::from_millis(250);

type TestVm<F> = Arc<Vm<TestHost, F>>;
type TestBitmap<F> = SlotBitmap<TestHost, F>;
type Memory<F> = GuestMemoryMmap<TestBitmap<F>>;

thread_local! {
    /// Allocations of this thread, and whether they fail.
    static NR_ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static ALLOCATIONS_FAIL: Cell<bool> = const { Cell::new(false) };
}

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

// SAFETY: all calls go to the system's allocator, with the same layouts.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NR_ALLOCATIONS.set(NR_ALLOCATIONS.get() + 1);
        if ALLOCATIONS_FAIL.get() {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Memory of `nr_pages` pages whose bitmap is the log of memslot `slot`.
fn mapping<F: Format>(vm: &TestVm<F>, slot: u32, nr_pages: usize) -> MmapRegion<TestBitmap<F>> {
    MmapRegionBuilder::new_with_bitmap(nr_pages * PAGE, SlotBitmap::new(Arc::clone(vm), slot))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .build()
        .unwrap()
}

/// A memslot that logs (or not), and the region with its memory.
fn add_slot<F: Format>(
    vm: &TestVm<F>,
    slot: u32,
    flags: MemoryRegionFlags,
    start: u64,
    nr_pages: usize,
) -> GuestRegionMmap<TestBitmap<F>> {
    let region = region(slot, start, nr_pages as u64 * PAGE_SIZE, first_pfn(slot), PageSize::Size4K);
    vm.set_user_memory_region(MemoryRegion { flags, ..region }).unwrap();
    GuestRegionMmap::new(mapping(vm, slot, nr_pages), GuestAddress(start)).unwrap()
}

fn first_pfn(slot: u32) -> u64 {
    u64::from(slot + 1) << 24
}

/// The pages that the log of memslot `slot` of at most 256 pages reports, in order.
fn harvest<F: Format>(vm: &Vm<TestHost, F>, slot: u32) -> Vec<usize> {
    let mut bitmap = [0; 4];
    let nr_pages = vm.get_dirty_log(slot, &mut bitmap).unwrap();
    let pages: Vec<_> = pages_of(&bitmap).collect();
    assert_eq!(nr_pages, pages.len() as u64);
    pages
}

fn pages_of(bitmap: &[u64]) -> impl Iterator<Item = usize> {
    (0..bitmap.len() * 64).filter(|page| bitmap[page / 64] >> (page % 64) & 1 == 1)
}

fn at(page: usize, offset: usize) -> GuestAddress {
    GuestAddress((page * PAGE + offset) as u64)
}

#[test]
fn each_way_to_write_marks_the_pages_that_it_touched() {
    let vm = vm::<Npt>(Locking::None);
    let memory = Memory::from_regions(vec![add_slot(&vm, 3, LOG, 0, 200)]).unwrap();
    let buffer = vec![7_u8; 200 * PAGE];

    memory.write_slice(&buffer[..PAGE], at(4, 0)).unwrap();
    assert_eq!(harvest(&vm, 3), [4]);
    // One byte in the pages beside, and across a word of the log.
    memory.write_slice(&buffer[..PAGE + 2], at(62, PAGE - 1)).unwrap();
    assert_eq!(harvest(&vm, 3), [62, 63, 64]);
    // Whole words in between.
    assert_eq!(memory.write(&buffer[..130 * PAGE], at(60, 1)).unwrap(), 130 * PAGE);
    assert_eq!(harvest(&vm, 3), (60..=190).collect::<Vec<_>>());
    // The end of the memslot cuts a write, and the written part is marked.
    assert_eq!(memory.write(&buffer, at(198, 5)).unwrap(), 2 * PAGE - 5);
    assert_eq!(harvest(&vm, 3), [198, 199]);
    assert!(memory.write_slice(&buffer, at(200, 0)).is_err());
    assert_eq!(harvest(&vm, 3), NOTHING);

    memory.write_obj(1_u64, at(1, PAGE - 8)).unwrap();
    memory.write_obj(1_u64, at(7, PAGE - 4)).unwrap();
    memory.store(1_u32, at(9, PAGE - 4), Ordering::Relaxed).unwrap();
    assert_eq!(harvest(&vm, 3), [1, 7, 8, 9]);

    let slice = memory.get_slice(at(10, 0), 5 * PAGE).unwrap();
    slice.write_slice(&buffer[..8], 2 * PAGE).unwrap();
    slice.get_slice(PAGE, 3 * PAGE).unwrap().write_obj(1_u8, 2 * PAGE).unwrap();
    slice.offset(4 * PAGE).unwrap().copy_from(&[1_u16, 2, 3]);
    slice.get_ref::<u32>(16).unwrap().store(1);
    assert_eq!(harvest(&vm, 3), [10, 12, 13, 14]);
    slice.get_array_ref::<u64>(0, 5 * PAGE / 8).unwrap().store(PAGE / 8, 5);
    slice.get_slice(0, PAGE).unwrap().copy_to_volatile_slice(slice.get_slice(3 * PAGE, PAGE).unwrap());
    assert_eq!(harvest(&vm, 3), [11, 13]);

    memory.read_volatile_from(at(20, 100), &mut &buffer[..], PAGE).unwrap();
    memory.read_exact_volatile_from(at(30, 0), &mut File::open("/dev/zero").unwrap(), 2 * PAGE).unwrap();
    File::open("/dev/zero").unwrap().read_volatile(&mut memory.get_slice(at(40, 0), 1).unwrap()).unwrap();
    assert_eq!(harvest(&vm, 3), [20, 21, 30, 31, 40]);

    let mut read = vec![0; 2 * PAGE];
    memory.read_slice(&mut read, at(62, 1)).unwrap();
    memory.read_obj::<u64>(at(1, 0)).unwrap();
    memory.load::<u32>(at(9, 0), Ordering::Relaxed).unwrap();
    memory.write_volatile_to(at(3, 0), &mut read, PAGE).unwrap();
    memory.write_slice(&[], at(50, 0)).unwrap();
    assert_eq!(harvest(&vm, 3), NOTHING);
}

each!(one_harvest_has_the_writes_of_vcpus_and_of_the_vmm, both);
fn both<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let memory = Memory::from_regions(vec![add_slot(&vm, 0, LOG, 0, 130)]).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for _ in 0..3 {
        for page in [2, 64, 129] {
            assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
        }
        for page in [0, 2, 65, 129] {
            memory.write_obj(page, at(page, 8)).unwrap();
        }
        assert_eq!(harvest(&vm, 0), [0, 2, 64, 65, 129]);
        assert_eq!(harvest(&vm, 0), NOTHING);
    }
}

#[test]
fn a_log_that_is_copied_keeps_the_marks_until_they_are_cleared() {
    let config = Config::default().with_manual_protect(ManualProtect::Enabled);
    let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::default(), config).unwrap());
    let memory = Memory::from_regions(vec![add_slot(&vm, 0, LOG, 0, 128)]).unwrap();
    memory.write_slice(&[1; 2 * PAGE], at(63, 0)).unwrap();
    assert_eq!(harvest(&vm, 0), [63, 64]);
    assert_eq!(vm.clear_dirty_log(0, 0, 64, &[u64::MAX]), Ok(1));
    assert_eq!(harvest(&vm, 0), [64]);
    memory.write_obj(1_u8, at(63, 0)).unwrap();
    assert_eq!(harvest(&vm, 0), [63, 64]);
}

#[test]
fn each_region_marks_in_the_log_of_its_slot() {
    let vm = vm::<Npt>(Locking::None);
    // Two adjacent ones, and one far away that does not log.
    let regions = vec![
        add_slot(&vm, 5, LOG, 0, 70),
        add_slot(&vm, 2, LOG, 70 * PAGE_SIZE, 10),
        add_slot(&vm, 9, NO_FLAGS, 1 << 32, 10),
    ];
    let memory = Memory::from_regions(regions).unwrap();
    memory.write_slice(&[1; 3 * PAGE], at(68, 0)).unwrap();
    memory.write_obj(1_u8, GuestAddress(1 << 32)).unwrap();
    assert_eq!(harvest(&vm, 5), [68, 69]);
    assert_eq!(harvest(&vm, 2), [0]);
    assert_eq!(vm.get_dirty_log(9, &mut [0; 4]), Err(LogError::NotLogging { slot: 9 }));
}

#[test]
fn a_region_without_a_slot_has_no_bitmap() {
    let vm = vm::<Npt>(Locking::None);
    let mut regions = Vec::new();
    for (start, bitmap) in [(0, Some(SlotBitmap::new(Arc::clone(&vm), 0))), (1 << 32, None)] {
        let mapping = MmapRegionBuilder::new_with_bitmap(4 * PAGE, bitmap)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .build()
            .unwrap();
        regions.push(GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap());
    }
    let memory = GuestMemoryMmap::from_regions(regions).unwrap();
    drop(add_slot(&vm, 0, LOG, 0, 4));
    memory.write_obj(1_u8, at(3, 0)).unwrap();
    memory.write_obj(1_u8, GuestAddress(1 << 32)).unwrap();
    assert_eq!(harvest(&vm, 0), [3]);
}

#[test]
fn a_slot_that_is_moved_takes_its_log_along() {
    let vm = vm::<Npt>(Locking::None);
    let before = add_slot(&vm, 1, LOG, 0, 10);
    let mapping = before.get_mmap();
    let before = Memory::from_regions(vec![before]).unwrap();
    before.write_obj(1_u8, at(2, 0)).unwrap();
    vm.set_user_memory_region(change(1, LOG, 1 << 32, 10 * PAGE_SIZE)).unwrap();
    let after = GuestRegionMmap::with_arc(mapping, GuestAddress(1 << 32)).unwrap();
    let after = Memory::from_regions(vec![after]).unwrap();
    assert_eq!(harvest(&vm, 1), (0..10).collect::<Vec<_>>());
    after.write_obj(1_u8, GuestAddress((1 << 32) + 3 * PAGE_SIZE)).unwrap();
    // The same memory is written at either address.
    before.write_obj(1_u8, at(4, 0)).unwrap();
    assert_eq!(harvest(&vm, 1), [3, 4]);
}

#[test]
fn nothing_is_marked_without_a_slot_that_logs() {
    let vm = vm::<Npt>(Locking::None);
    let memory = GuestRegionMmap::new(mapping(&vm, 1, 10), GuestAddress(0)).unwrap();
    let memory = Memory::from_regions(vec![memory]).unwrap();
    let write = |page| memory.write_obj(1_u8, at(page, 0)).unwrap();
    let is_dirty = |page: usize| memory.find_region(at(0, 0)).unwrap().bitmap().dirty_at(page * PAGE);
    // The memslot is made after the region.
    write(0);
    assert!(!is_dirty(0));
    drop(add_slot(&vm, 1, NO_FLAGS, 0, 10));
    write(1);
    assert!(!is_dirty(1));
    vm.set_user_memory_region(change(1, LOG, 0, 10 * PAGE_SIZE)).unwrap();
    write(2);
    assert!(is_dirty(2) && !is_dirty(1));
    assert_eq!(harvest(&vm, 1), [2]);
    vm.set_user_memory_region(change(1, NO_FLAGS, 0, 10 * PAGE_SIZE)).unwrap();
    write(3);
    assert!(!is_dirty(3));
    vm.set_user_memory_region(change(1, LOG, 0, 10 * PAGE_SIZE)).unwrap();
    assert_eq!(harvest(&vm, 1), NOTHING);
    write(4);
    assert_eq!(harvest(&vm, 1), [4]);
    vm.set_user_memory_region(change(1, NO_FLAGS, 0, 0)).unwrap();
    write(5);
    assert!(!is_dirty(5));
    // Another memslot of this number.
    drop(add_slot(&vm, 1, LOG, 0, 10));
    assert_eq!(harvest(&vm, 1), NOTHING);
    write(6);
    assert_eq!(harvest(&vm, 1), [6]);
}

#[test]
fn a_range_that_reaches_past_the_slot_marks_the_pages_in_the_slot() {
    let vm = vm::<Npt>(Locking::None);
    drop(add_slot(&vm, 0, LOG, 0, 70));
    let bitmap = SlotBitmap::new(Arc::clone(&vm), 0);
    let marks = |offset, len| {
        bitmap.mark_dirty(offset, len);
        harvest(&vm, 0)
    };
    let end = 70 * PAGE;
    assert_eq!(marks(end - 1, 1), [69]);
    assert_eq!(marks(end - 1, 2), [69]);
    assert_eq!(marks(end - PAGE - 1, usize::MAX), [68, 69]);
    assert_eq!(marks(0, usize::MAX), (0..70).collect::<Vec<_>>());
    for offset in [end, end + 1, end + PAGE, usize::MAX - 1, usize::MAX] {
        for len in [0, 1, 2, PAGE, usize::MAX] {
            assert_eq!(marks(offset, len), NOTHING, "{len} bytes from {offset:#x} on");
        }
        assert!(!bitmap.dirty_at(offset));
    }
    for offset in [0, 1, PAGE, end] {
        assert_eq!(marks(offset, 0), NOTHING);
    }
    // A slice whose offset overflows wraps, as vm-memory defines.
    assert_eq!(
        {
            bitmap.slice_at(usize::MAX).slice_at(PAGE + 1).mark_dirty(0, 1);
            harvest(&vm, 0)
        },
        [1]
    );
}

#[test]
fn slices_and_clones_are_of_the_same_log() {
    fn check(slice: &impl BitmapSlice, vm: &Vm<TestHost, Npt>) {
        slice.clone().mark_dirty(PAGE - 1, 2);
        assert!(slice.dirty_at(0) && slice.dirty_at(PAGE) && !slice.dirty_at(2 * PAGE));
        assert!(slice.slice_at(PAGE).dirty_at(PAGE - 1) && !slice.slice_at(PAGE).dirty_at(PAGE));
        assert_eq!(vm.is_marked_dirty(7, 6), Ok(true));
        assert_eq!(harvest(vm, 7), [5, 6]);
        assert!(!slice.dirty_at(0));
    }
    fn is_shared(_: &(impl Send + Sync + 'static)) {}
    let vm = vm::<Npt>(Locking::None);
    drop(add_slot(&vm, 7, LOG, 0, 10));
    let bitmap = SlotBitmap::new(Arc::clone(&vm), 7);
    is_shared(&bitmap);
    check(&bitmap.slice_at(5 * PAGE), &vm);
    check(&bitmap.clone().slice_at(PAGE).slice_at(4 * PAGE), &vm);
    check(&Some(bitmap.clone()).slice_at(5 * PAGE), &vm);
    assert_eq!(format!("{bitmap:?}"), "SlotBitmap { slot: 7, .. }");
}

#[test]
fn a_write_allocates_nothing() {
    let vm = vm::<Npt>(Locking::None);
    let memory = Memory::from_regions(vec![add_slot(&vm, 0, LOG, 0, 100)]).unwrap();
    memory.write_obj(1_u8, at(0, 0)).unwrap();
    let before = NR_ALLOCATIONS.get();
    for page in 0..100 {
        memory.write_obj(1_u8, at(page, 0)).unwrap();
        memory.get_slice(at(page, 8), 8).unwrap().write_obj(1_u64, 0).unwrap();
    }
    assert_eq!(NR_ALLOCATIONS.get(), before);
}

#[test]
fn a_mark_without_memory_aborts_the_process() {
    const CHILD: &str = "SLAT_TEST_MARK_WITHOUT_MEMORY";
    if std::env::var_os(CHILD).is_some() {
        let vm = vm::<Npt>(Locking::None);
        let memory = Memory::from_regions(vec![add_slot(&vm, 0, LOG, 0, 1)]).unwrap();
        // It uses the participant of the calls before it.
        let _vcpu = vm.create_vcpu().unwrap();
        ALLOCATIONS_FAIL.set(true);
        let _ = memory.write_obj(1_u8, at(0, 0));
        ALLOCATIONS_FAIL.set(false);
        return;
    }
    let test = "a_mark_without_memory_aborts_the_process";
    let child = Command::new(std::env::current_exe().unwrap()).args(["--exact", test]).env(CHILD, "").output().unwrap();
    assert_eq!(child.status.signal(), Some(libc::SIGABRT), "{child:?}");
    assert!(String::from_utf8_lossy(&child.stderr).contains("memory allocation of"), "{child:?}");
}

/// Pages of the memslot that many threads write.
const NR_PAGES: usize = 130;
const NR_WORDS: usize = NR_PAGES.div_ceil(64);
/// Threads of the VMM, and guests. Each has a word in each page, in which it counts its writes to
/// the page.
const NR_VMM: usize = 2;
const NR_GUESTS: usize = 4;

/// The counts of all pages.
type Counts = Vec<[u64; NR_VMM + NR_GUESTS]>;

/// A VM with a memslot, and its memory.
struct World<F: Format> {
    vm: TestVm<F>,
    memory: Memory<F>,
    /// The counts of the VMM's writes that have returned.
    returned: Vec<[AtomicU64; NR_VMM]>,
    stop: AtomicBool,
}

/// Harvests, and keeps a copy.
struct Harvester<'w, F: Format> {
    world: &'w World<F>,
    writers: Vec<usize>,
    copy: Counts,
}

/// Stops the writers, also when a check has failed.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn address(page: usize, writer: usize) -> GuestAddress {
    at(page, writer * 8)
}

impl<F: Format> World<F> {
    fn new(locking: Locking) -> World<F> {
        let vm = vm::<F>(locking);
        let memory = Memory::from_regions(vec![add_slot(&vm, 0, LOG, 0, NR_PAGES)]).unwrap();
        let returned = (0..NR_PAGES).map(|_| <[AtomicU64; NR_VMM]>::default()).collect();
        World { vm, memory, returned, stop: AtomicBool::new(false) }
    }

    /// Writes pages until it is stopped: a few of them often, all of them now and then.
    fn until_stopped(&self, seed: u64, mut write: impl FnMut(usize)) {
        let mut random = Random::new(seed);
        while !self.stop.load(Ordering::Relaxed) {
            write(if random.below(4) != 0 { random.below(4) * 43 } else { random.below(NR_PAGES as u64) } as usize);
        }
    }

    fn vmm(&self, writer: usize) {
        // A guest that never faults: the harvester waits for its marking calls as for faults.
        let mut guest = Guest::new(&self.vm);
        self.until_stopped(writer as u64, |page| {
            let count = self.returned[page][writer].load(Ordering::Relaxed) + 1;
            guest.during_fault(|_| match count % 3 {
                0 => self.memory.write_obj(count, address(page, writer)).unwrap(),
                1 => self.memory.write_slice(&count.to_ne_bytes(), address(page, writer)).unwrap(),
                _ => self.memory.store(count, address(page, writer), Ordering::Relaxed).unwrap(),
            });
            self.returned[page][writer].store(count, Ordering::SeqCst);
        });
    }

    fn guest(&self, writer: usize) {
        let mut guest = Guest::new(&self.vm);
        let memory = self.memory.find_region(GuestAddress(0)).unwrap().as_ptr();
        self.until_stopped(writer as u64, |page| {
            let _ = guest.try_access(Gpa(page as u64 * PAGE_SIZE), Access::Write, |found| {
                let page = (found.pfn.0 - first_pfn(0)) as usize;
                // SAFETY: a word in the memory, which `self` keeps; other threads only read it, as
                // an atomic.
                let word = unsafe { AtomicU64::from_ptr(memory.add(page * PAGE + writer * 8).cast()) };
                word.fetch_add(1, Ordering::SeqCst);
            });
        });
    }

    fn counts_of(&self, page: usize) -> [u64; NR_VMM + NR_GUESTS] {
        std::array::from_fn(|writer| self.memory.load(address(page, writer), Ordering::SeqCst).unwrap())
    }

    /// The counts that harvests must report: those that a guest has written, and those that the VMM
    /// has marked.
    fn counts_now(&self) -> Counts {
        let mut counts: Counts = (0..NR_PAGES).map(|page| self.counts_of(page)).collect();
        for (counts, returned) in counts.iter_mut().zip(&self.returned) {
            for (count, returned) in counts.iter_mut().zip(returned) {
                *count = returned.load(Ordering::SeqCst);
            }
        }
        counts
    }

    /// Runs `host` beside threads of the VMM and guests.
    fn beside_writers(&self, nr_vmm: usize, nr_guests: usize, host: impl FnOnce(&mut Harvester<'_, F>)) {
        let writers: Vec<_> = (0..nr_vmm).chain(NR_VMM..NR_VMM + nr_guests).collect();
        let mut harvester = Harvester { world: self, writers, copy: vec![Default::default(); NR_PAGES] };
        std::thread::scope(|scope| {
            for &writer in &harvester.writers {
                scope.spawn(move || {
                    let _stop = Stop(&self.stop);
                    if writer < NR_VMM { self.vmm(writer) } else { self.guest(writer) }
                });
            }
            let _stop = Stop(&self.stop);
            host(&mut harvester);
        });
        // All calls have returned: one harvest is exact.
        harvester.harvest();
        harvester.assert_copied(&(0..NR_PAGES).map(|page| self.counts_of(page)).collect());
        assert_eq!(harvest(&self.vm, 0), NOTHING);
    }
}

impl<F: Format> Harvester<'_, F> {
    fn harvest(&mut self) {
        let mut bitmap = [0; NR_WORDS];
        self.world.vm.get_dirty_log(0, &mut bitmap).unwrap();
        for page in pages_of(&bitmap) {
            self.copy[page] = self.world.counts_of(page);
        }
    }

    fn assert_copied(&self, counts: &Counts) {
        for (page, (counts, copied)) in counts.iter().zip(&self.copy).enumerate() {
            for (writer, (count, copied)) in counts.iter().zip(copied).enumerate() {
                assert!(copied >= count, "write {count} of {writer} to page {page}: the copy has {copied}");
            }
        }
    }

    /// Runs `step` for a while, and at least until writes of each writer are copied: other threads
    /// may starve them.
    fn for_a_while(&mut self, mut step: impl FnMut(&mut Self)) {
        let start = Instant::now();
        let has_all = |harvester: &Self| {
            harvester.writers.iter().all(|&writer| harvester.copy.iter().any(|counts| counts[writer] > 0))
        };
        while start.elapsed() < RUN || !has_all(self) {
            step(self);
            assert!(!self.world.stop.load(Ordering::SeqCst), "a writer has failed");
        }
    }

    /// A write before a harvest is copied after the next one, if all calls under way at the first
    /// have returned before the second.
    fn check_two_harvests(&mut self) {
        let before = self.world.counts_now();
        self.harvest();
        self.world.vm.host().gate.wait_for_faults();
        self.harvest();
        self.assert_copied(&before);
    }
}

each!(with_one_marking_thread_a_write_is_in_the_next_harvest, alone);
fn alone<F: Format>(locking: Locking) {
    World::<F>::new(locking).beside_writers(1, 0, |harvester| {
        harvester.for_a_while(|harvester| {
            let before = harvester.world.counts_now();
            harvester.harvest();
            harvester.assert_copied(&before);
        });
    });
}

each!(writes_of_the_vmm_beside_those_of_guests_are_reported_within_two_harvests, beside_guests);
fn beside_guests<F: Format>(locking: Locking) {
    World::<F>::new(locking)
        .beside_writers(NR_VMM, NR_GUESTS, |harvester| harvester.for_a_while(Harvester::check_two_harvests));
}

each!(no_write_of_the_vmm_is_lost_when_logging_begins, turned_on);
fn turned_on<F: Format>(locking: Locking) {
    let world = World::<F>::new(locking);
    let set = |flags| world.vm.set_user_memory_region(change(0, flags, 0, NR_PAGES as u64 * PAGE_SIZE)).unwrap();
    world.beside_writers(NR_VMM, NR_GUESTS, |harvester| {
        harvester.for_a_while(|harvester| {
            set(NO_FLAGS);
            std::thread::yield_now();
            set(LOG);
            // Pages written before logging begins are copied, as a migration does.
            for page in 0..NR_PAGES {
                harvester.copy[page] = world.counts_of(page);
            }
            harvester.check_two_harvests();
        });
    });
}

#[test]
fn a_bitmap_keeps_the_vm_alive_and_not_its_slot() {
    let vm = vm::<Npt>(Locking::None);
    let backing = Arc::new(TestBacking::new(0, 4, PageSize::Size4K));
    let slot = MemoryRegion { backing: Some(Arc::clone(&backing)), ..region(0, 0, 4 * PAGE_SIZE, 0, PageSize::Size4K) };
    vm.set_user_memory_region(slot).unwrap();
    let bitmap = SlotBitmap::new(Arc::clone(&vm), 0);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_eq!(Arc::strong_count(&backing), 1);
    drop(vm);
    bitmap.mark_dirty(0, 1);
    assert!(!bitmap.dirty_at(0));
}
