//! The contents of the dirty log, call by call, on one thread: every mode of getting and clearing,
//! ranges and masks, memslots of awkward sizes at awkward places, and every invalid request.

use crate::common::log::{
    LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World, dirty_trackings, each_config, mask_of, pages_of,
};
use crate::common::{GIB, change};
use slat::dirty::ManualProtect;
use slat::error::LogError;
use slat::format::Format;
use slat::{Config, GfnRange, MemoryRegionFlags, PAGE_SIZE};

/// Memslots of sizes around those of words and page-table pages, which begin at, before, and far
/// from their borders.
fn awkward_slots() -> impl Iterator<Item = Slot> {
    let firsts = [0, 1, 63, 64, 512 - 33, 512, 3 * 512 + 7, (1 << 18) - 1];
    let sizes = [1, 63, 64, 65, 511, 512, 513, 2 * 512 + 65];
    firsts.into_iter().flat_map(move |first| sizes.map(|nr_pages| Slot::new(3, first, nr_pages)))
}

/// Pages at the ends of the memslot, its words and its page-table pages.
fn awkward_pages(slot: Slot) -> Vec<u64> {
    let table_end = 512 - slot.first % 512;
    let mut pages: Vec<u64> = [0, 1, 62, 63, 64, 65, table_end - 1, table_end, 511, 512, slot.nr_pages - 1]
        .into_iter()
        .filter(|page| *page < slot.nr_pages)
        .collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}

each_config!(the_log_is_exact_for_every_size_and_place_of_a_slot, sizes);
fn sizes<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        for manual_protect in MANUAL_PROTECTS {
            let config = config.with_dirty_tracking(tracking).with_manual_protect(manual_protect);
            for slot in awkward_slots() {
                let mut world = World::<F>::new(config);
                world.create(slot, LOG);
                let all: Vec<u64> = (0..slot.nr_pages).collect();
                if manual_protect == ManualProtect::InitiallySet {
                    assert_eq!(world.harvest(slot), all, "{slot:?}");
                }
                assert_eq!(world.harvest(slot), [0; 0], "{config:?} {slot:?}");
                let pages = awkward_pages(slot);
                for _ in 0..2 {
                    world.write_all(slot, pages.iter().copied());
                    assert_eq!(world.harvest(slot), pages, "{config:?} {slot:?}");
                    assert_eq!(world.harvest(slot), [0; 0], "{config:?} {slot:?}");
                    world.write_all(slot, all.iter().copied());
                    assert_eq!(world.harvest(slot), all, "{config:?} {slot:?}");
                }
                world.finish(&[slot]);
            }
        }
    }
}

each_config!(a_slot_of_more_than_a_gib_has_its_first_and_last_pages, large);
fn large<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_dirty_tracking(tracking).with_manual_protect(manual_protect));
            let slot = Slot::new(0, 5 * 512 + 17, GIB / PAGE_SIZE + 3);
            world.create(slot, LOG);
            if manual_protect == ManualProtect::InitiallySet {
                assert_eq!(world.harvest(slot).len() as u64, slot.nr_pages);
            }
            // Also one in each word of the summary: of 64 words of 64 pages.
            let pages: Vec<u64> =
                (0..64).map(|group| group * 4096 + group * 65 % 4096).chain([slot.nr_pages - 1]).collect();
            world.write_all(slot, pages.iter().copied());
            assert_eq!(world.harvest(slot), pages);
            assert_eq!(world.harvest(slot), [0; 0]);
            world.finish(&[slot]);
        }
    }
}

each_config!(getting_in_manual_mode_changes_nothing_and_flushes_nothing, manual_get);
fn manual_get<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        for manual_protect in [ManualProtect::Enabled, ManualProtect::InitiallySet] {
            let mut world = World::<F>::new(config.with_dirty_tracking(tracking).with_manual_protect(manual_protect));
            let slot = Slot::new(1, 512 - 70, 700);
            world.create(slot, LOG);
            world.clear(slot, &(0..700).collect::<Vec<_>>()).unwrap();
            let pages = [0, 5, 69, 70, 71, 699];
            world.write_all(slot, pages);
            world.read(slot, 6);
            world.take_flushes();
            let (entries, protected) = (world.entries(slot), world.vm.stats().protected);
            for _ in 0..3 {
                assert_eq!(world.get(slot), pages);
                assert_eq!(world.get_range(slot, 64, 64), [69, 70, 71]);
                assert_eq!(world.get_range(slot, 640, 60), [699]);
            }
            assert_eq!((world.entries(slot), world.vm.stats().protected), (entries, protected));
            assert_eq!(world.take_flushes().len(), 0);
            // Nor does a write to a page that was got and not cleared fault.
            assert_eq!(world.write_all(slot, pages), 0);
            assert_eq!(world.harvest(slot), pages);
            assert_eq!(world.take_flushes().len(), 1);
            world.finish(&[slot]);
        }
    }
}

