//! Lazy write protection, step by step: when a harvest closes the entry above a table, what the guest notices of it, who
//! opens it again, and what becomes of closed tables when slots and mappings change. And what a harvest does in formats whose
//! table entries cannot be closed: they are not named for `each_config`.

use crate::common::log::{LAZY, LEAF_BY_LEAF, LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World, each_config};
use slat::dirty::ManualProtect;
use slat::format::{Format, Stage2, Sv39x4, Sv48x4};
use slat::tables::AccessTracking;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Outcome, PAGE_SIZE};

/// A harvest closes a table for more pages than this.
const PAGES_WORTH_CLOSING: u64 = 16;

/// Three whole tables.
const SLOT: Slot = Slot::new(1, 512, 3 * 512);

/// Tables closed and opened, and leaves protected one by one, since this was last asked with the same `before`.
fn since<F: Format>(world: &World<F>, before: &mut [u64; 3]) -> [u64; 3] {
    let stats = world.vm.stats();
    let now = [stats.tables_protected, stats.tables_unprotected, stats.protected];
    let since = [0, 1, 2].map(|index| now[index] - before[index]);
    *before = now;
    since
}

/// A VM with `SLOT`, of which all pages are written, and whose log has been taken: three closed tables.
fn closed<F: Format>(config: Config) -> World<F> {
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(SLOT, LOG);
    world.write_all(SLOT, 0..SLOT.nr_pages);
    assert_eq!(world.take(SLOT).len() as u64, SLOT.nr_pages);
    assert_eq!(world.vm.stats().tables_protected, 3);
    world
}

/// Whether the leaf of `page` itself has the right to write, whatever is above.
fn leaf_has_write<F: Format>(world: &World<F>, slot: Slot, page: u64) -> bool {
    world.at(slot.gfn(page)).is_some_and(|found| found.pte.0 & F::WRITABLE == F::WRITABLE)
}

fn query_says_writable<F: Format>(world: &World<F>, gfn: Gfn) -> Option<bool> {
    let reader = world.vm.read_tables().unwrap();
    reader.cursor().query(gfn.gpa()).map(|found| found.writable)
}

each_config!(a_table_is_closed_for_more_than_16_pages_and_never_for_fewer, threshold,);
fn threshold<F: Format>(config: Config) {
    for tracking in [LAZY, LEAF_BY_LEAF] {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_dirty_tracking(tracking).with_manual_protect(manual_protect));
            world.create(SLOT, LOG);
            world.take(SLOT);
            // Everywhere in the table: 97 and 512 have no common divisor.
            for (nr_pages, step) in [1, 15, 16, 17, 18, 64, 511, 512].into_iter().flat_map(|n| [(n, 1), (n, 97)]) {
                let mut pages: Vec<u64> = (0..nr_pages).map(|n| 512 + n * step % 512).collect();
                pages.sort_unstable();
                world.write_all(SLOT, pages.iter().copied());
                let mut before = [0; 3];
                since(&world, &mut before);
                assert_eq!(world.take(SLOT), pages);
                let closes = tracking == LAZY && nr_pages > PAGES_WORTH_CLOSING;
                let expected = if closes { [1, 0, 0] } else { [0, 0, nr_pages] };
                assert_eq!(since(&world, &mut before), expected, "{config:?}: {nr_pages} pages, {step} apart");
                assert!(pages.iter().all(|page| !world.is_writable(SLOT, *page)));
                assert!(pages.iter().all(|page| leaf_has_write(&world, SLOT, *page) == closes));
                // The tables beside are not closed: one fault for one page.
                assert_eq!(world.write_all(SLOT, [511, 1024]), 2);
                assert_eq!(world.take(SLOT), [511, 1024]);
            }
            world.finish(&[SLOT]);
        }
    }
}

