//! Bochs, with its firmware, and the boot loader that starts a hypervisor in it.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{LIBRARIES, Qemu};
use crate::metal::process::{output, reason};
use crate::session::Session;

/// The least version: older ones lack parts of VMX.
const LEAST: [u32; 2] = [2, 7];

/// What packages it needs, in Debian. GRUB makes its disk bootable.
pub(super) const PACKAGES: [&str; 5] = ["bochs-term", "bochsbios", "vgabios", "grub-common", "grub-pc-bin"];

/// Where Debian has it: the program, which is started by a script in another way; its plugins; the
/// firmware; GRUB's program and folder.
const PROGRAM: &str = "usr/bin/bochs-bin";
const PLUGINS: &str = "usr/lib/x86_64-linux-gnu/bochs/plugins";
const SHARE: &str = "usr/share/bochs";
const BIOS: &str = "usr/share/bochs/BIOS-bochs-latest";
const VGA_BIOS: &str = "usr/share/vgabios/vgabios.bin";
const MKIMAGE: &str = "usr/bin/grub-mkimage";
const GRUB: &str = "usr/lib/grub/i386-pc";

/// An emulator that runs and is new enough.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::metal) struct Bochs {
    /// Where packages are; what is not there, this machine has.
    root: PathBuf,
    /// The version, as it says it.
    pub(in crate::metal) version: String,
    /// Whether it waits for commands of its debugger.
    pub(in crate::metal) debugger: Debugger,
}

/// Whether an emulator was built with its debugger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::metal) enum Debugger {
    Built,
    NotBuilt,
}

impl Bochs {
    /// The emulator in `root`, or why it cannot be used.
    pub(super) fn probe(root: &Path, session: &Session) -> Result<Bochs, String> {
        let mut bochs = Bochs { root: root.to_owned(), version: String::new(), debugger: Debugger::NotBuilt };
        for name in [PROGRAM, PLUGINS, BIOS, VGA_BIOS, MKIMAGE, GRUB] {
            let path = bochs.path(name);
            fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        let name = bochs.path(PROGRAM).display().to_string();
        let help = output(bochs.command().arg("--help"), session).map_err(|error| format!("{name}: {error}"))?;
        let text = [&help.stdout[..], &help.stderr[..]].concat();
        let text = String::from_utf8_lossy(&text);
        let Some((version, numbers)) = parse_version(&text) else {
            return Err(format!("{name} does not run: {}", reason(&help)));
        };
        if numbers < LEAST {
            let [major, minor] = LEAST;
            return Err(format!("{name} is Bochs {version}, and at least {major}.{minor} is needed"));
        }
        bochs.version = version;
        if text.contains("-rc filename") {
            bochs.debugger = Debugger::Built;
        }
        Ok(bochs)
    }

    fn path(&self, name: &str) -> PathBuf {
        let path = self.root.join(name);
        if path.exists() { path } else { Path::new("/").join(name) }
    }

    fn start(&self, name: &str) -> Command {
        let libraries = LIBRARIES.map(|folder| self.root.join(folder).into_os_string()).join(&OsString::from(":"));
        let mut command = Command::new(self.path(name));
        command.env("LD_LIBRARY_PATH", libraries);
        command
    }

    /// The emulator, without arguments. It shows its screen on no terminal, and needs the name of
    /// one.
    pub(in crate::metal) fn command(&self) -> Command {
        let mut command = self.start(PROGRAM);
        command.env("LTDL_LIBRARY_PATH", self.path(PLUGINS)).env("BXSHARE", self.path(SHARE)).env("TERM", "vt100");
        command
    }

    /// GRUB's program that makes a boot loader of its modules.
    pub(in crate::metal) fn mkimage(&self) -> Command {
        let mut command = self.start(MKIMAGE);
        command.arg("--directory").arg(self.path(GRUB));
        command
    }

    /// GRUB's first sector.
    pub(in crate::metal) fn boot_sector(&self) -> PathBuf {
        self.path(GRUB).join("boot.img")
    }

    /// The firmware: that of the machine, and that of its screen.
    pub(in crate::metal) fn firmware(&self) -> [PathBuf; 2] {
        [self.path(BIOS), self.path(VGA_BIOS)]
    }
}

/// What runs the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::metal) enum Emulator {
    Qemu(Qemu),
    Bochs(Bochs),
}

impl Emulator {
    /// Name and version.
    pub(in crate::metal) fn name(&self) -> String {
        match self {
            Emulator::Qemu(qemu) => format!("QEMU {}", qemu.version),
            Emulator::Bochs(bochs) => format!("Bochs {}", bochs.version),
        }
    }
}

/// The version in what Bochs prints, and its numbers.
fn parse_version(text: &str) -> Option<(String, [u32; 2])> {
    let (_, rest) = text.split_once("Bochs x86 Emulator ")?;
    let version = rest.split_whitespace().next()?;
    let mut numbers = version.split(|letter: char| !letter.is_ascii_digit()).map(str::parse);
    Some((version.to_owned(), [numbers.next()?.ok()?, numbers.next()?.ok()?]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let text = "=====\n          Bochs x86 Emulator 2.7\n     Built from SVN snapshot";
        assert_eq!(parse_version(text), Some(("2.7".to_owned(), [2, 7])));
        assert_eq!(parse_version("Bochs x86 Emulator 3.0.devel\n"), Some(("3.0.devel".to_owned(), [3, 0])));
        for other in ["", "QEMU emulator version 10.0.2", "Bochs x86 Emulator", "Bochs x86 Emulator x.y"] {
            assert_eq!(parse_version(other), None, "{other}");
        }
    }
}
