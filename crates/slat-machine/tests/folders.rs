//! The folders of the machine use only those above them, in the order of `lib.rs`.

use std::fs;
use std::path::{Path, PathBuf};

/// From the bottom up.
const FOLDERS: [&str; 6] = ["linux", "memory", "hardware", "paging", "vm", "guest_os"];

/// A format makes its machine with shadow paging itself: `HardwareFormat::shadow_machine`.
const EXCEPTION: (&str, &str) = ("hardware/walk", "vm");

#[test]
fn no_folder_uses_one_below_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut nr_uses = 0;
    for (place, folder) in FOLDERS.iter().enumerate() {
        for path in sources(&src.join(folder)) {
            let text = fs::read_to_string(&path).expect("a source");
            let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let code: String = code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
            let file = path.strip_prefix(&src).expect("it is in the sources").display().to_string();
            for used in code.split("crate::").skip(1) {
                let name = used.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next();
                let is_exception = file.starts_with(EXCEPTION.0) && name == Some(EXCEPTION.1);
                let is_above = FOLDERS[..=place].iter().any(|folder| name == Some(folder));
                assert!(is_above || is_exception, "{file} uses crate::{}", name.unwrap_or_default());
                nr_uses += 1;
            }
        }
    }
    assert!(nr_uses > 100, "uses are found: {nr_uses}");
}

/// All sources in `folder` but those of tests.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry of it").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name").to_owned();
        if name.starts_with("tests") || name.ends_with("_tests") {
            continue;
        }
        if path.is_dir() { found.extend(sources(&path)) } else { found.push(path) }
    }
    found
}
