//! The input of the page: files that `--json` wrote, of any command.
//!
//! Unknown fields are ignored: a newer slat may write them. A file of another version of the form,
//! or that is no result, is refused with its name and what to do.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use crate::results::compared::System;
use crate::results::{Results, SCHEMA};

/// Far more than any experiment writes: a larger file is not a result (it may even have no end).
const MAX_BYTES: u64 = 64 << 20;

/// Why a file is not a result.
#[derive(Debug, Error)]
pub(crate) enum InputError {
    #[error("cannot read {}: {source}; name files that --json wrote", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is empty; its command may still run, or failed: run it again with --json", path.display())]
    Empty { path: PathBuf },
    #[error("{} has more than {} MiB, so it is no result; name files that --json wrote", path.display(), MAX_BYTES >> 20)]
    TooLarge { path: PathBuf },
    #[error("{} is not JSON ({source}); name files that --json wrote", path.display())]
    NotJson { path: PathBuf, source: serde_json::Error },
    #[error("{} is JSON, but no result of slat ({why}); name files that --json wrote", path.display())]
    NotAResult { path: PathBuf, why: String },
    #[error("{} holds no figures{}; run its command again: {command}", path.display(),
        if *is_interrupted { ", since its command was interrupted" } else { "" })]
    NoFigures { path: PathBuf, is_interrupted: bool, command: String },
    #[error("{} is there twice; name each result once", path.display())]
    Twice { path: PathBuf },
}

/// One file.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) path: PathBuf,
    /// The name of its columns and lines.
    pub(crate) label: String,
    pub(crate) written: Option<SystemTime>,
    pub(crate) results: Results,
}

impl Input {
    pub(crate) fn command(&self) -> String {
        self.results.command.join(" ")
    }

    pub(crate) fn systems(&self) -> &[System] {
        self.results.compared.as_ref().map_or(&[], |compared| &compared.systems)
    }

    fn has_figures(&self) -> bool {
        match &self.results.compared {
            None => !self.results.results.is_empty() || !self.results.histograms.is_empty(),
            // Where nothing could run, the reasons are shown.
            Some(compared) => compared.systems.iter().any(|system| {
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
    let results = match parse(value) {
        Ok(results) => results,
        Err(why) => return Err(InputError::NotAResult { path, why }),
    };
    let input = Input { path, label: String::new(), written, results };
    if !input.has_figures() {
        let (is_interrupted, command) = (input.results.interrupted, input.command());
        return Err(InputError::NoFigures { is_interrupted, command, path: input.path });
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

/// Parses a result; the error says in one line why it is none.
fn parse(value: Value) -> Result<Results, String> {
    let Some(object) = value.as_object() else {
        return Err("it is not an object".to_owned());
    };
    match object.get("schema") {
        None => return Err("it names no schema".to_owned()),
        Some(schema) if *schema == SCHEMA => {}
        Some(schema) => return Err(format!("its schema is {schema}, and this slat reads {SCHEMA}")),
    }
    Results::deserialize(value).map_err(|error| error.to_string())
}
