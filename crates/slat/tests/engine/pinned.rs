//! Pinned memory: what a caller maps in advance stays as it is mapped, and its frames are released
//! once.

use std::sync::Arc;

use crate::common::answers::answer_vm;
use crate::common::{MIB, TestBacking, TestHost, each, lazily_splitting, translate};
use slat::baselines::Locking;
use slat::error::{FaultError, MapError, SlotError};
use slat::format::{CpuFeatures, Execute, Format, Hardware, LeafAttributes, MemoryType, Npt};
use slat::tables::{AccessTracking, Mapping, Protection};
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Hpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE,
    PageSize, Pfn, Vm,
};

const PINNED: MemoryRegionFlags = MemoryRegionFlags::PINNED;
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const RESUME: Result<Outcome, FaultError> = Ok(Outcome::Resume);

pub const MEMORY: Protection = Protection { writable: true, attributes: LeafAttributes::DATA };
const READ_ONLY: Protection = Protection { writable: false, ..MEMORY };

/// Frames equal the page numbers modulo 1 GiB.
pub const SHIFT: u64 = 1 << 18;

pub fn pages(first: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(first), nr_pages)
}

pub fn mapping(first: u64, nr_pages: u64, largest: PageSize) -> Mapping {
    Mapping { range: pages(first, nr_pages), pfn: Pfn(first + SHIFT), protection: MEMORY, largest }
}

pub fn region(slot: u32, first: u64, nr_pages: u64, flags: MemoryRegionFlags) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion {
        slot,
        flags,
        guest_phys_addr: Gfn(first).gpa(),
        memory_size: nr_pages * PAGE_SIZE,
        backing: Some(Arc::new(TestBacking::new(0x10_0000, nr_pages, PageSize::Size2M))),
        userfault_bitmap: None,
    }
}

fn change(slot: u32, first: u64, nr_pages: u64, flags: MemoryRegionFlags) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion { backing: None, ..region(slot, first, nr_pages, flags) }
}

/// A VM whose memslot 0 is pinned, and has the first `nr_pages` pages.
pub fn pinned_vm<F: Format>(config: Config, nr_pages: u64) -> Arc<Vm<TestHost, F>> {
    let vm = Arc::new(Vm::new(TestHost::default(), config).unwrap());
    vm.set_user_memory_region(region(0, 0, nr_pages, PINNED)).unwrap();
    vm
}

/// Asserts which pages are mapped, each to the frame of its number.
#[track_caller]
pub fn assert_mapped<F: Format>(vm: &Vm<TestHost, F>, range: GfnRange, is_mapped: impl Fn(u64) -> bool) {
    for page in range.start.0..range.end.0 {
        let found = translate(vm, Gfn(page).gpa()).map(|found| found.pfn);
        assert_eq!(found, is_mapped(page).then_some(Pfn(page + SHIFT)), "page {page:#x}");
    }
}

fn frames(ranges: &[GfnRange]) -> Vec<(Gfn, Pfn)> {
    let all = ranges.iter().flat_map(|range| range.start.0..range.end.0);
    all.map(|page| (Gfn(page), Pfn(page + SHIFT))).collect()
}

fn size_pages(size: PageSize) -> u64 {
    match size {
        PageSize::Size4K => 1,
        PageSize::Size2M => 512,
        PageSize::Size1G => 1 << 18,
    }
}