each_config!(pages_of_one_table_count_together_from_whatever_words, words,);
fn words<F: Format>(config: Config) {
    // The slot's words lie across tables: its second table is pages 33 to 544.
    let slot = Slot::new(1, 512 - 33, 33 + 512 + 33);
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(slot, LOG);
    let mut before = [0; 3];
    for (pages, expected) in [
        ((33..33 + 16).collect::<Vec<_>>(), [0, 0, 16]),
        ((33..33 + 17).collect(), [1, 0, 0]),
        // From the table's first and last words.
        ((33..33 + 8).chain(545 - 9..545).collect(), [1, 0, 0]),
        ((33..33 + 8).chain(545 - 8..545).collect(), [0, 0, 16]),
        // 33 pages of tables that the slot's ends cut.
        ((0..33).chain(545..578).collect(), [0, 0, 66]),
        ((0..578).collect(), [1, 0, 66]),
        ((17..17 + 32).collect(), [0, 0, 32]),
        ((16..16 + 50).collect(), [1, 0, 17]),
    ] {
        world.write_all(slot, pages.iter().copied());
        since(&world, &mut before);
        assert_eq!(world.take(slot), pages);
        assert_eq!(since(&world, &mut before), expected, "pages {:?} to {:?}", pages.first(), pages.last());
        assert!((0..578).all(|page| !world.is_writable(slot, page)));
    }
    world.finish(&[slot]);
}

each_config!(enabling_closes_whole_tables_and_no_other, enabling,);
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
        assert_eq!(world.take(slot), [0; 0]);
        let pages = [0, 99, 100, 611, 612, 1123, 1124, 1173];
        assert_eq!(world.write_all(slot, pages), pages.len() as u64);
        assert_eq!(world.take(slot), pages);
        world.finish(&[slot]);
    }
}

each_config!(a_harvest_of_one_slot_does_not_protect_its_neighbour_in_the_same_block, neighbour,);
fn neighbour<F: Format>(config: Config) {
    for other_flags in [LOG, NO_FLAGS] {
        let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
        let (left, right) = (Slot::new(1, 512, 200), Slot::new(2, 712, 312));
        world.create(left, LOG);
        world.create(right, other_flags);
        world.write_all(left, 0..200);
        world.write_all(right, 0..312);
        assert_eq!(world.take(left).len(), 200);
        assert_eq!(world.vm.stats().tables_protected, 0);
        assert!((0..200).all(|page| !world.is_writable(left, page)));
        assert_eq!(world.write_all(right, 0..312), 0, "the neighbour's pages fault");
        if other_flags == LOG {
            assert_eq!(world.take(right).len(), 312);
        }
        // Nor does logging that begins.
        world.write_all(left, 0..200);
        world.set_flags(right, NO_FLAGS);
        world.set_flags(right, LOG);
        assert_eq!(world.write_all(left, 0..200), 0, "the neighbour's pages fault");
        assert_eq!(world.take(left).len(), 200);
        world.finish(&[left, right]);
    }
}

each_config!(the_first_write_to_a_closed_table_opens_it_and_protects_the_others, push_down,);
fn push_down<F: Format>(config: Config) {
    for manual_protect in MANUAL_PROTECTS {
        let mut world = closed::<F>(config.with_manual_protect(manual_protect));
        let mut before = [0; 3];
        since(&world, &mut before);
        for page in [512, 700, 1023] {
            assert_eq!(query_says_writable(&world, SLOT.gfn(page)), Some(false));
            assert_eq!(world.read(SLOT, page), 0, "a read faults below a closed entry");
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
        assert_eq!(query_says_writable(&world, SLOT.gfn(700)), Some(true));
        assert_eq!(query_says_writable(&world, SLOT.gfn(701)), Some(false));
        // The others: one fault each, and no more.
        assert_eq!(world.write_all(SLOT, [512, 701, 1023, 700]), 3);
        assert_eq!(since(&world, &mut before), [0, 0, 0]);
        assert_eq!(world.take_flushes().len(), 0, "a push-down owes no flush");
        assert_eq!(world.take(SLOT), [512, 700, 701, 1023]);
        // The tables beside are closed as before.
        assert!(leaf_has_write(&world, SLOT, 511) && !world.is_writable(SLOT, 511));
        assert_eq!(world.write(SLOT, 511), 1);
        assert_eq!(since(&world, &mut before), [0, 1, 4]);
        assert_eq!(world.take(SLOT), [511]);
        world.finish(&[SLOT]);
    }
}

each_config!(a_page_that_is_mapped_below_a_closed_entry_is_written_and_marked_at_once, unmapped,);
fn unmapped<F: Format>(config: Config) {
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(SLOT, LOG);
    world.write_all(SLOT, 0..100);
    assert_eq!(world.take(SLOT).len(), 100);
    assert_eq!(world.vm.stats().tables_protected, 1);
    // For reading: it stays closed.
    assert_eq!(world.read(SLOT, 200), 1);
    assert_eq!((world.vm.stats().tables_unprotected, world.is_writable(SLOT, 200)), (0, false));
    assert_eq!(world.write(SLOT, 300), 1);
    assert_eq!(world.vm.stats().tables_unprotected, 1);
    assert!((0..512).all(|page| world.is_writable(SLOT, page) == (page == 300)));
    assert_eq!(world.write(SLOT, 200), 1);
    assert_eq!(world.take(SLOT), [200, 300]);
    world.finish(&[SLOT]);
}

each_config!(prefaults_for_writing_open_closed_tables_and_mark, prefault,);
fn prefault<F: Format>(config: Config) {
    // All of a table, a part, from one table into the next; with all pages mapped, and with some.
    for (first, nr_pages) in [(0, 512), (512 + 100, 10), (500, 600), (0, 3 * 512)] {
        for unmapped in [None, Some(first), Some(first + nr_pages - 1), Some(first + nr_pages / 2)] {
            for by_list in [false, true] {
                let mut world = closed::<F>(config);
                if let Some(page) = unmapped {
                    drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(page), 1)).unwrap());
                }
                let pages: Vec<u64> = (first..first + nr_pages).collect();
                // For reading: nothing is opened.
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
                assert_eq!(world.take(SLOT), pages);
                world.finish(&[SLOT]);
            }
        }
    }
}

