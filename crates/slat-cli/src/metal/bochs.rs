//! The machine with VMX: the files of Bochs, its command line, and what of its words is for people.
//!
//! Its disk has no file system: GRUB's first sector and its core, and from 1 MiB on the hypervisor,
//! which GRUB reads by its place.

use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;

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

/// What GRUB needs: disks, and the way to start a hypervisor.
const GRUB_MODULES: [&str; 3] = ["biosdisk", "multiboot", "boot"];

/// Where the hypervisor is on the disk: the core of GRUB is before it.
const SECTOR: u64 = 512;
const IMAGE_SECTOR: u64 = 2048;
/// A cylinder of the disk: 16 heads and 63 sectors.
const CYLINDER: u64 = 16 * 63 * SECTOR;

/// Bochs's words for the end by the hypervisor's wish. It always exits with 1.
const ENDED: &str = "Shutdown port: shutdown requested";
const PANIC: &str = ">>PANIC<<";

/// Writes all files of the machine that runs `image` into `folder`.
pub(super) fn write(bochs: &Bochs, folder: &Path, image: &Path, plan: &Plan, session: &Session) -> Result<(), Failure> {
    let failed = |source: io::Error| Failure::Write { path: folder.to_owned(), source };
    for (from, name) in bochs.firmware().iter().zip(FIRMWARE) {
        fs::copy(from, folder.join(name)).map_err(|error| cannot_read(from, &error))?;
    }
    let image = fs::read(image).map_err(|error| cannot_read(image, &error))?;
    let nr_sectors = (image.len() as u64).div_ceil(SECTOR);
    let words = plan.hypervisor_words();
    let config = format!("multiboot (hd0){IMAGE_SECTOR}+{nr_sectors} slat-metal {words}\nboot\n");
    fs::write(folder.join(GRUB_CONFIG), config).map_err(failed)?;
    let core = core(bochs, folder, session)?;
    let boot_sector = bochs.boot_sector();
    let boot_sector = fs::read(&boot_sector).map_err(|error| cannot_read(&boot_sector, &error))?;
    let nr_cylinders = ((IMAGE_SECTOR + nr_sectors) * SECTOR).div_ceil(CYLINDER);
    let disk = || -> io::Result<()> {
        let mut disk = File::create(folder.join(DISK))?;
        disk.write_all(&boot_sector)?;
        disk.write_all(&core)?;
        disk.seek(SeekFrom::Start(IMAGE_SECTOR * SECTOR))?;
        disk.write_all(&image)?;
        disk.set_len(nr_cylinders * CYLINDER)?;
        fs::write(folder.join(DEBUGGER), "continue\n")?;
        fs::write(folder.join(CONFIG), configuration(plan, nr_cylinders))
    };
    disk().map_err(failed)
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
    if core.len() as u64 > (IMAGE_SECTOR - 1) * SECTOR {
        return Err(failed(format!("{} bytes are too many", core.len())));
    }
    Ok(core)
}

/// The configuration. The time of the machine is that of its instructions.
fn configuration(plan: &Plan, nr_cylinders: u64) -> String {
    let [bios, vga_bios] = FIRMWARE;
    let (nr_cpus, mib) = (plan.nr_cpus, plan.machine_mib());
    format!(
        "config_interface: textconfig\n\
         display_library: term\n\
         plugin_ctrl: speaker=0, serial=0, parallel=0\n\
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

/// Whether a line of Bochs itself says why it ended.
pub(super) fn is_reason(line: &str) -> bool {
    line.contains(PANIC) && !line.contains(ENDED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_own_words_are_shown_where_they_say_why_it_ended() {
        assert!(is_reason("00000000000p[CPU0  ] >>PANIC<< unable to open the BIOS"));
        for other in ["00718839458p[UNMAP ] >>PANIC<< Shutdown port: shutdown requested", "Next at t=0", ""] {
            assert!(!is_reason(other), "{other}");
        }
    }
}
