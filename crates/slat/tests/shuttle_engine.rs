//! The whole engine under shuttle: vCPUs, a thread that changes slots and one that harvests, stopped at every atomic
//! access in random and in priority schedules. Memory orders are not tried here; loom does that for small models.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
//!
//! A failure prints a schedule; `shuttle::replay` runs it again.
#![cfg(shuttle)]
#![allow(missing_docs)]

#[path = "support/schedules.rs"]
mod schedules;
#[path = "support/stepped_world.rs"]
mod world;

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use schedules::{check, random, random_locking};
use shuttle::thread;
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::format::Format;
use slat::{Access, Config, Error, Exit, Gfn, GfnRange, Gpa, MemoryRegionFlags, PAGE_SIZE, PageSize};
use world::{
    Guest, TestVm, Tiny, assert_no_table_is_left, backing, backing_that_is_asked_again, find, new_vm, new_vm_with,
    region, walk,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

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

/// Pages that are used of a slot, which has more: see [`Memory::pages`].
const PAGES: usize = 3;
const FIRST_PFN: u64 = 1 << 20;

/// What is in the memory of a slot, and what a host has copied of it.
struct Memory {
    config: Config,
    /// Pages of the slot.
    nr_pages: u64,
    contents: [AtomicU64; PAGES],
    copy: [AtomicU64; PAGES],
}

/// Words of the largest log.
const LOG_WORDS: usize = 2 * BLOCK as usize / 64;

impl Memory {
    fn new(config: Config, nr_pages: u64) -> Memory {
        Memory { config, nr_pages, contents: Default::default(), copy: Default::default() }
    }

    /// The pages that are used: if the slot has two blocks, one in the second.
    fn pages(&self) -> [u64; PAGES] {
        if self.nr_pages > BLOCK { [0, 1, BLOCK] } else { [0, 1, 2] }
    }

    fn write(&self, pfn: u64) {
        let page = self.pages().iter().position(|page| FIRST_PFN + page == pfn);
        self.contents[page.expect("guests use these pages only")].fetch_add(1, Ordering::SeqCst);
    }

    fn contents_now(&self) -> [u64; PAGES] {
        std::array::from_fn(|page| self.contents[page].load(Ordering::SeqCst))
    }

    fn copy_all(&self) {
        self.copy_pages(0, &[u64::MAX; LOG_WORDS]);
    }

    /// Copies the pages of `bitmap`, which begins with page `first`.
    fn copy_pages(&self, first: u64, bitmap: &[u64]) {
        for (index, page) in self.pages().into_iter().enumerate() {
            let word = page.checked_sub(first).and_then(|bit| bitmap.get(bit as usize / 64));
            if word.is_some_and(|word| word >> (page % 64) & 1 == 1) {
                self.copy[index].fetch_max(self.contents[index].load(Ordering::SeqCst), Ordering::SeqCst);
            }
        }
    }

    /// Harvests the slot, and copies what it says.
    fn harvest<F: Format>(&self, vm: &TestVm<F>) -> Result<u64, Error> {
        let mut bitmap = [0; LOG_WORDS];
        let nr_pages = vm.get_dirty_log(SLOT, &mut bitmap)?;
        if self.config.manual_protect != ManualProtect::Disabled {
            vm.clear_dirty_log(SLOT, 0, self.nr_pages, &bitmap)?;
        }
        self.copy_pages(0, &bitmap);
        Ok(nr_pages)
    }

    /// Harvests a word of the log, or some pages of it whatever it says, and copies these.
    fn harvest_part<F: Format>(&self, vm: &TestVm<F>) {
        let first = self.pages()[random(PAGES as u64) as usize] / 64 * 64;
        let nr_pages = (self.nr_pages - first).min(64);
        let mut bitmap = [1 + random(7)];
        if random(2) == 0 {
            vm.get_dirty_log_range(SLOT, first, nr_pages, &mut bitmap).unwrap();
            if self.config.manual_protect != ManualProtect::Disabled {
                vm.clear_dirty_log(SLOT, first, nr_pages, &bitmap).unwrap();
            }
        } else {
            vm.clear_dirty_log(SLOT, first, nr_pages, &bitmap).unwrap();
        }
        self.copy_pages(first, &bitmap);
    }

    fn assert_copied(&self, counts: [u64; PAGES]) {
        for (page, &count) in counts.iter().enumerate() {
            let copied = self.copy[page].load(Ordering::SeqCst);
            assert!(copied >= count, "page {page}: {count} writes long ago, {copied} copied; {:?}", self.config);
        }
    }

    /// All have stopped: one harvest brings all, and leaves nothing that could be written unseen.
    fn assert_one_harvest_is_exact<F: Format>(&self, vm: &TestVm<F>) {
        self.harvest(vm).unwrap();
        self.assert_copied(self.contents_now());
        for gfn in (0..4).chain(BLOCK..BLOCK + 4) {
            let is_unseen = find(vm, gfn).is_some_and(|it| it.is_written_unseen::<F>(self.config.dirty_tracking));
            assert!(!is_unseen, "frame {gfn:#x} can be written, and was not reported; {:?}", self.config);
        }
        assert_eq!(self.harvest(vm), Ok(0));
    }
}

/// Any way to keep a dirty log.
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
    /// Pages are taken away, aged and asked for.
    Invalidate,
    /// Pages are mapped before they are used.
    Prefault,
}

