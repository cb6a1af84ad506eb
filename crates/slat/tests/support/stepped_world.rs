//! The world of the engine under shuttle: a format with page-table pages of four PTEs, a host that
//! blocks by shuttle's primitives alone, and guests whose accesses can be stopped at every step.
#![allow(unsafe_code, reason = "implements the host's contract over the global allocator")]

use std::alloc::{Layout, alloc, dealloc};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use slat::baselines::{AtomicU32, AtomicU64, Locking, Park};
use slat::dirty::DirtyTracking;
use slat::events::{self, Event};
use slat::format::{CpuFeatures, Format, Geometry, Hardware, LeafAttributes, Npt, Pte};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved};
use slat::{
    Access, Config, Exit, Gfn, GfnRange, Gpa, Host, Hpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE,
    PageSize, Pfn, Vcpu, Vm,
};

/// A format with page-table pages of four PTEs, so that unlinking one takes few steps. A level
/// still covers nine bits of the address. Frames 4 to 511 of a block share PTEs with frames 0 to 3,
/// so guests use only those. Directory entries have eight generations, so that the numbers wrap
/// (`table/generation.rs` has a window to match). CPUs can log the pages that they make dirty.
#[derive(Debug)]
pub struct Tiny<const LEVELS: u8, const BREAKS: bool = false>;

/// The same with break before make.
#[allow(dead_code, reason = "not each test tries it")]
pub type Breaking<const LEVELS: u8> = Tiny<LEVELS, true>;

// SAFETY: PTEs are those of Npt; only the number of levels and PTEs differs.
unsafe impl<const LEVELS: u8, const BREAKS: bool> Format for Tiny<LEVELS, BREAKS> {
    const NAME: &'static str = "tiny";
    const ROOT_LEVEL: Level = Level(LEVELS);
    const GPA_BITS: u32 = 12 + 9 * (LEVELS as u32 - 1) + 1;
    const GEOMETRIES: &'static [Geometry] =
        &[Geometry { root_level: Level(LEVELS), gpa_bits: Self::GPA_BITS as u8..=Self::GPA_BITS as u8 }];
    const HPA_BITS: u32 = Npt::HPA_BITS;
    const MAX_ROOT_ENTRIES: usize = 2;
    const TABLE_ENTRIES: usize = 4;
    const ADDRESS: u64 = Npt::ADDRESS;
    const HAS_ADDRESS_BITS: bool = false;
    const FEATURES: CpuFeatures = Npt::FEATURES;
    const ATTRIBUTES: u64 = Npt::ATTRIBUTES;
    const WRITABLE: u64 = Npt::WRITABLE;
    const ACCESSED: u64 = Npt::ACCESSED;
    const DIRTY: u64 = Npt::DIRTY;
    const HAS_DIRTY_BIT: bool = Npt::HAS_DIRTY_BIT;
    const HOST_WRITABLE: u64 = Npt::HOST_WRITABLE;
    const WAS_DIRTY: u64 = Npt::WAS_DIRTY;
    const GENERATION: u64 = Npt::GENERATION & 7 << Npt::GENERATION.trailing_zeros();
    const BREAK_BEFORE_MAKE: bool = BREAKS;
    const NEEDS_LOCAL_FLUSH: bool = false;
    const HAS_MODIFICATION_LOG: bool = true;
    type Walkers = <Npt as Format>::Walkers;

    fn is_present(entry: Pte) -> bool {
        // The engine calls this for every PTE that it reads.
        assert_ne!(entry.0, POISON, "a PTE of a page-table page that was freed");
        Npt::is_present(entry)
    }

    fn is_leaf(entry: Pte, level: Level) -> bool {
        Npt::is_leaf(entry, level)
    }

    fn leaf(pfn: Pfn, level: Level) -> Pte {
        Npt::leaf(pfn, level)
    }

    fn table(table: Hpa) -> Pte {
        Npt::table(table)
    }

    fn attribute_bits(attributes: LeafAttributes, hardware: &Hardware) -> Option<u64> {
        Npt::attribute_bits(attributes, hardware)
    }

