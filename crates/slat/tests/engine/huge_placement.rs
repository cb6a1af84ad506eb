//! On which node page-table pages lie: those of splits and those of faults, by each policy; and the
//! counts, against a walk.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::broken::Broken;
use crate::common::log::{LOG, NO_FLAGS, Slot, World};
use crate::common::{MIB, Nodes, TestHost, region};
use slat::baselines::Locking;
use slat::dirty::HugePageLogging;
use slat::error::FaultError;
use slat::format::{Format, Pte};
use slat::tables::TablePlacement;
use slat::{Access, Config, Gfn, GfnRange, Host, Hpa, Level, NodeId, Outcome, PageSize, Vm};

const BIG: u64 = 512;
const HUGE: u64 = 512 * 512;
const POLICIES: [TablePlacement; 4] = [
    TablePlacement::HugePageNode,
    TablePlacement::CallerNode,
    TablePlacement::CallerPolicy,
    TablePlacement::Node(NodeId(2)),
];
/// Nodes take turns by 2 MiB; this thread is on one, and its policy names another.
const NODES: Nodes = Nodes { frames_apart: BIG, nr_nodes: 4, caller: 3, policy: 1, without_memory: None };

/// `$test::<Format>(..)` for each format.
macro_rules! of_each_format {
    ($test:ident($($argument:expr),*)) => {
        slat::for_each_format!(F => {
            $test::<F>($($argument),*);
        });
        $test::<Broken>($($argument),*);
    };
}

/// A world with nodes.
fn world<F: Format>(config: Config, nodes: Nodes) -> World<F> {
    let world = World::<F>::new(config);
    *world.vm.host().nodes.lock().unwrap() = Some(nodes);
    world
}

/// The page-table pages whose PTEs have `level`, by the first frame that they map and their node.
fn tables<F: Format>(world: &World<F>, level: Level) -> Vec<(Gfn, NodeId)> {
    let mut found = Vec::new();
    visit(world, world.vm.root(), F::ROOT_LEVEL, Gfn(0), level, &mut found);
    found
}

fn visit<F: Format>(
    world: &World<F>,
    table: Hpa,
    level: Level,
    start: Gfn,
    wanted: Level,
    found: &mut Vec<(Gfn, NodeId)>,
) {
    let host = world.vm.host();
    if level == wanted {
        found.push((start, host.node_of(table.pfn())));
        return;
    }
    let mut reader = (0..512).map(|index| Gfn(start.0 + index * level.nr_pages()));
    let entries = crate::common::entries_of(host, table);
    for entry in entries {
        let Some(gfn) = reader.next() else { return };
        let entry = Pte(entry);
        if F::is_present(entry) && !F::is_leaf(entry, level) {
            visit(world, F::address(entry, level), level.down(), gfn, wanted, found);
        }
    }
}

fn expected(policy: TablePlacement, memory: NodeId) -> NodeId {
    match policy {
        TablePlacement::HugePageNode => memory,
        TablePlacement::CallerNode => NodeId(NODES.caller),
        TablePlacement::CallerPolicy => NodeId(NODES.policy),
        TablePlacement::Node(node) => node,
    }
}

fn node_of_page<F: Format>(world: &World<F>, slot: Slot, gfn: Gfn) -> NodeId {
    world.vm.host().node_of(slat::Pfn(slot.first_pfn + (gfn.0 - slot.first)))
}

/// Splits ahead of time, by the end of a clear or by the first write: each page-table page lies on
/// the expected node, and is counted.
fn splits<F: Format>(config: Config) {
    for policy in POLICIES {
        for splitting in [HugePageLogging::Split, HugePageLogging::SplitLazily] {
            let config = config.with_table_placement(policy).with_huge_page_logging(splitting);
            let mut world = world::<F>(config, NODES);
            let slot = Slot::huge(1, HUGE, HUGE, PageSize::Size1G);
            world.create(slot, NO_FLAGS);
            world.write(slot, 0);
            world.set_flags(slot, LOG);
            let written: Vec<u64> = (0..9).map(|n| n * BIG + 5).collect();
            world.write_all(slot, written.iter().copied());
            let found = tables(&world, Level::L4K);
            let nr_split = if splitting.splits_eagerly() { 512 } else { 9 };
            assert_eq!(found.len(), nr_split);
            let mut nr_remote = 0;
            for (gfn, node) in found {
                let memory = node_of_page(&world, slot, gfn);
                assert_eq!(node, expected(policy, memory), "{policy:?} {splitting:?} at {gfn:?}");
                nr_remote += u64::from(node != memory);
            }
            // And the one with the parts of the 1 GiB.
            let [above] = tables(&world, Level::L2M)[..] else { panic!("one") };
            let memory = node_of_page(&world, slot, above.0);
            assert_eq!(above.1, expected(policy, memory));
            nr_remote += u64::from(above.1 != memory);
            let stats = world.vm.stats();
            assert_eq!((stats.split_tables, stats.remote_split_tables), (nr_split as u64 + 1, nr_remote), "{policy:?}");
            if policy == TablePlacement::HugePageNode {
                assert_eq!(nr_remote, 0);
            }
            world.finish(&[slot]);
        }
    }
}

