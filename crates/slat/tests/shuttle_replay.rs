//! Records the protocol steps of the engine in many schedules, for the proofs: `ci/replay.sh` replays
//! them in the models (`models/proofs/replay.py`), where each must be an allowed step.
//!
//! `REPLAY_TO=FILE` says where the steps go: to `FILE.PROTOCOL`. Without it the schedules run all the same.
#![cfg(shuttle)]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "implements the host's contract by another host")]

#[path = "support/schedules.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod schedules;
#[path = "support/stepped_world.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod world;

use std::alloc::Layout;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use schedules::{check_less, pick, random};
use shuttle::thread;
use slat::baselines::AtomicU64;
use slat::dirty::DirtyTracking;
use slat::events::{self, Event, PteKind};
use slat::format::Format;
use slat::host::{AllocationWait, Gone, Resolved, TableNode};
use slat::{Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn, Vm};
use world::{Backing, ShuttleHost, Tiny, backing, find, region};

/// Schedules of each kind. Each has some hundred steps.
const SCHEDULES: usize = 150;
const NR_GUESTS: usize = 2;
/// Every block of 2 MiB uses its frames 0 to 3 only (see `Tiny`).
const BLOCK: u64 = 512;
const NR_PAGES: u64 = 2 * BLOCK;
const USED: [u64; 8] = [0, 1, 2, 3, BLOCK, BLOCK + 1, BLOCK + 2, BLOCK + 3];

/// A host that moves pages: each page has as many places as it was moved.
struct MovingHost {
    inner: ShuttleHost,
    max_size: PageSize,
    /// Of each used page how often it was moved; of each block if pages are huge.
    nr_moves: [AtomicU64; USED.len()],
}

impl MovingHost {
    fn new(max_size: PageSize) -> MovingHost {
        let inner = ShuttleHost::new(NR_GUESTS, Config::default().dirty_tracking);
        MovingHost { inner, max_size, nr_moves: Default::default() }
    }

    /// The number of moves that concern a page.
    fn moves(&self, gfn: u64) -> &AtomicU64 {
        let page = if self.max_size == PageSize::Size4K { gfn % BLOCK % 4 } else { 0 };
        &self.nr_moves[(gfn / BLOCK * 4 + page) as usize]
    }

    /// Where a page is after `nr_moves`.
    fn place(gfn: u64, nr_moves: u64) -> Pfn {
        Pfn(gfn + (nr_moves + 1) * 16 * BLOCK)
    }
}

// SAFETY: `ShuttleHost` keeps the contract. A page moves only inside of an invalidation.
unsafe impl Host for MovingHost {
    type Backing = Backing;

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        self.inner.allocate_table(layout, node, wait)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.inner.free_table(table, layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.inner.table_ptr(table)
    }

    fn resolve(&self, _: &Backing, gfn: Gfn, _: u64, access: Access) -> Result<Resolved, Gone> {
        let pfn = MovingHost::place(gfn.0, self.moves(gfn.0).load(Ordering::SeqCst));
        let writable = access == Access::Write || random(2) == 0;
        events::record(Event::HostAnswers { gfn: gfn.0, pfn: pfn.0, is_writable: writable.into() });
        Ok(Resolved { pfn, max_size: self.max_size, writable })
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.inner.flush(ranges);
    }

    fn yield_now(&self) {
        self.inner.yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }
}

type TestVm<F> = Arc<Vm<MovingHost, F>>;

/// Accesses a few of the pages.
fn guest<F: Format>(vm: &TestVm<F>, index: usize, pages: [u64; 2]) {
    let mut vcpu = vm.create_vcpu().unwrap();
    let host = vm.host();
    for _ in 0..3 {
        let (gfn, access) = (pick(&pages), pick(&[Access::Read, Access::Write]));
        let is_done = host.inner.during_access(index, || {
            let found = find(vm, gfn).filter(|found| access != Access::Write || found.writable);
            if let Some(found) = &found {
                events::record(Event::CpuTranslates { cpu: index as u64, gfn, cell: found.address() });
            }
            host.inner.step();
            found.is_some()
        });
        if !is_done {
            let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), access).unwrap();
            assert_eq!(outcome, Outcome::Resume);
        }
    }
}

/// Moves pages, a page, a part of a block or a block at a time.
fn mover<F: Format>(vm: &TestVm<F>) {
    let host = vm.host();
    for _ in 0..1 + random(2) {
        let is_huge = host.max_size != PageSize::Size4K;
        let block = GfnRange::new(Gfn(random(2) * BLOCK), BLOCK);
        let parts = [block, GfnRange::new(Gfn(block.start.0 + random(3)), 1), GfnRange::new(block.start, 2)];
        // Of a huge page a part may be invalidated. It moves as a whole.
        let range = pick(&parts);
        let invalidation = vm.invalidate_range(range).unwrap();
        let moved: Vec<u64> = USED.into_iter().filter(|&gfn| range.contains(Gfn(gfn))).collect();
        if !is_huge || range == block {
            for &gfn in &moved {
                if is_huge && gfn != block.start.0 {
                    continue;
                }
                let nr_moves = host.moves(gfn).fetch_add(1, Ordering::SeqCst) + 1;
                let of_it = moved.iter().filter(|&&it| it == gfn || is_huge);
                of_it.for_each(|&it| {
                    events::record(Event::HostChanges { gfn: it, pfn: MovingHost::place(it, nr_moves).0 });
                });
            }
        }
        drop(invalidation);
    }
}

