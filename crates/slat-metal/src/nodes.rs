//! The NUMA nodes of the machine: which memory and which CPUs are on the same one.
//!
//! # Guarantees
//! Each byte of free memory is on one node, and so is each CPU that runs ([`Nodes::check_cpus`]).
//! Where the firmware contradicts itself about that, or leaves memory or a CPU out, the machine is
//! refused: a wrong node would show as nothing but time.
//!
//! # Use
//! The reader of the firmware's tables fills [`Affinities`]. A machine whose firmware says nothing
//! of nodes has [one](Nodes::ONE). [`memory`](crate::memory) has a heap for each.
//!
//! Nodes are numbered from 0 on, in the order of the firmware's numbers, which may have holes.

use arrayvec::ArrayVec;
use slat::NodeId;
use thiserror::Error;

use crate::boot::{MAX_CPUS, Span};

/// Nodes that there are heaps for.
pub const MAX_NODES: usize = 8;

/// Ranges of memory that are kept.
pub const MAX_RANGES: usize = 32;

/// What the firmware says makes no sense.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum NodesError {
    /// More nodes than there are heaps for.
    #[error("the machine has more than {MAX_NODES} nodes")]
    TooManyNodes,
    /// More ranges than are kept.
    #[error("the nodes have more than {MAX_RANGES} ranges of memory")]
    TooManyRanges,
    /// Memory that goes beyond the last address.
    #[error("node {domain} has {size_bytes:#x} bytes of memory from {start:#x} on, beyond the last address")]
    Wraps {
        /// The firmware's number of the node.
        domain: u32,
        /// The first byte.
        start: u64,
        /// The bytes.
        size_bytes: u64,
    },
    /// Two ranges have bytes in common.
    #[error(
        "the memory from {first:#x} on, of node {first_domain}, overlaps that from {second:#x} on, of node {domain}"
    )]
    Overlap {
        /// The start of one range, and its node by the firmware's number.
        first: u64,
        /// See above.
        first_domain: u32,
        /// The start of the other one.
        second: u64,
        /// Its node.
        domain: u32,
    },
    /// A CPU on two nodes.
    #[error("CPU {cpu} is on the nodes {first} and {second}")]
    CpuTwice {
        /// Its number.
        cpu: u32,
        /// The firmware's numbers of the nodes.
        first: u32,
        /// See above.
        second: u32,
    },
    /// Memory without a node.
    #[error("the memory from {0:#x} on is on no node")]
    MemoryOfNone(u64),
    /// A CPU without a node.
    #[error("CPU {0} is on no node")]
    CpuOfNone(usize),
}

/// What the firmware says, entry by entry.
#[derive(Clone, Debug, Default)]
pub struct Affinities {
    memory: ArrayVec<(Span, u32), MAX_RANGES>,
    cpus: [Option<u32>; MAX_CPUS],
}

impl Affinities {
    /// `size_bytes` of memory from `start` on are on the node with the firmware's number `domain`.
    ///
    /// # Errors
    /// [`NodesError::Wraps`], [`NodesError::Overlap`], [`NodesError::TooManyRanges`].
    pub fn add_memory(&mut self, start: u64, size_bytes: u64, domain: u32) -> Result<(), NodesError> {
        let end = start.checked_add(size_bytes).ok_or(NodesError::Wraps { domain, start, size_bytes })?;
        let span = Span { start, end };
        if let Some(&(first, first_domain)) = self.memory.iter().find(|(other, _)| span.overlaps(*other)) {
            return Err(NodesError::Overlap { first: first.start, first_domain, second: start, domain });
        }
        if size_bytes == 0 {
            return Ok(());
        }
        self.memory.try_push((span, domain)).map_err(|_| NodesError::TooManyRanges)
    }

    /// The CPU with this number is on the node with the firmware's number `domain`. Those that the
    /// image has no stacks for are left out.
    ///
    /// # Errors
    /// [`NodesError::CpuTwice`].
    pub fn add_cpu(&mut self, cpu: u32, domain: u32) -> Result<(), NodesError> {
        let Some(place) = self.cpus.get_mut(cpu as usize) else { return Ok(()) };
        match place.replace(domain) {
            Some(first) if first != domain => Err(NodesError::CpuTwice { cpu, first, second: domain }),
            _ => Ok(()),
        }
    }

