//! `slat aging` for its user: exit codes, one clear line for each mistake, the lines of KVM's test,
//! the JSON.
#![allow(missing_docs)]

mod common;

use common::{assert_ok, assert_refused, measured, quantity};

#[test]
fn mistakes_are_one_line() {
    for (args, what) in [
        ("aging -v 0", "at least 1"),
        ("aging -v 5000 -b 4K", "5000 vCPUs are more than 4096"),
        ("aging -b 0", "must not be zero"),
        ("aging -b 4095", "multiple of the page size"),
        ("aging -b 16T -v 2", "are more than"),
        ("aging -s tape", "anonymous_thp"),
        ("aging -v 1 -b 3M -s anonymous_hugetlb_2mb", "page size"),
        ("aging --still-idle 7", "auto, warn, fail"),
        ("aging --access-tracking none", "accessed-bit"),
        ("aging --pass some", "range"),
        ("aging --runs 0", "at least 1"),
        ("aging --lock some", "exclusive"),
        ("aging --format pae", "npt"),
    ] {
        assert_refused(args, 2, what);
    }
    assert_refused("aging -v 8 -b 1T", 3, "MiB are available");
    assert_refused("aging --json /no/such/folder/results.json", 3, "/no/such/folder");
}

#[test]
fn one_series_prints_the_lines_of_the_selftest() {
    let output = assert_ok("aging -v 2 -b 48M --runs 1 --access-tracking faults");
    for line in [
        "Using one call for each slot for aging",
        "Populating memory             : ",
        "Writing to populated memory   : ",
        "Reading from populated memory : ",
        "Mark memory idle              : ",
        "Writing to idle memory        : ",
        "Reading from idle memory      : ",
        "software CPUs",
        "Verified: 49152 reads found what was written; marking idle flushed nothing and left no page young.",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
    assert_eq!(output.lines().filter(|line| line.starts_with("Mark memory idle  ")).count(), 2);
    assert!(!output.contains("WARNING"), "{output}");
}

#[test]
fn nearly_all_pages_are_found_young_for_shapes_of_machines() {
    for args in [
        "-v 2 -b 48M --pass page",
        "-v 2 -b 24M -o --format ept --lock all",
        "-v 8 -b 44M --format ept --lock shared -s shmem",
        "-v 2 -b 48M --format stage2",
        "-v 2 -b 48M --format gstage",
        "-v 2 -b 24M -o --format gstage-sv39x4",
    ] {
        let output = assert_ok(&format!("aging --still-idle fail --runs 1 {args}"));
        assert!(!output.contains("WARNING"), "{args}:\n{output}");
    }
}

#[test]
fn accesses_that_a_tlb_hides_are_a_warning_or_a_failure() {
    // 256 pages, all of which stay in the vCPU's TLB.
    let output = assert_ok("aging -v 1 -b 1M --runs 1");
    let warning = "after \"Writing to idle memory\": Too many pages still idle (256 out of 256)";
    assert!(output.contains(warning) && output.contains("Give the vCPUs more memory"), "{output}");
    assert!(assert_ok("aging -v 1 -b 1M --runs 1 --still-idle warn").contains("WARNING"));
    assert_refused("aging -v 1 -b 1M --runs 1 --still-idle fail", 1, "too many pages still idle");
}

#[test]
fn json_has_every_phase_for_both_trackings() {
    let (object, _) = measured("aging", "aging -v 1 -b 48M --runs 2");
    assert_eq!(object["experiment"], "aging");
    assert_eq!(object["config"]["pass"], "range");
    assert!(object["host"]["kernel"].is_string());
    let figure = |name: &str, tracking: &str| quantity(&object, name, &[("tracking", tracking), ("lock", "none")]);
    let pages = 48.0 * 256.0;
    for tracking in ["accessed-bit", "faults"] {
        for phase in [
            "populate_memory",
            "write_populated_memory",
            "read_populated_memory",
            "mark_populated_idle",
            "write_idle_memory",
            "mark_written_idle",
            "read_idle_memory",
        ] {
            let (value, unit) = figure(phase, tracking);
            assert!(value > 0.0 && unit == "s", "{phase} by {tracking}: {value} {unit}");
            let (page, unit) = figure(&format!("{phase}_page"), tracking);
            assert!((page * pages / value - 1.0).abs() < 1e-9 && unit == "s", "{phase} by {tracking}: {page} {unit}");
            assert_eq!(figure(&format!("{phase}_flushes"), tracking).0, 0.0);
        }
        assert_eq!(figure("populate_memory_faults", tracking).0, pages);
        assert_eq!(figure("mark_written_idle_faults", tracking).0, 0.0);
        assert!(figure("still_idle", tracking).0 <= pages / 10.0);
        assert_eq!(figure("pages", tracking).0, pages);
    }
    // The cost of each tracking: nothing, or a fault for nearly every page.
    assert_eq!(figure("write_idle_memory_faults", "accessed-bit").0, 0.0);
    let faults = figure("write_idle_memory_faults", "faults").0;
    assert!((pages * 0.9..=pages).contains(&faults), "{faults} faults");
}
