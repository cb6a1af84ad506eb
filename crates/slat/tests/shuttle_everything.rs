//! The whole engine with every operation at once, under shuttle: vCPUs with software TLBs, a thread
//! that changes a memslot, and threads that invalidate, age, harvest and reclaim. The TLBs detect
//! missing flushes. The host checks each access against its frames, and so detects leaves that stay
//! mapped too long. See `support/tlb_world.rs`.
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]

#[path = "support/copied.rs"]
mod copied;
#[path = "support/schedules.rs"]
mod schedules;
#[path = "support/tlb_world.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod tlb_world;
#[path = "support/stepped_world.rs"]
#[allow(dead_code, reason = "this test has its own guests")]
mod world;

use std::sync::Arc;

use copied::Copied;
use schedules::{check, pick, random};
use shuttle::thread;
use slat::baselines::Locking;
use slat::{Access, Config, Gfn, GfnRange, Gpa, MemoryRegionFlags, PAGE_SIZE, PageSize};
use tlb_world::{
    AreaBacking, BLOCK, Choices, Guest, MOVING, Memory, PAGES, PLACES, STAYING, TestVm, invalidate,
    is_writable_unlogged, new_vm, random_config, slot, zapping,
};

type Shape = world::Tiny<3>;

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// A range of `area` at `place`: one page, some pages, or all.
fn random_range(place: u64) -> GfnRange {
    let first = random(PAGES as u64);
    match random(4) {
        0 => GfnRange::new(Gfn(place), BLOCK),
        1 => GfnRange::new(Gfn(place + first), random(PAGES as u64 - first) + 1),
        _ => GfnRange::new(Gfn(place + first), 1),
    }
}

/// Changes pages of `area`, whose memslot is at `place`, as a host does.
fn change_pages(vm: &TestVm, area: usize, place: u64) {
    let range = random_range(place);
    let action = random(4);
    let pages = (0..PAGES).filter(|&page| range.contains(Gfn(place + page as u64)));
    invalidate(vm, &[range], |memory: &mut Memory| match action {
        0 if range.nr_pages() == BLOCK => memory.renew(area),
        0 | 1 => pages.for_each(|page| memory.move_page(area, page)),
        2 => pages.for_each(|page| memory.protect(area, page)),
        // The host changes nothing after all.
        _ => {}
    });
}

fn age(vm: &TestVm, area: usize) {
    let range = random_range(pick(PLACES[area]));
    let used = if random(4) == 0 { vm.test_age_range(range) } else { vm.age_range(range) };
    assert!(used.unwrap() <= range.nr_pages());
}

fn recover_or_split(vm: &TestVm, block: GfnRange) {
    if random(2) == 0 {
        vm.recover_range(block).unwrap();
    } else {
        // Without memory, the rest stays as it is.
        let _ = vm.split_range(block, PageSize::Size4K);
    }
}

/// Changes the memslot and the memory of the moving area.
fn change_slot(vm: &Arc<TestVm>, nr_turns: u64) {
    let (area, host) = (MOVING, vm.host());
    let (mut place, mut flags) = (None, NO_FLAGS);
    for _ in 0..nr_turns {
        let Some(start) = place else {
            let start = pick(PLACES[area]);
            flags = pick(&[NO_FLAGS, NO_FLAGS, LOG]);
            host.with_memory(|memory| memory.place(area, &[start]));
            let backing = AreaBacking { area, first_page: 0, vm: Arc::downgrade(vm) };
            vm.set_user_memory_region(slot(area, flags, Some(start), Some(backing))).unwrap();
            place = Some(start);
            continue;
        };
        match random(9) {
            8 => recover_or_split(vm, GfnRange::new(Gfn(start), BLOCK)),
            0 => {
                delete(vm, area);
                place = None;
            }
            1 => {
                let to = pick(PLACES[area]);
                host.with_memory(|memory| memory.place(area, &[start, to]));
                let change = || vm.set_user_memory_region(slot(area, flags, Some(to), None)).unwrap();
                zapping(host, &[GfnRange::new(Gfn(start), BLOCK)], change);
                host.with_memory(|memory| memory.place(area, &[to]));
                place = Some(to);
            }
            2 => {
                flags ^= LOG;
                vm.set_user_memory_region(slot(area, flags, Some(start), None)).unwrap();
            }
            3 => age(vm, area),
            4 if flags == LOG => {
                vm.get_dirty_log(area as u32, &mut [0; BLOCK as usize / 64]).unwrap();
            }
            _ => change_pages(vm, area, start),
        }
    }
    if place.is_some() {
        delete(vm, area);
    }
}

