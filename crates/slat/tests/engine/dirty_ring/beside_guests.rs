//! Harvests and resets of rings beside guests that write. The world has contents as in
//! `concurrent_dirty`.

use super::*;
use crate::common::random::Random;
use crate::common::wait_until;

const SLOT: u32 = 3;
/// The memslot begins in the middle of a block and ends in the middle of another.
const START: u64 = 2 * MIB - 100 * PAGE_SIZE;
const NR_PAGES: usize = 100 + 512 + 61;
const SIZE: u64 = NR_PAGES as u64 * PAGE_SIZE;
/// Congruent to the first page of the memslot, so that a block can be mapped by 2 MiB.
const FIRST_PFN: u64 = (1 << 30) + 512 - 100;

/// A VM with a memslot and rings, and the contents of its memory.
struct World<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    /// Writes to each page.
    contents: Vec<AtomicU64>,
    /// What hosts have copied of that.
    copy: Vec<AtomicU64>,
    nr_full: AtomicU64,
    stop: AtomicBool,
}

impl<F: Format> World<F> {
    fn new(config: Config, nr_entries: u32) -> World<F> {
        let vm = vm_with(config, nr_entries);
        let counts = || (0..NR_PAGES).map(|_| AtomicU64::new(0)).collect();
        vm.set_user_memory_region(region(SLOT, START, SIZE, FIRST_PFN, PageSize::Size2M)).unwrap();
        World { vm, contents: counts(), copy: counts(), nr_full: AtomicU64::new(0), stop: AtomicBool::new(false) }
    }

    fn set(&self, flags: MemoryRegionFlags) {
        self.vm.set_user_memory_region(change(SLOT, flags, START, SIZE)).unwrap();
    }

    fn write_until_stopped(&self, mut guest: Guest<F>, seed: u64) {
        let _stop = Stop(&self.stop);
        let mut random = Random::new(seed);
        while !self.stop.load(Ordering::Relaxed) {
            let page = random.below(NR_PAGES as u64);
            let result = guest.try_access(Gpa(START + page * PAGE_SIZE), Access::Write, |found| {
                self.contents[(found.pfn.0 - FIRST_PFN) as usize].fetch_add(1, Ordering::SeqCst);
            });
            match result {
                Ok(()) | Err(None) => {}
                Err(Some(Exit::DirtyRingFull)) => {
                    self.nr_full.fetch_add(1, Ordering::Relaxed);
                    std::thread::yield_now();
                }
                Err(Some(exit)) => panic!("{exit:?}"),
            }
        }
    }

    fn copy_page(&self, page: u64) {
        let page = page as usize;
        self.copy[page].fetch_max(self.contents[page].load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// Harvests, resets and copies. Returns the number of pages.
    fn migrate(&self) -> u64 {
        let pages = harvest(&self.vm);
        self.vm.reset_dirty_rings().unwrap();
        for page in &pages {
            assert_eq!(page.slot, SLOT);
            self.copy_page(page.page);
        }
        pages.len() as u64
    }

    fn contents_now(&self) -> Vec<u64> {
        self.contents.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }

    fn assert_copied(&self, counts: &[u64]) {
        for (page, &count) in counts.iter().enumerate() {
            let copied = self.copy[page].load(Ordering::SeqCst);
            assert!(copied >= count, "page {page} was written {count} times long ago, {copied} are copied");
        }
    }

    /// What is written by now is copied after the second time, if the faults under way have
    /// returned by then.
    fn migrate_twice(&self) {
        let before = self.contents_now();
        self.migrate();
        self.vm.host().gate.wait_for_faults();
        self.migrate();
        self.assert_copied(&before);
    }

    /// No guest writes any more: one harvest of all rings reports all.
    fn assert_final_harvest_is_exact(&self) {
        self.migrate();
        self.assert_copied(&self.contents_now());
        assert_eq!(self.migrate(), 0);
        for page in 0..NR_PAGES as u64 {
            let found = translate(&self.vm, Gpa(START + page * PAGE_SIZE));
            assert!(found.is_none_or(|found| !found.writable), "page {page} is writable, and was not reported");
        }
        end(&self.vm, &[SLOT]);
    }

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

fn protections(locking: Locking) -> [Config; 2] {
    [DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves]
        .map(|protection| Config::default().with_locking(locking).with_dirty_tracking(protection))
}

each!(a_write_is_in_the_next_harvest_or_the_one_after, one_migration);
fn one_migration<F: Format>(locking: Locking) {
    for config in protections(locking) {
        for nr_entries in [256, 4096] {
            let world = World::<F>::new(config, nr_entries);
            world.set(LOG);
            world.beside_guests(4, || {
                let start = Instant::now();
                while start.elapsed() < RUN {
                    world.migrate_twice();
                }
            });
            world.assert_final_harvest_is_exact();
        }
    }
}

each!(two_threads_that_harvest_and_reset_lose_nothing, two_migrations);
fn two_migrations<F: Format>(locking: Locking) {
    for config in protections(locking) {
        let world = World::<F>::new(config, 256);
        world.set(LOG);
        world.beside_guests(4, || {
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        let start = Instant::now();
                        while start.elapsed() < RUN {
                            world.migrate();
                        }
                    });
                }
            });
        });
        world.assert_final_harvest_is_exact();
    }
}

each!(logging_that_is_turned_on_and_off_beside_writers_loses_nothing, turned_on);
fn turned_on<F: Format>(locking: Locking) {
    for config in protections(locking) {
        let world = World::<F>::new(config, 1024);
        world.beside_guests(4, || {
            let start = Instant::now();
            while start.elapsed() < RUN {
                world.set(NO_FLAGS);
                std::thread::yield_now();
                world.set(LOG);
                // Pages written before logging begins are copied, as a migration does.
                (0..NR_PAGES as u64).for_each(|page| world.copy_page(page));
                world.migrate_twice();
            }
        });
        world.assert_final_harvest_is_exact();
    }
}

#[test]
fn a_full_ring_stops_its_vcpu_alone() {
    let world = World::<Npt>::new(Config::default(), 256);
    world.set(LOG);
    world.beside_guests(3, || {
        // Each guest fills its ring if it goes on writing.
        wait_until("rings that are full", &world.stop, || world.nr_full.load(Ordering::Relaxed) >= 1000);
        let entries: u64 = world.vm.dirty_rings().map(|ring| u64::from(ring.is_soft_full())).sum();
        assert!(entries >= 1);
        world.migrate_twice();
    });
    world.assert_final_harvest_is_exact();
}
