//! The dirty log by the CPUs' own dirty bits and modification logs, step by step. The test acts as
//! the CPUs: it sets A and D of the leaves that it writes through, and passes to the host what a
//! CPU would log.

use crate::common::log::{LAZY_HUGE_PAGE_LOGGINGS, LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World, each_config};
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::format::Format;
use slat::host::ZappedLeaf;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Level, MemoryRegionFlags, PAGE_SIZE, PageSize, Pfn};

/// From the middle of a page-table page into the next.
const SLOT: Slot = Slot::new(1, 512 - 100, 300);

/// `config` with dirty bits, and with modification logs where the format has them.
fn by_dirty_bits<F: Format>(config: Config) -> impl Iterator<Item = Config> {
    let trackings = [DirtyTracking::DirtyBit, DirtyTracking::PageModificationLog];
    trackings
        .into_iter()
        .filter(|tracking| F::HAS_MODIFICATION_LOG || *tracking == DirtyTracking::DirtyBit)
        .map(move |tracking| config.with_dirty_tracking(tracking))
}

/// D and "was dirty" of the leaf of `page`.
fn bits<F: Format>(world: &World<F>, slot: Slot, page: u64) -> (bool, bool) {
    let entry = world.at(slot.gfn(page)).unwrap().pte;
    (entry.0 & F::DIRTY != 0, entry.0 & F::WAS_DIRTY != 0)
}

/// Whether a query of the page tables reports that the guest wrote the page.
fn is_dirty<F: Format>(world: &World<F>, slot: Slot, page: u64) -> bool {
    let reader = world.vm.read_tables().unwrap();
    reader.cursor().query(slot.gfn(page).gpa()).unwrap().dirty
}

each_config!(writes_of_mapped_pages_do_not_fault_and_are_reported_once, once, if F::HAS_DIRTY_BIT);
fn once<F: Format>(config: Config) {
    for config in by_dirty_bits::<F>(config) {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_manual_protect(manual_protect));
            world.create(SLOT, LOG);
            world.harvest(SLOT);
            for page in 0..SLOT.nr_pages {
                assert_eq!(world.read(SLOT, page), 1);
                assert_eq!(bits(&world, SLOT, page), (false, false));
            }
            assert_eq!(world.harvest(SLOT), [0; 0]);
            let pages = [0, 63, 64, 99, 100, 299];
            for round in 0..3 {
                assert_eq!(world.write_all(SLOT, pages), 0);
                // A second write of a page whose D is set adds nothing.
                assert_eq!(world.write_all(SLOT, pages), 0);
                assert!(pages.iter().all(|page| bits(&world, SLOT, *page) == (true, round > 0)));
                world.take_flushes();
                let protected = world.vm.stats().protected;
                assert_eq!(world.harvest(SLOT), pages);
                assert_eq!(world.vm.stats().protected - protected, pages.len() as u64);
                assert_eq!(world.take_flushes().len(), 1);
                assert!(pages.iter().all(|page| bits(&world, SLOT, *page) == (false, true)));
                assert!(pages.iter().all(|page| is_dirty(&world, SLOT, *page)));
                assert!(!is_dirty(&world, SLOT, 1));
                assert_eq!(world.harvest(SLOT), [0; 0]);
                assert_eq!(world.take_flushes().len(), 0);
            }
            assert_eq!((world.vm.stats().tables_protected, world.vm.stats().writes_restored), (0, 0));
            world.finish(&[SLOT]);
        }
    }
}

each_config!(a_page_mapped_for_a_write_is_reported_without_its_dirty_bit, mapped_for_write, if F::HAS_DIRTY_BIT);
fn mapped_for_write<F: Format>(config: Config) {
    for config in by_dirty_bits::<F>(config) {
        let mut world = World::<F>::new(config);
        world.create(SLOT, LOG);
        assert_eq!(world.vcpu.handle_fault(SLOT.gfn(7).gpa(), Access::Write), Ok(slat::Outcome::Resume));
        assert_eq!(bits(&world, SLOT, 7), (true, false));
        assert_eq!(world.harvest(SLOT), [7]);
        // Prefaults count as writes, and set no bit.
        let range = SLOT.gfn(10).gpa();
        assert_eq!(world.vcpu.pre_fault_memory(range, 5 * PAGE_SIZE, Access::Write), Ok(5 * PAGE_SIZE));
        let list: Vec<Gpa> = [20, 22, 7].map(|page| SLOT.gfn(page).gpa()).to_vec();
        assert_eq!(world.vcpu.pre_fault_pages(&list[..2], Access::Write), Ok(2));
        assert_eq!(bits(&world, SLOT, 22), (false, false));
        assert_eq!(world.harvest(SLOT), [10, 11, 12, 13, 14, 20, 22]);
        assert_eq!(world.write_all(SLOT, [11, 22]), 0);
        assert_eq!(world.harvest(SLOT), [11, 22]);
        // What is writable already stays unmarked: it was not written.
        assert_eq!(world.vcpu.pre_fault_memory(range, 5 * PAGE_SIZE, Access::Write), Ok(5 * PAGE_SIZE));
        assert_eq!(world.vcpu.pre_fault_pages(&list, Access::Write), Ok(3));
        assert_eq!(world.harvest(SLOT), [0; 0]);
        world.finish(&[SLOT]);
    }
}

