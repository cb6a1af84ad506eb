//! The form of printed tables and figures.

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};

/// A table with a column of names and right-aligned columns of figures.
pub(crate) fn figures(header: impl IntoIterator<Item = String>) -> Table {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(row(header));
    table
}

/// A row of [`figures`].
pub(crate) fn row(cells: impl IntoIterator<Item = String>) -> Vec<Cell> {
    cells
        .into_iter()
        .enumerate()
        .map(|(column, text)| {
            let alignment = if column == 0 { CellAlignment::Left } else { CellAlignment::Right };
            Cell::new(text).set_alignment(alignment)
        })
        .collect()
}

/// A figure in a unit that fits its size.
pub(crate) fn humanly(value: f64, unit: &str) -> String {
    match unit {
        "s" if value < 1e-6 => format!("{:.0} ns", value * 1e9),
        "s" if value < 1e-3 => format!("{:.1} µs", value * 1e6),
        "s" if value < 1.0 => format!("{:.2} ms", value * 1e3),
        "s" => format!("{value:.3} s"),
        "ratio" => format!("{value:.4}"),
        "bytes" => format!("{:.2} MiB", value / f64::from(1 << 20)),
        _ => format!("{value:.0}"),
    }
}
