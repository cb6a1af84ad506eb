//! A guest kernel in miniature: a guest that behaves towards the MMU as an x86-64 Linux guest does,
//! and checks after each step that every access gives what its own tables say.
//!
//! It runs on any [`GuestCpu`]: a [`PlainCpu`], or a [`ShadowCpu`](crate::shadow_cpu::ShadowCpu).
//!
//! Why: what costs a shadow-paging hypervisor is what kernels do all the time: two loads of CR3 for
//! each system call under page-table isolation, page faults, fork's write protection, exec's new
//! tables, table frames that become pages. And whatever it does wrong, a stale translation or a
//! table taken for another, shows in what the guest reads.
//!
//! What is alike to Linux: the four-level tables, written through a direct map of 2 MiB pages;
//! page-table isolation with two neighbouring roots that share the tables of the user half
//! ([`Isolation`]); few address-space identifiers a CPU, bit 63 of CR3, deferred flushes of the
//! user PCID and generations instead of interrupts for address spaces that do not run ([`Pcids`],
//! `asid.rs`); demand paging, copy-on-write, INVLPG for few pages and a flush of the PCID for many;
//! SMEP and SMAP. Processes have one thread each, so no address space runs on two CPUs at once and
//! no CPU interrupts another.
//!
//! # The check
//! The kernel keeps a model of each address space apart from the tables (`address_space.rs`). Pages
//! hold stamps that never come twice; a read must find the model's. A page fault must be one that
//! the tables call for, with the right error code, or, where rights have grown without a flush, one
//! of the old rights. What the tables forbid must fault. Entries that the kernel reads must be what
//! it wrote, with accessed and dirty bits as the accesses ask for. A frame that is taken must be
//! zero but for what its last owner left there. The first deviation is returned as a
//! [`KernelError`].
//!
//! # Who may do what
//! An address space belongs to one CPU at a time, with its tables; to give it to another the CPU
//! switches away from it first. The kernel's half is written at boot only, but for each CPU's own
//! temporary mappings. Frames are shared by all.

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
mod on_shadow_cpu;
mod operations;
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
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use address_space::AddressSpace;
use boot::Image;
use frames::{Frame, Frames};
use layout::{IMAGE_BYTES, MAX_MEMORY_BYTES, MAX_VCPUS, PROCESS_FRAMES};

pub use counters::Counters;
pub use cpu::{Completed, GuestCpu, Trap};
pub use error::{ConfigError, KernelError};
pub use mix::WorkloadMix;
pub use plain_cpu::{PlainCpu, PlainError, PlainMemory};
pub use process::KernelCpu;

/// Whether user mode has roots of its own, which lack the kernel (page-table isolation).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Isolation {
    /// Two roots for each process. CR3 is loaded at each entry into the kernel and at each way out.
    #[default]
    On,
    /// One root; the kernel's pages are global.
    Off,
}

/// Whether the CPU has PCIDs and INVPCID.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Pcids {
    /// They are used.
    #[default]
    On,
    /// Each load of CR3 flushes.
    Off,
}

/// What kernel it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Virtual CPUs, 1 to 128.
    pub nr_vcpus: u16,
    /// Page-table isolation.
    pub isolation: Isolation,
    /// PCIDs.
    pub pcids: Pcids,
    /// Most processes of a virtual CPU, at least 1.
    pub processes_per_vcpu: u16,
}

impl Default for Config {
    /// One virtual CPU, isolation and PCIDs on, 8 processes: more than it has ASIDs.
    fn default() -> Config {
        Config { nr_vcpus: 1, isolation: Isolation::On, pcids: Pcids::On, processes_per_vcpu: 8 }
    }
}

impl Config {
    /// Bytes of guest memory that the kernel needs from guest-physical 0 on, zero at the start: a
    /// multiple of 2 MiB.
    pub fn memory_bytes(&self) -> u64 {
        // A process more while exec has both, and one that waits for another CPU. What processes
        // have in fact is well below their most, so that there are always neighbours for roots,
        // too.
        let processes = u64::from(self.nr_vcpus) * (u64::from(self.processes_per_vcpu) + 2);
        let bytes = processes * PROCESS_FRAMES * slat::PAGE_SIZE;
        (IMAGE_BYTES + bytes).next_multiple_of(IMAGE_BYTES)
    }
}

/// What the image's builder leaves, and who has started.
#[derive(Debug)]
struct Boot {
    image: Option<Image>,
    is_started: Box<[bool]>,
}

/// What all virtual CPUs of a kernel share.
#[derive(Debug)]
pub struct Kernel {
    config: Config,
    frames: Mutex<Frames>,
    boot: Mutex<Boot>,
    next_id: AtomicU64,
    /// Processes that no virtual CPU has.
    migrating: Mutex<VecDeque<AddressSpace>>,
}

/// Nothing panics under these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kernel {
    /// A kernel that no CPU has started yet.
    ///
    /// # Errors
    /// [`ConfigError`]: it makes no sense.
    pub fn new(config: Config) -> Result<Arc<Kernel>, ConfigError> {
        if config.nr_vcpus == 0 || config.nr_vcpus > MAX_VCPUS {
            return Err(ConfigError::Vcpus { nr_vcpus: config.nr_vcpus, max: MAX_VCPUS });
        }
        if config.processes_per_vcpu == 0 {
            return Err(ConfigError::NoProcesses);
        }
        let memory_bytes = config.memory_bytes();
        if memory_bytes > MAX_MEMORY_BYTES {
            return Err(ConfigError::Memory { memory_bytes, max_bytes: MAX_MEMORY_BYTES });
        }
        Ok(Arc::new(Kernel {
            config,
            frames: Mutex::new(Frames::new(IMAGE_BYTES, memory_bytes)),
            boot: Mutex::new(Boot { image: None, is_started: vec![false; config.nr_vcpus.into()].into() }),
            next_id: AtomicU64::new(1),
            migrating: Mutex::new(VecDeque::new()),
        }))
    }

    /// What kernel it is.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Frames above the image that are in use: 0 when all virtual CPUs have shut down.
    pub fn nr_frames_used(&self) -> u64 {
        self.frames().nr_used()
    }

    fn frames(&self) -> MutexGuard<'_, Frames> {
        lock(&self.frames)
    }

    fn migrating(&self) -> MutexGuard<'_, VecDeque<AddressSpace>> {
        lock(&self.migrating)
    }

    fn next_id(&self) -> u64 {
        // Ordering: only that no two are alike matters.
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Builds the image if nobody has; the table for the temporary mappings of `vcpu`.
    fn boot<C: GuestCpu>(&self, vcpu: u16, cpu: &mut C) -> Result<Frame, KernelError<C::Error>> {
        let nr_vcpus = self.config.nr_vcpus;
        let mut boot = lock(&self.boot);
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
