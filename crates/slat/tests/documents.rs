//! The repository's documents against the repository. Each test, model rule, file and identifier
//! that they name exists. Each rule of a protocol names what notices its absence. Links have
//! targets, and lines keep to their columns.
//!
//! A package of the crate has no documents beside it. There the checks are skipped, with a message.
//!
//! `docs/protocols/README.md` describes the notation. A code span is one of these:
//! - `FILE.rs::NAME`: a test or another item of that name is in the file;
//! - `models/MODEL.py: RULE, RULE`: `ci/models.sh` leaves these rules out of the model;
//! - `models/proofs/PROOF.py: RULE, RULE`: `ci/proofs.sh` leaves these rules out of the proof;
//! - `models/litmus/FILE.py: TEST, TEST`: the file has these litmus tests;
//! - a path: it exists;
//! - an identifier, perhaps with `::`: each part of it occurs in the code;
//! - anything else (a command, an expression), which is not checked.
#![cfg(not(any(loom, shuttle)))]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The pages of `docs/protocols/`, with the least number of tests and other items of files that
/// each names, and of rules of models and proofs. They are a little below the actual numbers, so
/// that a notation that is no longer recognised fails the test.
const PROTOCOLS: [(&str, usize, usize); 13] = [
    ("deferred-freeing.md", 7, 2),
    ("delivery-rings.md", 2, 0),
    ("dirty-log.md", 20, 40),
    ("dirty-rings.md", 10, 0),
    ("huge-pages.md", 13, 45),
    ("invalidation.md", 27, 35),
    ("locks.md", 13, 0),
    ("machine-tlb-flush.md", 12, 0),
    ("memslots.md", 7, 3),
    ("pinned.md", 15, 0),
    ("pte.md", 8, 1),
    ("shadow-paging.md", 16, 64),
    ("userfault.md", 10, 27),
];

/// The headings that each of them has, in this order.
const HEADINGS: [&str; 5] = ["# Guarantees", "# Use", "# Implementation", "# Why it is correct", "# Rules"];

/// Documents whose identifiers may be those of hardware and of other software.
const OF_OTHERS: [&str; 3] = ["crates/slat/PORTING.md", "crates/slat/OBLIGATIONS.md", "docs/references.md"];

const MOST_WORDS_OF_DESIGN: usize = 3000;
const MOST_COLUMNS: usize = 100;
/// For a cell of a table. A longer cell is a paragraph, and its table a list.
const MOST_COLUMNS_OF_A_CELL: usize = 80;

/// The root of the repository; `None` if this is a package.
fn repository() -> Option<PathBuf> {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    if package.join("Cargo.toml.orig").exists() {
        println!("skipped: a package has no documents beside it");
        return None;
    }
    Some(package.join("../.."))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below `folder` whose name ends in `end`, except build outputs.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            found.extend(files(&path, end));
        } else if path.to_str().is_some_and(|path| path.ends_with(end)) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// A document: its name in the repository, its lines of prose (empty for those of a code block),
/// and its code spans.
struct Document {
    name: String,
    text: String,
    prose: Vec<String>,
}

impl Document {
    fn read(root: &Path, name: &str) -> Document {
        let text = read(&root.join(name));
        let mut is_code = false;
        let mut prose = Vec::new();
        for line in text.lines() {
            let is_fence = line.trim_start().starts_with("```");
            is_code ^= is_fence;
            prose.push(if is_code || is_fence { String::new() } else { line.to_string() });
        }
        assert!(!is_code, "{name}: an unclosed code block");
        Document { name: name.to_string(), text, prose }
    }

    /// The text between backticks. A span may continue in the next line.
    fn spans(&self) -> Vec<String> {
        let mut spans = Vec::new();
        for paragraph in self.prose.split(|line| line.is_empty()) {
            let text = paragraph.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ");
            let parts: Vec<&str> = text.split('`').collect();
            assert!(parts.len() % 2 == 1, "{}: an unpaired backtick in: {text}", self.name);
            spans.extend(parts.into_iter().skip(1).step_by(2).map(str::to_string));
        }
        spans
    }

    fn mentions(&self) -> Vec<Mention> {
        self.spans().iter().filter_map(|span| Mention::of(span)).collect()
    }
}

/// The documents whose code spans and links are checked, and whose lines end at [`MOST_COLUMNS`].
fn documents(root: &Path) -> Vec<Document> {
    let mut names: Vec<String> =
        ["DESIGN.md", "README.md", "crates/slat/PORTING.md", "crates/slat/OBLIGATIONS.md"].map(str::to_string).to_vec();
    for path in files(&root.join("docs"), ".md") {
        names.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_string());
    }
    assert!(names.len() > 15, "only {names:?}");
    names.iter().map(|name| Document::read(root, name)).collect()
}

