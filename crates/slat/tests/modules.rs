//! The modules of the engine form no cycle, nor do those of the command: each uses those below it
//! alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The names of modules that a module uses, with the files in which it does.
type Uses = BTreeMap<String, BTreeMap<String, BTreeSet<PathBuf>>>;

#[test]
fn modules_form_no_cycle() {
    assert_no_cycle("src", [("vm", "table"), ("table", "addr")]);
    // Not in the package.
    if Path::new(env!("CARGO_MANIFEST_DIR")).join("../slat-cli").exists() {
        assert_no_cycle("../slat-cli/src", [("cli", "options"), ("session", "failure")]);
    }
}

/// Checks the modules in `src`, a path from this package. Each first one of `known` uses the second.
fn assert_no_cycle(src: &str, known: [(&str, &str); 2]) {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join(src);
    let mut uses = Uses::new();
    collect(&src, &src, &mut uses);
    assert!(known.iter().all(|(user, used)| uses[*user].contains_key(*used)), "uses are found: {uses:?}");
    // A module all of whose uses are gone is in no cycle: take such away until none is left.
    loop {
        let free: Vec<String> = uses.iter().filter(|(_, used)| used.is_empty()).map(|(name, _)| name.clone()).collect();
        if free.is_empty() {
            break;
        }
        for name in free {
            uses.remove(&name);
            uses.values_mut().for_each(|used| drop(used.remove(&name)));
        }
    }
    assert!(uses.is_empty(), "these modules, or modules above them, use each other: {uses:#?}");
}

/// Adds the uses of all files in `folder`, which is in `src`.
fn collect(src: &Path, folder: &Path, uses: &mut Uses) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry of it").path();
        let inside = path.strip_prefix(src).expect("it is in the sources").to_owned();
        let first = inside.iter().next().and_then(|name| name.to_str()).expect("a name");
        let module = first.trim_end_matches(".rs").to_owned();
        // The root names all, and so does the guide in its text.
        if ["lib", "main", "guide"].contains(&module.as_str()) {
            continue;
        }
        if path.is_dir() {
            collect(src, &path, uses);
            continue;
        }
        let name = inside.to_str().expect("a name");
        if name.ends_with("tests.rs") || name.ends_with("_loom.rs") {
            continue;
        }
        let used = uses.entry(module.clone()).or_default();
        for name in used_by(&fs::read_to_string(&path).expect("a source")) {
            if name != module {
                used.entry(name).or_default().insert(inside.clone());
            }
        }
    }
    // A macro or an item at the root is no module.
    let modules: BTreeSet<String> = uses.keys().cloned().collect();
    if folder == src {
        uses.values_mut().for_each(|used| used.retain(|name, _| modules.contains(name)));
    }
}

/// The names behind `crate::` in the code of `source`, without its tests.
fn used_by(source: &str) -> Vec<String> {
    let code =
        source.split("#[cfg(all(test").next().unwrap_or_default().split("#[cfg(test)]").next().unwrap_or_default();
    code.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .flat_map(|line| line.split("crate::").skip(1))
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
        .collect()
}
