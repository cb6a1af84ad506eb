//! Plots as SVG.
//!
//! Everything is drawn at twice the size that a phone shows, since the drawing library counts in
//! whole units; the page scales it. Logarithmic axes are linear axes of exponents here, so both use
//! the same code.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::ink::{self, Ink};
use super::plot::{Axis, Bar, Body, Part, Plot, Point, Scale, Series, SeriesShape, is_drawable, total};
use crate::quantity::{self, Unit};

/// Width of a plot, in units of the drawing.
const WIDTH: u32 = 860;
/// Height of a plot of series.
const HEIGHT: u32 = 560;
/// Room for a bar and the line of text above it.
const BAR_PITCH: u32 = 68;
/// Room for the axis below.
const AXIS_HEIGHT: u32 = 88;
/// Height of letters. The library's size is that of the whole line.
const LETTERS: f64 = 27.0 * 1.24;

/// Decades that have labels, at most: beside each other, a label such as `100 ns` takes a seventh
/// of the width; one above another, less than a tenth of the height.
const ACROSS: f64 = 5.0;
const UPWARD: f64 = 8.0;

/// The drawing backend's only error is that of a file, and no file is used.
type Drawn = Result<(), Box<dyn std::error::Error>>;

/// A drawing: its size, and the elements inside of its `svg`.
#[derive(Debug)]
pub(crate) struct Drawing {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) elements: String,
}

pub(crate) fn draw(plot: &Plot) -> Result<Drawing, String> {
    match &plot.body {
        Body::Series { x, y, shape, series } => drawing(WIDTH, HEIGHT, |area| draw_series(area, x, y, *shape, series)),
        Body::Bars { x, parts, bars } => {
            let height = AXIS_HEIGHT + BAR_PITCH * bars.len() as u32;
            drawing(WIDTH, height, |area| draw_bars(area, x, parts, bars))
        }
    }
}

/// The legend's key of a series.
pub(crate) fn key(series: &Series, shape: SeriesShape) -> Result<Drawing, String> {
    drawing(84, 32, |area| {
        let color = ink::series(series.ink).light;
        line(area, vec![(2, 16), (82, 16)], series.dash, color)?;
        if shape == SeriesShape::Line { marker(area, (42, 16), series.ink, color) } else { Ok(()) }
    })
}

/// The legend's key of a part of bars.
pub(crate) fn part_key(part: &Part) -> Result<Drawing, String> {
    drawing(40, 32, |area| {
        area.draw(&Rectangle::new([(0, 2), (40, 30)], ink::series(part.ink).light.filled()))?;
        letter(area, (20, 16), part)
    })
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn drawing(width: u32, height: u32, draw: impl FnOnce(&Area<'_>) -> Drawn) -> Result<Drawing, String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (width, height)).into_drawing_area();
        draw(&area).and_then(|()| Ok(area.present()?)).map_err(|error| error.to_string())?;
    }
    // The page writes the outer element itself: with a title and a description.
    let inside = svg.split_once('>').map_or("", |(_, rest)| rest);
    let elements = inside.rsplit_once("</svg>").map_or(inside, |(elements, _)| elements).to_owned();
    Ok(Drawing { width, height, elements })
}

/// The values and positions of an axis.
struct Span {
    scale: Scale,
    from: f64,
    to: f64,
    ticks: Vec<f64>,
    /// One unit for all values of a linear axis.
    unit: String,
    divisor: f64,
}

impl Span {
    fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value / self.divisor,
            Scale::Log => value.log10(),
        }
    }

    fn coordinate(&self) -> Coordinate {
        Coordinate { places: (self.from..self.to).into(), ticks: self.ticks.clone() }
    }

    fn label(&self, place: f64, axis: &Axis) -> String {
        match self.scale {
            Scale::Linear => tick(place, Unit::Count),
            Scale::Log => tick(10f64.powf(place), axis.unit),
        }
    }

    fn title(&self, axis: &Axis) -> String {
        if self.unit.is_empty() { axis.title.clone() } else { format!("{} ({})", axis.title, self.unit) }
    }
}

/// An axis with our own ticks, for the library.
struct Coordinate {
    places: RangedCoordf64,
    ticks: Vec<f64>,
}

