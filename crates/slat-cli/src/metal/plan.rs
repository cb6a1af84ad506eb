//! What is to be done, when nothing is wrong with the options.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::time::Duration;

use super::architecture::{Architecture, Magic};
use super::nodes::NodeMemory;
use super::{
    ControlArg, FEWER_OPERATIONS, GUEST_MEMORY, GuestArg, LEAST_VMX_MEMORY, MachineArg, MetalArgs, OPERATIONS,
};
use crate::failure::{Failure, refuse};
use crate::live::View;
use crate::options::{PeerArg, ValueName};
use crate::session::Session;

/// Memory of the machine beside the guest's and the copy of it that the dirty log keeps up: the
/// hypervisor's, and the guest's files that the emulator loads.
const HYPERVISOR_MEMORY: u64 = 256 << 20;

/// Words for a kernel that migrates: of the clocks it uses the time-stamp counter alone, which goes
/// with it. And work that lasts until it has come.
const OF_MIGRATION: &str = "clocksource=tsc tsc=reliable hpet=disable slat.rounds=8 slat.pages=8000";

/// CPUs that instructions are counted of, at most.
const MAX_MEASURED_CPUS: u32 = 4;

/// The run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Plan {
    pub(super) machine: MachineArg,
    pub(super) guest: GuestArg,
    pub(super) nr_cpus: u32,
    pub(super) nr_nodes: u32,
    pub(super) seed: u64,
    pub(super) nr_operations: u64,
    /// Of the guest, in bytes.
    pub(super) memory: u64,
    pub(super) control: ControlArg,
    pub(super) append: String,
    pub(super) timeout: Duration,
    view: View,
}

