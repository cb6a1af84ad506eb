//! The plots of an experiment. They are chosen by the names of its figures, so that the parts of a
//! comparison have them too, and a later experiment has those that fit.

use std::collections::BTreeMap;

use serde_json::Value;

use super::groups::{Group, text};
use super::ink::NR_SERIES;
use super::input::Input;
use super::plot::{Axis, Bar, Body, Data, Part, Plot, Point, Scale, Series, SeriesShape};
use super::{histograms, place};
use crate::quantity::{self, NOTHING, Unit, quantity};
use crate::results::{Figure, Labels, Results};
use crate::statistics::Samples;

/// More files than these hide each other in a plot: then the first and the last are shown.
const MAX_OVERLAID: usize = 4;

/// Phases of a migration, in their order; other figures of similar names are parts of these.
const PHASES: [&str; 6] = [
    "populate_memory",
    "enable_dirty_logging",
    "dirty_memory",
    "get_dirty_log",
    "clear_dirty_log",
    "disable_dirty_logging",
];

/// Phases of the search for idle pages.
const AGING_PHASES: [&str; 7] = [
    "populate_memory",
    "write_populated_memory",
    "read_populated_memory",
    "mark_populated_idle",
    "write_idle_memory",
    "mark_written_idle",
    "read_idle_memory",
];

/// A file's result of the experiment, as plots show it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown<'a> {
    /// The label of the file, if there are several.
    pub(crate) file: Option<&'a str>,
    pub(crate) result: &'a Results,
}

impl Shown<'_> {
    /// The name of a series or bar of this file.
    pub(crate) fn name(&self, name: &str) -> String {
        match self.file {
            Some(file) if name.is_empty() => file.to_owned(),
            Some(file) => format!("{name} · {file}"),
            None => name.to_owned(),
        }
    }
}

/// The results of a group that plots show.
pub(crate) fn shown<'a>(group: &Group<'a>, inputs: &'a [Input]) -> Vec<Shown<'a>> {
    let present: Vec<usize> = (0..inputs.len()).filter(|&file| group.results[file].is_some()).collect();
    let chosen = match present[..] {
        [first, .., last] if present.len() > MAX_OVERLAID => vec![first, last],
        _ => present,
    };
    let label = |file: usize| (chosen.len() > 1).then_some(inputs[file].label.as_str());
    chosen.iter().filter_map(|&file| group.results[file].map(|result| Shown { file: label(file), result })).collect()
}

