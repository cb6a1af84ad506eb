//! The figures of an experiment as tables: a row for each figure, a column for each value of the
//! most important label.

use std::collections::BTreeMap;

use serde_json::Value;

use super::groups::text;
use super::place;
use super::plot::Data;
use super::plots::{labels, varying};
use crate::quantity::{self, NOTHING, Unit};
use crate::results::{Figure, PublishedFigure, Results};
use crate::statistics::Samples;

/// Labels that may have columns, the first that varies: what the experiments compare.
const COLUMNS: [&str; 8] = ["lock", "placement", "strategy", "mode", "method", "subject", "tracking", "test"];
/// More columns than these are hard to read; then the label is in the rows.
const MAX_COLUMNS: usize = 12;

/// The table of a result, with what `show` makes of the samples in its cells.
pub(crate) fn figures(result: &Results, show: fn(&Samples, Unit) -> String) -> Data {
    let figures = &result.results[..];
    let vary = varying(figures.iter().map(|figure| &figure.labels));
    let column = column(figures, &vary);
    let value = |figure: &Figure| column.and_then(|key| figure.labels.get(key)).map(text).unwrap_or_default();
    // Labels that depend on the column are in its head, and all others that vary in the row.
    let (of_column, of_row): (Vec<&str>, Vec<&str>) =
        vary.iter().copied().filter(|key| Some(*key) != column).partition(|key| {
            let mut known: BTreeMap<String, Option<&Value>> = BTreeMap::new();
            column.is_some()
                && figures.iter().all(|figure| {
                    let label = figure.labels.get(*key);
                    *known.entry(value(figure)).or_insert(label) == label
                })
        });

    let mut columns: Vec<String> = Vec::new();
    let mut heads: Vec<String> = Vec::new();
    let mut rows: Vec<(String, String, BTreeMap<usize, String>)> = Vec::new();
    for figure in figures {
        let name = value(figure);
        let at = columns.iter().position(|column| *column == name).unwrap_or_else(|| {
            let of = labels(&figure.labels, &of_column);
            heads.push(match (name.as_str(), of.as_str()) {
                ("", _) => "Value".to_owned(),
                (name, "") => name.to_owned(),
                (name, of) => format!("{name}, {of}"),
            });
            columns.push(name);
            columns.len() - 1
        });
        let row_labels = labels(&figure.labels, &of_row);
        let is_it = |(name, of, _): &(String, String, _)| *name == figure.name && *of == row_labels;
        let row = place(&mut rows, is_it, || (figure.name.clone(), row_labels.clone(), BTreeMap::new()));
        let cell = show(&figure.samples, figure.unit);
        rows[row].2.entry(at).or_insert(cell);
    }
    // The same figure with other labels is in a row below.
    let mut order: BTreeMap<String, usize> = BTreeMap::new();
    for (name, ..) in &rows {
        let next = order.len();
        order.entry(name.clone()).or_insert(next);
    }
    rows.sort_by_key(|(name, ..)| order[name]);

    let head = std::iter::once("Figure".to_owned()).chain(heads).collect();
    let cells = |(name, of, cells): &(String, String, BTreeMap<usize, String>)| {
        let name = quantity::title(name);
        let title = if of.is_empty() { name } else { format!("{name}, {of}") };
        let cells = (0..columns.len()).map(|at| cells.get(&at).cloned().unwrap_or_else(|| NOTHING.to_owned()));
        std::iter::once(title).chain(cells).collect()
    };
    Data { head, rows: rows.iter().map(cells).collect() }
}

/// The label whose values are the columns.
fn column<'a>(figures: &[Figure], vary: &[&'a str]) -> Option<&'a str> {
    let nr_values = |key: &str| {
        let mut values: Vec<String> = figures.iter().filter_map(|figure| figure.labels.get(key)).map(text).collect();
        values.sort();
        values.dedup();
        values.len()
    };
    let fits = |key: &&&str| nr_values(key) <= MAX_COLUMNS;
    let known = COLUMNS.iter().find_map(|known| vary.iter().find(|key| *key == known).filter(fits));
    known.or_else(|| vary.iter().filter(fits).min_by_key(|key| nr_values(key))).copied()
}

/// What others published.
pub(crate) fn published(result: &Results) -> Data {
    let all = &result.published[..];
    let vary = varying(all.iter().map(|figure| &figure.labels));
    let row = |figure: &PublishedFigure| {
        let (name, of) = (quantity::title(&figure.name), labels(&figure.labels, &vary));
        let title = if of.is_empty() { name } else { format!("{name}, {of}") };
        vec![title, quantity::range(figure.range, figure.unit), figure.on.clone()]
    };
    let head = ["Figure", "Published", "On"].map(str::to_owned).to_vec();
    Data { head, rows: all.iter().map(row).collect() }
}

/// What all figures have in common, and how many samples they have.
pub(crate) fn caption(result: &Results) -> String {
    let figures = &result.results[..];
    let vary = varying(figures.iter().map(|figure| &figure.labels));
    let mut parts = Vec::new();
    if let Some(figure) = figures.first() {
        let fixed = figure.labels.iter().filter(|(key, _)| !vary.contains(&key.as_str()));
        parts.extend(fixed.map(|(key, value): (&String, &Value)| format!("{key} {}", text(value))));
    }
    let counts = || figures.iter().map(|figure| figure.samples.len());
    match (counts().min(), counts().max()) {
        (Some(least), Some(most)) if least == most => {
            parts.push(format!("median [quartiles] of {least} {}", if least == 1 { "sample" } else { "samples" }));
        }
        (Some(least), Some(most)) => parts.push(format!("median [quartiles] of {least} to {most} samples")),
        _ => {}
    }
    parts.join("; ")
}
