//! The output of `slat memslots`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::json;
use slat::stats::Histogram;
use slat_machine::topology::HostDescription;

use super::area::AREA_PAGES;
use super::experiments::Run;
use super::{MemslotsArgs, Series};
use crate::args::locking_name;
use crate::results::{Figure, Results, host_json, measured_on};
use crate::table::{self, humanly};

/// A figure of a run, for one iteration where that applies.
struct Column {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&Run) -> f64,
}

const COLUMNS: [Column; 7] = [
    Column {
        name: "iterations_per_second",
        title: "iterations/s",
        unit: "1/s",
        value: |run| 1.0 / run.iteration_s().max(f64::MIN_POSITIVE),
    },
    Column { name: "faults", title: "faults", unit: "count", value: |run| each(run, run.stats.faults) },
    Column { name: "retries", title: "retries", unit: "count", value: |run| each(run, run.stats.retries) },
    Column { name: "flushes", title: "flushes", unit: "count", value: |run| each(run, run.stats.flushes) },
    Column { name: "mmio_exits", title: "MMIO exits", unit: "count", value: |run| each(run, run.nr_mmio_exits) },
    Column { name: "host_calls", title: "host's calls", unit: "count", value: |run| each(run, run.nr_host_calls) },
    Column { name: "host_call", title: "a call", unit: "s", value: host_call_s },
];

fn each(run: &Run, count: u64) -> f64 {
    count as f64 / run.nr_iterations as f64
}

/// Seconds for one discard or move; 0 where there is none.
fn host_call_s(run: &Run) -> f64 {
    run.host_time.as_secs_f64() / run.nr_host_calls.max(1) as f64
}

/// A quantile of the guest's stall in a fault, over all runs, in seconds.
fn stall_s(series: &Series, per_mille: u32) -> Option<f64> {
    let mut sum = Histogram::default();
    for run in &series.runs {
        sum.merge(&run.stats.guest_stall_ns);
    }
    (sum.count() != 0).then(|| sum.quantile(per_mille) as f64 * 1e-9)
}

const STALLS: [(&str, &str, u32); 2] = [("guest_stall_p50", "stall p50", 500), ("guest_stall_p99", "stall p99", 990)];

/// Prints the lines of KVM's test, then the table and the notes.
pub(super) fn print(out: &mut impl Write, args: &MemslotsArgs, all: &[&Series]) -> io::Result<()> {
    writeln!(
        out,
        "{} pages in {} slots of {} pages (the last one has the rest), 1 vCPU, tables: {}",
        AREA_PAGES,
        args.slots,
        AREA_PAGES / u64::from(args.slots),
        args.format.name()
    )?;
    for series in all {
        print_series(out, args, series)?;
    }
    print_table(out, all)?;
    let host = HostDescription::read();
    if let Some(run) = all.first().and_then(|series| series.best()) {
        writeln!(out, "{}", measured_on(&host, run.flush_method))?;
    }
    if host.nr_cpus < 2 {
        writeln!(out, "Host and guest share {} CPU: the times measure the scheduler too.", host.nr_cpus)?;
    }
    let nr_verified: u64 = all.iter().flat_map(|series| &series.runs).map(|run| run.nr_verified).sum();
    writeln!(out, "Verified: {nr_verified} words had the value that was written.")
}

fn print_series(out: &mut impl Write, args: &MemslotsArgs, series: &Series) -> io::Result<()> {
    write!(out, "Testing {} performance with {} runs, {} seconds each", series.test.name(), args.runs, args.seconds)?;
    match args.lock.lockings().len() {
        1 => writeln!(out)?,
        _ => writeln!(out, " (lock {})", locking_name(series.locking))?,
    }
    for run in &series.runs {
        let (setup, elapsed, iteration) = (run.setup.as_secs_f64(), run.elapsed.as_secs_f64(), run.iteration_s());
        writeln!(out, "Test took {setup:.9}s for slot setup + {elapsed:.9}s all iterations")?;
        writeln!(out, "Done {} iterations, avg {iteration:.9}s each", run.nr_iterations)?;
        if args.verbose {
            let slat::stats::Stats { faults, spurious, retries, zapped, flushes, .. } = &run.stats;
            writeln!(
                out,
                "  {faults} faults ({spurious} spurious), {retries} retries, {zapped} entries zapped, {flushes} flushes, \
                 {} MMIO exits, {} calls of the host, {} words verified",
                run.nr_mmio_exits, run.nr_host_calls, run.nr_verified
            )?;
        }
    }
    if let Some(best) = series.best() {
        writeln!(
            out,
            "Best runtime result was {:.9}s per iteration (with {} iterations)",
            best.iteration_s(),
            best.nr_iterations
        )?;
    }
    let setup = series.best_setup().as_secs_f64();
    writeln!(out, "Best slot setup time for the whole test area was {setup:.9}s\n")
}

fn print_table(out: &mut impl Write, all: &[&Series]) -> io::Result<()> {
    let titles = COLUMNS.iter().map(|column| column.title).chain(STALLS.map(|(_, title, _)| title));
    let header = ["best run, counts of one iteration", "lock"].into_iter().chain(titles);
    let mut figures = table::figures(header.map(str::to_owned));
    for series in all {
        let Some(best) = series.best() else { continue };
        let mut cells = vec![series.test.name().to_owned(), locking_name(series.locking).to_owned()];
        cells.extend(COLUMNS.iter().map(|column| cell((column.value)(best), column.unit)));
        cells
            .extend(STALLS.map(|(_, _, rank)| stall_s(series, rank).map_or("-".to_owned(), |time| humanly(time, "s"))));
        figures.add_row(table::row(cells));
    }
    writeln!(out, "{figures}\n")
}

/// Rates and means of counts: small ones have decimals.
fn cell(value: f64, unit: &str) -> String {
    match unit {
        "s" if value == 0.0 => "-".to_owned(),
        "s" => humanly(value, unit),
        _ if value == 0.0 => "0".to_owned(),
        _ if value < 10.0 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    }
}

/// The object of `--json`.
pub(super) fn results(args: &MemslotsArgs, all: &[&Series]) -> Results {
    let mut results = Vec::new();
    for series in all {
        let Some(best) = series.best() else { continue };
        let labels =
            BTreeMap::from([("test", series.test.name().into()), ("lock", locking_name(series.locking).into())]);
        let mut push = |name: &str, value: f64, unit: &'static str| {
            results.push(Figure { name: name.to_owned(), value, unit, labels: labels.clone() });
        };
        push("iteration", best.iteration_s(), "s");
        push("iterations", best.nr_iterations as f64, "count");
        push("slot_setup", series.best_setup().as_secs_f64(), "s");
        for column in &COLUMNS {
            push(column.name, (column.value)(best), column.unit);
        }
        for (name, _, rank) in STALLS {
            if let Some(time) = stall_s(series, rank) {
                push(name, time, "s");
            }
        }
        let nr_verified: u64 = series.runs.iter().map(|run| run.nr_verified).sum();
        push("verified", nr_verified as f64, "count");
        push("runs", series.runs.len() as f64, "count");
    }
    let flush_method = all.first().and_then(|series| series.best()).map(|run| run.flush_method);
    Results {
        experiment: "memslots",
        config: json!({
            "first_test": args.first_test,
            "last_test": args.last_test,
            "seconds": args.seconds,
            "runs": args.runs,
            "slots": args.slots,
            "area_pages": AREA_PAGES,
            "extra_checks": args.extra_checks,
            "format": args.format.name(),
        }),
        host: host_json(&HostDescription::read(), flush_method),
        results,
        histograms: Vec::new(),
        not_run: Vec::new(),
    }
}
