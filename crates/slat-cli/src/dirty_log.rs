//! `slat dirty-log`: the five phases of a dirty-logging migration, as KVM's dirty_log_perf_test times them, for each
//! locking: populate memory, enable dirty logging, dirty memory and get the log (several rounds), disable.
//!
//! Runs of the lockings are interleaved, and each run has a machine of its own. What the guest reads is verified as it
//! runs, and once more at the end; with `--check` every harvest is held against memory (`oracle`).

mod oracle;
mod report;

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use slat::{Config, Ept, Locking, MemoryRegionFlags, Npt, Stats};
use slat_machine::commit::FlushMethod;
use slat_machine::cpu::Paging;
use slat_machine::guest::{Order, Program, Sharing};
use slat_machine::machine::{Machine, MachineConfig, MachineError, Pins};
use slat_machine::walk::HardwareFormat;

use crate::args::{DirtyLogArgs, FormatArg, PagingArg, locking_name};
use crate::failure::Failure;
use crate::results::{self, ResultsFile};

/// The round that populating writes; dirty rounds follow.
const POPULATE_ROUND: u64 = 1;

/// What one run of the five phases showed.
pub(crate) struct Run {
    pub(crate) populate: Duration,
    pub(crate) enable: Duration,
    /// One for each round.
    pub(crate) dirty: Vec<Duration>,
    /// One for each round.
    pub(crate) get: Vec<Duration>,
    pub(crate) disable: Duration,
    /// The engine's counters after the last phase.
    pub(crate) stats: Stats,
    /// Reads that found what they should.
    pub(crate) nr_verified: u64,
    pub(crate) flush_method: FlushMethod,
}

/// The runs of one locking.
pub(crate) struct Series {
    pub(crate) locking: Locking,
    pub(crate) runs: Vec<Run>,
}

/// Runs the experiment and prints it.
pub(crate) fn run(args: &DirtyLogArgs) -> Result<(), Failure> {
    let config = machine_config(args)?;
    let file = args.json.as_deref().map(ResultsFile::open).transpose()?;
    let series = measure(args, &config)?;
    results::deliver(file, || report::results(args, &series), |out| report::print(out, args, &series))
}

/// All runs, interleaved, in the order of the lockings.
fn measure(args: &DirtyLogArgs, config: &MachineConfig) -> Result<Vec<Series>, Failure> {
    let lockings = args.lock.lockings();
    let mut series: Vec<Series> = lockings.iter().map(|&locking| Series { locking, runs: Vec::new() }).collect();
    let progress = ProgressBar::new(u64::from(args.runs) * lockings.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} run {pos}/{len}  {msg}  {elapsed}") {
        progress.set_style(style);
    }
    for run in 0..args.runs as usize {
        for turn in 0..lockings.len() {
            // Each run begins with another locking: whoever comes first or last has no advantage.
            let which = (run + turn) % lockings.len();
            let config = MachineConfig { engine: Config::with_locking(lockings[which]), ..config.clone() };
            progress.set_message(format!("lock {}", locking_name(lockings[which])));
            let figures = match args.format {
                FormatArg::Npt => run_once::<Npt>(args, &config)?,
                FormatArg::Ept => run_once::<Ept>(args, &config)?,
            };
            series[which].runs.push(figures);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(series)
}

fn machine_config(args: &DirtyLogArgs) -> Result<MachineConfig, Failure> {
    let pins = match &args.pin {
        None => None,
        Some(cpus) => Some(pins(cpus, args.vcpus)?),
    };
    let nr_slots =
        u32::try_from(args.slots).map_err(|_| Failure::Usage(format!("{} slots are too many", args.slots)))?;
    Ok(MachineConfig {
        nr_vcpus: args.vcpus,
        bytes_per_vcpu: args.bytes,
        nr_slots,
        backing: args.backing,
        paging: match args.paging {
            PagingArg::Flat => Paging::Off,
            PagingArg::TwoDimensional => Paging::TwoDimensional,
        },
        pins,
        ..MachineConfig::default()
    })
}

/// A CPU for each vCPU, and perhaps one more for the main thread.
fn pins(cpus: &[u32], nr_vcpus: usize) -> Result<Pins, Failure> {
    let (vcpus, main) = match cpus.len().checked_sub(nr_vcpus) {
        Some(0) => (cpus, None),
        Some(1) => (&cpus[..nr_vcpus], Some(cpus[nr_vcpus])),
        _ => {
            return Err(Failure::Usage(format!(
                "{} CPUs to pin to: {nr_vcpus} vCPUs need {nr_vcpus}, or one more for the main thread",
                cpus.len()
            )));
        }
    };
    Ok(Pins { vcpus: vcpus.to_vec(), main })
}

fn run_once<F: HardwareFormat>(args: &DirtyLogArgs, config: &MachineConfig) -> Result<Run, Failure> {
    let machine = Machine::<F>::new(config)?;
    let sharing = if args.overlap { Sharing::Overlapping } else { Sharing::Partitioned };
    let populate = Program { sharing, seed: args.seed, round: POPULATE_ROUND, ..Program::default() };
    let mut dirty = Program {
        order: if args.random_access { Order::Random } else { Order::Sequential },
        write_percent: args.write_percent,
        oldest_round: POPULATE_ROUND,
        ..populate
    };
    let mut bitmaps: Vec<Vec<u64>> =
        machine.slots().iter().map(|slot| vec![0; slot.nr_pages.div_ceil(64) as usize]).collect();
    let mut nr_verified = 0;

    let populate = machine.run(populate)?.wall;
    let enable = timed(|| machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES))?;
    let (mut dirty_times, mut get_times) = (Vec::new(), Vec::new());
    for _ in 0..args.iterations {
        dirty.round += 1;
        let report = machine.run(dirty)?;
        dirty_times.push(report.wall);
        nr_verified += report.total().nr_reads;
        get_times.push(timed(|| get_dirty_logs(&machine, &mut bitmaps))?);
        if args.check {
            oracle::check_stopped(&machine, &bitmaps, dirty.round)?;
        }
    }
    if args.check {
        dirty.round = oracle::check_running(&machine, &mut bitmaps, dirty)?;
    }
    let running = if args.run_while_disabling { Some(machine.start(dirty)?) } else { None };
    let disable = timed(|| machine.set_region_flags(MemoryRegionFlags::empty()))?;
    if let Some(running) = running {
        nr_verified += running.stop()?.total().nr_reads;
    }
    let stats = machine.vm().stats();

    // A pass that wrote every page of a part in order left this very round in each.
    let wrote_all = args.write_percent == 100 && !args.random_access && !args.check;
    let oldest_round = if wrote_all { dirty.round } else { POPULATE_ROUND };
    let verify = Program { order: Order::Sequential, write_percent: 0, oldest_round, ..dirty };
    nr_verified += machine.run(verify)?.total().nr_reads;
    Ok(Run {
        populate,
        enable,
        dirty: dirty_times,
        get: get_times,
        disable,
        stats,
        nr_verified,
        flush_method: machine.flush_method(),
    })
}

/// How long `action` takes.
fn timed(action: impl FnOnce() -> Result<(), MachineError>) -> Result<Duration, MachineError> {
    let begin = Instant::now();
    action()?;
    Ok(begin.elapsed())
}

/// Gets (and clears) the logs of all slots.
fn get_dirty_logs<F: HardwareFormat>(machine: &Machine<F>, bitmaps: &mut [Vec<u64>]) -> Result<(), MachineError> {
    for (slot, bitmap) in machine.slots().iter().zip(bitmaps) {
        machine.vm().get_dirty_log(slot.id, bitmap)?;
    }
    Ok(())
}
