//! Huge pages: split ahead of time, by which call and on which node; and recovered when logging
//! ends.

mod kvm_page_splitting;
mod without_memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::broken::Broken;
use crate::common::log::{LAZY, LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World, dirty_trackings};
use crate::common::{GIB, MIB, change, region, translate};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::error::RangeError;
use slat::format::{Ept, Format, Npt};
use slat::host::{AllocationWait, ZappedLeaf};
use slat::tables::AccessTracking;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Vm};

use crate::common::TestHost;

const LOCKINGS: [Locking; 3] = [Locking::None, Locking::Shared, Locking::Exclusive];
/// Pages of 2 MiB and of 1 GiB.
const BIG: u64 = 512;
const HUGE: u64 = 512 * 512;

fn for_each(test: impl Fn(Config)) {
    for locking in LOCKINGS {
        test(Config::default().with_locking(locking));
    }
}

fn pages<F: Format>(vm: &Vm<TestHost, F>) -> (u64, u64, u64) {
    let stats = vm.stats();
    (stats.pages_4k(), stats.pages_2m(), stats.pages_1g())
}

/// A VM with one memslot of 2 GiB at 0, mapped for writing by leaves of `size`.
fn mapped<F: Format>(config: Config, size: PageSize) -> Arc<Vm<TestHost, F>> {
    let vm = Arc::new(Vm::new(TestHost::default(), config).unwrap());
    vm.set_user_memory_region(region(0, 0, 2 * GIB, 2 * GIB / PAGE_SIZE, size)).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.pre_fault_memory(Gpa(0), 2 * GIB, Access::Write), Ok(2 * GIB));
    vm
}

fn there_and_back<F: Format>(config: Config, size: PageSize) {
    let vm = mapped::<F>(config, size);
    let before = pages(&vm);
    vm.set_user_memory_region(change(0, LOG, 0, 2 * GIB)).unwrap();
    if config.manual_protect == ManualProtect::InitiallySet {
        assert_eq!(pages(&vm), before);
        assert_eq!(vm.clear_dirty_log(0, 0, 2 * GIB / PAGE_SIZE, &vec![u64::MAX; 8192]), Ok(2 * GIB / PAGE_SIZE));
    }
    assert_eq!(pages(&vm), (2 * GIB / PAGE_SIZE, 0, 0));
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.handle_fault(Gpa(5 * MIB), Access::Write), Ok(Outcome::Resume));
    assert_eq!(translate(&vm, Gpa(5 * MIB)).unwrap().level, Level::L4K);
    let flushes = vm.stats().flushes;
    vm.set_user_memory_region(change(0, NO_FLAGS, 0, 2 * GIB)).unwrap();
    assert_eq!(pages(&vm), before);
    assert!(vm.stats().flushes - flushes <= 4, "{} flushes", vm.stats().flushes - flushes);
    let found = translate(&vm, Gpa(5 * MIB)).unwrap();
    assert_eq!(
        (found.level.nr_pages() * PAGE_SIZE, found.writable, found.pfn.0),
        (size.size_bytes(), true, (2 * GIB + 5 * MIB) / PAGE_SIZE)
    );
    drop(vcpu);
    vm.reclaim();
    assert_eq!(vm.stats().live_tables(), vm.host().live_tables() as u64);
}

#[test]
fn logging_splits_huge_pages_and_its_end_recovers_them() {
    for_each(|config| {
        for manual in [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet] {
            for size in [PageSize::Size2M, PageSize::Size1G] {
                slat::for_each_format!(F => {
                    // The flushes of break before make are more.
                    if !F::BREAK_BEFORE_MAKE {
                        there_and_back::<F>(config.with_manual_protect(manual), size);
                    }
                });
            }
        }
    });
}

