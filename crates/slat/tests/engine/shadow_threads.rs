//! Shadow paging on real threads. vCPUs edit their own page tables through a window onto them, as a
//! kernel does. They flush what they have edited, and check each access against their page tables.
//! One CPU edits page tables that all use, with shootdowns by messages. A host moves pages, page
//! tables among them; copies what the dirty log reports; and ages. So few shadow pages are allowed
//! that some are always being evicted. CPUs cache all that they may: `support/shadow_cpu.rs`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::common::LONGEST_WAIT;
use crate::common::random::Random;
use crate::shadow_cpu::{A, ADDRESS, Cpu, D, G, P, TestVm, U, W, index, move_page, new_vm, region};
use slat::baselines::Locking;
use slat::dirty::DirtyTracking;
use slat::shadow::{ShadowPaging, ShadowStrategy};
use slat::{Access, Config, Exit, Gfn, GfnRange, MemoryRegionFlags, PageSize};

const NR_CPUS: usize = 3;
const NR_SPACES: usize = 3;
const NR_PAGES: u64 = 1024;
const NR_SPARE: u64 = 512;
/// Lowest page tables of each space, and pages that each maps.
const NR_TABLES: usize = 10;
const NR_SLOTS: usize = 4;
const NR_SHARED: usize = 8;
/// Shared places in one page table.
const SHARED_PER_TABLE: usize = 4;
/// Pages that a shared place maps in turn.
const NR_TURNS: u64 = 3;

const KEEP: u64 = 1 << 63;
/// Types of INVPCID.
const ONE_ADDRESS: u64 = 0;
const ONE_CONTEXT: u64 = 1;
const ALL: u64 = 2;
const ALL_BUT_GLOBAL: u64 = 3;

/// The address of a CPU's own page: page table `t`, place `j`.
fn own_va(t: usize, j: usize) -> u64 {
    1 << 39 | 5 << 30 | (t as u64) << 21 | (j as u64) << 12
}

/// Where a CPU maps its page table number `nth`, of both spaces.
fn window_va(nth: usize) -> u64 {
    2 << 39 | (nth as u64) << 12
}

fn shared_va(x: usize) -> u64 {
    3 << 39 | ((x / SHARED_PER_TABLE) as u64) << 21 | ((x % SHARED_PER_TABLE) as u64) << 12
}

/// Pages of the guest by purpose.
const FIRST_OF_TABLES: u64 = 8;
const TABLES_OF_A_SPACE: u64 = 16;
const FIRST_SHARED_TABLE: u64 = 200;
const FIRST_SHARED_PAGE: u64 = 520;
const FIRST_PRIVATE_PAGE: u64 = 600;
const NR_PRIVATE_PAGES: u64 = 48;

fn shared_page(x: usize, version: u64) -> u64 {
    FIRST_SHARED_PAGE + x as u64 * NR_TURNS + version % NR_TURNS
}

fn shared_table(x: usize) -> u64 {
    FIRST_SHARED_TABLE + 2 + (x / SHARED_PER_TABLE) as u64
}

/// The page tables of a space: the top one, one of each level below, the lowest ones; and the three
/// of the window.
fn table_of(cpu: usize, space: usize, nth: usize) -> u64 {
    FIRST_OF_TABLES + (cpu * NR_SPACES + space) as u64 * TABLES_OF_A_SPACE + nth as u64
}

const TOP: usize = 0;
const LEVEL_3: usize = 1;
const LEVEL_2: usize = 2;
const LOWEST: usize = 3;
/// In space 0, for both.
const WINDOW: usize = LOWEST + NR_TABLES;

/// State that all threads share.
struct Common {
    vm: Arc<TestVm>,
    is_over: AtomicBool,
    barrier: Barrier,
    /// For each shared place, how many edits of it have begun.
    latest: [AtomicU64; NR_SHARED],
    /// How many CPUs have yet to flush it.
    nr_waiting: [AtomicUsize; NR_SHARED],
    messages: [Mutex<Vec<(usize, u64)>>; NR_CPUS],
}

