//! Results as every experiment gives them: named figures with a unit and labels, written as one JSON object; and the
//! small statistics over runs.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
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

/// All that `--json` writes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Results {
    pub(crate) experiment: &'static str,
    pub(crate) config: Value,
    pub(crate) host: Value,
    pub(crate) results: Vec<Figure>,
}

/// What all figures were measured on, for `--json`.
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

/// The same for people, in two lines.
pub(crate) fn measured_on(host: &HostDescription, flush_method: FlushMethod) -> String {
    format!(
        "Measured on software CPUs ({} host CPUs, {}, Linux {}): threads, memory and tables are real, the CPU's address \
         translation is a program.\nTLB flush: {flush_method}.",
        host.nr_cpus, host.cpu_model, host.kernel_release
    )
}

/// The file of `--json`, opened before the work begins: a path that cannot be written is found out then. What it held
/// stays until there are results.
#[derive(Debug)]
pub(crate) struct ResultsFile {
    path: PathBuf,
    file: BufWriter<File>,
}

impl ResultsFile {
    pub(crate) fn open(path: &Path) -> Result<ResultsFile, Failure> {
        match OpenOptions::new().write(true).create(true).truncate(false).open(path) {
            Ok(file) => Ok(ResultsFile { path: path.to_owned(), file: BufWriter::new(file) }),
            Err(source) => Err(Failure::Write { path: path.to_owned(), source }),
        }
    }

    /// Writes the object.
    pub(crate) fn write(mut self, results: &Results) -> Result<(), Failure> {
        // Only a regular file has a length to cut.
        let is_regular = self.file.get_ref().metadata().is_ok_and(|metadata| metadata.is_file());
        let cut = if is_regular { self.file.get_ref().set_len(0) } else { Ok(()) };
        cut.and_then(|()| serde_json::to_writer_pretty(&mut self.file, results).map_err(io::Error::from))
            .and_then(|()| writeln!(self.file))
            .and_then(|()| self.file.flush())
            .map_err(|source| Failure::Write { path: self.path, source })
    }
}

/// Writes the results to `file`, if there is one, and prints them: each also if the other cannot be done.
pub(crate) fn deliver(
    file: Option<ResultsFile>,
    results: impl FnOnce() -> Results,
    print: impl FnOnce(&mut io::StdoutLock<'_>) -> io::Result<()>,
) -> Result<(), Failure> {
    let written = file.map_or(Ok(()), |file| file.write(&results()));
    print(&mut io::stdout().lock())?;
    written
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

    /// The smallest sample that `per_mille` thousandths of the samples do not exceed (nearest rank); 0 without samples.
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
