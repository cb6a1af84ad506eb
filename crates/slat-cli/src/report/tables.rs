//! The figures of an experiment as tables: a row for each figure, a column for each value of the
//! most important label.

use std::collections::BTreeMap;

use serde_json::Value;

use super::groups::{Measured, measured, text};
use super::input::Experiment;
use super::plot::Data;
use super::plots::{labels, varying};
use super::quantity;

/// Labels that may have columns, the first that varies: what the experiments compare.
const COLUMNS: [&str; 8] = ["lock", "placement", "strategy", "mode", "method", "subject", "tracking", "test"];
/// More columns than these are hard to read; then the label is in the rows.
const MAX_COLUMNS: usize = 12;

/// A table, and a line with what all its figures have in common.
#[derive(Debug)]
pub(crate) struct Figures {
    pub(crate) caption: String,
    pub(crate) data: Data,
}

/// The table of a result.
pub(crate) fn figures(result: &Experiment) -> Figures {
    let figures = &measured(result)[..];
    let vary = varying(figures.iter().map(|figure| figure.labels));
    let column = column(figures, &vary);
    let value = |figure: &Measured<'_>| column.and_then(|key| figure.labels.get(key)).map(text).unwrap_or_default();
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
            let of = labels(figure.labels, &of_column);
            heads.push(match (name.as_str(), of.as_str()) {
                ("", _) => "Value".to_owned(),
                (name, "") => name.to_owned(),
                (name, of) => format!("{name}, {of}"),
            });
            columns.push(name);
            columns.len() - 1
        });
        let row_labels = labels(figure.labels, &of_row);
        let row =
            rows.iter().position(|(name, of, _)| *name == figure.name && *of == row_labels).unwrap_or_else(|| {
                rows.push((figure.name.to_owned(), row_labels, BTreeMap::new()));
                rows.len() - 1
            });
        let cell = quantity::measured(figure.mean, figure.deviation, None, figure.unit);
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
        let cells = (0..columns.len()).map(|at| cells.get(&at).cloned().unwrap_or_else(|| "–".to_owned()));
        std::iter::once(title).chain(cells).collect()
    };
    Figures { caption: caption(figures, &vary), data: Data { head, rows: rows.iter().map(cells).collect() } }
}

/// The label whose values are the columns.
fn column<'a>(figures: &[Measured<'_>], vary: &[&'a str]) -> Option<&'a str> {
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

/// What all figures have in common.
fn caption(figures: &[Measured<'_>], vary: &[&str]) -> String {
    let mut parts = Vec::new();
    if let Some(figure) = figures.first() {
        let fixed = figure.labels.iter().filter(|(key, _)| !vary.contains(&key.as_str()));
        parts.extend(fixed.map(|(key, value): (&String, &Value)| format!("{key} {}", text(value))));
    }
    let mut runs: Vec<f64> = figures.iter().filter_map(|figure| figure.runs).collect();
    runs.sort_by(f64::total_cmp);
    match (runs.first(), runs.last()) {
        (Some(&least), Some(&most)) if least == most => {
            parts.push(format!("mean ± deviation of {least:.0} {}", if least == 1.0 { "run" } else { "runs" }));
        }
        (Some(least), Some(most)) => parts.push(format!("mean ± deviation of {least:.0} to {most:.0} runs")),
        _ => {}
    }
    parts.join("; ")
}