each_config!(a_range_is_got_and_the_rest_stays, ranges);
fn ranges<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        let mut world = World::<F>::new(config.with_dirty_tracking(tracking));
        // More pages than a word of the summary stands for, from the middle of a page-table page
        // on.
        let slot = Slot::new(1, 100, 2 * 4096 + 100);
        world.create(slot, LOG);
        let pages = [0, 63, 64, 127, 128, 4095, 4096, 4097, 8191, 8192, 8255, 8256, 8291];
        world.write_all(slot, pages);
        world.take_flushes();
        assert_eq!(world.get_range(slot, 64, 64), [64, 127]);
        // Only those pages were protected again, and only those flushed.
        let flushes = world.take_flushes();
        assert!(flushes.len() == 1 && flushes[0].iter().all(|range| GfnRange::new(slot.gfn(64), 64).covers(*range)));
        assert_eq!(world.get_range(slot, 64, 64), [0; 0]);
        assert_eq!(world.take_flushes().len(), 0);
        assert_eq!(world.get_range(slot, 4032, 128), [4095, 4096, 4097]);
        assert_eq!(world.get_range(slot, 8256, 36), [8256, 8291]);
        assert_eq!(world.get_range(slot, 8192, 100), [8192, 8255]);
        world.write(slot, 70);
        assert_eq!(world.get(slot), [0, 63, 70, 128, 8191]);
        assert_eq!(world.get(slot), [0; 0]);
        world.finish(&[slot]);
    }
}

each_config!(clearing_clears_and_protects_only_what_is_named_and_set, masks);
fn masks<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        for manual_protect in MANUAL_PROTECTS {
            let config = config.with_dirty_tracking(tracking).with_manual_protect(manual_protect);
            let mut world = World::<F>::new(config);
            let slot = Slot::new(1, 512 - 70, 700);
            world.create(slot, LOG);
            world.clear(slot, &(0..700).collect::<Vec<_>>()).unwrap();
            let pages = [3, 4, 69, 70, 300, 698];
            world.write_all(slot, pages);
            // Updates the log from the dirty bits, in the modes in which get does not clear.
            if manual_protect == ManualProtect::Disabled {
                for page in pages {
                    world.vm.mark_dirty(1, page, 1).unwrap();
                }
            } else {
                assert_eq!(world.get(slot), pages);
            }
            world.take_flushes();
            let before = world.entries(slot);
            assert_eq!(world.clear(slot, &[]), Ok(0));
            assert_eq!(world.clear(slot, &[0, 5, 68, 71, 299, 301, 697, 699]), Ok(0));
            // Bits behind the end of the memslot are ignored.
            let mut behind = vec![0; slot.nr_words() + 2];
            behind[10] = u64::MAX << (700 % 64);
            behind[11..].fill(u64::MAX);
            assert_eq!(world.vm.clear_dirty_log(1, 0, 700, &behind), Ok(0));
            assert_eq!((world.entries(slot), world.take_flushes().len()), (before.clone(), 0));
            assert_eq!(world.clear(slot, &[2, 3, 69, 300, 301]), Ok(3));
            assert_eq!(world.take_flushes().len(), 1);
            for (page, (before, after)) in before.into_iter().zip(world.entries(slot)).enumerate() {
                assert_eq!(before == after, ![3, 69, 300].contains(&page), "{config:?}: page {page}");
            }
            // A part of the words: bit 0 of the mask is page 64.
            assert_eq!(world.vm.clear_dirty_log(1, 64, 128, &[1 << 6 | 1 << 7, u64::MAX]), Ok(1));
            assert_eq!(world.vm.clear_dirty_log(1, 640, 60, &[1 << 58]), Ok(1));
            for page in 0..700 {
                assert_eq!(world.vm.is_marked_dirty(1, page), Ok(page == 4), "page {page}");
            }
            // What was cleared is logged again.
            world.write_all(slot, [3, 70, 5]);
            assert_eq!(world.harvest(slot), [3, 4, 5, 70]);
            assert_eq!(world.harvest(slot), [0; 0]);
            world.finish(&[slot]);
        }
    }
}

