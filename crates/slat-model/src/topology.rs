//! The CPUs of a modelled machine: which share a core, a cache and a node.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Deserialize;

use crate::error::ModelError;

/// Largest number of CPUs.
pub const MAX_CPUS: usize = 1024;

/// Largest number of nodes.
pub const MAX_NODES: usize = 16;

/// The CPUs of a machine. They have the numbers from 0 on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Topology {
    name: String,
    cpus: Vec<Place>,
    nr_nodes: usize,
    nr_cores: usize,
}

/// Where a CPU is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    /// CPUs of one core share its caches, and its speed.
    pub(crate) core: u16,
    /// Cores of one complex share a last-level cache.
    pub(crate) complex: u16,
    /// Complexes of one node share its memory.
    pub(crate) node: u8,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    #[serde(rename = "node")]
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    /// As in Linux: "0-23,48-71".
    cpus: String,
    /// CPUs of a core: those that are so many CPUs of the list apart share it.
    #[serde(default = "one")]
    threads_per_core: usize,
    /// Cores that share a last-level cache. Without it, all of the node.
    cores_per_complex: Option<usize>,
}

fn one() -> usize {
    1
}

/// The topologies that the program has.
pub(crate) const BUILT_IN: [(&str, &str); 5] = [
    ("1x2", include_str!("../topologies/1x2.toml")),
    ("1x16", include_str!("../topologies/1x16.toml")),
    ("2x48", include_str!("../topologies/2x48.toml")),
    ("4x64", include_str!("../topologies/4x64.toml")),
    ("8x52", include_str!("../topologies/8x52.toml")),
];

impl Topology {
    /// The names of the topologies that the program has.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|&(name, _)| name)
    }

    /// The topology with this name, or in the file with this name.
    ///
    /// # Errors
    /// [`ModelError::Topology`]: there is no such file, or what is wrong with it.
    pub fn named(name: &str) -> Result<Topology, ModelError> {
        match BUILT_IN.iter().find(|&&(known, _)| known == name) {
            Some((_, text)) => Topology::parse(name, text),
            None => {
                let text = fs::read_to_string(Path::new(name)).map_err(|error| ModelError::Topology {
                    name: name.to_owned(),
                    why: format!(
                        "{error}; choose a file, or one of {}",
                        Topology::names().collect::<Vec<_>>().join(", ")
                    ),
                })?;
                Topology::parse(name, &text)
            }
        }
    }

    /// The smallest topology of the program with at least `nr_cpus` CPUs; the largest, if none has.
    pub fn with_cpus(nr_cpus: usize) -> Result<Topology, ModelError> {
        let mut largest = None;
        for (name, text) in BUILT_IN {
            let topology = Topology::parse(name, text)?;
            if topology.nr_cpus() >= nr_cpus {
                return Ok(topology);
            }
            largest = Some(topology);
        }
        largest.ok_or_else(|| ModelError::Topology { name: "built-in".to_owned(), why: "there are none".to_owned() })
    }

    /// The topology that `text` describes; `name` is for errors.
    ///
    /// # Errors
    /// [`ModelError::Topology`]: it has no CPU, too many, one twice, or leaves out a number.
    pub fn parse(name: &str, text: &str) -> Result<Topology, ModelError> {
        let wrong = |why: String| ModelError::Topology { name: name.to_owned(), why };
        let file: File = toml::from_str(text).map_err(|error| wrong(error.to_string().trim_end().to_owned()))?;
        if file.nodes.is_empty() || file.nodes.len() > MAX_NODES {
            return Err(wrong(format!("{} nodes; it needs 1 to {MAX_NODES}", file.nodes.len())));
        }
        let mut places = BTreeMap::new();
        let (mut nr_cores, mut nr_complexes) = (0, 0);
        for (node, spec) in file.nodes.iter().enumerate() {
            let cpus = parse_list(&spec.cpus).map_err(|why| wrong(format!("node {node}: {why}")))?;
            if spec.threads_per_core == 0 || cpus.len() % spec.threads_per_core != 0 {
                let nr_cpus = cpus.len();
                return Err(wrong(format!("node {node}: {nr_cpus} CPUs, {} of a core", spec.threads_per_core)));
            }
            let cores = cpus.len() / spec.threads_per_core;
            let of_complex = spec.cores_per_complex.unwrap_or(cores);
            if of_complex == 0 || cores % of_complex != 0 {
                return Err(wrong(format!("node {node}: {cores} cores, {of_complex} of a complex")));
            }
            for (index, cpu) in cpus.into_iter().enumerate() {
                let core = index % cores;
                let place = Place {
                    core: (nr_cores + core) as u16,
                    complex: (nr_complexes + core / of_complex) as u16,
                    node: node as u8,
                };
                if places.insert(cpu, place).is_some() {
                    return Err(wrong(format!("CPU {cpu} is there twice")));
                }
            }
            nr_cores += cores;
            nr_complexes += cores / of_complex;
        }
        if let Some(hole) = (0..places.len()).find(|cpu| !places.contains_key(cpu)) {
            return Err(wrong(format!("there are {} CPUs, and none has the number {hole}", places.len())));
        }
        Ok(Topology { name: file.name, cpus: places.into_values().collect(), nr_nodes: file.nodes.len(), nr_cores })
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many CPUs it has.
    pub fn nr_cpus(&self) -> usize {
        self.cpus.len()
    }

    /// How many nodes it has.
    pub fn nr_nodes(&self) -> usize {
        self.nr_nodes
    }

    /// How many cores it has.
    pub fn nr_cores(&self) -> usize {
        self.nr_cores
    }

    /// The node of a CPU.
    pub fn node_of(&self, cpu: usize) -> usize {
        usize::from(self.cpus[cpu].node)
    }

    /// `nr_cpus` CPUs in the order in which a scheduler fills an idle machine: one CPU of each
    /// core, the nodes in turn, and then the others.
    pub fn spread(&self, nr_cpus: usize) -> Vec<usize> {
        let mut nr_in_core = vec![0_usize; self.nr_cores];
        let mut nr_in_node = vec![0_usize; self.nr_nodes];
        let mut keyed: Vec<_> = (0..self.cpus.len())
            .map(|cpu| {
                let place = self.cpus[cpu];
                let thread = nr_in_core[usize::from(place.core)];
                nr_in_core[usize::from(place.core)] += 1;
                let within = nr_in_node[usize::from(place.node)];
                nr_in_node[usize::from(place.node)] += 1;
                (thread, within, place.node, cpu)
            })
            .collect();
        keyed.sort_unstable();
        keyed.into_iter().map(|(.., cpu)| cpu).take(nr_cpus).collect()
    }

    pub(crate) fn place(&self, cpu: usize) -> Place {
        self.cpus[cpu]
    }
}

