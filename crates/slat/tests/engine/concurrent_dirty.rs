//! The promise of the dirty log, with guests that write while a host harvests. No write is missing
//! for longer than one harvest. When all guests have stopped, one harvest is exact. For every way
//! to find writes, with every locking.
//!
//! Frames have contents here: a count of the writes to each page. A guest's write is an access (see
//! `common::guest`): it finds a writable translation, sets D if it is clear, and then counts. So it
//! may come long after the walk, but not after a flush that began later than the walk has returned.
//! The host copies the counts of the pages that a harvest reports, after the harvest has returned.
//!
//! A count from before harvest k must be in the copy after harvest k+1. This holds if the faults
//! (and moves, and other calls that mark) under way at harvest k have returned before harvest k+1.
//! A vCPU that was stopped between restoring write access and marking delays the mark for as long
//! as it is stopped, and another vCPU may have written meanwhile.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::guest::{Guest, Stop};
use crate::common::log::{
    HUGE_PAGE_LOGGINGS, LOCKINGS, LOG, MANUAL_PROTECTS, NO_FLAGS, dirty_trackings, pages_of, write_as_hardware,
};
use crate::common::random::Random;
use crate::common::{MIB, TestHost, Translation, assert_no_table_is_left, change, region, translate};
use slat::dirty::ManualProtect;
use slat::error::LogError;
use slat::format::Format;
use slat::tables::AccessTracking;
use slat::{Access, Config, Exit, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, PAGE_SIZE, PageSize, Vm};

/// How long each configuration runs.
const RUN: Duration = Duration::from_millis(30);

const SLOT: u32 = 3;
/// The memslot begins in the middle of a block and ends in the middle of another.
const START: u64 = 2 * MIB - 100 * PAGE_SIZE;
const NR_PAGES: u64 = 100 + 512 + 61;
/// The pages of a memslot whose log has more than one word of its summary.
const MANY_PAGES: u64 = 2 * 4096 + 200;
/// Congruent to the first page of the memslot, so that a block can be mapped by 2 MiB.
const FIRST_PFN: u64 = (1 << 30) + 512 - 100;

/// Each way to find writes in format `F`, with each locking. The other options rotate, beginning
/// with `first`, so that each test has another mixture.
fn configs<F: Format>(first: usize) -> impl Iterator<Item = Config> {
    let all = LOCKINGS.into_iter().flat_map(|locking| dirty_trackings::<F>().map(move |tracking| (locking, tracking)));
    (first..).zip(all).map(|(index, (locking, tracking))| {
        Config::default()
            .with_locking(locking)
            .with_dirty_tracking(tracking)
            .with_manual_protect(MANUAL_PROTECTS[index % 3])
            .with_huge_page_logging(HUGE_PAGE_LOGGINGS[index / 3 % 2])
    })
}

/// All of [`configs`] if directory entries can be protected. Of other formats the `turn`th.
fn configs_in_turn<F: Format>(first: usize, turn: usize) -> Vec<Config> {
    let all: Vec<Config> = configs::<F>(first).collect();
    if F::GENERATION != 0 { all } else { vec![all[turn % all.len()]] }
}

/// A test for each format and the configurations of [`configs`], from `$first` on.
macro_rules! each_tracking {
    ($name:ident, $test:ident, $first:expr) => {
        #[test]
        fn $name() {
            let mut turn = $first;
            slat::for_each_format!(F => {
                configs_in_turn::<F>($first, turn).into_iter().for_each($test::<F>);
                turn += 5;
            });
        }
    };
}

/// A VM with a memslot that logs, and the contents of its memory.
struct World<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    config: Config,
    nr_pages: u64,
    /// Writes to each page.
    contents: Vec<AtomicU64>,
    /// The host's copy of them.
    copy: Vec<AtomicU64>,
    stop: AtomicBool,
}

impl<F: Format> World<F> {
    fn new(config: Config, nr_pages: u64) -> World<F> {
        let vm = Arc::new(Vm::new(TestHost::default(), config).unwrap());
        let counts = || (0..nr_pages).map(|_| AtomicU64::new(0)).collect();
        vm.set_user_memory_region(region(SLOT, START, nr_pages * PAGE_SIZE, FIRST_PFN, PageSize::Size2M)).unwrap();
        World { vm, config, nr_pages, contents: counts(), copy: counts(), stop: AtomicBool::new(false) }
    }

    /// A world whose memslot logs.
    fn logging(config: Config, nr_pages: u64) -> World<F> {
        let world = World::new(config, nr_pages);
        world.set(LOG, START);
        world
    }

