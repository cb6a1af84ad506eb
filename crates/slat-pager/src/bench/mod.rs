//! `slat-pager bench`: this pager beside a plain handler of page faults, in one run and by turns.
//!
//! Each measurement has a guest in a process of its own, which hands over its memory as Firecracker
//! does, touches pages in an order that is known before, and checks what it finds there. The
//! servers are this process: its CPU time is theirs.

mod guest;
mod poll_loop;
pub mod report;
mod scenarios;
mod server;
mod single_pages;
mod snapshot;
pub mod sources;
pub mod statistics;

use std::fs::File;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use tokio::runtime::{Handle, Runtime};

use crate::source::PAGE_BYTES;
use report::Report;
use server::Desk;

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Scenario {
    /// Faults a second, by 8 threads.
    Faults,
    /// Time to first work and to a whole working set: from a file, chunks, an object store.
    Restores,
    /// 1, 10 and 100 clones of a snapshot.
    Clones,
    /// Faults a second, by 400 threads.
    Threads,
    /// What sources cost, once each: not among all, and not in the JSON.
    Sources,
}

/// Measure this pager beside a plain handler of page faults.
#[derive(Debug, Args)]
pub struct BenchOptions {
    /// What is measured. [default: all]
    #[arg(value_enum)]
    pub scenarios: Vec<Scenario>,
    /// How often each system runs.
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u16).range(1..))]
    pub rounds: u16,
    /// Memory of a guest.
    #[arg(long, default_value = "128MiB", value_parser = crate::config::parse_size)]
    pub size: u64,
    /// Clones at once.
    #[arg(long, value_delimiter = ',', default_value = "1,10,100")]
    pub clones: Vec<NonZeroUsize>,
    /// Where the snapshot is written.
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Be a guest of a measurement.
    #[arg(long, hide = true, exclusive = true)]
    pub guest: bool,
    /// Write all samples as JSON to FILE; `-`: to the output, in place of the table.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What all scenarios share.
struct Bench {
    folder: tempfile::TempDir,
    size_bytes: u64,
    rounds: usize,
    runtime: Handle,
    bar: ProgressBar,
}

impl Bench {
    fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn memory_path(&self) -> PathBuf {
        self.folder().join("memory")
    }

    fn nr_pages(&self) -> u32 {
        // Checked when it was made.
        (self.size_bytes / PAGE_BYTES) as u32
    }

    /// Prints what sources cost.
    fn sources(&self) -> io::Result<()> {
        self.progress("reading");
        let memory = self.memory_path();
        let figures = sources::run(&memory, self.folder(), |figure| self.bar.suspend(|| println!("{figure}")));
        self.runtime.block_on(figures).map_err(io::Error::other)
    }

    fn progress(&self, what: &str) {
        self.bar.set_message(what.to_owned());
        self.bar.tick();
    }
}

/// Measures, and writes what it has found.
///
/// # Errors
/// Of the operating system: no userfaultfd for this user, no room for the snapshot.
pub fn run(options: &BenchOptions) -> io::Result<()> {
    if options.guest {
        return guest::run();
    }
    // Before minutes go by.
    let json = options.json.as_deref().map(JsonOutput::open).transpose()?;
    let runtime = Runtime::new()?;
    let size_bytes = options.size.next_multiple_of(2 << 20);
    if !(4 << 20..=1 << 36).contains(&size_bytes) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a guest has 4 MiB to 64 GiB"));
    }
    let all = [Scenario::Faults, Scenario::Restores, Scenario::Clones, Scenario::Threads];
    let chosen = if options.scenarios.is_empty() { &all[..] } else { &options.scenarios };
    if chosen.iter().any(|scenario| *scenario != Scenario::Sources) {
        guest::check()?;
    }
    let folder = match &options.folder {
        Some(folder) => tempfile::tempdir_in(folder),
        None => tempfile::tempdir(),
    }?;
    let bench = Bench {
        folder,
        size_bytes,
        rounds: usize::from(options.rounds),
        runtime: runtime.handle().clone(),
        bar: ProgressBar::new_spinner(),
    };
    let mut report = Report {
        rounds: bench.rounds,
        snapshot_bytes: size_bytes,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        ..Report::default()
    };
    bench.progress("writing a snapshot");
    snapshot::write(&bench.memory_path(), u64::from(bench.nr_pages()))?;
    let desk = Desk::new(bench.folder(), bench.runtime.clone())?;
    for scenario in chosen {
        match scenario {
            Scenario::Faults => bench.faults(&desk, 8, &mut report)?,
            Scenario::Threads => bench.faults(&desk, 400, &mut report)?,
            Scenario::Sources => bench.sources()?,
            Scenario::Restores => bench.restores(&desk, &mut report)?,
            Scenario::Clones => {
                for nr_clones in &options.clones {
                    bench.clones(&desk, nr_clones.get(), &mut report)?;
                }
            }
        }
    }
    bench.bar.finish_and_clear();
    write(&report, json)
}

/// Where the JSON goes.
enum JsonOutput<'p> {
    Stdout,
    File(&'p Path, File),
}

impl JsonOutput<'_> {
    fn open(path: &Path) -> io::Result<JsonOutput<'_>> {
        if path == Path::new("-") {
            return Ok(JsonOutput::Stdout);
        }
        let file = File::options().write(true).create(true).truncate(false).open(path);
        Ok(JsonOutput::File(path, file.map_err(|error| named(path, &error))?))
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn write(report: &Report, json: Option<JsonOutput<'_>>) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    let mut text = serde_json::to_vec_pretty(report)?;
    text.push(b'\n');
    match json {
        None => write!(stdout, "{report}"),
        Some(JsonOutput::Stdout) => stdout.write_all(&text),
        Some(JsonOutput::File(path, mut file)) => {
            let saved = file.set_len(0).and_then(|()| file.write_all(&text)).map_err(|error| named(path, &error));
            write!(stdout, "{report}")?;
            saved
        }
    }
}
