//! What `slat compare` prints: Markdown, which is readable as it is.

use std::fmt::Write;

use slat_machine::topology::HostDescription;

use super::comparison::{Evaluation, HARDWARE, HOST_CPUS, Measured, Published, Role, SOFTWARE_CPUS};
use super::{Claims, CompareArgs, SystemResult};
use crate::table::{self, humanly};

/// The heading, and what the columns mean.
pub(super) fn head(args: &CompareArgs, host: &HostDescription) -> String {
    let command = if args.quick { "slat compare --quick" } else { "slat compare" };
    format!(
        "# {command}: the published systems, their baselines, slat, and the peers of this machine\n\n\
         {} CPUs, {}, Linux {}, {:.0} GiB of memory.\n\n\
         - A figure is a mean over runs, with its deviation. The speed-up of slat compares medians of this run, never figures\n  \
           of two machines: 2.00 is twice as good, 0.50 half. Published figures are shown for their proportions.\n\
         - {SOFTWARE_CPUS}: threads, memory, tables and contention are real, the guest's address translation is a program.\n  \
           {HOST_CPUS}: the call is timed as it is, no guest runs. {HARDWARE}: the KVM of this machine on its real CPUs.\n\
         - A claim is a comparison that slat must win, or this command fails.\n\n",
        host.nr_cpus,
        host.cpu_model,
        host.kernel_release,
        host.memory_bytes as f64 / f64::from(1 << 30),
    )
}

/// A figure in its unit.
fn quantity(value: f64, unit: &str) -> String {
    match unit {
        "ns" => humanly(value * 1e-9, "s"),
        "pages/s" => format!("{value:.0}"),
        _ => humanly(value, unit),
    }
}

/// The section of one system.
pub(super) fn system(result: &SystemResult) -> String {
    let mut text = format!("## {}: {}\n\nPublished: {}\n\n", result.system, result.title, result.published_note);
    // Writing to a string cannot fail.
    for command in result.experiments.iter().filter_map(|object| object["command"].as_str()) {
        let _ = writeln!(text, "    $ {command}");
    }
    let header =
        ["figure", "mean", "deviation", "runs", "measured on", "speed-up", "claim", "published", "published gain"];
    let mut figures = table::figures(header.map(str::to_owned));
    for comparison in &result.comparisons {
        figures.add_row(table::row(
            std::iter::once(comparison.title.clone()).chain(std::iter::repeat_n(String::new(), header.len() - 1)),
        ));
        for (place, side) in comparison.sides.iter().enumerate() {
            let is_first_baseline = place == first_baseline(comparison);
            figures.add_row(table::row(row(comparison, side, is_first_baseline)));
        }
    }
    if !result.comparisons.is_empty() {
        let _ = writeln!(text, "\n{figures}");
    }
    let _ = writeln!(text);
    for not_run in &result.not_run {
        let _ = writeln!(text, "- {not_run}");
    }
    if !result.not_run.is_empty() {
        let _ = writeln!(text);
    }
    text
}

/// The side that is the starting point of the published work.
fn first_baseline(comparison: &Evaluation) -> usize {
    comparison.sides.iter().position(|side| side.role != Role::Slat).unwrap_or(usize::MAX)
}

fn row(comparison: &Evaluation, side: &Measured, is_first_baseline: bool) -> Vec<String> {
    let published = |of: fn(&Published) -> Option<f64>| {
        comparison.published.as_ref().and_then(of).map(|value| quantity(value, comparison.unit)).unwrap_or_default()
    };
    let (published, gain) = match side.role {
        Role::Slat => (published(|of| of.proposed), gain(comparison)),
        _ if is_first_baseline => (published(|of| of.baseline), String::new()),
        _ => (String::new(), String::new()),
    };
    let claim = side.claim.map(|claim| {
        let verdict = if claim.holds { "held" } else { "LOST" };
        format!("{:.2} {verdict}", claim.at_least)
    });
    vec![
        format!("- {}", side.name),
        quantity(side.mean, comparison.unit),
        side.deviation.map(|deviation| quantity(deviation, comparison.unit)).unwrap_or_default(),
        side.runs.to_string(),
        side.measured_on.to_owned(),
        side.ratio.map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
        claim.unwrap_or_default(),
        published,
        gain,
    ]
}

/// How many times as good as its baseline the published work is.
fn gain(comparison: &Evaluation) -> String {
    let published = comparison.published.and_then(|of| Some((of.baseline?, of.proposed?)));
    published.map_or(String::new(), |(baseline, proposed)| {
        let gain = match comparison.better {
            super::comparison::Better::Less => baseline / proposed,
            super::comparison::Better::More => proposed / baseline,
        };
        format!("{gain:.2}")
    })
}

/// The claims that were held and lost.
pub(super) fn closing(claims: &Claims, failures: &[String]) -> String {
    let mut text = format!("{} claims made, {} held.\n", claims.made, claims.held);
    for lost in claims.lost.iter().chain(failures) {
        let _ = writeln!(text, "- LOST: {lost}");
    }
    text
}