#[test]
fn a_range_is_split_and_recovered() {
    for_each(|config| {
        let vm = mapped::<Npt>(config, PageSize::Size1G);
        let range = GfnRange::new(Gpa(GIB + 4 * MIB + 4096).gfn(), 512 * 3);
        assert_eq!(vm.split_range(range, PageSize::Size2M), Ok(1));
        assert_eq!(pages(&vm), (0, 512, 1));
        assert_eq!(vm.split_range(range, PageSize::Size4K), Ok(4));
        assert_eq!(pages(&vm), (4 * 512, 508, 1));
        assert_eq!(vm.split_range(range, PageSize::Size4K), Ok(0));
        assert_eq!(vm.recover_range(range), Ok(2), "blocks that are covered in part stay");
        assert_eq!(vm.recover_range(GfnRange::new(Gpa(0).gfn(), 2 * GIB / PAGE_SIZE)), Ok(3));
        assert_eq!(pages(&vm), (0, 0, 2));
    });
}

/// `$test::<F>(config)` for each format and locking, and for one that breaks and supports all.
macro_rules! each_format {
    ($name:ident, $test:ident) => {
        #[test]
        fn $name() {
            for locking in [Locking::None, Locking::Shared] {
                $test::<Broken>(Config::default().with_locking(locking));
            }
            crate::common::for_each_locking!(F, locking => $test::<F>(Config::default().with_locking(locking)));
        }
    };
}
use each_format;

fn sizes<F: Format>(world: &World<F>) -> (u64, u64, u64) {
    pages(&world.vm)
}

/// A world with one memslot, mapped as large as possible for `access`, as if the guest had accessed
/// nothing yet. Zapped leaves are recorded.
fn world_with<F: Format>(config: Config, slot: Slot, access: Access) -> World<F> {
    let mut world = World::<F>::new(config);
    world.create(slot, NO_FLAGS);
    let size_bytes = slot.nr_pages * PAGE_SIZE;
    assert_eq!(world.vcpu.pre_fault_memory(slot.gfn(0).gpa(), size_bytes, access), Ok(size_bytes));
    world.vm.host().record_zapped();
    world
}

fn zapped<F: Format>(world: &World<F>) -> Vec<ZappedLeaf> {
    world.vm.host().take_zapped()
}

each_format!(a_recovery_unlinks_a_table_with_a_hole_and_the_next_access_maps_a_huge_leaf, hole);
fn hole<F: Format>(config: Config) {
    let slot = Slot::huge(1, 4 * BIG, 2 * BIG, PageSize::Size2M);
    let mut world = world_with::<F>(config, slot, Access::Write);
    let vm = Arc::clone(&world.vm);
    assert_eq!(vm.split_range(slot.range(), PageSize::Size4K), Ok(2));
    world.write(slot, 3);
    world.read(slot, 5);
    drop(vm.invalidate_range(GfnRange::new(slot.gfn(9), 1)).unwrap());
    assert_eq!(zapped(&world).len(), 1);
    assert_eq!(vm.recover_range(slot.range()), Ok(1), "the other block");
    assert_eq!(sizes(&world), (0, 1, 0), "a table that cannot become a leaf is unlinked");
    let gone = zapped(&world);
    assert_eq!(gone.len(), 511);
    for leaf in gone {
        let page = leaf.range.start.0 - slot.first;
        assert_eq!(leaf.range.nr_pages(), 1);
        // A writable page counts as written, where CPUs set no D.
        let is_dirty = page == 3 || !F::HAS_DIRTY_BIT;
        assert_eq!((leaf.accessed, leaf.dirty), ([3, 5].contains(&page), is_dirty), "page {page}");
        assert_eq!(leaf.pfn.0, slot.first_pfn + page);
    }
    assert_eq!(world.read(slot, 100), 1);
    assert_eq!(sizes(&world), (0, 2, 0));
    assert_eq!(vm.recover_range(slot.range()), Ok(0));
    world.finish(&[slot]);
}

