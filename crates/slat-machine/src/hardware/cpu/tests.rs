//! The CPU over page tables that the test builds on demand: one flat mapping of 4 KiB pages in NPT
//! format.
//!
//! Tests that count use the waiting flush: a restartable access begins again when its thread is
//! preempted.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use slat::format::Npt;
use slat::{Exit, Gfn, GfnRange, PageSize};

use super::*;
use crate::hardware::commit::{Defect, FlushDomain, FlushMethod};
use crate::hardware::walk::guest::GuestFault;
use crate::hardware::walk::tests::Page;
use crate::memory::{Backing, BackingKind};

/// Guest memory and page tables, shared by CPUs. The first 512 pages of guest-physical memory can
/// be mapped.
pub(super) struct Memory {
    /// Four from the root down, and one above them for roots of level 5.
    pub(super) tables: [Page; 5],
    pub(super) pages: Vec<Page>,
}

impl Memory {
    pub(super) fn new(nr_pages: usize) -> Arc<Memory> {
        let memory = Arc::new(Memory {
            tables: std::array::from_fn(|_| Page::new()),
            pages: (0..nr_pages).map(|_| Page::new()).collect(),
        });
        for level in 0..3 {
            memory.tables[level].0[0].store(memory.tables[level + 1].hpa().0 | 7, Ordering::Relaxed);
        }
        memory
    }

    pub(super) fn leaf(&self, gfn: u64) -> &AtomicU64 {
        &self.tables[3].0[gfn as usize]
    }

    pub(super) fn word(&self, page: usize, word: usize) -> u64 {
        self.pages[page].0[word].load(Ordering::Relaxed)
    }
}

/// Maps guest page n to memory page n, writable if the fault was a write.
struct Flat(Arc<Memory>);

impl FaultHandler for Flat {
    fn handle_fault(&mut self, Fault { gpa, access, .. }: Fault) -> Result<Outcome, slat::error::FaultError> {
        let gfn = gpa.gfn().0;
        let Some(page) = self.0.pages.get(gfn as usize) else {
            return Ok(Outcome::Exit(Exit::Mmio { gpa, access }));
        };
        let writable = if access == Access::Write { 2 } else { 0 };
        self.0.leaf(gfn).store(page.hpa().0 | 5 | writable, Ordering::Release);
        Ok(Outcome::Resume)
    }
}

/// Returns "resume" and does nothing.
pub(super) struct Idle;

impl FaultHandler for Idle {
    fn handle_fault(&mut self, _: Fault) -> Result<Outcome, slat::error::FaultError> {
        Ok(Outcome::Resume)
    }
}

fn cpu(memory: &Arc<Memory>, domain: &Arc<FlushDomain>) -> Cpu<Flat, Npt> {
    Cpu::new(Flat(Arc::clone(memory)), Port::new(domain), 1, memory.tables[0].hpa(), Geometry::default())
}

#[test]
fn reads_and_writes_through_faults_and_the_tlb() {
    let memory = Memory::new(8);
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::waiting()));
    assert_eq!(cpu.read(Gva(0x1008)), Ok(0));
    assert_eq!(
        cpu.counters(),
        CpuCounters {
            nr_accesses: 1,
            nr_reads: 1,
            nr_tlb_misses: 2,
            nr_walks: 2,
            nr_faults: 1,
            ..CpuCounters::default()
        }
    );
    assert_eq!(cpu.read(Gva(0x1010)), Ok(0));
    assert_eq!(cpu.counters().nr_walks, 2, "from the TLB");
    // Mapped read-only: the write faults once more.
    assert_eq!(cpu.write(Gva(0x1008), 77), Ok(()));
    assert_eq!(cpu.counters().nr_faults, 2);
    assert_eq!(memory.word(1, 1), 77);
    assert_eq!(cpu.read(Gva(0x1008)), Ok(77));
    assert_eq!(cpu.write(Gva(0x1010), 78), Ok(()));
    assert_eq!(cpu.counters().nr_walks, 4, "from the TLB");
}

