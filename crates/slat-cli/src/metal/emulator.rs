//! The emulated machine: its files, its command line, and what comes out of it.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use console::strip_ansi_codes;
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use super::architecture::Loading;
use super::packages::{Emulator, Qemu};
use super::plan::Plan;
use super::process::Running;
use super::protocol::{Line, Verdict};
use super::walker::{Compared, MachineMemory};
use super::{ControlArg, GuestArg, MachineArg, bochs, initramfs, migration};
use crate::failure::Failure;
use crate::quantity::Unit;
use crate::session::{Progress, Session};

/// What the emulator says of each CPU whose model has more than it emulates.
const UNSUPPORTED: &str = "warning: TCG doesn't support requested feature";

/// What lines of QEMU itself have.
const OF_QEMU: &str = "qemu";

/// How names of the folders of machines begin.
const FOLDER: &str = "machine-";

/// The files of a machine, in its folder.
const IMAGE: &str = "slat-metal";
const LOCK: &str = "lock";
/// The lock before it is held.
const NEW_LOCK: &str = "lock.new";
const KERNEL: &str = "vmlinuz";
const INITRAMFS: &str = "initramfs";

/// The names of figures of what was walked outside of the machine.
pub(super) const TABLES_WALKED: &str = "tables_walked";
pub(super) const LEAVES_WALKED: &str = "leaves_walked";
pub(super) const LEAVES_ON_THEIR_NODE: &str = "leaves_on_their_node";

/// Lines that wait to be shown: a guest that says more waits, too.
const LINES: usize = 1024;

/// How long the machine may take to end after its verdict.
const END: Duration = Duration::from_secs(10);

/// What was built and got.
pub(super) struct Files {
    pub(super) image: PathBuf,
    /// Linux, if it is the guest, or has KVM.
    pub(super) linux: Option<Linux>,
}

pub(super) struct Linux {
    pub(super) kernel: PathBuf,
    /// Its first process.
    pub(super) init: PathBuf,
    pub(super) modules: Vec<PathBuf>,
}

/// What a machine boots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Boot {
    /// The hypervisor, with the guest of the plan.
    Hypervisor,
    /// The hypervisor whose guest goes to another machine.
    Source,
    /// The hypervisor whose guest comes from another machine.
    Target,
    /// Linux, which has KVM.
    Kvm,
}

/// Whether lines for people are shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shown {
    Lines,
    Nothing,
}

/// A machine that is ready to run.
pub(super) struct Machine {
    pub(super) emulator: Emulator,
    /// The folder that the emulator runs in: so the names of its files have neither spaces nor
    /// commas, which separate words on its command line.
    folder: TempDir,
    /// Held as long as the folder is in use.
    _lock: File,
    /// Linux's files, if it has some.
    loaded: Vec<Loaded>,
    /// Where page tables are walked outside of the machine.
    memory: Option<MachineMemory>,
}

/// A file of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Loaded {
    /// How the hypervisor calls it.
    name: &'static str,
    file: &'static str,
    nr_bytes: u64,
}

/// Places files one behind the other: each with its address.
fn place(loading: Loading, files: &[Loaded]) -> Vec<(u64, Loaded)> {
    let mut next = loading.first;
    let place = |&file: &Loaded| {
        let address = next;
        next = (address + file.nr_bytes).next_multiple_of(loading.aligned);
        (address, file)
    };
    files.iter().map(place).collect()
}

/// What came of a run.
#[derive(Debug)]
pub(super) struct Ended {
    /// `None`: it was killed, since it did not end in time.
    pub(super) status: Option<ExitStatus>,
    pub(super) verdict: Option<Verdict>,
    /// In the order in which they came first.
    pub(super) figures: Vec<(String, Unit, Vec<f64>)>,
    pub(super) time: Duration,
    /// The last thing that was said, for people to see where it stopped.
    pub(super) last: String,
}

