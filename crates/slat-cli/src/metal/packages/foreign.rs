//! The C library of another architecture: what a program for Linux there is linked with, by the
//! linker that comes with Rust. So no compiler for that architecture is needed.

use std::path::{Path, PathBuf};

use super::{Cache, Got, of};
use crate::failure::Failure;
use crate::metal::architecture::{Architecture, Debian};
use crate::session::Session;

/// The packages, and the folder of the second one's version.
const PACKAGES: [&str; 2] = ["libc6-dev", "libgcc-14-dev"];
const GCC: &str = "14";

/// The C library in the cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::metal) struct Libraries {
    root: PathBuf,
    debian: Debian,
}

impl Libraries {
    /// That in `root`, if it has what is linked.
    fn find(root: &Path, debian: Debian) -> Option<Libraries> {
        let libraries = Libraries { root: root.to_owned(), debian };
        let is_whole = libraries.start().iter().all(|path| path.exists()) && libraries.gcc().join("libgcc.a").exists();
        is_whole.then_some(libraries)
    }

    fn libc(&self) -> PathBuf {
        self.root.join("usr/lib").join(self.debian.libraries)
    }

    fn gcc(&self) -> PathBuf {
        self.root.join("usr/lib/gcc").join(self.debian.libraries).join(GCC)
    }

    /// What a program starts with that is linked statically, and can be anywhere.
    fn start(&self) -> [PathBuf; 3] {
        ["rcrt1.o", "crti.o", "crtn.o"].map(|name| self.libc().join(name))
    }

    /// Flags of the compiler for a program without dynamic libraries.
    pub(in crate::metal) fn flags(&self) -> Vec<String> {
        let mut flags: Vec<String> = [
            "-Ctarget-feature=+crt-static",
            "-Cstrip=symbols",
            "-Clinker=rust-lld",
            "-Clinker-flavor=ld.lld",
            "-Clink-arg=-pie",
            "-Clink-arg=--no-dynamic-linker",
        ]
        .map(str::to_owned)
        .into();
        flags.push(format!("-Clink-arg=--sysroot={}", self.root.display()));
        let folders = [self.libc(), self.gcc()].map(|path| format!("-Clink-arg=-L{}", path.display()));
        flags.extend(folders);
        flags.extend(self.start().map(|path| format!("-Clink-arg={}", path.display())));
        flags
    }
}

impl Cache {
    /// The C library for programs of `architecture`; `None`: this machine's.
    pub(in crate::metal) fn libraries(
        &self,
        architecture: Architecture,
        session: &Session,
    ) -> Result<Option<Libraries>, Failure> {
        let Some(debian) = architecture.debian() else { return Ok(None) };
        let name = of("libraries", architecture);
        let cached = || Libraries::find(&self.folder.join(&name), debian);
        if let Some(libraries) = cached() {
            return Ok(Some(libraries));
        }
        let what = format!("there is no package of a C library for {}", debian.architecture);
        let advice = "choose --guest suite, or --peer none, which need none";
        self.get(&name, Some(debian), &what, advice, session, |apt, folder| {
            if cached().is_some() {
                return Ok(Got::ByAnother);
            }
            apt?.unpack(&PACKAGES, folder)?;
            Ok(Got::Now)
        })?;
        match cached() {
            Some(libraries) => Ok(Some(libraries)),
            None => Err(Failure::CannotServe(format!("{what} that can be linked; {advice}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_library_without_its_parts_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let debian = Architecture::RiscV.debian().unwrap();
        let find = || Libraries::find(folder.path(), debian);
        assert_eq!(find(), None);
        for name in ["riscv64-linux-gnu/rcrt1.o", "riscv64-linux-gnu/crti.o", "riscv64-linux-gnu/crtn.o"] {
            let path = folder.path().join("usr/lib").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert_eq!(find(), None);
        let gcc = folder.path().join("usr/lib/gcc/riscv64-linux-gnu/14");
        fs::create_dir_all(&gcc).unwrap();
        fs::write(gcc.join("libgcc.a"), "").unwrap();
        let flags = find().unwrap().flags();
        assert!(flags.contains(&format!("-Clink-arg=-L{}", gcc.display())), "{flags:?}");
    }
}
