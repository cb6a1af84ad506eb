//! Harvests beside writers, and invalidations beside faults, by the number of CPUs and by lock.
//!
//! Each vCPU has a CPU, and the hypervisor's thread has another one. So a machine all of whose CPUs
//! are asked for has one vCPU less.

use slat_model::experiment::beside::{Counted, Operation};
use slat_model::topology::Topology;

use super::super::machines::{MANY_CPUS, MAX_BYTES_OF_MANY, Machines};
use super::{DURATION_ON_MANY_CPUS_NS, Done, LOCKS, Planned, TOPOLOGY, beside, cell, longest_s};
use crate::failure::Failure;
use crate::options::Named;
use crate::quantity::{NOTHING, Unit, quantity};
use crate::table;

/// A table: what is counted beside which operation.
struct Curve {
    title: &'static str,
    operation: Operation,
    cell: fn(&Done) -> String,
    counted: fn(&Done) -> &Counted,
}

const CURVES: [Curve; 4] = [
    Curve {
        title: "harvests/s beside writers, by lock",
        operation: Operation::Harvest,
        cell: Done::call_cell,
        counted: |done| &done.run.operations,
    },
    Curve {
        title: "faults/s beside harvests, by lock",
        operation: Operation::Harvest,
        cell: Done::fault_cell,
        counted: |done| &done.run.faults,
    },
    Curve {
        title: "invalidations/s beside faults, by lock",
        operation: Operation::InvalidatePage,
        cell: Done::call_cell,
        counted: |done| &done.run.operations,
    },
    Curve {
        title: "faults/s beside invalidations, by lock",
        operation: Operation::InvalidatePage,
        cell: Done::fault_cell,
        counted: |done| &done.run.faults,
    },
];

/// The machines of the curves, and on each the vCPUs that leave a CPU for the hypervisor's thread.
fn points(machines: &Machines) -> Result<Vec<(usize, Topology)>, Failure> {
    let default = Topology::named(TOPOLOGY)?;
    let mut points = Vec::new();
    for &nr_cpus in &machines.cpus {
        let is_default = machines.chosen.is_none() && nr_cpus <= default.nr_cpus();
        let topology = if is_default { default.clone() } else { machines.topology(nr_cpus)? };
        let nr_vcpus = nr_cpus.min(topology.nr_cpus().saturating_sub(1)).max(1);
        if !points.contains(&(nr_vcpus, topology.clone())) {
            points.push((nr_vcpus, topology));
        }
    }
    Ok(points)
}

pub(super) fn planned(machines: &Machines) -> Result<Vec<Planned>, Failure> {
    let mut planned = Vec::new();
    for operation in [Operation::Harvest, Operation::InvalidatePage] {
        for (nr_vcpus, topology) in points(machines)? {
            planned.extend(
                LOCKS.map(|lock| Planned { case: beside(operation, lock, nr_vcpus), topology: topology.clone() }),
            );
        }
    }
    Ok(planned)
}

/// Adds the curves, as far as `planned` is done.
pub(super) fn add(text: &mut String, planned: &[Planned], all: &[Done]) {
    let of = |planned: &Planned| all.iter().find(|done| done.case == planned.case && done.topology == planned.topology);
    for curve in &CURVES {
        let header = LOCKS.map(|lock| [lock.name(), "longest"]);
        let mut figures =
            table::figures(std::iter::once(curve.title).chain(header.into_iter().flatten()).map(str::to_owned));
        let mut is_empty = true;
        let points: Vec<&Planned> = planned.iter().filter(|point| point.case.operation == curve.operation).collect();
        for point in points.chunks(LOCKS.len()) {
            let done: Vec<Option<&Done>> = point.iter().map(|planned| of(planned)).collect();
            let Some(any) = done.iter().flatten().next() else { continue };
            let cells = done.iter().flat_map(|done| match done {
                Some(done) => [(curve.cell)(done), cell(longest_s((curve.counted)(done)), Unit::Seconds)],
                None => [(); 2].map(|()| NOTHING.to_owned()),
            });
            let name = format!("{} of {} CPUs", any.case.nr_vcpus, any.topology.nr_cpus());
            figures.add_row(std::iter::once(name).chain(cells));
            is_empty = false;
        }
        if !is_empty {
            add_line!(text, "\n{figures}");
        }
    }
    add_line!(
        text,
        "\nA row names the CPUs that have a vCPU, and those of the topology. The hypervisor's thread has\n\
         another one. Else as in the first table; with more than {MANY_CPUS} CPUs for {} of virtual time, with\n\
         {} for each vCPU at most.",
        quantity(DURATION_ON_MANY_CPUS_NS as f64 / 1e9, Unit::Seconds),
        quantity(MAX_BYTES_OF_MANY as f64, Unit::Bytes)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;

    fn points(options: &str) -> Vec<(usize, usize)> {
        let machines = Machines::new(&parse(&format!("slat scale {options}")).unwrap()).unwrap();
        super::points(&machines).unwrap().iter().map(|(nr_vcpus, topology)| (*nr_vcpus, topology.nr_cpus())).collect()
    }

    #[test]
    fn the_hypervisors_thread_has_a_cpu_and_no_point_is_there_twice() {
        let default = [1, 2, 4, 8, 16, 32, 64, 95].map(|nr_vcpus| (nr_vcpus, 96));
        assert_eq!(points(""), [&default[..], &[(415, 416)]].concat());
        assert_eq!(points("--cpus 95,96"), [(95, 96)]);
        assert_eq!(points("--cpus 97"), [(97, 256)]);
        assert_eq!(points("--cpus 1,2 --topology 1x2"), [(1, 2)]);
    }

    #[test]
    fn a_run_of_the_tables_is_a_point() {
        let machines = Machines::new(&parse("slat scale").unwrap()).unwrap();
        let planned = planned(&machines).unwrap();
        assert_eq!(planned.len(), 2 * 9 * 3);
        let of_tables = super::super::cases().filter(|case| planned.iter().any(|point| point.case == *case));
        assert_eq!(of_tables.count(), 2 * 3);
    }
}