each_config!(dirty_bits_from_before_logging_are_not_logged, before_logging, if F::HAS_DIRTY_BIT);
fn before_logging<F: Format>(config: Config) {
    for config in by_dirty_bits::<F>(config) {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_manual_protect(manual_protect));
            world.create(SLOT, NO_FLAGS);
            world.write_all(SLOT, 0..100);
            (100..200).for_each(|page| assert_eq!(world.read(SLOT, page), 1));
            world.take_flushes();
            world.set_flags(SLOT, LOG);
            // The CPUs' old modification logs may be reported, as with KVM; here they are cleared.
            world.vm.host().modification_log.lock().unwrap().clear();
            if manual_protect == ManualProtect::InitiallySet {
                assert_eq!(world.take_flushes().len(), 0);
                assert!((0..100).all(|page| bits(&world, SLOT, page) == (true, false)));
                assert_eq!(world.harvest(SLOT).len() as u64, SLOT.nr_pages);
            } else {
                assert_eq!(world.take_flushes(), [[SLOT.range()]]);
            }
            assert!((0..100).all(|page| bits(&world, SLOT, page) == (false, true)));
            assert_eq!(world.harvest(SLOT), [0; 0]);
            assert_eq!(world.write_all(SLOT, [3, 150]), 0);
            assert_eq!(world.harvest(SLOT), [3, 150]);
            world.finish(&[SLOT]);
        }
    }
}

each_config!(a_zapped_leaf_is_reported_to_the_log_and_to_the_host, zapped, if F::HAS_DIRTY_BIT);
fn zapped<F: Format>(config: Config) {
    for config in by_dirty_bits::<F>(config) {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_manual_protect(manual_protect));
            world.create(SLOT, LOG);
            world.harvest(SLOT);
            (0..10).for_each(|page| assert_eq!(world.read(SLOT, page), 1));
            // 1: written and harvested. 2: written. 3: written, harvested, and written again. The
            // others are clean.
            world.write_all(SLOT, [1, 3]);
            assert_eq!(world.harvest(SLOT), [1, 3]);
            world.write_all(SLOT, [2, 3]);
            // A zap does not drain the CPUs' logs: its own mark counts.
            world.vm.host().modification_log.lock().unwrap().clear();
            world.vm.host().record_zapped();
            drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(0), 10)).unwrap());
            let zapped = world.vm.host().take_zapped();
            let expected: Vec<ZappedLeaf> = (0..10)
                .map(|page| ZappedLeaf {
                    range: GfnRange::new(SLOT.gfn(page), 1),
                    pfn: Pfn(SLOT.first_pfn + page),
                    accessed: true,
                    dirty: [1, 2, 3].contains(&page),
                })
                .collect();
            assert_eq!(zapped, expected);
            assert_eq!(world.harvest(SLOT), [2, 3]);
            assert_eq!(world.harvest(SLOT), [0; 0]);
            // The page is mapped again, and begins clean.
            assert_eq!((world.read(SLOT, 1), bits(&world, SLOT, 1)), (1, (false, false)));
            assert_eq!(world.harvest(SLOT), [0; 0]);
            world.finish(&[SLOT]);
        }
    }
}

each_config!(getting_a_range_reads_its_own_leaves_only, range, if F::HAS_DIRTY_BIT);
fn range<F: Format>(config: Config) {
    let config = config.with_dirty_tracking(DirtyTracking::DirtyBit);
    let mut world = World::<F>::new(config);
    world.create(SLOT, LOG);
    (0..300).for_each(|page| assert_eq!(world.read(SLOT, page), 1));
    world.write_all(SLOT, [63, 64, 127, 128, 256, 299]);
    assert_eq!(world.get_range(SLOT, 64, 64), [64, 127]);
    assert_eq!((bits(&world, SLOT, 63), bits(&world, SLOT, 64)), ((true, false), (false, true)));
    assert_eq!(world.vm.is_marked_dirty(1, 128), Ok(false), "it was not read");
    assert_eq!(world.get_range(SLOT, 256, 44), [256, 299]);
    // Clearing clears marks and not bits: what was not harvested is not lost.
    assert_eq!(world.clear(SLOT, &[63, 64, 128]), Ok(0));
    assert_eq!(world.get(SLOT), [63, 128]);
    world.finish(&[SLOT]);
}