#[test]
fn a_write_through_a_read_filled_entry_sets_the_dirty_bit() {
    let memory = Memory::new(2);
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::waiting()));
    memory.leaf(0).store(memory.pages[0].hpa().0 | 7, Ordering::Relaxed);
    assert_eq!(cpu.read(Gva(0)), Ok(0));
    assert_eq!(memory.leaf(0).load(Ordering::Relaxed) & (1 << 6), 0);
    assert_eq!(cpu.write(Gva(0), 1), Ok(()));
    assert_eq!(memory.leaf(0).load(Ordering::Relaxed) & (1 << 6), 1 << 6);
    assert_eq!(cpu.counters().nr_faults, 0);
}

#[test]
fn a_missing_flush_is_detected() {
    let memory = Memory::new(2);
    let domain = Arc::new(FlushDomain::waiting());
    let mut cpu = cpu(&memory, &domain);
    assert_eq!(cpu.write(Gva(0), 1), Ok(()));
    memory.leaf(0).store(0, Ordering::Relaxed);
    assert_eq!(cpu.write(Gva(0), 2), Ok(()), "the TLB still has it");
    assert_eq!(cpu.counters().nr_faults, 1);
    domain.flush(&[page(1)]);
    assert_eq!(cpu.write(Gva(0), 3), Ok(()), "and a flush of another page does not help");
    assert_eq!(cpu.counters().nr_faults, 1);
    domain.flush(&[page(0)]);
    assert_eq!(cpu.write(Gva(0), 4), Ok(()));
    assert_eq!(cpu.counters().nr_faults, 2);
}

pub(super) fn page(gfn: u64) -> GfnRange {
    GfnRange::new(Gfn(gfn), 1)
}

/// The first of four guest pages that [`cpu_with_paging`] maps one by one, from address 0 on with
/// paging on.
const FIRST_DATA: u64 = 4;

/// A CPU whose guest reaches data page n from [`FIRST_DATA`] on at the address of [`address`]. The
/// guest's page tables are in pages 0 to 3.
fn cpu_with_paging(memory: &Arc<Memory>, domain: &Arc<FlushDomain>, paging: Paging) -> Cpu<Flat, Npt> {
    let mut cpu = cpu(memory, domain);
    if paging == Paging::TwoDimensional {
        for level in 0..3 {
            assert_eq!(cpu.write(Gva(level << 12), (level + 1) << 12 | 3), Ok(()));
        }
        for n in 0..4 {
            assert_eq!(cpu.write(Gva(3 << 12 | n << 3), (FIRST_DATA + n) << 12 | 3), Ok(()));
        }
        cpu.set_paging(paging);
    }
    cpu
}

fn address(paging: Paging, n: u64) -> Gva {
    match paging {
        Paging::Off => Gva((FIRST_DATA + n) << 12),
        Paging::TwoDimensional => Gva(n << 12),
    }
}

const PAGINGS: [Paging; 2] = [Paging::Off, Paging::TwoDimensional];

/// The counts of the CPU while it writes to each of the four data pages.
fn write_all(cpu: &mut Cpu<Flat, Npt>) -> CpuCounters {
    let before = cpu.counters();
    for n in 0..4 {
        assert_eq!(cpu.write(address(cpu.paging, n), n), Ok(()));
    }
    cpu.counters().since(before)
}

#[test]
fn a_flush_drops_its_ranges_and_nothing_else() {
    for paging in PAGINGS {
        let memory = Memory::new(8);
        let domain = Arc::new(FlushDomain::waiting());
        let mut cpu = cpu_with_paging(&memory, &domain, paging);
        write_all(&mut cpu);
        let hits = CpuCounters { nr_accesses: 4, ..CpuCounters::default() };
        assert_eq!(write_all(&mut cpu), hits);

        domain.flush(&[page(FIRST_DATA + 1)]);
        let one = CpuCounters { nr_tlb_misses: 1, nr_walks: 1, nr_translations_dropped: 1, ..hits };
        assert_eq!(write_all(&mut cpu), CpuCounters { nr_flushes_seen: 1, ..one }, "{paging:?}");
        assert_eq!(write_all(&mut cpu), hits);

        // Pages without a translation in the CPU; with paging on, also pages of the guest's page
        // tables.
        domain.flush(&[GfnRange::new(Gfn(0), FIRST_DATA), page(1 << 20)]);
        assert_eq!(write_all(&mut cpu), CpuCounters { nr_flushes_seen: 1, ..hits }, "{paging:?}");

        // Two flushes of two pages, of which one is the same.
        domain.flush(&[page(FIRST_DATA), page(FIRST_DATA + 3)]);
        domain.flush(&[page(FIRST_DATA + 3), page(FIRST_DATA + 1)]);
        let three = CpuCounters { nr_tlb_misses: 3, nr_walks: 3, nr_translations_dropped: 3, ..hits };
        assert_eq!(write_all(&mut cpu), CpuCounters { nr_flushes_seen: 2, ..three }, "{paging:?}");

        domain.flush(&[GfnRange::new(Gfn(0), u64::MAX)]);
        let all = CpuCounters { nr_tlb_misses: 4, nr_walks: 4, nr_translations_dropped: 4, ..hits };
        assert_eq!(write_all(&mut cpu), CpuCounters { nr_flushes_seen: 1, ..all }, "{paging:?}");
    }
}

