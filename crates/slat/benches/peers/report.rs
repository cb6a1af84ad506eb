//! The tables of interleaved repetitions.

use std::env;
use std::sync::Mutex;

use super::aarch64::Aarch64;
use super::arena::Memory;
use super::engine::Engine;
use super::generic::Generic;
use super::multiarch::Multiarch;
use super::operation::{BATCH, Job, Operation, Sharing, Table};
use super::run::Times;
use super::x86::X86;

/// Tables of all threads, and some.
const NR_TABLES: usize = 4096;
const DEFAULT_REPETITIONS: usize = 31;

/// Whose tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Slat,
    X86,
    Multiarch,
    Generic,
    Aarch64,
}

const KINDS: [Kind; 5] = [Kind::Slat, Kind::X86, Kind::Multiarch, Kind::Generic, Kind::Aarch64];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Slat => "slat",
            Kind::X86 => "x86_64",
            Kind::Multiarch => "multiarch",
            Kind::Generic => "generic",
            Kind::Aarch64 => "aarch64",
        }
    }

    fn can(self, operation: Operation) -> bool {
        operation != Operation::Split || !matches!(self, Kind::X86 | Kind::Multiarch)
    }
}

/// An operation, what the figures of one thread ought to be (in nanoseconds), and how two threads share pages.
struct Row {
    operation: Operation,
    name: &'static str,
    aim_ns: Option<f64>,
    sharings: &'static [Sharing],
}

const fn row(operation: Operation, name: &'static str, aim_ns: Option<f64>, sharings: &'static [Sharing]) -> Row {
    Row { operation, name, aim_ns, sharings }
}

const DISJOINT: &[Sharing] = &[Sharing::Disjoint];
const ALL: &[Sharing] = &[Sharing::Disjoint, Sharing::SameBlock, Sharing::SamePage];
const DISJOINT_AND_BLOCK: &[Sharing] = &[Sharing::Disjoint, Sharing::SameBlock];
const DISJOINT_AND_PAGE: &[Sharing] = &[Sharing::Disjoint, Sharing::SamePage];

const ROWS: [Row; 12] = [
    row(Operation::MapBatch, "map one, 64 a call", Some(10.0), ALL),
    row(Operation::MapSingle, "map one, a call each", None, ALL),
    row(Operation::MapRangeKnown, "map range, frames known", Some(1.5), DISJOINT),
    row(Operation::MapRangeEach, "map range, each asked", None, DISJOINT),
    row(Operation::MapRangeHuge, "map range, 2M (each)", None, DISJOINT),
    row(Operation::Query, "query, in order", Some(3.0), ALL),
    row(Operation::QueryScattered, "query, scattered", None, DISJOINT),
    row(Operation::ProtectRange, "protect range", None, DISJOINT),
    row(Operation::ProtectPages, "protect pages", None, DISJOINT_AND_BLOCK),
    row(Operation::UnmapSingle, "unmap one, a call each", None, ALL),
    row(Operation::UnmapRange, "unmap range", None, DISJOINT),
    row(Operation::Split, "split 2M (each)", None, DISJOINT_AND_PAGE),
];

/// Runs `job` on tables of `kind` that are made for it, and sees that it did what it is for.
fn measure(memory: Memory, kind: Kind, job: Job) -> Times {
    memory.reset();
    match kind {
        Kind::Slat => {
            let engine = Engine::new(memory, job);
            // Mapped by ranges, and by a fault for each table.
            job.prepare(&mut engine.hands());
            engine.prepare();
            let times = job.run(&engine);
            job.check(&mut engine.hands());
            engine.check();
            times
        }
        Kind::X86 => measure_peer(job, X86::new(memory)),
        Kind::Multiarch => measure_peer(job, Multiarch::new(memory)),
        Kind::Generic => measure_peer(job, Generic::new(memory)),
        Kind::Aarch64 => measure_peer(job, Aarch64::new(memory)),
    }
}

fn measure_peer(job: Job, mut peer: impl Table + Send) -> Times {
    job.prepare(&mut peer);
    let peer = Mutex::new(peer);
    let times = job.run(&peer);
    job.check(&mut peer.into_inner().unwrap());
    times
}

/// All repetitions of one job on one kind of tables: nanoseconds of wall time for a unit of all threads together.
struct Samples {
    kind: Kind,
    job: Job,
    unit_ns: Vec<f64>,
}

/// The value that `per_mille` thousandths of the samples do not exceed.
fn quantile(values: &[f64], per_mille: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() - 1) * per_mille / 1000]
}

