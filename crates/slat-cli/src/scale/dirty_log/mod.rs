//! Operations of the hypervisor beside vCPUs that fault, on modelled machines: harvests of the
//! dirty log, and invalidations.
//!
//! One table has a CPU for each vCPU, and all operations. The curves have two of them by the number
//! of CPUs. The last table has more vCPUs than CPUs, so the operating system preempts vCPUs
//! anywhere, inside the engine, too.

mod curves;

use slat_model::experiment::beside::{Beside, BesideRun, Counted, Operation};
use slat_model::experiment::phases::{Around, Lock};
use slat_model::machine::LockKind;
use slat_model::parameters::Parameters;
use slat_model::topology::Topology;

use super::machines::{MANY_CPUS, bytes_for};
use super::trace::Traced;
use super::{Context, Part};
use crate::failure::Failure;
use crate::options::Named;
use crate::quantity::{Unit, digits, or_nothing, quantity};
use crate::results::{Figure, Labels, labels};
use crate::table;

/// The machine of the tables; of the curves, unless they have more CPUs, or the user chose another.
const TOPOLOGY: &str = "2x48";
/// CPUs for vCPUs. The other one is for the hypervisor's thread.
const NR_CPUS: usize = 95;

/// More vCPUs than CPUs.
const NR_MANY_VCPUS: usize = 416;

/// Pages of each vCPU, at most; the second is for more vCPUs than CPUs.
const MAX_PAGES: u64 = 4096;
const MAX_PAGES_OF_MANY: u64 = 1024;

/// Times of the runs in nanoseconds of virtual time.
const DURATION_NS: u64 = 2_000_000;
const DURATION_OF_MANY_NS: u64 = 20_000_000;
/// With so many CPUs that the run would take minutes.
const DURATION_ON_MANY_CPUS_NS: u64 = 1_000_000;

const LOCKS: [Lock; 3] = [Lock::None, Lock::Shared, Lock::Exclusive];

const OPERATIONS: [Operation; 4] =
    [Operation::Nothing, Operation::Harvest, Operation::InvalidatePage, Operation::InvalidateUnused];

/// What distinguishes runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    operation: Operation,
    lock: Lock,
    lock_kind: LockKind,
    nr_vcpus: usize,
    /// CPUs for vCPUs.
    nr_cpus: usize,
}

/// A run that is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Planned {
    case: Case,
    topology: Topology,
}

/// A run that is done.
#[derive(Clone, Debug)]
struct Done {
    case: Case,
    topology: Topology,
    run: BesideRun,
    bytes: u64,
}

/// A run with a CPU for each vCPU.
const fn beside(operation: Operation, lock: Lock, nr_vcpus: usize) -> Case {
    Case { operation, lock, lock_kind: LockKind::Spinning, nr_vcpus, nr_cpus: nr_vcpus }
}

/// The runs of the tables, in their order.
fn cases() -> impl Iterator<Item = Case> {
    let alone = OPERATIONS.into_iter().flat_map(|operation| LOCKS.map(|lock| beside(operation, lock, NR_CPUS)));
    alone.chain(LOCKS.map(|lock| Case {
        operation: Operation::InvalidatePage,
        lock,
        // A holder of a spinning lock is not preempted.
        lock_kind: LockKind::Sleeping,
        nr_vcpus: NR_MANY_VCPUS,
        nr_cpus: NR_CPUS,
    }))
}

impl Case {
    /// Whether there are more vCPUs than CPUs.
    fn is_of_many(self) -> bool {
        self.nr_vcpus > self.nr_cpus
    }

    fn labels(self, topology: &Topology) -> Labels {
        labels([
            ("operation", self.operation.name().into()),
            ("lock", self.lock.name().into()),
            ("lock_kind", self.lock_kind.name().into()),
            ("vcpus", self.nr_vcpus.into()),
            ("cpus", self.nr_cpus.into()),
            ("topology", topology.name().into()),
        ])
    }

    fn title(self) -> String {
        let (operation, lock) = (self.operation.name(), self.lock.name());
        format!("{operation}, lock {lock}, {} vCPUs on {} CPUs", self.nr_vcpus, self.nr_cpus)
    }

