//! What the model of a large machine predicts of the published figures, beside these.
//!
//! `slat scale` runs the model with few pages: a page takes the same time with more, as
//! `docs/model.md` shows. Predictions decide nothing. Each stands beside its published figure with
//! its error; the first side is the published proposal, so the speed-up over the baseline is the
//! predicted gain.

use super::comparison::{Comparison, Side};
use super::systems::Planned;
use crate::options::ValueName;
use crate::parallel_faults;
use crate::results::compared::Published;
use crate::userfault::{Mode, Uffds, X86};

/// Memory of each vCPU in the model of parallel faults. Where all vCPUs access all memory, it is
/// four times as much.
const FAULTS_MIB: u32 = 4;
/// Memory of each vCPU in the model of userfault.
const USERFAULT_KIB: u32 = 256;
/// Memory of each vCPU in the model of splits.
const SPLIT_MIB: u32 = 2;

/// vCPUs of the predicted rates: the most of the published tables.
const USERFAULT_VCPUS: usize = 64;

/// By how much less time the guest dirties memory, at least and at most.
const SPLIT_LESS_TIME: [f64; 2] = [0.02, 0.35];

/// The run of the model that predicts parallel faults.
pub(super) fn faults_in_parallel() -> Planned {
    Planned::new(format!("slat scale --system parallel-faults --cpus 1 -b {FAULTS_MIB}M"))
}

/// The phases of KVM with its one lock and with the series, as results number `experiment` has
/// them.
pub(super) fn of_faults_in_parallel(experiment: usize) -> impl Iterator<Item = Comparison> {
    // The memory of the published runs, to which `slat scale` has scaled its figures.
    let accesses = [("partitioned", "3 GiB each"), ("overlapping", "6 GiB in all")];
    accesses.into_iter().flat_map(move |(access, memory)| {
        parallel_faults::PHASES.iter().map(move |phase| {
            let [baseline, proposed] = phase.published_s(access == "overlapping");
            let side = |name: &str, lock, published| Side::predicted(name, &[("lock", lock)], Some(published));
            let sides = vec![
                side("model: KVM, lock shared (the series)", "shared", proposed),
                side("model: KVM, lock exclusive", "exclusive", baseline),
            ];
            Comparison {
                name: format!("model_{}_{access}", phase.figure),
                title: format!("{}, 96 modelled vCPUs, {access}, scaled to {memory}", phase.title),
                experiment,
                figure: phase.figure,
                labels: vec![("hypervisor", "kvm".into()), ("access", access.into())],
                published: Some(Published::new("96 vCPUs", [baseline, proposed].map(Some), &sides[0].name)),
                sides,
            }
        })
    })
}

/// The run of the model that predicts userfault.
pub(super) fn userfault() -> Planned {
    Planned::new(format!("slat scale --system userfault -b {USERFAULT_KIB}K"))
}

/// The rates of KVM by how pages are resolved, the proposal first.
pub(super) fn of_userfault(experiment: usize) -> impl Iterator<Item = Comparison> {
    X86.iter().map(move |group| {
        let (backing, uffds) = (group.backing.to_string(), group.uffds.name());
        let published = |mode| group.rate(mode, USERFAULT_VCPUS);
        let name = |mode: Mode| format!("model: KVM, {mode}");
        let side = |mode: Mode| Side::predicted(name(mode), &[("mode", &mode.name())], published(mode));
        let rows = || group.rows.iter().map(|row| row.mode);
        let others = rows().filter(|&mode| mode != Mode::Exits && published(mode).is_some());
        // A reader for each vCPU, as in the comparison that is measured.
        let baseline = rows().find(|mode| [Mode::Missing, Mode::Minor].contains(mode)).and_then(published);
        let of_uffds = if group.uffds == Uffds::One { "" } else { "_per_vcpu" };
        Comparison {
            name: format!("model_paging_rate_{backing}{of_uffds}"),
            title: format!(
                "Pages a second for each of {USERFAULT_VCPUS} modelled vCPUs, {USERFAULT_KIB} KiB each, {backing}, {}",
                group.uffds.describe()
            ),
            experiment,
            figure: "page_rate",
            labels: vec![
                ("hypervisor", "kvm".into()),
                ("vcpus", USERFAULT_VCPUS.into()),
                ("backing", backing.into()),
                ("uffds", uffds.into()),
            ],
            published: Some(Published::new("96 CPUs", [baseline, published(Mode::Exits)], &name(Mode::Exits))),
            sides: std::iter::once(Mode::Exits).chain(others).map(side).collect(),
        }
    })
}

/// The run of the model that predicts splits.
pub(super) fn numa_splitting() -> Planned {
    Planned::new(format!("slat scale --system numa-split -b {SPLIT_MIB}M"))
}

/// The guest's writes after splits by one thread, with the page-table pages on either node.
pub(super) fn of_numa_splitting(experiment: usize) -> Comparison {
    let side = |name: &str, placement| Side::predicted(name, &[("placement", placement)], None);
    let sides =
        vec![side("model: huge-page-node (the series)", "huge-page-node"), side("model: caller-node", "caller-node")];
    Comparison {
        name: "model_dirty_memory".to_owned(),
        title: format!("Dirty memory, a round, 416 modelled vCPUs on 8 nodes, {SPLIT_MIB} MiB each"),
        experiment,
        figure: "dirty_memory",
        labels: vec![("splitters", "one".into())],
        published: Some(Published {
            gain: Some(SPLIT_LESS_TIME.map(|less| 1.0 / (1.0 - less))),
            ..Published::new("416 vCPUs on 8 nodes", [None; 2], &sides[0].name)
        }),
        sides,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::compared::Role;

    #[test]
    fn all_figures_of_the_largest_published_sizes_are_predicted() {
        let faults: Vec<Comparison> = of_faults_in_parallel(0).collect();
        let userfault: Vec<Comparison> = of_userfault(0).collect();
        let nr_sides = |all: &[Comparison]| all.iter().map(|of| of.sides.len()).collect::<Vec<_>>();
        assert_eq!((nr_sides(&faults), nr_sides(&userfault)), (vec![2; 10], vec![5, 5, 4]));
        for comparison in faults.iter().chain(&userfault) {
            let published = comparison.published.as_ref().unwrap();
            assert!(comparison.sides.iter().all(|side| side.role == Role::Model && side.published.is_some()));
            assert_eq!(comparison.sides[0].name, published.proposed_side);
            assert_eq!(comparison.sides[0].published, published.proposed);
            assert!(published.baseline.is_some());
        }
    }

    #[test]
    fn a_part_less_time_is_a_gain() {
        let gain = of_numa_splitting(0).published.unwrap().gain.unwrap();
        assert_eq!(gain.map(|gain| (gain * 100.0).round()), [102.0, 154.0]);
    }
}
