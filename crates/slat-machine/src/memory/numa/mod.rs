//! The nodes of a machine: which exist, which have CPUs and memory, where a thread is, and where
//! its memory comes from.
//!
//! An allocation on the wrong node makes each later walk slower, and shows only on machines with
//! several nodes. Those are rare, so nodes may be *virtual*: every page-table page and every frame
//! has a node, every CPU is on one, and the walkers count their reads of other nodes. Virtual nodes
//! are only counted: the memory is equally fast. On a host with nodes, the nodes can be the real
//! ones, and then remote reads are slower.
//!
//! # Implementation
//! - Nodes have numbers ([`NodeId`]), which need not be consecutive. This module identifies a node
//!   by its *place* among them.
//! - A thread is on one node. Virtual: the one of [`NodeMap::run_on`], and the first before that.
//!   Host: the one of the CPU that it runs on at that moment.
//! - Memory for a node without memory, or with none left, comes from another node: of the host's
//!   nodes from the nearest by their distances, of virtual ones from the next in order.
//! - The address alone shows the node of a frame or a page-table page (`spans`), so a look-up takes
//!   no lock.
//! - The host's nodes: guest memory is bound to its node (`MPOL_BIND`), and refused if the node has
//!   too little free. Page-table pages prefer theirs (`MPOL_PREFERRED`), and
//!   [`Host::node_of`](slat::Host::node_of) returns that node, even if the kernel had to take
//!   memory of another.
//! - With one node nothing of this is done, and nothing is counted.
//!
//! Sources: Documentation/admin-guide/mm/numa_memory_policy.rst,
//! Documentation/ABI/stable/sysfs-devices-node, mbind(2), set_mempolicy(2), get_mempolicy(2).

pub(crate) mod policy;
pub(crate) mod reads;
pub(crate) mod spans;
mod sysfs;
#[cfg(test)]
pub(crate) mod tests;

use std::cell::Cell;
use std::io;
use std::path::{Path, PathBuf};

use slat::NodeId;
use slat::host::TableNode;
use thiserror::Error;

pub use reads::{ReadCounts, WalkCounter, WalkReads};

use crate::linux::topology;
use sysfs::HostNode;

/// Nodes that a machine may have.
pub const MAX_NODES: usize = 64;

/// Numbers of nodes are below this, as in any kernel (`CONFIG_NODES_SHIFT` is 10 at most).
pub const NODE_ID_END: u32 = 1024;

/// The nodes of a machine.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Nodes {
    /// One, number 0.
    #[default]
    One,
    /// Nodes that exist in this program only, each with CPUs.
    Virtual {
        /// Their numbers: in any order, with any gaps.
        nodes: Vec<NodeId>,
        /// Those of them that have no memory.
        without_memory: Vec<NodeId>,
    },
    /// Those of the host. A host without NUMA has one.
    Host,
}

impl Nodes {
    /// Virtual nodes with the numbers from 0 on, each with memory.
    pub fn virtual_nodes(count: u32) -> Nodes {
        // One more than allowed, so that a larger number is refused as well.
        let count = count.min(MAX_NODES as u32 + 1);
        Nodes::Virtual { nodes: (0..count).map(NodeId).collect(), without_memory: Vec::new() }
    }

    /// Checks that such nodes are possible; reads those of the host.
    ///
    /// # Errors
    /// [`NumaError`].
    pub fn map(&self) -> Result<NodeMap, NumaError> {
        match self {
            Nodes::One => Ok(NodeMap::one()),
            Nodes::Virtual { nodes, without_memory } => NodeMap::of_virtual(nodes, without_memory),
            Nodes::Host => {
                NodeMap::of_host(Path::new(sysfs::ROOT), &topology::usable_cpus(), sysfs::allowed_memory().as_deref())
            }
        }
    }
}

/// Whether virtual CPUs stay on their home nodes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Pinning {
    /// Yes. On the host's nodes, threads are kept on the node's CPUs.
    #[default]
    On,
    /// No. On the host's nodes, threads run where the scheduler puts them, which decides the node.
    /// On virtual nodes a virtual CPU has a random node from the beginning of each run, as if it
    /// had slept and a scheduler had moved it.
    Off {
        /// Start of the random numbers: virtual CPU n draws from `seed + n`.
        seed: u64,
    },
}

