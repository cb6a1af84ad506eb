//! What `slat get-dirty-log` prints and writes.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::{Value, json};
use slat_machine::topology::HostDescription;

use super::measure::{Cell, Series};
use super::migration::Migration;
use super::subject::flush_method;
use super::{GetDirtyLogArgs, Method, Notes, Workload};
use crate::results::{Figure, Results, host_json, measured_on};
use crate::table;

/// A number with two to three digits.
fn figure(value: f64) -> String {
    match value.abs() {
        small if small < 10.0 => format!("{value:.2}"),
        middle if middle < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// One table of all cells of a pattern: what it shows, and how.
struct View {
    title: &'static str,
    show: fn(&Cell, &Series) -> String,
}

const VIEWS: [View; 4] = [
    View { title: "ns a call, mean", show: |_, series| figure(series.samples().mean()) },
    View {
        title: "ns a call, p50 / deviation / p99",
        show: |_, series| {
            let samples = series.samples();
            [samples.quantile(500), samples.deviation(), samples.quantile(990)].map(figure).join(" / ")
        },
    },
    View { title: "ns a dirty page, mean", show: |cell, series| figure(series.samples().mean() / cell.nr_dirty) },
    View {
        title: "time against kvm's, median of paired runs",
        show: |cell, series| {
            cell.series_of(Method::Kvm).map_or("-".to_owned(), |kvm| format!("{:.3}", series.ratio_to(kvm)))
        },
    },
];

/// Prints the tables and the notes.
pub(super) fn print(out: &mut impl Write, args: &GetDirtyLogArgs, notes: &Notes, cells: &[Cell]) -> io::Result<()> {
    writeln!(
        out,
        "Getting the dirty log of one slot of {} pages, memory: {}, paging: {}, tables: {}; the guest has stopped at each call.",
        args.nr_pages(),
        args.backing,
        args.paging.name(),
        args.format.name()
    )?;
    if args.workload == Workload::Table {
        writeln!(out, "Methods in turn, each called {} times in a row.", args.in_a_row)?;
    }
    match args.workload {
        Workload::Framebuffer => print_framebuffer(out, cells)?,
        _ => print_patterns(out, args, notes, cells)?,
    }
    notes.not_run.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    writeln!(out, "{}", measured_on(&HostDescription::read(), flush_method()))?;
    if let Some(facts) = &notes.kvm {
        writeln!(
            out,
            "kvm: KVM_GET_DIRTY_LOG of this machine, the system call included, by a direct ioctl into an existing buffer."
        )?;
        facts.lines().iter().try_for_each(|line| writeln!(out, "{line}"))?;
    }
    let nr_calls: usize = cells.iter().flat_map(|cell| &cell.series).map(|series| series.times_ns.len()).sum();
    writeln!(out, "Verified: {nr_calls} logs had exactly the pages that were written.")
}

fn print_patterns(out: &mut impl Write, args: &GetDirtyLogArgs, notes: &Notes, cells: &[Cell]) -> io::Result<()> {
    for &pattern in args.patterns() {
        let rows: Vec<&Cell> = cells.iter().filter(|cell| cell.pattern == Some(pattern)).collect();
        // Without KVM there is nothing to compare with.
        let views = if notes.kvm.is_some() { &VIEWS[..] } else { &VIEWS[..VIEWS.len() - 1] };
        for view in views {
            let mut figures = table::figures(header(&rows, &format!("{}: {}", pattern.name(), view.title)));
            for cell in &rows {
                let cells = [cell.nr_dirty.to_string(), runs(cell)];
                let values = cell.series.iter().map(|series| (view.show)(cell, series));
                figures.add_row(table::row(cells.into_iter().chain(values)));
            }
            writeln!(out, "\n{figures}")?;
        }
    }
    writeln!(out)?;
    if args.patterns().len() > 1 {
        writeln!(out, "All {} pages are the same pages in each pattern: they were measured once.", args.nr_pages())?;
    }
    Ok(())
}

/// How many runs a row has.
fn runs(cell: &Cell) -> String {
    match cell.nr_runs() {
        (least, most) if least == most => most.to_string(),
        (least, most) => format!("{least}-{most}"),
    }
}

fn header(cells: &[&Cell], title: &str) -> Vec<String> {
    let methods = cells.iter().take(1).flat_map(|cell| &cell.series).map(|series| series.method.name());
    [title, "runs"].into_iter().chain(methods).map(str::to_owned).collect()
}

fn print_framebuffer(out: &mut impl Write, cells: &[Cell]) -> io::Result<()> {
    for cell in cells {
        let title = format!("{} bursts of {:.0} pages in the mean", runs(cell), cell.nr_dirty);
        let columns = ["ns a call, mean", "deviation", "p50", "p99", "ns a page", "against kvm"];
        let mut figures = table::figures(std::iter::once(title).chain(columns.map(str::to_owned)));
        for series in &cell.series {
            let samples = series.samples();
            let values = [
                samples.mean(),
                samples.deviation(),
                samples.quantile(500),
                samples.quantile(990),
                samples.mean() / cell.nr_dirty,
            ];
            let name = series.method.name().to_owned();
            let ratio = (VIEWS[3].show)(cell, series);
            figures.add_row(table::row(std::iter::once(name).chain(values.map(figure)).chain([ratio])));
        }
        writeln!(out, "\n{figures}\n")?;
    }
    Ok(())
}

/// The labels that all figures have.
fn labels(args: &GetDirtyLogArgs, method: Method) -> BTreeMap<&'static str, Value> {
    let mut labels = BTreeMap::from([("method", Value::from(method.name()))]);
    if method.is_engine() {
        labels.insert("paging", args.paging.name().into());
    }
    labels
}

/// The object of `--json`.
pub(super) fn results(args: &GetDirtyLogArgs, notes: &Notes, cells: &[Cell]) -> Results {
    let mut results = Vec::new();
    for cell in cells {
        for series in &cell.series {
            let mut labels = labels(args, series.method);
            match cell.pattern {
                Some(pattern) => {
                    labels.insert("pages", Value::from(cell.nr_dirty as u64));
                    labels.insert("pattern", pattern.name().into());
                }
                None => {
                    labels.insert("workload", "framebuffer".into());
                }
            }
            let mut push = |name: &str, value: f64, unit: &'static str| {
                results.push(Figure { name: name.to_owned(), value, unit, labels: labels.clone() });
            };
            let samples = series.samples();
            push("get_dirty_log", samples.mean(), "ns");
            push("get_dirty_log_deviation", samples.deviation(), "ns");
            push("get_dirty_log_p50", samples.quantile(500), "ns");
            push("get_dirty_log_p99", samples.quantile(990), "ns");
            push("get_dirty_log_page", samples.mean() / cell.nr_dirty, "ns");
            push("dirty_pages", cell.nr_dirty, "count");
            push("runs", samples.len() as f64, "count");
            if let Some(kvm) = cell.series_of(Method::Kvm) {
                push("ratio_to_kvm", series.ratio_to(kvm), "ratio");
            }
        }
    }
    Results { not_run: notes.not_run.clone(), ..object(args, host(Some(notes)), results) }
}