    fn attribute_bits_at(bits: u64, level: Level) -> u64 {
        Npt::attribute_bits_at(bits, level)
    }

    fn pack_attributes(entry: Pte, level: Level) -> u64 {
        Npt::pack_attributes(entry, level)
    }

    fn unpack_attributes(packed: u64, level: Level) -> u64 {
        Npt::unpack_attributes(packed, level)
    }

    fn may_execute(entry: Pte, access: Access) -> bool {
        Npt::may_execute(entry, access)
    }
}

const POISON: u64 = 0x5a5a_5a5a_5a5a_5a5a;
/// The frame of a private page, less the frame of the shared page at the same place.
pub const PRIVATE_PFN: u64 = 1 << 32;
/// Addresses of page-table pages are page-aligned, whatever the size.
const TABLE_LAYOUT: Layout = match Layout::from_size_align(4096, 4096) {
    Ok(layout) => layout,
    Err(_) => unreachable!(),
};

#[derive(Debug)]
pub struct Backing {
    pub first_pfn: u64,
    pub max_size: PageSize,
    pub reads_are_writable: bool,
    pub dropped: Arc<AtomicBool>,
}

impl Drop for Backing {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::SeqCst);
    }
}

/// Memory of page-table pages. A freed one is poisoned, and kept until the host is dropped. Locked
/// for no longer than a step.
#[derive(Debug, Default)]
struct Tables {
    live: HashMap<u64, usize>,
    freed: Vec<u64>,
}

/// A CPU's page-modification log, with the protocol of the software machine (`modification_log.rs`
/// there). Never locked across a step.
#[derive(Debug, Default)]
struct ModificationLog(std::sync::Mutex<Logged>);

#[derive(Debug, Default)]
struct Logged {
    pages: VecDeque<Gpa>,
    /// The number of the first of them, which is how many were drained.
    nr_drained: u64,
}

impl ModificationLog {
    /// So few that CPUs exit because the log is full.
    const NR_ENTRIES: usize = 2;

    /// The number after that of the last entry.
    fn filled(&self) -> u64 {
        let logged = self.0.lock().unwrap();
        logged.nr_drained + logged.pages.len() as u64
    }

    /// Passes the entries below number `end` to `log`, and only then frees their places.
    fn drain_below(&self, cpu: usize, end: u64, log: &mut dyn FnMut(&[Gpa])) {
        let cpu = cpu as u64;
        let pages: Vec<Gpa> = {
            let logged = self.0.lock().unwrap();
            let first = logged.nr_drained;
            let pages = logged.pages.iter().copied().take(end.saturating_sub(first) as usize).collect::<Vec<_>>();
            events::record(Event::DrainReads { cpu, first, nr_entries: pages.len() as u64 });
            pages
        };
        log(&pages);
        let mut logged = self.0.lock().unwrap();
        while logged.nr_drained < end {
            logged.pages.pop_front().unwrap();
            logged.nr_drained += 1;
        }
        events::record(Event::DrainRemoves { cpu, end });
    }
}

#[derive(Debug)]
pub struct ShuttleHost {
    /// One for each guest, if CPUs log what they make dirty.
    modification_logs: Option<Vec<ModificationLog>>,
    /// Whether CPUs set D.
    sets_dirty: bool,
    /// Whether to read a PTE of a page-table page that was freed is a panic.
    pub poisons: bool,
    tables: std::sync::Mutex<Tables>,
    /// One word for each guest, odd during an access.
    accesses: Vec<AtomicU64>,
    /// One word for each guest, odd during a fault.
    faults: Vec<AtomicU64>,
    /// The sleepers by word and ticket, and the next ticket.
    sleepers: shuttle::sync::Mutex<(Vec<(usize, u64)>, u64)>,
    wakeup: shuttle::sync::Condvar,
    /// Loaded for a step of the host.
    step: AtomicU64,
}

