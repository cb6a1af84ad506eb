//! Lazy write protection, step by step: when a harvest protects a directory entry, what a fault
//! below it does, and what becomes of protected directory entries when memslots and mappings
//! change. The last test is for formats whose directory entries cannot be protected.

use crate::common::log::{LAZY, LEAF_BY_LEAF, LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World, each_config};
use slat::dirty::ManualProtect;
use slat::format::Format;
use slat::tables::AccessTracking;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Outcome, PAGE_SIZE};

/// A harvest protects a directory entry for more pages than this.
const MOST_PROTECTED_ONE_BY_ONE: u64 = 16;

/// Three whole page-table pages.
const SLOT: Slot = Slot::new(1, 512, 3 * 512);

/// Directory entries protected and pushed down, and leaves protected one by one, since the last
/// call with the same `before`.
fn since<F: Format>(world: &World<F>, before: &mut [u64; 3]) -> [u64; 3] {
    let stats = world.vm.stats();
    let now = [stats.tables_protected, stats.tables_unprotected, stats.protected];
    let since = [0, 1, 2].map(|index| now[index] - before[index]);
    *before = now;
    since
}

/// A VM with `SLOT`, whose pages were all written and harvested: three protected directory entries.
fn protected<F: Format>(config: Config) -> World<F> {
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(SLOT, LOG);
    world.write_all(SLOT, 0..SLOT.nr_pages);
    assert_eq!(world.harvest(SLOT).len() as u64, SLOT.nr_pages);
    assert_eq!(world.vm.stats().tables_protected, 3);
    world
}

/// Whether the leaf PTE of `page` itself is writable, whatever is above.
fn leaf_has_write<F: Format>(world: &World<F>, slot: Slot, page: u64) -> bool {
    world.at(slot.gfn(page)).is_some_and(|found| found.pte.0 & F::WRITABLE == F::WRITABLE)
}

fn is_writable_by_query<F: Format>(world: &World<F>, gfn: Gfn) -> Option<bool> {
    let reader = world.vm.read_tables().unwrap();
    reader.cursor().query(gfn.gpa()).map(|found| found.writable)
}

each_config!(a_directory_entry_is_protected_for_more_than_16_pages_and_never_for_fewer, threshold, if F::GENERATION != 0);
fn threshold<F: Format>(config: Config) {
    for tracking in [LAZY, LEAF_BY_LEAF] {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_dirty_tracking(tracking).with_manual_protect(manual_protect));
            world.create(SLOT, LOG);
            world.harvest(SLOT);
            // Spread over the page-table page: 97 and 512 have no common divisor.
            for (nr_pages, step) in [1, 15, 16, 17, 18, 64, 511, 512].into_iter().flat_map(|n| [(n, 1), (n, 97)]) {
                let mut pages: Vec<u64> = (0..nr_pages).map(|n| 512 + n * step % 512).collect();
                pages.sort_unstable();
                world.write_all(SLOT, pages.iter().copied());
                let mut before = [0; 3];
                since(&world, &mut before);
                assert_eq!(world.harvest(SLOT), pages);
                let closes = tracking == LAZY && nr_pages > MOST_PROTECTED_ONE_BY_ONE;
                let expected = if closes { [1, 0, 0] } else { [0, 0, nr_pages] };
                assert_eq!(since(&world, &mut before), expected, "{config:?}: {nr_pages} pages, {step} apart");
                assert!(pages.iter().all(|page| !world.is_writable(SLOT, *page)));
                assert!(pages.iter().all(|page| leaf_has_write(&world, SLOT, *page) == closes));
                // The directory entries beside are not protected: one fault for one page.
                assert_eq!(world.write_all(SLOT, [511, 1024]), 2);
                assert_eq!(world.harvest(SLOT), [511, 1024]);
            }
            world.finish(&[SLOT]);
        }
    }
}

