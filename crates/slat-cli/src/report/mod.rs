//! `slat report`: results as one page of tables and plots.
//!
//! It reads what `--json` wrote (`report/input.rs`), groups the results of several files and finds
//! the changes (`groups.rs`), chooses plots by the names of figures (`plots.rs`, `histograms.rs`),
//! draws them (`draw.rs`, `ink.rs`), and lays the page out (`page.rs` and the tables that it
//! calls). The page needs no script, no font and no other file. It is written as a whole or not at
//! all.

mod differences;
mod draw;
mod groups;
mod histograms;
mod ink;
mod input;
mod page;
mod plot;
mod plots;
mod systems;
mod tables;

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::failure::Failure;
use crate::options::OUTPUT;
use crate::results;

#[derive(Clone, Debug, Args)]
#[command(after_help = "Example: slat report before.json after.json -o report.html")]
pub(crate) struct ReportArgs {
    /// Results that --json wrote, of any command; several are compared with the first
    #[arg(value_name = "RESULT.json", required = true)]
    results: Vec<PathBuf>,
    #[arg(short, long, value_name = "FILE", default_value = "report.html", help = OUTPUT)]
    output: PathBuf,
}

impl From<input::InputError> for Failure {
    fn from(error: input::InputError) -> Failure {
        Failure::Usage(error.to_string())
    }
}

/// Reads the results, writes the page, and prints its path.
pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let inputs = input::read_all(&args.results)?;
    if args.output == Path::new("-") {
        let page = page::page(&inputs).map_err(Failure::CannotServe)?;
        return results::print(&page.html).map_err(Failure::Print);
    }
    let output = real_path(&args.output);
    if args.results.iter().any(|path| real_path(path) == output) {
        let path = args.output.display();
        return Err(Failure::Usage(format!("{path} is a result to read; name another file for the page (-o)")));
    }
    let page = page::page(&inputs).map_err(Failure::CannotServe)?;
    write(&output, page.html.as_bytes()).map_err(|source| Failure::Write { path: args.output.clone(), source })?;
    let nr_files = match inputs.len() {
        1 => "1 result".to_owned(),
        nr => format!("{nr} results"),
    };
    let kib = page.html.len().div_ceil(1024);
    let path = args.output.display();
    results::print(&format!("Wrote {path}: {nr_files}, {} plots, {kib} KiB. Open it in a browser.\n", page.nr_plots))
        .map_err(Failure::Print)
}

/// The file that links lead to.
fn real_path(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Writes all or nothing: an old page stays until the new one is complete.
fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    match path.metadata() {
        // A device or a pipe has no content to keep, and must stay a device or a pipe.
        Ok(metadata) if !metadata.is_file() && !metadata.is_dir() => {
            File::options().write(true).open(path)?.write_all(text)
        }
        Ok(metadata) if metadata.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
        found => {
            // The new page has the permissions of the old one.
            let mode = found.map_or(0o666, |metadata| metadata.permissions().mode());
            let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let mut file = tempfile::Builder::new()
                .prefix(".report")
                .permissions(Permissions::from_mode(mode & 0o777))
                .tempfile_in(directory)
                .map_err(without_path)?;
            file.write_all(text)?;
            file.persist(path).map_err(|error| error.error)?;
            Ok(())
        }
    }
}

/// An error without the name of the temporary file, which the user does not know.
fn without_path(error: io::Error) -> io::Error {
    error.raw_os_error().map_or(error.kind().into(), io::Error::from_raw_os_error)
}

/// The place in a list of what is looked for. If nothing is, `new` is added.
fn place<T>(list: &mut Vec<T>, is_it: impl FnMut(&T) -> bool, new: impl FnOnce() -> T) -> usize {
    list.iter().position(is_it).unwrap_or_else(|| {
        list.push(new());
        list.len() - 1
    })
}

/// What several files have, and what each has of it: twice in one file, the first counts.
#[derive(Debug)]
struct InFiles<'a, T> {
    first: &'a T,
    files: Vec<Option<&'a T>>,
}

/// The items of all files, in their order; those with the same `key` are one.
fn in_files<'a, T, K: Ord>(files: &[&'a [T]], key: impl Fn(&'a T) -> K) -> Vec<InFiles<'a, T>> {
    let mut found: Vec<InFiles<'a, T>> = Vec::new();
    let mut places = BTreeMap::new();
    for (file, items) in files.iter().enumerate() {
        for item in *items {
            let place = *places.entry(key(item)).or_insert(found.len());
            if place == found.len() {
                found.push(InFiles { first: item, files: vec![None; files.len()] });
            }
            found[place].files[file].get_or_insert(item);
        }
    }
    found
}

/// The items in a part of what files have.
fn parts<'a, T, P>(files: &[Option<&'a T>], of: fn(&'a T) -> &'a [P]) -> Vec<&'a [P]> {
    files.iter().map(|file| file.map(of).unwrap_or_default()).collect()
}
