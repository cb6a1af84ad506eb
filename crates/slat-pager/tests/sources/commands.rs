//! `pack`, `inspect` and `verify` as a user calls them.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use clap::{Args, FromArgMatches};
use slat_pager::commands::{inspect, pack, verify};
use slat_pager::source::Source;
use slat_pager::source::peer::Peer;

use crate::bytes::{PAGE, snapshot_with, write_sparse};

fn parse<A: Args + FromArgMatches>(arguments: &[&str]) -> Result<A, clap::Error> {
    let command = A::augment_args(clap::Command::new("slat-pager")).no_binary_name(true);
    command.try_get_matches_from(arguments).and_then(|matches| A::from_arg_matches(&matches))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[tokio::test]
async fn a_snapshot_is_packed_inspected_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    let (file, index) = (folder.path().join("mem"), folder.path().join("store/vm.index"));
    write_sparse(&file, &snapshot_with(1, 600, |page| page % 3 == 0));
    let packed = format!("chunks:{}", text(&index));
    pack::run(&parse(&[text(&file), text(&index), "--chunk", "64", "--level", "-3"]).unwrap()).await.unwrap();
    inspect::run(&parse(&[&packed]).unwrap()).await.unwrap();
    inspect::run(&parse(&[text(&file)]).unwrap()).await.unwrap();
    let passes = |code: ExitCode| code == ExitCode::SUCCESS;
    assert!(passes(verify::run(&parse(&[&packed]).unwrap()).await.unwrap()));
    assert!(passes(verify::run(&parse(&[&packed, "--against", text(&file)]).unwrap()).await.unwrap()));
    // A chunk that is gone.
    let prefix = std::fs::read_dir(folder.path().join("store/chunks")).unwrap().next().unwrap().unwrap().path();
    std::fs::remove_dir_all(prefix).unwrap();
    assert!(!passes(verify::run(&parse(&[&packed]).unwrap()).await.unwrap()));
    inspect::run(&parse(&[&packed]).unwrap()).await.unwrap();
    // Other bytes.
    let other = folder.path().join("other");
    let mut bytes = snapshot_with(1, 600, |page| page % 3 == 0);
    bytes[100 * PAGE] ^= 1;
    write_sparse(&other, &bytes);
    assert!(!passes(verify::run(&parse(&[text(&other), "--against", text(&file)]).unwrap()).await.unwrap()));
    assert!(verify::run(&parse(&[text(&file)]).unwrap()).await.is_err(), "a file has no checksums");
}

/// Its exit code, and what it says of what is wrong.
fn outcome(stdout: Stdio, arguments: &[&str]) -> (i32, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat-pager"));
    let child = command.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped()).spawn().unwrap();
    let output = child.wait_with_output().unwrap();
    (output.status.code().expect("no signal"), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn an_output_that_cannot_be_written_is_an_error_and_one_that_nobody_reads_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mem");
    write_sparse(&file, &snapshot_with(1, 10, |_| true));
    for arguments in [&["inspect", text(&file)][..], &["verify", text(&file), "--against", text(&file)], &["-h"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let (code, said) = outcome(full.into(), arguments);
        assert_eq!(code, 1, "{arguments:?}: {said}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(outcome(writer.into(), arguments), (0, String::new()), "{arguments:?}");
    }
}

#[test]
fn what_cannot_be_asked_for_ends_with_2_and_says_which_option() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (folder.path().join("mem"), folder.path().join("none/s.sock"));
    write_sparse(&file, &snapshot_with(1, 10, |_| true));
    let serve = ["serve", "--socket", text(&socket), "--memory", text(&file)];
    let set = folder.path().join("none/set");
    for (arguments, says) in [
        (vec!["verify", text(&file)], "--against"),
        (vec!["pack", text(&file), "x"], ".index"),
        (vec!["share", &format!("vm={}", text(&file)), "--listen", "127.0.0.1:0"], "--certificates"),
        (vec!["serve", "--nothing"], "--nothing"),
        (vec!["serve"], "--socket and --memory, or --config"),
        ([&serve[..], &["--granule", "5"]].concat(), "granule"),
        ([&serve[..], &["--max-vms", "0"]].concat(), "max-vms"),
        ([&serve[..], &["--read-memory", "0"]].concat(), "read-memory"),
        ([&serve[..], &["--working-set", text(&set)]].concat(), "working set"),
    ] {
        let (code, said) = outcome(Stdio::null(), &arguments);
        assert!(code == 2 && said.contains(says), "{arguments:?}: {code}, {said}");
    }
    // A folder that is not there is not made: it may be mistyped.
    let (code, said) = outcome(Stdio::null(), &serve);
    assert!(code == 1 && said.contains("none/s.sock.state"), "{code}, {said}");
    assert!(!folder.path().join("none").exists());
    assert!(!said.contains('\x1b'), "no terminal, no colors: {said}");
}

#[test]
fn arguments_that_are_none() {
    for arguments in [
        &["mem"][..],
        &["mem", "to.index", "--level", "30"],
        &["mem", "to.index", "--parallel", "0"],
        &["layers:a", "to.index"],
    ] {
        assert!(parse::<pack::PackArgs>(arguments).is_err(), "{arguments:?}");
    }
    assert!(parse::<inspect::InspectArgs>(&["peer:host:1/vm", "--certificates", "a"]).is_err(), "no key");
}

/// Servers that are started again at the same moment, as by two service managers.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_servers_that_start_at_once_one_serves() {
    const NR_SERVERS: usize = 8;
    let folder = tempfile::tempdir().unwrap();
    let (file, path) = (folder.path().join("mem"), folder.path().join("peer.sock"));
    let content = snapshot_with(1, 8, |_| false);
    std::fs::write(&file, &content).unwrap();
    // What a dead one has left. In later rounds it is what a killed one has.
    drop(UnixListener::bind(&path).unwrap());
    for round in 0..5 {
        let start = |_| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_slat-pager"));
            command
                .arg("share")
                .arg(format!("vm={}", text(&file)))
                .arg("--listen")
                .arg(format!("unix:{}", text(&path)));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let started: Vec<Child> = (0..NR_SERVERS).map(start).collect();
        let (mut serving, mut refused) = (Vec::new(), Vec::new());
        for mut child in started {
            // It says that it listens, or ends without a word.
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            if line.starts_with("listening") { serving.push(child) } else { refused.push(child) }
        }
        assert_eq!((serving.len(), refused.len()), (1, NR_SERVERS - 1), "round {round}");
        for mut child in refused {
            let mut why = String::new();
            child.stderr.take().unwrap().read_to_string(&mut why).unwrap();
            assert!(why.contains("in use") && !child.wait().unwrap().success(), "{why}");
        }
        let address = format!("unix:{}", text(&path)).parse().unwrap();
        let peer = Peer::open_local(&address, "vm").await.unwrap();
        let mut found = vec![0; content.len()];
        tokio::time::timeout(Duration::from_secs(60), peer.read(0, &mut found)).await.unwrap().unwrap();
        assert!(found == content);
        for mut child in serving {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(path.exists() && !folder.path().join("peer.sock.lock").exists());
    }
}
