//! How tables look.

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
