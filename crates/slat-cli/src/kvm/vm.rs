//! A VM of the KVM of this machine, through `/dev/kvm`.
//!
//! A VM has a *region* of memory, divided into memslots, and guests (`guest`) that write to it,
//! each on its own vCPU. The region's memslots log dirty pages on request
//! (`KVM_MEM_LOG_DIRTY_PAGES`), in the bitmaps of `KVM_GET_DIRTY_LOG`, in one of the three modes
//! that the engine has too ([`ManualProtect`]). The calls that experiments time are one `ioctl` for
//! each memslot, with an existing buffer: the time includes the system call. (The wrapper of
//! kvm-ioctls makes a new vector for each call, so those calls are direct.)

#![expect(unsafe_code, reason = "registers memory with a KVM, and calls its ioctls with a buffer")]

use std::os::fd::AsRawFd;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_DIRTY_LOG_INITIALLY_SET, KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES,
    KVMIO, kvm_clear_dirty_log, kvm_clear_dirty_log__bindgen_ty_1, kvm_dirty_log, kvm_dirty_log__bindgen_ty_1,
    kvm_enable_cap, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};
use slat::Gfn;
use slat::dirty::ManualProtect;
use slat_machine::memory::{Backing, BackingKind};

use super::facts::KvmFacts;
use super::guest::KvmGuest;
use super::system::{REGION_GPA, SYSTEM_GPA, System};
use super::{KvmError, Logging, MAX_REGION_BYTES, VmShape};

/// The memslot of the guests' program, page tables and lists of pages. The region's memslots have
/// the numbers from 1 on.
const SYSTEM_SLOT: u32 = 0;

/// `KVM_GET_DIRTY_LOG`, that is `_IOW(KVMIO, 0x42, struct kvm_dirty_log)`
/// (Documentation/virt/kvm/api.rst, 4.8).
const GET_DIRTY_LOG: u64 = 1 << 30 | (size_of::<kvm_dirty_log>() as u64) << 16 | (KVMIO as u64) << 8 | 0x42;

/// `KVM_CLEAR_DIRTY_LOG`, that is `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)` (the same,
/// 4.117).
const CLEAR_DIRTY_LOG: u64 = 3 << 30 | (size_of::<kvm_clear_dirty_log>() as u64) << 16 | (KVMIO as u64) << 8 | 0xc0;

/// The other flag of `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` is `KVM_DIRTY_LOG_INITIALLY_SET` (the
/// same, 7.17).
const DIRTY_LOG_MANUAL_PROTECT_ENABLE: u32 = 1;

/// `result`, with the operation in the error.
pub(super) fn tried<T>(what: &str, result: Result<T, kvm_ioctls::Error>) -> Result<T, KvmError> {
    result.map_err(|error| KvmError(format!("{what}: {error}")))
}

fn open() -> Result<Kvm, KvmError> {
    tried("cannot open /dev/kvm", Kvm::new())
}

pub(crate) fn facts() -> Result<KvmFacts, KvmError> {
    Ok(KvmFacts::read(&open()?))
}

/// `wanted`, or the nearest mode that this KVM has.
pub(crate) fn nearest_manual_protect(wanted: ManualProtect) -> Result<ManualProtect, KvmError> {
    let has = open()?.check_extension_raw(KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2.into());
    let has = |flag: u32| has > 0 && has as u32 & flag != 0;
    Ok(match wanted {
        ManualProtect::InitiallySet if has(KVM_DIRTY_LOG_INITIALLY_SET) => ManualProtect::InitiallySet,
        ManualProtect::InitiallySet | ManualProtect::Enabled if has(DIRTY_LOG_MANUAL_PROTECT_ENABLE) => {
            ManualProtect::Enabled
        }
        _ => ManualProtect::Disabled,
    })
}

pub(crate) struct KvmVm {
    // Declared before the memory, which it uses, so that it is dropped first.
    vm: VmFd,
    nr_slots: u32,
    pub(crate) pages_per_slot: u64,
    memory: Backing,
    /// The memory of [`SYSTEM_SLOT`].
    _system: Backing,
}

impl KvmVm {
    /// A VM whose region is all of `memory`, not logged yet; and its guests.
    pub(crate) fn new(memory: &Backing, shape: &VmShape) -> Result<(KvmVm, Vec<KvmGuest>), KvmError> {
        let nr_pages = memory.size_bytes() >> Gfn::SHIFT;
        if memory.size_bytes() > MAX_REGION_BYTES {
            return Err(KvmError(format!("a region of {nr_pages} pages is too large for its guests' tables")));
        }
        if !nr_pages.is_multiple_of(shape.nr_slots.into()) {
            return Err(KvmError(format!("{nr_pages} pages cannot be split evenly into {} slots", shape.nr_slots)));
        }
        let kvm = open()?;
        let vm = tried("create a VM", kvm.create_vm())?;
        let manual_protect = match shape.manual_protect {
            ManualProtect::Disabled => 0,
            ManualProtect::Enabled => DIRTY_LOG_MANUAL_PROTECT_ENABLE,
            ManualProtect::InitiallySet => DIRTY_LOG_MANUAL_PROTECT_ENABLE | KVM_DIRTY_LOG_INITIALLY_SET,
        };
        if manual_protect != 0 {
            let capability = kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                args: [manual_protect.into(), 0, 0, 0],
                ..kvm_enable_cap::default()
            };
            tried("turn manual protection of the dirty log on", vm.enable_cap(&capability))?;
        }
        let system = System::new(nr_pages, shape)?;
        let vm = KvmVm {
            vm,
            nr_slots: shape.nr_slots,
            pages_per_slot: nr_pages / u64::from(shape.nr_slots),
            memory: memory.clone(),
            _system: system.memory.clone(),
        };
        vm.set_slot(SYSTEM_SLOT, 0, SYSTEM_GPA, &system.memory, 0..system.memory.size_bytes())?;
        vm.set_logging(Logging::Off)?;
        let cpuid = tried("get the CPUID", kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
        let guest = |index: usize| {
            let vcpu = tried("create a vCPU", vm.vm.create_vcpu(index as u64))?;
            tried("set the CPUID", vcpu.set_cpuid2(&cpuid))?;
            KvmGuest::new(vcpu, index as u64, shape, &system, memory)
        };
        let guests = (0..shape.nr_vcpus).map(guest).collect::<Result<_, _>>()?;
        Ok((vm, guests))
    }