each_config!(a_write_between_get_and_clear_is_cleared_with_its_page, cleared, if F::HAS_DIRTY_BIT);
fn cleared<F: Format>(config: Config) {
    for config in by_dirty_bits::<F>(config) {
        let mut world = World::<F>::new(config.with_manual_protect(ManualProtect::Enabled));
        world.create(SLOT, LOG);
        world.write_all(SLOT, [5, 6]);
        assert_eq!(world.get(SLOT), [5, 6]);
        assert_eq!(world.get(SLOT), [5, 6]);
        // 5 is marked; 7 is not, though its D is set: it is not harvested.
        (7..9).for_each(|page| assert_eq!(world.read(SLOT, page), 1));
        world.write_all(SLOT, [5, 7]);
        assert_eq!(world.clear(SLOT, &[5, 7, 8]), Ok(1));
        assert_eq!((bits(&world, SLOT, 5), bits(&world, SLOT, 7)), ((false, true), (true, false)));
        assert_eq!(world.get(SLOT), [6, 7]);
        assert_eq!(world.clear(SLOT, &[6, 7]), Ok(2));
        assert_eq!(world.get(SLOT), [0; 0]);
        world.finish(&[SLOT]);
    }
}

each_config!(huge_pages_are_write_protected_and_their_parts_begin_clean, huge, if F::HAS_DIRTY_BIT);
fn huge<F: Format>(config: Config) {
    for config in by_dirty_bits::<F>(config) {
        for huge in LAZY_HUGE_PAGE_LOGGINGS {
            let slot = Slot::huge(1, 512, 1024, PageSize::Size2M);
            let mut world = World::<F>::new(config.with_huge_page_logging(huge));
            world.create(slot, NO_FLAGS);
            world.write_all(slot, [0, 512]);
            assert_eq!(world.at(slot.gfn(0)).unwrap().level, Level::L2M);
            world.set_flags(slot, LOG);
            world.vm.host().modification_log.lock().unwrap().clear();
            // A dirty page of 2 MiB: not writable, clean, and known to have been written.
            assert_eq!((world.is_writable(slot, 0), bits(&world, slot, 0)), (false, (false, true)));
            assert!(is_dirty(&world, slot, 0));
            assert_eq!(world.harvest(slot), [0; 0]);
            assert_eq!(world.write(slot, 3), 1);
            if huge.marks_whole() {
                assert_eq!(world.harvest(slot), (0..512).collect::<Vec<_>>());
                assert_eq!((world.is_writable(slot, 3), bits(&world, slot, 3)), (false, (false, true)));
            } else {
                // The other parts are writable, and their writes are found without a fault.
                assert_eq!(world.harvest(slot), [3]);
                assert!(
                    (0..512).all(|page| world.is_writable(slot, page) && bits(&world, slot, page) == (false, true))
                );
                assert_eq!(world.write_all(slot, [3, 4, 511]), 0);
                assert_eq!(world.harvest(slot), [3, 4, 511]);
            }
            assert_eq!(world.at(slot.gfn(512)).map(|found| (found.level, found.writable)), Some((Level::L2M, false)));
            // The host is notified of each leaf as written, by parts or whole.
            world.vm.host().record_zapped();
            drop(world.vm.invalidate_range(slot.range()).unwrap());
            let zapped = world.vm.host().take_zapped();
            assert!(zapped.iter().all(|leaf| leaf.dirty), "{zapped:?}");
            assert_eq!(world.harvest(slot), [0; 0]);
            world.finish(&[slot]);
        }
    }
}

each_config!(a_slot_that_moves_takes_its_log_along_and_leaves_the_bits_behind, moved, if F::HAS_DIRTY_BIT);
fn moved<F: Format>(config: Config) {
    for config in by_dirty_bits::<F>(config) {
        let mut world = World::<F>::new(config);
        world.create(SLOT, LOG);
        world.write(SLOT, 5);
        let after = Slot { first: SLOT.first + 1, ..SLOT };
        world.set_flags(after, LOG);
        assert_eq!(world.harvest(after).len() as u64, SLOT.nr_pages);
        world.vm.host().modification_log.lock().unwrap().clear();
        assert_eq!(world.harvest(after), [0; 0]);
        world.read(after, 5);
        world.write_all(after, [5, 6]);
        assert_eq!(world.harvest(after), [5, 6]);
        world.finish(&[after]);
    }
}

