//! Schedules of the dirty log by dirty bits and by modification logs: CPUs set D, and harvests
//! find it.

use super::*;

/// A memslot in one page-table page, so that the pages that share PTEs are outside.
const NR_PAGES: u64 = 4;
const PAGES: [u64; 3] = [0, 1, 2];

/// A CPU writes to a page, perhaps twice. `false` is a fault. The CPU gives up if its modification
/// log is full.
fn cpu_writes<F: Format>(vm: &TestVm<F>, cpu: u64, gfn: u64) -> bool {
    let host = vm.host();
    // SAFETY: the root.
    let above = Pte(unsafe { pte_of(vm, vm.root(), F::ROOT_LEVEL, gfn) }.load(Ordering::SeqCst));
    if !F::is_present(above) {
        return false;
    }
    // SAFETY: the directory entry points to it: no page is huge here.
    let leaf = unsafe { pte_of(vm, F::address(above, F::ROOT_LEVEL), Level::L4K, gfn) };
    loop {
        let value = leaf.load(Ordering::SeqCst);
        if !F::is_present(Pte(value)) || value & F::WRITABLE != F::WRITABLE {
            return false;
        }
        if value & F::DIRTY == F::DIRTY {
            events::record(Event::CpuTranslates { cpu, gfn, cell: std::ptr::from_ref(leaf).addr() as u64 });
            break;
        }
        if host.inner.log_modification(cpu as usize, gfn).is_err() {
            return true;
        }
        let dirty = value | F::ACCESSED | F::DIRTY;
        if leaf.compare_exchange(value, dirty, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            events::record(Event::CpuSetsDirty { cpu, gfn });
            break;
        }
    }
    for _ in 0..1 + random(2) {
        host.inner.step();
        events::record(Event::CpuWrites { cpu, gfn });
    }
    host.inner.step();
    true
}

/// Writes to a few of the pages. Reads some where it faults.
fn writer<F: Format>(vm: &TestVm<F>, index: usize) {
    let mut vcpu = vm.create_vcpu().unwrap();
    let (host, cpu) = (vm.host(), index as u64);
    for _ in 0..6 {
        let gfn = pick(&PAGES);
        let is_done = host.inner.during_access(index, || {
            let is_done = cpu_writes(vm, cpu, gfn);
            events::record(Event::CpuForgets { cpu, gfn });
            is_done
        });
        // Another CPU may have set D since: then the fault finds nothing to do.
        if !is_done {
            let access = pick(&[Access::Read, Access::Write]);
            let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), access).unwrap();
            assert_eq!(outcome, Outcome::Resume);
        }
    }
}

/// Some harvests come before logging has begun.
fn harvester<F: Format>(vm: &TestVm<F>) {
    for _ in 0..5 {
        let mut bitmap = [0];
        if random(3) != 0 {
            events::record(Event::HarvestBegins { masks: None });
            let _: Result<u64, _> = vm.get_dirty_log(0, &mut bitmap);
        } else {
            bitmap[0] = 1 + random(7);
            events::record(Event::HarvestBegins { masks: Some([bitmap[0], 0]) });
            let _: Result<u64, _> = vm.clear_dirty_log(0, 0, NR_PAGES, &bitmap);
        }
        events::record(Event::HarvestEnds);
    }
}

fn logger<F: Format>(vm: &TestVm<F>) {
    toggle_log(vm, NR_PAGES, || ());
}

/// Zaps single pages, so that no page-table page is unlinked.
fn zapper<F: Format>(vm: &TestVm<F>) {
    for _ in 0..3 {
        drop(vm.invalidate_range(GfnRange::new(Gfn(pick(&PAGES)), 1)).unwrap());
    }
}

fn dirty_bits<F: Format>(protocol: &'static str, tracking: DirtyTracking, zappers: &[fn(&TestVm<F>)]) {
    events::start();
    let config = log_config(tracking);
    let inner = ShuttleHost::new(NR_GUESTS, tracking);
    let host = MovingHost { inner, sees_zaps: !zappers.is_empty(), ..MovingHost::new(PageSize::Size4K) };
    let vm = new_vm::<F>(host, config, MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of(protocol, &vm);
    let mut bodies: Vec<fn(&TestVm<F>)> = vec![|vm| writer(vm, 0), |vm| writer(vm, 1), logger, harvester, harvester];
    bodies.extend(zappers);
    on_threads(&vm, bodies);
    save();
}

#[test]
fn dirty_bits_of_cpus() {
    check_less(100, || dirty_bits::<Tiny<2>>("dirty_bits", DirtyTracking::DirtyBit, &[]));
}

#[test]
fn modification_logs_of_cpus() {
    check_less(100, || dirty_bits::<Tiny<2>>("modification_logs", DirtyTracking::PageModificationLog, &[]));
}

#[test]
fn dirty_bits_beside_zaps() {
    check_less(100, || dirty_bits::<Tiny<2>>("harvest_beside_zap", DirtyTracking::DirtyBit, &[zapper, zapper]));
}