each_config!(a_slot_that_begins_with_all_its_pages_dirty_is_not_touched, initially_set);
fn initially_set<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        let config = config.with_dirty_tracking(tracking).with_manual_protect(ManualProtect::InitiallySet);
        let mut world = World::<F>::new(config);
        let slot = Slot::new(1, 512, 512 + 100);
        world.create(slot, NO_FLAGS);
        world.write_all(slot, 0..600);
        let entries = world.entries(slot);
        world.take_flushes();
        world.set_flags(slot, LOG);
        assert_eq!(world.entries(slot), entries);
        let stats = world.vm.stats();
        assert_eq!((world.take_flushes().len(), stats.protected, stats.tables_protected), (0, 0, 0));
        let mut bitmap = [0; 10];
        assert_eq!(world.vm.get_dirty_log(1, &mut bitmap), Ok(612));
        assert!(bitmap[..9].iter().all(|word| *word == u64::MAX));
        assert_eq!(bitmap[9], (1 << 36) - 1, "no bits behind the end");
        assert_eq!(world.write_all(slot, 0..600), 0, "nothing is protected yet");
        // The first word only.
        assert_eq!(world.vm.clear_dirty_log(1, 0, 64, &[u64::MAX]), Ok(64));
        let flushes = world.take_flushes();
        assert!(flushes.len() == 1 && flushes[0].iter().any(|range| range.covers(GfnRange::new(slot.gfn(0), 64))));
        assert_eq!(world.get(slot), (64..612).collect::<Vec<_>>());
        world.write_all(slot, [7]);
        assert_eq!(world.get_range(slot, 0, 64), [7]);
        // All, also the last word, whose mask has bits behind the end.
        assert_eq!(world.vm.clear_dirty_log(1, 0, 612, &[u64::MAX; 10]), Ok(549));
        assert_eq!(world.get(slot), [0; 0]);
        world.write_all(slot, [599, 611]);
        assert_eq!(world.get(slot), [599, 611]);
        // A move, and logging that begins again, mark all again.
        world.set_flags(slot, NO_FLAGS);
        world.set_flags(slot, LOG);
        assert_eq!(world.get(slot).len(), 612);
        world.clear(slot, &(0..612).collect::<Vec<_>>()).unwrap();
        let moved = Slot { first: 3 * 512 + 1, ..slot };
        world.set_flags(moved, LOG);
        assert_eq!(world.get(moved).len(), 612);
        world.finish(&[moved]);
    }
}

each_config!(others_than_vcpus_mark_what_they_have_written, marks);
fn marks<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_dirty_tracking(tracking).with_manual_protect(manual_protect));
            let (slot, other) = (Slot::new(1, 100, 200), Slot::new(2, 300, 10));
            world.create(slot, LOG);
            world.create(other, NO_FLAGS);
            world.harvest(slot);
            let past_end =
                |first_page, nr_pages| LogError::RangePastEnd { slot: 1, first_page, nr_pages, slot_pages: 200 };
            for (first, nr_pages) in [(0, 201), (200, 1), (199, 2), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)]
            {
                assert_eq!(world.vm.mark_dirty(1, first, nr_pages), Err(past_end(first, nr_pages)));
            }
            assert_eq!(world.vm.mark_dirty(7, 0, 1), Err(LogError::NoSuchSlot { slot: 7 }));
            assert_eq!(world.vm.is_marked_dirty(7, 0), Err(LogError::NoSuchSlot { slot: 7 }));
            assert_eq!(world.vm.is_marked_dirty(2, 0), Err(LogError::NotLogging { slot: 2 }));
            assert_eq!(world.vm.is_marked_dirty(1, 200), Err(past_end(200, 1)));
            assert_eq!(world.harvest(slot), [0; 0]);
            // A memslot that does not log has nothing to mark; its neighbour is not affected.
            assert_eq!(world.vm.mark_dirty(2, 0, 10), Ok(()));
            world.set_flags(other, LOG);
            let initially = if manual_protect == ManualProtect::InitiallySet { 10 } else { 0 };
            assert_eq!(world.harvest(other).len(), initially);
            // One, some across words, the last; mapped, mapped and clean, not mapped.
            world.write(slot, 0);
            world.harvest(slot);
            for (first, nr_pages) in [(0, 1), (60, 10), (199, 1)] {
                assert_eq!(world.vm.mark_dirty(1, first, nr_pages), Ok(()));
            }
            let marked: Vec<u64> = [0].into_iter().chain(60..70).chain([199]).collect();
            assert_eq!(
                (0..200).filter(|page| world.vm.is_marked_dirty(1, *page) == Ok(true)).collect::<Vec<_>>(),
                marked
            );
            assert_eq!(world.vm.nr_marked_dirty(), Ok(marked.len() as u64), "the neighbour has none");
            assert_eq!(world.harvest(slot), marked);
            assert_eq!(world.vm.nr_marked_dirty(), Ok(0));
            assert_eq!(world.harvest(slot), [0; 0]);
            assert_eq!(world.vm.mark_dirty(1, 0, 200), Ok(()));
            assert_eq!(world.harvest(slot).len(), 200);
            assert_eq!(world.harvest(other), [0; 0]);
            // The guest's own writes to these pages are logged as before.
            world.write_all(slot, [0, 65]);
            assert_eq!(world.harvest(slot), [0, 65]);
            world.finish(&[slot, other]);
        }
    }
}

