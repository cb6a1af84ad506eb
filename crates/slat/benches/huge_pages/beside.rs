//! A vCPU beside splits and recoveries of the memory that it works in, against the same work on
//! another VM's memory.
//!
//! Its writes are calls, since it has no TLB: a write that the page tables allow is a walk, through
//! one level more where the memory is split. So where it writes to memory that is being split, its
//! own memory is split beforehand in the control.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use slat::{Access, Config, Gfn, Outcome, PageSize};

use super::arena::Memory;
use super::bench_host::BenchHost;
use super::cpus::{cpu_time, cpus, pin};
use super::timing::{median, quantile};
use super::world::{self, BLOCK, Backing, BenchVm, GIB};

/// Passes of the work in one run, and in one whose writes are timed.
const NR_PASSES: usize = 8;
const NR_TIMED_PASSES: usize = 2;
/// Accesses between two checks whether a pass has begun or ended.
const ACCESSES_PER_LOOK: u64 = 64;
/// Pages of a vCPU's working set, each in another block.
const WORKING_SET: u64 = 512;

/// The most page-table pages that stay linked where nothing is mapped, if no thread has an open
/// guard; and how often that is tried.
const FEW_TABLES: u64 = 32;
const MAX_TRIES: usize = 64;

/// The work on the memory, which is repeated.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Split,
    Recover,
}

/// The pages that the vCPU writes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writes {
    /// [`WORKING_SET`] pages, in turn.
    WorkingSet,
    /// Any pages.
    Random,
    /// Pages between the leaves that are split, which are not mapped yet, in order: each write
    /// installs a leaf.
    Unmapped,
}

struct Line {
    name: &'static str,
    work: Work,
    writes: Writes,
    nr_gib: u64,
}

const LINES: [Line; 4] = [
    Line { name: "split 8 GiB; writes to 512 pages", work: Work::Split, writes: Writes::WorkingSet, nr_gib: 8 },
    Line { name: "split 8 GiB of 16; faults between", work: Work::Split, writes: Writes::Unmapped, nr_gib: 16 },
    Line { name: "recover 4 GiB; writes to 512 pages", work: Work::Recover, writes: Writes::WorkingSet, nr_gib: 4 },
    Line { name: "recover 4 GiB; writes anywhere", work: Work::Recover, writes: Writes::Random, nr_gib: 4 },
];

impl Line {
    fn backing(&self) -> Backing {
        if self.writes == Writes::Unmapped { Backing::EveryOtherBlock } else { Backing::Whole(PageSize::Size2M) }
    }
}

impl Writes {
    /// The page of write number `number` to memory of `nr_pages`.
    #[inline]
    fn page(self, number: u64, nr_pages: u64) -> u64 {
        match self {
            // A different page of each block: equal ones would share cache lines of few sets.
            Writes::WorkingSet => {
                let index = number % WORKING_SET;
                index * (nr_pages / WORKING_SET) + index * 41 % BLOCK
            }
            // By multiplication (Knuth's): far apart from one to the next.
            Writes::Random => number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20 & (nr_pages - 1),
            Writes::Unmapped => {
                let page = number & (nr_pages / 2 - 1);
                page / BLOCK * 2 * BLOCK + BLOCK + page % BLOCK
            }
        }
    }
}

/// The VM of the work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Beside,
    OtherVm,
}

/// One pass of the work, and the vCPU's writes meanwhile.
#[derive(Clone, Copy, Default)]
struct Pass {
    /// Writes per second, and per second of the vCPU's CPU time.
    per_second: f64,
    per_cpu_second: f64,
    /// Leaves split, or recovered.
    nr_done: u64,
    /// Recoveries that another thread has cancelled.
    nr_cancelled: u64,
}

/// The result of a run: its passes and, if the writes were timed, the time of each.
#[derive(Default)]
struct Run {
    passes: Vec<Pass>,
    write_ns: Vec<f64>,
}

/// Synchronizes the two threads: the number of the pass, odd while it goes on.
#[derive(Default)]
struct Phase {
    begun: CachePadded<AtomicU64>,
    /// The number that the vCPU has observed.
    seen: CachePadded<AtomicU64>,
    stop: CachePadded<AtomicBool>,
}

