//! One run of one case, on a new machine.

use std::time::{Duration, Instant};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use slat::stats::Stats;
use slat::{Config, PAGE_SIZE};
use slat_machine::hardware::commit::FlushMethod;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::paging::Delivery;
use slat_machine::paging::Pattern;
use slat_machine::vm::demand_paging::{
    Copier, DemandPaging, DemandPagingConfig, DemandPagingError, DemandPagingReport, Descriptors, DirtyLogging,
    GuestMemfdOrigin, PagesFrom, PagingMode, VcpuThreads,
};
use slat_machine::vm::guest::Sharing;

use super::case::{Case, Mode, Uffds};
use super::options::{GuestMemfdArg, ResolverArg, UserfaultArgs};
use super::resolver::ResolverProcess;
use super::source::Source;
use crate::columns::Column;
use crate::failure::{Failure, ensure};
use crate::options::with_format;
use crate::phases;
use crate::session::Session;

/// Requests that the background copier has in flight while no vCPU waits.
const COPIER_WINDOW: usize = 16;

/// Rounds of writes with `--log-dirty`: the round in which pages arrive, and one more, which must
/// be logged as a whole again.
const LOGGED_ROUNDS: u64 = 2;

/// The longest life of a resolver that will be killed, from when it is attached.
const LONGEST_LIFE: Duration = Duration::from_millis(20);

pub(super) struct Run {
    /// Pages per second for each vCPU: the pages of one vCPU over the time of all, as in
    /// demand_paging_test.
    pub(super) paging_rate: f64,
    pub(super) total_time: Duration,
    pub(super) pages_per_vcpu: u64,
    pub(super) nr_vcpus: usize,
    /// Of touches of pages, from the first attempt until the vCPU continues. `None`: a resolver was
    /// killed, and the sample lacks the touches that it served.
    pub(super) fault_p50_ns: Option<u64>,
    pub(super) fault_p99_ns: Option<u64>,
    pub(super) nr_exits: u64,
    /// Pages. `None`: only the resolver process knows whether it brought them for vCPUs or by its
    /// copier.
    pub(super) nr_filled_for_faults: Option<u64>,
    /// Pages. `None`: this process had no copier.
    pub(super) nr_filled_by_copier: Option<u64>,
    /// Pages that were verified afterwards.
    pub(super) nr_verified: u64,
    /// Pages that the dirty log reported; `None`: logging was off.
    pub(super) nr_logged: Option<u64>,
    /// Times that the resolver was killed before the vCPUs were done; `None`: it was not to be
    /// killed.
    pub(super) nr_killed: Option<u64>,
    /// Threads that ran the vCPUs.
    pub(super) nr_threads: usize,
    pub(super) guest_memfd: Option<GuestMemfdOrigin>,
    pub(super) engine: Stats,
    pub(super) flush_method: FlushMethod,
}

pub(super) type Measured = Column<Case, Run>;

pub(super) fn once(args: &UserfaultArgs, case: &Case, source: &Source, session: &Session) -> Result<Run, Failure> {
    with_format!(args.format, F => on::<F>(args, case, source, session))
}

fn on<F: HardwareFormat>(
    args: &UserfaultArgs,
    case: &Case,
    source: &Source,
    session: &Session,
) -> Result<Run, Failure> {
    let config = config(args, case, source.contents)?;
    let mut paging = DemandPaging::<F>::new(&config)?;
    let _watched = session.watch(paging.vm());
    if args.guest_memfd == GuestMemfdArg::Kvm {
        check_guest_memfd(&paging)?;
    }
    let Paged { report, total_time, nr_logged, nr_killed } = match (case.mode, args.resolver) {
        (Mode::None, _) => page(&mut paging, PagesFrom::None, &config)?,
        (Mode::Ring, ResolverArg::Process) => page_elsewhere(&mut paging, &config, args, source)?,
        _ => page(&mut paging, PagesFrom::Source(source.open.clone()), &config)?,
    };
    let nr_verified = paging.verify()?;
    ensure!(nr_verified == paging.nr_pages(), Check, "{nr_verified} of {} pages are there", paging.nr_pages());
    let has_copier_elsewhere = args.copier && case.mode == Mode::Ring;
    let block_pages = args.granularity().size_bytes() / PAGE_SIZE;
    Ok(Run {
        paging_rate: report.pages_per_vcpu as f64 / total_time.as_secs_f64().max(f64::MIN_POSITIVE),
        total_time,
        pages_per_vcpu: report.pages_per_vcpu,
        nr_vcpus: case.nr_vcpus,
        fault_p50_ns: (nr_killed == 0).then_some(report.fault_p50_ns),
        fault_p99_ns: (nr_killed == 0).then_some(report.fault_p99_ns),
        // The engine's count includes runs that were interrupted.
        nr_exits: report.engine.userfaults,
        nr_filled_for_faults: (!has_copier_elsewhere).then_some(report.nr_filled_for_faults * block_pages),
        nr_filled_by_copier: (args.copier && !has_copier_elsewhere).then_some(report.nr_filled_by_copier * block_pages),
        nr_verified,
        nr_logged,
        nr_killed: (args.kill_resolver > 0).then_some(nr_killed.into()),
        nr_threads: report.nr_threads,
        guest_memfd: report.guest_memfd,
        engine: report.engine,
        flush_method: paging.vm().host().flush_domain().method(),
    })
}

