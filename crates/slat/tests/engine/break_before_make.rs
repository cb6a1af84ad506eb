//! Break before make: each change between a page-table page and a huge leaf, in either direction,
//! goes through a PTE that is not present, and a flush of its block. The observer of
//! `common::broken` checks all changes.
#![cfg(debug_assertions)]

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread;

use crate::common::broken::{self, Breaking};
use crate::common::hooked::at_look;
use crate::common::log::{LOG, MANUAL_PROTECTS, NO_FLAGS, Slot, World};
use crate::common::{Call, Frame, MIB, TestBacking, Writes, change, region, translate};
use slat::baselines::Locking;
use slat::dirty::{HugePageLogging, ManualProtect};
use slat::format::{Format, Npt};
use slat::host::AllocationWait;
use slat::{Access, Config, Gfn, GfnRange, Gpa, Level, Outcome, PAGE_SIZE, PageSize, Pfn};

const BIG: u64 = 512;
const HUGE: u64 = 512 * 512;
const SLOT: Slot = Slot::huge(1, HUGE, 4 * BIG, PageSize::Size2M);

fn configs() -> impl Iterator<Item = Config> {
    [Locking::None, Locking::Exclusive].into_iter().map(|locking| Config::default().with_locking(locking))
}

/// A test for each format that needs it, and for one that supports all of lazy protection and dirty
/// bits.
macro_rules! each_broken {
    ($name:ident, $test:ident) => {
        #[test]
        fn $name() {
            $test::<Npt>();
            slat::for_each_format!(F => {
                if F::BREAK_BEFORE_MAKE {
                    $test::<F>();
                }
            });
        }
    };
}

/// All of [`SLOT`] mapped, and observed.
fn world<F: Format>(config: Config) -> World<Breaking<F>> {
    let mut world = World::new(config);
    world.create(SLOT, NO_FLAGS);
    let size_bytes = SLOT.nr_pages * PAGE_SIZE;
    assert_eq!(world.vcpu.pre_fault_memory(SLOT.gfn(0).gpa(), size_bytes, Access::Write), Ok(size_bytes));
    broken::observe(&world.vm);
    world
}

each_broken!(splits_and_recoveries_break, seen);
fn seen<F: Format>() {
    for config in configs() {
        let slot = Slot::huge(1, 0, HUGE, PageSize::Size1G);
        let mut world = World::<Breaking<F>>::new(config);
        world.create(slot, NO_FLAGS);
        world.write(slot, 0);
        broken::observe(&world.vm);
        assert_eq!(world.vm.split_range(GfnRange::new(Gfn(0), 2 * BIG), PageSize::Size4K), Ok(3));
        assert_eq!(world.vm.recover_range(slot.range()), Ok(3));
        assert_eq!(broken::observed(), (3, 3));
        world.finish(&[slot]);
    }
}

each_broken!(logging_breaks_what_it_splits_and_recovers, logging);
fn logging<F: Format>() {
    for config in configs() {
        for manual in MANUAL_PROTECTS {
            let mut world = world::<F>(config.with_manual_protect(manual));
            world.set_flags(SLOT, LOG);
            if manual == ManualProtect::InitiallySet {
                assert_eq!(world.clear(SLOT, &(0..4 * BIG).collect::<Vec<_>>()), Ok(4 * BIG));
            }
            world.write_all(SLOT, [0, 600]);
            assert_eq!(world.harvest(SLOT), [0, 600]);
            world.set_flags(SLOT, NO_FLAGS);
            assert_eq!(broken::observed(), (4, 4));
            world.finish(&[SLOT]);
        }
        let mut world = world::<F>(config.with_huge_page_logging(HugePageLogging::MarkWhole));
        world.set_flags(SLOT, LOG);
        world.vm.split_range(SLOT.range(), PageSize::Size4K).unwrap();
        world.write(SLOT, 3);
        assert_eq!(world.vm.recover_range(SLOT.range()), Ok(4));
        assert_eq!(world.harvest(SLOT), [3]);
        assert_eq!(broken::observed(), (4, 4));
        world.finish(&[SLOT]);
    }
}

