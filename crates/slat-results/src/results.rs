//! The result of every command: a text for people, and one object for `--json`.
//!
//! The object has the same form for every command (`docs/results-schema.json`): what was run, when
//! and where, and figures. A figure has a name, a unit, labels and its samples, one for each run;
//! `statistics` makes everything else of the samples. `slat report` reads the same types.

pub mod compared;
mod file;

use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use humantime::format_rfc3339_seconds;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use slat_machine::hardware::commit::FlushMethod;
use slat_machine::linux::topology::HostDescription;

use crate::busy::Busy;
use crate::quantity::{NOTHING, Unit, spread};
use crate::statistics::Samples;
use compared::Compared;
pub use file::{ResultsFile, print};

/// The version of the form.
pub const SCHEMA: u32 = 1;

/// What distinguishes figures of one name.
pub type Labels = BTreeMap<String, Value>;

/// The labels of these names and values.
pub fn labels<const N: usize>(labels: [(&str, Value); N]) -> Labels {
    labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Which values of a figure are better.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    Less,
    More,
}

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub unit: Unit,
    /// `None`: neither is better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub better: Option<Better>,
    pub labels: Labels,
    /// One for each run, in the order of the runs. Figures of one experiment are of the same runs:
    /// samples at the same place belong together.
    pub samples: Samples,
}

/// What is better in this unit, if nothing else is said: less time, fewer instructions, and a higher
/// rate.
const fn usually(unit: Unit) -> Option<Better> {
    match unit {
        Unit::Seconds | Unit::Instructions => Some(Better::Less),
        Unit::PerSecond => Some(Better::More),
        Unit::Bytes | Unit::Count | Unit::Ratio => None,
    }
}

impl Figure {
    pub fn new(name: impl Into<String>, unit: Unit, labels: &Labels, samples: impl IntoIterator<Item = f64>) -> Figure {
        // JSON has no other numbers.
        let samples = samples.into_iter().filter(|sample| sample.is_finite()).collect();
        Figure { name: name.into(), unit, better: usually(unit), labels: labels.clone(), samples }
    }

    pub fn with_better(self, better: Option<Better>) -> Figure {
        Figure { better, ..self }
    }

    /// How many times as good as another this is, run by run. Such ratios are better the more they
    /// are.
    pub fn ratios(name: impl Into<String>, labels: &Labels, ratios: Samples) -> Figure {
        Figure::new(name, Unit::Ratio, labels, ratios.iter()).with_better(Some(Better::More))
    }
}

/// A figure that others published, of another machine. It stands beside what was measured, and
/// decides nothing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PublishedFigure {
    pub name: String,
    pub unit: Unit,
    /// Those of the measured figure that it stands beside.
    pub labels: Labels,
    /// The least and the largest value; equal where one was published.
    pub range: [f64; 2],
    /// The machine and the publication.
    pub on: String,
}

impl PublishedFigure {
    pub fn new(name: &str, unit: Unit, labels: &Labels, range: [f64; 2], on: impl Into<String>) -> PublishedFigure {
        PublishedFigure { name: name.to_owned(), unit, labels: labels.clone(), range, on: on.into() }
    }
}

/// A figure that each run has: for results, and for a row of a table.
pub struct PerRun<R> {
    pub name: &'static str,
    pub title: &'static str,
    pub unit: Unit,
    better: Option<Better>,
    /// `None`: the run has no such figure.
    value: fn(&R) -> Option<f64>,
}

impl<R> PerRun<R> {
    pub const fn new(name: &'static str, title: &'static str, unit: Unit, value: fn(&R) -> Option<f64>) -> PerRun<R> {
        PerRun { name, title, unit, better: usually(unit), value }
    }

    pub const fn count(name: &'static str, title: &'static str, value: fn(&R) -> Option<f64>) -> PerRun<R> {
        PerRun::new(name, title, Unit::Count, value)
    }

    pub const fn time(name: &'static str, title: &'static str, value: fn(&R) -> Option<f64>) -> PerRun<R> {
        PerRun::new(name, title, Unit::Seconds, value)
    }

    pub const fn less(mut self) -> PerRun<R> {
        self.better = Some(Better::Less);
        self
    }

    pub const fn more(mut self) -> PerRun<R> {
        self.better = Some(Better::More);
        self
    }

