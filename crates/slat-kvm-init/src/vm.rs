//! A VM of KVM with the guest that `slat-metal` measures too.

#![expect(unsafe_code, reason = "registers memory with KVM, and calls its ioctls with a buffer")]

use std::io;
use std::os::fd::AsRawFd;
use std::slice;

use kvm_bindings::{
    KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, KVM_MEM_LOG_DIRTY_PAGES, KVMIO, kvm_clear_dirty_log,
    kvm_clear_dirty_log__bindgen_ty_1, kvm_dirty_log, kvm_dirty_log__bindgen_ty_1, kvm_enable_cap,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

use crate::arch;
use crate::clock::Clock;
use crate::memory::{Memory, PAGE_SIZE, Pages, SIZE_2M};
use crate::wrong::{Wrong, tried};

unsafe extern "C" {
    static measured_guest: u8;
    static measured_guest_end: u8;
}

/// As `slat-metal` has it: pages that are measured, and pages of 2 MiB among them.
pub(crate) const NR_PAGES: u64 = 4096;
pub(crate) const BLOCK_PAGES: u64 = SIZE_2M / PAGE_SIZE;
pub(crate) const NR_BLOCKS: u64 = NR_PAGES / BLOCK_PAGES;
const START: u64 = 0x8000_0000;
const PRIVATE_START: u64 = 0x4000_0000;

// Offsets in the private memory, behind the page tables: the guest's block of words, its code.
const BLOCK: u64 = 2 * PAGE_SIZE;
const DIFFERENCES: u64 = BLOCK + 32;
const CODE: u64 = SIZE_2M / 2;

const _: () = assert!(DIFFERENCES + 8 * NR_PAGES <= CODE);

const PRIVATE_SLOT: u32 = 0;
const SLOT: u32 = 1;

/// `KVM_GET_DIRTY_LOG`, that is `_IOW(KVMIO, 0x42, struct kvm_dirty_log)`
/// (Documentation/virt/kvm/api.rst, 4.8).
const GET_DIRTY_LOG: u64 = 1 << 30 | (size_of::<kvm_dirty_log>() as u64) << 16 | (KVMIO as u64) << 8 | 0x42;

/// `KVM_CLEAR_DIRTY_LOG`, that is `_IOWR(KVMIO, 0xc0, struct kvm_clear_dirty_log)` (the same,
/// 4.117).
const CLEAR_DIRTY_LOG: u64 = 3 << 30 | (size_of::<kvm_clear_dirty_log>() as u64) << 16 | (KVMIO as u64) << 8 | 0xc0;

/// A flag of `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` (the same, 7.17).
const DIRTY_LOG_MANUAL_PROTECT_ENABLE: u64 = 1;

/// Whether getting the log clears it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Clearing {
    WithGet,
    Apart,
}

/// Whether the memslot logs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Logging {
    Off,
    On,
}

/// What the guest starts with: addresses in its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Start {
    pub(crate) pc: u64,
    /// Its page tables.
    pub(crate) tables: u64,
    /// Its block of words.
    pub(crate) block: u64,
}

const GUEST_START: Start = Start { pc: PRIVATE_START + CODE, tables: PRIVATE_START, block: PRIVATE_START + BLOCK };

/// By which counter writes of the guest are counted.
#[expect(dead_code, reason = "an instruction set has one of them")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Counter {
    /// The guest's own, for each of the pages that it writes.
    OfGuest,
    /// That of this process, around an entry into the guest for each page. What is in it besides the
    /// write is the same for each page, whether there is a fault or not.
    OfProcess,
}

/// Why the guest was left.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Left {
    /// It has done its work, and does it again when it is entered.
    Done,
    /// Another exit, as KVM has it.
    Other(String),
}

/// The VM.
pub(crate) struct Subject {
    // Dropped before the memory that its memslots have.
    vcpu: VcpuFd,
    vm: VmFd,
    pub(crate) memory: Memory,
    private: Memory,
}

impl Subject {
    /// One with memory of `pages`, none of which is mapped for the guest.
    pub(crate) fn new(pages: Pages, clearing: Clearing) -> Result<Subject, Wrong> {
        let kvm = tried("open /dev/kvm", Kvm::new())?;
        let vm = tried("create a VM", kvm.create_vm())?;
        if clearing == Clearing::Apart {
            let capability = kvm_enable_cap {
                cap: KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
                args: [DIRTY_LOG_MANUAL_PROTECT_ENABLE, 0, 0, 0],
                ..kvm_enable_cap::default()
            };
            tried("turn manual protection of the dirty log on", vm.enable_cap(&capability))?;
        }
        let vcpu = arch::new_vcpu(&kvm, &vm, GUEST_START)?;
        let private = Memory::new(SIZE_2M, Pages::Small)?;
        let memory = Memory::new(NR_PAGES * PAGE_SIZE, pages)?;
        let subject = Subject { vcpu, vm, memory, private };
        subject.write_private();
        subject.set_slot(PRIVATE_SLOT, PRIVATE_START, &subject.private, Logging::Off)?;
        subject.set_logging(Logging::Off)?;
        arch::start(&subject.vcpu, GUEST_START)?;
        Ok(subject)
    }

