//! What `slat dirty-log` prints and writes.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use serde_json::json;
use slat::{Histogram, Locking, PAGE_SIZE, Stats};
use slat_machine::topology::HostDescription;

use super::{Run, Series, manual_protect};
use crate::args::{
    DirtyLogArgs, DirtyTrackingArg, PagingArg, dirty_tracking, locking_name, manual_protect_name, protection_name,
};
use crate::results::{Figure, Results, Samples, host_json, measured_on};
use crate::table::{self, humanly};

/// A phase: its name in results, its name in the table, and its durations in one run.
struct Phase {
    name: &'static str,
    title: &'static str,
    times: fn(&Run) -> Vec<Duration>,
}

/// The phases, in their order. Dirtying, getting and clearing are of one round.
const PHASES: [Phase; 6] = [
    Phase { name: "populate_memory", title: "Populate memory time", times: |run| vec![run.populate] },
    Phase { name: "enable_dirty_logging", title: "Enabling dirty logging time", times: |run| vec![run.enable] },
    Phase { name: "dirty_memory", title: "Dirty memory time (a round)", times: |run| run.dirty.clone() },
    Phase { name: "get_dirty_log", title: "Get dirty log time (a round)", times: |run| run.get.clone() },
    Phase { name: "clear_dirty_log", title: "Clear dirty log time (a round)", times: |run| run.clear.clone() },
    Phase { name: "disable_dirty_logging", title: "Disabling dirty logging time", times: |run| vec![run.disable] },
];

/// The phases that there were: without manual protect, there is no clearing.
fn phases_of(all: &[Series]) -> impl Iterator<Item = &'static Phase> {
    PHASES.iter().filter(|phase| all.iter().any(|series| samples(series, phase.times).len() != 0))
}

/// A figure besides the phases, as the mean over runs.
struct Other {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&Run) -> f64,
}

const OTHERS: [Other; 15] = [
    Other { name: "faults", title: "Faults", unit: "count", value: |run| run.stats.faults as f64 },
    Other { name: "spurious", title: "  of them spurious", unit: "count", value: |run| run.stats.spurious as f64 },
    Other { name: "retries", title: "Retries", unit: "count", value: |run| run.stats.retries as f64 },
    Other { name: "exits", title: "Exits (ring full)", unit: "count", value: |run| run.stats.exits as f64 },
    Other { name: "flushes", title: "Flushes", unit: "count", value: |run| run.stats.flushes as f64 },
    Other {
        name: "pages_protected",
        title: "Leaves protected or cleaned",
        unit: "count",
        value: |run| run.stats.protected as f64,
    },
    Other {
        name: "tables_closed",
        title: "Tables protected lazily",
        unit: "count",
        value: |run| run.stats.tables_closed as f64,
    },
    Other { name: "splits", title: "Huge pages split", unit: "count", value: |run| run.stats.splits as f64 },
    Other { name: "lock_waits", title: "Waits for the lock", unit: "count", value: |run| run.stats.lock_waits as f64 },
    Other {
        name: "lock_wait_time",
        title: "Time in these waits (all vCPUs)",
        unit: "s",
        value: |run| seconds(run.stats.lock_wait_ns.sum()),
    },
    Other {
        name: "resolve_time",
        title: "Resolve time (all vCPUs)",
        unit: "s",
        value: |run| seconds(run.stats.resolve_time_ns()),
    },
    Other {
        name: "engine_time",
        title: "Engine time (all vCPUs)",
        unit: "s",
        value: |run| seconds(run.stats.engine_time_ns()),
    },
    Other {
        name: "tables_bytes",
        title: "Tables",
        unit: "bytes",
        value: |run| (run.stats.live_tables() * PAGE_SIZE) as f64,
    },
    Other { name: "leaves_2m", title: "Leaves of 2 MiB", unit: "count", value: |run| run.stats.installed_2m as f64 },
    Other { name: "verified", title: "Reads verified", unit: "count", value: |run| run.nr_verified as f64 },
];

