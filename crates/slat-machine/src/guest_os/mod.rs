//! A mini guest kernel: a guest that uses the MMU as an x86-64 Linux guest does. After each step it
//! checks that every access gives the result of its own page tables.
//!
//! It runs on any [`KernelGuestCpu`]: a [`ShadowCpu`](crate::hardware::shadow_cpu::ShadowCpu), or
//! in its own tests a CPU without a hypervisor (`plain_cpu.rs`).
//!
//! A shadow-paging hypervisor's costs come from frequent operations of kernels: two loads of CR3
//! for each system call under page-table isolation, page faults, fork's write protection, exec's
//! new page tables, frames of page-table pages that become data pages. An error of the hypervisor,
//! such as a stale translation or a confused page table, shows in what the guest reads.
//!
//! As in Linux: the four-level page tables, written through a direct map of 2 MiB pages; page-table
//! isolation with two neighbouring roots that share the page tables of the user half
//! ([`Isolation`]); few address-space identifiers a CPU, bit 63 of CR3, deferred flushes of the
//! user PCID, and generations instead of interrupts for address spaces that do not run ([`Pcids`],
//! `asid.rs`); demand paging, copy-on-write, INVLPG for few pages and a flush of the PCID for many;
//! SMEP and SMAP. Processes have one thread each, so no address space runs on two CPUs at once and
//! no CPU interrupts another.
//!
//! # The check
//! The kernel keeps a model of each address space apart from the page tables (`address_space.rs`).
//! - Pages hold marks that are never repeated; a read must return the model's.
//! - A page fault must be one that the page tables require, with the right error code. Where rights
//!   were added without a flush, it may be one of the old rights.
//! - An access that the page tables forbid must fault.
//! - A PTE that the kernel reads must be the one that it wrote, with the accessed and dirty bits of
//!   the accesses.
//! - A frame that is allocated must be zero except for what its last owner left there.
//!
//! The first deviation is returned as a [`KernelError`].
//!
//! # Ownership
//! An address space, with its page tables, belongs to one CPU at a time; the CPU switches away from
//! it before another gets it. The kernel's half is written at boot only, except for each CPU's own
//! temporary mappings. All CPUs share the frames.

mod address_space;
mod asid;
mod boot;
mod core;
mod counters;
mod cpu;
mod error;
mod faults;
mod frames;
mod layout;
mod mix;
mod operations;
#[cfg(test)]
mod plain_cpu;
mod process;
mod tables;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_mutations;
#[cfg(test)]
mod tests_shadow;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use address_space::AddressSpace;
use boot::Image;
use frames::{GuestFrame, GuestFrames};
use layout::{IMAGE_BYTES, MAX_MEMORY_BYTES, MAX_VCPUS, PROCESS_FRAMES};

pub use counters::KernelCounters;
pub use cpu::KernelGuestCpu;
pub use error::{KernelConfigError, KernelError};
pub use mix::WorkloadMix;
pub use process::KernelCpu;

/// Whether user mode has roots of its own, without the kernel (page-table isolation).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Isolation {
    /// Two roots for each process. CR3 is loaded at each entry into the kernel and at each exit
    /// from it.
    #[default]
    On,
    /// One root; the kernel's pages are global.
    Off,
}

/// Whether the CPU has PCIDs and INVPCID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Pcids {
    /// Yes.
    #[default]
    On,
    /// No: each load of CR3 flushes.
    Off,
}

/// The configuration of a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KernelConfig {
    /// Virtual CPUs, 1 to 128.
    pub nr_vcpus: u16,
    /// Page-table isolation.
    pub isolation: Isolation,
    /// PCIDs.
    pub pcids: Pcids,
    /// Most processes of a virtual CPU, at least 1.
    pub processes_per_vcpu: u16,
}

impl Default for KernelConfig {
    /// One virtual CPU, isolation and PCIDs on, 8 processes: more than it has ASIDs.
    fn default() -> KernelConfig {
        KernelConfig { nr_vcpus: 1, isolation: Isolation::On, pcids: Pcids::On, processes_per_vcpu: 8 }
    }
}

impl KernelConfig {
    /// Bytes of guest memory that the kernel needs from guest-physical 0 on, zero at the start: a
    /// multiple of 2 MiB.
    pub fn memory_bytes(&self) -> u64 {
        // One process more while exec has both, and one that waits for another CPU. Processes
        // really have far fewer frames than the limit, so there are always neighbours for roots,
        // too.
        let processes = u64::from(self.nr_vcpus) * (u64::from(self.processes_per_vcpu) + 2);
        let bytes = processes * PROCESS_FRAMES * slat::PAGE_SIZE;
        (IMAGE_BYTES + bytes).next_multiple_of(IMAGE_BYTES)
    }
}

/// The image, and the CPUs that have started.
#[derive(Debug)]
struct Boot {
    image: Option<Image>,
    is_started: Box<[bool]>,
}

/// The state that all virtual CPUs of a kernel share.
#[derive(Debug)]
pub struct Kernel {
    config: KernelConfig,
    frames: Mutex<GuestFrames>,
    boot: Mutex<Boot>,
    next_id: AtomicU64,
    /// Processes that belong to no virtual CPU.
    migrating: Mutex<VecDeque<AddressSpace>>,
}

impl Kernel {
    /// A kernel that no CPU has started yet.
    ///
    /// # Errors
    /// [`KernelConfigError`]: the configuration is refused.
    pub fn new(config: KernelConfig) -> Result<Arc<Kernel>, KernelConfigError> {
        if config.nr_vcpus == 0 || config.nr_vcpus > MAX_VCPUS {
            return Err(KernelConfigError::Vcpus { nr_vcpus: config.nr_vcpus, max: MAX_VCPUS });
        }
        if config.processes_per_vcpu == 0 {
            return Err(KernelConfigError::NoProcesses);
        }
        let memory_bytes = config.memory_bytes();
        if memory_bytes > MAX_MEMORY_BYTES {
            return Err(KernelConfigError::Memory { memory_bytes, max_bytes: MAX_MEMORY_BYTES });
        }
        Ok(Arc::new(Kernel {
            config,
            frames: Mutex::new(GuestFrames::new(IMAGE_BYTES, memory_bytes)),
            boot: Mutex::new(Boot { image: None, is_started: vec![false; config.nr_vcpus.into()].into() }),
            next_id: AtomicU64::new(1),
            migrating: Mutex::new(VecDeque::new()),
        }))
    }

    /// The configuration.
    pub fn config(&self) -> &KernelConfig {
        &self.config
    }

    /// Frames above the image that are in use: 0 when all virtual CPUs have shut down.
    pub fn nr_frames_used(&self) -> u64 {
        self.frames.lock().nr_used()
    }

    fn next_id(&self) -> u64 {
        // Relaxed: only uniqueness matters.
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Builds the image on the first call. Returns the page-table page for the temporary mappings
    /// of `vcpu`.
    fn boot<C: KernelGuestCpu>(&self, vcpu: u16, cpu: &mut C) -> Result<GuestFrame, KernelError> {
        let nr_vcpus = self.config.nr_vcpus;
        let mut boot = self.boot.lock();
        let Boot { image, is_started } = &mut *boot;
        let Some(is_started) = is_started.get_mut(usize::from(vcpu)) else {
            return Err(KernelError::NoVcpu { vcpu, nr_vcpus });
        };
        if std::mem::replace(is_started, true) {
            return Err(KernelError::Started { vcpu });
        }
        let image = match image {
            Some(image) => image,
            None => image.insert(boot::build(cpu, &self.config)?),
        };
        Ok(image.kernel_map_tables[usize::from(vcpu)])
    }
}
