//! Userfault: KVM's demand_paging_test on modelled machines.
//!
//! It predicts the published rates of KVM, each row of the tables on x86. Then it predicts what was
//! not published: the exits of slat, and 416 vCPUs.

use slat_model::experiment::userfault::{self as model, Userfault, UserfaultRun};
use slat_model::experiment::{Backing, Hypervisor};
use slat_model::topology::Topology;

use super::exits;
use super::names::error_of;
use super::trace::Traced;
use super::{Context, Part};
use crate::failure::Failure;
use crate::options::{Named, ValueName};
use crate::quantity::{Unit, or_nothing, quantity, times};
use crate::results::{Figure, Labels, PublishedFigure, labels};
use crate::table::{self, PUBLISHED};
use crate::userfault::{Group, Mode, Uffds, VCPUS, X86};

/// The published machine, and the one with the most CPUs.
const PUBLISHED_TOPOLOGY: &str = "2x48";
const LARGE_TOPOLOGY: &str = "8x52";

/// vCPUs on the large machine.
const NR_LARGE: usize = 416;

/// Pages of each vCPU, at most. The published 16384 have the same rate.
const MAX_PAGES: u64 = 1024;
/// The same on the large machine.
const MAX_PAGES_LARGE: u64 = 256;

const ON: &str = "KVM Userfault, 2024, 96 CPUs";

/// The group of the table without published figures.
const UNPUBLISHED: &Group = &X86[0];

/// What distinguishes runs.
#[derive(Clone, Copy, Debug)]
struct Case {
    group: &'static Group,
    mode: Mode,
    nr_vcpus: usize,
    hypervisor: Hypervisor,
}

/// A run that is done.
#[derive(Clone, Debug)]
struct Done {
    case: Case,
    topology: Topology,
    run: UserfaultRun,
}

/// The model's way of resolving pages; `None`: it has none.
fn model_mode(mode: Mode) -> Option<model::Mode> {
    match mode {
        Mode::None => Some(model::Mode::None),
        Mode::MissingOneReader | Mode::MinorOneReader => Some(model::Mode::UserfaultfdOneReader),
        Mode::Missing | Mode::Minor => Some(model::Mode::Userfaultfd),
        Mode::MissingAndExits | Mode::MinorAndExits => Some(model::Mode::UserfaultfdAndExits),
        Mode::Exits => Some(model::Mode::Exits),
        Mode::Ring => None,
    }
}

/// The rows of a group that the model has.
fn modes(group: &Group) -> impl Iterator<Item = Mode> {
    group.rows.iter().map(|row| row.mode).filter(|&mode| model_mode(mode).is_some())
}

/// All runs, in the order of the tables.
fn cases() -> impl Iterator<Item = Case> {
    let hypervisor = Hypervisor::Kvm;
    let published = X86.iter().flat_map(move |group| {
        modes(group)
            .flat_map(move |mode| VCPUS.into_iter().map(move |nr_vcpus| Case { group, mode, nr_vcpus, hypervisor }))
    });
    published.chain([
        unpublished(64, Hypervisor::Slat),
        unpublished(NR_LARGE, Hypervisor::Kvm),
        unpublished(NR_LARGE, Hypervisor::Slat),
    ])
}

/// A run of exits.
fn unpublished(nr_vcpus: usize, hypervisor: Hypervisor) -> Case {
    Case { group: UNPUBLISHED, mode: Mode::Exits, nr_vcpus, hypervisor }
}

impl Case {
    /// Whether it is this run of this group.
    fn is(&self, other: &Case) -> bool {
        std::ptr::eq(self.group, other.group)
            && (self.mode, self.nr_vcpus, self.hypervisor) == (other.mode, other.nr_vcpus, other.hypervisor)
    }

    fn labels(&self) -> Labels {
        labels([
            ("mode", self.mode.name().into()),
            ("backing", self.group.backing.to_string().into()),
            ("uffds", self.group.uffds.name().into()),
            ("vcpus", self.nr_vcpus.into()),
            ("hypervisor", self.hypervisor.name().into()),
        ])
    }

    fn title(&self) -> String {
        let hypervisor = self.hypervisor.name();
        format!("{hypervisor}, {}, {}, {} vCPUs", group_title(self.group), self.mode, self.nr_vcpus)
    }

    fn topology(&self) -> &'static str {
        if self.nr_vcpus == NR_LARGE { LARGE_TOPOLOGY } else { PUBLISHED_TOPOLOGY }
    }

    /// Pages of each vCPU, if so many bytes are wanted.
    fn nr_pages(&self, bytes: u64) -> u64 {
        (bytes >> 12).min(if self.nr_vcpus == NR_LARGE { MAX_PAGES_LARGE } else { MAX_PAGES })
    }

    fn run(&self, context: &Context<'_>, mode: model::Mode) -> Result<Done, Failure> {
        let topology = Topology::named(self.topology())?;
        let is_anonymous = std::ptr::eq(self.group, &X86[0]);
        let userfault = Userfault {
            nr_vcpus: self.nr_vcpus,
            nr_pages: self.nr_pages(context.args.bytes),
            backing: if is_anonymous { Backing::Anonymous } else { Backing::Allocated },
            uffds: match self.group.uffds {
                Uffds::One => model::Uffds::One,
                Uffds::PerVcpu => model::Uffds::PerVcpu,
            },
            mode,
            hypervisor: self.hypervisor,
            seed: context.args.seed.0,
        };
        let run = userfault.run(&topology, context.parameters)?;
        Ok(Done { case: *self, topology, run })
    }

    /// What was published: of KVM only.
    fn published(&self) -> Option<f64> {
        if self.hypervisor == Hypervisor::Slat {
            return None;
        }
        self.group.rate(self.mode, self.nr_vcpus)
    }
}

