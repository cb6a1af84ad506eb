//! Dirty rings: what is pushed and when, exits of vCPUs whose rings are full, resets that protect.
//! `beside_guests` has the tests that no write is lost beside guests, harvests, resets and changes
//! of memslots.

mod beside_guests;
mod enabled_late;
mod pushed_once;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::guest::{Guest, Stop};
use crate::common::hooked::{Hooked, at_look, was_called};
use crate::common::{GIB, MIB, TestHost, assert_no_table_is_left, change, each, region, translate};
use slat::baselines::Locking;
use slat::dirty::{DirtyPage, DirtyRing, DirtyRingEntry, DirtyTracking, HugePageLogging, ManualProtect};
use slat::error::{ConfigError, FaultError, LogError};
use slat::format::{Format, Npt};
use slat::tables::{AccessTracking, FaultAround};
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vcpu, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const RUN: Duration = Duration::from_millis(250);
const FULL: Result<Outcome, FaultError> = Ok(Outcome::Exit(Exit::DirtyRingFull));
const RESUME: Result<Outcome, FaultError> = Ok(Outcome::Resume);

fn vm_with<F: Format>(config: Config, nr_entries: u32) -> Arc<Vm<TestHost, F>> {
    let vm = Arc::new(Vm::new(TestHost::default(), config).unwrap());
    vm.enable_dirty_ring(nr_entries).unwrap();
    vm
}

/// For exact counts: below a protected directory entry one fault may push a page twice.
fn leaf_by_leaf(locking: Locking) -> Config {
    Config::default().with_locking(locking).with_dirty_tracking(DirtyTracking::WriteProtectLeaves)
}

/// A VM with rings and a logging memslot 0 at address 0.
fn logging<F: Format>(config: Config, nr_entries: u32, size: u64) -> (Arc<Vm<TestHost, F>>, Vcpu<TestHost, F>) {
    let vm = vm_with::<F>(config, nr_entries);
    vm.set_user_memory_region(region(0, 0, size, 1 << 20, PageSize::Size1G)).unwrap();
    vm.set_user_memory_region(change(0, LOG, 0, size)).unwrap();
    let vcpu = vm.create_vcpu().unwrap();
    (vm, vcpu)
}

/// Harvests all rings.
fn harvest<F: Format>(vm: &Vm<TestHost, F>) -> Vec<DirtyPage> {
    let mut pages = Vec::new();
    for ring in vm.dirty_rings() {
        ring.harvest(|page| pages.push(page));
    }
    pages
}

fn pages_of(slot: u32, pages: impl IntoIterator<Item = u64>) -> Vec<DirtyPage> {
    pages.into_iter().map(|page| DirtyPage { slot, page }).collect()
}

fn is_writable<F: Format>(vm: &Vm<TestHost, F>, page: u64) -> bool {
    translate(vm, Gpa(page * PAGE_SIZE)).is_some_and(|found| found.writable)
}

fn write<F: Format>(vcpu: &mut Vcpu<TestHost, F>, page: u64) {
    assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write), RESUME, "page {page}");
}

/// Deletes `slots`, and checks that nothing of them is left.
fn end<F: Format>(vm: &Arc<Vm<TestHost, F>>, slots: &[u32]) {
    for &slot in slots {
        vm.set_user_memory_region(change(slot, NO_FLAGS, 0, 0)).unwrap();
    }
    assert_no_table_is_left(vm);
}

