//! Huge pages on many threads. 1 GiB is split, recovered, invalidated in whole and in part, logged,
//! and replaced by two halves, all beside guests that read and write. No access reaches a frame
//! that the host has freed. Every write is reported and logged, the counts are exact, and no
//! page-table page is leaked.
//!
//! Only some pages are accessed and moved: the hot ones, in blocks that lie apart and next to each
//! other. Frames are numbers, each used once, with a byte of state each. For the log, each hot page
//! has a count of its writes. The host copies those of the pages that a harvest reports, as in
//! `concurrent_dirty`.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock, Mutex, RwLock};
use std::time::{Duration, Instant};

use crate::common::broken::Broken;
use crate::common::guest::Guest;
use crate::common::log::{LOG, NO_FLAGS, dirty_trackings, write_as_hardware};
use crate::common::random::Random;
use crate::common::{
    Frame, TestBacking, TestHost, Translation, Writes, assert_no_table_is_left, change, set_accessed_and_dirty,
    translate,
};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::format::{Format, Npt};
use slat::tables::AccessTracking;
use slat::{Access, Config, Exit, Gfn, GfnRange, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

/// How long each configuration runs.
const RUN: Duration = Duration::from_millis(120);
/// Even on a slow machine, all that ends by itself has ended by then.
const HANG: Duration = Duration::from_secs(1800);

const BIG: u64 = 512;
const HUGE: u64 = 512 * 512;
/// The slots are the second GiB of the guest's memory.
const FIRST: u64 = HUGE;
/// Guest frames that were ever backed; after so many the memslots are not replaced any more.
const MAX_GENERATIONS: u64 = 256;
/// First frame of those that pages are moved to, and how many there are; then no page is moved any
/// more.
const MOVED: u64 = 1 << 30;
const MAX_MOVED: u64 = 1 << 16;

/// The host has freed the frame.
const DEAD: u8 = 1;
/// The guest has written it.
const WRITTEN: u8 = 2;
/// The write was reported to the host.
const REPORTED: u8 = 4;

/// The hot pages, numbered from the first slot's start.
static HOT: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let blocks = [0, 1, 2, 100, 254, 255, 256, 257, 400, 510, 511];
    let pages = [0, 1, 2, 3, 63, 64, 255, 300, 509, 510, 511];
    blocks.into_iter().flat_map(|block| pages.map(|page| block * BIG + page)).collect()
});

/// The hot pages of those from `first` on, by their index.
fn hot_in(first: u64, nr_pages: u64) -> std::ops::Range<usize> {
    let index = |page: u64| HOT.partition_point(|hot| *hot < page);
    index(first)..index(first + nr_pages)
}

/// A memslot: the whole GiB or one half.
#[derive(Clone)]
struct Part {
    id: u32,
    first: u64,
    nr_pages: u64,
    backing: Arc<TestBacking>,
}

/// The memslots, and the generation number of their frames.
#[derive(Clone)]
struct Layout {
    generation: u64,
    parts: Vec<Part>,
}

impl Layout {
    fn new(generation: u64) -> Layout {
        let nr_parts = 1 + generation % 2;
        let nr_pages = HUGE / nr_parts;
        let part = |index| {
            let first = index * nr_pages;
            let backing = Arc::new(TestBacking::new((generation + 1) * HUGE + first, nr_pages, PageSize::Size1G));
            Part { id: 1 + index as u32, first, nr_pages, backing }
        };
        Layout { generation, parts: (0..nr_parts).map(part).collect() }
    }

    /// The memslot that has a page.
    fn part(&self, page: u64) -> &Part {
        &self.parts[(page / (HUGE / self.parts.len() as u64)) as usize]
    }

    /// The frame of a page.
    fn pfn(&self, page: u64) -> u64 {
        let part = self.part(page);
        let moved = part.backing.frames.read().unwrap().get(&(page - part.first)).map(|frame| frame.pfn);
        moved.unwrap_or((self.generation + 1) * HUGE + page)
    }
}