each_format!(a_page_with_another_frame_keeps_its_block_small, misfit);
fn misfit<F: Format>(config: Config) {
    let mut world = World::<F>::new(config);
    let memory = region(1, 2 * MIB, 4 * MIB, 0x1000, PageSize::Size2M);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    let vm = Arc::clone(&world.vm);
    vm.host().record_zapped();
    vm.set_user_memory_region(memory).unwrap();
    let all = GfnRange::new(Gfn(BIG), 2 * BIG);
    assert_eq!(world.vcpu.pre_fault_memory(Gpa(2 * MIB), 4 * MIB, Access::Write), Ok(4 * MIB));
    let invalidation = vm.invalidate_range(GfnRange::new(Gfn(BIG + 7), 1)).unwrap();
    backing
        .frames
        .write()
        .unwrap()
        .insert(7, crate::common::Frame { pfn: 0x9_0000, writes: crate::common::Writes::Allowed });
    drop(invalidation);
    assert_eq!(world.vcpu.handle_fault(Gfn(BIG + 7).gpa(), Access::Write), Ok(Outcome::Resume));
    vm.split_range(all, PageSize::Size4K).unwrap();
    zapped(&world);
    assert_eq!(vm.recover_range(all), Ok(1), "the block without it");
    assert_eq!((sizes(&world), zapped(&world).len()), ((512, 1, 0), 0), "the host refuses: nothing is zapped");
    assert_eq!(translate(&vm, Gfn(BIG + 7).gpa()).unwrap().pfn.0, 0x9_0000);
}

each_format!(only_blocks_wholly_inside_a_slot_are_recovered, ends);
fn ends<F: Format>(config: Config) {
    // From 1 MiB to 7 MiB, and a neighbour that has the rest of the last block.
    let slots = [Slot::huge(1, 256, 6 * 256, PageSize::Size2M), Slot::huge(2, 7 * 256, 256, PageSize::Size2M)];
    let mut world = world_with::<F>(config, slots[0], Access::Write);
    world.create(slots[1], NO_FLAGS);
    world.write_all(slots[1], 0..256);
    assert_eq!(sizes(&world), (256 + 512, 2, 0));
    let all = GfnRange::new(Gfn(0), 4 * BIG);
    assert_eq!(world.vm.split_range(all, PageSize::Size4K), Ok(2));
    assert_eq!(world.vm.recover_range(GfnRange::new(Gfn(256), 4 * 256)), Ok(1), "as many as the range covers");
    assert_eq!(world.vm.recover_range(all), Ok(1));
    assert_eq!((sizes(&world), zapped(&world).len()), ((256 + 512, 2, 0), 0));
    world.set_flags(slots[0], LOG);
    world.set_flags(slots[0], NO_FLAGS);
    assert_eq!((sizes(&world), zapped(&world).len()), ((256 + 512, 2, 0), 0));
    world.finish(&slots);
}

each_format!(frames_that_are_not_contiguous_stay_small, alignment);
fn alignment<F: Format>(config: Config) {
    let slot = Slot { first_pfn: 0x10_0000 + 3, ..Slot::huge(1, BIG, 2 * BIG, PageSize::Size1G) };
    let world = world_with::<F>(config, slot, Access::Write);
    let before = sizes(&world);
    assert_eq!(before, (2 * BIG, 0, 0));
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Ok(0));
    assert_eq!(world.vm.recover_range(slot.range()), Ok(0));
    assert_eq!((sizes(&world), zapped(&world).len()), (before, 0));
    // By 2 MiB, and not by 1 GiB.
    let other = Slot { first_pfn: HUGE * 5 + BIG, ..Slot::huge(2, HUGE, HUGE, PageSize::Size1G) };
    let world = world_with::<F>(config, other, Access::Write);
    assert_eq!(sizes(&world), (0, 512, 0));
    assert_eq!(world.vm.split_range(other.range(), PageSize::Size4K), Ok(512));
    assert_eq!(world.vm.recover_range(other.range()), Ok(512));
    assert_eq!((sizes(&world), zapped(&world).len()), ((0, 512, 0), 0));
}

