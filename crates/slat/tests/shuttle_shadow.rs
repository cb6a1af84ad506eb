//! Shadow paging under shuttle. Two vCPUs edit guest page tables and flush, each stopped at every
//! atomic access. Beside them a host moves pages, harvests the dirty log and ages.
//!
//! Each edited PTE goes through versions, with one editor each. A CPU that flushes after the editor
//! has stored a version must reach the page of that version, or of a later one that was begun
//! since. Shadow page-table pages have four PTEs here, and so has the format. Three of a guest's
//! page-table page are used; the fourth word of each page is its label (`support/shadow_cpu.rs`).
//!
//! `RUSTFLAGS="--cfg shuttle" cargo test -p slat --release --test 'shuttle_*'`
#![cfg(shuttle)]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "a format")]

#[path = "support/schedules.rs"]
mod schedules;
#[path = "support/shadow_cpu.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod shadow_cpu;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use schedules::{check_less, random};
use shadow_cpu::{Cpu, P, TestVm, U, W, WORDS, move_page, new_vm, registers_with_pcids};
use shuttle::thread;
use slat::shadow::{PagingRegisters, ShadowPaging, ShadowStrategy};
use slat::{Access, Config, Exit, Gfn, GfnRange, MemoryRegionFlags};

const SCHEDULES: usize = 500;

const NR_PAGES: u64 = 4 * 512;
const NR_SPARE: u64 = 8;

/// Guest page tables: two top ones, and the ones below both.
const TOPS: [u64; 2] = [0, 515];
const LEVEL_3: u64 = 1;
const LEVEL_2: u64 = 2;
const LOWEST: [u64; 2] = [512, 513];
/// A page table of level 2 that comes and goes.
const OTHER: u64 = 514;
/// Pages that map the guest's page tables: `WINDOW` those of the lowest level and `OTHER`,
/// `UPPER_WINDOW` those above.
const WINDOW: u64 = 1536;
const WINDOW_LEVEL_2: u64 = 1537;
const UPPER_WINDOW: u64 = 1538;
/// What the first PTE of `LOWEST[0]` maps in turn.
const PAGES: [u64; 3] = [1024, 1025, 1026];
/// What the second PTEs of `LOWEST` map.
const MARKS: [u64; 2] = [1027, 1539];
const ALL_PAGES: [u64; 16] = [0, 1, 2, 3, 512, 513, 514, 515, 1024, 1025, 1026, 1027, 1536, 1537, 1538, 1539];

/// Translated by the first PTE of `LEVEL_2` and the first of `LOWEST[0]`.
const LEAF_VA: u64 = 0;
/// Translated by the third PTE of `LEVEL_2` and the second of a lowest page table.
const LINK_VA: u64 = 2 << 21 | 1 << 12;
/// Translated by the second PTE of `LEVEL_3` and the first of `OTHER`.
const OTHER_VA: u64 = 1 << 30 | 1 << 12;
/// Where the guest maps its page tables.
const LEAF_PLACE: u64 = 1 << 21;
const OTHER_PLACE: u64 = 1 << 21 | 2 << 12;
const LEVEL_3_PLACE: u64 = 2 << 30;
const LINK_PLACE: u64 = 2 << 30 | 1 << 12 | 16;

fn table(gfn: u64) -> u64 {
    gfn << 12 | P | W | U
}

/// A PTE with one editor.
#[derive(Default)]
struct Place {
    /// The last version whose store has begun, and the last whose store is over.
    begun: AtomicU64,
    over: AtomicU64,
}

#[derive(Default)]
struct Places {
    leaf: Place,
    link: Place,
    other: Place,
}

fn page_of_leaf(version: u64) -> u64 {
    PAGES[version as usize % 3]
}

fn page_of_link(version: u64) -> u64 {
    MARKS[version as usize % 2]
}

impl Place {
    /// Stores the next version at `va`, as `entry` encodes it. Returns its number.
    fn edit(&self, cpu: &mut Cpu, va: u64, entry: fn(u64) -> u64) -> u64 {
        let version = self.begun.load(Ordering::SeqCst) + 1;
        self.begun.store(version, Ordering::SeqCst);
        cpu.store(va, entry(version)).unwrap();
        self.over.store(version, Ordering::SeqCst);
        version
    }

