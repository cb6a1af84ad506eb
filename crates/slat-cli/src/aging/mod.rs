//! `slat aging`: the cost of finding out which pages a guest uses, as KVM's
//! access_tracking_perf_test measures it: populate memory, write and read it, mark it idle, write
//! it again, mark it idle, read it again.
//!
//! Each phase is checked: marking finds young what was used before, and nothing right after; it
//! flushes nothing. For that reason a few accesses may go unseen: a CPU that still has the
//! translation cached does not set the accessed bit again. KVM allows for a tenth of the pages, and
//! so does this. Where a TLB can hide more (little memory, huge pages), it is a warning by default.

mod figures;

use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use slat::baselines::Locking;
use slat::error::RangeError;
use slat::tables::AccessTracking;
use slat::{Config, Gfn, GfnRange, PageSize};
use slat_machine::hardware::commit::FlushMethod;
use slat_machine::hardware::tlb::Geometry;
use slat_machine::hardware::walk::HardwareFormat;
use slat_machine::memory::BackingKind;
use slat_machine::vm::guest::{Program, Sharing};
use slat_machine::vm::machine::{Machine, MachineConfig};

use crate::columns::{Column, in_turns};
use crate::failure::{Failure, check_failed, ensure};
use crate::options::{
    ACCESS_TRACKING, GuestArgs, Named, OneOrAll, OutputArgs, RUNS, TablesArgs, one_or_all, positive, with_format,
};
use crate::results::Outcome;
use crate::session::Session;

#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true, after_help = "Example: slat aging -v 8 -b 64M --access-tracking accessed-bit")]
pub(crate) struct AgingArgs {
    #[command(flatten)]
    guest: GuestArgs,
    /// What to do if more than a tenth of the used pages still count as idle
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = StillIdleArg::Auto, hide_short_help = true)]
    still_idle: StillIdleArg,
    #[arg(long, value_name = "HOW", default_value = "both", value_parser = one_or_all::<AccessTracking>(Some("both")), help = ACCESS_TRACKING)]
    access_tracking: OneOrAll<AccessTracking>,
    /// What a call marks idle
    #[arg(long, value_enum, default_value_t = PassArg::Range, hide_short_help = true)]
    pass: PassArg,
    #[command(flatten)]
    tables: TablesArgs,
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive::<u32>, help = RUNS)]
    runs: u32,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

