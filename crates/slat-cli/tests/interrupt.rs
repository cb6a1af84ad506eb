//! Ctrl-C in any command: the command ends soon and cleanly, with what was measured so far.
#![allow(missing_docs)]

mod common;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use common::{file, read};
use serde_json::Value;

/// A command whose experiment stops for ever when it has handed over the `hold_after`th outcome (0:
/// before it begins). So it cannot end before it is interrupted, however fast the machine is. If it
/// ends, the interruption did not wait for the experiment.
struct Held {
    child: Child,
    stderr: BufReader<ChildStderr>,
    stdout: Option<JoinHandle<String>>,
    first_line: Receiver<String>,
}

/// The longest time that a command takes to end, for any machine.
const LONGEST_END: Duration = Duration::from_secs(120);

/// The output of a command.
struct Output {
    status: ExitStatus,
    stdout: String,
    /// The standard error after the interruption.
    stderr: String,
}

impl Held {
    fn start(args: &str, hold_after: u32) -> Held {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
        command.env("SLAT_TEST_HOLD_AFTER", hold_after.to_string());
        command.args(args.split_whitespace()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut pipe = BufReader::new(child.stdout.take().unwrap());
        let (sender, first_line) = mpsc::channel();
        // On another thread: the command must not wait for a reader.
        let stdout = thread::spawn(move || {
            let mut text = String::new();
            pipe.read_line(&mut text).unwrap();
            // A test may not wait for it.
            let _ = sender.send(text.clone());
            pipe.read_to_string(&mut text).unwrap();
            text
        });
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Held { child, stderr, stdout: Some(stdout), first_line }
    }

    /// Sends `signal` when the experiment has stopped, and returns the output.
    #[track_caller]
    fn interrupt(mut self, signal: &str) -> Output {
        let mut said = String::new();
        while !said.ends_with("slat: held\n") {
            assert_ne!(self.stderr.read_line(&mut said).unwrap(), 0, "it has ended by itself: {said}");
        }
        self.send(signal)
    }

    #[track_caller]
    fn send(mut self, signal: &str) -> Output {
        let killed = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        let sent = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            // Dropping `self` kills it.
            assert!(sent.elapsed() < LONGEST_END, "it goes on for {LONGEST_END:?} after {signal}");
            thread::sleep(Duration::from_millis(5));
        };
        let mut stderr = String::new();
        self.stderr.read_to_string(&mut stderr).unwrap();
        Output { status, stdout: self.stdout.take().unwrap().join().unwrap(), stderr }
    }
}

/// No command outlives its test, whatever failed.
impl Drop for Held {
    fn drop(&mut self) {
        // SIGKILL; it may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn every_experiment_ends_with_what_was_measured_so_far() {
    let commands = [
        "parallel-faults -v 2 -b 1M --runs 1000000",
        "numa-split -v 2 -b 2M --runs 1000000",
        "userfault -v 2 -b 64K --runs 1000000 --modes none",
        "userfault -v 2 -b 64K --runs 1000000 --exits --delivery ring -s shmem",
        "dirty-log -b 4M --peer none --in-a-row 1000 --runs 1000000",
        "dirty-log -b 4M --peer none --workload framebuffer --runs 1000000",
        "dirty-log -b 4M --workload migration --runs 1000000",
        "memslots --duration 1s --runs 1000000 --slots 16",
        "aging -v 1 -b 48M --runs 1000000",
        "shadow --steps 200 --runs 1000000",
        "scale --cpus 1,2 -b 16K",
        "stress --duration 1000s",
    ];
    // All at once: the test is about their ends, not about their figures.
    thread::scope(|scope| {
        for (number, args) in commands.into_iter().enumerate() {
            scope.spawn(move || ends_with_what_was_measured(number, args));
        }
    });
}

fn ends_with_what_was_measured(number: usize, args: &str) {
    let path = file(&format!("interrupted-{number}.json"));
    let output = Held::start(&format!("{args} --json {}", path.display()), 1).interrupt("-INT");
    assert_eq!(output.status.code(), Some(130), "slat {args}: {}", output.stderr);
    assert!(output.stderr.contains("interrupted: what is above"), "slat {args}: {}", output.stderr);
    assert!(!output.stdout.is_empty(), "slat {args}");
    let object: Value = read(&path);
    assert_eq!(object["interrupted"], true, "slat {args}");
    assert!(!object["results"].as_array().unwrap().is_empty(), "slat {args}");
    assert_eq!(object["command"][0], "slat", "slat {args}");
}

#[test]
fn before_the_first_measurement_no_file_is_left() {
    let path = file("nothing.json");
    let output = Held::start(&format!("userfault -v 1 -b 64K --exits --json {}", path.display()), 0).interrupt("-TERM");
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(output.stderr, "slat: interrupted before anything was measured\n");
    assert!(!path.exists());
}

#[test]
fn a_server_removes_its_socket() {
    let path = file("interrupted.socket");
    // It serves until it is interrupted, and has its socket when it prints so.
    let held = Held::start(&format!("serve-pages unix:{}", path.display()), 1);
    assert!(held.first_line.recv().unwrap().starts_with("Serving "));
    assert!(path.exists());
    let output = held.send("-INT");
    assert_eq!(output.status.code(), Some(130), "{}", output.stderr);
    assert!(!path.exists());
}

#[test]
fn a_server_takes_the_place_of_one_that_was_killed() {
    let path = file("killed.socket");
    let start = || {
        let held = Held::start(&format!("serve-pages unix:{}", path.display()), 1);
        assert!(held.first_line.recv().unwrap().starts_with("Serving "));
        held
    };
    start().send("-KILL");
    assert!(path.exists(), "nothing has removed it");
    start().send("-INT");
    assert!(!path.exists());
}

#[test]
fn a_comparison_has_the_part_that_was_measured() {
    let path = file("interrupted-compare.json");
    let output =
        Held::start(&format!("compare --quick --only numa-split --json {}", path.display()), 1).interrupt("-INT");
    assert_eq!(output.status.code(), Some(130), "{}", output.stderr);
    let object: Value = read(&path);
    assert_eq!((&object["experiment"], &object["interrupted"]), (&"compare".into(), &true.into()));
    assert!(!object["compared"]["systems"][0]["comparisons"].as_array().unwrap().is_empty());
    assert!(output.stdout.contains("## numa-split"));
}
