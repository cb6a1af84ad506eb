//! The whole engine under shuttle: vCPUs, a thread that changes memslots and one that harvests.
//! They are stopped at every atomic access in random and in priority schedules. loom tries the
//! memory orders, on small models.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
//!
//! A failure prints a schedule; `shuttle::replay` runs it again.
#![cfg(shuttle)]
#![allow(missing_docs)]

#[path = "shuttle_engine/memory.rs"]
mod memory;
#[path = "support/schedules.rs"]
mod schedules;
#[path = "support/stepped_world.rs"]
mod world;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use memory::{FIRST_PFN, Memory, PAGES};
use schedules::{check, random, random_locking};
use shuttle::thread;
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::error::{LogError, SlotError};
use slat::format::Format;
use slat::{Access, Config, Exit, Gfn, GfnRange, Gpa, MemoryRegionFlags, PAGE_SIZE, PageSize};
use world::{
    Guest, TestVm, Tiny, assert_no_table_is_left, backing, backing_with_read_only_reads, new_vm, new_vm_with, region,
    walk,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

fn random_access() -> Access {
    [Access::Write, Access::Read][random(2) as usize]
}

/// Where the memslot was in one of its versions, and its first frame.
#[derive(Clone, Copy, Debug)]
struct Version {
    slot: Option<(u64, u64, u64)>,
}

impl Version {
    fn pfn(&self, gfn: u64) -> Option<u64> {
        let (start, nr_pages, first_pfn) = self.slot?;
        let page = gfn.checked_sub(start)?;
        (page < nr_pages).then_some(first_pfn + page)
    }
}

/// The versions that guests may access: the last finished one and all later. Never locked across a
/// step.
#[derive(Default)]
struct Versions {
    all: Mutex<Vec<Version>>,
    made: AtomicU64,
}

impl Versions {
    fn begin(&self, version: Version) {
        self.all.lock().unwrap().push(version);
    }

    fn finish(&self) {
        self.made.store(self.all.lock().unwrap().len() as u64 - 1, Ordering::SeqCst);
    }

    fn any_since(&self, from: u64, allowed: impl Fn(&Version) -> bool) -> bool {
        self.all.lock().unwrap()[from as usize..].iter().any(allowed)
    }
}

const SLOT: u32 = 5;
/// Every block of 2 MiB uses its frames 0 to 3 only (see `Tiny`).
const BLOCK: u64 = 512;

/// Changes memslot 5 a few times. Small memslots of two pages move within block 0; large ones are a
/// block.
fn change_slot<F: Format>(vm: &TestVm<F>, versions: &Versions, large: bool) {
    let nr_pages = if large { BLOCK } else { 2 };
    let starts = if large { [0, BLOCK, BLOCK] } else { [0, 1, 1] };
    // Pages of other threads are not checked.
    let is_another = |gfn| !large && (gfn == STABLE || gfn == NEIGHBOUR);
    let (mut now, mut flags) = (Version { slot: None }, NO_FLAGS);
    for life in 1..=4 {
        let Some((start, _, first_pfn)) = now.slot else {
            // Congruent to the block, so that it can be one leaf.
            let (start, first_pfn) = (starts[random(3) as usize], life << 20);
            let size = [PageSize::Size4K, PageSize::Size2M][random(2) as usize];
            flags = [NO_FLAGS, LOG][random(2) as usize];
            now = Version { slot: Some((start, nr_pages, first_pfn)) };
            versions.begin(now);
            let new = if random(2) == 0 { backing } else { backing_with_read_only_reads };
            vm.set_user_memory_region(region(SLOT, flags, start, nr_pages, Some(new(first_pfn, size)))).unwrap();
            versions.finish();
            continue;
        };
        match random(5) {
            0 | 1 => {
                now = Version { slot: None };
                versions.begin(now);
                vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
            }
            2 | 3 => {
                let start = starts[random(3) as usize];
                now = Version { slot: Some((start, nr_pages, first_pfn)) };
                versions.begin(now);
                vm.set_user_memory_region(region(SLOT, flags, start, nr_pages, None)).unwrap();
            }
            _ => {
                flags ^= LOG;
                versions.begin(now);
                vm.set_user_memory_region(region(SLOT, flags, start, nr_pages, None)).unwrap();
            }
        }
        versions.finish();
        // Nothing of the old version is left, and nothing is mapped again.
        for gfn in (0..4).chain(BLOCK..BLOCK + 4).filter(|gfn| !is_another(*gfn)) {
            let found = walk(vm, gfn).map(|(pfn, _)| pfn);
            assert!(found.is_none() || found == now.pfn(gfn), "{found:x?} at {gfn:#x} in {now:x?}");
        }
        if flags.contains(LOG) && now.slot.is_some() {
            vm.get_dirty_log(SLOT, &mut [0; 8]).unwrap();
        }
    }
    if now.slot.is_some() {
        versions.begin(Version { slot: None });
        vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
        versions.finish();
    }
}

/// A page of a memslot that comes and goes beside the small one, in the same page-table page.
const NEIGHBOUR: u64 = 3;

/// Makes and deletes the neighbour's memslot, and accesses its page in between.
fn come_and_go<F: Format>(mut guest: Guest<F>) {
    for life in 1..=3 {
        let pfn = 0xe_0000 + life;
        let new = backing(pfn, PageSize::Size4K);
        guest.vm.set_user_memory_region(region(6, NO_FLAGS, NEIGHBOUR, 1, Some(new))).unwrap();
        for _ in 0..2 {
            let result = guest.access(NEIGHBOUR, Access::Write, |found| assert_eq!(found, pfn));
            assert!(!matches!(result, Err(Some(_))), "an exit from a slot that is there");
        }
        guest.vm.set_user_memory_region(region(6, NO_FLAGS, 0, 0, None)).unwrap();
        assert_eq!(walk(&guest.vm, NEIGHBOUR), None);
    }
}

/// A page of a memslot that never changes, in the tests with small memslots.
const STABLE: u64 = BLOCK + 3;
const STABLE_PFN: u64 = 0xf_0000;

fn live_in_changing_memory<F: Format>(mut guest: Guest<F>, versions: &Versions, large: bool) {
    for _ in 0..5 {
        let gfn = if large { random(4) + random(2) * BLOCK } else { random(NEIGHBOUR) };
        let access = random_access();
        if !large && random(4) == 0 {
            let result = guest.access(STABLE, access, |pfn| assert_eq!(pfn, STABLE_PFN));
            assert!(!matches!(result, Err(Some(_))), "an exit from a slot that never changes");
            continue;
        }
        let from = versions.made.load(Ordering::SeqCst);
        let result = guest.access(gfn, access, |pfn| {
            // Read now, not when the access began: a change returns only when no access uses what
            // it has zapped.
            let from = versions.made.load(Ordering::SeqCst);
            let allowed = versions.any_since(from, |version| version.pfn(gfn) == Some(pfn));
            assert!(allowed, "frame {pfn:#x} at {gfn:#x} is of no version since {from}: {:x?}", versions.all.lock());
        });
        if let Err(Some(Exit::Mmio { .. })) = result {
            let allowed = versions.any_since(from, |version| version.pfn(gfn).is_none());
            assert!(allowed, "no memory at {gfn:#x}, and yet in all versions since {from}");
        }
    }
}

fn changing_slot<F: Format>() {
    const GUESTS: usize = 3;
    let (vm, versions) = (new_vm::<F>(random_locking(), GUESTS + 1), Arc::new(Versions::default()));
    versions.begin(Version { slot: None });
    versions.finish();
    let large = random(2) == 0;
    if !large {
        vm.set_user_memory_region(region(1, NO_FLAGS, STABLE, 1, Some(backing(STABLE_PFN, PageSize::Size4K)))).unwrap();
    }
    let guests = (0..GUESTS).map(|index| {
        let (guest, versions) = (Guest::new(&vm, index), Arc::clone(&versions));
        thread::spawn(move || live_in_changing_memory(guest, &versions, large))
    });
    let mut guests = guests.collect::<Vec<_>>();
    if !large && random(2) == 0 {
        let guest = Guest::new(&vm, GUESTS);
        guests.push(thread::spawn(move || come_and_go(guest)));
    } else if random(2) == 0 {
        // Another thread frees what the changes have retired.
        let vm = Arc::clone(&vm);
        guests.push(thread::spawn(move || (0..4).for_each(|_| vm.reclaim())));
    }
    change_slot(&vm, &versions, large);
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    if !large {
        vm.set_user_memory_region(region(1, NO_FLAGS, 0, 0, None)).unwrap();
    }
    assert_no_table_is_left(&vm);
}

#[test]
fn guests_of_a_changing_slot_never_access_an_old_version() {
    check(changing_slot::<Tiny<2>>);
}

#[test]
fn guests_of_a_changing_slot_never_access_an_old_version_with_three_levels() {
    check(changing_slot::<Tiny<3>>);
}

fn same_page() {
    const GUESTS: usize = 3;
    let vm = new_vm::<Tiny<3>>(random_locking(), GUESTS);
    let flags = [NO_FLAGS, LOG][random(2) as usize];
    let size = [PageSize::Size4K, PageSize::Size2M][random(2) as usize];
    vm.set_user_memory_region(region(0, flags, 0, BLOCK, Some(backing(1 << 20, size)))).unwrap();
    let guests = (0..GUESTS).map(|index| {
        let mut guest = Guest::new(&vm, index);
        thread::spawn(move || {
            let check = |pfn| assert_eq!(pfn, (1 << 20) + 2);
            let access = random_access();
            while let Err(exit) = guest.access(2, access, check) {
                assert_eq!(exit, None);
            }
        })
    });
    guests.collect::<Vec<_>>().into_iter().for_each(|guest| guest.join().unwrap());
    let stats = vm.stats();
    assert_eq!(stats.installed_4k + stats.installed_2m, 1, "more than one fault has won");
    vm.set_user_memory_region(region(0, NO_FLAGS, 0, 0, None)).unwrap();
    assert_no_table_is_left(&vm);
}

#[test]
fn concurrent_faults_on_one_page_install_once_and_all_succeed() {
    check(same_page);
}

/// Any configuration of a dirty log.
fn random_config() -> Config {
    let lazy = DirtyTracking::WriteProtect;
    let leaf_by_leaf = DirtyTracking::WriteProtectLeaves;
    let trackings = [lazy, lazy, leaf_by_leaf, DirtyTracking::DirtyBit, DirtyTracking::PageModificationLog];
    let manual = [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet];
    Config::default()
        .with_locking(random_locking())
        .with_dirty_tracking(trackings[random(5) as usize])
        .with_manual_protect(manual[random(3) as usize])
        .with_huge_page_logging([HugePageLogging::Split, HugePageLogging::MarkWhole][random(2) as usize])
}

/// What happens to the memslot while guests write and a host harvests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    /// A second harvester.
    Harvest,
    /// The memslot moves.
    Move,
    /// The memslot, a block, grows and shrinks.
    Resize,
    /// Logging is turned off and on, by the harvester itself.
    Toggle,
    /// Pages are invalidated, aged and queried.
    Invalidate,
    /// Pages are prefaulted.
    Prefault,
}

