//! `slat dirty-log` for its user: exit codes, one clear line for each mistake, the tables, the
//! JSON. The command itself checks that every log is exact.
#![allow(missing_docs)]

mod common;

use common::{
    assert_ok, assert_refused, figure, figures, formats, measured, quantity, samples, slat, slat_without_kvm, stderr,
    value,
};
use serde_json::Value;

const METHODS: [&str; 5] = ["srcu-copy", "xchg", "xchg16", "slat", "slat-leaf"];
const PATTERNS: [&str; 3] = ["run", "stride", "random"];

/// Runs with `args`, and returns the object of `--json`.
#[track_caller]
fn json(name: &str, args: &str) -> Value {
    measured(name, &format!("dirty-log {args}")).0
}

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("--pages 0", "at least 1"),
        ("--pages 1,x", "invalid digit"),
        ("--pages 1,4097 -b 16M", "4097 dirty pages of a slot that has 4096"),
        ("--pattern diagonal", "random"),
        ("-b 100", "multiple of the page size"),
        ("-b 65G", "at most 64G"),
        ("-s paper", "unknown memory backing"),
        ("--runs 0", "at least 1"),
        ("--method magic", "srcu-copy"),
        ("--method kvm", "invalid value 'kvm'"),
        ("--peer maybe", "auto"),
        ("--rate 5", "--rate is for the migration"),
        ("--paging 2d", "flat, shadow"),
        ("--paging shadow --format stage2", "--paging shadow needs --format npt"),
        ("--workload film", "framebuffer"),
        ("--workload framebuffer --pages 1", "--pages and --pattern are for the table"),
        ("--workload migration --pattern run", "--pages and --pattern are for the table"),
        ("--running-vcpus 65", "65 is not in 0..=64"),
        ("--window 1M", "--window is for the range"),
        ("--workload range --window 100K", "multiple of 256K"),
        ("--workload range --window 0", "must not be zero"),
    ] {
        assert_refused(&format!("dirty-log {args}"), 2, what);
    }
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    let output = slat("dirty-log --json /no/such/folder/results.json");
    assert_eq!(output.status.code(), Some(3));
    let output = slat_without_kvm("dirty-log -b 1M --pages 1 --peer kvm");
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("there is no KVM to measure: "), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}

#[test]
fn without_a_kvm_the_rest_is_measured_and_the_output_says_so() {
    let output = slat_without_kvm("dirty-log -b 1M --pages 1,256 --runs 2");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("Not measured: KVM of this machine: "), "{printed}");
    assert!(printed.contains("slat-leaf |") && !printed.contains(" kvm |"), "{printed}");
    let printed = assert_ok("dirty-log -b 1M --pages 1 --runs 2 --peer none");
    assert!(!printed.contains("Not measured") && !printed.contains(" kvm |"), "{printed}");
}

#[test]
fn the_table_has_every_method_pattern_and_number() {
    // Not a whole number of words, of page-table pages, or of pairs of words.
    let printed = assert_ok("dirty-log -b 4100K --runs 2");
    for pattern in PATTERNS {
        for view in [
            "a call, median [quartiles]",
            "a call, p99",
            "a call + the guest's next writes, medians",
            "a dirty page, medians: its part of the call + the next write",
        ] {
            assert!(printed.contains(&format!("{pattern}: {view}")), "{pattern}: {view} in:\n{printed}");
        }
    }
    // The powers of two, up to the size.
    assert!(printed.contains("\n| 1024 ") && !printed.contains("\n| 2048 "), "{printed}");
    assert!(METHODS.iter().all(|method| printed.contains(&format!(" {method} |"))), "{printed}");
    assert!(printed.contains("1025 pages") && printed.contains("software CPUs"), "{printed}");
    assert!(printed.contains("vCPUs that run beside each call: 1."), "{printed}");
    assert!(printed.contains("srcu-copy: the grace period took "), "{printed}");
    // Figures of 1 GiB were published.
    assert!(!printed.contains("published"), "{printed}");
    assert!(printed.contains("logs had exactly the pages that were written."), "{printed}");
}

#[test]
fn every_workload_runs_on_every_format() {
    for format in formats() {
        for args in [
            "--pages 1,700",
            "--pages 700 --running-vcpus 0",
            "--workload framebuffer --running-vcpus 3",
            "--workload migration --running-vcpus 1",
            "--workload range --window 1M,3M",
        ] {
            let printed = assert_ok(&format!("dirty-log -b 4M --runs 4 --peer none --format {format} {args}"));
            assert!(printed.contains(&format!("tables: {format};")), "{printed}");
            assert!(printed.contains("Verified: "), "{format} {args}:\n{printed}");
        }
    }
}