/// What a code span names.
#[derive(Debug, PartialEq)]
enum Mention {
    /// A file, and an item in it.
    Item(String, String),
    /// A model, and a rule of it.
    Rules(String, Vec<String>),
    Path(String),
    /// The parts of an identifier.
    Identifier(Vec<String>),
}

fn is_identifier(text: &str) -> bool {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    text.chars().all(is_word) && text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
}

impl Mention {
    fn of(span: &str) -> Option<Mention> {
        const FOLDERS: [&str; 18] = [
            "tests/",
            "src/",
            "examples/",
            "benches/",
            "slat-machine/",
            "slat-pager/",
            "slat-userfaultfd/",
            "slat-model/",
            "slat-cli/",
            "slat-results/",
            "adapters/",
            "bench/",
            "crates/",
            "models/",
            "ci/",
            "docs/",
            "fuzz/",
            ".ci/",
        ];
        const ENDS: [&str; 5] = [".rs", ".py", ".sh", ".md", ".toml"];
        if let Some((file, item)) = span.split_once(".rs::") {
            return Some(Mention::Item(format!("{file}.rs"), item.to_string()));
        }
        if let Some((model, rules)) = span.split_once(".py: ") {
            let rules = rules.split(',').map(|rule| rule.trim().to_string()).collect();
            return Some(Mention::Rules(format!("{model}.py"), rules));
        }
        let is_path =
            FOLDERS.iter().any(|folder| span.starts_with(folder)) || ENDS.iter().any(|end| span.ends_with(end));
        if is_path && !span.contains(' ') {
            return Some(Mention::Path(span.to_string()));
        }
        let parts: Vec<&str> = span.trim_end_matches("()").trim_end_matches('!').split("::").collect();
        // One letter is a variable, or a bit of a PTE.
        (parts.iter().all(|part| is_identifier(part)) && span.len() > 1)
            .then(|| Mention::Identifier(parts.into_iter().map(str::to_string).collect()))
    }
}

/// The place of a path in a document: folders of the engine are in `crates/slat`, those of the
/// other crates in `crates`.
fn located(root: &Path, path: &str) -> PathBuf {
    let first = path.split('/').next().unwrap();
    match first {
        "tests" | "src" | "examples" | "benches" => root.join("crates/slat").join(path),
        "slat-machine" | "slat-model" | "slat-cli" | "slat-results" | "slat-pager" | "slat-userfaultfd" => {
            root.join("crates").join(path)
        }
        _ => root.join(path),
    }
}

/// Whether `item` is defined in `text`: after a keyword, or as the first argument of a macro that
/// makes tests.
fn defines(text: &str, item: &str) -> bool {
    const KEYWORDS: [&str; 9] = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "union"];
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    text.match_indices(item).any(|(at, _)| {
        let before = text[..at].trim_end();
        let is_whole = !text[..at].ends_with(is_word) && !text[at + item.len()..].starts_with(is_word);
        let last_word = before.rsplit(|letter| !is_word(letter)).next();
        is_whole
            && (before.ends_with("!(")
                || before.ends_with("macro_rules!")
                || last_word.is_some_and(|word| KEYWORDS.contains(&word)))
    })
}

/// The rules that `ci/models.sh` leaves out, by model.
fn rules_of_models(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let script = read(&root.join("ci/models.sh")).replace("\\\n", " ");
    let mut rules = BTreeMap::new();
    for line in script.lines().filter_map(|line| line.strip_prefix("check ")) {
        let mut words = line.split_whitespace().map(str::to_string);
        let model = format!("models/{}.py", words.next().unwrap());
        assert!(root.join(&model).exists(), "ci/models.sh: {model} does not exist");
        rules.insert(model, words.collect());
    }
    assert!(rules.len() > 5, "ci/models.sh cannot be parsed");
    rules
}

/// The rules that `ci/proofs.sh` leaves out, by proof.
fn rules_of_proofs(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut rules = BTreeMap::<_, BTreeSet<String>>::new();
    let mut proof = String::new();
    for line in read(&root.join("models/proofs/lost.txt")).lines() {
        if !line.starts_with(' ') {
            proof = format!("models/proofs/{line}");
            assert!(root.join(&proof).exists(), "models/proofs/lost.txt: {proof} does not exist");
        } else if let Some((rule, _)) = line.trim_start().split_once(": ") {
            rules.entry(proof.clone()).or_default().insert(rule.to_string());
        }
    }
    assert!(rules.len() > 20, "models/proofs/lost.txt cannot be parsed");
    rules
}