    fn set(&self, flags: MemoryRegionFlags, start: u64) {
        self.vm.set_user_memory_region(change(SLOT, flags, start, self.nr_pages * PAGE_SIZE)).unwrap();
    }

    /// Writes all over the space that the memslot may cover, until it is stopped.
    fn write_until_stopped(&self, mut guest: Guest<F>, seed: u64) {
        let mut random = Random::new(seed);
        while !self.stop.load(Ordering::Relaxed) {
            let number = random.next();
            // A few pages are written all the time, the others now and then.
            let page = if number & 3 != 0 { (number >> 8) % 16 * 40 } else { (number >> 8) % (self.nr_pages + 2) };
            let _ = self.write(&mut guest, page);
        }
    }

    /// Tries to write page `page` of the space from `START` on. Returns whether it was written,
    /// which a fault does not do.
    fn write(&self, guest: &mut Guest<F>, page: u64) -> Result<(), Option<Exit>> {
        let gpa = Gpa(START + page * PAGE_SIZE);
        match guest.try_access(gpa, Access::Write, |found| self.write_through(gpa, found)) {
            Ok(true) => Ok(()),
            // The leaf has changed meanwhile.
            Ok(false) => Err(None),
            Err(exit) => Err(exit),
        }
    }

    /// What a CPU does with a writable translation.
    fn write_through(&self, gpa: Gpa, found: Translation) -> bool {
        // A CPU that has D cached does not read the PTE again. Where CPUs set no D, this holds for
        // all.
        let is_dirty = self.config.access_tracking == AccessTracking::Faults || found.pte.0 & F::DIRTY == F::DIRTY;
        if !is_dirty && !write_as_hardware(&self.vm, gpa.gfn(), found) {
            return false;
        }
        // The write goes to the frame, wherever the memslot is.
        self.contents[(found.pfn.0 - FIRST_PFN) as usize].fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Harvests and copies what the log reports. Returns the number of pages.
    fn harvest(&self) -> Result<u64, LogError> {
        self.harvest_pages(0..self.nr_pages, |_| true)
    }

    /// Harvests, in any mode, those of `pages` for which `is_mine` holds, and copies what the log
    /// reports.
    fn harvest_pages(&self, pages: Range<u64>, is_mine: impl Fn(u64) -> bool) -> Result<u64, LogError> {
        let nr_pages = pages.end - pages.start;
        let mut bitmap = vec![0; nr_pages.div_ceil(64) as usize];
        let nr_set = self.vm.get_dirty_log_range(SLOT, pages.start, nr_pages, &mut bitmap)?;
        let mut found = pages_of(&bitmap, pages.start);
        assert_eq!(nr_set, found.len() as u64);
        if self.config.manual_protect != ManualProtect::Disabled {
            found.retain(|page| is_mine(*page));
            let bits: Vec<u64> = found.iter().map(|page| page - pages.start).collect();
            // Before the pages are copied.
            self.vm.clear_dirty_log(SLOT, pages.start, nr_pages, &crate::common::log::mask_of(&bits, bitmap.len()))?;
        }
        self.copy_pages(found.iter().copied());
        Ok(found.len() as u64)
    }

    fn copy_pages(&self, pages: impl Iterator<Item = u64>) {
        for page in pages {
            let now = self.contents[page as usize].load(Ordering::SeqCst);
            self.copy[page as usize].fetch_max(now, Ordering::SeqCst);
        }
    }

    fn contents_now(&self) -> Vec<u64> {
        self.contents.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }

    /// Harvests for a while; each count must be copied by the second harvest after it.
    fn harvest_and_check(&self) {
        for_a_while(|| {
            self.harvest().unwrap();
            self.check_two_harvests(0..self.nr_pages);
        });
    }

    fn check_two_harvests(&self, pages: Range<u64>) {
        let before = self.contents_now();
        self.harvest_pages(pages.clone(), |_| true).unwrap();
        self.vm.host().gate.wait_for_faults();
        self.harvest_pages(pages.clone(), |_| true).unwrap();
        self.assert_copied(pages, &before);
    }

    fn assert_copied(&self, pages: Range<u64>, counts: &[u64]) {
        for page in pages {
            let (count, copied) = (counts[page as usize], self.copy[page as usize].load(Ordering::SeqCst));
            let config = self.config;
            assert!(copied >= count, "{config:?}: page {page} was written {count} times, {copied} are copied");
        }
    }

    /// No guest writes any more: one harvest reports all, and a second nothing.
    fn assert_final_harvest_is_exact(&self) {
        self.harvest().unwrap();
        self.assert_copied(0..self.nr_pages, &self.contents_now());
        assert_eq!(self.harvest(), Ok(0), "{:?}", self.config);
        let at = |page: u64| translate(&self.vm, Gpa(START + page * PAGE_SIZE));
        for page in 0..=self.nr_pages {
            let Some(found) = at(page) else { continue };
            // Writes fault, or set a clear bit.
            let sets_bit = found.level == Level::L4K && found.pte.0 & F::DIRTY == 0;
            let by_bits = !matches!(
                self.config.dirty_tracking,
                slat::dirty::DirtyTracking::WriteProtect | slat::dirty::DirtyTracking::WriteProtectLeaves
            );
            assert!(
                !found.writable || (by_bits && sets_bit),
                "{:?}: page {page} may be written unseen: {found:x?}",
                self.config
            );
        }
        // From here on the log reports exactly what is written.
        let mut guest = Guest::new(&self.vm);
        let mut expected: Vec<u64> = Vec::new();
        for page in [0, 1, 63, 64, 99, 100, 101, 611, 612, self.nr_pages - 1] {
            while self.write(&mut guest, page).is_err() {}
            let level = at(page).map_or(Level::L4K, |found| found.level);
            let block = Gpa(START + page * PAGE_SIZE).gfn().block(level);
            expected.extend((0..self.nr_pages).filter(|page| block.contains(Gfn(START / PAGE_SIZE + page))));
        }
        expected.sort_unstable();
        expected.dedup();
        let mut bitmap = vec![0; self.nr_pages.div_ceil(64) as usize];
        assert_eq!(self.vm.get_dirty_log(SLOT, &mut bitmap), Ok(expected.len() as u64));
        assert_eq!(pages_of(&bitmap, 0), expected, "{:?}", self.config);
        drop(guest);
        self.vm.set_user_memory_region(change(SLOT, NO_FLAGS, 0, 0)).unwrap();
        assert_no_table_is_left(&self.vm);
    }

    /// Runs `host` beside `nr_guests` writing guests.
    fn beside_guests(&self, nr_guests: u64, host: impl FnOnce()) {
        std::thread::scope(|scope| {
            for index in 0..nr_guests {
                let guest = Guest::new(&self.vm);
                scope.spawn(move || self.write_until_stopped(guest, index));
            }
            let _stop = Stop(&self.stop);
            host();
        });
    }
}

fn for_a_while(mut turn: impl FnMut()) {
    let start = Instant::now();
    while start.elapsed() < RUN {
        turn();
    }
}

each_tracking!(a_write_is_reported_by_the_next_harvest_or_the_one_after, one_harvester, 0);
fn one_harvester<F: Format>(config: Config) {
    for nr_guests in [1, 3] {
        let world = World::<F>::logging(config, NR_PAGES);
        world.beside_guests(nr_guests, || world.harvest_and_check());
        world.assert_final_harvest_is_exact();
    }
}

each_tracking!(a_write_of_one_of_64_guests_is_reported_by_the_next_harvest_or_the_one_after, many_guests, 1);
fn many_guests<F: Format>(config: Config) {
    let world = World::<F>::logging(config, NR_PAGES);
    world.beside_guests(64, || world.harvest_and_check());
    world.assert_final_harvest_is_exact();
}

each_tracking!(logging_that_is_turned_on_beside_writers_loses_nothing, turned_on, 2);
fn turned_on<F: Format>(config: Config) {
    let world = World::<F>::logging(config, NR_PAGES);
    world.beside_guests(8, || {
        for_a_while(|| {
            world.set(NO_FLAGS, START);
            std::thread::yield_now();
            world.set(LOG, START);
            // Pages written before logging begins are copied, as a migration does.
            world.copy_pages(0..NR_PAGES);
            world.check_two_harvests(0..NR_PAGES);
        });
    });
    world.assert_final_harvest_is_exact();
}

each_tracking!(harvests_beside_logging_that_is_turned_off_and_on_are_refused_or_right, flags_change, 3);
fn flags_change<F: Format>(config: Config) {
    let world = World::<F>::logging(config, NR_PAGES);
    world.beside_guests(4, || {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for_a_while(|| match world.harvest() {
                        Ok(_) => {}
                        Err(error) => assert_eq!(error, LogError::NotLogging { slot: SLOT }),
                    });
                });
            }
            for_a_while(|| {
                world.set(NO_FLAGS, START);
                std::thread::yield_now();
                world.set(LOG, START);
            });
        });
        world.copy_pages(0..NR_PAGES);
        world.check_two_harvests(0..NR_PAGES);
    });
    world.assert_final_harvest_is_exact();
}

