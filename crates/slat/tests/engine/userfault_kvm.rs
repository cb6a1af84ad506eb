//! Userfault with every other property of a memslot: the cases of KVM's tests
//! (`set_memory_region_test`, `guest_memfd_test`, `demand_paging_test`), and those with dirty logs,
//! rings, private pages, read-only memslots, and every configuration.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::log::{
    ACCESS_TRACKINGS, FAULT_AROUNDS, HUGE_PAGE_LOGGINGS, LOCKINGS, MANUAL_PROTECTS, dirty_trackings,
};
use crate::common::log::{LEAF_BY_LEAF, LOG, NO_FLAGS, pages_of, write_as_hardware};
use crate::common::{Call, MIB, PRIVATE_PFN, TestHost, assert_no_table_is_left, change, each, region, translate, vm};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::error::{FaultError, SlotError};
use slat::format::{Ept, Format, Npt};
use slat::slots::{MemoryAttributes, MemoryFaultFlags, UserfaultBitmap};
use slat::tables::FaultAround;
use slat::{
    Access, Config, Exit, GfnRange, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm,
};

const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
const READONLY: MemoryRegionFlags = MemoryRegionFlags::READONLY;
const PRIVATE: MemoryAttributes = MemoryAttributes::PRIVATE;
const SHARED: MemoryAttributes = MemoryAttributes::empty();
const RESUMED: Result<Outcome, FaultError> = Ok(Outcome::Resume);

const START: u64 = 2 * MIB;
const SIZE: u64 = 4 * MIB;
const PAGES: u64 = SIZE / PAGE_SIZE;
const FIRST_PFN: u64 = 0x400;

type Words = Arc<Vec<AtomicU64>>;

fn words(word: u64) -> Words {
    Arc::new((0..PAGES / 64).map(|_| AtomicU64::new(word)).collect())
}

fn set(words: &Words, page: u64) {
    words[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Release);
}

fn clear(words: &Words, page: u64) {
    words[page as usize / 64].fetch_and(!(1 << (page % 64)), Ordering::Release);
}

fn bitmap(words: &Words) -> Option<UserfaultBitmap> {
    Some(UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(words), PageSize::Size4K))
}

fn huge_bitmap(words: &Words) -> Option<UserfaultBitmap> {
    Some(UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(words), PageSize::Size2M))
}

fn gpa(page: u64) -> Gpa {
    Gpa(START + page * PAGE_SIZE)
}

fn create<F: Format>(vm: &Vm<TestHost, F>, flags: MemoryRegionFlags, userfault_bitmap: Option<UserfaultBitmap>) {
    let memory = region(0, START, SIZE, FIRST_PFN, PageSize::Size2M);
    vm.set_user_memory_region(MemoryRegion { flags, userfault_bitmap, ..memory }).unwrap();
}

fn turn<F: Format>(
    vm: &Vm<TestHost, F>,
    flags: MemoryRegionFlags,
    userfault_bitmap: Option<UserfaultBitmap>,
) -> Result<(), SlotError> {
    vm.set_user_memory_region(MemoryRegion { userfault_bitmap, ..change(0, flags, START, SIZE) })
}

fn exit_at(page: u64) -> Result<Outcome, FaultError> {
    Ok(Outcome::Exit(Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa: gpa(page), size: PAGE_SIZE }))
}

/// The frame and the level of a page.
fn found<F: Format>(vm: &Vm<TestHost, F>, page: u64) -> Option<(u64, Level)> {
    translate(vm, gpa(page)).map(|found| (found.pfn.0, found.level))
}

fn shared(page: u64) -> u64 {
    FIRST_PFN + page
}

fn private(page: u64) -> u64 {
    PRIVATE_PFN + shared(page)
}