    /// The nodes, of a machine with this `ram`.
    ///
    /// # Errors
    /// [`NodesError::TooManyNodes`], [`NodesError::MemoryOfNone`].
    pub fn nodes(&self, mut ram: impl Iterator<Item = Span>) -> Result<Nodes, NodesError> {
        let mut domains = ArrayVec::<u32, MAX_NODES>::new();
        for domain in self.memory.iter().map(|&(_, domain)| domain).chain(self.cpus.iter().flatten().copied()) {
            if let Err(place) = domains.binary_search(&domain) {
                domains.try_insert(place, domain).map_err(|_| NodesError::TooManyNodes)?;
            }
        }
        if let Some(start) = ram.find_map(|span| self.first_left_out(span)) {
            return Err(NodesError::MemoryOfNone(start));
        }
        let node = |domain| NodeId(domains.iter().position(|&other| other == domain).unwrap_or(0) as u32);
        Ok(Nodes {
            nr: domains.len(),
            memory: self.memory.iter().map(|&(span, domain)| (span, node(domain))).collect(),
            cpus: self.cpus.map(|domain| domain.map(node)),
        })
    }

    /// The first byte of `span` that is on no node.
    fn first_left_out(&self, span: Span) -> Option<u64> {
        let mut start = span.start;
        while start < span.end {
            let found = self.memory.iter().find(|(range, _)| (range.start..range.end).contains(&start));
            let Some((range, _)) = found else { return Some(start) };
            start = range.end;
        }
        None
    }
}

/// The nodes.
#[derive(Clone, Debug)]
pub struct Nodes {
    nr: usize,
    memory: ArrayVec<(Span, NodeId), MAX_RANGES>,
    cpus: [Option<NodeId>; MAX_CPUS],
}

impl Nodes {
    /// One node, with all memory and all CPUs.
    pub const ONE: Nodes = Nodes { nr: 1, memory: ArrayVec::new_const(), cpus: [Some(NodeId(0)); MAX_CPUS] };

    /// How many there are.
    pub fn nr(&self) -> usize {
        self.nr
    }

    /// The node of the memory at `address`. What is no memory is on node 0.
    pub fn of_memory(&self, address: u64) -> NodeId {
        let mut ranges = self.memory.iter();
        ranges.find(|(span, _)| (span.start..span.end).contains(&address)).map_or(NodeId(0), |&(_, node)| node)
    }

    /// The node of the CPU with this number; 0 of one that has none.
    pub fn of_cpu(&self, cpu: usize) -> NodeId {
        self.cpus.get(cpu).copied().flatten().unwrap_or(NodeId(0))
    }

