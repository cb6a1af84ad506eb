//! What `slat stress` prints and writes.

use serde_json::json;
use slat_machine::linux::topology::HostDescription;

use super::tally::{FIGURES, Part};
use super::{StressArgs, Summary, Turns, combinations};
use crate::live::lock;
use crate::options::FormatArg;
use crate::quantity::{Unit, quantity};
use crate::results::{Figure, Host, Labels, Results};
use crate::table;

fn nr_combinations(args: &StressArgs, turns: &Turns) -> usize {
    combinations(args).len().min(turns.plans.len())
}

pub(super) fn print(out: &mut String, args: &StressArgs, summary: &Summary) {
    let host = HostDescription::read();
    let turns = lock(&summary.turns);
    add_line!(
        out,
        "Stress of {} vCPUs on {} CPUs for {:.1} s, seed {}: {} turns, {} combinations of lock, format and tracking.",
        args.vcpus,
        host.nr_cpus,
        summary.begin.elapsed().as_secs_f64(),
        args.seed,
        turns.plans.len(),
        nr_combinations(args, &turns)
    );
    if args.verbose {
        for plan in &turns.plans {
            add_line!(out, "{plan}");
        }
    }
    for (part, title) in [(Part::Done, "done"), (Part::Verified, "verified"), (Part::Engine, "engine")] {
        let mut table = table::figures([title.to_owned(), "count".to_owned()]);
        for (figure, _, _, title) in FIGURES.iter().filter(|figure| figure.1 == part) {
            table.add_row([(*title).to_owned(), quantity(summary.tally.get(*figure) as f64, Unit::Count)]);
        }
        add_line!(out, "\n{table}");
    }
    if let Some(method) = turns.flush_method {
        add_line!(out, "\nTLB flush: {method}.");
    }
    add_line!(out, "Verified: all checks passed.");
}

pub(super) fn results(args: &StressArgs, summary: &Summary) -> Results {
    let turns = lock(&summary.turns);
    let figure = |name: &str, value: f64, unit| Figure::new(name, unit, &Labels::new(), [value]).with_better(None);
    let count = |name, count: u64| figure(name, count as f64, Unit::Count);
    let mut results: Vec<Figure> =
        FIGURES.iter().map(|&(which, _, name, _)| count(name, summary.tally.get(which))).collect();
    results.push(count("turns", turns.plans.len() as u64));
    results.push(count("combinations", nr_combinations(args, &turns) as u64));
    results.push(figure("wall", summary.begin.elapsed().as_secs_f64(), Unit::Seconds));
    let config = json!({
        "seconds": args.duration.as_secs_f64(),
        "vcpus": args.vcpus,
        "seed": args.seed,
        "lock": args.lock.name,
        "format": args.format.map_or("all", FormatArg::name),
        "tracking": args.access_tracking.name,
    });
    Results::new("stress", config, Host::read(turns.flush_method), results)
}
