//! The result of every experiment: a text for people, and named figures with a unit and labels,
//! which are written as one JSON object; and the small statistics over runs.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};
use slat_machine::commit::FlushMethod;
use slat_machine::topology::HostDescription;

use crate::failure::Failure;

/// One figure.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) labels: BTreeMap<&'static str, Value>,
}

/// The figures of an experiment, with its configuration and host.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Results {
    pub(crate) experiment: &'static str,
    pub(crate) config: Value,
    pub(crate) host: Value,
    pub(crate) results: Vec<Figure>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) histograms: Vec<Distribution>,
    /// What could not be measured on this machine, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) not_run: Vec<NotRun>,
}

/// A distribution of latencies, over all runs.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Distribution {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) labels: BTreeMap<&'static str, Value>,
    /// The buckets that are not empty: the largest value that falls into each, and the number of
    /// values in it.
    pub(crate) buckets: Vec<(u64, u64)>,
}

/// What could not be measured.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub(crate) struct NotRun {
    pub(crate) what: String,
    pub(crate) why: String,
}

impl fmt::Display for NotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Not measured: {}: {}.", self.what, self.why)
    }
}

/// The outcome of an experiment.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// The text for people.
    pub(crate) text: String,
    /// The object of `--json`.
    pub(crate) json: Value,
    /// What `--markdown` writes, where there is such an option.
    pub(crate) markdown: Option<String>,
    /// A failed check of an experiment that still has figures.
    pub(crate) failure: Option<String>,
}

impl Outcome {
    /// An outcome of `results` and the text that `print` writes.
    pub(crate) fn new(
        results: &Results,
        print: impl FnOnce(&mut Vec<u8>) -> io::Result<()>,
    ) -> Result<Outcome, Failure> {
        let mut text = Vec::new();
        print(&mut text).map_err(Failure::Print)?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let json = serde_json::to_value(results).map_err(|error| Failure::Print(error.into()))?;
        Ok(Outcome { text, json, markdown: None, failure: None })
    }
}

/// The host of all figures, for `--json`.
pub(crate) fn host_json(host: &HostDescription, flush_method: Option<FlushMethod>) -> Value {
    json!({
        "cpu_model": host.cpu_model,
        "cpus": host.nr_cpus,
        "kernel": host.kernel_release,
        "memory_bytes": host.memory_bytes,
        "measured_on": "software CPUs",
        "flush_method": flush_method.map(|method| method.to_string()),
    })
}

/// The host for people, in two lines.
pub(crate) fn measured_on(host: &HostDescription, flush_method: FlushMethod) -> String {
    format!(
        "Measured on software CPUs ({} host CPUs, {}, Linux {}): threads, memory and tables are real, the CPU's address \
         translation is a program.\nTLB flush: {flush_method}.",
        host.nr_cpus, host.cpu_model, host.kernel_release
    )
}

/// A file for results, opened before the work begins, so that a path that cannot be written is
/// found first. Old contents stay until there are results, and a new file without results is
/// removed.
#[derive(Debug)]
pub(crate) struct ResultsFile {
    path: PathBuf,
    file: File,
    /// The file is new, and empty.
    is_new: bool,
}

impl ResultsFile {
    pub(crate) fn open(path: &Path) -> Result<ResultsFile, Failure> {
        let open = |options: &mut OpenOptions| options.write(true).open(path);
        let (file, is_new) = match open(OpenOptions::new().create_new(true)) {
            Ok(file) => (Ok(file), true),
            Err(_) => (open(&mut OpenOptions::new()), false),
        };
        match file {
            Ok(file) => Ok(ResultsFile { path: path.to_owned(), file, is_new }),
            Err(source) => Err(Failure::Write { path: path.to_owned(), source }),
        }
    }

    /// Writes `content`.
    pub(crate) fn write(mut self, content: &str) -> Result<(), Failure> {
        self.is_new = false;
        // Only a regular file has a length to cut.
        let is_regular = self.file.metadata().is_ok_and(|metadata| metadata.is_file());
        let cut = if is_regular { self.file.set_len(0) } else { Ok(()) };
        cut.and_then(|()| self.file.write_all(content.as_bytes()))
            .map_err(|source| Failure::Write { path: self.path.clone(), source })
    }
}

impl Drop for ResultsFile {
    fn drop(&mut self) {
        if self.is_new {
            // At worst an empty file remains.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Figures of several runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    pub(crate) fn mean(&self) -> f64 {
        if self.0.is_empty() { 0.0 } else { self.0.iter().sum::<f64>() / self.0.len() as f64 }
    }

    /// Sample standard deviation.
    pub(crate) fn deviation(&self) -> f64 {
        if self.0.len() < 2 {
            return 0.0;
        }
        let mean = self.mean();
        let squares: f64 = self.0.iter().map(|value| (value - mean).powi(2)).sum();
        (squares / (self.0.len() - 1) as f64).sqrt()
    }

    /// The smallest sample that `per_mille` thousandths of the samples do not exceed (nearest
    /// rank); 0 without samples.
    pub(crate) fn quantile(&self, per_mille: usize) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * per_mille).div_ceil(1000).max(1);
        sorted.get(rank - 1).copied().unwrap_or(0.0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_known_samples() {
        let mut samples = Samples::default();
        assert_eq!((samples.mean(), samples.deviation(), samples.quantile(500)), (0.0, 0.0, 0.0));
        for value in [2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0] {
            samples.push(value);
        }
        assert_eq!((samples.len(), samples.mean()), (8, 5.0));
        assert_eq!([0, 500, 990, 1000].map(|rank| samples.quantile(rank)), [2.0, 4.0, 9.0, 9.0]);
        assert!((samples.deviation() - 2.138).abs() < 1e-3);
    }
}