/// Does step number `turn` of `meanwhile`, on another thread.
fn disturb(meanwhile: Meanwhile, turn: u64, vm: &TestVm<Tiny<2>>, memory: &Memory) {
    let page = memory.pages()[random(PAGES as u64) as usize];
    match meanwhile {
        Meanwhile::Nothing | Meanwhile::Toggle => {}
        Meanwhile::Harvest if random(2) == 0 => {
            memory.harvest(vm).unwrap();
        }
        Meanwhile::Harvest => memory.harvest_part(vm),
        Meanwhile::Move => {
            let to = if memory.nr_pages == BLOCK { BLOCK } else { 1 };
            vm.set_user_memory_region(region(SLOT, LOG, to * (1 - turn % 2), memory.nr_pages, None)).unwrap();
        }
        Meanwhile::Resize => {
            let nr_pages = memory.nr_pages + [1, 64, 0][turn as usize % 3];
            vm.set_user_memory_region(region(SLOT, LOG, 0, nr_pages, None)).unwrap();
        }
        Meanwhile::Invalidate => match random(4) {
            0 => drop(vm.invalidate_range(GfnRange::new(Gfn(page / BLOCK * BLOCK), BLOCK)).unwrap()),
            1 => drop(vm.invalidate_range(GfnRange::new(Gfn(page), 1)).unwrap()),
            2 => assert!(vm.age_range(GfnRange::new(Gfn(page), 1)).unwrap() <= 1),
            _ => {
                let _ = vm.read_tables().unwrap().cursor().query(Gpa(page * PAGE_SIZE));
            }
        },
        Meanwhile::Prefault => {
            let mut vcpu = vm.create_vcpu().unwrap();
            if random(2) == 0 {
                vcpu.pre_fault_memory(Gpa(page * PAGE_SIZE), PAGE_SIZE, random_access()).unwrap();
            } else {
                let pages = memory.pages().map(|page| Gpa(page * PAGE_SIZE));
                vcpu.pre_fault_pages(&pages, random_access()).unwrap();
            }
        }
    }
}

