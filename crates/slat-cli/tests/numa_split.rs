//! `slat numa-split` for its user: exit codes, one clear line for each mistake, and the figures
//! that the placements of page-table pages must have.
#![allow(missing_docs)]

mod common;

use common::{assert_ok, assert_refused, figures, measured, quantity};
use serde_json::Value;

const PLACEMENTS: [&str; 3] = ["huge-page-node", "caller-node", "caller-policy"];

/// Runs `slat numa-split` with `args`, and returns the object of `--json` and the output.
#[track_caller]
fn split(name: &str, args: &str) -> (Value, String) {
    measured(&format!("split_{name}"), &format!("numa-split {args}"))
}

/// The figure `name` of `placement`, if there is one, and its unit.
#[track_caller]
fn find<'a>(object: &'a Value, name: &str, placement: &str) -> Option<(f64, &'a str)> {
    let labels = [("placement", placement)];
    (!figures(object, name, &labels).is_empty()).then(|| quantity(object, name, &labels))
}

#[track_caller]
fn figure(object: &Value, name: &str, placement: &str) -> f64 {
    find(object, name, placement).unwrap_or_else(|| panic!("no {name} for {placement}")).0
}

/// A share of reads. A vCPU that is preempted at the wrong moment makes a few more reads.
#[track_caller]
fn assert_near(share: f64, expected: f64) {
    assert!((share - expected).abs() < 0.01, "{share}, not {expected}");
}

/// Whether this host maps all of `nr_pages` by huge pages: it may have none, or not enough.
fn are_huge(object: &Value, nr_pages: f64) -> bool {
    let are_huge = PLACEMENTS.iter().all(|placement| figure(object, "leaves_2m", placement) == nr_pages);
    if !are_huge {
        eprintln!("not checked: this host has no {nr_pages} transparent huge pages");
    }
    are_huge
}

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("numa-split --nodes 0", "at least one node"),
        ("numa-split --nodes 65", "65 nodes are more than 64"),
        ("numa-split --nodes 999", "999 nodes are more than 64"),
        ("numa-split --nodes x", "invalid digit"),
        ("numa-split --nodes 0,,1", "cannot parse"),
        ("numa-split --nodes 1,1", "node 1 is there twice"),
        ("numa-split --nodes 0,1024", "1024"),
        ("numa-split --nodes 2 --memoryless 2", "no node 2"),
        ("numa-split --nodes 2 --memoryless 0,1", "no node has memory"),
        ("numa-split --nodes host --memoryless 0", "--memoryless needs virtual nodes"),
        ("numa-split --nodes 2 --main-node 2", "no node 2"),
        ("numa-split --nodes 2 --policy preferred:2", "no node 2"),
        ("numa-split --policy preferred:x", "invalid digit"),
        ("numa-split --policy bind", "interleave"),
        ("numa-split --placement here", "huge-page-node, caller-node, caller-policy, all"),
        ("numa-split --first-touch none", "own, other, main"),
        ("numa-split --nodes 1 -b 1M --first-touch other", "same home node"),
        ("numa-split --pin 0", "on, off"),
        ("numa-split -v 1 --cpus 0 --pin off", "--pin off"),
        ("numa-split -v 3 --cpus 0,1", "3 vCPUs need 3"),
        ("numa-split --split later", "eager, lazy"),
        ("numa-split --split-threads 0", "at least 1"),
        ("numa-split --split-threads 1025", "1025 threads are more than 1024"),
        ("numa-split --lock all", "exclusive, shared, none"),
        ("numa-split --tracking pml", "--tracking pml needs --format ept"),
        ("numa-split -b 4095", "multiple of the page size"),
        ("parallel-faults --nodes 2", "unexpected argument"),
    ] {
        assert_refused(args, 2, what);
    }
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    assert_refused("numa-split --nodes 2 -v 1 -b 1M --json /no/such/folder/results.json", 3, "/no/such/folder");
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if free.is_ok_and(|free| free.trim() == "0") {
        assert_refused("numa-split --nodes 2 -v 1 -b 2M -s anonymous_hugetlb_2mb", 3, "huge pages");
    }
    if std::fs::read_to_string("/sys/devices/system/node/online").is_ok_and(|online| online.trim() == "0") {
        assert_refused("numa-split --nodes host", 3, "one node only");
    }
}