/// What a line is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pipe {
    /// The serial line, which the guest has.
    Guest,
    /// The debug console, and what the emulator itself says.
    Hypervisor,
}

impl Machine {
    /// Puts the files of a machine into a folder in `target`.
    pub(super) fn new(
        emulator: Emulator,
        files: &Files,
        plan: &Plan,
        target: &Path,
        session: &Session,
    ) -> Result<Machine, Failure> {
        let mut loaded = Vec::new();
        let mut write = || -> io::Result<(TempDir, File)> {
            fs::create_dir_all(target)?;
            let target = fs::canonicalize(target)?;
            let folder = tempfile::Builder::new().prefix(FOLDER).tempdir_in(&target)?;
            let lock = lock(folder.path())?;
            remove_left(&target)?;
            let path = folder.path().to_owned();
            session.when_interrupted(move || drop(fs::remove_dir_all(path)));
            fs::copy(&files.image, folder.path().join(IMAGE))?;
            if plan.guest == GuestArg::Migration {
                migration::make_channel(folder.path())?;
            }
            if let Some(Linux { kernel, init, modules }) = &files.linux {
                fs::copy(kernel, folder.path().join(KERNEL))?;
                let modules: Vec<_> = modules.iter().map(|path| read_module(path)).collect::<io::Result<_>>()?;
                initramfs::write(File::create(folder.path().join(INITRAMFS))?, &fs::read(init)?, &modules)?;
                for (name, file) in [("kernel", KERNEL), ("initramfs", INITRAMFS)] {
                    let nr_bytes = fs::metadata(folder.path().join(file))?.len();
                    loaded.push(Loaded { name, file, nr_bytes });
                }
            }
            Ok((folder, lock))
        };
        let (folder, lock) = write().map_err(|source| Failure::Write { path: target.to_owned(), source })?;
        if let Emulator::Bochs(bochs) = &emulator {
            let mut loaded = vec![(files.image.clone(), format!("{IMAGE} {}", plan.hypervisor_words()))];
            if files.linux.is_some() {
                loaded.push((folder.path().join(KERNEL), format!("{KERNEL} {}", plan.kernel_words())));
                loaded.push((folder.path().join(INITRAMFS), INITRAMFS.to_owned()));
            }
            bochs::write(bochs, folder.path(), &loaded, plan, session)?;
        }
        let memory = plan.walks_outside().then(|| {
            MachineMemory::new(plan.machine.architecture().facts().memory_start, plan.nodes())
                .map_err(|error| Failure::CannotServe(format!("a memory file for the machine: {error}")))
        });
        Ok(Machine { emulator, folder, loaded, memory: memory.transpose()?, _lock: lock })
    }

    /// The emulator with all its words.
    fn command(&self, plan: &Plan, boot: Boot) -> Command {
        match &self.emulator {
            Emulator::Qemu(qemu) => self.qemu(qemu, plan, boot),
            Emulator::Bochs(bochs) => bochs::command(bochs, self.folder.path()),
        }
    }

