//! The five systems: the experiments of each, and what is compared.
//!
//! A claim is made only where slat has won with a clear margin; a figure without a claim is shown
//! all the same.

use slat_machine::topology;

use super::comparison::{Better, Comparison, HARDWARE, HOST_CPUS, Published, Role, Side};
use super::{Size, SystemArg};
use crate::demand_paging::published_rate;

/// Better than the other side, by any margin.
const BETTER: f64 = 1.0;

/// An experiment of a system.
#[derive(Clone, Debug)]
pub(super) struct Planned {
    /// As a user types it.
    pub(super) command: String,
    /// The command that replaces it where this machine cannot serve it.
    pub(super) instead: Option<String>,
}

impl Planned {
    fn new(command: impl Into<String>) -> Planned {
        Planned { command: command.into(), instead: None }
    }
}

/// The experiments and comparisons of a system.
#[derive(Clone, Debug)]
pub(super) struct System {
    pub(super) system: &'static str,
    pub(super) title: &'static str,
    /// Published facts that are no figures of a comparison.
    pub(super) published_note: &'static str,
    pub(super) experiments: Vec<Planned>,
    pub(super) comparisons: Vec<Comparison>,
}

/// The plan for `system`.
pub(super) fn plan(system: SystemArg, size: Size) -> System {
    match system {
        SystemArg::S1 => parallel_faults(size),
        SystemArg::S2 => userfault(size),
        SystemArg::S3 => shadow_paging(size),
        SystemArg::S4 => numa_splitting(size),
        SystemArg::S5 => dirty_log(size),
    }
}

/// A row of the published table of S1, in seconds: partitioned, then overlapping, each exclusive
/// and parallel.
struct Phase {
    figure: &'static str,
    title: &'static str,
    published: Option<[f64; 4]>,
    /// What slat claims against one lock around everything, partitioned. Where all vCPUs fault on
    /// the same pages, most of the work is done in vain with any locking.
    claim: Option<f64>,
}

const PHASES: [Phase; 6] = [
    Phase {
        figure: "populate_memory_total",
        title: "Populate memory",
        published: Some([110.193, 16.112, 117.31, 141.155]),
        claim: None,
    },
    Phase {
        figure: "enable_dirty_logging_total",
        title: "Enable dirty logging",
        published: Some([4.829, 7.057, 0.191, 0.245]),
        claim: None,
    },
    Phase {
        figure: "dirty_memory_total",
        title: "Dirty memory, all rounds",
        published: Some([3.949, 0.275, 0.193, 0.236]),
        claim: None,
    },
    Phase {
        figure: "get_dirty_log_total",
        title: "Get dirty log, all rounds",
        published: Some([0.822, 5.468, 2.33, 2.35]),
        claim: None,
    },
    Phase {
        figure: "disable_dirty_logging_total",
        title: "Disable dirty logging",
        published: Some([2.995, 3.088, 0.059, 0.075]),
        claim: None,
    },
    // The time of faults without the software CPU and its memory accesses: the one figure here of
    // the engine alone.
    Phase {
        figure: "engine_time",
        title: "Time of faults in the engine, all vCPUs",
        published: None,
        claim: Some(BETTER),
    },
];

/// The published crates that keep tables.
const TABLE_CRATES: [&str; 4] = ["page-table-generic", "page_table_multiarch", "x86_64", "aarch64-paging"];

/// Crates whose map is so short that two threads with a mutex are as fast as slat where a cache
/// line moves quickly between the CPUs, and several times slower where it does not: a tie.
const TIED_CRATES: [&str; 2] = ["page_table_multiarch", "x86_64"];