/// A guest's access: exits are answered as by a VMM that fetches pages.
fn access<F: Format>(vm: &Vm<TestHost, F>, vcpu: &mut Vcpu<TestHost, F>, words: &Words, page: u64, how: Access) {
    for _ in 0..8 {
        let allowed = translate(vm, gpa(page)).filter(|found| how == Access::Read || found.writable);
        if let Some(allowed) = allowed {
            assert!(how == Access::Read || write_as_hardware(vm, gpa(page).gfn(), allowed));
            return;
        }
        match vcpu.handle_fault(gpa(page), how) {
            Ok(Outcome::Exit(Exit::MemoryFault { flags, gpa: at, size })) => {
                assert!(flags.contains(MemoryFaultFlags::USERFAULT));
                assert_eq!((at, size), (gpa(page), PAGE_SIZE));
                assert!(translate(vm, gpa(page)).is_none_or(|found| !found.writable));
                clear(words, page);
            }
            Ok(Outcome::Resume) => {}
            other => panic!("{other:?}"),
        }
    }
    panic!("{how:?} of page {page} still faults");
}

/// Every page exits once, also where the first fault finds its page-table page missing and where
/// calls map pages along with others. The log is exact.
fn every_page_arrives_once<F: Format>(config: Config) {
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    let words = words(u64::MAX);
    let mut memory = region(0, START, SIZE, FIRST_PFN, PageSize::Size2M);
    memory.backing.as_mut().and_then(Arc::get_mut).unwrap().is_resident = |_| true;
    let flags = USERFAULT | GUEST_MEMFD | LOG;
    vm.set_user_memory_region(MemoryRegion { flags, userfault_bitmap: bitmap(&words), ..memory }).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut log = vec![0; PAGES as usize / 64];
    let take = |log: &mut Vec<u64>| {
        vm.get_dirty_log(0, log).unwrap();
        if config.manual_protect != ManualProtect::Disabled {
            vm.clear_dirty_log(0, 0, PAGES, log).unwrap();
        }
        pages_of(log, 0)
    };
    take(&mut log);
    vm.host().modification_log.lock().unwrap().clear();
    let used = [0, 1, 2, 3, 65, 66, 200, 511, 512, 700, 701, PAGES - 1];
    vm.set_memory_attributes(gpa(65), 2 * PAGE_SIZE, PRIVATE).unwrap();
    for (index, page) in used.into_iter().enumerate() {
        let how = if index % 2 == 0 { Access::Write } else { Access::Read };
        let before = vm.stats().userfaults;
        access(&vm, &mut vcpu, &words, page, how);
        assert_eq!(vm.stats().userfaults - before, 1, "page {page}; {config:?}");
        let pfn = if (65..67).contains(&page) { private(page) } else { shared(page) };
        assert_eq!(found(&vm, page), Some((pfn, Level::L4K)), "{config:?}");
    }
    for page in (0..PAGES).filter(|page| !used.contains(page)) {
        assert_eq!(found(&vm, page), None, "page {page} has not arrived; {config:?}");
    }
    let written: Vec<u64> = used.into_iter().step_by(2).collect();
    assert_eq!(take(&mut log), written, "{config:?}");
    assert_eq!(take(&mut log), [0; 0], "{config:?}");
    // Poison: a zapped page stays in the log.
    access(&vm, &mut vcpu, &words, 2, Access::Write);
    access(&vm, &mut vcpu, &words, 200, Access::Write);
    set(&words, 2);
    assert_eq!(vm.rescan_userfault(0, 0, 64), Ok(61), "{config:?}");
    assert_eq!(found(&vm, 2), None);
    assert!(found(&vm, 3).is_some() && found(&vm, 200).is_some());
    assert_eq!(take(&mut log), [2, 200], "{config:?}");
    // All have arrived, and are mapped by small leaves while it is on.
    words.iter().for_each(|word| word.store(0, Ordering::Release));
    for page in 0..PAGES {
        access(&vm, &mut vcpu, &words, page, Access::Read);
        assert_eq!(found(&vm, page).unwrap().1, Level::L4K);
    }
    // Off: huge leaves are recovered where all pages are alike and the log allows it.
    turn(&vm, GUEST_MEMFD | LOG, None).unwrap();
    let by_writes = matches!(config.dirty_tracking, DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves);
    let comes_back = by_writes && config.huge_page_logging.marks_whole();
    let level = if comes_back { Level::L2M } else { Level::L4K };
    assert_eq!(found(&vm, 700), Some((shared(700), level)), "{config:?}");
    assert_eq!(found(&vm, 65), Some((private(65), Level::L4K)), "{config:?}");
    turn(&vm, GUEST_MEMFD, None).unwrap();
    assert_eq!(found(&vm, 700).map(|found| found.1), Some(Level::L2M), "{config:?}");
    assert_eq!(found(&vm, 66).map(|found| found.1), Some(Level::L4K), "{config:?}");
    vm.set_memory_attributes(gpa(65), 2 * PAGE_SIZE, SHARED).unwrap();
    assert_eq!(found(&vm, 65), None);
    vm.recover_range(GfnRange::new(gpa(0).gfn(), PAGES)).unwrap();
    access(&vm, &mut vcpu, &words, 65, Access::Read);
    assert_eq!(found(&vm, 65), Some((shared(65), Level::L2M)), "{config:?}");
    drop(vcpu);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

fn in_every_configuration<F: Format>() {
    let mut nr_tried = 0;
    for locking in LOCKINGS {
        for dirty_tracking in dirty_trackings::<F>() {
            for access_tracking in ACCESS_TRACKINGS {
                let around = FAULT_AROUNDS[nr_tried % FAULT_AROUNDS.len()];
                for huge in HUGE_PAGE_LOGGINGS {
                    for manual_protect in MANUAL_PROTECTS {
                        let config = Config::default()
                            .with_locking(locking)
                            .with_dirty_tracking(dirty_tracking)
                            .with_access_tracking(access_tracking)
                            .with_huge_page_logging(huge)
                            .with_manual_protect(manual_protect)
                            .with_fault_around(around);
                        if Vm::<_, F>::new(TestHost::default(), config).is_ok() {
                            nr_tried += 1;
                            every_page_arrives_once::<F>(config);
                        }
                    }
                }
            }
        }
    }
    assert!(nr_tried > 50);
}

#[test]
fn every_page_arrives_once_in_every_configuration() {
    in_every_configuration::<Npt>();
    in_every_configuration::<Ept>();
}

each!(pages_are_private_or_shared_as_they_were_made_last, attributes);
fn attributes<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    create(&vm, GUEST_MEMFD, None);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(gpa(3), Access::Write), RESUMED);
    assert_eq!(found(&vm, 3), Some((shared(3), Level::L2M)));
    // A part of a huge leaf: the rest stays mapped, by small ones.
    vm.set_memory_attributes(gpa(3), 2 * PAGE_SIZE, PRIVATE).unwrap();
    assert_eq!([3, 4].map(|page| found(&vm, page)), [None, None]);
    assert_eq!([2, 5].map(|page| found(&vm, page)), [2, 5].map(|page| Some((shared(page), Level::L4K))));
    for (page, is_private) in [(2, false), (3, true), (4, true), (5, false)] {
        let attributes = if is_private { PRIVATE } else { SHARED };
        assert_eq!(vm.memory_attributes(gpa(page)), Ok(attributes));
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), RESUMED);
        let pfn = if is_private { private(page) } else { shared(page) };
        assert_eq!(found(&vm, page), Some((pfn, Level::L4K)));
    }
    assert_eq!(vm.check_access(gpa(2), PAGE_SIZE), Ok(Outcome::Resume));
    let fault = Exit::MemoryFault { flags: MemoryFaultFlags::PRIVATE, gpa: gpa(3), size: PAGE_SIZE };
    assert_eq!(vm.check_access(gpa(2), PAGE_SIZE + 1), Ok(Outcome::Exit(fault)));
    // All of a block: huge again.
    vm.set_memory_attributes(gpa(0), 2 * MIB, PRIVATE).unwrap();
    assert_eq!(vcpu.handle_fault(gpa(9), Access::Write), RESUMED);
    assert_eq!(found(&vm, 3), Some((private(3), Level::L2M)));
    // Split, it is recovered.
    let block = GfnRange::new(gpa(0).gfn(), 512);
    assert_eq!(vm.split_range(block, PageSize::Size4K), Ok(1));
    assert_eq!(found(&vm, 3), Some((private(3), Level::L4K)));
    assert_eq!(vm.recover_range(block), Ok(1));
    assert_eq!(found(&vm, 3), Some((private(3), Level::L2M)));
    // Across memslots with a guest_memfd; never across others, nor gaps, and then nothing changes.
    let second = MemoryRegion { flags: GUEST_MEMFD, ..region(1, START + SIZE, SIZE, 0x4000, PageSize::Size2M) };
    vm.set_user_memory_region(second).unwrap();
    vm.set_user_memory_region(region(2, START + 2 * SIZE, SIZE, 0x8000, PageSize::Size2M)).unwrap();
    assert_eq!(vm.set_memory_attributes(gpa(PAGES - 1), 2 * PAGE_SIZE, PRIVATE), Ok(()));
    assert_eq!([PAGES - 1, PAGES].map(|page| vm.memory_attributes(gpa(page))), [Ok(PRIVATE), Ok(PRIVATE)]);
    assert_eq!(vm.memory_attributes(gpa(PAGES + 1)), Ok(SHARED));
    let none = |page| Err(SlotError::NoGuestMemfd { gpa: gpa(page) });
    assert_eq!(vm.set_memory_attributes(gpa(0), 3 * SIZE, SHARED), none(2 * PAGES));
    assert_eq!(
        vm.set_memory_attributes(Gpa(0), START + PAGE_SIZE, SHARED),
        Err(SlotError::NoGuestMemfd { gpa: Gpa(0) })
    );
    assert_eq!(found(&vm, 3), Some((private(3), Level::L2M)), "what is refused changes nothing");
    assert_eq!(vm.memory_attributes(gpa(3 * PAGES)), Err(SlotError::NoMemslot { gpa: gpa(3 * PAGES) }));
    let refused = [
        (gpa(0), 0, PRIVATE, SlotError::BadSize { size_bytes: 0 }),
        (gpa(0), 1, PRIVATE, SlotError::BadSize { size_bytes: 1 }),
        (Gpa(START + 1), PAGE_SIZE, PRIVATE, SlotError::UnalignedAddress { gpa: Gpa(START + 1) }),
    ];
    for (gpa, size_bytes, attributes, error) in refused {
        assert_eq!(vm.set_memory_attributes(gpa, size_bytes, attributes), Err(error));
    }
    let unknown = MemoryAttributes::from_bits_retain(1);
    assert_eq!(
        vm.set_memory_attributes(gpa(0), PAGE_SIZE, unknown),
        Err(SlotError::UnknownAttributes { attributes: 1 })
    );
    // A new memslot is shared.
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    create(&vm, GUEST_MEMFD, None);
    assert_eq!(vm.memory_attributes(gpa(3)), Ok(SHARED));
    assert_eq!(vcpu.handle_fault(gpa(3), Access::Read), RESUMED);
    assert_eq!(found(&vm, 3), Some((shared(3), Level::L2M)));
}

