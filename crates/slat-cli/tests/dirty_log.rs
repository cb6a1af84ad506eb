//! `slat dirty-log` as its user sees it: exit codes, one clear line for each mistake, the JSON that it writes, and the
//! oracle over shapes of machines.
#![allow(missing_docs)]

mod common;

use std::path::PathBuf;

use common::{assert_ok, assert_refused};
use serde_json::Value;

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("dirty-log -v 0", "at least 1"),
        ("dirty-log -b 0", "must not be zero"),
        ("dirty-log -b 4095", "multiple of the page size"),
        ("dirty-log -b 1T1", "invalid digit"),
        ("dirty-log -b 99999999T", "too large"),
        ("dirty-log -b 16T -v 2", "are more than"),
        ("dirty-log -i 0", "0 is not in 1.."),
        ("dirty-log --runs 0", "at least 1"),
        ("dirty-log -x 0", "at least 1"),
        ("dirty-log -v 1 -b 8K -x 3", "cannot be split evenly into 3 slots"),
        ("dirty-log -v 1 -b 8K -x 4", "cannot be split evenly into 4 slots"),
        ("dirty-log -v 1 -b 160M -x 40960", "40960 slots are more than 32763"),
        ("dirty-log -v 5000 -b 4K", "5000 vCPUs are more than 4096"),
        ("dirty-log -v -1", "invalid digit"),
        ("dirty-log -i 2000000", "2000000"),
        ("dirty-log -x 5000000000", "too many"),
        ("dirty-log -w 101", "101"),
        ("dirty-log -w -1", "-1"),
        ("dirty-log -s tape", "anonymous_thp"),
        ("dirty-log --lock some", "exclusive"),
        ("dirty-log --format pae", "npt"),
        ("dirty-log --paging 3d", "2d"),
        ("dirty-log -v 3 -c 0,1", "3 vCPUs need 3"),
        ("dirty-log -v 1 -c 0,1,2", "1 vCPUs need 1"),
        ("dirty-log -c x", "invalid digit"),
        ("dirty-log -v 1 -b 3M -s anonymous_hugetlb_2mb", "page size"),
        ("dirty-log --no-such-option", "unexpected argument"),
        ("no-such-command", "unrecognized subcommand"),
    ] {
        assert_refused(args, 2, what);
    }
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    assert_refused("dirty-log -v 8 -b 1T", 3, "MiB are available");
    assert_refused("dirty-log -v 1 -b 4K -c 99999", 3, "CPU 99999");
    assert_refused("dirty-log -v 1 -b 1M --runs 1 --json /no/such/folder/results.json", 3, "/no/such/folder");
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages");
    if free.is_ok_and(|free| free.trim() == "0") {
        assert_refused("dirty-log -v 1 -b 1G -s anonymous_hugetlb_1gb", 3, "huge pages");
    }
}

#[test]
fn one_locking_prints_the_lines_of_the_selftest() {
    let output = assert_ok("dirty-log -v 2 -b 1M -i 3 --runs 1 --lock none");
    for line in [
        "Test iterations: 3",
        "Populate memory time: 0.",
        "Enabling dirty logging time: 0.",
        "Iteration 1 dirty memory time: 0.",
        "Iteration 3 get dirty log time: 0.",
        "Disabling dirty logging time: 0.",
        "Get dirty log over 3 iterations took 0.",
        "2 vCPUs",
        "software CPUs",
        "Verified: ",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
}

#[test]
fn json_has_every_figure_for_every_locking() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("dirty_log.json");
    assert_ok(&format!("dirty-log -v 2 -b 4M -i 2 --runs 2 --json {}", path.display()));
    let object: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(object["experiment"], "dirty-log");
    assert_eq!(object["config"]["vcpus"], 2);
    assert_eq!(object["config"]["bytes"], 4 << 20);
    assert!(object["host"]["kernel"].is_string());
    let results = object["results"].as_array().unwrap();
    let figure = |name: &str, lock: &str| {
        let found: Vec<&Value> =
            results.iter().filter(|figure| figure["name"] == name && figure["labels"]["lock"] == lock).collect();
        assert_eq!(found.len(), 1, "{name} for {lock}");
        (found[0]["value"].as_f64().unwrap(), found[0]["unit"].as_str().unwrap().to_owned())
    };
    for lock in ["exclusive", "shared", "none"] {
        for name in
            ["populate_memory", "enable_dirty_logging", "dirty_memory", "get_dirty_log", "disable_dirty_logging"]
        {
            let (value, unit) = figure(name, lock);
            assert!(value > 0.0 && unit == "s", "{name} for {lock}: {value} {unit}");
        }
        for name in ["guest_stall_p50", "guest_stall_p99", "resolve_time", "engine_time"] {
            assert_eq!(figure(name, lock).1, "s");
        }
        let pages = 2.0 * 1024.0;
        // Each page faults when it is populated, and once in each round.
        let (faults, unit) = figure("faults", lock);
        assert!(faults >= 3.0 * pages && unit == "count", "{faults} faults for {lock}");
        // Enabling, and each harvest.
        assert!(figure("flushes", lock).0 >= 3.0);
        assert_eq!(figure("retries", lock).1, "count");
        let (tables, unit) = figure("tables_bytes", lock);
        assert!(tables >= 4096.0 * 7.0 && unit == "bytes", "{tables} bytes of tables for {lock}");
    }
}

#[test]
fn the_oracle_holds_for_shapes_of_machines() {
    for args in [
        "-v 1 -b 4M",
        "-v 2 -b 4M --format ept",
        "-v 2 -b 4M -o --paging 2d",
        "-v 8 -b 1M -x 4 --format ept --paging 2d",
        "-v 8 -b 512K -o -w 50 -a",
        "-v 64 -b 256K -o --lock none",
        "-v 64 -b 256K --paging 2d --lock shared",
        "-v 3 -b 20K -x 5 -e",
        "-v 2 -b 4M -s anonymous_thp -e -w 30",
        "-v 2 -b 2M -s shmem -r 7",
        "-v 1 -b 4K -w 0",
    ] {
        let output = assert_ok(&format!("dirty-log -i 2 --runs 1 --check {args}"));
        assert!(output.contains("every harvest agreed"), "{args}:\n{output}");
    }
}