each_config!(tracked_leaves_below_a_closed_entry_come_back_with_what_they_may, tracked,);
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
        assert_eq!(world.take(SLOT).len(), 512);
        assert_eq!(world.vm.stats().tables_protected, 1);
        if !age_first {
            assert_eq!(world.vm.age_range(some), Ok(10));
        }
        assert_eq!(world.at(SLOT.gfn(100)), None, "not present for hardware");
        assert_eq!(query_says_writable(&world, SLOT.gfn(100)), Some(false));
        // A read gives it back for reading, and the entry stays closed.
        assert_eq!((world.read(SLOT, 100), world.is_writable(SLOT, 100)), (1, false));
        assert_eq!(world.vm.stats().tables_unprotected, 0);
        // A write of a tracked leaf opens it; the other tracked ones stay so.
        assert_eq!(world.write(SLOT, 101), 1);
        assert_eq!(world.vm.stats().tables_unprotected, 1);
        assert!((0..512).all(|page| world.is_writable(SLOT, page) == (page == 101)));
        assert_eq!(world.vm.test_age_range(some), Ok(2));
        assert_eq!(world.write(SLOT, 102), 1);
        assert_eq!((world.read(SLOT, 103), world.write(SLOT, 103)), (1, 1));
        assert_eq!(world.take(SLOT), [101, 102, 103]);
        world.finish(&[SLOT]);
    }
}

each_config!(where_logging_has_ended_a_closed_table_costs_one_fault_and_marks_nothing, ended,);
fn ended<F: Format>(config: Config) {
    for manual_protect in MANUAL_PROTECTS {
        let mut world = closed::<F>(config.with_manual_protect(manual_protect));
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(600), 2)).unwrap());
        world.set_flags(SLOT, NO_FLAGS);
        // Mapped for reading, with the right to write, below the closed entry.
        assert_eq!(world.read(SLOT, 600), 1);
        assert!(leaf_has_write(&world, SLOT, 600) && !world.is_writable(SLOT, 600));
        assert_eq!(world.write(SLOT, 700), 1);
        assert_eq!(world.write_all(SLOT, (512..1024).filter(|page| *page != 601)), 0);
        assert_eq!(world.write(SLOT, 601), 1);
        assert_eq!(world.vm.stats().tables_unprotected, 1);
        // Logging begins anew, over tables of both kinds.
        world.set_flags(SLOT, LOG);
        let initially = if manual_protect == ManualProtect::InitiallySet { SLOT.nr_pages } else { 0 };
        assert_eq!(world.take(SLOT).len() as u64, initially);
        assert!((0..SLOT.nr_pages).all(|page| !world.is_writable(SLOT, page)));
        world.write_all(SLOT, [3, 600, 701, 1024]);
        assert_eq!(world.take(SLOT), [3, 600, 701, 1024]);
        world.finish(&[SLOT]);
    }
}

