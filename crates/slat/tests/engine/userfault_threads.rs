//! Userfault on many threads. Guests walk the page tables, and resolvers fill pages and clear bits.
//! Other threads rescan and empty pages, turn the flag off and on, make pages private, log, and
//! recover huge pages. No guest may access an empty page, a private page where it is shared, or a
//! large leaf where bits are small. No write is missing in the log.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::broken::Broken;
use crate::common::guest::{Guest, Stop};
use crate::common::log::{LOG, NO_FLAGS, pages_of, write_as_hardware};
use crate::common::random::Random;
use crate::common::{PRIVATE_PFN, TestHost, assert_no_table_is_left, change, region, wait_until};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging};
use slat::format::{Ept, Format, Npt};
use slat::slots::{MemoryAttributes, UserfaultBitmap};
use slat::tables::{AccessTracking, FaultAround};
use slat::{Access, Config, Exit, Gfn, GfnRange, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize, Vm};

const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;

const RUN: Duration = Duration::from_millis(250);
const FIRST: u64 = 512;
const PAGES: u64 = 3 * 512;
const FIRST_PFN: u64 = 1 << 20;
const NR_GUESTS: u64 = 3;

/// The state of a page: shared, private, or changing between the two.
const SHARED: u8 = 0;
const PRIVATE: u8 = 1;
const CHANGING: u8 = 2;

/// A page, as user space and the guests know it.
#[derive(Default)]
struct Page {
    is_filled: AtomicBool,
    attribute: AtomicU8,
    nr_writes: AtomicU64,
}

struct Scene<F: Format> {
    vm: Arc<Vm<TestHost, F>>,
    granularity: PageSize,
    pages: Vec<Page>,
    words: [Arc<Vec<AtomicU64>>; 2],
    /// Whether it is on, and with which words. Changing that takes the lock for writing: no thread
    /// fills or rescans meanwhile.
    on: RwLock<Option<usize>>,
    /// A lock of user space for each block, so that a late answer does not fill a block that is
    /// being emptied.
    blocks: Vec<Mutex<()>>,
    /// The writes of each page that the log has reported.
    copied: Mutex<Vec<u64>>,
    flags: Mutex<MemoryRegionFlags>,
    is_over: AtomicBool,
    nr_exits: AtomicU64,
    nr_rescanned: AtomicU64,
}

impl<F: Format> Scene<F> {
    fn block_pages(&self) -> u64 {
        self.granularity.level().nr_pages()
    }

    fn pages_of(&self, block: usize) -> &[Page] {
        let nr_pages = self.block_pages() as usize;
        &self.pages[block * nr_pages..(block + 1) * nr_pages]
    }

    fn change(&self, begins: MemoryRegionFlags, ends: MemoryRegionFlags, words: Option<usize>) {
        let mut flags = self.flags.lock().unwrap();
        *flags = (*flags - ends) | begins;
        let words = words.map(|index| Arc::<Vec<AtomicU64>>::clone(&self.words[index]));
        let region = MemoryRegion {
            userfault_bitmap: words.map(|words| UserfaultBitmap::new(words, self.granularity)),
            ..change(0, *flags, FIRST * PAGE_SIZE, PAGES * PAGE_SIZE)
        };
        self.vm.set_user_memory_region(region).unwrap();
    }

    /// Answers an exit: fills the block, then clears its bit. A second or late call does nothing.
    fn resolve(&self, block: usize) {
        let on = self.on.read().unwrap();
        let Some(index) = *on else { return };
        let _mine = self.blocks[block].lock().unwrap();
        self.pages_of(block).iter().for_each(|page| page.is_filled.store(true, Ordering::Relaxed));
        self.words[index][block / 64].fetch_and(!(1 << (block % 64)), Ordering::Release);
    }