    fn qemu(&self, qemu: &Qemu, plan: &Plan, boot: Boot) -> Command {
        let mut command = qemu.command();
        let facts = plan.machine.architecture().facts();
        command.current_dir(self.folder.path()).args(["-accel", plan.accelerator()]).args(facts.machine);
        if plan.guest == GuestArg::Measure {
            // The counter counts instructions, also while a CPU waits; all is the same in each run.
            command.args(["-icount", "shift=0,sleep=off"]);
            command.args(["-seed", &plan.seed.to_string(), "-rtc", "base=2026-01-01,clock=vm"]);
        }
        command.args(["-smp", &plan.nr_machine_cpus().to_string(), "-m", &format!("{}M", plan.machine_mib())]);
        match &self.memory {
            Some(memory) => {
                let backend = |mib, first| memory.of_qemu(mib, first);
                command.args(plan.nodes().of_qemu(plan.nr_machine_cpus(), backend));
            }
            None if plan.nr_nodes > 1 => {
                let backend = |mib, _| format!("memory-backend-ram,size={mib}M");
                command.args(plan.nodes().of_qemu(plan.nr_machine_cpus(), backend));
            }
            None => {}
        }
        command.args(["-display", "none", "-nodefaults", "-no-reboot", "-serial", "stdio"]);
        command.args(if boot == Boot::Kvm { facts.kvm_console } else { facts.console });
        if boot == Boot::Kvm {
            command.args(["-kernel", KERNEL, "-initrd", INITRAMFS, "-append", &plan.kvm_words()]);
            return command;
        }
        command.args(["-kernel", IMAGE]);
        let (mut words, has_kernel) = match boot {
            Boot::Source => (plan.words_for("source"), true),
            Boot::Target => (plan.words_for("target"), false),
            Boot::Hypervisor | Boot::Kvm => (plan.hypervisor_words(), plan.guest == GuestArg::Linux),
        };
        if plan.guest == GuestArg::Migration {
            command.args(migration::words());
        }
        match facts.loading {
            _ if !has_kernel => {}
            None => {
                // Two commas are one in a word.
                let of_kernel = plan.kernel_words().replace(',', ",,");
                command.args(["-initrd", &format!("{KERNEL} {of_kernel},{INITRAMFS}")]);
            }
            Some(loading) => {
                for (address, Loaded { name, file, nr_bytes }) in place(loading, &self.loaded) {
                    command.args(["-device", &format!("loader,file={file},addr={address:#x},force-raw=on")]);
                    words += &format!(" {name}={address:#x},{nr_bytes}");
                }
                words += &format!(" -- {}", plan.kernel_words());
            }
        }
        command.args(["-append", &words]);
        command
    }

    /// Runs it to its end, and shows what it says. Calls `on_ready` when another machine may start.
    pub(super) fn run(
        &self,
        plan: &Plan,
        boot: Boot,
        shown: Shown,
        session: &Session,
        on_ready: &dyn Fn(),
    ) -> Result<Ended, Failure> {
        let begin = Instant::now();
        let mut command = self.command(plan, boot);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |error: io::Error| Failure::CannotServe(format!("the emulator: {error}"));
        let mut running = Running::start(&mut command, session).map_err(failed)?;
        let (sender, lines) = mpsc::sync_channel(LINES);
        if let (Some(stdout), Some(stderr)) = (running.child.stdout.take(), running.child.stderr.take()) {
            let of_guest = sender.clone();
            let pipes = match (plan.machine, plan.guest) {
                // Bochs has the debug console there, and the serial line beside its own words.
                (MachineArg::Vmx, GuestArg::Linux) => [Pipe::Hypervisor, Pipe::Guest],
                (MachineArg::Vmx, _) => [Pipe::Hypervisor, Pipe::Hypervisor],
                _ => [Pipe::Guest, Pipe::Hypervisor],
            };
            thread::spawn(move || read(stdout, pipes[0], &of_guest));
            thread::spawn(move || read(stderr, pipes[1], &sender));
        }
        let progress = session.progress(1);
        progress.begin("starting the machine".to_owned());
        let names = match boot {
            Boot::Hypervisor => ["guest|", "slat |"],
            Boot::Kvm => ["linux|", "kvm  |"],
            Boot::Source => ["A guest|", "A slat |"],
            Boot::Target => ["B guest|", "B slat |"],
        };
        let mut heard = Heard {
            plan,
            session,
            names,
            shown,
            on_ready,
            progress,
            verdict: None,
            figures: Vec::new(),
            last: String::new(),
            // (OpenSBI uses either console.)
            is_firmware: plan.machine == MachineArg::RiscV,
            memory: self.memory.as_ref(),
            compared: Compared::default(),
        };
        let mut longest = plan.timeout;
        let status = loop {
            // Also of a guest that says something all the time.
            if begin.elapsed() >= longest {
                break None;
            }
            match lines.recv_timeout(longest.saturating_sub(begin.elapsed())) {
                Ok((pipe, line)) => {
                    let had_verdict = heard.verdict.is_some();
                    heard.line(pipe, &line)?;
                    if heard.verdict.is_some() && !had_verdict {
                        longest = longest.min(begin.elapsed() + END);
                    }
                }
                Err(RecvTimeoutError::Timeout) => break None,
                Err(RecvTimeoutError::Disconnected) => break Some(running.wait().map_err(failed)?),
            }
        };
        let Heard { verdict, mut figures, last, compared, .. } = heard;
        if compared != Compared::default() {
            let Compared { nr_tables, nr_leaves, nr_holes, nr_placed } = compared;
            for (name, count) in [
                (TABLES_WALKED, nr_tables),
                (LEAVES_WALKED, nr_leaves),
                ("holes_walked", nr_holes),
                (LEAVES_ON_THEIR_NODE, nr_placed),
            ] {
                figures.push((name.to_owned(), Unit::Count, vec![count as f64]));
            }
        }
        Ok(Ended { status, verdict, figures, time: begin.elapsed(), last })
    }
}

