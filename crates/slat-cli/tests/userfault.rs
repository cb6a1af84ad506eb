//! `slat userfault` for its user: exit codes, one clear line for each mistake, the lines of
//! KVM's test, every way of bringing pages, and no process that is left.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{assert_ok, assert_refused, figures, quantity, read, slat, stderr, value};
use serde_json::Value;

/// A part of the error where this machine has no userfaultfd.
const NO_USERFAULTFD: &str = "userfaultfd";

fn file(name: &str) -> PathBuf {
    common::file(&format!("demand_paging_{name}"))
}

/// Runs with `args` and returns the object of `--json` and the output; `None` if this machine lacks
/// the userfaultfd that is asked for.
#[track_caller]
fn paging(name: &str, args: &str) -> Option<(Value, String)> {
    let path = file(&format!("{name}.json"));
    let args = format!("userfault {args} --json {}", path.display());
    let output = slat(&args);
    if output.status.code() == Some(3) && stderr(&output).contains(NO_USERFAULTFD) {
        eprintln!("not checked: {}", stderr(&output));
        return None;
    }
    assert_eq!(output.status.code(), Some(0), "slat {args}: {}", stderr(&output));
    let object = read(&path);
    Some((object, String::from_utf8(output.stdout).unwrap()))
}

#[test]
fn bad_usage_exits_with_2() {
    for (args, what) in [
        ("-v 0", "at least 1"),
        ("-v 2,x", "invalid digit"),
        ("-v 5000 -b 4K", "5000 vCPUs are not between 1 and 4096"),
        ("--uffd missing --copier", "no background copier in mode missing"),
        ("--uffd missing --threads 1", "leave --threads out"),
        ("--exits -b 64K --granularity 2M", "multiple of 2097152"),
        ("--exits -b 4M --granularity 1G", "multiple of 1073741824"),
        ("--exits --granularity 8K", "4K, 2M or 1G"),
        ("--exits --guest-memfd kvm", "-s guest_memfd"),
        ("--source file:/dev/null --contents file:x", "constant:BYTE"),
        ("-b 4095", "multiple of the page size"),
        ("--uffd copy", "missing, minor"),
        ("--uffd minor", "-s shmem"),
        ("--uffd minor --exits -s anonymous_thp", "-s shmem"),
        ("--uffd missing --readers 0", "at least 1"),
        ("--uffd missing --readers 18446744073709551615", "readers of a userfaultfd are not between 1 and 4096"),
        ("--exits -v 18446744073709551615", "vCPUs are not between 1 and 4096"),
        ("--readers 2", "without --uffd"),
        ("--matrix --readers 2", "choose one"),
        ("-s tape", "anonymous_thp"),
        ("-s tape", "guest_memfd"),
        ("--uffd missing -s guest_memfd", "guest_memfd"),
        ("--delivery ring -s shmem", "it needs --exits"),
        ("--exits --delivery ring", "-s shmem"),
        ("--exits --delivery ring --uffd minor -s shmem", "choose one"),
        ("--exits --delivery letter", "exit, ring"),
        ("--resolver cloud", "thread, process"),
        ("--exits --kill-resolver 1", "--delivery ring"),
        ("--exits --delivery ring -s shmem --resolver thread --kill-resolver 1", "--resolver process"),
        ("--delay=-1us", "-1us"),
        ("--delay 5000001us", "must be at most 5s"),
        ("--runs 0", "at least 1"),
        ("--threads 0", "at least 1"),
        ("--exits --threads 1 --cpus 0,0,0,0", "--cpus and --threads"),
        ("-v 3 --cpus 0,1", "3 vCPUs need 3"),
        ("-v 1,2 --cpus 0", "one number of vCPUs"),
        ("--source tape", "file:PATH"),
        ("--source file:", "file:"),
        ("--source tcp:here", "here"),
        ("--format pae", "npt"),
        ("--matrix --exits", "choose one"),
        ("--matrix -s shmem", "choose one"),
        ("--matrix --modes fast", "missing-1r"),
        ("--modes uf --exits", "choose one"),
        ("--modes minor", "add --matrix"),
    ] {
        assert_refused(&format!("userfault {args}"), 2, what);
    }
}

