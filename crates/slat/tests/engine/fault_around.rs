//! Fault-around: exactly the resident neighbours are mapped, with the rights that a read would get.
//! They count as not used. The guest observes only that it does not fault there.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

#[cfg(debug_assertions)]
use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::log::{Slot, World, dirty_trackings, write_as_hardware};
use crate::common::trap::trap_vm_with;
use crate::common::{Frame, MIB, TestBacking, TestHost, Writes, assert_no_table_is_left, change, each, region};
#[cfg(debug_assertions)]
use slat::Level;
use slat::baselines::Locking;
use slat::dirty::DirtyTracking;
use slat::error::{ConfigError, FaultError};
use slat::format::{Format, Npt};
use slat::tables::{AccessTracking, FaultAround, Translation};
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Host, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize,
    Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];

fn around(locking: Locking, nr_pages: u8) -> Config {
    Config::default().with_locking(locking).with_fault_around(FaultAround::Pages(nr_pages))
}

fn vm_with<F: Format>(config: Config) -> Arc<Vm<TestHost, F>> {
    Arc::new(Vm::new(TestHost::default(), config).unwrap())
}

/// The translation of `gfn`.
fn at<H: Host, F: Format>(vm: &Vm<H, F>, gfn: u64) -> Option<Translation> {
    vm.read_tables().unwrap().cursor().query(Gfn(gfn).gpa())
}

/// The pages of `range` that are mapped.
fn mapped<H: Host, F: Format>(vm: &Vm<H, F>, range: std::ops::Range<u64>) -> BTreeSet<u64> {
    let reader = vm.read_tables().unwrap();
    let mut cursor = reader.cursor();
    range.filter(|&gfn| cursor.query(Gfn(gfn).gpa()).is_some()).collect()
}

/// A memslot of small pages from guest frame `first` on. `resident` are its resident pages, by
/// number within the memslot.
fn slot(
    id: u32,
    first: u64,
    nr_pages: u64,
    resident: impl IntoIterator<Item = u64>,
) -> (MemoryRegion<Arc<TestBacking>>, Arc<TestBacking>) {
    let memory = region(id, first * PAGE_SIZE, nr_pages * PAGE_SIZE, 0x1_0000 + first, PageSize::Size4K);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    backing.resident.write().unwrap().extend(resident);
    (memory, backing)
}

fn fault<H: Host, F: Format>(vcpu: &mut Vcpu<H, F>, gfn: u64, access: Access) {
    assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), access), Ok(Outcome::Resume));
}

