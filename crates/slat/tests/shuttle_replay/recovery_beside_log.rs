//! Recoveries and splits of huge pages, while logging begins and ends, beside writers and harvests.

use super::*;
use crate::world::Breaking;
use slat::dirty::HugePageLogging;

/// Schedules of each kind.
const SCHEDULES: usize = 100;

/// Splits huge pages and recovers them.
fn recoverer<F: Format>(vm: &TestVm<F>) {
    for _ in 0..3 {
        let block = GfnRange::new(Gfn(pick(&[0, BLOCK])), BLOCK);
        if random(2) == 0 {
            vm.split_range(block, PageSize::Size4K).unwrap();
        }
        vm.recover_range(block).unwrap();
    }
}

fn scenario<F: Format>() {
    events::start();
    let mut config = log_config(DirtyTracking::WriteProtectLeaves);
    config.huge_page_logging = pick(&[
        HugePageLogging::Split,
        HugePageLogging::SplitLazily,
        HugePageLogging::MarkWhole,
        HugePageLogging::MarkWholeLazily,
    ]);
    let mut host = MovingHost::new(PageSize::Size2M);
    host.is_always_writable = true;
    let vm = new_vm::<F>(host, config, MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of("recovery_beside_log", &vm);
    let bodies: [fn(&TestVm<F>); 7] = [
        |vm| writer(vm, 0),
        |vm| writer(vm, 1),
        |vm| toggle_log(vm, NR_PAGES, || ()),
        harvester,
        harvester,
        recoverer,
        recoverer,
    ];
    on_threads(&vm, bodies);
    save();
}

#[test]
fn recoveries_beside_a_log() {
    check_less(SCHEDULES, scenario::<Tiny<2>>);
}

#[test]
fn recoveries_beside_a_log_with_breaks() {
    check_less(SCHEDULES, scenario::<Breaking<2>>);
}