/// slat and published crates, by `slat peers`, the third experiment of S1: several threads share
/// the page tables of a crate by a mutex.
fn crates(figure: &'static str, title: &str, nr_threads: u16, names: &[&str]) -> Comparison {
    let side = |name: &str, role| Side::new(name, role, &[("subject", name)]).measured_on(HOST_CPUS);
    // Threads that share a CPU do not contend for the mutex, and parallel work gains nothing on one
    // CPU.
    let is_claimed = nr_threads > 1 && usize::from(nr_threads) <= topology::usable_cpus().len();
    let claim = |name: &str| (is_claimed && !TIED_CRATES.contains(&name)).then_some(BETTER);
    let peer = |name: &&str| Side { claim: claim(name), ..side(name, Role::Peer) };
    Comparison {
        name: format!("{figure}_{nr_threads}_threads"),
        title: format!("{title}, {nr_threads} thread{}, a page", if nr_threads == 1 { "" } else { "s" }),
        experiment: 2,
        figure,
        labels: vec![("threads", nr_threads.into())],
        unit: "ns",
        better: Better::Less,
        published: None,
        sides: std::iter::once(side("slat", Role::Slat)).chain(names.iter().map(peer)).collect(),
    }
}

fn parallel_faults(size: Size) -> System {
    let nr_vcpus = 4;
    let [partitioned, overlapping] = match size {
        Size::Quick => ["-b 32M -i 2 --runs 5", "-b 16M -i 2 --runs 5"],
        Size::Default => ["-b 64M -i 3 --runs 10", "-b 32M -i 3 --runs 10"],
    };
    // On one CPU a thread waits for a lock only if the holder was preempted.
    let has_contention = topology::usable_cpus().len() > 1;
    let mut comparisons = Vec::new();
    for (experiment, access) in ["partitioned", "overlapping"].into_iter().enumerate() {
        for phase in &PHASES {
            let published = phase.published.map(|times| Published {
                on: "96 vCPUs",
                baseline: Some(times[2 * experiment]),
                proposed: Some(times[2 * experiment + 1]),
            });
            let exclusive = Side::new("lock exclusive", Role::Baseline, &[("lock", "exclusive")]);
            comparisons.push(Comparison {
                name: format!("{}_{access}", phase.figure),
                title: format!("{}, {nr_vcpus} vCPUs, {access}", phase.title),
                experiment,
                figure: phase.figure,
                labels: Vec::new(),
                unit: "s",
                better: Better::Less,
                published,
                sides: vec![
                    Side::new("slat (no lock)", Role::Slat, &[("lock", "none")]),
                    Side { claim: phase.claim.filter(|_| access == "partitioned" && has_contention), ..exclusive },
                    Side::new("lock shared", Role::Baseline, &[("lock", "shared")]),
                    Side::new("KVM of this machine", Role::Peer, &[("lock", "kvm")]).measured_on(HARDWARE),
                ],
            });
        }
    }
    let (threads, runs): (&[u16], _) = match size {
        Size::Quick => (&[1, 2], 11),
        Size::Default => (&[1, 2], 31),
    };
    for &nr_threads in threads {
        comparisons.push(crates("fault", "Page fault on a fresh page", nr_threads, &["axaddrspace"]));
        comparisons.push(crates("map_4k", "Map a page of 4 KiB", nr_threads, &TABLE_CRATES));
    }
    let threads = threads.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    System {
        system: "S1",
        title: "Parallel page faults on the second stage",
        published_note: "TDP MMU, 2021: 96 vCPUs, 3 GiB each (partitioned) or 6 GiB in all (overlapping).",
        experiments: vec![
            Planned::new(format!("slat dirty-log -v {nr_vcpus} {partitioned} --peer auto")),
            Planned::new(format!("slat dirty-log -v {nr_vcpus} {overlapping} -o --peer auto")),
            Planned::new(format!("slat peers --only fault,map-4k -t {threads} --runs {runs}")),
        ],
        comparisons,
    }
}

