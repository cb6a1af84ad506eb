//! The kinds of prefaults, and their times.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use slat::dirty::HugePageLogging;
use slat::format::Npt;
use slat::host::Resolved;
use slat::{Access, Config, Gfn, Gpa, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vcpu, Vm};

use super::arena::Memory;
use super::bench_host::{Answer, BenchHost};
use super::cpus;

/// Pages of the memslot where leaves are small: 1 GiB.
pub(crate) const SMALL_PAGES: u64 = 1 << 18;
/// Pages of the memslot where they are of 2 MiB: 256 GiB.
const HUGE_PAGES: u64 = 1 << 26;
/// More page-table pages than any cell needs.
pub(crate) const MAX_TABLES: usize = 1024;

/// How the frames of the memslot are aligned, and what the host answers for them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Frames {
    /// Contiguous, shifted by a page against the guest's pages, so that only small leaves fit.
    SmallContiguous,
    /// The host answers for each page alone.
    SmallSingle,
    /// Contiguous, shifted by 2 MiB.
    HugeContiguous,
    /// The host answers for each 2 MiB alone.
    HugeSingle,
}

impl Frames {
    const ALL: [(Frames, &'static str); 4] = [
        (Frames::SmallContiguous, "4K-contiguous"),
        (Frames::SmallSingle, "4K-single"),
        (Frames::HugeContiguous, "2M-contiguous"),
        (Frames::HugeSingle, "2M-single"),
    ];

    pub(crate) fn name(self) -> &'static str {
        Frames::ALL.iter().find(|(frames, _)| *frames == self).map_or("", |&(_, name)| name)
    }

    fn is_huge(self) -> bool {
        matches!(self, Frames::HugeContiguous | Frames::HugeSingle)
    }
}

impl Answer for Frames {
    #[inline]
    fn resolved(&self, gfn: Gfn, _page: u64) -> Resolved {
        let (offset, max_size) = match self {
            Frames::SmallContiguous => (1, PageSize::Size1G),
            Frames::SmallSingle => (1, PageSize::Size4K),
            Frames::HugeContiguous => (512, PageSize::Size1G),
            Frames::HugeSingle => (512, PageSize::Size2M),
        };
        Resolved::memory(Pfn((1 << 24) + offset + gfn.0), max_size)
    }
}

/// What was mapped before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Before {
    Nothing,
    /// One page in each 2 MiB, and so the page-table pages.
    Tables,
    /// All of it.
    All,
}

/// The call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// `pre_fault_memory`, all at once.
    Range,
    /// `pre_fault_pages`, 64 pages a call.
    List,
}

/// One line of the table.
pub(crate) struct Cell {
    way: Way,
    frames: Frames,
    before: Before,
    access: Access,
    flags: MemoryRegionFlags,
}

const fn cell(frames: Frames, before: Before, access: Access, flags: MemoryRegionFlags) -> Cell {
    Cell { way: Way::Range, frames, before, access, flags }
}

const fn list(frames: Frames, before: Before, access: Access, flags: MemoryRegionFlags) -> Cell {
    Cell { way: Way::List, frames, before, access, flags }
}

const LOG: MemoryRegionFlags = MemoryRegionFlags::LOG_DIRTY_PAGES;
const NO_FLAGS: MemoryRegionFlags = MemoryRegionFlags::empty();

/// All lines.
pub(crate) const CELLS: &[Cell] = &[
    cell(Frames::SmallContiguous, Before::Nothing, Access::Read, NO_FLAGS),
    cell(Frames::SmallContiguous, Before::Nothing, Access::Write, NO_FLAGS),
    cell(Frames::SmallContiguous, Before::Nothing, Access::Read, LOG),
    cell(Frames::SmallContiguous, Before::Nothing, Access::Write, LOG),
    cell(Frames::SmallSingle, Before::Nothing, Access::Read, NO_FLAGS),
    cell(Frames::SmallSingle, Before::Nothing, Access::Write, LOG),
    cell(Frames::SmallContiguous, Before::Tables, Access::Read, NO_FLAGS),
    cell(Frames::SmallContiguous, Before::Tables, Access::Write, LOG),
    cell(Frames::SmallContiguous, Before::All, Access::Read, NO_FLAGS),
    list(Frames::SmallContiguous, Before::Tables, Access::Read, NO_FLAGS),
    list(Frames::SmallSingle, Before::Tables, Access::Read, NO_FLAGS),
    cell(Frames::HugeContiguous, Before::Nothing, Access::Read, NO_FLAGS),
    cell(Frames::HugeContiguous, Before::Nothing, Access::Write, NO_FLAGS),
    cell(Frames::HugeContiguous, Before::Nothing, Access::Read, LOG),
    cell(Frames::HugeContiguous, Before::Nothing, Access::Write, LOG),
    cell(Frames::HugeSingle, Before::Nothing, Access::Read, NO_FLAGS),
];

