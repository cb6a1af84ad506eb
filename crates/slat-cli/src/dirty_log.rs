//! `slat dirty-log`: the phases of a dirty-logging migration, as KVM's dirty_log_perf_test times them, for each
//! locking: populate memory, enable dirty logging, dirty memory, get the log and clear it (several rounds), disable. With
//! `--get-clears` there is no phase of clearing. Rings are collected while memory is dirtied (`logs`).
//!
//! Runs of the lockings are interleaved, and each run has a machine of its own. What the guest reads is verified as it
//! runs, and once more at the end; with `--check` every harvest is held against memory (`oracle`).

mod logs;
mod oracle;
mod report;

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use slat::{Config, Ept, Locking, ManualProtect, MemoryRegionFlags, Npt, Stats};
use slat_machine::commit::FlushMethod;
use slat_machine::cpu::Paging;
use slat_machine::guest::{Order, Program, Sharing};
use slat_machine::machine::{Machine, MachineConfig, MachineError, Pins};
use slat_machine::walk::HardwareFormat;

use crate::args::{DirtyLogArgs, DirtyTrackingArg, FormatArg, HugePagesArg, PagingArg, dirty_tracking, locking_name};
use crate::failure::Failure;
use crate::results::{self, ResultsFile};
use logs::{Form, Logs};
use oracle::{Again, Besides};

/// The round that populating writes; dirty rounds follow.
const POPULATE_ROUND: u64 = 1;

/// What one run of the phases showed.
pub(crate) struct Run {
    pub(crate) populate: Duration,
    pub(crate) enable: Duration,
    /// One for each round.
    pub(crate) dirty: Vec<Duration>,
    /// One for each round.
    pub(crate) get: Vec<Duration>,
    /// One for each round, unless getting clears.
    pub(crate) clear: Vec<Duration>,
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
            let mut config = config.clone();
            config.engine.locking = lockings[which];
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
    if args.tracking == DirtyTrackingArg::Pml && args.format != FormatArg::Ept {
        return Err(Failure::Usage(format!(
            "--tracking pml needs --format ept: there is no page-modification logging with {} tables",
            args.format.name()
        )));
    }
    if args.tracking == DirtyTrackingArg::Ring && args.huge_pages == HugePagesArg::MarkWhole {
        return Err(Failure::Usage("--tracking ring needs --huge-pages split: rings name pages of 4 KiB".to_owned()));
    }
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
        engine: Config::default()
            .with_dirty_tracking(dirty_tracking(args.tracking, args.protection))
            .with_manual_protect(manual_protect(args))
            .with_huge_page_logging(args.huge_pages.logging()),
        dirty_ring_entries: (args.tracking == DirtyTrackingArg::Ring).then_some(args.ring_entries),
        paging: match args.paging {
            PagingArg::Flat => Paging::Off,
            PagingArg::TwoDimensional => Paging::TwoDimensional,
        },
        pins,
        ..MachineConfig::default()
    })
}

/// What getting the log does.
fn manual_protect(args: &DirtyLogArgs) -> ManualProtect {
    match args.tracking {
        _ if args.get_clears => ManualProtect::Disabled,
        // Rings are empty when logging begins.
        DirtyTrackingArg::Ring => ManualProtect::Enabled,
        _ => ManualProtect::InitiallySet,
    }
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
    let form = if args.tracking == DirtyTrackingArg::Ring { Form::Rings } else { Form::Bitmaps };
    let mut logs = Logs::new(&machine, form, manual_protect(args));
    let mut nr_verified = 0;

    let populate = machine.run(populate)?.wall;
    let enable = timed(|| machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES))?;
    let (mut dirty_times, mut get_times, mut clear_times) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.iterations {
        dirty.round += 1;
        logs.forget();
        let (report, beside) = logs.collecting(|| machine.run(dirty))?;
        dirty_times.push(report.wall);
        nr_verified += report.total().nr_reads;
        let get = beside.get + timed(|| logs.get())?;
        if args.check {
            let is_first = dirty.round == POPULATE_ROUND + 1;
            let besides = match args.huge_pages {
                _ if is_first && logs.are_set_initially() => Besides::All,
                HugePagesArg::Split => Besides::Nothing,
                HugePagesArg::MarkWhole => Besides::SameHugePage,
            };
            oracle::check_stopped(&machine, logs.bitmaps(), dirty.round, besides)?;
            if logs.are_copied() {
                oracle::check_again(&logs, Again::TheSame)?;
            }
        }
        if logs.are_cleared_apart() {
            get_times.push(get);
            clear_times.push(beside.clear + timed(|| logs.clear())?);
        } else {
            get_times.push(get + beside.clear);
        }
        if args.check {
            oracle::check_again(&logs, Again::Nothing)?;
        }
    }
    if args.check {
        dirty.round = oracle::check_running(&machine, &mut logs, dirty)?;
    }
    let ((disable, nr_reads), _) = logs.collecting(|| {
        let running = if args.run_while_disabling { Some(machine.start(dirty)?) } else { None };
        let disable = timed(|| machine.set_region_flags(MemoryRegionFlags::empty()))?;
        let report = running.map(|running| running.stop()).transpose()?;
        Ok((disable, report.map_or(0, |report| report.total().nr_reads)))
    })?;
    nr_verified += nr_reads;
    let stats = machine.vm().stats();

    // A pass that wrote every page of a part in order left this very round in each.
    let wrote_all = args.write_percent == 100 && !args.random_access && !args.check;
    let oldest_round = if wrote_all { dirty.round } else { POPULATE_ROUND };
    let verify = Program { order: Order::Sequential, write_percent: 0, oldest_round, ..dirty };
    nr_verified += logs.collecting(|| machine.run(verify))?.0.total().nr_reads;
    Ok(Run {
        populate,
        enable,
        dirty: dirty_times,
        get: get_times,
        clear: clear_times,
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