    pub fn samples<'a>(&self, runs: impl IntoIterator<Item = &'a R>) -> Samples
    where
        R: 'a,
    {
        runs.into_iter().filter_map(self.value).collect()
    }

    /// The figure of these runs; `None` if no run has it.
    pub fn figure(&self, runs: &[R], labels: &Labels) -> Option<Figure> {
        let samples = self.samples(runs);
        let figure = || Figure::new(self.name, self.unit, labels, samples.iter()).with_better(self.better);
        (!samples.is_empty()).then(figure)
    }

    /// The cell of a table.
    pub fn cell(&self, runs: &[R]) -> String {
        cell(&self.samples(runs), self.unit)
    }
}

/// The cell of a table.
pub fn cell(samples: &Samples, unit: Unit) -> String {
    if samples.is_empty() { NOTHING.to_owned() } else { spread(samples, unit) }
}

/// The machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Host {
    pub cpu_model: String,
    /// CPUs that the command may use.
    pub cpus: usize,
    pub kernel: String,
    pub memory_bytes: u64,
    /// The CPUs of the figures: software CPUs, or the host's own.
    pub measured_on: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_method: Option<String>,
    /// The facts of the KVM that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kvm: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<Busy>,
}

/// What figures of the software machine are measured on.
pub const SOFTWARE_CPUS: &str = "software CPUs";

/// What figures in virtual time are measured on.
pub const MODELLED_CPUS: &str = "modelled CPUs";

/// What figures of a whole machine in an emulator are measured on; the emulator's version follows.
pub const EMULATED_CPUS: &str = "CPUs emulated by";

impl Host {
    /// This machine, for figures of software CPUs.
    pub fn read(flush_method: Option<FlushMethod>) -> Host {
        let HostDescription { cpu_model, nr_cpus, kernel_release, memory_bytes } = HostDescription::read();
        Host {
            cpu_model,
            cpus: nr_cpus,
            kernel: kernel_release,
            memory_bytes,
            measured_on: SOFTWARE_CPUS.to_owned(),
            flush_method: flush_method.map(|method| method.to_string()),
            kvm: None,
            busy: None,
        }
    }
}

/// The host for people, in two lines.
pub fn measured_on(host: &HostDescription, flush_method: FlushMethod) -> String {
    format!(
        "Measured on software CPUs ({} host CPUs, {}, Linux {}): threads, memory and tables are real, the CPU's address \
         translation is a program.\nTLB flush: {flush_method}.",
        host.nr_cpus, host.cpu_model, host.kernel_release
    )
}

/// A distribution of latencies, over all runs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Distribution {
    pub name: String,
    pub unit: Unit,
    pub labels: Labels,
    /// The buckets that are not empty: the largest value that falls into each, and the number of
    /// values in it.
    pub buckets: Vec<(f64, u64)>,
}

/// What could not be measured.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NotRun {
    pub what: String,
    pub why: String,
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Not measured: {}: {}.", self.what, self.why)
    }
}

/// The object of `--json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Results {
    pub schema: u32,
    /// The version of slat.
    pub slat: String,
    /// When the command began (RFC 3339).
    pub time: String,
    pub experiment: String,
    /// The words of the command line.
    pub command: Vec<String>,
    pub interrupted: bool,
    pub host: Host,
    pub config: Value,
    pub results: Vec<Figure>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<PublishedFigure>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub histograms: Vec<Distribution>,
    /// What could not be measured on this machine, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_run: Vec<NotRun>,
    /// Of `slat compare`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<Compared>,
}

impl Results {
    pub fn new(experiment: &str, config: Value, host: Host, results: Vec<Figure>) -> Results {
        Results {
            schema: SCHEMA,
            slat: env!("CARGO_PKG_VERSION").to_owned(),
            time: rfc3339(SystemTime::now()),
            experiment: experiment.to_owned(),
            command: vec!["slat".to_owned(), experiment.to_owned()],
            interrupted: false,
            host,
            config,
            results,
            published: Vec::new(),
            histograms: Vec::new(),
            not_run: Vec::new(),
            compared: None,
        }
    }
}

pub fn rfc3339(time: SystemTime) -> String {
    format_rfc3339_seconds(time).to_string()
}