impl Ranged for Coordinate {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, limit: (i32, i32)) -> i32 {
        self.places.map(place, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.places.range()
    }
}

/// A round value: `10 µs`, `1k`.
fn tick(value: f64, unit: Unit) -> String {
    if unit == Unit::Ratio {
        return format!("{}%", (value * 1e6).round() / 1e4);
    }
    let scale = quantity::scale(value * 1.000_001, unit);
    let mut value = value / scale.divisor;
    let mut suffix = "";
    if scale.divisor == 1.0 && value >= 9_999.0 {
        (value, suffix) = if value >= 0.999e9 {
            (value / 1e9, "G")
        } else if value >= 0.999e6 {
            (value / 1e6, "M")
        } else {
            (value / 1e3, "k")
        };
    }
    let number = if value == 0.0 || (0.001..1e6).contains(&value.abs()) {
        // Four digits are enough for 1, 2 and 5 with zeros.
        format!("{}", (value * 1e4).round() / 1e4)
    } else {
        format!("{value:.0e}")
    };
    let unit = if matches!(unit, Unit::Seconds | Unit::Bytes) { scale.unit } else { "" };
    format!("{number}{suffix}{}{unit}", if unit.is_empty() { "" } else { " " })
}

/// The span of an axis that shows all `values` (drawable ones), with labels at so many decades at
/// most.
fn span(axis: &Axis, values: impl Iterator<Item = f64>, from_zero: FromZero, most_decades: f64) -> Span {
    let (mut least, mut most) = (f64::INFINITY, f64::NEG_INFINITY);
    for value in values {
        least = least.min(value);
        most = most.max(value);
    }
    if least > most {
        (least, most) = (1.0, 1.0);
    }
    match axis.scale {
        Scale::Linear => {
            let scale = quantity::scale(most.abs().max(least.abs()), axis.unit);
            let (mut from, mut to) = (least / scale.divisor, most / scale.divisor);
            if from_zero == FromZero::Yes {
                from = from.min(0.0);
            }
            if to <= from {
                to = from + 1.0;
            }
            to += (to - from) * 0.04;
            let unit = scale.unit.to_owned();
            let ticks = RangedCoordf64::from(from..to).key_points(6);
            Span { scale: axis.scale, from, to, ticks, unit, divisor: scale.divisor }
        }
        Scale::Log => {
            let (mut from, mut to) = (least.log10(), most.log10());
            let margin = ((to - from) * 0.05).max(0.05);
            (from, to) = (from - margin, to + margin);
            let ticks = match &axis.ticks {
                Some(ticks) => {
                    ticks.iter().filter(|&&tick| is_drawable(tick, Scale::Log)).map(|tick| tick.log10()).collect()
                }
                None => decades(from, to, most_decades),
            };
            // The labels of other axes have their units.
            let unit = if axis.unit == Unit::PerSecond { "/s" } else { "" };
            Span { scale: axis.scale, from, to, ticks, unit: unit.to_owned(), divisor: 1.0 }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FromZero {
    Yes,
    No,
}

/// Powers of ten in a span of exponents, with some in between where they are few.
fn decades(from: f64, to: f64, most: f64) -> Vec<f64> {
    let all = (from.floor() as i32)..=(to.ceil() as i32);
    let stride = (((to - from) / most).ceil() as i32).max(1);
    let factors: &[f64] = match to - from {
        ..1.5 => &[1.0, 2.0, 5.0],
        ..2.6 => &[1.0, 3.0],
        _ => &[1.0],
    };
    all.filter(|exponent| exponent.rem_euclid(stride) == 0)
        .flat_map(|exponent| factors.iter().map(move |factor| f64::from(exponent) + factor.log10()))
        .filter(|place| (from..=to).contains(place))
        .collect()
}

fn text_style(ink: &Ink, h_pos: HPos, v_pos: VPos) -> TextStyle<'static> {
    TextStyle { pos: Pos::new(h_pos, v_pos), color: ink.light.to_backend_color(), ..("sans-serif", LETTERS).into() }
}

fn draw_series(area: &Area<'_>, x: &Axis, y: &Axis, shape: SeriesShape, series: &[Series]) -> Drawn {
    let drawn = |series: &Series| -> Vec<Point> {
        let points = series.points.iter().copied();
        points.filter(|point| is_drawable(point.x, x.scale) && is_drawable(point.y, y.scale)).collect()
    };
    let all: Vec<Point> = series.iter().flat_map(drawn).collect();
    let ends = |point: &Point| {
        let [low, high] = point.quartiles.unwrap_or([point.y; 2]);
        [point.y, high, low]
    };
    let xs = span(x, all.iter().map(|point| point.x), FromZero::No, ACROSS);
    let ys = span(y, all.iter().flat_map(ends).filter(|&value| is_drawable(value, y.scale)), FromZero::Yes, UPWARD);

    // The vertical axis's title is horizontal, above the axis.
    let title = text_style(&ink::TEXT, HPos::Left, VPos::Top);
    area.draw(&Text::new(ys.title(y), (8, 6), title))?;
    let mut chart = ChartBuilder::on(area)
        .margin_top(48)
        .margin_right(64)
        .set_label_area_size(LabelAreaPosition::Left, 124)
        .set_label_area_size(LabelAreaPosition::Bottom, 80)
        .build_cartesian_2d(xs.coordinate(), ys.coordinate())?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(ink::GRID.light)
        .axis_style(ink::TEXT.light)
        .label_style(text_style(&ink::TEXT, HPos::Left, VPos::Top))
        .x_labels(12)
        .y_labels(12)
        .x_label_formatter(&|place| xs.label(*place, x))
        .y_label_formatter(&|place| ys.label(*place, y))
        .x_desc(xs.title(x))
        .axis_desc_style(text_style(&ink::TEXT, HPos::Left, VPos::Top))
        .draw()?;
    let plotting = chart.plotting_area();
    for series in series {
        let color = ink::series(series.ink).light;
        let points = drawn(series);
        let at = |x: f64, y: f64| plotting.map_coordinate(&(xs.place(x), ys.place(y)));
        let places: Vec<(i32, i32)> = points.iter().map(|point| at(point.x, point.y)).collect();
        line(area, if shape == SeriesShape::Steps { steps(&places) } else { places.clone() }, series.dash, color)?;
        if shape == SeriesShape::Steps {
            continue;
        }
        for (point, &place) in points.iter().zip(&places) {
            let ends =
                ends(point).map(|value| if is_drawable(value, y.scale) { at(point.x, value).1 } else { place.1 });
            if ends[1] != ends[2] {
                area.draw(&PathElement::new([(place.0, ends[1]), (place.0, ends[2])], color.stroke_width(2)))?;
            }
            marker(area, place, series.ink, color)?;
        }
    }
    Ok(())
}

/// The corners of a line of horizontal and vertical pieces.
fn steps(places: &[(i32, i32)]) -> Vec<(i32, i32)> {
    let mut corners = Vec::new();
    for &(x, y) in places {
        if let Some(&(_, before)) = corners.last() {
            corners.push((x, before));
        }
        corners.push((x, y));
    }
    corners
}

fn line(area: &Area<'_>, places: Vec<(i32, i32)>, dash: usize, color: RGBColor) -> Drawn {
    let style = color.stroke_width(4);
    match ink::dash(dash) {
        None => area.draw(&PathElement::new(places, style))?,
        Some((length, gap)) => area.draw(&DashedPathElement::new(places, length, gap, style))?,
    }
    Ok(())
}

/// The marker of an ink: eight shapes distinguish series without colors.
fn marker(area: &Area<'_>, (x, y): (i32, i32), index: usize, color: RGBColor) -> Drawn {
    let shape = |corners: &[(i32, i32)]| corners.iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>();
    let stroke = color.stroke_width(4);
    match index % ink::NR_SERIES {
        0 => area.draw(&Circle::new((x, y), 8, color.filled()))?,
        1 => area.draw(&Rectangle::new([(x - 7, y - 7), (x + 7, y + 7)], color.filled()))?,
        2 => area.draw(&Polygon::new(shape(&[(0, -10), (10, 8), (-10, 8)]), color.filled()))?,
        3 => area.draw(&Polygon::new(shape(&[(0, -11), (11, 0), (0, 11), (-11, 0)]), color.filled()))?,
        4 => area.draw(&Polygon::new(shape(&[(0, 10), (10, -8), (-10, -8)]), color.filled()))?,
        5 => area.draw(&Circle::new((x, y), 8, stroke))?,
        6 => {
            area.draw(&PathElement::new(shape(&[(-8, -8), (8, 8)]), stroke))?;
            area.draw(&PathElement::new(shape(&[(-8, 8), (8, -8)]), stroke))?;
        }
        _ => {
            area.draw(&PathElement::new(shape(&[(0, -10), (0, 10)]), stroke))?;
            area.draw(&PathElement::new(shape(&[(-10, 0), (10, 0)]), stroke))?;
        }
    }
    Ok(())
}

fn draw_bars(area: &Area<'_>, x: &Axis, parts: &[Part], bars: &[Bar]) -> Drawn {
    let is_drawable_pair = |ends: &[f64; 2]| ends.iter().all(|&end| is_drawable(end, x.scale));
    let quartiles = |bar: &Bar| bar.quartiles.filter(is_drawable_pair);
    let ends = bars.iter().map(|bar| quartiles(bar).map_or(0.0, |[_, high]| high).max(total(bar, x.scale)));
    let xs = span(x, ends, FromZero::Yes, ACROSS);
    let mut chart = ChartBuilder::on(area)
        .margin_left(12)
        .margin_right(52)
        .set_label_area_size(LabelAreaPosition::Bottom, AXIS_HEIGHT - 8)
        .build_cartesian_2d(xs.coordinate(), 0..bars.len() as i32)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .light_line_style(TRANSPARENT)
        .bold_line_style(ink::GRID.light)
        .axis_style(ink::TEXT.light)
        .label_style(text_style(&ink::TEXT, HPos::Left, VPos::Top))
        .x_labels(8)
        .x_label_formatter(&|place| xs.label(*place, x))
        .x_desc(xs.title(x))
        .axis_desc_style(text_style(&ink::TEXT, HPos::Left, VPos::Top))
        .draw()?;
    let plotting = chart.plotting_area();
    let at = |value: f64| plotting.map_coordinate(&(xs.place(value), 0)).0;
    for (row, bar) in bars.iter().enumerate() {
        let top = row as i32 * BAR_PITCH as i32;
        let whole = total(bar, x.scale);
        let text = format!("{}: {}", bar.name, quantity::quantity(whole, x.unit));
        area.draw(&Text::new(text, (14, top + 4), text_style(&ink::TEXT, HPos::Left, VPos::Top)))?;
        let (upper, lower) = (top + 37, top + 64);
        let mut sum = 0.0;
        for (part, length) in parts.iter().zip(&bar.parts) {
            let Some(length) = length.filter(|&length| is_drawable(length, x.scale) && length > 0.0) else { continue };
            let (left, right) = (at(sum), at(sum + length));
            sum += length;
            area.draw(&Rectangle::new([(left, upper), (right, lower)], ink::series(part.ink).light.filled()))?;
            // Letters distinguish parts without colors.
            if right - left >= 26 && parts.len() > 1 {
                letter(area, ((left + right) / 2, (upper + lower) / 2), part)?;
            }
        }
        if let Some([low, high]) = quartiles(bar) {
            let (left, right) = (at(low.max(0.0)), at(high));
            let middle = (upper + lower) / 2;
            area.draw(&PathElement::new([(left, middle), (right, middle)], ink::TEXT.light.stroke_width(3)))?;
        }
    }
    Ok(())
}

fn letter(area: &Area<'_>, place: (i32, i32), part: &Part) -> Drawn {
    let letter = char::from(b'a' + (part.ink % 26) as u8).to_string();
    area.draw(&Text::new(letter, place, text_style(&ink::ON_PART, HPos::Center, VPos::Center)))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_beside_each_other_are_few_and_there_are_some() {
        for nr_decades in 1..=20 {
            for from in [-9.3, -0.05, 2.0] {
                let to = from + f64::from(nr_decades);
                let [across, upward] = [ACROSS, UPWARD].map(|most| decades(from, to, most).len());
                assert!((1..=6).contains(&across), "{from} to {to}: {across}");
                assert!((1..=9).contains(&upward) && upward >= across, "{from} to {to}: {upward}");
            }
        }
    }
}