each_format!(read_only_pages_stay_read_only, read_only);
fn read_only<F: Format>(config: Config) {
    let slot = Slot::huge(1, 0, HUGE, PageSize::Size1G);
    let mut world = World::<F>::new(config);
    world.create(slot, MemoryRegionFlags::READONLY);
    world.read(slot, 0);
    assert_eq!(sizes(&world), (0, 0, 1));
    world.vm.host().record_zapped();
    assert_eq!(world.vm.split_range(GfnRange::new(Gfn(0), 1), PageSize::Size4K), Ok(2));
    assert_eq!(sizes(&world), (512, 511, 0));
    assert!(world.entries(Slot { nr_pages: 1024, ..slot }).iter().all(|found| !found.unwrap().writable));
    assert_eq!(world.vm.recover_range(slot.range()), Ok(2));
    assert!(!world.is_writable(slot, 0));
    assert_eq!((sizes(&world), zapped(&world).len()), ((0, 0, 1), 0));
    // A writable memslot, over frames that the host makes read-only until they are written.
    let memory = region(2, GIB, 2 * MIB, HUGE, PageSize::Size2M);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    world.vm.set_user_memory_region(memory).unwrap();
    let block = GfnRange::new(Gfn(HUGE), BIG);
    assert_eq!(world.vcpu.handle_fault(Gpa(GIB), Access::Read), Ok(Outcome::Resume));
    assert_eq!(world.vm.split_range(block, PageSize::Size4K), Ok(1));
    // One page is writable now: the rights differ, and the next access resolves again.
    assert_eq!(world.vcpu.handle_fault(Gpa(GIB + PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    assert!(!world.at(Gfn(HUGE)).unwrap().writable && world.at(Gfn(HUGE + 1)).unwrap().writable);
    assert_eq!(world.vm.recover_range(block), Ok(0));
    // And the leaf that was replaced by a writable one.
    assert_eq!((sizes(&world), zapped(&world).len()), ((0, 0, 1), 512 + 1));
    // All are writable now, but the host's answer to a read is a read-only block.
    assert_eq!(world.vcpu.pre_fault_memory(Gpa(GIB), 2 * MIB, Access::Read), Ok(2 * MIB));
    assert_eq!(world.vm.split_range(block, PageSize::Size4K), Ok(1));
    for page in 0..BIG {
        assert_eq!(world.vcpu.handle_fault(Gpa(GIB + page * PAGE_SIZE), Access::Write), Ok(Outcome::Resume));
    }
    assert_eq!(world.vm.recover_range(block), Ok(0));
    assert_eq!((sizes(&world), zapped(&world).len()), ((BIG, 0, 1), 0));
}

each_format!(with_whole_marks_1g_become_2m_and_are_recovered_protected, mark_whole);
fn mark_whole<F: Format>(config: Config) {
    for manual in MANUAL_PROTECTS {
        let config = config.with_huge_page_logging(HugePageLogging::MarkWhole).with_manual_protect(manual);
        let slot = Slot::huge(1, 0, HUGE, PageSize::Size1G);
        let mut world = world_with::<F>(config, slot, Access::Write);
        assert_eq!(sizes(&world), (0, 0, 1));
        world.set_flags(slot, LOG);
        if manual == ManualProtect::InitiallySet {
            assert_eq!(world.clear(slot, &(0..HUGE).collect::<Vec<_>>()), Ok(HUGE));
        }
        assert_eq!(sizes(&world), (0, 512, 0));
        world.write(slot, 1000);
        assert_eq!(world.harvest(slot), (512..1024).collect::<Vec<_>>());
        let some = GfnRange::new(Gfn(0), 3 * BIG);
        assert_eq!(world.vm.split_range(some, PageSize::Size4K), Ok(3));
        world.write(slot, 513);
        assert_eq!(world.vm.recover_range(slot.range()), Ok(3), "2 MiB, and no larger");
        assert_eq!(sizes(&world), (0, 512, 0));
        assert!((0..3 * BIG).all(|page| !world.is_writable(slot, page)), "a recovered leaf is protected");
        assert_eq!(world.harvest(slot), [513], "the mark stays, and no other is set");
        world.write(slot, 514);
        assert_eq!(world.harvest(slot), (512..1024).collect::<Vec<_>>());
        world.set_flags(slot, NO_FLAGS);
        assert_eq!((sizes(&world), world.is_writable(slot, 0)), ((0, 0, 1), true));
        assert_eq!(zapped(&world).len(), 0);
        world.finish(&[slot]);
    }
}

fn logging_slots_stay_split<F: Format>(config: Config) {
    let slot = Slot::huge(1, BIG, 2 * BIG, PageSize::Size2M);
    let mut world = world_with::<F>(config, slot, Access::Write);
    world.set_flags(slot, LOG);
    if config.manual_protect == ManualProtect::InitiallySet {
        assert_eq!(world.clear(slot, &(0..2 * BIG).collect::<Vec<_>>()), Ok(2 * BIG));
    }
    assert_eq!(sizes(&world), (1024, 0, 0), "{config:?}");
    let faults = matches!(config.dirty_tracking, DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves)
        || F::BREAK_BEFORE_MAKE;
    assert_eq!(world.write(slot, 3), u64::from(faults));
    assert_eq!(world.vm.recover_range(slot.range()), Ok(0));
    assert_eq!((sizes(&world), zapped(&world).len()), ((1024, 0, 0), 0));
    assert_eq!(world.harvest(slot), [3], "{config:?}");
    assert!(world.harvest(slot).is_empty());
    world.write(slot, 3);
    world.read(slot, 700);
    world.set_flags(slot, NO_FLAGS);
    assert_eq!((sizes(&world), zapped(&world).len()), ((0, 2, 0), 0));
    assert!(world.is_writable(slot, 3) && world.is_writable(slot, 700));
    // All that the guest did, once for each block.
    drop(world.vm.invalidate_range(slot.range()).unwrap());
    let reported: Vec<_> = zapped(&world).iter().map(|leaf| (leaf.range, leaf.accessed, leaf.dirty)).collect();
    let block = |n: u64| GfnRange::new(Gfn(BIG + n * BIG), BIG);
    assert_eq!(reported, [(block(0), true, true), (block(1), true, !F::HAS_DIRTY_BIT)], "{config:?}");
    world.finish(&[slot]);
}

#[test]
fn slots_that_log_by_pages_keep_small_leaves_and_report_all_once() {
    for manual in MANUAL_PROTECTS {
        let config = |tracking| Config::default().with_dirty_tracking(tracking).with_manual_protect(manual);
        slat::for_each_format!(F => {
            dirty_trackings::<F>().for_each(|tracking| logging_slots_stay_split::<F>(config(tracking)));
        });
        dirty_trackings::<Broken>().for_each(|tracking| logging_slots_stay_split::<Broken>(config(tracking)));
    }
}

each_format!(a_tracked_leaf_stays_tracked_through_a_split_and_a_recovery, tracked);
fn tracked<F: Format>(config: Config) {
    let config = config.with_access_tracking(AccessTracking::Faults);
    let slot = Slot::huge(1, BIG, 2 * BIG, PageSize::Size2M);
    let mut world = world_with::<F>(config, slot, Access::Write);
    assert_eq!(world.vm.age_range(slot.range()), Ok(2 * BIG));
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Ok(2));
    assert_eq!(world.vm.test_age_range(slot.range()), Ok(0), "the parts were not used");
    assert_eq!(sizes(&world), (1024, 0, 0));
    // One block is accessed at one page, the other not at all.
    world.read(slot, 3);
    assert_eq!(world.vm.test_age_range(slot.range()), Ok(1));
    assert_eq!(world.vm.recover_range(slot.range()), Ok(2));
    assert_eq!(world.vm.test_age_range(slot.range()), Ok(BIG), "one was used, and as a whole now");
    assert!(world.is_writable(slot, 3) && world.at(slot.gfn(BIG)).is_none());
    assert_eq!(sizes(&world), (0, 2, 0));
    world.write(slot, BIG);
    assert_eq!(zapped(&world).len(), 0);
    drop(world.vm.invalidate_range(slot.range()).unwrap());
    let reported: Vec<_> = zapped(&world).iter().map(|leaf| (leaf.accessed, leaf.dirty)).collect();
    assert_eq!(reported, [(true, true), (true, true)]);
    world.finish(&[slot]);
}

each_format!(with_rings_the_first_write_to_a_recovered_leaf_faults, rings);
fn rings<F: Format>(config: Config) {
    for manual in MANUAL_PROTECTS {
        let vm = Arc::new(Vm::<TestHost, F>::new(TestHost::default(), config.with_manual_protect(manual)).unwrap());
        vm.enable_dirty_ring(2048).unwrap();
        let mut world = World { vcpu: vm.create_vcpu().unwrap(), vm, config };
        let slot = Slot::huge(1, HUGE, HUGE, PageSize::Size1G);
        world.create(slot, NO_FLAGS);
        world.write_all(slot, (0..HUGE).step_by(512));
        assert_eq!(sizes(&world), (0, 512, 0), "no step opens 1 GiB");
        world.set_flags(slot, LOG);
        assert_eq!(sizes(&world), (HUGE, 0, 0));
        world.write_all(slot, [7, 7, 512]);
        let mut got = Vec::new();
        world.vm.dirty_rings().for_each(|ring| {
            ring.harvest(|page| got.push(page.page));
        });
        assert_eq!(got, [7, 512]);
        world.vm.reset_dirty_rings().unwrap();
        world.set_flags(slot, NO_FLAGS);
        assert_eq!(sizes(&world), (0, 0, 1));
        assert!(!world.is_writable(slot, 7));
        world.write(slot, 7);
        assert_eq!(sizes(&world), (0, 512, 0));
        assert!(world.is_writable(slot, 8) && !world.is_writable(slot, 512));
        world.finish(&[slot]);
    }
}

each_format!(accessed_and_dirty_survive_splits_and_recoveries_and_are_reported_once, accessed_and_dirty);
fn accessed_and_dirty<F: Format>(config: Config) {
    let slot = Slot::huge(1, HUGE, HUGE, PageSize::Size1G);
    let mut world = world_with::<F>(config, slot, Access::Write);
    let vm = Arc::clone(&world.vm);
    assert_eq!(vm.split_range(GfnRange::new(Gfn(HUGE), 2 * BIG), PageSize::Size4K), Ok(3));
    assert_eq!(vm.test_age_range(slot.range()), Ok(0), "nothing was used");
    world.read(slot, 3);
    world.write(slot, BIG + 4);
    world.read(slot, 5 * BIG);
    assert_eq!(vm.test_age_range(slot.range()), Ok(BIG + 2));
    assert_eq!(vm.recover_range(GfnRange::new(Gfn(HUGE), 2 * BIG)), Ok(2));
    assert_eq!(vm.test_age_range(slot.range()), Ok(3 * BIG));
    let dirty = |page: u64| world.at(slot.gfn(page)).unwrap().pte.0 & F::DIRTY != 0;
    assert_eq!((dirty(0), dirty(BIG), dirty(2 * BIG)), (!F::HAS_DIRTY_BIT, true, !F::HAS_DIRTY_BIT));
    assert_eq!(vm.recover_range(slot.range()), Ok(1));
    assert_eq!(sizes(&world), (0, 0, 1));
    assert_eq!(zapped(&world), []);
    drop(vm.invalidate_range(slot.range()).unwrap());
    let reported = zapped(&world);
    assert_eq!(
        reported.iter().map(|leaf| (leaf.range, leaf.accessed, leaf.dirty)).collect::<Vec<_>>(),
        [(slot.range(), true, true)]
    );
    world.finish(&[slot]);
}

#[test]
fn four_gib_are_recovered_with_few_flushes() {
    for locking in LOCKINGS {
        let slot = Slot::huge(1, 0, 4 * HUGE, PageSize::Size2M);
        let world = world_with::<Npt>(Config::default().with_locking(locking), slot, Access::Write);
        assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Ok(2048));
        world.take_flushes();
        assert_eq!(world.vm.recover_range(slot.range()), Ok(2048));
        let flushes = world.take_flushes();
        assert!(flushes.len() <= 8, "{} flushes", flushes.len());
        for page in (0..4 * HUGE).step_by(BIG as usize) {
            let block = slot.gfn(page).block(Level::L2M);
            assert!(flushes.iter().flatten().any(|range| range.covers(block)), "{block:?} is not flushed");
        }
        world.finish(&[slot]);
    }
}

each_format!(beside_a_reader_the_deferred_tables_are_bounded, reader);
fn reader<F: Format>(config: Config) {
    let slot = Slot::huge(1, 0, 4 * HUGE, PageSize::Size2M);
    let world = world_with::<F>(config, slot, Access::Write);
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Ok(2048));
    // Above those of small pages, one for each GiB, and those from the root to there.
    let nr_linked = || world.vm.stats().pages_4k() / BIG + 4 + u64::from(F::ROOT_LEVEL.0 - Level::L2M.0);
    let reader = world.vm.read_tables().unwrap();
    // As many as are linked, and those that zaps may defer.
    assert_eq!(world.vm.recover_range(slot.range()), Ok(2048));
    assert_eq!(world.vm.host().live_tables() as u64, nr_linked() + 2048);
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Ok(2048));
    let again = world.vm.recover_range(slot.range()).unwrap();
    assert!((1024..=1024 + 512 + 8).contains(&again), "{again} more page-table pages deferred");
    assert_eq!(sizes(&world), ((2048 - again) * BIG, again, 0));
    assert_eq!(world.vm.host().live_tables() as u64, nr_linked() + 2048 + again);
    assert_eq!(world.vm.recover_range(slot.range()), Ok(0), "not one more");
    assert_eq!(zapped(&world), []);
    let mut cursor = reader.cursor();
    assert!((0..4 * HUGE).step_by(511).all(|page| cursor.query(slot.gfn(page).gpa()).is_some()));
    drop(reader);
    assert_eq!(world.vm.recover_range(slot.range()), Ok(2048 - again));
    world.vm.reclaim();
    assert_eq!(world.vm.host().live_tables() as u64, nr_linked());
    world.finish(&[slot]);
}

