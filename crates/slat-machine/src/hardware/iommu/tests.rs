//! DMA over pinned memory: beside CPUs with a tree of their own, and beside calls that unmap. What
//! DMA and CPUs read is verified word by word, and at the end all memory is.

#![expect(unsafe_code, reason = "a host of its own, and memory behind the machine's back")]

use core::alloc::Layout;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slat::format::{CpuFeatures, Format, LeafAttributes};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::tables::{AccessTracking, Mapping, Protection};
use slat::{Config, Gfn, GfnRange, MemoryRegion, MemoryRegionFlags, NodeId, PAGE_SIZE, PageSize, Pfn, Vcpu};

use super::*;
use crate::hardware::commit::{Defect, FlushDomain};
use crate::hardware::walk::HardwareFormat;
use crate::memory::{Backing, BackingKind};
use crate::vm::host::{BackingSlice, MachineHost, machine_tables};

const NR_PAGES: u64 = 2048;
const SIZE_BYTES: u64 = NR_PAGES * PAGE_SIZE;
/// Where the device's memory begins, for it and for the guest: aligned to 2 MiB.
const START: u64 = 4 << 21;
const WORDS_PER_PAGE: u64 = PAGE_SIZE / 8;
const RUN_TIME: Duration = Duration::from_millis(600);
const NONE: MemoryRegionFlags = MemoryRegionFlags::empty();

/// The machine's host of a device's tree: it notes what was released.
struct DeviceHost {
    inner: MachineHost,
    released: Mutex<Vec<(GfnRange, Pfn)>>,
}

// SAFETY: each method is that of `MachineHost`.
unsafe impl Host for DeviceHost {
    machine_tables!(inner);

    fn resolve(&self, _: &BackingSlice, _: Gfn, _: u64, _: Access) -> Result<Resolved, Unresolved> {
        Err(Unresolved::Gone)
    }
    fn flush(&self, ranges: &[GfnRange]) {
        self.inner.flush(ranges);
    }
    fn release_mapped(&self, range: GfnRange, first: Pfn) {
        self.released.lock().push((range, first));
    }
}

/// A tree for devices with one pinned memslot, and its IOMMU.
struct Devices {
    vm: Arc<Vm<DeviceHost, Vtd>>,
    iommu: Arc<Iommu>,
    domain: Arc<FlushDomain>,
}

impl Devices {
    fn new(domain: FlushDomain, memory: &Backing) -> Devices {
        let domain = Arc::new(domain);
        let hardware = Hardware { features: CpuFeatures::SNOOP_CONTROL, ..Hardware::default() };
        let config = Config::default().with_hardware(hardware).with_access_tracking(AccessTracking::Faults);
        let inner = MachineHost::new(Arc::clone(&domain), 1 << 10).unwrap();
        let vm = Arc::new(Vm::new(DeviceHost { inner, released: Mutex::default() }, config).unwrap());
        let backing = BackingSlice { backing: memory.clone(), offset_bytes: 0 };
        let region = region(MemoryRegionFlags::PINNED, SIZE_BYTES, Some(backing));
        vm.set_user_memory_region(region).unwrap();
        Devices { iommu: Iommu::new(&vm, &hardware), vm, domain }
    }

    fn engine(&self, source_id: u16) -> DmaEngine {
        DmaEngine::new(&self.iommu, source_id, Port::new(&self.domain), Geometry::default())
    }

    /// Maps the pages of `range` to those of `memory` from `page` on, which are adjacent.
    fn map(&self, range: GfnRange, memory: &Backing, page: u64, largest: PageSize) {
        let protection = Protection { writable: true, attributes: LeafAttributes::DATA };
        let pfn = memory.frame_of(page).unwrap();
        self.vm.map_range(&Mapping { range, pfn, protection, largest }).unwrap();
    }
}

fn region(flags: MemoryRegionFlags, size_bytes: u64, backing: Option<BackingSlice>) -> MemoryRegion<BackingSlice> {
    let guest_phys_addr = Gpa(START);
    MemoryRegion { slot: 0, flags, guest_phys_addr, memory_size: size_bytes, backing, userfault_bitmap: None }
}

fn all_pages() -> GfnRange {
    GfnRange::new(Gpa(START).gfn(), NR_PAGES)
}