impl Plan {
    /// The run of these options, if it can be.
    pub(super) fn new(args: &MetalArgs) -> Result<Plan, Failure> {
        let architecture = args.machine.architecture();
        if (args.machine, args.guest) == (MachineArg::Vmx, GuestArg::Measure) {
            return not_yet(args, "--guest suite, or another --machine");
        }
        if args.guest == GuestArg::Wild && args.machine != MachineArg::Svm {
            return not_yet(args, "--guest suite, or --machine svm");
        }
        let migrates = args.guest == GuestArg::Migration;
        if migrates && args.machine != MachineArg::Svm {
            return not_yet(args, "--guest linux, or --machine svm");
        }
        if std::env::consts::ARCH != "x86_64" {
            let arch = std::env::consts::ARCH;
            return Err(Failure::CannotServe(format!(
                "compiler and packages are those for x86-64, and this machine is {arch}; use an x86-64 machine"
            )));
        }
        let [least, _] = GUEST_MEMORY;
        let append = args.append.clone().unwrap_or_default();
        let [machine, guest, control] = [args.machine.name(), args.guest.name(), args.control.name()];
        let (is_svm, is_vmx) = (args.machine == MachineArg::Svm, args.machine == MachineArg::Vmx);
        let (measures, is_wild) = (args.guest == GuestArg::Measure, args.guest == GuestArg::Wild);
        let (is_suite, has_linux) =
            (args.guest == GuestArg::Suite, matches!(args.guest, GuestArg::Linux | GuestArg::Migration));
        let is_control = args.control != ControlArg::None;
        let has_cpus = |is_wrong: fn(u32) -> bool| args.cpus.is_some_and(is_wrong);
        refuse([
            (
                args.output.view() == View::Live,
                "--live shows the software machine; this command shows what its machine says as it comes",
            ),
            (!has_linux && args.kernel.is_some(), "--kernel goes with --guest linux or migration"),
            ((is_suite || is_wild) && args.append.is_some(), "--append goes with --guest linux, migration or measure"),
            (migrates && args.operations.is_some(), "--operations goes with --guest suite or linux"),
            (
                measures && !is_svm && has_cpus(|nr_cpus| nr_cpus != 1),
                &format!("--guest measure with --machine {machine} is of one CPU; leave --cpus out"),
            ),
            (
                measures && has_cpus(|nr_cpus| nr_cpus > MAX_MEASURED_CPUS),
                &format!("--guest measure is of at most {MAX_MEASURED_CPUS} CPUs"),
            ),
            (
                measures && (args.operations.is_some() || args.memory.is_some()),
                "--operations and --memory go with --guest suite or linux",
            ),
            (measures && is_control, "--control goes with --guest suite or linux"),
            (
                is_control && args.control.is_of_migration() != migrates,
                &format!("--control {control} has no meaning with --guest {guest}"),
            ),
            (is_wild && has_cpus(|nr_cpus| nr_cpus != 1), "--guest wild has one CPU; leave --cpus out"),
            (is_wild && (args.memory.is_some() || is_control), "--memory and --control go with --guest suite or linux"),
            (
                !args.control.is_of(args.machine),
                &format!("--control {control} has no meaning with --machine {machine}"),
            ),
            (args.control == ControlArg::WrongPte && !is_suite, "--control wrong-pte goes with --guest suite"),
            (
                args.nodes != 1 && !(is_svm && matches!(args.guest, GuestArg::Suite | GuestArg::Linux)),
                "--nodes goes with --machine svm and --guest suite or linux",
            ),
            (!measures && args.peer != PeerArg::Auto, "--peer goes with --guest measure"),
            (is_vmx && args.qemu.is_some(), "--qemu goes with --machine svm, arm or riscv"),
            (!is_vmx && args.memory.is_some_and(|bytes| bytes < least), "--memory below 256M goes with --machine vmx"),
            (
                is_vmx && append.contains('\''),
                "--append with --machine vmx must have no ', which the boot loader reads",
            ),
            (
                append.contains(|letter: char| letter.is_control()),
                "--append must be one line without control characters",
            ),
        ])?;
        check_file("--image", args.image.as_deref())?;
        check_file("--kernel", args.kernel.as_deref())?;
        if let Some(path) = &args.kernel {
            check_kernel(path, architecture.facts().kernel)?;
        }
        Ok(Plan {
            machine: args.machine,
            guest: args.guest,
            nr_cpus: args.cpus.unwrap_or(if measures || is_wild { 1 } else { 2 }),
            nr_nodes: args.nodes,
            seed: args.seed,
            nr_operations: args.operations.unwrap_or(match (args.machine, args.guest) {
                (MachineArg::Arm | MachineArg::RiscV, _) | (MachineArg::Vmx, GuestArg::Linux) => FEWER_OPERATIONS,
                (MachineArg::Svm | MachineArg::Vmx, _) => OPERATIONS,
            }),
            memory: args.memory.unwrap_or(match (args.machine, args.guest) {
                (MachineArg::Vmx, GuestArg::Linux) => LEAST_VMX_MEMORY,
                _ => least,
            }),
            control: args.control,
            append,
            timeout: args.timeout,
            view: args.output.view(),
        })
    }

    /// The memory of the whole machine, in MiB.
    pub(super) fn machine_mib(&self) -> u64 {
        // No copy is kept up of a guest that migrates.
        let nr_copies = if self.guest == GuestArg::Migration { 1 } else { 2 };
        (nr_copies * self.memory + HYPERVISOR_MEMORY) >> 20
    }

    pub(super) fn nodes(&self) -> NodeMemory {
        NodeMemory::new(self.machine.architecture().facts().memory_start, self.machine_mib(), self.nr_nodes)
    }

    /// Whether the guest's page tables are walked outside of the machine: QEMU shares its memory,
    /// and the suite has checkpoints.
    pub(super) fn walks_outside(&self) -> bool {
        self.guest == GuestArg::Suite && self.machine != MachineArg::Vmx
    }

    /// CPUs of the machine. Beside Linux one more does the operations; the CPUs of the suite's
    /// guest do them between two stretches in the guest. The guest that runs wild is kicked by
    /// another one.
    pub(super) fn nr_machine_cpus(&self) -> u32 {
        match self.guest {
            GuestArg::Linux | GuestArg::Migration | GuestArg::Wild => self.nr_cpus + 1,
            GuestArg::Suite | GuestArg::Measure => self.nr_cpus,
        }
    }

