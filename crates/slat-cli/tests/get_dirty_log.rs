//! `slat get-dirty-log` for its user: exit codes, one clear line for each mistake, the tables, the
//! JSON. The command itself checks that every log is exact.
#![allow(missing_docs)]

mod common;

use std::path::PathBuf;

use common::{assert_ok, assert_refused, formats, slat, slat_without_kvm, stderr};
use serde_json::Value;

const METHODS: [&str; 7] = ["srcu-copy", "xchg", "xchg-find-next", "xchg-first-to-last", "xchg16", "slat", "slat-leaf"];
const PATTERNS: [&str; 3] = ["run", "stride", "random"];

/// Runs with `args`, and returns the object of `--json`.
#[track_caller]
fn json(name: &str, args: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    assert_ok(&format!("get-dirty-log {args} --json {}", path.display()));
    serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()
}

/// The only figure of this name with these labels, and its unit.
#[track_caller]
fn figure<'a>(object: &'a Value, name: &str, labels: &[(&str, &str)]) -> (f64, &'a str) {
    let all = object["results"].as_array().unwrap();
    let is_it = |figure: &&Value| {
        figure["name"] == name
            && labels.iter().all(|(label, value)| {
                let found = &figure["labels"][label];
                found == *value || found.as_u64().is_some_and(|number| number.to_string() == *value)
            })
    };
    let found: Vec<&Value> = all.iter().filter(is_it).collect();
    assert_eq!(found.len(), 1, "{name} of {labels:?}");
    (found[0]["value"].as_f64().unwrap(), found[0]["unit"].as_str().unwrap())
}

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("-n 0", "at least 1"),
        ("-n 1,x", "invalid digit"),
        ("-n 1,4097 -b 16M", "4097 dirty pages of a slot that has 4096"),
        ("-p diagonal", "random"),
        ("-b 100", "multiple of the page size"),
        ("-b 65G", "at most 64G"),
        ("-s paper", "unknown memory backing"),
        ("--runs 0", "at least 1"),
        ("--method magic", "srcu-copy"),
        ("--method kvm", "invalid value 'kvm'"),
        ("--peer maybe", "auto"),
        ("--rate 5", "--rate is for the migration"),
        ("--paging 2d", "second-stage, shadow"),
        ("--paging shadow --format stage2", "--paging shadow needs --format npt"),
        ("--workload film", "framebuffer"),
        ("--workload framebuffer -n 1", "--pages and --pattern are for the table"),
        ("--workload migration -p run", "--pages and --pattern are for the table"),
        ("--workload migration --peer kvm", "there is no peer"),
        ("--workload migration --method slat,xchg", "there is no xchg"),
    ] {
        assert_refused(&format!("get-dirty-log {args}"), 2, what);
    }
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    let output = slat("get-dirty-log --json /no/such/folder/results.json");
    assert_eq!(output.status.code(), Some(3));
    let output = slat_without_kvm("get-dirty-log -b 1M -n 1 --peer kvm");
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("there is no KVM to measure: "), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}

#[test]
fn without_a_kvm_the_rest_is_measured_and_the_output_says_so() {
    let output = slat_without_kvm("get-dirty-log -b 1M -n 1,256 --runs 2");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("Not measured: KVM of this machine: "), "{printed}");
    assert!(printed.contains("slat-leaf |") && !printed.contains(" kvm |"), "{printed}");
    let printed = assert_ok("get-dirty-log -b 1M -n 1 --runs 2 --peer none");
    assert!(!printed.contains("Not measured") && !printed.contains(" kvm |"), "{printed}");
}

#[test]
fn the_table_has_every_method_pattern_and_number() {
    // Not a whole number of words, of page-table pages, or of pairs of words.
    let printed = assert_ok("get-dirty-log -b 4100K --runs 2");
    for pattern in PATTERNS {
        for view in ["ns a call, mean", "ns a call, p50 / deviation / p99", "ns a dirty page, mean"] {
            assert!(printed.contains(&format!("| {pattern}: {view} ")), "{pattern}: {view} in:\n{printed}");
        }
    }
    // The powers of two, up to the size.
    assert!(printed.contains("\n| 1024 ") && !printed.contains("\n| 2048 "), "{printed}");
    assert!(METHODS.iter().all(|method| printed.contains(&format!(" {method} |"))), "{printed}");
    assert!(printed.contains("1025 pages") && printed.contains("software CPUs"), "{printed}");
    assert!(printed.contains("logs had exactly the pages that were written."), "{printed}");
}

#[test]
fn every_workload_runs_on_every_format() {
    for format in formats() {
        for args in ["-n 1,700", "--workload framebuffer", "--workload migration"] {
            let printed = assert_ok(&format!("get-dirty-log -b 4M --runs 4 --peer none --format {format} {args}"));
            assert!(printed.contains(&format!("tables: {format};")), "{printed}");
            assert!(printed.contains("Verified: "), "{format} {args}:\n{printed}");
        }
    }
}

