//! The engine's nested page tables, and the software machine's walker of them, against a real CPU.
//!
//! Engine and walker are written by the same authors from the same manuals, and may share a
//! misunderstanding. AMD's nested page tables are long-mode page tables, and nested accesses are
//! user accesses. So a processor in long mode at CPL 3 can run on the engine's page tables as they
//! are, and its page faults are the nested ones. `/dev/kvm` provides such a processor. For each
//! access it completes or faults with an error code, reaches a frame, and sets accessed and dirty
//! bits. All of that must be what the walker returns at the same moment: `world.rs` compares.
//!
//! Where the processor has nested paging itself, it walks the engine's page tables. Where KVM
//! shadows them (in a nested virtual machine without it), KVM's walker finds the translations and
//! sets accessed and dirty bits, and the processor enforces the rights of the shadow. That is still
//! an oracle by other authors, but a weaker one.
//!
//! Without a KVM that supports this, the tests print "skipped" with the reason, and pass:
//! `--nocapture` shows it.
//!
//! Not tested here:
//! - faults of a guest's own page tables, and the upper half of the error code, which only nested
//!   paging has;
//! - accesses during an operation of the engine: the thread that calls the engine also runs the one
//!   CPU;
//! - linear addresses of PML4 entry 256, the first of the upper half: KVM's PVM faults there
//!   whatever the page tables are;
//! - address bits beyond the processor's own, which may be fewer than the 52 of the software
//!   machine; bit 8 of a PML4 entry, which is reserved on AMD's processors only.

#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(missing_docs)]

#[path = "real_cpu/arena.rs"]
mod arena;
#[path = "real_cpu/cpu.rs"]
mod cpu;
#[path = "real_cpu/walker.rs"]
mod walker;
#[path = "real_cpu/world.rs"]
mod world;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::{Access, Exit, Gpa, Hpa, MemoryRegionFlags, PAGE_SIZE, PageSize};

use arena::{BASE, FRAMES, Frames};
use walker::{ACCESSED, DIRTY, NO_EXECUTE, PAGE, PRESENT, USER, WRITABLE};
use world::{Counts, EXECUTED, WORDS, World, fill};

const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];
const NONE: MemoryRegionFlags = MemoryRegionFlags::empty();
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const READONLY: MemoryRegionFlags = MemoryRegionFlags::READONLY;

/// Error codes of #PF: P, W, U, RSVD, I/D (AMD APM vol. 2, 8.4.2).
const P: u64 = 1 << 0;
const W: u64 = 1 << 1;
const U: u64 = 1 << 2;
const RSVD: u64 = 1 << 3;
const ID: u64 = 1 << 4;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// First addresses of the PML4 entries that the tests use, in both halves. Not that of the system
/// pages.
const AREAS: [u64; 5] = [0, 1 << 39, 0x7f << 39, 0x181 << 39, 0x1ff << 39];

/// Frames that may be used at once: small ones, pages of 2 MiB, a page of 1 GiB.
const SMALL: Hpa = Hpa(FRAMES + MIB);
const LARGE: Hpa = Hpa(BASE + 64 * MIB);
const LARGE_ALSO: Hpa = Hpa(BASE + 128 * MIB);
const HUGE: Hpa = Hpa(BASE + GIB);

/// A world; or prints why there is none.
fn world() -> Option<World> {
    World::new().map_err(|trouble| println!("skipped: no real CPU to compare with: {trouble}")).ok()
}

/// A world for each page size that the CPU has.
fn worlds() -> impl Iterator<Item = (World, PageSize)> {
    let sizes = [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G];
    sizes.into_iter().map_while(|size| Some((world()?, size))).filter(|(world, size)| {
        let has_it = *size != PageSize::Size1G || world.has_1g_pages();
        if !has_it {
            println!("not tested: pages of 1 GiB, which this CPU does not have");
        }
        has_it
    })
}

/// Frames for a memslot of one page of `size`, or eight of 4 KiB, of which those in [`pages`] are
/// filled.
fn frames(world: &World, size: PageSize) -> Arc<Frames> {
    let (first, nr_pages) = match size {
        PageSize::Size4K => (SMALL, 8),
        PageSize::Size2M => (LARGE, 512),
        PageSize::Size1G => (HUGE, 512 * 512),
    };
    let frames = Frames::new(first, nr_pages, size);
    for page in pages(&frames) {
        fill(world.arena(), &frames, page);
    }
    frames
}

/// Some pages of the frames: all would be too many. The first two, the last, and one of each 64 KiB
/// or so.
fn pages(frames: &Frames) -> Vec<u64> {
    let stride = (frames.nr_pages / 64).max(1);
    let mut pages: Vec<u64> = (0..frames.nr_pages).step_by(stride as usize).chain([1, frames.nr_pages - 1]).collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}

