//! Shadow paging: the cost of a page fault, the throughput of two vCPUs in one address space, and
//! the cost of a switch of CR3 that hits a cached root.
//!
//! `cargo bench -p slat --bench shadow`: medians of several rounds; one and two threads in turns,
//! since figures of two separate minutes cannot be compared on a shared machine.

#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/guest_memory.rs"]
mod guest_memory;

#[cfg(not(any(loom, shuttle)))]
mod bench {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::hint::black_box;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Barrier};
    use std::thread;
    use std::time::Instant;

    use slat::format::Npt;
    use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
    use slat::shadow::{GuestAccess, Gva, PagingRegisters, Privilege, ShadowPaging, ShadowStrategy};
    use slat::{
        Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegion, MemoryRegionFlags, Outcome, PageSize, Pfn, Vcpu,
        Vm,
    };

    use super::guest_memory::Memory;

    /// Pages that each vCPU faults on in a round.
    const PAGES_PER_VCPU: u64 = 16 << 10;
    const MAX_VCPUS: u64 = 2;
    /// Pages of guest memory: those, and the guest's page tables behind them.
    const NR_DATA: u64 = PAGES_PER_VCPU * MAX_VCPUS;
    const NR_FRAMES: u64 = NR_DATA + 1024;
    const SWITCHES: u64 = 1 << 20;

    /// `cargo test --bench` passes no `--bench`: then it only has to run (`ci/benches.sh`).
    fn nr_rounds() -> usize {
        if std::env::args().any(|argument| argument == "--bench") { 11 } else { 1 }
    }

    struct BenchHost(Memory);

    // SAFETY: the global allocator hands out each page-table page once; no CPU walks them.
    unsafe impl Host for BenchHost {
        type Backing = ();

        fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
            // SAFETY: a page-table page has a size.
            let table = unsafe { alloc_zeroed(layout) };
            (!table.is_null()).then(|| Hpa(table.expose_provenance() as u64))
        }

        unsafe fn free_table(&self, table: Hpa, layout: Layout) {
            // SAFETY: it came from `allocate_table`.
            unsafe { dealloc(self.table_ptr(table), layout) }
        }

        fn table_ptr(&self, table: Hpa) -> *mut u8 {
            std::ptr::with_exposed_provenance_mut(table.0 as usize)
        }

        fn resolve(&self, _: &(), _: Gfn, page: u64, _: Access) -> Result<Resolved, Unresolved> {
            Ok(Resolved::memory(Pfn((self.0.start() >> 12) + page), PageSize::Size4K))
        }

        fn guest_memory_ptr(&self, frame: Pfn) -> Option<*mut u8> {
            Some(self.table_ptr(frame.hpa()))
        }

        fn flush(&self, _: &[GfnRange]) {}

        fn yield_now(&self) {
            thread::yield_now();
        }

        fn timestamp_ns(&self) -> u64 {
            0
        }
    }

    struct World {
        vm: Arc<Vm<BenchHost, Npt>>,
        cr3: u64,
    }

    impl World {
        fn new(strategy: ShadowStrategy) -> World {
            let host = BenchHost(Memory::new(NR_FRAMES, 2 << 20));
            let shadow = ShadowPaging { strategy, ..ShadowPaging::default() };
            let vm = Arc::new(Vm::with_shadow_paging(host, Config::default(), shadow).unwrap());
            let region = MemoryRegion {
                slot: 0,
                flags: MemoryRegionFlags::empty(),
                guest_phys_addr: Gpa(0),
                memory_size: NR_FRAMES * 4096,
                backing: Some(()),
                userfault_bitmap: None,
            };
            vm.set_user_memory_region(region).unwrap();
            let world = World { vm, cr3: NR_DATA << 12 };
            world.build_tables();
            world
        }

        fn word(&self, gpa: u64) -> &AtomicU64 {
            let host = self.vm.host();
            // SAFETY: inside the memory, and aligned.
            unsafe { &*host.table_ptr(Hpa(host.0.start() + gpa)).cast::<AtomicU64>() }
        }

        /// The guest's page tables map all data pages at their own addresses. Behind them are those
        /// of a second process.
        fn build_tables(&self) {
            let mut next = NR_DATA + 1;
            for gfn in 0..NR_DATA {
                let mut table = NR_DATA;
                for level in (1..=4_u32).rev() {
                    let cell = self.word((table << 12) + (gfn >> (9 * (level - 1)) & 511) * 8);
                    let entry = cell.load(Ordering::Relaxed);
                    if level == 1 {
                        cell.store(gfn << 12 | 0x67, Ordering::Relaxed);
                    } else if entry == 0 {
                        cell.store(next << 12 | 0x27, Ordering::Relaxed);
                        table = next;
                        next += 1;
                    } else {
                        table = entry >> 12;
                    }
                }
            }
            assert!(next < NR_FRAMES);
        }

        fn vcpu(&self, cr3: u64) -> Vcpu<BenchHost, Npt> {
            let mut vcpu = self.vm.create_vcpu().unwrap();
            let registers =
                PagingRegisters { cr0: 1 << 31 | 1 << 16 | 1, cr3, cr4: 1 << 17 | 1 << 5, efer: 1 << 11 | 1 << 8 };
            assert_eq!(vcpu.set_paging_registers(registers), Ok(()));
            vcpu
        }

        /// Removes all shadow pages, and no data of the second stage.
        fn reset(&self) {
            drop(self.vm.invalidate_range(GfnRange::new(Gfn(NR_DATA), NR_FRAMES - NR_DATA)).unwrap());
        }

        /// Nanoseconds for a fault, of `nr_vcpus` vCPUs on as many threads, each in a part of the
        /// address space.
        fn faults(&self, vcpus: &mut [Vcpu<BenchHost, Npt>]) -> f64 {
            let barrier = Barrier::new(vcpus.len());
            let access = GuestAccess { access: Access::Write, privilege: Privilege::User };
            let spans: Vec<f64> = thread::scope(|scope| {
                let threads: Vec<_> = vcpus
                    .iter_mut()
                    .enumerate()
                    .map(|(nth, vcpu)| {
                        let barrier = &barrier;
                        scope.spawn(move || {
                            let first = nth as u64 * PAGES_PER_VCPU;
                            barrier.wait();
                            let start = Instant::now();
                            for page in first..first + PAGES_PER_VCPU {
                                let outcome = vcpu.handle_page_fault(Gva(page << 12), access);
                                assert_eq!(outcome, Ok(Outcome::Resume));
                                black_box(vcpu.entry().unwrap());
                            }
                            start.elapsed().as_nanos() as f64
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            let slowest = spans.into_iter().fold(0.0, f64::max);
            slowest / (PAGES_PER_VCPU as f64 * vcpus.len() as f64)
        }
    }

    fn median(mut values: Vec<f64>) -> f64 {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    fn faults() {
        let world = World::new(ShadowStrategy::RootCache);
        let mut vcpus = [world.vcpu(world.cr3), world.vcpu(world.cr3)];
        // The second stage maps everything from now on.
        for _ in 0..2 {
            world.reset();
            world.faults(&mut vcpus);
        }
        let mut one = Vec::new();
        let mut two = Vec::new();
        for _ in 0..nr_rounds() {
            world.reset();
            one.push(world.faults(&mut vcpus[..1]));
            world.reset();
            two.push(world.faults(&mut vcpus));
        }
        let gains = one.iter().zip(&two).map(|(one, two)| one / two).collect();
        println!("page fault, the second stage has the page: {:.0} ns with one vCPU", median(one));
        println!("two vCPUs in one address space: {:.2} times the throughput of one", median(gains));
        // Also the second stage is empty.
        let mut whole = Vec::new();
        for _ in 0..nr_rounds() {
            drop(world.vm.invalidate_range(GfnRange::new(Gfn(0), NR_FRAMES)).unwrap());
            whole.push(world.faults(&mut vcpus[..1]));
        }
        println!("page fault, the second stage has nothing: {:.0} ns", median(whole));
    }

    fn switches() {
        for strategy in [ShadowStrategy::RootCache, ShadowStrategy::PcidTagged] {
            let world = World::new(strategy);
            let mut vcpu = world.vcpu(world.cr3);
            let keep = 1 << 63;
            // As a kernel with page-table isolation: back and forth between two roots.
            let other = (NR_FRAMES - 1) << 12;
            let values = [world.cr3 | 1 | keep, other | 2 | keep];
            for value in values {
                assert_eq!(vcpu.load_cr3(value), Ok(Outcome::Resume));
                vcpu.entry().unwrap();
            }
            let mut all = Vec::new();
            for _ in 0..nr_rounds() {
                let start = Instant::now();
                for nth in 0..SWITCHES / 16 {
                    let outcome = vcpu.load_cr3(values[nth as usize % 2]);
                    assert_eq!(outcome, Ok(Outcome::Resume));
                    black_box(vcpu.entry().unwrap());
                }
                all.push(start.elapsed().as_nanos() as f64 / (SWITCHES / 16) as f64);
            }
            println!("CR3 switch that hits, {strategy:?}: {:.1} ns", median(all));
        }
    }

    pub(super) fn main() {
        switches();
        faults();
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    bench::main();
}
