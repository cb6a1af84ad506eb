//! Acceptance with unmodified VMMs: Firecracker and Cloud Hypervisor restore a Linux guest from this
//! pager, and the guest verifies all its memory.
//!
//! By hand: it needs the programs of the VMMs, QEMU and a kernel, and takes their paths from the
//! environment ([`host`]). Without them it says so in a line, and is skipped. `docs/vmms.md` has the
//! commands.
//!
//! # Implementation
//! 1. On the host ([`host`]) it packs itself, the pager, the VMMs and the libraries of all into an
//!    initramfs, and starts an emulated machine whose CPUs have AMD's SVM. QEMU translates, so the
//!    host needs no KVM.
//! 2. As the first process of that machine ([`machine`]) it loads KVM, and runs the steps of
//!    [`firecracker`] and [`cloud_hypervisor`].
//! 3. As the first process of their guests ([`guest`]) it fills memory with values that depend on
//!    the place, verifies them round after round, and says so on the serial line.
//!
//! A step that does not end in time fails, as does a guest that finds a wrong value.
#![allow(missing_docs, reason = "a program that tests")]

#[cfg(target_arch = "x86_64")]
mod cloud_hypervisor;
#[cfg(target_arch = "x86_64")]
mod firecracker;
#[cfg(target_arch = "x86_64")]
mod guest;
#[cfg(target_arch = "x86_64")]
mod host;
#[cfg(target_arch = "x86_64")]
mod http;
#[cfg(target_arch = "x86_64")]
mod init;
#[cfg(target_arch = "x86_64")]
mod machine;
#[cfg(target_arch = "x86_64")]
mod memory;
#[cfg(target_arch = "x86_64")]
mod pager;
#[cfg(target_arch = "x86_64")]
mod process;

use std::process::ExitCode;

/// What went wrong, for a person.
type Outcome<T> = Result<T, String>;

#[cfg(not(target_arch = "x86_64"))]
fn main() -> ExitCode {
    println!("skipped: the acceptance test with VMMs is for x86-64");
    ExitCode::SUCCESS
}

#[cfg(target_arch = "x86_64")]
fn main() -> ExitCode {
    if std::process::id() == 1 {
        init::run();
    }
    match host::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("failed: {why}");
            ExitCode::FAILURE
        }
    }
}