#[test]
fn a_flush_of_a_small_page_drops_the_large_one_around_it() {
    let backing = Backing::new(BackingKind::Anonymous, 6 << 20).unwrap();
    let large = phys::hpa_of(backing.as_ptr()).0.next_multiple_of(PageSize::Size2M.size_bytes());
    for paging in PAGINGS {
        let memory = Memory::new(8);
        let domain = Arc::new(FlushDomain::waiting());
        // Guest-physical 2 MiB to 6 MiB, in two large pages. With paging on, the guest maps them by
        // large pages, too, in reverse order.
        for n in 0..2 {
            memory.tables[2].0[1 + n].store((large + ((n as u64) << 21)) | 0x87, Ordering::Relaxed);
        }
        let mut cpu = cpu_with_paging(&memory, &domain, Paging::Off);
        let [first, second] = match paging {
            Paging::Off => [Gva(2 << 20), Gva(4 << 20)],
            Paging::TwoDimensional => {
                for (at, value) in
                    [(0, 1 << 12), (1 << 12, 2 << 12), (2 << 12, 4 << 20 | 0x80), (0x2008, 2 << 20 | 0x80)]
                {
                    assert_eq!(cpu.write(Gva(at), value | 3), Ok(()));
                }
                cpu.set_paging(paging);
                [Gva(2 << 20), Gva(0)]
            }
        };
        let mut walks = |gva: Gva| {
            let before = cpu.counters();
            assert_eq!(cpu.write(gva, 1), Ok(()));
            cpu.counters().since(before).nr_walks
        };
        for gva in [first, second] {
            assert_eq!((walks(gva), walks(Gva(gva.0 + 0x1f_f000))), (1, 0), "{paging:?}");
        }
        // The last small page of the first, the first of the second, and the large pages around
        // both.
        domain.flush(&[page(512 + 511)]);
        assert_eq!((walks(first), walks(second)), (1, 0), "{paging:?}");
        domain.flush(&[page(1024)]);
        assert_eq!((walks(first), walks(second)), (0, 1), "{paging:?}");
        domain.flush(&[page(511), page(1536)]);
        assert_eq!((walks(first), walks(second)), (0, 0), "{paging:?}");
    }
}

#[test]
fn a_cpu_without_the_records_of_flushes_drops_everything() {
    for paging in PAGINGS {
        let memory = Memory::new(8);
        let domain = Arc::new(FlushDomain::waiting());
        let mut cpu = cpu_with_paging(&memory, &domain, paging);
        write_all(&mut cpu);
        let far = 1 << 20;
        let full = |nr_flushes_seen| CpuCounters {
            nr_accesses: 4,
            nr_tlb_misses: 4,
            nr_walks: 4,
            nr_flushes_seen,
            nr_full_drops: 1,
            nr_translations_dropped: 4,
            ..CpuCounters::default()
        };
        // It lags by many flushes of the same page.
        (0..1000).for_each(|_| domain.flush(&[page(far)]));
        assert_eq!(write_all(&mut cpu), full(1000), "{paging:?}");
        // A flusher has begun and was preempted; another came first.
        assert_eq!(domain.begin_flush(), 1001);
        assert_eq!(write_all(&mut cpu), CpuCounters { nr_accesses: 4, ..CpuCounters::default() });
        domain.flush(&[page(far)]);
        assert_eq!(write_all(&mut cpu), full(2), "{paging:?}");
        // One flush of many ranges, and many flushes of different ones.
        domain.flush(&[1, 3, 5, 7, 9, 11, 13, 15, 17].map(|n| page(far + n)));
        assert_eq!(write_all(&mut cpu), full(1), "{paging:?}");
        (0..40).for_each(|n| domain.flush(&[page(far + 2 * n)]));
        assert_eq!(write_all(&mut cpu), full(40), "{paging:?}");
    }
}