/// Modification logs: EPT only.
fn world_with_log(locking: slat::baselines::Locking, manual_protect: ManualProtect) -> World<slat::format::Ept> {
    let config = Config::default().with_locking(locking).with_dirty_tracking(DirtyTracking::PageModificationLog);
    World::new(config.with_manual_protect(manual_protect))
}

#[test]
fn a_modification_log_marks_only_pages_that_log() {
    for locking in crate::common::log::LOCKINGS {
        for manual_protect in [ManualProtect::Disabled, ManualProtect::Enabled] {
            let world = world_with_log(locking, manual_protect);
            let (slot, quiet) = (Slot::new(1, 500, 100), Slot::new(2, 600, 100));
            let read_only = Slot::new(3, 700, 100);
            world.create(slot, LOG);
            world.create(quiet, NO_FLAGS);
            world.create(read_only, LOG | MemoryRegionFlags::READONLY);
            let page = |gfn: u64, offset: u64| Gpa(gfn * PAGE_SIZE + offset);
            let logged = [
                // Outside of all memslots, below, above, and at the greatest addresses.
                page(499, 0),
                page(800, 0),
                Gpa(0),
                Gpa((1 << 48) - PAGE_SIZE),
                Gpa(1 << 48),
                Gpa(u64::MAX),
                // In a memslot that does not log.
                page(600, 0),
                page(699, 0),
                // In the memslot: first, last, twice, and not at the page's first byte.
                page(500, 0),
                page(599, 0xff8),
                page(510, 0),
                page(510, 8),
                page(510, 0),
            ];
            *world.vm.host().modification_log.lock().unwrap() = logged.to_vec();
            assert_eq!(world.harvest(slot), [0, 10, 99]);
            assert!(world.vm.host().modification_log.lock().unwrap().is_empty(), "it was drained");
            assert_eq!(world.harvest(slot), [0; 0]);
            world.set_flags(quiet, LOG);
            assert_eq!((world.harvest(quiet), world.harvest(read_only)), (vec![], vec![]));
            // A get of one memslot drains for all.
            *world.vm.host().modification_log.lock().unwrap() = vec![page(500, 0), page(601, 0)];
            assert_eq!(world.harvest(slot), [0]);
            assert_eq!(world.harvest(quiet), [1]);
            world.finish(&[slot, quiet, read_only]);
        }
    }
}

#[test]
fn a_vcpu_drains_its_full_modification_log() {
    for locking in crate::common::log::LOCKINGS {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = world_with_log(locking, manual_protect);
            world.create(SLOT, LOG);
            world.harvest(SLOT);
            (0..300).for_each(|page| assert_eq!(world.read(SLOT, page), 1));
            world.write_all(SLOT, 0..200);
            let written = std::mem::take(&mut *world.vm.host().modification_log.lock().unwrap());
            assert_eq!(written.len(), 200);
            world.vcpu.log_modifications(&[]);
            world.vcpu.log_modifications(&written[..100]);
            world.vcpu.log_modifications(&[Gpa(0), Gpa(1 << 60), Gpa(u64::MAX), Gfn(SLOT.first + 300).gpa()]);
            assert_eq!(world.harvest(SLOT), (0..100).collect::<Vec<_>>());
            // The rest later, by another vCPU; with entries that were drained already.
            let mut other = world.vm.create_vcpu().unwrap();
            other.log_modifications(&written[50..]);
            assert_eq!(world.harvest(SLOT), (50..200).collect::<Vec<_>>());
            // D of those pages is clear: a CPU logs them again.
            world.write_all(SLOT, [60, 150]);
            assert_eq!(world.harvest(SLOT), [60, 150]);
            drop(other);
            world.finish(&[SLOT]);
        }
    }
}

#[test]
fn logging_off_and_on_ignores_modification_logs_of_clean_pages() {
    let mut world = world_with_log(slat::baselines::Locking::None, ManualProtect::Disabled);
    world.create(SLOT, LOG);
    (0..10).for_each(|page| assert_eq!(world.read(SLOT, page), 1));
    world.write_all(SLOT, [1, 2]);
    world.set_flags(SLOT, NO_FLAGS);
    // Drained while the memslot does not log: the entries are discarded.
    let other = Slot::new(2, 4096, 64);
    world.create(other, LOG);
    assert_eq!(world.harvest(other), [0; 0]);
    world.set_flags(SLOT, LOG);
    assert_eq!(world.harvest(SLOT), [0; 0]);
    world.write_all(SLOT, [2, 3]);
    assert_eq!(world.harvest(SLOT), [2, 3]);
    world.finish(&[SLOT, other]);
}
