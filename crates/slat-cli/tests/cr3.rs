//! `slat cr3` for its user: exit codes, one clear line for each mistake, and the figures that
//! strategies must have. The command itself checks that every access of the guest has the result
//! that its page tables define.
#![allow(missing_docs)]

mod common;

use std::path::PathBuf;

use common::{assert_ok, assert_refused};
use serde_json::Value;

const STRATEGIES: [&str; 3] = ["baseline", "root-cache", "pcid-tagged"];

/// Runs `slat cr3` with `args`, and returns the object of `--json` and the output.
#[track_caller]
fn cr3(name: &str, args: &str) -> (Value, String) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("cr3_{name}.json"));
    let output = assert_ok(&format!("cr3 {args} --json {}", path.display()));
    (serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap(), output)
}

/// The only figure `name` of `strategy` with so many vCPUs, and its unit.
#[track_caller]
fn find<'a>(object: &'a Value, name: &str, strategy: &str, vcpus: u64) -> (f64, &'a str) {
    let results = object["results"].as_array().unwrap();
    let is_it = |figure: &&Value| {
        let labels = &figure["labels"];
        figure["name"] == name && labels["strategy"] == strategy && labels["vcpus"] == vcpus
    };
    let found: Vec<&Value> = results.iter().filter(is_it).collect();
    assert_eq!(found.len(), 1, "{name} of {strategy} with {vcpus} vCPUs");
    (found[0]["value"].as_f64().unwrap(), found[0]["unit"].as_str().unwrap())
}

#[track_caller]
fn figure(object: &Value, name: &str, strategy: &str, vcpus: u64) -> f64 {
    find(object, name, strategy, vcpus).0
}

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("-v 0", "at least 1"),
        ("-v 1,x", "invalid digit"),
        ("-v 129", "at most 128"),
        ("-v 4 --steps 3", "3 steps for 4 vCPUs"),
        ("--steps 0", "at least 1"),
        ("--runs 0", "at least 1"),
        ("--isolation maybe", "on, off"),
        ("--pcid 1", "on, off"),
        ("--strategy best", "baseline, root-cache, pcid-tagged, all"),
        ("--previous-roots 32", "32 is not in 0..=31"),
        ("--previous-roots 256", "256 is not in 0..=31"),
        ("--max-pages 63", "63 is not in 64..=1048576"),
        ("--processes 0", "0 is not in 1..=64"),
        ("--exit-cost-ns -1", "-1 is not in"),
        ("--touches x", "invalid digit"),
    ] {
        assert_refused(&format!("cr3 {args}"), 2, what);
    }
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    assert_refused("cr3 -v 1 --steps 1 --json /no/such/folder/results.json", 3, "/no/such/folder");
}