each_tracking!(two_harvesters_get_each_page_between_them, two_harvesters, 4);
fn two_harvesters<F: Format>(config: Config) {
    let world = World::<F>::logging(config, NR_PAGES);
    world.beside_guests(8, || {
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for_a_while(|| {
                        world.harvest().unwrap();
                    });
                });
            }
        });
    });
    world.assert_final_harvest_is_exact();
}

each_tracking!(concurrent_harvesters_of_adjacent_ranges_are_exact, ranges, 5);
fn ranges<F: Format>(config: Config) {
    let world = World::<F>::logging(config, MANY_PAGES);
    world.beside_guests(4, || {
        std::thread::scope(|scope| {
            // The borders lie within words of the summary (64 words of 64 pages), and within
            // page-table pages.
            for pages in [0..64, 64..33 * 64, 33 * 64..65 * 64, 65 * 64..MANY_PAGES] {
                let world = &world;
                scope.spawn(move || for_a_while(|| world.check_two_harvests(pages.clone())));
            }
        });
    });
    world.assert_final_harvest_is_exact();
}

each_tracking!(two_clears_by_masks_lose_nothing, masks, 6);
fn masks<F: Format>(config: Config) {
    // Getting must not clear: otherwise the masks would find nothing.
    let manual_protect = match config.manual_protect {
        ManualProtect::Disabled => ManualProtect::Enabled,
        manual_protect => manual_protect,
    };
    let world = World::<F>::logging(config.with_manual_protect(manual_protect), NR_PAGES);
    world.beside_guests(8, || {
        std::thread::scope(|scope| {
            for parity in 0..2 {
                let world = &world;
                scope.spawn(move || {
                    for_a_while(|| {
                        world.harvest_pages(0..NR_PAGES, |page| page % 2 == parity).unwrap();
                    });
                });
            }
        });
        // A last one, alone.
        world.check_two_harvests(0..NR_PAGES);
    });
    world.assert_final_harvest_is_exact();
}

