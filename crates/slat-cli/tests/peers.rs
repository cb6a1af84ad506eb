//! `slat peers` for its user: exit codes, one clear line for each mistake, the tables, the JSON.
//! The command itself checks the changes of the page tables.
#![allow(missing_docs)]

mod common;

use std::path::PathBuf;

use common::{assert_ok, assert_refused};
use serde_json::Value;

const OPERATIONS: [&str; 12] = [
    "map_4k",
    "map_4k_batch",
    "map_range",
    "map_range_each",
    "map_range_2m",
    "query",
    "query_scattered",
    "protect_range",
    "protect_4k",
    "unmap_4k",
    "unmap_range",
    "split_2m",
];

/// Crates with these operations, and whether they split huge pages.
const PEERS: &[(&str, bool)] = &[
    ("page-table-generic", true),
    #[cfg(target_arch = "x86_64")]
    ("page_table_multiarch", false),
    ("x86_64", false),
    ("aarch64-paging", true),
];

/// Runs with `args`, and returns the output and the object of `--json`.
#[track_caller]
fn peers(name: &str, args: &str) -> (String, Value) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let printed = assert_ok(&format!("peers {args} --json {}", path.display()));
    (printed, serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap())
}

/// The figures of this name, subject and number of threads.
fn figures<'a>(object: &'a Value, name: &str, subject: &str, nr_threads: u64) -> Vec<&'a Value> {
    let is_it = |figure: &&Value| {
        let labels = &figure["labels"];
        figure["name"] == name && labels["subject"] == subject && labels["threads"] == nr_threads
    };
    object["results"].as_array().unwrap().iter().filter(is_it).collect()
}

/// The only one, in this unit.
#[track_caller]
fn figure(object: &Value, name: &str, subject: &str, nr_threads: u64, unit: &str) -> f64 {
    let found = figures(object, name, subject, nr_threads);
    assert_eq!(found.len(), 1, "{name} of {subject}, {nr_threads} threads");
    assert_eq!(found[0]["unit"], unit, "{name}");
    found[0]["value"].as_f64().unwrap()
}

/// Checks all figures of one measurement.
#[track_caller]
fn assert_measured(object: &Value, name: &str, subject: &str, nr_threads: u64) {
    let figure = |name: &str, unit| figure(object, name, subject, nr_threads, unit);
    assert!(figure(name, "ns") > 0.0 && figure(&format!("{name}_p50"), "ns") > 0.0);
    assert!(figure(&format!("{name}_deviation"), "ns") >= 0.0);
    assert_eq!(figure("runs", "count"), 2.0);
    let ratio = format!("{name}_ratio_to_slat");
    if subject == "slat" {
        assert!(figures(object, &ratio, subject, nr_threads).is_empty());
    } else {
        assert!(figure(&ratio, "ratio") > 0.0);
    }
    let speedup = format!("{name}_speedup");
    if nr_threads == 1 {
        assert!(figures(object, &speedup, subject, nr_threads).is_empty());
    } else {
        assert!(figure(&speedup, "ratio") > 0.0);
    }
}

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("-t 0", "1..=64"),
        ("-t 1,65", "1..=64"),
        ("-t two", "invalid digit"),
        ("--only magic", "fault"),
        ("--only fault,", "fault"),
        ("--pages 500", "must be a power of two from 512 to 32768"),
        ("--pages 256", "must be a power of two from 512 to 32768"),
        ("--pages 65536", "must be a power of two from 512 to 32768"),
        ("--pages many", "invalid digit"),
        ("--runs 0", "at least 1"),
        ("peer", "unexpected argument"),
    ] {
        assert_refused(&format!("peers {args}"), 2, what);
    }
}

#[test]
fn a_file_that_cannot_be_written_exits_with_3_before_the_work() {
    assert_refused("peers --json /no/such/folder/peers.json", 3, "cannot write /no/such/folder/peers.json");
}

#[test]
fn every_operation_is_measured_for_every_crate_that_has_it() {
    let (printed, object) = peers("peers.json", "--pages 512 --runs 2 -t 2,1,2");
    assert_eq!(object["experiment"], "peers");
    assert_eq!(object["config"]["threads"], serde_json::json!([1, 2]));
    for nr_threads in [1, 2] {
        for subject in ["slat", "axaddrspace"] {
            assert_measured(&object, "fault", subject, nr_threads);
        }
        for operation in OPERATIONS {
            assert_measured(&object, operation, "slat", nr_threads);
            for &(peer, splits) in PEERS {
                if operation != "split_2m" || splits {
                    assert_measured(&object, operation, peer, nr_threads);
                } else {
                    assert!(figures(&object, operation, peer, nr_threads).is_empty());
                }
                assert!(figures(&object, "fault", peer, nr_threads).is_empty());
            }
        }
    }
    for (name, version) in object["config"]["versions"].as_object().unwrap() {
        assert!(printed.contains(&format!("{name} {}", version.as_str().unwrap())), "{printed}");
    }
    for title in ["| 2 threads ", "| unmap range ", "ns, 2 threads", "speed-up of slat: 1 thread", "2 interleaved runs"]
    {
        assert!(printed.contains(title), "{title}: {printed}");
    }
}

#[test]
fn what_was_not_asked_for_is_not_measured() {
    let (printed, object) = peers("peers_only.json", "--only query,fault --pages 512 --runs 1 -t 3");
    let names: Vec<&str> =
        object["results"].as_array().unwrap().iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"query") && names.contains(&"fault"));
    assert!(
        names.iter().all(|name| ["query", "fault", "runs"].iter().any(|asked| name.starts_with(asked))),
        "{names:?}"
    );
    // Nothing to compare with.
    assert!(!names.iter().any(|name| name.ends_with("_speedup")));
    assert!(!printed.contains("map one"), "{printed}");
    assert!(object["results"].as_array().unwrap().iter().all(|figure| figure["labels"]["threads"] == 3));

    let (printed, _) = peers("peers_faults.json", "--only fault --pages 512 --runs 1 -t 1");
    assert!(!printed.contains("x86_64 |"), "{printed}");
}

#[test]
fn the_help_fits_a_screen() {
    let help = assert_ok("peers --help");
    assert!(help.lines().count() <= 24, "{help}");
    assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
    let listed = |operation: &&str| help.contains(&operation.replace('_', "-"));
    assert!(OPERATIONS.iter().all(listed) && help.contains("fault"), "{help}");
}
