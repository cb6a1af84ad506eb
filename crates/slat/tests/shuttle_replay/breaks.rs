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
    let first = pick(&[0, BLOCK]);
    guests_beside(&vm, first, vec![Box::new(mover), Box::new(mover), Box::new(move |vm| collapser(vm, first))]);
    save("break_before_make", &vm);
}

#[test]
fn breaks_with_two_levels() {
    check_less(SCHEDULES, breaks::<Breaking<2>>);
}

#[test]
fn breaks_with_three_levels() {
    check_less(SCHEDULES, breaks::<Breaking<3>>);
}
