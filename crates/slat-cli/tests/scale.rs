//! `slat scale` for its user: exit codes, one clear line for each mistake, the tables, the JSON.
#![allow(missing_docs)]

mod common;

use std::collections::BTreeSet;
use std::fs;

use common::{assert_form, assert_ok, assert_refused, file, read, slat, stderr, value};
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
    let lacks_one = write("scale_lacks_one.toml", &built_in.replace("hit = 1.5", ""));
    let negative = write("scale_negative.toml", &built_in.replace("hit = 1.5", "hit = -1.5"));
    for (args, what) in [
        ("--cpus 0", "'0' for '--cpus <N,...>': must be at least 1"),
        ("--cpus 1,x", "'x' for '--cpus"),
        ("--cpus 2,2", "--cpus has 2 twice"),
        ("--cpus 1,417", "--cpus 417: the topology '416 CPUs, 8 nodes' has 416 CPUs"),
        ("--cpus 17 --topology 1x16", "--cpus 17: the topology '16 CPUs, 1 node' has 16 CPUs"),
        ("--topology /no/such/file", "topology /no/such/file: "),
        (&format!("--cpus 1 --topology {hole}"), "there are 3 CPUs, and none has the number 2"),
        (&format!("--cpus 1 --topology {no_toml}"), "at line 3, column 8: invalid type: integer `3`"),
        ("--parameters /no/such/file", "parameters /no/such/file: "),
        (&format!("--cpus 1 --parameters {lacks_one}"), "missing field `hit`"),
        (&format!("--cpus 1 --parameters {negative}"), "-1.5 is no time in nanoseconds"),
        ("--bytes 5000", "multiple of the page size"),
        ("--cpus 1 --bytes 1T", "--bytes 1099511627776: the memory of all vCPUs is more than 512 GiB"),
        ("--rounds 0", "0 is not in 1..=1000"),
        ("--system shadow", "[possible values: parallel-faults, all]"),
        ("--seed x", "'x' for '--seed"),
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

#[test]
fn two_runs_of_one_command_are_the_same_and_another_seed_is_another_run() {
    let first = results("--cpus 1,2 --bytes 64K");
    let again = results("--cpus 1,2 --bytes 64K");
    assert_eq!(hashes(&first), hashes(&again));
    assert_eq!((&first["results"], &first["config"]), (&again["results"], &again["config"]));
    // The prediction has four runs, and each of the three curves three locks.
    assert_eq!(hashes(&first).len(), 4 + 3 * 3 * 2);
    assert!(hashes(&first).iter().all(|hash| hash.len() == 18 && hash.starts_with("0x")), "{first}");
    assert_eq!(first["host"]["measured_on"], "modelled CPUs");
    let config = &first["config"];
    assert_eq!((&config["topology"], &config["bytes"]), (&"built-in".into(), &65536.into()));
    assert_eq!((&config["iterations"], &config["seed"]), (&2.into(), &1.into()));
    assert_eq!(config["runs"][0]["topology"], "96 CPUs, 2 nodes");
    assert!(config["runs"][0].get("hot_lines").is_none());

    let figures = first["results"].as_array().unwrap();
    let found = |name: &str, with: &[(&str, Value)]| -> Vec<&Value> {
        let fits = |figure: &&Value| {
            figure["name"] == name && with.iter().all(|(label, value)| figure["labels"][label] == *value)
        };
        figures.iter().filter(fits).collect()
    };
    for lock in ["none", "shared", "exclusive"] {
        for (access, around) in [("partitioned", "host"), ("partitioned", "engine"), ("overlapping", "host")] {
            for cpus in [1, 2] {
                let with = [
                    ("hypervisor", "slat".into()),
                    ("lock", lock.into()),
                    ("access", access.into()),
                    ("around", around.into()),
                    ("cpus", cpus.into()),
                ];
                let rates = found("populate_rate", &with);
                assert!(rates.len() == 1 && value(rates[0]) > 0.0, "{with:?}: {rates:?}");
                assert_eq!((&rates[0]["unit"], &rates[0]["better"]), (&"1/s".into(), &"more".into()));
                let times = found("populate_memory", &with);
                assert!(times.len() == 1 && times[0]["unit"] == "s", "{with:?}: {times:?}");
                // 16 pages for each vCPU, or 64 in all.
                let nr_pages = if access == "partitioned" { 16 * cpus } else { 64 };
                let product = value(rates[0]) * value(times[0]);
                assert!((product / f64::from(nr_pages) - 1.0).abs() < 1e-9, "{with:?}: {product} pages");
            }
        }
    }
    // Each published figure stands beside a predicted one.
    let published = first["published"].as_array().unwrap();
    assert_eq!(published.len(), 20);
    for of in published {
        let beside = figures.iter().filter(|figure| figure["name"] == of["name"] && figure["labels"] == of["labels"]);
        assert_eq!(beside.count(), 1, "{of}");
    }
    let lines = found("hot_line_wait", &[("cpus", 2.into()), ("lock", "none".into()), ("around", "engine".into())]);
    assert!((1..=10).contains(&lines.len()), "{lines:?}");

    // When vCPUs begin is random, which a run with one vCPU shows too.
    let other = results("--cpus 1,2 --bytes 64K --seed 2");
    assert!(hashes(&first).iter().zip(hashes(&other)).all(|(first, other)| *first != other), "{other}");
}

#[test]
fn a_report_has_the_rates_by_the_number_of_cpus() {
    let [json, page] = ["scale_report.json", "scale_report.html"].map(file);
    assert_ok(&format!("scale --cpus 1,2 --bytes 16K --trace --json {}", json.display()));
    let object = read(&json);
    let hot = &object["config"]["runs"][0]["hot_places"];
    assert!(hot.as_array().is_some_and(|places| !places.is_empty()), "{hot}");
    assert_ok(&format!("report {} -o {}", json.display(), page.display()));
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("Populate rate") && page.contains("slat scale --cpus 1,2"), "{page}");
    assert!(page.contains("iterations 2") && !page.contains("trace_hash"), "{page}");
}

#[test]
fn the_tables_have_what_was_published_and_a_row_for_each_number_of_cpus() {
    let topology = file("scale_three.toml");
    fs::write(&topology, "name = 'three'\n[[node]]\ncpus = '0,2'\n[[node]]\ncpus = '1'\n").unwrap();
    let output = assert_ok(&format!("scale --cpus 3,1 --bytes 16K --trace --topology {}", topology.display()));
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
