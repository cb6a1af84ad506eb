//! `slat demand-paging` for its user: exit codes, one clear line for each mistake, the lines of
//! KVM's test, every way of bringing pages, and no process that is left.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{assert_ok, assert_refused, slat, stderr};
use serde_json::Value;

/// A part of the error where this machine has no userfaultfd.
const NO_USERFAULTFD: &str = "userfaultfd";

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("demand_paging_{name}"))
}

/// Runs with `args` and returns the object of `--json` and the output; `None` if this machine lacks
/// the userfaultfd that is asked for.
#[track_caller]
fn paging(name: &str, args: &str) -> Option<(Value, String)> {
    let path = file(&format!("{name}.json"));
    let args = format!("demand-paging {args} --json {}", path.display());
    let output = slat(&args);
    if output.status.code() == Some(3) && stderr(&output).contains(NO_USERFAULTFD) {
        eprintln!("not checked: {}", stderr(&output));
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "slat {args}: {}", stderr(&output));
    let object = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    Some((object, String::from_utf8(output.stdout).unwrap()))
}

/// The figures `name`, with their labels.
fn figures<'a>(object: &'a Value, name: &str) -> Vec<&'a Value> {
    object["results"].as_array().unwrap().iter().filter(|figure| figure["name"] == name).collect()
}

/// The only figure `name`.
#[track_caller]
fn figure(object: &Value, name: &str) -> (f64, String) {
    let found = figures(object, name);
    assert_eq!(found.len(), 1, "{name}: {found:?}");
    (found[0]["value"].as_f64().unwrap(), found[0]["unit"].as_str().unwrap().to_owned())
}

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("-v 0", "at least 1"),
        ("-v 2,x", "invalid digit"),
        ("-v 5000 -b 4K", "5000 vCPUs are not between 1 and 4096"),
        ("-u MISSING --copier", "no background copier in mode missing"),
        ("-u MISSING --threads 1", "leave --threads out"),
        ("-k -b 64K --granularity 2M", "multiple of 2097152"),
        ("-k -b 4M --granularity 1G", "4K, 2M"),
        ("-k --guest-memfd kvm", "-s guest_memfd"),
        ("--source file:/dev/null --contents file:x", "constant:BYTE"),
        ("-b 4095", "multiple of the page size"),
        ("-u COPY", "MISSING, MINOR"),
        ("-u MINOR", "-s shmem"),
        ("-u MINOR -k -s anonymous_thp", "-s shmem"),
        ("-u MISSING -r 0", "at least 1"),
        ("-u MISSING -r 18446744073709551615", "readers of a userfaultfd are not between 1 and 4096"),
        ("-v 18446744073709551615", "vCPUs are not between 1 and 4096"),
        ("-r 2", "without -u"),
        ("--matrix -r 2", "not -r"),
        ("-s tape", "anonymous_thp"),
        ("-s tape", "guest_memfd"),
        ("-u MISSING -s guest_memfd", "guest_memfd"),
        ("--delivery ring -s shmem", "it needs -k"),
        ("-k --delivery ring", "-s shmem"),
        ("-k --delivery ring -u MINOR -s shmem", "choose one"),
        ("-k --delivery letter", "exit, ring"),
        ("--resolver cloud", "thread, process"),
        ("-k --kill-resolver 1", "--delivery ring"),
        ("-k --delivery ring -s shmem --resolver thread --kill-resolver 1", "--resolver process"),
        ("-d -1", "-1"),
        ("-d 5000001", "5000001"),
        ("-i 0", "at least 1"),
        ("--threads 0", "at least 1"),
        ("--threads 1 -c 0,0,0,0", "--pin and --threads"),
        ("-v 3 -c 0,1", "3 vCPUs need 3"),
        ("-v 1,2 -c 0", "one number of vCPUs"),
        ("--source tape", "file:PATH"),
        ("--source file:", "file:"),
        ("--source tcp:here", "here"),
        ("--format pae", "npt"),
        ("--matrix -k", "cannot be used with"),
        ("--matrix -s shmem", "cannot be used with"),
        ("--matrix --modes fast", "missing-1r"),
        ("--modes uf", "rows of --matrix"),
    ] {
        assert_refused(&format!("demand-paging {args}"), 2, what);
    }
}

