//! CPUs that are as unforgiving as their manuals allow. One keeps what it faulted on until it is flushed, on that CPU or on all.
//! One sets neither A nor D, and faults where they are clear. A guest on either gets on after a bounded number of faults.

use std::mem::take;
use std::sync::mpsc;

use slat::baselines::Locking;
use slat::format::{Format, Stage2};
use slat::tables::AccessTracking;
use slat::{Access, Config, Exit, GfnRange, Gpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize};

use crate::common::each;
use crate::common::log::{LOG, NO_FLAGS, Slot, World, dirty_trackings};

const SLOT: Slot = Slot::new(1, 512, 64);
/// Faults on one access, of which one is spurious.
const MAX_FAULTS: u64 = 2;

struct StrictCpu<F: Format> {
    world: World<F>,
    /// Accesses to pages that fault until the page is flushed.
    kept: Vec<(Gpa, Access)>,
    /// Whether the CPU sets A and D by itself.
    sets_marks: bool,
    nr_faults: u64,
}

impl<F: Format> StrictCpu<F> {
    fn new(config: Config, sets_marks: bool) -> StrictCpu<F> {
        let world = World::new(config);
        world.create(SLOT, NO_FLAGS);
        StrictCpu { world, kept: Vec::new(), sets_marks, nr_faults: 0 }
    }

    fn gpa(page: u64) -> Gpa {
        SLOT.gfn(page).gpa()
    }

    /// The local flushes since this was last asked; what they name is forgotten.
    fn take_local_flushes(&mut self) -> Vec<Gpa> {
        let flushed = take(&mut *self.world.vm.host().local_flushes.lock().unwrap());
        self.kept.retain(|(gpa, _)| !flushed.contains(gpa));
        flushed
    }

    fn forget_what_was_flushed(&mut self) {
        let flushed = self.world.take_flushes().concat();
        self.kept.retain(|(gpa, _)| !flushed.iter().any(|range| range.contains(gpa.gfn())));
    }

    /// Whether the tables allow `access`, with all that this CPU does not do itself.
    fn is_allowed(&self, page: u64, access: Access) -> bool {
        let Some(found) = self.world.at(SLOT.gfn(page)) else { return false };
        let dirty = if access == Access::Write && F::HAS_DIRTY_BIT { F::DIRTY } else { 0 };
        let marks = F::ACCESSED | dirty;
        (access != Access::Write || found.writable) && (self.sets_marks || found.pte.0 & marks == marks)
    }

    /// Does `access`. Returns the number of faults.
    fn touch(&mut self, page: u64, access: Access) -> u64 {
        let gpa = Self::gpa(page);
        self.forget_what_was_flushed();
        for nr_faults in 0..=MAX_FAULTS {
            if !self.kept.contains(&(gpa, access)) && self.is_allowed(page, access) {
                if self.sets_marks {
                    match access {
                        Access::Write => self.world.write(SLOT, page),
                        _ => self.world.read(SLOT, page),
                    };
                }
                return nr_faults;
            }
            if F::NEEDS_LOCAL_FLUSH {
                self.kept.push((gpa, access));
            }
            self.take_local_flushes();
            assert_eq!(self.world.vcpu.handle_fault(gpa, access), Ok(Outcome::Resume));
            let flushed = self.take_local_flushes();
            let expected = if F::NEEDS_LOCAL_FLUSH { vec![gpa] } else { vec![] };
            assert_eq!(flushed, expected, "each fault flushes its page, where that is needed");
            self.forget_what_was_flushed();
            self.nr_faults += 1;
        }
        panic!("{access:?} of page {page} faults for ever");
    }
}

