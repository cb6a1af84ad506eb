//! The emulator and the guest's kernel: those of the machine, those that the user names, or
//! Debian's packages in a cache folder.
//!
//! # Guarantees
//! What is in the cache is whole: it is unpacked into a temporary folder, which is renamed. Another
//! run uses it without the network. Two runs at the same time get it once.

mod apt;
mod bochs;
mod foreign;

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use super::architecture::{Architecture, Debian, Facts};
use super::process::{output, reason};
use crate::failure::Failure;
use crate::session::Session;
use apt::{Apt, AptError};
pub(super) use bochs::{Bochs, Debugger, Emulator};
pub(super) use foreign::Libraries;

/// The least version of QEMU: CPUs that are threads are not reliable in older ones.
const LEAST_QEMU: u32 = 10;

/// Where packages have libraries, and the emulator's firmware.
const LIBRARIES: [&str; 4] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib", "lib"];
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];

/// How names of temporary folders begin.
const PARTIAL: &str = ".partial-";

/// The folder of packages.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    downloads: Downloads,
}

/// A folder of the cache.
struct Wanted<'a> {
    name: String,
    /// Of packages; `None`: this machine's.
    debian: Option<Debian>,
    /// What is missing where there is none, and what to do then.
    what: String,
    advice: &'a str,
}

/// Whether packages that are missing are downloaded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Downloads {
    Allowed,
    Refused,
}

/// An emulator that runs and is new enough.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Qemu {
    program: PathBuf,
    /// With packages in the cache: where they are.
    root: Option<PathBuf>,
    /// The version, as it says it.
    pub(super) version: String,
}

impl Qemu {
    /// The command, without arguments.
    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        if let Some(root) = &self.root {
            let libraries = LIBRARIES.map(|folder| root.join(folder).into_os_string()).join(&OsString::from(":"));
            command.env("LD_LIBRARY_PATH", libraries);
            for folder in FIRMWARE {
                command.arg("-L").arg(root.join(folder));
            }
        }
        command
    }

    /// The emulator `program`, or why it cannot be used.
    fn probe(program: PathBuf, root: Option<PathBuf>, session: &Session) -> Result<Qemu, String> {
        let name = program.display().to_string();
        let mut qemu = Qemu { program, root, version: String::new() };
        let output = output(qemu.command().arg("--version"), session).map_err(|error| format!("{name}: {error}"))?;
        if !output.status.success() {
            return Err(format!("{name} does not run: {}", reason(&output)));
        }
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (version, major) = parse_version(&text).ok_or_else(|| format!("{name} is no QEMU"))?;
        if major < LEAST_QEMU {
            return Err(format!("{name} is QEMU {version}, and at least {LEAST_QEMU} is needed"));
        }
        qemu.version = version;
        Ok(qemu)
    }
}

/// The version in what QEMU prints, and its first number.
fn parse_version(text: &str) -> Option<(String, u32)> {
    let rest = text.strip_prefix("QEMU emulator version ")?;
    let version = rest.split_whitespace().next()?;
    Some((version.to_owned(), version.split('.').next()?.parse().ok()?))
}

impl Cache {
    pub(super) fn new(folder: PathBuf, downloads: Downloads) -> Cache {
        // Programs run in other folders.
        Cache { folder: std::path::absolute(&folder).unwrap_or(folder), downloads }
    }

    /// The file `name` in it.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// The emulator: the one at `named`, this machine's, or the package.
    pub(super) fn qemu(
        &self,
        architecture: Architecture,
        named: Option<&Path>,
        session: &Session,
    ) -> Result<Qemu, Failure> {
        let Facts { qemu: program, qemu_package: package, .. } = *architecture.facts();
        if let Some(path) = named {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            return Qemu::probe(path, None, session)
                .map_err(|why| Failure::CannotServe(format!("{why}; name another --qemu, or leave it out")));
        }
        if let Ok(qemu) = Qemu::probe(PathBuf::from(program), None, session) {
            return Ok(qemu);
        }
        let wanted = Wanted {
            name: format!("qemu{}", architecture.facts().suffix),
            debian: None,
            what: format!("there is no {program} of QEMU {LEAST_QEMU} here, and no package of it"),
            advice: &format!(
                "install the package {package} of QEMU {LEAST_QEMU} or newer, or name {program} with --qemu"
            ),
        };
        let find = |root: &Path| Qemu::probe(root.join("usr/bin").join(program), Some(root.to_owned()), session);
        self.get(&wanted, session, find, |mut apt, folder| {
            if apt.version(package)?.is_none_or(|version| version < LEAST_QEMU) {
                apt.add_backports()?;
            }
            apt.unpack_with_dependencies(&[package], folder)
        })
    }

