//! Splits and recoveries of huge pages beside all else, in the world of `tlb_world.rs`. The frames
//! of the area are contiguous at first, so that one leaf can map all of it. Mostly it begins as a
//! page-table page of small leaves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use shuttle::thread::{self, JoinHandle};
use slat::{Access, Config, Gfn, GfnRange, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize};

use crate::copied::Copied;
use crate::schedules::{pick, random};
use crate::tlb_world::{
    AreaBacking, BLOCK, Choices, Guest, Memory, PAGES, PLACES, STAYING, TestVm, is_writable_unlogged, new_vm, random_config, invalidate, zapping,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const PLACE: u64 = PLACES[STAYING][0];
const ALL: GfnRange = GfnRange { start: Gfn(PLACE), end: Gfn(PLACE + BLOCK) };

const GUESTS: usize = 2;
/// The thread that recovers and splits. A harvest waits for its calls as it does for faults.
const RECOVERER: usize = GUESTS;
/// Recoveries in all schedules, so that a test can assert that there were some.
pub static RECOVERIES: AtomicU64 = AtomicU64::new(0);

/// Makes a memslot of the area's pages from `first` on.
fn make_slot(vm: &Arc<TestVm>, id: usize, flags: MemoryRegionFlags, first: u64, nr_pages: u64) {
    let backing = AreaBacking { area: STAYING, first_page: first as usize, vm: Arc::downgrade(vm) };
    change_slot(vm, id, flags, first, nr_pages, Some(backing));
}

/// Makes memslot `id`; without a backing changes its flags; with no pages deletes it.
fn change_slot(
    vm: &TestVm,
    id: usize,
    flags: MemoryRegionFlags,
    first: u64,
    nr_pages: u64,
    backing: Option<AreaBacking>,
) {
    let guest_phys_addr = Gfn(PLACE + first).gpa();
    let memory_size = nr_pages * PAGE_SIZE;
    vm.set_user_memory_region(MemoryRegion {
        slot: id as u32,
        flags,
        guest_phys_addr,
        memory_size,
        backing,
        userfault_bitmap: None,
    })
    .unwrap();
}

/// A VM with one memslot, whose block is mapped by one leaf, by small leaves, or not at all.
fn new_huge_vm(choices: &Choices) -> Arc<TestVm> {
    let vm = new_vm(choices, GUESTS + 2);
    vm.host().with_memory(|memory| memory.place(STAYING, &[PLACE]));
    make_slot(&vm, STAYING, NO_FLAGS, 0, BLOCK);
    let how = random(5);
    if how != 0 {
        Guest::new(&vm, 0).prefault(PLACE, BLOCK, pick(&[Access::Read, Access::Write]));
    }
    if how > 1 {
        // Without memory, it stays as it is.
        let _ = vm.split_range(ALL, PageSize::Size4K);
    }
    vm
}

fn access_memory(vm: &Arc<TestVm>, index: usize, nr_accesses: u64) {
    let mut guest = Guest::new(vm, index);
    let nr_pages = pick(&[1, 2, PAGES as u64]);
    for _ in 0..nr_accesses {
        let (gfn, access) = (PLACE + random(nr_pages), pick(&[Access::Write, Access::Read]));
        if random(8) == 0 {
            guest.prefault(gfn, PLACE + PAGES as u64 - gfn, access);
        } else {
            guest.access(gfn, access);
        }
    }
}

/// Recovers huge leaves, splits them, and ages them.
fn recover_repeatedly(vm: &TestVm, nr_turns: u64) {
    for _ in 0..nr_turns {
        vm.host().during_call(RECOVERER, ALL.start, || match random(6) {
            0 => drop(vm.split_range(ALL, PageSize::Size4K)),
            1 => drop(vm.age_range(ALL).unwrap()),
            _ => {
                RECOVERIES.fetch_add(vm.recover_range(ALL).unwrap(), Ordering::Relaxed);
            }
        });
    }
}

fn spawn_guests(vm: &Arc<TestVm>, nr_accesses: u64) -> Vec<JoinHandle<()>> {
    let spawn = |index| {
        let vm = Arc::clone(vm);
        thread::spawn(move || access_memory(&vm, index, nr_accesses))
    };
    (0..GUESTS).map(spawn).collect()
}

fn spawn_recoverer(vm: &Arc<TestVm>, nr_turns: u64) -> JoinHandle<()> {
    let vm = Arc::clone(vm);
    thread::spawn(move || recover_repeatedly(&vm, nr_turns))
}

fn spawn_single_recovery(vm: &Arc<TestVm>) -> JoinHandle<u64> {
    let vm = Arc::clone(vm);
    thread::spawn(move || vm.host().during_call(RECOVERER, ALL.start, || vm.recover_range(ALL).unwrap()))
}

/// Changes pages as a host does.
fn change_memory(vm: &TestVm) {
    let page = random(PAGES as u64);
    let one = GfnRange::new(Gfn(PLACE + page), 1);
    match random(8) {
        0 | 1 => invalidate(vm, &[ALL], |memory: &mut Memory| memory.renew(STAYING)),
        2 => invalidate(vm, &[one], |memory| memory.move_page(STAYING, page as usize)),
        3 => invalidate(vm, &[one], |memory| memory.protect(STAYING, page as usize)),
        4 => invalidate(vm, &[one], |memory| memory.forbid_huge_leaves(STAYING, true)),
        // The host allows more than before, so no invalidation is needed.
        5 => vm.host().with_memory(|memory| memory.forbid_huge_leaves(STAYING, false)),
        6 => vm.host().with_memory(|memory| (0..PAGES).for_each(|page| memory.allow(STAYING, page))),
        // The host changes nothing after all.
        _ => invalidate(vm, &[pick(&[one, ALL])], |_| {}),
    }
}

/// Deletes memslot `id`, which has the area's pages from `first` on.
fn delete(vm: &TestVm, id: usize, first: u64, nr_pages: u64) {
    let range = GfnRange::new(Gfn(PLACE + first), nr_pages);
    zapping(vm.host(), &[range], || change_slot(vm, id, NO_FLAGS, 0, 0, None));
}

/// All threads have stopped, and the memslots of `logged` log. One harvest of each reports all
/// writes. After it no page is writable unless a log would report it.
fn assert_exact(vm: &TestVm, config: &Config, logged: &mut Copied, first: u64) {
    logged.harvest(vm);
    logged.assert_has(vm.host().with_memory(|memory| memory.nr_writes(STAYING)));
    for gfn in PLACE + first..PLACE + PAGES as u64 {
        assert!(!is_writable_unlogged(vm, config, gfn), "{gfn:#x} can be written, and was not reported; {config:?}");
    }
}

/// No memslot is left, and no page-table page but the root.
fn finish(vm: &Arc<TestVm>) {
    // No guest can use a frame any more, and all writes have been reported.
    vm.host().with_memory(|memory| {
        memory.place(STAYING, &[]);
        memory.renew(STAYING);
    });
    // Also the page-table page above the block.
    drop(vm.invalidate_range(GfnRange::new(Gfn(0), BLOCK * BLOCK)).unwrap());
    vm.reclaim();
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1));
}