/// The numbers in a list as Linux writes it.
fn parse_list(text: &str) -> Result<Vec<usize>, String> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let number = |text: &str| {
            let cpu: usize =
                text.trim().parse().map_err(|_| format!("'{}' is not the number of a CPU", text.trim()))?;
            if cpu < MAX_CPUS { Ok(cpu) } else { Err(format!("CPU {cpu} is too many: at most {MAX_CPUS} CPUs")) }
        };
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last {
            return Err(format!("'{}' is not a range", part.trim()));
        }
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(nodes: &str) -> Result<Topology, String> {
        Topology::parse("file", &format!("name = 'test'\n{nodes}")).map_err(|error| error.to_string())
    }

    #[test]
    fn all_topologies_of_the_program_are_valid() {
        let sizes: Vec<_> = Topology::names().map(|name| Topology::named(name).unwrap().nr_cpus()).collect();
        assert_eq!(sizes, [2, 16, 96, 256, 416]);
        let two = Topology::named("2x48").unwrap();
        assert_eq!((two.nr_nodes(), two.nr_cores(), two.node_of(0), two.node_of(24)), (2, 48, 0, 1));
        // The siblings of the first core.
        assert_eq!(two.place(0), two.place(48));
        assert_ne!(two.place(0).core, two.place(1).core);
    }

    #[test]
    fn cpus_are_spread_over_nodes_and_cores_first() {
        let two = Topology::named("2x48").unwrap();
        let nodes: Vec<_> = two.spread(4).into_iter().map(|cpu| two.node_of(cpu)).collect();
        assert_eq!(nodes, [0, 1, 0, 1]);
        let mut cores: Vec<_> = two.spread(48).into_iter().map(|cpu| two.place(cpu).core).collect();
        cores.sort_unstable();
        cores.dedup();
        assert_eq!(cores.len(), 48);
        assert_eq!(two.spread(96).len(), 96);
        assert_eq!(two.spread(500).len(), 96);
    }

    #[test]
    fn wrong_topologies_are_refused_with_what_is_wrong() {
        for (nodes, why) in [
            ("", "missing field `node`"),
            ("node = []", "0 nodes"),
            ("[[node]]\ncpus = ''", "'' is not the number of a CPU"),
            ("[[node]]\ncpus = '0-1,3'", "there are 3 CPUs, and none has the number 2"),
            ("[[node]]\ncpus = '1-2'", "none has the number 0"),
            ("[[node]]\ncpus = '0-1,1'", "CPU 1 is there twice"),
            ("[[node]]\ncpus = '0'\n[[node]]\ncpus = '0'", "CPU 0 is there twice"),
            ("[[node]]\ncpus = '0-1024'", "CPU 1024 is too many"),
            ("[[node]]\ncpus = '3-1'", "'3-1' is not a range"),
            ("[[node]]\ncpus = 'all'", "'all' is not the number of a CPU"),
            ("[[node]]\ncpus = '0-2'\nthreads_per_core = 2", "3 CPUs, 2 of a core"),
            ("[[node]]\ncpus = '0-1'\nthreads_per_core = 0", "2 CPUs, 0 of a core"),
            ("[[node]]\ncpus = '0-3'\ncores_per_complex = 3", "4 cores, 3 of a complex"),
            ("[[node]]\ncpus = '0'\nsockets = 2", "unknown field `sockets`"),
        ] {
            let found = parse(nodes).expect_err(nodes);
            assert!(found.starts_with("topology file: ") && found.contains(why), "{nodes}: {found}");
        }
        let missing = Topology::named("/no/such/file").unwrap_err().to_string();
        assert!(missing.contains("2x48"), "{missing}");
    }
}
