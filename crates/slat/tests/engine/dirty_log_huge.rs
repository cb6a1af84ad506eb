//! Huge pages in memslots that log: they stay for reads, and the first write splits them or marks
//! them whole.

use crate::common::GIB;
use crate::common::log::{
    LAZY_HUGE_PAGE_LOGGINGS, LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World, dirty_trackings, each_config,
};
use slat::dirty::{HugePageLogging, ManualProtect};
use slat::format::Format;
use slat::{Access, Config, GfnRange, Level, PAGE_SIZE, PageSize};

const GIB_PAGES: u64 = GIB / PAGE_SIZE;

/// 1 GiB that can be mapped as one, three pages before and after it.
const SLOT: Slot = Slot::huge(1, GIB_PAGES - 3, GIB_PAGES + 6, PageSize::Size1G);
/// The first page of a huge block in `SLOT`.
const HUGE: u64 = 3;

/// Every configuration in which `locking` and format are as in `config`.
fn configs<F: Format>(config: Config) -> impl Iterator<Item = Config> {
    dirty_trackings::<F>().flat_map(move |tracking| {
        LAZY_HUGE_PAGE_LOGGINGS.into_iter().flat_map(move |huge| {
            MANUAL_PROTECTS.into_iter().map(move |manual_protect| {
                config.with_dirty_tracking(tracking).with_huge_page_logging(huge).with_manual_protect(manual_protect)
            })
        })
    })
}

fn level<F: Format>(world: &World<F>, slot: Slot, page: u64) -> Option<(Level, bool)> {
    world.at(slot.gfn(page)).map(|found| (found.level, found.writable))
}

/// Leaves of 4 KiB, 2 MiB and 1 GiB of the slot.
fn leaves<F: Format>(world: &World<F>, slot: Slot) -> [u64; 3] {
    let mut count = [0; 3];
    let mut next = slot.first;
    while next < slot.range().end.0 {
        let found = world.at(slat::Gfn(next));
        let level = found.map_or(Level::L4K, |found| found.level);
        count[usize::from(level.0) - 1] += u64::from(found.is_some());
        next = slat::Gfn(next).block(level).end.0;
    }
    count
}

each_config!(reads_map_huge_pages_read_only_in_a_slot_that_logs, reads);
fn reads<F: Format>(config: Config) {
    for config in configs::<F>(config) {
        for (size, expected, largest) in
            [(PageSize::Size1G, [6, 0, 1], Level::L1G), (PageSize::Size2M, [6, 512, 0], Level::L2M)]
        {
            let slot = Slot { max_size: size, ..SLOT };
            let mut world = World::<F>::new(config);
            world.create(slot, LOG);
            world.harvest(slot);
            for page in
                [0, 1, 2].into_iter().chain((HUGE..slot.nr_pages).step_by(512)).chain(slot.nr_pages - 3..slot.nr_pages)
            {
                world.read(slot, page);
            }
            assert_eq!(level(&world, slot, HUGE), Some((largest, false)), "{config:?}");
            assert_eq!(leaves(&world, slot), expected, "{config:?}");
            assert_eq!(world.harvest(slot), [0; 0], "{config:?}: a read is no write");
            // By prefault, too.
            drop(world.vm.invalidate_range(slot.range()).unwrap());
            let size_bytes = slot.nr_pages * PAGE_SIZE;
            assert_eq!(world.vcpu.pre_fault_memory(slot.gfn(0).gpa(), size_bytes, Access::Read), Ok(size_bytes));
            assert_eq!(leaves(&world, slot), expected, "{config:?}");
            assert_eq!(world.harvest(slot), [0; 0], "{config:?}");
            assert_eq!(world.vm.stats().splits, 0);
            world.finish(&[slot]);
        }
    }
}