fn address(page: u64, word: u64) -> u64 {
    START + page * PAGE_SIZE + word * 8
}

/// The word of `memory` behind the caches of this test: its own pointer.
fn in_memory(memory: &Backing, page: u64, word: u64) -> u64 {
    let at = memory.as_ptr().wrapping_add((page * PAGE_SIZE + word * 8) as usize).cast::<u64>();
    // SAFETY: inside the memory, aligned; others write it atomically.
    unsafe { AtomicU64::from_ptr(at) }.load(Ordering::SeqCst)
}

#[test]
fn dma_reads_and_writes_what_is_mapped_and_nothing_else() {
    let memory = Backing::new(BackingKind::Anonymous, SIZE_BYTES).unwrap();
    let devices = Devices::new(FlushDomain::new(), &memory);
    let mut engine = devices.engine(3);
    let aborted =
        |access, reason| Err(DmaError::Aborted(FaultRecord { source_id: 3, gpa: Gpa(address(5, 1)), access, reason }));
    assert_eq!(engine.read(Gpa(address(5, 1))), aborted(Access::Read, 0x86));
    devices.map(GfnRange::new(all_pages().start, 16), &memory, 0, PageSize::Size4K);
    assert_eq!(engine.write(Gpa(address(5, 1)), 77), Ok(()), "no fault is cached");
    assert_eq!((engine.read(Gpa(address(5, 1))), in_memory(&memory, 5, 1)), (Ok(77), 77));
    // Without the right to write, which is flushed.
    let read_only = Protection { writable: false, attributes: LeafAttributes::DATA };
    assert_eq!(devices.vm.protect_range(GfnRange::new(Gfn(all_pages().start.0 + 5), 1), &read_only), Ok(1));
    assert_eq!(engine.write(Gpa(address(5, 1)), 78), aborted(Access::Write, 0x85).map(|_: u64| ()));
    assert_eq!(engine.read(Gpa(address(5, 1))), Ok(77));
    let beyond = FaultRecord { source_id: 3, gpa: Gpa(1 << 48), access: Access::Read, reason: 0x83 };
    assert_eq!(engine.read(Gpa(1 << 48)), Err(DmaError::Aborted(beyond)));
    assert!(matches!(engine.read(Gpa(START + 4)), Err(DmaError::Machine(CpuError::Unaligned { .. }))));
    let (nr_faults, records) = devices.iommu.faults();
    assert_eq!((nr_faults, records.len()), (3, 3));
    assert_eq!(records.iter().map(|record| record.reason).collect::<Vec<_>>(), [0x86, 0x85, 0x83]);
}

#[test]
fn fault_records_overflow_and_are_counted() {
    let memory = Backing::new(BackingKind::Anonymous, SIZE_BYTES).unwrap();
    let devices = Devices::new(FlushDomain::new(), &memory);
    let mut engine = devices.engine(1);
    for page in 0..100 {
        assert!(engine.write(Gpa(address(page, 0)), 1).is_err());
    }
    let (nr_faults, records) = devices.iommu.faults();
    assert_eq!((nr_faults, records.len()), (100, MAX_RECORDS));
}

/// What one thread alone writes: the word `word` of each page, and what it has written last there.
struct Writer {
    word: u64,
    written: Vec<u64>,
    random: u64,
}

impl Writer {
    fn new(word: u64) -> Writer {
        Writer { word, written: vec![0; NR_PAGES as usize], random: 0x9e37_79b9_7f4a_7c15 ^ word << 32 }
    }

    /// A page, and what to write there.
    fn next(&mut self) -> (u64, u64) {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let page = self.random >> 32 & (NR_PAGES - 1);
        (page, self.written[page as usize] + 1)
    }

    /// Writes and reads by `write` and `read` until `is_over`. Each word is read as it was written
    /// last. Returns how often.
    fn run(&mut self, is_over: &AtomicBool, mut write: impl FnMut(u64, u64), mut read: impl FnMut(u64) -> u64) -> u64 {
        let mut nr_writes = 0;
        while !is_over.load(Ordering::Relaxed) || nr_writes < 1000 {
            let (page, value) = self.next();
            let at = address(page, self.word);
            assert_eq!(read(at), self.written[page as usize], "page {page}, word {}", self.word);
            write(at, value);
            self.written[page as usize] = value;
            nr_writes += 1;
        }
        nr_writes
    }

