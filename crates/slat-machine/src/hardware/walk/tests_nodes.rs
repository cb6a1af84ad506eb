//! The walkers count their reads, on page tables built by hand of which some are on another node.

use std::alloc::Layout;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use slat::format::{Ept, Npt, Stage2, Sv48x4, Vtd};
use slat::host::{AllocationWait, TableNode};
use slat::{Access, Gpa, Host, Hpa, NodeId};

use super::tests::leaf;
use super::tests_manuals::{EPT, Manual, NPT, STAGE2, SV48X4, VTD};
use super::{HardwareFormat, Purpose, Stop, Used, Walker};
use crate::hardware::commit::tests::uninterrupted;
use crate::hardware::commit::{FlushDomain, Port, Stale};
use crate::memory::numa::{Nodes, ReadCounts, WalkCounter, WalkReads};
use crate::memory::phys;
use crate::vm::host::MachineHost;

const GPA: Gpa = Gpa(1 << 39 | 2 << 30 | 3 << 21 | 4 << 12);
const INDEXES: [usize; 4] = [1, 2, 3, 4];

/// Page-table pages on the way to [`GPA`], from level 4 down to 1.
struct Way {
    host: MachineHost,
    port: Port,
    tables: [Hpa; 4],
    manual: Manual,
    counts: Arc<ReadCounts>,
    counter: WalkCounter,
}

impl Way {
    /// With the page-table pages on `nodes`, of which there are 0 and 7.
    fn new(nodes: [u32; 4], manual: &Manual) -> Way {
        let map = Nodes::Virtual { nodes: vec![NodeId(0), NodeId(7)], without_memory: Vec::new() }.map().unwrap();
        let domain = Arc::new(FlushDomain::new());
        let host = MachineHost::with_nodes(Arc::clone(&domain), 100, Arc::new(map)).unwrap();
        let layout = Layout::from_size_align(4096, 4096).unwrap();
        let table = |node| host.allocate_table(layout, TableNode::Node(NodeId(node)), AllocationWait::Never).unwrap();
        let tables = nodes.map(table);
        assert_eq!(tables.map(|table| host.node_of(table.pfn()).0), nodes);
        let counts = Arc::default();
        let counter = host.walk_counter(&counts).unwrap();
        let way = Way { port: Port::new(&domain), host, tables, manual: *manual, counts, counter };
        for level in 2..=4 {
            way.set(level, manual.entry(way.tables[5 - level].0, manual.link));
        }
        way
    }

    fn set(&self, level: usize, entry: u64) {
        let at = self.host.table_ptr(self.tables[4 - level]).cast::<u64>().wrapping_add(INDEXES[4 - level]);
        // SAFETY: in a page-table page of the host, which lives as long as `self`.
        unsafe { AtomicU64::from_ptr(at) }.store(entry, Ordering::Relaxed);
    }

    fn walker(&self) -> Walker<'_, &WalkCounter> {
        Walker {
            port: &self.port,
            generation: self.port.generation(),
            root: self.tables[0],
            processor: self.manual.processor,
            cached: None,
            log: None,
            memory: &self.counter,
        }
    }

    /// The reads of a walk from `node`: local, remote, and those of level 1.
    fn walk<F: HardwareFormat>(&self, node: u32) -> ([u64; 4], Result<(), Stop>) {
        self.host.nodes().run_on(NodeId(node)).unwrap();
        let before = Cell::new(self.counts.get());
        let result = uninterrupted(Stop::Restart, || {
            before.set(self.counts.get());
            self.counter.begin_walk();
            F::walk(self.walker(), GPA, Access::Read, Purpose::Data).map(|_| ())
        });
        let WalkReads { local, remote, leaf_table_local, leaf_table_remote } = self.counts.get().since(before.get());
        ([local, remote, leaf_table_local, leaf_table_remote], result)
    }
}

fn counts_are_exact<F: HardwareFormat>(manual: &Manual) {
    let way = Way::new([0, 7, 0, 7], manual);
    way.set(1, leaf(manual, 1));
    assert_eq!(way.walk::<F>(0), ([2, 2, 0, 1], Ok(())));
    assert_eq!(way.walk::<F>(7), ([2, 2, 1, 0], Ok(())));
    // A fault counts the reads before it.
    way.set(1, 0);
    let (reads, result) = way.walk::<F>(7);
    assert!(matches!(result, Err(Stop::Fault(_))));
    assert_eq!(reads, [2, 2, 1, 0]);
    way.set(3, 0);
    assert_eq!(way.walk::<F>(7).0, [1, 1, 0, 0]);
    way.set(3, manual.entry(way.tables[2].0, manual.link));
    // A huge page ends above level 1.
    way.set(2, leaf(manual, 2));
    assert_eq!(way.walk::<F>(0), ([2, 1, 0, 0], Ok(())));
    let way = Way::new([7, 7, 7, 7], manual);
    way.set(1, leaf(manual, 1));
    assert_eq!(way.walk::<F>(7), ([4, 0, 1, 0], Ok(())));
    assert_eq!(way.walk::<F>(0), ([0, 4, 0, 1], Ok(())));
}

#[test]
fn reads_are_counted_by_node_and_level() {
    counts_are_exact::<Npt>(&NPT);
    counts_are_exact::<Ept>(&EPT);
    counts_are_exact::<Stage2>(&STAGE2);
    counts_are_exact::<Vtd>(&VTD);
    counts_are_exact::<Sv48x4>(&SV48X4);
}

#[test]
fn an_overtaken_walk_counts_the_reads_before() {
    let way = Way::new([0, 7, 0, 7], &NPT);
    way.set(1, leaf(&NPT, 1));
    way.counter.begin_walk();
    let walker = way.walker();
    for (level, &table) in (1..=4).rev().zip(&way.tables).take(3) {
        let index = INDEXES[4 - level as usize] as u64;
        let read = uninterrupted(Stale, || Used::read_second_stage(walker, table, index, level));
        assert!(read.unwrap().is_some());
    }
    let read = || Used::read_second_stage(walker, way.tables[3], INDEXES[3] as u64, 1);
    let last = uninterrupted(Stale, read).unwrap().unwrap();
    way.port.domain().flush(&[]);
    // It can set its accessed bit no more, and cannot read on.
    assert_eq!(last.set(walker, 1 << 5), Err(Stop::Restart));
    assert!(read().is_err());
    let reads = way.counts.get();
    assert_eq!(reads, WalkReads { local: 2, remote: 2, leaf_table_local: 0, leaf_table_remote: 1 });
}

#[test]
fn one_node_has_no_counter_and_foreign_tables_have_no_node() {
    let host = MachineHost::new(Arc::default(), 10).unwrap();
    assert!(host.walk_counter(&Arc::default()).is_none());
    let way = Way::new([0, 0, 0, 0], &NPT);
    let page = super::tests::Page::new();
    way.counter.count(page.hpa(), 1);
    way.counter.count(phys::hpa_of(&raw const way), 4);
    assert_eq!(way.counts.get(), WalkReads::default());
}