each!(a_prefault_ends_at_the_first_page_that_exits, prefaults);
fn prefaults<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(0);
    create(&vm, USERFAULT | GUEST_MEMFD, bitmap(&words));
    let mut vcpu = vm.create_vcpu().unwrap();
    let pending = |page| FaultError::UserfaultPending { gpa: gpa(page) };
    set(&words, 600);
    vm.set_memory_attributes(gpa(10), 3 * PAGE_SIZE, PRIVATE).unwrap();
    // The first makes page-table pages, the second finds them.
    for _ in 0..2 {
        assert_eq!(vcpu.pre_fault_memory(gpa(0), SIZE, Access::Write), Ok(600 * PAGE_SIZE));
        assert_eq!(vcpu.pre_fault_memory(gpa(600), PAGE_SIZE, Access::Write), Err(pending(600)));
    }
    assert_eq!(vcpu.pre_fault_memory(gpa(601), SIZE - 601 * PAGE_SIZE, Access::Write), Ok(SIZE - 601 * PAGE_SIZE));
    let list = [599, 600, 601].map(gpa);
    assert_eq!(vcpu.pre_fault_pages(&list, Access::Read), Ok(1));
    assert_eq!(vcpu.pre_fault_pages(&list[1..], Access::Read), Err(pending(600)));
    for page in 0..PAGES {
        let pfn = if (10..13).contains(&page) { private(page) } else { shared(page) };
        assert_eq!(found(&vm, page), Some((pfn, Level::L4K)).filter(|_| page != 600), "page {page}");
    }
}

