//! What a guest's CPU has in common on AMD's virtualization ([`svm`](super::svm)) and on Intel's
//! ([`vmx`](super::vmx)): its registers, and the exits that both have.

use super::svm::vmcb::Segment;

/// CR0 at a [`Start`](crate::virtual_cpu::Start): paging, write protection, NE, ET, MP, protection.
pub(crate) const START_CR0: u64 = 0x8001_0033;
/// CR4 at a [`Start`](crate::virtual_cpu::Start): PAE, OSFXSR, OSXMMEXCPT.
pub(crate) const START_CR4: u64 = 0x620;

/// EFER.LMA, which the CPU sets.
pub(crate) const EFER_LMA: u64 = 1 << 10;

/// How a guest begins: its registers but for the general ones.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "registers, by their names")]
pub struct State {
    pub cs: Segment,
    /// All other segments of code that runs.
    pub data: Segment,
    pub tr: Segment,
    pub ldtr: Segment,
    pub gdtr: Segment,
    pub idtr: Segment,
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    pub rip: u64,
    pub rsp: u64,
}

impl State {
    /// CS, SS, DS, ES, FS, GS, TR, LDTR.
    pub fn segments(&self) -> [Segment; 8] {
        let State { cs, data, tr, ldtr, .. } = *self;
        [cs, data, data, data, data, data, tr, ldtr]
    }
}

/// The instruction by which a guest asks its hypervisor for something. Each CPU has one of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Hypercall {
    /// VMMCALL, AMD's.
    Vmmcall = 0,
    /// VMCALL, Intel's.
    Vmcall = 1,
}

impl Hypercall {
    /// Bytes of each of them.
    pub const BYTES: u64 = 3;
}

/// The general registers but for `rsp`, and the floating-point state. With SVM the guest's `rax` is
/// in the control block instead.
#[derive(Debug)]
#[repr(C, align(16))]
#[expect(missing_docs, reason = "registers, by their names")]
pub struct Registers {
    pub(crate) fpu: [u8; 512],
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rbp: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r11: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
}