each_format!(invalid_ranges_are_refused_and_empty_ones_are_not, bad_input);
fn bad_input<F: Format>(config: Config) {
    let slot = Slot::huge(1, 0, 2 * HUGE, PageSize::Size1G);
    let world = world_with::<F>(config, slot, Access::Write);
    let end = 1 << (F::GPA_BITS - 12);
    let empty = GfnRange { start: Gfn(7), end: Gfn(7) };
    let inverted = GfnRange { start: Gfn(8), end: Gfn(7) };
    for range in [empty, inverted] {
        let refused = Err(RangeError::EmptyRange { start: range.start, end: range.end });
        assert_eq!(world.vm.split_range(range, PageSize::Size4K), refused);
        assert_eq!(world.vm.recover_range(range), refused);
    }
    let past_end =
        [GfnRange::new(Gfn(end - 1), 2), GfnRange::new(Gfn(end), 1), GfnRange { start: Gfn(0), end: Gfn(u64::MAX) }];
    for range in past_end {
        let gpa = Gfn(end).gpa();
        let refused = Err(RangeError::AddressTooHigh { gpa, gpa_bits: F::GPA_BITS });
        assert_eq!(world.vm.split_range(range, PageSize::Size2M), refused);
        assert_eq!(world.vm.recover_range(range), refused);
    }
    let whole = GfnRange { start: Gfn(0), end: Gfn(end) };
    let beyond = GfnRange { start: Gfn(2 * HUGE), end: Gfn(end) };
    assert_eq!(world.vm.split_range(whole, PageSize::Size1G), Ok(0), "there are none larger");
    assert_eq!(world.vm.split_range(beyond, PageSize::Size4K), Ok(0));
    assert_eq!(world.vm.recover_range(beyond), Ok(0));
    assert_eq!(sizes(&world), (0, 0, 2));
    assert_eq!(world.vm.split_range(whole, PageSize::Size2M), Ok(2));
    assert_eq!(world.vm.recover_range(whole), Ok(2));
    // Across the end of the memslot.
    assert_eq!(world.vm.split_range(GfnRange { start: Gfn(2 * HUGE - 1), end: Gfn(end) }, PageSize::Size2M), Ok(1));
    assert_eq!(sizes(&world), (0, 512, 1));
    world.finish(&[slot]);
}

