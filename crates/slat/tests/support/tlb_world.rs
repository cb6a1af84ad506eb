//! A host that moves, frees and protects the frames of its guests, and guests with a software TLB
//! each. A CPU uses a translation that a walk found until a flush names it. Each access is checked
//! against what the host allows at that moment.
//!
//! There are two areas of memory, each the backing of a memslot. Four pages of each are used (see
//! `Tiny`). Frames are numbers, and a number is never used twice. A CPU uses a translation of a
//! huge leaf for all of its pages. A flush drops it only for the pages that it names, since a CPU
//! may have cached it in parts.
//!
//! Each test names its format as `Shape`. With break before make, no CPU may find a leaf while one
//! has a translation of another size for the same page.
#![allow(unsafe_code, reason = "implements the host's contract over another host")]

use std::alloc::Layout;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, Weak};

use slat::baselines::{AtomicU64, Park};
use slat::dirty::{DirtyTracking, HugePageLogging, ManualProtect};
use slat::error::FaultError;
use slat::format::{Format, Pte};
use slat::host::{AllocationWait, Resolved, TableNode, Unresolved, ZappedLeaf};
use slat::tables::AccessTracking;
use slat::{
    Access, Config, Gfn, GfnRange, Gpa, Host, Hpa, Level, MemoryRegion, MemoryRegionFlags, Outcome, PAGE_SIZE,
    PageSize, Pfn, Vcpu, Vm,
};

use crate::Shape;
use crate::schedules::{pick, random, random_locking};
use crate::world::{ShuttleHost, find};

pub type TestVm = Vm<TlbHost, Shape>;

/// Pages of a block, and of an area.
pub const BLOCK: u64 = 512;
/// Pages of an area that are used.
pub const PAGES: usize = 4;
/// The areas. The memslot of the first is deleted, made and moved between two places; that of the
/// second stays.
pub const MOVING: usize = 0;
pub const STAYING: usize = 1;
/// Where the memslots of the areas may begin.
pub const PLACES: [&[u64]; 2] = [&[0, BLOCK], &[2 * BLOCK]];

/// Any configuration.
pub fn random_config() -> Config {
    let locking = random_locking();
    let access_tracking = pick(&[AccessTracking::AccessedBit, AccessTracking::AccessedBit, AccessTracking::Faults]);
    let by_writes = [DirtyTracking::WriteProtect, DirtyTracking::WriteProtectLeaves];
    let by_dirty_bits = [DirtyTracking::DirtyBit, DirtyTracking::PageModificationLog];
    let dirty_tracking = match access_tracking {
        AccessTracking::Faults => pick(&by_writes),
        AccessTracking::AccessedBit => pick(&[by_writes, by_dirty_bits].concat()),
    };
    Config::default()
        .with_locking(locking)
        .with_access_tracking(access_tracking)
        .with_dirty_tracking(dirty_tracking)
        .with_manual_protect(pick(&[ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet]))
        .with_huge_page_logging(pick(&[
            HugePageLogging::Split,
            HugePageLogging::SplitLazily,
            HugePageLogging::MarkWhole,
            HugePageLogging::MarkWholeLazily,
        ]))
}

/// A page of an area.
#[derive(Debug, Default)]
struct Page {
    pfn: u64,
    /// Whether the host allows the guest to write the frame.
    may_write: bool,
    /// Writes of the guest so far.
    nr_writes: u64,
    /// Written by the guest since the host last checked.
    written: bool,
    /// Reported dirty since the host last checked.
    reported: bool,
}

#[derive(Debug, Default)]
struct Area {
    pages: [Page; PAGES],
    /// Where its memslot may be now.
    places: Vec<u64>,
    /// The host allows only leaves of one page.
    is_of_pages: bool,
}

impl Area {
    /// Whether the frames of the pages are contiguous and aligned like a block.
    fn is_contiguous(&self) -> bool {
        let first = self.pages[0].pfn;
        first.is_multiple_of(BLOCK) && self.pages.iter().zip(first..).all(|(page, pfn)| page.pfn == pfn)
    }
}

