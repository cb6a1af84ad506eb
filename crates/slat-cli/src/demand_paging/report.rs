//! The output: the lines of KVM's test, tables with the published figures, JSON.

use std::io::{self, Write};

use serde_json::json;
use slat_machine::topology::HostDescription;

use super::case::{Case, Mode};
use super::options::{DeliveryArg, DemandPagingArgs};
use super::published::{self, Group};
use super::run::{Measured, Run};
use crate::results::{Figure, Results, Samples, host_json, measured_on};
use crate::table::{self, humanly};

/// A figure of a run; reports have the median over the runs.
struct Quantity {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&Run) -> Option<f64>,
}

const RATE: Quantity =
    Quantity { name: "paging_rate", title: "Pages for each vCPU", unit: "pages/s", value: |run| Some(run.paging_rate) };
const TOTAL_TIME: Quantity = Quantity {
    name: "total_time",
    title: "Total guest execution time",
    unit: "s",
    value: |run| Some(run.total_time.as_secs_f64()),
};

const QUANTITIES: [Quantity; 17] = [
    RATE,
    TOTAL_TIME,
    Quantity {
        name: "overall_rate",
        title: "Pages for all vCPUs",
        unit: "pages/s",
        value: |run| Some(overall_rate(run)),
    },
    Quantity {
        name: "fault_p50",
        title: "Latency of a page, p50",
        unit: "ns",
        value: |run| run.fault_p50_ns.and_then(count),
    },
    Quantity { name: "fault_p99", title: "  p99", unit: "ns", value: |run| run.fault_p99_ns.and_then(count) },
    Quantity { name: "faults", title: "Faults", unit: "count", value: |run| count(run.engine.faults) },
    Quantity { name: "spurious", title: "  of them spurious", unit: "count", value: |run| count(run.engine.spurious) },
    Quantity { name: "exits", title: "Exits of vCPUs", unit: "count", value: |run| count(run.nr_exits) },
    Quantity {
        name: "filled_for_faults",
        title: "Pages brought for vCPUs",
        unit: "count",
        value: |run| run.nr_filled_for_faults.and_then(count),
    },
    Quantity {
        name: "filled_by_copier",
        title: "Pages brought by the copier",
        unit: "count",
        value: |run| run.nr_filled_by_copier.and_then(count),
    },
    Quantity { name: "flushes", title: "Flushes", unit: "count", value: |run| count(run.engine.flushes) },
    Quantity {
        name: "leaves_2m",
        title: "Leaves of 2 MiB",
        unit: "count",
        value: |run| count(run.engine.installed_2m),
    },
    Quantity {
        name: "resolvers_killed",
        title: "Resolvers killed",
        unit: "count",
        value: |run| run.nr_killed.and_then(count),
    },
    Quantity { name: "threads", title: "Threads of vCPUs", unit: "count", value: |run| count(run.nr_threads as u64) },
    Quantity { name: "pages", title: "Pages of a vCPU", unit: "count", value: |run| count(run.pages_per_vcpu) },
    Quantity { name: "verified", title: "Pages verified", unit: "count", value: |run| count(run.nr_verified) },
    Quantity {
        name: "logged",
        title: "Dirty pages found in the log",
        unit: "count",
        value: |run| run.nr_logged.and_then(count),
    },
];

/// Pages per second for all vCPUs.
fn overall_rate(run: &Run) -> f64 {
    run.paging_rate * run.nr_vcpus as f64
}

fn count(count: u64) -> Option<f64> {
    Some(count as f64)
}

fn samples(measured: &Measured, quantity: &Quantity) -> Samples {
    let mut samples = Samples::default();
    measured.runs.iter().filter_map(quantity.value).for_each(|value| samples.push(value));
    samples
}

fn median(measured: &Measured, quantity: &Quantity) -> Option<f64> {
    let samples = samples(measured, quantity);
    (samples.len() != 0).then(|| samples.quantile(500))
}

fn rate(measured: &Measured) -> f64 {
    median(measured, &RATE).unwrap_or_default()
}

