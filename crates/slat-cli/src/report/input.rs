//! The input of the page: files that `--json` wrote, of one experiment or of `slat compare`.
//!
//! A file may come from an older or a newer slat: missing fields have a default, unknown fields are
//! ignored. A file that is no result is refused, with its name and what to do.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use thiserror::Error;

/// Far more than any experiment writes: a larger file is not a result (it may even have no end).
const MAX_BYTES: u64 = 64 << 20;

/// Why a file is not a result.
#[derive(Debug, Error)]
pub(crate) enum InputError {
    /// The operating system refuses to read it.
    #[error("cannot read {}: {source}; name files that --json wrote", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    /// It is empty.
    #[error("{} is empty; its command may still run, or failed: run it again with --json", path.display())]
    Empty { path: PathBuf },
    /// Far too large.
    #[error("{} has more than {} MiB, so it is no result; name files that --json wrote", path.display(), MAX_BYTES >> 20)]
    TooLarge { path: PathBuf },
    /// Not JSON, or not all of it.
    #[error("{} is not JSON ({source}); name files that --json wrote", path.display())]
    NotJson { path: PathBuf, source: serde_json::Error },
    /// JSON of other software.
    #[error("{} is JSON, but no result of slat ({why}); name files that --json wrote", path.display())]
    NotAResult { path: PathBuf, why: String },
    /// It has no figures.
    #[error("{} holds no figures{}; run its command again: {command}", path.display(),
        if *is_interrupted { ", since its command was interrupted" } else { "" })]
    NoFigures { path: PathBuf, is_interrupted: bool, command: String },
    /// The same file twice.
    #[error("{} is there twice; name each result once", path.display())]
    Twice { path: PathBuf },
}

/// One figure of an experiment.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    /// `None`: it was not a number.
    #[serde(default)]
    pub(crate) value: Option<f64>,
    #[serde(default)]
    pub(crate) unit: String,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, Value>,
}

/// A distribution of times.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct LatencyHistogram {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) unit: String,
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, Value>,
    /// Upper end, and how many.
    #[serde(default)]
    pub(crate) buckets: Vec<(f64, f64)>,
}

/// The machine.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Host {
    pub(crate) cpu_model: Option<String>,
    pub(crate) cpus: Option<Value>,
    pub(crate) kernel: Option<String>,
    pub(crate) memory_bytes: Option<f64>,
    pub(crate) measured_on: Option<String>,
    pub(crate) flush_method: Option<String>,
    pub(crate) kvm: Option<Value>,
}

/// The result of one experiment.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Experiment {
    pub(crate) experiment: String,
    #[serde(default)]
    pub(crate) command: Option<String>,
    #[serde(default)]
    pub(crate) config: Value,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) host: Host,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) interrupted: bool,
    pub(crate) results: Vec<Figure>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) histograms: Vec<LatencyHistogram>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) not_run: Vec<NotRun>,
}

/// The claim about a side of a comparison.
#[derive(Debug, Deserialize)]
pub(crate) struct Claim {
    #[serde(default)]
    pub(crate) at_least: Option<f64>,
    pub(crate) holds: bool,
}

/// A side of a comparison.
#[derive(Debug, Deserialize)]
pub(crate) struct Side {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) role: String,
    #[serde(default)]
    pub(crate) mean: Option<f64>,
    #[serde(default)]
    pub(crate) deviation: Option<f64>,
    #[serde(default)]
    pub(crate) runs: Option<f64>,
    #[serde(default)]
    pub(crate) measured_on: Option<String>,
    #[serde(default)]
    pub(crate) ratio: Option<f64>,
    #[serde(default)]
    pub(crate) claim: Option<Claim>,
}

/// The published values of the same figure.
#[derive(Debug, Deserialize)]
pub(crate) struct Published {
    #[serde(default)]
    pub(crate) on: Option<String>,
    #[serde(default)]
    pub(crate) baseline: Option<f64>,
    #[serde(default)]
    pub(crate) proposed: Option<f64>,
}

/// A figure of several sides.
#[derive(Debug, Deserialize)]
pub(crate) struct Comparison {
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) title: Option<String>,
    #[serde(default)]
    pub(crate) unit: String,
    #[serde(default)]
    pub(crate) better: Option<String>,
    #[serde(default)]
    pub(crate) published: Option<Published>,
    #[serde(default)]
    pub(crate) sides: Vec<Side>,
}

/// What could not run on this machine.
#[derive(Debug, Deserialize)]
pub(crate) struct NotRun {
    pub(crate) what: String,
    #[serde(default)]
    pub(crate) why: String,
}

/// One of the systems.
#[derive(Debug, Deserialize)]
pub(crate) struct System {
    pub(crate) system: String,
    #[serde(default)]
    pub(crate) title: String,
    #[serde(default)]
    pub(crate) experiments: Vec<Experiment>,
    #[serde(default)]
    pub(crate) comparisons: Vec<Comparison>,
    #[serde(default)]
    pub(crate) not_run: Vec<NotRun>,
}

/// All claims of a run.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Claims {
    pub(crate) made: Option<u64>,
    pub(crate) held: Option<u64>,
    pub(crate) lost: Vec<String>,
}