#[test]
fn what_is_refused_leaves_no_file() {
    let path = std::env::temp_dir().join(format!("slat-refused-{}", std::process::id()));
    let at = path.display();
    let args = format!("demand-paging -k -b 64K --granularity 2M --create-source {at} --source file:{at}");
    assert_refused(&args, 2, "multiple of 2097152");
    assert!(!path.exists());
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    assert_refused("demand-paging -v 1 -b 64K --json /no/such/folder/results.json", 3, "/no/such/folder");
    assert_refused("demand-paging -v 8 -b 1T", 3, "MiB are available");
    assert_refused("demand-paging -v 1 -b 64K -c 99999", 3, "CPU 99999");
    assert_refused("demand-paging -v 1 -b 64K -k --source file:/no/such/file", 3, "/no/such/file");
    assert_refused("demand-paging -v 1 -b 64K -k --source unix:/no/such/socket", 3, "/no/such/socket");
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if free.is_ok_and(|free| free.trim() == "0") {
        assert_refused("demand-paging -v 1 -b 2M -k -s anonymous_hugetlb_2mb", 3, "huge pages");
    }
}

#[test]
fn a_run_prints_the_lines_of_the_selftest() {
    let output = assert_ok("demand-paging -v 2 -b 1M -k");
    for line in [
        "2 vCPUs, 1.00 MiB each (partitioned access), tables: npt, source: pattern:0, runs: 1\n",
        "mode: uf, memory: anonymous\n",
        "Finished creating vCPUs and starting uffd threads\nStarted all vCPUs\nAll vCPU threads joined\n",
        "Total guest execution time:\t0.",
        "Per-vcpu demand paging rate:\t",
        " pgs/sec/vcpu\nOverall demand paging rate:\t",
        " pgs/sec\n",
        "software CPUs",
        "Verified: 512 pages",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
}

#[test]
fn every_mode_brings_every_page_once() {
    for (args, mode, backing, uffds) in [
        ("", "none", "anonymous", "per-vcpu"),
        ("-a -s shmem", "none", "shmem", "one"),
        ("-u MISSING -a", "missing-1r", "anonymous", "one"),
        ("-u MISSING -a -r 3", "missing", "anonymous", "one"),
        ("-u MISSING", "missing", "anonymous", "per-vcpu"),
        ("-u MISSING -k -a", "missing+uf", "anonymous", "one"),
        ("-u MISSING -s shmem", "missing", "shmem", "per-vcpu"),
        ("-u MINOR -s shmem -a", "minor-1r", "shmem", "one"),
        ("-u MINOR -s shmem -r 2", "minor", "shmem", "per-vcpu"),
        ("-u MINOR -s shmem -k", "minor+uf", "shmem", "per-vcpu"),
        ("-k", "uf", "anonymous", "per-vcpu"),
        ("-k -s anonymous_thp", "uf", "anonymous_thp", "per-vcpu"),
        ("-k -s guest_memfd", "uf", "guest_memfd", "per-vcpu"),
        ("-k -a -s shmem", "uf", "shmem", "one"),
        ("-k -s shmem --delivery ring --resolver thread", "uf-ring", "shmem", "per-vcpu"),
        ("-k -a -s shmem --delivery ring", "uf-ring", "shmem", "one"),
    ] {
        let name = args.replace(' ', "_");
        let Some((object, output)) = paging(&name, &format!("-v 3 -b 256K {args}")) else { continue };
        assert_eq!(object["experiment"], "demand-paging");
        let labels = serde_json::json!({"mode": mode, "vcpus": 3, "backing": backing, "uffds": uffds});
        assert!(object["results"].as_array().unwrap().iter().all(|figure| figure["labels"] == labels), "{args}");
        let (rate, unit) = figure(&object, "paging_rate");
        assert!(rate > 0.0 && unit == "pages/s", "{args}: {rate} {unit}");
        let (time, unit) = figure(&object, "total_time");
        assert!(unit == "s" && (time * rate / 64.0 - 1.0).abs() < 1e-6, "{args}: {time} {unit}, {rate}");
        for quantile in ["fault_p50", "fault_p99"] {
            let (time, unit) = figure(&object, quantile);
            assert!(time > 0.0 && unit == "ns", "{args}: {quantile} {time} {unit}");
        }
        assert_eq!(figure(&object, "verified").0, 192.0, "{args}");
        if mode != "none" {
            assert_eq!(figure(&object, "filled_for_faults").0, 192.0, "{args}");
        }
        if mode == "uf" {
            assert_eq!(figure(&object, "exits").0, 192.0, "{args}");
        }
        assert!(output.contains(&format!("mode: {mode}, memory: {backing}")), "{args}: {output}");
    }
}

#[test]
fn every_format_and_every_shape_pages() {
    for args in [
        "--format ept -k",
        "--format stage2 -k",
        "--format stage2 -u MISSING -k",
        "--format gstage -k -s shmem --delivery ring",
        "--format gstage -u MINOR -s shmem",
        "--format gstage-sv39x4 -k",
        "--format stage2 -k --log-dirty",
        "--format gstage -k --log-dirty",
        "-k -o -v 3",
        "-k -o -v 3 -s shmem --delivery ring",
        "-u MISSING -o -v 3",
        "-k --threads 1 -v 5",
        "-k --threads 2 -v 5 -d 200",
        "-k -c 0,0",
        "-k --copier",
        "-u MISSING -k --copier",
        "-k -b 4M --granularity 2M",
        "-k -b 4M --granularity 2M -s shmem --delivery ring --copier",
        "-k -s shmem --delivery ring --copier",
        "-k --log-dirty",
        "-k --log-dirty -s shmem --delivery ring",
        "-u MINOR -k -s shmem --log-dirty --format ept",
        "-k -i 2 -b 4K",
    ] {
        let vcpus = if args.contains("-v") { "" } else { "-v 2" };
        let size = if args.contains("-b") { "" } else { "-b 128K" };
        paging(&args.replace([' ', ':'], "_"), &format!("{vcpus} {size} {args}"));
    }
}

#[test]
fn pages_come_from_files_and_peers() {
    let path = file("source");
    let _ = fs::remove_file(&path);
    let from_file = format!("file:{}", path.display());
    let create = format!("demand-paging -v 2 -b 128K -k --create-source {} --source {from_file}", path.display());
    assert_ok(&create);
    assert_refused(&create, 3, "File exists");
    assert_eq!(fs::metadata(&path).unwrap().len(), 256 << 10);
    for source in [&from_file, "unix", "tcp", "constant:0xab"] {
        for args in ["-k", "-u MISSING", "-k -s shmem --delivery ring", "-k -d 50 --threads 1"] {
            let name = format!("{}_{}", &source[..3], args.replace(' ', "_"));
            let Some((object, _)) = paging(&name, &format!("-v 2 -b 128K {args} --source {source}")) else { continue };
            assert_eq!(figure(&object, "verified").0, 64.0, "{source} {args}");
        }
    }
    // These pages have other contents.
    assert_refused(&format!("demand-paging -v 1 -b 64K -k --source {from_file} --contents pattern:7"), 1, "instead of");
    // The last page is not whole.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len((256 << 10) - 1).unwrap();
    for args in ["-k", "-k -s shmem --delivery ring", "-u MISSING"] {
        assert_refused(&format!("demand-paging -v 2 -b 128K {args} --source {from_file}"), 2, "0x3ffff bytes");
    }
}

#[test]
fn pages_come_from_a_peer_that_was_started_by_hand() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_slat"))
        .args(["demand-paging", "--serve", "tcp:127.0.0.1:0", "--contents", "pattern:9"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("Serving pattern:9 at ").unwrap_or_else(|| panic!("{line}")).to_owned();
    let args = format!("demand-paging -v 2 -b 64K -k --contents pattern:9 --source {address}");
    let output = slat(&args);
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    // The peer has ended.
    assert_refused(&args, 3, &address);
}

#[test]
fn the_matrix_has_every_row_of_the_published_tables() {
    let Some((object, output)) = paging("matrix", "--matrix -v 2,3 -b 64K -i 2") else { return };
    assert_eq!(figures(&object, "paging_rate").len(), 2 * 16);
    assert_eq!(figures(&object, "rate_vs_best_userfaultfd").len(), 2 * 16);
    // There are published figures of 2 vCPUs, and none of rings.
    assert_eq!(figures(&object, "published_rate").len(), 14);
    let uf = figures(&object, "rate_vs_none").into_iter().find(|figure| figure["labels"]["mode"] == "uf").unwrap();
    assert!(uf["value"].as_f64().unwrap() > 0.0 && uf["unit"] == "ratio");
    for text in [
        "anonymous memory, one descriptor\n",
        "shmem memory, one descriptor for each vCPU\n",
        "| 2 vCPUs | published, x86 | 3 vCPUs |",
        "160326",
        "180439",
        "| missing+uf",
        "| uf-ring",
        "96 CPUs, real ones",
        "software CPUs",
    ] {
        assert!(output.contains(text), "no '{text}' in:\n{output}");
    }
    let (object, output) = paging("matrix_arm", "--matrix -v 2 -b 64K -i 1 --format stage2").unwrap();
    assert_eq!(figures(&object, "paging_rate").len(), 11);
    assert!(output.contains("published, arm64") && output.contains("185706"), "{output}");
    let (object, output) = paging("matrix_riscv", "--matrix -v 2 -b 64K -i 1 --format gstage").unwrap();
    assert_eq!(figures(&object, "paging_rate").len(), 16);
    assert!(!output.contains("ublished"), "{output}");
    let (object, _) = paging("matrix_some", "--matrix -v 2 -b 64K -i 1 --modes none,uf").unwrap();
    assert_eq!(figures(&object, "paging_rate").len(), 6);
}

/// A long run, and the process number of its resolver.
fn slow_run() -> (std::process::Child, u32) {
    let args = "demand-paging -v 2 -b 64M -k -s shmem --delivery ring -d 1000000";
    let mut slat = Command::new(env!("CARGO_BIN_EXE_slat"))
        .args(args.split_whitespace())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let threads = format!("/proc/{}/task", slat.id());
    let resolver = eventually(|| {
        if let Some(status) = slat.try_wait().unwrap() {
            let mut said = String::new();
            slat.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("it has ended by itself, {status}: {said}");
        }
        // It is a child of the thread that runs the experiment.
        let children = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("children")).ok();
        let text: String = fs::read_dir(&threads).ok()?.flatten().filter_map(children).collect();
        let child = text.split_whitespace().next()?.parse().ok()?;
        // It has executed the new program.
        let command = fs::read(format!("/proc/{child}/cmdline")).ok()?;
        String::from_utf8_lossy(&command).contains("resolver").then_some(child)
    });
    if resolver.is_none() {
        slat.kill().unwrap();
        slat.wait().unwrap();
    }
    (slat, resolver.expect("no resolver was started"))
}

/// The result of `look` as soon as it has one; `None` after ten minutes, which is enough for any
/// machine.
fn eventually<T>(mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(600) {
        if let Some(found) = look() {
            return Some(found);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

#[test]
fn no_resolver_outlives_its_parent() {
    let (mut slat, resolver) = slow_run();
    // SIGKILL leaves it no time to clean up.
    slat.kill().unwrap();
    slat.wait().unwrap();
    eventually(|| (!is_alive(resolver)).then_some(())).expect("the resolver outlives its parent");
}

/// Whether a process runs: a zombie does not.
fn is_alive(process: u32) -> bool {
    let state = |text: String| text.rsplit(')').next().unwrap_or_default().trim().chars().next();
    let stat = Path::new("/proc").join(process.to_string()).join("stat");
    fs::read_to_string(stat).ok().and_then(state).is_some_and(|state| state != 'Z' && state != 'X')
}

#[test]
fn the_death_of_a_resolver_is_an_error_and_no_hang() {
    let (mut slat, resolver) = slow_run();
    let killed = Command::new("kill").args(["-KILL", &resolver.to_string()]).status().unwrap();
    assert!(killed.success());
    if eventually(|| slat.try_wait().unwrap()).is_none() {
        slat.kill().unwrap();
    }
    let output = slat.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("resolver"), "{}", stderr(&output));
    assert_eq!(stderr(&output).lines().count(), 1, "{}", stderr(&output));
}

#[test]
fn other_resolvers_replace_those_that_are_killed() {
    let args = "-v 64 -b 512K -k -s shmem --delivery ring --kill-resolver 10 -d 20000";
    let (object, _) = paging("killed", args).expect("no userfaultfd is needed");
    assert_eq!(figure(&object, "verified").0, 64.0 * 128.0);
    let (nr_killed, _) = figure(&object, "resolvers_killed");
    assert_eq!(nr_killed, 10.0);
    // The sample of the last run alone would have only the few touches that were left.
    assert!(figures(&object, "fault_p50").is_empty());
    assert!(figure(&object, "exits").0 >= 64.0 * 128.0, "those that were interrupted, too");
}
