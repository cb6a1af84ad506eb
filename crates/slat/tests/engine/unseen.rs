//! Hosts that need no report of leaves (`Host::needs_zapped_leaves`): page-table pages go with the
//! leaves in them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::hooked::{Hooked, at_look, was_called, without_looks};
use crate::common::log::write_as_hardware;
use crate::common::trap::Keeper;
use crate::common::{GIB, MIB, TestHost, assert_no_table_is_left, change, each, region, translate};
use crate::pinned::mapping;
use slat::baselines::Locking;
use slat::dirty::DirtyTracking;
use slat::error::{FaultError, SlotError};
use slat::format::{Ept, Format, Npt};
use slat::{
    Access, Config, Gfn, GfnRange, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm,
};

const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
/// Pages in 2 MiB and in 1 GiB.
const BLOCK_2M: u64 = 512;
const BLOCK_1G: u64 = 512 * 512;

fn pages(start: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(start), nr_pages)
}

fn trap_vm<F: Format>(config: Config) -> Arc<Vm<TestHost, F>> {
    Arc::new(Vm::new(TestHost::with_traps_without_reports(), config).unwrap())
}

each!(a_memslot_is_deleted_without_a_look_at_its_leaves, deleted);
fn deleted<F: Format>(locking: Locking) {
    const NR_BLOCKS: u64 = 500;
    let vm = trap_vm::<F>(Config::default().with_locking(locking));
    let host = vm.host();
    host.record_zapped();
    // Whole blocks of 1 GiB, and parts of two.
    let (start, size_bytes) = (GIB - 4 * MIB, 2 * GIB + 8 * MIB);
    vm.set_user_memory_region(region(0, start, size_bytes, BLOCK_1G - 1024, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let first = Gpa(start).gfn().0;
    for nth in 0..NR_BLOCKS {
        let gfn = Gfn(first + nth * (2 * BLOCK_1G / NR_BLOCKS) + nth % 7);
        assert_eq!(vcpu.handle_fault(gfn.gpa(), Access::Write), Ok(Outcome::Resume));
    }
    assert_eq!(vm.stats().pages_4k(), NR_BLOCKS);
    let nr_tables = vm.stats().live_tables();
    let looks = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&looks);
    host.traps().at_table.set(move || {
        counter.fetch_add(1, Ordering::Relaxed);
    });
    let invalidation = vm.invalidate_range(pages(first, size_bytes / PAGE_SIZE)).unwrap();
    host.traps().at_table.remove();
    let nr_looks = looks.load(Ordering::Relaxed);
    // Some for each page-table page at the two ends, and those that one call frees.
    let most = if F::BREAK_BEFORE_MAKE { 10 * NR_BLOCKS } else { 2 * 128 + 100 };
    assert!(nr_looks < most, "{nr_looks} looks at {nr_tables} page-table pages");
    assert!(host.flushes.lock().unwrap().iter().flatten().any(|range| range.contains(Gfn(first))));
    for nth in 0..NR_BLOCKS {
        let gfn = Gfn(first + nth * (2 * BLOCK_1G / NR_BLOCKS) + nth % 7);
        assert_eq!(vm.read_tables().unwrap().cursor().query(gfn.gpa()), None);
    }
    drop(invalidation);
    vm.reclaim();
    let stats = vm.stats();
    assert_eq!((stats.pages_4k(), stats.zapped_4k), (0, NR_BLOCKS));
    assert!(stats.live_tables() < 8, "{} page-table pages are left", stats.live_tables());
    assert_eq!(stats.live_tables(), host.live_tables() as u64);
    assert_eq!(host.take_zapped(), []);
    // It is mapped again, deleted, and once more.
    for _ in 0..2 {
        assert_eq!(vcpu.handle_fault(Gpa(GIB), Access::Write), Ok(Outcome::Resume));
        vm.set_user_memory_region(change(0, NO_FLAGS, start, 0)).unwrap();
        assert!(matches!(vcpu.handle_fault(Gpa(GIB), Access::Write), Ok(Outcome::Exit(_))));
        vm.set_user_memory_region(region(0, start, size_bytes, 4 * BLOCK_1G - 1024, PageSize::Size4K)).unwrap();
    }
}

each!(huge_leaves_go_with_their_page_table_page, huge);
fn huge<F: Format>(locking: Locking) {
    let vm =
        Arc::new(Vm::<TestHost, F>::new(TestHost::without_reports(), Config::default().with_locking(locking)).unwrap());
    vm.set_user_memory_region(region(0, 0, 2 * GIB, 2 * BLOCK_1G, PageSize::Size2M)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for block in 0..20 {
        assert_eq!(vcpu.handle_fault(Gfn(block * BLOCK_2M).gpa(), Access::Write), Ok(Outcome::Resume));
    }
    assert_eq!(vm.split_range(pages(0, 5 * BLOCK_2M), PageSize::Size4K), Ok(5));
    assert_eq!(vm.age_range(pages(0, BLOCK_2M)), Ok(512));
    drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
    vm.reclaim();
    let stats = vm.stats();
    assert_eq!((stats.pages_4k(), stats.pages_2m(), stats.pages_1g()), (0, 0, 0));
    assert_eq!((stats.zapped_4k, stats.zapped_2m), (5 * 512, 15));
}

#[test]
fn a_part_of_a_page_table_page_keeps_its_other_leaves() {
    let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::without_reports(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 8 * MIB, BLOCK_1G, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Write), Ok(8 * MIB));
    drop(vm.invalidate_range(pages(100, 1100)).unwrap());
    for gfn in 0..2048 {
        assert_eq!(translate(&vm, Gfn(gfn).gpa()).is_some(), !(100..1200).contains(&gfn), "page {gfn}");
    }
    vm.reclaim();
    assert_eq!(vm.stats().pages_4k(), 2048 - 1100);
}

/// Where only the dirty bit of a leaf says that the page was written, the zap reads it.
#[test]
fn where_dirty_bits_are_the_log_no_write_is_lost() {
    for tracking in [DirtyTracking::DirtyBit, DirtyTracking::PageModificationLog] {
        let config = Config::default().with_dirty_tracking(tracking);
        let vm = Arc::new(Vm::<TestHost, Ept>::new(TestHost::without_reports(), config).unwrap());
        vm.set_user_memory_region(MemoryRegion { flags: LOG, ..region(0, 0, GIB, BLOCK_1G, PageSize::Size4K) })
            .unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        for gfn in [3, 600, 99_999] {
            assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Read), Ok(Outcome::Resume));
            let found = translate(&vm, Gfn(gfn).gpa()).unwrap();
            assert!(write_as_hardware(&vm, Gfn(gfn), found));
        }
        // The pages are not in the CPUs' logs any more.
        vm.host().modification_log.lock().unwrap().clear();
        drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
        let mut bitmap = vec![0; (BLOCK_1G / 64) as usize];
        assert_eq!(vm.get_dirty_log(0, &mut bitmap), Ok(3), "{tracking:?}");
    }
}

