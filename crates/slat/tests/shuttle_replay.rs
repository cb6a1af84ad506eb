//! Records the protocol steps of the engine in many schedules, for the proofs: `ci/replay.sh` replays
//! them in the models (`models/proofs/replay.py`), where each must be an allowed step.
//!
//! `REPLAY_TO=FILE` says where the steps go: to `FILE.PROTOCOL`. Without it the schedules run all the same.
#![cfg(shuttle)]
#![allow(missing_docs)]
#![allow(unsafe_code, reason = "implements the host's contract by another host")]

#[path = "shuttle_replay/breaks.rs"]
mod breaks;
#[path = "shuttle_replay/dirty_bits.rs"]
mod dirty_bits;
#[path = "shuttle_replay/dirty_rings.rs"]
mod dirty_rings;
#[path = "shuttle_replay/epochs.rs"]
mod epochs;
#[path = "shuttle_replay/lazy_protection.rs"]
mod lazy_protection;
#[path = "shuttle_replay/memslots.rs"]
mod memslots;
#[path = "shuttle_replay/moved_memslot.rs"]
mod moved_memslot;
#[path = "shuttle_replay/pinned.rs"]
mod pinned;
#[path = "shuttle_replay/recovery_beside_log.rs"]
mod recovery_beside_log;
#[path = "shuttle_replay/ring_enabling.rs"]
mod ring_enabling;
#[path = "support/schedules.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod schedules;
#[path = "shuttle_replay/undo.rs"]
mod undo;
#[path = "shuttle_replay/userfault.rs"]
mod userfault;
#[path = "support/stepped_world.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod world;

use std::alloc::Layout;
use std::cell::RefCell;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use schedules::{check_less, pick, random};
use shuttle::thread;
use slat::baselines::AtomicU64;
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::events::{self, Event, PteKind};
use slat::format::{Format, Pte};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved, ZappedLeaf};
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Host, Hpa, Level, MemoryRegionFlags, Outcome, PAGE_SIZE, PageSize, Pfn,
    Vm,
};
use world::{Backing, PRIVATE_PFN, ShuttleHost, Tiny, backing, find, find_by, pte_of, region};

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
    /// For reads, as well as for recoveries, which ask for a read.
    max_size_of_reads: PageSize,
    is_always_writable: bool,
    /// Whether it records which leaves go.
    sees_zaps: bool,
    needs_zapped_leaves: bool,
    /// A resolve may let other threads run for long.
    blocks: bool,
    never_has_memory_at_once: bool,
    has_barrier: bool,
    /// Of each used page how often it was moved; of each block if pages are huge.
    nr_moves: [AtomicU64; USED.len()],
}

impl MovingHost {
    fn new(max_size: PageSize) -> MovingHost {
        let inner = ShuttleHost::new(NR_GUESTS, Config::default().dirty_tracking);
        MovingHost {
            inner,
            max_size,
            max_size_of_reads: max_size,
            is_always_writable: false,
            sees_zaps: false,
            needs_zapped_leaves: true,
            blocks: false,
            never_has_memory_at_once: false,
            has_barrier: false,
            nr_moves: Default::default(),
        }
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
        if wait == AllocationWait::Never && (self.never_has_memory_at_once || random(4) == 0) {
            return None;
        }
        self.inner.allocate_table(layout, node, wait)
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.inner.free_table(table, layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.inner.table_ptr(table)
    }

    fn resolve(&self, backing: &Backing, gfn: Gfn, _: u64, access: Access) -> Result<Resolved, Unresolved> {
        if self.blocks && random(2) == 0 {
            self.yield_now();
        }
        let place = MovingHost::place(gfn.0, self.moves(gfn.0).load(Ordering::SeqCst));
        let pfn = Pfn(place.0 + backing.first_pfn);
        let writable = self.is_always_writable || access == Access::Write || random(2) == 0;
        events::record(Event::HostAnswers { gfn: gfn.0, pfn: pfn.0, is_writable: writable.into() });
        let max_size = if access == Access::Write { self.max_size } else { self.max_size_of_reads };
        Ok(Resolved { writable, ..Resolved::memory(pfn, max_size) })
    }

    fn resolve_private(&self, backing: &Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let shared = self.resolve(backing, gfn, page, access)?;
        Ok(Resolved { pfn: Pfn(PRIVATE_PFN + shared.pfn.0), ..shared })
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.inner.flush(ranges);
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.inner.drain_modification_logs(log);
    }

    fn leaf_zapped(&self, leaf: ZappedLeaf) {
        if self.sees_zaps {
            events::record(Event::LeafZapped { gfn: leaf.range.start.0, is_dirty: leaf.dirty.into() });
        }
    }

    fn needs_zapped_leaves(&self) -> bool {
        self.needs_zapped_leaves
    }

    fn has_barrier_on_all_cpus(&self) -> bool {
        self.has_barrier
    }

    fn barrier_on_all_cpus(&self) {
        events::record(Event::BarrierMade);
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
            events::record(Event::CpuWalks { cpu: index as u64 });
            let reads = |cell| events::record(Event::CpuReads { cpu: index as u64, gfn, cell });
            let found = find_by(vm, gfn, reads).filter(|found| access != Access::Write || found.writable);
            if let Some(found) = &found {
                events::record(Event::CpuTranslates { cpu: index as u64, gfn, cell: found.address() });
            }
            host.inner.step();
            found.is_some()
        });
        if !is_done {
            let outcome = vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), access).unwrap();
            assert!(matches!(outcome, Outcome::Resume | Outcome::Exit(Exit::MemoryFault { .. } | Exit::Mmio { .. })));
        }
    }
}

