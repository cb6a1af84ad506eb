//! The output of runs of the phases: the same for each experiment, but for the figures besides the
//! phases.

use std::io::{self, Write};
use std::time::Duration;

use serde_json::{Value, json};
use slat::PAGE_SIZE;
use slat::stats::{Histogram, Stats};
use slat_machine::topology::HostDescription;

use super::{Column, EngineRun, Run, manual_protect};
use crate::args::{DirtyLogArgs, DirtyTrackingArg, HugePagesArg, dirty_tracking, manual_protect_name, protection_name};
use crate::results::{Distribution, Figure, Results, Samples, host_json, measured_on};
use crate::table::{self, humanly};

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

/// A figure besides the phases, as the mean over the runs that have it.
pub(crate) struct Other {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) value: fn(&Run) -> Option<f64>,
}

/// One of the engine's counters; `None` if the run was not the engine's.
pub(crate) fn count(run: &Run, of: fn(&Stats) -> u64) -> Option<f64> {
    run.engine.as_ref().map(|engine| of(&engine.stats) as f64)
}

/// A counter in nanoseconds, in seconds.
fn time(run: &Run, of: fn(&Stats) -> u64) -> Option<f64> {
    run.engine.as_ref().map(|engine| seconds(of(&engine.stats)))
}

/// The figures of any experiment.
pub(crate) const OTHERS: [Other; 16] = [
    Other { name: "faults", title: "Faults", unit: "count", value: |run| count(run, |stats| stats.faults) },
    Other {
        name: "spurious",
        title: "  of them spurious",
        unit: "count",
        value: |run| count(run, |stats| stats.spurious),
    },
    Other { name: "retries", title: "Retries", unit: "count", value: |run| count(run, |stats| stats.retries) },
    Other { name: "exits", title: "Exits (ring full)", unit: "count", value: |run| count(run, |stats| stats.exits) },
    Other { name: "flushes", title: "Flushes", unit: "count", value: |run| count(run, |stats| stats.flushes) },
    Other {
        name: "pages_protected",
        title: "Leaf PTEs protected or cleaned",
        unit: "count",
        value: |run| count(run, |stats| stats.protected),
    },
    Other {
        name: "tables_protected",
        title: "Directory entries protected",
        unit: "count",
        value: |run| count(run, |stats| stats.tables_protected),
    },
    Other { name: "splits", title: "Huge pages split", unit: "count", value: |run| count(run, |stats| stats.splits) },
    Other {
        name: "recoveries",
        title: "Huge pages recovered",
        unit: "count",
        value: |run| count(run, |stats| stats.recoveries),
    },
    Other {
        name: "lock_waits",
        title: "Waits for the lock",
        unit: "count",
        value: |run| count(run, |stats| stats.lock_waits),
    },
    Other {
        name: "lock_wait_time",
        title: "Time in these waits (all vCPUs)",
        unit: "s",
        value: |run| time(run, |stats| stats.lock_wait_ns.sum()),
    },
    Other {
        name: "resolve_time",
        title: "Resolve time (all vCPUs)",
        unit: "s",
        value: |run| time(run, Stats::resolve_time_ns),
    },
    Other {
        name: "engine_time",
        title: "Engine time (all vCPUs)",
        unit: "s",
        value: |run| time(run, Stats::engine_time_ns),
    },
    Other {
        name: "tables_bytes",
        title: "Tables",
        unit: "bytes",
        value: |run| count(run, |stats| stats.live_tables() * PAGE_SIZE),
    },
    Other {
        name: "leaves_2m",
        title: "Leaves of 2 MiB",
        unit: "count",
        value: |run| count(run, |stats| stats.installed_2m),
    },
    Other { name: "verified", title: "Reads verified", unit: "count", value: |run| Some(run.nr_verified as f64) },
];

/// The figures of shadow paging.
pub(crate) const SHADOW_OTHERS: [Other; 5] = [
    Other {
        name: "page_faults",
        title: "Page faults (exits)",
        unit: "count",
        value: |run| count(run, |stats| stats.page_faults),
    },
    Other {
        name: "entries_synced",
        title: "Shadow PTEs synchronized",
        unit: "count",
        value: |run| count(run, |stats| stats.entries_synced),
    },
    Other {
        name: "shadow_evictions",
        title: "Shadow pages evicted",
        unit: "count",
        value: |run| count(run, |stats| stats.shadow_evictions),
    },
    Other {
        name: "shadow_tables",
        title: "Shadow pages",
        unit: "count",
        value: |run| run.engine.as_ref().map(|engine| engine.nr_shadow_tables as f64),
    },
    Other {
        name: "shadow_leaves",
        title: "Shadow leaves",
        unit: "count",
        value: |run| count(run, Stats::shadow_leaves),
    },
];

