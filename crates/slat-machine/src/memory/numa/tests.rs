//! Nodes in sysfs, numbers with gaps, nodes without memory or CPUs, and the memory of a thread.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use slat::Hpa;

use super::spans::{MemorySpan, MemorySpans, TableSpans, divide};
use super::*;

pub(crate) fn ids(numbers: &[u32]) -> Vec<NodeId> {
    numbers.iter().copied().map(NodeId).collect()
}

fn virtual_map(nodes: &[u32], without_memory: &[u32]) -> Result<NodeMap, NumaError> {
    Nodes::Virtual { nodes: ids(nodes), without_memory: ids(without_memory) }.map()
}

/// A directory like sysfs. It is removed when this is dropped.
pub(crate) struct FakeSysfs(PathBuf);

/// Number, cpulist, distance.
pub(crate) type FakeNode<'a> = (u32, &'a str, &'a str);

impl FakeSysfs {
    pub(crate) fn new(online: &str, has_memory: &str, nodes: &[FakeNode<'_>]) -> FakeSysfs {
        static NR_MADE: AtomicU32 = AtomicU32::new(0);
        let number = NR_MADE.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("slat-nodes-{}-{number}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("online"), online).unwrap();
        fs::write(root.join("has_memory"), has_memory).unwrap();
        for (node, cpulist, distance) in nodes {
            let directory = root.join(format!("node{node}"));
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("cpulist"), cpulist).unwrap();
            fs::write(directory.join("distance"), distance).unwrap();
        }
        FakeSysfs(root)
    }

    pub(crate) fn map(&self, usable_cpus: &[u32]) -> Result<NodeMap, NumaError> {
        NodeMap::of_host(&self.0, usable_cpus, None)
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap();
    }
}

impl Drop for FakeSysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn lists_are_read_in_the_kernels_format() {
    let parse = |text| sysfs::parse_list(text, 1024);
    assert_eq!(parse("0\n"), Some(vec![0]));
    assert_eq!(parse("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
    assert_eq!(parse("\n"), Some(vec![]));
    assert_eq!(parse("\t5,1023\n"), Some(vec![5, 1023]));
    for text in ["x", "0,", ",1", "3-1", "1-", "-1", "0 1", "1024", "0-4294967295", "0x3"] {
        assert_eq!(parse(text), None, "{text}");
    }
}

#[test]
fn numbers_with_gaps_are_nodes() {
    let map = virtual_map(&[5, 0, 2], &[]).unwrap();
    assert_eq!(map.ids(), ids(&[0, 2, 5]));
    assert_eq!(
        (0..7).map(|node| map.memory_node(NodeId(node)).map_or(99, |node| node.0)).collect::<Vec<_>>(),
        [0, 99, 2, 99, 99, 5, 99]
    );
    assert_eq!(map.homes(7, None).iter().map(|&home| map.ids()[home].0).collect::<Vec<_>>(), [0, 0, 0, 2, 2, 5, 5]);
    assert!(!map.are_of_host() && !map.is_one());
}

#[test]
fn four_hundred_and_sixteen_cpus_sit_in_blocks_of_fifty_two() {
    let map = Nodes::virtual_nodes(8).map().unwrap();
    let homes = map.homes(416, None);
    assert!((0..416).all(|vcpu| homes[vcpu] == vcpu / 52));
    // With fewer CPUs than nodes, some nodes have none.
    assert_eq!(*map.homes(3, None), [0, 2, 5]);
}

#[test]
fn memory_for_a_node_without_memory_comes_from_the_next() {
    let map = virtual_map(&[0, 3, 4, 9], &[3, 9]).unwrap();
    let from = |node| map.memory_node(NodeId(node)).unwrap().0;
    assert_eq!([0, 3, 4, 9].map(from), [0, 4, 4, 0]);
    assert_eq!([0, 3, 4, 9].map(|node| map.has_memory(NodeId(node))), [true, false, true, false]);
    assert_eq!(map.places_for(TableNode::Node(NodeId(3))), [2, 0]);
    assert_eq!(map.places_for(TableNode::Node(NodeId(9))), [0, 2]);
}

#[test]
fn impossible_nodes_are_refused() {
    assert!(matches!(virtual_map(&[], &[]), Err(NumaError::NoNodes)));
    assert!(matches!(Nodes::virtual_nodes(65).map(), Err(NumaError::TooManyNodes { nr_nodes: 65 })));
    assert!(Nodes::virtual_nodes(64).map().is_ok());
    assert!(matches!(Nodes::virtual_nodes(u32::MAX).map(), Err(NumaError::TooManyNodes { .. })));
    assert!(matches!(virtual_map(&[0, 1024], &[]), Err(NumaError::NodeTooHigh { node: NodeId(1024) })));
    assert!(matches!(virtual_map(&[3, 1, 3], &[]), Err(NumaError::DuplicateNode { node: NodeId(3) })));
    assert!(matches!(virtual_map(&[0, 1], &[2]), Err(NumaError::NoSuchNode { node: NodeId(2) })));
    assert!(matches!(virtual_map(&[0, 1], &[1, 0]), Err(NumaError::NoMemory)));
}

#[test]
fn a_thread_is_on_its_node_and_others_are_on_the_first() {
    let map = virtual_map(&[2, 4, 6], &[2]).unwrap();
    assert_eq!(map.current_node(), NodeId(2));
    map.run_on(NodeId(6)).unwrap();
    assert_eq!(map.current_node(), NodeId(6));
    assert!(matches!(map.run_on(NodeId(3)), Err(NumaError::NoSuchNode { node: NodeId(3) })));
    assert_eq!(map.current_node(), NodeId(6));
    assert_eq!(map.places_for(TableNode::Caller)[0], 2);
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(map.current_node(), NodeId(2));
            assert_eq!(map.places_for(TableNode::Caller)[0], 1, "the first has no memory");
        });
    });
    // Another machine has no such node.
    assert_eq!(Nodes::virtual_nodes(3).map().unwrap().current_node(), NodeId(0));
}

