//! Rings that are enabled while vCPUs without a ring come and go, and while memslots begin to log.

use super::*;

/// Pages of two memslots, a block each.
const PAGES: [u64; 4] = [0, 1, BLOCK, BLOCK + 1];
const CHANGE: u64 = 3;

/// Makes a vCPU, writes to a few pages, and drops the vCPU, again and again.
fn writer<F: Format>(vm: &TestVm<F>, index: usize) {
    for _ in 0..3 {
        let mut vcpu = vm.create_vcpu().unwrap();
        for _ in 0..2 {
            let gfn = pick(&PAGES);
            if !cpu_writes(vm, index, gfn) {
                let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), Access::Write).unwrap();
                assert_eq!(outcome, Outcome::Resume);
            }
        }
        drop(vcpu);
        vm.host().inner.step();
    }
}

/// Enables rings, if at some moment no call and no vCPU keeps them out.
fn enabler<F: Format>(vm: &TestVm<F>) {
    for _ in 0..20 {
        let is_ok = vm.enable_dirty_ring(16).is_ok();
        events::record(Event::CallEnds { is_ok });
        if is_ok {
            return;
        }
        vm.host().yield_now();
    }
}

fn logger<F: Format>(vm: &TestVm<F>, id: u32) {
    let start = u64::from(id) * BLOCK;
    events::record(Event::MemslotBegins { kind: CHANGE, id: id.into(), start, end: start + BLOCK, backing: 0 });
    vm.set_user_memory_region(region(id, MemoryRegionFlags::LOG_DIRTY_PAGES, start, BLOCK, None)).unwrap();
    events::record(Event::CallEnds { is_ok: true });
}

fn ring_enabling<F: Format>() {
    events::start();
    let config = log_config(DirtyTracking::WriteProtectLeaves);
    let vm: TestVm<F> = Arc::new(Vm::new(MovingHost::new(PageSize::Size4K), config).unwrap());
    is_record_of("ring_enabling", &vm);
    for id in [0, 1] {
        let memory = backing(0, PageSize::Size4K);
        let made = region(id, MemoryRegionFlags::empty(), u64::from(id) * BLOCK, BLOCK, Some(memory));
        vm.set_user_memory_region(made).unwrap();
    }
    let bodies: [fn(&TestVm<F>); 6] = [
        |vm| writer(vm, 0),
        |vm| writer(vm, 1),
        enabler,
        |vm| logger(vm, 0),
        |vm| logger(vm, 1),
        |vm| {
            let _: u64 = vm.recover_range(GfnRange::new(Gfn(0), NR_PAGES)).unwrap();
        },
    ];
    on_threads(&vm, bodies);
    save();
}

#[test]
fn rings_that_are_enabled() {
    check_less(SCHEDULES, ring_enabling::<Tiny<2>>);
}