/// A dropped VM frees page-table pages that it has not read, and those that still waited.
#[test]
fn a_vm_is_dropped_with_its_leaves() {
    let vm = trap_vm::<Npt>(Config::default());
    vm.set_user_memory_region(region(0, 0, 4 * GIB, 4 * BLOCK_1G, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for block in 0..1000 {
        assert_eq!(vcpu.handle_fault(Gfn(block * 2 * BLOCK_2M).gpa(), Access::Write), Ok(Outcome::Resume));
    }
    drop(vm.invalidate_range(pages(0, 2 * BLOCK_1G)).unwrap());
    let stats = vm.stats();
    assert!(stats.live_tables() > 500, "{} page-table pages wait", stats.live_tables());
    // The leaves that wait with them are counted until then.
    assert!(stats.pages_4k() > 500, "{} leaves", stats.pages_4k());
    // The host checks at its end that no page-table page is left.
}

/// Without memory, a fault frees what waits first.
#[test]
fn a_fault_without_memory_reclaims_what_zaps_have_left() {
    let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::without_reports(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for block in 0..512 {
        assert_eq!(vcpu.handle_fault(Gfn(block * BLOCK_2M).gpa(), Access::Write), Ok(Outcome::Resume));
    }
    drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
    assert!(vm.stats().live_tables() > 300);
    vm.host().fail_after(0);
    let gpa = Gpa(0);
    assert_eq!(vcpu.handle_fault(gpa, Access::Write), Err(FaultError::OutOfMemory));
    assert!(vm.stats().live_tables() < 8, "{} page-table pages wait", vm.stats().live_tables());
    vm.host().never_fail();
    assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
    assert_eq!(vm.stats().pages_4k(), 1);
}

/// One call beside frees a few; [`Vm::reclaim`] frees all, and yields.
#[test]
fn page_table_pages_are_freed_in_bounded_steps() {
    let vm = trap_vm::<Npt>(Config::default());
    vm.set_user_memory_region(region(0, 0, 2 * GIB, 2 * BLOCK_1G, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for block in 0..1024 {
        assert_eq!(vcpu.handle_fault(Gfn(block * BLOCK_2M).gpa(), Access::Write), Ok(Outcome::Resume));
    }
    let linked = vm.stats().live_tables();
    drop(vm.invalidate_range(pages(0, 2 * BLOCK_1G)).unwrap());
    let mut before = vm.stats().live_tables();
    assert!(linked - before <= 130, "{} were freed at once", linked - before);
    drop(vm.invalidate_range(pages(0, 1)).unwrap());
    let after = vm.stats().live_tables();
    assert!((100..=130).contains(&(before - after)), "{} were freed by an unrelated call", before - after);
    before = after;
    vm.host().traps().forget_steps();
    vm.reclaim();
    assert!(before - vm.stats().live_tables() > 500);
    // Each step of it looks at few page-table pages: those that it frees, and the list.
    let longest = vm.host().traps().longest_step.load(Ordering::SeqCst);
    assert!((1..=2 * 128 + 20).contains(&longest), "{longest} looks in one step");
}

each!(behind_a_guard_that_never_ends_what_waits_is_bounded, bounded, if F::GENERATION != 0);
/// Ranges that cover no whole 1 GiB: each page-table page is retired by itself, up to 1024.
fn bounded<F: Format>(locking: Locking) {
    const NR_BLOCKS: u64 = 300;
    const BOUND: u64 = 1024 + 2 * 512 + NR_BLOCKS + 10;
    let vm = trap_vm::<F>(Config::default().with_locking(locking));
    vm.set_user_memory_region(region(0, 0, GIB, BLOCK_1G, PageSize::Size4K)).unwrap();
    let (mut suspended, mut vcpu) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let keeper = vm.host().traps().in_guard.set();
    let inside = std::thread::spawn(move || suspended.handle_fault(Gpa(0), Access::Read));
    keeper.arrived.recv().unwrap();
    for round in 0..12 {
        for block in 0..NR_BLOCKS {
            assert_eq!(vcpu.handle_fault(Gfn(block * BLOCK_2M).gpa(), Access::Write), Ok(Outcome::Resume));
        }
        drop(vm.invalidate_range(pages(0, BLOCK_1G - BLOCK_2M)).unwrap());
        let live = vm.stats().live_tables();
        assert!(live <= BOUND, "{live} tables in round {round}");
        assert!(
            (0..NR_BLOCKS)
                .all(|block| { vm.read_tables().unwrap().cursor().query(Gfn(block * BLOCK_2M).gpa()).is_none() })
        );
    }
    keeper.go.send(()).unwrap();
    assert_eq!(inside.join().unwrap(), Ok(Outcome::Resume));
    drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
    vm.reclaim();
    assert_eq!(vm.stats().pages_4k(), 0);
}

/// A guard stays open while a memslot is deleted again and again: what waits is bounded by 64 Ki
/// page-table pages. Beyond that the leaves go one by one.
#[test]
fn behind_a_guard_that_never_ends_memslots_are_deleted_all_the_same() {
    const NR_GIB: u64 = 100;
    let vm = trap_vm::<Npt>(Config::default());
    let new = || vm.set_user_memory_region(region(0, 0, NR_GIB * GIB, 128 * BLOCK_1G, PageSize::Size4K));
    new().unwrap();
    let (mut suspended, mut vcpu) = (vm.create_vcpu().unwrap(), vm.create_vcpu().unwrap());
    let keeper = vm.host().traps().in_guard.set();
    let inside = std::thread::spawn(move || suspended.handle_fault(Gpa(0), Access::Read));
    keeper.arrived.recv().unwrap();
    let mut most = 0;
    for round in 0..3 {
        for block in 0..NR_GIB * 512 {
            assert_eq!(vcpu.handle_fault(Gfn(block * BLOCK_2M).gpa(), Access::Write), Ok(Outcome::Resume));
        }
        if round == 1 {
            // Nothing is freed yet, and so not counted, but what the list of retired ones
            // overwrites.
            assert!(vm.stats().zapped_4k <= 2 * NR_GIB, "{} leaves are counted", vm.stats().zapped_4k);
        }
        vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
        assert!(matches!(vcpu.handle_fault(Gpa(GIB), Access::Write), Ok(Outcome::Exit(_))));
        new().unwrap();
        most = most.max(vm.stats().live_tables());
    }
    // What waits, with one of 1 GiB and those that wait by themselves, and what is linked.
    assert!((1 << 16..(1 << 16) + 513 + 1024 + NR_GIB * 513).contains(&most), "{most} page-table pages");
    keeper.go.send(()).unwrap();
    assert_eq!(inside.join().unwrap(), Ok(Outcome::Resume));
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    vm.reclaim();
    assert_eq!(vm.stats().pages_4k(), 0);
    assert_eq!(vm.stats().live_tables(), vm.host().live_tables() as u64);
}

/// What is overtaken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    Read,
    Write,
    Prefault,
    Split,
    Recover,
    Age,
    Harvest,
    InvalidatePage,
    InvalidatePart,
    InvalidateAll,
}

/// What is mapped before. The page of the call is page 3.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Before {
    Nothing,
    /// A page-table page for 2 MiB, with another leaf.
    Neighbour,
    /// All small leaves of 2 MiB, in a memslot whose host allows huge ones.
    AllSmall,
    Huge,
    Logged,
}

/// How far the deletion has come when the call goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Moment {
    /// The page-table pages are unlinked, and CPUs may still have them cached.
    BeforeFlush,
    /// It is over, and another memslot has taken its place.
    Over,
}

/// The hook's deletion, if it waits in its flush.
type Deleting = Arc<Mutex<Option<(Keeper, std::thread::JoinHandle<()>)>>>;

const FIRST_PFN: u64 = 4 * BLOCK_1G;
const NEW_PFN: u64 = 8 * BLOCK_1G;

/// Call `call` is overtaken at its `nth` look at a PTE by the deletion of its memslot of 2 GiB, and
/// another memslot takes the place of that. Returns whether there are so many looks.
fn overtaken(call: Call, before: Before, moment: Moment, nth: u32) -> bool {
    let vm = trap_vm::<Hooked>(Config::default());
    let size = if matches!(before, Before::AllSmall | Before::Huge) { PageSize::Size2M } else { PageSize::Size4K };
    let flags = if before == Before::Logged || call == Call::Harvest { LOG } else { NO_FLAGS };
    let slot = |first_pfn| MemoryRegion { flags, ..region(0, 0, 2 * GIB, first_pfn, size) };
    vm.set_user_memory_region(slot(FIRST_PFN)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let touched: &[u64] = match before {
        Before::Nothing => &[],
        Before::Neighbour => &[4, 700, BLOCK_1G + 9],
        Before::AllSmall | Before::Huge => &[3, 512],
        Before::Logged => &[3, 4],
    };
    for &gfn in touched {
        assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Write), Ok(Outcome::Resume));
    }
    if before == Before::AllSmall {
        vm.split_range(pages(0, 2 * BLOCK_1G), PageSize::Size4K).unwrap();
    }
    let deleting = Deleting::default();
    let hook = {
        let (vm, deleting) = (Arc::clone(&vm), Arc::clone(&deleting));
        let new = slot(NEW_PFN);
        move || {
            let keeper = (moment == Moment::BeforeFlush).then(|| vm.host().traps().in_flush.set());
            let deletes = std::thread::spawn({
                let vm = Arc::clone(&vm);
                move || {
                    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
                    vm.set_user_memory_region(new).unwrap();
                }
            });
            match keeper {
                Some(keeper) => {
                    keeper.arrived.recv().unwrap();
                    *deleting.lock().unwrap() = Some((keeper, deletes));
                }
                None => deletes.join().unwrap(),
            }
        }
    };
    at_look(Level(4), nth, hook);
    let (gpa, block) = (Gfn(3).gpa(), pages(0, BLOCK_2M));
    let mut bitmap = vec![0; 2 * BLOCK_1G as usize / 64];
    match call {
        Call::Read => assert!(vcpu.handle_fault(gpa, Access::Read).is_ok()),
        Call::Write => assert!(vcpu.handle_fault(gpa, Access::Write).is_ok()),
        // It may be too late.
        Call::Prefault => assert!(vcpu.pre_fault_memory(gpa, 5 * PAGE_SIZE, Access::Write) != Ok(0)),
        Call::Split => assert!(vm.split_range(block, PageSize::Size4K).is_ok()),
        Call::Recover => assert!(vm.recover_range(block).is_ok()),
        Call::Age => assert!(vm.age_range(block).is_ok()),
        // The memslot may be gone.
        Call::Harvest => assert!(vm.get_dirty_log(0, &mut bitmap) != Ok(u64::MAX)),
        Call::InvalidatePage => drop(vm.invalidate_range(pages(3, 1)).unwrap()),
        Call::InvalidatePart => drop(vm.invalidate_range(pages(2, 600)).unwrap()),
        Call::InvalidateAll => drop(vm.invalidate_range(pages(0, 2 * BLOCK_1G)).unwrap()),
    }
    let was_overtaken = was_called();
    let case = format!("{call:?} {before:?} {moment:?} {nth}");
    let is_waiting = deleting.lock().unwrap().take();
    if let Some((keeper, deletes)) = is_waiting {
        // Whatever the call has made: no walk from the root finds a page of the old memslot.
        let found = without_looks(|| vm.read_tables().unwrap().cursor().query(gpa));
        assert!(found.is_none(), "{case}: {found:?}");
        keeper.go.send(()).unwrap();
        deletes.join().unwrap();
    }
    if was_overtaken {
        let mut nr_pages = 0;
        for gfn in 0..2 * BLOCK_2M {
            let found = without_looks(|| vm.read_tables().unwrap().cursor().query(Gfn(gfn).gpa()));
            let Some(found) = found else { continue };
            nr_pages += 1;
            assert_eq!(found.pfn.0, NEW_PFN + gfn, "{case}: page {gfn} has a frame of the memslot that was deleted");
        }
        vm.reclaim();
        let stats = vm.stats();
        assert_eq!(stats.pages_4k() + 512 * stats.pages_2m(), nr_pages, "{case}: counts of leaves");
        assert_eq!(stats.live_tables(), vm.host().live_tables() as u64, "{case}");
        // The guest goes on.
        assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume), "{case}");
        assert!(without_looks(|| vm.read_tables().unwrap().cursor().query(gpa)).is_some(), "{case}");
        if flags == LOG {
            bitmap.fill(0);
            assert!(vm.get_dirty_log(0, &mut bitmap).is_ok_and(|nr_pages| nr_pages >= 1), "{case}");
            assert_eq!(bitmap[0] & 1 << 3, 1 << 3, "{case}: the write is in the log");
        }
    }
    was_overtaken
}

