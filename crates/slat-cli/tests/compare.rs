//! `slat compare` for its user: tables, the object, Markdown, and the exit code.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{assert_form, assert_refused, file, program, read, samples, slat, stderr};
use serde_json::Value;

#[test]
fn mistakes_are_one_line() {
    assert_refused("compare --only paging", 2, "dirty-log");
    assert_refused("compare --only shadow,", 2, "parallel-faults");
    assert_refused("compare --runs 3", 2, "--runs");
    assert_refused("compare --json /no/such/folder/results.json", 3, "/no/such/folder");
}

#[test]
fn systems_come_with_figures_claims_and_what_was_published() {
    let json = file("compare.json");
    let output = slat(&format!("compare --quick --only Numa-Split,numa-split --json {}", json.display()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    for text in [
        "# slat compare --quick",
        "## numa-split: NUMA",
        "$ slat numa-split",
        "2% to 35%",
        "claims made",
        "software CPUs",
        "$ slat scale --system numa-split -b 2M",
        "416 modelled vCPUs on 8 nodes, 2 MiB each",
        "1.02–1.54×",
        "error",
    ] {
        assert!(printed.contains(text), "no '{text}' in:\n{printed}");
    }
    assert!(!printed.contains("## parallel-faults"));

    let object: Value = read(&json);
    assert_form(&object);
    assert_eq!((&object["experiment"], &object["interrupted"]), (&"compare".into(), &false.into()));
    assert_eq!(object["config"]["only"], Value::from(vec!["numa-split"]));
    let claims = &object["compared"]["claims"];
    assert_eq!(claims["made"], claims["held"]);
    let system = &object["compared"]["systems"][0];
    assert_eq!(system["experiments"][0]["experiment"], "numa-split");
    let comparison = &system["comparisons"][0];
    assert_eq!((&comparison["name"], &comparison["better"]), (&"local_walk_reads".into(), &"more".into()));
    let sides = comparison["sides"].as_array().unwrap();
    let [slat, caller, _policy] = &sides[..] else { panic!("{sides:?}") };
    assert_eq!((&slat["role"], &slat["ratio"]), (&"slat".into(), &Value::Null));
    // One node of eight is that of the splitting thread.
    let of_eighth: Vec<f64> = samples(caller).iter().map(|reads| reads * 8.0).collect();
    assert_eq!((samples(slat).len(), samples(slat)), (5, of_eighth));
    assert_eq!(caller["ratio"], serde_json::json!({ "value": 8.0, "interval": [8.0, 8.0] }));
    let predicted = system["comparisons"].as_array().unwrap().last().unwrap();
    assert_eq!((&predicted["name"], &predicted["sides"][0]["role"]), (&"model_dirty_memory".into(), &"model".into()));
    let gain = predicted["sides"][1]["ratio"]["value"].as_f64().unwrap();
    assert!((1.02..1.54).contains(&gain), "{gain}");
    assert_eq!(predicted["sides"][1]["measured_on"], "modelled CPUs");
    assert_eq!(caller["claim"], serde_json::json!({ "above": 1.0, "verdict": "held" }));
}

/// A folder that looks like slat's source, with a kernel in its cache. Emulator and compiler are
/// scripts, and each adds a line to `started`.
struct Source(PathBuf);

impl Source {
    fn new(name: &str) -> Source {
        let source = Source(file(&format!("compare-{name}")));
        // Of an earlier run of the test.
        let _ = fs::remove_dir_all(&source.0);
        for folder in ["tools", "crates/slat-metal", "target/metal/cache/kvm/boot", "target/metal/cache/kvm/modules"] {
            fs::create_dir_all(source.0.join(folder)).unwrap();
        }
        let kvm = source.0.join("target/metal/cache/kvm");
        for path in
            [source.0.join("crates/slat-metal/Cargo.toml"), kvm.join("boot/vmlinuz-6.1"), kvm.join("modules/kvm.ko")]
        {
            fs::write(path, "a file").unwrap();
        }
        program(&source.0.join("tools/rustc"), "echo /");
        let build = "\
package=$3 profile=$7
while [ \"$1\" != --target ]; do shift; done
mkdir -p $4/$2/$profile
echo $package >$4/$2/$profile/$package
echo builds $package >>started";
        program(&source.0.join("tools/cargo"), build);
        source.emulator("10.0.2", 300, "1200");
        source
    }

    /// From now on the emulator is of this version, and a fault takes so many instructions of slat
    /// and of KVM.
    fn emulator(&self, version: &str, slat: u32, kvm: &str) {
        let script = format!(
            "\
[ \"$1\" = --version ] && echo 'QEMU emulator version {version} (test)' && exit
case \"$*\" in
*initrd*) echo runs KVM >>{0}; echo \"figure demand_fault_tdp {kvm} instructions\" >&2;;
*) echo runs slat >>{0}; echo 'figure demand_fault {slat} instructions' >&2;;
esac
echo 'say counting' >&2
echo 'verdict pass all measured' >&2
exit 33",
            self.0.join("started").display()
        );
        program(&self.0.join("tools/qemu-system-x86_64"), &script);
    }

    fn run(&self, args: &str) -> Output {
        let _ = fs::remove_file(self.0.join("started"));
        let tools = self.0.join("tools");
        let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
        command.current_dir(&self.0).args(args.split(' '));
        command.env("CARGO", tools.join("cargo")).env("RUSTC", tools.join("rustc"));
        command.env("PATH", format!("{}:/usr/bin:/bin", tools.display())).output().unwrap()
    }

    /// What the last run has built and started.
    fn started(&self) -> String {
        fs::read_to_string(self.0.join("started")).unwrap_or_default()
    }

    fn measure(&self) {
        let output = self.run("metal --guest measure");
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(self.started().matches("runs KVM").count(), 2);
    }

    fn counts(&self) -> PathBuf {
        self.0.join("target/metal/cache/kvm-counts-svm.json")
    }

    /// Compares, and expects that nothing is measured: `why`. Returns what was built and started.
    #[track_caller]
    fn assert_not_measured(&self, why: &str) -> String {
        let output = self.run("compare --only instructions");
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let printed = String::from_utf8(output.stdout).unwrap();
        let line = printed.lines().find(|line| line.starts_with("- Not measured: slat metal --guest measure: "));
        assert!(line.is_some_and(|line| line.contains(why)), "no '{why}' in:\n{printed}");
        assert!(printed.contains("0 claims made"), "{printed}");
        self.started()
    }
}

const HOW: &str = "; slat metal --guest measure counts and saves them, in minutes.";

#[test]
fn without_counts_of_kvm_nothing_is_built_or_started() {
    let source = Source::new("nothing");
    let why = format!("no counts of KVM are saved in {}{HOW}", source.counts().display());
    assert_eq!(source.assert_not_measured(&why), "");
    // Counts of slat alone are none of KVM.
    assert!(source.run("metal --guest measure --peer none").status.success());
    assert_eq!(source.assert_not_measured(&why), "");
}

#[test]
fn instructions_stand_beside_those_that_were_saved() {
    let source = Source::new("saved");
    source.measure();
    let json = file("compare_instructions.json");
    let output = source.run(&format!("compare --only instructions --json {}", json.display()));
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(printed.contains("    $ slat metal --guest measure\n"), "{printed}");
    assert!(
        printed.contains("1 claims made: 1 held") && printed.contains("emulated machine, instructions"),
        "{printed}"
    );
    assert!(!printed.contains("slat |") && !printed.contains("kvm  |"), "{printed}");
    assert_eq!(source.started(), "builds slat-kvm-init\nbuilds slat-metal\nruns slat\nruns slat\n");
    let object = read(&json);
    let sides = &object["compared"]["systems"][0]["comparisons"][0]["sides"];
    assert_eq!((samples(&sides[0]), samples(&sides[2])), (vec![300.0; 2], vec![1200.0; 2]));
    assert_eq!((&sides[2]["name"], &sides[2]["ratio"]["value"]), (&"KVM, TDP MMU".into(), &4.0.into()));

    // slat is counted anew.
    source.emulator("10.0.2", 1300, "0");
    let output = source.run("compare --only instructions");
    assert_eq!(output.status.code(), Some(1));
    let lost = "claim lost: instructions: Demand fault: speed-up over KVM, TDP MMU is 0.92";
    assert!(stderr(&output).contains(lost), "{}", stderr(&output));
    source.emulator("10.0.2", 1200, "0");
    let output = source.run("compare --only instructions");
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&output.stdout).contains("0 held, 1 tied"));
}