each_format!(lazily_nothing_is_split_but_what_is_written, lazily);
fn lazily<F: Format>(config: Config) {
    for manual in MANUAL_PROTECTS {
        let config = config.with_manual_protect(manual).with_huge_page_logging(HugePageLogging::SplitLazily);
        let slot = Slot::huge(1, HUGE, HUGE, PageSize::Size1G);
        let mut world = world_with::<F>(config, slot, Access::Write);
        world.set_flags(slot, LOG);
        if manual == ManualProtect::InitiallySet {
            assert_eq!(world.clear(slot, &(0..HUGE).collect::<Vec<_>>()), Ok(HUGE));
        }
        assert_eq!(sizes(&world), (0, 0, 1));
        world.write(slot, 1000);
        assert_eq!((sizes(&world), world.harvest(slot)), ((512, 511, 0), vec![1000]));
        world.set_flags(slot, NO_FLAGS);
        assert_eq!((sizes(&world), world.is_writable(slot, 1)), ((0, 0, 1), true));
        world.finish(&[slot]);
    }
}

each_format!(clearing_a_part_splits_that_part, clearing);
fn clearing<F: Format>(config: Config) {
    let config = config.with_manual_protect(ManualProtect::InitiallySet).with_dirty_tracking(LAZY);
    // Not at a multiple of 64 pages, nor of 2 MiB.
    let slot = Slot::huge(1, HUGE - 700, HUGE + 1000, PageSize::Size1G);
    let world = world_with::<F>(config, slot, Access::Write);
    world.set_flags(slot, LOG);
    let before = sizes(&world);
    assert_eq!(before.2, 1);
    assert_eq!(world.vm.clear_dirty_log(1, 0, 640, &[u64::MAX; 10]), Ok(640));
    // Before the 1 GiB page: pages 188 to 699 are one of 2 MiB.
    assert_eq!(sizes(&world), (before.0 + 512, before.1 - 1, 1));
    // Page 700 is the first of the 1 GiB; its word is the eleventh.
    let mut mask = [0; 100];
    assert_eq!(world.vm.clear_dirty_log(1, 640, 6400, &mask), Ok(0));
    assert_eq!(sizes(&world).2, 1);
    mask[50] = 1;
    assert_eq!(world.vm.clear_dirty_log(1, 640, 6400, &mask), Ok(1));
    assert_eq!(sizes(&world), (before.0 + 1024, before.1 + 512 - 2, 0));
    let (cleared, other) = (640 + 50 * 64, 640 + 50 * 64 + 64);
    assert!(!world.is_writable(slot, cleared));
    assert!(F::BREAK_BEFORE_MAKE || world.is_writable(slot, other));
    world.finish(&[slot]);
}

each_format!(a_recovery_beside_an_invalidation_keeps_the_rest_of_the_block, held);
fn held<F: Format>(config: Config) {
    let slot = Slot::huge(1, BIG, 2 * BIG, PageSize::Size2M);
    let world = world_with::<F>(config, slot, Access::Write);
    let invalidation = world.vm.invalidate_range(GfnRange::new(slot.gfn(7), 1)).unwrap();
    zapped(&world);
    // No huge leaf can be made there before its end: zapping the small ones would cost their faults
    // for nothing.
    assert_eq!(world.vm.recover_range(slot.range()), Ok(0));
    assert_eq!((sizes(&world), zapped(&world).len()), ((511, 1, 0), 0));
    drop(invalidation);
    assert_eq!(world.vm.recover_range(slot.range()), Ok(0));
    assert_eq!(sizes(&world), (0, 1, 0));
    world.finish(&[slot]);
}
