//! The phases of a dirty-logging migration, as KVM's dirty_log_perf_test times them: populate
//! memory, enable dirty logging, dirty memory, get the log and clear it (several rounds), disable.
//! With `--get-clears` there is no phase of clearing. Rings are collected while memory is dirtied
//! (`logs`).
//!
//! The *columns* are compared. Their runs take turns (`turns`), and each run has a new machine. The
//! guest verifies its reads as it runs, and once more at the end. With `--check` every harvest is
//! compared with memory (`oracle`).

pub(crate) mod figures;
mod logs;
mod options;
mod oracle;

use std::num::NonZeroUsize;
use std::thread;
use std::time::{Duration, Instant};

use slat::dirty::ManualProtect;
use slat::stats::Stats;
use slat::{Config, Gfn, Level, MemoryRegionFlags, NodeId, PageSize};
use slat_machine::hardware::commit::FlushMethod;
use slat_machine::hardware::cpu::Paging;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::numa::{FirstTouch, MemoryPolicy, WalkReads};
use slat_machine::vm::guest::{Order, Program, Sharing};
use slat_machine::vm::machine::{Machine, MachineConfig, MachineError, Pins, shadow_paging};

use crate::columns;
use crate::failure::{Failure, no_thread, refuse};
use crate::options::{
    DirtyTrackingArg, HugePagesArg, PagingArg, ValueName, check_shadow_format, dirty_tracking, with_format,
};
use crate::results::{Labels, Outcome, labels};
use crate::session::Session;
use logs::{Form, Logs};
pub(crate) use options::PhasesArgs;
use oracle::{Again, Besides};

/// The round that populating writes; dirty rounds follow.
pub(crate) const POPULATE_ROUND: u64 = 1;

/// The figures of one run of the phases.
pub(crate) struct Run {
    pub(crate) populate: Duration,
    /// A part of `enable`; `None`: the main thread did not split ahead of time.
    pub(crate) split: Option<Duration>,
    pub(crate) enable: Duration,
    /// One for each round.
    pub(crate) dirty: Vec<Duration>,
    /// One for each round.
    pub(crate) get: Vec<Duration>,
    /// One for each round, unless getting clears.
    pub(crate) clear: Vec<Duration>,
    pub(crate) disable: Duration,
    /// Reads that found what they should.
    pub(crate) nr_verified: u64,
    /// `None`: the run was not the engine's.
    pub(crate) engine: Option<EngineRun>,
}

/// The engine's and its machine's figures of a run.
pub(crate) struct EngineRun {
    /// The engine's counters before the last phase.
    pub(crate) stats_before_disabling: Stats,
    /// And after it.
    pub(crate) stats: Stats,
    /// Shadow tables then.
    pub(crate) nr_shadow_tables: u64,
    pub(crate) dirty_reads: WalkReads,
    /// Page-table pages after the last of these rounds.
    pub(crate) tables_by_node: Vec<(NodeId, u64)>,
    pub(crate) flush_method: FlushMethod,
}

/// What the runs of a column have.
pub(crate) struct Kind {
    pub(crate) title: String,
    pub(crate) labels: Labels,
    /// `None`: the runs are not the engine's.
    pub(crate) machine: Option<MachineConfig>,
}

impl Kind {
    /// With its one label.
    pub(crate) fn new(label: &str, value: &str, title: String, machine: Option<MachineConfig>) -> Kind {
        Kind { title, labels: labels([(label, value.into())]), machine }
    }
}

pub(crate) type Column = columns::Column<Kind, Run>;

/// The threads' nodes and policies. By default each vCPU touches its memory first, and the rest is
/// not set.
#[derive(Clone, Copy, Default)]
pub(crate) struct Roles {
    pub(crate) first_touch: FirstTouch,
    /// The node of the main thread and of the other splitting threads.
    pub(crate) main_node: Option<NodeId>,
    /// The memory policy of these threads.
    pub(crate) policy: Option<MemoryPolicy>,
    /// So many threads, the main one among them, split all huge pages before logging is turned on.
    pub(crate) nr_splitters: Option<NonZeroUsize>,
}

/// Does all runs, in turns; `outcome` makes the experiment's outcome of the columns.
pub(crate) fn measure(
    session: &Session,
    kinds: Vec<Kind>,
    nr_runs: u32,
    run: impl FnMut(&Kind, u32) -> Result<Run, Failure>,
    outcome: impl Fn(&[Column]) -> Outcome,
) -> Result<Outcome, Failure> {
    let nr_columns = kinds.len();
    columns::in_turns(session, kinds, nr_columns, nr_runs, |kind| kind.title.clone(), run, outcome)
}