/// What a refused call must leave unchanged.
fn seen<F: Format>(world: &World<F>, slot: Slot) -> (Vec<u64>, Vec<Option<crate::common::Translation>>, [u64; 5]) {
    let marked = (0..slot.nr_pages).filter(|page| world.vm.is_marked_dirty(slot.id, *page) == Ok(true)).collect();
    let stats = world.vm.stats();
    let counters =
        [stats.flushes, stats.protected, stats.tables_protected, stats.tables_unprotected, stats.live_tables()];
    (marked, world.entries(slot), counters)
}

each_config!(invalid_log_ranges_are_refused_and_change_nothing, refused);
fn refused<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        for manual_protect in MANUAL_PROTECTS {
            let mut world = World::<F>::new(config.with_dirty_tracking(tracking).with_manual_protect(manual_protect));
            // It ends inside a word.
            let (slot, quiet) = (Slot::new(1, 500, 200), Slot::new(2, 1024, 64));
            world.create(slot, LOG);
            world.create(quiet, NO_FLAGS);
            world.write_all(slot, [0, 64, 199]);
            let unaligned = |first_page, nr_pages| LogError::UnalignedRange { slot: 1, first_page, nr_pages };
            let past_end =
                |first_page, nr_pages| LogError::RangePastEnd { slot: 1, first_page, nr_pages, slot_pages: 200 };
            let too_short = |words, needed| LogError::BitmapTooShort { slot: 1, words, needed };
            let empty = |first| LogError::EmptyRange { start: slot.gfn(first), end: slot.gfn(first) };
            let max = u64::MAX;
            // Memslot, first page, pages, words, and the error.
            let cases = [
                (0, 0, 64, 9, LogError::NoSuchSlot { slot: 0 }),
                (u32::MAX, 0, 64, 9, LogError::NoSuchSlot { slot: u32::MAX }),
                (2, 0, 64, 9, LogError::NotLogging { slot: 2 }),
                (2, 1, 640, 0, LogError::NotLogging { slot: 2 }),
                (1, 1, 64, 9, unaligned(1, 64)),
                (1, 63, 64, 9, unaligned(63, 64)),
                (1, 65, 135, 9, unaligned(65, 135)),
                (1, 199, 1, 9, unaligned(199, 1)),
                (1, 200, 0, 9, empty(200)),
                (1, 32, 0, 9, empty(32)),
                (1, 0, 1, 9, unaligned(0, 1)),
                (1, 0, 63, 9, unaligned(0, 63)),
                (1, 0, 199, 9, unaligned(0, 199)),
                (1, 128, 71, 9, unaligned(128, 71)),
                (1, 0, 201, 9, past_end(0, 201)),
                (1, 0, 256, 9, past_end(0, 256)),
                (1, 192, 64, 9, past_end(192, 64)),
                (1, 256, 0, 9, empty(256)),
                (1, 256, 64, 9, past_end(256, 64)),
                (1, 0, max, 9, past_end(0, max)),
                (1, 64, max - 63, 9, past_end(64, max - 63)),
                (1, max - 63, 64, 9, past_end(max - 63, 64)),
                (1, max - 63, 63, 9, past_end(max - 63, 63)),
                (1, max, max, 9, past_end(max, max)),
                (1, 0, 64, 0, too_short(0, 1)),
                (1, 64, 136, 2, too_short(2, 3)),
                (1, 0, 200, 3, too_short(3, 4)),
            ];
            let before = seen(&world, slot);
            for (id, first, nr_pages, words, error) in cases {
                let mut bitmap = vec![0x55aa; words];
                assert_eq!(world.vm.get_dirty_log_range(id, first, nr_pages, &mut bitmap), Err(error));
                assert!(bitmap.iter().all(|word| *word == 0x55aa), "{error}: the bitmap was written");
                assert_eq!(world.vm.clear_dirty_log(id, first, nr_pages, &vec![u64::MAX; words]), Err(error));
                assert_eq!(seen(&world, slot), before, "{error}");
            }
            for words in 0..4 {
                let mut bitmap = vec![0x55aa; words];
                assert_eq!(world.vm.get_dirty_log(1, &mut bitmap), Err(too_short(words, 4)));
                assert!(bitmap.iter().all(|word| *word == 0x55aa), "the bitmap was written");
                assert_eq!(seen(&world, slot), before);
            }
            let initially: Vec<u64> =
                if manual_protect == ManualProtect::InitiallySet { (0..200).collect() } else { vec![0, 64, 199] };
            assert_eq!(world.harvest(slot), initially);
            world.finish(&[slot, quiet]);
        }
    }
}

