//! Machines of several nodes: the nodes of memory, page-table pages and virtual CPUs, and the reads
//! of walks on each.

#![expect(unsafe_code, reason = "reads the engine's tables as hardware does")]

use slat::format::{Format, Npt};
use slat::tables::TablePlacement;
use slat::{Config, Host, Hpa, NodeId, PAGE_SIZE, PageSize};

use super::*;
use crate::hardware::cpu::Paging;
use crate::memory::BackingKind;
use crate::memory::numa::policy;
use crate::memory::numa::tests::FakeSysfs;
use crate::memory::numa::{FirstTouch, MemoryPolicy, Nodes, Pinning, WalkReads};
use crate::memory::phys;
use crate::vm::guest::{Order, Sharing};

const MIB: u64 = 1 << 20;

/// Four virtual CPUs with 4 MiB each, two on node 2 and two on node 5: a page-table page of level 1
/// maps memory of one of them.
fn two_nodes() -> MachineConfig {
    MachineConfig {
        nr_vcpus: 4,
        bytes_per_vcpu: 4 * MIB,
        nr_slots: 2,
        nodes: nodes(&[2, 5], &[]),
        ..Default::default()
    }
}

fn nodes(numbers: &[u32], without_memory: &[u32]) -> Nodes {
    let ids = |numbers: &[u32]| numbers.iter().copied().map(NodeId).collect();
    Nodes::Virtual { nodes: ids(numbers), without_memory: ids(without_memory) }
}

fn placed(placement: TablePlacement) -> Config {
    Config::default().with_table_placement(placement)
}

/// A linked page-table page; the root is left out.
struct Linked {
    level: u8,
    node: NodeId,
    /// The first page that is mapped through it.
    first_page: u64,
    memory: NodeId,
}

/// All page-table pages of an NPT machine, read as hardware reads them.
fn linked_tables(machine: &Machine<Npt>) -> Vec<Linked> {
    fn visit(machine: &Machine<Npt>, table: Hpa, level: u8, base: u64, found: &mut Vec<Linked>) -> Option<(u64, Hpa)> {
        let (entries, mut first, at) = (phys::ptr_of(table).cast::<u64>(), None, found.len());
        for index in 0..512 {
            // SAFETY: a page-table page of the engine, which no thread changes now.
            let entry = unsafe { AtomicU64::from_ptr(entries.wrapping_add(index)) }.load(Ordering::Acquire);
            let (gpa, address) =
                (base + ((index as u64) << (3 + 9 * u32::from(level))), Hpa(entry & 0xf_ffff_ffff_f000));
            let leaf = match entry & 1 {
                0 => continue,
                _ if level == 1 || entry & 1 << 7 != 0 => Some((gpa, address)),
                _ => visit(machine, address, level - 1, gpa, found),
            };
            first = first.or(leaf);
        }
        if let Some((gpa, leaf)) = first
            && level < 4
        {
            let host = machine.vm().host();
            let first_page = (gpa - REGION_GPA.0) >> Gfn::SHIFT;
            let linked =
                Linked { level, node: host.node_of(table.pfn()), first_page, memory: host.node_of(leaf.pfn()) };
            found.insert(at, linked);
        }
        first
    }
    let mut found = Vec::new();
    visit(machine, machine.vm().root(), 4, 0, &mut found);
    found
}

#[test]
fn each_part_is_on_the_home_of_its_virtual_cpu() {
    let config = MachineConfig {
        nr_vcpus: 7,
        bytes_per_vcpu: 3 * PAGE_SIZE,
        nodes: nodes(&[5, 0, 2], &[]),
        ..MachineConfig::default()
    };
    let machine = Machine::<Npt>::new(&config).unwrap();
    let homes = [0, 0, 0, 2, 2, 5, 5].map(NodeId);
    for (vcpu, home) in homes.into_iter().enumerate() {
        assert_eq!((machine.home_node(vcpu), machine.node_of_vcpu(vcpu)), (Some(home), Some(home)));
        for page in 0..3 {
            assert_eq!(machine.node_of_page(vcpu as u64 * 3 + page), Some(home), "page {page} of {vcpu}");
        }
    }
    assert_eq!((machine.home_node(7), machine.node_of_vcpu(7), machine.node_of_page(21)), (None, None, None));
    machine.run(Program::default()).unwrap();
    assert!((0..7).all(|vcpu| machine.node_of_vcpu(vcpu) == machine.home_node(vcpu)));
}