each_config!(a_guest_that_only_reads_keeps_its_huge_pages_through_logging, keeps);
fn keeps<F: Format>(config: Config) {
    for config in configs::<F>(config) {
        let mut world = World::<F>::new(config);
        // 2 MiB pages.
        let slot = Slot::huge(1, 512, 16 * 512, PageSize::Size2M);
        world.create(slot, NO_FLAGS);
        world.write_all(slot, (0..16).map(|block| block * 512));
        assert_eq!(leaves(&world, slot), [0, 16, 0]);
        world.set_flags(slot, LOG);
        for _ in 0..3 {
            for page in (0..slot.nr_pages).step_by(100) {
                assert_eq!(world.read(slot, page), 0);
            }
            world.harvest(slot);
            assert_eq!(leaves(&world, slot), [0, 16, 0], "{config:?}");
        }
        // One block is written.
        assert_eq!(world.write(slot, 5 * 512 + 9), 1);
        let marks_whole = config.huge_page_logging.marks_whole();
        let expected = if marks_whole { [0, 16, 0] } else { [512, 15, 0] };
        assert_eq!((leaves(&world, slot), world.vm.stats().splits), (expected, u64::from(!marks_whole)), "{config:?}");
        let pages: Vec<u64> = if marks_whole { (5 * 512..6 * 512).collect() } else { vec![5 * 512 + 9] };
        assert_eq!(world.harvest(slot), pages, "{config:?}");
        assert_eq!(world.harvest(slot), [0; 0], "{config:?}");
        // When logging ends, split pages are recovered, and writes need no split.
        world.set_flags(slot, NO_FLAGS);
        world.write_all(slot, (0..slot.nr_pages).step_by(70));
        assert_eq!(leaves(&world, slot), [0, 16, 0], "{config:?}");
        world.finish(&[slot]);
    }
}

each_config!(the_first_write_splits_or_marks_whole, first_write);
fn first_write<F: Format>(config: Config) {
    for config in configs::<F>(config) {
        let marks_whole = config.huge_page_logging.marks_whole();
        let mut world = World::<F>::new(config);
        world.create(SLOT, NO_FLAGS);
        world.write(SLOT, HUGE);
        assert_eq!(leaves(&world, SLOT), [0, 0, 1]);
        world.set_flags(SLOT, LOG);
        if config.manual_protect == ManualProtect::InitiallySet {
            assert_eq!(level(&world, SLOT, HUGE), Some((Level::L1G, true)), "{config:?}: untouched");
            // One page of it that is cleared protects all.
            assert_eq!(world.clear(SLOT, &[HUGE + 1000]), Ok(1));
            assert_eq!(level(&world, SLOT, HUGE), Some((Level::L1G, false)), "{config:?}");
            assert_eq!(world.harvest(SLOT).len() as u64, SLOT.nr_pages - 1);
        }
        assert_eq!(level(&world, SLOT, HUGE), Some((Level::L1G, false)), "{config:?}");
        assert_eq!(world.harvest(SLOT), [0; 0], "{config:?}");
        let page = HUGE + 7 * 512 + 9;
        let block: Vec<u64> = (HUGE + 7 * 512..HUGE + 8 * 512).collect();
        // The write, and all that can be observed of it, twice: the second finds the work of the
        // first done.
        for round in 0..2 {
            world.write(SLOT, page);
            if marks_whole {
                assert_eq!(leaves(&world, SLOT), [0, 512, 0], "{config:?}");
                assert_eq!(level(&world, SLOT, page), Some((Level::L2M, true)));
                assert_eq!(world.write_all(SLOT, block.iter().copied()), 0, "{config:?}");
                assert_eq!(world.harvest(SLOT), block, "{config:?}");
                assert_eq!(level(&world, SLOT, page), Some((Level::L2M, false)));
            } else {
                assert_eq!(leaves(&world, SLOT), [512, 511, 0], "{config:?}");
                assert_eq!(world.harvest(SLOT), [page], "{config:?} in round {round}");
            }
            assert_eq!(world.harvest(SLOT), [0; 0], "{config:?}");
        }
        // Its neighbours: in the block, in the next, before the first block of the memslot.
        let others = [0, page + 1, page + 512];
        world.write_all(SLOT, others);
        let expected: Vec<u64> =
            if marks_whole { [0].into_iter().chain(HUGE + 7 * 512..HUGE + 9 * 512).collect() } else { others.to_vec() };
        assert_eq!(world.harvest(SLOT), expected, "{config:?}");
        assert_eq!(world.harvest(SLOT), [0; 0], "{config:?}");
        world.finish(&[SLOT]);
    }
}

