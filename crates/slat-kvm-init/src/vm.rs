//! A VM of KVM with the guest that `slat-metal` measures too.

#![expect(unsafe_code, reason = "registers memory with KVM, and calls its ioctls with a buffer")]

#[cfg(target_arch = "x86_64")]
use std::array;
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
#[cfg(target_arch = "x86_64")]
use crate::cpus;
use crate::guest::{BLOCK_BYTES, DIFFERENCES, GATE_BYTES, GATE_WORDS, NR_BLOCKS, NR_PAGES, Writes};
#[cfg(target_arch = "x86_64")]
use crate::guest::{BLOCK_PAGES, LOOK, LOOKS, WINDOW};
use crate::memory::{Memory, PAGE_SIZE, Pages, SIZE_2M};
use crate::wrong::{Wrong, tried};

unsafe extern "C" {
    static measured_guest: u8;
    static measured_guest_end: u8;
}

const START: u64 = 0x8000_0000;
const PRIVATE_START: u64 = 0x4000_0000;

// Offsets in the private memory, behind the page tables: the block of words of each vCPU, the gates,
// the guest's code.
const BLOCK: u64 = 2 * PAGE_SIZE;
const GATES: u64 = BLOCK + MAX_VCPUS * BLOCK_BYTES;
/// Each has a gate for each block.
const MAX_PHASES: u64 = 8;
const CODE: u64 = SIZE_2M / 2;

/// vCPUs that a guest may have.
const MAX_VCPUS: u64 = 4;

const _: () = assert!(GATES + MAX_PHASES * NR_BLOCKS * GATE_BYTES <= CODE);

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

/// That of vCPU `number`.
fn guest_start(number: u64) -> Start {
    let block = PRIVATE_START + BLOCK + number * BLOCK_BYTES;
    Start { pc: PRIVATE_START + CODE, tables: PRIVATE_START, block }
}

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
    vcpus: Vec<VcpuFd>,
    vm: VmFd,
    pub(crate) memory: Memory,
    private: Private,
}

/// Where word `number` of gate `gate` is in the private memory.
const fn gate_word(gate: u64, number: usize) -> u64 {
    GATES + gate * GATE_BYTES + 8 * number as u64
}

/// What vCPUs write at the same time: the first `nr_writers` of them, `pages_each` pages of each block.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Phase {
    pub(crate) nr_writers: u64,
    pub(crate) pages_each: u64,
    pub(crate) logging: Logging,
}

/// The memory that vCPUs and this process exchange words by.
struct Private(Memory);

impl Private {
    fn set(&self, vcpu: u64, offset: u64, value: u64) {
        self.0.set(BLOCK + vcpu * BLOCK_BYTES + offset, value);
    }

    fn get(&self, vcpu: u64, offset: u64) -> u64 {
        self.0.get(BLOCK + vcpu * BLOCK_BYTES + offset)
    }

    /// Sets what gate `gate` waits for.
    fn set_gate(&self, gate: u64, words: [u64; GATE_WORDS]) {
        for (number, word) in words.into_iter().enumerate() {
            self.0.set(gate_word(gate, number), word);
        }
    }

    /// vCPU `number` writes pages, beside the others that come to gate `gate`.
    fn run(&self, vcpu: &mut VcpuFd, number: u64, gate: u64, writes: Writes) -> Result<(), Wrong> {
        for (offset, value) in writes.words(START, PRIVATE_START + gate_word(gate, 0)) {
            self.set(number, offset, value);
        }
        loop {
            match arch::run(vcpu) {
                Ok(Left::Done) => return Ok(()),
                Ok(Left::Other(exit)) => return Err(Wrong::Guest(exit)),
                Err(error) if error.errno() == libc::EINTR => {}
                Err(error) => return Err(Wrong::Entry(io::Error::from_raw_os_error(error.errno()))),
            }
        }
    }
}