impl ShuttleHost {
    /// For a VM of this configuration. CPUs set D only if the configuration needs it, which saves
    /// steps.
    pub fn new(nr_guests: usize, tracking: DirtyTracking) -> ShuttleHost {
        let logs = tracking == DirtyTracking::PageModificationLog;
        ShuttleHost {
            modification_logs: logs.then(|| (0..nr_guests).map(|_| ModificationLog::default()).collect()),
            sets_dirty: !matches!(tracking, DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves),
            poisons: true,
            tables: std::sync::Mutex::default(),
            accesses: (0..nr_guests).map(|_| AtomicU64::new(0)).collect(),
            faults: (0..nr_guests).map(|_| AtomicU64::new(0)).collect(),
            sleepers: shuttle::sync::Mutex::new((Vec::new(), 0)),
            wakeup: shuttle::sync::Condvar::new(),
            step: AtomicU64::new(0),
        }
    }

    pub fn live_tables(&self) -> usize {
        self.tables.lock().unwrap().live.len()
    }

    /// A point at which other threads may run.
    pub fn step(&self) {
        self.step.load(Ordering::SeqCst);
    }

    /// Waits for all accesses that are under way now.
    pub fn wait_for_accesses(&self) {
        wait_while_odd(&self.accesses);
    }

    /// Runs `access` of guest number `guest`, for which [`ShuttleHost::wait_for_accesses`] waits.
    pub fn during_access<R>(&self, guest: usize, access: impl FnOnce() -> R) -> R {
        during(&self.accesses[guest], access)
    }

    /// Runs `fault` of guest number `guest`, for which [`ShuttleHost::wait_for_faults`] waits.
    pub fn during_fault<R>(&self, guest: usize, fault: impl FnOnce() -> R) -> R {
        during(&self.faults[guest], fault)
    }

    /// Waits for all faults that are under way now.
    pub fn wait_for_faults(&self) {
        wait_while_odd(&self.faults);
    }

    /// Logs that the CPU of `guest` is about to set D in the leaf of `gfn`, if CPUs log. `Err` if
    /// there is no room.
    pub fn log_modification(&self, guest: usize, gfn: u64) -> Result<(), LogFull> {
        let Some(logs) = &self.modification_logs else { return Ok(()) };
        self.step();
        let mut logged = logs[guest].0.lock().unwrap();
        if logged.pages.len() == ModificationLog::NR_ENTRIES {
            return Err(LogFull);
        }
        logged.pages.push_back(Gpa(gfn * PAGE_SIZE));
        events::record(Event::CpuLogs { cpu: guest as u64, gfn });
        drop(logged);
        self.step();
        Ok(())
    }

    /// Passes the log of `guest` to `log` if it is full.
    pub fn empty_full_log(&self, guest: usize, log: &mut dyn FnMut(&[Gpa])) -> Result<(), LogFull> {
        let Some(logs) = &self.modification_logs else { return Ok(()) };
        let is_full = logs[guest].0.lock().unwrap().pages.len() == ModificationLog::NR_ENTRIES;
        if !is_full {
            return Ok(());
        }
        self.during_fault(guest, || logs[guest].drain_below(guest, logs[guest].filled(), log));
        Err(LogFull)
    }

    /// Drains the logs of all guests. `flush` waits for accesses.
    pub fn drain(&self, flush: impl FnOnce(), log: &mut dyn FnMut(&[Gpa])) {
        let Some(logs) = &self.modification_logs else { return };
        let note = |(cpu, log): (usize, &ModificationLog)| {
            self.step();
            let end = log.filled();
            events::record(Event::DrainNotes { cpu: cpu as u64, end });
            end
        };
        let filled: Vec<_> = logs.iter().enumerate().map(note).collect();
        flush();
        events::record(Event::DrainKicked);
        logs.iter().zip(filled).enumerate().for_each(|(cpu, (logged, end))| logged.drain_below(cpu, end, log));
    }