each_config!(pages_of_one_table_count_as_one_group_across_words, words, if F::GENERATION != 0);
fn words<F: Format>(config: Config) {
    // The words of the log straddle page-table pages: the second one has pages 33 to 544.
    let slot = Slot::new(1, 512 - 33, 33 + 512 + 33);
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(slot, LOG);
    let mut before = [0; 3];
    for (pages, expected) in [
        ((33..33 + 16).collect::<Vec<_>>(), [0, 0, 16]),
        ((33..33 + 17).collect(), [1, 0, 0]),
        // From the first and last words of the page-table page.
        ((33..33 + 8).chain(545 - 9..545).collect(), [1, 0, 0]),
        ((33..33 + 8).chain(545 - 8..545).collect(), [0, 0, 16]),
        // 33 pages in each of the two page-table pages that the ends of the memslot cut.
        ((0..33).chain(545..578).collect(), [0, 0, 66]),
        ((0..578).collect(), [1, 0, 66]),
        ((17..17 + 32).collect(), [0, 0, 32]),
        ((16..16 + 50).collect(), [1, 0, 17]),
    ] {
        world.write_all(slot, pages.iter().copied());
        since(&world, &mut before);
        assert_eq!(world.harvest(slot), pages);
        assert_eq!(since(&world, &mut before), expected, "pages {:?} to {:?}", pages.first(), pages.last());
        assert!((0..578).all(|page| !world.is_writable(slot, page)));
    }
    world.finish(&[slot]);
}

each_config!(enabling_protects_the_directory_entries_of_whole_tables_only, enabling, if F::GENERATION != 0);
fn enabling<F: Format>(config: Config) {
    let slot = Slot::new(1, 512 - 100, 100 + 2 * 512 + 50);
    for (tracking, expected) in [(LAZY, [2, 0, 150]), (LEAF_BY_LEAF, [0, 0, 100 + 2 * 512 + 50])] {
        let mut world = World::<F>::new(config.with_dirty_tracking(tracking));
        world.create(slot, NO_FLAGS);
        world.write_all(slot, 0..slot.nr_pages);
        world.take_flushes();
        let mut before = [0; 3];
        since(&world, &mut before);
        world.set_flags(slot, LOG);
        assert_eq!(since(&world, &mut before), expected);
        assert_eq!(world.take_flushes(), [[slot.range()]]);
        assert!((0..slot.nr_pages).all(|page| !world.is_writable(slot, page)));
        assert_eq!(world.harvest(slot), [0; 0]);
        let pages = [0, 99, 100, 611, 612, 1123, 1124, 1173];
        assert_eq!(world.write_all(slot, pages), pages.len() as u64);
        assert_eq!(world.harvest(slot), pages);
        world.finish(&[slot]);
    }
}

each_config!(a_harvest_of_one_slot_does_not_protect_its_neighbour_in_the_same_block, neighbour, if F::GENERATION != 0);
fn neighbour<F: Format>(config: Config) {
    for other_flags in [LOG, NO_FLAGS] {
        let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
        let (left, right) = (Slot::new(1, 512, 200), Slot::new(2, 712, 312));
        world.create(left, LOG);
        world.create(right, other_flags);
        world.write_all(left, 0..200);
        world.write_all(right, 0..312);
        assert_eq!(world.harvest(left).len(), 200);
        assert_eq!(world.vm.stats().tables_protected, 0);
        assert!((0..200).all(|page| !world.is_writable(left, page)));
        assert_eq!(world.write_all(right, 0..312), 0, "the pages of the neighbour fault");
        if other_flags == LOG {
            assert_eq!(world.harvest(right).len(), 312);
        }
        // Nor does logging that begins.
        world.write_all(left, 0..200);
        world.set_flags(right, NO_FLAGS);
        world.set_flags(right, LOG);
        assert_eq!(world.write_all(left, 0..200), 0, "the pages of the neighbour fault");
        assert_eq!(world.harvest(left).len(), 200);
        world.finish(&[left, right]);
    }
}

