//! Break before make: huge pages are split, recovered and invalidated in part.

use super::*;
use crate::world::Breaking;

/// Schedules of each kind.
const SCHEDULES: usize = 100;

fn breaks<F: Format>() {
    events::start();
    let mut host = MovingHost::new(PageSize::Size2M);
    // Small leaves where a huge one was: then there is no recovery.
    host.max_size_of_reads = pick(&[PageSize::Size4K, PageSize::Size2M]);
    host.needs_zapped_leaves = random(2) == 0;
    let vm = new_vm::<F>(host, Config::default(), MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of("break_before_make", &vm);
    let first = pick(&[0, BLOCK]);
    guests_beside(&vm, first, vec![Box::new(mover), Box::new(mover), Box::new(move |vm| collapser(vm, first))]);
    save();
}

/// Reads map small leaves and may take long, writes map a huge one, and a page beside theirs is
/// invalidated. Without memory for a split all of the huge leaf goes. So a read that has found a
/// flushed PTE may come back to an unflushed one.
fn parts<F: Format>() {
    events::start();
    let mut host = MovingHost::new(PageSize::Size2M);
    host.max_size_of_reads = PageSize::Size4K;
    host.blocks = true;
    host.never_has_memory_at_once = true;
    let vm = new_vm::<F>(host, Config::default(), MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of("break_before_make", &vm);
    let invalidates = |vm: &TestVm<F>| {
        for _ in 0..2 {
            drop(vm.invalidate_range(GfnRange::new(Gfn(1), 1)).unwrap());
        }
    };
    let bodies: [fn(&TestVm<F>); 4] = [|vm| guest(vm, 0, [0; 2]), |vm| guest(vm, 1, [0; 2]), invalidates, invalidates];
    on_threads(&vm, bodies);
    save();
}

#[test]
fn breaks_of_parts() {
    check_less(SCHEDULES, parts::<Breaking<2>>);
}

#[test]
fn breaks_with_two_levels() {
    check_less(SCHEDULES, breaks::<Breaking<2>>);
}

#[test]
fn breaks_with_three_levels() {
    check_less(SCHEDULES, breaks::<Breaking<3>>);
}
