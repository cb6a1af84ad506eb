//! `slat compare` for its user: tables, the object, Markdown, and the exit code.
#![allow(missing_docs)]

mod common;

use std::path::PathBuf;

use common::{assert_form, assert_refused, read, samples, slat, stderr};
use serde_json::Value;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn mistakes_are_one_line() {
    assert_refused("compare --only paging", 2, "dirty-log");
    assert_refused("compare --only shadow,", 2, "parallel-faults");
    assert_refused("compare --runs 3", 2, "--runs");
    assert_refused("compare --json /no/such/folder/results.json", 3, "/no/such/folder");
}

#[test]
fn systems_come_with_figures_claims_and_what_was_published() {
    let json = path("compare.json");
    let output = slat(&format!("compare --quick --only Numa-Split,numa-split --json {}", json.display()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    for text in [
        "# slat compare --quick",
        "## numa-split: NUMA",
        "$ slat numa-split",
        "2% to 35%",
        "claims made",
        "software CPUs",
        "$ slat scale --system numa-split -b 2M",
        "416 modelled vCPUs on 8 nodes, 2 MiB each",
        "1.02–1.54×",
        "error",
    ] {
        assert!(printed.contains(text), "no '{text}' in:\n{printed}");
    }
    assert!(!printed.contains("## parallel-faults"));

    let object: Value = read(&json);
    assert_form(&object);
    assert_eq!((&object["experiment"], &object["interrupted"]), (&"compare".into(), &false.into()));
    assert_eq!(object["config"]["only"], Value::from(vec!["numa-split"]));
    let claims = &object["compared"]["claims"];
    assert_eq!(claims["made"], claims["held"]);
    let system = &object["compared"]["systems"][0];
    assert_eq!(system["experiments"][0]["experiment"], "numa-split");
    let comparison = &system["comparisons"][0];
    assert_eq!((&comparison["name"], &comparison["better"]), (&"local_walk_reads".into(), &"more".into()));
    let sides = comparison["sides"].as_array().unwrap();
    let [slat, caller, _policy] = &sides[..] else { panic!("{sides:?}") };
    assert_eq!((&slat["role"], &slat["ratio"]), (&"slat".into(), &Value::Null));
    // One node of eight is that of the splitting thread.
    let of_eighth: Vec<f64> = samples(caller).iter().map(|reads| reads * 8.0).collect();
    assert_eq!((samples(slat).len(), samples(slat)), (5, of_eighth));
    assert_eq!(caller["ratio"], serde_json::json!({ "value": 8.0, "interval": [8.0, 8.0] }));
    let predicted = system["comparisons"].as_array().unwrap().last().unwrap();
    assert_eq!((&predicted["name"], &predicted["sides"][0]["role"]), (&"model_dirty_memory".into(), &"model".into()));
    let gain = predicted["sides"][1]["ratio"]["value"].as_f64().unwrap();
    assert!((1.02..1.54).contains(&gain), "{gain}");
    assert_eq!(predicted["sides"][1]["measured_on"], "modelled CPUs");
    assert_eq!(caller["claim"], serde_json::json!({ "above": 1.0, "verdict": "held" }));
}