each_config!(invalidations_of_closed_tables_whole_and_in_part, invalidated,);
fn invalidated<F: Format>(config: Config) {
    // In each table something else: a part, all, from one into the next.
    for (first, nr_pages) in [(512 + 10, 20), (512, 512), (500, 30), (0, 3 * 512), (512 + 1, 511), (1023, 2)] {
        let mut world = closed::<F>(config);
        world.vm.host().record_zapped();
        let live_tables = world.vm.host().live_tables();
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(first), nr_pages)).unwrap());
        let zapped = world.vm.host().take_zapped();
        assert!(zapped.len() as u64 == nr_pages && zapped.iter().all(|leaf| leaf.dirty));
        let nr_whole = (0..3).filter(|table| first <= table * 512 && first + nr_pages >= (table + 1) * 512).count();
        assert_eq!(world.vm.host().live_tables(), live_tables - nr_whole);
        assert_eq!(world.take(SLOT), [0; 0]);
        for page in [first, first + nr_pages - 1] {
            assert_eq!((world.at(SLOT.gfn(page)), world.write(SLOT, page)), (None, 1));
        }
        let last = SLOT.nr_pages - 1;
        let mut pages = vec![first, first + nr_pages - 1, 5, last];
        pages.sort_unstable();
        pages.dedup();
        world.write_all(SLOT, [5, last]);
        assert!((0..SLOT.nr_pages).all(|page| world.is_writable(SLOT, page) == pages.contains(&page)));
        assert_eq!(world.take(SLOT), pages);
        world.finish(&[SLOT]);
    }
}

each_config!(slots_with_closed_tables_are_deleted_and_moved, moved,);
fn moved<F: Format>(config: Config) {
    // By blocks, by pages, and with logging that ends.
    for (first, flags) in [(8 * 512, LOG), (513, LOG), (8 * 512 + 3, NO_FLAGS), (511, NO_FLAGS)] {
        let mut world = closed::<F>(config);
        let after = Slot { first, ..SLOT };
        world.set_flags(after, flags);
        assert!((0..SLOT.nr_pages).all(|page| world.at(after.gfn(page)).is_none()));
        world.set_flags(after, LOG);
        let expected = if flags == LOG { SLOT.nr_pages } else { 0 };
        assert_eq!(world.take(after).len() as u64, expected);
        world.write_all(after, [0, 600]);
        assert_eq!(world.take(after), [0, 600]);
        world.delete(after);
        // A new slot finds nothing closed.
        let mut before = [0; 3];
        since(&world, &mut before);
        world.create(SLOT, LOG);
        world.write_all(SLOT, 0..SLOT.nr_pages);
        assert_eq!(since(&world, &mut before), [0, 0, 0]);
        world.finish(&[SLOT]);
    }
}

