//! `slat cr3`: a kernel build in a mini guest kernel with shadow page tables: the cost of each
//! strategy for the guest's loads of CR3.
//!
//! A guest kernel with page-table isolation loads CR3 at each entry and each exit of the kernel.
//! With shadow page tables each load is an exit. The strategy is what the hypervisor does with the
//! shadow pages then. The mini guest kernel checks every access. Its work is that of a build that
//! was counted ([`build`]); [`model`] has the parts of its time.
//!
//! Strategies run interleaved, in an order that is drawn anew for each run. Figures are medians,
//! gains those of paired runs. With one vCPU all strategies run exactly the same guest. Any number
//! of vCPUs divides the same work.
//!
//! Separately, [`switch`] measures the switch alone: loads of CR3 among roots that the vCPU caches,
//! in a tight loop, with bit 63 where there are PCIDs.

mod build;
mod model;
mod report;
mod run;
mod switch;
mod timed;

use std::path::PathBuf;

use clap::builder::RangedI64ValueParser;
use clap::{Args, ValueEnum};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use slat::shadow::{ShadowPaging, ShadowStrategy};
use slat_machine::kernel::{Isolation, Pcids, WorkloadMix};

use crate::args::positive;
use crate::failure::Failure;
use crate::results::Outcome;
use crate::session::Session;
use run::Run;
use switch::Switch;

/// Most vCPUs of the mini guest kernel.
const MAX_VCPUS: u16 = 128;