#[test]
fn json_has_a_figure_for_every_method_pattern_and_number() {
    let object = json("get_dirty_log", "-b 4M --pages 1,64,1000,1024 --runs 4");
    assert_eq!(object["experiment"], "dirty-log");
    assert_eq!(object["config"]["bytes"], 4 << 20);
    let with_kvm = !object["host"]["kvm"].is_null();
    let methods = METHODS.into_iter().chain(with_kvm.then_some("kvm"));
    for method in methods {
        for pattern in PATTERNS {
            for pages in ["1", "64", "1000", "1024"] {
                let labels = [("method", method), ("pages", pages), ("pattern", pattern)];
                let (median, unit) = quantity(&object, "get_dirty_log", &labels);
                assert!(median > 0.0 && unit == "s", "{labels:?}");
                let a_page = quantity(&object, "get_dirty_log_page", &labels).0;
                assert!((a_page * pages.parse::<f64>().unwrap() / median - 1.0).abs() < 1e-9, "{labels:?}");
                let next_writes = figure(&object, "next_writes", &labels);
                let both = quantity(&object, "get_dirty_log_and_next_writes", &labels).0;
                assert!(value(next_writes) > 0.0 && both >= median.max(value(next_writes)), "{labels:?}");
                assert_eq!(samples(next_writes).len(), samples(figure(&object, "get_dirty_log", &labels)).len());
                // KVM has 3 where it has used its time.
                assert!([3, 4].contains(&samples(figure(&object, "get_dirty_log", &labels)).len()));
                if with_kvm {
                    let (ratio, unit) = quantity(&object, "ratio_to_kvm", &labels);
                    assert!(unit == "ratio" && ratio > 0.0 && (method != "kvm" || ratio == 1.0), "{labels:?}");
                }
            }
        }
    }
    if with_kvm {
        assert!(object["host"]["kvm"]["translation"].is_string());
        assert!(object["host"]["kvm"]["capabilities"]["KVM_CAP_NR_MEMSLOTS"].is_number());
    }
    // Only the old way waits, and each of its calls does.
    let waits = figures(&object, "grace_period", &[]);
    assert_eq!(waits.len(), PATTERNS.len() * 4);
    assert!(waits.iter().all(|figure| figure["labels"]["method"] == "srcu-copy"));
    assert!(object["published"].is_null());
    // The whole memslot was measured once.
    let whole =
        |pattern| quantity(&object, "get_dirty_log", &[("method", "xchg"), ("pages", "1024"), ("pattern", pattern)]).0;
    assert!(whole("run") == whole("stride") && whole("run") == whole("random"));
}

#[test]
fn only_what_was_chosen_is_measured() {
    let object =
        json("get_dirty_log_some", "-b 2M --pages 7 --pattern stride --runs 1 --method slat,xchg --peer none -s shmem");
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
    let args = "-b 4100K --runs 2 --paging shadow --pattern random,run";
    let printed = assert_ok(&format!("dirty-log {args}"));
    assert!(printed.contains("paging: shadow") && printed.contains(" slat-leaf |"), "{printed}");
    let object = json("get_dirty_log_shadow", args);
    assert_eq!(object["config"]["paging"], "shadow");
    for method in ["slat", "slat-leaf"] {
        for pages in ["1", "64", "1024"] {
            let labels = [("method", method), ("paging", "shadow"), ("pages", pages), ("pattern", "random")];
            assert!(quantity(&object, "get_dirty_log", &labels).0 > 0.0, "{labels:?}");
        }
    }
    for workload in
        ["framebuffer -b 4M --runs 5", "migration -b 8M --runs 3 --rate 50000", "migration -b 8M --runs 3 --rate 0"]
    {
        let object = json("get_dirty_log_shadow_other", &format!("--workload {workload} --paging shadow"));
        assert!(quantity(&object, "get_dirty_log", &[("method", "slat"), ("paging", "shadow")]).0 > 0.0, "{workload}");
    }
}

#[test]
fn a_framebuffer_is_measured_burst_by_burst() {
    let args = "--workload framebuffer -b 8M --runs 20";
    let printed = assert_ok(&format!("dirty-log {args}"));
    assert!(printed.contains("20 bursts of ") && printed.contains("| slat-leaf "), "{printed}");
    let object = json("get_dirty_log_framebuffer", args);
    for method in METHODS {
        let labels = [("method", method), ("workload", "framebuffer")];
        assert!(quantity(&object, "get_dirty_log", &labels).0 > 0.0, "{method}");
        assert!((1.0..=2048.0).contains(&quantity(&object, "dirty_pages", &labels).0), "{method}");
        assert_eq!(samples(figure(&object, "get_dirty_log", &labels)).len(), 20);
    }
}

