//! `pack`, `inspect` and `verify` as a user calls them.

use std::path::Path;
use std::process::ExitCode;

use clap::{Args, FromArgMatches};
use slat_pager::commands::{inspect, pack, verify};

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