/// The machine that the options name.
pub(crate) fn machine_config(args: &PhasesArgs) -> Result<MachineConfig, Failure> {
    let (tracking, format) = (args.tracking, args.tables.format);
    let is_shadow = args.paging == PagingArg::Shadow;
    if is_shadow {
        check_shadow_format(format)?;
    }
    refuse([
        (
            tracking == DirtyTrackingArg::Ring && args.huge_pages == HugePagesArg::MarkWhole,
            "--tracking ring needs --huge-pages split: rings name pages of 4 KiB",
        ),
        (
            is_shadow && matches!(tracking, DirtyTrackingArg::DirtyBit | DirtyTrackingArg::Pml),
            &format!(
                "--paging shadow needs --tracking write-protect or ring: without a second stage nothing sets its dirty bits, \
                 for {}",
                tracking.name()
            ),
        ),
        (
            tracking == DirtyTrackingArg::Pml && !format.has_modification_log(),
            &format!(
                "--tracking pml needs --format ept: there is no page-modification logging with {} tables",
                format.name()
            ),
        ),
        (
            tracking == DirtyTrackingArg::DirtyBit && !format.has_dirty_bit(),
            &format!("--tracking dirty-bit needs another --format: CPUs set no dirty bits in {} tables", format.name()),
        ),
        (args.has_entries_without_rings(), "--ring-entries needs --tracking ring; add it"),
    ])?;
    let pins = args.cpus.as_ref().map(|cpus| pins(cpus, args.guest.vcpus)).transpose()?;
    let nr_slots = u32::try_from(args.slots)
        .map_err(|_| Failure::Usage(format!("{} slots are too many; choose fewer (--slots)", args.slots)))?;
    let engine = Config::default()
        .with_dirty_tracking(dirty_tracking(args.tracking, args.protection))
        .with_manual_protect(manual_protect(args))
        .with_huge_page_logging(args.huge_pages.logging(args.split));
    // The machine refuses too much memory.
    let nr_pages = args.guest.bytes.saturating_mul(args.guest.vcpus as u64) >> Gfn::SHIFT;
    Ok(MachineConfig {
        nr_vcpus: args.guest.vcpus,
        bytes_per_vcpu: args.guest.bytes,
        nr_slots,
        backing: args.guest.backing,
        engine,
        shadow: is_shadow.then(|| shadow_paging(nr_pages)),
        dirty_ring_entries: args.ring_entries(),
        paging: match args.paging {
            PagingArg::Flat => Paging::Off,
            PagingArg::TwoDimensional | PagingArg::Shadow => Paging::TwoDimensional,
        },
        pins,
        ..MachineConfig::default()
    })
}

/// Whether getting the log clears it.
pub(crate) fn manual_protect(args: &PhasesArgs) -> ManualProtect {
    match args.tracking {
        _ if args.get_clears => ManualProtect::Disabled,
        // Rings are empty when logging begins.
        DirtyTrackingArg::Ring => ManualProtect::Enabled,
        _ => ManualProtect::InitiallySet,
    }
}

