//! `slat shadow` for its user: exit codes, one clear line for each mistake, and the figures that
//! strategies must have. The command itself checks that every access of the guest has the result
//! that its page tables define.
#![allow(missing_docs)]

mod common;

use common::{assert_ok, assert_refused, measured, quantity};
use serde_json::Value;

const STRATEGIES: [&str; 4] = ["baseline", "root-cache", "roots-by-pcid", "pcid-tagged"];

/// Runs `slat shadow` with `args`, and returns the object of `--json` and the output.
#[track_caller]
fn shadow(name: &str, args: &str) -> (Value, String) {
    measured(&format!("cr3_{name}"), &format!("shadow {args}"))
}

/// The only figure `name` of `strategy` with so many vCPUs, and its unit.
#[track_caller]
fn find<'a>(object: &'a Value, name: &str, strategy: &str, vcpus: u64) -> (f64, &'a str) {
    quantity(object, name, &[("strategy", strategy), ("vcpus", &vcpus.to_string())])
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
        ("--host-pcid 1", "on, off"),
        ("--strategy best", "baseline, root-cache, roots-by-pcid, pcid-tagged, all"),
        ("--previous-roots 32", "32 is not in 0..=31"),
        ("--previous-roots 256", "256 is not in 0..=31"),
        ("--max-pages 63", "63 is not in 64..=1048576"),
        ("--processes 0", "0 is not in 1..=64"),
        ("--exit-cost 1", "write it as 50us"),
        ("--touches x", "invalid digit"),
    ] {
        assert_refused(&format!("shadow {args}"), 2, what);
    }
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    assert_refused("shadow -v 1 --steps 1 --json /no/such/folder/results.json", 3, "/no/such/folder");
}

#[test]
fn json_has_a_figure_for_every_strategy_and_number_of_vcpus() {
    let (object, output) = shadow("all", "-v 1,2 --steps 1500 --runs 2 --exit-cost 1000ns");
    assert_eq!(object["experiment"], "shadow");
    assert_eq!(object["config"]["exit_cost_ns"], 1000);
    assert_eq!(object["config"]["build"], "Linux 6.1.192, tinyconfig, make -j2 vmlinux");
    for line in [
        "page-table isolation on, PCIDs on, the host's on: 1500 steps",
        "| In 1000 steps ",
        "1.69 times as fast",
        "Guest time is modelled",
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
                let (figure, found) = find(&object, name, strategy, vcpus);
                assert!(figure >= 0.0 && found == unit, "{name} of {strategy} with {vcpus} vCPUs: {figure} {found}");
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
        assert!(switch > 0.0 && unit == "s");
        assert!(figure(&object, "cr3_switch_all_roots", strategy, 1) > 0.0);
    }
    assert_eq!(figure(&object, "gain", "baseline", 1), 1.0);
    for figure in object["results"].as_array().unwrap() {
        let labels = &figure["labels"];
        for name in ["isolation", "pcid", "host_pcid"] {
            assert_eq!(labels[name], "on", "{figure}");
        }
        let name = figure["name"].as_str().unwrap();
        let is_modelled = name.starts_with("guest_time") || name.starts_with("gain");
        assert_eq!(labels.get("time").is_some_and(|time| time == "modelled"), is_modelled, "{name}");
    }
}

#[test]
fn cached_roots_save_synchronization_and_flushes() {
    let (object, _) = shadow("saved", "-v 1 --steps 3000 --runs 1");
    let of = |name, strategy| figure(&object, name, strategy, 1);
    // The guest is the same for all.
    for strategy in STRATEGIES {
        assert_eq!(of("cr3_loads", strategy), of("cr3_loads", "baseline"));
    }
    // The baseline finds its shadow pages again, and builds no more than others. It synchronizes
    // and flushes at each load.
    assert_eq!(of("root_hits", "baseline"), 0.0);
    assert_eq!(of("tables_built", "baseline"), of("tables_built", "root-cache"));
    assert!(of("tlb_flushes", "baseline") >= of("cr3_loads", "baseline"));
    for strategy in &STRATEGIES[1..] {
        assert!(of("root_hits", strategy) > 0.9 * of("cr3_loads", strategy), "{strategy}");
        assert!(of("tables_synced", strategy) < 0.5 * of("tables_synced", "baseline"), "{strategy}");
        assert!(of("entries_synced", strategy) < of("entries_synced", "baseline"), "{strategy}");
        assert!(of("tlb_flushes", strategy) < 0.25 * of("tlb_flushes", "baseline"), "{strategy}");
        assert!(of("exits", strategy) < of("exits", "baseline"), "{strategy}");
    }
    // There is one shadow page of user space for each PCID.
    assert!(of("table_pages_peak", "pcid-tagged") > of("table_pages_peak", "root-cache"));
    assert!(of("root_misses", "roots-by-pcid") <= of("root_misses", "root-cache"));
}

#[test]
fn a_host_without_pcids_flushes_at_each_load() {
    let (object, output) = shadow("host_pcid_off", "-v 1 --steps 1500 --runs 1 --host-pcid off");
    assert!(output.contains("PCIDs on, the host's off"), "{output}");
    for strategy in STRATEGIES {
        let of = |name| figure(&object, name, strategy, 1);
        assert!(of("tlb_flushes") >= of("cr3_loads"), "{strategy}");
    }
    // The roots are remembered all the same.
    assert!(figure(&object, "root_hits", "root-cache", 1) > 0.0);
}

#[test]
fn without_isolation_cr3_is_loaded_for_processes_only() {
    let (object, output) = shadow("isolation_off", "-v 2 --steps 2000 --runs 1 --isolation off");
    assert!(output.contains("page-table isolation off"), "{output}");
    for strategy in STRATEGIES {
        assert!(figure(&object, "cr3_loads", strategy, 2) < 1000.0, "{strategy}");
    }
}

#[test]
fn tables_stay_below_their_limit() {
    let (object, _) = shadow("limit", "-v 1 --steps 2000 --runs 1 --max-pages 64");
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
        "-v 2 --strategy roots-by-pcid --host-pcid off",
        "-v 2 --strategy root-cache --previous-roots 0",
        "-v 2 --strategy pcid-tagged --previous-roots 31 --processes 1 --touches 0",
        "-v 1 --exit-cost 0ns --seed 7 --processes 64",
    ] {
        let output = assert_ok(&format!("shadow --steps 300 --runs 1 {args}"));
        assert!(output.contains("Verified: "), "{args}:\n{output}");
    }
    // Nothing to compare with.
    let output = assert_ok("shadow -v 4 --steps 300 --runs 1 --strategy pcid-tagged");
    assert!(!output.contains("times as fast"), "{output}");
}