/// The pages in all rings.
fn harvest<F: Format>(vm: &Vm<TestHost, F>) -> Vec<u64> {
    let mut pages = Vec::new();
    for ring in vm.dirty_rings() {
        ring.harvest(|page| pages.push(page.page));
    }
    pages
}

each!(a_full_ring_exits_before_a_userfault_bit, rings);
fn rings<F: Format>(locking: Locking) {
    // Below a protected directory entry a page may be pushed twice.
    let config = Config::default().with_locking(locking).with_dirty_tracking(LEAF_BY_LEAF);
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    vm.enable_dirty_ring(256).unwrap();
    let words = words(0);
    create(&vm, USERFAULT | LOG | GUEST_MEMFD, bitmap(&words));
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&words, PAGES - 1);
    assert_eq!(vcpu.handle_fault(gpa(PAGES - 1), Access::Write), exit_at(PAGES - 1));
    let full = Ok(Outcome::Exit(Exit::DirtyRingFull));
    let nr_written = (0..PAGES).find(|page| vcpu.handle_fault(gpa(*page), Access::Write) == full).unwrap();
    assert_eq!(vcpu.handle_fault(gpa(PAGES - 1), Access::Write), full);
    assert_eq!(harvest(&vm), (0..nr_written).collect::<Vec<_>>(), "a page that exits is not pushed");
    assert_eq!(vm.reset_dirty_rings(), Ok(nr_written));
    assert_eq!(vcpu.handle_fault(gpa(PAGES - 1), Access::Write), exit_at(PAGES - 1));
    // Pending again, then filled: written anew.
    set(&words, 0);
    assert_eq!(vm.rescan_userfault(0, 0, 1), Ok(1));
    clear(&words, 0);
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Write), RESUMED);
    assert_eq!(harvest(&vm), [0]);
}

