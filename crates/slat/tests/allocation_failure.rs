//! Both kinds of memory run out: the k-th page-table page that the host is asked for, and the k-th
//! allocation from the heap, for every k and every operation. The error is typed, nothing has
//! changed, nothing is leaked, and the same operation succeeds when there is memory again.
//!
//! The heap is this binary's global allocator: it counts the live bytes of the current thread's
//! allocations outside of the host, and fails when that thread's countdown runs out. Each test runs
//! its VM on its own thread from beginning to end.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "a global allocator")]

#[path = "allocation_failure/allocator.rs"]
mod allocator;
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use allocator::{LIVE_BYTES, with_heap_allocations};
use common::log::{MANUAL_PROTECTS, dirty_trackings, write_as_hardware};
use common::{
    GIB, MIB, PRIVATE_PFN, TestBacking, TestHost, Translation, assert_no_table_is_left,
    assert_only_upper_tables_are_left, change, each, region, translate, vm,
};
use slat::baselines::Locking;
use slat::dirty::{DirtyRing, ManualProtect};
use slat::error::{ConfigError, FaultError, LogError, RangeError, SlotError};
use slat::format::Format;
use slat::slots::{MemoryAttributes, UserfaultBitmap};
use slat::{
    Access, Config, Error, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

fn is_out_of_memory(error: Error) -> bool {
    matches!(
        error,
        Error::Config(ConfigError::OutOfMemory)
            | Error::Slot(SlotError::OutOfMemory)
            | Error::Log(LogError::OutOfMemory)
            | Error::Fault(FaultError::OutOfMemory)
            | Error::Range(RangeError::OutOfMemory)
    )
}

/// Runs `operation` with 0, 1, 2, .. heap allocations until it succeeds. Every failure must be
/// `OutOfMemory`, and `unchanged` is called after each. Returns the number of failures.
fn until_it_succeeds<R, E: Into<Error>>(
    mut operation: impl FnMut() -> Result<R, E>,
    mut unchanged: impl FnMut(),
) -> (R, u64) {
    for k in 0.. {
        let (result, _) = with_heap_allocations(k, &mut operation);
        match result {
            Ok(result) => return (result, k),
            Err(error) => {
                let error = error.into();
                assert!(is_out_of_memory(error), "{error}, with {k} allocations");
            }
        }
        unchanged();
    }
    unreachable!("an operation needs a finite number of allocations");
}

fn assert_tables_are_counted<F: Format>(vm: &Vm<TestHost, F>) {
    assert_eq!(vm.stats().live_tables(), vm.host().live_tables() as u64);
}

/// The same fault with 0, 1, 2, .. page-table pages, until it is served. Returns how often it
/// failed.
fn fault_until_served<F: Format>(vm: &Vm<TestHost, F>, vcpu: &mut Vcpu<TestHost, F>, gpa: Gpa, access: Access) -> i64 {
    let before = translate(vm, gpa);
    for k in 0..8 {
        vm.host().fail_after(k);
        let result = vcpu.handle_fault(gpa, access);
        vm.host().never_fail();
        assert_tables_are_counted(vm);
        match result {
            Ok(outcome) => {
                assert_eq!(outcome, Outcome::Resume);
                return k;
            }
            Err(error) => assert_eq!(error, FaultError::OutOfMemory),
        }
        // A split that failed half way has allowed nothing; leaves of 1 GiB may have become leaves
        // of 2 MiB.
        let after = translate(vm, gpa);
        assert_eq!(before.map(rights), after.map(rights), "after a failure with {k} tables");
    }
    unreachable!("a fault links no more tables than there are levels");
}

/// The guest's rights by a translation.
fn rights(translation: Translation) -> (u64, bool) {
    (translation.pfn.0, translation.writable)
}

each!(a_fault_without_memory_for_a_table_changes_nothing_and_succeeds_later, faults);
fn faults<F: Format>(locking: Locking) {
    let gib_pages = GIB / PAGE_SIZE;
    for (size, level) in
        [(PageSize::Size4K, Level::L4K), (PageSize::Size2M, Level::L2M), (PageSize::Size1G, Level::L1G)]
    {
        let vm = vm::<F>(locking);
        vm.set_user_memory_region(region(0, 0, 512 * GIB, 512 * gib_pages, size)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        let gpa = Gpa(5 * GIB + 7 * MIB);
        // Each failure leaves its allocations in the vCPU's cache, so that each next try needs one
        // less.
        let failures = fault_until_served(&vm, &mut vcpu, gpa, Access::Write);
        assert_eq!(failures >= 1, level < F::ROOT_LEVEL);
        let mapped = translate(&vm, gpa).unwrap();
        assert_eq!((mapped.level, mapped.writable), (level, true));
        // A neighbour, with the upper page-table pages linked.
        let near = Gpa(gpa.0 + 4 * MIB);
        if level == Level::L4K {
            assert!(fault_until_served(&vm, &mut vcpu, near, Access::Read) >= 1);
        }
        assert_eq!(vcpu.handle_fault(near, Access::Read), Ok(Outcome::Resume));
        vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        drop(vcpu);
        vm.reclaim();
        assert_only_upper_tables_are_left(&vm);
    }
}

each!(a_split_without_memory_for_a_table_changes_nothing_and_succeeds_later, splits);
fn splits<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    vm.set_user_memory_region(region(0, 0, 512 * GIB, 512 * (GIB / PAGE_SIZE), PageSize::Size1G)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let gpa = Gpa(3 * GIB + 5 * MIB);
    assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
    vm.set_user_memory_region(change(0, LOG, 0, 512 * GIB)).unwrap();
    let pages = 512 * (GIB / PAGE_SIZE);
    let mut bitmap = vec![0; pages as usize / 64];
    for k in 0..2 {
        // A new vCPU each time: its cache is empty.
        let mut other = vm.create_vcpu().unwrap();
        vm.host().fail_after(k);
        assert_eq!(other.handle_fault(gpa, Access::Write), Err(FaultError::OutOfMemory));
        vm.host().never_fail();
        drop(other);
        assert_tables_are_counted(&vm);
        let still = translate(&vm, gpa).unwrap();
        assert_eq!((still.writable, still.level), (false, Level(3 - k as u8)));
        assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(0), "a page was marked that did not become writable");
    }
    assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
    let split = translate(&vm, gpa).unwrap();
    assert_eq!((split.writable, split.level), (true, Level::L4K));
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(1));
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    drop(vcpu);
    vm.reclaim();
    assert_only_upper_tables_are_left(&vm);
}

