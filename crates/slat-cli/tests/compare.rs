//! `slat compare` for its user: tables, the object, Markdown, and the exit code.
#![allow(missing_docs)]

mod common;

use std::path::PathBuf;

use common::{assert_refused, slat, stderr};
use serde_json::Value;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn mistakes_are_one_line() {
    assert_refused("compare --only S6", 2, "S5");
    assert_refused("compare --only S1,", 2, "S1");
    assert_refused("compare --runs 3", 2, "--runs");
    assert_refused("compare --json /no/such/folder/results.json", 3, "/no/such/folder");
    assert_refused("compare --markdown /no/such/folder/results.md", 3, "/no/such/folder");
}

#[test]
fn systems_come_with_figures_claims_and_what_was_published() {
    let (json, markdown) = (path("compare.json"), path("compare.md"));
    let output =
        slat(&format!("compare --quick --only s4,S4 --json {} --markdown {}", json.display(), markdown.display()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert_eq!(printed, std::fs::read_to_string(&markdown).unwrap());
    for text in ["# slat compare --quick", "## S4: NUMA", "$ slat split", "2% to 35%", "claims made", "software CPUs"] {
        assert!(printed.contains(text), "no '{text}' in:\n{printed}");
    }
    assert!(!printed.contains("## S1"));

    let object: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!((&object["experiment"], &object["interrupted"]), (&"compare".into(), &false.into()));
    assert_eq!(object["config"]["only"], Value::from(vec!["S4"]));
    assert_eq!(object["claims"]["made"], object["claims"]["held"]);
    let system = &object["systems"][0];
    assert_eq!(system["experiments"][0]["experiment"], "split");
    let comparison = &system["comparisons"][0];
    assert_eq!((&comparison["name"], &comparison["better"]), (&"local_walk_reads".into(), &"more".into()));
    let sides = comparison["sides"].as_array().unwrap();
    let [slat, caller, _policy] = &sides[..] else { panic!("{sides:?}") };
    assert_eq!((&slat["role"], &slat["ratio"], &slat["runs"]), (&"slat".into(), &Value::Null, &5.into()));
    // One node of eight is that of the splitting thread.
    assert_eq!(caller["ratio"], 8.0);
    assert_eq!(caller["claim"]["holds"], true);
    assert!(caller["mean"].as_f64().unwrap() * 8.0 == slat["mean"].as_f64().unwrap());
}
