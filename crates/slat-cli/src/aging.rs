//! `slat aging`: the cost of finding out which pages a guest uses, as KVM's
//! access_tracking_perf_test measures it: populate memory, write and read it, mark it idle, write
//! it again, mark it idle, read it again.
//!
//! Each phase is checked: marking finds young what was used before, and nothing right after; it
//! flushes nothing. For that reason a few accesses may go unseen: a CPU that still has the
//! translation cached does not set the accessed bit again. KVM allows for a tenth of the pages, and
//! so does this. Where a TLB can hide more (little memory, huge pages), it is a warning by default.

mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use slat::baselines::Locking;
use slat::tables::AccessTracking;
use slat::{Config, Gfn, GfnRange, PageSize};
use slat_machine::commit::FlushMethod;
use slat_machine::guest::{Program, Sharing};
use slat_machine::machine::{Machine, MachineConfig};
use slat_machine::memory::BackingKind;
use slat_machine::tlb::Geometry;
use slat_machine::walk::HardwareFormat;

use crate::args::{FormatArg, LockArg, TrackingArg, locking_name, positive, size_bytes, tracking_name, with_format};
use crate::failure::{Failure, check_failed};
use crate::results::Outcome;
use crate::session::Session;

/// The options of `slat aging`.
#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true, after_help = "Example: slat aging -v 8 -b 64M --tracking accessed-bit")]
pub(crate) struct AgingArgs {
    /// Number of vCPUs.
    #[arg(short = 'v', long, value_name = "N", default_value_t = 4, value_parser = positive::<usize>)]
    pub(crate) vcpus: usize,
    /// Memory for each vCPU.
    ///
    /// In bytes, or with K, M, G or T behind the number; a multiple of the page size.
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "256M", value_parser = size_bytes)]
    pub(crate) bytes: u64,
    /// Kind of memory, e.g. shmem.
    ///
    /// One of anonymous, anonymous_thp, anonymous_hugetlb_2mb, anonymous_hugetlb_1gb, shmem.
    #[arg(short = 's', long, value_name = "KIND", default_value = "anonymous")]
    pub(crate) backing: BackingKind,
    /// All vCPUs access all memory, instead of a part each.
    #[arg(short = 'o', long)]
    pub(crate) overlap: bool,
    /// Idle pages: 1 warns, 0 fails, -1 decides.
    ///
    /// If more than a tenth of the used pages still count as idle: above 0 warn, 0 fail, below 0
    /// fail unless the TLBs are large enough to hide that many accesses.
    #[arg(short = 'w', long, value_name = "N", default_value_t = -1)]
    pub(crate) warn_idle: i32,
    /// Tracking.
    ///
    /// How accesses are tracked.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = TrackingArg::Both)]
    pub(crate) tracking: TrackingArg,
    /// What a call marks idle.
    ///
    /// A page (which sees a huge page once), or the range of a slot.
    #[arg(long, value_enum, default_value_t = PassArg::Range)]
    pub(crate) pass: PassArg,
    /// Lock.
    ///
    /// What the engine takes on the VM; `all` compares the three in one table.
    #[arg(long, value_enum, default_value_t = LockArg::None)]
    pub(crate) lock: LockArg,
    /// Format of the second-stage tables.
    #[arg(long, value_enum, default_value_t = FormatArg::Npt)]
    pub(crate) format: FormatArg,
    /// Runs of which the mean is taken.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive::<u32>)]
    pub(crate) runs: u32,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PassArg {
    Page,
    Range,
}

impl PassArg {
    fn name(self) -> &'static str {
        match self {
            PassArg::Page => "page",
            PassArg::Range => "range",
        }
    }
}

/// The action of a phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Write,
    Read,
    MarkIdle,
}

/// A phase: its name in results, and the line of KVM's test.
struct Phase {
    name: &'static str,
    title: &'static str,
    action: Action,
}

const PHASES: [Phase; 7] = [
    Phase { name: "populate_memory", title: "Populating memory", action: Action::Write },
    Phase { name: "write_populated_memory", title: "Writing to populated memory", action: Action::Write },
    Phase { name: "read_populated_memory", title: "Reading from populated memory", action: Action::Read },
    Phase { name: "mark_populated_idle", title: "Mark memory idle", action: Action::MarkIdle },
    Phase { name: "write_idle_memory", title: "Writing to idle memory", action: Action::Write },
    Phase { name: "mark_written_idle", title: "Mark memory idle", action: Action::MarkIdle },
    Phase { name: "read_idle_memory", title: "Reading from idle memory", action: Action::Read },
];