/// The result of a run of the machine.
struct Paged {
    report: DemandPagingReport,
    total_time: Duration,
    nr_logged: Option<u64>,
    nr_killed: u32,
}

/// Runs the vCPUs, which touch all pages, and compares the dirty log with the writes if there is
/// one.
fn page<F: HardwareFormat>(
    paging: &mut DemandPaging<F>,
    resolver: PagesFrom,
    config: &DemandPagingConfig,
) -> Result<Paged, DemandPagingError> {
    let (report, nr_logged) = match config.dirty_logging {
        DirtyLogging::Off => (paging.run(resolver)?, None),
        DirtyLogging::On => {
            let rounds = paging.check_dirty_log(resolver, LOGGED_ROUNDS)?;
            (rounds.paging, Some(rounds.nr_reported))
        }
    };
    Ok(Paged { total_time: report.wall, report, nr_logged, nr_killed: 0 })
}

/// As `page`, with a resolver in another process.
fn page_elsewhere<F: HardwareFormat>(
    paging: &mut DemandPaging<F>,
    config: &DemandPagingConfig,
    args: &UserfaultArgs,
    source: &Source,
) -> Result<Paged, Failure> {
    let begin = Instant::now();
    let mut nr_killed = 0;
    let mut random = SmallRng::seed_from_u64(args.seed);
    loop {
        let mut process = attach(paging, config, source)?;
        let (paged, was_killed) = if nr_killed < args.kill_resolver {
            let delay = random.random_range(Duration::ZERO..LONGEST_LIFE);
            process.kill_during(delay, || page(paging, PagesFrom::Elsewhere, config))
        } else {
            (page(paging, PagesFrom::Elsewhere, config), false)
        };
        nr_killed += u32::from(was_killed);
        match paged {
            Err(DemandPagingError::Vcpus { .. }) if was_killed => {}
            paged => {
                let elapsed = begin.elapsed();
                paging.delivery().into_iter().for_each(Delivery::detach);
                // A killed resolver has no error to report.
                let paged = if was_killed { paged? } else { end(process, paged)? };
                // The time includes the runs before the last.
                let total_time = if nr_killed > 0 { elapsed } else { paged.total_time };
                return Ok(Paged { total_time, nr_killed, ..paged });
            }
        }
    }
}

/// Ends a resolver that was detached. The resolver's error is the cause of the vCPUs' errors, if it
/// has one.
fn end(process: ResolverProcess, paged: Result<Paged, DemandPagingError>) -> Result<Paged, Failure> {
    match paged {
        Ok(paged) => process.finish().map(|()| paged),
        Err(error) => Err(process.failure().unwrap_or_else(|| error.into())),
    }
}

/// Starts a resolver process, and attaches it.
fn attach<F: HardwareFormat>(
    paging: &DemandPaging<F>,
    config: &DemandPagingConfig,
    source: &Source,
) -> Result<ResolverProcess, Failure> {
    let no_rings = || Failure::CannotServe("there are no rings for a resolver; use --delivery ring".to_owned());
    let delivery = paging.delivery().ok_or_else(no_rings)?;
    let (process, socket) = ResolverProcess::start(source, config.copier)?;
    if let Err(error) = delivery.attach(socket) {
        process.finish()?;
        return Err(Failure::CannotServe(format!(
            "the resolver process cannot be attached: {error}; use --resolver thread"
        )));
    }
    Ok(process)
}

