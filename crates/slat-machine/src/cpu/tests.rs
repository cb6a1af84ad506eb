//! The CPU over tables that a few lines of test build on demand: one flat mapping of 4 KiB pages in NPT format.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use slat::Npt;

use super::*;
use crate::commit::{FlushDomain, FlushMethod};

/// Guest memory and tables, shared by CPUs. The first 512 pages of guest-physical memory can be mapped.
struct Memory {
    tables: [Table; 4],
    pages: Vec<Table>,
}

#[repr(align(4096))]
struct Table([AtomicU64; 512]);

impl Table {
    fn new() -> Table {
        Table([const { AtomicU64::new(0) }; 512])
    }

    fn hpa(&self) -> Hpa {
        phys::hpa_of(self.0.as_ptr())
    }
}

impl Memory {
    fn new(nr_pages: usize) -> Arc<Memory> {
        let memory = Arc::new(Memory {
            tables: std::array::from_fn(|_| Table::new()),
            pages: (0..nr_pages).map(|_| Table::new()).collect(),
        });
        for level in 0..3 {
            memory.tables[level].0[0].store(memory.tables[level + 1].hpa().0 | 7, Ordering::Relaxed);
        }
        memory
    }

    fn leaf(&self, gfn: u64) -> &AtomicU64 {
        &self.tables[3].0[gfn as usize]
    }

    fn word(&self, page: usize, word: usize) -> u64 {
        self.pages[page].0[word].load(Ordering::Relaxed)
    }
}

/// Maps guest page n to memory page n, writable if the fault was a write.
struct Flat(Arc<Memory>);

impl FaultHandler for Flat {
    fn handle_fault(&mut self, gpa: Gpa, access: Access) -> Result<Outcome, slat::Error> {
        let gfn = gpa.gfn().0;
        let Some(page) = self.0.pages.get(gfn as usize) else {
            return Ok(Outcome::Exit(Exit::Mmio { gpa, access }));
        };
        let writable = if access == Access::Write { 2 } else { 0 };
        self.0.leaf(gfn).store(page.hpa().0 | 5 | writable, Ordering::Release);
        Ok(Outcome::Resume)
    }
}

/// Says "resume" and does nothing.
struct Idle;

impl FaultHandler for Idle {
    fn handle_fault(&mut self, _: Gpa, _: Access) -> Result<Outcome, slat::Error> {
        Ok(Outcome::Resume)
    }
}

fn cpu(memory: &Arc<Memory>, domain: &Arc<FlushDomain>) -> Cpu<Flat, Npt> {
    Cpu::new(Flat(Arc::clone(memory)), Port::new(domain), 1, memory.tables[0].hpa(), Geometry::default())
}

#[test]
fn reads_and_writes_through_faults_and_the_tlb() {
    let memory = Memory::new(8);
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::new()));
    assert_eq!(cpu.read(Gva(0x1008)), Ok(0));
    assert_eq!(
        cpu.counters(),
        Counters { nr_accesses: 1, nr_reads: 1, nr_tlb_misses: 2, nr_walks: 2, nr_faults: 1, nr_restarts: 0 }
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
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::new()));
    memory.leaf(0).store(memory.pages[0].hpa().0 | 7, Ordering::Relaxed);
    assert_eq!(cpu.read(Gva(0)), Ok(0));
    assert_eq!(memory.leaf(0).load(Ordering::Relaxed) & (1 << 6), 0);
    assert_eq!(cpu.write(Gva(0), 1), Ok(()));
    assert_eq!(memory.leaf(0).load(Ordering::Relaxed) & (1 << 6), 1 << 6);
    assert_eq!(cpu.counters().nr_faults, 0);
}

#[test]
fn a_missing_flush_shows() {
    let memory = Memory::new(2);
    let domain = Arc::new(FlushDomain::new());
    let mut cpu = cpu(&memory, &domain);
    assert_eq!(cpu.write(Gva(0), 1), Ok(()));
    memory.leaf(0).store(0, Ordering::Relaxed);
    assert_eq!(cpu.write(Gva(0), 2), Ok(()), "the TLB still has it");
    assert_eq!(cpu.counters().nr_faults, 1);
    domain.flush();
    assert_eq!(cpu.write(Gva(0), 3), Ok(()));
    assert_eq!(cpu.counters().nr_faults, 2);
}

#[test]
fn errors_come_back_typed() {
    let memory = Memory::new(2);
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::new()));
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
    let beyond = Gva(1 << 50);
    assert!(matches!(idle.read(beyond), Err(CpuError::Stuck { gva, .. }) if gva == beyond));
}

#[test]
fn two_dimensional_paging_with_contexts() {
    let memory = Memory::new(16);
    let mut cpu = cpu(&memory, &Arc::new(FlushDomain::new()));
    // Two address spaces: tables in pages 0 to 3 and 4 to 7, both map address 0 to pages 8 and 9.
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
    cpu.invalidate_page(Gva(8));
    assert_eq!(cpu.read(Gva(8)), Ok(0));
    assert_eq!(cpu.counters().nr_walks, walks + 2);
    assert_eq!(cpu.read(Gva(0x1000)), Err(CpuError::Guest(GuestFault::Page { gva: Gva(0x1000), error_code: 0 })));
    cpu.set_paging(Paging::Off);
    assert_eq!(cpu.read(Gva(9 << 12)), Ok(22));
}

/// CPUs write while another thread takes pages away, flushes, and puts a mark on them.
#[test]
fn no_write_reaches_a_page_that_was_taken_away() {
    const OWNED: u64 = u64::MAX;
    for method in [FlushMethod::Restartable, FlushMethod::Waiting] {
        let Ok(domain) = FlushDomain::with_method(method) else { continue };
        let domain = Arc::new(domain);
        let memory = Memory::new(4);
        let spare = Table::new();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for seed in 1..=3 {
                let (memory, domain, stop) = (&memory, &domain, &stop);
                scope.spawn(move || {
                    let mut cpu = cpu(memory, domain);
                    let mut n = seed;
                    while !stop.load(Ordering::Relaxed) {
                        n += 1;
                        assert_eq!(cpu.write(Gva((n & 3) << 12), n), Ok(()));
                    }
                });
            }
            for turn in 0..2000_u64 {
                let gfn = turn & 3;
                // The guest gets the spare page, and then its own again. CPUs fault only at the very beginning.
                memory.leaf(gfn).store(spare.hpa().0 | 7, Ordering::Release);
                domain.flush();
                memory.leaf(gfn).store(memory.pages[gfn as usize].hpa().0 | 7, Ordering::Release);
                domain.flush();
                spare.0[0].store(OWNED, Ordering::SeqCst);
                for _ in 0..50 {
                    std::hint::black_box(spare.0[0].load(Ordering::Relaxed));
                }
                assert_eq!(spare.0[0].load(Ordering::SeqCst), OWNED, "{method}");
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