each!(a_fault_that_makes_a_page_writable_pushes_it_and_others_push_nothing, pushes);
fn pushes<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = logging::<F>(Config::default().with_locking(locking), 256, 4 * MIB);
    vm.set_user_memory_region(region(7, GIB, 4 * MIB, 0, PageSize::Size2M)).unwrap();
    assert_eq!(vcpu.dirty_ring().unwrap().nr_entries(), 256);
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), RESUME);
    assert_eq!(vcpu.handle_fault(Gpa(GIB), Access::Write), RESUME);
    assert_eq!(harvest(&vm), []);
    // A huge page that is split, a second write, an empty PTE.
    write(&mut vcpu, 0);
    write(&mut vcpu, 0);
    write(&mut vcpu, 1023);
    write(&mut vcpu, 700);
    assert_eq!(harvest(&vm), pages_of(0, [0, 1023, 700]));
    assert_eq!(harvest(&vm), []);
    assert!([0, 700, 1023].iter().all(|&page| is_writable(&vm, page)), "a harvest protects nothing");
    assert_eq!(vm.reset_dirty_rings(), Ok(3));
    assert!([0, 700, 1023].iter().all(|&page| !is_writable(&vm, page)));
    assert!(is_writable(&vm, GIB / PAGE_SIZE), "of another slot");
    assert_eq!(vm.reset_dirty_rings(), Ok(0));
    write(&mut vcpu, 700);
    assert_eq!(vm.reset_dirty_rings(), Ok(0), "it is not harvested");
    assert!(is_writable(&vm, 700));
    assert_eq!(harvest(&vm), pages_of(0, [700]));
    drop(vcpu);
    end(&vm, &[0, 7]);
}

each!(a_vcpu_exits_while_its_ring_is_full, full);
fn full<F: Format>(locking: Locking) {
    let (vm, mut vcpu) = logging::<F>(leaf_by_leaf(locking), 256, 4 * MIB);
    let mut other = vm.create_vcpu().unwrap();
    let limit = u64::from(256 - DirtyRing::RESERVE);
    for round in 0..5 {
        let first = round * limit % 512;
        assert!((first..first + limit).all(|page| vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write) == RESUME));
        assert!(vcpu.dirty_ring().unwrap().is_soft_full());
        for access in [Access::Read, Access::Write, Access::Execute] {
            for page in [first, first + limit, 1 << 20] {
                assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), access), FULL);
            }
        }
        assert_eq!(
            vcpu.pre_fault_memory(Gpa(0), PAGE_SIZE, Access::Read),
            Err(FaultError::DirtyRingFull { gpa: Gpa(0) })
        );
        assert!(!is_writable(&vm, first + limit), "an exit changes nothing");
        // Only this vCPU.
        write(&mut other, 1000);
        assert_eq!(harvest(&vm).len() as u64, limit + 1);
        assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), FULL, "a harvest makes no room");
        assert_eq!(vm.reset_dirty_rings(), Ok(limit + 1));
        assert!((0..1024).all(|page| !is_writable(&vm, page)));
    }
    drop((vcpu, other));
    end(&vm, &[0]);
}

#[test]
fn a_reset_stops_at_the_first_entry_that_was_not_harvested() {
    let (vm, mut vcpu) = logging::<Npt>(Config::default(), 256, 4 * MIB);
    for page in [5, 6, 900, 7] {
        write(&mut vcpu, page);
    }
    let ring = vcpu.dirty_ring().unwrap();
    assert_eq!(ring.entry(2), DirtyRingEntry::Dirty(DirtyPage { slot: 0, page: 900 }));
    assert!(ring.mark_harvested(2) && ring.mark_harvested(0));
    assert_eq!(vm.reset_dirty_rings(), Ok(1));
    assert_eq!(ring.first_index(), 1);
    assert_eq!([5, 6, 900, 7].map(|page| is_writable(&vm, page)), [false, true, true, true]);
    assert_eq!(harvest(&vm), pages_of(0, [6, 7]));
    assert_eq!(vm.reset_dirty_rings(), Ok(3));
    assert_eq!([5, 6, 900, 7].map(|page| is_writable(&vm, page)), [false; 4]);
}

