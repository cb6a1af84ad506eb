//! Criterion's report, and the table of interleaved repetitions.

use std::env;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion};
use slat::baselines::Locking;

use super::arena::{BATCH, Memory};
use super::cpus::cpus;
use super::run::{Order, Shape, Times};
use super::subjects::{self, Kind};

/// Pages for each thread, if there are few. A run then takes about a millisecond, less than a time
/// slice of another process, so that most runs are undisturbed on a shared machine.
const PAGES: u64 = 1 << 15;
/// Pages for each of [`MANY`] threads.
const PAGES_OF_MANY: u64 = 1 << 12;
/// More threads than CPUs, as a VM has more vCPUs than are running.
const MANY: u64 = 64;
/// Page-table pages of all threads. Each thread, also that which makes the VM, takes a batch at a
/// time, and a few more than one where it is one of few. Some may be on their way back.
const NR_TABLES: usize = 2 * (MANY as usize + 1) * BATCH;
const DEFAULT_REPETITIONS: usize = 61;

const NONE: Kind = Kind::Slat(Locking::None);
const SHARED: Kind = Kind::Slat(Locking::Shared);
const EXCLUSIVE: Kind = Kind::Slat(Locking::Exclusive);
const IN_SHARED: Kind = Kind::OwnLock(Locking::Shared);
const IN_EXCLUSIVE: Kind = Kind::OwnLock(Locking::Exclusive);

/// One line of the table.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Line {
    kind: Kind,
    nr_threads: u64,
    order: Order,
}

impl Line {
    const fn new(kind: Kind, nr_threads: u64, order: Order) -> Line {
        Line { kind, nr_threads, order }
    }

    fn shape(self, divisor: u64) -> Shape {
        let pages = if self.nr_threads == MANY { PAGES_OF_MANY } else { PAGES };
        Shape { nr_threads: self.nr_threads, order: self.order, pages: pages / divisor }
    }

    fn name(self) -> &'static str {
        match self.kind {
            Kind::Slat(Locking::None) => "slat, no lock",
            Kind::Slat(Locking::Shared) => "slat, shared lock",
            Kind::Slat(Locking::Exclusive) => "slat, exclusive lock",
            Kind::SlatEpt => "slat, no lock, EPT",
            Kind::OwnLock(Locking::Exclusive) => "slat in own exclusive",
            Kind::OwnLock(_) => "slat in own shared",
            Kind::StdMutex => "slat in std's Mutex",
            Kind::StdRwLock => "slat in std's RwLock",
            Kind::DirtyLog => "slat, no lock, dirty log",
        }
    }

    fn order_name(self) -> &'static str {
        match self.order {
            Order::Partitioned => "own pages",
            Order::Same => "same, up",
            Order::Opposite => "same, opposite",
        }
    }
}

const fn own(kind: Kind, nr_threads: u64) -> Line {
    Line::new(kind, nr_threads, Order::Partitioned)
}

const LINES: [Line; 44] = [
    own(NONE, 1),
    own(Kind::SlatEpt, 1),
    own(SHARED, 1),
    own(Kind::StdRwLock, 1),
    own(IN_SHARED, 1),
    own(EXCLUSIVE, 1),
    own(IN_EXCLUSIVE, 1),
    own(Kind::StdMutex, 1),
    own(Kind::DirtyLog, 1),
    own(NONE, 2),
    own(Kind::SlatEpt, 2),
    own(SHARED, 2),
    own(Kind::StdRwLock, 2),
    own(IN_SHARED, 2),
    own(EXCLUSIVE, 2),
    own(IN_EXCLUSIVE, 2),
    own(Kind::StdMutex, 2),
    own(Kind::DirtyLog, 2),
    Line::new(NONE, 2, Order::Same),
    Line::new(NONE, 2, Order::Opposite),
    Line::new(SHARED, 2, Order::Same),
    Line::new(SHARED, 2, Order::Opposite),
    Line::new(EXCLUSIVE, 2, Order::Same),
    Line::new(EXCLUSIVE, 2, Order::Opposite),
    Line::new(Kind::DirtyLog, 2, Order::Same),
    Line::new(Kind::DirtyLog, 2, Order::Opposite),
    own(NONE, 4),
    own(NONE, 8),
    own(NONE, 16),
    own(Kind::DirtyLog, 16),
    own(SHARED, 4),
    own(SHARED, 8),
    own(SHARED, 16),
    own(EXCLUSIVE, 4),
    own(EXCLUSIVE, 8),
    own(EXCLUSIVE, 16),
    Line::new(NONE, 16, Order::Same),
    own(NONE, MANY),
    own(SHARED, MANY),
    own(Kind::StdRwLock, MANY),
    own(IN_SHARED, MANY),
    own(EXCLUSIVE, MANY),
    own(IN_EXCLUSIVE, MANY),
    own(Kind::StdMutex, MANY),
];