fn userfault(size: Size) -> System {
    let (vcpus, options): (&[usize], _) = match size {
        Size::Quick => (&[2, 8, 64], "-b 2M -i 3"),
        // As much memory for each vCPU as the published figures have, if it fits.
        Size::Default => (&[2, 8, 64], "-i 3"),
    };
    let list = vcpus.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let command = |modes| format!("slat demand-paging --matrix --vcpus {list} {options} --modes {modes}");
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
            unit: "pages/s",
            better: Better::More,
            published: Some(Published { on: "96 CPUs", baseline: published("missing"), proposed: published("uf") }),
            sides: vec![
                side("slat (userfault exits)", Role::Slat, "uf"),
                side("userfaultfd, a reader for each vCPU", Role::Peer, "missing").claimed(BETTER),
                side("userfaultfd, one reader", Role::Peer, "missing-1r").claimed(BETTER),
                side("exits and userfaultfd", Role::Baseline, "missing+uf"),
                side("no userfault (the host has the pages)", Role::Baseline, "none"),
            ],
        }
    });
    System {
        system: "S2",
        title: "Userfault: demand paging by exits",
        published_note: "KVM Userfault, 2024: 64 MiB for each vCPU; the baseline is its rate with userfaultfd, a reader for each \
                         vCPU.",
        comparisons: comparisons.collect(),
        experiments: vec![Planned {
            command: command("none,missing,missing-1r,missing+uf,uf"),
            instead: Some(command("none,uf")),
        }],
    }
}

fn shadow_paging(size: Size) -> System {
    let options = match size {
        Size::Quick => "--steps 6000 --runs 5",
        Size::Default => "--steps 30000 --runs 7",
    };
    let mut comparisons = Vec::new();
    // Wall times of the published compile, in seconds.
    for (nr_vcpus, wall_s, gain) in [(1, [1505.0, 890.0], 1.69), (4, [972.0, 284.0], 3.42)] {
        let published = Published { on: "a kernel's compile", baseline: Some(wall_s[0]), proposed: Some(wall_s[1]) };
        let vcpus = crate::cr3::vcpus(nr_vcpus);
        let new = |figure, title: &str, unit, published, claim: Option<f64>| Comparison {
            name: format!("{figure}_{nr_vcpus}_vcpus"),
            title: format!("{title}, {vcpus}"),
            experiment: 0,
            figure,
            labels: vec![("vcpus", nr_vcpus.into())],
            unit,
            better: Better::Less,
            published,
            sides: vec![
                Side::new("slat (root-cache)", Role::Slat, &[("strategy", "root-cache")]),
                Side { claim, ..Side::new("baseline", Role::Baseline, &[("strategy", "baseline")]) },
                Side::new("pcid-tagged", Role::Baseline, &[("strategy", "pcid-tagged")]),
            ],
        };
        comparisons.push(new("guest_time", "Guest time of a kernel build", "s", Some(published), Some(gain)));
        comparisons.push(new("tables_built", "Shadow pages built", "count", None, Some(BETTER)));
        comparisons.push(new("entries_synced", "Shadow PTEs synchronized", "count", None, Some(BETTER)));
        comparisons.push(new("table_pages_peak", "Shadow pages in use at most", "count", None, None));
    }
    System {
        system: "S3",
        title: "Shadow paging that survives page-table isolation",
        published_note: "PCIDs and a root cache for shadow paging, 2018: a kernel compiled in the guest, 3.42 times as fast with 4 \
                         vCPUs and 1.69 times with one.",
        experiments: vec![Planned::new(format!("slat cr3 {options}"))],
        comparisons,
    }
}