    /// Bochs, with what it needs: from the packages, or this machine's.
    pub(super) fn bochs(&self, session: &Session) -> Result<Bochs, Failure> {
        let wanted = Wanted {
            name: "bochs".to_owned(),
            debian: None,
            what: "there is no Bochs here, and no package of it".to_owned(),
            advice: "install the packages bochs-term, bochsbios, vgabios and grub-pc-bin",
        };
        let find = |root: &Path| Bochs::probe(root, session);
        self.get(&wanted, session, find, |apt, folder| apt.unpack_with_dependencies(&bochs::PACKAGES, folder))
    }

    /// The kernel of the package, for a guest.
    pub(super) fn kernel(&self, architecture: Architecture, session: &Session) -> Result<PathBuf, Failure> {
        let wanted = ["kernel", "there is no package of a Linux kernel", "that has one", "name a kernel with --kernel"];
        Ok(self.linux(architecture, &[], wanted, session)?.0)
    }

    /// The kernel of the package, with the modules that KVM consists of.
    pub(super) fn kvm_kernel(
        &self,
        architecture: Architecture,
        session: &Session,
    ) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
        match architecture.facts().kvm_modules {
            [] => Ok((self.kernel(architecture, session)?, Vec::new())),
            names => {
                let what = "there is no package of a Linux kernel with KVM";
                self.linux(architecture, names, ["kvm", what, "as modules", "leave it out with --peer none"], session)
            }
        }
    }

    /// A kernel with those of its modules that have one of `names`. All others, which are most of the
    /// package, are removed.
    fn linux(
        &self,
        architecture: Architecture,
        names: &[&str],
        [folder, what, missing, advice]: [&str; 4],
        session: &Session,
    ) -> Result<(PathBuf, Vec<PathBuf>), Failure> {
        let Facts { suffix, debian, kernel_package, .. } = *architecture.facts();
        let wanted = Wanted { name: format!("{folder}{suffix}"), debian, what: what.to_owned(), advice };
        let find = |root: &Path| {
            let modules = find_modules(&root.join("modules"), names).unwrap_or_default();
            let kernel = kernel_in(root).filter(|_| names.is_empty() || !modules.is_empty());
            kernel.map(|kernel| (kernel, modules)).ok_or_else(|| format!("{what} {missing}"))
        };
        self.get(&wanted, session, find, |apt, folder| {
            // The package that always names the newest one.
            let newest = apt.dependency(kernel_package, "linux-image-")?;
            apt.unpack(&[&newest], folder)?;
            keep_modules(folder, names).map_err(AptError::Files)
        })
    }

    /// What `find` finds in a folder of the cache. If it is not there, `unpack` fills the folder.
    fn get<'s, T>(
        &self,
        wanted: &Wanted<'_>,
        session: &'s Session,
        find: impl Fn(&Path) -> Result<T, String>,
        unpack: impl FnOnce(Apt<'s>, &Path) -> Result<(), AptError>,
    ) -> Result<T, Failure> {
        let Wanted { name, debian, what, advice } = wanted;
        let place = self.folder.join(name);
        if let Ok(found) = find(&place) {
            return Ok(found);
        }
        if self.downloads == Downloads::Refused {
            let folder = self.folder.display();
            return Err(Failure::CannotServe(format!("{what} in {folder}; slat metal --guest measure gets it")));
        }
        let fill = || -> Result<(), AptError> {
            fs::create_dir_all(&self.folder).map_err(AptError::Files)?;
            let _lock = self.lock().map_err(AptError::Files)?;
            // Another run may have got it meanwhile.
            if find(&place).is_ok() {
                return Ok(());
            }
            self.remove_partial().map_err(AptError::Files)?;
            let partial = self.partial(session).map_err(AptError::Files)?;
            let folder = partial.path().join("root");
            fs::create_dir(&folder).map_err(AptError::Files)?;
            let apt = Apt::new(&partial.path().join("apt"), debian.map(|debian| debian.architecture), session)?;
            unpack(apt, &folder)?;
            // One that cannot be used any more.
            fs::remove_dir_all(&place).or_else(not_found).map_err(AptError::Files)?;
            fs::rename(folder, &place).map_err(AptError::Files)
        };
        fill().map_err(|error| Failure::CannotServe(format!("{what}: {error}; {advice}")))?;
        find(&place).map_err(|why| Failure::CannotServe(format!("{why}; {advice}")))
    }

    /// Waits until no other run changes the cache. The lock ends with the file.
    fn lock(&self) -> io::Result<File> {
        let file = File::create(self.folder.join("lock"))?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(file)
    }

    /// A folder that is removed in the end.
    fn partial(&self, session: &Session) -> io::Result<TempDir> {
        let folder = tempfile::Builder::new().prefix(PARTIAL).tempdir_in(&self.folder)?;
        let path = folder.path().to_owned();
        session.when_interrupted(move || drop(fs::remove_dir_all(path)));
        Ok(folder)
    }

    /// Removes what runs have left that were killed.
    fn remove_partial(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }
}