    /// Makes a memslot of a part of `memory`, one of the two backings that `self` holds, or changes
    /// its flags.
    fn set_slot(
        &self,
        slot: u32,
        flags: u32,
        guest_phys_addr: u64,
        memory: &Backing,
        bytes: std::ops::Range<u64>,
    ) -> Result<(), KvmError> {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr,
            memory_size: bytes.end - bytes.start,
            userspace_addr: memory.as_ptr().expose_provenance() as u64 + bytes.start,
        };
        // SAFETY: the part is inside the memory, which stays mapped as long as the VM lives: both
        // `self` and each guest, whose vCPU keeps the VM alive, hold it and drop it last. All
        // access to it is by atomics, or by machine instructions of the guests.
        tried("set a slot", unsafe { self.vm.set_user_memory_region(region) })
    }

    /// Turns logging on or off, memslot by memslot.
    pub(crate) fn set_logging(&self, logging: Logging) -> Result<(), KvmError> {
        let flags = match logging {
            Logging::Off => 0,
            Logging::On => KVM_MEM_LOG_DIRTY_PAGES,
        };
        let slot_bytes = self.pages_per_slot << Gfn::SHIFT;
        for slot in 0..self.nr_slots {
            let start = u64::from(slot) * slot_bytes;
            self.set_slot(slot + 1, flags, REGION_GPA + start, &self.memory, start..start + slot_bytes)?;
        }
        Ok(())
    }

    /// Empty bitmaps, one for each slot: bit n % 64 of word n / 64 is its page n.
    pub(crate) fn empty_bitmaps(&self) -> Vec<Vec<u64>> {
        (0..self.nr_slots).map(|_| vec![0; self.nr_words()]).collect()
    }

    /// Words of a slot's bitmap.
    fn nr_words(&self) -> usize {
        self.pages_per_slot.div_ceil(u64::BITS.into()) as usize
    }

    /// Gets the log of slot number `index` of the region.
    pub(crate) fn get_dirty_log(&self, index: u32, bitmap: &mut [u64]) -> Result<(), KvmError> {
        assert!(bitmap.len() >= self.nr_words(), "the kernel would write behind the buffer");
        let dirty_bitmap = bitmap.as_mut_ptr().cast();
        let argument = kvm_dirty_log {
            slot: index + 1,
            padding1: 0,
            __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 { dirty_bitmap },
        };
        // SAFETY: the argument has the kernel's layout and outlives the call. The kernel writes a
        // bit for each page of the memslot, in whole words: `nr_words` of them, and the buffer has
        // as many.
        let result = unsafe { libc::ioctl(self.vm.as_raw_fd(), GET_DIRTY_LOG as _, &raw const argument) };
        called("KVM_GET_DIRTY_LOG", result)
    }

    /// Clears the pages of `bitmap` in the log of memslot number `index` of the region.
    pub(crate) fn clear_dirty_log(&self, index: u32, bitmap: &[u64]) -> Result<(), KvmError> {
        assert!(bitmap.len() >= self.nr_words(), "the kernel would read behind the buffer");
        let argument = kvm_clear_dirty_log {
            slot: index + 1,
            // A region has fewer pages than that.
            num_pages: self.pages_per_slot as u32,
            first_page: 0,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap: bitmap.as_ptr().cast_mut().cast() },
        };
        // SAFETY: the argument has the kernel's layout and outlives the call. The kernel reads a
        // bit for each page of the memslot, in whole words: `nr_words` of them, and the buffer has
        // as many. It writes none of them.
        let result = unsafe { libc::ioctl(self.vm.as_raw_fd(), CLEAR_DIRTY_LOG as _, &raw const argument) };
        called("KVM_CLEAR_DIRTY_LOG", result)
    }
}

/// The result of an `ioctl` that was called directly.
fn called(what: &str, result: libc::c_int) -> Result<(), KvmError> {
    match result {
        0 => Ok(()),
        _ => Err(KvmError(format!("{what}: {}", std::io::Error::last_os_error()))),
    }
}

/// Memory for the guests' program and tables.
pub(super) fn system_memory(size_bytes: u64) -> Result<Backing, KvmError> {
    Backing::new(BackingKind::Anonymous, size_bytes)
        .map_err(|error| KvmError(format!("memory of the guests' program: {error}")))
}