/// Makes the lock of `folder`, and holds it. It gets its name when it is held: `remove_left` of
/// another run finds no lock before, and so leaves the folder.
fn lock(folder: &Path) -> io::Result<File> {
    let new = folder.join(NEW_LOCK);
    let lock = File::create(&new)?;
    flock(&lock, FlockOperation::LockExclusive)?;
    fs::rename(new, folder.join(LOCK))?;
    Ok(lock)
}

/// Removes the folders of runs that were killed: nothing has their locks.
fn remove_left(target: &Path) -> io::Result<()> {
    for entry in fs::read_dir(target)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().starts_with(FOLDER.as_bytes()) {
            continue;
        }
        // Without a lock another run is making or removing it.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Another run may do the same.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// The module in the file at `path`, as the archive has it.
fn read_module(path: &Path) -> io::Result<initramfs::Module> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok((name, fs::read(path)?))
}

/// Bytes of a line, at most.
const MAX_LINE_BYTES: u64 = 1 << 16;

fn read(from: impl Read, pipe: Pipe, to: &SyncSender<(Pipe, String)>) {
    let mut from = BufReader::new(from);
    let mut bytes = Vec::new();
    // A guest may never end its line: it comes in pieces then.
    while matches!(from.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut bytes), Ok(nr_bytes) if nr_bytes > 0) {
        if to.send((pipe, text_of(&bytes))).is_err() {
            break;
        }
        bytes.clear();
    }
}

/// A line as a terminal can show it: what comes from a guest may not move the cursor.
fn text_of(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    strip_ansi_codes(&text).chars().filter(|letter| !letter.is_control() || *letter == '\t').collect()
}

/// What was heard until now.
struct Heard<'r> {
    plan: &'r Plan,
    session: &'r Session,
    /// Before the lines of the serial line, and of the debug console.
    names: [&'static str; 2],
    shown: Shown,
    on_ready: &'r dyn Fn(),
    progress: Progress,
    verdict: Option<Verdict>,
    figures: Vec<(String, Unit, Vec<f64>)>,
    last: String,
    /// Whether what comes may be of the machine's firmware: until the hypervisor's first line.
    is_firmware: bool,
    memory: Option<&'r MachineMemory>,
    compared: Compared,
}