#[test]
fn many_pages_in_any_order_are_protected_by_one_reset_and_one_flush() {
    for protection in [DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves] {
        let config = Config::default().with_dirty_tracking(protection);
        let (vm, mut vcpu) = logging::<Npt>(config, 4096, 64 * MIB);
        vm.set_user_memory_region(region(1, GIB + 3 * PAGE_SIZE, 3 * MIB, 7, PageSize::Size4K)).unwrap();
        vm.set_user_memory_region(change(1, LOG, GIB + 3 * PAGE_SIZE, 3 * MIB)).unwrap();
        let mut others: Vec<_> = (0..40).map(|_| vm.create_vcpu().unwrap()).collect();
        // Backward, in scattered order, and in two memslots by turns.
        let backward = (512..1024).rev();
        let all_over = (0..1500).map(|n| 1024 + n * 7919 % 15000);
        for page in backward.chain(all_over) {
            write(&mut vcpu, page);
        }
        for page in 0..700 {
            let outcome = others[page % 40].handle_fault(Gpa(GIB + page as u64 * PAGE_SIZE), Access::Write);
            assert!(outcome.is_ok_and(|outcome| outcome != Outcome::Exit(Exit::DirtyRingFull)));
        }
        let harvested = harvest(&vm);
        assert_eq!(harvested.len(), 512 + 1500 + 697);
        assert_eq!(harvested.iter().collect::<BTreeSet<_>>().len(), harvested.len());
        let nr_flushes = vm.host().nr_flushes();
        assert_eq!(vm.reset_dirty_rings(), Ok(harvested.len() as u64));
        assert_eq!(vm.host().nr_flushes() - nr_flushes, 2, "one for each 32 rings");
        assert!((0..16384).all(|page| !is_writable(&vm, page)));
        assert!((0..700).all(|page| !is_writable(&vm, GIB / PAGE_SIZE + page)));
        drop((vcpu, others));
        end(&vm, &[0, 1]);
    }
}