each_config!(the_first_write_pushes_the_protection_down, push_down, if F::GENERATION != 0);
fn push_down<F: Format>(config: Config) {
    for manual_protect in MANUAL_PROTECTS {
        let mut world = protected::<F>(config.with_manual_protect(manual_protect));
        let mut before = [0; 3];
        since(&world, &mut before);
        for page in [512, 700, 1023] {
            assert_eq!(is_writable_by_query(&world, SLOT.gfn(page)), Some(false));
            assert_eq!(world.read(SLOT, page), 0, "a read faults below a protected directory entry");
            assert_eq!(world.vcpu.handle_fault(SLOT.gfn(page).gpa(), Access::Execute), Ok(Outcome::Resume));
        }
        assert_eq!(since(&world, &mut before), [0, 0, 0]);
        let flushes = world.take_flushes().len();
        assert!(flushes > 0);
        assert_eq!(world.write(SLOT, 700), 1);
        assert_eq!(since(&world, &mut before), [0, 1, 0]);
        for page in 512..1024 {
            assert_eq!((world.is_writable(SLOT, page), leaf_has_write(&world, SLOT, page)), (page == 700, page == 700));
        }
        assert_eq!(is_writable_by_query(&world, SLOT.gfn(700)), Some(true));
        assert_eq!(is_writable_by_query(&world, SLOT.gfn(701)), Some(false));
        // The others: one fault each, and no more.
        assert_eq!(world.write_all(SLOT, [512, 701, 1023, 700]), 3);
        assert_eq!(since(&world, &mut before), [0, 0, 0]);
        assert_eq!(world.take_flushes().len(), 0, "a push-down needs no flush");
        assert_eq!(world.harvest(SLOT), [512, 700, 701, 1023]);
        // The directory entries beside stay protected.
        assert!(leaf_has_write(&world, SLOT, 511) && !world.is_writable(SLOT, 511));
        assert_eq!(world.write(SLOT, 511), 1);
        assert_eq!(since(&world, &mut before), [0, 1, 4]);
        assert_eq!(world.harvest(SLOT), [511]);
        world.finish(&[SLOT]);
    }
}

each_config!(a_page_mapped_for_writing_below_a_protected_entry_is_marked_at_once, unmapped, if F::GENERATION != 0);
fn unmapped<F: Format>(config: Config) {
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(SLOT, LOG);
    world.write_all(SLOT, 0..100);
    assert_eq!(world.harvest(SLOT).len(), 100);
    assert_eq!(world.vm.stats().tables_protected, 1);
    // For reading: it stays protected.
    assert_eq!(world.read(SLOT, 200), 1);
    assert_eq!((world.vm.stats().tables_unprotected, world.is_writable(SLOT, 200)), (0, false));
    assert_eq!(world.write(SLOT, 300), 1);
    assert_eq!(world.vm.stats().tables_unprotected, 1);
    assert!((0..512).all(|page| world.is_writable(SLOT, page) == (page == 300)));
    assert_eq!(world.write(SLOT, 200), 1);
    assert_eq!(world.harvest(SLOT), [200, 300]);
    world.finish(&[SLOT]);
}

each_config!(prefaults_for_writing_push_down_and_mark, prefault, if F::GENERATION != 0);
fn prefault<F: Format>(config: Config) {
    // All of a page-table page, a part, from one into the next; with all pages mapped, and with
    // some.
    for (first, nr_pages) in [(0, 512), (512 + 100, 10), (500, 600), (0, 3 * 512)] {
        for unmapped in [None, Some(first), Some(first + nr_pages - 1), Some(first + nr_pages / 2)] {
            for by_list in [false, true] {
                let mut world = protected::<F>(config);
                if let Some(page) = unmapped {
                    drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(page), 1)).unwrap());
                }
                let pages: Vec<u64> = (first..first + nr_pages).collect();
                // A prefault for reading pushes nothing down.
                for access in [Access::Read, Access::Write] {
                    if by_list {
                        let gpas: Vec<Gpa> = pages.iter().map(|page| SLOT.gfn(*page).gpa()).collect();
                        assert_eq!(world.vcpu.pre_fault_pages(&gpas, access), Ok(gpas.len()));
                    } else {
                        let size_bytes = nr_pages * PAGE_SIZE;
                        let done = world.vcpu.pre_fault_memory(SLOT.gfn(first).gpa(), size_bytes, access);
                        assert_eq!(done, Ok(size_bytes));
                    }
                    let is_write = access == Access::Write;
                    assert_eq!(world.vm.stats().tables_unprotected > 0, is_write);
                    for page in 0..SLOT.nr_pages {
                        let expected = is_write && pages.contains(&page);
                        assert_eq!(world.is_writable(SLOT, page), expected, "page {page} after {access:?}");
                    }
                }
                assert_eq!(world.harvest(SLOT), pages);
                world.finish(&[SLOT]);
            }
        }
    }
}

