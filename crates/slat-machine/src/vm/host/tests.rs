//! The host: page-table pages are disjoint, limited and reused; sleepers wake; slices of one memory
//! resolve to its parts.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use slat::Gfn;

use super::*;
use crate::hardware::commit::{Dropped, Port, Scope};
use crate::memory::BackingKind;
use crate::memory::numa::{MemoryPolicy, Nodes};

fn host(max_tables: Option<u64>) -> MachineHost {
    MachineHost::new(Arc::default(), max_tables.unwrap_or(1 << 20)).expect("address space")
}

fn layout(size_bytes: usize) -> Layout {
    Layout::from_size_align(size_bytes, size_bytes).expect("powers of two")
}

fn allocate(host: &MachineHost, layout: Layout) -> Option<Hpa> {
    host.allocate_table(layout, TableNode::CallerPolicy, AllocationWait::Allowed)
}

#[test]
fn tables_are_aligned_disjoint_and_writable() {
    let host = host(None);
    let mut ranges = Vec::new();
    for size_bytes in [4096, 16384, 4096, 65536, 8192, 4096] {
        let table = allocate(&host, layout(size_bytes)).expect("memory");
        assert!(table.0.is_multiple_of(size_bytes as u64), "{table} for {size_bytes}");
        let pointer = host.table_ptr(table);
        assert_eq!(phys::hpa_of(pointer), table);
        // SAFETY: a page-table page of this size that only this thread has.
        unsafe { pointer.write_bytes(0xa5, size_bytes) };
        ranges.push(table.0..table.0 + size_bytes as u64);
    }
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:x?}");
    assert_eq!(host.live_tables(), 6);
}

#[test]
fn freed_tables_are_allocated_again() {
    let host = host(None);
    let small = allocate(&host, layout(4096)).expect("memory");
    let large = allocate(&host, layout(16384)).expect("memory");
    // SAFETY: both came from this host with these layouts, and they are not used.
    unsafe {
        host.free_table(small, layout(4096));
        host.free_table(large, layout(16384));
    }
    assert_eq!(host.live_tables(), 0);
    assert_eq!(allocate(&host, layout(16384)), Some(large));
    assert_eq!(allocate(&host, layout(4096)), Some(small));
}

#[test]
fn a_limit_holds_and_freeing_makes_room() {
    let host = host(Some(3));
    let tables = [(); 3].map(|()| allocate(&host, layout(4096)).expect("below the limit"));
    assert_eq!(allocate(&host, layout(4096)), None);
    assert_eq!(host.live_tables(), 3);
    // SAFETY: it came from this host with this layout, and it is not used.
    unsafe { host.free_table(tables[1], layout(4096)) };
    assert_eq!(allocate(&host, layout(4096)), Some(tables[1]));
    assert_eq!(allocate(&host, layout(4096)), None);
}

#[test]
fn an_empty_region_allocates_none_and_counts_none() {
    let tables = Tables::new(3 * PAGE_SIZE, u64::MAX, &NodeMap::one()).expect("address space");
    let allocated = (0..5).filter_map(|_| tables.allocate(layout(4096), &[0])).collect::<Vec<_>>();
    assert_eq!(allocated.len(), 3);
    assert_eq!(tables.allocate(layout(4096), &[0]), None);
    assert_eq!(tables.nr_live(), 3);
    tables.free(allocated[0], layout(4096));
    assert_eq!(tables.allocate(layout(4096), &[0]), Some(allocated[0]));
}

#[test]
fn sizes_that_no_format_has_are_refused() {
    let host = host(None);
    assert_eq!(allocate(&host, layout(1 << 20)), None);
    assert_eq!(host.live_tables(), 0);
    let table = allocate(&host, Layout::from_size_align(64, 8).expect("small")).expect("a page at least");
    assert!(table.0.is_multiple_of(PAGE_SIZE));
}

#[test]
fn no_table_has_two_owners() {
    let host = host(None);
    let owned = Mutex::new(HashSet::new());
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut mine = Vec::new();
                for turn in 0..5_000 {
                    let table = allocate(&host, layout(4096)).expect("memory");
                    assert!(owned.lock().insert(table), "{table} has an owner");
                    mine.push(table);
                    if turn % 3 != 0 {
                        let table = mine.swap_remove(turn % mine.len());
                        assert!(owned.lock().remove(&table));
                        // SAFETY: it came from this host with this layout, and it is not used any
                        // more.
                        unsafe { host.free_table(table, layout(4096)) };
                    }
                }
            });
        }
    });
    assert_eq!(host.live_tables(), owned.into_inner().len() as u64);
}