impl Phase {
    fn next(&self) {
        let phase = self.begun.load(Ordering::Relaxed) + 1;
        self.begun.store(phase, Ordering::Release);
        while self.seen.load(Ordering::Acquire) != phase {
            thread::yield_now();
        }
    }
}

/// Whether each write is timed: reading a clock costs as much as a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Timing {
    No,
    EachWrite,
}

/// The vCPU: writes until it is stopped. Returns, for each pass, writes per second of each clock.
fn write_until(vm: &Arc<BenchVm>, line: &Line, nr_pages: u64, phase: &Phase, timing: Timing) -> Run {
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut run = Run::default();
    let mut seen = 0;
    let (mut number, mut begun_number) = (0, 0);
    let mut begun = (Instant::now(), cpu_time());
    while !phase.stop.load(Ordering::Relaxed) {
        let is_pass = seen % 2 == 1;
        for _ in 0..ACCESSES_PER_LOOK {
            number += 1;
            let gpa = Gfn(line.writes.page(number, nr_pages)).gpa();
            let begin = (timing == Timing::EachWrite).then(Instant::now);
            assert_eq!(vcpu.handle_fault(gpa, Access::Write), Ok(Outcome::Resume));
            if let Some(begin) = begin
                && is_pass
            {
                run.write_ns.push(begin.elapsed().as_nanos() as f64);
            }
        }
        let now = phase.begun.load(Ordering::Acquire);
        if now != seen {
            seen = now;
            if seen % 2 == 1 {
                begun_number = number;
                begun = (Instant::now(), cpu_time());
            } else {
                let (wall, cpu) = (begun.0.elapsed().as_secs_f64(), (cpu_time() - begun.1).as_secs_f64());
                let nr_writes = (number - begun_number) as f64;
                let pass = Pass { per_second: nr_writes / wall, per_cpu_second: nr_writes / cpu, ..Pass::default() };
                run.passes.push(pass);
            }
            phase.seen.store(seen, Ordering::Release);
        }
    }
    run
}

/// Brings all of the memory into the state before the work.
fn prepare(vm: &Arc<BenchVm>, line: &Line, nr_pages: u64) {
    let whole = world::range(0, nr_pages);
    // The vCPU's leaves are zapped too, so that it faults again. While its thread has no CPU, and a
    // guard open, page-table pages stay linked, and no huge leaf is recovered there.
    for _ in 0..MAX_TRIES {
        // Until this is dropped the vCPU maps nothing.
        let _invalidation = vm.invalidate_range(whole).unwrap();
        vm.reclaim();
        if vm.stats().live_tables() <= FEW_TABLES {
            break;
        }
        thread::sleep(Duration::from_millis(1));
    }
    world::map_huge(vm, nr_pages, line.backing());
    if line.work == Work::Recover {
        vm.split_range(whole, PageSize::Size4K).unwrap();
    }
}

fn run(memory: Memory, line: &Line, divisor: u64, place: Where, timing: Timing) -> Run {
    memory.reset();
    let nr_pages = (line.nr_gib / divisor).max(1) * GIB;
    // The other VM exists in any case.
    let vms = [(); 2].map(|()| {
        let vm = world::new_vm(BenchHost::new(memory), Config::default(), nr_pages, line.backing());
        prepare(&vm, line, nr_pages);
        vm
    });
    let vm = &vms[0];
    if place == Where::OtherVm && line.work == Work::Split && line.writes == Writes::WorkingSet {
        vm.split_range(world::range(0, nr_pages), PageSize::Size4K).unwrap();
    }
    let worked_on = if place == Where::Beside { vm } else { &vms[1] };
    let (phase, cpus) = (Phase::default(), cpus());
    thread::scope(|scope| {
        let vcpu = scope.spawn(|| {
            pin(cpus[0]);
            write_until(vm, line, nr_pages, &phase, timing)
        });
        let worker = scope.spawn(|| {
            pin(cpus[cpus.len() - 1]);
            let work = || {
                prepare(worked_on, line, nr_pages);
                let nr_zapped = worked_on.stats().zapped;
                phase.next();
                let nr_done = match line.work {
                    Work::Split => worked_on.split_range(world::range(0, nr_pages), PageSize::Size4K),
                    Work::Recover => worked_on.recover_range(world::range(0, nr_pages)),
                };
                phase.next();
                (nr_done.unwrap(), worked_on.stats().zapped - nr_zapped)
            };
            let nr_passes = if timing == Timing::No { NR_PASSES } else { NR_TIMED_PASSES };
            let done: Vec<(u64, u64)> = (0..nr_passes).map(|_| work()).collect();
            phase.stop.store(true, Ordering::Relaxed);
            done
        });
        let done = worker.join().unwrap();
        let mut run = vcpu.join().unwrap();
        for (pass, (nr_done, nr_cancelled)) in run.passes.iter_mut().zip(done) {
            (pass.nr_done, pass.nr_cancelled) = (nr_done, nr_cancelled);
        }
        run
    })
}