/// A quantile of a histogram, over all runs.
struct Quantile {
    name: &'static str,
    title: &'static str,
    per_mille: u32,
    histogram: fn(&Stats) -> &Histogram,
}

const QUANTILES: [Quantile; 6] = [
    Quantile { name: "guest_stall_p50", title: "Guest stall in a fault, p50", per_mille: 500, histogram: stall },
    Quantile { name: "guest_stall_p99", title: "Guest stall in a fault, p99", per_mille: 990, histogram: stall },
    Quantile { name: "guest_stall_max", title: "Guest stall in a fault, worst", per_mille: 1000, histogram: stall },
    Quantile { name: "lock_wait_p50", title: "Wait for the lock, p50", per_mille: 500, histogram: lock_wait },
    Quantile { name: "lock_wait_p99", title: "Wait for the lock, p99", per_mille: 990, histogram: lock_wait },
    Quantile { name: "lock_wait_max", title: "Wait for the lock, worst", per_mille: 1000, histogram: lock_wait },
];

fn stall(stats: &Stats) -> &Histogram {
    &stats.guest_stall_ns
}

fn lock_wait(stats: &Stats) -> &Histogram {
    &stats.lock_wait_ns
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

fn samples(series: &Series, times: fn(&Run) -> Vec<Duration>) -> Samples {
    let mut samples = Samples::default();
    for time in series.runs.iter().flat_map(times) {
        samples.push(time.as_secs_f64());
    }
    samples
}

/// The quantile in seconds, over all runs; `None` if nothing was recorded.
fn quantile(series: &Series, quantile: &Quantile) -> Option<f64> {
    let mut sum = Histogram::default();
    for run in &series.runs {
        sum.merge((quantile.histogram)(&run.stats));
    }
    (sum.count() != 0).then(|| seconds(sum.quantile(quantile.per_mille)))
}

/// How many times as fast as `base` each phase of `series` is: the median over the runs, each against the run of `base`
/// beside it, so that it holds when the machine's speed drifts.
fn speed(phase: &Phase, series: &Series, base: &Series) -> f64 {
    let mut ratios = Samples::default();
    for (run, base) in series.runs.iter().zip(&base.runs) {
        let total = |run| (phase.times)(run).iter().sum::<Duration>().as_secs_f64();
        ratios.push(total(base) / total(run).max(f64::MIN_POSITIVE));
    }
    ratios.quantile(500)
}

/// The series that others are compared with.
fn baseline(all: &[Series]) -> Option<&Series> {
    all.iter().find(|series| series.locking == Locking::Exclusive && all.len() > 1)
}

fn mean(series: &Series, value: fn(&Run) -> f64) -> f64 {
    series.runs.iter().map(value).sum::<f64>() / series.runs.len().max(1) as f64
}

/// Prints the tables, and what has to be said about the figures.
pub(super) fn print(out: &mut impl Write, args: &DirtyLogArgs, all: &[Series]) -> io::Result<()> {
    let host = HostDescription::read();
    writeln!(
        out,
        "{} vCPUs, {} each ({} access), slots: {}, memory: {}, tables: {}, paging: {}, rounds: {}, writes: {}%{}",
        args.vcpus,
        humanly(args.bytes as f64, "bytes"),
        if args.overlap { "overlapping" } else { "partitioned" },
        args.slots,
        args.backing,
        args.format.name(),
        paging_name(args.paging),
        args.iterations,
        args.write_percent,
        if args.random_access { ", random order" } else { "" },
    )?;
    let tracking = dirty_tracking(args.tracking, args.protection);
    writeln!(
        out,
        "dirty pages: {}{}, manual protect: {}, huge pages: {}",
        args.tracking.name(),
        protection_name(tracking).map(|name| format!(" ({name})")).unwrap_or_default(),
        manual_protect_name(manual_protect(args)),
        args.huge_pages.name(),
    )?;
    writeln!(out, "Test iterations: {}", args.iterations)?;
    if let [series] = all {
        for (index, run) in series.runs.iter().enumerate() {
            print_run(out, index, run)?;
        }
    }
    print_phases(out, all)?;
    print_others(out, all)?;
    print_notes(out, args, all, &host)
}

/// A time as dirty_log_perf_test prints it.
fn line(out: &mut impl Write, what: &str, time: Duration) -> io::Result<()> {
    writeln!(out, "{what} time: {}.{:09}s", time.as_secs(), time.subsec_nanos())
}

/// One run in the lines of dirty_log_perf_test.
fn print_run(out: &mut impl Write, index: usize, run: &Run) -> io::Result<()> {
    writeln!(out, "Run {}", index + 1)?;
    line(out, "Populate memory", run.populate)?;
    line(out, "Enabling dirty logging", run.enable)?;
    for (round, (dirty, get)) in run.dirty.iter().zip(&run.get).enumerate() {
        line(out, &format!("Iteration {} dirty memory", round + 1), *dirty)?;
        line(out, &format!("Iteration {} get dirty log", round + 1), *get)?;
        if let Some(clear) = run.clear.get(round) {
            line(out, &format!("Iteration {} clear dirty log", round + 1), *clear)?;
        }
    }
    line(out, "Disabling dirty logging", run.disable)?;
    over_iterations(out, "Get", &run.get)?;
    if run.clear.is_empty() { Ok(()) } else { over_iterations(out, "Clear", &run.clear) }
}

/// The sum of a phase's rounds, as dirty_log_perf_test prints it.
fn over_iterations(out: &mut impl Write, what: &str, times: &[Duration]) -> io::Result<()> {
    let total: Duration = times.iter().sum();
    let rounds = times.len();
    let average = total / u32::try_from(rounds).unwrap_or(u32::MAX).max(1);
    writeln!(
        out,
        "{what} dirty log over {rounds} iterations took {}.{:09}s. (Avg {}.{:09}s/iteration)",
        total.as_secs(),
        total.subsec_nanos(),
        average.as_secs(),
        average.subsec_nanos()
    )
}

fn header(all: &[Series], first: &str) -> Vec<String> {
    let mut header = vec![first.to_owned()];
    header.extend(all.iter().map(|series| format!("lock {}", locking_name(series.locking))));
    header
}

fn print_phases(out: &mut impl Write, all: &[Series]) -> io::Result<()> {
    let nr_runs = all.first().map_or(0, |series| series.runs.len());
    let mut phases = table::figures(header(all, &format!("seconds, mean ({nr_runs} runs)")));
    let mut spread = table::figures(header(all, "p50 / p99 / worst, and number of values"));
    for phase in phases_of(all) {
        let columns: Vec<Samples> = all.iter().map(|series| samples(series, phase.times)).collect();
        let name = || std::iter::once(phase.title.to_owned());
        let means = columns.iter().map(|samples| format!("{:.9}s", samples.mean()));
        phases.add_row(table::row(name().chain(means)));
        let spreads = columns.iter().map(|samples| {
            let [median, p99, worst] = [500, 990, 1000].map(|rank| humanly(samples.quantile(rank), "s"));
            format!("{median} / {p99} / {worst} ({})", samples.len())
        });
        spread.add_row(table::row(name().chain(spreads)));
    }
    writeln!(out, "\n{phases}")?;
    if let Some(base) = baseline(all) {
        let mut speeds = table::figures(header(all, "speed against exclusive, median of paired runs"));
        for phase in phases_of(all) {
            let ratios = all.iter().map(|series| format!("{:.2}", speed(phase, series, base)));
            speeds.add_row(table::row(std::iter::once(phase.title.to_owned()).chain(ratios)));
        }
        writeln!(out, "\n{speeds}")?;
    }
    writeln!(out, "\n{spread}")
}

fn print_others(out: &mut impl Write, all: &[Series]) -> io::Result<()> {
    let mut others = table::figures(header(all, "mean of a run"));
    for other in &OTHERS {
        let values = all.iter().map(|series| humanly(mean(series, other.value), other.unit));
        others.add_row(table::row(std::iter::once(other.title.to_owned()).chain(values)));
    }
    for which in &QUANTILES {
        let values = all.iter().map(|series| quantile(series, which).map_or("-".to_owned(), |time| humanly(time, "s")));
        others.add_row(table::row(std::iter::once(which.title.to_owned()).chain(values)));
    }
    writeln!(out, "\n{others}\n")
}

fn print_notes(out: &mut impl Write, args: &DirtyLogArgs, all: &[Series], host: &HostDescription) -> io::Result<()> {
    if let Some(run) = all.first().and_then(|series| series.runs.first()) {
        writeln!(out, "{}", measured_on(host, run.flush_method))?;
    }
    if args.vcpus > host.nr_cpus {
        writeln!(out, "{} vCPUs on {} CPUs: the times measure the scheduler too.", args.vcpus, host.nr_cpus)?;
    }
    let nr_samples: u64 = all.iter().flat_map(|series| &series.runs).map(|run| run.stats.guest_stall_ns.count()).sum();
    writeln!(
        out,
        "Guest stall, resolve and engine time are from a sample of the faults ({nr_samples} of them), without waits for a \
         CPU; waits for the lock are all of them, and include waits for a CPU."
    )?;
    let verified: u64 = all.iter().flat_map(|series| &series.runs).map(|run| run.nr_verified).sum();
    write!(out, "Verified: {verified} reads found what was written")?;
    if args.check {
        write!(out, "; every harvest agreed with the guest's memory, stopped and running")?;
    }
    writeln!(out, ".")
}

fn paging_name(paging: PagingArg) -> &'static str {
    match paging {
        PagingArg::Flat => "flat",
        PagingArg::TwoDimensional => "2d",
    }
}

