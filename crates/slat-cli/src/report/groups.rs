//! Groups of results of several files, and their differences.
//!
//! Experiments are grouped by their name: first those whose configurations and systems agree, then
//! those whose configurations agree, then those whose systems agree. Figures of two experiments are
//! paired by name and labels.

use serde_json::Value;

use super::input::Input;
use super::{InFiles, in_files};
use crate::results::{Better, Figure, Results};
use crate::statistics::{Difference, difference};

/// One experiment, with its result in each file that has it.
#[derive(Debug)]
pub(crate) struct Group<'a> {
    /// The system whose experiment this is, in a result of `slat compare`.
    pub(crate) system: Option<&'a str>,
    pub(crate) experiment: &'a str,
    /// One for each file.
    pub(crate) results: Vec<Option<&'a Results>>,
}

impl<'a> Group<'a> {
    pub(crate) fn first(&self) -> Option<&'a Results> {
        self.results.iter().flatten().next().copied()
    }

    pub(crate) fn title(&self) -> String {
        self.first().map_or_else(|| format!("slat {}", self.experiment), |result| result.command.join(" "))
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
        let own = config(self).into_iter().flat_map(shown_settings);
        own.filter(|(key, value)| others.iter().any(|other| other.get(key.as_str()) != Some(*value)))
            .map(|(key, value)| format!("{key} {}", text(value)))
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Settings in which the files differ, as `bytes: 4096 / 8192`.
    pub(crate) fn different_settings(&self) -> Vec<String> {
        let configs: Vec<&Value> = self.results.iter().flatten().map(|result| &result.config).collect();
        let mut keys: Vec<&String> =
            configs.iter().flat_map(|config| shown_settings(config)).map(|(key, _)| key).collect();
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
fn parts(input: &Input) -> Vec<(Option<&str>, &Results)> {
    if input.results.compared.is_none() {
        return vec![(None, &input.results)];
    }
    let systems = input.systems().iter();
    systems.flat_map(|system| system.experiments.iter().map(|result| (Some(system.system.as_str()), result))).collect()
}

/// How well a result matches a group: 0 not at all, 3 in all respects.
fn likeness_to(group: &Group<'_>, system: Option<&str>, result: &Results) -> u8 {
    if group.experiment != result.experiment {
        return 0;
    }
    let same_config = group.first().is_some_and(|first| first.config == result.config);
    // A single result matches any system.
    let same_system = group.system == system || group.system.is_none() || system.is_none();
    u8::from(same_config) * 2 + u8::from(same_system)
}

/// The settings that are for people. A list of objects, as of the runs of a model, is for programs.
pub(crate) fn shown_settings(config: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let is_for_people = |value: &Value| !value.as_array().is_some_and(|values| values.iter().any(Value::is_object));
    config.as_object().into_iter().flatten().filter(move |(_, value)| is_for_people(value))
}

/// A label's value, or a setting, as text.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// A figure in each file.
#[derive(Debug)]
pub(crate) struct Change<'a> {
    /// Index of the experiment.
    pub(crate) group: usize,
    pub(crate) figure: &'a Figure,
    /// One for each file.
    pub(crate) values: Vec<Option<&'a Figure>>,
    /// For each file the ratio of its median to that of the first that has the figure, and the
    /// significance; `None` for that first file.
    pub(crate) ratios: Vec<Option<(f64, Difference)>>,
}

impl Change<'_> {
    /// The most significant difference of all files.
    pub(crate) fn difference(&self) -> Difference {
        self.ratios.iter().flatten().map(|&(_, difference)| difference).min().unwrap_or(Difference::Same)
    }

    /// The distance of the farthest ratio from one, upwards or downwards.
    pub(crate) fn size(&self) -> f64 {
        let size = |ratio: f64| if ratio > 0.0 { ratio.ln().abs() } else { f64::INFINITY };
        self.ratios.iter().flatten().map(|&(ratio, _)| size(ratio)).fold(0.0, f64::max)
    }

    /// Whether a figure that is `ratio` times as large is better; `None`: neither is.
    pub(crate) fn is_improved(&self, ratio: f64) -> Option<bool> {
        Some(match self.figure.better? {
            Better::Less => ratio < 1.0,
            Better::More => ratio > 1.0,
        })
    }
}

/// The figures that two files or more have: first by significance, then the largest change first.
pub(crate) fn changes<'a>(groups: &[Group<'a>]) -> Vec<Change<'a>> {
    let mut changes = Vec::new();
    for (group, of) in groups.iter().enumerate() {
        let key = |figure: &'a Figure| (serde_json::to_string(&figure.labels).unwrap_or_default(), &figure.name);
        for InFiles { first, files } in in_files(&super::parts(&of.results, |result| &result.results), key) {
            let ratios = ratios(&files);
            if ratios.iter().any(Option::is_some) {
                changes.push(Change { group, figure: first, values: files, ratios });
            }
        }
    }
    changes.sort_by(|a, b| a.difference().cmp(&b.difference()).then(b.size().total_cmp(&a.size())));
    changes
}

/// The ratio of each file to the first that has the figure.
fn ratios(values: &[Option<&Figure>]) -> Vec<Option<(f64, Difference)>> {
    let samples = |file: usize| values[file].map(|figure| &figure.samples).filter(|samples| !samples.is_empty());
    let base = (0..values.len()).find(|&file| samples(file).is_some());
    let against = |file: usize| {
        let base = base.filter(|&base| base != file)?;
        let (from, to) = (samples(base)?, samples(file)?);
        let (a, b) = (from.median(), to.median());
        Some((if a == b { 1.0 } else { b / a }, difference(from, to)))
    };
    (0..values.len()).map(against).collect()
}