#[test]
fn the_part_of_a_node_without_memory_is_on_the_next() {
    let machine = Machine::<Npt>::new(&MachineConfig { nodes: nodes(&[1, 4, 8, 9], &[4, 9]), ..two_nodes() }).unwrap();
    assert_eq!([0, 1, 2, 3].map(|vcpu| machine.home_node(vcpu).unwrap().0), [1, 4, 8, 9]);
    assert_eq!([0, 1, 2, 3].map(|vcpu| machine.node_of_page(vcpu * 1024).unwrap().0), [1, 8, 8, 1]);
    machine.run(Program::default()).unwrap();
    assert!(linked_tables(&machine).iter().all(|table| table.level != 1 || table.node == table.memory));
    assert!(machine.tables_by_node().iter().all(|&(node, count)| machine.nodes().has_memory(node) == (count > 0)));
}

#[test]
fn a_huge_page_is_on_one_node() {
    let config = MachineConfig {
        nr_vcpus: 2,
        bytes_per_vcpu: 3 * MIB,
        backing: BackingKind::AnonymousThp,
        nodes: Nodes::virtual_nodes(2),
        ..MachineConfig::default()
    };
    let machine = Machine::<Npt>::new(&config).unwrap();
    assert_eq!([0, 511, 512, 767, 768, 1535].map(|page| machine.node_of_page(page).unwrap().0), [0, 0, 1, 1, 1, 1]);
}

#[test]
fn the_first_touch_places_tables_of_the_caller() {
    // The node of a page-table page of level 1, for a part whose home is the first node (the other
    // way round for the second).
    let homes = [2, 2, 5, 5].map(NodeId);
    let others = [5, 5, 2, 2].map(NodeId);
    let only = [5; 4].map(NodeId);
    for (placement, first_touch, expected) in [
        (TablePlacement::HugePageNode, FirstTouch::Own, homes),
        (TablePlacement::HugePageNode, FirstTouch::Other, homes),
        (TablePlacement::HugePageNode, FirstTouch::Main, homes),
        (TablePlacement::CallerNode, FirstTouch::Own, homes),
        (TablePlacement::CallerNode, FirstTouch::Other, others),
        (TablePlacement::CallerNode, FirstTouch::Main, only),
        (TablePlacement::CallerPolicy, FirstTouch::Own, homes),
        (TablePlacement::CallerPolicy, FirstTouch::Other, others),
        (TablePlacement::CallerPolicy, FirstTouch::Main, only),
        (TablePlacement::Node(NodeId(5)), FirstTouch::Own, only),
    ] {
        let machine = Machine::<Npt>::new(&MachineConfig { engine: placed(placement), ..two_nodes() }).unwrap();
        machine.nodes().run_on(NodeId(5)).unwrap();
        machine.populate(Program::default(), first_touch).unwrap();
        let tables = linked_tables(&machine);
        let leaf_tables: Vec<&Linked> = tables.iter().filter(|table| table.level == 1).collect();
        assert_eq!(leaf_tables.len(), 8);
        for table in leaf_tables {
            let vcpu = (table.first_page / 1024) as usize;
            assert_eq!(table.node, expected[vcpu], "{placement:?}, {first_touch:?}, page {}", table.first_page);
            assert_eq!(table.memory, homes[vcpu], "memory is where it is bound, whichever CPU touches it");
        }
        // Everything was written, and each reads its own.
        machine.run(Program { write_percent: 0, oldest_round: 1, ..Program::default() }).unwrap();
    }
}