#[test]
fn what_is_refused_leaves_no_file() {
    let path = std::env::temp_dir().join(format!("slat-refused-{}", std::process::id()));
    let at = path.display();
    let args = format!("userfault --exits -b 64K --granularity 2M --create-source {at} --source file:{at}");
    assert_refused(&args, 2, "multiple of 2097152");
    assert!(!path.exists());
}

#[test]
fn what_this_machine_cannot_serve_exits_with_3() {
    assert_refused("userfault -v 1 -b 64K --json /no/such/folder/results.json", 3, "/no/such/folder");
    assert_refused("userfault -v 8 -b 1T", 3, "MiB are available");
    assert_refused("userfault -v 1 -b 64K --cpus 99999", 3, "CPU 99999");
    assert_refused("userfault -v 1 -b 64K --exits --source file:/no/such/file", 3, "/no/such/file");
    assert_refused("userfault -v 1 -b 64K --exits --source unix:/no/such/socket", 3, "/no/such/socket");
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    if free.is_ok_and(|free| free.trim() == "0") {
        assert_refused("userfault -v 1 -b 2M --exits -s anonymous_hugetlb_2mb", 3, "huge pages");
    }
}

#[test]
fn a_run_prints_the_lines_of_the_selftest() {
    let output = assert_ok("userfault -v 2 -b 1M --exits --runs 2");
    for line in [
        "2 vCPUs, 1.00 MiB each (partitioned access), tables: npt, source: pattern:0, runs: 2\n",
        "mode: uf, memory: anonymous\n",
        "Finished creating vCPUs and starting uffd threads\nStarted all vCPUs\nAll vCPU threads joined\n",
        "Total guest execution time:\t0.",
        "Per-vcpu demand paging rate:\t",
        " pgs/sec/vcpu\nOverall demand paging rate:\t",
        " pgs/sec\n",
        "Run 2\n",
        "software CPUs",
        "Verified: 1024 pages",
    ] {
        assert!(output.contains(line), "no '{line}' in:\n{output}");
    }
    assert!(!output.contains("Published"), "{output}");
}

#[test]
fn every_mode_brings_every_page_once() {
    for (args, mode, backing, uffds) in [
        ("-s anonymous", "none", "anonymous", "per-vcpu"),
        ("--single-uffd -s shmem", "none", "shmem", "one"),
        ("--uffd missing --single-uffd", "missing-1r", "anonymous", "one"),
        ("--uffd missing --single-uffd --readers 3", "missing", "anonymous", "one"),
        ("--uffd missing", "missing", "anonymous", "per-vcpu"),
        ("--uffd missing --exits --single-uffd", "missing+uf", "anonymous", "one"),
        ("--uffd missing -s shmem", "missing", "shmem", "per-vcpu"),
        ("--uffd minor -s shmem --single-uffd", "minor-1r", "shmem", "one"),
        ("--uffd minor -s shmem --readers 2", "minor", "shmem", "per-vcpu"),
        ("--uffd minor -s shmem --exits", "minor+uf", "shmem", "per-vcpu"),
        ("--exits", "uf", "anonymous", "per-vcpu"),
        ("--exits -s anonymous_thp", "uf", "anonymous_thp", "per-vcpu"),
        ("--exits -s guest_memfd", "uf", "guest_memfd", "per-vcpu"),
        ("--exits --single-uffd -s shmem", "uf", "shmem", "one"),
        ("--exits -s shmem --delivery ring --resolver thread", "uf-ring", "shmem", "per-vcpu"),
        ("--exits --single-uffd -s shmem --delivery ring", "uf-ring", "shmem", "one"),
    ] {
        let name = args.replace(' ', "_");
        let Some((object, output)) = paging(&name, &format!("-v 3 -b 256K {args}")) else { continue };
        assert_eq!(object["experiment"], "userfault");
        let labels = serde_json::json!({"mode": mode, "vcpus": 3, "backing": backing, "uffds": uffds});
        assert!(object["results"].as_array().unwrap().iter().all(|figure| figure["labels"] == labels), "{args}");
        let (rate, unit) = quantity(&object, "paging_rate", &[]);
        assert!(rate > 0.0 && unit == "1/s", "{args}: {rate} {unit}");
        let (time, unit) = quantity(&object, "total_time", &[]);
        assert!(unit == "s" && (time * rate / 64.0 - 1.0).abs() < 1e-6, "{args}: {time} {unit}, {rate}");
        for quantile in ["fault_p50", "fault_p99"] {
            let (time, unit) = quantity(&object, quantile, &[]);
            assert!(time > 0.0 && unit == "s", "{args}: {quantile} {time} {unit}");
        }
        assert_eq!(quantity(&object, "verified", &[]).0, 192.0, "{args}");
        if mode != "none" {
            assert_eq!(quantity(&object, "filled_for_faults", &[]).0, 192.0, "{args}");
        }
        if mode == "uf" {
            assert_eq!(quantity(&object, "exits", &[]).0, 192.0, "{args}");
        }
        assert!(output.contains(&format!("mode: {mode}, memory: {backing}")), "{args}: {output}");
    }
}

