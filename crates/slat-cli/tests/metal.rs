//! `slat metal` for its user: bad input, and the lines of hypervisor and guest, from an emulator
//! that is a script. Nothing is built and nothing downloaded.
#![allow(missing_docs)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{assert_refused, figure, figures, file, program, read, samples, stderr};

/// A folder for the files of one test.
fn folder(name: &str) -> PathBuf {
    let folder = file(&format!("metal-{name}"));
    fs::create_dir_all(&folder).unwrap();
    folder
}

/// An emulator that runs `script`. The hypervisor's lines go to the standard error.
fn emulator(folder: &Path, version: &str, script: &str) -> PathBuf {
    let path = folder.join("qemu");
    program(
        &path,
        &format!("[ \"$1\" = --version ] && echo 'QEMU emulator version {version} (test)' && exit\n{script}"),
    );
    path
}

/// The command with `args`, an emulator or a cache, and an image.
fn command(folder: &Path, args: &str, emulator: &Path, more: &str) -> Command {
    let image = folder.join("image");
    fs::write(&image, "the image").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.current_dir(folder).arg("metal").args(args.split_whitespace()).arg(emulator);
    command.arg("--image").arg(image).args(more.split_whitespace());
    command
}

const SUITE: &str = "--guest suite --qemu";

fn run(name: &str, script: &str, more: &str) -> Output {
    let folder = folder(name);
    command(&folder, SUITE, &emulator(&folder, "10.0.2", script), more).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The command that counts instructions, without KVM.
fn measure(name: &str, script: &str, more: &str) -> Output {
    let folder = folder(name);
    let args = "--guest measure --peer none --qemu";
    command(&folder, args, &emulator(&folder, "10.0.2", script), more).output().unwrap()
}

/// Runs a script, and expects exit code 1 with `what`.
#[track_caller]
fn assert_fails(name: &str, script: &str, more: &str, what: &str) {
    let output = run(name, script, more);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.starts_with("slat: check failed: ") && message.contains(what), "{message}");
    assert_eq!(message.lines().count(), 1, "{message}");
}