each!(a_write_to_a_read_only_leaf_may_run_out_of_memory_and_succeeds_later, refault);
fn refault<F: Format>(locking: Locking) {
    let vm = vm::<F>(locking);
    let memory = region(0, 0, GIB, 0, PageSize::Size2M);
    memory.backing.as_ref().unwrap().reads_are_writable.store(false, std::sync::atomic::Ordering::SeqCst);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), Ok(Outcome::Resume));
    assert_eq!(translate(&vm, Gpa(0)).unwrap().level, Level::L2M);
    // A leaf of the same size is replaced without a page-table page.
    vm.host().fail_after(0);
    let result = vcpu.handle_fault(Gpa(0), Access::Write);
    vm.host().never_fail();
    assert_eq!(result, Ok(Outcome::Resume));
    assert!(translate(&vm, Gpa(0)).unwrap().writable);
    drop(vcpu);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}

each!(a_vm_without_a_root_is_an_error, no_root);
fn no_root<F: Format>(locking: Locking) {
    let host = TestHost::default();
    host.fail_after(0);
    assert!(matches!(Vm::<_, F>::new(host, Config::default().with_locking(locking)), Err(ConfigError::OutOfMemory)));
}

/// The state that a failure must leave unchanged.
#[derive(PartialEq, Eq, Debug)]
struct Seen {
    translations: Vec<Option<(u64, bool)>>,
    live_tables: u64,
    host_tables: usize,
}

const PAGES: [u64; 6] = [0, 1, 511, 512, 700, GIB / PAGE_SIZE];

fn seen<F: Format>(vm: &Vm<TestHost, F>) -> Seen {
    Seen {
        translations: PAGES.iter().map(|page| translate(vm, Gpa(page * PAGE_SIZE)).map(rights)).collect(),
        live_tables: vm.stats().live_tables(),
        host_tables: vm.host().live_tables(),
    }
}

/// A region whose backing is shared with the caller, so that it can be used repeatedly.
fn with_backing(slot: u32, gpa: u64, size: u64, backing: &Arc<TestBacking>) -> MemoryRegion<Arc<TestBacking>> {
    MemoryRegion { backing: Some(Arc::clone(backing)), ..change(slot, NO_FLAGS, gpa, size) }
}

