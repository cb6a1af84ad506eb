//! Groups of results of several files, and their differences.
//!
//! Experiments are grouped by their name: first those whose configurations and systems agree, then
//! those whose configurations agree, then those whose systems agree. Figures of two experiments are
//! paired by name and labels.

use std::collections::BTreeMap;

use serde_json::Value;
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::input::{Content, Experiment, Input};

/// A difference that chance makes less often than this is significant. A page has hundreds of
/// figures: a threshold of one in twenty would mark some of them by chance.
pub(crate) const SIGNIFICANCE: f64 = 0.01;

/// One experiment, with its result in each file that has it.
#[derive(Debug)]
pub(crate) struct Group<'a> {
    /// The system whose experiment this is, in a result of `slat compare`.
    pub(crate) system: Option<&'a str>,
    pub(crate) experiment: &'a str,
    /// One for each file.
    pub(crate) results: Vec<Option<&'a Experiment>>,
}

impl<'a> Group<'a> {
    /// The first result that there is.
    pub(crate) fn first(&self) -> Option<&'a Experiment> {
        self.results.iter().flatten().next().copied()
    }

    /// Its command line, or its name.
    pub(crate) fn title(&self) -> String {
        match self.first().and_then(|result| result.command.clone()) {
            Some(command) => command,
            None => format!("slat {}", self.experiment),
        }
    }

    /// The settings that differ from those of other groups of the same title.
    pub(crate) fn distinct_settings(&self, all: &[Group<'_>]) -> String {
        let config = |group: &Group<'a>| group.first().map(|result| &result.config);
        let title = self.title();
        let others: Vec<&Value> = all
            .iter()
            .filter(|group| group.system == self.system && group.title() == title)
            .filter_map(|group| group.first().map(|result| &result.config))
            .collect();
        let own = config(self).and_then(Value::as_object).into_iter().flatten();
        own.filter(|(key, value)| others.iter().any(|other| other.get(key.as_str()) != Some(*value)))
            .map(|(key, value)| format!("{key} {}", text(value)))
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Settings in which the files differ, as `bytes: 4096 / 8192`.
    pub(crate) fn different_settings(&self) -> Vec<String> {
        let configs: Vec<&Value> = self.results.iter().flatten().map(|result| &result.config).collect();
        let mut keys: Vec<&String> =
            configs.iter().filter_map(|config| config.as_object()).flat_map(|map| map.keys()).collect();
        keys.sort();
        keys.dedup();
        let differs = |key: &&String| configs.windows(2).any(|pair| pair[0].get(*key) != pair[1].get(*key));
        keys.into_iter()
            .filter(differs)
            .map(|key| {
                let values: Vec<String> =
                    configs.iter().map(|config| config.get(key).map_or("–".to_owned(), text)).collect();
                format!("{key}: {}", values.join(" / "))
            })
            .collect()
    }
}

/// All experiments of all files.
pub(crate) fn groups(inputs: &[Input]) -> Vec<Group<'_>> {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (file, input) in inputs.iter().enumerate() {
        let mut rest = parts(input);
        for likeness in (1..=3).rev() {
            rest.retain(|&(system, result)| {
                let found = groups
                    .iter_mut()
                    .find(|group| group.results[file].is_none() && likeness_to(group, system, result) >= likeness);
                match found {
                    Some(group) => group.results[file] = Some(result),
                    None => return true,
                }
                false
            });
        }
        for (system, result) in rest {
            let mut results = vec![None; inputs.len()];
            results[file] = Some(result);
            groups.push(Group { system, experiment: &result.experiment, results });
        }
    }
    groups
}

/// The experiments of a file, with their systems.
fn parts(input: &Input) -> Vec<(Option<&str>, &Experiment)> {
    match &input.content {
        Content::One(experiment) => vec![(None, experiment.as_ref())],
        Content::Compared(compared) => compared
            .systems
            .iter()
            .flat_map(|system| system.experiments.iter().map(|result| (Some(system.system.as_str()), result)))
            .collect(),
    }
}

/// How well a result matches a group: 0 not at all, 3 in all respects.
fn likeness_to(group: &Group<'_>, system: Option<&str>, result: &Experiment) -> u8 {
    if group.experiment != result.experiment {
        return 0;
    }
    let same_config = group.first().is_some_and(|first| first.config == result.config);
    // A single result matches any system.
    let same_system = group.system == system || group.system.is_none() || system.is_none();
    u8::from(same_config) * 2 + u8::from(same_system)
}

/// A label's value, or a setting, as text.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A figure with its deviation and number of runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured<'a> {
    pub(crate) name: &'a str,
    pub(crate) unit: &'a str,
    pub(crate) labels: &'a BTreeMap<String, Value>,
    pub(crate) mean: Option<f64>,
    pub(crate) deviation: Option<f64>,
    pub(crate) runs: Option<f64>,
}

/// The figures of a result. Each absorbs the figures of its deviation, its mean and its number of
/// runs.
pub(crate) fn measured(result: &Experiment) -> Vec<Measured<'_>> {
    let key = |labels: &BTreeMap<String, Value>| serde_json::to_string(labels).unwrap_or_default();
    let mut values: BTreeMap<(String, &str), Option<f64>> = BTreeMap::new();
    for figure in &result.results {
        values.entry((key(&figure.labels), &figure.name)).or_insert(figure.value);
    }
    let is_alone = |labels: &str| values.keys().filter(|(of, _)| of == labels).count() == 1;
    let mut all = Vec::new();
    for figure in &result.results {
        let labels = key(&figure.labels);
        let same_labels = |name: &str| values.get(&(labels.clone(), name)).copied().flatten();
        let has = |name: &str| values.contains_key(&(labels.clone(), name));
        let name = figure.name.as_str();
        let is_part = ["_deviation", "_mean"].iter().any(|end| name.strip_suffix(end).is_some_and(has));
        if is_part || (name == "runs" && !is_alone(&labels)) {
            continue;
        }
        // A figure that has a mean next to it is a median; the deviation is the mean's.
        let mean = same_labels(&format!("{name}_mean"));
        // One run has no deviation, whatever is written.
        let runs = same_labels("runs");
        let is_of_several = runs.is_none_or(|runs| runs > 1.0);
        all.push(Measured {
            name,
            unit: &figure.unit,
            labels: &figure.labels,
            mean: mean.or(figure.value),
            deviation: same_labels(&format!("{name}_deviation")).filter(|_| is_of_several),
            runs,
        });
    }
    all
}

