//! The emulated machine, which has KVM, and the steps that it runs.

use std::fs;
use std::path::Path;

use crate::{Outcome, cloud_hypervisor, firecracker, guest, init};

/// The programs, in the machine.
pub const PAGER: &str = "/slat-pager";
pub const FIRECRACKER: &str = "/firecracker";
pub const CLOUD_HYPERVISOR: &str = "/cloud-hypervisor";
/// The files of the guest, in the machine.
pub const KERNEL: &str = "/guest-kernel";
pub const INITRAMFS: &str = "/guest-initramfs";

/// How a machine says that all was well.
pub const PASSED: &str = "vmms: passed";
/// How it says that something was not.
pub const FAILED: &str = "vmms: failed: ";

/// The words of a guest's kernel. Async page faults would be served by another thread than the one
/// that touches.
pub const WORDS: &str = "console=ttyS0 quiet panic=-1 no-kvmapf mitigations=off init_on_alloc=0 vmms=guest";
/// CPUs of a guest.
pub const NR_CPUS: u32 = 2;
/// Memory of a guest.
pub const MEMORY_MIB: u64 = 256;
/// What a balloon takes of it.
pub const BALLOON_MIB: u64 = 64;
pub const PAGE_BYTES: u64 = 8 * guest::NR_WORDS as u64;
/// Half of the pages that the balloon takes: it may take some others, too.
pub const HALF_BALLOON_PAGES: u64 = (BALLOON_MIB << 20) / PAGE_BYTES / 2;
/// Memory that the guest has less with the balloon, at least.
pub const BALLOON_LEAST_KIB: u64 = (BALLOON_MIB << 10) / 8 * 7;

/// Modules of the kernel, for the machine.
pub const MODULES: [&str; 3] = ["irqbypass", "kvm", "kvm-amd"];

/// The word on the machine's command line for Firecracker's steps without a pager, and no others.
pub const WITHOUT_PAGER: &str = "vmms-pager=none";

/// Loads KVM, and runs the steps of each VMM that there is. `words` are those of the kernel's
/// command line.
pub fn run(words: &str) -> Outcome<()> {
    for module in MODULES {
        init::load_module(module)?;
    }
    type Steps = fn(&Path) -> Outcome<()>;
    let all: &[(&str, Steps)] = if words.split_whitespace().any(|word| word == WITHOUT_PAGER) {
        &[(FIRECRACKER, firecracker::run_without_pager)]
    } else {
        &[(FIRECRACKER, firecracker::run), (CLOUD_HYPERVISOR, cloud_hypervisor::run)]
    };
    for &(program, steps) in all {
        if Path::new(program).exists() {
            let folder = Path::new("/tmp").join(program.trim_start_matches('/'));
            fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
            steps(&folder).map_err(|why| format!("{}: {why}", program.trim_start_matches('/')))?;
            // Memory, since nothing here is on a disk.
            fs::remove_dir_all(&folder).map_err(|error| error.to_string())?;
        }
    }
    Ok(())
}

/// Tells what has been verified, and how long the machine runs.
pub fn verified(text: &str) {
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    println!("vmms: {text} ({} s)", uptime.split(' ').next().unwrap_or_default());
}