/// Which CPUs touch memory first, and so take the faults that map it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum FirstTouch {
    /// Each virtual CPU its own part.
    #[default]
    Own,
    /// A virtual CPU whose home is another node.
    Other,
    /// The calling thread, by a CPU of its own.
    Main,
}

/// Where a thread's allocations come from, if nothing else decides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum MemoryPolicy {
    /// From the node that the thread is on.
    #[default]
    Local,
    /// From this node.
    Preferred(NodeId),
    /// From all nodes that have memory, in turn.
    Interleave,
}

/// Why nodes are refused, or cannot be served by this machine.
#[derive(Debug, Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the message names the fields")]
pub enum NumaError {
    /// No node at all.
    #[error("a machine needs at least one node")]
    NoNodes,
    /// Too many nodes.
    #[error("{nr_nodes} nodes are more than {MAX_NODES}")]
    TooManyNodes { nr_nodes: usize },
    /// No node can have this number.
    #[error("node number {} is not below {NODE_ID_END}", node.0)]
    NodeTooHigh { node: NodeId },
    /// A number was named twice.
    #[error("node {} is there twice", node.0)]
    DuplicateNode { node: NodeId },
    /// The machine has no node of this number.
    #[error("there is no node {}", node.0)]
    NoSuchNode { node: NodeId },
    /// No node has memory that this process may use.
    #[error("no node has memory")]
    NoMemory,
    /// This thread may use no CPU of the node, or of any.
    #[error("{} has no CPU that can be used here", node.map_or("the host".to_owned(), |node| format!("node {}", node.0)))]
    NoCpus { node: Option<NodeId> },
    /// A file about the host's nodes could not be read.
    #[error("cannot read the host's nodes from {}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// A file about the host's nodes has impossible contents.
    #[error("{} contains '{text}', which is not a list of numbers", path.display())]
    Malformed { path: PathBuf, text: String },
    /// A node of the host has too little free memory of the kind.
    #[error("node {} has {} MiB of free memory for the guest, of {} MiB that are needed", node.0, free_bytes >> 20, needed_bytes >> 20)]
    NotEnoughMemory { node: NodeId, needed_bytes: u64, free_bytes: u64 },
    /// The kernel refused to place memory.
    #[error("mbind of {size_bytes} bytes to node {} failed", node.0)]
    Mbind { node: NodeId, size_bytes: u64, source: io::Error },
    /// The kernel refused a memory policy.
    #[error("set_mempolicy failed")]
    Policy { source: io::Error },
    /// The kernel refused to keep a thread on a node's CPUs.
    #[error("cannot run on the CPUs of node {}", node.0)]
    Affinity { node: NodeId, source: io::Error },
}

impl NumaError {
    /// Whether the request is impossible on every machine. Otherwise this machine cannot serve it.
    /// (A node that the host does not have counts as an impossible request.)
    pub const fn is_bad_usage(&self) -> bool {
        matches!(
            self,
            NumaError::NoNodes
                | NumaError::TooManyNodes { .. }
                | NumaError::NodeTooHigh { .. }
                | NumaError::DuplicateNode { .. }
                | NumaError::NoSuchNode { .. }
                | NumaError::NoMemory
        )
    }
}

#[derive(Clone, Copy)]
struct Thread {
    /// The virtual node that it is on.
    node: Option<NodeId>,
    /// For virtual nodes.
    policy: MemoryPolicy,
    /// Allocations that were interleaved.
    nr_interleaved: usize,
}

thread_local! {
    /// The choices of the calling thread. They outlive a machine; another machine uses those that
    /// apply to it.
    static THREAD: Cell<Thread> =
        const { Cell::new(Thread { node: None, policy: MemoryPolicy::Local, nr_interleaved: 0 }) };
}

/// The nodes of a machine.
#[derive(Clone, Debug)]
pub struct NodeMap {
    /// Their numbers, rising.
    ids: Box<[NodeId]>,
    /// For each place, the places that have memory: the nearest first. At least one.
    nearest: Box<[Box<[usize]>]>,
    /// The places that have memory, rising.
    with_memory: Box<[usize]>,
    /// The places that have CPUs, rising.
    with_cpus: Box<[usize]>,
    host: Option<HostMap>,
}

