//! The five systems: the experiments of each, and what is compared.
//!
//! A claim is made only where slat has won with a clear margin; a figure without a claim is shown
//! all the same.

use slat_machine::linux::topology;

use super::comparison::{Comparison, HARDWARE, MODELLED, Side};
use super::{Size, SystemArg, dirty_log, instructions, predictions};
use crate::parallel_faults;
use crate::results::SOFTWARE_CPUS;
use crate::results::compared::{Published, Role};
use crate::userfault::published_rate;

/// Better than the other side, by any margin.
pub(super) const BETTER: f64 = 1.0;

/// An experiment of a system.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    /// As a user types it.
    pub(super) command: String,
    /// The command that replaces it where this machine cannot serve it.
    pub(super) instead: Option<String>,
}

impl Planned {
    pub(super) fn new(command: impl Into<String>) -> Planned {
        Planned { command: command.into(), instead: None }
    }
}

/// The experiments and comparisons of a system.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) system: &'static str,
    pub(super) title: &'static str,
    /// Published facts that are no figures of a comparison.
    pub(super) published_note: &'static str,
    pub(super) experiments: Vec<Planned>,
    pub(super) comparisons: Vec<Comparison>,
}

/// The side that is the KVM of this machine, named for how it translates guest memory: figures of
/// shadow page tables show nothing of a KVM with EPT or NPT.
pub(super) fn kvm_name() -> String {
    crate::kvm::facts().map_or_else(|_| "KVM of this machine".to_owned(), |facts| facts.name())
}

pub(super) fn plan(system: SystemArg, size: Size) -> Plan {
    match system {
        SystemArg::ParallelFaults => faults_in_parallel(size),
        SystemArg::Userfault => userfault(size),
        SystemArg::Shadow => shadow_paging(size),
        SystemArg::NumaSplit => numa_splitting(size),
        SystemArg::DirtyLog => dirty_log::plan(size),
        SystemArg::Instructions => instructions::plan(),
    }
}

/// CPUs that it takes to show what a lock costs in a whole phase: with 16 both phases of faults are
/// better (docs/results/16-cpus); with 8 one was a tie in an earlier run.
const CPUS_TO_SHOW_A_LOCK: usize = 16;

fn faults_in_parallel(size: Size) -> Plan {
    let shows_a_lock = topology::usable_cpus().len() >= CPUS_TO_SHOW_A_LOCK;
    let nr_vcpus = if shows_a_lock { CPUS_TO_SHOW_A_LOCK } else { 4 };
    let [partitioned, overlapping] = match size {
        Size::Quick => ["-b 32M --runs 5", "-b 16M --runs 5"],
        Size::Default => ["-b 64M --iterations 3 --runs 10", "-b 32M --iterations 3 --runs 10"],
    };
    let mut comparisons = Vec::new();
    for (experiment, access) in ["partitioned", "overlapping"].into_iter().enumerate() {
        for phase in &parallel_faults::PHASES {
            let [baseline, proposed] = phase.published_s(access == "overlapping");
            let published = Some(Published::new("96 vCPUs", [baseline, proposed].map(Some), "lock shared"));
            let is_claimed = phase.faults && access == "partitioned";
            let claim = (is_claimed && shows_a_lock).then_some(BETTER);
            let unclaimed = (is_claimed && !shows_a_lock).then_some("tie: needs more CPUs");
            let exclusive = Side::new("lock exclusive", Role::Baseline, &[("lock", "exclusive")]);
            comparisons.push(Comparison {
                name: format!("{}_{access}", phase.figure),
                title: format!("{}, {nr_vcpus} vCPUs, {access}", phase.title),
                experiment,
                figure: phase.figure,
                labels: Vec::new(),
                published,
                sides: vec![
                    Side::new("slat (no lock)", Role::Slat, &[("lock", "none")]),
                    Side { claim, unclaimed, ..exclusive },
                    Side::new("lock shared", Role::Baseline, &[("lock", "shared")]),
                    Side::new(kvm_name(), Role::Peer, &[("lock", "kvm")]).measured_on(HARDWARE),
                ],
            });
        }
    }
    comparisons.extend(predictions::of_faults_in_parallel(2));
    Plan {
        system: "parallel-faults",
        title: "Parallel page faults on the second stage",
        published_note: "TDP MMU, 2021: 96 vCPUs, 3 GiB each (partitioned) or 6 GiB in all (overlapping). What a lock costs in a \
                         whole phase takes 16 CPUs to show: docs/results/16-cpus.",
        experiments: vec![
            Planned::new(format!("slat parallel-faults -v {nr_vcpus} {partitioned} --peer auto")),
            Planned::new(format!("slat parallel-faults -v {nr_vcpus} {overlapping} -o --peer auto")),
            predictions::faults_in_parallel(),
        ],
        comparisons,
    }
}