/// A write that finds the entry empty need not flush. So the entry is emptied only when the flush
/// has returned.
#[test]
fn an_entry_is_empty_only_after_the_flush() {
    let (vm, mut vcpu) = logging::<Npt>(Config::default(), 256, 4 * MIB);
    let guest = Guest::new(&vm);
    write(&mut vcpu, 5);
    assert_eq!(harvest(&vm), pages_of(0, [5]));
    let first_index = || vcpu.dirty_ring().unwrap().first_index();
    std::thread::scope(|scope| {
        // The flush waits for this access.
        let reset = guest.during_access(Gpa(5 * PAGE_SIZE), |found| {
            assert!(found.unwrap().writable);
            let reset = scope.spawn(|| vm.reset_dirty_rings());
            while is_writable(&vm, 5) {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(first_index(), 0);
            reset
        });
        assert_eq!(reset.join().unwrap(), Ok(1));
    });
    assert_eq!(first_index(), 1);
}

/// A memslot that does not begin at a multiple of 64 pages, whose pages are in the ring repeatedly.
#[test]
fn pages_with_many_ring_entries_are_protected() {
    const START: u64 = 2 * MIB - 100 * PAGE_SIZE;
    const PAGES: u64 = 700;
    let vm = vm_with::<Npt>(Config::default(), 8192);
    vm.set_user_memory_region(region(3, START, PAGES * PAGE_SIZE, 5, PageSize::Size4K)).unwrap();
    let mut vcpus = [(); 2].map(|()| vm.create_vcpu().unwrap());
    let first = START / PAGE_SIZE;
    for round in 0..4 {
        // It is protected when it begins to log.
        vm.set_user_memory_region(change(3, NO_FLAGS, START, PAGES * PAGE_SIZE)).unwrap();
        vm.set_user_memory_region(change(3, LOG, START, PAGES * PAGE_SIZE)).unwrap();
        for step in 0..PAGES {
            write(&mut vcpus[(step % 2) as usize], first + (step * 89 + round) % PAGES);
        }
    }
    let harvested = harvest(&vm);
    assert!(harvested.len() as u64 >= 4 * PAGES);
    assert_eq!(harvested.iter().collect::<BTreeSet<_>>().len() as u64, PAGES);
    assert_eq!(vm.reset_dirty_rings(), Ok(harvested.len() as u64));
    assert!((0..PAGES).all(|page| !is_writable(&vm, first + page)));
    drop(vcpus);
    end(&vm, &[3]);
}

#[test]
fn no_step_makes_more_pages_writable_than_the_ring_has_room_for() {
    for (nr_entries, level, again) in [(256, Level::L4K, Level::L4K), (1024, Level::L2M, Level::L4K)] {
        let vm = vm_with::<Npt>(Config::default(), nr_entries);
        vm.set_user_memory_region(region(0, 0, 4 * GIB, 1 << 20, PageSize::Size1G)).unwrap();
        vm.set_user_memory_region(region(1, 4 * GIB, GIB, 0, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        let level_of = |gpa| translate(&vm, Gpa(gpa)).map(|found| (found.level, found.writable));
        // Installed; and write access restored, where it was installed for a read while the memslot
        // logged.
        write(&mut vcpu, 0);
        assert_eq!(level_of(0), Some((level, true)));
        vm.set_user_memory_region(change(0, LOG, 0, 4 * GIB)).unwrap();
        assert_eq!(vcpu.handle_fault(Gpa(GIB), Access::Read), RESUME);
        assert_eq!(level_of(GIB), Some((Level::L1G, false)));
        vm.set_user_memory_region(change(0, NO_FLAGS, 0, 4 * GIB)).unwrap();
        assert_eq!(vcpu.handle_fault(Gpa(GIB), Access::Write), RESUME);
        assert_eq!(level_of(GIB), Some((level, true)));
        assert_eq!(harvest(&vm), []);
        // With less than 512 entries left, in a memslot that does not log.
        vm.set_user_memory_region(change(1, LOG, 4 * GIB, GIB)).unwrap();
        let nr_pages = u64::from(nr_entries) - 512.min(u64::from(nr_entries) / 2) + 1;
        for page in 0..nr_pages {
            assert_eq!(vcpu.handle_fault(Gpa(4 * GIB + page * PAGE_SIZE), Access::Write), RESUME);
        }
        for (gpa, access) in [(2 * GIB, Access::Write), (2 * GIB + 4 * MIB, Access::Read)] {
            assert_eq!(vcpu.handle_fault(Gpa(gpa), access), RESUME);
            assert_eq!(level_of(gpa), Some((again, true)));
        }
        drop(vcpu);
        end(&vm, &[0, 1]);
    }
}

/// A memslot begins to log while a fault in it is under way, at each point of the fault. Every page
/// that is writable afterwards is in the ring.
#[test]
fn a_slot_that_begins_to_log_beside_a_fault_reports_its_writable_pages() {
    const SIZE: u64 = 4 * MIB;
    let mut most = 0;
    for setup in ["empty", "huge", "protected"] {
        for nth in 1.. {
            let vm = vm_with::<Hooked>(Config::default(), 1024);
            vm.set_user_memory_region(region(0, 0, SIZE, 512, PageSize::Size2M)).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            match setup {
                "empty" => {}
                "huge" => {
                    vm.set_user_memory_region(change(0, LOG, 0, SIZE)).unwrap();
                    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), RESUME);
                    vm.set_user_memory_region(change(0, NO_FLAGS, 0, SIZE)).unwrap();
                }
                _ => {
                    vm.set_user_memory_region(change(0, LOG, 0, SIZE)).unwrap();
                    (0..512).for_each(|page| write(&mut vcpu, page));
                    harvest(&vm);
                    assert_eq!(vm.reset_dirty_rings(), Ok(512));
                    vm.set_user_memory_region(change(0, NO_FLAGS, 0, SIZE)).unwrap();
                }
            }
            assert!(!is_writable(&vm, 3));
            let begins = Arc::clone(&vm);
            at_look(Level(4), nth, move || begins.set_user_memory_region(change(0, LOG, 0, SIZE)).unwrap());
            write(&mut vcpu, 3);
            let is_over = !was_called();
            let pages: BTreeSet<u64> = harvest(&vm).iter().map(|page| page.page).collect();
            if !is_over {
                most = most.max(pages.len());
                for page in 0..1024 {
                    assert!(!is_writable(&vm, page) || pages.contains(&page), "{setup} {nth}: page {page} is unseen");
                }
                vm.reset_dirty_rings().unwrap();
                assert!((0..1024).all(|page| !is_writable(&vm, page)));
            }
            drop(vcpu);
            end(&vm, &[0]);
            if is_over {
                assert!(nth > 1, "{setup}: the hook is reached");
                break;
            }
        }
    }
    if cfg!(debug_assertions) {
        assert_eq!(most, 512, "a huge page that becomes writable late is pushed whole");
    }
}

#[test]
fn a_prefault_for_writing_pushes_each_page_and_stops_where_the_ring_is_full() {
    let (vm, mut vcpu) = logging::<Npt>(leaf_by_leaf(Locking::None), 256, 8 * MIB);
    // Page by page: there is no room for a whole page-table page.
    let limit = u64::from(256 - DirtyRing::RESERVE);
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Write), Ok(limit * PAGE_SIZE));
    let full = Err(FaultError::DirtyRingFull { gpa: Gpa(limit * PAGE_SIZE) });
    assert_eq!(vcpu.pre_fault_memory(Gpa(limit * PAGE_SIZE), PAGE_SIZE, Access::Write), full);
    assert_eq!(harvest(&vm), pages_of(0, 0..limit));
    assert_eq!(vm.reset_dirty_rings(), Ok(limit));
    // A list, in existing page-table pages.
    let list: Vec<Gpa> = (limit..512).map(|page| Gpa(page * PAGE_SIZE)).collect();
    let done = vcpu.pre_fault_pages(&list, Access::Write).unwrap() as u64;
    assert!((limit..=256).contains(&done), "{done} pages");
    let full = FaultError::DirtyRingFull { gpa: list[done as usize] };
    assert_eq!(vcpu.pre_fault_pages(&list[done as usize..], Access::Write), Err(full));
    assert_eq!(harvest(&vm), pages_of(0, limit..limit + done));
    assert_eq!(vm.reset_dirty_rings(), Ok(done));
    // Reads push nothing, and fill page-table pages.
    assert_eq!(vcpu.pre_fault_memory(Gpa(4 * MIB), 4 * MIB, Access::Read), Ok(4 * MIB));
    assert_eq!(harvest(&vm), []);

    let (vm, mut vcpu) = logging::<Npt>(Config::default(), 1024, 8 * MIB);
    // A page-table page at once, then page by page.
    let done = vcpu.pre_fault_memory(Gpa(0), 8 * MIB, Access::Write).unwrap() / PAGE_SIZE;
    assert!((960..=1024).contains(&done), "{done} pages");
    assert_eq!(harvest(&vm), pages_of(0, 0..done));
    assert!((0..2048).all(|page| is_writable(&vm, page) == (page < done)));
    assert_eq!(vm.reset_dirty_rings(), Ok(done));
    assert!((0..2048).all(|page| !is_writable(&vm, page)));
}