#[test]
fn the_engines_counters_agree_with_the_tables() {
    for placement in [
        TablePlacement::HugePageNode,
        TablePlacement::CallerNode,
        TablePlacement::CallerPolicy,
        TablePlacement::Node(NodeId(2)),
    ] {
        let machine = Machine::<Npt>::new(&MachineConfig { engine: placed(placement), ..two_nodes() }).unwrap();
        machine.nodes().run_on(NodeId(5)).unwrap();
        machine.nodes().set_memory_policy(MemoryPolicy::Interleave).unwrap();
        // In the order of the pages: each page-table page is linked for the first of its pages.
        let report = machine.populate(Program::default(), FirstTouch::Main).unwrap();
        assert_eq!((report.vcpus.len(), report.total().nr_accesses), (1, machine.nr_pages()));
        let (tables, stats) = (linked_tables(&machine), machine.vm().stats());
        let nr_remote = tables.iter().filter(|table| table.node != table.memory).count() as u64;
        assert_eq!((stats.fault_tables, stats.remote_fault_tables), (tables.len() as u64, nr_remote), "{placement:?}");
        assert_eq!(nr_remote > 0, placement != TablePlacement::HugePageNode);
        let total: u64 = machine.tables_by_node().iter().map(|&(_, count)| count).sum();
        assert_eq!(total, machine.vm().host().live_tables());
        machine.nodes().set_memory_policy(MemoryPolicy::Local).unwrap();
    }
}

#[test]
fn tables_of_splits_are_where_the_placement_puts_them() {
    let probe = Backing::new(BackingKind::AnonymousThp, 2 * MIB).unwrap();
    if probe.resolve(0, slat::Access::Write, &|_| Ok(())).unwrap().max_size != PageSize::Size2M {
        return eprintln!("skipped: no transparent huge pages");
    }
    for (placement, nr_remote) in [(TablePlacement::HugePageNode, 0), (TablePlacement::CallerNode, 4)] {
        let engine = Config::default().with_table_placement(placement);
        let config = MachineConfig { backing: BackingKind::AnonymousThp, engine, ..two_nodes() };
        let machine = Machine::<Npt>::new(&config).unwrap();
        machine.populate(Program::default(), FirstTouch::Own).unwrap();
        if machine.vm().stats().installed_2m != 8 {
            return eprintln!("skipped: memory is too scattered for huge pages");
        }
        machine.nodes().run_on(NodeId(2)).unwrap();
        machine.set_region_flags(MemoryRegionFlags::LOG_DIRTY_PAGES).unwrap();
        // Whether they are split eagerly or on a write: this thread does it.
        machine.populate(Program { round: 2, ..Program::default() }, FirstTouch::Main).unwrap();
        let stats = machine.vm().stats();
        assert_eq!((stats.split_tables, stats.remote_split_tables), (8, nr_remote), "{placement:?}");
        let leaf_tables = linked_tables(&machine).into_iter().filter(|table| table.level == 1);
        assert_eq!(leaf_tables.filter(|table| table.node != table.memory).count() as u64, nr_remote);
    }
}