/// Splits the block from `first` on and makes it huge again.
fn collapser<F: Format>(vm: &TestVm<F>, first: u64) {
    let block = GfnRange::new(Gfn(first), BLOCK);
    for _ in 0..2 {
        vm.split_range(block, PageSize::Size4K).unwrap();
        vm.recover_range(block).unwrap();
    }
}

fn invalidations<F: Format>() {
    events::start();
    let max_size = pick(&[PageSize::Size4K, PageSize::Size2M]);
    let vm: TestVm<F> = Arc::new(Vm::new(MovingHost::new(max_size), Config::default()).unwrap());
    let memory = region(0, MemoryRegionFlags::empty(), 0, NR_PAGES, Some(backing(0, max_size)));
    vm.set_user_memory_region(memory).unwrap();
    let first = pick(&[0, BLOCK]);
    let mut threads = Vec::new();
    let mut spawn = |body: Box<dyn FnOnce(&TestVm<F>) + Send>| {
        let vm = Arc::clone(&vm);
        threads.push(thread::spawn(move || body(&vm)));
    };
    for index in 0..NR_GUESTS {
        spawn(Box::new(move |vm| guest(vm, index, [first + index as u64, first + 1])));
    }
    spawn(Box::new(mover));
    if max_size == PageSize::Size4K {
        spawn(Box::new(mover));
    } else {
        spawn(Box::new(move |vm| collapser(vm, first)));
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    save::<F>("invalidation", vm.host().table_ptr(vm.root()).addr() as u64);
}

/// Appends the steps to the file of the protocol: a line each, `THREAD STEP NUMBERS`.
fn save<F: Format>(protocol: &str, root: u64) {
    let events = events::finish();
    let Ok(path) = std::env::var("REPLAY_TO") else { return };
    let mut text = format!("schedule {root} {}\n", F::ROOT_LEVEL.0);
    for (thread, event) in events {
        let (name, numbers) = line::<F>(event);
        write!(text, "{thread} {name}").unwrap();
        numbers.iter().for_each(|number| write!(text, " {number}").unwrap());
        text.push('\n');
    }
    let path = format!("{path}.{protocol}");
    OpenOptions::new().create(true).append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

fn line<F: Format>(event: Event) -> (&'static str, Vec<u64>) {
    match event {
        Event::FaultLooks { gfn } => ("fault-looks", vec![gfn]),
        Event::HostAnswers { gfn, pfn, is_writable } => ("host-answers", vec![gfn, pfn, is_writable.into()]),
        Event::HostChanges { gfn, pfn } => ("host-changes", vec![gfn, pfn]),
        Event::CpuTranslates { cpu, gfn, cell } => ("cpu-translates", vec![cpu, gfn, cell]),
        Event::PteRead { cell, level, value } => {
            ("pte-read", [vec![cell, level.into()], kind::<F>(value, level)].concat())
        }
        Event::PteReplaced { cell, level, old, new } => {
            ("pte-replaced", [vec![cell, level.into()], kind::<F>(old, level), kind::<F>(new, level)].concat())
        }
        Event::PteFrozen { cell } => ("pte-frozen", vec![cell]),
        // The level is not known yet.
        Event::PteMade { cell, value } => ("pte-made", [vec![cell], kind::<F>(value, 1), kind::<F>(value, 2)].concat()),
        Event::NumberTaken { number } => ("number-taken", vec![number / 2]),
        Event::NumberRead { number } => ("number-read", vec![number / 2]),
        Event::Published { place, start, end } => ("published", vec![place, start, end]),
        Event::Withdrawn { place } => ("withdrawn", vec![place]),
        Event::RangesRead { gfn } => ("ranges-read", vec![gfn]),
        Event::RangesFound { gfn, level } => ("ranges-found", vec![gfn, level.into()]),
        Event::SlotsRead => ("slots-read", vec![]),
        Event::SlotsPublished => ("slots-published", vec![]),
        Event::MarksFound { word, mask } => ("marks-found", vec![word, mask]),
        Event::MarksSet { word, mask } => ("marks-set", vec![word, mask]),
        Event::Summarized { group, words } => ("summarized", vec![group, words]),
        Event::SummarySkipped { group, words } => ("summary-skipped", vec![group, words]),
        Event::SummaryCleared { group, words } => ("summary-cleared", vec![group, words]),
        Event::MarksTaken { word, marks } => ("marks-taken", vec![word, marks]),
        Event::HarvestBegins { masks } => ("harvest-begins", masks.map_or(vec![], Vec::from)),
        Event::HarvestEnds => ("harvest-ends", vec![]),
        Event::VmmWrites { gfn } => ("vmm-writes", vec![gfn]),
        Event::LogsNow => ("logs-now", vec![]),
        Event::CpuWrites { cpu, gfn } => ("cpu-writes", vec![cpu, gfn]),
        Event::CpuForgets { cpu, gfn } => ("cpu-forgets", vec![cpu, gfn]),
        Event::FlushBegins { start, end } => ("flush-begins", vec![start, end]),
        Event::FlushEnds => ("flush-ends", vec![]),
    }
}

/// The kind of a PTE, and two numbers.
fn kind<F: Format>(value: u64, level: u8) -> Vec<u64> {
    match events::kind::<F>(value, level) {
        PteKind::Empty(number) | PteKind::Unflushed(number) => vec![0, number / 2, 0],
        PteKind::Leaf(pfn, host, guest) => vec![1, pfn, u64::from(host) | u64::from(guest) << 1],
        PteKind::Table(table) => vec![2, table, 0],
        PteKind::Broken(table) => vec![3, table, 0],
        PteKind::Frozen => vec![4, 0, 0],
    }
}

/// Reads and writes a few of the pages.
fn writer<F: Format>(vm: &TestVm<F>, index: usize) {
    let mut vcpu = vm.create_vcpu().unwrap();
    let (host, cpu) = (vm.host(), index as u64);
    for _ in 0..3 {
        let gfn = pick(&LOGGED);
        let is_done = host.inner.during_access(index, || {
            let Some(found) = find(vm, gfn).filter(|found| found.writable) else { return false };
            events::record(Event::CpuTranslates { cpu, gfn, cell: found.address() });
            host.inner.step();
            events::record(Event::CpuWrites { cpu, gfn });
            host.inner.step();
            events::record(Event::CpuForgets { cpu, gfn });
            true
        });
        if !is_done {
            let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), Access::Write).unwrap();
            assert_eq!(outcome, Outcome::Resume);
        }
    }
}