each_config!(a_part_of_a_closed_table_that_is_taken_leaves_the_other_marks, part_taken,);
fn part_taken<F: Format>(config: Config) {
    let mut world = World::<F>::new(config.with_dirty_tracking(LAZY));
    world.create(SLOT, LOG);
    world.write_all(SLOT, 0..512);
    // One word, and the table is closed above the others, too: their marks stay.
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

each_config!(a_closed_table_that_is_closed_again_and_again_stays_exact, generations,);
fn generations<F: Format>(config: Config) {
    let mut world = closed::<F>(config);
    let closings = world.vm.stats().tables_protected;
    // More often than there are generations, twice.
    let rounds = 2 * 2048 + 100;
    for _ in 0..rounds {
        world.vm.mark_dirty(SLOT.id, 512, 33).unwrap();
        assert_eq!(world.take(SLOT).len(), 33);
    }
    assert_eq!(world.vm.stats().tables_protected - closings, rounds, "nobody is in the way of a renewal");
    assert_eq!(world.write(SLOT, 600), 1);
    assert_eq!((world.vm.stats().tables_unprotected, world.take(SLOT)), (1, vec![600]));
    world.finish(&[SLOT]);
}

each_config!(while_a_section_stays_open_closings_end_and_the_log_stays_exact, long_section,);
fn long_section<F: Format>(config: Config) {
    let mut world = closed::<F>(config);
    let vm = std::sync::Arc::clone(&world.vm);
    let reader = vm.read_tables().unwrap();
    let closings = vm.stats().tables_protected;
    let mut all_closed = true;
    for round in 0..1500 {
        let pages = [round % 512, 512 + round % 479];
        world.write_all(SLOT, pages);
        vm.mark_dirty(SLOT.id, 512, 33).unwrap();
        let mut expected: Vec<u64> = pages.into_iter().chain(512..545).collect();
        expected.sort_unstable();
        expected.dedup();
        assert_eq!(world.take(SLOT), expected, "round {round}");
        assert!(pages.iter().all(|page| !world.is_writable(SLOT, *page)));
        all_closed &= vm.stats().tables_protected - closings == round + 1;
    }
    // 2048 generations must not come round while a fault may be on its way.
    let nr_closed = vm.stats().tables_protected - closings;
    assert!(!all_closed && nr_closed < 2 * 512 + 100, "{nr_closed}");
    drop(reader);
    // The window opens again.
    for _ in 0..10 {
        vm.mark_dirty(SLOT.id, 512, 33).unwrap();
        world.take(SLOT);
    }
    assert!(vm.stats().tables_protected - closings > nr_closed);
    drop(vm);
    world.finish(&[SLOT]);
}

// A table that stays linked when its slot goes may be closed, and the next slots have a part of it each.
each_config!(a_closed_table_that_outlives_its_slot_loses_no_mark_of_the_next_ones, outlives,);
fn outlives<F: Format>(config: Config) {
    // Who writes first opens the table: one whose slot logs, and one whose slot does not.
    for first_writer_logs in [true, false] {
        let mut world = closed::<F>(config);
        // So many tables wait for this reader that further ones stay linked.
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
        // Both in the first table.
        let (left, right) = (Slot::new(1, 512, 200), Slot::new(2, 712, 312));
        world.create(left, LOG);
        world.create(right, NO_FLAGS);
        for slot in [left, right] {
            (0..100).for_each(|page| assert_eq!(world.read(slot, page), 1));
        }
        let opened = vm.stats().tables_unprotected;
        world.write(if first_writer_logs { left } else { right }, 7);
        assert_eq!(vm.stats().tables_unprotected - opened, 1, "the table was closed");
        world.write_all(left, [8, 150]);
        world.write_all(right, [8, 150]);
        assert!((0..200).all(|page| {
            world.is_writable(left, page) == ([8, 150].contains(&page) || (first_writer_logs && page == 7))
        }));
        let expected: &[u64] = if first_writer_logs { &[7, 8, 150] } else { &[8, 150] };
        assert_eq!(world.take(left), expected);
        world.set_flags(right, LOG);
        assert!((0..312).all(|page| !world.is_writable(right, page)));
        world.write_all(right, [9, 311]);
        world.write_all(left, [199]);
        assert_eq!((world.take(left), world.take(right)), (vec![199], vec![9, 311]));
        drop(reader);
        drop(vm);
        world.finish(&[left, right]);
    }
}

/// Where table entries cannot be closed, lazy protection is leaf by leaf: the same log, the same entries, the same counts.
#[test]
fn what_cannot_be_closed_is_protected_leaf_by_leaf() {
    never_closed::<Stage2>();
    never_closed::<Sv39x4>();
    never_closed::<Sv48x4>();
}

fn never_closed<F: Format>() {
    let found = [LAZY, LEAF_BY_LEAF].map(|tracking| {
        let mut world = World::<F>::new(Config::default().with_dirty_tracking(tracking));
        world.create(SLOT, NO_FLAGS);
        world.write_all(SLOT, 0..SLOT.nr_pages);
        world.set_flags(SLOT, LOG);
        assert!((0..SLOT.nr_pages).all(|page| !world.is_writable(SLOT, page)));
        for _ in 0..2 {
            // Each page by its own fault, and each again after it was taken.
            assert_eq!(world.write_all(SLOT, 0..600), 600);
            assert_eq!(query_says_writable(&world, SLOT.gfn(599)), Some(true));
            assert_eq!(world.take(SLOT), (0..600).collect::<Vec<_>>());
        }
        let mut before = [0; 3];
        let counts = since(&world, &mut before);
        // 3 tables when it began to log, and twice what was written.
        assert_eq!(counts, [0, 0, SLOT.nr_pages + 2 * 600]);
        let leaves: Vec<_> = world.entries(SLOT).into_iter().map(|found| found.unwrap().pte).collect();
        world.finish(&[SLOT]);
        (counts, leaves)
    });
    assert_eq!(found[0], found[1]);
}