#[test]
fn json_has_a_figure_for_every_method_pattern_and_number() {
    let object = json("get_dirty_log.json", "-b 4M -n 1,64,1000,1024 --runs 4");
    assert_eq!(object["experiment"], "get-dirty-log");
    assert_eq!(object["config"]["bytes"], 4 << 20);
    let with_kvm = !object["host"]["kvm"].is_null();
    let methods = METHODS.into_iter().chain(with_kvm.then_some("kvm"));
    for method in methods {
        for pattern in PATTERNS {
            for pages in ["1", "64", "1000", "1024"] {
                let labels = [("method", method), ("pages", pages), ("pattern", pattern)];
                let (mean, unit) = figure(&object, "get_dirty_log", &labels);
                assert!(mean > 0.0 && unit == "ns", "{labels:?}");
                let (p50, p99) =
                    (figure(&object, "get_dirty_log_p50", &labels).0, figure(&object, "get_dirty_log_p99", &labels).0);
                assert!(0.0 < p50 && p50 <= p99, "{labels:?}");
                let a_page = figure(&object, "get_dirty_log_page", &labels).0;
                assert!((a_page * pages.parse::<f64>().unwrap() / mean - 1.0).abs() < 1e-9, "{labels:?}");
                assert!(figure(&object, "get_dirty_log_deviation", &labels).0 >= 0.0);
                // A method that has used its time has 3.
                assert!([3.0, 4.0].contains(&figure(&object, "runs", &labels).0));
                if with_kvm {
                    let (ratio, unit) = figure(&object, "ratio_to_kvm", &labels);
                    assert!(unit == "ratio" && ratio > 0.0 && (method != "kvm" || ratio == 1.0), "{labels:?}");
                }
            }
        }
    }
    if with_kvm {
        assert!(object["host"]["kvm"]["translation"].is_string());
        assert!(object["host"]["kvm"]["capabilities"]["KVM_CAP_NR_MEMSLOTS"].is_number());
    }
    // The whole memslot was measured once.
    let whole =
        |pattern| figure(&object, "get_dirty_log", &[("method", "xchg"), ("pages", "1024"), ("pattern", pattern)]).0;
    assert!(whole("run") == whole("stride") && whole("run") == whole("random"));
}

#[test]
fn only_what_was_chosen_is_measured() {
    let object =
        json("get_dirty_log_some.json", "-b 2M -n 7 -p stride --runs 1 --method slat,xchg --peer none -s shmem");
    let names = |label: &str| {
        let all = object["results"].as_array().unwrap();
        let name = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut names: Vec<String> = all.iter().map(|figure| name(&figure["labels"][label])).collect();
        names.dedup();
        names
    };
    assert_eq!(names("method"), ["xchg", "slat"]);
    assert_eq!((names("pattern"), names("pages")), (vec!["stride".to_owned()], vec!["7".to_owned()]));
}

#[test]
fn the_engine_is_measured_on_shadow_tables_too() {
    // Not a whole number of 2 MiB.
    let args = "-b 4100K --runs 2 --paging shadow -p random,run";
    let printed = assert_ok(&format!("get-dirty-log {args}"));
    assert!(printed.contains("paging: shadow") && printed.contains(" slat-leaf |"), "{printed}");
    let object = json("get_dirty_log_shadow.json", args);
    assert_eq!(object["config"]["paging"], "shadow");
    for method in ["slat", "slat-leaf"] {
        for pages in ["1", "64", "1024"] {
            let labels = [("method", method), ("paging", "shadow"), ("pages", pages), ("pattern", "random")];
            assert!(figure(&object, "get_dirty_log", &labels).0 > 0.0, "{labels:?}");
        }
    }
    for workload in
        ["framebuffer -b 4M --runs 5", "migration -b 8M --runs 3 --rate 50000", "migration -b 8M --runs 3 --rate 0"]
    {
        let object = json("get_dirty_log_shadow_other.json", &format!("--workload {workload} --paging shadow"));
        assert!(figure(&object, "get_dirty_log", &[("method", "slat"), ("paging", "shadow")]).0 > 0.0, "{workload}");
    }
}

#[test]
fn a_framebuffer_is_measured_burst_by_burst() {
    let args = "--workload framebuffer -b 8M --runs 20";
    let printed = assert_ok(&format!("get-dirty-log {args}"));
    assert!(printed.contains("| 20 bursts of ") && printed.contains("| slat-leaf "), "{printed}");
    let object = json("get_dirty_log_framebuffer.json", args);
    for method in METHODS {
        let labels = [("method", method), ("workload", "framebuffer")];
        assert!(figure(&object, "get_dirty_log", &labels).0 > 0.0, "{method}");
        assert!((1.0..=2048.0).contains(&figure(&object, "dirty_pages", &labels).0), "{method}");
        assert_eq!(figure(&object, "runs", &labels).0, 20.0);
    }
}

#[test]
fn a_migration_is_measured_on_both_sides() {
    let args = "--workload migration -b 16M --runs 12 --rate 50000";
    let printed = assert_ok(&format!("get-dirty-log {args}"));
    assert!(printed.contains("| 12 harvests, ns") && printed.contains("50000 pages a second"), "{printed}");
    for args in [args, "--workload migration -b 16M --runs 3 --rate 0 --method slat-leaf,slat"] {
        let object = json("get_dirty_log_migration.json", args);
        for method in ["slat", "slat-leaf"] {
            let labels = [("method", method), ("workload", "migration")];
            for name in ["get_dirty_log", "dirty_pages", "write_fault_p50", "write_fault_p99", "guest_write"] {
                assert!(figure(&object, name, &labels).0 > 0.0, "{name} of {method}");
            }
            assert!(figure(&object, "guest_stall_share", &labels).0 < 1.0, "{method}");
            assert!(figure(&object, "guest_writes_per_second", &labels).0 > 0.0, "{method}");
        }
    }
}