fn host(notes: Option<&Notes>) -> Value {
    let mut host = host_json(&HostDescription::read(), Some(flush_method()));
    host["kvm"] = notes.and_then(|notes| notes.kvm.as_ref()).map_or(Value::Null, |facts| facts.json());
    host
}

fn object(args: &GetDirtyLogArgs, host: Value, results: Vec<Figure>) -> Results {
    Results {
        experiment: "get-dirty-log",
        config: json!({
            "workload": match args.workload {
                Workload::Table => "table",
                Workload::Framebuffer => "framebuffer",
                Workload::Migration => "migration",
            },
            "bytes": args.slot_bytes(),
            "runs": args.max_runs(),
            "in_a_row": args.in_a_row,
            "rate": (args.workload == Workload::Migration).then(|| args.guest_rate()),
            "backing": args.backing.to_string(),
            "format": args.format.name(),
            "paging": args.paging.name(),
            "seed": args.seed,
        }),
        host,
        results,
        histograms: Vec::new(),
        not_run: Vec::new(),
    }
}

/// A figure of a migration.
struct Line {
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    value: fn(&Migration) -> f64,
}

const LINES: [Line; 14] = [
    Line { name: "get_dirty_log", title: "Harvest, mean", unit: "ns", value: |run| run.harvest_ns.mean() },
    Line {
        name: "get_dirty_log_deviation",
        title: "Harvest, deviation",
        unit: "ns",
        value: |run| run.harvest_ns.deviation(),
    },
    Line { name: "get_dirty_log_p50", title: "Harvest, p50", unit: "ns", value: |run| run.harvest_ns.quantile(500) },
    Line { name: "get_dirty_log_p99", title: "Harvest, p99", unit: "ns", value: |run| run.harvest_ns.quantile(990) },
    Line {
        name: "dirty_pages",
        title: "Pages that a harvest reports",
        unit: "count",
        value: |run| run.reported.mean(),
    },
    Line {
        name: "write_fault_p50",
        title: "Guest's write that faults, p50",
        unit: "ns",
        value: |run| run.fault_ns.quantile(500),
    },
    Line {
        name: "write_fault_p99",
        title: "Guest's write that faults, p99",
        unit: "ns",
        value: |run| run.fault_ns.quantile(990),
    },
    Line {
        name: "write_fault_max",
        title: "Guest's write that faults, longest",
        unit: "ns",
        value: |run| run.fault_ns.quantile(1000),
    },
    Line {
        name: "write_fault",
        title: "Guest's write that faults, mean",
        unit: "ns",
        value: |run| run.fault_ns.mean(),
    },
    Line {
        name: "guest_stall",
        title: "Guest stall in a fault (sample), mean",
        unit: "ns",
        value: |run| run.stall_ns as f64 / (run.nr_faults as f64).max(1.0),
    },
    Line {
        name: "guest_stall_share",
        title: "Guest stall, share of the time",
        unit: "ratio",
        value: |run| run.stall_ns as f64 * 1e-9 / run.elapsed.as_secs_f64().max(f64::MIN_POSITIVE),
    },
    Line {
        name: "guest_write",
        title: "Guest's time of a write, mean",
        unit: "ns",
        value: |run| run.writing_ns as f64 / (run.nr_writes as f64).max(1.0),
    },
    Line {
        name: "guest_writes_per_second",
        title: "Guest's writes in a second",
        unit: "1/s",
        value: |run| run.nr_writes as f64 / run.elapsed.as_secs_f64().max(f64::MIN_POSITIVE),
    },
    Line { name: "faults", title: "Faults", unit: "count", value: |run| run.nr_faults as f64 },
];