/// Does the `turn`th thing that `meanwhile` asks of another thread.
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
    // One more: others that mark pages as a fault does.
    let (vm, memory) = (new_vm_with::<Tiny<2>>(config, GUESTS + 1), Arc::new(Memory::new(config, nr_pages)));
    let size = [PageSize::Size4K, PageSize::Size2M][random(2) as usize];
    let flags = if random(2) == 0 { LOG } else { NO_FLAGS };
    vm.set_user_memory_region(region(SLOT, flags, 0, nr_pages, Some(backing(FIRST_PFN, size)))).unwrap();
    let mut guests = Vec::new();
    for index in 0..GUESTS {
        let (mut guest, memory) = (Guest::new(&vm, index), Arc::clone(&memory));
        guests.push(thread::spawn(move || {
            let page = |turn| {
                // Where the slot is moved to.
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
        // What was written before is copied whole.
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
            // What was written before one harvest is in that or in the next, if the call that was to mark the page has
            // returned by then.
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

/// Pages of a slot: so few that nothing is closed, a block, or two.
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
fn no_write_is_lost_when_pages_are_taken_away() {
    check(|| dirty_log(Meanwhile::Invalidate, random_size()));
}

#[test]
fn no_write_is_lost_when_pages_are_mapped_before_they_are_used() {
    check(|| dirty_log(Meanwhile::Prefault, random_size()));
}

/// How often tables were closed in a schedule, at most; and turns that had to do without.
static MOST_CLOSED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// An entry is closed so often that its generations come round, beside writes that push down. Pages that no guest uses are
/// marked each time, so that it pays to close.
fn closed_again_and_again() {
    const TURNS: u64 = 10;
    let config = Config::default();
    let (vm, memory) = (new_vm_with::<Tiny<2>>(config, 2), Arc::new(Memory::new(config, BLOCK)));
    let slot = backing(FIRST_PFN, PageSize::Size4K);
    vm.set_user_memory_region(region(SLOT, LOG, 0, BLOCK, Some(slot))).unwrap();
    let guests = [0, 1].map(|index| {
        let (mut guest, memory) = (Guest::new(&vm, index), Arc::clone(&memory));
        // So that there is a table. Another page may be mapped when its entry is closed.
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
    let nr_closed = vm.stats().tables_protected;
    MOST_CLOSED.fetch_max(nr_closed, Ordering::Relaxed);
    REFUSED.fetch_add(TURNS - nr_closed, Ordering::Relaxed);
    memory.assert_one_harvest_is_exact(&vm);
    vm.set_user_memory_region(region(SLOT, NO_FLAGS, 0, 0, None)).unwrap();
    assert_no_table_is_left(&vm);
}

#[test]
fn no_write_is_lost_when_generations_come_round() {
    check(closed_again_and_again);
    assert!(MOST_CLOSED.load(Ordering::Relaxed) > 8, "no entry has had all of its generations");
    assert_ne!(REFUSED.load(Ordering::Relaxed), 0, "no turn was refused");
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
