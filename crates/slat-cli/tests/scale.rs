//! `slat scale` for its user: exit codes, one clear line for each mistake, the tables, the JSON.
#![allow(missing_docs)]

mod common;

use std::collections::BTreeSet;
use std::fs;

use common::{assert_form, assert_ok, assert_refused, figures, file, quantity, read, slat, stderr, value};
use serde_json::Value;

#[test]
fn mistakes_are_one_line_that_names_the_value() {
    let write = |name: &str, text: &str| {
        let path = file(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let hole = write("scale_hole.toml", "name = 'hole'\n[[node]]\ncpus = '0-1,3'\n");
    let no_toml = write("scale_no_toml.toml", "name = 'no TOML'\n[[node]]\ncpus = 3\n");
    let built_in = include_str!("../../slat-model/parameters.toml");
    let lacks_one = write("scale_lacks_one.toml", &built_in.replace("hit = 0.5", ""));
    let negative = write("scale_negative.toml", &built_in.replace("hit = 0.5", "hit = -0.5"));
    for (args, what) in [
        ("--cpus 0", "'0' for '--cpus <N,...>': must be at least 1"),
        ("--cpus 1,x", "'x' for '--cpus"),
        ("--cpus 2,2", "--cpus has 2 twice"),
        ("--cpus 1,417", "--cpus 417: the topology '416 CPUs, 8 nodes' has 416 CPUs"),
        ("--cpus 17 --topology 1x16", "--cpus 17: the topology '16 CPUs, 1 node' has 16 CPUs"),
        ("--topology /no/such/file", "topology /no/such/file: "),
        ("--topology 3x3", "topology 3x3: "),
        (&format!("--cpus 1 --topology {hole}"), "there are 3 CPUs, and none has the number 2"),
        (&format!("--cpus 1 --topology {no_toml}"), "at line 3, column 8: invalid type: integer `3`"),
        ("--parameters /no/such/file", "parameters /no/such/file: "),
        (&format!("--cpus 1 --parameters {lacks_one}"), "missing field `hit`"),
        (&format!("--cpus 1 --parameters {negative}"), "-0.5 is no time in nanoseconds"),
        ("--bytes 5000", "multiple of the page size"),
        ("--cpus 1 --bytes 1T", "--bytes 1099511627776: the memory of all vCPUs is more than 512 GiB"),
        ("--cpus 1 --bytes 6G", "more than 512 GiB"),
        ("--rounds 0", "0 is not in 1..=1000"),
        ("--system shadow", "[possible values: parallel-faults, userfault, numa-split, dirty-log, all]"),
        ("--seed x", "'x' for '--seed"),
        ("--seed v0:7", "'v0:7' for '--seed <N>': a seed of version 0 of the model, and this is version 1"),
        ("--check --system userfault", "'--check' cannot be used with '--system <SYSTEM>'"),
        ("--check --seconds 0", "0 is not in 1..=86400"),
        ("--seconds 1", "were not provided: --check"),
    ] {
        assert_refused(&format!("scale {args}"), 2, what);
    }
    assert_refused("scale --json /no/such/folder/results.json", 3, "/no/such/folder");
}

/// The results of `slat scale` on the standard output, which have the documented form.
#[track_caller]
fn results(args: &str) -> Value {
    let output = slat(&format!("scale {args} --quiet --json -"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let object = serde_json::from_slice(&output.stdout).unwrap();
    assert_form(&object);
    object
}

fn hashes(object: &Value) -> Vec<String> {
    let runs = object["config"]["runs"].as_array().unwrap();
    runs.iter().map(|run| run["trace_hash"].as_str().unwrap().to_owned()).collect()
}

/// Checks that each of the published figures stands beside one that is predicted.
#[track_caller]
fn assert_published_beside_predicted(object: &Value, nr_published: usize) {
    let published = object["published"].as_array().unwrap();
    assert_eq!(published.len(), nr_published);
    for of in published {
        let figures = object["results"].as_array().unwrap().iter();
        let beside = figures.filter(|figure| figure["name"] == of["name"] && figure["labels"] == of["labels"]);
        assert_eq!(beside.count(), 1, "{of}");
    }
}

#[test]
fn two_runs_of_one_command_are_the_same_and_another_seed_is_another_run() {
    let first = results("--system parallel-faults --cpus 1,2 --bytes 64K");
    let again = results("--system parallel-faults --cpus 1,2 --bytes 64K");
    assert_eq!(hashes(&first), hashes(&again));
    assert_eq!((&first["results"], &first["config"]), (&again["results"], &again["config"]));
    // The prediction has four runs, and each of the three curves three locks.
    assert_eq!(hashes(&first).len(), 4 + 3 * 3 * 2);
    assert!(hashes(&first).iter().all(|hash| hash.len() == 18 && hash.starts_with("0x")), "{first}");
    assert_eq!(first["host"]["measured_on"], "modelled CPUs");
    let config = &first["config"];
    assert_eq!((&config["topology"], &config["bytes"]), (&"built-in".into(), &65536.into()));
    assert_eq!((&config["iterations"], &config["seed"]), (&2.into(), &1.into()));
    assert_eq!(config["model_version"], 1);
    assert_eq!(config["runs"][0]["topology"], "96 CPUs, 2 nodes");
    assert_eq!(config["runs"][0]["bytes"], 65536);
    assert!(config["runs"][0].get("hot_lines").is_none());

    for lock in ["none", "shared", "exclusive"] {
        for (access, around) in [("partitioned", "host"), ("partitioned", "engine"), ("overlapping", "host")] {
            for cpus in [1, 2] {
                let nr_cpus = cpus.to_string();
                let with = [
                    ("hypervisor", "slat"),
                    ("lock", lock),
                    ("access", access),
                    ("around", around),
                    ("cpus", &nr_cpus),
                ];
                let rates = figures(&first, "populate_rate", &with);
                assert!(rates.len() == 1 && value(rates[0]) > 0.0, "{with:?}: {rates:?}");
                assert_eq!((&rates[0]["unit"], &rates[0]["better"]), (&"1/s".into(), &"more".into()));
                let times = figures(&first, "populate_memory", &with);
                assert!(times.len() == 1 && times[0]["unit"] == "s", "{with:?}: {times:?}");
                // 16 pages for each vCPU, or 64 in all.
                let nr_pages = if access == "partitioned" { 16 * cpus } else { 64 };
                let product = value(rates[0]) * value(times[0]);
                assert!((product / f64::from(nr_pages) - 1.0).abs() < 1e-9, "{with:?}: {product} pages");
            }
        }
    }
    assert_published_beside_predicted(&first, 20);
    let of_lines = [("cpus", "2"), ("lock", "none"), ("around", "engine")];
    let lines = figures(&first, "hot_line_wait", &of_lines);
    assert!((1..=10).contains(&lines.len()), "{lines:?}");

    // When vCPUs begin is random, which a run with one vCPU shows too.
    let other = results("--system parallel-faults --cpus 1,2 --bytes 64K --seed 2");
    assert!(hashes(&first).iter().zip(hashes(&other)).all(|(first, other)| *first != other), "{other}");
}

#[test]
fn a_report_has_the_rates_by_the_number_of_cpus() {
    let [json, page] = ["scale_report.json", "scale_report.html"].map(file);
    assert_ok(&format!("scale --system parallel-faults --cpus 1,2 --bytes 16K --trace --json {}", json.display()));
    let object = read(&json);
    let hot = &object["config"]["runs"][0]["hot_places"];
    assert!(hot.as_array().is_some_and(|places| !places.is_empty()), "{hot}");
    assert_ok(&format!("report {} -o {}", json.display(), page.display()));
    let page = fs::read_to_string(page).unwrap();
    assert!(
        page.contains("Populate rate") && page.contains("slat scale --system parallel-faults --cpus 1,2"),
        "{page}"
    );
    assert!(page.contains("iterations 2") && !page.contains("trace_hash"), "{page}");
}

#[test]
fn the_tables_have_what_was_published_and_a_row_for_each_number_of_cpus() {
    let topology = file("scale_three.toml");
    fs::write(&topology, "name = 'three'\n[[node]]\ncpus = '0,2'\n[[node]]\ncpus = '1'\n").unwrap();
    let topology = topology.display();
    let output =
        assert_ok(&format!("scale --system parallel-faults --cpus 3,1 --bytes 16K --trace --topology {topology}"));
    for line in [
        "## parallel-faults",
        "partitioned, 96 vCPUs, 3 GiB each",
        "overlapping, 96 vCPUs, 6 GiB in all",
        "110 s",
        "populate, partitioned, the engine alone",
        "| 1 of 3 CPUs ",
        "| 3 of 3 CPUs ",
        "vs 1 CPU",
        "cache line, last waited for at",
        "## Traces",
        "on three: trace hash 0x",
        "place in the source",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
    let hashes: BTreeSet<&str> =
        output.lines().filter_map(|line| line.split_once("trace hash ").map(|(_, rest)| &rest[..18])).collect();
    assert_eq!(hashes.len(), 4 + 3 * 3 * 2, "{output}");
    let tables = output.lines().filter(|line| line.starts_with('|'));
    assert!(tables.clone().all(|line| line.chars().count() <= 100), "{output}");
}

/// The tables of a system, which fit a screen.
#[track_caller]
fn text(system: &str, bytes: &str) -> String {
    let output = assert_ok(&format!("scale --system {system} --bytes {bytes} --quiet"));
    let name = system.split(' ').next().unwrap_or_default();
    assert!(output.contains(&format!("## {name}\n")), "{output}");
    let mut lines = output.lines();
    assert!(lines.all(|line| line.chars().count() <= 100), "{output}");
    output
}

#[test]
fn userfault_has_each_published_rate_and_the_exits_of_slat() {
    let object = results("--system userfault --bytes 16K");
    assert_published_beside_predicted(&object, 14 * 3 + 8);
    // And the rows of 256 CPUs.
    assert_eq!(hashes(&object).len(), 14 * 3 + 3 + 8);
    let rate = |mode: &str, vcpus: u64, hypervisor: &str| {
        let (backing, vcpus) = ([("backing", "anonymous"), ("uffds", "one")], vcpus.to_string());
        let labels = [("mode", mode), ("vcpus", &vcpus), ("hypervisor", hypervisor)];
        quantity(&object, "page_rate", &[&backing[..], &labels[..]].concat()).0
    };
    assert!(rate("uf", 64, "kvm") > 3.0 * rate("missing-1r", 64, "kvm"));
    assert!(rate("uf", 416, "slat") > 0.0 && rate("uf", 64, "slat") > rate("uf", 64, "kvm"));

    let output = text("userfault", "8K");
    for line in ["anonymous, one descriptor:", "| missing-1r |", "slat vs kvm", "| 416 vCPUs on 8x52 ", "with 2 pages"]
    {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
}

#[test]
fn numa_split_has_page_table_pages_where_the_placement_says() {
    let object = results("--system numa-split --bytes 4K --rounds 1");
    assert_eq!(hashes(&object).len(), 4);
    let of = |name: &str, placement: &str, splitters: &str| {
        quantity(&object, name, &[("placement", placement), ("splitters", splitters)]).0
    };
    // 52 of the 416 vCPUs are on the node of the thread that splits, each with one huge page.
    for (placement, splitters, tables) in
        [("caller-node", "one", [52, 364]), ("huge-page-node", "one", [416, 0]), ("caller-node", "per-node", [416, 0])]
    {
        let found = ["local_tables", "remote_tables"].map(|name| of(name, placement, splitters) as u64);
        assert_eq!(found, tables, "{placement} {splitters}");
    }
    assert!(of("split_time", "caller-node", "per-node") < of("split_time", "caller-node", "one") / 2.0);
    assert!(of("dirty_memory", "huge-page-node", "one") < of("dirty_memory", "caller-node", "one"));
}

#[test]
fn dirty_log_has_a_row_for_each_operation_and_lock_and_curves_by_the_number_of_cpus() {
    let json = file("scale_dirty_log.json");
    let output = text(&format!("dirty-log --cpus 4,1 --json {}", json.display()), "16K");
    for operation in ["nothing", "harvest", "invalidate-page", "invalidate-unused"] {
        for lock in ["none", "shared", "exclusive"] {
            assert!(output.contains(&format!("| {operation}, {lock} ")), "{operation}, {lock}:\n{output}");
        }
    }
    assert!(output.contains("| preempted vCPUs, by lock | longest fault | longest operation | quantum |"), "{output}");
    assert_eq!(output.matches("4.00 ms |").count(), 3, "{output}");
    for curve in ["harvests/s beside writers", "invalidations/s beside faults", "faults/s beside invalidations"] {
        assert!(output.contains(&format!("{curve}, by lock")), "{curve}:\n{output}");
    }
    for row in ["| 1 of 96 CPUs ", "| 4 of 96 CPUs "] {
        assert_eq!(output.matches(row).count(), 4, "{output}");
    }

    let object = read(&json);
    assert_form(&object);
    // Those of the tables, and of the curves two operations, two numbers of CPUs and three locks.
    assert_eq!(hashes(&object).len(), 15 + 2 * 2 * 3);
    let of = |name: &str, operation: &str, lock: &str, vcpus: u64| {
        let vcpus = vcpus.to_string();
        let labels = [("operation", operation), ("lock", lock), ("vcpus", &vcpus), ("lock_kind", "spinning")];
        quantity(&object, name, &labels).0
    };
    for operation in ["harvest", "invalidate-page"] {
        for lock in ["none", "shared", "exclusive"] {
            for vcpus in [1, 4, 95] {
                assert!(of("operation_rate", operation, lock, vcpus) > 0.0, "{operation} {lock} {vcpus}");
                assert!(of("longest_operation", operation, lock, vcpus) > 0.0, "{operation} {lock} {vcpus}");
            }
        }
        // With so little memory a rate is a bound, and so no figure.
        assert!(output.contains(&format!("| {operation}, none ")) && output.contains("≥"), "{output}");
        assert!(of("longest_fault", operation, "none", 95) < of("longest_fault", operation, "exclusive", 95));
    }
}

#[test]
fn a_check_names_its_seeds_and_how_to_replay_them() {
    let output = assert_ok("scale --check --seconds 1 --seed 7 --quiet");
    assert!(output.starts_with("seeds ") && output.contains(": all oracles held\n"), "{output}");
    assert!(
        output.contains("Seeds from v1:7") && output.contains("slat scale --check --seed v1:N --seconds 1"),
        "{output}"
    );
    let object = results("--check --seconds 1 --seed v1:7");
    let (first, last) = (&object["config"]["first_seed"], object["config"]["last_seed"].as_u64());
    let nr_seeds = quantity(&object, "seeds", &[]).0;
    assert_eq!((first, last), (&7.into(), Some(6 + nr_seeds as u64)));
    assert!(quantity(&object, "checked_accesses", &[]).0 >= 12.0 * 200.0 && quantity(&object, "harvests", &[]).0 > 0.0);
}
