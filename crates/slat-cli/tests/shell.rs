//! Help, completions, manual pages, and the next step after a failure, for the user.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{assert_form, assert_ok, assert_refused, on_terminal, slat, stderr};

/// Runs `program` with `input`; returns its output, or `None` where there is no such program.
fn fed(program: &str, args: &[&str], input: &str) -> Option<(bool, String, String)> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().ok()?;
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some((output.status.success(), text(&output.stdout), text(&output.stderr)))
}

fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn the_short_help_is_for_newcomers_and_the_long_one_has_everything() {
    for command in ["", "parallel-faults", "numa-split", "man"] {
        let short = assert_ok(&format!("{command} -h"));
        assert!(short.lines().count() <= 28 && short.lines().all(|line| line.chars().count() <= 80), "{short}");
        let long = assert_ok(&format!("{command} --help"));
        assert!(long.lines().count() > short.lines().count(), "{long}");
    }
    assert!(!assert_ok("parallel-faults -h").contains("--ring-entries"));
    assert!(assert_ok("parallel-faults --help").contains("--ring-entries"));
    // Without a command the help is printed as for a mistake.
    let output = Command::new(env!("CARGO_BIN_EXE_slat")).output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(2), &b""[..]));
    assert!(stderr(&output).contains("Usage: slat <COMMAND>") && stderr(&output).contains("slat demo"), "{output:?}");
}

#[test]
fn completions_are_scripts_of_the_shell() {
    let bash = assert_ok("completions bash");
    assert!(bash.contains("parallel-faults") && bash.contains("--ring-entries") && bash.contains("huge-page-node"));
    // Where the shell is installed, it checks the script.
    for (shell, check) in [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")] {
        let script = assert_ok(&format!("completions {shell}"));
        assert!(script.contains("dirty-log") && !script.contains("userfault-resolver"), "{shell}");
        if let Some((is_ok, _, stderr)) = fed(shell, &[check], &script) {
            assert!(is_ok && stderr.is_empty(), "{shell}: {stderr}");
        }
    }
    let script = format!(
        "{bash}\nCOMP_WORDS=(slat parallel-faults --ring); COMP_CWORD=2\n_slat slat --ring parallel-faults; echo $COMPREPLY"
    );
    if let Some((is_ok, stdout, stderr)) = fed("bash", &[], &script) {
        assert!(is_ok && stdout.trim() == "--ring-entries", "{stdout}{stderr}");
    }
}

#[test]
fn manual_pages_are_written_and_render() {
    let folder = folder("man");
    assert_eq!(assert_ok(&format!("man -o {}", folder.display())), "");
    let mut names: Vec<String> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    for name in ["slat.1", "slat-dirty-log.1", "slat-numa-split.1", "slat-man.1"] {
        assert!(names.iter().any(|there| there == name), "{name}: {names:?}");
    }
    assert!(!names.iter().any(|name| name.contains("resolver")), "{names:?}");
    let all = assert_ok("man");
    for name in &names {
        let page = fs::read_to_string(folder.join(name)).unwrap();
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS") && all.contains(&page), "{name}");
        for (program, args) in
            [("groff", &["-man", "-Tutf8", "-P-cbou", "-ww", "-"][..]), ("mandoc", &["-Tlint", "-Werror"])]
        {
            if let Some((is_ok, stdout, stderr)) = fed(program, args, &page) {
                assert!(is_ok && (program != "groff" || stdout.contains("NAME")), "{program} {name}: {stderr}");
            }
        }
    }
    let page = fs::read_to_string(folder.join("slat-parallel-faults.1")).unwrap();
    for what in
        ["ring\\-entries", "leaf\\-by\\-leaf", ".SH EXAMPLES", "slat parallel\\-faults \\-v 8", ".SH \"EXIT STATUS\""]
    {
        assert!(page.contains(what), "no {what} in:\n{page}");
    }
}

/// Runs with `stdout` as the standard output.
fn printing_to(stdout: impl Into<Stdio>, args: &str) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    let output = command.args(args.split_whitespace()).stdout(stdout).output().unwrap();
    (output.status.code(), stderr(&output))
}

#[test]
fn a_command_whose_output_has_no_reader_ends_quietly() {
    let path = folder("no_reader").join("aging.json");
    for args in [
        "--help",
        "--version",
        "numa-split --help",
        "completions bash",
        "man",
        &format!("aging -v 1 -b 1M --runs 1 --lock none --json {}", path.display()),
        "compare --quick",
        &format!("report {0} -o {0}.html", path.display()),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(printing_to(writer, args), (Some(0), String::new()), "{args}");
    }
    assert!(fs::read_to_string(path).unwrap().contains("\"aging\""), "results are written all the same");
}