each!(exactly_the_resident_neighbours_are_mapped, exactly_the_resident);
fn exactly_the_resident<F: Format>(locking: Locking) {
    // Neither end of the memslot is aligned.
    const FIRST: u64 = 505;
    const NR_PAGES: u64 = 77;
    let is_resident = |page: u64| page % 3 != 1 && page % 7 != 2;
    for nr_pages in [2, 4, 8, 16, 32, 64] {
        for access in ACCESSES {
            let vm = vm_with::<F>(around(locking, nr_pages));
            let (memory, _) = slot(0, FIRST, NR_PAGES, (0..NR_PAGES).filter(|&page| is_resident(page)));
            vm.set_user_memory_region(memory).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            let mut expected = BTreeSet::new();
            let mut nr_installed = 0;
            let mut used = BTreeSet::new();
            let mut given_write = BTreeSet::new();
            // In windows that have a page-table page and in others; twice in the same.
            for gfn in [FIRST + 40, FIRST, FIRST + 6, FIRST + 7, FIRST + NR_PAGES - 1, FIRST + 41] {
                let window = u64::from(nr_pages);
                let first = gfn / window * window;
                let was_mapped = !expected.insert(gfn);
                if !was_mapped {
                    let neighbours = (first..first + window)
                        .filter(|&gfn| (FIRST..FIRST + NR_PAGES).contains(&gfn) && is_resident(gfn - FIRST));
                    expected.extend(neighbours);
                }
                nr_installed += u64::from(!was_mapped);
                // Where CPUs set no D, a neighbour is not writable yet.
                let is_allowed = at(&vm, gfn).is_some_and(|found| found.writable || access != Access::Write);
                assert_eq!(is_allowed, was_mapped && (F::HAS_DIRTY_BIT || access != Access::Write));
                let spurious_before = vm.stats().spurious;
                fault(&mut vcpu, gfn, access);
                used.insert(gfn);
                if F::HAS_DIRTY_BIT || !was_mapped || access == Access::Write {
                    given_write.insert(gfn);
                }
                assert_eq!(mapped(&vm, 0..1024), expected, "window {nr_pages}, {access:?} of {gfn}");
                assert_eq!(vm.stats().spurious - spurious_before, u64::from(is_allowed));
                let found = at(&vm, gfn).unwrap();
                if !was_mapped {
                    let is_dirty = access == Access::Write || (found.writable && !F::HAS_DIRTY_BIT);
                    assert!(found.accessed && found.dirty == is_dirty);
                }
            }
            for &gfn in &expected {
                let found = at(&vm, gfn).unwrap();
                let writable = F::HAS_DIRTY_BIT || given_write.contains(&gfn);
                assert_eq!((found.pfn.0, found.size, found.writable), (0x1_0000 + gfn, PageSize::Size4K, writable));
            }
            let accessed = expected.iter().copied().filter(|&gfn| at(&vm, gfn).unwrap().accessed);
            assert_eq!(accessed.collect::<BTreeSet<_>>(), used, "neighbours have not been used");
            let stats = vm.stats();
            assert_eq!(stats.pages_4k(), expected.len() as u64);
            assert_eq!(stats.around, expected.len() as u64 - nr_installed);
            assert_eq!(vm.host().resolves.load(Ordering::SeqCst), nr_installed, "neighbours are not resolved");
            drop(vcpu);
            vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
            assert_eq!(vm.stats().pages_4k(), 0);
            assert_no_table_is_left(&vm);
        }
    }
}

each!(without_fault_around_no_neighbour_is_resolved, off);
fn off<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(Config::default().with_locking(locking));
    vm.set_user_memory_region(slot(0, 0, 64, 0..64).0).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    fault(&mut vcpu, 5, Access::Read);
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 4 * PAGE_SIZE, Access::Read), Ok(4 * PAGE_SIZE));
    assert_eq!(mapped(&vm, 0..64), BTreeSet::from([0, 1, 2, 3, 5]));
    assert_eq!((vm.host().nr_resident_queries.load(Ordering::SeqCst), vm.stats().around), (0, 0));
}

#[test]
fn a_window_that_is_no_power_of_two_or_too_large_is_refused() {
    for nr_pages in 0..=u8::MAX {
        let config = Config::default().with_fault_around(FaultAround::Pages(nr_pages));
        let result = Vm::<TestHost, Npt>::new(TestHost::default(), config).map(|_| ());
        let is_good = [2, 4, 8, 16, 32, 64].contains(&nr_pages);
        assert_eq!(result, if is_good { Ok(()) } else { Err(ConfigError::BadFaultAround { nr_pages }) });
    }
}

each!(prefaults_and_huge_pages_map_nothing_around, nothing_around);
/// A prefault maps what was requested alone, and a fault on a huge page has no neighbours.
fn nothing_around<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(around(locking, 64));
    vm.set_user_memory_region(slot(0, 0, 64, 0..64).0).unwrap();
    let huge = region(1, 4 * MIB, 4 * MIB, 1024, PageSize::Size2M);
    huge.backing.as_ref().unwrap().resident.write().unwrap().extend(0..1024);
    vm.set_user_memory_region(huge).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(PAGE_SIZE), 2 * PAGE_SIZE, Access::Write), Ok(2 * PAGE_SIZE));
    assert_eq!(vcpu.pre_fault_pages(&[Gfn(9).gpa(), Gfn(40).gpa()], Access::Write), Ok(2));
    assert_eq!(mapped(&vm, 0..64), BTreeSet::from([1, 2, 9, 40]));
    fault(&mut vcpu, 1024, Access::Read);
    assert_eq!(vm.host().nr_resident_queries.load(Ordering::SeqCst), 0);
    assert_eq!((vm.stats().pages_2m(), vm.stats().pages_4k(), vm.stats().around), (1, 4, 0));
}

