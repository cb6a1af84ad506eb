//! The comparisons of `slat compare`: for each figure of a system the published values, the
//! measured sides, and whether the claims of slat hold.

use maud::{Markup, html};

use super::groups::{Sample, Verdict, verdict};
use super::input::{Comparison, Input, Published, Side, System};
use super::page::{scroll, tally};
use super::quantity::{measured, quantity, ratio, title};

/// One system in all files.
#[derive(Debug)]
pub(crate) struct Row<'a> {
    pub(crate) system: &'a str,
    pub(crate) title: &'a str,
    /// One for each file.
    files: Vec<Option<&'a System>>,
}

/// All systems, in the order of the files.
pub(crate) fn systems(inputs: &[Input]) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for (file, input) in inputs.iter().enumerate() {
        for system in input.systems() {
            let row = rows.iter().position(|row| row.system == system.system).unwrap_or_else(|| {
                let files = vec![None; inputs.len()];
                rows.push(Row { system: &system.system, title: &system.title, files });
                rows.len() - 1
            });
            rows[row].files[file].get_or_insert(system);
        }
    }
    rows
}

/// A comparison, as each file has it.
struct Merged<'a> {
    first: &'a Comparison,
    files: Vec<Option<&'a Comparison>>,
}

impl<'a> Merged<'a> {
    /// The sides of all files, by their names.
    fn sides(&self) -> Vec<(&'a str, Vec<Option<&'a Side>>)> {
        let mut sides: Vec<(&str, Vec<Option<&Side>>)> = Vec::new();
        for (file, comparison) in self.files.iter().enumerate() {
            for side in comparison.map(|comparison| comparison.sides.as_slice()).unwrap_or_default() {
                let at = sides.iter().position(|(name, _)| *name == side.name).unwrap_or_else(|| {
                    sides.push((&side.name, vec![None; self.files.len()]));
                    sides.len() - 1
                });
                sides[at].1[file].get_or_insert(side);
            }
        }
        sides
    }
}

impl<'a> Row<'a> {
    fn comparisons(&self) -> Vec<Merged<'a>> {
        let mut merged: Vec<Merged<'_>> = Vec::new();
        for (file, system) in self.files.iter().enumerate() {
            for comparison in system.map(|system| system.comparisons.as_slice()).unwrap_or_default() {
                let at = merged.iter().position(|merged| merged.first.name == comparison.name).unwrap_or_else(|| {
                    merged.push(Merged { first: comparison, files: vec![None; self.files.len()] });
                    merged.len() - 1
                });
                merged[at].files[file].get_or_insert(comparison);
            }
        }
        merged
    }

    /// The table of the system, and the list of what was not run.
    pub(crate) fn markup(&self, inputs: &[Input]) -> Markup {
        let comparisons = self.comparisons();
        let several = inputs.len() > 1;
        let nr_columns = 4 + inputs.len() + usize::from(several);
        html! {
            @if !comparisons.is_empty() {
                (scroll(&format!("Comparisons of {}", self.system), html! {
                    table.compare {
                        thead { tr {
                            th scope="col" { "Side" }
                            @for input in inputs {
                                th scope="col" { @if several { (input.label) ": mean" } @else { "Mean ± deviation (runs)" } }
                            }
                            @if several { th scope="col" { "Change" } }
                            th scope="col" { "Speed-up" }
                            th scope="col" { "Measured on" }
                            th scope="col" { "Claim" }
                        } }
                        @for merged in &comparisons {
                            tbody {
                                tr.group { th scope="rowgroup" colspan=(nr_columns) {
                                    (merged.first.title.clone().unwrap_or_else(|| title(&merged.first.name)))
                                    span.note { (better(merged.first)) }
                                } }
                                (published(merged.first, inputs.len(), several))
                                @for (name, sides) in merged.sides() { (side(name, merged.first, &sides)) }
                            }
                        }
                    }
                }))
            }
            @let not_run: Vec<_> = self.files.iter().zip(inputs).flat_map(|(system, input)| {
                system.map(|system| system.not_run.as_slice()).unwrap_or_default().iter().map(move |not_run| (input, not_run))
            }).collect();
            @if !not_run.is_empty() {
                h3 { "Not run" }
                ul.notrun { @for (input, not_run) in not_run {
                    li { strong { (not_run.what) } @if several { " (" (input.label) ")" } ": " (not_run.why) }
                } }
            }
        }
    }
}

