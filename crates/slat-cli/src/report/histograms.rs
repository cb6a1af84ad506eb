//! Plots of latencies: the frequency of each time.

use super::ink::NR_SERIES;
use super::place;
use super::plot::{Axis, Body, Data, Plot, Point, Scale, Series, SeriesShape};
use super::plots::{Shown, labels, varying};
use crate::quantity::{self, Unit, or_nothing, quantity};
use crate::results::Distribution;

/// Steps of a plot in each doubling: the engine's eight would draw its rounding, not the guest's
/// times.
const STEPS_IN_OCTAVE: f64 = 2.0;

/// No time is shorter: a clock that counts nanoseconds.
const LEAST_SECONDS: f64 = 1e-9;

const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

/// One plot for each name.
pub(crate) fn plots(shown: &[Shown<'_>]) -> Vec<Plot> {
    let mut names: Vec<&str> = Vec::new();
    for histogram in shown.iter().flat_map(|shown| &shown.result.histograms) {
        if !names.contains(&histogram.name.as_str()) {
            names.push(&histogram.name);
        }
    }
    names.into_iter().flat_map(|name| plots_of(name, shown)).collect()
}

fn plots_of(name: &str, shown: &[Shown<'_>]) -> Vec<Plot> {
    let of = |shown: &Shown<'_>| -> Vec<usize> {
        (0..shown.result.histograms.len()).filter(|&index| shown.result.histograms[index].name == name).collect()
    };
    // Of all names: a label that one name varies is shown for all.
    let vary = varying(shown.iter().flat_map(|shown| &shown.result.histograms).map(|histogram| &histogram.labels));
    let mut inks: Vec<String> = Vec::new();
    let mut series = Vec::new();
    let mut unit = Unit::Seconds;
    for (file, one) in shown.iter().enumerate() {
        for index in of(one) {
            let histogram = &one.result.histograms[index];
            let label = labels(&histogram.labels, &vary);
            let ink = place(&mut inks, |ink| *ink == label, || label.clone());
            unit = histogram.unit;
            let dash = if shown.len() > 1 { file } else { ink };
            let name = match one.name(&label) {
                name if name.is_empty() => "all".to_owned(),
                name => name,
            };
            series.push((histogram, Series { name, ink, dash, points: shares(histogram) }));
        }
    }
    let least = series.iter().flat_map(|(_, series)| &series.points).map(|point| point.y).fold(1.0, f64::min);
    for (_, series) in &mut series {
        series.points = outline(&series.points, least / 2.0);
    }
    let nr_plots = inks.len().div_ceil(NR_SERIES);
    (0..nr_plots)
        .map(|plot| {
            let (of, series): (Vec<&Distribution>, Vec<Series>) = series
                .iter()
                .filter(|(_, series)| series.ink / NR_SERIES == plot)
                .map(|(of, series)| (*of, series.clone()))
                .unzip();
            let title = match name {
                "guest_stall" => "Stalls of the guest in a fault".to_owned(),
                "fault" => "Time of a fault".to_owned(),
                "lock_wait" => "Waits for the lock".to_owned(),
                "lock_hold" => "Time that the lock is held".to_owned(),
                other => quantity::title(other),
            };
            let title = if nr_plots > 1 { format!("{title} ({} of {nr_plots})", plot + 1) } else { title };
            let mut head = vec![String::new(), "times".to_owned()];
            head.extend(QUANTILES.iter().map(|(name, _)| (*name).to_owned()));
            head.push("worst".to_owned());
            let rows = of.iter().zip(&series).map(|(of, series)| row(of, &series.name, unit)).collect();
            Plot {
                title,
                description:
                    "The share of each time among all, on a logarithmic axis. Further to the left is better; the \
                              rightmost steps are the longest times."
                        .to_owned(),
                data: Data { head, rows },
                body: Body::Series {
                    x: Axis::new("Time", unit, Scale::Log),
                    y: Axis::new("Share of all", Unit::Ratio, Scale::Log),
                    shape: SeriesShape::Steps,
                    series,
                },
            }
        })
        .collect()
}

/// Valid buckets, from the shortest time to the longest.
fn buckets(histogram: &Distribution) -> Vec<(f64, f64)> {
    let is_sensible = |&(upper, count): &(f64, f64)| upper.is_finite() && upper >= 0.0 && count > 0.0;
    let all = histogram.buckets.iter().map(|&(upper, count)| (upper, count as f64));
    let mut buckets: Vec<(f64, f64)> = all.filter(is_sensible).collect();
    buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
    buckets
}

/// The share of each step that has values; `x` is the step's upper edge.
fn shares(histogram: &Distribution) -> Vec<Point> {
    let buckets = buckets(histogram);
    let all: f64 = buckets.iter().map(|(_, count)| count).sum();
    let mut points: Vec<Point> = Vec::new();
    for (upper, count) in buckets {
        // A time of zero is below the first step.
        let step = (upper.max(LEAST_SECONDS).log2() * STEPS_IN_OCTAVE).ceil();
        let x = (step / STEPS_IN_OCTAVE).exp2();
        match points.last_mut() {
            Some(last) if last.x == x => last.y += count / all,
            _ => points.push(Point { x, y: count / all, quartiles: None }),
        }
    }
    points
}

/// The outline of the steps: a point wherever a level begins. Empty steps are at `ground`, since a
/// logarithmic axis has no zero.
fn outline(shares: &[Point], ground: f64) -> Vec<Point> {
    let width = (1.0 / STEPS_IN_OCTAVE).exp2();
    let mut outline: Vec<Point> = Vec::new();
    let mut end: Option<f64> = None;
    let at = |x, y| Point { x, y, quartiles: None };
    for share in shares {
        let begin = share.x / width;
        match end {
            None => outline.push(at(begin, ground)),
            // Edges are powers of two, so a gap is at least one step.
            Some(end) if begin > end * 1.01 => outline.push(at(end, ground)),
            Some(_) => {}
        }
        outline.push(at(begin, share.y));
        end = Some(share.x);
    }
    outline.extend(end.map(|end| at(end, ground)));
    outline
}

/// The count, and quantiles.
fn row(histogram: &Distribution, name: &str, unit: Unit) -> Vec<String> {
    let buckets = buckets(histogram);
    let all: f64 = buckets.iter().map(|(_, count)| count).sum();
    let quantile = |share: f64| {
        let mut below = 0.0;
        let found = buckets.iter().find(|(_, count)| {
            below += count;
            below >= share * all
        });
        or_nothing(found.map(|(upper, _)| quantity(*upper, unit)))
    };
    let mut cells = vec![name.to_owned(), quantity(all, Unit::Count)];
    cells.extend(QUANTILES.iter().map(|(_, share)| quantile(*share)));
    cells.push(or_nothing(buckets.last().map(|(upper, _)| quantity(*upper, unit))));
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::Labels;

    fn histogram(buckets: &[(f64, u64)]) -> Distribution {
        let (name, buckets) =
            ("fault".to_owned(), buckets.iter().map(|&(upper, count)| (upper / 1e9, count)).collect());
        Distribution { name, unit: Unit::Seconds, labels: Labels::new(), buckets }
    }

    #[test]
    fn quantiles_are_upper_ends_of_buckets() {
        let cells = row(&histogram(&[(100.0, 98), (200.0, 1), (3000.0, 1), (50.0, 0)]), "x", Unit::Seconds);
        assert_eq!(cells, ["x", "100", "100 ns", "100 ns", "200 ns", "3.00 µs", "3.00 µs"]);
    }

    #[test]
    fn shares_add_up_whatever_the_buckets_are() {
        let points = shares(&histogram(&[(7.0, 1), (0.0, 2), (1e300, 1), (-1.0, 5)]));
        assert!((points.iter().map(|point| point.y).sum::<f64>() - 1.0).abs() < 1e-12, "{points:?}");
        assert!(points.windows(2).all(|pair| pair[0].x < pair[1].x), "{points:?}");
        assert!(shares(&histogram(&[])).is_empty());
    }

    #[test]
    fn the_outline_comes_down_where_there_is_nothing() {
        let outline = outline(&shares(&histogram(&[(64.0, 1), (90.0, 1), (1024.0, 2)])), 0.1);
        let levels: Vec<f64> = outline.iter().map(|point| point.y).collect();
        assert_eq!(levels, [0.1, 0.25, 0.25, 0.1, 0.5, 0.1]);
        assert!(outline.windows(2).all(|pair| pair[0].x <= pair[1].x), "{outline:?}");
    }
}