each_config!(slots_in_one_word_of_frames_have_logs_of_their_own, neighbours);
fn neighbours<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        let mut world = World::<F>::new(config.with_dirty_tracking(tracking));
        let slots = [Slot::new(0, 1000, 30), Slot::new(1, 1030, 1), Slot::new(2, 1031, 100), Slot::new(3, 1131, 64)];
        for slot in slots {
            world.create(slot, if slot.id == 2 { NO_FLAGS } else { LOG });
            world.write_all(slot, [0, slot.nr_pages - 1]);
        }
        world.set_flags(slots[2], LOG);
        assert_eq!(slots.map(|slot| world.harvest(slot)), [vec![0, 29], vec![0], vec![], vec![0, 63]]);
        world.write_all(slots[2], [50]);
        world.write_all(slots[1], [0]);
        assert_eq!(slots.map(|slot| world.harvest(slot)), [vec![], vec![0], vec![50], vec![]]);
        world.finish(&slots);
    }
}

each_config!(a_log_ends_when_logging_does, ends);
fn ends<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        let mut world = World::<F>::new(config.with_dirty_tracking(tracking));
        let slot = Slot::new(1, 500, 100);
        world.create(slot, LOG);
        world.write_all(slot, [1, 2, 3]);
        world.take_flushes();
        world.set_flags(slot, NO_FLAGS);
        assert_eq!(world.take_flushes().len(), 0);
        assert_eq!(world.vm.get_dirty_log(1, &mut [0; 2]), Err(LogError::NotLogging { slot: 1 }));
        assert_eq!(world.write_all(slot, [1, 2, 3]), 0);
        world.write_all(slot, [4, 5]);
        world.set_flags(slot, LOG);
        assert_eq!(world.harvest(slot), [0; 0], "written before logging began again");
        world.write_all(slot, [2, 5, 6]);
        assert_eq!(world.harvest(slot), [2, 5, 6]);
        // A deletion drops the log, and a new memslot of the same number has a new one.
        world.write(slot, 9);
        world.delete(slot);
        world.create(slot, LOG);
        assert_eq!(world.harvest(slot), [0; 0]);
        // A memslot that moves and begins to log at once begins with an empty log, since nothing is
        // mapped.
        world.set_flags(slot, NO_FLAGS);
        world.write(slot, 9);
        let moved = Slot { first: 2048, ..slot };
        world.vm.set_user_memory_region(change(1, LOG, 2048 * PAGE_SIZE, 100 * PAGE_SIZE)).unwrap();
        assert_eq!(world.harvest(moved), [0; 0]);
        world.delete(moved);
        drop(world);
    }
}

each_config!(a_read_only_slot_has_an_empty_log, read_only);
fn read_only<F: Format>(config: Config) {
    for tracking in dirty_trackings::<F>() {
        let mut world = World::<F>::new(config.with_dirty_tracking(tracking));
        let slot = Slot::new(1, 0, 100);
        world.create(slot, LOG | MemoryRegionFlags::READONLY);
        for page in 0..100 {
            world.read(slot, page);
            let exit = world.vcpu.handle_fault(slot.gfn(page).gpa(), slat::Access::Write);
            assert!(matches!(exit, Ok(slat::Outcome::Exit(_))), "{exit:?}");
        }
        assert_eq!(world.harvest(slot), [0; 0]);
        // Writes of the VMM are marked all the same.
        world.vm.mark_dirty(1, 3, 2).unwrap();
        assert_eq!(world.harvest(slot), [3, 4]);
        world.finish(&[slot]);
    }
}

#[test]
fn masks_and_pages_name_the_same() {
    let pages = vec![0, 1, 63, 64, 130];
    assert_eq!(mask_of(&pages, 3), [1 | 2 | 1 << 63, 1, 4]);
    assert_eq!(pages_of(&mask_of(&pages, 3), 0), pages);
    assert_eq!(pages_of(&[5], 64), [64, 66]);
}