each!(contiguous_neighbours_are_resolved_once, contiguous);
/// One answer for a block of contiguous frames serves all of its pages in a group of 8.
fn contiguous<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(around(locking, 32));
    // Shifted by 16 pages, so that no large leaf fits; a block of frames ends at page 15.
    let memory = region(0, 0, 4 * MIB, 0x1_0000 - 16, PageSize::Size2M);
    memory.backing.as_ref().unwrap().resident.write().unwrap().extend(0..1024);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    fault(&mut vcpu, 3, Access::Read);
    assert_eq!(mapped(&vm, 0..1024), (0..32).collect());
    assert!((0..32).all(|gfn| at(&vm, gfn).unwrap().pfn.0 == 0x1_0000 - 16 + gfn));
    assert_eq!(vm.host().nr_resident_queries.load(Ordering::SeqCst), 4);
}

each!(a_window_ends_with_its_slot, two_slots);
fn two_slots<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(around(locking, 64));
    vm.set_user_memory_region(slot(0, 10, 20, 0..20).0).unwrap();
    vm.set_user_memory_region(slot(1, 30, 500, 0..500).0).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    fault(&mut vcpu, 29, Access::Write);
    assert_eq!(mapped(&vm, 0..1024), (10..30).collect());
    fault(&mut vcpu, 30, Access::Write);
    assert_eq!(mapped(&vm, 0..1024), (10..64).collect());
    let exit = Outcome::Exit(Exit::Mmio { gpa: Gfn(9).gpa(), access: Access::Read });
    assert_eq!(vcpu.handle_fault(Gfn(9).gpa(), Access::Read), Ok(exit));
    assert_eq!(mapped(&vm, 0..1024), (10..64).collect());
}

each!(nothing_is_mapped_around_in_a_range_in_flight, beside_a_held_range);
fn beside_a_held_range<F: Format>(locking: Locking) {
    for has_table in [false, true] {
        let vm = vm_with::<F>(around(locking, 16));
        let (memory, backing) = slot(0, 0, 512, 0..512);
        vm.set_user_memory_region(memory).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        if has_table {
            fault(&mut vcpu, 100, Access::Read);
        } else {
            // No page-table page keeps the range apart.
            vm.host().fail_after(0);
        }
        let held = vm.invalidate_range(GfnRange::new(Gfn(4), 3)).unwrap();
        vm.host().never_fail();
        // A mapping of it would be stale as soon as it is made.
        backing.frames.write().unwrap().insert(5, Frame { pfn: 0x9999, writes: Writes::Allowed });
        fault(&mut vcpu, 1, Access::Read);
        assert_eq!(mapped(&vm, 0..16), (0..4).chain(7..16).collect());
        drop(held);
        fault(&mut vcpu, 5, Access::Read);
        assert_eq!(mapped(&vm, 0..16), (0..16).collect());
        assert_eq!(at(&vm, 5).unwrap().pfn.0, 0x9999);
    }
}