#[test]
fn sleepers_are_woken_and_a_wake_up_returns_whether_one_slept() {
    let host = host(None);
    let word = AtomicU32::new(0);
    let sleep = || {
        while word.load(Ordering::Acquire) == 0 {
            host.park(&word, 0);
        }
    };
    for nr_sleepers in [1, 8] {
        word.store(0, Ordering::Release);
        thread::scope(|scope| {
            let sleepers: Vec<_> = (0..nr_sleepers).map(|_| scope.spawn(sleep)).collect();
            // As long as the word is 0 each sleeps again and again, so this ends.
            while !host.unpark_one(&word) {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(5));
            assert!(sleepers.iter().all(|sleeper| !sleeper.is_finished()));
            word.store(1, Ordering::Release);
            match nr_sleepers {
                1 => _ = host.unpark_one(&word),
                _ => host.unpark_all(&word),
            }
        });
    }
    // Another value: no sleep at all. No sleeper: no wake-up.
    host.park(&word, 0);
    assert!(!host.unpark_one(&word));
    host.unpark_all(&word);
}

#[test]
fn slices_resolve_to_their_part_of_the_memory() {
    let host = host(None);
    let backing = Backing::new(BackingKind::Anonymous, 8 * PAGE_SIZE).expect("memory");
    let slice = BackingSlice { backing: backing.clone(), offset_bytes: 3 * PAGE_SIZE };
    let resolved = host.resolve(&slice, Gfn(77), 2, Access::Write).expect("inside");
    assert_eq!(phys::ptr_of(resolved.pfn.hpa()), backing.as_ptr().wrapping_add(5 * PAGE_SIZE as usize));
    assert_eq!(host.resolve(&slice, Gfn(77), 5, Access::Read), Err(Unresolved::Gone));
    assert_eq!(host.resolve(&slice, Gfn(77), u64::MAX, Access::Read), Err(Unresolved::Gone));
    assert_eq!(host.resolve(&slice, Gfn(77), u64::MAX >> Gfn::SHIFT, Access::Read), Err(Unresolved::Gone));
}

#[test]
fn the_cpus_get_the_ranges_of_a_flush() {
    let host = host(None);
    let port = Port::new(host.flush_domain());
    let before = port.generation();
    let ranges = [GfnRange::new(Gfn(7), 2), GfnRange::new(Gfn(1 << 30), 1)];
    host.flush(&ranges);
    let flushed = port.flushed_since(before, port.generation()).expect("two ranges");
    assert_eq!(flushed.as_slice(), ranges.map(|range| Dropped { scope: Scope::All, range }));
}

fn host_of(nodes: &[u32], without_memory: &[u32]) -> MachineHost {
    let ids = |numbers: &[u32]| numbers.iter().copied().map(NodeId).collect();
    let nodes = Nodes::Virtual { nodes: ids(nodes), without_memory: ids(without_memory) }.map().expect("nodes");
    MachineHost::with_nodes(Arc::default(), 1 << 20, Arc::new(nodes)).expect("address space")
}

/// The node of a page-table page of `size_bytes` that was requested on `node`.
fn node_of_new(host: &MachineHost, node: TableNode, size_bytes: usize) -> u32 {
    let table = host.allocate_table(layout(size_bytes), node, AllocationWait::Never).expect("memory");
    assert!(table.0.is_multiple_of(size_bytes as u64));
    // All of its frames.
    let nodes: HashSet<u32> =
        (0..size_bytes as u64 >> Gfn::SHIFT).map(|page| host.node_of(Pfn(table.pfn().0 + page)).0).collect();
    assert_eq!(nodes.len(), 1);
    // SAFETY: a page-table page of this size that only this thread has.
    unsafe { host.table_ptr(table).write_bytes(0x5a, size_bytes) };
    nodes.into_iter().next().expect("one")
}

#[test]
fn tables_come_from_the_requested_node() {
    let host = host_of(&[0, 2, 5], &[]);
    for size_bytes in [4096, 16384, 65536, 4096] {
        for node in [5, 0, 2] {
            assert_eq!(node_of_new(&host, TableNode::Node(NodeId(node)), size_bytes), node);
        }
    }
    assert_eq!(host.live_tables_by_node(), [0, 2, 5].map(|node| (NodeId(node), 4)));
    assert_eq!(host.live_tables(), 12);
    // A node that does not exist: the first.
    assert_eq!(node_of_new(&host, TableNode::Node(NodeId(1)), 4096), 0);
    assert_eq!(node_of_new(&host, TableNode::Caller, 4096), 0);
    host.nodes().run_on(NodeId(5)).expect("there is");
    assert_eq!(node_of_new(&host, TableNode::Caller, 4096), 5);
    assert_eq!(node_of_new(&host, TableNode::CallerPolicy, 4096), 5);
    host.nodes().set_memory_policy(MemoryPolicy::Interleave).expect("a policy");
    let turns = [(); 4].map(|()| node_of_new(&host, TableNode::CallerPolicy, 4096));
    assert_eq!(turns, [0, 2, 5, 0]);
    assert_eq!(node_of_new(&host, TableNode::Caller, 4096), 5, "not by the policy");
}

