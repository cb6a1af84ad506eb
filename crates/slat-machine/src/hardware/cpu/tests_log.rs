//! CPUs that log the pages that they make dirty: the exit on a full log, and harvests concurrent
//! with CPUs that write.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use slat::format::Ept;
use slat::{Exit, Gfn, GfnRange};

use super::tests::{Memory, page};
use super::*;
use crate::hardware::commit::{FlushDomain, FlushMethod};
use crate::hardware::modification_log::{ModificationLogs, NR_ENTRIES};

const NR_PAGES: usize = 512;

/// The longest that harvests wait for a page: no machine is so slow.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Stops the other threads when it is dropped, also after a failed check.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Read, write, execute, memory type write back.
const LEAF: u64 = 0b111 | 6 << 3;
const DIRTY: u64 = 1 << 9;

/// The pages for the next harvest: a bit for each.
#[derive(Default)]
struct Marks([AtomicU64; NR_PAGES / 64]);

impl Marks {
    fn mark(&self, written: &[Gpa]) {
        // The dirty bits of these pages were set before. A thread that has taken a mark that is
        // found set here observes them.
        fence(Ordering::SeqCst);
        for gpa in written {
            let gfn = gpa.gfn().0;
            self.0[(gfn / 64) as usize].fetch_or(1 << (gfn % 64), Ordering::SeqCst);
        }
    }

    /// Takes all marks, makes the leaves of the pages clean, and flushes them.
    fn take(&self, memory: &Memory, domain: &FlushDomain) -> Vec<u64> {
        let taken: Vec<u64> = self.0.iter().map(|word| word.swap(0, Ordering::SeqCst)).collect();
        fence(Ordering::SeqCst);
        let is_taken = |gfn: &u64| taken[(gfn / 64) as usize] >> (gfn % 64) & 1 != 0;
        let pages: Vec<u64> = (0..NR_PAGES as u64).filter(is_taken).collect();
        for &gfn in &pages {
            memory.leaf(gfn).fetch_and(!DIRTY, Ordering::SeqCst);
        }
        if !pages.is_empty() {
            domain.flush(&[GfnRange::new(Gfn(0), NR_PAGES as u64)]);
        }
        pages
    }
}

/// All pages are mapped, so there are no faults.
struct Marking(Arc<Marks>);

impl FaultHandler for Marking {
    fn handle_fault(&mut self, Fault { gpa, access, .. }: Fault) -> Result<Outcome, slat::error::FaultError> {
        Ok(Outcome::Exit(Exit::Mmio { gpa, access }))
    }

    fn log_modifications(&mut self, written: &[Gpa]) {
        self.0.mark(written);
    }
}

struct World {
    memory: Arc<Memory>,
    domain: Arc<FlushDomain>,
    logs: ModificationLogs,
    marks: Arc<Marks>,
}

impl World {
    /// Maps every page, writable and clean.
    fn new(domain: FlushDomain) -> World {
        let memory = Memory::new(NR_PAGES);
        for (gfn, page) in memory.pages.iter().enumerate() {
            memory.leaf(gfn as u64).store(page.hpa().0 | LEAF, Ordering::Relaxed);
        }
        World { memory, domain: Arc::new(domain), logs: ModificationLogs::default(), marks: Arc::default() }
    }

    fn cpu(&self) -> Cpu<Marking, Ept> {
        let root = self.memory.tables[0].hpa();
        Cpu::new(Marking(Arc::clone(&self.marks)), Port::new(&self.domain), 1, root, Geometry::default())
            .with_modification_log(self.logs.add())
    }

    fn drain(&self) {
        self.logs.drain(&self.domain, &mut |written| self.marks.mark(written));
    }

    fn harvest(&self) -> Vec<u64> {
        self.drain();
        self.marks.take(&self.memory, &self.domain)
    }
}

fn gva(gfn: u64) -> Gva {
    Gva(gfn << 12)
}

#[test]
fn a_harvest_reports_what_was_written_since_the_last() {
    let world = World::new(FlushDomain::waiting());
    let (mut one, mut other) = (world.cpu(), world.cpu());
    assert!(world.harvest().is_empty());
    for _ in 0..3 {
        for gfn in [3, 500, 3] {
            assert_eq!(one.write(gva(gfn), 1), Ok(()));
            assert_eq!(one.read(gva(gfn + 1)), Ok(0));
        }
        for gfn in [3, 77] {
            assert_eq!(other.write(gva(gfn), 2), Ok(()));
        }
        assert_eq!(world.harvest(), [3, 77, 500]);
        assert!(world.harvest().is_empty());
    }
    let logged = [&one, &other].map(|cpu| (cpu.counters().nr_pages_logged, cpu.counters().nr_log_full_exits));
    assert_eq!(logged, [(6, 0), (3, 0)]);
    assert_eq!(world.logs.nr_drains(), 7);
}

