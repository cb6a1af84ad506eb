//! The cost of mapping memory in advance: `map_range` of 4 KiB and 2 MiB leaves, of single pages,
//! `protect_range`, `translate` and `unmap_range`, on one thread and on two, on a minimal host.
//!
//! Each measurement has a fresh VM with one pinned memslot. Page-table pages come from an arena that
//! was touched beforehand; the figures contain their allocation. Two threads have a half each.
//!
//! `cargo bench -p slat --bench pinned -- table` prints it, `-- table 31` with 31 rounds. `-- count
//! NAME` runs the measured calls of that line once, for tools that count instructions: `valgrind
//! --tool=callgrind --toggle-collect='*measured*'`.

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
mod pinned {
    use std::sync::{Arc, Barrier};
    use std::time::Instant;

    use slat::format::{LeafAttributes, Npt};
    use slat::host::Resolved;
    use slat::tables::{Mapping, Protection};
    use slat::{Config, Gfn, GfnRange, Gpa, MemoryRegion, MemoryRegionFlags, PageSize, Pfn, Vm};

    use super::arena::Memory;
    use super::bench_host::{Answer, BenchHost};

    const DEFAULT_ROUNDS: usize = 15;
    const GIB_PAGES: u64 = 1 << 18;

    /// A pinned memslot asks for no frame.
    struct Nothing;

    impl Answer for Nothing {
        fn resolved(&self, gfn: Gfn, _page: u64) -> Resolved {
            Resolved::memory(Pfn(gfn.0), PageSize::Size4K)
        }
    }

    type BenchVm = Vm<BenchHost<Nothing>, Npt>;

    #[derive(Clone, Copy, PartialEq)]
    enum Call {
        Map,
        Unmap,
        Protect,
        Translate,
    }

    /// A line of the table.
    struct Row {
        name: &'static str,
        call: Call,
        leaf: PageSize,
        /// Pages of a call; of several for `Map` and `Unmap` of one page: each by a call.
        call_pages: u64,
        /// Pages of all calls.
        nr_pages: u64,
    }

    const ROWS: [Row; 9] = [
        Row {
            name: "map-4K-range",
            call: Call::Map,
            leaf: PageSize::Size4K,
            call_pages: GIB_PAGES / 2,
            nr_pages: GIB_PAGES,
        },
        Row {
            name: "map-2M-range",
            call: Call::Map,
            leaf: PageSize::Size2M,
            call_pages: 512 * GIB_PAGES,
            nr_pages: 1024 * GIB_PAGES,
        },
        Row { name: "map-one", call: Call::Map, leaf: PageSize::Size4K, call_pages: 1, nr_pages: GIB_PAGES },
        Row {
            name: "unmap-4K-range",
            call: Call::Unmap,
            leaf: PageSize::Size4K,
            call_pages: GIB_PAGES / 2,
            nr_pages: GIB_PAGES,
        },
        Row {
            name: "unmap-2M-range",
            call: Call::Unmap,
            leaf: PageSize::Size2M,
            call_pages: 512 * GIB_PAGES,
            nr_pages: 1024 * GIB_PAGES,
        },
        Row { name: "unmap-one", call: Call::Unmap, leaf: PageSize::Size4K, call_pages: 1, nr_pages: GIB_PAGES },
        Row {
            name: "protect-4K-range",
            call: Call::Protect,
            leaf: PageSize::Size4K,
            call_pages: GIB_PAGES / 2,
            nr_pages: GIB_PAGES,
        },
        Row { name: "protect-one", call: Call::Protect, leaf: PageSize::Size4K, call_pages: 1, nr_pages: GIB_PAGES },
        Row { name: "translate", call: Call::Translate, leaf: PageSize::Size4K, call_pages: 1, nr_pages: GIB_PAGES },
    ];

    const READ_WRITE: Protection = Protection { writable: true, attributes: LeafAttributes::DATA };
    const READ_ONLY: Protection = Protection { writable: false, ..READ_WRITE };

    impl Row {
        fn nr_leaves(&self) -> u64 {
            if self.leaf == PageSize::Size2M { self.nr_pages / 512 } else { self.nr_pages }
        }

        fn mapping(&self, first: u64, nr_pages: u64) -> Mapping {
            let range = GfnRange::new(Gfn(first), nr_pages);
            Mapping { range, pfn: Pfn(first % (1 << 36)), protection: READ_WRITE, largest: self.leaf }
        }