/// Deletes the memslot of `area`, and frees all its frames.
fn delete(vm: &TestVm, area: usize) {
    let ranges: Vec<_> = PLACES[area].iter().map(|&place| GfnRange::new(Gfn(place), BLOCK)).collect();
    zapping(vm.host(), &ranges, || vm.set_user_memory_region(slot(area, NO_FLAGS, None, None)).unwrap());
    vm.host().with_memory(|memory| {
        memory.place(area, &[]);
        memory.renew(area);
    });
}

/// Changes the memory of the staying area, and harvests its log. Returns the copy if it logs at the
/// end.
fn change_staying(vm: &Arc<TestVm>, config: &Config, nr_turns: u64) -> Option<Copied> {
    let (area, place) = (STAYING, PLACES[STAYING][0]);
    let mut copy = None;
    for _ in 0..nr_turns {
        match random(10) {
            9 => recover_or_split(vm, GfnRange::new(Gfn(place), BLOCK)),
            8 => {
                let reader = vm.read_tables().unwrap();
                let mut cursor = reader.cursor();
                for page in 0..PAGES as u64 {
                    let _ = cursor.query(Gpa((place + page) * PAGE_SIZE));
                }
            }
            0 => {
                // When logging begins, all pages are copied.
                let flags = if copy.is_some() { NO_FLAGS } else { LOG };
                vm.set_user_memory_region(slot(area, flags, Some(place), None)).unwrap();
                copy = match copy {
                    None => Some(Copied::new(vm, config.manual_protect, area as u32, 0..PAGES)),
                    Some(_) => None,
                };
            }
            1 | 2 => {
                if let Some(copy) = &mut copy {
                    copy.harvest_twice(vm);
                }
            }
            3 => age(vm, area),
            4 => invalidate(vm, &[random_range(pick(PLACES[MOVING]))], |_| {}),
            5 => vm.reclaim(),
            _ => change_pages(vm, area, place),
        }
    }
    if let Some(copy) = &mut copy {
        vm.host().wait_for_faults();
        copy.harvest_twice(vm);
    }
    copy
}

fn everything() {
    let choices = Choices { config: random_config(), fails_one_in: pick(&[None, None, Some(4)]) };
    run(&choices, [5, 5], 10);
}

/// Three guests, and an operator for each area.
fn run(choices: &Choices, nr_turns: [u64; 2], nr_accesses: u64) {
    const GUESTS: usize = 3;
    let vm = new_staying_vm(choices, GUESTS);
    let mut threads = Vec::new();
    // The areas that the guests and the operators use: one or both.
    let areas: &'static [usize] = pick(&[&[MOVING] as &[usize], &[STAYING], &[MOVING, STAYING]]);
    let nr_pages = pick(&[1, 2, PAGES as u64]);
    for index in 0..GUESTS {
        let mut guest = Guest::new(&vm, index);
        threads.push(thread::spawn(move || {
            for _ in 0..nr_accesses {
                let page = random(nr_pages);
                let (gfn, access) = (pick(PLACES[pick(areas)]) + page, pick(&[Access::Write, Access::Read]));
                if random(8) == 0 {
                    guest.prefault(gfn, random(nr_pages - page) + 1, access);
                } else {
                    guest.access(gfn, access);
                }
            }
        }));
    }
    if areas.contains(&MOVING) {
        let vm = Arc::clone(&vm);
        threads.push(thread::spawn(move || change_slot(&vm, nr_turns[MOVING])));
    }
    let mut copy = None;
    if areas.contains(&STAYING) {
        copy = change_staying(&vm, &choices.config, nr_turns[STAYING]);
    } else {
        (0..nr_turns[STAYING]).for_each(|_| invalidate(&vm, &[random_range(pick(PLACES[MOVING]))], |_| {}));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    if let Some(mut copy) = copy {
        // All threads have stopped. One harvest reports all writes, and leaves no page writable
        // that no log would report.
        copy.harvest(&vm);
        copy.assert_has(vm.host().with_memory(|memory| memory.nr_writes(STAYING)));
        for gfn in PLACES[STAYING][0]..PLACES[STAYING][0] + PAGES as u64 {
            assert!(!is_writable_unlogged(&vm, &choices.config, gfn), "{gfn:#x} can be written, and was not reported");
        }
    }
    finish(&vm);
}

/// A VM with the memslot of the staying area.
fn new_staying_vm(choices: &Choices, nr_guests: usize) -> Arc<TestVm> {
    let (vm, place) = (new_vm(choices, nr_guests), PLACES[STAYING][0]);
    let backing = AreaBacking { area: STAYING, first_page: 0, vm: Arc::downgrade(&vm) };
    vm.host().with_memory(|memory| memory.place(STAYING, &[place]));
    vm.set_user_memory_region(slot(STAYING, NO_FLAGS, Some(place), Some(backing))).unwrap();
    vm
}

/// No guest runs any more: the root is the only page-table page.
fn finish(vm: &Arc<TestVm>) {
    delete(vm, STAYING);
    drop(vm.invalidate_range(GfnRange::new(Gfn(0), BLOCK * BLOCK)).unwrap());
    vm.reclaim();
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1));
}