fn check_guest_memfd<F: HardwareFormat>(paging: &DemandPaging<F>) -> Result<(), Failure> {
    use slat_machine::memory::guest_memfd::Origin;
    match paging.guest_memfd().map(|memory| memory.origin()) {
        Some(Origin::Kvm) => Ok(()),
        Some(Origin::Memfd { why }) => Err(Failure::CannotServe(format!(
            "there is no guest_memfd: {why}; leave --guest-memfd kvm out to use a memory file"
        ))),
        None => Err(Failure::Usage("--guest-memfd kvm needs -s guest_memfd; add it".to_owned())),
    }
}

/// Checks `case` before the first run.
pub(super) fn check(args: &UserfaultArgs, case: &Case) -> Result<(), Failure> {
    // The check does not depend on the contents.
    let config = config(args, case, Pattern::Mixed { seed: 0 })?;
    Ok(config.check().map_err(DemandPagingError::from)?)
}

fn config(args: &UserfaultArgs, case: &Case, contents: Pattern) -> Result<DemandPagingConfig, Failure> {
    let pins = args.cpus.as_ref().map(|cpus| phases::pins(cpus, case.nr_vcpus)).transpose()?;
    Ok(DemandPagingConfig {
        nr_vcpus: case.nr_vcpus,
        bytes_per_vcpu: case.bytes_per_vcpu,
        sharing: if args.overlap { Sharing::Overlapping } else { Sharing::Partitioned },
        mode: match case.mode {
            Mode::None => PagingMode::None,
            Mode::Missing | Mode::MissingOneReader => PagingMode::Missing,
            Mode::MissingAndExits => PagingMode::MissingUserfault,
            Mode::Minor | Mode::MinorOneReader => PagingMode::Minor,
            Mode::MinorAndExits => PagingMode::MinorUserfault,
            Mode::Exits => PagingMode::Userfault,
            Mode::Ring => PagingMode::UserfaultRing,
        },
        backing: case.backing,
        granularity: args.granularity(),
        contents,
        descriptors: match case.uffds {
            Uffds::One => Descriptors::One,
            Uffds::PerVcpu => Descriptors::OnePerVcpu,
        },
        nr_readers: case.nr_readers,
        vcpu_threads: match pins {
            Some(_) => Some(VcpuThreads::OnePerVcpu),
            None => args.threads.map(VcpuThreads::Few),
        },
        pins,
        copier: args.copier.then_some(Copier { window: COPIER_WINDOW }),
        dirty_logging: if args.log_dirty { DirtyLogging::On } else { DirtyLogging::Off },
        engine: Config::default(),
        ..DemandPagingConfig::default()
    })
}

/// Notes on the runs.
pub(super) fn remarks(args: &UserfaultArgs, measured: &[&Measured]) -> Vec<String> {
    let runs = || measured.iter().flat_map(|measured| &measured.runs);
    let mut remarks = Vec::new();
    if let Some(fewest) = runs().filter_map(|run| run.nr_killed).min()
        && fewest < args.kill_resolver.into()
    {
        remarks.push(format!(
            "A run was over after {fewest} of {} resolvers were killed: with more memory, or a delay, it lasts longer.",
            args.kill_resolver
        ));
    }
    let mut in_turns: Vec<String> = Vec::new();
    for Column { of: case, runs } in measured {
        if let Some(run) = runs.iter().find(|run| run.nr_threads < case.nr_vcpus) {
            let text = format!("{} ({} vCPUs by {} threads)", case.mode, case.nr_vcpus, run.nr_threads);
            if !in_turns.contains(&text) {
                in_turns.push(text);
            }
        }
    }
    if !in_turns.is_empty() {
        let modes = in_turns.join(", ");
        remarks.push(format!(
            "Each vCPU has its own thread, except where fewer threads ran them in turns: {modes}. See --threads."
        ));
    }
    if let Some(why) = runs().find_map(|run| match &run.guest_memfd {
        Some(GuestMemfdOrigin::Memfd { why }) => Some(why),
        _ => None,
    }) {
        remarks.push(format!("guest_memfd: a memory file replaces it: {why}."));
    }
    remarks
}
