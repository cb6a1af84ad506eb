//! The output of `slat aging`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::json;
use slat::PageSize;
use slat_machine::topology::HostDescription;

use super::{AgingArgs, Measured, PHASES, PassArg, Run, Series, can_tlb_hide, is_too_many, leaf_size};
use crate::args::{locking_name, tracking_name};
use crate::results::{Figure, Results, Samples, host_json, measured_on};
use crate::table::{self, humanly};

/// The samples of phase number `phase` over the runs.
fn samples(series: &Series, phase: usize, value: impl Fn(&Measured) -> f64) -> Samples {
    let mut samples = Samples::default();
    for run in &series.runs {
        samples.push(value(&run.phases[phase]));
    }
    samples
}

fn seconds(measured: &Measured) -> f64 {
    measured.time.as_secs_f64()
}

fn page_ns(measured: &Measured) -> f64 {
    seconds(measured) * 1e9 / measured.nr_pages as f64
}

/// The most pages, over the runs, that still counted as idle after a phase used them: one entry for
/// each phase after which they were counted.
fn still_idle(series: &Series) -> Vec<(&'static str, u64)> {
    let Some(first) = series.runs.first() else { return Vec::new() };
    let most = |check: usize| series.runs.iter().map(|run| run.still_idle[check].nr_idle).max().unwrap_or(0);
    first.still_idle.iter().enumerate().map(|(check, idle)| (idle.used_by, most(check))).collect()
}

/// Prints the lines of KVM's test (of each run, if there is one series), the tables and the notes.
pub(super) fn print(out: &mut impl Write, args: &AgingArgs, all: &[&Series]) -> io::Result<()> {
    let host = HostDescription::read();
    writeln!(
        out,
        "{} vCPUs, {} each ({} access), memory: {}, tables: {}",
        args.vcpus,
        humanly(args.bytes as f64, "bytes"),
        if args.overlap { "overlapping" } else { "partitioned" },
        args.backing,
        args.format.name()
    )?;
    let call = match args.pass {
        PassArg::Page => "page",
        PassArg::Range => "slot",
    };
    writeln!(out, "Using one call for each {call} for aging")?;
    if let [series] = all {
        for (index, run) in series.runs.iter().enumerate() {
            writeln!(out, "Run {}", index + 1)?;
            for (phase, measured) in PHASES.iter().zip(&run.phases) {
                let time = measured.time;
                writeln!(out, "{:<30}: {}.{:09}s", phase.title, time.as_secs(), time.subsec_nanos())?;
            }
        }
    }
    print_tables(out, all)?;
    print_warnings(out, args, all)?;
    if let Some(run) = all.first().and_then(|series| series.runs.first()) {
        writeln!(out, "{}", measured_on(&host, run.flush_method))?;
    }
    if args.vcpus > host.nr_cpus {
        writeln!(out, "{} vCPUs on {} CPUs: the times measure the scheduler too.", args.vcpus, host.nr_cpus)?;
    }
    let nr_verified: u64 = all.iter().flat_map(|series| &series.runs).map(|run| run.nr_verified).sum();
    writeln!(
        out,
        "Verified: {nr_verified} reads found what was written; marking idle flushed nothing and left no page young."
    )
}

fn header(all: &[&Series], first: String) -> Vec<String> {
    let title = |series: &Series| format!("{}, lock {}", tracking_name(series.tracking), locking_name(series.locking));
    std::iter::once(first).chain(all.iter().copied().map(title)).collect()
}