each!(any_range_is_mapped_by_the_largest_leaves_that_fit, of_sizes);
fn of_sizes<F: Format>(locking: Locking) {
    let gib = 1 << 18;
    for (first, nr_pages) in
        [(0, 1), (5, 1), (511, 2), (3, 700), (0, 512), (512, 1024), (500, 2 * gib), (gib, gib), (gib - 512, gib + 1024)]
    {
        for largest in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
            if largest == PageSize::Size4K && nr_pages > 2000 {
                continue;
            }
            let vm = pinned_vm::<F>(lazily_splitting(locking), 4 * gib);
            assert_eq!(vm.map_range(&mapping(first, nr_pages, largest)), Ok(()));
            let range = pages(first, nr_pages);
            let mut page = first;
            let mut sizes = [0; 3];
            while page < first + nr_pages {
                let level = [Level::L1G, Level::L2M, Level::L4K].into_iter().find(|level| {
                    let fits = page % level.nr_pages() == 0 && range.covers(Gfn(page).block(*level));
                    fits && level.nr_pages() <= size_pages(largest)
                });
                let found = translate(&vm, Gfn(page).gpa()).unwrap();
                assert_eq!((found.pfn, Some(found.level), found.writable), (Pfn(page + SHIFT), level, true));
                sizes[usize::from(found.level.0) - 1] += found.level.nr_pages();
                page += found.level.nr_pages();
            }
            let stats = vm.stats();
            assert_eq!([stats.pages_4k(), stats.pages_2m() * 512, stats.pages_1g() * gib], sizes);
            assert!(first == 0 || translate(&vm, Gfn(first - 1).gpa()).is_none());
            assert_eq!(translate(&vm, range.end.gpa()), None);
            assert_eq!(vm.host().nr_flushes(), 0);
            assert_eq!(vm.unmap_range(range), Ok(nr_pages));
            assert_eq!((vm.stats().pages_4k(), vm.stats().pages_2m(), vm.stats().pages_1g()), (0, 0, 0));
            // One run, after the flush.
            assert_eq!(*vm.host().released().lock().unwrap(), [(range, Pfn(first + SHIFT), 1)]);
            assert_eq!(vm.unmap_range(range), Ok(0), "nothing is there any more");
            assert_eq!(vm.unmap_range(pages(0, 4 * gib)), Ok(0));
            drop(vm.invalidate_range(pages(0, 4 * gib)));
            vm.reclaim();
            assert!(vm.host().live_tables() <= 3, "{} tables", vm.host().live_tables());
        }
    }
}

each!(a_part_is_unmapped_alone, parts);
fn parts<F: Format>(locking: Locking) {
    for largest in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
        let nr_pages = if largest == PageSize::Size1G { 1 << 18 } else { 2048 };
        let vm = pinned_vm::<F>(lazily_splitting(locking), nr_pages);
        vm.map_range(&mapping(0, nr_pages, largest)).unwrap();
        for gone in [pages(700, 1), pages(512 + 511, 2), pages(0, 1), pages(1536, 512), pages(1500, 10)] {
            assert_eq!(vm.unmap_range(gone), Ok(gone.nr_pages()));
            assert_eq!(vm.host().take_released(), frames(&[gone]));
            assert_mapped(&vm, pages(0, 2048), |page| !gone.contains(Gfn(page)));
            vm.map_range(&mapping(gone.start.0, gone.nr_pages(), largest)).unwrap();
            assert_mapped(&vm, pages(0, 2048), |_| true);
        }
        assert_eq!(vm.unmap_range(pages(0, nr_pages)), Ok(nr_pages));
        assert_eq!(vm.host().take_released().len() as u64, nr_pages);
    }
}

// The frames of pages are released in runs. Where there are more runs than a batch has room for, the
// zap flushes in the midst of a page-table page, and goes on from there: no page gets its number
// twice, which debug builds assert.
each!(scattered_frames_are_released_in_parts, scattered);
fn scattered<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(lazily_splitting(locking), 2048);
    let frame = |page: u64| Pfn(2 * page + SHIFT);
    for page in 0..1500 {
        let pfn = frame(page);
        assert_eq!(vm.map_range(&Mapping { pfn, ..mapping(page, 1, PageSize::Size4K) }), Ok(()));
    }
    let flushes_before = vm.host().nr_flushes();
    assert_eq!(vm.unmap_range(pages(0, 2048)), Ok(1500));
    let expected: Vec<_> = (0..1500).map(|page| (Gfn(page), frame(page))).collect();
    assert_eq!(vm.host().take_released(), expected);
    assert!(vm.host().nr_flushes() - flushes_before >= 3);
}

each!(without_memory_to_split_nothing_changes, no_memory);
fn no_memory<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(lazily_splitting(locking), 2048);
    vm.map_range(&mapping(0, 2048, PageSize::Size2M)).unwrap();
    vm.host().fail_after(0);
    for range in [pages(1, 1), pages(512, 513), pages(3, 2000), pages(1, 511)] {
        assert_eq!(vm.unmap_range(range), Err(MapError::OutOfMemory), "{range:?}");
        assert_eq!(vm.protect_range(range, &READ_ONLY), Err(MapError::OutOfMemory), "{range:?}");
        assert_eq!(vm.host().take_released(), []);
        assert_eq!(vm.stats().pages_2m(), 4);
    }
    // Whole pages need none.
    assert_eq!(vm.unmap_range(pages(512, 512)), Ok(512));
    vm.host().never_fail();
    assert_eq!(vm.unmap_range(pages(1, 1)), Ok(1));
    assert_mapped(&vm, pages(0, 2048), |page| page != 1 && !(512..1024).contains(&page));
}