    /// The emulator's accelerator. QEMU 10 with a thread for each CPU loses the state of AMD's guests
    /// while other CPUs change their nested page tables (docs/metal.md, "What an emulator cannot
    /// show"): there the CPUs run in turns.
    pub(super) fn accelerator(&self) -> &'static str {
        match (self.machine.architecture(), self.guest) {
            // Instructions are counted of one thread.
            (Architecture::X86, _) | (_, GuestArg::Measure) => "tcg,thread=single",
            _ => "tcg,thread=multi",
        }
    }

    /// The command line of the hypervisor, which a boot loader tells where the files are.
    pub(super) fn hypervisor_words(&self) -> String {
        self.words_for(&self.guest.name())
    }

    /// The same, with a guest of this name.
    pub(super) fn words_for(&self, guest: &str) -> String {
        let words = format!(
            "guest={guest} cpus={} seed={} operations={} memory={}",
            self.nr_cpus,
            self.seed,
            self.nr_operations,
            self.memory >> 20
        );
        let words = if self.nr_nodes > 1 { format!("{words} nodes={}", self.nr_nodes) } else { words };
        let words = if self.walks_outside() { words + " walker=outside" } else { words };
        match self.control {
            // The hypervisor leaves nothing out.
            ControlArg::None | ControlArg::WrongPte => words,
            control => format!("{words} control={}", control.name()),
        }
    }

    /// The command line of the kernel that has KVM. The hypervisor has no mitigations of what CPUs
    /// speculate, so KVM has none either. The same addresses in each run.
    pub(super) fn kvm_words(&self) -> String {
        let serial = self.machine.architecture().facts().serial;
        self.with_appended(format!("console={serial} quiet panic=-1 nokaslr mitigations=off"))
    }

    /// The command line of the guest's kernel. Bochs takes as long for a letter as the line would,
    /// and for each instruction: so there the line is fast, and the kernel has no mitigations.
    pub(super) fn kernel_words(&self) -> String {
        let serial = self.machine.architecture().facts().serial;
        let [speed, fewer] = if self.machine == MachineArg::Vmx { [",115200", " mitigations=off"] } else { [""; 2] };
        let words = format!("console={serial}{speed} panic=-1 slat.seed={}{fewer}", self.seed);
        self.with_appended(match self.guest {
            GuestArg::Migration => format!("{words} {OF_MIGRATION}"),
            GuestArg::Linux | GuestArg::Suite | GuestArg::Measure | GuestArg::Wild => words,
        })
    }

    fn with_appended(&self, words: String) -> String {
        if self.append.is_empty() { words } else { format!("{words} {}", self.append) }
    }

    /// Prints `text` as it comes, unless the user asked for the result alone.
    pub(super) fn tell(&self, session: &Session, text: &str) -> Result<(), Failure> {
        if self.view == View::Nothing { Ok(()) } else { session.say(text) }
    }
}

fn not_yet(args: &MetalArgs, instead: &str) -> Result<Plan, Failure> {
    let (machine, guest) = (args.machine.name(), args.guest.name());
    let text = format!("--machine {machine} with --guest {guest} is not there yet; choose {instead}");
    Err(Failure::CannotServe(text))
}

fn check_file(option: &str, path: Option<&Path>) -> Result<(), Failure> {
    let Some(path) = path else { return Ok(()) };
    match File::open(path).and_then(|file| file.metadata()) {
        Ok(data) if data.is_file() => Ok(()),
        Ok(_) => Err(Failure::Usage(format!("{option} {} is no file", path.display()))),
        Err(error) => Err(Failure::Usage(format!("{option} {}: {error}", path.display()))),
    }
}

