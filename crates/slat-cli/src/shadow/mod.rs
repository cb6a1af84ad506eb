//! `slat shadow`: a kernel build in a mini guest kernel with shadow page tables: the cost of each
//! strategy for the guest's loads of CR3.
//!
//! A guest kernel with page-table isolation loads CR3 at each entry and each exit of the kernel.
//! With shadow page tables each load is an exit. The strategy is what the hypervisor does with the
//! shadow pages then. The mini guest kernel checks every access. Its work is that of a build that
//! was counted ([`build`]); [`model`] has the parts of its time.
//!
//! The runs of the strategies take turns. Figures are medians, gains those of paired runs. With one
//! vCPU all strategies run exactly the same guest. Any number of vCPUs divides the same work.
//!
//! Separately, [`switch`] measures the switch alone: loads of CR3 among roots that the vCPU caches,
//! in a tight loop, with bit 63 where there are PCIDs.

mod build;
mod figures;
mod model;
mod run;
mod switch;
mod timed;

use std::time::Duration;

use clap::Args;
use clap::builder::RangedI64ValueParser;
use slat::shadow::{ShadowPaging, ShadowStrategy};
use slat_machine::guest_os::{Isolation, Pcids, WorkloadMix};

use crate::columns::{self, in_turns};
use crate::failure::{Failure, ensure};
use crate::options::{Named, OneOrAll, OutputArgs, RUNS, SEED, delay, named, names, one_or_all, positive};
use crate::results::Outcome;
use crate::session::Session;
use run::Run;

/// Most vCPUs of the mini guest kernel.
const MAX_VCPUS: u16 = 128;

#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true, after_help = "Example: slat shadow -v 4 --steps 10000 --pcid off")]
pub(crate) struct ShadowArgs {
    /// Number of vCPUs
    ///
    /// Several numbers run one after the other; the vCPUs divide the work.
    #[arg(short, long, value_delimiter = ',', value_name = "N,...", default_value = "1,4", value_parser = nr_vcpus)]
    vcpus: Vec<u16>,
    /// Steps of the whole guest
    ///
    /// A visit to its kernel each. The build that was counted has 11 million. In a longer run
    /// `baseline` is slower than KVM was: at each load of CR3 it looks at the unsync pages of all
    /// processes, not only at those below the root.
    #[arg(long, value_name = "N", default_value_t = 1500, value_parser = positive::<u64>)]
    steps: u64,
    /// What a load of CR3 does to shadow tables
    #[arg(long, value_name = "WHAT", default_value = "all", value_parser = one_or_all::<ShadowStrategy>(Some("all")))]
    strategy: OneOrAll<ShadowStrategy>,
    /// Whether the guest's kernel has page tables of its own
    ///
    /// With page-table isolation CR3 is loaded at each entry to the kernel and each exit.
    #[arg(long, value_name = "ON", default_value = "on", value_parser = named::<Isolation>())]
    isolation: Isolation,
    /// Whether the guest has PCIDs
    ///
    /// Without, each load of CR3 flushes.
    #[arg(long, value_name = "ON", default_value = "on", value_parser = named::<Pcids>())]
    pcid: Pcids,
    /// Whether the host has PCIDs
    ///
    /// Without, its CPUs flush all at each change of the root.
    #[arg(long, value_name = "ON", default_value = "on", value_parser = named::<Pcids>())]
    host_pcid: Pcids,
    /// Previous roots that a vCPU caches, besides the current one
    #[arg(
        long,
        value_name = "N",
        default_value_t = ShadowPaging::default().previous_roots,
        value_parser = clap::value_parser!(u8).range(..=i64::from(ShadowPaging::MAX_PREVIOUS_ROOTS)),
        hide_short_help = true
    )]
    previous_roots: u8,
    /// Most shadow tables at a time
    ///
    /// By default more than strategies need, so that their numbers show.
    #[arg(long, default_value_t = 16_384, value_name = "N", value_parser = tables(), hide_short_help = true)]
    max_pages: u32,
    /// Most processes of each vCPU
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64), hide_short_help = true)]
    processes: u16,
    /// Mapped pages that a process touches in each step
    #[arg(long, value_name = "N", default_value_t = build::TOUCHES, hide_short_help = true)]
    touches: u32,
    /// Time of an exit, e.g. 1us
    ///
    /// The round trip; half and twice of it are shown too.
    #[arg(long, value_name = "TIME", default_value = model::EXIT_COST, value_parser = delay, hide_short_help = true)]
    exit_cost: Duration,
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive::<u32>, help = RUNS)]
    runs: u32,
    #[arg(long, value_name = "N", default_value_t = 1, help = SEED)]
    seed: u64,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
}

