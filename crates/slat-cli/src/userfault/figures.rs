//! The output: the lines of KVM's test, tables with the published figures, JSON.

use serde_json::json;

use super::case::{Case, Mode};
use super::options::{DeliveryArg, UserfaultArgs};
use super::published::{self, Group};
use super::run::{Measured, Run};
use crate::options::ValueName;
use crate::quantity::{Unit, or_nothing, quantity};
use crate::results::{Figure, Host, PerRun, PublishedFigure, Results, cell, print_host};
use crate::statistics::Samples;
use crate::table::{self, MEDIAN};

const RATE: PerRun<Run> =
    PerRun::new("paging_rate", "Pages for each vCPU", Unit::PerSecond, |run| Some(run.paging_rate));
const TOTAL_TIME: PerRun<Run> =
    PerRun::time("total_time", "Total guest execution time", |run| Some(run.total_time.as_secs_f64()));

const LATENCY_P50: PerRun<Run> =
    PerRun::time("fault_p50", "Latency of a page, p50", |run| run.fault_p50_ns.map(seconds));
const LATENCY_P99: PerRun<Run> =
    PerRun::time("fault_p99", "Latency of a page, p99", |run| run.fault_p99_ns.map(seconds));

const QUANTITIES: [PerRun<Run>; 17] = [
    RATE,
    TOTAL_TIME,
    PerRun::new("overall_rate", "Pages for all vCPUs", Unit::PerSecond, |run| Some(overall_rate(run))),
    LATENCY_P50,
    LATENCY_P99,
    PerRun::count("faults", "Faults", |run| count(run.engine.faults)),
    PerRun::count("spurious", "  of them spurious", |run| count(run.engine.spurious)),
    PerRun::count("exits", "Exits of vCPUs", |run| count(run.nr_exits)),
    PerRun::count("filled_for_faults", "Pages brought for vCPUs", |run| run.nr_filled_for_faults.and_then(count)),
    PerRun::count("filled_by_copier", "Pages brought by the copier", |run| run.nr_filled_by_copier.and_then(count)),
    PerRun::count("flushes", "Flushes", |run| count(run.engine.flushes)),
    PerRun::count("leaves_2m", "Leaves of 2 MiB", |run| count(run.engine.installed_2m)),
    PerRun::count("resolvers_killed", "Resolvers killed", |run| run.nr_killed.and_then(count)),
    PerRun::count("threads", "Threads of vCPUs", |run| count(run.nr_threads as u64)),
    PerRun::count("pages", "Pages of a vCPU", |run| count(run.pages_per_vcpu)),
    PerRun::count("verified", "Pages verified", |run| count(run.nr_verified)),
    PerRun::count("logged", "Dirty pages found in the log", |run| run.nr_logged.and_then(count)),
];

