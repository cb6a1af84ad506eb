//! Ctrl-C, in any command: it ends soon and cleanly, with what was measured so far.
#![allow(missing_docs)]

mod common;

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::stderr;
use serde_json::Value;

/// A second, and some more for a machine on which all tests run at once.
const SOON: Duration = Duration::from_secs(4);

fn start(args: &str) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.args(args.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Sends `signal` after `delay`, and returns what came out in the end.
#[track_caller]
fn interrupt(mut child: Child, signal: &str, delay: Duration) -> Output {
    thread::sleep(delay);
    assert!(child.try_wait().unwrap().is_none(), "it has ended already");
    let killed = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let sent = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert!(sent.elapsed() < SOON, "it took {:?}", sent.elapsed());
    output
}

#[test]
fn every_experiment_ends_with_what_was_measured_so_far() {
    let commands = [
        "dirty-log -v 2 -b 1M --runs 1000000",
        "split -v 2 -b 2M --runs 1000000",
        "demand-paging -v 2 -b 64K -i 1000000",
        "demand-paging -v 2 -b 64K -i 1000000 -k --delivery ring -s shmem",
        "get-dirty-log -b 4M --peer none --in-a-row 1000 --runs 1000000",
        "get-dirty-log -b 4M --peer none --workload framebuffer --runs 1000000",
        "get-dirty-log -b 4M --workload migration --runs 1000000",
        "memslots -l 1 -r 1000000 -s 16",
        "aging -v 1 -b 48M --runs 1000000",
        "cr3 --steps 200 --runs 1000000",
        "peers --pages 512 -t 1 --runs 1000000",
        "stress --seconds 1000",
    ];
    // All at once: it is about their ends, not about what they measure.
    thread::scope(|scope| {
        for (number, args) in commands.into_iter().enumerate() {
            scope.spawn(move || ends_with_what_was_measured(number, args));
        }
    });
}

fn ends_with_what_was_measured(number: usize, args: &str) {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("interrupted-{number}.json"));
    let child = start(&format!("{args} --json {}", path.display()));
    let output = interrupt(child, "-INT", Duration::from_secs(9));
    assert_eq!(output.status.code(), Some(130), "slat {args}: {}", stderr(&output));
    assert!(stderr(&output).contains("interrupted: what is above"), "slat {args}: {}", stderr(&output));
    assert!(!output.stdout.is_empty(), "slat {args}");
    let object: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(object["interrupted"], true, "slat {args}");
    assert!(!object["results"].as_array().unwrap().is_empty(), "slat {args}");
    assert!(object["command"].as_str().unwrap().starts_with("slat "), "slat {args}");
}

#[test]
fn before_anything_was_measured_no_file_is_left() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("nothing.json");
    let child = start(&format!("demand-paging -v 1 -b 64M -k -d 100000 --json {}", path.display()));
    let output = interrupt(child, "-TERM", Duration::from_secs(1));
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(stderr(&output), "slat: interrupted before anything was measured\n");
    assert!(!path.exists());
}

#[test]
fn a_server_takes_its_socket_away() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("interrupted.socket");
    let child = start(&format!("demand-paging --serve unix:{}", path.display()));
    let output = interrupt(child, "-INT", Duration::from_secs(1));
    assert_eq!(output.status.code(), Some(130));
    assert!(String::from_utf8(output.stdout).unwrap().starts_with("Serving "));
    assert!(!path.exists());
}

#[test]
fn a_comparison_has_the_part_that_was_measured() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("interrupted-compare.json");
    let child = start(&format!("compare --only S4 --json {}", path.display()));
    let output = interrupt(child, "-INT", Duration::from_secs(8));
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    let object: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&object["experiment"], &object["interrupted"]), (&"compare".into(), &true.into()));
    assert!(!object["systems"][0]["comparisons"].as_array().unwrap().is_empty());
    assert!(String::from_utf8(output.stdout).unwrap().contains("## S4"));
}
