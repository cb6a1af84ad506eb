//! The public face stays small: its names, the fields of a configuration, what a host must implement.
#![cfg(not(any(loom, shuttle)))]
#![allow(missing_docs)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use slat::dirty::DirtyRing;
use slat::error::{ConfigError, SlotError};
use slat::shadow::ShadowPaging;
use slat::tables::FaultAround;
use slat::{Error, MemoryRegion};

/// The errors of the operations, in `error.rs`. `Error` is the sum of them.
const ERRORS: [&str; 6] = ["ConfigError", "SlotError", "LogError", "FaultError", "RangeError", "MapError"];

/// The files with public items, in public modules.
const PUBLIC: [&str; 7] =
    ["lib.rs", "dirty/mod.rs", "error.rs", "format/mod.rs", "host.rs", "shadow/mod.rs", "stats.rs"];

fn source(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| format!("{}\n", line.split("//").next().unwrap_or_default().trim_end())).collect()
}

/// Without each item that a feature or a model checker adds.
fn without_features(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if !["#[cfg(feature", "#[cfg(shuttle"].iter().any(|cfg| line.trim_start().starts_with(cfg)) {
            kept.push_str(line);
            kept.push('\n');
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        // The item ends at its first line that ends it, no deeper than it began.
        lines.by_ref().find(|line| {
            line.len() - line.trim_start().len() <= indent && [';', '}', ','].iter().any(|end| line.ends_with(*end))
        });
    }
    kept
}

fn public_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in PUBLIC {
        let text = without_features(&source(file));
        for used in text.split("pub use ").skip(1) {
            let tree = used.split(';').next().unwrap();
            let list = tree.rsplit("::").next().unwrap().trim_matches(['{', '}', ' ', '\n']);
            let list = if tree.contains('{') { tree.split(['{', '}']).nth(1).unwrap() } else { list };
            names.extend(list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned));
        }
        for line in text.lines() {
            let line = line.trim_start();
            let Some(item) = line.strip_prefix("pub ") else { continue };
            let item = item.strip_prefix("unsafe ").unwrap_or(item);
            let is_item = ["struct ", "enum ", "trait "].iter().find_map(|kind| item.strip_prefix(kind));
            if let Some(name) = is_item {
                names.insert(name.split(|letter: char| !letter.is_alphanumeric()).next().unwrap().to_owned());
            }
        }
    }
    names
}

#[test]
fn the_public_names_are_few() {
    let mut names = public_names();
    for error in ERRORS {
        assert!(names.remove(error), "{error} is not found in {names:?}");
    }
    for name in
        ["Vm", "Host", "Npt", "Stats", "DirtyRing", "ShadowPaging", "TableReader", "Unresolved", "UserfaultBitmap"]
    {
        assert!(names.contains(name), "{name} is not found in {names:?}");
    }
    assert!(!names.contains("Locking") && !names.contains("SlotBitmap"), "{names:?}");
    // 60 before there were memory types, geometries and eager mappings.
    assert!(names.len() <= 72, "{}: {names:?}", names.len());
}

/// The lines of the item that begins with `start`.
fn body(file: &str, start: &str) -> String {
    let text = without_features(&source(file));
    let (_, rest) = text.split_once(start).unwrap();
    rest.split_once("\n}\n").unwrap().0.to_owned()
}

#[test]
fn a_configuration_has_few_fields() {
    let fields = body("config.rs", "pub struct Config {");
    let nr_fields = fields.lines().filter(|line| line.starts_with("    pub ")).count();
    assert!((1..=7).contains(&nr_fields), "{nr_fields}: {fields}");
}

#[test]
fn a_host_implements_seven_items() {
    let items = body("host.rs", "pub unsafe trait Host: Send + Sync {");
    let required: Vec<_> = items.lines().filter(|line| line.starts_with("    ") && line.ends_with(';')).collect();
    let is_item = |line: &&&str| {
        line.starts_with("    fn ") || line.starts_with("    unsafe fn ") || line.starts_with("    type ")
    };
    assert_eq!(required.iter().filter(is_item).count(), 7, "{required:?}");
}

#[test]
fn the_limits_in_messages_are_those_of_the_types() {
    let of_roots = ConfigError::TooManyRoots { previous_roots: 99 };
    let of_pages = ConfigError::BadShadowPages { max_pages: 1 };
    let of_rings = ConfigError::BadRingSize { nr_entries: 1 };
    for (error, limits) in [
        (Error::from(SlotError::SlotTooHigh { slot: u32::MAX }), vec![u64::from(MemoryRegion::<()>::MAX_SLOTS)]),
        (ConfigError::BadFaultAround { nr_pages: 1 }.into(), vec![2, u64::from(FaultAround::MAX_PAGES)]),
        (of_roots.into(), vec![u64::from(ShadowPaging::MAX_PREVIOUS_ROOTS)]),
        (of_pages.into(), vec![u64::from(ShadowPaging::MIN_PAGES), u64::from(ShadowPaging::MAX_PAGES)]),
        (of_rings.into(), vec![u64::from(DirtyRing::MIN_ENTRIES), u64::from(DirtyRing::MAX_ENTRIES)]),
    ] {
        let message = error.to_string();
        for limit in limits {
            assert!(message.split(' ').any(|word| word == limit.to_string()), "{limit} is not in: {message}");
        }
    }
}
