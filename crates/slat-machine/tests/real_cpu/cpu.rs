//! A real CPU behind `/dev/kvm`, which does one access at a time at CPL 3 on given page tables.
//!
//! # Implementation
//! The vCPU is in long mode and CR3 is the root of the page tables under test. The processor's
//! guest-virtual addresses are the engine's guest-physical ones, and KVM's guest-physical addresses
//! are the engine's host-physical ones, the [`Arena`]. The same page tables must map a few *system
//! pages* at [`SYSTEM_GPA`]: the programs that access, the descriptor tables, the exception
//! handlers, two stacks.
//!
//! An access sets the registers to a program of two instructions. The first accesses; the second
//! writes to [`EXIT_GPA`], which is not mapped. Either of them ends in a page fault, whose handler
//! at CPL 0 writes to an I/O port. That returns to the thread here, where CR2, the pushed RIP and
//! the error code show what happened. (A software interrupt could also leave the guest, but some
//! KVMs do not support one.) The handler never continues: the next access sets all registers anew.
//!
//! # Flushes
//! [`RealCpu::flush`] loads CR3 at CPL 0, as the manuals require (AMD APM vol. 2, 5.5.2), which is
//! enough where the processor walks the page tables itself. A KVM that shadows them observes only
//! the guest's own writes to page tables, and not those of the engine from user space. It drops its
//! shadow when a memory slot is deleted, so one is made and deleted. PTEs that become present or
//! get more rights need neither: KVM walks the page tables anew at each fault.
//!
//! Sources: AMD APM vol. 2, 4.7 and 4.8 (descriptors), 8.2.15 (page faults), 8.9 (long-mode
//! interrupt stack), 12.2.5 (TSS); Fn8000_0001 of vol. 3, appendix E; the kernel's documentation of
//! the KVM API.

#![expect(unsafe_code, reason = "gives the arena to a KVM as its memory; a signal for a guest that does not end")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use slat::{Access, Gpa, Hpa, PAGE_SIZE};

use crate::arena::{Arena, BASE, FRAMES, SIZE_BYTES};

/// The address at which the system pages must be mapped, writable.
pub const SYSTEM_GPA: u64 = 0x7fff_0000_0000;
/// Their number.
pub const NR_SYSTEM_PAGES: u64 = 5;
/// Their address in the arena.
pub const SYSTEM_HPA: Hpa = Hpa(FRAMES);
/// The address at which nothing may be mapped. In the same page tables as the system pages.
const EXIT_GPA: u64 = SYSTEM_GPA + NR_SYSTEM_PAGES * PAGE_SIZE;

// The system pages: programs of CPL 3, descriptor tables, programs of CPL 0, the stacks of CPL 0
// and 3.
const PROGRAMS: u64 = 0;
const DESCRIPTORS: u64 = PAGE_SIZE;
const HANDLERS: u64 = 2 * PAGE_SIZE;
const KERNEL_STACK_END: u64 = 4 * PAGE_SIZE;
const USER_STACK_END: u64 = 5 * PAGE_SIZE;

// Within the page of descriptors.
const GDT: u64 = DESCRIPTORS;
const TSS: u64 = DESCRIPTORS + 0x100;
const IDT: u64 = DESCRIPTORS + 0x200;

// Selectors.
const KERNEL_CODE: u16 = 0x08;
const KERNEL_DATA: u16 = 0x10;
const USER_DATA: u16 = 0x18 | 3;
const USER_CODE: u16 = 0x20 | 3;
const TASK: u16 = 0x28;

const NR_VECTORS: u64 = 32;
const PAGE_FAULT: u8 = 14;
/// Bytes of the handler of one vector.
const HANDLER_BYTES: u64 = 8;
/// The port of a loaded CR3; the ports below are the vectors.
const FLUSHED: u8 = 0x80;
const FLUSH: u64 = HANDLERS + NR_VECTORS * HANDLER_BYTES;

/// Bytes between the programs of CPL 3.
const PROGRAM_BYTES: u64 = 16;
/// The programs: address in RAX, value in RCX, EXIT_GPA in RDX. All end in `mov byte [rdx], 0`.
const READ: [u8; 6] = [0x48, 0x8b, 0x08, 0xc6, 0x02, 0x00]; // mov rcx, [rax]
const WRITE: [u8; 6] = [0x48, 0x89, 0x08, 0xc6, 0x02, 0x00]; // mov [rax], rcx
const EXECUTE: [u8; 5] = [0xff, 0xd0, 0xc6, 0x02, 0x00]; // call rax
/// The contents of an address for [`Access::Execute`], so that it returns: `ret`.
pub const RETURN: u8 = 0xc3;