each!(a_mapping_that_fails_leaves_nothing, failing_allocator);
fn failing_allocator<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(lazily_splitting(locking), 1 << 20);
    let range = (3, 5000);
    for nr_allocations in 0.. {
        vm.host().fail_after(nr_allocations);
        let result = vm.map_range(&mapping(range.0, range.1, PageSize::Size4K));
        if result.is_ok() {
            assert!(nr_allocations > 10);
            break;
        }
        assert_eq!(result, Err(MapError::OutOfMemory));
        assert_mapped(&vm, pages(0, 5120), |_| false);
        assert_eq!((vm.stats().pages_4k(), vm.host().take_released()), (0, vec![]));
        // Page-table pages that are empty stay until the range is unmapped.
        assert_eq!(vm.unmap_range(pages(0, 1 << 20)), Ok(0));
    }
    assert_mapped(&vm, pages(0, 5120), |page| (3..5003).contains(&page));
    vm.host().never_fail();
}

each!(an_overlap_names_both_and_is_undone, overlaps);
fn overlaps<F: Format>(locking: Locking) {
    for (size, taken) in [(PageSize::Size4K, pages(1300, 3)), (PageSize::Size2M, pages(1024, 512))] {
        let vm = pinned_vm::<F>(lazily_splitting(locking), 4096);
        vm.map_range(&mapping(taken.start.0, taken.nr_pages(), size)).unwrap();
        for (first, nr_pages) in [(0, 4096), (taken.start.0 - 1, 2), (taken.start.0 + 1, 1)] {
            let first_taken = first.max(taken.start.0);
            let there = MapError::AlreadyMapped {
                gpa: Gfn(first_taken).gpa(),
                pfn: Pfn(first_taken + 3 * SHIFT),
                mapped: Pfn(first_taken + SHIFT),
            };
            for largest in [PageSize::Size4K, PageSize::Size2M] {
                let other = Mapping { pfn: Pfn(first + 3 * SHIFT), ..mapping(first, nr_pages, largest) };
                assert_eq!(vm.map_range(&other), Err(there));
                assert_mapped(&vm, pages(0, 4096), |page| taken.contains(Gfn(page)));
                assert_eq!(vm.host().take_released(), [], "the caller keeps its frames");
            }
        }
        assert!(vm.host().nr_flushes() > 0, "what was mapped for a moment is flushed");
        assert_eq!(vm.unmap_range(pages(0, 4096)), Ok(taken.nr_pages()));
        assert_eq!(vm.host().take_released(), frames(&[taken]));
    }
}