/// What the threads share.
struct World<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    config: Config,
    layout: RwLock<Layout>,
    /// Odd while there are no memslots, or not all.
    changes: AtomicU64,
    /// Generations whose memslots are deleted.
    dead: Box<[AtomicBool]>,
    /// The states of the frames of hot pages, by [`World::frame`].
    frames: Box<[AtomicU8]>,
    /// For each frame that a page was moved to, the index of the hot page.
    owners: Box<[AtomicU32]>,
    nr_moved: AtomicU64,
    /// Held while reports are collected and noted.
    noting: Mutex<()>,
    /// For each hot page, its writes, and how many of them the host has copied.
    contents: Box<[AtomicU64]>,
    copy: Box<[AtomicU64]>,
    stop: AtomicBool,
    start: Instant,
}

/// What a thread does repeatedly.
type Role<F> = fn(&World<F>, &mut Guest<F>, &mut Random);

fn array<T>(len: u64, new: impl Fn() -> T) -> Box<[T]> {
    (0..len).map(|_| new()).collect()
}

fn range_of(page: u64, nr_pages: u64) -> GfnRange {
    GfnRange::new(Gfn(FIRST + page), nr_pages)
}

impl<F: Format> World<F> {
    fn new(config: Config) -> World<F> {
        let vm = Arc::new(Vm::new(TestHost::default(), config).unwrap());
        vm.host().record_zapped();
        vm.host().is_slow.store(true, Ordering::Relaxed);
        let nr_hot = HOT.len() as u64;
        let world = World {
            vm,
            config,
            layout: RwLock::new(Layout::new(0)),
            changes: AtomicU64::new(0),
            dead: array(MAX_GENERATIONS, || AtomicBool::new(false)),
            frames: array(MAX_GENERATIONS * nr_hot + MAX_MOVED, || AtomicU8::new(0)),
            owners: array(MAX_MOVED, || AtomicU32::new(u32::MAX)),
            nr_moved: AtomicU64::new(0),
            noting: Mutex::new(()),
            contents: array(nr_hot, || AtomicU64::new(0)),
            copy: array(nr_hot, || AtomicU64::new(0)),
            stop: AtomicBool::new(false),
            start: Instant::now(),
        };
        world.create(&Layout::new(0));
        world
    }

    fn create(&self, layout: &Layout) {
        for part in &layout.parts {
            self.vm
                .set_user_memory_region(MemoryRegion {
                    slot: part.id,
                    flags: NO_FLAGS,
                    guest_phys_addr: Gfn(FIRST + part.first).gpa(),
                    memory_size: part.nr_pages * PAGE_SIZE,
                    backing: Some(Arc::clone(&part.backing)),
                    userfault_bitmap: None,
                })
                .unwrap();
        }
        *self.layout.write().unwrap() = layout.clone();
    }

