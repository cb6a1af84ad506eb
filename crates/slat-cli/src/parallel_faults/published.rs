//! The published figures of the series that lets KVM handle page faults in parallel (TDP MMU,
//! 2021): dirty_log_perf_test on a machine with real CPUs. They show proportions, and decide
//! nothing.

use crate::quantity::{Unit, quantity, times};
use crate::table;

/// A row of the published table.
pub(crate) struct Phase {
    /// The figure in results.
    pub(crate) figure: &'static str,
    pub(crate) title: &'static str,
    /// In seconds: partitioned, then overlapping, each exclusive and parallel.
    published_s: [f64; 4],
    /// Whether many vCPUs fault at once: what slat claims to be better at, partitioned. (Where all
    /// fault on the same pages, most of the work is done in vain with any locking. The other phases
    /// are the work of one thread.)
    pub(crate) faults: bool,
}

pub(crate) const PHASES: [Phase; 5] = [
    Phase {
        figure: "populate_memory_total",
        title: "Populate memory",
        published_s: [110.193, 16.112, 117.31, 141.155],
        faults: true,
    },
    Phase {
        figure: "enable_dirty_logging_total",
        title: "Enable dirty logging",
        published_s: [4.829, 7.057, 0.191, 0.245],
        faults: false,
    },
    Phase {
        figure: "dirty_memory_total",
        title: "Dirty memory, all rounds",
        published_s: [3.949, 0.275, 0.193, 0.236],
        faults: true,
    },
    Phase {
        figure: "get_dirty_log_total",
        title: "Get dirty log, all rounds",
        published_s: [0.822, 5.468, 2.33, 2.35],
        faults: false,
    },
    Phase {
        figure: "disable_dirty_logging_total",
        title: "Disable dirty logging",
        published_s: [2.995, 3.088, 0.059, 0.075],
        faults: false,
    },
];

/// The published figure of S1 without a second stage.
const WITHOUT_SECOND_STAGE: &str = "Published with the second stage off (2021, 96 vCPUs, 3 GiB each): populate memory 103.1 s with \
                                    the exclusive lock, 85.4 s with the series, unexplained.";

impl Phase {
    /// The times of the baseline and of the series.
    pub(crate) fn published_s(&self, is_overlapping: bool) -> [f64; 2] {
        let [partitioned @ .., _, _] = self.published_s;
        let [_, _, overlapping @ ..] = self.published_s;
        if is_overlapping { overlapping } else { partitioned }
    }
}

/// Prints the published table.
pub(super) fn print(out: &mut String, is_overlapping: bool, is_shadow: bool) {
    if is_shadow {
        return add_line!(out, "{WITHOUT_SECOND_STAGE}");
    }
    let title = if is_overlapping { "published, 96 vCPUs, 6 GiB in all" } else { "published, 96 vCPUs, 3 GiB each" };
    let header = [title, "exclusive lock", "the series", "times as fast"];
    let mut figures = table::figures(header.map(str::to_owned));
    for phase in &PHASES {
        let [baseline, proposed] = phase.published_s(is_overlapping);
        let seconds = [baseline, proposed].map(|value| quantity(value, Unit::Seconds));
        let cells = seconds.into_iter().chain([times(baseline / proposed)]);
        figures.add_row(std::iter::once(phase.title.to_owned()).chain(cells));
    }
    add_line!(out, "\n{figures}\n\nPublished figures: TDP MMU, 2021, real CPUs. They show proportions only.");
}