each_broken!(an_invalidation_of_a_part_breaks_the_leaf, part_taken);
fn part_taken<F: Format>() {
    for config in configs() {
        let mut world = world::<F>(config);
        // A part of a leaf.
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(7), 3)).unwrap());
        assert_eq!(world.vm.stats().pages_4k(), 512 - 3);
        // All of one, and before that is flushed, a part of it.
        let vm = Arc::clone(&world.vm);
        world.vm.host().overtake(Call::Flush, 1, move || {
            drop(vm.invalidate_range(GfnRange::new(SLOT.gfn(BIG + 7), 3)).unwrap());
        });
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(BIG), BIG)).unwrap());
        assert!(world.vm.host().was_overtaken());
        // And a page beside it is mapped before the flush.
        let vm = Arc::clone(&world.vm);
        world.vm.host().overtake(Call::Flush, 2, move || {
            let mut vcpu = vm.create_vcpu().unwrap();
            assert_eq!(vcpu.handle_fault(SLOT.gfn(2 * BIG + 9).gpa(), Access::Write), Ok(Outcome::Resume));
        });
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(2 * BIG + 7), 1)).unwrap());
        world.write_all(SLOT, [7, BIG + 7, BIG, 2 * BIG + 7, 2 * BIG]);
        assert!(broken::observed().0 >= 2);
        world.finish(&[SLOT]);
    }
}

each_broken!(a_leaf_zapped_whole_without_memory_is_flushed_before_a_table_is_linked, without_memory);
fn without_memory<F: Format>() {
    for config in configs() {
        for nth in 1..4 {
            let mut world = world::<F>(config);
            world.vm.host().fail_after(0);
            let vm = Arc::clone(&world.vm);
            // Meanwhile another thread has memory, and faults before the flush.
            world.vm.host().overtake(Call::Flush, nth, move || {
                vm.host().never_fail();
                let mut vcpu = vm.create_vcpu().unwrap();
                assert_eq!(vcpu.handle_fault(SLOT.gfn(9).gpa(), Access::Write), Ok(Outcome::Resume));
            });
            let vm = Arc::clone(&world.vm);
            let invalidation = vm.invalidate_range(GfnRange::new(SLOT.gfn(7), 1)).unwrap();
            vm.host().never_fail();
            world.write(SLOT, 9);
            assert_eq!(world.at(SLOT.gfn(9)).unwrap().level, slat::Level::L4K, "beside the invalidation");
            drop(invalidation);
            world.write(SLOT, 7);
            assert_eq!(broken::observed(), (1, 0));
            let _ = world.vm.host().was_overtaken();
            world.finish(&[SLOT]);
        }
    }
}

each_broken!(an_invalidation_beside_an_unflushed_entry_flushes_it_once, flushed_beside);
/// A leaf was zapped whole, and before that is flushed, other pages of its block are invalidated
/// and then mapped.
fn flushed_beside<F: Format>() {
    for config in configs() {
        let world = world::<F>(config);
        world.take_flushes();
        let vm = Arc::clone(&world.vm);
        let (sender, results) = mpsc::channel();
        let neighbours = [9, 11].map(|page| GfnRange::new(SLOT.gfn(page), 1));
        world.vm.host().fail_after(0);
        world.vm.host().overtake(Call::Flush, 1, move || {
            vm.host().never_fail();
            for range in neighbours {
                drop(vm.invalidate_range(range).unwrap());
            }
            // A small leaf, since the first invalidation is not over yet.
            sender.send(vm.create_vcpu().unwrap().handle_fault(SLOT.gfn(3).gpa(), Access::Write)).unwrap();
        });
        let first = GfnRange::new(SLOT.gfn(7), 1);
        drop(world.vm.invalidate_range(first).unwrap());
        assert!(world.vm.host().was_overtaken());
        assert_eq!(results.recv().unwrap(), Ok(Outcome::Resume));
        // Each invalidation flushes its range in any case; the first also what it has zapped.
        let block = GfnRange::new(SLOT.gfn(0), BIG);
        assert_eq!(world.take_flushes().concat(), [block, neighbours[0], neighbours[1], block]);
        assert_eq!(world.at(SLOT.gfn(3)).unwrap().level, Level::L4K);
        assert_eq!(broken::observed(), (1, 0));
        world.finish(&[SLOT]);
    }
}

