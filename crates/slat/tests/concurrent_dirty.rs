//! The promise of the dirty log, with guests that write while a host harvests: nothing is lost for longer than one
//! harvest, and when all have stopped one harvest is exact.
//!
//! The frames have contents here: for each page a count of the writes to it. A guest's write is an access (see
//! `common::guest`) that finds a writable translation and then counts; so it may come long after the walk, but not after
//! a flush that began later than the walk has returned. The host copies the counts of the pages that a harvest reports,
//! after the harvest has returned. A count that was there before harvest k, and is not in the copy when harvest k+1 has
//! been copied, is lost, if the faults (and moves) that were under way at harvest k have returned before harvest k+1: a vCPU that was
//! stopped between giving the right to write and marking delays the mark for as long as it is stopped, and another vCPU
//! may have written meanwhile.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::guest::Guest;
use common::{MIB, TestHost, assert_no_table_is_left, change, each, region, translate};
use slat::{Access, Config, Error, Exit, Format, Gpa, Locking, MemoryRegionFlags, PAGE_SIZE, PageSize, Vm};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const RUN: Duration = Duration::from_millis(250);

const SLOT: u32 = 3;
/// The slot begins in the middle of a block and ends in the middle of another.
const START: u64 = 2 * MIB - 100 * PAGE_SIZE;
const NR_PAGES: usize = 100 + 512 + 61;
const SIZE: u64 = NR_PAGES as u64 * PAGE_SIZE;
const NR_WORDS: usize = NR_PAGES.div_ceil(64);
/// Congruent to the slot's first page, so that a block can be mapped by 2 MiB.
const FIRST_PFN: u64 = (1 << 30) + 512 - 100;

/// A VM with a slot that logs, and what is in its memory.
struct World<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    /// Writes to each page.
    contents: Vec<AtomicU64>,
    /// What the host has copied of that.
    copy: Vec<AtomicU64>,
    stop: AtomicBool,
}

impl<F: Format> World<F> {
    fn new(locking: Locking) -> World<F> {
        let vm = Arc::new(Vm::new(TestHost::default(), Config::with_locking(locking)).unwrap());
        let counts = || (0..NR_PAGES).map(|_| AtomicU64::new(0)).collect();
        vm.set_user_memory_region(region(SLOT, START, SIZE, FIRST_PFN, PageSize::Size2M)).unwrap();
        World { vm, contents: counts(), copy: counts(), stop: AtomicBool::new(false) }
    }

    fn set(&self, flags: MemoryRegionFlags, start: u64) {
        self.vm.set_user_memory_region(change(SLOT, flags, start, SIZE)).unwrap();
    }