fn dirty_log(meanwhile: Meanwhile, nr_pages: u64) {
    const GUESTS: usize = 2;
    let config = random_config();
    // One more: the disturbing thread marks pages as a fault does.
    let (vm, memory) = (new_vm_with::<Tiny<2>>(config, GUESTS + 1), Arc::new(Memory::new(config, nr_pages)));
    let size = [PageSize::Size4K, PageSize::Size2M][random(2) as usize];
    let flags = if random(2) == 0 { LOG } else { NO_FLAGS };
    vm.set_user_memory_region(region(SLOT, flags, 0, nr_pages, Some(backing(FIRST_PFN, size)))).unwrap();
    let mut guests = Vec::new();
    for index in 0..GUESTS {
        let (mut guest, memory) = (Guest::new(&vm, index), Arc::clone(&memory));
        guests.push(thread::spawn(move || {
            let page = |turn| {
                // Where the memslot is moved to.
                let moved = if meanwhile == Meanwhile::Move && nr_pages == BLOCK { turn % 2 * BLOCK } else { 0 };
                memory.pages()[random(PAGES as u64) as usize] + moved
            };
            for turn in 0..6_u64 {
                let _ = guest.access(page(turn), random_access(), |_| ());
                let page = page(turn);
                let _ = guest.access(page, Access::Write, |pfn| memory.write(pfn));
                let _ = guest.access(page, Access::Write, |pfn| memory.write(pfn));
            }
        }));
    }
    if flags != LOG {
        vm.set_user_memory_region(region(SLOT, LOG, 0, nr_pages, None)).unwrap();
        // Pages written before logging begins are copied.
        memory.copy_all();
    }
    if !matches!(meanwhile, Meanwhile::Nothing | Meanwhile::Toggle) {
        let (vm, memory) = (Arc::clone(&vm), Arc::clone(&memory));
        guests.push(thread::spawn(move || {
            (0..3).for_each(|turn| vm.host().during_fault(GUESTS, || disturb(meanwhile, turn, &vm, &memory)));
        }));
    }
    for _ in 0..2 {
        if meanwhile == Meanwhile::Toggle {
            vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, nr_pages, None)).unwrap();
            vm.set_user_memory_region(region(SLOT, LOG, 0, nr_pages, None)).unwrap();
            memory.copy_all();
        }
        memory.harvest(&vm).unwrap();
        if random(4) == 0 {
            memory.harvest_part(&vm);
        }
        if meanwhile != Meanwhile::Harvest && random(2) == 0 {
            // One of two harvests reports a write, if the call that marks its page has returned
            // before the first.
            let before = memory.contents_now();
            vm.host().wait_for_faults();
            memory.harvest(&vm).unwrap();
            memory.assert_copied(before);
        }
    }
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    memory.assert_one_harvest_is_exact(&vm);
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
    assert_no_table_is_left(&vm);
}