    fn layout(&self) -> Layout {
        self.layout.read().unwrap().clone()
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed) && self.start.elapsed() < RUN
    }

    /// The state of frame `pfn`, which must belong to hot page `hot`.
    fn frame(&self, pfn: u64, hot: usize) -> &AtomicU8 {
        let nr_hot = HOT.len() as u64;
        if let Some(moved) = pfn.checked_sub(MOVED) {
            let owner = self.owners[moved as usize].load(Ordering::SeqCst);
            assert_eq!(owner as usize, hot, "frame {pfn:#x} is not of page {:#x}", HOT[hot]);
            return &self.frames[(MAX_GENERATIONS * nr_hot + moved) as usize];
        }
        assert_eq!(pfn % HUGE, HOT[hot], "frame {pfn:#x} is not of page {:#x}", HOT[hot]);
        &self.frames[((pfn / HUGE - 1) * nr_hot) as usize + hot]
    }

    fn assert_alive(&self, pfn: u64, hot: usize, state: u8) {
        let is_dead = pfn < MOVED && self.dead[(pfn / HUGE - 1) as usize].load(Ordering::SeqCst);
        assert!(!is_dead && state & DEAD == 0, "page {:#x} reached frame {pfn:#x}, which was freed", HOT[hot]);
    }

    /// Does what the page tables allow of an access. Returns whether it was done.
    fn look(&self, hot: usize, access: Access, found: Translation) -> bool {
        let (gfn, pfn) = (Gfn(FIRST + HOT[hot]), found.pfn.0);
        let frame = self.frame(pfn, hot);
        self.assert_alive(pfn, hot, frame.load(Ordering::SeqCst));
        let sets_bits = self.config.access_tracking == AccessTracking::AccessedBit;
        if access == Access::Read {
            return !sets_bits || set_accessed_and_dirty(&self.vm, gfn.gpa(), found, access);
        }
        // A CPU that has D cached does not read the PTE again.
        if sets_bits && found.pte.0 & F::DIRTY == 0 && !write_as_hardware(&self.vm, gfn, found) {
            return false;
        }
        // Checked once more: the access is still under way, so an invalidation that frees the frame
        // has not returned from its flush.
        let state = frame.fetch_or(WRITTEN, Ordering::SeqCst);
        self.assert_alive(pfn, hot, state);
        self.contents[hot].fetch_add(1, Ordering::SeqCst);
        true
    }

    /// One access, or a fault on the way to it.
    fn access(&self, guest: &mut Guest<F>, hot: usize, access: Access) {
        let gpa = Gfn(FIRST + HOT[hot]).gpa();
        let before = self.changes.load(Ordering::SeqCst);
        match guest.try_access(gpa, access, |found| self.look(hot, access, found)) {
            Ok(_) | Err(None) => {}
            Err(Some(Exit::Mmio { .. })) => {
                let is_between = before % 2 == 1 || self.changes.load(Ordering::SeqCst) != before;
                assert!(is_between, "no memory at {gpa}, while the slots did not change");
            }
            Err(Some(exit)) => panic!("{exit:?} at {gpa}"),
        }
    }

    /// Notes the reports, and checks that they cover all writes to the hot pages of a range that no
    /// CPU can access.
    fn check_reports(&self, layout: &Layout, first: u64, nr_pages: u64) {
        self.note();
        for hot in hot_in(first, nr_pages) {
            let pfn = layout.pfn(HOT[hot]);
            let state = self.frame(pfn, hot).fetch_and(!(WRITTEN | REPORTED), Ordering::SeqCst);
            let page = HOT[hot];
            assert_ne!(state & (WRITTEN | REPORTED), WRITTEN, "page {page:#x} was written, and not reported");
        }
    }

    fn note(&self) {
        let _noting = self.noting.lock().unwrap();
        for leaf in self.vm.host().take_zapped().into_iter().filter(|leaf| leaf.dirty) {
            for hot in hot_in(leaf.range.start.0 - FIRST, leaf.range.nr_pages()) {
                let pfn = leaf.pfn.0 + (FIRST + HOT[hot] - leaf.range.start.0);
                self.frame(pfn, hot).fetch_or(REPORTED, Ordering::SeqCst);
            }
        }
    }

    /// Invalidates a range, and meanwhile moves pages or moves them back.
    fn invalidate(&self, guest: &mut Guest<F>, (first, nr_pages): (u64, u64), meanwhile: impl Fn(&Layout, usize)) {
        let range = range_of(first, nr_pages);
        // The memslots before the invalidation. Frames of later ones are not checked here.
        let layout = self.layout();
        let held = guest.during_fault(|_| self.vm.invalidate_range(range).unwrap());
        for gfn in [range.start, Gfn(range.end.0 - 1)] {
            for access in [Access::Read, Access::Write] {
                assert_eq!(guest.vcpu.handle_fault(gfn.gpa(), access), Ok(Outcome::Resume));
                guest.during_access(gfn.gpa(), |found| assert_eq!(found, None, "in a range in flight"));
            }
        }
        self.check_reports(&layout, first, nr_pages);
        hot_in(first, nr_pages).for_each(|hot| meanwhile(&layout, hot));
        drop(held);
    }

    fn move_page(&self, layout: &Layout, hot: usize) {
        let number = self.nr_moved.fetch_add(1, Ordering::SeqCst);
        if number >= MAX_MOVED {
            return;
        }
        self.owners[number as usize].store(hot as u32, Ordering::SeqCst);
        let part = layout.part(HOT[hot]);
        let mut frames = part.backing.frames.write().unwrap();
        let frame = Frame { pfn: MOVED + number, writes: Writes::Allowed };
        let before = frames.insert(HOT[hot] - part.first, frame).map(|frame| frame.pfn);
        let before = before.unwrap_or((layout.generation + 1) * HUGE + HOT[hot]);
        self.frame(before, hot).fetch_or(DEAD, Ordering::SeqCst);
    }

    fn move_back(&self, layout: &Layout, hot: usize) {
        let part = layout.part(HOT[hot]);
        let mut frames = part.backing.frames.write().unwrap();
        if let Some(frame) = frames.remove(&(HOT[hot] - part.first)) {
            self.frame(frame.pfn, hot).fetch_or(DEAD, Ordering::SeqCst);
            let first = (layout.generation + 1) * HUGE + HOT[hot];
            self.frame(first, hot).fetch_and(!DEAD, Ordering::SeqCst);
        }
    }

    fn set_flags(&self, flags: MemoryRegionFlags) {
        for part in self.layout().parts {
            let start = Gfn(FIRST + part.first).gpa().0;
            self.vm.set_user_memory_region(change(part.id, flags, start, part.nr_pages * PAGE_SIZE)).unwrap();
        }
    }

    /// Harvests all slots, and copies what is reported.
    fn harvest(&self) {
        for part in self.layout().parts {
            let mut bitmap = vec![0; (part.nr_pages / 64) as usize];
            self.vm.get_dirty_log(part.id, &mut bitmap).unwrap();
            if self.config.manual_protect != ManualProtect::Disabled {
                // Before the pages are copied.
                self.vm.clear_dirty_log(part.id, 0, part.nr_pages, &bitmap).unwrap();
            }
            self.copy_hot(hot_in(part.first, part.nr_pages).filter(|hot| {
                let page = HOT[*hot] - part.first;
                bitmap[page as usize / 64] >> (page % 64) & 1 == 1
            }));
        }
    }

    fn copy_hot(&self, hot: impl Iterator<Item = usize>) {
        for hot in hot {
            self.copy[hot].fetch_max(self.contents[hot].load(Ordering::SeqCst), Ordering::SeqCst);
        }
    }

    fn contents_now(&self) -> Vec<u64> {
        self.contents.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }

    fn assert_copied(&self, counts: &[u64]) {
        for (hot, count) in counts.iter().enumerate() {
            let copied = self.copy[hot].load(Ordering::SeqCst);
            let page = HOT[hot];
            assert!(copied >= *count, "page {page:#x} was written {count} times, {copied} are copied");
        }
    }

    /// Turns logging on and off. Each harvest between must report what was written before the one
    /// before it.
    fn log(&self) {
        self.set_flags(LOG);
        // Pages written before logging begins are copied, as a migration does.
        self.copy_hot(0..HOT.len());
        for _ in 0..3 {
            let before = self.contents_now();
            self.harvest();
            self.vm.host().gate.wait_for_faults();
            self.harvest();
            self.assert_copied(&before);
        }
        self.set_flags(NO_FLAGS);
    }

    /// Deletes the memslots and makes them again over other frames: two halves in place of one, or
    /// the reverse.
    fn recreate(&self) {
        let layout = self.layout();
        if layout.generation + 1 == MAX_GENERATIONS {
            return;
        }
        self.changes.fetch_add(1, Ordering::SeqCst);
        for part in &layout.parts {
            self.vm.set_user_memory_region(change(part.id, NO_FLAGS, 0, 0)).unwrap();
            self.check_reports(&layout, part.first, part.nr_pages);
        }
        self.dead[layout.generation as usize].store(true, Ordering::SeqCst);
        self.create(&Layout::new(layout.generation + 1));
        self.changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Runs all threads, for a while.
    fn run(&self) {
        /// Stops the others when a check has failed.
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        let roles: [Role<F>; 8] = [
            World::touch,
            World::touch,
            World::touch,
            World::recover,
            World::split,
            World::invalidate_some,
            World::invalidate_some,
            World::change_slots,
        ];
        let (over, is_over) = channel::<()>();
        // A fault that retries for ever would fail no check.
        std::thread::spawn(move || {
            if is_over.recv_timeout(HANG) == Err(RecvTimeoutError::Timeout) {
                eprintln!("a thread does not return");
                std::process::abort();
            }
        });
        std::thread::scope(|scope| {
            for (index, role) in (0..).zip(roles) {
                let (mut guest, mut random) = (Guest::new(&self.vm), Random::new(index + 1));
                scope.spawn(move || {
                    let _stop = Stop(&self.stop);
                    while self.goes_on() {
                        role(self, &mut guest, &mut random);
                    }
                });
            }
        });
        drop(over);
    }

    fn touch(&self, guest: &mut Guest<F>, random: &mut Random) {
        let hot = random.below(HOT.len() as u64) as usize;
        let access = if random.below(2) == 0 { Access::Write } else { Access::Read };
        self.access(guest, hot, access);
    }

    fn recover(&self, guest: &mut Guest<F>, _: &mut Random) {
        guest.during_fault(|_| self.vm.recover_range(range_of(0, HUGE)).unwrap());
        std::thread::yield_now();
    }

    fn split(&self, guest: &mut Guest<F>, random: &mut Random) {
        let block = HOT[random.below(HOT.len() as u64) as usize] / BIG;
        let (range, largest) = match random.below(16) {
            0 => (range_of(0, HUGE), PageSize::Size4K),
            1..8 => (range_of(0, HUGE), PageSize::Size2M),
            _ => (range_of(block * BIG, BIG), PageSize::Size4K),
        };
        guest.during_fault(|_| self.vm.split_range(range, largest).unwrap());
        pause(random);
    }

    fn invalidate_some(&self, guest: &mut Guest<F>, random: &mut Random) {
        let page = HOT[random.below(HOT.len() as u64) as usize];
        let (first, nr_pages) = match random.below(16) {
            0 => (0, HUGE),
            1..6 => (page / BIG * BIG, BIG),
            _ => (page, 1),
        };
        let range = (first, nr_pages);
        if random.below(3) == 0 {
            let (nth, step) = (random.below(10) as usize, 1 + random.below(40) as usize);
            self.invalidate(guest, range, |layout, hot| {
                if nr_pages == 1 || hot % step == nth % step {
                    self.move_page(layout, hot);
                }
            });
            pause(random);
        }
        // Pages that stay moved would allow no huge page.
        self.invalidate(guest, range, |layout, hot| self.move_back(layout, hot));
        pause(random);
    }

    fn change_slots(&self, _: &mut Guest<F>, random: &mut Random) {
        match random.below(4) {
            0 => self.recreate(),
            1 | 2 => self.log(),
            _ => {}
        }
        pause(random);
        pause(random);
    }

    /// All threads have stopped.
    fn finish(&self) {
        let layout = self.layout();
        let mut guest = Guest::new(&self.vm);
        for (hot, page) in HOT.iter().enumerate() {
            if let Some(found) = translate(&self.vm, Gfn(FIRST + page).gpa()) {
                assert_eq!(found.pfn.0, layout.pfn(*page));
            }
            // Whatever was left half done, the guest makes progress.
            let before = self.contents[hot].load(Ordering::SeqCst);
            for _ in 0..8 {
                self.access(&mut guest, hot, Access::Write);
            }
            assert!(self.contents[hot].load(Ordering::SeqCst) > before, "page {page:#x} still faults");
        }
        self.compare_leaves();
        // One harvest is exact when no fault is under way.
        self.set_flags(LOG);
        self.copy_hot(0..HOT.len());
        self.harvest();
        for hot in (0..HOT.len()).step_by(3) {
            for _ in 0..8 {
                self.access(&mut guest, hot, Access::Write);
            }
        }
        self.harvest();
        self.assert_copied(&self.contents_now());
        self.set_flags(NO_FLAGS);
        self.compare_leaves();
        self.assert_huge_pages_are_recovered(&mut guest);
        drop(self.vm.invalidate_range(range_of(0, HUGE)).unwrap());
        self.check_reports(&layout, 0, HUGE);
        self.compare_leaves();
        for part in layout.parts {
            self.vm.set_user_memory_region(change(part.id, NO_FLAGS, 0, 0)).unwrap();
        }
        drop(guest);
        assert_no_table_is_left(&self.vm);
    }

    /// With all pages where they were, and no other thread.
    fn assert_huge_pages_are_recovered(&self, guest: &mut Guest<F>) {
        let layout = self.layout();
        for hot in 0..HOT.len() {
            let held = self.vm.invalidate_range(range_of(HOT[hot], 1)).unwrap();
            self.check_reports(&layout, HOT[hot], 1);
            self.move_back(&layout, hot);
            drop(held);
        }
        let size_bytes = HUGE * PAGE_SIZE;
        let start = Gfn(FIRST).gpa();
        assert_eq!(guest.vcpu.pre_fault_memory(start, size_bytes, Access::Write), Ok(size_bytes));
        self.vm.reclaim();
        while self.vm.recover_range(range_of(0, HUGE)).unwrap() > 0 {}
        let stats = self.vm.stats();
        let expected = if layout.parts.len() == 1 { [0, 0, 1] } else { [0, 512, 0] };
        assert_eq!([stats.pages_4k(), stats.pages_2m(), stats.pages_1g()], expected, "{stats:?}");
        self.compare_leaves();
    }

    /// Compares the counts of leaves with the leaves.
    fn compare_leaves(&self) {
        let (mut page, mut found) = (0, [0; 3]);
        while page < HUGE {
            let leaf = translate(&self.vm, Gfn(FIRST + page).gpa());
            if let Some(leaf) = leaf {
                found[usize::from(leaf.level.0) - 1] += 1;
            }
            page += leaf.map_or(1, |leaf| leaf.level.nr_pages());
        }
        let stats = self.vm.stats();
        assert_eq!([stats.pages_4k(), stats.pages_2m(), stats.pages_1g()], found, "leaves of each size: {stats:?}");
        assert_eq!(stats.live_tables(), self.vm.host().live_tables() as u64);
    }
}

