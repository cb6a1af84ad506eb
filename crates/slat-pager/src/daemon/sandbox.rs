//! A daemon gives up rights once it has its sockets and descriptors: a mistake in what parses a
//! monitor's words, or an object store's, then reaches little.
//!
//! # Guarantees
//! After [`enter`], on this thread and those that it starts, all of this with
//! [`SandboxMode::Required`], or what the kernel can with [`SandboxMode::BestEffort`]:
//! - files are read where snapshots, certificates and the resolver's files are, and written in the
//!   runtime folder and the folders of caches and working sets, nowhere else (landlock);
//! - no program is started, no process is traced or looked into (landlock, seccomp);
//! - system calls beyond those that a server needs fail with `EPERM` (seccomp);
//! - there are no capabilities.
//!
//! Connections to other machines stay possible: object stores need them. TCP listeners cannot be
//! made.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use thiserror::Error;

use crate::config::SandboxMode;

/// What landlock knows since Linux 6.12. An older kernel enforces what it knows, if that is
/// allowed.
const LANDLOCK: ABI = ABI::V6;

/// Where the resolver's files and certificates are.
const SYSTEM_FILES: [&str; 8] =
    ["/etc", "/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share", "/run/systemd/resolve", "/dev/urandom"];
/// What the runtime and the metrics look at.
const KERNEL_FILES: [&str; 3] = ["/proc", "/sys/fs/cgroup", "/sys/devices/system/cpu"];

/// The files that a daemon needs.
#[derive(Clone, Debug, Default)]
pub struct Files {
    /// Read.
    pub read: Vec<PathBuf>,
    /// Read, written, made and removed.
    pub write: Vec<PathBuf>,
}

/// Why rights are not given up.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say it")]
pub enum SandboxError {
    #[error("landlock, which needs Linux 6.12: {0}")]
    Landlock(#[from] landlock::RulesetError),
    #[error("landlock, which needs Linux 6.12, is {0:?}")]
    NotEnforced(RulesetStatus),
    #[error("seccomp: {0}")]
    Seccomp(String),
    #[error("capabilities: {0}")]
    Capabilities(io::Error),
}

/// Gives up rights, for this thread and those that it starts. Call it before there are others.
///
/// # Errors
/// With [`SandboxMode::Required`], what could not be given up. Otherwise that is logged.
pub fn enter(mode: SandboxMode, files: &Files) -> Result<(), SandboxError> {
    if mode == SandboxMode::Off {
        tracing::warn!("there is no sandbox");
        return Ok(());
    }
    let settle = |what: &str, result| match result {
        Err(error) if mode == SandboxMode::Required => Err(error),
        Err(error) => {
            tracing::warn!(what, %error, "a part of the sandbox is missing");
            Ok(())
        }
        Ok(()) => Ok(()),
    };
    settle("landlock", restrict_files(mode, files))?;
    settle("capabilities", drop_capabilities())?;
    settle("seccomp", filter_calls())
}

fn restrict_files(mode: SandboxMode, files: &Files) -> Result<(), SandboxError> {
    let level = if mode == SandboxMode::Required { CompatLevel::HardRequirement } else { CompatLevel::BestEffort };
    let ruleset = Ruleset::default()
        .set_compatibility(level)
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .handle_access(AccessNet::BindTcp)?
        .scope(Scope::from_all(LANDLOCK))?
        .create()?;
    let read = AccessFs::from_read(LANDLOCK) & !AccessFs::Execute;
    let all = AccessFs::from_all(LANDLOCK) & !AccessFs::Execute;
    let system = SYSTEM_FILES.iter().chain(&KERNEL_FILES).map(Path::new);
    let readable = files.read.iter().map(PathBuf::as_path).chain(system).map(|path| (path, read));
    let writable = files.write.iter().map(|path| (path.as_path(), all));
    let ruleset = readable.chain(writable).try_fold(ruleset, |ruleset, (path, access)| {
        // A file that is not there cannot be opened anyway.
        let Ok(opened) = PathFd::new(path) else { return Ok(ruleset) };
        let access = if path.is_dir() { access } else { access & AccessFs::from_file(LANDLOCK) };
        ruleset.add_rule(PathBeneath::new(opened, access))
    })?;
    match ruleset.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        status => Err(SandboxError::NotEnforced(status)),
    }
}

fn drop_capabilities() -> Result<(), SandboxError> {
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_no_new_privs(true)
        .and_then(|()| set_capabilities(None, none))
        .map_err(|error| SandboxError::Capabilities(error.into()))
}

fn filter_calls() -> Result<(), SandboxError> {
    let failed = |error: &dyn std::fmt::Display| SandboxError::Seccomp(error.to_string());
    let rules: BTreeMap<i64, Vec<seccompiler::SeccompRule>> =
        super::calls::ALLOWED.iter().map(|call| (*call, Vec::new())).collect();
    let architecture = std::env::consts::ARCH.try_into().map_err(|error: seccompiler::BackendError| failed(&error))?;
    let refused = SeccompAction::Errno(rustix::io::Errno::PERM.raw_os_error() as u32);
    let filter = SeccompFilter::new(rules, refused, SeccompAction::Allow, architecture).map_err(|e| failed(&e))?;
    let program: BpfProgram = filter.try_into().map_err(|error: seccompiler::BackendError| failed(&error))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(&error))
}
