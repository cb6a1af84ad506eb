//! The output of runs of the phases: the same for each experiment, but for the figures besides the
//! phases.

use std::time::Duration;

use serde_json::{Value, json};
use slat::PAGE_SIZE;
use slat::stats::{Histogram, Stats};

use super::{Column, EngineRun, Run, manual_protect};
use crate::options::{HugePagesArg, Named, ValueName, dirty_tracking, protection_name};
use crate::phases::PhasesArgs;
use crate::quantity::{Unit, quantity};
use crate::results::{Distribution, Figure, Host, PerRun, Results, cell, print_host};
use crate::statistics::Samples;
use crate::table::{self, MEDIAN};

/// A phase: its name in results, its name in the table, and its durations in one run.
struct Phase {
    name: &'static str,
    title: &'static str,
    times: fn(&Run) -> Vec<Duration>,
}

/// The phases, in their order. Dirtying, getting and clearing are of one round.
const PHASES: [Phase; 7] = [
    Phase { name: "populate_memory", title: "Populate memory time", times: |run| vec![run.populate] },
    Phase {
        name: "split_time",
        title: "Splitting time (a part of the next)",
        times: |run| run.split.into_iter().collect(),
    },
    Phase { name: "enable_dirty_logging", title: "Enabling dirty logging time", times: |run| vec![run.enable] },
    Phase { name: "dirty_memory", title: "Dirty memory time (a round)", times: |run| run.dirty.clone() },
    Phase { name: "get_dirty_log", title: "Get dirty log time (a round)", times: |run| run.get.clone() },
    Phase { name: "clear_dirty_log", title: "Clear dirty log time (a round)", times: |run| run.clear.clone() },
    Phase { name: "disable_dirty_logging", title: "Disabling dirty logging time", times: |run| vec![run.disable] },
];

/// One of the engine's counters; `None` if the run was not the engine's.
pub(crate) fn count(run: &Run, of: fn(&Stats) -> u64) -> Option<f64> {
    run.engine.as_ref().map(|engine| of(&engine.stats) as f64)
}

/// A counter in nanoseconds, in seconds.
fn time(run: &Run, of: fn(&Stats) -> u64) -> Option<f64> {
    run.engine.as_ref().map(|engine| seconds(of(&engine.stats)))
}

type Row = PerRun<Run>;

/// The figures of any experiment.
pub(crate) const OTHERS: [Row; 16] = [
    Row::count("faults", "Faults", |run| count(run, |stats| stats.faults)),
    Row::count("spurious", "  of them spurious", |run| count(run, |stats| stats.spurious)),
    Row::count("retries", "Retries", |run| count(run, |stats| stats.retries)),
    Row::count("exits", "Exits (ring full)", |run| count(run, |stats| stats.exits)),
    Row::count("flushes", "Flushes", |run| count(run, |stats| stats.flushes)),
    Row::count("pages_protected", "Leaf PTEs protected or cleaned", |run| count(run, |stats| stats.protected)),
    Row::count("tables_protected", "Directory entries protected", |run| count(run, |stats| stats.tables_protected)),
    Row::count("splits", "Huge pages split", |run| count(run, |stats| stats.splits)),
    Row::count("recoveries", "Huge pages recovered", |run| count(run, |stats| stats.recoveries)),
    Row::count("lock_waits", "Waits for the lock", |run| count(run, |stats| stats.lock_waits)),
    Row::time("lock_wait_time", "Time in these waits (all vCPUs)", |run| time(run, |stats| stats.lock_wait_ns.sum())),
    Row::time("resolve_time", "Resolve time (all vCPUs)", |run| time(run, Stats::resolve_time_ns)),
    Row::time("engine_time", "Engine time (all vCPUs)", |run| time(run, Stats::engine_time_ns)),
    Row::new("tables_bytes", "Tables", Unit::Bytes, |run| count(run, |stats| stats.live_tables() * PAGE_SIZE)),
    Row::count("leaves_2m", "Leaves of 2 MiB", |run| count(run, |stats| stats.installed_2m)),
    Row::count("verified", "Reads verified", |run| Some(run.nr_verified as f64)),
];