#[test]
fn errors_are_typed() {
    let memory = Memory::new(2);
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::waiting()));
    assert_eq!(cpu.read(Gva(4)), Err(CpuError::Unaligned { gva: Gva(4) }));
    let exit = Exit::Mmio { gpa: Gpa(0x5000), access: Access::Write };
    assert_eq!(cpu.write(Gva(0x5000), 1), Err(CpuError::Exit(exit)));
    memory.leaf(1).store(0x1000 | 7, Ordering::Relaxed);
    assert_eq!(cpu.read(Gva(0x1000)), Err(CpuError::NoMemory { gpa: Gpa(0x1000), hpa: Hpa(0x1000) }));
    memory.tables[0].0[0].fetch_or(1 << 7, Ordering::Relaxed);
    assert!(matches!(cpu.read(Gva(0x1000)), Err(CpuError::Misconfigured(_))));
    assert_eq!(cpu.load_cr3(1 << 50), Err(CpuError::BadCr3 { value: 1 << 50 }));

    let mut idle =
        Cpu::<_, Npt>::new(Idle, Port::new(cpu.port.domain()), 1, memory.tables[0].hpa(), Geometry::default());
    idle.max_faults = 1000;
    let gva = Gva(1 << 50);
    assert_eq!(idle.read(gva), Err(CpuError::Stuck { gva, nr_faults: 1001 }));
}

#[test]
fn two_dimensional_paging_with_contexts() {
    let memory = Memory::new(16);
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::waiting()));
    // Two address spaces: page tables in pages 0 to 3 and 4 to 7, both map address 0 to pages 8 and
    // 9.
    for (first, data) in [(0_u64, 8_u64), (4, 9)] {
        for level in 0..4 {
            let next = if level == 3 { data } else { first + level + 1 };
            assert_eq!(cpu.write(Gva((first + level) << 12), next << 12 | 3), Ok(()));
        }
    }
    assert_eq!(cpu.load_cr3(1), Ok(()));
    cpu.set_paging(Paging::TwoDimensional);
    assert_eq!(cpu.write(Gva(0), 11), Ok(()));
    assert_eq!(cpu.load_cr3(4 << 12 | 2), Ok(()));
    assert_eq!(cpu.write(Gva(0), 22), Ok(()));
    assert_eq!((memory.word(8, 0), memory.word(9, 0)), (11, 22));
    let walks = cpu.counters().nr_walks;
    // Back, keeping translations: no walk. Without keeping: a walk.
    assert_eq!(cpu.load_cr3(1 << 63 | 1), Ok(()));
    assert_eq!(cpu.read(Gva(0)), Ok(11));
    assert_eq!(cpu.counters().nr_walks, walks);
    assert_eq!(cpu.load_cr3(1), Ok(()));
    assert_eq!(cpu.read(Gva(0)), Ok(11));
    assert_eq!(cpu.counters().nr_walks, walks + 1);
    assert_eq!(cpu.read(Gva(0x1000)), Err(CpuError::Guest(GuestFault::Page { gva: Gva(0x1000), error_code: 0 })));
    cpu.set_paging(Paging::Off);
    assert_eq!(cpu.read(Gva(9 << 12)), Ok(22));
}

/// What the owner of a page writes there after the flush; no CPU writes it.
const OWNED: u64 = u64::MAX;

/// The longest time for one round.
const BUDGET: Duration = Duration::from_millis(500);