/// The state of the host. Never locked across a step.
#[derive(Debug, Default)]
pub struct Memory {
    areas: [Area; 2],
    next_pfn: u64,
    /// A page that is written for the first time is never copied.
    copies_never: bool,
    /// How many invalidations hold each guest frame.
    nr_invalidations: HashMap<u64, u32>,
    /// The calls that are zapping now: when each began, and its ranges.
    zaps: BTreeMap<u64, Vec<GfnRange>>,
    /// When frames were freed.
    freed: HashMap<u64, u64>,
    /// Counts beginnings of zaps, and frees of frames.
    now: u64,
}

impl Memory {
    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Whether a call that began before `time` is still zapping in the block of `gfn`. Such a call
    /// also reports the leaves of a split or recovery that it cancelled there.
    fn is_zapped(&self, gfn: u64, time: u64) -> bool {
        let block = Gfn(gfn).block(Level::L2M);
        let overlaps = |range: &GfnRange| !range.intersection(block).is_empty();
        self.zaps.range(..time).any(|(_, ranges)| ranges.iter().any(overlaps))
    }

    /// The host checks whether a page was written, while no CPU can use it, and moves it to `pfn`.
    /// By then the page was invalidated, and all that was done through its leaf must be reported.
    fn set_frame(&mut self, area: usize, index: usize, pfn: u64, may_write: bool) {
        let time = self.tick();
        let page = &mut self.areas[area].pages[index];
        assert!(!page.written || page.reported, "frame {:#x} was written, and no zapped leaf reported it", page.pfn);
        if page.pfn != pfn {
            self.freed.insert(page.pfn, time);
        }
        *page = Page { pfn, may_write, nr_writes: page.nr_writes, written: false, reported: false };
    }

    fn fresh_frame(&mut self) -> u64 {
        // Neither the first of a block, nor contiguous with the frame before.
        self.next_pfn += BLOCK;
        self.next_pfn + 77
    }

    /// Assigns contiguous frames to an area.
    pub fn renew(&mut self, area: usize) {
        self.next_pfn += BLOCK;
        let first = self.next_pfn;
        (0..PAGES).for_each(|page| self.set_frame(area, page, first + page as u64, true));
    }

    /// Records where the memslot of an area may be.
    pub fn place(&mut self, area: usize, places: &[u64]) {
        self.areas[area].places = places.to_vec();
    }

    /// Moves a page to another frame, and frees the old one.
    pub fn move_page(&mut self, area: usize, page: usize) {
        let pfn = self.fresh_frame();
        self.set_frame(area, page, pfn, true);
    }

    /// Forbids leaves of more than a page, or allows them.
    pub fn forbid_huge_leaves(&mut self, area: usize, is_of_pages: bool) {
        self.areas[area].is_of_pages = is_of_pages;
    }

    pub fn allow(&mut self, area: usize, page: usize) {
        self.areas[area].pages[page].may_write = true;
    }

    pub fn protect(&mut self, area: usize, page: usize) {
        self.set_frame(area, page, self.areas[area].pages[page].pfn, false);
    }

    pub fn nr_writes(&self, area: usize) -> [u64; PAGES] {
        std::array::from_fn(|page| self.areas[area].pages[page].nr_writes)
    }

