//! The host: what the machine needs, from paths in the environment, and QEMU.
//!
//! | variable | what it is |
//! |---|---|
//! | `SLAT_FIRECRACKER` | the program `firecracker` |
//! | `SLAT_CLOUD_HYPERVISOR` | the program `cloud-hypervisor` |
//! | `SLAT_KERNEL_PACKAGE` | a folder into which a package of Debian's kernel was unpacked |
//! | `SLAT_QEMU` | QEMU 10 or newer, if it is not `qemu-system-x86_64` |
//! | `SLAT_MACHINE_CPUS` | CPUs of the machine, if it is not one |
//! | `SLAT_WITHOUT_PAGER` | set for Firecracker's steps without a pager, to compare with |

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use cpio::NewcBuilder;

use crate::process::{LONGEST_SILENCE, Program};
use crate::{Outcome, guest, init, machine};

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;
/// The device numbers of `/dev/console` (Linux, Documentation/admin-guide/devices.txt).
const CONSOLE: [u32; 2] = [5, 1];

/// Memory of the machine: for all programs, two copies of the guest's, and the snapshot.
const MEMORY: &str = "3G";
/// The words of the machine's kernel. An emulated timer may look broken.
const WORDS: &str = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off no_timer_check vmms=machine";

/// Builds the machine and runs it, if there is what it needs.
pub fn run() -> Outcome<()> {
    if env::consts::ARCH != "x86_64" {
        println!("skipped: the emulated machine and its programs are those of x86-64");
        return Ok(());
    }
    let path = |name: &str| env::var_os(name).map(PathBuf::from);
    let vmms = [("SLAT_FIRECRACKER", machine::FIRECRACKER), ("SLAT_CLOUD_HYPERVISOR", machine::CLOUD_HYPERVISOR)];
    let vmms: Vec<_> = vmms.into_iter().filter_map(|(name, place)| Some((path(name)?, place))).collect();
    let Some(package) = path("SLAT_KERNEL_PACKAGE").filter(|_| !vmms.is_empty()) else {
        println!(
            "skipped: no VMM to test with: SLAT_FIRECRACKER or SLAT_CLOUD_HYPERVISOR, and SLAT_KERNEL_PACKAGE, \
             are not set (docs/vmms.md)"
        );
        return Ok(());
    };
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let kernel = kernel(&package)?;
    let modules = modules(&package)?;
    let this = env::current_exe().map_err(|error| error.to_string())?;
    let of_guest = folder.path().join("guest");
    Archive::write(&of_guest, &[(this.clone(), "/init")], &modules, &[])?;
    let pager = (PathBuf::from(env!("CARGO_BIN_EXE_slat-pager")), machine::PAGER);
    let programs: Vec<_> = [(this, "/init"), pager].into_iter().chain(vmms).collect();
    let files = [(of_guest, machine::INITRAMFS), (kernel.clone(), machine::KERNEL)];
    let initramfs = folder.path().join("machine");
    Archive::write(&initramfs, &programs, &modules, &files)?;
    emulate(&kernel, &initramfs)
}

/// Runs the machine to its end. It has one CPU if nothing else is asked for: with two, its own
/// kernel reported soft lockups now and then, and the machine ended once.
fn emulate(kernel: &Path, initramfs: &Path) -> Outcome<()> {
    let qemu = env::var_os("SLAT_QEMU").unwrap_or_else(|| "qemu-system-x86_64".into());
    let mut command = Command::new(qemu);
    command.args(["-accel", "tcg,thread=multi", "-cpu", "EPYC,+svm,+npt,+x2apic", "-m", MEMORY]);
    command.arg("-smp").arg(env::var_os("SLAT_MACHINE_CPUS").unwrap_or_else(|| "1".into()));
    command.args(["-display", "none", "-nodefaults", "-no-reboot", "-serial", "stdio"]);
    let without = env::var_os("SLAT_WITHOUT_PAGER").map(|_| machine::WITHOUT_PAGER).unwrap_or_default();
    command.arg("-append").arg(format!("{WORDS} {without}"));
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initramfs);
    let mut qemu = Program::start("qemu", &mut command)?;
    loop {
        let line = qemu.next_line("a line of the machine", LONGEST_SILENCE)?;
        if line.ends_with(machine::PASSED) {
            return Ok(());
        }
        if let Some((_, why)) = line.split_once(machine::FAILED) {
            return Err(why.to_owned());
        }
    }
}