each!(a_cpu_that_keeps_what_it_faulted_on_is_flushed_at_the_end_of_each_fault, keeps);
fn keeps<F: Format>(locking: Locking) {
    let mut cpu = StrictCpu::<F>::new(Config::default().with_locking(locking), true);
    // Nothing was there: RISC-V may keep that.
    assert_eq!(cpu.touch(0, Access::Read), 1);
    // A right is given back: Arm may keep the leaf that lacked it.
    cpu.world.set_flags(SLOT, LOG);
    assert_eq!(cpu.touch(0, Access::Write), 1);
    // Another vCPU was first, and this CPU has what was there before.
    for (page, access) in [(1, Access::Read), (2, Access::Write), (0, Access::Write)] {
        let mut other = cpu.world.vm.create_vcpu().unwrap();
        assert_eq!(other.handle_fault(StrictCpu::<F>::gpa(page), access), Ok(Outcome::Resume));
        if F::NEEDS_LOCAL_FLUSH {
            cpu.kept.push((StrictCpu::<F>::gpa(page), access));
            cpu.world.vm.host().local_flushes.lock().unwrap().clear();
            let nr_spurious = cpu.world.vm.stats().spurious;
            assert_eq!(cpu.touch(page, access), 1);
            assert_eq!(cpu.world.vm.stats().spurious, nr_spurious + 1);
        } else {
            assert_eq!(cpu.touch(page, access), 0);
        }
    }
    // An exit is no entry.
    cpu.take_local_flushes();
    let device = Gpa(0);
    let exit = Outcome::Exit(Exit::Mmio { gpa: device, access: Access::Read });
    assert_eq!(cpu.world.vcpu.handle_fault(device, Access::Read), Ok(exit));
    assert_eq!(cpu.take_local_flushes(), []);
    cpu.world.finish(&[SLOT]);
}

each!(a_cpu_that_sets_no_marks_gets_on_with_the_default_tracking, sets_no_marks);
/// After an aging, after a prefault, and after a harvest by dirty bits, leaves have A or D clear.
fn sets_no_marks<F: Format>(locking: Locking) {
    for tracking in dirty_trackings::<F>() {
        let config = Config::default().with_locking(locking).with_dirty_tracking(tracking);
        let mut cpu = StrictCpu::<F>::new(config, false);
        let size_bytes = SLOT.nr_pages * PAGE_SIZE;
        let gpa = SLOT.gfn(0).gpa();
        assert_eq!(cpu.world.vcpu.pre_fault_memory(gpa, size_bytes, Access::Write), Ok(size_bytes));
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(0), "a prefault is no access");
        // The same of pages that are mapped: there is nothing to be done for them.
        assert_eq!(cpu.world.vcpu.pre_fault_memory(gpa, size_bytes, Access::Write), Ok(size_bytes));
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(0), "nor is another");
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [1, 1]);
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [0, 0]);
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(2));
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(0));
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [1, 1]);
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(2));

        cpu.world.set_flags(SLOT, LOG);
        cpu.world.take(SLOT);
        assert_eq!(cpu.world.take(SLOT), [0; 0], "{tracking:?}");
        for _ in 0..2 {
            assert!(cpu.touch(1, Access::Read) <= 1);
            assert_eq!([cpu.touch(1, Access::Write), cpu.touch(5, Access::Write)], [1, 1], "{tracking:?}");
            assert_eq!([cpu.touch(1, Access::Write), cpu.touch(5, Access::Write)], [0, 0], "{tracking:?}");
            assert_eq!(cpu.world.take(SLOT), [1, 5], "{tracking:?}");
            assert_eq!(cpu.world.take(SLOT), [0; 0], "{tracking:?}");
        }
        cpu.world.vm.host().record_zapped();
        drop(cpu.world.vm.invalidate_range(GfnRange::new(SLOT.gfn(1), 1)).unwrap());
        let zapped = cpu.world.vm.host().take_zapped();
        assert!(zapped.len() == 1 && zapped[0].dirty && zapped[0].accessed, "{zapped:?}");
        cpu.world.finish(&[SLOT]);
    }
}

/// What a fault sets does not fault, in the way of tracking that leaves none clear.
#[test]
fn no_fault_is_for_marks_where_accesses_are_tracked_by_faults() {
    let config = Config::default().with_access_tracking(AccessTracking::Faults);
    let mut cpu = StrictCpu::<Stage2>::new(config, false);
    for _ in 0..2 {
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [1, 1]);
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [0, 0]);
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(2));
    }
    assert_eq!(cpu.nr_faults, 4);
}