impl Heard<'_> {
    fn line(&mut self, pipe: Pipe, text: &str) -> Result<(), Failure> {
        let is_of_bochs = self.plan.machine == MachineArg::Vmx && bochs::is_own(text);
        if pipe == Pipe::Guest && !self.is_firmware && !is_of_bochs {
            return self.show(self.names[0], text);
        }
        let line = Line::parse(text);
        if !matches!(line, Line::Other(_)) {
            self.is_firmware = false;
        }
        match line {
            Line::Say(text) => self.show(self.names[1], &text),
            Line::Progress { done, total, text } => {
                self.progress.show(done, total, text);
                Ok(())
            }
            Line::Ready => {
                (self.on_ready)();
                Ok(())
            }
            Line::Figure { name, value, unit } => {
                match self.figures.iter_mut().find(|(other, of, _)| *other == name && *of == unit) {
                    Some((_, _, samples)) => samples.push(value),
                    None => self.figures.push((name, unit, vec![value])),
                }
                Ok(())
            }
            Line::Tables(tables) => {
                let Some(memory) = self.memory else { return self.show("qemu |", text) };
                let wrong_leaf = (self.plan.control == ControlArg::WrongPte).then_some(self.plan.seed);
                let failed =
                    |error| Failure::Check(format!("page tables cannot be walked in the machine's memory: {error}"));
                self.compared.add(memory.check(&tables, wrong_leaf).map_err(failed)?);
                Ok(())
            }
            Line::Verdict(verdict) => {
                // The first one ends the machine; what follows is of CPUs that do not know it yet.
                self.verdict.get_or_insert(verdict);
                Ok(())
            }
            Line::Other(text) if text.contains(UNSUPPORTED) || text.is_empty() => Ok(()),
            Line::Other(text) if self.plan.machine == MachineArg::Vmx => match bochs::is_reason(&text) {
                true => self.show("bochs|", &text),
                false => Ok(()),
            },
            Line::Other(text) if self.is_firmware && !text.contains(OF_QEMU) => {
                self.last = format!("firmware: {text}");
                Ok(())
            }
            Line::Other(text) => self.show("qemu |", &text),
        }
    }

    fn show(&mut self, of: &str, text: &str) -> Result<(), Failure> {
        if !text.trim().is_empty() {
            self.last = format!("{of} {text}");
        }
        if self.shown == Shown::Nothing {
            return Ok(());
        }
        self.plan.tell(self.session, &format!("{}\n", format!("{of} {text}").trim_end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_placed_one_behind_the_other() {
        let files =
            [("kernel", 0x20_0001), ("initramfs", 5)].map(|(name, nr_bytes)| Loaded { name, file: "f", nr_bytes });
        let placed = place(Loading { first: 0x4800_0000, aligned: 0x20_0000 }, &files);
        let addresses: Vec<_> = placed.iter().map(|(address, file)| (file.name, *address, file.nr_bytes)).collect();
        assert_eq!(addresses, [("kernel", 0x4800_0000, 0x20_0001), ("initramfs", 0x4840_0000, 5)]);
    }

    #[test]
    fn folders_of_killed_runs_are_removed_and_no_others() {
        let target = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let path = target.path().join(format!("{FOLDER}{name}"));
            fs::create_dir(&path).unwrap();
            path
        };
        // One without a lock, one whose lock is not held yet, one in use, and one that was left.
        let (new, unlocked, used, left) = (folder("new"), folder("unlocked"), folder("used"), folder("left"));
        File::create(unlocked.join(NEW_LOCK)).unwrap();
        let held = lock(&used).unwrap();
        drop(lock(&left).unwrap());
        remove_left(target.path()).unwrap();
        assert_eq!([&new, &unlocked, &used, &left].map(|path| path.exists()), [true, true, true, false]);
        assert!(!used.join(NEW_LOCK).exists());
        drop(held);
        remove_left(target.path()).unwrap();
        assert!(!used.exists());
    }

    #[test]
    fn a_guest_cannot_move_the_cursor() {
        assert_eq!(text_of(b"\x1b[2J\x1b[1;1Hbooting\x07\ta\r\n"), "booting\ta");
        assert_eq!(text_of(b"\xff\n"), "\u{fffd}");
    }
}