each!(a_read_only_slot_exits_for_reads_and_writes_are_for_a_device, read_only);
fn read_only<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(u64::MAX);
    create(&vm, USERFAULT | READONLY, bitmap(&words));
    let mut vcpu = vm.create_vcpu().unwrap();
    let mmio = |gpa| Ok(Outcome::Exit(Exit::Mmio { gpa, access: Access::Write }));
    assert_eq!(vcpu.handle_fault(gpa(5), Access::Write), mmio(gpa(5)));
    assert_eq!(vcpu.handle_fault(gpa(5), Access::Execute), exit_at(5));
    clear(&words, 5);
    assert_eq!(vcpu.handle_fault(gpa(5), Access::Read), RESUMED);
    assert_eq!(vcpu.handle_fault(gpa(5), Access::Write), mmio(gpa(5)));
    assert!(translate(&vm, gpa(5)).is_some_and(|found| !found.writable));
    // Beside the memslot there is nothing to fetch.
    assert_eq!(vcpu.handle_fault(gpa(PAGES), Access::Write), mmio(gpa(PAGES)));
    assert_eq!(vcpu.pre_fault_memory(gpa(PAGES), PAGE_SIZE, Access::Read), {
        Err(FaultError::NoMemslot { gpa: gpa(PAGES) })
    });
}