/// The object of `--json`.
pub(super) fn results(args: &DirtyLogArgs, all: &[Series]) -> Results {
    let host = HostDescription::read();
    let mut results = Vec::new();
    for series in all {
        let labels = BTreeMap::from([("lock", locking_name(series.locking).into())]);
        let mut push = |name: String, value: f64, unit: &'static str| {
            results.push(Figure { name, value, unit, labels: labels.clone() });
        };
        for phase in phases_of(all) {
            let samples = samples(series, phase.times);
            push(phase.name.to_owned(), samples.mean(), "s");
            push(format!("{}_deviation", phase.name), samples.deviation(), "s");
            push(format!("{}_p50", phase.name), samples.quantile(500), "s");
            push(format!("{}_p99", phase.name), samples.quantile(990), "s");
            push(format!("{}_max", phase.name), samples.quantile(1000), "s");
            if let Some(base) = baseline(all) {
                push(format!("{}_speed_vs_exclusive", phase.name), speed(phase, series, base), "ratio");
            }
        }
        for other in &OTHERS {
            push(other.name.to_owned(), mean(series, other.value), other.unit);
        }
        for which in &QUANTILES {
            if let Some(time) = quantile(series, which) {
                push(which.name.to_owned(), time, "s");
            }
        }
        push("runs".to_owned(), series.runs.len() as f64, "count");
    }
    let tracking = dirty_tracking(args.tracking, args.protection);
    let flush_method = all.first().and_then(|series| series.runs.first()).map(|run| run.flush_method);
    Results {
        experiment: "dirty-log",
        config: json!({
            "vcpus": args.vcpus,
            "bytes": args.bytes,
            "iterations": args.iterations,
            "overlap": args.overlap,
            "write_percent": args.write_percent,
            "random_access": args.random_access,
            "slots": args.slots,
            "backing": args.backing.to_string(),
            "run_while_disabling": args.run_while_disabling,
            "tracking": args.tracking.name(),
            "ring_entries": (args.tracking == DirtyTrackingArg::Ring).then_some(args.ring_entries),
            "protection": protection_name(tracking),
            "manual_protect": manual_protect_name(manual_protect(args)),
            "huge_pages": args.huge_pages.name(),
            "seed": args.seed,
            "pin": args.pin,
            "format": args.format.name(),
            "paging": paging_name(args.paging),
            "runs": args.runs,
            "check": args.check,
        }),
        host: host_json(&host, flush_method),
        results,
    }
}