#[test]
fn guests_access_only_what_the_host_allows_beside_everything() {
    check(everything);
}

/// The host repeatedly forbids writes to a page, and allows them in the same frame when it is
/// asked. So a reader may install the very read-only leaf that a writer is about to replace.
fn allowed_and_forbidden() {
    let locking = pick(&[Locking::None, Locking::None, Locking::None, Locking::Shared]);
    let choices = Choices { config: Config::default().with_locking(locking), fails_one_in: None };
    let (vm, place) = (new_staying_vm(&choices, 2), PLACES[STAYING][0]);
    vm.host().copies_never();
    vm.host().with_memory(|memory| {
        (0..PAGES).for_each(|page| {
            // So that the leaf is one of 4 KiB, which is not split.
            memory.move_page(STAYING, page);
            memory.protect(STAYING, page);
        });
    });
    // Few steps, so that a schedule that strikes between the right two is likely.
    let [mut reader, mut writer] = [0, 1].map(|index| Guest::new(&vm, index));
    (0..2).for_each(|_| reader.access(place, Access::Read));
    let writer = thread::spawn(move || (0..2).for_each(|_| writer.access(place, Access::Write)));
    invalidate(&vm, &[GfnRange::new(Gfn(place), 1)], |memory| memory.protect(STAYING, 0));
    reader.access(place, Access::Read);
    writer.join().unwrap();
    drop(reader);
    finish(&vm);
}

#[test]
fn no_write_uses_a_leaf_that_was_forbidden_meanwhile() {
    check(allowed_and_forbidden);
}

/// A page-table page is unlinked while another thread invalidates one of its pages, and a late
/// fault comes in between.
fn unlinked_beside_an_invalidation() {
    let choices = Choices { config: Config::default(), fails_one_in: None };
    let (vm, place) = (new_staying_vm(&choices, 3), PLACES[STAYING][0]);
    let page = GfnRange::new(Gfn(place), 1);
    vm.host().with_memory(|memory| (0..PAGES).for_each(|page| memory.move_page(STAYING, page)));
    let mut guests = [0, 1].map(|index| Guest::new(&vm, index));
    // So that there is a page-table page.
    (0..2).for_each(|_| guests[0].access(place + 1, Access::Write));
    if random(2) == 0 {
        (0..2).for_each(|_| guests[0].access(place, Access::Read));
    }
    let threads = guests
        .map(|mut guest| thread::spawn(move || (0..3).for_each(|_| guest.access(place + random(2), Access::Write))));
    let other = {
        let vm = Arc::clone(&vm);
        thread::spawn(move || invalidate(&vm, &[GfnRange::new(Gfn(place), BLOCK)], |_| {}))
    };
    invalidate(&vm, &[page], |memory| memory.move_page(STAYING, 0));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    other.join().unwrap();
    finish(&vm);
}

#[test]
fn accesses_through_an_unlinked_table_are_reported() {
    check(unlinked_beside_an_invalidation);
}