/// Pauses, so that not all is split all the time.
fn pause(random: &mut Random) {
    std::thread::sleep(Duration::from_micros(random.below(2000)));
}

/// The ways to find writes, and what becomes of huge pages then.
fn configs<F: Format>(locking: Locking) -> Vec<Config> {
    let config = Config::default().with_locking(locking);
    let bits = dirty_trackings::<F>().last().expect("there is write protection");
    vec![
        config,
        config
            .with_huge_page_logging(HugePageLogging::MarkWhole)
            .with_dirty_tracking(DirtyTracking::WriteProtectLeaves)
            .with_manual_protect(ManualProtect::Enabled),
        config.with_dirty_tracking(bits).with_huge_page_logging(HugePageLogging::SplitLazily),
        config.with_access_tracking(AccessTracking::Faults).with_manual_protect(ManualProtect::InitiallySet),
    ]
}

fn all_at_once<F: Format>(locking: Locking) {
    for config in configs::<F>(locking) {
        let world = World::<F>::new(config);
        world.run();
        world.finish();
    }
}

#[test]
fn nothing_is_lost_without_a_lock() {
    slat::for_each_format!(F => {
        all_at_once::<F>(Locking::None);
    });
}

#[test]
fn nothing_is_lost_with_a_shared_lock() {
    all_at_once::<Npt>(Locking::Shared);
}

#[test]
fn nothing_is_lost_with_break_before_make() {
    all_at_once::<Broken>(Locking::None);
}