/// The looks right before exchanges are in the check of transitions, which release builds do not
/// have.
#[cfg(debug_assertions)]
#[test]
fn calls_that_a_deletion_overtakes_at_any_look_leave_nothing_behind() {
    use Before::*;
    let cases: &[(Call, &[Before])] = &[
        (Call::Read, &[Nothing, Neighbour, Huge, Logged]),
        (Call::Write, &[Nothing, Neighbour, AllSmall, Huge, Logged]),
        (Call::Prefault, &[Nothing, Neighbour, Huge]),
        (Call::Split, &[Huge]),
        (Call::Age, &[Neighbour, Huge]),
        (Call::Harvest, &[Logged]),
        (Call::InvalidatePage, &[Neighbour, Huge]),
        (Call::InvalidatePart, &[Neighbour, Huge]),
        (Call::InvalidateAll, &[Neighbour, Huge]),
    ];
    for &(call, befores) in cases {
        for &before in befores {
            for moment in [Moment::BeforeFlush, Moment::Over] {
                let nr_overtaken = (1..).take_while(|&nth| overtaken(call, before, moment, nth)).count();
                assert!(nr_overtaken >= 2 || before == Nothing, "{call:?} {before:?}: {nr_overtaken} looks");
            }
        }
    }
}

/// A recovery looks at 512 leaves several times: some of its looks.
#[cfg(debug_assertions)]
#[test]
fn recoveries_that_a_deletion_overtakes_leave_nothing_behind() {
    for moment in [Moment::BeforeFlush, Moment::Over] {
        let mut nth = 1;
        let mut nr_overtaken = 0;
        while overtaken(Call::Recover, Before::AllSmall, moment, nth) {
            nr_overtaken += 1;
            // Each look of the first and the last steps, and every 61st between.
            nth += if (8..480).contains(&(nth % 520)) { 61 } else { 1 };
        }
        assert!(nr_overtaken > 50, "{nr_overtaken} looks");
    }
}