    /// Rescans some blocks and empties them.
    fn rescan_and_refill(&self, first: usize, nr_blocks: usize) {
        let on = self.on.read().unwrap();
        let Some(index) = *on else { return };
        let mine: Vec<MutexGuard<'_, ()>> =
            self.blocks[first..first + nr_blocks].iter().map(|block| block.lock().unwrap()).collect();
        for block in first..first + nr_blocks {
            self.words[index][block / 64].fetch_or(1 << (block % 64), Ordering::Release);
        }
        let nr_pages = nr_blocks as u64 * self.block_pages();
        assert_eq!(self.vm.rescan_userfault(0, first as u64 * self.block_pages(), nr_pages), Ok(nr_pages));
        for block in first..first + nr_blocks {
            self.pages_of(block).iter().for_each(|page| page.is_filled.store(false, Ordering::Relaxed));
        }
        self.nr_rescanned.fetch_add(nr_pages, Ordering::Relaxed);
        drop(mine);
    }

    /// Turns it off, and on again with the other words; or changes the words while it is on. Before
    /// it is off all pages are filled; pages that are empty when it is on again were emptied
    /// before.
    fn toggle(&self, random: &mut Random) {
        let mut on = self.on.write().unwrap();
        let next = on.map_or(0, |index| 1 - index);
        if on.is_some() && random.next().is_multiple_of(2) {
            self.pages.iter().for_each(|page| page.is_filled.store(true, Ordering::Relaxed));
            self.change(NO_FLAGS, USERFAULT, None);
            *on = None;
            return;
        }
        // Pages that the new words mark as empty may be emptied once this has returned.
        let old = on.map(|index| &self.words[index]);
        for block in 0..self.blocks.len() {
            let is_set = old.is_some_and(|words| words[block / 64].load(Ordering::Relaxed) >> (block % 64) & 1 != 0);
            let word = &self.words[next][block / 64];
            if is_set || random.next().is_multiple_of(3) {
                word.fetch_or(1 << (block % 64), Ordering::Release);
            } else {
                word.fetch_and(!(1 << (block % 64)), Ordering::Release);
            }
        }
        self.change(USERFAULT, NO_FLAGS, Some(next));
        for block in 0..self.blocks.len() {
            if self.words[next][block / 64].load(Ordering::Relaxed) >> (block % 64) & 1 != 0 {
                self.pages_of(block).iter().for_each(|page| page.is_filled.store(false, Ordering::Relaxed));
            }
        }
        *on = Some(next);
    }

    /// Attributes are changed only here.
    fn set_attributes(&self, random: &mut Random) {
        let first = random.next() % PAGES;
        let nr_pages = [1, 7, 512][random.next() as usize % 3].min(PAGES - first);
        let to = [SHARED, PRIVATE][random.next() as usize % 2];
        let pages = &self.pages[first as usize..(first + nr_pages) as usize];
        pages.iter().for_each(|page| page.attribute.store(CHANGING, Ordering::SeqCst));
        let attributes = if to == PRIVATE { MemoryAttributes::PRIVATE } else { MemoryAttributes::empty() };
        self.vm.set_memory_attributes(Gfn(FIRST + first).gpa(), nr_pages * PAGE_SIZE, attributes).unwrap();
        pages.iter().for_each(|page| page.attribute.store(to, Ordering::SeqCst));
    }

    /// Copies what the log reports.
    fn harvest(&self) {
        let mut copied = self.copied.lock().unwrap();
        let mut bitmap = vec![0; PAGES as usize / 64];
        self.vm.get_dirty_log(0, &mut bitmap).unwrap();
        // An exact log waits for faults that have made a page writable and not marked it yet.
        for page in pages_of(&bitmap, 0) {
            copied[page as usize] = self.pages[page as usize].nr_writes.load(Ordering::SeqCst);
        }
    }