each!(bad_input_is_refused, bad_input);
fn bad_input<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(lazily_splitting(locking), 512);
    vm.set_user_memory_region(region(1, 512, 512, MemoryRegionFlags::empty())).unwrap();
    vm.set_user_memory_region(region(2, 1024, 64, PINNED)).unwrap();
    vm.set_user_memory_region(region(3, 1088, 64, PINNED)).unwrap();
    let good = mapping(0, 1, PageSize::Size4K);
    let map = |mapping: Mapping| vm.map_range(&mapping);
    for range in [pages(7, 0), GfnRange { start: Gfn(7), end: Gfn(3) }] {
        let empty = MapError::EmptyRange { start: range.start, end: range.end };
        assert_eq!(map(Mapping { range, ..good }), Err(empty));
        assert_eq!(vm.unmap_range(range), Err(empty));
        assert_eq!(vm.protect_range(range, &MEMORY), Err(empty));
    }
    let end = 1 << (vm.gpa_bits() - 12);
    for (range, gpa) in [
        (pages(end, 1), Gpa(end * PAGE_SIZE)),
        (pages(0, end + 1), Gpa(end * PAGE_SIZE)),
        (GfnRange { start: Gfn(u64::MAX - 1), end: Gfn(u64::MAX) }, Gpa((u64::MAX - 1).saturating_mul(PAGE_SIZE))),
    ] {
        let too_high = MapError::AddressTooHigh { gpa, gpa_bits: vm.gpa_bits() };
        assert_eq!(map(Mapping { range, ..good }), Err(too_high));
        assert_eq!(vm.unmap_range(range), Err(too_high));
        assert_eq!(vm.protect_range(range, &MEMORY), Err(too_high));
    }
    let last = (1 << (F::HPA_BITS - 12)) - 1;
    for pfn in [last + 1, last, last - 1, u64::MAX, u64::MAX - 1].map(Pfn) {
        assert_eq!(map(Mapping { range: pages(0, 3), pfn, ..good }), Err(MapError::FrameTooHigh { pfn }));
    }
    let not_pinned = |page: u64| Err(MapError::NotPinned { gpa: Gfn(page).gpa() });
    for (range, first) in [
        (pages(512, 1), 512),
        (pages(2000, 1), 2000),
        (pages(0, 513), 512),
        (pages(1024, 128), 1088),
        (pages(1151, 2), 1152),
        (pages(500, 1000), 512),
    ] {
        assert_eq!(map(Mapping { range, ..good }), not_pinned(first), "{range:?}");
        assert_eq!(map(Mapping { range, largest: PageSize::Size2M, ..good }), not_pinned(first));
    }
    // A device is not executed, in any format.
    let attributes = LeafAttributes { memory: MemoryType::Device, execute: Execute::All };
    let unsupported = MapError::UnsupportedAttributes { gpa: Gpa(0), attributes };
    let protection = Protection { writable: true, attributes };
    assert_eq!(map(Mapping { protection, ..good }), Err(unsupported));
    assert_eq!(vm.protect_range(good.range, &protection), Err(unsupported));
    for flags in [LOG, MemoryRegionFlags::READONLY, MemoryRegionFlags::GUEST_MEMFD, MemoryRegionFlags::USERFAULT] {
        let alone = SlotError::PinnedAlone { slot: 9, flags: (PINNED | flags).bits() };
        assert_eq!(vm.set_user_memory_region(region(9, 4096, 1, PINNED | flags)), Err(alone));
    }
    let log_later = vm.set_user_memory_region(change(0, 0, 512, PINNED | LOG));
    assert_eq!(log_later, Err(SlotError::PinnedAlone { slot: 0, flags: (PINNED | LOG).bits() }));
    for (slot, first, flags) in [(0, 0, MemoryRegionFlags::empty()), (0, 0, LOG), (1, 512, PINNED)] {
        assert_eq!(vm.set_user_memory_region(change(slot, first, 512, flags)), Err(SlotError::PinnedFixed { slot }));
    }
    assert_eq!((vm.stats().pages_4k(), vm.stats().pages_2m(), vm.host().nr_flushes()), (0, 0, 0));
    // A range in flight overlaps.
    let held = vm.invalidate_range(pages(3, 1)).unwrap();
    let busy = MapError::Busy { gpa: Gfn(3).gpa() };
    assert_eq!(map(mapping(0, 512, PageSize::Size2M)), Err(MapError::Busy { gpa: Gpa(0) }));
    assert_eq!(map(mapping(3, 1, PageSize::Size4K)), Err(busy));
    assert_eq!(map(mapping(0, 8, PageSize::Size4K)), Err(busy));
    assert_mapped(&vm, pages(0, 512), |_| false);
    assert_eq!(map(mapping(4, 100, PageSize::Size4K)), Ok(()), "beside it");
    assert_eq!(map(mapping(3, 1, PageSize::Size4K)), Err(busy), "by the short way, too");
    drop(held);
    assert_eq!(map(mapping(0, 4, PageSize::Size4K)), Ok(()));
    assert_mapped(&vm, pages(0, 512), |page| page < 104);
}

