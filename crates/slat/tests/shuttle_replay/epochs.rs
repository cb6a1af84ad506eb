//! Page-table pages that come and go, and the guards that reach them. With the fence of each guard, or with
//! the host's barrier.

use super::*;

/// Schedules of each kind.
const SCHEDULES: usize = 100;

fn scenario<F: Format>() {
    let mut host = MovingHost::new(pick(&[PageSize::Size4K, PageSize::Size2M]));
    host.blocks = true;
    host.has_barrier = random(2) == 0;
    // It is for the replay to notice.
    host.inner.poisons = false;
    let (is_huge, has_barrier) = (host.max_size != PageSize::Size4K, host.has_barrier);
    events::start();
    if has_barrier {
        // All guards of the schedule go by it.
        events::record(Event::BarrierMade);
    }
    let vm = new_vm::<F>(host, Config::default(), MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of("epochs", &vm);
    let first = pick(&[0, BLOCK]);
    let reclaims: Body<F> = Box::new(|vm| (0..3).for_each(|_| vm.reclaim()));
    let other: Body<F> = if is_huge { Box::new(move |vm| collapser(vm, first)) } else { Box::new(mover) };
    guests_beside(&vm, first, vec![Box::new(mover), other, reclaims]);
    save();
}

#[test]
fn page_table_pages_that_come_and_go() {
    check_less(SCHEDULES, scenario::<Tiny<3>>);
}
