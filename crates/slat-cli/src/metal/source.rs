//! The source of slat, and what is built from it: the hypervisor, and the first processes of Linux
//! as its guest, and with KVM beside it.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::packages::Libraries;
use super::plan::Plan;
use super::process::{output, reason};
use crate::failure::Failure;
use crate::session::Session;

/// The folder of the workspace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Source(PathBuf);

/// A separator of flags that may be in no flag.
const BETWEEN_FLAGS: &str = "\u{1f}";

const HYPERVISOR: &str = "slat-metal";

struct Program {
    package: &'static str,
    profile: &'static str,
    features: &'static [&'static str],
    /// Named also where it is this machine's, so that flags are for the program alone and not for
    /// what runs while building.
    target: &'static str,
    flags: Vec<String>,
}

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
        let is_source = |folder: &&Path| folder.join("crates").join(HYPERVISOR).join("Cargo.toml").exists();
        folder.ancestors().find(is_source).map(|folder| Source(folder.to_owned()))
    }

    /// The folder of what is built and downloaded.
    pub(super) fn target(&self) -> PathBuf {
        self.0.join("target/metal")
    }

    /// Builds the hypervisor. (The linker's arguments are in its `build.rs`.)
    pub(super) fn hypervisor(&self, plan: &Plan, session: &Session) -> Result<PathBuf, Failure> {
        let facts = plan.machine.architecture().facts();
        let program = Program {
            package: HYPERVISOR,
            profile: "metal",
            features: &["--features", "image"],
            target: facts.bare_target,
            flags: facts.bare_flags.iter().copied().map(str::to_owned).collect(),
        };
        self.build(&program, plan, session)
    }

    /// Builds a program for Linux on the machine, with the C library of its architecture.
    pub(super) fn linux_program(
        &self,
        package: &'static str,
        libraries: Option<&Libraries>,
        plan: &Plan,
        session: &Session,
    ) -> Result<PathBuf, Failure> {
        let of_this_machine = || vec!["-Ctarget-feature=+crt-static".to_owned()];
        let flags = libraries.map_or_else(of_this_machine, Libraries::flags);
        let target = plan.machine.architecture().facts().linux_target;
        self.build(&Program { package, profile: "release", features: &[], target, flags }, plan, session)
    }

    fn build(&self, program: &Program, plan: &Plan, session: &Session) -> Result<PathBuf, Failure> {
        let Program { package, profile, features, target, flags } = program;
        self.add_target(target, plan, session)?;
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.current_dir(&self.0).args(["build", "--package", package, "--bin", package, "--profile", profile]);
        command.args(*features).args(["--target", target]).arg("--target-dir").arg(self.target());
        // These take precedence over all flags that a user has set for other builds.
        command.env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", flags.join(BETWEEN_FLAGS));
        // A variable of the build that made this program.
        command.env_remove("CARGO_TARGET_DIR").env("CARGO_TERM_COLOR", "never");
        match output(&mut command, session) {
            Ok(output) if output.status.success() => Ok(self.target().join(target).join(profile).join(package)),
            // No lack of this machine: what is skipped there must not hide it.
            Ok(output) => Err(Failure::Check(format!("{package} cannot be built: {}", reason(&output)))),
            Err(error) => Err(Failure::CannotServe(format!(
                "{package} cannot be built: cargo: {error}; install Rust, or name an --image"
            ))),
        }
    }

    /// Lets rustup add `target`, if this machine's Rust cannot build for it.
    fn add_target(&self, target: &str, plan: &Plan, session: &Session) -> Result<(), Failure> {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut command = Command::new(rustc);
        command.current_dir(&self.0).args(["--print", "target-libdir", "--target", target]);
        // Without a compiler, cargo says it best.
        let Ok(libraries) = output(&mut command, session) else { return Ok(()) };
        if Path::new(String::from_utf8_lossy(&libraries.stdout).trim()).is_dir() {
            return Ok(());
        }
        plan.tell(session, &format!("rust | has no target {target}: rustup adds it\n"))?;
        let mut rustup = Command::new("rustup");
        rustup.current_dir(&self.0).args(["target", "add", target]);
        let why = match output(&mut rustup, session) {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => format!("rustup cannot add it: {}", reason(&output)),
            Err(error) if error.kind() == ErrorKind::NotFound => "there is no rustup to add it".to_owned(),
            Err(error) => format!("rustup: {error}"),
        };
        Err(Failure::CannotServe(format!(
            "Rust has no target {target} here, and {why}; install Rust with rustup, or choose --machine svm"
        )))
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
