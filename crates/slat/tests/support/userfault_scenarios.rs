//! Userfault beside guests that can be stopped at each step, in the world of `stepped_world.rs`.
//! Pages are filled and emptied, the flag is turned off and on, pages become private, and huge
//! pages are recovered.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use shuttle::thread;
use slat::baselines::AtomicU64;
use slat::dirty::DirtyTracking;
use slat::format::Format;
use slat::slots::{MemoryAttributes, UserfaultBitmap};
use slat::tables::FaultAround;
use slat::{Access, Config, Exit, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PAGE_SIZE, PageSize};

use crate::schedules::{pick, random, random_locking};
use crate::world::{self, Guest, PRIVATE_PFN, TestVm, assert_no_table_is_left, backing, new_vm_with, walk};

const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;

const BLOCK: u64 = 512;
/// The pages that guests use: those with PTEs of their own.
const PAGES: u64 = 4;
const FIRST_PFN: u64 = 1 << 20;

/// A memslot of one block, its userfault words, and which of its pages are filled and private.
struct Scene<F: Format> {
    vm: TestVm<F>,
    words: Arc<Vec<AtomicU64>>,
    granularity: PageSize,
    is_filled: [AtomicU64; PAGES as usize],
    /// 2 while a thread changes it.
    attributes: [AtomicU64; PAGES as usize],
    others: MemoryRegionFlags,
    nr_guests: usize,
}

fn random_config() -> Config {
    Config::default()
        .with_locking(random_locking())
        .with_dirty_tracking(pick(&[Config::default().dirty_tracking, DirtyTracking::DirtyBit]))
        .with_fault_around(pick(&[FaultAround::Off, FaultAround::Pages(2)]))
}

impl<F: Format> Scene<F> {
    /// With or without the userfault flag. No bit is set, and all pages are filled.
    fn new(flags: MemoryRegionFlags, granularity: PageSize, nr_guests: usize) -> Arc<Scene<F>> {
        // One vCPU more checks the page tables after a rescan.
        let vm = new_vm_with::<F>(random_config(), nr_guests + 1);
        let scene = Scene {
            vm,
            words: Arc::new((0..BLOCK / 64).map(|_| AtomicU64::new(0)).collect()),
            granularity,
            is_filled: [const { AtomicU64::new(1) }; PAGES as usize],
            attributes: [const { AtomicU64::new(0) }; PAGES as usize],
            others: flags - USERFAULT,
            nr_guests,
        };
        let memory = backing(FIRST_PFN, PageSize::Size2M);
        let region = world::region(0, flags, 0, BLOCK, Some(memory));
        let userfault_bitmap = flags.contains(USERFAULT).then(|| scene.bitmap());
        scene.vm.set_user_memory_region(MemoryRegion { userfault_bitmap, ..region }).unwrap();
        Arc::new(scene)
    }

    fn bitmap(&self) -> UserfaultBitmap {
        UserfaultBitmap::new(Arc::<Vec<AtomicU64>>::clone(&self.words), self.granularity)
    }

    fn bit_of(&self, page: u64) -> u64 {
        1 << (page / self.granularity.level().nr_pages())
    }

    fn turn(&self, flags: MemoryRegionFlags) {
        let region = world::region(0, flags | self.others, 0, BLOCK, None);
        let userfault_bitmap = flags.contains(USERFAULT).then(|| self.bitmap());
        self.vm.set_user_memory_region(MemoryRegion { userfault_bitmap, ..region }).unwrap();
    }

    /// The pages that the bit of `page` stands for.
    fn pages_with(&self, page: u64) -> std::ops::Range<u64> {
        if self.granularity == PageSize::Size4K { page..page + 1 } else { 0..PAGES }
    }

    fn fill(&self, page: u64) {
        self.pages_with(page).for_each(|page| self.is_filled[page as usize].store(1, Ordering::SeqCst));
        self.words[0].fetch_and(!self.bit_of(page), Ordering::SeqCst);
    }

    fn empty(&self, page: u64) {
        self.pages_with(page).for_each(|page| self.is_filled[page as usize].store(0, Ordering::SeqCst));
    }

    /// Sets the bit of `page`, rescans and empties it; then fills it again.
    fn rescan_and_refill(&self, page: u64) {
        self.words[0].fetch_or(self.bit_of(page), Ordering::SeqCst);
        let block_pages = self.granularity.level().nr_pages();
        assert_eq!(self.vm.rescan_userfault(0, page, 1), Ok(block_pages));
        self.empty(page);
        self.assert_not_mapped(page);
        self.fill(page);
    }

    /// An access alone would not find a page that stays mapped in vain.
    fn assert_not_mapped(&self, page: u64) {
        for page in self.pages_with(page) {
            let found = self.vm.host().during_access(self.nr_guests, || walk(&self.vm, page));
            assert_eq!(found, None, "page {page} is empty, and mapped");
        }
    }

    fn check(&self, page: u64, pfn: u64) {
        assert_ne!(self.is_filled[page as usize].load(Ordering::SeqCst), 0, "page {page} is empty, and mapped");
        let shared = FIRST_PFN + page;
        match self.attributes[page as usize].load(Ordering::SeqCst) {
            0 => assert_eq!(pfn, shared, "page {page} is shared"),
            1 => assert_eq!(pfn, shared + PRIVATE_PFN, "page {page} is private"),
            _ => assert!(pfn == shared || pfn == shared + PRIVATE_PFN),
        }
    }

