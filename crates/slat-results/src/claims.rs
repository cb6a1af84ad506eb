//! Comparisons and claims for people: Markdown, which is readable as it is.

use std::fmt::Write;

use crate::quantity::{self, nr_runs, quantity, spread};
use crate::results::compared::{Claim, Claims, Evaluation, Published, Role, Side, System, Verdict};
use crate::table;

/// The claims of slat, and which of them hold.
pub fn claims<'a>(systems: impl IntoIterator<Item = &'a System>) -> Claims {
    let mut claims = Claims::default();
    for system in systems {
        for comparison in &system.comparisons {
            for (side, claim) in comparison.sides.iter().filter_map(|side| Some((side, side.claim?))) {
                claims.made += 1;
                match claim.verdict {
                    Verdict::Held => claims.held += 1,
                    Verdict::Tie => claims.ties.push(described(system, comparison, side, claim)),
                    Verdict::Lost => claims.lost.push(described(system, comparison, side, claim)),
                }
            }
        }
    }
    claims
}

fn described(system: &System, comparison: &Evaluation, side: &Side, claim: Claim) -> String {
    let ratio = side.ratio.as_ref().map(quantity::ratio).unwrap_or_default();
    let is_noisy = comparison.sides[0].samples.is_noisy() || side.samples.is_noisy();
    let noise = if is_noisy { "; runs deviate by more than their mean" } else { "" };
    format!(
        "{}: {}: speed-up over {} is {ratio}, and should be above {}{noise}",
        system.system,
        comparison.title,
        side.name,
        quantity::times(claim.above)
    )
}

/// The section of one system.
pub fn system(result: &System) -> String {
    let mut text = format!("## {}: {}\n\nPublished: {}\n\n", result.system, result.title, result.published_note);
    // Writing to a string cannot fail.
    for experiment in &result.experiments {
        let _ = writeln!(text, "    $ {}", experiment.command.join(" "));
    }
    let has_predictions = result.comparisons.iter().flat_map(|of| &of.sides).any(|side| side.role == Role::Model);
    let header = ["figure", table::MEDIAN, "runs", "measured on", "speed-up", "claim", "published", "published gain"];
    let header: Vec<&str> = header.into_iter().chain(has_predictions.then_some("error")).collect();
    let mut figures = table::figures(header.iter().map(|&name| name.to_owned()));
    for comparison in &result.comparisons {
        let order = has_predictions.then(|| order(comparison).unwrap_or_default().to_owned());
        let nr_empty = header.len() - 1 - usize::from(has_predictions);
        figures.add_row(
            std::iter::once(comparison.title.clone()).chain(std::iter::repeat_n(String::new(), nr_empty)).chain(order),
        );
        for (place, side) in comparison.sides.iter().enumerate() {
            let is_first_baseline = place == first_baseline(comparison);
            let error = has_predictions.then(|| side.predicted.map(|of| quantity::error(of.error)).unwrap_or_default());
            figures.add_row(row(comparison, side, is_first_baseline).into_iter().chain(error));
        }
    }
    if !result.comparisons.is_empty() {
        let _ = writeln!(text, "\n{}", figures.wide());
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

/// Whether the predictions of a comparison have the order of what was published, in words.
pub fn order(comparison: &Evaluation) -> Option<&'static str> {
    comparison.has_published_order().map(|is_same| if is_same { "order as published" } else { "another order" })
}

/// The side that is the starting point of the published work.
fn first_baseline(comparison: &Evaluation) -> usize {
    comparison.sides.iter().position(|side| side.role != Role::Slat).unwrap_or(usize::MAX)
}

fn row(comparison: &Evaluation, side: &Side, is_first_baseline: bool) -> Vec<String> {
    let published = |of: fn(&Published) -> Option<f64>| {
        comparison.published.as_ref().and_then(of).map(|value| quantity(value, comparison.unit)).unwrap_or_default()
    };
    // What was published stands beside the side that does the same.
    let is_proposal = comparison.published.as_ref().is_some_and(|of| of.proposed_side == side.name);
    let (published, gain) = if is_proposal {
        (published(|of| of.proposed), comparison.published_gain().map(quantity::times_range))
    } else if is_first_baseline {
        (published(|of| of.baseline), None)
    } else {
        (String::new(), None)
    };
    let published = side.predicted.map_or(published, |of| quantity(of.published, comparison.unit));
    let claim = side.claim.map(|claim| format!("{} {}", quantity::times(claim.above), claim.verdict.name()));
    let claim = claim.or_else(|| side.unclaimed.clone());
    vec![
        format!("- {}", side.name),
        spread(&side.samples, comparison.unit),
        nr_runs(&side.samples),
        side.measured_on.clone(),
        side.ratio.as_ref().map(quantity::ratio).unwrap_or_default(),
        claim.unwrap_or_default(),
        published,
        gain.unwrap_or_default(),
    ]
}

/// The claims that were held, and those that were not.
pub fn closing(claims: &Claims, failures: &[String]) -> String {
    let (nr_ties, nr_lost) = (claims.ties.len(), claims.lost.len());
    let mut text = format!("{} claims made: {} held, {nr_ties} tied, {nr_lost} lost.\n", claims.made, claims.held);
    for tie in &claims.ties {
        let _ = writeln!(text, "- tie: {tie}");
    }
    for lost in claims.lost.iter().chain(failures) {
        let _ = writeln!(text, "- LOST: {lost}");
    }
    text
}