    /// Writes all over the space in which the slot may be, until told to stop.
    fn write_until_stopped(&self, mut guest: Guest<F>, seed: u64) {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        while !self.stop.load(Ordering::Relaxed) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // A few pages are written all the time, the others now and then.
            let page = if state & 3 != 0 { (state >> 8) % 16 * 40 } else { (state >> 8) % (NR_PAGES as u64 + 2) };
            let _ = self.write(&mut guest, page);
        }
    }

    /// Tries to write page `page` of the space from `START` on. Says whether it was written; a fault does not count.
    fn write(&self, guest: &mut Guest<F>, page: u64) -> Result<(), Option<Exit>> {
        // The frame is what is written, wherever the slot is.
        guest.try_access(Gpa(START + page * PAGE_SIZE), Access::Write, |found| {
            self.contents[(found.pfn.0 - FIRST_PFN) as usize].fetch_add(1, Ordering::SeqCst);
        })
    }

    /// Harvests and copies what is reported. Returns the number of pages.
    fn harvest(&self) -> Result<u64, Error> {
        let mut bitmap = [0; NR_WORDS];
        let nr_pages = self.vm.get_dirty_log(SLOT, &mut bitmap)?;
        assert_eq!(nr_pages, bitmap.iter().map(|word| u64::from(word.count_ones())).sum());
        for page in (0..NR_WORDS * 64).filter(|page| bitmap[page / 64] >> (page % 64) & 1 == 1) {
            let now = self.contents[page].load(Ordering::SeqCst);
            self.copy[page].fetch_max(now, Ordering::SeqCst);
        }
        Ok(nr_pages)
    }

    fn contents_now(&self) -> Vec<u64> {
        self.contents.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }

    /// Harvests for a while; each count must be copied by the second harvest after it.
    fn harvest_and_check(&self) {
        let start = Instant::now();
        while start.elapsed() < RUN {
            self.harvest().unwrap();
            self.check_two_harvests();
        }
    }

    fn check_two_harvests(&self) {
        let before = self.contents_now();
        self.harvest().unwrap();
        self.vm.host().gate.wait_for_faults();
        self.harvest().unwrap();
        self.assert_copied(&before);
    }

    fn assert_copied(&self, counts: &[u64]) {
        for (page, &count) in counts.iter().enumerate() {
            let copied = self.copy[page].load(Ordering::SeqCst);
            assert!(copied >= count, "page {page} was written {count} times long ago, {copied} are copied");
        }
    }

    /// When nobody writes any more: one harvest brings all, and a second one nothing.
    fn assert_final_harvest_is_exact(&self) {
        self.harvest().unwrap();
        self.assert_copied(&self.contents_now());
        assert_eq!(self.harvest(), Ok(0));
        for page in 0..=NR_PAGES as u64 {
            let found = translate(&self.vm, Gpa(START + page * PAGE_SIZE));
            assert!(found.is_none_or(|found| !found.writable), "page {page} is writable, and was not reported");
        }
        // From here on exactly what is written is reported.
        let mut guest = Guest::new(&self.vm);
        let written = [0, 1, 63, 64, 99, 100, 101, 611, 612, NR_PAGES - 1];
        for page in written {
            while self.write(&mut guest, page as u64).is_err() {}
        }
        let mut bitmap = [0; NR_WORDS];
        assert_eq!(self.vm.get_dirty_log(SLOT, &mut bitmap), Ok(written.len() as u64));
        assert!((0..NR_PAGES).all(|page| (bitmap[page / 64] >> (page % 64) & 1 == 1) == written.contains(&page)));
        drop(guest);
        self.vm.set_user_memory_region(change(SLOT, NO_FLAGS, 0, 0)).unwrap();
        assert_no_table_is_left(&self.vm);
    }

    /// Runs `host` beside `nr_guests` guests that write.
    fn beside_guests(&self, nr_guests: u64, host: impl FnOnce()) {
        std::thread::scope(|scope| {
            for index in 0..nr_guests {
                let guest = Guest::new(&self.vm);
                scope.spawn(move || self.write_until_stopped(guest, index));
            }
            /// Stops the guests also when a check has failed.
            struct Stop<'a>(&'a AtomicBool);
            impl Drop for Stop<'_> {
                fn drop(&mut self) {
                    self.0.store(true, Ordering::SeqCst);
                }
            }
            let _stop = Stop(&self.stop);
            host();
        });
    }
}

each!(a_write_is_reported_by_the_next_harvest_or_the_one_after, one_harvester);
fn one_harvester<F: Format>(locking: Locking) {
    for nr_guests in [2, 64] {
        let world = World::<F>::new(locking);
        world.set(LOG, START);
        world.beside_guests(nr_guests, || world.harvest_and_check());
        world.assert_final_harvest_is_exact();
    }
}

each!(logging_that_is_turned_on_beside_writers_loses_nothing, turned_on);
fn turned_on<F: Format>(locking: Locking) {
    let world = World::<F>::new(locking);
    world.beside_guests(8, || {
        let start = Instant::now();
        while start.elapsed() < RUN {
            world.set(NO_FLAGS, START);
            std::thread::yield_now();
            world.set(LOG, START);
            // What was written before logging is copied whole, as a migration does.
            for page in 0..NR_PAGES {
                world.copy[page].fetch_max(world.contents[page].load(Ordering::SeqCst), Ordering::SeqCst);
            }
            world.check_two_harvests();
        }
    });
    world.assert_final_harvest_is_exact();
}

each!(of_two_harvesters_each_gets_a_part_and_nothing_is_lost, two_harvesters);
fn two_harvesters<F: Format>(locking: Locking) {
    let world = World::<F>::new(locking);
    world.set(LOG, START);
    world.beside_guests(8, || {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let start = Instant::now();
                    while start.elapsed() < RUN {
                        world.harvest().unwrap();
                    }
                });
            }
        });
    });
    world.assert_final_harvest_is_exact();
}

each!(a_slot_that_is_moved_beside_writers_and_harvests_loses_no_mark, moved);
fn moved<F: Format>(locking: Locking) {
    for nr_guests in [2, 8] {
        let world = World::<F>::new(locking);
        world.set(LOG, START);
        world.beside_guests(nr_guests, || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    // A move marks pages, as a fault does.
                    let mut mover = Guest::new(&world.vm);
                    let start = Instant::now();
                    while start.elapsed() < RUN {
                        mover.during_fault(|_| world.set(LOG, START + PAGE_SIZE));
                        std::thread::yield_now();
                        mover.during_fault(|_| world.set(LOG, START));
                        std::thread::yield_now();
                    }
                });
                world.harvest_and_check();
            });
        });
        world.assert_final_harvest_is_exact();
    }
}