fn numa_splitting(size: Size) -> System {
    let options = match size {
        Size::Quick => "-b 16M --runs 5",
        Size::Default => "-b 64M -i 5 --runs 10",
    };
    let side = |name: &str, role, placement| Side::new(name, role, &[("placement", placement)]);
    let new = |figure: &'static str, title: &str, unit, better, claim: Option<f64>| Comparison {
        name: figure.to_owned(),
        title: title.to_owned(),
        experiment: 0,
        figure,
        labels: Vec::new(),
        unit,
        better,
        published: None,
        sides: vec![
            side("slat (huge-page-node)", Role::Slat, "huge-page-node"),
            Side { claim, ..side("caller-node", Role::Baseline, "caller-node") },
            Side { claim, ..side("caller-policy, interleave", Role::Baseline, "caller-policy") },
        ],
    };
    System {
        system: "S4",
        title: "NUMA-aware page-table pages in eager huge-page splitting",
        published_note: "2022, with its review: 416 vCPUs on 8 nodes, dirty memory 2% to 35% faster.",
        experiments: vec![Planned::new(format!("slat split {options}"))],
        comparisons: vec![
            new(
                "local_walk_reads",
                "Reads of lowest-level page tables on the walker's own node",
                "count",
                Better::More,
                Some(BETTER),
            ),
            new("remote_walk_reads", "Reads of lowest-level page tables on another node", "count", Better::Less, None),
            new("split_time_total", "Splitting all huge pages", "s", Better::Less, None),
            new("dirty_memory_total", "Dirty memory, all rounds", "s", Better::Less, None),
        ],
    }
}

/// A row of the published table of S5, in nanoseconds, and the claim of slat against the ways of
/// 2012.
struct Row {
    pages: u32,
    old: f64,
    new: f64,
    claim: Option<f64>,
}

const ROWS: [Row; 8] = [
    Row { pages: 1, old: 147_018.0, new: 14_086.0, claim: Some(BETTER) },
    Row { pages: 8, old: 108_865.0, new: 14_125.0, claim: Some(BETTER) },
    Row { pages: 64, old: 59_159.0, new: 21_258.0, claim: None },
    Row { pages: 512, old: 113_182.0, new: 61_707.0, claim: None },
    Row { pages: 4096, old: 996_813.0, new: 290_579.0, claim: None },
    Row { pages: 16_384, old: 1_241_206.0, new: 2_271_171.0, claim: Some(BETTER) },
    Row { pages: 65_536, old: 2_147_538.0, new: 4_408_395.0, claim: Some(BETTER) },
    Row { pages: 262_144, old: 6_016_951.0, new: 8_497_356.0, claim: Some(BETTER) },
];

fn dirty_log(size: Size) -> System {
    let options = match size {
        Size::Quick => "--runs 50",
        Size::Default => "--runs 300",
    };
    let pages = ROWS.iter().map(|row| row.pages.to_string()).collect::<Vec<_>>().join(",");
    let side = |name: &str, role, method| Side::new(name, role, &[("method", method)]).measured_on(HOST_CPUS);
    let comparison = |row: &Row| Comparison {
        name: format!("get_dirty_log_{}_pages", row.pages),
        title: format!(
            "Get the dirty log of 1 GiB, {} dirty {}",
            row.pages,
            if row.pages == 1 { "page" } else { "pages" }
        ),
        experiment: 0,
        figure: "get_dirty_log",
        labels: vec![("pages", row.pages.into()), ("pattern", "random".into())],
        unit: "ns",
        better: Better::Less,
        published: Some(Published { on: "2012", baseline: Some(row.old), proposed: Some(row.new) }),
        sides: vec![
            side("slat", Role::Slat, "slat"),
            Side { claim: row.claim, ..side("2012, before (copy the slots, wait)", Role::Baseline, "srcu-copy") },
            Side { claim: row.claim, ..side("2012, proposed (exchange words)", Role::Baseline, "xchg") },
            side("KVM of this machine", Role::Peer, "kvm").measured_on(HARDWARE).claimed(BETTER),
        ],
    };
    System {
        system: "S5",
        title: "Getting the dirty log without stopping a vCPU",
        published_note: "2012, with its review: one slot of 1 GiB.",
        experiments: vec![Planned::new(format!(
            "slat get-dirty-log -n {pages} -p random {options} --method srcu-copy,xchg,slat"
        ))],
        comparisons: ROWS.iter().map(comparison).collect(),
    }
}
