//! The machine with VMX: the files of Bochs, its command line, and what of its words is for people.
//!
//! Its disk has no file system: GRUB's first sector and its core, and from 1 MiB on the hypervisor
//! and Linux's files, which GRUB reads by their places.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::iter;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::GuestArg;
use super::packages::{Bochs, Debugger};
use super::plan::Plan;
use super::process::{output, reason};
use crate::failure::Failure;
use crate::session::Session;

/// The CPUs: with EPT, its A and D bits, a page-modification log, and an x2APIC.
const CPU: &str = "corei7_skylake_x";

/// The files of the machine, in its folder.
const CONFIG: &str = "bochsrc";
const DISK: &str = "disk";
const FIRMWARE: [&str; 2] = ["bios", "vgabios"];
const GRUB_CONFIG: &str = "grub.cfg";
const GRUB_CORE: &str = "core.img";
const DEBUGGER: &str = "debugger";

/// What the machine has besides: of the guest, the serial line, which is the emulator's standard
/// error.
const SERIAL: &str = "com1: enabled=1, mode=file, dev=/dev/stderr\n";

/// What GRUB needs: disks, and the way to start a hypervisor.
const GRUB_MODULES: [&str; 3] = ["biosdisk", "multiboot", "boot"];

/// Where the hypervisor and Linux's files are on the disk: the core of GRUB is before them.
const SECTOR: u64 = 512;
const FIRST_SECTOR: u64 = 2048;
/// A cylinder of the disk: 16 heads and 63 sectors.
const CYLINDER: u64 = 16 * 63 * SECTOR;

/// Bochs's words for the end by the hypervisor's wish. It always exits with 1.
const ENDED: &str = "Shutdown port: shutdown requested";
const PANIC: &str = ">>PANIC<<";

/// A file that GRUB loads: where it is, and its command line, the name first.
pub(super) type Loaded = (PathBuf, String);

/// Writes all files of the machine that loads `files`, the hypervisor first, into `folder`.
pub(super) fn write(
    bochs: &Bochs,
    folder: &Path,
    files: &[Loaded],
    plan: &Plan,
    session: &Session,
) -> Result<(), Failure> {
    let failed = |source: io::Error| Failure::Write { path: folder.to_owned(), source };
    for (from, name) in bochs.firmware().iter().zip(FIRMWARE) {
        fs::copy(from, folder.join(name)).map_err(|error| cannot_read(from, &error))?;
    }
    let mut content = Vec::new();
    let mut config = String::new();
    for ((path, words), command) in files.iter().zip(iter::once("multiboot").chain(iter::repeat("module"))) {
        let file = fs::read(path).map_err(|error| cannot_read(path, &error))?;
        let (first, nr_sectors) = (FIRST_SECTOR + content.len() as u64 / SECTOR, (file.len() as u64).div_ceil(SECTOR));
        content.extend(file);
        content.resize(content.len().next_multiple_of(SECTOR as usize), 0);
        config += &format!("{command} (hd0){first}+{nr_sectors} {}\n", quoted(words));
    }
    config += "boot\n";
    fs::write(folder.join(GRUB_CONFIG), config).map_err(failed)?;
    let core = core(bochs, folder, session)?;
    let boot_sector = bochs.boot_sector();
    let boot_sector = fs::read(&boot_sector).map_err(|error| cannot_read(&boot_sector, &error))?;
    let nr_cylinders = (FIRST_SECTOR * SECTOR + content.len() as u64).div_ceil(CYLINDER);
    let disk = || -> io::Result<()> {
        let mut disk = File::create(folder.join(DISK))?;
        disk.write_all(&boot_sector)?;
        disk.write_all(&core)?;
        disk.seek(SeekFrom::Start(FIRST_SECTOR * SECTOR))?;
        disk.write_all(&content)?;
        disk.set_len(nr_cylinders * CYLINDER)?;
        fs::write(folder.join(DEBUGGER), "continue\n")?;
        fs::write(folder.join(CONFIG), configuration(plan, nr_cylinders))
    };
    disk().map_err(failed)
}

/// A command line for GRUB's shell, word by word. Words have no quotes ([`Plan`]).
fn quoted(words: &str) -> String {
    let words: Vec<_> = words.split_whitespace().map(|word| format!("'{word}'")).collect();
    words.join(" ")
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    Failure::CannotServe(format!("{}: {error}", path.display()))
}