#[test]
fn every_format_and_every_shape_pages() {
    for args in [
        "--format ept --exits",
        "--format stage2 --exits",
        "--format stage2 --uffd missing --exits",
        "--format gstage --exits -s shmem --delivery ring",
        "--format gstage --uffd minor -s shmem",
        "--format gstage-sv39x4 --exits",
        "--format stage2 --exits --log-dirty",
        "--format gstage --exits --log-dirty",
        "--exits -o -v 3",
        "--exits -o -v 3 -s shmem --delivery ring",
        "--uffd missing -o -v 3",
        "--exits --threads 1 -v 5",
        "--exits --threads 2 -v 5 --delay 200us",
        "--exits --cpus 0,0",
        "--exits --copier",
        "--uffd missing --exits --copier",
        "--exits -b 4M --granularity 2M",
        "--exits -b 4M --granularity 2M -s shmem --delivery ring --copier",
        "--exits -s shmem --delivery ring --copier",
        "--exits --log-dirty",
        "--exits --log-dirty -s shmem --delivery ring",
        "--uffd minor --exits -s shmem --log-dirty --format ept",
        "--exits --runs 2 -b 4K",
    ] {
        let vcpus = if args.contains("-v ") { "" } else { "-v 2" };
        let size = if args.contains(" -b ") { "" } else { "-b 128K" };
        paging(&args.replace([' ', ':'], "_"), &format!("{vcpus} {size} {args}"));
    }
}

#[test]
fn pages_come_from_files_and_peers() {
    let path = file("source");
    let _ = fs::remove_file(&path);
    let from_file = format!("file:{}", path.display());
    let create = format!("userfault -v 2 -b 128K --exits --create-source {} --source {from_file}", path.display());
    assert_ok(&create);
    assert_refused(&create, 3, "File exists");
    assert_eq!(fs::metadata(&path).unwrap().len(), 256 << 10);
    for source in [&from_file, "unix", "tcp", "constant:0xab"] {
        for args in
            ["--exits", "--uffd missing", "--exits -s shmem --delivery ring", "--exits --delay 50us --threads 1"]
        {
            let name = format!("{}_{}", &source[..3], args.replace(' ', "_"));
            let Some((object, _)) = paging(&name, &format!("-v 2 -b 128K {args} --source {source}")) else { continue };
            assert_eq!(quantity(&object, "verified", &[]).0, 64.0, "{source} {args}");
        }
    }
    // These pages have other contents.
    assert_refused(
        &format!("userfault -v 1 -b 64K --exits --source {from_file} --contents pattern:7"),
        1,
        "instead of",
    );
    // The last page is not whole.
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len((256 << 10) - 1).unwrap();
    for args in ["--exits", "--exits -s shmem --delivery ring", "--uffd missing"] {
        assert_refused(
            &format!("userfault -v 2 -b 128K {args} --source {from_file}"),
            2,
            "262143 bytes are not whole pages",
        );
    }
}