/// An address for `access` in the page at `page`.
fn word(page: u64, access: Access) -> Gpa {
    Gpa(page + if access == Access::Execute { EXECUTED } else { WORDS[1] })
}

/// The error code of an access without a mapping.
fn absent(access: Access) -> u64 {
    match access {
        Access::Read => U,
        Access::Write => U | W,
        Access::Execute | Access::ExecuteUser => U | ID,
    }
}

#[test]
fn addresses_without_a_slot_exit() {
    let Some(mut world) = world() else { return };
    for area in AREAS {
        for gpa in [area + PAGE_SIZE, area + GIB, area + 511 * GIB] {
            for access in ACCESSES {
                let gpa = word(gpa, access);
                assert_eq!(world.attempt(gpa, access), Err(absent(access)));
                assert_eq!(world.access(gpa, access), Err(Exit::Mmio { gpa, access }));
            }
        }
    }
    println!("{}", world.counts);
}

#[test]
fn a_read_installs_a_leaf_that_the_cpu_makes_dirty_itself() {
    for (mut world, size) in worlds() {
        let frames = frames(&world, size);
        for area in AREAS {
            world.create(0, NONE, Gpa(area + GIB), &frames);
            let page = area + GIB + (frames.nr_pages / 2) * PAGE_SIZE;
            world.access(word(page, Access::Read), Access::Read).unwrap();
            let leaf = world.lowest(Gpa(page));
            assert_eq!(leaf.level, size.level().0);
            assert_eq!(leaf.entry & (ACCESSED | DIRTY | WRITABLE), ACCESSED | WRITABLE);

            // Without a fault: the processor sets D.
            assert!(world.attempt(word(page, Access::Write), Access::Write).is_ok());
            assert_eq!(world.lowest(Gpa(page)).entry, leaf.entry | DIRTY);
            assert!(world.attempt(word(page, Access::Read), Access::Read).is_ok());
            assert!(world.attempt(word(page, Access::Execute), Access::Execute).is_ok());
            world.delete(0);
            assert_eq!(world.attempt(word(page, Access::Read), Access::Read), Err(U));
        }
        println!("{size:?}: {}", world.counts);
    }
}

#[test]
fn a_leaf_that_the_host_forbids_to_write_faults_once_more() {
    for (mut world, size) in worlds() {
        let frames = frames(&world, size);
        frames.read_gives_writable.store(false, Ordering::Relaxed);
        let page = AREAS[3] + GIB;
        world.create(0, NONE, Gpa(page), &frames);
        world.access(word(page, Access::Read), Access::Read).unwrap();
        assert_eq!(world.lowest(Gpa(page)).entry & WRITABLE, 0);
        assert!(world.attempt(word(page, Access::Execute), Access::Execute).is_ok());
        assert_eq!(world.attempt(word(page, Access::Write), Access::Write), Err(P | W | U));
        world.access(word(page, Access::Write), Access::Write).unwrap();
        assert_eq!(world.lowest(Gpa(page)).entry & (WRITABLE | DIRTY), WRITABLE | DIRTY);
        world.delete(0);
        println!("{size:?}: {}", world.counts);
    }
}

#[test]
fn writes_to_a_read_only_slot_exit() {
    for (mut world, size) in worlds() {
        let frames = frames(&world, size);
        let page = AREAS[1] + GIB;
        world.create(0, READONLY, Gpa(page), &frames);
        let gpa = word(page, Access::Write);
        assert_eq!(world.attempt(gpa, Access::Write), Err(U | W));
        assert_eq!(world.access(gpa, Access::Write), Err(Exit::Mmio { gpa, access: Access::Write }));
        world.access(word(page, Access::Read), Access::Read).unwrap();
        world.access(word(page, Access::Execute), Access::Execute).unwrap();
        assert_eq!(world.attempt(gpa, Access::Write), Err(P | W | U));
        assert_eq!(world.access(gpa, Access::Write), Err(Exit::Mmio { gpa, access: Access::Write }));
        world.delete(0);
        println!("{size:?}: {}", world.counts);
    }
}