impl Subject {
    /// One with a vCPU, and memory of `pages`, none of which is mapped for the guest.
    pub(crate) fn new(pages: Pages, clearing: Clearing) -> Result<Subject, Wrong> {
        Subject::with_vcpus(pages, clearing, 1)
    }

    /// The same with `nr_vcpus` of them, at most [`MAX_VCPUS`].
    pub(crate) fn with_vcpus(pages: Pages, clearing: Clearing, nr_vcpus: u64) -> Result<Subject, Wrong> {
        assert!(nr_vcpus <= MAX_VCPUS, "each vCPU has a block");
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
        let vcpus = (0..nr_vcpus).map(|number| arch::new_vcpu(&kvm, &vm, number, guest_start(number)));
        let vcpus = vcpus.collect::<Result<Vec<_>, _>>()?;
        let private = Private(Memory::new(SIZE_2M, Pages::Small)?);
        let memory = Memory::new(NR_PAGES * PAGE_SIZE, pages)?;
        let subject = Subject { vcpus, vm, memory, private };
        subject.write_private();
        // SAFETY: a subject drops its memory last.
        unsafe { set_slot(&subject.vm, PRIVATE_SLOT, PRIVATE_START, &subject.private.0, Logging::Off) }?;
        subject.set_logging(Logging::Off)?;
        for (number, vcpu) in (0..).zip(&subject.vcpus) {
            arch::start(vcpu, guest_start(number))?;
        }
        Ok(subject)
    }

