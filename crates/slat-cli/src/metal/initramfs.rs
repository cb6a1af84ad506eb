//! The first file system of Linux: its first process, the console that the kernel opens for it, and
//! modules of the kernel.

use std::io::{self, Write};

use cpio::NewcBuilder;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// The device numbers of `/dev/console` (Linux, Documentation/admin-guide/devices.txt).
const CONSOLE: [u32; 2] = [5, 1];

/// A module of the kernel: the name of its file, and its content.
pub(super) type Module = (String, Vec<u8>);

/// Writes the archive, with `init` as `/init` and `modules` in `/modules`.
pub(super) fn write(mut to: impl Write, init: &[u8], modules: &[Module]) -> io::Result<()> {
    let [major, minor] = CONSOLE;
    let entry = |number, name: &str, mode| NewcBuilder::new(name).ino(number).mode(mode).nlink(1);
    entry(1, "dev", FOLDER).write(&mut to, 0).finish()?;
    let console = entry(2, "dev/console", CHARACTER_DEVICE).rdev_major(major).rdev_minor(minor);
    console.write(&mut to, 0).finish()?;
    let mut file = |number, name: &str, mode, content: &[u8]| {
        let size = u32::try_from(content.len()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        let mut file = entry(number, name, mode).write(&mut to, size);
        file.write_all(content)?;
        file.finish().map(drop)
    };
    file(3, "init", PROGRAM, init)?;
    if !modules.is_empty() {
        file(4, "modules", FOLDER, &[])?;
    }
    for (number, (name, content)) in (5..).zip(modules) {
        file(number, &format!("modules/{name}"), FILE, content)?;
    }
    cpio::newc::trailer(to)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use cpio::NewcReader;

    use super::*;

    #[test]
    fn it_has_a_console_a_program_and_modules() {
        let mut archive = Vec::new();
        write(&mut archive, b"\x7fELF...", &[("kvm.ko".to_owned(), b"module".to_vec())]).unwrap();
        let mut rest = archive.as_slice();
        let mut found = Vec::new();
        loop {
            let mut reader = NewcReader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let mut content = Vec::new();
            reader.read_to_end(&mut content).unwrap();
            let entry = reader.entry();
            found.push((entry.name().to_owned(), entry.mode(), [entry.rdev_major(), entry.rdev_minor()], content));
            rest = reader.finish().unwrap();
        }
        let expected = [
            ("dev", 0o040_755, [0, 0], &b""[..]),
            ("dev/console", 0o020_600, [5, 1], b""),
            ("init", 0o100_755, [0, 0], b"\x7fELF..."),
            ("modules", 0o040_755, [0, 0], b""),
            ("modules/kvm.ko", 0o100_644, [0, 0], b"module"),
        ];
        let expected = expected.map(|(name, mode, device, content)| (name.to_owned(), mode, device, content.to_vec()));
        assert_eq!(found, expected);
    }
}