/// The figures of shadow paging.
pub(crate) const SHADOW_OTHERS: [Row; 5] = [
    Row::count("page_faults", "Page faults (exits)", |run| count(run, |stats| stats.page_faults)),
    Row::count("entries_synced", "Shadow PTEs synchronized", |run| count(run, |stats| stats.entries_synced)),
    Row::count("shadow_evictions", "Shadow pages evicted", |run| count(run, |stats| stats.shadow_evictions)),
    Row::count("shadow_tables", "Shadow pages", |run| run.engine.as_ref().map(|engine| engine.nr_shadow_tables as f64)),
    Row::count("shadow_leaves", "Shadow leaves", |run| count(run, Stats::shadow_leaves)),
];

type OfStats = fn(&Stats) -> &Histogram;

/// A quantile of a histogram of a run, in seconds; `None` if nothing was recorded.
fn quantile(run: &Run, histogram: OfStats, per_mille: u32) -> Option<f64> {
    let histogram = histogram(&run.engine.as_ref()?.stats);
    (histogram.count() != 0).then(|| seconds(histogram.quantile(per_mille)))
}

const QUANTILES: [Row; 9] = [
    Row::time("guest_stall_p50", "Guest stall in a fault, p50", |run| quantile(run, stall, 500)),
    Row::time("guest_stall_p99", "Guest stall in a fault, p99", |run| quantile(run, stall, 990)),
    Row::time("guest_stall_max", "Guest stall in a fault, worst", |run| quantile(run, stall, 1000)),
    Row::time("lock_wait_p50", "Wait for the lock, p50", |run| quantile(run, lock_wait, 500)),
    Row::time("lock_wait_p99", "Wait for the lock, p99", |run| quantile(run, lock_wait, 990)),
    Row::time("lock_wait_max", "Wait for the lock, worst", |run| quantile(run, lock_wait, 1000)),
    Row::time("lock_hold_p50", "Held the lock, p50", |run| quantile(run, lock_hold, 500)),
    Row::time("lock_hold_p99", "Held the lock, p99", |run| quantile(run, lock_hold, 990)),
    Row::time("lock_hold_max", "Held the lock, worst", |run| quantile(run, lock_hold, 1000)),
];

fn stall(stats: &Stats) -> &Histogram {
    &stats.guest_stall_ns
}

fn lock_wait(stats: &Stats) -> &Histogram {
    &stats.lock_wait_ns
}

fn lock_hold(stats: &Stats) -> &Histogram {
    &stats.lock_hold_ns
}

/// The distributions that results have as a whole.
const HISTOGRAMS: [(&str, OfStats); 4] =
    [("fault", |stats| &stats.fault_ns), ("guest_stall", stall), ("lock_wait", lock_wait), ("lock_hold", lock_hold)];

fn over_runs(column: &Column, histogram: OfStats) -> Histogram {
    let mut sum = Histogram::default();
    for engine in column.runs.iter().filter_map(|run| run.engine.as_ref()) {
        sum.merge(histogram(&engine.stats));
    }
    sum
}

fn seconds(ns: u64) -> f64 {
    Duration::from_nanos(ns).as_secs_f64()
}

/// A phase's times, of all rounds of all runs.
fn samples(column: &Column, phase: &Phase) -> Samples {
    column.runs.iter().flat_map(phase.times).map(|time| time.as_secs_f64()).collect()
}

/// A phase's time of each run, the sum over all rounds.
fn totals(column: &Column, phase: &Phase) -> Samples {
    column.runs.iter().map(|run| (phase.times)(run).iter().sum::<Duration>().as_secs_f64()).collect()
}

/// How many times as fast as `base` each phase of `column` is, run by run.
fn speeds(phase: &Phase, column: &Column, base: &Column) -> Samples {
    totals(base, phase).paired_ratios(&totals(column, phase))
}

/// A time as dirty_log_perf_test prints it.
fn line(out: &mut String, what: &str, time: Duration) {
    add_line!(out, "{what} time: {}.{:09}s", time.as_secs(), time.subsec_nanos());
}

/// One run in the lines of dirty_log_perf_test.
fn print_run(out: &mut String, index: usize, run: &Run) {
    add_line!(out, "Run {}", index + 1);
    line(out, "Populate memory", run.populate);
    if let Some(split) = run.split {
        line(out, "Splitting", split);
    }
    line(out, "Enabling dirty logging", run.enable);
    for (round, (dirty, get)) in run.dirty.iter().zip(&run.get).enumerate() {
        line(out, &format!("Iteration {} dirty memory", round + 1), *dirty);
        line(out, &format!("Iteration {} get dirty log", round + 1), *get);
        if let Some(clear) = run.clear.get(round) {
            line(out, &format!("Iteration {} clear dirty log", round + 1), *clear);
        }
    }
    line(out, "Disabling dirty logging", run.disable);
    over_iterations(out, "Get", &run.get);
    if !run.clear.is_empty() {
        over_iterations(out, "Clear", &run.clear);
    }
}