    /// One access of a guest. `Some` is the block that it exits for.
    fn access(&self, guest: &mut Guest<F>, number: u64, access: Access, sets_dirty: bool) -> Option<usize> {
        let (page, gfn) = (&self.pages[number as usize], Gfn(FIRST + number));
        let vm = Arc::clone(&self.vm);
        let result = guest.try_access(gfn.gpa(), access, |found| {
            let attribute = page.attribute.load(Ordering::SeqCst);
            let shared = FIRST_PFN + gfn.0;
            let pfn = found.pfn.0;
            match attribute {
                SHARED => assert_eq!(pfn, shared, "page {number} is shared"),
                PRIVATE => assert_eq!(pfn, shared + PRIVATE_PFN, "page {number} is private"),
                _ => assert!(pfn == shared || pfn == shared + PRIVATE_PFN, "page {number} is {pfn:#x}"),
            }
            if access == Access::Write && sets_dirty && !write_as_hardware(&vm, gfn, found) {
                return;
            }
            assert!(page.is_filled.load(Ordering::Relaxed), "page {number} is empty, and mapped");
            if access == Access::Write {
                page.nr_writes.fetch_add(1, Ordering::SeqCst);
            }
        });
        match result {
            Err(Some(Exit::MemoryFault { gpa, size, .. })) => {
                assert_eq!(size, self.block_pages() * PAGE_SIZE);
                Some(((gpa.gfn().0 - FIRST) / self.block_pages()) as usize)
            }
            Err(Some(exit)) => panic!("{exit:?}"),
            Ok(()) | Err(None) => None,
        }
    }
}