    fn verify(&self, memory: &Backing) {
        for page in 0..NR_PAGES {
            assert_eq!(in_memory(memory, page, self.word), self.written[page as usize], "page {page}");
        }
    }
}

/// All that a hypervisor does to the CPUs' tree, until `is_over`. Returns how many rounds.
fn operate<F: Format>(vm: &Vm<MachineHost, F>, is_over: &AtomicBool) -> u64 {
    let range = all_pages();
    let mut bitmap = vec![0; (NR_PAGES / 64) as usize];
    let mut nr_rounds = 0;
    while !is_over.load(Ordering::Relaxed) || nr_rounds < 3 {
        vm.set_user_memory_region(region(MemoryRegionFlags::LOG_DIRTY_PAGES, SIZE_BYTES, None)).unwrap();
        for _ in 0..3 {
            vm.get_dirty_log(0, &mut bitmap).unwrap();
        }
        vm.age_range(range).unwrap();
        vm.set_user_memory_region(region(NONE, SIZE_BYTES, None)).unwrap();
        vm.split_range(range, PageSize::Size4K).unwrap();
        vm.recover_range(range).unwrap();
        drop(vm.invalidate_range(GfnRange::new(Gfn(range.start.0 + nr_rounds % NR_PAGES), 7)).unwrap());
        nr_rounds += 1;
    }
    nr_rounds
}

/// CPUs of format `F` and devices share all memory, each with a tree of its own.
fn beside_cpus<F: HardwareFormat>(tracking: AccessTracking) {
    let memory = Backing::new(BackingKind::Anonymous, SIZE_BYTES).unwrap();
    let devices = Devices::new(FlushDomain::new(), &memory);
    for page in 0..NR_PAGES {
        // The host chooses its frames by pages.
        devices.map(GfnRange::new(Gfn(all_pages().start.0 + page), 1), &memory, page, PageSize::Size4K);
    }
    let domain = Arc::new(FlushDomain::new());
    let host = MachineHost::new(Arc::clone(&domain), 1 << 12).unwrap();
    let vm = Arc::new(Vm::<_, F>::new(host, Config::default().with_access_tracking(tracking)).unwrap());
    let backing = BackingSlice { backing: memory.clone(), offset_bytes: 0 };
    vm.set_user_memory_region(region(NONE, SIZE_BYTES, Some(backing))).unwrap();

    let is_over = AtomicBool::new(false);
    let mut writers = [0, 1, 200, WORDS_PER_PAGE - 1].map(Writer::new);
    thread::scope(|scope| {
        let [first, second, third, fourth] = &mut writers;
        let is_over = &is_over;
        for (source_id, writer) in [(1, first), (2, second)] {
            let engine = std::cell::RefCell::new(devices.engine(source_id));
            scope.spawn(move || {
                // No DMA is aborted: not one request fails.
                let write = |at, value| engine.borrow_mut().write(Gpa(at), value).unwrap();
                let nr_writes = writer.run(is_over, write, |at| engine.borrow_mut().read(Gpa(at)).unwrap());
                assert!(nr_writes >= 1000);
            });
        }
        for writer in [third, fourth] {
            let vcpu: Vcpu<_, F> = vm.create_vcpu().unwrap();
            let cpu = Cpu::<_, F>::new(vcpu, Port::new(&domain), 1, vm.root(), Geometry::default());
            let cpu = std::cell::RefCell::new(cpu);
            scope.spawn(move || {
                let write = |at, value| cpu.borrow_mut().write(Gva(at), value).unwrap();
                writer.run(is_over, write, |at| cpu.borrow_mut().read(Gva(at)).unwrap());
            });
        }
        let operator = scope.spawn(|| operate(&vm, is_over));
        thread::sleep(RUN_TIME);
        is_over.store(true, Ordering::Relaxed);
        assert!(operator.join().unwrap() >= 3);
    });
    assert_eq!(devices.iommu.faults(), (0, Vec::new()), "{}", F::NAME);
    writers.iter().for_each(|writer| writer.verify(&memory));
    // What the one side has written, the other one reads.
    let mut engine = devices.engine(3);
    for page in 0..NR_PAGES {
        for writer in &writers {
            let read = engine.read(Gpa(address(page, writer.word)));
            assert_eq!(read, Ok(writer.written[page as usize]), "page {page}, word {}", writer.word);
        }
    }
}

