//! The allocator of page-table pages. Each node has a span of one region of addresses, and in it a
//! mark that rises and a list of freed page-table pages for each size.

use std::alloc::Layout;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_queue::SegQueue;
use crossbeam_utils::CachePadded;
use rustix::mm::MapFlags;
use slat::{Gfn, Hpa, PAGE_SIZE};

use super::HostError;
use crate::linux::mapping::MappedMemory;
use crate::memory::numa::NodeMap;
use crate::memory::numa::policy::Strictness;
use crate::memory::numa::spans::TableSpans;
use crate::memory::phys;

/// Page-table pages of 4 KiB (2^12) up to 64 KiB (2^16): x86's and Arm's, RISC-V's roots, and Arm's
/// concatenated roots.
const MIN_TABLE_SHIFT: u32 = Gfn::SHIFT;
const NR_TABLE_SIZES: usize = 5;

/// The page-table pages of one node.
#[derive(Debug)]
struct NodeTables {
    /// Where its span starts in the region.
    start_bytes: u64,
    /// Bytes from there that were allocated at least once.
    used_bytes: CachePadded<AtomicU64>,
    free: [SegQueue<Hpa>; NR_TABLE_SIZES],
    /// Counted if there are other nodes.
    nr_live: CachePadded<AtomicU64>,
}

/// The page-table pages of all nodes.
#[derive(Debug)]
pub(super) struct Tables {
    region: MappedMemory,
    nodes: Box<[NodeTables]>,
    bytes_per_node: u64,
    spans: Arc<TableSpans>,
    nr_live: CachePadded<AtomicU64>,
    max_live: u64,
}

/// Index of the list for the size of a page-table page, and that size in bytes.
fn size_class(layout: Layout) -> Option<(usize, u64)> {
    // A page-table page as large as its alignment satisfies both. At least a page, the minimum of
    // the CPU's formats.
    let size_bytes = (layout.size().max(layout.align()) as u64).max(PAGE_SIZE).checked_next_power_of_two()?;
    let class = (size_bytes.trailing_zeros() - MIN_TABLE_SHIFT) as usize;
    (class < NR_TABLE_SIZES).then_some((class, size_bytes))
}

impl NodeTables {
    fn take_fresh(&self, region: &MappedMemory, size_bytes: u64, bytes_per_node: u64) -> Option<Hpa> {
        let base = region.at(self.start_bytes).addr() as u64;
        // The gap in front of a larger page-table page is lost; there is at most one such page for
        // each root.
        let place = |used: u64| (base + used).next_multiple_of(size_bytes) - base;
        let end = |used: u64| place(used).checked_add(size_bytes).filter(|&end| end <= bytes_per_node);
        // Relaxed: the thread that moves the mark owns what it passed over, which had no owner
        // before.
        let used = self.used_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, end).ok()?;
        Some(phys::hpa_of(region.at(self.start_bytes + place(used))))
    }
}

impl Tables {
    /// For each of `nodes` as much as `bytes_per_node` (any of them may have to hold all page-table
    /// pages), and for all of them at most `max_live` page-table pages at a time.
    pub(super) fn new(bytes_per_node: u64, max_live: u64, nodes: &NodeMap) -> Result<Tables, HostError> {
        // A power of two, so that a shift finds the node; what is beyond `bytes_per_node` is never
        // touched.
        let span_bytes = bytes_per_node.checked_next_power_of_two();
        let size_bytes = match span_bytes.and_then(|bytes| bytes.checked_mul(nodes.nr_nodes() as u64)) {
            _ if nodes.is_one() => bytes_per_node,
            size_bytes => size_bytes.unwrap_or(u64::MAX),
        };
        let shift = span_bytes.unwrap_or(1 << 63).trailing_zeros();
        let region = MappedMemory::anonymous(size_bytes, MapFlags::NORESERVE)
            .map_err(|source| HostError::NoAddressSpace { size_bytes, source })?;
        let node_tables = |place: usize| NodeTables {
            start_bytes: (place as u64) << shift,
            used_bytes: CachePadded::default(),
            free: Default::default(),
            nr_live: CachePadded::default(),
        };
        let tables = Tables {
            nodes: (0..nodes.nr_nodes()).map(node_tables).collect(),
            bytes_per_node,
            spans: Arc::new(TableSpans::new(phys::hpa_of(region.start()), shift, nodes.ids())),
            nr_live: CachePadded::default(),
            max_live,
            region,
        };
        for (place, node) in tables.nodes.iter().enumerate() {
            let start = tables.region.at(node.start_bytes);
            nodes.place_memory(start, bytes_per_node, nodes.memory_place(place), Strictness::Prefer)?;
        }
        Ok(tables)
    }

    /// Allocates from the first of `places` that has a page-table page.
    pub(super) fn allocate(&self, layout: Layout, places: &[usize]) -> Option<Hpa> {
        let (class, size_bytes) = size_class(layout)?;
        // Relaxed: the count is only a limit. Counted before the allocation, so that the limit
        // holds at any moment. With little left, two threads may both be refused, as in a real
        // shortage.
        if self.nr_live.fetch_add(1, Ordering::Relaxed) >= self.max_live {
            self.nr_live.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        for &place in places {
            let node = &self.nodes[place];
            let Some(table) =
                node.free[class].pop().or_else(|| node.take_fresh(&self.region, size_bytes, self.bytes_per_node))
            else {
                continue;
            };
            if self.nodes.len() > 1 {
                node.nr_live.fetch_add(1, Ordering::Relaxed);
            }
            return Some(table);
        }
        self.nr_live.fetch_sub(1, Ordering::Relaxed);
        None
    }

    pub(super) fn free(&self, table: Hpa, layout: Layout) {
        // Without a class or a place it did not come from here.
        let Some((class, _)) = size_class(layout) else { return };
        let node = match &*self.nodes {
            [node] => node,
            nodes => {
                let Some(place) = self.spans.place_of(table) else { return };
                nodes[place].nr_live.fetch_sub(1, Ordering::Relaxed);
                &nodes[place]
            }
        };
        // The queue's own ordering passes the page-table page to the thread that pops it.
        node.free[class].push(table);
        self.nr_live.fetch_sub(1, Ordering::Relaxed);
    }

    /// Page-table pages that are allocated now.
    pub(super) fn nr_live(&self) -> u64 {
        self.nr_live.load(Ordering::Relaxed)
    }

    /// Those of them that are at `place`.
    pub(super) fn nr_live_at(&self, place: usize) -> u64 {
        match &*self.nodes {
            [_] => self.nr_live(),
            nodes => nodes[place].nr_live.load(Ordering::Relaxed),
        }
    }

    /// The spans, which show the node of a page-table page.
    pub(super) fn spans(&self) -> &Arc<TableSpans> {
        &self.spans
    }
}
