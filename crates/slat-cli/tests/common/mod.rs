//! Runs the command as a user does.
#![allow(dead_code, reason = "each test binary uses a part")]
#![allow(missing_docs)]

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use jsonschema::Validator;
use serde_json::Value;
use slat::format::Format;

pub fn slat(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_slat")).args(args.split_whitespace()).output().unwrap()
}

/// Runs with so few file descriptors that no KVM can be opened, whatever the machine has.
pub fn slat_without_kvm(args: &str) -> Output {
    // The loader needs one, which the caller of the tests may have left open.
    let script = "exec 3>&-; ulimit -n 4; exec \"$0\" \"$@\"";
    Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_slat")]).args(args.split_whitespace()).output().unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs with `args` on a terminal of `columns` columns, made by `script`; returns all its output.
/// More variables may follow the name of the terminal.
pub fn on_terminal(terminal: &str, columns: u32, args: &str) -> Option<String> {
    if !Path::new("/usr/bin/script").exists() {
        eprintln!("not tested: there is no /usr/bin/script (of util-linux), which makes a terminal");
        return None;
    }
    let slat = env!("CARGO_BIN_EXE_slat");
    let output = Command::new("/usr/bin/script")
        .args(["-qec", &format!("stty rows 24 cols {columns}; TERM={terminal} {slat} {args}"), "/dev/null"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{args}: {text}");
    Some(text)
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
        1 => "; please report this with the command line: slat ",
        2 => " (try `slat ",
        _ => "; ",
    };
    assert!(message.contains(next_step), "slat {args}: {message}");
    assert!(output.stdout.is_empty(), "slat {args}");
}

/// Writes a program of the shell.
pub fn program(path: &Path, script: &str) {
    let text = format!("#!/bin/sh\n{script}\n");
    // A file that is open for writing cannot run, and other threads fork: the shell closes its own.
    let write = format!("cat >{0} && chmod 755 {0}", path.display());
    let mut shell = Command::new("sh").args(["-c", &write]).stdin(Stdio::piped()).spawn().unwrap();
    shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(shell.wait().unwrap().success());
    assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o755);
}

/// The values of `--format`.
pub fn formats() -> Vec<&'static str> {
    let mut names = Vec::new();
    slat::for_each_format!(F => {
        names.push(F::NAME);
    });
    names
}

/// A file for the results of a test.
pub fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// The results that a command wrote, which have the documented form.
#[track_caller]
pub fn read(path: &Path) -> Value {
    let object = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    assert_form(&object);
    object
}

/// Checks the form of results: `docs/results-schema.json`.
#[track_caller]
pub fn assert_form(object: &Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results-schema.json");
    let schema: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let form: Validator = jsonschema::validator_for(&schema).unwrap();
    let errors: Vec<String> =
        form.iter_errors(object).map(|error| format!("{}: {error}", error.instance_path())).take(5).collect();
    assert!(errors.is_empty(), "{errors:#?}");
}

/// Runs with `args` and `--json`; expects exit code 0. Returns the results, and what was printed.
#[track_caller]
pub fn measured(name: &str, args: &str) -> (Value, String) {
    let path = file(&format!("{name}.json"));
    let printed = assert_ok(&format!("{args} --json {}", path.display()));
    (read(&path), printed)
}

/// The figures of this name with these labels. A label that is a number is given as text.
pub fn figures<'a>(object: &'a Value, name: &str, labels: &[(&str, &str)]) -> Vec<&'a Value> {
    let has = |figure: &Value, label: &str, value: &str| {
        let found = &figure["labels"][label];
        found == value || found.is_number() && found.as_f64() == value.parse().ok()
    };
    let all = object["results"].as_array().unwrap().iter().filter(|figure| figure["name"] == name);
    all.filter(|figure| labels.iter().all(|(label, value)| has(figure, label, value))).collect()
}

/// The only one of them.
#[track_caller]
pub fn figure<'a>(object: &'a Value, name: &str, labels: &[(&str, &str)]) -> &'a Value {
    let found = figures(object, name, labels);
    assert_eq!(found.len(), 1, "{name} of {labels:?}: {found:?}");
    found[0]
}

/// The median of the only one of them, and its unit.
#[track_caller]
pub fn quantity<'a>(object: &'a Value, name: &str, labels: &[(&str, &str)]) -> (f64, &'a str) {
    let found = figure(object, name, labels);
    (value(found), found["unit"].as_str().unwrap())
}

/// The samples of a figure.
#[track_caller]
pub fn samples(figure: &Value) -> Vec<f64> {
    figure["samples"].as_array().unwrap().iter().map(|sample| sample.as_f64().unwrap()).collect()
}

/// The median of a figure.
#[track_caller]
pub fn value(figure: &Value) -> f64 {
    let mut samples = samples(figure);
    samples.sort_by(f64::total_cmp);
    (samples[(samples.len() - 1) / 2] + samples[samples.len() / 2]) / 2.0
}
