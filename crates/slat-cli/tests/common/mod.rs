//! Runs the command as a user does.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(missing_docs)]

use std::process::{Command, Output};

use slat::format::Format;

pub fn slat(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slat")).args(args.split_whitespace()).output().unwrap()
}

/// Runs with so few file descriptors that no KVM can be opened, whatever the machine has.
pub fn slat_without_kvm(args: &str) -> Output {
    let script = "ulimit -n 4; exec \"$0\" \"$@\"";
    Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_slat")]).args(args.split_whitespace()).output().unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs with `args`; expects exit code 0, and returns the output.
#[track_caller]
pub fn assert_ok(args: &str) -> String {
    let output = slat(args);
    assert_eq!(output.status.code(), Some(0), "slat {args}: {}", stderr(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// Runs with `args`; expects exit code `code`, and one line with `what` and the next step.
#[track_caller]
pub fn assert_refused(args: &str, code: i32, what: &str) {
    let output = slat(args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "slat {args}: {message}");
    assert!(message.contains(what), "slat {args}: {message}");
    assert_eq!(message.lines().count(), 1, "slat {args}: {message}");
    let next_step = match code {
        1 => "; please report this with its seed and the command line: slat ",
        2 => " (try `slat ",
        _ => "; ",
    };
    assert!(message.contains(next_step), "slat {args}: {message}");
    assert!(output.stdout.is_empty(), "slat {args}");
}

/// The values of `--format`.
pub fn formats() -> Vec<&'static str> {
    let mut names = Vec::new();
    slat::for_each_format!(F => {
        names.push(F::NAME);
    });
    names
}