/// The figures of one phase of a run.
struct Measured {
    time: Duration,
    /// Pages that were touched (counted for each vCPU), or visited to be marked.
    nr_pages: u64,
    nr_faults: u64,
    nr_flushes: u64,
}

/// Pages that still counted as idle after their use.
struct StillIdle {
    /// The phase that used them.
    used_by: &'static str,
    nr_idle: u64,
}

/// The figures of one run.
struct Run {
    /// One for each of [`PHASES`].
    phases: Vec<Measured>,
    still_idle: Vec<StillIdle>,
    /// Pages of the machine.
    nr_pages: u64,
    /// Reads that found what they should.
    nr_verified: u64,
    flush_method: FlushMethod,
}

/// Whether the idle pages are more than the tenth that KVM allows for.
fn is_too_many(nr_idle: u64, nr_pages: u64) -> bool {
    nr_idle > nr_pages / 10
}

/// The runs of one tracking with one locking.
struct Series {
    tracking: AccessTracking,
    locking: Locking,
    runs: Vec<Run>,
}

/// Runs the experiment: all runs, interleaved.
pub(crate) fn run(args: &AgingArgs, session: &Session) -> Result<Outcome, Failure> {
    let mut all = Vec::new();
    for &locking in args.lock.lockings() {
        all.extend(args.tracking.trackings().iter().map(|&tracking| Series { tracking, locking, runs: Vec::new() }));
    }
    let outcome = |all: &[Series]| {
        let measured: Vec<&Series> = all.iter().filter(|series| !series.runs.is_empty()).collect();
        Outcome::new(&report::results(args, &measured), |out| report::print(out, args, &measured))
    };
    let progress = session.progress(u64::from(args.runs) * all.len() as u64);
    let nr_series = all.len();
    for run in 0..args.runs as usize {
        for turn in 0..nr_series {
            // Each run begins with another series, so that no series has the advantage of being
            // first or last.
            let series = &mut all[(run + turn) % nr_series];
            progress.begin(format!("{}, lock {}", tracking_name(series.tracking), locking_name(series.locking)));
            let config = MachineConfig {
                nr_vcpus: args.vcpus,
                bytes_per_vcpu: args.bytes,
                backing: args.backing,
                engine: Config::default().with_locking(series.locking).with_access_tracking(series.tracking),
                ..MachineConfig::default()
            };
            series.runs.push(with_format!(args.format, F => run_once::<F>(args, &config, session)?));
            progress.step();
            session.so_far(outcome(&all)?);
        }
    }
    drop(progress);
    outcome(&all)
}

fn run_once<F: HardwareFormat>(args: &AgingArgs, config: &MachineConfig, session: &Session) -> Result<Run, Failure> {
    let machine = Machine::<F>::new(config)?;
    let _watched = session.watch(machine.vm());
    let nr_pages = machine.nr_pages();
    let sharing = if args.overlap { Sharing::Overlapping } else { Sharing::Partitioned };
    let nr_touches = if args.overlap { nr_pages * args.vcpus as u64 } else { nr_pages };
    // Each writing phase writes every page, so a read finds the last round and no other.
    let mut round = 0;
    let mut run = Run {
        phases: Vec::with_capacity(PHASES.len()),
        still_idle: Vec::new(),
        nr_pages,
        nr_verified: 0,
        flush_method: machine.flush_method(),
    };
    let mut last_title = "";
    for phase in &PHASES {
        let before = machine.vm().stats();
        let (time, nr_visited) = match phase.action {
            Action::Write | Action::Read => {
                round += u64::from(phase.action == Action::Write);
                let write_percent = if phase.action == Action::Write { 100 } else { 0 };
                let report = machine.run(Program {
                    sharing,
                    write_percent,
                    round,
                    oldest_round: round,
                    ..Program::default()
                })?;
                run.nr_verified += report.total().nr_reads;
                (report.wall, nr_touches)
            }
            Action::MarkIdle => {
                let begin = Instant::now();
                let nr_young = age(&machine, args.pass, Marking::Idle)?;
                let time = begin.elapsed();
                run.still_idle.push(judge(args, last_title, nr_young, nr_pages)?);
                (time, nr_pages)
            }
        };
        let after = machine.vm().stats();
        let nr_flushes = after.flushes - before.flushes;
        if phase.action == Action::MarkIdle {
            if nr_flushes != 0 {
                return Err(check_failed(format_args!("marking memory idle flushed {nr_flushes} times")));
            }
            // No vCPU runs, so no page was used since.
            let nr_young = age(&machine, args.pass, Marking::Test)?;
            if nr_young != 0 {
                return Err(check_failed(format_args!("{nr_young} pages are young right after they were marked idle")));
            }
        }
        run.phases.push(Measured { time, nr_pages: nr_visited, nr_faults: after.faults - before.faults, nr_flushes });
        last_title = phase.title;
    }
    let nr_young = age(&machine, args.pass, Marking::Test)?;
    run.still_idle.push(judge(args, last_title, nr_young, nr_pages)?);
    Ok(run)
}