/// Pages per second for all vCPUs.
fn overall_rate(run: &Run) -> f64 {
    run.paging_rate * run.nr_vcpus as f64
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn count(count: u64) -> Option<f64> {
    Some(count as f64)
}

/// The rate of `measured` over that of `base`, run by run.
fn ratios(measured: &Measured, base: &Measured) -> Samples {
    RATE.samples(&measured.runs).paired_ratios(&RATE.samples(&base.runs))
}

fn rate(measured: &Measured) -> f64 {
    RATE.samples(&measured.runs).median()
}

/// All that was measured.
pub(super) struct Report<'a> {
    pub(super) args: &'a UserfaultArgs,
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
        self.measured.iter().copied().filter(move |measured| is_same(&measured.of))
    }

    /// The runs without userfault, otherwise as `case`.
    fn none(&self, case: &Case) -> Option<&Measured> {
        self.same_setup(case).find(|measured| measured.of.mode == Mode::None)
    }

    /// The fastest mode of userfaultfd alone, otherwise as `case`.
    fn best_userfaultfd(&self, case: &Case) -> Option<&Measured> {
        let alone = self.same_setup(case).filter(|measured| measured.of.mode.is_userfaultfd_alone());
        alone.max_by(|a, b| rate(a).total_cmp(&rate(b)))
    }

    /// The published tables, if they are about what was measured.
    fn published(&self) -> Option<(&'static str, &'static [Group])> {
        let platform = self.args.published_on().filter(|_| self.args.are_rows_published())?;
        Some((platform, self.args.groups()))
    }

    pub(super) fn print(&self, out: &mut String) {
        self.print_head(out);
        if let [measured] = self.measured {
            self.print_one(out, measured);
        } else {
            self.print_groups(out);
        }
        self.print_notes(out)
    }

    fn print_head(&self, out: &mut String) {
        let args = self.args;
        let sizes: Vec<String> = args
            .nr_vcpus()
            .iter()
            .filter_map(|&nr_vcpus| self.measured.iter().find(|measured| measured.of.nr_vcpus == nr_vcpus))
            .map(|one| {
                format!("{} vCPUs, {} each", one.of.nr_vcpus, quantity(one.of.bytes_per_vcpu as f64, Unit::Bytes))
            })
            .collect();
        add_line!(
            out,
            "{} ({} access), tables: {}, source: {}{}{}, runs: {}",
            sizes.join("; "),
            if args.overlap { "overlapping" } else { "partitioned" },
            args.format.name(),
            args.source.name(),
            if args.copier { " and a copier" } else { "" },
            if args.delay.is_zero() { String::new() } else { format!(", {:?} for each page", args.delay) },
            args.nr_runs()
        );
        if let [one] = self.measured {
            let case = &one.of;
            add!(out, "mode: {}, memory: {}", case.mode, case.backing);
            if case.mode.has_userfaultfd() {
                add!(out, ", userfaultfd: {}, {} for each", case.uffds.describe(), readers(case.nr_readers));
            }
            if case.mode == Mode::Ring {
                add!(out, ", resolver: a {}", args.resolver.name());
            }
            add_line!(out, "");
        }
    }

    /// One case: each run in the lines of demand_paging_test, then all figures.
    fn print_one(&self, out: &mut String, measured: &Measured) {
        for (index, run) in measured.runs.iter().enumerate() {
            if measured.runs.len() > 1 {
                add_line!(out, "Run {}", index + 1);
            }
            let time = run.total_time;
            add_line!(out, "Finished creating vCPUs and starting uffd threads");
            add_line!(out, "Started all vCPUs");
            add_line!(out, "All vCPU threads joined");
            add_line!(out, "Total guest execution time:\t{}.{:09}s", time.as_secs(), time.subsec_nanos());
            add_line!(out, "Per-vcpu demand paging rate:\t{:.6} pgs/sec/vcpu", run.paging_rate);
            add_line!(out, "Overall demand paging rate:\t{:.6} pgs/sec", overall_rate(run));
        }
        let mut table = table::figures([format!("of {} runs", measured.runs.len()), MEDIAN.to_owned()]);
        let has = |quantity: &&PerRun<Run>| !quantity.samples(&measured.runs).is_empty();
        table.add_per_run(QUANTITIES.iter().filter(has), &[&measured.runs]);
        add_line!(out, "\n{table}\n");
    }

    /// For each kind of memory and of descriptors its tables.
    fn print_groups(&self, out: &mut String) {
        let mut done: Vec<&Case> = Vec::new();
        for first in self.measured.iter().map(|measured| &measured.of) {
            if done.iter().any(|case| (case.backing, case.uffds) == (first.backing, first.uffds)) {
                continue;
            }
            done.push(first);
            self.print_group(out, first);
        }
    }

    fn print_group(&self, out: &mut String, first: &Case) {
        add_line!(out, "\n{} memory, {}", first.backing, first.uffds.describe());
        let with_published = |what: &str, unit, figure: &dyn Fn(&Measured) -> Option<Samples>, published| {
            let published = Published { value: published, unit };
            self.table(first, what, Some(published), &|measured| Some(cell(&figure(measured)?, unit)))
        };
        let title = format!("pages a second for each vCPU, {MEDIAN} of {} runs", self.args.nr_runs());
        let rates =
            with_published(&title, Unit::PerSecond, &|measured| Some(RATE.samples(&measured.runs)), Group::rate);
        add_line!(out, "\n{rates}");
        let of_none = |measured: &Measured| Some(ratios(measured, self.none(&measured.of)?));
        if self.measured.iter().any(|measured| self.none(&measured.of).is_some()) {
            let shares = with_published("times the rate of none", Unit::Ratio, &of_none, |group, mode, nr_vcpus| {
                Some(group.rate(mode, nr_vcpus)? / group.rate(Mode::None, nr_vcpus)?)
            });
            add_line!(out, "\n{shares}");
        }
        let of_best = |measured: &Measured| Some(ratios(measured, self.best_userfaultfd(&measured.of)?));
        if self.measured.iter().any(|measured| self.best_userfaultfd(&measured.of).is_some()) {
            let title = "times the best rate of userfaultfd alone";
            let leads = with_published(title, Unit::Ratio, &of_best, |group, mode, nr_vcpus| {
                Some(group.rate(mode, nr_vcpus)? / group.best_userfaultfd(nr_vcpus)?)
            });
            add_line!(out, "\n{leads}");
        }
        for quantity in [&TOTAL_TIME, &LATENCY_P50, &LATENCY_P99] {
            let title = format!("{}, {MEDIAN}", quantity.title.to_lowercase());
            let table = self.table(first, &title, None, &|measured| Some(quantity.cell(&measured.runs)));
            add_line!(out, "\n{table}");
        }
    }

    /// A table of the modes of a group by the numbers of vCPUs. After each column there is one of
    /// the published figures, if there are any.
    fn table(
        &self,
        first: &Case,
        what: &str,
        published: Option<Published>,
        cell: &dyn Fn(&Measured) -> Option<String>,
    ) -> table::Table {
        let in_group = |case: &Case| (case.backing, case.uffds) == (first.backing, first.uffds);
        let group = self.published().zip(published).and_then(|((_, groups), published)| {
            let group = groups.iter().find(|group| (group.backing, group.uffds) == (first.backing, first.uffds))?;
            Some((group, published))
        });
        let columns: Vec<usize> = self.args.nr_vcpus().to_vec();
        let has_published = |nr_vcpus: usize| group.as_ref().is_some_and(|_| published::VCPUS.contains(&nr_vcpus));
        let mut header = vec![what.to_owned()];
        for &nr_vcpus in &columns {
            header.push(format!("{nr_vcpus} vCPUs"));
            if has_published(nr_vcpus) {
                header.push(table::PUBLISHED.to_owned());
            }
        }
        let mut modes: Vec<Mode> = Vec::new();
        for case in self.measured.iter().map(|measured| &measured.of).filter(|case| in_group(case)) {
            if !modes.contains(&case.mode) {
                modes.push(case.mode);
            }
        }
        let mut table = table::figures(header);
        for mode in modes {
            let mut cells = vec![mode.name()];
            for &nr_vcpus in &columns {
                let is_it = |case: &Case| in_group(case) && case.mode == mode && case.nr_vcpus == nr_vcpus;
                let found = self.measured.iter().copied().find(|measured| is_it(&measured.of));
                cells.push(or_nothing(found.and_then(cell)));
                if let Some((group, published)) = group.as_ref().filter(|_| has_published(nr_vcpus)) {
                    let value = (published.value)(group, mode, nr_vcpus);
                    cells.push(or_nothing(value.map(|value| quantity(value, published.unit))));
                }
            }
            table.add_row(cells);
        }
        table
    }

    fn print_notes(&self, out: &mut String) {
        add_line!(out, "");
        let most = self.measured.iter().map(|measured| measured.of.nr_vcpus).max().unwrap_or(0);
        let flush_method = self.runs().next().map(|run| run.flush_method);
        print_host(out, flush_method, most, "the rates and times measure the scheduler too.");
        if let Some((platform, _)) = self.published() {
            add_line!(
                out,
                "Published figures: KVM Userfault, version 1 (December 2024), {platform}, 96 CPUs, real ones, 64 MiB for each \
                 vCPU. They show proportions only."
            );
            add_line!(
                out,
                "The pages of shmem memory are in the file beforehand, and so cost no allocation in any row."
            );
        }
        for remark in self.remarks {
            add_line!(out, "{remark}");
        }
        let verified: u64 = self.runs().map(|run| run.nr_verified).sum();
        let has = |mode| self.measured.iter().any(|measured| measured.of.mode == mode);
        let is_all_there = self.measured.iter().all(|measured| measured.of.mode == Mode::None);
        add!(out, "Verified: {verified} pages held ");
        add!(out, "{}", if is_all_there { "what vCPUs wrote, and zeros" } else { "what their source has" });
        if has(Mode::None) && !is_all_there {
            add!(out, " (zeros in mode none)");
        }
        // The fills of a resolver process are not counted here.
        if !is_all_there && !has(Mode::Ring) {
            add!(out, "; none was filled twice");
        }
        if self.args.log_dirty {
            add!(out, "; the dirty log had every page that was written, and no other");
        }
        add_line!(out, ".");
    }

    pub(super) fn results(&self) -> Results {
        let (mut results, mut published) = (Vec::new(), Vec::new());
        for measured in self.measured {
            let labels = measured.of.labels();
            results.extend(QUANTITIES.iter().filter_map(|quantity| quantity.figure(&measured.runs, &labels)));
            let bases = [
                ("rate_vs_none", self.none(&measured.of)),
                ("rate_vs_best_userfaultfd", self.best_userfaultfd(&measured.of)),
            ];
            for (name, base) in bases {
                let ratios = base.map(|base| Figure::ratios(name, &labels, ratios(measured, base)));
                results.extend(ratios.filter(|figure| !figure.samples.is_empty()));
            }
            if let Some((on, rate)) = self.published_rate(&measured.of) {
                let on = format!("KVM Userfault, 2024, {on}, 96 CPUs");
                published.push(PublishedFigure::new("paging_rate", Unit::PerSecond, &labels, [rate; 2], on));
            }
            let mut fact = |name, unit, value: f64| {
                results.push(Figure::new(name, unit, &labels, [value]).with_better(None));
            };
            fact("bytes_per_vcpu", Unit::Bytes, measured.of.bytes_per_vcpu as f64);
            fact("readers", Unit::Count, measured.of.nr_readers as f64);
        }
        let flush_method = self.runs().next().map(|run| run.flush_method);
        let results = Results::new("userfault", self.config(), Host::read(flush_method), results);
        Results { published, ..results }
    }

    fn published_rate(&self, case: &Case) -> Option<(&'static str, f64)> {
        let (platform, groups) = self.published()?;
        let group = groups.iter().find(|group| (group.backing, group.uffds) == (case.backing, case.uffds))?;
        Some((platform, group.rate(case.mode, case.nr_vcpus)?))
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
            "delay_us": args.delay.as_secs_f64() * 1e6,
            "source": args.source.name(),
            "copier": args.copier,
            "log_dirty": args.log_dirty,
            "threads": args.threads,
            "kill_resolver": args.kill_resolver,
            "granularity_bytes": args.granularity().size_bytes(),
            "format": args.format.name(),
            "iterations": args.nr_runs(),
        })
    }
}

/// The published figures for a column.
struct Published {
    value: fn(&Group, Mode, usize) -> Option<f64>,
    unit: Unit,
}

fn readers(nr_readers: usize) -> String {
    if nr_readers == 1 { "one reader".to_owned() } else { format!("{nr_readers} readers") }
}

#[cfg(test)]
#[path = "figures_tests.rs"]
mod tests;