/// The kernel of a package: `boot/vmlinuz-*`.
fn kernel(package: &Path) -> Outcome<PathBuf> {
    let entries = fs::read_dir(package.join("boot")).map_err(|error| format!("{}/boot: {error}", package.display()))?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let is_kernel =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz-"));
    paths.find(is_kernel).ok_or_else(|| format!("{}/boot has no vmlinuz-*", package.display()))
}

/// The files of all modules for machine and guest that a package has.
fn modules(package: &Path) -> Outcome<Vec<PathBuf>> {
    let is_needed = |name: &str| machine::MODULES.contains(&name) || guest::MODULES.contains(&name);
    let mut found = Vec::new();
    let places = ["lib/modules", "usr/lib/modules"].map(|place| package.join(place));
    let mut folders: Vec<_> = places.into_iter().filter(|place| place.exists()).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))? {
            let entry = entry.map_err(|error| error.to_string())?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                folders.push(entry.path());
            } else if name.split_once(".ko").is_some_and(|(name, _)| is_needed(name)) {
                found.push(entry.path());
            }
        }
    }
    Ok(found)
}

/// The libraries of a program, and its interpreter, as `ldd` names them.
fn libraries(program: &Path) -> Outcome<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().map_err(|error| format!("ldd: {error}"))?;
    // A static program has none, and ldd fails.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let paths = text.split_whitespace().filter(|word| word.starts_with('/') && !word.ends_with(':'));
    Ok(paths.map(PathBuf::from).collect())
}

/// The first file system of Linux.
struct Archive {
    to: BufWriter<File>,
    next: u32,
    /// What it has.
    names: BTreeSet<String>,
}

impl Archive {
    /// Writes it to `path`: programs with the libraries that they need, modules, other files.
    fn write(path: &Path, programs: &[(PathBuf, &str)], modules: &[PathBuf], files: &[(PathBuf, &str)]) -> Outcome<()> {
        let to = BufWriter::new(File::create(path).map_err(|error| error.to_string())?);
        let mut archive = Archive { to, next: 1, names: BTreeSet::new() };
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        archive.console().map_err(failed)?;
        for (file, place) in programs {
            archive.file(file, place)?;
            for library in libraries(file)? {
                archive.file(&library, &library.display().to_string())?;
            }
        }
        for module in modules {
            let name = module.file_name().unwrap_or_default().to_string_lossy();
            archive.file(module, &format!("/{}/{name}", init::MODULES))?;
        }
        for (file, place) in files {
            archive.file(file, place)?;
        }
        cpio::newc::trailer(archive.to).and_then(|mut to| to.flush()).map_err(failed)
    }

    fn entry(&mut self, name: &str, mode: u32) -> NewcBuilder {
        self.next += 1;
        NewcBuilder::new(name).ino(self.next).mode(mode).nlink(1)
    }

    fn console(&mut self) -> io::Result<()> {
        self.folders("dev/console")?;
        let [major, minor] = CONSOLE;
        let console = self.entry("dev/console", CHARACTER_DEVICE).rdev_major(major).rdev_minor(minor);
        console.write(&mut self.to, 0).finish().map(drop)
    }

    /// The folders above `name`.
    fn folders(&mut self, name: &str) -> io::Result<()> {
        let slashes = name.match_indices('/').map(|(index, _)| index);
        for folder in slashes.map(|index| &name[..index]) {
            if self.names.insert(folder.to_owned()) {
                let entry = self.entry(folder, FOLDER);
                entry.write(&mut self.to, 0).finish()?;
            }
        }
        Ok(())
    }

    /// The file at `from`, as the file `place`, unless it is there.
    fn file(&mut self, from: &Path, place: &str) -> Outcome<()> {
        let name = place.trim_start_matches('/');
        if !self.names.insert(name.to_owned()) {
            return Ok(());
        }
        let mut write = || -> io::Result<()> {
            let content = fs::read(from)?;
            let size = u32::try_from(content.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
            self.folders(name)?;
            let mut file = self.entry(name, PROGRAM).write(&mut self.to, size);
            file.write_all(&content)?;
            file.finish().map(drop)
        };
        write().map_err(|error| format!("{}: {error}", from.display()))
    }
}