    fn unpark(&self, word: usize, most: usize) -> bool {
        let mut sleepers = self.sleepers.lock().unwrap();
        let mut woken = 0;
        sleepers.0.retain(|sleeper| {
            let wake = sleeper.0 == word && woken < most;
            woken += usize::from(wake);
            !wake
        });
        drop(sleepers);
        if woken != 0 {
            self.wakeup.notify_all();
        }
        woken != 0
    }
}

/// A CPU has no room in its page-modification log, and exits.
#[derive(Debug)]
pub struct LogFull;

/// Makes `word` odd while `action` runs.
fn during<R>(word: &AtomicU64, action: impl FnOnce() -> R) -> R {
    word.fetch_add(1, Ordering::SeqCst);
    let result = action();
    word.fetch_add(1, Ordering::SeqCst);
    result
}

/// Waits until each of `words` that is odd now has changed.
fn wait_while_odd(words: &[AtomicU64]) {
    for word in words {
        let seen = word.load(Ordering::SeqCst);
        while seen % 2 == 1 && word.load(Ordering::SeqCst) == seen {
            shuttle::thread::yield_now();
        }
    }
}

impl Drop for ShuttleHost {
    fn drop(&mut self) {
        let tables = self.tables.get_mut().unwrap();
        assert!(std::thread::panicking() || tables.live.is_empty(), "page-table pages leaked");
        for table in tables.freed.drain(..) {
            // SAFETY: allocated with this layout, and no thread is left that could read it.
            unsafe { dealloc(table as *mut u8, TABLE_LAYOUT) }
        }
    }
}

impl Park for ShuttleHost {
    fn park(&self, word: &AtomicU32, expected: u32) {
        let mut sleepers = self.sleepers.lock().unwrap();
        if word.load(Ordering::SeqCst) != expected {
            return;
        }
        let ticket = sleepers.1;
        sleepers.1 += 1;
        sleepers.0.push((std::ptr::from_ref(word).addr(), ticket));
        while sleepers.0.iter().any(|sleeper| sleeper.1 == ticket) {
            sleepers = self.wakeup.wait(sleepers).unwrap();
        }
    }

    fn unpark_one(&self, word: *const AtomicU32) -> bool {
        self.unpark(word.addr(), 1)
    }

    fn unpark_all(&self, word: *const AtomicU32) {
        self.unpark(word.addr(), usize::MAX);
    }
}

// SAFETY: page-table pages come from the global allocator and stay until the host is dropped. A
// flush waits for the accesses that were under way. Frames are numbers.
unsafe impl Host for ShuttleHost {
    type Backing = Backing;

    fn allocate_table(&self, layout: Layout, _: TableNode, _: AllocationWait) -> Option<Hpa> {
        // SAFETY: not of size zero.
        let pointer = unsafe { alloc(TABLE_LAYOUT) };
        assert!(!pointer.is_null());
        self.tables.lock().unwrap().live.insert(pointer as u64, layout.size());
        Some(Hpa(pointer as u64))
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        let mut tables = self.tables.lock().unwrap();
        assert_eq!(tables.live.remove(&table.0), Some(layout.size()), "free of {table}, which is not live");
        let nr_poisoned = if self.poisons { layout.size() / 8 } else { 0 };
        for word in 0..nr_poisoned {
            // SAFETY: inside the page-table page, which no thread uses any more.
            unsafe { self.table_ptr(table).cast::<u64>().add(word).write(POISON) }
        }
        tables.freed.push(table.0);
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        table.0 as *mut u8
    }

    fn resolve(&self, backing: &Backing, _gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        assert!(!backing.dropped.load(Ordering::SeqCst), "resolve in a backing that was dropped");
        let dropped = Arc::clone(&backing.dropped);
        self.step();
        assert!(!dropped.load(Ordering::SeqCst), "a backing was dropped under a resolve");
        let writable = access == Access::Write || backing.reads_are_writable;
        Ok(Resolved { writable, ..Resolved::memory(Pfn(backing.first_pfn + page), backing.max_size) })
    }

