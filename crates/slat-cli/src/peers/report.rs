//! The output of `slat peers`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};
use slat_machine::topology::{self, HostDescription};

use super::PeersArgs;
use super::measure::{Cell, Measured};
use super::operation::Operation;
use super::subject::Subject;
use crate::results::{Figure, NotRun, Results, Samples, host_json};
use crate::table;

/// The CPUs of the measurement.
const MEASURED_ON: &str = "the host's CPUs";

/// Three digits or more.
fn digits(value: f64) -> String {
    match value {
        value if value < 9.995 => format!("{value:.2}"),
        value if value < 99.95 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

fn time(samples: &Samples) -> String {
    let [mean, deviation, p50] = [samples.mean(), samples.deviation(), samples.quantile(500)].map(digits);
    format!("{mean} ± {deviation} ({p50})")
}

fn ratio(samples: &Samples) -> String {
    digits(samples.quantile(500))
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
        let cell =
            |&subject: &Subject| measured.cell(operation, nr_threads, subject).map_or_else(|| "-".to_owned(), &show);
        let cells: Vec<String> = subjects.iter().map(cell).collect();
        table.add_row(table::row(std::iter::once(operation.title().to_owned()).chain(cells)));
    }
    writeln!(out, "\n{table}")
}

/// Prints the page faults: a row for each number of threads.
fn print_faults(out: &mut impl Write, measured: &Measured, threads: &[u64]) -> io::Result<()> {
    let subjects: Vec<Subject> = Subject::ALL.iter().copied().filter(|subject| subject.can(Operation::Fault)).collect();
    let names = subjects.iter().map(|subject| subject.name());
    let mut header = vec!["ns a page fault: mean ± deviation (p50)".to_owned()];
    header.extend(names.clone().map(str::to_owned));
    header.push("speed-up of slat".to_owned());
    header.extend(names.map(|name| format!("{name}: scaling")));
    let mut table = table::figures(header);
    for &nr_threads in threads {
        let cells: Vec<Option<&Cell>> =
            subjects.iter().map(|&subject| measured.cell(Operation::Fault, nr_threads, subject)).collect();
        let show = |samples: fn(&Cell) -> &Samples, show: fn(&Samples) -> String| {
            let text = |cell: &Option<&Cell>| match cell.map(samples) {
                Some(samples) if samples.len() > 0 => show(samples),
                _ => "-".to_owned(),
            };
            cells.iter().map(text).collect::<Vec<String>>()
        };
        let mut row = vec![threads_name(nr_threads)];
        row.extend(show(|cell| &cell.unit_ns, time));
        row.extend(show(|cell| &cell.ratio_to_slat, ratio).into_iter().skip(1));
        row.extend(show(|cell| &cell.speedup, ratio));
        table.add_row(table::row(row));
    }
    writeln!(out, "\n{table}")
}

fn threads_name(nr_threads: u64) -> String {
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
        // The peer of the faults has no other operation.
        let subjects: Vec<Subject> =
            Subject::ALL.iter().copied().filter(|subject| subject.can(Operation::Query)).collect();
        for &nr_threads in &threads {
            let title = format!("ns, {}: mean ± deviation (p50)", threads_name(nr_threads));
            print_table(out, measured, title, (&operations, nr_threads, &subjects), |cell| time(&cell.unit_ns))?;
        }
        for &nr_threads in &threads {
            let title = format!("speed-up of slat: {}", threads_name(nr_threads));
            let peers = &subjects[1..];
            print_table(out, measured, title, (&operations, nr_threads, peers), |cell| ratio(&cell.ratio_to_slat))?;
        }
    }
    print_notes(out, args, measured)
}

fn print_notes(out: &mut impl Write, args: &PeersArgs, measured: &Measured) -> io::Result<()> {
    let host = HostDescription::read();
    writeln!(
        out,
        "\n{} interleaved runs. Times are wall time for each page (of 2 MiB where noted), over all threads: n threads without\n\
         contention take the n-th part. The speed-up is that of slat over the peer, the scaling is against one thread; both\n\
         are medians of ratios within a run.",
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
         (\"map\");\nthe peers only change the tables. slat write-protects dense blocks of 2 MiB lazily, as a whole: the next \
         write to each\nprotects its pages."
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
        let mut push = |name: String, value: f64, unit: &'static str| {
            results.push(Figure { name, value, unit, labels: labels(cell.subject, cell.job.nr_threads) });
        };
        push(name.to_owned(), cell.unit_ns.mean(), "ns");
        push(format!("{name}_deviation"), cell.unit_ns.deviation(), "ns");
        push(format!("{name}_p50"), cell.unit_ns.quantile(500), "ns");
        for (what, ratios) in [("ratio_to_slat", &cell.ratio_to_slat), ("speedup", &cell.speedup)] {
            if ratios.len() > 0 {
                push(format!("{name}_{what}"), ratios.quantile(500), "ratio");
            }
        }
    }
    for nr_threads in args.threads() {
        let is_measured = |subject: &&Subject| {
            measured.cells.iter().any(|cell| (cell.subject, cell.job.nr_threads) == (**subject, nr_threads))
        };
        results.extend(Subject::ALL.iter().filter(is_measured).map(|&subject| Figure {
            name: "runs".to_owned(),
            value: f64::from(measured.nr_runs),
            unit: "count",
            labels: labels(subject, nr_threads),
        }));
    }
    let versions: BTreeMap<&str, &str> =
        Subject::ALL.iter().map(|subject| (subject.name(), subject.version())).collect();
    let mut host = host_json(&HostDescription::read(), None);
    host["measured_on"] = MEASURED_ON.into();
    Results {
        experiment: "peers",
        config: json!({
            "threads": args.threads(),
            "operations": args.operations().into_iter().map(Operation::name).collect::<Vec<_>>(),
            "pages": args.pages,
            "runs": args.runs,
            "versions": versions,
        }),
        host,
        results,
        not_run: not_run(),
        histograms: Vec::new(),
    }
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

fn labels(subject: Subject, nr_threads: u64) -> BTreeMap<&'static str, Value> {
    BTreeMap::from([("subject", subject.name().into()), ("threads", nr_threads.into())])
}