#[test]
fn bad_usage_exits_with_2_and_one_line() {
    for (args, what) in [
        ("metal --cpus 0", "0 is not in 1..=7"),
        ("metal --cpus 8", "8 is not in 1..=7"),
        ("metal --cpus two", "invalid digit"),
        ("metal --machine power", "[possible values: svm, vmx, arm, riscv]"),
        ("metal --guest windows", "[possible values: suite, linux, migration, measure, wild]"),
        ("metal --control all", "[possible values: none, no-flush"),
        ("metal --operations 0", "at least 1"),
        ("metal --memory 64M", "must be from 128M to 1G"),
        ("metal --memory 128M", "--memory below 256M goes with --machine vmx"),
        ("metal --memory 4G", "must be from 128M to 1G"),
        ("metal --memory 262148K", "must be a multiple of 1M"),
        ("metal --memory lots", "write it as 4096, 64M or 1GiB"),
        ("metal --timeout 0s", "must not be zero"),
        ("metal --live", "--live shows the software machine"),
        ("metal --guest suite --append quiet", "--append goes with --guest linux, migration or measure"),
        ("metal --guest measure --kernel x", "--kernel goes with --guest linux"),
        ("metal --guest measure --cpus 0", "0 is not in 1..=7"),
        ("metal --guest measure --cpus 5", "--guest measure is of at most 4 CPUs"),
        ("metal --machine arm --guest measure --cpus 2", "with --machine arm is of one CPU; leave --cpus out"),
        ("metal --machine riscv --guest measure --cpus 4", "with --machine riscv is of one CPU; leave --cpus out"),
        ("metal --guest measure --control no-flush", "--control goes with --guest suite or linux"),
        ("metal --guest migration --operations 5", "--operations goes with --guest suite or linux"),
        ("metal --guest migration --control no-flush", "--control no-flush has no meaning with --guest migration"),
        ("metal --guest linux --control lose-page", "--control lose-page has no meaning with --guest linux"),
        ("metal --control no-local-flush", "--control no-local-flush has no meaning with --machine svm"),
        ("metal --machine arm --control no-kick", "--control no-kick has no meaning with --machine arm"),
        ("metal --machine riscv --control flush-before-break", "no meaning with --machine riscv"),
        ("metal --guest measure --nodes 2", "--nodes goes with --machine svm and --guest suite or linux"),
        ("metal --guest suite --peer kvm", "--peer goes with --guest measure"),
        ("metal --machine vmx --guest suite --qemu qemu", "--qemu goes with --machine svm, arm or riscv"),
        ("metal --guest wild --cpus 2", "--guest wild has one CPU; leave --cpus out"),
        ("metal --guest wild --control no-flush", "--control go with --guest suite or linux"),
        ("metal --guest linux --control wrong-pte", "--control wrong-pte goes with --guest suite"),
        ("metal --machine vmx --guest suite --control wrong-pte", "no meaning with --machine vmx"),
        ("metal --machine vmx --append it's", "must have no ', which the boot loader reads"),
        ("metal --guest suite --machine arm --nodes 2", "--nodes goes with --machine svm"),
        ("metal --kernel /no/such/kernel", "--kernel /no/such/kernel: No such file"),
        ("metal --kernel /dev/null", "--kernel /dev/null is no file"),
        ("metal --image /no/such/image", "--image /no/such/image: No such file"),
    ] {
        assert_refused(args, 2, what);
    }
    let text = file("metal-no-kernel");
    fs::write(&text, "a text. ".repeat(1000)).unwrap();
    for (machine, kernel) in [
        ("svm", "bzImage of Linux for x86"),
        ("arm", "Image of Linux for arm64"),
        ("riscv", "Image of Linux for riscv64"),
    ] {
        let line = format!("metal --machine {machine} --kernel {}", text.display());
        assert_refused(&line, 2, kernel);
    }
}

#[test]
fn what_is_not_to_be_had_exits_with_3_and_one_line() {
    assert_refused("metal --machine arm --guest wild", 3, "--guest wild is not there yet; choose --guest suite");
    assert_refused("metal --machine vmx --guest measure", 3, "--machine vmx with --guest measure is not there yet");
    let line = "--machine arm with --guest migration is not there yet; choose --guest linux, or --machine svm";
    assert_refused("metal --machine arm --guest migration", 3, line);
    assert_refused("metal --machine arm --qemu /bin/true", 3, "/bin/true is no QEMU");
    assert_refused("metal --qemu /no/such/qemu", 3, "/no/such/qemu: No such file");
    assert_refused("metal --qemu /bin/true", 3, "/bin/true is no QEMU");
    let folder = folder("old");
    let qemu = emulator(&folder, "7.2.19", "");
    assert_refused(&format!("metal --qemu {}", qemu.display()), 3, "is QEMU 7.2.19, and at least 10 is needed");
}

#[test]
fn a_target_that_rust_lacks_is_added_or_named() {
    let folder = folder("target");
    let qemu = emulator(&folder, "10.0.2", "");
    let tools = folder.join("tools");
    // Of an earlier run of the test.
    let _ = fs::remove_dir_all(&tools);
    fs::create_dir_all(&tools).unwrap();
    program(&tools.join("rustc"), "echo /no/such/folder");
    let run = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
        command.current_dir(&folder).args(["metal", "--machine", "arm", "--guest", "suite", "--qemu"]).arg(&qemu);
        let output = command.env("PATH", &tools).env("RUSTC", tools.join("rustc")).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        let line = "rust | has no target aarch64-unknown-none-softfloat: rustup adds it\n";
        assert!(stdout(&output).contains(line), "{}", stdout(&output));
        stderr(&output)
    };
    let without = run();
    assert!(without.contains("here, and there is no rustup to add it; install Rust with rustup"), "{without}");
    program(&tools.join("rustup"), "echo 'error: no such component' >&2; exit 1");
    let refused = run();
    assert!(refused.contains("and rustup cannot add it: error: no such component"), "{refused}");
}