/// [`SLOT`] over frames that are read-only until they are written; mapped, and observed.
fn copy_on_write<F: Format>(config: Config) -> (World<Breaking<F>>, Arc<TestBacking>) {
    let mut world = World::<Breaking<F>>::new(config);
    let memory = region(1, SLOT.gfn(0).gpa().0, 4 * 2 * MIB, SLOT.first_pfn, PageSize::Size2M);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    world.vm.set_user_memory_region(memory).unwrap();
    for n in 0..4 {
        assert_eq!(world.vcpu.handle_fault(SLOT.gfn(n * BIG).gpa(), Access::Read), Ok(Outcome::Resume));
    }
    broken::observe(&world.vm);
    (world, backing)
}

fn make_small(backing: &TestBacking, page: u64) {
    backing.frames.write().unwrap().insert(page, Frame { pfn: SLOT.first_pfn + page, writes: Writes::Allowed });
}

each_broken!(a_write_to_a_part_breaks_the_read_only_leaf, part_written);
fn part_written<F: Format>() {
    for config in configs() {
        let (mut world, backing) = copy_on_write::<F>(config);
        make_small(&backing, 9);
        world.write(SLOT, 9);
        assert!(!world.is_writable(SLOT, 10) && world.at(SLOT.gfn(10)).is_some());
        // The whole block: the same leaf, but writable.
        world.write(SLOT, BIG + 9);
        assert_eq!(broken::observed(), (1, 0));
        assert_eq!(world.vm.stats().pages_2m(), 3);
        world.finish(&[SLOT]);
    }
}

each_broken!(a_read_only_leaf_zapped_in_vain_is_flushed_before_a_table_is_linked, zapped_in_vain);
/// The write observes that another thread took a number while it resolved. The PTE is left empty,
/// and gets a small leaf when the guest comes back.
fn zapped_in_vain<F: Format>() {
    for config in configs() {
        let (mut world, backing) = copy_on_write::<F>(config);
        let vm = Arc::clone(&world.vm);
        let again = Arc::clone(&backing);
        world.vm.host().overtake(Call::Resolve, 1, move || {
            // Elsewhere; and when the fault resolves again, the page is small.
            drop(vm.invalidate_range(GfnRange::new(SLOT.gfn(3 * BIG), BIG)).unwrap());
            let vm_host = vm.host();
            vm_host.overtake(Call::Resolve, 1, move || make_small(&again, 9));
        });
        assert_eq!(world.vcpu.handle_fault(SLOT.gfn(9).gpa(), Access::Write), Ok(Outcome::Resume));
        assert!(world.vm.host().was_overtaken());
        assert_eq!(world.at(SLOT.gfn(9)).unwrap().level, slat::Level::L4K);
        assert_eq!(broken::observed(), (1, 0));
        world.finish(&[SLOT]);
    }
}

each_broken!(a_prefault_after_a_cancelled_break_flushes_once, flushes_once);
/// After a cancel, a prefault maps the block by small leaves: one flush for the block, and not one
/// for each page.
fn flushes_once<F: Format>() {
    for config in configs() {
        let mut world = world::<F>(config);
        let vm = Arc::clone(&world.vm);
        world.vm.host().overtake(Call::Flush, 1, move || {
            // Small from now on, and cancelled.
            let invalidation = vm.invalidate_range(GfnRange::new(SLOT.gfn(BIG), 1)).unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            assert_eq!(vcpu.handle_fault(SLOT.gfn(0).gpa(), Access::Read), Ok(Outcome::Resume));
            drop(invalidation);
        });
        world.vm.split_range(GfnRange::new(SLOT.gfn(0), BIG), PageSize::Size4K).unwrap();
        assert!(world.vm.host().was_overtaken());
        world.write_all(SLOT, 0..2 * BIG);
        let _ = broken::observed();
        world.finish(&[SLOT]);
    }
}

