//! The whole engine under shuttle: vCPUs, a thread that changes slots and one that harvests, stopped at every atomic
//! access in random and in priority schedules. Memory orders are not tried here; loom does that for small models.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
//!
//! A failure prints a schedule; `shuttle::replay` runs it again.
#![cfg(shuttle)]
#![allow(missing_docs)]

#[path = "support/stepped_world.rs"]
mod world;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Runner, thread};
use slat::{Access, Error, Exit, Format, Locking, MemoryRegionFlags, PageSize};
use world::{Guest, TestVm, Tiny, assert_no_table_is_left, backing, backing_that_is_asked_again, new_vm, region, walk};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// Schedules of each kind for each test; `SHUTTLE_SCHEDULES` in the environment sets another number.
const SCHEDULES: usize = 10_000;
/// Switches at which a priority schedule may strike.
const PCT_DEPTH: usize = 4;

/// Runs `scenario` in many schedules.
fn check(scenario: fn()) {
    let schedules = std::env::var("SHUTTLE_SCHEDULES").map_or(SCHEDULES, |number| number.parse().unwrap());
    let mut config = shuttle::Config::new();
    // The statistics of a record are built on the stack.
    config.stack_size = 1 << 18;
    config.max_steps = shuttle::MaxSteps::FailAfter(2_000_000);
    Runner::new(RandomScheduler::new(schedules), config.clone()).run(scenario);
    Runner::new(PctScheduler::new(PCT_DEPTH, schedules), config).run(scenario);
}

fn random(below: u64) -> u64 {
    thread_rng().gen_range(0..below)
}

fn random_locking() -> Locking {
    // Mostly without: that is what is to be tried.
    [Locking::None, Locking::None, Locking::None, Locking::Shared, Locking::Exclusive][random(5) as usize]
}

fn random_access() -> Access {
    [Access::Write, Access::Read][random(2) as usize]
}

/// Where the slot was in each version of it, and its first frame.
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

/// The versions that guests may see: from the last one made on. Never locked across a step.
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
/// Every 2 MiB block has frames 0 to 3 only (see `Tiny`).
const BLOCK: u64 = 512;

/// Changes slot 5 a few times. Small slots of two pages move about in block 0, large ones are a block.
fn change_slot<F: Format>(vm: &TestVm<F>, versions: &Versions, large: bool) {
    let nr_pages = if large { BLOCK } else { 2 };
    let starts = if large { [0, BLOCK, BLOCK] } else { [0, 1, 1] };
    // What others do with theirs is not looked at.
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
            let new = if random(2) == 0 { backing } else { backing_that_is_asked_again };
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
        // Nothing of before is left, and nothing comes back.
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

/// A page of a slot that comes and goes beside the small slot, in the same table.
const NEIGHBOUR: u64 = 3;

/// Makes and deletes the neighbour's slot, and looks at its page in between.
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

/// A page of a slot that never changes, where slots are small.
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
            // Made by now, not when the access began: a change returns when no access uses what it took away.
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
        // Somebody else frees what the changes have retired.
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
fn guests_of_a_changing_slot_never_see_what_it_was() {
    check(changing_slot::<Tiny<2>>);
}

#[test]
fn guests_of_a_changing_slot_never_see_what_it_was_with_three_levels() {
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
fn of_faults_on_one_page_one_wins_and_none_fails() {
    check(same_page);
}

/// What is in the memory of a slot of four pages, and what a host has copied of it.
#[derive(Default)]
struct Memory {
    contents: [AtomicU64; PAGES],
    copy: [AtomicU64; PAGES],
}

const PAGES: usize = 3;
const FIRST_PFN: u64 = 1 << 20;

impl Memory {
    fn write(&self, pfn: u64) {
        self.contents[(pfn - FIRST_PFN) as usize].fetch_add(1, Ordering::SeqCst);
    }

    fn contents_now(&self) -> [u64; PAGES] {
        std::array::from_fn(|page| self.contents[page].load(Ordering::SeqCst))
    }

    /// Harvests the slot, and copies what it says.
    fn harvest<F: Format>(&self, vm: &TestVm<F>) -> Result<u64, Error> {
        let mut bitmap = [0; 8];
        let nr_pages = vm.get_dirty_log(SLOT, &mut bitmap)?;
        for page in (0..PAGES).filter(|page| bitmap[0] >> page & 1 == 1) {
            self.copy[page].fetch_max(self.contents[page].load(Ordering::SeqCst), Ordering::SeqCst);
        }
        Ok(nr_pages)
    }

    fn assert_copied(&self, counts: [u64; PAGES]) {
        for (page, &count) in counts.iter().enumerate() {
            let copied = self.copy[page].load(Ordering::SeqCst);
            assert!(copied >= count, "page {page}: {count} writes long ago, {copied} copied");
        }
    }
}

/// What happens to the slot while guests write and a host harvests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meanwhile {
    Nothing,
    /// A second harvester.
    Harvest,
    /// The slot moves.
    Move,
    /// Logging is turned off and on, by the harvester itself.
    Toggle,
}

fn dirty_log(meanwhile: Meanwhile, nr_pages: u64) {
    const GUESTS: usize = 2;
    // One more: the call that moves the slot marks pages as a fault does.
    let (vm, memory) = (new_vm::<Tiny<2>>(random_locking(), GUESTS + 1), Arc::new(Memory::default()));
    let size = [PageSize::Size4K, PageSize::Size2M][random(2) as usize];
    let flags = if random(2) == 0 { LOG } else { NO_FLAGS };
    vm.set_user_memory_region(region(SLOT, flags, 0, nr_pages, Some(backing(FIRST_PFN, size)))).unwrap();
    let mut guests = Vec::new();
    for index in 0..GUESTS {
        let (mut guest, memory) = (Guest::new(&vm, index), Arc::clone(&memory));
        guests.push(thread::spawn(move || {
            for _ in 0..6 {
                let _ = guest.access(random(PAGES as u64), random_access(), |_| ());
                let page = random(PAGES as u64);
                let _ = guest.access(page, Access::Write, |pfn| memory.write(pfn));
                let _ = guest.access(page, Access::Write, |pfn| memory.write(pfn));
            }
        }));
    }
    if flags != LOG {
        vm.set_user_memory_region(region(SLOT, LOG, 0, nr_pages, None)).unwrap();
        // What was written before is copied whole.
        for page in 0..PAGES {
            memory.copy[page].fetch_max(memory.contents_now()[page], Ordering::SeqCst);
        }
    }
    if meanwhile == Meanwhile::Harvest || meanwhile == Meanwhile::Move {
        let (vm, memory) = (Arc::clone(&vm), Arc::clone(&memory));
        guests.push(thread::spawn(move || {
            for turn in 0..3 {
                if meanwhile == Meanwhile::Harvest {
                    memory.harvest(&vm).unwrap();
                } else {
                    let start = if nr_pages == BLOCK { [BLOCK, 0][turn % 2] } else { [1, 0][turn % 2] };
                    let move_it = || vm.set_user_memory_region(region(SLOT, LOG, start, nr_pages, None)).unwrap();
                    vm.host().during_fault(GUESTS, move_it);
                }
            }
        }));
    }
    for _ in 0..2 {
        if meanwhile == Meanwhile::Toggle {
            vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, nr_pages, None)).unwrap();
            vm.set_user_memory_region(region(SLOT, LOG, 0, nr_pages, None)).unwrap();
            for page in 0..PAGES {
                memory.copy[page].fetch_max(memory.contents_now()[page], Ordering::SeqCst);
            }
        }
        memory.harvest(&vm).unwrap();
        if meanwhile != Meanwhile::Harvest && random(2) == 0 {
            // What was written before one harvest is in that or in the next, if the call that was to mark the page has
            // returned by then.
            let before = memory.contents_now();
            vm.host().wait_for_faults();
            memory.harvest(&vm).unwrap();
            memory.assert_copied(before);
        }
    }
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    // All have stopped: one harvest brings all, and leaves nothing that could be written unseen.
    memory.harvest(&vm).unwrap();
    memory.assert_copied(memory.contents_now());
    for gfn in (0..4).chain(BLOCK..BLOCK + 4) {
        let found = walk(&vm, gfn);
        assert!(found.is_none_or(|(_, writable)| !writable), "frame {gfn:#x} is writable, and was not reported");
    }
    assert_eq!(memory.harvest(&vm), Ok(0));
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
    assert_no_table_is_left(&vm);
}