    /// Page tables and code.
    fn write_private(&self) {
        arch::write_page_tables(&self.private, PRIVATE_START);
        let start = &raw const measured_guest;
        let length = (&raw const measured_guest_end).addr() - start.addr();
        // SAFETY: this program's code, between two symbols of one section.
        let code = unsafe { slice::from_raw_parts(start, length) };
        for (offset, chunk) in (CODE..).step_by(8).zip(code.chunks(8)) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.private.set(offset, u64::from_le_bytes(word));
        }
    }

    fn set_slot(&self, slot: u32, guest_phys_addr: u64, memory: &Memory, logging: Logging) -> Result<(), Wrong> {
        let region = kvm_userspace_memory_region {
            slot,
            flags: if logging == Logging::On { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
            guest_phys_addr,
            memory_size: memory.size_bytes(),
            userspace_addr: memory.address(),
        };
        // SAFETY: the memory stays mapped as long as the VM lives: `self` drops it last. All access
        // to it is by atomics, or by machine instructions of the guest.
        tried("set a memslot", unsafe { self.vm.set_user_memory_region(region) })
    }

    /// Turns the log on or off.
    pub(crate) fn set_logging(&self, logging: Logging) -> Result<(), Wrong> {
        self.set_slot(SLOT, START, &self.memory, logging)
    }

    /// The guest writes `nr_pages` pages from the page `first` on, `distance` pages apart.
    pub(crate) fn run(&mut self, first: u64, nr_pages: u64, distance: u64) -> Result<(), Wrong> {
        for (offset, value) in [(0, START + first * PAGE_SIZE), (8, nr_pages), (16, distance * PAGE_SIZE)] {
            self.private.set(BLOCK + offset, value);
        }
        loop {
            match arch::run(&mut self.vcpu) {
                Ok(Left::Done) => return Ok(()),
                Ok(Left::Other(exit)) => return Err(Wrong::Guest(exit)),
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(Wrong::Entry(io::Error::from_raw_os_error(error.errno()))),
            }
        }
    }

    /// The same, from the first page on. Returns the count for each page.
    pub(crate) fn write(&mut self, nr_pages: u64, distance: u64, clock: Clock) -> Result<Vec<u64>, Wrong> {
        match arch::COUNTER {
            Counter::OfGuest => {
                self.run(0, nr_pages, distance)?;
                Ok((0..nr_pages).map(|page| self.private.get(DIFFERENCES + 8 * page)).collect())
            }
            Counter::OfProcess => {
                let mut write = |page| {
                    let (result, count) = clock.time(|| self.run(page * distance, 1, 1));
                    result.map(|()| count)
                };
                (0..nr_pages).map(&mut write).collect()
            }
        }
    }

    /// Gets the log.
    pub(crate) fn get_dirty_log(&self, bitmap: &mut Bitmap) -> Result<(), Wrong> {
        let dirty_bitmap = bitmap.as_mut_ptr().cast();
        let argument =
            kvm_dirty_log { slot: SLOT, padding1: 0, __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 { dirty_bitmap } };
        // SAFETY: the argument has the kernel's layout and outlives the call. The kernel writes a
        // bit for each page of the memslot, which is the buffer's size.
        called("get the dirty log", unsafe {
            libc::ioctl(self.vm.as_raw_fd(), GET_DIRTY_LOG as _, &raw const argument)
        })
    }

    /// Clears the pages of `bitmap` in the log.
    pub(crate) fn clear_dirty_log(&self, bitmap: &Bitmap) -> Result<(), Wrong> {
        let argument = kvm_clear_dirty_log {
            slot: SLOT,
            num_pages: NR_PAGES as u32,
            first_page: 0,
            __bindgen_anon_1: kvm_clear_dirty_log__bindgen_ty_1 { dirty_bitmap: bitmap.as_ptr().cast_mut().cast() },
        };
        // SAFETY: as above; the kernel reads the bits.
        let result = unsafe { libc::ioctl(self.vm.as_raw_fd(), CLEAR_DIRTY_LOG as _, &raw const argument) };
        called("clear the dirty log", result)
    }
}

/// A bit for each page.
pub(crate) type Bitmap = [u64; NR_PAGES as usize / 64];

/// The result of an `ioctl` that was called directly.
fn called(what: &'static str, result: libc::c_int) -> Result<(), Wrong> {
    if result == 0 { Ok(()) } else { Err(Wrong::system(what, io::Error::last_os_error())) }
}
