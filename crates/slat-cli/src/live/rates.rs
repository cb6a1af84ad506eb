//! The figures between two samples of a VM, and their text: rows of at most 80 columns, whose
//! figures keep their places.

use std::time::Duration;

use slat::stats::{Histogram, Stats};
use slat::{Level, NodeId};

use super::sample::Sample;
use crate::quantity::{Unit, quantity};

pub(super) const MAX_ROWS: usize = 5;

/// Columns of a rate or a time, as in "12.3 k/s" and "999.9 µs".
const RATE_COLUMNS: usize = 8;
/// Columns of a count, as in "12.3 k".
const COUNT_COLUMNS: usize = 6;

struct Item {
    name: String,
    text: String,
    columns: usize,
}

pub(super) struct Row(Vec<Item>);

impl Row {
    /// As a row of a terminal: each figure in its place.
    pub(super) fn aligned(&self) -> String {
        let items = self.0.iter().map(|Item { name, text, columns }| format!("{name} {text:>columns$}"));
        items.collect::<Vec<_>>().join("  ")
    }

    /// As a part of a line.
    pub(super) fn plain(&self) -> String {
        let items = self.0.iter().map(|Item { name, text, .. }| format!("{name} {text}"));
        items.collect::<Vec<_>>().join(", ")
    }
}

/// The rows for the time `elapsed` between `earlier` and `later`.
pub(super) fn rows(earlier: &Sample, later: &Sample, elapsed: Duration) -> Vec<Row> {
    let rate = |name: &str, of: fn(&Stats) -> u64| {
        let count = of(&later.stats).saturating_sub(of(&earlier.stats));
        Item { name: name.to_owned(), text: format!("{}/s", short(per_second(count, elapsed))), columns: RATE_COLUMNS }
    };
    let time = |name: &str, of: fn(&Stats) -> &Histogram, per_mille| {
        let since = of(&later.stats).since(of(&earlier.stats));
        let text = match since.count() {
            0 => "-".to_owned(),
            _ => quantity(Duration::from_nanos(since.quantile(per_mille)).as_secs_f64(), Unit::Seconds),
        };
        Item { name: name.to_owned(), text, columns: RATE_COLUMNS }
    };
    let stall: fn(&Stats) -> &Histogram = |stats| &stats.guest_stall_ns;
    let mut rows = vec![
        Row(vec![
            rate("faults", |stats| stats.faults),
            rate("pages", nr_pages),
            rate("writes restored", |stats| stats.writes_restored),
            rate("flushes", |stats| stats.flushes),
        ]),
        Row(vec![
            time("stall p50", stall, 500),
            time("stall p99", stall, 990),
            rate("lock waits", |stats| stats.lock_waits),
            time("lock p99", |stats| &stats.lock_wait_ns, 990),
        ]),
        Row(vec![count("dirty pages", later.nr_dirty), rate("exits", |stats| stats.exits)]),
        tables(&later.tables),
    ];
    if later.nr_shadow_tables.is_some() {
        rows.push(Row(vec![
            count("shadow tables", later.nr_shadow_tables),
            rate("page faults", |stats| stats.page_faults),
            rate("loads of CR3", |stats| stats.cr3_loads),
        ]));
    }
    rows
}

/// Memory that faults have mapped, in pages of 4 KiB.
fn nr_pages(stats: &Stats) -> u64 {
    [(stats.installed_4k, Level::L4K), (stats.installed_2m, Level::L2M), (stats.installed_1g, Level::L1G)]
        .into_iter()
        .map(|(count, level)| count * level.nr_pages())
        .sum()
}

fn count(name: &str, count: Option<u64>) -> Item {
    let text = count.map_or_else(|| "-".to_owned(), |count| short(count as f64));
    Item { name: name.to_owned(), text, columns: COUNT_COLUMNS }
}

/// Page-table pages by node. There may be many nodes, so their names are short.
fn tables(nodes: &[(NodeId, u64)]) -> Row {
    let name = |index: usize, node: NodeId| match (nodes.len(), index) {
        (1, _) => "tables".to_owned(),
        (_, 0) => format!("tables, node {}:", node.0),
        _ => format!("{}:", node.0),
    };
    let item = |(index, &(node, count)): (usize, &(NodeId, u64))| Item {
        name: name(index, node),
        text: short(count as f64),
        columns: 0,
    };
    Row(nodes.iter().enumerate().map(item).collect())
}

fn per_second(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { count as f64 / elapsed.as_secs_f64() }
}