/// Moves pages: a page, parts of blocks, blocks at a time, or all that a PTE of the root maps.
fn mover<F: Format>(vm: &TestVm<F>) {
    let host = vm.host();
    for _ in 0..1 + random(2) {
        let is_huge = host.max_size != PageSize::Size4K;
        let block = GfnRange::new(Gfn(random(2) * BLOCK), BLOCK);
        let page = GfnRange::new(Gfn(block.start.0 + random(3)), 1);
        let a_block_and_more = GfnRange::new(Gfn(0), BLOCK + 1);
        let below_the_root = GfnRange::new(Gfn(0), 1 << (F::GPA_BITS - 13));
        let parts = [block, page, GfnRange::new(block.start, 2), a_block_and_more, below_the_root];
        // Of a huge page a part may be invalidated. It moves as a whole.
        let range = pick(&parts);
        let invalidation = vm.invalidate_range(range).unwrap();
        let moved: Vec<u64> = USED.into_iter().filter(|&gfn| range.contains(Gfn(gfn))).collect();
        if !is_huge || range == block || range == below_the_root {
            for &gfn in &moved {
                if is_huge && gfn % BLOCK != 0 {
                    continue;
                }
                let nr_moves = host.moves(gfn).fetch_add(1, Ordering::SeqCst) + 1;
                let of_it = moved.iter().filter(|&&it| it == gfn || (is_huge && it / BLOCK == gfn / BLOCK));
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

/// Runs each of the bodies in a thread of its own.
fn on_threads<T: Clone + Send + 'static, B: FnOnce(&T) + Send + 'static>(
    shared: &T,
    bodies: impl IntoIterator<Item = B>,
) {
    let spawn = |body: B| {
        let shared = shared.clone();
        thread::spawn(move || {
            let _saved = SavedIfItFails;
            body(&shared);
        })
    };
    let threads: Vec<_> = bodies.into_iter().map(spawn).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

type Body<F> = Box<dyn FnOnce(&TestVm<F>) + Send>;

/// Guests access pages of the block from `first` on, beside `others`.
fn guests_beside<F: Format>(vm: &TestVm<F>, first: u64, others: Vec<Body<F>>) {
    let guest = |index| Box::new(move |vm: &TestVm<F>| guest(vm, index, [first + index as u64, first + 1])) as Body<F>;
    on_threads(vm, (0..NR_GUESTS).map(guest).chain(others));
}

/// A VM with one memslot from frame 0 on.
fn new_vm<F: Format>(host: MovingHost, config: Config, flags: MemoryRegionFlags, nr_pages: u64) -> TestVm<F> {
    let memory = backing(0, host.max_size);
    let vm = Arc::new(Vm::new(host, config).unwrap());
    vm.set_user_memory_region(region(0, flags, 0, nr_pages, Some(memory))).unwrap();
    vm
}

fn invalidations<F: Format>() {
    events::start();
    let max_size = pick(&[PageSize::Size4K, PageSize::Size2M]);
    let mut host = MovingHost::new(max_size);
    host.needs_zapped_leaves = random(2) == 0;
    let vm = new_vm::<F>(host, Config::default(), MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of("invalidation", &vm);
    let first = pick(&[0, BLOCK]);
    let other: Body<F> =
        if max_size == PageSize::Size4K { Box::new(mover) } else { Box::new(move |vm| collapser(vm, first)) };
    guests_beside(&vm, first, vec![Box::new(mover), other]);
    save();
}

/// What a line of the record says of an event: the step, and numbers.
type Line = (&'static str, Vec<u64>);

/// What is recorded since [`events::start`].
struct Record {
    protocol: &'static str,
    root: usize,
    nr_levels: u8,
    line: fn(Event) -> Line,
}

thread_local! {
    static RECORD: RefCell<Option<Record>> = const { RefCell::new(None) };
}

/// The events of the schedule are of `vm`, and for this protocol.
fn is_record_of<H: Host, F: Format>(protocol: &'static str, vm: &Vm<H, F>) {
    let root = vm.host().table_ptr(vm.root()).addr();
    RECORD.set(Some(Record { protocol, root, nr_levels: F::ROOT_LEVEL.0, line: line::<F> }));
}

/// Appends the steps to the file of the protocol: a line each, `THREAD STEP NUMBERS`.
fn save() {
    let events = events::finish();
    let (Some(record), Ok(path)) = (RECORD.take(), std::env::var("REPLAY_TO")) else { return };
    let mut text = format!("schedule {} {}\n", record.root, record.nr_levels);
    for (thread, event) in events {
        let (name, numbers) = (record.line)(event);
        write!(text, "{thread} {name}").unwrap();
        numbers.iter().for_each(|number| write!(text, " {number}").unwrap());
        text.push('\n');
    }
    let path = format!("{path}.{}", record.protocol);
    OpenOptions::new().create(true).append(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

/// Saves a schedule in which the thread panics, up to there: its record may say why.
struct SavedIfItFails;

impl Drop for SavedIfItFails {
    fn drop(&mut self) {
        if std::thread::panicking() {
            save();
        }
    }
}

fn line<F: Format>(event: Event) -> Line {
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
        Event::PteKept { cell, level, found } => {
            ("pte-kept", [vec![cell, level.into()], kind::<F>(found, level)].concat())
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
        Event::EntryPublished { start, logs, log } => ("entry-published", vec![start, logs.into(), log]),
        Event::MarksFound { word, mask, log } => ("marks-found", vec![word, mask, log]),
        Event::MarksSet { word, mask, log } => ("marks-set", vec![word, mask, log]),
        Event::Summarized { group, words } => ("summarized", vec![group, words]),
        Event::SummarySkipped { group, words } => ("summary-skipped", vec![group, words]),
        Event::SummaryCleared { group, words } => ("summary-cleared", vec![group, words]),
        Event::MarksTaken { word, marks, log } => ("marks-taken", vec![word, marks, log]),
        Event::HarvestBegins { masks } => ("harvest-begins", masks.map_or(vec![], Vec::from)),
        Event::HarvestEnds => ("harvest-ends", vec![]),
        Event::VmmWrites { gfn } => ("vmm-writes", vec![gfn]),
        Event::LogsNow => ("logs-now", vec![]),
        Event::CpuWrites { cpu, gfn } => ("cpu-writes", vec![cpu, gfn]),
        Event::CpuForgets { cpu, gfn } => ("cpu-forgets", vec![cpu, gfn]),
        Event::FlushBegins { start, end } => ("flush-begins", vec![start, end]),
        Event::FlushEnds => ("flush-ends", vec![]),
        Event::CpuWalks { cpu } => ("cpu-walks", vec![cpu]),
        Event::CpuReads { cpu, gfn, cell } => ("cpu-reads", vec![cpu, gfn, cell]),
        Event::BitmapMade { bitmap, is_big } => ("bitmap-made", vec![bitmap, is_big.into()]),
        Event::BitsChanged { word, value } => ("bits-changed", vec![word, value]),
        Event::BitsRead { word, value } => ("bits-read", vec![word, value]),
        Event::AttributesRead { word, value } => ("attributes-read", vec![word, value]),
        Event::AttributesStored { word, mask, is_private } => {
            ("attributes-stored", vec![word, mask, is_private.into()])
        }
        Event::CallBegins { kind, start, end, bitmap } => ("call-begins", vec![kind, start, end, bitmap]),
        Event::MappingBegins { start, end, pfn } => ("mapping-begins", vec![start, end, pfn]),
        Event::UndoBegins { start, end } => ("undo-begins", vec![start, end]),
        Event::CallEnds { is_ok } => ("call-ends", vec![is_ok.into()]),
        Event::MemslotBegins { kind, id, start, end, backing } => {
            ("memslot-begins", vec![kind, id, start, end, backing])
        }
        Event::SlotMade { slot } => ("slot-made", vec![slot]),
        Event::SlotClaimed { slot } => ("slot-claimed", vec![slot]),
        Event::SlotReleased { slot } => ("slot-released", vec![slot]),
        Event::SetBuilt => ("set-built", vec![]),
        Event::SlotFreed { slot } => ("slot-freed", vec![slot]),
        Event::HazardSet { thing } => ("hazard-set", vec![thing]),
        Event::HazardCleared => ("hazard-cleared", vec![]),
        Event::FaultUnpinned => ("fault-unpinned", vec![]),
        Event::AnnouncementsRead => ("announcements-read", vec![]),
        Event::EpochRead { announcement, epoch } => ("epoch-read", vec![announcement, epoch]),
        Event::Announced { announcement, epoch } => ("announced", vec![announcement, epoch]),
        Event::GuardOpened { announcement } => ("guard-opened", vec![announcement]),
        Event::GuardClosed { announcement, is_last } => ("guard-closed", vec![announcement, is_last.into()]),
        Event::ThingKept { announcement, epoch } => ("thing-kept", vec![announcement, epoch]),
        Event::EpochReadAgain { announcement, epoch } => ("epoch-read-again", vec![announcement, epoch]),
        Event::EpochAdvanced { epoch } => ("epoch-advanced", vec![epoch]),
        Event::TableRetired { table, tag } => ("table-retired", vec![table, tag]),
        Event::TablesListed => ("tables-listed", vec![]),
        Event::TablesTaken => ("tables-taken", vec![]),
        Event::BarrierMade => ("barrier-made", vec![]),
        Event::AnnouncementRead { announcement, epoch } => ("announcement-read", vec![announcement, epoch]),
        Event::TableKept { table } => ("table-kept", vec![table]),
        Event::TableFreed { table } => ("table-freed", vec![table]),
        Event::CpuCaches { cpu, gfn } => ("cpu-caches", vec![cpu, gfn]),
        Event::InitiallySet => ("initially-set", vec![]),
        Event::CpuSetsDirty { cpu, gfn } => ("cpu-sets-dirty", vec![cpu, gfn]),
        Event::WithoutRingsBegins => ("without-rings-begins", vec![]),
        Event::WithoutRingsEnds => ("without-rings-ends", vec![]),
        Event::RingsEnabled => ("rings-enabled", vec![]),
        Event::RingsRead { are_enabled } => ("rings-read", vec![are_enabled.into()]),
        Event::VcpuHasRing { cpu, ring, nr_entries } => ("vcpu-has-ring", vec![cpu, ring, nr_entries]),
        Event::RingFirstRead { ring, first } => ("ring-first-read", vec![ring, first]),
        Event::RingEntryWritten { ring, index, page } => ("ring-entry-written", vec![ring, index, page]),
        Event::RingPushed { ring, index } => ("ring-pushed", vec![ring, index]),
        Event::RingHarvestBegins { ring, next } => ("ring-harvest-begins", vec![ring, next]),
        Event::RingEntryChosen { ring, index } => ("ring-entry-chosen", vec![ring, index]),
        Event::RingEntryRead { ring, index, page } => ("ring-entry-read", vec![ring, index, page]),
        Event::RingMarkRead { ring, index, mark } => ("ring-mark-read", vec![ring, index, mark]),
        Event::RingHarvested { ring, index } => ("ring-harvested", vec![ring, index]),
        Event::RingHarvestFailed { ring, next } => ("ring-harvest-failed", vec![ring, next]),
        Event::RingMarked { ring, index } => ("ring-marked", vec![ring, index]),
        Event::RingResetBegins { ring, harvested } => ("ring-reset-begins", vec![ring, harvested]),
        Event::RingReset { ring, reached } => ("ring-reset", vec![ring, reached]),
        Event::ResetBegins => ("reset-begins", vec![]),
        Event::ResetEnds => ("reset-ends", vec![]),
        Event::CpuLogs { cpu, gfn } => ("cpu-logs", vec![cpu, gfn]),
        Event::DrainNotes { cpu, end } => ("drain-notes", vec![cpu, end]),
        Event::DrainKicked => ("drain-kicked", vec![]),
        Event::DrainReads { cpu, first, nr_entries } => ("drain-reads", vec![cpu, first, nr_entries]),
        Event::DrainRemoves { cpu, end } => ("drain-removes", vec![cpu, end]),
        Event::LeafZapped { gfn, is_dirty } => ("leaf-zapped", vec![gfn, is_dirty.into()]),
    }
}

/// The kind of a PTE, and two numbers.
fn kind<F: Format>(value: u64, level: u8) -> Vec<u64> {
    match events::kind::<F>(value, level) {
        PteKind::Empty(number) => vec![0, number / 2, 0],
        PteKind::Unflushed(number) => vec![0, number / 2, 1],
        PteKind::Leaf(pfn, bits) => {
            let names = [F::HOST_WRITABLE, F::WRITABLE, F::DIRTY, F::WAS_DIRTY];
            vec![1, pfn, (0..).zip(names).map(|(nth, name)| u64::from(bits & name == name) << nth).sum()]
        }
        PteKind::Table(table, bits, is_protected) => {
            vec![2, table, (bits >> F::GENERATION.trailing_zeros()) << 1 | u64::from(is_protected)]
        }
        PteKind::Broken(table) => vec![3, table, 0],
        PteKind::Frozen => vec![4, 0, 0],
    }
}

/// A CPU writes to a page, if the page tables allow it. `false` is a fault.
fn cpu_writes<F: Format>(vm: &TestVm<F>, index: usize, gfn: u64) -> bool {
    let (host, cpu) = (vm.host(), index as u64);
    host.inner.during_access(index, || {
        let Some(found) = find(vm, gfn).filter(|found| found.writable) else { return false };
        events::record(Event::CpuTranslates { cpu, gfn, cell: found.address() });
        host.inner.step();
        events::record(Event::CpuWrites { cpu, gfn });
        host.inner.step();
        events::record(Event::CpuForgets { cpu, gfn });
        true
    })
}

/// Writes to a few of the pages.
fn writer<F: Format>(vm: &TestVm<F>, index: usize) {
    let mut vcpu = vm.create_vcpu().unwrap();
    for _ in 0..3 {
        let gfn = pick(&LOGGED);
        if !cpu_writes(vm, index, gfn) {
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

/// Turns logging on, off and on again.
fn toggle_log<F: Format>(vm: &TestVm<F>, nr_pages: u64, while_it_logs: impl Fn()) {
    for round in 0..2 {
        vm.set_user_memory_region(region(0, MemoryRegionFlags::LOG_DIRTY_PAGES, 0, nr_pages, None)).unwrap();
        events::record(Event::LogsNow);
        while_it_logs();
        if round == 0 {
            vm.set_user_memory_region(region(0, MemoryRegionFlags::empty(), 0, nr_pages, None)).unwrap();
        }
    }
}

/// Marks pages that it writes itself while they are logged.
fn logger<F: Format>(vm: &TestVm<F>) {
    toggle_log(vm, NR_PAGES, || {
        let gfn = pick(&LOGGED);
        events::record(Event::VmmWrites { gfn });
        vm.mark_dirty(0, gfn, 1).unwrap();
    });
}

/// Perhaps all marks are set when logging begins.
fn log_config(dirty_tracking: DirtyTracking) -> Config {
    let mut config = Config::default();
    config.dirty_tracking = dirty_tracking;
    if random(4) == 0 {
        config.manual_protect = ManualProtect::InitiallySet;
        events::record(Event::InitiallySet);
    }
    config
}

fn dirty_log<F: Format>() {
    events::start();
    let mut config = Config::default();
    config.dirty_tracking = DirtyTracking::WriteProtectLeaves;
    let vm = new_vm::<F>(MovingHost::new(PageSize::Size4K), config, MemoryRegionFlags::empty(), NR_PAGES);
    is_record_of("dirty_log", &vm);
    let bodies: [fn(&TestVm<F>); 5] = [|vm| writer(vm, 0), |vm| writer(vm, 1), logger, harvester, harvester];
    on_threads(&vm, bodies);
    save();
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