const PASS: &str = "\
echo 'say 2 CPUs, 900 MiB free' >&2
printf 'a word of \\033[31mthe guest\\r\\n'
echo 'qemu: something of its own' >&2
echo \"qemu: warning: TCG doesn't support requested feature: x\" >&2
echo 'progress 1 2 by leaf' >&2
echo 'figure tables_walked 4 1' >&2
echo 'figure leaves_walked 9 1' >&2
echo 'figure operations 1000 1' >&2
echo 'figure pause 0.5 s' >&2
echo 'figure pause 1.5 s' >&2
echo 'verdict pass 1000 operations, none wrong' >&2
exit 33";

#[test]
fn a_pass_is_shown_and_written() {
    let path = file("metal.json");
    let output = run("pass", PASS, &format!("--cpus 4 --seed 9 --json {}", path.display()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for line in [
        "slat | 2 CPUs, 900 MiB free\n",
        "guest| a word of the guest\n",
        "qemu | qemu: something of its own\n",
        "operations",
        "Verified: 1000 operations, none wrong.\n",
    ] {
        assert!(text.contains(line), "no '{line}' in:\n{text}");
    }
    assert!(!text.contains("TCG") && !text.contains("progress"), "{text}");
    let object = read(&path);
    assert_eq!((&object["experiment"], &object["config"]["guest"]), (&"metal".into(), &"suite".into()));
    assert_eq!((&object["config"]["cpus"], &object["config"]["seed"]), (&4.into(), &9.into()));
    assert_eq!(object["host"]["measured_on"], "CPUs emulated by QEMU 10.0.2");
    let found = |name: &str| figure(&object, name, &[]);
    assert_eq!(samples(found("operations")), [1000.0]);
    assert_eq!(samples(found("pause")), [0.5, 1.5]);
    assert_eq!(samples(found("passed")), [1.0]);
    assert_eq!(found("passed")["labels"]["verdict"], "Verified: 1000 operations, none wrong.");
}

#[test]
fn with_quiet_the_result_is_alone() {
    let output = run("quiet", PASS, "--quiet");
    let text = stdout(&output);
    assert!(!text.contains("slat |") && !text.contains("guest|") && text.contains("Verified: "), "{text}");
}

#[test]
fn the_emulator_gets_the_machine() {
    let script = "echo \"$@\"; echo 'verdict pass seen' >&2; exit 33";
    let text = stdout(&run("words", script, "--cpus 3 --memory 1G --seed 5 --operations 7"));
    for words in [
        "-accel tcg,thread=single -cpu EPYC,+svm,+npt,+x2apic -smp 3 -m 2304M",
        "-display none -nodefaults -no-reboot -serial stdio -debugcon file:/dev/stderr",
        "-device isa-debug-exit,iobase=0xf4,iosize=1 -kernel slat-metal",
        "-append guest=suite cpus=3 seed=5 operations=7 memory=1024 walker=outside",
        "-object memory-backend-file,size=2304M,offset=0M,share=on,mem-path=/proc/",
        ",id=ram0 -machine memory-backend=ram0",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
    assert!(!text.contains("-initrd") && !text.contains("control") && !text.contains("-numa"), "{text}");
    let text = stdout(&run("nodes", script, "--cpus 3 --nodes 2"));
    for words in [
        "memory-backend-file,size=384M,offset=384M,share=on,mem-path=/proc/",
        ",id=ram1 -numa node,nodeid=1,memdev=ram1,cpus=1 ",
        " memory=256 nodes=2 walker=outside",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
}

#[test]
fn machines_of_other_architectures_have_their_cpus_and_consoles() {
    let script = "echo \"say $*\" >&2; echo 'figure tables_walked 4 1' >&2; echo 'figure leaves_walked 9 1' >&2
                  echo 'verdict pass seen' >&2; exit 33";
    for (machine, words) in
        [("arm", "-machine virt,virtualization=on,gic-version=3 -cpu max"), ("riscv", "-machine virt -cpu rv64,h=true")]
    {
        let output = run(machine, script, &format!("--machine {machine} --cpus 3"));
        let text = stdout(&output);
        assert!(output.status.success() && text.contains("Verified: seen."), "{text}");
        let words =
            [words, "-smp 3 -m 768M", "-serial stdio -semihosting -kernel slat-metal -append guest=suite cpus=3"];
        for words in words {
            assert!(text.contains(words), "no '{words}' in:\n{text}");
        }
        assert!(!text.contains("-debugcon") && !text.contains("-initrd") && !text.contains("loader"), "{text}");
    }
}

#[test]
fn what_firmware_says_is_shown_only_if_nothing_else_is() {
    let script = "echo 'OpenSBI v1' >&2; echo 'say 2 CPUs' >&2; echo 'a trap' >&2; exit 35";
    let output = run("firmware", script, "--machine riscv");
    let text = stdout(&output);
    assert!(text.contains("slat | 2 CPUs\n") && text.contains("qemu | a trap\n"), "{text}");
    assert!(!text.contains("OpenSBI"), "{text}");
    let output = run("firmware-alone", "echo 'OpenSBI v1' >&2; exit 0", "--machine riscv");
    let line = stderr(&output);
    assert!(line.contains("turned off before a verdict; last: firmware: OpenSBI v1"), "{line}");
}

/// A cache with a Bochs that is `script`, and a GRUB that does what it should.
fn cache_with_bochs(folder: &Path, script: &str) -> PathBuf {
    let root = folder.join("cache/bochs");
    let grub = "usr/lib/grub/i386-pc";
    for name in ["usr/bin", "usr/share/bochs", "usr/share/vgabios", "usr/lib/x86_64-linux-gnu/bochs/plugins", grub] {
        fs::create_dir_all(root.join(name)).unwrap();
    }
    for name in ["usr/share/bochs/BIOS-bochs-latest", "usr/share/vgabios/vgabios.bin"] {
        fs::write(root.join(name), name).unwrap();
    }
    fs::write(root.join(grub).join("boot.img"), [b'B'; 512]).unwrap();
    let help = "[ \"$1\" = --help ] && echo 'Bochs x86 Emulator 2.7' && echo '  -rc filename' && exit";
    program(&root.join("usr/bin/bochs-bin"), &format!("{help}\n{script}"));
    program(&root.join("usr/bin/grub-mkimage"), "cp grub.cfg core.img");
    folder.join("cache")
}

fn run_bochs(name: &str, script: &str, more: &str) -> Output {
    let folder = folder(name);
    let args = "--machine vmx --guest suite --cache";
    command(&folder, args, &cache_with_bochs(&folder, script), more).output().unwrap()
}

#[test]
fn the_machine_with_vmx_has_its_disk_and_its_verdict() {
    let path = file("metal-vmx.json");
    let folder = folder("bochs");
    let script = format!(
        "\
echo '00000000001p[UNMAP ] >>PANIC<< Shutdown port: shutdown requested' >&2
echo 'say 3 CPUs'
cp disk bochsrc {}
echo 'verdict pass none wrong'; exit 1",
        folder.display()
    );
    let words = format!("--cpus 3 --seed 5 --operations 7 --json {}", path.display());
    let output = run_bochs("bochs", &script, &words);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    assert!(text.contains("slat | 3 CPUs\n") && text.contains("Verified: none wrong.\n"), "{text}");
    assert!(!text.contains("bochs|") && !text.contains("PANIC"), "{text}");
    let disk = fs::read(folder.join("disk")).unwrap();
    let words = "'slat-metal' 'guest=suite' 'cpus=3' 'seed=5' 'operations=7' 'memory=256'";
    let config = format!("multiboot (hd0)2048+1 {words}\nboot\n");
    assert_eq!(&disk[..512], [b'B'; 512]);
    assert_eq!(&disk[512..512 + config.len()], config.as_bytes());
    assert_eq!(&disk[1 << 20..][..9], b"the image");
    assert_eq!(disk.len() % (16 * 63 * 512), 0);
    let config = fs::read_to_string(folder.join("bochsrc")).unwrap();
    assert!(config.contains("count=3, ") && config.contains("memory: guest=768, host=768\n"), "{config}");
    let object = read(&path);
    assert_eq!(object["config"]["machine"], "vmx");
    assert_eq!(object["host"]["measured_on"], "CPUs emulated by Bochs 2.7");
}

#[test]
fn a_machine_with_vmx_that_fails_says_why() {
    for (name, script, what) in [
        ("bochs-fail", "echo 'verdict fail page 7 is stale'; exit 1", "check failed: page 7 is stale"),
        (
            "bochs-panic",
            "echo '0p[CPU0  ] >>PANIC<< triple fault' >&2; exit 1",
            "the emulator ended with 1; last: bochs| 0p[CPU0  ] >>PANIC<< triple fault",
        ),
    ] {
        let output = run_bochs(name, script, "");
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        assert!(message.contains(what), "{message}");
    }
}

#[test]
fn instructions_are_counted_twice_and_shown_once() {
    let script = "\
echo \"$@\"
echo 'say counting' >&2
echo 'figure demand_fault 400 instructions' >&2
echo 'figure write_protect_fault_lazy 350 instructions' >&2
echo 'verdict pass all measured' >&2
exit 33";
    let path = file("measure.json");
    let output = measure("measure", script, &format!("--seed 3 --json {}", path.display()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for words in [
        "-accel tcg,thread=single -cpu EPYC",
        "-icount shift=0,sleep=off -seed 3",
        "-smp 1 ",
        "-append guest=measure cpus=1 seed=3",
        "| Write-protect fault          |        350 |            – |",
        "Verified: a loop of known length counts as that",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
    assert_eq!(text.matches("slat | counting").count(), 1, "{text}");
    let object = read(&path);
    let find = |name: &str, variant: &str| figures(&object, name, &[("variant", variant)]).len();
    assert_eq!((find("demand_fault", "lazy"), find("demand_fault", "leaves")), (1, 1));
    assert_eq!((find("write_protect_fault", "lazy"), find("write_protect_fault", "leaves")), (1, 0));
}

#[test]
fn instructions_of_several_cpus_are_counted_together() {
    let script = "\
echo \"$@\"
echo 'figure demand_fault_mean_lazy 450 instructions' >&2
echo 'figure demand_fault_mean_leaves 450 instructions' >&2
echo 'verdict pass all measured' >&2
exit 33";
    let path = file("measure-4.json");
    let output = measure("measure-4", script, &format!("--cpus 4 --json {}", path.display()));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let text = stdout(&output);
    for words in [
        "-accel tcg,thread=single -cpu EPYC",
        "-icount shift=0,sleep=off -seed 1",
        "-smp 4 ",
        "-append guest=measure cpus=4 seed=1",
        "Instructions of 4 CPUs together for each event",
        "| Demand fault, mean            |        450 |          450 |",
    ] {
        assert!(text.contains(words), "no '{words}' in:\n{text}");
    }
    let object = read(&path);
    let all = object["results"].as_array().unwrap();
    assert!(!all.is_empty() && all.iter().all(|figure| figure["labels"]["cpus"] == 4), "{all:?}");
}

#[test]
fn runs_that_count_differently_are_a_failure() {
    let script = "\
echo \"figure demand_fault $$ instructions\" >&2
echo 'verdict pass all measured' >&2
exit 33";
    let output = measure("differ", script, "");
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("two runs did not count the same: demand_fault: "), "{message}");
    let output = measure("no-icount", "echo 'verdict fail the counter is a clock' >&2; exit 35", "");
    assert!(stderr(&output).contains("check failed: the counter is a clock"), "{}", stderr(&output));
}

#[test]
fn a_failure_says_what_went_wrong() {
    let fail = "echo 'verdict fail page 7 is stale' >&2; exit 35";
    assert_fails("fail", fail, "", "check failed: page 7 is stale; please report this");
    let disagree = "echo 'verdict pass all right' >&2; exit 35";
    assert_fails("disagree", disagree, "", "the verdict was \"all right\", but the emulator ended with 35");
    assert_fails("none", "echo 'say booting' >&2; exit 33", "", "without a verdict; last: slat | booting");
    assert_fails("reset", "echo hello; exit 0", "", "was reset or turned off before a verdict; last: guest| hello");
    assert_fails(
        "qemu",
        "echo 'qemu: no memory' >&2; exit 1",
        "",
        "the emulator ended with 1; last: qemu | qemu: no memory",
    );
    assert_fails("killed", "kill -9 $$", "", "the emulator was killed by signal 9; nothing was said");
    let hangs = "echo 'verdict pass all right' >&2; sleep 1000";
    assert_fails("hangs", hangs, "--timeout 1s", "the verdict was \"all right\", but the machine did not end");
    assert_fails("flood", "exec yes", "--quiet --timeout 1s", "no verdict in 1s; last: guest| y");
    assert_fails("timeout", "echo 'say on' >&2; sleep 1000", "--timeout 1s", "no verdict in 1s; last: slat | on");
}

#[test]
fn a_suite_whose_tables_were_not_walked_fails() {
    let script = "echo 'verdict pass all right' >&2; exit 33";
    assert_fails("not-walked", script, "", "the page tables were never walked outside of the machine");
    let walked = "echo 'figure tables_walked 4 1' >&2; echo 'figure leaves_walked 9 1' >&2";
    let why = "no page was found on the node that it was asked from";
    assert_fails("not-placed", &format!("{walked}\n{script}"), "--nodes 2", why);
}

#[test]
fn a_control_must_be_noticed() {
    let output = run("noticed", "echo 'verdict fail access page 7 is stale' >&2; exit 35", "--control no-flush");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let line = "Verified: control no-flush was noticed, as it must be: page 7 is stale.\n";
    assert!(stdout(&output).ends_with(line), "{}", stdout(&output));
    let script = "echo 'verdict pass all right' >&2; exit 33";
    assert_fails("unnoticed", script, "--control no-flush", "control no-flush: what was left out was not noticed");
    let script = "echo 'verdict fail tables the walker and the engine differ' >&2; exit 35";
    assert_fails("by-another", script, "--control no-flush", "another check failed than what was left out causes");
    // A machine that dies has noticed nothing.
    assert_fails("died", "exit 1", "--control no-flush", "the emulator ended with 1");
}

#[test]
fn an_interruption_ends_the_emulator_and_leaves_nothing() {
    let folder = folder("interrupted");
    let pid = folder.join("pid");
    let _ = fs::remove_file(&pid);
    // The emulator has a child of its own.
    let script = format!("sleep 1000 & echo $! >{0}.new; echo $$ >>{0}.new; mv {0}.new {0}; wait", pid.display());
    let qemu = emulator(&folder, "10.0.2", &script);
    let mut child = command(&folder, SUITE, &qemu, "").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    while !pid.exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "the emulator does not start");
        thread::sleep(Duration::from_millis(10));
    }
    let pids = fs::read_to_string(&pid).unwrap();
    assert_eq!(pids.lines().count(), 2);
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let began = Instant::now();
    // Processes that have ended may wait for their parent, which is init then.
    let runs = |pid: &str| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
    };
    while pids.lines().any(runs) {
        assert!(began.elapsed() < Duration::from_secs(60), "processes are left: {pids}");
        thread::sleep(Duration::from_millis(10));
    }
}