each_tracking!(writes_of_the_vmm_are_reported, marked, 7);
fn marked<F: Format>(config: Config) {
    let world = World::<F>::logging(config, NR_PAGES);
    world.beside_guests(2, || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // A call that marks.
                let mut vmm = Guest::new(&world.vm);
                let mut random = Random::new(77);
                while !world.stop.load(Ordering::Relaxed) {
                    let first = random.next() % NR_PAGES;
                    let nr_pages = (1 + random.next() % 70).min(NR_PAGES - first);
                    vmm.during_fault(|_| {
                        for page in first..first + nr_pages {
                            world.contents[page as usize].fetch_add(1, Ordering::SeqCst);
                        }
                        world.vm.mark_dirty(SLOT, first, nr_pages).unwrap();
                    });
                }
            });
            world.harvest_and_check();
            world.stop.store(true, Ordering::SeqCst);
        });
    });
    world.assert_final_harvest_is_exact();
}

each_tracking!(invalidations_and_agings_beside_writers_lose_no_mark, invalidated, 8);
fn invalidated<F: Format>(config: Config) {
    let tracking = match config.dirty_tracking {
        slat::dirty::DirtyTracking::WriteProtect | slat::dirty::DirtyTracking::WriteProtectLeaves => {
            AccessTracking::Faults
        }
        _ => AccessTracking::AccessedBit,
    };
    let world = World::<F>::logging(config.with_access_tracking(tracking), NR_PAGES);
    world.beside_guests(3, || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Zapping a dirty leaf marks its page, as a fault does.
                let mut host = Guest::new(&world.vm);
                let mut random = Random::new(99);
                for_a_while(|| {
                    let (first, nr_pages) = (random.next() % NR_PAGES, 1 + random.next() % 600);
                    let range = GfnRange::new(Gfn(START / PAGE_SIZE + first), nr_pages);
                    host.during_fault(|_| match random.next() % 3 {
                        0 => drop(world.vm.age_range(range).unwrap()),
                        _ => drop(world.vm.invalidate_range(range).unwrap()),
                    });
                    std::thread::yield_now();
                });
            });
            world.harvest_and_check();
        });
    });
    world.assert_final_harvest_is_exact();
}

each_tracking!(a_slot_that_is_moved_beside_writers_and_harvests_loses_no_mark, moved, 9);
fn moved<F: Format>(config: Config) {
    let world = World::<F>::logging(config, NR_PAGES);
    world.beside_guests(4, || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // A move marks pages, as a fault does.
                let mut mover = Guest::new(&world.vm);
                for_a_while(|| {
                    mover.during_fault(|_| world.set(LOG, START + PAGE_SIZE));
                    std::thread::yield_now();
                    mover.during_fault(|_| world.set(LOG, START));
                    std::thread::yield_now();
                });
            });
            world.harvest_and_check();
        });
    });
    world.assert_final_harvest_is_exact();
}
