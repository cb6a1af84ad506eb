//! A memslot with a guest_memfd and userfault, and its invariants under every overlap of calls.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use slat::error::SlotError;
use slat::format::Format;
use slat::slots::{MemoryAttributes, UserfaultBitmap, UserfaultWords};
use slat::tables::AccessTracking;
use slat::{Access, Config, Exit, Gfn, GfnRange, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

use crate::common::log::{LOG, NO_FLAGS, pages_of, write_as_hardware};
use crate::common::{
    PRIVATE_PFN, TestHost, assert_no_table_is_left, change, region, set_accessed_and_dirty, translate,
};

pub const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
pub const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
pub const PRIVATE: MemoryAttributes = MemoryAttributes::PRIVATE;
pub const SHARED: MemoryAttributes = MemoryAttributes::empty();

/// A block of 2 MiB, in pages.
pub const BIG: u64 = 512;
pub const FIRST: u64 = BIG;
pub const PAGES: u64 = 2 * BIG;
pub const SLOT: u32 = 1;
pub const FIRST_PFN: u64 = 1 << 24;
pub const NEW_FRAMES: u64 = 1 << 20;

pub type Run = Box<dyn FnOnce() + Send>;

/// Words with a hook that runs before a read.
#[derive(Default)]
pub struct Words {
    pub words: Vec<AtomicU64>,
    pub hook: Mutex<Option<(u32, Run)>>,
}

impl Words {
    pub fn new(nr_words: usize, word: u64) -> Arc<Words> {
        let words = (0..nr_words).map(|_| AtomicU64::new(word)).collect();
        Arc::new(Words { words, hook: Mutex::default() })
    }

    pub fn overtake(&self, nth: u32, run: impl FnOnce() + Send + 'static) {
        *self.hook.lock().unwrap() = Some((nth, Box::new(run)));
    }

    /// Removes the hook. Returns whether it was called.
    pub fn was_overtaken(&self) -> bool {
        self.hook.lock().unwrap().take().is_none()
    }

    pub fn bitmap(self: &Arc<Self>, granularity: PageSize) -> Option<UserfaultBitmap> {
        Some(UserfaultBitmap::new(Arc::<Words>::clone(self), granularity))
    }
}

impl UserfaultWords for Words {
    fn words(&self) -> &[AtomicU64] {
        let due = {
            let mut hook = self.hook.lock().unwrap();
            match &mut *hook {
                Some((1, _)) => hook.take(),
                Some((nth, _)) => {
                    *nth -= 1;
                    None
                }
                None => None,
            }
        };
        if let Some((_, run)) = due {
            run();
        }
        &self.words
    }
}

/// The bitmaps that a memslot may have: of small pages, another one, and of huge pages.
pub const GRANULARITIES: [PageSize; 3] = [PageSize::Size4K, PageSize::Size4K, PageSize::Size2M];

/// A memslot with a guest_memfd, and its invariants.
pub struct Scene<F: Format> {
    pub vm: Arc<Vm<TestHost, F>>,
    pub config: Config,
    pub bitmaps: [Arc<Words>; 3],
    pub truth: Mutex<Truth>,
    pub logs: AtomicBool,
}

#[derive(Debug, Default)]
pub struct Truth {
    /// The bitmap in use; `None` while a call changes it.
    pub on: Option<Option<usize>>,
    /// Bits of each bitmap, by block: those of a rescan under way, and those of a rescan that has
    /// returned.
    pub rescanning: BTreeSet<(usize, u64)>,
    pub rescanned: BTreeSet<(usize, u64)>,
    /// The attributes of pages, how many calls have set them so far, and how many are setting them.
    /// What overlaps is unknown.
    pub attributes: BTreeMap<u64, MemoryAttributes>,
    pub nr_calls: u64,
    pub nr_calling: u64,
    /// Pages written while it logs; and those that were reported.
    pub to_log: BTreeSet<u64>,
    pub logged: BTreeSet<u64>,
    pub first_pfn: u64,
}

/// The result of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Accessed {
    Done,
    Withheld,
    /// A range in flight, or a change of attributes.
    HeldUp,
}