#[test]
fn entries_of_slots_that_changed_do_no_harm() {
    let (vm, mut vcpu) = logging::<Npt>(Config::default(), 1024, 4 * MIB);
    [0, 700, 1023].iter().for_each(|&page| write(&mut vcpu, page));
    // A move pushes nothing.
    vm.set_user_memory_region(change(0, LOG, GIB, 4 * MIB)).unwrap();
    assert_eq!(harvest(&vm), pages_of(0, [0, 700, 1023]));
    let first = GIB / PAGE_SIZE;
    write(&mut vcpu, first + 700);
    write(&mut vcpu, first + 701);
    assert_eq!(vm.reset_dirty_rings(), Ok(3));
    // The page at its new place was made writable with an entry of its own.
    assert!(is_writable(&vm, first + 701));
    assert_eq!(harvest(&vm), pages_of(0, [700, 701]));
    // Another memslot of the same number, smaller than the pages of the entries, at the very end of
    // the space.
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    let last = (1 << 48) - 2 * PAGE_SIZE;
    vm.set_user_memory_region(region(0, last, 2 * PAGE_SIZE, 0, PageSize::Size4K)).unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(last), Access::Write), RESUME);
    assert_eq!(vm.reset_dirty_rings(), Ok(2));
    assert!(translate(&vm, Gpa(last)).unwrap().writable);
    // Deleted.
    vm.set_user_memory_region(change(0, LOG, last, 2 * PAGE_SIZE)).unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(last + PAGE_SIZE), Access::Write), RESUME);
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_eq!(harvest(&vm), pages_of(0, [1]));
    assert_eq!(vm.reset_dirty_rings(), Ok(1));
    drop(vcpu);
    assert_no_table_is_left(&vm);
}