each_config!(a_write_that_maps_a_page_maps_as_much_as_is_logged, maps);
fn maps<F: Format>(config: Config) {
    for config in configs::<F>(config) {
        let marks_whole = config.huge_page_logging.marks_whole();
        for by_prefault in [false, true] {
            let mut world = World::<F>::new(config);
            world.create(SLOT, LOG);
            world.harvest(SLOT);
            let page = HUGE + 3 * 512 + 100;
            if by_prefault {
                let gpa = SLOT.gfn(page).gpa();
                assert_eq!(world.vcpu.pre_fault_memory(gpa, PAGE_SIZE, Access::Write), Ok(PAGE_SIZE));
            } else {
                assert_eq!(world.write(SLOT, page), 1);
            }
            let largest = if marks_whole { Level::L2M } else { Level::L4K };
            assert_eq!(level(&world, SLOT, page), Some((largest, true)), "{config:?}");
            let block: Vec<u64> = (HUGE + 3 * 512..HUGE + 4 * 512).collect();
            assert_eq!(world.harvest(SLOT), if marks_whole { block } else { vec![page] }, "{config:?}");
            assert_eq!(world.harvest(SLOT), [0; 0], "{config:?}");
            world.finish(&[SLOT]);
        }
        // A large prefault: of whole blocks, and of the first pages of the memslot, which have
        // none.
        let mut world = World::<F>::new(config);
        world.create(SLOT, LOG);
        world.harvest(SLOT);
        let nr_pages = HUGE + 4 * 512;
        let done = world.vcpu.pre_fault_memory(SLOT.gfn(0).gpa(), nr_pages * PAGE_SIZE, Access::Write);
        assert_eq!(done, Ok(nr_pages * PAGE_SIZE));
        let expected = if marks_whole { [3, 4, 0] } else { [nr_pages, 0, 0] };
        assert_eq!(leaves(&world, SLOT), expected, "{config:?}");
        assert_eq!(world.harvest(SLOT), (0..nr_pages).collect::<Vec<_>>(), "{config:?}");
        world.finish(&[SLOT]);
    }
}

each_config!(a_harvest_of_a_range_protects_the_whole_huge_page_and_keeps_the_other_marks, part_taken);
fn part_taken<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        let config = config.with_dirty_tracking(tracking).with_huge_page_logging(HugePageLogging::MarkWholeLazily);
        let mut world = World::<F>::new(config);
        let slot = Slot::huge(1, 512, 1024, PageSize::Size2M);
        world.create(slot, LOG);
        world.write_all(slot, [3, 600]);
        assert_eq!(world.get_range(slot, 64, 64), (64..128).collect::<Vec<_>>());
        assert_eq!(
            (level(&world, slot, 0), level(&world, slot, 600)),
            (Some((Level::L2M, false)), Some((Level::L2M, true)))
        );
        assert_eq!(world.write(slot, 200), 1);
        assert_eq!(world.get(slot), (0..1024).collect::<Vec<_>>());
        assert_eq!(world.get(slot), [0; 0]);
        world.finish(&[slot]);
    }
}

each_config!(a_huge_page_with_an_invalidated_part_is_still_logged, invalidated);
fn invalidated<F: Format>(config: Config) {
    for config in configs::<F>(config) {
        let marks_whole = config.huge_page_logging.marks_whole();
        let slot = Slot::huge(1, 512, 1024, PageSize::Size2M);
        let mut world = World::<F>::new(config);
        world.create(slot, LOG);
        world.harvest(slot);
        // One that was written and one that was read, both harvested.
        world.write(slot, 3);
        world.read(slot, 600);
        world.harvest(slot);
        for page in [9, 609] {
            drop(world.vm.invalidate_range(GfnRange::new(slot.gfn(page), 1)).unwrap());
        }
        assert_eq!(world.harvest(slot), [0; 0], "{config:?}: an invalidation is no write");
        world.write_all(slot, [10, 610]);
        // After a split each page is logged by itself.
        assert_eq!(world.harvest(slot), [10, 610], "{config:?}");
        // One that was written and not harvested: its marks stay, and no page is reported for ever.
        world.delete(slot);
        world.create(slot, LOG);
        world.harvest(slot);
        world.write(slot, 3);
        drop(world.vm.invalidate_range(GfnRange::new(slot.gfn(9), 1)).unwrap());
        let expected: Vec<u64> = if marks_whole { (0..512).collect() } else { vec![3] };
        assert_eq!(world.harvest(slot), expected, "{config:?}");
        assert_eq!(world.harvest(slot), [0; 0], "{config:?}");
        world.write_all(slot, [4, 9]);
        let expected: &[u64] = &[4, 9];
        let taken = world.harvest(slot);
        assert_eq!(taken, expected, "{config:?}");
        world.finish(&[slot]);
    }
}
