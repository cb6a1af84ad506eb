//! The node of an address, for each page-table page that is linked, and for each PTE that a counted
//! walk reads. The spans never change, so a look-up takes no lock.

use slat::{Hpa, NodeId};

/// The memory for page-table pages: equal spans of addresses, one for each node.
#[derive(Clone, Debug)]
pub(crate) struct TableSpans {
    start: Hpa,
    /// log2 of a span's bytes.
    shift: u32,
    /// The node of each.
    ids: Box<[NodeId]>,
}

impl TableSpans {
    /// Spans of `1 << shift` bytes from `start` on.
    pub(crate) fn new(start: Hpa, shift: u32, ids: &[NodeId]) -> TableSpans {
        TableSpans { start, shift, ids: ids.into() }
    }

    /// The place of the node whose span holds `table`; `None` if none does.
    #[inline]
    pub(crate) fn place_of(&self, table: Hpa) -> Option<usize> {
        let place = (table.0.checked_sub(self.start.0)? >> self.shift) as usize;
        (place < self.ids.len()).then_some(place)
    }

    /// That node.
    #[inline]
    pub(crate) fn node_of(&self, table: Hpa) -> Option<NodeId> {
        self.place_of(table).map(|place| self.ids[place])
    }
}

/// A part of guest memory on one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemorySpan {
    pub(crate) start: Hpa,
    /// Behind its last byte.
    pub(crate) end: Hpa,
    pub(crate) node: NodeId,
}

/// Guest memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemorySpans(Box<[MemorySpan]>);

impl MemorySpans {
    /// Of parts that do not overlap, in any order.
    pub(crate) fn new(mut spans: Vec<MemorySpan>) -> MemorySpans {
        spans.sort_unstable_by_key(|span| span.start);
        MemorySpans(spans.into_boxed_slice())
    }

    /// The node of the part that holds `address`; `None` if none does.
    #[inline]
    pub(crate) fn node_of(&self, address: Hpa) -> Option<NodeId> {
        let behind = self.0.partition_point(|span| span.start <= address);
        self.0[..behind].last().filter(|span| address < span.end).map(|span| span.node)
    }
}

/// Divides `size_bytes` of memory equally among `places`. Borders are multiples of `unit_bytes`,
/// since one page of the host is on one node; a page at a border goes to the later part. Yields
/// (first byte, byte behind the last, place), neighbours at one place as one.
pub(crate) fn divide(places: &[usize], size_bytes: u64, unit_bytes: u64) -> Vec<(u64, u64, usize)> {
    let nr_parts = places.len() as u64;
    let border = |index: u64| match index {
        _ if index == nr_parts => size_bytes,
        // Parts are few thousand and memory is below 2^48: no overflow.
        _ => index * size_bytes / nr_parts / unit_bytes * unit_bytes,
    };
    let mut parts: Vec<(u64, u64, usize)> = Vec::new();
    for (index, &place) in (0..).zip(places) {
        let (start, end) = (border(index), border(index + 1));
        match parts.last_mut() {
            _ if start == end => {}
            Some(last) if last.2 == place => last.1 = end,
            _ => parts.push((start, end, place)),
        }
    }
    parts
}