#[test]
fn the_ring_of_a_dropped_vcpu_is_harvested_and_inherited() {
    let (vm, mut vcpu) = logging::<Npt>(Config::default(), 256, 4 * MIB);
    write(&mut vcpu, 3);
    let ring = std::ptr::from_ref(vcpu.dirty_ring().unwrap());
    drop(vcpu);
    assert_eq!(harvest(&vm), pages_of(0, [3]));
    for _ in 0..10 {
        let mut vcpu = vm.create_vcpu().unwrap();
        assert!(std::ptr::eq(ring, vcpu.dirty_ring().unwrap()));
        write(&mut vcpu, 4);
    }
    assert_eq!(vm.dirty_rings().count(), 1);
    assert_eq!(harvest(&vm), pages_of(0, [4]));
    assert_eq!(vm.reset_dirty_rings(), Ok(2));
    assert!(!is_writable(&vm, 3) && !is_writable(&vm, 4));
}

#[test]
fn a_slot_that_begins_to_log_is_protected_whatever_is_initially_set() {
    for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
        let vm = vm_with::<Npt>(Config::default().with_manual_protect(manual_protect), 1024);
        vm.set_user_memory_region(region(0, 0, 4 * MIB, 0, PageSize::Size2M)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        write(&mut vcpu, 5);
        vm.set_user_memory_region(change(0, LOG, 0, 4 * MIB)).unwrap();
        assert!(!is_writable(&vm, 5));
        assert_eq!(harvest(&vm), []);
        write(&mut vcpu, 5);
        assert_eq!(harvest(&vm), pages_of(0, [5]));
    }
}