#[test]
fn a_thread_has_a_policy() {
    let map = virtual_map(&[0, 1, 5, 7], &[1]).unwrap();
    let first_of = || map.ids()[map.places_for(TableNode::CallerPolicy)[0]].0;
    map.run_on(NodeId(5)).unwrap();
    assert_eq!([(); 3].map(|()| first_of()), [5, 5, 5]);
    map.set_memory_policy(MemoryPolicy::Interleave).unwrap();
    assert_eq!([(); 7].map(|()| first_of()), [0, 5, 7, 0, 5, 7, 0]);
    map.set_memory_policy(MemoryPolicy::Preferred(NodeId(7))).unwrap();
    assert_eq!([(); 2].map(|()| first_of()), [7, 7]);
    let refused = map.set_memory_policy(MemoryPolicy::Preferred(NodeId(2)));
    assert!(matches!(refused, Err(NumaError::NoSuchNode { node: NodeId(2) })));
    assert_eq!(first_of(), 7);
    // The memory of a node without memory comes from the next.
    map.set_memory_policy(MemoryPolicy::Preferred(NodeId(1))).unwrap();
    assert_eq!(first_of(), 5);
    thread::scope(|scope| scope.spawn(|| assert_eq!(first_of(), 0)).join().unwrap());
}

#[test]
fn the_hosts_nodes_are_those_of_sysfs() {
    // Node 4 has no memory and is next to 1; node 6 has no CPUs.
    let fake = FakeSysfs::new(
        "0-1,4,6\n",
        "0-1,6\n",
        &[
            (0, "0-3\n", "10 21 31 40\n"),
            (1, "4-7\n", "21 10 15 40\n"),
            (4, "8,10\n", "31 15 10 40\n"),
            (6, "\n", "40 40 40 10\n"),
        ],
    );
    let map = fake.map(&(0..64).collect::<Vec<_>>()).unwrap();
    assert_eq!(map.ids(), ids(&[0, 1, 4, 6]));
    assert!(map.are_of_host());
    assert_eq!([0, 1, 4, 6].map(|node| map.memory_node(NodeId(node)).unwrap().0), [0, 1, 1, 6]);
    assert_eq!(map.places_for(TableNode::Node(NodeId(4))), [1, 0, 3]);
    assert_eq!(map.places_with_cpus(), [0, 1, 2]);
    assert_eq!(*map.homes(6, None), [0, 0, 1, 1, 2, 2]);
    assert_eq!(*map.homes(3, Some(&[10, 5, 2])), [2, 1, 0]);
    assert!(matches!(map.run_on(NodeId(6)), Err(NumaError::NoCpus { node: Some(NodeId(6)) })));

    // Of a process that may use fewer.
    let map = NodeMap::of_host(&fake.0, &[1, 8], Some(&[0, 6])).unwrap();
    assert_eq!(map.places_with_cpus(), [0, 2]);
    assert_eq!([0, 1, 4, 6].map(|node| map.memory_node(NodeId(node)).unwrap().0), [0, 0, 0, 6]);
    assert!(matches!(NodeMap::of_host(&fake.0, &[99], None), Err(NumaError::NoCpus { node: None })));
    assert!(matches!(NodeMap::of_host(&fake.0, &[1], Some(&[4])), Err(NumaError::NoMemory)));
}