#[test]
fn a_page_that_is_write_protected_for_the_log_faults_on_a_write() {
    for (mut world, size) in worlds() {
        let frames = frames(&world, size);
        let page = AREAS[4] + GIB;
        let gpa = word(page, Access::Write);
        world.create(0, NONE, Gpa(page), &frames);
        world.access(gpa, Access::Write).unwrap();
        assert_eq!(world.lowest(gpa).level, size.level().0);

        // A leaf that the CPU has cached as writable is write-protected, of whatever size; a write
        // splits it.
        world.change(0, Gpa(page), LOG);
        assert_eq!(world.attempt(gpa, Access::Write), Err(P | W | U));
        world.access(gpa, Access::Write).unwrap();
        assert_eq!(world.lowest(gpa).level, 1);
        world.harvest(0);
        assert!(world.attempt(word(page, Access::Read), Access::Read).is_ok());
        assert!(world.attempt(word(page, Access::Execute), Access::Execute).is_ok());
        assert_eq!(world.attempt(gpa, Access::Write), Err(P | W | U));
        // Its neighbour after the split is still write-protected.
        let neighbour = Gpa(gpa.0 + PAGE_SIZE);
        world.access(neighbour, Access::Read).unwrap();
        assert_eq!(world.attempt(neighbour, Access::Write), Err(P | W | U));
        world.harvest(0);
        world.delete(0);
        println!("{size:?}: {}", world.counts);
    }
}

/// PTEs that the engine does not make: rights missing at one level, no-execute, reserved bits, A
/// and D cleared. The walker claims to model a processor's reaction.
#[test]
fn entries_with_fewer_rights_or_reserved_bits() {
    for (mut world, size) in worlds() {
        let mut nr_cases = 0;
        let frames = frames(&world, size);
        // Only this memslot uses the PML4 entry, so the test can change it.
        let page = AREAS[2] + GIB;
        world.create(0, NONE, Gpa(page), &frames);
        world.access(word(page, Access::Write), Access::Write).unwrap();
        let path = world.path(Gpa(page));
        let leaf = size.level().0;
        for step in &path {
            let mut spoilt = vec![
                (step.entry & !PRESENT, None),
                (step.entry & !WRITABLE, Some(P)),
                (step.entry & !USER, Some(P)),
                (step.entry & !ACCESSED, None),
                (step.entry & !(WRITABLE | USER | ACCESSED | DIRTY), Some(P)),
                (step.entry | NO_EXECUTE, Some(P)),
                (step.entry | 0x7ff << 52, None),
            ];
            let reserved = match (step.level, step.level == leaf) {
                (4, _) => PAGE,
                (3, true) => 1 << 29 | 1 << 13,
                (2, true) => 1 << 20 | 1 << 13,
                // Every bit has a meaning.
                _ => 0,
            };
            for bit in (0..64).map(|bit| 1 << bit).filter(|bit| reserved & bit != 0) {
                spoilt.push((step.entry | bit, Some(P | RSVD)));
            }
            if step.level == leaf {
                spoilt.push((step.entry & !DIRTY, None));
                spoilt.push((step.entry & !(DIRTY | ACCESSED), None));
                // PAT: of a small page in bit 7, of a large one in bit 12.
                spoilt.push((step.entry | if leaf == 1 { PAGE } else { 1 << 12 }, None));
            }
            for (entry, expected) in spoilt {
                let mut was_seen = false;
                for access in ACCESSES {
                    world.arena().set(step.at, entry);
                    world.flush();
                    let result = world.attempt(word(page, access), access);
                    was_seen |= result.is_err_and(|code| Some(code & (P | RSVD)) == expected);
                    nr_cases += 1;
                }
                assert!(was_seen || expected.is_none(), "entry {entry:#x} of level {} denied no access", step.level);
                world.arena().set(step.at, step.entry);
            }
            world.flush();
        }
        println!("{size:?}: {nr_cases} attempts: {}", world.counts);
    }
}

#[test]
fn slots_can_move_and_return() {
    for (mut world, size) in worlds() {
        let frames = frames(&world, size);
        world.create(0, NONE, Gpa(AREAS[0] + GIB), &frames);
        for area in AREAS.into_iter().chain(AREAS) {
            let before = world.slots[&0].gpa;
            world.change(0, Gpa(area + 2 * GIB), NONE);
            for page in pages(&frames) {
                // The contents written at the last place are there (`World::attempt` compares).
                for access in [Access::Read, Access::Write, Access::Execute] {
                    world.access(word(area + 2 * GIB + page * PAGE_SIZE, access), access).unwrap();
                }
            }
            assert!(world.attempt(word(before.0, Access::Read), Access::Read).is_err() || before.0 == area + 2 * GIB);
        }
        world.delete(0);
        println!("{size:?}: {}", world.counts);
    }
}