    /// A CPU uses `translation` for `gfn`.
    fn use_frame(&mut self, gfn: u64, translation: Translation, access: Access) {
        let pfn = translation.pfn;
        assert_eq!(
            self.nr_invalidations.get(&gfn).copied().unwrap_or(0),
            0,
            "{gfn:#x} is used while it is invalidated"
        );
        let index = (gfn % BLOCK) as usize;
        let area = self.areas.iter_mut().find(|area| area.pages[index].pfn == pfn);
        let area = area.unwrap_or_else(|| panic!("{gfn:#x} maps to frame {pfn:#x}, which was freed"));
        assert!(area.places.contains(&(gfn - index as u64)), "{gfn:#x} maps to {pfn:#x}: {:x?}", area.places);
        let page = &mut area.pages[index];
        if access == Access::Write {
            assert!(page.may_write, "{gfn:#x} is written in frame {pfn:#x}, which the host forbids");
            page.nr_writes += 1;
            page.written = true;
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Translation {
    pfn: u64,
    /// The level of the leaf.
    level: Level,
    writable: bool,
    /// Whether this CPU has cached D of the leaf.
    dirty: bool,
}

/// The translations of one CPU. Never locked across a step.
#[derive(Debug, Default)]
struct Tlb {
    entries: HashMap<u64, Translation>,
    /// The used pages of the block for which a walk is under way, less those that a flush has named
    /// since.
    filling: Vec<u64>,
    /// The level of the leaf that the walk found.
    found: Option<Level>,
}

impl Tlb {
    /// The level of the translation of `gfn` that this CPU has, or is about to have.
    fn level(&self, gfn: u64) -> Option<Level> {
        let filled = self.found.filter(|_| self.filling.contains(&gfn));
        filled.or_else(|| self.entries.get(&gfn).map(|cached| cached.level))
    }
}

/// The used pages of the block of `gfn`.
fn pages_around(gfn: u64) -> impl Iterator<Item = u64> {
    let first = gfn / BLOCK * BLOCK;
    first..first + PAGES as u64
}

pub struct AreaBacking {
    pub area: usize,
    /// The page of the area with which the memslot begins.
    pub first_page: usize,
    pub vm: Weak<TestVm>,
}

pub struct TlbHost {
    base: ShuttleHost,
    memory: Mutex<Memory>,
    tlbs: Vec<Mutex<Tlb>>,
    /// One of this many allocations fails.
    fails_one_in: Option<u64>,
    /// Whether CPUs set A and D.
    sets_bits: bool,
}

impl TlbHost {
    pub fn with_memory<R>(&self, action: impl FnOnce(&mut Memory) -> R) -> R {
        action(&mut self.memory.lock().unwrap())
    }

    /// From now on a write-protected page that is written is never copied.
    pub fn copies_never(&self) {
        self.with_memory(|memory| memory.copies_never = true);
    }

    pub fn wait_for_faults(&self) {
        self.base.wait_for_faults();
    }

    /// Runs `call`, a fault of guest number `index` or a similar call. It may mark pages and zap a
    /// broken PTE in the block of `gfn`.
    pub fn during_call<R>(&self, index: usize, gfn: Gfn, call: impl FnOnce() -> R) -> R {
        zapping(self, &[gfn.block(Level::L2M)], || self.base.during_fault(index, call))
    }

    pub fn live_tables(&self) -> usize {
        self.base.live_tables()
    }

    /// A CPU has found a leaf of `level` for `gfn`. The host must allow that level, and with break
    /// before make no CPU may have one of another level. (What a CPU has cached of a huge leaf
    /// stays valid for the pages that were not invalidated.)
    fn assert_may_be(&self, gfn: u64, level: Level) {
        self.with_memory(|memory| {
            let is_of_pages =
                memory.areas.iter().any(|area| area.is_of_pages && area.places.contains(&(gfn / BLOCK * BLOCK)));
            assert!(level == Level::L4K || !is_of_pages, "{gfn:#x} is in a huge leaf, which the host forbids");
        });
        if !Shape::BREAK_BEFORE_MAKE {
            return;
        }
        for page in pages_around(gfn).filter(|&page| page == gfn || level > Level::L4K) {
            for tlb in &self.tlbs {
                let cached = tlb.lock().unwrap().level(page);
                let is_same = cached.is_none_or(|cached| cached == level);
                assert!(is_same, "{page:#x} is found in a leaf of {level:?}, and was cached of {cached:?}");
            }
        }
    }
}

/// Runs `zap`, which zaps `ranges`.
pub fn zapping<R>(host: &TlbHost, ranges: &[GfnRange], zap: impl FnOnce() -> R) -> R {
    let began = host.with_memory(|memory| {
        let now = memory.tick();
        memory.zaps.insert(now, ranges.to_vec());
        now
    });
    let result = zap();
    host.with_memory(|memory| memory.zaps.remove(&began));
    result
}

/// Invalidates `ranges`, changes memory, and ends the invalidations.
pub fn invalidate(vm: &TestVm, ranges: &[GfnRange], change: impl FnOnce(&mut Memory)) {
    let host = vm.host();
    let invalidate = || ranges.iter().map(|&range| vm.invalidate_range(range).unwrap()).collect::<Vec<_>>();
    let invalidations = zapping(host, ranges, invalidate);
    let is_inside = |gfn: &u64| ranges.iter().any(|range| range.contains(Gfn(*gfn)));
    let frames: Vec<u64> = (0..3 * BLOCK).filter(|gfn| gfn % BLOCK < PAGES as u64).filter(is_inside).collect();
    host.with_memory(|memory| frames.iter().for_each(|&gfn| *memory.nr_invalidations.entry(gfn).or_default() += 1));
    host.base.step();
    host.with_memory(change);
    host.base.step();
    host.with_memory(|memory| frames.iter().for_each(|gfn| *memory.nr_invalidations.get_mut(gfn).unwrap() -= 1));
    drop(invalidations);
}

// SAFETY: page-table pages are those of `base`. A flush drops translations, and waits for accesses
// under way. Frames are numbers.
unsafe impl Host for TlbHost {
    type Backing = AreaBacking;

    fn allocate_table(&self, layout: Layout, node: TableNode, wait: AllocationWait) -> Option<Hpa> {
        // The root is never refused.
        let fails = self.fails_one_in.is_some_and(|period| self.live_tables() != 0 && random(period) == 0);
        if fails { None } else { self.base.allocate_table(layout, node, wait) }
    }

    unsafe fn free_table(&self, table: Hpa, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.base.free_table(table, layout) }
    }

    fn table_ptr(&self, table: Hpa) -> *mut u8 {
        self.base.table_ptr(table)
    }

    fn resolve(&self, backing: &AreaBacking, _gfn: Gfn, page: u64, access: Access) -> Result<Resolved, Unresolved> {
        let (area, index) = (backing.area, backing.first_page + page as usize);
        self.base.step();
        // The frame, if it is shared, so that it may not be written.
        let shared = |memory: &Memory| {
            let page = &memory.areas[area].pages[index];
            (!page.may_write && !memory.copies_never).then_some(page.pfn)
        };
        if access == Access::Write
            && let Some(pfn) = self.with_memory(|memory| shared(memory))
            && random(2) == 0
            && let Some(vm) = backing.vm.upgrade()
        {
            // It is copied, wherever the memslot is by now.
            let places: Vec<_> = PLACES[area].iter().map(|place| GfnRange::new(Gfn(place + index as u64), 1)).collect();
            invalidate(&vm, &places, |memory| {
                if shared(memory) == Some(pfn) {
                    memory.move_page(area, index);
                }
            });
        }
        self.base.step();
        let reads_are_writable = random(2) == 0;
        let answer = self.with_memory(|memory| {
            let area = &mut memory.areas[area];
            // Otherwise the frame is not shared any more. The host allows more than before, and
            // invalidates nothing.
            area.pages[index].may_write |= access == Access::Write;
            let writable = area.pages[index].may_write && (access == Access::Write || reads_are_writable);
            let is_block = !area.is_of_pages
                && area.is_contiguous()
                && (!writable || area.pages.iter().all(|page| page.may_write));
            let max_size = if is_block { PageSize::Size2M } else { PageSize::Size4K };
            Resolved { writable, ..Resolved::memory(Pfn(area.pages[index].pfn), max_size) }
        });
        self.base.step();
        Ok(answer)
    }

    fn leaf_zapped(&self, leaf: ZappedLeaf) {
        let nr_pages = leaf.range.nr_pages().min(PAGES as u64);
        self.with_memory(|memory| {
            for (pfn, gfn) in (leaf.pfn.0..leaf.pfn.0 + nr_pages).zip(leaf.range.start.0..) {
                if let Some(page) =
                    memory.areas.iter_mut().flat_map(|area| &mut area.pages).find(|page| page.pfn == pfn)
                {
                    page.reported |= leaf.dirty;
                } else {
                    // A second report: its call began before another thread freed the frame.
                    let freed = memory.freed[&pfn];
                    assert!(memory.is_zapped(gfn, freed), "a report of a leaf to a freed frame: {leaf:x?}");
                }
            }
        });
    }

    fn flush(&self, ranges: &[GfnRange]) {
        self.base.step();
        let named = |gfn| ranges.iter().any(|range| range.contains(Gfn(gfn)));
        for tlb in &self.tlbs {
            let mut tlb = tlb.lock().unwrap();
            tlb.entries.retain(|&gfn, _| !named(gfn));
            tlb.filling.retain(|&gfn| !named(gfn));
        }
        self.base.wait_for_accesses();
    }

    fn drain_modification_logs(&self, log: &mut dyn FnMut(&[Gpa])) {
        self.base.drain(|| self.flush(&[]), log);
    }

    fn yield_now(&self) {
        shuttle::thread::yield_now();
    }

    fn timestamp_ns(&self) -> u64 {
        0
    }

    fn parking(&self) -> Option<&dyn Park> {
        self.base.parking()
    }
}

/// The choices for a VM of this world.
pub struct Choices {
    pub config: Config,
    pub fails_one_in: Option<u64>,
}

pub fn new_vm(choices: &Choices, nr_guests: usize) -> Arc<TestVm> {
    let host = TlbHost {
        base: ShuttleHost::new(nr_guests, choices.config.dirty_tracking),
        memory: Mutex::default(),
        tlbs: (0..nr_guests).map(|_| Mutex::default()).collect(),
        fails_one_in: choices.fails_one_in,
        sets_bits: choices.config.access_tracking == AccessTracking::AccessedBit,
    };
    host.with_memory(|memory| [MOVING, STAYING].map(|area| memory.renew(area)));
    Arc::new(Vm::new(host, choices.config).unwrap())
}

/// Whether some CPU can write `gfn`, by the page tables or its TLB, without an entry in the dirty
/// log.
pub fn is_writable_unlogged(vm: &TestVm, config: &Config, gfn: u64) -> bool {
    let is_cached = |tlb: &Mutex<Tlb>| tlb.lock().unwrap().entries.get(&gfn).is_some_and(|it| it.writable && it.dirty);
    find(vm, gfn).is_some_and(|found| found.is_writable_unlogged::<Shape>(config.dirty_tracking))
        || vm.host().tlbs.iter().any(is_cached)
}

/// The region of an area's memslot, whose number is the area's. `start` is its first frame; `None`
/// is a deletion.
pub fn slot(
    area: usize,
    flags: MemoryRegionFlags,
    start: Option<u64>,
    new: Option<AreaBacking>,
) -> MemoryRegion<AreaBacking> {
    let memory_size = start.map_or(0, |_| BLOCK * PAGE_SIZE);
    let guest_phys_addr = Gpa(start.unwrap_or(0) * PAGE_SIZE);
    MemoryRegion { slot: area as u32, flags, guest_phys_addr, memory_size, backing: new, userfault_bitmap: None }
}

pub struct Guest {
    pub vm: Arc<TestVm>,
    vcpu: Vcpu<TlbHost, Shape>,
    index: usize,
}

impl Guest {
    pub fn new(vm: &Arc<TestVm>, index: usize) -> Guest {
        Guest { vm: Arc::clone(vm), vcpu: vm.create_vcpu().unwrap(), index }
    }

    /// Tries an access once: it takes effect, or faults.
    pub fn access(&mut self, gfn: u64, access: Access) {
        let host = self.vm.host();
        let is_done = host.base.during_access(self.index, || {
            let Some(translation) = self.translate(gfn, access) else { return false };
            host.base.step();
            host.with_memory(|memory| memory.use_frame(gfn, translation, access));
            true
        });
        if is_done {
            return;
        }
        let vcpu = &mut self.vcpu;
        if host.base.empty_full_log(self.index, &mut |written| vcpu.log_modifications(written)).is_err() {
            return;
        }
        let fault = || vcpu.handle_fault(Gpa(gfn * PAGE_SIZE), access);
        match host.during_call(self.index, Gfn(gfn), fault) {
            Ok(Outcome::Resume | Outcome::Exit(_)) => {}
            Err(FaultError::OutOfMemory) if host.fails_one_in.is_some() => {}
            Err(error) => panic!("fault at frame {gfn:#x} failed: {error}"),
        }
    }

    /// Prefaults a few pages from `gfn` on.
    pub fn prefault(&mut self, gfn: u64, nr_pages: u64, access: Access) {
        let host = self.vm.host();
        let vcpu = &mut self.vcpu;
        let prefault = || vcpu.pre_fault_memory(Gpa(gfn * PAGE_SIZE), nr_pages * PAGE_SIZE, access);
        match host.during_call(self.index, Gfn(gfn), prefault) {
            Ok(_) | Err(FaultError::Busy { .. } | FaultError::NoMemslot { .. }) => {}
            Err(FaultError::OutOfMemory) if host.fails_one_in.is_some() => {}
            Err(error) => panic!("prefault at frame {gfn:#x} failed: {error}"),
        }
    }

    /// The translation for an access, from the TLB, or from a walk if the TLB has none that allows
    /// it.
    fn translate(&self, gfn: u64, access: Access) -> Option<Translation> {
        let (host, tlb) = (self.vm.host(), &self.vm.host().tlbs[self.index]);
        let cached = tlb.lock().unwrap().entries.get(&gfn).copied();
        if let Some(cached) = cached
            && (access != Access::Write || (cached.writable && cached.dirty))
        {
            return Some(cached);
        }
        {
            let mut tlb = tlb.lock().unwrap();
            tlb.entries.remove(&gfn);
            tlb.filling = pages_around(gfn).collect();
        }
        host.base.step();
        let found = self.walk(gfn, access);
        host.base.step();
        let mut tlb = tlb.lock().unwrap();
        tlb.found = None;
        let filling = std::mem::take(&mut tlb.filling);
        if let Some(found) = found
            && filling.contains(&gfn)
        {
            for page in filling.into_iter().filter(|&page| page == gfn || found.level > Level::L4K) {
                tlb.entries.insert(page, Translation { pfn: found.pfn + page - gfn, ..found });
            }
        }
        found
    }

    /// What hardware finds for an access. Sets A and D, if these CPUs do.
    fn walk(&self, gfn: u64, access: Access) -> Option<Translation> {
        let host = self.vm.host();
        let (mut table, mut level) = (self.vm.root(), Shape::ROOT_LEVEL);
        let mut allowed = u64::MAX;
        loop {
            let nr_entries = if level == Shape::ROOT_LEVEL { Shape::MAX_ROOT_ENTRIES } else { Shape::TABLE_ENTRIES };
            let index = (gfn / level.nr_pages()) as usize % nr_entries;
            // SAFETY: inside a page-table page, whose memory stays until the host is dropped.
            let cell = unsafe { &*host.table_ptr(table).cast::<AtomicU64>().add(index) };
            let entry = Pte(cell.load(Ordering::SeqCst));
            if !Shape::is_present(entry) {
                return None;
            }
            // Each PTE on the way must allow a write.
            allowed &= entry.0;
            if !Shape::is_leaf(entry, level) {
                table = Shape::address(entry, level);
                level = Level(level.0 - 1);
                continue;
            }
            host.assert_may_be(gfn, level);
            host.tlbs[self.index].lock().unwrap().found = Some(level);
            let writable = allowed & Shape::WRITABLE == Shape::WRITABLE;
            let writes = access == Access::Write;
            if writes && !writable {
                return None;
            }
            let used = entry.0 | Shape::ACCESSED | if writes { Shape::DIRTY } else { 0 };
            if (used ^ entry.0) & Shape::DIRTY != 0 && host.sets_bits {
                host.base.log_modification(self.index, gfn).ok()?;
            }
            if host.sets_bits
                && used != entry.0
                && cell.compare_exchange(entry.0, used, Ordering::SeqCst, Ordering::SeqCst).is_err()
            {
                // Starts over at the root.
                host.tlbs[self.index].lock().unwrap().found = None;
                (table, level, allowed) = (self.vm.root(), Shape::ROOT_LEVEL, u64::MAX);
                continue;
            }
            let pfn = Shape::address(entry, level).pfn().0 + gfn % level.nr_pages();
            let dirty = !host.sets_bits || used & Shape::DIRTY != 0;
            return Some(Translation { pfn, level, writable, dirty });
        }
    }
}
