//! Acceptance with unmodified VMMs: Firecracker and Cloud Hypervisor restore a Linux guest from
//! this pager, and the guest verifies all its memory.
//!
//! By hand: it needs the programs of the VMMs, QEMU and a kernel, and takes their paths from the
//! environment ([`host`]). Without them it says so in a line, and is skipped. `docs/vmms.md` has
//! the commands.
//!
//! # Implementation
//! 1. On the host, an x86-64 machine, it packs itself, the pager, the VMMs and the libraries of all
//!    into an initramfs ([`host`]), and starts an emulated machine whose CPUs have AMD's SVM. QEMU
//!    translates, so the host needs no KVM.
//! 2. As the first process of that machine ([`machine`]) it loads KVM, and runs the steps of
//!    [`firecracker`] and [`cloud_hypervisor`].
//! 3. As the first process of their guests ([`guest`]) it fills memory with values that depend on
//!    the place, verifies them round after round, and says so on the serial line.
//!
//! A step fails if what it waits for does not come in time, and if the guest reads another value.
#![allow(missing_docs, reason = "a program that tests")]

mod cloud_hypervisor;
mod firecracker;
mod guest;
mod host;
mod http;
mod init;
mod machine;
mod memory;
mod pager;
mod process;

use std::process::ExitCode;

/// What went wrong, for a person.
type Outcome<T> = Result<T, String>;

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