/// GRUB, with its configuration.
fn core(bochs: &Bochs, folder: &Path, session: &Session) -> Result<Vec<u8>, Failure> {
    let mut command = bochs.mkimage();
    command.current_dir(folder).args(["--format", "i386-pc", "--prefix", "(hd0)", "--config", GRUB_CONFIG]);
    command.args(["--output", GRUB_CORE]).args(GRUB_MODULES);
    let failed = |why: String| Failure::CannotServe(format!("GRUB for the emulated machine: {why}"));
    let made = output(&mut command, session).map_err(|error| failed(error.to_string()))?;
    if !made.status.success() {
        return Err(failed(reason(&made)));
    }
    let path = folder.join(GRUB_CORE);
    let core = fs::read(&path).map_err(|error| cannot_read(&path, &error))?;
    if core.len() as u64 > (FIRST_SECTOR - 1) * SECTOR {
        return Err(failed(format!("{} bytes are too many", core.len())));
    }
    Ok(core)
}

/// The configuration. The time of the machine is that of its instructions.
fn configuration(plan: &Plan, nr_cylinders: u64) -> String {
    let [bios, vga_bios] = FIRMWARE;
    let (nr_cpus, mib) = (plan.nr_machine_cpus(), plan.machine_mib());
    let (serial, has_serial) = if plan.guest == GuestArg::Linux { (SERIAL, 1) } else { ("", 0) };
    format!(
        "config_interface: textconfig\n\
         display_library: term\n\
         plugin_ctrl: speaker=0, serial={has_serial}, parallel=0\n\
         {serial}\
         cpu: model={CPU}, count={nr_cpus}, ips=50000000, reset_on_triple_fault=0\n\
         memory: guest={mib}, host={mib}\n\
         romimage: file={bios}\n\
         vgaromimage: file={vga_bios}\n\
         ata0-master: type=disk, path={DISK}, mode=flat, cylinders={nr_cylinders}, heads=16, spt=63\n\
         boot: disk\n\
         clock: sync=none\n\
         port_e9_hack: enabled=1\n\
         log: -\n\
         panic: action=fatal\n\
         error: action=ignore\n\
         info: action=ignore\n"
    )
}

/// The emulator with all its words.
pub(super) fn command(bochs: &Bochs, folder: &Path) -> Command {
    let mut command = bochs.command();
    command.current_dir(folder).args(["-q", "-f", CONFIG]);
    if bochs.debugger == Debugger::Built {
        command.args(["-rc", DEBUGGER]);
    }
    command
}

/// Whether a line beside those of the serial line is of Bochs itself: its log, whose lines begin with
/// the time and the part of it, or what it says of its screen.
pub(super) fn is_own(line: &str) -> bool {
    const TIME_DIGITS: usize = 11;
    let has_time = line.len() > TIME_DIGITS && line.bytes().take(TIME_DIGITS).all(|byte| byte.is_ascii_digit());
    has_time && line[TIME_DIGITS..].contains('[') || line.starts_with("Bochs connected to screen")
}

/// Whether a line of Bochs itself says why it ended.
pub(super) fn is_reason(line: &str) -> bool {
    line.contains(PANIC) && !line.contains(ENDED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_no_commands_of_the_boot_loader() {
        assert_eq!(quoted("vmlinuz  console=ttyS0 a;reboot $x"), "'vmlinuz' 'console=ttyS0' 'a;reboot' '$x'");
    }

    #[test]
    fn its_log_is_beside_the_serial_line() {
        for own in ["00718839458p[UNMAP ] >>PANIC<< Shutdown", "Bochs connected to screen \"/dev/pts/0\""] {
            assert!(is_own(own), "{own}");
        }
        for other in ["[    0.000000] Linux version 6.1", "guest: round 0: 7 pages verified", "12345678901", ""] {
            assert!(!is_own(other), "{other}");
        }
    }

    #[test]
    fn its_own_words_are_shown_where_they_say_why_it_ended() {
        assert!(is_reason("00000000000p[CPU0  ] >>PANIC<< unable to open the BIOS"));
        for other in ["00718839458p[UNMAP ] >>PANIC<< Shutdown port: shutdown requested", "Next at t=0", ""] {
            assert!(!is_reason(other), "{other}");
        }
    }
}
