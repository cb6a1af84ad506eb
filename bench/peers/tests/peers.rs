//! The benchmark for its user: exit codes, the tables, the claims, the JSON. The benchmark itself checks
//! the changes of the page tables.
#![allow(missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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

fn run(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slat-peers")).args(args.split_whitespace()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs with `args`; expects exit code `code`, and a message with `what`.
#[track_caller]
fn assert_refused(args: &str, code: i32, what: &str) {
    let output = run(args);
    assert_eq!(output.status.code(), Some(code), "{args}: {}", stderr(&output));
    assert!(stderr(&output).contains(what) && output.stdout.is_empty(), "{args}: {}", stderr(&output));
}

/// Runs with `args`, and returns the output and the object of `--json`, which has the documented
/// form. On a busy machine a claim may be lost.
#[track_caller]
fn peers(name: &str, args: &str) -> (String, Value) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let output = run(&format!("{args} --json {}", path.display()));
    let is_lost = stderr(&output).starts_with("slat-peers: claim lost: ");
    assert_eq!(output.status.code(), Some(i32::from(is_lost)), "{args}: {}", stderr(&output));
    let object: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results-schema.json");
    let schema: Value = serde_json::from_str(&fs::read_to_string(schema).unwrap()).unwrap();
    let form = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> = form.iter_errors(&object).map(|error| error.to_string()).take(5).collect();
    assert!(errors.is_empty(), "{errors:#?}");
    (String::from_utf8(output.stdout).unwrap(), object)
}

fn samples(figure: &Value) -> Vec<f64> {
    figure["samples"].as_array().unwrap().iter().map(|sample| sample.as_f64().unwrap()).collect()
}

/// The median of a figure.
fn value(figure: &Value) -> f64 {
    let mut samples = samples(figure);
    samples.sort_by(f64::total_cmp);
    (samples[(samples.len() - 1) / 2] + samples[samples.len() / 2]) / 2.0
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
    value(found[0])
}

/// Checks all figures of one measurement.
#[track_caller]
fn assert_measured(object: &Value, name: &str, subject: &str, nr_threads: u64) {
    let figure = |name: &str, unit| figure(object, name, subject, nr_threads, unit);
    assert!(figure(name, "s") > 0.0);
    assert_eq!(samples(figures(object, name, subject, nr_threads)[0]).len(), 2);
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
        ("--threads 0", "1..=64"),
        ("--threads 1,65", "1..=64"),
        ("--threads two", "invalid digit"),
        ("--only magic", "fault"),
        ("--only fault,", "fault"),
        ("--pages 500", "must be a power of two from 512 to 32768"),
        ("--pages 256", "must be a power of two from 512 to 32768"),
        ("--pages 65536", "must be a power of two from 512 to 32768"),
        ("--pages many", "invalid digit"),
        ("--runs 0", "0 is not in 1.."),
        ("peer", "unexpected argument"),
    ] {
        assert_refused(args, 2, what);
    }
}

#[test]
fn a_file_that_cannot_be_written_exits_with_3_before_the_work() {
    assert_refused("--json /no/such/folder/peers.json", 3, "cannot write /no/such/folder/peers.json");
}

#[test]
fn every_operation_is_measured_for_every_crate_that_has_it() {
    let (printed, object) = peers("peers.json", "--pages 512 --runs 2 --threads 2,1,2");
    assert_eq!(object["experiment"], "peers");
    assert_eq!(object["config"]["threads"], serde_json::json!([1, 2]));
    for nr_threads in [1, 2] {
        assert_measured(&object, "fault", "slat", nr_threads);
        for subject in ["slat-axaddrspace", "axaddrspace"] {
            for operation in
                ["fault", "map_range", "map_range_2m", "query", "query_scattered", "unmap_4k", "unmap_range"]
            {
                assert_measured(&object, operation, subject, nr_threads);
            }
            assert!(figures(&object, "map_4k", subject, nr_threads).is_empty());
        }
        for operation in OPERATIONS {
            assert_measured(&object, operation, "slat", nr_threads);
            // It maps frames that are known ahead, and only its own calls split its pages.
            if ["map_range_each", "split_2m"].contains(&operation) {
                assert!(figures(&object, operation, "slat-pinned", nr_threads).is_empty());
            } else {
                assert_measured(&object, operation, "slat-pinned", nr_threads);
                assert!(
                    figure(&object, &format!("{operation}_ratio_to_slat_pinned"), "x86_64", nr_threads, "ratio") > 0.0
                );
            }
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
    for title in [
        "| 2 threads ",
        "| unmap range ",
        "2 threads, median [quartiles]",
        "speed-up of slat: 1 thread",
        "speed-up of slat-pinned: 2 threads",
        // A single page has the same locked exchange on each machine.
        "- unmap one: 0.",
        "call publishes its range",
        "2 interleaved runs",
    ] {
        assert!(printed.contains(title), "{title}: {printed}");
    }
}

#[test]
fn what_was_not_asked_for_is_not_measured() {
    let (printed, object) = peers("peers_only.json", "--only query,fault --pages 512 --runs 1 --threads 3");
    let names: Vec<&str> =
        object["results"].as_array().unwrap().iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"query") && names.contains(&"fault"));
    assert!(names.iter().all(|name| ["query", "fault"].iter().any(|asked| name.starts_with(asked))), "{names:?}");
    // Nothing to compare with.
    assert!(!names.iter().any(|name| name.ends_with("_speedup")));
    assert!(!printed.contains("map one"), "{printed}");
    assert!(object["results"].as_array().unwrap().iter().all(|figure| figure["labels"]["threads"] == 3));

    let (printed, _) = peers("peers_faults.json", "--only fault --pages 512 --runs 1 --threads 1");
    assert!(!printed.contains("x86_64 |"), "{printed}");
    // A column for each figure of a fault: times, speed-ups over the others, scaling.
    for column in ["| axaddrspace |", "slat over slat-axaddrspace", "slat over axaddrspace", "axaddrspace: scaling"] {
        assert!(printed.lines().any(|line| line.replace("  ", "").contains(column)), "{column}: {printed}");
    }
}

#[test]
fn claims_are_made_where_threads_contend() {
    let (printed, object) = peers("peers_claims.json", "--only fault,map-4k,query --pages 512 --runs 3 --threads 1,2");
    let compared = &object["compared"];
    let comparisons = compared["systems"][0]["comparisons"].as_array().unwrap();
    // Two operations on one thread and on two.
    assert_eq!(comparisons.len(), 4);
    for comparison in comparisons {
        let sides = comparison["sides"].as_array().unwrap();
        assert_eq!((&sides[0]["role"], &sides[0]["ratio"]), (&"slat".into(), &Value::Null));
        assert!(sides[1..].iter().all(|side| side["role"] == "peer" && side["ratio"]["value"].is_number()));
        let is_parallel = comparison["name"].as_str().unwrap().ends_with("_2_threads");
        assert!(is_parallel || sides.iter().all(|side| side["claim"].is_null()), "{comparison}");
    }
    // Of a fault one, of a map two, where there are two CPUs.
    let nr_claims = if std::thread::available_parallelism().unwrap().get() > 1 { 3 } else { 0 };
    assert_eq!(compared["claims"]["made"], nr_claims);
    assert!(printed.contains(&format!("{nr_claims} claims made: ")), "{printed}");
}
