//! `slat parallel-faults` for its user: exit codes, one clear line for each mistake, the JSON, and
//! the oracle over shapes of machines.
#![allow(missing_docs)]

mod common;

use common::{
    assert_ok, assert_refused, figures, formats, measured, quantity, samples, slat_without_kvm, stderr, value,
};
use serde_json::Value;
use slat::format::Format;

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("parallel-faults -v 0", "at least 1"),
        ("parallel-faults -b 0", "must not be zero"),
        ("parallel-faults -b 4095", "multiple of the page size"),
        ("parallel-faults -b 1T1", "invalid digit"),
        ("parallel-faults -b 99999999T", "too large"),
        ("parallel-faults -b 16T -v 2", "are more than"),
        ("parallel-faults --iterations 0", "0 is not in 1.."),
        ("parallel-faults --runs 0", "at least 1"),
        ("parallel-faults --slots 0", "at least 1"),
        ("parallel-faults -v 1 -b 8K --slots 3", "cannot be split evenly into 3 slots"),
        ("parallel-faults -v 1 -b 8K --slots 4", "cannot be split evenly into 4 slots"),
        ("parallel-faults -v 1 -b 160M --slots 40960", "40960 slots are more than 32763"),
        ("parallel-faults -v 5000 -b 4K", "5000 vCPUs are more than 4096"),
        ("parallel-faults -v -1", "invalid digit"),
        ("parallel-faults --iterations 2000000", "2000000"),
        ("parallel-faults --slots 5000000000", "too many"),
        ("parallel-faults --write-percent 101", "101"),
        ("parallel-faults --write-percent -1", "-1"),
        ("parallel-faults -s tape", "anonymous_thp"),
        ("parallel-faults --lock some", "exclusive"),
        ("parallel-faults --format pae", "npt"),
        ("parallel-faults --paging 3d", "2d"),
        ("parallel-faults --paging shadow --format ept", "--paging shadow needs --format npt"),
        (
            "parallel-faults --paging shadow --tracking dirty-bit",
            "--paging shadow needs --tracking write-protect or ring",
        ),
        ("parallel-faults --paging shadow --tracking pml", "nothing sets its dirty bits, for pml"),
        ("numa-split --paging shadow", "[possible values: flat, 2d]"),
        ("numa-split --lock all", "[possible values: exclusive, shared, none]"),
        ("parallel-faults --ring-entries 512", "--ring-entries needs --tracking ring"),
        ("parallel-faults --tracking magic", "write-protect, dirty-bit, pml, ring"),
        ("parallel-faults --tracking pml", "--tracking pml needs --format ept"),
        ("parallel-faults --tracking pml --format npt --get-clears", "npt"),
        ("parallel-faults --tracking pml --format stage2", "no page-modification logging with stage2 tables"),
        ("parallel-faults --tracking pml --format gstage", "no page-modification logging with gstage tables"),
        ("parallel-faults --tracking dirty-bit --format stage2", "no dirty bits in stage2 tables"),
        ("parallel-faults --format gstage-sv66x4", "gstage-sv39x4, gstage-sv57x4"),
        ("parallel-faults -b 1M --tracking ring --ring-entries 1000", "1000 entries"),
        ("parallel-faults -b 1M --tracking ring --ring-entries 0", "0 entries"),
        ("parallel-faults --tracking ring --huge-pages mark-whole", "--huge-pages split"),
        ("parallel-faults --protection eager", "leaf-by-leaf"),
        ("parallel-faults --huge-pages keep", "mark-whole"),
        ("parallel-faults --split never", "eager, lazy"),
        ("parallel-faults -v 3 --cpus 0,1", "3 vCPUs need 3"),
        ("parallel-faults -v 1 --cpus 0,1,2", "1 vCPUs need 1"),
        ("parallel-faults --cpus x", "invalid digit"),
        ("parallel-faults -v 1 -b 3M -s anonymous_hugetlb_2mb", "page size"),
        ("parallel-faults --peer maybe", "auto, kvm, none"),
        ("parallel-faults --peer kvm --tracking ring", "--tracking ring is for the engine only"),
        ("parallel-faults --peer kvm --tracking dirty-bit", "--peer none leaves KVM out"),
        ("parallel-faults --peer kvm --huge-pages mark-whole", "KVM logs pages of 4 KiB"),
        ("parallel-faults --peer kvm --write-percent 99", "--write-percent"),
        ("parallel-faults --peer kvm --random-access", "--random-access"),
        ("parallel-faults --peer kvm --run-while-disabling", "--run-while-disabling"),
        ("parallel-faults --peer kvm -v 2 -b 33G", "64 GiB in all"),
        ("numa-split --peer auto", "unexpected argument"),
        ("parallel-faults --no-such-option", "unexpected argument"),
        ("no-such-command", "unrecognized subcommand"),
    ] {
        assert_refused(args, 2, what);
    }
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    assert_refused("parallel-faults -v 8 -b 1T", 3, "MiB are available");
    assert_refused("parallel-faults -v 1 -b 4K --cpus 99999", 3, "CPU 99999");
    assert_refused("parallel-faults -v 1 -b 1M --runs 1 --json /no/such/folder/results.json", 3, "/no/such/folder");
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages");
    if free.is_ok_and(|free| free.trim() == "0") {
        assert_refused("parallel-faults -v 1 -b 1G -s anonymous_hugetlb_1gb", 3, "huge pages");
    }
}

