//! The tables and the figures.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::json;
use slat_machine::linux::topology::{self, HostDescription};

use super::PeersArgs;
use super::measure::{Cell, Measured};
use super::operation::Operation;
use super::subject::Subject;
use slat_results::quantity::{NOTHING, Unit};
use slat_results::results::{self, Better, Figure, Host, NotRun, Results, labels};
use slat_results::statistics::Samples;
use slat_results::table::{self, MEDIAN};

/// The CPUs of the measurement.
pub(crate) const MEASURED_ON: &str = "the host's CPUs";

/// slat's own, which the others are compared with.
const SLAT: [Subject; 2] = [Subject::Slat, Subject::Pinned];

fn time(cell: &Cell) -> String {
    results::cell(&cell.times, Unit::Seconds)
}

fn ratio(ratios: Option<Samples>) -> String {
    ratios.map_or(NOTHING.to_owned(), |ratios| results::cell(&ratios, Unit::Ratio))
}

/// A table of the operations on `nr_threads` threads, a column for each of `subjects`, of cells
/// that `show` gives.
fn print_table(
    out: &mut impl Write,
    measured: &Measured,
    title: String,
    (operations, nr_threads, subjects): (&[Operation], u64, &[Subject]),
    show: impl Fn(&Cell) -> String,
) -> io::Result<()> {
    let names = subjects.iter().map(|subject| subject.name().to_owned());
    let mut table = table::figures(std::iter::once(title).chain(names));
    for &operation in operations {
        let cell = |&subject: &Subject| {
            measured.cell(operation, nr_threads, subject).map_or_else(|| NOTHING.to_owned(), &show)
        };
        let cells: Vec<String> = subjects.iter().map(cell).collect();
        table.add_row(std::iter::once(operation.title().to_owned()).chain(cells));
    }
    writeln!(out, "\n{table}")
}

/// Prints the page faults: a row for each number of threads.
fn print_faults(out: &mut impl Write, measured: &Measured, threads: &[u64]) -> io::Result<()> {
    let subjects: Vec<Subject> = Subject::ALL.iter().copied().filter(|subject| subject.can(Operation::Fault)).collect();
    let names = subjects.iter().map(|subject| subject.name());
    let mut header = vec![format!("a page fault, {MEDIAN}")];
    header.extend(names.clone().map(str::to_owned));
    header.extend(names.clone().skip(1).map(|name| format!("slat over {name}")));
    header.extend(names.map(|name| format!("{name}: scaling")));
    let mut table = table::figures(header);
    for &nr_threads in threads {
        let cells: Vec<Option<&Cell>> =
            subjects.iter().map(|&subject| measured.cell(Operation::Fault, nr_threads, subject)).collect();
        let show = |text: &dyn Fn(&Cell) -> String| {
            cells.iter().map(|cell| cell.map_or_else(|| NOTHING.to_owned(), text)).collect::<Vec<String>>()
        };
        let mut row = vec![threads_name(nr_threads)];
        row.extend(show(&time));
        row.extend(show(&|cell| ratio(measured.ratio_to(Subject::Slat, cell))).into_iter().skip(1));
        row.extend(show(&|cell| ratio(measured.scaling(cell))));
        table.add_row(row);
    }
    writeln!(out, "\n{table}")
}

pub(crate) fn threads_name(nr_threads: u64) -> String {
    if nr_threads == 1 { "1 thread".to_owned() } else { format!("{nr_threads} threads") }
}

/// Prints the tables and the notes.
pub(super) fn print(out: &mut impl Write, args: &PeersArgs, measured: &Measured) -> io::Result<()> {
    let versions: Vec<String> =
        Subject::ALL.iter().map(|subject| format!("{} {}", subject.name(), subject.version())).collect();
    writeln!(out, "{}; {} pages a thread, each thread its own", versions.join(", "), args.pages)?;
    let threads = args.threads();
    let mut operations = args.operations();
    if operations.first() == Some(&Operation::Fault) {
        operations.remove(0);
        print_faults(out, measured, &threads)?;
    }
    if !operations.is_empty() {
        let subjects: Vec<Subject> =
            Subject::ALL.iter().copied().filter(|subject| subject.can(Operation::Query)).collect();
        for &nr_threads in &threads {
            let title = format!("{}, {MEDIAN}", threads_name(nr_threads));
            print_table(out, measured, title, (&operations, nr_threads, &subjects), time)?;
        }
        for (slat, &nr_threads) in SLAT.into_iter().flat_map(|slat| threads.iter().map(move |threads| (slat, threads)))
        {
            let title = format!("speed-up of {}: {}", slat.name(), threads_name(nr_threads));
            let others: Vec<Subject> = subjects.iter().copied().filter(|subject| !SLAT.contains(subject)).collect();
            let able: Vec<Operation> = operations.iter().copied().filter(|&operation| slat.can(operation)).collect();
            if !able.is_empty() {
                print_table(out, measured, title, (&able, nr_threads, &others), |cell| {
                    ratio(measured.ratio_to(slat, cell))
                })?;
            }
        }
    }
    print_behind(out, measured, &args.operations())?;
    print_notes(out, args, measured)
}

