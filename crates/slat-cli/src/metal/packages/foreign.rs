//! The C library of another architecture: what a program for Linux there is linked with, by the
//! linker that comes with Rust. So no compiler for that architecture is needed.

use std::path::{Path, PathBuf};

use super::{Cache, Wanted};
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
        let Some(debian) = architecture.facts().debian else { return Ok(None) };
        let what = format!("there is no package of a C library for {}", debian.architecture);
        let missing = format!("{what} that can be linked");
        let advice = "choose --guest suite, or --peer none, which need none";
        let wanted =
            Wanted { name: format!("libraries{}", architecture.facts().suffix), debian: Some(debian), what, advice };
        let find = |root: &Path| Libraries::find(root, debian).ok_or_else(|| missing.clone());
        self.get(&wanted, session, find, |apt, folder| apt.unpack(&PACKAGES, folder)).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_library_without_its_parts_is_none() {
        let folder = tempfile::tempdir().unwrap();
        let debian = Architecture::RiscV.facts().debian.unwrap();
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