/// A comparison: the throughput of `ours` over that of `other`.
struct Ratio {
    what: &'static str,
    ours: Line,
    other: Line,
    aim: &'static str,
}

const fn ratio(what: &'static str, ours: Line, other: Line, aim: &'static str) -> Ratio {
    Ratio { what, ours, other, aim }
}

const RATIOS: [Ratio; 22] = [
    ratio("no lock: 2 threads / 1", own(NONE, 2), own(NONE, 1), ">= 1.8"),
    ratio("dirty log: 2 threads / 1", own(Kind::DirtyLog, 2), own(Kind::DirtyLog, 1), ">= 1.8"),
    ratio("EPT / NPT, 1 thread", own(Kind::SlatEpt, 1), own(NONE, 1), ""),
    ratio("EPT / NPT, 2 threads", own(Kind::SlatEpt, 2), own(NONE, 2), ""),
    ratio("exclusive / Mutex, 1 thread", own(EXCLUSIVE, 1), own(Kind::StdMutex, 1), ">= 0.87"),
    ratio("exclusive / Mutex, 2 threads", own(EXCLUSIVE, 2), own(Kind::StdMutex, 2), ">= 0.87"),
    ratio("exclusive / Mutex, 64 threads", own(EXCLUSIVE, MANY), own(Kind::StdMutex, MANY), ">= 0.87"),
    ratio("shared / RwLock, 1 thread", own(SHARED, 1), own(Kind::StdRwLock, 1), ">= 0.87"),
    ratio("shared / RwLock, 2 threads", own(SHARED, 2), own(Kind::StdRwLock, 2), ">= 0.87"),
    ratio("shared / RwLock, 64 threads", own(SHARED, MANY), own(Kind::StdRwLock, MANY), ">= 0.87"),
    ratio("in own exclusive / in Mutex, 1 thread", own(IN_EXCLUSIVE, 1), own(Kind::StdMutex, 1), ">= 0.87"),
    ratio("in own exclusive / in Mutex, 2 threads", own(IN_EXCLUSIVE, 2), own(Kind::StdMutex, 2), ">= 0.87"),
    ratio("in own exclusive / in Mutex, 64 threads", own(IN_EXCLUSIVE, MANY), own(Kind::StdMutex, MANY), ">= 0.87"),
    ratio("in own shared / in RwLock, 1 thread", own(IN_SHARED, 1), own(Kind::StdRwLock, 1), ">= 0.87"),
    ratio("in own shared / in RwLock, 2 threads", own(IN_SHARED, 2), own(Kind::StdRwLock, 2), ">= 0.87"),
    ratio("in own shared / in RwLock, 64 threads", own(IN_SHARED, MANY), own(Kind::StdRwLock, MANY), ">= 0.87"),
    ratio("no lock: 64 threads / 1", own(NONE, MANY), own(NONE, 1), ""),
    ratio("no lock: 4 threads / 1", own(NONE, 4), own(NONE, 1), ">= 3.6"),
    ratio("no lock: 8 threads / 1", own(NONE, 8), own(NONE, 1), ">= 7.2"),
    ratio("no lock: 16 threads / 1", own(NONE, 16), own(NONE, 1), ">= 14.4"),
    ratio("no lock / shared, 16 threads", own(NONE, 16), own(SHARED, 16), ""),
    ratio("no lock / exclusive, 16 threads", own(NONE, 16), own(EXCLUSIVE, 16), ""),
];

