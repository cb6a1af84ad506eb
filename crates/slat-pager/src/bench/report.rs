//! What was measured: as JSON with all samples, and as a table for people.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use super::statistics::{Ratio, Summary, ratio, summary};

/// What a figure counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Unit {
    /// `s`.
    #[serde(rename = "s")]
    Seconds,
    /// `1/s`.
    #[serde(rename = "1/s")]
    PerSecond,
    /// `B`.
    #[serde(rename = "B")]
    Bytes,
}

/// A figure of one system.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// What was done.
    pub scenario: String,
    /// Which system did it.
    pub system: String,
    /// What was measured.
    pub figure: String,
    /// In what.
    pub unit: Unit,
    /// One of each round.
    pub samples: Vec<f64>,
    /// Of them.
    pub summary: Option<Summary>,
}

/// One system beside another.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// What was done.
    pub scenario: String,
    /// What was measured.
    pub figure: String,
    /// The ratio is of this
    pub of: String,
    /// to that.
    pub to: String,
    /// How many times.
    #[serde(flatten)]
    pub ratio: Option<Ratio>,
}

/// All that was measured.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// How many rounds; the systems ran by turns in each.
    pub rounds: usize,
    /// Bytes of the snapshot.
    pub snapshot_bytes: u64,
    /// CPUs of this machine.
    pub cpus: usize,
    /// Its kernel.
    pub kernel: String,
    /// Figures.
    pub figures: Vec<Figure>,
    /// Ratios.
    pub comparisons: Vec<Comparison>,
}

impl Report {
    pub(super) fn add(&mut self, scenario: &str, system: &str, figure: &str, unit: Unit, sample: f64) {
        let is_it = |one: &&mut Figure| one.scenario == scenario && one.system == system && one.figure == figure;
        if let Some(one) = self.figures.iter_mut().find(is_it) {
            one.samples.push(sample);
            one.summary = summary(&one.samples);
            return;
        }
        self.figures.push(Figure {
            scenario: scenario.to_owned(),
            system: system.to_owned(),
            figure: figure.to_owned(),
            unit,
            samples: vec![sample],
            summary: summary(&[sample]),
        });
    }

    /// Compares two systems by a figure that both have.
    pub(super) fn compare(&mut self, scenario: &str, figure: &str, of: &str, to: &str) {
        let samples = |system: &str| {
            let is_it = |one: &&Figure| one.scenario == scenario && one.system == system && one.figure == figure;
            self.figures.iter().find(is_it).map_or(&[][..], |one| &one.samples)
        };
        let ratio = ratio(samples(of), samples(to));
        let [scenario, figure, of, to] = [scenario, figure, of, to].map(str::to_owned);
        self.comparisons.push(Comparison { scenario, figure, of, to, ratio });
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Report { rounds, snapshot_bytes, cpus, kernel, .. } = self;
        writeln!(
            f,
            "{rounds} rounds, a snapshot of {}, {cpus} CPUs, Linux {kernel}",
            quantity(*snapshot_bytes as f64, Unit::Bytes)
        )?;
        writeln!(f, "Medians, with the least and the most; ratios with their interval of 95%.")?;
        let mut scenario = "";
        for figure in &self.figures {
            if figure.scenario != scenario {
                scenario = &figure.scenario;
                writeln!(f, "\n{scenario}")?;
            }
            let Some(Summary { median, range: [least, most], .. }) = figure.summary else { continue };
            let [median, least, most] = [median, least, most].map(|value| quantity(value, figure.unit));
            writeln!(f, "  {:28} {:34} {median:>10}  ({least} to {most})", figure.system, figure.figure)?;
        }
        writeln!(f, "\nRatios")?;
        for Comparison { scenario, figure, of, to, ratio } in &self.comparisons {
            let Some(Ratio { ratio, interval }) = ratio else { continue };
            let interval = interval.map_or(String::new(), |[low, high]| format!(" ({low:.2} to {high:.2})"));
            writeln!(f, "  {scenario}, {figure}: {of} / {to} = {ratio:.2}{interval}")?;
        }
        Ok(())
    }
}

fn quantity(value: f64, unit: Unit) -> String {
    let scaled = |steps: &[(f64, &str)]| {
        let (scale, name) =
            steps.iter().find(|(scale, _)| value >= *scale).or(steps.last()).copied().unwrap_or((1.0, ""));
        format!("{:.1} {name}", value / scale)
    };
    match unit {
        Unit::Seconds => scaled(&[(1.0, "s"), (1e-3, "ms"), (1e-6, "us")]),
        Unit::PerSecond => scaled(&[(1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")]),
        Unit::Bytes => scaled(&[(f64::from(1 << 30), "GiB"), (f64::from(1 << 20), "MiB"), (1024.0, "KiB")]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_gather_their_samples_and_are_compared() {
        let mut report = Report::default();
        for sample in [2.0, 4.0] {
            report.add("faults", "ours", "pages a second", Unit::PerSecond, 2.0 * sample);
            report.add("faults", "theirs", "pages a second", Unit::PerSecond, sample);
        }
        report.compare("faults", "pages a second", "ours", "theirs");
        assert_eq!(report.figures.len(), 2);
        assert_eq!(report.figures[0].samples, [4.0, 8.0]);
        assert!((report.comparisons[0].ratio.unwrap().ratio - 2.0).abs() < 1e-12);
        let text = report.to_string();
        assert!(text.contains("ours / theirs = 2.00"), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["figures"][0]["unit"], "1/s");
        assert_eq!(json["comparisons"][0]["of"], "ours");
    }

    #[test]
    fn quantities_are_for_people() {
        assert_eq!(quantity(0.0123, Unit::Seconds), "12.3 ms");
        assert_eq!(quantity(154_000.0, Unit::PerSecond), "154.0 k/s");
        assert_eq!(quantity(3.0 * 1024.0 * 1024.0, Unit::Bytes), "3.0 MiB");
    }
}