#[test]
fn the_dirty_log_has_the_pages_that_the_cpu_wrote() {
    for (mut world, size) in worlds() {
        let mut rng = SmallRng::seed_from_u64(8);
        for initial in [NONE, LOG] {
            let frames = frames(&world, size);
            let start = AREAS[3] + GIB;
            world.create(0, initial, Gpa(start), &frames);
            let pages = pages(&frames);
            let mut touch = |world: &mut World, nr_accesses| {
                for _ in 0..nr_accesses {
                    let page = pages[rng.random_range(0..pages.len())];
                    let access = ACCESSES[rng.random_range(0..ACCESSES.len())];
                    world.access(word(start + page * PAGE_SIZE, access), access).unwrap();
                }
            };
            touch(&mut world, 20);
            world.change(0, Gpa(start), LOG);
            for _ in 0..5 {
                touch(&mut world, 60);
                world.harvest(0);
            }
            // Written while no log exists: no log reports it. A new log is empty.
            world.change(0, Gpa(start), NONE);
            touch(&mut world, 20);
            world.change(0, Gpa(start), LOG);
            world.harvest(0);
            world.delete(0);
        }
        assert!(world.counts.dirty > 50, "{}", world.counts);
        println!("{size:?}: {}", world.counts);
    }
}

/// A memslot of the random operations, and its offset in an area.
struct Kind {
    offset: u64,
    flags: MemoryRegionFlags,
    frames: Arc<Frames>,
    pages: Vec<u64>,
}

#[test]
fn random_operations() {
    const NR_STEPS: u32 = 1500;
    for seed in 1..=4 {
        let Some(mut world) = world() else { return };
        println!("seed {seed}");
        let mut kinds = vec![
            // Neighbours in one table.
            (MIB, NONE, Frames::new(SMALL, 64, PageSize::Size4K)),
            (MIB + 64 * PAGE_SIZE, READONLY, Frames::new(Hpa(SMALL.0 + MIB), 32, PageSize::Size4K)),
            // Three huge pages, and pages that cannot be huge: the memslot is not aligned with
            // them.
            (4 * MIB, NONE, Frames::new(LARGE, 3 * 512, PageSize::Size2M)),
            (10 * MIB + PAGE_SIZE, NONE, Frames::new(LARGE_ALSO, 2 * 512, PageSize::Size2M)),
        ];
        if world.has_1g_pages() {
            kinds.push((GIB, NONE, Frames::new(HUGE, 512 * 512, PageSize::Size1G)));
        }
        let kinds: Vec<Kind> = kinds
            .into_iter()
            .map(|(offset, flags, frames)| Kind { offset, flags, pages: pages(&frames), frames })
            .collect();
        for kind in &kinds {
            for &page in &kind.pages {
                fill(world.arena(), &kind.frames, page);
            }
        }
        let mut rng = SmallRng::seed_from_u64(seed);
        for _ in 0..NR_STEPS {
            step(&mut world, &mut rng, &kinds);
        }
        for number in 0..kinds.len() as u32 {
            if world.slots.get(&number).is_some_and(|slot| slot.flags.contains(LOG)) {
                world.harvest(number);
            }
        }
        let Counts { completed, faults, exits, dirty, .. } = world.counts;
        assert!(completed > 500 && faults > 500 && exits > 50 && dirty > 50, "too little happened: {}", world.counts);
        println!("{}", world.counts);
    }
}

/// Does one random operation.
fn step(world: &mut World, rng: &mut SmallRng, kinds: &[Kind]) {
    let index = rng.random_range(0..kinds.len());
    let (number, kind) = (index as u32, &kinds[index]);
    let somewhere = Gpa(AREAS[rng.random_range(0..AREAS.len())] + kind.offset);
    let slot = world.slots.get(&number).map(|slot| (slot.gpa, slot.flags));
    match (rng.random_range(0..100), slot) {
        (0..4, None) | (85..100, None) => {
            let log = if rng.random_bool(0.5) { LOG } else { NONE };
            world.create(number, kind.flags | log, somewhere, &kind.frames);
        }
        (0..1, Some(_)) => world.delete(number),
        (1..3, Some((_, flags))) => world.change(number, somewhere, flags),
        (3..4, Some((_, flags))) => world.change(number, somewhere, flags ^ LOG),
        (4..7, Some((gpa, flags))) => world.change(number, gpa, flags ^ LOG),
        (7..14, Some((_, flags))) if flags.contains(LOG) => world.harvest(number),
        (14..16, _) => {
            // Reads from now on get another answer.
            kind.frames.read_gives_writable.fetch_xor(true, Ordering::Relaxed);
        }
        (16..18, _) => world.flush(),
        _ => {
            let mut start = slot.map_or(somewhere, |(gpa, _)| gpa);
            if rng.random_bool(0.05) {
                start = somewhere;
            }
            let page = kind.pages[rng.random_range(0..kind.pages.len())];
            let access = ACCESSES[rng.random_range(0..ACCESSES.len())];
            let offset = match access {
                Access::Execute | Access::ExecuteUser => EXECUTED,
                Access::Read | Access::Write => WORDS[rng.random_range(0..WORDS.len())],
            };
            // The model checks the result.
            let _ = world.access(Gpa(start.0 + page * PAGE_SIZE + offset), access);
        }
    }
}
