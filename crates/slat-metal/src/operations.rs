//! What the hypervisor does to a guest's memory while the guest runs: each operation of the engine,
//! at random, on the memslot of a [`Ram`].
//!
//! A copy of the memory is kept up by the dirty log alone. Whenever the guest is stopped, the last
//! harvest must make it equal to the memory.

#![expect(unsafe_code, reason = "moves pages during an invalidation")]

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use fastrand::Rng;
use slat::dirty::ManualProtect;
use slat::error::SlotError;
use slat::format::Format;
use slat::{Access, GfnRange, Gpa, Host, MemoryRegionFlags, PAGE_SIZE, PageSize, Vcpu, Vm};
use spin::Mutex;

use crate::fail;
use crate::host::{Control, MetalHost};
use crate::memslot::{Memslot, zeros};
use crate::ram::{LockedPage, MoveError, Ram, copy_words};

/// A VM of this hypervisor.
pub type MetalVm<F> = Vm<MetalHost, F>;
/// A vCPU of it.
pub type MetalVcpu<F> = Vcpu<MetalHost, F>;

/// Pages of a block that a huge leaf can map.
const BLOCK_PAGES: u64 = 512;

/// Pages of a block of the copy.
const COPY_PAGES: usize = 512;

/// Of so many harvests one copies all memory before it takes the log, for [`Control::CopyBeforeLog`].
const HARVESTS_FOR_ALL: u64 = 8;

/// Words of a page.
const PAGE_WORDS: usize = PAGE_SIZE as usize / 8;

/// What the hypervisor does, and how often of a thousand.
const OPERATIONS: [(Operation, u64); 12] = [
    (Operation::Move, 300),
    (Operation::Invalidate, 130),
    (Operation::Harvest, 140),
    (Operation::Age, 70),
    (Operation::Split, 60),
    (Operation::Recover, 60),
    (Operation::Withhold, 80),
    (Operation::Prefault, 60),
    (Operation::Translate, 60),
    (Operation::Reclaim, 30),
    (Operation::ToggleUserfault, 5),
    (Operation::ToggleLog, 5),
];

/// A kind of operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Gives pages other frames.
    Move,
    /// Invalidates a range, and changes nothing.
    Invalidate,
    /// Takes the dirty log, and copies its pages.
    Harvest,
    /// Clears accessed bits.
    Age,
    /// Splits huge pages.
    Split,
    /// Puts them back.
    Recover,
    /// Takes a page back by its userfault bit.
    Withhold,
    /// Maps pages in advance.
    Prefault,
    /// Reads translations.
    Translate,
    /// Frees what earlier operations left.
    Reclaim,
    /// Turns the memslot's userfault bitmap on or off.
    ToggleUserfault,
    /// Turns the dirty log on or off.
    ToggleLog,
}

/// The memory as the log has it.
#[derive(Debug)]
struct DirtyCopy {
    is_on: bool,
    /// Blocks of [`COPY_PAGES`] pages: a large allocation needs as much memory in one piece.
    blocks: Box<[Box<[AtomicU64]>]>,
    bitmap: Vec<u64>,
    /// Comparisons with the memory, while the log was on.
    nr_checks: u64,
    nr_harvests: u64,
}

/// The memslot, and what is done to it.
pub struct Operations<F: Format> {
    memslot: Memslot<F>,
    /// Pages, from the first on, that half of the operations begin in.
    nr_hot_pages: u64,
    copy: Mutex<DirtyCopy>,
    manual_protect: ManualProtect,
    control: Control,
    nr_done: [AtomicU64; OPERATIONS.len()],
    nr_moved: AtomicU64,
    nr_split: AtomicU64,
    nr_recovered: AtomicU64,
}

impl<F: Format> Operations<F> {
    /// Creates memslot `slot` of `ram` at `start`, without any page mapped.
    ///
    /// # Errors
    /// Those of [`Vm::set_user_memory_region`].
    pub fn new(
        vm: &Arc<MetalVm<F>>,
        slot: u32,
        start: Gpa,
        ram: &Arc<Ram>,
        nr_hot_pages: u64,
        manual_protect: ManualProtect,
        control: Control,
    ) -> Result<Operations<F>, SlotError> {
        let memslot = Memslot::new(vm, slot, start, ram)?;
        let copy = DirtyCopy {
            is_on: false,
            blocks: (0..(ram.nr_pages() as usize).div_ceil(COPY_PAGES))
                .map(|_| zeros(COPY_PAGES * PAGE_WORDS))
                .collect(),
            bitmap: memslot.new_bitmap(),
            nr_checks: 0,
            nr_harvests: 0,
        };
        // A page that the guest only reads is never in the log.
        (0..ram.nr_pages()).for_each(|page| ram.fill(page, copied(&copy, page)));
        Ok(Operations {
            memslot,
            nr_hot_pages,
            copy: Mutex::new(copy),
            manual_protect,
            control,
            nr_done: Default::default(),
            nr_moved: AtomicU64::new(0),
            nr_split: AtomicU64::new(0),
            nr_recovered: AtomicU64::new(0),
        })
    }

