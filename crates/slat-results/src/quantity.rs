//! Figures for people: a fitting scale, few digits, the unit at the end.

use serde::{Deserialize, Serialize};

use crate::statistics::{Ratio, Samples};

/// Where there is no value.
pub const NOTHING: &str = "–";

/// The text of a cell, that of no value if there is none.
pub fn or_nothing(text: Option<String>) -> String {
    text.unwrap_or_else(|| NOTHING.to_owned())
}

/// The units of figures: base units only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Unit {
    #[serde(rename = "s")]
    Seconds,
    #[serde(rename = "B")]
    Bytes,
    #[serde(rename = "1/s")]
    PerSecond,
    #[serde(rename = "count")]
    Count,
    #[serde(rename = "ratio")]
    Ratio,
    /// Of a CPU.
    #[serde(rename = "instructions")]
    Instructions,
}

/// The divisor of a value, and the unit of the quotient.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Scale {
    pub divisor: f64,
    pub unit: &'static str,
}

/// The scale for values of about `value` in `unit`.
pub fn scale(value: f64, unit: Unit) -> Scale {
    let value = value.abs();
    let steps: &[(f64, &'static str)] = match unit {
        Unit::Seconds => &[(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
        Unit::Bytes => &[(1024.0 * 1024.0 * 1024.0, "GiB"), (1024.0 * 1024.0, "MiB"), (1024.0, "KiB"), (1.0, "B")],
        Unit::PerSecond => &[(1.0, "/s")],
        Unit::Count | Unit::Ratio => &[(1.0, "")],
        Unit::Instructions => &[(1.0, "instructions")],
    };
    // Zero keeps the unit that it was measured in.
    let zero = if unit == Unit::Bytes { "B" } else { steps[0].1 };
    let fits = steps.iter().find(|&&(divisor, _)| value >= divisor).or(steps.last());
    match fits {
        Some(&(divisor, unit)) if value > 0.0 => Scale { divisor, unit },
        _ => Scale { divisor: 1.0, unit: zero },
    }
}

/// A value in its unit, or a dash if it is not a number.
pub fn quantity(value: f64, unit: Unit) -> String {
    let scale = scale(value, unit);
    with_unit(digits(value / scale.divisor, matches!(unit, Unit::Count | Unit::Instructions)), scale.unit)
}

/// The median with the quartiles, in one unit; the median alone where all are the same.
pub fn spread(samples: &Samples, unit: Unit) -> String {
    around(samples.median(), samples.quartiles(), unit)
}

/// A median with its quartiles, as [`spread`].
pub fn around(median: f64, quartiles: [f64; 2], unit: Unit) -> String {
    let scale = scale(if median == 0.0 { quartiles[1] } else { median }, unit);
    let text = digits(median / scale.divisor, unit == Unit::Count);
    let quartiles = quartiles.map(|quartile| as_precise(quartile / scale.divisor, &text));
    let has_spread = median.is_finite() && quartiles.iter().any(|quartile| *quartile != text);
    let text = with_unit(text, scale.unit);
    if has_spread { format!("{text} [{}]", quartiles.join("–")) } else { text }
}

/// A published value, or the range of several, in one unit.
pub fn range([least, most]: [f64; 2], unit: Unit) -> String {
    let scale = scale(least, unit);
    let text = digits(least / scale.divisor, unit == Unit::Count);
    if least == most {
        return with_unit(text, scale.unit);
    }
    with_unit(format!("{text}–{}", digits(most / scale.divisor, unit == Unit::Count)), scale.unit)
}

/// How many runs there are, with a note if some of them are far from the others.
pub fn nr_runs(samples: &Samples) -> String {
    let note = if samples.has_outliers() { ", outliers" } else { "" };
    format!("{}{note}", samples.len())
}

/// The mean of the middle half, the robust deviation, the 99th percentile, and the least and the
/// largest sample.
pub fn extremes(samples: &Samples, unit: Unit) -> String {
    let (mean, deviation) = (samples.middle_mean(), samples.robust_deviation());
    let scale = scale(mean, unit);
    let text = digits(mean / scale.divisor, unit == Unit::Count);
    let around = if deviation.is_finite() {
        format!(" ± {}", as_precise(deviation / scale.divisor, &text))
    } else {
        String::new()
    };
    let mean = with_unit(format!("{text}{around}"), scale.unit);
    let [p99, least, most] =
        [samples.quantile(0.99), samples.least(), samples.most()].map(|value| quantity(value, unit));
    format!("{mean}; {p99}; {least}–{most}")
}

/// A number with as many decimals as `like` has; with its own digits, if that would round it to
/// zero, or `like` is zero or in another notation.
fn as_precise(value: f64, like: &str) -> String {
    let decimals = like.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let is_plain =
        !like.contains('e') && like != "0" && value.abs() >= 0.5 / 10f64.powi(decimals as i32) && value.abs() < 999.5;
    if is_plain { format!("{value:.decimals$}") } else { digits(value, false) }
}

/// A ratio.
pub fn times(value: f64) -> String {
    format!("{}×", digits(value, false))
}

/// A ratio, or the range of several.
pub fn times_range(range_of: [f64; 2]) -> String {
    format!("{}×", range(range_of, Unit::Ratio))
}

/// By which part a figure is above another, with its sign.
pub fn error(part: f64) -> String {
    format!("{:+.1}%", part * 100.0)
}

/// A ratio with its interval.
pub fn ratio(ratio: &Ratio) -> String {
    match ratio.interval {
        Some(interval) => format!("{} [{}]", times(ratio.value), interval.map(|end| digits(end, false)).join("–")),
        None => times(ratio.value),
    }
}

/// Three significant digits; whole numbers above, in groups of three.
pub fn digits(value: f64, is_count: bool) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "–".to_owned();
    }
    if size != 0.0 && !(1e-4..1e15).contains(&size) {
        return format!("{value:.2e}");
    }
    if size >= 999.5 || (is_count && value.fract() == 0.0) {
        return grouped(value);
    }
    match size {
        0.0 => "0".to_owned(),
        99.95.. => format!("{value:.0}"),
        9.995.. => format!("{value:.1}"),
        0.1.. => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// A whole number with a thin space between its groups.
fn grouped(value: f64) -> String {
    let plain = format!("{:.0}", value.abs());
    let mut text = if value < 0.0 { "-".to_owned() } else { String::new() };
    for (place, digit) in plain.chars().enumerate() {
        // Four digits read well as they are.
        if place > 0 && (plain.len() - place).is_multiple_of(3) && plain.len() > 4 {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

fn with_unit(text: String, unit: &str) -> String {
    match unit {
        "" => text,
        unit => format!("{text} {unit}"),
    }
}

/// `guest_stall_p99` as a title: Guest stall p99.
pub fn title(name: &str) -> String {
    let mut text = name.replace(['_', '-'], " ");
    if let Some(first) = text.get(0..1) {
        let first = first.to_uppercase();
        text.replace_range(0..1, &first);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits_and_their_scale() {
        use Unit::{Bytes, Count, PerSecond, Seconds};
        for (value, unit, text) in [
            (0.0, Seconds, "0 s"),
            (0.0, Bytes, "0 B"),
            (1.234_567, Seconds, "1.23 s"),
            (0.012_345, Seconds, "12.3 ms"),
            (123.4e-9, Seconds, "123 ns"),
            (1e-12, Seconds, "0.0010 ns"),
            (3_000_000.0, Bytes, "2.86 MiB"),
            (512.0, Bytes, "512 B"),
            (0.5, Unit::Ratio, "0.50"),
            (7.0, Count, "7"),
            (1234.0, Count, "1234"),
            (12345.0, Count, "12\u{202f}345"),
            (-1_234_567.0, Count, "-1\u{202f}234\u{202f}567"),
            (1e300, Count, "1.00e300"),
            (45.0, PerSecond, "45.0 /s"),
        ] {
            assert_eq!(quantity(value, unit), text, "{value} {unit:?}");
        }
        assert!([f64::INFINITY, f64::NAN].iter().all(|&value| quantity(value, Seconds).starts_with(NOTHING)));
    }

    #[test]
    fn a_median_and_its_quartiles_share_a_unit() {
        let spread = |samples: &[f64]| spread(&samples.iter().copied().collect(), Unit::Seconds);
        assert_eq!(spread(&[0.0119, 0.0123, 0.0131]), "12.3 ms [12.0–13.0]");
        assert_eq!(spread(&[0.0123, 0.0123]), "12.3 ms");
        assert_eq!(spread(&[0.0123]), "12.3 ms");
        assert_eq!(spread(&[1e-6, 3.0, 900.0, 3000.0, 4000.0]), "900 s [2–3333]");
        assert_eq!(spread(&[0.0, 0.0, 0.003]), "0 ms [0–2.50]");
        assert!(spread(&[]).starts_with(NOTHING));
        let extremes = extremes(&[2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0].into_iter().collect(), Unit::Seconds);
        assert_eq!(extremes, "4.50 ± 0.74 s; 9.00 s; 2.00 s–9.00 s");
        let runs = |samples: &[f64]| nr_runs(&samples.iter().copied().collect());
        assert_eq!(
            (runs(&[1.0, 1.1, 0.9, 1.0, 1.0]), runs(&[1.0, 1.1, 0.9, 1.0, 50.0])),
            ("5".into(), "5, outliers".into())
        );
    }

    #[test]
    fn published_values_are_one_or_a_range() {
        assert_eq!(range([147_018e-9; 2], Unit::Seconds), "147 µs");
        assert_eq!(range([100e-6, 300e-6], Unit::Seconds), "100–300 µs");
        assert_eq!(range([1e-3, 3e-3], Unit::Seconds), "1.00–3.00 ms");
    }

    #[test]
    fn a_ratio_has_its_interval() {
        assert_eq!(ratio(&Ratio { value: 2.0, interval: Some([1.5, 2.674]) }), "2.00× [1.50–2.67]");
        assert_eq!(ratio(&Ratio { value: 12.34, interval: None }), "12.3×");
        assert_eq!([times_range([6.84; 2]), times_range([1.02, 1.54])], ["6.84×", "1.02–1.54×"]);
    }

    #[test]
    fn an_error_is_positive_where_the_figure_is_larger() {
        assert_eq!([0.2, -0.2, 32.1].map(error), ["+20.0%", "-20.0%", "+3210.0%"]);
    }

    #[test]
    fn names_read_as_titles() {
        assert_eq!(title("guest_stall_p99"), "Guest stall p99");
        assert_eq!(title(""), "");
        assert_eq!(title("élan"), "élan");
    }
}