/// Lines with an aim for the time of each call, in nanoseconds.
const AIMS_NS: [(Line, f64); 3] =
    [(own(NONE, 1), 60.0), (Line::new(NONE, 2, Order::Same), 200.0), (Line::new(NONE, 2, Order::Opposite), 200.0)];

/// All repetitions of one line.
#[derive(Default)]
struct Samples {
    /// Time of one call on one thread, in nanoseconds.
    call_ns: Vec<f64>,
    /// The same in CPU time.
    call_cpu_ns: Vec<f64>,
    /// Calls per second, on all threads.
    per_second: Vec<f64>,
    /// Share of the calls that found the page mapped already.
    spurious: Vec<f64>,
    /// Retries for each call.
    retries: Vec<f64>,
}

/// The value that `per_mille` thousandths of `values` do not exceed.
fn quantile(values: &[f64], per_mille: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) * per_mille / 1000]
}

fn median(values: &[f64]) -> f64 {
    quantile(values, 500)
}

/// The lines that this machine has the CPUs for, and those that wait for CPUs in any case.
fn lines() -> impl Iterator<Item = Line> {
    let nr_cpus = cpus().len().max(2) as u64;
    LINES.into_iter().filter(move |line| line.nr_threads <= nr_cpus || line.nr_threads == MANY)
}

/// Measures all lines in turn, repeatedly, for `divisor` times fewer pages than usual.
fn collect(memory: Memory, lines: &[Line], nr_repetitions: usize, divisor: u64) -> Vec<Samples> {
    let mut samples: Vec<Samples> = lines.iter().map(|_| Samples::default()).collect();
    for repetition in 0..nr_repetitions {
        for turn in 0..lines.len() {
            // Another line goes first each time, and each line has another before it every other
            // time.
            let index =
                if repetition % 2 == 0 { repetition + turn } else { repetition + lines.len() - turn } % lines.len();
            let (shape, samples) = (lines[index].shape(divisor), &mut samples[index]);
            let measured = subjects::measure(memory, lines[index].kind, shape);
            let Times { wall, cpu } = measured.times;
            let seconds = wall.as_secs_f64();
            samples.call_ns.push(seconds * 1e9 / shape.pages as f64);
            samples.call_cpu_ns.push(cpu.as_secs_f64() * 1e9 / shape.pages as f64);
            samples.per_second.push(shape.nr_faults() as f64 / seconds);
            samples.spurious.push(measured.stats.spurious as f64 / shape.nr_faults() as f64);
            samples.retries.push(measured.stats.retries as f64 / shape.nr_faults() as f64);
        }
    }
    samples
}

fn print_times(lines: &[Line], samples: &[Samples]) {
    println!(
        "\n{:<26} {:>7} {:<15} {:>10} {:>8} {:>8} {:>8} {:>10} {:>9} {:>8}",
        "", "threads", "order", "ns a call", "lowest", "highest", "CPU ns", "M/s total", "spurious", "retries"
    );
    for (line, samples) in lines.iter().zip(samples) {
        let aim =
            AIMS_NS.iter().find(|(aimed, _)| aimed == line).map_or(String::new(), |(_, ns)| format!("  aim {ns}"));
        println!(
            "{:<26} {:>7} {:<15} {:>10.1} {:>8.1} {:>8.1} {:>8.1} {:>10.2} {:>9.3} {:>8.4}{aim}",
            line.name(),
            line.nr_threads,
            line.order_name(),
            median(&samples.call_ns),
            quantile(&samples.call_ns, 0),
            quantile(&samples.call_ns, 1000),
            median(&samples.call_cpu_ns),
            median(&samples.per_second) / 1e6,
            median(&samples.spurious),
            median(&samples.retries),
        );
    }
}