each!(a_slot_that_moves_takes_its_bits_along, moves);
fn moves<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(0);
    create(&vm, USERFAULT, bitmap(&words));
    let mut vcpu = vm.create_vcpu().unwrap();
    set(&words, 1);
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Write), RESUMED);
    let to = Gpa(64 * MIB + PAGE_SIZE);
    vm.set_user_memory_region(change(0, USERFAULT, to.0, SIZE)).unwrap();
    assert_eq!(translate(&vm, gpa(0)), None);
    assert!(matches!(vcpu.handle_fault(gpa(1), Access::Read), Ok(Outcome::Exit(Exit::Mmio { .. }))));
    let second = Gpa(to.0 + PAGE_SIZE);
    let exit = Exit::MemoryFault { flags: MemoryFaultFlags::USERFAULT, gpa: second, size: PAGE_SIZE };
    assert_eq!(vcpu.handle_fault(second, Access::Read), Ok(Outcome::Exit(exit)));
    assert_eq!(vcpu.handle_fault(to, Access::Read), RESUMED);
    // Moved and turned off at once, and moved and turned on.
    vm.set_user_memory_region(change(0, NO_FLAGS, START, SIZE)).unwrap();
    assert_eq!(vcpu.handle_fault(gpa(1), Access::Write), RESUMED);
    assert_eq!(found(&vm, 1), Some((shared(1), Level::L2M)));
    let moved = MemoryRegion { userfault_bitmap: bitmap(&words), ..change(0, USERFAULT, to.0, SIZE) };
    vm.set_user_memory_region(moved).unwrap();
    assert_eq!(vcpu.handle_fault(second, Access::Read), Ok(Outcome::Exit(exit)));
}

/// Reads of bits apply to the current bitmap: one that replaced another, the last block of a
/// memslot that does not fill it, words behind those of the memslot.
#[test]
fn blocks_of_two_mib_at_the_end_of_a_slot() {
    let vm = vm::<Npt>(Locking::None);
    let words: Words = Arc::new((0..3).map(|_| AtomicU64::new(u64::MAX)).collect());
    let memory = region(0, START, 5 * MIB, FIRST_PFN, PageSize::Size2M);
    let memory = MemoryRegion { flags: USERFAULT, userfault_bitmap: huge_bitmap(&words), ..memory };
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let flags = MemoryFaultFlags::USERFAULT;
    let last = Exit::MemoryFault { flags, gpa: Gpa(START + 4 * MIB), size: MIB };
    assert_eq!(vcpu.handle_fault(gpa(1100), Access::Read), Ok(Outcome::Exit(last)));
    assert_eq!(vm.rescan_userfault(0, 0, 1280), Ok(1280));
    assert_eq!(vm.rescan_userfault(0, 1279, 1), Ok(256));
    words[0].fetch_and(!0b100, Ordering::Release);
    assert_eq!(vm.rescan_userfault(0, 0, 1280), Ok(1024));
    assert_eq!(vcpu.handle_fault(gpa(1100), Access::Read), RESUMED);
    assert_eq!(found(&vm, 1100), Some((shared(1100), Level::L4K)));
    assert_eq!(vm.check_access(gpa(1024), MIB), Ok(Outcome::Resume));
    words[0].store(0, Ordering::Release);
    assert_eq!(vm.rescan_userfault(0, 0, 1280), Ok(0));
    // The same words, with small pages: all leaves are zapped, and small ones are mapped.
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Read), RESUMED);
    assert_eq!(found(&vm, 0), Some((shared(0), Level::L2M)));
    let region = |userfault_bitmap| MemoryRegion { userfault_bitmap, ..change(0, USERFAULT, START, 5 * MIB) };
    let too_short = SlotError::BitmapTooShort { slot: 0, words: 3, needed: 20 };
    assert_eq!(vm.set_user_memory_region(region(bitmap(&words))), Err(too_short));
    assert!(found(&vm, 0).is_some());
    let small: Words = Arc::new((0..20).map(|_| AtomicU64::new(0)).collect());
    vm.set_user_memory_region(region(bitmap(&small))).unwrap();
    assert_eq!(found(&vm, 0), None);
    assert_eq!(vcpu.handle_fault(gpa(0), Access::Read), RESUMED);
    assert_eq!(found(&vm, 0), Some((shared(0), Level::L4K)));
}