/// The contents of a lowest page table: page and rights.
type Leaves = [Option<(u64, u64)>; NR_SLOTS];

/// One CPU of the guest, with the state of its kernel.
struct Kernel<'c> {
    number: usize,
    common: &'c Common,
    cpu: Cpu,
    rng: Random,
    current: usize,
    /// The contents of the page tables of each space.
    leaves: [[Leaves; NR_TABLES]; NR_SPACES],
    /// Which page table is linked where.
    links: [[usize; NR_TABLES]; NR_SPACES],
    /// Its space must be flushed at the switch to it.
    must_flush: [bool; NR_SPACES],
    /// The last value that it has written to its own word of each page.
    written: HashMap<u64, u64>,
    nr_writes: u64,
    /// The version of each shared place that it has flushed.
    flushed: [u64; NR_SHARED],
}

impl<'c> Kernel<'c> {
    fn new(common: &'c Common, number: usize, seed: u64) -> Kernel<'c> {
        let host = common.vm.host();
        let entry = |table: u64| table << 12 | P | W | U;
        for space in 0..NR_SPACES {
            let table = |nth| table_of(number, space, nth);
            let window = |nth| table_of(number, 0, WINDOW + nth);
            host.store(table(TOP), 1, entry(table(LEVEL_3)));
            host.store(table(LEVEL_3), index(own_va(0, 0), 3), entry(table(LEVEL_2)));
            for t in 0..NR_TABLES {
                host.store(table(LEVEL_2), t as u64, entry(table(LOWEST + t)));
            }
            host.store(table(TOP), 2, entry(window(0)));
            host.store(table(TOP), 3, entry(FIRST_SHARED_TABLE));
            for nth in 0..TABLES_OF_A_SPACE as usize {
                let place = space * TABLES_OF_A_SPACE as usize + nth;
                host.store(window(2), index(window_va(place), 1), entry(table(nth)) | G);
            }
            for nth in 0..4 {
                let place = NR_SPACES * TABLES_OF_A_SPACE as usize + nth;
                host.store(window(2), index(window_va(place), 1), entry(FIRST_SHARED_TABLE + nth as u64));
            }
        }
        host.store(table_of(number, 0, WINDOW), 0, entry(table_of(number, 0, WINDOW + 1)));
        host.store(table_of(number, 0, WINDOW + 1), 0, entry(table_of(number, 0, WINDOW + 2)));
        let mut cpu = Cpu::new(&common.vm);
        cpu.long_mode(table_of(number, 0, TOP) << 12);
        Kernel {
            number,
            common,
            cpu,
            rng: Random::new(seed),
            current: 0,
            leaves: Default::default(),
            links: std::array::from_fn(|_| std::array::from_fn(|t| t)),
            must_flush: std::array::from_fn(|space| space != 0),
            written: HashMap::new(),
            nr_writes: 0,
            flushed: [0; NR_SHARED],
        }
    }

    fn pick(&mut self, end: usize) -> usize {
        self.rng.below(end as u64) as usize
    }

    fn pcid(space: usize) -> u64 {
        space as u64
    }

    fn cr3(&self, space: usize) -> u64 {
        table_of(self.number, space, TOP) << 12 | Kernel::pcid(space)
    }

    fn step(&mut self) {
        match self.rng.below(20) {
            0..8 => self.touch_own(),
            8..11 => self.edit(),
            11 => self.relink(),
            12 => self.switch(),
            13..18 => self.touch_shared(),
            18 => self.edit_shared(),
            _ => self.flush_for_nothing(),
        }
        self.shoot_down();
    }

    /// An access to one of its own pages must have the outcome that its page tables define.
    fn touch_own(&mut self) {
        let (t, j) = (self.pick(NR_TABLES), self.pick(NR_SLOTS));
        let va = own_va(t, j);
        let table = self.links[self.current][t];
        let expected = self.leaves[self.current][table][j];
        let writes = self.rng.below(2) == 0;
        let what = format!("cpu {} space {} {va:#x}", self.number, self.current);
        let found = if writes { self.write(va) } else { self.read(va) };
        let error_code = 2 * u32::from(writes);
        match expected {
            None => {
                assert!(
                    matches!(found, Err(Exit::PageFault { error_code: found, .. }) if found == error_code),
                    "{what}: {found:?}"
                );
            }
            Some((_, bits)) if writes && bits & W == 0 => {
                assert!(matches!(found, Err(Exit::PageFault { error_code: 3, .. })), "{what}: {found:?}");
            }
            Some((gfn, _)) => {
                assert_eq!(found, Ok(gfn), "{what}");
                // The page tables record what the CPU has done.
                let marks = if writes { A | D } else { A };
                let entry = self.cpu.load(self.place(self.current, LOWEST + table) + j as u64 * 8).unwrap();
                assert_eq!((entry & ADDRESS, entry & marks), (gfn << 12, marks), "{what}");
            }
        }
    }

    /// Reads at `va`, and returns the number of the page. The CPU's own word there must hold what
    /// it has written.
    fn read(&mut self, va: u64) -> Result<u64, Exit> {
        let own = self.number as u64;
        let (gfn, word) =
            self.cpu.access(va, Access::Read, |page| (page.gfn(), page.word(own).load(Ordering::SeqCst)))?;
        assert_eq!(word, self.written.get(&gfn).copied().unwrap_or(0), "cpu {own}: page {gfn:#x} at {va:#x}");
        Ok(gfn)
    }

    fn write(&mut self, va: u64) -> Result<u64, Exit> {
        let own = self.number as u64;
        self.nr_writes += 1;
        let value = self.nr_writes;
        let gfn = self.cpu.access(va, Access::Write, |page| {
            page.word(own).store(value, Ordering::SeqCst);
            page.gfn()
        })?;
        self.written.insert(gfn, value);
        Ok(gfn)
    }

    /// Where it maps the page table.
    fn place(&self, space: usize, nth: usize) -> u64 {
        window_va(space * TABLES_OF_A_SPACE as usize + nth)
    }

    /// Writes some PTEs of one lowest page table, and flushes.
    fn edit(&mut self) {
        let (space, table) = (self.pick(NR_SPACES), self.pick(NR_TABLES));
        let mut edited = Vec::new();
        for _ in 0..=self.rng.below(2) {
            let j = self.pick(NR_SLOTS);
            let gfn = match self.rng.below(8) {
                0 => shared_page(self.pick(NR_SHARED), self.rng.below(NR_TURNS)),
                _ => FIRST_PRIVATE_PAGE + self.number as u64 * NR_PRIVATE_PAGES + self.rng.below(NR_PRIVATE_PAGES),
            };
            let bits = P | [0, W][self.pick(2)] | [0, A, A | D][self.pick(3)];
            let leaf = (self.rng.below(4) != 0).then_some((gfn, bits));
            let entry = leaf.map_or(0, |(gfn, bits)| gfn << 12 | bits);
            self.cpu.store(self.place(space, LOWEST + table) + j as u64 * 8, entry).unwrap();
            self.leaves[space][table][j] = leaf;
            edited.push(j);
        }
        let at: Vec<usize> = (0..NR_TABLES).filter(|&t| self.links[space][t] == table).collect();
        let addresses = at.iter().flat_map(|&t| edited.iter().map(move |&j| own_va(t, j)));
        if self.rng.below(3) == 0 {
            self.flush(space);
        } else {
            for va in addresses {
                if space == self.current {
                    self.cpu.invlpg(va);
                } else {
                    self.cpu.invpcid(ONE_ADDRESS, Kernel::pcid(space), va);
                }
            }
        }
    }

    /// Exchanges two lowest page tables, or links one in several places, and flushes.
    fn relink(&mut self) {
        let space = self.pick(NR_SPACES);
        let (t, table) = (self.pick(NR_TABLES), self.pick(NR_TABLES));
        let entry = table_of(self.number, space, LOWEST + table) << 12 | P | W | U;
        self.cpu.store(self.place(space, LEVEL_2) + t as u64 * 8, entry).unwrap();
        self.links[space][t] = table;
        self.flush(space);
    }

    /// Flushes a whole space, by one of several instructions.
    fn flush(&mut self, space: usize) {
        match self.rng.below(5) {
            0 if space == self.current => self.cpu.load_cr3(self.cr3(space)),
            0 => self.must_flush[space] = true,
            1 | 2 => self.cpu.invpcid(ONE_CONTEXT, Kernel::pcid(space), 0),
            3 => self.cpu.invpcid(ALL, 0, 0),
            _ => self.cpu.invpcid(ALL_BUT_GLOBAL, 0, 0),
        }
    }

    fn flush_for_nothing(&mut self) {
        let (t, j) = (self.pick(NR_TABLES), self.pick(NR_SLOTS));
        self.cpu.invlpg(own_va(t, j));
    }

    fn switch(&mut self) {
        let space = self.pick(NR_SPACES);
        let must_flush = std::mem::take(&mut self.must_flush[space]);
        self.cpu.load_cr3(self.cr3(space) | if must_flush { 0 } else { KEEP });
        self.current = space;
    }

    /// A shared place maps the page of the version that was flushed last, or of a later one.
    fn touch_shared(&mut self) {
        let x = self.pick(NR_SHARED);
        let before = self.flushed[x];
        let found = if self.rng.below(2) == 0 { self.write(shared_va(x)) } else { self.read(shared_va(x)) }.unwrap();
        let after = self.common.latest[x].load(Ordering::SeqCst);
        assert!(
            (before..=after).any(|version| shared_page(x, version) == found),
            "cpu {}: shared place {x} is page {found:#x}, versions {before} to {after}",
            self.number
        );
    }

    /// Edits a shared place of its own, if all CPUs have flushed the version before.
    fn edit_shared(&mut self) {
        let x = self.pick(NR_SHARED);
        let common = self.common;
        if x % NR_CPUS != self.number || common.nr_waiting[x].load(Ordering::SeqCst) != 0 {
            return;
        }
        let version = common.latest[x].fetch_add(1, Ordering::SeqCst) + 1;
        let entry = shared_page(x, version) << 12 | P | W | [0, G][self.pick(2)];
        let nth = NR_SPACES * TABLES_OF_A_SPACE as usize + (shared_table(x) - FIRST_SHARED_TABLE) as usize;
        self.cpu.store(window_va(nth) + (x % SHARED_PER_TABLE) as u64 * 8, entry).unwrap();
        self.flush_shared(x, version);
        common.nr_waiting[x].store(NR_CPUS - 1, Ordering::SeqCst);
        for other in (0..NR_CPUS).filter(|&other| other != self.number) {
            common.messages[other].lock().unwrap().push((x, version));
        }
    }

    /// In all spaces, as it may be global or not.
    fn flush_shared(&mut self, x: usize, version: u64) {
        self.cpu.invlpg(shared_va(x));
        for space in (0..NR_SPACES).filter(|&space| space != self.current) {
            self.cpu.invpcid(ONE_ADDRESS, Kernel::pcid(space), shared_va(x));
        }
        self.flushed[x] = version;
    }

    fn shoot_down(&mut self) {
        let messages = std::mem::take(&mut *self.common.messages[self.number].lock().unwrap());
        for (x, version) in messages {
            self.flush_shared(x, version);
            self.common.nr_waiting[x].fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// The host's copy of each page.
type Copies = Vec<Vec<u64>>;

fn copy_dirty(vm: &TestVm, copies: &mut Copies) {
    let mut bitmap = [0_u64; NR_PAGES as usize / 64];
    vm.get_dirty_log(0, &mut bitmap).unwrap();
    for gfn in (0..NR_PAGES).filter(|gfn| bitmap[*gfn as usize / 64] >> (gfn % 64) & 1 != 0) {
        copies[gfn as usize] = vm.host().copy_of(gfn);
    }
}

fn is_used(gfn: u64) -> bool {
    (FIRST_OF_TABLES..FIRST_SHARED_TABLE + 4).contains(&gfn) || gfn >= FIRST_SHARED_PAGE
}

fn run(strategy: ShadowStrategy, protection: DirtyTracking, seed: u64) {
    const NR_ROUNDS: usize = 4;
    const ROUND: Duration = Duration::from_millis(120);
    /// Of each CPU in a round, on a slow machine, too.
    const MIN_STEPS: u32 = 400;
    let shadow = ShadowPaging { strategy, previous_roots: 3, max_pages: slat::shadow::ShadowPaging::MIN_PAGES };
    // As the hypervisor of 2018: under one lock.
    let locking = if strategy == ShadowStrategy::Baseline { Locking::Exclusive } else { Locking::None };
    let config = Config::default().with_dirty_tracking(protection).with_locking(locking);
    let vm = new_vm(config, shadow, NR_PAGES, NR_SPARE, MemoryRegionFlags::empty());
    let host = vm.host();
    let common = Common {
        vm: Arc::clone(&vm),
        is_over: AtomicBool::new(false),
        barrier: Barrier::new(NR_CPUS + 3),
        latest: std::array::from_fn(|_| AtomicU64::new(0)),
        nr_waiting: std::array::from_fn(|_| AtomicUsize::new(0)),
        messages: std::array::from_fn(|_| Mutex::default()),
    };
    host.store(FIRST_SHARED_TABLE, 0, (FIRST_SHARED_TABLE + 1) << 12 | P | W | U);
    for x in 0..NR_SHARED {
        let table = shared_table(x);
        host.store(FIRST_SHARED_TABLE + 1, (x / SHARED_PER_TABLE) as u64, table << 12 | P | W | U);
        host.store(table, (x % SHARED_PER_TABLE) as u64, shared_page(x, 0) << 12 | P | W);
    }
    let mut kernels: Vec<Kernel<'_>> =
        (0..NR_CPUS).map(|number| Kernel::new(&common, number, seed + 977 * number as u64)).collect();
    vm.set_user_memory_region(region(NR_PAGES, MemoryRegionFlags::LOG_DIRTY_PAGES, None)).unwrap();
    let mut copies: Copies = (0..NR_PAGES).map(|gfn| host.copy_of(gfn)).collect();
    std::thread::scope(|scope| {
        let common = &common;
        for kernel in &mut kernels {
            scope.spawn(move || {
                let _alarm = Alarm(&common.is_over);
                for _ in 0..NR_ROUNDS {
                    common.barrier.wait();
                    let mut nr_steps = 0;
                    while nr_steps < MIN_STEPS || !common.is_over.load(Ordering::SeqCst) {
                        kernel.step();
                        nr_steps += 1;
                    }
                    common.barrier.wait();
                    common.barrier.wait();
                }
            });
        }
        let vm = &vm;
        scope.spawn(move || {
            let _alarm = Alarm(&common.is_over);
            let mut rng = Random::new(seed ^ 0x5555);
            for _ in 0..NR_ROUNDS {
                common.barrier.wait();
                while !common.is_over.load(Ordering::SeqCst) {
                    let gfn = rng.below(NR_PAGES);
                    // Page tables less often: a move zaps all that was shadowed of one.
                    if !is_used(gfn) || gfn < FIRST_SHARED_PAGE && rng.below(4) != 0 {
                        continue;
                    }
                    match rng.below(20) {
                        // Several at once, and back as they were.
                        0 if gfn >= FIRST_SHARED_PAGE => {
                            drop(vm.invalidate_range(GfnRange::new(Gfn(gfn), (NR_PAGES - gfn).min(70))).unwrap())
                        }
                        1 => drop(vm.recover_range(GfnRange::new(Gfn(0), NR_PAGES)).unwrap()),
                        2 => drop(vm.split_range(GfnRange::new(Gfn(0), NR_PAGES), PageSize::Size4K).unwrap()),
                        _ => move_page(vm, gfn),
                    }
                    std::thread::sleep(Duration::from_micros(50));
                }
                common.barrier.wait();
                common.barrier.wait();
            }
        });
        let copies = &mut copies;
        scope.spawn(move || {
            let _alarm = Alarm(&common.is_over);
            let mut rng = Random::new(seed ^ 0x9999);
            for round in 0..NR_ROUNDS {
                common.barrier.wait();
                while !common.is_over.load(Ordering::SeqCst) {
                    copy_dirty(vm, copies);
                    if rng.below(2) == 0 {
                        vm.age_range(GfnRange::new(Gfn(rng.below(NR_PAGES / 2)), 1 + rng.below(NR_PAGES / 2))).unwrap();
                    }
                    std::thread::sleep(Duration::from_micros(300));
                }
                common.barrier.wait();
                // No CPU runs: one harvest is exact.
                copy_dirty(vm, copies);
                for gfn in 0..NR_PAGES {
                    assert!(
                        copies[gfn as usize] == vm.host().copy_of(gfn),
                        "{strategy:?} {round}: page {gfn:#x} was lost"
                    );
                }
                assert!(vm.stats().shadow_pages <= 64);
                common.barrier.wait();
            }
        });
        // The round is timed here, so that it does not wait for a thread that has failed.
        for round in 0..NR_ROUNDS {
            common.is_over.store(false, Ordering::SeqCst);
            common.barrier.wait();
            let start = Instant::now();
            // The last round goes on until every event was observed, which may take longer on a
            // busy machine.
            let lacks_some = || round + 1 == NR_ROUNDS && !has_seen_all(&vm.stats(), strategy);
            let goes_on = || start.elapsed() < ROUND || (start.elapsed() < LONGEST_WAIT && lacks_some());
            while goes_on() && !common.is_over.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            common.is_over.store(true, Ordering::SeqCst);
            common.barrier.wait();
            common.barrier.wait();
        }
    });
    let stats = vm.stats();
    assert!(has_seen_all(&stats, strategy), "{strategy:?}: some event did not occur in {LONGEST_WAIT:?}: {stats:?}");
    drop(kernels);
    assert_eq!((vm.stats().shadow_leaves(), vm.stats().shadow_pages), (0, 0), "{strategy:?}");
    let mut gone = region(NR_PAGES, MemoryRegionFlags::empty(), None);
    gone.memory_size = 0;
    vm.set_user_memory_region(gone).unwrap();
    vm.reclaim();
    assert_eq!(vm.stats().live_tables(), vm.host().nr_live_tables() as u64, "{strategy:?}");
}

/// Whether every event that these tests need has happened.
fn has_seen_all(stats: &slat::stats::Stats, strategy: ShadowStrategy) -> bool {
    let has_hit = stats.root_hits != 0 || strategy == ShadowStrategy::Baseline;
    let has_synchronized = stats.shadow_evictions != 0 && stats.unsyncs != 0;
    stats.emulated_writes != 0 && stats.guest_page_faults != 0 && has_hit && has_synchronized
}

/// Ends the process if a thread has failed, since the other threads wait for it at the barrier.
struct Alarm<'a>(&'a AtomicBool);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::SeqCst);
            std::process::abort();
        }
    }
}

#[test]
fn all_operations_at_once_with_the_baseline() {
    run(ShadowStrategy::Baseline, DirtyTracking::WriteProtect, 0x1234_5678);
}

#[test]
fn all_operations_at_once_with_a_root_cache() {
    run(ShadowStrategy::RootCache, DirtyTracking::WriteProtect, 0x2345_6789);
    run(ShadowStrategy::RootCache, DirtyTracking::WriteProtectLeaves, 0x3456_789a);
}

#[test]
fn all_operations_at_once_with_roots_by_pcid() {
    run(ShadowStrategy::RootsByPcid, DirtyTracking::WriteProtect, 0x5678_9abc);
}

#[test]
fn all_operations_at_once_with_tables_for_each_pcid() {
    run(ShadowStrategy::PcidTagged, DirtyTracking::WriteProtect, 0x4567_89ab);
}