/// Pages of a memslot: so few that no directory entry is protected, a block, or two.
fn random_size() -> u64 {
    [PAGES as u64, BLOCK, BLOCK, 2 * BLOCK][random(4) as usize]
}

#[test]
fn no_write_is_lost_beside_a_harvest() {
    check(|| dirty_log(Meanwhile::Nothing, random_size()));
}

#[test]
fn no_write_is_lost_between_two_harvests() {
    check(|| dirty_log(Meanwhile::Harvest, random_size()));
}

#[test]
fn no_write_is_lost_when_logging_is_turned_off_and_on() {
    check(|| dirty_log(Meanwhile::Toggle, random_size()));
}

#[test]
fn no_write_is_lost_when_the_slot_moves() {
    check(|| dirty_log(Meanwhile::Move, PAGES as u64));
}

#[test]
fn no_write_is_lost_when_the_slot_moves_to_another_block() {
    check(|| dirty_log(Meanwhile::Move, BLOCK));
}

#[test]
fn no_write_is_lost_when_the_slot_is_resized() {
    check(|| dirty_log(Meanwhile::Resize, BLOCK));
}

#[test]
fn no_write_is_lost_when_pages_are_invalidated() {
    check(|| dirty_log(Meanwhile::Invalidate, random_size()));
}

#[test]
fn no_write_is_lost_when_pages_are_prefaulted() {
    check(|| dirty_log(Meanwhile::Prefault, random_size()));
}

