//! The cost of a split by itself, on one thread and on two.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use slat::{Config, PageSize};

use super::arena::Memory;
use super::bench_host::BenchHost;
use super::cpus::{cpu_time, cpus, pin};
use super::timing::{median, quantile};
use super::world::{self, BLOCK, Backing, BenchVm, GIB};

/// The time until all threads had finished, in nanoseconds; of CPU time the longest.
#[derive(Clone, Copy, Default)]
pub(crate) struct Took {
    pub(crate) wall_ns: f64,
    pub(crate) cpu_ns: f64,
}

#[derive(Clone, Copy)]
enum Subject {
    /// slat, from leaves of this size.
    Slat { size: PageSize, nr_threads: u64 },
    /// slat, two threads that share only the host's memory: each has a VM of its own.
    TwoVms,
}

struct Line {
    name: &'static str,
    subject: Subject,
    nr_gib: u64,
}

const fn slat(name: &'static str, size: PageSize, nr_threads: u64, nr_gib: u64) -> Line {
    Line { name, subject: Subject::Slat { size, nr_threads }, nr_gib }
}

const LINES: [Line; 7] = [
    slat("8 GiB of 2M", PageSize::Size2M, 1, 8),
    slat("8 GiB of 2M, two threads", PageSize::Size2M, 2, 8),
    slat("16 GiB of 2M", PageSize::Size2M, 1, 16),
    slat("16 GiB of 2M, two threads", PageSize::Size2M, 2, 16),
    Line { name: "16 GiB of 2M, two threads, a VM each", subject: Subject::TwoVms, nr_gib: 16 },
    slat("8 x 1G, to 4K", PageSize::Size1G, 1, 8),
    slat("8 x 1G, to 4K, two threads", PageSize::Size1G, 2, 8),
];

/// Pairs of lines to compare: one thread, and two.
const SPEEDS: [(usize, usize); 4] = [(0, 1), (2, 3), (2, 4), (5, 6)];

/// Runs `work` on `nr_threads` threads at once, each on a CPU of its own if there are as many.
/// `work` gets the number of its thread.
pub(crate) fn on_threads(nr_threads: usize, work: impl Fn(usize) + Sync) -> Took {
    let (start, cpus) = (Barrier::new(nr_threads), cpus());
    let times: Vec<Took> = thread::scope(|scope| {
        let run = |thread: usize| {
            let (start, work, cpu) = (&start, &work, cpus[thread % cpus.len()]);
            scope.spawn(move || {
                pin(cpu);
                start.wait();
                let (begin, begin_cpu) = (Instant::now(), cpu_time());
                work(thread);
                let cpu_ns = (cpu_time() - begin_cpu).as_nanos() as f64;
                Took { wall_ns: begin.elapsed().as_nanos() as f64, cpu_ns }
            })
        };
        let threads: Vec<_> = (0..nr_threads).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let longest = |of: fn(&Took) -> f64| times.iter().map(of).fold(0.0, f64::max);
    Took { wall_ns: longest(|took| took.wall_ns), cpu_ns: longest(|took| took.cpu_ns) }
}

/// Splits leaves of `size`, which map `nr_pages`. One thread serves each pair of a VM and the first
/// page of its part.
fn split(parts: &[(&BenchVm, u64)], size: PageSize, nr_pages: u64) -> Took {
    let part_pages = nr_pages / parts.len() as u64;
    let took = on_threads(parts.len(), |thread| {
        let (vm, first) = parts[thread];
        let nr_split = vm.split_range(world::range(first, part_pages), PageSize::Size4K).unwrap();
        let nr_1g = if size == PageSize::Size1G { part_pages / GIB } else { 0 };
        assert_eq!(nr_split, part_pages / BLOCK + nr_1g);
    });
    assert!(parts.iter().all(|(vm, _)| vm.stats().pages_2m() + vm.stats().pages_1g() + vm.stats().flushes == 0));
    took
}

/// A VM with `nr_pages`, mapped by leaves of `size`.
fn mapped(memory: Memory, nr_pages: u64, size: PageSize) -> Arc<BenchVm> {
    let backing = Backing::Whole(size);
    let vm = world::new_vm(BenchHost::new(memory), Config::default(), nr_pages, backing);
    world::map_huge(&vm, nr_pages, backing);
    vm
}

fn measure(memory: Memory, line: &Line, nr_pages: u64) -> Took {
    memory.reset();
    match line.subject {
        Subject::Slat { size, nr_threads } => {
            let vm = mapped(memory, nr_pages, size);
            let parts: Vec<_> = (0..nr_threads).map(|part| (&*vm, part * nr_pages / nr_threads)).collect();
            split(&parts, size, nr_pages)
        }
        Subject::TwoVms => {
            let vms = [(); 2].map(|()| mapped(memory, nr_pages / 2, PageSize::Size2M));
            split(&[(&vms[0], 0), (&vms[1], 0)], PageSize::Size2M, nr_pages)
        }
    }
}

pub(crate) fn table(memory: Memory, nr_repetitions: usize, divisor: u64) {
    let mut samples = LINES.each_ref().map(|_| Vec::new());
    // The first warms the caches and the CPUs' clocks.
    for repetition in 0..=nr_repetitions {
        // In changing order: a later line finds more of the page tables' memory in the caches.
        for turn in 0..LINES.len() {
            let index = if repetition % 2 == 0 { turn } else { LINES.len() - 1 - turn };
            let (line, samples) = (&LINES[index], &mut samples[index]);
            let nr_pages = (line.nr_gib / divisor).max(2) * GIB;
            let took = measure(memory, line, nr_pages);
            if repetition > 0 {
                let nr_blocks = (nr_pages / BLOCK) as f64;
                samples.push(Took { wall_ns: took.wall_ns / nr_blocks, cpu_ns: took.cpu_ns / nr_blocks });
            }
        }
    }
    let of = |line: usize, of: fn(&Took) -> f64| -> Vec<f64> { samples[line].iter().map(of).collect() };
    let wall: fn(&Took) -> f64 = |took| took.wall_ns;
    let cpu: fn(&Took) -> f64 = |took| took.cpu_ns;
    println!(
        "\n{:<44} {:>9} {:>9} {:>9} {:>9}",
        format!("Splits, µs for each 2M ({nr_repetitions} rounds)"),
        "p50",
        "best",
        "worst",
        "CPU p50"
    );
    for (index, line) in LINES.iter().enumerate() {
        let times = of(index, wall);
        println!(
            "{:<44} {:>9.3} {:>9.3} {:>9.3} {:>9.3}",
            line.name,
            median(&times) / 1e3,
            quantile(&times, 0) / 1e3,
            quantile(&times, 1000) / 1e3,
            median(&of(index, cpu)) / 1e3
        );
    }
    for (one, two) in SPEEDS {
        let speeds =
            |part| -> Vec<f64> { of(one, part).iter().zip(of(two, part)).map(|(one, two)| one / two).collect() };
        let (wall, cpu) = (speeds(wall), speeds(cpu));
        println!(
            "{}: {:.2} times as fast as one thread (quartiles {:.2} {:.2}), by CPU time {:.2}",
            LINES[two].name,
            median(&wall),
            quantile(&wall, 250),
            quantile(&wall, 750),
            median(&cpu)
        );
    }
}