#[test]
fn no_write_is_lost_beside_a_harvest() {
    check(|| dirty_log(Meanwhile::Nothing, if random(2) == 0 { BLOCK } else { PAGES as u64 }));
}

#[test]
fn no_write_is_lost_between_two_harvests() {
    check(|| dirty_log(Meanwhile::Harvest, if random(2) == 0 { BLOCK } else { PAGES as u64 }));
}

#[test]
fn no_write_is_lost_when_logging_is_turned_off_and_on() {
    check(|| dirty_log(Meanwhile::Toggle, if random(2) == 0 { BLOCK } else { PAGES as u64 }));
}

#[test]
fn no_write_is_lost_when_the_slot_moves() {
    check(|| dirty_log(Meanwhile::Move, PAGES as u64));
}

#[test]
fn no_write_is_lost_when_the_slot_moves_to_another_block() {
    check(|| dirty_log(Meanwhile::Move, BLOCK));
}

/// A slot is made and deleted again and again, while somebody else changes it if he can.
fn changed_by_two() {
    let vm = new_vm::<Tiny<2>>(Locking::None, 0);
    let other = {
        let vm = Arc::clone(&vm);
        thread::spawn(move || {
            for flags in [LOG, NO_FLAGS, LOG] {
                let result = vm.set_user_memory_region(region(SLOT, flags, 0, 2, None));
                let gone =
                    matches!(result, Err(Error::NoSuchSlot { .. } | Error::SlotBusy { .. } | Error::NoBacking { .. }));
                assert!(result.is_ok() || gone, "{result:?}");
            }
        })
    };
    for _ in 0..2 {
        vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 2, Some(backing(FIRST_PFN, PageSize::Size4K)))).unwrap();
        while let Err(error) = vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)) {
            assert_eq!(error, Error::SlotBusy { slot: SLOT });
            thread::yield_now();
        }
    }
    other.join().unwrap();
    assert_eq!(vm.get_dirty_log(SLOT, &mut [0]), Err(Error::NoSuchSlot { slot: SLOT }), "a deleted slot has come back");
    assert_no_table_is_left(&vm);
}

#[test]
fn of_two_that_change_a_slot_one_has_it() {
    check(changed_by_two);
}

/// A slot is deleted beside a single fault: nothing of it is mapped afterwards. Few steps, so that a schedule that strikes
/// between the right two is likely.
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
fn nothing_is_mapped_of_a_slot_that_was_deleted() {
    check(deleted_beside_a_fault);
}