each!(neighbours_get_only_the_rights_of_a_read, rights);
fn rights<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(around(locking, 16));
    let (memory, _) = slot(0, 0, 16, 0..16);
    vm.set_user_memory_region(MemoryRegion { flags: MemoryRegionFlags::READONLY, ..memory }).unwrap();
    // The host makes a frame writable only for a write.
    let (memory, backing) = slot(1, 16, 16, 0..16);
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    fault(&mut vcpu, 3, Access::Execute);
    fault(&mut vcpu, 20, Access::Write);
    assert_eq!(mapped(&vm, 0..64), (0..32).collect());
    for gfn in 0..32 {
        assert_eq!(at(&vm, gfn).unwrap().writable, gfn == 20, "page {gfn}");
    }
    let exit = Outcome::Exit(Exit::Mmio { gpa: Gfn(4).gpa(), access: Access::Write });
    assert_eq!(vcpu.handle_fault(Gfn(4).gpa(), Access::Write), Ok(exit));
    // The first write resolves its page, and passes over what is mapped.
    let resolves = vm.host().resolves.load(Ordering::SeqCst);
    fault(&mut vcpu, 21, Access::Write);
    assert_eq!(vm.host().resolves.load(Ordering::SeqCst), resolves + 1);
    assert!(at(&vm, 21).unwrap().writable && !at(&vm, 22).unwrap().writable);
}

/// In a memslot that logs, a neighbour is clean until it is written, and then logged, in every way
/// to find writes.
fn logs<F: Format>(locking: Locking) {
    for tracking in dirty_trackings::<F>() {
        for access in ACCESSES {
            let mut world = World::<F>::new(around(locking, 16).with_dirty_tracking(tracking));
            let resident = MemoryRegion { flags: LOG, ..slot(1, 64, 64, 0..64).0 };
            world.vm.set_user_memory_region(resident).unwrap();
            let pages = Slot { first_pfn: 0x1_0000 + 64, ..Slot::new(1, 64, 64) };
            fault(&mut world.vcpu, 70, access);
            assert_eq!(mapped(&*world.vm, 0..256), (64..80).collect());
            let written: Vec<u64> = if access == Access::Write { vec![6] } else { vec![] };
            assert_eq!(world.get(pages), written, "{tracking:?} {access:?}");
            let resolves = world.vm.host().resolves.load(Ordering::SeqCst);
            for page in [5, 0, 15] {
                let gfn = pages.gfn(page);
                let is_write_protected =
                    matches!(tracking, DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves);
                assert_eq!(world.is_writable(pages, page), !is_write_protected, "{tracking:?}");
                if is_write_protected {
                    fault(&mut world.vcpu, gfn.0, Access::Write);
                } else {
                    let found = world.at(gfn).unwrap();
                    assert!(write_as_hardware(&world.vm, gfn, found));
                }
                assert_eq!(world.get(pages), [page], "{tracking:?}");
            }
            // The leaf records that the host allows it.
            assert_eq!(world.vm.host().resolves.load(Ordering::SeqCst), resolves);
        }
    }
}
each!(a_neighbour_is_logged_when_it_is_written_and_not_before, logs);

/// Logging begins while the host resolves neighbours that were to be writable. All pages that are
/// writable afterwards are in the log, or in the ring.
fn logging_begins<F: Format>(locking: Locking) {
    for has_ring in [false, true] {
        for access in [Access::Read, Access::Write] {
            let vm = trap_vm_with::<F>(around(locking, 64));
            if has_ring {
                vm.enable_dirty_ring(256).unwrap();
            }
            vm.set_user_memory_region(slot(0, 0, 64, 0..64).0).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            let keeper = vm.host().traps().in_resident.set();
            thread::scope(|scope| {
                let vcpu = &mut vcpu;
                let faulting = scope.spawn(move || fault(vcpu, 9, access));
                keeper.arrived.recv().unwrap();
                vm.set_user_memory_region(change(0, LOG, 0, 64 * PAGE_SIZE)).unwrap();
                keeper.go.send(()).unwrap();
                faulting.join().unwrap();
            });
            assert_eq!(mapped(&*vm, 0..64), (0..64).collect());
            let writable: BTreeSet<u64> = (0..64).filter(|&gfn| at(&*vm, gfn).unwrap().writable).collect();
            let mut logged = BTreeSet::new();
            if has_ring {
                vm.dirty_rings().for_each(|ring| {
                    ring.harvest(|page| assert!(logged.insert(page.page), "page {} twice", page.page));
                });
            } else {
                let mut bitmap = [0];
                vm.get_dirty_log(0, &mut bitmap).unwrap();
                logged.extend((0..64).filter(|page| bitmap[0] >> page & 1 == 1));
            }
            // The fault's own page was mapped before the memslot logged, and is write-protected.
            // Where CPUs set no D, a writable neighbour would count as written.
            assert_eq!(writable.len(), if F::HAS_DIRTY_BIT { 7 } else { 0 }, "all neighbours of the group were to be");
            assert!(writable.is_subset(&logged), "writable {writable:?}, logged {logged:?}");
        }
    }
}
each!(neighbours_mapped_writable_while_logging_begins_are_logged, logging_begins);

