//! `slat memslots` for its user: exit codes, one clear line for each mistake, the lines of KVM's
//! test, the JSON.
#![allow(missing_docs)]

mod common;

use common::{assert_ok, assert_refused, figure, formats, measured, quantity, samples};

const TESTS: [&str; 6] = ["map", "unmap", "unmap chunked", "move active area", "move inactive area", "RW"];

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("--first-test 6", "6 is not in 0..=5"),
        ("--last-test -1", "-1 is not in 0..=5"),
        ("--first-test 3 --last-test 2", "the first test, 3, comes after the last, 2"),
        ("--duration 0s", "must not be zero"),
        ("--runs 0", "at least 1"),
        ("--slots 0", "from 1 to 32763"),
        ("--slots -2", "from 1 to 32763"),
        ("--slots 32764", "from 1 to 32763"),
        ("--slots x", "invalid digit"),
        ("--slots 1", "test 4, move inactive area, needs at least 2 slots"),
        ("--timeout 0s", "must not be zero"),
        ("--lock some", "exclusive"),
        ("--format pae", "npt"),
    ] {
        assert_refused(&format!("memslots {args}"), 2, what);
    }
}

#[test]
fn a_file_that_cannot_be_written_is_found_before_the_work() {
    assert_refused("memslots --duration 1000s --json /no/such/folder/results.json", 3, "/no/such/folder");
}

#[test]
fn every_test_runs_with_all_checks_and_prints_the_lines_of_the_selftest() {
    let output = assert_ok("memslots --duration 1s --slots 700 --extra-checks --verbose --format ept --timeout 60s");
    for test in TESTS {
        let line = format!("Testing {test} performance with 1 runs, 1s each\nTest took 0.");
        assert!(output.contains(&line), "no '{line}' in:\n{output}");
    }
    for line in [
        "131088 pages in 700 slots of 187 pages",
        "s for slot setup + ",
        "s all iterations\nDone ",
        " iterations, avg ",
        "Best runtime result was ",
        "s per iteration (with ",
        "Best slot setup time for the whole test area was 0.",
        "words verified",
        "software CPUs",
        "Verified: ",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
}

#[test]
fn slots_of_any_number_can_be_moved() {
    // Wholly in the only memslot; a memslot smaller than the window; the maximum of memslots.
    for args in [
        "--first-test 3 --last-test 3 --slots 1",
        "--first-test 3 --last-test 4 --slots 16386",
        "--first-test 3 --last-test 3 --slots -1",
    ] {
        let output = assert_ok(&format!("memslots --duration 1s --timeout 60s {args}"));
        assert!(output.contains("Testing move active area performance"), "{args}:\n{output}");
    }
}

#[test]
fn tests_pass_on_every_format() {
    for format in formats() {
        let output = assert_ok(&format!(
            "memslots --duration 1s --slots 64 --timeout 60s --first-test 3 --last-test 3 --format {format}"
        ));
        assert!(output.contains(format), "{output}");
        assert!(output.contains("Verified: "), "{format}:\n{output}");
    }
}

#[test]
fn json_has_every_figure_for_every_test_and_locking() {
    let args = "--first-test 2 --last-test 3 --duration 1s --slots 64 --timeout 60s --lock all";
    let (object, _) = measured("memslots", &format!("memslots {args}"));
    assert_eq!(object["experiment"], "memslots");
    assert_eq!(object["config"]["slots"], 64);
    assert!(object["host"]["flush_method"].is_string());
    let one = |name: &str, test: &str, lock: &str| {
        let labels = [("test", test), ("lock", lock)];
        // One run.
        assert_eq!(samples(figure(&object, name, &labels)).len(), 1);
        quantity(&object, name, &labels)
    };
    for lock in ["exclusive", "shared", "none"] {
        for test in ["unmap chunked", "move active area"] {
            let (rate, unit) = one("iterations_per_second", test, lock);
            let (iteration, _) = one("iteration", test, lock);
            assert!(unit == "1/s" && (rate * iteration - 1.0).abs() < 1e-6, "{test}, {lock}: {rate}, {iteration}");
            let (setup, unit) = one("slot_setup", test, lock);
            assert!(setup > 0.0 && unit == "s");
            assert!(one("host_call", test, lock).0 > 0.0);
            assert!(one("verified", test, lock).0 > 0.0);
            assert!(one("retries", test, lock).0 >= 0.0);
        }
        // Each half of 128 MiB is filled anew, and discarded in chunks of 2 MiB, each with a flush.
        assert!(one("faults", "unmap chunked", lock).0 >= 32768.0);
        assert_eq!(one("host_calls", "unmap chunked", lock).0, 64.0);
        assert!(one("flushes", "unmap chunked", lock).0 >= 64.0);
        assert_eq!(one("mmio_exits", "unmap chunked", lock).0, 0.0);
        // Away and back.
        assert_eq!(one("host_calls", "move active area", lock).0, 2.0);
        assert!(one("flushes", "move active area", lock).0 >= 2.0);
    }
}
