//! The engine's cost of a harvest, and how it scales with threads. The memslot has 16 GiB. The host
//! is minimal, so that the figures contain neither a system call nor a flush (`slat dirty-log`
//! has those).
//!
//! In each round a vCPU's faults dirty the same share of the memslot twice. Its log is harvested
//! once by one thread, and once by two threads, each its half. Rounds of all cells take turns, and
//! one thread and two come first in turn. `speed` is the time of one thread over the time of two,
//! within the round; the time of two ends when both have finished. The CPU time of a virtual
//! machine varies: compare the quartiles too.
//!
//! `cargo bench -p slat --bench harvest -- table` prints it, `-- table 31` with 31 rounds.

#[cfg(not(any(loom, shuttle)))]
#[path = "fault/arena.rs"]
mod arena;
#[cfg(not(any(loom, shuttle)))]
#[path = "fault/bench_host.rs"]
mod bench_host;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/futex_park.rs"]
mod futex_park;
#[cfg(not(any(loom, shuttle)))]
#[path = "../tests/support/membarrier.rs"]
mod membarrier;

#[cfg(not(any(loom, shuttle)))]
use slat::baselines::Park;

#[cfg(not(any(loom, shuttle)))]
mod harvest {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Barrier};
    use std::thread;
    use std::time::Instant;

    use slat::dirty::DirtyTracking;
    use slat::format::Npt;
    use slat::host::Resolved;
    use slat::{
        Access, Config, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vcpu, Vm,
    };

    use super::arena::Memory;
    use super::bench_host::{Answer, BenchHost};

    /// Pages of the memslot: 16 GiB.
    const NR_PAGES: u64 = 4 << 20;
    const DEFAULT_ROUNDS: usize = 9;

    struct Frames;

    impl Answer for Frames {
        fn resolved(&self, gfn: Gfn, _page: u64) -> Resolved {
            Resolved::memory(Pfn((1 << 24) + gfn.0), PageSize::Size4K)
        }
    }

    type BenchVm = Vm<BenchHost<Frames>, Npt>;

    /// A way to protect pages, and the distance between dirty pages.
    struct Cell {
        protection: DirtyTracking,
        step: u64,
        one_ns: Vec<u64>,
        two_ns: Vec<u64>,
    }

    fn dirty(vcpu: &mut Vcpu<BenchHost<Frames>, Npt>, step: u64) {
        for page in (0..NR_PAGES).step_by(step as usize) {
            assert_eq!(vcpu.handle_fault(Gfn(page).gpa(), Access::Write), Ok(Outcome::Resume));
        }
    }

    /// The time until all of `nr_threads` have harvested their part of the log.
    fn harvest(vm: &BenchVm, bitmap: &mut [u64], nr_threads: usize, expected: u64) -> u64 {
        let nr_words = bitmap.len() / nr_threads;
        let (start, nr_harvested, last_ns) = (Barrier::new(nr_threads), AtomicU64::new(0), AtomicU64::new(0));
        thread::scope(|scope| {
            for (index, part) in bitmap.chunks_mut(nr_words).enumerate() {
                let (start, nr_harvested, last_ns) = (&start, &nr_harvested, &last_ns);
                scope.spawn(move || {
                    let nr_pages = part.len() as u64 * 64;
                    start.wait();
                    let begin = Instant::now();
                    let nr_part = vm.get_dirty_log_range(0, index as u64 * nr_pages, nr_pages, part).unwrap();
                    last_ns.fetch_max(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
                    nr_harvested.fetch_add(nr_part, Ordering::Relaxed);
                });
            }
        });
        assert_eq!(nr_harvested.into_inner(), expected);
        last_ns.into_inner()
    }

    fn quartile(values: &[f64], quarter: usize) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[(sorted.len() - 1) * quarter / 4]
    }

    pub(super) fn main() {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
        // Without `table` it only has to run (`ci/benches.sh`).
        let is_test = arguments.first().is_none_or(|kind| kind != "table");
        let nr_rounds = match arguments.get(1) {
            _ if is_test => 1,
            Some(count) => count.parse().expect("a number of rounds"),
            None => DEFAULT_ROUNDS,
        };
        let memory = Memory::new((NR_PAGES / 512 + 64) as usize);
        let steps = [1, 16, 64, 1024];
        let protections = [DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves];
        println!(
            "A slot of 16 GiB, get_dirty_log: ms by one thread and by two, medians of {nr_rounds} rounds; speed: quartiles."
        );
        println!("{:>14} {:>12} {:>9} {:>9} {:>20}", "protection", "dirty", "one", "two", "speed");
        for protection in protections {
            let config = Config::default().with_dirty_tracking(protection);
            let vm: Arc<BenchVm> = Arc::new(Vm::new(BenchHost::new(memory), config).unwrap());
            vm.set_user_memory_region(MemoryRegion {
                slot: 0,
                flags: MemoryRegionFlags::LOG_DIRTY_PAGES,
                guest_phys_addr: Gpa(0),
                memory_size: NR_PAGES * PAGE_SIZE,
                backing: Some(Frames),
                userfault_bitmap: None,
            })
            .unwrap();
            let mut vcpu = vm.create_vcpu().unwrap();
            let mut bitmap = vec![0; (NR_PAGES / 64) as usize];
            dirty(&mut vcpu, 1);
            harvest(&vm, &mut bitmap, 1, NR_PAGES);
            let mut cells = steps.map(|step| Cell { protection, step, one_ns: Vec::new(), two_ns: Vec::new() });
            for round in 0..nr_rounds {
                for cell in &mut cells {
                    for turn in 0..2 {
                        dirty(&mut vcpu, cell.step);
                        let expected = NR_PAGES / cell.step;
                        match (round + turn) % 2 {
                            0 => cell.one_ns.push(harvest(&vm, &mut bitmap, 1, expected)),
                            _ => cell.two_ns.push(harvest(&vm, &mut bitmap, 2, expected)),
                        }
                    }
                }
            }
            cells.iter().for_each(print);
            drop((vcpu, vm));
            memory.reset();
        }
    }

    fn print(cell: &Cell) {
        let ms = |times: &[u64]| quartile(&times.iter().map(|&ns| ns as f64 / 1e6).collect::<Vec<_>>(), 2);
        let speeds: Vec<f64> =
            cell.one_ns.iter().zip(&cell.two_ns).map(|(&one, &two)| one as f64 / two as f64).collect();
        println!(
            "{:>14} {:>12} {:>9.3} {:>9.3} {:>6.2} {:>6.2} {:>6.2}",
            format!("{:?}", cell.protection),
            format!("1 in {}", cell.step),
            ms(&cell.one_ns),
            ms(&cell.two_ns),
            quartile(&speeds, 1),
            quartile(&speeds, 2),
            quartile(&speeds, 3),
        );
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    harvest::main();
}