/// CPUs write and read. Two threads switch each of their two guest pages between two memory pages,
/// flush, and mark the one that is unmapped; a third flushes ranges that overlap theirs. Returns
/// how often a mark was overwritten or seen.
fn violations(domain: FlushDomain, paging: Paging, nr_turns: u64) -> u64 {
    let domain = Arc::new(domain);
    let memory = Memory::new(8);
    let stop = AtomicBool::new(false);
    let found = AtomicU64::new(0);
    // They stay where they are until no CPU runs: a CPU whose translation was not flushed writes to
    // them after its flusher has ended.
    let spares = [const { [const { Page::new() }; 2] }; 2];
    // All is mapped, and the guest's page tables are built, before anything is unmapped.
    write_all(&mut cpu_with_paging(&memory, &domain, paging));
    let started = Barrier::new(5);
    std::thread::scope(|scope| {
        for seed in 1..=3 {
            let (memory, domain, stop, found, started) = (&memory, &domain, &stop, &found, &started);
            scope.spawn(move || {
                let mut cpu = cpu(memory, domain);
                cpu.set_paging(paging);
                write_all(&mut cpu);
                started.wait();
                let mut n = seed;
                while !stop.load(Ordering::Relaxed) {
                    n += 1;
                    let gva = address(paging, n & 3);
                    if n % 8 < 4 {
                        assert_eq!(cpu.write(gva, n), Ok(()));
                    } else if cpu.read(gva) == Ok(OWNED) {
                        found.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        scope.spawn(|| {
            let mut turn = 0;
            while !stop.load(Ordering::Relaxed) {
                turn += 1;
                domain.flush(&[GfnRange::new(Gfn(FIRST_DATA + turn % 4), 3), page(turn)]);
                std::thread::yield_now();
            }
        });
        let flushers: Vec<_> = (0..2)
            .map(|flusher| {
                let (memory, domain, found, started) = (&memory, &domain, &found, &started);
                let spares = &spares[flusher as usize];
                scope.spawn(move || {
                    started.wait();
                    let begin = Instant::now();
                    for turn in 0..nr_turns {
                        // With the waiting method, one flush may take as long as the time slices of
                        // all CPUs.
                        if begin.elapsed() > BUDGET {
                            break;
                        }
                        let gfn = FIRST_DATA + 2 * flusher + turn % 2;
                        let mut places = [&memory.pages[gfn as usize], &spares[(turn % 2) as usize]];
                        if turn % 4 >= 2 {
                            places.reverse();
                        }
                        let [old, new] = places;
                        // CPUs do not fault.
                        new.0[0].store(0, Ordering::SeqCst);
                        memory.leaf(gfn).store(new.hpa().0 | 7, Ordering::Release);
                        domain.flush(&[page(gfn)]);
                        old.0[0].store(OWNED, Ordering::SeqCst);
                        for _ in 0..50 {
                            std::hint::black_box(old.0[0].load(Ordering::Relaxed));
                        }
                        if turn % 8 == 0 {
                            std::thread::yield_now();
                        }
                        if old.0[0].load(Ordering::SeqCst) != OWNED {
                            found.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        flushers.into_iter().for_each(|flusher| flusher.join().unwrap());
        stop.store(true, Ordering::Relaxed);
    });
    found.into_inner()
}

fn for_each_way(mut check: impl FnMut(FlushDomain, Paging)) {
    for method in [FlushMethod::Restartable, FlushMethod::Waiting] {
        for paging in PAGINGS {
            match FlushDomain::with_method(method) {
                Ok(domain) => check(domain, paging),
                Err(why) => eprintln!("skipped: {why}"),
            }
        }
    }
}

#[test]
fn no_access_reaches_a_page_after_its_flush() {
    for_each_way(|domain, paging| {
        let method = domain.method();
        assert_eq!(violations(domain, paging, 20_000), 0, "{method}, {paging:?}");
    });
}

/// The test above is only worth something if it fails when flushes leave out their ranges.
#[test]
fn flushes_without_ranges_are_detected() {
    for_each_way(|domain, paging| {
        let method = domain.method();
        // Mostly in the first try; on a busy machine the CPUs may not run concurrently with the
        // flushes of a whole one.
        let is_noticed = (0..10_000).any(|_| {
            let domain = FlushDomain::with_method(method).unwrap();
            violations(domain.with_defect(Defect::NoRanges), paging, 100) > 0
        });
        assert!(is_noticed, "{method}, {paging:?}");
    });
}