/// A CPU for each vCPU, and perhaps one more for the main thread.
pub(crate) fn pins(cpus: &[u32], nr_vcpus: usize) -> Result<Pins, Failure> {
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

/// Runs the phases once, on a new machine.
pub(crate) fn run_once(
    args: &PhasesArgs,
    config: &MachineConfig,
    roles: Roles,
    session: &Session,
) -> Result<Run, Failure> {
    with_format!(args.tables.format, F => run_on::<F>(args, config, roles, session))
}

fn run_on<F: HardwareFormat>(
    args: &PhasesArgs,
    config: &MachineConfig,
    roles: Roles,
    session: &Session,
) -> Result<Run, Failure> {
    let machine = Machine::<F>::new(config)?;
    let _watched = session.watch(machine.vm());
    place_thread(&machine, roles)?;
    let sharing = if args.guest.overlap { Sharing::Overlapping } else { Sharing::Partitioned };
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

    let populate = machine.populate(populate, roles.first_touch)?.wall;
    let split = match roles.nr_splitters {
        None => None,
        Some(nr_threads) => Some(timed(|| split_all(&machine, args.huge_pages, roles, nr_threads))?),
    };
    let enable = split.unwrap_or_default() + timed(|| machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES))?;
    let (mut dirty_times, mut get_times, mut clear_times) = (Vec::new(), Vec::new(), Vec::new());
    let mut dirty_reads = WalkReads::default();
    for _ in 0..args.iterations {
        dirty.round += 1;
        logs.forget();
        let (report, collected) = logs.collecting(|| machine.run(dirty))?;
        dirty_times.push(report.wall);
        let total = report.total();
        dirty_reads = dirty_reads + total.walk_reads;
        nr_verified += total.nr_reads;
        let get = collected.get + timed(|| logs.get())?;
        if args.check {
            let is_first = dirty.round == POPULATE_ROUND + 1;
            let besides = match args.huge_pages {
                _ if is_first && logs.are_set_initially() => Besides::All,
                HugePagesArg::Split => Besides::Nothing,
                HugePagesArg::MarkWhole => Besides::SameHugePage,
            };
            oracle::check_stopped(&machine, &logs.bitmaps, dirty.round, besides)?;
            if logs.are_copied() {
                oracle::check_again(&logs, Again::TheSame)?;
            }
        }
        if logs.are_cleared_apart() {
            get_times.push(get);
            clear_times.push(collected.clear + timed(|| logs.clear())?);
        } else {
            get_times.push(get + collected.clear);
        }
        if args.check {
            oracle::check_again(&logs, Again::Nothing)?;
        }
    }
    let tables_by_node = machine.tables_by_node();
    if args.check {
        dirty.round = oracle::check_running(&machine, &mut logs, dirty)?;
    }
    let stats_before_disabling = machine.vm().stats();
    let ((disable, nr_reads), _) = logs.collecting(|| {
        let running = if args.run_while_disabling { Some(machine.start(dirty)?) } else { None };
        let disable = timed(|| machine.set_region_flags(MemoryRegionFlags::empty()))?;
        let report = running.map(|running| running.stop()).transpose()?;
        Ok((disable, report.map_or(0, |report| report.total().nr_reads)))
    })?;
    nr_verified += nr_reads;
    let stats = machine.vm().stats();

    // A pass that wrote every page of a part in order left this round's number in each.
    let wrote_all = args.write_percent == 100 && !args.random_access && !args.check;
    let oldest_round = if wrote_all { dirty.round } else { POPULATE_ROUND };
    let verify = Program { order: Order::Sequential, write_percent: 0, oldest_round, ..dirty };
    nr_verified += logs.collecting(|| machine.run(verify))?.0.total().nr_reads;
    Ok(Run {
        populate,
        split,
        enable,
        dirty: dirty_times,
        get: get_times,
        clear: clear_times,
        disable,
        nr_verified,
        engine: Some(EngineRun {
            stats_before_disabling,
            stats,
            nr_shadow_tables: machine.vm().stats().shadow_pages,
            dirty_reads,
            tables_by_node,
            flush_method: machine.flush_method(),
        }),
    })
}

/// Moves the calling thread to the node of the main one, with its policy.
fn place_thread<F: HardwareFormat>(machine: &Machine<F>, roles: Roles) -> Result<(), MachineError> {
    if let Some(node) = roles.main_node {
        machine.nodes().run_on(node)?;
    }
    if let Some(policy) = roles.policy {
        machine.nodes().set_memory_policy(policy)?;
    }
    Ok(())
}

/// Splits all pages that are too large for the log, by `nr_threads` threads. Each has a part of the
/// region, cut at multiples of 1 GiB if there are enough, else of 2 MiB. All run on the node of the
/// main thread.
fn split_all<F: HardwareFormat>(
    machine: &Machine<F>,
    huge_pages: HugePagesArg,
    roles: Roles,
    nr_threads: NonZeroUsize,
) -> Result<(), Failure> {
    let largest = match huge_pages {
        HugePagesArg::Split => PageSize::Size4K,
        HugePagesArg::MarkWhole => PageSize::Size2M,
    };
    let (nr_pages, nr_threads) = (machine.nr_pages(), nr_threads.get() as u64);
    // The region begins at a multiple of 1 GiB. Two threads in one huge page would split it for
    // each other.
    let grain = [Level::L1G, Level::L2M].map(Level::nr_pages).into_iter().find(|grain| nr_pages / grain >= nr_threads);
    let grain = grain.unwrap_or(Level::L2M.nr_pages());
    let nr_grains = nr_pages.div_ceil(grain);
    let part = |thread: u64| {
        let [start, end] = [thread, thread + 1].map(|edge| (edge * nr_grains / nr_threads * grain).min(nr_pages));
        start..end
    };
    let split = |thread: u64| -> Result<(), Failure> {
        if !part(thread).is_empty() {
            machine.vm().split_range(machine.gfns(part(thread)), largest)?;
        }
        Ok(())
    };
    let placed_split = &|thread| place_thread(machine, roles).map_err(Failure::from).and_then(|()| split(thread));
    thread::scope(|scope| {
        let mut others = Vec::new();
        for thread in 1..nr_threads {
            let other = thread::Builder::new().spawn_scoped(scope, move || placed_split(thread));
            others.push(other.map_err(|error| no_thread(&error))?);
        }
        let mut result = split(0);
        for other in others {
            let theirs = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            result = result.and(theirs);
        }
        result
    })
}

/// How long `action` takes.
pub(crate) fn timed<E>(action: impl FnOnce() -> Result<(), E>) -> Result<Duration, E> {
    let begin = Instant::now();
    action()?;
    Ok(begin.elapsed())
}