each_config!(access_is_restored_to_tracked_leaves_below_a_protected_entry, tracked, if F::GENERATION != 0);
fn tracked<F: Format>(config: Config) {
    let config = config.with_access_tracking(AccessTracking::Faults);
    for age_first in [false, true] {
        let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
        world.create(SLOT, LOG);
        world.write_all(SLOT, 0..512);
        let some = GfnRange::new(SLOT.gfn(100), 10);
        if age_first {
            assert_eq!(world.vm.age_range(some), Ok(10));
        }
        assert_eq!(world.harvest(SLOT).len(), 512);
        assert_eq!(world.vm.stats().tables_protected, 1);
        if !age_first {
            assert_eq!(world.vm.age_range(some), Ok(10));
        }
        assert_eq!(world.at(SLOT.gfn(100)), None, "not present for hardware");
        assert_eq!(is_writable_by_query(&world, SLOT.gfn(100)), Some(false));
        // A read restores read access, and the directory entry stays protected.
        assert_eq!((world.read(SLOT, 100), world.is_writable(SLOT, 100)), (1, false));
        assert_eq!(world.vm.stats().tables_unprotected, 0);
        // A write to a tracked leaf pushes the protection down; the other tracked leaves stay
        // tracked.
        assert_eq!(world.write(SLOT, 101), 1);
        assert_eq!(world.vm.stats().tables_unprotected, 1);
        assert!((0..512).all(|page| world.is_writable(SLOT, page) == (page == 101)));
        assert_eq!(world.vm.test_age_range(some), Ok(2));
        assert_eq!(world.write(SLOT, 102), 1);
        assert_eq!((world.read(SLOT, 103), world.write(SLOT, 103)), (1, 1));
        assert_eq!(world.harvest(SLOT), [101, 102, 103]);
        world.finish(&[SLOT]);
    }
}

each_config!(after_logging_a_protected_entry_costs_one_fault_and_marks_nothing, ended, if F::GENERATION != 0);
fn ended<F: Format>(config: Config) {
    for manual_protect in MANUAL_PROTECTS {
        let mut world = protected::<F>(config.with_manual_protect(manual_protect));
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(600), 2)).unwrap());
        world.set_flags(SLOT, NO_FLAGS);
        // Mapped for reading, and the leaf PTE is writable, below the protected directory entry.
        assert_eq!(world.read(SLOT, 600), 1);
        assert!(leaf_has_write(&world, SLOT, 600) && !world.is_writable(SLOT, 600));
        assert_eq!(world.write(SLOT, 700), 1);
        assert_eq!(world.write_all(SLOT, (512..1024).filter(|page| *page != 601)), 0);
        assert_eq!(world.write(SLOT, 601), 1);
        assert_eq!(world.vm.stats().tables_unprotected, 1);
        // Logging begins again, over page-table pages of both kinds.
        world.set_flags(SLOT, LOG);
        let initially = if manual_protect == ManualProtect::InitiallySet { SLOT.nr_pages } else { 0 };
        assert_eq!(world.harvest(SLOT).len() as u64, initially);
        assert!((0..SLOT.nr_pages).all(|page| !world.is_writable(SLOT, page)));
        world.write_all(SLOT, [3, 600, 701, 1024]);
        assert_eq!(world.harvest(SLOT), [3, 600, 701, 1024]);
        world.finish(&[SLOT]);
    }
}

each_config!(invalidations_below_protected_entries_whole_and_in_part, invalidated, if F::GENERATION != 0);
fn invalidated<F: Format>(config: Config) {
    // Each case differs: a part, all, from one page-table page into the next.
    for (first, nr_pages) in [(512 + 10, 20), (512, 512), (500, 30), (0, 3 * 512), (512 + 1, 511), (1023, 2)] {
        let mut world = protected::<F>(config);
        world.vm.host().record_zapped();
        let live_tables = world.vm.host().live_tables();
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(first), nr_pages)).unwrap());
        let zapped = world.vm.host().take_zapped();
        assert!(zapped.len() as u64 == nr_pages && zapped.iter().all(|leaf| leaf.dirty));
        let nr_whole = (0..3).filter(|table| first <= table * 512 && first + nr_pages >= (table + 1) * 512).count();
        assert_eq!(world.vm.host().live_tables(), live_tables - nr_whole);
        assert_eq!(world.harvest(SLOT), [0; 0]);
        for page in [first, first + nr_pages - 1] {
            assert_eq!((world.at(SLOT.gfn(page)), world.write(SLOT, page)), (None, 1));
        }
        let last = SLOT.nr_pages - 1;
        let mut pages = vec![first, first + nr_pages - 1, 5, last];
        pages.sort_unstable();
        pages.dedup();
        world.write_all(SLOT, [5, last]);
        assert!((0..SLOT.nr_pages).all(|page| world.is_writable(SLOT, page) == pages.contains(&page)));
        assert_eq!(world.harvest(SLOT), pages);
        world.finish(&[SLOT]);
    }
}