#[test]
fn one_locking_prints_the_lines_of_the_selftest() {
    let output = assert_ok("parallel-faults -v 2 -b 1M --iterations 3 --runs 1 --lock none");
    for line in [
        "Test iterations: 3",
        "Populate memory time: 0.",
        "Enabling dirty logging time: 0.",
        "Iteration 1 dirty memory time: 0.",
        "Iteration 3 get dirty log time: 0.",
        "Iteration 1 clear dirty log time: 0.",
        "Disabling dirty logging time: 0.",
        "Get dirty log over 3 iterations took 0.",
        "Clear dirty log over 3 iterations took 0.",
        "dirty pages: write-protect (lazy), manual protect: initially-set, huge pages: split",
        "2 vCPUs",
        "software CPUs",
        "Verified: ",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
    let output = assert_ok("parallel-faults -v 2 -b 1M --iterations 3 --runs 1 --lock none --get-clears");
    assert!(output.contains("Get dirty log over 3 iterations") && !output.contains("Clear"), "{output}");
}

#[test]
fn json_has_every_figure_for_every_locking() {
    let (object, _) = measured("dirty_log", "parallel-faults -v 2 -b 4M --iterations 2 --runs 2");
    assert_eq!(object["experiment"], "parallel-faults");
    assert_eq!(object["config"]["vcpus"], 2);
    assert_eq!(object["config"]["bytes"], 4 << 20);
    assert_eq!(object["config"]["tracking"], "write-protect");
    assert_eq!(object["config"]["protection"], "lazy");
    assert_eq!(object["config"]["manual_protect"], "initially-set");
    assert_eq!(object["config"]["huge_pages"], "split");
    assert_eq!(object["config"]["split"], "eager");
    assert!(object["host"]["kernel"].is_string());
    let figure = |name: &str, lock: &str| quantity(&object, name, &[("lock", lock)]);
    for lock in ["exclusive", "shared", "none"] {
        for name in [
            "populate_memory",
            "enable_dirty_logging",
            "dirty_memory",
            "get_dirty_log",
            "clear_dirty_log",
            "clear_dirty_log_total",
            "disable_dirty_logging",
        ] {
            let (value, unit) = figure(name, lock);
            assert!(value > 0.0 && unit == "s", "{name} for {lock}: {value} {unit}");
        }
        for name in ["guest_stall_p50", "guest_stall_p99", "resolve_time", "engine_time"] {
            assert_eq!(figure(name, lock).1, "s");
        }
        let pages = 2.0 * 1024.0;
        // Each page faults when it is populated, and once in each round but the first: then nothing
        // is write-protected yet.
        let (faults, unit) = figure("faults", lock);
        assert!(faults >= 2.0 * pages && unit == "count", "{faults} faults for {lock}");
        // Each clearing.
        assert!(figure("flushes", lock).0 >= 2.0);
        assert_eq!(figure("clear_dirty_log_speed_vs_exclusive", lock).1, "ratio");
        assert!(figure("tables_protected", lock).0 >= 2.0 * 4.0, "each clearing, each directory entry");
        assert_eq!(figure("retries", lock).1, "count");
        // Nothing was huge.
        assert_eq!((figure("splits", lock).0, figure("recoveries", lock).0), (0.0, 0.0));
        let (tables, unit) = figure("tables_bytes", lock);
        assert!(tables >= 4096.0 * 7.0 && unit == "B", "{tables} bytes of tables for {lock}");
    }
}

#[test]
fn kvm_has_a_column_after_those_of_the_locks() {
    for args in [
        "-v 2 -b 1M --iterations 3",
        "-v 3 -b 20K --slots 5 -o",
        "-v 2 -b 1M --get-clears -s shmem",
        "-v 2 -b 4M -s anonymous_thp --format ept --paging 2d",
        "-v 1 -b 4K --paging shadow",
        "-v 8 -b 64K -o --check",
    ] {
        let (object, printed) = measured("dirty_log_kvm", &format!("parallel-faults --runs 2 --peer auto {args}"));
        assert_eq!(object["config"]["peer"], "auto");
        let all = object["results"].as_array().unwrap();
        let of_kvm: Vec<&Value> = all.iter().filter(|figure| figure["labels"]["lock"] == "kvm").collect();
        if object["host"]["kvm"].is_null() {
            // This machine has none that works.
            assert!(printed.contains("Not measured: KVM of this machine: ") && of_kvm.is_empty(), "{printed}");
            continue;
        }
        assert!(of_kvm.iter().all(|figure| {
            let on = figure["labels"]["measured_on"].as_str().unwrap();
            on.starts_with("hardware: KVM of this machine (")
        }));
        let mut others = all.iter().filter(|figure| figure["labels"]["lock"] != "kvm");
        assert!(others.all(|figure| figure["labels"]["measured_on"].is_null()));
        let value = |name: &str| {
            let found = figures(&object, name, &[("lock", "kvm")]);
            assert!(found.len() <= 1, "{args}: {name}");
            found.first().map(|figure| value(figure))
        };
        for name in
            ["populate_memory", "enable_dirty_logging", "dirty_memory", "get_dirty_log", "disable_dirty_logging"]
        {
            assert!(value(name).is_some_and(|seconds| seconds > 0.0), "{args}: {name}");
            assert!(value(&format!("{name}_speed_vs_exclusive")).is_some_and(|speed| speed > 0.0), "{args}: {name}");
        }
        assert_eq!(value("clear_dirty_log").is_some(), !args.contains("--get-clears"), "{args}");
        // The engine's counters are not KVM's.
        assert!(value("faults").is_none() && value("guest_stall_p50").is_none(), "{args}");
        // Two runs, and their rounds.
        let nr_rounds = if args.contains("--iterations 3") { 6 } else { 4 };
        for (name, nr) in [("dirty_memory_total", 2), ("dirty_memory", nr_rounds)] {
            assert!(
                of_kvm.iter().any(|figure| figure["name"] == name && samples(figure).len() == nr),
                "{args}: {name}"
            );
        }
        let nr_logs = if args.contains("--iterations 3") { 2 * 4 } else { 2 * 3 };
        assert!(printed.contains(&format!("kvm: {nr_logs} logs had exactly the pages that were written")), "{printed}");
        assert!(printed.contains("kvm: measured on hardware: KVM of this machine"), "{printed}");
    }
}

#[test]
fn what_kvm_cannot_do_is_measured_without_it() {
    let printed = assert_ok("parallel-faults -v 2 -b 1M --runs 1 --lock none --peer auto --write-percent 50");
    assert!(printed.contains("Not measured: KVM of this machine: its guest cannot do --write-percent"), "{printed}");
    assert!(!printed.contains(" kvm |"), "{printed}");
    let printed = assert_ok("parallel-faults -v 2 -b 1M --runs 1 --lock none");
    assert!(!printed.contains("Not measured") && !printed.contains(" kvm |"), "{printed}");
}

#[test]
fn without_a_kvm_the_engine_is_measured_and_the_output_says_so() {
    let output = slat_without_kvm("parallel-faults -v 2 -b 1M --runs 1 --lock none --peer auto");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("Not measured: KVM of this machine: "), "{printed}");
    assert!(printed.contains("Disabling dirty logging time: 0."), "{printed}");
    let output = slat_without_kvm("parallel-faults -v 2 -b 1M --runs 1 --lock none --peer kvm");
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("there is no KVM to measure: "), "{}", stderr(&output));
    assert!(output.stdout.is_empty());
}