/// Each pinned page is released once, also by the end of the VM.
#[test]
fn pinned_pages_are_released_one_by_one() {
    let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::without_reports(), Config::default()).unwrap());
    let pinned =
        |slot, gpa| MemoryRegion { flags: MemoryRegionFlags::PINNED, ..region(slot, gpa, GIB, 0, PageSize::Size4K) };
    let range = pages(0, 2 * BLOCK_1G);
    let invalidation = vm.invalidate_range(range).unwrap();
    assert_eq!(vm.set_user_memory_region(pinned(0, 0)), Err(SlotError::SlotBusy { slot: 0 }));
    drop(invalidation);
    vm.set_user_memory_region(pinned(0, 0)).unwrap();
    vm.set_user_memory_region(pinned(1, GIB)).unwrap();
    for first in [512, BLOCK_1G + 512] {
        vm.map_range(&mapping(first, 700, PageSize::Size4K)).unwrap();
    }
    let released = Arc::clone(vm.host().released());
    let nr_released = || released.lock().unwrap().iter().map(|(range, ..)| range.nr_pages()).sum::<u64>();
    drop(vm.invalidate_range(pages(0, BLOCK_1G)).unwrap());
    assert_eq!(nr_released(), 700);
    vm.reclaim();
    assert_eq!(vm.stats().pages_4k(), 700);
    drop(vm);
    assert_eq!(nr_released(), 1400);
}

#[test]
fn all_page_table_pages_go_with_the_space() {
    let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::without_reports(), Config::default()).unwrap());
    vm.set_user_memory_region(region(0, 0, 600 * GIB, 1024 * BLOCK_1G, PageSize::Size4K)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for gib in (0..600).step_by(7) {
        assert_eq!(vcpu.handle_fault(Gpa(gib * GIB), Access::Write), Ok(Outcome::Resume));
    }
    drop(vcpu);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&vm);
}