#[test]
fn tables_of_splits_lie_on_the_preferred_node() {
    for locking in [Locking::None, Locking::Exclusive] {
        of_each_format!(splits(Config::default().with_locking(locking)));
    }
}

/// The root lies where the policy says.
fn root<F: Format>() {
    for policy in POLICIES {
        let host = TestHost::default();
        *host.nodes.lock().unwrap() = Some(NODES);
        let vm = Vm::<_, F>::new(host, Config::default().with_table_placement(policy)).unwrap();
        let node = vm.host().node_of(vm.root().pfn());
        assert_eq!(node, expected(policy, NodeId(NODES.caller)), "{policy:?}");
    }
}

#[test]
fn the_root_lies_where_the_policy_says() {
    slat::for_each_format!(F => {
        root::<F>();
    });
}

/// Levels of the PTEs of page-table pages other than the root.
fn below_root<F: Format>() -> impl Iterator<Item = Level> {
    [Level::L4K, Level::L2M, Level::L1G, Level(4)].into_iter().filter(|level| *level < F::ROOT_LEVEL)
}

/// Page-table pages of faults and prefaults, three at a time and one at a time.
fn faults<F: Format>(config: Config) {
    for policy in POLICIES {
        let mut world = world::<F>(config.with_table_placement(policy), NODES);
        let slot = Slot::huge(1, 0, 3 * HUGE, PageSize::Size4K);
        world.create(slot, NO_FLAGS);
        let (mut nr_tables, mut nr_remote) = (0, 0);
        let mut last = Vec::new();
        for page in [0, BIG, 5 * BIG + 7, HUGE + 3 * BIG, 2 * HUGE + BIG] {
            world.read(slot, page);
            // Those that this fault has linked are for its page.
            let mut now = Vec::new();
            for level in below_root::<F>() {
                now.extend(tables(&world, level).into_iter().map(|(gfn, node)| (level, gfn, node)));
            }
            for &(level, gfn, node) in now.iter().filter(|table| !last.contains(*table)) {
                let memory = node_of_page(&world, slot, slot.gfn(page));
                assert_eq!(node, expected(policy, memory), "{policy:?}: level {} at {gfn:?}", level.0);
                nr_tables += 1;
                nr_remote += u64::from(node != memory);
            }
            last = now;
        }
        let gpa = slot.gfn(HUGE + 10 * BIG).gpa();
        assert_eq!(world.vcpu.pre_fault_memory(gpa, 3 * 2 * MIB, Access::Write), Ok(3 * 2 * MIB));
        for (gfn, node) in
            tables(&world, Level::L4K).into_iter().filter(|(gfn, _)| gfn.gpa() >= gpa && gfn.0 < 2 * HUGE)
        {
            let memory = node_of_page(&world, slot, gfn);
            assert_eq!(node, expected(policy, memory), "{policy:?}: prefault at {gfn:?}");
            nr_tables += 1;
            nr_remote += u64::from(node != memory);
        }
        let stats = world.vm.stats();
        assert_eq!((stats.fault_tables, stats.remote_fault_tables), (nr_tables, nr_remote), "{policy:?}");
        assert_eq!((stats.split_tables, stats.remote_split_tables), (0, 0));
        world.finish(&[slot]);
    }
}

#[test]
fn tables_of_faults_lie_on_the_preferred_node() {
    for locking in [Locking::None, Locking::Exclusive] {
        of_each_format!(faults(Config::default().with_locking(locking)));
    }
}

/// A node without memory: its page-table pages come from another and are counted as remote.
fn without_memory<F: Format>(config: Config) {
    let mut world = world::<F>(config, Nodes { without_memory: Some(1), ..NODES });
    let slot = Slot::huge(1, HUGE, 16 * BIG, PageSize::Size2M);
    world.create(slot, NO_FLAGS);
    world.write_all(slot, (0..16).map(|n| n * BIG));
    let before = world.vm.stats();
    world.set_flags(slot, LOG);
    let found = tables(&world, Level::L4K);
    assert_eq!(found.len(), 16);
    for (gfn, node) in found {
        let memory = node_of_page(&world, slot, gfn);
        assert_eq!(node, if memory == NodeId(1) { NodeId(2) } else { memory });
    }
    let stats = world.vm.stats();
    assert_eq!((stats.split_tables, stats.remote_split_tables), (16, 4));
    assert_eq!(stats.fault_tables, before.fault_tables);
    world.finish(&[slot]);
}

#[test]
fn a_node_without_memory_has_remote_tables() {
    of_each_format!(without_memory(Config::default()));
}