#[test]
fn json_has_no_clearing_where_getting_clears() {
    let args = "-v 1 -b 4M --runs 1 --lock none --get-clears --tracking dirty-bit --huge-pages mark-whole";
    let (object, _) = measured("dirty_log_get_clears", &format!("parallel-faults {args}"));
    assert_eq!(object["config"]["tracking"], "dirty-bit");
    assert_eq!(object["config"]["protection"], Value::Null);
    assert_eq!(object["config"]["manual_protect"], "disabled");
    assert_eq!(object["config"]["huge_pages"], "mark-whole");
    let names: Vec<&str> =
        object["results"].as_array().unwrap().iter().map(|figure| figure["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"get_dirty_log") && !names.iter().any(|name| name.starts_with("clear")), "{names:?}");
}

fn the_oracle_holds(format: &str, tracking: &str) {
    for protection in ["lazy", "leaf-by-leaf"] {
        for get_clears in ["", "--get-clears"] {
            for shape in [
                "-v 2 -b 3M --write-percent 40 --random-access --slots 3",
                "-v 2 -b 4M -s anonymous_thp --huge-pages mark-whole -o",
            ] {
                let args = format!(
                    "parallel-faults --iterations 2 --runs 1 --lock none --check --format {format} --tracking {tracking} \
                     --protection {protection} {get_clears} {shape}"
                );
                let output = assert_ok(&args);
                assert!(output.contains("every harvest agreed"), "{args}:\n{output}");
            }
        }
    }
}

#[test]
fn the_oracle_holds_for_every_way_to_log() {
    slat::for_each_format!(F => {
        the_oracle_holds(F::NAME, "write-protect");
        if F::HAS_DIRTY_BIT {
            the_oracle_holds(F::NAME, "dirty-bit");
        }
        if F::HAS_MODIFICATION_LOG {
            the_oracle_holds(F::NAME, "pml");
        }
    });
}

#[test]
fn the_oracle_holds_for_rings_and_a_reset_continues_full_rings() {
    for format in formats() {
        for protection in ["lazy", "leaf-by-leaf"] {
            for get_clears in ["", "--get-clears"] {
                for shape in [
                    "-v 2 -b 3M --write-percent 40 --random-access --slots 3",
                    "-v 1 -b 4M --ring-entries 256",
                    "-v 4 -b 2M -o --run-while-disabling --ring-entries 512",
                ] {
                    let args = format!(
                        "parallel-faults --iterations 2 --runs 1 --lock none --check --format {format} --tracking ring \
                         --protection {protection} {get_clears} {shape}"
                    );
                    let output = assert_ok(&args);
                    assert!(output.contains("every harvest agreed"), "{args}:\n{output}");
                    let exits = output.lines().find(|line| line.contains("Exits (ring full)")).unwrap();
                    assert!(!shape.contains(" 256") || !exits.contains(" 0 "), "{args}: {exits}");
                }
            }
        }
    }
}

#[test]
fn the_oracle_holds_for_shadow_tables() {
    for args in [
        "-v 1 -b 4M",
        "-v 2 -b 4M -o --protection leaf-by-leaf",
        "-v 4 -b 2M -o --get-clears --write-percent 50 --random-access --slots 4",
        "-v 2 -b 4M -s anonymous_thp --run-while-disabling --write-percent 30",
        "-v 2 -b 4M -s anonymous_thp --huge-pages mark-whole -o",
        "-v 2 -b 2M --tracking ring --ring-entries 512 --run-while-disabling",
        "-v 64 -b 256K -o --lock none",
    ] {
        let output = assert_ok(&format!("parallel-faults --iterations 2 --runs 1 --check --paging shadow {args}"));
        assert!(output.contains("every harvest agreed") && output.contains("paging: shadow"), "{args}:\n{output}");
        assert!(output.contains("103.1 s") && output.contains("85.4 s"), "{args}:\n{output}");
    }
}

#[test]
fn json_has_the_figures_of_shadow_tables() {
    let results = |paging: &str| {
        measured("dirty_log_shadow", &format!("parallel-faults -v 2 -b 4M --runs 1 --lock none --paging {paging}")).0
    };
    let shadow = results("shadow");
    let figure = |name: &str| quantity(&shadow, name, &[("paging", "shadow")]).0;
    let nr_pages = 2048.0;
    // When it is populated, and in each round but the first.
    assert!(figure("page_faults") >= 2.0 * nr_pages);
    assert!(figure("entries_synced") >= nr_pages && figure("shadow_leaves") >= nr_pages);
    assert!(figure("shadow_tables") >= 4.0 + 3.0 && figure("shadow_evictions") == 0.0);
    assert!(figure("dirty_memory") > 0.0);
    for (option, name) in [("flat", "flat"), ("second-stage", "flat"), ("2d", "2d")] {
        let object = results(option);
        let mut figures = object["results"].as_array().unwrap().iter();
        assert!(figures.all(|figure| figure["labels"]["paging"] == name && figure["name"] != "shadow_leaves"));
    }
}

#[test]
fn the_oracle_holds_for_shapes_of_machines() {
    for args in [
        "-v 1 -b 4M",
        "-v 2 -b 4M --format ept",
        "-v 2 -b 4M -o --paging 2d",
        "-v 8 -b 1M --slots 4 --format ept --paging 2d",
        "-v 2 -b 4M --format stage2 --paging 2d -s anonymous_thp",
        "-v 4 -b 4M -o --format stage2 --run-while-disabling -s anonymous_thp",
        "-v 4 -b 4M -o --format gstage --paging 2d -s anonymous_thp",
        "-v 8 -b 1M --slots 4 --format gstage-sv39x4 --paging 2d",
        "-v 8 -b 512K -o --write-percent 50 --random-access",
        "-v 64 -b 256K -o --lock none",
        "-v 64 -b 256K --paging 2d --lock shared",
        "-v 3 -b 20K --slots 5 --run-while-disabling",
        "-v 2 -b 4M -s anonymous_thp --run-while-disabling --write-percent 30",
        "-v 2 -b 4M -s anonymous_thp --run-while-disabling --get-clears --split lazy",
        "-v 2 -b 2M -s shmem --seed 7",
        "-v 1 -b 4K --write-percent 0",
    ] {
        let output = assert_ok(&format!("parallel-faults --iterations 2 --runs 1 --check {args}"));
        assert!(output.contains("every harvest agreed"), "{args}:\n{output}");
    }
}