    fn run(self, context: &Context<'_>, topology: &Topology) -> Result<Done, Failure> {
        let (max_pages, around, duration_ns) = if self.is_of_many() {
            (MAX_PAGES_OF_MANY, Around::Host, DURATION_OF_MANY_NS)
        } else if self.nr_cpus > MANY_CPUS {
            (MAX_PAGES, Around::Nothing, DURATION_ON_MANY_CPUS_NS)
        } else {
            (MAX_PAGES, Around::Nothing, DURATION_NS)
        };
        let nr_pages = (bytes_for(self.nr_cpus, context.args.bytes) >> 12).min(max_pages);
        let beside = Beside {
            nr_vcpus: self.nr_vcpus,
            nr_cpus: self.nr_cpus,
            nr_pages,
            lock: self.lock,
            lock_kind: self.lock_kind,
            operation: self.operation,
            around,
            duration_ns,
            seed: context.args.seed.0,
        };
        let run = beside.run(topology, context.parameters)?;
        Ok(Done { case: self, topology: topology.clone(), run, bytes: nr_pages << 12 })
    }
}

pub(super) fn run(context: &Context<'_>) -> Result<Part, Failure> {
    let topology = Topology::named(TOPOLOGY)?;
    let mut planned: Vec<_> = cases().map(|case| Planned { case, topology: topology.clone() }).collect();
    let points = curves::planned(context.machines)?;
    for point in &points {
        // A run of the tables is a point of the curves, too.
        if !planned.contains(point) {
            planned.push(point.clone());
        }
    }
    let planned = planned.into_iter().map(|planned| (planned.case.title(), planned));
    context.measure(planned, |planned| planned.case.run(context, &planned.topology), |all| part(context, &points, all))
}

/// How many there were in a second; `None` if there were none.
fn per_second(counted: &Counted, duration_ns: u64) -> Option<f64> {
    (counted.count != 0).then(|| counted.count as f64 * 1e9 / duration_ns as f64)
}

fn rate_cell(counted: &Counted, duration_ns: u64) -> String {
    or_nothing(per_second(counted, duration_ns).map(|rate| digits(rate, false)))
}

fn mean_s(counted: &Counted) -> Option<f64> {
    (counted.count != 0).then(|| counted.total_ns as f64 / 1e9 / counted.count as f64)
}

fn longest_s(counted: &Counted) -> Option<f64> {
    (counted.count != 0).then_some(counted.longest_ns as f64 / 1e9)
}

fn cell(value: Option<f64>, unit: Unit) -> String {
    or_nothing(value.map(|value| quantity(value, unit)))
}

fn part(context: &Context<'_>, points: &[Planned], all: &[Done]) -> Part {
    let mut part = Part { runs: all.iter().map(Done::traced).collect(), ..Part::default() };
    add_table(&mut part.text, all);
    add_table_of_many(&mut part.text, context.parameters, all);
    curves::add(&mut part.text, points, all);
    for done in all {
        let labels = done.labels();
        let BesideRun { faults, operations, duration_ns, .. } = &done.run;
        for (name, unit, value) in [
            // A bound is no figure.
            ("fault_rate", Unit::PerSecond, per_second(faults, *duration_ns).filter(|_| !done.is_bound())),
            ("operation_rate", Unit::PerSecond, per_second(operations, *duration_ns)),
            ("longest_fault", Unit::Seconds, longest_s(faults)),
            ("longest_operation", Unit::Seconds, longest_s(operations)),
        ] {
            part.figures.extend(value.map(|value| Figure::new(name, unit, &labels, [value])));
        }
    }
    part
}

/// The memory of each vCPU of the cases that are `of_table`.
fn memory(all: &[Done], of_table: impl Fn(&Case) -> bool) -> String {
    let bytes = all.iter().find(|done| of_table(&done.case)).map_or(0, |done| done.bytes);
    quantity(bytes as f64, Unit::Bytes)
}