#[test]
fn frames_that_cross_an_encryption_bit_are_refused() {
    let hardware = Hardware { address_bits: Hpa(1 << 50), ..Hardware::default() };
    let vm = answer_vm::<Npt>(Config::default(), hardware, 1 << 32, PINNED);
    let bit = 1 << 38;
    for (pfn, nr_pages, is_good) in
        [(bit - 1, 1, true), (bit - 1, 2, false), (bit, 1, false), (2 * bit - 1, 1, false), (2 * bit, 7, true)]
    {
        let mapping = Mapping { pfn: Pfn(pfn), ..mapping(0, nr_pages, PageSize::Size4K) };
        let expected = if is_good { Ok(()) } else { Err(MapError::FrameTooHigh { pfn: Pfn(pfn) }) };
        assert_eq!(vm.map_range(&mapping), expected, "{pfn:#x}");
        let found = vm.translate(Gpa(0)).unwrap().map(|found| found.pfn);
        assert_eq!(found, is_good.then_some(Pfn(pfn)), "the host does not see the bit");
        vm.unmap_range(pages(0, 8)).unwrap();
    }
}

each!(no_other_operation_changes_a_pinned_page, untouched);
fn untouched<F: Format>(locking: Locking) {
    for access_tracking in [AccessTracking::AccessedBit, AccessTracking::Faults] {
        let config = lazily_splitting(locking).with_access_tracking(access_tracking);
        let vm = pinned_vm::<F>(config, 1200);
        // An ordinary memslot shares the block of 2 MiB with the end of the pinned one.
        vm.set_user_memory_region(region(1, 1200, 2000, MemoryRegionFlags::empty())).unwrap();
        vm.map_range(&mapping(0, 1200, PageSize::Size2M)).unwrap();
        let ptes = || {
            let pte = |page: u64| translate(&vm, Gfn(page).gpa()).map(|found| found.pte);
            (0..1200).map(pte).collect::<Vec<_>>()
        };
        let before = ptes();
        let mut vcpu = vm.create_vcpu().unwrap();
        vcpu.pre_fault_memory(Gfn(1200).gpa(), 2000 * PAGE_SIZE, Access::Write).unwrap();
        let all = pages(0, 4096);
        vm.set_user_memory_region(change(1, 1200, 2000, LOG)).unwrap();
        for _ in 0..2 {
            for page in 1200..1536 {
                assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), Access::Write), RESUME);
            }
            assert!(vm.get_dirty_log(1, &mut [0; 32]).unwrap() >= 336);
        }
        vm.set_user_memory_region(change(1, 1200, 2000, MemoryRegionFlags::empty())).unwrap();
        assert!(vm.test_age_range(all).unwrap() <= 2000);
        vm.age_range(all).unwrap();
        assert_eq!(vm.age_range(pages(0, 1200)), Ok(0));
        assert_eq!(vm.split_range(pages(0, 1024), PageSize::Size4K), Ok(0));
        vm.recover_range(all).unwrap();
        assert_eq!(ptes(), before);
        // Each access works, or is a device's.
        for page in [0, 600, 1199] {
            assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), Access::Write), RESUME);
            assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), Access::Read), RESUME);
        }
        assert_eq!((ptes(), vm.host().take_released()), (before, vec![]));
    }
}

each!(a_pinned_page_is_not_recovered_although_its_backing_has_its_frame, like_the_backing);
fn like_the_backing<F: Format>(locking: Locking) {
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), lazily_splitting(locking)).unwrap());
    let backing = Arc::new(TestBacking::new(SHIFT, 1024, PageSize::Size2M));
    vm.set_user_memory_region(MemoryRegion { backing: Some(backing), ..region(0, 0, 1024, PINNED) }).unwrap();
    vm.map_range(&mapping(0, 1024, PageSize::Size4K)).unwrap();
    assert_eq!(vm.recover_range(pages(0, 1024)), Ok(0));
    assert_eq!((vm.stats().pages_4k(), vm.stats().pages_2m()), (1024, 0));
    assert_mapped(&vm, pages(0, 1024), |_| true);
}

each!(a_split_beside_rings_keeps_the_right_to_write, beside_rings);
fn beside_rings<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(Config::default().with_locking(locking), 1024);
    vm.enable_dirty_ring(256).unwrap();
    vm.map_range(&mapping(0, 1024, PageSize::Size2M)).unwrap();
    assert_eq!(vm.unmap_range(pages(3, 1)), Ok(1));
    assert!((0..1024).all(|page| translate(&vm, Gfn(page).gpa()).is_some_and(|found| found.writable) == (page != 3)));
}