#[test]
fn counts_of_another_machine_are_not_compared() {
    let source = Source::new("another");
    source.measure();
    let why = format!("are of another emulator, kernel, first process or command line{HOW}");
    source.emulator("10.0.3", 300, "1200");
    assert_eq!(source.assert_not_measured(&why), "builds slat-kvm-init\n");
    source.emulator("10.0.2", 300, "1200");
    for file in ["boot/vmlinuz-6.1", "modules/kvm.ko"] {
        let path = source.0.join("target/metal/cache/kvm").join(file);
        fs::write(&path, "another").unwrap();
        assert_eq!(source.assert_not_measured(&why), "builds slat-kvm-init\n");
        fs::write(&path, "a file").unwrap();
    }
    assert!(source.run("compare --only instructions").status.success());
    assert_eq!(source.started().matches("runs slat").count(), 2);
    assert!(source.run("metal --guest measure --append mitigations=auto").status.success());
    assert_eq!(source.assert_not_measured(&why), "builds slat-kvm-init\n");
}

#[test]
fn what_a_comparison_of_instructions_needs_is_not_downloaded() {
    let source = Source::new("missing");
    source.measure();
    let cache = source.0.join("target/metal/cache");
    let why = format!("in {}; slat metal --guest measure gets it.", cache.display());
    fs::remove_dir_all(cache.join("kvm")).unwrap();
    let kernel = format!("there is no package of a Linux kernel with KVM {why}");
    assert_eq!(source.assert_not_measured(&kernel), "");
    source.emulator("7.2.19", 300, "1200");
    let qemu = format!("there is no qemu-system-x86_64 of QEMU 10 here, and no package of it {why}");
    assert_eq!(source.assert_not_measured(&qemu), "");
}

#[test]
fn damaged_counts_are_said_before_anything_starts() {
    let source = Source::new("damaged");
    source.measure();
    let whole = fs::read_to_string(source.counts()).unwrap();
    let why = format!("KVM's counts in {} are damaged: ", source.counts().display());
    for damaged in
        ["", &whole[..whole.len() / 2], &whole.replace("1200", "-1200"), &whole.replace("1200.0", "\"1200\"")]
    {
        assert_ne!(damaged, whole);
        fs::write(source.counts(), damaged).unwrap();
        assert_eq!(source.assert_not_measured(&why), "");
    }
    source.measure();
    assert_eq!(fs::read_to_string(source.counts()).unwrap(), whole);
}

#[test]
fn counts_of_kvm_that_differ_are_not_saved() {
    let source = Source::new("differ");
    source.emulator("10.0.2", 300, "$$");
    let output = source.run("metal --guest measure");
    assert_eq!(output.status.code(), Some(1));
    let message = stderr(&output);
    assert!(message.contains("two runs did not count the same: demand_fault_tdp: "), "{message}");
    assert!(!Path::exists(&source.counts()));
}