#[test]
fn tables_of_a_node_without_memory_come_from_the_next() {
    let host = host_of(&[0, 1, 2], &[0, 1]);
    for node in [0, 1, 2] {
        assert_eq!(node_of_new(&host, TableNode::Node(NodeId(node)), 4096), 2);
        host.nodes().run_on(NodeId(node)).expect("it has CPUs");
        assert_eq!(node_of_new(&host, TableNode::Caller, 4096), 2);
    }
    assert_eq!(host.live_tables_by_node(), [(NodeId(0), 0), (NodeId(1), 0), (NodeId(2), 6)]);
}

#[test]
fn a_freed_table_goes_back_to_its_node() {
    let host = host_of(&[0, 1], &[]);
    let on = |node| host.allocate_table(layout(4096), TableNode::Node(NodeId(node)), AllocationWait::Allowed);
    let (first, second) = (on(0).expect("memory"), on(1).expect("memory"));
    // SAFETY: both came from this host with this layout, and they are not used.
    unsafe {
        host.free_table(second, layout(4096));
        host.free_table(first, layout(4096));
    }
    assert_eq!(host.live_tables_by_node(), [(NodeId(0), 0), (NodeId(1), 0)]);
    assert_eq!((on(1), on(0)), (Some(second), Some(first)));
}

#[test]
fn tables_of_an_exhausted_node_come_from_the_others() {
    let nodes = Nodes::virtual_nodes(3).map().expect("nodes");
    // Three page-table pages for each node, which is no power of two.
    let tables = Tables::new(3 * PAGE_SIZE, 8, &nodes).expect("address space");
    let mut allocated = Vec::new();
    let allocate = |node: u32| tables.allocate(layout(4096), nodes.places_for(TableNode::Node(NodeId(node))));
    let nodes_of_new = |allocated: &mut Vec<Hpa>, node: u32, count: usize| {
        let new: Vec<Hpa> = (0..count).filter_map(|_| allocate(node)).collect();
        allocated.extend_from_slice(&new);
        new.into_iter().map(|table| tables.spans().node_of(table).expect("of a node").0).collect::<Vec<_>>()
    };
    assert_eq!(nodes_of_new(&mut allocated, 1, 5), [1, 1, 1, 2, 2]);
    assert_eq!(nodes_of_new(&mut allocated, 2, 2), [2, 0]);
    assert_eq!([0, 1, 2].map(|place| tables.nr_live_at(place)), [1, 3, 3]);
    // One more, and the limit for all nodes is reached.
    assert_eq!(nodes_of_new(&mut allocated, 1, 5), [0]);
    assert_eq!(tables.nr_live(), 8);
    tables.free(allocated[1], layout(4096));
    assert_eq!(nodes_of_new(&mut allocated, 0, 1), [0]);
    tables.free(allocated[2], layout(4096));
    assert_eq!(nodes_of_new(&mut allocated, 0, 1), [1], "of node 0 there is none left");
    // The last was allocated again.
    assert_eq!((allocated.len(), allocated.iter().collect::<HashSet<_>>().len()), (10, 9));
}

#[test]
fn guest_memory_is_on_the_nodes_that_were_set() {
    let host = host_of(&[1, 3], &[]);
    let backing = Backing::new(BackingKind::Anonymous, 4 * PAGE_SIZE).expect("memory");
    let page = |page: u64| backing.frame_of(page).expect("inside");
    assert_eq!(host.node_of(page(0)), NodeId(1), "not set: the first");
    let span = |first: u64, end: u64, node| MemorySpan {
        start: page(first).hpa(),
        end: Hpa(page(end - 1).hpa().0 + PAGE_SIZE),
        node: NodeId(node),
    };
    host.set_memory_spans(vec![span(3, 4, 1), span(0, 3, 3)]);
    assert_eq!([0, 1, 2, 3].map(|number| host.node_of(page(number)).0), [3, 3, 3, 1]);
}
