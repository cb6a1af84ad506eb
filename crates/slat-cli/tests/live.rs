//! `--live` for its user: lines without a terminal, rows on a terminal.
#![allow(missing_docs)]

mod common;

use std::process::Output;

use common::{on_terminal, slat, stderr};

/// The figure after `name` in a line.
fn figure(line: &str, name: &str) -> f64 {
    let text = line.split_once(name).unwrap_or_else(|| panic!("no {name} in {line}")).1.trim_start();
    let end = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    text[..end].parse().unwrap_or_else(|_| panic!("no figure behind {name} in {line}"))
}

#[test]
fn without_a_terminal_there_are_lines() {
    let output = slat("parallel-faults --live -v 2 -b 4M --iterations 1 --runs 2 --lock none");
    let shown = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{shown}");
    assert!(!shown.contains(['\x1b', '\r']), "{shown}");
    let lines: Vec<&str> = shown.lines().collect();
    let begins: Vec<&&str> = lines.iter().filter(|line| line.contains(" s  run ")).collect();
    let [warm_up, first, second] = begins[..] else { panic!("{shown}") };
    assert!(warm_up.ends_with("run 1 of 3: warm-up"), "{shown}");
    assert!(first.ends_with("run 2 of 3: lock none") && second.ends_with("run 3 of 3: lock none"), "{shown}");
    // However short a run is, its end is shown.
    let rates: Vec<&&str> = lines.iter().filter(|line| line.contains("faults ")).collect();
    assert!(rates.len() >= 3 && lines.len() == begins.len() + rates.len(), "{shown}");
    assert!(rates.iter().any(|line| figure(line, "faults") > 0.0), "{shown}");
    assert!(rates.iter().any(|line| figure(line, "tables") > 2.0), "{shown}");
    assert!(rates.iter().all(|line| line.contains("stall p99") && line.contains("dirty pages")), "{shown}");
    // The results are the same as without `--live`.
    let without = slat("parallel-faults -v 2 -b 4M --iterations 1 --runs 2 --lock none");
    assert_eq!(stderr(&without), "");
    let names = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter_map(|line| line.split_once('|').map(|(name, _)| name.to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(names(&output), names(&without));
}

#[test]
fn every_long_experiment_has_a_live_view() {
    for args in [
        "numa-split -v 2 -b 4M --iterations 1 --runs 1 --nodes 2 --placement caller-node",
        "userfault -v 2 -b 1M --runs 1 --exits",
        "stress --duration 1s -v 2",
        "shadow -v 1 --steps 2000 --runs 1 --strategy root-cache",
        "memslots --last-test 0 --duration 1s --slots 16",
        "aging -v 1 -b 48M --runs 1 --access-tracking faults",
    ] {
        let output = slat(&format!("{args} --live"));
        let shown = stderr(&output);
        assert_eq!(output.status.code(), Some(0), "{args}: {shown}");
        let rates = |line: &&str| line.contains("faults ") && line.contains("stall p50") && line.contains("tables");
        assert!(shown.lines().any(|line| rates(&line)), "{args}: {shown}");
        assert_eq!(shown.contains("shadow tables"), args.starts_with("shadow"), "{args}: {shown}");
        assert_eq!(shown.contains("tables, node 0: "), args.starts_with("numa-split"), "{args}: {shown}");
    }
}

#[test]
fn a_terminal_has_rows_that_are_cleared_at_the_end() {
    for columns in [1, 20, 80] {
        let args = "aging --live -v 1 -b 48M --runs 1 --access-tracking faults";
        let Some(text) = on_terminal("xterm", columns, args) else { return };
        assert_eq!(text.contains("stall p50"), columns >= 20, "{columns} columns: {text}");
        assert_eq!(text.contains("lock p99"), columns >= 80, "{columns} columns: {text}");
        // Only the report remains: before it, lines were cleared.
        let (before, end) = text.rsplit_once('\x1b').unwrap_or_else(|| panic!("the cursor moves: {text}"));
        assert!(before.ends_with("\x1b[2K"), "{text}");
        assert!(end.contains("Populating memory") && !end.contains("stall p50"), "{end}");
    }
}

#[test]
fn a_terminal_that_cannot_move_its_cursor_has_lines() {
    let Some(text) = on_terminal("dumb", 80, "aging --live -v 1 -b 48M --runs 1 --access-tracking faults") else {
        return;
    };
    assert!(!text.contains('\x1b') && text.contains("run 1 of 1: ") && text.contains("stall p50"), "{text}");
}