/// Whether a file is a kernel that can be loaded.
fn check_kernel(path: &Path, magic: Magic) -> Result<(), Failure> {
    let mut header = vec![0; magic.at + magic.bytes.len()];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    match read {
        Ok(()) if header.ends_with(magic.bytes) => Ok(()),
        Err(error) if error.kind() != ErrorKind::UnexpectedEof => {
            Err(Failure::Usage(format!("--kernel {}: {error}", path.display())))
        }
        _ => Err(Failure::Usage(format!("--kernel {} is no {}", path.display(), magic.name))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parse;

    #[track_caller]
    fn plan(options: &str) -> Plan {
        Plan::new(&parse::<MetalArgs>(&format!("slat metal {options}")).unwrap()).unwrap()
    }

    #[test]
    fn hypervisor_and_kernel_have_their_words() {
        let options = "--cpus 4 --seed 7 --operations 10 --memory 1G --control no-kick --append quiet";
        let words = "guest=linux cpus=4 seed=7 operations=10 memory=1024 control=no-kick";
        let [by_default, nodes] = ["seed=1 operations=20000 memory", "memory=256 nodes=2 walker=outside"];
        for (options, hypervisor, kernel, machine) in [
            (options, words.to_owned(), "ttyS0 panic=-1 slat.seed=7 quiet", (2304, 5)),
            ("--machine arm", format!("guest=linux cpus=2 {by_default}=256"), "ttyAMA0 panic=-1 slat.seed=1", (768, 3)),
            ("--machine riscv", format!("guest=linux cpus=2 {by_default}=256"), "ttyS0 panic=-1 slat.seed=1", (768, 3)),
            (
                "--machine vmx",
                format!("guest=linux cpus=2 {by_default}=128"),
                "ttyS0,115200 panic=-1 slat.seed=1 mitigations=off",
                (512, 3),
            ),
            (
                "--guest suite --nodes 2 --operations 5",
                format!("guest=suite cpus=2 seed=1 operations=5 {nodes}"),
                "ttyS0 panic=-1 slat.seed=1",
                (768, 2),
            ),
        ] {
            let plan = plan(options);
            assert_eq!((plan.hypervisor_words(), plan.kernel_words()), (hypervisor, format!("console={kernel}")));
            assert_eq!((plan.machine_mib(), plan.nr_machine_cpus()), machine, "{options}");
            assert_eq!(plan.nodes().mib(), plan.machine_mib());
        }
    }

    #[test]
    fn a_guest_that_migrates_has_two_machines_and_one_clock() {
        let plan = plan("--guest migration --seed 3 --control lose-page --append quiet");
        let words = "cpus=2 seed=3 operations=100000 memory=256 control=lose-page";
        for machine in ["source", "target"] {
            assert_eq!(plan.words_for(machine), format!("guest={machine} {words}"));
        }
        let words = plan.kernel_words();
        assert!(words.contains("clocksource=tsc tsc=reliable hpet=disable") && words.ends_with(" quiet"), "{words}");
        assert_eq!((plan.machine_mib(), plan.nr_machine_cpus()), (512, 3));
    }

    #[test]
    fn instructions_are_counted_with_one_cpu_unless_more_are_asked_for() {
        for (options, nr_cpus, serial, more) in [
            ("--append mitigations=auto", 1, "ttyS0", " mitigations=auto"),
            ("--cpus 4 --peer kvm", 4, "ttyS0", ""),
            ("--machine arm --cpus 1", 1, "ttyAMA0", ""),
            ("--machine riscv", 1, "ttyS0", ""),
        ] {
            let plan = plan(&format!("--guest measure {options}"));
            assert!(plan.hypervisor_words().starts_with(&format!("guest=measure cpus={nr_cpus} ")));
            assert_eq!((plan.nr_machine_cpus(), plan.accelerator()), (nr_cpus, "tcg,thread=single"));
            let words = format!("console={serial} quiet panic=-1 nokaslr mitigations=off{more}");
            assert_eq!(plan.kvm_words(), words);
        }
    }

    #[test]
    fn what_is_no_kernel_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        for architecture in [Architecture::X86, Architecture::Arm, Architecture::RiscV] {
            let magic = architecture.facts().kernel;
            let mut bytes = vec![0; magic.at + magic.bytes.len()];
            for (end, is_kernel) in [(magic.bytes, true), (b"OTHR", false)] {
                bytes[magic.at..].copy_from_slice(end);
                std::fs::write(&path, &bytes).unwrap();
                assert_eq!(check_kernel(&path, magic).is_ok(), is_kernel, "{architecture:?}");
            }
            for short in [&b""[..], magic.bytes] {
                std::fs::write(&path, short).unwrap();
                let Err(Failure::Usage(line)) = check_kernel(&path, magic) else { panic!("accepted") };
                assert!(line.ends_with(&format!(" is no {}", magic.name)), "{line}");
            }
        }
    }
}