/// The litmus tests, by file.
fn litmus_tests(root: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let mut tests = BTreeMap::<_, BTreeSet<String>>::new();
    let mut file = String::new();
    for line in read(&root.join("models/litmus/verdicts.md")).lines() {
        if let Some(name) = line.strip_prefix("# `").and_then(|line| line.strip_suffix('`')) {
            file = format!("models/litmus/{name}");
            assert!(root.join(&file).exists(), "models/litmus/verdicts.md: {file} does not exist");
        } else if let Some(test) = line.strip_prefix("## ") {
            tests.entry(file.clone()).or_default().insert(test.to_string());
        }
    }
    assert!(tests.values().map(BTreeSet::len).sum::<usize>() > 50, "models/litmus/verdicts.md cannot be parsed");
    tests
}

/// All words of the code.
fn words_of_code(root: &Path) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    let sources = ["crates", "adapters", "bench", "fuzz"].map(|folder| files(&root.join(folder), ".rs")).concat();
    assert!(sources.len() > 200);
    let manifests = ["crates", "adapters", "bench"].map(|folder| files(&root.join(folder), ".toml")).concat();
    for path in sources.iter().chain(&manifests) {
        if path.ends_with("documents.rs") {
            continue;
        }
        let text = read(path);
        let all = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
        words.extend(all.filter(|word| !word.is_empty()).map(str::to_string));
    }
    words
}

#[test]
fn all_names_in_the_documents_exist() {
    let Some(root) = repository() else { return };
    let of_proofs = rules_of_proofs(&root).into_iter().chain(litmus_tests(&root));
    let rules: BTreeMap<_, _> = rules_of_models(&root).into_iter().chain(of_proofs).collect();
    let words = words_of_code(&root);
    let mut missing = Vec::new();
    let mut nr_mentions = 0;
    for document in documents(&root) {
        for mention in document.mentions() {
            nr_mentions += 1;
            let exists = match &mention {
                Mention::Item(file, item) => {
                    let path = located(&root, file);
                    path.is_file() && defines(&read(&path), item)
                }
                Mention::Rules(model, named) => {
                    rules.get(model).is_some_and(|all| named.iter().all(|rule| all.contains(rule)))
                }
                Mention::Path(path) => located(&root, path).exists(),
                Mention::Identifier(parts) => {
                    OF_OTHERS.contains(&document.name.as_str()) || parts.iter().all(|part| words.contains(part))
                }
            };
            if !exists {
                missing.push(format!("{}: {mention:?}", document.name));
            }
        }
    }
    assert!(missing.is_empty(), "these are named and missing:\n{}", missing.join("\n"));
    assert!(nr_mentions > 1000, "only {nr_mentions}");
}

/// Crates of which `docs/modules.md` names each source file, but for tests.
const LISTED: [&str; 5] = ["slat-metal", "slat-guest-init", "slat-kvm-init", "slat-pager", "slat-results"];

#[test]
fn the_list_of_modules_has_each_file() {
    let Some(root) = repository() else { return };
    let mentions = Document::read(&root, "docs/modules.md").mentions();
    let paths = mentions.iter().filter_map(|mention| match mention {
        Mention::Path(path) => located(&root, path).canonicalize().ok(),
        _ => None,
    });
    let named: BTreeSet<PathBuf> = paths.collect();
    let mut missing = Vec::new();
    for name in LISTED {
        let source = root.join("crates").join(name).join("src");
        let sources: Vec<_> = [".rs", ".s"].iter().flat_map(|end| files(&source, end)).collect();
        assert!(sources.len() > 3, "{name} has no sources");
        for path in sources {
            let below = path.strip_prefix(&source).unwrap().with_extension("");
            let is_test = below.to_str().unwrap().split(['/', '_']).any(|word| word == "tests");
            if !is_test && !named.contains(&path.canonicalize().unwrap()) {
                missing.push(path.strip_prefix(&root).unwrap().display().to_string());
            }
        }
    }
    assert!(missing.is_empty(), "docs/modules.md does not name these:\n{}", missing.join("\n"));
}