impl ShadowArgs {
    fn exit_cost_ns(&self) -> f64 {
        (self.exit_cost.as_secs_f64() * 1e9).round()
    }

    fn shadow_paging(&self, strategy: ShadowStrategy) -> ShadowPaging {
        ShadowPaging { strategy, previous_roots: self.previous_roots, max_pages: self.max_pages }
    }

    fn mix(&self) -> WorkloadMix {
        WorkloadMix { touches_per_step: self.touches, ..build::MIX }
    }
}

fn tables() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(i64::from(ShadowPaging::MIN_PAGES)..=i64::from(ShadowPaging::MAX_PAGES))
}

fn nr_vcpus(text: &str) -> Result<u16, String> {
    match positive::<u16>(text)? {
        vcpus if vcpus > MAX_VCPUS => Err(format!("must be at most {MAX_VCPUS}")),
        vcpus => Ok(vcpus),
    }
}

names!(Isolation: On = "on", Off = "off");
names!(Pcids: On = "on", Off = "off");
names!(ShadowStrategy: Baseline = "baseline", RootCache = "root-cache", RootsByPcid = "roots-by-pcid",
       PcidTagged = "pcid-tagged";
       "KVM until 2018: under one lock, each load finds its root anew, synchronizes it, and flushes",
       "Each vCPU caches its last roots; tables serve all PCIDs",
       "As root-cache, with a root for each PCID, by which INVPCID finds it",
       "As root-cache, with tables for each PCID, and deferred flushes of other PCIDs");

pub(crate) fn vcpus(nr_vcpus: u16) -> String {
    format!("{nr_vcpus} vCPU{}", if nr_vcpus == 1 { "" } else { "s" })
}

/// What the runs of a column have.
struct Guest {
    strategy: ShadowStrategy,
    nr_vcpus: u16,
}

type Column = columns::Column<Guest, Run>;

pub(crate) fn run(args: &ShadowArgs, session: &Session) -> Result<Outcome, Failure> {
    let most_vcpus = args.vcpus.iter().copied().max().unwrap_or(1);
    ensure!(
        args.steps >= u64::from(most_vcpus),
        Usage,
        "{} steps for {most_vcpus} vCPUs; choose more steps, or fewer vCPUs",
        args.steps
    );
    let progress = session.progress(1);
    progress.begin("the switch itself".to_owned());
    let switches = switch::measure(args)?;
    drop(progress);
    let clock_ns = timed::clock_ns();
    let strategies = &args.strategy.values;
    let of_vcpus = |&nr_vcpus| strategies.iter().map(move |&strategy| Guest { strategy, nr_vcpus });
    let all: Vec<Guest> = args.vcpus.iter().flat_map(of_vcpus).collect();
    let title = |guest: &Guest| format!("{}, {}", vcpus(guest.nr_vcpus), guest.strategy.name());
    // All strategies run the same guest, and each run has another.
    let run = |guest: &Guest, number: u32| {
        let seed = args.seed ^ u64::from(number).rotate_left(32);
        run::run(args, guest.strategy, guest.nr_vcpus, seed, clock_ns, session)
    };
    let outcome = |columns: &[Column]| {
        let columns: Vec<&Column> = columns.iter().filter(|column| !column.runs.is_empty()).collect();
        let results = figures::results(args, &columns, &switches);
        Outcome::new(results, |out| figures::print(out, args, &columns, &switches))
    };
    in_turns(session, all, strategies.len(), args.runs, title, run, outcome)
}