/// The most protections of directory entries in a schedule; and turns without one.
static MOST_PROTECTED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// A directory entry is protected so often that its generations wrap, beside writes that push down.
/// Each round marks pages that no guest uses, so that the engine protects the directory entry.
fn protected_repeatedly() {
    const TURNS: u64 = 10;
    let config = Config::default();
    let (vm, memory) = (new_vm_with::<Tiny<2>>(config, 2), Arc::new(Memory::new(config, BLOCK)));
    let slot = backing(FIRST_PFN, PageSize::Size4K);
    vm.set_user_memory_region(region(SLOT, LOG, 0, BLOCK, Some(slot))).unwrap();
    let guests = [0, 1].map(|index| {
        let (mut guest, memory) = (Guest::new(&vm, index), Arc::clone(&memory));
        // So that there is a page-table page. Another page may be mapped when its directory entry
        // is protected.
        if index == 0 || random(2) == 0 {
            while guest.access(index as u64, Access::Write, |pfn| memory.write(pfn)).is_err() {}
        }
        thread::spawn(move || {
            for _ in 0..4 {
                let _ = guest.access(index as u64, Access::Write, |pfn| memory.write(pfn));
            }
        })
    });
    for _ in 0..TURNS {
        vm.mark_dirty(SLOT, 2, 2).unwrap();
        memory.harvest(&vm).unwrap();
    }
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    let nr_protected = vm.stats().tables_protected;
    MOST_PROTECTED.fetch_max(nr_protected, Ordering::Relaxed);
    REFUSED.fetch_add(TURNS - nr_protected, Ordering::Relaxed);
    memory.assert_one_harvest_is_exact(&vm);
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
    assert_no_table_is_left(&vm);
}

#[test]
fn no_write_is_lost_when_generations_wrap() {
    check(protected_repeatedly);
    assert!(MOST_PROTECTED.load(Ordering::Relaxed) > 8, "no directory entry went through all generations");
    assert_ne!(REFUSED.load(Ordering::Relaxed), 0, "no turn was refused");
}

/// A memslot is made and deleted repeatedly, while another thread changes it when it can.
fn changed_by_two() {
    let vm = new_vm::<Tiny<2>>(Locking::None, 0);
    let other = {
        let vm = Arc::clone(&vm);
        thread::spawn(move || {
            for flags in [LOG, NO_FLAGS, LOG] {
                let result = vm.set_user_memory_region(region(SLOT, flags, 0, 2, None));
                let gone = matches!(
                    result,
                    Err(SlotError::NoSuchSlot { .. } | SlotError::SlotBusy { .. } | SlotError::NoBacking { .. })
                );
                assert!(result.is_ok() || gone, "{result:?}");
            }
        })
    };
    for _ in 0..2 {
        vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 2, Some(backing(FIRST_PFN, PageSize::Size4K)))).unwrap();
        while let Err(error) = vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)) {
            assert_eq!(error, SlotError::SlotBusy { slot: SLOT });
            thread::yield_now();
        }
    }
    other.join().unwrap();
    assert_eq!(
        vm.get_dirty_log(SLOT, &mut [0]),
        Err(LogError::NoSuchSlot { slot: SLOT }),
        "a deleted memslot exists again"
    );
    assert_no_table_is_left(&vm);
}

#[test]
fn one_of_two_changes_of_a_slot_is_refused() {
    check(changed_by_two);
}

/// A memslot is deleted beside a single fault. Nothing of it is mapped afterwards. Few steps, so
/// that a schedule that strikes between the right two is likely.
fn deleted_beside_a_fault() {
    let vm = new_vm::<Tiny<2>>(Locking::None, 1);
    let slot = backing(FIRST_PFN, PageSize::Size4K);
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 2, Some(slot))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let guest = thread::spawn(move || {
        let _ = guest.access(0, Access::Read, |_| ());
    });
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
    guest.join().unwrap();
    assert_eq!(walk(&vm, 0), None);
    assert_no_table_is_left(&vm);
}

#[test]
fn nothing_is_mapped_from_a_deleted_slot() {
    check(deleted_beside_a_fault);
}

/// As above, with a memslot that loses the page of the fault, and keeps another.
fn shrunk_beside_a_fault() {
    let vm = new_vm::<Tiny<2>>(Locking::None, 1);
    let slot = backing(FIRST_PFN, PageSize::Size4K);
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 2, Some(slot))).unwrap();
    let mut guest = Guest::new(&vm, 0);
    let guest = thread::spawn(move || {
        let _ = guest.access(1, Access::Read, |_| ());
        let _ = guest.access(0, Access::Read, |_| ());
    });
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 1, None)).unwrap();
    guest.join().unwrap();
    assert_eq!(walk(&vm, 1), None);
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
    assert_no_table_is_left(&vm);
}

#[test]
fn nothing_is_mapped_where_a_slot_has_shrunk() {
    check(shrunk_beside_a_fault);
}