fn run<F: Format>(config: Config, granularity: PageSize, logs: MemoryRegionFlags) {
    let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
    let mut memory = region(0, FIRST * PAGE_SIZE, PAGES * PAGE_SIZE, FIRST_PFN + FIRST, PageSize::Size2M);
    if let Some(backing) = memory.backing.as_mut().and_then(Arc::get_mut) {
        backing.is_resident = |page| page % 5 != 0;
    }
    vm.set_user_memory_region(MemoryRegion { flags: GUEST_MEMFD | logs, ..memory }).unwrap();
    let nr_blocks = (PAGES / granularity.level().nr_pages()) as usize;
    let words = || Arc::new((0..nr_blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect::<Vec<_>>());
    let pages: Vec<Page> = (0..PAGES).map(|_| Page::default()).collect();
    pages.iter().for_each(|page| page.is_filled.store(true, Ordering::Relaxed));
    let scene = Scene {
        vm,
        granularity,
        pages,
        words: [words(), words()],
        on: RwLock::new(None),
        blocks: (0..nr_blocks).map(|_| Mutex::default()).collect(),
        copied: Mutex::new(vec![0; PAGES as usize]),
        flags: Mutex::new(GUEST_MEMFD | logs),
        is_over: AtomicBool::new(false),
        nr_exits: AtomicU64::new(0),
        nr_rescanned: AtomicU64::new(0),
    };
    scene.toggle(&mut Random::new(1));
    let sets_dirty = matches!(config.dirty_tracking, DirtyTracking::DirtyBit | DirtyTracking::PageModificationLog);
    let scene = &scene;
    let is_over = || scene.is_over.load(Ordering::Relaxed);
    thread::scope(|threads| {
        for index in 0..NR_GUESTS {
            threads.spawn(move || {
                let _stop = Stop(&scene.is_over);
                let mut guest = Guest::new(&scene.vm);
                let mut random = Random::new(index);
                while !is_over() {
                    // Mostly where other guests are.
                    let span = if random.next().is_multiple_of(4) { PAGES } else { 64 };
                    let page = (random.next() % span + random.next() % 3 * 512) % PAGES;
                    if random.next().is_multiple_of(16) {
                        let size = (PAGES - page).min(100) * PAGE_SIZE;
                        let access = if random.next().is_multiple_of(2) { Access::Write } else { Access::Read };
                        let gpa = Gfn(FIRST + page).gpa();
                        let _ = guest.during_fault(|guest| guest.vcpu.pre_fault_memory(gpa, size, access));
                    }
                    let access = if random.next().is_multiple_of(2) { Access::Write } else { Access::Read };
                    if let Some(block) = scene.access(&mut guest, page, access, sets_dirty) {
                        scene.nr_exits.fetch_add(1, Ordering::Relaxed);
                        scene.resolve(block);
                    }
                }
            });
        }
        threads.spawn(|| {
            let _stop = Stop(&scene.is_over);
            let mut random = Random::new(77);
            while !is_over() {
                let nr_blocks = 1 + random.next() as usize % scene.blocks.len().min(100);
                scene.rescan_and_refill(random.next() as usize % (scene.blocks.len() - nr_blocks + 1), nr_blocks);
            }
        });
        threads.spawn(|| {
            let _stop = Stop(&scene.is_over);
            let mut random = Random::new(99);
            while !is_over() {
                match random.next() % 8 {
                    0 => scene.toggle(&mut random),
                    1..=3 => scene.set_attributes(&mut random),
                    4 if logs.is_empty() => scene.change(LOG, NO_FLAGS, None),
                    5 if logs.is_empty() => scene.change(NO_FLAGS, LOG, None),
                    4 | 5 => scene.harvest(),
                    6 => drop(scene.vm.split_range(GfnRange::new(Gfn(FIRST), PAGES), PageSize::Size4K)),
                    _ => drop(scene.vm.recover_range(GfnRange::new(Gfn(FIRST), PAGES))),
                }
            }
        });
        let _stop = Stop(&scene.is_over);
        let start = Instant::now();
        // And until the events have happened, which may take longer on a busy machine.
        let has_happened = |what: &AtomicU64| what.load(Ordering::Relaxed) > 0;
        wait_until("an exit, and a rescanned page", &scene.is_over, || {
            start.elapsed() >= RUN && has_happened(&scene.nr_exits) && has_happened(&scene.nr_rescanned)
        });
    });
    if !logs.is_empty() {
        scene.harvest();
        for (number, (page, copied)) in scene.pages.iter().zip(&*scene.copied.lock().unwrap()).enumerate() {
            let nr_writes = page.nr_writes.load(Ordering::SeqCst);
            assert_eq!(nr_writes, *copied, "writes of page {number} were lost; {config:?}");
        }
    }
    scene.vm.set_user_memory_region(change(0, NO_FLAGS, 0, 0)).unwrap();
    assert_no_table_is_left(&scene.vm);
}

#[test]
fn guests_access_no_empty_page() {
    let config = Config::default();
    run::<Npt>(config, PageSize::Size4K, NO_FLAGS);
    run::<Npt>(config.with_fault_around(FaultAround::Pages(16)), PageSize::Size4K, NO_FLAGS);
    run::<Npt>(config, PageSize::Size2M, NO_FLAGS);
    run::<Ept>(config.with_access_tracking(AccessTracking::Faults), PageSize::Size4K, NO_FLAGS);
    run::<Broken>(config, PageSize::Size4K, NO_FLAGS);
    run::<Broken>(config, PageSize::Size2M, NO_FLAGS);
    run::<Npt>(Config::default().with_locking(Locking::Shared), PageSize::Size4K, NO_FLAGS);
    run::<Ept>(Config::default().with_locking(Locking::Exclusive), PageSize::Size2M, NO_FLAGS);
}

#[test]
fn no_write_is_lost_where_the_slot_logs() {
    let config = Config::default();
    let marks_whole = config.with_huge_page_logging(HugePageLogging::MarkWhole);
    run::<Npt>(config, PageSize::Size4K, LOG);
    run::<Npt>(config.with_dirty_tracking(DirtyTracking::DirtyBit), PageSize::Size4K, LOG);
    run::<Ept>(config.with_dirty_tracking(DirtyTracking::PageModificationLog), PageSize::Size2M, LOG);
    run::<Npt>(marks_whole, PageSize::Size2M, LOG);
    run::<Broken>(marks_whole.with_fault_around(FaultAround::Pages(8)), PageSize::Size2M, LOG);
    run::<Ept>(Config::default().with_locking(Locking::Exclusive), PageSize::Size4K, LOG);
}
