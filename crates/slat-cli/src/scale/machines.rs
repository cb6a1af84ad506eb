//! The modelled machines that the options ask for: their topologies, and how many CPUs are used.

use slat_model::topology::Topology;

use super::ScaleArgs;
use crate::failure::{Failure, ensure};

/// Pages of a VM, at most: 512 GiB, which is more than was published.
const MAX_PAGES: u64 = 1 << 27;

/// Runs with more CPUs than that have less memory, where it changes nothing but their wall time.
pub(super) const MANY_CPUS: usize = 96;
/// Memory of each vCPU there, at most.
pub(super) const MAX_BYTES_OF_MANY: u64 = 1 << 20;

/// Memory of each vCPU in a run with so many CPUs, if `bytes` are wanted, and less does.
pub(super) fn bytes_for(nr_cpus: usize, bytes: u64) -> u64 {
    if nr_cpus > MANY_CPUS { bytes.min(MAX_BYTES_OF_MANY) } else { bytes }
}

/// The machines of the curves.
#[derive(Clone, Debug)]
pub(super) struct Machines {
    /// In ascending order, each once.
    pub(super) cpus: Vec<usize>,
    /// `None`: the smallest built-in topology that has enough CPUs.
    pub(super) chosen: Option<Topology>,
}

impl Machines {
    /// Checks the options.
    ///
    /// # Errors
    /// [`Failure::Usage`] for a number of CPUs that is there twice, or that no topology has, for a
    /// topology that is not one, and for too much memory.
    pub(super) fn new(args: &ScaleArgs) -> Result<Machines, Failure> {
        let mut cpus = args.cpus.clone();
        cpus.sort_unstable();
        if let Some(pair) = cpus.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Failure::Usage(format!("--cpus has {} twice", pair[0])));
        }
        let chosen = args.topology.as_deref().map(Topology::named).transpose()?;
        let machines = Machines { cpus, chosen };
        let most = machines.most();
        let topology = machines.topology(most)?;
        if topology.nr_cpus() < most {
            let next_step = if machines.chosen.is_some() { "choose fewer" } else { "choose fewer, or a --topology" };
            return Err(Failure::Usage(format!(
                "--cpus {most}: the topology '{}' has {} CPUs; {next_step}",
                topology.name(),
                topology.nr_cpus()
            )));
        }
        // The published machine has 96 CPUs.
        let nr_pages = (args.bytes >> 12).saturating_mul(most.max(96) as u64);
        ensure!(
            nr_pages <= MAX_PAGES,
            Usage,
            "--bytes {}: the memory of all vCPUs is more than {} GiB; choose less",
            args.bytes,
            MAX_PAGES >> 18
        );
        Ok(machines)
    }

    /// The largest number of CPUs.
    pub(super) fn most(&self) -> usize {
        self.cpus.last().copied().unwrap_or(1)
    }

    /// The topology for so many CPUs.
    pub(super) fn topology(&self, nr_cpus: usize) -> Result<Topology, Failure> {
        match &self.chosen {
            Some(topology) => Ok(topology.clone()),
            None => Ok(Topology::with_cpus(nr_cpus)?),
        }
    }

    pub(super) fn topology_name(&self) -> &str {
        self.chosen.as_ref().map_or("built-in", Topology::name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;

    fn machines(options: &str) -> Result<Machines, Failure> {
        Machines::new(&parse(&format!("slat scale {options}"))?)
    }

    #[test]
    fn the_smallest_topology_that_has_enough_cpus_is_the_default() {
        let machines = machines("--cpus 96,1,16").unwrap();
        assert_eq!((&machines.cpus[..], machines.most()), (&[1, 16, 96][..], 96));
        let sizes: Vec<_> = machines.cpus.iter().map(|&n| machines.topology(n).unwrap().nr_cpus()).collect();
        assert_eq!(sizes, [2, 16, 96]);
        assert_eq!(machines.topology_name(), "built-in");
    }

    #[test]
    fn many_cpus_have_less_memory() {
        let bytes = |nr_cpus| [1 << 20, 16 << 20].map(|bytes| bytes_for(nr_cpus, bytes));
        assert_eq!([bytes(96), bytes(97)], [[1 << 20, 16 << 20], [1 << 20; 2]]);
    }

    #[test]
    fn a_chosen_topology_is_that_of_all_numbers() {
        let machines = machines("--cpus 1,100 --topology 4x64").unwrap();
        assert!(machines.cpus.iter().all(|&n| machines.topology(n).unwrap().nr_cpus() == 256));
        assert_eq!(machines.topology_name(), "256 CPUs, 4 nodes");
    }
}