each_config!(slots_with_protected_entries_are_deleted_and_moved, moved, if F::GENERATION != 0);
fn moved<F: Format>(config: Config) {
    // By blocks, by pages, and with logging that ends.
    for (first, flags) in [(8 * 512, LOG), (513, LOG), (8 * 512 + 3, NO_FLAGS), (511, NO_FLAGS)] {
        let mut world = protected::<F>(config);
        let after = Slot { first, ..SLOT };
        world.set_flags(after, flags);
        assert!((0..SLOT.nr_pages).all(|page| world.at(after.gfn(page)).is_none()));
        world.set_flags(after, LOG);
        let expected = if flags == LOG { SLOT.nr_pages } else { 0 };
        assert_eq!(world.harvest(after).len() as u64, expected);
        world.write_all(after, [0, 600]);
        assert_eq!(world.harvest(after), [0, 600]);
        world.delete(after);
        // A new memslot finds no protected directory entry.
        let mut before = [0; 3];
        since(&world, &mut before);
        world.create(SLOT, LOG);
        world.write_all(SLOT, 0..SLOT.nr_pages);
        assert_eq!(since(&world, &mut before), [0, 0, 0]);
        world.finish(&[SLOT]);
    }
}

each_config!(a_harvest_of_a_part_below_a_protected_entry_keeps_the_other_marks, part_taken, if F::GENERATION != 0);
fn part_taken<F: Format>(config: Config) {
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(SLOT, LOG);
    world.write_all(SLOT, 0..512);
    // One word, but the directory entry above the others is protected, too. Their marks stay.
    assert_eq!(world.get_range(SLOT, 64, 64).len(), 64);
    assert_eq!(world.vm.stats().tables_protected, 1);
    world.write_all(SLOT, [64, 200]);
    assert_eq!(world.get_range(SLOT, 64, 64), [64]);
    assert_eq!(world.get(SLOT), (0..64).chain(128..512).collect::<Vec<_>>());
    assert_eq!(world.get(SLOT), [0; 0]);
    world.write_all(SLOT, [64, 65, 200, 201]);
    assert_eq!(world.get(SLOT), [64, 65, 200, 201]);
    world.finish(&[SLOT]);
}

each_config!(a_repeatedly_protected_entry_keeps_the_log_exact, generations, if F::GENERATION != 0);
fn generations<F: Format>(config: Config) {
    let mut world = protected::<F>(config);
    let nr_before = world.vm.stats().tables_protected;
    // More than twice as often as there are generations.
    let rounds = 2 * 2048 + 100;
    for _ in 0..rounds {
        world.vm.mark_dirty(SLOT.id, 512, 33).unwrap();
        assert_eq!(world.harvest(SLOT).len(), 33);
    }
    assert_eq!(world.vm.stats().tables_protected - nr_before, rounds, "no guard delays a renewal");
    assert_eq!(world.write(SLOT, 600), 1);
    assert_eq!((world.vm.stats().tables_unprotected, world.harvest(SLOT)), (1, vec![600]));
    world.finish(&[SLOT]);
}

each_config!(behind_an_open_guard_directory_protection_ends_and_the_log_stays_exact, long_guard, if F::GENERATION != 0);
fn long_guard<F: Format>(config: Config) {
    let mut world = protected::<F>(config);
    let vm = std::sync::Arc::clone(&world.vm);
    let reader = vm.read_tables().unwrap();
    let nr_before = vm.stats().tables_protected;
    let mut all_protected = true;
    for round in 0..1500 {
        let pages = [round % 512, 512 + round % 479];
        world.write_all(SLOT, pages);
        vm.mark_dirty(SLOT.id, 512, 33).unwrap();
        let mut expected: Vec<u64> = pages.into_iter().chain(512..545).collect();
        expected.sort_unstable();
        expected.dedup();
        assert_eq!(world.harvest(SLOT), expected, "round {round}");
        assert!(pages.iter().all(|page| !world.is_writable(SLOT, *page)));
        all_protected &= vm.stats().tables_protected - nr_before == round + 1;
    }
    // The 2048 generations must not wrap while a fault may hold an old one.
    let nr_protected = vm.stats().tables_protected - nr_before;
    assert!(!all_protected && nr_protected < 2 * 512 + 100, "{nr_protected}");
    drop(reader);
    // The window is renewed.
    for _ in 0..10 {
        vm.mark_dirty(SLOT.id, 512, 33).unwrap();
        world.harvest(SLOT);
    }
    assert!(vm.stats().tables_protected - nr_before > nr_protected);
    drop(vm);
    world.finish(&[SLOT]);
}

