//! CPUs as strict as their manuals allow. One keeps the PTE that it faulted on until a flush, on
//! that CPU or on all. One sets neither A nor D, and faults where they are clear. A guest on either
//! makes progress after a bounded number of faults.

use std::mem::take;
use std::sync::mpsc;

use slat::baselines::Locking;
use slat::format::{Format, Stage2};
use slat::tables::AccessTracking;
use slat::{Access, Config, Exit, GfnRange, Gpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize};

use crate::common::each;
use crate::common::log::{LOG, NO_FLAGS, Slot, World, dirty_trackings};

const SLOT: Slot = Slot::new(1, 512, 64);
/// Faults on one access, one of which is spurious.
const MAX_FAULTS: u64 = 2;

struct StrictCpu<F: Format> {
    world: World<F>,
    /// Accesses that fault until their page is flushed.
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

    /// The local flushes since the last call; the CPU drops what they name.
    fn take_local_flushes(&mut self) -> Vec<Gpa> {
        let flushed = take(&mut *self.world.vm.host().local_flushes.lock().unwrap());
        self.kept.retain(|(gpa, _)| !flushed.contains(gpa));
        flushed
    }

    fn forget_what_was_flushed(&mut self) {
        let flushed = self.world.take_flushes().concat();
        self.kept.retain(|(gpa, _)| !flushed.iter().any(|range| range.contains(gpa.gfn())));
    }

    /// Whether the page tables allow `access`, with all that this CPU does not do itself.
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
    // No PTE was present: RISC-V may cache that.
    assert_eq!(cpu.touch(0, Access::Read), 1);
    // Access is restored: Arm may keep the leaf that lacked it.
    cpu.world.set_flags(SLOT, LOG);
    assert_eq!(cpu.touch(0, Access::Write), 1);
    // Another vCPU was first, and this CPU has the old PTE cached.
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
    // An exit is no entry of the guest.
    cpu.take_local_flushes();
    let device = Gpa(0);
    let exit = Outcome::Exit(Exit::Mmio { gpa: device, access: Access::Read });
    assert_eq!(cpu.world.vcpu.handle_fault(device, Access::Read), Ok(exit));
    assert_eq!(cpu.take_local_flushes(), []);
    cpu.world.finish(&[SLOT]);
}

each!(a_cpu_that_sets_neither_a_nor_d_works_with_the_default_tracking, sets_no_marks);
/// After an aging, after a prefault, and after a harvest by dirty bits, leaves have A or D clear.
fn sets_no_marks<F: Format>(locking: Locking) {
    for tracking in dirty_trackings::<F>() {
        let config = Config::default().with_locking(locking).with_dirty_tracking(tracking);
        let mut cpu = StrictCpu::<F>::new(config, false);
        let size_bytes = SLOT.nr_pages * PAGE_SIZE;
        let gpa = SLOT.gfn(0).gpa();
        assert_eq!(cpu.world.vcpu.pre_fault_memory(gpa, size_bytes, Access::Write), Ok(size_bytes));
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(0), "a prefault is no access");
        // The same for mapped pages: there is nothing to do for them.
        assert_eq!(cpu.world.vcpu.pre_fault_memory(gpa, size_bytes, Access::Write), Ok(size_bytes));
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(0), "nor is another");
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [1, 1]);
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [0, 0]);
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(2));
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(0));
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [1, 1]);
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(2));

        cpu.world.set_flags(SLOT, LOG);
        cpu.world.harvest(SLOT);
        assert_eq!(cpu.world.harvest(SLOT), [0; 0], "{tracking:?}");
        for _ in 0..2 {
            assert!(cpu.touch(1, Access::Read) <= 1);
            assert_eq!([cpu.touch(1, Access::Write), cpu.touch(5, Access::Write)], [1, 1], "{tracking:?}");
            assert_eq!([cpu.touch(1, Access::Write), cpu.touch(5, Access::Write)], [0, 0], "{tracking:?}");
            assert_eq!(cpu.world.harvest(SLOT), [1, 5], "{tracking:?}");
            assert_eq!(cpu.world.harvest(SLOT), [0; 0], "{tracking:?}");
        }
        cpu.world.vm.host().record_zapped();
        drop(cpu.world.vm.invalidate_range(GfnRange::new(SLOT.gfn(1), 1)).unwrap());
        let zapped = cpu.world.vm.host().take_zapped();
        assert!(zapped.len() == 1 && zapped[0].dirty && zapped[0].accessed, "{zapped:?}");
        cpu.world.finish(&[SLOT]);
    }
}

/// A bit that a fault sets causes no further fault, in the way of tracking that leaves none clear.
#[test]
fn with_access_tracking_by_faults_no_fault_sets_a_and_d() {
    let config = Config::default().with_access_tracking(AccessTracking::Faults);
    let mut cpu = StrictCpu::<Stage2>::new(config, false);
    for _ in 0..2 {
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [1, 1]);
        assert_eq!([cpu.touch(0, Access::Read), cpu.touch(1, Access::Write)], [0, 0]);
        assert_eq!(cpu.world.vm.age_range(SLOT.range()), Ok(2));
    }
    assert_eq!(cpu.nr_faults, 4);
}

/// A memslot over memory that is read-only until it is written.
fn copied<F: Format>(config: Config) -> World<F> {
    let world = World::<F>::new(config);
    let memory = crate::common::region(1, SLOT.first * PAGE_SIZE, 64 * PAGE_SIZE, SLOT.first_pfn, PageSize::Size4K);
    let backing = memory.backing.as_ref().unwrap();
    backing.reads_are_writable.store(false, std::sync::atomic::Ordering::SeqCst);
    world.vm.set_user_memory_region(memory).unwrap();
    world
}

each!(the_accessed_bit_survives_a_replacement_of_the_leaf, replaced);
fn replaced<F: Format>(locking: Locking) {
    for tracking in [AccessTracking::AccessedBit, AccessTracking::Faults] {
        let config = Config::default().with_locking(locking).with_access_tracking(tracking);
        // A fault zaps the leaf, and is overtaken: an invalidation elsewhere has taken a number,
        // and the backing is gone.
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

        // A prefault replaces a leaf that was read. Either the new leaf has A, or the host was
        // notified.
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

each!(a_dropped_vm_reports_all_that_is_mapped, dropped);
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
    let (sender, receiver) = mpsc::channel();
    *world.vm.host().zapped_sender.lock().unwrap() = Some(sender);
    drop(world);
    let mut reported: Vec<_> = receiver.iter().collect();
    reported.sort_by_key(|leaf| leaf.range.start);
    assert_eq!(reported.iter().map(|leaf| (leaf.range, leaf.pfn.0)).collect::<Vec<_>>(), expected);
    assert!(reported.iter().all(|leaf| leaf.accessed));
    assert!(reported[1].dirty && reported[2].dirty);
    assert!(
        F::HAS_DIRTY_BIT != reported[0].dirty,
        "where D comes with W, a leaf is dirty as soon as it can be written"
    );
}
