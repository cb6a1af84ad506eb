//! Debian's packages, got by apt without a change to the machine: with a list of sources, lists and
//! a cache of its own, so that no rights are needed. apt verifies what it gets.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

use crate::metal::process::{output, reason};
use crate::session::Session;

/// Why a package cannot be had.
#[derive(Debug, Error)]
pub(super) enum AptError {
    #[error("this machine has no {program}")]
    NoProgram { program: &'static str },
    #[error("this machine runs {name}, not Debian")]
    NotDebian { name: String },
    #[error("apt has no source of Debian {codename}")]
    NoMirror { codename: String },
    #[error("Debian {codename} has no {package}")]
    NoPackage { codename: String, package: String },
    #[error("{program}: {reason}")]
    Failed { program: &'static str, reason: String },
    #[error("{program}: {error}")]
    NotStarted { program: &'static str, error: io::Error },
    #[error("the cache: {0}")]
    Files(io::Error),
}

/// Where Debian's packages have the keys of its archive; apt has its own where neither is.
const KEYS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.pgp", "/usr/share/keyrings/debian-archive-keyring.gpg"];

/// The release that packages of other architectures come from, on all machines: the first that has
/// RISC-V.
const FOREIGN: &str = "trixie";

/// The architecture of this machine's packages.
const NATIVE: &str = "amd64";

/// apt with files of its own.
pub(super) struct Apt<'s> {
    folder: PathBuf,
    /// The release that packages come from.
    codename: String,
    /// The mirror of Debian that this machine uses.
    mirror: String,
    /// Of packages; `None`: this machine's.
    architecture: Option<&'static str>,
    /// From which release packages come, if a newer one has them too.
    target: Option<String>,
    session: &'s Session,
}

impl<'s> Apt<'s> {
    /// Makes the files in `folder`, and reads the lists: of the release of this machine, or of
    /// packages of another `architecture`.
    pub(super) fn new(
        folder: &Path,
        architecture: Option<&'static str>,
        session: &'s Session,
    ) -> Result<Apt<'s>, AptError> {
        let codename = codename(&fs::read_to_string("/etc/os-release").unwrap_or_default())?;
        let (folder, mirror) = (folder.to_owned(), String::new());
        let mut apt = Apt { folder, codename, mirror, architecture, target: None, session };
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt.folder.join(folder)).map_err(AptError::Files)?;
        }
        apt.mirror = apt.mirror()?;
        if architecture.is_some() {
            FOREIGN.clone_into(&mut apt.codename);
        }
        apt.update(&[&apt.codename])?;
        Ok(apt)
    }

    /// The mirror that this machine gets its release from.
    fn mirror(&self) -> Result<String, AptError> {
        let mut command = Command::new("apt-get");
        let format = "$(RELEASE) $(COMPONENT) $(REPO_URI)";
        command.args(["indextargets", "--no-release-info", "--format", format, "Created-By: Packages"]);
        let sources = self.run("apt-get", &mut command)?;
        find_mirror(&sources, &self.codename).ok_or_else(|| AptError::NoMirror { codename: self.codename.clone() })
    }

    /// Gets the lists of `releases`.
    fn update(&self, releases: &[&str]) -> Result<(), AptError> {
        let source = source(self.architecture.unwrap_or(NATIVE), &self.mirror);
        let lines: Vec<String> = releases.iter().map(|release| format!("{source} {release} main\n")).collect();
        fs::write(self.folder.join("sources.list"), lines.concat()).map_err(AptError::Files)?;
        // Otherwise a list that cannot be had is no error.
        let command = &mut self.command("apt-get", &["update", "--quiet", "--error-on=any"]);
        self.run("apt-get", command).map(drop)
    }

    /// From now on packages come from the backports, if they have them.
    pub(super) fn add_backports(&mut self) -> Result<(), AptError> {
        let backports = format!("{}-backports", self.codename);
        self.update(&[&self.codename, &backports])?;
        self.target = Some(backports);
        Ok(())
    }

    /// The first number of the version that would be got; `None`: there is no such package.
    pub(super) fn version(&self, package: &str) -> Result<Option<u32>, AptError> {
        let policy = self.run("apt-cache", &mut self.command("apt-cache", &["policy", package]))?;
        Ok(find_version(&policy))
    }

    /// The first package that `package` depends on whose name begins with `start`.
    pub(super) fn dependency(&self, package: &str, start: &str) -> Result<String, AptError> {
        let missing = || AptError::NoPackage { codename: self.codename.clone(), package: package.to_owned() };
        let depends = self.run("apt-cache", &mut self.command("apt-cache", &["depends", "--important", package]));
        find_dependency(&depends.map_err(|_| missing())?, start).ok_or_else(missing)
    }

    /// Unpacks `packages` into `into`, with what they need, as far as this machine has not got it.
    pub(super) fn unpack_with_dependencies(&self, packages: &[&str], into: &Path) -> Result<(), AptError> {
        let words = ["install", "--quiet", "--yes", "--no-install-recommends", "--download-only"];
        let mut command = self.command("apt-get", &words);
        if let Some(target) = &self.target {
            command.args(["--target-release", target]);
        }
        self.run("apt-get", command.args(packages))?;
        self.unpack_all(&self.folder.join("cache/archives"), into)
    }

    /// Unpacks `packages` alone.
    pub(super) fn unpack(&self, packages: &[&str], into: &Path) -> Result<(), AptError> {
        let folder = self.folder.join("downloads");
        fs::create_dir_all(&folder).map_err(AptError::Files)?;
        let mut command = self.command("apt-get", &["download", "--quiet"]);
        self.run("apt-get", command.args(packages).current_dir(&folder))?;
        self.unpack_all(&folder, into)
    }

    fn unpack_all(&self, folder: &Path, into: &Path) -> Result<(), AptError> {
        for entry in fs::read_dir(folder).map_err(AptError::Files)? {
            let path = entry.map_err(AptError::Files)?.path();
            if path.extension().is_some_and(|end| end == "deb") {
                self.run("dpkg", Command::new("dpkg").arg("--extract").arg(path).arg(into))?;
            }
        }
        Ok(())
    }

    /// A command of apt with the files of this one.
    fn command(&self, program: &str, words: &[&str]) -> Command {
        let path = |name: &str| self.folder.join(name).display().to_string();
        let options = [
            format!("Dir::Etc::SourceList={}", path("sources.list")),
            "Dir::Etc::SourceParts=-".to_owned(),
            format!("Dir::State::Lists={}", path("lists")),
            format!("Dir::Cache={}", path("cache")),
            // Nothing of the machine is changed, so a lock of the machine would only need its
            // rights.
            "Debug::NoLocking=true".to_owned(),
            // Downloads as this user, who has the folder.
            "APT::Sandbox::User=".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
        ];
        let of_architecture = self.architecture.into_iter().flat_map(|architecture| {
            ["APT::Architecture", "APT::Architectures"].map(|name| format!("{name}={architecture}"))
        });
        let mut command = Command::new(program);
        command
            .args(words)
            .args(options.into_iter().chain(of_architecture).flat_map(|option| ["-o".to_owned(), option]));
        command
    }

    /// Runs it, and returns what it printed.
    fn run(&self, program: &'static str, command: &mut Command) -> Result<String, AptError> {
        // Messages, and words that are looked for, in English.
        command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
        match output(command, self.session) {
            Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            Ok(output) => Err(AptError::Failed { program, reason: reason(&output) }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(AptError::NoProgram { program }),
            Err(error) => Err(AptError::NotStarted { program, error }),
        }
    }
}