each_broken!(entries_of_a_new_table_need_no_flush_of_their_own, new_table);
/// A prefault finds the break of a split, cancels it, and fills the beginning of a page-table page.
/// For that it has flushed the block, so the PTEs behind need no flush of their own.
fn new_table<F: Format>() {
    let (mut world, backing) = copy_on_write::<F>(Config::default());
    let vm = Arc::clone(&world.vm);
    let small = Arc::clone(&backing);
    world.vm.host().overtake(Call::Flush, 1, move || {
        (0..BIG).for_each(|page| make_small(&small, page));
        let gone = Arc::clone(&small);
        vm.host().overtake(Call::Resolve, 5, move || gone.gone.store(true, Ordering::SeqCst));
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(vcpu.pre_fault_memory(SLOT.gfn(0).gpa(), 2 * MIB, Access::Read), Ok(4 * PAGE_SIZE));
        small.gone.store(false, Ordering::SeqCst);
    });
    assert_eq!(world.vm.split_range(GfnRange::new(SLOT.gfn(0), BIG), PageSize::Size4K), Ok(0));
    assert!(world.vm.host().was_overtaken());
    world.take_flushes();
    assert_eq!(world.vcpu.handle_fault(SLOT.gfn(100).gpa(), Access::Read), Ok(Outcome::Resume));
    assert_eq!(world.take_flushes().len(), 0, "it was flushed for the table that it is in");
    assert_eq!(broken::observed(), (1, 0));
    world.finish(&[SLOT]);
}

each_broken!(an_overtaken_split_splits_no_further_than_requested, no_further);
/// Two threads split a page of 1 GiB to 2 MiB at once. Neither splits further what the other has
/// split.
fn no_further<F: Format>() {
    let slot = Slot::huge(1, 0, HUGE, PageSize::Size1G);
    let mut world = World::<Breaking<F>>::new(Config::default());
    world.create(slot, NO_FLAGS);
    world.write(slot, 0);
    let vm = Arc::clone(&world.vm);
    world.vm.host().overtake(Call::Allocate(AllocationWait::Never), 1, move || {
        std::thread::spawn(move || vm.split_range(slot.range(), PageSize::Size2M).unwrap()).join().unwrap();
    });
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size2M), Ok(0));
    assert!(world.vm.host().was_overtaken());
    let stats = world.vm.stats();
    assert_eq!((stats.pages_4k(), stats.pages_2m()), (0, 512));
    world.finish(&[slot]);
}

each_broken!(a_late_cancel_keeps_a_table_that_was_linked_meanwhile, cancels_late);
fn cancels_late<F: Format>() {
    let slot = Slot::huge(1, 0, HUGE, PageSize::Size1G);
    let mut world = World::<Breaking<F>>::new(Config::default());
    world.create(slot, NO_FLAGS);
    world.write(slot, 0);
    let vm = Arc::clone(&world.vm);
    let (reached, is_there) = mpsc::channel();
    let (go, go_on) = mpsc::channel();
    let (sender, canceller) = mpsc::channel();
    // While the split flushes, a fault begins to cancel it, and stops at the first part of the
    // page-table page to come.
    world.vm.host().overtake(Call::Flush, 1, move || {
        sender
            .send(thread::spawn(move || {
                let mut vcpu = vm.create_vcpu().unwrap();
                at_look(Level::L2M, 1, move || {
                    reached.send(()).unwrap();
                    go_on.recv().unwrap();
                });
                vcpu.handle_fault(Gpa(0), Access::Read)
            }))
            .unwrap();
        is_there.recv().unwrap();
    });
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size2M), Ok(1));
    // The page-table page is linked, and another one below it.
    assert_eq!(world.vm.split_range(GfnRange::new(Gfn(BIG), BIG), PageSize::Size4K), Ok(1));
    go.send(()).unwrap();
    assert_eq!(canceller.recv().unwrap().join().unwrap(), Ok(Outcome::Resume));
    let translation = translate(&world.vm, Gfn(BIG + 100).gpa()).unwrap();
    assert_eq!((translation.level, translation.pfn), (Level::L4K, Pfn(slot.first_pfn + BIG + 100)));
    assert_eq!(world.vm.create_vcpu().unwrap().handle_fault(Gfn(BIG + 100).gpa(), Access::Read), Ok(Outcome::Resume));
    world.finish(&[slot]);
}