#[test]
fn published_figures_stand_beside_the_ways_of_2012() {
    let args = "--workload framebuffer -b 1M --runs 3 --peer none";
    let object = json("get_dirty_log_published", args);
    let published = object["published"].as_array().unwrap();
    let range = |method: &str| {
        let of_method: Vec<&Value> = published.iter().filter(|figure| figure["labels"]["method"] == method).collect();
        assert!(of_method.len() <= 1, "{published:?}");
        of_method.first().map(|figure| figure["range"].clone())
    };
    assert_eq!(range("srcu-copy"), Some(serde_json::json!([1e-4, 3e-4])));
    assert_eq!(range("xchg"), Some(serde_json::json!([3e-6, 1e-5])));
    assert_eq!(published.len(), 2);
    let printed = assert_ok(&format!("dirty-log {args}"));
    assert!(printed.contains(" 100 µs–300 |") || printed.contains(" 100–300 µs |"), "{printed}");
    assert!(printed.contains("Published: KVM in 2012 "), "{printed}");
}

#[test]
fn a_large_slot_is_harvested_whole_and_in_windows() {
    // The last window of 3 MiB is shorter.
    let args = "--workload range -b 16M --pages 32,1024 --pattern run --window 1M,3M --runs 4 --peer none";
    let printed = assert_ok(&format!("dirty-log {args}"));
    for way in
        ["slat, whole slot", "slat, 16 windows of 1.00 MiB", "slat-leaf, 6 windows of 3.00 MiB", "xchg, whole slot"]
    {
        assert!(printed.contains(&format!("| {way} ")), "{way} in:\n{printed}");
    }
    assert!(!printed.contains("xchg, 16 windows"), "{printed}");
    let object = json("get_dirty_log_range", args);
    for pages in ["32", "1024"] {
        for window in ["1048576", "3145728"] {
            let labels = [("method", "slat"), ("pages", pages), ("window_bytes", window)];
            let of = |name| quantity(&object, name, &labels).0;
            let (whole, longest, mean) = (of("harvest"), of("get_dirty_log_range_longest"), of("get_dirty_log_range"));
            assert!(whole >= longest && longest >= mean && mean > 0.0, "{labels:?}: {whole} {longest} {mean}");
        }
    }
    // No memory where nothing is written: this slot has more than any machine.
    let args = "--workload range -b 64G --pages 8 --pattern stride --window 1G --runs 2 --method slat --peer none";
    let output = slat(&format!("dirty-log {args}"));
    // Exit code 3: the machine has less memory than the slot.
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", stderr(&output));
}

/// Whether some harvest found a page. On a busy machine most may find none.
fn has_dirty_pages(object: &Value, labels: &[(&str, &str)]) -> bool {
    samples(figure(object, "dirty_pages", labels)).iter().any(|nr| *nr > 0.0)
}

#[test]
fn a_migration_is_measured_on_both_sides() {
    let args = "--workload migration -b 16M --runs 12 --rate 50000";
    let printed = assert_ok(&format!("dirty-log {args}"));
    assert!(
        printed.contains("12 harvests, 2 turns: median [quartiles]") && printed.contains("50000 pages a second"),
        "{printed}"
    );
    assert!(printed.contains("| Harvest, published "), "{printed}");
    for args in [args, "--workload migration -b 16M --runs 3 --rate 0 --method slat-leaf,slat,xchg,srcu-copy"] {
        let object = json("get_dirty_log_migration", args);
        for method in ["srcu-copy", "xchg", "slat", "slat-leaf"] {
            let labels = [("method", method), ("workload", "migration")];
            for name in ["get_dirty_log", "write_fault_p50", "write_fault_p99", "guest_write"] {
                assert!(quantity(&object, name, &labels).0 > 0.0, "{name} of {method}");
            }
            assert!(has_dirty_pages(&object, &labels), "{method}");
            assert!(quantity(&object, "guest_writes_per_second", &labels).0 > 0.0, "{method}");
        }
        for method in ["slat", "slat-leaf"] {
            let labels = [("method", method), ("workload", "migration")];
            assert!(quantity(&object, "guest_stall_share", &labels).0 < 1.0, "{method}");
        }
        if !object["host"]["kvm"].is_null() {
            let labels = [("method", "kvm"), ("workload", "migration")];
            for name in ["get_dirty_log", "guest_write", "guest_writes_per_second"] {
                assert!(quantity(&object, name, &labels).0 > 0.0, "{name} of kvm");
            }
            assert!(has_dirty_pages(&object, &labels), "kvm");
        }
    }
}
