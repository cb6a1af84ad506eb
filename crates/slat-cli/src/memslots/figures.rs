//! The output of `slat memslots`.

use humantime::format_duration;
use serde_json::json;
use slat_machine::linux::topology::HostDescription;

use super::area::AREA_PAGES;
use super::experiments::Run;
use super::{MemslotsArgs, Series};
use crate::options::{Named, ValueName};
use crate::quantity::Unit;
use crate::results::{Host, PerRun, Results, labels, measured_on};
use crate::table::{self, MEDIAN};

/// The figures of a run; counts are those of one iteration.
const COLUMNS: [PerRun<Run>; 9] = [
    PerRun::new("iterations_per_second", "iterations/s", Unit::PerSecond, |run| {
        Some(1.0 / run.iteration_s().max(f64::MIN_POSITIVE))
    }),
    PerRun::count("faults", "faults", |run| each(run, run.stats.faults)),
    PerRun::count("retries", "retries", |run| each(run, run.stats.retries)),
    PerRun::count("flushes", "flushes", |run| each(run, run.stats.flushes)),
    PerRun::count("mmio_exits", "MMIO exits", |run| each(run, run.counts.nr_mmio_exits)),
    PerRun::count("host_calls", "host's calls", |run| each(run, run.counts.nr_host_calls)),
    PerRun::time("host_call", "a call", host_call_s),
    PerRun::time("guest_stall_p50", "stall p50", |run| stall_s(run, 500)),
    PerRun::time("guest_stall_p99", "stall p99", |run| stall_s(run, 990)),
];

fn each(run: &Run, count: u64) -> Option<f64> {
    Some(count as f64 / run.nr_iterations as f64)
}

/// Seconds for one discard or move.
fn host_call_s(run: &Run) -> Option<f64> {
    (run.counts.nr_host_calls != 0).then(|| run.counts.host_time.as_secs_f64() / run.counts.nr_host_calls as f64)
}

/// A quantile of the guest's stall in a fault, in seconds.
fn stall_s(run: &Run, per_mille: u32) -> Option<f64> {
    let stall = &run.stats.guest_stall_ns;
    (stall.count() != 0).then(|| stall.quantile(per_mille) as f64 / 1e9)
}

/// Further figures, which the table does not show.
const OTHERS: [PerRun<Run>; 4] = [
    PerRun::time("iteration", "an iteration", |run| Some(run.iteration_s())),
    PerRun::count("iterations", "iterations", |run| Some(run.nr_iterations as f64)),
    PerRun::time("slot_setup", "slot setup", |run| Some(run.setup.as_secs_f64())),
    PerRun::count("verified", "words verified", |run| Some(run.counts.nr_verified as f64)),
];

/// Prints the lines of KVM's test, then the table and the notes.
pub(super) fn print(out: &mut String, args: &MemslotsArgs, all: &[&Series]) {
    add_line!(
        out,
        "{} pages in {} slots of {} pages (the last one has the rest), 1 vCPU, tables: {}",
        AREA_PAGES,
        args.slots,
        AREA_PAGES / u64::from(args.slots),
        args.tables.format.name()
    );
    for series in all {
        print_series(out, args, series);
    }
    print_table(out, all);
    let host = HostDescription::read();
    if let Some(run) = all.first().and_then(|series| series.best()) {
        add_line!(out, "{}", measured_on(&host, run.flush_method));
    }
    if host.nr_cpus < 2 {
        add_line!(out, "Host and guest share {} CPU: the times measure the scheduler too.", host.nr_cpus);
    }
    let nr_verified: u64 = all.iter().flat_map(|series| &series.runs).map(|run| run.counts.nr_verified).sum();
    add_line!(out, "Verified: {nr_verified} words had the value that was written.");
}

fn print_series(out: &mut String, args: &MemslotsArgs, series: &Series) {
    add!(
        out,
        "Testing {} performance with {} runs, {} each",
        series.of.0.name(),
        args.runs,
        format_duration(args.duration)
    );
    match &args.tables.lock.values.len() {
        1 => add_line!(out, ""),
        _ => add_line!(out, " (lock {})", series.of.1.name()),
    }
    for run in &series.runs {
        let (setup, elapsed, iteration) = (run.setup.as_secs_f64(), run.elapsed.as_secs_f64(), run.iteration_s());
        add_line!(out, "Test took {setup:.9}s for slot setup + {elapsed:.9}s all iterations");
        add_line!(out, "Done {} iterations, avg {iteration:.9}s each", run.nr_iterations);
        if args.verbose {
            let slat::stats::Stats { faults, spurious, retries, zapped, flushes, .. } = &run.stats;
            add_line!(
                out,
                "  {faults} faults ({spurious} spurious), {retries} retries, {zapped} entries zapped, {flushes} flushes, \
                 {} MMIO exits, {} calls of the host, {} words verified",
                run.counts.nr_mmio_exits,
                run.counts.nr_host_calls,
                run.counts.nr_verified
            );
        }
    }
    if let Some(best) = series.best() {
        add_line!(
            out,
            "Best runtime result was {:.9}s per iteration (with {} iterations)",
            best.iteration_s(),
            best.nr_iterations
        );
    }
    let setup = series.best_setup().as_secs_f64();
    add_line!(out, "Best slot setup time for the whole test area was {setup:.9}s\n");
}

fn print_table(out: &mut String, all: &[&Series]) {
    let titles = COLUMNS.iter().map(|column| column.title.to_owned());
    let header = [format!("{MEDIAN}, counts of one iteration"), "lock".to_owned()];
    let mut figures = table::figures(header.into_iter().chain(titles));
    for series in all {
        let mut cells = vec![series.of.0.name().to_owned(), series.of.1.name().to_owned()];
        cells.extend(COLUMNS.iter().map(|column| column.cell(&series.runs)));
        figures.add_row(cells);
    }
    add_line!(out, "{figures}\n");
}

pub(super) fn results(args: &MemslotsArgs, all: &[&Series]) -> Results {
    let mut results = Vec::new();
    for series in all {
        let labels = labels([("test", series.of.0.name().into()), ("lock", series.of.1.name().into())]);
        let figures = OTHERS.iter().chain(&COLUMNS);
        results.extend(figures.filter_map(|figure| figure.figure(&series.runs, &labels)));
    }
    let flush_method = all.first().and_then(|series| series.best()).map(|run| run.flush_method);
    let config = json!({
        "first_test": args.first_test,
        "last_test": args.last_test,
        "seconds": args.duration.as_secs_f64(),
        "runs": args.runs,
        "slots": args.slots,
        "area_pages": AREA_PAGES,
        "extra_checks": args.extra_checks,
        "format": args.tables.format.name(),
    });
    Results::new("memslots", config, Host::read(flush_method), results)
}
