//! What `slat stress` prints and writes.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::json;
use slat_machine::topology::HostDescription;

use super::tally::{FIGURES, Part};
use super::{StressArgs, Summary, Turns, combinations};
use crate::args::{FormatArg, LockArg, TrackingArg, locking_name, tracking_name};
use crate::results::{Figure, Results, host_json};
use crate::table;

/// Combinations that had a turn.
fn nr_combinations(args: &StressArgs, turns: &Turns) -> usize {
    combinations(args).len().min(turns.plans.len())
}

/// Prints the table.
pub(super) fn print(out: &mut impl Write, args: &StressArgs, summary: &Summary) -> io::Result<()> {
    let host = HostDescription::read();
    let turns = summary.turns();
    writeln!(
        out,
        "Stress of {} vCPUs on {} CPUs for {:.1} s, seed {}: {} turns, {} combinations of lock, format and tracking.",
        args.vcpus,
        host.nr_cpus,
        summary.begin.elapsed().as_secs_f64(),
        args.seed,
        turns.plans.len(),
        nr_combinations(args, &turns),
    )?;
    if args.verbose {
        for plan in &turns.plans {
            writeln!(out, "{plan}")?;
        }
    }
    for (part, title) in [(Part::Done, "done"), (Part::Verified, "verified"), (Part::Engine, "engine")] {
        let mut table = table::figures([title.to_owned(), "count".to_owned()]);
        for (figure, _, _, title) in FIGURES.iter().filter(|figure| figure.1 == part) {
            table.add_row(table::row([(*title).to_owned(), summary.tally.get(*figure).to_string()]));
        }
        writeln!(out, "\n{table}")?;
    }
    if let Some(method) = turns.flush_method {
        writeln!(out, "\nTLB flush: {method}.")?;
    }
    writeln!(out, "Verified: all checks passed.")
}

/// The object of `--json`.
pub(super) fn results(args: &StressArgs, summary: &Summary) -> Results {
    let host = HostDescription::read();
    let turns = summary.turns();
    let figure = |name: &str, value: f64, unit| Figure { name: name.to_owned(), value, unit, labels: BTreeMap::new() };
    let mut results: Vec<Figure> =
        FIGURES.iter().map(|&(which, _, name, _)| figure(name, summary.tally.get(which) as f64, "count")).collect();
    results.push(figure("turns", turns.plans.len() as f64, "count"));
    results.push(figure("combinations", nr_combinations(args, &turns) as f64, "count"));
    results.push(figure("wall", summary.begin.elapsed().as_secs_f64(), "s"));
    Results {
        experiment: "stress",
        config: json!({
            "seconds": args.seconds,
            "vcpus": args.vcpus,
            "seed": args.seed,
            "lock": if args.lock == LockArg::All { "all" } else { locking_name(args.lock.lockings()[0]) },
            "format": args.format.map_or("all", FormatArg::name),
            "tracking": if args.tracking == TrackingArg::Both { "both" } else { tracking_name(args.tracking.trackings()[0]) },
        }),
        host: host_json(&host, turns.flush_method),
        results,
        histograms: Vec::new(),
        not_run: Vec::new(),
    }
}
