//! The daemon under systemd: started by the socket, as the shipped units say it, and these units as
//! systemd reads them. Without systemd's programs each test is skipped, which is said.

#[path = "support/pager.rs"]
mod pager;
#[path = "support/registered.rs"]
mod registered;
mod support;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use pager::{Pager, SEED, SIZE, folder, metric, socket};
use registered::{Guest, Kind, handshake, send, userfaultfd};
use slat_pager::userfaultfd::RegisterMode;
use support::until;

/// The first version of systemd that judges the units of a folder.
const WITH_OFFLINE: u32 = 250;
const UNITS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/systemd");

/// Whether there is such a program; says so if not.
fn has(program: &str) -> bool {
    let has = Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success());
    if !has {
        println!("skipped: no {program}");
    }
    has
}

#[test]
fn a_machine_that_connects_starts_the_pager() {
    if !has("systemd-socket-activate") {
        return;
    }
    let (Some(folder), Some(userfaultfd)) = (folder(), userfaultfd(0)) else { return };
    let folder = folder.path();
    let metrics = format!("unix:{}", folder.join("metrics").display());
    let path = socket(folder);
    let memory = folder.join("memory");
    let mut command = Command::new("systemd-socket-activate");
    command.arg("--listen").arg(&path).arg(env!("CARGO_BIN_EXE_slat-pager"));
    command.args(["serve", "--log", "warn", "--sandbox", "required", "--metrics", &metrics]);
    command.arg("--socket").arg(&path).arg("--memory").arg(memory);
    let mut pager = Pager { child: command.spawn().unwrap() };
    until("systemd has a socket", || path.exists());
    assert!(!folder.join("metrics").exists(), "no pager before a machine connects");

    let guest = Guest::new(Kind::Anonymous, SIZE, 0).unwrap();
    guest.register(&userfaultfd, RegisterMode::MISSING);
    // A socket has its name before it listens: until then it refuses.
    let mut stream = None;
    until("systemd listens", || {
        stream = UnixStream::connect(&path).ok();
        stream.is_some()
    });
    let stream = stream.unwrap();
    send(&stream, handshake(&[guest.region()]).as_bytes(), Some(&userfaultfd)).unwrap();
    // It waits until the pager that it has started is there.
    guest.verify(0, SEED);
    pager.wait_until_it_listens(&path);
    (0..guest.nr_pages()).for_each(|page| guest.verify(page, SEED));
    // systemd's program has become the pager: it took the socket, and made none of its own.
    assert_eq!(metric(folder, "vms"), 1.0);
    let name = fs::read_to_string(pager.proc("comm")).unwrap();
    assert_eq!(name.trim(), "slat-pager");
    drop(stream);
    until("the machine has ended", || metric(folder, "vms") == 0.0);
}

#[test]
fn the_pager_says_when_it_is_ready() {
    let Some(folder) = folder() else { return };
    let folder = folder.path();
    let told = folder.join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&told).unwrap();
    // A pager that ends before it is ready says nothing.
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = Pager::command(folder);
    let mut pager = Pager { child: command.env("NOTIFY_SOCKET", &told).spawn().unwrap() };
    let mut bytes = [0; 256];
    let nr_bytes = manager.recv(&mut bytes).unwrap();
    assert_eq!(&bytes[..nr_bytes], b"READY=1\n");
    // A machine that connects now is served.
    pager.wait_until_it_listens(&socket(folder));
    let mut stream = UnixStream::connect(socket(folder)).unwrap();
    stream.write_all(b"[]").unwrap();
    // A socket that is closed before all was read is reset.
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "what is no handshake is refused");
}

/// The units in a folder of their own, with a program that is there.
fn units(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut units = Vec::new();
    for name in ["slat-pager.socket", "slat-pager.service"] {
        let text = fs::read_to_string(Path::new(UNITS).join(name)).unwrap();
        let here = text.replace("/usr/bin/slat-pager", env!("CARGO_BIN_EXE_slat-pager"));
        assert!(name.ends_with("socket") || here != text, "the service has a program");
        let unit = folder.join(name);
        fs::write(&unit, here).unwrap();
        units.push(unit);
    }
    units
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn the_units_are_sound() {
    if !has("systemd-analyze") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let units = units(folder.path());
    let output = Command::new("systemd-analyze").arg("verify").args(["--man=no"]).args(&units).output().unwrap();
    let said = said(&output);
    // It speaks of units of the system that are broken, too.
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("slat-pager")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
}

#[test]
fn the_service_exposes_little() {
    /// Of 100, as systemd weighs it: what it calls OK ends at 45.
    const MOST: &str = "40";
    if !has("systemd-analyze") {
        return;
    }
    let version = Command::new("systemd-analyze").arg("--version").output().unwrap();
    let version = String::from_utf8_lossy(&version.stdout).split_whitespace().nth(1).and_then(|word| word.parse().ok());
    if version.is_none_or(|version: u32| version < WITH_OFFLINE) {
        println!("skipped: this systemd-analyze looks at running services alone");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let units = units(folder.path());
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=true", "--no-pager", "--threshold", MOST])
        .arg(units.last().unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
}
