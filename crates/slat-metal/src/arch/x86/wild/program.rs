//! The guest that runs wild: code of the image, in the guest, which uses no static variable,
//! allocates nothing and never panics. Each step follows from the last random number alone.
//!
//! An exception starts the program over at its next step ([`again`]): so most steps that the CPU or
//! the hypervisor refuses are not its end.

#![expect(unsafe_code, reason = "executes what no program should")]

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU64, Ordering};

use slat::Gpa;

use crate::private::{PRIVATE_BYTES, Private};
use crate::suite::guest::mix;

/// Where the guest has its private memory, above where the machine has the image.
pub const PRIVATE_START: Gpa = Gpa(0x18_0000_0000);
/// Memory that comes by faults, and its bytes.
pub const RAM_START: Gpa = Gpa(0x10_0000_0000);
pub const RAM_BYTES: u64 = 4 << 20;

/// Offsets in the private memory: what guest and hypervisor exchange, the task state with the stack
/// of exceptions, the descriptor tables, and a page for random instructions.
pub const MAILBOX: u64 = Private::FREE;
pub const TASK: u64 = MAILBOX + 0x400;
pub const GDT: u64 = MAILBOX + 0x800;
pub const IDT: u64 = MAILBOX + 0x1000;
const CODE: u64 = MAILBOX + 0x2000;
/// The end of the stack of exceptions: half of the memory is the program's stack.
pub const EXCEPTION_STACK: u64 = PRIVATE_BYTES / 2;

/// What the guest and the hypervisor exchange.
#[derive(Debug)]
#[repr(C)]
pub struct Mailbox {
    /// The state of the random numbers.
    pub random: AtomicU64,
    /// Steps of this life.
    pub nr_steps: AtomicU64,
}

/// Registers that systems have, from which half of the numbers are: the clock, the controller's base,
/// memory types, system calls, and those of AMD's virtualization.
const MSRS: [u32; 16] = [
    0x10,
    0x1b,
    0x174,
    0x1d9,
    0x200,
    0x277,
    0x2ff,
    0x802,
    0x830,
    0xc000_0080,
    0xc000_0081,
    0xc000_0082,
    0xc000_0101,
    0xc001_0010,
    0xc001_0114,
    0xc001_0117,
];

/// An exception comes here: the program goes on with its next step, on a stack that is as at first.
///
/// # Safety
/// Entered in the guest alone.
#[unsafe(naked)]
pub unsafe extern "C" fn again() -> ! {
    naked_asm!(
        "mov rdi, {mailbox}",
        "mov rsp, {stack}",
        "cld",
        "jmp {main}",
        mailbox = const PRIVATE_START.0 + MAILBOX,
        stack = const PRIVATE_START.0 + PRIVATE_BYTES - 8,
        main = sym main,
    )
}

