//! The form of printed tables: Markdown, which is readable as it is.

use std::fmt::{self, Display, Formatter};
use std::ops::Range;

use comfy_table::presets::ASCII_MARKDOWN;
use comfy_table::{Cell, CellAlignment, ContentArrangement};

use crate::results::PerRun;

/// What the cells of figures of several runs show.
pub const MEDIAN: &str = "median [quartiles]";

/// The title of a column of published figures, which belongs to the column before.
pub const PUBLISHED: &str = "published";

/// Columns of a screen. A table that is wider is printed as several tables, one below another.
const WIDTH: usize = 100;

/// A table with a column of names and right-aligned columns of figures.
pub struct Table {
    /// The header, and the rows; all have as many cells.
    rows: Vec<Vec<String>>,
}

/// A table with this header.
pub fn figures(header: impl IntoIterator<Item = String>) -> Table {
    Table { rows: vec![header.into_iter().collect()] }
}

impl Table {
    pub fn add_row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut row: Vec<String> = cells.into_iter().collect();
        assert!(row.len() <= self.rows[0].len(), "a cell without a column: {row:?}");
        row.resize(self.rows[0].len(), String::new());
        self.rows.push(row);
    }

    /// Adds a row for each of `figures`, with the median and the quartiles of each column's runs.
    pub fn add_per_run<'a, R: 'a>(&mut self, figures: impl IntoIterator<Item = &'a PerRun<R>>, columns: &[&[R]]) {
        for figure in figures {
            let cells = columns.iter().map(|runs| figure.cell(runs));
            self.add_row(std::iter::once(figure.title.to_owned()).chain(cells));
        }
    }

    /// The whole table, however wide.
    pub fn wide(&self) -> String {
        self.part(&self.rows[0][0], 1..self.nr_columns())
    }

    fn nr_columns(&self) -> usize {
        self.rows[0].len()
    }

    /// The first column, with `title`, and `columns`.
    fn part(&self, title: &str, columns: Range<usize>) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(ASCII_MARKDOWN).set_content_arrangement(ContentArrangement::Disabled);
        let cells = |name: &str, row: &[String]| -> Vec<Cell> {
            let figures = row[columns.clone()].iter().map(|text| Cell::new(text).set_alignment(CellAlignment::Right));
            std::iter::once(Cell::new(name)).chain(figures).collect()
        };
        table.set_header(cells(title, &self.rows[0]));
        for row in &self.rows[1..] {
            table.add_row(cells(&row[0], row));
        }
        table.to_string()
    }
}

fn fits(text: &str) -> bool {
    text.lines().all(|line| line.chars().count() <= WIDTH)
}

impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let whole = self.wide();
        if fits(&whole) {
            return f.write_str(&whole);
        }
        // The title above, and as many columns in each table as fit.
        writeln!(f, "{}:\n", self.rows[0][0])?;
        let mut begin = 1;
        while begin < self.nr_columns() {
            let mut end = begin + 1;
            while end < self.nr_columns() && fits(&self.part("", begin..end + 1)) {
                end += 1;
            }
            // What was published stays beside what was measured.
            if end < self.nr_columns() && end > begin + 1 && self.rows[0][end].starts_with(PUBLISHED) {
                end -= 1;
            }
            f.write_str(&self.part("", begin..end))?;
            if end < self.nr_columns() {
                write!(f, "\n\n")?;
            }
            begin = end;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(title: &str, nr_columns: usize) -> Table {
        let names = || (1..=nr_columns).map(|column| format!("column {column:02}"));
        let mut table = figures(std::iter::once(title.to_owned()).chain(names()));
        table.add_row(std::iter::once("a".to_owned()).chain(names().map(|_| "1.00 ms [0.90–1.10]".to_owned())));
        table.add_row(["b".to_owned(), "7".to_owned()]);
        table
    }

    #[test]
    fn a_table_that_fits_is_markdown() {
        let text = "| what |           column 01 |\n|------|---------------------|\n\
                    | a    | 1.00 ms [0.90–1.10] |\n| b    |                   7 |";
        assert_eq!(table("what", 1).to_string(), text);
        assert_eq!(table("what", 1).wide(), text);
    }

    #[test]
    fn no_table_is_wider_than_a_screen_and_no_column_is_lost() {
        for (title, nr_columns) in [("what", 4), ("what", 9), ("times as fast as another, of paired runs of it", 3)] {
            let text = table(title, nr_columns).to_string();
            assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
            for column in 1..=nr_columns {
                assert_eq!(text.matches(&format!("column {column:02}")).count(), 1, "{text}");
            }
            assert!(text.contains(title), "{text}");
        }
        // Three columns fit beside each other; the third takes its published figures with it.
        let mut of_three = figures(["what", "1", "2", "3", PUBLISHED].map(str::to_owned));
        of_three.add_row(
            std::iter::once("a".to_owned()).chain(std::iter::repeat_n("1.00 ms [0.90–1.10], mean".to_owned(), 4)),
        );
        assert!(of_three.to_string().contains("3 |                 published |"), "{of_three}");
        assert!(table("what", 9).wide().lines().all(|line| line.chars().count() > 2 * WIDTH));
    }
}
