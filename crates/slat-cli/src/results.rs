//! The outcome of a command: a text for people, and one object for `--json` (`slat-results`).

use slat_machine::hardware::commit::FlushMethod;
use slat_machine::linux::topology::HostDescription;
pub(crate) use slat_results::results::*;

use crate::failure::Failure;

/// The outcome of an experiment.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The text for people.
    pub(crate) text: String,
    /// The object of `--json`; `None`: the command has none.
    pub(crate) results: Option<Results>,
    /// Why the command fails all the same.
    pub(crate) shortfall: Option<Failure>,
}

impl Outcome {
    /// An outcome of `results` and the text that `print` adds.
    pub(crate) fn new(results: Results, print: impl FnOnce(&mut String)) -> Outcome {
        let mut text = String::new();
        print(&mut text);
        Outcome { text, results: Some(results), shortfall: None }
    }
}

/// Adds what the figures are measured on, and what it means if `nr_vcpus` vCPUs share fewer CPUs.
pub(crate) fn print_host(out: &mut String, flush_method: Option<FlushMethod>, nr_vcpus: usize, if_shared: &str) {
    let host = HostDescription::read();
    if let Some(method) = flush_method {
        add_line!(out, "{}", measured_on(&host, method));
    }
    if nr_vcpus > host.nr_cpus {
        add_line!(out, "{nr_vcpus} vCPUs on {} CPUs: {if_shared}", host.nr_cpus);
    }
}
