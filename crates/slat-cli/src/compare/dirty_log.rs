//! Getting the dirty log: the table of one memslot, a framebuffer, and a migration.
//!
//! Each number of dirty pages has two comparisons: the call alone, and the call with the guest's
//! next writes to these pages. slat defers work to those writes, and `slat-leaf` defers nothing.
//!
//! Published figures stand beside the ways of 2012. Ranges were published of framebuffer and
//! migration; they are in the note here, and beside the figures of the experiments.

use super::Size;
use super::comparison::{Comparison, HARDWARE, HOST_CPUS, Side};
use super::systems::{BETTER, Plan, Planned, kvm_name};
use crate::dirty_log::{PUBLISHED_TABLE, PublishedRow};
use crate::results::SOFTWARE_CPUS;
use crate::results::compared::{Published, Role};

const BEFORE: &str = "2012, before (copy the slots, wait)";
const PROPOSED: &str = "2012, proposed (exchange words)";

/// Numbers of dirty pages of the quick comparison, and of all comparisons with the next writes.
const FEW: [u32; 8] = [1, 8, 64, 512, 4096, 16_384, 65_536, 262_144];

/// Up to this number of dirty pages slat claims a shorter call than the way before 2012.
const SPARSE: u32 = 8;

/// From this number on, it claims a shorter call than both ways of 2012.
const DENSE: u32 = 16_384;

/// The sides of a figure of the calls, and slat's claim against the ways of 2012.
fn sides(measured_on: &'static str, claims: [Option<f64>; 2]) -> Vec<Side> {
    let side = |name: &str, role, method| Side::new(name, role, &[("method", method)]).measured_on(measured_on);
    let [before, proposed] = claims;
    vec![
        side("slat (defers dense blocks to the next writes)", Role::Slat, "slat"),
        Side { claim: before, ..side(BEFORE, Role::Baseline, "srcu-copy") },
        Side { claim: proposed, ..side(PROPOSED, Role::Baseline, "xchg") },
        side("slat-leaf (defers nothing)", Role::Baseline, "slat-leaf"),
        side(&kvm_name(), Role::Peer, "kvm").measured_on(HARDWARE),
    ]
}

fn call(row: &PublishedRow) -> Comparison {
    let pages = row.pages;
    let is_dense = pages >= DENSE;
    let claims = [is_dense || pages <= SPARSE, is_dense].map(|is_claimed| is_claimed.then_some(BETTER));
    Comparison {
        name: format!("get_dirty_log_{pages}_pages"),
        title: format!("Get the dirty log of 1 GiB, {}", dirty(pages)),
        experiment: 0,
        figure: "get_dirty_log",
        labels: vec![("pages", pages.into()), ("pattern", "random".into())],
        published: Some(Published::new(
            "2012",
            [f64::from(row.old_ns) / 1e9, f64::from(row.new_ns) / 1e9].map(Some),
            PROPOSED,
        )),
        sides: sides(HOST_CPUS, claims),
    }
}

fn call_and_writes(row: &PublishedRow) -> Comparison {
    let pages = row.pages;
    Comparison {
        name: format!("get_dirty_log_and_next_writes_{pages}_pages"),
        title: format!("The same and the guest's next writes, {}", dirty(pages)),
        figure: "get_dirty_log_and_next_writes",
        published: None,
        sides: sides(SOFTWARE_CPUS, [None; 2]),
        ..call(row)
    }
}

fn dirty(pages: u32) -> String {
    format!("{pages} dirty {}", if pages == 1 { "page" } else { "pages" })
}

fn workload(experiment: usize, workload: &'static str, figure: &'static str, title: &str) -> Comparison {
    Comparison {
        name: format!("{figure}_{workload}"),
        title: title.to_owned(),
        experiment,
        figure,
        labels: vec![("workload", workload.into())],
        published: None,
        sides: sides(HOST_CPUS, [None; 2]),
    }
}

pub(super) fn plan(size: Size) -> Plan {
    let is_shown = |row: &&PublishedRow| size == Size::Default || FEW.contains(&row.pages);
    let (table, bursts, harvests) = match size {
        Size::Quick => (50, 100, 20),
        Size::Default => (300, 500, 100),
    };
    let mut comparisons = Vec::new();
    for row in PUBLISHED_TABLE.iter().filter(is_shown) {
        comparisons.push(call(row));
        comparisons.extend(FEW.contains(&row.pages).then(|| call_and_writes(row)));
    }
    comparisons.push(workload(
        1,
        "framebuffer",
        "get_dirty_log",
        "Get the dirty log of a framebuffer of 8 MiB, a burst",
    ));
    comparisons.push(workload(2, "migration", "get_dirty_log", "A harvest of a migration of 256 MiB"));
    let fault = workload(2, "migration", "write_fault_p50", "The guest's write that faults in this migration, p50");
    comparisons.push(Comparison { sides: sides(SOFTWARE_CPUS, [None; 2]), ..fault });
    let pages: Vec<String> = PUBLISHED_TABLE.iter().filter(is_shown).map(|row| row.pages.to_string()).collect();
    let methods = "--method srcu-copy,xchg,slat,slat-leaf";
    Plan {
        system: "dirty-log",
        title: "Getting the dirty log without stopping a vCPU",
        published_note: "2012, with its review: one slot of 1 GiB. A framebuffer's call took 100-300 µs before and 3-10 µs as \
                         proposed, a live migration's 1-3 ms before and 50-300 µs as proposed.",
        experiments: vec![
            Planned::new(format!(
                "slat dirty-log --pages {} --pattern random --runs {table} {methods}",
                pages.join(",")
            )),
            Planned::new(format!("slat dirty-log --workload framebuffer --runs {bursts} {methods}")),
            Planned::new(format!("slat dirty-log --workload migration -b 256M --runs {harvests} {methods}")),
        ],
        comparisons,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_published_rows_are_shown_and_nothing_is_claimed_of_the_kvm_or_of_deferred_work() {
        for (size, nr_rows) in [(Size::Quick, FEW.len()), (Size::Default, PUBLISHED_TABLE.len())] {
            let plan = plan(size);
            let published: Vec<_> = plan.comparisons.iter().filter_map(|of| of.published.as_ref()).collect();
            assert_eq!(published.len(), nr_rows);
            assert!(published.iter().all(|of| of.baseline.is_some() && of.proposed.is_some()));
            let with_writes = plan.comparisons.iter().filter(|of| of.figure == "get_dirty_log_and_next_writes");
            assert_eq!(with_writes.count(), FEW.len());
            for comparison in &plan.comparisons {
                let claimed = comparison.sides.iter().filter(|side| side.claim.is_some());
                let claimed: Vec<&str> = claimed.map(|side| side.name.as_str()).collect();
                let is_call = comparison.figure == "get_dirty_log";
                assert!(claimed.is_empty() || is_call && [BEFORE, PROPOSED].starts_with(&claimed), "{claimed:?}");
                // What was published as the baseline stands beside the first side that is not
                // slat's.
                assert_eq!(comparison.sides[1].name, BEFORE);
            }
        }
    }
}