#[test]
fn json_has_a_figure_for_every_strategy_and_number_of_vcpus() {
    let (object, output) = cr3("all", "-v 1,2 --steps 1500 --runs 2 --exit-cost-ns 1000");
    assert_eq!(object["experiment"], "cr3");
    assert_eq!(object["config"]["exit_cost_ns"], 1000);
    assert_eq!(object["config"]["build"], "Linux 6.1.192, tinyconfig, make -j2 vmlinux");
    for line in [
        "page-table isolation on, PCIDs on: 1500 steps",
        "| In 1000 steps ",
        "1.69 times as fast",
        "1000 ns each",
        "software CPUs",
        "Verified: ",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
    // Nothing was published for two vCPUs.
    assert!(!output.contains("3.42 times as fast"), "{output}");
    for strategy in STRATEGIES {
        for vcpus in [1, 2] {
            for (name, unit) in [
                ("guest_time", "s"),
                ("guest_time_half_exit_cost", "s"),
                ("guest_time_twice_exit_cost", "s"),
                ("gain", "ratio"),
                ("gain_half_exit_cost", "ratio"),
                ("gain_twice_exit_cost", "ratio"),
                ("engine_time", "s"),
                ("exits", "count"),
                ("cr3_loads", "count"),
                ("root_hits", "count"),
                ("root_misses", "count"),
                ("tables_built", "count"),
                ("entries_synced", "count"),
                ("tlb_flushes", "count"),
                ("table_pages", "count"),
                ("table_pages_peak", "count"),
            ] {
                let (value, found) = find(&object, name, strategy, vcpus);
                assert!(value >= 0.0 && found == unit, "{name} of {strategy} with {vcpus} vCPUs: {value} {found}");
            }
            let figure = |name| figure(&object, name, strategy, vcpus);
            assert!(figure("guest_time_half_exit_cost") < figure("guest_time"));
            assert!(figure("guest_time") < figure("guest_time_twice_exit_cost"));
            // A visit to the kernel for each step, and two loads for each visit.
            assert!(figure("cr3_loads") >= 2.0 * 1500.0);
            assert!(figure("exits") > figure("cr3_loads"));
            assert!(figure("table_pages") <= figure("table_pages_peak"));
            assert!(figure("root_hits") + figure("root_misses") >= figure("cr3_loads"));
        }
        let (switch, unit) = find(&object, "cr3_switch", strategy, 1);
        assert!(switch > 0.0 && unit == "ns");
        assert!(figure(&object, "cr3_switch_all_roots", strategy, 1) > 0.0);
        assert!(figure(&object, "cr3_switch_p99", strategy, 1) >= switch);
    }
    assert_eq!(figure(&object, "gain", "baseline", 1), 1.0);
    for figure in object["results"].as_array().unwrap() {
        assert_eq!((&figure["labels"]["isolation"], &figure["labels"]["pcid"]), (&"on".into(), &"on".into()));
    }
}

#[test]
fn cached_roots_save_shadow_pages_and_ptes() {
    let (object, _) = cr3("saved", "-v 1 --steps 3000 --runs 1");
    let of = |name, strategy| figure(&object, name, strategy, 1);
    // The guest is the same for all.
    for strategy in STRATEGIES {
        assert_eq!(of("cr3_loads", strategy), of("cr3_loads", "baseline"));
    }
    assert_eq!(of("root_hits", "baseline"), 0.0);
    for strategy in ["root-cache", "pcid-tagged"] {
        assert!(of("root_hits", strategy) > 0.9 * of("cr3_loads", strategy), "{strategy}");
        assert!(of("tables_built", strategy) < 0.05 * of("tables_built", "baseline"), "{strategy}");
        assert!(of("entries_synced", strategy) < 0.25 * of("entries_synced", "baseline"), "{strategy}");
        assert!(of("tlb_flushes", strategy) < 0.25 * of("tlb_flushes", "baseline"), "{strategy}");
        assert!(of("exits", strategy) < of("exits", "baseline"), "{strategy}");
    }
    // There is one shadow page of user space for each PCID.
    assert!(of("table_pages_peak", "pcid-tagged") > of("table_pages_peak", "root-cache"));
    assert!(of("table_pages_peak", "baseline") < of("table_pages_peak", "root-cache"));
}

#[test]
fn without_isolation_cr3_is_loaded_for_processes_only() {
    let (object, output) = cr3("isolation_off", "-v 2 --steps 2000 --runs 1 --isolation off");
    assert!(output.contains("page-table isolation off"), "{output}");
    for strategy in STRATEGIES {
        assert!(figure(&object, "cr3_loads", strategy, 2) < 1000.0, "{strategy}");
    }
}

#[test]
fn tables_stay_below_their_limit() {
    let (object, _) = cr3("limit", "-v 1 --steps 2000 --runs 1 --max-pages 64");
    for strategy in STRATEGIES {
        assert!(figure(&object, "table_pages_peak", strategy, 1) <= 64.0, "{strategy}");
    }
    assert!(figure(&object, "tables_evicted", "root-cache", 1) > 0.0);
}

#[test]
fn options_combine() {
    for args in [
        "-v 3 --pcid off --strategy root-cache",
        "-v 1 --pcid off --isolation off",
        "-v 1 --strategy baseline --previous-roots 0",
        "-v 2 --strategy root-cache --previous-roots 0",
        "-v 2 --strategy pcid-tagged --previous-roots 31 --processes 1 --touches 0",
        "-v 1 --exit-cost-ns 0 --seed 7 --processes 64",
    ] {
        let output = assert_ok(&format!("cr3 --steps 300 --runs 1 {args}"));
        assert!(output.contains("Verified: "), "{args}:\n{output}");
    }
    // Nothing to compare with.
    let output = assert_ok("cr3 -v 4 --steps 300 --runs 1 --strategy pcid-tagged");
    assert!(!output.contains("times as fast"), "{output}");
}