each_broken!(the_parts_of_a_writable_leaf_stay_writable_where_nothing_logs, keep_write);
fn keep_write<F: Format>() {
    for config in configs() {
        // A split ahead of time, and one for a part that is invalidated.
        let mut world = world::<F>(config);
        world.vm.split_range(GfnRange::new(SLOT.gfn(0), BIG), PageSize::Size4K).unwrap();
        drop(world.vm.invalidate_range(GfnRange::new(SLOT.gfn(BIG + 7), 1)).unwrap());
        assert_eq!(world.vm.stats().pages_4k(), 2 * BIG - 1);
        for page in (0..2 * BIG).filter(|&page| page != BIG + 7) {
            assert!(world.is_writable(SLOT, page), "page {page} was writable");
        }
        assert_eq!(world.write_all(SLOT, (0..2 * BIG).filter(|&page| page != BIG + 7)), 0, "no write faults");
        // Where the memslot logs, the first write to each part must fault.
        world.set_flags(SLOT, LOG);
        assert!((0..4 * BIG).all(|page| !world.is_writable(SLOT, page)));
        assert_eq!(world.write_all(SLOT, [3, 3 * BIG]), 2);
        assert_eq!(world.harvest(SLOT), [3, 3 * BIG]);
        assert!(broken::observed().0 >= 4);
        world.finish(&[SLOT]);
    }
}

each_broken!(a_slot_that_begins_to_log_during_a_split_logs_the_writable_parts, begins_to_log);
fn begins_to_log<F: Format>() {
    for config in configs() {
        for manual in MANUAL_PROTECTS {
            let mut world = world::<F>(config.with_manual_protect(manual));
            let vm = Arc::clone(&world.vm);
            // The split has broken the leaf. The call that turns the log on passes over it.
            world.vm.host().overtake(Call::Flush, 1, move || {
                let changed = change(SLOT.id, LOG, SLOT.first * PAGE_SIZE, SLOT.nr_pages * PAGE_SIZE);
                vm.set_user_memory_region(changed).unwrap();
                if manual == ManualProtect::InitiallySet {
                    let all = vec![u64::MAX; SLOT.nr_words()];
                    assert_eq!(vm.clear_dirty_log(SLOT.id, 0, SLOT.nr_pages, &all), Ok(SLOT.nr_pages));
                }
            });
            world.vm.split_range(GfnRange::new(SLOT.gfn(0), BIG), PageSize::Size4K).unwrap();
            assert!(world.vm.host().was_overtaken());
            let is_open = |world: &World<Breaking<F>>| (0..BIG).filter(|&page| world.is_writable(SLOT, page)).collect();
            let open: Vec<u64> = is_open(&world);
            let logged = world.harvest(SLOT);
            assert!(
                open.iter().all(|page| logged.contains(page)),
                "{manual:?}: what may be written unseen is in the log"
            );
            assert_eq!(is_open(&world), [0; 0], "{manual:?}");
            world.write_all(SLOT, [5, 700]);
            assert_eq!(world.harvest(SLOT), [5, 700], "{manual:?}");
            let _ = broken::observed();
            world.finish(&[SLOT]);
        }
    }
}