/// A quantile of a histogram, over all runs.
struct Quantile {
    name: &'static str,
    title: &'static str,
    per_mille: u32,
    histogram: OfStats,
}

type OfStats = fn(&Stats) -> &Histogram;

const QUANTILES: [Quantile; 9] = [
    Quantile { name: "guest_stall_p50", title: "Guest stall in a fault, p50", per_mille: 500, histogram: stall },
    Quantile { name: "guest_stall_p99", title: "Guest stall in a fault, p99", per_mille: 990, histogram: stall },
    Quantile { name: "guest_stall_max", title: "Guest stall in a fault, worst", per_mille: 1000, histogram: stall },
    Quantile { name: "lock_wait_p50", title: "Wait for the lock, p50", per_mille: 500, histogram: lock_wait },
    Quantile { name: "lock_wait_p99", title: "Wait for the lock, p99", per_mille: 990, histogram: lock_wait },
    Quantile { name: "lock_wait_max", title: "Wait for the lock, worst", per_mille: 1000, histogram: lock_wait },
    Quantile { name: "lock_hold_p50", title: "Held the lock, p50", per_mille: 500, histogram: lock_hold },
    Quantile { name: "lock_hold_p99", title: "Held the lock, p99", per_mille: 990, histogram: lock_hold },
    Quantile { name: "lock_hold_max", title: "Held the lock, worst", per_mille: 1000, histogram: lock_hold },
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

fn samples(column: &Column, times: fn(&Run) -> Vec<Duration>) -> Samples {
    let mut samples = Samples::default();
    for time in column.runs.iter().flat_map(times) {
        samples.push(time.as_secs_f64());
    }
    samples
}

/// A phase's time of each run, the sum over all rounds.
fn totals(column: &Column, phase: &Phase) -> Samples {
    let mut totals = Samples::default();
    column.runs.iter().for_each(|run| totals.push((phase.times)(run).iter().sum::<Duration>().as_secs_f64()));
    totals
}

/// The quantile in seconds, over all runs; `None` if nothing was recorded.
fn quantile(column: &Column, quantile: &Quantile) -> Option<f64> {
    let sum = over_runs(column, quantile.histogram);
    (sum.count() != 0).then(|| seconds(sum.quantile(quantile.per_mille)))
}

/// How many times as fast as `base` each phase of `column` is: the median over the runs, each
/// compared with the run of `base` next to it. So it holds when the machine's speed drifts. `None`
/// without such runs.
fn speed(phase: &Phase, column: &Column, base: &Column) -> Option<f64> {
    let mut ratios = Samples::default();
    for (run, base) in column.runs.iter().zip(&base.runs) {
        let total = |run| (phase.times)(run).iter().sum::<Duration>().as_secs_f64();
        ratios.push(total(base) / total(run).max(f64::MIN_POSITIVE));
    }
    (ratios.len() != 0).then(|| ratios.quantile(500))
}

/// The figures of the runs that have it; `None` if none has.
fn samples_of(column: &Column, value: fn(&Run) -> Option<f64>) -> Option<Samples> {
    let mut samples = Samples::default();
    column.runs.iter().filter_map(value).for_each(|value| samples.push(value));
    (samples.len() != 0).then_some(samples)
}

/// A time as dirty_log_perf_test prints it.
fn line(out: &mut impl Write, what: &str, time: Duration) -> io::Result<()> {
    writeln!(out, "{what} time: {}.{:09}s", time.as_secs(), time.subsec_nanos())
}

/// One run in the lines of dirty_log_perf_test.
fn print_run(out: &mut impl Write, index: usize, run: &Run) -> io::Result<()> {
    writeln!(out, "Run {}", index + 1)?;
    line(out, "Populate memory", run.populate)?;
    if let Some(split) = run.split {
        line(out, "Splitting", split)?;
    }
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

/// The column that others are compared with.
#[derive(Clone, Copy)]
pub(crate) struct Base {
    /// Its number.
    pub(crate) column: usize,
    /// Its name in what is printed and, with `_` for `-`, in results.
    pub(crate) name: &'static str,
}

/// All runs, and how they are reported.
pub(crate) struct Report<'a> {
    pub(crate) args: &'a DirtyLogArgs,
    pub(crate) columns: &'a [Column],
    pub(crate) base: Option<Base>,
    pub(crate) others: Vec<&'a Other>,
}

impl Report<'_> {
    /// The phases that there were: without manual protect, there is no clearing.
    fn phases(&self) -> impl Iterator<Item = &'static Phase> {
        PHASES.iter().filter(|phase| self.columns.iter().any(|column| samples(column, phase.times).len() != 0))
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
        std::iter::once(first.to_owned()).chain(self.columns.iter().map(|column| column.title.clone())).collect()
    }

    /// Prints the configuration.
    pub(crate) fn print_head(&self, out: &mut impl Write) -> io::Result<()> {
        let args = self.args;
        writeln!(
            out,
            "{} vCPUs, {} each ({} access), slots: {}, memory: {}, tables: {}, paging: {}, rounds: {}, writes: {}%{}",
            args.vcpus,
            humanly(args.bytes as f64, "bytes"),
            if args.overlap { "overlapping" } else { "partitioned" },
            args.slots,
            args.backing,
            args.format.name(),
            args.paging.name(),
            args.iterations,
            args.write_percent,
            if args.random_access { ", random order" } else { "" },
        )?;
        let tracking = dirty_tracking(args.tracking, args.protection);
        writeln!(
            out,
            "dirty pages: {}{}, manual protect: {}, huge pages: {}{}",
            args.tracking.name(),
            protection_name(tracking).map(|name| format!(" ({name})")).unwrap_or_default(),
            manual_protect_name(manual_protect(args)),
            args.huge_pages.name(),
            if args.huge_pages == HugePagesArg::Split { format!(" ({})", args.split.name()) } else { String::new() },
        )
    }

    /// Prints the tables; with one column, before them each run.
    pub(crate) fn print_tables(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "Test iterations: {}", self.args.iterations)?;
        if let [column] = self.columns {
            for (index, run) in column.runs.iter().enumerate() {
                print_run(out, index, run)?;
            }
        }
        self.print_phases(out)?;
        self.print_others(out)
    }

    fn print_phases(&self, out: &mut impl Write) -> io::Result<()> {
        let nr_runs = self.columns.iter().map(|column| column.runs.len()).max().unwrap_or(0);
        let mut phases = table::figures(self.header(&format!("seconds, mean ({nr_runs} runs)")));
        let mut spread = table::figures(self.header("p50 / p99 / worst, and number of values"));
        for phase in self.phases() {
            let columns: Vec<Samples> = self.columns.iter().map(|column| samples(column, phase.times)).collect();
            let name = || std::iter::once(phase.title.to_owned());
            let means = columns.iter().map(|samples| match samples.len() {
                0 => "-".to_owned(),
                _ => format!("{:.9}s", samples.mean()),
            });
            phases.add_row(table::row(name().chain(means)));
            let spreads = columns.iter().map(|samples| {
                let [median, p99, worst] = [500, 990, 1000].map(|rank| humanly(samples.quantile(rank), "s"));
                format!("{median} / {p99} / {worst} ({})", samples.len())
            });
            spread.add_row(table::row(name().chain(spreads)));
        }
        writeln!(out, "\n{phases}")?;
        if let Some((base, name)) = self.base() {
            let mut speeds = table::figures(self.header(&format!("speed against {name}, median of paired runs")));
            for phase in self.phases() {
                let ratio = |column| speed(phase, column, base).map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
                let ratios = self.columns.iter().map(ratio);
                speeds.add_row(table::row(std::iter::once(phase.title.to_owned()).chain(ratios)));
            }
            writeln!(out, "\n{speeds}")?;
        }
        writeln!(out, "\n{spread}")
    }

    fn print_others(&self, out: &mut impl Write) -> io::Result<()> {
        let figure = |value: Option<f64>, unit| value.map_or("-".to_owned(), |value| humanly(value, unit));
        let mut others = table::figures(self.header("mean of a run"));
        for other in &self.others {
            let values = self
                .columns
                .iter()
                .map(|column| figure(samples_of(column, other.value).map(|samples| samples.mean()), other.unit));
            others.add_row(table::row(std::iter::once(other.title.to_owned()).chain(values)));
        }
        for which in &QUANTILES {
            let values = self.columns.iter().map(|column| figure(quantile(column, which), "s"));
            others.add_row(table::row(std::iter::once(which.title.to_owned()).chain(values)));
        }
        writeln!(out, "\n{others}\n")
    }

    /// Prints the notes.
    pub(crate) fn print_notes(&self, out: &mut impl Write) -> io::Result<()> {
        let (args, host) = (self.args, HostDescription::read());
        if let Some(run) = self.engine_runs().next() {
            writeln!(out, "{}", measured_on(&host, run.flush_method))?;
        }
        if args.vcpus > host.nr_cpus {
            writeln!(out, "{} vCPUs on {} CPUs: the times measure the scheduler too.", args.vcpus, host.nr_cpus)?;
        }
        let nr_samples: u64 = self.engine_runs().map(|run| run.stats.guest_stall_ns.count()).sum();
        writeln!(
            out,
            "Guest stall, resolve and engine time are from a sample of the faults ({nr_samples} of them), without waits for a \
             CPU; waits for the lock are all of them, holds of it a sample, and both include waits for a CPU."
        )?;
        let verified: u64 = self.runs().map(|run| run.nr_verified).sum();
        write!(out, "Verified: {verified} reads found what was written")?;
        if args.check {
            write!(out, "; every harvest agreed with the guest's memory, stopped and running")?;
        }
        writeln!(out, ".")
    }

    /// The object of `--json`. `more` is what else was configured.
    pub(crate) fn results(&self, experiment: &'static str, more: Value) -> Results {
        let mut results = Vec::new();
        for column in self.columns.iter().filter(|column| !column.runs.is_empty()) {
            let mut push = |name: String, value: f64, unit: &'static str| {
                results.push(Figure { name, value, unit, labels: column.labels.clone() });
            };
            for phase in self.phases() {
                let samples = samples(column, phase.times);
                push(phase.name.to_owned(), samples.mean(), "s");
                push(format!("{}_deviation", phase.name), samples.deviation(), "s");
                push(format!("{}_p50", phase.name), samples.quantile(500), "s");
                push(format!("{}_p99", phase.name), samples.quantile(990), "s");
                push(format!("{}_max", phase.name), samples.quantile(1000), "s");
                // The first round differs from the later ones, so a figure of runs is of all rounds
                // of each.
                let totals = totals(column, phase);
                push(format!("{}_total", phase.name), totals.mean(), "s");
                push(format!("{}_total_deviation", phase.name), totals.deviation(), "s");
                push(format!("{}_total_p50", phase.name), totals.quantile(500), "s");
                let Some((base, name)) = self.base() else { continue };
                if let Some(speed) = speed(phase, column, base) {
                    push(format!("{}_speed_vs_{}", phase.name, name.replace('-', "_")), speed, "ratio");
                }
            }
            for other in &self.others {
                if let Some(samples) = samples_of(column, other.value) {
                    push(other.name.to_owned(), samples.mean(), other.unit);
                    push(format!("{}_deviation", other.name), samples.deviation(), other.unit);
                }
            }
            for which in &QUANTILES {
                if let Some(time) = quantile(column, which) {
                    push(which.name.to_owned(), time, "s");
                }
            }
            push("runs".to_owned(), column.runs.len() as f64, "count");
        }
        let flush_method = self.engine_runs().next().map(|run| run.flush_method);
        let mut config = config_json(self.args);
        if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
            config.extend(more);
        }
        Results {
            experiment,
            config,
            host: host_json(&HostDescription::read(), flush_method),
            results,
            histograms: self.histograms(),
            not_run: Vec::new(),
        }
    }

    fn histograms(&self) -> Vec<Distribution> {
        let mut all = Vec::new();
        for column in self.columns {
            for (name, histogram) in HISTOGRAMS {
                let buckets: Vec<(u64, u64)> = over_runs(column, histogram).buckets().collect();
                if !buckets.is_empty() {
                    all.push(Distribution { name, unit: "ns", labels: column.labels.clone(), buckets });
                }
            }
        }
        all
    }
}

fn config_json(args: &DirtyLogArgs) -> Value {
    json!({
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
        "protection": protection_name(dirty_tracking(args.tracking, args.protection)),
        "manual_protect": manual_protect_name(manual_protect(args)),
        "huge_pages": args.huge_pages.name(),
        "split": args.split.name(),
        "seed": args.seed,
        "format": args.format.name(),
        "paging": args.paging.name(),
        "runs": args.runs,
        "check": args.check,
    })
}
