//! Single operations on the page tables, and page faults, of slat and of the
//! published Rust crates with such page tables, on one thread and on several.
//!
//! All have the same memory for page-table pages and the same frames for guest pages; no CPU walks
//! the tables, and no call flushes a TLB. slat serves calls concurrently. The peers take `&mut
//! self`: a single thread has them alone; several threads take a `std::sync::Mutex` for each call.
//! Repetitions are interleaved, compared subjects are measured one right after the other, and
//! ratios are taken within each repetition: on a machine with other users, figures of two separate
//! minutes cannot be compared. After each measurement the tables are read back and counted.
//!
//! Exit codes: 0 done, verified, and no claim lost; 1 a check failed, or a claim was lost; 2 bad usage;
//! 3 this machine cannot do it.

mod aarch64;
mod adapter;
mod axaddrspace;
mod claims;
mod engine;
mod failure;
mod figures;
mod generic;
mod measure;
mod memory;
#[cfg(target_arch = "x86_64")]
mod multiarch;
mod operation;
mod subject;
mod x86;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

use clap::{Parser, ValueEnum};
use slat_results::results::{ResultsFile, print, rfc3339};

use failure::Failure;
use measure::Measured;
use memory::Memory;
pub(crate) use operation::Operation;
use operation::{MAX_PAGES, QUERIES};
use subject::Subject;

/// Threads at most: so many have page-table pages reserved.
pub(crate) const MAX_THREADS: u16 = 64;

/// Operations on page tables, and page faults, of slat and of published Rust crates
#[derive(Clone, Debug, Parser)]
#[command(
    name = "slat-peers",
    version,
    allow_negative_numbers = true,
    max_term_width = 80,
    after_help = "Example: slat-peers --only fault,map-4k --threads 1,2 --json peers.json"
)]
pub(crate) struct PeersArgs {
    /// Numbers of threads
    #[arg(long, value_delimiter = ',', value_name = "N,...", default_value = "1,2,4",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_THREADS)))]
    pub(crate) threads: Vec<u16>,
    /// Operations; all by default
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...")]
    pub(crate) only: Option<Vec<Operation>>,
    /// Pages for each thread, a power of two
    #[arg(long, default_value_t = MAX_PAGES, value_parser = pages, value_name = "N")]
    pub(crate) pages: u64,
    /// Runs of each measurement
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub(crate) runs: u32,
    /// Write the results as JSON; - is the standard output
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl PeersArgs {
    /// Each number once, from few to many.
    fn threads(&self) -> Vec<u64> {
        let mut threads: Vec<u64> = self.threads.iter().copied().map(u64::from).collect();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    /// Each operation once, in the tables' order.
    fn operations(&self) -> Vec<Operation> {
        let is_asked = |operation: &Operation| self.only.as_ref().is_none_or(|only| only.contains(operation));
        Operation::value_variants().iter().copied().filter(is_asked).collect()
    }
}

/// A number of pages.
fn pages(text: &str) -> Result<u64, String> {
    match text.parse::<u64>() {
        Ok(pages) if pages.is_power_of_two() && (QUERIES..=MAX_PAGES).contains(&pages) => Ok(pages),
        Ok(_) => Err(format!("must be a power of two from {QUERIES} to {MAX_PAGES}")),
        Err(error) => Err(error.to_string()),
    }
}

fn main() -> ExitCode {
    match run(&PeersArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if failure.is_closed_pipe() => ExitCode::SUCCESS,
        Err(failure) => {
            // If the line cannot be written, the exit code still reports the failure.
            let _ = writeln!(std::io::stderr(), "slat-peers: {failure}");
            failure.exit_code()
        }
    }
}

fn run(args: &PeersArgs) -> Result<(), Failure> {
    let failed = |source| Failure::Write { to: args.json.clone().unwrap_or_default(), source };
    let json = args.json.as_deref().map(ResultsFile::open).transpose().map_err(failed)?;
    let begin = SystemTime::now();
    let (threads, operations) = (args.threads(), args.operations());
    let most_threads = threads.last().copied().unwrap_or(1);
    let memory = Memory::for_threads(most_threads)
        .map_err(|error| Failure::CannotServe(format!("{error}; choose fewer threads (--threads)")))?;
    let mut measured = Measured::new(&operations, &threads, Subject::ALL, args.pages);
    measured.warm_up(memory)?;
    for _ in 0..args.runs {
        measured.repeat(memory)?;
    }

    let mut results = figures::results(args, &measured);
    results.command = std::iter::once("slat-peers".to_owned()).chain(std::env::args().skip(1)).collect();
    results.time = rfc3339(begin);
    let compared = claims::compared(&measured, &results);
    let mut text = Vec::new();
    // Writing to a vector does not fail.
    let _ = figures::print(&mut text, args, &measured);
    let mut text = String::from_utf8_lossy(&text).into_owned();
    if let Some(compared) = &compared {
        text += &claims::text(compared);
    }
    let lost = compared.as_ref().map(|compared| compared.claims.lost.join("; ")).filter(|lost| !lost.is_empty());
    results.compared = compared;
    let is_stdout = json.as_ref().is_some_and(ResultsFile::is_stdout);
    let printed = if is_stdout { std::io::stderr().write_all(text.as_bytes()) } else { print(&text) };
    json.map_or(Ok(()), |file| file.write_json(&results)).map_err(failed)?;
    match lost {
        Some(lost) => Err(Failure::Claim(lost)),
        None => printed.map_err(Failure::Print),
    }
}