    /// The memory.
    pub fn ram(&self) -> &Arc<Ram> {
        self.memslot.ram()
    }

    /// The address of `page`.
    pub fn gpa(&self, page: u64) -> Gpa {
        self.memslot.gpa(page)
    }

    /// The page of `gpa`, if it is the memslot's.
    pub fn page_of(&self, gpa: Gpa) -> Option<u64> {
        self.memslot.page_of(gpa)
    }

    fn vm(&self) -> &MetalVm<F> {
        self.memslot.vm()
    }

    /// Pages that got another frame.
    pub fn nr_moved(&self) -> u64 {
        self.nr_moved.load(Ordering::Relaxed)
    }

    /// Huge leaves that were split, and that were recovered, by operations.
    pub fn nr_replaced(&self) -> [u64; 2] {
        [&self.nr_split, &self.nr_recovered].map(|count| count.load(Ordering::Relaxed))
    }

    /// How often each operation was done.
    pub fn counts(&self) -> impl Iterator<Item = (Operation, u64)> + '_ {
        OPERATIONS.iter().zip(&self.nr_done).map(|(&(operation, _), count)| (operation, count.load(Ordering::Relaxed)))
    }

    /// Does an operation at random. `vcpu` is the calling CPU's.
    pub fn one(&self, rng: &mut Rng, vcpu: &mut MetalVcpu<F>) {
        let mut choice = rng.u64(0..OPERATIONS.iter().map(|&(_, share)| share).sum());
        let mut index = 0;
        while choice >= OPERATIONS[index].1 {
            choice -= OPERATIONS[index].1;
            index += 1;
        }
        self.nr_done[index].fetch_add(1, Ordering::Relaxed);
        let among = if rng.bool() { self.nr_hot_pages } else { self.ram().nr_pages() };
        let first = rng.u64(0..among);
        let largest = if rng.u8(0..8) == 0 { 1024 } else { 16 };
        let nr_pages = rng.u64(1..=largest).min(self.ram().nr_pages() - first);
        match OPERATIONS[index].0 {
            Operation::Move => self.move_pages(first, nr_pages.min(16)),
            Operation::Invalidate => drop(self.invalidate(first, nr_pages)),
            Operation::Harvest => self.harvest(),
            Operation::Age => drop(self.check(self.vm().age_range(self.memslot.range(first, nr_pages)))),
            Operation::Split => {
                let largest = if rng.bool() { PageSize::Size4K } else { PageSize::Size2M };
                // Where nothing is huge by chance.
                if rng.bool() {
                    self.recover(vcpu, first, rng);
                }
                let range = self.memslot.range(first, nr_pages);
                let nr_split = self.replace(range, || self.check(self.vm().split_range(range, largest)));
                self.nr_split.fetch_add(nr_split, Ordering::Relaxed);
                if nr_split != 0 && rng.bool() {
                    self.recover(vcpu, first, rng);
                }
            }
            Operation::Recover => self.recover(vcpu, first, rng),
            Operation::Withhold => self.withhold(first, nr_pages.min(8)),
            Operation::Prefault => self.prefault(vcpu, first, nr_pages, rng),
            Operation::Translate => self.translate(first),
            Operation::Reclaim => self.vm().reclaim(),
            Operation::ToggleUserfault => self.toggle_userfault(),
            Operation::ToggleLog => self.toggle_log(),
        }
    }

    /// An operation with valid arguments can fail only without memory, and this machine has enough.
    fn check<T, E: core::fmt::Display>(&self, result: Result<T, E>) -> T {
        result.unwrap_or_else(|error| fail!("an operation on memslot {} failed: {error}", self.memslot.slot()))
    }

    fn invalidate(&self, first: u64, nr_pages: u64) -> slat::tables::Invalidation<'_> {
        self.check(self.vm().invalidate_range(self.memslot.range(first, nr_pages)))
    }

    /// Does `work`, which replaces huge leaves in `range` by page-table pages or the other way.
    fn replace<T>(&self, range: GfnRange, work: impl FnOnce() -> T) -> T {
        let host = self.vm().host();
        if self.control == Control::FlushBeforeBreak {
            host.flush(&[range]);
            // CPUs use what is there again, this one too.
            host.cpus.hold(self.vm(), range.start.gpa());
        }
        host.cpus.while_breaking(work)
    }

    /// Recovers the block of `first`. Before that all of its pages move home and are mapped: only
    /// then a huge leaf can take their place.
    fn recover(&self, vcpu: &mut MetalVcpu<F>, first: u64, rng: &mut Rng) {
        let block = first - first % BLOCK_PAGES;
        let nr_block_pages = BLOCK_PAGES.min(self.ram().nr_pages() - block);
        if !self.ram().is_whole(first) {
            let invalidation = self.invalidate(block, nr_block_pages);
            for page in block..block + nr_block_pages {
                if let Some(mut locked) = self.ram().try_lock(page).filter(LockedPage::is_away) {
                    // SAFETY: the invalidation is in flight until all pages have moved.
                    unsafe { self.move_page(&mut locked) };
                }
            }
            drop(invalidation);
        }
        self.prefault(vcpu, block, nr_block_pages, rng);
        let range = self.memslot.range(block, nr_block_pages);
        let nr_recovered = self.replace(range, || self.check(self.vm().recover_range(range)));
        self.nr_recovered.fetch_add(nr_recovered, Ordering::Relaxed);
    }

    /// Gives a page another frame, if there is one.
    ///
    /// # Safety
    /// An invalidation of the page is in flight.
    unsafe fn move_page(&self, locked: &mut LockedPage<'_>) {
        // SAFETY: as the caller promises.
        match unsafe { locked.move_page() } {
            Ok(()) => drop(self.nr_moved.fetch_add(1, Ordering::Relaxed)),
            Err(MoveError::OutOfMemory) => {}
            Err(error @ MoveError::Written(_)) => fail!(Access; "{error}"),
        }
    }

    fn move_pages(&self, first: u64, nr_pages: u64) {
        let invalidation = self.invalidate(first, nr_pages);
        for page in first..first + nr_pages {
            if let Some(mut locked) = self.ram().try_lock(page) {
                // SAFETY: the invalidation is in flight until all pages have moved.
                unsafe { self.move_page(&mut locked) };
            }
        }
        drop(invalidation);
    }

    /// Takes the log if it is on and no other CPU takes it.
    fn harvest(&self) {
        if let Some(mut copy) = self.copy.try_lock()
            && copy.is_on
        {
            // One in some: copying all takes long.
            copy.nr_harvests += 1;
            if self.control == Control::CopyBeforeLog && copy.nr_harvests % HARVESTS_FOR_ALL == 0 {
                self.copy_all(&copy);
                // So that an emulator that runs the CPUs in turns lets the guest write.
                (0..64).for_each(|_| core::hint::spin_loop());
                self.take_log(&mut copy);
            } else {
                self.update(&mut copy);
            }
        }
    }

    /// Takes the log, and copies its pages.
    fn update(&self, copy: &mut DirtyCopy) {
        self.take_log(copy);
        for page in 0..self.ram().nr_pages() {
            if copy.bitmap[page as usize / 64] & 1 << (page % 64) != 0 {
                self.copy_page(copy, page);
            }
        }
    }

    fn take_log(&self, copy: &mut DirtyCopy) {
        self.memslot.take_log(&mut copy.bitmap);
        if self.manual_protect != ManualProtect::Disabled {
            self.check(self.vm().clear_dirty_log(self.memslot.slot(), 0, self.ram().nr_pages(), &copy.bitmap));
        }
    }

    fn copy_page(&self, copy: &DirtyCopy, page: u64) {
        if let Some(locked) = self.ram().lock(page) {
            copy_words(locked.words(), copied(copy, page));
        }
    }

    fn copy_all(&self, copy: &DirtyCopy) {
        (0..self.ram().nr_pages()).for_each(|page| self.copy_page(copy, page));
    }

    /// Turns the log on if it is off, and takes it once: it may begin as that of all pages, or with
    /// what CPUs have logged before.
    pub fn turn_log_on(&self) {
        if self.copy.lock().is_on {
            return;
        }
        self.toggle_log();
        let mut copy = self.copy.lock();
        if copy.is_on {
            self.update(&mut copy);
        }
    }

    /// Turns the log on or off. What was written before it is on is copied as a whole.
    fn toggle_log(&self) {
        let mut copy = self.copy.lock();
        if self.memslot.set_flags(|flags| flags ^ MemoryRegionFlags::LOG_DIRTY_PAGES) {
            copy.is_on ^= true;
            if copy.is_on {
                self.copy_all(&copy);
            }
        }
    }

    fn toggle_userfault(&self) {
        self.memslot.set_flags(|flags| flags ^ MemoryRegionFlags::USERFAULT);
    }

    /// Takes pages back, if the memslot has its bitmap now.
    fn withhold(&self, first: u64, nr_pages: u64) {
        (first..first + nr_pages).for_each(|page| self.memslot.withhold(page));
        if self.memslot.flags().contains(MemoryRegionFlags::USERFAULT) {
            match self.vm().rescan_userfault(self.memslot.slot(), first, nr_pages) {
                // The flag may be gone by now.
                Ok(_) | Err(SlotError::NoUserfaultBitmap { .. }) => {}
                Err(error) => fail!("a rescan of memslot {} failed: {error}", self.memslot.slot()),
            }
        }
    }

    /// Brings the page at `gpa`, for which the guest exited.
    pub fn bring(&self, gpa: Gpa) {
        let Some(page) = self.page_of(gpa) else {
            fail!("a memory fault at {gpa}, which is in no memslot with a bitmap")
        };
        self.memslot.bring(page);
    }

    fn prefault(&self, vcpu: &mut MetalVcpu<F>, first: u64, nr_pages: u64, rng: &mut Rng) {
        let access = if rng.bool() { Access::Read } else { Access::Write };
        // It stops at a page that is withheld, or being invalidated.
        let _ = vcpu.pre_fault_memory(self.gpa(first), nr_pages * PAGE_SIZE, access);
    }

    /// A translation, if there is one, is to a frame that the page has or had.
    fn translate(&self, page: u64) {
        let locked = self.ram().try_lock(page);
        let found = self.check(self.vm().translate(self.gpa(page)));
        // A page that is locked does not move.
        if let (Some(locked), Some(found)) = (locked, found)
            && found.pfn != locked.frame()
        {
            fail!("page {page} is mapped to frame {}, and is in frame {}", found.pfn, locked.frame());
        }
    }

    /// All CPUs are outside of the guest: takes the log, and compares the copy with the memory.
    pub fn check_copy(&self) {
        if let Err(error) = self.ram().check_spare() {
            fail!(Access; "{error}");
        }
        let mut copy = self.copy.lock();
        if !copy.is_on {
            return;
        }
        copy.nr_checks += 1;
        self.update(&mut copy);
        for page in 0..self.ram().nr_pages() {
            let Some(locked) = self.ram().lock(page) else { continue };
            for (offset, (word, copied)) in locked.words().iter().zip(copied(&copy, page)).enumerate() {
                let (word, copied) = (word.load(Ordering::Relaxed), copied.load(Ordering::Relaxed));
                if word != copied {
                    fail!(
                        Log; "a write was lost from the dirty log: page {page}, byte {}, is {word:#x}, and was {copied:#x} \
                         when the page was last dirty",
                        offset * 8
                    );
                }
            }
        }
    }

    /// Comparisons of the copy with the memory, while the log was on.
    pub fn nr_checks(&self) -> u64 {
        self.copy.lock().nr_checks
    }

    /// All CPUs are outside of the guest, and since the last [`check_copy`](Operations::check_copy)
    /// the guest has written the pages that `is_written` names, and no others: takes the log, which
    /// must have exactly these.
    pub fn check_exact(&self, is_written: impl Fn(u64) -> bool) {
        let mut copy = self.copy.lock();
        if !copy.is_on {
            return;
        }
        self.update(&mut copy);
        for page in 0..self.ram().nr_pages() {
            let is_logged = copy.bitmap[page as usize / 64] & 1 << (page % 64) != 0;
            if is_logged != is_written(page) {
                fail!(Log; "page {page} was written: {}; it is in the dirty log: {is_logged}", is_written(page));
            }
        }
    }

    /// All CPUs are outside of the guest: maps nothing any more.
    pub fn unmap_all(&self) {
        drop(self.invalidate(0, self.ram().nr_pages()));
    }
}

/// The copy of a page.
fn copied(copy: &DirtyCopy, page: u64) -> &[AtomicU64] {
    let (block, offset) = (page as usize / COPY_PAGES, page as usize % COPY_PAGES);
    &copy.blocks[block][offset * PAGE_WORDS..][..PAGE_WORDS]
}