/// Adds the table with a CPU for each vCPU.
fn add_table(text: &mut String, all: &[Done]) {
    let header = ["operation, lock", "faults/s", "mean", "longest", "calls/s", "mean", "longest"];
    let mut figures = table::figures(header.map(str::to_owned));
    let rows = cases().filter(|case| !case.is_of_many());
    for done in rows.filter_map(|case| all.iter().find(|done| done.case == case)) {
        let Done { case, run, .. } = done;
        let times = |counted| [cell(mean_s(counted), Unit::Seconds), cell(longest_s(counted), Unit::Seconds)];
        let of_faults = std::iter::once(done.fault_cell()).chain(times(&run.faults));
        let cells = of_faults.chain(std::iter::once(done.call_cell())).chain(times(&run.operations));
        let name = format!("{}, {}", case.operation.name(), case.lock.name());
        figures.add_row(std::iter::once(name).chain(cells));
    }
    add_line!(
        text,
        "{figures}\n\n\
         {NR_CPUS} vCPUs on {NR_CPUS} CPUs of the topology {TOPOLOGY}, with {} each, write pages whose writes are logged,\n\
         for {} of virtual time, the engine alone. A thread on another CPU does one operation after\n\
         another: it gets the dirty log of all memory, or invalidates a page of a vCPU, or 2 MiB that no\n\
         vCPU uses. Locks spin. Where a rate has ≥, vCPUs had all of their pages for a time, and could have\n\
         faulted more.\n",
        memory(all, |case| !case.is_of_many()),
        quantity(DURATION_NS as f64 / 1e9, Unit::Seconds)
    );
}

/// Adds the table with more vCPUs than CPUs.
fn add_table_of_many(text: &mut String, parameters: &Parameters, all: &[Done]) {
    if !all.iter().any(|done| done.case.is_of_many()) {
        return;
    }
    let header = ["preempted vCPUs, by lock", "longest fault", "longest operation", "quantum"];
    let mut figures = table::figures(header.map(str::to_owned));
    for Done { case, run, .. } in all.iter().filter(|done| done.case.is_of_many()) {
        figures.add_row([
            case.lock.name().to_owned(),
            cell(longest_s(&run.faults), Unit::Seconds),
            cell(longest_s(&run.operations), Unit::Seconds),
            quantity(parameters.host.quantum.seconds(), Unit::Seconds),
        ]);
    }
    add_line!(
        text,
        "{figures}\n\n\
         {NR_MANY_VCPUS} vCPUs with {} each, on {NR_CPUS} CPUs of the topology {TOPOLOGY}, with the host, for {} of\n\
         virtual time, beside invalidations of a page. A vCPU that runs for a quantum is preempted, inside\n\
         the engine, too. Locks sleep. A time is without that in which its own thread had no CPU.",
        memory(all, |case| case.is_of_many()),
        quantity(DURATION_OF_MANY_NS as f64 / 1e9, Unit::Seconds)
    );
}

impl Done {
    /// Faults in a second.
    fn fault_cell(&self) -> String {
        let rate = rate_cell(&self.run.faults, self.run.duration_ns);
        if self.is_bound() { format!("≥{rate}") } else { rate }
    }

    /// Whether vCPUs could have faulted more.
    fn is_bound(&self) -> bool {
        self.run.nr_idle_rounds > 0
    }

    /// Operations in a second.
    fn call_cell(&self) -> String {
        rate_cell(&self.run.operations, self.run.duration_ns)
    }

    fn labels(&self) -> Labels {
        self.case.labels(&self.topology)
    }

    fn traced(&self) -> Traced {
        let mut labels = self.labels();
        labels.insert("bytes".to_owned(), self.bytes.into());
        Traced::new(self.case.title(), labels, &self.topology, &self.run.report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantity::NOTHING;

    #[test]
    fn each_run_has_its_labels_and_one_cpu_is_left() {
        let all: Vec<Case> = cases().collect();
        assert_eq!(all.len(), 4 * 3 + 3);
        let topology = Topology::named(TOPOLOGY).unwrap();
        for (index, case) in all.iter().enumerate() {
            assert!(all[..index].iter().all(|other| other.labels(&topology) != case.labels(&topology)), "{case:?}");
        }
        assert_eq!(topology.nr_cpus(), NR_CPUS + 1);
    }

    #[test]
    fn without_operations_there_is_no_rate() {
        let counted = Counted { count: 4, longest_ns: 900, total_ns: 2000 };
        assert_eq!(per_second(&counted, 2_000_000), Some(2000.0));
        assert_eq!(mean_s(&counted).map(|mean| (mean * 1e9).round()), Some(500.0));
        assert_eq!(longest_s(&counted), Some(900.0 / 1e9));
        let none = Counted::default();
        assert_eq!([per_second(&none, 1), mean_s(&none), longest_s(&none)], [None; 3]);
        assert_eq!(cell(None, Unit::Seconds), NOTHING);
    }
}