    fn set_attributes(&self, page: u64, nr_pages: u64, attributes: MemoryAttributes) {
        let of = &self.attributes[page as usize..(page + nr_pages).min(PAGES) as usize];
        of.iter().for_each(|attribute| attribute.store(2, Ordering::SeqCst));
        self.vm.set_memory_attributes(Gpa(page * PAGE_SIZE), nr_pages * PAGE_SIZE, attributes).unwrap();
        of.iter().for_each(|attribute| attribute.store(u64::from(!attributes.is_empty()), Ordering::SeqCst));
    }

    /// A few accesses. A guest whose page is pending does something else.
    fn spawn_guest(self: &Arc<Self>, index: usize, nr_accesses: u64) -> thread::JoinHandle<()> {
        let scene = Arc::clone(self);
        thread::spawn(move || {
            let mut guest = Guest::new(&scene.vm, index);
            for _ in 0..nr_accesses {
                let (page, access) = (random(PAGES / 2), pick(&[Access::Read, Access::Write]));
                if random(6) == 0 {
                    let vcpu = &mut guest.vcpu;
                    let _ =
                        scene.vm.host().during_fault(index, || vcpu.pre_fault_memory(Gpa(0), 4 * PAGE_SIZE, access));
                }
                for _ in 0..3 {
                    match guest.access(page, access, |pfn| scene.check(page, pfn)) {
                        Err(Some(Exit::MemoryFault { .. })) | Ok(()) => break,
                        Err(None) => {}
                        Err(exit) => panic!("{exit:?}"),
                    }
                }
            }
        })
    }

    fn finish(&self) {
        self.vm.set_user_memory_region(world::region(0, NO_FLAGS, 0, 0, None)).unwrap();
        assert_no_table_is_left(&self.vm);
    }
}

/// Pages are rescanned, emptied and filled, beside faults under way and recoveries.
pub fn beside_rescans<F: Format>() {
    let scene = Scene::<F>::new(USERFAULT, pick(&[PageSize::Size4K, PageSize::Size2M]), 2);
    let mut threads = vec![scene.spawn_guest(0, 3), scene.spawn_guest(1, 2)];
    let other = Arc::clone(&scene);
    threads.push(thread::spawn(move || {
        let _ = other.vm.split_range(GfnRange::new(Gfn(0), BLOCK), PageSize::Size4K);
        let _ = other.vm.recover_range(GfnRange::new(Gfn(0), BLOCK));
    }));
    (0..2).for_each(|_| scene.rescan_and_refill(random(PAGES / 2)));
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    scene.finish();
}

/// A page is rescanned beside an invalidation of the whole block, with its page-table page.
pub fn beside_rescans_and_invalidations<F: Format>() {
    let scene = Scene::<F>::new(USERFAULT, PageSize::Size4K, 1);
    let guest = scene.spawn_guest(0, 4);
    let other = Arc::clone(&scene);
    let thread = thread::spawn(move || {
        drop(other.vm.invalidate_range(GfnRange::new(Gfn(0), BLOCK)).unwrap());
    });
    (0..2).for_each(|_| scene.rescan_and_refill(0));
    guest.join().unwrap();
    thread.join().unwrap();
    scene.finish();
}

/// The flag is turned on, for pages that are then emptied, and off when all are filled.
pub fn beside_the_flag<F: Format>() {
    let scene = Scene::<F>::new(pick(&[NO_FLAGS, LOG]), pick(&[PageSize::Size4K, PageSize::Size2M]), 2);
    let guests = [scene.spawn_guest(0, 4), scene.spawn_guest(1, 2)];
    for _ in 0..2 {
        let page = random(PAGES / 2);
        scene.words[0].fetch_or(scene.bit_of(page), Ordering::SeqCst);
        scene.turn(USERFAULT);
        scene.empty(page);
        scene.assert_not_mapped(page);
        if random(2) == 0 {
            // While the bit is set, another change keeps the bitmap.
            let region = world::region(0, USERFAULT | (LOG - scene.others), 0, BLOCK, None);
            scene.vm.set_user_memory_region(region).unwrap();
        }
        scene.fill(page);
        scene.turn(NO_FLAGS);
    }
    guests.into_iter().for_each(|guest| guest.join().unwrap());
    scene.finish();
}

/// Pages become private and shared beside faults and recoveries.
pub fn beside_attributes<F: Format>() {
    let scene = Scene::<F>::new(GUEST_MEMFD, PageSize::Size4K, 2);
    let mut threads = vec![scene.spawn_guest(0, 4)];
    let other = Arc::clone(&scene);
    threads.push(thread::spawn(move || {
        let all = GfnRange::new(Gfn(0), BLOCK);
        if random(2) == 0 {
            let _ = other.vm.split_range(all, PageSize::Size4K);
        }
        for _ in 0..2 {
            other.vm.recover_range(all).unwrap();
        }
    }));
    for _ in 0..3 {
        let (page, nr_pages) = pick(&[(0, 1), (1, 1), (0, BLOCK)]);
        scene.set_attributes(page, nr_pages, pick(&[MemoryAttributes::PRIVATE, MemoryAttributes::empty()]));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    scene.finish();
}