    /// `va` must reach the page of version `floor`, or of a later one.
    fn check(&self, cpu: &mut Cpu, va: u64, floor: u64, page: fn(u64) -> u64) {
        let found = cpu.page_at(va).unwrap();
        let ceiling = self.begun.load(Ordering::SeqCst);
        assert!(
            (floor..=ceiling).any(|version| page(version) == found),
            "{va:#x} is page {found}, of versions {floor} to {ceiling}"
        );
    }

    /// Flushes; then `va` must reach the page of the version that is stored now.
    fn flush_and_check(&self, guest: &mut Guest, va: u64, page: fn(u64) -> u64) {
        let floor = self.over.load(Ordering::SeqCst);
        guest.flush(va);
        self.check(&mut guest.cpu, va, floor, page);
    }
}

/// A CPU, and the state of its guest.
struct Guest {
    cpu: Cpu,
    number: u64,
    top: usize,
    written: HashMap<u64, u64>,
    nr_writes: u64,
}

impl Guest {
    fn cr3(&self) -> u64 {
        TOPS[self.top] << 12 | self.top as u64
    }

    /// Flushes at least the translation of `va`, by one of several instructions.
    fn flush(&mut self, va: u64) {
        let pcid = self.top as u64;
        match random(7) {
            0 | 1 => self.cpu.invlpg(va),
            6 => self.cpu.forbidden_fetch(va),
            2 => self.cpu.invpcid(0, pcid, va),
            3 => self.cpu.invpcid(1, pcid, 0),
            4 => self.cpu.invpcid(3, 0, 0),
            _ => self.cpu.load_cr3(self.cr3()),
        }
    }

    /// Switches to the other root, or to the same. `keep` may keep what was flushed before.
    fn switch(&mut self, top: usize, keep: u64) {
        self.top = top;
        self.cpu.load_cr3(self.cr3() | keep << 63);
    }

    /// Writes its own word of the page at `va`, and reads it.
    fn write(&mut self, va: u64) {
        self.nr_writes += 1;
        let (own, value) = (self.number, self.nr_writes);
        let written = self.cpu.access(va, Access::Write, |page| {
            page.word(own).store(value, Ordering::SeqCst);
            page.gfn()
        });
        self.written.insert(written.unwrap(), value);
        let (gfn, found) =
            self.cpu.access(va, Access::Read, |page| (page.gfn(), page.word(own).load(Ordering::SeqCst))).unwrap();
        assert_eq!(found, self.written.get(&gfn).copied().unwrap_or(0), "page {gfn} at {va:#x}");
    }
}

struct World {
    vm: Arc<TestVm>,
    places: Arc<Places>,
    copies: HashMap<u64, Vec<u64>>,
}

impl World {
    fn new() -> World {
        let strategy = match random(4) {
            0 => ShadowStrategy::RootCache,
            1 => ShadowStrategy::PcidTagged,
            2 => ShadowStrategy::RootsByPcid,
            _ => ShadowStrategy::Baseline,
        };
        let shadow = ShadowPaging { strategy, previous_roots: 1, max_pages: slat::shadow::ShadowPaging::MIN_PAGES };
        let vm = new_vm(Config::default(), shadow, NR_PAGES, NR_SPARE, MemoryRegionFlags::LOG_DIRTY_PAGES);
        let host = vm.host();
        for top in TOPS {
            host.store(top, 0, table(LEVEL_3));
        }
        host.store(LEVEL_3, 0, table(LEVEL_2));
        host.store(LEVEL_3, 1, table(OTHER));
        host.store(LEVEL_3, 2, table(WINDOW_LEVEL_2));
        host.store(LEVEL_2, 0, table(LOWEST[0]));
        host.store(LEVEL_2, 1, table(WINDOW));
        host.store(LEVEL_2, 2, table(LOWEST[0]));
        host.store(OTHER, 0, table(LOWEST[0]));
        host.store(WINDOW_LEVEL_2, 0, table(UPPER_WINDOW));
        host.store(WINDOW, 0, table(LOWEST[0]));
        host.store(WINDOW, 1, table(LOWEST[1]));
        host.store(WINDOW, 2, table(OTHER));
        host.store(UPPER_WINDOW, 0, table(LEVEL_3));
        host.store(UPPER_WINDOW, 1, table(LEVEL_2));
        host.store(LOWEST[0], 0, table(page_of_leaf(0)));
        for (lowest, mark) in LOWEST.into_iter().zip(MARKS) {
            host.store(lowest, 1, table(mark));
        }
        let copies = ALL_PAGES.iter().map(|&gfn| (gfn, host.copy_of(gfn))).collect();
        World { vm, places: Arc::default(), copies }
    }