/// Prints the tables of a migration.
pub(super) fn print_migration(out: &mut impl Write, args: &GetDirtyLogArgs, all: &[Migration]) -> io::Result<()> {
    let rate = match args.guest_rate() {
        0 => "as many pages as it can".to_owned(),
        rate => format!("{rate} pages a second"),
    };
    writeln!(
        out,
        "Migration of one slot of {} pages, memory: {}, paging: {}, tables: {}; the guest writes {rate}, at random, on another thread.",
        args.nr_pages(),
        args.backing,
        args.paging.name(),
        args.format.name()
    )?;
    let nr_harvests = all.first().map_or(0, |run| run.harvest_ns.len());
    let header = std::iter::once(format!("{nr_harvests} harvests, ns"))
        .chain(all.iter().map(|run| run.method.name().to_owned()));
    let mut figures = table::figures(header);
    for line in &LINES {
        let values = all.iter().map(|run| figure((line.value)(run)));
        figures.add_row(table::row(std::iter::once(line.title.to_owned()).chain(values)));
    }
    writeln!(out, "\n{figures}\n")?;
    let host = HostDescription::read();
    writeln!(out, "{}", measured_on(&host, flush_method()))?;
    if host.nr_cpus < 2 {
        writeln!(out, "Host and guest share {} CPU: the times measure the scheduler too.", host.nr_cpus)?;
    }
    writeln!(out, "Verified: after each turn the pages copied as they were reported equalled the guest's memory.")
}

/// The object of `--json`.
pub(super) fn migration_results(args: &GetDirtyLogArgs, all: &[Migration]) -> Results {
    let mut results = Vec::new();
    for run in all {
        let mut labels = labels(args, run.method);
        labels.insert("workload", "migration".into());
        for line in &LINES {
            let value = (line.value)(run);
            results.push(Figure { name: line.name.to_owned(), value, unit: line.unit, labels: labels.clone() });
        }
        let runs = run.harvest_ns.len() as f64;
        results.push(Figure { name: "runs".to_owned(), value: runs, unit: "count", labels });
    }
    object(args, host(None), results)
}