/// Runs wild.
///
/// # Safety
/// It is entered in the guest alone.
pub unsafe extern "C" fn main(mailbox: &Mailbox) -> ! {
    loop {
        let random = mailbox.random.load(Ordering::Relaxed).wrapping_add(0x9e37_79b9_7f4a_7c15);
        mailbox.random.store(random, Ordering::Relaxed);
        mailbox.nr_steps.store(mailbox.nr_steps.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let (number, value) = (mix(random), mix(!random));
        // SAFETY: in the guest, whose hypervisor answers for what it can do.
        unsafe { step(number, value) };
    }
}

/// One step.
///
/// # Safety
/// In the guest alone.
unsafe fn step(number: u64, value: u64) {
    let msr = if number & 1 << 32 != 0 { MSRS[(number >> 40) as usize % 16] } else { value as u32 };
    let port = (value >> 16) as u16;
    let (low, high) = (value as u32, (value >> 32) as u32);
    // SAFETY: as the caller promises.
    unsafe {
        match number % 16 {
            0 => asm!("rdmsr", in("ecx") msr, out("eax") _, out("edx") _),
            1 => asm!("wrmsr", in("ecx") msr, in("eax") low, in("edx") high),
            2 => asm!("push rbx", "cpuid", "pop rbx", inout("eax") low => _, inout("ecx") high => _, out("edx") _),
            3 => match number >> 60 & 3 {
                0 => asm!("in al, dx", in("dx") port, out("al") _),
                1 => asm!("in ax, dx", in("dx") port, out("ax") _),
                _ => asm!("in eax, dx", in("dx") port, out("eax") _),
            },
            4 => match number >> 60 & 3 {
                0 => asm!("out dx, al", in("dx") port, in("al") low as u8),
                1 => asm!("out dx, ax", in("dx") port, in("ax") low as u16),
                _ => asm!("out dx, eax", in("dx") port, in("eax") low),
            },
            // Most such bits end the life.
            5 if number >> 62 == 0 => {
                asm!("mov rax, cr4", "xor rax, {}", "mov cr4, rax", in(reg) 1_u64 << (value & 31), out("rax") _)
            }
            6 if number >> 62 == 0 => {
                asm!("mov rax, cr0", "xor rax, {}", "mov cr0, rax", in(reg) 1_u64 << (value & 31), out("rax") _)
            }
            // Now and then any root; mostly its own, which drops what the CPU has kept.
            7 if number >> 60 == 0 => asm!("mov cr3, {}", in(reg) value & 0xff_ffff_ffff),
            7 => asm!("mov rax, cr3", "mov cr3, rax", out("rax") _),
            8 => asm!("mov dr0, {0}", "mov dr7, {1}", in(reg) value, in(reg) value & 0xffff_0fff),
            9 => write_tables(number, value),
            5 | 6 | 10 | 11 | 12 => {
                // The guest's own tables map 512 GiB to themselves, most of it without memory. The
                // image is in the first MiBs.
                let (start, among) = match number >> 40 & 3 {
                    0 => (0, 1 << 39),
                    1 => (0, 8 << 20),
                    _ => (RAM_START.0, RAM_BYTES),
                };
                let place = (start + ((value % among) & !7)) as *mut u64;
                if number & 1 << 33 != 0 { place.write_volatile(value) } else { _ = place.read_volatile() }
            }
            13 => virtualization(number, value),
            _ => execute(number),
        }
    }
}

/// Writes a word of its own page tables: anything, or an entry that may be used.
///
/// # Safety
/// As for [`step`].
unsafe fn write_tables(number: u64, value: u64) {
    let word = PRIVATE_START.0 + (number >> 40) % 1024 * 8;
    let entry = match number >> 60 & 3 {
        0 => value,
        1 => value & 0xff_c000_0000 | 0xe3,
        2 => (PRIVATE_START.0 + ((value % PRIVATE_BYTES) & !0xfff)) | 0x27,
        _ => (RAM_START.0 + ((value % RAM_BYTES) & !0xfff)) | value & 0x1ff,
    };
    // SAFETY: as the caller promises.
    unsafe {
        (word as *mut u64).write_volatile(entry);
        asm!("invlpg [{}]", in(reg) value & 0x7f_ffff_ffff);
    }
}

/// What the hypervisor alone has, and what it asks for.
///
/// # Safety
/// As for [`step`].
unsafe fn virtualization(number: u64, value: u64) {
    // SAFETY: as the caller promises.
    unsafe {
        match number >> 40 & 15 {
            0 => asm!("vmrun rax", in("rax") value & !0xfff),
            1 => asm!("vmload rax", in("rax") value & !0xfff),
            2 => asm!("vmsave rax", in("rax") value & !0xfff),
            3 => asm!("clgi"),
            4 => asm!("stgi"),
            5 => asm!("invlpga rax, ecx", in("rax") value, in("ecx") value as u32),
            6 => asm!("skinit eax", in("eax") value as u32),
            7 => asm!("vmmcall", inout("rax") value => _),
            8 => asm!("vmcall"),
            9 => asm!("monitor", in("rax") value, in("ecx") 0, in("edx") 0),
            10 => asm!("mwait", in("eax") 0, in("ecx") 0),
            11 => asm!("xsetbv", in("ecx") value as u32, in("eax") value as u32, in("edx") 0),
            12 => asm!("invd"),
            13 => asm!("wbinvd"),
            14 => asm!("rsm"),
            _ => asm!("lidt [rsp]", "lgdt [rsp]"),
        }
    }
}

/// Executes random bytes.
///
/// # Safety
/// As for [`step`].
unsafe fn execute(number: u64) {
    let code = PRIVATE_START.0 + CODE;
    for index in 0..8 {
        // SAFETY: as the caller promises.
        unsafe { ((code + 8 * index) as *mut u64).write_volatile(mix(number ^ index << 50)) };
    }
    // A return, if it comes so far.
    // SAFETY: as the caller promises.
    unsafe {
        ((code + 64) as *mut u64).write_volatile(0xc3);
        asm!("call {}", in(reg) code, out("rax") _, out("rcx") _, out("rdx") _, out("rsi") _, out("rdi") _,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
}