#[test]
fn options_that_exclude_each_other_are_refused_and_change_nothing() {
    let new = |config| Arc::new(Vm::<TestHost, Npt>::new(TestHost::default(), config).unwrap());
    for config in [
        Config::default().with_dirty_tracking(DirtyTracking::DirtyBit),
        Config::default().with_huge_page_logging(HugePageLogging::MarkWhole),
    ] {
        let vm = new(config);
        assert_eq!(vm.enable_dirty_ring(1024), Err(ConfigError::RingNeedsPageFaults));
        assert!(vm.create_vcpu().unwrap().dirty_ring().is_none());
    }
    let vm = new(Config::default());
    for nr_entries in [0, 1, 64, 128, 255, 257, 1000, 65535, 65537, 131_072, u32::MAX] {
        assert_eq!(vm.enable_dirty_ring(nr_entries), Err(ConfigError::BadRingSize { nr_entries }));
    }
    assert_eq!(vm.reset_dirty_rings(), Err(LogError::NoDirtyRing));
    // A memslot may log before: its bitmap is not used any more.
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 0, PageSize::Size2M)).unwrap();
    vm.set_user_memory_region(change(0, LOG, 0, 4 * MIB)).unwrap();
    assert_eq!(vm.enable_dirty_ring(65536), Ok(()));
    assert_eq!(vm.enable_dirty_ring(65536), Err(ConfigError::DirtyRingEnabled));
    let mut vcpu = vm.create_vcpu().unwrap();
    write(&mut vcpu, 9);
    assert_eq!(vm.enable_dirty_ring(256), Err(ConfigError::DirtyRingEnabled));
    let (mut bitmap, in_use) = ([0; 16], LogError::DirtyRingInUse { slot: 0 });
    assert_eq!(vm.get_dirty_log(0, &mut bitmap), Err(in_use));
    assert_eq!(vm.get_dirty_log_range(0, 0, 64, &mut bitmap), Err(in_use));
    assert_eq!(vm.clear_dirty_log(0, 0, 1024, &[u64::MAX; 16]), Err(in_use));
    assert_eq!(vm.mark_dirty(0, 0, 1), Err(in_use));
    assert_eq!(vm.is_marked_dirty(0, 9), Err(in_use));
    assert_eq!(bitmap, [0; 16]);
    assert_eq!(vm.nr_marked_dirty(), Ok(1));
    assert_eq!(harvest(&vm), pages_of(0, [9]));
    assert_eq!(vm.reset_dirty_rings(), Ok(1));
    assert_eq!(vm.nr_marked_dirty(), Ok(0));

    let vm = new(Config::default());
    let vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vm.enable_dirty_ring(256), Err(ConfigError::VcpusExist));
    assert_eq!(vm.dirty_rings().count(), 0);
    drop(vcpu);
}

#[test]
fn either_enabling_or_a_concurrent_vcpu_comes_first() {
    for _ in 0..200 {
        let vm = Arc::new(Vm::<TestHost, Npt>::new(TestHost::default(), Config::default()).unwrap());
        let (enabled, rings) = std::thread::scope(|scope| {
            let vcpus = [(); 2].map(|()| scope.spawn(|| vm.create_vcpu().unwrap()));
            let enabled = vm.enable_dirty_ring(256);
            // All of them exist until here.
            let vcpus = vcpus.map(|vcpu| vcpu.join().unwrap());
            (enabled, vcpus.map(|vcpu| vcpu.dirty_ring().is_some()))
        });
        assert!(matches!(enabled, Ok(()) | Err(ConfigError::VcpusExist)));
        assert_eq!(rings, [enabled.is_ok(); 2]);
    }
}

each!(a_read_of_a_huge_leaf_needs_no_room, read_needs_no_room);
fn read_needs_no_room<F: Format>(locking: Locking) {
    let config = Config::default().with_locking(locking).with_access_tracking(AccessTracking::Faults);
    let vm = vm_with::<F>(config, 1024);
    vm.set_user_memory_region(region(0, 0, 4 * MIB, 1 << 20, PageSize::Size2M)).unwrap();
    vm.set_user_memory_region(region(1, GIB, 4 * MIB, 1 << 21, PageSize::Size4K)).unwrap();
    vm.set_user_memory_region(change(1, LOG, GIB, 4 * MIB)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), RESUME);
    assert_eq!(vm.stats().pages_2m(), 1);
    vm.age_range(GfnRange::new(Gfn(0), 512)).unwrap();
    // Room for less than 512 pages, and more than the reserve.
    for page in 0..600 {
        assert_eq!(vcpu.handle_fault(Gpa(GIB + page * PAGE_SIZE), Access::Write), RESUME);
    }
    assert_eq!(vcpu.handle_fault(Gpa(0), Access::Read), RESUME);
    assert_eq!(vm.stats().pages_2m(), 1);
    assert_eq!(vm.test_age_range(GfnRange::new(Gfn(0), 512)), Ok(512));
}
