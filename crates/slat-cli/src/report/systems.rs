//! The comparisons of `slat compare`: for each figure of a system the published values, the
//! measured sides, and whether the claims of slat hold.

use maud::{Markup, html};

use super::input::Input;
use super::page::{scroll, tally};
use super::{InFiles, in_files, parts};
use crate::claims;
use crate::quantity::{self, NOTHING, nr_runs, quantity, spread};
use crate::results::Better;
use crate::results::compared::{Evaluation, Published, Role, Side, System, Verdict};
use crate::statistics::{Difference, difference};

pub(crate) fn systems(inputs: &[Input]) -> Vec<InFiles<'_, System>> {
    in_files(&inputs.iter().map(Input::systems).collect::<Vec<_>>(), |system| &system.system)
}

impl InFiles<'_, System> {
    /// The table of the system, and the list of what was not run.
    pub(crate) fn markup(&self, inputs: &[Input]) -> Markup {
        let comparisons = in_files(&parts(&self.files, |system| &system.comparisons), |of| &of.name);
        let several = inputs.len() > 1;
        let nr_columns = 4 + inputs.len() + usize::from(several);
        html! {
            @if !comparisons.is_empty() {
                (scroll(&format!("Comparisons of {}", self.first.system), html! {
                    table.compare {
                        thead { tr {
                            // What a narrow screen shows without scrolling comes first.
                            th scope="col" { "Side" }
                            th scope="col" { "Speed-up" }
                            th scope="col" { "Claim" }
                            @for input in inputs {
                                th scope="col" { @if several { (input.label) ": median" } @else { "Median [quartiles] (runs)" } }
                            }
                            @if several { th scope="col" { "Change" } }
                            th scope="col" { "Measured on" }
                        } }
                        @for InFiles { first, files } in &comparisons {
                            tbody {
                                tr.group { th scope="rowgroup" colspan=(nr_columns) {
                                    (first.title)
                                    span.note { (better(first)) }
                                    @if let Some(order) = claims::order(first) { span.note { " " (order) } }
                                } }
                                (published(first, inputs.len(), several))
                                @for of in in_files(&parts(files, |of| &of.sides), |side| &side.name) { (side(&of.first.name, first, &of.files)) }
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

fn better(comparison: &Evaluation) -> &'static str {
    match comparison.better {
        Better::Less => " (less is better)",
        Better::More => " (more is better)",
    }
}

/// The published values, of another machine.
fn published(comparison: &Evaluation, nr_files: usize, several: bool) -> Markup {
    let Some(Published { on, baseline, proposed, .. }) = &comparison.published else { return html! {} };
    let gain = comparison.published_gain();
    let rows = [("published baseline", baseline, None), ("published proposal", proposed, gain)];
    let rows = rows.into_iter().filter(|(_, value, gain)| value.is_some() || gain.is_some());
    html! {
        @for (name, value, gain) in rows {
            tr.published {
                th scope="row" { (name) }
                td { @if let Some(gain) = gain { (quantity::times_range(gain)) span.note { " as published" } } }
                td {}
                td colspan=(nr_files) { @if let Some(value) = value { (quantity(*value, comparison.unit)) } }
                @if several { td {} }
                td { (on) }
            }
        }
    }
}

fn side(name: &str, comparison: &Evaluation, files: &[Option<&Side>]) -> Markup {
    let present: Vec<&Side> = files.iter().flatten().copied().collect();
    let is_slat = present.iter().any(|side| side.role == Role::Slat);
    let ratios: Vec<String> = present.iter().filter_map(|side| side.ratio.as_ref()).map(quantity::ratio).collect();
    let mut machines: Vec<&str> = present.iter().map(|side| side.measured_on.as_str()).collect();
    machines.dedup();
    html! {
        tr.slat[is_slat] {
            th scope="row" { (name) @if let Some(first) = present.first() { @if first.role != Role::Slat { span.note { " " (first.role.name()) } } } }
            td { @if ratios.is_empty() { @if is_slat { "" } @else { (NOTHING) } } @else { (ratios.join(" / ")) } }
            td { @for side in &present { @if let Some(claim) = &side.claim { div {
                @match claim.verdict {
                    Verdict::Held => (tally(true, "held")),
                    Verdict::Tie => "tie",
                    Verdict::Lost => (tally(false, "lost")),
                }
                span.note { " above " (quantity::times(claim.above)) }
            } } @if let Some(of) = &side.predicted { div {
                (quantity::error(of.error))
                span.note { " published: " (quantity(of.published, comparison.unit)) }
            } } } }
            @for side in files {
                td { @match side {
                    Some(side) => { (spread(&side.samples, comparison.unit)) " (" (nr_runs(&side.samples)) ")" },
                    None => (NOTHING),
                } }
            }
            @if files.len() > 1 { td.change { (change(comparison, files)) } }
            td { (machines.join(" / ")) }
        }
    }
}

/// The change from the first file that has the side to the last.
fn change(comparison: &Evaluation, files: &[Option<&Side>]) -> Markup {
    let samples: Vec<_> = files.iter().flatten().map(|side| &side.samples).collect();
    let [from, .., to] = samples[..] else { return html! { (NOTHING) } };
    let times = comparison.times_as_good(to, from).map(|ratio| ratio.value);
    let ratio = quantity::times(to.median() / from.median());
    match (difference(from, to), times) {
        (Difference::Same, _) => html! { "same" },
        (Difference::BeyondNoise, Some(times)) => html! {
            (tally(times >= 1.0, &format!("{} as good", quantity::times(times))))
            span.note { " beyond noise" }
        },
        (Difference::BeyondNoise, None) => html! { (ratio) span.note { " beyond noise" } },
        (Difference::Unknown, _) => html! { (ratio) span.note { " noise unknown" } },
        (Difference::WithinNoise, _) => html! { (ratio) span.note { " within noise" } },
    }
}