/// The kernel that was unpacked into `root`. Debian calls it "vmlinux" on RISC-V.
fn kernel_in(root: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(root.join("boot")).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    files.into_iter().find(|path| {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        name.starts_with(b"vmlinuz-") || name.starts_with(b"vmlinux-")
    })
}

/// Moves those of these names into the folder `modules`, and removes all others.
fn keep_modules(folder: &Path, names: &[&str]) -> io::Result<()> {
    let kept = folder.join("modules");
    fs::create_dir(&kept)?;
    for place in ["lib/modules", "usr/lib/modules"] {
        for module in find_modules(&folder.join(place), names).or_else(|error| not_found(error).map(|()| Vec::new()))? {
            if let Some(name) = module.file_name() {
                fs::rename(&module, kept.join(name))?;
            }
        }
    }
    ["lib", "usr"].into_iter().try_for_each(|part| fs::remove_dir_all(folder.join(part)).or_else(not_found))
}

/// The modules of these names in `folder` and in what is below it.
fn find_modules(folder: &Path, names: &[&str]) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let (entry, path) = entry.map(|entry| (entry.file_type(), entry.path()))?;
        if entry?.is_dir() {
            found.extend(find_modules(&path, names)?);
        } else if path
            .file_name()
            .and_then(|name| name.to_str()?.split_once(".ko"))
            .is_some_and(|(name, _)| names.contains(&name))
        {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn not_found(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_modules_those_of_kvm_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("lib/modules/6.1/kernel");
        for name in ["kvm/kvm.ko", "kvm/kvm-amd.ko.xz", "kvm/kvm-intel.ko", "lib/irqbypass.ko", "net/kvm.txt"] {
            let path = place.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        let modules = Architecture::X86.facts().kvm_modules;
        keep_modules(folder.path(), modules).unwrap();
        let names: Vec<_> = find_modules(&folder.path().join("modules"), modules)
            .unwrap()
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["irqbypass.ko", "kvm-amd.ko.xz", "kvm.ko"]);
        assert!(!folder.path().join("lib").exists());
    }

    #[test]
    fn versions_are_read() {
        let text = "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright (c) 2003-2025";
        assert_eq!(parse_version(text), Some(("10.0.2".to_owned(), 10)));
        assert_eq!(parse_version("QEMU emulator version 7.2.19\n"), Some(("7.2.19".to_owned(), 7)));
        for other in ["", "Bochs x86 Emulator 2.7", "QEMU emulator version", "QEMU emulator version x.y"] {
            assert_eq!(parse_version(other), None, "{other}");
        }
    }
}
