//! The NUMA nodes of a test's host.

use slat::host::TableNode;

/// The nodes of a host.
#[derive(Clone, Copy, Debug)]
pub struct Nodes {
    /// Nodes take turns by so many frames of guest memory.
    pub frames_apart: u64,
    pub nr_nodes: u64,
    /// The node of the thread's CPU, and that of its memory policy.
    pub caller: u32,
    pub policy: u32,
    /// A node without memory for page-table pages: they come from the next one.
    pub without_memory: Option<u32>,
}

impl Nodes {
    /// The node of a page-table page that is requested on `node`.
    pub(super) fn place(self, node: TableNode) -> u32 {
        let wanted = match node {
            TableNode::Node(node) => node.0,
            TableNode::Caller => self.caller,
            TableNode::CallerPolicy => self.policy,
        };
        if self.without_memory == Some(wanted) { (wanted + 1) % self.nr_nodes as u32 } else { wanted }
    }
}