each!(a_fault_on_what_is_not_mapped_exits, exits);
fn exits<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(lazily_splitting(locking), 1024);
    vm.map_range(&Mapping { protection: READ_ONLY, ..mapping(8, 8, PageSize::Size4K) }).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for (page, access) in [(0, Access::Read), (7, Access::Write), (600, Access::Execute), (8, Access::Write)] {
        let gpa = Gfn(page).gpa();
        assert_eq!(vcpu.handle_fault(gpa, access), Ok(Outcome::Exit(Exit::Mmio { gpa, access })));
    }
    assert_eq!(vcpu.handle_fault(Gfn(8).gpa(), Access::Read), RESUME);
    if (F::attribute_bits(LeafAttributes::DATA, &Hardware::default())).is_some() {
        let gpa = Gfn(9).gpa();
        let exit = Exit::Mmio { gpa, access: Access::Execute };
        assert_eq!(vcpu.handle_fault(gpa, Access::Execute), Ok(Outcome::Exit(exit)));
    }
    let none = FaultError::NoMemslot { gpa: Gpa(0) };
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 1 << 20, Access::Read), Err(none));
    assert_eq!(vcpu.pre_fault_pages(&[Gpa(0), Gpa(4096)], Access::Write), Err(none));
    assert_eq!((vm.stats().pages_4k(), vm.host().resolves.load(std::sync::atomic::Ordering::SeqCst)), (8, 0));
}

// Another thread may have changed the leaves, and be preempted before its flush.
each!(a_protection_flushes_also_what_has_the_rights_already, protect_twice);
fn protect_twice<F: Format>(locking: Locking) {
    for largest in [PageSize::Size4K, PageSize::Size2M] {
        let vm = pinned_vm::<F>(lazily_splitting(locking), 2048);
        vm.map_range(&mapping(0, 1024, largest)).unwrap();
        for _ in 0..2 {
            vm.host().flushes.lock().unwrap().clear();
            assert_eq!(vm.protect_range(pages(0, 1024), &READ_ONLY), Ok(1024));
            let flushed = vm.host().flushes.lock().unwrap().concat();
            assert!((0..1024).all(|page| flushed.iter().any(|range| range.contains(Gfn(page)))), "{flushed:?}");
        }
        vm.host().flushes.lock().unwrap().clear();
        assert_eq!(vm.protect_range(pages(1024, 1024), &READ_ONLY), Ok(0));
        assert_eq!(vm.host().flushes.lock().unwrap().len(), 0, "nothing is mapped there");
    }
}

each!(rights_change_and_the_memory_type_stays, protect);
fn protect<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(lazily_splitting(locking), 2048);
    vm.map_range(&mapping(0, 1536, PageSize::Size2M)).unwrap();
    let is_writable = |page: u64| translate(&vm, Gfn(page).gpa()).is_some_and(|found| found.writable);
    assert_eq!(vm.protect_range(pages(100, 900), &READ_ONLY), Ok(900));
    assert!((0..1536).all(|page| is_writable(page) != (100..1000).contains(&page)));
    assert_mapped(&vm, pages(0, 2048), |page| page < 1536);
    let flushed = vm.host().flushes.lock().unwrap().concat();
    assert!(flushed.iter().any(|range| range.contains(Gfn(100))), "{flushed:?}");
    assert_eq!(vm.protect_range(pages(0, 2048), &MEMORY), Ok(1536), "pages that are not mapped do not count");
    assert!((0..1536).all(is_writable));
    let executable = LeafAttributes { execute: Execute::All, ..LeafAttributes::DATA };
    assert_eq!(vm.protect_range(pages(3, 1), &Protection { attributes: executable, ..MEMORY }), Ok(1));
    let found = vm.translate(Gfn(3).gpa()).unwrap().unwrap();
    assert_eq!(found.attributes.execute, Execute::All);
    let device = Protection { writable: true, attributes: LeafAttributes::DEVICE };
    let mapped = found.attributes.memory;
    let before = translate(&vm, Gfn(1).gpa()).unwrap().pte;
    let bits = |attributes| F::attribute_bits(attributes, &Hardware::default());
    for range in [pages(0, 8), pages(2, 1), pages(1535, 100)] {
        if bits(LeafAttributes::DEVICE) == bits(LeafAttributes::DATA) {
            // The format says nothing of memory types.
            continue;
        }
        let fixed = MapError::MemoryTypeFixed { gpa: range.start.gpa(), mapped };
        assert_eq!(vm.protect_range(range, &device), Err(fixed));
    }
    assert_eq!(translate(&vm, Gfn(1).gpa()).unwrap().pte, before);
    assert_eq!(vm.unmap_range(pages(0, 2048)), Ok(1536));
    assert_eq!(vm.host().take_released(), frames(&[pages(0, 1536)]));
}