/// All plots of a group that have something to show.
pub(crate) fn plots(group: &Group<'_>, inputs: &[Input]) -> Vec<Plot> {
    let shown = shown(group, inputs);
    let figures = Figures { of: shown.iter().map(|shown| (*shown, &shown.result.results[..])).collect() };
    let mut plots = Vec::new();
    if figures.has("dirty_memory") {
        for (left_out, title, description) in [
            (0, "Phases", "Time of each phase; dirtying, getting and clearing are of one round."),
            (1, "Phases after populating", "The same without the phase that takes the longest."),
        ] {
            plots.extend(figures.stack(left_out, title, description, "Time", &PHASES));
        }
    } else if figures.has("mark_populated_idle") {
        plots.extend(figures.stack(0, "Phases", "Time of each phase.", "Time", &AGING_PHASES));
    }
    plots.extend(figures.lines(&Lines {
        figure: "paging_rate",
        title: "Paging rate",
        description: "Pages that each vCPU gets in a second, by the number of vCPUs. Higher is better.",
        x: Axis::new("vCPUs", Unit::Count, Scale::Log),
        y: Axis::new("Pages for each vCPU", Unit::PerSecond, Scale::Log),
        along: "vcpus",
        series: "mode",
    }));
    plots.extend(figures.lines(&Lines {
        figure: "get_dirty_log",
        title: "Harvest of the dirty log",
        description: "Time of one call, by the number of dirty pages that it finds. Lower is better.",
        x: Axis::new("Dirty pages", Unit::Count, Scale::Log),
        y: Axis::new("Time of a call", Unit::Seconds, Scale::Log),
        along: "pages",
        series: "method",
    }));
    plots.extend(figures.lines(&Lines {
        figure: "populate_rate",
        title: "Populate rate",
        description: "Pages that all CPUs together populate in a second, by their number. Higher is better.",
        x: Axis::new("CPUs", Unit::Count, Scale::Log),
        y: Axis::new("Pages", Unit::PerSecond, Scale::Log),
        along: "cpus",
        series: "lock",
    }));
    for (figure, title) in
        [("fault", "Fault"), ("map_4k", "Map a page"), ("query", "Query"), ("unmap_4k", "Unmap a page")]
    {
        plots.extend(figures.lines(&Lines {
            figure,
            title,
            description: "Time of one page, by the number of threads that call. Lower is better.",
            x: Axis::new("Threads", Unit::Count, Scale::Log),
            y: Axis::new("Time of a page", Unit::Seconds, Scale::Log),
            along: "threads",
            series: "subject",
        }));
    }
    for (title, names) in [
        ("Walks that read a leaf's table", ["local_walk_reads", "remote_walk_reads"]),
        ("Reads of tables of all levels", ["local_walk_reads_all_levels", "remote_walk_reads_all_levels"]),
    ] {
        let description = "Reads of tables on the reader's own node, and on others. Fewer remote ones are better.";
        plots.extend(figures.stack(0, title, description, "Reads", &names));
    }
    for (name, title, description) in [
        ("guest_time", "Guest time", "Time that the guest took. Lower is better."),
        ("cr3_switch", "Load of CR3", "Time of one load of CR3. Lower is better."),
        ("iteration", "Iteration", "Time of one iteration. Lower is better."),
    ] {
        plots.extend(figures.stack(0, title, description, "Time", &[name]));
    }
    plots.extend(histograms::plots(&shown));
    plots.retain(Plot::is_worth_drawing);
    plots
}

/// `None` without samples.
fn median(samples: &Samples) -> Option<f64> {
    Some(samples.median()).filter(|median| median.is_finite())
}

/// `None` of one sample.
fn quartiles(samples: &Samples) -> Option<[f64; 2]> {
    (samples.len() > 1).then(|| samples.quartiles())
}

fn with_quartiles(median: Option<f64>, quartiles: Option<[f64; 2]>, unit: Unit) -> String {
    match (median, quartiles) {
        (None, _) => NOTHING.to_owned(),
        (Some(median), None) => quantity(median, unit),
        (Some(median), Some([low, high])) => quantity::around(median, [low, high], unit),
    }
}

/// A plot of a figure along one label.
struct Lines {
    figure: &'static str,
    title: &'static str,
    description: &'static str,
    x: Axis,
    y: Axis,
    /// The label that the horizontal axis shows.
    along: &'static str,
    /// The label with a line for each value. Each value of any other label that varies has a plot.
    series: &'static str,
}

/// The figures of the files that are shown.
struct Figures<'a> {
    of: Vec<(Shown<'a>, &'a [Figure])>,
}

impl<'a> Figures<'a> {
    fn has(&self, name: &str) -> bool {
        self.all(name).next().is_some()
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &'a Figure> {
        self.of.iter().flat_map(|(_, figures)| *figures).filter(move |figure| figure.name == name)
    }