/// The total time of a guest, before its test fails.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// The signal that makes the vCPU's thread leave the guest. Its handler does nothing.
const LEAVE_SIGNAL: libc::c_int = libc::SIGUSR2;

/// CPUID Fn8000_0001.
const EXTENDED_FEATURES: u32 = 0x8000_0001;
/// In its EDX.
const FEATURE_NX: u32 = 1 << 20;
const FEATURE_1G_PAGES: u32 = 1 << 26;
const FEATURE_LONG_MODE: u32 = 1 << 29;

const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const EFER_NXE: u64 = 1 << 11;
/// PE, MP, ET, NE, WP, PG.
const CR0: u64 = 1 << 0 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;
/// The bit that is always one.
const RFLAGS: u64 = 1 << 1;

/// The result of an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Done {
    /// It completed; the value of a read, or of the write.
    Completed(u64),
    /// #PF.
    PageFault {
        /// The address, from CR2.
        cr2: u64,
        /// The error code.
        code: u64,
    },
}

/// An unexpected result of the CPU, or an error of KVM.
#[derive(Debug)]
pub struct Trouble(pub String);

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `result`, with the name of the attempt in its error.
fn tried<T>(what: &str, result: Result<T, kvm_ioctls::Error>) -> Result<T, Trouble> {
    result.map_err(|error| Trouble(format!("{what}: {error}")))
}

/// The physical address of an offset in the system pages.
fn system_hpa(offset: u64) -> Hpa {
    Hpa(SYSTEM_HPA.0 + offset)
}

/// The linear address that the page tables translate as `gpa`: bit 47 is repeated in the bits above
/// it (AMD APM vol. 2, 5.3.1 "Canonical address form").
pub fn linear(gpa: Gpa) -> u64 {
    ((gpa.0 << 16) as i64 >> 16) as u64
}

/// A KVM with one vCPU.
pub struct RealCpu {
    vcpu: VcpuFd,
    vm: VmFd,
    arena: Arc<Arena>,
    /// The system registers at CPL 3.
    user: kvm_sregs,
    watchdog: Watchdog,
    /// The CPU has pages of 1 GiB. A KVM that shadows the tables may hide them from its guests.
    pub has_1g_pages: bool,
}