each!(neighbours_are_not_pushed, rings);
/// In a memslot that logs, a ring holds written pages and no neighbour. A ring that is nearly full
/// has room for all that a fault may make writable.
fn rings<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(around(locking, 64));
    vm.enable_dirty_ring(256).unwrap();
    vm.set_user_memory_region(MemoryRegion { flags: LOG, ..slot(0, 0, 1 << 14, 0..1 << 14).0 }).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for nth in 0..192 {
        fault(&mut vcpu, nth * 64 + 7, Access::Write);
    }
    assert_eq!(vm.stats().around, 192 * 63);
    let full = Outcome::Exit(Exit::DirtyRingFull);
    assert_eq!(vcpu.handle_fault(Gfn(192 * 64).gpa(), Access::Read), Ok(full));
    let mut pages = Vec::new();
    vm.dirty_rings().for_each(|ring| {
        ring.harvest(|page| pages.push(page.page));
    });
    assert_eq!(pages, (0..192).map(|nth| nth * 64 + 7).collect::<Vec<_>>());
    assert!((0..192 * 64).all(|gfn| at(&vm, gfn).is_some_and(|found| found.writable == (gfn % 64 == 7))));
}

each!(without_an_accessed_bit_a_neighbour_is_not_written, unseen);
/// Where CPUs set neither A nor D, neighbours count as used once, and never as written.
fn unseen<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(around(locking, 8).with_access_tracking(AccessTracking::Faults));
    vm.set_user_memory_region(slot(0, 0, 8, 0..8).0).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    fault(&mut vcpu, 2, Access::Read);
    assert_eq!(mapped(&vm, 0..8), (0..8).collect());
    for gfn in 0..8 {
        let found = at(&vm, gfn).unwrap();
        assert_eq!((found.writable, found.accessed), (gfn == 2, true), "page {gfn}");
    }
    let resolves = vm.host().resolves.load(Ordering::SeqCst);
    fault(&mut vcpu, 3, Access::Write);
    assert_eq!(vm.host().resolves.load(Ordering::SeqCst), resolves);
    assert_eq!(vm.age_range(GfnRange::new(Gfn(0), 8)), Ok(8));
    fault(&mut vcpu, 6, Access::Read);
    assert_eq!(vm.age_range(GfnRange::new(Gfn(0), 8)), Ok(1));
    *vm.host().zapped.lock().unwrap() = Some(Vec::new());
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    let zapped = vm.host().zapped.lock().unwrap().take().unwrap();
    let dirty: BTreeSet<u64> = zapped.iter().filter(|leaf| leaf.dirty).map(|leaf| leaf.range.start.0).collect();
    // Writes to page 2 could not be found.
    assert_eq!(dirty, BTreeSet::from([2, 3]));
}

