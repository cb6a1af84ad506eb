//! The changes between results: each figure that two files or more have.

use maud::{Markup, html};

use super::groups::{Change, Group, SIGNIFICANCE, Verdict, changes};
use super::input::Input;
use super::page::scroll;
use super::plots::labels;
use super::quantity::{measured, ratio, title};

/// Rows in a table at most; browsers struggle with tens of thousands.
const MAX_ROWS: usize = 500;

/// All differences, the certain and large ones first.
pub(crate) fn markup(groups: &[Group<'_>], inputs: &[Input]) -> Markup {
    let changes = changes(groups);
    let count = |verdict| changes.iter().filter(|change| change.verdict() == verdict).count();
    let of = |verdict| changes.iter().filter(|change| change.verdict() == verdict).collect::<Vec<_>>();
    let base = &inputs[0].label;
    html! {
        section #changes {
            h2 { "What changed" }
            @if changes.is_empty() {
                p { "The results have no figure in common: they are of different experiments. Each is shown below." }
            } @else {
                p {
                    (changes.len()) " figures are in two results or more: "
                    strong { (count(Verdict::BeyondNoise)) " changed beyond noise" }
                    ", " (count(Verdict::WithinNoise)) " within, "
                    (count(Verdict::Unknown)) " with unknown noise (one run, or no deviation), "
                    (count(Verdict::Same)) " are the same. "
                    "Ratios are to " strong { (base) } ", or to the first result that has the figure. Beyond noise: Welch's t-test says \
                     that chance makes such a difference in less than " (SIGNIFICANCE * 100.0) "% of pairs."
                }
                (settings(groups))
                @let certain = of(Verdict::BeyondNoise);
                @if certain.is_empty() { p { "No figure changed beyond noise." } } @else { (table("Changed beyond noise", &certain, groups, inputs)) }
                @for (verdict, name) in [
                    (Verdict::Unknown, "Changed, noise unknown"),
                    (Verdict::WithinNoise, "Changed within noise"),
                    (Verdict::Same, "The same"),
                ] {
                    @let these = of(verdict);
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
                            (title(change.figure.name))
                            @let labels = labels(change.figure.labels, &all_keys(change));
                            @if !labels.is_empty() { ", " (labels) }
                            @if several_groups { span.note { " " (experiment(&groups[change.group])) } }
                        }
                        @for (value, ratio) in change.values.iter().zip(&change.ratios) {
                            td {
                                @match value {
                                    Some(value) => (measured(value.mean, value.deviation, value.runs, value.unit)),
                                    None => "–",
                                }
                                @if inputs.len() > 2 { @if let Some((ratio, verdict)) = ratio { span.note { " " (self::times(*ratio, *verdict)) } } }
                            }
                        }
                        @if inputs.len() == 2 {
                            td { @if let Some((ratio, verdict)) = change.ratios.iter().flatten().next() { (times(*ratio, *verdict)) } }
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

fn times(value: f64, verdict: Verdict) -> String {
    let value = if value.is_finite() { ratio(value) } else { "from 0".to_owned() };
    match verdict {
        Verdict::BeyondNoise => format!("{value}, beyond noise"),
        Verdict::WithinNoise | Verdict::Unknown | Verdict::Same => value,
    }
}