/// The additional data of the host's nodes.
#[derive(Clone, Debug)]
struct HostMap {
    /// The directory in sysfs.
    root: PathBuf,
    /// For each place, the CPUs that can be used.
    cpus: Box<[Box<[u32]>]>,
    /// For each CPU its place.
    place_of_cpu: Box<[usize]>,
}

impl NodeMap {
    /// Node 0 alone.
    pub(crate) fn one() -> NodeMap {
        NodeMap {
            ids: [NodeId(0)].into(),
            nearest: [[0].into()].into(),
            with_memory: [0].into(),
            with_cpus: [0].into(),
            host: None,
        }
    }

    pub(crate) fn of_virtual(nodes: &[NodeId], without_memory: &[NodeId]) -> Result<NodeMap, NumaError> {
        let ids = sorted(nodes)?;
        if let Some(&node) = without_memory.iter().find(|node| !ids.contains(node)) {
            return Err(NumaError::NoSuchNode { node });
        }
        let nr_nodes = ids.len();
        let has_memory = |place: &usize| !without_memory.contains(&ids[*place]);
        let with_memory: Box<[usize]> = (0..nr_nodes).filter(has_memory).collect();
        if with_memory.is_empty() {
            return Err(NumaError::NoMemory);
        }
        let in_order_from = |place: usize| (place..nr_nodes).chain(0..place).filter(has_memory).collect();
        Ok(NodeMap {
            nearest: (0..nr_nodes).map(in_order_from).collect(),
            with_memory,
            with_cpus: (0..nr_nodes).collect(),
            ids,
            host: None,
        })
    }

    /// The nodes of sysfs at `root`, as far as a process with these CPUs and nodes may use them.
    pub(crate) fn of_host(
        root: &Path,
        usable_cpus: &[u32],
        allowed_memory: Option<&[u32]>,
    ) -> Result<NodeMap, NumaError> {
        let Some(nodes) = HostNode::read_all(root)? else { return Ok(NodeMap::one()) };
        let ids = sorted(&nodes.iter().map(|node| node.id).collect::<Vec<_>>())?;
        let is_allowed = |node: &HostNode| allowed_memory.is_none_or(|allowed| allowed.contains(&node.id.0));
        let has_memory = |place: &usize| nodes[*place].has_memory && is_allowed(&nodes[*place]);
        let with_memory: Box<[usize]> = (0..ids.len()).filter(has_memory).collect();
        if with_memory.is_empty() {
            return Err(NumaError::NoMemory);
        }
        let nearest = (0..ids.len()).map(|place| {
            let mut places = with_memory.to_vec();
            // Stable: of equally distant nodes the first. The node itself comes first, whatever the
            // distances are.
            places
                .sort_by_key(|&other| (other != place, nodes[place].distances.get(other).copied().unwrap_or(u32::MAX)));
            places.into_boxed_slice()
        });
        let is_usable = |cpu: &&u32| usable_cpus.contains(cpu);
        let cpus: Box<[Box<[u32]>]> =
            nodes.iter().map(|node| node.cpus.iter().filter(is_usable).copied().collect()).collect();
        let with_cpus: Box<[usize]> = (0..ids.len()).filter(|&place| !cpus[place].is_empty()).collect();
        if with_cpus.is_empty() {
            return Err(NumaError::NoCpus { node: None });
        }
        let nr_cpus = nodes.iter().flat_map(|node| &node.cpus).max().map_or(0, |&last| last as usize + 1);
        let mut place_of_cpu = vec![with_cpus[0]; nr_cpus].into_boxed_slice();
        for (place, node) in nodes.iter().enumerate() {
            for &cpu in &node.cpus {
                place_of_cpu[cpu as usize] = place;
            }
        }
        Ok(NodeMap {
            nearest: nearest.collect(),
            with_memory,
            with_cpus,
            ids,
            host: Some(HostMap { root: root.to_owned(), cpus, place_of_cpu }),
        })
    }

    /// The numbers of the nodes, rising. At least one.
    pub fn ids(&self) -> &[NodeId] {
        &self.ids
    }

    /// Whether there is only one node.
    #[inline]
    pub fn is_one(&self) -> bool {
        self.ids.len() == 1
    }

    /// Whether these are nodes of the host.
    pub fn are_of_host(&self) -> bool {
        self.host.is_some()
    }