/// The release, of the text of os-release(5).
fn codename(text: &str) -> Result<String, AptError> {
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    match (value("ID").as_deref(), value("VERSION_CODENAME")) {
        (Some("debian"), Some(codename)) => Ok(codename),
        _ => Err(AptError::NotDebian { name: value("PRETTY_NAME").unwrap_or_else(|| "another system".to_owned()) }),
    }
}

/// A line of sources up to the release.
fn source(architecture: &str, mirror: &str) -> String {
    match KEYS.into_iter().find(|path| Path::new(path).exists()) {
        Some(keys) => format!("deb [arch={architecture} signed-by={keys}] {mirror}"),
        None => format!("deb [arch={architecture}] {mirror}"),
    }
}

/// The mirror of `codename`, of lines "release component mirror".
fn find_mirror(sources: &str, codename: &str) -> Option<String> {
    sources.lines().find_map(|line| {
        let mut words = line.split(' ');
        (words.next()? == codename && words.next()? == "main").then(|| words.next().map(str::to_owned))?
    })
}

/// The first number of the candidate's version. An epoch comes before it, with a colon.
fn find_version(policy: &str) -> Option<u32> {
    let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    let upstream = version.split_once(':').map_or(version, |(_, upstream)| upstream);
    upstream.split(|letter: char| !letter.is_ascii_digit()).next()?.parse().ok()
}

fn find_dependency(depends: &str, start: &str) -> Option<String> {
    let names = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    names.map(str::trim).find(|name| name.starts_with(start)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read() {
        let text = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(codename(text).unwrap(), "bookworm");
        let other = codename("PRETTY_NAME=\"Other 1.0\"\nID=other\nVERSION_CODENAME=x\n").unwrap_err();
        assert_eq!(other.to_string(), "this machine runs Other 1.0, not Debian");
        assert!(codename("").is_err());
    }

    #[test]
    fn the_mirror_is_that_of_the_release() {
        let sources = "x-security main http://a/debian-security/\nx contrib http://b/\nx main http://c/debian/\n";
        assert_eq!(find_mirror(sources, "x").as_deref(), Some("http://c/debian/"));
        assert_eq!(find_mirror(sources, "y"), None);
    }

    #[test]
    fn versions_and_dependencies_are_found() {
        let policy = "qemu-system-x86:\n  Installed: (none)\n  Candidate: 1:7.2+dfsg-7+deb12u13\n";
        assert_eq!(find_version(policy), Some(7));
        assert_eq!(find_version("x:\n  Candidate: 10.0.2+ds-2\n"), Some(10));
        assert_eq!(find_version("x:\n  Candidate: (none)\n"), None);
        let depends = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-50-cloud-amd64\n";
        assert_eq!(find_dependency(depends, "linux-image-").as_deref(), Some("linux-image-6.1.0-50-cloud-amd64"));
        assert_eq!(find_dependency("x\n  Depends: y\n", "linux-image-"), None);
    }
}