#[test]
fn each_rule_of_a_model_is_one_of_a_protocol() {
    let Some(root) = repository() else { return };
    let mut rules = rules_of_models(&root);
    for (name, ..) in PROTOCOLS {
        for mention in Document::read(&root, &format!("docs/protocols/{name}")).mentions() {
            if let Mention::Rules(model, named) = mention
                && !model.starts_with("models/proofs/")
                && !model.starts_with("models/litmus/")
            {
                let left = rules.get_mut(&model).unwrap_or_else(|| panic!("{name}: there is no {model}"));
                left.retain(|rule| !named.contains(rule));
            }
        }
    }
    rules.retain(|_, left| !left.is_empty());
    assert!(rules.is_empty(), "no page of a protocol names these rules: {rules:?}");
}

/// The steps of a proof, each with its text.
fn steps_of_proof(root: &Path, name: &str) -> BTreeMap<String, String> {
    let text = fs::read_to_string(root.join(format!("models/proofs/{name}.py"))).unwrap();
    let steps = text.split("\n    def ").filter_map(|method| method.strip_prefix("step_"));
    steps.map(|step| (step.split('(').next().unwrap().to_string(), step.to_string())).collect()
}

#[test]
fn each_change_of_a_pte_is_a_step_of_a_proof() {
    let Some(root) = repository() else { return };
    let head = fs::read_to_string(root.join("crates/slat/src/table/pte.rs")).unwrap();
    // The rows of the table whose second column has this heading.
    let rows = |heading: &str| -> Vec<(String, String)> {
        let first = format!("//! | from -> to | {heading} |\n//! |---|---|\n");
        let (_, rest) = head.split_once(&first).unwrap_or_else(|| panic!("no table of {heading}"));
        let lines = rest.lines().map_while(|line| line.strip_prefix("//! | ")?.strip_suffix(" |"));
        lines.map(|line| line.split_once(" | ").unwrap()).map(|(a, b)| (a.to_string(), b.to_string())).collect()
    };
    let (changes, steps) = (rows("operation"), rows("steps"));
    let first_column = |rows: &[(String, String)]| rows.iter().map(|(change, _)| change.clone()).collect::<Vec<_>>();
    assert!(changes.len() > 10);
    assert_eq!(first_column(&changes), first_column(&steps), "a change without a step, or a step without a change");

    let page_tables = steps_of_proof(&root, "page_tables");
    let mut named = BTreeSet::new();
    for (change, proof) in &steps {
        let (name, of_change) = proof.split_once(": ").unwrap();
        let known = steps_of_proof(&root, name);
        for step in of_change.split(", ") {
            assert!(known.contains_key(step) || page_tables.contains_key(step), "{change}: no step {step} in {name}");
            named.insert(step.to_string());
        }
    }
    // The other way round: the steps that change PTEs in the proofs of page tables that are
    // replayed.
    let changes_pte = |text: &str| ["'kind': ", "'frozen': ", "self.store("].iter().any(|word| text.contains(word));
    let proofs = ["invalidation", "break_before_make", "undo"].map(|proof| steps_of_proof(&root, proof));
    for (step, text) in page_tables.into_iter().chain(proofs.into_iter().flatten()) {
        assert!(!changes_pte(&text) || named.contains(&step), "{step} changes a PTE, and no change of a PTE names it");
    }
}

#[test]
fn each_protocol_has_its_headings_and_each_rule_what_notices_it() {
    let Some(root) = repository() else { return };
    let pages: BTreeSet<String> = files(&root.join("docs/protocols"), ".md")
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_string())
        .filter(|name| name != "README.md")
        .collect();
    assert_eq!(pages, PROTOCOLS.iter().map(|(name, ..)| name.to_string()).collect());
    for (name, least_items, least_rules) in PROTOCOLS {
        let page = Document::read(&root, &format!("docs/protocols/{name}"));
        let headings: Vec<&str> = page.prose.iter().map(String::as_str).filter(|line| line.starts_with("# ")).collect();
        assert_eq!(headings[1..6], HEADINGS, "{name}");

        let mentions = page.mentions();
        let nr_items = mentions.iter().filter(|mention| matches!(mention, Mention::Item(..))).count();
        let nr_rules: usize =
            mentions.iter().map(|mention| if let Mention::Rules(_, rules) = mention { rules.len() } else { 0 }).sum();
        println!("(\"{name}\", {nr_items}, {nr_rules}),");
        assert!(
            nr_items >= least_items && nr_rules >= least_rules,
            "{name} names {nr_items} items and {nr_rules} rules"
        );

        // Each rule is a heading of the second level below `# Rules`.
        let text = page.prose.join("\n");
        let (_, rules) = text.split_once("\n# Rules\n").unwrap();
        let rules = rules.split("\n# ").next().unwrap();
        assert!(rules.contains("\n## "), "{name} has no rules");
        for rule in rules.split("\n## ").skip(1) {
            let title = rule.lines().next().unwrap();
            assert!(rule.contains("\n- Without it:"), "{name}: no consequence is named for: {title}");
            let (_, noticed) =
                rule.split_once("\n- Noticed by:").unwrap_or_else(|| panic!("{name}: what notices: {title}"));
            let by = Document { name: title.to_string(), text: String::new(), prose: vec![noticed.to_string()] };
            let names_a_guard = by.mentions().iter().any(|mention| !matches!(mention, Mention::Identifier(_)));
            assert!(
                names_a_guard || noticed.trim_start().starts_with("nothing"),
                "{name}: no test or model is named for: {title}"
            );
        }
    }
}