/// Walks of mapped pages read a PTE of each level, and five times as many if the guest has paging.
fn walks_are_counted<F: HardwareFormat>(paging: Paging, reads_per_walk: u64) {
    // Each of the guest's own page-table pages is translated, and the page.
    let leaf_reads_per_walk = if paging == Paging::Off { 1 } else { 5 };
    let machine = Machine::<F>::new(&MachineConfig { paging, ..two_nodes() }).unwrap();
    machine.populate(Program::default(), FirstTouch::Other).unwrap();
    // The pages' own CPUs walk for the first time, and set no accessed bits that another CPU could
    // set first.
    let before = machine.walk_reads();
    let reading = Program { write_percent: 0, oldest_round: 1, ..Program::default() };
    let total = machine.run(reading).unwrap().total();
    assert_eq!(machine.walk_reads().since(before), total.walk_reads);
    assert_eq!(total.nr_faults, 0);
    // A walk that is restarted may have read a part of its PTEs, all or none: the access walks
    // again.
    let nr_short = |nr_reads: u64, per_walk: u64| (per_walk * total.nr_walks).checked_sub(nr_reads).unwrap();
    assert!(
        nr_short(total.walk_reads.local + total.walk_reads.remote, reads_per_walk)
            <= reads_per_walk * total.nr_restarts
    );
    let nr_leaf_reads = total.walk_reads.leaf_table_local + total.walk_reads.leaf_table_remote;
    assert!(nr_short(nr_leaf_reads, leaf_reads_per_walk) <= leaf_reads_per_walk * total.nr_restarts);
    if paging == Paging::Off {
        // Page-table pages of level 1 are on the node of the memory, which is that of its CPU.
        assert_eq!(total.walk_reads.leaf_table_remote, 0);
        // The upper page-table pages are on one of the two nodes.
        assert!(total.walk_reads.remote > 0);
        // Those of level 1 of the other parts are remote.
        let shared = Program { sharing: Sharing::Overlapping, ..reading };
        let total = machine.run(shared).unwrap().total();
        let nr_leaf_reads = total.walk_reads.leaf_table_local + total.walk_reads.leaf_table_remote;
        // No walk reads its leaf PTE twice, and only one that is restarted may not have reached it.
        assert!(nr_leaf_reads <= total.nr_walks && total.nr_walks - nr_leaf_reads <= total.nr_restarts, "{total:?}");
        assert!(total.walk_reads.leaf_table_remote > 0);
    }
}

#[test]
fn walks_are_counted_by_node() {
    for (paging, reads_per_level) in [(Paging::Off, 1), (Paging::TwoDimensional, 5)] {
        slat::for_each_format!(F => {
            walks_are_counted::<F>(paging, reads_per_level * u64::from(F::ROOT_LEVEL.0));
        });
    }
}

#[test]
fn with_tables_of_the_caller_all_leaf_reads_of_foreign_first_touch_are_remote() {
    let config = MachineConfig { engine: placed(TablePlacement::CallerNode), ..two_nodes() };
    let machine = Machine::<Npt>::new(&config).unwrap();
    machine.populate(Program::default(), FirstTouch::Other).unwrap();
    let total = machine.run(Program { write_percent: 0, oldest_round: 1, ..Program::default() }).unwrap().total();
    // A walk that is restarted may not have reached its leaf PTE.
    let nr_short = total.nr_walks - total.walk_reads.leaf_table_remote;
    assert!(total.walk_reads.leaf_table_local == 0 && nr_short <= total.nr_restarts, "{total:?}");
}

#[test]
fn one_node_counts_nothing() {
    for nodes in [Nodes::One, Nodes::virtual_nodes(1)] {
        let machine = Machine::<Npt>::new(&MachineConfig { nodes, ..two_nodes() }).unwrap();
        machine.populate(Program::default(), FirstTouch::Main).unwrap();
        assert!(matches!(machine.populate(Program::default(), FirstTouch::Other), Err(MachineError::NoOtherNode)));
        assert_eq!(machine.walk_reads(), WalkReads::default());
        assert_eq!(machine.vm().stats().remote_fault_tables, 0);
        assert_eq!(machine.tables_by_node(), [(NodeId(0), machine.vm().host().live_tables())]);
        assert_eq!((machine.home_node(3), machine.node_of_page(0)), (Some(NodeId(0)), Some(NodeId(0))));
    }
}

#[test]
fn unpinned_virtual_cpus_move_between_runs() {
    let seats = |seed| {
        let config = MachineConfig { nr_vcpus: 8, pinning: Pinning::Off { seed }, ..two_nodes() };
        let machine = Machine::<Npt>::new(&config).unwrap();
        let mut seats = Vec::new();
        for round in 1..=6 {
            machine.run(Program { round, order: Order::Random, ..Program::default() }).unwrap();
            seats.extend((0..8).map(|vcpu| machine.node_of_vcpu(vcpu).unwrap()));
        }
        // Memory stays on the homes.
        assert!((0..8).all(|vcpu| machine.node_of_page(vcpu * 1024) == machine.home_node(vcpu as usize)));
        seats
    };
    let first = seats(1);
    assert!(first.contains(&NodeId(2)) && first.contains(&NodeId(5)));
    assert!((0..8).any(|vcpu| first.iter().skip(vcpu).step_by(8).any(|&node| node != first[vcpu])));
    assert_eq!(seats(1), first);
    assert_ne!(seats(2), first);
}

