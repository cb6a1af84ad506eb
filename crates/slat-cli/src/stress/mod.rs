//! `slat stress`: all operations at once, on overcommitted CPUs, with everything verified.
//!
//! # Implementation
//! - A run is a sequence of *turns*. Each turn has a new machine with another locking, format and
//!   access tracking, so that one run covers all. Dirty tracking, log clearing and huge-page
//!   splitting are drawn for each. In a turn, guests run and verify in bursts (`turn`). Other
//!   threads change all that may change (`operators`). Between two bursts the dirty logs are
//!   compared with memory (`logs`).
//! - Each thread has its own generator, seeded from the seed, the turn and the thread's number. So
//!   the same seed makes the same sequence of operations in each thread. The scheduler decides how
//!   they interleave.
//! - The main thread does no operations. It checks that all threads make progress (`watch`), and
//!   reports one that does not, so the command ends whatever hangs.

mod figures;
mod logs;
mod operators;
mod tally;
mod turn;
mod watch;

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::baselines::Locking;
use slat::dirty::{DirtyTracking, ManualProtect};
use slat::tables::AccessTracking;
use slat_machine::hardware::commit::FlushMethod;
use slat_machine::hardware::cpu::Paging;
use slat_machine::hardware::walk::Marks;

use crate::failure::{Failure, check_failed, no_thread};
use crate::live::lock;
use crate::options::{
    ACCESS_TRACKING, DURATION, FormatArg, LOCK, Named, OneOrAll, OutputArgs, SEED, SplitWhen, VCPUS, ValueName,
    duration, one_or_all, positive, protection_name, with_format,
};
use crate::results::Outcome;
use crate::session::Session;
use tally::Tally;
use watch::Watch;

/// The options of `slat stress`. Those that are not chosen alternate by turn.
#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true, after_help = "Example: slat stress --duration 60s -v 64 --seed 7")]
pub(crate) struct StressArgs {
    #[arg(short, long, value_name = "N", default_value_t = 8, value_parser = positive::<usize>, help = VCPUS)]
    vcpus: usize,
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration, help = DURATION)]
    duration: Duration,
    #[arg(long, value_name = "HOW", default_value = "both", value_parser = one_or_all::<AccessTracking>(Some("both")), help = ACCESS_TRACKING)]
    access_tracking: OneOrAll<AccessTracking>,
    /// Print more
    ///
    /// The plan of each turn. The seed determines it.
    #[arg(long)]
    verbose: bool,
    #[arg(long, value_name = "LOCK", default_value = "all", value_parser = one_or_all::<Locking>(Some("all")), help = LOCK)]
    lock: OneOrAll<Locking>,
    /// Format of the second-stage tables
    ///
    /// By default all, alternating by turn.
    #[arg(long, value_name = "FORMAT", value_enum)]
    format: Option<FormatArg>,
    #[arg(long, value_name = "N", default_value_t = 1, help = SEED)]
    seed: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// The shortest turn, except the last: each turn makes a machine.
const MIN_TURN: Duration = Duration::from_millis(100);
const MAX_TURN: Duration = Duration::from_secs(3);

/// Pages of a turn at most, unless there are very many vCPUs.
const MANY_PAGES: u64 = 4096;

/// How often the main thread checks all threads.
const WATCH_PERIOD: Duration = Duration::from_millis(500);

/// The configuration of a turn.
#[derive(Clone, Copy, Debug)]
struct Plan {
    number: u64,
    seed: u64,
    format: FormatArg,
    locking: Locking,
    tracking: AccessTracking,
    dirty_tracking: DirtyTracking,
    manual_protect: ManualProtect,
    splitting: SplitWhen,
    paging: Paging,
    nr_vcpus: usize,
    pages_per_vcpu: u64,
    nr_slots: u32,
    /// Who sets A and D, on Arm and RISC-V.
    marks: Marks,
}

impl Plan {
    fn rng(&self, thread: u64) -> SmallRng {
        // The generator mixes its seed well; this only has to differ for all threads of all turns.
        SmallRng::seed_from_u64(self.seed ^ self.number.rotate_left(32) ^ thread.rotate_left(48))
    }

    /// Whether the CPUs leave A and D to faults.
    fn sets_no_marks(&self) -> bool {
        self.marks == Marks::ByFaults && !matches!(self.format, FormatArg::Npt | FormatArg::Ept)
    }

    fn describe(&self) -> String {
        format!(
            "turn {}: {}, lock {}, tracking {}, dirty pages {}{}, manual protect {}, splits {}, {}, {} vCPUs of {} pages, {} slots{}",
            self.number,
            self.format.name(),
            self.locking.name(),
            self.tracking.name(),
            self.dirty_tracking.name(),
            protection_name(self.dirty_tracking).map(|name| format!(" ({name})")).unwrap_or_default(),
            self.manual_protect.name(),
            self.splitting.name(),
            if self.paging == Paging::Off { "flat" } else { "2d" },
            self.nr_vcpus,
            self.pages_per_vcpu,
            self.nr_slots,
            if self.sets_no_marks() { ", A and D by faults" } else { "" }
        )
    }
}