/// The rate of `measured` over that of `base`: the median over the runs, each compared with the run
/// of `base` next to it. So it holds when the machine's speed drifts.
fn ratio(measured: &Measured, base: &Measured) -> f64 {
    let mut ratios = Samples::default();
    for (run, base) in measured.runs.iter().zip(&base.runs) {
        ratios.push(run.paging_rate / base.paging_rate.max(f64::MIN_POSITIVE));
    }
    ratios.quantile(500)
}

fn quantity_text(value: f64, unit: &str) -> String {
    match unit {
        "ns" => humanly(value / 1e9, "s"),
        _ => humanly(value, unit),
    }
}

/// All that was measured.
pub(super) struct Report<'a> {
    pub(super) args: &'a DemandPagingArgs,
    pub(super) measured: &'a [&'a Measured],
    /// Further notes.
    pub(super) remarks: &'a [String],
}

impl Report<'_> {
    fn runs(&self) -> impl Iterator<Item = &Run> {
        self.measured.iter().flat_map(|measured| &measured.runs)
    }

    /// The cases that differ from `case` by their mode alone.
    fn same_setup(&self, case: &Case) -> impl Iterator<Item = &Measured> {
        let is_same = move |other: &Case| {
            (other.nr_vcpus, other.backing, other.uffds) == (case.nr_vcpus, case.backing, case.uffds)
        };
        self.measured.iter().copied().filter(move |measured| is_same(&measured.case))
    }

    /// The runs without userfault, otherwise as `case`.
    fn none(&self, case: &Case) -> Option<&Measured> {
        self.same_setup(case).find(|measured| measured.case.mode == Mode::None)
    }

    /// The fastest mode of userfaultfd alone, otherwise as `case`.
    fn best_userfaultfd(&self, case: &Case) -> Option<&Measured> {
        let alone = self.same_setup(case).filter(|measured| measured.case.mode.is_userfaultfd_alone());
        alone.max_by(|a, b| rate(a).total_cmp(&rate(b)))
    }

    /// The published tables, if they are about what was measured.
    fn published(&self) -> Option<(&'static str, &'static [Group])> {
        let platform = self.args.published_on().filter(|_| self.args.matrix)?;
        Some((platform, self.args.groups()))
    }

    pub(super) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        self.print_head(out)?;
        if let [measured] = self.measured {
            self.print_one(out, measured)?;
        } else {
            self.print_groups(out)?;
        }
        self.print_notes(out)
    }

    fn print_head(&self, out: &mut impl Write) -> io::Result<()> {
        let args = self.args;
        let sizes: Vec<String> = args
            .nr_vcpus()
            .iter()
            .filter_map(|&nr_vcpus| self.measured.iter().find(|measured| measured.case.nr_vcpus == nr_vcpus))
            .map(|one| {
                format!("{} vCPUs, {} each", one.case.nr_vcpus, humanly(one.case.bytes_per_vcpu as f64, "bytes"))
            })
            .collect();
        writeln!(
            out,
            "{} ({} access), tables: {}, source: {}{}{}, runs: {}",
            sizes.join("; "),
            if args.overlap { "overlapping" } else { "partitioned" },
            args.format.name(),
            args.source.name(),
            if args.copier { " and a copier" } else { "" },
            if args.delay_us == 0 { String::new() } else { format!(", {} µs for each page", args.delay_us) },
            args.nr_runs(),
        )?;
        if let [one] = self.measured {
            let case = &one.case;
            write!(out, "mode: {}, memory: {}", case.mode, case.backing)?;
            if case.mode.has_userfaultfd() {
                write!(out, ", userfaultfd: {}, {} for each", case.uffds.describe(), readers(case.nr_readers))?;
            }
            if case.mode == Mode::Ring {
                write!(out, ", resolver: a {}", args.resolver.name())?;
            }
            writeln!(out)?;
        }
        Ok(())
    }

    /// One case: each run in the lines of demand_paging_test, then all figures.
    fn print_one(&self, out: &mut impl Write, measured: &Measured) -> io::Result<()> {
        for (index, run) in measured.runs.iter().enumerate() {
            if measured.runs.len() > 1 {
                writeln!(out, "Run {}", index + 1)?;
            }
            let time = run.total_time;
            writeln!(out, "Finished creating vCPUs and starting uffd threads")?;
            writeln!(out, "Started all vCPUs")?;
            writeln!(out, "All vCPU threads joined")?;
            writeln!(out, "Total guest execution time:\t{}.{:09}s", time.as_secs(), time.subsec_nanos())?;
            writeln!(out, "Per-vcpu demand paging rate:\t{:.6} pgs/sec/vcpu", run.paging_rate)?;
            writeln!(out, "Overall demand paging rate:\t{:.6} pgs/sec", overall_rate(run))?;
        }
        let header =
            [format!("of {} runs", measured.runs.len()), "p50".into(), "p99".into(), "worst".into(), "mean".into()];
        let mut table = table::figures(header);
        for quantity in &QUANTITIES {
            let samples = samples(measured, quantity);
            if samples.len() == 0 {
                continue;
            }
            // The worst of a rate is the lowest.
            let ranks = if quantity.unit == "pages/s" { [500, 10, 0] } else { [500, 990, 1000] };
            let values = ranks.map(|rank| samples.quantile(rank)).into_iter().chain([samples.mean()]);
            let cells = values.map(|value| quantity_text(value, quantity.unit));
            let title = format!("{}{}", quantity.title, if quantity.unit == "pages/s" { ", pages/s" } else { "" });
            table.add_row(table::row(std::iter::once(title).chain(cells)));
        }
        writeln!(out, "\n{table}\n")
    }

    /// For each kind of memory and of descriptors its tables.
    fn print_groups(&self, out: &mut impl Write) -> io::Result<()> {
        let mut done: Vec<&Case> = Vec::new();
        for first in self.measured.iter().map(|measured| &measured.case) {
            if done.iter().any(|case| (case.backing, case.uffds) == (first.backing, first.uffds)) {
                continue;
            }
            done.push(first);
            self.print_group(out, first)?;
        }
        Ok(())
    }

    fn print_group(&self, out: &mut impl Write, first: &Case) -> io::Result<()> {
        writeln!(out, "\n{} memory, {}", first.backing, first.uffds.describe())?;
        let with_published =
            |text: fn(f64) -> String, figure: &dyn Fn(&Measured) -> Option<f64>, what, published: Published| {
                self.table(first, what, Some(published), &|measured| figure(measured).map(text))
            };
        let nr_runs = self.args.nr_runs();
        let title = format!("pages/s for each vCPU, median of {nr_runs}");
        let rates = with_published(
            |rate| format!("{rate:.0}"),
            &|measured| Some(rate(measured)),
            &title,
            Published { value: |group, mode, nr_vcpus| group.rate(mode, nr_vcpus), text: |rate| format!("{rate:.0}") },
        );
        writeln!(out, "\n{rates}")?;
        let two_digits = |ratio: f64| format!("{ratio:.2}");
        let of_none = |measured: &Measured| Some(ratio(measured, self.none(&measured.case)?));
        if self.measured.iter().any(|measured| self.none(&measured.case).is_some()) {
            let shares = with_published(
                two_digits,
                &of_none,
                "times the rate of none",
                Published {
                    value: |group, mode, nr_vcpus| {
                        Some(group.rate(mode, nr_vcpus)? / group.rate(Mode::None, nr_vcpus)?)
                    },
                    text: two_digits,
                },
            );
            writeln!(out, "\n{shares}")?;
        }
        let of_best = |measured: &Measured| Some(ratio(measured, self.best_userfaultfd(&measured.case)?));
        if self.measured.iter().any(|measured| self.best_userfaultfd(&measured.case).is_some()) {
            let title = "times the best rate of userfaultfd alone";
            let leads = with_published(
                two_digits,
                &of_best,
                title,
                Published {
                    value: |group, mode, nr_vcpus| {
                        Some(group.rate(mode, nr_vcpus)? / group.best_userfaultfd(nr_vcpus)?)
                    },
                    text: two_digits,
                },
            );
            writeln!(out, "\n{leads}")?;
        }
        let times = self.table(first, "total time: p50, mean, p99, worst", None, &|measured| {
            let samples = samples(measured, &TOTAL_TIME);
            let values = [samples.quantile(500), samples.mean(), samples.quantile(990), samples.quantile(1000)];
            Some(values.map(|value| humanly(value, "s")).join(", "))
        });
        writeln!(out, "\n{times}")?;
        let faults = self.table(first, "latency of a page: p50, p99; medians", None, &|measured| {
            let ranks = QUANTITIES.iter().filter(|quantity| quantity.unit == "ns");
            let values: Option<Vec<String>> =
                ranks.map(|rank| Some(quantity_text(median(measured, rank)?, rank.unit))).collect();
            Some(values?.join(", "))
        });
        writeln!(out, "\n{faults}")
    }

    /// A table of the modes of a group by the numbers of vCPUs. After each column there is one of
    /// the published figures, if there are any.
    fn table(
        &self,
        first: &Case,
        what: &str,
        published: Option<Published>,
        cell: &dyn Fn(&Measured) -> Option<String>,
    ) -> comfy_table::Table {
        let in_group = |case: &Case| (case.backing, case.uffds) == (first.backing, first.uffds);
        let group = self.published().zip(published).and_then(|((platform, groups), published)| {
            let group = groups.iter().find(|group| (group.backing, group.uffds) == (first.backing, first.uffds))?;
            Some((platform, group, published))
        });
        let columns: Vec<usize> = self.args.nr_vcpus().to_vec();
        let has_published = |nr_vcpus: usize| group.as_ref().is_some_and(|_| published::VCPUS.contains(&nr_vcpus));
        let mut header = vec![what.to_owned()];
        for &nr_vcpus in &columns {
            header.push(format!("{nr_vcpus} vCPUs"));
            if let Some((platform, ..)) = group.as_ref().filter(|_| has_published(nr_vcpus)) {
                header.push(format!("published, {platform}"));
            }
        }
        let mut modes: Vec<Mode> = Vec::new();
        for case in self.measured.iter().map(|measured| &measured.case).filter(|case| in_group(case)) {
            if !modes.contains(&case.mode) {
                modes.push(case.mode);
            }
        }
        let mut table = table::figures(header);
        let nothing = || "-".to_owned();
        for mode in modes {
            let mut cells = vec![mode.name().to_owned()];
            for &nr_vcpus in &columns {
                let is_it = |case: &Case| in_group(case) && case.mode == mode && case.nr_vcpus == nr_vcpus;
                let found = self.measured.iter().copied().find(|measured| is_it(&measured.case));
                cells.push(found.and_then(cell).unwrap_or_else(nothing));
                if let Some((_, group, published)) = group.as_ref().filter(|_| has_published(nr_vcpus)) {
                    let value = (published.value)(group, mode, nr_vcpus);
                    cells.push(value.map_or_else(nothing, published.text));
                }
            }
            table.add_row(table::row(cells));
        }
        table
    }

    fn print_notes(&self, out: &mut impl Write) -> io::Result<()> {
        let host = HostDescription::read();
        writeln!(out)?;
        if let Some(run) = self.runs().next() {
            writeln!(out, "{}", measured_on(&host, run.flush_method))?;
        }
        let most = self.measured.iter().map(|measured| measured.case.nr_vcpus).max().unwrap_or(0);
        if most > host.nr_cpus {
            writeln!(out, "{most} vCPUs on {} CPUs: the rates and times measure the scheduler too.", host.nr_cpus)?;
        }
        if let Some((platform, _)) = self.published() {
            writeln!(
                out,
                "Published figures: KVM Userfault, version 1 (December 2024), {platform}, 96 CPUs, real ones, 64 MiB for each \
                 vCPU. They show proportions only."
            )?;
            writeln!(
                out,
                "The pages of shmem memory are in the file beforehand, and so cost no allocation in any row."
            )?;
        }
        for remark in self.remarks {
            writeln!(out, "{remark}")?;
        }
        let verified: u64 = self.runs().map(|run| run.nr_verified).sum();
        let has = |mode| self.measured.iter().any(|measured| measured.case.mode == mode);
        let is_all_there = self.measured.iter().all(|measured| measured.case.mode == Mode::None);
        write!(out, "Verified: {verified} pages held ")?;
        write!(out, "{}", if is_all_there { "what vCPUs wrote, and zeros" } else { "what their source has" })?;
        if has(Mode::None) && !is_all_there {
            write!(out, " (zeros in mode none)")?;
        }
        // The fills of a resolver process are not counted here.
        if !is_all_there && !has(Mode::Ring) {
            write!(out, "; none was filled twice")?;
        }
        if self.args.log_dirty {
            write!(out, "; the dirty log had every page that was written, and no other")?;
        }
        writeln!(out, ".")
    }

    /// The object of `--json`.
    pub(super) fn results(&self) -> Results {
        let mut results = Vec::new();
        for measured in self.measured {
            let labels = measured.case.labels();
            let mut push = |name: String, value: f64, unit: &'static str| {
                results.push(Figure { name, value, unit, labels: labels.clone() });
            };
            for quantity in &QUANTITIES {
                if let Some(value) = median(measured, quantity) {
                    push(quantity.name.to_owned(), value, quantity.unit);
                }
            }
            for quantity in [&RATE, &TOTAL_TIME] {
                let samples = samples(measured, quantity);
                push(format!("{}_mean", quantity.name), samples.mean(), quantity.unit);
                push(format!("{}_deviation", quantity.name), samples.deviation(), quantity.unit);
                push(format!("{}_min", quantity.name), samples.quantile(0), quantity.unit);
                push(format!("{}_p99", quantity.name), samples.quantile(990), quantity.unit);
                push(format!("{}_max", quantity.name), samples.quantile(1000), quantity.unit);
            }
            if let Some(none) = self.none(&measured.case) {
                push("rate_vs_none".to_owned(), ratio(measured, none), "ratio");
            }
            if let Some(best) = self.best_userfaultfd(&measured.case) {
                push("rate_vs_best_userfaultfd".to_owned(), ratio(measured, best), "ratio");
            }
            if let Some(rate) = self.published_rate(&measured.case) {
                push("published_rate".to_owned(), rate, "pages/s");
            }
            push("bytes_per_vcpu".to_owned(), measured.case.bytes_per_vcpu as f64, "bytes");
            push("readers".to_owned(), measured.case.nr_readers as f64, "count");
            push("runs".to_owned(), measured.runs.len() as f64, "count");
        }
        let flush_method = self.runs().next().map(|run| run.flush_method);
        Results {
            experiment: "demand-paging",
            config: self.config(),
            host: host_json(&HostDescription::read(), flush_method),
            results,
            histograms: Vec::new(),
            not_run: Vec::new(),
        }
    }

    fn published_rate(&self, case: &Case) -> Option<f64> {
        let (_, groups) = self.published()?;
        let group = groups.iter().find(|group| (group.backing, group.uffds) == (case.backing, case.uffds))?;
        group.rate(case.mode, case.nr_vcpus)
    }

    fn config(&self) -> serde_json::Value {
        let args = self.args;
        json!({
            "vcpus": args.nr_vcpus(),
            "bytes": args.bytes,
            "matrix": args.matrix,
            "overlap": args.overlap,
            "delivery": if args.delivery == DeliveryArg::Ring { "ring" } else { "exit" },
            "resolver": args.resolver.name(),
            "delay_us": args.delay_us,
            "source": args.source.name(),
            "copier": args.copier,
            "log_dirty": args.log_dirty,
            "threads": args.threads,
            "kill_resolver": args.kill_resolver,
            "granularity_bytes": args.granularity.page_size().size_bytes(),
            "format": args.format.name(),
            "iterations": args.nr_runs(),
        })
    }
}

/// The published figures for a column.
struct Published {
    value: fn(&Group, Mode, usize) -> Option<f64>,
    text: fn(f64) -> String,
}

fn readers(nr_readers: usize) -> String {
    if nr_readers == 1 { "one reader".to_owned() } else { format!("{nr_readers} readers") }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