#[test]
fn links_lead_somewhere() {
    let Some(root) = repository() else { return };
    let mut nr_links = 0;
    for document in documents(&root) {
        let folder = root.join(&document.name).parent().unwrap().to_path_buf();
        let text = document.prose.join("\n");
        for (at, _) in text.match_indices("](") {
            let target = text[at + 2..].split(')').next().unwrap();
            if target.contains("://") {
                continue;
            }
            nr_links += 1;
            let (path, heading) = target.split_once('#').unwrap_or((target, ""));
            let file = if path.is_empty() { root.join(&document.name) } else { folder.join(path) };
            assert!(file.exists(), "{}: nothing is at {target}", document.name);
            let has_heading = || {
                let headings = read(&file);
                headings.lines().filter(|line| line.starts_with('#')).any(|line| anchor(line) == heading)
            };
            assert!(heading.is_empty() || has_heading(), "{}: no such heading: {target}", document.name);
        }
    }
    assert!(nr_links > 50, "only {nr_links}");
}

/// The name of a heading in links, as repository pages make it.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
    kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

#[test]
fn lines_end_at_column_100() {
    let Some(root) = repository() else { return };
    let mut long = Vec::new();
    for document in documents(&root) {
        for (line, number) in document.prose.iter().zip(1..) {
            let is_long = if line.starts_with('|') {
                line.split('|').any(|cell| cell.trim().chars().count() > MOST_COLUMNS_OF_A_CELL)
            } else {
                // A link or a name of a test cannot be broken, nor a picture.
                let text = line.trim_start_matches(|letter: char| " -*.".contains(letter) || letter.is_ascii_digit());
                line.chars().count() > MOST_COLUMNS && text.contains(' ') && !text.starts_with("<img ")
            };
            if is_long {
                long.push(format!("{}:{number}: {line}", document.name));
            }
        }
    }
    assert!(long.is_empty(), "these lines, or cells of them, are too long:\n{}", long.join("\n"));
}

#[test]
fn the_design_is_short() {
    let Some(root) = repository() else { return };
    let nr_words = Document::read(&root, "DESIGN.md").text.split_whitespace().count();
    assert!(nr_words <= MOST_WORDS_OF_DESIGN, "DESIGN.md has {nr_words} words");
}

#[test]
fn the_notation_is_recognised() {
    assert_eq!(
        Mention::of("tests/engine/fault.rs::sizes"),
        Some(Mention::Item("tests/engine/fault.rs".into(), "sizes".into()))
    );
    assert_eq!(
        Mention::of("models/zap.py: no-number, number-again"),
        Some(Mention::Rules("models/zap.py".into(), vec!["no-number".into(), "number-again".into()]))
    );
    assert_eq!(Mention::of("table/pte.rs"), Some(Mention::Path("table/pte.rs".into())), "which is in no folder");
    assert_eq!(
        Mention::of("Vm::invalidate_range"),
        Some(Mention::Identifier(vec!["Vm".into(), "invalidate_range".into()]))
    );
    assert_eq!(Mention::of("cargo test -p slat"), None);
    assert_eq!(Mention::of("W"), None);

    let text = "fn sizes() {}\neach!(\n    maps_all, sizes);\nmod part;\n// none_of_these(sizes_too)";
    for item in ["sizes", "maps_all", "part"] {
        assert!(defines(text, item), "{item}");
    }
    for item in ["size", "sizes_too", "none_of_these"] {
        assert!(!defines(text, item), "{item}");
    }
    assert_eq!(anchor("## How `Vm` waits, and why"), "how-vm-waits-and-why");
}
