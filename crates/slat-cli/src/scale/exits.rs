//! Exits instead of one wait queue, as others measured them on 256 cores: memory of which each page
//! is there already, one descriptor, a reader for each vCPU; and the same with memory-fault exits.

use slat_model::experiment::userfault::{Mode, Uffds, Userfault, UserfaultRun};
use slat_model::experiment::{Backing, Hypervisor};
use slat_model::topology::Topology;

use super::names::error_of;
use super::trace::Traced;
use super::{Context, Part};
use crate::failure::Failure;
use crate::quantity::{NOTHING, Unit, quantity};
use crate::results::{Figure, Labels, PublishedFigure, labels};
use crate::table::{self, PUBLISHED};

/// The machine with as many CPUs.
const TOPOLOGY: &str = "4x64";

/// Pages of each vCPU, at most: a page takes the same time with more.
const MAX_PAGES: u64 = 256;

const ON: &str = "KVM memory-fault exits, 2023, 256 CPUs";

/// vCPUs, and thousands of pages a second of all of them: with userfaultfd alone, and with exits.
const MEASURED: [(usize, [f64; 2]); 4] =
    [(1, [150.0, 340.0]), (16, [130.0, 1595.0]), (64, [86.0, 3482.0]), (256, [36.0, 4012.0])];

const MODES: [(&str, Mode); 2] = [("userfaultfd", Mode::Userfaultfd), ("exits", Mode::UserfaultfdAndExits)];

/// A run that is done: the number of its row and of its column.
struct Done {
    row: usize,
    column: usize,
    run: UserfaultRun,
}

/// Runs the model, and returns its part below `first`.
pub(super) fn run(context: &Context<'_>, first: &Part) -> Result<Part, Failure> {
    let topology = Topology::named(TOPOLOGY)?;
    let planned =
        (0..MEASURED.len()).flat_map(|row| (0..MODES.len()).map(move |column| (title(row, column), (row, column))));
    let run = |(row, column): (usize, usize)| -> Result<Done, Failure> {
        let userfault = Userfault {
            nr_vcpus: MEASURED[row].0,
            nr_pages: (context.args.bytes >> 12).min(MAX_PAGES),
            backing: Backing::Allocated,
            uffds: Uffds::One,
            mode: MODES[column].1,
            hypervisor: Hypervisor::Kvm,
            seed: context.args.seed.0,
        };
        let run = userfault.run(&topology, context.parameters)?;
        Ok(Done { row, column, run })
    };
    context.measure(planned, run, |all| first.clone().and(part(&topology, all)))
}

fn title(row: usize, column: usize) -> String {
    format!("{}, {} vCPUs on {TOPOLOGY}", MODES[column].0, MEASURED[row].0)
}

impl Done {
    fn nr_vcpus(&self) -> usize {
        MEASURED[self.row].0
    }

    /// Pages a second of all vCPUs together.
    fn rate(&self) -> f64 {
        self.run.pages_per_second * self.nr_vcpus() as f64
    }

    fn published(&self) -> f64 {
        MEASURED[self.row].1[self.column] * 1000.0
    }

    fn labels(&self) -> Labels {
        labels([
            ("mode", MODES[self.column].0.into()),
            ("vcpus", self.nr_vcpus().into()),
            ("topology", TOPOLOGY.into()),
        ])
    }
}

fn part(topology: &Topology, all: &[Done]) -> Part {
    let mut part = Part::default();
    let header = ["one descriptor, all vCPUs together", MODES[0].0, PUBLISHED, "error", MODES[1].0, PUBLISHED, "error"];
    let mut figures = table::figures(header.map(str::to_owned));
    for (row, (nr_vcpus, _)) in MEASURED.into_iter().enumerate() {
        let cells = (0..MODES.len()).flat_map(|column| {
            match all.iter().find(|done| (done.row, done.column) == (row, column)) {
                Some(done) => [
                    quantity(done.rate(), Unit::PerSecond),
                    quantity(done.published(), Unit::PerSecond),
                    error_of(done.rate(), done.published()),
                ],
                None => [(); 3].map(|()| NOTHING.to_owned()),
            }
        });
        figures.add_row(std::iter::once(format!("{nr_vcpus} vCPUs")).chain(cells));
    }
    add_line!(
        part.text,
        "{figures}\n\nA rate is pages in a second, of all vCPUs together, on the topology\n{TOPOLOGY}. Published: {ON}."
    );
    for done in all {
        let labels = done.labels();
        part.figures.push(Figure::new("total_page_rate", Unit::PerSecond, &labels, [done.rate()]));
        part.published.push(PublishedFigure::new(
            "total_page_rate",
            Unit::PerSecond,
            &labels,
            [done.published(); 2],
            ON,
        ));
        part.runs.push(Traced::new(title(done.row, done.column), labels, topology, &done.run.report));
    }
    part
}