type BenchVm = Vm<BenchHost<Frames>, Npt>;

/// The measured calls: `nr_pages` from `first` on.
#[inline(never)]
fn pre_fault_part(vcpu: &mut Vcpu<BenchHost<Frames>, Npt>, way: Way, first: u64, nr_pages: u64, access: Access) {
    match way {
        Way::Range => {
            let size_bytes = nr_pages * PAGE_SIZE;
            assert_eq!(vcpu.pre_fault_memory(Gfn(first).gpa(), size_bytes, access), Ok(size_bytes));
        }
        Way::List => {
            for start in (first..first + nr_pages).step_by(64) {
                let list: [Gpa; 64] = std::array::from_fn(|index| Gfn(start + index as u64).gpa());
                assert_eq!(vcpu.pre_fault_pages(&list, access), Ok(list.len()));
            }
        }
    }
}

impl Cell {
    pub(crate) fn name(&self) -> String {
        let before = match self.before {
            Before::Nothing => "",
            Before::Tables => ", tables there",
            Before::All => ", all there",
        };
        let logs = if self.flags == LOG { ", logs" } else { "" };
        let way = if self.way == Way::List { ", as lists" } else { "" };
        format!("{} {:?}{logs}{before}{way}", self.frames.name(), self.access)
    }

    fn nr_pages(&self) -> u64 {
        if self.frames.is_huge() { HUGE_PAGES } else { SMALL_PAGES }
    }

    pub(crate) fn nr_leaves(&self) -> u64 {
        self.nr_pages() / if self.frames.is_huge() { 512 } else { 1 }
    }

    /// Maps all by `nr_threads` threads. Returns nanoseconds per leaf.
    pub(crate) fn measure(&self, memory: Memory, nr_threads: u64) -> f64 {
        // So that a write in a memslot that logs has leaves of 2 MiB, too.
        let config = Config::default().with_huge_page_logging(HugePageLogging::MarkWhole);
        let vm: Arc<BenchVm> = Arc::new(Vm::new(BenchHost::new(memory), config).unwrap());
        let nr_pages = self.nr_pages();
        vm.set_user_memory_region(MemoryRegion {
            slot: 0,
            flags: self.flags,
            guest_phys_addr: Gpa(0),
            memory_size: nr_pages * PAGE_SIZE,
            backing: Some(self.frames),
            userfault_bitmap: None,
        })
        .unwrap();
        let mut first = vm.create_vcpu().unwrap();
        match self.before {
            Before::Nothing => {}
            Before::Tables => {
                for page in (0..nr_pages).step_by(512) {
                    assert_eq!(first.handle_fault(Gfn(page + 17).gpa(), Access::Write), Ok(Outcome::Resume));
                }
            }
            Before::All => pre_fault_part(&mut first, Way::Range, 0, nr_pages, self.access),
        }
        let wall = self.run(&vm, nr_threads);
        let stats = vm.stats();
        let mapped = if self.frames.is_huge() { stats.pages_2m() } else { stats.pages_4k() };
        assert_eq!(mapped, self.nr_leaves());
        drop((first, vm));
        // Checks that all page-table pages were freed.
        memory.reset();
        wall.as_nanos() as f64 / self.nr_leaves() as f64
    }

    /// From the start of the first thread to the end of the last.
    fn run(&self, vm: &Arc<BenchVm>, nr_threads: u64) -> Duration {
        let cpus = cpus::cpus();
        let arrived = AtomicUsize::new(0);
        let part = self.nr_pages() / nr_threads;
        let times: Vec<(Instant, Instant)> = thread::scope(|scope| {
            let spawn = |index: u64| {
                let (cpus, arrived) = (&cpus, &arrived);
                scope.spawn(move || {
                    if nr_threads as usize <= cpus.len() {
                        cpus::pin(cpus[index as usize]);
                    }
                    let mut vcpu = vm.create_vcpu().unwrap();
                    arrived.fetch_add(1, Ordering::AcqRel);
                    // At the same microsecond; the other thread may need this CPU to arrive.
                    let mut turns = 0;
                    while arrived.load(Ordering::Acquire) < nr_threads as usize {
                        turns += 1;
                        if turns < 20_000 { std::hint::spin_loop() } else { thread::yield_now() }
                    }
                    let begin = Instant::now();
                    pre_fault_part(&mut vcpu, self.way, index * part, part, self.access);
                    (begin, Instant::now())
                })
            };
            let threads: Vec<_> = (0..nr_threads).map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let begin = times.iter().map(|&(begin, _)| begin).min().unwrap();
        let end = times.iter().map(|&(_, end)| end).max().unwrap();
        end - begin
    }
}