    fn guest(&self, number: u64) -> Guest {
        let mut guest = Guest { cpu: Cpu::new(&self.vm), number, top: 0, written: HashMap::new(), nr_writes: 0 };
        // With SMEP, so that there is an access that the supervisor may not make.
        let registers = registers_with_pcids(0);
        guest.cpu.set_registers(PagingRegisters { cr4: registers.cr4 | 1 << 20, ..registers });
        guest
    }

    /// All threads are done: no write is lost, and no shadow page is left.
    fn end(mut self, guests: Vec<Guest>) {
        copy_dirty(&self.vm, &mut self.copies);
        for gfn in ALL_PAGES {
            assert_eq!(self.copies[&gfn], self.vm.host().copy_of(gfn), "page {gfn} was lost");
        }
        drop(guests);
        // (Nor are leaves, since freeing a shadow page zaps them. To count them takes many steps.)
        assert_eq!(self.vm.stats().shadow_pages, 0);
    }
}

fn copy_dirty(vm: &TestVm, copies: &mut HashMap<u64, Vec<u64>>) {
    let mut bitmap = [0; NR_PAGES as usize / 64];
    vm.get_dirty_log(0, &mut bitmap).unwrap();
    for gfn in ALL_PAGES {
        if bitmap[gfn as usize / 64] >> (gfn % 64) & 1 != 0 {
            copies.insert(gfn, vm.host().copy_of(gfn));
        }
    }
    assert_eq!(WORDS, 4);
}

/// Runs a guest on its own thread, and returns it.
fn spawn(mut guest: Guest, run: impl FnOnce(&mut Guest) + Send + 'static) -> thread::JoinHandle<Guest> {
    thread::spawn(move || {
        run(&mut guest);
        guest
    })
}

/// Runs both guests beside what the host does.
fn beside(
    editor: impl FnOnce(&mut Guest, &Places) + Send + 'static,
    other: impl FnOnce(&mut Guest, &Places) + Send + 'static,
    host: impl FnOnce(&TestVm, &mut HashMap<u64, Vec<u64>>),
) {
    let mut world = World::new();
    let (first, second) = (world.guest(0), world.guest(1));
    let places = Arc::clone(&world.places);
    let first = spawn(first, move |guest| editor(guest, &places));
    let places = Arc::clone(&world.places);
    let second = spawn(second, move |guest| other(guest, &places));
    host(&world.vm, &mut world.copies);
    let guests = vec![first.join().unwrap(), second.join().unwrap()];
    world.end(guests);
}

fn edit_leaf(guest: &mut Guest, places: &Places) {
    for _ in 0..2 {
        places.leaf.edit(&mut guest.cpu, LEAF_PLACE, |version| table(page_of_leaf(version)));
        places.leaf.flush_and_check(guest, LEAF_VA, page_of_leaf);
    }
}

fn edit_link(guest: &mut Guest, places: &Places) {
    for _ in 0..2 {
        places.link.edit(&mut guest.cpu, LINK_PLACE, |version| table(LOWEST[version as usize % 2]));
        places.link.flush_and_check(guest, LINK_VA, page_of_link);
    }
}

/// Checks all addresses, sometimes from another root.
fn watch(guest: &mut Guest, places: &Places) {
    for _ in 0..2 {
        if random(3) == 0 {
            let top = random(2) as usize;
            guest.switch(top, 0);
        }
        if random(2) == 0 {
            places.leaf.flush_and_check(guest, LEAF_VA, page_of_leaf);
        } else {
            places.link.flush_and_check(guest, LINK_VA, page_of_link);
        }
    }
}

#[test]
fn a_flush_makes_an_edit_of_a_leaf_visible() {
    check_less(4 * SCHEDULES, || beside(edit_leaf, watch_leaf, |_, _| {}));
}

fn watch_leaf(guest: &mut Guest, places: &Places) {
    for _ in 0..3 {
        places.leaf.flush_and_check(guest, LEAF_VA, page_of_leaf);
    }
}