    fn resolve_private(&self, backing: &Backing, gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let shared = self.resolve(backing, gfn, page, access)?;
        Ok(Resolved { pfn: Pfn(PRIVATE_PFN + shared.pfn.0), ..shared })
    }

    fn flush(&self, _ranges: &[GfnRange]) {
        self.wait_for_accesses();
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        // An access that was between its PTE and its D is over then.
        self.drain(|| self.wait_for_accesses(), log);
    }

    fn yield_now(&self) {
        shuttle::thread::yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }

    fn parking(&self) -> Option<&dyn Park> {
        Some(self)
    }
}

/// The leaf that a CPU would use for `gfn`: its frame, and whether it is writable.
pub fn walk<F: Format>(vm: &Vm<ShuttleHost, F>, gfn: u64) -> Option<(u64, bool)> {
    find(vm, gfn).map(|found| (found.pfn, found.writable))
}

/// A leaf that a walk has found.
pub struct Found<'v> {
    cell: &'v AtomicU64,
    entry: u64,
    level: Level,
    pub pfn: u64,
    /// Whether all PTEs on the way are writable.
    pub writable: bool,
}

impl Found<'_> {
    /// The address of the leaf PTE.
    #[allow(dead_code, reason = "not each test asks for it")]
    pub fn address(&self) -> u64 {
        std::ptr::from_ref(self.cell).addr() as u64
    }

    /// Whether a CPU can write through it without an entry in the dirty log.
    pub fn is_writable_unlogged<F: Format>(&self, tracking: DirtyTracking) -> bool {
        let is_logged = match tracking {
            DirtyTracking::WriteProtect | DirtyTracking::WriteProtectLeaves => false,
            _ => self.level == Level::L4K && self.entry & F::DIRTY == 0,
        };
        self.writable && !is_logged
    }

    /// Sets D, if the PTE has not changed.
    fn set_dirty<F: Format>(&self) -> Result<(), u64> {
        let dirty = self.entry | F::ACCESSED | F::DIRTY;
        self.cell.compare_exchange(self.entry, dirty, Ordering::SeqCst, Ordering::SeqCst).map(drop)
    }
}

/// The PTE for `gfn` in the page-table page `table` of `level`.
///
/// # Safety
/// `table` is, or was, a page-table page of `vm` of this level. Its memory stays until the host is
/// dropped.
pub unsafe fn pte_of<H: Host, F: Format>(vm: &Vm<H, F>, table: Hpa, level: Level, gfn: u64) -> &AtomicU64 {
    let nr_entries = if level == F::ROOT_LEVEL { F::MAX_ROOT_ENTRIES } else { F::TABLE_ENTRIES };
    let index = (gfn / level.nr_pages()) as usize % nr_entries;
    // SAFETY: inside of that page-table page.
    unsafe { &*vm.host().table_ptr(table).cast::<AtomicU64>().add(index) }
}

/// The leaf that a CPU would use for `gfn`.
pub fn find<H: Host, F: Format>(vm: &Vm<H, F>, gfn: u64) -> Option<Found<'_>> {
    find_by(vm, gfn, |_| {})
}

/// The same. Calls `reads` directly behind each read of a PTE that is present, with its address.
pub fn find_by<H: Host, F: Format>(vm: &Vm<H, F>, gfn: u64, mut reads: impl FnMut(u64)) -> Option<Found<'_>> {
    let (mut table, mut level) = (vm.root(), F::ROOT_LEVEL);
    let mut allowed = u64::MAX;
    loop {
        // SAFETY: the root, or what a directory entry of this VM points to.
        let cell = unsafe { pte_of(vm, table, level, gfn) };
        let entry = Pte(cell.load(Ordering::SeqCst));
        if !F::is_present(entry) {
            return None;
        }
        reads(std::ptr::from_ref(cell).addr() as u64);
        // Each PTE on the way must allow a write.
        allowed &= entry.0;
        if F::is_leaf(entry, level) {
            let pfn = F::address(entry, level).pfn().0 + gfn % level.nr_pages();
            return Some(Found { cell, entry: entry.0, level, pfn, writable: allowed & F::WRITABLE == F::WRITABLE });
        }
        table = F::address(entry, level);
        level = Level(level.0 - 1);
    }
}

