//! `slat peers`: single operations on the page tables, and page faults, of slat and of the
//! published Rust crates with such page tables, on one thread and on several.
//!
//! All have the same memory for page-table pages and the same frames for guest pages; no CPU walks
//! the tables, and no call flushes a TLB. slat serves calls concurrently. The peers take `&mut
//! self`: a single thread has them alone; several threads take a `std::sync::Mutex` for each call.
//! Repetitions are interleaved, compared subjects are measured one right after the other, and
//! ratios are taken within each repetition: on a machine with other users, figures of two separate
//! minutes cannot be compared. After each measurement the tables are read back and counted.

mod aarch64;
mod axaddrspace;
mod engine;
mod generic;
mod measure;
mod memory;
#[cfg(target_arch = "x86_64")]
mod multiarch;
mod operation;
mod report;
mod subject;
mod x86;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::args::positive;
use crate::failure::Failure;
use crate::results::Outcome;
use crate::session::Session;
use measure::Measured;
use memory::Memory;
pub(crate) use operation::Operation;
use operation::{MAX_PAGES, QUERIES};
use subject::Subject;

/// Threads at most: so many have page-table pages reserved.
pub(crate) const MAX_THREADS: u16 = 64;

/// The options of `slat peers`.
#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Operations: fault, map-4k, map-4k-batch, map-range, map-range-each,\n\
                  map-range-2m, query, query-scattered, protect-range, protect-4k, unmap-4k,\n\
                  unmap-range, split-2m.\n\n\
                  Example: slat peers --only fault,map-4k -t 1,2 --json peers.json"
)]
pub(crate) struct PeersArgs {
    /// Numbers of threads.
    #[arg(short, long, value_delimiter = ',', value_name = "N,...", default_value = "1,2,4",
          value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_THREADS)))]
    pub(crate) threads: Vec<u16>,
    /// Operations; all by default.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,...", hide_possible_values = true)]
    pub(crate) only: Option<Vec<Operation>>,
    /// Pages for each thread, a power of two.
    #[arg(short, long, default_value_t = MAX_PAGES, value_parser = pages, value_name = "N")]
    pub(crate) pages: u64,
    /// Runs of which the mean is taken.
    #[arg(long, default_value_t = 11, value_parser = positive::<u32>, value_name = "N")]
    pub(crate) runs: u32,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
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

/// Runs the experiment.
pub(crate) fn run(args: &PeersArgs, session: &Session) -> Result<Outcome, Failure> {
    let (threads, operations) = (args.threads(), args.operations());
    let most_threads = threads.last().copied().unwrap_or(1);
    let memory = Memory::for_threads(most_threads)
        .map_err(|error| Failure::CannotServe(format!("{error}; choose fewer threads (-t)")))?;
    let mut measured = Measured::new(&operations, &threads, Subject::ALL, args.pages);
    let outcome =
        |measured: &Measured| Outcome::new(&report::results(args, measured), |out| report::print(out, args, measured));
    let progress = session.progress(u64::from(args.runs) + 1);
    let begin =
        |job: operation::PeerJob| progress.begin(format!("{}, {} threads", job.operation.title(), job.nr_threads));
    measured.warm_up(memory, begin)?;
    progress.step();
    for _ in 0..args.runs {
        measured.repeat(memory, begin)?;
        progress.step();
        session.so_far(outcome(&measured)?);
    }
    drop(progress);
    outcome(&measured)
}