/// All pairs of a line: throughput by passes, and times of single writes, of the vCPU beside the
/// work and in the control.
#[derive(Default)]
struct Pairs {
    ratios: Vec<f64>,
    cpu_ratios: Vec<f64>,
    rates: [Vec<f64>; 2],
    write_ns: [Vec<f64>; 2],
    nr_done: u64,
    nr_cancelled: u64,
    nr_passes: u64,
}

fn measure_pair(memory: Memory, line: &Line, divisor: u64, pair: usize, pairs: &mut Pairs) {
    let mut medians = [(0.0, 0.0); 2];
    // The order alternates.
    let order = if pair.is_multiple_of(2) { [0, 1] } else { [1, 0] };
    for index in order {
        let place = [Where::Beside, Where::OtherVm][index];
        let untimed = run(memory, line, divisor, place, Timing::No);
        let of = |of: fn(&Pass) -> f64| median(&untimed.passes.iter().map(of).collect::<Vec<f64>>());
        medians[index] = (of(|pass| pass.per_second), of(|pass| pass.per_cpu_second));
        let timed = run(memory, line, divisor, place, Timing::EachWrite);
        if pair > 0 {
            pairs.rates[index].push(medians[index].0);
            pairs.write_ns[index].extend(timed.write_ns);
            if place == Where::Beside {
                for pass in untimed.passes {
                    pairs.nr_done += pass.nr_done;
                    pairs.nr_cancelled += pass.nr_cancelled;
                    pairs.nr_passes += 1;
                }
            }
        }
    }
    if pair > 0 {
        pairs.ratios.push(medians[0].0 / medians[1].0);
        pairs.cpu_ratios.push(medians[0].1 / medians[1].1);
    }
}

pub(crate) fn table(memory: Memory, nr_pairs: usize, divisor: u64) {
    println!(
        "\nA vCPU that writes beside, against the same work on another VM: {nr_pairs} pairs of {NR_PASSES} passes."
    );
    println!(
        "{:<36} {:>6} {:>13} {:>9} {:>7} {:>7} | {:>9} {:>9} {:>9} {:>9} | {:>8} {:>8}",
        "aim: ratio >= 0.9",
        "ratio",
        "quartiles",
        "CPU ratio",
        "M/s",
        "other",
        "p99, ns",
        "other",
        "p99.9",
        "other",
        "done",
        "cancels"
    );
    for line in &LINES {
        let mut pairs = Pairs::default();
        // The first warms the caches and the CPUs' clocks.
        for pair in 0..=nr_pairs {
            measure_pair(memory, line, divisor, pair, &mut pairs);
        }
        let [beside, other] = &pairs.write_ns;
        println!(
            "{:<36} {:>6.3} {:>13} {:>9.3} {:>7.2} {:>7.2} | {:>9.0} {:>9.0} {:>9.0} {:>9.0} | {:>8.1} {:>8.2}",
            line.name,
            median(&pairs.ratios),
            format!("{:.3} {:.3}", quantile(&pairs.ratios, 250), quantile(&pairs.ratios, 750)),
            median(&pairs.cpu_ratios),
            median(&pairs.rates[0]) / 1e6,
            median(&pairs.rates[1]) / 1e6,
            quantile(beside, 990),
            quantile(other, 990),
            quantile(beside, 999),
            quantile(other, 999),
            pairs.nr_done as f64 / pairs.nr_passes as f64,
            pairs.nr_cancelled as f64 / pairs.nr_passes as f64
        );
    }
    println!("(done: leaves in a pass; cancels: recoveries in a pass that the vCPU's writes have ended.)");
}
