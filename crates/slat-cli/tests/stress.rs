//! `slat stress` for its user: exit codes, its output, and that it ends in time.
#![allow(missing_docs)]

mod common;

use common::{assert_ok, assert_refused, formats, measured, quantity};
use serde_json::Value;

/// The result of `run` for so many seconds, of which a busy machine needs more; or what is missing.
fn in_time<T>(mut run: impl FnMut(u32) -> Result<T, String>) -> T {
    let mut missing = String::new();
    // Two minutes in all.
    for power in 0..=6 {
        match run(1 << power) {
            Ok(found) => return found,
            Err(lacks) => missing = lacks,
        }
    }
    panic!("not in 64 seconds: {missing}")
}

#[test]
fn everything_is_done_and_verified() {
    let object = in_time(|seconds| {
        let (object, output) = measured("stress", &format!("stress --duration {seconds}s --seed 7"));
        for line in ["Stress of 8 vCPUs", "seed 7", "Pages discarded", "Reads of the guests", "Faults", "Verified: "] {
            assert!(output.contains(line), "no '{line}' in:\n{output}");
        }
        let missing: Vec<&str> = EVERYTHING.into_iter().filter(|name| figure(&object, name) <= 0.0).collect();
        if missing.is_empty() { Ok(object) } else { Err(missing.join(", ")) }
    });
    assert_eq!(object["experiment"], "stress");
    assert_eq!(object["config"]["seed"], 7);
    assert_eq!(object["config"]["lock"], "all");
    // Each turn has a machine, and at its end all its frames are free.
    assert!(figure(&object, "turns") >= 1.0);
    assert_eq!(figure(&object, "frame_accounts_zero"), figure(&object, "turns"));
}

const EVERYTHING: [&str; 21] = [
    "pages_discarded",
    "pages_moved",
    "pages_protected",
    "pages_swapped_out",
    "pages_swapped_in",
    "invalidations_without_change",
    "slots_created",
    "slots_moved",
    "slots_deleted",
    "harvests",
    "reads_verified",
    "reads_beside_verified",
    "exits_verified",
    "poison_intact",
    "snapshots_verified",
    "harvests_exact",
    "agings_exact",
    "ranges_split",
    "ranges_recovered",
    "faults",
    "flushes",
];

fn figure(object: &Value, name: &str) -> f64 {
    quantity(object, name, &[]).0
}

#[test]
fn options_restrict_the_turns() {
    let output = assert_ok(
        "stress --duration 1s -v 1 --lock none --format ept --access-tracking faults --seed 18446744073709551615",
    );
    assert!(output.contains("1 turns, 1 combinations"), "{output}");
    let output = assert_ok("stress --duration 1s -v 40 --lock shared --format npt");
    assert!(output.contains("Stress of 40 vCPUs"), "{output}");
    let turns_of = |format: &str, options: &str, combinations: &str| {
        in_time(|seconds| {
            let output = assert_ok(&format!("stress --duration {seconds}s -v 3 --verbose --format {format} {options}"));
            assert!(output.contains(&format!(": {format}, ")), "{output}");
            // The number of turns depends on the machine's speed.
            if output.contains(combinations) { Ok(()) } else { Err(format!("{combinations} in:\n{output}")) }
        });
    };
    for format in formats() {
        turns_of(format, "--lock none", " 2 combinations");
    }
    turns_of("ept", "", " 6 combinations");
}

#[test]
fn bad_usage_exits_with_2_and_one_line() {
    for (args, what) in [
        ("stress --duration 0s", "must not be zero"),
        ("stress --duration=-1s", "write it as 50us or 10s"),
        ("stress --duration 1s -v 0", "at least 1"),
        ("stress --duration 1s -v 5000", "5000 vCPUs are more than 4096"),
        ("stress --lock some", "exclusive"),
        ("stress --format pae", "npt"),
        ("stress --access-tracking guess", "faults"),
        ("stress --seed x", "invalid digit"),
        ("stress 3", "unexpected argument"),
    ] {
        assert_refused(args, 2, what);
    }
}

#[test]
fn a_file_that_cannot_be_written_exits_with_3() {
    assert_refused("stress --duration 1s --json /no/such/folder/results.json", 3, "/no/such/folder");
}

#[test]
fn a_seed_determines_the_plan() {
    let plan = |seconds: u32, seed: u32| {
        let output = assert_ok(&format!("stress --duration {seconds}s -v 2 --verbose --seed {seed}"));
        output.lines().filter(|line| line.starts_with("turn ")).map(str::to_owned).collect::<Vec<_>>()
    };
    in_time(|seconds| {
        let (first, again, other) = (plan(seconds, 5), plan(seconds, 5), plan(seconds, 6));
        // The number of turns depends on the machine's speed.
        let nr_turns = first.len().min(again.len()).min(other.len());
        assert_eq!(first[..nr_turns], again[..nr_turns]);
        if nr_turns < 2 {
            return Err(format!("a second turn of each; there were {}, {}, {}", first.len(), again.len(), other.len()));
        }
        assert_ne!(first[..nr_turns], other[..nr_turns]);
        Ok(())
    });
}
