//! The content of a plot, before it is drawn: the table next to the plot shows the same figures.

use crate::quantity::Unit;

/// The scale of an axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scale {
    Linear,
    /// It cannot show values that are not above zero.
    Log,
}

/// An axis.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) scale: Scale,
    /// The positions of labels; `None`: round values.
    pub(crate) ticks: Option<Vec<f64>>,
}

impl Axis {
    pub(crate) fn new(title: &str, unit: Unit, scale: Scale) -> Axis {
        Axis { title: title.to_owned(), unit, scale, ticks: None }
    }
}

/// A value at a position, and its quartiles.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) quartiles: Option<[f64; 2]>,
}

/// A line.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    /// Its color and marker, the same for all files.
    pub(crate) ink: usize,
    pub(crate) dash: usize,
    /// From left to right.
    pub(crate) points: Vec<Point>,
}

/// A bar.
#[derive(Clone, Debug)]
pub(crate) struct Bar {
    pub(crate) name: String,
    /// The length of each part of the plot's parts; `None`: the bar has no such part.
    pub(crate) parts: Vec<Option<f64>>,
    /// Of a bar of one part.
    pub(crate) quartiles: Option<[f64; 2]>,
}

/// A part of bars.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) name: String,
    /// Its color and its letter, the same in all plots of an experiment.
    pub(crate) ink: usize,
}

/// How series are drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SeriesShape {
    /// A line through markers.
    Line,
    /// A level from each point to the next.
    Steps,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    Series { x: Axis, y: Axis, shape: SeriesShape, series: Vec<Series> },
    Bars { x: Axis, parts: Vec<Part>, bars: Vec<Bar> },
}

/// A plot, and a table of what it shows.
#[derive(Clone, Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    /// A description of the plot, also for screen readers.
    pub(crate) description: String,
    pub(crate) body: Body,
    pub(crate) data: Data,
}

/// A table of text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data {
    pub(crate) head: Vec<String>,
    /// The first cell of each names it.
    pub(crate) rows: Vec<Vec<String>>,
}

/// Whether an axis can show the value. A plot with other values would mislead, or fail.
pub(crate) fn is_drawable(value: f64, scale: Scale) -> bool {
    // Far beyond measured values, and far from the limits of arithmetic.
    let is_in_range = value.is_finite() && value.abs() < 1e100;
    match scale {
        Scale::Linear => is_in_range,
        Scale::Log => is_in_range && value > 1e-100,
    }
}

impl Plot {
    /// Whether there is a value to draw.
    pub(crate) fn is_worth_drawing(&self) -> bool {
        match &self.body {
            Body::Series { x, y, series, .. } => {
                let points = series.iter().flat_map(|series| &series.points);
                points.filter(|point| is_drawable(point.x, x.scale) && is_drawable(point.y, y.scale)).count() > 0
            }
            Body::Bars { x, bars, .. } => bars.iter().any(|bar| total(bar, x.scale) > 0.0),
        }
    }

    /// How many values the plot cannot show.
    pub(crate) fn nr_left_out(&self) -> usize {
        match &self.body {
            Body::Series { x, y, series, .. } => series
                .iter()
                .flat_map(|series| &series.points)
                .filter(|point| !is_drawable(point.x, x.scale) || !is_drawable(point.y, y.scale))
                .count(),
            Body::Bars { x, bars, .. } => {
                let parts = bars.iter().flat_map(|bar| bar.parts.iter().flatten());
                parts.filter(|&&part| !is_drawable(part, x.scale) || part < 0.0).count()
            }
        }
    }
}

pub(crate) fn total(bar: &Bar, scale: Scale) -> f64 {
    bar.parts.iter().flatten().filter(|&&part| is_drawable(part, scale) && part > 0.0).sum()
}