#[test]
fn parts_of_unequal_nodes_are_all_touched_by_others() {
    // Two on the first node, one on the second: that one does both.
    let config = MachineConfig { nr_vcpus: 3, engine: placed(TablePlacement::CallerNode), ..two_nodes() };
    let machine = Machine::<Npt>::new(&config).unwrap();
    assert_eq!([0, 1, 2].map(|vcpu| machine.home_node(vcpu).unwrap().0), [2, 2, 5]);
    let report = machine.populate(Program::default(), FirstTouch::Other).unwrap();
    assert_eq!(report.vcpus.iter().map(|vcpu| vcpu.counters.nr_accesses).collect::<Vec<_>>(), [1024, 0, 2048]);
    assert!(linked_tables(&machine).iter().all(|table| table.level > 1 || table.node != table.memory));
    machine.run(Program { write_percent: 0, oldest_round: 1, ..Program::default() }).unwrap();
}

/// Also where each virtual CPU keeps a ledger of its pages, and where pages change nodes.
#[test]
fn ledgers_expect_the_writes_of_others() {
    for first_touch in [FirstTouch::Own, FirstTouch::Other, FirstTouch::Main] {
        let config = MachineConfig {
            bytes_per_vcpu: 64 * PAGE_SIZE,
            host_events: HostEvents::Allowed { nr_spare_frames: 64 },
            ..two_nodes()
        };
        let machine = Machine::<Npt>::new(&config).unwrap();
        machine.run(Program::default()).unwrap();
        machine.populate(Program { round: 2, ..Program::default() }, first_touch).unwrap();
        let reading = Program { write_percent: 0, round: 2, oldest_round: 2, ..Program::default() };
        machine.run(reading).unwrap();
        let mut nr_moved_away = 0;
        for page in 0..machine.nr_pages() {
            let before = machine.node_of_page(page).unwrap();
            let _ = machine.move_page(page).unwrap();
            nr_moved_away += u64::from(machine.node_of_page(page).unwrap() != before);
        }
        assert!(nr_moved_away > 0);
        machine.run(reading).unwrap();
        machine.discard(0..1).unwrap();
        assert_eq!(machine.node_of_page(0), None);
    }
}

#[test]
fn missing_nodes_are_refused() {
    let refused = |config: &MachineConfig| match Machine::<Npt>::new(config) {
        Err(MachineError::Numa(error)) => error,
        other => panic!("{other:?}"),
    };
    let error = refused(&MachineConfig { engine: placed(TablePlacement::Node(NodeId(3))), ..two_nodes() });
    assert!(matches!(error, NumaError::NoSuchNode { node: NodeId(3) }) && error.is_bad_usage());
    let engine = Config::default().with_table_placement(TablePlacement::Node(NodeId(1)));
    let error = refused(&MachineConfig { engine, ..MachineConfig::default() });
    assert!(matches!(error, NumaError::NoSuchNode { node: NodeId(1) }));
    assert!(matches!(refused(&MachineConfig { nodes: nodes(&[], &[]), ..two_nodes() }), NumaError::NoNodes));
}

#[test]
fn a_machine_runs_on_the_hosts_nodes() {
    let machine = Machine::<Npt>::new(&MachineConfig { nodes: Nodes::Host, ..two_nodes() });
    let machine = match machine {
        Err(MachineError::Numa(error) | MachineError::Host(HostError::Numa(error))) if !error.is_bad_usage() => {
            return eprintln!("skipped: {error:?}");
        }
        other => other.unwrap(),
    };
    machine.run(Program::default()).unwrap();
    for vcpu in 0..4 {
        assert!(machine.nodes().ids().contains(&machine.home_node(vcpu).unwrap()));
    }
}