/// A spare page-table page of one node is not used for another, and is freed.
fn left_over<F: Format>(config: Config) {
    let mut world = world::<F>(config, NODES);
    let slot = Slot::huge(1, 0, 4 * HUGE, PageSize::Size4K);
    world.create(slot, NO_FLAGS);
    // All page-table pages that it needs are at hand, except the last.
    let nr_tables = usize::from(F::ROOT_LEVEL.0 - 1);
    world.vm.host().fail_after(nr_tables as i64 - 1);
    assert_eq!(world.vcpu.handle_fault(slot.gfn(0).gpa(), Access::Read), Err(FaultError::OutOfMemory));
    world.vm.host().never_fail();
    assert_eq!(world.vm.host().live_tables(), nr_tables);
    world.read(slot, HUGE + BIG);
    assert_eq!(world.vm.host().live_tables(), nr_tables + 1, "those of the other node were freed");
    for level in below_root::<F>() {
        let [(_, node)] = tables(&world, level)[..] else { panic!("one") };
        assert_eq!(node, NodeId(1));
    }
    let stats = world.vm.stats();
    let nr_tables = nr_tables as u64;
    assert_eq!((stats.fault_tables, stats.remote_fault_tables, stats.tables_freed), (nr_tables, 0, nr_tables - 1));
    // Spare ones of the same node are used.
    world.vm.host().fail_after(1);
    assert_eq!(world.vcpu.handle_fault(slot.gfn(2 * HUGE + BIG).gpa(), Access::Read), Err(FaultError::OutOfMemory));
    assert_eq!(world.vcpu.handle_fault(slot.gfn(HUGE + 5 * BIG).gpa(), Access::Read), Ok(Outcome::Resume));
    world.vm.host().never_fail();
    assert_eq!(world.vm.stats().remote_fault_tables, 0);
    world.finish(&[slot]);
}

#[test]
fn a_spare_table_of_another_node_is_not_used() {
    of_each_format!(left_over(Config::default()));
}

/// A huge page that the host makes read-only. It then makes a small part of it writable: the fault
/// splits, and the page-table pages of splits have their own policy.
fn split_by_a_copy<F: Format>(config: Config, nodes: Nodes) {
    let mut world = world::<F>(config, nodes);
    let slot = Slot::huge(1, HUGE, 8 * BIG, PageSize::Size2M);
    let memory = region(1, HUGE * 4096, 8 * 2 * MIB, slot.first_pfn, PageSize::Size2M);
    let backing = Arc::clone(memory.backing.as_ref().unwrap());
    backing.reads_are_writable.store(false, Ordering::SeqCst);
    world.vm.set_user_memory_region(memory).unwrap();
    for n in 0..8 {
        assert_eq!(world.vcpu.handle_fault(slot.gfn(n * BIG).gpa(), Access::Read), Ok(Outcome::Resume));
    }
    for n in 0..8 {
        // The same frame, and small from now on.
        let page = n * BIG + 9;
        let frame = crate::common::Frame { pfn: slot.first_pfn + page, writes: crate::common::Writes::Allowed };
        backing.frames.write().unwrap().insert(page, frame);
        assert_eq!(world.vcpu.handle_fault(slot.gfn(page).gpa(), Access::Write), Ok(Outcome::Resume));
        assert!(world.is_writable(slot, page) && !world.is_writable(slot, page + 1));
    }
    for (gfn, node) in tables(&world, Level::L4K) {
        assert_eq!(node, node_of_page(&world, slot, gfn), "at {gfn:?}");
    }
    let stats = world.vm.stats();
    assert_eq!((stats.split_tables, stats.remote_split_tables), (8, 0));
    world.finish(&[slot]);
}

#[test]
fn a_write_fault_in_a_read_only_huge_leaf_splits_by_the_split_policy() {
    of_each_format!(split_by_a_copy(Config::default(), NODES));
}

/// An invalidation of a part splits by the policy of splits, and makes no page-table page where
/// nothing is mapped.
fn split_by_an_invalidation<F: Format>(config: Config) {
    for policy in POLICIES {
        let mut world = world::<F>(config.with_table_placement(policy), NODES);
        let slot = Slot::huge(1, HUGE, 8 * BIG, PageSize::Size2M);
        world.create(slot, NO_FLAGS);
        world.write_all(slot, (0..8).map(|n| n * BIG));
        let nr_fault_tables = world.vm.stats().fault_tables;
        for n in 0..8 {
            drop(world.vm.invalidate_range(GfnRange::new(slot.gfn(n * BIG + 3), 2)).unwrap());
        }
        for (gfn, node) in tables(&world, Level::L4K) {
            assert_eq!(node, expected(policy, node_of_page(&world, slot, gfn)), "{policy:?} at {gfn:?}");
        }
        let stats = world.vm.stats();
        assert_eq!((stats.split_tables, stats.fault_tables), (8, nr_fault_tables));
        // Nothing is mapped there.
        drop(world.vm.invalidate_range(GfnRange::new(slot.gfn(100 * BIG + 3), 1)).unwrap());
        assert_eq!((world.vm.stats().split_tables, world.vm.stats().fault_tables), (8, nr_fault_tables));
        world.finish(&[slot]);
    }
}

#[test]
fn an_invalidation_of_a_part_places_its_tables() {
    of_each_format!(split_by_an_invalidation(Config::default()));
}