    /// The parts of `span`, each with its node.
    pub fn parts(&self, span: Span) -> impl Iterator<Item = (Span, NodeId)> + '_ {
        let all = (self.nr == 1).then_some((span, NodeId(0)));
        let of_range = move |&(range, node): &(Span, NodeId)| Some((span.and(range), node));
        let parts = if self.nr == 1 { &[] } else { &self.memory[..] };
        all.into_iter().chain(parts.iter().filter_map(of_range)).filter(|(part, _)| part.size_bytes() != 0)
    }

    /// Checks that each of `nr_cpus` CPUs is on a node.
    ///
    /// # Errors
    /// [`NodesError::CpuOfNone`].
    pub fn check_cpus(&self, nr_cpus: usize) -> Result<(), NodesError> {
        match self.cpus.iter().take(nr_cpus).position(Option::is_none) {
            Some(cpu) => Err(NodesError::CpuOfNone(cpu)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;
    use alloc::vec::Vec;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn affinities(memory: &[(u64, u64, u32)], cpus: &[(u32, u32)]) -> Result<Affinities, NodesError> {
        let mut found = Affinities::default();
        memory.iter().try_for_each(|&(start, size_bytes, domain)| found.add_memory(start, size_bytes, domain))?;
        cpus.iter().try_for_each(|&(cpu, domain)| found.add_cpu(cpu, domain))?;
        Ok(found)
    }

    #[test]
    fn memory_and_cpus_have_their_nodes() {
        // The firmware's numbers have a hole, and memory of one node is in two pieces.
        let memory = [(16 * MIB, 16 * MIB, 7), (0, 16 * MIB, 2), (32 * MIB, 8 * MIB, 2)];
        let ram = [Span { start: MIB, end: 20 * MIB }, Span { start: 31 * MIB, end: 40 * MIB }];
        let nodes = affinities(&memory, &[(0, 2), (1, 7), (200, 9)]).unwrap().nodes(ram.into_iter()).unwrap();
        assert_eq!(nodes.nr(), 2);
        let of_memory = [0, 16 * MIB - 1, 16 * MIB, 32 * MIB - 1, 32 * MIB].map(|address| nodes.of_memory(address).0);
        assert_eq!(of_memory, [0, 0, 1, 1, 0]);
        assert_eq!([0, 1, 2, 300].map(|cpu| nodes.of_cpu(cpu).0), [0, 1, 0, 0]);
        assert_eq!((nodes.check_cpus(2), nodes.check_cpus(3)), (Ok(()), Err(NodesError::CpuOfNone(2))));
        let mut parts: Vec<_> =
            nodes.parts(ram[1]).map(|(span, node)| (span.start / MIB, span.end / MIB, node.0)).collect();
        parts.sort_unstable();
        assert_eq!(parts, [(31, 32, 1), (32, 40, 0)]);
    }

    #[test]
    fn one_node_has_all() {
        let span = Span { start: 5, end: 9 };
        assert_eq!(Nodes::ONE.parts(span).collect::<Vec<_>>(), [(span, NodeId(0))]);
        assert_eq!((Nodes::ONE.of_memory(u64::MAX), Nodes::ONE.check_cpus(MAX_CPUS)), (NodeId(0), Ok(())));
    }

    #[test]
    fn nodes_that_make_no_sense_are_refused() {
        let memory = |memory: &[(u64, u64, u32)]| affinities(memory, &[]).map(drop);
        let start = u64::MAX - 1;
        assert_eq!(memory(&[(start, 3, 1)]), Err(NodesError::Wraps { domain: 1, start, size_bytes: 3 }));
        let overlap = NodesError::Overlap { first: 0, first_domain: 0, second: MIB - 1, domain: 1 };
        assert_eq!(memory(&[(0, MIB, 0), (MIB - 1, 2, 1)]), Err(overlap));
        assert_eq!(overlap.to_string(), "the memory from 0x0 on, of node 0, overlaps that from 0xfffff on, of node 1");
        // Also of one node: one of both entries lies.
        assert!(memory(&[(0, MIB, 0), (0, MIB, 0)]).is_err());
        let many: Vec<_> = (0..=MAX_RANGES as u64).map(|index| (index * MIB, MIB, 0)).collect();
        assert_eq!(memory(&many), Err(NodesError::TooManyRanges));
        let twice = affinities(&[], &[(1, 0), (1, 0), (1, 3)]).map(drop);
        assert_eq!(twice, Err(NodesError::CpuTwice { cpu: 1, first: 0, second: 3 }));
        let many: Vec<_> = (0..=MAX_NODES as u64).map(|index| (index * MIB, MIB, index as u32)).collect();
        let nodes = |affinities: Affinities, end| affinities.nodes([Span { start: 0, end }].into_iter()).map(drop);
        assert_eq!(nodes(affinities(&many, &[]).unwrap(), MIB), Err(NodesError::TooManyNodes));
        // Memory that is left out: behind, between, and all of it.
        let with_hole = || affinities(&[(0, MIB, 0), (2 * MIB, MIB, 1)], &[]).unwrap();
        assert_eq!(nodes(with_hole(), 3 * MIB), Err(NodesError::MemoryOfNone(MIB)));
        assert_eq!(nodes(with_hole(), MIB), Ok(()));
        assert_eq!(nodes(affinities(&[], &[(0, 0)]).unwrap(), MIB), Err(NodesError::MemoryOfNone(0)));
    }
}