/// Pages of two words of the log.
const LOGGED: [u64; 3] = [0, 1, BLOCK];
const WORDS: [usize; 2] = [0, BLOCK as usize / 64];
const NR_WORDS: usize = NR_PAGES as usize / 64;

/// Harvests all marks, or clears some of them unread.
fn harvester<F: Format>(vm: &TestVm<F>) {
    for _ in 0..2 {
        let mut bitmap = [0; NR_WORDS];
        if random(2) == 0 {
            events::record(Event::HarvestBegins { masks: None });
            let _: Result<u64, _> = vm.get_dirty_log(0, &mut bitmap);
        } else {
            let masks = [pick(&[0b1, 0b10, 0b11]), random(2)];
            WORDS.into_iter().zip(masks).for_each(|(word, mask)| bitmap[word] = mask);
            events::record(Event::HarvestBegins { masks: Some(masks) });
            let _: Result<u64, _> = vm.clear_dirty_log(0, 0, NR_PAGES, &bitmap);
        }
        events::record(Event::HarvestEnds);
    }
}

/// Turns logging on, and perhaps off and on again. Marks a page that it writes itself.
fn logger<F: Format>(vm: &TestVm<F>) {
    for round in 0..2 {
        let gfn = pick(&LOGGED);
        vm.set_user_memory_region(region(0, MemoryRegionFlags::LOG_DIRTY_PAGES, 0, NR_PAGES, None)).unwrap();
        events::record(Event::LogsNow);
        events::record(Event::VmmWrites { gfn });
        vm.mark_dirty(0, gfn, 1).unwrap();
        if round == 0 {
            vm.set_user_memory_region(region(0, MemoryRegionFlags::empty(), 0, NR_PAGES, None)).unwrap();
        }
    }
}

fn dirty_log<F: Format>() {
    events::start();
    let mut config = Config::default();
    config.dirty_tracking = DirtyTracking::WriteProtectLeaves;
    let vm: TestVm<F> = Arc::new(Vm::new(MovingHost::new(PageSize::Size4K), config).unwrap());
    let memory = region(0, MemoryRegionFlags::empty(), 0, NR_PAGES, Some(backing(0, PageSize::Size4K)));
    vm.set_user_memory_region(memory).unwrap();
    let bodies: [fn(&TestVm<F>); 5] = [|vm| writer(vm, 0), |vm| writer(vm, 1), logger, harvester, harvester];
    let threads = bodies.map(|body| {
        let vm = Arc::clone(&vm);
        thread::spawn(move || body(&vm))
    });
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    save::<F>("dirty_log", vm.host().table_ptr(vm.root()).addr() as u64);
}

#[test]
fn invalidations_with_two_levels() {
    check_less(SCHEDULES, invalidations::<Tiny<2>>);
}

#[test]
fn invalidations_with_three_levels() {
    check_less(SCHEDULES, invalidations::<Tiny<3>>);
}

#[test]
fn dirty_logs() {
    check_less(SCHEDULES, dirty_log::<Tiny<2>>);
}