/// A slot over memory that is given read-only until it is written.
fn copied<F: Format>(config: Config) -> World<F> {
    let world = World::<F>::new(config);
    let memory = crate::common::region(1, SLOT.first * PAGE_SIZE, 64 * PAGE_SIZE, SLOT.first_pfn, PageSize::Size4K);
    let backing = memory.backing.as_ref().unwrap();
    backing.read_gives_writable.store(false, std::sync::atomic::Ordering::SeqCst);
    world.vm.set_user_memory_region(memory).unwrap();
    world
}

each!(that_a_page_was_read_is_not_lost_when_its_leaf_is_replaced, replaced);
fn replaced<F: Format>(locking: Locking) {
    for tracking in [AccessTracking::AccessedBit, AccessTracking::Faults] {
        let config = Config::default().with_locking(locking).with_access_tracking(tracking);
        // A fault takes the leaf away, and is overtaken: an invalidation has taken a stamp elsewhere, and the backing is gone.
        let mut world = copied::<F>(config);
        world.read(SLOT, 3);
        world.vm.host().record_zapped();
        let vm = world.vm.clone();
        world.vm.host().overtake(crate::common::Call::Resolve, 1, move || {
            drop(vm.invalidate_range(GfnRange::new(SLOT.gfn(60), 1)).unwrap());
        });
        assert_eq!(world.vcpu.handle_fault(SLOT.gfn(3).gpa(), Access::Write), Ok(Outcome::Resume));
        assert!(world.vm.host().was_overtaken());
        let zapped = world.vm.host().take_zapped();
        assert!(zapped.iter().any(|leaf| leaf.range.start == SLOT.gfn(3) && leaf.accessed), "{zapped:?}");

        // A prefault replaces a leaf that was read: the new one says so, or the host was told.
        world.read(SLOT, 4);
        let nr_written = world.vcpu.pre_fault_memory(SLOT.gfn(4).gpa(), PAGE_SIZE, Access::Write);
        assert_eq!(nr_written, Ok(PAGE_SIZE));
        assert!(world.is_writable(SLOT, 4));
        assert_eq!(world.vm.test_age_range(GfnRange::new(SLOT.gfn(4), 1)), Ok(1));
        let zapped = world.vm.host().take_zapped();
        assert!(zapped.iter().any(|leaf| leaf.range.start == SLOT.gfn(4) && leaf.accessed), "{zapped:?}");
        world.finish(&[SLOT]);
    }
}

each!(a_vm_that_is_dropped_tells_of_all_that_is_mapped, dropped);
fn dropped<F: Format>(locking: Locking) {
    const HUGE: Slot = Slot::huge(2, 1024, 512, PageSize::Size2M);
    let mut world = World::<F>::new(Config::default().with_locking(locking));
    world.create(SLOT, MemoryRegionFlags::empty());
    world.create(HUGE, MemoryRegionFlags::empty());
    world.read(SLOT, 0);
    world.write(SLOT, 5);
    world.write(HUGE, 7);
    world.read(SLOT, 9);
    drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(9), 1)).unwrap());
    let expected = [
        (GfnRange::new(SLOT.gfn(0), 1), SLOT.first_pfn),
        (GfnRange::new(SLOT.gfn(5), 1), SLOT.first_pfn + 5),
        (HUGE.range(), HUGE.first_pfn),
    ];
    let (tell, told) = mpsc::channel();
    *world.vm.host().hears_zapped.lock().unwrap() = Some(tell);
    drop(world);
    let mut told: Vec<_> = told.iter().collect();
    told.sort_by_key(|leaf| leaf.range.start);
    assert_eq!(told.iter().map(|leaf| (leaf.range, leaf.pfn.0)).collect::<Vec<_>>(), expected);
    assert!(told.iter().all(|leaf| leaf.accessed));
    assert!(told[1].dirty && told[2].dirty);
    assert!(F::HAS_DIRTY_BIT != told[0].dirty, "where D comes with W, a leaf is dirty as soon as it can be written");
}