each!(without_memory_for_tables_nothing_is_mapped_around, no_memory);
fn no_memory<F: Format>(locking: Locking) {
    let vm = vm_with::<F>(around(locking, 64));
    vm.set_user_memory_region(slot(0, 3, 700, 0..700).0).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut expected = BTreeSet::new();
    // The first needs a page-table page for each level, the second one, the third none.
    for (gfn, nr_tables, window) in
        [(100, u64::from(F::ROOT_LEVEL.0) - 1, 64..128), (600, 1, 576..640), (140, 0, 128..192)]
    {
        for k in 0..nr_tables {
            // Spare page-table pages stay in the vCPU's cache.
            vm.host().fail_after(i64::from(k != 0));
            assert_eq!(vcpu.handle_fault(Gfn(gfn).gpa(), Access::Read), Err(FaultError::OutOfMemory));
            assert_eq!(mapped(&vm, 0..1024), expected);
        }
        vm.host().fail_after(i64::from(nr_tables != 0));
        fault(&mut vcpu, gfn, Access::Read);
        expected.extend(window);
        assert_eq!(mapped(&vm, 0..1024), expected);
        assert_eq!(vm.stats().pages_4k(), expected.len() as u64);
    }
}

/// A fault is overtaken at its `nth` look at a PTE: a neighbour moves to another frame, or its
/// memslot is deleted. Returns whether it has so many looks.
#[cfg(debug_assertions)]
fn overtaken(has_table: bool, whole_slot: bool, access: Access, nth: u32) -> bool {
    let vm = vm_with::<Hooked>(around(Locking::None, 8));
    let (memory, backing) = slot(0, 0, 512, 0..512);
    vm.set_user_memory_region(memory).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    if has_table {
        fault(&mut vcpu, 100, Access::Read);
    }
    let meanwhile = {
        let vm = Arc::clone(&vm);
        move || {
            let overtakes = move || {
                if whole_slot {
                    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
                    return;
                }
                let held = vm.invalidate_range(GfnRange::new(Gfn(4), 2)).unwrap();
                for page in [4, 5] {
                    backing.frames.write().unwrap().insert(page, Frame { pfn: 0x9990 + page, writes: Writes::Allowed });
                }
                drop(held);
            };
            thread::spawn(overtakes).join().unwrap();
        }
    };
    at_look(Level(4), nth, meanwhile);
    let result = vcpu.handle_fault(Gfn(2).gpa(), access);
    let was_overtaken = was_called();
    let case = format!("table {has_table}, slot {whole_slot}, {access:?}, look {nth}");
    if was_overtaken && whole_slot {
        assert_eq!(mapped(&vm, 0..512), BTreeSet::new(), "{case}");
        let exit = Outcome::Exit(Exit::Mmio { gpa: Gfn(2).gpa(), access });
        assert!(result == Ok(exit) || result == Ok(Outcome::Resume), "{case}: {result:?}");
        assert_eq!(vm.stats().pages_4k(), 0, "{case}");
    } else if was_overtaken {
        assert_eq!(result, Ok(Outcome::Resume), "{case}");
        for gfn in 0..8 {
            let frame = if [4, 5].contains(&gfn) { 0x9990 + gfn } else { 0x1_0000 + gfn };
            let found = at(&vm, gfn);
            assert!(found.is_none_or(|found| found.pfn.0 == frame), "{case}: page {gfn} is {found:?}");
            assert!(found.is_some() || gfn != 2, "{case}");
        }
        assert_eq!(vm.stats().pages_4k(), mapped(&vm, 0..512).len() as u64, "{case}");
    }
    was_overtaken
}

#[cfg(debug_assertions)]
#[test]
fn a_fault_that_is_overtaken_at_any_look_maps_no_old_neighbour() {
    let mut nr_overtaken = 0;
    for has_table in [false, true] {
        for whole_slot in [false, true] {
            for access in ACCESSES {
                nr_overtaken += (1..).take_while(|&nth| overtaken(has_table, whole_slot, access, nth)).count();
            }
        }
    }
    assert!(nr_overtaken > 100, "{nr_overtaken} looks");
}