        /// The calls for `pages`, which begin at `first`.
        #[inline(never)]
        fn measured(&self, vm: &BenchVm, first: u64, nr_pages: u64) {
            let mut page = first;
            while page < first + nr_pages {
                let call_pages = self.call_pages.min(first + nr_pages - page);
                let range = GfnRange::new(Gfn(page), call_pages);
                match self.call {
                    Call::Map => vm.map_range(&self.mapping(page, call_pages)).expect("it is free"),
                    Call::Unmap => assert_eq!(vm.unmap_range(range), Ok(call_pages)),
                    Call::Protect => assert_eq!(vm.protect_range(range, &READ_ONLY), Ok(call_pages)),
                    Call::Translate => {
                        let found = vm.translate(Gfn(page).gpa()).expect("memory for a guard");
                        assert!(found.is_some());
                    }
                }
                page += call_pages;
            }
        }

        /// A VM in which the calls can be made.
        fn prepared(&self, memory: Memory) -> Arc<BenchVm> {
            memory.reset();
            let vm = Arc::new(Vm::new(BenchHost::new(memory), Config::default()).expect("memory for a VM"));
            let region = MemoryRegion {
                slot: 0,
                flags: MemoryRegionFlags::PINNED,
                guest_phys_addr: Gpa(0),
                memory_size: self.nr_pages << 12,
                backing: Some(Nothing),
                userfault_bitmap: None,
            };
            vm.set_user_memory_region(region).expect("a memslot");
            if self.call != Call::Map {
                vm.map_range(&self.mapping(0, self.nr_pages)).expect("it is free");
            }
            vm
        }

        /// Nanoseconds a leaf, by `nr_threads` threads.
        fn measure(&self, memory: Memory, nr_threads: u64) -> f64 {
            let vm = self.prepared(memory);
            let part = self.nr_pages / nr_threads;
            let barrier = Barrier::new(nr_threads as usize);
            let elapsed = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..nr_threads)
                    .map(|thread| {
                        let (vm, barrier) = (&vm, &barrier);
                        scope.spawn(move || {
                            barrier.wait();
                            let start = Instant::now();
                            self.measured(vm, thread * part, part);
                            start.elapsed()
                        })
                    })
                    .collect();
                let times = threads.into_iter().map(|thread| thread.join().expect("the calls succeed"));
                times.max().expect("a thread")
            });
            elapsed.as_nanos() as f64 / self.nr_leaves() as f64
        }
    }

    fn quartile(values: &mut [f64], quarter: usize) -> f64 {
        values.sort_by(f64::total_cmp);
        values[(values.len() - 1) * quarter / 4]
    }

    fn table(memory: Memory, nr_rounds: usize) {
        println!("ns a leaf, {nr_rounds} rounds: quartiles on one thread, median on two");
        for row in &ROWS {
            let (mut one_ns, mut two_ns) = (Vec::new(), Vec::new());
            for round in 0..2 * nr_rounds {
                match round % 2 {
                    0 => one_ns.push(row.measure(memory, 1)),
                    _ => two_ns.push(row.measure(memory, 2)),
                }
            }
            let [low, median, high] = [1, 2, 3].map(|quarter| quartile(&mut one_ns, quarter));
            println!("{:<18} {low:>8.2} {median:>8.2} {high:>8.2} {:>8.2}", row.name, quartile(&mut two_ns, 2));
        }
    }

    pub(super) fn main() {
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
        let memory = Memory::new(16 << 10);
        match arguments.first().map(String::as_str) {
            Some("count") => {
                let name = arguments.get(1).expect("the name of a line");
                let row = ROWS.iter().find(|row| row.name == *name).expect("a line of this name");
                row.measured(&row.prepared(memory), 0, row.nr_pages);
                println!("{}", row.nr_leaves());
            }
            Some("table") => {
                let nr_rounds = arguments.get(1).map_or(DEFAULT_ROUNDS, |count| count.parse().expect("a number"));
                table(memory, nr_rounds);
            }
            // It only has to run (`ci/benches.sh`).
            _ => table(memory, 1),
        }
    }
}

fn main() {
    #[cfg(not(any(loom, shuttle)))]
    pinned::main();
}