/// A page that becomes private under a fault-around is not mapped along with a shared one, nor
/// resolved.
#[test]
fn only_like_neighbours_that_have_arrived_are_mapped_along() {
    for locking in LOCKINGS {
        let config = Config::default().with_locking(locking).with_fault_around(FaultAround::Pages(8));
        let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::default(), config).unwrap());
        let words = words(0);
        set(&words, 3);
        let mut memory = region(0, START, SIZE, FIRST_PFN, PageSize::Size4K);
        memory.backing.as_mut().and_then(Arc::get_mut).unwrap().is_resident = |_| true;
        let flags = USERFAULT | GUEST_MEMFD;
        vm.set_user_memory_region(MemoryRegion { flags, userfault_bitmap: bitmap(&words), ..memory }).unwrap();
        vm.set_memory_attributes(gpa(5), 2 * PAGE_SIZE, PRIVATE).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.handle_fault(gpa(0), Access::Read), RESUMED);
        let is_mapped = |page| found(&vm, page).is_some();
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(is_mapped), [true, true, true, false, true, false, false, true]);
        assert_eq!(vm.host().nr_resident_queries.load(Ordering::Relaxed), 4);
        // For a private one no neighbour is resolved.
        assert_eq!(vcpu.handle_fault(gpa(5), Access::Read), RESUMED);
        assert_eq!([5, 6].map(|page| found(&vm, page)), [Some((private(5), Level::L4K)), None]);
        assert_eq!(vm.host().nr_resident_queries.load(Ordering::Relaxed), 4);
    }
}

each!(a_rescan_of_unused_pages_needs_no_tables, unused);
fn unused<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(u64::MAX);
    create(&vm, USERFAULT, bitmap(&words));
    let before = vm.host().live_tables();
    for (first, nr_pages) in [(7, 1), (0, 512), (500, 100), (0, PAGES)] {
        assert_eq!(vm.rescan_userfault(0, first, nr_pages), Ok(nr_pages));
    }
    assert_eq!(vm.host().live_tables(), before);
}

each!(a_rescan_that_finds_nothing_waits_for_the_flush_of_another, flushes);
fn flushes<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let words = words(0);
    create(&vm, USERFAULT, bitmap(&words));
    assert_eq!(vm.create_vcpu().unwrap().handle_fault(gpa(3), Access::Write), RESUMED);
    set(&words, 3);
    let other = Arc::downgrade(&vm);
    // The leaf is zapped, and CPUs may still use it.
    vm.host().overtake(Call::Flush, 1, move || {
        let vm = other.upgrade().unwrap();
        let before = vm.host().nr_flushes();
        assert_eq!(translate(&vm, gpa(3)), None);
        assert_eq!(vm.rescan_userfault(0, 3, 1), Ok(1));
        let flushes = vm.host().flushes.lock().unwrap();
        let page = GfnRange::new(gpa(3).gfn(), 1);
        assert!(flushes[before..].iter().flatten().any(|range| range.covers(page)), "{flushes:?}");
    });
    drop(vm.invalidate_range(GfnRange::new(gpa(3).gfn(), 1)).unwrap());
    assert!(vm.host().was_overtaken());
}