/// All operations of a VM, each with every number of heap allocations.
fn life_of_a_vm<F: Format>(locking: Locking) {
    const SIZE: u64 = 4 * MIB;
    let (vm, failures) =
        until_it_succeeds(|| Vm::<_, F>::new(TestHost::default(), Config::default().with_locking(locking)), || {});
    assert!(failures >= 1);
    let vm = Arc::new(vm);
    let (mut vcpu, _) = until_it_succeeds(|| vm.create_vcpu(), || {});
    let (other, failures) = until_it_succeeds(|| vm.create_vcpu(), || {});
    assert!(failures >= 1, "a second vCPU needs a participant of its own");
    drop(other);

    let backing = Arc::new(TestBacking::new(0x4000, SIZE / PAGE_SIZE, PageSize::Size4K));
    let before = seen(&vm);
    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(with_backing(0, 0, SIZE, &backing)),
        || assert_eq!(seen(&vm), before),
    );
    assert!(failures >= 3, "{failures}: a slot, a set and its arrays");
    assert_eq!(Arc::strong_count(&backing), 2, "a backing that was refused was kept");

    // Faults allocate nothing from the heap.
    for page in [0, 1, 511, 512] {
        let gpa = Gpa(page * PAGE_SIZE);
        let (result, _) = with_heap_allocations(u64::MAX, || vcpu.handle_fault(gpa, Access::Write));
        assert_eq!(result, Ok(Outcome::Resume));
    }
    let (result, _) = with_heap_allocations(0, || vcpu.handle_fault(Gpa(2 * PAGE_SIZE), Access::Write));
    assert_eq!(result, Ok(Outcome::Resume), "a fault whose tables exist allocated from the heap");

    let before = seen(&vm);
    assert_eq!(before.translations[0], Some((0x4000, true)));
    until_it_succeeds(|| vm.set_user_memory_region(change(0, LOG, 0, SIZE)), || assert_eq!(seen(&vm), before, "flags"));
    assert_eq!(vcpu.handle_fault(Gpa(PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    let before = seen(&vm);
    assert_eq!((before.translations[0], before.translations[1]), (Some((0x4000, false)), Some((0x4001, true))));
    let mut bitmap = [0; (SIZE / PAGE_SIZE / 64) as usize];
    let (nr_pages, _) = until_it_succeeds(|| vm.get_dirty_log(0, &mut bitmap), || assert_eq!(seen(&vm), before, "log"));
    assert_eq!((nr_pages, bitmap[0]), (1, 2));
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));

    // A move or a deletion that fails may have zapped leaves; but the memslot and its log are
    // unchanged.
    let as_it_was = || {
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.handle_fault(Gpa(511 * PAGE_SIZE), Access::Read), Ok(Outcome::Resume));
        assert_eq!(translate(&vm, Gpa(511 * PAGE_SIZE)).unwrap().pfn.0, 0x4000 + 511);
        assert_eq!(translate(&vm, Gpa(GIB)), None);
        drop(vcpu);
        assert_tables_are_counted(&vm);
    };
    let ((), failures) = until_it_succeeds(|| vm.set_user_memory_region(change(0, LOG, GIB, SIZE)), as_it_was);
    assert!(failures >= 2);
    assert_eq!(translate(&vm, Gpa(0)), None);
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(SIZE / PAGE_SIZE), "a moved slot is dirty as a whole");
    assert!(bitmap.iter().all(|word| *word == u64::MAX));

    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)),
        || {
            assert_eq!(vm.get_dirty_log(0, &mut [0; 16]), Ok(0), "the slot still exists");
            assert_eq!(Arc::strong_count(&backing), 2);
        },
    );
    assert!(failures >= 2);
    assert_eq!(Arc::strong_count(&backing), 1);
    drop(vcpu);
    assert_no_table_is_left(&vm);
}

each!(a_heap_that_runs_out_anywhere_is_an_error_and_leaks_nothing, heap);
fn heap<F: Format>(locking: Locking) {
    // Once before counting: allocations that the test harness and the standard library keep.
    life_of_a_vm::<F>(locking);
    let before = LIVE_BYTES.get();
    life_of_a_vm::<F>(locking);
    assert_eq!(LIVE_BYTES.get(), before, "bytes of the heap are leaked");
}