/// Prints in which operations both ways to use slat are slower, on one thread, than the fastest peer,
/// and why.
fn print_behind(out: &mut impl Write, measured: &Measured, operations: &[Operation]) -> io::Result<()> {
    let behind = |&operation: &Operation| {
        let (slat, peers): (Vec<&Cell>, Vec<&Cell>) = Subject::ALL
            .iter()
            .filter(|subject| SLAT.contains(subject) || subject.is_peer())
            .filter_map(|&subject| measured.cell(operation, 1, subject))
            .partition(|cell| SLAT.contains(&cell.subject));
        let (slat, peer) = (fastest(&slat)?, fastest(&peers)?);
        let ratios = peer.times.paired_ratios(&slat.times);
        let (ratio, name) = (results::cell(&ratios, Unit::Ratio), peer.subject.name());
        let line = || format!("- {}: {ratio} of the speed of {name}: {}.", operation.title(), operation.why_behind());
        (ratios.median() < 1.0).then(line)
    };
    let lines: Vec<String> = operations.iter().filter_map(behind).collect();
    if !lines.is_empty() {
        writeln!(out, "\nBehind the fastest peer on one thread, the faster of slat and slat-pinned:")?;
    }
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))
}

fn fastest<'c>(cells: &[&'c Cell]) -> Option<&'c Cell> {
    cells.iter().copied().min_by(|one, other| one.times.median().total_cmp(&other.times.median()))
}

fn print_notes(out: &mut impl Write, args: &PeersArgs, measured: &Measured) -> io::Result<()> {
    let host = HostDescription::read();
    writeln!(
        out,
        "\n{} interleaved runs. Times are wall time for each page (of 2 MiB where noted), over all threads: n threads without\n\
         contention take the n-th part. The speed-up is that of slat over the peer, the scaling is against one thread; both\n\
         are of ratios within a run.",
        measured.nr_runs
    )?;
    writeln!(
        out,
        "slat takes no lock. The peers have none on 1 thread; several threads take a std Mutex for each call: of 64 pages \
         where\nnoted, of 512 for queries, of all pages for ranges and \"protect one by one\"."
    )?;
    writeln!(
        out,
        "slat begins a dirty log (\"protect range\"), gets one (\"protect one by one\"), invalidates (\"unmap\") and pre-faults \
         (\"map\");\nslat-pinned calls map_range, protect_range, unmap_range and translate, as the peers are called: they only change \
         the tables.\nslat write-protects dense blocks of 2 MiB lazily, as a whole: the next write to each protects its pages."
    )?;
    not_run().iter().try_for_each(|line| writeln!(out, "{line}"))?;
    writeln!(
        out,
        "Measured on {MEASURED_ON} ({}, {}, Linux {}): the calls by themselves; no CPU walks the tables.",
        host.nr_cpus, host.cpu_model, host.kernel_release
    )?;
    let most_threads = args.threads().last().copied().unwrap_or(1);
    if most_threads as usize > topology::usable_cpus().len() {
        writeln!(
            out,
            "{most_threads} threads on {} CPUs: the times measure the scheduler too.",
            topology::usable_cpus().len()
        )?;
    }
    writeln!(out, "Verified: after each run all pages were looked up, and all tables freed.")
}

/// The object of `--json`.
pub(super) fn results(args: &PeersArgs, measured: &Measured) -> Results {
    let mut results = Vec::new();
    for cell in &measured.cells {
        let name = cell.job.operation.name();
        let labels = labels([("subject", cell.subject.name().into()), ("threads", cell.job.nr_threads.into())]);
        results.push(Figure::new(name, Unit::Seconds, &labels, cell.times.iter()));
        for (what, ratios) in [
            ("ratio_to_slat", measured.ratio_to(Subject::Slat, cell)),
            ("ratio_to_slat_pinned", measured.ratio_to(Subject::Pinned, cell)),
            ("speedup", measured.scaling(cell)),
        ] {
            let better = (what == "speedup").then_some(Better::More);
            let figure = |ratios: Samples| {
                Figure::new(format!("{name}_{what}"), Unit::Ratio, &labels, ratios.iter()).with_better(better)
            };
            results.extend(ratios.map(figure));
        }
    }
    results.retain(|figure| !figure.samples.is_empty());
    let versions: BTreeMap<&str, String> =
        Subject::ALL.iter().map(|subject| (subject.name(), subject.version())).collect();
    let host = Host { measured_on: MEASURED_ON.to_owned(), ..Host::read(None) };
    let config = json!({
        "threads": args.threads(),
        "operations": args.operations().into_iter().map(Operation::name).collect::<Vec<_>>(),
        "pages": args.pages,
        "runs": args.runs,
        "versions": versions,
    });
    Results { not_run: not_run(), ..Results::new("peers", config, host, results) }
}

/// The peers that this machine cannot have.
fn not_run() -> Vec<NotRun> {
    if cfg!(target_arch = "x86_64") {
        return Vec::new();
    }
    let why =
        "of the tables that are measured here it has only those of the CPU that it is built for, and this is no x86-64";
    vec![NotRun { what: "page_table_multiarch".to_owned(), why: why.to_owned() }]
}