fn print_tables(out: &mut impl Write, all: &[&Series]) -> io::Result<()> {
    let nr_runs = all.first().map_or(0, |series| series.runs.len());
    let mut times = table::figures(header(all, format!("seconds, mean ({nr_runs} runs)")));
    let mut details = table::figures(header(all, "ns a page / pages / faults / flushes, mean of a run".to_owned()));
    for (index, phase) in PHASES.iter().enumerate() {
        let name = || std::iter::once(phase.title.to_owned());
        let means = all.iter().map(|series| format!("{:.9}s", samples(series, index, seconds).mean()));
        times.add_row(table::row(name().chain(means)));
        let detail = |series: &Series| {
            let page_ns = samples(series, index, page_ns).mean();
            let counts: [fn(&Measured) -> f64; 3] =
                [|phase| phase.nr_pages as f64, |phase| phase.nr_faults as f64, |phase| phase.nr_flushes as f64];
            let [pages, faults, flushes] = counts.map(|count| samples(series, index, count).mean());
            format!("{page_ns:.1} / {pages:.0} / {faults:.0} / {flushes:.0}")
        };
        details.add_row(table::row(name().chain(all.iter().copied().map(detail))));
    }
    let mut idle = table::figures(header(all, "pages still idle after, worst run".to_owned()));
    for (check, (used_by, _)) in all.first().copied().map(still_idle).unwrap_or_default().into_iter().enumerate() {
        let counts = all.iter().map(|series| still_idle(series)[check].1.to_string());
        idle.add_row(table::row(std::iter::once(used_by.to_owned()).chain(counts)));
    }
    writeln!(out, "\n{times}\n\n{details}\n\n{idle}\n")
}

fn print_warnings(out: &mut impl Write, args: &AgingArgs, all: &[&Series]) -> io::Result<()> {
    let mut warned = false;
    for series in all {
        let Some(Run { nr_pages, .. }) = series.runs.first() else { continue };
        for (used_by, nr_idle) in still_idle(series) {
            if is_too_many(nr_idle, *nr_pages) {
                warned = true;
                writeln!(
                    out,
                    "WARNING: {}, lock {}: after \"{used_by}\": Too many pages still idle ({nr_idle} out of {nr_pages})",
                    tracking_name(series.tracking),
                    locking_name(series.locking),
                )?;
            }
        }
    }
    if warned && args.pass == PassArg::Page && leaf_size(args.backing) != PageSize::Size4K {
        writeln!(out, "A pass by pages counts a huge page once, and the rest of it as idle.")?;
    }
    if warned && can_tlb_hide(args) {
        writeln!(
            out,
            "A vCPU's TLB can have more than a tenth of this memory, and marking flushes nothing: accesses through it go \
             unseen. Give the vCPUs more memory, in small pages."
        )?;
    }
    Ok(())
}

/// The object of `--json`.
pub(super) fn results(args: &AgingArgs, all: &[&Series]) -> Results {
    let mut results = Vec::new();
    for series in all {
        let labels = BTreeMap::from([
            ("tracking", tracking_name(series.tracking).into()),
            ("lock", locking_name(series.locking).into()),
        ]);
        let mut push = |name: String, value: f64, unit: &'static str| {
            results.push(Figure { name, value, unit, labels: labels.clone() });
        };
        for (index, phase) in PHASES.iter().enumerate() {
            let times = samples(series, index, seconds);
            push(phase.name.to_owned(), times.mean(), "s");
            push(format!("{}_deviation", phase.name), times.deviation(), "s");
            push(format!("{}_page", phase.name), samples(series, index, page_ns).mean(), "ns");
            let faults = samples(series, index, |measured| measured.nr_faults as f64);
            push(format!("{}_faults", phase.name), faults.mean(), "count");
            let flushes = samples(series, index, |measured| measured.nr_flushes as f64);
            push(format!("{}_flushes", phase.name), flushes.mean(), "count");
        }
        let most_idle = still_idle(series).into_iter().map(|(_, nr_idle)| nr_idle).max().unwrap_or(0);
        push("still_idle".to_owned(), most_idle as f64, "count");
        let nr_verified: u64 = series.runs.iter().map(|run| run.nr_verified).sum();
        push("verified".to_owned(), nr_verified as f64, "count");
        push("pages".to_owned(), series.runs.first().map_or(0, |run| run.nr_pages) as f64, "count");
        push("runs".to_owned(), series.runs.len() as f64, "count");
    }
    let flush_method = all.first().and_then(|series| series.runs.first()).map(|run| run.flush_method);
    Results {
        experiment: "aging",
        config: json!({
            "vcpus": args.vcpus,
            "bytes": args.bytes,
            "backing": args.backing.to_string(),
            "overlap": args.overlap,
            "warn_idle": args.warn_idle,
            "pass": args.pass.name(),
            "format": args.format.name(),
            "runs": args.runs,
        }),
        host: host_json(&HostDescription::read(), flush_method),
        results,
        histograms: Vec::new(),
        not_run: Vec::new(),
    }
}