impl<F: Format> Scene<F> {
    pub fn new(config: Config) -> Arc<Scene<F>> {
        let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config).unwrap());
        let bitmaps = [0, 0, 0].map(|word| Words::new(17, word));
        let truth = Truth { first_pfn: FIRST_PFN, ..Truth::default() };
        let scene = Arc::new(Scene { vm, config, bitmaps, truth: Mutex::new(truth), logs: AtomicBool::new(false) });
        scene.create();
        scene
    }

    pub fn gfn(page: u64) -> Gfn {
        Gfn(FIRST + page)
    }

    pub fn all() -> GfnRange {
        GfnRange::new(Gfn(FIRST), PAGES)
    }

    /// Pages of a bit of bitmap `index`.
    pub fn block_pages(index: usize) -> u64 {
        GRANULARITIES[index].level().nr_pages()
    }

    pub fn create(&self) {
        let pfn = self.truth.lock().unwrap().first_pfn + FIRST;
        let mut memory = region(SLOT, FIRST * PAGE_SIZE, PAGES * PAGE_SIZE, pfn, PageSize::Size2M);
        if let Some(backing) = memory.backing.as_mut().and_then(Arc::get_mut) {
            backing.is_resident = |page| page % 3 != 2;
        }
        self.vm.set_user_memory_region(MemoryRegion { flags: GUEST_MEMFD, ..memory }).unwrap();
        self.truth.lock().unwrap().on = Some(None);
    }

    pub fn word(&self, index: usize, block: u64) -> &AtomicU64 {
        &self.bitmaps[index].words[block as usize / 64]
    }

    /// Changes the memslot to these flags, and this bitmap.
    pub fn set_flags(&self, flags: MemoryRegionFlags, bitmap: Option<usize>) -> Result<(), SlotError> {
        self.vm.set_user_memory_region(MemoryRegion {
            userfault_bitmap: bitmap.and_then(|index| self.bitmaps[index].bitmap(GRANULARITIES[index])),
            ..change(SLOT, flags | GUEST_MEMFD, FIRST * PAGE_SIZE, PAGES * PAGE_SIZE)
        })
    }

    pub fn flags(&self, on: Option<usize>) -> MemoryRegionFlags {
        let log = if self.logs.load(Ordering::SeqCst) { LOG } else { NO_FLAGS };
        if on.is_some() { log | USERFAULT } else { log }
    }

    /// Turns userfault on with a bitmap, or off.
    pub fn turn(&self, to: Option<usize>) {
        let set_before: BTreeSet<u64> = to.map_or(BTreeSet::new(), |index| {
            let nr_blocks = PAGES / Self::block_pages(index);
            let is_set = |block: &u64| self.word(index, *block).load(Ordering::SeqCst) >> (block % 64) & 1 != 0;
            (0..nr_blocks).filter(is_set).collect()
        });
        let Some(before) = self.truth.lock().unwrap().on.take() else { return };
        if let Some(index) = to {
            self.truth.lock().unwrap().rescanning.extend(set_before.iter().map(|block| (index, *block)));
        }
        let result = self.set_flags(self.flags(to), to);
        let mut truth = self.truth.lock().unwrap();
        match result {
            Ok(()) => {
                truth.on = Some(to);
                if before != to
                    && let Some(index) = to
                {
                    let done: Vec<_> = truth
                        .rescanning
                        .iter()
                        .copied()
                        .filter(|(of, block)| *of == index && set_before.contains(block))
                        .collect();
                    truth.rescanned.extend(done);
                }
            }
            Err(SlotError::SlotBusy { .. }) => truth.on = Some(before),
            Err(error) => panic!("{error}"),
        }
    }

    /// Sets bits in the bitmap in use and rescans `nr_pages` from `page` on.
    pub fn rescan(&self, page: u64, nr_pages: u64) {
        let Some(Some(index)) = self.truth.lock().unwrap().on else { return };
        let block_pages = Self::block_pages(index);
        let blocks = page / block_pages..(page + nr_pages).div_ceil(block_pages);
        for block in blocks.clone() {
            self.truth.lock().unwrap().rescanning.insert((index, block));
            self.word(index, block).fetch_or(1 << (block % 64), Ordering::Release);
        }
        let result = self.vm.rescan_userfault(SLOT, page, nr_pages);
        let mut truth = self.truth.lock().unwrap();
        match result {
            Ok(nr_found) => {
                let done: Vec<_> =
                    blocks.map(|block| (index, block)).filter(|bit| truth.rescanning.contains(bit)).collect();
                if truth.on == Some(Some(index)) && !done.is_empty() {
                    assert!(nr_found >= done.len() as u64 * block_pages, "{nr_found} of {done:?}");
                }
                truth.rescanned.extend(done);
            }
            Err(SlotError::NotUserfault { .. } | SlotError::NoSuchSlot { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Clears bits of all bitmaps.
    pub fn clear_bits(&self, page: u64, nr_pages: u64) {
        for index in 0..GRANULARITIES.len() {
            let block_pages = Self::block_pages(index);
            for block in page / block_pages..(page + nr_pages).div_ceil(block_pages) {
                let mut truth = self.truth.lock().unwrap();
                truth.rescanning.remove(&(index, block));
                truth.rescanned.remove(&(index, block));
                self.word(index, block).fetch_and(!(1 << (block % 64)), Ordering::Release);
            }
        }
    }

    pub fn set_attributes(&self, page: u64, nr_pages: u64, attributes: MemoryAttributes) {
        let (call, is_alone) = {
            let mut truth = self.truth.lock().unwrap();
            (page..page + nr_pages).for_each(|page| {
                truth.attributes.remove(&page);
            });
            truth.nr_calls += 1;
            truth.nr_calling += 1;
            (truth.nr_calls, truth.nr_calling == 1)
        };
        let result = self.vm.set_memory_attributes(Self::gfn(page).gpa(), nr_pages * PAGE_SIZE, attributes);
        self.truth.lock().unwrap().nr_calling -= 1;
        match result {
            Ok(()) => {}
            Err(SlotError::NoGuestMemfd { .. }) => return,
            Err(error) => panic!("{error}"),
        }
        let mut truth = self.truth.lock().unwrap();
        if truth.nr_calls == call && is_alone {
            truth.attributes.extend((page..page + nr_pages).map(|page| (page, attributes)));
        }
    }

    pub fn set_log(&self, on: bool) {
        let Some(userfault) = self.truth.lock().unwrap().on else { return };
        if !on {
            self.logs.store(false, Ordering::SeqCst);
            self.truth.lock().unwrap().to_log.clear();
        }
        let userfault_flag = if userfault.is_some() { USERFAULT } else { NO_FLAGS };
        let log = if on { LOG } else { NO_FLAGS };
        // No other thread changes the memslot meanwhile, except `recreate`.
        self.truth.lock().unwrap().on = None;
        let result = self.set_flags(userfault_flag | log, None);
        self.truth.lock().unwrap().on = Some(userfault);
        match result {
            Ok(()) => self.logs.store(on, Ordering::SeqCst),
            Err(SlotError::SlotBusy { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    pub fn harvest(&self) {
        let mut bitmap = vec![0; PAGES as usize / 64];
        if self.vm.get_dirty_log(SLOT, &mut bitmap).is_ok() {
            self.truth.lock().unwrap().logged.extend(pages_of(&bitmap, 0));
        }
    }

    /// Deletes the memslot and makes it again over other frames: all shared, without userfault.
    pub fn recreate(&self) {
        if self.truth.lock().unwrap().on.take().is_none() {
            return;
        }
        let before = self.vm.set_user_memory_region(change(SLOT, NO_FLAGS, 0, 0));
        before.unwrap();
        for page in (0..PAGES).step_by(101) {
            assert_eq!(translate(&self.vm, Self::gfn(page).gpa()), None);
        }
        self.logs.store(false, Ordering::SeqCst);
        let mut truth = self.truth.lock().unwrap();
        truth.to_log.clear();
        truth.rescanned.clear();
        truth.rescanning.clear();
        truth.attributes.clear();
        // Calls under way do not apply to the new memslot.
        truth.nr_calls += 1;
        truth.first_pfn += NEW_FRAMES;
        drop(truth);
        self.create();
    }

    /// An access of the guest.
    pub fn access(&self, page: u64, access: Access) -> Accessed {
        let gfn = Self::gfn(page);
        let mut vcpu = self.vm.create_vcpu().unwrap();
        for _ in 0..8 {
            let found = translate(&self.vm, gfn.gpa());
            if let Some(found) = found.filter(|found| access == Access::Read || found.writable) {
                self.check_page(page);
                let is_done = match access {
                    _ if self.config.access_tracking == AccessTracking::Faults => true,
                    Access::Write => write_as_hardware(&self.vm, gfn, found),
                    _ => set_accessed_and_dirty(&self.vm, gfn.gpa(), found, access),
                };
                if is_done {
                    if access == Access::Write && self.logs.load(Ordering::SeqCst) {
                        self.truth.lock().unwrap().to_log.insert(page);
                    }
                    return Accessed::Done;
                }
            }
            match vcpu.handle_fault(gfn.gpa(), access) {
                Ok(Outcome::Resume) => {}
                Ok(Outcome::Exit(Exit::MemoryFault { .. })) => return Accessed::Withheld,
                other => panic!("{other:?}"),
            }
        }
        Accessed::HeldUp
    }

    /// Checks that the frame of `page` is allowed.
    pub fn check_page(&self, page: u64) -> u64 {
        let gfn = Self::gfn(page);
        let Some(found) = translate(&self.vm, gfn.gpa()) else { return 1 };
        let truth = self.truth.lock().unwrap();
        let shared = truth.first_pfn + gfn.0;
        assert!([shared, PRIVATE_PFN + shared].contains(&found.pfn.0), "page {page:#x} is mapped to {found:?}");
        let block = gfn.block(found.level);
        for page in block.start.0 - FIRST..block.end.0 - FIRST {
            if let Some(attributes) = truth.attributes.get(&page) {
                let is_private = found.pfn.0 >= PRIVATE_PFN;
                assert_eq!(
                    is_private,
                    *attributes == PRIVATE,
                    "page {page:#x} is {attributes:?}, and mapped {found:?}"
                );
            }
            if let Some(Some(index)) = truth.on {
                let bit = (index, page / Self::block_pages(index));
                assert!(!truth.rescanned.contains(&bit), "page {page:#x} is pending, and mapped");
                assert!(found.level <= GRANULARITIES[index].level(), "page {page:#x} is mapped by {found:?}");
            }
        }
        (block.end.0 - gfn.0).max(1)
    }

    pub fn check(&self) {
        let mut page = 0;
        while page < PAGES {
            page += self.check_page(page);
        }
    }

    pub fn finish(self: Arc<Self>) {
        self.check();
        let pages = [3, 4, 8, 100, 511, 512, BIG + 9, PAGES - 1];
        // A rescanning page exits. All others are reached, and the rescanning ones once their bits are
        // clear.
        for page in pages {
            let (on, is_pending) = {
                let truth = self.truth.lock().unwrap();
                let on = truth.on.unwrap();
                let bit = on.map(|index| (index, page / Self::block_pages(index)));
                (on, bit.is_some_and(|bit| truth.rescanned.contains(&bit)))
            };
            let accessed = self.access(page, Access::Write);
            if is_pending {
                assert_eq!(accessed, Accessed::Withheld, "page {page:#x}");
            } else if on.is_none() {
                assert_eq!(accessed, Accessed::Done, "page {page:#x}");
            }
        }
        self.clear_bits(0, PAGES);
        for page in pages {
            assert_eq!(self.access(page, Access::Write), Accessed::Done, "page {page:#x}");
            let attributes = self.vm.memory_attributes(Self::gfn(page).gpa()).unwrap();
            let found = translate(&self.vm, Self::gfn(page).gpa()).unwrap();
            assert_eq!(attributes == PRIVATE, found.pfn.0 >= PRIVATE_PFN, "page {page:#x}");
        }
        if self.logs.load(Ordering::SeqCst) {
            self.harvest();
            let truth = self.truth.lock().unwrap();
            let lost: Vec<_> = truth.to_log.difference(&truth.logged).collect();
            assert!(lost.is_empty(), "pages {lost:x?} were written, and are not in the log");
        }
        self.check();
        self.vm.set_user_memory_region(change(SLOT, NO_FLAGS, 0, 0)).unwrap();
        assert_no_table_is_left(&self.vm);
    }
}