fn userfault(size: Size) -> Plan {
    let (vcpus, options): (&[usize], _) = match size {
        Size::Quick => (&[2, 8, 64], "-b 2M --runs 3"),
        // As much memory for each vCPU as the published figures have, if it fits.
        Size::Default => (&[2, 8, 64], "--runs 3"),
    };
    let list = vcpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let command = |modes| format!("slat userfault --vcpus {list} {options} --modes {modes}");
    let side =
        |name: &str, role, mode| Side::new(name, role, &[("mode", mode), ("backing", "anonymous"), ("uffds", "one")]);
    let comparisons = vcpus.iter().map(|&nr_vcpus| {
        let published = |mode| published_rate(mode, nr_vcpus);
        Comparison {
            name: format!("paging_rate_{nr_vcpus}_vcpus"),
            title: format!("Pages a second for each of {nr_vcpus} vCPUs, anonymous memory"),
            experiment: 0,
            figure: "paging_rate",
            labels: vec![("vcpus", nr_vcpus.into())],
            published: Some(Published::new(
                "96 CPUs",
                [published("missing"), published("uf")],
                "slat (userfault exits)",
            )),
            sides: vec![
                side("slat (userfault exits)", Role::Slat, "uf"),
                side("userfaultfd, a reader for each vCPU", Role::Peer, "missing").claimed(BETTER),
                side("userfaultfd, one reader", Role::Peer, "missing-1r").claimed(BETTER),
                side("exits and userfaultfd", Role::Baseline, "missing+uf"),
                side("no userfault (the host has the pages)", Role::Baseline, "none"),
            ],
        }
    });
    Plan {
        system: "userfault",
        title: "Userfault: demand paging by exits",
        published_note: "KVM Userfault, 2024: 64 MiB for each vCPU; the baseline is its rate with userfaultfd, a reader for each \
                         vCPU.",
        comparisons: comparisons.chain(predictions::of_userfault(1)).collect(),
        experiments: vec![
            Planned { command: command("none,missing,missing-1r,missing+uf,uf"), instead: Some(command("none,uf")) },
            predictions::userfault(),
        ],
    }
}