impl RealCpu {
    /// Makes a CPU on the page tables at `root`, which map the system pages. Writes their contents.
    pub fn new(arena: &Arc<Arena>, root: Hpa) -> Result<RealCpu, Trouble> {
        let kvm = tried("open /dev/kvm", Kvm::new())?;
        let vm = tried("create a VM", kvm.create_vm())?;
        let memory = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: BASE,
            memory_size: SIZE_BYTES,
            userspace_addr: arena.pointer(Hpa(BASE)) as u64,
        };
        // SAFETY: the arena is mapped for as long as `self`, which drops the VM before it, and all
        // access to it is by atomics.
        tried("set the memory", unsafe { vm.set_user_memory_region(memory) })?;
        let vcpu = tried("create a vCPU", vm.create_vcpu(0))?;
        let cpuid = tried("get the CPUID", kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES))?;
        tried("set the CPUID", vcpu.set_cpuid2(&cpuid))?;
        let is_extended = |leaf: &&kvm_cpuid_entry2| leaf.function == EXTENDED_FEATURES;
        let features = cpuid.as_slice().iter().find(is_extended).map_or(0, |leaf| leaf.edx);
        let needed = FEATURE_LONG_MODE | FEATURE_NX;
        if features & needed != needed {
            return Err(Trouble("this KVM's guests have no long mode or no NX".into()));
        }
        write_system_pages(arena);
        let user = user_sregs(tried("get the system registers", vcpu.get_sregs())?, root);
        let has_1g_pages = features & FEATURE_1G_PAGES != 0;
        Ok(RealCpu { vcpu, vm, arena: Arc::clone(arena), user, watchdog: Watchdog::new(), has_1g_pages })
    }

    /// Uses the page tables at `root` from the next access on.
    pub fn set_root(&mut self, root: Hpa) -> Result<(), Trouble> {
        self.user.cr3 = root.0;
        self.flush()
    }

    /// Does `access` at `gpa`. [`Access::Execute`] calls `gpa`, which must contain [`RETURN`] if it
    /// is mapped.
    pub fn access(&mut self, gpa: Gpa, access: Access, value: u64) -> Result<Done, Trouble> {
        let (program, first_bytes) = match access {
            Access::Read => (SYSTEM_GPA + PROGRAMS, 3),
            Access::Write => (SYSTEM_GPA + PROGRAMS + PROGRAM_BYTES, 3),
            Access::Execute | Access::ExecuteUser => (SYSTEM_GPA + PROGRAMS + 2 * PROGRAM_BYTES, 2),
        };
        let regs = kvm_regs {
            rip: program,
            rsp: SYSTEM_GPA + USER_STACK_END,
            rax: linear(gpa),
            rcx: value,
            rdx: EXIT_GPA,
            rflags: RFLAGS,
            ..kvm_regs::default()
        };
        let port = self.enter(&self.user.clone(), &regs)?;

        let (rsp, value) = tried("get the registers", self.vcpu.get_regs()).map(|regs| (regs.rsp, regs.rcx))?;
        let cr2 = tried("get the system registers", self.vcpu.get_sregs())?.cr2;
        // What a page fault pushes, from its low end: error code, RIP, CS, RFLAGS, RSP, SS.
        const FRAME: u64 = KERNEL_STACK_END - 6 * 8;
        let (code, rip) = (self.arena.get(system_hpa(FRAME)), self.arena.get(system_hpa(FRAME + 8)));
        let is_page_fault = port == PAGE_FAULT && rsp == SYSTEM_GPA + FRAME;
        let faulting = if access == Access::Execute { linear(gpa) } else { program };
        if is_page_fault && rip == program + first_bytes && cr2 == EXIT_GPA {
            Ok(Done::Completed(value))
        } else if is_page_fault && rip == faulting {
            Ok(Done::PageFault { cr2, code })
        } else {
            let stack: [u64; 6] = std::array::from_fn(|word| self.arena.get(system_hpa(FRAME + 8 * word as u64)));
            Err(Trouble(format!(
                "{access:?} of {gpa}: exception {port}, CR2 {cr2:#x}, RSP {rsp:#x}, top of the stack {stack:#x?}"
            )))
        }
    }

    /// Drops all translations.
    pub fn flush(&mut self) -> Result<(), Trouble> {
        let scratch = |memory_size| kvm_userspace_memory_region {
            slot: 1,
            flags: 0,
            guest_phys_addr: 0,
            memory_size,
            userspace_addr: self.arena.pointer(Hpa(BASE)) as u64,
        };
        for size_bytes in [PAGE_SIZE, 0] {
            // SAFETY: as in `new`; no page table maps it.
            tried("make and delete a slot", unsafe { self.vm.set_user_memory_region(scratch(size_bytes)) })?;
        }
        let mut kernel = self.user;
        (kernel.cs, kernel.ss) = (code_segment(KERNEL_CODE), data_segment(KERNEL_DATA));
        let regs = kvm_regs {
            rip: SYSTEM_GPA + FLUSH,
            rsp: SYSTEM_GPA + KERNEL_STACK_END,
            rax: self.user.cr3,
            rflags: RFLAGS,
            ..kvm_regs::default()
        };
        match self.enter(&kernel, &regs)? {
            FLUSHED => Ok(()),
            port => Err(Trouble(format!("loading CR3 ended with exception {port}"))),
        }
    }

    /// Runs until the guest writes to a port, and returns the port.
    fn enter(&mut self, sregs: &kvm_sregs, regs: &kvm_regs) -> Result<u8, Trouble> {
        tried("set the system registers", self.vcpu.set_sregs(sregs))?;
        tried("set the registers", self.vcpu.set_regs(regs))?;
        loop {
            let exit = match self.vcpu.run() {
                Ok(VcpuExit::IoOut(port, _)) => return Ok(port as u8),
                Ok(other) => format!("{other:?}"),
                Err(error) if error.errno() == libc::EINTR && !self.watchdog.has_expired() => continue,
                Err(error) if error.errno() == libc::EINTR => "it ran for too long".into(),
                Err(error) => error.to_string(),
            };
            let rip = self.vcpu.get_regs().map_or(0, |regs| regs.rip);
            return Err(Trouble(format!("run the guest: {exit}, at {rip:#x}")));
        }
    }
}