fn life_with_rings<F: Format>(locking: Locking) {
    const SIZE: u64 = 4 * MIB;
    let vm = Arc::new(Vm::<_, F>::new(TestHost::default(), Config::default().with_locking(locking)).unwrap());
    let (result, _) = with_heap_allocations(0, || vm.create_vcpu());
    assert!(matches!(result, Err(ConfigError::OutOfMemory)));
    // The vCPU that could not be made has decided nothing.
    assert_eq!(vm.enable_dirty_ring(256), Ok(()));
    let (mut vcpu, failures) =
        until_it_succeeds(|| vm.create_vcpu(), || assert_eq!(vm.dirty_rings().count(), 0, "a ring without a vCPU"));
    assert!(failures >= 2, "{failures}: a record, a ring and its entries");
    vm.set_user_memory_region(region(0, 0, SIZE, 0x4000, PageSize::Size4K)).unwrap();
    let ((), failures) = until_it_succeeds(|| vm.set_user_memory_region(change(0, LOG, 0, SIZE)), || {});
    assert!(failures <= 5, "{failures}: there is no bitmap");
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Write), Ok(Outcome::Resume));
    let fault_and_harvest = || {
        let result = vcpu.handle_fault(Gpa(PAGE_SIZE), Access::Write);
        (result, vm.dirty_rings().map(|ring| ring.harvest(|_| {})).sum::<u64>())
    };
    let (result, _) = with_heap_allocations(0, fault_and_harvest);
    assert_eq!(result, (Ok(Outcome::Resume), 2), "a push or a harvest allocated from the heap");
    let first_index = || vm.dirty_rings().map(DirtyRing::first_index).sum::<u64>();
    // The list of participants, for one more at once than ever before.
    let _others = [(); 3].map(|()| vm.create_vcpu().unwrap());
    let (nr_reset, failures) = until_it_succeeds(|| vm.reset_dirty_rings(), || assert_eq!(first_index(), 0));
    assert_eq!((nr_reset, first_index()), (2, 2));
    assert!(failures >= 1);
}

each!(a_vm_with_rings_whose_heap_runs_out_is_as_it_was_and_leaks_nothing, rings);
fn rings<F: Format>(locking: Locking) {
    life_with_rings::<F>(locking);
    let before = LIVE_BYTES.get();
    life_with_rings::<F>(locking);
    assert_eq!(LIVE_BYTES.get(), before, "bytes of the heap are leaked");
}

each!(many_slots_need_more_room_and_running_out_of_it_changes_nothing, many_slots);
fn many_slots<F: Format>(locking: Locking) {
    // Beyond the initial capacity of the memslot set.
    let vm = vm::<F>(locking);
    let backing = Arc::new(TestBacking::new(0x4000, 1, PageSize::Size4K));
    for slot in 0..40 {
        let gpa = u64::from(slot) * PAGE_SIZE;
        until_it_succeeds(|| vm.set_user_memory_region(with_backing(slot, gpa, PAGE_SIZE, &backing)), || {});
    }
    for slot in 0..40 {
        until_it_succeeds(|| vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)), || {});
    }
    vm.reclaim();
    assert_eq!(Arc::strong_count(&backing), 1);
}