#[test]
fn a_failure_is_reported_also_where_the_output_has_no_reader() {
    for (args, code, what) in [
        ("aging -v 1 -b 1M --runs 1 --still-idle fail", 1, "slat: check failed: "),
        ("aging -v 1 -b 1M --runs 1 --lock none --json /dev/full", 3, "slat: cannot write /dev/full: "),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (status, message) = printing_to(writer, args);
        assert_eq!(status, Some(code), "{args}: {message}");
        assert!(message.starts_with(what), "{args}: {message}");
    }
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    for args in ["--help", "man", "aging -v 1 -b 1M --runs 1 --lock none"] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let (status, message) = printing_to(full, args);
        assert_eq!(status, Some(3), "{args}: {message}");
        assert!(message.starts_with("slat: cannot print: ") && message.lines().count() == 1, "{args}: {message}");
    }
}

#[test]
fn every_failure_names_the_next_step() {
    for (args, code, what) in [
        ("completions", 2, "<SHELL> (try `slat completions --help`)"),
        ("completions tcsh", 2, "[possible values: bash, elvish, fish, powershell, zsh]"),
        ("man -o", 2, "(try `slat man --help`)"),
        (
            "man -o /no/such/folder",
            3,
            "cannot write /no/such/folder/slat.1: No such file or directory (os error 2); make its",
        ),
        ("man -o /dev/null", 3, "cannot write /dev/null/slat.1"),
        ("parallel-faults --vcpu 3", 2, "; a similar argument exists: '--vcpus' (try `slat parallel-faults --help`)"),
        ("parallel-faults --tracking pml", 2, "with npt tables (try `slat parallel-faults --help`)"),
        (
            "parallel-faults -v 1 -b 8K --slots 3",
            2,
            "choose another number of slots, or more memory (try `slat parallel-faults --help`)",
        ),
        ("parallel-faults -v 8 -b 1T", 3, "MiB are available; choose less memory or fewer vCPUs"),
        ("parallel-faults -v 1 -b 4K --cpus 99999", 3, "; name CPUs"),
        ("parallel-faults -v 1 -b 4K --json /no/such/file", 3, "; make its folder first"),
        ("numa-split --nodes 2 --memoryless 2", 2, "choose other --nodes (try `slat numa-split --help`)"),
        ("userfault -v 1 -b 64K --exits --source unix:/no/such", 3, "; start the peer first: slat serve-pages"),
        (
            "aging -v 1 -b 1M --runs 1 --still-idle fail",
            1,
            "please report this with the command line: slat aging -v 1 -b 1M --runs 1 --still-idle fail",
        ),
    ] {
        assert_refused(args, code, what);
    }
}

#[test]
fn a_dash_is_the_standard_output() {
    let command = |args: &str| {
        let args = args.split_whitespace();
        Command::new(env!("CARGO_BIN_EXE_slat")).args(args).current_dir(folder("dash")).output().unwrap()
    };
    let output = command("aging -v 1 -b 1M --runs 2 --lock none --json -");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_form(&object);
    assert_eq!(object["experiment"], "aging");
    // The text for people is on the standard error.
    assert!(stderr(&output).contains("Verified: "), "{}", stderr(&output));
    assert_eq!(fs::read_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("dash")).unwrap().count(), 0);
}

#[test]
fn a_narrow_terminal_has_short_lines() {
    // `-q` shows nothing but the result.
    for (args, is_drawn) in
        [("parallel-faults -v 2 -b 4M --runs 2", true), ("parallel-faults -v 2 -b 4M --runs 2 -q", false)]
    {
        let Some(text) = on_terminal("xterm", 40, args) else { return };
        assert_eq!(text.contains("1/7"), is_drawn, "{text}");
        // What is drawn ends where the result begins.
        let drawn = text.split("vCPUs,").next().unwrap_or_default();
        for line in drawn.split(['\r', '\n']) {
            let mut is_shown = true;
            let shown = line.chars().filter(|&character| match character {
                '\x1b' => {
                    is_shown = false;
                    false
                }
                'A'..='z' if !is_shown && character != '[' => {
                    is_shown = true;
                    false
                }
                _ => is_shown,
            });
            assert!(shown.count() <= 40, "{line:?} in {text}");
        }
    }
    let help = on_terminal("xterm", 40, "parallel-faults -h").unwrap_or_default();
    assert!(help.lines().filter(|line| line.starts_with("  -") || line.starts_with("   ")).count() > 20, "{help}");
}

#[test]
fn the_help_has_no_colors_without_a_terminal_and_with_no_color() {
    // Without a terminal there are none.
    assert!(!assert_ok("-h").contains('\x1b'));
    let Some(text) = on_terminal("xterm", 80, "-h") else { return };
    assert!(text.contains("\x1b["), "{text}");
    let text = on_terminal("xterm NO_COLOR=1", 80, "-h").unwrap_or_default();
    assert!(text.contains("Usage") && !text.contains('\x1b'), "{text}");
}

#[test]
fn options_of_experiments_are_refused_where_nothing_runs() {
    for command in ["man", "completions bash", "report x.json", "serve-pages tcp:127.0.0.1:0"] {
        for option in ["--live", "--quiet", "--json -"] {
            assert_refused(&format!("{command} {option}"), 2, "unexpected argument");
        }
    }
    assert_refused("aging --live --quiet", 2, "cannot be used with");
    assert_eq!(slat("").status.code(), Some(2));
}