#[test]
fn tables_of_splits_are_on_the_nodes_of_their_placement() {
    let (object, output) = split("placements", "--nodes 8 -v 8 -b 4M --runs 2 --check");
    assert_eq!(object["experiment"], "numa-split");
    assert_eq!(object["config"]["nodes"], serde_json::json!([0, 1, 2, 3, 4, 5, 6, 7]));
    assert_eq!(object["config"]["nodes_are"], "virtual");
    assert_eq!(object["config"]["pin"], "on");
    assert_eq!(object["config"]["split"], "eager");
    assert_eq!(object["config"]["lock"], "none");
    assert_eq!(object["config"]["policy"], "interleave");
    for line in
        ["nodes: 0 1 2 3 4 5 6 7 (virtual)", "are counted, and take no longer", "by 1 thread", "every harvest agreed"]
    {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
    for placement in PLACEMENTS {
        for (name, unit) in [
            ("populate_memory", "s"),
            ("enable_dirty_logging", "s"),
            ("dirty_memory", "s"),
            ("get_dirty_log", "s"),
            ("clear_dirty_log", "s"),
            ("disable_dirty_logging", "s"),
            ("split_time", "s"),
            ("recover_time", "s"),
            ("guest_stall_p99", "s"),
            ("split_pages", "count"),
            ("flushes", "count"),
            ("recover_flushes", "count"),
            ("local_walk_reads", "count"),
            ("remote_walk_reads", "count"),
            ("remote_share", "ratio"),
            ("remote_share_all_levels", "ratio"),
        ] {
            let (value, found) = find(&object, name, placement).unwrap_or_else(|| panic!("no {name} for {placement}"));
            assert!(value >= 0.0 && found == unit, "{name} for {placement}: {value} {found}");
        }
        assert!(
            figure(&object, "split_time", placement) <= figure(&object, "enable_dirty_logging", placement),
            "splitting is a part of enabling"
        );
    }
    // Also without huge pages.
    assert_eq!(figure(&object, "remote_split_tables", "huge-page-node"), 0.0);
    assert_eq!(figure(&object, "remote_walk_reads", "huge-page-node"), 0.0);
    assert_eq!(figure(&object, "remote_share", "huge-page-node"), 0.0);
    if !are_huge(&object, 16.0) {
        return;
    }
    for placement in PLACEMENTS {
        // Each once: guests find the pages split, and the end of logging recovers them.
        assert_eq!(figure(&object, "split_pages", placement), 16.0);
        assert_eq!(figure(&object, "split_tables", placement), 16.0);
        assert_eq!(figure(&object, "recoveries", placement), 16.0);
        assert!(figure(&object, "recover_flushes", placement) >= 1.0);
        assert!(figure(&object, "local_walk_reads", placement) > 0.0);
    }
    // One thread on node 0 splits the pages of eight nodes; interleaved, one page-table page of
    // eight is local.
    for placement in ["caller-node", "caller-policy"] {
        assert_eq!(figure(&object, "remote_split_tables", placement), 14.0);
        assert_near(figure(&object, "remote_share", placement), 7.0 / 8.0);
    }
    let on_node = |node: u32, placement: &str| {
        quantity(&object, "tables_on_node", &[("placement", placement), ("node", &node.to_string())]).0
    };
    for node in 1..8 {
        assert!(on_node(node, "huge-page-node") >= 2.0 && on_node(node, "caller-node") <= 3.0, "node {node}");
    }
    assert!(on_node(0, "caller-node") >= 16.0);
}

#[test]
fn tables_of_faults_follow_the_first_touch() {
    // Without huge pages there is a page-table page for each 2 MiB, and a few above.
    let args = "--nodes 8 -v 8 -b 4M --runs 1 -s anonymous --first-touch";
    let (object, output) = split("first_touch_other", &format!("{args} other"));
    assert!(output.contains("No huge page was split: the memory was not mapped by huge pages"), "{output}");
    for placement in PLACEMENTS {
        assert_eq!(figure(&object, "split_pages", placement), 0.0);
        assert!(figure(&object, "fault_tables", placement) >= 16.0);
        let is_remote = placement != "huge-page-node";
        let remote = figure(&object, "remote_fault_tables", placement);
        let all = figure(&object, "fault_tables", placement);
        assert_eq!(remote, if is_remote { all } else { 0.0 }, "{placement}, of {all}");
        assert_eq!(figure(&object, "remote_share", placement), if is_remote { 1.0 } else { 0.0 }, "{placement}");
    }
    // The main thread's node has an eighth of the memory.
    let (object, _) = split("first_touch_main", &format!("{args} main --main-node 3"));
    assert_eq!(figure(&object, "remote_share", "huge-page-node"), 0.0);
    assert_near(figure(&object, "remote_share", "caller-node"), 7.0 / 8.0);
    // Each vCPU its own memory.
    let (object, _) = split("first_touch_own", &format!("{args} own"));
    for placement in PLACEMENTS {
        assert_eq!(figure(&object, "remote_share", placement), 0.0, "{placement}");
    }
}

#[test]
fn with_lazy_splitting_vcpus_split_and_there_is_no_splitting_time() {
    let (object, output) = split("lazy", "--nodes 8 -v 8 -b 4M --runs 1 --split lazy");
    assert!(output.contains("there is no splitting time"), "{output}");
    for placement in PLACEMENTS {
        assert_eq!(find(&object, "split_time", placement), None);
        // Each vCPU splits its own memory, on the node of both.
        assert_eq!(figure(&object, "remote_split_tables", placement), 0.0, "{placement}");
    }
    if are_huge(&object, 16.0) {
        assert_eq!(figure(&object, "split_pages", "caller-node"), 16.0);
    }
}

#[test]
fn vcpus_that_are_not_pinned_read_remote_tables_whatever_the_placement() {
    let args = "--nodes 8 -v 8 -b 4M --runs 2 --pin off --seed 3";
    let (first, again) = (split("pin_off", args).0, split("pin_off_again", args).0);
    assert_eq!(first["config"]["pin"], "off");
    if are_huge(&first, 16.0) && are_huge(&again, 16.0) {
        let share = figure(&first, "remote_share", "huge-page-node");
        assert!(share > 0.1, "{share}");
        // The seed determines the nodes.
        assert_near(figure(&again, "remote_share", "huge-page-node"), share);
    }
}

#[test]
fn the_log_is_exact_for_shapes_of_nodes_and_options() {
    for args in [
        "--nodes 0,2,5,9 --memoryless 2 --main-node 5 --split-threads 3 -v 8 -b 4M --get-clears",
        "--nodes 2 -v 4 -b 4M --split-threads 40 --slots 2 --run-while-disabling",
        "--nodes 3 -v 2 -b 6M --format ept --paging 2d --tracking pml",
        "--nodes 2 -v 2 -b 4M --format stage2 --split-threads 3 --run-while-disabling",
        "--nodes 3 -v 2 -b 6M --format gstage --tracking dirty-bit",
        "--nodes 2 -v 2 -b 4M --format gstage-sv39x4 --paging 2d",
        "--nodes 4 -v 4 -b 2M --tracking ring --ring-entries 512",
        "--nodes 2 -v 2 -b 4M --huge-pages mark-whole --lock shared",
        "--nodes 2 -v 2 -b 4M -o --write-percent 40 --random-access --lock exclusive --policy preferred:1 --first-touch other",
        "--nodes 1 -v 2 -b 4M",
        "--nodes 2 -v 2 -b 20K",
    ] {
        let output = assert_ok(&format!("numa-split --runs 1 --check {args}"));
        assert!(output.contains("every harvest agreed"), "{args}:\n{output}");
    }
    let output = assert_ok("numa-split --nodes 2 -v 2 -b 4M --runs 1 --placement caller-policy");
    assert!(output.contains("Splitting time: 0.") && output.contains("Enabling dirty logging time: 0."), "{output}");
}
