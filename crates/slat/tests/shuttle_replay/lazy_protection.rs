//! Schedules of lazy protection: directory entries are protected, and writers push them down.
//! CPUs cache directory entries.

use super::*;

/// Pages of two blocks.
const PAGES: [u64; 4] = [0, 1, 2, BLOCK];

/// A CPU writes to a few pages of one block, by way of a directory entry that it has cached.
/// `Err` is the page of a fault.
fn cpu_writes<F: Format>(vm: &TestVm<F>, cpu: u64, pages: &[u64]) -> Result<(), u64> {
    let host = vm.host();
    // SAFETY: the root.
    let above = Pte(unsafe { pte_of(vm, vm.root(), F::ROOT_LEVEL, pages[0]) }.load(Ordering::SeqCst));
    if !F::is_present(above) || above.0 & F::WRITABLE != F::WRITABLE {
        return Err(pages[0]);
    }
    events::record(Event::CpuCaches { cpu, gfn: pages[0] });
    for &gfn in pages {
        // SAFETY: the directory entry points to it: no page is huge here.
        let leaf = unsafe { pte_of(vm, F::address(above, F::ROOT_LEVEL), Level::L4K, gfn) };
        let value = Pte(leaf.load(Ordering::SeqCst));
        if !F::is_present(value) || value.0 & F::WRITABLE != F::WRITABLE {
            return Err(gfn);
        }
        events::record(Event::CpuTranslates { cpu, gfn, cell: std::ptr::from_ref(leaf).addr() as u64 });
        host.inner.step();
        events::record(Event::CpuWrites { cpu, gfn });
        host.inner.step();
    }
    Ok(())
}

/// Writes to a few of the pages, two at a time. Reads some where it faults.
fn writer<F: Format>(vm: &TestVm<F>, index: usize) {
    let mut vcpu = vm.create_vcpu().unwrap();
    let (host, cpu) = (vm.host(), index as u64);
    for _ in 0..4 {
        let first = pick(&PAGES);
        let other = if first == BLOCK { BLOCK } else { pick(&PAGES[..3]) };
        for _ in 0..3 {
            let result = host.inner.during_access(index, || {
                let result = cpu_writes(vm, cpu, &[first, other]);
                events::record(Event::CpuForgets { cpu, gfn: first });
                result
            });
            let Err(gfn) = result else { break };
            let access = pick(&[Access::Read, Access::Write, Access::Write]);
            let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), access).unwrap();
            assert_eq!(outcome, Outcome::Resume);
        }
    }
}

fn logger<F: Format>(vm: &TestVm<F>) {
    toggle_log(vm, NR_PAGES, || ());
}

/// Some harvests come before logging has begun.
fn harvesters<F: Format>(vm: &TestVm<F>) {
    (0..3).for_each(|_| harvester(vm));
}

/// Zaps a block, or a page of it.
fn zapper<F: Format>(vm: &TestVm<F>) {
    let nr_pages = pick(&[1, BLOCK]);
    drop(vm.invalidate_range(GfnRange::new(Gfn(random(2) * BLOCK), nr_pages)).unwrap());
}

fn lazy_protection<F: Format>() {
    events::start();
    let config = log_config(DirtyTracking::WriteProtect);
    let vm = new_vm::<F>(MovingHost::new(PageSize::Size4K), config, MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of("lazy_protection", &vm);
    let bodies: [fn(&TestVm<F>); 6] = [|vm| writer(vm, 0), |vm| writer(vm, 1), logger, harvesters, harvesters, zapper];
    on_threads(&vm, bodies);
    save();
}

#[test]
fn lazy_protections() {
    check_less(100, lazy_protection::<Tiny<2>>);
}