    /// Whether there is a node `node` that has memory.
    pub fn has_memory(&self, node: NodeId) -> bool {
        self.memory_node(node) == Some(node)
    }

    /// The node that the memory for `node` comes from; `None` if there is no such node.
    pub fn memory_node(&self, node: NodeId) -> Option<NodeId> {
        self.place_of(node).map(|place| self.ids[self.memory_place(place)])
    }

    /// The node that the calling thread is on.
    pub fn current_node(&self) -> NodeId {
        self.ids[self.current_place()]
    }

    /// Puts the calling thread on `node`. On the host's nodes, it and the threads that it starts
    /// later are kept on the node's CPUs.
    ///
    /// # Errors
    /// [`NumaError::NoSuchNode`], [`NumaError::NoCpus`], [`NumaError::Affinity`]: the thread stays
    /// where it was.
    pub fn run_on(&self, node: NodeId) -> Result<(), NumaError> {
        let place = self.place_of(node).ok_or(NumaError::NoSuchNode { node })?;
        match &self.host {
            None => THREAD.set(Thread { node: Some(node), ..THREAD.get() }),
            Some(host) if host.cpus[place].is_empty() => return Err(NumaError::NoCpus { node: Some(node) }),
            Some(host) => {
                topology::run_on_cpus(&host.cpus[place]).map_err(|source| NumaError::Affinity { node, source })?
            }
        }
        Ok(())
    }