#[test]
fn a_cpu_exits_on_a_full_log_and_starts_over() {
    let world = World::new(FlushDomain::waiting());
    let mut cpu = world.cpu();
    for gfn in 0..NR_ENTRIES {
        assert_eq!(cpu.write(gva(gfn), 1), Ok(()));
    }
    let before = cpu.counters();
    assert_eq!((before.nr_pages_logged, before.nr_log_full_exits, before.nr_walks), (512, 0, 512));
    // Harvested beside the log, so that there is something to log again.
    world.memory.leaf(9).fetch_and(!DIRTY, Ordering::SeqCst);
    world.domain.flush(&[page(9)]);
    assert_eq!(cpu.write(gva(9), 2), Ok(()));
    let exit = CpuCounters {
        nr_accesses: 1,
        nr_tlb_misses: 2,
        nr_walks: 2,
        nr_flushes_seen: 1,
        nr_translations_dropped: 1,
        nr_pages_logged: 1,
        nr_log_full_exits: 1,
        ..CpuCounters::default()
    };
    assert_eq!(cpu.counters().since(before), exit);
    assert_eq!(world.memory.word(9, 0), 2);
    // The exit has passed on the whole log, and no more.
    assert_eq!(world.marks.take(&world.memory, &world.domain).len() as u64, NR_ENTRIES);
    assert_eq!(world.harvest(), [9]);
}

/// CPUs write numbers that count up, each to a word of its own in every page. Concurrently one
/// thread harvests, copies the reported pages, and compares: a write that was done when the harvest
/// began must be in its copy. Another thread only drains, and is preempted while it has pages.
fn run(domain: FlushDomain, nr_cpus: usize, budget: Duration) {
    let world = World::new(domain);
    let done: Vec<Vec<AtomicU64>> = (0..nr_cpus).map(|_| (0..NR_PAGES).map(|_| AtomicU64::new(0)).collect()).collect();
    let mut copies = vec![vec![0; NR_PAGES]; nr_cpus];
    let stop = AtomicBool::new(false);
    let started = Barrier::new(nr_cpus + 2);
    let mut nr_found = 0;
    std::thread::scope(|scope| {
        for (index, done) in done.iter().enumerate() {
            let (world, stop, started) = (&world, &stop, &started);
            scope.spawn(move || {
                let mut cpu = world.cpu();
                let mut number = 0;
                let mut random = index as u64 + 1;
                started.wait();
                let _stop = Stop(stop);
                loop {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let gfn = (random >> 33) % NR_PAGES as u64;
                    number += 1;
                    assert_eq!(cpu.write(Gva(gfn << 12 | (index as u64) << 3), number), Ok(()));
                    // Release: the harvest that observes it begins after the write.
                    done[gfn as usize].store(number, Ordering::Release);
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        scope.spawn(|| {
            started.wait();
            let _stop = Stop(&stop);
            while !stop.load(Ordering::Relaxed) {
                world.logs.drain(&world.domain, &mut |written| {
                    std::thread::yield_now();
                    world.marks.mark(written);
                });
                std::thread::yield_now();
            }
        });
        let mut harvest = || {
            let before: Vec<Vec<u64>> =
                done.iter().map(|done| done.iter().map(|number| number.load(Ordering::Acquire)).collect()).collect();
            let pages = world.harvest();
            for &gfn in &pages {
                for (index, copy) in copies.iter_mut().enumerate() {
                    copy[gfn as usize] = world.memory.word(gfn as usize, index);
                }
            }
            for (index, (before, copy)) in before.iter().zip(&copies).enumerate() {
                let missed = (0..NR_PAGES).find(|&gfn| copy[gfn] < before[gfn]);
                if let Some(gfn) = missed {
                    return Err(format!("the harvest has missed a write of CPU {index} to page {gfn}"));
                }
            }
            Ok(pages.len())
        };
        started.wait();
        let stopper = Stop(&stop);
        let begin = Instant::now();
        let mut result = harvest();
        // And until there was a page: on a busy machine that may take longer.
        while let Ok(nr_pages) = result
            && (begin.elapsed() < budget || nr_found + nr_pages == 0)
            && !stop.load(Ordering::Relaxed)
        {
            assert!(begin.elapsed() < LONGEST_WAIT, "no page was written in {LONGEST_WAIT:?}");
            nr_found += nr_pages;
            result = harvest();
            // A harvest is so short that the CPUs might never get a processor in between.
            std::thread::yield_now();
        }
        drop(stopper);
        result.unwrap();
    });
    // No CPU writes any more: one harvest finds all the rest.
    let last = world.harvest();
    for gfn in last {
        for (index, copy) in copies.iter_mut().enumerate() {
            copy[gfn as usize] = world.memory.word(gfn as usize, index);
        }
    }
    for (index, copy) in copies.iter().enumerate() {
        for (gfn, &copy) in copy.iter().enumerate() {
            assert_eq!(copy, world.memory.word(gfn, index), "page {gfn}, CPU {index}");
        }
    }
}

#[test]
fn a_harvest_has_every_write_that_was_done_when_it_began() {
    for method in [FlushMethod::Restartable, FlushMethod::Waiting] {
        for nr_cpus in [2, 24] {
            if nr_cpus > 2 && method == FlushMethod::Waiting {
                // Each flush would wait for all threads' time slices.
                continue;
            }
            match FlushDomain::with_method(method) {
                Ok(domain) => run(domain, nr_cpus, Duration::from_millis(400)),
                Err(why) => eprintln!("skipped: {why}"),
            }
        }
    }
}
