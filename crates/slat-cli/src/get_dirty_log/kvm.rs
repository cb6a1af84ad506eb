//! The peer that counts: the KVM of this machine, through `/dev/kvm`.
//!
//! Its slot is of the same size and on the same memory as everybody's, with `KVM_MEM_LOG_DIRTY_PAGES`, and the log is
//! that of `KVM_GET_DIRTY_LOG` in its legacy mode, in which the call begins a new log too. What is timed is that one
//! `ioctl`, into a buffer that exists already: the system call belongs to the price. (The wrapper of kvm-ioctls makes a
//! new vector for each call, so the call is made directly.) The guest (`guest`) has a vCPU of one real CPU, which is out
//! of the guest when the log is taken.

#![expect(unsafe_code, reason = "gives memory to a KVM, and calls its ioctl with a buffer")]

mod facts;
mod guest;
mod watchdog;

use std::fmt;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, KVMIO, kvm_dirty_log, kvm_dirty_log__bindgen_ty_1,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};
use slat::PAGE_SHIFT;
use slat_machine::memory::{Backing, BackingKind};

use super::pattern::nr_words;
use super::subject::Subject;
use crate::failure::Failure;
pub(super) use facts::Facts;
use guest::{Guest, SLOT_GPA, SYSTEM_GPA};

/// The slot of the guest's program, tables and list of pages.
const SYSTEM_SLOT: u32 = 0;
/// The slot that logs.
const SLOT: u32 = 1;

/// `KVM_GET_DIRTY_LOG`, that is `_IOW(KVMIO, 0x42, struct kvm_dirty_log)` (Documentation/virt/kvm/api.rst, 4.8).
const GET_DIRTY_LOG: u64 = 1 << 30 | (size_of::<kvm_dirty_log>() as u64) << 16 | (KVMIO as u64) << 8 | 0x42;

/// KVM refused something, or its guest did something that was not asked for.
#[derive(Debug)]
pub(super) struct Trouble(String);

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Failure {
        Failure::CannotServe(format!("KVM: {trouble}"))
    }
}

/// `result`, with a word on what was tried.
fn tried<T>(what: &str, result: Result<T, kvm_ioctls::Error>) -> Result<T, Trouble> {
    result.map_err(|error| Trouble(format!("{what}: {error}")))
}

/// A VM of the real KVM, with a guest.
pub(super) struct KvmPeer {
    guest: Guest,
    // Behind the guest, whose vCPU is of this VM; in front of the memory, which it uses.
    vm: VmFd,
    nr_words: usize,
    _memory: Backing,
}

impl KvmPeer {
    /// A VM whose slot is all of `memory`; and what there is to say about this KVM.
    pub(super) fn new(memory: &Backing) -> Result<(KvmPeer, Facts), Trouble> {
        let kvm = tried("cannot open /dev/kvm", Kvm::new())?;
        let vm = tried("create a VM", kvm.create_vm())?;
        let nr_pages = memory.size_bytes() >> PAGE_SHIFT;
        let system = Backing::new(BackingKind::Anonymous, guest::system_bytes(nr_pages))
            .map_err(|error| Trouble(format!("memory of the guest's program: {error}")))?;
        let slots = [(SYSTEM_SLOT, 0, SYSTEM_GPA, &system), (SLOT, KVM_MEM_LOG_DIRTY_PAGES, SLOT_GPA, memory)];
        for (slot, flags, guest_phys_addr, memory) in slots {
            let region = kvm_userspace_memory_region {
                slot,
                flags,
                guest_phys_addr,
                memory_size: memory.size_bytes(),
                userspace_addr: memory.as_ptr().expose_provenance() as u64,
            };
            // SAFETY: the memory stays mapped as long as the VM lives, for the VM is dropped before it; all access to it
            // is by atomics, or by machine instructions of the guest.
            tried("set a slot", unsafe { vm.set_user_memory_region(region) })?;
        }
        let vcpu = tried("create a vCPU", vm.create_vcpu(0))?;
        let cpuid = tried("get the CPUID", kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
        tried("set the CPUID", vcpu.set_cpuid2(&cpuid))?;
        let guest = Guest::new(vcpu, system, nr_pages)?;
        let peer = KvmPeer { guest, vm, nr_words: nr_words(nr_pages as u32), _memory: memory.clone() };
        Ok((peer, Facts::read(&kvm)))
    }
}

impl Subject for KvmPeer {
    fn write(&mut self, pages: &[u32], value: u64) -> Result<(), Failure> {
        Ok(self.guest.write(pages, value)?)
    }

    fn get_dirty_log(&mut self, log: &mut [u64]) -> Result<(), Failure> {
        assert!(log.len() >= self.nr_words, "the kernel would write behind the buffer");
        let dirty_bitmap = log.as_mut_ptr().cast();
        let argument =
            kvm_dirty_log { slot: SLOT, padding1: 0, __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 { dirty_bitmap } };
        // SAFETY: the argument has the kernel's layout and outlives the call, which writes a bit for each page of the
        // slot, in whole words: `nr_words` of them, and as many are there.
        let result = unsafe { libc::ioctl(self.vm.as_raw_fd(), GET_DIRTY_LOG as _, &raw const argument) };
        if result == 0 {
            return Ok(());
        }
        Err(Trouble(format!("KVM_GET_DIRTY_LOG: {}", std::io::Error::last_os_error())).into())
    }
}