fn collect(memory: Memory, samples: &mut [Samples], nr_repetitions: usize) {
    let len = samples.len();
    for repetition in 0..nr_repetitions {
        for turn in 0..len {
            // Another goes first each time, and each has another before it every other time.
            let index = if repetition % 2 == 0 { repetition + turn } else { repetition + len - turn } % len;
            let Samples { kind, job, unit_ns } = &mut samples[index];
            let wall = measure(memory, *kind, *job).wall;
            unit_ns.push(wall.as_secs_f64() * 1e9 / (job.units() * job.nr_threads) as f64);
        }
    }
}

fn sharing_name(sharing: Sharing) -> &'static str {
    match sharing {
        Sharing::Disjoint => "disjoint",
        Sharing::SameBlock => "same 2M",
        Sharing::SamePage => "same page",
    }
}

/// Prints one line of cells, a cell for each kind.
fn print_cells(samples: &[Samples], job: Job, cell: impl Fn(&[f64]) -> String) {
    for kind in KINDS {
        let of_kind = samples.iter().find(|samples| samples.kind == kind && samples.job == job);
        print!(" {:>15}", of_kind.map_or("-".to_owned(), |samples| cell(&samples.unit_ns)));
    }
}

fn print_header(first: &str) {
    print!("\n{first:<34}");
    KINDS.iter().for_each(|kind| print!(" {:>15}", kind.name()));
    println!();
}

/// The tables of the rows whose name contains one of `names`; of all, if there are no names.
fn table(memory: Memory, names: &[String], nr_repetitions: usize, divisor: u64) {
    let asked = |row: &&Row| names.is_empty() || names.iter().any(|name| row.name.contains(name.as_str()));
    let rows: Vec<&Row> = ROWS.iter().filter(asked).collect();
    let alone = |row: &Row| Job { operation: row.operation, sharing: Sharing::Disjoint, nr_threads: 1, divisor };
    let together = |row: &Row, sharing: Sharing| Job { operation: row.operation, sharing, nr_threads: 2, divisor };
    let mut samples = Vec::new();
    for row in &rows {
        let jobs = row.sharings.iter().map(|&sharing| together(row, sharing));
        for job in [alone(row)].into_iter().chain(jobs) {
            let kinds = KINDS.into_iter().filter(|kind| kind.can(row.operation));
            samples.extend(kinds.map(|kind| Samples { kind, job, unit_ns: Vec::new() }));
        }
    }
    // The first is for the caches and the CPUs' clocks.
    collect(memory, &mut samples, 1);
    samples.iter_mut().for_each(|samples| samples.unit_ns.clear());
    collect(memory, &mut samples, nr_repetitions);

    println!(
        "\nMedians of {nr_repetitions} interleaved repetitions, and (lowest). A unit is a 4 KiB page; where \"2M\" is"
    );
    println!(
        "said, a 2 MiB page. slat takes no lock. The peers have none on 1 thread; on 2 they are in a std Mutex, taken"
    );
    println!("once for each call: of {BATCH} pages where it says so, of all pages for ranges and \"protect pages\".");
    println!(
        "Beside slat's dirty log (begun: \"protect range\", harvested: \"protect pages\"), invalidation (\"unmap\") and"
    );
    println!("write fault on a huge leaf in a slot that logs (\"split\"), the peers do the bare change of the tables.");
    print_header("1 thread, ns a unit");
    for row in &rows {
        print!("{:<34}", row.name);
        print_cells(&samples, alone(row), |ns| format!("{:.2} ({:.2})", quantile(ns, 500), quantile(ns, 0)));
        println!("{}", row.aim_ns.map_or(String::new(), |aim| format!("  aim {aim}")));
    }
    print_header("2 threads, M units/s in total");
    for row in &rows {
        for &sharing in row.sharings {
            print!("{:<24}{:<10}", row.name, sharing_name(sharing));
            print_cells(&samples, together(row, sharing), |ns| {
                format!("{:.1} ({:.1})", 1e3 / quantile(ns, 500), 1e3 / quantile(ns, 0))
            });
            println!();
        }
    }
    println!("(in brackets the highest)");
}

pub(crate) fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let memory = Memory::new(NR_TABLES);
    // `cargo test --benches` passes no `--bench`: only see that it runs.
    if !arguments.iter().any(|argument| argument == "--bench") {
        table(memory, &[], 1, 64);
        return;
    }
    // Cargo puts its own `--bench` behind what the user gave.
    let words = arguments.into_iter().filter(|argument| argument != "--bench" && argument != "table");
    let (numbers, names): (Vec<String>, Vec<String>) = words.partition(|word| word.parse::<usize>().is_ok());
    let nr_repetitions = numbers.first().map_or(DEFAULT_REPETITIONS, |number| number.parse().unwrap());
    table(memory, &names, nr_repetitions, 1);
}