/// All operations of a dirty log, each with every number of heap allocations.
fn life_of_a_log<F: Format>(config: Config) {
    // Whole page-table pages, so that some directory entries are protected, and pages at both ends.
    const FIRST: u64 = 512 - 3;
    const NR_PAGES: u64 = 3 + 2 * 512 + 70;
    const NR_WORDS: usize = NR_PAGES.div_ceil(64) as usize;
    let vm = Arc::new(Vm::<_, F>::new(TestHost::default(), config).unwrap());
    let mut vcpu = vm.create_vcpu().unwrap();
    let gpa = |page: u64| Gpa((FIRST + page) * PAGE_SIZE);
    // Each keeps a participant in use, the free one if there is one: the next call needs a new one.
    let mut readers = Vec::with_capacity(16);
    let (start, size) = (gpa(0).0, NR_PAGES * PAGE_SIZE);
    let backing = Arc::new(TestBacking::new(0x4000, NR_PAGES, PageSize::Size4K));
    vm.set_user_memory_region(with_backing(1, start, size, &backing)).unwrap();
    assert_eq!(vcpu.pre_fault_memory(gpa(0), size, Access::Write), Ok(size));

    let all = || (0..NR_PAGES).map(|page| translate(&vm, gpa(page))).collect::<Vec<_>>();
    let marked = || (0..NR_PAGES).map(|page| vm.is_marked_dirty(1, page)).collect::<Vec<_>>();
    let counters = || {
        let stats = vm.stats();
        [stats.protected, stats.tables_protected, vm.host().nr_flushes() as u64, stats.live_tables()]
    };
    let seen = || (all(), marked(), counters());
    // Enabling: the memslot still does not log, or logs and is protected; nothing between.
    let before = seen();
    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(change(1, LOG, start, size)),
        || assert!(seen() == before, "{config:?}: enabling that failed has changed something"),
    );
    assert!(failures >= 4, "{failures}: a bitmap, its summary, and a set");
    let is_initially_set = config.manual_protect == ManualProtect::InitiallySet;
    assert!(marked().into_iter().all(|is_marked| is_marked == Ok(is_initially_set)));
    // The same for a memslot that is made with a log, and does not exist when that fails.
    let other = MemoryRegion { flags: LOG, ..with_backing(2, GIB, size, &backing) };
    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(other.clone()),
        || assert_eq!(vm.get_dirty_log(2, &mut [0; NR_WORDS]), Err(LogError::NoSuchSlot { slot: 2 })),
    );
    assert!(failures >= 4);
    let mut bitmap = [0; NR_WORDS];
    let expected = if is_initially_set { NR_PAGES } else { 0 };
    assert_eq!(vm.get_dirty_log(2, &mut bitmap), Ok(expected));

    // Calls of the log, one after the other: a failed call has cleared, protected and flushed
    // nothing.
    assert_eq!(vm.clear_dirty_log(1, 0, NR_PAGES, &[u64::MAX; NR_WORDS]), Ok(expected));
    for page in (0..100).chain([NR_PAGES - 1]) {
        while !translate(&vm, gpa(page))
            .is_some_and(|found| found.writable && write_as_hardware(&vm, gpa(page).gfn(), found))
        {
            assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), Ok(Outcome::Resume));
        }
    }
    let before = seen();
    let unchanged = || assert!(seen() == before, "{config:?}: a call that failed has changed something");
    readers.push(vm.read_tables().unwrap());
    let untouched = [0x55aa; NR_WORDS];
    let mut bitmap = untouched;
    let (nr_pages, failures) = until_it_succeeds(|| vm.get_dirty_log_range(1, 0, 64, &mut bitmap), unchanged);
    assert_eq!((nr_pages, bitmap[0], &bitmap[1..]), (64, u64::MAX, &untouched[1..]));
    assert!(failures >= 1, "a record");
    let before = seen();
    let unchanged = || assert!(seen() == before, "{config:?}: a call that failed has changed something");
    readers.push(vm.read_tables().unwrap());
    let (nr_pages, failures) = until_it_succeeds(|| vm.clear_dirty_log(1, 0, NR_PAGES, &[1; NR_WORDS]), unchanged);
    // Page 64, and page 0 where getting does not clear.
    let is_manual = config.manual_protect != ManualProtect::Disabled;
    let by_mark = matches!(
        config.dirty_tracking,
        slat::dirty::DirtyTracking::WriteProtect | slat::dirty::DirtyTracking::WriteProtectLeaves
    );
    let left_of = |nr_pages: u64| 101 - nr_pages - if is_manual { 0 } else { 64 };
    assert!(nr_pages == u64::from(is_manual) + 1 || !by_mark, "{config:?}: {nr_pages}");
    assert!(failures >= 1);
    let before = seen();
    readers.push(vm.read_tables().unwrap());
    let ((), failures) = until_it_succeeds(|| vm.mark_dirty(1, 500, 1), || assert!(seen() == before, "{config:?}"));
    assert!(failures >= 1);
    readers.push(vm.read_tables().unwrap());
    let (is_marked, failures) = until_it_succeeds(|| vm.is_marked_dirty(1, 500), || {});
    assert!(is_marked && failures >= 1);
    let before = marked();
    readers.push(vm.read_tables().unwrap());
    let (got, failures) =
        until_it_succeeds(|| vm.get_dirty_log(1, &mut bitmap), || assert!(marked() == before, "{config:?}"));
    assert!(failures >= 1);
    assert_eq!(got, left_of(nr_pages) + 1, "{config:?}");
    drop(readers);
    for slot in [1, 2] {
        until_it_succeeds(|| vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)), || {});
    }
    drop(other);
    vm.reclaim();
    assert_eq!(Arc::strong_count(&backing), 1);
    drop(vcpu);
    assert_no_table_is_left(&vm);
}

