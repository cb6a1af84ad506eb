//! Splits for which the host has no memory, or not at once.

use super::*;
use slat::error::RangeError;

/// The frame of a page, and whether it is writable.
type Seen = Option<(u64, bool)>;

/// All that the guest observes of a memslot.
fn seen<F: Format>(world: &World<F>, slot: Slot) -> Vec<Seen> {
    world.entries(slot).into_iter().map(|found| found.map(|found| (found.pfn.0, found.writable))).collect()
}

each_format!(a_split_without_memory_leaves_the_rest_unchanged, out_of_memory);
fn out_of_memory<F: Format>(config: Config) {
    let slot = Slot::huge(1, HUGE, 6 * BIG, PageSize::Size2M);
    for k in 0..6 {
        let world = world_with::<F>(config, slot, Access::Write);
        let (vm, before) = (&world.vm, seen(&world, slot));
        let nr_tables = vm.host().live_tables();
        vm.host().fail_after(k);
        assert_eq!(vm.split_range(slot.range(), PageSize::Size4K), Err(RangeError::OutOfMemory), "with {k} tables");
        vm.host().never_fail();
        let k = k as u64;
        assert_eq!(sizes(&world), (k * BIG, 6 - k, 0));
        assert_eq!(vm.host().live_tables() as u64, nr_tables as u64 + k);
        // With break before make, the parts may wait for their first write.
        let is_same = |(now, before): (&Seen, &Seen)| {
            now.map(|now| now.0) == before.map(|before| before.0) && (F::BREAK_BEFORE_MAKE || now == before)
        };
        assert!(seen(&world, slot).iter().zip(&before).all(is_same));
        assert_eq!(vm.split_range(slot.range(), PageSize::Size4K), Ok(6 - k));
        assert_eq!((sizes(&world), zapped(&world).len()), ((6 * BIG, 0, 0), 0));
        world.finish(&[slot]);
    }
}

each_format!(a_1g_page_split_half_way_without_memory_is_mapped_whole, out_of_memory_1g);
fn out_of_memory_1g<F: Format>(config: Config) {
    let slot = Slot::huge(1, HUGE, HUGE, PageSize::Size1G);
    for k in [0, 1, 2, 100, 511, 512] {
        let world = world_with::<F>(config, slot, Access::Write);
        world.vm.host().fail_after(k);
        assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Err(RangeError::OutOfMemory));
        world.vm.host().never_fail();
        let nr_2m_split = (k as u64).saturating_sub(1);
        let expected = if k == 0 { (0, 0, 1) } else { (nr_2m_split * BIG, 512 - nr_2m_split, 0) };
        assert_eq!(sizes(&world), expected);
        assert!((0..HUGE).step_by(97).all(|page| world.at(slot.gfn(page)).unwrap().pfn.0 == slot.first_pfn + page));
        assert_eq!(world.vm.recover_range(slot.range()), Ok(nr_2m_split + u64::from(k != 0)));
        assert_eq!(sizes(&world), (0, 0, 1));
        world.finish(&[slot]);
    }
}

each_format!(logging_begins_without_memory_and_the_log_is_exact, logging_without_memory);
fn logging_without_memory<F: Format>(config: Config) {
    let slot = Slot::huge(1, HUGE, 4 * BIG, PageSize::Size2M);
    for manual in MANUAL_PROTECTS {
        for k in 0..5 {
            let mut world = world_with::<F>(config.with_manual_protect(manual), slot, Access::Write);
            world.vm.host().fail_after(k);
            world.set_flags(slot, LOG);
            if manual == ManualProtect::InitiallySet {
                assert_eq!(world.clear(slot, &(0..4 * BIG).collect::<Vec<_>>()), Ok(4 * BIG));
            }
            world.vm.host().never_fail();
            let k = k.min(4) as u64;
            assert_eq!(sizes(&world), (k * BIG, 4 - k, 0));
            assert!((0..4 * BIG).all(|page| !world.is_writable(slot, page)), "all is protected");
            let written = [0, 511, 512, 1025, 2047];
            world.write_all(slot, written);
            assert_eq!(world.harvest(slot), written, "with {k} tables");
            assert_eq!(sizes(&world), (4 * BIG, 0, 0), "the first write splits");
            world.set_flags(slot, NO_FLAGS);
            assert_eq!((sizes(&world), zapped(&world).len()), ((0, 4, 0), 0));
            world.finish(&[slot]);
        }
    }
}

each_format!(a_table_that_is_not_at_hand_is_allocated_again_where_waiting_is_allowed, waits);
fn waits<F: Format>(config: Config) {
    let slot = Slot::huge(1, HUGE, 5 * BIG, PageSize::Size2M);
    let mut world = world_with::<F>(config, slot, Access::Write);
    let asked = |world: &World<F>| -> Vec<AllocationWait> {
        std::mem::take(&mut *world.vm.host().asked.lock().unwrap()).into_iter().map(|(_, wait)| wait).collect()
    };
    assert!(
        asked(&world).iter().all(|wait| *wait == AllocationWait::Allowed),
        "faults hold no lock when they allocate"
    );
    world.vm.host().refuses_without_wait.store(true, Ordering::SeqCst);
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Ok(5));
    assert_eq!(asked(&world), [AllocationWait::Never, AllocationWait::Allowed].repeat(5));
    assert_eq!(world.vm.recover_range(slot.range()), Ok(5));
    assert_eq!(asked(&world), []);
    world.set_flags(slot, LOG);
    assert_eq!(asked(&world), [AllocationWait::Never, AllocationWait::Allowed].repeat(5));
    world.set_flags(slot, NO_FLAGS);
    world.vm.host().refuses_without_wait.store(false, Ordering::SeqCst);
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Ok(5));
    assert_eq!(asked(&world), [AllocationWait::Never; 5]);
    world.vm.recover_range(slot.range()).unwrap();
    // Neither: the error reports it, and each is tried.
    world.vm.host().fail_after(0);
    assert_eq!(world.vm.split_range(slot.range(), PageSize::Size4K), Err(RangeError::OutOfMemory));
    world.vm.host().never_fail();
    assert_eq!(asked(&world), [AllocationWait::Never, AllocationWait::Allowed]);
    assert_eq!(world.write(slot, 0), 0);
    world.finish(&[slot]);
}
