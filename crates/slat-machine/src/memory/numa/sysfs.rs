//! The host's nodes as the kernel reports them (Documentation/ABI/stable/sysfs-devices-node).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use slat::{NodeId, PAGE_SIZE};

use super::{NODE_ID_END, NumaError};
use crate::linux::topology;

/// Where the nodes are.
pub(super) const ROOT: &str = "/sys/devices/system/node";

/// Numbers of CPUs are below this: more than any kernel has.
const CPU_END: u32 = 1 << 16;

/// A node of the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct HostNode {
    pub(super) id: NodeId,
    pub(super) cpus: Vec<u32>,
    pub(super) has_memory: bool,
    /// To each of the nodes, in their order; empty if the kernel does not report them.
    pub(super) distances: Vec<u32>,
}

impl HostNode {
    /// All nodes that are online, in the order of their numbers; `None` if the kernel has no nodes.
    pub(super) fn read_all(root: &Path) -> Result<Option<Vec<HostNode>>, NumaError> {
        if !root.exists() {
            return Ok(None);
        }
        let with_memory = read_list(&root.join("has_memory"), NODE_ID_END)?;
        let node = |id: u32| {
            let directory = root.join(format!("node{id}"));
            let distances = fs::read_to_string(directory.join("distance")).unwrap_or_default();
            Ok(HostNode {
                id: NodeId(id),
                cpus: read_list(&directory.join("cpulist"), CPU_END)?,
                has_memory: with_memory.contains(&id),
                distances: distances.split_whitespace().map_while(|distance| distance.parse().ok()).collect(),
            })
        };
        let online = read_list(&root.join("online"), NODE_ID_END)?;
        online.into_iter().map(node).collect::<Result<Vec<_>, _>>().map(Some)
    }
}

/// The numbers of the nodes whose memory this process may use (its cpuset); `None` if the kernel
/// does not report them.
pub(super) fn allowed_memory() -> Option<Vec<u32>> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    parse_list(list, NODE_ID_END)
}

fn read_list(path: &PathBuf, end: u32) -> Result<Vec<u32>, NumaError> {
    let unreadable = |source: io::Error| NumaError::Unreadable { path: path.clone(), source };
    let text = fs::read_to_string(path).map_err(unreadable)?;
    let malformed = || NumaError::Malformed { path: path.clone(), text: text.trim().to_owned() };
    parse_list(&text, end).ok_or_else(malformed)
}

/// The numbers in a list such as "0-3,8,10-11", in that order; an empty list has none. `None` if it
/// is no such list, or has numbers from `end` on.
pub(super) fn parse_list(text: &str, end: u32) -> Option<Vec<u32>> {
    let text = text.trim();
    if text.is_empty() {
        return Some(Vec::new());
    }
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last >= end {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Memory in pages of `page_bytes` that `node` has available, in bytes: of its pool of huge pages,
/// or free and such as the kernel drops before it runs out. `None` if the kernel does not report
/// it.
pub(super) fn free_bytes(root: &Path, node: NodeId, page_bytes: u64) -> Option<u64> {
    let directory = root.join(format!("node{}", node.0));
    if page_bytes > PAGE_SIZE {
        let pool = directory.join(format!("hugepages/hugepages-{}kB/free_hugepages", page_bytes >> 10));
        return fs::read_to_string(pool).ok()?.trim().parse::<u64>().ok()?.checked_mul(page_bytes);
    }
    let text = fs::read_to_string(directory.join("meminfo")).ok()?;
    let kib = |name: &str| topology::field(&text, &format!("Node {} {name}", node.0));
    let cached_kib = ["Active(file)", "Inactive(file)"].iter().filter_map(|name| kib(name)).sum::<u64>();
    Some((kib("MemFree")? + cached_kib) << 10)
}
