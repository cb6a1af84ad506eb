//! The output of `slat aging`.

use serde_json::json;
use slat::PageSize;
use slat_machine::hardware::commit::FlushMethod;

use super::{AgingArgs, Measured, PHASES, PassArg, Run, Series, can_tlb_hide, is_too_many, leaf_size};
use crate::options::{Named, ValueName};
use crate::quantity::{Unit, quantity};
use crate::results::{Figure, Host, Results, cell, labels, print_host};
use crate::statistics::Samples;
use crate::table::{self, MEDIAN};

/// The samples of phase number `phase` over the runs.
fn samples(series: &Series, phase: usize, value: impl Fn(&Measured) -> f64) -> Samples {
    series.runs.iter().map(|run| value(&run.phases[phase])).collect()
}

fn seconds(measured: &Measured) -> f64 {
    measured.time.as_secs_f64()
}

fn page_seconds(measured: &Measured) -> f64 {
    seconds(measured) / measured.nr_pages as f64
}

/// A count of a phase, with its name in results.
type Count = (&'static str, fn(&Measured) -> f64);

const COUNTS: [Count; 3] = [
    ("pages", |phase| phase.nr_pages as f64),
    ("faults", |phase| phase.nr_faults as f64),
    ("flushes", |phase| phase.nr_flushes as f64),
];

/// The most pages, over the runs, that still counted as idle after a phase used them: one entry for
/// each phase after which they were counted.
fn still_idle(series: &Series) -> Vec<(&'static str, u64)> {
    let Some(first) = series.runs.first() else { return Vec::new() };
    let most = |check: usize| series.runs.iter().map(|run| run.still_idle[check].nr_idle).max().unwrap_or(0);
    first.still_idle.iter().enumerate().map(|(check, idle)| (idle.used_by, most(check))).collect()
}

/// Prints the lines of KVM's test (of each run, if there is one series), the tables and the notes.
pub(super) fn print(out: &mut String, args: &AgingArgs, all: &[&Series]) {
    add_line!(
        out,
        "{} vCPUs, {} each ({} access), memory: {}, tables: {}",
        args.guest.vcpus,
        quantity(args.guest.bytes as f64, Unit::Bytes),
        if args.guest.overlap { "overlapping" } else { "partitioned" },
        args.guest.backing,
        args.tables.format.name()
    );
    let call = match args.pass {
        PassArg::Page => "page",
        PassArg::Range => "slot",
    };
    add_line!(out, "Using one call for each {call} for aging");
    if let [series] = all {
        for (index, run) in series.runs.iter().enumerate() {
            add_line!(out, "Run {}", index + 1);
            for (phase, measured) in PHASES.iter().zip(&run.phases) {
                let time = measured.time;
                add_line!(out, "{:<30}: {}.{:09}s", phase.title, time.as_secs(), time.subsec_nanos());
            }
        }
    }
    print_tables(out, all);
    print_warnings(out, args, all);
    print_host(out, flush_method(all), args.guest.vcpus, "the times measure the scheduler too.");
    let nr_verified: u64 = all.iter().flat_map(|series| &series.runs).map(|run| run.nr_verified).sum();
    add_line!(
        out,
        "Verified: {nr_verified} reads found what was written; marking idle flushed nothing and left no page young."
    );
}

fn flush_method(all: &[&Series]) -> Option<FlushMethod> {
    Some(all.first()?.runs.first()?.flush_method)
}

fn header(all: &[&Series], first: String) -> Vec<String> {
    std::iter::once(first).chain(all.iter().map(|series| series.of.title())).collect()
}

fn print_tables(out: &mut String, all: &[&Series]) {
    let nr_runs = all.first().map_or(0, |series| series.runs.len());
    let mut times = table::figures(header(all, format!("{MEDIAN}, {nr_runs} runs")));
    let mut details = table::figures(header(all, format!("a page / pages / faults / flushes, {MEDIAN}")));
    for (index, phase) in PHASES.iter().enumerate() {
        let name = || std::iter::once(phase.title.to_owned());
        let of_run = all.iter().map(|series| cell(&samples(series, index, seconds), Unit::Seconds));
        times.add_row(name().chain(of_run));
        let detail = |series: &Series| {
            let page = cell(&samples(series, index, page_seconds), Unit::Seconds);
            let counts = COUNTS.map(|(_, count)| cell(&samples(series, index, count), Unit::Count));
            format!("{page} / {}", counts.join(" / "))
        };
        details.add_row(name().chain(all.iter().copied().map(detail)));
    }
    let mut idle = table::figures(header(all, "pages still idle after, worst run".to_owned()));
    for (check, (used_by, _)) in all.first().copied().map(still_idle).unwrap_or_default().into_iter().enumerate() {
        let counts = all.iter().map(|series| still_idle(series)[check].1.to_string());
        idle.add_row(std::iter::once(used_by.to_owned()).chain(counts));
    }
    add_line!(out, "\n{times}\n\n{details}\n\n{idle}\n");
}

fn print_warnings(out: &mut String, args: &AgingArgs, all: &[&Series]) {
    let mut warned = false;
    for series in all {
        let Some(Run { nr_pages, .. }) = series.runs.first() else { continue };
        for (used_by, nr_idle) in still_idle(series) {
            if is_too_many(nr_idle, *nr_pages) {
                warned = true;
                add_line!(
                    out,
                    "WARNING: {}: after \"{used_by}\": Too many pages still idle ({nr_idle} out of {nr_pages})",
                    series.of.title()
                );
            }
        }
    }
    if warned && args.pass == PassArg::Page && leaf_size(args.guest.backing) != PageSize::Size4K {
        add_line!(out, "A pass by pages counts a huge page once, and the rest of it as idle.");
    }
    if warned && can_tlb_hide(args) {
        add_line!(
            out,
            "A vCPU's TLB can have more than a tenth of this memory, and marking flushes nothing: accesses through it go \
             unseen. Give the vCPUs more memory, in small pages."
        );
    }
}

pub(super) fn results(args: &AgingArgs, all: &[&Series]) -> Results {
    let mut results = Vec::new();
    for series in all {
        let labels =
            labels([("tracking", series.of.tracking.name().into()), ("lock", series.of.locking.name().into())]);
        let mut push = |name: String, unit, samples: Samples| {
            results.push(Figure::new(name, unit, &labels, samples.iter()));
        };
        for (index, phase) in PHASES.iter().enumerate() {
            push(phase.name.to_owned(), Unit::Seconds, samples(series, index, seconds));
            push(format!("{}_page", phase.name), Unit::Seconds, samples(series, index, page_seconds));
            for (name, count) in COUNTS {
                push(format!("{}_{name}", phase.name), Unit::Count, samples(series, index, count));
            }
        }
        let of_runs = |value: fn(&Run) -> u64| series.runs.iter().map(|run| value(run) as f64).collect::<Samples>();
        let most_idle = |run: &Run| run.still_idle.iter().map(|idle| idle.nr_idle).max().unwrap_or(0);
        push("still_idle".to_owned(), Unit::Count, of_runs(most_idle));
        push("verified".to_owned(), Unit::Count, of_runs(|run| run.nr_verified));
        push("pages".to_owned(), Unit::Count, of_runs(|run| run.nr_pages));
    }
    let config = json!({
        "vcpus": args.guest.vcpus,
        "bytes": args.guest.bytes,
        "backing": args.guest.backing.to_string(),
        "overlap": args.guest.overlap,
        "still_idle": args.still_idle.name(),
        "pass": args.pass.name(),
        "format": args.tables.format.name(),
        "runs": args.runs,
    });
    Results::new("aging", config, Host::read(flush_method(all)), results)
}