/// Makes the vCPU's thread leave a guest that runs for too long.
struct Watchdog {
    has_expired: Arc<AtomicBool>,
    /// Dropped first: that ends the thread.
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches the calling thread.
    fn new() -> Watchdog {
        extern "C" fn nothing(_signal: libc::c_int) {}
        // SAFETY: the handler does nothing, and no other test of this program uses the signal.
        // `signal` would restart the system call.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as *const () as usize;
            libc::sigaction(LEAVE_SIGNAL, &action, std::ptr::null_mut());
        }
        // SAFETY: always allowed.
        let watched = unsafe { libc::pthread_self() };
        let has_expired = Arc::new(AtomicBool::new(false));
        let (alive, dead) = channel();
        let flag = Arc::clone(&has_expired);
        let thread = std::thread::spawn(move || watch(&dead, watched, &flag));
        Watchdog { has_expired, alive: Some(alive), thread: Some(thread) }
    }

    fn has_expired(&self) -> bool {
        self.has_expired.load(Ordering::Relaxed)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.alive.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends signals when the time is over, until the watchdog is dropped. One signal is not enough: it
/// may arrive just before the thread enters the guest.
fn watch(dead: &Receiver<()>, watched: libc::pthread_t, has_expired: &AtomicBool) {
    let mut wait = TIME_LIMIT;
    while dead.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        has_expired.store(true, Ordering::Relaxed);
        // SAFETY: the thread drops the watchdog, and waits for this one, before it ends.
        unsafe { libc::pthread_kill(watched, LEAVE_SIGNAL) };
        wait = Duration::from_millis(10);
    }
}

/// A 64-bit code segment, accessed, of the selector's privilege level.
fn code_segment(selector: u16) -> kvm_segment {
    kvm_segment { type_: 0xb, l: 1, ..data_segment(selector) }
}

/// A writable data segment, likewise.
fn data_segment(selector: u16) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_: 0x3,
        present: 1,
        dpl: selector as u8 & 3,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    }
}

/// Long mode at CPL 3 with the page tables at `root`.
fn user_sregs(initial: kvm_sregs, root: Hpa) -> kvm_sregs {
    let data = data_segment(USER_DATA);
    let mut sregs = kvm_sregs {
        cs: code_segment(USER_CODE),
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        // A busy TSS of 64 bits.
        tr: kvm_segment {
            base: SYSTEM_GPA + TSS,
            limit: 0x67,
            selector: TASK,
            type_: 0xb,
            present: 1,
            ..kvm_segment::default()
        },
        cr0: CR0,
        cr3: root.0,
        cr4: CR4_PAE,
        efer: EFER_LME | EFER_LMA | EFER_NXE,
        ..initial
    };
    (sregs.gdt.base, sregs.gdt.limit) = (SYSTEM_GPA + GDT, 7 * 8 - 1);
    (sregs.idt.base, sregs.idt.limit) = (SYSTEM_GPA + IDT, (NR_VECTORS * 16 - 1) as u16);
    sregs
}

/// Writes programs and descriptors.
fn write_system_pages(arena: &Arena) {
    let words = |offset: u64, words: &[u64]| {
        for (index, &word) in words.iter().enumerate() {
            arena.set(system_hpa(offset + 8 * index as u64), word);
        }
    };
    for (index, program) in [&READ[..], &WRITE, &EXECUTE].into_iter().enumerate() {
        arena.copy(system_hpa(PROGRAMS + PROGRAM_BYTES * index as u64), program);
    }
    // Accessed bits are set, so that no load of a segment has to.
    let tss = SYSTEM_GPA + TSS;
    let tss_low = 0x67 | (tss & 0xff_ffff) << 16 | 0x8b << 40 | (tss >> 24 & 0xff) << 56;
    words(
        GDT,
        &[
            0,
            0x00af_9b00_0000_ffff, // code, DPL 0, long
            0x00cf_9300_0000_ffff, // data, DPL 0
            0x00cf_f300_0000_ffff, // data, DPL 3
            0x00af_fb00_0000_ffff, // code, DPL 3, long
            tss_low,
            tss >> 32,
        ],
    );
    // RSP0 is at byte 4; no I/O permission map (its offset, in the last two bytes, is the limit).
    let rsp0 = SYSTEM_GPA + KERNEL_STACK_END;
    words(TSS, &[rsp0 << 32, rsp0 >> 32]);
    arena.set(system_hpa(TSS + 0x60), 0x68 << 48);
    for vector in 0..NR_VECTORS {
        let handler = SYSTEM_GPA + HANDLERS + vector * HANDLER_BYTES;
        // Present, DPL 0, a 64-bit interrupt gate.
        let low = handler & 0xffff | u64::from(KERNEL_CODE) << 16 | 0x8e << 40 | (handler >> 16 & 0xffff) << 48;
        words(IDT + 16 * vector, &[low, handler >> 32]);
        // out vector, al; hlt
        arena.copy(system_hpa(HANDLERS + vector * HANDLER_BYTES), &[0xe6, vector as u8, 0xf4]);
    }
    // mov cr3, rax; out FLUSHED, al; hlt
    arena.copy(system_hpa(FLUSH), &[0x0f, 0x22, 0xd8, 0xe6, FLUSHED, 0xf4]);
}