fn better(comparison: &Comparison) -> &'static str {
    match comparison.better.as_deref() {
        Some("less") => " (less is better)",
        Some("more") => " (more is better)",
        _ => "",
    }
}

/// How many times as good one value is as another.
fn times_as_good(comparison: &Comparison, value: f64, other: f64) -> Option<f64> {
    let times = match comparison.better.as_deref()? {
        "less" => other / value,
        "more" => value / other,
        _ => return None,
    };
    times.is_finite().then_some(times)
}

/// The published values, of another machine.
fn published(comparison: &Comparison, nr_files: usize, several: bool) -> Markup {
    let Some(Published { on, baseline, proposed }) = &comparison.published else { return html! {} };
    let on = on.as_deref().unwrap_or("another machine");
    let gain = baseline.zip(*proposed).and_then(|(baseline, proposed)| times_as_good(comparison, proposed, baseline));
    let rows = [("published baseline", baseline, None), ("published proposal", proposed, gain)];
    html! {
        @for (name, value, gain) in rows.into_iter().filter(|(_, value, _)| value.is_some()) {
            tr.published {
                th scope="row" { (name) }
                td colspan=(nr_files) { (quantity(*value, &comparison.unit)) }
                @if several { td {} }
                td { @if let Some(gain) = gain { (ratio(gain)) " the published baseline" } }
                td { (on) }
                td {}
            }
        }
    }
}

/// A side, as each file has it.
fn side(name: &str, comparison: &Comparison, files: &[Option<&Side>]) -> Markup {
    let unit = &comparison.unit;
    let present: Vec<&Side> = files.iter().flatten().copied().collect();
    let is_slat = present.iter().any(|side| side.role == "slat");
    let ratios: Vec<String> = present.iter().filter_map(|side| side.ratio).map(ratio).collect();
    let mut machines: Vec<&str> = present.iter().filter_map(|side| side.measured_on.as_deref()).collect();
    machines.dedup();
    html! {
        tr.slat[is_slat] {
            th scope="row" { (name) @if let Some(first) = present.first() { @if first.role != "slat" && !first.role.is_empty() { span.note { " " (first.role) } } } }
            @for side in files {
                td { @match side {
                    Some(side) => (measured(side.mean, side.deviation.filter(|_| side.runs != Some(1.0)), side.runs, unit)),
                    None => "–",
                } }
            }
            @if files.len() > 1 { td.change { (change(comparison, files)) } }
            td { @if ratios.is_empty() { @if is_slat { "" } @else { "–" } } @else { (ratios.join(" / ")) } }
            td { (machines.join(" / ")) }
            td { @for side in &present { @if let Some(claim) = &side.claim { div {
                (tally(claim.holds, if claim.holds { "held" } else { "lost" }))
                @if let Some(least) = claim.at_least { span.note { " at least " (ratio(least)) } }
            } } } }
        }
    }
}

/// The change from the first file that has the side to the last.
fn change(comparison: &Comparison, files: &[Option<&Side>]) -> Markup {
    let samples: Vec<Sample> = files
        .iter()
        .flatten()
        .filter_map(|side| Some(Sample { mean: side.mean?, deviation: side.deviation, runs: side.runs }))
        .collect();
    let [from, .., to] = samples[..] else { return html! { "–" } };
    let times = times_as_good(comparison, to.mean, from.mean);
    match verdict(from, to) {
        Verdict::Same => html! { "same" },
        Verdict::BeyondNoise => html! {
            @match times {
                Some(times) if times >= 1.0 => (tally(true, &format!("{} as good", ratio(times)))),
                Some(times) => (tally(false, &format!("{} as good", ratio(times)))),
                None => (ratio(to.mean / from.mean)),
            }
            span.note { " beyond noise" }
        },
        other => html! { (ratio(to.mean / from.mean)) span.note { " " (other.text()) } },
    }
}