    /// Bars of which each has one part for each of `names` but the first `left_out`. A name has one
    /// ink, whatever is left out.
    fn stack(&self, left_out: usize, title: &str, description: &str, axis: &str, names: &[&str]) -> Option<Plot> {
        let present: Vec<&str> = names.iter().copied().skip(left_out).filter(|name| self.has(name)).collect();
        let unit = self.all(present.first()?).next()?.unit;
        let vary = varying(present.iter().flat_map(|name| self.all(name)).map(|figure| &figure.labels));
        let mut bars: Vec<Bar> = Vec::new();
        for (shown, figures) in &self.of {
            for figure in figures.iter().filter(|figure| present.contains(&figure.name.as_str()) && figure.unit == unit)
            {
                let name = shown.name(&labels(&figure.labels, &vary));
                let at = place(
                    &mut bars,
                    |bar| bar.name == name,
                    || Bar { name: name.clone(), parts: vec![None; present.len()], quartiles: None },
                );
                let bar = &mut bars[at];
                if let Some(part) = present.iter().position(|name| *name == figure.name) {
                    bar.parts[part] = median(&figure.samples);
                }
                if present.len() == 1 {
                    bar.quartiles = quartiles(&figure.samples);
                }
            }
        }
        // Bars that are compared are neighbours.
        let base = |name: &str| name.rsplit_once(" · ").map_or(name, |(base, _)| base).to_owned();
        if self.of.len() > 1 {
            let bases: Vec<String> = bars.iter().map(|bar| base(&bar.name)).collect();
            bars.sort_by_key(|bar| bases.iter().position(|of| *of == base(&bar.name)));
        }
        let ink = |name: &str| names.iter().position(|of| *of == name).unwrap_or_default();
        let part = |name: &&str| Part { name: quantity::title(name), ink: ink(name) };
        let parts: Vec<Part> = present.iter().map(part).collect();
        let head = std::iter::once(String::new()).chain(parts.iter().map(|part| part.name.clone())).collect();
        let cells = |bar: &Bar| {
            let figures = bar.parts.iter().map(|part| with_quartiles(*part, bar.quartiles, unit));
            std::iter::once(bar.name.clone()).chain(figures).collect()
        };
        Some(Plot {
            title: title.to_owned(),
            description: description.to_owned(),
            data: Data { head, rows: bars.iter().map(cells).collect() },
            body: Body::Bars { x: Axis::new(axis, unit, Scale::Linear), parts, bars },
        })
    }

    /// Plots with a line for each value of a label and each file.
    fn lines(&self, of: &Lines) -> Vec<Plot> {
        let has_place = |figure: &&Figure| figure.labels.get(of.along).is_some_and(Value::is_number);
        let vary = varying(self.all(of.figure).filter(has_place).map(|figure| &figure.labels));
        // A label that only some lines have distinguishes no plots.
        let differs = |key: &str| {
            let mut values = self.all(of.figure).filter(has_place).filter_map(|figure| figure.labels.get(key));
            let first = values.next();
            values.any(|value| Some(value) != first)
        };
        let is_other = |key: &&str| *key != of.along && *key != of.series && differs(key);
        let others: Vec<&str> = vary.iter().copied().filter(is_other).collect();
        let mut titles: Vec<String> = Vec::new();
        for figure in self.all(of.figure).filter(has_place) {
            let title = labels(&figure.labels, &others);
            place(&mut titles, |of| *of == title, || title.clone());
        }
        let mut plots = Vec::new();
        // One ink for a value in all of the plots.
        let mut inks: Vec<String> = Vec::new();
        for title in titles {
            let mut series: Vec<Series> = Vec::new();
            for (file, (shown, figures)) in self.of.iter().enumerate() {
                let here = figures.iter().filter(|figure| figure.name == of.figure).filter(has_place);
                for figure in here.filter(|figure| labels(&figure.labels, &others) == title) {
                    let method = figure.labels.get(of.series).map(text).unwrap_or_default();
                    let ink = place(&mut inks, |ink| *ink == method, || method.clone());
                    let name = shown.name(&method);
                    let dash = if self.of.len() > 1 { file } else { ink };
                    let new = || Series { name: name.clone(), ink, dash, points: Vec::new() };
                    let at = place(&mut series, |series| series.name == name, new);
                    let (Some(x), Some(y)) = (figure.labels[of.along].as_f64(), median(&figure.samples)) else {
                        continue;
                    };
                    series[at].points.push(Point { x, y, quartiles: quartiles(&figure.samples) });
                }
            }
            plots.extend(of.plots(&title, series));
        }
        plots
    }
}

