//! Hypercalls: what the program tells the hypervisor below the guest's kernel.
//!
//! A process makes them itself, without the guest's kernel. So the instruction is one that exits to
//! the hypervisor in user mode, too, which those that an architecture has for hypercalls mostly do
//! not (`hvc` is undefined there, and `ecall` calls the guest's kernel):
//!
//! | | instruction | code | arguments | answer |
//! |---|---|---|---|---|
//! | x86-64 | `vmmcall`, on Intel's CPUs `vmcall` | `rax` | `rbx`, `rcx` | `rax` |
//! | Arm | `dc zva`, which `HCR_EL2.TDZ` traps | `x0` | `x1`, `x2` | `x0` |
//! | RISC-V | `hfence.gvma`: a virtual-instruction exception | `a0` | `a1`, `a2` | `a0` |
//!
//! The answer 0 means that it was understood. Where there is no hypervisor, the instruction is an
//! invalid one, and the process ends by SIGILL; on Arm it zeroes memory that nothing uses, and the
//! answer is the code.
#![expect(unsafe_code, reason = "an instruction that Rust has no name for")]

use std::arch::asm;

/// The upper half of the code: "slat".
const MAGIC: u64 = 0x736c_6174_0000_0000;

/// What is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hypercall {
    /// User space runs.
    Up { cpus: u64 },
    /// A round is done; pages that were verified until now.
    Round { number: u64, pages: u64 },
    /// All is done, and everything was as it should be.
    Done { rounds: u64, pages: u64 },
    /// A page had another content; its address, and its number.
    Failed { address: u64, page: u64 },
}

impl Hypercall {
    /// The code and both arguments.
    fn registers(self) -> [u64; 3] {
        let [code, first, second] = match self {
            Hypercall::Up { cpus } => [0, cpus, 0],
            Hypercall::Round { number, pages } => [1, number, pages],
            Hypercall::Done { rounds, pages } => [2, rounds, pages],
            Hypercall::Failed { address, page } => [3, address, page],
        };
        [MAGIC | code, first, second]
    }
}

/// Whether hypercalls are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Hypercalls {
    On,
    Off,
}

impl Hypercalls {
    /// Makes the hypercall and returns the answer, which is 0 without hypercalls.
    pub(crate) fn make(self, hypercall: Hypercall) -> u64 {
        match self {
            Hypercalls::On => call(hypercall.registers()),
            Hypercalls::Off => 0,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn call([mut rax, rbx, rcx]: [u64; 3]) -> u64 {
    /// EBX of CPUID, leaf 0, of Intel's CPUs: the begin of "GenuineIntel".
    const INTEL: u32 = u32::from_le_bytes(*b"Genu");
    macro_rules! call {
        ($instruction:literal) => {
            asm!(
                "xchg {saved}, rbx",
                $instruction,
                "xchg {saved}, rbx",
                saved = inout(reg) rbx => _,
                inout("rax") rax,
                in("rcx") rcx,
                options(nostack),
            )
        };
    }
    let is_intel = std::arch::x86_64::__cpuid(0).ebx == INTEL;
    // SAFETY: the hypervisor changes no register but `rax`, and no memory of this process. `rbx` is
    // the compiler's own: it is put back behind the instruction.
    unsafe { if is_intel { call!("vmcall") } else { call!("vmmcall") } };
    rax
}

#[cfg(target_arch = "aarch64")]
fn call([mut x0, x1, x2]: [u64; 3]) -> u64 {
    /// What the instruction zeroes where nothing traps it: at most this much, aligned to its size
    /// (Arm Architecture Reference Manual, DCZID_EL0: BS is at most 9, in words).
    #[repr(align(2048))]
    struct Block([u8; 2048]);
    let mut block = Block([0; 2048]);
    // SAFETY: the hypervisor changes no register but `x0`, and no memory of this process. Without a
    // hypervisor the instruction zeroes at most the block.
    unsafe {
        asm!(
            "dc zva, {block}",
            block = in(reg) block.0.as_mut_ptr(),
            inout("x0") x0,
            in("x1") x1,
            in("x2") x2,
            options(nostack),
        );
    }
    x0
}

#[cfg(target_arch = "riscv64")]
fn call([mut a0, a1, a2]: [u64; 3]) -> u64 {
    // SAFETY: the hypervisor changes no register but `a0`, and no memory of this process. In user
    // mode the instruction itself (`hfence.gvma x0, x0`, which the assembler knows for CPUs with the
    // hypervisor extension alone) does nothing but trap.
    unsafe {
        asm!(
            ".insn r 0x73, 0, 0x31, x0, x0, x0",
            inout("a0") a0,
            in("a1") a1,
            in("a2") a2,
            options(nostack),
        );
    }
    a0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_those_of_the_protocol() {
        assert_eq!(Hypercall::Up { cpus: 4 }.registers(), [0x736c_6174_0000_0000, 4, 0]);
        assert_eq!(Hypercall::Round { number: 2, pages: 9 }.registers(), [0x736c_6174_0000_0001, 2, 9]);
        assert_eq!(Hypercall::Done { rounds: 3, pages: 9 }.registers(), [0x736c_6174_0000_0002, 3, 9]);
        assert_eq!(Hypercall::Failed { address: 0x1000, page: 7 }.registers(), [0x736c_6174_0000_0003, 0x1000, 7]);
    }

    #[test]
    fn without_hypercalls_none_is_made() {
        assert_eq!(Hypercalls::Off.make(Hypercall::Up { cpus: 1 }), 0);
    }
}
