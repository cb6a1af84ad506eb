//! Parallel page faults: the phases of dirty_log_perf_test on modelled machines.
//!
//! It predicts the published times of KVM with the exclusive lock and with the series (shared
//! lock), on the published machine. Then it shows how the rate of faults grows with the number of
//! CPUs, for each lock of slat, with the host around the engine and with the engine alone.

mod curves;
mod prediction;

use slat_model::experiment::Hypervisor;
use slat_model::experiment::phases::{Around, DirtyTracking, Lock, Phases, PhasesRun, Sharing};
use slat_model::topology::Topology;

use super::machines::bytes_for;
use super::trace::Traced;
use super::{Context, Part};
use crate::failure::Failure;
use crate::options::Named;
use crate::results::{Labels, labels};

/// Pages of memory that all vCPUs access are as many as these parts of a vCPU.
const OVERLAPPING_PARTS: u64 = 4;

/// What distinguishes runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    hypervisor: Hypervisor,
    lock: Lock,
    sharing: Sharing,
    around: Around,
    nr_cpus: usize,
}

/// A run that is done.
#[derive(Clone, Debug)]
struct Done {
    case: Case,
    topology: Topology,
    run: PhasesRun,
    bytes: u64,
}

impl Case {
    fn labels(self) -> Labels {
        labels([
            ("hypervisor", self.hypervisor.name().into()),
            ("lock", self.lock.name().into()),
            ("access", self.sharing.name().into()),
            ("around", self.around.name().into()),
            ("cpus", self.nr_cpus.into()),
        ])
    }

    fn title(self) -> String {
        let around = match self.around {
            Around::Host => "with the host",
            Around::Nothing => "the engine alone",
        };
        format!(
            "{}, lock {}, {}, {around}, {} CPUs",
            self.hypervisor.name(),
            self.lock.name(),
            self.sharing.name(),
            self.nr_cpus
        )
    }

    /// Memory of each vCPU, if `bytes` are wanted. With many CPUs and the host around the engine a
    /// page takes the same time with less. The engine alone has them all, since its first faults
    /// are slower.
    fn bytes_each(self, bytes: u64) -> u64 {
        match self.around {
            Around::Host => bytes_for(self.nr_cpus, bytes),
            Around::Nothing => bytes,
        }
    }

    /// Pages of all memory that is accessed, if each vCPU is wanted to have a part of `bytes`
    /// bytes.
    fn nr_pages_in_all(self, bytes: u64) -> u64 {
        let nr_parts = match self.sharing {
            Sharing::Partitioned => self.nr_cpus as u64,
            Sharing::Overlapping => OVERLAPPING_PARTS,
        };
        (self.bytes_each(bytes) >> 12) * nr_parts
    }

    fn run(self, context: &Context<'_>, topology: &Topology) -> Result<Done, Failure> {
        let args = context.args;
        let (tracking, nr_rounds) = match self.hypervisor {
            Hypervisor::Kvm => (DirtyTracking::PageModificationLog, args.iterations),
            // The curves are of the first faults only.
            Hypervisor::Slat => (DirtyTracking::WriteProtect, 0),
        };
        let phases = Phases {
            nr_vcpus: self.nr_cpus,
            nr_pages: match self.sharing {
                Sharing::Partitioned => self.bytes_each(args.bytes) >> 12,
                Sharing::Overlapping => self.nr_pages_in_all(args.bytes),
            },
            sharing: self.sharing,
            lock: self.lock,
            hypervisor: self.hypervisor,
            tracking,
            nr_rounds,
            around: self.around,
            seed: args.seed.0,
        };
        let run = phases.run(topology, context.parameters)?;
        Ok(Done { case: self, topology: topology.clone(), run, bytes: self.bytes_each(args.bytes) })
    }
}

pub(super) fn run(context: &Context<'_>) -> Result<Part, Failure> {
    let published = prediction::topology()?;
    let mut planned: Vec<_> = prediction::cases().map(|case| (case.title(), (case, published.clone()))).collect();
    for case in curves::cases(&context.machines.cpus) {
        planned.push((case.title(), (case, context.machines.topology(case.nr_cpus)?)));
    }
    context.measure(planned, |(case, topology)| case.run(context, &topology), |all| part(context, all))
}

fn part(context: &Context<'_>, all: &[Done]) -> Part {
    let mut part = Part { runs: all.iter().map(Done::traced).collect(), ..Part::default() };
    prediction::add(&mut part, context.args, all);
    curves::add(&mut part, context, all);
    part
}

impl Done {
    fn traced(&self) -> Traced {
        let mut labels = self.case.labels();
        labels.insert("bytes".to_owned(), self.bytes.into());
        Traced::new(self.case.title(), labels, &self.topology, &self.run.report)
    }
}

/// The run of a case, if it is done.
fn find(all: &[Done], case: Case) -> Option<&Done> {
    all.iter().find(|done| done.case == case)
}
