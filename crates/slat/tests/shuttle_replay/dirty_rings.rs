//! Schedules of dirty rings that are so small that entries are filled anew.

use slat::Vcpu;
use slat::dirty::{DirtyRing, DirtyRingEntry};

use super::*;

const NR_ENTRIES: u32 = DirtyRing::MIN_ENTRIES;

/// Writes to a few of the pages, and reads some where it faults. Resets the rings if its own is
/// full.
fn writer<F: Format>(vm: &TestVm<F>, vcpu: &mut Vcpu<MovingHost, F>, index: usize) {
    for _ in 0..12 {
        let gfn = pick(&USED);
        if !cpu_writes(vm, index, gfn) {
            let access = pick(&[Access::Read, Access::Write, Access::Write]);
            match vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), access).unwrap() {
                Outcome::Resume => {}
                Outcome::Exit(_) => collect(vm),
            }
        }
    }
}

/// Harvests the rings, or marks some of the entries in another order. Then it resets all rings.
fn collect<F: Format>(vm: &TestVm<F>) {
    for ring in vm.dirty_rings() {
        if random(2) == 0 {
            ring.harvest(|_| ());
            continue;
        }
        let first = ring.first_index();
        for index in [first + 1, first + random(3)] {
            if matches!(ring.entry(index), DirtyRingEntry::Dirty(_)) {
                ring.mark_harvested(index);
            }
        }
    }
    events::record(Event::ResetBegins);
    vm.reset_dirty_rings().unwrap();
    events::record(Event::ResetEnds);
}

fn dirty_rings<F: Format>() {
    events::start();
    let mut config = Config::default();
    config.dirty_tracking = DirtyTracking::WriteProtectLeaves;
    let vm: TestVm<F> = Arc::new(Vm::new(MovingHost::new(PageSize::Size4K), config).unwrap());
    is_record_of("dirty_rings", &vm);
    vm.enable_dirty_ring(NR_ENTRIES).unwrap();
    let flags = MemoryRegionFlags::LOG_DIRTY_PAGES;
    vm.set_user_memory_region(region(0, flags, 0, NR_PAGES, Some(backing(0, PageSize::Size4K)))).unwrap();
    let vcpus = [0, 1].map(|cpu| {
        let vcpu = vm.create_vcpu().unwrap();
        let ring = std::ptr::from_ref(vcpu.dirty_ring().unwrap()).addr() as u64;
        events::record(Event::VcpuHasRing { cpu, ring, nr_entries: NR_ENTRIES.into() });
        vcpu
    });
    let writers = vcpus
        .into_iter()
        .enumerate()
        .map(|(index, mut vcpu)| Box::new(move |vm: &TestVm<F>| writer(vm, &mut vcpu, index)) as Body<F>);
    let collectors = (0..2).map(|_| Box::new(|vm: &TestVm<F>| (0..3).for_each(|_| collect(vm))) as Body<F>);
    on_threads(&vm, writers.chain(collectors));
    save();
}

#[test]
fn dirty_rings_of_vcpus() {
    check_less(100, dirty_rings::<Tiny<2>>);
}
