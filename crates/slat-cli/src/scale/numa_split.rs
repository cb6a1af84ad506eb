//! Splits of huge pages on a modelled machine with eight nodes: where the page-table pages are that
//! replace the huge pages, and what that costs the guest.

use slat_model::experiment::numa_split::{NumaSplit, PUBLISHED_PAGES, Placement, SplitRun, SplitTimes, Splitters};
use slat_model::topology::Topology;

use super::trace::Traced;
use super::{Context, Part};
use crate::failure::Failure;
use crate::options::Named;
use crate::quantity::{NOTHING, Unit, digits, or_nothing, quantity};
use crate::results::{Figure, Labels, labels};
use crate::table::{self, PUBLISHED};

const TOPOLOGY: &str = "8x52";
const NR_VCPUS: usize = 416;

/// Pages of a huge page.
const HUGE: u64 = 512;

/// Pages of each vCPU, at most.
const MAX_PAGES: u64 = 1024;

/// By how much less time the guest dirties memory with page-table pages on the node of the huge
/// page.
const PUBLISHED_IMPROVEMENT: &str = "2% to 35%";

/// In the order of the output. Each placement on the node of the huge page follows its base.
const CASES: [Case; 4] = [
    Case { splitters: Splitters::One, placement: Placement::Caller },
    Case { splitters: Splitters::One, placement: Placement::HugePage },
    Case { splitters: Splitters::PerNode, placement: Placement::Caller },
    Case { splitters: Splitters::PerNode, placement: Placement::HugePage },
];

/// What distinguishes runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    splitters: Splitters,
    placement: Placement,
}

/// A run that is done.
#[derive(Clone, Debug)]
struct Done {
    case: Case,
    topology: Topology,
    run: SplitRun,
}

/// The pages of each vCPU, if so many bytes are wanted: whole huge pages, at least one.
fn nr_pages(bytes: u64) -> u64 {
    ((bytes >> 12).min(MAX_PAGES) / HUGE * HUGE).max(HUGE)
}

/// The mean time of a round in seconds, without the first if there are more: it finds other caches.
fn dirty_s(times: &SplitTimes) -> f64 {
    let rounds = match times.dirty_ns.as_slice() {
        [_, later @ ..] if !later.is_empty() => later,
        all => all,
    };
    rounds.iter().sum::<u64>() as f64 / 1e9 / rounds.len() as f64
}

/// By how much less time is needed, in words.
fn improvement(before: f64, after: f64) -> String {
    format!("{:.1}%", (1.0 - after / before) * 100.0)
}

impl Case {
    fn labels(self) -> Labels {
        labels([("placement", self.placement.name().into()), ("splitters", self.splitters.name().into())])
    }

    fn title(self) -> String {
        format!("{}, {}", self.placement.name(), self.splitters.name())
    }

    fn run(self, context: &Context<'_>, topology: &Topology) -> Result<Done, Failure> {
        let split = NumaSplit {
            nr_vcpus: NR_VCPUS,
            nr_pages: nr_pages(context.args.bytes),
            placement: self.placement,
            splitters: self.splitters,
            nr_rounds: context.args.iterations,
            seed: context.args.seed.0,
        };
        let run = split.run(topology, context.parameters)?;
        Ok(Done { case: self, topology: topology.clone(), run })
    }

    /// The case that its improvement is measured against.
    fn base(self) -> Option<Case> {
        (self.placement == Placement::HugePage).then_some(Case { placement: Placement::Caller, ..self })
    }
}

pub(super) fn run(context: &Context<'_>) -> Result<Part, Failure> {
    let topology = Topology::named(TOPOLOGY)?;
    let planned = CASES.into_iter().map(|case| (case.title(), case));
    context.measure(planned, |case| case.run(context, &topology), |all| part(context, all))
}

fn part(context: &Context<'_>, all: &[Done]) -> Part {
    let traced = |done: &Done| Traced::new(done.case.title(), done.case.labels(), &done.topology, &done.run.report);
    let mut part = Part { runs: all.iter().map(traced).collect(), ..Part::default() };
    let header = ["placement, splitters", "split", "dirty memory", "less time", PUBLISHED, "local", "remote"];
    let mut figures = table::figures(header.map(str::to_owned));
    for Done { case, run, .. } in all {
        let times = &run.times;
        let base = case.base().and_then(|base| all.iter().find(|done| done.case == base));
        // What was published is of one thread that splits.
        let published =
            if base.is_some() && case.splitters == Splitters::One { PUBLISHED_IMPROVEMENT } else { NOTHING };
        figures.add_row([
            case.title(),
            quantity(times.split_ns as f64 / 1e9, Unit::Seconds),
            quantity(dirty_s(times), Unit::Seconds),
            or_nothing(base.map(|base| improvement(dirty_s(&base.run.times), dirty_s(times)))),
            published.to_owned(),
            digits(times.nr_local_tables as f64, true),
            digits(times.nr_remote_tables as f64, true),
        ]);
        let labels = case.labels();
        let seconds = [("split_time", times.split_ns as f64 / 1e9), ("dirty_memory", dirty_s(times))];
        part.figures.extend(seconds.map(|(name, seconds)| Figure::new(name, Unit::Seconds, &labels, [seconds])));
        let tables = [("local_tables", times.nr_local_tables), ("remote_tables", times.nr_remote_tables)];
        part.figures.extend(tables.map(|(name, nr)| Figure::new(name, Unit::Count, &labels, [nr as f64])));
    }
    let nr_pages = nr_pages(context.args.bytes);
    add_line!(
        part.text,
        "{figures}\n\n\
         {NR_VCPUS} vCPUs, and one thread that splits, or one on each node.\n\
         Split: the time until all huge pages are split. Dirty memory: the mean time of a round after the\n\
         first; rounds: {}. Local and remote: page-table pages that replace huge pages, on the node of their\n\
         memory and on another. On the topology {TOPOLOGY}, with {} for each vCPU, where {} were\n\
         published, and caches that are smaller by the same factor. Published (2022, with its review): 416\n\
         vCPUs on 8 nodes.",
        context.args.iterations,
        quantity((nr_pages << 12) as f64, Unit::Bytes),
        quantity((PUBLISHED_PAGES << 12) as f64, Unit::Bytes),
    );
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_whole_huge_pages() {
        let found = [4096, 2 << 20, 3 << 20, 4 << 20, 1 << 30].map(nr_pages);
        assert_eq!(found, [512, 512, 512, 1024, 1024]);
    }

    #[test]
    fn the_first_round_does_not_count_if_there_are_more() {
        let mean = |rounds: &[u64]| {
            let times =
                SplitTimes { dirty_ns: rounds.iter().map(|s| s * 1_000_000_000).collect(), ..SplitTimes::default() };
            dirty_s(&times)
        };
        assert_eq!([mean(&[7]), mean(&[7, 2]), mean(&[7, 2, 4])], [7.0, 2.0, 3.0]);
        assert_eq!(improvement(4.0, 3.0), "25.0%");
    }

    #[test]
    fn each_huge_page_placement_has_a_base_before_it() {
        for (index, case) in CASES.iter().enumerate() {
            match case.base() {
                Some(base) => assert!(CASES[..index].contains(&base), "{case:?}"),
                None => assert_eq!(case.placement, Placement::Caller),
            }
        }
    }
}