impl Lines {
    /// One plot, or several if there are more lines than inks.
    fn plots(&self, title: &str, mut series: Vec<Series>) -> Vec<Plot> {
        let mut ticks: Vec<f64> = series.iter().flat_map(|series| &series.points).map(|point| point.x).collect();
        ticks.sort_by(f64::total_cmp);
        ticks.dedup();
        for series in &mut series {
            series.points.sort_by(|a, b| a.x.total_cmp(&b.x));
        }
        let title = if title.is_empty() { self.title.to_owned() } else { format!("{}: {title}", self.title) };
        let mut pages: Vec<usize> = series.iter().map(|series| series.ink / NR_SERIES).collect();
        pages.sort_unstable();
        pages.dedup();
        let nr_plots = pages.len();
        let plot = |(place, page): (usize, &usize)| {
            let series = series.iter().filter(|series| series.ink / NR_SERIES == *page).cloned().collect();
            let title = if nr_plots > 1 { format!("{title} ({} of {nr_plots})", place + 1) } else { title.clone() };
            self.plot(title, &ticks, series)
        };
        pages.iter().enumerate().map(plot).collect()
    }

    fn plot(&self, title: String, ticks: &[f64], series: Vec<Series>) -> Plot {
        let head =
            std::iter::once(self.x.title.clone()).chain(series.iter().map(|series| series.name.clone())).collect();
        let cell = |series: &Series, x: f64| {
            let point = series.points.iter().find(|point| point.x == x);
            with_quartiles(point.map(|point| point.y), point.and_then(|point| point.quartiles), self.y.unit)
        };
        let row = |&x: &f64| {
            let cells = series.iter().map(|series| cell(series, x));
            std::iter::once(quantity(x, self.x.unit)).chain(cells).collect()
        };
        let data = Data { head, rows: ticks.iter().map(row).collect() };
        let description = self.description.to_owned();
        // A line needs two ends.
        let body = if let [_] = ticks {
            let bar = |series: &Series| Bar {
                name: series.name.clone(),
                parts: vec![series.points.first().map(|point| point.y)],
                quartiles: series.points.first().and_then(|point| point.quartiles),
            };
            let x = Axis { scale: Scale::Linear, ..self.y.clone() };
            Body::Bars {
                x,
                parts: vec![Part { name: self.y.title.clone(), ink: 0 }],
                bars: series.iter().map(bar).collect(),
            }
        } else {
            let mut x = self.x.clone();
            // As many as fit next to each other.
            x.ticks = (ticks.len() <= 6 && are_apart(ticks)).then(|| ticks.to_vec());
            Body::Series { x, y: self.y.clone(), shape: SeriesShape::Line, series }
        };
        Plot { title, description, body, data }
    }
}

/// Whether labels at these positions of a logarithmic axis do not overlap.
fn are_apart(ticks: &[f64]) -> bool {
    let (Some(&first), Some(&last)) = (ticks.first(), ticks.last()) else { return false };
    let whole = (last / first).ln();
    ticks.windows(2).all(|pair| (pair[1] / pair[0]).ln() > whole / 8.0)
}

/// The labels that do not have one value in all.
pub(crate) fn varying<'a>(all: impl Iterator<Item = &'a Labels>) -> Vec<&'a str> {
    let mut values: BTreeMap<&str, &Value> = BTreeMap::new();
    let mut vary = Vec::new();
    let mut nr_seen: BTreeMap<&str, usize> = BTreeMap::new();
    let mut nr_all = 0;
    for labels in all {
        nr_all += 1;
        for (key, value) in labels {
            *nr_seen.entry(key).or_default() += 1;
            let differs = *values.entry(key).or_insert(value) != value;
            if differs && !vary.contains(&key.as_str()) {
                vary.push(key.as_str());
            }
        }
    }
    // A label that only some figures have varies too. `paging` is an exception: peers have no
    // paging of the engine.
    for (key, nr) in nr_seen {
        if nr != nr_all && !vary.contains(&key) && key != "paging" {
            vary.push(key);
        }
    }
    vary
}

pub(crate) fn labels(labels: &Labels, keys: &[&str]) -> String {
    // The description of what a figure was measured on may be long, after a colon.
    let named = |(key, value): (&String, &Value)| {
        let value = text(value);
        let described = if key == "measured_on" { value.split(':').next().unwrap_or_default() } else { &value };
        format!("{} {described}", key.replace('_', " "))
    };
    let chosen = labels.iter().filter(|(key, _)| keys.contains(&key.as_str())).map(named);
    chosen.collect::<Vec<_>>().join(", ")
}
