//! Figures for people: a fitting scale, few digits, the unit at the end.

/// The divisor of a value, and the unit of the quotient.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Scale<'a> {
    pub(crate) divisor: f64,
    pub(crate) unit: &'a str,
}

/// The scale for values of about `value` in `unit`.
pub(crate) fn scale(value: f64, unit: &str) -> Scale<'_> {
    let value = value.abs();
    let steps: &[(f64, &'static str)] = match unit {
        "s" => &[(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")],
        "ns" => &[(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")],
        "bytes" => &[(1024.0 * 1024.0 * 1024.0, "GiB"), (1024.0 * 1024.0, "MiB"), (1024.0, "KiB"), (1.0, "bytes")],
        _ => &[],
    };
    let fits = steps.iter().find(|&&(divisor, _)| value >= divisor).or(steps.last());
    match fits {
        Some(&(divisor, unit)) if value > 0.0 => Scale { divisor, unit },
        // Zero keeps the unit that it was measured in.
        _ => Scale { divisor: 1.0, unit: if matches!(unit, "count" | "ratio") { "" } else { unit } },
    }
}

/// A value in its unit, or a dash for none.
pub(crate) fn quantity(value: Option<f64>, unit: &str) -> String {
    let Some(value) = value else { return "–".to_owned() };
    let scale = scale(value, unit);
    with_unit(digits(value / scale.divisor, unit == "count"), scale.unit)
}

/// A mean with its deviation in one unit, and the number of runs.
pub(crate) fn measured(mean: Option<f64>, deviation: Option<f64>, runs: Option<f64>, unit: &str) -> String {
    let Some(value) = mean else { return "–".to_owned() };
    let scale = scale(value, unit);
    let mut text = digits(value / scale.divisor, unit == "count");
    if let Some(deviation) = deviation {
        text = format!("{text} ± {}", as_precise(deviation / scale.divisor, &text));
    }
    text = with_unit(text, scale.unit);
    match runs {
        Some(runs) => format!("{text} ({runs:.0})"),
        None => text,
    }
}

/// A deviation with as many decimals as its mean has; with its own digits, if that would round it
/// to zero or the mean is in another notation.
fn as_precise(deviation: f64, mean: &str) -> String {
    let decimals = mean.split_once('.').map_or(0, |(_, decimals)| decimals.len());
    let is_plain = !mean.contains('e') && deviation >= 0.5 / 10f64.powi(decimals as i32) && deviation < 999.5;
    if is_plain { format!("{deviation:.decimals$}") } else { digits(deviation, false) }
}

/// A ratio.
pub(crate) fn ratio(value: f64) -> String {
    format!("{}×", digits(value, false))
}

/// Three significant digits; whole numbers above, in groups of three.
pub(crate) fn digits(value: f64, is_count: bool) -> String {
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
        unit => format!("{text}\u{a0}{unit}"),
    }
}

/// `guest_stall_p99` as a title: Guest stall p99.
pub(crate) fn title(name: &str) -> String {
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
        for (value, unit, text) in [
            (0.0, "s", "0\u{a0}s"),
            (0.0, "ns", "0\u{a0}ns"),
            (1.234_567, "s", "1.23\u{a0}s"),
            (0.012_345, "s", "12.3\u{a0}ms"),
            (123.4e-9, "s", "123\u{a0}ns"),
            (1e-12, "s", "0.0010\u{a0}ns"),
            (1_500.0, "ns", "1.50\u{a0}µs"),
            (3_000_000.0, "bytes", "2.86\u{a0}MiB"),
            (0.5, "ratio", "0.50"),
            (7.0, "count", "7"),
            (1234.0, "count", "1234"),
            (12345.0, "count", "12\u{202f}345"),
            (-1_234_567.0, "count", "-1\u{202f}234\u{202f}567"),
            (1e300, "count", "1.00e300"),
            (f64::INFINITY, "s", "–\u{a0}s"),
            (45.0, "pages/s", "45.0\u{a0}pages/s"),
        ] {
            assert_eq!(quantity(Some(value), unit), text, "{value} {unit}");
        }
        assert_eq!(quantity(None, "s"), "–");
    }

    #[test]
    fn a_mean_and_its_deviation_share_a_unit() {
        assert_eq!(measured(Some(0.0123), Some(0.0004), Some(3.0), "s"), "12.3 ± 0.4\u{a0}ms (3)");
        assert_eq!(measured(Some(3.0), Some(0.004), None, "s"), "3.00 ± 0.0040\u{a0}s");
        assert_eq!(measured(Some(123.4), Some(5678.9), None, "s"), "123 ± 5679\u{a0}s");
        assert_eq!(measured(Some(0.0123), None, Some(1.0), "s"), "12.3\u{a0}ms (1)");
        assert_eq!(measured(Some(0.0123), None, None, "s"), "12.3\u{a0}ms");
        assert_eq!(measured(None, Some(1.0), Some(2.0), "s"), "–");
    }

    #[test]
    fn names_read_as_titles() {
        assert_eq!(title("guest_stall_p99"), "Guest stall p99");
        assert_eq!(title(""), "");
        assert_eq!(title("élan"), "élan");
    }
}