    /// Sets the source of the page-table pages that the calling thread allocates by its policy
    /// ([`TablePlacement::CallerPolicy`](slat::tables::TablePlacement::CallerPolicy)). On the
    /// host's nodes this is the kernel's policy of the thread, for all of its memory; a thread that
    /// has set that already need not call this.
    ///
    /// # Errors
    /// [`NumaError::NoSuchNode`], [`NumaError::Policy`]: the policy is what it was.
    pub fn set_memory_policy(&self, policy: MemoryPolicy) -> Result<(), NumaError> {
        if let MemoryPolicy::Preferred(node) = policy
            && self.place_of(node).is_none()
        {
            return Err(NumaError::NoSuchNode { node });
        }
        match &self.host {
            None => THREAD.set(Thread { policy, ..THREAD.get() }),
            Some(_) => {
                let with_memory: Vec<NodeId> = self.with_memory.iter().map(|&place| self.ids[place]).collect();
                policy::set(policy, &with_memory).map_err(|source| NumaError::Policy { source })?;
            }
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn nr_nodes(&self) -> usize {
        self.ids.len()
    }

    #[inline]
    pub(crate) fn place_of(&self, node: NodeId) -> Option<usize> {
        self.ids.binary_search(&node).ok()
    }

    /// The place that the memory for `place` comes from.
    pub(crate) fn memory_place(&self, place: usize) -> usize {
        self.nearest[place][0]
    }

    pub(crate) fn places_with_cpus(&self) -> &[usize] {
        &self.with_cpus
    }

    #[inline]
    pub(crate) fn current_place(&self) -> usize {
        match &self.host {
            None => THREAD.get().node.and_then(|node| self.place_of(node)).unwrap_or(0),
            Some(host) => self.place_of_cpu(host, topology::current_cpu()),
        }
    }

    fn place_of_cpu(&self, host: &HostMap, cpu: u32) -> usize {
        // A CPU that was added later: any node will do.
        host.place_of_cpu.get(cpu as usize).copied().unwrap_or(self.with_cpus[0])
    }

    /// The places where the memory of a page-table page may come from, in the order in which to try
    /// them.
    #[inline]
    pub(crate) fn places_for(&self, node: TableNode) -> &[usize] {
        if self.is_one() {
            return &self.nearest[0];
        }
        let place = match node {
            // The engine's configuration may name any node. The machine has checked it; otherwise
            // the first.
            TableNode::Node(node) => self.place_of(node).unwrap_or(0),
            TableNode::Caller => self.current_place(),
            TableNode::CallerPolicy => self.policy_place(),
        };
        &self.nearest[place]
    }

    /// The place by the policy of the calling thread.
    fn policy_place(&self) -> usize {
        let here = self.current_place();
        if self.host.is_some() {
            return policy::of_thread().and_then(|policy| self.place_by_kernel(policy, here)).unwrap_or(here);
        }
        match THREAD.get().policy {
            MemoryPolicy::Local => here,
            MemoryPolicy::Preferred(node) => self.place_of(node).unwrap_or(here),
            MemoryPolicy::Interleave => in_turn(&self.with_memory),
        }
    }

    /// What the kernel would choose; `None` where it would be the local node.
    fn place_by_kernel(&self, policy: policy::OfThread, here: usize) -> Option<usize> {
        let is_meant = |place: &usize| policy.has(self.ids[*place]);
        match policy.mode {
            libc::MPOL_PREFERRED => self.with_memory.iter().copied().find(is_meant),
            policy::MPOL_PREFERRED_MANY | libc::MPOL_BIND => self.nearest[here].iter().copied().find(is_meant),
            // The weights are the kernel's own.
            libc::MPOL_INTERLEAVE | policy::MPOL_WEIGHTED_INTERLEAVE => {
                let meant: Vec<usize> = self.with_memory.iter().copied().filter(is_meant).collect();
                (!meant.is_empty()).then(|| in_turn(&meant))
            }
            _ => None,
        }
    }

    /// The home of each of `nr_vcpus` virtual CPUs: equal blocks over the nodes with CPUs; or, if
    /// they are pinned, the nodes of their CPUs.
    pub(crate) fn homes(&self, nr_vcpus: usize, pins: Option<&[u32]>) -> Box<[usize]> {
        if let (Some(host), Some(pins)) = (&self.host, pins) {
            return pins.iter().map(|&cpu| self.place_of_cpu(host, cpu)).collect();
        }
        (0..nr_vcpus).map(|vcpu| self.with_cpus[vcpu * self.with_cpus.len() / nr_vcpus]).collect()
    }

    /// Refuses guest memory that the host's nodes do not have: `needed_bytes` for each place, in
    /// pages of `page_bytes`.
    pub(crate) fn check_free(&self, needed_bytes: &[u64], page_bytes: u64) -> Result<(), NumaError> {
        let Some(host) = &self.host else { return Ok(()) };
        for (place, &needed_bytes) in needed_bytes.iter().enumerate() {
            let node = self.ids[place];
            // Without a number from the kernel nothing is refused.
            if let Some(free_bytes) = sysfs::free_bytes(&host.root, node, page_bytes)
                && free_bytes < needed_bytes
            {
                return Err(NumaError::NotEnoughMemory { node, needed_bytes, free_bytes });
            }
        }
        Ok(())
    }

    /// Places the `size_bytes` from `start` on, whole pages, at `place`; only the host's nodes need
    /// that.
    ///
    /// # Errors
    /// [`NumaError::Mbind`]: what is there already may have moved in part.
    pub(crate) fn place_memory(
        &self,
        start: *mut u8,
        size_bytes: u64,
        place: usize,
        strictness: policy::Strictness,
    ) -> Result<(), NumaError> {
        if self.host.is_none() || self.is_one() || size_bytes == 0 {
            return Ok(());
        }
        let node = self.ids[place];
        policy::bind(start, size_bytes, node, strictness).map_err(|source| NumaError::Mbind {
            node,
            size_bytes,
            source,
        })
    }
}

/// The next of `places`, which are not empty, in the calling thread's order.
fn in_turn(places: &[usize]) -> usize {
    let thread = THREAD.get();
    THREAD.set(Thread { nr_interleaved: thread.nr_interleaved.wrapping_add(1), ..thread });
    places[thread.nr_interleaved % places.len()]
}

/// The numbers in rising order, if they are valid.
fn sorted(nodes: &[NodeId]) -> Result<Box<[NodeId]>, NumaError> {
    if nodes.is_empty() {
        return Err(NumaError::NoNodes);
    }
    if nodes.len() > MAX_NODES {
        return Err(NumaError::TooManyNodes { nr_nodes: nodes.len() });
    }
    if let Some(&node) = nodes.iter().find(|node| node.0 >= NODE_ID_END) {
        return Err(NumaError::NodeTooHigh { node });
    }
    let mut ids = nodes.to_vec();
    ids.sort_unstable();
    if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(NumaError::DuplicateNode { node: pair[0] });
    }
    Ok(ids.into_boxed_slice())
}