fn group_title(group: &Group) -> String {
    format!("{}, {}", group.backing, group.uffds.describe())
}

pub(super) fn run(context: &Context<'_>) -> Result<Part, Failure> {
    let planned = cases().filter_map(|case| Some((case.title(), (case, model_mode(case.mode)?))));
    let first = context.measure(planned, |(case, mode)| case.run(context, mode), |all| part(context, all))?;
    exits::run(context, &first)
}

fn part(context: &Context<'_>, all: &[Done]) -> Part {
    let traced = |done: &Done| Traced::new(done.case.title(), done.case.labels(), &done.topology, &done.run.report);
    let mut part = Part { runs: all.iter().map(traced).collect(), ..Part::default() };
    X86.iter().for_each(|group| add_table(&mut part.text, group, all));
    add_unpublished(&mut part.text, all);
    let bytes = context.args.bytes;
    let pages = [VCPUS[0], NR_LARGE].map(|nr_vcpus| unpublished(nr_vcpus, Hypervisor::Slat).nr_pages(bytes));
    add_line!(
        part.text,
        "A rate is pages in a second, of each vCPU. Predicted: with {} pages for each vCPU, on the topology\n\
         {PUBLISHED_TOPOLOGY}; 416 vCPUs with {} pages for each, on {LARGE_TOPOLOGY}. Published: KVM Userfault, version 1, December\n\
         2024, 96 real CPUs, 16384 pages for each vCPU.",
        pages[0],
        pages[1]
    );
    for done in all {
        let labels = done.case.labels();
        part.figures.push(Figure::new("page_rate", Unit::PerSecond, &labels, [done.run.pages_per_second]));
        let figure = |rate| PublishedFigure::new("page_rate", Unit::PerSecond, &labels, [rate; 2], ON);
        part.published.extend(done.case.published().map(figure));
    }
    part
}

/// Adds the table of a group: for each number of vCPUs the prediction, what was published, and the
/// error.
fn add_table(text: &mut String, group: &'static Group, all: &[Done]) {
    if !all.iter().any(|done| std::ptr::eq(done.case.group, group)) {
        return;
    }
    let header = VCPUS.map(|nr_vcpus| [format!("{nr_vcpus} vCPUs"), PUBLISHED.to_owned(), "error".to_owned()]);
    let mut figures = table::figures(std::iter::once(group_title(group)).chain(header.into_iter().flatten()));
    for mode in modes(group) {
        let cells = VCPUS.into_iter().flat_map(|nr_vcpus| {
            let case = Case { group, mode, nr_vcpus, hypervisor: Hypervisor::Kvm };
            let rate = find(all, &case);
            let error = rate.zip(case.published()).map(|(rate, published)| error_of(rate, published));
            [rate_cell(rate), rate_cell(case.published()), or_nothing(error)]
        });
        figures.add_row(std::iter::once(mode.to_string()).chain(cells));
    }
    add_line!(text, "{figures}\n");
}

/// Adds the table of exits, with and without the lock of KVM.
fn add_unpublished(text: &mut String, all: &[Done]) {
    let most = [64, NR_LARGE];
    if !all.iter().any(|done| done.case.hypervisor == Hypervisor::Slat) {
        return;
    }
    let title = format!("exits ({}), {}", Mode::Exits, group_title(UNPUBLISHED));
    let mut figures = table::figures([&title, "kvm", "slat", "slat vs kvm"].map(str::to_owned));
    for nr_vcpus in most {
        let [kvm, slat] = [Hypervisor::Kvm, Hypervisor::Slat].map(|one| find(all, &unpublished(nr_vcpus, one)));
        let ratio = or_nothing(slat.zip(kvm).map(|(slat, kvm)| times(slat / kvm)));
        let topology = unpublished(nr_vcpus, Hypervisor::Slat).topology();
        figures.add_row([format!("{nr_vcpus} vCPUs on {topology}"), rate_cell(kvm), rate_cell(slat), ratio]);
    }
    add_line!(text, "{figures}\n");
}

fn rate_cell(rate: Option<f64>) -> String {
    or_nothing(rate.map(|rate| quantity(rate, Unit::PerSecond)))
}

/// The rate of a case, if its run is done.
fn find(all: &[Done], case: &Case) -> Option<f64> {
    all.iter().find(|done| done.case.is(case)).map(|done| done.run.pages_per_second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_published_rate_has_a_run_and_each_run_has_its_labels() {
        let all: Vec<Case> = cases().collect();
        // 5, 5 and 4 rows.
        assert_eq!(all.iter().filter(|case| case.published().is_some()).count(), 14 * VCPUS.len());
        assert_eq!(all.len(), 14 * VCPUS.len() + 3);
        for (index, case) in all.iter().enumerate() {
            assert!(model_mode(case.mode).is_some(), "{case:?}");
            assert!(all[..index].iter().all(|other| other.labels() != case.labels()), "{case:?}");
        }
    }

    #[test]
    fn pages_are_those_that_are_wanted_up_to_a_limit() {
        let pages = |nr_vcpus, bytes| unpublished(nr_vcpus, Hypervisor::Slat).nr_pages(bytes);
        assert_eq!([pages(64, 16 << 20), pages(64, 1 << 16), pages(NR_LARGE, 16 << 20)], [1024, 16, 256]);
    }
}