/// Beside guests, and a host that moves, protects and frees pages, and sometimes forbids huge
/// leaves.
pub fn beside_invalidations() {
    let choices = Choices { config: random_config(), fails_one_in: pick(&[None, None, Some(4)]) };
    let vm = new_huge_vm(&choices);
    let mut threads = spawn_guests(&vm, 6);
    threads.push(spawn_recoverer(&vm, 3));
    (0..4).for_each(|_| change_memory(&vm));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    delete(&vm, STAYING, 0, BLOCK);
    finish(&vm);
}

/// Beside guests, while logging is turned on and off, which splits and recovers. Meanwhile
/// `changes` changes the host's memory.
fn beside_a_log(changes: fn(&TestVm)) {
    let config = random_config();
    let vm = new_huge_vm(&Choices { config, fails_one_in: pick(&[None, None, Some(4)]) });
    let mut threads = spawn_guests(&vm, 6);
    threads.push(spawn_recoverer(&vm, 3));
    let mut copied: Option<Copied> = None;
    for _ in 0..4 {
        match (random(4), &mut copied) {
            (0, _) => changes(&vm),
            (1 | 2, Some(copied)) => copied.harvest_twice(&vm),
            (_, Some(_)) => {
                zapping(vm.host(), &[ALL], || change_slot(&vm, STAYING, NO_FLAGS, 0, BLOCK, None));
                copied = None;
            }
            (_, None) => {
                change_slot(&vm, STAYING, LOG, 0, BLOCK, None);
                copied = Some(Copied::new(&vm, config.manual_protect, STAYING as u32, 0..PAGES));
            }
        }
    }
    if let Some(copied) = &mut copied {
        vm.host().wait_for_faults();
        copied.harvest_twice(&vm);
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    if let Some(copied) = &mut copied {
        assert_exact(&vm, &config, copied, 0);
    }
    delete(&vm, STAYING, 0, BLOCK);
    finish(&vm);
}

pub fn beside_harvests() {
    beside_a_log(|_| {});
}

pub fn beside_everything() {
    beside_a_log(change_memory);
}

/// The memslot is deleted, and two replace it, over the same frames or others. What a call has read
/// of the old memslot does not hold for the new ones. The second logs.
pub fn beside_halves() {
    const HALF: u64 = PAGES as u64 / 2;
    const SECOND: usize = 2;
    let config = random_config();
    let vm = new_huge_vm(&Choices { config, fails_one_in: None });
    let mut threads = spawn_guests(&vm, 6);
    threads.push(spawn_recoverer(&vm, 3));
    delete(&vm, STAYING, 0, BLOCK);
    if random(2) == 0 {
        vm.host().with_memory(|memory| memory.renew(STAYING));
    }
    make_slot(&vm, SECOND, LOG, HALF, BLOCK - HALF);
    let mut copied = Copied::new(&vm, config.manual_protect, SECOND as u32, HALF as usize..PAGES);
    make_slot(&vm, STAYING, NO_FLAGS, 0, HALF);
    copied.harvest_twice(&vm);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_exact(&vm, &config, &mut copied, HALF);
    delete(&vm, SECOND, HALF, BLOCK - HALF);
    delete(&vm, STAYING, 0, HALF);
    finish(&vm);
}

/// A VM whose block is mapped by small leaves and may be one; and a guest.
fn new_split_vm() -> (Arc<TestVm>, Guest) {
    let vm = new_vm(&Choices { config: Config::default(), fails_one_in: None }, GUESTS + 2);
    vm.host().with_memory(|memory| memory.place(STAYING, &[PLACE]));
    make_slot(&vm, STAYING, NO_FLAGS, 0, BLOCK);
    let mut guest = Guest::new(&vm, 0);
    guest.prefault(PLACE, BLOCK, Access::Read);
    vm.split_range(ALL, PageSize::Size4K).unwrap();
    (vm, guest)
}

/// Invalidates one page. The host then forbids huge leaves, while a recovery has asked it before.
/// The scenario has few steps, so that a schedule that strikes between the right two is likely.
pub fn beside_a_host_that_wants_small_leaves() {
    let (vm, mut guest) = new_split_vm();
    let guest = thread::spawn(move || (0..3).for_each(|_| guest.access(PLACE, Access::Read)));
    let recoverer = spawn_single_recovery(&vm);
    invalidate(&vm, &[GfnRange::new(Gfn(PLACE), 1)], |memory| memory.forbid_huge_leaves(STAYING, true));
    guest.join().unwrap();
    recoverer.join().unwrap();
    // This access finds the huge leaf, if there is one.
    Guest::new(&vm, 1).access(PLACE + 1, Access::Read);
    delete(&vm, STAYING, 0, BLOCK);
    finish(&vm);
}

/// Lets other threads take up to as many steps as a recovery has.
fn delay() {
    (0..random(60)).for_each(|_| thread::yield_now());
}

/// A page is written and invalidated while its page-table page is being recovered. The invalidation
/// that cancels the recovery reports the write. Few steps.
pub fn beside_an_invalidation_that_cancels() {
    let (vm, mut guest) = new_split_vm();
    let guest = thread::spawn(move || {
        delay();
        (0..2).for_each(|_| guest.access(PLACE, Access::Write));
    });
    let recoverer = spawn_single_recovery(&vm);
    // Else the deletion of the memslot checks the report.
    if random(2) == 0 {
        delay();
        invalidate(&vm, &[GfnRange::new(Gfn(PLACE), 1)], |memory| memory.move_page(STAYING, 0));
    }
    guest.join().unwrap();
    recoverer.join().unwrap();
    delete(&vm, STAYING, 0, BLOCK);
    finish(&vm);
}

/// Pages of a huge leaf are invalidated, sometimes without memory for a page-table page. Neighbours
/// are mapped again by small leaves, while a CPU may have the huge leaf cached. Few steps.
pub fn beside_an_invalidation_without_memory() {
    let vm = new_vm(&Choices { config: Config::default(), fails_one_in: Some(2) }, GUESTS + 2);
    vm.host().with_memory(|memory| memory.place(STAYING, &[PLACE]));
    make_slot(&vm, STAYING, NO_FLAGS, 0, BLOCK);
    let mut guests = [0, 1].map(|index| Guest::new(&vm, index));
    (0..4).for_each(|_| guests[0].access(PLACE + 1, Access::Read));
    let guests = guests.map(|mut guest| {
        thread::spawn(move || (0..3).for_each(|_| guest.access(PLACE + 1, pick(&[Access::Read, Access::Write]))))
    });
    let other = (random(2) == 0).then(|| {
        let vm = Arc::clone(&vm);
        thread::spawn(move || invalidate(&vm, &[GfnRange::new(Gfn(PLACE + 2), 1)], |_| {}))
    });
    invalidate(&vm, &[GfnRange::new(Gfn(PLACE), 1)], |_| {});
    other.into_iter().chain(guests).for_each(|thread| thread.join().unwrap());
    delete(&vm, STAYING, 0, BLOCK);
    finish(&vm);
}