pub type TestVm<F> = Arc<Vm<ShuttleHost, F>>;

pub fn new_vm<F: Format>(locking: Locking, nr_guests: usize) -> TestVm<F> {
    new_vm_with(Config::default().with_locking(locking), nr_guests)
}

pub fn new_vm_with<F: Format>(config: Config, nr_guests: usize) -> TestVm<F> {
    Arc::new(Vm::new(ShuttleHost::new(nr_guests, config.dirty_tracking), config).unwrap())
}

pub struct Guest<F: Format> {
    pub vm: TestVm<F>,
    pub vcpu: Vcpu<ShuttleHost, F>,
    pub index: usize,
}

impl<F: Format> Guest<F> {
    pub fn new(vm: &TestVm<F>, index: usize) -> Guest<F> {
        Guest { vm: Arc::clone(vm), vcpu: vm.create_vcpu().unwrap(), index }
    }

    /// One access that a flush waits for, with a step between its walk and its effect. `Ok` holds
    /// the effect's result. Else the fault was served: `Err` holds the exit, if there was one.
    pub fn access<R>(&mut self, gfn: u64, access: Access, effect: impl FnOnce(u64) -> R) -> Result<R, Option<Exit>> {
        let host = self.vm.host();
        let result = host.during_access(self.index, || {
            loop {
                let found = find(&self.vm, gfn);
                host.step();
                let found = found.filter(|found| access != Access::Write || found.writable)?;
                if access == Access::Write && host.sets_dirty && found.entry & F::DIRTY == 0 {
                    host.log_modification(self.index, gfn).ok()?;
                    if found.set_dirty::<F>().is_err() {
                        // Starts over at the root.
                        continue;
                    }
                }
                return Some(effect(found.pfn));
            }
        });
        match result {
            Some(result) => Ok(result),
            None => {
                let vcpu = &mut self.vcpu;
                if host.empty_full_log(self.index, &mut |written| vcpu.log_modifications(written)).is_err() {
                    return Err(None);
                }
                match host.during_fault(self.index, || vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), access)) {
                    Ok(Outcome::Resume) => Err(None),
                    Ok(Outcome::Exit(exit)) => Err(Some(exit)),
                    Err(error) => panic!("fault at frame {gfn:#x} failed: {error}"),
                }
            }
        }
    }
}

/// A region of `nr_pages` from frame `start` on; a new memslot if there is a backing.
pub fn region(
    slot: u32,
    flags: MemoryRegionFlags,
    start: u64,
    nr_pages: u64,
    backing: Option<Backing>,
) -> MemoryRegion<Backing> {
    MemoryRegion {
        slot,
        flags,
        guest_phys_addr: Gpa(start * PAGE_SIZE),
        memory_size: nr_pages * PAGE_SIZE,
        backing,
        userfault_bitmap: None,
    }
}

pub fn backing(first_pfn: u64, max_size: PageSize) -> Backing {
    Backing { first_pfn, max_size, reads_are_writable: true, dropped: Arc::default() }
}

/// A backing whose read faults map read-only, as after a fork or in a fresh file.
pub fn backing_with_read_only_reads(first_pfn: u64, max_size: PageSize) -> Backing {
    Backing { first_pfn, max_size, reads_are_writable: false, dropped: Arc::default() }
}

/// All threads are done and no memslot is left: the root is the only page-table page.
pub fn assert_no_table_is_left<F: Format>(vm: &TestVm<F>) {
    let all = 1 << (F::GPA_BITS - 12);
    let none = MemoryRegionFlags::empty();
    vm.set_user_memory_region(region(0, none, 0, all, Some(backing(0, PageSize::Size4K)))).unwrap();
    vm.set_user_memory_region(region(0, none, 0, 0, None)).unwrap();
    vm.reclaim();
    assert_eq!((vm.stats().live_tables(), vm.host().live_tables()), (1, 1));
}