// A page-table page that stays linked when its memslot is deleted may be below a protected
// directory entry. The next memslots each have a part of it.
each_config!(a_protected_entry_that_outlives_its_slot_loses_no_mark_of_the_next, outlives, if F::GENERATION != 0);
fn outlives<F: Format>(config: Config) {
    // The first write pushes down: in the memslot that logs, or in the one that does not.
    for first_writer_logs in [true, false] {
        let mut world = protected::<F>(config);
        // So many page-table pages wait for this reader that further ones stay linked.
        let many = Slot::new(9, 1 << 20, 1200 * 512);
        world.create(many, NO_FLAGS);
        for block in 0..1200 {
            world.read(many, block * 512);
        }
        let vm = std::sync::Arc::clone(&world.vm);
        let reader = vm.read_tables().unwrap();
        world.delete(many);
        let live_tables = vm.host().live_tables();
        world.delete(SLOT);
        assert_eq!(vm.host().live_tables(), live_tables);
        // Both in the first page-table page.
        let (left, right) = (Slot::new(1, 512, 200), Slot::new(2, 712, 312));
        world.create(left, LOG);
        world.create(right, NO_FLAGS);
        for slot in [left, right] {
            (0..100).for_each(|page| assert_eq!(world.read(slot, page), 1));
        }
        let opened = vm.stats().tables_unprotected;
        world.write(if first_writer_logs { left } else { right }, 7);
        assert_eq!(vm.stats().tables_unprotected - opened, 1, "the directory entry was protected");
        world.write_all(left, [8, 150]);
        world.write_all(right, [8, 150]);
        assert!((0..200).all(|page| {
            world.is_writable(left, page) == ([8, 150].contains(&page) || (first_writer_logs && page == 7))
        }));
        let expected: &[u64] = if first_writer_logs { &[7, 8, 150] } else { &[8, 150] };
        assert_eq!(world.harvest(left), expected);
        world.set_flags(right, LOG);
        assert!((0..312).all(|page| !world.is_writable(right, page)));
        world.write_all(right, [9, 311]);
        world.write_all(left, [199]);
        assert_eq!((world.harvest(left), world.harvest(right)), (vec![199], vec![9, 311]));
        drop(reader);
        drop(vm);
        world.finish(&[left, right]);
    }
}

/// Where directory entries cannot be protected, lazy protection protects leaf by leaf. The log, the
/// PTEs and the counts are the same.
#[test]
fn formats_without_directory_protection_protect_leaf_by_leaf() {
    slat::for_each_format!(F => {
        if F::GENERATION == 0 {
            leaf_by_leaf::<F>();
        }
    });
}

fn leaf_by_leaf<F: Format>() {
    let found = [LAZY, LEAF_BY_LEAF].map(|tracking| {
        let mut world = World::<F>::new(Config::default().with_dirty_tracking(tracking));
        world.create(SLOT, NO_FLAGS);
        world.write_all(SLOT, 0..SLOT.nr_pages);
        world.set_flags(SLOT, LOG);
        assert!((0..SLOT.nr_pages).all(|page| !world.is_writable(SLOT, page)));
        for _ in 0..2 {
            // Each page by its own fault, and again after each harvest.
            assert_eq!(world.write_all(SLOT, 0..600), 600);
            assert_eq!(is_writable_by_query(&world, SLOT.gfn(599)), Some(true));
            assert_eq!(world.harvest(SLOT), (0..600).collect::<Vec<_>>());
        }
        let mut before = [0; 3];
        let counts = since(&world, &mut before);
        // 3 page-table pages when it began to log, and twice the written pages.
        assert_eq!(counts, [0, 0, SLOT.nr_pages + 2 * 600]);
        let leaves: Vec<_> = world.entries(SLOT).into_iter().map(|found| found.unwrap().pte).collect();
        world.finish(&[SLOT]);
        (counts, leaves)
    });
    assert_eq!(found[0], found[1]);
}
