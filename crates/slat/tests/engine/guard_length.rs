//! No guard visits more than a bounded number of PTEs, words or pages, even if the host never asks
//! for a yield. So what is retired behind a guard is freed soon. Builds with debug assertions check
//! each guard inside the engine. These tests observe it from outside.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::trap::trap_vm_with;
use crate::common::{GIB, MIB, PRIVATE_PFN, TestHost, change, each, lazily_splitting, region, translate, vm};
use slat::baselines::Locking;
use slat::dirty::DirtyTracking;
use slat::error::FaultError;
use slat::format::{Format, Npt};
use slat::slots::{MemoryAttributes, UserfaultBitmap, UserfaultWords};
use slat::tables::AccessTracking;
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm,
};

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const USERFAULT: MemoryRegionFlags = MemoryRegionFlags::USERFAULT;
const GUEST_MEMFD: MemoryRegionFlags = MemoryRegionFlags::GUEST_MEMFD;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();
const PRIVATE: MemoryAttributes = MemoryAttributes::PRIVATE;
const RESUMED: Result<Outcome, FaultError> = Ok(Outcome::Resume);
const TIB: u64 = 1 << 40;

/// Deletes memslot `victim` at the first look of a thread with an open guard, then counts the looks
/// until the deleted memslot is freed. That is when the guard has ended, or the first one after it.
struct Victim {
    id: u32,
    dropped: Arc<AtomicBool>,
    is_deleted: bool,
    nr_looks: Arc<AtomicU64>,
}

impl Victim {
    fn create<H: slat::Host<Backing = Arc<crate::common::TestBacking>>, F: Format>(vm: &Vm<H, F>) -> Victim {
        let memory = region(99, 512 * GIB - PAGE_SIZE, PAGE_SIZE, 1, PageSize::Size4K);
        let dropped = Arc::clone(&memory.backing.as_ref().unwrap().dropped);
        vm.set_user_memory_region(memory).unwrap();
        Victim { id: 99, dropped, is_deleted: false, nr_looks: Arc::default() }
    }