/// The counts and plans of a run.
struct Summary {
    begin: Instant,
    tally: Arc<Tally>,
    turns: Mutex<Turns>,
}

#[derive(Default)]
struct Turns {
    plans: Vec<String>,
    flush_method: Option<FlushMethod>,
}

impl Default for Summary {
    fn default() -> Summary {
        Summary { begin: Instant::now(), tally: Arc::default(), turns: Mutex::default() }
    }
}

/// Runs the experiment: another thread does all turns, and this one watches.
pub(crate) fn run(args: &StressArgs, session: &Session) -> Result<Outcome, Failure> {
    let (watch, summary) = (Arc::new(Watch::default()), Arc::new(Summary::default()));
    let (sender, receiver) = mpsc::channel();
    let turns = {
        let (args, watch, summary) = (args.clone(), Arc::clone(&watch), Arc::clone(&summary));
        let session = session.clone();
        // The receiver may be gone.
        move || drop(sender.send(all_turns(&args, &watch, &summary, &session)))
    };
    let outcome = || Outcome::new(figures::results(args, &summary), |out| figures::print(out, args, &summary));
    thread::Builder::new().name("turns".to_owned()).spawn(turns).map_err(|error| no_thread(&error))?;
    loop {
        match receiver.recv_timeout(WATCH_PERIOD) {
            Ok(result) => return result.map(|()| outcome()),
            Err(RecvTimeoutError::Timeout) => {
                watch
                    .look(Instant::now())
                    .map_err(|stuck| check_failed(format_args!("{stuck}, seed {}", args.seed)))?;
                session.so_far(outcome());
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(check_failed(format_args!("the thread of the turns panicked, seed {}", args.seed)));
            }
        }
    }
}

/// All combinations, chosen or alternating.
fn combinations(args: &StressArgs) -> Vec<(Locking, FormatArg, AccessTracking)> {
    let formats = args.format.map_or(FormatArg::value_variants().to_vec(), |format| vec![format]);
    let mut combinations = Vec::new();
    for &tracking in &args.access_tracking.values {
        for &format in &formats {
            combinations.extend(args.lock.values.iter().map(|&locking| (locking, format, tracking)));
        }
    }
    combinations
}

/// A dirty tracking that fits the format and the access tracking. Half of the time it is write
/// protection, the only one that fits all.
fn some_dirty_tracking(format: FormatArg, tracking: AccessTracking, rng: &mut SmallRng) -> DirtyTracking {
    match (rng.random_range(0..4), tracking, format) {
        (0, AccessTracking::AccessedBit, format) if format.has_dirty_bit() => DirtyTracking::DirtyBit,
        (1, AccessTracking::AccessedBit, format) if format.has_modification_log() => DirtyTracking::PageModificationLog,
        (2, ..) => DirtyTracking::WriteProtectLeaves,
        _ => DirtyTracking::WriteProtect,
    }
}

fn all_turns(args: &StressArgs, watch: &Watch, summary: &Summary, session: &Session) -> Result<(), Failure> {
    let seconds = args.duration;
    let deadline = summary.begin + seconds;
    let combinations = combinations(args);
    let turn = (seconds / combinations.len() as u32).clamp(MIN_TURN, MAX_TURN);
    let mut rng = SmallRng::seed_from_u64(args.seed);
    for (number, &(locking, format, tracking)) in combinations.iter().cycle().enumerate() {
        if Instant::now() >= deadline {
            break;
        }
        let plan = Plan {
            number: number as u64,
            seed: args.seed,
            format,
            locking,
            tracking,
            dirty_tracking: some_dirty_tracking(format, tracking, &mut rng),
            manual_protect: [ManualProtect::Disabled, ManualProtect::Enabled, ManualProtect::InitiallySet]
                [rng.random_range(0..3)],
            splitting: [SplitWhen::Eager, SplitWhen::Lazy][rng.random_range(0..2)],
            paging: if rng.random_range(0..3) == 0 { Paging::TwoDimensional } else { Paging::Off },
            nr_vcpus: args.vcpus,
            // From few pages, where all operations contend, to so many that TLBs keep translations
            // for long and page-table pages are full, which lazy protection needs.
            pages_per_vcpu: (4 << rng.random_range(0..8)).min((MANY_PAGES / args.vcpus as u64).max(64)),
            nr_slots: 1 << rng.random_range(0..3),
            // The formats in which CPUs differ.
            marks: [Marks::ByHardware, Marks::ByFaults][rng.random_range(0..2)],
        };
        let end = deadline.min(Instant::now() + turn);
        let result = with_format!(format, F => turn::run::<F>(&plan, end, &summary.tally, watch, session));
        let flush_method = result.map_err(|failure| in_turn(failure, &plan))?;
        let mut turns = lock(&summary.turns);
        turns.flush_method = Some(flush_method);
        turns.plans.push(plan.describe());
    }
    Ok(())
}

/// A failed check, with what reproduces it.
fn in_turn(failure: Failure, plan: &Plan) -> Failure {
    match failure {
        Failure::Check(what) => Failure::Check(format!("{what} ({}, seed {})", plan.describe(), plan.seed)),
        other => other,
    }
}