/// What to do about used pages that count as idle.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum StillIdleArg {
    /// Fail, unless the TLBs are large enough to hide that many accesses.
    Auto,
    Warn,
    Fail,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum PassArg {
    /// A page, which sees a huge page once.
    Page,
    /// The range of a slot.
    Range,
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

struct Run {
    /// One for each of [`PHASES`].
    phases: Vec<Measured>,
    still_idle: Vec<StillIdle>,
    nr_pages: u64,
    /// Reads that found what they should.
    nr_verified: u64,
    flush_method: FlushMethod,
}

/// Whether the idle pages are more than the tenth that KVM allows for.
fn is_too_many(nr_idle: u64, nr_pages: u64) -> bool {
    nr_idle > nr_pages / 10
}

/// What the runs of a column have.
struct Ways {
    tracking: AccessTracking,
    locking: Locking,
}

type Series = Column<Ways, Run>;

/// Runs the experiment: all runs, in turns.
pub(crate) fn run(args: &AgingArgs, session: &Session) -> Result<Outcome, Failure> {
    let trackings = &args.access_tracking.values;
    let of_locking = |&locking| trackings.iter().map(move |&tracking| Ways { tracking, locking });
    let all: Vec<Ways> = args.tables.lock.values.iter().flat_map(of_locking).collect();
    let run_once = |ways: &Ways, _| {
        let config = MachineConfig {
            nr_vcpus: args.guest.vcpus,
            bytes_per_vcpu: args.guest.bytes,
            backing: args.guest.backing,
            engine: Config::default().with_locking(ways.locking).with_access_tracking(ways.tracking),
            ..MachineConfig::default()
        };
        with_format!(args.tables.format, F => run_once::<F>(args, &config, session))
    };
    let outcome = |all: &[Series]| {
        let measured: Vec<&Series> = all.iter().filter(|series| !series.runs.is_empty()).collect();
        Outcome::new(figures::results(args, &measured), |out| figures::print(out, args, &measured))
    };
    let nr_columns = all.len();
    in_turns(session, all, nr_columns, args.runs, Ways::title, run_once, outcome)
}

impl Ways {
    fn title(&self) -> String {
        format!("{}, lock {}", self.tracking.name(), self.locking.name())
    }
}

fn run_once<F: HardwareFormat>(args: &AgingArgs, config: &MachineConfig, session: &Session) -> Result<Run, Failure> {
    let machine = Machine::<F>::new(config)?;
    let _watched = session.watch(machine.vm());
    let nr_pages = machine.nr_pages();
    let sharing = if args.guest.overlap { Sharing::Overlapping } else { Sharing::Partitioned };
    let nr_touches = if args.guest.overlap { nr_pages * args.guest.vcpus as u64 } else { nr_pages };
    // Each writing phase writes every page, so a read finds the last round and no other.
    let mut round = 0;
    let mut run = Run {
        phases: Vec::with_capacity(PHASES.len()),
        still_idle: Vec::new(),
        nr_pages,
        nr_verified: 0,
        flush_method: machine.flush_method(),
    };
    let test = |range| machine.vm().test_age_range(range);
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
                let nr_young = age(&machine, args.pass, |range| machine.vm().age_range(range))?;
                let time = begin.elapsed();
                run.still_idle.push(judge(args, last_title, nr_young, nr_pages)?);
                (time, nr_pages)
            }
        };
        let after = machine.vm().stats();
        let nr_flushes = after.flushes - before.flushes;
        if phase.action == Action::MarkIdle {
            ensure!(nr_flushes == 0, Check, "marking memory idle flushed {nr_flushes} times");
            // No vCPU runs, so no page was used since.
            let nr_young = age(&machine, args.pass, test)?;
            ensure!(nr_young == 0, Check, "{nr_young} pages are young right after they were marked idle");
        }
        run.phases.push(Measured { time, nr_pages: nr_visited, nr_faults: after.faults - before.faults, nr_flushes });
        last_title = phase.title;
    }
    let nr_young = age(&machine, args.pass, test)?;
    run.still_idle.push(judge(args, last_title, nr_young, nr_pages)?);
    Ok(run)
}

/// One pass over all pages, by calls of `age_or_test`; returns how many were young. The calling
/// thread does all of it, as with KVM's lru_gen.
fn age<F: HardwareFormat>(
    machine: &Machine<F>,
    pass: PassArg,
    age_or_test: impl Fn(GfnRange) -> Result<u64, RangeError>,
) -> Result<u64, Failure> {
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
    let only_warns = match args.still_idle {
        StillIdleArg::Fail => false,
        StillIdleArg::Warn => true,
        StillIdleArg::Auto => can_tlb_hide(args),
    };
    ensure!(
        only_warns || !is_too_many(nr_idle, nr_pages),
        Check,
        "too many pages still idle after \"{used_by}\": {nr_idle} out of {nr_pages} (--still-idle warn only warns)"
    );
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
    let size = leaf_size(args.guest.backing);
    let (sets, ways) = match size {
        PageSize::Size4K => size_4k,
        PageSize::Size2M => size_2m,
        PageSize::Size1G => size_1g,
    };
    let reach_pages = (sets * ways) as u64 * (size.size_bytes() >> Gfn::SHIFT);
    let nr_parts = if args.guest.overlap { args.guest.vcpus as u64 } else { 1 };
    reach_pages > (args.guest.bytes >> Gfn::SHIFT).saturating_mul(nr_parts) / 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options;

    fn args(line: &str) -> AgingArgs {
        options::parse(&format!("slat aging {line}")).unwrap()
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
        assert!(
            judge(&args("--still-idle warn"), "", 0, 1000).is_ok()
                && judge(&args("--still-idle fail -b 4K"), "", 0, 1000).is_err()
        );
        assert!(judge(&args("-b 4K"), "", 0, 1).is_ok());
    }
}
