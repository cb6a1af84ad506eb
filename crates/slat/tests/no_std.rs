//! The engine needs neither std nor Linux nor threads: a program without std links it and runs it,
//! and its sources name none of them.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const ENGINE: &str = env!("CARGO_MANIFEST_DIR");

/// The fixture, copied to a folder where it may leave a lock file, with the workspace's versions.
/// (Its manifest has another name; otherwise cargo would leave it out of the engine's package, as
/// it does with nested packages.)
fn copy_of_the_fixture() -> PathBuf {
    let fixture = Path::new(ENGINE).join("tests/no_std");
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no_std");
    fs::create_dir_all(copy.join("src")).unwrap();
    let manifest = fs::read_to_string(fixture.join("manifest.toml")).unwrap();
    let absolute = manifest.replace("path = \"../..\"", &format!("path = {ENGINE:?}"));
    assert_ne!(manifest, absolute, "the fixture no longer names the engine by its path");
    fs::write(copy.join("Cargo.toml"), absolute).unwrap();
    fs::copy(fixture.join("src/main.rs"), copy.join("src/main.rs")).unwrap();
    fs::create_dir_all(copy.join("src/bin")).unwrap();
    let smallest_host = Path::new(ENGINE).join("examples/smallest_host.rs");
    fs::copy(smallest_host, copy.join("src/bin/smallest_host.rs")).unwrap();
    let lock = Path::new(ENGINE).join("../../Cargo.lock");
    if lock.exists() {
        fs::copy(lock, copy.join("Cargo.lock")).unwrap();
    }
    copy
}

fn build(package: &Path, target: &Path, options: &[&str]) -> Output {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    Command::new(cargo)
        .args(["build", "--release", "--manifest-path"])
        .arg(package.join("Cargo.toml"))
        .args(options)
        .env("CARGO_TARGET_DIR", target)
        // The fixture is built by default, not as this test was (for coverage, for example).
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .output()
        .unwrap()
}

#[test]
fn a_program_without_std_links_the_engine_and_runs_it() {
    let package = copy_of_the_fixture();
    let target = package.join("target");
    let mut built = build(&package, &target, &["--offline"]);
    if !built.status.success() {
        built = build(&package, &target, &[]);
    }
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let status = Command::new(target.join("release/slat-no-std")).status().unwrap();
    assert_eq!(status.code(), Some(0), "the exit status is the line of the fixture's check that failed");
    // The example, too, with no feature of the engine: those of this crate's own examples have the baselines.
    assert!(Command::new(target.join("release/smallest_host")).status().unwrap().success());
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Files that are not part of a normal build of the library: tests, and replacements of atomics
/// under a checker or a model.
fn is_for_tests(path: &Path) -> bool {
    let stem = path.file_stem().unwrap().to_str().unwrap();
    matches!(stem, "stepped" | "costed" | "events")
        || stem == "tests"
        || stem.ends_with("_tests")
        || stem.ends_with("_loom")
}

/// The code of a normal build: without comments, without the item or statement after a `cfg` of a
/// model checker (on one line, as the engine has them), without the test module at the end.
fn code_of(source: &str) -> String {
    let mut code = String::new();
    let mut skip_next = false;
    for line in source.lines() {
        let line = line.split("//").next().unwrap_or_default();
        let line_is_cfg = line.trim_start().starts_with("#[cfg(");
        if line_is_cfg && line.contains("test") {
            break;
        }
        if line_is_cfg && !line.contains("not(") && (line.contains("loom") || line.contains("shuttle")) {
            skip_next = true;
        } else if !skip_next {
            code.push_str(line);
            code.push('\n');
        } else if !line.trim().is_empty() {
            skip_next = false;
        }
    }
    code
}

#[test]
fn nothing_in_the_engine_names_std_or_an_operating_system() {
    let mut files = Vec::new();
    sources(&Path::new(ENGINE).join("src"), &mut files);
    assert!(files.len() > 20, "the sources are not where they were");
    // The traits of vm-memory use std.
    let is_for_vm_memory = |path: &Path| path.parent().is_some_and(|parent| parent.ends_with("vm_memory"));
    for path in files.iter().filter(|path| !is_for_tests(path) && !is_for_vm_memory(path)) {
        let code = code_of(&fs::read_to_string(path).unwrap()).to_lowercase();
        for word in ["std::", "extern crate std", "linux", "libc", "thread", "println", "target_os"] {
            let line = code.lines().find(|line| line.contains(word));
            assert!(line.is_none(), "{} names {word:?}: {}", path.display(), line.unwrap_or_default());
        }
    }
    let root = fs::read_to_string(Path::new(ENGINE).join("src/lib.rs")).unwrap();
    assert!(root.contains("#![no_std]"));
}

#[test]
fn the_search_for_names_reads_code_and_not_comments() {
    assert!(code_of("use std::fs;").contains("std::"));
    assert!(!code_of("// std::fs\n/// std::fs\n//! std::fs").contains("std::"));
    assert!(!code_of("#[cfg(loom)]\nloom::thread::yield_now();\nlet x = 1;").contains("thread"));
    assert!(code_of("#[cfg(loom)]\nloom::thread::yield_now();\nlet x = 1;").contains("let x"));
    assert!(code_of("#[cfg(not(any(loom, shuttle)))]\nstd::hint::spin_loop();").contains("std::"));
    assert!(!code_of("#[cfg(all(test, not(any(loom, shuttle))))]\nmod tests {\n    use std::vec;").contains("std::"));
}
