//! `slat memslots`: how fast memory is mapped, unmapped and moved while a vCPU runs and there are
//! many memslots, as KVM's memslot_perf_test measures it.
//!
//! Each run of a test has a new machine: an area of 512 MiB and 64 KiB, split evenly into memslots,
//! and one vCPU. A test repeats its iteration until its time is over; guest and host verify what
//! the other has written in it.

mod area;
mod experiments;
mod figures;
mod guest;

use std::time::Duration;

use clap::{Args, ValueEnum};
use slat::baselines::Locking;

use crate::columns::{Column, in_turns};
use crate::failure::{Failure, ensure};
use crate::options::{Named, OutputArgs, TablesArgs, ValueName, duration, positive, with_format};
use crate::results::Outcome;
use crate::session::Session;
use area::MAX_AREA_SLOTS;
use experiments::{Run, Test};

#[derive(Clone, Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Tests: 0 map, 1 unmap, 2 unmap chunked, 3 move active area, 4 move inactive area, 5 RW\n\
                  Example: slat memslots --slots 512 --duration 1s --first-test 0 --last-test 1"
)]
pub(crate) struct MemslotsArgs {
    /// First test to run
    #[arg(long, value_name = "TEST", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=5))]
    first_test: u8,
    /// Last test to run
    #[arg(long, value_name = "TEST", default_value_t = 5, value_parser = clap::value_parser!(u8).range(0..=5))]
    last_test: u8,
    /// How long to run, e.g. 10s
    ///
    /// A test repeats its iteration for so long.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    duration: Duration,
    /// Slots that the memory is divided into
    ///
    /// -1: the maximum, 32763.
    #[arg(long, value_name = "N", default_value = "1024", value_parser = slots)]
    slots: u32,
    /// Time after which it counts as failed
    ///
    /// That the guest waits for one step of a test.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration, hide_short_help = true)]
    timeout: Duration,
    /// Extra checks, for which tests take longer
    ///
    /// Check every page instead of the first and the last; check that discarded contents are gone;
    /// leave a moved slot in place until the guest has accessed it.
    #[arg(long)]
    extra_checks: bool,
    /// Print more
    ///
    /// Of each run.
    #[arg(long)]
    verbose: bool,
    #[command(flatten)]
    tables: TablesArgs,
    /// Runs of each measurement
    ///
    /// The best counts, as in KVM's test.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive::<u32>)]
    runs: u32,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
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
type Series = Column<(Test, Locking), Run>;

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

pub(crate) fn run(args: &MemslotsArgs, session: &Session) -> Result<Outcome, Failure> {
    let lockings = &args.tables.lock.values;
    let of_test = |&test: &Test| lockings.iter().map(move |&locking| (test, locking));
    let all: Vec<(Test, Locking)> = selected_tests(args)?.iter().flat_map(of_test).collect();
    let title = |(test, locking): &(Test, Locking)| format!("{}, lock {}", test.name(), locking.name());
    let run = |&(test, locking): &(Test, Locking), _| with_format!(args.tables.format, F => experiments::run::<F>(args, test, locking, session));
    let outcome = |all: &[Series]| {
        let measured: Vec<&Series> = all.iter().filter(|series| !series.runs.is_empty()).collect();
        Outcome::new(figures::results(args, &measured), |out| figures::print(out, args, &measured))
    };
    in_turns(session, all, lockings.len(), args.runs, title, run, outcome)
}

fn selected_tests(args: &MemslotsArgs) -> Result<&'static [Test], Failure> {
    let (first, last) = (usize::from(args.first_test), usize::from(args.last_test));
    let Some(tests) = Test::value_variants().get(first..=last).filter(|tests| !tests.is_empty()) else {
        return Err(Failure::Usage(format!(
            "the first test, {first}, comes after the last, {last}; choose --first-test up to --last-test"
        )));
    };
    ensure!(
        args.slots >= 2 || !tests.contains(&Test::MoveInactive),
        Usage,
        "test 4, move inactive area, needs at least 2 slots; choose more (--slots), or --last-test 3"
    );
    Ok(tests)
}