/// The same between the host's answer and the leaf, where there is no look. Each neighbour's answer
/// is the last one before a page of the window moves to another frame, or before another memslot
/// replaces this one.
fn overtaken_by_host<F: Format>(locking: Locking) {
    for whole_slot in [false, true] {
        let vm = trap_vm_with::<F>(around(locking, 8));
        let (memory, backing) = slot(0, 0, 512, 0..512);
        vm.set_user_memory_region(memory).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        // A page-table page, so that the neighbours' PTEs are read one by one.
        fault(&mut vcpu, 100, Access::Read);
        let keeper = vm.host().traps().in_resident.set();
        thread::scope(|scope| {
            let vcpu = &mut vcpu;
            let faulting = scope.spawn(move || vcpu.handle_fault(Gfn(2).gpa(), Access::Read));
            // It has the answer for page 0.
            keeper.arrived.recv().unwrap();
            if whole_slot {
                vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
                let other = region(1, 0, MIB, 0x9_0000, PageSize::Size4K);
                vm.set_user_memory_region(other).unwrap();
            } else {
                let held = vm.invalidate_range(GfnRange::new(Gfn(0), 1)).unwrap();
                backing.frames.write().unwrap().insert(0, Frame { pfn: 0x9_0000, writes: Writes::Allowed });
                drop(held);
            }
            keeper.go.send(()).unwrap();
            assert_eq!(faulting.join().unwrap(), Ok(Outcome::Resume));
        });
        if whole_slot {
            // The fault's own page was zapped with the old memslot, and no neighbour was mapped
            // after.
            assert_eq!(mapped(&*vm, 0..512), BTreeSet::new());
            fault(&mut vcpu, 2, Access::Read);
            // In the new memslot no other page is resident.
            assert_eq!(mapped(&*vm, 0..512), BTreeSet::from([2]));
            assert_eq!(at(&*vm, 2).unwrap().pfn.0, 0x9_0002);
        } else {
            assert_eq!(mapped(&*vm, 0..8), (1..8).collect());
        }
        assert_eq!(vm.stats().pages_4k(), mapped(&*vm, 0..512).len() as u64);
    }
}
each!(an_answer_that_is_overtaken_is_not_mapped, overtaken_by_host);

/// Threads fault in the same windows while pages move to other frames. No old frame stays mapped,
/// and the counts are exact.
fn beside_others<F: Format>(locking: Locking) {
    const NR_PAGES: u64 = 1024;
    let vm = vm_with::<F>(around(locking, 16));
    let (memory, backing) = slot(0, 0, NR_PAGES, (0..NR_PAGES).filter(|page| page % 5 != 0));
    vm.set_user_memory_region(memory).unwrap();
    thread::scope(|scope| {
        for index in 0..3 {
            let vm = &vm;
            scope.spawn(move || {
                let mut vcpu = vm.create_vcpu().unwrap();
                for nth in 0..6 * NR_PAGES {
                    let gfn = nth * [1, 7, 1021][index] % NR_PAGES;
                    fault(&mut vcpu, gfn, ACCESSES[(nth % 3) as usize]);
                }
            });
        }
        for life in 1..200 {
            let gfn = life * 37 % NR_PAGES;
            let range = GfnRange::new(Gfn(gfn), (life % 9 + 1).min(NR_PAGES - gfn));
            let held = vm.invalidate_range(range).unwrap();
            for page in range.start.0..range.end.0 {
                let frame = Frame { pfn: (life << 20) + page, writes: Writes::Allowed };
                backing.frames.write().unwrap().insert(page, frame);
            }
            drop(held);
        }
    });
    let frames = backing.frames.read().unwrap();
    let mut nr_mapped = 0;
    for gfn in 0..NR_PAGES {
        if let Some(found) = at(&vm, gfn) {
            assert_eq!(found.pfn.0, frames.get(&gfn).map_or(0x1_0000 + gfn, |frame| frame.pfn), "page {gfn}");
            nr_mapped += 1;
        }
    }
    drop(frames);
    assert_eq!(vm.stats().pages_4k(), nr_mapped);
    assert!(vm.stats().around > 0);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_eq!(vm.stats().pages_4k(), 0);
    assert_no_table_is_left(&vm);
}
each!(many_threads_map_around_while_frames_change, beside_others);