/// The options of `slat cr3`.
#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true, after_help = "Example: slat cr3 -v 4 --steps 10000 --pcid off")]
pub(crate) struct Cr3Args {
    /// Numbers of vCPUs.
    ///
    /// One after the other; they divide the work.
    #[arg(short = 'v', long, value_delimiter = ',', value_name = "N,...", default_value = "1,4", value_parser = nr_vcpus)]
    pub(crate) vcpus: Vec<u16>,
    /// Steps of the whole guest.
    ///
    /// A visit to its kernel each. The build that was counted has 11 million.
    #[arg(long, value_name = "N", default_value_t = 30_000, value_parser = positive::<u64>)]
    pub(crate) steps: u64,
    /// Strategy.
    ///
    /// What a load of CR3 does to shadow tables. `all` compares the three in one table.
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = StrategyArg::All)]
    pub(crate) strategy: StrategyArg,
    /// Page-table isolation.
    ///
    /// Whether the guest's kernel has separate page tables, so that CR3 is loaded at each entry and
    /// exit.
    #[arg(long, value_name = "ON", value_enum, default_value_t = Switched::On)]
    pub(crate) isolation: Switched,
    /// PCIDs.
    ///
    /// Whether the guest has them; without, each load of CR3 flushes.
    #[arg(long, value_name = "ON", value_enum, default_value_t = Switched::On)]
    pub(crate) pcid: Switched,
    /// Previous roots that a vCPU caches.
    ///
    /// Besides the current one.
    #[arg(
        long,
        value_name = "N",
        default_value_t = ShadowPaging::default().previous_roots,
        value_parser = clap::value_parser!(u8).range(..=i64::from(ShadowPaging::MAX_PREVIOUS_ROOTS))
    )]
    pub(crate) previous_roots: u8,
    /// Most shadow tables at a time.
    ///
    /// By default more than strategies need, so that their numbers show.
    #[arg(long, default_value_t = 16_384, value_name = "N", value_parser = tables())]
    pub(crate) max_pages: u32,
    /// Most processes of each vCPU.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64), hide_short_help = true)]
    pub(crate) processes: u16,
    /// Mapped pages that a process touches in each step.
    #[arg(long, value_name = "N", default_value_t = build::TOUCHES, hide_short_help = true)]
    pub(crate) touches: u32,
    /// Nanoseconds of an exit.
    ///
    /// The round trip; half and twice of it are shown too.
    #[arg(long, default_value_t = model::EXIT_COST_NS, value_name = "NS")]
    pub(crate) exit_cost_ns: u32,
    /// Runs of which the median is taken.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = positive::<u32>)]
    pub(crate) runs: u32,
    /// Seed of the random choices.
    #[arg(short = 'r', long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Write the results to this file as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl Cr3Args {
    fn isolation(&self) -> Isolation {
        match self.isolation {
            Switched::On => Isolation::On,
            Switched::Off => Isolation::Off,
        }
    }

    fn pcids(&self) -> Pcids {
        match self.pcid {
            Switched::On => Pcids::On,
            Switched::Off => Pcids::Off,
        }
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

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Switched {
    On,
    Off,
}

impl Switched {
    /// The name in options and results.
    fn name(self) -> &'static str {
        match self {
            Switched::On => "on",
            Switched::Off => "off",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum StrategyArg {
    /// Each load drops the tables that only the old root leads to.
    Baseline,
    /// Each vCPU caches its last roots; tables serve all PCIDs.
    RootCache,
    /// As root-cache, with tables for each PCID, and deferred flushes of other PCIDs.
    PcidTagged,
    All,
}

impl StrategyArg {
    /// The strategies to run, in the order of the table's columns.
    fn strategies(self) -> &'static [ShadowStrategy] {
        use ShadowStrategy::{Baseline, PcidTagged, RootCache};
        match self {
            StrategyArg::Baseline => &[Baseline],
            StrategyArg::RootCache => &[RootCache],
            StrategyArg::PcidTagged => &[PcidTagged],
            StrategyArg::All => &[Baseline, RootCache, PcidTagged],
        }
    }
}

/// The name of a strategy in options and results.
fn strategy_name(strategy: ShadowStrategy) -> &'static str {
    match strategy {
        ShadowStrategy::Baseline => "baseline",
        ShadowStrategy::RootCache => "root-cache",
        ShadowStrategy::PcidTagged => "pcid-tagged",
    }
}

/// A number of vCPUs in words.
pub(crate) fn vcpus(nr_vcpus: u16) -> String {
    format!("{nr_vcpus} vCPU{}", if nr_vcpus == 1 { "" } else { "s" })
}

/// A strategy with some number of vCPUs, and its runs.
struct Column {
    strategy: ShadowStrategy,
    nr_vcpus: u16,
    runs: Vec<Run>,
}

/// Runs the experiment.
pub(crate) fn run(args: &Cr3Args, session: &Session) -> Result<Outcome, Failure> {
    let most_vcpus = args.vcpus.iter().copied().max().unwrap_or(1);
    if args.steps < u64::from(most_vcpus) {
        return Err(Failure::Usage(format!(
            "{} steps for {most_vcpus} vCPUs; choose more steps, or fewer vCPUs",
            args.steps
        )));
    }
    let clock_ns = timed::clock_ns();
    let mut rng = SmallRng::seed_from_u64(args.seed);
    let mut columns: Vec<Column> = Vec::new();
    let outcome = |columns: &[Column], switches: &[Switch]| {
        let columns: Vec<&Column> = columns.iter().filter(|column| !column.runs.is_empty()).collect();
        let results = report::results(args, &columns, switches);
        Outcome::new(&results, |out| report::print(out, args, &columns, switches))
    };
    let strategies = args.strategy.strategies();
    let nr_runs = args.vcpus.len() as u64 * u64::from(args.runs) * strategies.len() as u64;
    let progress = session.progress(nr_runs + 1);
    for &nr_vcpus in &args.vcpus {
        let new = |&strategy| Column { strategy, nr_vcpus, runs: Vec::new() };
        let first = columns.len();
        columns.extend(strategies.iter().map(new));
        for _ in 0..args.runs {
            let seed = rng.random();
            let mut order: Vec<usize> = (first..columns.len()).collect();
            order.shuffle(&mut rng);
            for index in order {
                let column = &mut columns[index];
                progress.begin(format!("{}, {}", vcpus(nr_vcpus), strategy_name(column.strategy)));
                column.runs.push(run::run(args, column.strategy, nr_vcpus, seed, clock_ns, session)?);
                progress.step();
                session.so_far(outcome(&columns, &[])?);
            }
        }
    }
    progress.begin("the switch itself".to_owned());
    let switches: Vec<Switch> = switch::measure(args)?;
    drop(progress);
    outcome(&columns, &switches)
}