/// A figure in three digits: 0, 7, 7.5, 750, 7.50 k, 75.0 k, 750 k, 7.50 M.
fn short(value: f64) -> String {
    const PREFIXES: [&str; 5] = ["", " k", " M", " G", " T"];
    let mut value = value;
    let mut prefix = 0;
    // From 999.5 on, which rounds to 1000.
    while value >= 999.5 && prefix + 1 < PREFIXES.len() {
        value /= 1000.0;
        prefix += 1;
    }
    let decimals = match value {
        _ if prefix == 0 && (value.fract() == 0.0 || value >= 9.95) => 0,
        _ if prefix == 0 => 1,
        _ if value < 9.995 => 2,
        _ if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}{}", PREFIXES[prefix])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (0.04, "0.0"),
            (0.5, "0.5"),
            (7.0, "7"),
            (9.94, "9.9"),
            (9.96, "10"),
            (999.4, "999"),
            (999.5, "1.00 k"),
            (1234.0, "1.23 k"),
            (9_994.0, "9.99 k"),
            (9_996.0, "10.0 k"),
            (99_960.0, "100 k"),
            (999_499.0, "999 k"),
            (999_500.0, "1.00 M"),
            (1.21e6, "1.21 M"),
            (1e15, "1000 T"),
        ] {
            assert_eq!(short(value), text, "{value}");
            assert!(text.len() <= COUNT_COLUMNS);
        }
    }

    fn sample(faults: u64, installed_2m: u64) -> Sample {
        let mut sample = Sample { nr_dirty: Some(65_536), tables: vec![(NodeId(0), 513)], ..Sample::default() };
        sample.stats.faults = faults;
        sample.stats.installed_2m = installed_2m;
        sample
    }

    fn plain(rows: &[Row]) -> String {
        rows.iter().map(Row::plain).collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn rates_are_differences_over_time() {
        let rows = rows(&sample(1000, 1), &sample(4000, 3), Duration::from_millis(500));
        assert_eq!(
            plain(&rows),
            "faults 6.00 k/s, pages 2.05 k/s, writes restored 0/s, flushes 0/s; \
             stall p50 -, stall p99 -, lock waits 0/s, lock p99 -; dirty pages 65.5 k, exits 0/s; tables 513"
        );
    }

    #[test]
    fn counters_that_were_reset_and_no_time_give_no_rate() {
        for elapsed in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1)] {
            let text = plain(&rows(&sample(4000, 3), &sample(10, 0), elapsed));
            assert!(text.starts_with("faults 0/s, pages 0/s, "), "{text}");
        }
        let text = plain(&rows(&sample(0, 0), &sample(10, 0), Duration::ZERO));
        assert!(text.starts_with("faults 0/s, "), "{text}");
        // A VM that was dropped.
        let text = plain(&rows(&sample(4000, 3), &Sample::default(), Duration::from_secs(1)));
        assert!(text.starts_with("faults 0/s, pages 0/s, ") && text.contains("dirty pages -"), "{text}");
    }

    #[test]
    fn rows_fit_a_terminal_and_stay_in_place() {
        let nodes = |count| (0..8).map(|node| (NodeId(node), count)).collect::<Vec<_>>();
        let mut least = Sample { tables: nodes(1), nr_dirty: Some(0), nr_shadow_tables: Some(0), ..Sample::default() };
        let mut most = Sample { tables: nodes(999), nr_shadow_tables: Some(12_345), ..least.clone() };
        most.nr_dirty = Some(12_345_678);
        for counter in [
            &mut most.stats.faults,
            &mut most.stats.installed_4k,
            &mut most.stats.writes_restored,
            &mut most.stats.flushes,
            &mut most.stats.lock_waits,
            &mut most.stats.exits,
            &mut most.stats.page_faults,
            &mut most.stats.cr3_loads,
        ] {
            *counter = 12_345_678;
        }
        let quiet = rows(&least, &least, Duration::from_secs(1));
        let busy = rows(&least, &most, Duration::from_secs(1));
        assert_eq!((quiet.len(), busy.len()), (MAX_ROWS, MAX_ROWS));
        for (index, (quiet, busy)) in quiet.iter().zip(&busy).enumerate() {
            let (quiet, busy) = (quiet.aligned(), busy.aligned());
            assert!(busy.chars().count() <= 80, "{busy}");
            // Nodes have no fixed places.
            assert!(index == 3 || quiet.chars().count() == busy.chars().count(), "{quiet}\n{busy}");
        }
        assert!(quiet[3].aligned().starts_with("tables, node 0: 1  1: 1  2: 1"));
        least.nr_shadow_tables = None;
        assert_eq!(rows(&least, &least, Duration::from_secs(1)).len(), MAX_ROWS - 1);
        // Before the first sample there are no nodes.
        assert_eq!(tables(&[]).aligned(), "");
    }
}