fn print_ratios(lines: &[Line], samples: &[Samples]) {
    println!("\n{:<34} {:>7} {:>17} {:>10} {:>9}", "throughput", "ratio", "quartiles", "best tenth", "aim");
    for Ratio { what, ours, other, aim } in RATIOS {
        let of = |line: Line| Some(&samples[lines.iter().position(|&listed| listed == line)?].per_second);
        let (Some(ours), Some(other)) = (of(ours), of(other)) else { continue };
        let ratios: Vec<f64> = ours.iter().zip(other).map(|(ours, other)| ours / other).collect();
        let quartiles = format!("{:.3} {:.3}", quantile(&ratios, 250), quantile(&ratios, 750));
        // Each side undisturbed: the ratio that is left when other processes use the machine.
        let best = quantile(ours, 900) / quantile(other, 900);
        println!("{what:<34} {:>7.3} {quartiles:>17} {best:>10.3} {aim:>9}", median(&ratios));
    }
}

/// The table of the lines whose name contains one of `names`; of all lines, if there are no names.
fn table(memory: Memory, names: &[String], nr_repetitions: usize, divisor: u64) {
    let asked = |line: &Line| names.is_empty() || names.iter().any(|name| line.name().contains(name.as_str()));
    let lines: Vec<Line> = lines().filter(asked).collect();
    // The first warms the caches and the CPUs' clocks.
    collect(memory, &lines, 1, divisor);
    let samples = collect(memory, &lines, nr_repetitions, divisor);
    println!(
        "\nMedians of {nr_repetitions} interleaved repetitions; {} faults a thread ({} if there are {MANY} threads).",
        PAGES / divisor,
        PAGES_OF_MANY / divisor,
    );
    print_times(&lines, &samples);
    print_ratios(&lines, &samples);
}

/// Time of `nr_faults` faults on each thread, in as many runs as it takes.
fn time(memory: Memory, line: Line, nr_faults: u64) -> Duration {
    let mut left = nr_faults;
    let mut time = Duration::ZERO;
    while left > 0 {
        let pages = left.min(line.shape(1).pages);
        time += subjects::measure(memory, line.kind, Shape { pages, ..line.shape(1) }).times.wall;
        left -= pages;
    }
    time
}

fn report(memory: Memory, criterion: &mut Criterion) {
    for order in [Order::Partitioned, Order::Same, Order::Opposite] {
        for line in lines().filter(|line| line.order == order) {
            let mut group = criterion.benchmark_group(line.name());
            group.bench_function(BenchmarkId::new(line.order_name(), line.nr_threads), |bencher| {
                bencher.iter_custom(|nr_faults| time(memory, line, nr_faults));
            });
            group.finish();
        }
    }
}

pub(crate) fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let memory = Memory::new(NR_TABLES);
    // `cargo test --bench` passes no `--bench`: then it only has to run (`ci/benches.sh`).
    if !arguments.iter().any(|argument| argument == "--bench") {
        report(memory, &mut Criterion::default().configure_from_args());
        table(memory, &[], 1, 64);
        return;
    }
    // Cargo puts its own `--bench` behind the user's arguments.
    let arguments: Vec<String> = arguments.into_iter().filter(|argument| argument != "--bench").collect();
    let table_at = arguments.iter().position(|argument| argument == "table");
    if table_at.is_none() {
        let mut criterion = Criterion::default()
            .warm_up_time(Duration::from_millis(300))
            .measurement_time(Duration::from_secs(2))
            .sample_size(20)
            .configure_from_args();
        report(memory, &mut criterion);
        criterion.final_summary();
    }
    let options = table_at.map_or(&[][..], |at| &arguments[at + 1..]);
    let (nr_repetitions, names) = match options.split_first() {
        Some((number, names)) => (number.parse().expect("a number of repetitions"), names),
        None => (DEFAULT_REPETITIONS, &[][..]),
    };
    table(memory, names, nr_repetitions, 1);
}