/// The result of `slat compare`.
#[derive(Debug, Deserialize)]
pub(crate) struct Compared {
    #[serde(default)]
    pub(crate) command: Option<String>,
    #[serde(default)]
    pub(crate) config: Value,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) host: Host,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) interrupted: bool,
    #[serde(default)]
    pub(crate) seconds: Option<f64>,
    pub(crate) systems: Vec<System>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) claims: Claims,
}

/// Reads `null` as a missing field.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Debug)]
pub(crate) enum Content {
    One(Box<Experiment>),
    Compared(Box<Compared>),
}

/// One file.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) path: PathBuf,
    /// The name of its columns and lines.
    pub(crate) label: String,
    pub(crate) written: Option<SystemTime>,
    pub(crate) content: Content,
}

impl Input {
    pub(crate) fn host(&self) -> &Host {
        match &self.content {
            Content::One(experiment) => &experiment.host,
            Content::Compared(compared) => &compared.host,
        }
    }

    pub(crate) fn experiment(&self) -> &str {
        match &self.content {
            Content::One(experiment) => &experiment.experiment,
            Content::Compared(_) => "compare",
        }
    }

    pub(crate) fn command(&self) -> Option<&str> {
        match &self.content {
            Content::One(experiment) => experiment.command.as_deref(),
            Content::Compared(compared) => compared.command.as_deref(),
        }
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        match &self.content {
            Content::One(experiment) => experiment.interrupted,
            Content::Compared(compared) => compared.interrupted,
        }
    }

    pub(crate) fn systems(&self) -> &[System] {
        match &self.content {
            Content::One(_) => &[],
            Content::Compared(compared) => &compared.systems,
        }
    }

    fn has_figures(&self) -> bool {
        match &self.content {
            Content::One(experiment) => !experiment.results.is_empty() || !experiment.histograms.is_empty(),
            // Where nothing could run, the reasons are shown.
            Content::Compared(compared) => compared.systems.iter().any(|system| {
                !system.experiments.is_empty() || !system.comparisons.is_empty() || !system.not_run.is_empty()
            }),
        }
    }
}

/// Reads all files, in their order.
pub(crate) fn read_all(paths: &[PathBuf]) -> Result<Vec<Input>, InputError> {
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut inputs = Vec::new();
    for path in paths {
        let input = read(path)?;
        // A result compared with itself shows nothing; the user meant another file.
        let same = path.canonicalize().unwrap_or_else(|_| path.clone());
        if seen.contains(&same) {
            return Err(InputError::Twice { path: path.clone() });
        }
        seen.push(same);
        inputs.push(input);
    }
    label(&mut inputs);
    Ok(inputs)
}

/// The label of a file is its stem if all stems differ, else its path.
fn label(inputs: &mut [Input]) {
    let stem = |input: &Input| {
        input
            .path
            .file_stem()
            .map_or_else(|| input.path.display().to_string(), |stem| stem.to_string_lossy().into_owned())
    };
    let mut stems: Vec<String> = inputs.iter().map(stem).collect();
    stems.sort();
    let are_distinct = stems.windows(2).all(|pair| pair[0] != pair[1]);
    for input in inputs {
        input.label = if are_distinct { stem(input) } else { input.path.display().to_string() };
    }
}

fn read(path: &Path) -> Result<Input, InputError> {
    let path = path.to_owned();
    let (text, written) = match read_text(&path) {
        Ok(read) => read,
        Err(source) => return Err(InputError::Read { path, source }),
    };
    if text.len() as u64 > MAX_BYTES {
        return Err(InputError::TooLarge { path });
    }
    if text.trim_ascii().is_empty() {
        return Err(InputError::Empty { path });
    }
    let value: Value = match serde_json::from_slice(&text) {
        Ok(value) => value,
        Err(source) => return Err(InputError::NotJson { path, source }),
    };
    let content = match parse(value) {
        Ok(content) => content,
        Err(why) => return Err(InputError::NotAResult { path, why }),
    };
    let input = Input { path, label: String::new(), written, content };
    if !input.has_figures() {
        let command = input.command().map_or_else(|| format!("slat {}", input.experiment()), str::to_owned);
        return Err(InputError::NoFigures { is_interrupted: input.is_interrupted(), command, path: input.path });
    }
    Ok(input)
}

fn read_text(path: &Path) -> std::io::Result<(Vec<u8>, Option<SystemTime>)> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let written = metadata.is_file().then(|| metadata.modified().ok()).flatten();
    let mut text = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut text)?;
    Ok((text, written))
}

/// Parses either kind of result; the error says in one line why it is neither.
fn parse(value: Value) -> Result<Content, String> {
    let Some(object) = value.as_object() else {
        return Err("it is not an object".to_owned());
    };
    let Some(experiment) = object.get("experiment").and_then(Value::as_str) else {
        return Err("it names no experiment".to_owned());
    };
    let parsed = if experiment == "compare" {
        Compared::deserialize(value).map(|compared| Content::Compared(Box::new(compared)))
    } else {
        Experiment::deserialize(value).map(|experiment| Content::One(Box::new(experiment)))
    };
    parsed.map_err(|error| error.to_string())
}
