//! The prediction of the published times.
//!
//! The model runs with less memory than was published, and with fewer rounds. The time of a page is
//! the same for any size that is large against the caches, so times are scaled by the pages, and
//! those of all rounds by the rounds.

use slat_model::experiment::Hypervisor;
use slat_model::experiment::phases::{Around, Lock, PhaseTimes, Sharing};
use slat_model::topology::Topology;

use super::super::names::error_of;
use super::super::{Part, ScaleArgs};
use super::{Case, Done, OVERLAPPING_PARTS, find};
use crate::failure::Failure;
use crate::options::Named;
use crate::parallel_faults::PHASES;
use crate::quantity::{Unit, or_nothing, quantity};
use crate::results::{Figure, PublishedFigure};
use crate::table::{self, PUBLISHED};

const TOPOLOGY: &str = "2x48";
const NR_VCPUS: usize = 96;
/// Of each vCPU, where each accesses its own part.
const BYTES_EACH: u64 = 3 << 30;
/// Where all vCPUs access all memory.
const BYTES_IN_ALL: u64 = 6 << 30;
const NR_ROUNDS: u32 = 5;

const ON: &str = "TDP MMU, 2021, 96 CPUs";

/// The baseline and the series.
const LOCKS: [Lock; 2] = [Lock::Exclusive, Lock::Shared];

const SHARINGS: [Sharing; 2] = [Sharing::Partitioned, Sharing::Overlapping];

const fn case(lock: Lock, sharing: Sharing) -> Case {
    Case { hypervisor: Hypervisor::Kvm, lock, sharing, around: Around::Host, nr_cpus: NR_VCPUS }
}

pub(super) fn topology() -> Result<Topology, Failure> {
    Ok(Topology::named(TOPOLOGY)?)
}

pub(super) fn cases() -> impl Iterator<Item = Case> {
    SHARINGS.into_iter().flat_map(|sharing| LOCKS.map(|lock| case(lock, sharing)))
}

fn nr_published_pages(sharing: Sharing) -> u64 {
    match sharing {
        Sharing::Partitioned => (BYTES_EACH >> 12) * NR_VCPUS as u64,
        Sharing::Overlapping => BYTES_IN_ALL >> 12,
    }
}

/// The times of [`PHASES`] in seconds, as the published size would have them.
fn predicted_s(times: &PhaseTimes, nr_pages: u64, nr_published_pages: u64) -> [f64; PHASES.len()] {
    let by_pages = nr_published_pages as f64 / nr_pages as f64;
    let once = |ns: u64| ns as f64 / 1e9 * by_pages;
    let rounds = |ns: &[u64]| once(ns.iter().sum()) * f64::from(NR_ROUNDS) / ns.len() as f64;
    [
        once(times.populate_ns),
        once(times.enable_ns),
        rounds(&times.dirty_ns),
        rounds(&times.get_ns),
        once(times.disable_ns),
    ]
}

pub(super) fn add(part: &mut Part, args: &ScaleArgs, all: &[Done]) {
    for sharing in SHARINGS {
        let predicted = LOCKS.map(|lock| {
            let done = find(all, case(lock, sharing))?;
            let nr_pages = done.case.nr_pages_in_all(args.bytes);
            Some(predicted_s(&done.run.times, nr_pages, nr_published_pages(sharing)))
        });
        add_table(&mut part.text, sharing, predicted);
        add_figures(part, sharing, predicted);
    }
    let [each, in_all] = [args.bytes, args.bytes * OVERLAPPING_PARTS].map(|bytes| quantity(bytes as f64, Unit::Bytes));
    add_line!(
        part.text,
        "Predicted: KVM on the topology {TOPOLOGY}. The time of a page was measured with {each} for each vCPU\n\
         (partitioned), {in_all} in all (overlapping), and rounds: {}. It is scaled to the published size and\n\
         its {NR_ROUNDS} rounds. The model was calibrated on one of these figures: populate memory, partitioned,\n\
         exclusive. Published: TDP MMU, 2021, real CPUs.\n",
        args.iterations
    );
}

fn add_table(text: &mut String, sharing: Sharing, predicted: [Option<[f64; PHASES.len()]>; 2]) {
    let title = match sharing {
        Sharing::Partitioned => "partitioned, 96 vCPUs, 3 GiB each",
        Sharing::Overlapping => "overlapping, 96 vCPUs, 6 GiB in all",
    };
    let header = LOCKS.map(|lock| [lock.name(), PUBLISHED, "error"]);
    let mut figures = table::figures(std::iter::once(title).chain(header.into_iter().flatten()).map(str::to_owned));
    for (index, phase) in PHASES.iter().enumerate() {
        let cells =
            predicted.iter().zip(phase.published_s(sharing == Sharing::Overlapping)).flat_map(|(times, published)| {
                let time = times.map(|times| times[index]);
                [
                    or_nothing(time.map(|time| quantity(time, Unit::Seconds))),
                    quantity(published, Unit::Seconds),
                    or_nothing(time.map(|time| error_of(time, published))),
                ]
            });
        figures.add_row(std::iter::once(phase.title.to_owned()).chain(cells));
    }
    add_line!(text, "{figures}\n");
}

fn add_figures(part: &mut Part, sharing: Sharing, predicted: [Option<[f64; PHASES.len()]>; 2]) {
    for (which, lock) in LOCKS.into_iter().enumerate() {
        let Some(times) = predicted[which] else { continue };
        let labels = case(lock, sharing).labels();
        for (phase, time) in PHASES.iter().zip(times) {
            part.figures.push(Figure::new(phase.figure, Unit::Seconds, &labels, [time]));
            part.published.push(PublishedFigure::new(
                phase.figure,
                Unit::Seconds,
                &labels,
                [phase.published_s(sharing == Sharing::Overlapping)[which]; 2],
                ON,
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_scaled_by_pages_and_rounds() {
        let times = PhaseTimes {
            populate_ns: 1_000_000_000,
            enable_ns: 200_000_000,
            dirty_ns: vec![10_000_000, 30_000_000],
            get_ns: vec![1_000_000, 1_000_000],
            disable_ns: 500_000,
            nr_logged: 0,
        };
        let found = predicted_s(&times, 1000, 3000);
        for (found, expected) in found.into_iter().zip([3.0, 0.6, 0.3, 0.015, 0.0015]) {
            assert!((found / expected - 1.0).abs() < 1e-12, "{found}, not {expected}");
        }
        let order = PHASES.map(|phase| phase.figure.split('_').next().unwrap_or_default());
        assert_eq!(order, ["populate", "enable", "dirty", "get", "disable"]);
    }
}
