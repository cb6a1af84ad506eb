//! `slat memslots`: how fast memory is mapped, unmapped and moved while a vCPU runs and there are
//! many memslots, as KVM's memslot_perf_test measures it.
//!
//! Each run of a test has a new machine: an area of 512 MiB and 64 KiB, split evenly into memslots,
//! and one vCPU. A test repeats its iteration until its time is over; guest and host verify what
//! the other has written in it.

mod area;
mod experiments;
mod guest;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use slat::baselines::Locking;

use crate::args::{FormatArg, LockArg, locking_name, positive, with_format};
use crate::failure::Failure;
use crate::results::Outcome;
use crate::session::Session;
use area::MAX_AREA_SLOTS;
use experiments::{Run, Test};

/// The options of `slat memslots`.
#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Tests: 0 map, 1 unmap, 2 unmap chunked, 3 move active area,\n       4 move inactive area, 5 RW\n\
                  Example: slat memslots -s 512 -l 1 -f 0 -e 1",
    after_long_help = "Tests: 0 map, 1 unmap, 2 unmap chunked, 3 move active area, 4 move inactive area, 5 RW.\n\n\
                       KVM's test has an option -q, to turn off the quirk that deleting or moving one slot zaps the \
                       pages of all. slat has no such quirk, and so no -q.\n\n\
                       Example: slat memslots -s 512 -l 1 -f 0 -e 1"
)]
pub(crate) struct MemslotsArgs {
    /// First test to run.
    #[arg(short = 'f', long, value_name = "TEST", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=5))]
    pub(crate) first_test: u8,
    /// Last test to run.
    #[arg(short = 'e', long, value_name = "TEST", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=5))]
    pub(crate) last_test: u8,
    /// Seconds for which a test repeats.
    #[arg(short = 'l', long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub(crate) seconds: u32,
    /// Slots of the area; -1: 32763.
    ///
    /// It is divided into so many; -1: the maximum.
    #[arg(short = 's', long, value_name = "N", default_value = "1024", value_parser = slots)]
    pub(crate) slots: u32,
    /// Seconds to wait for one step.
    ///
    /// Of a test, by the guest.
    #[arg(short = 't', long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub(crate) timeout: u32,
    /// Extra checks, for which tests take longer.
    ///
    /// Check every page instead of the first and the last; check that discarded contents are gone;
    /// leave a moved slot in place until the guest has accessed it.
    #[arg(short = 'd', long)]
    pub(crate) extra_checks: bool,
    /// Print more about each run.
    #[arg(short = 'v', long)]
    pub(crate) verbose: bool,
    /// Lock.
    ///
    /// What the engine takes on the VM; `all` compares the three in one table.
    #[arg(long, value_enum, default_value_t = LockArg::None)]
    pub(crate) lock: LockArg,
    /// Format of the second-stage tables.
    #[arg(long, value_enum, default_value_t = FormatArg::Npt)]
    pub(crate) format: FormatArg,
    /// Runs, of which the best counts.
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1, value_parser = positive::<u32>)]
    pub(crate) runs: u32,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

/// A number of slots, or -1 for the most.
fn slots(text: &str) -> Result<u32, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(MAX_AREA_SLOTS),
        Ok(number) => match u32::try_from(number) {
            Ok(slots) if (1..=MAX_AREA_SLOTS).contains(&slots) => Ok(slots),
            _ => Err(format!("must be -1 or from 1 to {MAX_AREA_SLOTS}")),
        },
        Err(error) => Err(error.to_string()),
    }
}

/// The runs of one test with one locking.
struct Series {
    test: Test,
    locking: Locking,
    runs: Vec<Run>,
}

impl Series {
    /// The run with the shortest iterations.
    fn best(&self) -> Option<&Run> {
        self.runs.iter().min_by(|one, other| one.iteration_s().total_cmp(&other.iteration_s()))
    }

    /// The shortest setup of the slots.
    fn best_setup(&self) -> Duration {
        self.runs.iter().map(|run| run.setup).min().unwrap_or_default()
    }
}

/// Runs the experiment.
pub(crate) fn run(args: &MemslotsArgs, session: &Session) -> Result<Outcome, Failure> {
    let tests = selected_tests(args)?;
    let lockings = args.lock.lockings();
    let outcome = |all: &[Series]| {
        let measured: Vec<&Series> = all.iter().filter(|series| !series.runs.is_empty()).collect();
        Outcome::new(&report::results(args, &measured), |out| report::print(out, args, &measured))
    };
    let progress = session.progress(tests.len() as u64 * u64::from(args.runs) * lockings.len() as u64);
    let mut all = Vec::new();
    for &test in tests {
        let first = all.len();
        all.extend(lockings.iter().map(|&locking| Series { test, locking, runs: Vec::new() }));
        for run in 0..args.runs as usize {
            for turn in 0..lockings.len() {
                // Each run begins with another locking, so that no locking has the advantage of
                // being first or last.
                let series = &mut all[first + (run + turn) % lockings.len()];
                progress.begin(format!("{}, lock {}", test.name(), locking_name(series.locking)));
                series
                    .runs
                    .push(with_format!(args.format, F => experiments::run::<F>(args, test, series.locking, session)?));
                progress.step();
                session.so_far(outcome(&all)?);
            }
        }
    }
    drop(progress);
    outcome(&all)
}

fn selected_tests(args: &MemslotsArgs) -> Result<&'static [Test], Failure> {
    let (first, last) = (usize::from(args.first_test), usize::from(args.last_test));
    let Some(tests) = Test::ALL.get(first..=last).filter(|tests| !tests.is_empty()) else {
        return Err(Failure::Usage(format!(
            "the first test, {first}, comes after the last, {last}; choose -f up to -e"
        )));
    };
    if tests.contains(&Test::MoveInactive) && args.slots < 2 {
        return Err(Failure::Usage(
            "test 4, move inactive area, needs at least 2 slots; choose more (-s), or -e 3".to_owned(),
        ));
    }
    Ok(tests)
}