fn shadow_paging(size: Size) -> Plan {
    let options = match size {
        // More runs and not longer ones: the baseline looks at the unsync pages of all processes,
        // of which there are more the longer the guest runs (`docs/protocols/shadow-paging.md`).
        Size::Quick => "--steps 1500 --runs 11",
        Size::Default => "--steps 1500 --runs 51",
    };
    let mut comparisons = Vec::new();
    // The experiments: a host with PCIDs, and one without, whose CPUs flush at each load.
    for (experiment, host) in ["", ", host without PCIDs"].into_iter().enumerate() {
        // Wall times of the published compile, in seconds. They are shown, and decide nothing.
        for (nr_vcpus, wall_s) in [(1, [1505.0, 890.0]), (4, [972.0, 284.0])] {
            let vcpus = crate::shadow::vcpus(nr_vcpus);
            let new = |figure, title: &str, measured_on, claim: Option<f64>| {
                let side = |name: &str, role, strategy| {
                    Side::new(name, role, &[("strategy", strategy)]).measured_on(measured_on)
                };
                Comparison {
                    name: format!("{figure}_{nr_vcpus}_vcpus{}", if host.is_empty() { "" } else { "_no_host_pcids" }),
                    title: format!("{title}, {vcpus}{host}"),
                    experiment,
                    figure,
                    labels: vec![("vcpus", nr_vcpus.into())],
                    published: None,
                    sides: vec![
                        side("slat (root-cache, as the series)", Role::Slat, "root-cache"),
                        Side { claim, ..side("baseline (KVM until 2018)", Role::Baseline, "baseline") },
                        side("roots-by-pcid", Role::Baseline, "roots-by-pcid"),
                        side("pcid-tagged", Role::Baseline, "pcid-tagged"),
                    ],
                }
            };
            let title = "Guest time of a kernel build (modelled)";
            let published = (experiment == 0).then(|| {
                Published::new(
                    "a kernel's compile",
                    [wall_s[0], wall_s[1]].map(Some),
                    "slat (root-cache, as the series)",
                )
            });
            comparisons.push(Comparison { published, ..new("guest_time", title, MODELLED, Some(BETTER)) });
            let new = |figure, title, claim| new(figure, title, SOFTWARE_CPUS, claim);
            if experiment == 0 {
                comparisons.push(new("tables_synced", "Shadow pages synchronized as a whole", Some(BETTER)));
                comparisons.push(new("entries_synced", "Shadow PTEs synchronized", None));
                comparisons.push(new("remote_flushes", "TLB flushes of all CPUs", Some(BETTER)));
                comparisons.push(new("emulated_writes", "Writes to guest tables, emulated", None));
                comparisons.push(new("table_pages_peak", "Shadow pages in use at most", None));
            }
            comparisons.push(new("tlb_flushes", "TLB flushes, except of single pages", None));
            comparisons.push(new("tlb_misses", "TLB misses", None));
        }
    }
    Plan {
        system: "shadow",
        title: "Shadow paging that survives page-table isolation",
        published_note: "PCIDs and a root cache for shadow paging, 2018: a kernel compiled in the guest, 3.42 times as fast with 4 \
                         vCPUs and 1.69 times with one. These are wall times on hardware; guest time here is modelled: work as \
                         counted in a build, measured time in the engine, and exits at a given cost, without TLB misses. The \
                         runs are short: the baseline looks at the unsync pages of all processes, KVM's only at those below \
                         the root, so in longer runs it is slower than KVM was.",
        experiments: vec![
            Planned::new(format!("slat shadow {options}")),
            Planned::new(format!("slat shadow {options} --host-pcid off")),
        ],
        comparisons,
    }
}

fn numa_splitting(size: Size) -> Plan {
    let options = match size {
        Size::Quick => "-b 16M --runs 5",
        Size::Default => "-b 64M --iterations 5 --runs 10",
    };
    let side = |name: &str, role, placement| Side::new(name, role, &[("placement", placement)]);
    let new = |figure: &'static str, title: &str, claim: Option<f64>| Comparison {
        name: figure.to_owned(),
        title: title.to_owned(),
        experiment: 0,
        figure,
        labels: Vec::new(),
        published: None,
        sides: vec![
            side("slat (huge-page-node)", Role::Slat, "huge-page-node"),
            Side { claim, ..side("caller-node", Role::Baseline, "caller-node") },
            Side { claim, ..side("caller-policy, interleave", Role::Baseline, "caller-policy") },
        ],
    };
    Plan {
        system: "numa-split",
        title: "NUMA-aware page-table pages in eager huge-page splitting",
        published_note: "2022, with its review: 416 vCPUs on 8 nodes, dirtying memory took 2% to 35% less time.",
        experiments: vec![Planned::new(format!("slat numa-split {options}")), predictions::numa_splitting()],
        comparisons: vec![
            new("local_walk_reads", "Reads of lowest-level page tables on the walker's own node", Some(BETTER)),
            new("remote_walk_reads", "Reads of lowest-level page tables on another node", None),
            new("split_time_total", "Splitting all huge pages", None),
            new("dirty_memory_total", "Dirty memory, all rounds", None),
            predictions::of_numa_splitting(1),
        ],
    }
}
