//! The changes between results: each figure that two files or more have.

use maud::{Markup, html};

use super::groups::{Change, Group, changes};
use super::input::Input;
use super::page::scroll;
use super::plots::labels;
use crate::quantity::{self, NOTHING, spread, title};
use crate::statistics::{CONFIDENCE_OF_MANY, Difference};

/// Rows in a table at most; browsers struggle with tens of thousands.
const MAX_ROWS: usize = 500;

/// All differences, the certain and large ones first.
pub(crate) fn markup(groups: &[Group<'_>], inputs: &[Input]) -> Markup {
    let changes = changes(groups);
    let count = |difference| changes.iter().filter(|change| change.difference() == difference).count();
    let of = |difference| changes.iter().filter(|change| change.difference() == difference).collect::<Vec<_>>();
    let base = &inputs[0].label;
    html! {
        section #changes {
            h2 { "What changed" }
            @if changes.is_empty() {
                p { "The results have no figure in common: they are of different experiments. Each is shown below." }
            } @else {
                p {
                    (changes.len()) " figures are in two results or more: "
                    strong { (count(Difference::BeyondNoise)) " changed beyond noise" }
                    ", " (count(Difference::WithinNoise)) " within, "
                    (count(Difference::Unknown)) " with unknown noise (one run), "
                    (count(Difference::Same)) " are the same. "
                    "Figures are medians with quartiles and the number of samples. Ratios are to " strong { (base) } ", or to the first result \
                     that has the figure. Beyond noise: the interval of the difference, with " (CONFIDENCE_OF_MANY * 100.0) "% confidence, \
                     does not have zero."
                }
                (settings(groups))
                @let certain = of(Difference::BeyondNoise);
                @if certain.is_empty() { p { "No figure changed beyond noise." } } @else { (table("Changed beyond noise", &certain, groups, inputs)) }
                @for (difference, name) in [
                    (Difference::Unknown, "Changed, noise unknown"),
                    (Difference::WithinNoise, "Changed within noise"),
                    (Difference::Same, "The same"),
                ] {
                    @let these = of(difference);
                    @if !these.is_empty() {
                        details { summary { (name) " (" (these.len()) ")" } (table(name, &these, groups, inputs)) }
                    }
                }
            }
        }
    }
}

/// Settings that differ between compared experiments.
fn settings(groups: &[Group<'_>]) -> Markup {
    let differ: Vec<(String, Vec<String>)> = groups
        .iter()
        .map(|group| (group.title(), group.different_settings()))
        .filter(|(_, keys)| !keys.is_empty())
        .collect();
    html! {
        @if !differ.is_empty() {
            div.warning role="note" {
                p { strong { "Not the same experiment: " } "some settings differ, so figures may differ for that reason alone." }
                ul { @for (name, settings) in differ { li { code { (name) } ": " (settings.join("; ")) } } }
            }
        }
    }
}

fn table(name: &str, changes: &[&Change<'_>], groups: &[Group<'_>], inputs: &[Input]) -> Markup {
    let several_groups = groups.len() > 1;
    html! {
        (scroll(name, html! {
            table.changes {
                thead { tr {
                    th scope="col" { "Figure" }
                    @for input in inputs { th scope="col" { (input.label) } }
                    @if inputs.len() == 2 { th scope="col" { "Ratio" } }
                } }
                tbody { @for change in changes.iter().take(MAX_ROWS) {
                    tr {
                        th scope="row" {
                            (title(&change.figure.name))
                            @let labels = labels(&change.figure.labels, &all_keys(change));
                            @if !labels.is_empty() { ", " (labels) }
                            @if several_groups { span.note { " " (experiment(&groups[change.group])) } }
                        }
                        @for (value, ratio) in change.values.iter().zip(&change.ratios) {
                            td {
                                @match value {
                                    Some(value) => { (spread(&value.samples, value.unit)) " (" (value.samples.len()) ")" },
                                    None => (NOTHING),
                                }
                                @if inputs.len() > 2 { @if let Some((ratio, difference)) = ratio { span.note { " " (times(change, *ratio, *difference)) } } }
                            }
                        }
                        @if inputs.len() == 2 {
                            td { @if let Some((ratio, difference)) = change.ratios.iter().flatten().next() { (times(change, *ratio, *difference)) } }
                        }
                    }
                } }
            }
        }))
        @if changes.len() > MAX_ROWS { p.note { "… and " (changes.len() - MAX_ROWS) " more that changed less." } }
    }
}

fn all_keys<'a>(change: &Change<'a>) -> Vec<&'a str> {
    change.figure.labels.keys().map(String::as_str).collect()
}

fn experiment(group: &Group<'_>) -> String {
    match group.system {
        Some(system) => format!("{system}: {}", group.title()),
        None => group.title(),
    }
}

fn times(change: &Change<'_>, value: f64, difference: Difference) -> String {
    let text = if value.is_finite() { quantity::times(value) } else { "from 0".to_owned() };
    match (difference, change.is_improved(value)) {
        (Difference::BeyondNoise, Some(true)) => format!("{text}, better beyond noise"),
        (Difference::BeyondNoise, Some(false)) => format!("{text}, worse beyond noise"),
        (Difference::BeyondNoise, None) => format!("{text}, beyond noise"),
        (Difference::WithinNoise | Difference::Unknown | Difference::Same, _) => text,
    }
}