each!(rights_change_under_each_name_of_a_memory_type, by_name);
fn by_name<F: Format>(locking: Locking) {
    let vm = pinned_vm::<F>(lazily_splitting(locking), 512);
    for memory in [MemoryType::WriteBack, MemoryType::AsGuest, MemoryType::NonCached, MemoryType::DeviceStrict] {
        let protection = Protection { writable: true, attributes: LeafAttributes { memory, execute: Execute::None } };
        match vm.map_range(&Mapping { protection, ..mapping(0, 3, PageSize::Size4K) }) {
            Ok(()) => {}
            Err(MapError::UnsupportedAttributes { .. }) => continue,
            error => panic!("{error:?}"),
        }
        let read_only = Protection { writable: false, ..protection };
        assert_eq!(vm.protect_range(pages(0, 3), &read_only), Ok(3), "{memory:?}");
        assert_eq!(vm.unmap_range(pages(0, 3)), Ok(3));
    }
}

each!(each_end_of_a_mapping_releases_its_frames_once, ends);
fn ends<F: Format>(locking: Locking) {
    let nr_pages = 1030;
    for end in ["invalidation", "deletion", "move", "drop"] {
        let vm = pinned_vm::<F>(lazily_splitting(locking), nr_pages);
        vm.map_range(&mapping(0, nr_pages, PageSize::Size2M)).unwrap();
        assert_eq!(vm.unmap_range(pages(7, 1)), Ok(1));
        assert_eq!(vm.host().take_released(), frames(&[pages(7, 1)]));
        vm.host().record_zapped();
        match end {
            "invalidation" => drop(vm.invalidate_range(pages(0, 4096)).unwrap()),
            "deletion" => vm.set_user_memory_region(change(0, 0, 0, PINNED)).unwrap(),
            "move" => vm.set_user_memory_region(change(0, 1 << 20, nr_pages, PINNED)).unwrap(),
            _ => {
                let released = Arc::clone(vm.host().released());
                drop(vm);
                let released: Vec<_> = released.lock().unwrap().iter().map(|&(range, pfn, _)| (range, pfn)).collect();
                let nr_released: u64 = released.iter().map(|(range, _)| range.nr_pages()).sum();
                assert_eq!(nr_released, nr_pages - 1);
                assert!(released.iter().all(|(range, pfn)| pfn.0 == range.start.0 + SHIFT && !range.contains(Gfn(7))));
                continue;
            }
        }
        assert_eq!(vm.host().take_released(), frames(&[pages(0, 7), pages(8, nr_pages - 8)]), "{end}");
        assert_eq!(vm.host().take_zapped(), [], "they are released, and not reported");
        assert_mapped(&vm, pages(0, 2048), |_| false);
    }
}

#[test]
fn executable_leaves_stay_small_with_the_erratum() {
    let hardware = Hardware { features: CpuFeatures::ITLB_MULTIHIT, ..Hardware::default() };
    let config = Config::default().with_hardware(hardware);
    let vm = Arc::new(Vm::<TestHost, slat::format::Ept>::new(TestHost::default(), config).unwrap());
    vm.set_user_memory_region(region(0, 0, 2 * MIB / PAGE_SIZE * 2, PINNED)).unwrap();
    let executable = Protection { writable: true, attributes: LeafAttributes::default() };
    vm.map_range(&Mapping { protection: executable, ..mapping(0, 512, PageSize::Size2M) }).unwrap();
    vm.map_range(&mapping(512, 512, PageSize::Size2M)).unwrap();
    let size = |page: u64| vm.translate(Gfn(page).gpa()).unwrap().unwrap().size;
    assert_eq!((size(0), size(512)), (PageSize::Size4K, PageSize::Size2M));
    assert_eq!(vm.protect_range(pages(512, 512), &executable), Ok(512));
    assert_eq!((size(512), size(1023)), (PageSize::Size4K, PageSize::Size4K));
}
