//! The counts of the hardware walkers: how many of the second-stage PTEs that they read were on the
//! CPU's own node, and how many on another. A restarted walk counts the PTEs that it has read.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use slat::{Hpa, NodeId};

use super::NodeMap;
use super::spans::TableSpans;

counters! {
    /// Second-stage PTEs that walkers have read.
    #[derive(Hash)]
    pub struct WalkReads {
        /// In page-table pages on the CPU's node.
        local: u64,
        /// In page-table pages on another node.
        remote: u64,
        /// Those of `local` in page-table pages of level 1, whose leaf PTEs map 4 KiB.
        leaf_table_local: u64,
        /// Those of `remote` in such page-table pages.
        leaf_table_remote: u64,
    }
}

/// The counts of one CPU at a time, which other threads may read at any time.
#[derive(Debug, Default)]
pub struct ReadCounts(CachePadded<[AtomicU64; 4]>);

impl ReadCounts {
    /// The counts so far.
    pub fn get(&self) -> WalkReads {
        // Relaxed: statistics.
        let [local, remote, leaf_table_local, leaf_table_remote] =
            self.0.each_ref().map(|count| count.load(Ordering::Relaxed));
        // A read in a table of level 1 is counted there only.
        WalkReads {
            local: local + leaf_table_local,
            remote: remote + leaf_table_remote,
            leaf_table_local,
            leaf_table_remote,
        }
    }
}

/// The counter of a CPU.
#[derive(Debug)]
pub struct WalkCounter {
    nodes: Arc<NodeMap>,
    tables: Arc<TableSpans>,
    counts: Arc<ReadCounts>,
    /// The node of the CPU when its walk began.
    here: Cell<NodeId>,
}

impl WalkCounter {
    pub(crate) fn new(nodes: Arc<NodeMap>, tables: Arc<TableSpans>, counts: Arc<ReadCounts>) -> WalkCounter {
        let here = Cell::new(nodes.ids()[0]);
        WalkCounter { nodes, tables, counts, here }
    }

    /// The counts so far.
    pub(crate) fn reads(&self) -> WalkReads {
        self.counts.get()
    }

    /// Begins a walk: looks up the thread's node.
    #[inline]
    pub(crate) fn begin_walk(&self) {
        self.here.set(self.nodes.current_node());
    }

    /// Counts a PTE of level `level` that was read in `table`.
    #[inline]
    pub(crate) fn count(&self, table: Hpa, level: u8) {
        // A page-table page that the host did not allocate has no node.
        let Some(node) = self.tables.node_of(table) else { return };
        let which = usize::from(node != self.here.get()) | usize::from(level == 1) << 1;
        let count = &self.counts.0[which];
        // Relaxed, and no exchange: the CPU is the only writer.
        count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}