impl Registers {
    /// As after INIT: zeros, and the floating-point unit as FNINIT leaves it, with all exceptions
    /// of SSE masked.
    pub(crate) fn new() -> Registers {
        let mut fpu = [0; 512];
        fpu[..2].copy_from_slice(&0x037f_u16.to_le_bytes());
        fpu[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        let zero = 0;
        Registers {
            fpu,
            rax: zero,
            rbx: zero,
            rcx: zero,
            rdx: zero,
            rsi: zero,
            rdi: zero,
            rbp: zero,
            r8: zero,
            r9: zero,
            r10: zero,
            r11: zero,
            r12: zero,
            r13: zero,
            r14: zero,
            r15: zero,
        }
    }
}

/// Instructions for [`Registers`] at the address in `$base`, as parts of a [`registers_asm`].
/// `rax`, `rdx` and `rdi`, one of which has the address, are for the caller.
macro_rules! move_common {
    (load from $base:literal) => {
        concat!(
            "fxrstor64 [",
            $base,
            " + {fpu}]\n",
            "mov rbx, [",
            $base,
            " + {rbx}]\n",
            "mov rcx, [",
            $base,
            " + {rcx}]\n",
            "mov rsi, [",
            $base,
            " + {rsi}]\n",
            "mov rbp, [",
            $base,
            " + {rbp}]\n",
            "mov r8, [",
            $base,
            " + {r8}]\n",
            "mov r9, [",
            $base,
            " + {r9}]\n",
            "mov r10, [",
            $base,
            " + {r10}]\n",
            "mov r11, [",
            $base,
            " + {r11}]\n",
            "mov r12, [",
            $base,
            " + {r12}]\n",
            "mov r13, [",
            $base,
            " + {r13}]\n",
            "mov r14, [",
            $base,
            " + {r14}]\n",
            "mov r15, [",
            $base,
            " + {r15}]"
        )
    };
    (store to $base:literal) => {
        concat!(
            "mov [",
            $base,
            " + {rbx}], rbx\n",
            "mov [",
            $base,
            " + {rcx}], rcx\n",
            "mov [",
            $base,
            " + {rsi}], rsi\n",
            "mov [",
            $base,
            " + {rbp}], rbp\n",
            "mov [",
            $base,
            " + {r8}], r8\n",
            "mov [",
            $base,
            " + {r9}], r9\n",
            "mov [",
            $base,
            " + {r10}], r10\n",
            "mov [",
            $base,
            " + {r11}], r11\n",
            "mov [",
            $base,
            " + {r12}], r12\n",
            "mov [",
            $base,
            " + {r13}], r13\n",
            "mov [",
            $base,
            " + {r14}], r14\n",
            "mov [",
            $base,
            " + {r15}], r15\n",
            "fxsave64 [",
            $base,
            " + {fpu}]"
        )
    };
}

/// Assembly that has the places of all [`Registers`] as operands.
macro_rules! registers_asm {
    ($asm:ident: $($part:expr),+ $(; $($operand:tt)+)?) => {
        core::arch::$asm!(
            $($part,)+
            fpu = const core::mem::offset_of!($crate::arch::x86::registers::Registers, fpu),
            rbx = const core::mem::offset_of!($crate::arch::x86::registers::Registers, rbx),
            rcx = const core::mem::offset_of!($crate::arch::x86::registers::Registers, rcx),
            rdx = const core::mem::offset_of!($crate::arch::x86::registers::Registers, rdx),
            rsi = const core::mem::offset_of!($crate::arch::x86::registers::Registers, rsi),
            rdi = const core::mem::offset_of!($crate::arch::x86::registers::Registers, rdi),
            rbp = const core::mem::offset_of!($crate::arch::x86::registers::Registers, rbp),
            r8 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r8),
            r9 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r9),
            r10 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r10),
            r11 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r11),
            r12 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r12),
            r13 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r13),
            r14 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r14),
            r15 = const core::mem::offset_of!($crate::arch::x86::registers::Registers, r15),
            $($($operand)+)?
        )
    };
}

/// What compiled code expects: SSE masks all exceptions, strings go upward. The word at the top of
/// the stack goes, and `rdx` changes.
macro_rules! as_code_expects {
    () => {
        "mov dword ptr [rsp], 0x1f80\nldmxcsr [rsp]\npop rdx\ncld"
    };
}
pub(crate) use {as_code_expects, move_common, registers_asm};

/// An exception that the hypervisor gives the guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// #UD.
    UndefinedOpcode,
    /// #GP(0).
    GeneralProtection,
}

impl Event {
    /// As bits 31:0 of SVM's EVENTINJ (AMD APM vol. 2, 15.20 "Event Injection"), whose error code
    /// is above them, and as VMX's VM-entry interruption information (Intel SDM vol. 3C, "VM-Entry
    /// Controls for Event Injection"), whose error code is another field. It is 0 for both.
    pub(crate) fn bits(self) -> u64 {
        const EXCEPTION: u64 = 3 << 8;
        match self {
            Event::UndefinedOpcode => EVENT_VALID | EXCEPTION | 6,
            Event::GeneralProtection => EVENT_VALID | EVENT_HAS_ERROR_CODE | EXCEPTION | 13,
        }
    }
}

/// There is an event.
pub(crate) const EVENT_VALID: u64 = 1 << 31;
/// It has an error code.
pub(crate) const EVENT_HAS_ERROR_CODE: u64 = 1 << 11;

/// Whether a port is read or written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// IN.
    In,
    /// OUT.
    Out,
}

/// Exits that x86 alone has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Trap {
    /// CPUID.
    Cpuid,
    /// RDMSR, of `rcx`.
    ReadMsr,
    /// WRMSR, of `rcx`.
    WriteMsr,
    /// An instruction that the guest does not have.
    Undefined,
    /// A port that the guest does not have.
    Port {
        /// Its number.
        port: u16,
        /// Read or written.
        direction: Direction,
        /// Bytes.
        size_bytes: u8,
        /// The address of the next instruction.
        next_rip: u64,
    },
}