#[test]
fn a_node_is_the_nearest_to_itself() {
    // Distances that no kernel reports, too few of them, and none.
    let fake = FakeSysfs::new("0-2\n", "0-2\n", &[(0, "0\n", "10 5 5\n"), (1, "1\n", "7\n"), (2, "2\n", "")]);
    let map = fake.map(&[0, 1, 2]).unwrap();
    assert_eq!(map.places_for(TableNode::Node(NodeId(0))), [0, 1, 2]);
    assert_eq!(map.places_for(TableNode::Node(NodeId(1))), [1, 0, 2]);
    assert_eq!(map.places_for(TableNode::Node(NodeId(2))), [2, 0, 1]);
}

#[test]
fn a_host_without_nodes_has_one() {
    let nowhere = std::env::temp_dir().join("slat-no-such-directory");
    assert!(NodeMap::of_host(&nowhere, &[0], None).unwrap().is_one());
    let fake = FakeSysfs::new("3\n", "3\n", &[(3, "0-1\n", "10\n")]);
    let map = fake.map(&[0, 1]).unwrap();
    assert!(map.is_one());
    assert_eq!((map.ids(), map.current_node()), (&*ids(&[3]), NodeId(3)));
}

#[test]
fn impossible_sysfs_contents_are_reported() {
    let fake = FakeSysfs::new("0-1\n", "0-1\n", &[(0, "0\n", "10 20\n")]);
    match fake.map(&[0]) {
        Err(NumaError::Unreadable { path, .. }) => assert!(path.ends_with("node1/cpulist")),
        other => panic!("{other:?}"),
    }
    fake.write("online", "0,zwei\n");
    match fake.map(&[0]) {
        Err(NumaError::Malformed { path, text }) => {
            assert!(path.ends_with("online"));
            assert_eq!(text, "0,zwei");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_node_with_too_little_memory_is_reported() {
    let fake = FakeSysfs::new("0,2\n", "0,2\n", &[(0, "0\n", "10 20\n"), (2, "1\n", "20 10\n")]);
    let map = fake.map(&[0, 1]).unwrap();
    fake.write("node2/meminfo", "Node 2 MemTotal: 9000 kB\nNode 2 MemFree: 100 kB\nNode 2 Inactive(file): 24 kB\n");
    assert!(map.check_free(&[u64::MAX, 124 << 10], 4096).is_ok(), "node 0 has no file");
    let refused = map.check_free(&[0, (124 << 10) + 1], 4096);
    assert!(
        matches!(refused, Err(NumaError::NotEnoughMemory { node: NodeId(2), free_bytes: 126_976, .. })),
        "{refused:?}"
    );
    fs::create_dir_all(fake.0.join("node2/hugepages/hugepages-2048kB")).unwrap();
    fake.write("node2/hugepages/hugepages-2048kB/free_hugepages", "3\n");
    assert!(map.check_free(&[0, 6 << 20], 2 << 20).is_ok());
    assert!(map.check_free(&[0, 8 << 20], 2 << 20).is_err());
}

/// The real one, whatever it has.
#[test]
fn this_host_has_nodes() {
    let map = Nodes::Host.map().unwrap();
    assert!(map.ids().contains(&map.current_node()));
    thread::spawn(|| {
        let map = Nodes::Host.map().unwrap();
        let here = map.current_node();
        if map.are_of_host() {
            map.run_on(here).unwrap();
        }
        assert_eq!(map.current_node(), here);
    })
    .join()
    .unwrap();
}

/// The kernel stores and returns the policy. Skipped where it has no policies, or forbids them.
#[test]
fn the_kernel_keeps_a_threads_policy() {
    thread::spawn(|| {
        let map = Nodes::Host.map().unwrap();
        let Some(node) = map.ids().iter().copied().find(|&node| map.has_memory(node)).filter(|_| map.are_of_host())
        else {
            return eprintln!("skipped: no nodes");
        };
        match map.set_memory_policy(MemoryPolicy::Preferred(node)) {
            Err(NumaError::Policy { source }) => return eprintln!("skipped: set_mempolicy: {source}"),
            other => other.unwrap(),
        }
        let reported = policy::of_thread().unwrap();
        assert_eq!((reported.mode, reported.has(node)), (libc::MPOL_PREFERRED, true));
        assert_eq!(map.place_by_kernel(reported, 0), map.place_of(node));
        map.set_memory_policy(MemoryPolicy::Interleave).unwrap();
        let reported = policy::of_thread().unwrap();
        assert_eq!(
            (reported.mode, reported.has(node), reported.has(NodeId(1023))),
            (libc::MPOL_INTERLEAVE, true, false)
        );
        assert!(map.place_by_kernel(reported, 0).is_some());
        map.set_memory_policy(MemoryPolicy::Local).unwrap();
        let reported = policy::of_thread().unwrap();
        assert_eq!(reported.mode, libc::MPOL_DEFAULT);
        assert_eq!(map.place_by_kernel(reported, 0), None);
    })
    .join()
    .unwrap();
}

#[test]
fn memory_is_divided_between_whole_pages() {
    assert_eq!(divide(&[0, 0, 1, 1], 4 * 8192, 4096), [(0, 16384, 0), (16384, 32768, 1)]);
    assert_eq!(divide(&[2], 12288, 4096), [(0, 12288, 2)]);
    // A huge page at a border goes to the later part.
    assert_eq!(divide(&[0, 1], 6 << 20, 2 << 20), [(0, 2 << 20, 0), (2 << 20, 6 << 20, 1)]);
    // Parts smaller than a page disappear, and nothing is lost.
    assert_eq!(divide(&[0, 1, 2, 3], 4096, 4096), [(0, 4096, 3)]);
    assert_eq!(divide(&[0, 1, 0], 3 * 4096, 4096), [(0, 4096, 0), (4096, 8192, 1), (8192, 12288, 0)]);
    // With spare pages at the end, which no part has: shares.
    assert_eq!(divide(&[0, 1], 7 * 4096, 4096), [(0, 3 * 4096, 0), (3 * 4096, 7 * 4096, 1)]);
}

#[test]
fn addresses_have_nodes_up_to_the_last_byte() {
    let span = |start, end, node| MemorySpan { start: Hpa(start), end: Hpa(end), node: NodeId(node) };
    let memory = MemorySpans::new(vec![span(0x9000, 0xa000, 2), span(0x1000, 0x3000, 5), span(0x3000, 0x4000, 0)]);
    let node = |address| memory.node_of(Hpa(address)).map(|node| node.0);
    assert_eq!([0xfff, 0x1000, 0x2fff, 0x3000, 0x3fff].map(node), [None, Some(5), Some(5), Some(0), Some(0)]);
    assert_eq!([0x4000, 0x8fff, 0x9000, 0x9fff, 0xa000].map(node), [None, None, Some(2), Some(2), None]);
    assert_eq!(MemorySpans::default().node_of(Hpa(0x1000)), None);

    let tables = TableSpans::new(Hpa(0x5000), 13, &ids(&[1, 4]));
    let node = |address| tables.node_of(Hpa(address)).map(|node| node.0);
    assert_eq!(
        [0x4fff, 0x5000, 0x6fff, 0x7000, 0x8fff, 0x9000].map(node),
        [None, Some(1), Some(1), Some(4), Some(4), None]
    );
}