/// The CPUs of this host as if each were a node, of which only the first has memory: really pinned,
/// and really bound.
#[test]
fn real_cpus_on_nodes_of_which_one_has_memory() {
    let cpus = topology::usable_cpus();
    let host = Nodes::Host.map().unwrap();
    let (&[first, second, ..], true) = (&*cpus, host.are_of_host()) else {
        return eprintln!("skipped: needs two CPUs and a kernel with nodes");
    };
    let real = host.ids().iter().copied().find(|&node| host.has_memory(node)).unwrap();
    // A number that this host does not have, and which need not be the next.
    let far = (real.0 + 1..).find(|&node| !host.ids().contains(&NodeId(node)) && node != real.0 + 1).unwrap();
    let fake = FakeSysfs::new(
        &format!("{},{far}\n", real.0),
        &format!("{}\n", real.0),
        &[(real.0, &format!("{first}\n"), "10 40\n"), (far, &format!("{second}\n"), "40 10\n")],
    );
    let by_hand = Some(Pins { vcpus: vec![second, first, first, second], main: None });
    for (backing, pinning, pins) in [
        (BackingKind::Anonymous, Pinning::On, None),
        (BackingKind::Shmem, Pinning::Off { seed: 0 }, None),
        (BackingKind::AnonymousThp, Pinning::On, by_hand),
    ] {
        let is_pinned_by_hand = pins.is_some();
        let engine = placed(TablePlacement::CallerNode);
        let config = MachineConfig { backing, pinning, pins, engine, ..two_nodes() };
        let machine = match Machine::<Npt>::with_nodes(&config, fake.map(&cpus).unwrap()) {
            Err(
                MachineError::Numa(NumaError::Mbind { source, .. })
                | MachineError::Host(HostError::Numa(NumaError::Mbind { source, .. })),
            ) => {
                return eprintln!("skipped: mbind: {source}");
            }
            other => other.unwrap(),
        };
        let far = NodeId(far);
        assert_eq!((machine.nodes().ids().len(), machine.nodes().memory_node(far)), (2, Some(real)));
        machine.run(Program::default()).unwrap();
        let homes = if is_pinned_by_hand { [far, real, real, far] } else { [real, real, far, far] };
        for (vcpu, home) in homes.into_iter().enumerate() {
            assert_eq!(machine.home_node(vcpu), Some(home));
            if pinning == Pinning::On {
                assert_eq!(machine.node_of_vcpu(vcpu), Some(home));
            }
        }
        let pages = machine.nr_pages();
        assert!((0..pages).all(|page| machine.node_of_page(page) == Some(real)));
        for page in (0..pages).step_by(100) {
            let address = phys::ptr_of(machine.region.frame_of(page).unwrap().hpa());
            assert_eq!(policy::node_of_page(address).unwrap(), real, "the kernel reports the same");
        }
        assert!(machine.tables_by_node().iter().all(|&(node, count)| (node == real) == (count > 0)));
        let reads = machine.walk_reads();
        assert!(reads.local + reads.remote > 0);
        if pinning == Pinning::On {
            assert!(reads.local > 0 && reads.remote > 0);
        }
    }
}

/// A node in sysfs that the kernel does not have.
#[test]
fn memory_that_cannot_be_bound_is_refused() {
    let host = Nodes::Host.map().unwrap();
    if !host.are_of_host() {
        return eprintln!("skipped: a kernel without nodes");
    }
    let free = (0..).map(NodeId).find(|node| !host.ids().contains(node)).unwrap();
    let real = host.ids()[0];
    let (low, high) = (real.min(free), real.max(free));
    let cpu = topology::usable_cpus()[0];
    let cpulist = |node| if node == real { format!("{cpu}\n") } else { "\n".to_owned() };
    let both = format!("{},{}\n", low.0, high.0);
    let nodes = [(low.0, &*cpulist(low), "10 20\n"), (high.0, &*cpulist(high), "20 10\n")];
    let fake = FakeSysfs::new(&both, &both, &nodes);
    let refused = Machine::<Npt>::with_nodes(&two_nodes(), fake.map(&[cpu]).unwrap());
    match refused {
        Err(MachineError::Host(HostError::Numa(error @ NumaError::Mbind { .. }))) => assert!(!error.is_bad_usage()),
        other => panic!("{other:?}"),
    }
}