#[test]
fn a_flush_makes_an_edit_of_a_link_visible() {
    check_less(2 * SCHEDULES, || {
        beside(
            edit_link,
            |guest, places| (0..3).for_each(|_| places.link.flush_and_check(guest, LINK_VA, page_of_link)),
            |_, _| {},
        );
    });
}

#[test]
fn edits_of_a_leaf_below_a_link_that_is_edited() {
    check_less(2 * SCHEDULES, || {
        beside(
            edit_leaf,
            |guest, places| {
                edit_link(guest, places);
                places.leaf.flush_and_check(guest, LEAF_VA, page_of_leaf);
            },
            |_, _| {},
        );
    });
}

/// A frame becomes a page table, and ceases to be one, while the other CPU writes it and harvests
/// write-protect it.
#[test]
fn a_table_that_comes_and_goes() {
    check_less(2 * SCHEDULES, || {
        beside(
            |guest, places| {
                for _ in 0..4 {
                    places.other.edit(&mut guest.cpu, OTHER_PLACE, |version| table(LOWEST[version as usize % 2]));
                }
            },
            |guest, places| {
                for nth in 0..3 {
                    guest.cpu.store(LEVEL_3_PLACE + 8, if nth % 2 == 0 { 0 } else { table(OTHER) }).unwrap();
                    if nth % 2 == 0 {
                        guest.flush(OTHER_VA);
                        assert!(matches!(guest.cpu.page_at(OTHER_VA), Err(Exit::PageFault { .. })));
                    } else {
                        places.other.flush_and_check(guest, OTHER_VA, page_of_link);
                    }
                }
                guest.cpu.store(LEVEL_3_PLACE + 8, table(OTHER)).unwrap();
                places.other.flush_and_check(guest, OTHER_VA, page_of_link);
                places.other.flush_and_check(guest, OTHER_VA, page_of_link);
            },
            |vm, copies| (0..3).for_each(|_| copy_dirty(vm, copies)),
        );
    });
}

/// Switches between roots, with only the flushes that the architecture requires.
#[test]
fn cached_roots_observe_what_was_flushed() {
    check_less(SCHEDULES, || {
        beside(
            edit_leaf,
            |guest, places| {
                guest.cpu.page_at(LEAF_VA).unwrap();
                guest.switch(1, 1);
                guest.cpu.page_at(LEAF_VA).unwrap();
                let floor = places.leaf.over.load(Ordering::SeqCst);
                // In the PCID that is not current: the flush is due at the switch to it.
                match random(2) {
                    0 => guest.cpu.invpcid(0, 0, LEAF_VA),
                    _ => guest.cpu.invpcid(1, 0, 0),
                }
                guest.switch(0, 1);
                places.leaf.check(&mut guest.cpu, LEAF_VA, floor, page_of_leaf);
            },
            |_, _| {},
        );
    });
}

#[test]
fn beside_a_host_that_moves_pages() {
    check_less(SCHEDULES, || {
        beside(
            |guest, places| {
                edit_leaf(guest, places);
                guest.write(LEAF_VA);
            },
            |guest, places| {
                watch(guest, places);
                guest.write(LINK_VA);
            },
            |vm, _| {
                for _ in 0..2 {
                    move_page(vm, ALL_PAGES[random(16) as usize]);
                }
            },
        );
    });
}

#[test]
fn no_write_is_lost_beside_harvests() {
    check_less(SCHEDULES, || {
        beside(
            |guest, _| (0..3).for_each(|_| guest.write(LEAF_VA)),
            |guest, places| {
                guest.write(LEAF_VA);
                edit_link(guest, places);
                guest.write(LINK_VA);
            },
            |vm, copies| (0..3).for_each(|_| copy_dirty(vm, copies)),
        );
    });
}

#[test]
fn beside_everything() {
    check_less(SCHEDULES, || {
        beside(
            |guest, places| {
                guest.write(LEAF_VA);
                edit_leaf(guest, places);
                guest.write(LEAF_VA);
            },
            |guest, places| {
                edit_link(guest, places);
                guest.write(LINK_VA);
                places.leaf.flush_and_check(guest, LEAF_VA, page_of_leaf);
            },
            |vm, copies| {
                for _ in 0..2 {
                    move_page(vm, ALL_PAGES[random(16) as usize]);
                    copy_dirty(vm, copies);
                    vm.age_range(GfnRange::new(Gfn(512 * random(4)), 4)).unwrap();
                }
            },
        );
    });
}
