//! The outcome of a command: a text for people, and one object for `--json` (`slat-results`).

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
