//! The source of slat, and what is built from it: the hypervisor, and the first processes of Linux
//! as its guest, and with KVM beside it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::process::{output, reason};
use crate::failure::Failure;
use crate::session::Session;

/// The folder of the workspace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Source(PathBuf);

/// The target of all: named, so that flags are for them alone and not for what runs while building.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// A separator of flags that may be in no flag.
const BETWEEN_FLAGS: &str = "\u{1f}";

/// A program to build.
struct Program {
    package: &'static str,
    profile: &'static str,
    features: &'static [&'static str],
    /// Flags of the compiler.
    flags: &'static [&'static str],
}

/// The image is loaded where it is linked. (The linker's arguments are in its `build.rs`.)
const HYPERVISOR: Program = Program {
    package: "slat-metal",
    profile: "metal",
    features: &["--features", "image"],
    flags: &["-Crelocation-model=static", "-Ccode-model=small"],
};

/// The guest has no libraries.
const GUEST_INIT: Program =
    Program { package: "slat-guest-init", profile: "release", features: &[], flags: &["-Ctarget-feature=+crt-static"] };

/// Likewise: the first process of the machine that has KVM.
const KVM_INIT: Program =
    Program { package: "slat-kvm-init", profile: "release", features: &[], flags: &["-Ctarget-feature=+crt-static"] };

/// The source, or why nothing can be built.
pub(super) fn required(source: Option<&Source>) -> Result<&Source, Failure> {
    source.ok_or_else(|| {
        Failure::CannotServe(
            "there is no source of slat-metal in this folder or above it; run it in a clone of slat".to_owned(),
        )
    })
}

impl Source {
    /// Where this process runs, or else where this program was built.
    pub(super) fn find() -> Option<Source> {
        let here = std::env::current_dir().ok();
        [here.as_deref(), Some(Path::new(env!("CARGO_MANIFEST_DIR")))].into_iter().flatten().find_map(Source::above)
    }

    fn above(folder: &Path) -> Option<Source> {
        let is_source = |folder: &&Path| folder.join("crates").join(HYPERVISOR.package).join("Cargo.toml").exists();
        folder.ancestors().find(is_source).map(|folder| Source(folder.to_owned()))
    }

    /// The folder of what is built and downloaded.
    pub(super) fn target(&self) -> PathBuf {
        self.0.join("target/metal")
    }

    pub(super) fn hypervisor(&self, session: &Session) -> Result<PathBuf, Failure> {
        self.build(&HYPERVISOR, session)
    }

    pub(super) fn guest_init(&self, session: &Session) -> Result<PathBuf, Failure> {
        self.build(&GUEST_INIT, session)
    }

    pub(super) fn kvm_init(&self, session: &Session) -> Result<PathBuf, Failure> {
        self.build(&KVM_INIT, session)
    }

    fn build(&self, program: &Program, session: &Session) -> Result<PathBuf, Failure> {
        let Program { package, profile, features, flags } = program;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.current_dir(&self.0).args(["build", "--package", package, "--bin", package, "--profile", profile]);
        command.args(*features).args(["--target", TARGET]).arg("--target-dir").arg(self.target());
        // These take precedence over all flags that a user has set for other builds.
        command.env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", flags.join(BETWEEN_FLAGS));
        // A variable of the build that made this program.
        command.env_remove("CARGO_TARGET_DIR").env("CARGO_TERM_COLOR", "never");
        match output(&mut command, session) {
            Ok(output) if output.status.success() => Ok(self.target().join(TARGET).join(profile).join(package)),
            // No lack of this machine: what is skipped there must not hide it.
            Ok(output) => Err(Failure::Check(format!("{package} cannot be built: {}", reason(&output)))),
            Err(error) => Err(Failure::CannotServe(format!(
                "{package} cannot be built: cargo: {error}; install Rust, or name an --image"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_is_found_from_any_folder_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path().join("crates/slat-metal/src");
        std::fs::create_dir_all(&package).unwrap();
        assert_eq!(Source::above(&package), None);
        std::fs::write(folder.path().join("crates/slat-metal/Cargo.toml"), "").unwrap();
        let found = Source::above(&package).unwrap();
        assert_eq!(found, Source(folder.path().to_owned()));
        assert_eq!(found.target(), folder.path().join("target/metal"));
    }
}
