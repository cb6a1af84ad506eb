//! The program as an ordinary process, with little memory.
#![allow(missing_docs)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn run(arguments: &str) -> Output {
    run_in(Path::new(env!("CARGO_TARGET_TMPDIR")), arguments)
}

/// Runs with its files in `folder`.
fn run_in(folder: &Path, arguments: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat-guest-init"));
    command.arg(format!("slat.files={}", folder.display())).args(arguments.split_whitespace()).output().unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn all_phases_run_and_everything_is_verified() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("guest-init-phases");
    std::fs::create_dir_all(&folder).unwrap();
    let output = run_in(&folder, "--no-hypercalls slat.rounds=3 slat.pages=300 slat.seed=5");
    let text = text(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.lines().all(|line| line.starts_with("guest: ")), "{text}");
    for expected in
        ["CPUs online: ", "seed 5, 300 pages for each CPU", "round 2: ", " pages, 3 rounds, all checksums hold"]
    {
        assert!(text.contains(expected), "no '{expected}' in:\n{text}");
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "it left files");
}

#[test]
fn it_ends_in_time() {
    let output = run("--no-hypercalls slat.rounds=1000000 slat.seconds=1 slat.pages=10");
    assert!(output.status.success() && text(&output).contains("all checksums hold"));
}

#[test]
fn without_a_hypervisor_it_says_so() {
    let output = run("slat.pages=10");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).ends_with("guest: FAILED: no slat answers hypercalls here; boot with slat.hypercalls=off\n"),
        "{}",
        text(&output)
    );
}

#[test]
fn a_wrong_option_is_named() {
    let output = run("--no-hypercalls slat.rounds=none");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("slat.rounds=none is no whole number"), "{}", text(&output));
}

#[test]
fn a_folder_that_is_missing_is_reported_by_its_worker() {
    let output = run("--no-hypercalls slat.pages=10 slat.files=/no/such/folder");
    assert_eq!(output.status.code(), Some(1));
    let text = text(&output);
    assert!(
        text.contains("guest: cannot write a file: ") && text.contains("guest: FAILED: the worker of CPU "),
        "{text}"
    );
}