/// The significance of a difference between two means.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Verdict {
    /// Chance alone would make it in less than one of a hundred pairs of results.
    BeyondNoise,
    /// The noise is unknown: one run only, or no deviation.
    Unknown,
    WithinNoise,
    /// The means are equal.
    Same,
}

impl Verdict {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Verdict::BeyondNoise => "beyond noise",
            Verdict::Unknown => "noise unknown",
            Verdict::WithinNoise => "within noise",
            Verdict::Same => "same",
        }
    }
}

/// A mean, its deviation, and the number of its runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) mean: f64,
    pub(crate) deviation: Option<f64>,
    pub(crate) runs: Option<f64>,
}

/// Welch's t-test: two means whose deviations may differ.
pub(crate) fn verdict(one: Sample, other: Sample) -> Verdict {
    if one.mean == other.mean {
        return Verdict::Same;
    }
    let known = |sample: Sample| match (sample.deviation, sample.runs) {
        (Some(deviation), Some(runs)) if deviation >= 0.0 && runs >= 2.0 => {
            Some((deviation.powi(2) / runs, runs - 1.0))
        }
        _ => None,
    };
    let (Some((a, a_freedom)), Some((b, b_freedom))) = (known(one), known(other)) else {
        return Verdict::Unknown;
    };
    let error = (a + b).sqrt();
    if error == 0.0 {
        // Both are the same in each of their runs.
        return Verdict::BeyondNoise;
    }
    let t = (one.mean - other.mean).abs() / error;
    let freedom = (a + b).powi(2) / (a.powi(2) / a_freedom + b.powi(2) / b_freedom);
    match StudentsT::new(0.0, 1.0, freedom) {
        Ok(distribution) if 2.0 * distribution.sf(t) < SIGNIFICANCE => Verdict::BeyondNoise,
        Ok(_) => Verdict::WithinNoise,
        Err(_) => Verdict::Unknown,
    }
}

/// A figure in each file.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    /// Index of the experiment.
    pub(crate) group: usize,
    pub(crate) figure: Measured<'a>,
    /// One for each file.
    pub(crate) values: Vec<Option<Measured<'a>>>,
    /// For each file the ratio to the first that has the figure, and its verdict; `None` for that
    /// first file.
    pub(crate) ratios: Vec<Option<(f64, Verdict)>>,
}

impl Change<'_> {
    /// The best verdict of all files.
    pub(crate) fn verdict(&self) -> Verdict {
        self.ratios.iter().flatten().map(|&(_, verdict)| verdict).min().unwrap_or(Verdict::Same)
    }

    /// The distance of the farthest ratio from one, upwards or downwards.
    pub(crate) fn size(&self) -> f64 {
        let size = |ratio: f64| if ratio > 0.0 { ratio.ln().abs() } else { f64::INFINITY };
        self.ratios.iter().flatten().map(|&(ratio, _)| size(ratio)).fold(0.0, f64::max)
    }
}

/// The figures that two files or more have: first by verdict, then the largest change first.
pub(crate) fn changes<'a>(groups: &[Group<'a>]) -> Vec<Change<'a>> {
    let mut changes = Vec::new();
    for (group, of) in groups.iter().enumerate() {
        let mut found: Vec<Change<'a>> = Vec::new();
        let mut places: BTreeMap<(String, &str), usize> = BTreeMap::new();
        for (file, result) in of.results.iter().enumerate() {
            for figure in result.map(measured).unwrap_or_default() {
                let labels = serde_json::to_string(figure.labels).unwrap_or_default();
                let place = *places.entry((labels, figure.name)).or_insert(found.len());
                if place == found.len() {
                    found.push(Change { group, figure, values: vec![None; of.results.len()], ratios: Vec::new() });
                }
                // Twice in one file: the first counts.
                found[place].values[file].get_or_insert(figure);
            }
        }
        for mut change in found {
            change.ratios = ratios(&change.values);
            if change.ratios.iter().any(Option::is_some) {
                changes.push(change);
            }
        }
    }
    changes.sort_by(|a, b| a.verdict().cmp(&b.verdict()).then(b.size().total_cmp(&a.size())));
    changes
}

fn sample(figure: &Measured<'_>) -> Option<Sample> {
    Some(Sample { mean: figure.mean?, deviation: figure.deviation, runs: figure.runs })
}

/// The ratio of each file to the first that has the figure.
fn ratios(values: &[Option<Measured<'_>>]) -> Vec<Option<(f64, Verdict)>> {
    let samples: Vec<Option<Sample>> = values.iter().map(|value| value.as_ref().and_then(sample)).collect();
    let base = samples.iter().position(Option::is_some);
    let against = |file: usize| {
        let base = base.filter(|&base| base != file)?;
        let (from, to) = (samples[base]?, samples[file]?);
        let ratio = if from.mean == to.mean { 1.0 } else { to.mean / from.mean };
        Some((ratio, verdict(from, to)))
    };
    (0..values.len()).map(against).collect()
}