/// What a pass over the pages does to used ones.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Marking {
    Idle,
    /// They stay as they are.
    Test,
}

/// One pass over all pages; returns how many were young. The calling thread does all of it, as with
/// KVM's lru_gen.
fn age<F: HardwareFormat>(machine: &Machine<F>, pass: PassArg, marking: Marking) -> Result<u64, Failure> {
    let vm = machine.vm();
    let age_or_test = |range| match marking {
        Marking::Idle => vm.age_range(range),
        Marking::Test => vm.test_age_range(range),
    };
    let mut nr_young = 0;
    for slot in machine.slots() {
        let range = GfnRange::new(slot.gpa.gfn(), slot.nr_pages);
        match pass {
            PassArg::Range => nr_young += age_or_test(range)?,
            PassArg::Page => {
                for gfn in range.start.0..range.end.0 {
                    nr_young += age_or_test(GfnRange::new(slat::Gfn(gfn), 1))?;
                }
            }
        }
    }
    Ok(nr_young)
}

/// Compares the number of used pages, all of them, with the number of young ones.
fn judge(args: &AgingArgs, used_by: &'static str, nr_young: u64, nr_pages: u64) -> Result<StillIdle, Failure> {
    let Some(nr_idle) = nr_pages.checked_sub(nr_young) else {
        return Err(check_failed(format_args!("{nr_young} pages are young, but there are only {nr_pages}")));
    };
    let only_warns = match args.warn_idle {
        0 => false,
        1.. => true,
        _ => can_tlb_hide(args),
    };
    if is_too_many(nr_idle, nr_pages) && !only_warns {
        return Err(check_failed(format_args!(
            "too many pages still idle after \"{used_by}\": {nr_idle} out of {nr_pages} (-w 1 only warns)"
        )));
    }
    Ok(StillIdle { used_by, nr_idle })
}

/// The largest leaf PTE for memory of this kind, if the memory is that large.
fn leaf_size(backing: BackingKind) -> PageSize {
    match backing {
        BackingKind::AnonymousThp => PageSize::Size2M,
        _ => backing.page_size(),
    }
}

/// Whether the TLB of a vCPU can cache the translations of more than a tenth of the pages that it
/// accesses.
fn can_tlb_hide(args: &AgingArgs) -> bool {
    let Geometry { size_4k, size_2m, size_1g } = Geometry::default();
    let size = leaf_size(args.backing);
    let (sets, ways) = match size {
        PageSize::Size4K => size_4k,
        PageSize::Size2M => size_2m,
        PageSize::Size1G => size_1g,
    };
    let reach_pages = (sets * ways) as u64 * (size.size_bytes() >> Gfn::SHIFT);
    let nr_parts = if args.overlap { args.vcpus as u64 } else { 1 };
    reach_pages > (args.bytes >> Gfn::SHIFT).saturating_mul(nr_parts) / 10
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, Experiment};

    fn args(line: &str) -> AgingArgs {
        match Cli::parse_from(format!("slat aging {line}").split_whitespace()).command {
            Some(Command::Experiment(Experiment::Aging(args))) => args,
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn a_tlb_hides_little_memory_and_huge_pages() {
        assert!(!can_tlb_hide(&args("")));
        assert!(can_tlb_hide(&args("-b 32M")) && !can_tlb_hide(&args("-b 40M")));
        assert!(!can_tlb_hide(&args("-b 32M -o -v 2")));
        assert!(can_tlb_hide(&args("-s anonymous_thp")) && can_tlb_hide(&args("-s anonymous_hugetlb_1gb -b 64G")));
    }

    #[test]
    fn a_tenth_of_the_pages_may_be_idle() {
        let big = args("");
        assert_eq!(judge(&big, "", 900, 1000).ok().map(|idle| idle.nr_idle), Some(100));
        assert!(judge(&big, "", 899, 1000).is_err());
        assert!(judge(&big, "", 1001, 1000).is_err());
        assert!(judge(&args("-w 1"), "", 0, 1000).is_ok() && judge(&args("-w 0 -b 4K"), "", 0, 1000).is_err());
        assert!(judge(&args("-b 4K"), "", 0, 1).is_ok());
    }
}