#[test]
fn pages_come_from_a_peer_that_was_started_by_hand() {
    let mut server = Command::new(env!("CARGO_BIN_EXE_slat"))
        .args(["serve-pages", "tcp:127.0.0.1:0", "--contents", "pattern:9"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("Serving pattern:9 at ").unwrap_or_else(|| panic!("{line}")).to_owned();
    let args = format!("userfault -v 2 -b 64K --exits --contents pattern:9 --source {address}");
    let output = slat(&args);
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    // The peer has ended.
    assert_refused(&args, 3, &address);
}

#[test]
fn the_matrix_has_every_row_of_the_published_tables() {
    let Some((object, output)) = paging("matrix", "--matrix -v 2,3 -b 64K --runs 2") else { return };
    assert_eq!(figures(&object, "paging_rate", &[]).len(), 2 * 16);
    assert_eq!(figures(&object, "rate_vs_best_userfaultfd", &[]).len(), 2 * 16);
    // There are published figures of 2 vCPUs, and none of rings.
    assert_eq!(object["published"].as_array().unwrap().len(), 14);
    assert!(figures(&object, "published_rate", &[]).is_empty());
    let uf = figures(&object, "rate_vs_none", &[]).into_iter().find(|figure| figure["labels"]["mode"] == "uf").unwrap();
    assert!(value(uf) > 0.0 && uf["unit"] == "ratio");
    for text in [
        "anonymous memory, one descriptor\n",
        "shmem memory, one descriptor for each vCPU\n",
        " 2 vCPUs | published | ",
        "160\u{202f}326",
        "180\u{202f}439",
        "| missing+uf",
        "| uf-ring",
        "96 CPUs, real ones",
        "software CPUs",
    ] {
        assert!(output.contains(text), "no '{text}' in:\n{output}");
    }
    let (object, output) = paging("matrix_arm", "--matrix -v 2 -b 64K --runs 1 --format stage2").unwrap();
    assert_eq!(figures(&object, "paging_rate", &[]).len(), 11);
    assert!(output.contains("(December 2024), arm64,") && output.contains("185\u{202f}706"), "{output}");
    let (object, output) = paging("matrix_riscv", "--matrix -v 2 -b 64K --runs 1 --format gstage").unwrap();
    assert_eq!(figures(&object, "paging_rate", &[]).len(), 16);
    assert!(!output.contains("ublished"), "{output}");
    let (object, _) = paging("matrix_some", "--matrix -v 2 -b 64K --runs 1 --modes none,uf").unwrap();
    assert_eq!(figures(&object, "paging_rate", &[]).len(), 6);
}

/// A long run, and the process number of its resolver.
fn slow_run() -> (std::process::Child, u32) {
    let args = "userfault -v 2 -b 64M --exits -s shmem --delivery ring --delay 1s";
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
    let args = "-v 64 -b 512K --exits -s shmem --delivery ring --kill-resolver 10 --delay 20000us";
    let (object, _) = paging("killed", args).expect("no userfaultfd is needed");
    assert_eq!(quantity(&object, "verified", &[]).0, 64.0 * 128.0);
    let (nr_killed, _) = quantity(&object, "resolvers_killed", &[]);
    assert_eq!(nr_killed, 10.0);
    // The sample of the last run alone would have only the few touches that were left.
    assert!(figures(&object, "fault_p50", &[]).is_empty());
    assert!(quantity(&object, "exits", &[]).0 >= 64.0 * 128.0, "those that were interrupted, too");
}