each!(a_log_for_which_there_is_no_memory_is_as_it_was_and_leaks_nothing, logs);
fn logs<F: Format>(locking: Locking) {
    for tracking in dirty_trackings::<F>() {
        for manual_protect in MANUAL_PROTECTS {
            let config = Config::default()
                .with_locking(locking)
                .with_dirty_tracking(tracking)
                .with_manual_protect(manual_protect);
            life_of_a_log::<F>(config);
            let before = LIVE_BYTES.get();
            life_of_a_log::<F>(config);
            assert_eq!(LIVE_BYTES.get(), before, "{config:?}: bytes of the heap are leaked");
        }
    }
}

/// All operations of userfault and private pages, each with every number of heap allocations.
fn life_with_userfault<F: Format>(locking: Locking) {
    const PAGES: u64 = 1024;
    const SIZE: u64 = PAGES * PAGE_SIZE;
    const START: u64 = 2 * MIB;
    const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
    const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
    let vm = vm::<F>(locking);
    let mut vcpu = vm.create_vcpu().unwrap();
    let gpa = |page: u64| Gpa(START + page * PAGE_SIZE);
    let new_words = |word| Arc::new((0..PAGES / 64).map(|_| AtomicU64::new(word)).collect::<Vec<_>>());
    let words = new_words(u64::MAX);
    let bitmap_of =
        |words: &Arc<Vec<AtomicU64>>| Some(UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(words), PageSize::Size4K));
    // Each keeps a participant in use, the free one if there is one: the next call needs a new one.
    let mut readers = Vec::with_capacity(16);
    let backing = Arc::new(TestBacking::new(512, PAGES, PageSize::Size2M));
    // A memslot that is made with a bitmap; when that fails there is no memslot, and the bitmap is
    // released.
    let both = MemoryRegion {
        flags: USERFAULT | GUEST_MEMFD | LOG,
        userfault_bitmap: bitmap_of(&words),
        ..with_backing(1, START, SIZE, &backing)
    };
    let counts = (Arc::strong_count(&words), Arc::strong_count(&backing));
    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(both.clone()),
        || {
            assert_eq!((Arc::strong_count(&words), Arc::strong_count(&backing)), counts);
            assert_eq!(vm.check_access(gpa(0), 1), Err(FaultError::NoMemslot { gpa: gpa(0) }));
        },
    );
    assert!(failures >= 5, "{failures}: a bitmap's box, a log, private pages, a slot and a set");
    drop(both);
    assert!(matches!(vcpu.handle_fault(gpa(0), Access::Write), Ok(Outcome::Exit(_))));
    // Turning it off and on, and changing its bitmap: the memslot is unchanged, but leaves may be
    // zapped.
    let to = |flags, bitmap| MemoryRegion { userfault_bitmap: bitmap, ..change(1, flags | GUEST_MEMFD, START, SIZE) };
    readers.push(vm.read_tables().unwrap());
    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(to(NO_FLAGS, None)),
        || assert!(matches!(vcpu.handle_fault(gpa(0), Access::Write), Ok(Outcome::Exit(_)))),
    );
    assert!(failures >= 3, "{failures}: a record, a node and a set");
    let mut vcpu = vm.create_vcpu().unwrap();
    readers.push(vm.read_tables().unwrap());
    let users = Arc::strong_count(&words);
    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(to(USERFAULT, bitmap_of(&words))),
        || {
            assert_eq!(vcpu.handle_fault(gpa(7), Access::Write), Ok(Outcome::Resume));
            assert_eq!(translate(&vm, gpa(7)).unwrap().level, Level::L2M, "it is still off");
            assert_eq!(Arc::strong_count(&words), users);
        },
    );
    assert!(failures >= 4, "{failures}: a record, a bitmap's box, a node and a set");
    assert_eq!(translate(&vm, gpa(7)), None);
    let mut vcpu = vm.create_vcpu().unwrap();
    let others = new_words(0);
    let users = (Arc::strong_count(&words), Arc::strong_count(&others));
    let ((), failures) = until_it_succeeds(
        || vm.set_user_memory_region(to(USERFAULT, bitmap_of(&others))),
        || {
            assert!(matches!(vcpu.handle_fault(gpa(7), Access::Write), Ok(Outcome::Exit(_))), "it has the old one");
            assert_eq!((Arc::strong_count(&words), Arc::strong_count(&others)), users);
        },
    );
    assert!(failures >= 3, "{failures}");
    assert_eq!(vcpu.pre_fault_memory(gpa(0), SIZE, Access::Write), Ok(SIZE));
    let all = || (0..PAGES).map(|page| translate(&vm, gpa(page))).collect::<Vec<_>>();

    // A rescan that fails has zapped nothing: it needs a participant only, and no page-table page,
    // also where blocks are covered in part.
    readers.push(vm.read_tables().unwrap());
    others[0].fetch_or(0xf0, Ordering::Release);
    let before = all();
    vm.host().fail_after(0);
    let (nr_pages, failures) = until_it_succeeds(|| vm.rescan_userfault(1, 0, PAGES), || assert!(all() == before));
    vm.host().never_fail();
    // With a lock, the participant has room for its times.
    let nr_allocations = if locking == Locking::None { 1 } else { 2 };
    assert_eq!((nr_pages, failures), (4, nr_allocations));
    assert_eq!(all().iter().flatten().count() as u64, PAGES - 4);
    // Attributes, too; but without a page-table page, more is zapped than was requested.
    for (private, page) in [(true, 20), (false, 21)] {
        let attributes = if private { MemoryAttributes::PRIVATE } else { MemoryAttributes::empty() };
        readers.push(vm.read_tables().unwrap());
        let before = all();
        let ((), failures) = until_it_succeeds(
            || vm.set_memory_attributes(gpa(page), PAGE_SIZE, attributes),
            || {
                assert!(all() == before);
                assert_eq!(vm.check_access(gpa(page), 1), Ok(Outcome::Resume));
            },
        );
        assert!(failures >= 1, "{failures}: a record");
        assert_eq!(all()[page as usize], None);
    }
    readers.push(vm.read_tables().unwrap());
    let (outcome, failures) = until_it_succeeds(|| vm.check_access(gpa(21), 1), || {});
    assert!(outcome == Outcome::Resume && failures >= 1);
    readers.push(vm.read_tables().unwrap());
    let (attributes, failures) = until_it_succeeds(|| vm.memory_attributes(gpa(20)), || {});
    assert!(attributes == MemoryAttributes::PRIVATE && failures >= 1);
    // A part of a huge leaf becomes private, without a page-table page for the rest: all of it is
    // zapped.
    vm.set_user_memory_region(to(NO_FLAGS, None)).unwrap();
    assert_eq!(vcpu.handle_fault(gpa(600), Access::Write), Ok(Outcome::Resume));
    assert_eq!(translate(&vm, gpa(600)).unwrap().level, Level::L2M);
    vm.host().fail_after(0);
    assert_eq!(vm.set_memory_attributes(gpa(600), PAGE_SIZE, MemoryAttributes::PRIVATE), Ok(()));
    vm.host().never_fail();
    assert_eq!(translate(&vm, gpa(601)), None);
    for page in [600, 601] {
        assert_eq!(vcpu.handle_fault(gpa(page), Access::Write), Ok(Outcome::Resume));
        let found = translate(&vm, gpa(page)).unwrap();
        assert_eq!((found.level, found.pfn.0 >= PRIVATE_PFN), (Level::L4K, page == 600));
    }
    drop(readers);
    until_it_succeeds(|| vm.set_user_memory_region(change(1, NO_FLAGS, 0, 0)), || {});
    vm.reclaim();
    assert_eq!((Arc::strong_count(&words), Arc::strong_count(&others), Arc::strong_count(&backing)), (1, 1, 1));
    drop(vcpu);
    assert_no_table_is_left(&vm);
}

each!(userfault_for_which_there_is_no_memory_is_as_it_was_and_leaks_nothing, userfault);
fn userfault<F: Format>(locking: Locking) {
    life_with_userfault::<F>(locking);
    let before = LIVE_BYTES.get();
    life_with_userfault::<F>(locking);
    assert_eq!(LIVE_BYTES.get(), before, "bytes of the heap are leaked");
}