    fn look<H: slat::Host<Backing = Arc<crate::common::TestBacking>>, F: Format>(&mut self, vm: &Vm<H, F>) {
        if self.dropped.load(Ordering::SeqCst) {
            return;
        }
        if self.is_deleted {
            vm.reclaim();
        } else {
            vm.set_user_memory_region(change(self.id, NO_FLAGS, 0, 0)).unwrap();
            self.is_deleted = true;
        }
        if !self.dropped.load(Ordering::SeqCst) {
            self.nr_looks.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// 64 lowest page-table pages.
const SIZE: u64 = 128 * MIB;
const PAGES: u64 = SIZE / PAGE_SIZE;
const ALL: GfnRange = GfnRange { start: Gfn(0), end: Gfn(PAGES) };

#[derive(Clone, Copy, Debug)]
enum Walk {
    BeginsToLog,
    Invalidates,
    Ages,
    Harvests,
    Recovers,
}

impl Walk {
    fn config(self) -> Config {
        let config = lazily_splitting(Locking::None);
        match self {
            Walk::BeginsToLog => config.with_dirty_tracking(DirtyTracking::WriteProtectLeaves),
            Walk::Harvests => config.with_dirty_tracking(DirtyTracking::DirtyBit),
            Walk::Ages => config.with_access_tracking(AccessTracking::Faults),
            Walk::Invalidates | Walk::Recovers => config,
        }
    }

    fn run(self, vm: &Vm<TestHost, Npt>) {
        match self {
            Walk::BeginsToLog => vm.set_user_memory_region(change(0, LOG, 0, SIZE)).unwrap(),
            Walk::Invalidates => drop(vm.invalidate_range(ALL).unwrap()),
            Walk::Ages => assert_eq!(vm.age_range(ALL), Ok(PAGES)),
            Walk::Harvests => assert_eq!(vm.get_dirty_log(0, &mut vec![0; PAGES as usize / 64]), Ok(PAGES)),
            Walk::Recovers => assert_eq!(vm.recover_range(ALL), Ok(0)),
        }
    }
}

#[test]
fn a_walk_ends_its_guard_after_some_tables_without_a_yield() {
    let mut freed_after = Vec::new();
    for walk in [Walk::BeginsToLog, Walk::Invalidates, Walk::Ages, Walk::Harvests, Walk::Recovers] {
        let vm = trap_vm_with::<Npt>(walk.config());
        // Pages that cannot become a huge leaf.
        vm.set_user_memory_region(region(0, 0, SIZE, 1, PageSize::Size4K)).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        if matches!(walk, Walk::Harvests) {
            vm.set_user_memory_region(change(0, LOG, 0, SIZE)).unwrap();
        }
        for page in 0..PAGES {
            assert_eq!(vcpu.handle_fault(Gpa(page * PAGE_SIZE), Access::Write), RESUMED);
        }
        let mut victim = Victim::create(&vm);
        let nr_looks = Arc::clone(&victim.nr_looks);
        let (probed, thread) = (Arc::downgrade(&vm), std::thread::current().id());
        vm.host().traps().at_table.set(move || {
            assert_eq!(std::thread::current().id(), thread);
            victim.look(&probed.upgrade().unwrap());
        });
        walk.run(&vm);
        vm.host().traps().at_table.remove();
        freed_after.push((walk, nr_looks.load(Ordering::SeqCst)));
        drop(vcpu);
    }
    // 4096 PTEs are eight page-table pages. Some walks look at each page-table page more than once.
    assert!(freed_after.iter().all(|(_, nr_looks)| (1..=40).contains(nr_looks)), "{freed_after:?} looks at tables");
}

/// Words that call back at each read.
struct Watched {
    words: Vec<AtomicU64>,
    at_look: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl UserfaultWords for Watched {
    fn words(&self) -> &[AtomicU64] {
        if let Some(at_look) = &mut *self.at_look.lock().unwrap() {
            at_look();
        }
        &self.words
    }
}

#[test]
fn many_pages_are_checked_in_many_guards() {
    let vm = vm::<Npt>(Locking::None);
    let words = (0..PAGES / 64).map(|_| AtomicU64::new(0)).collect();
    let words = Arc::new(Watched { words, at_look: Mutex::default() });
    vm.set_user_memory_region(MemoryRegion {
        flags: USERFAULT | GUEST_MEMFD,
        userfault_bitmap: Some(UserfaultBitmap::new(Arc::<Watched>::clone(&words), PageSize::Size4K)),
        ..region(0, 0, SIZE, 512, PageSize::Size4K)
    })
    .unwrap();
    let mut victim = Victim::create(&vm);
    let (nr_looks, probed) = (Arc::clone(&victim.nr_looks), Arc::downgrade(&vm));
    *words.at_look.lock().unwrap() = Some(Box::new(move || victim.look(&probed.upgrade().unwrap())));
    assert_eq!(vm.check_access(Gpa(0), SIZE), Ok(Outcome::Resume));
    *words.at_look.lock().unwrap() = None;
    let nr_looks = nr_looks.load(Ordering::SeqCst);
    assert!((1..=4096).contains(&nr_looks), "freed after {nr_looks} pages");
}

each!(in_a_slot_of_4_tib_a_fault_maps_the_largest_like_block, huge_guest_memfd);
fn huge_guest_memfd<F: Format>(locking: Locking) {
    let size = (4 * TIB).min((1 << F::GPA_BITS) / 2);
    for max_size in [PageSize::Size4K, PageSize::Size2M, PageSize::Size1G] {
        let vm = vm::<F>(locking);
        let memory = region(0, 0, size, 0, max_size);
        vm.set_user_memory_region(MemoryRegion { flags: GUEST_MEMFD, ..memory }).unwrap();
        // In one block of 1 GiB one page is private; in the next but one all are.
        vm.set_memory_attributes(Gpa(GIB + 5 * PAGE_SIZE), PAGE_SIZE, PRIVATE).unwrap();
        vm.set_memory_attributes(Gpa(3 * GIB), GIB, PRIVATE).unwrap();
        let mut vcpu = vm.create_vcpu().unwrap();
        let largest = max_size.level();
        for (gpa, level) in [
            (0, largest),
            (GIB, Level::L4K),
            (GIB + 5 * PAGE_SIZE, Level::L4K),
            (GIB + 2 * MIB, largest.min(Level::L2M)),
            (2 * GIB - PAGE_SIZE, largest.min(Level::L2M)),
            (2 * GIB, largest),
            (3 * GIB + 7 * MIB, largest),
            (size - PAGE_SIZE, largest),
        ] {
            assert_eq!(vcpu.handle_fault(Gpa(gpa), Access::Write), RESUMED);
            let found = translate(&vm, Gpa(gpa)).unwrap();
            let is_private = gpa == GIB + 5 * PAGE_SIZE || gpa / GIB == 3;
            let first = if is_private { PRIVATE_PFN } else { 0 };
            assert_eq!((found.level, found.pfn.0), (level, first + gpa / PAGE_SIZE), "{gpa:#x}, {max_size:?}");
        }
        // Prefaults: page-table pages are filled with leaves of like pages, and no more.
        for (gpa, level) in [(4 * GIB, largest), (GIB + 512 * MIB, largest.min(Level::L2M))] {
            assert_eq!(vcpu.pre_fault_memory(Gpa(gpa), 8 * MIB, Access::Read), Ok(8 * MIB));
            assert!((0..2048).all(|page| translate(&vm, Gpa(gpa + page * PAGE_SIZE)).unwrap().level == level));
        }
        assert_eq!(
            vm.check_access(Gpa(0), 4 * GIB),
            Ok(Outcome::Exit(Exit::MemoryFault {
                flags: slat::slots::MemoryFaultFlags::PRIVATE,
                gpa: Gpa(GIB + 5 * PAGE_SIZE),
                size: PAGE_SIZE,
            }))
        );
        // All of it, again.
        vm.set_memory_attributes(Gpa(0), size, PRIVATE).unwrap();
        assert_eq!(vm.memory_attributes(Gpa(size - 1)), Ok(PRIVATE));
        drop(vcpu);
    }
}

each!(the_log_of_a_huge_slot_is_marked_and_counted_in_turns, huge_log);
fn huge_log<F: Format>(locking: Locking) {
    // More words than a guard visits.
    let size = (256 * GIB).min((1 << F::GPA_BITS) / 2);
    let nr_pages = size / PAGE_SIZE;
    let vm = vm::<F>(locking);
    for slot in [0, 1] {
        let memory = region(slot, u64::from(slot) * size, size, 0, PageSize::Size4K);
        vm.set_user_memory_region(MemoryRegion { flags: LOG, ..memory }).unwrap();
    }
    vm.mark_dirty(1, 3, nr_pages - 3).unwrap();
    assert_eq!(vm.nr_marked_dirty(), Ok(nr_pages - 3));
    vm.mark_dirty(0, 100, 1).unwrap();
    assert_eq!(vm.nr_marked_dirty(), Ok(nr_pages - 2));
    assert_eq!(vm.is_marked_dirty(1, nr_pages - 1), Ok(true));
    assert_eq!((vm.is_marked_dirty(1, 2), vm.is_marked_dirty(1, 3)), (Ok(false), Ok(true)));
}