#[test]
fn no_dma_is_aborted_beside_the_operations_on_the_cpus_tree() {
    slat::for_each_format!(F => {
        beside_cpus::<F>(AccessTracking::AccessedBit);
    });
    beside_cpus::<slat::format::Ept>(AccessTracking::Faults);
}

/// Marks a frame that is not the device's.
const FOREIGN: u64 = 0xdead_dead_dead_dead;

/// A device writes to pages that are unmapped and mapped to other frames all the time, until
/// `is_done` of the result and the time. Returns how often it wrote to a frame that had been
/// released.
fn moving_beside_dma(domain: FlushDomain, is_done: impl Fn(u64, Duration) -> bool) -> u64 {
    const NR_MOVED: u64 = 16;
    let memory = Backing::new(BackingKind::Anonymous, SIZE_BYTES).unwrap();
    let devices = Devices::new(domain, &memory);
    let range = GfnRange::new(all_pages().start, NR_MOVED);
    let in_frame = |page: u64, word: u64| {
        let at = memory.as_ptr().wrapping_add((page * PAGE_SIZE + word * 8) as usize).cast::<u64>();
        // SAFETY: inside the memory, aligned; others write it atomically.
        unsafe { AtomicU64::from_ptr(at) }
    };
    (0..NR_PAGES).for_each(|page| in_frame(page, 3).store(FOREIGN, Ordering::SeqCst));
    let (is_over, nr_written) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut nr_stale, mut nr_released) = (0, 0);
    thread::scope(|scope| {
        let (is_over, nr_written) = (&is_over, &nr_written);
        for source_id in [1, 2] {
            let mut engine = devices.engine(source_id);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    for page in 0..NR_MOVED {
                        match engine.write(Gpa(address(page, 3)), page) {
                            Ok(()) => drop(nr_written.fetch_add(1, Ordering::Relaxed)),
                            // It is being moved.
                            Err(DmaError::Aborted(record)) => assert_eq!(record.reason, 0x85),
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            });
        }
        let start = Instant::now();
        let mut place = 0;
        // And until a device has written: on a busy machine that may take longer.
        while !is_done(nr_stale, start.elapsed()) || nr_written.load(Ordering::Relaxed) == 0 {
            // One page after the other: their frames need not be adjacent.
            for page in 0..NR_MOVED {
                devices.map(GfnRange::new(Gfn(range.start.0 + page), 1), &memory, place + page, PageSize::Size4K);
            }
            thread::yield_now();
            assert_eq!(devices.vm.unmap_range(range), Ok(NR_MOVED));
            // Each frame once, and each of them.
            let released = std::mem::take(&mut *devices.vm.host().released.lock());
            let frames: Vec<u64> =
                released.iter().flat_map(|(range, first)| first.0..first.0 + range.nr_pages()).collect();
            assert_eq!((frames.len(), frames.iter().collect::<HashSet<_>>().len()), (16, 16));
            nr_released += frames.len() as u64;
            // The frames have another owner now.
            (place..place + NR_MOVED).for_each(|page| in_frame(page, 3).store(FOREIGN, Ordering::SeqCst));
            thread::yield_now();
            // Of all frames: a translation may be older than the last mapping.
            for page in 0..NR_PAGES {
                nr_stale += u64::from(in_frame(page, 3).swap(FOREIGN, Ordering::SeqCst) != FOREIGN);
            }
            place = (place + NR_MOVED) % (NR_PAGES - NR_MOVED);
        }
        is_over.store(true, Ordering::Relaxed);
        assert!(nr_released > 0);
    });
    nr_stale
}

#[test]
fn no_dma_goes_through_a_stale_translation() {
    assert_eq!(moving_beside_dma(FlushDomain::new(), |_, elapsed| elapsed > RUN_TIME), 0);
}

#[test]
fn dma_through_a_stale_translation_is_found() {
    // The flush names no pages: the IOTLB keeps what it has.
    let domain = FlushDomain::new().with_defect(Defect::NoRanges);
    let is_done = |nr_stale, elapsed| nr_stale > 0 || elapsed > Duration::from_secs(120);
    assert!(moving_beside_dma(domain, is_done) > 0);
}