/// The sum of a phase's rounds, as dirty_log_perf_test prints it.
fn over_iterations(out: &mut String, what: &str, times: &[Duration]) {
    let total: Duration = times.iter().sum();
    let rounds = times.len();
    let average = total / u32::try_from(rounds).unwrap_or(u32::MAX).max(1);
    add_line!(
        out,
        "{what} dirty log over {rounds} iterations took {}.{:09}s. (Avg {}.{:09}s/iteration)",
        total.as_secs(),
        total.subsec_nanos(),
        average.as_secs(),
        average.subsec_nanos()
    );
}

/// The column that others are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Base {
    pub(crate) column: usize,
    /// Its name in what is printed and, with `_` for `-`, in results.
    pub(crate) name: &'static str,
}

/// All runs, and how they are reported.
pub(crate) struct Report<'a> {
    pub(crate) args: &'a PhasesArgs,
    pub(crate) columns: &'a [Column],
    pub(crate) base: Option<Base>,
    pub(crate) others: Vec<&'a PerRun<Run>>,
}

impl Report<'_> {
    /// The phases that there were: without manual protect, there is no clearing.
    fn phases(&self) -> impl Iterator<Item = &'static Phase> {
        PHASES.iter().filter(|phase| self.columns.iter().any(|column| !samples(column, phase).is_empty()))
    }

    /// The column that others are compared with, if there are others.
    fn base(&self) -> Option<(&Column, &'static str)> {
        let base = self.base.filter(|_| self.columns.len() > 1)?;
        Some((self.columns.get(base.column)?, base.name))
    }

    fn runs(&self) -> impl Iterator<Item = &Run> {
        self.columns.iter().flat_map(|column| &column.runs)
    }

    fn engine_runs(&self) -> impl Iterator<Item = &EngineRun> {
        self.runs().filter_map(|run| run.engine.as_ref())
    }

    /// The titles of a table's columns, the first being `first`.
    pub(crate) fn header(&self, first: &str) -> Vec<String> {
        std::iter::once(first.to_owned()).chain(self.columns.iter().map(|column| column.of.title.clone())).collect()
    }

    pub(crate) fn print_head(&self, out: &mut String) {
        let args = self.args;
        add_line!(
            out,
            "{} vCPUs, {} each ({} access), slots: {}, memory: {}, tables: {}, paging: {}, rounds: {}, writes: {}%{}",
            args.guest.vcpus,
            quantity(args.guest.bytes as f64, Unit::Bytes),
            if args.guest.overlap { "overlapping" } else { "partitioned" },
            args.slots,
            args.guest.backing,
            args.tables.format.name(),
            args.paging.name(),
            args.iterations,
            args.write_percent,
            if args.random_access { ", random order" } else { "" }
        );
        let tracking = dirty_tracking(args.tracking, args.protection);
        add_line!(
            out,
            "dirty pages: {}{}, manual protect: {}, huge pages: {}{}",
            args.tracking.name(),
            protection_name(tracking).map(|name| format!(" ({name})")).unwrap_or_default(),
            manual_protect(args).name(),
            args.huge_pages.name(),
            if args.huge_pages == HugePagesArg::Split { format!(" ({})", args.split.name()) } else { String::new() }
        );
    }

    /// Prints the tables; with one column, before them each run.
    pub(crate) fn print_tables(&self, out: &mut String) {
        add_line!(out, "Test iterations: {}", self.args.iterations);
        if let [column] = self.columns {
            for (index, run) in column.runs.iter().enumerate() {
                print_run(out, index, run);
            }
        }
        self.print_phases(out);
        self.print_others(out)
    }

    fn print_phases(&self, out: &mut String) {
        let nr_runs = self.columns.iter().map(|column| column.runs.len()).max().unwrap_or(0);
        let mut phases = table::figures(self.header(&format!("{MEDIAN}, {nr_runs} runs")));
        for phase in self.phases() {
            let times = self.columns.iter().map(|column| cell(&samples(column, phase), Unit::Seconds));
            phases.add_row(std::iter::once(phase.title.to_owned()).chain(times));
        }
        add_line!(out, "\n{phases}");
        if let Some((base, name)) = self.base() {
            let mut table = table::figures(self.header(&format!("times as fast as {name}, {MEDIAN} of paired runs")));
            for phase in self.phases() {
                let ratios = self.columns.iter().map(|column| cell(&speeds(phase, column, base), Unit::Ratio));
                table.add_row(std::iter::once(phase.title.to_owned()).chain(ratios));
            }
            add_line!(out, "\n{table}");
        }
    }

    fn print_others(&self, out: &mut String) {
        let mut table = table::figures(self.header(&format!("{MEDIAN}, of a run")));
        let columns: Vec<&[Run]> = self.columns.iter().map(|column| &column.runs[..]).collect();
        table.add_per_run(self.others.iter().copied().chain(&QUANTILES), &columns);
        add_line!(out, "\n{table}\n");
    }

    pub(crate) fn print_notes(&self, out: &mut String) {
        let flush_method = self.engine_runs().next().map(|run| run.flush_method);
        print_host(out, flush_method, self.args.guest.vcpus, "the times measure the scheduler too.");
        let nr_samples: u64 = self.engine_runs().map(|run| run.stats.guest_stall_ns.count()).sum();
        add_line!(
            out,
            "Guest stall, resolve and engine time are from a sample of the faults ({nr_samples} of them), without waits for a \
             CPU; waits for the lock are all of them, holds of it a sample, and both include waits for a CPU."
        );
        let verified: u64 = self.runs().map(|run| run.nr_verified).sum();
        add!(out, "Verified: {verified} reads found what was written");
        if self.args.check {
            add!(out, "; every harvest agreed with the guest's memory, stopped and running");
        }
        add_line!(out, ".");
    }

    /// The object of `--json`. `more` is what else was configured.
    pub(crate) fn results(&self, experiment: &'static str, more: Value) -> Results {
        let mut results = Vec::new();
        for column in self.columns.iter().filter(|column| !column.runs.is_empty()) {
            let labels = &column.of.labels;
            for phase in self.phases() {
                let times = samples(column, phase);
                if times.is_empty() {
                    continue;
                }
                let time = |name, samples: Samples| Figure::new(name, Unit::Seconds, labels, samples.iter());
                results.push(time(phase.name.to_owned(), times));
                // The first round differs from the later ones, so a figure of runs is of all rounds
                // of each.
                results.push(time(format!("{}_total", phase.name), totals(column, phase)));
                let Some((base, name)) = self.base() else { continue };
                let speeds = speeds(phase, column, base);
                if !speeds.is_empty() {
                    let name = format!("{}_speed_vs_{}", phase.name, name.replace('-', "_"));
                    results.push(Figure::ratios(name, labels, speeds));
                }
            }
            let others = self.others.iter().copied().chain(&QUANTILES);
            results.extend(others.filter_map(|other| other.figure(&column.runs, labels)));
        }
        let flush_method = self.engine_runs().next().map(|run| run.flush_method);
        let mut config = config_json(self.args);
        if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
            config.extend(more);
        }
        Results { histograms: self.histograms(), ..Results::new(experiment, config, Host::read(flush_method), results) }
    }

    fn histograms(&self) -> Vec<Distribution> {
        let mut all = Vec::new();
        for column in self.columns {
            for (name, histogram) in HISTOGRAMS {
                let buckets: Vec<(f64, u64)> =
                    over_runs(column, histogram).buckets().map(|(upper, count)| (seconds(upper), count)).collect();
                if !buckets.is_empty() {
                    let labels = column.of.labels.clone();
                    all.push(Distribution { name: name.to_owned(), unit: Unit::Seconds, labels, buckets });
                }
            }
        }
        all
    }
}

fn config_json(args: &PhasesArgs) -> Value {
    json!({
        "vcpus": args.guest.vcpus,
        "bytes": args.guest.bytes,
        "iterations": args.iterations,
        "overlap": args.guest.overlap,
        "write_percent": args.write_percent,
        "random_access": args.random_access,
        "slots": args.slots,
        "backing": args.guest.backing.to_string(),
        "run_while_disabling": args.run_while_disabling,
        "tracking": args.tracking.name(),
        "ring_entries": args.ring_entries(),
        "protection": protection_name(dirty_tracking(args.tracking, args.protection)),
        "manual_protect": manual_protect(args).name(),
        "huge_pages": args.huge_pages.name(),
        "split": args.split.name(),
        "seed": args.seed,
        "format": args.tables.format.name(),
        "paging": args.paging.name(),
        "runs": args.runs,
        "check": args.check,
    })
}