    /// Page tables and code.
    fn write_private(&self) {
        arch::write_page_tables(&self.private.0, PRIVATE_START);
        let start = &raw const measured_guest;
        let length = (&raw const measured_guest_end).addr() - start.addr();
        // SAFETY: this program's code, between two symbols of one section.
        let code = unsafe { slice::from_raw_parts(start, length) };
        for (offset, chunk) in (CODE..).step_by(8).zip(code.chunks(8)) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.private.0.set(offset, u64::from_le_bytes(word));
        }
    }

    /// Turns the log on or off.
    pub(crate) fn set_logging(&self, logging: Logging) -> Result<(), Wrong> {
        // SAFETY: a subject drops its memory last.
        unsafe { set_slot(&self.vm, SLOT, START, &self.memory, logging) }
    }

    /// The guest writes `nr_pages` pages from the page `first` on, `distance` pages apart, on its first
    /// vCPU.
    pub(crate) fn run(&mut self, first: u64, nr_pages: u64, distance: u64) -> Result<(), Wrong> {
        self.private.set_gate(0, [1; GATE_WORDS]);
        self.private.run(&mut self.vcpus[0], 0, 0, Writes { first, nr_pages, distance })
    }

    /// The same, from the first page on. Returns the count for each page.
    pub(crate) fn write(&mut self, nr_pages: u64, distance: u64, clock: Clock) -> Result<Vec<u64>, Wrong> {
        match arch::COUNTER {
            Counter::OfGuest => {
                self.run(0, nr_pages, distance)?;
                Ok((0..nr_pages).map(|page| self.private.get(0, DIFFERENCES + 8 * page)).collect())
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

    /// In each phase each vCPU, on a CPU of its own, writes pages of each block of 2 MiB, a page by each
    /// in turns. Returns for each phase and block what all CPUs executed from when all vCPUs had come
    /// until all were done, less the looks of those that were done before.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn write_together<const N: usize>(&mut self, phases: [Phase; N]) -> Result<[Vec<u64>; N], Wrong> {
        const { assert!(N as u64 <= MAX_PHASES, "each phase has its gates") };
        let Subject { vcpus, vm, memory, private } = self;
        let (private, nr_vcpus) = (&*private, vcpus.len() as u64);
        (0..N as u64 * NR_BLOCKS).for_each(|gate| private.set_gate(gate, [nr_vcpus; GATE_WORDS]));
        let write = |number: u64, vcpu: &mut VcpuFd, begin: &dyn Fn(Phase) -> Result<(), Wrong>| {
            let mut windows = Vec::new();
            for (phase, gates) in phases.into_iter().zip((0..).step_by(NR_BLOCKS as usize)) {
                begin(phase)?;
                let nr_pages = if number < phase.nr_writers { phase.pages_each } else { 0 };
                for block in 0..NR_BLOCKS {
                    let first = block * BLOCK_PAGES + number;
                    private.run(vcpu, number, gates + block, Writes { first, nr_pages, distance: nr_vcpus })?;
                    windows.push((private.get(number, WINDOW), private.get(number, LOOKS)));
                }
            }
            Ok(windows)
        };
        let (first, others) = vcpus.split_at_mut(1);
        // The others may wait at the gate of a phase, and do not write, until it has begun.
        // SAFETY: a subject drops its memory last.
        let begin = |phase: Phase| unsafe { set_slot(vm, SLOT, START, memory, phase.logging) };
        let (own, mut all) =
            cpus::beside(others, |number, vcpu| write(number, vcpu, &|_| Ok(())), || write(0, &mut first[0], &begin))?;
        all.push(own);
        let window = |index: usize| {
            // The longest window is that of the vCPU that read the counter first.
            let longest = all.iter().map(|vcpu| vcpu[index].0).max().unwrap_or_default();
            let looks: u64 = all.iter().map(|vcpu| vcpu[index].1).sum();
            longest.saturating_sub(LOOK * looks)
        };
        let nr_blocks = NR_BLOCKS as usize;
        Ok(array::from_fn(|phase| (phase * nr_blocks..(phase + 1) * nr_blocks).map(window).collect()))
    }

    /// Does `work` while all vCPUs but the first one are in the guest, each on a CPU of its own. `work`
    /// gets how often they have looked so far whether it is done.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn beside_others<T>(
        &mut self,
        work: impl FnOnce(&Memory, &dyn Fn() -> u64) -> Result<T, Wrong>,
    ) -> Result<T, Wrong> {
        const ALONE: u64 = 0;
        const NOT_DONE: usize = 1;
        let (private, nr_others) = (&self.private, self.vcpus.len() as u64 - 1);
        // This process does not come to the gate, and is done when it says so.
        private.set_gate(ALONE, [nr_others, nr_others + 1, nr_others]);
        let wait =
            |number, vcpu: &mut VcpuFd| private.run(vcpu, number, ALONE, Writes { first: 0, nr_pages: 0, distance: 0 });
        let not_done = gate_word(ALONE, NOT_DONE);
        let (value, _) = cpus::beside(&mut self.vcpus[1..], wait, || {
            while private.0.get(not_done) > 1 {
                std::hint::spin_loop();
            }
            let value = work(&self.memory, &|| (1..=nr_others).map(|number| private.get(number, LOOKS)).sum());
            private.0.set(not_done, 0);
            value
        })?;
        Ok(value)
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

/// Gives a VM a memslot, or turns its log on or off.
///
/// # Safety
/// `memory` stays mapped as long as the VM lives.
unsafe fn set_slot(vm: &VmFd, slot: u32, guest_phys_addr: u64, memory: &Memory, logging: Logging) -> Result<(), Wrong> {
    let region = kvm_userspace_memory_region {
        slot,
        flags: if logging == Logging::On { KVM_MEM_LOG_DIRTY_PAGES } else { 0 },
        guest_phys_addr,
        memory_size: memory.size_bytes(),
        userspace_addr: memory.address(),
    };
    // SAFETY: as the caller promises. All access to the memory is by atomics, or by machine
    // instructions of the guest.
    tried("set a memslot", unsafe { vm.set_user_memory_region(region) })
}

/// A bit for each page.
pub(crate) type Bitmap = [u64; NR_PAGES as usize / 64];

/// The result of an `ioctl` that was called directly.
fn called(what: &'static str, result: libc::c_int) -> Result<(), Wrong> {
    if result == 0 { Ok(()) } else { Err(Wrong::system(what, io::Error::last_os_error())) }
}
